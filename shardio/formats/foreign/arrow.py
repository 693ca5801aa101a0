"""Arrow IPC files, read in place: what Hugging Face `datasets` writes by `save_to_disk`.

    stream    message of the schema | messages of record batches | end: FF FF FF FF 00 00 00 00
    message   FF FF FF FF | u32 length of the metadata | metadata, a flatbuffer | body
    file      "ARROW1" 00 00 | a stream | footer, which is not needed here | u32 | "ARROW1"

A record is a row; row_groups.py has the reading, where a group is a record batch (100 rows of
images, as `datasets` writes them). Columns become fields as those of Parquet do: parquet.py. The
buffers of a batch may be compressed, by lz4 or zstd.

The index keeps where each batch lies, how many rows it has, and a checksum of its bytes: they are
checked before pyarrow sees them, and the format has no checksums of its own. All offsets in a
batch are checked each time (`validate(full=True)`), since pyarrow believes them.

Beside the files of a dataset lies `state.json`, which lists them: all of them must be there, and no
others are read (`map` keeps its results in the same folder). Splits are folders, which
`dataset_dict.json` lists. Sources:
https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
https://github.com/apache/arrow/blob/main/format/Message.fbs
https://github.com/huggingface/datasets/blob/main/src/datasets/arrow_dataset.py
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...errors import DamageError, SourceError, printable
from ...names import are_names
from ...storage.base import Location, path_in
from ..base import MAX_RECORDS
from ..index import checksum
from ..sample import pack, unpack
from .arrow_columns import import_pyarrow, simplified
from .base import check_next, parse_json
from .row_groups import MAX_GROUP, GroupedFile, changed, explained

STATE = "state.json"
SPLITS = "dataset_dict.json"
MAX_METADATA = 64 << 20  # bytes of a message's metadata; 10,000 columns take 1 MB
_FILE = b"ARROW1\0\0"
_GOES_ON = 0xFFFFFFFF
_HEAD = struct.Struct("<II")
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # kinds of messages
_BATCHES = np.dtype([("begin", "<u8"), ("end", "<u8"), ("rows", "<u8"), ("sum", "<u8")])
_CACHED = re.compile(r"(cache|tmp)-?[0-9a-z_]+\.arrow")  # as `map` names them
_MAX_JSON = 16 << 20


class ArrowFile(GroupedFile):
    """An Arrow IPC file, its schema read; record batches are decoded on demand."""

    group_name = "record batch"
    saves = "save_to_disk"

    def _open(self, storage: Location, name: str, extra: bytes) -> None:
        self.arrow = import_pyarrow()
        known: Any = unpack(extra) if extra else None
        if known is None:
            _check_listed(storage, name, self.name)
            begin = len(_FILE) if self._is_file() else 0
            message = self._message(begin)
            if message is None or message.kind != _SCHEMA:
                raise DamageError(f"{self.name}: byte {begin}: expected the schema of a table")
            self._schema_at, batches = (begin, message.end), np.empty(0, _BATCHES)
        else:
            begin, _ = self._schema_at = known["schema"]
            batches = np.frombuffer(known["batches"], _BATCHES)
        # Of each batch; while the file is indexed, of those that were found so far.
        extents = batches["begin"].tolist(), batches["end"].tolist()
        self._batches: list[tuple[int, int]] = list(zip(*extents, strict=True))
        self._sums: list[int] = batches["sum"].tolist()
        self.starts = [0, *np.cumsum(batches["rows"], dtype=np.int64).tolist()]
        data = self._file.read(self._schema_at[0], self._schema_at[1] - self._schema_at[0])
        self._schema_sum = checksum(data)
        if known is not None and self._schema_sum != known["sum"]:
            raise changed(self.name, f"schema at byte {begin}")
        with explained(self, "schema"):
            self.take_schema(self.arrow.ipc.read_schema(self.arrow.py_buffer(data)))

    def scan(self) -> Iterator[tuple[int, int]]:
        """Yield the byte of its batch, and the bytes that it takes decoded, of each row."""
        at = self._schema_at[1]
        while (message := self._message(at)) is not None:
            if message.kind == _DICTIONARY:
                raise SourceError(
                    f"{self.name}: byte {at}: it has columns that are dictionaries, which are not "
                    "read here. Write it anew with plain ones: column.dictionary_decode()"
                )
            if message.kind != _BATCH:
                raise DamageError(
                    f"{self.name}: byte {at}: message of kind {message.kind}, expected a batch"
                )
            with explained(self, f"message at byte {at}"):
                rows = message.rows()
            if not 0 <= rows <= MAX_RECORDS - self.starts[-1]:
                raise DamageError(
                    f"{self.name}: record batch at byte {at}: {rows:,} rows; a shard has at most "
                    f"{MAX_RECORDS:,}"
                )
            self._batches.append((at, message.end))
            self.starts.append(self.starts[-1] + rows)
            if rows:
                for size in self.group(len(self._batches) - 1).sizes().tolist():
                    yield at, size
            else:
                self._sums.append(0)  # its bytes are never read
            at = message.end

    def extra(self) -> bytes:
        """Return where the batches lie and their checksums, once all were decoded."""
        table = np.empty(len(self._batches), _BATCHES)
        table["begin"] = [begin for begin, _ in self._batches]
        table["end"] = [end for _, end in self._batches]
        table["rows"], table["sum"] = np.diff(self.starts), self._sums
        schema = {"schema": list(self._schema_at), "sum": self._schema_sum}
        return pack({**schema, "batches": table.tobytes()})

    def largest_group(self) -> tuple[int, int]:
        """Return rows, and bytes, of the largest record batch."""
        rows = np.diff(self.starts).tolist()
        sizes = (end - begin for begin, end in self._batches)
        return max(zip(rows, sizes, strict=True), key=lambda one: one[1], default=(0, 0))

    def extent(self, group: int) -> tuple[int, int]:
        """Return the bytes at which a record batch begins and ends."""
        return self._batches[group]

    def decode(self, number: int) -> tuple[dict[str, Any], int]:
        """Decode a record batch. Raises DamageError, SourceError, StorageError."""
        begin, end = self._batches[number]
        where = f"record batch {number} at byte {begin}"
        if end - begin > MAX_GROUP:
            raise self._too_large(where, end - begin)
        data = self._file.read(begin, end - begin)
        found = checksum(data)
        if number == len(self._sums):  # it is being indexed
            self._sums.append(found)
        elif found != self._sums[number]:
            raise changed(self.name, where)
        arrow, rows = self.arrow, self.starts[number + 1] - self.starts[number]
        arrays: dict[str, Any] = {}
        with explained(self, where):
            message = arrow.ipc.read_message(arrow.py_buffer(data))
            if (size := _inflated(data)) > MAX_GROUP:
                raise self._too_large(where, size)
            batch = arrow.ipc.read_record_batch(message, self.schema)
            if batch.num_rows != rows:
                raise ValueError(f"{batch.num_rows:,} rows, expected {rows:,}")
            for name, column in zip(self.schema.names, batch.columns, strict=True):
                if name in self.wanted or f"{name}.path" in self.wanted:
                    column.validate(full=True)
                    for field, part in self.parts(name, column, number):
                        arrays[field] = simplified(arrow, part)
        # Columns of plain batches are parts of `data`, which stays as a whole.
        return {name: arrays[name] for name in self.wanted if name in arrays}, len(data)

    def _too_large(self, where: str, size: int) -> SourceError:
        target = f"{self.name.removesuffix('.arrow')}.small.arrow"
        reader = "open_file" if self._is_file() else "open_stream"
        return SourceError(
            f"{self.name}: {where} takes {size:,} bytes, above {MAX_GROUP:,}, and one row costs "
            "reading all. Write it anew with smaller ones:\n"
            "  import pyarrow as pa\n"
            f"  table = pa.ipc.{reader}(pa.memory_map({self.name!r})).read_all()\n"
            f"  with pa.ipc.new_stream({target!r}, table.schema) as target:\n"
            "      target.write_table(table, max_chunksize=100)"
        )

    def _is_file(self) -> bool:
        return self.size >= 16 and self._file.read(0, 8) == _FILE

    def _message(self, at: int) -> _Message | None:
        """Read the head of a message; None at the end of the stream. Raises DamageError."""
        if at > self.size - _HEAD.size:
            raise DamageError(
                f"{self.name}: byte {at}: expected a message, or the end mark of the stream; the "
                f"file ends at byte {self.size}. It was cut short, or its writer has not finished"
            )
        mark, length = _HEAD.unpack(self._file.read(at, _HEAD.size))
        begin = at + _HEAD.size
        if mark != _GOES_ON:
            raise DamageError(
                f"{self.name}: byte {at}: expected a message, found {mark:#010x}. It is no Arrow "
                "IPC file, or one from before Arrow 0.15; write that anew"
            )
        if length == 0:
            self._check_end(begin)
            return None
        if length > min(MAX_METADATA, self.size - begin):
            raise DamageError(
                f"{self.name}: byte {at}: a message with {length:,} bytes of metadata, in a file "
                f"of {self.size:,}. It was cut short"
            )
        metadata = self._file.read(begin, length)
        begin += length
        with explained(self, f"message at byte {at}"):
            kind, body = _kind_and_body(metadata)
        if not 0 <= body <= self.size - begin:
            raise self.cut_short(at, begin + body - at)
        return _Message(kind, begin + body, metadata)

    def _check_end(self, at: int) -> None:
        """Check what stands behind the end mark of the stream. Raises DamageError."""
        if self._is_file():
            if self._file.read(self.size - 6, 6) != _FILE[:6]:
                raise DamageError(f"{self.name}: it does not end with ARROW1. It was cut short")
        elif at != self.size:
            raise DamageError(
                f"{self.name}: byte {at}: {self.size - at:,} bytes behind the end of the stream"
            )


class _Message(NamedTuple):
    """A message, and the byte that it ends at."""

    kind: int
    end: int
    metadata: bytes

    def rows(self) -> int:
        """Return the rows of a record batch. Raises ValueError."""
        return _number(self.metadata, _header(self.metadata), 0)


# --- metadata: a few fields of flatbuffers --------------------------------------------------------
# Read before pyarrow has verified them: whatever they say is compared with the file's size.


def _at(data: bytes, table: int, field: int) -> int:
    """Return where a field of a table lies; 0: it is not there. Raises ValueError."""
    fields = table - _value(data, table, "<i")
    if 4 + 2 * field >= _value(data, fields, "<H"):
        return 0
    offset = _value(data, fields + 4 + 2 * field, "<H")
    return table + offset if offset else 0


def _value(data: bytes, at: int, code: str) -> int:
    try:
        (value,) = struct.unpack_from(code, data, at)
    except struct.error:
        raise ValueError("its metadata is no flatbuffer") from None
    return int(value)


def _number(data: bytes, table: int, field: int) -> int:
    """Return a number of 64 bits, 0 where it is left out. Raises ValueError."""
    at = _at(data, table, field)
    return _value(data, at, "<q") if at else 0


def _pointed(data: bytes, table: int, field: int) -> int:
    """Return where a field points to; 0: it is not there. Raises ValueError."""
    at = _at(data, table, field)
    return at + _value(data, at, "<I") if at else 0


def _kind_and_body(metadata: bytes) -> tuple[int, int]:
    root = _value(metadata, 0, "<I")
    at = _at(metadata, root, 1)
    return _value(metadata, at, "<B") if at else 0, _number(metadata, root, 3)


def _header(metadata: bytes) -> int:
    return _pointed(metadata, _value(metadata, 0, "<I"), 2)


def _inflated(message: bytes) -> int:
    """Return the bytes that a compressed batch says it has, inflated; 0: it is plain.

    Each of its buffers begins with its inflated size, or -1 if just this one is plain.
    """
    start = _HEAD.size + _HEAD.unpack_from(message)[1]
    metadata = message[_HEAD.size : start]
    batch = _header(metadata)
    if not _at(metadata, batch, 3):
        return 0
    vector, total = _pointed(metadata, batch, 2), 0
    for number in range(_value(metadata, vector, "<I")):
        offset, length = (_value(metadata, vector + 4 + 16 * number + at, "<q") for at in (0, 8))
        if length:
            size = _value(message, start + offset, "<q")
            if size < -1:
                raise ValueError(f"a buffer of {size:,} bytes")
            total += length if size == -1 else size
    return total


# --- what `datasets` writes beside its files ------------------------------------------------------


def splits_in(storage: Location) -> list[str]:
    """Return the names of the splits of a DatasetDict, which are folders; [] where none is."""
    found = _described(storage, SPLITS)
    names = found.get("splits", [])
    if not are_names(names):
        raise DamageError(f"{path_in(storage, SPLITS)}: expected names of folders as `splits`")
    return names


def _check_listed(storage: Location, name: str, shown: str) -> None:
    """Raise SourceError for a file that is none of its dataset, or a dataset that lacks one."""
    folder, slash, own = name.rpartition("/")
    state = f"{folder}{slash}{STATE}"
    where, found = path_in(storage, state), _described(storage, state)
    if found.get("_indices_data_files") or found.get("_indices_files"):
        raise SourceError(
            f"{where}: the dataset is a selection of the rows in its files, or another order of "
            "them. Write it anew, with the rows that it has:\n"
            "  datasets.load_from_disk(DIR).flatten_indices().save_to_disk(NEW)"
        )
    try:
        names = [one["filename"] for one in found.get("_data_files", [])]
    except (TypeError, KeyError):
        raise DamageError(f"{where}: _data_files is no list of files") from None
    if own not in names and (names or _CACHED.fullmatch(own)):
        raise SourceError(
            f"{shown}: it is none of the dataset's files, as {STATE} or its name says, but may be "
            "what `map` has cached. Move it away, or choose the others: --files 'data-*'"
        )
    if names.count(own) > 1:  # `datasets` reads it as often as it is listed
        raise SourceError(
            f"{where}: it lists {printable(own)} {names.count(own)} times; expected each file "
            "once. If its rows are to come more than once, write the dataset anew:\n"
            "  datasets.load_from_disk(DIR).save_to_disk(NEW)\n"
            "Else remove the repeated entries"
        )
    if names:
        check_next(storage, names, name, where)


def _described(storage: Location, name: str) -> dict[str, Any]:
    """Return an object of JSON; {} where there is none. Raises DamageError."""
    try:
        found = parse_json(storage.read(name, _MAX_JSON))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DamageError(f"{path_in(storage, name)}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DamageError(f"{path_in(storage, name)}: expected an object")
    return found
