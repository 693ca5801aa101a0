"""Whole records in files that are damaged, cut short, or cannot be read in places.

Two ways lead to a record: the index, which says where it begins, and its own frame. Where the index
of a file is whole, its records are looked for at their places. What is between two of them that
were found, and all of a file without an index, is looked through for bytes that can be the frame
and head of a record: these are one position in 10^4 of an image, and few of them say how long they
are in two ways that agree. The checksum decides, which is seeded with dataset, shard and number: so
a record is taken only for the one that it is, wherever it lies. Records are found in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..errors import DamageError, StorageError, VersionError
from ..formats import PACKED
from ..formats.base import ShardInfo
from ..formats.index import checksum
from ..formats.record import FRAME, RecordShard, read_header, seed_of
from ..formats.sample import MAX_HEAD, Sample, Schema, unpack_head
from ..storage.base import File

_BLOCK = 4096  # bytes that a disk gives back, or does not
_WINDOW = 4 << 20  # bytes that are looked through at once
_AHEAD = 32  # bytes behind a window that a frame in it may need
_WASTE = 16  # bytes that are hashed in vain, for each byte of a file: it may be another one
_FREE = 64  # numbers that are tried for a record, however many were in vain
_COST = 256  # bytes that are hashed while a number is tried


class Piece(NamedTuple):
    """Where a whole record lies."""

    file: Damaged
    start: int
    size: int


def read(file: File, start: int, length: int) -> bytes:
    """Read bytes; zeros stand for those that cannot be read, or are behind the end."""
    try:
        return file.read(start, length)
    except (StorageError, DamageError):
        first = _BLOCK - start % _BLOCK
        if length <= first:
            return bytes(length)
    more = range(start + first, start + length, _BLOCK)
    blocks = [(start, first), *((at, min(_BLOCK, start + length - at)) for at in more)]
    return b"".join(read(file, at, size) for at, size in blocks)


class Damaged:
    """A file that may have whole records of a shard, opened as far as that can be done.

    shard    itself, where its header and index are whole; else None
    foreign  what it is instead, where it says so; else ""
    """

    def __init__(self, file: File, format: str, info: ShardInfo, id_: bytes, schema: Schema):
        """Look at what a file says of itself: info, id_ and schema are of the wanted shard."""
        self._file, self.name, self.size = file, file.name, file.size
        self.shard: RecordShard | None = None
        self.foreign, says = "", None
        try:
            shard = PACKED[format].shard(file, verify=False)
            says = shard.schema.fields, shard.dataset_id, shard.number
            self.shard = shard if shard.records == info.records else None
        except (DamageError, StorageError, VersionError):
            if format == "record":
                says = _header_of(file)
        if says is not None and says != (schema.fields, id_, info.number):
            self.shard = None
            self.foreign = f"it is shard {says[2]} of dataset {says[1].hex()}"
            if says[1:] == (id_, info.number):
                self.foreign = "its fields are others"

    def read(self, start: int, length: int) -> bytes:
        """Read bytes, as `read` does."""
        return read(self._file, start, length)

    def record(self, record: int, start: int, size: int, seed: int) -> bytes | None:
        """Return the bytes of a record that lies there; None: it is not whole."""
        if size < FRAME.size or start + size > self.size:
            return None
        data = self.read(start, size)
        expected, length, head = FRAME.unpack_from(data)
        whole = length == size - FRAME.size and head <= min(length, MAX_HEAD)
        whole = whole and checksum(memoryview(data)[8:], seed + record) == expected
        return data if whole else None


def _header_of(file: File) -> tuple[tuple[tuple[str, str], ...], bytes, int] | None:
    """Return fields, dataset id and number of a record shard; None: its header is damaged."""
    try:
        schema, id_, number, *_ = read_header(file)
    except (DamageError, StorageError, VersionError):
        return None
    return schema.fields, id_, number


def index_of(files: Mapping[str, Damaged | None], info: ShardInfo) -> RecordShard | None:
    """Return an open shard whose index is the one that the manifest names, if any file has it."""
    shards = (one.shard for one in files.values() if one is not None and one.shard is not None)
    return next((one for one in shards if one.index_checksum == info.index_checksum), None)


def find(
    files: Mapping[str, Damaged | None],
    info: ShardInfo,
    id_: bytes,
    schema: Schema,
    barred: set[int],
) -> dict[int, Piece]:
    """Find the whole records of a shard in some files; the first that has one counts.

    barred: records that may have been erased. They are taken from no file, also not from that which
    has the name of the shard: it may be an older one.
    """
    found = dict[int, Piece]()
    seed = seed_of(id_, info.number)
    for file in files.values():
        if file is None or file.foreign or len(found) == info.records:
            continue
        pieces = {
            number: Piece(file, start, size)
            for number, start, size in _in_file(file, info.records, schema, seed)
            if number not in barred
        }
        found = pieces | found
    return found


def sample_of(stored: bytes, schema: Schema) -> Sample:
    """Decode a record whose checksum is right. Raises ValueError, TypeError, errors of msgpack."""
    return schema.decode(stored, FRAME.size, FRAME.size + FRAME.unpack_from(stored)[2])


def _in_file(
    file: Damaged, records: int, schema: Schema, seed: int
) -> Iterator[tuple[int, int, int]]:
    """Yield number, byte and size of the whole records in a file."""
    places = dict[int, tuple[int, int]]()
    if (shard := file.shard) is not None:
        for number, size in enumerate(shard.sizes[:].tolist()):
            start = shard.offset(number)
            data = file.record(number, start, size, seed)
            if data is None or not (size == FRAME.size or _decodes(data, schema)):
                continue
            places[number] = start, size
            if size > FRAME.size:  # and not one that was erased
                yield number, start, size
    gap, begin = 0, 0  # the first record that is missing, and where it may begin
    for number in [*places, records]:
        start, size = places.get(number, (file.size, 0))
        if gap < number:
            yield from _scan(file, (begin, start), (gap, number), schema, seed)
        gap, begin = number + 1, start + size


def _scan(
    file: Damaged, bounds: tuple[int, int], numbers: tuple[int, int], schema: Schema, seed: int
) -> Iterator[tuple[int, int, int]]:
    """Yield records of these numbers that lie between these bytes, by their frames and heads."""
    end, stop = bounds
    number, last = numbers
    left = _WASTE * (stop - end) + (1 << 20)  # bytes that may be hashed in vain
    passed, beyond = 0, end  # records that are damaged, since the last whole one; where they end
    for at in _candidates(file, end, stop, len(schema.fields)):
        if at < end or number >= last:
            continue
        expected, length, head = FRAME.unpack(file.read(at, FRAME.size))
        size = FRAME.size + length
        if head > min(length, MAX_HEAD) or at + size > stop:
            continue
        if not _agrees(file.read(at + FRAME.size, head), length, schema):
            continue
        data = file.read(at, size)
        hashed, likely = memoryview(data)[8:], min(number + passed, last)
        # The next one, or one behind others of which nothing is left; or some before were none.
        for tries, tried in enumerate(chain(range(likely, last), range(number, likely))):
            if checksum(hashed, seed + tried) == expected and _decodes(data, schema):
                yield tried, at, size
                number, end = tried + 1, at + size
                passed, beyond = 0, end
                break
            left -= (size + _COST) * (tries >= _FREE)
            if left < 0 and tries >= _FREE:
                break
        if end <= at and at >= beyond:
            passed, beyond = passed + 1, at + size


def _decodes(stored: bytes, schema: Schema) -> bool:
    """Return whether a record with the right checksum is one of these fields."""
    try:
        sample_of(stored, schema)
    except Exception:  # of msgpack, a dozen types
        return False
    return True


def _agrees(head: bytes, length: int, schema: Schema) -> bool:
    """Return whether a head is one of these fields, and its blobs take the rest of the length."""
    try:
        return len(head) + sum(schema.blob_sizes(unpack_head(head))) == length
    except (TypeError, ValueError):
        return False


def _candidates(file: Damaged, start: int, stop: int, fields: int) -> Iterator[int]:
    """Yield the bytes at which a frame may begin: behind it is a list that begins with a key."""
    begins = bytes([0x90 | fields]) if fields < 16 else b"\xdc" + fields.to_bytes(2, "big")
    key = FRAME.size + len(begins)
    for at in range(start, stop, _WINDOW):
        data = np.frombuffer(file.read(at, min(_WINDOW + _AHEAD, stop - at)), np.uint8)
        count = min(_WINDOW, len(data) - key)
        if count <= 0:
            return
        kind = data[key : key + count]
        fits = (kind == 0xC4) | (kind == 0xC5)  # bytes of up to 255, of up to 65,535
        for place, byte in enumerate(begins, FRAME.size):
            fits &= data[place : place + count] == byte
        yield from (np.flatnonzero(fits) + at).tolist()


def why_lost(files: Mapping[str, Damaged | None], info: ShardInfo) -> str:
    """Say why records of a shard are in none of the files: by the first, which should have them."""
    file = next(iter(files.values()))
    if file is None:
        return "the file is missing"
    if file.foreign:
        return f"the file is another one: {file.foreign}"
    if file.size < info.size:
        return f"the file was cut short: {file.size:,} bytes of {info.size:,} are there"
    return "its bytes are not those that were packed"
