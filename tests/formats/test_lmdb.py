"""LMDB shards: read by liblmdb, equal to record shards; hazards, damaged pages, golden files.

liblmdb is the oracle here; shardio itself never runs it.
"""

import json
import mmap
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import xxhash
from support import LIMIT_S
from support.conformance import FIELDS, SAMPLES, FormatConformance, by_hold, same, same_all
from support.forging import in_child
from support.naive_reader import naive_reader, untagged
from support.packing import grouped
from support.small_datasets import flip
from support.trees import content, environment, images, plant, shardio

from shardio import ShardDataset, Storage, Writer, pack
from shardio.dataset import sequence as sequences
from shardio.errors import (
    DamageError,
    ExistsError,
    OptionError,
    SampleError,
    ShardioError,
    SourceChangedError,
    SourceError,
    VersionError,
)
from shardio.formats import begins_packed, manifest
from shardio.formats.base import ShardInfo
from shardio.formats.lmdb import PAGE, LmdbEncoder, LmdbShard, lay_out
from shardio.formats.record import RecordEncoder
from shardio.formats.sample import Schema
from shardio.names import KEY
from shardio.packing.commit import commit
from shardio.packing.index import index
from shardio.packing.verify import verify
from shardio.storage.location import locate

verify_lmdb = pytest.importorskip("lmdb.verify", reason="py-lmdb < 3.0 has no verifier").verify
ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"
ID = bytes(range(16))
PLAIN = ((KEY, "key"), ("image", "image"))


def plain(sizes: Iterable[int]) -> list[dict[str, Any]]:
    return [{KEY: b"%06d" % i, "image": bytes([i % 251]) * size} for i, size in enumerate(sizes)]


def write(
    path: Path, samples: Sequence[Any], fields: Any = PLAIN, number: int = 3
) -> tuple[ShardInfo, list[bytes]]:
    """A shard in a file; also the bytes that a record shard has for each record."""
    encoder = LmdbEncoder(Schema(fields), ID, number)
    beside = RecordEncoder(Schema(fields), ID, number)
    pieces = [encoder.header()]
    for values in samples:
        pieces += encoder.record(values)
    data = b"".join((*pieces, encoder.finish()))
    path.write_bytes(encoder.start + data[len(encoder.start) :])
    info = ShardInfo(path.name, number, len(samples), len(data), bytes(32), encoder.index_checksum)
    return info, [b"".join(beside.record(values)) for values in samples]


def open_file(path: Path, info: ShardInfo | None = None, **options: Any) -> LmdbShard:
    return LmdbShard(locate(path.parent).open(path.name), info, ID, **options)


def open_lmdb(path: Path) -> lmdb.Environment:
    return lmdb.open(str(path), subdir=False, readonly=True, lock=False)


class TestLmdbConformance(FormatConformance):
    def build(self, folder: Path, fields: Any, samples: Any) -> Path:
        path = folder / "x.lmdb"
        self.info, _ = write(path, samples, fields)
        return path

    def open(self, path: Path) -> LmdbShard:
        return open_file(path, self.info)


# --- LMDB says so ---------------------------------------------------------------------------------

LEAF = 2026 - 16 - 10  # an image's bytes, the record of which is just short enough for a leaf
noise = np.random.default_rng(0)
SHAPES: dict[str, list[int]] = {
    "empty": [],
    "one": [0],
    "around the longest value in a leaf": [LEAF + i for i in range(-4, 5)] * 3,
    "around a page": [PAGE - 16 - 26 + i for i in range(-4, 5)] + [2 * PAGE - 42, 2 * PAGE - 41],
    "large": [300_000, 1, 2_000_000],
    "odd": [901, 902, 903] * 40,
    "mixed": noise.integers(0, 7000, 400).tolist(),
    "small, then large": [10] * 500 + [5000] * 500 + [10],
    "a large one for each small": [10, 5000] * 300,
    **{f"{n} leaves": [1970] * (2 * n - 1) for n in (290, 291, 292, 293)},
    "three levels": [1970] * (2 * 291 * 3 + 5),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_lmdb_finds_the_records_of_a_record_shard_by_number(tmp_path: Path, shape: str) -> None:
    path, samples = tmp_path / "x.lmdb", plain(SHAPES[shape])
    info, records = write(path, samples)
    assert verify_lmdb(str(path), subdir=False) == []
    with open_lmdb(path) as env, env.begin() as txn:
        assert txn.stat()["entries"] == len(records) + 1
        found = list(txn.cursor())
        assert [struct.pack(">I", i) for i in range(len(records))] == [k for k, _ in found[:-1]]
        assert [value for _, value in found[:-1]] == records
        assert found[-1][0] == b"\xff\xff\xff\xff"
        for i, record in enumerate(records):
            assert txn.get(struct.pack(">I", i)) == record
        overflow_pages = txn.stat()["overflow_pages"]
    theirs = str(tmp_path / "theirs.mdb")
    with (
        lmdb.open(theirs, subdir=False, lock=False, sync=False, map_size=64 << 20) as env,
        env.begin(write=True) as txn,
    ):
        for key, value in found:
            txn.put(key, value, append=True)
        assert txn.stat()["overflow_pages"] == overflow_pages
    shard = open_file(path, info)
    shard.check()
    assert same_all(shard.scan(0, shard.records), samples)
    assert same_all((shard.read(i) for i in range(shard.records)), samples)
    starts = [shard.offset(i) for i in range(shard.records)]
    assert all(
        a + int(size) <= b for (a, b), size in zip(pairwise(starts), shard.sizes, strict=False)
    )
    shard.close()


def test_the_values_are_a_record_shard(tmp_path: Path) -> None:
    """The last value's header, records, its index: the reader of docs/format.md reads them."""
    write(tmp_path / "x.lmdb", SAMPLES, FIELDS)
    with open_lmdb(tmp_path / "x.lmdb") as env, env.begin() as txn:
        *records, last = (value for _, value in txn.cursor())
    begin, length = struct.unpack_from("<QQ", last, len(last) - 60)
    assert begin + length + 60 == len(last)
    shard = last[:begin] + b"".join(records) + last[begin:-60]
    trailer = struct.pack("<QQ", len(shard) - length, length) + last[-44:-16]
    sealed = shard[-length:] + trailer
    whole = shard + trailer + struct.pack("<Q", xxhash.xxh3_64_intdigest(sealed)) + last[-8:]
    assert same_all(naive_reader()["samples"](whole), SAMPLES)


def test_lmdb_can_write_to_a_copy(tmp_path: Path) -> None:
    """The environment is a whole one: pages split, values are deleted, and it stays sound."""
    path = tmp_path / "x.lmdb"
    _, records = write(path, plain(SHAPES["mixed"]))
    with (
        lmdb.open(str(path), subdir=False, map_size=64 << 20) as env,
        env.begin(write=True) as txn,
    ):
        for i in range(0, len(records), 3):
            assert txn.delete(struct.pack(">I", i))
            txn.put(b"new %06d" % i, records[i])
    assert verify_lmdb(str(path), subdir=False) == []
    with open_lmdb(path) as env, env.begin() as txn:
        for i, record in enumerate(records):
            assert txn.get(struct.pack(">I", i) if i % 3 else b"new %06d" % i) == record


def test_a_record_that_no_lmdb_value_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LmdbEncoder.max_body + 16 == 0xFFFFFFFF
    monkeypatch.setattr(LmdbEncoder, "max_body", 1000)
    encoder = LmdbEncoder(Schema(PLAIN), ID, 0)
    encoder.header()
    encoder.record({KEY: b"k", "image": bytes(900)})
    with pytest.raises(SampleError, match="at most 1,000"):
        encoder.record({KEY: b"k", "image": bytes(1000)})
    assert encoder.records == 1


# --- golden files ---------------------------------------------------------------------------------


def test_golden_files_read_as_expected() -> None:
    folder = GOLDEN / "lmdb-v0"
    expected = json.loads((folder / "expected.json").read_text())
    samples = [untagged(values) for one in expected["shards"] for values in one["samples"]]
    assert same_all(sequences.stored(folder), samples)
    for described in expected["shards"]:
        path = folder / described["name"]
        assert verify_lmdb(str(path), subdir=False) == []
        for offset, values in zip(described["offsets"], described["samples"], strict=True):
            assert untagged(values)[KEY] in path.read_bytes()[offset + 16 :]
    assert verify(folder, sha256=True, jobs=1).damages == []


def test_golden_files_are_written_again_to_the_same_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    tool = GOLDEN / "make.py"
    subprocess.run([sys.executable, str(tool), str(folder), "lmdb"], check=True, env=environment())
    assert content(folder) == content(GOLDEN / "lmdb-v0")


# --- packing --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = images(3, 12, 900)
    tree["class1/large.jpg"] = b"\xff\xd8\xff\xe0" + bytes(200_000)
    return plant(tmp_path_factory.mktemp("source") / "src", tree)


def build(source: Path, out: Path, **options: Any) -> Any:
    [done] = pack(source, out, **grouped({"format": "lmdb", "jobs": 1, "max_records": 5} | options))
    return done


def test_jobs_parts_and_repeated_runs_give_the_same_bytes(source: Path, tmp_path: Path) -> None:
    build(source, tmp_path / "one")
    build(source, tmp_path / "two", jobs=2)
    for part in (3, 1, 2):
        build(source, tmp_path / "parts", part=(part, 3))
    [done] = commit(tmp_path / "parts")
    assert (done.kept, done.records) == (8, 37)
    wanted = content(tmp_path / "one")
    assert content(tmp_path / "two") == content(tmp_path / "parts") == wanted
    assert build(source, tmp_path / "one").already
    assert content(tmp_path / "one") == wanted
    assert len([name for name in wanted if name.endswith(b".lmdb")]) == 8
    assert all(name.endswith(b".lmdb") or name == b"manifest.json" for name in wanted)


def test_the_command_line_packs_shows_verifies_and_unpacks_it(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shardio("pack", source, out, "--format", "lmdb", "--max-records", "9")
    assert "lmdb, version 0" in shardio("info", out).stdout
    shardio("verify", out, "--sha256")
    shardio("unpack", out, tmp_path / "back")
    assert content(tmp_path / "back") == content(source)


@pytest.mark.parametrize("pages", [0, 1, 2])
def test_a_packing_goes_on_and_what_a_killed_packer_was_writing_is_removed(
    source: Path, tmp_path: Path, pages: int
) -> None:
    build(source, tmp_path / "one")
    build(source, tmp_path / "out", part=(1, 2))
    torn = LmdbEncoder(Schema(PLAIN), ID, 0).header()[: pages * PAGE]
    (tmp_path / "out" / f".shardio-{'0' * 16}-00003.tmp").write_bytes(torn)
    done = build(source, tmp_path / "out")
    assert (done.kept, done.built) == (4, 4)
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_a_finished_shard_that_was_damaged_is_built_again(source: Path, tmp_path: Path) -> None:
    build(source, tmp_path / "one")
    build(source, tmp_path / "out", part=(1, 2))
    shard = min((tmp_path / "out").glob("*.lmdb"))
    flip(shard, 5000)
    assert build(source, tmp_path / "out").kept == 3
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_another_format_is_another_dataset(source: Path, tmp_path: Path) -> None:
    build(source, tmp_path / "out", part=(1, 2))
    with pytest.raises(SourceChangedError, match="format"):
        build(source, tmp_path / "out", format="record")
    build(source, tmp_path / "out")
    with pytest.raises(ExistsError, match="another dataset"):
        build(source, tmp_path / "out", format="record")
    build(source, tmp_path / "out", format="record", overwrite=True)
    assert len(sequences.open(tmp_path / "out")) == 37
    shardio("gc", tmp_path / "out", "--keep", "0s")
    assert not list((tmp_path / "out").glob("*.lmdb"))


def test_a_writer_writes_it(tmp_path: Path) -> None:
    fields = dict(FIELDS) | {"image": "bytes"}  # a writer refuses what is no image
    for name in ("one", "two"):
        out = tmp_path / name
        with Writer(out, format="lmdb", fields=fields, id="x", max_records=15) as writer:
            for values in SAMPLES:
                writer.write(values)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert same_all(sequences.stored(tmp_path / "one"), SAMPLES)
    assert manifest.load(locate(tmp_path / "one")).format == "lmdb"
    with (
        pytest.raises(RuntimeError, match="of the stream"),
        Writer(tmp_path / "bad", format="lmdb", fields=fields, max_records=2) as writer,
    ):
        for values in SAMPLES[:5]:
            writer.write(values)
        raise RuntimeError("of the stream")
    assert list((tmp_path / "bad").iterdir()) == []
    with pytest.raises(OptionError, match="packs record and lmdb shards"):
        Writer(tmp_path / "no", format="tar")


# --- hazards --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "out"
    build(source, out)
    return out


def run(program: str, *arguments: Any) -> str:
    """A program in a process of its own: a signal is a failure."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout


def test_a_child_of_a_fork_may_close_what_its_parent_reads(packed: Path) -> None:
    opened = sequences.stored(packed)
    wanted = list(opened)

    def child() -> None:
        nonlocal opened
        assert same_all(opened, wanted)
        del opened

    assert in_child(child) == 0
    assert same_all(opened, wanted)


def test_one_file_may_be_open_many_times_and_in_lmdb_too(packed: Path, tmp_path: Path) -> None:
    name = min(path.name for path in packed.glob("*.lmdb"))
    linked = tmp_path / "linked.lmdb"
    os.link(packed / name, linked)
    info = manifest.load(locate(packed)).shard(0)
    dataset_id = manifest.load(locate(packed)).dataset_id
    with open_lmdb(packed / name) as env, env.begin() as txn:
        shards = [
            LmdbShard(locate(path.parent).open(path.name), info, dataset_id)
            for path in (packed / name, packed / name, linked)
        ]
        first = shards[0].read(0)
        shards[0].close()
        assert same_all((shard.read(0) for shard in shards[1:]), [first, first])
        assert txn.get(bytes(4)) is not None
        for shard in shards:
            shard.close()


def test_values_beyond_4_gib_lie_where_their_sizes_say() -> None:
    """liblmdb takes values of 4 GiB, and py-lmdb reads those above 2 GiB since 2.3."""

    class Large(bytes):
        """As long as it says, without the memory."""

        length = 0

        def __len__(self) -> int:
            return self.length

    encoder = LmdbEncoder(Schema(PLAIN), ID, 0)
    at, found, sizes = 2 * PAGE, [], [5, (1 << 32) - 1, 3 << 30, 100, (1 << 31) + 1, 7]
    for key, size in enumerate(sizes):
        value = Large()
        value.length = size
        for piece in encoder._add(key, value if size > PAGE else bytes(size)):
            if piece is value:
                found.append((key, at))
            at += len(piece)
    placed = lay_out(np.array(sizes, np.int64))
    assert found == [(key, placed.starts[key]) for key in (1, 2, 4)]
    assert placed.upto * PAGE == at + len(encoder._end_leaf()) > 2 << 32


WRITES = """
import sys
import lmdb, shardio
from shardio.errors import ShardioError
folder, path, subdir = sys.argv[1], sys.argv[2], sys.argv[3] == "subdir"
opened = shardio.open(folder, decode=None)
right = list(opened)
errors = 0
with lmdb.open(path, subdir=subdir, map_size=64 << 20) as env:  # with locks, in this very process
    readers = env.readers()
    for step in range(12):
        with env.begin(write=True) as transaction:
            keys = [key for key, _ in transaction.cursor()]
            for key in keys[step :: 3]:
                transaction.put(key, b"another value %d" % step * 200)
                transaction.put(key + b"x", bytes(9000))
            for key in keys[step + 1 :: 5]:
                transaction.delete(key)
        for data in opened, None:
            for i, values in enumerate(right):
                try:
                    data = data or shardio.open(folder, decode=None)
                    assert data[i] == values, (step, i)
                except ShardioError as error:
                    assert path in str(error), error
                    errors += 1
    assert env.readers() == readers  # no slot of the lock is ours
assert errors
assert shardio.verify(folder, jobs=1).damages
"""


def test_what_lmdb_writes_under_a_reader_is_damage_and_no_signal(
    packed: Path, tmp_path: Path
) -> None:
    shutil.copytree(packed, tmp_path / "copy")
    shard = min((tmp_path / "copy").glob("*.lmdb"))
    run(WRITES, tmp_path / "copy", shard, "file")


# --- databases of others, as liblmdb has them open ------------------------------------------------


def theirs(folder: Path, count: int = 60, **options: Any) -> Path:
    """As Caffe's tools leave it: a folder with a lock file, which nobody needs."""
    with lmdb.open(str(folder), map_size=64 << 20, **options) as env:
        for start in range(0, count, 7):
            with env.begin(write=True) as transaction:
                for number in range(start, min(start + 7, count)):
                    value = b"\xff\xd8\xff\xe0" + bytes([number]) * (200 + 300 * (number % 20))
                    transaction.put(b"%08d" % number, value)
    assert (folder / "lock.mdb").exists()
    return folder / "data.mdb"


def test_what_lmdb_writes_into_an_indexed_database_is_damage_and_no_signal(tmp_path: Path) -> None:
    path = theirs(tmp_path / "db")
    assert index(tmp_path, jobs=1).records == 60
    run(WRITES, tmp_path, path.parent, "subdir")


def test_a_database_in_use_is_indexed_and_read(tmp_path: Path) -> None:
    """Opened in this process, locked by a reader in the midst of a transaction; by two names."""
    path = theirs(tmp_path / "db")
    (tmp_path / "again").mkdir()
    os.link(path, tmp_path / "again" / "data.mdb")
    with lmdb.open(str(path.parent), max_readers=1) as env, env.begin() as transaction:
        assert index(tmp_path, jobs=1).records == 120
        many = [sequences.stored(tmp_path) for _ in range(3)]
        first = [dict(values) for values in many[0]]
        del many[0]
        for opened in many:
            assert same_all(opened, first)
        expected = sorted(2 * list(transaction.cursor()))
        assert sorted((values[KEY], values["image"]) for values in first) == expected
    assert not [name for name in os.listdir(tmp_path / "again") if "lock" in name]


def test_databases_of_lmdb_1_0_are_refused_with_the_way_out(tmp_path: Path) -> None:
    theirs(tmp_path / "db", lib_version=1)
    with pytest.raises(SourceError, match=r"LMDB 1\.0[\s\S]*mdb_dump"):
        index(tmp_path, jobs=1)
    assert not (tmp_path / "manifest.json").exists()


# --- damage ---------------------------------------------------------------------------------------


def outcome(path: Path, info: ShardInfo, samples: Sequence[Any], **options: Any) -> bool:
    """Whether a ShardioError was raised; wrong content fails."""
    try:
        shard = open_file(path, info, **options)
    except ShardioError as error:
        assert path.name in str(error)
        return True
    found = False
    for i, right in enumerate(samples):
        readings: list[Callable[[], Any]] = [
            lambda i=i: shard.read(i),
            lambda i=i: next(shard.scan(i, i + 1)),
            lambda i=i: by_hold(shard, i),
        ]
        for read in readings:
            try:
                assert same(read(), right)
            except ShardioError:
                found = True
    if options.get("verify", True):
        try:
            shard.check()
        except ShardioError:
            found = True
    shard.close()
    return found


def small(path: Path) -> tuple[ShardInfo, list[dict[str, Any]]]:
    """A shard with every kind of page: metas, leaves with and without values, runs, a branch."""
    samples = plain([1900, 1700, 1200, 5000, 2500])
    info, _ = write(path, samples)
    return info, samples


def test_every_byte_is_vouched_for(tmp_path: Path) -> None:
    """Flip a bit anywhere: reading and `check` together find it, and nothing wrong is read."""
    path = tmp_path / "x.lmdb"
    info, samples = small(path)
    intact = path.read_bytes()
    kinds = {struct.unpack_from("<H", intact, at + 10)[0] for at in range(0, len(intact), PAGE)}
    assert kinds >= {1, 2, 4, 8}
    assert not outcome(path, info, samples)
    heads = [at for at in range(len(intact)) if at % PAGE < 20]
    changed = [at for at in range(len(intact)) if intact[at]][::7]
    padding = [at for at in range(len(intact)) if not intact[at]][::53]
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        for at in (*heads, *changed, *padding):
            mapped[at] ^= 1 << (at % 8)
            assert outcome(path, info, samples), at
            assert outcome(path, info, samples, verify=False) in (True, False)
            mapped[at] = intact[at]
    assert not outcome(path, info, samples)


def test_every_page_may_be_another_one(tmp_path: Path) -> None:
    path = tmp_path / "x.lmdb"
    info, samples = small(path)
    intact = path.read_bytes()
    pages = [intact[at : at + PAGE] for at in range(0, len(intact), PAGE)]
    for at, page in enumerate(pages):
        for other in (bytes(PAGE), b"\xff" * PAGE, *pages):
            if other != page:
                changed = [*pages[:at], other, *pages[at + 1 :]]
                path.write_bytes(b"".join(changed))
                assert outcome(path, info, samples), at
                outcome(path, info, samples, verify=False)


def test_every_cut_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.lmdb"
    info, _ = small(path)
    intact = path.read_bytes()
    sizes = {0, 1, 16, 24, 152, *range(0, len(intact), PAGE), *range(100, len(intact), 999)}
    for size in sorted(sizes):
        for data in (intact[:size], intact[:size] + bytes(len(intact) - size), intact[size:]):
            if data != intact:
                path.write_bytes(data)
                for known in (info, None):
                    with pytest.raises(ShardioError, match=r"x\.lmdb"):
                        shard = open_file(path, known)
                        list(shard.scan(0, 5))
                        shard.check()
    path.write_bytes(intact + bytes(PAGE))
    with pytest.raises(DamageError, match="its size is"):
        open_file(path, info)
    # The last leaf again, as a root with the right index: only the size betrays it.
    pages = len(intact) // PAGE
    path.write_bytes(intact + struct.pack("<Q", pages) + intact[-2 * PAGE + 8 : -PAGE])
    with pytest.raises(DamageError, match="the file has"):
        open_file(path, verify=False)


def set_last_node(intact: bytes, page: int, **to: int) -> bytes:
    """The file with other words in the last node of a page."""
    at = page * PAGE
    (lower,) = struct.unpack_from("<H", intact, at + 12)
    (spot,) = struct.unpack_from("<H", intact, at + lower - 2)
    words = {"lower": (at + 12, "<H"), "spot": (at + lower - 2, "<H")}
    words |= {"size": (at + spot, "<I"), "flag": (at + spot + 4, "<H")}
    words |= {"run": (at + spot + 12, "<Q"), "key": (at + spot + 8, "<I")}
    data = bytearray(intact)
    for name, value in to.items():
        where, kind = words[name]
        struct.pack_into(kind, data, where, value)
    return bytes(data)


def test_a_tree_that_leads_astray_is_damage_and_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.lmdb"
    info, _ = small(path)
    intact = path.read_bytes()
    root = len(intact) // PAGE - 1
    leaf = root - 1
    changes = [
        *({"lower": n} for n in (0, 1, 16, 17, 4095, 4096, 65535)),
        *({"spot": n} for n in (0, 15, 4085, 4095, 65535)),
        *({"size": n} for n in (0, 1, root, root + 1, 1 << 31, (1 << 32) - 1)),
        *({"flag": n} for n in (1, 2, 65535)),
        *({"key": n} for n in (0, 1)),
        *({"run": n} for n in (0, 1, root, 1 << 40, (1 << 64) - 1)),
    ]
    for page in (root, leaf):
        for to in changes:
            if page == root and "run" in to:
                continue  # a branch has none
            data = set_last_node(intact, page, **to)
            if data != intact:
                path.write_bytes(data)
                outcome(path, info, plain([1900, 1700, 1200, 5000, 2500]), verify=False)
                with pytest.raises(DamageError, match=r"x\.lmdb"):
                    open_file(path, None).check()


def test_a_forged_index_of_a_huge_sparse_file_takes_no_memory(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "x.lmdb"
    write(path, [])
    intact = path.read_bytes()
    run_at, size = 2, 1 << 31
    leaf = 2 + size // PAGE + 1
    page = bytearray(intact[2 * PAGE : 3 * PAGE])
    struct.pack_into("<Q", page, 0, leaf)
    struct.pack_into("<HH", page, 12, 18, 4076)
    struct.pack_into("<H", page, 16, 4076)
    struct.pack_into("<IHH4sQ", page, 4076, size, 1, 4, b"\xff" * 4, run_at)
    with path.open("wb") as file:
        file.write(intact[: 2 * PAGE])
        file.seek(run_at * PAGE + 16)
        header = RecordEncoder(Schema(PLAIN), ID, 3).header()
        file.write(header)
        length = size - len(header) - 60
        records = (length - 4) // 8
        trailer = struct.pack("<QQIIHBB16s", len(header), length, records, 3, 0, 1, 0, ID)
        file.seek(run_at * PAGE + 16 + size - 60)
        file.write(trailer + bytes(8) + b"\x89DHS\r\n\x1a\n")
        file.seek(leaf * PAGE)
        file.write(page)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamageError, match="cannot take"):
        open_file(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_without_the_check_damage_to_the_tree_is_not_seen_but_records_are(tmp_path: Path) -> None:
    path = tmp_path / "x.lmdb"
    info, samples = small(path)
    flip(path, 100)  # in a meta page
    with pytest.raises(DamageError, match="a meta page at byte 0 differs"):
        open_file(path, info)
    assert not outcome(path, info, samples, verify=False)
    shard = open_file(path, info, verify=False)
    flip(path, shard.offset(3) + 3000)
    with pytest.raises(DamageError, match=r"record 3 at byte \d+ \(key 000003\): checksum"):
        shard.read(3)
    shard.close()


def test_opening_compares_every_page_that_holds_no_record(tmp_path: Path) -> None:
    path = tmp_path / "x.lmdb"
    samples = plain([5000] * 300)  # runs, and leaves that only name them
    info, _ = write(path, samples)
    intact = path.read_bytes()
    kinds = {"meta": 8, "leaf": 2, "branch": 1}
    for name, kind in kinds.items():
        heads = ((n, struct.pack("<QHH", n // PAGE, 0, kind)) for n in range(0, len(intact), PAGE))
        at = next(n for n, head in heads if intact.startswith(head, n))
        flip(path, at + PAGE - 1)
        with pytest.raises(DamageError, match=rf"a {name} page at byte {at} differs"):
            open_file(path, info)
        shard = open_file(path, info, verify=False)
        assert same_all(shard.scan(0, 300), samples)
        shard.close()
        path.write_bytes(intact)


def test_verify_open_turns_the_check_off(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(packed, folder)
    for path in folder.glob("*.lmdb"):
        flip(path, 100)
    assert len(list(sequences.open(folder, decode=None, storage=Storage(verify_open=False)))) == 37
    dataset = ShardDataset(folder, decode=None, storage=Storage(verify_open=False))
    assert len(list(pickle.loads(pickle.dumps(dataset)))) == 37
    for opened in (sequences.stored(folder), ShardDataset(folder, decode=None)):
        with pytest.raises(DamageError, match="a meta page at byte 0 differs"):
            list(opened)


def test_verify_names_damaged_pages_beside_damaged_records(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(packed, folder)
    first, second, third = sorted(folder.glob("*.lmdb"))[:3]
    made = manifest.load(locate(folder))
    with_values = LmdbShard(locate(folder).open(first.name), made.shard(0), made.dataset_id)
    flip(first, with_values.offset(0) - 1)  # in a key: no reading of shardio's needs it
    flip(second, 10)
    flip(third, LmdbShard(locate(folder).open(third.name)).offset(2) + 100)
    with_values.close()
    found = verify(folder, jobs=1)
    whats = [(Path(one.shard).name, one.record is None, one.what) for one in found.damages]
    assert [what[:2] for what in whats] == [
        (first.name, True), (second.name, True), (third.name, False),
    ]  # fmt: skip
    assert "a leaf page at byte" in whats[0][2]
    assert shardio("verify", folder, code=3)


def test_shards_that_change_places_are_found(tmp_path: Path) -> None:
    infos = [write(tmp_path / f"{n}.lmdb", plain([900 + n] * 3), number=n)[0] for n in (0, 1)]
    with pytest.raises(DamageError, match="shard number is 1"):
        open_file(tmp_path / "1.lmdb", infos[0])


def test_what_is_no_lmdb_shard_is_told(tmp_path: Path) -> None:
    record = min((GOLDEN / "v0").glob("*.shard"))
    with pytest.raises(DamageError, match=r"too few|no LMDB shard"):
        open_file(record)
    for version, error in ((0, DamageError), (1, VersionError)):
        path = tmp_path / f"{version}.mdb"
        with (
            lmdb.open(str(path), subdir=False, lock=False, lib_version=version) as env,
            env.begin(write=True) as txn,
        ):
            for i in range(1000):
                txn.put(b"%04d" % i, b"theirs" * 10)
        with pytest.raises(error):
            open_file(path)


def test_the_first_bytes_tell_a_shard(tmp_path: Path) -> None:
    write(tmp_path / "x.lmdb", [])
    data = (tmp_path / "x.lmdb").read_bytes()
    assert all(begins_packed(data[:n]) for n in (0, 1, 16, 24, 64))
    assert begins_packed(LmdbEncoder(Schema(PLAIN), ID, 0).header())
    assert not begins_packed(b"{\n") and not begins_packed(bytes(64))


def test_index_never_replaces_a_packed_dataset(tmp_path: Path) -> None:
    """Its shards are LMDB to whoever does not read the manifest."""
    with Writer(
        tmp_path / "out", fields={"image": "image", "label": "int"}, format="lmdb"
    ) as writer:
        writer.write({"image": b"\xff\xd8\xff\xe0 jpeg", "label": 3})
    before = (tmp_path / "out/manifest.json").read_bytes()
    for overwrite in (False, True):
        with pytest.raises(ExistsError, match="packed already, and needs no index"):
            index(tmp_path / "out", overwrite=overwrite)
    assert (tmp_path / "out/manifest.json").read_bytes() == before
