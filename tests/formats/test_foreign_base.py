"""What all formats of others share: a file that is hashed as it is read, records in any order.

Forged indexes, and damage to each format, are in test_every_format.py.
"""

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lmdb_writer import write

from shardio import ShardDataset
from shardio.dataset import sequence as sequences
from shardio.formats.foreign.base import HashingFile
from shardio.names import KEY
from shardio.packing.index import index
from shardio.storage import local

JPEG = b"\xff\xd8\xff\xe0"


def disordered(folder: Path) -> dict[bytes, bytes]:
    """A database of small and large values, whose places jump and descend."""
    random = np.random.default_rng(0)
    entries = {}
    for number in random.permutation(400).tolist():
        size = 9_000 if number % 50 == 0 else 100 + number * 37 % 1_500
        entries[b"%05d" % number] = JPEG + random.bytes(size)
    write(folder / "data.mdb", entries, batch=7)
    return entries


def test_values_in_no_order_are_read_in_blocks_and_announced_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = disordered(tmp_path)
    index(tmp_path, format="lmdb-foreign", jobs=1)
    dataset = sequences.stored(tmp_path)
    reads: list[tuple[int, int]] = []
    announced: list[tuple[int, int]] = []
    read = local.LocalFile.read

    def watched(self: Any, start: int, length: int) -> bytes:
        if self.name.endswith("data.mdb"):
            reads.append((start, start + length))
        return read(self, start, length)

    def will_need(self: Any, start: int, length: int, **_: bool) -> None:
        announced.append((start, start + length))

    monkeypatch.setattr(local.LocalFile, "read", watched)
    monkeypatch.setattr(local.LocalFile, "will_need", will_need)
    shard = ShardDataset(tmp_path, decode=None).reader.shard(0)
    places = [(shard.offset(i), shard.offset(i) + int(shard.sizes[i])) for i in range(400)]
    assert any(b < a for a, b in pairwise(places))  # else it tests nothing
    reads.clear()
    found = {sample[KEY]: sample["image"] for sample in dataset}
    assert found == entries
    size = (tmp_path / "data.mdb").stat().st_size
    assert 0 < len(reads) < 10 and sum(b - a for a, b in reads) < 2 * size
    assert shard.hold(13, 371) == [shard.hold(i, i + 1)[0] for i in range(13, 371)]
    for start, stop in ((0, 400), (5, 6), (17, 60), (100, 333), (7, 7)):
        announced.clear()
        shard.will_need(start, stop)
        for a, b in places[start:stop]:
            assert any(begin <= a and b <= end for begin, end in announced)
        low = min((a for a, _ in places[start:stop]), default=0)
        high = max((b for _, b in places[start:stop]), default=0)
        assert sum(end - begin for begin, end in announced) <= high - low


@settings(max_examples=50, deadline=None)
@given(
    reads=st.lists(
        st.tuples(st.integers(0, 400_000), st.sampled_from((0, 1, 16, 900, 20_000, 150_000))),
        max_size=30,
    ),
    step=st.sampled_from((0, 16, 950, 4_000)),
)
def test_a_file_is_hashed_whole_however_it_is_read(reads: list[tuple[int, int]], step: int) -> None:
    data = np.random.default_rng(1).bytes(400_000)

    class File:
        name, size, taken = "here", len(data), 0

        def read(self, start: int, length: int) -> bytes:
            assert 0 <= start <= start + length <= len(data)
            self.taken += length
            return data[start : start + length]

    file = File()
    hashing = HashingFile(file)  # type: ignore[arg-type]
    for start, length in reads:
        length = min(length, len(data) - start)
        assert hashing.read(start, length) == data[start : start + length]
    assert hashing.sha256() == hashlib.sha256(data).digest()
    if step:  # from front to back: each byte once, or nearly so
        file.taken = 0
        hashing = HashingFile(file)  # type: ignore[arg-type]
        for start in range(0, len(data) - step, step):
            assert hashing.read(start, step) == data[start : start + step]
        assert hashing.sha256() == hashing.sha256() == hashlib.sha256(data).digest()
        assert file.taken < 1.1 * len(data)
