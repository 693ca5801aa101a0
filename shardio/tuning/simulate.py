"""The order of a dataset for any buffer and unit, without its bytes, and how well it mixes.

How it works. The order is arithmetic: the batches of an epoch are drawn by Epoch itself. Up to
WHOLE records whole epochs are simulated, and SAMPLED records of them are looked at. Of larger
datasets, REGIONS stretches of the epoch are reached by seeking.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..order.epoch import Epoch
from ..order.options import spans_of
from ..order.rng import Int64s
from ..order.shuffle import SpanOrder

UNIFORM: Final = 200  # uniform shuffles that a mean and its deviation are made of
# 1,024 batches of 256: with 1,000 classes the band is then 0.25 % wide, and 200 shuffles take 1 s.
SAMPLED: Final = 1 << 18
PASSES: Final = 32  # pairs of epochs of a small data set: one of few shards differs between epochs
WHOLE: Final = 1 << 21
REGIONS: Final = 4

Classes = NDArray[Any]  # (N,) integers


# --- what is looked at ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """The batches of an epoch that are looked at: the same ones for every (buffer, unit)."""

    regions: list[Int64s]  # numbers of batches, ascending, in each stretch that is simulated
    passes: int  # epochs, each with the one before it
    whole: bool

    @staticmethod
    def of(records: int, batch_size: int) -> Sample:
        """Choose the batches of an epoch of so many records."""
        whole = records // batch_size  # the last, short one would hold a tail's repeats
        count = min(whole, max(REGIONS, SAMPLED // batch_size))
        if records <= WHOLE:
            passes = min(PASSES, max(1, SAMPLED // max(1, records)))
            return Sample([np.arange(count) * whole // max(1, count)], passes, True)
        regions = min(REGIONS, whole)
        run = count // max(1, regions)
        starts = [i * (whole - run) // max(1, regions - 1) for i in range(regions)]
        return Sample([np.arange(start, start + run) for start in starts], 1, False)

    @property
    def batches(self) -> int:
        """Count the batches of a pass."""
        return sum(map(len, self.regions))


@dataclass(frozen=True)
class Simulation:
    """The order of a dataset for any (buffer, unit), looked at in the batches of a sample."""

    counts: Int64s  # (shards,) records
    classes: Classes  # (N,)
    seed: int
    spans: int
    batch_size: int
    sample: Sample
    nodes: int = 1  # that keep to shards of their own

    def epoch(self, buffer: int | None, unit: int, number: int) -> Epoch:
        """Make an epoch of these options. buffer: records; None: "all". Raises OptionError."""
        spans, node_spans = self.spans, 1
        if self.nodes > 1:
            node_spans = self.batch_size // unit
            if spans % (self.nodes * node_spans):
                spans = spans_of(self.nodes, node_spans)
        return Epoch(
            self.counts,
            seed=self.seed,
            epoch=number,
            spans=spans,
            unit=unit,
            shuffle_buffer=buffer,
            nodes=self.nodes,
            node_spans=node_spans,
        )

    def __call__(self, buffer: int | None, unit: int) -> tuple[float, float, float, float]:
        """Simulate some epochs, and return four means of what their batches do.

        Distinct classes in a batch; of its pairs, the part that is of one class, and the part that
        shared a batch in the epoch before; places that a record moved.
        """
        size = self.batch_size
        starts = np.cumsum(self.counts) - self.counts  # (shards,) numbers of first records
        mixture, pairs, moved = np.zeros(2), 0, 0.0
        before = self.epoch(buffer, unit, 0)
        for number in range(1, self.sample.passes + 1):
            now = self.epoch(buffer, unit, number)
            flat, virtual = self._look(now)
            shards, places = now.locate(virtual)
            numbers = starts[shards] + places
            mixture += batch_mixture(self.classes[numbers].reshape(-1, size)).sum(axis=0)
            earlier = flat_positions(before, before.virtual_position(shards, places))
            pairs += equal_pairs((earlier // size).reshape(-1, size))
            # Without a buffer a record comes where its span's draws are dealt in storage order.
            home = numbers if now.shuffles_all else virtual
            moved += float(np.abs(_places(now, home) - flat).sum())
            before = now
        batches = self.sample.batches * self.sample.passes
        distinct, alike = (mixture / batches).tolist()
        again = pairs / max(1, batches * size * (size - 1) // 2)
        return distinct, alike, again, moved / (batches * size)

    def _look(self, epoch: Epoch) -> tuple[Int64s, Int64s]:
        """Draw the sample's rows: their places in the flat order, and virtual positions."""
        size, each = self.batch_size, _spans(epoch) * epoch.unit
        flats, virtuals = [], []
        for batches in self.sample.regions:
            first = int(batches[0]) * size // each
            drawn = virtual_positions(epoch, first, -(-(int(batches[-1]) + 1) * size // each))
            flat = (batches[:, None] * size + np.arange(size)).reshape(-1)
            flats.append(flat)
            virtuals.append(drawn[flat - first * each])
        return np.concatenate(flats), np.concatenate(virtuals)


# --- the order, many records at a time ------------------------------------------------------------


def _spans(epoch: Epoch) -> int:
    """Count the spans that units are dealt from: those that have any."""
    return min(epoch.spans, max(1, epoch.units))


def virtual_positions(epoch: Epoch, first: int, stop: int) -> Int64s:
    """Draw the virtual positions of a part of the flat order, in that order.

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
    """Return the places of different virtual positions: the inverse of `virtual_positions`."""
    by_position = np.argsort(virtual)
    ordered = virtual[by_position]
    starts = [epoch.span_start(span) for span in range(_spans(epoch) + 1)]
    edges = np.searchsorted(ordered, starts).tolist()
    drawn = np.empty_like(ordered)
    for span, (a, b) in enumerate(pairwise(edges)):
        if a < b:
            drawn[a:b] = _draws(epoch.span_order(span), ordered[a:b] - starts[span]) + starts[span]
    flat = np.empty_like(virtual)
    flat[by_position] = _places(epoch, drawn)
    return flat


def _draws(drawing: SpanOrder, wanted: Int64s) -> Int64s:
    """Return the draw that emits each of these relative positions, which ascend.

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


def _places(epoch: Epoch, virtual: Int64s) -> Int64s:
    """Return the places in the flat order of some draws, (n,) -> (n,).

    virtual: draw k of a span is given as the virtual position k of that span.
    """
    starts = np.array([epoch.span_start(span) for span in range(_spans(epoch))], np.int64)
    span = np.searchsorted(starts, virtual, side="right") - 1
    draw = virtual - starts[span]
    return (draw // epoch.unit * len(starts) + span) * epoch.unit + draw % epoch.unit


# --- statistics -----------------------------------------------------------------------------------


def compact_labels(labels: Classes) -> Classes:
    """Return labels as the smallest integers that are quick to sort; masked ones are a class."""
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


def lie_in_runs(parts: Sequence[Classes], alike: float) -> bool:
    """Return True if neighbours differ less than half as often as records drawn at random.

    parts: (n,) classes each, in the order of the pack. alike: share of random pairs of one class.
    """
    pairs = sum(len(part) - 1 for part in parts)
    changes = sum(int((part[1:] != part[:-1]).sum()) for part in parts)
    return changes < 0.5 * (1.0 - alike) * pairs


def tenths(records: int) -> Classes:
    """Return the tenth of the packing order that each record lies in: (N,)."""
    edges = [-(-tenth * records // 10) for tenth in range(11)]
    return np.repeat(np.arange(10, dtype=np.uint8), np.diff(edges))


def batch_mixture(batches: Classes) -> NDArray[np.float64]:
    """Count the different values of each row, and the part of its pairs that is equal.

    (B, b) -> (B, 2)
    """
    runs, firsts = _runs(batches)
    pairs = np.add.reduceat(runs * (runs - 1) // 2, firsts)
    distinct = np.diff(firsts, append=len(runs))
    return np.stack([distinct, pairs / max(1, math.comb(batches.shape[1], 2))], axis=1)


def equal_pairs(batches: Int64s) -> int:
    """Count the pairs of equal values that stand in one row: (B, b) integers."""
    runs, _ = _runs(batches)
    return int((runs * (runs - 1) // 2).sum())


def _runs(batches: Classes) -> tuple[Int64s, Int64s]:
    """Count each value of each row, row by row; and tell where each row begins in these counts."""
    ordered = np.sort(batches, axis=1)
    begins = np.ones(ordered.shape, np.bool_)
    np.not_equal(ordered[:, 1:], ordered[:, :-1], out=begins[:, 1:])
    places = np.flatnonzero(begins)
    firsts = np.searchsorted(places, np.arange(len(ordered)) * ordered.shape[1])
    return np.diff(places, append=ordered.size), firsts


def pair_chance(records: int, batch_size: int) -> float:
    """Return the probability that two records share a batch of a uniformly shuffled epoch, its
    short one included.
    """
    whole, rest = divmod(records, batch_size)
    pairs = whole * batch_size * (batch_size - 1) + rest * (rest - 1)
    return pairs / max(1, records * (records - 1))


def uniform_mixture(classes: Classes, batch_size: int, sample: Sample) -> NDArray[np.float64]:
    """Return the mean `batch_mixture` of the sample's number of batches, for each of some uniform
    shuffles: (UNIFORM, 2).
    """
    count, needed = sample.batches, UNIFORM * sample.passes
    means: list[NDArray[np.float64]] = []
    for rows in shuffled_batches(classes, batch_size, count, sample.whole):
        means += list(batch_mixture(rows).reshape(-1, count, 2).mean(axis=1))
        if len(means) >= needed:
            break
    found: NDArray[np.float64] = np.stack(means[:needed]).reshape(UNIFORM, -1, 2).mean(axis=1)
    return found


def shuffled_batches(
    classes: Classes, batch_size: int, count: int, whole: bool
) -> Iterator[Classes]:
    """Iterate without end over batches of uniform shuffles: (multiple of count, batch_size)."""
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
