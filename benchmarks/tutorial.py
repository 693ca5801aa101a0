"""The tutorial (docs/tutorial.md), as the page has it: accuracy of three seeds, and CPU time.

The programs and the packing command are taken from the page. Only SEED is another in each run.
Threads of torch that wait for each other sleep here: CPU time is work, also on a busy machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import pages
from .data import Data
from .harness import ROOT, BenchmarkError, Result, cpu_seconds, show

PAGE = "tutorial.md"
ENVIRONMENTS = ROOT  # no rivals take part
SEEDS = (0, 1, 2)
LEAST = 70.0  # per cent, of each seed; the page states it
MOST_S = 300.0  # of two cores
RIGHT = re.compile(r"^epoch (\d+): ([\d.]+)% of ([\d,]+) images are right$", re.M)


def run(source: Data, result: Result) -> None:
    folder = source.scratch / "tutorial"
    folder.mkdir()
    (folder / "cifar10").symlink_to(source.cifar())
    packed, _ = _timed(folder, "-m", *pages.command(PAGE, "shardio pack"))
    (folder / "model.py").write_text(pages.block(PAGE, "# model.py"))
    trained, epochs = [], dict[str, list[dict[str, Any]]]()
    for seed in SEEDS:
        (folder / "run.pt").unlink(missing_ok=True)
        (folder / "train.py").write_text(_with_seed(pages.block(PAGE, "# train.py"), seed))
        measured, said = _timed(folder, "train.py")
        found = RIGHT.findall(said)
        if not found:
            raise BenchmarkError(f"train.py printed no accuracy:\n{said}")
        for epoch, right, _ in found:
            epochs.setdefault(f"epoch {epoch}", []).append({"accuracy": float(right)})
        trained.append(measured | {"accuracy": float(found[-1][1])})
        result.data(validated=int(found[-1][2].replace(",", "")), epochs=len(found))
        show(f"  seed {seed}: {found[-1][1]}%, {measured}")
    rows = {"shardio pack": [packed], "train.py": trained}
    result.raw("runs", rows)
    columns = {"accuracy": "right, %", "cpu_s": "CPU s", "seconds": "s"}
    result.table(f"The tutorial, {len(SEEDS)} seeds", rows, columns)
    result.table("Right after each epoch", epochs, {"accuracy": "%"})
    least = min(one["accuracy"] for one in trained)
    result.target("right after the last epoch, least of the seeds", least, -LEAST, unit="%")
    both = packed["cpu_s"] + max(one["cpu_s"] for one in trained)
    result.target("CPU of packing and training, of two cores", both / 2, MOST_S, unit="s")


def _with_seed(program: str, seed: int) -> str:
    text, found = re.subn(r"^(EPOCHS, SEED = \d+), 0$", rf"\1, {seed}", program, flags=re.M)
    if found != 1:
        raise BenchmarkError("train.py: found no line `EPOCHS, SEED = N, 0`")
    return text


def _timed(folder: Path, *arguments: str) -> tuple[dict[str, float], str]:
    """Run Python there. Returns what it took, and what it printed."""
    began, before = time.monotonic(), cpu_seconds()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_WAIT_POLICY="PASSIVE"),
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise BenchmarkError(f"{' '.join(arguments)} ended with code {done.returncode}")
    return {"seconds": time.monotonic() - began, "cpu_s": cpu_seconds() - before}, done.stdout
