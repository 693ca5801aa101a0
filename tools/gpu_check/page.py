"""Merge the results of all parts into one JSON and one page: gpu-check.json, gpu-check.md.

They are those of DIR/results, of one call or of several.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness import number
from benchmarks.report import benchmark

from . import parts
from .environment import ROOT

REHEARSAL = (
    "**REHEARSAL: all of this ran on the CPU, small. It shows that the programs run, and says "
    "nothing about a GPU.**"
)
DRAW = ROOT / "tools" / "draw_trace.py"
Rows = list[list[str]]


def write(out: Path) -> None:
    """Write both, and the pictures beside them."""
    found = merge(out / "results")
    (out / "gpu-check.json").write_text(json.dumps(found, indent=1) + "\n")
    pictures = draw(out)
    (out / "gpu-check.md").write_text(markdown(found, pictures))


def merge(results: Path) -> dict[str, Any]:
    """Return the results of all parts, those that are not there included."""
    found: dict[str, Any] = {"gpu_check": parts.VERSION, "environment": {}, "parts": {}}
    if (results / "environment.json").exists():
        found["environment"] = json.loads((results / "environment.json").read_text())
    for name, part in parts.PARTS.items():
        path = results / f"{name}.json"
        if path.exists():
            one = json.loads(path.read_text())
        else:
            why = "it was not asked for, or its result is not in results/"
            one = {"status": parts.NOT_RUN, "why": why, "seconds": 0, "result": None}
        found["parts"][name] = {"part": name, "about": part.about, **one}
    found["rehearsal"] = any(one.get("rehearsal") for one in found["parts"].values())
    return found


def draw(out: Path) -> dict[str, str]:
    """Draw the lanes of the profiler's traces. Returns what the page shows of each part."""
    drawn = {}
    for name in parts.PARTS:
        path, picture = out / "results" / f"{name}.json", out / f"{name}.svg"
        result = (path.exists() and json.loads(path.read_text()).get("result")) or {}
        if DRAW.exists() and any(key.startswith("lanes") for key in result.get("raw", {})):
            raw = out / "results" / f"{name}.result.json"
            raw.write_text(json.dumps(result))
            done = subprocess.run([sys.executable, str(DRAW), str(raw)], capture_output=True)
            raw.unlink()
            picture.write_bytes(done.stdout)
            said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            if done.returncode:
                drawn[name] = f"NOT DRAWN: {DRAW.name}: {said}"
            else:
                drawn[name] = f"![What the GPU and the trainer did]({picture.name})"
    return drawn


# --- the page -------------------------------------------------------------------------------------


def markdown(found: dict[str, Any], pictures: dict[str, str]) -> str:
    every = list(found["parts"].values())
    lines = [["part", "what it checks", "found", "", "s", "limit"]]
    for one in every:
        status = one["status"]
        shown = status if status in (parts.PASSED, parts.REHEARSED) else f"**{status}**"
        limit = number(round(one["limit_s"])) if "limit_s" in one else "-"
        seconds = number(round(one["seconds"]))
        why = one["why"]
        if one["part"] == "probe" and one["result"] and not why:
            why = _answer(one["result"]["engines"], one["result"]["device"])
        lines.append([one["part"], one["about"], shown, _cell(why), seconds, limit])
    blocks = ["# GPU check", REHEARSAL if found["rehearsal"] else "", _where(found), table(lines)]
    mixed = {bool(one["rehearsal"]) for one in every if "rehearsal" in one}
    if len(mixed) > 1:
        blocks.append("**Some parts are a rehearsal on the CPU, and some ran on a GPU.**")
    commits = sorted({one["commit"] for one in every if one.get("commit")})
    if len(commits) > 1:
        blocks.append(f"**The parts are of different commits: {', '.join(commits)}.**")
    blocks.append(_environment(found["environment"]))
    for name, one in found["parts"].items():
        if one["status"] != parts.NOT_RUN:
            blocks += [f"## {name}{' (REHEARSAL)' * one['rehearsal']}", *_part(name, one)]
            if name in pictures:
                blocks.append(_cell(pictures[name]))
    return "\n\n".join(filter(None, blocks)) + "\n"


def _where(found: dict[str, Any]) -> str:
    facts = (found["parts"]["probe"].get("result") or {}).get("facts") or {}
    if not facts:
        return "The machine is not known: the part `probe` has no result."
    gpu = f"{facts['gpu']}, driver {facts['driver']}"
    commit = found["parts"]["probe"]["commit"]
    if not commit:
        commit = f"not known, collected at {found['environment'].get('collected', '-')}"
    return (
        f"{'No GPU' if facts['gpu'] == 'none' else gpu}. torch {facts['torch']}, CUDA "
        f"{facts['cuda']}, {facts['cores']} cores, {facts['memory_gib']} GiB. "
        f"Commit {commit}. "
        f"{found['parts']['probe']['time']}."
    )


def _environment(facts: dict[str, Any]) -> str:
    if not facts:
        return ""
    core = facts["core"]
    lines = [["", ""], ["Python", f"{facts['python']}, {facts['executable']}"]]
    if "collected" in facts:
        lines.append(["collected", facts["collected"]])
    lines.append(["core", ("" if core["there"] else "**NOT THERE** ") + _cell(core["what"])])
    lines += [[name, _cell(done)] for name, done in facts.get("wheels", {}).items()]
    return "## Environment\n\n" + table(lines)


def _part(name: str, one: dict[str, Any]) -> list[str]:
    """Return the blocks of one part."""
    result, blocks = one["result"], []
    if one["status"] in (parts.FAILED, parts.OVER):
        blocks.append(f"**{one['status']}**: {_cell(one['why'])}")
    if result is None:
        return [*blocks, f"`{' '.join(one['command'])}`", _quoted(one["tail"])]
    if name == "probe":
        return blocks + probe(result)
    if name == "tests":
        blocks.append(", ".join(f"{count} {what}" for what, count in result["counts"].items()))
        rows = [[f"`{case}`", _cell(why)] for case, why in result["failed"]]
        blocks += [table([["failed", "why"], *rows])] if rows else []
        skipped = Counter(_cell(why) for _, why in result["skipped"])
        rows = [[why, number(count)] for why, count in skipped.items()]
        return blocks + [table([["skipped, since", "tests"], *rows])] * bool(rows)
    return [*blocks, benchmark(name, result).partition("\n\n")[2]]  # without its own heading


# --- the probe ------------------------------------------------------------------------------------


def probe(result: dict[str, Any]) -> list[str]:
    """Return the tables of what the probe found."""
    facts = result["facts"].items()
    lines = [[name.replace("_", " "), _cell(_shown(value))] for name, value in facts]
    blocks = [table([["machine", ""], *lines])]
    blocks.append(_answer(result["engines"], result["device"]))
    for engine in dict.fromkeys(one["engine"] for one in result["engines"]):
        found = [one for one in result["engines"] if one["engine"] == engine]
        mark = "" if result["device"] == "cuda" else " (REHEARSAL)"
        blocks.append(f"**{engine}**{mark}: {result['about'].get(engine, '')}")
        if any("kind" in one for one in found):
            blocks.append(table(_kinds(found)))
    if result["formulas"]:
        head = ["normalisation", "ms to bfloat16", "not as on the CPU: bfloat16", "float32", "most"]
        lines = [head]
        for one in result["formulas"]:
            if "why" in one:
                lines.append([f"{one['name']}: {_cell(one['why'])}", "-", "-", "-", "-"])
            else:
                shares = [f"{one[f'unequal_{dtype}']:.3%}" for dtype in ("bfloat16", "float32")]
                cells = [one["name"], f"{one['ms']:.3f}", *shares, f"{one['largest']:.2g}"]
                lines.append(cells)
        blocks.append(table(lines))
    return blocks


def _kinds(found: list[dict[str, Any]]) -> Rows:
    head = ["JPEG", "says it can", "decoded", "mean difference", "largest", "images/s", ""]
    lines = [head]
    for one in found:
        if "kind" in one:
            says = {True: "yes", False: "no", None: "-"}[one.get("says")]
            decoded = "yes" if one.get("decodes") else "**no**"
            mean, largest, rate = (one.get(key) for key in ("mean", "largest", "images_per_s"))
            cells = [number(mean) if mean is not None else "-", number(largest), number(rate)]
            lines.append([one["kind"], says, decoded, *cells, _cell(one.get("why", ""))])
    return lines


def _answer(engines: list[dict[str, Any]], device: str) -> str:
    """Answer whether the hardware engine takes restart markers."""
    question = "Does the JPEG hardware take restart markers?"
    if device != "cuda":
        return f"{question} Not asked: this is a rehearsal."
    said = []
    for engine in ("nvJPEG hardware", "nvImageCodec hardware"):
        looked = [one for one in engines if one["engine"] == engine]
        found = [one for one in looked if "restart" in one.get("kind", "")]
        if found:
            taken = sum(bool(one.get("decodes")) for one in found)
            verdict = "yes" if taken == len(found) else "in part" if taken else "no"
            said.append(f"{engine}: **{verdict}** ({taken} of {len(found)} kinds)")
    answer = "; ".join(said) or "not known, no decoder of the hardware started here"
    return f"{question} {answer}."


def table(lines: Rows) -> str:
    """Return a table in Markdown, its heading first. Columns of numbers stand right."""
    head, *rows = lines
    columns = list(zip(*rows, strict=True)) or [()] * len(head)
    numbers = [all(re.fullmatch(r"-|[0-9.,e%+-]+", cell) for cell in one) for one in columns]
    rule = ["---:" if one else "---" for one in numbers]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _cell(text: str) -> str:
    """Return text that fits into one cell of a table."""
    return " ".join(str(text).replace("|", "\\|").split())


def _quoted(text: str) -> str:
    return "```\n" + text.replace("```", "'''").strip()[-2_000:] + "\n```"
