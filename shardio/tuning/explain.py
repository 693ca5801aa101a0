"""What training with these options will be like, before it starts: counts, memory, and warnings.

    print(shardio.explain("out/", batch_size=256, num_workers=8))

How it works. All of it comes from the arithmetic by which reading goes: steps and shares from
Partition, where bytes wait from buffering.plan_buffering. For up to two million records the epoch's
order itself is made, without its bytes, and counted; for more, what a worker reads is told as
"about". A warning says what is wrong, what it costs, and the one change that mends it.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ..dataset import buffering
from ..dataset.buffering import BUFFER_BYTES, KEPT, RUN, BufferPlan
from ..dataset.reader import OPEN_SHARDS, Reader, spare_descriptors
from ..errors import OptionError, printable
from ..formats.base import Column
from ..formats.foreign.parquet import cache_bytes
from ..formats.manifest import Manifest, load
from ..order.epoch import Epoch, Tail, default_unit
from ..order.options import SHUFFLE_BUFFER, Options, RequestedOptions, shuffled_whole
from ..order.partition import Batch, Partition, shared_spans
from ..order.rng import Int64s
from ..order.shuffle import SpanOrder
from ..storage.local import memory_available
from ..storage.location import locate
from ..units import check_int, show_count, show_size

if TYPE_CHECKING:
    from ..dataset.shard_dataset import ShardDataset

COUNTED: Final = 1 << 21  # records whose order is made and counted: 0.25 us each, so 0.5 s at most
_COUNTED_SPANS: Final = 4096  # 60 us each
INDEX_BYTES: Final = 24  # a record of an open shard: size, offset, length, key's hash
_BLOCK_BYTES: Final = 32 << 10  # draws that a span has made, and not yet handed out
_SLOT_BYTES: Final = 48  # a record of a window: its slot, and near the span's end a Python int
_LARGE_INDEX: Final = 1 << 30  # bytes of indexes in one process that are worth a word anywhere
_OFF: Final = 0.01  # of a uniform batch's mixture: less does not matter; as tuning.TOLERATED
_LOOKED: Final = 64  # batches that a mixture is judged by
_WIDTH: Final = 80  # columns of the text
_MACHINE: Final = 8  # ranks on a machine, where nobody says: of GPUs, most have so many at most
_DRAW_US: Final = 0.03  # to make one draw of a span's order
_INDENT: Final = 13

Labels = Callable[[int], "Column | None"]


@dataclass(frozen=True)
class Advice:
    """Something to change."""

    code: str  # stable, for programs: "no_batch_size"
    what: str  # what is wrong, and what it costs
    mend: str  # the one change that mends it
    change: dict[str, Any] = field(default_factory=dict)  # the same as options; {}: it is none


@dataclass(frozen=True)
class Explanation:
    """What a job will read and take. A consumer is a worker; without workers, a rank's process.

    worker_*, shared_spans and sharers are of epoch 0; other epochs differ by a shard or so.
    """

    # The dataset, or the subset that is read
    records: int
    shards: int  # that have records
    dataset_bytes: int
    record_bytes: float  # mean
    # The options; with dataset and epoch they are what a saved state holds
    batch_size: int | None
    shuffle_buffer: int | str  # records, or "all"
    seed: int
    tail: str
    canonical_workers: int
    unit: int
    # Who reads
    num_workers: int
    world_size: int
    local_world_size: int  # ranks on a machine
    consumers: int
    # Steps
    steps: int  # of each rank; without batch_size, samples
    last_batch_records: int  # fewer than batch_size where the last one is short
    dropped_records: int
    repeated_records: int
    # What each consumer reads of an epoch
    is_exact: bool  # counted; else the worker_ numbers of records, shards and bytes are about right
    worker_steps_min: int
    worker_steps_max: int
    worker_records_min: int
    worker_records_max: int
    worker_shards_min: int
    worker_shards_max: int
    worker_bytes_min: int
    worker_bytes_max: int
    # Shuffling
    shuffles_all: bool
    window_records: int  # of each span
    window_bytes: int  # of all spans
    span_records_min: int  # of spans that have records
    span_records_max: int
    # The order law, and who shares spans
    law_holds: bool
    law_world_sizes: tuple[int, ...]  # that give the same global batches, batch_size adapted
    worker_spans: int  # that each consumer reads
    shared_spans: int  # read by more than one consumer
    sharers: int  # consumers that read the same span, at most
    free_consumers: tuple[int, ...]  # values of num_workers x world_size with which none share
    # Where the bytes wait, and memory in the worst case
    policy: str  # buffering.BufferPlan's: "page_cache", "in_memory", "network"
    next_batches_only: bool  # only the records of the next batches are announced
    all_first: bool  # all are announced, or read, before the first batch
    files_open: int  # at most, in each process
    files_limit: int  # that a process lets itself open
    files_needed: int  # for its windows at once; with fewer, shards are opened again and again
    held_bytes: int  # records waiting in a process
    order_bytes: int  # the state of the spans' orders in a process
    permutation_bytes: int  # of all records, in a process
    index_bytes: int  # of open shards, in a process
    process_bytes: int  # the sum of these four
    page_cache_bytes: int  # of a machine, announced and not yet read
    machine_bytes: int  # all its processes, and its page cache
    available_bytes: int  # memory of this machine
    is_network: bool
    warnings: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON: one member a field; warnings as {"code", "what", "mend", "change"}."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values["warnings"] = [vars(advice) for advice in self.warnings]
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    def __repr__(self) -> str:
        return str(self)  # as a notebook shows it

    def __str__(self) -> str:
        blocks = [_row(name, text) for name, text in _told(self)]
        blocks += [_row("note", text) for text in self.notes]
        return "\n".join([*blocks, "", advice_text(self.warnings)])


def explain(
    dataset: ShardDataset | str | os.PathLike[str],
    *,
    num_workers: int = 0,
    world_size: int | None = None,
    local_world_size: int | None = None,
    batch_size: int | None = None,
    shuffle_buffer: int | str | None = None,
    tail: Tail | None = None,
    canonical_workers: int | None = None,
    unit: int | None = None,
    root: str | os.PathLike[str] | None = None,
) -> Explanation:
    """Say what training from a dataset will be like: `print(shardio.explain(ds, num_workers=8))`.

    Steps, records repeated or left out, bytes and memory of each worker, and warnings with the
    change that mends each. No record is read.

    dataset           a ShardDataset, of which `where` and `select` may have chosen records; or the
                      path of what `shardio pack` made
    num_workers       of each rank's loader
    world_size        ranks; default: those of a ShardDataset's job, and 1 for a path
    local_world_size  ranks on each machine; default: all, up to 8
    batch_size, shuffle_buffer, tail, canonical_workers, unit, root    for a path: as ShardDataset
                      has them. A ShardDataset has its own

    Raises OptionError; for a path also NotPackedError, DamageError, VersionError.
    """
    given = RequestedOptions(batch_size, shuffle_buffer, None, tail, canonical_workers, unit)
    if isinstance(dataset, (str, os.PathLike)):
        storage = locate(dataset)
        shards = None if root is None else locate(root)
        reader = Reader(storage, load(storage), root=shards)
        return explain_manifest(
            reader.manifest,
            given.resolve(reader.mean_bytes, records=reader.records),
            num_workers=num_workers,
            world_size=1 if world_size is None else world_size,
            local_world_size=local_world_size,
            is_network=reader.storage.is_network(),
            files_limit=reader.limit,
            labels=lambda number: reader.shard(number).columns.get("label"),
        )
    stream = check_dataset("explain", dataset, vars(given) | {"root": root})
    reader = stream.reader
    return explain_manifest(
        stream.manifest,
        stream.options,
        num_workers=num_workers,
        world_size=stream.ranks()[1] if world_size is None else world_size,
        local_world_size=local_world_size,
        shard_records=stream.counts,
        buffer_bytes=stream.buffer_bytes,
        is_network=reader.storage.is_network(),
        files_limit=reader.limit,
        labels=lambda shard: reader.shard(shard).columns.get("label"),
        batched_reads=stream.batched_reads,
        calls_per_record=partial(buffering.calls_per_record, stream.manifest, stream.selection),
    )


def check_dataset(function: str, dataset: object, options: Mapping[str, Any]) -> ShardDataset:
    """Return what is a ShardDataset, whose own options are not given anew. Raises OptionError."""
    from ..dataset.shard_dataset import ShardDataset  # it costs torch, which a path does not

    if not isinstance(dataset, ShardDataset):
        found = printable(repr(dataset))
        raise OptionError(
            f"{function}: expected a ShardDataset, or the path of a packed dataset, found {found}; "
            "of a mixture, ask each of its datasets"
        )
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise OptionError(
            f"{function}: {', '.join(given)} with a ShardDataset, which has its own: give them to "
            "the dataset, or its path here"
        )
    return dataset


def explain_manifest(
    manifest: Manifest,
    options: Options,
    *,
    num_workers: int = 0,
    world_size: int = 1,
    local_world_size: int | None = None,
    shard_records: Int64s | None = None,
    buffer_bytes: int = BUFFER_BYTES,
    is_network: bool = False,
    files_limit: int | None = None,
    available_bytes: int | None = None,
    labels: Labels | None = None,
    batched_reads: bool | None = None,
    calls_per_record: Callable[[], float] | None = None,
) -> Explanation:
    """Explain a job by arithmetic, of a dataset's manifest and the options of its order.

    num_workers       of each rank's DataLoader
    local_world_size  ranks on each machine; default: all, up to 8
    shard_records     records of each shard that are read, of a subset; default: all
    buffer_bytes      as ShardDataset has it
    is_network        the dataset lies on a network file system
    files_limit       shards that a process opens; default: as many as this process would
    available_bytes   memory of a machine; default: what this one has to give
    labels            gives the labels of a shard, by its number; asked of a few shards, and only
                      where the manifest does not say whether packing shuffled
    batched_reads     as Fetch has it; default: as far as the manifest tells
    calls_per_record  those of buffering.calls_per_record of a subset; default: of all records

    Raises OptionError.
    """
    workers = check_int("num_workers", num_workers, 0)
    ranks = check_int("world_size", world_size, 1)
    if local_world_size is None:
        here = min(ranks, _MACHINE)
    else:
        here = check_int("local_world_size", local_world_size, 1, ranks)
    available = memory_available() if available_bytes is None else available_bytes
    counts = manifest.shard_records if shard_records is None else shard_records
    epoch = options.epoch(counts, 0)
    each = max(1, workers)
    share = options.partition(epoch, world_size=ranks, num_workers=each)
    mean = manifest.mean_bytes
    plan = buffering.plan_buffering(
        share,
        mean,
        network=is_network,
        buffer_bytes=buffer_bytes,
        local_consumers=each * here,
        machines=-(-ranks // here),
        available_bytes=available,
        batched_reads=(
            buffering.reads_batches_in_core(manifest) if batched_reads is None else batched_reads
        ),
        calls_per_record=calls_per_record or partial(buffering.calls_per_record, manifest, None),
    )
    read = _count(share, manifest) if _countable(share) else _estimate(share, mean)
    tail = _tail(share)
    shards = int((epoch.shard_records > 0).sum())
    limit = spare_descriptors() if files_limit is None else files_limit
    files = min(limit, shards)
    largest = np.sort(manifest.shard_records[epoch.shard_records > 0])[shards - files :]
    # The longest span, and the shortest of those that have records.
    last = min(epoch.canonical_workers, max(1, epoch.units)) - 1
    spans = [n for n in map(epoch.span_records, (0, last)) if n] or [0]
    held = min(plan.held_bytes, plan.budget, manifest.size)
    state = share.touched * (_BLOCK_BYTES + _SLOT_BYTES * epoch.window)
    permuted = 8 * epoch.records if epoch.shuffles_all else 0
    index = INDEX_BYTES * int(largest.sum())
    process = held + state + permuted + index
    cached = min(plan.cached_bytes, manifest.size)
    size = options.batch_size or 1
    explanation = Explanation(
        records=epoch.records,
        shards=shards,
        dataset_bytes=round(float(_shard_means(manifest) @ epoch.shard_records)),
        record_bytes=mean,
        batch_size=options.batch_size,
        shuffle_buffer="all" if epoch.shuffles_all else epoch.shuffle_buffer or 0,
        seed=options.seed,
        tail=options.tail,
        canonical_workers=epoch.canonical_workers,
        unit=epoch.unit,
        num_workers=workers,
        world_size=ranks,
        local_world_size=here,
        consumers=each * ranks,
        steps=share.steps,
        last_batch_records=tail.last,
        dropped_records=tail.dropped,
        repeated_records=tail.repeated,
        is_exact=read.is_exact,
        worker_steps_min=len(replace(share, worker=each - 1).worker_steps),
        worker_steps_max=len(share.worker_steps),
        worker_records_min=int(read.records.min()),
        worker_records_max=int(read.records.max()),
        worker_shards_min=int(read.shards.min()),
        worker_shards_max=int(read.shards.max()),
        worker_bytes_min=int(read.bytes.min()),
        worker_bytes_max=int(read.bytes.max()),
        shuffles_all=epoch.shuffles_all,
        window_records=epoch.window,
        window_bytes=math.ceil(min(epoch.canonical_workers * epoch.window, epoch.records) * mean),
        span_records_min=min(spans),
        span_records_max=max(spans),
        law_holds=options.batch_size is not None,
        law_world_sizes=(
            () if options.batch_size is None else tuple(_divisors(size * ranks // epoch.unit))
        ),
        worker_spans=share.touched,
        shared_spans=int((read.sharers > 1).sum()),
        sharers=int(read.sharers.max(initial=1)),
        free_consumers=tuple(free_consumers(epoch.canonical_workers, share.batch_units)),
        policy=plan.policy,
        next_batches_only=plan.exact,
        all_first=plan.first,
        files_open=files,
        files_limit=limit,
        files_needed=_files_needed(share, shards),
        held_bytes=held,
        order_bytes=state,
        permutation_bytes=permuted,
        index_bytes=index,
        process_bytes=process,
        page_cache_bytes=cached,
        machine_bytes=process * each * here + cached,
        available_bytes=available,
        is_network=is_network,
    )
    notes = []
    if "accelerate" in sys.modules:
        notes.append(
            "Accelerate is imported: leave this DataLoader out of accelerator.prepare(), which "
            "would share out its batches among the ranks a second time"
        )
    # Of a subset it is not known which classes it has, nor how they lie.
    is_whole = np.array_equal(epoch.shard_records, manifest.shard_records)
    ordered = is_whole and _in_class_order(manifest, options, labels)
    advice = (
        *_advise(explanation, epoch, plan, manifest if ordered else None),
        *_decoded_again(explanation, manifest),
    )
    return replace(explanation, warnings=advice, notes=tuple(notes))


def free_consumers(canonical_workers: int, batch_units: int) -> Iterator[int]:
    """The values of num_workers x world_size with which no two consumers read the same span."""
    for consumers in _divisors(canonical_workers):
        if not shared_spans(canonical_workers, consumers, world_size=1, batch_units=batch_units):
            yield consumers


# --- what each consumer reads -----------------------------------------------------------------


class _Read(NamedTuple):
    """What the consumers of an epoch read, by consumer, and who shares each span."""

    is_exact: bool
    records: Int64s  # (consumers,) rows, those that a tail repeats included
    shards: Int64s  # (consumers,)
    bytes: Int64s  # (consumers,) each record as the mean of its shard
    sharers: Int64s  # (spans that have records,) the consumers of each


class _Tail(NamedTuple):
    last: int  # rows of the last batch
    dropped: int
    repeated: int


def _tail(share: Partition) -> _Tail:
    """What becomes of the records that fill no batch on every rank."""
    records, size, steps = share.epoch.records, share.batch_size or 1, share.steps
    rows = steps * size * share.world_size
    if share.tail == "drop" or not steps:
        return _Tail(size if steps else 0, records - min(records, rows), 0)
    repeated = 0 if share.tail == "pad" and share.world_size == 1 else rows - records
    return _Tail(size - (rows - records - repeated), 0, repeated)


def _last_batches(share: Partition) -> Iterator[Batch]:
    """Each rank's last batch: only there are records repeated."""
    for rank in range(share.world_size):
        yield replace(share, rank=rank).batch(share.steps - 1)


def _countable(share: Partition) -> bool:
    spans = min(share.epoch.canonical_workers, share.epoch.units)
    consumers = share.num_workers * share.world_size
    return share.epoch.records <= COUNTED and max(spans, consumers) <= _COUNTED_SPANS


def _count(share: Partition, manifest: Manifest) -> _Read:
    """Make the epoch's order, span by span, and count who reads what."""
    epoch, units, ranks = share.epoch, share.batch_units, share.world_size
    consumers, shards = share.num_workers * ranks, max(1, len(epoch.shard_records))
    made = share.steps * ranks  # batches of all ranks; what comes behind them is dropped
    rows: list[Int64s] = []  # of each row: consumer * shards + shard
    sharers: list[int] = []
    for span in range(min(epoch.canonical_workers, epoch.units)):
        places = epoch.span_order(span).take(epoch.span_records(span))
        shard, _ = epoch.locate(epoch.position(span, places))
        unit = np.arange(len(places)) // epoch.unit * epoch.canonical_workers + span
        batch = unit // units
        read = batch < made
        consumer = batch[read] % consumers  # the worker (batch div ranks) mod W of rank batch mod R
        rows.append(consumer * shards + shard[read])
        sharers.append(len(np.unique(consumer)))
    if share.steps:
        worker = (share.steps - 1) % share.num_workers
        for rank, batch_ in enumerate(_last_batches(share)):
            if len(batch_.repeats):
                shard, _ = epoch.locate(batch_.repeats)
                rows.append((worker * ranks + rank) * shards + shard)
    pairs, counts = np.unique(np.concatenate([np.empty(0, np.int64), *rows]), return_counts=True)
    who, which = np.divmod(pairs, shards)
    sizes = np.append(_shard_means(manifest), 0.0)[which] * counts  # (pairs,) bytes
    return _Read(
        True,
        np.bincount(who, counts, minlength=consumers).astype(np.int64),
        np.bincount(who, minlength=consumers).astype(np.int64),
        np.bincount(who, sizes, minlength=consumers).round().astype(np.int64),
        np.array(sharers, np.int64),
    )


def _estimate(share: Partition, mean: float) -> _Read:
    """About what they read, where counting would take seconds: all shards as if of one size."""
    epoch, shards = share.epoch, int((share.epoch.shard_records > 0).sum())
    workers = (0, share.num_workers - 1)  # with the most steps, and with the fewest
    steps = np.array([len(replace(share, worker=worker).worker_steps) for worker in workers])
    records = np.minimum(steps * (share.batch_size or 1), epoch.records)
    if epoch.shuffles_all:
        across = float(shards)
    else:  # as many as its spans have, or its pieces reach
        reach = 1 + epoch.window * shards / max(1, epoch.records)
        pieces = int(records.max()) / epoch.unit * reach
        across = min(share.touched * (shards / epoch.canonical_workers + 1), pieces)
    return _Read(
        False,
        records,
        np.minimum(records, min(shards, math.ceil(across))),
        np.round(records * mean).astype(np.int64),
        np.full(min(epoch.canonical_workers, epoch.units), share.sharers),
    )


def _shard_means(manifest: Manifest) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(shards,) bytes of a record of each shard, index included."""
    means: np.ndarray[Any, np.dtype[np.float64]] = manifest.shard_sizes / np.maximum(
        1, manifest.shard_records
    )
    return means


def _files_needed(share: Partition, shards: int) -> int:
    """Shards that a consumer's windows reach into at once, about.

    A record leaves a window of w after w draws on average, and 1 in 7 after more than 2 w.
    """
    epoch = share.epoch
    if epoch.shuffles_all:
        return shards
    across = 2 * epoch.window * shards / max(1, epoch.records)
    return min(shards, math.ceil(share.touched * (1 + across)))


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


# --- warnings ---------------------------------------------------------------------------------


def _advise(
    e: Explanation, epoch: Epoch, plan: BufferPlan, ordered: Manifest | None
) -> Iterator[Advice]:
    """All warnings, the worst first. ordered: the manifest, where packing left classes in order."""
    if not e.records:
        yield Advice(
            "no_records", "there are no records", "look at what was packed: `shardio info`"
        )
        return
    few = e.records < max(e.consumers, (e.batch_size or 1) * e.world_size)
    if few:
        yield _few_records(e)
    if e.batch_size is None:
        size = 1 << min(256, max(1, e.records // e.consumers)).bit_length() - 1
        yield Advice(
            "no_batch_size",
            "without batch_size the batches depend on num_workers, and each worker may end with a "
            "short one",
            f"ShardDataset(..., batch_size={size}) with DataLoader(..., batch_size=None)",
            {"batch_size": size},
        )
    elif e.steps < e.num_workers and not few:
        yield Advice(
            "idle_workers",
            f"each rank has {e.steps:,} steps for {e.num_workers:,} workers: some get no batch",
            f"num_workers={e.steps}",
            {"num_workers": e.steps},
        )
    if ordered is not None:
        yield from _poorly_mixed(e, epoch, ordered)
    shuffles = e.shuffle_buffer != 1
    if e.canonical_workers < e.consumers and shuffles:
        yield Advice(
            "few_spans",
            f"{e.consumers:,} workers read from {e.canonical_workers:,} spans: up to {e.sharers:,} "
            f"make the order of the same one, some {max(1, e.sharers * _DRAW_US):,.0f} us a record",
            f"canonical_workers={e.consumers}, in new runs (it is part of the order)",
            {"canonical_workers": e.consumers},
        )
    if isinstance(e.shuffle_buffer, int) and e.shuffle_buffer > 1:
        yield from _odd_window(e, plan)
    if e.is_network:
        yield from _on_network(e, plan)
    yield from _too_large(e)


def _few_records(e: Explanation) -> Advice:
    size = e.batch_size or 1
    if e.tail == "drop" and not e.steps:
        cost = "tail='drop' leaves all of them out"
    elif e.repeated_records:
        cost = f"in the only step {e.repeated_records:,} rows are repeats"
    elif e.batch_size is None:
        cost = "some workers get none"
    else:
        cost = "the only batch is a short one"
    many = f"{e.records:,} records are fewer than"
    if e.records >= e.consumers:
        smaller = e.records // e.consumers
        return Advice(
            "few_records",
            f"{many} batch_size x world_size, {size:,} x {e.world_size:,}: {cost}",
            f"batch_size={smaller}",
            {"batch_size": smaller},
        )
    what = f"{many} the {e.consumers:,} workers that are to read them: {cost}"
    if e.num_workers > 1 and e.records >= e.world_size:
        workers = e.records // e.world_size
        return Advice("few_records", what, f"num_workers={workers}", {"num_workers": workers})
    ranks = max(1, e.records // max(1, e.num_workers))
    return Advice("few_records", what, f"a world size of {ranks:,}", {"world_size": ranks})


def _odd_window(e: Explanation, plan: BufferPlan) -> Iterator[Advice]:
    spans, units = e.canonical_workers, -(-e.records // e.unit)
    span = max(1, units // spans) * e.unit  # the records of most spans, or a unit more
    if e.window_records > span:
        buffer: int | str = "all" if _may_be_random(e) else span * spans
        yield Advice(
            "window_over_span",
            f"the window of {e.window_records:,} records is larger than a span of {span:,}, which "
            "no record leaves",
            f"shuffle_buffer={_quoted(buffer)}",
            {"shuffle_buffer": buffer},
        )
    elif e.window_records < e.unit:
        what = (
            f"each span has a window of {show_count(e.window_records, 'record')}, less than the "
            f"unit of {e.unit:,} that a batch takes from it: the same neighbours meet in every "
            "epoch"
        )
        buffer = 4 * e.unit * spans
        room = KEPT * e.available_bytes
        if plan.policy == "network":
            room = min(room, plan.budget * max(1, e.num_workers) * e.local_world_size / 2)
        if buffer >= e.records:
            buffer, fits = "all", _may_be_random(e)
        else:
            fits = buffer * e.record_bytes <= room
        if not fits:
            unit = max(d for d in _divisors(e.batch_size or 1) if d <= e.window_records)
            yield Advice("window_under_unit", what, f"unit={unit}", {"unit": unit})
            return
        yield Advice(
            "window_under_unit",
            what,
            f"shuffle_buffer={_quoted(buffer)}; `shardio tune` finds the smallest that will do",
            {"shuffle_buffer": buffer},
        )


def _may_be_random(e: Explanation) -> bool:
    """Whether records may be read at random: locally, or where the default reads them so."""
    return not e.is_network or shuffled_whole(e.records, e.record_bytes)


def _quoted(buffer: int | str) -> str:
    return f'"{buffer}"' if isinstance(buffer, str) else str(buffer)


def _poorly_mixed(e: Explanation, epoch: Epoch, manifest: Manifest) -> Iterator[Advice]:
    classes, size = len(manifest.classes or ()), min(e.batch_size or 256, e.records)
    if e.shuffles_all or e.tail == "exact" or classes < 2:
        return  # mixed, or evaluation, which wants no mixture
    seen, alike, looked = _mixture_seen(epoch, classes, size)
    uniform = classes * (1 - (1 - 1 / classes) ** size)
    chance = looked * math.comb(size, 2) / classes  # pairs of one class; noise: their square root
    if seen < (1 - _OFF) * uniform:
        has = f"has about {round(seen, 1):g} classes, a uniform one {round(uniform, 1):g}"
    elif abs(chance - alike) > max(_OFF * chance, 4 * math.sqrt(chance)):
        has = f"has its classes in too {'un' if alike > chance else ''}equal parts"
    else:
        return
    rows = "batch" if e.batch_size else f"run of {size:,} samples"
    buffer = f"the buffer of {e.shuffle_buffer:,} records does not mix it"
    again, evaluating = "pack again without --no-shuffle", ""
    if manifest.options.get("source") == "writer":
        again = "write the samples in a shuffled order"
    if e.window_records <= 1:
        buffer, evaluating = "is read in that order", "; for evaluation, shuffle=False"
    mend, change = again, {}
    if not e.is_network:
        mend, change = f'{again}, or shuffle_buffer="all"', {"shuffle_buffer": "all"}
    yield Advice(
        "class_order",
        f"the dataset was packed in class order, and {buffer}: a {rows} {has}",
        mend + evaluating,
        change,
    )


def _mixture_seen(epoch: Epoch, classes: int, size: int) -> tuple[float, int, int]:
    """Mean distinct classes in some batches, all their pairs of one class, and their number.

    As if each class were the same share of the dataset.
    """
    starts = np.cumsum(epoch.shard_records) - epoch.shard_records
    spans: dict[int, SpanOrder] = {}
    distinct = alike = 0
    window, pieces = epoch.window, -(-size // epoch.unit)
    draws = pieces * ((1 << 14) + window * window.bit_length())  # of a batch's seeks: 0.03 us each
    batches = max(1, min(_LOOKED, epoch.records // size, (1 << 25) // draws))
    for batch in range(batches):
        first = (epoch.records - size) * (batch + 1) // (batches + 1)
        first -= first % epoch.unit
        found = []
        for span, draw, count in epoch.pieces(first, min(first + size, epoch.records)):
            if span not in spans:
                spans[span] = epoch.span_order(span)
            spans[span].seek(draw)
            found.append(epoch.position(span, spans[span].take(count)))
        shards, records = epoch.locate(np.concatenate(found))
        _, each = np.unique(
            (starts[shards] + records) * classes // epoch.records, return_counts=True
        )
        distinct += len(each)
        alike += int((each * (each - 1) // 2).sum())
    return distinct / batches, alike, batches


def _in_class_order(manifest: Manifest, options: Options, labels: Labels | None) -> bool:
    """Whether the pack is in class order, by its options, else by the labels of three shards."""
    shuffled = manifest.options.get("shuffle")
    if not options.shuffle or options.shuffle_buffer is None:
        return False
    if manifest.classes is None or shuffled:
        return False
    if labels is None:
        return shuffled is False
    chosen = np.flatnonzero(manifest.shard_records > 1)
    if not len(chosen):
        return False
    places = sorted({0, len(chosen) // 2, len(chosen) - 1})
    columns = [labels(int(chosen[place])) for place in places]
    if any(column is None for column in columns):
        return False
    parts = [np.ma.filled(column, -1) for column in columns if column is not None]
    _, counts = np.unique(np.concatenate(parts), return_counts=True)
    pairs = sum(len(part) - 1 for part in parts)
    unlike = 1.0 - float(((counts / counts.sum()) ** 2).sum())  # of two records drawn at random
    changes = sum(int((part[1:] != part[:-1]).sum()) for part in parts)
    return changes < 0.5 * unlike * pairs


def _on_network(e: Explanation, plan: BufferPlan) -> Iterator[Advice]:
    if e.shuffles_all and not _may_be_random(e):
        buffer = min(SHUFFLE_BUFFER, e.records // 2)
        yield Advice(
            "all_on_network",
            "a buffer of all records reads them at random, one request each, over the network",
            f"shuffle_buffer={buffer}",
            {"shuffle_buffer": buffer},
        )
    elif e.sharers > 1 and not e.shuffles_all and e.shuffle_buffer != 1:
        cost = "twice the bytes cross the network"
        if e.policy != "network":
            cost = "records are read one by one, a request each"
        yield _unshared(e, f"{e.sharers:,} workers read from the same span: {cost}")
    elif plan.budget:
        yield from _left_out(e, plan)
    if e.shards < e.consumers:
        yield Advice(
            "few_shards",
            f"{e.consumers:,} workers read from {e.shards:,} shards, so that several wait for "
            "the same file",
            "pack again with a smaller --shard-size",
        )


def _unshared(e: Explanation, what: str) -> Advice:
    fitting = [
        free // e.world_size
        for free in e.free_consumers
        if free % e.world_size == 0 and free * 2 >= e.consumers and free < e.consumers
    ]
    if fitting:
        workers = fitting[-1]
        return Advice("shared_spans", what, f"num_workers={workers}", {"num_workers": workers})
    units = (e.batch_size or 1) // e.unit
    spans = e.consumers * units
    return Advice(
        "shared_spans",
        what,
        f"canonical_workers={spans}, in new runs (it is part of the order)",
        {"canonical_workers": spans},
    )


def _left_out(e: Explanation, plan: BufferPlan) -> Iterator[Advice]:
    """Windows that do not fit what may be held."""
    window = e.window_records * e.record_bytes
    if e.worker_spans * (window + plan.run) <= plan.budget:
        return
    here = max(1, e.num_workers) * e.local_world_size
    needed = math.ceil(here * e.worker_spans * (window + RUN) / (1 << 20))
    mend = f'buffer_bytes="{needed}MiB"'
    change: dict[str, Any] = {"buffer_bytes": f"{needed}MiB"}
    if needed << 20 > e.available_bytes / 2:
        least = int(plan.budget / 2 / e.worker_spans / e.record_bytes)  # half is for blocks
        if least:
            buffer = least * e.canonical_workers
            mend, change = f"shuffle_buffer={buffer}", {"shuffle_buffer": buffer}
        else:
            mend, change = f"{mend}, on machines with more memory", {}
    yield Advice(
        "windows_left_out",
        f"the windows take {show_size(here * e.worker_spans * window)} on a machine, more than "
        f"the {show_size(plan.budget * here)} of buffer_bytes can hold: what is left out is "
        "read one by one",
        mend,
        change,
    )


def _too_large(e: Explanation) -> Iterator[Advice]:
    """What takes more memory, or more files, than there are."""
    here = max(1, e.num_workers) * e.local_world_size
    state = (e.worker_spans * e.window_records * _SLOT_BYTES + e.permutation_bytes) * here
    waits = e.policy == "page_cache" and not e.shuffles_all
    window = min(e.window_bytes, e.dataset_bytes) if waits else 0
    fits = int(KEPT * e.available_bytes / (e.record_bytes + here * _SLOT_BYTES))
    buffer = min(SHUFFLE_BUFFER, fits) if e.shuffles_all else fits
    what = ""
    if state > e.available_bytes / 2:
        what = (
            f"the order of the shuffle buffer alone takes {show_size(state)} in the processes of "
            f"a machine that has {show_size(e.available_bytes)} to give"
        )
    elif window > e.available_bytes:
        what = (
            f"the shuffle buffer is {show_size(window)}, more than the "
            f"{show_size(e.available_bytes)} of memory that this machine has to give: records are "
            "read one by one, not in runs"
        )
    if what and buffer >= e.canonical_workers:  # a window is one record at least
        yield Advice("buffer_memory", what, f"shuffle_buffer={buffer}", {"shuffle_buffer": buffer})
    if e.index_bytes > _LARGE_INDEX or e.index_bytes * here > e.available_bytes / 4:
        yield Advice(
            "index_memory",
            f"the indexes of {e.files_open:,} open shards take {show_size(e.index_bytes)} in each "
            f"process, {show_size(e.index_bytes * here)} on a machine",
            "pack again with a smaller --shard-size",
        )
    if e.files_needed > e.files_limit:
        what = (
            f"the windows of a process reach into {e.files_needed:,} shards, but it keeps "
            f"{e.files_limit:,} open: many reads open a shard again, and read its index"
        )
        if e.files_limit < min(OPEN_SHARDS, e.files_needed):
            least = 4 * min(OPEN_SHARDS, e.files_needed)
            yield Advice("files_reopened", what, f"`ulimit -n {least}`, before the job starts")
        elif e.shuffles_all:
            yield Advice("files_reopened", what, "pack again with a larger --shard-size")
        elif e.files_limit < 2 * e.worker_spans:
            spans = max(1, e.canonical_workers * e.files_limit // (2 * e.worker_spans))
            yield Advice(
                "files_reopened",
                what,
                f"canonical_workers={spans}, in new runs (it is part of the order)",
                {"canonical_workers": spans},
            )
        else:  # what _files_needed says, for as many as there may be
            across = e.files_limit / e.worker_spans - 1
            buffer = int(e.canonical_workers * across * e.records / e.shards / 2)
            buffer = max(1, buffer // e.canonical_workers) * e.canonical_workers
            yield Advice(
                "files_reopened",
                what,
                f"shuffle_buffer={buffer}",
                {"shuffle_buffer": buffer},
            )


def _decoded_again(e: Explanation, manifest: Manifest) -> Iterator[Advice]:
    """Row groups of Parquet that a process needs at once, and cannot keep decoded."""
    group = manifest.options.get("row_group")
    if manifest.format != "parquet" or type(group) is not dict or not e.records:
        return
    rows, size = max(1, group["rows"]), group["bytes"]
    # Records that are held are read in order; others are when they are handed out: _files_needed.
    reach = 2 * e.window_records / rows if e.policy == "page_cache" else 0
    groups = e.records / rows
    if not e.shuffles_all:
        groups = min(groups, e.worker_spans * (1 + reach))
    limit = cache_bytes(e.available_bytes)
    if groups * size <= limit:
        return
    mend = "pack it: `shardio pack DIR OUT`"
    change: dict[str, Any] = {}
    window = int((limit / size / e.worker_spans - 1) * rows / 2) if e.policy == "page_cache" else 0
    if window >= e.unit:
        change = {"shuffle_buffer": window * e.canonical_workers}
        mend += f", or shuffle_buffer={change['shuffle_buffer']}"
    yield Advice(
        "row_groups",
        f"a process reads from about {show_count(math.ceil(groups), 'row group')} at once, "
        f"{show_size(groups * size)} decoded, and keeps {show_size(limit)} of them: the same ones "
        "are decoded again and again",
        mend,
        change,
    )


# --- words ------------------------------------------------------------------------------------


def _told(e: Explanation) -> Iterator[tuple[str, str]]:
    """The rows of the text."""
    one = "worker" if e.num_workers else "rank" if e.world_size > 1 else "process"
    size = e.batch_size
    yield (
        "dataset",
        f"{show_count(e.records, 'record')} in {show_count(e.shards, 'shard')}, "
        f"{show_size(e.dataset_bytes)}, {show_size(e.record_bytes)} each",
    )
    workers = show_count(e.num_workers, "worker") if e.num_workers else "no workers"
    if e.world_size == 1:
        yield "readers", workers if e.num_workers else f"one process, {workers}"
    else:
        spread = f" ({e.local_world_size:,} on a machine)"
        yield "readers", f"{e.world_size:,} ranks{spread}, {workers} each"
    if size is None:
        steps = f"{e.steps:,} samples a rank"
    else:
        steps = f"{e.steps:,} a rank, batches of {size:,}"
        if e.steps and e.last_batch_records < size:
            steps += f", the last of {e.last_batch_records:,}"
    if e.num_workers:
        steps += f"; {_span(e.worker_steps_min, e.worker_steps_max)} a worker"
    yield "steps", steps
    yield "tail", f"{e.tail}: {_tail_text(e)}"
    yield "order", _order_text(e)
    yield "buffer", _buffer_text(e)
    if size is not None and not e.shuffles_all:
        usual = e.unit == default_unit(size)
        why = "a divisor of batch_size" if usual else "as given"
        spans = show_count(min(e.canonical_workers, size // e.unit), "span")
        yield "unit", f"{e.unit:,}, {why}; a batch mixes {spans}"
    yield "spans", _sharing_text(e, one)
    about = "" if e.is_exact else "about "
    yield (
        f"each {one}" if one != "process" else "an epoch",
        f"{about}{_span(e.worker_records_min, e.worker_records_max)} records, "
        f"{_sizes(e.worker_bytes_min, e.worker_bytes_max)}, "
        f"from {_span(e.worker_shards_min, e.worker_shards_max)} shards",
    )
    yield "files", f"{e.files_open:,} open at most, of {e.files_limit:,} that a process may open"
    yield "bytes wait", _waiting_text(e)
    yield "memory", _memory_text(e)
    state = f"shuffle_buffer={e.shuffle_buffer} seed={e.seed} tail={e.tail}"
    yield "state", f"{state} canonical_workers={e.canonical_workers} unit={e.unit}"


def _tail_text(e: Explanation) -> str:
    if e.tail == "drop":
        if not e.dropped_records:
            return "no record is left out"
        return f"{show_count(e.dropped_records, 'record')} left out, others each epoch"
    if not e.repeated_records:
        return "each record once an epoch"
    marked = ", marked as not valid" if e.tail == "exact" else ""
    return f"each record once an epoch, and {show_count(e.repeated_records, 'repeat')}{marked}"


def _order_text(e: Explanation) -> str:
    if not e.law_holds:
        return "without batch_size it depends on num_workers; each record comes once"
    total = (e.batch_size or 1) * e.world_size
    return (
        f"the same for any num_workers, and for {_listed(e.law_world_sizes, 'rank')} where "
        f"batch_size x ranks is {total:,} and unit {e.unit:,}"
    )


def _buffer_text(e: Explanation) -> str:
    if e.shuffles_all:
        reads = "random reads, for local flash or memory"
        if e.all_first:
            reads = "all are read ahead, in storage order"
        elif not e.next_batches_only:
            reads = "read ahead in storage order, since memory holds them"
        return f"all records, a true permutation: {reads}"
    spans = show_count(min(e.canonical_workers, -(-e.records // e.unit)), "span")
    sizes = _span(e.span_records_min, e.span_records_max)
    if isinstance(e.shuffle_buffer, int) and e.shuffle_buffer <= 1:
        return "none: every epoch comes in the order of the index"
    return (
        f"{e.shuffle_buffer:,} records, {show_size(e.window_bytes)}: {e.window_records:,} in each "
        f"of {spans} of {sizes}"
    )


def _sharing_text(e: Explanation, one: str) -> str:
    free = f"{_listed(e.free_consumers, 'worker')} in all"
    if e.sharers <= 1:
        return f"{e.worker_spans:,} a {one}, none shared, as with {free}"
    cost = "costs a network file system extra reads"
    if e.is_network and not e.shuffles_all:
        cost = "more traffic, see below"
    others = show_count(e.sharers - 1, "other")
    shared = f"{e.worker_spans:,} a {one}, each also read by {others} ({cost})"
    return f"{shared}; with {free} none is shared"


def _waiting_text(e: Explanation) -> str:
    if e.policy == "in_memory":
        return "in each process, read in blocks"
    if e.policy == "network":
        return "in each process, up to its part of buffer_bytes; others are read one by one"
    if e.next_batches_only:
        return "in storage; only those of the next batches are announced to the page cache"
    if e.all_first:
        how = "read" if e.is_network else "announced"
        return f"in the page cache, all {how} before the first batch"
    if e.shuffles_all:
        return "in the page cache, all announced in the first quarter of the epoch"
    return "in the page cache, announced as the windows move on"


def _memory_text(e: Explanation) -> str:
    parts = {
        "records": e.held_bytes,
        "order": e.order_bytes,
        "permutation": e.permutation_bytes,
        "indexes": e.index_bytes,
    }
    shown = ", ".join(f"{name} {show_size(size)}" for name, size in parts.items() if size)
    text = f"at worst {show_size(e.process_bytes)} a process: {shown}"
    here = max(1, e.num_workers) * e.local_world_size
    if here == 1 and not e.page_cache_bytes:
        return text
    text += f"; {show_size(e.process_bytes * here)} a machine"
    return text + (f", and {show_size(e.page_cache_bytes)} of cache" if e.page_cache_bytes else "")


def advice_text(warnings: Sequence[Advice]) -> str:
    """Numbered, each with its change on a line of its own."""
    if not warnings:
        return "no warnings"
    lines = [show_count(len(warnings), "warning")]
    for number, advice in enumerate(warnings, 1):
        start = f"{number}. "
        lines.append(_wrapped(advice.what, start, " " * len(start)))
        lines.append(_wrapped(advice.mend, " " * len(start) + "-> ", " " * len(start) + "   "))
    return "\n".join(lines)


def _row(name: str, text: str) -> str:
    return _wrapped(text, name.ljust(_INDENT), " " * _INDENT)


def _wrapped(text: str, first: str, later: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _span(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _sizes(least: int, most: int) -> str:
    low, high = show_size(least), show_size(most)
    if low == high:
        return low
    number, unit = low.split(" ")
    return f"{number} to {high}" if high.endswith(f" {unit}") else f"{low} to {high}"


def _listed(values: Sequence[int], noun: str) -> str:
    """1, 2, 4 or 8 workers; of many values the first and the last."""
    shown = [f"{value:,}" for value in values]
    if len(shown) > 12:
        shown = [*shown[:10], "...", shown[-1]]
    if len(shown) == 1:
        return show_count(values[0], noun)
    return f"{', '.join(shown[:-1])} or {shown[-1]} {noun}s"
