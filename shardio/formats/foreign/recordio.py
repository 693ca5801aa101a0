"""MXNet RecordIO files, read in place: an image and its labels a record, or any bytes.

    record    part, or several parts; whole records begin at multiples of 4
    part      magic u32 0xced7230a | kind * 2**29 + length u32 | data | zeros up to a multiple of 4
    kind      0 a whole record, 1 its first part, 2 one between, 3 its last
    data      IRHeader: flag u32 | label f32 | id u64 | id2 u64 | labels f32[flag] | image

Little-endian. Where the magic occurs in the data, at a multiple of 4 bytes, the writer leaves it
out and begins another part. A record's range here spans its parts. The format has no checksums.

`x.idx` beside `x.rec` has a line "key<tab>offset" a record: what `train.idx` calls 7 has the key
`train/7` here. It must name every record, each by a key of its own, so that one that was cut short,
or is of another file, is found. Without it records have no keys. A `.lst` is not read: its labels
are in the records. Sources:
https://mxnet.apache.org/versions/1.9.1/api/architecture/note_data_loading
https://github.com/dmlc/dmlc-core/blob/main/src/recordio.cc
https://github.com/apache/mxnet/blob/1.9.1/python/mxnet/recordio.py
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from ...errors import DamageError, SourceError, printable
from ...names import KEY, key_bytes
from ...storage.base import Location, path_in
from ..base import Column
from ..sample import MAX_KEY, pack, unpack
from .base import ForeignFile, Values

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
PART = struct.Struct("<II")
HEADER = struct.Struct("<IfQQ")
WHOLE, FIRST, MIDDLE, LAST = range(4)  # kinds of parts
MAX_LENGTH = (1 << 29) - 1  # bytes of a part
_BLOCK = 64 << 10  # bytes read at once: many small records, or the heads of large ones
_MAX_INDEX = 1 << 32  # bytes of an .idx; 20 a record are usual
_LABEL = np.dtype("<f4")
_ZERO = ord("0")


class RecordIOFile(ForeignFile):
    """A .rec file, and the keys of its records where an .idx has them.

    values: `image`, bytes; `id`, and `id2` unless it is 0, ints; `label`: the one label, an int
    where it has no fraction, as class numbers must be ints to be trained on, although the file has
    floats only; several labels (flag > 0) are float32 (flag,). A record that does not begin with an
    IRHeader is `data`, bytes.
    """

    def _open(self, storage: Location, name: str, extra: bytes) -> None:
        self._storage, self._path = storage, name.removesuffix(".rec")
        self._prefix = key_bytes(self._path)
        keys = unpack(extra) if extra else None
        self._keys: Column | list[bytes] | None = (  # int64 (records,), or text
            np.frombuffer(keys, "<i8") if isinstance(keys, bytes) else keys
        )

    def extra(self) -> bytes:
        """Return what opening needs besides the file."""
        keys = self._keys
        return pack(keys.astype("<i8").tobytes() if isinstance(keys, np.ndarray) else keys)

    def key(self, record: int) -> bytes | None:
        """Return the key of a record; None without an .idx."""
        if self._keys is None:
            return None
        key = self._keys[record]
        return b"%b/%b" % (self._prefix, key if isinstance(key, bytes) else b"%d" % key)

    def scan(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) of each record. Raises DamageError, SourceError."""
        index = f"{self._path}.idx"
        if not self._storage.exists(index):
            yield from _records(self)
            return
        where = path_in(self._storage, index)
        offsets, self._keys = _read_index(self._storage.read(index, _MAX_INDEX), where)
        advice = (
            "One of the two was cut short, or belongs to another file; without the .idx, records "
            "are read all the same, but have no keys"
        )
        count = 0
        for offset, length in _records(self):
            if count == len(offsets) or offsets[count] != offset:
                raise DamageError(
                    f"{where}: names no record at byte {offset} of {self.name}, where there is "
                    f"one. {advice}"
                )
            yield offset, length
            count += 1
        if count < len(offsets):
            raise DamageError(
                f"{where}: names a record at byte {offsets[count]} of {self.name}, where there is "
                f"none. {advice}"
            )

    def values(self, data: bytes, record: int) -> Values:
        """Return the values of a record. Raises ValueError."""
        at, stop = 8, _whole(data)
        if stop < 0:
            data = _join(data)
            at, stop = 0, len(data)
        values: Values = {}
        if (key := self.key(record)) is not None:
            values[KEY] = key
        flag = number = second = 0
        label: Any = None
        image = at + HEADER.size
        if image <= stop:
            flag, label, number, second = HEADER.unpack_from(data, at)
            image += 4 * flag
        if image > stop:
            values["data"] = data[at:stop]
            return values
        if flag:
            label = np.frombuffer(data, _LABEL, flag, at + HEADER.size).copy()
        elif label.is_integer():
            label = int(label)
        values["image"], values["label"], values["id"] = data[image:stop], label, number
        if second:
            values["id2"] = second
        return values


def _records(file: RecordIOFile) -> Iterator[tuple[int, int]]:
    """Yield where each record begins, and its length with all parts. Raises DamageError."""
    at, start, size = 0, 0, file.size
    first = -1  # byte at which a record of parts began
    block = b""  # bytes of the file from `start`
    while at < size:
        if at + 8 - start > len(block):
            if size - at < 8:
                raise file.cut_short(at, 8)
            start, block = at, file.read(at, min(_BLOCK, size - at))
        magic, word = PART.unpack_from(block, at - start)
        if magic != MAGIC:
            raise DamageError(
                f"{file.name}: record at byte {at}: found {magic:#010x}, expected the magic "
                f"{MAGIC:#010x}. It is no RecordIO file, or was damaged"
            )
        kind, length = word >> 29, word & MAX_LENGTH
        stop = at + 8 + length + (-length & 3)
        if stop > size:
            raise file.cut_short(at, stop - at)
        if kind not in ((WHOLE, FIRST) if first < 0 else (MIDDLE, LAST)):
            raise DamageError(
                f"{file.name}: record at byte {at}: a part of kind {kind}, expected "
                f"{'0 or 1' if first < 0 else '2 or 3'}. The file was damaged"
            )
        if kind == WHOLE:
            yield at, stop - at
        elif kind == FIRST:
            first = at
        elif kind == LAST:
            yield first, stop - first
            first = -1
        at = stop
    if first >= 0:
        raise DamageError(
            f"{file.name}: record at byte {first}: its last part is missing. The file was cut short"
        )


def _whole(data: bytes) -> int:
    """Return where a record of one part ends; -1 if it has several. Raises ValueError."""
    if len(data) < 8:
        raise ValueError(f"{len(data)} bytes are too few for a record")
    length: int
    magic, length = PART.unpack_from(data)
    if length > MAX_LENGTH:
        return -1
    if magic != MAGIC or 8 + length + (-length & 3) != len(data):
        raise ValueError(f"its length, {length:,}, does not fit its {len(data):,} bytes")
    return 8 + length


def _join(data: bytes) -> bytes:
    """Join the parts of a record, the magic between them. Raises ValueError."""
    parts = []
    at, kind = 0, -1
    while kind != LAST:
        if len(data) - at < 8:
            raise ValueError("its last part is missing")
        magic, word = PART.unpack_from(data, at)
        kind, length = word >> 29, word & MAX_LENGTH
        stop = at + 8 + length + (-length & 3)
        if magic != MAGIC or stop > len(data) or kind not in ((MIDDLE, LAST) if at else (FIRST,)):
            raise ValueError(f"its part at byte {at} is not one")
        parts.append(data[at + 8 : at + 8 + length])
        at = stop
    if at != len(data):
        raise ValueError("bytes follow its last part")
    return MAGIC_BYTES.join(parts)


def _read_index(data: bytes, where: str) -> tuple[list[int], Column | list[bytes]]:
    """Return the offsets that an .idx names, ascending, and their keys. Raises DamageError."""
    named: list[tuple[int, bytes]] = []
    for number, line in enumerate(data.splitlines(), 1):
        key, _, offset = line.rstrip().partition(b"\t")
        if not 0 < len(key) < MAX_KEY // 2 or not offset.isdigit() or len(offset) > 20:
            raise DamageError(
                f'{where}: line {number} is {printable(line)}, expected "key<tab>offset"'
            )
        named.append((int(offset), key))
    named.sort()
    keys = [key for _, key in named]
    if len(set(keys)) < len(keys):
        twice = next(a for a, b in pairwise(sorted(keys)) if a == b)
        raise SourceError(
            f"{where}: the key {printable(twice)} is there twice. Without the .idx, the records "
            "are read all the same, but have no keys"
        )
    offsets = [offset for offset, _ in named]
    if all(len(key) < 19 and key.isdigit() and (key[0] != _ZERO or key == b"0") for key in keys):
        return offsets, np.array(keys, "S").astype(np.int64)
    return offsets, keys
