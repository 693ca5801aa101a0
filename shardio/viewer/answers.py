"""Find the rows that answer a query: filtered, sorted, or in training order; each made once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from ..dataset.reader import Reader
from ..order.epoch import Epoch
from ..order.options import RequestedOptions
from ..order.partition import Partition
from ..order.rng import Int64s
from ..order.subset import All, Selection, Word, conditions, mark_where
from ..units import unexpected
from .cache import BackgroundCache
from .columns import Columns
from .results import Query
from .rows import Rows, Sorted, Stored, Training, epoch_bytes

_QUICK = 1 << 18  # records whose permutation is made at once, in 20 ms


class Answers:
    """Answer queries about one dataset. Safe for threads."""

    def __init__(self, reader: Reader, columns: Columns, cache: BackgroundCache) -> None:
        """Keep what is needed to answer."""
        self._reader, self._columns, self._cache = reader, columns, cache

    def rows(self, query: Query, wait_s: float | None) -> Rows:
        """Return the rows of a query.

        Raises OptionError for one that cannot be met, PendingError if it takes longer than wait_s.
        """
        query = self._checked(query)
        remaining = self._reader.remaining
        if query == Query():
            return Stored(self._reader.records, remaining)
        if query.order == "training" and not (_chooses(query) or query.sort):
            partition = self._partition(query, remaining)
            if not partition.epoch.shuffles_all or partition.epoch.records <= _QUICK:
                return Training(partition, self._starts(remaining), remaining)
        return self._cache.make(query, lambda: self._make(query), wait_s)

    def chosen(self, query: Query, wait_s: float | None) -> Selection | None:
        """Return the records that `where` and `label` choose; None: all. Raises as `rows`.

        Records that were dropped are none.
        """
        if not _chooses(query):
            return self._reader.remaining
        return self._cache.make(_choice(query), lambda: self._choose(query), wait_s)

    def _checked(self, query: Query) -> Query:
        """Return a query whose options are right, with only those that have an effect."""
        if query.order not in ("storage", "training"):
            raise unexpected("order", query.order, "'storage' or 'training'")
        if query.sort is not None:
            self._columns.check(query.sort)
        else:
            query = replace(query, descending=False)
        if query.order == "training":
            return replace(query, step=None, search="")
        return Query(
            where=query.where, label=query.label, sort=query.sort, descending=query.descending
        )

    def _make(self, query: Query) -> Rows:
        """Make the rows of a query, in the background."""
        chosen = self._choose(query) if _chooses(query) else self._reader.remaining
        values = None if query.sort is None else self._columns(query.sort)
        if query.order == "training":
            partition = self._partition(query, chosen)
            epoch = partition.epoch
            if epoch.records:
                epoch.locate(np.zeros(1, np.int64))  # makes the permutation, where there is one
            rows: Rows = Training(partition, self._starts(chosen), chosen, values, query.descending)
        elif values is not None:
            rows = Sorted(values, None if chosen is None else chosen.numbers, query.descending)
        else:
            assert chosen is not None
            rows = Stored(len(chosen), chosen)
        return self._cache.put(query, rows, rows.bytes)

    def _choose(self, query: Query) -> Selection:
        """Choose the records that meet all conditions, in the background."""
        key = _choice(query)
        found: Selection | None = self._cache.get(key)
        if found is not None:
            return found
        wanted = conditions(query.where)
        if query.label is not None:
            text = query.label if isinstance(query.label, int) else Word(query.label)
            wanted.setdefault("label", All()).append(text)
        reader = self._reader
        for name in wanted:
            self._columns.check(name)
        marks = mark_where(wanted, self._columns, reader.stored_records, reader.manifest.classes)
        marks[reader.dropped] = False
        numbers = np.flatnonzero(marks)
        return self._cache.put(key, Selection(numbers, reader.starts), numbers.nbytes)

    def _starts(self, chosen: Selection | None) -> Int64s:
        """Return the first record of each shard; of a selection, its place there."""
        return self._reader.starts if chosen is None else chosen.starts

    def _partition(self, query: Query, chosen: Selection | None) -> Partition:
        """Return the part of a rank in an epoch. Raises OptionError."""
        reader = self._reader
        counts = reader.manifest.shard_records if chosen is None else chosen.counts
        requested = RequestedOptions(
            query.batch_size,
            query.shuffle_buffer,
            query.seed,
            query.tail,  # type: ignore[arg-type]  # Partition checks it
            query.spans,
            query.unit,
            None if query.shuffle else False,
            query.nodes,
        )
        options = requested.resolve(reader.mean_bytes, records=int(counts.sum()))
        key = ("epoch", _choice(query), query.epoch, replace(options, tail="pad"))
        epoch: Epoch | None = self._cache.get(key)
        if epoch is None:
            epoch = options.epoch(counts, query.epoch)
            self._cache.put(key, epoch, epoch_bytes(epoch))
        return options.partition(epoch, rank=query.rank, world_size=query.world_size)


def _chooses(query: Query) -> bool:
    return bool(query.where) or query.label is not None


def _choice(query: Query) -> Hashable:
    """Return the key of the records that a query chooses."""
    return "choice", query.where, query.label
