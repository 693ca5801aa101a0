"""Erased records: their bytes are in no file that is left, the others stay as they were."""

import contextlib
import hashlib
import os
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import small_datasets
from support.exporting import FIELDS
from support.forging import sealed
from support.raw_pixels import raw_data
from support.trees import content, noise, plant, shardio, shardio_json, shards

import shardio as api
from shardio import (
    DamageError,
    OptionError,
    PlanOptions,
    ShardDataset,
    ShardLoader,
    StateError,
    StorageError,
    native,
    pack,
    verify,
)
from shardio.dataset.reader import Reader
from shardio.errors import VersionError
from shardio.formats import manifest, open_shard
from shardio.formats.index import key_hash
from shardio.formats.record import FRAME, LARGE, RecordEncoder, RecordShard, erased_in
from shardio.formats.version import history
from shardio.packing.annotate import annotate
from shardio.packing.copy import copy
from shardio.packing.drop import drop
from shardio.packing.gc import gc
from shardio.packing.grow import build_all
from shardio.packing.shard_writer import ShardWriter
from shardio.packing.update import update
from shardio.packing.versions import changing, commit, diff, log, restore, tag
from shardio.storage import local
from shardio.storage.location import locate

FORMATS = ("record", "lmdb")


def keys_of(folder: Path, version: str | None = None) -> list[str]:
    return api.open(folder, version=version, decode=None).keys()


def everything(folder: Path) -> bytes:
    """The bytes of all files of a folder."""
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.fixture(params=FORMATS)
def either(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Path:
    """A dataset of 6 shards of 4 records, of either format that shardio packs."""
    pack(source, tmp_path / "either", plan=PlanOptions(max_records=4), format=request.param, jobs=1)
    return tmp_path / "either"


def shard_names(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if name.endswith((".shard", ".lmdb"))}


def stored(folder: Path) -> list[bytes]:
    """The bytes of each record, as its shard has them."""
    reader = Reader(locate(folder), manifest.load(locate(folder)))
    found = []
    for at in range(reader.manifest.shards):
        shard = reader.shard(at)
        assert isinstance(shard, RecordShard)
        found += shard.stored(0, shard.records)
    return found


def test_after_gc_nothing_of_them_is_in_any_file(either: Path) -> None:
    keys, before = keys_of(either), api.open(either, decode=None)
    gone = [keys[0], keys[9], keys[10]]
    images = [before[before.find(key)]["image"] for key in gone]
    assert all(one in everything(either) for one in images)
    done = drop(either, keys=gone, erase=True)
    assert (done.records, done.erased, done.shards, done.remaining) == (3, 3, 2, 21)
    gc(either, keep_s=0)
    left = everything(either)
    for key, image in zip(gone, images, strict=True):
        assert key.encode() not in left and image not in left
        assert not any(image[i : i + 32] in left for i in range(0, len(image) - 32, 16))
    assert keys_of(either) == [key for key in keys if key not in gone]
    found = verify(either, sha256=True)
    assert found.damages == [] and found.erased == 3 and "3 erased" in str(found)


def test_the_others_keep_their_numbers_and_bytes(either: Path) -> None:
    before, keys = stored(either), keys_of(either)
    names = shard_names(either)
    gone = [0, 9, 23]
    drop(either, keys=[keys[number] for number in gone], erase=True)
    after = stored(either)
    assert [n for n in range(24) if before[n] != after[n]] == gone
    assert [len(after[number]) for number in gone] == [FRAME.size] * 3
    assert [FRAME.unpack(after[number])[1:] for number in gone] == [(0, 0)] * 3
    assert names < shard_names(either) and len(shard_names(either)) == 9
    gc(either, keep_s=0)
    assert len(names & shard_names(either)) == 3 and len(shard_names(either)) == 6


def test_what_was_dropped_before_is_erased(out: Path) -> None:
    keys = keys_of(out)
    drop(out, keys=keys[:3])
    done = drop(out, keys=keys[1:4], erase=True)
    assert (done.records, done.already, done.erased) == (1, 2, 3)
    data = manifest.load(locate(out))
    assert data.commit and data.commit.changes == {"dropped": 1, "erased": 3}
    done = drop(out, keys=keys[:1], erase=True)
    assert (done.records, done.already, done.erased, done.remaining) == (0, 1, 1, 20)
    assert sum(len(one) == FRAME.size for one in stored(out)) == 4
    gc(out, keep_s=0)
    assert verify(out).damages == [] and keys_of(out) == keys[4:]


def test_where_chooses_among_the_dropped_too(out: Path) -> None:
    drop(out, where={"label": "class1"})
    done = drop(out, where=["label=class1"], erase=True)
    assert (done.records, done.already, done.erased) == (0, 8, 8)
    with pytest.raises(OptionError, match="no record meets"):
        drop(out, where=["label=class1"], erase=True)
    assert drop(out, where=["label=class0"], erase=True).remaining == 8


def test_all_of_a_dataset_can_be_erased(either: Path) -> None:
    drop(either, keys=keys_of(either), erase=True)
    gc(either, keep_s=0)
    assert len(api.open(either)) == 0 and verify(either).erased == 24
    assert manifest.load(locate(either)).blob_bytes == 0


def test_a_key_that_was_erased_is_not_known_any_more(out: Path) -> None:
    keys = keys_of(out)
    drop(out, keys=keys[:2], erase=True)
    before = content(out)
    with pytest.raises(OptionError, match=r"2 records were erased here, of which no key is kept"):
        drop(out, keys=keys[:3], erase=True)
    assert content(out) == before
    assert drop(out, keys=keys[:2], erase=True, missing="ignore").missing == sorted(keys[:2])
    assert content(out) == before


def test_a_key_whose_hash_is_that_of_erased_records_is_looked_for(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop(out, keys=keys_of(out)[:2], erase=True)
    gc(out, keep_s=0)
    for module in ("dataset.reader", "packing.remains"):
        monkeypatch.setattr(f"shardio.{module}.key_hash", lambda key: 0)
    assert drop(out, keys=["other"], missing="ignore").missing == ["other"]
    assert verify(out, dropped=["other"]).damages == []


def test_a_dry_run_changes_nothing(out: Path) -> None:
    before = content(out)
    done = drop(out, keys=keys_of(out)[:6], erase=True, dry_run=True)
    assert (done.erased, done.shards, done.versions) == (6, 2, {})
    assert "would be erased: 2 shards would be written anew" in str(done)
    assert content(out) == before


def test_files_of_others_are_not_erased_from(tars: Path) -> None:
    before = content(tars)
    with pytest.raises(OptionError, match=r"files of others \(webdataset\).*Nothing was erased"):
        drop(tars, keys=keys_of(tars)[:1], erase=True)
    assert content(tars) == before


def test_all_splits_are_erased_from(tmp_path: Path) -> None:
    names = [f"{split}/c/{split}{i}.jpg" for split in ("train", "val") for i in "012"]
    out = tmp_path / "out"
    pack(plant(tmp_path / "src", {one: noise(one, 900) for one in names}), out, jobs=1)
    drop(out, keys=["c/train1.jpg", "c/val0.jpg"], erase=True)
    gc(out, keep_s=0)
    left = everything(out)
    assert b"c/train1.jpg" not in left and noise(names[3], 900) not in left
    assert verify(out).erased == 2


# --- every kind of field --------------------------------------------------------------------------


def test_fields_of_every_kind_and_empty_shards(wide: Path) -> None:
    keys, data = keys_of(wide), api.open(wide, decode=None)
    names = [name for name, kind in FIELDS if kind in ("int", "float", "bool")]
    assert names
    kept = [*range(2, 8), *range(10, len(keys))]
    columns = {name: data.columns(name)[kept] for name in names}
    before = [data[i] for i in kept]
    drop(wide, keys=[keys[i] for i in (0, 1, 8, 9)], erase=True)
    after = api.open(wide, decode=None)
    for name, column in columns.items():
        np.testing.assert_array_equal(after.columns(name), column)
        assert isinstance(after.columns(name), np.ma.MaskedArray) == isinstance(
            column, np.ma.MaskedArray
        )
    assert [sample["__key__"] for sample in after] == [sample["__key__"] for sample in before]
    assert verify(wide).damages == []


def test_a_column_tells_nothing_of_them(packed: Any) -> None:
    """Neither by a value, nor by its width: 70,000 needs four bytes, the others one."""
    out = packed([3], sample=lambda i: {"__key__": b"k%d" % i, "image": b"x", "label": LABELS[i]})
    drop(out, keys=["k1"], erase=True)
    one = manifest.load(locate(out))
    shard = open_shard(one.format, one.opening(locate(out)), one.shard(0))
    assert shard.columns["label"].dtype == np.uint8 and shard.columns["label"].tolist() == [1, 0, 2]
    assert shard.key_hashes[1] == 0
    shard.close()


LABELS = (1, 70_000, 2)


def test_integers_that_no_column_holds(packed: Any) -> None:
    values = (-1, 5, 2**63)
    out = packed([3], sample=lambda i: {"__key__": b"k%d" % i, "image": b"x", "label": values[i]})
    drop(out, keys=["k1"], erase=True)
    assert api.open(out).columns("label").tolist() == [-1, 2**63]
    assert verify(out).damages == []


@pytest.mark.parametrize("size", [40, LARGE + 1])
@pytest.mark.parametrize("core", [True, False])
def test_reads_over_a_gap_have_the_bytes_of_the_others(
    packed: Any, monkeypatch: pytest.MonkeyPatch, size: int, core: bool
) -> None:
    if not core:
        monkeypatch.setattr(native, "records", lambda: None)
    elif native.records() is None:
        pytest.skip("NOT TESTED HERE: there is no core")
    out = packed([6], image=lambda i: bytes([i]) * size)
    keys = keys_of(out)
    drop(out, keys=[keys[2], keys[3]], erase=True)
    one = manifest.load(locate(out))
    shard = open_shard(one.format, one.opening(locate(out)), one.shard(0))
    held = shard.hold(0, 6)
    for record in (0, 1, 4, 5):
        data = held[record]
        assert data is not None
        assert shard.decode(record, data)["image"] == bytes([record]) * size
        assert shard.read(record)["image"] == bytes([record]) * size
    assert erased_in(shard).tolist() == [2, 3]
    reads: list[Any] = [
        partial(one, record) for one in (shard.read, shard.key) for record in (2, 3)
    ]
    reads += [lambda: list(shard.scan(0, 6)), lambda: list(shard.keys(0, 6))]
    reads += [partial(shard.decode, i, held[i]) for i in (2, 3) if held[i] is not None]
    for read in reads:
        with pytest.raises(DamageError, match=r"record [23] at byte"):
            read()
    with pytest.raises(DamageError, match="it was erased"):
        shard.read(2)
    shard.close()


@pytest.mark.parametrize("options", [{}, {"shuffle_buffer": 3}, {"shuffle": False}])
def test_a_selection_with_gaps_reads_over_them(packed: Any, options: dict[str, Any]) -> None:
    out = packed([40, 40])
    keys = keys_of(out)
    gone = keys[3:70:7]
    drop(out, keys=gone, erase=True)
    data = ShardDataset(out, decode=None, **options)
    assert sorted(one["__key__"] for one in data) == sorted(set(keys) - {*gone})
    some = data.select(range(0, len(data), 2))
    assert len({one["__key__"] for one in some}) == 35


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_an_erased_dataset_is_read_as_a_dropped_one(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The same batches, in the same order, by both loaders, by parts, and of a selection."""
    folder, counts = tmp_path_factory.mktemp("alike"), [20, 0, 15, 1]
    raw = data.draw(st.booleans())
    for name in ("dropped", "erased"):
        (raw_data if raw else small_datasets.make)(folder / name, counts)
    numbers = [*range(sum(counts))]
    keys = keys_of(folder / "dropped")
    gone = [keys[n] for n in data.draw(st.sets(st.sampled_from(numbers), min_size=1, max_size=30))]
    drop(folder / "dropped", keys=gone)
    for some in (gone[::2], gone):  # in two steps
        drop(folder / "erased", keys=some, erase=True, missing="ignore")
    options = {
        "batch_size": data.draw(st.sampled_from([1, 4, 7])),
        "shuffle_buffer": data.draw(st.sampled_from([None, 2, 5])),
        "seed": data.draw(st.integers(0, 3)),
        "tail": "exact",
    } | ({} if raw else {"decode": None})
    found = []
    for name in ("dropped", "erased"):
        one = ShardDataset(folder / name, **options)
        with ShardLoader(ShardDataset(folder / name, **options), num_workers=0) as loader:
            batches = [list(map(plain, batch.items())) for batch in loader]
        assert batches == [list(map(plain, batch.items())) for batch in one]
        some = one.select(range(0, len(one), 3)) if one.records else one
        found.append((batches, [list(map(plain, batch.items())) for batch in some]))
    assert found[0] == found[1] and verify(folder / "erased").damages == []


def plain(item: tuple[str, Any]) -> tuple[str, Any]:
    name, value = item
    return name, value.tolist() if hasattr(value, "tolist") else value


# --- older versions -------------------------------------------------------------------------------


@pytest.fixture
def versions(out: Path) -> tuple[Path, list[str], list[str]]:
    """Dropped, then erased: the keys of all, and the ids, oldest first."""
    keys = keys_of(out)
    tag(out, "packed")
    drop(out, keys=keys[:2])
    drop(out, keys=keys[4:6])
    drop(out, keys=keys[:2], erase=True)
    return out, keys, [one.id for one in log(out).versions][::-1]


def test_a_version_that_shows_them_cannot_be_read(versions: Any) -> None:
    out, _, ids = versions
    said = f"version {ids[0]}: 2 of its records were erased"
    for name in (ids[0], "packed"):
        for call in (
            lambda name=name: api.open(out, version=name),
            lambda name=name: ShardDataset(out, version=name),
            lambda name=name: restore(out, name),
            lambda name=name: diff(out, name),
            lambda name=name: tag(out, "again", version=name),
        ):
            with pytest.raises(OptionError, match=said):
                call()
    found = log(out).versions
    assert [one.erased for one in found] == [0, 0, 0, 2]
    assert "2 erased since: cannot be read" in shardio("log", out).stdout.splitlines()[-1]
    assert "erased since" not in "".join(shardio("log", out).stdout.splitlines()[:-1])
    tag(out, "packed", remove=True)


@pytest.mark.parametrize("clean", [False, True])
def test_a_version_that_had_dropped_them_stays(versions: Any, clean: bool) -> None:
    out, keys, ids = versions
    if clean:
        gc(out, keep_s=0)
    assert keys_of(out, ids[1]) == keys[2:]
    assert len(list(ShardDataset(out, version=ids[1], decode=None))) == 22
    assert diff(out, ids[1]).dropped == sorted(keys[4:6]) and diff(out, ids[1]).added == []
    restore(out, ids[1])
    assert keys_of(out) == keys[2:] and verify(out).damages == []
    reader = Reader(locate(out), manifest.load(locate(out)))
    blobs = sum(reader.shard(at).blob_bytes() for at in range(6))  # type: ignore[attr-defined]
    assert reader.manifest.blob_bytes == blobs
    gc(out, keep_s=0, keep_versions=1)
    assert verify(out).damages == [] and keys_of(out) == keys[2:]
    assert keys[0].encode() not in everything(out)


def test_erasing_again_follows_the_chain(versions: Any) -> None:
    out, keys, ids = versions
    drop(out, keys=[keys[2], keys[8]], erase=True)  # of the shard that was written anew, too
    gc(out, keep_s=0)
    with pytest.raises(OptionError, match="2 of its records were erased"):
        api.open(out, version=ids[1])  # of it, keys[2] and keys[8]
    with pytest.raises(OptionError, match="4 of its records were erased"):
        api.open(out, version=ids[0])
    assert len(manifest.load(locate(out)).erased) == 3 and len(shards(out)) == 6


def test_files_younger_than_keep_stay(out: Path) -> None:
    drop(out, keys=keys_of(out)[:1], erase=True)
    assert gc(out).removed == [] and len(shards(out)) == 7
    assert len(gc(out, keep_s=0).removed) == 1 and len(shards(out)) == 6
    assert gc(out, keep_s=0, keep_versions=5).removed == []


def test_a_shard_that_is_packed_again_is_needed_again(versions: Any) -> None:
    """As adding the same files anew gives it: what the newest version names is not to go."""
    out, keys, ids = versions
    with changing(str(out)) as before:
        old = manifest.parse((out / f"manifest-{ids[0]}.json").read_bytes(), "old")
        commit(str(out), before, replace(old, digest=""), "add", {"added": 2}, {})
    assert manifest.load(locate(out)).erased == {}
    gc(out, keep_s=0)
    assert keys_of(out) == keys and verify(out).damages == []


def test_states_of_versions_that_had_dropped_them_hold(out: Path) -> None:
    keys = keys_of(out)

    def begun() -> tuple[dict[str, Any], list[Any]]:
        rows = iter(data := ShardDataset(out, batch_size=4, decode=None))
        next(rows), next(rows)
        return data.state_dict(), [one["__key__"] for one in rows]

    shown, _ = begun()
    drop(out, keys=keys[:3])
    dropped, expected = begun()
    drop(out, keys=keys[:3], erase=True)
    gc(out, keep_s=0)
    data = ShardDataset(out, batch_size=4, decode=None)
    with pytest.warns(UserWarning, match="is of version"):
        data.load_state_dict(dropped)
    assert [one["__key__"] for one in data] == expected
    with pytest.raises(StateError, match="3 of its records were erased"):
        ShardDataset(out, batch_size=4, decode=None).load_state_dict(shown)


# --- copies, and packing anew ---------------------------------------------------------------------


def test_copies_and_what_is_packed_from_it_have_only_what_remains(
    either: Path, tmp_path: Path
) -> None:
    keys = keys_of(either)
    drop(either, keys=keys[3:9], erase=True)
    gc(either, keep_s=0)
    copy(either, tmp_path / "copied")
    assert keys_of(tmp_path / "copied") == keys[:3] + keys[9:]
    assert verify(tmp_path / "copied").damages == []
    drop(tmp_path / "copied", keys=keys[:1], erase=True)
    pack(tmp_path / "copied", tmp_path / "again", jobs=1)
    assert sorted(keys_of(tmp_path / "again")) == sorted(keys[1:3] + keys[9:])
    assert all(shard.read_bytes()[8] == 0 for shard in (tmp_path / "again").glob("*.shard"))


# --- killed, full, damaged, forged ----------------------------------------------------------------


@pytest.mark.parametrize("step", range(7))
def test_a_failure_at_any_write_leaves_the_old_version(
    out: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    keys, done = keys_of(out), 0
    gone = [keys[0], keys[5]]
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def failing(self: Any, name: str, *given: Any, **options: Any) -> None:
        nonlocal done
        done += not name.startswith(".")
        if done == step + 1:
            shutil.copytree(out, f"{out}-killed")  # what a kill -9 right here leaves
            raise OSError("no more")
        commit(self, name, *given, **options)

    commit = local.Draft.commit
    monkeypatch.setattr(local.Draft, "commit", failing)
    steps = 5  # two shards, the list, the older manifest, the manifest
    if step >= steps:
        drop(out, keys=gone, erase=True)
        assert keys_of(out) == [key for key in keys if key not in gone]
        return
    with pytest.raises(OSError, match="no more"):
        drop(out, keys=gone, erase=True)
    monkeypatch.undo()
    for folder in (out, Path(f"{out}-killed")):
        assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name in before} == before
        assert keys_of(folder) == keys and verify(folder).damages == []
        drop(folder, keys=gone, erase=True)
        gc(folder, keep_s=0)
        assert keys_of(folder) == [key for key in keys if key not in gone]
        left = everything(folder)
        assert not any(key.encode() in left for key in gone)
        assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_a_full_disk_leaves_the_old_version(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, before = keys_of(out), content(out)

    def full(self: ShardWriter) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardWriter, "finish", full)
    with pytest.raises(OSError, match="No space"):
        drop(out, keys=keys[:1], erase=True)
    assert content(out) == before and keys_of(out) == keys


def test_a_damaged_neighbour_stays_damaged_and_is_named(out: Path) -> None:
    """Erasing copies it: what could be read of it can still be, and nothing vouches for it."""
    keys = keys_of(out)
    one = manifest.load(locate(out))
    shard = open_shard(one.format, one.opening(locate(out)), one.shard(0))
    at = shard.offset(1) + int(shard.sizes[1]) - 1
    shard.close()
    path = out / one.shard(0).name
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    drop(out, keys=[keys[0]], erase=True)
    [damage] = verify(out).damages
    assert (damage.record, damage.key) == (1, keys[1])


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("shown", "it was erased, but no list of dropped records hides it"),
        ("checksum", "it was erased, but its checksum is"),
        ("hash", "it was erased, but the index still tells of it"),
        ("column", "it was erased, but the index still tells of it"),
    ],
)
def test_what_is_wrong_with_an_erased_record_is_found(
    packed: Any, fault: str, expected: str
) -> None:
    out = packed([4, 4])
    drop(out, keys=keys_of(out)[1:2], erase=True)
    one = manifest.load(locate(out))
    path, records = out / one.shard(0).name, stored(out)[:4]
    if fault == "shown":
        (out / "manifest.json").write_bytes(replace(one, excluded=None, digest="").dump())
        with pytest.raises(DamageError, match="it was erased"):
            list(api.open(out, decode=None))
    elif fault == "checksum":
        data = bytearray(path.read_bytes())
        data[data.index(records[1])] ^= 1
        path.write_bytes(data)
    else:  # by another writer, and under checksums that are right
        encoder = RecordEncoder(one.schema, one.dataset_id, 0, version=1)
        data = bytearray(encoder.header())
        for record in records:
            data += b"".join(encoder.append_stored(record))
        hashes = [key_hash(b"k/%06d.jpg" % i) for i in range(4)]
        hashes[1] = 5 if fault == "hash" else 0
        encoder.index_as(hashes, {"label": [0, int(fault == "column"), 2, 0]})
        data += encoder.finish()
        digest = hashlib.sha256(data).digest()
        (out / manifest.shard_name(0, digest)).write_bytes(data)
        digests, indexes, sizes = (
            column.copy() for column in (one.shard_sha256, one.shard_index, one.shard_sizes)
        )
        digests[0], indexes[0] = np.frombuffer(digest, np.uint8), encoder.index_checksum
        sizes[0] = len(data)
        forged = replace(one, shard_sha256=digests, shard_index=indexes, shard_sizes=sizes)
        (out / "manifest.json").write_bytes(replace(forged, digest="").dump())
    [damage] = verify(out).damages
    assert damage.record == 1 and damage.what.startswith(expected)


def test_a_reader_of_version_0_is_told_by_the_version(out: Path) -> None:
    """The header and the trailer say 1: older releases refuse it; so does this one a version 2."""
    drop(out, keys=keys_of(out)[:1], erase=True)
    gc(out, keep_s=0)
    [path] = out.glob("00000-*.shard")
    data = bytearray(path.read_bytes())
    assert data[8] == 1 and data[-60 + 24] == 1
    assert all(one.read_bytes()[8] == 0 for one in shards(out) if one != path)
    data[8] = 2
    path.write_bytes(data)
    with pytest.raises((VersionError, DamageError)):
        list(api.open(out, decode=None))


def test_the_command_says_what_it_did(out: Path) -> None:
    keys = keys_of(out)
    said = shardio("drop", out, "--keys", "-", "--erase", input="\n".join(keys[:2])).stdout
    assert "2 records dropped, 22 records left" in said
    assert "2 records erased: 1 shard written anew without them" in said
    assert "gc" in said and "--keep 0s" in said
    count = sum(key.startswith("class1/") for key in keys_of(out))
    found = shardio_json("drop", out, "--where", "label=class1", "--erase")
    assert found["erased"] == count and found["shards"] >= 2
    assert f"{2 + count} erased" in shardio("verify", out).stdout


# --- values beside the shards ---------------------------------------------------------------------


def everywhere(folder: Path, text: str) -> list[str]:
    """The files that have a text."""
    return [path.name for path in sorted(folder.iterdir()) if text.encode() in path.read_bytes()]


@pytest.fixture
def annotated(either: Path) -> tuple[Path, list[str]]:
    """Captions, a part of them given twice, scores of some, and other labels; and the keys."""
    keys = keys_of(either)
    annotate(either, {key: {"caption": f"old words on {key}"} for key in keys})
    annotate(either, {key: {"caption": f"new words on {key}"} for key in keys[:6]})
    annotate(either, {key: {"score": 0.25 + i} for i, key in enumerate(keys[:3])}, missing="none")
    annotate(either, {key: {"label": 2} for key in keys[:2]})
    return either, keys


def test_values_beside_the_shards_are_erased_too(annotated: Any) -> None:
    out, keys = annotated
    gone = [keys[0], keys[9]]
    before = {one["__key__"]: one for one in api.open(out, decode=None)}
    done = drop(out, keys=gone, erase=True)
    assert (done.records, done.erased, done.shards) == (2, 2, 2)
    left = verify(out, dropped=gone).damages
    assert any("which was erased: `shardio gc" in one.what for one in left)
    assert any(one.shard.rpartition("/")[2].startswith("overlay-") for one in left)
    for key in gone:
        assert everywhere(out, f"words on {key}")
    gc(out, keep_s=0)
    for key in gone:
        assert everywhere(out, f"words on {key}") == everywhere(out, key) == []
    assert verify(out, dropped=gone).damages == verify(out, sha256=True).damages == []
    now = {one["__key__"]: one for one in api.open(out, decode=None)}
    assert now == {key: one for key, one in before.items() if key not in gone}
    assert [one["caption"] for one in ShardDataset(out, decode=None, shuffle=False)] == [
        one["caption"] for one in now.values()
    ]
    annotate(out, {keys[1]: {"caption": "again"}})
    assert api.open(out, decode=None)[0]["caption"] == "again"


def test_all_values_of_a_shard_can_be_erased(annotated: Any) -> None:
    out, keys = annotated
    drop(out, keys=keys[:4], erase=True)  # all of the first shard, and all scores
    gc(out, keep_s=0)
    assert verify(out, sha256=True).damages == verify(out, dropped=keys[:4]).damages == []
    data = api.open(out, decode=None)
    assert data.keys() == keys[4:] and data[0]["caption"] == f"new words on {keys[4]}"
    assert data.columns("score").tolist() == [None] * 20
    drop(out, keys=keys[4:], erase=True)
    gc(out, keep_s=0)
    assert everywhere(out, "words on") == []
    assert verify(out).damages == []


def test_versions_that_had_dropped_them_are_read_from_the_new_files(annotated: Any) -> None:
    out, keys = annotated
    drop(out, keys=keys[:2])
    tag(out, "dropped")
    before = [*api.open(out, decode=None)]
    annotate(out, {keys[2]: {"caption": "later"}, keys[5]: {"caption": "later"}})
    drop(out, keys=keys[:2], erase=True)
    for _ in range(2):
        assert [*api.open(out, version="dropped", decode=None)] == before
        gc(out, keep_s=0)
    assert everywhere(out, f"words on {keys[0]}") == []
    assert diff(out, "dropped").changed == sorted([keys[2], keys[5]])
    drop(out, keys=keys[3:4], erase=True)  # what followed is followed by others
    gc(out, keep_s=0)
    with pytest.raises(OptionError, match="1 of its records were erased"):
        api.open(out, version="dropped")
    assert everywhere(out, f"words on {keys[3]}") == []
    assert api.open(out, decode=None).keys() == keys[2:3] + keys[4:]


def test_values_that_only_an_older_version_has_are_erased(annotated: Any) -> None:
    out, keys = annotated
    restore(out, log(out).versions[-1].id)  # without any
    assert "caption" not in api.open(out, decode=None)[0]
    drop(out, keys=keys[:1], erase=True)
    gc(out, keep_s=0)
    assert everywhere(out, f"words on {keys[0]}") == []
    assert everywhere(out, f"words on {keys[1]}")
    assert verify(out, dropped=keys[:1]).damages == []


def test_a_value_of_an_erased_record_that_is_left_is_named(annotated: Any) -> None:
    out, keys = annotated
    there = {path: path.read_bytes() for path in out.glob("overlay-*")}
    drop(out, keys=keys[:1], erase=True)
    gc(out, keep_s=0)
    assert verify(out, dropped=keys[:1]).damages == []
    for path, data in there.items():
        path.write_bytes(data)
    left = verify(out, dropped=keys[:1]).damages
    assert len(left) == 4 and all(
        "of record 0 of shard 0, which was erased" in x.what for x in left
    )
    path = next(out.glob("overlay-00001-*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    (out / "overlay-00000-00000000.shard").write_bytes(data)  # of another name, and damaged
    assert len(verify(out, dropped=keys[:1]).damages) >= 4


def test_no_room_for_new_files_is_told_before_any_is_written(
    annotated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, keys = annotated
    before = content(out)
    monkeypatch.setattr(local, "free_bytes", lambda path: 1000)
    with pytest.raises(
        StorageError, match=r"writes 1 shard anew, which takes up to .*1,000 B are free"
    ):
        drop(out, keys=keys[:1], erase=True)
    assert content(out) == before
    assert drop(out, keys=keys[:1]).records == 1  # which writes a few bytes


def test_progress_counts_what_is_written(annotated: Any) -> None:
    out, keys = annotated
    seen = list[tuple[int, int]]()
    drop(out, keys=keys[:10], erase=True, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 3 and seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize("what", [b'"overlay-../../x.shard"', b'"overlay-00000-0000000z.shard"'])
def test_a_forged_name_of_a_file_of_values_is_damage(annotated: Any, what: bytes) -> None:
    out, keys = annotated
    drop(out, keys=keys[:1], erase=True)
    body = b"".join((out / "manifest.json").read_bytes().splitlines(keepends=True)[:-2])
    name = re.search(rb'"erased": \[\[("[^"]*")', body)
    assert name is not None
    forged = body.replace(name[1], what, 1)
    (out / "manifest.json").write_bytes(sealed(forged))
    with pytest.raises(DamageError, match=r"manifest\.json: not a manifest"):
        api.open(out)


# --- versions with other shards -------------------------------------------------------------------


NAMES = [f"{c}/{i:03d}.jpg" for c in "ab" for i in range(20)]


def captions(out: Path, version: str | None = None) -> dict[str, Any]:
    rows = api.open(out, decode=None, version=version)
    return {row["__key__"]: row.get("caption") for row in rows}


def captioned(tmp_path: Path, names: list[str], size: str) -> Path:
    out = tmp_path / "out"
    api.pack(plant(tmp_path / "src", {n: noise(n, 300) for n in names}), out, shard_size=size)
    annotate(out, {name: {"caption": f"of {name}"} for name in names})
    return out


def nothing_left(out: Path, keys: list[str]) -> bool:
    """Whether no file has the image, key or caption of a record; and `verify` says the same."""
    data = everything(out)
    found = [text for key in keys for text in (key.encode(), noise(key, 300)[8:40]) if text in data]
    assert found == [one.shard for one in verify(out, dropped=keys).damages] == []
    return True


@pytest.fixture(params=[("2KB", "64KB", "record"), ("64KB", "2KB", "lmdb")])
def compacted(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[str]]:
    """Two versions of other shards than the newest, the second without its first two records."""
    before, after, format = request.param
    out = tmp_path / "out"
    trees = plant(tmp_path / "src", {n: noise(n, 300) for n in NAMES})
    api.pack(trees, out, shard_size=before, format=format, jobs=1)
    annotate(out, {name: {"caption": f"of {name}", "score": 0.5} for name in NAMES})
    tag(out, "whole")
    keys = keys_of(out)
    drop(out, keys=keys[:2])
    tag(out, "dropped")
    api.compact(out, shard_size=after, jobs=1)
    return out, keys


def test_versions_from_before_a_compaction_are_erased_from(compacted: Any) -> None:
    out, _ = compacted
    left, ids = captions(out), [one.id for one in log(out).versions][::-1]
    gone = next(iter(left))
    drop_it = partial(drop, out, keys=[gone], erase=True)
    told = drop_it(dry_run=True)
    assert captions(out, "whole") == captions(out, ids[1]) and len(captions(out, "whole")) == 40
    done = drop_it()
    assert (done.records, done.erased, done.shards) == (1, 1, 1)
    tags = [[], ["whole"], ["dropped"], []]
    assert done.unreadable == told.unreadable == dict(zip(ids, tags, strict=True))
    assert "4 older versions with them cannot be read any more" in str(done)
    assert f"{ids[1]} [whole]" in str(done) and done.discarded == 1
    for one in ("whole", "dropped", ids[0]):
        with pytest.raises(OptionError, match=": 1 of its records were erased since"):
            restore(out, one)
    assert [one.erased > 0 for one in log(out).versions] == [False, True, True, True, True]
    assert not nothing_is_left(out, gone)
    gc(out, keep_s=0)
    assert nothing_left(out, [gone])
    assert captions(out) == {key: one for key, one in left.items() if key != gone}
    assert verify(out, sha256=True).damages == []


def test_a_record_that_only_versions_from_before_a_compaction_have_is_erased(
    compacted: Any,
) -> None:
    out, keys = compacted
    left, whole, ids = captions(out), captions(out, "whole"), [one.id for one in log(out).versions]
    shards_of = {name: (out / name).read_bytes() for name in shard_names(out)}
    done = drop(out, keys=keys[:2], erase=True)
    assert (done.records, done.erased, done.remaining) == (0, 2, 38) and done.missing == []
    assert [*done.unreadable.values()] == [["whole"], []]
    assert done.shards in (1, 2) and done.discarded == 0
    for clean in (True, False):
        # Who had dropped them reads on, from new files.
        assert captions(out, "dropped") == left == captions(out)
        assert diff(out, "dropped").dropped == diff(out, "dropped").added == []
        with pytest.raises(OptionError, match="2 of its records were erased since"):
            api.open(out, version="whole")
        if clean:
            gc(out, keep_s=0)
    assert nothing_left(out, keys[:2])
    newest = manifest.load(locate(out))
    for number in range(newest.shards):  # these had nothing of them
        name = newest.shard(number).name
        assert (out / name).read_bytes() == shards_of[name]
    restore(out, "dropped")
    assert captions(out) == left and nothing_left(out, keys[:2])
    assert whole.keys() - left.keys() == {*keys[:2]} and ids[0] in str(log(out))
    with pytest.raises(OptionError, match="2 records were erased here, of which no key is kept"):
        drop(out, keys=keys[:2], erase=True)


def nothing_is_left(out: Path, key: str) -> bool:
    return key.encode() not in everything(out)


def test_a_shard_of_another_version_with_the_same_number_keeps_its_values(tmp_path: Path) -> None:
    out = captioned(tmp_path, NAMES, "64KB")
    first = log(out).versions[0].id
    for name in "AB":
        tree = {f"a/{name}{i}.jpg": noise(f"{name}{i}", 300) for i in range(6)}
        api.append(plant(tmp_path / name, tree), out, jobs=1)
        if name == "A":
            annotate(out, {key: {"caption": f"of {key}"} for key in tree})
            second, there = log(out).versions[0].id, captions(out)
            restore(out, first)
    drop(out, keys=["a/B2.jpg"], erase=True)
    gc(out, keep_s=0)
    assert captions(out, second) == there and verify(out, dropped=["a/B2.jpg"]).damages == []


def test_what_an_interrupted_compaction_built_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = captioned(tmp_path, NAMES, "2KB")
    api.drop(out, keys=[NAMES[0]])

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shardio.packing.compact.commit", killed)
        with pytest.raises(KeyboardInterrupt):
            api.compact(out, shard_size="64KB", jobs=1)
    assert list((out / ".shardio-append").glob(".shardio*"))
    drop(out, keys=[NAMES[3]], erase=True)
    gc(out, keep_s=0, keep_versions=1)
    assert api.verify(out, dropped=[NAMES[3]]).damages == []
    assert not (out / ".shardio-append").exists()


def test_a_failure_in_any_version_leaves_all_and_a_rerun_ends_it(
    compacted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, keys = compacted
    gone, step, left_over = [keys[0], keys[7]], 0, 0  # of older versions alone, and of all
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    whole, left = captions(out, "whole"), captions(out)
    real = local.Draft.commit

    def failing(self: Any, name: str, *given: Any, **options: Any) -> None:
        nonlocal left_over
        left_over -= not name.startswith(".")
        if left_over < 0:
            raise KeyboardInterrupt
        real(self, name, *given, **options)

    while True:
        copied, left_over = out.parent / f"killed-{step}", step
        shutil.copytree(out, copied)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(local.Draft, "commit", failing)
            drop(copied, keys=gone, erase=True)
            break
        step += 1
        assert before.items() <= {path.name: path.read_bytes() for path in copied.iterdir()}.items()
        assert (captions(copied), captions(copied, "whole")) == (left, whole)
        drop(copied, keys=gone, erase=True)
        gc(copied, keep_s=0)
        assert nothing_left(copied, gone) and verify(copied, sha256=True).damages == []
        assert captions(copied) == {key: one for key, one in left.items() if key not in gone}
        assert not [name for name in os.listdir(copied) if name.startswith(".")]
    assert step > 5


# --- what lies beside -----------------------------------------------------------------------------


def times_of(source: Path, keys: list[str]) -> dict[str, bytes]:
    """Give each file a time of its own, and return these as notes have them."""
    times = {key: 1_750_000_000_123_456_789 + number for number, key in enumerate(keys)}
    for key, time in times.items():
        os.utime(source / key, ns=(time, time))
    return {key: time.to_bytes(8, "little") for key, time in times.items()}


def test_what_update_noted_of_their_files_goes_in_all_versions(source: Path, out: Path) -> None:
    keys = keys_of(out)
    times = times_of(source, keys)
    update(source, out, jobs=1)
    annotate(out, {keys[3]: {"label": 1}})
    assert all(time in everything(out) for time in times.values())
    drop(out, keys=keys[2:3])
    tag(out, "dropped")
    drop(out, keys=keys[:1], erase=True)
    drop(out, keys=keys[2:3], erase=True)
    gc(out, keep_s=0)
    left = everything(out)
    assert [key for key in keys if times[key] not in left] == [keys[0], keys[2]]
    for key in (keys[0], keys[2]):
        (source / key).unlink()
    found = update(source, out, jobs=1)
    assert (found.unchanged, found.compared, found.new, found.gone) == (22, 0, 0, 0)


@pytest.mark.parametrize("by", ["append", "update"])
def test_what_is_committed_meanwhile_does_not_note_them_again(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    key = keys_of(out)[0]
    (tmp_path / "keys.txt").write_text(f"{key}\n")
    time = times_of(source, [key])[key]
    update(source, out, jobs=1)
    assert time in everything(out)

    def built(*given: Any) -> None:
        build_all(*given)
        shardio("drop", out, "--keys", tmp_path / "keys.txt", "--erase")  # of another process

    monkeypatch.setattr("shardio.packing.grow.build_all", built)
    more = plant(source if by == "update" else tmp_path / "more", {"class1/new.jpg": noise("n", 9)})
    (update if by == "update" else api.append)(more, out, jobs=1)
    gc(out, keep_s=0)
    assert len(keys_of(out)) == 24 and time not in everything(out)
    assert manifest.load(locate(out)).sources is not None


def test_lists_of_what_packing_left_out_lose_the_key(source: Path, out: Path) -> None:
    key, other = keys_of(out)[0], "class0/also broken.jpg"
    drop(out, keys=[key])
    for name in (key, other):
        (source / name).write_bytes(b"no image")
    update(source, out, jobs=1, on_error="skip")
    assert key in (out / "rejected.jsonl").read_text()
    told = drop(out, keys=[key], erase=True, dry_run=True)
    assert told.unlisted == 1 and key in (out / "rejected.jsonl").read_text()
    done = drop(out, keys=[key], erase=True)
    assert done.unlisted == 1 and "1 key removed from rejected.jsonl" in str(done)
    assert other in (out / "rejected.jsonl").read_text()
    drop(out, keys=[other], erase=True)  # which no record ever had
    assert not (out / "rejected.jsonl").exists()
    gc(out, keep_s=0)
    assert verify(out, dropped=[key, other]).damages == []
    with pytest.raises(OptionError, match="no record has"):
        drop(out, keys=[other], erase=True)


def test_an_older_list_of_what_must_go_is_not_restored(out: Path) -> None:
    """What was packed again, and is needed again, is not to go."""
    keys = keys_of(out)
    drop(out, keys=keys[:1], erase=True)
    tag(out, "erased")
    with changing(str(out)) as before:  # as packing the same files again leaves it
        old = [*history(locate(out), before)][-1]
        commit(str(out), before, replace(old, digest=""), "add", {"added": 1}, {})
    again = log(out).versions[0].id
    restore(out, "erased")
    assert keys_of(out) == keys[1:]
    gc(out, keep_s=0)
    assert keys_of(out, again) == keys
    drop(out, keys=keys[:2], erase=True)  # it is found in that version, too
    gc(out, keep_s=0)
    assert not any(key.encode() in everything(out) for key in keys[:2])


def test_a_file_that_an_earlier_erasing_wrote_is_written_again(out: Path) -> None:
    """Two records are erased, and come back; then the first one is erased: the other one stays."""
    keys, shard = keys_of(out), next(out.glob("00000-*.shard"))
    data = shard.read_bytes()
    drop(out, keys=keys[:1], erase=True)
    drop(out, keys=keys[1:2], erase=True)
    gc(out, keep_s=0)
    shard.write_bytes(data)
    with changing(str(out)) as before:  # as packing the same files again leaves it
        old = [*history(locate(out), before)][-1]
        commit(str(out), before, replace(old, digest=""), "add", {"added": 2}, {})
    assert keys_of(out) == keys
    drop(out, keys=keys[:1], erase=True)
    for _ in range(2):
        assert keys_of(out) == keys[1:] and verify(out, sha256=True).damages == []
        gc(out, keep_s=0)


@pytest.mark.parametrize("fault", ["gone", "damaged"])
def test_a_shard_of_older_versions_that_is_gone_or_damaged(compacted: Any, fault: str) -> None:
    out, keys = compacted
    newest = manifest.load(locate(out))
    own = {newest.shard(number).name for number in range(newest.shards)}
    old = out / min(shard_names(out) - own)
    left = captions(out)
    if fault == "gone":
        old.unlink()
        assert drop(out, keys=keys[7:8], erase=True).erased == 1
        return
    data = bytearray(old.read_bytes())
    data[-40] ^= 1
    old.write_bytes(data)
    with pytest.raises(DamageError, match=rf"{old.name}(?s:.*)--keep 0s` removes them"):
        drop(out, keys=keys[7:8], erase=True)
    assert captions(out) == left
