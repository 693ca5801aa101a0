"""ShardLoader beside DataLoader, decoded, warm: images/s, CPU, memory, the turn of an epoch.

Photographs: decode, RandomResizedCrop(224), mirror, uint8 batches of 64. CIFAR: decode, batches of
512. (`pixels` measures the same as raw pixels.) All crop by the same code (shardio's) and collate
by the same function, 2 batches ahead a worker, whose processes all stay from epoch to epoch. The
image folder comes twice: decoded by Pillow, which is what its users have, and by the PIL of this
environment.

A round is one epoch in the middle of two: from a batch of the first to the same batch of the next.
So queues are as full at its end as at its beginning, whatever was made ahead between rounds is not
counted, and the turn of the epoch is in it. "Turn" is the wait for an epoch's first batch after the
last one of the epoch before; nothing but the loader takes time here, so it is compared with the
median time between a batch and the next one of the same process: those of several come in bunches.

Memory is that of all processes, at the most in three epochs: anonymous by PSS, and all shared
memory that one of them has open. PSS alone would leave out the batches that are on their way in a
DataLoader, since nobody has them mapped.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import data, rivals
from .harness import ROOT, EntryProcess, Result, contest, median, ratio
from .train import _tree

AHEAD = 2
PILLOW = ROOT / "benchmarks" / ".venv-rivals" / "pillow"  # of setup_rivals; no other package
FOLDER, FOLDER_PILLOW = "image folder", "image folder, Pillow"
SHARDS, LOADER, HERE = "DataLoader, shards", "ShardLoader", "ShardLoader, no processes"
RESIDENT = 'resident="ram"'  # ShardLoader's, for data that fit: nothing is read

Round = Callable[..., dict[str, Any]]

COLUMNS = {
    "images_per_s": "images/s",
    "cpu_ms": "CPU ms an image",
    "turn_ms": "turn, ms",
    "batch_ms": "a process's batch, ms",
    "memory_mb": "memory of all processes, MB",
}


def run(source: data.Data, result: Result) -> None:
    _decoded(source, result, "photographs", source.photos(500 if source.quick else 3_000), 224, 64)
    _decoded(source, result, "CIFAR", source.cifar(), 32, 512)


def _decoded(
    source: data.Data, result: Result, title: str, folder: Any, size: int, batch: int
) -> None:
    files = data.listing(folder)
    result.data(**{title: {"records": len(files), "payload_bytes": data.payload(files)}})
    shards = data.pack(folder, source.scratch / "shards")
    options: dict[str, Any] = {"size": size, "batch": batch}
    entries = {
        SHARDS: EntryProcess("loader:shards", path=str(shards), workers=2, **options),
        FOLDER: EntryProcess("loader:image_folder", path=str(folder), workers=2, **options),
    }
    for workers, threads in ((2, 1), (2, 2), (1, 2), (1, 1)):
        entries[_called(workers, threads)] = EntryProcess(
            "loader:shard_loader", path=str(shards), workers=workers, threads=threads, **options
        )
    if PILLOW.exists():
        entries[FOLDER_PILLOW] = EntryProcess(
            "loader:image_folder", path=str(folder), workers=2, pil=str(PILLOW), **options
        )
    else:
        result.note("Pillow beside pillow-simd (benchmarks/setup_rivals) is not there: left out")
    measured = measure(source, result, title, entries)
    what = f"{title}, warm, {size} px, batches of {batch}, workers x threads"
    found = FOLDER_PILLOW if PILLOW.exists() else FOLDER
    result.table(what, measured, COLUMNS, versus=found, by="images_per_s")

    def target(what: str, name: str, key: str, limit: float) -> None:
        found = ratio(measured, _called(2, 1), name, key)
        result.target(f"{title}, {what}, of {name}", found, limit)

    target("images/s", FOLDER_PILLOW, "images_per_s", -1.4 if size == 224 else -1.2)
    if size == 224:
        target("images/s", SHARDS, "images_per_s", -1.1)
        target("CPU an image", FOLDER_PILLOW, "cpu_ms", 0.75)
    target("memory", FOLDER, "memory_mb", 1.0)
    _turns(result, title, measured)
    data.remove(shards)


def raw(source: data.Data, result: Result) -> None:
    """What `pixels` measures."""
    title = "CIFAR, raw pixels"
    folder = source.cifar()
    records = len(data.listing(folder))
    result.data(**{title: {"records": records, "payload_bytes": records * 32 * 32 * 3}})
    shards = data.pack(folder, source.scratch / "raw", "--encode", "raw")
    options: dict[str, Any] = {"path": str(shards), "size": 0, "batch": 512}
    # An epoch takes 50 ms: many in a row.
    options["epochs"] = 2 if source.quick else 20
    entries = {
        HERE: EntryProcess("loader:shard_loader", workers=0, threads=0, **options),
        RESIDENT: EntryProcess(
            "loader:shard_loader", workers=0, threads=0, resident="ram", **options
        ),
        SHARDS: EntryProcess("loader:shards", workers=2, **options),
    }
    for workers, threads in ((1, 1), (2, 1)):
        entries[_called(workers, threads)] = EntryProcess(
            "loader:shard_loader", workers=workers, threads=threads, **options
        )
    measured = measure(source, result, title, entries)
    what = f"{title}, warm, batches of 512, workers x threads"
    result.table(what, measured, COLUMNS, versus=SHARDS, by="images_per_s")
    best = max(map(_called, (1, 2), (1, 1)), key=lambda one: median(measured[one], "images_per_s"))
    found = median(measured[best], "images_per_s")
    result.target(f"{title}, images/s, {best}", found, -1e6, unit="images/s")
    _turns(result, title, measured)
    data.remove(shards)


def _called(workers: int, threads: int) -> str:
    return f"{LOADER} {workers}x{threads}"


def measure(
    source: data.Data, result: Result, title: str, entries: dict[str, EntryProcess]
) -> dict[str, list[dict[str, Any]]]:
    try:
        for name, one in entries.items():
            result.raw(f"{title}, decoder, {name}", one.round(about=True))
        memory = {name: _most(one) for name, one in entries.items()}
    except BaseException:
        for one in entries.values():
            one.close()
        raise
    measured = contest(entries, 2 if source.quick else 7, warm_up=False)
    result.raw(title, {"rounds": measured, "memory": memory})
    for name, rounds in measured.items():
        for one in rounds:
            one["memory_mb"] = memory[name]["memory_mb"]
    return measured


def _most(one: EntryProcess) -> dict[str, Any]:
    """Memory at the most, of three epochs: heaps grow until they have seen large images."""
    rounds = [one.round(memory=True) for _ in range(3)]
    return max(rounds, key=lambda found: float(found["memory_mb"]))


def _turns(result: Result, title: str, measured: dict[str, list[dict[str, Any]]]) -> None:
    found = [
        statistics.median(one["turn_ms"] - one["batch_ms"] for one in rounds)
        for name, rounds in measured.items()
        if name.startswith(LOADER)
    ]
    what = f"{title}, wait for the next epoch's first batch, beyond a median batch"
    result.target(f"{what} of a process", max(found), 50.0, unit="ms")


# --- entries --------------------------------------------------------------------------------------


def rounds(loader: Any, set_epoch: Callable[[int], Any], workers: int, epochs: int) -> Round:
    """Epochs in a row, of which all but the part before `ahead` batches is measured."""
    import torch

    from shardio.machine import cpu_seconds, family

    torch.set_num_threads(1)
    epoch = 0
    bunch = max(1, workers)
    ahead = min(2 * AHEAD * max(1, workers), len(loader))

    def batches() -> Iterator[tuple[int, int]]:
        """Place in its epoch, and images, of each batch."""
        nonlocal epoch
        for _ in range(epochs + 1):
            set_epoch(epoch)
            epoch += 1
            iterator = iter(loader)
            for i, (images, labels) in enumerate(iterator):
                assert len(images) == len(labels) and _are_images(images)
                yield i, len(images)
                del images, labels
            del iterator

    def one_round(memory: bool = False, about: bool = False) -> dict[str, Any]:
        if about:
            from shardio.images import decode as image

            return {"pil": image.pil_info()}
        images = seen = most = 0
        came: list[float] = []
        waits: list[float] = []
        turns: list[float] = []
        source = batches()
        for i, _ in source:
            if i == ahead - 1:
                break
        used, began = cpu_seconds(family(os.getpid())), time.perf_counter()
        last = began
        for i, size in source:
            now = time.perf_counter()
            if i == 0:
                turns.append(now - last)
                came.clear()
            elif len(came) >= bunch:
                waits.append(now - came[-bunch])
            came.append(now)
            last = now
            images, seen = images + size, seen + (i == ahead - 1)
            if memory and i % 8 == 7:
                most = max(most, _memory())
            if seen == epochs:
                break
        seconds = time.perf_counter() - began
        assert seen == epochs
        done = cpu_seconds(family(os.getpid()))
        source.close()
        if memory:
            return {"memory_mb": max(most, _memory()) / 1e6}
        return {
            "images_per_s": images / seconds,
            "cpu_ms": None if done is None or used is None else (done - used) / images * 1e3,
            "turn_ms": statistics.median(turns) * 1e3,
            "batch_ms": statistics.median(waits) * 1e3 if waits else 0.0,  # few batches
        }

    return one_round


def _are_images(images: Any) -> bool:
    """Say whether these are pixels, or files that were not decoded: in a buffer, or a list."""
    images = getattr(images, "buffer", images)
    return isinstance(images, list) or str(images.dtype) == "torch.uint8"


def _memory() -> int:
    """Bytes of this process and its descendants: anonymous, and of shared memory that is open."""
    anonymous, shared = 0, {}
    for process in _tree(os.getpid()):
        with contextlib.suppress(OSError):  # it has just ended
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss_Anon:"):
                    anonymous += int(line.split()[1]) << 10
            for name in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    path = f"/proc/{process}/fd/{name}"
                    if os.readlink(path).startswith(("/memfd:", "/dev/shm/")):
                        found = os.stat(path)
                        shared[found.st_dev, found.st_ino] = found.st_blocks * 512
    return anonymous + sum(shared.values())


def _dataset(path: str, size: int, batch: int, buffer: int | None) -> Any:
    """size 0: stored as raw pixels, and not decoded."""
    from shardio import ShardDataset

    how: dict[str, Any] = {"transform": _transform(size)} if size else {"decode": "numpy"}
    return ShardDataset(
        path, batch_size=batch, shuffle_buffer=buffer, fields=("image", "label"), **how
    )


def _transform(size: int) -> Any:
    from shardio import CenterCrop, RandomResizedCrop

    return CenterCrop(32) if size == 32 else RandomResizedCrop(size, flip=True)


def shards(
    path: str, size: int, batch: int, workers: int, epochs: int = 1, buffer: int | None = None
) -> Round:
    from torch.utils.data import DataLoader

    dataset = _dataset(path, size, batch, buffer)
    loader = DataLoader(
        *(dataset,), batch_size=None, num_workers=workers, prefetch_factor=AHEAD,
        persistent_workers=True,
    )  # fmt: skip
    return rounds(loader, dataset.set_epoch, workers, epochs)


def shard_loader(
    path: str, size: int, batch: int, workers: int, threads: int, epochs: int = 1,
    resident: Any = None, buffer: int | None = None,
) -> Round:  # fmt: skip
    from . import spelling

    dataset = _dataset(path, size, batch, buffer)
    loader = spelling.shard_loader(
        dataset, num_workers=workers, threads=threads, prefetch_factor=AHEAD, resident=resident
    )
    return rounds(loader, loader.set_epoch, workers, epochs)


def image_folder(path: str, size: int, batch: int, workers: int, pil: str = "") -> Round:
    """pil: the folder of another PIL."""
    if pil:
        sys.path.insert(0, pil)
    from torch.utils.data import DataLoader

    from shardio import collate

    loader = DataLoader(
        *(rivals.Folder(path, _transform(size)),), batch_size=batch, shuffle=True,
        num_workers=workers, prefetch_factor=AHEAD, persistent_workers=True, collate_fn=collate,
    )  # fmt: skip
    return rounds(loader, lambda _: None, workers, 1)
