"""LMDB databases that others wrote, read in place: Caffe's, LSUN's, and values of any bytes.

    Caffe     key "00000000_name" | value: Datum {1 channels, 2 height, 3 width, 4 data, 5 label,
              6 repeated float_data, 7 encoded}, a protobuf message
    LSUN      key: an id | value: an image file
    others    key | value: bytes, given as they are

Three records, the first, the last and one between, say which of these a file holds; in one of
Caffe's all must be a Datum. The keys `__keys__` and `__len__` hold no record. Values that are
pickled are refused: to unpickle is to run code that the file names.

liblmdb does not run here (formats/lmdb.py says why): the tree is walked once, when the file is
indexed, by positioned reads. Nothing in it is believed, no lock is taken, nothing is mapped. From
then on a value is a range of the file, like a record of any other format. Keys lie elsewhere, so
the index keeps them.

Records are numbered by the page that holds their value, and within a page by their keys. Where keys
were written in their order, that is the order of the keys, or nearly so; where they were not (ids,
hashes), reading in the order of the keys would be reading in no order at all.

    page      number u64 | 0 u16 | kind u16 | lower u16, upper u16; or pages u32 of an overflow run
              | place of each node u16, up to `lower` | nodes
    node      in a leaf: size u32 | flags u16 | length of the key u16 | key | value, or its run u64
              in a branch: child u48 | length of the key u16 | key
    file      two meta pages, of which the one with the larger transaction counts | pages

LMDB 0.9 of 64 bits, little-endian, whatever its page size. Sources:
https://git.openldap.org/openldap/openldap, libraries/liblmdb/mdb.c, tag LMDB_0.9.36
https://github.com/BVLC/caffe/blob/master/src/caffe/proto/caffe.proto (Datum)
https://github.com/fyu/lsun/blob/master/data.py
"""

from __future__ import annotations

import contextlib
import re
import shlex
import struct
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...errors import DamageError, SourceError, printable
from ...names import KEY
from ...storage.base import Location
from ..lmdb import BRANCH_PAGE, LEAF_PAGE, META_PAGE, OVERFLOW_PAGE, PAGE_HEAD, RUN_HEAD, TREE
from ..record import MAGIC
from ..sample import pack, unpack
from .base import ForeignFile, Values
from .protobuf import read_varint

SPECIAL = frozenset((b"__keys__", b"__len__"))  # keys of other tools' notes, not of records

_NODE = struct.Struct("<HHHH")  # size or child, low and high; flags or the child's highest; key
_U64 = struct.Struct("<Q")
_KINDS = 0x6F  # these, fixed-size values (0x20) and sub-pages (0x40)
_BIG, _NAMED = 1, 2  # flags of a node; 4: it has many values
_MAGIC = b"\xde\xc0\xef\xbe"
_FORMAT = _MAGIC + b"\1\0\0\0"  # LMDB 0.9's, at byte 16 of a meta page
_MANY_VALUES = 4  # flag of a tree
_EMPTY = (1 << 64) - 1
_PAGE_SIZES = [1 << bits for bits in range(8, 17)]
_MAX_DEPTH = 32  # LMDB's CURSOR_STACK
_MAX_PROBED = 64 << 20  # bytes of a value; the kind of a file is decided by smaller ones


class LmdbFile(ForeignFile):
    """A database, and what scanning it found out.

    values: of a Datum `image`, which is bytes when it is encoded, else an array (H, W, C) of uint8
    or float32, its channels in the order of the file (Caffe's convert_imageset wrote BGR), and
    `label`, an int; `image` where values are image files; `data` where they are other bytes.
    """

    def _open(self, storage: Location, name: str, extra: bytes) -> None:
        self.take("bytes", b"", b"")
        if extra:
            found = unpack(extra)
            self.take(found["kind"], found["keys"], found["sizes"])

    def take(self, kind: str, keys: bytes, sizes: bytes) -> None:
        """Take the kind of the values ("bytes", "datum" or "image"), and the keys of the records.

        keys: joined. sizes: the u16 size of each.
        """
        ends = np.frombuffer(sizes, "<u2").cumsum(dtype=np.int64)
        if (int(ends[-1]) if len(ends) else 0) != len(keys):
            raise ValueError("they are not as long as it says")
        self.kind, self._keys, self._sizes = kind, keys, sizes
        self._ends = [0, *ends.tolist()]

    def scan(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) of each record. Raises DamageError, SourceError."""
        found = _walk(self)
        ranges = list(zip(found.offsets.tolist(), found.lengths.tolist(), strict=True))
        if ranges and self.read(ranges[-1][0], min(ranges[-1][1], len(MAGIC))) == MAGIC:
            raise SourceError(
                f"{self.name}: it is a shard of a packed dataset, whose manifest.json is not here. "
                "Restore that; without a copy, `shardio repair` makes a new one"
            )
        told = sorted({0, len(ranges) // 2, len(ranges) - 1}) if ranges else []
        kinds = [_kind(self, self.read(*ranges[i])) for i in told if ranges[i][1] <= _MAX_PROBED]
        kind = next((kind for kind in kinds if kind != "bytes"), "bytes")
        self.take(kind, found.keys, found.sizes)
        return iter(ranges)

    def extra(self) -> bytes:
        """Return what opening needs besides the file."""
        return pack({"kind": self.kind, "keys": self._keys, "sizes": self._sizes})

    def key(self, record: int) -> bytes:
        """Return the key of a record."""
        return self._keys[self._ends[record] : self._ends[record + 1]]

    def values(self, data: bytes, record: int) -> Values:
        """Return the values of a record. Raises ValueError."""
        if self.kind == "datum":
            return {KEY: self.key(record), **_datum(data)}
        return {KEY: self.key(record), "image" if self.kind == "image" else "data": data}


# --- values ---------------------------------------------------------------------------------------


def _kind(file: LmdbFile, value: bytes) -> str:
    """Return the kind of the values of a file, by one of them. Raises SourceError."""
    if _is_image(value):
        return "image"
    with contextlib.suppress(ValueError):
        if _datum(value)["image"] is not None:
            return "datum"
    if _is_pickled(value):
        raise SourceError(
            f"{file.name}: its values are pickled, and to unpickle them is to run code that the "
            "file names. Where you trust it, convert it once:\n"
            "  import lmdb, pickle, shardio\n"
            f"  source = lmdb.open({file.name!r}, readonly=True, lock=False, subdir=False)\n"
            "  with source.begin() as entries, shardio.Writer('packed/') as writer:\n"
            "      for key, value in entries.cursor():\n"
            "          if not key.startswith(b'__'):\n"
            "              image, label = pickle.loads(value)  # as your data set has it\n"
            '              writer.write({"__key__": key, "image": image, "label": label})'
        )
    return "bytes"


def _is_image(start: bytes) -> bool:
    """Return True for a JPEG, PNG, GIF, WebP, BMP, TIFF, JPEG 2000, AVIF or HEIF, by signature."""
    return (
        start.startswith(
            (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP  ")
        )
        or (start[:4] == b"RIFF" and start[8:12] == b"WEBP")
        or (start[:2] == b"BM" and len(start) > 26 and start[6:10] == bytes(4))
        or start[4:8] == b"ftyp"
    )


# How pickles begin: of protocols 2 to 5, and of the older, textual ones.
_PICKLE = re.compile(rb"\x80[\2-\5]|\(?c[\w.]+\n[\w.]+\n|\([ld]p\d|[]}]q\0|\([FISV]")


def _is_pickled(value: bytes) -> bool:
    return value.endswith(b".") and _PICKLE.match(value) is not None


# Of a Datum the numbers, by their tags: channels, height, width, label, encoded.
_DATUM = {0x08: 0, 0x10: 0, 0x18: 0, 0x28: None, 0x38: 0}


def _datum(data: bytes) -> Values:
    """Return the image and label of a Datum. Raises ValueError if it is none."""
    numbers: dict[int, Any] = dict(_DATUM)
    start = stop = -1  # of the bytes in field 4
    floats: list[bytes] = []
    at, size = 0, len(data)
    try:
        while at < size:
            tag = data[at]
            at += 1
            if tag == 0x22 or tag == 0x32:  # data; packed floats
                length, at = read_varint(data, at)
                if length > size - at:
                    raise ValueError("a field of a Datum does not fit")
                if tag == 0x22:
                    start, stop = at, at + length
                else:
                    floats.append(data[at : at + length])
                at += length
            elif tag == 0x35:  # one float
                floats.append(data[at : at + 4])
                at += 4
            elif tag in _DATUM:
                numbers[tag], at = read_varint(data, at)
            else:
                raise ValueError("it has a field that no Datum has")
    except IndexError:
        raise ValueError("it ends within a field") from None
    if at != size:
        raise ValueError("it ends within a field")
    channels, height, width, label, encoded = numbers.values()
    if label is not None:
        label &= 0xFFFFFFFF  # int32, of which a negative one takes 10 bytes
        label -= label >> 31 << 32
    shape = (channels, height, width)
    image: Any
    if encoded or (start >= 0 and shape == (0, 0, 0)):  # some writers say neither
        if start < 0:
            raise ValueError("a Datum says it is encoded, and has no data")
        image = data[start:stop]
    elif stop > start or floats:
        given = stop - start or sum(map(len, floats)) / 4
        if channels * height * width != given:
            raise ValueError(
                f"a Datum of {channels:,} channels, height {height:,} and width {width:,} has "
                f"{given:,} values"
            )
        if stop > start:
            found: Any = np.frombuffer(data, np.uint8, stop - start, start)
        else:
            found = np.frombuffer(b"".join(floats), "<f4").astype(np.float32)
        image = found.reshape(shape).transpose(1, 2, 0).copy()
    elif size:
        image = None
    else:
        raise ValueError("it is empty")
    return {"image": image, "label": label}


# --- the tree -------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """All records of a file, as they are numbered."""

    offsets: np.ndarray[Any, Any]  # (records,) uint64, of the values
    lengths: np.ndarray[Any, Any]  # (records,) uint64
    keys: bytes  # joined
    sizes: bytes  # of the keys, u16 each


class _Tree(NamedTuple):
    """The tree that the meta page names."""

    page_size: int
    root: int  # a page
    depth: int
    pages: int  # branches and leaves
    entries: int


def _walk(file: LmdbFile) -> _Found:
    """Find all values. Raises DamageError naming the page, SourceError."""
    tree = _tree(file)
    page_size = tree.page_size
    last = file.size // page_size
    pages, offsets, lengths = array("Q"), array("Q"), array("Q")
    keys: list[bytes] = []
    special = 0
    for number, data, places, upper in _leaves(file, tree):
        room = page_size - upper
        for at in places:
            low, high, flags, key_size = _NODE.unpack_from(data, at)
            size = low | high << 16
            begin = at + 8 + key_size
            key = data[at + 8 : begin]
            if flags & ~_BIG:
                raise _unusable(file, flags, key)
            if begin + (8 if flags else size) > page_size or not key_size:
                raise _damaged(file, number, f"the node at byte {at} does not fit")
            room -= begin - at + (8 if flags else size)
            if room < 0:
                raise _damaged(file, number, "its nodes overlap")
            if key in SPECIAL:
                special += 1
                continue
            page, start = number, number * page_size + begin
            if flags:
                (page,) = _U64.unpack_from(data, begin)
                if page >= last:
                    raise _damaged(file, page, f"the value of key {printable(key)} lies beyond")
                start = page * page_size + 16
            keys.append(key)
            pages.append(page)
            offsets.append(start)
            lengths.append(size)
    if len(keys) + special != tree.entries:
        raise DamageError(
            f"{file.name}: it holds {len(keys) + special:,} keys, and says {tree.entries:,}"
        )
    order = np.argsort(np.frombuffer(pages, np.uint64), kind="stable")
    begins = np.frombuffer(offsets, np.uint64)[order]
    counts = np.frombuffer(lengths, np.uint64)[order]
    keys = [keys[i] for i in order.tolist()]
    _check_runs(file, page_size, begins, counts)
    sizes = np.fromiter(map(len, keys), "<u2", len(keys))
    return _Found(begins, counts, b"".join(keys), sizes.tobytes())


def _leaves(file: LmdbFile, tree: _Tree) -> Iterator[tuple[int, bytes, tuple[int, ...], int]]:
    """Yield the leaves of a tree in the order of keys: number, bytes, places of nodes, `upper`.

    Raises DamageError naming the page.
    """
    page_size = tree.page_size
    last = file.size // page_size
    seen = 0
    waiting = [(tree.root, 1)] if tree.entries else []
    passed: set[int] = set()
    while waiting:
        number, depth = waiting.pop()
        passed.add(number)
        seen += 1
        if (
            not 2 <= number < last
            or depth > tree.depth
            or not len(passed) == seen <= tree.pages  # a page comes once
        ):
            raise _damaged(file, number, "it is not where a page of the tree can be")
        data = file.read(number * page_size, page_size)
        own, _, flags, lower, upper = PAGE_HEAD.unpack_from(data)
        kind = flags & _KINDS
        known = own == number and kind in (BRANCH_PAGE, LEAF_PAGE)
        if not known or not 16 <= lower <= upper <= page_size:
            raise _damaged(file, number, "it is no page of a tree")
        if (kind == LEAF_PAGE) != (depth == tree.depth):
            raise _damaged(file, number, "it is not at the depth where it should be")
        places = struct.unpack_from(f"<{(lower - 16) // 2}H", data, 16)
        if len(set(places)) < len(places):
            raise _damaged(file, number, "a node is in it twice")
        for at in places:
            if not upper <= at <= page_size - 8:
                raise _damaged(file, number, f"a node at byte {at} does not fit")
        if kind == LEAF_PAGE:
            yield number, data, places, upper
            continue
        children = []
        for at in places:
            low, middle, high, _ = _NODE.unpack_from(data, at)
            children.append((low | middle << 16 | high << 32, depth + 1))
        waiting += reversed(children)


def _check_runs(file: LmdbFile, page_size: int, begins: Any, counts: Any) -> None:
    """Look at the page before each value that has pages to itself."""
    behind = 0  # the page behind the run before
    runs = np.flatnonzero(begins % page_size == 16)
    for begin, size in zip(begins[runs].tolist(), counts[runs].tolist(), strict=True):
        number = begin // page_size
        own, _, flags, pages = RUN_HEAD.unpack(file.read(begin - 16, 16))
        end = (15 + size) // page_size + 1
        if own != number or flags & _KINDS != OVERFLOW_PAGE or pages < end or number < behind:
            raise _damaged(file, number, f"it is not the first of {end:,} pages of a value")
        if begin + size > file.size:
            raise _damaged(file, number, f"a value of {size:,} bytes ends beyond the file")
        behind = number + end


def _tree(file: LmdbFile) -> _Tree:
    """Read the meta page that counts. Raises DamageError, SourceError."""
    if file.size < 2 * _PAGE_SIZES[0]:
        raise DamageError(f"{file.name}: {file.size:,} bytes are too few for an LMDB database")
    start = file.read(0, 64)
    if start[16:20] != _MAGIC:
        if why := _elsewhere(start):
            raise SourceError(
                f"{file.name}: {why}. Convert it with that version's mdb_dump and the mdb_load of "
                f"LMDB 0.9 here:\n  mdb_dump -n {shlex.quote(file.name)} | mdb_load -n "
                f"{shlex.quote(file.name + '.new')}"
            )
        raise DamageError(
            f"{file.name}: byte 16: found {start[16:20].hex(' ')}, expected {_MAGIC.hex(' ')}. It "
            "is no LMDB database"
        )
    page_size, first, tree = _meta(file, 0, None)
    _, second, other = _meta(file, page_size, page_size)
    _, flags, depth, branches, leaves, _, entries, root = tree if first > second else other
    if flags & _MANY_VALUES:
        raise SourceError(f"{file.name}: {_MANY}")
    pages = branches + leaves
    if entries and not (1 <= depth <= _MAX_DEPTH and pages <= file.size // page_size):
        raise DamageError(
            f"{file.name}: a tree of depth {depth} and {pages:,} pages cannot be in "
            f"{file.size:,} bytes. The file was cut short, or damaged"
        )
    if entries and root == _EMPTY:
        raise DamageError(f"{file.name}: it has {entries:,} entries, and no page of them")
    return _Tree(page_size, root, depth, pages, entries)


def _meta(file: LmdbFile, at: int, page_size: int | None) -> tuple[int, int, tuple[int, ...]]:
    """Return page size, transaction, and main tree of a meta page."""
    data = file.read(at, 152)
    kind = PAGE_HEAD.unpack_from(data)[2]
    found: int = TREE.unpack_from(data, 40)[0]
    tree = TREE.unpack_from(data, 88)
    (transaction,) = _U64.unpack_from(data, 144)
    if (
        kind & _KINDS != META_PAGE
        or data[16:24] != _FORMAT
        or found not in _PAGE_SIZES
        or page_size not in (None, found)
    ):
        raise DamageError(
            f"{file.name}: meta page at byte {at}: found {data[:24].hex(' ')}, and a page size of "
            f"{found:,}. It is no LMDB 0.9 database, or was damaged"
        )
    return found, transaction, tree


def _elsewhere(start: bytes) -> str | None:
    """Say who wrote a file that is a database, but of another machine or version."""
    if start[24:28] == _MAGIC:
        return "it was written by LMDB 1.0, which LMDB 0.9 cannot read"
    if start[12:16] == _MAGIC:
        return "it was written on a machine of 32 bits"
    if _MAGIC[::-1] in (start[16:20], start[12:16]):
        return "it was written on a big-endian machine"
    return None


_MANY = (
    "a key in it may have many values (MDB_DUPSORT), so that a key is no record. Write it anew, "
    "with keys of its own for each"
)


def _unusable(file: LmdbFile, flags: int, key: bytes) -> Exception:
    if flags & _NAMED:
        name = key.decode("utf-8", "backslashreplace")
        return SourceError(
            f"{file.name}: it holds databases by name, one of them {printable(name)}. Copy that "
            f"into a file of its own:\n  mdb_dump -n -s {shlex.quote(name)} "
            f"{shlex.quote(file.name)} | mdb_load -n {shlex.quote(file.name + '.new')}"
        )
    return SourceError(f"{file.name}: {_MANY}")


def _damaged(file: LmdbFile, page: int, why: str) -> DamageError:
    return DamageError(f"{file.name}: LMDB page {page}: {why}. The file was cut short, or damaged")
