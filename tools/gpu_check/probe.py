"""Ask a machine what it is, and what its GPU decodes: the part `probe`.

    python -m tools.gpu_check.probe --out FILE [--rehearse] [--within SECONDS]

Each question is a process of its own, so that a decoder that crashes or hangs ends neither the
others nor this one. After a crash, the kinds of JPEG that were left are asked for anew. What is
known is stored after each question: first what the machine is, then the decoders, the GPU's own
engine before all others; last the candidates for a normalisation, which take torch long to compile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import Deadline, write_json

from . import limited

FACTS_S, FORMULAS_S, ENGINE_S = 90.0, 120.0, 45.0
WHOLE_S = 220.0  # what comes later is left out
ENGINES = (
    *("nvJPEG hardware", "nvImageCodec hardware", "torchvision", "torchcodec"),
    *("nvJPEG on the GPU's cores", "nvImageCodec on the GPU's cores"),
)
Lines = list[dict[str, Any]]


def ask(words: list[str], limit_s: float, scratch: Path) -> tuple[Lines, str]:
    """Run a module of this package. Returns the lines of JSON that it printed, and why it ended.

    What libraries leave in the temporary directory, such as torch's compiler, is left in scratch.
    """
    out = scratch / "out"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", *words]
    env = os.environ | {"TMPDIR": str(scratch)}
    ended = limited.run(command, limit_s, scratch / "log", stdout=out, grace_s=1, env=env)
    lines = []
    for line in out.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue  # of a library; or the last one, of a process that was killed
    why = ended.why
    if why and (last := [x for x in ended.tail.splitlines() if x.strip()]):
        why = f"{why}: {last[-1][:200]}"
    return [line for line in lines if isinstance(line, dict)], why


def ask_engine(
    name: str,
    files: list[Path],
    run: Callable[[list[str]], tuple[Lines, str]],
    left_s: Callable[[], float],
) -> tuple[str, Lines]:
    """Ask a decoder for each file. Returns what it is, and a finding for each kind.

    run: starts the decoder's process for these files, see `ask`.
    """
    about = ""
    found: Lines = []
    while files:
        if left_s() <= 0:
            return about, found + [_not_asked(name, file, "no time was left") for file in files]
        lines, why = run([str(file) for file in files])
        first = lines[0] if lines else {}
        if "missing" in first:
            return f"not here: {first['missing']}", found
        about = first.get("about", about)
        looked = [line for line in lines if "kind" in line]
        found += [{"engine": name, **line} for line in looked]
        files = files[len(looked) :]
        if "about" not in first:
            return f"it does not start: {why or 'it printed nothing'}", found
        if files and not (why and looked and "exit code 3" in why):
            # The one that it was at. Exit code 3 says that it had reported that one already.
            found.append(_not_asked(name, files[0], why or "it stopped without a word"))
            files = files[1:]
    return about, found


def _not_asked(engine: str, file: Path, why: str) -> dict[str, Any]:
    return {"engine": engine, "kind": file.stem, "says": None, "decodes": False, "why": why}


def probe(rehearse: bool, scratch: Path, out: Path, deadline: Deadline) -> None:
    """Ask all, and store what is known."""
    device = "cpu" if rehearse else "cuda"
    failed = []
    facts, why = ask(["-m", "tools.gpu_check.facts"], FACTS_S, scratch)
    if not facts:
        failed.append(f"facts: {why}")
    folder = scratch / "kinds"
    folder.mkdir()
    _, why = ask(["-m", "tools.gpu_check.kinds", str(folder)], FACTS_S, scratch)
    if why:
        failed.append(f"JPEGs of each kind: {why}")
    files = sorted(folder.iterdir(), key=lambda path: (path.stat().st_mtime_ns, path.name))
    found: dict[str, Any] = {"device": device, "facts": facts[0] if facts else {}}
    found |= {"formulas": [], "about": {}, "engines": [], "failed": failed}
    for name in ENGINES:
        write_json(out, found)

        def run(words: list[str], name: str = name) -> tuple[Lines, str]:
            command = ["-m", "tools.gpu_check.engines", name, device, *words]
            return ask(command, min(ENGINE_S, deadline.left()), scratch)

        found["about"][name], looked = ask_engine(name, files, run, deadline.left)
        found["engines"] += looked or [{"engine": name}]
    formulas: Lines = []
    why = "no time was left"
    if (left := deadline.left()) > 0:
        words = ["-m", "tools.gpu_check.formulas", device]
        formulas, why = ask(words, min(FORMULAS_S, left), scratch)
    found["formulas"] = formulas + [{"name": "the rest", "why": why}] * bool(why)
    write_json(out, found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check.probe", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU")
    parser.add_argument("--within", type=float, default=WHOLE_S, metavar="SECONDS")
    options = parser.parse_args()
    deadline = Deadline(min(options.within, WHOLE_S))
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        probe(options.rehearse, Path(scratch), options.out, deadline)


if __name__ == "__main__":
    main()
