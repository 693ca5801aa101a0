"""Rows to items, and items to batches: what all ways of reading share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import OptionError, name_record
from .collate import Empty, Names, into
from .decode import Work

VALID = "valid"  # the field that tail="exact" adds


class Items(NamedTuple):
    """What the items of one batch are made of. Without a batch_size: of some samples in a row."""

    rows: Iterable[Any]  # in order; for one thread at a time
    make: Callable[[Any, Work], Any]  # of a row its item; by any thread
    valid: int  # items before this one are the epoch's own; those from it on repeat some
    size: int
    whole: Callable[[Empty], Any] | None = None  # the collated batch at once, or None: not this one
    records: Callable[[], Sequence[str]] | None = None  # what messages call them, once all are read


def items_of(batch: Items, work: Work) -> Iterator[Any]:
    """The items of a batch. What making one raises names the record that it was of."""
    # A StopIteration of a transform leaves a generator as a RuntimeError, and not, as of map, as if
    # there were no more rows.
    make = batch.make
    for row in batch.rows:
        try:
            item = make(row, work)
        except Exception as error:
            name_record(error, work.record)
            raise
        work.number = -1
        yield item


def collated(
    collate_fn: Callable[[list[Any]], Any],
    items: list[Any],
    batch: Items,
    names: Names | None,
    memory: Any = None,
) -> Any:
    """The batch that a collate_fn makes of these items. What it raises names their records.

    names: given for a collate_fn of ours.
    """
    try:
        with into(memory, names):
            return collate_fn(items)
    except Exception as error:
        if names is None and batch.records is not None:
            records = batch.records()
            name_record(error, f"a batch of {len(records)}: {records[0]}, to {records[-1]}")
        raise


def mark(item: Any, valid: bool) -> Any:
    """The item with the field that tail="exact" adds."""
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
    """As `mark`, of a collated batch: rows before row `valid` are."""
    return mark(batch, torch.arange(size) < valid)  # type: ignore[arg-type]
