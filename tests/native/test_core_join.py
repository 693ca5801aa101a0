"""The core's `join` and `split`: files and values of many records, in order, and in bounds."""

import os
import random
import struct
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.core_records import SEED, core, reads, record, taken

from shardio import native

pytestmark = pytest.mark.skipif(native.core is None, reason=f"no core: {native.missing}")

KINDS = b"kiBfb"  # a key, an int, the file, a float, a bool


def head(number: int, length: int, **other: Any) -> bytes:
    values = {"key": b"k%d" % number, "n": number - 2, "size": length, "x": number / 7, "b": False}
    return bytes(msgpack.packb(list((values | other).values())))


def joinable(number: int, length: int = 9, first: int = 0, **other: Any) -> bytes:
    blob = bytes([number + 1]) * length
    return record(number - first, head(number, length, **other), blob)


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
