"""Say which dataset each row of a mixture comes from.

How it works. Weights become whole numbers of slots in a period; a pattern spreads each dataset's
slots evenly over the period, and repeats. So the number of a row alone decides which dataset it
comes from, and how many rows of that dataset come before it. These are the dataset's own flat
order, pass after pass: each pass holds every record once, in an order of its own. A pass goes on in
the next epoch where this one ends.

    weights 3 : 1    pattern  a a b a | a a b a | ...    row 6 is b's row 1
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from heapq import heappop, heappush
from typing import Any, Literal

import numpy as np

from ..errors import OptionError, printable
from ..units import check_int
from .options import Options
from .partition import Partition

Length = int | Literal["first", "last"]

MAX_SLOTS = 1 << 16  # of a period, at most: a weight is met within 1 / 131,072 of all rows


class Pattern:
    """Spread the rows of each dataset evenly over a mixture.

    slots  how many rows of a period come from each dataset, >= 1

    Of the first n rows, a dataset with k of a period's K slots has n * k / K, rounded up or down.
    So in any rows that follow each other its count is off by less than two rows.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        """Deal the slots of one period. Memory is O(datasets * period)."""
        self.slots = list(slots)
        self.period = _deal(self.slots)
        owners = np.array(self.period)
        # (datasets, period + 1) int32: of the first n rows of a period, those of each dataset
        self._before = np.zeros((len(self.slots), len(owners) + 1), np.int32)
        for d in range(len(self.slots)):
            np.cumsum(owners == d, out=self._before[d, 1:])

    def owners(self, start: int, stop: int) -> list[int]:
        """Return the dataset of each row, start .. stop - 1, by its number in the mixture."""
        count, at = stop - start, start % len(self.period)
        rows = self.period[at : at + count]
        while len(rows) < count:
            rows += self.period[: count - len(rows)]
        return rows

    def count(self, dataset: int, rows: int) -> int:
        """Count the rows of a dataset among the first `rows` rows."""
        periods, rest = divmod(rows, len(self.period))
        return periods * self.slots[dataset] + int(self._before[dataset, rest])

    def rows_until(self, dataset: int, records: int) -> int:
        """Count the rows of the mixture until the dataset has had `records` rows, at least 1."""
        periods, last = divmod(records - 1, self.slots[dataset])
        rest = int(np.searchsorted(self._before[dataset], last + 1))
        return periods * len(self.period) + rest

    def fraction(self, dataset: int) -> float:
        """Return the part of all rows that come from a dataset, in (0, 1]."""
        return self.slots[dataset] / len(self.period)

    def passes(
        self, dataset: int, ranges: Iterable[tuple[int, int]], *, records: int, before: int
    ) -> Iterator[tuple[int, int, int]]:
        """Turn ranges of a mixture's rows into ranges of a dataset's passes.

        ranges   (start, stop) of rows of an epoch
        records  of the dataset: one pass holds each of them once
        before   rows of the dataset in all epochs before this one

        Yields (pass, start, stop): places start .. stop - 1 of the flat order of that pass.
        """
        count = partial(self.count, dataset)
        for first, last in ranges:
            start, stop = before + count(first), before + count(last)
            while start < stop:
                number, place = divmod(start, records)
                part = min(stop - start, records - place)
                yield number, place, place + part
                start += part


def _deal(slots: Sequence[int]) -> list[int]:
    """Choose the dataset of each row of a period.

    Slot j of a dataset's k has the rows from floor(j * K / k) to ceil((j + 1) * K / k) - 1 to
    choose from, and the slot that must come first gets the next row. Each then has one (Tijdeman:
    The chairman assignment problem, 1980). Slots at even distances, sorted, would be simpler, but
    of weights 63, 1, 1, 1, 1, 1, 1, 1 the seven rare datasets lie side by side then, once a period.
    """
    total = sum(slots)
    coming = [(0, d, 0) for d in range(len(slots))]  # a heap: first row, dataset, slot
    waiting: list[tuple[int, int, int, int]] = []  # a heap: row to come before, and the same
    owners = []
    for row in range(total):
        while coming and coming[0][0] <= row:
            first, d, j = heappop(coming)
            heappush(waiting, (-(-(j + 1) * total // slots[d]), first, d, j))
        _, _, d, j = heappop(waiting)
        owners.append(d)
        if j + 1 < slots[d]:
            heappush(coming, ((j + 1) * total // slots[d], d, j + 1))
    return owners


@dataclass(frozen=True)
class MixedOptions(Options):
    """Hold the options of a mixture: one span, no window of its own; and those of each dataset."""

    parts: tuple[Options, ...]

    @classmethod
    def of(cls, parts: Sequence[Options]) -> MixedOptions:
        """Make the options of a mixture. parts: of each dataset; batch_size, seed, tail alike."""
        first = parts[0]
        return cls(first.batch_size, 1, first.seed, first.tail, 1, 1, True, 1, 1, tuple(parts))


def epoch_rows(length: Any, passes: Sequence[int]) -> int:
    """Return the number of rows in an epoch, >= 1, as the option `length` asks for it.

    passes: for each dataset, the rows until all its records have come once. Raises OptionError.
    """
    if isinstance(length, str):
        if length not in ("first", "last"):
            raise OptionError(
                f"length is {printable(repr(length))}: expected rows of an epoch, or until the "
                "'first' or the 'last' dataset has come once"
            )
        return min(passes) if length == "first" else max(passes)
    return check_int("length", length, 1)


def whole_slots(weights: Sequence[float], records: Sequence[int]) -> list[int]:
    """Turn weights into whole slots of a period: exact when they are simple ratios.

    records: of each dataset; as many as weights. Raises OptionError.
    """
    try:
        fractions = [_fraction(weight) for weight in weights]
    except (TypeError, ValueError, OverflowError):
        fractions = []
    if len(fractions) != len(records) or any(weight <= 0 for weight in fractions):
        raise OptionError(
            f"weights is {printable(repr(weights))}: expected a number above 0 for each of the "
            f"{len(records)} datasets"
        )
    simple = [weight.limit_denominator(10_000) for weight in fractions]
    if any(abs(a - b) > b / 10**9 for a, b in zip(simple, fractions, strict=True)):
        simple = fractions
    total = sum(simple)
    ratios = [weight / total for weight in simple]
    period = math.lcm(*(ratio.denominator for ratio in ratios))
    if period > MAX_SLOTS:
        slots = [max(1, round(ratio * MAX_SLOTS)) for ratio in ratios]
        return [slot // math.gcd(*slots) for slot in slots]
    return [int(ratio * period) for ratio in ratios]


def _fraction(weight: Any) -> Fraction:
    """Return a weight as an exact number; raise TypeError, ValueError or OverflowError."""
    if isinstance(weight, str):  # Fraction would read "1/3"
        raise TypeError
    return (
        Fraction(weight) if isinstance(weight, (int, float, Fraction)) else Fraction(float(weight))
    )


def batch_ranges(partition: Partition) -> Iterator[tuple[int, int]]:
    """Yield the rows of a partition's batches, in order, as (start, stop).

    The partition is of a mixture: one span, unit 1.
    """
    end, size = partition.epoch.records, partition.batch_size or 1
    for step in partition.worker_steps:  # as Partition.batch has it, which takes 2 us
        start = partition.first_unit(step)
        yield min(end, start), min(end, start + size)
