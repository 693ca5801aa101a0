"""How large a shuffle buffer? The order is simulated for a ladder of them, and the least is named.

How it works. The order is arithmetic, so what a buffer does is known without reading an image: the
batches of an epoch are drawn by order.Epoch itself, for each buffer and each unit, and compared
with those of a true uniform shuffle of the same labels. A (buffer, unit) is good enough when

    mixes     the mean of the distinct classes in a batch lies inside the 2.5-97.5 % band of that
              mean over 200 uniform shuffles. Without labels the tenth of the packing order that a
              record lies in stands for its class. Where nearly every batch of a uniform shuffle
              has as many classes as it can, the band has no width, and a pack in class order could
              pass by having each class in equal parts: there the pairs of one class are compared
              as well, and for both a difference of TOLERATED does not matter.
    renews    of the pairs of records in a batch, fewer than 5 % beyond chance shared a batch in the
              epoch before.

A buffer of all records is a uniform shuffle by definition, so it passes whatever its noise.
Of those the one with the least memory is recommended, and of equal ones the one with the largest
unit, which reads the longest runs. The batches of an order are the same for any number of workers
and ranks: these only decide what a rank holds, and what is read before the first batch.

Up to WHOLE records whole epochs are simulated, and LOOKED records of them are looked at; beyond it,
REGIONS stretches of the epoch are reached by seeking, and buffers above MOST are left out.
"""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import order, sequence, sizes
from .errors import OptionError, printable
from .fetch import keep
from .options import CANONICAL_WORKERS, SHUFFLE_BUFFER
from .order import Epoch, Int64s, Share, SpanOrder
from .storage import locate

UNIFORM: Final = 200  # uniform shuffles that the band is made of
BAND: Final = (2.5, 97.5)  # percentiles
AGAIN: Final = 0.05  # of a batch's pairs, beyond chance
# Of a mixture where the band has no width. Ten classes: 0.1 % is noise of the seed; the least that
# 64 spans of a pack in class order are off is 2.7 %.
TOLERATED: Final = 0.01

# 1,024 batches of 256: with 1,000 classes the band is then 0.25 % wide, and 200 shuffles take 1 s.
LOOKED: Final = 1 << 18
PASSES: Final = 4  # pairs of epochs of a small data set: one of few shards differs between epochs
SATURATED: Final = 0.99  # of the classes that a batch can have, in a uniform one
WHOLE: Final = 1 << 21
REGIONS: Final = 4
LARGE: Final = 1 << 30  # bytes that a page cache may not keep, so that reads are random
MOST: Final = 500_000  # records in a buffer beyond WHOLE: 2 s for each (buffer, unit)

Classes = NDArray[Any]  # (N,) integers
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Row:
    """What one (buffer, unit) does."""

    shuffle_buffer: int | None  # records; None: "all"
    unit: int
    window: int  # records that wait in the windows of the whole job, at most
    memory_bytes: int  # of these records: what one machine holds at most
    rank_bytes: int  # of those that one rank touches
    first_batch_bytes: int  # that a worker reads before its first batch, about
    classes: float  # distinct ones in a batch, mean
    even: float  # as many equally frequent classes have as many pairs of one class in a batch
    again: float  # share of a batch's pairs that shared a batch in the epoch before
    moved: float  # records between a record's place and its place without a buffer, mean
    mixes: bool
    renews: bool

    @property
    def good(self) -> bool:
        return self.mixes and self.renews


@dataclass(frozen=True)
class Tuning:
    """The result: what was simulated, what a uniform shuffle does, and what is recommended."""

    records: int
    shards: int
    mean_bytes: float
    batch_size: int
    num_workers: int
    world_size: int
    canonical_workers: int
    seed: int
    memory: int | None  # bytes; what needs more was left out
    labels: str  # "label", or "position": the tenth of the packing order
    distinct: int  # classes in all
    batches: int  # looked at for each (buffer, unit), in all epochs
    epochs: int  # that they are of
    whole_epochs: bool  # simulated; False: REGIONS stretches of them
    uniform: float  # distinct classes in a batch, mean over UNIFORM shuffles
    band: tuple[float, float]  # of that mean: what is good enough
    saturated: bool  # nearly every uniform batch has all it can have: `even` is judged, too
    even: float  # of uniform shuffles, as in Row
    even_band: tuple[float, float]  # what is good enough
    chance: float  # that two records of a batch have shared one before, when uniform
    notes: tuple[str, ...]
    rows: tuple[Row, ...]  # least memory first, then the largest unit
    best: Row | None  # the first one that is good
    beyond: Row | None  # where none is: the first good one that needs more than `memory`
    default: Row | None  # the options that nobody gave; None: nothing to tune
    call: str  # the constructor call to use; of a subset, the options to change

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        one = {name: _plain(getattr(self, name)) for name in ("best", "beyond", "default")}
        return asdict(self) | one | {"rows": [_plain(row) for row in self.rows]}

    @property
    def least_bad(self) -> Row | None:
        """The one nearest to good; `best` where there is one."""
        return self.best or min(self.rows, key=self._badness, default=None)

    def _badness(self, row: Row) -> float:
        return self._off(row) + max(0.0, row.again - self.chance - AGAIN)

    def _off(self, row: Row) -> float:
        """How far the mixture is from its bands, relative to a uniform shuffle."""
        off = _outside(row.classes, self.band) / self.uniform
        return off + (_outside(row.even, self.even_band) / self.even if self.saturated else 0.0)

    def ladder(self) -> list[Row]:
        """One row for each buffer: the best unit for it."""
        by_buffer = groupby(self.rows, key=lambda row: row.shuffle_buffer)
        return [
            min(rows, key=lambda row: (not row.good, self._badness(row))) for _, rows in by_buffer
        ]

    def verdict(self, row: Row) -> str:
        """In a few words; text() explains them."""
        failed = []
        if not row.mixes:
            less = row.classes < self.band[0] or (self.saturated and row.even < self.even_band[0])
            failed.append("too few classes" if less else "too even")
        return ", ".join(failed + ["pairs stay"] * (not row.renews)) or "good enough"

    @cached_property
    def decimals(self) -> int:
        """With so many it shows which values lie in their band."""
        judged = [(row.classes, self.band) for row in self.rows]
        judged += [(row.even, self.even_band) for row in self.rows if self.saturated]
        for digits in range(2, 6):
            if all(
                bool(_outside(value, band))
                == bool(
                    _outside(round(value, digits), (round(band[0], digits), round(band[1], digits)))
                )
                for value, band in judged
            ):
                return digits
        return 6

    def __repr__(self) -> str:
        return self.text()  # as a notebook shows it

    def text(self) -> str:
        """For a terminal of 100 columns; the last line is the call."""
        blocks = [self._head()]
        marked = self.least_bad
        if marked is not None:
            ladder = self.ladder()
            if len(ladder) > 1:
                blocks.append(self._table(ladder, "Each buffer, with the unit that suits it:"))
            same = [row for row in self.rows if row.shuffle_buffer == marked.shuffle_buffer]
            if len(same) > 1 or len(ladder) == 1:
                title = f"A buffer of {show_buffer(marked.shuffle_buffer)} records, with each unit:"
                blocks.append(self._table(same, title))
            blocks.append(_LEGEND.replace(_EVEN, _EVEN if self.saturated else ""))
        notes = [textwrap.fill(note, 100, break_on_hyphens=False) for note in self.notes]
        blocks.append("\n".join([*notes, self.call]))
        return "\n\n".join(blocks)

    def _head(self) -> str:
        readers = (
            sizes.show_count(self.num_workers, "worker") if self.num_workers else "one process"
        )
        if self.world_size > 1:
            readers = f"{self.world_size:,} ranks of {readers}"
        lines = [
            f"{sizes.show_count(self.records, 'record')} of {sizes.show_size(self.mean_bytes)} in "
            f"{sizes.show_count(self.shards, 'shard')}; batches of {self.batch_size:,}; {readers}; "
            f"{sizes.show_count(self.canonical_workers, 'span')}"
        ]
        if self.rows:
            what = f"{self.distinct:,} classes"
            if self.labels == "position":
                what = f"tenths of the pack for want of classes: {self.distinct}"
            stretches = "" if self.whole_epochs else f", in {REGIONS} stretches of each"
            digits = self.decimals
            uniform, good = (
                f"classes {self.uniform:,.{digits}f}",
                f"classes {self._show(self.band)}",
            )
            if self.saturated:
                uniform += f", even {self.even:,.{digits}f}"
                good += f", even {self._show(self.even_band)}"
            lines += [
                f"Looked at: {sizes.show_count(self.batches, 'batch', 'batches')} of "
                f"{sizes.show_count(self.epochs, 'epoch')}{stretches}; {what}",
                f"A uniform shuffle: {uniform}, again {self.chance:.2%}",
                f"Good enough: {good}, again below {self.chance + AGAIN:.2%}",
            ]
        return "\n".join(lines)

    def _show(self, band: tuple[float, float]) -> str:
        return " to ".join(f"{edge:,.{self.decimals}f}" for edge in band)

    def _table(self, rows: Sequence[Row], title: str) -> str:
        names = f"{'waiting':>9}  {'1st batch':>9}  {'moves':>6}  {'classes':>7}"
        even = f" {'even':>6}" if self.saturated else ""
        lines = [title, f"{'buffer':>7}  {'unit':>4}  {names}{even}  {'again':>6}"]
        for row in rows:
            arrow = " <--" if row is self.least_bad else ""
            need, first = map(sizes.show_size, (row.memory_bytes, row.first_batch_bytes))
            even = f" {row.even:>6,.{self.decimals}f}" if self.saturated else ""
            lines.append(
                f"{show_buffer(row.shuffle_buffer):>7}  {row.unit:>4}  {need:>9}  {first:>9}  "
                f"{row.moved:>6,.0f}  {row.classes:>7,.{self.decimals}f}{even}  "
                f"{row.again:>6.2%}  {self.verdict(row)}{arrow}"
            )
        return "\n".join(lines)


# A terminal has no tooltips.
_EVEN: Final = """\
even       so many equally frequent classes would have as many pairs of one class in a batch
"""
_LEGEND: Final = f"""\
waiting    size of the records in the buffer, which `--memory` limits; `shardio explain` says where
           they wait, and what else a process takes
1st batch  what a worker reads before it: small records in blocks of each span, but record by record
           where more than two workers share a span
moves      places in the epoch by which the buffer moves a record, mean
classes    distinct ones in a batch, mean
{_EVEN}again      pairs of a batch that shared one in the epoch before"""


def tune_path(
    path: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    batch_size: int,
    num_workers: int = 0,
    world_size: int = 1,
    memory: int | str | None = None,
    progress: Progress | None = None,
) -> Tuning:
    """`tune` for a packed directory, with the labels of its index columns.

    root: where the data lies, when `shardio index --out` put its index elsewhere.
    Raises OptionError, NotPackedError, DamageError, VersionError.
    """
    found = sequence.open(path, decode=None, root=root)
    return tune(
        found.manifest.shard_records,
        labels_of(found),
        batch_size=batch_size,
        num_workers=num_workers,
        world_size=world_size,
        mean_bytes=found.manifest.mean_bytes,
        is_network=locate(path if root is None else root).is_network(),
        memory=memory,
        progress=progress,
        path=os.fspath(path),
        root=None if root is None else os.fspath(root),
    )


def labels_of(found: sequence.ShardSequence) -> Classes | None:
    """The labels of every record; None where the dataset has none."""
    kinds = dict(found.manifest.schema.fields)
    return found.columns("label") if kinds.get("label") in ("int", "bool") else None


def tune(
    shard_records: ArrayLike,
    labels: Classes | None,
    *,
    batch_size: int,
    num_workers: int = 0,
    world_size: int = 1,
    mean_bytes: float,
    is_network: bool = False,
    memory: int | str | None = None,
    seed: int = 0,
    canonical_workers: int = CANONICAL_WORKERS,
    progress: Progress | None = None,
    path: str | None = "out/",
    root: str | None = None,
) -> Tuning:
    """Simulate, judge, recommend.

    shard_records  (shards,) records of each shard, in the manifest's order
    labels         (N,) integers in the same order (masked: a class of its own), or None
    mean_bytes     of a record
    is_network     the dataset lies on a network file system
    memory         bytes, or "2GiB": buffers that need more are left out
    progress       called with (done, total)
    path           of the dataset, for the call; None: the call is only what to change
    root           where its data lies, if elsewhere, for the call

    Raises OptionError.
    """
    counts = np.asarray(shard_records, np.int64)
    records = int(counts.sum())
    batch_size = sizes.whole("batch_size", batch_size)
    num_workers = sizes.whole("num_workers", num_workers, 0)
    world_size = sizes.whole("world_size", world_size)
    canonical_workers = sizes.whole("canonical_workers", canonical_workers)
    limit = None if memory is None else sizes.size("memory", memory)
    if labels is not None and len(labels) != records:
        raise OptionError(f"labels: {len(labels):,} for {records:,} records; expected one for each")

    classes = None if labels is None else _compact(labels)
    kind = "label"
    if classes is None or not records or classes.min() == classes.max():
        classes, kind = _tenths(records), "position"
    sample = _Sample.of(records, batch_size)
    choices = _choices(records, batch_size, canonical_workers) if sample.batches else []
    tell = progress or (lambda done, total: None)
    tell(0, len(choices) + 1)
    means = _uniform(classes, batch_size, sample) if choices else np.ones((1, 2))
    uniform, alike = means.mean(axis=0).tolist()
    low, high = np.percentile(means, BAND, axis=0)
    band, even, even_band = (float(low[0]), float(high[0])), _even(alike), (0.0, math.inf)
    distinct = len(np.unique(classes))
    most = min(distinct, batch_size)
    saturated = False
    if uniform > SATURATED * most:
        band = _widened(band, uniform)
        band = band[0], min(band[1], float(most))
        # A shuffled pack without labels deals its tenths too evenly, which harms nobody.
        saturated = kind == "label" and alike > 0
        even_band = _widened((_even(high[1]), _even(low[1])), even)
    chance = _chance(records, batch_size)
    simulate = _Simulation(counts, classes, seed, canonical_workers, batch_size, sample)

    def judge(buffer: int | None, unit: int) -> Row:
        classes, alike, again, moved = simulate(buffer, unit)
        epoch = simulate.epoch(buffer, unit, 0)
        window = _window(records, buffer, canonical_workers)
        reader = Share(epoch, batch_size, world_size=world_size, num_workers=max(1, num_workers))
        touched = Share(epoch, batch_size, world_size=world_size).touched
        rank = window if buffer is None else min(window, touched * epoch.window)
        evenly = not saturated or not _outside(_even(alike), even_band)
        return Row(
            shuffle_buffer=buffer,
            unit=unit,
            window=window,
            memory_bytes=math.ceil(window * mean_bytes),
            rank_bytes=math.ceil(rank * mean_bytes),
            first_batch_bytes=_first_batch(reader, mean_bytes, is_network),
            classes=classes,
            even=_even(alike),
            again=again,
            moved=moved,
            mixes=buffer is None or (evenly and not _outside(classes, band)),
            renews=buffer is None or again - chance < AGAIN,
        )

    rows: list[Row] = []
    good: Row | None = None  # the first one
    left_out: list[int | None] = []
    for done, (buffer, unit) in enumerate(choices, 1):
        need = math.ceil(_window(records, buffer, canonical_workers) * mean_bytes)
        fits = limit is None or need <= limit
        if not fits and not rows:
            raise OptionError(
                f"memory is {sizes.show_size(limit or 0)}, but the least buffer that was to be "
                f"tried, {show_buffer(buffer)} records, needs {sizes.show_size(need)}; give more "
                "memory, or a smaller batch_size"
            )
        if not fits and buffer not in left_out:
            left_out.append(buffer)
        if fits or good is None:  # beyond the limit: the first that would do
            tell(done, len(choices) + 1)
            row = judge(buffer, unit)
            good = row if good is None and row.good else good
            rows += [row] * fits
    default = None
    if rows:
        usual = (
            None if records <= SHUFFLE_BUFFER else SHUFFLE_BUFFER,
            order.default_unit(batch_size),
        )
        simulated = (row for row in rows if (row.shuffle_buffer, row.unit) == usual)
        default = next(simulated, None) or judge(*usual)
    tell(len(choices) + 1, len(choices) + 1)
    fits = good in rows
    tuning = Tuning(
        records=records,
        shards=len(counts),
        mean_bytes=float(mean_bytes),
        batch_size=batch_size,
        num_workers=num_workers,
        world_size=world_size,
        canonical_workers=canonical_workers,
        seed=seed,
        memory=limit,
        labels=kind,
        distinct=distinct,
        batches=sample.batches * sample.passes,
        epochs=sample.passes if sample.batches else 0,
        whole_epochs=sample.whole,
        uniform=uniform,
        band=band,
        saturated=saturated,
        even=even,
        even_band=even_band,
        chance=chance,
        notes=(),
        rows=tuple(rows),
        best=good if fits else None,
        beyond=None if fits else good,
        default=default,
        call="",
    )
    return _conclude(tuning, left_out, path, root)


# --- the ladder -----------------------------------------------------------------------------------


def _choices(records: int, batch_size: int, spans: int) -> list[tuple[int | None, int]]:
    """Each (buffer, unit) to try, None for "all": least memory first, then the largest unit."""
    least = max(batch_size, spans)
    most = records if records <= WHOLE else MOST
    steps = (f * 10**power for power in range(19) for f in (1, 2, 5))
    buffers = [step for step in steps if least <= step < min(most + 1, records)]
    units = _units(batch_size, spans)
    choices: list[tuple[int | None, int]] = [(b, u) for b in buffers for u in units]
    if records <= WHOLE:  # a permutation is the same for every unit
        choices.append((None, order.default_unit(batch_size)))
    return choices


def _window(records: int, buffer: int | None, spans: int) -> int:
    """Records that wait in the windows of all spans."""
    return records if buffer is None else min(records, -(-buffer // spans) * spans)


def _units(batch_size: int, spans: int) -> list[int]:
    """Divisors of the batch size, the largest first, each about a quarter of the one before.

    Below batch_size / spans every batch takes from all spans already: smaller ones mix no better.
    """
    divisors = [u for u in range(1, math.isqrt(batch_size) + 1) if batch_size % u == 0]
    divisors = sorted({*divisors, *(batch_size // u for u in divisors)})
    least = max(u for u in divisors if u <= max(1, batch_size / spans))
    units = [batch_size]
    while units[-1] > least:
        units.append(max(least, max(u for u in divisors if u <= max(1, units[-1] // 4))))
    return sorted({*units, order.default_unit(batch_size)}, reverse=True)


def _first_batch(share: Share, mean_bytes: float, is_network: bool) -> int:
    """Bytes that a worker reads before its first batch, about.

    The batch alone: the window is announced as batches go by. But small records on local storage
    are read in blocks and held, so of these the windows of all spans that the batch takes from come
    before it, unless the spans are shared.
    """
    epoch, batch = share.epoch, min(share.epoch.records, share.batch_size or 1)
    kept = keep(share, mean_bytes, network=is_network, available_bytes=1 << 62)
    if kept.policy != "held":
        return math.ceil(batch * mean_bytes)
    block = min(epoch.window * mean_bytes + kept.run, epoch.span_records(0) * mean_bytes)
    return math.ceil(min(share.batch_units, _spans(epoch)) * block)


# --- what is looked at ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sample:
    """Which batches of an epoch are looked at: the same ones for every (buffer, unit)."""

    regions: list[Int64s]  # numbers of batches, ascending, in each stretch that is simulated
    passes: int  # epochs, each with the one before it
    whole: bool

    @staticmethod
    def of(records: int, batch_size: int) -> _Sample:
        whole = records // batch_size  # the last, short one would hold a tail's repeats
        count = min(whole, max(REGIONS, LOOKED // batch_size))
        if records <= WHOLE:
            passes = min(PASSES, max(1, LOOKED // max(1, records)))
            return _Sample([np.arange(count) * whole // max(1, count)], passes, True)
        regions = min(REGIONS, whole)
        run = count // max(1, regions)
        starts = [i * (whole - run) // max(1, regions - 1) for i in range(regions)]
        return _Sample([np.arange(start, start + run) for start in starts], 1, False)

    @property
    def batches(self) -> int:
        return sum(map(len, self.regions))


class _Simulation:
    """The order of a dataset for any (buffer, unit), looked at in the batches of a sample."""

    def __init__(
        self,
        counts: Int64s,
        classes: Classes,
        seed: int,
        spans: int,
        batch_size: int,
        sample: _Sample,
    ) -> None:
        self._counts, self._classes, self._seed = counts, classes, seed
        self._spans, self._batch_size, self._sample = spans, batch_size, sample
        self._starts = np.cumsum(counts) - counts  # the number of each shard's first record
        self._layouts: dict[int, Int64s] = {}

    def epoch(self, buffer: int | None, unit: int, number: int) -> Epoch:
        return Epoch(
            self._counts,
            seed=self._seed,
            epoch=number,
            canonical_workers=self._spans,
            unit=unit,
            shuffle_buffer=buffer,
        )

    def __call__(self, buffer: int | None, unit: int) -> tuple[float, float, float, float]:
        """Distinct classes in a batch, pairs of one class, pairs again, places moved: means."""
        size = self._batch_size
        mixture, pairs, moved = np.zeros(2), 0, 0.0
        before = self.epoch(buffer, unit, 0)
        for number in range(1, self._sample.passes + 1):
            now = self.epoch(buffer, unit, number)
            flat, virtual = self._look(now)
            shards, places = now.locate(virtual)
            numbers = self._starts[shards] + places
            mixture += _mixture(self._classes[numbers].reshape(-1, size)).sum(axis=0)
            earlier = flat_positions(before, self._virtual(before, shards, places))
            pairs += _pairs((earlier // size).reshape(-1, size))
            # Without a buffer a record comes where its span's draws are dealt in storage order.
            home = numbers if now.shuffles_all else virtual
            moved += float(np.abs(_deal(now, home) - flat).sum())
            before = now
        batches = self._sample.batches * self._sample.passes
        distinct, alike = (mixture / batches).tolist()
        again = pairs / max(1, batches * size * (size - 1) // 2)
        return distinct, alike, again, moved / (batches * size)

    def _look(self, epoch: Epoch) -> tuple[Int64s, Int64s]:
        """The rows of the sample's batches: places in the flat order, and virtual positions."""
        size, each = self._batch_size, _spans(epoch) * epoch.unit
        flats, virtuals = [], []
        for batches in self._sample.regions:
            first = int(batches[0]) * size // each
            drawn = virtual_positions(epoch, first, -(-(int(batches[-1]) + 1) * size // each))
            flat = (batches[:, None] * size + np.arange(size)).reshape(-1)
            flats.append(flat)
            virtuals.append(drawn[flat - first * each])
        return np.concatenate(flats), np.concatenate(virtuals)

    def _virtual(self, epoch: Epoch, shards: Int64s, places: Int64s) -> Int64s:
        """The inverse of epoch.locate."""
        if epoch.shuffles_all:
            every = np.arange(epoch.records, dtype=np.int64)
            found, records = epoch.locate(every)
            inverse = np.empty_like(every)
            inverse[self._starts[found] + records] = every
            virtual: Int64s = inverse[self._starts[shards] + places]
            return virtual
        if epoch.epoch not in self._layouts:  # the same for every buffer and unit
            self._layouts[epoch.epoch] = _layout(epoch)
        return self._layouts[epoch.epoch][shards] + places


def _layout(epoch: Epoch) -> Int64s:
    """The virtual position of each shard's first record; 0 for empty shards."""
    starts = np.zeros(len(epoch.shard_records), np.int64)
    at, end = 0, epoch.records
    while at < end:
        shards, _ = epoch.locate(np.array([at]))
        starts[shards[0]] = at
        at += int(epoch.shard_records[shards[0]])
    return starts


# --- the order, many records at a time ------------------------------------------------------------


def _spans(epoch: Epoch) -> int:
    """The spans that units are dealt from: those that have any."""
    return min(epoch.canonical_workers, max(1, epoch.units))


def virtual_positions(epoch: Epoch, first: int, stop: int) -> Int64s:
    """The virtual positions of a part of the flat order, in that order.

    Rounds first .. stop - 1, each of one unit from every span, up to the epoch's end. Units are
    dealt as Epoch.pieces deals them, with one take for each span.
    """
    spans, unit = _spans(epoch), epoch.unit
    dealt = np.empty((stop - first, spans, unit), np.int64)
    draws = np.empty((stop - first) * unit, np.int64)
    for span in range(spans):
        drawing = epoch.span_order(span)
        begin, end = min(first * unit, drawing.n), min(stop * unit, drawing.n)
        drawing.seek(begin)
        draws[: end - begin] = epoch.position(span, drawing.take(end - begin))
        draws[end - begin :] = -1  # behind the epoch's end
        dealt[:, span] = draws.reshape(-1, unit)
    return dealt.reshape(-1)[: epoch.records - first * spans * unit]


def flat_positions(epoch: Epoch, virtual: Int64s) -> Int64s:
    """Where different virtual positions come in the flat order: the inverse of the above."""
    by_position = np.argsort(virtual)
    ordered = virtual[by_position]
    starts = [epoch.span_start(span) for span in range(_spans(epoch) + 1)]
    edges = np.searchsorted(ordered, starts).tolist()
    drawn = np.empty_like(ordered)
    for span, (a, b) in enumerate(pairwise(edges)):
        if a < b:
            drawn[a:b] = _draws(epoch.span_order(span), ordered[a:b] - starts[span]) + starts[span]
    flat = np.empty_like(virtual)
    flat[by_position] = _deal(epoch, drawn)
    return flat


def _draws(drawing: SpanOrder, wanted: Int64s) -> Int64s:
    """The draw that emits each of these relative positions, which ascend.

    Record p is not emitted before draw p - w + 1, and seldom later than some 10 w after it; so
    only stretches around what is wanted are drawn.
    """
    window = drawing.window
    found = np.empty_like(wanted)
    gaps = np.flatnonzero(np.diff(wanted) > 16 * window + 4096) + 1
    for part in np.split(np.arange(len(wanted)), gaps):
        low, high = int(wanted[part[0]]), int(wanted[part[-1]])
        draws = np.full(high - low + 1, -1, np.int64)
        drawing.seek(max(0, low - window + 1))
        end = high + 2 * window
        while (draws[wanted[part] - low] < 0).any():
            begin = drawing.drawn
            assert begin < drawing.n, "a record that no draw emits"
            emitted = drawing.take(min(drawing.n, end) - begin)
            inside = np.flatnonzero((emitted >= low) & (emitted <= high))
            draws[emitted[inside] - low] = inside + begin
            end += 2 * window
        found[part] = draws[wanted[part] - low]
    return found


def _deal(epoch: Epoch, virtual: Int64s) -> Int64s:
    """The place in the flat order of draw k of span s, given as the virtual position k of s."""
    starts = np.array([epoch.span_start(span) for span in range(_spans(epoch))], np.int64)
    span = np.searchsorted(starts, virtual, side="right") - 1
    unit, rest = np.divmod(virtual - starts[span], epoch.unit)
    flat: Int64s = (unit * len(starts) + span) * epoch.unit + rest
    return flat


# --- statistics -----------------------------------------------------------------------------------


def _compact(labels: Classes) -> Classes:
    """Labels as the smallest integers that are quick to sort; masked ones are a class."""
    if isinstance(labels, np.ma.MaskedArray):
        known = np.unique(labels.compressed(), return_inverse=True)[1]
        found = np.full(len(labels), -1, np.int64)
        found[~np.ma.getmaskarray(labels)] = known
        labels = found
    if labels.dtype.kind not in "iub":
        labels = np.unique(labels, return_inverse=True)[1]
    if not labels.size or labels.dtype.itemsize <= 2:
        return labels
    low, high = int(labels.min()), int(labels.max())
    return (labels - low).astype(np.uint16) if high - low < 1 << 16 else labels


def _tenths(records: int) -> Classes:
    """The tenth of the packing order that each record lies in."""
    edges = [-(-tenth * records // 10) for tenth in range(11)]
    return np.repeat(np.arange(10, dtype=np.uint8), np.diff(edges))


def _mixture(batches: Classes) -> NDArray[np.float64]:
    """Of each row, how many different values it has, and which part of its pairs is equal.

    (B, b) -> (B, 2)
    """
    runs, firsts = _runs(batches)
    pairs = np.add.reduceat(runs * (runs - 1) // 2, firsts)
    distinct = np.diff(firsts, append=len(runs))
    return np.stack([distinct, pairs / max(1, math.comb(batches.shape[1], 2))], axis=1)


def _pairs(batches: Int64s) -> int:
    """How many pairs of equal values stand in one row. (B, b)"""
    runs, _ = _runs(batches)
    return int((runs * (runs - 1) // 2).sum())


def _runs(batches: Classes) -> tuple[Int64s, Int64s]:
    """How often each value occurs in each row, row by row, and where each row begins in that."""
    ordered = np.sort(batches, axis=1)
    begins = np.ones(ordered.shape, np.bool_)
    np.not_equal(ordered[:, 1:], ordered[:, :-1], out=begins[:, 1:])
    places = np.flatnonzero(begins)
    firsts = np.searchsorted(places, np.arange(len(ordered)) * ordered.shape[1])
    return np.diff(places, append=ordered.size), firsts


def _even(alike: float) -> float:
    """Equally frequent classes that have this part of a batch's pairs alike."""
    return 1 / max(float(alike), 1e-12)


def _widened(band: tuple[float, float], middle: float) -> tuple[float, float]:
    return min(band[0], middle * (1 - TOLERATED)), max(band[1], middle * (1 + TOLERATED))


def _outside(value: float, band: tuple[float, float]) -> float:
    """How far a value is outside a band; 0 within, also by rounding."""
    off = max(band[0] - value, value - band[1])
    return off if off > 1e-9 * abs(value) else 0.0


def _chance(records: int, batch_size: int) -> float:
    """That two records share a batch of a uniformly shuffled epoch, its short one included."""
    whole, rest = divmod(records, batch_size)
    pairs = whole * batch_size * (batch_size - 1) + rest * (rest - 1)
    return pairs / max(1, records * (records - 1))


def _uniform(classes: Classes, batch_size: int, sample: _Sample) -> NDArray[np.float64]:
    """The mean `_mixture` of the sample's number of batches, of uniform shuffles: (UNIFORM, 2)."""
    count, needed = sample.batches, UNIFORM * sample.passes
    means: list[NDArray[np.float64]] = []
    for rows in _shuffled(classes, batch_size, count, sample.whole):
        means += list(_mixture(rows).reshape(-1, count, 2).mean(axis=1))
        if len(means) >= needed:
            break
    found: NDArray[np.float64] = np.stack(means[:needed]).reshape(UNIFORM, -1, 2).mean(axis=1)
    return found


def _shuffled(classes: Classes, batch_size: int, count: int, whole: bool) -> Iterator[Classes]:
    """Batches of uniform shuffles, for ever: (some multiple of count, batch_size) classes."""
    generator = np.random.default_rng(0)  # not the order: only the noise of the reference
    records = len(classes)
    while whole:
        times = records // batch_size // count  # disjoint parts of one shuffle are as good as two
        shuffled = generator.permutation(classes)
        yield shuffled[: times * count * batch_size].reshape(-1, batch_size)
    while True:  # a shuffle of all would be too large; each batch alone, then
        rows = generator.integers(records, size=(count, batch_size))
        while True:
            rows.sort(axis=1)
            twice = np.nonzero(rows[:, 1:] == rows[:, :-1])
            if not len(twice[0]):
                break
            rows[twice] = generator.integers(records, size=len(twice[0]))
        yield classes[rows]


# --- the recommendation ---------------------------------------------------------------------------


def _conclude(
    tuning: Tuning, left_out: list[int | None], path: str | None, root: str | None
) -> Tuning:
    """With what to say at the end, and the call."""
    chosen, repack = tuning.least_bad, "shardio pack SRC OUT --shuffle"
    buffer = None if chosen is None else chosen.shuffle_buffer
    unit = order.default_unit(tuning.batch_size) if chosen is None else chosen.unit
    options = {"shuffle_buffer": '"all"' if buffer is None else f"{buffer:_}", "unit": str(unit)}
    if path is not None:
        where = {} if root is None else {"root": _quoted(root)}
        options = where | {"batch_size": str(tuning.batch_size)} | options
        if tuning.canonical_workers != CANONICAL_WORKERS:
            options["canonical_workers"] = str(tuning.canonical_workers)
    call = ", ".join(f"{name}={value}" for name, value in options.items())
    if path is not None:
        call = f"ShardDataset({_quoted(path)}, {call})"
    if chosen is None or tuning.default is None:
        few = "There are fewer records than a batch takes, so every order is one batch: nothing to "
        return replace(tuning, notes=(few + "tune.",), call=call)

    here = ", here all" if tuning.default.shuffle_buffer is None else ""
    usual = f"The default ({SHUFFLE_BUFFER:,} records{here}, unit {tuning.default.unit})"
    if tuning.default.good:
        usual += (
            " is good enough: change it only for memory, since another order voids saved states."
        )
    else:
        usual += f" is not good enough: {tuning.verdict(tuning.default)}."
    notes = [usual]
    # A shuffled pack mixes without a buffer, whatever the noise of one unit.
    least = tuning.rows[0].shuffle_buffer
    ordered = tuning.labels == "label" and not any(
        row.mixes for row in tuning.rows if row.shuffle_buffer == least
    )
    if tuning.best is not None:
        notes.append(f"Recommended: {_told(chosen)}: the least memory that is good enough.")
        if ordered and chosen.window > tuning.records / 10:
            notes.append(
                f"Neighbours in this pack are alike, so {chosen.window / tuning.records:.0%} of it "
                f"must be shuffled at once. Packed shuffled (`{repack}`), a small buffer would do."
            )
        if chosen.shuffle_buffer is None and chosen.memory_bytes > LARGE:
            notes.append(
                '"all" reads records in random order: fine on a local SSD, slow elsewhere.'
            )
    else:
        limit = "" if tuning.memory is None else f" within {sizes.show_size(tuning.memory)}"
        failed = f"None of these is good enough{limit}."
        if ordered:
            failed += f" Neighbours in this pack are alike: pack again, shuffled (`{repack}`)."
        if tuning.beyond is not None:
            failed += f" The smallest that is, {_told(tuning.beyond)}: raise --memory."
        notes.append(f"{failed} Until then the least bad is marked, and called for below.")
    if left_out:
        shown = ", ".join(map(show_buffer, left_out))
        limit = sizes.show_size(tuning.memory or 0)
        notes.append(f"Left out, for they need more than {limit}: buffers of {shown}.")
    if tuning.records > WHOLE:
        notes.append(
            f'Buffers above {MOST:,} records were not simulated; "all" is a uniform shuffle by '
            "definition."
        )
    return replace(tuning, notes=tuple(notes), call=call)


def _quoted(path: str) -> str:
    return printable(json.dumps(path, ensure_ascii=False), 4096)


def _told(row: Row) -> str:
    need = sizes.show_size(row.memory_bytes)
    return f"a buffer of {show_buffer(row.shuffle_buffer)} records with unit {row.unit}, {need}"


def _plain(row: Row | None) -> dict[str, Any] | None:
    """A row as JSON."""
    if row is None:
        return None
    buffer = "all" if row.shuffle_buffer is None else row.shuffle_buffer
    return asdict(row) | {"shuffle_buffer": buffer, "good": row.good}


def show_buffer(buffer: int | None) -> str:
    return "all" if buffer is None else f"{buffer:,}"
