"""60,000 rows of 784 bytes, batches of 300: one epoch by each way that users try, and resident.

The program that started this project: item by item, an epoch of data that fits in memory takes
long, and workers make it no better. Random bytes with labels, shuffled anew in each epoch by all.
"float" divides each item by 255 as a float32, as ToTensor does. The trainer takes each batch and
does nothing with it. What others are compared with is one tensor and slices of a permutation,
`tensor[rows]`, as users write it; the same by `index_select` is the true floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from . import data
from .harness import EntryProcess, Result, contest, ratio

RECORDS, WIDTH, BATCH = 60_000, 784, 300
FLOOR, SELECTED = "one tensor by a permutation", "the same by index_select"
RESIDENT = "resident"
PER_ITEM, PER_FLOAT, TENSORS = "per item", "per item, float", "TensorDataset"

REPEATS = 20  # epochs in a row, of what takes a few milliseconds

Round = Callable[..., dict[str, Any]]


def run(source: data.Data, result: Result) -> None:
    rounds, records = (2, 3_000) if source.quick else (7, RECORDS)
    path = write(source.scratch / "rows", records)
    result.data(records=records, bytes=records * WIDTH, batch=BATCH)
    where = "resident_rows:data_loader"
    entries = {
        FLOOR: EntryProcess("resident_rows:sliced", records=records, selects=False),
        SELECTED: EntryProcess("resident_rows:sliced", records=records, selects=True),
        RESIDENT: EntryProcess("resident_rows:resident", path=str(path), records=records),
        TENSORS: EntryProcess(where, kind="tensors", workers=0, records=records),
    }
    for name, kind in ((PER_ITEM, "uint8"), (PER_FLOAT, "float32")):
        for workers in (0, 2, 4):
            entries[f"{name}, {workers} workers"] = EntryProcess(
                where, kind=kind, workers=workers, records=records
            )
    entries["ShardLoader, 2 workers"] = EntryProcess(
        "resident_rows:shard_loader", path=str(path), records=records
    )
    measured = contest(entries, rounds)
    result.raw("epochs", measured)
    columns = {"ms": "ms an epoch", "images_per_s": "rows/s"}
    what = f"An epoch of {records:,} x {WIDTH} uint8 with labels, batches of {BATCH}"
    result.table(what, measured, columns, versus=FLOOR, by="ms")
    found = ratio(measured, RESIDENT, FLOOR, "ms")
    result.target(f"{RESIDENT}, time of {FLOOR}", found, 1.3)


def write(out: Path, records: int) -> Path:
    import numpy as np

    import shardio

    random = np.random.default_rng(0)
    with shardio.Writer(out, fields={"data": "array", "label": "int"}) as writer:
        for _ in range(records):
            row = random.integers(0, 256, WIDTH, np.uint8)
            writer.write({"data": row, "label": int(random.integers(10))})
    return out


# --- entries --------------------------------------------------------------------------------------


def _tensors(records: int) -> Any:
    import torch

    return (
        torch.randint(0, 256, (records, WIDTH), dtype=torch.uint8),
        torch.randint(0, 10, (records,)),
    )


def _rounds(epoch: Callable[[int], Iterable[Any]], records: int, repeats: int = 1) -> Round:
    """epoch: the batches of the epoch of a number."""
    import torch

    torch.set_num_threads(1)
    number = 0

    def one_round() -> dict[str, Any]:
        nonlocal number
        rows = 0
        began = time.perf_counter()
        for _ in range(repeats):
            for batch, labels in epoch(number):
                rows += len(batch)
                assert len(batch) == len(labels)
            number += 1
        seconds = (time.perf_counter() - began) / repeats
        assert rows == records * repeats, rows
        return {"ms": seconds * 1e3, "images_per_s": records / seconds}

    return one_round


def sliced(records: int, selects: bool) -> Round:
    import torch

    rows, labels = _tensors(records)

    def epoch(_: int) -> Iterator[Any]:
        order = torch.randperm(records)
        for start in range(0, records, BATCH):
            chosen = order[start : start + BATCH]
            if selects:
                yield rows.index_select(0, chosen), labels.index_select(0, chosen)
            else:
                yield rows[chosen], labels[chosen]

    return _rounds(epoch, records, REPEATS)


class Items:
    """The Dataset of the question."""

    def __init__(self, records: int, as_float: bool) -> None:
        self.rows, self.labels = _tensors(records)
        self.as_float = as_float

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        return (row.float() / 255 if self.as_float else row), self.labels[index]


def data_loader(kind: str, workers: int, records: int) -> Round:
    import warnings

    from torch.utils.data import DataLoader, TensorDataset

    warnings.filterwarnings("ignore", "This DataLoader will create")  # 4 on fewer cores: on purpose
    dataset: Any = (
        TensorDataset(*_tensors(records))
        if kind == "tensors"
        else Items(records, as_float=kind == "float32")
    )
    more: dict[str, Any] = {"persistent_workers": True} if workers else {}
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=workers, **more)
    return _rounds(lambda _: loader, records)


def resident(path: str, records: int) -> Round:
    return _shards(path, records, REPEATS, resident="ram")


def shard_loader(path: str, records: int) -> Round:
    return _shards(path, records, 1, num_workers=2)


def _shards(path: str, records: int, repeats: int, **options: Any) -> Round:
    from shardio import ShardDataset, ShardLoader

    # A true permutation, as the others have it.
    dataset = ShardDataset(path, batch_size=BATCH, fields=("data", "label"), shuffle_buffer="all")
    loader = ShardLoader(dataset, **options)

    def epoch(number: int) -> Any:
        loader.set_epoch(number)
        return loader

    return _rounds(epoch, records, repeats)
