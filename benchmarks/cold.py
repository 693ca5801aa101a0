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
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import data, limits, rivals
from .cold_rounds import Cold
from .harness import BenchmarkError, Result, median, ratio, show

PARTS = ("disk", "limited", "network")
LEAST = 2 << 30  # bytes of data
PACE = 1_000
SHARDIO, ALONE, FOLDER = "shardio, 2 workers", "shardio, 0 workers", "image folder, 2 workers"
COLUMNS = {
    "images_per_s": "images/s",
    "bytes_ratio": "bytes read / payload",
    "reads": "requests",
    "reads_per_s": "requests/s",
    "request_kib": "KiB a request",
    "waited": "share of time spent waiting",
}


def run(source: data.Data, result: Result, parts: Sequence[str] = PARTS) -> None:
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
