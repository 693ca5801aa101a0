"""The LMDB shard: the records of a record shard, as the values of one LMDB environment in one file.

    key          value
    00 00 00 00  record 0, byte for byte as a record shard has it (formats/record.py)
    00 00 00 01  record 1; a key is the record's number, big-endian, so keys are in order
    ...
    ff ff ff ff  header, index and trailer, as in a record shard without a record between them

Any LMDB 0.9 opens the file (format 1, 64 bits, little-endian, pages of 4,096 bytes), and liblmdb
does not run here, neither to write nor to read. Values come in the order of their keys, which is
what a B-tree needs to be written in one pass, so the bytes follow from the records alone. By
liblmdb they follow from the machine's page size too; a shard takes 2.5 times its size in memory,
and is written twice, as only the compacting copy has no holes.

And as the sizes of the values decide where each page and value lies (`lay_out`), a value is a range
of the file: it is read by `pread`, and checked like every record. A map is hardly faster (read and
hashed one by one: 17.0 us against 17.5 at 110 KB, 1.05 against 1.28 at 0.9 KB), and it ends the
process where a file is cut short or a disk fails (SIGBUS), or where a page is damaged that nobody
verified before.

    page      number u64 | 0 u16 | kind u16 | lower u16, upper u16; or pages u32 of an overflow run
              | place of each node u16, up to `lower` | zeros | nodes, from `upper` on
    node      in a leaf: size u32 | 1 if the value is in an overflow run u16 | length of the key u16
              | key | value, or the run's page u64 | zero byte, if that is odd
              in a branch: child u48 | length of the key u16 | key; the first child has no key
    file      two meta pages | leaves, each behind the runs of its nodes | branches, the root last

A leaf ends where it is full, or before a run if it holds a value itself: so values lie in the file
in the order of their keys, and neighbours are read together.

Source: lib/mdb.c of LMDB 0.9 (https://git.openldap.org/openldap/openldap, tag LMDB_0.9.36).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..errors import DamageError, VersionError
from ..storage.base import File
from .base import Column, ShardInfo
from .places import Places
from .record import FRAME, RecordEncoder, RecordShard, most_of_end
from .sample import MAX_BODY, Buffer, Schema

PAGE = 4096  # written; the machine's own pages may be larger
_OF_PAGES = 64 << 10  # bytes of pages at the end of a shard, besides the index: of 100,000 records
_LAST = 0xFFFFFFFF  # the key of header, index and trailer; no record has this number
_MAX_VALUE = (1 << 32) - 1  # LMDB's MAXDATASIZE

BRANCH_PAGE, LEAF_PAGE, OVERFLOW_PAGE, META_PAGE = 1, 2, 4, 8  # kinds of pages
PAGE_HEAD = struct.Struct("<QHHHH")
RUN_HEAD = struct.Struct("<QHHI")
_NODE = struct.Struct("<IHH4s")  # with the key
_BIG = struct.Struct("<IHH4sQ")  # with the key and the run's page
_KEY = struct.Struct(">I")
_ROOM = PAGE - PAGE_HEAD.size  # for nodes and their places, 2 bytes each
# Bytes of the longest value in a leaf: at least two nodes fit.
_MAX_IN_LEAF = _ROOM // 2 // 2 * 2 - 2 - _NODE.size
_FANOUT = 291  # children of a branch page: 10 + 290 * 14 bytes

_MAGIC = 0xBEEFC0DE
_VERSION = 1
_NO_PAGE = (1 << 64) - 1
START = PAGE_HEAD.pack(0, 0, META_PAGE, 0, 0) + struct.pack("<II", _MAGIC, _VERSION)
TREE = struct.Struct("<IHHQQQQQ")  # page size or 0, flags, depth, pages of 3 kinds, entries, root
_INTEGER_KEY = 8
_Entries = np.dtype([("child", "<u4"), ("high", "<u2"), ("length", "<u2"), ("key", ">u4")])


class Layout(NamedTuple):
    """Where pages and values lie, which follows from the sizes of the values alone.

    L leaves, N values. Values in an overflow run (`big`) have a page and those behind it to
    themselves.
    """

    sizes: Column  # (N,) int64
    big: Column  # (N,) bool
    runs: Column  # (N,) int64 pages of each overflow run; 0 where there is none
    starts: Column  # (N,) int64 the byte at which each value begins
    firsts: Column  # (L + 1,) int64 the first value of each leaf
    leaves: Column  # (L,) int64 page number of each leaf

    @property
    def upto(self) -> int:
        """Return the page behind the last leaf: branches follow."""
        return int(self.leaves[-1]) + 1


def lay_out(sizes: Column) -> Layout:
    """Return where values of these sizes lie. sizes: (N,) int64, N > 0."""
    big = sizes > _MAX_IN_LEAF
    nodes = np.where(big, _BIG.size, (_NODE.size + sizes + 1) & ~1)
    runs = np.where(big, (PAGE_HEAD.size - 1 + sizes) // PAGE + 1, 0)
    rooms = np.cumsum(nodes + 2)
    # The first value of the next leaf, by that of this one: where it is full, or before a run.
    follows = np.searchsorted(rooms, rooms - nodes - 2 + _ROOM, "right")
    turns = np.append(np.flatnonzero(big[1:] & ~big[:-1]) + 1, len(sizes))
    follows = np.minimum(follows, turns[np.searchsorted(turns, np.arange(len(sizes)), "right")])
    listed = follows.tolist()
    firsts, first = [], 0
    while first < len(listed):
        firsts.append(first)
        first = listed[first]
    count = len(firsts)
    bounds = np.array([*firsts, len(sizes)], np.int64)
    total = np.cumsum(runs)
    leaves = 2 + total[bounds[1:] - 1] + np.arange(count)
    leaf = np.repeat(np.arange(count), np.diff(bounds))  # of each value
    behind = np.cumsum(nodes)
    behind = behind[bounds[1:] - 1][leaf] - behind + nodes  # bytes from a node to its leaf's end
    inside = (leaves[leaf] + 1) * PAGE - behind + _NODE.size
    outside = (2 + total - runs + leaf) * PAGE + PAGE_HEAD.size
    return Layout(sizes, big, runs, np.where(big, outside, inside), bounds, leaves)


# --- pages ----------------------------------------------------------------------------------------


def _leaf(number: int, nodes: Sequence[bytes]) -> bytes:
    """Return a leaf of these nodes, which lie in it in their order."""
    lengths = list(map(len, nodes))
    upper, lower = PAGE - sum(lengths), PAGE_HEAD.size + 2 * len(nodes)
    spots = struct.pack(f"<{len(nodes)}H", *accumulate(lengths[:-1], initial=upper))
    head = PAGE_HEAD.pack(number, 0, LEAF_PAGE, lower, upper)
    return b"".join((head, spots, bytes(upper - lower), *nodes))


def _node(key: int, value: bytes) -> bytes:
    node = _NODE.pack(len(value), 0, 4, _KEY.pack(key)) + value
    return node + b"\0" if len(node) & 1 else node


def _big_node(key: int, size: int, page: int) -> bytes:
    return _BIG.pack(size, 1, 4, _KEY.pack(key), page)


def _run(number: int, size: int) -> tuple[bytes, bytes]:
    """Return what stands before and behind a value of this size in an overflow run."""
    pages = (PAGE_HEAD.size - 1 + size) // PAGE + 1
    return RUN_HEAD.pack(number, 0, OVERFLOW_PAGE, pages), bytes(
        pages * PAGE - PAGE_HEAD.size - size
    )


def _branches(leaves: Column, keys: Column) -> tuple[bytes, int]:
    """Return the branch pages above leaves with these first keys, the root last; the depth."""
    pages: list[bytes] = []
    number, depth = int(leaves[-1]) + 1, 1
    children = leaves
    while len(children) > 1:
        depth += 1
        bounds = [*range(0, len(children), _FANOUT), len(children)]
        if bounds[-1] - bounds[-2] == 1 and len(bounds) > 2:
            bounds[-2] -= 1  # LMDB wants two children
        level = number
        for start, stop in pairwise(bounds):
            entries = np.empty(stop - start, _Entries)
            entries["child"] = children[start:stop] & 0xFFFFFFFF
            entries["high"] = children[start:stop] >> 32
            entries["length"], entries["key"] = 4, keys[start:stop]
            entries["length"][0] = 0
            nodes = entries.tobytes()
            upper, lower = PAGE + 4 - len(nodes), PAGE_HEAD.size + 2 * len(entries)
            spots = np.arange(upper - 4, PAGE, _NODE.size).astype("<u2")
            spots[0] = upper
            head = PAGE_HEAD.pack(number, 0, BRANCH_PAGE, lower, upper) + spots.tobytes()
            pages += (head, bytes(upper - lower), nodes[:8], nodes[_NODE.size :])
            number += 1
        keys, children = keys[bounds[:-1]], np.arange(level, number)
    return b"".join(pages), depth


def _metas(entries: int, leaves: int, branches: int, runs: int, depth: int, pages: int) -> bytes:
    """Return both meta pages: that of an empty environment, then that of this one, which counts."""
    free = TREE.pack(PAGE, _INTEGER_KEY, 0, 0, 0, 0, 0, _NO_PAGE)
    empty = TREE.pack(0, 0, 0, 0, 0, 0, 0, _NO_PAGE)
    full = TREE.pack(0, 0, depth, branches, leaves, runs, entries, pages - 1)
    return b"".join(
        (
            PAGE_HEAD.pack(number, 0, META_PAGE, 0, 0)
            + struct.pack("<IIQQ", _MAGIC, _VERSION, 0, pages * PAGE)
            + free
            + tree
            + struct.pack("<QQ", last, number)
        ).ljust(PAGE, b"\0")
        for number, tree, last in ((0, empty, 1), (1, full if entries else empty, pages - 1))
    )


# --- writing --------------------------------------------------------------------------------------


class LmdbEncoder(RecordEncoder):
    """As RecordEncoder; what its header says follows when the root is known, in `start`."""

    starts_last = True
    max_body = min(MAX_BODY, _MAX_VALUE - FRAME.size)

    def __init__(self, schema: Schema, dataset_id: bytes, number: int, *, version: int = 0) -> None:
        super().__init__(schema, dataset_id, number, version=version)
        self.start = b""
        self._head = b""
        self._page = 2  # the next one
        self._runs = 0  # pages of overflow runs so far
        self._nodes: list[bytes] = []  # of the leaf that fills
        self._room = _ROOM
        self._mixed = False  # a value is in this leaf itself
        self._leaves: list[int] = []  # page numbers
        self._keys: list[int] = []  # first key of each leaf

    def header(self) -> bytes:
        """Return the first bytes of the file."""
        self._head = super().header()
        return _metas(0, 0, 0, 0, 0, 2)

    def append(self, values: list[Any], blobs: Sequence[Buffer]) -> tuple[bytes, ...]:
        """Encode a record of values and blobs that are known to fit the fields."""
        number = self.records
        return self._add(number, *super().append(values, blobs))

    def append_stored(self, stored: bytes | None) -> tuple[bytes, ...]:
        """Append a record as another shard of this number stores it; None: one that is erased."""
        number = self.records
        return self._add(number, *super().append_stored(stored))

    def finish(self) -> bytes:
        """Return the last bytes of the file: the index and the trailer."""
        self._size = len(self._head)  # the trailer's word for where the index begins
        pieces = self._add(_LAST, self._head + super().finish())
        data = b"".join((*pieces, self._end_leaf()))
        branches, depth = _branches(np.array(self._leaves), np.array(self._keys))
        count = len(branches) // PAGE
        leaves, pages = len(self._leaves), self._page + count
        self.start = _metas(self.records + 1, leaves, count, self._runs, depth, pages)
        return data + branches

    def _add(self, key: int, *value: bytes) -> tuple[bytes, ...]:
        """Add a value; return what goes into the file now."""
        size = sum(map(len, value))
        big = size > _MAX_IN_LEAF
        length = _BIG.size if big else (_NODE.size + size + 1) & ~1
        pieces: tuple[bytes, ...] = ()
        if length + 2 > self._room or (big and self._mixed):
            pieces = (self._end_leaf(),)
        if not self._nodes:
            self._keys.append(key)
        if big:
            before, behind = _run(self._page, size)
            pieces += (before, *value, behind)
            self._nodes.append(_big_node(key, size, self._page))
            pages = (size + len(before) + len(behind)) // PAGE
            self._page += pages
            self._runs += pages
        else:
            self._nodes.append(_node(key, b"".join(value)))
            self._mixed = True
        self._room -= length + 2
        return pieces

    def _end_leaf(self) -> bytes:
        page = _leaf(self._page, self._nodes)
        self._leaves.append(self._page)
        self._page += 1
        self._nodes, self._room, self._mixed = [], _ROOM, False
        return page


# --- reading --------------------------------------------------------------------------------------


class LmdbShard(RecordShard):
    """One shard, open for reading; see formats/base.py for what each method promises.

    Opening reads the value of the last key, through the tree, and checks it. With `verify` it also
    compares the pages that hold no record: metas, branches, and leaves that only name overflow
    runs. What a read needs of LMDB follows from checked sizes, so without it a damaged page
    changes nothing here, but other programs would stumble over it.
    """

    adjacent = False

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
        if info is not None and file.size != info.size:
            raise DamageError(
                f"{self.name}: its size is {file.size}, but the manifest says {info.size}. The "
                "file is not the one that was packed"
            )
        self._remote = False
        if info is not None and schema is not None:
            end = most_of_end(info.records, schema) + _OF_PAGES
            if file.keep_end(end):
                self._remote = True
                verify = False  # these pages lie all over the file, and no read needs them
        value = _last_value(file)
        sizes = self._describe(value, info, dataset_id, schema)[-1]
        self._last_size = value.size
        found = lay_out(np.append(sizes, value.size))
        metas, branches = self._own_pages(found)
        size = found.upto * PAGE + len(branches)
        if size != file.size or found.starts[-1] != value.start:
            raise DamageError(
                f"{self.name}: its {self.records:,} records and their index take {size:,} bytes, "
                f"and the index begins at byte {found.starts[-1]}; the file has {file.size:,}, and "
                f"the index at byte {value.start}"
            )
        bounds = np.stack((found.starts, found.starts + found.sizes), 1)
        self._take_places(Places(bounds.reshape(-1), gaps=True))
        if verify:
            self._check_own(found, metas, branches)
            named = np.logical_and.reduceat(found.big, found.firsts[:-1])
            self._check_leaves(found, np.flatnonzero(named).tolist())

    def check(self) -> None:
        """Compare all bytes that are no record's, in every page. Raises DamageError naming one."""
        found = lay_out(np.append(self.sizes[:], self._last_size))
        self._check_own(found, *self._own_pages(found))
        self._check_leaves(found, range(len(found.leaves)))
        for i in np.flatnonzero(found.big).tolist():
            start, size = int(found.starts[i]), int(found.sizes[i])
            before, behind = _run(start // PAGE, size)
            self._compare("an overflow page", start - len(before), before)
            self._compare("an overflow page", start + size, behind)

    def _own_pages(self, found: Layout) -> tuple[bytes, bytes]:
        """Return meta and branch pages as they must be."""
        firsts = found.firsts[:-1]
        branches, depth = _branches(found.leaves, np.where(firsts == self.records, _LAST, firsts))
        count, leaves, runs = len(branches) // PAGE, len(firsts), int(found.runs.sum())
        return _metas(self.records + 1, leaves, count, runs, depth, found.upto + count), branches

    def _check_own(self, found: Layout, metas: bytes, branches: bytes) -> None:
        self._compare("a meta page", 0, metas)
        self._compare("a branch page", found.upto * PAGE, branches)

    def _check_leaves(self, found: Layout, leaves: Iterable[int]) -> None:
        """Make each leaf anew, of the values that lie in it, and compare."""
        for leaf in leaves:
            number = int(found.leaves[leaf])
            data, nodes = self._file.read(number * PAGE, PAGE), []
            for i in range(int(found.firsts[leaf]), int(found.firsts[leaf + 1])):
                key = i if i < self.records else _LAST
                start, size = int(found.starts[i]), int(found.sizes[i])
                if found.big[i]:
                    nodes.append(_big_node(key, size, start // PAGE))
                else:
                    at = start - number * PAGE
                    nodes.append(_node(key, data[at : at + size]))
            if data != _leaf(number, nodes):
                self._damaged_page("a leaf page", number * PAGE)

    def _compare(self, what: str, at: int, expected: bytes) -> None:
        if self._file.read(at, len(expected)) != expected:
            self._damaged_page(what, at)

    def _damaged_page(self, what: str, at: int) -> NoReturn:
        raise DamageError(
            f"{self.name}: {what} at byte {at} differs from what its records' sizes make it. The "
            "file is not the one that was packed"
        )


class _Value:
    """A value of the file, to be read as one."""

    def __init__(self, file: File, start: int, size: int) -> None:
        self.name = f"{file.name}: value of the last key"
        self.start, self.size = start, size
        self._file = file

    def read(self, start: int, length: int) -> bytes:
        return self._file.read(self.start + start, length)

    def read_again(self, start: int, length: int) -> bytes:
        return self._file.read_again(self.start + start, length)


def _last_value(file: File) -> _Value:
    """Find the value of the last key, from the last page. Nothing on the way is believed."""
    where = f"{file.name}: LMDB page"
    if file.size < 3 * PAGE:
        raise DamageError(f"{file.name}: {file.size} bytes are too few for an LMDB shard")
    start = file.read(0, 64)
    if not start.startswith(START):
        if start.find(START[16:20]) == 24:
            raise VersionError(f"{file.name}: it was written by LMDB 1.0, expected LMDB 0.9")
        raise DamageError(
            f"{file.name}: meta page at byte 0: found {start[:24].hex(' ')}, expected "
            f"{START.hex(' ')}. It is no LMDB shard"
        )
    number = file.size // PAGE - 1
    while True:
        page = file.read(number * PAGE, PAGE)
        own, _, kind, lower, _ = PAGE_HEAD.unpack_from(page)
        spot = lower - 2  # the place of its last node is written there
        known = own == number and kind in (BRANCH_PAGE, LEAF_PAGE)
        if not known or not PAGE_HEAD.size <= spot < PAGE - 1:
            raise DamageError(f"{where} {number}: it is no page of a tree, or was cut short")
        (at,) = struct.unpack_from("<H", page, spot)
        if at > PAGE - _NODE.size:
            raise DamageError(f"{where} {number}: its last node lies at byte {at}")
        size, flag, _, key = _NODE.unpack_from(page, at)
        if kind == BRANCH_PAGE:
            child = size | flag << 32
            if not 2 <= child < number:
                raise DamageError(f"{where} {number}: its last child is page {child}")
            number = child
            continue
        begin = number * PAGE + at + _NODE.size
        limit = (number + 1) * PAGE
        if flag and at + _BIG.size <= PAGE:
            run = _BIG.unpack_from(page, at)[-1]
            begin, limit = run * PAGE + PAGE_HEAD.size, number * PAGE
        if key != _KEY.pack(_LAST) or begin + size > limit:
            raise DamageError(f"{where} {number}: its last node is not that of an index")
        return _Value(file, begin, size)
