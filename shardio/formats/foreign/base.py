"""Shards of other formats, read in place: byte ranges of a file, and an index beside the manifest.

Each format is a `ForeignFile`: it finds the records of a file, and the values in a record's bytes.
All else is here, once: the index (`Sidecar`), checksums, reading one by one and in large blocks,
and the values as fields of the dataset. `packing/scan` walks through files and writes the index;
`ForeignShard` reads with both.

The index of shard number N, little-endian, named as our shards are, by its content:

    magic 8 | version u16 | checksum kind u8 | 0 u8 | shard number u32 | dataset id 16 | records u64
    | length u64 of the description | description: msgpack {"columns": [[name, dtype, nulls], ...],
      "extra": bytes of the format}
    | offsets u64[n] | lengths u32[n] | checksums u64[n] | key hashes u32[n]
    | each column: values [n], validity u8[n] if nulls | checksum u64 of all before

A record's checksum is that of its bytes in the file, so that what is flipped there later is found
whatever the format itself checks. What the format checks is checked when the index is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ...errors import DamageError, ShardioError, SourceError, StorageError, VersionError, printable
from ...names import KEY, key_bytes
from ...storage.base import File, Location, path_in
from ..base import MAX_RECORDS, Column, Opening, ShardInfo
from ..index import SCALARS, checksum, dump_columns, key_hash, take_columns
from ..sample import MAX_KEY, Sample, give_text_key, pack, unpack

VERSION = 0
MAGIC = b"\x89SHI\r\n\x1a\n"
XXH3_64 = 1
MAX_RECORD = (1 << 32) - 1  # bytes
MAX_SIDECAR = 1 << 36  # bytes
MAX_JSON = 16 << 20  # bytes of one value: "{}," becomes 24 times as much
_HEADER = struct.Struct("<8sHBBI16sQQ")
_U64 = struct.Struct("<Q")
_BLOCK = 120 << 10  # bytes that are read at once, as of record shards: malloc maps larger ones anew
_GAP = 64 << 10  # bytes between records that are read rather than sought over
_CHUNK = 4096  # records whose places are looked up at once
_SMALL = 16 << 10  # bytes of a read, and between two, up to which a block is read instead
_KEPT_BYTES = 4 << 20  # bytes of a read that are kept, as smaller reads of them often follow
_ALIGNED = 4096

Values = dict[str, Any]
Walked = tuple[int, int, bytes, Values]  # offset, length, bytes and values of a record


class WrappedFile:
    """A file of storage, and what is known of it besides: a base class."""

    def __init__(self, file: File | HashingFile) -> None:
        self._file = file
        self.name: str = file.name
        self.size: int = file.size

    def sha256(self) -> bytes:
        """Return the SHA-256 of the file, 32 bytes."""
        return self._file.sha256()

    def will_need(self, start: int, length: int, *, keep: bool = False) -> None:
        """Announce a range that will be read soon."""
        self._file.will_need(start, length, keep=keep)

    def scattered(self) -> None:
        """Say that reads will be in no order."""
        self._file.scattered()

    def close(self) -> None:
        """Close the file; closing it twice does no harm."""
        self._file.close()


class ForeignFile(WrappedFile):
    """An open file of another format: where its records are, and the values in a record's bytes.

    Each format is a subclass. Threads share a file once it is open.

    extra: what the method `extra` gave when the file was indexed; empty until then.
    size: bytes that it must have; -1: it was not indexed yet.
    sweep: the file is read from front to back, or nearly so, and hashed meanwhile.
    Raises FileNotFoundError, StorageError, DamageError; SourceError if it is not read in place.
    """

    lists: ClassVar[bool] = False  # values are lists; where all have one element, that is the value
    ranges: ClassVar[bool] = True  # a record is a range of the file; else no bytes are its own
    memory = 0  # bytes that the file takes while it is open, where those are many

    def __init__(
        self,
        storage: Location,
        name: str,
        extra: bytes = b"",
        *,
        size: int = -1,
        sweep: bool = False,
    ) -> None:
        file = storage.sweep(name) if sweep else storage.open(name)
        super().__init__(HashingFile(file, hashed=storage.remote) if sweep else file)
        self.read: Callable[[int, int], bytes] = self._file.read
        try:
            if size not in (-1, file.size):
                raise other_size(path_in(storage, name), file.size, size)
            self._open(storage, name, extra)
        except BaseException:
            file.close()
            raise

    def _open(self, storage: Location, name: str, extra: bytes) -> None:
        """Take up what a format needs besides the file. The file is closed if this raises."""

    def scan(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) of each record, in storage order.

        Raises DamageError naming the byte; SourceError if the file cannot be read in place.
        """
        raise NotImplementedError

    def extra(self) -> bytes:
        """Return what opening needs besides the file, once it is scanned."""
        return b""

    def values(self, data: bytes, record: int) -> Values:
        """Return the values of a record, owned, by their own names; its key, if any, as KEY.

        Raises ValueError if the bytes are not what the format says.
        """
        raise NotImplementedError

    def walk(self) -> Iterator[Walked]:
        """Yield every record in storage order, for the index. Raises as `scan` and `read` do.

        Raises DamageError if the bytes of a record are not what the format says.
        """
        for record, (offset, length) in enumerate(self.scan()):
            self.check_length(record, offset, length)
            data = self.read(offset, length) if self.ranges else b""
            try:
                found = self.values(data, record)
            except ValueError as error:
                raise self.undecodable(record, offset, error) from None
            yield offset, length, data, found

    def classes(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the classes that the file has, by field: few formats have any."""
        return {}

    def largest_group(self) -> tuple[int, int]:
        """Return rows and decoded bytes of the largest row group; (0, 0) without row groups."""
        return 0, 0

    def check_length(self, record: int, offset: int, length: int) -> None:
        """Raise DamageError if no index could hold a record of this number and length."""
        if length > MAX_RECORD or record >= MAX_RECORDS:
            raise DamageError(
                f"{self.name}: record {record} at byte {offset}: {length:,} bytes; a record has at "
                f"most {MAX_RECORD:,}, and a shard {MAX_RECORDS:,} of them"
            )

    def undecodable(self, record: int, offset: int, error: ValueError) -> DamageError:
        """Return the error for a record whose bytes are not what the format says."""
        return DamageError(f"{self.name}: record {record} at byte {offset}: {error}")

    def cut_short(self, at: int, expected: int) -> DamageError:
        """Return the error for a record that the file ends within."""
        return DamageError(
            f"{self.name}: record at byte {at}: it takes {expected:,} bytes, but the file ends "
            f"after {self.size - at:,}. The file was cut short"
        )


def other_size(shown: str, found: int, expected: int, what: str = "it") -> DamageError:
    """Return the error for a file whose size is not that which was indexed."""
    return DamageError(
        f"{shown}: it has {found:,} bytes, but had {expected:,} when it was indexed. Restore it, "
        f"or index {what} anew"
    )


def check_next(storage: Location, names: Sequence[str], name: str, where: str) -> None:
    """Raise SourceError where the file behind this one in its dataset's list is not there.

    Each file looks for the next one: so any that is missing is missed. where: the list's path.
    """
    folder, slash, own = name.rpartition("/")
    after = str(names[(names.index(own) + 1) % len(names)])
    with contextlib.suppress(UnicodeEncodeError):  # half of a surrogate pair names no file
        if "/" not in after and storage.exists(f"{folder}{slash}{after}"):
            return
    raise SourceError(f"{where}: it lists {printable(after)}, which is not there. Copy it, too")


class HashingFile(WrappedFile):
    """A file that is hashed by the reads that come anyway, so that its bytes are read once.

    Small reads near each other are slices of blocks: 0.2 us each instead of 1.
    """

    def __init__(self, file: File, *, hashed: bool = False) -> None:
        """hashed: the file hashes itself as it is read."""
        super().__init__(file)
        self._digest = None if hashed else hashlib.sha256()
        self._hashed = 0  # bytes from the beginning that were
        self._block, self._base = b"", 0  # what was read last, and from where
        self._end, self._length = 0, 0  # of the last read that was no slice

    def read(self, start: int, length: int) -> bytes:
        """Read `length` bytes from `start`. Raises DamageError."""
        at = start - self._base
        if at >= 0 and at + length <= len(self._block):
            return self._block[at : at + length]
        begin, size = start, length
        if max(length, self._length) < _SMALL and abs(start - self._end) < _SMALL:
            begin = start // _ALIGNED * _ALIGNED  # values on a page may come from its end on
            size = max(min(_BLOCK, self.size - begin), start + length - begin)
        data = self._file.read(begin, size)
        self._end, self._length = start + length, length
        if size <= _KEPT_BYTES:
            self._block, self._base = data, begin
        if begin <= self._hashed + _GAP:
            self._hash(begin, data)
        return data if size == length else data[start - begin : start - begin + length]

    def _hash(self, start: int, data: bytes) -> None:
        if self._digest is None:
            return
        if start > self._hashed:  # what lies between two records
            self._digest.update(self._file.read(self._hashed, start - self._hashed))
            self._hashed = start
        if start + len(data) > self._hashed:
            self._digest.update(memoryview(data)[self._hashed - start :])
            self._hashed = start + len(data)

    def sha256(self) -> bytes:
        """Return the SHA-256 of the file, 32 bytes."""
        if self._digest is None:
            return self._file.sha256()
        while (left := self.size - self._hashed) > 0:
            self._hash(self._hashed, self._file.read(self._hashed, min(_KEPT_BYTES, left)))
        return self._digest.digest()


# --- the index ------------------------------------------------------------------------------------


class Sidecar(NamedTuple):
    """The index of one foreign shard."""

    offsets: Column  # (records,) uint64
    lengths: Column  # (records,) uint32
    checksums: Column  # (records,) uint64
    key_hashes: Column  # (records,) uint32
    columns: Mapping[str, Column]  # by source, masked where None
    extra: bytes  # of the format


def dump(
    number: int,
    dataset_id: bytes,
    ranges: Sequence[tuple[int, int]] | Sequence[int],
    checksums: Sequence[int],
    hashes: Sequence[int],
    columns: Mapping[str, Sequence[Any]],
    extra: bytes,
) -> bytes:
    """Return the bytes of an index.

    ranges: (offset, length) of each record, or both in turns. columns: scalar values, or None, by
    the name of their field.
    """
    described, data = dump_columns(columns)
    text = pack({"columns": described, "extra": extra})
    pairs = np.array(ranges, np.uint64).reshape(-1, 2)
    body = b"".join(
        (
            _HEADER.pack(MAGIC, VERSION, XXH3_64, 0, number, dataset_id, len(pairs), len(text)),
            text,
            pairs[:, 0].astype("<u8").tobytes(),
            pairs[:, 1].astype("<u4").tobytes(),
            np.array(checksums, "<u8").tobytes(),
            np.array(hashes, "<u4").tobytes(),
            data,
        )
    )
    return body + _U64.pack(checksum(body))


def renumbered(data: bytes, number: int) -> bytes:
    """Return an index, of which `load` found that it is right, for a shard of another number."""
    magic, version, kind, zero, _, *rest = _HEADER.unpack_from(data)
    body = _HEADER.pack(magic, version, kind, zero, number, *rest) + data[_HEADER.size : -8]
    return body + _U64.pack(checksum(body))


_ANEW = "`shardio index` makes it anew"


def sidecar_name(number: int, index_checksum: int) -> str:
    """Return the name of a shard's index: its number and the start of its own checksum."""
    return f"{number:05d}-{index_checksum >> 32:08x}.index"


def has_sidecar_name(name: str) -> bool:
    """Return whether a file is named as the index of a shard."""
    return re.fullmatch(r"\d{5,}-[0-9a-f]{8}\.index", name) is not None


def sidecar_checksum(data: bytes) -> int | None:
    """Return the checksum of an index, which is in its name; None where the bytes have another."""
    if len(data) < _HEADER.size + 8:
        return None
    (stated,) = _U64.unpack_from(data, len(data) - 8)
    return int(stated) if stated == checksum(memoryview(data)[:-8]) else None


def read_sidecar(storage: Location, info: ShardInfo) -> tuple[str, bytes]:
    """Return the name of a shard's index, and its bytes as they are. Raises DamageError."""
    name = sidecar_name(info.number, info.index_checksum)
    try:
        return name, storage.read(name, MAX_SIDECAR)
    except FileNotFoundError:
        where = path_in(storage, name)
        raise DamageError(
            f"{where}: the index of {printable(info.name)} is not there; {_ANEW}"
        ) from None


def load(storage: Location, info: ShardInfo, dataset_id: bytes) -> Sidecar:
    """Read and check the index of a shard. Raises DamageError, StorageError, VersionError."""
    name, data = read_sidecar(storage, info)
    where = path_in(storage, name)
    if len(data) < _HEADER.size + 8 or not data.startswith(MAGIC):
        raise DamageError(f"{where}: it is no index of a shard, or was cut short; {_ANEW}")
    _, version, kind, zero, number, found_id, records, length = _HEADER.unpack_from(data)
    if version > VERSION or kind != XXH3_64:
        raise VersionError(
            f"{where}: version {version}, checksum kind {kind}; this shardio reads up to version "
            f"{VERSION} and knows kind {XXH3_64}"
        )
    (stated,) = _U64.unpack_from(data, len(data) - 8)
    found = checksum(memoryview(data)[:-8])
    if found != stated or zero:
        raise DamageError(
            f"{where}: its checksum is {found:#018x}, expected {stated:#018x}; {_ANEW}"
        )
    expected = (info.index_checksum, info.number, dataset_id, info.records)
    if (stated, number, found_id, records) != expected:
        raise DamageError(f"{where}: it is not the index that the manifest names; {_ANEW}")
    try:
        return _parse(memoryview(data)[: len(data) - 8], records, length)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise DamageError(f"{where}: not an index: {error}; {_ANEW}") from None


def _parse(data: memoryview, records: int, length: int) -> Sidecar:
    at = _HEADER.size + length
    if records > MAX_RECORDS or at + 24 * records > len(data):
        raise ValueError(f"it is too short for {records:,} records")
    described = unpack(data[_HEADER.size : at])
    arrays: list[Column] = []
    for dtype in ("<u8", "<u4", "<u8", "<u4"):
        arrays.append(np.frombuffer(data, dtype, records, at))
        at += arrays[-1].nbytes
    columns, at = take_columns(data, at, records, described["columns"])
    extra = described["extra"]
    if at != len(data) or type(extra) is not bytes:
        raise ValueError("it is not as long as its columns say")
    return Sidecar._make((*arrays, columns, extra))


# --- values as fields -----------------------------------------------------------------------------


def only(value: Any) -> Any:
    """Return the element of a list or array of one; other values as they are."""
    if type(value) is list:
        return value[0] if len(value) == 1 else value
    if isinstance(value, np.ndarray) and value.size == 1:
        return value.reshape(()).item()
    return value.item() if isinstance(value, np.generic) else value


def parse_json(data: bytes, encoding: str | None = None) -> Any:
    """Decode a value that is JSON. Raises ValueError, too, if it is large or nested deep.

    encoding: the only one that it may be in; None: any that JSON may be in.
    """
    if len(data) > MAX_JSON:
        raise ValueError(f"JSON of {len(data):,} bytes; at most {MAX_JSON:,} are decoded")
    try:
        return json.loads(data if encoding is None else data.decode(encoding))
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None


def _blob(value: Any) -> bytes:
    value = only(value) if not isinstance(value, bytes) else value
    if not isinstance(value, bytes):
        raise ValueError(f"expected bytes, found {type(value).__name__}")
    return value


def _array(value: Any) -> Any:
    if isinstance(value, bytes | str):
        raise ValueError(f"expected an array, found {type(value).__name__}")
    return value if isinstance(value, np.ndarray) else np.array(value)


def _scalar(kind: type) -> Callable[[Any], Any]:
    allowed = (int, float) if kind is float else (kind,)

    def convert(value: Any) -> Any:
        if type(value) is kind:
            return value
        value = only(value)
        if type(value) not in allowed:
            raise ValueError(f"expected {kind.__name__}, found {type(value).__name__}")
        try:
            return kind(value)
        except OverflowError:
            raise ValueError(f"an integer of {value.bit_length():,} bits is no float") from None

    return convert


def _text(value: Any) -> str:
    value = only(value) if not isinstance(value, (str, bytes)) else value
    if isinstance(value, bytes):
        value = value.decode("utf-8")
    if not isinstance(value, str):
        raise ValueError(f"expected str, found {type(value).__name__}")
    return value


CONVERT: dict[str, Callable[[Any], Any]] = {
    "image": _blob,
    "bytes": _blob,
    "array": _array,
    "int": _scalar(int),
    "float": _scalar(float),
    "bool": _scalar(bool),
    "str": _text,
    "json": lambda value: value,
}


# Of the columns that a field of a kind may have: each shard has that of the values in it.
_DTYPES = {"bool": "b", "int": "iu", "float": "iuf", "array": "iuf", "json": "biuf"}
_COLUMNED = [CONVERT[kind] for kind in SCALARS]


def own_key(name: str, record: int) -> bytes:
    """Return the key of a record that has none: its shard, without the ending, and its number."""
    return b"%b%08d" % (_own_keys(name), record)


@lru_cache(maxsize=64)
def _own_keys(name: str) -> bytes:
    """Return what the keys of a shard begin with that has none of its own."""
    folder, slash, file = name.rpartition("/")
    stem, _, ending = file.rpartition(".")
    if not stem or "-of-" in ending:  # train.tfrecord-00001-of-00004
        stem = file
    return key_bytes(f"{folder}{slash}{stem}/")


class Field(NamedTuple):
    """One field, and where its value comes from."""

    name: str
    source: str
    convert: Callable[[Any], Any]


def key_of(values: Values, name: str, record: int) -> bytes:
    """Return a record's key, its own or made of its place. Raises ValueError."""
    key = only(values.get(KEY))
    if key is None:
        key = own_key(name, record)
    elif isinstance(key, (int, str)) and not isinstance(key, bool):
        key = key_bytes(str(key))
    elif not isinstance(key, bytes):
        raise ValueError(
            f"its {KEY} is {type(key).__name__}; expected bytes, text or an integer. Write the "
            "data anew with another name for it"
        )
    if not 0 < len(key) <= MAX_KEY:
        raise ValueError(f"a key of {len(key):,} bytes; expected 1 to {MAX_KEY:,}")
    return key


@lru_cache(maxsize=64)  # each shard that is opened has the fields of the one before
def _compile(fields: tuple[Field, ...]) -> Callable[[Values, str, int], Sample]:
    """Compile what makes a sample of a record's values, for exactly these fields.

    That takes a third of the time of a loop over the fields. The text depends only on their number
    and kinds; names are passed as values. Calls raise ValueError naming the field.
    """
    text = ["def sample(values, name, record):", "    get = values.get", "    key = get(KEY)"]
    text += ["    if type(key) is not bytes or not 0 < len(key) <= MAX_KEY:"]
    text += ["        key = key_of(values, name, record)", "    try:"]
    scope: dict[str, Any] = {"KEY": KEY, "MAX_KEY": MAX_KEY, "key_of": key_of, "np": np}
    for i, (name, source, convert) in enumerate(fields):
        scope |= {f"n{i}": name, f"s{i}": source, f"c{i}": convert}
        text.append(f"        v{i} = get(s{i})")
        plain = _PLAIN_TYPES.get(convert)
        if plain is not None:
            text += [f"        if type(v{i}) is not {plain} and v{i} is not None:"]
            text += [f"            source = s{i}", f"            v{i} = c{i}(v{i})"]
    pairs = "".join(f", n{i}: v{i}" for i in range(len(fields)))
    text.append(f"        return {{KEY: key{pairs}}}")
    text += ["    except (ValueError, TypeError) as error:"]
    text += ["        raise ValueError(f'{source}: {error}') from None"]
    exec("\n".join(text), scope)
    compiled: Callable[[Values, str, int], Sample] = scope["sample"]
    return compiled


# The type of values that need no converting; of those that are given as they are, none.
_PLAIN_TYPES = {
    CONVERT["image"]: "bytes",
    CONVERT["int"]: "int",
    CONVERT["float"]: "float",
    CONVERT["bool"]: "bool",
    CONVERT["str"]: "str",
    CONVERT["array"]: "np.ndarray",
}


# --- reading --------------------------------------------------------------------------------------


class ForeignShard:
    """One shard of a foreign format, open. See formats.base.Shard."""

    def __init__(self, kind: type[ForeignFile], opening: Opening, info: ShardInfo) -> None:
        self._index = load(opening.index_location, info, opening.dataset_id)
        try:
            self._file = kind(opening.storage, info.name, self._index.extra, size=info.size)
        except ShardioError:
            raise
        except (ValueError, TypeError, LookupError, struct.error) as error:
            raise DamageError(
                f"{printable(info.name)}: its index does not describe it: {error}. "
                "`shardio index` makes it anew"
            ) from None
        self._info, self._remote = info, opening.storage.remote
        self.name = path_in(opening.storage, info.name)
        sources = opening.options.get("fields", {})  # the format's names that differ there
        self._fields = [
            Field(name, sources.get(name, name), CONVERT[kind])
            for name, kind in opening.schema.fields
            if name != KEY
        ]
        self._sample = _compile(tuple(self._fields))
        self.records = len(self._index.offsets)
        self.key_hashes = self._index.key_hashes
        self.sizes: Column = self._index.lengths.astype(np.int64)
        self._offsets: Column = self._index.offsets.view("<i8")
        self.memory = self._file.memory
        columns = self._index.columns  # by the format's own names
        self.columns = {
            name: columns[source]
            for name, source, convert in self._fields
            if convert in _COLUMNED and source in columns
        }
        self._check_columns(opening)

    def _check_columns(self, opening: Opening) -> None:
        """Raise DamageError where columns are not of their fields, or labels of no class."""
        sources = opening.options.get("fields", {})
        for name, kind in opening.schema.fields:
            column = self._index.columns.get(sources.get(name, name))
            if column is None or not column.size:
                continue
            why = ""
            if column.dtype.kind not in _DTYPES.get(kind, ""):
                why = f"its index has values of {printable(name)!r} that are not of kind {kind}"
            elif (
                name == "label" and opening.classes is not None and column.max() >= opening.classes
            ):
                why = f"its label, {column.max()}, is none of {opening.classes:,} classes"
            if why:
                self._file.close()
                raise DamageError(f"{self.name}: {why}. `shardio index` makes the index anew")

    def read(self, record: int) -> Sample:
        """Read one record. Raises DamageError."""
        return self.decode(record, self._bytes(record))

    def scan(self, start: int, stop: int, *, text: bool = False) -> Iterator[Sample]:
        """Yield records [start, stop) in storage order. text: with keys as str."""
        samples = self._scan(start, stop)
        return map(give_text_key, samples) if text else samples

    def _scan(self, start: int, stop: int) -> Iterator[Sample]:
        sums, values, sample = self._index.checksums, self._file.values, self._sample
        name = self._info.name
        record = start
        for held in self._blocks(start, stop):
            for data, expected in zip(
                held, sums[record : record + len(held)].tolist(), strict=True
            ):
                if checksum(data) != expected:
                    raise self._differs(record, data)
                try:
                    found = sample(values(data, record), name, record)
                except (ValueError, TypeError, StorageError) as error:
                    raise self._undecodable(record, error) from None
                yield found
                record += 1

    def hold(self, start: int, stop: int) -> list[bytes]:
        """Return records [start, stop) as bytes, unchecked, to be decoded later."""
        return list(chain.from_iterable(self._blocks(start, stop)))

    def decode(self, record: int, held: bytes) -> Sample:
        """Decode what `hold` gave for a record. Raises DamageError."""
        if checksum(held) != int(self._index.checksums[record]):
            raise self._differs(record, held)
        return self._decoded(record, held)

    def key(self, record: int) -> bytes:
        """Return the key of a record. Raises DamageError."""
        key = bytes(self._decoded(record, self._bytes(record))[KEY])
        if key_hash(key) != int(self.key_hashes[record]):
            raise DamageError(
                f"{self._where(record)}: its key {printable(key)} is not the one that was indexed"
            )
        return key

    def keys(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the keys of records [start, stop), by few round trips. Raises DamageError."""
        if self._remote:
            return (bytes(sample[KEY]) for sample in self.scan(start, stop))
        return map(self.key, range(start, stop))

    def offset(self, record: int) -> int:
        """Return the byte at which a record begins."""
        return int(self._offsets[record])

    def checksums(self, record: int) -> tuple[int, int] | None:
        """Return a record's checksum in the index, and that of its bytes; None: it has none."""
        if not self._file.ranges:
            return None
        return int(self._index.checksums[record]), checksum(self._bytes(record))

    def will_need(self, start: int, stop: int, *, keep: bool = False) -> None:
        """Announce that records [start, stop) will be read soon."""
        if stop - start == 1:
            begin, size = int(self._offsets[start]), int(self.sizes[start])
            self._file.will_need(begin, size, keep=keep)
        elif start < stop:
            for begin, end in self._extents(start, stop):
                self._file.will_need(begin, end - begin, keep=keep)

    def scattered(self) -> None:
        """Say that records will be read in no order."""
        self._file.scattered()

    def check(self) -> None:
        """Do nothing: the index vouches for records, not for what lies between them."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _bytes(self, record: int) -> bytes:
        return self._file.read(self.offset(record), int(self.sizes[record]))

    def _extents(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Find the parts of the file where records [start, stop) lie, in whatever order they do."""
        begins = self._offsets[start:stop]
        ends = begins + self.sizes[start:stop]
        if (begins[1:] < begins[:-1]).any():
            order = np.argsort(begins, kind="stable")
            begins, ends = begins[order], np.maximum.accumulate(ends[order])
        gaps = np.flatnonzero(begins[1:] - ends[:-1] > _GAP)
        firsts, lasts = np.append(0, gaps + 1), np.append(gaps, stop - start - 1)
        return zip(begins[firsts].tolist(), ends[lasts].tolist(), strict=True)

    def _blocks(self, start: int, stop: int) -> Iterator[list[bytes]]:
        """Yield the bytes of records [start, stop): of those that lie close together at once."""
        for at in range(start, stop, _CHUNK):
            begins = self._offsets[at : min(at + _CHUNK, stop)].tolist()
            sizes = self.sizes[at : min(at + _CHUNK, stop)].tolist()
            first, count = 0, len(begins)
            while first < count:
                low, high = begins[first], begins[first] + sizes[first]
                last = first + 1
                while last < count:  # in any order: values on a page may lie from its end on
                    begin = begins[last]
                    end = begin + sizes[last]
                    if begin < low:
                        if high - begin > _BLOCK or low - end > _GAP:
                            break
                        low = begin
                    if end > high:
                        if end - low > _BLOCK or begin - high > _GAP:
                            break
                        high = end
                    last += 1
                data = self._file.read(low, high - low)
                if last == first + 1:
                    yield [data]
                else:
                    yield [
                        data[begin - low : begin - low + size]
                        for begin, size in zip(begins[first:last], sizes[first:last], strict=True)
                    ]
                first = last

    def _decoded(self, record: int, data: bytes) -> Sample:
        try:
            return self._sample(self._file.values(data, record), self._info.name, record)
        except (ValueError, TypeError, StorageError) as error:
            raise self._undecodable(record, error) from None

    def _undecodable(self, record: int, error: Exception) -> DamageError:
        return DamageError(f"{self._where(record)}: {error}")

    def _differs(self, record: int, data: bytes) -> DamageError:
        return DamageError(
            f"{self._where(record)}: its checksum is {checksum(data):#018x}, expected "
            f"{int(self._index.checksums[record]):#018x}.\nThe file differs from what was "
            "indexed; restore it, or index it anew"
        )

    def _where(self, record: int) -> str:
        return f"{self.name}: record {record} at byte {self.offset(record)}"
