"""The record shard: samples one after another, an index behind them, all of it checked.

Little-endian; no holes, no overlaps. docs/format.md specifies it for readers in other languages.

    header    magic 8 | version u16 | checksum kind u8 | 0 u8 | shard number u32 | dataset id 16
              | length u32 of the fields | fields: msgpack [[name, kind], ...] | checksum u64
    record    checksum u64 | length u32 | head u32 | head: msgpack array | blobs      (repeated)
    index     length u32 of the description | description: msgpack [[name, dtype, nulls], ...]
              | lengths u32[n] | key hashes u32[n]
              | each column: values [n], validity u8[n] if nulls
    trailer   index offset u64 | index length u64 | records u32 | shard number u32 | version u16
              | checksum kind u8 | 0 u8 | dataset id 16 | checksum u64 | magic 8

Version 0 has such records only. In version 1 some were erased (packing/erase.py): frames of length
0 and head 0, with a key hash of 0, and 0 in the columns, null where a column has nulls.

A record's `length` counts head and blobs, `head` the bytes of its head alone. Its checksum covers
all that follows it, and is seeded with the shard and the record's number, so that a record in
another's place, of this shard or another, is damage too (see `seed_of`). The header's checksum
covers all before it; the trailer's, the index and the trailer before it. All are xxh3_64
(https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
"""

from __future__ import annotations

import contextlib
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, Protocol

import numpy as np
import xxhash

from .. import native
from ..errors import DamageError, SampleError, VersionError, printable
from ..names import KEY
from ..storage.base import File
from .base import MAX_RECORDS, Column, Readable, Shard, ShardInfo
from .index import SCALARS, dump_columns, key_hash, take_columns
from .index import checksum as _checksum
from .places import PackedSizes, Places
from .sample import (
    MAX_BODY,
    MAX_HEAD,
    Buffer,
    Sample,
    Schema,
    check_schema,
    give_text_key,
    pack,
    pack_head,
    unpack,
    unpack_head,
    unpack_key,
)

VERSION = 0  # that packing writes
ERASED = 1  # of a shard that records were erased from; the newest that is read
MAGIC = b"\x89SHD\r\n\x1a\n"  # a high byte, a name, CR LF, ctrl-Z, LF: text-mode transfers break it
END_MAGIC = b"\x89DHS\r\n\x1a\n"
XXH3_64 = 1  # the only checksum kind so far; a byte leaves room for others

_HEADER = struct.Struct("<8sHBBI16sI")
FRAME = struct.Struct("<QII")
_TRAILER = struct.Struct("<QQIIHBB16s")  # what its checksum covers
_END = struct.Struct("<Q8s")  # checksum and magic
_TRAILER_SIZE = _TRAILER.size + _END.size
_LENGTHS = struct.Struct("<II")
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")
MAX_FIELDS_BYTES = 1 << 19  # of a list of fields; the longest that Schema allows takes 266 KB

# Records from this size on are read blob by blob straight into the bytes that are handed out: at
# 110 KB 13.7 us against 15.9 us for one read and a copy; at 0.9 KB 2.3 us against 2.0.
LARGE = 16 << 10
_KEYS = 256  # records whose heads are asked for at once
ATTEMPTS = 4  # to read again what came damaged over a network
_FEW = 16 << 10  # bytes whose copy costs no more than a view of them
_FIRST = 256  # bytes read of such a record first: frame and head of nearly all
_RUN = 1 << 20  # bytes read at once of records that are only copied
BLOCK = 120 << 10  # bytes of small records read at once: malloc maps 128 KiB anew, 0.1 us a record
_AT_ONCE = 4096  # records whose places are looked up at once
# Bytes of an index that an open shard keeps whole, as that of photographs is. A larger one is read
# again when it is asked for; the newest of these are kept in a process, in so many bytes.
SMALL_INDEX = 128 << 10
LARGE_INDEXES = 4 << 20

# Kinds of fields whose values the core makes; it knows them by these letters.
_TEXT_KEY = b"t"  # in place of "k": a str
_LETTERS = dict(key="k", int="i", float="f", bool="b", str="s", image="B", bytes="B")


def seed_of(dataset_id: bytes, number: int) -> int:
    """Return the seed of a shard's record 0, to which a record's number is added; low half 0.

    Records of one size lie at the same offsets in every shard, so with a seed of the number alone a
    block that the disk put into the wrong file would pass. Costs nothing: 25 ns are for any seed.
    """
    assert len(dataset_id) == 16
    return int(_checksum(_U32.pack(number) + dataset_id)) & 0xFFFFFFFF00000000


class RecordEncoder:
    """An encoder of samples to the bytes of one shard: `header`, then each `record`, then `finish`.

    Writes nothing itself; the caller appends what each call returns to one file, in order.
    `starts_last`: at the end, `start` is written over the first bytes of the file.
    """

    starts_last = False
    start = b""

    max_body = MAX_BODY  # bytes of head and blobs of one record

    def __init__(
        self, schema: Schema, dataset_id: bytes, number: int, *, version: int = VERSION
    ) -> None:
        self.schema, self.dataset_id, self.number = schema, dataset_id, number
        self.version = version
        self.records = 0
        self.blob_bytes = 0
        self.index_checksum = 0
        self._seed = seed_of(dataset_id, number)
        self._size = 0
        self._lengths: list[int] = []
        self._hashes: list[int] = []
        self._columns: list[tuple[int, list[Any]]] = [
            (i, []) for i, (_, kind) in enumerate(schema.fields) if kind in SCALARS
        ]
        self._values: Mapping[str, Sequence[Any]] = {
            schema.names[i]: values for i, values in self._columns
        }

    def header(self) -> bytes:
        """Return the first bytes of the file."""
        fields = pack([list(field) for field in self.schema.fields])
        places = self.number, self.dataset_id, len(fields)
        data = _HEADER.pack(MAGIC, self.version, XXH3_64, 0, *places) + fields
        data += _U64.pack(_checksum(data))
        self._size = len(data)
        return data

    def record(self, sample: Mapping[str, Any]) -> tuple[bytes, ...]:
        """Encode a sample; return pieces to be written one after the other.

        Raises SampleError when the sample does not fit the fields or the limits.
        """
        return self.append(*self.schema.encode(sample))

    def append(self, values: list[Any], blobs: Sequence[Buffer]) -> tuple[bytes, ...]:
        """Do what `record` does, for values and blobs that are known to fit the fields."""
        head = pack_head(values)
        length = len(head) + sum(map(len, blobs))
        if length > self.max_body:
            raise SampleError(
                f"sample {printable(values[0])}: {length:,} bytes; a record holds at most "
                f"{self.max_body:,}"
            )
        if self.records == MAX_RECORDS:
            raise SampleError(f"a shard holds at most {MAX_RECORDS:,} records")
        hashed = b"".join((_LENGTHS.pack(length, len(head)), head, *blobs))
        self._lengths.append(length)
        self._hashes.append(_checksum(values[0]) & 0xFFFFFFFF)
        for i, column in self._columns:
            column.append(values[i])
        checksum = _U64.pack(_checksum(hashed, self._seed + self.records))
        self.records += 1
        self.blob_bytes += length - len(head)
        self._size += 16 + length
        return checksum, hashed

    def append_stored(self, stored: bytes | None) -> tuple[bytes, ...]:
        """Append a record as another shard of this number stores it; None: one that is erased.

        Its checksum stays, since it has the same place. `index_as` says how these are indexed.
        """
        if stored is None:
            hashed = _LENGTHS.pack(0, 0)
            stored = _U64.pack(_checksum(hashed, self._seed + self.records)) + hashed
        self._lengths.append(len(stored) - FRAME.size)
        self.records += 1
        self._size += len(stored)
        return (stored,)

    def index_as(self, hashes: Sequence[int], columns: Mapping[str, Sequence[Any]]) -> None:
        """Index the records by these key hashes and values, one a record."""
        self._hashes, self._values = list(hashes), columns

    def finish(self) -> bytes:
        """Return the last bytes of the file: the index and the trailer."""
        described, data = dump_columns(self._values)
        text = pack(described)
        lengths, hashes = (np.array(of, "<u4").tobytes() for of in (self._lengths, self._hashes))
        index = b"".join((_U32.pack(len(text)), text, lengths, hashes, data))
        places = self._size, len(index), self.records, self.number
        hashed = index + _TRAILER.pack(*places, self.version, XXH3_64, 0, self.dataset_id)
        self.index_checksum = int(_checksum(hashed))
        return hashed + _END.pack(self.index_checksum, END_MAGIC)


class RecordShard:
    """One shard, open for reading; see formats/base.py for what each method promises.

    info: what the manifest says of it; the shard must agree. None reads a shard on its own.
    verify: check what no read checks; of this format that is nothing.
    schema: the fields that the manifest says it has.
    Opening reads header, trailer and index and checks them: DamageError, VersionError. Of a remote
    file the header is left unread: all that it says stands in the trailer and the manifest.
    """

    memory = 0
    adjacent = True  # a record begins where the one before ends

    def __init__(
        self,
        file: File,
        info: ShardInfo | None = None,
        dataset_id: bytes | None = None,
        *,
        verify: bool = True,
        schema: Schema | None = None,
    ) -> None:
        self._file = file
        self.name = file.name
        self._remote = bool(
            info and schema and dataset_id and file.keep_end(most_of_end(info.records, schema))
        )
        start, end, sizes = self._describe(file, info, dataset_id, schema)
        offsets = np.empty(self.records + 1, np.int64)
        offsets[0] = start
        np.cumsum(sizes, out=offsets[1:])
        offsets[1:] += start
        if offsets[-1] != end:
            raise DamageError(
                f"{file.name}: its {self.records:,} records end at byte {offsets[-1]}, but "
                f"the index begins at byte {end}"
            )
        self._take_places(Places(offsets))

    def _describe(
        self,
        file: _HasIndex,
        info: ShardInfo | None,
        dataset_id: bytes | None,
        schema: Schema | None = None,
    ) -> tuple[int, int, Column]:
        """Take up what header, trailer and index of `file` say; where records begin and end.

        Returns the sizes of the records, too: (n,) int64.

        A format that keeps records elsewhere has no byte between header and index.
        """
        start, version = 0, None
        if self._remote and file is self._file and info and dataset_id and schema:
            self.schema, self.dataset_id, self.number = schema, dataset_id, info.number
        else:
            self.schema, self.dataset_id, self.number, start, version = read_header(file)
        letters = [_LETTERS.get(kind, "") for _, kind in self.schema.fields]
        self._letters = "".join(letters).encode() if all(letters) else b""
        # Asked once: it reads one record, and to ask takes a tenth of that.
        core = native.records()
        self._split: Callable[..., list[bytes | None]] | None = core.split if core else None
        places, foreign_id, self.index_checksum, self.version = _read_trailer(file)
        index_offset, index_length, self.records, number = places
        if index_offset + index_length + _TRAILER_SIZE != file.size or index_offset < start:
            raise DamageError(
                f"{file.name}: the trailer places an index of {index_length:,} bytes at byte "
                f"{index_offset}, but the file is {file.size:,} bytes long"
            )
        own = self.number, self.dataset_id, self.version if version is None else version
        if (number, foreign_id, self.version) != own:
            raise DamageError(f"{file.name}: header and trailer name different shards or datasets")
        self._check_expected(info, dataset_id, schema)
        scalars = sum(kind in SCALARS for _, kind in self.schema.fields)
        least = 4 + 8 * self.records
        if not (
            least <= index_length <= least + MAX_FIELDS_BYTES + 9 * scalars * self.records
            and FRAME.size * self.records <= self._file.size - index_length
        ):
            raise DamageError(
                f"{file.name}: trailer at byte {file.size - _TRAILER_SIZE}: {self.records:,} "
                f"records cannot take {self._file.size:,} bytes with an index of "
                f"{index_length:,}"
            )
        self._index = _Index(file, index_offset, index_length, self.index_checksum)
        try:
            lengths = self._index.take_up(self.records, self.schema)
        except (TypeError, ValueError) as error:
            raise DamageError(f"{file.name}: index at byte {index_offset}: {error}") from None
        self._seed = seed_of(self.dataset_id, self.number)
        sizes = lengths.astype(np.int64) + FRAME.size
        erased = sizes == FRAME.size if self.version >= ERASED else np.empty(0, bool)
        self.erased = np.flatnonzero(erased)  # the numbers of records whose bytes were erased
        return start or index_offset - int(sizes.sum()), index_offset, sizes

    def _take_places(self, places: Places) -> None:
        """Take up where records lie, which is the last thing that opening does."""
        self._places, self.sizes = places, PackedSizes(places)
        core = native.records()
        small = places.start(self.records) - places.start(0) < LARGE * self.records
        here = core is not None and self._letters and self._file.descriptor >= 0
        self._sample: Callable[..., Sample | None] | None = None
        if core and here and small:
            self._sample = core.sample
        if self._index.is_large and self._file.descriptor < 0:
            _ = self._index.columns  # or each would be asked for by a request of its own
            self._file.forget_end()

    @property
    def key_hashes(self) -> Column:
        """Return the low half of the xxh3_64 of each key: (n,) uint32. Raises DamageError."""
        return self._index.hashes

    @property
    def columns(self) -> Mapping[str, Column]:
        """Return small scalar fields by name, one value a record, masked where None.

        Raises DamageError.
        """
        return self._index.columns

    @property
    def is_remote(self) -> bool:
        """Return whether each read of it is a round trip, unless it was announced."""
        return self._file.descriptor < 0

    def check(self) -> None:
        """Do nothing: opening checks all but the records."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def blob_bytes(self) -> int:
        """Count the bytes of all blobs, by one small read a record."""
        frames = (self._file.read(self.offset(record), 16) for record in range(self.records))
        heads = sum(FRAME.unpack(frame)[2] + 16 for frame in frames)
        return int(self.sizes[:].sum()) - int(heads)

    def offset(self, record: int) -> int:
        """Return the byte at which a record begins."""
        return self._places.start(record)

    def checksums(self, record: int) -> tuple[int, int]:
        """Return the checksum that is stored of a record, and that of its bytes as they are."""
        held = self._bytes(record)
        return FRAME.unpack_from(held)[0], int(_checksum(held[8:], self._seed + record))

    def stored(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield records [start, stop) byte for byte, checked by nobody, by large reads."""
        for _, begins, ends in self._blocks(start, stop, _RUN):
            origin = int(begins[0])
            block = memoryview(self._file.read(origin, int(ends[-1]) - origin))
            for at, end in zip((begins - origin).tolist(), (ends - origin).tolist(), strict=True):
                yield bytes(block[at:end])

    def _blocks(self, start: int, stop: int, most: int) -> Iterator[tuple[int, Column, Column]]:
        """Yield records [start, stop) in parts of up to `most` bytes, or of one record.

        Of each part: its first record, and where its records begin and end, (n,) int64 each.
        """
        while start < stop:
            begins, ends = self._places.between(start, min(start + _AT_ONCE, stop))
            at, count = 0, len(ends)
            while at < count:
                upto = int(np.searchsorted(ends, begins[at] + most, "right"))
                if upto == count and start + count < stop and at:
                    break  # it may go on behind these
                upto = max(upto, at + 1)
                yield start + at, begins[at:upto], ends[at:upto]
                at = upto
            start += at

    def read(self, record: int) -> Sample:
        """Read one record. Raises DamageError."""
        if self._sample is not None:
            names, letters, file = self.schema.names, self._letters, self._file.descriptor
            sample = self._sample(file, self._places.data, self._seed, record, names, letters)
            if sample is not None:
                return sample
        start, stop = self._places.bounds(record)
        if stop - start >= LARGE:
            return self._read_large(record, start, stop)
        return self._decode(record, self._file.read(start, stop - start))

    def _bytes(self, record: int) -> bytes:
        start, stop = self._places.bounds(record)
        return self._file.read(start, stop - start)

    def decode(self, record: int, held: bytes) -> Sample:
        """Decode what `hold` gave for a record. Raises DamageError."""
        if self._split is None:
            return self._decode(record, held)
        seed, _, head = FRAME.unpack_from(held)
        if seed != self._seed + record:
            raise DamageError(f"{self.name}: record {record}: these are the bytes of another one")
        try:
            return self.schema.decode(held, 16, 16 + head)
        except Exception as error:
            why = str(error) or type(error).__name__  # `error` keeps what was decoded in memory
        raise self._damaged(record, _U64.pack(_checksum(held[8:], seed)) + held[8:], why)

    def _decode(self, record: int, held: bytes, attempts: int = ATTEMPTS) -> Sample:
        """Check the bytes of a record, and decode them. Raises DamageError.

        attempts: of reading a remote file's record again, where what came is damaged.
        """
        checksum, length, head = FRAME.unpack_from(held)
        # A view of few bytes costs more than their copy.
        hashed = held[8:] if len(held) < _FEW else memoryview(held)[8:]
        if (
            _checksum(hashed, self._seed + record) != checksum
            or length != len(held) - 16
            or head > length
            or head > MAX_HEAD
        ):
            if self._remote and attempts:  # on the way, perhaps, and not in the store
                again = self._file.read_again(self.offset(record), len(held))
                return self._decode(record, again, attempts - 1)
            raise self._damaged(record, held, f"its head cannot be {head:,} bytes long")
        try:
            return self.schema.decode(held, 16, 16 + head)
        except Exception as error:
            why = str(error) or type(error).__name__  # `error` keeps what was decoded in memory
        raise self._damaged(record, held, why)

    def joined(self, *, held: bool) -> tuple[tuple[int, bytes, int], bytes] | None:
        """Return what the core's `join` takes of a shard: (file, places, seed), kinds of fields.

        held: of records that `hold` gave. None: they are for Python to read.
        """
        file = self._file.descriptor
        if not self._letters or not (self._split if held else file >= 0):
            return None
        return (file, self._places.data, self._seed), self._letters

    def gather(
        self,
        records: Column,
        held: Sequence[bytes | None] | None,
        begin: bytes,
        out: Column,
        rows: Column,
    ) -> bool:
        """Write what follows `begin` in the blob of record i to row rows[i] of `out`.

        records, rows: (n,) int64. held: of each what `hold` gave, or None; None: read them all.
        out: (rows, ...) uint8, contiguous. Each record has one blob, of as many bytes as `begin`
        and a row; where one has another, False, and `out` may be half written. Checked as `decode`
        does it. Raises DamageError.

        One loop over all steps: lists of pieces between them would leave the CPU's cache, which
        costs 0.5 us a record of 3 KB. The core reads, too; what it stops at is gone over again.
        """
        done, file = 0, self._file.descriptor
        core = native.records()
        if core is not None and held is None and file >= 0:
            done = core.gather(file, self._places.data, self._seed, records, begin, out, rows)
            if done == len(records):
                return True
        size, flat = out.nbytes // len(out), out.reshape(-1).data
        blob = len(begin) + size
        each = zip(records[done:].tolist(), rows[done:].tolist(), strict=True)
        for (record, row), data in zip(each, held or repeat(None), strict=False):
            data, head = self._whole(record, data)
            if head != len(data) - 16 - blob or head < 0 or not data.startswith(begin, 16 + head):
                self.read(record)  # raises, when it is damage
                return False
            flat[row * size : (row + 1) * size] = memoryview(data)[-size:]
        return True

    def blobs(
        self, records: Column, held: Sequence[bytes | None] | None = None
    ) -> list[bytes] | None:
        """Return what follows the head of each record, its one blob; parameters as of `gather`.

        Checked; None when a record is not right, which `decode` has the words for.
        """
        found: list[bytes] = []
        file = self._file.descriptor
        core = native.records()
        if core is not None and held is None and file >= 0:
            found = core.blobs(file, self._places.data, self._seed, records)
            return found if len(found) == len(records) else None
        for record, data in zip(records.tolist(), held or repeat(None), strict=False):
            data, head = self._whole(record, data)
            if head < 0:
                return None
            found.append(data[16 + head :])
        return found

    def _whole(self, record: int, held: bytes | None) -> tuple[bytes, int]:
        """Return the bytes of a record, held or read now, and of its head; -1: it is not right."""
        seed, checked = self._seed + record, held is not None and self._split is not None
        if held is None:
            held = self._bytes(record)
        found = seed if checked else _checksum(memoryview(held)[8:], seed)
        expected, length, head = FRAME.unpack_from(held)
        return held, head if found == expected and head <= length == len(held) - 16 else -1

    def scan(self, start: int, stop: int, *, text: bool = False) -> Iterator[Sample]:
        """Yield records [start, stop) in storage order. text: with keys as str."""
        # chain: a generator that delegates to another costs each sample 40 ns
        return chain.from_iterable(self._runs(start, stop, text))

    def _runs(self, start: int, stop: int, text: bool = False) -> Iterator[Iterable[Sample]]:
        """Yield records [start, stop), as many at a time as one read fetches."""
        place = self._places.start
        if place(stop) - place(start) >= (stop - start) * LARGE:
            for first in range(start, stop, _AT_ONCE):
                upto = min(first + _AT_ONCE, stop)
                begins, ends = (bounds.tolist() for bounds in self._places.between(first, upto))
                large = map(self._read_large, range(first, upto), begins, ends)
                yield map(give_text_key, large) if text else large
            return
        for first, begins, ends in self._blocks(start, stop, BLOCK):
            if ends[0] - begins[0] > BLOCK:  # among small ones; below, no head exceeds MAX_HEAD
                yield map(give_text_key, (self.read(first),)) if text else (self.read(first),)
            else:
                yield from self._decoded(first, begins, ends, text)

    def _decoded(
        self, start: int, begins: Column, ends: Column, text: bool
    ) -> Iterator[Iterable[Sample]]:
        """Yield the records from `start` on that lie at these bytes, of one read."""
        origin = begins[0]
        ends = ends - origin
        block = self._file.read(int(origin), int(ends[-1]))
        seed, done = self._seed + start, 0
        core = native.records()
        if core is not None and self._letters and self.adjacent:
            letters = _TEXT_KEY + self._letters[1:] if text else self._letters
            samples = core.samples(block, ends, seed, self.schema.names, letters)
            yield samples
            done = len(samples)  # what follows is for Python
        if done < len(ends):
            bounds = zip((begins[done:] - origin).tolist(), ends[done:].tolist(), strict=True)
            frame = FRAME.unpack_from
            yield self.schema.decode_run(
                block, bounds, seed + done, frame, _checksum, self._alone, text
            )

    def _alone(self, number: int, held: bytes, text: bool) -> Sample:
        """Return a record of a run that is damaged there, as it comes again. Raises DamageError."""
        sample = self._decode(number - self._seed, held)
        assert self._remote, f"{self.name}: record {number - self._seed} is right only alone"
        return give_text_key(sample) if text else sample

    def hold(self, start: int, stop: int) -> list[bytes | None]:
        """Return records [start, stop) as bytes, to be decoded later; None: it is damaged.

        The core checks a record as it copies it, so that its bytes come from memory once, and puts
        in place of its checksum which record it is. Python checks it when it is decoded.
        """
        if start == stop:
            return []
        begins, ends = self._places.between(start, stop)
        origin = begins[0]
        begins, ends = begins - origin, ends - origin
        block = self._file.view(int(origin), int(ends[-1]))
        if self._split is not None:
            return self._split(block, begins, ends, self._seed + start)
        # bytes() of bytes is no copy; of a view it is the only one.
        return [bytes(block[a:b]) for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]

    def key(self, record: int) -> bytes:
        """Return the key of a record. Raises DamageError."""
        start, stop = self._places.bounds(record)
        if self._index.here is None and stop - start < LARGE:
            with contextlib.suppress(DamageError):  # else its head may be right, or gives the words
                return bytes(self.read(record)[KEY])  # rather than read the index for one hash
        return self._head(record)[0]

    def keys(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the keys of records [start, stop), by few round trips. Raises DamageError."""
        return (key for key, _ in self.heads(range(start, stop)))

    def heads(self, records: Sequence[int]) -> Iterator[tuple[bytes, int]]:
        """Yield the keys of some records, ascending, and the bytes of their blobs.

        By few round trips. Raises DamageError.
        """
        remote, small = self._file.descriptor < 0, self._has_small(records)
        for at in range(0, len(records), _KEYS):
            some = records[at : at + _KEYS]
            if remote:
                self.will_need_heads(records[at and at + _KEYS : at + 2 * _KEYS], 2 * _KEYS)
            if remote and small:
                held = self.hold(some[0], some[-1] + 1)
                yield from (self._head_of(one, held[one - some[0]]) for one in some)
            else:
                yield from map(self._head, some)

    def will_need_heads(self, records: Sequence[int], most: int = _KEYS) -> None:
        """Announce that the heads of some records will be read soon: of so many of them at most.

        Those of small records come with all of their bytes, in order.
        """
        if self._has_small(records):
            self.will_need(records[0], records[:most][-1] + 1)
            return
        for record in records[:most]:
            start, stop = self._places.bounds(record)
            self._file.will_need(start, min(_FIRST, stop - start))

    def _has_small(self, records: Sequence[int]) -> bool:
        return len(records) > 0 and bool(self.sizes[np.asarray(records)].mean() < LARGE)

    def _head(self, record: int) -> tuple[bytes, int]:
        """Return the key of a record, and the bytes of its blobs. Raises DamageError."""
        start, stop = self._places.bounds(record)
        data = self._file.read(start, min(_FIRST, stop - start))
        _, length, head = FRAME.unpack_from(data)
        why = "its key is not the one in the index"
        if length != stop - start - 16 or head > min(length, MAX_HEAD):
            why = f"its head cannot be {head:,} bytes long"
        elif (key := self._key(data[16 : 16 + head], record)) is not None or (
            16 + head > len(data)
            and (key := self._key(self._file.read(start + 16, head), record)) is not None
        ):
            return key, length - head
        raise self._damaged(record, self._file.read(start, stop - start), why)

    def _head_of(self, record: int, held: bytes | None) -> tuple[bytes, int]:
        """Return what `_head` does, of the bytes that `hold` gave. Raises DamageError."""
        if held is None:
            return self._head(record)
        _, length, head = FRAME.unpack_from(held)
        key = self._key(held[16 : 16 + head], record)
        return self._head(record) if key is None else (key, length - head)

    def will_need(self, start: int, stop: int, *, keep: bool = False) -> None:
        """Announce that records [start, stop) will be read soon."""
        begin = self._places.start(start)
        self._file.will_need(begin, self._places.start(stop) - begin, keep=keep)

    def scattered(self) -> None:
        """Say that records will be read in no order."""
        self._file.scattered()

    def _read_large(self, record: int, start: int, stop: int) -> Sample:
        if self._file.descriptor < 0:  # a read of its head alone would be a round trip
            return self._decode(record, self._file.read(start, stop - start))
        data = self._file.read(start, min(_FIRST, stop - start))
        checksum, length, head = FRAME.unpack_from(data)
        blobs: list[bytes] = []
        at, values = start + 16 + head, None
        try:
            if head > min(length, MAX_HEAD) or length != stop - start - 16:
                raise ValueError
            if 16 + head > len(data):
                data = self._file.read(start, 16 + head)
            values = unpack_head(data[16 : 16 + head])
            sizes = self.schema.blob_sizes(values)
            if at + sum(sizes) != stop:
                raise ValueError
            seal, read = xxhash.xxh3_64(data[8 : 16 + head], self._seed + record), self._file.read
            for size in sizes:
                blob = read(at, size)
                seal.update(blob)
                blobs.append(blob)
                at += size
            if seal.intdigest() == checksum:
                return self.schema.assemble(values, blobs)
        except (TypeError, ValueError):
            pass
        values = None  # or a bomb would be in memory twice
        return self._decode(record, self._file.read(start, stop - start))  # says what is wrong

    def _key(self, head: bytes, record: int) -> bytes | None:
        """Return the key in a head, perhaps cut or damaged; None if the index has another."""
        try:
            key = unpack_key(head)
        except ValueError:
            return None
        return key if key_hash(key) == self._index.hashes[record] else None

    def _damaged(self, record: int, data: bytes, why: str) -> DamageError:
        """Return the error for a record's bytes; `why` is said if its checksum is right."""
        checksum, length, head = FRAME.unpack_from(data)
        name = self._key(data[16 : 16 + min(head, length)], record)
        key = "its key cannot be read" if name is None else f"key {printable(name)}"
        advice = (
            "The shard differs from what was packed; `shardio verify` lists all that is damaged, "
            "and `shardio repair` saves the rest."
        )
        if record in self.erased:
            what = "it was erased"
            advice = "A list of dropped records hides it, beside the manifest: restore that one."
        elif length != len(data) - 16:
            what = f"its length is {length:,}, expected {len(data) - 16:,}"
        elif (found := _checksum(data[8:], self._seed + record)) != checksum:
            what = f"checksum is {found:#018x}, expected {checksum:#018x}"
        else:
            what = f"its checksum is right, but it cannot be decoded: {why}"
            advice = "It was written by something else than shardio."
        return DamageError(
            f"{self.name}: record {record} at byte {self.offset(record)} ({key}): {what}.\n{advice}"
        )

    def _check_expected(
        self, info: ShardInfo | None, dataset_id: bytes | None, schema: Schema | None
    ) -> None:
        if dataset_id is not None and self.dataset_id != dataset_id:
            raise DamageError(
                f"{self.name}: belongs to dataset {self.dataset_id.hex()}, expected "
                f"{dataset_id.hex()}"
            )
        if info is None:
            return
        for what, found, expected in (
            ("shard number", self.number, info.number),
            ("size", self._file.size, info.size),
            ("count of records", self.records, info.records),
            ("index checksum", self.index_checksum, info.index_checksum),
        ):
            if found != expected:
                raise DamageError(
                    f"{self.name}: its {what} is {found}, but the manifest says {expected}. "
                    "The file is not the one that was packed"
                )
        if schema is not None and self.schema.fields != schema.fields:
            raise DamageError(
                f"{self.name}: header at byte 0: its fields are {_shown(self.schema)}, but the "
                f"manifest says {_shown(schema)}. One of them is not what was packed: restore "
                "manifest and shards from one copy, or pack again"
            )


class _HasIndex(Readable, Protocol):
    """A file, or a part of one, that holds an index: what came damaged is read once more."""

    def read_again(self, start: int, length: int) -> bytes:
        """Read bytes past all that is kept of the file."""


class _Index:
    """The index of an open shard, without where its records lie.

    It is checked whenever it is read: when the shard is opened and, if it is large, when it is
    asked for again. Of a large one nothing is kept but the columns, once they were asked for.
    """

    def __init__(self, file: _HasIndex, offset: int, length: int, expected: int) -> None:
        """expected: its checksum."""
        self._file, self._offset, self._length, self._expected = file, offset, length, expected
        self.is_large = length > SMALL_INDEX
        self.here: tuple[Column, dict[str, Column]] | None = None  # hashes and columns, if read
        self._columns: dict[str, Column] | None = None

    @property
    def hashes(self) -> Column:
        """Return the hashes of the keys. Raises DamageError."""
        return (self.here or self._read_again())[0]

    @property
    def columns(self) -> dict[str, Column]:
        """Return the columns, which stay in memory from then on. Raises DamageError."""
        if self._columns is None:
            found = self.here or self._read_again()
            self._columns = found[1]
            if self.is_large:  # without the rest, of which these are a part
                self._columns = {name: column.copy() for name, column in found[1].items()}
        return self._columns

    def take_up(self, records: int, schema: Schema) -> Column:
        """Read it, and return the lengths of the records: (records,) uint32.

        Raises DamageError; ValueError and TypeError where it is right, but is no index.
        """
        self._records, self._schema = records, schema
        return self._take(self._file.read(self._offset, self._length + _TRAILER.size))[0]

    def _read_again(self) -> tuple[Column, dict[str, Column]]:
        """Read it, and check that it is still the one that was there. Raises DamageError."""
        size = self._length + _TRAILER.size
        block = self._file.read(self._offset, size)
        for _ in range(ATTEMPTS):  # on the way from a store, perhaps, and not there
            if _checksum(block) == self._expected:
                break
            block = self._file.read_again(self._offset, size)
        return self._take(block)[1:]

    def _take(self, block: bytes) -> tuple[Column, Column, dict[str, Column]]:
        """Check the bytes of index and trailer, and keep what is in them.

        Returns the lengths of the records, too, before hashes and columns.
        """
        if (found := _checksum(block)) != self._expected:
            raise DamageError(
                f"{self._file.name}: index at byte {self._offset}: checksum is {found:#018x}, "
                f"expected {self._expected:#018x}"
            )
        view = memoryview(block)[: self._length]
        lengths, hashes, columns = _read_index(view, self._records, self._schema)
        self.here = hashes, columns
        if self.is_large:
            _LARGE.append((self._length, weakref.ref(self)))
            self._let_go_of_others()
        return lengths, hashes, columns

    def _let_go_of_others(self) -> None:
        """Let go of the large indexes that this process read first, but for some MB."""
        taken = sum(length for length, _ in list(_LARGE))
        while taken > LARGE_INDEXES and len(_LARGE) > 1:
            with contextlib.suppress(IndexError):  # another thread was faster
                length, other = _LARGE.popleft()
                taken -= length
                if (index := other()) is not None and index is not self:
                    index.here = None


_LARGE: deque[tuple[int, weakref.ref[_Index]]] = deque()  # that are in memory, the oldest first


def most_of_end(records: int, schema: Schema) -> int:
    """Return how many bytes index and trailer of a shard take, at most but for odd names."""
    columns = [name for name, kind in schema.fields if kind in SCALARS]
    described = sum(len(name.encode()) + 16 for name in columns) + 16
    return records * (8 + 9 * len(columns)) + described + _TRAILER_SIZE


def memory_of_indexes(records: Column) -> int:
    """Estimate the bytes that open shards of so many records each take for their indexes.

    Columns are taken for 2 bytes a record.
    """
    whole = 10 * records
    kept = np.where(whole > SMALL_INDEX, 2 * records, whole)
    return int((3 * records + kept).sum()) + LARGE_INDEXES * bool((whole > SMALL_INDEX).any())


def _shown(schema: Schema) -> str:
    return printable(", ".join(f"{name} ({kind})" for name, kind in schema.fields))


def erased_in(shard: Shard) -> Column:
    """Return the numbers of the records of a shard whose bytes were erased: (n,) int64."""
    found: Column = getattr(shard, "erased", np.empty(0, np.int64))  # formats of others have none
    return found


def whole_runs(shard: Shard, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of a shard's records as runs of such that were not erased."""
    for record in erased_in(shard).tolist():
        if start <= record < stop:
            if start < record:
                yield start, record
            start = record + 1
    if start < stop:
        yield start, stop


def read_header(file: Readable) -> tuple[Schema, bytes, int, int, int]:
    """Return schema, dataset id, shard number, the byte at which records begin, and version."""
    if file.size < _HEADER.size + 8 + _TRAILER_SIZE:
        raise DamageError(f"{file.name}: {file.size} bytes are too few for a record shard")
    data = file.read(0, min(4096, file.size))
    magic, version, kind, zero, number, dataset_id, length = _HEADER.unpack_from(data)
    _check_magic(file, "header at byte 0", magic, MAGIC, version, kind)
    end = _HEADER.size + length
    if length > MAX_FIELDS_BYTES or end + 8 + _TRAILER_SIZE > file.size:
        raise DamageError(
            f"{file.name}: header at byte 0: its fields cannot be {length:,} bytes long"
        )
    if end + 8 > len(data):
        data = file.read(0, end + 8)
    (expected,) = _U64.unpack_from(data, end)
    if (found := _checksum(data[:end])) != expected:
        raise DamageError(
            f"{file.name}: header at byte 0: checksum is {found:#018x}, expected {expected:#018x}"
        )
    if zero:
        raise DamageError(f"{file.name}: header at byte 0: byte 11 is not 0")
    try:
        fields = unpack(data[_HEADER.size : end])
    except ValueError as error:
        raise DamageError(f"{file.name}: header at byte 0: {error}") from None
    schema = check_schema(fields, f"{file.name}: header at byte 0")
    return schema, dataset_id, number, end + 8, version


def _read_trailer(file: Readable) -> tuple[tuple[int, ...], bytes, int, int]:
    """Read (offset and length of the index, records, shard number), dataset id, checksum, version.

    Raises DamageError, VersionError.
    """
    start = file.size - _TRAILER_SIZE
    data = file.read(start, _TRAILER_SIZE)
    *places, version, kind, zero, dataset_id = _TRAILER.unpack_from(data)
    checksum, magic = _END.unpack_from(data, _TRAILER.size)
    _check_magic(file, f"trailer at byte {start}", magic, END_MAGIC, version, kind)
    if zero:
        raise DamageError(f"{file.name}: trailer at byte {start}: byte 27 is not 0")
    return tuple(places), dataset_id, checksum, version


def _check_magic(
    file: Readable, where: str, magic: bytes, expected: bytes, version: int, kind: int
) -> None:
    if magic != expected:
        raise DamageError(
            f"{file.name}: {where}: found {magic.hex(' ')}, expected {expected.hex(' ')}. "
            "It is no record shard, or was cut short"
        )
    if version > ERASED:
        raise VersionError(
            f"{file.name}: format version {version}; this shardio reads up to {ERASED}. A newer "
            "one wrote it: install that one"
        )
    if kind != XXH3_64:
        raise VersionError(f"{file.name}: checksum kind {kind}; this shardio knows kind {XXH3_64}")


def _read_index(
    block: memoryview, records: int, schema: Schema
) -> tuple[Column, Column, dict[str, Column]]:
    """Return lengths, key hashes and columns. Raises ValueError, TypeError if it is no index."""
    (length,) = _U32.unpack_from(block)
    at = 4 + length
    if length > MAX_FIELDS_BYTES or at + 8 * records > len(block):
        raise ValueError(f"it is too short for {records:,} records")
    described = unpack(block[4:at])

    lengths = np.frombuffer(block, "<u4", records, at)
    hashes = np.frombuffer(block, "<u4", records, at + 4 * records)
    at += 8 * records
    scalars = {name for name, kind in schema.fields if kind in SCALARS}
    for name, _, _ in described:
        if name not in scalars:
            raise ValueError(f"a column named {printable(str(name))!r} does not fit")
    columns, at = take_columns(block, at, records, described)
    if at != len(block):
        raise ValueError(f"{len(block) - at} bytes are left over behind its columns")
    return lengths, hashes, columns
