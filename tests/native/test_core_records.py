"""The core's work on records: the same bytes, samples and errors as Python, in bounds.

Python is the oracle. What the core is given may be anything: it says how much of it was right.
"""

import json
import os
import random
import re
import struct
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from support.naive_reader import seed_of
from support.raw_pixels import (
    both_ways,
    encoded,
    policy,
    raw_data,
    raw_sample,
    reader_of,
    same,
    scene,
    wholes,
)
from support.small_datasets import flip, make, of_order
from support.trees import shards
from torch.utils.data import DataLoader

import shardio
from shardio import CenterCrop, RandomResizedCrop, ShardDataset, ShardLoader, formats, native
from shardio.cli.main import main
from shardio.dataset.collate import collate, empty
from shardio.errors import DamageError, ShardioError
from shardio.formats import manifest
from shardio.formats.record import RecordShard
from shardio.formats.sample import Sample
from shardio.images import decode as image
from shardio.storage.location import locate

pytestmark = pytest.mark.skipif(native.core is None, reason=f"no core: {native.missing}")
reads = pytest.mark.skipif(native.records() is None, reason=f"core: {native.described()}")

SEED = 7 << 32
BEGIN = b"P6\n2 1\n255\n"
ROW = 6


def core() -> Any:
    return native.core


def record(number: int, head: bytes, blob: bytes, seed: int = SEED) -> bytes:
    sealed = struct.pack("<II", len(head) + len(blob), len(head)) + head + blob
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(sealed, seed + number)) + sealed


class Records:
    """A file of records, as the core is given it."""

    def __init__(self, path: Path, records: list[bytes]) -> None:
        path.write_bytes(b"front" + b"".join(records))
        self.offsets = np.cumsum([5, *map(len, records)], dtype=np.int64)
        self.file = os.open(path, os.O_RDONLY)

    def gather(self, numbers: Any, out: Any, begin: bytes = BEGIN) -> int:
        wanted = np.array(numbers, np.int64)
        rows = memoryview(out)  # one after the other
        if wanted.size and rows.nbytes and rows.nbytes % wanted.size == 0:
            rows = rows.cast("B", (wanted.size, rows.nbytes // wanted.size))
        at = np.arange(wanted.size)
        return int(core().gather(self.file, self.offsets, SEED, wanted, begin, rows, at))

    def blobs(self, numbers: Any) -> list[bytes]:
        wanted = np.array(numbers, np.int64)
        return list(core().blobs(self.file, self.offsets, SEED, wanted))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Any]:
    made: list[Records] = []

    def make_file(records: list[bytes]) -> Records:
        made.append(Records(tmp_path / str(len(made)), records))
        return made[-1]

    yield make_file
    for one in made:
        os.close(one.file)


def pixels(number: int) -> bytes:
    return bytes((number * 7 + i) % 256 for i in range(ROW))


def one_row() -> tuple[Any, Any]:
    return np.zeros((1, ROW), np.uint8), np.array([0], np.int64)


def raw(number: int) -> bytes:
    return record(number, b"h" * (1 + number % 5), BEGIN + pixels(number))


# --- gather and blobs -----------------------------------------------------------------------------


@reads
def test_gather_copies_what_follows_the_beginning(files: Any) -> None:
    some = files([raw(i) for i in range(9)])
    numbers = [8, 0, 3, 3, 5]
    out = bytearray(b"?" * (ROW * 5 + 1))
    assert some.gather(numbers, memoryview(out)[: ROW * 5]) == 5
    assert out == b"".join(map(pixels, numbers)) + b"?"
    assert some.blobs(numbers) == [BEGIN + pixels(n) for n in numbers]


@reads
def test_gather_copies_to_the_rows_that_are_given(files: Any) -> None:
    some = files([raw(i) for i in range(9)])
    numbers, rows = np.array([2, 3, 4, 8, 0]), np.array([6, 0, 5, 2, 3])
    out = np.full((7, 2, 3), 9, np.uint8)
    given = (some.file, some.offsets, SEED, numbers, BEGIN, out)
    assert core().gather(*given, rows) == 5
    for number, row in zip(numbers, rows, strict=True):
        assert out[row].tobytes() == pixels(number)
    assert (out[[1, 4]] == 9).all()
    for bad in (-1, 7, 1 << 61, -(1 << 63)):
        out[:] = 9
        assert core().gather(*given, np.array([6, 0, bad, 2, 3])) == 2
        assert (out[1:6] == 9).all()
    assert core().gather(*given, rows[:4]) == core().gather(*given, np.arange(6)) == 0
    assert core().gather(*given[:5], bytearray(41), rows) == 0  # of a byte each


@reads
def test_records_side_by_side_are_each_checked_and_right(files: Any, tmp_path: Path) -> None:
    """They are read together: some at a time, and no more than there is room for."""
    chance = random.Random(5)
    heads = [b"h" * chance.choice((1, 9, 900, 9000, 40_000)) for _ in range(120)]
    records = [record(i, head, BEGIN + pixels(i)) for i, head in enumerate(heads)]
    some = files(records)
    for trial in range(60):
        numbers: list[int] = []
        while len(numbers) < 90:
            first = chance.randrange(120)
            numbers += range(first, min(120, first + chance.choice((1, 2, 5, 60))))
        torn, data = chance.choice(numbers), b"front" + b"".join(records)
        if trial % 2:
            at = int(some.offsets[torn]) + chance.randrange(len(records[torn]))
            data = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        (tmp_path / "0").write_bytes(data)
        whole = numbers.index(torn) if trial % 2 else len(numbers)
        out = bytearray(len(numbers) * ROW)
        assert some.gather(numbers, out) == whole
        assert out[: whole * ROW] == b"".join(map(pixels, numbers[:whole]))
        assert not any(out[whole * ROW :])
        assert some.blobs(numbers) == [BEGIN + pixels(n) for n in numbers[:whole]]


@reads
def test_a_flipped_bit_anywhere_ends_it_there(files: Any) -> None:
    whole = [raw(i) for i in range(4)]
    for at in range(len(whole[2])):
        for bit in (0, 7):
            torn = bytearray(whole[2])
            torn[at] ^= 1 << bit
            some = files([*whole[:2], bytes(torn), whole[3]])
            out = bytearray(ROW * 3)
            assert some.gather([0, 2, 1], out) == 1, at
            assert out == pixels(0) + bytes(2 * ROW)
            assert some.blobs([3, 1, 2, 0]) == [BEGIN + pixels(3), BEGIN + pixels(1)]


@reads
@pytest.mark.parametrize(
    "odd",
    [
        record(1, b"h", b"P6\n1 2\n255\n" + bytes(ROW)),  # another size
        record(1, b"h", BEGIN + bytes(ROW + 1)),
        record(1, b"h", BEGIN + bytes(ROW - 1)),
        record(1, b"h", b""),
        record(2, b"h", BEGIN + bytes(ROW)),  # from another place
        record(1, b"h", BEGIN + bytes(ROW), seed=SEED + (1 << 32)),
    ],
)
def test_another_blob_is_not_copied(files: Any, odd: bytes) -> None:
    out = bytearray(ROW * 2)
    assert files([raw(0), odd]).gather([0, 1], out) == 1
    assert out == pixels(0) + bytes(ROW)


@reads
@pytest.mark.parametrize(
    ("length", "head"),
    [(0, 0), (4, 5), (0, 1), (1 << 31, 1), (40, 41), (5, 1 << 31), (1 << 32, 0), (40, 1 << 32)],
)
def test_lengths_that_lie_under_a_right_checksum_are_not_believed(
    files: Any, length: int, head: int
) -> None:
    sealed = struct.pack("<II", length % (1 << 32), head % (1 << 32) or (1 << 32) - 1) + bytes(40)
    lying = struct.pack("<Q", xxhash.xxh3_64_intdigest(sealed, SEED)) + sealed
    some = files([lying])
    assert some.gather([0], bytearray(ROW), b"") == 0
    assert some.gather([0], bytearray(40), b"") == 0
    assert some.blobs([0]) == []
    names, kinds = ("__key__", "image"), b"kB"
    assert core().samples(lying, np.array([len(lying)]), SEED, names, kinds) == []


@reads
@pytest.mark.parametrize("bad", [-1, 4, 1 << 40, -(1 << 63), (1 << 63) - 1])
def test_numbers_of_records_that_are_not_there(files: Any, bad: int) -> None:
    some = files([raw(i) for i in range(4)])
    assert some.gather([1, bad], bytearray(2 * ROW)) == 1
    wanted = np.array([1, bad, 2], np.int64)
    assert len(core().blobs(some.file, some.offsets, SEED, wanted)) == 1


@reads
def test_what_lies_beside_the_arrays_is_not_read(files: Any) -> None:
    some = files([raw(i) for i in range(5)])
    for offsets, seed, number in (
        (some.offsets[:-1], SEED, 4),  # its end would be found behind them
        (some.offsets[1:], SEED + 1, -1),  # its beginning before them
    ):
        wanted = np.array([number], np.int64)
        assert core().gather(some.file, offsets, seed, wanted, BEGIN, *one_row()) == 0
        assert core().blobs(some.file, offsets, seed, wanted) == []
    long = files([record(0, b"h", BEGIN + bytes(3 << 20)), raw(1)])
    assert long.gather([1, 0], bytearray(2 * ROW)) == 1  # more than a head and a row can be
    assert len(long.blobs([0])[0]) == len(BEGIN) + (3 << 20)


@reads
@pytest.mark.parametrize(
    "offsets",
    [
        [5, 4, 60],
        [-5, 30, 60],
        [5, (1 << 63) - 1, 60],
        [-(1 << 63), (1 << 63) - 1, 60],
        [5, 5, 60],
        [5, 14, 60],
        [1 << 40, (1 << 40) + 38, 60],  # beyond the file
        [5, 1 << 31, 60],  # 2 GB, of which memory is not taken
        [],
        [5],
    ],
)
def test_offsets_that_cannot_be_right(files: Any, offsets: list[int]) -> None:
    some = files([raw(i) for i in range(4)])
    some.offsets = np.array(offsets, np.int64)
    assert some.gather([0], bytearray(ROW)) == 0
    if offsets[1:2] != [1 << 31]:
        assert core().blobs(some.file, some.offsets, SEED, np.array([0])) == []


@reads
def test_a_file_that_is_shorter_or_closed(files: Any, tmp_path: Path) -> None:
    some = files([raw(i) for i in range(4)])
    os.truncate(tmp_path / "0", int(some.offsets[3]) + 20)
    out = bytearray(4 * ROW)
    assert some.gather([0, 1, 2, 3], out) == 3
    numbers = np.arange(4)
    assert len(core().blobs(some.file, some.offsets, SEED, numbers)) == 3
    assert core().gather(-1, some.offsets, SEED, numbers, BEGIN, out, numbers) == 0
    assert core().blobs(-1, some.offsets, SEED, numbers) == []


@reads
def test_nothing_to_do(files: Any) -> None:
    some = files([raw(0)])
    assert some.gather([], bytearray(8)) == some.gather([0], bytearray()) == 0
    assert some.blobs([]) == []
    assert some.gather([0, 0, 0, 0], bytearray(ROW)) == 0  # no share for each
    assert some.gather([0, 0], bytearray(2 * ROW + 1)) == 0
    assert core().samples(b"", np.array([], np.int64), 0, ("a",), b"k") == []


@reads
def test_arguments_of_other_types_are_type_errors(files: Any) -> None:
    some = files([raw(0)])
    one, (out, first) = np.array([0], np.int64), one_row()
    good = (some.file, some.offsets, SEED, one, BEGIN, out, first)
    assert core().gather(*good) == 1
    wide = np.zeros((1, 2), np.int64)
    for at, values in {
        0: ("x", None, 1.5),
        1: (None, [5, 6], b"12345678", some.offsets.astype(np.int32), np.zeros(2), wide),
        2: (None, "x"),
        3: (None, [0], one.astype(np.uint64), one.astype(">i8"), wide[:, :1], np.int64(0)),
        4: (None, "P6"),
        5: (None, bytes(ROW), memoryview(bytes(ROW)), [0]),
        6: (None, [0], one.astype(np.int32)),
    }.items():
        for value in values:
            with pytest.raises((TypeError, BufferError, ValueError)):
                core().gather(*good[:at], value, *good[at + 1 :])
    assert core().gather(*good[:5], bytearray(ROW), first) == 0  # a row of `out` is a byte
    assert core().gather(*good[:5], np.zeros((), np.uint8), first) == 0  # it has no rows
    with pytest.raises(TypeError):
        core().gather(*good[:6])
    for strided in (np.zeros(2 * ROW, np.uint8)[::2], np.zeros((ROW, 2), np.uint8)[:, 0]):
        with pytest.raises((TypeError, BufferError, ValueError)):
            core().gather(*good[:5], strided, first)
    with pytest.raises((TypeError, BufferError, ValueError)):
        core().gather(*good[:3], np.zeros(4, np.int64)[::2], *good[4:])
    for names, kinds in (((), b""), (("a",), b""), (("a", "b"), b"k")):
        with pytest.raises(ValueError):
            core().samples(b"", one, 0, names, kinds)
    with pytest.raises(TypeError):
        core().samples(b"", one, 0, ["a"], b"k")


@reads
def test_arguments_are_let_go(files: Any) -> None:
    some = files([raw(i) for i in range(3)])
    numbers, out = np.arange(3), bytearray(3 * ROW)
    counted: list[Any] = [numbers, out, some.offsets]
    before = list(map(sys.getrefcount, counted))
    for _ in range(50):
        core().gather(some.file, some.offsets, SEED, numbers, BEGIN, out, numbers)
        core().blobs(some.file, some.offsets, SEED, numbers)
        with pytest.raises(TypeError):
            core().gather(some.file, some.offsets, SEED, numbers, BEGIN, None, numbers)
    assert list(map(sys.getrefcount, counted)) == before
    out.append(0)  # which a buffer that is still exported would forbid


# --- join -----------------------------------------------------------------------------------------

KINDS = b"kiBfb"  # a key, an int, the file, a float, a bool


def head(number: int, length: int, **other: Any) -> bytes:
    values = {"key": b"k%d" % number, "n": number - 2, "size": length, "x": number / 7, "b": False}
    return bytes(msgpack.packb(list((values | other).values())))


def joinable(number: int, length: int = 9, first: int = 0, **other: Any) -> bytes:
    blob = bytes([number + 1]) * length
    return record(number - first, head(number, length, **other), blob)


def taken(records: list[bytes], seed: int = SEED) -> list[Any]:
    """The records as `split` gives them."""
    ends = np.cumsum(list(map(len, records)), dtype=np.int64)
    begins = ends - np.array(list(map(len, records)), np.int64)
    return list(core().split(b"".join(records), begins, ends, seed))


class Shards:
    """Two files of records as `join` is given them; the second one begins with record 4."""

    def __init__(self, files: Any, first: list[bytes], second: list[bytes]) -> None:
        self.files = [files(first), files(second)]
        self.sources: list[Any] = [
            (number, 4 * number, one.file, one.offsets, SEED)
            for number, one in zip((0, 1), self.files, strict=True)
        ]
        self.held = [*taken(first), *([None] * (4 - len(first))), *taken(second)]

    def join(
        self,
        rows: list[int],
        shards: list[int] | None = None,
        room: int | None = None,
        held: bool = False,
    ) -> tuple[int, list[bytes], list[Any]]:
        """How many rows, their files, and keys, ints, floats and bools of them."""
        count, out, keys = len(rows), [], []
        columns = np.full(count, 7), np.full(count, 7.5), np.full(count, True)
        offsets = np.full(count + 1, -1)

        def empty(nbytes: int) -> Any:
            out.append(np.full(nbytes if room is None else room, 9, np.uint8))
            return out[0]

        which = [int(row >= 4) for row in rows] if shards is None else shards
        given = np.array(which, np.int64), np.array(rows, np.int64), KINDS, 2
        into = (None, columns[0], None, *columns[1:])
        waited = [self.held[row] for row in rows] if held else None
        done = core().join(self.sources, *given, into, offsets, keys, empty, waited)
        ends = offsets[: done + 1].tolist()
        found = [out[0][a:b].tobytes() for a, b in pairwise(ends)] if out else []
        if out:
            assert ends[0] == 0 and (offsets[done + 1 :] == -1).all()
        assert len(keys) == done == len(found)
        return done, found, [keys, *(column[:done].tolist() for column in columns)]


def two_shards(files: Any) -> Shards:
    some = [joinable(i, 5 * i) for i in range(4)]
    return Shards(files, some, [joinable(i, 5 * i, first=4) for i in range(4, 7)])


@reads
@pytest.mark.parametrize("held", [False, True])
def test_join_puts_files_and_values_in_the_order_of_rows(files: Any, held: bool) -> None:
    rows = [6, 0, 3, 3, 5, 1, 2]
    some = two_shards(files)
    if held:
        some.sources = [(*one[:2], -1, *one[3:]) for one in some.sources]  # which have no file
    done, found, [keys, ints, floats, bools] = some.join(rows, held=held)
    assert done == 7 and found == [bytes([n + 1]) * (5 * n) for n in rows]
    assert keys == [f"k{n}" for n in rows] and ints == [n - 2 for n in rows]
    assert floats == [n / 7 for n in rows] and bools == [False] * 7
    assert two_shards(files).join([])[0] == 0


@reads
def test_join_reads_records_of_all_sizes_side_by_side(files: Any, tmp_path: Path) -> None:
    chance = random.Random(6)
    sizes = [chance.choice((0, 9, 900, 9_000, 16_300, 16_400, 70_000)) for _ in range(40)]
    keys = [b"k" * chance.choice((1, 250, 300, 3_000)) for _ in sizes]
    records = [joinable(i, size, key=keys[i]) for i, size in enumerate(sizes)]
    some = Shards(files, records, [])
    for trial in range(60):
        rows: list[int] = []
        while len(rows) < 30:
            first = chance.randrange(40)
            rows += range(first, min(40, first + chance.choice((1, 2, 9))))
        torn, data = chance.choice(rows), b"front" + b"".join(records)
        if trial % 2:
            at = int(some.files[0].offsets[torn]) + chance.randrange(len(records[torn]))
            data = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        (tmp_path / "0").write_bytes(data)
        whole = rows.index(torn) if trial % 2 else len(rows)
        done, found, [names, ints, *_] = some.join(rows, [0] * len(rows))
        assert done == whole and ints == [n - 2 for n in rows[:whole]]
        assert found == [bytes([n + 1]) * sizes[n] for n in rows[:whole]]
        assert names == [keys[n].decode() for n in rows[:whole]]


@reads
@pytest.mark.parametrize(
    "odd",
    [
        joinable(1, 9, size=8),  # its head says a byte less, or more
        joinable(1, 9, size=10),
        joinable(1, 9, size=None),
        joinable(1, 9, size=-1),
        joinable(1, 9, size=1 << 63),
        joinable(1, 9, n=None),
        joinable(1, 9, n=1 << 63),  # no int64
        joinable(1, 9, n="1"),
        joinable(1, 9, x=1),
        joinable(1, 9, b=None),
        joinable(1, 9, key=None),
        joinable(1, 20_000, size=19_999),
        joinable(1, 20_000, key=b"k" * 40_000),  # a head that Python reads
        joinable(2, 9, first=0),  # from another place
        record(1, b"", bytes(9)),
        record(1, head(1, 9)[:-1], bytes(9)),
        record(1, head(1, 9) + b"\0", bytes(9)),
        record(1, head(1, 9), bytes(9), seed=SEED + (1 << 32)),
        bytes(16),
    ],
)
def test_join_ends_at_what_is_not_plain(files: Any, odd: bytes) -> None:
    some = Shards(files, [joinable(0), odd, joinable(2), joinable(3)], [])
    assert some.join([0, 2, 1, 3])[:2] == (2, [bytes([1]) * 9, bytes([3]) * 9])
    if len(odd) < 30_000:  # a head that waits in the process may be longer than one in a file
        done, found, _ = some.join([0, 2, 1, 3], held=True)
        assert done == (0 if None in some.held else 2) == len(found)


@reads
@pytest.mark.parametrize("large", [0, 20_000])
def test_join_hands_out_no_held_record_as_another(files: Any, large: int) -> None:
    some = Shards(files, [joinable(i, 9 + large) for i in range(4)], [joinable(4, 9, first=4)])
    files_of = [bytes([1]) * (9 + large), bytes([4]) * (9 + large)]
    assert some.join([0, 3], held=True)[:2] == (2, files_of)
    some.held[2] = some.held[1]
    assert some.join([0, 3, 2, 1], held=True)[:2] == (2, files_of)
    right = some.held[3]
    for wrong in (
        right[:8] + struct.pack("<II", len(right) - 16, 1 << 31) + right[16:],  # its head
        right[:8] + struct.pack("<II", len(right) - 16, len(right) - 15) + right[16:],
        right + b"x",
        right[:-1],
        right[:9],
    ):
        some.held[2] = struct.pack("<Q", SEED + 2) + wrong[8:]  # as if it were right
        assert some.join([0, 2, 1], held=True)[0] == 1
    some.held[2] = taken([joinable(i, 8 + large) for i in range(3)])[2]  # of another size
    assert some.join([0, 3, 2, 1], held=True)[0] == 2
    for other in (None, "x", bytearray(9)):
        some.held[2] = other
        assert some.join([0, 3, 2, 1], held=True)[0] == 0


@reads
def test_split_copies_right_records_and_leaves_out_the_others() -> None:
    records = [joinable(i, 50 * i) for i in range(40)]
    for wrong in (3, 17, 39):
        one = bytearray(records[wrong])
        one[len(one) // 2] ^= 4
        records[wrong] = bytes(one)
    records[20] = b""
    found = taken(records)
    assert [i for i, one in enumerate(found) if one is None] == [3, 17, 20, 39]
    for i, one in enumerate(found):
        assert one is None or one == struct.pack("<Q", SEED + i) + records[i][8:]
    block = b"".join(records)
    apart = memoryview(bytearray(b"front" + block))  # of any buffer, with gaps, in any order
    begins = np.array([5 + len(records[0]), 5])
    ends = begins + np.array([len(records[1]), len(records[0])])
    [second, first] = core().split(apart, begins, ends, SEED)
    assert first is second is None  # these are records 0 and 1
    [second, first] = core().split(apart[::1], begins[::-1].copy(), ends[::-1].copy(), SEED)
    assert [first, second] == [found[1], found[0]]
    assert core().split(b"", np.zeros(0, np.int64), np.zeros(0, np.int64), 0) == []


@reads
@given(
    st.binary(max_size=90),
    st.lists(st.tuples(st.integers(-3, 100), st.integers(-3, 100)), max_size=4),
)
def test_split_stays_within_its_block(block: bytes, places: list[tuple[int, int]]) -> None:
    begins = np.array([begin for begin, _ in places], np.int64)
    ends = np.array([end for _, end in places], np.int64)
    if all(0 <= begin <= end <= len(block) for begin, end in places):
        assert core().split(block, begins, ends, 1) == [None] * len(places)
    else:
        with pytest.raises(ValueError, match="not in the block"):
            core().split(block, begins, ends, 1)


@reads
def test_split_refuses_arguments_that_do_not_fit() -> None:
    one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    for given_ in (
        (None, one, one, 1),
        ("x", one, one, 1),
        (b"", one, two, 1),
        (b"", [0], one, 1),
        (b"", one, one.astype(np.int32), 1),
        (b"", one, np.array([1 << 62]), 1),
        (b"", one, one, -1.5),
    ):
        with pytest.raises((TypeError, ValueError)):
            core().split(*given_)


@reads
@pytest.mark.parametrize("large", [0, 20_000])
@pytest.mark.parametrize("lengths", [(0, 0), (0, 1), (1 << 31, 1), (60, 61), (5, 1 << 31)])
def test_join_believes_no_lengths(files: Any, lengths: tuple[int, int], large: int) -> None:
    sealed = struct.pack("<II", *lengths) + bytes(60 + large)
    lying = struct.pack("<Q", xxhash.xxh3_64_intdigest(sealed, SEED)) + sealed
    assert Shards(files, [lying, joinable(1)], []).join([0, 1])[0] == 0


@reads
def test_join_stays_within_what_it_is_given(files: Any, tmp_path: Path) -> None:
    some = two_shards(files)
    for row, shard in ((-1, 0), (4, 0), (1 << 62, 1), (-(1 << 63), 1), (3, 1), (0, 2), (0, -1)):
        assert some.join([1, row], [0, shard])[0] == 0  # such rows ask for no memory
    assert some.join([1, 2, 3], room=15 + 16)[0] == 1
    assert some.join([1, 2, 3], room=0)[0] == 0
    os.truncate(tmp_path / "0", int(some.files[0].offsets[3]) + 30)
    assert some.join([2, 5, 3, 1])[0] == 2
    for bad in ([5, 4, 60], [-5, 30, 60], [5, (1 << 63) - 1, 60], [5, 5, 60], [1 << 40, 1 << 41]):
        number, first, file, _, seed = some.sources[1]
        sources = [some.sources[0], (number, first, file, np.array(bad), seed)]
        given = np.array([0, 1]), np.array([1, 4]), KINDS, 2, (None,) * 5, np.zeros(3, np.int64)
        asked: list[int] = []

        def small(nbytes: int, asked: list[int] = asked) -> Any:
            asked.append(nbytes)
            return bytearray(100)

        assert core().join(sources, *given, None, small, None) <= 1
    some.sources.reverse()  # not by number: some are not found
    assert some.join([1, 5])[0] == 0


@reads
def test_join_refuses_arguments_that_do_not_fit(files: Any) -> None:
    some = two_shards(files)
    which, rows, into = np.array([0]), np.array([1]), (None,) * 5
    good = (some.sources, which, rows, KINDS, 2, into, np.zeros(2, np.int64), None, bytearray, None)
    assert core().join(*good) == 1
    wide, short = np.zeros(2, np.int64), np.zeros(1, np.int64)
    frozen = np.zeros(1, np.int64)
    frozen.flags.writeable = False
    for at, values in {
        0: (None, tuple(some.sources), [None], [some.sources[0][:4]], [(0, 0, 0, [0], 0)]),
        1: (None, [0], wide),
        2: (None, [0], wide, rows.astype(np.int32)),
        3: (None, "kiBfb", b"kiB", b""),
        4: (-1, 5, 0, None),
        5: (None, [None] * 5, into[1:], (short, *into[1:]), (None, wide, *into[2:]),
            (None, frozen, *into[2:]), (None, bytearray(8), *into[2:]), (*into[:4], short),
            (None, None, short, None, None)),
        6: (None, short, [0, 0], np.zeros((2, 2), np.int64)[:, 0]),
        7: (1, (), "x"),
        8: (None, bytes, lambda _: None, lambda _: 1 / 0),
        9: (1, [], [b"", b""]),
    }.items():  # fmt: skip
        for value in values:
            with pytest.raises((TypeError, BufferError, ValueError, ZeroDivisionError)):
                core().join(*good[:at], value, *good[at + 1 :])
    with pytest.raises(ValueError):
        core().join(*good[:3], b"iiBfb", *good[4:7], [], bytearray, None)  # there are no keys
    assert core().join(*good[:8], lambda _: bytearray(), None) == 0


@reads
def test_join_lets_its_arguments_go(files: Any) -> None:
    some = two_shards(files)
    which, rows, into = np.array([0, 1]), np.array([1, 4]), np.zeros(2, np.int64)
    offsets, keys = np.zeros(3, np.int64), ["first"]
    counted = [
        which,
        rows,
        into,
        offsets,
        keys,
        some.held[1],
        some.sources,
        some.sources[0],
        *some.sources[0][3:],
    ]
    columns = (None, into, None, None, None)
    before = list(map(sys.getrefcount, counted))
    made: list[bytearray] = []

    def empty(nbytes: int) -> bytearray:
        made.append(bytearray(nbytes))
        return made[-1]

    for _ in range(50):
        given = some.sources, which, rows, KINDS, 2
        waited = some.held[1], some.held[4]
        assert core().join(*given, columns, offsets, keys, empty, None) == 2
        assert core().join(*given, columns, offsets, keys, empty, waited) == 2
        with pytest.raises(TypeError):
            core().join(*given, columns, offsets, keys, None, waited)
        with pytest.raises(ValueError):
            core().join(*given, columns[1:], offsets, keys, empty, None)
    assert keys == ["first", *(["k1", "k4"] * 100)]
    del given, waited
    assert list(map(sys.getrefcount, counted)) == before
    made[0].append(0)  # which a buffer that is still exported would forbid


# --- samples --------------------------------------------------------------------------------------

FIELDS = (
    ("__key__", "key"),
    ("image", "image"),
    ("label", "int"),
    ("score", "float"),
    ("good", "bool"),
    ("text", "str"),
    ("more", "bytes"),
)
EDGES = [s * 2**n - d for n in (7, 8, 15, 16, 31, 32) for s in (1, -1) for d in (0, 1)]
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "key": st.binary(min_size=1, max_size=300),
    "image": st.binary(max_size=40),
    "bytes": st.one_of(st.binary(max_size=40), st.binary(min_size=300, max_size=300)),
    "int": st.one_of(
        st.integers(-40, 300),
        st.sampled_from(EDGES),
        st.integers(-(2**63), 2**64 - 1),
    ),
    "float": st.floats(),
    "bool": st.booleans(),
    "str": st.one_of(st.text("a\0é漢🙂", max_size=20), st.just("é" * 40), st.just("x" * 70_000)),
}


@st.composite
def some_samples(draw: st.DrawFn) -> list[Sample]:
    def one() -> Sample:
        return {
            name: None if kind != "key" and draw(st.integers(0, 5)) == 0 else draw(VALUES[kind])
            for name, kind in FIELDS
        }

    return [one() for _ in range(draw(st.integers(1, 6)))]


def outcome(shard: RecordShard, *, with_core: bool) -> list[Any]:
    """Samples in order, values and types, and the error at the end of them, if any."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        if not with_core:
            patch.setattr(native, "core", None)
        try:
            for sample in shard.scan(0, shard.records):
                found.append([(name, type(v), repr(v)) for name, v in sample.items()])
        except DamageError as error:
            found.append(str(error))
    return found


def opened(path: Path) -> RecordShard:
    storage = locate(path)
    made = manifest.load(storage)
    shard = formats.open_shard(made.format, made.opening(storage), made.shard(0))
    assert isinstance(shard, RecordShard)
    return shard


def letters_of(shard: RecordShard) -> bytes:
    """The types of a shard's fields, as the core is told them."""
    letters = dict(key="k", int="i", float="f", bool="b", str="s", image="B", bytes="B")
    return "".join(letters[kind] for _, kind in shard.schema.fields).encode()


@reads
@settings(suppress_health_check=[HealthCheck.too_slow])  # the first draw takes long under ASan
@given(some_samples())
def test_samples_of_all_kinds_are_those_of_python(
    tmp_path_factory: pytest.TempPathFactory, given_samples: list[Sample]
) -> None:
    out, count = tmp_path_factory.mktemp("all") / "out", len(given_samples)
    make(out, [count], fields=FIELDS, sample=given_samples.__getitem__, classes=None)
    shard = opened(out)
    found = outcome(shard, with_core=True)
    assert found == outcome(shard, with_core=False)
    assert len(found) == len(given_samples)
    start = shard.offset(0)
    ends = np.cumsum(shard.sizes)
    block = shard._file.read(start, int(ends[-1]))
    made = core().samples(block, ends, seed_of(shard), shard.schema.names, letters_of(shard))
    assert len(made) == len(given_samples)  # none was left to Python
    with open(shards(out)[0], "rb") as file:
        alone = [one_sample(shard, file.fileno(), i) for i in range(shard.records)]
    assert repr(alone) == repr(made)
    assert repr(list(map(shard.read, range(shard.records)))) == repr(made)


def one_sample(shard: RecordShard, file: int, record: int, **other: int) -> Any:
    """What the core reads of one record of a file."""
    place = {"start": shard.offset(record), "size": int(shard.sizes[record])} | other
    number = seed_of(shard) + record
    return core().sample(file, *place.values(), number, shard.schema.names, letters_of(shard))


@reads
def test_a_record_is_read_by_the_core_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_data(tmp_path / "out", [5])
    shard = opened(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(native, "core", None)
        by_python = opened(tmp_path / "out")
    expected = [by_python.read(i) for i in range(5)]
    monkeypatch.setattr(os, "pread", None)  # Python's
    assert [shard.read(i) for i in (3, 0, 1)] == [expected[i] for i in (3, 0, 1)]
    with pytest.raises(TypeError):
        by_python.read(0)


@reads
def test_a_place_where_no_record_is(tmp_path: Path) -> None:
    raw_data(tmp_path / "out", [3])
    shard = opened(tmp_path / "out")
    start, size = shard.offset(1), int(shard.sizes[1])
    with open(shards(tmp_path / "out")[0], "rb") as file:
        at = file.fileno()
        assert one_sample(shard, at, 1)["label"] == raw_sample(1)["label"]
        for other in (-1, 0, start + 1, start - 1, 1 << 62, -(1 << 63)):
            assert one_sample(shard, at, 1, start=other) is None
        for other in (-(1 << 63), -1, 0, 1, 15, 16, size - 1, size + 1, (1 << 63) - 1):
            assert one_sample(shard, at, 1, size=other) is None
        assert one_sample(shard, at, 2, start=start, size=size) is None  # of another number
        assert one_sample(shard, -1, 1) is None
        some = (at, start, size, seed_of(shard) + 1)
        for names, kinds in (((), b""), (("a",), b""), (("a", "b"), b"k")):
            with pytest.raises(ValueError):
                core().sample(*some, names, kinds)
        for names in (["a"], None):
            with pytest.raises(TypeError):
                core().sample(*some, names, b"k")
        assert core().sample(*some, ("a",), b"k") is None


@reads
@pytest.mark.parametrize("stops", [0, 1, 4])
def test_python_goes_on_where_the_core_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: int
) -> None:
    raw_data(tmp_path / "out", [5])
    shard, real = opened(tmp_path / "out"), core()

    def gather(file: int, offsets: Any, seed: int, records: Any, *given: Any) -> int:
        begin, out, rows = given
        return int(real.gather(file, offsets, seed, records[:stops], begin, out, rows[:stops]))

    stopping = SimpleNamespace(gather=gather, samples=lambda *a: real.samples(*a)[:stops])
    monkeypatch.setattr(native, "core", stopping)
    found = outcome(shard, with_core=True)
    assert len(found) == 5 and found == outcome(shard, with_core=False)
    out, rows = np.zeros((7, 6, 8, 3), np.uint8), np.array([4, 1, 6, 0, 3])
    assert shard.gather(np.arange(5), None, image.ppm_header(6, 8), out, rows)
    for number, row in enumerate(rows):
        assert np.array_equal(out[row], scene(number))
    assert not out[[2, 5]].any()


def test_a_damaged_record_is_told_as_python_tells_it(tmp_path: Path) -> None:
    raw_data(tmp_path / "out", [5])
    [path] = shards(tmp_path / "out")
    shard = opened(tmp_path / "out")
    start, size = shard.offset(2), int(shard.sizes[2])
    for at in range(size):
        flip(path, start + at)
        found = outcome(shard, with_core=True)
        assert found == outcome(shard, with_core=False)
        assert len(found) == 3 and f"record 2 at byte {start} " in found[2], at
        with pytest.raises(DamageError) as told:
            shard.read(2)
        assert f"record 2 at byte {start} " in str(told.value), at
        flip(path, start + at)
    assert len(outcome(shard, with_core=True)) == 5
    shard.read(2)
    os.truncate(path, start + size - 1)
    with pytest.raises(DamageError, match="The file was cut short"):
        shard.read(2)
    assert shard.read(1)["label"] == raw_sample(1)["label"]


KEY, HI = b"\xc4\x01k", b"\xa2hi"
GOOD = b"\x94" + KEY + b"\x05" + HI + b"\x07"  # before 5 bytes of an image


@reads
@pytest.mark.parametrize(
    ("head", "blob"),
    [
        (GOOD + b"\xc0", 5),  # one value more than the array has
        (GOOD[:-1], 5),
        (GOOD, 4),
        (GOOD, 6),
        (GOOD, 0),
        (b"\x93" + GOOD[1:], 5),
        (b"\x95" + GOOD[1:], 5),
        (b"\xdc\x00\x05" + GOOD[1:], 5),
        (b"\xdc\x00", 5),
        (b"", 5),
        (b"\x94\xc0\x05" + HI + b"\x07", 5),
        (b"\x94\xa1k\x05" + HI + b"\x07", 5),
        (b"\x94" + KEY + b"\x06" + HI + b"\x07", 5),
        (b"\x94" + KEY + b"\xff" + HI + b"\x07", 5),
        (b"\x94" + KEY + b"\xcf" + b"\xff" * 8 + HI + b"\x07", 5),
        (b"\x94" + KEY + b"\xc0" + HI + b"\x07", 5),
        (b"\x94" + KEY + b"\x05\xc4\x02hi\x07", 5),
        (b"\x94" + KEY + b"\x05\x02\x07", 5),
        (b"\x94" + KEY + b"\x05\xa1\xff\x07", 5),  # no UTF-8
        (b"\x94" + KEY + b"\x05\xa4hi\x07", 5),  # on to the image
        (b"\x94" + KEY + b"\x05\xdb\xff\xff\xff\xffhi\x07", 5),
        (b"\x94" + KEY + b"\x05" + HI + b"\xc3", 5),
        (b"\x94" + KEY + b"\x05" + HI + b"\xa1x", 5),
        (b"\x94" + KEY + b"\x05" + HI + b"\xcb" + bytes(8), 5),
        (b"\x94" + KEY + b"\x05" + HI + b"\xcd\x00", 5),  # a number that goes on in the image
    ],
)
def test_heads_that_are_wrong_under_right_checksums(tmp_path: Path, head: bytes, blob: int) -> None:
    shard = of_fields(tmp_path / "out")
    bodies = [(GOOD, bytes(5)), (head, bytes(blob))]
    records = [record(i, *body, seed=seed_of(shard)) for i, body in enumerate(bodies)]
    ends = np.cumsum(list(map(len, records)))
    made = core().samples(
        b"".join(records), ends, seed_of(shard), shard.schema.names, letters_of(shard)
    )
    assert made == [{"__key__": b"k", "image": bytes(5), "text": "hi", "label": 7}]
    (tmp_path / "records").write_bytes(b"".join(records))
    with open(tmp_path / "records", "rb") as file:
        bounds = {"start": int(ends[0]), "size": len(records[1])}
        assert one_sample(shard, file.fileno(), 1, **bounds) is None
        assert [one_sample(shard, file.fileno(), 0, start=0, size=int(ends[0]))] == made
    with pytest.raises(DamageError, match="its checksum is right, but"):
        shard.decode(1, *taken([records[1]], seed_of(shard) + 1))


@reads
def test_lengths_of_two_blobs_that_add_up_only_modulo_two_to_the_64(tmp_path: Path) -> None:
    fields = (("__key__", "key"), ("image", "image"), ("more", "bytes"))
    sample = {"__key__": b"k", "image": b"12", "more": b"345"}
    make(tmp_path / "out", [1], fields=fields, sample=lambda i: sample, classes=None)
    shard = opened(tmp_path / "out")
    for first, second in ((2, 3), (2**64 - 5, 10), (10, 2**64 - 5)):
        lengths = struct.pack(">BQBQ", 0xCF, first, 0xCF, second)
        data = record(0, b"\x93" + KEY + lengths, b"12345", seed=seed_of(shard))
        ends = np.array([len(data)])
        made = core().samples(data, ends, seed_of(shard), shard.schema.names, letters_of(shard))
        assert made == ([sample] if first == 2 else [])


def of_fields(out: Path) -> RecordShard:
    fields = (("__key__", "key"), ("image", "image"), ("text", "str"), ("label", "int"))
    sample = {"__key__": b"k", "image": bytes(5), "text": "hi", "label": 1}
    make(out, [2], fields=fields, sample=lambda i: sample, classes=None)
    return opened(out)


TOKENS = [
    *(b"\x94", b"\x93", b"\xdc\x00\x04", b"\xdd\x00\x00\x00\x04", b"\xc4\x01k", b"\xa1k"),
    *(b"\xc5\x00\x01k", b"\xc6\x00\x00\x00\x01k", b"\xc4\xffk", b"\xc6\xff\xff\xff\xff"),
    *(b"\x05", b"\xcc\x05", b"\xd1\x00\x05", b"\xff", b"\xd3" + b"\xff" * 7 + b"\xfb"),
    *(b"\xcf" + b"\xff" * 8, b"\xcb" + bytes(8), b"\xca" + bytes(4)),
    *(b"\xa2hi", b"\xd9\x02hi", b"\xda\x00\x02\xff\xfe", b"\xdb\x00\x00\x00\x01x"),
    *(b"\xc0", b"\xc2", b"\xc3", b"\xc1", b"\x80", b"\xd4\x01\x00", b""),
]
KEYS = [b"\xc4\x01k", b"\xc5\x00\x01k", b"\xa1k", b"\xc0", b""]
TOKEN = st.one_of(st.sampled_from(TOKENS), st.binary(max_size=4))
HEADS = st.one_of(
    st.lists(TOKEN, max_size=7).map(b"".join),
    # Nearly right: an array of four, and a key.
    st.tuples(
        st.sampled_from([b"\x94", b"\x94", b"\xdc\x00\x04", b"\x93", b"\x95"]),
        st.sampled_from(KEYS),
        *[TOKEN] * 3,
    ).map(b"".join),
)


@reads
@given(st.lists(HEADS, min_size=1, max_size=3), st.sampled_from([0, 4, 5, 6]))
def test_heads_of_any_bytes_are_python_s_or_left_to_it(
    tmp_path_factory: pytest.TempPathFactory, heads: list[bytes], blob: int
) -> None:
    """Under right checksums; the core may refuse what Python takes, and never the other way."""
    shard = of_fields(tmp_path_factory.mktemp("heads") / "out")
    bodies = [(GOOD, bytes(5)), *((head, bytes(blob)) for head in heads)]
    records = [record(i, *body, seed=seed_of(shard)) for i, body in enumerate(bodies)]
    block = b"".join(records)
    ends = np.cumsum(list(map(len, records)))
    made = core().samples(block, ends, seed_of(shard), shard.schema.names, letters_of(shard))
    assert made[0]["text"] == "hi"
    for number, one in enumerate(made):
        [held] = taken([records[number]], seed_of(shard) + number)
        alone = shard.decode(number, held)
        assert repr(one) == repr(alone)
        assert list(map(type, one.values())) == list(map(type, alone.values()))


@reads
@given(st.binary(max_size=90), st.lists(st.integers(-3, 100), max_size=4), st.integers(0, 3))
def test_blocks_and_ends_of_any_kind(block: bytes, ends: list[int], kinds: int) -> None:
    letters = (b"k", b"kB", b"B", b"?\x00k")[kinds]
    names = ("a", "b", "c")[: len(letters)]
    assert core().samples(block, np.array(ends, np.int64), 1, names, letters) == []


def test_fields_that_need_python_are_left_to_it(tmp_path: Path) -> None:
    fields = (("__key__", "key"), ("image", "array"), ("meta", "json"))
    sample = {"__key__": b"k", "image": np.arange(6), "meta": {"a": [1]}}
    make(tmp_path / "out", [3], fields=fields, sample=lambda i: sample, classes=None)
    shard = opened(tmp_path / "out")
    alone = outcome(shard, with_core=False)
    assert outcome(shard, with_core=True) == alone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "core", SimpleNamespace(**vars(native.core) | {"samples": None}))
        assert outcome(shard, with_core=True) == alone  # it is not asked


# --- batches of small JPEGs -----------------------------------------------------------------------


def jpeg(i: int, height: int = 8, width: int = 12, **options: Any) -> bytes:
    return encoded(scene(i, height, width), "JPEG", **{"quality": 40 + i % 60} | options)


def jpeg_data(out: Path, counts: list[int], odd: dict[int, Any] | None = None) -> Path:
    fields = (("__key__", "key"), ("image", "image"), ("label", "int"))

    def sample(i: int) -> Sample:
        return {"__key__": b"%d" % i, "image": jpeg(i), "label": i} | (odd or {}).get(i, {})

    return make(out, counts, fields=fields, sample=sample, classes=None)


def small(path: Path, **options: Any) -> ShardDataset:
    usual = {"batch_size": 8, "fields": ("image", "label"), "decode": "numpy"}
    usual |= {"spans": 4, "shuffle_buffer": 20, "unit": 4}
    return ShardDataset(path, **of_order(usual | options))


@pytest.mark.parametrize("many", [False, True])
def test_a_batch_of_jpegs_is_the_batch_of_its_items(tmp_path: Path, many: bool) -> None:
    kinds: list[dict[str, Any]] = [{}, {"mode": "L"}, {"progressive": True}, {"subsampling": 0}]
    odd = {i: {"image": jpeg(i, **kinds[i % 4])} for i in range(83)}
    data = small(jpeg_data(tmp_path / "out", [50, 0, 33], odd), fields=("label", "image"))
    count = 0
    assert policy(data, many) == ("page_cache" if many else "in_memory")
    for whole, collated in both_ways(data, many):
        same(whole, collated)
        count += 1
    assert count == 11
    assert all(torch.is_tensor(images) for _, images in data)


def test_tables_of_the_images_before_change_nothing() -> None:
    """Whoever decodes one: libjpeg where its tables are new, the core where they came before."""
    kinds: list[dict[str, Any]] = [
        *({}, {}, {"optimize": True}, {"mode": "L"}, {"mode": "L", "optimize": True}),
        *({"subsampling": 0}, {"progressive": True}, {"restart_marker_blocks": 1}),
    ]
    chance = random.Random(3)
    for _ in range(30):
        images = [jpeg(chance.randrange(9), 40, 24, **chance.choice(kinds)) for _ in range(5)]
        images = [data for data in images for _ in range(2)]
        out = np.zeros((10, 40, 24, 3), np.uint8)
        assert core().decode_many(images, out) == 10
        for data, row in zip(images, out, strict=True):
            assert np.array_equal(row, image.pixels(data))


def test_damage_is_not_taken_for_an_image_where_tables_came_before() -> None:
    """What libjpeg refuses is refused after others, too: of tables, of the scan, too many bytes."""
    chance, good, taken = random.Random(4), jpeg(1, quality=90), 0
    tables = good.index(b"\xff\xc4")
    for trial in range(900):
        data, at = bytearray(good), chance.randrange(tables, len(good) - 2)
        if trial < 20:
            data[-2:-2] = bytes(trial)
        elif chance.random() < 0.2:
            del data[at : at + chance.randrange(1, 5)]
        else:
            data[at] ^= 1 << chance.randrange(8)
        alone, after = np.zeros((1, 8, 12, 3), np.uint8), np.zeros((3, 8, 12, 3), np.uint8)
        fine = core().decode_many([data], alone)
        if core().decode_many([good, good, data], after) == 3:
            assert fine == 1 and np.array_equal(after[2], alone[0])
            taken += 1
    assert 1 < taken < 900


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 2  # mirrored: of the same size
    return jpeg(3, exif=exif)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    "odd",
    [
        {"image": turned()},
        {"image": jpeg(0, 12, 8)},  # as many pixels
        {"image": jpeg(0, mode="CMYK")},
        {"image": encoded(scene(0, 8, 12))},
        {"image": None},
        {"image": jpeg(0)[:-9]},
        {"image": b""},
        {"label": None},
    ],
)
def test_jpegs_that_do_not_fit_are_left_to_the_ordinary_way(
    tmp_path: Path, odd: dict[str, Any], many: bool
) -> None:
    jpeg_data(tmp_path / "out", [16], {9: odd})
    data = small(tmp_path / "out", unit=1, shuffle=False)
    made = list(wholes(data, many))
    assert [one is None for one in made] == [False, True]
    same(made[0], collate([(image.pixels(jpeg(i)), i) for i in range(8)]))


CROPS = [
    {"transform": RandomResizedCrop(9, flip=True)},
    {"transform": CenterCrop((6, 5), 7, interpolation="bicubic"), "decode": None},
    {"transform": RandomResizedCrop(9), "tail": "exact", "where": {"label": list(range(3, 83))}},
]


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("options", CROPS)
def test_a_batch_of_crops_is_the_batch_of_its_items(
    tmp_path: Path, options: dict[str, Any], many: bool
) -> None:
    kinds: list[Any] = [jpeg(1, 30, 20), jpeg(2, mode="L"), turned(), encoded(scene(3, 8, 12))]
    odd = {i: {"image": kinds[i // 7]} for i in range(0, 28, 7)}
    data = small(jpeg_data(tmp_path / "out", [50, 0, 33], odd), **options)
    count = 0
    for epoch in range(2):
        data.set_epoch(epoch)
        for whole, collated in both_ways(data, many):
            same(whole, collated)
            count += len(whole[1])
    assert count == 2 * (80 if "where" in options else 83)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_make_the_crops_of_the_items(tmp_path: Path, workers: int) -> None:
    data = small(jpeg_data(tmp_path / "out", [80]), transform=RandomResizedCrop(9, flip=True))
    made = []
    for loader in (
        ShardLoader(data, num_workers=workers),
        DataLoader(data, batch_size=None, num_workers=workers),
    ):
        data.set_epoch(len(made))
        made.append([(images.clone(), labels.clone()) for images, labels in loader])
    assert next(wholes(data, False)) is not None
    items = small(tmp_path / "out", transform=RandomResizedCrop(9, flip=True), map=tuple)
    for epoch, batches in enumerate(made):
        items.set_epoch(epoch)
        for batch, wanted in zip(batches, items, strict=True):
            same(batch, wanted)


@pytest.mark.parametrize("odd", [jpeg(0)[:-9], b"", None, b"no image"])
def test_crops_that_cannot_be_made_are_left_to_the_ordinary_way(tmp_path: Path, odd: Any) -> None:
    jpeg_data(tmp_path / "out", [16], {9: {"image": odd}})
    data = small(tmp_path / "out", unit=1, shuffle=False, transform=CenterCrop(8))
    assert [batch is None for batch in wholes(data, False)] == [False, True]
    with pytest.raises(ShardioError, match="record 9 of the dataset"):
        list(data)


def test_other_crops_are_read_the_ordinary_way(tmp_path: Path) -> None:
    jpeg_data(tmp_path / "out", [8])
    crop = CenterCrop(8)
    for options in (
        {"map": list},
        {"target_transform": str},
        {"transform": CenterCrop(8, interpolation="nearest")},
        {"transform": CenterCrop(8, fast=True)},
        {"decode": "cuda"},
        {"fields": ("label", "__key__", "image")},
    ):
        data = small(tmp_path / "out", **{"transform": crop, "decode": "pil"} | options)
        assert all(batch is None for batch in wholes(data, False)), options


def test_images_that_are_no_jpegs_are_soon_read_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = {i: {"image": encoded(scene(i, 8, 12)) if i else jpeg(0, 8)} for i in range(80)}
    data = small(jpeg_data(tmp_path / "out", [80], odd), shuffle=False)
    tried: list[int] = []
    real = RecordShard.blobs

    def counted(self: RecordShard, *given: Any) -> Any:
        tried.append(1)
        return real(self, *given)

    monkeypatch.setattr(RecordShard, "blobs", counted)
    for epoch in range(3):
        data.set_epoch(epoch)
        assert sum(len(labels) for _, labels in data) == 80
    assert 0 < len(tried) <= 10, len(tried)


@pytest.mark.parametrize("first", [b"no image", None, encoded(scene(0, 8, 12)), jpeg(0, 700, 700)])
def test_one_look_is_enough_where_there_are_no_small_jpegs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: Any
) -> None:
    odd = {i: {"image": first} for i in range(3)}
    data = small(jpeg_data(tmp_path / "out", [3], odd))
    reader = reader_of(data, batched_reads=False)
    [rows] = reader
    assert reader.whole(rows, empty) is None
    monkeypatch.setattr(RecordShard, "read", None)
    assert reader.whole(rows, empty) is None


@pytest.mark.parametrize("many", [False, True])
def test_damage_in_a_batch_of_jpegs_is_the_ordinary_error(tmp_path: Path, many: bool) -> None:
    jpeg_data(tmp_path / "out", [40])
    [path] = shards(tmp_path / "out")
    shard = small(tmp_path / "out").reader.shard(0)
    start, size = shard.offset(5), int(shard.sizes[5])
    for at in sorted({0, 8, 12, size - 1, *random.Random(1).sample(range(size), 12)}):
        flip(path, start + at)
        data = small(tmp_path / "out")
        assert policy(data, many) == ("page_cache" if many else "in_memory")
        made = list(wholes(data, many))
        # Without the first record's size no batch is made at once.
        assert made.count(None) == 1 or (made.count(None) == 5 and data._raw.height == 0)  # type: ignore[union-attr]
        with pytest.raises(DamageError, match=rf"record 5 at byte {start} "):
            list(data)
        flip(path, start + at)
    assert len(list(small(tmp_path / "out"))) == 5


def test_without_the_core_jpegs_are_read_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = small(jpeg_data(tmp_path / "out", [40]))
    with_core = [labels.tolist() for _, labels in data]
    monkeypatch.setattr(native, "core", None)
    assert list(wholes(data, batched_reads=False)) == [None] * 5
    again = small(tmp_path / "out")
    assert [labels.tolist() for _, labels in again] == with_core


def test_explain_says_where_records_of_batches_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = small(jpeg_data(tmp_path / "out", [83]))
    by_item = small(tmp_path / "out", transform=np.copy)
    at_once = "page_cache" if native.records() else "in_memory"
    assert (shardio.explain(data).policy, shardio.explain(by_item).policy) == (at_once, "in_memory")
    monkeypatch.setattr(native, "core", None)
    assert shardio.explain(data).policy == "in_memory"


def test_photographs_cost_nothing_more(tmp_path: Path) -> None:
    big = {i: {"image": jpeg(i) + bytes(20_000)} for i in range(8)}
    assert next(wholes(small(jpeg_data(tmp_path / "big", [8], big)))) is None
    assert next(wholes(small(jpeg_data(tmp_path / "small", [8])))) is not None


def test_records_of_a_network_are_gathered_too(
    tmp_path: Path, on_network: Callable[[Path], Path]
) -> None:
    raw_data(tmp_path / "out", [40])
    data = small(on_network(tmp_path / "out"))
    assert policy(data, batched_reads=False) == "network"
    for images, labels in wholes(data, batched_reads=False):
        for one, label in zip(images, labels, strict=True):
            scenes = [scene(i) for i in range(40) if raw_sample(i)["label"] == label]
            assert any(np.array_equal(one.permute(1, 2, 0), scene) for scene in scenes)


def test_info_says_whether_native_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--env"]) == 0
    built = r"built with libjpeg-turbo \d+\.\d+[.\d]*"
    built += "$" if native.records() else ", but Python reads the records: .*libxxhash"
    assert re.search(rf"^core +{built}", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setattr(native, "core", None)
    monkeypatch.setattr(native, "missing", "no such module")
    assert main(["info", "--env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["core"] == "not built: no such module"
