"""Repair: what is whole of a damaged dataset is in a new one, byte for byte; the rest is listed."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.object_stores import ObjectStore
from support.trees import (
    content,
    environment,
    images,
    on_a_terminal,
    picture,
    plant,
    shardio,
    shardio_json,
)
from support.uploading import options

import shardio as api
from shardio import (
    DamageError,
    ImageOptions,
    OptionError,
    PlanOptions,
    ShardDataset,
    Storage,
    annotate,
    pack,
    verify,
)
from shardio.dataset.reader import Reader
from shardio.errors import BusyError, ExistsError, NotPackedError, StorageError
from shardio.formats import manifest
from shardio.formats.record import RecordShard
from shardio.packing import repair as module
from shardio.packing.append import append
from shardio.packing.copy import copy
from shardio.packing.drop import drop
from shardio.packing.gc import gc
from shardio.packing.output_dir import own_unplanned
from shardio.packing.repair import LOST, repair
from shardio.packing.versions import files_of
from shardio.storage import ranges
from shardio.storage.local import open_file
from shardio.storage.location import locate

FORMATS = ("record", "lmdb")


@pytest.fixture(scope="module", params=FORMATS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 3 shards of 8 records, small and large ones; not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    tree = images()
    for at, key in enumerate(sorted(map(str, tree))):
        tree[key] = (tree[key] or b"") * (1 + 9 * (at % 5 == 0))
    plant(folder / "src", tree)
    plan = PlanOptions(max_records=8)
    pack(folder / "src", folder / "out", plan=plan, format=request.param, jobs=1)
    return folder / "out"


@pytest.fixture
def out(whole: Path, tmp_path: Path) -> Path:
    """A copy of that dataset, to be damaged."""
    shutil.copytree(whole, tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return tmp_path / "new"


@pytest.fixture
def at_store(bucket: ObjectStore) -> Iterator[Storage]:
    """How the bucket is reached; no process that reached it stays."""
    yield options(bucket)
    ranges.close()


def shard_paths(folder: Path) -> list[Path]:
    one = manifest.load(locate(folder))
    return [folder / one.shard(number).name for number in range(one.shards)]


def places(folder: Path) -> list[list[tuple[int, int]]]:
    """By shard: the bytes at which each record begins and ends."""
    reader = Reader(locate(folder), manifest.load(locate(folder)))
    found = []
    for number in range(reader.manifest.shards):
        shard = reader.shard(number)
        starts = [shard.offset(record) for record in range(shard.records)]
        found.append([(at, at + int(size)) for at, size in zip(starts, shard.sizes, strict=True)])
    return found


def change(path: Path, do: Callable[[bytearray], object]) -> None:
    data = bytearray(path.read_bytes())
    do(data)
    path.write_bytes(data)


def flip(*places: int) -> Callable[[bytearray], object]:
    def do(data: bytearray) -> None:
        for place in places:
            data[place] ^= 1 << place % 8

    return do


def cut(size: int) -> Callable[[bytearray], object]:
    return lambda data: data.__delitem__(slice(size, None))


def zero(start: int, size: int) -> Callable[[bytearray], object]:
    def do(data: bytearray) -> None:
        data[start : start + size] = bytes(len(data[start : start + size]))

    return do


def survivors(whole: Path, out: Path) -> list[int]:
    """The numbers of the records of which no byte differs: what is to be found, by other code."""
    found, number = [], 0
    for path, records in zip(shard_paths(whole), places(whole), strict=True):
        before, now = path.read_bytes(), b""
        if (out / path.name).exists():
            now = (out / path.name).read_bytes()
        for start, stop in records:
            found += [number] if before[start:stop] == now[start:stop] else []
            number += 1
    return found


def listed(new: Path) -> list[dict[str, Any]]:
    if not (new / LOST).exists():
        return []
    return [json.loads(line) for line in (new / LOST).read_text().splitlines()]


def check(whole: Path, new: Path, kept: Sequence[int]) -> None:
    """A new dataset has just these records, with their numbers, bytes and labels, and is whole."""
    before, now = api.open(whole, decode=None), api.open(new, decode=None)
    reader = now.reader
    numbers = [reader.number(place) for place in range(len(now))]
    assert numbers == list(kept)
    for place, number in enumerate(numbers):
        assert now[place] == before[number]
    assert now.targets.tolist() == [before[number]["label"] for number in numbers]
    one, old = reader.manifest, before.reader.manifest
    assert (one.dataset_id, one.classes, one.stored_records) == (old.dataset_id, old.classes, 24)
    found = verify(new, sha256=True, jobs=1)
    assert found.damages == [] and found.records == 24
    lost = [(one["shard"], one["record"]) for one in listed(new) if one["field"] is None]
    gone = [number for number in range(24) if number not in kept]
    assert lost == [(old.shard(number // 8).name, number % 8) for number in gone]
    for path, records in zip(shard_paths(new), places(new), strict=True):
        data, old_path = path.read_bytes(), shard_paths(whole)[int(path.name[:5])]
        was = places(whole)[int(path.name[:5])]
        for record, (start, stop) in enumerate(records):
            if int(path.name[:5]) * 8 + record in kept:
                old_start, old_stop = was[record]
                assert data[start:stop] == old_path.read_bytes()[old_start:old_stop]


def damages(size: int, seed: int) -> Callable[[bytearray], object]:
    draw = random.Random(seed)
    kind = ("flip", "flips", "cut", "zero", "end")[seed % 5]
    if kind == "flip":
        return flip(draw.randrange(size))
    if kind == "flips":
        return flip(*(draw.randrange(size) for _ in range(draw.randrange(2, 9))))
    if kind == "cut":
        return cut(draw.randrange(size))
    if kind == "zero":
        return zero(draw.randrange(size), draw.choice((16, 512, 4096)))
    return flip(draw.randrange(size - 60, size))


# --- nothing, or all, is damaged ------------------------------------------------------------------


def test_of_a_whole_dataset_the_new_one_has_the_same_bytes(whole: Path, new: Path) -> None:
    done = repair(whole, new, jobs=1)
    assert content(new) == content(whole)
    assert done.same and done.lost == [] and done.versions == {} and done.whole == 3
    assert "all as packed" in str(done) and "0 files damaged" in str(done)


def test_a_shard_that_has_all_its_records_is_as_it_was_packed(
    whole: Path, out: Path, new: Path
) -> None:
    paths = shard_paths(out)
    change(paths[0], flip(20))  # its header, or a page that no read needs
    change(paths[1], flip(paths[1].stat().st_size - 80))  # its index
    change(paths[2], lambda data: data.extend(b"more"))
    done = repair(out, new, jobs=1)
    assert content(new) == content(whole) and done.same and done.written == 3


def test_nothing_of_the_original_is_changed(out: Path, new: Path) -> None:
    change(shard_paths(out)[1], cut(2000))
    before = content(out)
    times = {path: path.stat().st_mtime_ns for path in sorted(out.iterdir())}
    repair(out, new, jobs=1)
    assert content(out) == before
    assert {path: path.stat().st_mtime_ns for path in sorted(out.iterdir())} == times


# --- exact survivors ------------------------------------------------------------------------------


def one_damage(whole: Path, folder: Path, seed: int) -> None:
    out, new = folder / "out", folder / "new"
    shutil.copytree(whole, out)
    path = shard_paths(out)[seed % 3]
    change(path, damages(path.stat().st_size, seed))
    repair(out, new, jobs=1)
    check(whole, new, survivors(whole, out))
    shutil.rmtree(out)
    shutil.rmtree(new)


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_just_what_is_whole_of_a_damaged_shard_survives(
    first: int, whole: Path, tmp_path: Path
) -> None:
    for seed in range(first, first + 10):
        one_damage(whole, tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(20, 1_020, 250))
def test_just_what_is_whole_survives_a_thousand_damages(
    first: int, whole: Path, tmp_path: Path
) -> None:
    for seed in range(first, first + 250):
        one_damage(whole, tmp_path, seed)


def test_all_shards_may_be_damaged_at_once(whole: Path, out: Path, new: Path) -> None:
    for seed, path in enumerate(shard_paths(out)):
        for more in range(4):
            size = path.stat().st_size
            change(path, flip(random.Random(10 * seed + more).randrange(size)))
    change(shard_paths(out)[2], cut(5000))
    repair(out, new, jobs=2)
    check(whole, new, survivors(whole, out))


def test_a_missing_shard_is_lost_record_by_record(whole: Path, out: Path, new: Path) -> None:
    os.remove(shard_paths(out)[1])
    done = repair(out, new, jobs=1)
    check(whole, new, [*range(8), *range(16, 24)])
    assert {one.why for one in done.lost} == {"the file is missing"}
    assert [one.key for one in done.lost] == [None] * 8


def test_what_is_left_of_the_key_of_a_lost_record_is_listed(
    whole: Path, out: Path, new: Path
) -> None:
    start, stop = places(whole)[0][3]
    change(shard_paths(out)[0], flip(stop - 5))
    done = repair(out, new, jobs=1)
    key = api.open(whole, decode=None)[3]["__key__"]
    assert [(one.key, one.record, one.field) for one in done.lost] == [(key, 3, None)]
    assert listed(new)[0]["key"] == key and f"record 3, key {key}" in str(done)
    change(shard_paths(out)[0], zero(start, 100))
    shutil.rmtree(new)
    assert [one.key for one in repair(out, new, jobs=1).lost] == [None]


def test_shards_of_exchanged_names_are_found(whole: Path, out: Path, new: Path) -> None:
    first, second, third = shard_paths(out)
    first.rename(out / "x")
    second.rename(first)
    (out / "x").rename(second)
    third.rename(out / "#1234")  # as a check of the file system leaves it
    repair(out, new, jobs=1)
    assert content(new) == content(whole)


def test_a_damaged_shard_of_an_exchanged_name_gives_its_records(
    whole: Path, out: Path, new: Path
) -> None:
    first, second, _ = shard_paths(out)
    start, _ = places(whole)[0][2]
    change(first, flip(start + 20))
    first.rename(out / "x")
    second.rename(first)
    (out / "x").rename(second)
    repair(out, new, jobs=1)
    check(whole, new, [number for number in range(24) if number != 2])


def test_a_shard_of_another_dataset_gives_nothing(
    whole: Path, out: Path, new: Path, tmp_path: Path
) -> None:
    plant(tmp_path / "other", images(size=310))
    form = manifest.load(locate(whole)).format
    pack(tmp_path / "other", tmp_path / "o2", plan=PlanOptions(max_records=8), format=form, jobs=1)
    shutil.copy(shard_paths(tmp_path / "o2")[1], shard_paths(out)[1])
    done = repair(out, new, jobs=1)
    check(whole, new, [*range(8), *range(16, 24)])
    assert "another one: it is shard 1 of dataset" in done.lost[0].why


def test_records_behind_a_hole_are_found_without_an_index(
    whole: Path, out: Path, new: Path
) -> None:
    """Bytes are gone or came in between, so nothing is at its place: frames and sums tell."""
    path, records = shard_paths(out)[0], places(whole)[0]
    before = path.read_bytes()
    (start, _), (_, stop) = records[2], records[4]
    path.write_bytes(before[:start] + before[stop:])
    repair(out, new, jobs=1)
    check(whole, new, [0, 1, *range(5, 24)])
    shutil.rmtree(new)
    path.write_bytes(before[:start] + b"\x93\xc4" * 500 + before[start:])
    repair(out, new, jobs=1)
    assert content(new) == content(whole)


# --- another copy ---------------------------------------------------------------------------------


def test_a_copy_restores_every_byte(whole: Path, out: Path, new: Path) -> None:
    first, second, third = shard_paths(out)
    change(first, cut(1000))
    os.remove(second)
    change(third, flip(3000))
    os.remove(out / "manifest.json")
    done = repair(out, new, copy=whole, jobs=1)
    assert content(new) == content(whole)
    assert (done.whole, done.copied, done.written) == (0, 3, 0)
    assert "that of the copy" in str(done)


def test_of_two_damaged_copies_each_gives_what_the_other_lacks(
    whole: Path, out: Path, new: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(whole, other)
    records = places(whole)[0]
    for record in (1, 4, 6):
        change(shard_paths(out)[0], flip(records[record][0] + 30))
    for record in (0, 4, 7):
        change(shard_paths(other)[0], flip(records[record][0] + 30))
    repair(out, new, copy=other, jobs=1)
    check(whole, new, [number for number in range(24) if number != 4])
    shutil.rmtree(new)
    change(shard_paths(other)[0], flip(records[4][0] + 30))  # whole again
    repair(out, new, copy=other, jobs=1)
    assert content(new) == content(whole)


def test_another_dataset_is_no_copy(out: Path, new: Path, tmp_path: Path) -> None:
    plant(tmp_path / "other", images(size=310))
    pack(tmp_path / "other", tmp_path / "o2", jobs=1)
    with pytest.raises(OptionError, match="it is no copy"):
        repair(out, new, copy=tmp_path / "o2")
    os.remove(out / "manifest.json")
    with pytest.raises(OptionError, match="it is no copy"):
        repair(out, new, copy=tmp_path / "o2")
    assert not new.exists()


def test_what_a_store_has_takes_the_place_of_what_is_lost_here(
    whole: Path, out: Path, new: Path, bucket: ObjectStore, at_store: Storage
) -> None:
    bucket.put_folder(whole, "copy/")
    first, second, _ = shard_paths(out)
    change(first, flip(places(whole)[0][1][0] + 30))
    os.remove(second)
    repair(out, new, copy=f"{bucket.url}/copy", storage=at_store, jobs=1)
    assert content(new) == content(whole)
    shutil.rmtree(new)
    change(shard_paths(out)[0], flip(places(whole)[0][1][0] + 31, places(whole)[0][6][0] + 30))
    bucket.put({f"copy/{first.name}": first})  # damaged there, too, at another place
    change(first, flip(places(whole)[0][4][0] + 30))
    repair(out, new, copy=f"{bucket.url}/copy", storage=at_store, jobs=1)
    check(whole, new, [number for number in range(24) if number not in (1, 6)])
    assert not [name for name in os.listdir(new) if name.startswith((".", "tmp"))]


def test_a_dataset_in_a_store_is_repaired_into_a_directory(
    whole: Path, out: Path, new: Path, bucket: ObjectStore, at_store: Storage
) -> None:
    change(shard_paths(out)[0], cut(2000))
    kept = [number for number in survivors(whole, out) if number < 16]
    os.remove(shard_paths(out)[2])
    bucket.put_folder(out, "broken/")
    repair(f"{bucket.url}/broken", new, storage=at_store, jobs=1)
    check(whole, new, kept)


def test_a_store_that_fails_is_an_error_and_no_damage(
    whole: Path, out: Path, new: Path, bucket: ObjectStore, at_store: Storage
) -> None:
    bucket.put_folder(whole, "copy/")
    os.remove(shard_paths(out)[0])
    away = options(bucket.through(1), timeout_s=0.1)
    with pytest.raises(StorageError):
        repair(out, new, copy=f"{bucket.url}/copy", storage=away, jobs=1)
    assert not (new / "manifest.json").exists()


# --- kinds of images ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["raw", "tiles"])
def test_raw_pixels_and_tiles_are_records_like_others(kind: str, new: Path, tmp_path: Path) -> None:
    tree = {f"{i % 2}/{i}.jpg": picture(300, 200 + 16 * i * (kind == "tiles")) for i in range(6)}
    plant(tmp_path / "pictures", tree)
    how = ImageOptions(encode="raw") if kind == "raw" else ImageOptions(jpeg_tiles=True)
    pack(tmp_path / "pictures", tmp_path / "out", images=how, jobs=1)
    before, records = list(api.open(tmp_path / "out", decode=None)), places(tmp_path / "out")[0]
    repair(tmp_path / "out", tmp_path / "same", jobs=1)
    assert content(tmp_path / "same") == content(tmp_path / "out")
    change(shard_paths(tmp_path / "out")[0], zero(records[2][0] + 300, 200))
    repair(tmp_path / "out", new, jobs=1)
    assert list(api.open(new, decode=None)) == before[:2] + before[3:]
    assert verify(new, decode=True, sha256=True, jobs=1).damages == []
    assert manifest.load(locate(new)).options == manifest.load(locate(tmp_path / "same")).options


# --- versions, drops, values beside ---------------------------------------------------------------


def test_what_was_dropped_stays_so_and_what_was_erased_does_not_come_back(
    whole: Path, out: Path, new: Path
) -> None:
    keys = api.open(whole, decode=None).keys()
    drop(out, keys=[keys[1], keys[9]])
    drop(out, keys=[keys[2], keys[10]], erase=True)
    gone = api.open(whole, decode=None)[2]["image"]
    for name in [name for name in os.listdir(out) if name.startswith("manifest-")]:
        os.remove(out / name)
    damaged = shard_paths(out)[0]
    change(damaged, flip(20, -70))  # neither its header nor its index is whole
    assert repair(out, new, copy=whole, jobs=1).lost == []  # the copy has what was erased
    left = [key for at, key in enumerate(keys) if at not in (1, 2, 9, 10)]
    assert api.open(new, decode=None).keys() == left
    assert verify(new, sha256=True, jobs=1).damages == []
    assert not any(gone in data for data in content(new).values() if data)
    others = shard_paths(out)[1:]  # of the first nobody knows what was dropped, and not erased
    assert all((new / one.name).read_bytes() == one.read_bytes() for one in others)


def test_a_copy_from_before_does_not_bring_back_what_was_erased(
    whole: Path, out: Path, new: Path, tmp_path: Path
) -> None:
    keys = api.open(whole, decode=None).keys()
    drop(out, keys=[keys[2]], erase=True)
    gone = api.open(whole, decode=None)[2]["image"]
    other = tmp_path / "other"
    for damage in ([], [20], [20, -70]):
        shutil.copytree(whole, other)
        change(shard_paths(other)[0], flip(*damage))
        path = shard_paths(out)[0]
        if path.exists():
            path.unlink()
        repair(out, new, copy=other, jobs=1)
        assert api.open(new, decode=None).keys() == keys[:2] + keys[3:]
        assert not any(gone in data for data in content(new).values() if data)
        shutil.rmtree(other)
        shutil.rmtree(new)


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("end", [None, -70, 3000, "last record"])
def test_an_old_file_under_the_new_name_does_not_bring_back_what_was_erased(
    whole: Path, out: Path, new: Path, end: int | str | None, header: bool
) -> None:
    keys = api.open(whole, decode=None).keys()
    drop(out, keys=[keys[1]], erase=True)
    gone = api.open(whole, decode=None)[1]["image"]
    if isinstance(end, str):
        end = places(whole)[0][-1][0] + 20
    old = shard_paths(whole)[0].read_bytes()[:end]
    shard_paths(out)[0].write_bytes(old if header else old[:20] + b"?" + old[21:])
    repair(out, new, jobs=1)
    assert verify(new, sha256=True, jobs=1).damages == []
    assert not any(gone in data for data in content(new).values() if data)
    left = keys[:1] + keys[2:]
    if end != 3000:
        assert api.open(new, decode=None).keys() in (left, left[:6] + left[7:])


@pytest.mark.parametrize("end", [None, -70])
def test_old_values_under_the_new_name_do_not_bring_back_what_was_erased(
    out: Path, new: Path, end: int | None
) -> None:
    keys = api.open(out, decode=None).keys()
    annotate(out, {key: {"caption": f"said of {key}"} for key in keys})
    old = manifest.load(locate(out)).overlays[0].files[0][0].name
    before = (out / old).read_bytes()
    drop(out, keys=[keys[1]], erase=True)
    (out / old).unlink()
    (out / manifest.load(locate(out)).overlays[0].files[0][0].name).write_bytes(before[:end])
    done = repair(out, new, jobs=1)
    assert [(one.key, one.field) for one in done.lost] == [(None, "caption")]
    assert not any(f"said of {keys[1]}".encode() in data for data in content(new).values() if data)
    left = {one["__key__"]: one["caption"] for one in api.open(new, decode=None)}
    assert list(left) == keys[:1] + keys[2:]
    assert {key for key, value in left.items() if value != f"said of {key}"} == {keys[7]}


def test_a_copy_from_before_an_erasure_of_dropped_records_brings_nothing_back(
    whole: Path, out: Path, new: Path, tmp_path: Path
) -> None:
    keys = api.open(out, decode=None).keys()[:1]
    drop(out, keys=keys)
    copy(out, tmp_path / "older")
    drop(out, keys=keys, erase=True)  # the list of dropped records is the same
    copy(out, tmp_path / "newest")
    gc(out, keep_versions=1, keep_s=0)
    anew = shard_paths(out)[0]
    (out / "manifest.json").unlink()
    for damage in ([], [20]):
        change(anew, flip(*damage))
        with pytest.raises(DamageError, match="the copy is of another version"):
            repair(out, new, copy=tmp_path / "older", jobs=1)
    shutil.copy(shard_paths(whole)[0], out)  # the old file, before gc
    change(out / shard_paths(whole)[0].name, flip(20))
    repair(out, new, copy=tmp_path / "newest", jobs=1)
    assert content(new) == content(tmp_path / "newest")


def test_a_damaged_list_of_dropped_records_is_never_passed_over(
    whole: Path, out: Path, new: Path, tmp_path: Path
) -> None:
    drop(out, keys=api.open(out, decode=None).keys()[:2])
    copy(out, tmp_path / "other")
    [path] = out.glob("excluded-*")
    change(path, flip(40))
    with pytest.raises(DamageError, match=r"SHA-256.*--from COPY"):
        repair(out, new)
    os.remove(path)
    with pytest.raises(DamageError, match=r"would come back.*--from COPY"):
        repair(out, new)
    with pytest.raises(DamageError, match="--from COPY"):
        repair(out, new, copy=whole)  # a copy of the version before
    assert not new.exists()
    repair(out, new, copy=tmp_path / "other", jobs=1)
    assert content(new) == content(tmp_path / "other")


def test_lost_and_dropped_records_are_both_hidden(whole: Path, out: Path, new: Path) -> None:
    keys = api.open(out, decode=None).keys()
    drop(out, keys=[keys[3]])
    change(shard_paths(out)[0], flip(places(whole)[0][5][0] + 20))
    done = repair(out, new, jobs=1)
    assert [one.record for one in done.lost] == [5]
    reader = api.open(new, decode=None).reader
    assert reader.dropped.tolist() == [3, 5]
    drop(new, keys=[keys[4]], erase=True)
    assert api.open(new, decode=None).reader.dropped.tolist() == [3, 4, 5]


@pytest.fixture
def annotated(out: Path, tmp_path: Path) -> Path:
    """With captions of all records, a score of some, and two labels corrected."""
    keys = api.open(out, decode=None).keys()
    annotate(out, {key: {"caption": f"of {key}"} for key in keys})
    annotate(
        out, {key: {"score": at / 2} for at, key in enumerate(keys) if at % 3 == 0}, missing="none"
    )
    annotate(out, {keys[4]: {"label": 2}, keys[6]: {"label": 0}}, missing="none")
    return out


def rows(folder: Path) -> list[tuple[Any, ...]]:
    data = api.open(folder, decode=None)
    return [(one["caption"], one["score"], one["label"]) for one in data]


def overlay_of(folder: Path, name: str, shard: int) -> Path:
    one = manifest.load(locate(folder))
    [beside] = [beside for beside in one.overlays if beside.field == name]
    return folder / beside.files[shard][0].name


def test_values_beside_whole_shards_are_kept(whole: Path, annotated: Path, new: Path) -> None:
    before = rows(annotated)
    change(shard_paths(annotated)[0], flip(places(whole)[0][2][0] + 20))
    repair(annotated, new, jobs=1)
    assert rows(new) == [*before[:2], *before[3:]]
    assert verify(new, sha256=True, jobs=1).damages == []


def test_a_value_that_is_lost_is_none_and_the_others_are_kept(annotated: Path, new: Path) -> None:
    before, path = rows(annotated), overlay_of(annotated, "caption", 1)
    change(path, flip(path.read_bytes().index(b"of class1/002") + 3))  # of the second shard
    done = repair(annotated, new, jobs=1)
    row = [caption for caption, *_ in before].index("of class1/002.jpg")
    assert rows(new) == [(None, *one[1:]) if at == row else one for at, one in enumerate(before)]
    [lost] = done.lost
    shard = manifest.load(locate(annotated)).shard(1).name
    assert (lost.key, lost.shard, lost.record, lost.field) == (
        "class1/002.jpg", shard, row - 8, "caption"
    )  # fmt: skip
    assert path.name in lost.why and "1 of values lost" in str(done)
    assert verify(new, sha256=True, jobs=1).damages == []


def test_values_of_records_that_are_lost_go_with_them(annotated: Path, new: Path) -> None:
    keys = api.open(annotated, decode=None).keys()
    drop(annotated, keys=[keys[3]])
    before, at = rows(annotated), places(annotated)[2][5][0]
    change(shard_paths(annotated)[0], zero(100, 1 << 20))
    change(shard_paths(annotated)[2], flip(at + 20))
    done = repair(annotated, new, jobs=1)
    assert [one.record for one in done.lost] == [0, 1, 2, 4, 5, 6, 7, 5]
    assert verify(new, sha256=True, jobs=1).damages == []
    assert rows(new) == before[7:-3] + before[-2:]
    named = manifest.load(locate(new))
    assert not any(0 in beside.files for beside in named.overlays)
    assert sorted(os.listdir(new)) == sorted({*files_of(named), "manifest.json", LOST})


def test_a_corrected_label_never_becomes_the_old_one_again_where_its_row_is_known(
    annotated: Path, new: Path
) -> None:
    before, path = rows(annotated), overlay_of(annotated, "label", 0)
    with contextlib.closing(RecordShard(open_file(str(path), path.name))) as file:
        change(path, flip(file.offset(1) + 10))
    done = repair(annotated, new, jobs=1)
    assert [(one.record, one.field) for one in done.lost] == [(6, "label")]
    assert rows(new) == [(*one[:2], None) if at == 6 else one for at, one in enumerate(before)]


@pytest.mark.parametrize("name", ["caption", "label"])
def test_a_missing_file_of_values_is_listed(name: str, annotated: Path, new: Path) -> None:
    before = rows(annotated)
    os.remove(overlay_of(annotated, name, 0))
    done = repair(annotated, new, jobs=1)
    assert {one.field for one in done.lost} == {name}
    assert verify(new, sha256=True, jobs=1).damages == []
    if name == "caption":  # each record of the shard had one
        assert [one.record for one in done.lost] == [*range(8)]
        assert [one[0] for one in rows(new)] == [None] * 8 + [one[0] for one in before[8:]]
    else:
        assert [one.record for one in done.lost] == [None]
        assert "2 values, of unknown records" in done.lost[0].why
        assert listed(new)[0]["record"] is None


def test_values_are_taken_from_a_copy(annotated: Path, new: Path, tmp_path: Path) -> None:
    copy(annotated, tmp_path / "other")
    change(overlay_of(annotated, "caption", 1), flip(100, 200, 300))
    os.remove(overlay_of(annotated, "label", 0))
    repair(annotated, new, copy=tmp_path / "other", jobs=1)
    assert content(new) == content(tmp_path / "other")


def test_every_damage_of_a_file_of_values_is_noticed(annotated: Path, tmp_path: Path) -> None:
    before = rows(annotated)
    for field in ("caption", "score", "label"):
        path = overlay_of(annotated, field, 0)
        data = path.read_bytes()
        for seed in range(4):
            path.write_bytes(data)
            change(path, damages(len(data), 100 + seed))
            if path.read_bytes() == data:
                continue
            done = repair(annotated, tmp_path / f"{field}{seed}", jobs=1)
            after = rows(tmp_path / f"{field}{seed}")
            unknown = any(one.record is None for one in done.lost)
            for at in range(24):
                lost = any(one.record == at and one.field == field for one in done.lost)
                same = after[at] == before[at]
                assert same is not lost or unknown or None in before[at]
        path.write_bytes(data)


def test_what_is_lost_is_packed_anew_from_the_source_and_what_was_dropped_is_not(
    source: Path, tmp_path: Path, new: Path
) -> None:
    out = tmp_path / "packed"
    pack(source, out, plan=PlanOptions(max_records=8), jobs=1)
    before = {one["__key__"]: one["image"] for one in api.open(out, decode=None)}
    dropped = api.open(out, decode=None).keys()[0]
    drop(out, keys=[dropped])
    change(shard_paths(out)[0], cut(1500))
    os.remove(shard_paths(out)[2])
    assert len(repair(out, new, jobs=1).lost) > 8
    append(source, new, on_duplicate="skip", jobs=1)
    del before[dropped]
    assert {one["__key__"]: one["image"] for one in api.open(new, decode=None)} == before
    assert verify(new, sha256=True, jobs=1).damages == []


# --- splits ---------------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path: Path) -> Path:
    for name in ("train", "val"):
        plant(tmp_path / "s" / name, images(each=4, size=300 if name == "train" else 500))
    pack(tmp_path / "s", tmp_path / "split", plan=PlanOptions(max_records=6), jobs=1)
    return tmp_path / "split"


def test_all_splits_are_repaired(split: Path, new: Path, tmp_path: Path) -> None:
    copy(split, tmp_path / "other")
    before = content(split)
    repair(split, new, jobs=1)
    assert content(new) == before
    shutil.rmtree(new)
    change(shard_paths(split / "val")[1], flip(100, 101))
    done = repair(split, new, jobs=1)
    assert [one.field for one in done.lost] == [None] and [*done.versions] == ["val"]
    assert len(api.open(new / "train", decode=None)) == 12
    assert len(api.open(new / "val", decode=None)) == 11
    assert verify(new, sha256=True, jobs=1).damages == []
    shutil.rmtree(new)
    repair(split, new, copy=tmp_path / "other", jobs=1)
    assert content(new) == before


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_the_file_of_the_splits_is_made_anew(damage: str, split: Path, new: Path) -> None:
    before = content(split)
    if damage == "missing":
        os.remove(split / "shardio.json")
    else:
        change(split / "shardio.json", flip(30))
    done = repair(split, new, jobs=1)
    assert content(new) == before and "names the splits" in str(done)


# --- refusals -------------------------------------------------------------------------------------


def test_what_is_there_is_never_written_over(out: Path, new: Path) -> None:
    new.mkdir()
    (new / "mine").write_text("x")
    with pytest.raises(ExistsError, match="mine is in it"):
        repair(out, new)
    assert content(new) == {b"mine": b"x"}
    other = shutil.copytree(out, new.parent / "other")
    own_unplanned(str(other), bytes(16)).release()  # as a change that was killed leaves it
    before = content(other)
    with pytest.raises(ExistsError, match="is not empty"):
        repair(out, other)
    assert content(other) == before
    for inside in (out, out / "new"):
        with pytest.raises(OptionError, match="it lies in a dataset that is read"):
            repair(out, inside)


def test_what_is_no_packed_dataset_is_said(tars: Path, new: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"files of others \(webdataset\).*shardio index"):
        repair(tars, new)
    with pytest.raises(NotPackedError):
        repair(tmp_path / "missing", new)
    assert not new.exists()


def test_a_forged_count_of_records_is_refused(out: Path, new: Path) -> None:
    one = manifest.load(locate(out))
    counts = one.shard_records.copy()
    counts[1] = 4_000_000_000
    (out / "manifest.json").write_bytes(replace(one, shard_records=counts, digest="").dump())
    with pytest.raises(DamageError, match="cannot have so many records"):
        repair(out, new)
    assert not new.exists()


def test_a_killed_repair_leaves_no_dataset_and_begins_anew(
    whole: Path, out: Path, new: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.remove(shard_paths(out)[2])
    done, seen = module.run, []

    def killed(*given: Any, **more: Any) -> Iterator[Any]:
        for one in done(*given, **more):
            seen.append(one)
            if len(seen) == 3:
                raise KeyboardInterrupt
            yield one

    monkeypatch.setattr(module, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        repair(out, new, jobs=1)
    with pytest.raises(NotPackedError):
        api.open(new)
    with pytest.raises(ExistsError):  # another one does not go on with it
        pack(source, new.parent / "other", jobs=1)
        repair(new.parent / "other", new, jobs=1)
    monkeypatch.undo()
    repair(out, new, jobs=1)
    check(whole, new, range(16))
    assert not [name for name in os.listdir(new) if name.startswith(".shardio")]
    with pytest.raises(ExistsError):
        repair(out, new, jobs=1)


def test_of_two_at_once_one_is_told(out: Path, new: Path) -> None:
    new.mkdir()
    program = (
        "import sys; from shardio.packing.output_dir import own_unplanned as own\n"
        "own(sys.argv[1], bytes(16)); print('owned', flush=True); sys.stdin.read()"
    )

    with subprocess.Popen(
        [sys.executable, "-c", program, str(new)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    ) as other:
        assert other.stdout and other.stdin
        other.stdout.readline()
        with pytest.raises((BusyError, ExistsError)):
            repair(out, new)
        other.stdin.close()


# --- at the terminal ------------------------------------------------------------------------------


def test_exit_codes_and_what_is_said(whole: Path, out: Path, new: Path, tmp_path: Path) -> None:
    change(shard_paths(out)[0], flip(places(whole)[0][3][0] + 40))
    said = shardio("repair", out, new, "--jobs", "1", code=4).stdout
    assert (
        f"{new}: 23 records in 3 shards" in said and "1 record lost, listed in lost.jsonl" in said
    )
    facts = shardio_json("repair", out, tmp_path / "b", "--jobs", "1", code=4)
    assert facts["lost"][0]["record"] == 3 and facts["records"] == 23 and not facts["same"]
    again = shardio("repair", out, tmp_path / "c", "--from", whole, "--jobs", "1").stdout
    assert "24 records in 3 shards" in again and "1 taken from the copy" in again
    assert "is not empty" in shardio("repair", out, new, code=1).stderr
    code, seen = on_a_terminal("verify", out)
    assert code == 3 and "`shardio repair OUT NEW` saves the rest" in seen


def test_training_goes_over_what_is_left(whole: Path, out: Path, new: Path) -> None:
    change(shard_paths(out)[0], cut(2500))
    repair(out, new, jobs=1)
    kept = survivors(whole, out)
    data = ShardDataset(new, batch_size=1, fields=("label",), decode=None, tail="exact")
    assert len(list(data)) == len(kept)
    reader = data.reader.shard(0)
    assert isinstance(reader, RecordShard) and len(reader.erased) == 24 - len(kept)
    assert np.array_equal(reader.erased, [at for at in range(8) if at not in kept])
    assert type(reader.columns["label"]) is np.ndarray  # and not one with places that are None
