"""Read several datasets as one stream: each batch holds rows of all of them, in proportion.

How it works. A pattern (order/mixture) says which dataset each row of an epoch comes from, and so
which ranges of that dataset's passes a batch needs. Each dataset reads its own ranges ahead, as a
consumer of its own order; the mixture takes one row after another from the dataset whose turn it
is. The rows of an epoch are dealt to ranks and workers in batches, as those of one dataset are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby, islice, pairwise, repeat, zip_longest
from operator import itemgetter
from typing import Any

import numpy as np

from ..errors import OptionError, StateError, printable
from ..order.mixture import Length, MixedOptions, Pattern, batch_ranges, epoch_rows, whole_slots
from ..order.options import Options
from ..order.partition import Partition, RowRanges
from ..order.rng import MIX, key
from .decode import ThisRecord
from .protocol import Component, ShareReader
from .ranks import Consumers
from .stream import Stream

# What tells one dataset of a mixture in a saved state: a list of these, to stay below 1 KB.
_NAMES = ("dataset", "selection", "shuffle_buffer", "canonical_workers", "unit")

_Range = tuple[int, int]  # of rows of an epoch: start, stop


class Mixture(Stream):
    """Mix datasets by weights. `ShardDataset.mix` makes it, and explains the options."""

    options: MixedOptions

    def __init__(
        self,
        datasets: Sequence[Any],
        weights: Sequence[float] | None,
        *,
        length: Length,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        """Check that the datasets can be mixed, and deal the rows. Raises OptionError."""
        first = _check_alike(datasets)
        self._datasets: Sequence[Component] = list(datasets)
        columns = {dataset.image_column for dataset in self._datasets}
        self.image_column = columns.pop() if len(columns) == 1 else None
        encoded = [frozenset(dataset.encoded_fields) for dataset in self._datasets]
        self.encoded_fields = frozenset.intersection(*encoded)
        self.device_crop = first.device_crop
        self.skips = tuple(one for dataset in self._datasets for one in dataset.skips)
        records = [dataset.records for dataset in self._datasets]
        self._pattern = Pattern(whole_slots(records if weights is None else weights, records))
        self.length = epoch_rows(
            length, [self._pattern.rows_until(d, n) for d, n in enumerate(records)]
        )
        super().__init__(
            MixedOptions.of([dataset.options for dataset in self._datasets]),
            np.array([self.length], np.int64),
            collate_fn=first.collate_fn if collate_fn is None else collate_fn,
            ranks=first.given_ranks,
        )

    def __repr__(self) -> str:
        """Show the rows of an epoch, and each dataset's part of them."""
        parts = ", ".join(
            f"{self._pattern.fraction(d):.4g} of {dataset!r}"
            for d, dataset in enumerate(self._datasets)
        )
        return f"<{self.length:,} rows an epoch: {parts}>"

    @property
    def name(self) -> str:
        """Return the words by which messages call the mixture."""
        return f"the mixture of {len(self._datasets)} datasets"

    @property
    def item_fields(self) -> tuple[str, ...] | None:
        """Return the names of the fields of items, where known; None if datasets differ."""
        fields = {dataset.item_fields for dataset in self._datasets}
        return fields.pop() if len(fields) == 1 else None

    @property
    def evaluates(self) -> bool:
        """Return whether every pass reads the same epoch: also where no dataset is shuffled."""
        return super().evaluates or not any(part.shuffle for part in self.options.parts)

    def read_share(self, share: Partition, consumers: Consumers, options: Options) -> ShareReader:
        """Read a consumer's share, of a pass with these options."""
        assert isinstance(options, MixedOptions)
        pattern, length = self._pattern, self.length
        return _MixedReader(
            self._datasets, pattern, length, options, share, consumers, self.hands_out
        )

    def _identity(self) -> dict[str, Any]:
        """Return the part of a saved state that tells this mixture from others."""
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


@dataclass
class _MixedReader(ShareReader):
    """Read a consumer's share of a mixture. A row is a dataset's reader, and its row."""

    datasets: Sequence[Component]
    pattern: Pattern
    length: int
    options: MixedOptions
    share: Partition
    consumers: Consumers
    hands_out: bool

    def __iter__(self) -> Iterator[_MixedRows]:
        """Iterate over the rows of each batch."""
        share = self.share
        size = share.batch_size or 1
        ranges = partial(batch_ranges, share)
        rows = self._rows(ranges)
        for step, (start, stop) in zip(share.worker_steps, ranges(), strict=True):
            count = stop - start
            own: Iterable[Any] = islice(rows, count)
            if count == size:
                yield _MixedRows(own, count, count)
                continue
            repeats = share.batch(step).repeats.tolist()
            cuts = [0, *(i for i, (a, b) in enumerate(pairwise(repeats), 1) if b != a + 1)]
            again = [
                self._rows(partial(iter, [(repeats[a], repeats[b - 1] + 1)]))
                for a, b in pairwise([*cuts, len(repeats)])
                if a < b
            ]
            yield _MixedRows(chain(own, *again), count, count + len(repeats))

    def rows(self, batch: _MixedRows) -> Iterator[Any]:
        """Iterate over the rows of a batch, and note their records."""
        for row in batch.rows:
            reader, (number, *_) = row
            batch.seen.append((reader, number))
            yield row

    def make(self, row: tuple[ShareReader, Any], work: ThisRecord) -> Any:
        """Make the item of a row. Any thread may call it."""
        reader, own = row
        return reader.make(own, work)

    def names(self, batch: _MixedRows) -> list[str]:
        """Return the names of the records of the rows that were read."""
        return [reader.record_name(number) for reader, number in batch.seen]

    def _rows(self, ranges: Callable[[], Iterator[_Range]]) -> Iterator[Any]:
        """Iterate over the rows of these ranges.

        ranges: called once more a dataset, since datasets look ahead unequally far.
        """
        feeds = [self._passes(d, ranges()) for d in range(len(self.datasets))]
        for start, stop in ranges():
            for owner in self.pattern.owners(start, stop):
                yield next(feeds[owner])

    def _passes(self, d: int, ranges: Iterator[_Range]) -> Iterator[Any]:
        """Iterate over the rows of dataset d in these ranges, pass after pass."""
        dataset, share = self.datasets[d], self.share
        options = replace(self.options.parts[d], seed=key(MIX, self.options.seed, d))
        before = share.epoch.epoch * self.pattern.count(d, self.length)
        parts = self.pattern.passes(d, ranges, records=dataset.records, before=before)
        for number, group in groupby(parts, itemgetter(0)):
            reads = RowRanges(
                options.epoch(dataset.counts, number),
                ((start, stop) for _, start, stop in group),
                batch_size=math.ceil((share.batch_size or 1) * self.pattern.fraction(d)),
                consumers=share.world_size * share.num_workers,
                world_size=share.world_size,
            )
            reader = dataset.read_share(reads, self.consumers, options, hands_out=self.hands_out)
            for batch in reader:
                yield from zip(repeat(reader), reader.rows(batch))


@dataclass
class _MixedRows:
    """Hold the rows of a batch, and which records of these were read."""

    rows: Iterable[Any]
    valid: int
    size: int
    seen: list[tuple[Any, int]] = field(default_factory=list)


def _check_alike(datasets: Sequence[Component]) -> Component:
    """Check that datasets can be mixed, and return the first. Raises OptionError."""
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
            if here != there and not (name == "structure" and Any in (here, there)):
                raise OptionError(
                    f"mix: {shown} of dataset {number}: {printable(repr(there))}, and of dataset "
                    f"0: {printable(repr(here))}; give both the same"
                )
    for number, dataset in enumerate(datasets):
        ours, theirs = first.label_names, dataset.label_names
        if ours is not None and theirs is not None and ours != theirs:
            at = next(i for i, pair in enumerate(zip_longest(ours, theirs)) if pair[0] != pair[1])
            here, there = (
                printable(repr(names[at])) if at < len(names) else "no class"
                for names in (ours, theirs)
            )
            raise OptionError(
                f"mix: label {at} is {there} in dataset {number}, and {here} in dataset 0; pack "
                "one with --classes of the other's directory, or give a target_transform, or leave "
                "'label' out of `fields`"
            )
        if not dataset.records:
            raise OptionError(f"mix: dataset {number} holds no records")
        if dataset.options.nodes > 1:
            raise OptionError(
                f"mix: order=Order(nodes={dataset.options.nodes}) of dataset {number}: a mixture "
                "deals its rows one by one, so that each node reads all shards; leave nodes out"
            )
    return first


# What all datasets of a mixture must have alike, and what users call it.
_COMMON = {
    "batch_size": "batch_size",
    "tail": "tail",
    "seed": "seed",
    "given_ranks": "rank and world_size",
    "structure": "fields",
    "device_crop": "what decode='cuda' gives",
}
