"""Shuffled as a whole, or in a window: what an epoch costs storage, by payload and record size.

Records of random bytes, nothing decoded, batches of 256 through a DataLoader with two workers. For
each payload and size of a record the order is "all", or a window of 10,000 records (of half of
them, where there are fewer than 20,000); each is read cold (pages dropped as in `cold`), and warm.
Requests are those of the block device that holds the scratch folder, so nothing else should use
it: a loop device over a file (`losetup --direct-io=on`, `mkfs`, `mount`, then --scratch) counts
nobody else's.

The last table needs no disk: the seconds that the measured requests and bytes of a cold epoch take
where storage is held to some requests, and megabytes, a second.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import data
from .cold_rounds import Cold, drop
from .harness import EntryProcess, Result, interleave, ratio, show

BATCH, BUFFER = 256, 10_000
WINDOW = "window"
MIB = 1 << 20
LIMIT = 256 * MIB  # options.ALL_BYTES
PAYLOADS, SIZES = (64 * MIB, 240 * MIB, 1024 * MIB), (967, 8_000, 32_000, 110_000)
LIMITS = {"500/s, 125 MB/s": (500, 125e6), "3,000/s, 125 MB/s": (3_000, 125e6)}
COLUMNS = {
    "seconds": "s",
    "reads": "requests",
    "request_kib": "KiB a request",
    "bytes_ratio": "bytes read / payload",
    "first_batch_s": "first batch, s",
}
WARM = {"images_per_s": "images/s", "cpu_us": "CPU us a record", "first_batch_s": "first batch, s"}


def run(source: data.Data, result: Result) -> None:
    rounds = 1 if source.quick else 3
    payloads = (4 * MIB,) if source.quick else PAYLOADS
    result.data(
        payloads=payloads, record_bytes=SIZES, batch_size=BATCH, window=BUFFER, workers=2,
        drop="posix_fadvise(DONTNEED), checked by mincore",
    )  # fmt: skip
    modelled: dict[str, list[dict[str, Any]]] = {}
    for payload in payloads:
        for size in SIZES if payload <= LIMIT else SIZES[:1]:  # the hardest
            name = f"{payload // MIB:,} MiB in records of {size:,} B"
            folder = source.scratch / f"{payload}-{size}"
            records = _write(folder, payload, size)
            cold, warm = _measure(
                source.scratch, folder, records, rounds if payload <= LIMIT else 1
            )
            data.remove(folder)
            result.raw(name, {"cold": cold, "warm": warm})
            result.table(f"Cold, {name}", cold, COLUMNS, versus=WINDOW, by="seconds")
            result.table(f"Warm, {name}", warm, WARM, versus=WINDOW, by="images_per_s")
            if payload <= LIMIT and not source.quick:
                result.target(
                    f"{name}: requests, of the window's", ratio(cold, "all", WINDOW, "reads"), 1.25
                )
            for way, found in cold.items():
                modelled[f"{name}: {way}"] = [_limited(one) for one in found]
    columns = {key: f"s at {key}" for key in LIMITS}
    result.table("By arithmetic: the cold epoch on limited storage", modelled, columns)


def _limited(found: dict[str, Any]) -> dict[str, Any]:
    """Seconds on storage that is held to so many requests and bytes a second."""
    reads, size = found["reads"], found["read_bytes"]
    return {
        key: None if reads is None else max(reads / most, size / rate)
        for key, (most, rate) in LIMITS.items()
    }


def _write(folder: Path, payload: int, size: int) -> int:
    """A dataset of random bytes, in shards as `shardio pack` would cut them."""
    from shardio import Writer

    records = payload // size
    noise = np.random.default_rng(0).bytes(4 * MIB)
    shard_size = max(MIB, min(256 * MIB, payload // 16))
    with Writer(
        folder, fields={"data": "bytes", "label": "int"}, shard_size=shard_size, id="noise"
    ) as out:
        for number in range(records):
            at = number * 7919 % (len(noise) - size)
            out.write({"data": noise[at : at + size], "label": number % 1000})
    show(f"  {records:,} records of {size:,} B")
    return records


def _measure(
    scratch: Path, folder: Path, records: int, rounds: int
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[dict[str, Any]]]]:
    payload = data.folder_bytes(folder)
    cold = Cold(scratch, records, payload, {"shardio": folder})
    ways: dict[str, int | str] = {WINDOW: min(BUFFER, records // 2), "all": "all"}
    processes = {
        name: EntryProcess("shuffle:epoch", path=str(folder), buffer=buffer, records=records)
        for name, buffer in ways.items()
    }
    try:
        found = interleave(
            {n: partial(cold._measured, folder, one.round) for n, one in processes.items()},
            rounds,
        )
        warm = interleave({n: one.round for n, one in processes.items()}, rounds)
    finally:
        for one in processes.values():
            one.close()
    drop(folder)
    return found, warm


# --- the entry -------------------------------------------------------------------------------


def _sizes(samples: list[tuple[bytes, int]]) -> Any:
    import torch

    return torch.tensor([len(body) for body, _ in samples])


def epoch(path: str, buffer: int | str, records: int) -> Any:
    """A function that reads one epoch, another one each time."""
    import time

    from torch.utils.data import DataLoader

    from shardio import ShardDataset

    from .cold_rounds import read_bytes
    from .harness import cpu_seconds

    dataset = ShardDataset(
        path, batch_size=BATCH, shuffle_buffer=buffer, fields=("data", "label"), decode=None,
        collate_fn=_sizes,
    )  # fmt: skip
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    number = 0

    def one_round() -> dict[str, Any]:
        nonlocal number
        dataset.set_epoch(number)
        number += 1
        seen, first = 0, 0.0
        before, used, began = read_bytes(), cpu_seconds(), time.perf_counter()
        batches = iter(loader)
        for batch in batches:
            first = first or time.perf_counter() - began
            seen += len(batch)
        seconds = time.perf_counter() - began
        del batches  # its workers end and are waited for: only then are their bytes counted here
        assert seen == records, (seen, records)
        return {
            "seconds": seconds,
            "images_per_s": seen / seconds,
            "first_batch_s": first,
            "cpu_us": 1e6 * (cpu_seconds() - used) / records,
            "read_bytes": read_bytes() - before,
        }

    return one_round
