"""Opening the manifest of 100,000 shards and 10^9 records: seconds, and memory at the most.

Each round is a fresh process that has imported shardio and not yet opened anything.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from typing import Any

from . import data
from .harness import ROOT, Result, interleave, median

LOAD = """
import json, sys, time
from shardio.formats import manifest
from shardio.storage.location import locate

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1e3 * 1.024

def opened():
    began = time.perf_counter()
    made = manifest.load(locate(sys.argv[1]))
    return made, time.perf_counter() - began

before = peak()
made, seconds = opened()
print(json.dumps({"seconds": seconds, "memory_mb": peak() - before, "records": made.records}))
"""


def run(source: data.Data, result: Result) -> None:
    shards, rounds = (1_000, 2) if source.quick else (100_000, 9)
    records = shards * 10_000
    folder = source.scratch / "many"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(manifest_bytes(shards))
    size = (folder / "manifest.json").stat().st_size
    result.data(shards=shards, records=records, manifest_bytes=size)

    def load() -> dict[str, Any]:
        command = [sys.executable, "-c", LOAD, str(folder)]
        done = subprocess.run(command, check=True, capture_output=True, cwd=ROOT, text=True)
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["records"] == records, found
        return found

    load()
    measured = interleave({"manifest.load": load}, rounds)
    result.raw("loads", measured)
    columns = {"seconds": "s", "memory_mb": "memory at the most, MB"}
    result.table(f"A manifest of {shards:,} shards, {records:,} records", measured, columns)
    loads = measured["manifest.load"]
    result.target("time to open", median(loads, "seconds"), 1.0, unit="s")
    memory = max(one["memory_mb"] for one in loads)
    result.target("memory to open, at the most", memory, 100, unit="MB")


def manifest_bytes(shards: int) -> bytes:
    from shardio import __version__
    from shardio.formats import manifest
    from shardio.formats.base import ShardInfo
    from shardio.formats.sample import Schema

    def info(number: int) -> ShardInfo:
        digest = hashlib.sha256(b"%d" % number).digest()
        index = int.from_bytes(digest[:8], "little")
        name = manifest.shard_name(number, digest)
        return ShardInfo(name, number, 10_000, 256 << 20, digest, index)

    made = manifest.make(
        [info(number) for number in range(shards)],
        dataset_id=bytes(16),
        format="record",
        schema=Schema([("__key__", "key"), ("image", "image"), ("label", "int")]),
        classes=tuple(f"class {i:04d}" for i in range(1000)),
        options={"seed": 0},
        library=__version__,
        blob_bytes=shards * (255 << 20),
    )
    return made.dump()
