"""What training with these options will be like, before it starts: counts, memory, and warnings.

    print(shardio.explain("packed", batch_size=256, num_workers=8))

How it works. All of it comes from the arithmetic by which reading goes (`cost`). For up to two
million records the order of an epoch is made, and counted; for more, what a worker reads is told as
"about". A warning says what is wrong, what it costs, and the one change that mends it (`advice`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .. import notebook
from ..dataset.reader import Reader, open_reader
from ..errors import OptionError, printable
from ..order.epoch import Tail, default_unit
from ..order.options import Order, RequestedOptions
from ..storage.options import Storage
from ..units import check_group, grouped_in, refuse_options, show_count, show_size
from .advice import WIDTH, Advice, advice_text, advise
from .cost import MemoryUse, TrainingJob, WorkerReads, divisors
from .text import Result, paragraph, show_choices, show_range, show_sizes
from .traffic import Traffic

if TYPE_CHECKING:
    from ..dataset.shard_dataset import ShardDataset

_INDENT: Final = 13
_PREPARED: Final = (
    "Accelerate is imported: leave this DataLoader out of accelerator.prepare(), which would share "
    "out its batches among the ranks a second time"
)


@dataclass(frozen=True, repr=False)
class Explanation(Result):
    """What a job will read and take. A consumer is a worker; without workers, a rank's process."""

    # The dataset, or the subset that is read
    records: int
    shards: int  # that have records
    dataset_bytes: int
    is_network: bool  # it lies on a network file system, or in an object store without a cache
    # The order, and who reads it
    batch_size: int | None
    state: dict[str, Any]  # the options that, with dataset and epoch, a saved state holds
    num_workers: int
    world_size: int
    local_world_size: int  # ranks on a machine
    # Steps
    steps: int  # of each rank; without batch_size, samples
    last_batch_records: int  # fewer than batch_size where the last one is short
    dropped_records: int
    repeated_records: int
    worker: WorkerReads  # what each consumer reads of an epoch
    law_world_sizes: tuple[int, ...]  # that give the same global batches, batch_size adapted
    free_consumers: tuple[int, ...]  # values of num_workers x world_size with no shared span
    # Where the bytes wait, and memory in the worst case
    policy: str  # buffering.Policy.name: "page_cache", "in_memory", "network", "remote"
    traffic: Traffic | None  # of a machine with an object store; None: the dataset is in none
    files_open: int  # at most, in each process
    files_limit: int  # that a process lets itself open
    memory: MemoryUse
    warnings: tuple[Advice, ...]
    notes: tuple[str, ...]
    _rows: tuple[tuple[str, str], ...]  # names, and what is said

    def __str__(self) -> str:
        blocks = (
            paragraph(text, WIDTH, f"{name:<{_INDENT}}", " " * _INDENT) for name, text in self._rows
        )
        return "\n".join([*blocks, "", advice_text(self.warnings)])

    def _repr_html_(self) -> str:
        told = [(one.what, f"-> {one.mend}") for one in self.warnings]
        count = show_count(len(told), "warning") if told else "no warnings"
        return notebook.facts("Training", self._rows) + notebook.facts(count, told)


@refuse_options("explain", grouped_in("order", Order) | grouped_in("storage", Storage))
def explain(
    dataset: ShardDataset | str | os.PathLike[str],
    *,
    num_workers: int = 0,
    world_size: int | None = None,
    local_world_size: int | None = None,
    batch_size: int | None = None,
    shuffle_buffer: int | str | None = None,
    tail: Tail | None = None,
    order: Order | None = None,
    storage: Storage | None = None,
) -> Explanation:
    """Say what training from a dataset will be like: `print(shardio.explain(ds, num_workers=8))`.

    Steps, records repeated or left out, bytes and memory of each worker, and warnings with the
    change that mends each. No record is read.

    dataset           a ShardDataset, of which `where` and `select` may have chosen records; or the
                      path of what `shardio pack` made
    num_workers       of each rank's loader
    world_size        ranks; default: those of a ShardDataset's job, and 1 for a path
    local_world_size  ranks on each machine; default: all, up to 8
    batch_size, shuffle_buffer, tail, order, storage    for a path: as ShardDataset has them. A
                      ShardDataset has its own

    Raises OptionError; for a path also NotPackedError, DamageError, VersionError.
    """
    given: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle_buffer": shuffle_buffer,
        "tail": tail,
    }
    reader, stream = open_dataset("explain", dataset, storage, given | {"order": order})
    asked = RequestedOptions(**given, **vars(check_group("order", order, Order)))
    own: dict[str, Any] = {"shard_records": reader.counts, "selection": reader.remaining}
    if stream is None:
        options = asked.resolve(reader.mean_bytes, records=reader.records)
    else:
        options = stream.options
        own = {
            "shard_records": stream.counts,
            "buffer_bytes": stream.buffer_bytes,
            "batched_reads": stream.batched_reads,
            "selection": stream.selection,
        }
    return explain_job(
        TrainingJob(
            reader.manifest,
            options,
            num_workers=num_workers,
            world_size=ranks_of(stream) if world_size is None else world_size,
            local_world_size=local_world_size,
            is_network=reader.storage.is_network(),
            is_remote=reader.storage.remote,
            has_cache=reader.storage.remote and not reader.storage.is_network(),
            files_limit=reader.limit,
            labels=lambda shard: reader.shard(shard).columns.get("label"),
            **own,
        )
    )


def open_dataset(
    function: str, dataset: object, storage: Storage | None, options: Mapping[str, Any]
) -> tuple[Reader, ShardDataset | None]:
    """Return the reader of a path, or that of a ShardDataset, and the ShardDataset itself.

    The latter's own options are not given anew. Raises OptionError; for a path also
    NotPackedError, DamageError, VersionError.
    """
    if isinstance(dataset, (str, os.PathLike)):
        return open_reader(dataset, None, check_group("storage", storage, Storage)), None
    from ..dataset.shard_dataset import ShardDataset  # it costs torch, which a path does not

    if not isinstance(dataset, ShardDataset):
        found = printable(repr(dataset))
        raise OptionError(
            f"{function}: expected a ShardDataset, or the path of a packed dataset, found {found}; "
            "of a mixture, ask each of its datasets; of a loader, its dataset"
        )
    own = [name for name, value in {**options, "storage": storage}.items() if value is not None]
    if own:
        raise OptionError(
            f"{function}: {', '.join(own)} with a ShardDataset, which has its own: give them to "
            "the dataset, or its path here"
        )
    return dataset.reader, dataset


def ranks_of(stream: ShardDataset | None) -> int:
    """Return the ranks of a ShardDataset's job; 1 for a path."""
    return 1 if stream is None else stream.ranks()[1]


def explain_job(job: TrainingJob) -> Explanation:
    """Explain a job: its numbers, what to change, and the text of both."""
    warnings = advise(job)
    notes = (_PREPARED,) if "accelerate" in sys.modules else ()
    of_job = "records shards dataset_bytes is_network num_workers world_size local_world_size "
    of_job += "free_consumers files_open files_limit memory traffic"
    return Explanation(
        **{name: getattr(job, name) for name in of_job.split()},
        batch_size=job.options.batch_size,
        state=job.options.state(),
        steps=job.partition.steps,
        last_batch_records=job.tail.last,
        dropped_records=job.tail.dropped,
        repeated_records=job.tail.repeated,
        worker=job.reads,
        law_world_sizes=_law_world_sizes(job),
        policy=job.policy.name,
        warnings=warnings,
        notes=notes,
        _rows=(*_rows(job), *(("note", note) for note in notes)),
    )


# --- the rows of the text -------------------------------------------------------------------------


def _rows(job: TrainingJob) -> Iterator[tuple[str, str]]:
    """Iterate over the rows of the text: a name, and what is said."""
    size, epoch, reads = job.options.batch_size, job.epoch, job.reads
    one = "worker" if job.num_workers else "rank" if job.world_size > 1 else "process"
    yield (
        "dataset",
        f"{show_count(job.records, 'record')} in {show_count(job.shards, 'shard')}, "
        f"{show_size(job.dataset_bytes)}, {show_size(job.record_bytes)} each",
    )
    yield "readers", _readers(job)
    yield "steps", _steps(job)
    yield "tail", f"{job.options.tail}: {_tail(job)}"
    yield "order", _order(job)
    yield "buffer", _buffer(job)
    if size is not None and not epoch.shuffles_all:
        why = "a divisor of batch_size" if epoch.unit == default_unit(size) else "as given"
        spans = show_count(min(epoch.spans, size // epoch.unit), "span")
        yield "unit", f"{epoch.unit:,}, {why}; a batch mixes {spans}"
    yield "spans", f"{reads.spans:,} a {one}, {_sharing(job)}"
    if epoch.nodes > 1:
        yield "nodes", _nodes(job)
    about = "" if reads.is_exact else "about "
    yield (
        f"each {one}" if one != "process" else "an epoch",
        f"{about}{show_range(*reads.records)} records, {show_sizes(*reads.bytes)}, from "
        f"{show_range(*reads.shards)} shards",
    )
    yield (
        "files",
        f"{job.files_open:,} open at most, of {job.files_limit:,} that a process may open",
    )
    yield "bytes wait", job.policy.waits
    if job.traffic is not None:
        yield "requests", _requests(job, job.traffic)
    yield "memory", _memory(job)
    yield "state", " ".join(f"{name}={value}" for name, value in job.options.state().items())


def _law_world_sizes(job: TrainingJob) -> tuple[int, ...]:
    """Return the world sizes with the same global batches; none without a batch_size."""
    units = job.partition.batch_units * job.world_size
    return () if job.options.batch_size is None else tuple(divisors(units))


def _readers(job: TrainingJob) -> str:
    """Say how many ranks and workers read."""
    workers = show_count(job.num_workers, "worker") if job.num_workers else "no workers"
    if job.world_size > 1:
        return f"{job.world_size:,} ranks ({job.local_world_size:,} on a machine), {workers} each"
    return workers if job.num_workers else f"one process, {workers}"


def _steps(job: TrainingJob) -> str:
    """Say how many steps a rank and a worker have."""
    size, steps, last = job.options.batch_size, job.partition.steps, job.tail.last
    if size is None:
        text = f"{steps:,} samples a rank"
    else:
        text = f"{steps:,} a rank, batches of {size:,}"
        if steps and last < size:
            text += f", the last of {last:,}"
    return f"{text}; {show_range(*job.reads.steps)} a worker" if job.num_workers else text


def _tail(job: TrainingJob) -> str:
    """Say how many records are left out, or repeated."""
    dropped, repeated = job.tail.dropped, job.tail.repeated
    if job.options.tail == "drop":
        if not dropped:
            return "no record is left out"
        return f"{show_count(dropped, 'record')} left out, others each epoch"
    if not repeated:
        return "each record once an epoch"
    marked = ", marked as not valid" if job.options.tail == "exact" else ""
    return f"each record once an epoch, and {show_count(repeated, 'repeat')}{marked}"


def _order(job: TrainingJob) -> str:
    """Say for which workers and ranks the order is the same."""
    if job.options.batch_size is None:
        return "without batch_size it depends on num_workers; each record comes once"
    total = job.options.batch_size * job.world_size
    ranks = show_choices(_law_world_sizes(job), "rank")
    return (
        f"the same for any num_workers, and for {ranks} where batch_size x ranks is "
        f"{total:,} and unit {job.epoch.unit:,}"
    )


def _buffer(job: TrainingJob) -> str:
    """Say what the shuffle buffer holds, or how all records are read."""
    epoch = job.epoch
    if epoch.shuffles_all:
        return f"all records, a true permutation: {job.policy.reads_all}"
    if (epoch.shuffle_buffer or 0) <= 1:
        return "none: every epoch comes in the order of the index"
    # The longest span, and the shortest of those that have records.
    last = min(epoch.spans, max(1, epoch.units)) - 1
    least, most = epoch.span_records(last) or epoch.span_records(0), epoch.span_records(0)
    spans = show_count(min(epoch.spans, epoch.units), "span")
    return (
        f"{epoch.shuffle_buffer:,} records, {show_size(job.window_bytes)}: {epoch.window:,} in "
        f"each of {spans} of {show_range(least, most)}"
    )


def _sharing(job: TrainingJob) -> str:
    """Say how many workers read the same span, and with how many none do."""
    sharers, free = job.reads.sharers, f"{show_choices(job.free_consumers, 'worker')} in all"
    if sharers <= 1:
        return f"none shared, as with {free}"
    cost = "costs a network file system extra reads"
    if job.is_network and not job.epoch.shuffles_all:
        cost = "more traffic, see below"
    others = show_count(sharers - 1, "other")
    return f"each also read by {others} ({cost}); with {free} none is shared"


def _nodes(job: TrainingJob) -> str:
    """Say what part of the dataset each machine keeps to."""
    nodes = job.epoch.nodes
    part = f"1/{nodes} of the records ({show_size(job.dataset_bytes / nodes)})"
    text = f"{nodes:,} with shards of their own, {part} each, the same in all epochs"
    return f"{text}; a machine reads those of {show_count(job.nodes_read, 'node')}"


def _requests(job: TrainingJob, traffic: Traffic) -> str:
    """Say what a machine asks an object store for, without a cache and with one."""
    alone = f"{show_size(traffic.bytes)} in {show_count(traffic.requests, 'request')}"
    if traffic.held:
        alone += " in the first epoch, then nothing as long as its processes live"
    else:
        alone += " an epoch"
    kept = f"{show_size(traffic.first_bytes)} in {show_count(traffic.first_requests, 'request')}"
    later = "then nothing"
    if traffic.later_bytes:
        later = f"{show_size(traffic.later_bytes)} in the second, and less in each that follows"
    with_cache = f"{kept} in the first epoch, {later}"
    if job.has_cache:
        return f"of a machine: {with_cache} (without the cache: {alone})"
    return f"of a machine: {alone} (with a cache for all of it: {with_cache})"


def _memory(job: TrainingJob) -> str:
    """Say what a process and a machine take of memory, at worst."""
    memory, here = job.memory, job.local_consumers
    parts = {
        "records": memory.records_bytes,
        "order": memory.order_bytes,
        "permutation": memory.permutation_bytes,
        "indexes": memory.index_bytes,
    }
    shown = ", ".join(f"{name} {show_size(size)}" for name, size in parts.items() if size)
    text = f"at worst {show_size(memory.process_bytes)} a process: {shown}"
    if here > 1 or memory.page_cache_bytes:
        text += f"; {show_size(memory.process_bytes * here)} a machine"
    if memory.page_cache_bytes:
        text += f", and {show_size(memory.page_cache_bytes)} of cache"
    return text
