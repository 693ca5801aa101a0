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
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from heapq import heappop, heappush
from itertools import chain, groupby, islice, pairwise, repeat
from operator import itemgetter
from typing import Any, Literal

import numpy as np

from ..errors import OptionError, StateError, printable
from ..order.arithmetic import MIX, Share, Slices, key
from ..order.options import Options
from ..units import whole
from .assemble import PendingBatch
from .decode import Work
from .protocol import Component
from .ranks import Consumers
from .stream import Stream

Length = int | Literal["first", "last"]

_SLOTS = 1 << 16  # of a period, at most: a weight is met within 1 / 131,072 of all rows

# What tells one dataset of a mixture in a saved state: a list of these, to stay below 1 KB.
_NAMES = ("dataset", "selection", "shuffle_buffer", "canonical_workers", "unit")


class Pattern:
    """Whose each row of a mixture is.

    slots  how many rows of a period belong to each dataset, >= 1

    Of the first n rows, each dataset has its share n * k / K, rounded up or down; so any rows that
    follow each other hold its share to less than two rows.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots = list(slots)
        self.period = _deal(self.slots)
        owners = np.array(self.period)
        # (datasets, period + 1) int32: of the first n rows of a period, those of each dataset
        self._before = np.zeros((len(self.slots), len(owners) + 1), np.int32)
        for d in range(len(self.slots)):
            np.cumsum(owners == d, out=self._before[d, 1:])

    def owners(self, start: int, stop: int) -> list[int]:
        """The datasets of rows start .. stop - 1."""
        count, at = stop - start, start % len(self.period)
        rows = self.period[at : at + count]
        while len(rows) < count:
            rows += self.period[: count - len(rows)]
        return rows

    def count(self, dataset: int, rows: int) -> int:
        """How many of the first `rows` rows are this dataset's."""
        periods, rest = divmod(rows, len(self.period))
        return periods * self.slots[dataset] + int(self._before[dataset, rest])

    def rows(self, dataset: int, records: int) -> int:
        """The rows up to, and with, the dataset's row number `records`, from 1."""
        periods, last = divmod(records - 1, self.slots[dataset])
        rest = int(np.searchsorted(self._before[dataset], last + 1))
        return periods * len(self.period) + rest


def _deal(slots: Sequence[int]) -> list[int]:
    """The datasets of the rows of a period.

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
    """The options of a mixture: rows in one span, unshuffled; and those of each dataset in it."""

    parts: tuple[Options, ...]

    @classmethod
    def of(cls, parts: Sequence[Options]) -> MixedOptions:
        first = parts[0]
        return cls(first.batch_size, 1, first.seed, first.tail, 1, 1, True, tuple(parts))


class Mixture(Stream):
    """Datasets mixed by weights. Made by `ShardDataset.mix`, which says what the options are."""

    options: MixedOptions

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
        self.length = _length(length, [self._pattern.rows(d, n) for d, n in enumerate(records)])
        super().__init__(
            MixedOptions.of([dataset.options for dataset in self._datasets]),
            np.array([self.length], np.int64),
            collate_fn=first.collate_fn if collate_fn is None else collate_fn,
            ranks=first.given_ranks,
        )

    def __repr__(self) -> str:
        shares = ", ".join(
            f"{slots / len(self._pattern.period):.4g} of {dataset!r}"
            for slots, dataset in zip(self._pattern.slots, self._datasets, strict=True)
        )
        return f"<{self.length:,} rows an epoch: {shares}>"

    @property
    def name(self) -> str:
        return f"the mixture of {len(self._datasets)} datasets"

    @property
    def image_place(self) -> int | str | None:
        places = {dataset.image_place for dataset in self._datasets}
        return places.pop() if len(places) == 1 else None

    @property
    def item_fields(self) -> tuple[str, ...] | None:
        fields = {dataset.item_fields for dataset in self._datasets}
        return fields.pop() if len(fields) == 1 else None

    @property
    def evaluates(self) -> bool:
        return super().evaluates or not any(part.shuffle for part in self.options.parts)

    def read_batches(self, share: Share, consumers: Consumers) -> Iterator[PendingBatch]:
        """Read a consumer's share, in order. The `rows` of each are used up before the next."""
        size = share.batch_size or 1
        rows = self._rows(share, _Ranges(share), consumers)
        for step, (start, stop) in zip(share.worker_steps, _Ranges(share), strict=True):
            count = stop - start
            own: Iterable[Any] = islice(rows, count)
            if count == size:
                noted = _Noted(own)
                yield PendingBatch(noted, _made, count, count, None, noted.records)
                continue
            repeats = share.batch(step).repeats.tolist()
            cuts = [0, *(i for i, (a, b) in enumerate(pairwise(repeats), 1) if b != a + 1)]
            again = [
                self._rows(share, [(repeats[a], repeats[b - 1] + 1)], consumers)
                for a, b in pairwise([*cuts, len(repeats)])
                if a < b
            ]
            noted = _Noted(chain(own, *again))
            yield PendingBatch(noted, _made, count, count + len(repeats), None, noted.records)

    def _rows(
        self, share: Share, ranges: Iterable[tuple[int, int]], consumers: Consumers
    ) -> Iterator[Any]:
        """What these ranges of rows are made of. `ranges` is iterated once a dataset."""
        feeds = [self._passes(d, share, ranges, consumers) for d in range(len(self._datasets))]
        for start, stop in ranges:
            for owner in self._pattern.owners(start, stop):
                yield next(feeds[owner])

    def _passes(
        self, d: int, share: Share, ranges: Iterable[tuple[int, int]], consumers: Consumers
    ) -> Iterator[Any]:
        """What makes each row of dataset d in these ranges of rows, pass after pass."""
        dataset, seed = self._datasets[d], key(MIX, self.seed, d)
        options = replace(self.options.parts[d], seed=seed)
        before = share.epoch.epoch * self._pattern.count(d, self.length)
        for number, group in groupby(self._parts(d, before, ranges), itemgetter(0)):
            reads = Slices(
                options.epoch(dataset.counts, number),
                ((start, stop) for _, start, stop in group),
                batch_size=math.ceil((share.batch_size or 1) * self._share_of(d)),
                consumers=share.world_size * share.num_workers,
            )
            for items in dataset.read_batches(reads, consumers, hands_out=self.hands_out):
                yield from zip(repeat(items.make), items.rows, repeat(dataset))

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
        named = [
            {**dataset.source_identity(), **part.state()}
            for dataset, part in zip(self._datasets, self.options.parts, strict=True)
        ]
        return {
            "mix": [[one[name] for name in _NAMES] for one in named],
            "slots": self._pattern.slots,
            "length": self.length,
            "seed": self.seed,
            "tail": self.tail,
        }

    def options_after(self, state: Mapping[str, Any]) -> Options:
        """Return the options to go on with after this state. Raises StateError."""
        saved = state.get("mix")
        if not isinstance(saved, list) or len(saved) != len(self._datasets):
            found = f"{len(saved)} datasets" if isinstance(saved, list) else "no mixture"
            raise StateError(
                f"the state is of {found}, and this is a mixture of {len(self._datasets)}; load it "
                "into what it was saved of"
            )
        for name in ("slots", "length"):
            here, there = self._identity()[name], state.get(name)
            if here != there:
                raise StateError(
                    f"{name} of this mixture is {printable(repr(here))}, but the state was saved "
                    f"with {printable(repr(there))}: give the weights and the length of then, or "
                    "start a new run"
                )
        parts = []
        for number, (dataset, values) in enumerate(zip(self._datasets, saved, strict=True)):
            if not isinstance(values, list) or len(values) != len(_NAMES):
                raise StateError(
                    f"the state's mix is {printable(repr(saved))}: it was edited or cut"
                )
            one = dict(zip(_NAMES, values, strict=True))
            try:
                one |= {"seed": state.get("seed"), "tail": state.get("tail")}
                parts.append(dataset.options_after(one))
            except StateError as error:
                raise StateError(f"dataset {number} of the mixture: {error}") from None
        return MixedOptions.of(parts)


def _made(row: tuple[Callable[[Any, Work], Any], Any, Component], work: Work) -> Any:
    """The item of a row of one of the datasets."""
    make, own, _ = row
    return make(own, work)


class _Noted:
    """Rows that are read once; then what messages call their records."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self._rows = rows
        self._seen: list[tuple[Component, int]] = []

    def __iter__(self) -> Iterator[Any]:
        seen = self._seen
        for row in self._rows:
            seen.append((row[2], row[1][0]))
            yield row

    def records(self) -> list[str]:
        return [dataset.record_name(number) for dataset, number in self._seen]


class _Ranges:
    """The rows of a share's batches, in order, as (start, stop); of a mixture: one span, unit 1.

    Can be iterated often, at the same time: datasets look ahead unequally far.
    """

    def __init__(self, share: Share) -> None:
        self._share = share

    def __iter__(self) -> Iterator[tuple[int, int]]:
        share, size = self._share, self._share.batch_size or 1
        end = share.epoch.records
        for step in share.worker_steps:  # as Share.batch has it, which takes 2 us
            start = min(end, share.start + (step * share.world_size + share.rank) * size)
            yield start, min(end, start + size)


def _length(length: Any, passes: Sequence[int]) -> int:
    """Rows of an epoch. passes: rows until each dataset has come once."""
    if isinstance(length, str):
        if length not in ("first", "last"):
            raise OptionError(
                f"length is {printable(repr(length))}: expected rows of an epoch, or until the "
                "'first' or the 'last' dataset has come once"
            )
        return min(passes) if length == "first" else max(passes)
    return whole("length", length, 1)


def _slots(weights: Sequence[float], records: Sequence[int]) -> list[int]:
    """Weights as whole slots of a period: exact when they are simple ratios."""
    try:
        exact = [_fraction(weight) for weight in weights]
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


def _fraction(weight: Any) -> Fraction:
    if isinstance(weight, str):  # Fraction would read "1/3"
        raise TypeError
    return (
        Fraction(weight) if isinstance(weight, (int, float, Fraction)) else Fraction(float(weight))
    )


def _alike(datasets: Sequence[Any]) -> Any:
    """The first of them, when they can be mixed. Raises OptionError."""
    if not isinstance(datasets, Sequence) or not datasets:
        raise OptionError(
            f"mix: expected a list of ShardDatasets, found {printable(repr(datasets))}"
        )
    for dataset in datasets:
        if not isinstance(dataset, Stream) or isinstance(dataset, Mixture):
            raise OptionError(f"mix: expected ShardDatasets, found {type(dataset).__name__}")
    first = datasets[0]
    for name, shown in _COMMON.items():
        for number, dataset in enumerate(datasets):
            here, there = getattr(first, name), getattr(dataset, name)
            if here != there and not (name == "_structure" and Any in (here, there)):
                raise OptionError(
                    f"mix: {shown} of dataset {number}: {printable(repr(there))}, and of dataset "
                    f"0: {printable(repr(here))}; give both the same"
                )
    for number, dataset in enumerate(datasets):
        if not dataset.records:
            raise OptionError(f"mix: dataset {number} holds no records")
    return first


# What all datasets of a mixture must have alike, and what users call it.
_COMMON = {
    "batch_size": "batch_size",
    "tail": "tail",
    "seed": "seed",
    "given_ranks": "rank and world_size",
    "_structure": "fields",
}
