"""The field side by side, warm, on this machine: decoded streams, and raw records in order.

Photographs: decode, RandomResizedCrop(224), mirror, uint8 batches of 64. CIFAR: decode, batches of
512; shardio's by `decode="numpy"`, as one writes it where nothing is to be cropped. Two workers (or
threads, where a rival has those), shuffled, each by its own rival's advice (benchmarks/rivals), and
in its own environment. Bare loops show what a decoder allows without any loader. Raw: the bytes of
each image in stored order, one process, beside one packed file by `mmap`.

Streams have no end: a round skips what was made while the others ran (at least 8 batches and half a
second), then takes as many images as an epoch has, for two seconds at least. So the turn of an
epoch is in it, and starting is not. Before, the first epoch of each is looked at: its labels must
be the folder's, and its mean pixel what the image folder's is, so that all do the work. CPU time is
that of all processes; memory, at the most, anonymous by PSS and shared.

The third part copies or untars to the node's disk first, and then reads (staging.py).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from . import data, staging
from .harness import BenchmarkError, Result, interleave, median, ratio, show
from .loader import _memory
from .raw import FLOOR
from .raw import _rounds as passes
from .rivals import ACCURATE, FAST, FFCV, FOLDER, RIVALS, Rival, write_packed
from .rivals.base import AHEAD, Guarded

WORKERS = 2
SKIPPED, SKIPPED_S = 8, 0.5  # batches, and seconds: whatever waited in queues is gone by then
PARTS = ("photographs", "CIFAR", "staging")
BATCHES: dict[str, dict[str, Any]] = {
    "photographs": {"size": 224, "batch": 64},
    "CIFAR": {"size": 32, "batch": 512},
}
MEASURED_S = 2.0  # at least: an epoch of CIFAR takes the fastest 0.2 s, and CPU time has ticks
FOLDER_SIMD = "image folder + DataLoader, pillow-simd"
LOADERS = ("DataLoader", "ShardLoader")
PLAIN, TILES = "JPEG", "tile JPEG"
BY_NUMBER = "MosaicML Streaming, by number"
OPENED = "shardio.open"

Round = Callable[..., dict[str, Any]]
Start = Callable[[], Guarded]

COLUMNS = {
    "images_per_s": "images/s",
    "cpu_ms": "CPU ms an image",
    "memory_mb": "memory, MB",
    "stored_mb": "stored, MB",
}


def run(source: data.Data, result: Result, parts: Sequence[str] = PARTS) -> None:
    if "photographs" in parts:
        _workload(source, result, "photographs", "110 KB", _photos(source))
    if "CIFAR" in parts:
        _workload(source, result, "CIFAR", "0.9 KB", source.cifar())
    if "staging" in parts:
        for title, folder in (("photographs", _photos(source)), ("CIFAR", source.cifar())):
            staging.compare(source, result, title, folder, BATCHES[title])


def _photos(source: data.Data) -> Path:
    return source.photos(500 if source.quick else 3_000)


def ours(loader: str, stored: str, core: bool) -> str:
    """The name of a row of shardio's."""
    return f"shardio {loader}, {stored}" + (", core" if core else "")


# --- what takes part ------------------------------------------------------------------------------


def _workload(source: data.Data, result: Result, title: str, each: str, folder: Path) -> None:
    files, scratch = data.listing(folder), source.scratch
    photographs = title == "photographs"
    count = {"records": len(files), "payload": data.payload(files)}
    result.data(**{title: {"records": len(files), "payload_bytes": count["payload"]}})
    here = [one for one in RIVALS if source.rivals and _there(one, result)]
    bare = [one for one in (FAST, ACCURATE) if source.rivals and _there(one, result)]
    paths = _written(here, folder, scratch, result)
    shards = {PLAIN: data.pack(folder, scratch / "shards")}
    if photographs:
        if _can_tile():
            shards[TILES] = data.pack(folder, scratch / "tiles", "--jpeg-tiles")
        else:
            result.note("Tile JPEGs were not measured: this shardio has no `pack --jpeg-tiles`")
    options = BATCHES[title] | {"records": len(files)}
    entries = _streams(here, bare, paths, shards, str(folder), scratch, options)
    stored = {one.title: path for one, path in paths.items()}
    stored |= {
        name: path for name in entries for kind, path in shards.items() if f", {kind}" in name
    }
    measured = _decoded(source, result, title, entries, stored, options, files)
    _stream_targets(result, title, measured)
    entries = _readers(here, paths, shards[PLAIN], files, scratch, count)
    measured = _contest(source, result, f"raw, {each}", entries)
    columns = {"us": "us a record"}
    what = f"Raw records, one by one, in order, warm, one process, {each}, {len(files):,} records"
    result.table(what, _sorted(measured, "us", 1), columns, versus=FLOOR, by="us")
    limit = 2.0 if each == "0.9 KB" else 1.6
    found = ratio(measured, f"{OPENED}, core", FLOOR, "us")
    result.target(f"raw, {each}, with the core, of the time of: {FLOOR}", found, limit)
    if not photographs:
        _damage(here, paths, shards[PLAIN], scratch, result)
    data.remove(*shards.values(), *(path for path in paths.values() if path != folder))
    data.remove(scratch / "packed", scratch / "pairs")


def _there(rival: Rival, result: Result) -> bool:
    missing = rival.missing()
    if missing:
        result.note(f"{rival.title} was not measured: {missing}")
    return not missing


def _written(here: list[Rival], folder: Path, scratch: Path, result: Result) -> dict[Rival, Path]:
    """What each rival made of the folder; without those that failed."""
    made: dict[str, Path | None] = {}
    for rival in here:
        module = rival.writes or rival.module
        if module in made:
            continue
        made[module] = scratch / module
        if not hasattr(importlib.import_module(f"benchmarks.rivals.{module}"), "write"):
            made[module] = folder
            continue
        try:
            with rival.process("compare:writing", scratch, module=module) as one:
                one.round(folder=str(folder), out=str(scratch / module))
        except BenchmarkError as error:
            result.note(f"{rival.title} was not measured: writing failed: {error}")
            made[module] = None
    found = {rival: made[rival.writes or rival.module] for rival in here}
    return {rival: path for rival, path in found.items() if path is not None}


@functools.cache
def _can_tile() -> bool:
    command = [sys.executable, "-m", "shardio", "pack", "--help"]
    return "--jpeg-tiles" in subprocess.run(command, capture_output=True, text=True).stdout


def _core(function: str) -> bool:
    """Whether the compiled core is there and does this."""
    from shardio import native

    return hasattr(native.core, function)


def _streams(
    here: list[Rival], bare: list[Rival], paths: dict[Rival, Path], shards: dict[str, Path],
    folder: str, scratch: Path, options: dict[str, Any],
) -> dict[str, Start]:  # fmt: skip
    """What streams decoded batches, by the names of the rows."""
    start = functools.partial
    more = options | {"workers": WORKERS}
    entries: dict[str, Start] = {}
    does = "crop" if options["size"] == 224 else "decode_many"
    for core in (True, False) if _core(does) else (False,):
        for kind, path in shards.items():
            for way in LOADERS:
                asked = more | {"path": str(path), "way": way, "core": core}
                entries[ours(way, kind, core)] = start(Guarded, "compare:sharded", **asked)
    entries[FOLDER_SIMD] = start(
        *(Guarded, "compare:streaming"), module="folder", path=folder, **more
    )
    for rival in here:
        if rival in paths:
            entries[rival.title] = start(
                *(rival.process, "compare:streaming", scratch),
                module=rival.module, package=rival.package, path=str(paths[rival]), **more,
            )  # fmt: skip
    for rival, function in zip(bare, ("images", "accurate"), strict=False):
        entries[rival.title] = start(
            *(rival.process, "compare:streaming", scratch),
            module="bare", package=rival.package, which=function, path=folder, **more,
        )  # fmt: skip
    if FOLDER in here:  # the environment that has Pillow beside torch
        asked = more | {"path": str(shards[PLAIN]), "way": "ShardLoader", "core": False}
        entries[f"{ours('ShardLoader', PLAIN, False)}, Pillow"] = start(
            FOLDER.process, "compare:sharded", scratch, **asked
        )
    return entries


def _readers(
    here: list[Rival], paths: dict[Rival, Path], shards: Path, files: data.Files, scratch: Path,
    count: dict[str, int],
) -> dict[str, Start]:  # fmt: skip
    """What reads raw records in order."""
    start = functools.partial
    packed, pairs = scratch / "packed", scratch / "pairs"
    pairs.write_text(json.dumps(write_packed(files, packed)))
    entries: dict[str, Start] = {
        FLOOR: start(Guarded, "raw:floor", path=str(packed), pairs=str(pairs))
    }
    for core in (True, False) if _core("gather") else (False,):
        for way in (OPENED, "ShardDataset"):
            asked = count | {"path": str(shards), "way": way, "core": core}
            name = way + (", core" if core else "")
            entries[name] = start(Guarded, "compare:shardio_in_order", **asked)
    for rival in here:
        if rival.raw and rival in paths:
            asked = {"module": rival.module, "path": str(paths[rival])} | count
            entries[rival.stores] = start(rival.process, "compare:reading", scratch, **asked)
            if rival.module == "mosaicml":
                asked |= {"which": "by_number"}
                entries[BY_NUMBER] = start(rival.process, "compare:reading", scratch, **asked)
    return entries


def _damage(
    here: list[Rival], paths: dict[Rival, Path], shards: Path, scratch: Path, result: Result
) -> None:
    """Who tells that one bit of a stored image was flipped, and who hands the image out."""
    starts: dict[str, Start] = {
        "shardio": functools.partial(Guarded, "compare:flipped", module="", path=str(shards))
    }
    for rival in here:
        if rival.raw and rival in paths:
            asked = {"module": rival.module, "path": str(paths[rival])}
            starts[rival.stores] = functools.partial(
                rival.process, "compare:flipped", scratch, **asked
            )
    found: dict[str, str] = {}
    for name, start in starts.items():
        try:
            with start() as one:
                found[name] = one.round()["found"]
        except BenchmarkError as error:
            result.note(f"a flipped bit: {name} was not tried: {error}")
    result.raw("a flipped bit", found)
    names = {how: [name for name in found if found[name] == how] for how in ("told", "silent")}
    result.note(
        "One bit of a stored image was flipped, and all images read again as bytes. Told: "
        f"{', '.join(names['told']) or 'none'}. Handed out without a word: "
        f"{', '.join(names['silent']) or 'none'}."
    )


# --- rounds ---------------------------------------------------------------------------------------


def _decoded(
    source: data.Data, result: Result, title: str, entries: dict[str, Start],
    stored: dict[str, Path], options: dict[str, Any], files: data.Files,
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    checked: dict[str, dict[str, Any]] = {}
    memory: dict[str, float] = {}

    def prepare(name: str, one: Guarded) -> None:
        checked[name] = one.round(check=True)
        _same_work(
            checked[name], checked[FOLDER_SIMD], files, 6.0 if options["size"] == 224 else 1.0
        )
        memory[name] = one.round(memory=True)["memory_mb"]

    first = {FOLDER_SIMD: entries[FOLDER_SIMD]}  # all others are compared with its pixels
    measured = _contest(source, result, title, first | entries, prepare)
    for found in checked.values():
        result.facts["versions"] |= found.pop("versions")
    result.raw(f"{title}, first epoch", checked)
    for name, rounds in measured.items():
        path = stored.get(name)
        for one in rounds:
            one["memory_mb"] = memory[name]
            one["stored_mb"] = _bytes(path) / 1e6 if path else None
    what = f"{title}, warm, {options['size']} px, batches of {options['batch']}, {WORKERS} workers"
    rows = _sorted(measured, "images_per_s", -1)
    versus = FOLDER.title if FOLDER.title in measured else FOLDER_SIMD
    result.table(what, rows, COLUMNS, versus=versus, by="images_per_s")
    return measured


def _bytes(path: Path) -> int:
    return data.folder_bytes(path) if path.is_dir() else path.stat().st_size


def _contest(
    source: data.Data, result: Result, title: str, entries: dict[str, Start],
    prepare: Callable[[str, Guarded], Any] = lambda _, one: one.round(),
) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
    """`contest` without those that fail: an hour is not lost, and they are named in a note.

    prepare: what an entry does before the rounds; by default a warm-up.
    """
    started: dict[str, Guarded] = {}
    failed: set[str] = set()

    def turn(name: str) -> dict[str, Any]:
        try:
            return {} if name in failed else started[name].round()
        except BenchmarkError as error:
            failed.add(name)
            result.note(f"{title}: {name} was not measured: {error}")
            return {}

    try:
        for name, start in entries.items():
            show(f"  {title}: starting {name}")
            started[name] = start()
            try:
                prepare(name, started[name])
            except BenchmarkError as error:
                started.pop(name).close()
                result.note(f"{title}: {name} was not measured: {error}")
        turns = {name: functools.partial(turn, name) for name in started}
        measured = interleave(turns, 2 if source.quick else 5)
    finally:
        for one in started.values():
            one.close()
    measured = {name: found for name, found in measured.items() if name not in failed}
    result.raw(title, measured)
    return measured


def _same_work(
    found: dict[str, Any], base: dict[str, Any], files: data.Files, tolerance: float
) -> None:
    """Refuses a stream whose first epoch is not the folder's: labels, and the mean pixel.

    A few images may come twice, or in the next epoch, where a rival evens out its workers.
    """
    expected: dict[str, int] = {}
    for _, label in files:
        expected[str(label)] = expected.get(str(label), 0) + 1
    labels = {*expected, *found["labels"]}
    wrong = sum(abs(found["labels"].get(one, 0) - expected.get(one, 0)) for one in labels)
    if wrong > 0.1 * len(files):
        raise BenchmarkError(f"its first epoch has {wrong:,} labels more or less than the folder")
    if abs(found["mean"] - base["mean"]) > tolerance:
        raise BenchmarkError(
            f"its mean pixel is {found['mean']:.1f}, that of the image folder {base['mean']:.1f}"
        )


def _sorted(
    measured: dict[str, list[dict[str, Any]]], key: str, sign: int
) -> dict[str, list[dict[str, Any]]]:
    """Best first."""
    order = sorted(measured, key=lambda name: sign * median(measured[name], key))
    return {name: measured[name] for name in order}


def _stream_targets(result: Result, title: str, measured: dict[str, list[dict[str, Any]]]) -> None:
    def target(name: str, rival: str, key: str, limit: float) -> None:
        what = "CPU an image" if key == "cpu_ms" else "images/s"
        found = ratio(measured, name, rival, key)
        result.target(f"{title}, {name}: {what}, of {rival}", found, limit)

    if title != "photographs":
        target(ours("ShardLoader", PLAIN, True), FFCV.title, "images_per_s", -1.0)
        return
    for core, limits in ((False, (2.0, 1.2, 1.05, 0.55)), (True, (2.4, 1.45, 1.3, 0.45))):
        name = ours("ShardLoader", TILES, core)
        rivals = (FOLDER.title, FFCV.title, FAST.title)
        for rival, limit in zip(rivals, limits[:3], strict=True):
            target(name, rival, "images_per_s", -limit)
        target(name, FOLDER.title, "cpu_ms", limits[3])
        target(ours("DataLoader", TILES, core), FOLDER.title, "images_per_s", -1.5)


# --- entries --------------------------------------------------------------------------------------


def rounds(batches: Iterator[Any], records: int, versions: dict[str, str]) -> Round:
    """Rounds over an endless stream of (images, labels)."""
    import numpy as np

    from shardio.machine import cpu_seconds, family

    def look() -> dict[str, Any]:
        """The first epoch's labels, and its mean pixel."""
        images, total, labels = 0, 0.0, {}
        for pixels, classes in batches:
            pixels = np.asarray(pixels)
            assert pixels.dtype == np.uint8 and pixels.ndim == 4 and 3 in pixels.shape, pixels.shape
            total += float(pixels.mean()) * len(pixels)
            images += len(pixels)
            for label in np.asarray(classes).ravel().tolist():
                labels[label] = labels.get(label, 0) + 1
            if images >= records:
                break
        return {"images": images, "mean": total / images, "labels": labels, "versions": versions}

    def one_round(check: bool = False, memory: bool = False) -> dict[str, Any]:
        if check:
            return look()
        began = time.perf_counter()
        for skipped, _ in enumerate(batches, 1):
            if skipped >= SKIPPED and time.perf_counter() - began >= SKIPPED_S:
                break
        images, number, most = 0, 0, 0
        used, began = cpu_seconds(family(os.getpid())), time.perf_counter()
        for pixels, _ in batches:
            images, number = images + len(pixels), number + 1
            del pixels
            if memory and number % 8 == 0:
                most = max(most, _memory())
            if images >= records and time.perf_counter() - began >= MEASURED_S:
                break
        seconds = time.perf_counter() - began
        done = cpu_seconds(family(os.getpid()))
        if memory:
            return {"memory_mb": max(most, _memory()) / 1e6}
        cpu = None if used is None or done is None else (done - used) / images * 1e3
        return {"images_per_s": images / seconds, "cpu_ms": cpu}

    return one_round


def writing(module: str) -> Round:
    write = importlib.import_module(f"benchmarks.rivals.{module}").write

    def one_round(folder: str, out: str) -> dict[str, Any]:
        began = time.perf_counter()
        write(folder, out)
        return {"seconds": time.perf_counter() - began}

    return one_round


def streaming(
    module: str, path: str, size: int, batch: int, workers: int, records: int,
    which: str = "images", package: str = "",
) -> Round:  # fmt: skip
    """A rival's stream, by its adapter."""
    adapter = importlib.import_module(f"benchmarks.rivals.{module}")
    batches = getattr(adapter, which)(path, size=size, batch=batch, workers=workers)
    return rounds(batches, records, {package: metadata.version(package)} if package else {})


def sharded(
    path: str, way: str, core: bool, size: int, batch: int, workers: int, records: int
) -> Round:
    """shardio's own, with the compiled core or without it, by the PIL of this environment."""
    from . import spelling
    from .rivals.base import epochs, shards

    if not core:
        spelling.native().core = None  # before any worker is forked
    dataset = shards(path, size, batch)
    if way == "ShardLoader":
        loader: Any = spelling.shard_loader(dataset, num_workers=workers, prefetch_factor=AHEAD)
        return rounds(epochs(loader, loader.set_epoch), records, {})
    from torch.utils.data import DataLoader

    loader = DataLoader(
        *(dataset,), batch_size=None, num_workers=workers, prefetch_factor=AHEAD,
        persistent_workers=True,
    )  # fmt: skip
    return rounds(epochs(loader, dataset.set_epoch), records, {})


def reading(module: str, path: str, records: int, payload: int, which: str = "records") -> Round:
    """A rival's pass over its raw records: opened in the time."""
    adapter = getattr(importlib.import_module(f"benchmarks.rivals.{module}"), which)
    return passes(lambda: _Pass(adapter, path), records, payload, None)


def shardio_in_order(path: str, way: str, core: bool, records: int, payload: int) -> Round:
    """All fields of each record; by ShardDataset unshuffled, sample by sample."""
    import shardio
    from shardio import ShardDataset

    from . import spelling

    if not core:
        spelling.native().core = None
    if way == OPENED:
        return passes(lambda: shardio.open(path, decode=None), records, payload, "image")

    return passes(
        lambda: ShardDataset(path, decode=None, batch_size=None, **spelling.unshuffled()),
        records, payload, "image",
    )  # fmt: skip


def flipped(module: str, path: str) -> Round:
    """(module "": shardio's) Flips a bit, reads all, and flips it back."""
    import shardio

    def of_ours(path: str) -> Iterator[bytes]:
        return (sample["image"] for sample in shardio.open(path, decode=None))

    adapter = importlib.import_module(f"benchmarks.rivals.{module}").records if module else of_ours

    def contents() -> tuple[bytes, str]:
        """The first image, and a hash of all."""
        first, digest = b"", hashlib.sha256()
        for image in adapter(path):
            first = first or bytes(image)
            digest.update(image)
        return first, digest.hexdigest()

    def flip(name: Path, at: int) -> None:
        with open(name, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))

    def one_round() -> dict[str, Any]:
        first, digest = contents()
        name, at = _place(Path(path), first)
        flip(name, at)
        try:
            return {"found": "unseen" if contents()[1] == digest else "silent"}
        except Exception as error:  # whatever the rival calls it
            return {"found": "told", "error": f"{type(error).__name__}: {error}"}
        finally:
            flip(name, at)

    return one_round


def _place(path: Path, image: bytes) -> tuple[Path, int]:
    """The middle of this image where it is stored as it is; else of the largest file."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    for file in sorted(files):
        at = file.read_bytes().find(image)
        if at >= 0:
            return file, at + len(image) // 2
    largest = max(files, key=lambda file: file.stat().st_size)
    return largest, largest.stat().st_size // 2


class _Pass:
    """What is opened when it is iterated."""

    def __init__(self, open_: Callable[[str], Iterator[bytes]], path: str) -> None:
        self.open, self.path = open_, path

    def __iter__(self) -> Iterator[bytes]:
        return self.open(self.path)
