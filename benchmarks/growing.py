"""A dataset that grows: what appending, updating, dropping and many versions cost.

Changes are timed in new processes, from the call on, of a dataset of small files in the page cache.
Readers read whole epochs of 256 rows a batch, undecoded, by two workers, and take turns. Opening
reads a manifest, and no shard; that of 10^9 records is written without its shards.
"""

from __future__ import annotations

import hashlib
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from . import data
from .harness import EntryProcess, Result, ending, interleave, median

PART = 100  # one in so many is new, or is dropped
FEW = 10_000  # one in so many, for an opt-out
VERSIONS = 1_000
MANY = 1_000_000
SOME = {"100": 100, "500": 500}
RECORDS, DROPPED, SHARDS = 10**9, 10**6, 10_000
ALONE = "pack 1 % alone"
WHOLE, LESS, BESIDE = "all records", "1 % dropped", "1 % dropped, labels annotated"


def run(source: data.Data, result: Result) -> None:
    rounds = 1 if source.quick else 7
    cifar, photos = source.cifar(), source.photos(200 if source.quick else 5_000)
    _changes(source, result, cifar, rounds)
    for name, folder in (("files of 0.9 KB", cifar), ("photographs", photos)):
        _reading(source, result, name, folder, rounds)
    _million(source, result, rounds)
    _opening(source, result, rounds)


# --- changes --------------------------------------------------------------------------------------


def _changes(source: data.Data, result: Result, folder: Path, rounds: int) -> None:
    """Append 1 %, update, and drop 1 in 10,000, of small files."""
    import shardio

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    new, base, out = (source.scratch / name for name in ("new", "base", "out"))
    for path in files[::PART]:
        target = new / path.parent.name / f"new_{path.name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    shardio.pack(folder, base, jobs=2)
    shardio.update(folder, base, jobs=2)
    keys = [f"{path.parent.name}/{path.name}" for path in files[::FEW]]
    calls = {
        ALONE: {"command": "pack", "given": [str(new), str(out)]},
        "append 1 %": {"command": "append", "given": [str(new), str(out)]},
        "update, nothing changed": {"command": "update", "given": [str(folder), str(out)]},
        "update by contents": {
            "command": "update",
            "given": [str(folder), str(out)],
            "options": {"checksum": True},
        },
        f"drop {len(keys)}": {"command": "drop", "given": [str(out)], "options": {"keys": keys}},
        "pack all": {"command": "pack", "given": [str(folder), str(out)]},
    }
    entries = {name: partial(_change, str(base), str(out), **call) for name, call in calls.items()}
    measured = interleave(entries, rounds)
    what = f"a dataset of {len(files):,} files of 0.9 KB"
    result.raw(f"changes of {what}", measured)
    result.table(
        f"Changes of {what}", measured, {"seconds": "s", "cpu": "CPU s"},
        versus=ALONE, by="seconds",
    )  # fmt: skip
    share = median(measured["append 1 %"], "seconds") / median(measured[ALONE], "seconds")
    result.target("appending 1 %, of the time to pack it alone", share, 3.0)
    for path in (new, base, out):
        data.remove(path)


def _million(source: data.Data, result: Result, rounds: int) -> None:
    """Change a dataset of many small records, most of which no change touches."""
    import shardio

    count = 10_000 if source.quick else MANY
    base, out, new = (source.scratch / name for name in ("base", "out", "new"))
    kinds = {"image": "bytes", "label": "int"}
    with shardio.Writer(base, fields=kinds, shard_size="4MiB") as writer:
        for number in range(count):
            key = f"{number % 100:03d}/{number:07d}.bin"
            writer.write({"__key__": key, "image": b"%0100d" % number, "label": number % 100})
    keys = shardio.open(base, decode=None).keys()
    some = {name: dict.fromkeys(keys[:: count // many]) for name, many in SOME.items()}
    tables = {name: source.scratch / f"{name}.csv" for name in some}
    for name, chosen in some.items():
        lines = ["key,label", *(f"{key},{number % 100}" for number, key in enumerate(chosen))]
        tables[name].write_text("\n".join(lines))
    first = [str(out)]
    calls: dict[str, dict[str, Any]] = {
        "drop 100": {"command": "drop", "given": first, "options": {"keys": [*some["100"]]}},
        "drop 100 and erase them": {
            "command": "drop",
            "given": first,
            "options": {"keys": [*some["100"]], "erase": True},
        },
        "annotate 500 labels": {"command": "annotate", "given": [*first, str(tables["500"])]},
        "compact": {"command": "compact", "given": first, "options": {"shard_size": "64MiB"}},
    }
    entries = {name: partial(_change, str(base), str(out), **call) for name, call in calls.items()}
    measured = interleave(entries, min(rounds, 3))
    what = f"a dataset of {count:,} records of 100 bytes"
    result.raw(f"changes of {what}", measured)
    result.table(
        f"Changes of {what}",
        measured,
        {"seconds": "s", "cpu": "CPU s", "written_mb": "MB more"},
    )
    for path in (new, base, out):
        data.remove(path)


def _change(
    base: str, out: str, command: str, given: list[str], options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Time a change of a copy of the dataset; or packing, into nothing."""
    data.remove(Path(out))
    if command != "pack":
        shutil.copytree(base, out)
    with EntryProcess("growing:change", command=command, given=given, options=options) as entry:
        found: dict[str, Any] = entry.round()
    if command != "pack":
        found["written_mb"] = (_bytes_in(out) - _bytes_in(base)) / 1e6
    return found


def _bytes_in(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def change(
    command: str, given: list[str], options: dict[str, Any] | None = None
) -> Callable[..., dict[str, Any]]:
    import shardio

    call = getattr(shardio, command)
    jobs = {} if command in ("annotate", "drop") else {"jobs": 2}

    def once() -> dict[str, Any]:
        began, before = time.perf_counter(), _cpu_s()
        call(*given, **jobs, **(options or {}))
        return {"seconds": time.perf_counter() - began, "cpu": _cpu_s() - before}

    return once


def _cpu_s() -> float:
    """Return the CPU time of this process and of those that it started and that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


# --- reading --------------------------------------------------------------------------------------


def _reading(source: data.Data, result: Result, name: str, folder: Path, rounds: int) -> None:
    """Read epochs of a dataset, of one with 1 % dropped, and of one with labels beside, too."""
    import shardio

    paths = {what: source.scratch / what.replace(" ", "-") for what in (WHOLE, LESS, BESIDE)}
    for path in paths.values():
        shardio.pack(folder, path, jobs=2)
    whole = shardio.open(paths[WHOLE], decode=None)
    keys = whole.keys()
    labels = dict(zip(keys, whole.columns("label").tolist(), strict=True))
    for what in (LESS, BESIDE):
        shardio.drop(paths[what], keys=keys[::PART])
    left = shardio.open(paths[BESIDE], decode=None).keys()
    shardio.annotate(paths[BESIDE], {key: {"label": labels[key]} for key in left})
    for loader in ("DataLoader", "ShardLoader"):
        entries = {
            what: EntryProcess("growing:read", path=str(path), loader=loader)
            for what, path in paths.items()
        }
        with ending(entries):
            for entry in entries.values():
                entry.round()
            rounds_of = {what: entry.round for what, entry in entries.items()}
            measured = interleave(rounds_of, rounds)
        what = f"{len(keys):,} {name}, {loader}"
        result.raw(f"reading {what}", measured)
        result.table(f"Reading {what}", measured, {"rate": "images/s"}, versus=WHOLE, by="rate")
        for less in (LESS, BESIDE):
            share = median(measured[less], "rate") / median(measured[WHOLE], "rate")
            result.target(f"reading with {less}, {name}, {loader}", share, -0.97)
    for path in paths.values():
        data.remove(path)


def read(path: str, loader: str) -> Callable[..., dict[str, Any]]:
    import torch

    import shardio

    torch.set_num_threads(1)
    dataset = shardio.ShardDataset(path, batch_size=256, decode=None, fields=("image", "label"))
    if loader == "DataLoader":
        loading: Any = torch.utils.data.DataLoader(
            dataset, batch_size=None, num_workers=2, persistent_workers=True
        )
    else:
        loading = shardio.ShardLoader(dataset, num_workers=2)

    def once() -> dict[str, Any]:
        began = time.perf_counter()
        rows = sum(len(labels) for _, labels in loading)
        return {"rate": rows / (time.perf_counter() - began)}

    return once


# --- opening --------------------------------------------------------------------------------------


def _opening(source: data.Data, result: Result, rounds: int) -> None:
    """Open a dataset with many versions behind it, and a huge one with many dropped records."""
    count, records, dropped = VERSIONS, RECORDS, DROPPED
    if source.quick:
        count, records, dropped = 10, 10**6, 10**3
    plain = _huge(source.scratch / "plain", records, 0)
    pairs = {
        f"{count:,} versions": (_huge(source.scratch / "one", 10**6, 0), "none", 1.1),
        f"{records:.0e} records, {dropped:.0e} dropped".replace("e+0", "e"): (plain, "none", 1.5),
    }
    versions = _huge(source.scratch / "versions", 10**6, 0)
    _commit(versions, count)
    others = [versions, _huge(source.scratch / "dropped", records, dropped)]
    for (name, (without, _, limit)), changed in zip(pairs.items(), others, strict=True):
        entries = {"without": partial(_open, without), "with": partial(_open, changed)}
        _open(changed)
        measured = interleave(entries, rounds)
        result.raw(f"opening, {name}", measured)
        result.table(
            f"Opening, {name}", measured, {"seconds": "s", "memory_mb": "memory, MB"},
            versus="without", by="seconds",
        )  # fmt: skip
        for key in ("seconds", "memory_mb"):
            share = median(measured["with"], key) / median(measured["without"], key)
            result.target(f"opening, {name}: {key}", share, limit)
    for path in (plain, source.scratch / "one", *others):
        data.remove(path)


def _open(path: Path) -> dict[str, Any]:
    with EntryProcess("growing:opened", path=str(path)) as entry:
        return entry.round()


def opened(path: str) -> Callable[..., dict[str, Any]]:
    import shardio
    from shardio.dataset import shard_dataset as _  # noqa: F401 - importing it is not measured

    def once() -> dict[str, Any]:
        began = time.perf_counter()
        dataset = shardio.ShardDataset(path, batch_size=256, decode=None)
        seconds = time.perf_counter() - began
        assert dataset.records
        return {"seconds": seconds, "memory_mb": _memory_mb()}

    return once


def _memory_mb() -> float:
    """Return the most memory that this process had, with all that it imported."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _huge(folder: Path, records: int, dropped: int) -> Path:
    """Write the manifest of a dataset whose shards are not there."""
    import numpy as np

    from shardio.formats import manifest
    from shardio.formats.base import ShardInfo
    from shardio.formats.sample import Schema
    from shardio.formats.version import dump_excluded

    folder.mkdir()
    shards = min(SHARDS, records // 1_000)
    each, fields = records // shards, (("__key__", "key"), ("image", "image"), ("label", "int"))
    digests = [hashlib.sha256(b"%d" % number).digest() for number in range(shards)]
    infos = [
        ShardInfo(manifest.shard_name(number, digest), number, each, each * 1_000, digest, number)
        for number, digest in enumerate(digests)
    ]
    one = manifest.make(
        infos, dataset_id=bytes(16), format="record", schema=Schema(fields), classes=None,
        options={}, blob_bytes=0,
    )  # fmt: skip
    if dropped:
        numbers = np.arange(0, records, records // dropped)
        side, found = dump_excluded(one.dataset_id, numbers)
        (folder / side.name).write_bytes(found)
        one = replace(one, version=manifest.GROWN, excluded=side)
    (folder / manifest.MANIFEST).write_bytes(one.dump())
    return folder


def _commit(folder: Path, count: int) -> None:
    """Commit so many versions, of which each drops nothing more."""
    from shardio.packing.versions import changing, commit

    for _ in range(count):
        with changing(str(folder)) as newest:
            commit(str(folder), newest, newest, "nothing", {}, {})
