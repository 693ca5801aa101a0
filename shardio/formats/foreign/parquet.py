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

Rows lie in row groups, of which row_groups.py has the reading.

The index keeps a checksum of the footer, and one of each column in each row group: bytes are
checked before pyarrow sees them, and whatever was flipped since is found before it is decoded. The
format's own page checksums, which few writers make, are checked when a file is indexed. Sources:
https://github.com/apache/parquet-format/blob/master/README.md
https://github.com/huggingface/datasets/blob/main/src/datasets/features/image.py
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import DamageError, SourceError, printable
from ...storage.base import Location
from ..base import MAX_RECORDS, Readable
from ..index import checksum
from ..sample import pack, unpack
from .arrow_columns import import_pyarrow, simplified
from .row_groups import MAX_GROUP, GroupedFile, changed, explained

MAX_FOOTER = 256 << 20  # bytes; 100,000 row groups of 4 columns take 40 MB

_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_U32 = struct.Struct("<I")


class ParquetFile(GroupedFile):
    """A Parquet file, its footer read and checked; row groups are decoded on demand."""

    saves = "to_parquet"

    def _open(self, storage: Location, name: str, extra: bytes) -> None:
        arrow = self.arrow = import_pyarrow()
        footer = self._footer()
        found = checksum(footer)
        sums: Any = None
        if extra:
            described = unpack(extra)
            if described["footer"] != found:
                raise changed(self.name, f"footer at byte {self.size - len(footer)}")
            sums = np.frombuffer(described["sums"], "<u8")
        with explained(self, "footer"):
            metadata = arrow.parquet.read_metadata(arrow.BufferReader(footer))
            self._source = _Ranges(self._file, metadata, check=sums is not None)
            self._reader = arrow.parquet.ParquetFile(
                self._source,
                metadata=metadata,
                pre_buffer=False,  # each column of a row group is one read, of just its range
                page_checksum_verification=sums is None,
            )
            self.take_schema(self._reader.schema_arrow)
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
            raise changed(self.name, "footer")
        self._metadata, self._found = metadata, found
        self._source.sums = sums.reshape(shape)
        self.starts = [0, *np.cumsum(rows, dtype=np.int64).tolist()]  # of row groups; all rows

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

    def scan(self) -> Iterator[tuple[int, int]]:
        """Yield the byte of its row group, and the bytes that it takes decoded, of each row."""
        for number in range(len(self.starts) - 1):
            start, _ = self.extent(number)
            for size in self.group(number).sizes().tolist():
                yield start, size

    # --- row groups ---

    def extra(self) -> bytes:
        """Return the checksums for the index, once all row groups were decoded."""
        return pack({"footer": self._found, "sums": self._source.sums.tobytes()})

    def largest_group(self) -> tuple[int, int]:
        """Return rows, and bytes once decoded (at least), of the largest row group."""
        groups = map(self._metadata.row_group, range(len(self.starts) - 1))
        sizes = [(group.num_rows, group.total_byte_size) for group in groups]
        return max(sizes, key=lambda one: one[1], default=(0, 0))

    def extent(self, group: int) -> tuple[int, int]:
        """Return the bytes at which a row group begins and ends."""
        ranges = self._ranges(group)
        if not ranges:
            return 0, 0
        return min(ranges), max(start + length for start, (length, _) in ranges.items())

    def _ranges(self, group: int) -> dict[int, tuple[int, int]]:
        """Return (length, number) of each column of a row group, by the byte where it begins."""
        described = self._metadata.row_group(group)
        ranges: dict[int, tuple[int, int]] = {}
        if not described.num_rows:  # columns of nothing may begin nowhere
            return ranges
        for number in range(described.num_columns):
            with explained(self, f"row group {group}"):
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

    def decode(self, number: int) -> tuple[dict[str, Any], int]:
        """Decode a row group. Raises DamageError, SourceError, StorageError."""
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
        where = f"row group {number} at byte {self.extent(number)[0]}"
        arrays: dict[str, Any] = {}
        with explained(self, where):
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
                for field, part in self.parts(name, array, number):
                    arrays[field] = simplified(arrow, part)
        return {name: arrays[name] for name in self.wanted if name in arrays}, 0


# --- reading for pyarrow --------------------------------------------------------------------------


class _Ranges(io.RawIOBase):
    """The file as pyarrow reads it: columns of one row group, each as a whole, and checked.

    It does not know its ParquetFile: pyarrow's C++ keeps it, where no garbage collector looks, and
    a circle through there would keep the descriptor open for good.
    """

    def __init__(self, file: Readable, metadata: Any, *, check: bool) -> None:
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
            raise changed(
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
