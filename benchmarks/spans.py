"""Requests by URL without a cache, of 1 to 16 loader processes: shared spans, and their own.

The processes walk the epoch's order as in training, over shards that hold no bytes, and every range
that they ask for is counted (`scale.Counted`). The other spans are those that `explain` recommends.
Processes of ShardLoader and of DataLoader make the same batches.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, cast

import numpy as np

from . import data
from .harness import Result
from .scale import MEAN, SHARD, Counted

RECORDS = 1_000_000
QUICK = 100_000
BATCH = 256
PROCESSES = (1, 2, 3, 4, 6, 8, 12, 16)


def run(source: data.Data, result: Result) -> None:
    from shardio.order.options import RequestedOptions
    from shardio.order.partition import unshared_spans

    records = QUICK if source.quick else RECORDS
    counts = np.full(math.ceil(records * MEAN / SHARD), SHARD // MEAN)
    rows: dict[str, dict[str, float]] = {}
    for processes in PROCESSES:
        default = RequestedOptions(batch_size=BATCH).resolve(MEAN, records=int(counts.sum()))
        share = default.partition(default.epoch(counts, 0), num_workers=processes)
        spans = default.spans if share.sharers == 1 else unshared_spans(share)
        own = RequestedOptions(batch_size=BATCH, spans=spans).resolve(
            MEAN, records=int(counts.sum())
        )
        rows[f"{processes} processes"] = {
            "default": _requests(counts, default, processes),
            "spans": spans,
            "own": _requests(counts, own, processes),
        }
    result.data(records=int(counts.sum()), mean_bytes=MEAN, shard_bytes=SHARD, batch=BATCH)
    columns = {"default": "requests, 64 spans", "spans": "recommended spans", "own": "requests"}
    result.table("Requests of an epoch by URL", {k: [v] for k, v in rows.items()}, columns)
    alone = rows["1 processes"]["own"]
    for name, row in rows.items():
        result.target(f"requests of {name}, of those of one", row["own"] / alone, 1.5, unit="")


def _requests(counts: Any, options: Any, processes: int) -> int:
    """Count what all processes of an epoch ask for; each shard that one opens is a request."""
    from shardio.dataset.fetch import Fetch

    found = 0
    for worker in range(processes):
        epoch = options.epoch(counts, 0)
        share = options.partition(epoch, worker=worker, num_workers=processes)
        reader = Counted(counts, MEAN)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*loader processes share")  # what is compared
            for _ in Fetch(cast(Any, reader), share, local_consumers=processes):
                pass
        found += reader.requests + len(reader.opened)
    return found
