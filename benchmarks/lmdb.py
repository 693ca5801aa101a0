"""LMDB shards against record shards: reading, packing, size, and what opening costs.

Reading is warm, one process each, taking turns, all fields, checksums on; liblmdb reads the same
LMDB shards beside it, by its map and unchecked. Packing is one process, from a warm page cache to
a flushed device. Opening is a shard at a time, of files in the page cache; what else could check an
environment before its first use stands beside it: its SHA-256, and lmdb's own offline verifier.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from . import data
from .harness import EntryProcess, Result, contest, interleave, ratio
from .raw import Round, _rounds

RECORD, LMDB = "record", "lmdb"
LIBLMDB = "liblmdb, unchecked"
ORDER, RANDOM = "in order", "by number, in no order"
OPENED = "lmdb, opened"


def run(source: data.Data, result: Result) -> None:
    rounds = 3 if source.quick else 9
    few = 200 if source.quick else 3_000
    for size in ("0.9 KB", "110 KB"):
        folder = source.cifar() if size == "0.9 KB" else source.photos(few)
        files = data.listing(folder)
        payload = data.payload(files)
        result.data(**{size: {"records": len(files), "payload_bytes": payload}})
        outs = {kind: source.scratch / kind for kind in (RECORD, LMDB)}
        _pack(folder, outs, size, payload, min(rounds, 5), result)
        for kind, out in outs.items():
            data.pack(folder, out, "--format", kind)
        _read(outs, size, {"records": len(files), "payload": payload}, rounds, result)
        _open(outs, size, rounds, result)
        data.remove(*outs.values())


def _read(
    outs: dict[str, Path], size: str, count: dict[str, int], rounds: int, result: Result
) -> None:
    for way, function in ((ORDER, "raw:shardio_in_order"), (RANDOM, "lmdb:by_number")):
        entries = {
            kind: EntryProcess(function, path=str(out), **count) for kind, out in outs.items()
        }
        shuffled = way == RANDOM
        entries[LIBLMDB] = EntryProcess(
            "lmdb:by_liblmdb", path=str(outs[LMDB]), **count, shuffled=shuffled
        )
        measured = contest(entries, rounds)
        result.raw(f"{way}, {size}", measured)
        title = f"Read {way}, warm, {size}, {count['records']:,} records"
        result.table(title, measured, {"us": "us a record"}, versus=RECORD, by="us")
        found = ratio(measured, LMDB, RECORD, "us")
        result.target(f"{way}, {size}, of the time of record shards", found, 1.5)


def _pack(
    folder: Path, outs: dict[str, Path], size: str, payload: int, rounds: int, result: Result
) -> None:
    entries: dict[str, Callable[[], dict[str, Any]]] = {
        kind: partial(_packed, folder, out, kind, payload) for kind, out in outs.items()
    }
    with EntryProcess("rivals:lmdb_writer", folder=str(folder)) as writer:
        entries["liblmdb, one file"] = partial(_written, writer, outs[LMDB], payload)
        for entry in entries.values():
            entry()
        measured = interleave(entries, rounds)
    result.raw(f"packing, {size}", measured)
    columns = {"seconds": "s", "percent": "over the payload, %"}
    title = f"Packing {size}, one process; start-up included, but for liblmdb"
    result.table(title, measured, columns, versus=RECORD, by="seconds")


def _packed(folder: Path, out: Path, kind: str, payload: int) -> dict[str, Any]:
    os.sync()
    began = time.perf_counter()
    data.pack(folder, out, "--format", kind, "--jobs", "1")
    return _finished(time.perf_counter() - began, out, payload)


def _written(writer: EntryProcess, out: Path, payload: int) -> dict[str, Any]:
    os.sync()
    return _finished(writer.round(out=str(out))["seconds"], out, payload)


def _finished(seconds: float, out: Path, payload: int) -> dict[str, Any]:
    size = data.folder_bytes(out) if out.is_dir() else out.stat().st_size
    data.remove(out, f"{out}-lock")
    return {"seconds": seconds, "percent": (size / payload - 1) * 100}


def _open(outs: dict[str, Path], size: str, rounds: int, result: Result) -> None:
    entries = {
        "record, opened": EntryProcess("lmdb:opening", path=str(outs[RECORD])),
        OPENED: EntryProcess("lmdb:opening", path=str(outs[LMDB])),
        "lmdb, verify_open=False": EntryProcess("lmdb:opening", path=str(outs[LMDB]), verify=False),
        "SHA-256 of the file": EntryProcess("lmdb:hashing", path=str(outs[LMDB])),
        "lmdb.verify": EntryProcess("lmdb:verifying", path=str(outs[LMDB])),
    }
    measured = contest(entries, rounds)
    result.raw(f"opening, {size}", measured)
    result.table(f"Opening, {size}", measured, {"ms": "ms a shard"}, versus=OPENED, by="ms")


# --- entries --------------------------------------------------------------------------------------


def by_number(path: str, records: int, payload: int) -> Round:
    import shardio
    from shardio.dataset.sequence import ShardSequence

    numbers = _shuffled(records)

    class Numbered:
        def __init__(self, opened: ShardSequence) -> None:
            self.opened = opened

        def __iter__(self) -> Any:
            return map(self.opened.__getitem__, numbers)

    return _rounds(lambda: Numbered(shardio.open(path, decode=None)), records, payload, "image")


def by_liblmdb(path: str, records: int, payload: int, shuffled: bool) -> Round:
    import lmdb

    found: list[tuple[Any, bytes]] = []
    for name in _names(path):
        env = lmdb.open(
            f"{path}/{name}", readonly=True, lock=False, readahead=False, meminit=False,
            max_spare_txns=1, subdir=False,
        )  # fmt: skip
        get = env.begin().get
        keys = range(env.stat()["entries"] - 1)
        found += [(get, key.to_bytes(4, "big")) for key in keys]
    assert len(found) == records
    if shuffled:
        found = [found[number] for number in _shuffled(records)]

    def one_round() -> dict[str, Any]:
        began = time.perf_counter()
        for get, key in found:
            _ = get(key)
        return {"us": (time.perf_counter() - began) / records * 1e6}

    return one_round


def opening(path: str, verify: bool = True) -> Round:
    from shardio.formats import manifest, open_shard
    from shardio.storage.location import locate

    storage = locate(path)
    made = manifest.load(storage)
    wanted = made.opening(storage, verify=verify)

    def one_round() -> dict[str, Any]:
        began = time.perf_counter()
        for number in range(made.shards):
            open_shard(made.format, wanted, made.shard(number)).close()
        return {"ms": (time.perf_counter() - began) / made.shards * 1e3}

    return one_round


def hashing(path: str) -> Round:
    from shardio.storage.location import locate

    storage = locate(path)
    return _each(path, lambda name: storage.open(name).sha256())


def verifying(path: str) -> Round:
    from lmdb.verify import verify

    return _each(path, lambda name: verify(f"{path}/{name}", subdir=False))


def _each(path: str, check: Callable[[str], Any]) -> Round:
    names = _names(path)

    def one_round() -> dict[str, Any]:
        began = time.perf_counter()
        for name in names:
            check(name)
        return {"ms": (time.perf_counter() - began) / len(names) * 1e3}

    return one_round


def _names(path: str) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.endswith(".lmdb"))


def _shuffled(records: int) -> list[int]:
    import numpy as np

    numbers: list[int] = np.random.default_rng(0).permutation(records).tolist()
    return numbers
