"""Several datasets as one stream: each batch drawn from all of them, in proportion, by arithmetic.

How it works. Weights become whole numbers of slots in a period; a pattern spreads each dataset's
slots evenly over it, and repeats. So row n of an epoch says by itself whose it is, and how many
rows of that dataset came before it. These are the dataset's own flat order, pass after pass: a pass
holds every record once and is shuffled anew, and goes on in the next epoch where this one ends.
The rows of an epoch are dealt to ranks and workers in batches, as those of one dataset are.

    weights 3 : 1    pattern  a a b a | a a b a | ...    row 6 is b's row 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Literal, Protocol

import numpy as np

from .errors import OptionError, StateError, printable
from .options import Options
from .order import MIX, Epoch, Int64s, Share, Slices, key
from .sizes import whole
from .stream import Consumers, Items, Stream

Length = int | Literal["first", "last"]

_SLOTS = 1 << 16  # of a period, at most: a weight is met within 1 / 131,072


class Pattern:
    """Whose each row of a mixture is.

    slots  how many rows of a period belong to each dataset, >= 1

    The j-th of a dataset's k slots lies at (j + 1/2) / k of the period; of two at one place, that
    of the dataset named first comes first. So any run of n rows holds its share of each, to a row
    or two.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots = list(slots)
        places = np.concatenate([(np.arange(k) + 0.5) / k for k in self.slots])
        owners = np.repeat(np.arange(len(self.slots)), self.slots)
        self.period: Int64s = owners[np.argsort(places, kind="stable")].astype(np.int64)
        self._of = [np.flatnonzero(self.period == d) for d in range(len(self.slots))]

    def owners(self, start: int, stop: int) -> list[int]:
        """The datasets of rows start .. stop - 1."""
        rows: list[int] = self.period[np.arange(start, stop) % len(self.period)].tolist()
        return rows

    def count(self, dataset: int, rows: int) -> int:
        """How many of the first `rows` rows are this dataset's."""
        periods, rest = divmod(rows, len(self.period))
        return periods * self.slots[dataset] + int(np.searchsorted(self._of[dataset], rest))

    def rows(self, dataset: int, records: int) -> int:
        """The rows up to, and with, the dataset's row number `records`, from 1."""
        periods, last = divmod(records - 1, self.slots[dataset])
        return periods * len(self.period) + int(self._of[dataset][last]) + 1


class Component(Protocol):
    """What a mixture needs to know of a dataset in it."""

    _options: Options
    _counts: Int64s

    @property
    def records(self) -> int: ...
    def _mixed_identity(self) -> list[Any]: ...
    def _feed(self, reads: Share | Slices, consumers: Consumers) -> Iterator[Items]: ...


class Mixture(Stream):
    """Datasets mixed by weights. Made by `ShardDataset.mix`, which says what the options are."""

    def __init__(
        self,
        datasets: Sequence[Any],
        weights: Sequence[float] | None,
        *,
        length: Length,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        first = _alike(datasets)
        self._datasets: Sequence[Component] = list(datasets)
        records = [dataset.records for dataset in self._datasets]
        self._pattern = Pattern(_slots(records if weights is None else weights, records))
        whole_passes = [self._pattern.rows(d, count) for d, count in enumerate(records)]
        if length in ("first", "last"):
            self.length = min(whole_passes) if length == "first" else max(whole_passes)
        else:
            self.length = whole("length", length, 1)
        options = first._options
        super().__init__(
            Options(options.batch_size, 1, options.seed, options.tail, 1, 1),
            np.array([self.length], np.int64),
            collate_fn=first._collate if collate_fn is None else collate_fn,
            ranks=first._given_ranks,
        )

    def __repr__(self) -> str:
        shares = ", ".join(
            f"{slots / len(self._pattern.period):.4g} of {dataset!r}"
            for slots, dataset in zip(self._pattern.slots, self._datasets, strict=True)
        )
        return f"<{self.length:,} rows an epoch: {shares}>"

    def _read(self, share: Share, consumers: Consumers) -> Iterator[Items]:
        batches = (batch.pieces[0][1:] if batch.pieces else (0, 0) for batch in share)
        owned = [(first, first + count) for first, count in batches]
        items = self._rows(share.epoch, share, owned, consumers)
        for (start, stop), batch in zip(owned, share, strict=True):
            found = [next(items) for _ in range(start, stop)]
            repeats = batch.repeats.tolist()
            cuts = [0, *(i for i, (a, b) in enumerate(pairwise(repeats), 1) if b != a + 1)]
            for a, b in pairwise([*cuts, len(repeats)]):
                if a < b:
                    again = [(repeats[a], repeats[b - 1] + 1)]
                    found += self._rows(share.epoch, share, again, consumers)
            yield Items(found, stop - start, len(found))

    def _rows(
        self, epoch: Epoch, share: Share, ranges: Sequence[tuple[int, int]], consumers: Consumers
    ) -> Iterator[Any]:
        """The items of these ranges of rows, in order."""
        feeds = [
            self._passes(d, epoch.epoch, share, ranges, consumers)
            for d in range(len(self._datasets))
        ]
        for start, stop in ranges:
            for owner in self._pattern.owners(start, stop):
                yield next(feeds[owner])

    def _passes(
        self,
        d: int,
        epoch: int,
        share: Share,
        ranges: Sequence[tuple[int, int]],
        consumers: Consumers,
    ) -> Iterator[Any]:
        """The items of dataset d in these ranges of rows, pass after pass."""
        dataset = self._datasets[d]
        seed = key(MIX, self.seed, d)
        before = epoch * self._pattern.count(d, self.length)
        for number, group in groupby(self._parts(d, before, ranges), itemgetter(0)):
            one = replace(dataset._options, seed=seed).epoch(dataset._counts, number)
            size = math.ceil((share.batch_size or 1) * self._share_of(d))
            reads = Slices(
                one,
                ((start, stop) for _, start, stop in group),
                batch_size=size,
                consumers=share.world_size * share.num_workers,
            )
            for items, _, _ in dataset._feed(reads, consumers):
                yield from items

    def _parts(
        self, d: int, before: int, ranges: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[int, int, int]]:
        """(pass, start, stop) in the flat order of dataset d, for these ranges of rows."""
        count, records = partial(self._pattern.count, d), self._datasets[d].records
        for first, last in ranges:
            start, stop = before + count(first), before + count(last)
            while start < stop:
                number, place = divmod(start, records)
                part = min(stop - start, records - place)
                yield number, place, place + part
                start += part

    def _share_of(self, d: int) -> float:
        return self._pattern.slots[d] / len(self._pattern.period)

    def _identity(self) -> dict[str, Any]:
        return {
            "mix": [dataset._mixed_identity() for dataset in self._datasets],
            "slots": self._pattern.slots,
            "length": self.length,
            "seed": self.seed,
            "tail": self.tail,
        }

    def _adopted(self, state: Mapping[str, Any]) -> Options:
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise StateError(
                    f"{name} of this mixture is {printable(repr(value))}, but the state was saved "
                    f"with {printable(repr(state.get(name)))}; it goes on only as it was"
                )
        return self._options


def _slots(weights: Sequence[float], records: Sequence[int]) -> list[int]:
    """Weights as whole slots of a period: exact when they are simple ratios."""
    try:
        exact = [Fraction(weight) for weight in weights]
    except (TypeError, ValueError, OverflowError):
        exact = []
    if len(exact) != len(records) or any(weight <= 0 for weight in exact):
        raise OptionError(
            f"weights is {printable(repr(weights))}: expected a number above 0 for each of the "
            f"{len(records)} datasets"
        )
    simple = [weight.limit_denominator(10_000) for weight in exact]
    if any(abs(a - b) > b / 10**9 for a, b in zip(simple, exact, strict=True)):
        simple = exact
    total = sum(simple)
    ratios = [weight / total for weight in simple]
    period = math.lcm(*(ratio.denominator for ratio in ratios))
    if period > _SLOTS:
        slots = [max(1, round(ratio * _SLOTS)) for ratio in ratios]
        return [slot // math.gcd(*slots) for slot in slots]
    return [int(ratio * period) for ratio in ratios]


def _alike(datasets: Sequence[Any]) -> Any:
    """The first of them, when they can be mixed. Raises OptionError."""
    if not datasets:
        raise OptionError("mix: expected at least one dataset")
    for dataset in datasets:
        if not isinstance(dataset, Stream) or isinstance(dataset, Mixture):
            raise OptionError(f"mix: expected ShardDatasets, found {type(dataset).__name__}")
    first = datasets[0]
    for name in ("batch_size", "tail", "seed", "_given_ranks", "_structure"):
        for number, dataset in enumerate(datasets):
            here, there = getattr(first, name), getattr(dataset, name)
            if here != there:
                raise OptionError(
                    f"mix: {name.lstrip('_')} of dataset {number} is {printable(repr(there))}, but "
                    f"{printable(repr(here))} of dataset 0; they are to be alike"
                )
        if name == "batch_size" and any(not dataset.records for dataset in datasets):
            raise OptionError("mix: a dataset holds no records")
    return first
