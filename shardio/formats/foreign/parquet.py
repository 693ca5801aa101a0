"""Parquet files, read in place: a record is a row (the only door to pyarrow).

    column                              field                     value
    integers, floats, booleans          its name                  int, float, bool
    strings; binary                     its name                  str; bytes
    struct of `bytes` and `path`,       its name, and name.path   bytes; str
      as Hugging Face `datasets` writes images and sounds
    lists of numbers                    its name                  array (n,); (m, n) of fixed sizes
    timestamps, dates, times, decimals  its name                  str, as Arrow writes them, exact:
                                                                  "2024-05-01 12:00:00.000250Z"
    durations                           its name                  int, in the column's unit
    other lists, structs, maps          its name                  lists and dicts of these; a map is
                                                                  a list of {"key", "value"}
    dictionaries, extensions            its name                  what they stand for
    `__key__`: as strings or binary     the key of the record; integers and times as their text

A row is no range of the file: it lies in the pages of a row group, a range for each column. So a
random row costs reading and decoding its row group, of the columns that are fields. The row groups
that were used last are kept decoded, in a quarter of the memory that the machine has to spare, over
all its cores. Where the windows of a shuffled epoch are larger than that, row groups are decoded
again and again: a smaller `shuffle_buffer` helps, or packing.

The index keeps a checksum of the footer, and one of each column in each row group: bytes are
checked before pyarrow sees them, and whatever was flipped since is found before it is decoded. The
format's own page checksums, which few writers make, are checked when a file is indexed. Sources:
https://github.com/apache/parquet-format/blob/master/README.md
https://github.com/huggingface/datasets/blob/main/src/datasets/features/image.py
"""

from __future__ import annotations

import io
import json
import os
import struct
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np

from ...errors import DamageError, DependencyError, SampleError, SourceError, printable
from ...machine import processors
from ...names import KEY
from ...storage.base import File, Location
from ...storage.local import memory_available
from ..base import MAX_RECORDS, Opening, ShardInfo
from ..index import checksum
from ..sample import Sample, Schema, pack, pack_head, unpack
from .base import CONVERT, ForeignFile, ForeignShard, Values, own_key

# Decoded row groups of all processes, one a core: this share of the memory to spare, as the page
# cache gets for announced windows. 4,000 images of 110 KB, shuffled: 3.9 ms each where they do not
# fit, as each row group is decoded 40 times; 0.3 ms where they do.
CACHED = 0.25
LEAST_CACHE = 256 << 20  # bytes, in each process, however small the machine is
# Bytes of a decoded row group: above, a random row costs seconds, and each process this memory.
MAX_GROUP = 1 << 30
MAX_FOOTER = 256 << 20  # bytes; 100,000 row groups of 4 columns take 40 MB

_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_U32 = struct.Struct("<I")
_BLOCK = 1 << 20  # bytes of rows that become samples at once
_HELD = struct.Struct("<II")  # record, length of the head; then head and blobs, as in a record

Get = Callable[[int], Any]


class Group:
    """A decoded row group: its columns, and what gives single values of them, once asked for."""

    def __init__(self, arrow: Any, start: int, rows: int, arrays: dict[str, Any]) -> None:
        self._arrow = arrow
        self.start, self.rows = start, rows  # its first record, and how many it has
        self.arrays = arrays  # by field, of `_simple` types
        self.bytes = sum(array.nbytes for array in arrays.values()) + 64 * rows * len(arrays)
        self.kinds = {name: _kind(arrow, array) for name, array in arrays.items()}
        self._gets: dict[str, Get] = {}

    def get(self, name: str) -> Get:
        """Return a function from a row's number in the group to its value, None for null."""
        if name not in self._gets:
            self._gets[name] = _get(self._arrow, self.arrays[name], self.kinds[name])
        return self._gets[name]

    def sizes(self) -> Any:
        """Return the bytes of each row: (rows,) int64."""
        sizes = np.zeros(self.rows, np.int64)
        for name, array in self.arrays.items():
            sizes += _sizes(self._arrow, array, self.kinds[name])
        return sizes


class ParquetFile(ForeignFile):
    """A Parquet file, its footer read and checked; row groups are decoded on demand.

    Rows are no byte ranges of the file: ParquetShard has what follows from that.
    """

    ranges = False

    def _open(self, storage: Location, name: str, extra: bytes) -> None:
        arrow = self.arrow = _pyarrow()
        footer = self._footer()
        found = checksum(footer)
        sums: Any = None
        if extra:
            described = unpack(extra)
            if described["footer"] != found:
                raise _changed(self.name, f"footer at byte {self.size - len(footer)}")
            sums = np.frombuffer(described["sums"], "<u8")
        with _explained(self, "footer"):
            metadata = arrow.parquet.read_metadata(arrow.BufferReader(footer))
            self._source = _Ranges(self._file, metadata, check=sums is not None)
            self._reader = arrow.parquet.ParquetFile(
                self._source,
                metadata=metadata,
                pre_buffer=False,  # each column of a row group is one read, of just its range
                page_checksum_verification=sums is None,
            )
            schema = self._reader.schema_arrow
            groups = range(metadata.num_row_groups)
            rows = [metadata.row_group(group).num_rows for group in groups]
        if min(rows, default=0) < 0 or not sum(rows) == metadata.num_rows <= MAX_RECORDS:
            raise DamageError(
                f"{self.name}: footer: its row groups have {sum(rows):,} rows, and it says "
                f"{metadata.num_rows:,}; a shard has at most {MAX_RECORDS:,}"
            )
        shape = (len(rows), metadata.num_columns)
        if sums is None:
            sums = np.zeros(shape, "<u8")
        elif sums.size != shape[0] * shape[1]:
            raise _changed(self.name, "footer")
        self._metadata, self._found = metadata, found
        self._source.sums = sums.reshape(shape)
        self.starts = [0, *np.cumsum(rows, dtype=np.int64).tolist()]  # of row groups; all rows
        self.files = {  # columns that hold files, by their names
            field.name for field in schema if _holds_files(arrow, field.type)
        }
        self.holds_bytes = bool(self.files) or any(  # else it is a table of small values
            _is_bytes(arrow.types, field.type) for field in schema if field.name != KEY
        )
        names = list(schema.names)
        fields = [*names, *(f"{name}.path" for name in names if name in self.files)]
        if twice := sorted({name for name in fields if fields.count(name) > 1}):
            raise SourceError(
                f"{self.name}: several columns are called {printable(twice[0])!r}; rename them"
            )
        self.wanted = fields  # what is decoded of a row group
        self.has_key = KEY in names
        if self.has_key and not _can_be_key(arrow.types, schema.field(KEY).type):
            raise SourceError(
                f"{self.name}: column {KEY} is {schema.field(KEY).type}; expected strings, binary "
                "or integers, as it is the key of each record. Rename it"
            )
        self._id = next(_IDS)
        self._lock = threading.Lock()
        self._damaged: dict[int, str] = {}  # row groups, which are not decoded again for each row

    def _footer(self) -> bytes:
        """Read the file's description of itself, to the end of the file."""
        if self.size >= 12:
            tail = self._file.read(self.size - 8, 8)
            (length,) = _U32.unpack_from(tail)
            if tail[4:] == _ENCRYPTED:
                raise SourceError(
                    f"{self.name}: encrypted; shardio has no keys. Write it anew without encryption"
                )
            if tail[4:] == _MAGIC and length <= min(self.size - 12, MAX_FOOTER):
                return self._file.read(self.size - 8 - length, length) + tail
        raise DamageError(
            f"{self.name}: it does not end with the length of a footer and {_MAGIC.decode()}. It "
            "was cut short, or is no Parquet file"
        )

    def classes(self) -> dict[str, tuple[str, ...]]:
        """Return the names that Hugging Face `datasets` wrote for the values of columns, if any."""
        try:
            written = json.loads(self._reader.schema_arrow.metadata[b"huggingface"])
            features = written["info"]["features"].items()
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            return {}  # nobody wrote any, or not as `datasets` does: they are no part of the format
        found: dict[str, tuple[str, ...]] = {}
        for name, feature in features:
            if isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel":
                names = feature.get("names")
                if isinstance(names, list) and names and set(map(type, names)) == {str}:
                    found[name] = tuple(names)
        return found

    def scan(self) -> Iterator[tuple[int, int]]:
        """Yield the byte of its row group, and the bytes that it takes decoded, of each row."""
        for number in range(len(self.starts) - 1):
            start, _ = self.extent(number)
            for size in self.group(number).sizes().tolist():
                yield start, size

    def scattered(self) -> None:
        """Do nothing: reads are of whole columns, and in order within them."""

    def close(self) -> None:
        """Close the file."""
        super().close()
        if hasattr(self, "_id"):
            _CACHE.drop(self._id)

    # --- row groups ---

    def extra(self) -> bytes:
        """Return the checksums for the index, once all row groups were decoded."""
        return pack({"footer": self._found, "sums": self._source.sums.tobytes()})

    def largest_group(self) -> tuple[int, int]:
        """Return rows, and bytes once decoded (at least), of the largest row group."""
        groups = map(self._metadata.row_group, range(len(self.starts) - 1))
        sizes = [(group.num_rows, group.total_byte_size) for group in groups]
        return max(sizes, key=lambda one: one[1], default=(0, 0))

    def group_of(self, record: int) -> int:
        """Return the number of the row group that a record is in."""
        return bisect_right(self.starts, record) - 1

    def extent(self, group: int) -> tuple[int, int]:
        """Return the bytes at which a row group begins and ends."""
        ranges = self._ranges(group)
        if not ranges:
            return 0, 0
        return min(ranges), max(start + length for start, (length, _) in ranges.items())

    def group(self, number: int, *, cache: bool = True) -> Group:
        """Return a row group, decoded. Raises DamageError, SourceError, StorageError."""
        key = self._id, number
        if (known := _CACHE.get(key)) is not None:
            return known
        with self._lock:  # threads that wait for the same row group find it made
            if (known := _CACHE.get(key)) is not None:
                return known
            if number in self._damaged:
                raise DamageError(self._damaged[number])
            try:
                group = self._decode(number)
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
            values[KEY] = _as_key(values[KEY]) or None
        return values

    def _ranges(self, group: int) -> dict[int, tuple[int, int]]:
        """Return (length, number) of each column of a row group, by the byte where it begins."""
        described = self._metadata.row_group(group)
        ranges: dict[int, tuple[int, int]] = {}
        if not described.num_rows:  # columns of nothing may begin nowhere
            return ranges
        for number in range(described.num_columns):
            with _explained(self, f"row group {group}"):
                column = described.column(number)
                start, length = column.data_page_offset, column.total_compressed_size
                first = column.dictionary_page_offset
                if first is not None and 0 < first < start:
                    start = first
                outside = column.file_path
            if outside:
                raise SourceError(f"{self.name}: its columns are in files of their own")
            if not (start >= 4 and 0 <= length <= self.size - start):
                raise DamageError(
                    f"{self.name}: row group {group}: column {number} cannot take {length:,} bytes "
                    f"from byte {start}"
                )
            ranges[start] = length, number
        return ranges

    def _decode(self, number: int) -> Group:
        described = self._metadata.row_group(number)
        size = described.total_byte_size
        if not 0 <= size <= MAX_GROUP:
            target = f"{self.name.removesuffix('.parquet')}.small.parquet"
            raise SourceError(
                f"{self.name}: row group {number} takes {size:,} bytes when decoded, above "
                f"{MAX_GROUP:,}, and one row costs decoding all. Write it anew with smaller ones:\n"
                "  import pyarrow.parquet as pq\n"
                f"  source = pq.ParquetFile({self.name!r})\n"
                f"  with pq.ParquetWriter({target!r}, source.schema_arrow) as target:\n"
                "      for rows in source.iter_batches(100):\n"
                "          target.write_batch(rows)"
            )
        rows = self.starts[number + 1] - self.starts[number]
        if not rows:
            return Group(self.arrow, self.starts[number], 0, {})
        where = f"row group {number} at byte {self.extent(number)[0]}"
        arrays: dict[str, Any] = {}
        with _explained(self, where):
            self._source.serve(number, self._ranges(number))
            # of columns that hold files, one part or both
            parts = [f"{name}.bytes" if name in self.files else name for name in self.wanted]
            table = self._reader.read_row_group(number, parts, use_threads=False).combine_chunks()
            if table.num_rows != rows:
                raise ValueError(f"{table.num_rows:,} rows, expected {rows:,}")
            if table.nbytes > MAX_GROUP:
                raise ValueError(f"it takes {table.nbytes:,} bytes when decoded")
            arrow = self.arrow
            for name in table.column_names:
                column = table.column(name)
                if column.num_chunks > 1:
                    raise ValueError("a column of more than 2 GiB")
                array = column.chunk(0) if column.num_chunks else arrow.array([], column.type)
                for field, part in self._parts(name, array, number):
                    arrays[field] = _simple(arrow, part)
            wanted = {name: arrays[name] for name in self.wanted if name in arrays}
            return Group(arrow, self.starts[number], rows, wanted)

    def _parts(self, name: str, array: Any, group: int) -> list[tuple[str, Any]]:
        """Return a column as fields; one that holds files is two."""
        if name not in self.files:
            return [(name, array)]
        parts = dict(zip([field.name for field in array.type], array.flatten(), strict=True))
        found = [(name, parts["bytes"])] if "bytes" in parts else []
        if "path" in parts:
            paths = parts["path"]
            found.append((f"{name}.path", paths))
            if "bytes" in parts and parts["bytes"].null_count:
                bare = np.flatnonzero(_invalid(parts["bytes"]) & ~_invalid(paths))
                if len(bare):
                    path = paths[int(bare[0])].as_py()
                    raise SourceError(
                        f"{self.name}: row {self.starts[group] + int(bare[0])}: column "
                        f"{printable(name)!r} has only the path of a file, {printable(path)!r}, "
                        "and no bytes: the data is elsewhere. Write it with its files inside:\n"
                        "  from datasets.table import embed_table_storage\n"
                        "  dataset.with_format('arrow').map(embed_table_storage, batched=True)"
                        ".to_parquet(...)"
                    )
        return found


class ParquetShard(ForeignShard):
    """One file, open. See formats.base.Shard."""

    _file: ParquetFile

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
                sample[KEY] = _as_key(group.get(KEY)(row)) or sample[KEY]
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
        """Announce the row groups; once, as rows of one are announced many times."""
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
                keys = [_as_key(key) or own for key, own in zip(given, keys, strict=True)]
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
        return f"{self.name}: record {record}, in row group {group} at byte {self.offset(record)}"


# --- reading for pyarrow --------------------------------------------------------------------------


def _changed(name: str, where: str) -> DamageError:
    return DamageError(
        f"{name}: {where}: its checksum is not that in the index. The file differs from what was "
        "indexed; restore it, or index it anew"
    )


class _Ranges(io.RawIOBase):
    """The file as pyarrow reads it: columns of one row group, each as a whole, and checked.

    It does not know its ParquetFile: pyarrow's C++ keeps it, where no garbage collector looks, and
    a circle through there would keep the descriptor open for good.
    """

    def __init__(self, file: File, metadata: Any, *, check: bool) -> None:
        self._file, self._metadata, self._check = file, metadata, check
        self._at = self._group = 0
        self._ranges: dict[int, tuple[int, int]] = {}
        self.sums: Any = None  # (row groups, columns) uint64

    def serve(self, group: int, ranges: dict[int, tuple[int, int]]) -> None:
        self._group, self._ranges = group, ranges

    def read(self, size: int = -1) -> bytes:
        length, column = self._ranges.get(self._at, (0, -1))
        if column < 0:
            raise DamageError(f"{self._file.name}: no column begins at byte {self._at}")
        # Of files that an old writer made, pyarrow asks for some bytes more than it says.
        data = self._file.read(self._at, max(size, length))
        found = checksum(data[:length] if len(data) > length else data)
        if self._check and found != int(self.sums[self._group, column]):
            name = self._metadata.row_group(self._group).column(column).path_in_schema
            raise _changed(
                self._file.name,
                f"row group {self._group}, column {printable(name)} at byte {self._at}",
            )
        if not self._check:
            self.sums[self._group, column] = found
        self._at += size
        return data if len(data) == size else data[:size]

    def seek(self, at: int, whence: int = 0) -> int:
        self._at = at + (0, self._at, self._file.size)[whence]
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


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


@lru_cache(maxsize=1)
def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise DependencyError(
            "Parquet files are read by pyarrow, which is not installed. Install it with: "
            "pip install 'shardio-torch[parquet]'"
        ) from None
    return pyarrow


@contextmanager
def _explained(file: ParquetFile, where: str) -> Iterator[None]:
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


# --- columns --------------------------------------------------------------------------------------


def _as_key(value: Any) -> bytes | None:
    if isinstance(value, (str, int)):
        return str(value).encode()
    key: bytes | None = value
    return key


def _can_be_key(types: Any, kind: Any) -> bool:
    if types.is_dictionary(kind):
        kind = kind.value_type
    fitting = (types.is_integer, types.is_fixed_size_binary, types.is_null, types.is_decimal)
    if any(fits(kind) for fits in fitting) or _is_bytes(types, kind) or _is_text(types, kind):
        return True
    return bool(types.is_temporal(kind) and not types.is_duration(kind))


def _holds_files(arrow: Any, kind: Any) -> bool:
    """Return True for a column as `datasets` writes images and sounds."""
    if not arrow.types.is_struct(kind):
        return False
    parts = {field.name: field.type for field in kind}
    path = parts.get("path", arrow.null())
    return (
        len(parts) == kind.num_fields
        and "bytes" in parts
        and parts.keys() <= {"bytes", "path"}
        and _is_bytes(arrow.types, parts["bytes"])
        # null: as pyarrow infers it from paths that are all None
        and (arrow.types.is_null(path) or _is_text(arrow.types, path))
    )


def _is_bytes(types: Any, kind: Any) -> bool:
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _is_text(types: Any, kind: Any) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _kind(arrow: Any, array: Any) -> str:
    """Return the kind of a column's values."""
    kind, types = array.type, arrow.types
    if _is_number(types, kind):
        return "bool" if types.is_boolean(kind) else "float" if types.is_floating(kind) else "int"
    if _is_bytes(types, kind) or _is_text(types, kind):
        return "str" if _is_text(types, kind) else "bytes"
    return "json" if _numbers_of(types, array) is None else "array"


def _get(arrow: Any, array: Any, kind: str) -> Get:
    """Return a function from a row's number to its value."""
    types = arrow.types
    if kind == "json":
        return lambda row: array[row].as_py()
    if kind in ("int", "float", "bool"):
        listed: list[Any] = array.to_pylist()
        return listed.__getitem__
    missing = _invalid(array).tolist() if array.null_count else None
    if kind != "array":
        bounds = _bounds(types, array)
        data = array.buffers()[2]
        at, view = bounds.tolist(), memoryview(data if data is not None else b"")
        if kind == "str":
            return _but(missing, lambda row: str(view[at[row] : at[row + 1]], "utf-8"))
        return _but(missing, lambda row: view[at[row] : at[row + 1]].tobytes())
    flat, shape = _numbers_of(types, array)
    numbers = _numbers(flat)
    if shape:
        numbers = numbers.reshape(len(array), *shape)
        return _but(missing, lambda row: numbers[row].copy())
    at = _bounds(types, array).tolist()
    return _but(missing, lambda row: numbers[at[row] : at[row + 1]].copy())


def _sizes(arrow: Any, array: Any, kind: str) -> Any:
    """Return the bytes of each row, or (all the same) of any."""
    if kind in ("int", "float", "bool"):
        return 8
    if kind in ("str", "bytes"):
        return np.diff(_bounds(arrow.types, array)).astype(np.int64)
    return array.nbytes // max(1, len(array))


def _but(missing: list[bool] | None, get: Get) -> Get:
    if missing is None:
        return get
    return lambda row: None if missing[row] else get(row)


def _is_number(types: Any, kind: Any) -> bool:
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))


def _numbers(array: Any) -> Any:
    """Return numbers as (n,) in numpy; 0 where they are null: integers must not become floats."""
    if array.null_count:
        array = array.fill_null(False if str(array.type) == "bool" else 0)
    return array.to_numpy(zero_copy_only=False)


def _invalid(array: Any) -> Any:
    """Return which values are null: (n,) bool."""
    return array.is_null().to_numpy(zero_copy_only=False)


def _bounds(types: Any, array: Any) -> Any:
    """Return where values of a list, string or binary array begin, and the last ends: (n + 1,)."""
    if not len(array):  # then there may be no buffer
        return np.zeros(1, np.int64)
    kind, buffers = array.type, array.buffers()
    lists = types.is_list(kind) or types.is_large_list(kind)
    large = types.is_large_list(kind) or types.is_large_string(kind) or types.is_large_binary(kind)
    dtype = np.dtype(np.int64 if large else np.int32)
    bounds = np.frombuffer(buffers[1], dtype, len(array) + 1, array.offset * dtype.itemsize)
    end = len(array.values) if lists else buffers[2].size if buffers[2] is not None else 0
    if (np.diff(bounds) < 0).any() or bounds[0] < 0 or bounds[-1] > end:
        raise ValueError("values that are not within their column")
    return bounds


def _numbers_of(types: Any, array: Any) -> Any:
    """Return the numbers in an array of lists, and their shape if it is fixed; None: others."""
    kind = array.type
    if types.is_list(kind) or types.is_large_list(kind):
        values = array.values
        return None if values.null_count or not _is_number(types, values.type) else (values, ())
    shape: list[int] = []
    values, start, count = array, 0, len(array)
    while types.is_fixed_size_list(values.type):
        size = values.type.list_size
        shape.append(size)
        start, count = (start + values.offset) * size, count * size
        values = values.values
    if not shape or not count or not _is_number(types, values.type):
        return None
    values = values.slice(start, count)
    if values.null_count and _invalid(values).reshape(len(array), -1)[~_invalid(array)].any():
        return None
    return values, tuple(shape)


def _simple(arrow: Any, array: Any) -> Any:
    """Return an array of nulls, numbers, text, bytes, or lists and structs of these."""
    kind, types = array.type, arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        return _simple(arrow, array.storage)
    if types.is_dictionary(kind):
        return _simple(arrow, array.dictionary_decode())
    if types.is_timestamp(kind) and kind.tz is not None:  # as UTC, which needs no table of zones
        plain = array.cast(arrow.timestamp(kind.unit)).cast(arrow.string())
        return arrow.compute.binary_join_element_wise(plain, "Z", "")
    for fits, target in (
        (types.is_float16, arrow.float32),  # of which some releases make numpy's
        (types.is_string_view, arrow.large_string),
        (types.is_binary_view, arrow.large_binary),
        (types.is_fixed_size_binary, arrow.binary),
        (types.is_duration, arrow.int64),
        (types.is_temporal, arrow.string),
        (types.is_decimal, arrow.string),
    ):
        if fits(kind):
            return array.cast(target())
    if _is_number(types, kind) or types.is_null(kind):
        return array
    if _is_bytes(types, kind) or _is_text(types, kind):
        return array
    return _nested(arrow, array)


def _nested(arrow: Any, array: Any) -> Any:
    """Return an array of structs, maps or lists with `_simple` parts. Lists may be views."""
    kind, types = array.type, arrow.types
    mask = array.is_null() if array.null_count else None
    if types.is_struct(kind):
        parts = [_simple(arrow, array.field(i)) for i in range(kind.num_fields)]
        names = [field.name for field in kind]
        if len(set(names)) < len(names):
            raise ValueError("a struct has two fields of one name")
        return arrow.StructArray.from_arrays(parts, names, mask=mask) if parts else array
    if types.is_map(kind):
        pairs = arrow.StructArray.from_arrays(
            [_simple(arrow, array.keys), _simple(arrow, array.items)], ["key", "value"]
        )
        return arrow.ListArray.from_arrays(array.offsets, pairs, mask=mask)
    if types.is_list_view(kind):
        return _nested(arrow, array.cast(arrow.list_(kind.value_type)))
    if types.is_large_list_view(kind):
        return _nested(arrow, array.cast(arrow.large_list(kind.value_type)))
    if types.is_fixed_size_list(kind):
        values = _simple(arrow, array.values)
        return arrow.FixedSizeListArray.from_arrays(values, kind.list_size, mask=mask)
    if types.is_list(kind) or types.is_large_list(kind):
        form = arrow.ListArray if types.is_list(kind) else arrow.LargeListArray
        return form.from_arrays(array.offsets, _simple(arrow, array.values), mask=mask)
    raise arrow.lib.ArrowNotImplementedError(f"columns of type {kind}")
