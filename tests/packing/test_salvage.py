"""Salvage: whole records are found by their frames and checksums, in bounded time."""

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.small_datasets import ID, make
from support.trees import images, plant

import shardio as api
from shardio import pack
from shardio.errors import StorageError
from shardio.formats import manifest
from shardio.formats.base import ShardInfo
from shardio.formats.record import RecordEncoder
from shardio.formats.sample import Schema
from shardio.packing import salvage
from shardio.packing.repair import repair
from shardio.packing.salvage import Damaged, find
from shardio.storage.local import LocalFile, open_file
from shardio.storage.location import locate

BLOCK = 4096
WINDOW = 4 << 20  # bytes that are looked through at once


class FailingDisk(LocalFile):
    """A file of which some blocks cannot be read."""

    bad = frozenset([1, 4, 5])

    def read(self, start: int, length: int) -> bytes:
        blocks = range(start // BLOCK, (start + length - 1) // BLOCK + 1) if length else ()
        if self.bad.intersection(blocks):
            raise StorageError(f"{self.name}: cannot read: Input/output error")
        return super().read(start, length)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[LocalFile]:
    with contextlib.closing(open_file(str(path), path.name)) as file:
        yield file


def found_in(
    file: LocalFile, records: int, schema: Schema, number: int = 0, id_: bytes = ID
) -> list[int]:
    info = ShardInfo("x", number, records, file.size, bytes(32), 0)
    damaged = Damaged(file, "record", info, id_, schema)
    return sorted(find({"x": damaged}, info, id_, schema, set()))


def every_damage(folder: Path, format: str, chosen: Callable[[int], Sequence[int]]) -> int:
    """Flip a bit at, and cut at, chosen bytes of a shard; return how many damages were tried."""
    plant(folder / "src", images(1, 6, 150))
    pack(folder / "src", folder / "out", format=format, jobs=1)
    reader = api.open(folder / "out", decode=None).reader
    one, shard = reader.manifest, reader.shard(0)
    info, path = one.shard(0), folder / "damaged"
    before = (folder / "out" / info.name).read_bytes()
    bounds = [(shard.offset(i), shard.offset(i) + int(shard.sizes[i])) for i in range(6)]
    tried = 0
    for at in chosen(len(before)):
        flipped = before[:at] + bytes([before[at] ^ 1 << at % 8]) + before[at + 1 :]
        for data in (flipped, before[:at]):
            path.write_bytes(data)
            with opened(path) as file:
                damaged = Damaged(file, format, info, one.dataset_id, one.schema)
                found = find({"x": damaged}, info, one.dataset_id, one.schema, set())
            whole = {i for i, (a, b) in enumerate(bounds) if data[a:b] == before[a:b]}
            assert found.keys() == whole, at
            pieces = [data[one.start : one.start + one.size] for _, one in sorted(found.items())]
            assert pieces == [before[slice(*bounds[i])] for i in sorted(whole)]
            tried += 1
    return tried


@pytest.mark.parametrize("format", ["record", "lmdb"])
def test_what_is_whole_is_found_whatever_bit_is_flipped_and_wherever_it_is_cut(
    format: str, tmp_path: Path
) -> None:
    draw = random.Random(format)
    assert every_damage(tmp_path, format, lambda size: draw.sample(range(size), 400)) == 800


@pytest.mark.slow
@pytest.mark.parametrize("format", ["record", "lmdb"])
def test_what_is_whole_is_found_at_every_byte(format: str, tmp_path: Path) -> None:
    assert every_damage(tmp_path, format, range) > 2_000


def test_blocks_that_cannot_be_read_are_zeros_and_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = bytes(range(1, 256)) * 200
    path.write_bytes(data)
    schema = Schema([("__key__", "key")])
    with contextlib.closing(
        FailingDisk(os.open(path, os.O_RDONLY), len(data), 1 << 17, "failing")
    ) as file:
        one = Damaged(file, "record", ShardInfo("x", 0, 1, 0, bytes(32), 0), ID, schema)
        for start, stop in ((0, len(data)), (10, 5000), (4096, 8192), (8000, 9000), (5000, 5001)):
            read = one.read(start, stop - start)
            assert len(read) == stop - start
            for at in range(start, stop):
                bad = at // BLOCK in (1, 4, 5)
                assert read[at - start] == (0 if bad else data[at])


def test_what_lies_in_unreadable_blocks_is_lost_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = make(tmp_path / "out", [400, 400])
    shard = api.open(out, decode=None).reader.shard(1)
    keys = api.open(out, decode=None).keys()
    bounds = [(shard.offset(i), shard.offset(i) + int(shard.sizes[i])) for i in range(400)]
    bad = {2, 3, 6}
    lost = [
        400 + at
        for at, (start, stop) in enumerate(bounds)
        if bad & {*range(start // BLOCK, (stop - 1) // BLOCK + 1)}
    ]
    read, name = LocalFile.read, manifest.load(locate(out)).shard(1).name

    def fails(self: LocalFile, start: int, length: int) -> bytes:
        blocks = {*range(start // BLOCK, (start + length - 1) // BLOCK + 1)}
        if self.name == str(out / name) and bad & blocks:
            raise StorageError(f"{self.name}: cannot read: Input/output error")
        return read(self, start, length)

    monkeypatch.setattr(LocalFile, "read", fails)
    done = repair(out, tmp_path / "new", jobs=1)
    monkeypatch.undo()
    assert [400 + (one.record or 0) for one in done.lost] == lost and lost
    left = [key for at, key in enumerate(keys) if at not in lost]
    assert api.open(tmp_path / "new", decode=None).keys() == left


@pytest.mark.parametrize("fields", [1, 14, 15, 16, 40])
def test_heads_of_any_number_of_fields_are_known(fields: int, tmp_path: Path) -> None:
    schema = Schema([("__key__", "key"), *((f"f{i}", "int") for i in range(fields))])
    encoder = RecordEncoder(schema, ID, 3)
    data = encoder.header()
    for record in range(20):
        values = {f"f{i}": record * i for i in range(fields)}
        # Keys of up to 255 bytes are written in another way than longer ones.
        data += b"".join(encoder.record({"__key__": b"%d" % record * (1 + 20 * record), **values}))
    path = tmp_path / "cut"
    path.write_bytes(data[: len(data) - 1])
    with opened(path) as file:
        assert found_in(file, 20, schema, 3) == [*range(19)]
        assert found_in(file, 20, schema, 4) == []
        assert found_in(file, 20, schema, 3, bytes(16)) == []
    path.write_bytes(bytes(50) + data[50:])  # without a header
    with opened(path) as file:
        assert found_in(file, 20, schema, 3) == [*range(20)]


@pytest.mark.parametrize("before", [1, 8, 15, 16, 17, 18, 31, 33])
def test_a_frame_that_two_windows_share_is_found(before: int, tmp_path: Path) -> None:
    schema = Schema([("__key__", "key"), ("image", "image")])
    encoder = RecordEncoder(schema, ID, 0)
    data = encoder.header()
    empty = len(data) + 16 + len(b"\x92\xc4\x01a\xce\0\0\0\0")
    data += b"".join(encoder.record({"__key__": b"a", "image": b"x" * (WINDOW - empty - before)}))
    assert len(data) == WINDOW - before
    data += b"".join(encoder.record({"__key__": b"b", "image": b"y" * 100}))
    path = tmp_path / "file"
    path.write_bytes(data)
    with opened(path) as file:
        assert found_in(file, 2, schema) == [0, 1]


def test_records_that_lie_in_images_of_others_are_not_taken_for_these(tmp_path: Path) -> None:
    """A shard of shards: what is in a blob has frames and heads, too, but other checksums."""
    inner = make(tmp_path / "inner", [30])
    shard = next(inner.glob("0*")).read_bytes()
    schema = Schema([("__key__", "key"), ("image", "image"), ("label", "int")])
    encoder = RecordEncoder(schema, bytes(16), 0)
    data = encoder.header()
    for record in range(8):
        sample = {"__key__": b"%d" % record, "image": shard, "label": 0}
        data += b"".join(encoder.record(sample))
    path = tmp_path / "file"
    size = len(shard) + 16 + 12
    for hole in range(0, len(data), size // 3):
        path.write_bytes(data[:hole] + bytes(300) + data[hole + 300 :])
        with opened(path) as file:
            found = found_in(file, 8, schema, 0, bytes(16))
        assert len(found) >= 6 and set(found) <= {*range(8)}


def test_behind_many_damaged_records_the_whole_ones_are_found(tmp_path: Path) -> None:
    out = make(tmp_path / "out", [3_000])
    path = next(out.glob("0*"))
    shard = api.open(out, decode=None).reader.shard(0)
    data = bytearray(path.read_bytes()[:-100])
    for record in range(10, 2_900):
        data[shard.offset(record) + int(shard.sizes[record]) - 1] ^= 1  # in the image
    path.write_bytes(data)
    with opened(path) as file:
        found = found_in(file, 3_000, manifest.load(locate(out)).schema)
    assert found == [*range(10), *range(2_900, 3_000)]


def test_a_file_of_others_costs_no_more_than_some_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record of it could be each one that is looked for; it does not say what it is."""
    out = make(tmp_path / "out", [3_000])
    path = next(out.glob("0*"))
    path.write_bytes(bytes(200) + path.read_bytes()[200:-100])
    hashed, real = [0, 0], salvage.checksum

    def counted(data: Any, seed: int = 0) -> int:
        hashed[0] += len(data)
        hashed[1] += 1
        return real(data, seed)

    monkeypatch.setattr(salvage, "checksum", counted)
    schema = manifest.load(locate(out)).schema
    with opened(path) as file:
        assert found_in(file, 3_000, schema, 5) == []
        assert hashed[0] < 100 * file.size and hashed[1] < 400 * 3_000
