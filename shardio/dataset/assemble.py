"""Assemble rows to items, and items to batches: one way for DataLoader, loaders and mixtures.

Each array of a row is written to its place in the batch at once, and a built-in transform writes
its image there itself. `collate` takes columns that are complete as they are.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import torch

from ..errors import OptionError, name_record
from ..order.options import Options
from ..order.partition import Partition
from .collate import (
    TENSORS,
    Names,
    allocate,
    collating_into,
    empty,
    is_planes,
    places_of,
    ragged_fields,
    rows_of,
)
from .decode import ThisRecord
from .encoded import Empty
from .protocol import BatchReader, BatchRows
from .ranks import Consumers

VALID = "valid"  # the field that tail="exact" adds

_ARRAYS = (np.ndarray, torch.Tensor)
_LEAST = 512  # bytes of an array that is worth 1 us to put in its place early

_Like = tuple[bool, Any, Any]  # of a column: whether its rows are tensors, their shape, their dtype


class Assembler:
    """Assemble the batches of one consumer's share, as the dataset and these options say.

    options: of this pass; the dataset may have others by now.
    """

    def __init__(
        self, stream: BatchReader, options: Options, share: Partition, consumers: Consumers
    ) -> None:
        self.reader = stream.read_share(share, consumers, options)
        self._collate_fn = stream.collate_fn
        ragged = ragged_fields(stream.collate_fn)
        self._is_own = ragged is not None  # whether collate_fn is `collate`
        self._ragged = frozenset(ragged or ())  # fields that become lists
        self._exact = share.tail == "exact"  # each item gets the field `valid`
        self._fields = stream.item_fields
        if self._exact and self._fields is not None:
            self._fields = (*self._fields, VALID)
        self._encoded = stream.encoded_fields if self._is_own else ()
        self._image = stream.image_column
        self._has_columns = self._is_own  # as far as the batch before tells

    def batches(self, work: ThisRecord, *, one_by_one: bool) -> Iterator[Any]:
        """Yield all batches; one_by_one: their items instead."""
        for rows in self.reader:
            if one_by_one:
                yield from self._items(rows, work, None)
            else:
                yield self._batch(rows, work)

    def _batch(self, rows: BatchRows, work: ThisRecord) -> Any:
        """Make a batch: as a whole where that is possible, else of its items, one by one."""
        batch = self.whole(rows, empty)
        if batch is None:
            # A tenth less CPU time for 224 x 224: no array of its own for each image, and no copy.
            columns = self.columns(rows, allocate) if self._has_columns else None
            items = list(self._items(rows, work, columns))
            work.number = -1
            batch = self.collate(rows, items, columns)
            self._has_columns = bool(columns)
        return batch

    def whole(self, rows: BatchRows, empty: Empty) -> Any:
        """Make a collated batch without its items. None: this one is to be made of them.

        empty: gives the memory for its images.
        """
        # A batch that is made as a whole has no lists.
        if not self._is_own or self._ragged:
            return None
        batch = self.reader.whole(rows, empty)
        if batch is None or not self._exact:
            return batch
        return mark_all(batch, rows.valid, rows.size)

    def columns(self, rows: BatchRows, empty: Empty) -> Columns | None:
        """Return the columns of a batch, which its rows are written to; None: a user collates."""
        if not self._is_own:
            return None
        return Columns(
            rows.size, ragged=self._ragged, fields=self._fields, empty=empty, image=self._image
        )

    def item(
        self, rows: BatchRows, i: int, row: Any, work: ThisRecord, columns: Columns | None
    ) -> Any:
        """Make the item of row i, its arrays in their places of the columns. In any thread."""
        if columns is None:
            item = self.reader.make(row, work)
        else:
            work.out = columns.image(i)
            try:
                item = self.reader.make(row, work)
            finally:
                work.out = None  # or it would keep the batch
        if self._exact:
            item = mark(item, i < rows.valid and not work.filled)
        return item if columns is None else columns.place(i, item)

    def _items(self, rows: BatchRows, work: ThisRecord, columns: Columns | None) -> Iterator[Any]:
        """Yield the items of a batch. An error of making one names the record that it was of."""
        # A StopIteration of a transform leaves a generator as a RuntimeError, and not, as of map,
        # as if there were no more rows. Where an item is only made, it costs 0.1 us less here.
        make = self.reader.make if columns is None and not self._exact else None
        for i, row in enumerate(self.reader.rows(rows)):
            try:
                item = make(row, work) if make else self.item(rows, i, row, work, columns)
            except Exception as error:
                name_record(error, work.record)
                raise
            work.number = -1
            yield item

    def collate(self, rows: BatchRows, items: list[Any], columns: Columns | None) -> Any:
        """Collate the items of a batch. An error of a user's collate_fn names their records."""
        names = Names(partial(self.reader.names, rows), self._fields) if self._is_own else None
        try:
            with collating_into(columns, names, self._encoded):
                return self._collate_fn(items)
        except Exception as error:
            if names is None:
                records = self.reader.names(rows)
                name_record(error, f"a batch of {len(records)}: {records[0]}, to {records[-1]}")
            raise


class Columns:
    """Hold the columns of a batch: a collate.Memory. Threads may place rows side by side.

    size    rows of the batch
    ragged  fields that become lists, by place or name
    fields  the names of the fields of items that are tuples, where they are known
    empty   gives the memory
    image   the field that a built-in transform makes, and its shape; None: there is none
    """

    def __init__(
        self,
        size: int,
        *,
        ragged: Collection[int | str],
        fields: Sequence[str] | None,
        empty: Empty,
        image: tuple[int | str, tuple[int, ...]] | None = None,
    ) -> None:
        self.empty = empty
        self._size = size
        self._ragged, self._fields = ragged, fields
        self._lock = threading.Lock()
        self._columns: dict[int | str, _Column] = {}
        self._image: Sequence[Any] = ()  # where a built-in transform writes
        if image is not None:
            name, shape = image
            like = False, shape, np.dtype(np.uint8)
            self._columns[name] = column = _Column(size, like, empty)
            self._image = column.rows

    def __len__(self) -> int:
        """Return the number of columns that there are so far."""
        return len(self._columns)

    def clear(self) -> None:
        """Forget all memory."""
        self._columns.clear()
        self._image = ()

    def column(self, values: Sequence[Any]) -> torch.Tensor | None:
        """Return the tensor whose rows these values are; None: they are not all in place."""
        for column in self._columns.values():
            if values[0] is column.rows[0]:
                same = len(values) == len(column.rows) and all(map(is_, values, column.rows))
                return column.tensor if same else None
        return None

    def image(self, i: int) -> Any:
        """Return the array that the image of row i may be written to; None: there is none."""
        return self._image[i] if self._image else None

    def place(self, i: int, item: Any) -> Any:
        """Return the item of row i, its arrays in their rows of the batch."""
        ragged = self._ragged
        if type(item) is dict:
            return {
                name: self._placed(name, i, value)
                if type(value) in _ARRAYS and name not in ragged
                else value
                for name, value in item.items()
            }
        if type(item) is not tuple:
            return item
        if ragged:
            ragged = places_of(ragged, item, self._fields)
        return tuple(
            [
                self._placed(place, i, value)
                if type(value) in _ARRAYS and place not in ragged
                else value
                for place, value in enumerate(item)
            ]
        )

    def _placed(self, name: int | str, i: int, value: Any) -> Any:
        """Return an array of row i in its row of the column; itself, where it has none there."""
        column = self._columns.get(name)
        if column is not None and value is column.rows[i]:  # a built-in transform wrote it there
            return value
        is_tensor = type(value) is torch.Tensor
        if is_tensor and is_planes(value):
            is_tensor, value = False, rows_of(value)
        if is_tensor and not is_only_values(value):  # copying it would lose the rest
            return value
        like = is_tensor, value.shape, value.dtype
        if column is None:
            if not is_tensor and (value.dtype.type not in TENSORS or not value.dtype.isnative):
                return value
            if value.nbytes < _LEAST:
                return value
            with self._lock:
                column = self._columns.get(name)
                if column is None:
                    column = self._columns[name] = _Column(self._size, like, self.empty)
        if column.like != like:
            return value  # rows differ: collating will say so
        row = column.rows[i]
        if is_tensor:
            row.copy_(value)
        else:
            row[...] = value
        return row


class _Column:
    """Hold a field of a batch, and views of its rows."""

    def __init__(self, size: int, like: _Like, empty: Empty) -> None:
        self.like = like
        is_tensor, shape, dtype = like
        kind = dtype if is_tensor else torch.from_numpy(np.empty(0, dtype)).dtype
        self.tensor = empty((size, *shape), kind)
        self.rows: Any = self.tensor.unbind() if is_tensor else list(self.tensor.numpy())


def is_only_values(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is no more than its values; others are pickled as torch does it."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def mark(item: Any, valid: Any) -> Any:
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
    return mark(batch, torch.arange(size) < valid)
