"""Columns of the index of a whole dataset: its scalar fields, sizes of records, hashes of keys.

One walk over the shards reads all columns, since each index is read and checked as a whole; hashes
are read by themselves, when a key is looked for. At 10^7 records a label takes 20 MB, sizes 40 MB
and hashes 40 MB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..dataset.reader import Reader
from ..dataset.sequence import shard_column
from ..errors import DamageError, OptionError, ShardioError, printable, there_are
from ..formats.base import Column, Shard
from ..formats.index import EMPTY
from ..names import KEY
from ..units import show_size
from .cache import BackgroundCache
from .rows import column_bytes

SIZES = "bytes"  # of each record in storage
HASHES = ""  # of keys; no field has this name
_AHEAD = 16  # shards whose ends are asked for ahead, by URL


class Columns:
    """Read columns of a dataset's index when they are asked for, and keep them."""

    def __init__(self, reader: Reader, cache: BackgroundCache, limit: int) -> None:
        """limit: bytes that the columns of one walk may take."""
        self._reader, self._cache, self._limit = reader, cache, limit
        self._kinds = {n: k for n, k in reader.manifest.schema.fields if k in EMPTY}
        self.damaged: dict[int, str] = {}  # shards whose index could not be read, and why

    @property
    def names(self) -> list[str]:
        """Return the names that filter and sort."""
        return [SIZES, *(name for name in self._kinds if name != SIZES)]

    def check(self, name: str) -> str:
        """Return the name of a column. Raises OptionError."""
        if name == KEY:
            raise OptionError("the index has no keys, only their hashes; search for keys instead")
        if name not in self.names:
            raise OptionError(
                f"no column is called {printable(name)!r}; {there_are(self.names, name)}"
            )
        return name

    def __call__(self, name: str) -> Column:
        """Return a column, masked where it has no value; reads the index if it must.

        Its entries are by number: those of records that were dropped are there, too.

        Call it in the background. Raises OptionError; StorageError by URL.
        """
        found: Column | None = self._cache.get(("column", name))
        return self._walk(name) if found is None else found

    def soon(self, name: str, wait_s: float | None) -> Column:
        """Return a column, read in the background. Raises as `BackgroundCache.make` and a call."""
        return self._cache.make(("column", name), lambda: self(name), wait_s)

    def _walk(self, wanted: str) -> Column:
        """Read all columns that there is room for, the wanted one for sure."""
        reader, count = self._reader, self._reader.stored_records
        names = [wanted]
        if wanted != HASHES and 8 * count * (len(self._kinds) + 1) <= self._limit:
            names = [SIZES, *self._kinds]
        elif 8 * count > self._limit:
            raise OptionError(
                f"a column of {count:,} records takes up to "
                f"{show_size(8 * count)}, and the view may keep {show_size(self._limit)}: "
                "allow more memory"
            )
        gathered = {name: _Gathered(count) for name in names}
        for number in range(reader.manifest.shards):
            self._cache.tell(number, reader.manifest.shards)
            reader.will_open(range(number + 1, min(number + 1 + _AHEAD, reader.manifest.shards)))
            self.take(number, gathered)
        self._cache.tell(reader.manifest.shards, reader.manifest.shards)
        found: dict[str, Column] = {}
        for name, of_name in gathered.items():
            column = of_name.column(EMPTY[self._kinds[name]] if name in self._kinds else "<u4")
            self._cache.put(("column", name), column, column_bytes(column))
            found[name] = column
        return found[wanted]

    def take(self, number: int, gathered: Mapping[str, _Gathered]) -> None:
        """Take the columns of one shard; they have no values if its index is damaged."""
        start, stop = self._reader.starts[number : number + 2].tolist()
        try:
            shard = self._reader.shard(number)
            for name, of_name in gathered.items():
                of_name.put(start, self._column(shard, name))
        except ShardioError as error:
            if self._reader.storage.remote and not isinstance(error, DamageError):
                raise  # a network that fails now is no property of the data
            self.damaged[number] = str(error)
            for of_name in gathered.values():
                of_name.skip(start, stop)

    def _column(self, shard: Shard, name: str) -> Column:
        if name == HASHES:
            return shard.key_hashes
        if name in self._kinds:
            return shard_column(shard, name, self._kinds[name])
        sizes: Column = shard.sizes[:]
        return sizes.astype(np.uint32) if int(sizes.max(initial=0)) >> 32 == 0 else sizes


class _Gathered:
    """A column that is put together part by part, at the least width that holds all of them.

    Lists of parts would keep the indexes of all shards in memory, of which they are views.
    """

    def __init__(self, records: int) -> None:
        self._records = records
        self._data: Column | None = None
        self._mask: Column | None = None

    def put(self, start: int, part: Column) -> None:
        """Put the values of records from a number on."""
        data = np.ma.getdata(part)
        if self._data is None:
            self._data = np.zeros(self._records, data.dtype)
        elif self._data.dtype != data.dtype:
            self._data = self._data.astype(_wider(self._data.dtype, data.dtype), copy=False)
        self._data[start : start + len(part)] = data
        if isinstance(part, np.ma.MaskedArray):
            self._masks()[start : start + len(part)] = np.ma.getmaskarray(part)

    def skip(self, start: int, stop: int) -> None:
        """Leave records without a value."""
        self._masks()[start:stop] = True

    def column(self, empty: str) -> Column:
        """Return the column, masked where there is no value; `empty` is its dtype without any."""
        data = np.zeros(self._records, empty) if self._data is None else self._data
        return data if self._mask is None else np.ma.MaskedArray(data, self._mask)

    def _masks(self) -> Column:
        if self._mask is None:
            self._mask = np.zeros(self._records, np.bool_)
        return self._mask


def _wider(one: np.dtype[Any], other: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that holds the values of both."""
    found = np.promote_types(one, other)
    floats = "f" in (one.kind, other.kind)  # numpy would make floats of int64 with uint64
    return found if floats or found.kind != "f" else np.dtype(object)
