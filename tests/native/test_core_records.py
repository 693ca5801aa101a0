"""The core's `gather` and `blobs`: the bytes of records that are right, in bounds.

What the core is given may be anything: it says how much of it was right.
"""

import os
import random
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from support.core_records import BEGIN, ROW, SEED, core, pixels, reads, record

from shardio import native

pytestmark = pytest.mark.skipif(native.core is None, reason=f"no core: {native.missing}")


def one_row() -> tuple[Any, Any]:
    return np.zeros((1, ROW), np.uint8), np.array([0], np.int64)


def raw(number: int) -> bytes:
    return record(number, b"h" * (1 + number % 5), BEGIN + pixels(number))


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
