"""Reading warm records, without decoding: microseconds a record, in order and shuffled.

In order, checksums on, all fields, one process each, taking turns: shardio.open(decode=None)
against the naive floor, one packed file with os.pread, the same with a checksum, LMDB, the image
folder, tar, LitData and `cat`. Then one shuffled epoch of ShardDataset, and how much private memory
it takes.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from . import data, rivals
from .harness import EntryProcess, Result, contest, interleave, median, ratio

SHARDIO, FLOOR, LITDATA = "shardio", "packed file, mmap", "LitData"
FLOOR_BY_NUMBER = "packed file, mmap, by number"
KEPT = "; mapping kept"  # from round to round, so that its pages are in the page table already
BUFFER = 10_000
OPENED = "shardio.open, in order"
SAMPLES, SAMPLES_IN_ORDER = "ShardDataset, shuffled", "ShardDataset, in order"
BATCHES, BATCHES_IN_ORDER = "batches of 256, shuffled", "batches of 256, in order"

Round = Callable[..., dict[str, Any]]


def run(source: data.Data, result: Result) -> None:
    rounds = 3 if source.quick else 9
    few, many = (200, 400) if source.quick else (3_000, 12_000)
    limits = {"0.9 KB": (3.0, 0.8), "110 KB": (2.2, 1.0)}
    for size, (of_floor, of_litdata) in limits.items():
        folder = source.cifar() if size == "0.9 KB" else source.photos(few)
        measured = _in_order(source, folder, size, rounds, result)
        for rival, limit in ((FLOOR, of_floor), (FLOOR_BY_NUMBER, of_floor), (LITDATA, of_litdata)):
            found = ratio(measured, SHARDIO, rival, "us")
            result.target(f"in order, {size}, of the time of: {rival}", found, limit)
    for size, folder in (("0.9 KB", source.cifar()), ("110 KB", source.photos(many))):
        # More photographs than the buffer holds: else the epoch is one random permutation.
        measured = _shuffled(folder, size, source.scratch, rounds, result)
        if size == "0.9 KB":
            more = median(measured[BATCHES], "us") - median(measured[BATCHES_IN_ORDER], "us")
            result.target("shuffled, 0.9 KB, more than in order", more, 1.0, unit="us")
            more = median(measured[BATCHES], "us") - median(measured[OPENED], "us")
            result.target("shuffled, 0.9 KB, more than shardio.open", more, 1.0, unit="us")
        memory = measured[SAMPLES][0]["private_mb"]
        result.target(f"shuffled, {size}, growth of private memory", memory, 32, unit="MB")


def _in_order(
    source: data.Data, folder: Path, size: str, rounds: int, result: Result
) -> dict[str, list[dict[str, Any]]]:
    files, scratch = data.listing(folder), source.scratch
    payload = data.payload(files)
    result.data(**{f"in order, {size}": {"records": len(files), "payload_bytes": payload}})
    packed, tree, tar = scratch / "packed", scratch / "lmdb", scratch / "tar"
    shards = data.pack(folder, scratch / "shards")
    pairs = scratch / "pairs"
    pairs.write_text(json.dumps(rivals.write_packed(files, packed)))
    rivals.write_lmdb(folder, tree)
    rivals.write_tar(folder, tar)
    count: dict[str, Any] = {"records": len(files), "payload": payload}
    names: dict[str, Any] = {"path": str(packed), "pairs": str(pairs)}
    entries = {
        SHARDIO: EntryProcess("raw:shardio_in_order", path=str(shards), **count),
        FLOOR: EntryProcess("raw:floor", **names),
        FLOOR + KEPT: EntryProcess("raw:floor", **names, kept=True),
        FLOOR_BY_NUMBER: EntryProcess("raw:floor_by_number", **names),
        "packed file, pread": EntryProcess("raw:pread", **names),
        "packed file, pread + xxh3": EntryProcess("raw:pread", **names, check=True),
        "LMDB": EntryProcess("raw:lmdb_by_number", path=str(tree), **count),
        "LMDB" + KEPT: EntryProcess("raw:lmdb_by_number", path=str(tree), **count, kept=True),
        "image folder": EntryProcess("raw:image_folder", path=str(folder), **count),
        "tar (tarfile)": EntryProcess("raw:tar_in_order", path=str(tar), **count),
        "cat of the shards": EntryProcess("raw:cat", path=str(shards), records=len(files)),
        "cat of the files": EntryProcess("raw:cat", path=str(folder), records=len(files)),
    }
    if source.rivals:
        rivals.write_litdata(folder, scratch / "litdata", scratch)
        options = count | {"path": str(scratch / "litdata")}
        prepare = "raw:litdata_in_order"
        for name, more in (
            (LITDATA, {}),
            (LITDATA + KEPT, {"kept": True}),
            (LITDATA + ", unread views", {"unread": True}),
        ):
            entries[name] = rivals.litdata_process(prepare, scratch, **options, **more)
    measured = contest(entries, rounds)
    result.raw(f"in order, {size}", measured)
    columns = {"us": "us a record"}
    title = f"In order, warm, {size}, {len(files):,} records"
    result.table(title, measured, columns, versus=FLOOR, by="us")
    data.remove(packed, tree, f"{tree}-lock", tar, shards, pairs, scratch / "litdata")
    return measured


def _shuffled(
    folder: Path, size: str, scratch: Path, rounds: int, result: Result
) -> dict[str, list[dict[str, Any]]]:
    files = data.listing(folder)
    count: dict[str, Any] = {"records": len(files), "payload": data.payload(files)}
    result.data(**{f"shuffled, {size}": count})
    shards = data.pack(folder, scratch / "shards")
    ways: dict[str, dict[str, Any]] = {
        SAMPLES: {"buffer": BUFFER, "batch": None},  # first: its memory is a target
        SAMPLES_IN_ORDER: {"buffer": None, "batch": None},
        BATCHES: {"buffer": BUFFER, "batch": 256},
        BATCHES_IN_ORDER: {"buffer": None, "batch": 256},
    }
    with (
        EntryProcess("raw:shardio_in_order", path=str(shards), **count) as opened,
        EntryProcess("raw:shardio_shuffled", path=str(shards), **count) as streamed,
    ):
        memory = {name: streamed.round(memory=True, **way) for name, way in ways.items()}
        opened.round()
        entries = {name: partial(streamed.round, **way) for name, way in ways.items()}
        measured = interleave({OPENED: opened.round} | entries, rounds)
    for name, found in memory.items():
        measured[name][0] |= found
    result.raw(f"shuffled, {size}", measured)
    title = f"Shuffled, warm, {size}, {len(files):,} records, buffer of {BUFFER:,}"
    columns = {"us": "us a record", "private_mb": "private memory, MB"}
    result.table(title, measured, columns, versus=OPENED, by="us")
    data.remove(shards)
    return measured


# --- entries --------------------------------------------------------------------------------------


def _rounds(
    open_: Callable[[], Iterable[Any]], records: int, payload: int, image: Any, kept: bool = False
) -> Round:
    """Open anew, as each worker of an epoch does, then time one pass over what was opened.

    Before, untimed, one pass counts records and bytes: all must do all the work.

    image: where an item has the image's bytes; None: it is these bytes.
    kept: opened once for all rounds.
    """
    opened = open_()
    sizes = [len(item if image is None else item[image]) for item in opened]
    assert (len(sizes), sum(sizes)) == (records, payload), (len(sizes), sum(sizes))

    def one_round() -> dict[str, Any]:
        dataset = opened if kept else open_()
        began = time.perf_counter()
        for _ in dataset:
            pass
        return {"us": (time.perf_counter() - began) / records * 1e6}

    return one_round


class _Each:
    """An iterable that calls a function for each argument, every time it is iterated."""

    def __init__(self, function: Callable[[Any], Any], arguments: Iterable[Any]) -> None:
        self.function, self.arguments = function, arguments

    def __iter__(self) -> Iterator[Any]:
        return map(self.function, self.arguments)


def shardio_in_order(path: str, records: int, payload: int) -> Round:
    import shardio

    return _rounds(lambda: shardio.open(path, decode=None), records, payload, "image")


def floor(path: str, pairs: str, kept: bool = False) -> Round:
    offsets = _offsets(pairs)
    mapped = _map(path)

    def one_round() -> dict[str, Any]:
        began = time.perf_counter()
        data = mapped if kept else _map(path)
        for start, stop in offsets:
            _ = data[start:stop]
        return {"us": (time.perf_counter() - began) / len(offsets) * 1e6}

    return one_round


def floor_by_number(path: str, pairs: str) -> Round:
    """The same as a dataset, offsets in a numpy array, read by `dataset[i]`."""
    import numpy as np

    class Packed:
        def __init__(self) -> None:
            self.data, self.offsets = _map(path), bounds

        def __getitem__(self, i: int) -> bytes:
            return self.data[self.offsets[i] : self.offsets[i + 1]]

    bounds = np.array([0, *(stop for _, stop in _offsets(pairs))], np.int64)

    def one_round() -> dict[str, Any]:
        began = time.perf_counter()
        dataset = Packed()
        for i in range(len(bounds) - 1):
            _ = dataset[i]
        return {"us": (time.perf_counter() - began) / (len(bounds) - 1) * 1e6}

    return one_round


def _offsets(pairs: str) -> list[tuple[int, int]]:
    return [(start, stop) for start, stop in json.loads(Path(pairs).read_text())]


def _map(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def pread(path: str, pairs: str, check: bool = False) -> Round:
    import xxhash

    offsets = _offsets(pairs)
    descriptor = os.open(path, os.O_RDONLY)
    read, checksum = os.pread, xxhash.xxh3_64_intdigest

    def one_round() -> dict[str, Any]:
        began = time.perf_counter()
        if check:
            for start, stop in offsets:
                checksum(read(descriptor, stop - start, start))
        else:
            for start, stop in offsets:
                _ = read(descriptor, stop - start, start)
        return {"us": (time.perf_counter() - began) / len(offsets) * 1e6}

    return one_round


def lmdb_by_number(path: str, records: int, payload: int, kept: bool = False) -> Round:
    keys = [b"%08d" % i for i in range(records)]
    env: Any = None

    def opened() -> Iterable[bytes]:
        nonlocal env
        if env is not None:
            env.close()  # the same file cannot be open twice in one process
        env = rivals.open_lmdb(path)
        return _Each(env.begin().get, keys)

    return _rounds(opened, records, payload, None, kept)


def image_folder(path: str, records: int, payload: int) -> Round:
    dataset = rivals.Folder(path)
    return _rounds(lambda: _Each(dataset.__getitem__, range(records)), records, payload, 0)


def tar_in_order(path: str, records: int, payload: int) -> Round:
    def one_pass() -> Iterable[bytes]:
        with tarfile.open(path, "r|") as tar:  # a stream, as WebDataset reads it
            for member in tar:
                if member.isreg():
                    file = tar.extractfile(member)
                    assert file
                    yield file.read()
                tar.members = []  # its list of all members so far would only grow

    return _rounds(one_pass, records, payload, None)


def cat(path: str, records: int) -> Round:
    names = sorted(str(file) for file in Path(path).rglob("*") if file.is_file())
    arguments = "\0".join(names).encode()

    def one_round() -> dict[str, Any]:
        began = time.perf_counter()
        with open(os.devnull, "wb") as nowhere:
            subprocess.run(["xargs", "-0", "cat"], input=arguments, stdout=nowhere, check=True)
        return {"us": (time.perf_counter() - began) / records * 1e6}

    return one_round


def litdata_in_order(
    path: str, records: int, payload: int, kept: bool = False, unread: bool = False
) -> Round:
    """Images as bytes, as its workers need them (rivals.litdata_dataset), and all others deliver.

    unread: as it hands them out, views of its mapped chunk: not a byte of the image has been read.
    """

    def opened() -> Iterable[Any]:
        dataset = rivals.litdata_dataset(path, shuffle=False)
        return dataset if unread else _Each(lambda item: bytes(item[0]), dataset)

    return _rounds(opened, records, payload, 0 if unread else None, kept)


def shardio_shuffled(path: str, records: int, payload: int) -> Round:
    from shardio import ShardDataset

    from . import spelling

    epoch = 0

    def one_round(buffer: int | None, batch: int | None, memory: bool = False) -> dict[str, Any]:
        nonlocal epoch
        order = spelling.unshuffled() if buffer is None else {"shuffle_buffer": buffer}
        dataset = ShardDataset(
            path, decode=None, batch_size=batch, **order,
            collate_fn=None if batch is None else list,
        )  # fmt: skip
        dataset.set_epoch(epoch)
        epoch += 1
        if memory:
            return {"private_mb": _growth(dataset, payload) / 1e6}
        began = time.perf_counter()
        for _ in dataset:
            pass
        return {"us": (time.perf_counter() - began) / records * 1e6}

    return one_round


def _growth(dataset: Any, payload: int) -> int:
    """How much private memory an epoch takes at the most; looked at 100 times on the way."""
    before = most = private_bytes()
    every, size = max(1, len(dataset) // 100), 0
    for i, got in enumerate(dataset):
        size += sum(len(sample["image"]) for sample in (got if isinstance(got, list) else [got]))
        if i % every == 0:
            most = max(most, private_bytes())
    assert size == payload, size
    return most - before


def private_bytes() -> int:
    """Memory that is this process's alone: Private_Dirty of /proc/self/smaps_rollup."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty"):
            return int(line.split()[1]) << 10
    raise OSError("no Private_Dirty in /proc/self/smaps_rollup")
