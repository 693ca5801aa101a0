"""The order alone: 1.28 million records, 10^9 records, resuming in the middle, filtering by class.

No image is read, but for the first batch after a resume. "Whole epoch" draws and locates every
record as reading does. Starting is what a consumer does before it can read: the manifest, the
order of the shards, the window of each of its spans, and the rows of its first batch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import data
from .harness import ROOT, EntryProcess, Result, interleave, median
from .manifest import manifest_bytes

BATCH, BUFFER, SPANS = 256, 10_000, 64

# One consumer of a job, in a fresh process: the first batch of an epoch, then 200 of its batches.
START = """
import json, sys, time

def memory(name):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1e3 * 1.024

from shardio.formats import manifest
from shardio.dataset.fetch import Fetch
from shardio.dataset.reader import Reader
from shardio.order.options import RequestedOptions
from shardio.storage.location import locate

folder, consumers = sys.argv[1], int(sys.argv[2])
before = memory("VmHWM")
began = time.perf_counter()
storage = locate(folder)
made = manifest.load(storage)
loaded = memory("VmRSS")
options = RequestedOptions(batch_size=256, shuffle_buffer=10_000).resolve(25_600.0)
share = options.partition(options.epoch(made.shard_records, 3), rank=1, world_size=consumers)
fetch = Fetch(Reader(storage, made), share)
fetch.policy.announce = lambda rows, between=0: None  # there are no shards
batches = iter(share)

def draw():
    batch = next(batches)
    return fetch._draw(batch.pieces, batch.repeats, None).size

assert draw() == 256
started = time.perf_counter()
count = min(200, share.steps - 1)
for _ in range(count):
    draw()
seconds = time.perf_counter() - started
print(json.dumps({
    "start_s": started - began,
    "memory_mb": memory("VmHWM") - before,
    "own_mb": memory("VmRSS") - loaded,
    "us": seconds / count / 256 * 1e6,
}))
"""


def run(source: data.Data, result: Result) -> None:
    rounds = 2 if source.quick else 7
    records, shards = (20_000, 40) if source.quick else (1_280_000, 1_000)
    folder = source.scratch / "million"
    _write(folder, records, shards)
    result.data(records=records, shards=shards)
    entries = {
        "whole epoch": partial(EntryProcess, "order:whole", path=str(folder), shuffled=BUFFER),
        "whole epoch, buffer 1": partial(EntryProcess, "order:whole", path=str(folder), shuffled=1),
        "resume in the middle": partial(EntryProcess, "order:resume", path=str(folder)),
        "where, 10 of 1,000 classes": partial(EntryProcess, "order:where", path=str(folder)),
    }
    processes = {name: make() for name, make in entries.items()}
    try:
        for one in processes.values():
            one.round()
        measured = interleave({name: one.round for name, one in processes.items()}, rounds)
    finally:
        for one in processes.values():
            one.close()
    result.raw("million", measured)
    columns = {"seconds": "s", "us": "us a record", "records_read": "records read"}
    result.table(f"{records:,} records in {shards:,} shards", measured, columns)
    result.target("the whole order", median(measured["whole epoch"], "seconds"), 0.5, unit="s")
    resumed = measured["resume in the middle"]
    result.target("first batch after a resume", median(resumed, "seconds"), 1.0, unit="s")
    most = max(one["records_read"] for one in resumed)
    result.target("records read for it", most, BUFFER + BATCH, unit="records")
    chosen = measured["where, 10 of 1,000 classes"]
    result.target("a class filter", median(chosen, "seconds"), 1.0, unit="s")

    largest = 1_000 if source.quick else 100_000
    sizes = [largest // 100, largest // 10, largest]
    starts: dict[str, Callable[[], dict[str, Any]]] = {}
    for count in sizes:
        many = source.scratch / f"many{count}"
        many.mkdir()
        (many / "manifest.json").write_bytes(manifest_bytes(count))
        for consumers in (8, 7, 64):
            name = f"{count * 10_000:,} records, {consumers} consumers"
            starts[name] = partial(_start, many, consumers)
    for one in starts.values():
        one()
    started = interleave(starts, 2 if source.quick else 5)
    result.raw("starts", started)
    columns = {
        "start_s": "start, s",
        "memory_mb": "memory at the most, MB",
        "own_mb": "besides the manifest, MB",
        "us": "then, us a record",
    }
    result.table("One consumer of a job: start and memory", started, columns)
    slowest = max(median(found, "start_s") for found in started.values())
    result.target(f"start, {sizes[-1] * 10_000:,} records", slowest, 1.0, unit="s")
    result.note(
        f"{SPANS} spans, units of 32, batches of {BATCH} (8 units). 8 consumers have 8 spans each, "
        "of their own. Of 7, each reads from all; of 64, from 8 that it shares with 7 others: "
        "it simulates the draws of those it shares with"
    )


def _start(folder: Path, consumers: int) -> dict[str, Any]:
    command = [sys.executable, "-c", START, str(folder), str(consumers)]
    done = subprocess.run(command, check=True, capture_output=True, cwd=ROOT, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _write(folder: Path, records: int, shards: int) -> None:
    import shardio

    fields = {"__key__": "key", "image": "bytes", "label": "int"}
    each = records // shards
    with shardio.Writer(folder, fields=fields, max_records=each, id="order") as writer:
        for i in range(records):
            writer.write({"__key__": b"%08d" % i, "image": b"x" * 100, "label": i * 7919 % 1_000})


# --- entries --------------------------------------------------------------------------------------


def whole(path: str, shuffled: int) -> Callable[..., dict[str, Any]]:
    from shardio.order.options import RequestedOptions

    counts, epochs = _counts(path), iter(range(1 << 30))
    options = RequestedOptions(batch_size=BATCH, shuffle_buffer=shuffled).resolve(1.0)

    def one_round() -> dict[str, Any]:
        began = time.perf_counter()
        epoch = options.epoch(counts, next(epochs))
        seen = 0
        for span in range(epoch.spans):
            drawn = epoch.span_order(span)
            for start in range(0, drawn.n, 8192):
                places = drawn.take(min(8192, drawn.n - start))
                shards, _ = epoch.locate(epoch.position(span, places))
                seen += len(shards)
        seconds = time.perf_counter() - began
        assert seen == epoch.records
        return {"seconds": seconds, "us": seconds / seen * 1e6}

    return one_round


def resume(path: str) -> Callable[..., dict[str, Any]]:
    from shardio import ShardDataset
    from shardio.formats.record import RecordShard

    first = ShardDataset(path, batch_size=BATCH, shuffle_buffer=BUFFER, decode=None)
    states = iter(range(1, 1 << 30))
    read = 0
    held = RecordShard.hold

    def counted(self: Any, start: int, stop: int) -> Any:
        nonlocal read
        read += stop - start
        return held(self, start, stop)

    RecordShard.hold = counted  # type: ignore[method-assign]

    def one_round() -> dict[str, Any]:
        nonlocal read
        read = 0
        first.set_epoch(next(states))
        state = first.state_dict(steps=len(first) // 2)
        began = time.perf_counter()
        dataset = ShardDataset(path, batch_size=BATCH, decode=None)
        dataset.load_state_dict(state)
        batch = next(iter(dataset))
        seconds = time.perf_counter() - began
        assert len(batch["image"]) == BATCH
        return {"seconds": seconds, "records_read": read}

    return one_round


def where(path: str) -> Callable[..., dict[str, Any]]:
    from shardio import ShardDataset

    def one_round() -> dict[str, Any]:
        began = time.perf_counter()
        dataset = ShardDataset(path, batch_size=BATCH, where={"label": list(range(10))})
        return {"seconds": time.perf_counter() - began, "selected": dataset.records}

    return one_round


def _counts(path: str) -> Any:
    from shardio.formats import manifest
    from shardio.storage.location import locate

    return np.array(manifest.load(locate(path)).shard_records)
