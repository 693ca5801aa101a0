"""This commit against another one: shardio's rows of compare, raw, loader, pack and cold, in turns.

Each commit is taken from git, built with its compiled core into a folder of its own, and packs its
own shards. Third-party packages are those of this environment, and the programs those of this
working tree (`spelling` knows what was renamed), so that nothing differs but shardio. Of each row
both commits run at a time, round by round, and who begins alternates. What is told is the ratio of
each round's two: new over old, in speed, so that above 1 is faster. The machine's slow and fast
minutes take part on both sides.
"""

from __future__ import annotations

import fnmatch
import importlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from . import data
from .cold_rounds import drop
from .compare import LOADERS, OPENED, PLAIN, TILES, ours
from .harness import ROOT, BenchmarkError, EntryProcess, Result, interleave, show
from .loader import HERE, LOADER, RESIDENT, SHARDS
from .raw import BUFFER, SAMPLES, SAMPLES_IN_ORDER

ROUNDS = 11
SITTING = 3  # rounds of the same two processes
LEAST = 0.97  # a median below is slower, unless some round was as fast as before
PHOTOS = 1_000  # an epoch takes a second
PACKINGS = {PLAIN: [], TILES: ["--jpeg-tiles"], "raw": ["--encode", "raw"]}
COLUMNS = {"ratio": "new / old", "new": "new", "old": "old", "ahead": "share of rounds not slower"}

Round = Callable[..., dict[str, Any]]


class Row(NamedTuple):
    """One program that both commits run."""

    name: str  # "group: row, data"
    function: str
    shards: str  # which of the packings
    unit: str  # key of its rounds: "images_per_s", or "us", which is better when it is less
    options: dict[str, Any]
    asked: Mapping[str, Any] = MappingProxyType({})


class Side(NamedTuple):
    """A commit, built."""

    commit: str
    home: Path  # of the packages shardio and benchmarks
    core: bool


def run(
    source: data.Data,
    result: Result,
    commit: str,
    patterns: Sequence[str] = (),
    rounds: int | None = None,
) -> None:
    old = _built(commit, source.scratch / "old", result)  # first: one that is not there is told
    new = _built("HEAD", source.scratch / "new", result)
    result.facts["commits"] = {"new": new.commit, "old": old.commit}
    if subprocess.run(
        ["git", "-C", str(ROOT), "diff", "--quiet", "HEAD", "--", "shardio"]
    ).returncode:
        result.note("shardio has changes that are not committed: they did not take part")
    for name in ("new", "old"):
        side = new if name == "new" else old
        if not side.core:
            result.note(f"{name}: {side.commit} was built without its compiled core")
    folders = {
        "photographs": source.photos(500 if source.quick else PHOTOS),
        "CIFAR": source.cifar(),
    }
    rows = _chosen(_rows(folders, new.core and old.core), patterns)
    count = rounds or (2 if source.quick else ROUNDS)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with_shards = sorted({row.shards for row in rows})
    for shards in with_shards:
        paths = {side: _packed(side, shards, folders) for side in (new, old)}
        read = dict(paths)
        if len({tuple(sorted(os.listdir(path))) for path in paths.values()}) == 1:
            read[old] = paths[new]  # names tell the bytes; now the pages are the same, too
        for row in [row for row in rows if row.shards == shards]:
            found[row.name] = _contest(row, {"new": new, "old": old}, read, count)
        data.remove(*paths.values())
    _tell(result, rows, found)


def _tell(
    result: Result, rows: Sequence[Row], found: dict[str, dict[str, list[dict[str, Any]]]]
) -> None:
    slower: list[str] = []
    for unit, title in (("images_per_s", "images/s"), ("us", "us a record")):
        measured: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row.unit != unit:
                continue
            pairs = list(zip(found[row.name]["new"], found[row.name]["old"], strict=True))
            ratios = [_ratio(a[unit], b[unit], unit) for a, b in pairs]
            ahead = sum(one >= 1 for one in ratios) / len(ratios)
            measured[row.name] = [
                {"ratio": one, "new": a[unit], "old": b[unit], "ahead": ahead}
                for one, (a, b) in zip(ratios, pairs, strict=True)
            ]
            if statistics.median(ratios) < LEAST and max(ratios) < 1:
                slower.append(f"{row.name}: {statistics.median(ratios):.3f}")
        if measured:
            result.table(f"New against old, {title}; new / old is of speed", measured, COLUMNS)
    result.raw("rounds", found)
    for one in slower:
        result.note(f"slower in every round: {one}")
    what = f"rows with a median below {LEAST} whose spread leaves out 1"
    result.target(what, len(slower), 0, unit="rows")


def _ratio(new: float, old: float, unit: str) -> float:
    return new / old if unit == "images_per_s" else old / new


# --- the two commits ------------------------------------------------------------------------------


def _built(commit: str, home: Path, result: Result) -> Side:
    """A commit's shardio below `home`, with its compiled core, beside these benchmarks."""
    name = _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    if not name:
        raise BenchmarkError(f"{commit!r} is no commit of this repository: give a hash or a branch")
    show(f"  building {name[:10]}")
    checkout = home / "checkout"
    checkout.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", name], stdout=subprocess.PIPE, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(checkout)], input=archive.stdout, check=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--target", str(home), str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkError(f"building {name[:10]} failed:\n{done.stderr.strip()}")
    shutil.rmtree(checkout)
    (home / "benchmarks").symlink_to(ROOT / "benchmarks")
    script = (
        "from benchmarks import spelling; e = spelling.native(); print(e.__file__, bool(e.core))"
    )
    asked = _python(home, "-c", script).split()
    if not asked[0].startswith(str(home)):
        raise BenchmarkError(f"{name[:10]}: {asked[0]} was imported instead of {home}")
    return Side(name, home, asked[1] == "True")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return done.stdout.strip()


def _python(home: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=dict(os.environ, PYTHONPATH=str(home)),
        cwd=home,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def _packed(side: Side, shards: str, folders: dict[str, Path]) -> Path:
    kind, _, how = shards.partition(", ")
    out = side.home / "shards"
    show(f"  packing {shards} by {side.commit[:10]}")
    command = ["-m", "shardio", "pack", str(folders[kind]), str(out), "--quiet"]
    _python(side.home, *command, *PACKINGS[how])
    return out


# --- rows -----------------------------------------------------------------------------------------


def _rows(folders: dict[str, Path], core: bool) -> list[Row]:
    rows = []
    for kind, folder in folders.items():
        files = data.listing(folder)
        records, payload = len(files), data.payload(files)
        photographs = kind == "photographs"
        each = {"size": 224, "batch": 64} if photographs else {"size": 32, "batch": 512}
        for how in (PLAIN, TILES) if photographs else (PLAIN,):
            shards = f"{kind}, {how}"
            for with_core in (True, False) if core else (False,):
                for way in LOADERS:
                    options = each | {
                        "way": way,
                        "core": with_core,
                        "workers": 2,
                        "records": records,
                    }
                    name = f"compare: {ours(way, how, with_core)}, {kind}"
                    rows.append(Row(name, "compare:sharded", shards, "images_per_s", options))
        shards, count = f"{kind}, {PLAIN}", {"records": records, "payload": payload}
        for with_core in (True, False) if core else (False,):
            for way in (OPENED, "ShardDataset"):
                name = f"compare: {way}, in order{', core' if with_core else ''}, {kind}"
                options = count | {"way": way, "core": with_core}
                rows.append(Row(name, "compare:shardio_in_order", shards, "us", options))
        for way, buffer in ((SAMPLES, BUFFER), (SAMPLES_IN_ORDER, None)):
            for batch in (None, 256):
                name = f"raw: {way}{'' if batch is None else ', batches of 256'}, {kind}"
                asked = {"buffer": buffer, "batch": batch}
                rows.append(Row(name, "raw:shardio_shuffled", shards, "us", count, asked))
        for workers, threads in ((2, 1), (2, 2), (1, 2), (1, 1)):
            name = f"loader: {LOADER} {workers}x{threads}, {kind}"
            options = each | {"workers": workers, "threads": threads, "buffer": BUFFER}
            rows.append(Row(name, "loader:shard_loader", shards, "images_per_s", options))
        options = each | {"workers": 2, "buffer": BUFFER}
        rows.append(
            Row(f"loader: {SHARDS}, {kind}", "loader:shards", shards, "images_per_s", options)
        )
        for how in (PLAIN, TILES) if photographs else (PLAIN,):
            options = {"folder": str(folder), "records": records, "options": PACKINGS[how]}
            name = f"pack: {how}, {kind}"
            rows.append(Row(name, "against:packing", f"{kind}, {how}", "us", options))
        for way in ("shardio", "shard_loader"):
            options = count | {"way": way, "workers": 2}
            name = f"cold: {'DataLoader' if way == 'shardio' else LOADER}, not decoded, {kind}"
            rows.append(Row(name, "against:from_disk", shards, "images_per_s", options))
    shards, one = "CIFAR, raw", {"size": 0, "batch": 512, "epochs": 20, "buffer": BUFFER}
    for name, more in (
        (HERE, {"workers": 0, "threads": 0}),
        (RESIDENT, {"workers": 0, "threads": 0, "resident": "ram"}),
        (f"{LOADER} 1x1", {"workers": 1, "threads": 1}),
        (f"{LOADER} 2x1", {"workers": 2, "threads": 1}),
    ):
        row = Row(
            f"loader: {name}, raw pixels", "loader:shard_loader", shards, "images_per_s", one | more
        )
        rows.append(row)
    more = {"workers": 2}
    rows.append(
        Row(f"loader: {SHARDS}, raw pixels", "loader:shards", shards, "images_per_s", one | more)
    )
    return rows


def _chosen(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    chosen = [
        row
        for row in rows
        if not patterns or any(fnmatch.fnmatch(row.name, f"*{pattern}*") for pattern in patterns)
    ]
    if not chosen:
        names = "\n".join(f"  {row.name}" for row in rows)
        raise BenchmarkError(f"no row is called {', '.join(patterns)}; there are\n{names}")
    return chosen


# --- rounds ---------------------------------------------------------------------------------------


def _contest(
    row: Row, sides: dict[str, Side], paths: dict[Side, Path], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """All rounds of a row, in sittings: no two processes have their memory in like places."""
    show(f"{row.name}")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    while (left := rounds - len(found["new"])) > 0:
        started: dict[str, EntryProcess] = {}
        try:
            for name, side in sides.items():
                options = row.options | {"path": str(paths[side])}
                started[name] = EntryProcess(
                    "against:program", python_path=side.home, of=row.function,
                    home_of=str(side.home), options=options,
                )  # fmt: skip
                started[name].round(**row.asked)  # the first one is warm after it
            turns = {n: (lambda one=one: one.round(**row.asked)) for n, one in started.items()}
            for name, each in interleave(turns, min(left, SITTING)).items():
                found[name] += each
        finally:
            for one in started.values():
                one.close()
    return found


def program(of: str, home_of: str, options: dict[str, Any]) -> Round:
    """(entry) A program of another module, run by the shardio below `home_of`."""
    import shardio

    assert shardio.__file__ is not None and shardio.__file__.startswith(home_of), shardio.__file__
    module, _, name = of.partition(":")
    prepare: Callable[..., Round] = getattr(importlib.import_module(f"benchmarks.{module}"), name)
    return prepare(**options)


def packing(path: str, folder: str, records: int, options: list[str]) -> Round:
    """(entry) `shardio pack` as users call it, in a process of its own; the rest is not timed."""
    out = f"{path}-{os.getpid()}"
    command = [sys.executable, "-m", "shardio", "pack", folder, out, "--quiet", *options]

    def one_round() -> dict[str, Any]:
        os.sync()
        began = time.perf_counter()
        subprocess.run(command, check=True, cwd=os.environ["PYTHONPATH"])
        seconds = time.perf_counter() - began
        data.remove(Path(out))
        return {"us": seconds / records * 1e6}

    return one_round


def from_disk(path: str, way: str, **options: Any) -> Round:
    """(entry) A row of `cold`: the pages of the shards are dropped before each round."""
    read: Round = getattr(importlib.import_module("benchmarks.cold_rounds"), way)(path, **options)

    def one_round() -> dict[str, Any]:
        drop(Path(path))
        return read()

    return one_round
