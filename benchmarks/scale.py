"""Datasets of 10^6 to 10^9 images in an object store: requests and bandwidth of a machine.

The figures are `explain`'s arithmetic (tuning/traffic). A simulation checks them: the loader
processes of one machine walk the epoch's order as in training, over shards that hold no bytes, and
every range that they ask for is counted.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, cast

import numpy as np

from . import data
from .harness import Result
from .manifest import manifest_bytes

MEAN = 110_000  # bytes of a record
SHARD = 256 << 20
IMAGES_S = 3_000  # that a machine of 8 ranks trains on
RANKS = 8  # on a machine
SECONDS = 60  # of training that are simulated


class Counted:
    """A reader of shards without bytes, which counts what is asked for."""

    remote = True
    url = "simulated"

    def __init__(self, counts: Any, mean: float) -> None:
        self.counts, self.mean_bytes, self.storage = counts, mean, self
        self.starts = np.concatenate(([0], np.cumsum(counts)))
        self.requests, self.bytes, self.opened = 0, 0, set[int]()
        self.manifest = None  # not asked for
        self.sizes = np.full(int(counts.max()), mean, np.int64)

    def is_network(self) -> bool:
        return True

    def share(self, consumers: int) -> None: ...

    def begin_pass(self) -> None: ...

    def end_pass(self, token: None) -> None: ...

    def will_open(self, numbers: Any) -> None: ...

    def shard(self, number: int, scattered: bool) -> Counted:
        self.opened.add(number)
        return self

    def will_need(self, begin: int, end: int, *, keep: bool = False) -> None:
        self.requests += math.ceil((end - begin) * self.mean_bytes / (8 << 20))
        self.bytes += (end - begin) * self.mean_bytes

    def hold(self, begin: int, end: int) -> list[bytes]:
        return [b""] * (end - begin)


def run(source: data.Data, result: Result) -> None:
    rows: dict[str, dict[str, float]] = {}
    for power in (6, 7) if source.quick else (6, 7, 8, 9):
        for machines, workers in ((1, 1), (1, 8)) if power < 9 else ((1, 1), (1, 8), (128, 8)):
            name = f"10^{power} images, {machines} x {RANKS} ranks x {workers} workers"
            rows[name] = _row(10**power, machines, workers)
    columns = {
        "shards": "shards",
        "dataset_tb": "TB",
        "manifest_mb": "manifest, MB",
        "requests_s": "requests/s a machine",
        "simulated": "simulated",
        "bandwidth_mb_s": "MB/s a machine",
        "memory_gb": "windows, GB a machine",
    }
    result.data(mean_bytes=MEAN, shard_bytes=SHARD, images_s=IMAGES_S, simulated_s=SECONDS)
    result.table("Streaming without a cache", {k: [v] for k, v in rows.items()}, columns)
    for name, row in rows.items():
        off = abs(row["requests_s"] / row["simulated"] - 1)
        result.target(f"requests by arithmetic, off the simulation, {name}", off, 0.3, unit="")


def requests_a_row(counts: Any, share: Any, mean: float, local: int, machines: int) -> float:
    """Walk one loader process of a machine, without the beginning, which fills its windows.

    local: the loader processes of the machine.
    """
    from shardio.dataset.fetch import Fetch

    reader = Counted(counts, mean)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*loader processes share")  # that is what is compared
        fetch = Fetch(cast(Any, reader), share, local_consumers=local, machines=machines)
    wanted = min(IMAGES_S * SECONDS / local, 0.8 * len(share.worker_steps) * share.batch_size)
    rows, first = 0, (0, 0)
    for batch in fetch:
        rows += batch.size
        if not first[0] and rows >= wanted / 4:
            first = rows, reader.requests + len(reader.opened)
        if rows >= wanted:
            break
    return (reader.requests + len(reader.opened) - first[1]) / (rows - first[0])


def _row(records: int, machines: int, workers: int) -> dict[str, float]:
    from shardio.dataset.buffering import Ranges, choose_policy
    from shardio.order.options import RequestedOptions
    from shardio.tuning.traffic import machine_traffic

    shards = max(16, math.ceil(records * MEAN / SHARD))
    counts = np.full(shards, records // shards)
    ask = RequestedOptions(256, None, 0, None, None, None, True)
    options = ask.resolve(MEAN, records=int(counts.sum()))
    epoch = options.epoch(counts, 0)
    world = RANKS * machines
    local = RANKS * workers
    share = options.partition(epoch, world_size=world, num_workers=workers)
    policy = choose_policy(
        share, MEAN, network=True, remote=True, local_consumers=local, machines=machines
    )
    traffic = machine_traffic(share, policy, local_world_size=RANKS)
    windows = policy.windows_bytes if isinstance(policy, Ranges) else 0
    seconds = records / machines / IMAGES_S  # of an epoch
    simulated = IMAGES_S * requests_a_row(counts, share, MEAN, local, machines)
    return {
        "shards": shards,
        "dataset_tb": records * MEAN / 1e12,
        "manifest_mb": shards * len(manifest_bytes(1_000)) / 1_000 / 1e6,
        "requests_s": traffic.requests / seconds,
        "simulated": simulated,
        "bandwidth_mb_s": traffic.bytes / seconds / 1e6,
        "memory_gb": windows * local / 1e9,
    }
