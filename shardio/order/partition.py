"""Deal the batches of an epoch to its consumers: the workers of each rank.

How it works. The flat order is cut into batches of m units, and a step is world_size of these. The
ranks take the batches of a step in the order of the spans that these come from (`deal_batches`).
Worker i mod num_workers of a rank makes its batch of step i. So a consumer computes its batches
from four small numbers, without asking anybody. Where records do not fill a batch on every rank,
the tail says whether the last step is repeated records, short, or left out.

A small example: N = 9 records in units of u = 2 on C = 2 spans, two ranks with batches of 4.

    U = ceil(9 / 2) = 5 units; only the epoch's last one, unit 4, is short (1 record)

    span 0 holds units 0, 2, 4   virtual 0..4     unit     0      1      2      3      4
    span 1 holds units 1, 3      virtual 5..8     span     0      1      0      1      0
                                                  draws   0,1    0,1    2,3    2,3     4

>>> epoch = Epoch(
...     np.array([4, 0, 5]), seed=0, epoch=0, spans=2, unit=2, shuffle_buffer=4
... )
>>> epoch.records, epoch.units, [epoch.span_start(s) for s in (0, 1)]
(9, 5, [0, 5])
>>> for batch in Partition(epoch, 4, rank=0, world_size=2, tail="pad"):    # units 0, 1 then 4, 5
...     print(batch.step, batch.pieces, batch.repeats)                 # (span, first draw, count)
0 ((0, 0, 2), (1, 0, 2)) []
1 ((0, 4, 1),) [0 1 2]
>>> for batch in Partition(epoch, 4, rank=1, world_size=2, tail="pad"):    # units 2, 3 then 6, 7
...     print(batch.step, batch.pieces, batch.repeats)
0 ((0, 2, 2), (1, 2, 2)) []
1 () [3 4 5 6]
>>> relative = epoch.span_order(0).take(5)                             # span 0's five draws
>>> epoch.locate(epoch.position(0, relative))                          # -> shard, record in it
(array([2, 2, 2, 2, 2]), array([0, 1, 3, 4, 2]))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, get_args

import numpy as np

from ..errors import OptionError
from ..units import check_fields, check_given
from .epoch import Epoch, Tail, default_unit
from .rng import Int64s
from .shuffle import NO_ROWS


class Batch(NamedTuple):
    """Hold the rows of one batch: those of the pieces, in order, then the repeats."""

    step: int  # this rank's step since `start`, from 0
    pieces: tuple[tuple[int, int, int], ...]  # (span, first draw, count): draws of that span
    repeats: Int64s  # virtual positions of the rows that a tail repeats, (n,)


@dataclass(frozen=True, eq=False)
class Partition:
    """Hold the part of an epoch that one worker of one rank reads, as batches.

    batch_size  a multiple of the epoch's unit; None: sample mode, one record a step, unit 1
    tail        how the epoch ends, where records do not fill a batch on every rank:
                "pad"    repeat records, fewer than batch_size * world_size; with one rank repeat
                         nothing: its last batch is short
                "drop"   leave records out, fewer than batch_size * world_size
                "exact"  as "pad", but with one rank too: every batch is full, and the rows of
                         Batch.repeats are the ones to be marked as not valid
    start       units already consumed by all ranks together
    done        batches that this worker has made since `start`, and does not make again

    At its step i the rank takes m = batch_size / unit units, from `first_unit(i)` on, of the
    world_size * m units of all ranks; worker i mod num_workers makes that batch. Raises OptionError
    for values out of range, and for a unit that does not divide batch_size.
    """

    epoch: Epoch
    batch_size: int | None
    _: KW_ONLY
    rank: int = 0
    world_size: int = 1
    worker: int = 0
    num_workers: int = 1
    tail: Tail = "pad"
    start: int = 0
    done: int = 0

    def __post_init__(self) -> None:
        """Check the fields, and turn numpy's integers into Python's."""
        unit = self.epoch.unit
        check_given(self, batch_size=(1,))
        check_fields(self, world_size=(1,), num_workers=(1,), start=(0,), done=(0,))
        check_fields(self, rank=(0, self.world_size - 1), worker=(0, self.num_workers - 1))
        if self.batch_size is None and unit != 1:
            raise OptionError(
                f"unit is {unit}: expected 1 without a batch_size; give one, or no unit."
            )
        if self.batch_size is not None and self.batch_size % unit:
            raise OptionError(
                f"unit is {unit}, which does not divide batch_size {self.batch_size}; "
                f"a divisor is {default_unit(self.batch_size)}."
            )
        if self.tail not in get_args(Tail):
            raise OptionError(
                f"tail is {self.tail!r}: expected one of {', '.join(get_args(Tail))}."
            )

    @property
    def batch_units(self) -> int:
        """Return m, the units of a batch."""
        return 1 if self.batch_size is None else self.batch_size // self.epoch.unit

    @cached_property
    def steps(self) -> int:
        """Count the steps of this rank, and of every other, from `start` to the epoch's end.

        Without a batch_size: its samples, one a step.
        """
        left = max(0, self.epoch.records - self.start * self.epoch.unit)
        each = (self.batch_size or 1) * self.world_size
        return left // each if self.tail == "drop" else -(-left // each)

    @property
    def worker_steps(self) -> range:
        """Return the steps whose batches this worker makes, in order."""
        return range(self.worker, self.steps, self.num_workers)[self.done :]

    @property
    def sharers(self) -> int:
        """Count the consumers that touch each of this one's spans, this one included, at most."""
        return sharers(self.epoch.spans, self.world_size * self.num_workers, self.batch_units)

    @property
    def spans_read(self) -> int:
        """Count the spans that this consumer reads, at most, and at least 1."""
        spans = min(self.epoch.spans, max(1, self.epoch.units))
        return max(1, spans * self.sharers // (self.world_size * self.num_workers))

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches of this worker, in order."""
        return map(self.batch, self.worker_steps)

    def first_unit(self, step: int) -> int:
        """Return the first unit of the batch of any step of this rank, in [0, steps)."""
        units = self.batch_units
        first = self.start + step * self.world_size * units  # of all ranks
        if self.batch_size is None or self.world_size == 1:
            return first + self.rank
        return first + int(self._deal(first)[self.rank]) * units

    def _deal(self, first: int) -> Int64s:
        """Return which batch of the step that begins with this unit each rank takes."""
        epoch, spans = self.epoch, self.epoch.spans
        nodes = epoch.nodes, epoch.node_spans
        return deal_batches(first % spans, spans, self.world_size, self.batch_units, *nodes)

    def batches_of_ranks(self, most: int) -> Int64s:
        """Return which batch each rank takes in the first steps: (steps, world_size).

        After these steps it repeats. most: steps, at most.
        """
        spans, units = self.epoch.spans, self.batch_units * self.world_size
        steps = range(min(most, spans // math.gcd(units, spans)))
        if self.batch_size is None:
            dealt = [np.arange(self.world_size)] * len(steps)
        else:
            dealt = [self._deal(self.start + step * units) for step in steps]
        return np.array(dealt, np.int64).reshape(len(dealt), self.world_size)

    def batch(self, step: int) -> Batch:
        """Return the batch of any step of this rank, in [0, steps)."""
        records, unit = self.epoch.records, self.epoch.unit
        first = self.first_unit(step)
        end = (first + self.batch_units) * unit
        pieces = self.epoch.pieces(first * unit, min(end, records))
        if self.tail == "drop" or (self.tail == "pad" and self.world_size == 1):
            return Batch(step, tuple(pieces), NO_ROWS)
        # Flat position N + i, which no record has, is virtual record i mod N.
        begin = max(records, first * unit)
        if begin >= end:
            return Batch(step, tuple(pieces), NO_ROWS)
        return Batch(step, tuple(pieces), (np.arange(begin, end) - records) % records)

    def samples(self, steps: range) -> tuple[list[tuple[int, int, int]], Int64s, Int64s]:
        """Return several steps of this rank at once, by span. Only for batch_size None.

        steps: ascending. Returns pieces as in Batch, sorted by span; for each of their rows the
        index of its step in `steps`, (n,) int64; and for the steps behind the epoch's last record
        the repeats, (len(steps) - n,) int64 virtual positions.
        """
        records = self.epoch.records
        flat = np.arange(steps.start, steps.stop, steps.step, dtype=np.int64)
        flat = flat * self.world_size + (self.start + self.rank)
        own = int(flat.searchsorted(records))
        draws, spans = np.divmod(flat[:own], self.epoch.spans)
        by_span = spans.argsort(kind="stable")
        draws, spans = draws[by_span], spans[by_span]
        new = np.ones(own, bool)  # True where a piece begins
        new[1:] = (spans[1:] != spans[:-1]) | (draws[1:] != draws[:-1] + 1)
        first = np.flatnonzero(new)
        counts = np.diff(first, append=own)
        pieces = zip(spans[first].tolist(), draws[first].tolist(), counts.tolist(), strict=True)
        return list(pieces), by_span, (flat[own:] - records) % max(1, records)


@dataclass(frozen=True, eq=False)
class RowRanges:
    """Hold ranges of an epoch's flat order, for a reader that takes rows and not units.

    ranges      (start, stop) in [0, N], ascending; each is a batch
    batch_size  records of a range, about
    consumers   how many such readers there are; each touches all spans
    world_size  of how many ranks
    """

    epoch: Epoch
    ranges: Iterable[tuple[int, int]]
    _: KW_ONLY
    batch_size: int
    consumers: int = 1
    world_size: int = 1

    @property
    def sharers(self) -> int:
        """Count the consumers that touch each of this one's spans, this one included."""
        return self.consumers

    @property
    def spans_read(self) -> int:
        """Count the spans that this consumer reads, at least 1."""
        return min(self.epoch.spans, max(1, self.epoch.units))

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the ranges as batches."""
        for step, (start, stop) in enumerate(self.ranges):
            yield Batch(step, tuple(self.epoch.pieces(start, stop)), NO_ROWS)


@lru_cache(maxsize=64)  # steps begin on C / gcd(W m, C) spans; 0.1 ms for 4,096 ranks
def deal_batches(
    first: int, spans: int, world_size: int, batch_units: int, nodes: int = 1, node_spans: int = 1
) -> Int64s:
    """Return of each rank which of a step's W = world_size batches it takes, from 0: (W,).

    first              the span of the step's first unit
    batch_units        m, of a batch
    nodes, node_spans  of Epoch

    Launchers number the ranks machine by machine. So that the ranks of a machine touch few spans,
    and others than those of another machine, the batches are sorted by the spans with which they
    begin: first modulo g = gcd(W m, C), of which each step has the same ones, so that a rank stays
    with its own; then modulo C. Where W m divides C, and in steps that begin at multiples of it,
    rank r takes batch r. Where nodes have shards of their own, the batches of each node come first.

    >>> deal_batches(0, spans=4, world_size=4, batch_units=2)  # of spans 0-1, 2-3, 0-1 and 2-3
    array([0, 2, 1, 3])
    """
    begins = first + np.arange(world_size) * batch_units
    of_class = begins % math.gcd(world_size * batch_units, spans)
    batches = np.lexsort((begins % spans, of_class, begins % spans // node_spans % nodes))  # stable
    batches.flags.writeable = False  # the cache shares it
    return batches


def unshared_spans(share: Partition) -> int:
    """Return the least number of spans, from today's on, of which each consumer has its own.

    It suits nodes with shards of their own, too.
    """
    epoch, units = share.epoch, share.batch_units
    own = math.lcm(share.world_size * share.num_workers * units, epoch.nodes * epoch.node_spans)
    return -(-epoch.spans // own) * own


def sharers(spans: int, consumers: int, batch_units: int) -> int:
    """Count the consumers that touch each span of an epoch that is long enough, at most.

    consumers = P, the workers of all ranks; batch_units = m, the units of a batch. When P * m
    divides C = spans, none is shared: the count is 1. It is exact where the units of a step
    divide C, or are divided by it; else fewer consumers may share a span.
    """
    # If ranks took batches in turn, those of a consumer would begin at every multiple of `step`
    # units, on some span modulo C. `deal_batches` gives a span to other ranks, but to no more.
    step = math.gcd(consumers * batch_units, spans)
    return consumers * min(batch_units, step) // step
