"""What to change about a job: each rule looks at one thing, and says what is wrong with it.

An Advice says what is wrong, what it costs, and the one change that mends it. Rules are asked in
order, the worst first. No record is read, but labels of a few shards may be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ..dataset.buffering import (
    CACHED_PART,
    HEAP_FACTOR,
    RUN,
    NetworkBlocks,
    Ranges,
    requests_of_spans,
)
from ..dataset.reader import OPEN_SHARDS
from ..formats import GROUPED
from ..formats.foreign.row_groups import cache_bytes
from ..order.epoch import Epoch
from ..order.options import SHUFFLE_BUFFER, order_text
from ..order.partition import unshared_spans
from ..order.shuffle import SpanOrder
from ..units import show_count, show_size
from .cost import ORDER_BYTES, TrainingJob, divisors
from .simulate import batch_mixture, lie_in_runs
from .text import Plain, paragraph

WIDTH: Final = 80  # columns of the text
_LARGE_INDEX: Final = 1 << 30  # bytes of indexes in one process that are worth a word anywhere
_TOLERATED: Final = 0.01  # of a uniform batch's mixture: less does not matter; as tune.TOLERATED
_SAMPLED_BATCHES: Final = 64  # batches that a mixture is judged by
_DRAW_US: Final = 0.03  # to make one draw of a span's order
_GROUPED: Final = {  # options that are given in an object
    "buffer_bytes": "storage=shardio.Storage(buffer_bytes={})"
}
_SMALL_SHARD, _SMALL_SHARDS = 4, 32  # this part of the usual size; of so many it is said
_REPACK: Final = "pack again with a {} --shard-size"


@dataclass(frozen=True)
class Advice(Plain):
    """Something to change."""

    code: str  # stable, for programs: "no_batch_size"
    what: str  # what is wrong, and what it costs
    mend: str  # the one change that mends it
    # The same as options, also those that are given in an Order or a Storage; {}: it is none.
    change: dict[str, Any] = field(default_factory=dict)


def advise(job: TrainingJob) -> tuple[Advice, ...]:
    """Return all advice on a job, the worst first."""
    if not job.records:
        look = "look at what was packed: `shardio info`"
        return (Advice("no_records", "there are no records", look),)
    rules = (_counts, _class_order, _order, _nodes, _network, _memory, _files, _small, _row_groups)
    return tuple(advice for rule in rules for advice in rule(job))


def advice_text(warnings: Sequence[Advice]) -> str:
    """Number the advice, each with its change on a line of its own."""
    if not warnings:
        return "no warnings"
    lines = [show_count(len(warnings), "warning")]
    for number, advice in enumerate(warnings, 1):
        start = f"{number}. "
        blank = " " * len(start)
        lines.append(paragraph(advice.what, WIDTH, start, blank))
        lines.append(paragraph(advice.mend, WIDTH, f"{blank}-> ", f"{blank}   "))
    return "\n".join(lines)


def _advise_option(code: str, what: str, more: str = "", **change: int | str) -> Advice:
    """Advise to set one option. more: what to say after it."""
    [(name, value)] = change.items()
    shown = f'"{value}"' if isinstance(value, str) else value
    mend = _GROUPED.get(name, f"{name}={{}}").format(shown)
    return Advice(code, what, mend + more, change)


def _advise_order(code: str, what: str, job: TrainingJob, **change: int) -> Advice:
    """Advise to set one option of the order."""
    more = "" if "unit" in change else ", in new runs (it is part of the order)"
    return Advice(code, what, order_text(job.partition, **change) + more, change)


# --- the rules ------------------------------------------------------------------------------------


def _counts(job: TrainingJob) -> Iterator[Advice]:
    """Look at the numbers of records, workers and steps."""
    records, workers, ranks = job.records, job.num_workers, job.world_size
    size, steps = job.partition.batch_size, job.partition.steps
    is_short = records < max(job.consumers, (size or 1) * ranks)
    if is_short:
        if job.options.tail == "drop" and not steps:
            cost = "tail='drop' leaves all of them out"
        elif job.tail.repeated:
            cost = f"in the only step {job.tail.repeated:,} rows are repeats"
        else:
            cost = "some workers get none" if size is None else "the only batch is a short one"
        what = f"{records:,} records are fewer than the {job.consumers:,} workers that are to read "
        what += f"them: {cost}"
        if records >= job.consumers:
            what = f"{records:,} records are fewer than batch_size x world_size, {size or 1:,} x "
            what += f"{ranks:,}: {cost}"
            yield _advise_option("few_records", what, batch_size=records // job.consumers)
        elif workers > 1 and records >= ranks:
            yield _advise_option("few_records", what, num_workers=records // ranks)
        else:
            fewer = max(1, records // max(1, workers))
            change = {"world_size": fewer}
            yield Advice("few_records", what, f"a world size of {fewer:,}", change)
    if size is None:
        size = 1 << min(256, max(1, records // job.consumers)).bit_length() - 1
        yield Advice(
            "no_batch_size",
            "without batch_size the batches depend on num_workers, and each worker may end with a "
            "short one",
            f"ShardDataset(..., batch_size={size}) with DataLoader(..., batch_size=None)",
            {"batch_size": size},
        )
    elif steps < workers and not is_short:
        what = f"each rank has {steps:,} steps for {workers:,} workers: some get no batch"
        yield _advise_option("idle_workers", what, num_workers=steps)


def _class_order(job: TrainingJob) -> Iterator[Advice]:
    """Look at the classes of a batch."""
    epoch, manifest, batch_size = job.epoch, job.manifest, job.partition.batch_size
    classes, size = len(manifest.classes or ()), min(batch_size or 256, job.records)
    if epoch.shuffles_all or job.options.tail == "exact" or classes < 2:
        return  # mixed, or evaluation, which wants no mixture
    if not _in_class_order(job):
        return
    seen, alike, looked = sample_mixture(epoch, classes, size)
    uniform = classes * (1 - (1 - 1 / classes) ** size)
    chance = looked * math.comb(size, 2) / classes  # pairs of one class; noise: their square root
    if seen < (1 - _TOLERATED) * uniform:
        has = f"has about {round(seen, 1):g} classes, a uniform one {round(uniform, 1):g}"
    elif abs(chance - alike) > max(_TOLERATED * chance, 4 * math.sqrt(chance)):
        has = f"has its classes in too {'un' if alike > chance else ''}equal parts"
    else:
        return
    rows = "batch" if batch_size else f"run of {size:,} samples"
    buffer = f"the buffer of {epoch.shuffle_buffer:,} records does not mix it"
    mend, evaluating = "pack again without --no-shuffle", ""
    if manifest.options.get("source") == "writer":
        mend = "write the samples in a shuffled order"
    if epoch.window <= 1:
        buffer, evaluating = "is read in that order", "; for evaluation, shuffle=False"
    change = {} if job.is_network or epoch.nodes > 1 else {"shuffle_buffer": "all"}
    mend += ', or shuffle_buffer="all"' if change else ""
    what = f"the dataset was packed in class order, and {buffer}: a {rows} {has}"
    yield Advice("class_order", what, mend + evaluating, change)


def sample_mixture(epoch: Epoch, classes: int, size: int) -> tuple[float, int, int]:
    """Return the mean of distinct classes in some batches, all their pairs of one class, and how
    many batches these are.

    As if each class were the same share of the dataset.
    """
    starts = np.cumsum(epoch.shard_records) - epoch.shard_records
    spans: dict[int, SpanOrder] = {}
    window, pieces = epoch.window, -(-size // epoch.unit)
    draws = pieces * ((1 << 14) + window * window.bit_length())  # of a batch's seeks: 0.03 us each
    batches = max(1, min(_SAMPLED_BATCHES, epoch.records // size, (1 << 25) // draws))
    found = []
    for batch in range(batches):
        first = (epoch.records - size) * (batch + 1) // (batches + 1)
        first -= first % epoch.unit
        for span, draw, count in epoch.pieces(first, first + size):
            if span not in spans:
                spans[span] = epoch.span_order(span)
            spans[span].seek(draw)
            found.append(epoch.position(span, spans[span].take(count)))
    shards, records = epoch.locate(np.concatenate(found))
    seen = (starts[shards] + records) * classes // epoch.records
    distinct, alike = batch_mixture(seen.reshape(batches, size)).sum(axis=0).tolist()
    return distinct / batches, round(alike * math.comb(size, 2)), batches


def _in_class_order(job: TrainingJob) -> bool:
    """Return True if a pack is in class order, by its options, else by labels of three shards."""
    manifest, labels = job.manifest, job.labels
    shuffled = manifest.options.get("shuffle")
    # Of a subset it is not known which classes it has, nor how they lie.
    is_whole = np.array_equal(job.epoch.shard_records, manifest.shard_records)
    if not job.options.shuffle or shuffled or not is_whole:
        return False
    if labels is None:
        return shuffled is False
    chosen = np.flatnonzero(manifest.shard_records > 1)
    if not len(chosen):
        return False
    places = sorted({0, len(chosen) // 2, len(chosen) - 1})
    columns = [labels(int(chosen[place])) for place in places]
    parts = [np.ma.filled(column, -1) for column in columns if column is not None]
    if len(parts) < len(columns):
        return False
    _, counts = np.unique(np.concatenate(parts), return_counts=True)
    return lie_in_runs(parts, float(((counts / counts.sum()) ** 2).sum()))


def _order(job: TrainingJob) -> Iterator[Advice]:
    """Look at spans and windows."""
    epoch, spans, unit = job.epoch, job.epoch.spans, job.epoch.unit
    told = job.is_network and not epoch.shuffles_all  # by _network
    if spans < job.consumers and epoch.shuffle_buffer != 1 and not told:
        sharers = job.reads.sharers
        what = f"{job.consumers:,} workers read from {spans:,} spans: up to {sharers:,} make the "
        what += f"order of the same one, some {max(1, sharers * _DRAW_US):,.0f} us a record"
        yield _advise_order("few_spans", what, job, spans=_spans(job, job.consumers))
    if epoch.shuffles_all or (epoch.shuffle_buffer or 0) <= 1:
        return
    span = max(1, epoch.units // spans) * unit  # the records of most spans, or a unit more
    may_be_all = job.may_be_random and epoch.nodes == 1
    buffer: int | str
    if epoch.window > span:
        buffer = "all" if may_be_all else span * spans
        what = f"the window of {epoch.window:,} records is larger than a span of {span:,}, which "
        yield _advise_option("window_over_span", f"{what}no record leaves", shuffle_buffer=buffer)
    elif epoch.window < unit:
        what = (
            f"each span has a window of {show_count(epoch.window, 'record')}, less than the unit "
            f"of {unit:,} that a batch takes from it: the same neighbours meet in every epoch"
        )
        buffer, room = 4 * unit * spans, CACHED_PART * job.available_bytes
        if isinstance(job.policy, NetworkBlocks):
            room = min(room, job.policy.budget * job.local_consumers / 2)
        fits = buffer * job.record_bytes <= room
        if buffer >= epoch.records:
            buffer, fits = "all", may_be_all
        if fits:
            more = "; `shardio tune` finds the smallest that will do"
            yield _advise_option("window_under_unit", what, more, shuffle_buffer=buffer)
        else:
            usable = [d for d in divisors(job.partition.batch_size or 1) if d <= epoch.window]
            yield _advise_order("window_under_unit", what, job, unit=usable[-1])


def _spans(job: TrainingJob, least: int) -> int:
    """Return the least number of spans from `least` on that suits the nodes."""
    period = job.epoch.nodes * job.epoch.node_spans
    return -(-least // period) * period


def _nodes(job: TrainingJob) -> Iterator[Advice]:
    """Look at nodes that are to keep to shards of their own."""
    nodes, machines = job.epoch.nodes, -(-job.world_size // job.local_world_size)
    read = job.nodes_read
    if nodes == 1 or read <= -(-nodes // machines):
        return
    units = job.epoch.node_spans
    what = f"each machine reads the shards of {read:,} of {nodes:,} nodes, instead of its own: "
    if job.partition.batch_units != units:
        what += (
            f"the order is of batches of {units:,} units, these have {job.partition.batch_units:,}"
        )
        yield _advise_option("nodes_mixed", what, batch_size=units * job.epoch.unit)
    else:
        what += f"the {job.world_size:,} ranks of {machines:,} machines do not divide so"
        yield _advise_order("nodes_mixed", what, job, nodes=machines)


def _network(job: TrainingJob) -> Iterator[Advice]:
    """Look at what crosses the network."""
    epoch, sharers, consumers = job.epoch, job.reads.sharers, job.consumers
    if not job.is_network:
        return
    if epoch.shuffles_all and not job.may_be_random:
        what = "a buffer of all records reads them at random, one request each, over the network"
        yield _advise_option(
            "all_on_network", what, shuffle_buffer=min(SHUFFLE_BUFFER, job.records // 2)
        )
    elif sharers > 1 and not epoch.shuffles_all and epoch.shuffle_buffer != 1:
        cost, spans = "twice the bytes cross the network", unshared_spans(job.partition)
        requests = requests_of_spans(epoch, spans, job.record_bytes)
        if not isinstance(job.policy, NetworkBlocks):
            cost = f"records are read one by one, {job.records:,} requests an epoch"
        what = f"{sharers:,} workers read from the same span: {cost}"
        if job.is_remote:
            what += f", instead of about {requests:,} for ranges of 8 MiB; a cache directory "
            what += "(docs/remote.md) makes such ranges of them, too"
        if not job.is_remote or requests < job.records:
            yield _advise_order("shared_spans", what, job, spans=spans)
    elif job.policy.budget:
        yield from _left_out(job)
    if job.shards < consumers:
        what = f"{consumers:,} workers read from {job.shards:,} shards, so that several wait for "
        yield Advice("few_shards", f"{what}the same file", _REPACK.format("smaller"))


def _left_out(job: TrainingJob) -> Iterator[Advice]:
    """Look at windows that do not fit what may be held."""
    window, spans = job.epoch.window * job.record_bytes, job.partition.spans_read
    here, budget = job.local_consumers, job.policy.budget
    if spans * (window + job.policy.run) <= budget:
        return
    what = (
        f"the windows take {show_size(here * spans * window)} on a machine, more than the "
        f"{show_size(budget * here)} of buffer_bytes can hold: what is left out is read one by one"
    )
    needed = math.ceil(here * spans * (window + RUN) / (1 << 20))
    least = int(budget / 2 / spans / job.record_bytes)  # half is for blocks
    if needed << 20 <= job.available_bytes / 2:
        yield _advise_option("windows_left_out", what, buffer_bytes=f"{needed}MiB")
    elif least:
        yield _advise_option("windows_left_out", what, shuffle_buffer=least * job.epoch.spans)
    else:
        mend = f'storage=shardio.Storage(buffer_bytes="{needed}MiB"), on machines with more memory'
        yield Advice("windows_left_out", what, mend)


def _memory(job: TrainingJob) -> Iterator[Advice]:
    """Look at what takes more memory than there is."""
    epoch, here, available = job.epoch, job.local_consumers, job.available_bytes
    state = job.partition.spans_read * epoch.window * ORDER_BYTES + job.memory.permutation_bytes
    cached = not job.policy.budget and not epoch.shuffles_all
    window = min(job.window_bytes, job.dataset_bytes) if cached else 0
    held = 0  # windows of an object store, which nothing limits but memory
    if isinstance(job.policy, Ranges):
        windows = here * job.partition.spans_read * epoch.window * job.record_bytes
        held = int(HEAP_FACTOR * min(windows, job.dataset_bytes))
    what = ""
    if state * here > available / 2:
        what = (
            f"the order of the shuffle buffer alone takes {show_size(state * here)} in the "
            f"processes of a machine that has {show_size(available)} to give"
        )
    elif window > available:
        what = (
            f"the shuffle buffer is {show_size(window)}, more than the {show_size(available)} of "
            "memory that this machine has to give: records are read one by one, not in runs"
        )
    elif held > available / 2:
        what = (
            f"the windows take {show_size(held)} in the processes of a machine that has "
            f"{show_size(available)} to give: the system may kill these processes"
        )
    buffer = int(CACHED_PART * available / (job.record_bytes + here * ORDER_BYTES))
    if epoch.shuffles_all:
        buffer = min(SHUFFLE_BUFFER, buffer)
    if what and buffer >= epoch.spans:  # a window is one record at least
        yield _advise_option("buffer_memory", what, shuffle_buffer=buffer)
    index = job.memory.index_bytes
    if index > _LARGE_INDEX or index * here > available / 4:
        what = (
            f"the indexes of {job.files_open:,} open shards take {show_size(index)} in each "
            f"process, {show_size(index * here)} on a machine"
        )
        yield Advice("index_memory", what, _REPACK.format("smaller"))


def _small(job: TrainingJob) -> Iterator[Advice]:
    """Look at shards that many small appends left."""
    manifest = job.manifest
    usual = manifest.options.get("shard_size")
    if manifest.commit is None or not isinstance(usual, int):
        return
    small = int((manifest.shard_sizes * _SMALL_SHARD < usual).sum())
    if small >= _SMALL_SHARDS and 2 * small > manifest.shards:
        what = f"{small:,} of {manifest.shards:,} shards are smaller than a quarter of "
        what += f"{show_size(usual)}, since records were appended in small parts: each is a file "
        what += "to open, or a request"
        mend = "merge these by `shardio compact`, and append less often"
        yield Advice("small_shards", what, mend)


def _files(job: TrainingJob) -> Iterator[Advice]:
    """Look at shards that are opened again and again."""
    needed, limit = job.files_needed, job.files_limit
    spans, touched = job.epoch.spans, job.partition.spans_read
    if needed <= limit:
        return
    code = "files_reopened"
    what = (
        f"the windows of a process reach into {needed:,} shards, but it keeps {limit:,} open: many "
        "reads open a shard again, and read its index"
    )
    if limit < min(OPEN_SHARDS, needed):
        mend = f"`ulimit -n {4 * min(OPEN_SHARDS, needed)}`, before the job starts"
        yield Advice(code, what, mend)
    elif job.epoch.shuffles_all:
        yield Advice(code, what, _REPACK.format("larger"))
    elif limit < 2 * touched:
        fewer = _spans(job, max(1, spans * limit // (2 * touched)))
        yield _advise_order(code, what, job, spans=fewer)
    else:  # as TrainingJob.files_needed says it, for as many as there may be
        buffer = int(spans * (limit / touched - 1) * job.records / job.shards / 2)
        yield _advise_option(code, what, shuffle_buffer=max(1, buffer // spans) * spans)


def _row_groups(job: TrainingJob) -> Iterator[Advice]:
    """Look at row groups: more are needed at once than are kept decoded."""
    group = job.manifest.options.get("row_group")
    if job.manifest.format not in GROUPED or type(group) is not dict:
        return
    rows, size = max(1, group["rows"]), group["bytes"]
    epoch, touched = job.epoch, job.partition.spans_read
    # Records that are held are read in order; others are when they are handed out: files_needed.
    held = job.policy.budget > 0
    groups = job.records / rows
    if not epoch.shuffles_all:
        groups = min(groups, touched * (1 if held else 1 + 2 * epoch.window / rows))
    limit = cache_bytes(job.available_bytes)
    if groups * size <= limit:
        return
    arrow = job.manifest.format == "arrow"
    called = ("record batch", "record batches") if arrow else ("row group", "row groups")
    what = (
        f"a process reads from about {show_count(math.ceil(groups), *called)} at once, "
        f"{show_size(groups * size)} decoded, and keeps {show_size(limit)} of them: the same ones "
        "are decoded again and again"
    )
    mend, change = "pack it: `shardio pack DIR OUT`", {}
    window = 0 if held else int((limit / size / touched - 1) * rows / 2)
    if window >= epoch.unit:
        change = {"shuffle_buffer": window * epoch.spans}
        mend += f", or shuffle_buffer={change['shuffle_buffer']}"
    yield Advice("row_groups", what, mend, change)
