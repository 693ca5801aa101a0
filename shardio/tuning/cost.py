"""What a training job reads and takes of memory, by arithmetic: no record is read.

How it works. Steps and shares come from Partition, where bytes wait from a buffering.Policy.
For up to two million records the epoch's order itself is made, without its bytes, and counted; for
more, what a worker reads is estimated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import numpy as np

from ..dataset.buffering import BUFFER_BYTES, calls_per_record, choose_policy, reads_batches_in_core
from ..dataset.reader import spare_descriptors
from ..formats import PACKED
from ..formats.base import Column
from ..formats.manifest import Manifest
from ..formats.record import memory_of_indexes
from ..order.options import Options, shuffled_whole
from ..order.partition import Partition, sharers
from ..order.rng import Int64s
from ..order.subset import Selection
from ..storage.local import memory_available
from ..units import check_int
from .text import Plain
from .traffic import Traffic, machine_traffic, touched_spans

COUNTED: Final = 1 << 21  # records whose order is made and counted: 0.25 us each, so 0.5 s at most
_COUNTED_SPANS: Final = 4096  # 60 us each
INDEX_BYTES: Final = 24  # a record of an open shard of others: offset, length, checksum, hash
_BLOCK_BYTES: Final = 32 << 10  # draws that a span has made, and not yet handed out
ORDER_BYTES: Final = 48  # a record of a window: its slot, and near the span's end a Python int
_MACHINE: Final = 8  # ranks on a machine, where nobody says: of GPUs, most have so many at most

Labels = Callable[[int], "Column | None"]
Pair = tuple[int, int]


@dataclass(frozen=True)
class WorkerReads(Plain):
    """What each consumer reads of epoch 0, as (least, most). Other epochs differ by a shard or so.

    A consumer is a worker; without workers, a rank's process.
    """

    is_exact: bool  # counted; else records, shards and bytes are about right
    steps: Pair
    records: Pair  # those that a tail repeats included
    shards: Pair
    bytes: Pair  # each record as the mean of its shard
    spans: int
    sharers: int  # consumers that read the same span, at most


@dataclass(frozen=True)
class MemoryUse(Plain):
    """Bytes of memory that a job takes in the worst case."""

    records_bytes: int  # records waiting in a process, or on their way from an object store
    order_bytes: int  # the state of the spans' orders in a process
    permutation_bytes: int  # of all records, in a process
    index_bytes: int  # of open shards, in a process
    process_bytes: int  # the sum of these four
    page_cache_bytes: int  # of a machine, announced and not yet read
    machine_bytes: int  # all its processes, and its page cache
    available_bytes: int  # memory of this machine


class TailCounts(NamedTuple):
    """What becomes of the records that fill no batch on every rank."""

    last: int  # rows of the last batch
    dropped: int
    repeated: int


class TrainingJob:
    """A dataset, the options of its order, and who reads it on what kind of machine.

    num_workers, world_size, local_world_size    as `explain` has them
    shard_records     records of each shard that are read, of a subset; default: all
    buffer_bytes      as ShardDataset has it
    is_network        the dataset lies on a network file system, or in an object store
    is_remote         it lies in an object store; has_cache: what is read there is kept on a disk
    files_limit       shards that a process opens; default: as many as this process would
    available_bytes   memory of a machine; default: what this one has to give
    labels            gives the labels of a shard, by its number; asked of a few shards, and only
                      where the manifest does not say whether packing shuffled
    batched_reads     as Fetch has it; default: as far as the manifest tells
    selection         the records of a subset; default: all

    Raises OptionError.
    """

    def __init__(
        self,
        manifest: Manifest,
        options: Options,
        *,
        num_workers: int = 0,
        world_size: int = 1,
        local_world_size: int | None = None,
        shard_records: Int64s | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        is_network: bool = False,
        is_remote: bool = False,
        has_cache: bool = False,
        files_limit: int | None = None,
        available_bytes: int | None = None,
        labels: Labels | None = None,
        batched_reads: bool | None = None,
        selection: Selection | None = None,
    ) -> None:
        self.manifest, self.options, self.labels = manifest, options, labels
        self.is_network, self.is_remote, self.has_cache = is_network, is_remote, has_cache
        self.num_workers = check_int("num_workers", num_workers, 0)  # 0: the rank itself reads
        self.world_size = ranks = check_int("world_size", world_size)
        local = min(ranks, _MACHINE) if local_world_size is None else local_world_size
        self.local_world_size = local = check_int("local_world_size", local, 1, ranks)
        self.available_bytes = memory_available() if available_bytes is None else available_bytes
        self.files_limit = spare_descriptors() if files_limit is None else files_limit
        counts = manifest.shard_records if shard_records is None else shard_records
        self.epoch = epoch = options.epoch(counts, 0)  # of what is read
        # The first worker of rank 0: none has more steps.
        self.partition = partition = options.partition(
            epoch, world_size=ranks, num_workers=max(1, self.num_workers)
        )
        self.records = epoch.records
        self.record_bytes = manifest.mean_bytes
        beside = sum(one.size for one in manifest.overlays)  # all of it, whatever is read
        self.dataset_bytes = round(float(_shard_means(manifest) @ epoch.shard_records)) + beside
        self.shards = int((epoch.shard_records > 0).sum())  # that have records
        self.consumers = partition.num_workers * ranks
        self.local_consumers = partition.num_workers * local  # on a machine
        if batched_reads is None:
            batched_reads = reads_batches_in_core(manifest)
        choose = partial(
            choose_policy,
            partition,
            self.record_bytes,
            network=is_network,
            buffer_bytes=buffer_bytes,
            local_consumers=self.local_consumers,
            machines=-(-ranks // local),
            available_bytes=self.available_bytes,
            batched_reads=batched_reads,
            calls_per_record=partial(calls_per_record, manifest, selection),
        )
        self.policy = choose(remote=is_remote and not has_cache)
        self.traffic: Traffic | None = None
        if is_remote:
            self.traffic = machine_traffic(partition, choose(remote=True), local_world_size=local)
        windows = min(epoch.spans * epoch.window, epoch.records)
        self.window_bytes = math.ceil(windows * self.record_bytes)
        self.files_open = min(self.files_limit, self.shards)  # by a process, at most
        self.free_consumers = free_consumers(epoch.spans, partition.batch_units)
        # Reading at random does no harm locally, and where the default does so.
        self.may_be_random = not is_network or shuffled_whole(self.records, self.record_bytes)

    @property
    def files_needed(self) -> int:
        """Count the shards that a consumer's windows reach into at once, about.

        A record leaves a window of w after w draws on average, and 1 in 7 after more than 2 w.
        """
        if self.epoch.shuffles_all:
            return self.shards
        across = 2 * self.epoch.window * self.shards / max(1, self.records)
        return min(self.shards, math.ceil(self.partition.spans_read * (1 + across)))

    @property
    def nodes_read(self) -> int:
        """Count the nodes whose shards a machine reads, where nodes keep to shards of their own."""
        return touched_spans(self.partition, self.local_world_size)[1]

    @cached_property
    def reads(self) -> WorkerReads:
        """Count what each consumer reads, or estimate it where counting would take seconds."""
        spans = min(self.epoch.spans, self.epoch.units)
        if self.records <= COUNTED and max(spans, self.consumers) <= _COUNTED_SPANS:
            return _count(self.partition, self.manifest)
        return _estimate(self.partition, self.shards, self.record_bytes)

    @cached_property
    def memory(self) -> MemoryUse:
        """Add up the memory of a process, and of a machine."""
        epoch, manifest = self.epoch, self.manifest
        sizes = np.sort(manifest.shard_records[epoch.shard_records > 0])
        records = min(self.policy.records_bytes, manifest.size)
        order = self.partition.spans_read * (_BLOCK_BYTES + ORDER_BYTES * epoch.window)
        permutation = 8 * epoch.records if epoch.shuffles_all else 0
        opened = sizes[len(sizes) - self.files_open :]
        packed = manifest.format in PACKED
        index = memory_of_indexes(opened) if packed else INDEX_BYTES * int(opened.sum())
        process = records + order + permutation + index
        cached = min(self.policy.cached_bytes, manifest.size)
        machine = process * self.local_consumers + cached
        available = self.available_bytes
        return MemoryUse(records, order, permutation, index, process, cached, machine, available)

    @cached_property
    def tail(self) -> TailCounts:
        """Count the records that the tail leaves out or repeats."""
        partition, records = self.partition, self.records
        size, steps = partition.batch_size or 1, partition.steps
        rows = steps * size * partition.world_size
        if partition.tail == "drop" or not steps:
            return TailCounts(size if steps else 0, records - min(records, rows), 0)
        repeated = 0 if partition.tail == "pad" and partition.world_size == 1 else rows - records
        return TailCounts(size - (rows - records - repeated), 0, repeated)


def free_consumers(spans: int, batch_units: int) -> tuple[int, ...]:
    """Return the values of num_workers x world_size with which no two read the same span."""
    return tuple(
        consumers for consumers in divisors(spans) if sharers(spans, consumers, batch_units) == 1
    )


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


# --- what each consumer reads ---------------------------------------------------------------------


def _count(partition: Partition, manifest: Manifest) -> WorkerReads:
    """Make the epoch's order, span by span, and count who reads what."""
    epoch, units, ranks = partition.epoch, partition.batch_units, partition.world_size
    consumers, shards = partition.num_workers * ranks, max(1, len(epoch.shard_records))
    batches = partition.steps * ranks  # of all ranks; what comes behind them is dropped
    readers = _readers(partition)
    rows = [np.empty(0, np.int64)]  # of each row: consumer * shards + shard
    sharers = 1
    for span in range(min(epoch.spans, epoch.units)):
        places = epoch.span_order(span).take(epoch.span_records(span))
        shard, _ = epoch.locate(epoch.position(span, places))
        unit = np.arange(len(places)) // epoch.unit * epoch.spans + span
        batch = unit // units
        read = batch < batches
        consumer = readers[batch[read]]
        rows.append(consumer * shards + shard[read])
        sharers = max(sharers, len(np.unique(consumer)))
    for rank in range(ranks if partition.steps else 0):  # only a rank's last batch repeats records
        worker = (partition.steps - 1) % partition.num_workers
        repeats = replace(partition, rank=rank).batch(partition.steps - 1).repeats
        if len(repeats):
            rows.append((worker * ranks + rank) * shards + epoch.locate(repeats)[0])
    pairs, counts = np.unique(np.concatenate(rows), return_counts=True)
    who, which = np.divmod(pairs, shards)
    sizes = np.append(_shard_means(manifest), 0.0)[which] * counts  # (pairs,) bytes
    return _reads(
        partition,
        sharers,
        np.bincount(who, counts, minlength=consumers),
        np.bincount(who, minlength=consumers),
        np.bincount(who, sizes, minlength=consumers).round(),
    )


def _readers(partition: Partition) -> Int64s:
    """Tell of each batch, of all ranks, which consumer makes it: worker * ranks + rank."""
    ranks = partition.world_size
    turns = partition.batches_of_ranks(partition.steps)
    steps = np.arange(partition.steps)
    rank = np.argsort(turns, axis=1)[steps % max(1, len(turns))]
    readers: Int64s = (rank + (steps % partition.num_workers)[:, None] * ranks).reshape(-1)
    return readers


def _estimate(partition: Partition, shards: int, mean_bytes: float) -> WorkerReads:
    """Estimate what the workers with the most and the fewest steps read: all shards as if alike."""
    epoch = partition.epoch
    records = np.minimum(np.array(_steps(partition)) * (partition.batch_size or 1), epoch.records)
    if epoch.shuffles_all:
        across = float(shards)
    else:  # as many as its spans have, or its pieces reach
        reach = 1 + epoch.window * shards / max(1, epoch.records)
        pieces = int(records.max()) / epoch.unit * reach
        across = min(partition.spans_read * (shards / epoch.spans + 1), pieces)
    return _reads(
        partition,
        partition.sharers if epoch.units else 1,
        records,
        np.minimum(records, min(shards, math.ceil(across))),
        np.round(records * mean_bytes),
        is_exact=False,
    )


def _steps(partition: Partition) -> Pair:
    """Return the steps of a rank's last worker, and of its first: the fewest and the most."""
    last = replace(partition, worker=partition.num_workers - 1)
    return len(last.worker_steps), len(partition.worker_steps)


def _reads(
    partition: Partition, sharers: int, *reads: np.ndarray[Any, Any], is_exact: bool = True
) -> WorkerReads:
    """Sum up the records, the shards and the bytes that each consumer reads, (consumers,) each."""
    records, shards, sizes = ((int(each.min()), int(each.max())) for each in reads)
    return WorkerReads(
        is_exact, _steps(partition), records, shards, sizes, partition.spans_read, sharers
    )


def _shard_means(manifest: Manifest) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the mean bytes of a record of each shard, index included: (shards,)."""
    return manifest.shard_sizes / np.maximum(1, manifest.shard_records)
