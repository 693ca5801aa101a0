"""Make the cards of a page: what the index and the key of each record say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from ..dataset.reader import Reader
from ..errors import ShardioError, printable
from ..formats.base import Shard
from .columns import SIZES
from .results import Card

THREADS = 32  # that wait for an object store side by side
MAX_KEY = 1_000  # characters of a key that are shown


class Cards:
    """Make cards of records by number, in any order."""

    def __init__(self, reader: Reader, tell: Callable[[int, str | None, str, str], object]) -> None:
        """tell: called with number, key, shard and message of each record that cannot be read."""
        self._reader, self._tell = reader, tell
        self.pool = ThreadPoolExecutor(THREADS) if reader.storage.remote else None

    def close(self) -> None:
        """End the threads."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def __call__(self, numbers: Sequence[int], first: int, sort: str | None) -> list[Card]:
        """Return the cards of these records, at the positions from `first` on.

        sort: the column whose values they show.
        """
        positions = range(first, first + len(numbers))
        one = partial(self.one, sort=sort)
        if self.pool is None:
            return [*map(one, numbers, positions)]
        self._reader.will_open({self._reader.locate(number)[0] for number in numbers})
        return [*self.pool.map(one, numbers, positions)]

    def one(self, number: int, position: int, sort: str | None = None) -> Card:
        """Return the card of one record."""
        reader = self._reader
        at, record = reader.locate(number)
        name = printable(reader.manifest.shard(at).name, MAX_KEY)
        values: dict[str, Any] = {}
        key, damaged, value = "", None, None
        try:
            shard = reader.shard(at)
            values = {name: _value(shard, name, record) for name in ("label", "width", "height")}
            values[SIZES] = int(shard.sizes[record])
            value = values[SIZES] if sort == SIZES else _value(shard, sort or "", record)
            key = printable(shard.key(record), MAX_KEY)
        except ShardioError as error:
            damaged = str(error)
            self._tell(number, None, name, damaged)
        return Card(
            number=number,
            position=position,
            key=key,
            label=_integer(values.get("label")),
            class_name=self.class_name(values.get("label")),
            shard=name,
            shard_number=at,
            bytes=values.get(SIZES, 0),
            width=_integer(values.get("width")),
            height=_integer(values.get("height")),
            value=value,
            damaged=damaged,
        )

    def class_name(self, label: Any) -> str | None:
        """Return the name of a label, if it has one."""
        classes = self._reader.manifest.classes
        if classes is None or type(label) is not int or not 0 <= label < len(classes):
            return None
        return printable(classes[label])


def _value(shard: Shard, name: str, record: int) -> Any:
    """Return a value of a column as Python has it; None where it has none."""
    column = shard.columns.get(name)
    value = None if column is None else column[record]
    if value is np.ma.masked:
        return None
    return value.item() if isinstance(value, np.generic) else value


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None
