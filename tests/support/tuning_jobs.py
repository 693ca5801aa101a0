"""Jobs on datasets that nobody packed, for `explain`; and what their consumers read."""

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from shardio.formats.manifest import Manifest
from shardio.formats.sample import Schema
from shardio.order.options import RequestedOptions
from shardio.tuning.cost import TrainingJob
from shardio.tuning.explain import Explanation, explain_job

GiB = 1 << 30


TAILS = ("pad", "drop", "exact")


def imagined(counts: list[int], size: int | list[int] = 1000, **header: Any) -> Manifest:
    """The manifest of a dataset that nobody packed: shards of these records, of `size` bytes."""
    records = np.array(counts, np.int64)
    values: dict[str, Any] = {"classes": ("cat", "dog"), "options": {"shuffle": True}} | header
    return Manifest(
        dataset_id=bytes(16),
        format="record",
        schema=Schema([("__key__", "key"), ("image", "image"), ("label", "int")]),
        library="0",
        blob_bytes=0,
        shard_records=records,
        shard_sizes=records * np.array(size, np.int64),
        shard_sha256=np.zeros((len(counts), 32), np.uint8),
        shard_index=np.zeros(len(counts), np.uint64),
        **values,
    )


def explained(made: Manifest, job: dict[str, Any] | None = None, **given: Any) -> Explanation:
    """Of a machine with much memory; `job`: keywords of TrainingJob."""
    mean = max(1.0, made.size / max(1, made.records))
    job = {"available_bytes": 1 << 50, "files_limit": 256} | (job or {})
    return explain_job(TrainingJob(made, RequestedOptions(**given).resolve(mean), **job))


def codes(e: Explanation) -> list[str]:
    return [advice.code for advice in e.warnings]


class Walked(NamedTuple):
    """What iterating over the shares of all consumers shows; by consumer (rank, worker)."""

    steps: set[int]
    batches: dict[tuple[int, int], int]
    rows: dict[tuple[int, int], list[tuple[int, int]]]  # shard and record of each, repeats too
    spans: dict[int, set[tuple[int, int]]]  # who touches each
    sizes: list[int]  # rows of each batch


def walk_all(made: Manifest, options: Any, ranks: int, workers: int) -> Walked:
    epoch = options.epoch(made.shard_records, 0)
    found = Walked(set(), {}, {}, defaultdict(set), [])
    walks: dict[int, Any] = {}
    for rank in range(ranks):
        for worker in range(workers):
            share = options.partition(
                epoch, rank=rank, world_size=ranks, worker=worker, num_workers=workers
            )
            rows: list[tuple[int, int]] = []
            batches = list(share)
            for batch in batches:
                before = len(rows)
                for span, first, count in batch.pieces:
                    found.spans[span].add((rank, worker))
                    walk = walks.setdefault(span, epoch.span_order(span))
                    walk.seek(first)
                    located = epoch.locate(epoch.position(span, walk.take(count)))
                    rows += zip(*(part.tolist() for part in located), strict=True)
                located = epoch.locate(batch.repeats)
                rows += zip(*(part.tolist() for part in located), strict=True)
                found.sizes.append(len(rows) - before)
            found.steps.add(share.steps)
            found.batches[rank, worker] = len(batches)
            found.rows[rank, worker] = rows
    return found


PHOTOS = imagined([500] * 512, 110_000)  # a fifth of ImageNet


TINY = imagined([3000] * 17, 970)  # like CIFAR


SORTED = imagined(
    [500] * 512,
    110_000,
    classes=[str(i) for i in range(1000)],
    options={"shuffle": False, "source": "imagefolder"},
)


FEW = imagined([30, 30])
