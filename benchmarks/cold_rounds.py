"""Rounds that begin without a page of the data in memory, and what each costs the device.

`cold` and `limits` run them; the entries are loaders that read one epoch a round, at most.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import data, rivals
from .harness import BenchmarkError, EntryProcess, interleave

if TYPE_CHECKING:
    from .throttle import Group

BATCH, BUFFER = 64, 10_000
WAYS = {"tiles": "shard_loader"}  # what reads another folder than that of its name

Round = Callable[..., dict[str, Any]]


class Cold:
    """Rounds that begin without a page of the data in memory, and what each costs the device.

    group: entries belong to this control group, and its requests are counted, which are theirs
    alone; else those of the whole device.
    """

    def __init__(
        self,
        scratch: Path,
        records: int,
        payload: int,
        where: dict[str, Path],
        group: Group | None = None,
    ) -> None:
        self.scratch, self.where = scratch, where
        self.records, self.payload = records, payload
        self.device = os.stat(scratch).st_dev
        self.group = group

    def compete(
        self, entries: dict[str, dict[str, Any]], rounds: int, **asked: Any
    ) -> dict[str, list[dict[str, Any]]]:
        with contextlib.ExitStack() as stack:
            ways: dict[str, Callable[[], dict[str, Any]]] = {}
            for name, options in entries.items():
                path = self.where["shardio" if options["way"] == "cat" else options["way"]]
                if options["way"] == "cat":
                    read = partial(_cat, path)
                else:
                    one = stack.enter_context(self._process(**options))
                    read = partial(one.round, **asked)
                ways[name] = partial(self._measured, path, read)
            return interleave(ways, rounds)

    def _process(self, *, way: str, **options: Any) -> EntryProcess:
        options |= {"path": str(self.where[way]), "records": self.records, "payload": self.payload}
        if self.group is not None:
            options["members"] = self.group.members
        if way == "litdata":
            return rivals.litdata_process("cold_rounds:litdata", self.scratch, **options)
        if way == "lmdb":
            options["folder"] = str(self.where["image_folder"])
        return EntryProcess(f"cold_rounds:{WAYS.get(way, way)}", **options)

    def _measured(self, path: Path, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        resident = drop(path)
        if self.group is not None:
            return self._in_group(self.group, resident, read)
        before = device_reads(self.device)
        found = read()
        after = device_reads(self.device)
        found |= {"resident_before": resident, "bytes_ratio": found["read_bytes"] / self.payload}
        if before is None or after is None:  # a file system without a device of its own
            return found | {"reads": None, "reads_per_s": None, "request_kib": None}
        reads, size = after[0] - before[0], (after[1] - before[1]) * 512
        return found | {
            "reads": reads,
            "reads_per_s": reads / found["seconds"],
            "request_kib": size / max(1, reads) / 1024,
            "device_bytes_ratio": size / self.payload,
            "device_writes": after[2] - before[2],
        }

    def _in_group(
        self, group: Group, resident: float, read: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        before = group.reads()
        found = read()
        reads = group.reads() - before
        whole = found["images"] == self.records  # else the workers had read more than was taken
        return found | {
            "resident_before": resident,
            "reads": reads if whole else None,
            "reads_per_s": reads / found["seconds"],
            "request_kib": found["read_bytes"] / max(1, reads) / 1024,
        }


def _cat(shards: Path) -> dict[str, Any]:
    """The device's own limit: the shards, one after another."""
    names = sorted(map(str, shards.glob("*.shard")))
    before, began = read_bytes(), time.perf_counter()
    subprocess.run(["cat", *names], stdout=subprocess.DEVNULL, check=True)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "images_per_s": None, "read_bytes": read_bytes() - before}


def drop(path: Path) -> float:
    """Drop all pages of a file, or of the files below a folder; the share of them that stayed."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    os.sync()  # a dirty page cannot be dropped
    for _ in range(3):  # a page that was just being used stays; the next time it goes
        pages = resident = 0
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                stayed, count = _resident(descriptor)
            finally:
                os.close(descriptor)
            resident += stayed
            pages += count
        if resident * 1000 <= pages:
            return resident / max(1, pages)
        time.sleep(0.2)
    raise BenchmarkError(
        f"{path}: {resident:,} of {pages:,} pages stayed in memory; is it on a tmpfs? "
        "Give a folder on a disk by --scratch DIR"
    )


_libc = ctypes.CDLL(None, use_errno=True)


def _resident(descriptor: int) -> tuple[int, int]:
    """Pages of a file that are in memory, by mincore, and all its pages."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return 0, 0
    count = -(-size // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * count)()
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        failed = _libc.mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), states
        )
        del start  # or the map cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(state & 1 for state in bytes(states)), count


def device_reads(number: int) -> tuple[int, int, int] | None:
    """Requests, sectors of 512 bytes and writes that a device has completed; None: no device."""
    wanted = [str(os.major(number)), str(os.minor(number))]
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if fields[:2] == wanted:
            return int(fields[3]), int(fields[5]), int(fields[7])
    return None


def read_bytes() -> int:
    """Bytes that this process, and children that were waited for, had read from devices."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


# --- entries --------------------------------------------------------------------------------------


def _sizes(items: list[tuple[Any, int]]) -> Any:
    """What leaves the worker when nothing is decoded: the images' lengths, and not 7 MB a batch."""
    import torch

    return torch.tensor([len(image) for image, _ in items]), None


def _crop(size: int) -> Any:
    from shardio import RandomResizedCrop

    return RandomResizedCrop(size, flip=True) if size else None


def _collate(size: int) -> Callable[..., Any]:
    from shardio import collate

    return collate if size else _sizes


def _rounds(
    loader: Any, records: int, payload: int, set_epoch: Callable[[int], Any] | None = None
) -> Round:
    """One epoch a round; at most so many seconds of it, where a limit is given."""
    epoch = 0

    def one_round(pace: int = 0, limit_s: float = 0.0) -> dict[str, Any]:
        nonlocal epoch
        if set_epoch is not None:
            set_epoch(epoch)
        epoch += 1
        images = size = 0
        waited = 0.0
        before, began = read_bytes(), time.perf_counter()
        iterator = iter(loader)
        while True:
            asked = time.perf_counter()
            batch = next(iterator, None)
            now = time.perf_counter()
            waited += now - asked
            if batch is None:
                break
            images += len(batch[0])
            if batch[1] is None:
                size += int(batch[0].sum())
            if pace:
                time.sleep(max(0.0, began + images / pace - now))
            if limit_s and now - began > limit_s:
                break
        seconds = time.perf_counter() - began
        del iterator  # its workers end and are waited for: only then are their bytes counted here
        if not limit_s or seconds <= limit_s:
            assert images == records and size in (0, payload), (images, size)
        return {
            "images": images,
            "images_per_s": images / seconds,
            "waited": waited / seconds,
            "seconds": seconds,
            "read_bytes": read_bytes() - before,
        }

    return one_round


def _dataset(path: str, crop: int, buffer: int) -> Any:
    from shardio import ShardDataset

    return ShardDataset(
        path, batch_size=BATCH, shuffle_buffer=buffer, fields=("image", "label"),
        decode="pil" if crop else None, transform=_crop(crop), collate_fn=_collate(crop),
    )  # fmt: skip


def shardio(
    path: str, records: int, payload: int, workers: int, crop: int = 0, buffer: int = BUFFER
) -> Round:
    from torch.utils.data import DataLoader

    dataset = _dataset(path, crop, buffer)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    return _rounds(loader, records, payload, dataset.set_epoch)


class _Fresh:
    """A ShardLoader for each epoch: its processes start and end with it, as DataLoader's do."""

    def __init__(self, dataset: Any, workers: int) -> None:
        self.dataset, self.workers = dataset, workers

    def __iter__(self) -> Iterator[Any]:
        from shardio import ShardLoader

        with ShardLoader(self.dataset, num_workers=self.workers) as loader:
            yield from loader


def shard_loader(
    path: str, records: int, payload: int, workers: int, crop: int = 0, buffer: int = BUFFER
) -> Round:
    dataset = _dataset(path, crop, buffer)
    return _rounds(_Fresh(dataset, workers), records, payload, dataset.set_epoch)


def _map_style(dataset: Any, records: int, payload: int, workers: int, crop: int) -> Round:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        dataset, batch_size=BATCH, shuffle=True, num_workers=workers, collate_fn=_collate(crop)
    )
    return _rounds(loader, records, payload)


def image_folder(path: str, records: int, payload: int, workers: int, crop: int = 0) -> Round:
    return _map_style(rivals.Folder(path, _crop(crop)), records, payload, workers, crop)


def lmdb(path: str, folder: str, records: int, payload: int, workers: int, crop: int = 0) -> Round:
    labels = [label for _, label in data.listing(folder)]
    return _map_style(rivals.Lmdb(path, labels, _crop(crop)), records, payload, workers, crop)


def litdata(path: str, records: int, payload: int, workers: int, crop: int = 0) -> Round:
    import litdata

    dataset = rivals.litdata_dataset(path, shuffle=True, transform=_crop(crop))
    loader = litdata.StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=workers, collate_fn=_collate(crop)
    )
    return _rounds(loader, records, payload)
