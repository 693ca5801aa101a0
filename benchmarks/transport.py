"""Batches that cost nothing to make, by DataLoader and ShardLoader: images/s, CPU of the trainer.

Batches of 256 images of 224 x 224 (38.5 MB), uint8. One dataset for all: each of its records gives
a whole batch, a constant one, that `collate_fn` writes to the memory which the loader offers: for
a DataLoader shared memory, as torch's own collate takes it, for ShardLoader a buffer. So each
loader does what it must: offer memory, write all of it once, send it, take it over. The second
table makes the same batches of rows: 256 records, whose transform returns a constant image.

The trainer looks at a byte of each page of each batch, as its copy to a GPU would: memory that was
never mapped before costs a page fault there. Its CPU time has two parts: "in next()" is taking a
batch over and giving the last one back, which is all that a loader does in the trainer; "looking"
is the rest, which "made in the trainer", the row without a loader, has as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import data, spelling
from .harness import EntryProcess, Result, contest, median, ratio

BATCH, SIZE = 256, 224
AHEAD = 2
Round = Callable[..., dict[str, Any]]

LOADER, VIEWS, COPIES = "DataLoader", "ShardLoader", "ShardLoader, copy=True"


def run(source: data.Data, result: Result) -> None:
    rounds, batches = (2, 30) if source.quick else (7, 200)
    records = batches + 40  # what is ahead of the trainer is not counted, at the beginning
    path = write(source.scratch / "batches", records)
    rows = write(source.scratch / "rows", BATCH * (batches // 4 + 40))
    result.data(batch=[BATCH, SIZE, SIZE, 3], bytes=BATCH * SIZE * SIZE * 3, batches=batches)
    entries = {
        f"{name}, {workers} workers": EntryProcess(
            f"transport:{function}", path=str(path), workers=workers, batches=batches, **more
        )
        for workers in (1, 2)
        for name, function, more in (
            (LOADER, "data_loader", {}),
            (VIEWS, "shard_loader", {"copy": False}),
            (COPIES, "shard_loader", {"copy": True}),
        )
    }
    entries["made in the trainer"] = EntryProcess(
        "transport:data_loader", path=str(path), workers=0, batches=batches
    )
    measured = contest(entries, rounds)
    result.raw("ready", measured)
    columns = {
        "images_per_s": "images/s",
        "next_ms": "CPU ms of the trainer in next(), a batch",
        "looking_ms": "looking at it, CPU ms",
    }
    what = f"Ready batches of {BATCH} x {SIZE} x {SIZE} x 3, uint8"
    base = f"{LOADER}, 1 workers"
    result.table(what, measured, columns, versus=base, by="images_per_s")

    entries = {
        f"{name}, {workers} workers": EntryProcess(
            f"transport:{function}",
            path=str(rows),
            workers=workers,
            batches=batches // 4,
            rows=True,
        )
        for workers in (1, 2)
        for name, function in ((LOADER, "data_loader"), (VIEWS, "shard_loader"))
    }
    of_rows = contest(entries, rounds)
    result.raw("rows", of_rows)
    what = f"The same batches of {BATCH} rows, each a constant image from a transform"
    result.table(what, of_rows, columns, versus=base, by="images_per_s")

    for workers in (1, 2):
        one, other = (f"{name}, {workers} workers" for name in (VIEWS, LOADER))
        found = ratio(measured, one, other, "images_per_s")
        result.target(f"{one}, images/s, of DataLoader's", found, -6.0)
    for name, limit in ((VIEWS, 0.2), (COPIES, 3.0)):
        found = median(measured[f"{name}, 1 workers"], "next_ms")
        result.target(f"{name}, the trainer's CPU time a batch", found, limit, unit="ms")


def write(out: Path, records: int) -> Path:
    """A dataset of so many records of next to nothing."""
    import shardio

    with shardio.Writer(out, fields={"image": "image", "label": "int"}) as writer:
        for i in range(records):
            writer.write({"image": b"\xff\xd8\xff%d" % i, "label": i % 10})
    return out


# --- entries --------------------------------------------------------------------------------------


class Ready:
    """A collate_fn: one item to a whole batch, of which all is there but its place."""

    def __init__(self) -> None:
        import torch

        self.labels = torch.arange(BATCH)

    def __call__(self, items: list[Any]) -> Any:
        import torch

        from shardio.dataset.collate import empty

        images = empty((BATCH, SIZE, SIZE, 3), torch.uint8).fill_(7)
        return images.permute(0, 3, 1, 2), self.labels


def _dataset(path: str, rows: bool) -> Any:
    import numpy as np

    from shardio import ShardDataset

    if not rows:
        units = spelling.grouped(ShardDataset, unit=1)
        return ShardDataset(
            path, batch_size=1, fields=("label",), decode=None, collate_fn=Ready(), **units
        )
    blank = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
    return ShardDataset(
        *(path,), batch_size=BATCH, fields=("image", "label"), decode=None,
        transform=lambda _: blank,
    )  # fmt: skip


def _rounds(dataset: Any, loader: Any, workers: int, batches: int) -> Round:
    import torch

    torch.set_num_threads(1)
    epoch = 0

    def one_round() -> dict[str, Any]:
        nonlocal epoch
        dataset.set_epoch(epoch)
        epoch += 1
        iterator = iter(loader)
        # What a loader made ahead, between rounds, is not counted.
        ahead = 2 * AHEAD * max(1, workers)
        batch: Any = None
        for _ in range(ahead):
            batch = None
            batch = next(iterator)
            _look(batch)
        in_next = looking = 0.0
        began = time.perf_counter()
        for _ in range(batches):
            start = time.process_time()  # of this process alone, all of its threads
            batch = None
            batch = next(iterator)
            taken = time.process_time()
            _look(batch)
            in_next += taken - start
            looking += time.process_time() - taken
        seconds = time.perf_counter() - began
        del batch, iterator
        return {
            "images_per_s": batches * BATCH / seconds,
            "next_ms": in_next / batches * 1e3,
            "looking_ms": looking / batches * 1e3,
        }

    return one_round


def _look(batch: Any) -> None:
    images = batch[0]
    assert images.shape == (BATCH, 3, SIZE, SIZE)
    images.permute(0, 2, 3, 1).reshape(-1)[::4096].sum()


def data_loader(path: str, workers: int, batches: int, rows: bool = False) -> Round:
    from torch.utils.data import DataLoader

    dataset = _dataset(path, rows)
    more: dict[str, Any] = {"prefetch_factor": AHEAD, "persistent_workers": True} if workers else {}
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, **more)
    return _rounds(dataset, loader, workers, batches)


def shard_loader(
    path: str, workers: int, batches: int, copy: bool = False, rows: bool = False
) -> Round:
    from shardio import ShardLoader

    dataset = _dataset(path, rows)
    loader = ShardLoader(dataset, num_workers=workers, threads=1, prefetch_factor=AHEAD, copy=copy)
    return _rounds(dataset, loader, workers, batches)
