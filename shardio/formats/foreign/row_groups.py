"""Rows in groups that are decoded as a whole: what files of Parquet and Arrow share.

A row is no range of the file: it lies in a group of rows, a range for each column. So a random row
costs reading and decoding its group, of the columns that are fields. The groups that were used last
are kept decoded, in a quarter of the memory that the machine has to spare, over all its cores.
Where the windows of a shuffled epoch are larger than that, groups are decoded again and again: a
smaller `shuffle_buffer` helps, or packing.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, ClassVar

import numpy as np

from ...errors import DamageError, SampleError, SourceError, printable
from ...machine import processors
from ...names import KEY
from ...storage.local import memory_available
from ..base import Opening, ShardInfo
from ..sample import Sample, Schema, pack_head
from .arrow_columns import (
    Get,
    as_key,
    can_be_key,
    getter,
    holds_files,
    is_bytes,
    kind_of,
    nulls_of,
    sizes_of,
)
from .base import CONVERT, ForeignFile, ForeignShard, Values, own_key

# Decoded row groups of all processes, one a core: this share of the memory to spare, as the page
# cache gets for announced windows. 4,000 images of 110 KB, shuffled: 3.9 ms each where they do not
# fit, as each row group is decoded 40 times; 0.3 ms where they do.
CACHED = 0.25
LEAST_CACHE = 256 << 20  # bytes, in each process, however small the machine is
# Bytes of a decoded row group: above, a random row costs seconds, and each process this memory.
MAX_GROUP = 1 << 30

_BLOCK = 1 << 20  # bytes of rows that become samples at once
_HELD = struct.Struct("<II")  # record, length of the head; then head and blobs, as in a record


class Group:
    """A decoded row group: its columns, and what gives single values of them, once asked for."""

    def __init__(
        self, arrow: Any, start: int, rows: int, arrays: dict[str, Any], least: int = 0
    ) -> None:
        self._arrow = arrow
        self.start, self.rows = start, rows  # its first record, and how many it has
        self.arrays = arrays  # by field, of `_simple` types
        size = max(least, sum(array.nbytes for array in arrays.values()))
        self.bytes = size + 64 * rows * len(arrays)
        self.kinds = {name: kind_of(arrow, array) for name, array in arrays.items()}
        self._gets: dict[str, Get] = {}

    def get(self, name: str) -> Get:
        """Return a function from a row's number in the group to its value, None for null."""
        if name not in self._gets:
            self._gets[name] = getter(self._arrow, self.arrays[name], self.kinds[name])
        return self._gets[name]

    def sizes(self) -> Any:
        """Return the bytes of each row: (rows,) int64."""
        sizes = np.zeros(self.rows, np.int64)
        for name, array in self.arrays.items():
            sizes += sizes_of(self._arrow, array, self.kinds[name])
        return sizes


class GroupedFile(ForeignFile):
    """A file whose rows lie in groups; a group is decoded on demand: the base of such formats.

    Rows are no byte ranges of the file: GroupedShard has what follows from that.
    """

    ranges = False
    group_name: ClassVar[str] = "row group"  # what the format calls a group
    saves: ClassVar[str]  # the method of a Hugging Face dataset that writes the format
    arrow: Any  # the package
    starts: list[int]  # of groups; all rows

    def decode(self, number: int) -> tuple[dict[str, Any], int]:
        """Decode a group that has rows: its columns, and bytes that these keep in memory at least.

        The columns are those in `wanted`, by field, of `simplified` types. Raises DamageError,
        SourceError, StorageError.
        """
        raise NotImplementedError

    def extent(self, group: int) -> tuple[int, int]:
        """Return the bytes at which a group begins and ends."""
        raise NotImplementedError

    def take_schema(self, schema: Any) -> None:
        """Take up the columns that the file says it has. Raises SourceError."""
        arrow, self.schema = self.arrow, schema
        self.files = {  # columns that hold files, by their names
            field.name for field in schema if holds_files(arrow, field.type)
        }
        self.holds_bytes = bool(self.files) or any(  # else it is a table of small values
            is_bytes(arrow.types, field.type) for field in schema if field.name != KEY
        )
        names = list(schema.names)
        fields = [*names, *(f"{name}.path" for name in names if name in self.files)]
        if twice := sorted({name for name in fields if fields.count(name) > 1}):
            raise SourceError(
                f"{self.name}: several columns are called {printable(twice[0])!r}; rename them"
            )
        self.wanted = fields  # what is decoded of a row group
        self.has_key = KEY in names
        if self.has_key and not can_be_key(arrow.types, schema.field(KEY).type):
            raise SourceError(
                f"{self.name}: column {KEY} is {schema.field(KEY).type}; expected strings, binary "
                "or integers, as it is the key of each record. Rename it"
            )
        self._id = next(_IDS)
        self._lock = threading.Lock()
        self._damaged: dict[int, str] = {}  # groups, which are not decoded again for each row

    def classes(self) -> dict[str, tuple[str, ...]]:
        """Return the names that Hugging Face `datasets` wrote for the values of columns, if any."""
        try:
            written = json.loads(self.schema.metadata[b"huggingface"])
            features = written["info"]["features"].items()
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            return {}  # nobody wrote any, or not as `datasets` does: they are no part of the format
        found: dict[str, tuple[str, ...]] = {}
        for name, feature in features:
            if isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel":
                names = feature.get("names")
                if not isinstance(names, list) or set(map(type, names)) != {str}:
                    continue
                if len(set(names)) == len(names):  # else a name tells no class
                    found[name] = tuple(names)
        return found

    def scattered(self) -> None:
        """Do nothing: reads are of whole columns, and in order within them."""

    def close(self) -> None:
        """Close the file."""
        super().close()
        if hasattr(self, "_id"):
            _CACHE.drop(self._id)

    def group_of(self, record: int) -> int:
        """Return the number of the group that a record is in."""
        return bisect_right(self.starts, record) - 1

    def group(self, number: int, *, cache: bool = True) -> Group:
        """Return a group, decoded. Raises DamageError, SourceError, StorageError."""
        key = self._id, number
        if (known := _CACHE.get(key)) is not None:
            return known
        with self._lock:  # threads that wait for the same group find it made
            if (known := _CACHE.get(key)) is not None:
                return known
            if number in self._damaged:
                raise DamageError(self._damaged[number])
            try:
                rows = self.starts[number + 1] - self.starts[number]
                arrays, least = self.decode(number) if rows else ({}, 0)
                group = Group(self.arrow, self.starts[number], rows, arrays, least)
            except DamageError as error:
                self._damaged[number] = str(error)
                raise
            if cache:
                _CACHE.put(key, group)
            return group

    def values(self, data: bytes, record: int) -> Values:
        """Return the values of a record. Raises ValueError."""
        group = self.group(self.group_of(record))
        row = record - group.start
        values = {name: group.get(name)(row) for name in group.arrays}
        if KEY in values:
            values[KEY] = as_key(values[KEY]) or None
        return values

    def parts(self, name: str, array: Any, group: int) -> list[tuple[str, Any]]:
        """Return a column as fields; one that holds files is two."""
        if name not in self.files:
            return [(name, array)]
        parts = dict(zip([field.name for field in array.type], array.flatten(), strict=True))
        found = [(name, parts["bytes"])] if "bytes" in parts else []
        if "path" in parts:
            paths = parts["path"]
            found.append((f"{name}.path", paths))
            if "bytes" in parts and parts["bytes"].null_count:
                bare = np.flatnonzero(nulls_of(parts["bytes"]) & ~nulls_of(paths))
                if len(bare):
                    path = paths[int(bare[0])].as_py()
                    raise SourceError(
                        f"{self.name}: row {self.starts[group] + int(bare[0])}: column "
                        f"{printable(name)!r} has only the path of a file, {printable(path)!r}, "
                        "and no bytes: the data is elsewhere. Write it with its files inside:\n"
                        "  from datasets.table import embed_table_storage\n"
                        "  dataset.with_format('arrow').map(embed_table_storage, batched=True)"
                        f".{self.saves}(...)"
                    )
        return found


class GroupedShard(ForeignShard):
    """One file, open. See formats.base.Shard."""

    _file: GroupedFile

    def __init__(self, kind: type[ForeignFile], opening: Opening, info: ShardInfo) -> None:
        super().__init__(kind, opening, info)
        if self._file.starts[-1] != self.records:
            self._file.close()
            raise DamageError(
                f"{self.name}: it has {self._file.starts[-1]:,} rows, expected {self.records:,}"
            )
        wanted = {field.source for field in self._fields}
        if self._file.has_key:
            wanted.add(KEY)
        self._file.wanted = [name for name in self._file.wanted if name in wanted]
        self._schema: Schema = opening.schema
        self._own = own_key(info.name, 0)[:-8]
        self._announced = (-1, -1)

    def read(self, record: int) -> Sample:
        """Read one record. Raises DamageError."""
        try:  # not by the file's values: 0.7 us a record more
            group = self._file.group(self._file.group_of(record))
            row = record - group.start
            sample: Sample = {KEY: self._own + b"%08d" % record}
            if KEY in group.arrays:
                sample[KEY] = as_key(group.get(KEY)(row)) or sample[KEY]
            for name, source, convert in self._fields:
                if source not in group.arrays:
                    sample[name] = None
                    continue
                value = group.get(source)(row)
                if value is not None and CONVERT[group.kinds[source]] is not convert:
                    value = convert(value)
                sample[name] = value
            return sample
        except ValueError as error:
            raise DamageError(f"{self._where(record)}: {error}") from None

    def _scan(self, start: int, stop: int) -> Iterator[Sample]:
        starts = self._file.starts
        while start < stop:
            number = self._file.group_of(start)
            end = min(stop, starts[number + 1])
            # What is passed as a whole is not kept: 0.3 us a record of 0.9 KB, in new pages.
            part = end - start < starts[number + 1] - starts[number]
            group = self._file.group(number, cache=part)
            most = max(1, _BLOCK * group.rows // max(1, group.bytes))
            for at in range(start, end, most):
                yield from self._samples(group, at, min(at + most, end))
            start = end

    def hold(self, start: int, stop: int) -> list[bytes]:
        """Return records as they would be packed: nothing else is left of decoded rows."""
        held = []
        for record, sample in enumerate(self.scan(start, stop), start):
            try:
                values, blobs = self._schema.encode(sample)
                head = pack_head(values)
            except SampleError:  # nested values that our records do not take: read again, later
                held.append(_HELD.pack(record, 0))
                continue
            held.append(b"".join((_HELD.pack(record, len(head)), head, *blobs)))
        return held

    def decode(self, record: int, held: bytes) -> Sample:
        """Decode what `hold` gave for a record. Raises DamageError."""
        number, length = _HELD.unpack_from(held)
        if number != record:
            raise DamageError(f"{self._where(record)}: these are the bytes of record {number}")
        if not length:
            return self.read(record)
        return self._schema.decode(held, _HELD.size, _HELD.size + length)

    def key(self, record: int) -> bytes:
        """Return the key of a record. Raises DamageError."""
        if not self._file.has_key:
            return self._own + b"%08d" % record
        return bytes(self.read(record)[KEY])

    def will_need(self, start: int, stop: int, *, keep: bool = False) -> None:
        """Announce the groups; once, as rows of one are announced many times."""
        if start < stop:
            groups = self._file.group_of(start), self._file.group_of(stop - 1)
            if groups != self._announced:
                self._announced = groups
                for number in range(groups[0], groups[1] + 1):
                    begin, end = self._file.extent(number)
                    self._file.will_need(begin, end - begin, keep=keep)

    def _samples(self, group: Group, start: int, stop: int) -> list[Sample]:
        """Return records [start, stop) of a group, by pyarrow's own way to dicts: the fastest."""
        arrow = self._file.arrow
        first, count = start - group.start, stop - start
        keys = [self._own + b"%08d" % record for record in range(start, stop)]
        separate: list[tuple[str, Get, Callable[[Any], Any] | None]] = []
        nulls = arrow.nulls(count)
        columns, names = [nulls], [KEY]
        try:
            if KEY in group.arrays:
                given = group.arrays[KEY].slice(first, count).to_pylist()
                keys = [as_key(key) or own for key, own in zip(given, keys, strict=True)]
            columns[0] = arrow.array(keys, arrow.binary())
            for name, source, convert in self._fields:
                column = group.arrays.get(source)
                if column is not None:
                    kind = group.kinds[source]
                    other = None if CONVERT[kind] is convert else convert
                    if other is not None or kind == "array":
                        separate.append((name, group.get(source), other))
                        column = None
                columns.append(nulls if column is None else column.slice(first, count))
                names.append(name)
            samples: list[Sample] = arrow.RecordBatch.from_arrays(columns, names).to_pylist()
            for name, get, other in separate:
                for row, sample in enumerate(samples, first):
                    value = get(row)
                    sample[name] = value if other is None or value is None else other(value)
            return samples
        except (ValueError, arrow.lib.ArrowException) as error:
            why = str(error)
        for record in range(start, stop):
            self.read(record)  # the one that cannot be decoded says so
        raise DamageError(f"{self._where(start)}: {why}")

    def _where(self, record: int) -> str:
        group = self._file.group_of(record)
        where = f"{self._file.group_name} {group} at byte {self.offset(record)}"
        return f"{self.name}: record {record}, in {where}"


# --- groups that were decoded ---------------------------------------------------------------------


def cache_bytes(available: int) -> int:
    """Return the limit of a process's decoded row groups, on a machine with `available` bytes."""
    return max(LEAST_CACHE, int(CACHED * available / processors()))


class _Cache:
    """The row groups that a process used last; the one in use may be larger than the limit."""

    def __init__(self, limit: int | None = None) -> None:
        self._lock = threading.Lock()
        self._limit = limit
        self._groups: OrderedDict[tuple[int, int], Group] = OrderedDict()
        self.bytes = 0

    def get(self, key: tuple[int, int]) -> Group | None:
        with self._lock:
            known = self._groups.get(key)
            if known is not None:
                self._groups.move_to_end(key)
            return known

    def put(self, key: tuple[int, int], group: Group) -> None:
        with self._lock:
            if self._limit is None:
                self._limit = cache_bytes(memory_available())
            self._groups[key] = group
            self.bytes += group.bytes
            while self.bytes > self._limit and len(self._groups) > 1:
                self.bytes -= self._groups.popitem(last=False)[1].bytes

    def drop(self, owner: int) -> None:
        with self._lock:
            for key in [key for key in self._groups if key[0] == owner]:
                self.bytes -= self._groups.pop(key).bytes


_IDS = count()  # of files, as keys of the cache
_CACHE = _Cache()


def _forget() -> None:
    """Begin a cache in a fork: its parent's lock may have been held by another thread."""
    global _CACHE
    _CACHE = _Cache()


os.register_at_fork(after_in_child=_forget)


# --- errors ---------------------------------------------------------------------------------------


def changed(name: str, where: str) -> DamageError:
    """Return the error for bytes that are not those that were indexed."""
    return DamageError(
        f"{name}: {where}: its checksum is not that in the index. The file differs from what was "
        "indexed; restore it, or index it anew"
    )


@contextmanager
def explained(file: GroupedFile, where: str) -> Iterator[None]:
    """Turn what pyarrow raises over bytes into our errors."""
    arrow = file.arrow.lib
    try:
        yield
    except arrow.ArrowNotImplementedError as error:
        raise SourceError(
            f"{file.name}: {where}: pyarrow cannot read it: {error}. Write it anew, by what wrote "
            "it"
        ) from None
    except (arrow.ArrowException, OSError, ValueError, MemoryError, KeyError) as error:
        raise DamageError(f"{file.name}: {where}: pyarrow cannot decode it: {error}") from None
