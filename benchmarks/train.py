"""Warm training streams through a DataLoader with 2 workers, decoded: images/s, CPU, memory.

Photographs: decode, RandomResizedCrop(224), mirror, uint8 batches of 64. CIFAR: decode, batches of
512. One whole epoch a round, from `iter()` to the last batch, starting the workers included. All
decode with the same PIL, crop by the same code (shardio's) and collate by the same function: only
the reading differs. Shuffled, each in its own way. With the data in the page cache the decoder
is the limit; what a format gives or takes shows in CIFAR, in CPU time, and on cold storage.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import data, rivals
from .harness import EntryProcess, Result, contest, cpu_seconds, ratio

WORKERS = 2
SHARDIO, FOLDER = "shardio", "image folder"

Round = Callable[..., dict[str, Any]]


def run(source: data.Data, result: Result) -> None:
    rounds = 2 if source.quick else 7
    for title, folder, size, batch in (
        ("photographs", source.photos(3_000 if not source.quick else 500), 224, 64),
        ("CIFAR", source.cifar(), 32, 512),
    ):
        files = data.listing(folder)
        result.data(**{title: {"records": len(files), "payload_bytes": data.payload(files)}})
        scratch = source.scratch
        shards, tree = data.pack(folder, scratch / "shards"), scratch / "lmdb"
        rivals.write_lmdb(folder, tree)
        options: dict[str, Any] = {"size": size, "batch": batch, "records": len(files)}
        entries = {
            SHARDIO: EntryProcess("train:shardio", path=str(shards), **options),
            FOLDER: EntryProcess("train:image_folder", path=str(folder), **options),
            "LMDB": EntryProcess("train:lmdb", path=str(tree), folder=str(folder), **options),
        }
        if source.rivals:
            chunks = scratch / "litdata"
            rivals.write_litdata(folder, chunks, scratch)
            entries["LitData"] = rivals.litdata_process(
                "train:litdata", scratch, path=str(chunks), **options
            )
        try:
            memory = {name: one.round(memory=True) for name, one in entries.items()}
        except BaseException:
            for one in entries.values():
                one.close()
            raise
        measured = contest(entries, rounds, warm_up=False)
        result.raw(title, {"rounds": measured, "memory": memory})
        for name, found in measured.items():
            found[0]["memory_mb"] = memory[name]["memory_mb"]
        columns = {
            "images_per_s": "images/s",
            "cpu_ms": "CPU ms an image",
            "first_s": "first batch, s",
            "memory_mb": "memory of all processes, MB",
        }
        what = f"Training stream, warm, {title}, {WORKERS} workers, {size} px, batches of {batch}"
        result.table(what, measured, columns, versus=FOLDER, by="images_per_s")
        least = ratio(measured, SHARDIO, FOLDER, "images_per_s")
        # The issue sets no number here; a pack that trains slower than the files is a failure.
        result.target(f"{title}, images/s, of the image folder's", least, -1.0)
        data.remove(shards, tree, f"{tree}-lock", scratch / "litdata")


# --- entries --------------------------------------------------------------------------------------


def _transform(size: int) -> Any:
    from shardio import CenterCrop, RandomResizedCrop

    return CenterCrop(32) if size == 32 else RandomResizedCrop(size, flip=True)


def _rounds(loader: Any, records: int, set_epoch: Callable[[int], Any] | None = None) -> Round:
    epoch = 0

    def one_round(memory: bool = False) -> dict[str, Any]:
        nonlocal epoch
        if set_epoch is not None:
            set_epoch(epoch)
        epoch += 1
        used, began = cpu_seconds(), time.perf_counter()
        images, first, most = 0, 0.0, 0
        iterator = iter(loader)
        for i, (batch, labels) in enumerate(iterator):
            assert len(batch) == len(labels)
            images += len(batch)
            if i == 0:
                first = time.perf_counter() - began
            if memory and i % 10 == 9:
                most = max(most, tree_bytes())
        seconds = time.perf_counter() - began
        del iterator  # its workers end, and are waited for: only then is their CPU time known
        assert images == records, images
        if memory:
            return {"memory_mb": max(most, tree_bytes()) / 1e6}
        return {
            "images_per_s": images / seconds,
            "cpu_ms": (cpu_seconds() - used) / images * 1e3,
            "first_s": first,
        }

    return one_round


def shardio(path: str, size: int, batch: int, records: int) -> Round:
    from torch.utils.data import DataLoader

    from shardio import ShardDataset

    dataset = ShardDataset(
        path, batch_size=batch, fields=("image", "label"), transform=_transform(size)
    )
    loader = DataLoader(dataset, batch_size=None, num_workers=WORKERS)
    return _rounds(loader, records, dataset.set_epoch)


def _map_style(dataset: Any, batch: int, records: int) -> Round:
    from torch.utils.data import DataLoader

    from shardio import collate

    loader = DataLoader(
        dataset, batch_size=batch, shuffle=True, num_workers=WORKERS, collate_fn=collate
    )
    return _rounds(loader, records)


def image_folder(path: str, size: int, batch: int, records: int) -> Round:
    return _map_style(rivals.Folder(path, _transform(size)), batch, records)


def lmdb(path: str, folder: str, size: int, batch: int, records: int) -> Round:
    labels = [label for _, label in data.listing(folder)]
    return _map_style(rivals.Lmdb(path, labels, _transform(size)), batch, records)


def litdata(path: str, size: int, batch: int, records: int) -> Round:
    import litdata

    from shardio import collate

    dataset = rivals.litdata_dataset(path, shuffle=True, transform=_transform(size))
    loader = litdata.StreamingDataLoader(
        dataset, batch_size=batch, num_workers=WORKERS, collate_fn=collate
    )
    return _rounds(loader, records)


def tree_bytes() -> int:
    """Anonymous and shared memory of this process and its descendants; shared pages count once."""
    total = 0
    for process in _tree(os.getpid()):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        wanted = (line for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
        total += sum(int(line.split()[1]) << 10 for line in wanted)
    return total


def _tree(process: int) -> Iterator[int]:
    yield process
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from _tree(int(child))
