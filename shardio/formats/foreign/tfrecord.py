"""TFRecord files, read in place: `tf.train.Example` records, or any bytes.

    record    length u64 | masked crc32c of these 8 bytes u32 | data | masked crc32c of data u32
    data      Example {1: Features {1 repeated: entry {1: name, 2: Feature}}}
    Feature   one of {1: BytesList {1 repeated: bytes}, 2: FloatList {1 repeated: float},
              3: Int64List {1 repeated: int64}}, numbers packed or not

Little-endian; no header, no index; masked(crc) = (crc rotated right by 15) + 0xa282ead8. Both
checksums of each record are checked when a file is scanned, that is when it is indexed; from then
on the index has a checksum of the whole record. So only indexing needs CRC-32C.

A record is an Example when all of it parses as one with a feature at least; any other (a
SequenceExample, a message of one's own, no message at all) is one field, `data`: its bytes. The
format has no keys. Sources:
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/feature.proto
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import shlex
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...errors import DamageError, DependencyError, SourceError
from ..base import Readable
from ..sample import MAX_FIELDS
from .base import ForeignFile, Values
from .protobuf import read_varint

FRAME = 16  # bytes of a record besides its data
_HEAD = struct.Struct("<QI")
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_MASK = 0xA282EAD8
_BLOCK = 1 << 20  # bytes read at once; larger records are checked in pieces of as many
_FEW = 64  # bytes of packed integers up to which a loop beats numpy

# Tags of fields: their number in the message * 8 + how they are encoded.
_BYTES_1, _BYTES_2, _BYTES_3, _VARINT_1, _FIXED32_1 = 0x0A, 0x12, 0x1A, 0x08, 0x0D
# The tag of an element that is not packed, by the tag of a Feature's list.
_SINGLE = {_BYTES_1: _BYTES_1, _BYTES_2: _FIXED32_1, _BYTES_3: _VARINT_1}
# What stands between the name of a short feature and its one element, or its packed numbers: the
# tag of the list and the bytes that follow.
_HEADS = {
    bytes((_BYTES_2, size + 4, tag, size + 2, _BYTES_1, size)): (tag, size)
    for tag in _SINGLE
    for size in range(124)
}
_NO_HEAD = (0, -1)
_VALUE, _ELEMENT = (_BYTES_2,), (_BYTES_1,)
_ALL = (1 << 64) - 1
_FLOAT = np.dtype("<f4")


class TFRecordFile(ForeignFile):
    """A TFRecord file. See formats.foreign.base.ForeignFile.

    values: bytes as a list; an integer as a list of one, several as int64 (n,); floats as float32
    (n,); None where a feature has no element.
    """

    lists = True

    def scan(self) -> Iterator[tuple[int, int]]:
        """Check both checksums of each record. Raises DependencyError without CRC-32C."""
        crc32c, extend = checksums()
        at, start, size = 0, 0, self.size
        block = b""  # bytes of the file from `start`
        while at < size:
            i = at - start
            if i + 12 > len(block):
                if size - at < FRAME:
                    raise self.cut_short(at, FRAME)
                start, i = at, 0
                block = self.read(at, min(_BLOCK, size - at))
            length, expected = _HEAD.unpack_from(block, i)
            found = crc32c(block[i : i + 8])
            if ((found >> 15 | found << 17) + _MASK) & 0xFFFFFFFF != expected:
                if at == 0 and (why := _compressed(self, block)):
                    raise SourceError(why)
                raise _wrong(self, at, "length", found, expected)
            stop = at + FRAME + length
            if stop > size:
                raise self.cut_short(at, FRAME + length)
            if FRAME + length > _BLOCK:
                found, expected = _checked_in_pieces(self, at + 12, length, extend)
            else:
                if stop - start > len(block):
                    start, i = at, 0
                    block = self.read(at, min(_BLOCK, size - at))
                end = i + 12 + length
                found = crc32c(block[i + 12 : end])
                (expected,) = _U32.unpack_from(block, end)
            if ((found >> 15 | found << 17) + _MASK) & 0xFFFFFFFF != expected:
                raise _wrong(self, at, "data", found, expected)
            yield at, FRAME + length
            at = stop

    def values(self, data: bytes, record: int) -> Values:
        """Return the values of a record. Raises ValueError."""
        if len(data) < FRAME or _U64.unpack_from(data)[0] != len(data) - FRAME:
            raise ValueError(f"its length does not fit the {len(data):,} bytes of the record")
        try:
            values = _example(data, 12, len(data) - 4)
        except (ValueError, IndexError):  # IndexError: a message that ends too early
            values = {}
        return values or {"data": [data[12:-4]]}


# --- protobuf -------------------------------------------------------------------------------------


def _example(data: bytes, start: int, stop: int) -> Values:
    """Return the features of an Example; {} if it is something else. Raises ValueError, IndexError.

    A name that comes twice: the last wins. Fields that an Example does not have are passed over,
    but for the second of a SequenceExample, of which the first looks like an Example.
    """
    values: Values = {}
    for tag, at, end in _fields(data, start, stop):
        if tag == _BYTES_2:
            return {}
        if tag == _BYTES_1:
            _features(data, at, end, values)
    return values


def _features(data: bytes, at: int, stop: int, values: Values) -> None:
    """Put the features in data[at:stop] into values. Bytes must follow `stop`: 4 are enough."""
    while at < stop:
        if data[at] != _BYTES_1:
            _, _, at = next(_fields(data, at, stop))
            continue
        size, at = data[at + 1], at + 2
        if size > 127:
            size, at = read_varint(data, at - 1)
        end = at + size
        if end > stop:
            raise ValueError("a feature that does not fit")
        # First as all writers write it, then however else it may be, which takes 3 times as long.
        head, kind = at + 2 + data[at + 1], 0
        if data[at] == _BYTES_1 and data[at + 1] < 128 and head <= end:
            kind, size = _HEADS.get(data[head : head + 6], _NO_HEAD)
            start = head + 6
            if start + size != end:
                kind, start = _long(data, head, end)
        if kind:
            element = data[start:end]
            values[data[at + 2 : head].decode()] = (
                [element] if kind == _BYTES_1 else _numbers(kind, element)
            )
        else:
            _entry(data, at, end, values)
        if len(values) > MAX_FIELDS:
            raise ValueError("more features than a sample has fields")
        at = end


def _long(data: bytes, at: int, stop: int) -> tuple[int, int]:
    """Find the element of a feature that fills data[at:stop] with one, or packed numbers.

    The tag of its list, and where the element begins; 0 and 0 if it is not written like that.
    """
    kind = 0
    for tags in (_VALUE, _SINGLE, _ELEMENT):
        if stop - at < 2 or data[at] not in tags:
            return 0, 0
        if tags is _SINGLE:
            kind = data[at]
        size, at = read_varint(data, at + 1)
        if at + size != stop:
            return 0, 0
    return kind, at


def _entry(data: bytes, start: int, stop: int, values: Values) -> None:
    """Put one feature into values, however it is written."""
    name, kind = None, 0
    parts: list[bytes] = []
    for tag, at, end in _fields(data, start, stop):
        if tag == _BYTES_1:
            name = data[at:end]
        elif tag == _BYTES_2:
            kind, parts = _feature(data, at, end, kind, parts)
    if name is None:
        raise ValueError("a feature without a name")
    values[name.decode()] = _list(kind, parts)


def _feature(
    data: bytes, start: int, stop: int, kind: int, parts: list[bytes]
) -> tuple[int, list[bytes]]:
    """Return the tag of a Feature's list and the bytes of its elements, behind earlier ones.

    Of lists of several kinds the last is taken; those of one kind add up.
    """
    for tag, elements, elements_end in _fields(data, start, stop):
        if tag in _SINGLE:
            if tag != kind:
                kind, parts = tag, []
            wanted = (_BYTES_1, _SINGLE[tag])
            parts += [
                data[at:end]
                for tag, at, end in _fields(data, elements, elements_end)
                if tag in wanted
            ]
    return kind, parts


def _list(kind: int, parts: list[bytes]) -> Any:
    """Return the value of a feature; None if it is empty. Raises ValueError."""
    if kind == _BYTES_1:
        return parts or None
    if any(part[-1] > 127 if kind == _BYTES_3 else len(part) & 3 for part in parts if part):
        raise ValueError("a number that does not end")
    return _numbers(kind, b"".join(parts))


def _numbers(kind: int, packed: bytes) -> Any:
    """Return integers as [value], or an array of several; floats as an array; None for none."""
    if not packed:
        return None
    if kind == _BYTES_2:
        return np.frombuffer(packed, _FLOAT).copy()
    if packed[-1] > 127:
        raise ValueError("a number that does not end")
    if len(packed) == 1:
        return [packed[0]]
    if len(packed) > _FEW:
        return _many_integers(packed)
    values = []
    value = shift = 0
    for byte in packed:
        if byte > 127:
            value |= (byte & 127) << shift
            shift += 7
            if shift == 70:
                raise ValueError("a number of more than 10 bytes")
            continue
        value |= byte << shift
        if shift == 63:  # 64 bits, of which the highest is the sign
            value = (value & _ALL) - (value >> 63 & 1) * (_ALL + 1)
        values.append(value)
        value = shift = 0
    return values if len(values) == 1 else np.array(values, np.int64)


def _many_integers(packed: bytes) -> Any:
    """Return what `_numbers` does, by as many steps as the longest number has bytes."""
    data = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(data < 128)
    starts = np.append(0, ends[:-1] + 1)
    longest = int((ends - starts).max())
    if longest > 9:
        raise ValueError("a number of more than 10 bytes")
    values = np.zeros(len(ends), np.uint64)
    for i in range(longest + 1):
        have = np.flatnonzero(ends - starts >= i)
        values[have] |= (data[starts[have] + i] & 127).astype(np.uint64) << np.uint64(7 * i)
    return values.astype(np.int64)  # wraps, as int64 is two's complement on the wire


def _fields(data: bytes, at: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the fields of a message in data[at:stop]: tag, where the content begins and ends.

    Raises ValueError, IndexError where it is no message.
    """
    while at < stop:
        tag = data[at]
        at += 1
        if tag > 127:
            tag, at = read_varint(data, at - 1)
            if tag >> 32:
                raise ValueError("a field of no such number")
        wire = tag & 7
        if wire == 2:
            length = data[at]
            at += 1
            if length > 127:
                length, at = read_varint(data, at - 1)
            end = at + length
        elif wire == 0:
            _, end = read_varint(data, at)
        elif wire == 5:
            end = at + 4
        elif wire == 1:
            end = at + 8
        else:
            raise ValueError("a field of no known encoding")  # groups: gone from protobuf since 3
        if end > stop or tag < 8:
            raise ValueError("a field that does not fit")
        yield tag, at, end
        at = end


# --- checksums ------------------------------------------------------------------------------------


def checksums() -> tuple[Callable[[bytes], int], Callable[[int, bytes], int]]:
    """Return CRC-32C of bytes, and of bytes that follow others. Raises DependencyError."""
    try:
        import google_crc32c
    except ImportError:
        raise DependencyError(
            "TFRecord files are checked by CRC-32C when they are indexed, and google-crc32c is not "
            "installed. Install it with: pip install 'shardio-torch[tfrecord]'"
        ) from None
    if google_crc32c.implementation == "python":  # 110 KB take it 13 ms, the compiled one 4 us
        raise DependencyError(
            "google-crc32c is installed without its compiled part, and would check 8 MB a second. "
            "Install it from a wheel: pip install --force-reinstall --only-binary :all: "
            "google-crc32c"
        )
    return google_crc32c.value, google_crc32c.extend


def _checked_in_pieces(
    file: Readable, at: int, length: int, extend: Callable[[int, bytes], int]
) -> tuple[int, int]:
    """Return the CRC-32C of a large range of a file, and the masked one that follows it."""
    crc, end = 0, at + length
    while at < end:
        piece = file.read(at, min(_BLOCK, end - at))
        crc = extend(crc, piece)
        at += len(piece)
    return crc, _U32.unpack(file.read(end, 4))[0]


def masked(crc: int) -> int:
    """Return a CRC-32C as it is stored."""
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


# --- what can be wrong ----------------------------------------------------------------------------


def _wrong(file: Readable, at: int, what: str, found: int, expected: int) -> DamageError:
    advice = "The file differs from what was written; restore it"
    if at == 0 and what == "length":
        advice = "It is no TFRecord file, or was damaged"
    return DamageError(
        f"{file.name}: record at byte {at}: the checksum of its {what} is {masked(found):#010x}, "
        f"expected {expected:#010x}. {advice}"
    )


def _compressed(file: Readable, start: bytes) -> str | None:
    """Say how to read a file that is compressed as a whole; None if it is not.

    Asked only when the file does not begin with a record.
    """
    if start.startswith(b"\x1f\x8b"):
        kind, command = "gzip", "gzip -dc"
    elif start[0] & 0x8F == 8 and (start[0] << 8 | start[1]) % 31 == 0:  # RFC 1950
        code = (
            "import sys, zlib; d = zlib.decompressobj(); i, o = sys.stdin.buffer, sys.stdout.buffer"
            "; [o.write(d.decompress(b)) for b in iter(lambda: i.read(1 << 20), b'')]"
        )
        kind, command = "zlib", f'python3 -c "{code}"'
    else:
        return None
    plain = file.name.removesuffix(".gz").removesuffix(".zz").removesuffix(".zlib")
    if plain == file.name:
        plain += ".plain"
    return (
        f"{file.name}: compressed as a whole ({kind}), so that no record can be read alone. "
        f"Decompress it, then index the result:\n"
        f"  {command} < {shlex.quote(file.name)} > {shlex.quote(plain)}"
    )
