"""The first batch of 1,000 shards, decoded, in a fresh process with torch imported: milliseconds.

No workers. The clock starts before the dataset is constructed and stops with the first batch of 64
images in hand; each round is a new process. `import` is what the library's own import takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from . import data, rivals
from .harness import EntryProcess, Result, interleave, median

BATCH = 64


def run(source: data.Data, result: Result) -> None:
    rounds = 2 if source.quick else 9
    folder = source.cifar()
    files = data.listing(folder)
    shards = data.pack(folder, source.scratch / "shards", "--max-records", str(len(files) // 1_000))
    result.data(records=len(files), shards=len(list(shards.glob("*.shard"))))

    def own(function: str, path: Path) -> dict[str, Any]:
        with EntryProcess(f"startup:{function}", path=str(path)) as entry:
            return entry.round()

    def litdata(path: Path) -> dict[str, Any]:
        with rivals.litdata_process("startup:litdata", source.scratch, path=str(path)) as entry:
            return entry.round()

    entries: dict[str, Callable[[], dict[str, Any]]] = {
        "shardio": partial(own, "shardio", shards),
        "image folder": partial(own, "image_folder", folder),
    }
    if source.rivals:
        chunks = source.scratch / "litdata"
        rivals.write_litdata(folder, chunks, source.scratch)
        entries["LitData (1 chunk)"] = partial(litdata, chunks)
    for entry in entries.values():
        entry()
    measured = interleave(entries, rounds)
    result.raw("starts", measured)
    columns = {
        "ms": "first batch, ms",
        "construct_ms": "constructing in it, ms",
        "import_ms": "import, ms",
    }
    count = result.facts["data"]["shards"]
    title = f"First batch of {BATCH}, {count:,} shards, {len(files):,} images"
    result.table(title, measured, columns, versus="shardio", by="ms")
    result.target("first batch", median(measured["shardio"], "ms"), 100, unit="ms")


# --- entries --------------------------------------------------------------------------------------


def shardio(path: str) -> Callable[..., dict[str, Any]]:
    import torch.utils.data

    def one_round() -> dict[str, Any]:
        started = time.perf_counter()
        from shardio import RandomResizedCrop, ShardDataset

        imported = time.perf_counter()
        crop = RandomResizedCrop(32, flip=True)
        dataset = ShardDataset(path, batch_size=BATCH, fields=("image", "label"), transform=crop)
        constructed = time.perf_counter()
        images, _ = next(iter(torch.utils.data.DataLoader(dataset, batch_size=None)))
        return _found(images, started, imported, constructed)

    return one_round


def image_folder(path: str) -> Callable[..., dict[str, Any]]:
    import torch.utils.data

    def one_round() -> dict[str, Any]:
        started = time.perf_counter()
        from shardio import RandomResizedCrop, collate

        imported = time.perf_counter()
        dataset = rivals.Folder(path, RandomResizedCrop(32, flip=True))  # lists the folder
        constructed = time.perf_counter()
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=BATCH, shuffle=True, collate_fn=collate
        )
        images, _ = next(iter(loader))
        return _found(images, started, imported, constructed)

    return one_round


def litdata(path: str) -> Callable[..., dict[str, Any]]:
    import torch.utils.data  # noqa: F401

    def one_round() -> dict[str, Any]:
        started = time.perf_counter()
        import litdata

        from shardio import RandomResizedCrop, collate

        imported = time.perf_counter()
        crop = RandomResizedCrop(32, flip=True)
        dataset = rivals.litdata_dataset(path, shuffle=True, transform=crop)
        constructed = time.perf_counter()
        loader = litdata.StreamingDataLoader(
            dataset, batch_size=BATCH, shuffle=True, collate_fn=collate
        )
        images, _ = next(iter(loader))
        return _found(images, started, imported, constructed)

    return one_round


def _found(images: Any, started: float, imported: float, constructed: float) -> dict[str, Any]:
    ended = time.perf_counter()
    assert images.shape == (BATCH, 3, 32, 32), images.shape
    return {
        "ms": (ended - imported) * 1e3,
        "construct_ms": (constructed - imported) * 1e3,
        "import_ms": (imported - started) * 1e3,
    }
