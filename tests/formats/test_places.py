"""Where records lie, and what an open shard keeps of its index: right, and in little memory."""

import contextlib
import random
import struct
import tracemalloc
import weakref
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import xxhash
from support.core_records import core, reads

from shardio.errors import DamageError
from shardio.formats import record as record_module
from shardio.formats.places import LINE, PackedSizes, Places
from shardio.formats.record import RecordEncoder, RecordShard
from shardio.formats.sample import Schema
from shardio.storage import local
from shardio.storage.base import File

KINDS_OF_SIZES = {
    "alike": lambda n, rng: np.full(n, 3_000),
    "small": lambda n, rng: rng.integers(16, 1_800, n),
    "of all sizes": lambda n, rng: (10 ** rng.uniform(1.3, 6, n)).astype(np.int64),
    "one of gigabytes": lambda n, rng: np.where(np.arange(n) == n // 2, 1 << 40, 900),
    "none at first": lambda n, rng: np.where(np.arange(n) < n // 2, 0, 900),
}


@pytest.mark.parametrize("count", [0, 1, LINE - 1, LINE, LINE + 1, 5_000])
@pytest.mark.parametrize("kind", KINDS_OF_SIZES)
@pytest.mark.parametrize("gaps", [False, True])
def test_places_are_those_that_were_given(count: int, kind: str, gaps: bool) -> None:
    rng = np.random.default_rng(1)
    sizes = KINDS_OF_SIZES[kind](count + 1, rng)
    between = rng.integers(0, 4_096, count + 1) * gaps
    begins = 100 + np.cumsum(sizes + between) - sizes
    ends = begins + sizes
    given = np.stack((begins, ends), 1).reshape(-1) if gaps else begins
    places = Places(given.astype(np.int64), gaps=gaps)
    ends = ends if gaps else np.append(begins[1:], 0)
    found = PackedSizes(places)
    expected = (ends - begins)[:count]
    assert found[:].tolist() == expected.tolist()
    assert places.start(count) == begins[count]
    for start, stop in [(0, count), (0, 0), (count // 3, count // 2), (count, count)]:
        one, other = places.between(start, stop)
        assert one.tolist() == begins[start:stop].tolist()
        assert other.tolist() == ends[start:stop].tolist()
    some = rng.integers(0, count, 40) if count else np.empty(0, np.int64)
    assert found[some].tolist() == expected[some].tolist()
    for record in some.tolist():
        assert places.start(record) == begins[record]
        assert places.bounds(record) == (begins[record], ends[record])
        assert found[record] == found[record - count] == expected[record]
    for record in (count, -1 - count, 1 << 40):
        with pytest.raises(IndexError):
            found[record]
    with pytest.raises(IndexError):
        places.bounds(-1)


def test_places_take_two_bytes_a_record() -> None:
    rng = np.random.default_rng(2)
    for kind, most in (("alike", 2.2), ("small", 2.2), ("of all sizes", 3.2)):
        bounds = np.cumsum(KINDS_OF_SIZES[kind](50_000, rng))
        assert len(Places(bounds).data) < most * 50_000, kind


@reads
@pytest.mark.parametrize("kind", KINDS_OF_SIZES)
@pytest.mark.parametrize("gaps", [False, True])
def test_the_core_reads_records_where_python_says(tmp_path: Path, kind: str, gaps: bool) -> None:
    """Of a file with holes: each record is a frame and nothing more, at its place."""
    rng = np.random.default_rng(3)
    sizes = np.maximum(KINDS_OF_SIZES[kind](200, rng), 16)
    begins = 100 + np.cumsum(sizes + 7 * gaps) - sizes
    short = sizes == sizes[3]
    path = tmp_path / "x"
    with open(path, "wb") as file:
        for number in np.flatnonzero(short).tolist():
            sealed = struct.pack("<II", int(sizes[number]) - 16, 0) + bytes(int(sizes[number]) - 16)
            file.seek(int(begins[number]))
            file.write(struct.pack("<Q", xxhash.xxh3_64_intdigest(sealed, number)) + sealed)
    given = np.stack((begins, begins + sizes), 1).reshape(-1) if gaps else begins
    places = Places(given.astype(np.int64), gaps=gaps)
    with open(path, "rb") as file:
        for number in np.flatnonzero(short[:-1]).tolist():
            wanted = np.array([number], np.int64)
            blobs = core().blobs(file.fileno(), places.data, 0, wanted)
            assert blobs == [bytes(int(sizes[number]) - 16)], number
        for number in (-1, places.records, 1 << 40, -(1 << 62)):
            assert core().blobs(file.fileno(), places.data, 0, np.array([number], np.int64)) == []


@reads
def test_bytes_that_are_no_places_are_refused_by_the_core() -> None:
    good, none = Places(np.arange(0, 90_000, 900)).data, np.empty(0, np.int64)
    assert core().blobs(-1, good, 0, none) == []
    head = np.frombuffer(good[:32], np.int64)
    wrong = [b"", good[:31], good[:-1], good[: len(good) // 2]]
    for at, values in enumerate([(0, 1 << 20, -1, 1 << 62), (), (1, 2, 8, -1), (0, 3, -1)]):
        for value in values:
            forged = head.copy()
            forged[at] = value
            wrong.append(forged.tobytes() + good[32:])
    for data in wrong:
        with pytest.raises(ValueError, match="do not say where"):
            core().blobs(-1, data, 0, none)
    chance = random.Random(4)
    for _ in range(300):  # whatever they say, nothing else is read
        data = bytearray(good)
        for _ in range(4):
            data[chance.randrange(len(data))] = chance.randrange(256)
        with contextlib.suppress(ValueError):
            core().blobs(-1, bytes(data), 0, np.arange(-1, 200))


# --- what an open shard keeps ---------------------------------------------------------------------

SCHEMA = Schema([("__key__", "key"), ("image", "image"), ("label", "int")])
ID = b"i" * 16


def forged(path: Path, count: int, number: int = 0) -> None:
    """Write a shard of `count` records of 0.9 KB, with a hole where the records would be."""
    encoder = RecordEncoder(SCHEMA, ID, number)
    at, zeros = len(header := encoder.header()), bytes(1_300)
    for size in np.random.default_rng(number).integers(500, 1_300, count).tolist():
        encoder.append_stored(zeros[:size])
        at += size
    encoder.index_as([7] * count, {"label": [5] * count})
    with open(path, "wb") as file:
        file.write(header)
        file.seek(at)
        file.write(encoder.finish())


class Watched:
    """A file that notes what is read of it."""

    def __init__(self, file: File) -> None:
        self.file, self.reads = file, list[tuple[int, int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def read(self, start: int, length: int) -> bytes:
        self.reads.append((start, length))
        return self.file.read(start, length)


def opened(path: Path) -> RecordShard:
    return RecordShard(local.open_file(str(path), str(path)))


def test_open_shards_of_small_records_take_little_memory(tmp_path: Path) -> None:
    """Of 64 spans in shards of 290,000 records: less than 64 MB in all; here of fewer."""
    each, shards = 290_000, 3
    for number in range(shards):
        forged(tmp_path / str(number), each, number)
    opened(tmp_path / "0").close()
    tracemalloc.start()
    try:
        held = [opened(tmp_path / str(number)) for number in range(shards)]
        for shard in held:
            assert shard.sizes[0:140].sum() > 140 * 500  # as a block of records is read
        taken, _ = tracemalloc.get_traced_memory()
        assert (taken - record_module.LARGE_INDEXES) / shards < 64e6 / 64 - 290_000
        assert [int(shard.columns["label"][7]) for shard in held] == [5] * shards
        taken, _ = tracemalloc.get_traced_memory()
        assert (taken - record_module.LARGE_INDEXES) / shards < 64e6 / 64
    finally:
        tracemalloc.stop()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make indexes of 400 bytes large ones, of which one is kept."""
    monkeypatch.setattr(record_module, "SMALL_INDEX", 400)
    monkeypatch.setattr(record_module, "LARGE_INDEXES", 1)


def whole(path: Path, count: int, fill: int = 1, number: int = 0) -> list[Any]:
    """Write a shard of records; return its samples."""
    encoder = RecordEncoder(SCHEMA, ID, number)
    samples = [
        {"__key__": b"%d-%d" % (fill, i), "image": bytes([fill]) * (i % 90), "label": i + fill}
        for i in range(count)
    ]
    data = encoder.header()
    data += b"".join(b"".join(encoder.record(sample)) for sample in samples)
    path.write_bytes(data + encoder.finish())
    return samples


def test_a_large_index_is_read_again_when_it_is_asked_for(tmp_path: Path, small: None) -> None:
    samples = [whole(tmp_path / str(i), 50, i + 1, i) for i in range(3)]
    files = [Watched(local.open_file(str(tmp_path / str(i)), str(i))) for i in range(3)]
    shards = [RecordShard(cast(File, file)) for file in files]
    opening = [len(file.reads) for file in files]
    index = files[0].reads[-1]
    assert shards[2].key_hashes.shape == (50,) and len(files[2].reads) == opening[2]
    assert shards[0].key_hashes.shape == (50,) and files[0].reads[opening[0] :] == [index]
    for shard, own in zip(shards, samples, strict=True):
        assert shard.key_hashes.tolist() == [
            xxhash.xxh3_64_intdigest(sample["__key__"]) & 0xFFFFFFFF for sample in own
        ]
        assert [shard.key(i) for i in range(50)] == [sample["__key__"] for sample in own]
        assert list(shard.keys(0, 50)) == [sample["__key__"] for sample in own]
        assert shard.columns["label"].tolist() == [sample["label"] for sample in own]
        assert list(shard.scan(0, 50)) == own
    read = len(files[0].reads)
    assert shards[0].columns["label"][3] == 4 and len(files[0].reads) == read  # they stay
    assert shards[0].key(3) == b"1-3" and index not in files[0].reads[read:]
    gone = weakref.ref(shards[2])
    del shard, shards[2]
    assert gone() is None  # what is kept of all shards keeps none of them


def test_an_index_that_changed_since_is_an_error(tmp_path: Path, small: None) -> None:
    """Another shard in its place, with checksums of its own, says nothing of this one."""
    samples = whole(tmp_path / "0", 50)
    whole(tmp_path / "1", 50, 2, 1)
    shard, _ = opened(tmp_path / "0"), opened(tmp_path / "1")
    path = tmp_path / "0"
    other = tmp_path / "2"
    whole(other, 50, 3)
    assert other.stat().st_size == path.stat().st_size
    with open(path, "r+b") as file:  # in place: the open file has the new bytes
        file.write(other.read_bytes())
    for ask in (lambda: shard.key_hashes, lambda: shard.columns):
        with pytest.raises(DamageError, match=r"index at byte .*checksum is"):
            ask()
    assert shard.read(3)["__key__"] == b"3-3"  # whole, and of this place
    with open(path, "r+b") as file:
        file.seek(shard.offset(7) + 20)
        file.write(b"\xff\xff")
    for ask_of in (shard.key, shard.read):
        with pytest.raises(DamageError):
            ask_of(7)
    assert len(samples) == 50


def test_the_key_of_a_damaged_record_is_found_without_its_index(
    tmp_path: Path, small: None
) -> None:
    samples = whole(tmp_path / "0", 50)
    whole(tmp_path / "1", 50, 2, 1)
    data = bytearray((tmp_path / "0").read_bytes())
    shard = opened(tmp_path / "0")
    data[shard.offset(49) - 1] ^= 1  # the last byte of an image
    (tmp_path / "0").write_bytes(data)
    shard, _ = opened(tmp_path / "0"), opened(tmp_path / "1")
    with pytest.raises(DamageError, match="key 1-48"):
        shard.read(48)
    assert shard.key(48) == samples[48]["__key__"] == b"1-48"
