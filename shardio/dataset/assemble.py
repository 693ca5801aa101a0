"""Assemble rows to items, and items to batches: one way for DataLoader, loaders and mixtures."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import OptionError, name_record
from .collate import Empty, Names, collating_into, empty, fresh, ragged_fields
from .decode import Progress

VALID = "valid"  # the field that tail="exact" adds


class PendingBatch(NamedTuple):
    """Hold a batch that is not made yet. Without a batch_size: some samples in a row."""

    rows: Iterable[Any]  # in order; for one thread at a time
    make: Callable[[Any, Progress], Any]  # of a row its item; by any thread
    valid: int  # items before this one are the epoch's own; those from it on repeat some
    size: int
    at_once: Callable[[Empty], Any] | None = None  # the collated batch, or None: not this one
    records: Callable[[], Sequence[str]] | None = None  # what messages call them, once all are read


class Assembler:
    """Assemble batches of pending ones. Iterations and loader processes share how.

    collate_fn  a list of items to a batch
    fields      the names of the fields of items that are tuples, where they are known
    exact       each item gets the field `valid`: tail="exact"
    encoded     the fields of items that are image files, by name or place
    image       the field of items that a built-in transform makes, by name or place
    """

    def __init__(
        self,
        collate_fn: Callable[[list[Any]], Any],
        *,
        fields: Sequence[str] | None,
        exact: bool,
        encoded: Collection[int | str] = (),
        image: int | str | None = None,
    ) -> None:
        ragged = ragged_fields(collate_fn)
        self.is_own = ragged is not None  # whether collate_fn is `collate`
        self.ragged = frozenset(ragged or ())  # fields that become lists
        self.fields = fields
        self.exact = exact
        self._encoded = encoded
        self._collate_fn = collate_fn
        self._image = image if self.is_own else None
        self._shape: tuple[int, ...] | None = None  # of the image of the batch before

    def assemble(self, pending: PendingBatch, work: Progress) -> Any:
        """Make a batch: at once where that is possible, else of its items, one by one."""
        batch = self.at_once(pending, empty)
        if batch is None:
            # A tenth less CPU time for 224 x 224: no array of its own for each image, and no copy.
            images = None if self._shape is None else _Images(pending, self._shape)
            items = list(self.items(pending if images is None else images.pending, work))
            work.number = -1
            if self._image is not None and items:
                image = items[0][self._image]
                self._shape = image.shape if type(image) is np.ndarray else None
            batch = self.collate(pending, items, images)
        return batch

    def at_once(self, pending: PendingBatch, empty: Empty) -> Any:
        """Make a collated batch without its items. None: this one is to be made of them.

        empty: gives the memory for its images.
        """
        # A batch that is made at once has no lists.
        if pending.at_once is None or not self.is_own or self.ragged:
            return None
        batch = pending.at_once(empty)
        if batch is None or not self.exact:
            return batch
        return mark_all(batch, pending.valid, pending.size)

    def rows(self, pending: PendingBatch) -> Iterator[tuple[Any, bool | None]]:
        """Yield each row, in order, and how its item is to be marked; None: it is not.

        A caller makes each item by `pending.make`, and marks it by `mark`.
        """
        return zip(pending.rows, marks(pending) if self.exact else repeat(None), strict=False)

    def items(self, pending: PendingBatch, work: Progress) -> Iterator[Any]:
        """Give the items of a batch. An error of making one names the record that it was of."""
        items = _items(pending, work)
        return map(mark, items, marks(pending)) if self.exact else items

    def collate(self, pending: PendingBatch, items: list[Any], memory: Any = None) -> Any:
        """Collate the items of a batch. An error of a user's collate_fn names their records.

        memory: a collate.Memory, where the columns go.
        """
        names = Names(pending.records, self.fields) if self.is_own else None
        try:
            with collating_into(memory, names, self._encoded if self.is_own else ()):
                return self._collate_fn(items)
        except Exception as error:
            if names is None and pending.records is not None:
                records = pending.records()
                name_record(error, f"a batch of {len(records)}: {records[0]}, to {records[-1]}")
            raise


class _Images:
    """Have the images of a batch made in its memory: a collate.Memory.

    pending: the batch, whose `make` gives each row's image its place.
    """

    def __init__(self, pending: PendingBatch, shape: tuple[int, ...]) -> None:
        self._tensor = fresh((pending.size, *shape), torch.uint8)
        self._rows = list(self._tensor.numpy())
        self.pending = pending._replace(make=_making(pending.make, iter(self._rows)))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Take memory for another column."""
        return fresh(shape, dtype)

    def column(self, values: Sequence[Any]) -> torch.Tensor | None:
        """Return the images, if these are all of them."""
        whole = len(values) == len(self._rows) and all(map(is_, values, self._rows))
        return self._tensor if whole else None


def _making(
    make: Callable[[Any, Progress], Any], rows: Iterator[Any]
) -> Callable[[Any, Progress], Any]:
    """Return a `make` that lets the image of each item be written to the next of these rows."""

    def make_in_place(row: Any, work: Progress) -> Any:
        work.out = next(rows)
        try:
            return make(row, work)
        finally:
            work.out = None  # or it would keep the batch

    return make_in_place


def _items(pending: PendingBatch, work: Progress) -> Iterator[Any]:
    """Yield the items of a batch, without marks: most need none, and it costs each 80 ns."""
    # A StopIteration of a transform leaves a generator as a RuntimeError, and not, as of map, as if
    # there were no more rows.
    make = pending.make
    for row in pending.rows:
        try:
            item = make(row, work)
        except Exception as error:
            name_record(error, work.record)
            raise
        work.number = -1
        yield item


def assembled(
    assembler: Assembler, reads: Iterator[PendingBatch], work: Progress, *, one_by_one: bool
) -> Iterator[Any]:
    """Yield the batches of these reads; one_by_one: their items instead."""
    # No method of an iteration: the generator would keep the iterator that drops it.
    for pending in reads:
        if one_by_one:
            yield from assembler.items(pending, work)
        else:
            yield assembler.assemble(pending, work)


def marks(pending: PendingBatch) -> Iterator[bool]:
    """Give the marks of a batch's items under tail="exact": True for the epoch's own."""
    return chain(repeat(True, pending.valid), repeat(False))


def mark(item: Any, valid: bool) -> Any:
    """Return the item with the field that tail="exact" adds. Raises OptionError."""
    if isinstance(item, tuple):
        return (*item, valid)
    if not isinstance(item, dict) or VALID in item:
        what = "has a field of that name already" if isinstance(item, dict) else "is neither"
        raise OptionError(
            f"tail='exact' adds {VALID!r} to tuples and dicts, and this {type(item).__name__}, as "
            f"map or the dataset gives it, {what}: give a map that returns such without it"
        )
    if type(item) is dict:
        return {**item, VALID: valid}  # a map may keep its own
    item = copy.copy(item)
    item[VALID] = valid
    return item


def mark_all(batch: Any, valid: int, size: int) -> Any:
    """Mark a collated batch as `mark` does its items: rows before row `valid` are valid."""
    return mark(batch, torch.arange(size) < valid)  # type: ignore[arg-type]
