"""The pages docs/coming-from/: their blocks, old and new, run on the same images, and must agree.

A page's old lines run in the environment of their library (benchmarks/setup_rivals), its new lines
and commands here, in the order of the page, in one folder. `photos/` there has 48 JPEGs of one flat
colour each, in a class folder each: so a row of a batch tells by its label which image it is, and
by its colour whether it is that one, however it was cropped.

Each `...  # train` writes its batch down. Below a heading, old programs and new ones must
have had the same images, each as often. Where a rival cannot do something, there are no old lines.
torchvision, which the old lines crop with, is that of tools/setup-frameworks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import own_home, pages
from .data import Data
from .harness import RESULTS, ROOT, BenchmarkError, NotHere, Result, number, show
from .rivals.base import ENVIRONMENTS

FRAMEWORKS = ROOT / "tests" / "frameworks"
TRAIN = "...  # train"
LIMIT_S = 900.0
RUN = "torch.distributed.run"
TWO_RANKS = ["-m", RUN, "--nproc-per-node", "2", "--local-addr", "127.0.0.1"]
SHARDIO = ("shardio ShardLoader, JPEG, core", "shardio ShardLoader, tile JPEG, core")
PHOTOS, CIFAR = "photographs", "CIFAR"


@dataclass(frozen=True)
class Page:
    """A page, and the library that its readers come from.

    mark: what each block of old lines begins with. row: its name in results/compare.json.
    """

    name: str
    mark: str
    package: str
    row: str

    @property
    def path(self) -> str:
        return f"coming-from/{self.name}.md"

    @property
    def python(self) -> Path:
        here = FRAMEWORKS / ".venv" if self.name == "imagefolder" else ENVIRONMENTS / self.name
        return here / "bin" / "python"


PAGES = (
    Page("imagefolder", "# torchvision", "torchvision", "image folder + DataLoader"),
    Page("webdataset", "# WebDataset", "webdataset", "WebDataset"),
    Page("mosaicml", "# MosaicML Streaming", "mosaicml-streaming", "MosaicML Streaming"),
    Page("litdata", "# LitData", "litdata", "LitData"),
    Page("ffcv", "# FFCV", "ffcv", "FFCV (re-encoded)"),
    Page("huggingface", "# HF datasets", "datasets", "HF datasets"),
)


def run(source: Data, result: Result) -> None:
    torchvision = FRAMEWORKS / ".venv" / "lib"
    if not torchvision.exists():
        raise NotHere("the old lines crop by torchvision: tools/setup-frameworks installs it")
    rows: dict[str, list[dict[str, Any]]] = {}
    for page in PAGES:
        if not page.python.exists():
            result.note(
                f"{page.name}: NOT RUN, no environment: benchmarks/setup_rivals {page.name}"
            )
            continue
        show(f"  {page.path}")
        rows[page.name] = [Folder(page, source.scratch / page.name).compare()]
        result.facts["versions"][page.package] = _version(page)
    result.raw("blocks", {page.name: digest(page) for page in PAGES if page.name in rows})
    columns = {"old": "old programs", "new": "new programs", "sections": "sections that both have",
               "images": "images each read there", "different": "different"}  # fmt: skip
    result.table("Old lines and new lines on the same images", rows, columns)
    different = sum(one["different"] for (one,) in rows.values())
    result.target("images that one of a pair had and the other had not", different, 0, unit="")
    result.target("pages run", len(rows), -len(PAGES), unit="")


def digest(page: Page) -> str:
    """Return what tells whether the blocks of a page are those that were run."""
    return hashlib.sha256(repr(pages.blocks(page.path)).encode()).hexdigest()


def _version(page: Page) -> str:
    code = f"from importlib.metadata import version; print(version({page.package!r}))"
    return subprocess.run([page.python, "-c", code], capture_output=True, text=True).stdout.strip()


# --- a page ---------------------------------------------------------------------------------------


class Folder:
    """A folder in which a page's blocks run one after another."""

    def __init__(self, page: Page, folder: Path) -> None:
        self.page, self.folder = page, folder
        self.here, self.bin = folder / "here", folder / "bin"
        self.programs = {"old": 0, "new": 0}
        self.seen: list[tuple[str, str, Path]] = []  # side, heading, and what was written down
        self.here.mkdir(parents=True)
        plant(self.here / "photos")
        self._commands()

    def compare(self) -> dict[str, int]:
        """Run all blocks. Returns how many, and how many images were not the same."""
        for heading, kind, text in pages.blocks(self.page.path):
            if kind == "python":
                self._python(heading, "old" if text.startswith(self.page.mark) else "new", text)
            elif text.startswith("$ "):
                for line in re.findall(r"^\$ (.*)$", text, re.M):
                    self._run(["bash", "-c", line])
        old, new = self._trained("old"), self._trained("new")
        both = [heading for heading in old if heading in new]
        if not both:
            raise BenchmarkError(f"{self.page.path}: no two programs to compare")
        if any(new[one] != Counter({i: new[one][0] for i in range(len(COLOURS))}) for one in both):
            raise BenchmarkError(f"{self.page.path}: some images came more often than others")
        different = sum(((old[one] - new[one]) + (new[one] - old[one])).total() for one in both)
        images = sum(new[heading].total() for heading in both)
        found = {"sections": len(both), "images": images, "different": different}
        return {**self.programs, **found}

    def _trained(self, side: str) -> dict[str, Counter[int]]:
        """Return the images that the programs below each heading had."""
        found: dict[str, Counter[int]] = {}
        for one, heading, seen in self.seen:
            if one == side:
                found.setdefault(heading, Counter()).update(read(seen))
        return found

    def _python(self, heading: str, side: str, text: str) -> None:
        """Run a block as a program of its own: an old one called ranks.py as two ranks.

        A new one with a name is only written: the page's next command runs it.
        """
        self.programs[side] += 1
        name = f"{side}_{self.programs[side]}.py"
        seen = self.folder / f"{name}.jsonl"
        if TRAIN in text:
            self.seen.append((side, heading, seen))
        named = re.match(r"# (?:.*: )?(\w+\.py)\n", text)
        if side == "new" and named:
            (self.here / named[1]).write_text(self._program(side, text, seen))
            return
        (self.here / name).write_text(self._program(side, text, seen))
        python = self.page.python if side == "old" else Path(sys.executable)
        self._run([str(python), *(TWO_RANKS if named else []), name])

    def _program(self, side: str, text: str, seen: Path) -> str:
        before = "import torchvision_schemas\n" if "torchvision" in text else ""
        if side == "old" and self.page.name == "mosaicml":  # it imports names of transformers
            before = "import torchvision_schemas, sys; from benchmarks.stand_ins import StandIns\n"
            before += "sys.meta_path.append(StandIns())\n"
        return before + text.replace(TRAIN, recorded(seen))

    def _commands(self) -> None:
        self.bin.mkdir()
        for name, words in (
            ("shardio", "-m shardio"),
            ("python", ""),
            ("torchrun", f"-m {RUN} --local-addr 127.0.0.1"),
        ):
            path = self.bin / name
            path.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
            path.chmod(0o755)

    def _run(self, command: list[str]) -> None:
        paths = [str(ROOT), str(FRAMEWORKS), str(_torchvision(self.folder))]
        environment = dict(
            os.environ,
            PYTHONPATH=os.pathsep.join(paths),
            PATH=f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            **own_home.variables(self.folder),
            **{"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
        done = subprocess.run(
            command, cwd=self.here, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        if done.returncode:
            raise BenchmarkError(
                f"{self.page.path}: {' '.join(command)[-200:]} ended with code {done.returncode}\n"
                f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            )


def _torchvision(folder: Path) -> Path:
    """Return a folder with torchvision alone, which all environments of old lines share."""
    path = folder / "torchvision"
    if not path.exists():
        path.mkdir()
        (site,) = (FRAMEWORKS / ".venv" / "lib").glob("python*/site-packages")
        for found in site.glob("torchvision*"):
            (path / found.name).symlink_to(found)
    return path


def recorded(seen: Path) -> str:
    """Return what a program has in place of `...  # train`, to write its batches into a file."""
    rows = "__import__('benchmarks.coming_from_rows').coming_from_rows"
    return f"{rows}.record({str(seen)!r}, images, labels)"


# --- images ---------------------------------------------------------------------------------------

COLOURS = [
    (r, g, b) for r in (20, 90, 160, 230) for g in (20, 90, 160, 230) for b in (40, 120, 200)
]


def plant(folder: Path) -> None:
    """Make a folder of 48 class folders with an image each; each has another colour and size."""
    from PIL import Image

    for label, colour in enumerate(COLOURS):
        path = folder / f"class{label:02d}" / f"{label:02d}.jpg"
        path.parent.mkdir(parents=True)
        Image.new("RGB", (96 + label, 80 + 2 * label), colour).save(path, quality=95)


def read(path: Path) -> Counter[int]:
    """Return how often each image came, by its label. Raises BenchmarkError if it was another."""
    found: Counter[int] = Counter()
    for line in path.read_text().splitlines():
        for label, *colour in json.loads(line):
            if max(abs(a - b) for a, b in zip(colour, COLOURS[label], strict=True)) > 8:
                raise BenchmarkError(f"{path.name}: label {label} came with the colour {colour}")
            found[label] += 1
    return found


# --- what to expect -------------------------------------------------------------------------------


def expected(page: Page, results: Path = RESULTS) -> str:
    """Return the table of "What to expect", from the stored comparison."""
    tables = json.loads((results / "compare.json").read_text())["tables"]
    lines = [f"| | {page.row.partition(' (')[0]} | shardio | |", "|---|---:|---:|---:|"]
    for title, table, ours in (
        (PHOTOS, 0, SHARDIO[0]),
        (PHOTOS + ", `--jpeg-tiles`", 0, SHARDIO[1]),
        (CIFAR, 2, SHARDIO[0]),
    ):
        rows = {row["name"]: row for row in tables[table]["rows"]}
        for key, unit in (
            ("images_per_s", "images/s"),
            ("cpu_ms", "CPU ms an image"),
            ("stored_mb", "MB on disk"),
        ):
            old, new = (rows[name][key]["median"] for name in (page.row, ours))
            times = f"{number(new / old)}x"
            lines.append(f"| {title}: {unit} | {number(old)} | {number(new)} | {times} |")
    return "\n".join(lines)
