"""The stored results as tables in Markdown, so that no number in the documentation is typed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .harness import RESULTS, number, table_lines

GATHERED = ("gpu_h100",)  # put together from runs on a lent machine: no benchmark makes these


def markdown(names: Sequence[str], results: Path = RESULTS) -> str:
    """Every table and target of the stored results, and what they were measured on."""
    parts = []
    for name in names:
        stored = [path for path in stored_of(name, results) if path.exists()]
        for path in stored:
            title = " --only ".join(path.name.removesuffix(".json").split("."))
            parts.append(benchmark(title, json.loads(path.read_text())))
        if not stored:
            parts.append(f"## {name}\n\nNot stored: `python -m benchmarks {name}` measures it.")
    return "\n\n".join(parts)


def stored_of(name: str, results: Path = RESULTS) -> list[Path]:
    """The result of a benchmark, and those of its parts that were measured again by themselves."""
    parts = results.glob(f"{name}.*.json")
    proofless = (".quick.", ".rehearsal.")
    measured = (p for p in parts if not any(kind in p.name for kind in proofless))
    return [results / f"{name}.json", *sorted(measured)]


def benchmark(title: str, found: dict[str, Any]) -> str:
    """Every table and target of one result."""
    parts = [f"## {title}", _machine(found)]
    for table in found["tables"]:
        lines = table_lines(table, spread=True)
        parts.append(f"**{table['title']}**\n\n" + _table(lines))
    if found["targets"]:
        lines = [["target", "found", "allowed", ""]]
        for target in found["targets"]:
            bound = "≥" if target["limit"] < 0 else "≤"
            verdict = {True: "met", False: "**not met**", None: "not measured"}[target["met"]]
            unit = target["unit"] if target["unit"] in "x%" else f" {target['unit']}"
            limit = f"{bound} {number(abs(target['limit']))}{unit}"
            measured = "-" if target["found"] is None else number(target["found"]) + unit
            lines.append([target["what"], measured, limit, verdict])
        parts.append(_table(lines))
    parts += [f"Note: {note}" for note in found["notes"]]
    return "\n\n".join(parts)


def _machine(found: dict[str, Any]) -> str:
    machine, load, versions = found["machine"], found["load"], found["versions"]
    device = machine.get("device") or {}
    used = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    where = f", {device['file_system']} on {device['name']}" if device else ""
    return (
        f"`{found['command']}`, {found['time'][:10]}. {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['ram_gib']} GiB, {machine['system']} {machine['kernel']}{where}. {used}. "
        f"Other processes used {load['other_cpu_share']:.0%} of the CPUs meanwhile."
    )


def _table(lines: list[list[str]]) -> str:
    head, *rows = lines
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))
