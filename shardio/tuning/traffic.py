"""What a machine asks an object store for, by arithmetic: bytes and requests of an epoch.

How it works. Without a cache a loader process asks for what it hands out and nothing else: in
ranges of 8 MiB where no other reads its spans, else record by record. With a cache the processes
of a machine share ranges, so it asks for each span that one of them touches, once. A span that
processes of several machines share is asked for by each of these machines; which these are,
`order.partition.deal_batches` decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..dataset.buffering import Policy, WholeRequested
from ..order.partition import Partition
from ..storage.remote_file import RANGE
from .text import Plain

_END_BYTES: Final = 17  # of a record in a shard's end: its place, and a label
_SAMPLED_BATCHES: Final = 1 << 20  # batches whose spans are looked at, at most: 0.1 s


@dataclass(frozen=True)
class Traffic(Plain):
    """Bytes and requests of the busiest machine in an epoch; later ones differ by a shard or so."""

    bytes: int  # without a cache, each epoch
    requests: int
    held: bool  # in the first epoch alone, as long as its processes live: they hold all records
    first_bytes: int  # with a cache that has room for it, the first epoch
    first_requests: int
    later_bytes: int  # the second epoch, whose shards are others; 0 where a machine has them all
    nodes: int  # whose shards the machine reads, where nodes keep to shards of their own; else 1


def machine_traffic(partition: Partition, policy: Policy, *, local_world_size: int) -> Traffic:
    """Estimate what a machine of `local_world_size` ranks asks for.

    policy: of a process without a cache.
    """
    epoch, local = partition.epoch, local_world_size * partition.num_workers
    everything = policy.dataset_bytes
    shards = int((epoch.shard_records > 0).sum())
    part = local_world_size / partition.world_size  # of the records that this machine hands out
    spans, nodes = touched_spans(partition, local_world_size)
    touched = min(1.0, spans / max(1, min(epoch.spans, epoch.units)))
    # Spans begin and end within shards: a process opens those that its spans reach into, and at
    # most those that its units do.
    reach = 1 + epoch.window * shards / max(1, epoch.records)
    units = epoch.units / (partition.world_size * partition.num_workers)
    opened = min(shards, partition.spans_read * (1 + shards / epoch.spans), max(1.0, units * reach))
    if epoch.shuffles_all:
        opened = min(shards, epoch.records / (partition.world_size * partition.num_workers))
    ends = local * opened * _END_BYTES * epoch.records / max(1, shards)
    fixed = local * opened + local_world_size  # ends of shards; manifests
    sent, requests = policy.store_traffic(local, part)
    kept = everything * max(part, touched)
    within = everything * nodes / epoch.nodes  # that the machine reads in the course of all epochs
    borders = 2 * min(epoch.spans, partition.spans_read * local) if touched < 1 else shards
    return Traffic(
        bytes=math.ceil(sent + ends),
        requests=math.ceil(requests + fixed),
        held=isinstance(policy, WholeRequested),
        first_bytes=math.ceil(kept + ends),
        first_requests=math.ceil(kept / RANGE + borders + fixed),
        later_bytes=round(kept * (1 - min(1.0, kept / max(1.0, within)))),
        nodes=nodes,
    )


def touched_spans(partition: Partition, local_world_size: int) -> tuple[int, int]:
    """Count the spans that the ranks of a machine touch, of a long epoch, and the nodes of these.

    Of the machine that touches most.
    """
    spans, units, ranks = partition.epoch.spans, partition.batch_units, partition.world_size
    turns = partition.batches_of_ranks(max(1, _SAMPLED_BATCHES // ranks))
    steps = np.arange(len(turns))[:, None] * (ranks * units)
    begins = (partition.start + steps + turns * units) % spans  # (steps, ranks)
    most = 0, 1
    for first in range(0, ranks, local_world_size):
        own = np.unique(begins[:, first : first + local_world_size])
        touched = np.unique((own[:, None] + np.arange(min(units, spans))) % spans)
        most = max(most, (len(touched), len(np.unique(partition.epoch.node(touched)))))
    return most
