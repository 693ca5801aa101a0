"""Workers and prefetching of a DataLoader: images/s, memory, and what sending a batch costs.

Photographs, decoded to 224 px in batches of 64, warm, for several counts of workers and batches
prefetched. Then the same batches without any work, from 0 to 2 workers: what is left is torch's
transport, which the trainer pays for, as uint8 and as the float32 that many transforms make.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from . import data
from .harness import EntryProcess, Result, contest, cpu_seconds
from .train import tree_bytes

BATCH, SIZE = 64, 224


def run(source: data.Data, result: Result) -> None:
    rounds = 2 if source.quick else 5
    folder = source.photos(2_000 if not source.quick else 500)
    files = data.listing(folder)
    shards = data.pack(folder, source.scratch / "shards")
    result.data(records=len(files), payload_bytes=data.payload(files))
    decoding = {
        f"{workers} workers, {ahead} ahead": EntryProcess(
            "workers:decoded", path=str(shards), workers=workers, ahead=ahead
        )
        for workers, ahead in ((0, 2), (1, 2), (2, 1), (2, 2), (2, 8), (4, 2), (8, 2))
    }
    measured = contest(decoding, rounds)
    result.raw("decoded", measured)
    columns = {
        "images_per_s": "images/s",
        "cpu_ms": "CPU ms an image",
        "first_s": "first batch, s",
        "memory_mb": "memory of all processes, MB",
    }
    what = (
        f"Photographs to {SIZE} px, batches of {BATCH}, by workers and batches prefetched a worker"
    )
    result.table(what, measured, columns, versus="2 workers, 2 ahead", by="images_per_s")

    sending = {
        f"{kind}, {workers} workers": EntryProcess(
            "workers:sent", path=str(shards), workers=workers, kind=kind
        )
        for kind in ("uint8", "float32")
        for workers in (0, 1, 2)
    }
    sent = contest(sending, rounds)
    result.raw("sent", sent)
    columns = {
        "ms": "ms a batch",
        "trainer_ms": "CPU ms of the trainer",
        "mb": "MB a batch",
    }
    what = f"Batches of {BATCH} x 3 x {SIZE} x {SIZE} without any work, read by the trainer"
    result.table(what, sent, columns, versus="uint8, 0 workers", by="ms")


# --- entries --------------------------------------------------------------------------------------


def _loader(dataset: Any, workers: int, ahead: int) -> Any:
    from torch.utils.data import DataLoader

    more = {"prefetch_factor": ahead} if workers else {}
    return DataLoader(dataset, batch_size=None, num_workers=workers, **more)


def decoded(path: str, workers: int, ahead: int) -> Callable[..., dict[str, Any]]:
    from shardio import RandomResizedCrop, ShardDataset

    crop = RandomResizedCrop(SIZE, flip=True)
    dataset = ShardDataset(path, batch_size=BATCH, fields=("image", "label"), transform=crop)
    loader, epochs = _loader(dataset, workers, ahead), iter(range(1 << 30))

    def one_round() -> dict[str, Any]:
        dataset.set_epoch(next(epochs))
        used, began = cpu_seconds(), time.perf_counter()
        images, first, most = 0, 0.0, 0
        iterator = iter(loader)
        for i, (batch, _) in enumerate(iterator):
            images += len(batch)
            first = first or time.perf_counter() - began
            if i % 8 == 7:
                most = max(most, tree_bytes())
        seconds = time.perf_counter() - began
        del iterator
        return {
            "images_per_s": images / seconds,
            "cpu_ms": (cpu_seconds() - used) / images * 1e3,
            "first_s": first,
            "memory_mb": most / 1e6,
        }

    return one_round


def sent(path: str, workers: int, kind: str) -> Callable[..., dict[str, Any]]:
    import numpy as np
    import torch

    from shardio import ShardDataset

    torch.set_num_threads(1)
    blank = np.zeros((SIZE, SIZE, 3), kind)
    dataset = ShardDataset(
        path, batch_size=BATCH, fields=("image",), decode=None, transform=lambda _: blank
    )
    loader, epochs = _loader(dataset, workers, 2), iter(range(1 << 30))

    def one_round() -> dict[str, Any]:
        dataset.set_epoch(next(epochs))
        iterator = iter(loader)
        next(iterator)
        used, began = time.process_time(), time.perf_counter()
        batches = size = 0
        for (batch,) in iterator:
            size = max(size, batch.nbytes)
            batches += bool(torch.count_nonzero(batch) == 0)  # every byte is looked at
        seconds = time.perf_counter() - began
        used = time.process_time() - used  # of this process alone
        return {
            "ms": seconds / batches * 1e3,
            "trainer_ms": used / batches * 1e3,
            "mb": size / 1e6,
        }

    return one_round
