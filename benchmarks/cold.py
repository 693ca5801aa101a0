"""Cold storage, the main claim: bytes and requests that one shuffled epoch costs the device.

The 500 photographs, copied under other names until they are 2 GiB. Before every round the pages of
all files are dropped by posix_fadvise(DONTNEED), after a sync, and mincore says how many stayed.
Then one epoch through a DataLoader: at full speed without decoding, at a trainer's pace of 1,000
images/s, with decoding, and with memory for half the data (the rest held by `memory_pressure`).

Bytes read are those of /proc/self/io, which includes all children that were waited for; requests
are those of /proc/diskstats for the whole device, so nothing else should use it. Directories and
inodes stay cached, for all alike: a truly cold image folder is slower still.

Three parts: the disk as it is; the disk held to few requests a second; and a network file system
(the last two: limits.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import data, rivals
from .harness import BenchmarkError, EntryProcess, Result, interleave, median, ratio, show

if TYPE_CHECKING:
    from shardio.tuning.throttle import Group

PARTS = ("disk", "limited", "network")
LEAST = 2 << 30  # bytes of data
BATCH, BUFFER, PACE = 64, 10_000, 1_000
SHARDIO, ALONE, FOLDER = "shardio, 2 workers", "shardio, 0 workers", "image folder, 2 workers"
COLUMNS = {
    "images_per_s": "images/s",
    "bytes_ratio": "bytes read / payload",
    "reads": "requests",
    "reads_per_s": "requests/s",
    "request_kib": "KiB a request",
    "waited": "share of time spent waiting",
}

WAYS = {"tiles": "shard_loader"}  # what reads another folder than that of its name

Round = Callable[..., dict[str, Any]]


def run(source: data.Data, result: Result, parts: Sequence[str] = PARTS) -> None:
    from . import limits  # which needs what is below

    if "disk" in parts:
        _disk(source, result)
    if "limited" in parts:
        limits.limited(source, result)
    if "network" in parts:
        limits.network(source, result)


def _disk(source: data.Data, result: Result) -> None:
    rounds = 1 if source.quick else 3
    scratch = source.scratch
    folder = source.photos_of_bytes((64 << 20) if source.quick else LEAST)
    files = data.listing(folder)
    payload = data.payload(files)
    shards = data.pack(folder, scratch / "shards")
    result.data(
        records=len(files), payload_bytes=payload, shards_bytes=data.folder_bytes(shards),
        drop="posix_fadvise(DONTNEED), checked by mincore",
    )  # fmt: skip
    tree, chunks = scratch / "lmdb", scratch / "litdata"
    rivals.write_lmdb(folder, tree)
    if source.rivals:
        rivals.write_litdata(folder, chunks, scratch)
    where = {"shardio": shards, "image_folder": folder, "lmdb": tree, "litdata": chunks}
    cold = Cold(scratch, len(files), payload, where)

    def compete(what: str, entries: dict[str, dict[str, Any]], rounds: int, pace: int = 0) -> Any:
        measured = cold.compete(entries, rounds, pace=pace)
        result.raw(what, measured)
        result.table(f"Cold, {what}", measured, COLUMNS, versus=FOLDER, by="images_per_s")
        every = [one for found in measured.values() for one in found]
        busy = sum(one.get("device_bytes_ratio", 0) > 1.1 * one["bytes_ratio"] for one in every)
        if busy:
            result.note(
                f"{what}: in {busy} of {len(every)} rounds others read from the device too, so "
                "its requests are not all ours"
            )
        return measured

    def judge(what: str, found: list[dict[str, Any]]) -> None:
        result.target(f"{what}: bytes read, of the payload", _median(found, "bytes_ratio"), 1.05)
        result.target(f"{what}: mean request", _median(found, "request_kib"), -128, unit="KiB")

    both: dict[str, dict[str, Any]] = {
        SHARDIO: {"way": "shardio", "workers": 2},
        FOLDER: {"way": "image_folder", "workers": 2},
    }
    rest: dict[str, dict[str, Any]] = {
        ALONE: {"way": "shardio", "workers": 0},
        "image folder, 0 workers": {"way": "image_folder", "workers": 0},
        "LMDB, 2 workers": {"way": "lmdb", "workers": 2},
        "cat of the shards": {"way": "cat"},
    }
    if source.rivals:
        rest["LitData, 2 workers"] = {"way": "litdata", "workers": 2}
    found = compete("full speed, not decoded", both | rest, rounds)
    judge("full speed, 2 workers", found[SHARDIO])
    judge("full speed, 0 workers", found[ALONE])
    faster = ratio(found, SHARDIO, FOLDER, "images_per_s")
    # The issue sets no number here; below 1 there would be no reason to pack.
    result.target("full speed, 2 workers: images/s, of the image folder's", faster, -1.0)

    found = compete(f"a trainer's pace of {PACE:,} images/s, not decoded", both, rounds, PACE)
    judge("a trainer's pace", found[SHARDIO])

    crop = {name: options | {"crop": 224} for name, options in both.items()}
    found = compete("decoded, RandomResizedCrop(224)", crop, 1 if source.quick else 2)
    judge("decoded", found[SHARDIO])

    data.remove(tree, f"{tree}-lock", chunks)
    half = "memory for half the data"
    fast: dict[str, Any] = {}
    slow: dict[str, Any] = {}
    if not source.quick:
        try:
            with memory_pressure(payload // 2) as check:
                fast = compete(f"{half}, full speed, not decoded", both, 2)
                slow = compete(f"{half}, {PACE:,} images/s, not decoded", both, 1, PACE)
                check()
        except BenchmarkError as error:
            result.note(f"{half}: {error}")
            fast = slow = {}
    judge(f"{half}, full speed", fast.get(SHARDIO, []))
    judge(f"{half}, a trainer's pace", slow.get(SHARDIO, []))
    data.remove(shards)


def _median(rounds: list[dict[str, Any]], key: str) -> float | None:
    """None when it was not measured, or this device does not tell."""
    return median(rounds, key) if rounds and rounds[0][key] is not None else None


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
            return rivals.litdata_process("cold:litdata", self.scratch, **options)
        if way == "lmdb":
            options["folder"] = str(self.where["image_folder"])
        return EntryProcess(f"cold:{WAYS.get(way, way)}", **options)

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


# --- half the memory ------------------------------------------------------------------------------


@contextlib.contextmanager
def memory_pressure(available: int) -> Iterator[Callable[[], None]]:
    """Hold memory so that about `available` bytes are left for everyone else, page cache included.

    Not a control group: moving processes into one needs rights that a benchmark should not have.
    Yields a function that raises BenchmarkError when the memory_pressure is gone.
    """
    command = [sys.executable, "-m", "benchmarks.memory_pressure", str(available)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        show(f"  memory_pressure: leaving {available / 1e9:.2f} GB")
        if process.stdout.readline().strip() != "ready":
            raise BenchmarkError("the memory_pressure could not be held")

        def check() -> None:
            if process.poll() is not None:
                raise BenchmarkError("the memory_pressure was killed for want of memory")

        yield check
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


def memory_available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10


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
