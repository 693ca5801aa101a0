"""Compacting: the shards of what was packed at once, and no version, drop or value is lost."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import small_datasets
from support.packing import grouped
from support.trees import content, images, noise, picture, plant, shardio, shardio_json, shards
from torch.utils.data import DataLoader

import shardio as api
from shardio import (
    BusyError,
    DamageError,
    ExistsError,
    NotPackedError,
    OptionError,
    ShardDataset,
    SourceOptions,
    StateError,
    StorageError,
    Writer,
    explain,
    pack,
    unpack,
    verify,
)
from shardio.formats import manifest
from shardio.packing import compact as compacting
from shardio.packing.annotate import annotate
from shardio.packing.append import append
from shardio.packing.commit import commit
from shardio.packing.compact import Compacted, compact
from shardio.packing.copy import copy
from shardio.packing.drop import drop
from shardio.packing.gc import gc
from shardio.packing.journal import WORK
from shardio.packing.update import update
from shardio.packing.versions import changing, diff, log, restore, tag
from shardio.storage import local
from shardio.storage.location import locate

Tree = dict[str | bytes, bytes | None]


def samples(folder: Path, version: str | None = None) -> dict[str, dict[str, Any]]:
    data = api.open(folder, version=version, decode=None)
    return {one["__key__"]: one for one in data}


def newest(folder: Path) -> manifest.Manifest:
    return manifest.load(locate(folder))


def same_shards(one: Path, other: Path) -> bool:
    """Whether the newest versions of two datasets have the same shards, byte for byte."""
    names = [[a.shard(i).name for i in range(a.shards)] for a in map(newest, (one, other))]
    return names[0] == names[1] and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names[0]
    )


def grown(folder: Path, whole: Tree, **options: Any) -> Path:
    """A dataset that was packed of a part, and got the rest by appends; two more were dropped."""
    parts: list[Tree] = [{}, {}, {}]
    for i, (key, data) in enumerate(whole.items()):
        parts[i % 3][key] = data
    parts[0]["class1/gone.jpg"] = picture(31, 30)
    parts[2]["class1/also gone.jpg"] = picture(33, 30)
    out = folder / "out"
    pack(plant(folder / "0", parts[0]), out, jobs=1, **grouped(options))
    for i in (1, 2):
        append(plant(folder / str(i), parts[i]), out, jobs=1)
    drop(out, keys=["class1/gone.jpg", "class1/also gone.jpg"])
    return out


@pytest.fixture
def small(out: Path, tmp_path: Path) -> Path:
    """`out` after four appends of two records each, two of which were dropped: 24 + 6 records."""
    for i in range(4):
        names = [f"class{i % 3}/n{i}{j}.jpg" for j in range(2)]
        tree = {name: noise(name, 300) for name in names}
        append(plant(tmp_path / f"more{i}", tree), out, jobs=1)
    drop(out, keys=["class0/n00.jpg", "class2/001.jpg"])
    return out


# --- what it leaves -------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_records": 5},
        {"max_records": 5, "seed": 3, "format": "lmdb"},
        {"shuffle": False, "max_records": 5},
        {"shard_size": 2000},
    ],
    ids=str,
)
def test_the_shards_are_those_of_a_packing_at_once(
    tmp_path: Path, options: dict[str, Any], jobs: int
) -> None:
    whole = images(4, 6)
    out = grown(tmp_path, whole, **options)
    before, old = samples(out), newest(out)
    done = compact(out, jobs=jobs)
    pack(plant(tmp_path / "whole", whole), tmp_path / "at once", jobs=1, **grouped(options))
    assert same_shards(out, tmp_path / "at once")
    now, other = newest(out), newest(tmp_path / "at once")
    assert (now.dataset_id, now.options) == (other.dataset_id, other.options)
    assert (now.blob_bytes, now.excluded) == (other.blob_bytes, None)
    assert samples(out) == before
    assert (done.records, done.left_out, done.old_shards) == (24, 2, old.shards)
    assert (done.shards, done.bytes) == (now.shards, now.size)
    assert verify(out, sha256=True).damages == []
    assert not (out / WORK).exists() and not list(out.glob(".shardio*"))
    unpack(out, tmp_path / "files")
    assert content(tmp_path / "files") == content(tmp_path / "whole")


@pytest.mark.parametrize("shuffle", [True, False])
def test_records_of_tables_lie_as_in_a_packing_at_once(tmp_path: Path, shuffle: bool) -> None:
    """The id is another one, since it has a hash of the table."""
    tree = {f"class{i % 2}/{i:02d}.jpg": noise(f"{i}", 300) for i in range(18)}
    plant(tmp_path / "files", tree)
    rows = [f"{key},{key.split('/')[0]},{i / 2},text {i}" for i, key in enumerate(sorted(tree))]

    def table(name: str, chosen: list[str]) -> Path:
        path = tmp_path / name
        path.write_text("\n".join(["path,label,score,caption", *chosen]))
        return path

    read, plan = (
        SourceOptions(root=tmp_path / "files"),
        api.PlanOptions(shuffle=shuffle, max_records=4),
    )
    call: dict[str, Any] = {"read": read, "plan": plan, "jobs": 1}
    pack(table("0.csv", rows[1::3] + rows[::3]), tmp_path / "out", **call)
    append(table("1.csv", rows[2::3]), tmp_path / "out", read=read, jobs=1)
    pack(table("all.csv", rows), tmp_path / "at once", **call)
    compact(tmp_path / "out", jobs=1)
    one, other = (api.open(tmp_path / name, decode=None) for name in ("out", "at once"))
    assert [*one] == [*other]
    bounds = [of.manifest.shard_records.tolist() for of in (one, other)]
    assert bounds == [[4, 4, 4, 4, 2]] * 2
    assert one.manifest.dataset_id != other.manifest.dataset_id
    append(table("2.csv", rows[:1]), tmp_path / "out", read=read, jobs=1, on_duplicate="replace")
    assert [(one.records, one.already) for one in (compact(tmp_path / "out", jobs=1),)] == [
        (18, False)
    ]


def test_sizes_of_shards_that_nobody_asked_for_are_those_of_all_records(tmp_path: Path) -> None:
    def tree(name: str, count: int) -> Tree:
        return {f"{name}/{i:03d}.jpg": noise(f"{name}{i}", 1 << 18) for i in range(count)}

    out = tmp_path / "out"
    pack(plant(tmp_path / "a", tree("a", 4)), out, jobs=1)
    append(plant(tmp_path / "b", tree("b", 76)), out, jobs=1)
    assert newest(out).options["shard_size"] == 1 << 20
    appended = newest(out).version_id
    compact(out, jobs=2)
    restore(out, appended)
    compact(out, jobs=1)
    whole = plant(tmp_path / "whole", {**tree("a", 4), **tree("b", 76)})
    pack(whole, tmp_path / "at once", jobs=1)
    assert newest(out).options["shard_size"] > 1 << 20
    assert same_shards(out, tmp_path / "at once")
    assert compact(out).already
    asked = compact(out, shard_size="8MiB")
    assert asked.shards == 3
    assert compact(out).already  # of the size that was asked for


@pytest.mark.parametrize(
    "options",
    [
        {"resize": 16},
        {"resize": 16, "encode": "raw"},
        {"jpeg_tiles": True},
        {"jpeg_tiles": True, "keep_original": True},
    ],
    ids=str,
)
def test_images_that_packing_changed_keep_their_bytes(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {f"c{i % 2}/{i:02d}.jpg": picture(235 + i, 177) for i in range(9)}
    out = grown(tmp_path, {**whole, "c0/a.png": picture(20, 20, "PNG")}, max_records=4, **options)
    before, old = samples(out), newest(out).options
    monkeypatch.setattr("shardio.packing.build_shard.reencode", None)  # is not called
    compact(out, jobs=1)
    assert samples(out) == before
    assert newest(out).options == {
        **old,
        **({"tiles": 9} if "jpeg_tiles" in options else {}),
        "shard_size": newest(out).options["shard_size"],
    }
    assert compact(out).already
    assert verify(out).damages == []


def test_what_a_program_wrote_stays_in_its_order(tmp_path: Path) -> None:
    def sample(i: int) -> dict[str, Any]:
        return {"__key__": f"{(7 * i) % 31:02d}", "vector": np.full(3, i), "label": i % 2}

    for begin in (0, 10, 20):
        with Writer(
            tmp_path / "out", append=begin > 0, classes=None if begin else ["a", "b"]
        ) as writer:
            for i in range(begin, begin + 10):
                writer.write(sample(i))
    assert compact(tmp_path / "out", jobs=1).shards == 1
    data = api.open(tmp_path / "out", decode=None)
    assert [one["vector"][0] for one in data] == [*range(30)]
    assert data.keys() == [sample(i)["__key__"] for i in range(30)]
    assert compact(tmp_path / "out").already


def test_several_records_of_one_key_stay(tmp_path: Path) -> None:
    def sample(i: int) -> dict[str, Any]:
        return {"__key__": b"k/%d" % (i % 3), "image": noise(f"{i}", 300), "label": i}

    out = small_datasets.make(tmp_path / "out", [5, 5, 3], sample=sample, classes=None)
    options = {"source": "dataset", "shuffle": True, "seed": 0, "shard_size": 2000}
    (out / "manifest.json").write_bytes(replace(newest(out), options=options, digest="").dump())
    drop(out, where={"label": 3})
    compact(out, jobs=1)
    data = api.open(out, decode=None)
    assert sorted(data.targets.tolist()) == [0, 1, 2, *range(4, 13)]
    assert all(one["image"] == noise(f"{one['label']}", 300) for one in data)
    assert compact(out).already
    assert diff(out, log(out).versions[2].id).dropped == ["k/0"]


def test_an_epoch_has_each_record_once(small: Path) -> None:
    keys = sorted(samples(small))
    compact(small, jobs=1)
    data = ShardDataset(small, batch_size=5, decode=None, tail="exact")
    rows = [
        key
        for one in DataLoader(data, batch_size=None, num_workers=2)
        for key, valid in zip(one["__key__"], one["valid"], strict=True)
        if valid
    ]
    assert sorted(rows) == keys and len(keys) == 30


def test_all_splits_are_compacted(tmp_path: Path) -> None:
    def tree(name: str, letters: str) -> Tree:
        return {
            f"{s}/{c}/{name}.jpg": noise(s + c + name, 300)
            for s in ("train", "val")
            for c in letters
        }

    out = tmp_path / "out"
    pack(plant(tmp_path / "0", tree("0", "ab")), out, jobs=1)
    more = {**tree("1", "ab"), "train/c/new.jpg": noise("new", 300)}
    append(plant(tmp_path / "1", more), out, jobs=1)
    before = (out / "shardio.json").read_bytes()
    done = compact(out, jobs=1)
    assert sorted(done.versions) == ["train", "val"] and (done.records, done.shards) == (9, 2)
    pack(plant(tmp_path / "whole", {**tree("0", "ab"), **more}), tmp_path / "at once", jobs=1)
    for split in ("train", "val"):
        assert same_shards(out / split, tmp_path / "at once" / split)
    assert (out / "shardio.json").read_bytes() == before
    drop(out / "val", keys=["a/0.jpg"])
    again = compact(out, jobs=1)
    assert [*again.versions] == ["val"] and again.records == 8
    assert compact(out).already


def test_compacting_again_does_nothing(small: Path) -> None:
    first = compact(small, jobs=1)
    before = content(small)
    again = compact(small, jobs=1)
    assert again.already and again.versions == {} and content(small) == before
    assert str(again).endswith("compact already; nothing was done")
    assert (again.records, again.shards, again.bytes) == (first.records, first.shards, first.bytes)


def test_what_was_only_packed_is_compact(out: Path) -> None:
    before = content(out)
    assert compact(out).already and content(out) == before


def test_a_dry_run_changes_nothing(small: Path) -> None:
    before = content(small)
    told = compact(small, dry_run=True)
    assert content(small) == before
    done = compact(small, jobs=1)
    assert (told.records, told.shards, told.left_out) == (done.records, done.shards, done.left_out)
    assert told.versions == {} and "would be compacted: 10 shards" in str(told)


def test_a_dataset_without_records_is_compacted_to_nothing(out: Path) -> None:
    drop(out, keys=[*samples(out)])
    done = compact(out, jobs=1)
    assert (done.records, done.shards, len(api.open(out))) == (0, 0, 0)
    assert len(samples(out, log(out).versions[-1].id)) == 24


# --- what is beside the shards --------------------------------------------------------------------


@pytest.mark.parametrize("format", ["record", "lmdb"])
def test_annotated_values_stay_beside_the_shards(tmp_path: Path, format: str) -> None:
    whole = images(4, 6)
    out = grown(tmp_path, whole, max_records=5, format=format)
    keys = [*samples(out)]
    annotate(out, {key: {"score": i / 2} for i, key in enumerate(keys)})
    annotate(out, {key: {"label": 0, "score": None} for key in keys[:3]})
    annotate(out, {keys[1]: {"caption": "a cat"}, keys[5]: {"caption": None}}, missing="none")
    annotate(out, np.arange(48, dtype=np.float32).reshape(24, 2), fields="clip")
    before, old = samples(out), newest(out)
    compact(out, jobs=1)
    after = samples(out)
    for key, one in before.items():
        assert {**one, "clip": one["clip"].tolist()} == {
            **after[key],
            "clip": after[key]["clip"].tolist(),
        }
    pack(
        plant(tmp_path / "whole", whole),
        tmp_path / "at once",
        jobs=1,
        **grouped({"max_records": 5, "format": format}),
    )
    assert same_shards(out, tmp_path / "at once")
    now = newest(out)
    assert (
        now.schema.fields == old.schema.fields
        and now.stored_schema.fields == old.stored_schema.fields
    )
    files = {one.field: one.files for one in now.overlays}
    assert [*files] == [one.field for one in old.overlays]
    assert sum(info.records for some in files["label"].values() for info in some) == 3
    assert all(len(some) == 1 for of in files.values() for some in of.values())
    assert verify(out, sha256=True).damages == []
    annotate(out, {keys[0]: {"score": 7.0}})
    assert samples(out)[keys[0]]["score"] == 7.0
    more = plant(tmp_path / "more", {"class1/new.jpg": noise("new", 300)})
    append(more, out, jobs=1)  # which has no such fields
    assert samples(out)["class1/new.jpg"]["clip"] is None


def test_many_values_are_carried_in_parts(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compacting, "VALUES", 3)
    annotate(small, {key: {"caption": f"of {key}"} for key in samples(small)})
    compact(small, jobs=1)
    assert {key: one["caption"] for key, one in samples(small).items()} == {
        key: f"of {key}" for key in samples(small)
    }


def test_values_of_dropped_records_alone_are_gone(out: Path) -> None:
    keys = [*samples(out)]
    annotate(out, {keys[0]: {"label": 2}})
    annotate(out, {keys[0]: {"caption": "x"}}, missing="none")
    drop(out, keys=keys[:1])
    compact(out, jobs=1)
    assert [(one.field, one.files) for one in newest(out).overlays] == [("caption", {})]
    assert {one["caption"] for one in samples(out).values()} == {None}
    assert verify(out).damages == []


def test_update_knows_files_by_size_and_time_as_before(
    source: Path, out: Path, tmp_path: Path
) -> None:
    update(source, out, jobs=1)
    plant(source, {"class1/new.jpg": noise("new", 300)})
    (source / "class0" / "001.jpg").unlink()
    update(source, out, jobs=1)
    compact(out, jobs=1)
    same = update(source, out, jobs=1)
    assert (same.unchanged, same.compared, same.new, same.gone) == (24, 0, 0, 0)
    (source / "class2" / "003.jpg").write_bytes(noise("another", 999))
    assert update(source, out, jobs=1).changed == 1
    assert samples(out)["class2/003.jpg"]["image"] == noise("another", 999)


# --- versions -------------------------------------------------------------------------------------


def test_older_versions_are_read_compared_and_gone_back_to(small: Path) -> None:
    before = {one.id: samples(small, one.id) for one in log(small).versions}
    tag(small, "before")
    compact(small, jobs=1)
    first, *others = log(small).versions
    assert (first.command, first.changes, first.records) == ("compact", {"left out": 2}, 30)
    assert {one.id: samples(small, one.id) for one in others} == before
    same = diff(small, "before")
    assert (same.added, same.dropped, same.changed, same.fields) == ([], [], [], [])
    since = diff(small, others[-1].id)
    assert since.dropped == ["class2/001.jpg"] and len(since.added) == 7
    back = diff(small, first.id, others[-1].id)
    assert (back.added, back.dropped) == (since.dropped, since.added)
    assert restore(small, "before").versions[0].changes == {}
    assert samples(small) == before[others[0].id]
    assert restore(small, others[-1].id).versions[0].records == 24
    assert samples(small) == before[others[-1].id]
    restore(small, first.id)
    assert len(samples(small)) == 30 and verify(small).damages == []
    assert len(log(small).versions) == len(others) + 4


def test_what_changed_besides_is_found_across_a_compaction(small: Path) -> None:
    keys = [*samples(small)]
    old = log(small).versions[0].id
    compact(small, jobs=1)
    annotate(small, {keys[0]: {"label": 2}, keys[1]: {"label": samples(small)[keys[1]]["label"]}})
    drop(small, keys=keys[2:3])
    found = diff(small, old)
    assert (found.added, found.dropped, found.fields) == ([], keys[2:3], ["label"])
    assert found.changed == ([keys[0]] if samples(small, old)[keys[0]]["label"] != 2 else [])


def test_gc_removes_the_old_shards_with_their_versions(small: Path) -> None:
    compact(small, jobs=1)
    before = samples(small)
    assert gc(small, keep_s=0).removed == []
    gc(small, keep_s=0, keep_versions=1)
    own = newest(small)
    assert sorted(path.name for path in shards(small)) == [
        own.shard(i).name for i in range(own.shards)
    ]
    assert samples(small) == before and len(log(small).versions) == 1
    assert verify(small).damages == []


def test_dropped_records_are_in_no_file_once_older_versions_are_gone(small: Path) -> None:
    gone = ["class0/n00.jpg", "class2/001.jpg"]
    compact(small, jobs=1)
    assert len(verify(small, dropped=gone).damages) >= 2
    gc(small, keep_s=0, keep_versions=1)
    assert verify(small, dropped=gone).damages == []


def test_erased_records_stay_erased(small: Path) -> None:
    keys = [*samples(small)]
    packed = log(small).versions[-1].id
    drop(small, keys=keys[:2], erase=True)
    erased = log(small).versions[0].id
    assert compact(small, jobs=1).left_out == 2
    for _ in range(2):
        assert samples(small, erased).keys() == samples(small).keys() == {*keys[2:]}
        with pytest.raises(OptionError, match="were erased since"):
            api.open(small, version=packed)
        gc(small, keep_s=0)
    assert verify(small, dropped=keys[:2]).damages == []
    drop(small, keys=keys[2:3], erase=True)
    assert samples(small).keys() == {*keys[3:]}


def begun(out: Path, **options: Any) -> tuple[dict[str, Any], list[list[str]]]:
    """The state after two batches of an epoch, and the keys of the batches that follow."""
    data = ShardDataset(out, batch_size=4, decode=None, **options)
    rows = iter(data)
    next(rows), next(rows)
    return data.state_dict(), [one["__key__"] for one in rows]


def rest(out: Path, state: dict[str, Any], **options: Any) -> list[list[str]]:
    data = ShardDataset(out, batch_size=4, decode=None, **options)
    data.load_state_dict(state)
    return [one["__key__"] for one in data]


@pytest.mark.parametrize("options", [{}, {"where": {"label": [0, 1]}}])
def test_states_go_on_in_their_version(out: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    packed = begun(out, **options)
    append(plant(tmp_path / "more", {"class1/n.jpg": noise("n", 300)}), out, jobs=1)
    appended = begun(out, **options)
    compact(out, jobs=1)
    own = begun(out, **options)
    assert rest(out, own[0], **options) == own[1]
    for state, expected in (packed, appended):
        with pytest.warns(UserWarning, match="goes on with the state's version"):
            assert rest(out, state, **options) == expected
    restore(out, log(out).versions[1].id)
    with pytest.warns(UserWarning, match="is of version"):
        assert rest(out, own[0], **options) == own[1]
    compact(out, jobs=1)
    gc(out, keep_s=0, keep_versions=1)
    id_of = newest(out).dataset_id.hex()
    for state, _ in (packed, appended):
        with pytest.raises(StateError, match=f"{state['dataset']}.*this one is '{id_of}@"):
            rest(out, state, **options)


def test_states_of_another_dataset_are_refused(small: Path, tmp_path: Path) -> None:
    pack(plant(tmp_path / "o", images(2, 9)), tmp_path / "other", jobs=1)
    state, _ = begun(tmp_path / "other")
    compact(small, jobs=1)
    with pytest.raises(StateError, match="another dataset"):
        rest(small, state)


def test_open_readers_go_on(small: Path) -> None:
    data = api.open(small, decode=None)
    before = [one["image"] for one in data]
    rows = iter(ShardDataset(small, batch_size=4, decode=None))
    seen = [next(rows)["__key__"]]
    compact(small, jobs=1)
    assert [one["image"] for one in data] == before
    seen += [one["__key__"] for one in rows]
    assert sorted(key for keys in seen for key in keys)[-1] and len(seen) == 8


def test_what_comes_later_goes_on_from_it(small: Path, tmp_path: Path) -> None:
    compact(small, jobs=1)
    tree = {f"class1/x{i}.jpg": noise(f"x{i}", 300) for i in range(3)}
    append(plant(tmp_path / "later", tree), small, jobs=1)
    drop(small, keys=["class1/x0.jpg"])
    compact(small, jobs=1)
    before = samples(small)
    assert len(before) == 32
    copy(small, tmp_path / "copied")
    assert samples(tmp_path / "copied") == before
    with Writer(small, append=True) as writer:
        writer.write({"__key__": "own", "image": noise("own", 300), "label": 0})
    copy(small, tmp_path / "copied", overwrite=True)
    assert len(samples(tmp_path / "copied")) == 33
    assert verify(small, sha256=True).damages == []


def test_explain_names_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(plant(tmp_path / "0", images(3, 8)), out, jobs=1)
    for i in range(40):
        with Writer(out, append=True) as writer:
            writer.write({"__key__": f"{i}", "image": noise(f"{i}", 300), "label": 0})

    def told() -> list[str]:
        return [
            one.mend for one in explain(out, batch_size=4).warnings if one.code == "small_shards"
        ]

    assert ["`shardio compact`" in one for one in told()] == [True]
    assert compact(out, jobs=1).shards == 1
    assert told() == []


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shard_size": 0}, "shard_size"),
        ({"shard_size": "many"}, "shard_size"),
        ({"jobs": 0}, "jobs"),
        ({"dry_run": 1}, "dry_run"),
        ({"restart": "yes"}, "restart"),
    ],
)
def test_wrong_options_are_named(small: Path, options: Any, said: str) -> None:
    before = content(small)
    with pytest.raises(OptionError, match=said):
        compact(small, **options)
    assert content(small) == before


def test_files_of_others_in_place_are_refused(tars: Path) -> None:
    before = content(tars)
    with pytest.raises(OptionError, match="which shardio never changes: pack them"):
        compact(tars)
    assert content(tars) == before


def test_where_there_is_no_room_nothing_is_written(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        f_bavail, f_frsize, f_blocks = 1, 512, 1000

    before = content(small)
    monkeypatch.setattr(os, "statvfs", lambda _: Full())
    with pytest.raises(StorageError, match="are to be written, and 512 B are free") as raised:
        compact(small, jobs=1)
    assert content(small) == before
    vectors = np.zeros((30, 10_000), np.float32)
    monkeypatch.undo()
    annotate(small, vectors, fields="clip")
    monkeypatch.setattr(os, "statvfs", lambda _: Full())
    with pytest.raises(StorageError, match=r"1\.2 MiB are to be written"):
        compact(small, jobs=1)
    assert "KiB are to be" in str(raised.value)


def test_a_damaged_record_is_named_and_nothing_is_committed(small: Path) -> None:
    key = "class1/n10.jpg"
    data, path = api.open(small, decode=None), None
    shard, record = data.reader.locate(data.reader.number(data.find(key)))
    path = small / newest(small).shard(shard).name
    damaged = bytearray(path.read_bytes())
    damaged[data.reader.shard(shard).offset(record) + 60] ^= 1
    path.write_bytes(damaged)
    version = newest(small).version_id
    with pytest.raises(
        DamageError, match=rf"(?s)1 record cannot be read:\n.*{key}.*checksum is.*drop"
    ):
        compact(small, jobs=1)
    assert newest(small).version_id == version
    drop(small, keys=[key])
    assert compact(small, jobs=1).records == 29
    assert verify(small).damages == []


# --- interrupted, and at once ---------------------------------------------------------------------


def die_on(monkeypatch: pytest.MonkeyPatch, small: Path, dead: Callable[[int], None]) -> None:
    """Compact, and die before the third shard."""
    dead(2)
    with pytest.raises(KeyboardInterrupt):
        compact(small, jobs=1)
    monkeypatch.undo()


def test_an_interrupted_call_goes_on(
    small: Path, dead_on_shard: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = samples(small)
    die_on(monkeypatch, small, dead_on_shard)
    left = {path.name: os.stat(path).st_mtime_ns for path in (small / WORK).glob("*.shard")}
    assert len(left) == 2 and samples(small) == before
    gc(small, keep_s=0)
    compact(small, jobs=1)
    assert {name: os.stat(small / name).st_mtime_ns for name in left} == left
    assert samples(small) == before and not (small / WORK).exists()


def test_what_it_built_is_no_part_of_an_append(
    small: Path, dead_on_shard: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = samples(small)
    die_on(monkeypatch, small, dead_on_shard)
    with pytest.raises(NotPackedError, match="no append: a `shardio compact`, perhaps"):
        commit(small, jobs=1)
    compact(small, jobs=1)
    assert samples(small) == before


@pytest.mark.parametrize("change", ["drop", "append", "replace", "restore"])
def test_one_of_another_version_is_begun_anew(
    small: Path,
    tmp_path: Path,
    dead_on_shard: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    die_on(monkeypatch, small, dead_on_shard)
    if change == "drop":
        drop(small, keys=["class1/001.jpg"])
    elif change == "append":
        append(plant(tmp_path / "x", {"class1/x.jpg": noise("x", 300)}), small, jobs=1)
    elif change == "replace":  # by as many bytes
        tree = {key: noise(f"new {key}", 300) for key in samples(small)}
        append(plant(tmp_path / "x", tree), small, jobs=1, on_duplicate="replace")
    else:
        restore(small, log(small).versions[-1].id)
    expected = samples(small)
    compact(small, jobs=1)
    assert samples(small) == expected and not (small / WORK).exists()


def test_one_of_records_with_the_same_numbers_keys_and_sizes_is_begun_anew(
    out: Path, dead_on_shard: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def more(text: str) -> None:
        with Writer(out, append=True) as writer:
            for i in range(8):
                image = noise(f"{text}{i}", 300)
                writer.write({"__key__": f"class1/x{i}.jpg", "image": image, "label": 1})

    packed = newest(out).version_id
    more("some")
    die_on(monkeypatch, out, dead_on_shard)
    restore(out, packed)
    more("others")
    expected = samples(out)
    compact(out, jobs=1)
    assert samples(out) == expected


def test_an_unfinished_append_is_finished_first_or_dropped(
    small: Path,
    tmp_path: Path,
    dead_on_shard: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = {f"class1/x{i}.jpg": noise(f"x{i}", 300) for i in range(12)}
    more = plant(tmp_path / "x", tree)
    dead_on_shard(11)
    with pytest.raises(KeyboardInterrupt):
        append(more, small, jobs=1)
    monkeypatch.undo()
    before = content(small)
    with pytest.raises(ExistsError, match=r"unfinished `shardio append`.*--restart"):
        compact(small, jobs=1)
    assert content(small) == before
    assert compact(small, jobs=1, restart=True).records == 30
    assert append(more, small, jobs=1).added == 12


def test_an_append_drops_an_unfinished_compaction(
    small: Path,
    tmp_path: Path,
    dead_on_shard: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    die_on(monkeypatch, small, dead_on_shard)
    append(plant(tmp_path / "x", {"class1/x.jpg": noise("x", 300)}), small, jobs=1)
    assert len(samples(small)) == 31 and not (small / WORK).exists()


def test_a_damaged_journal_is_dropped_on_request(
    small: Path, dead_on_shard: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    die_on(monkeypatch, small, dead_on_shard)
    path = small / WORK / ".shardio-plan"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamageError, match="--restart"):
        compact(small, jobs=1)
    before = samples(small)
    compact(small, jobs=1, restart=True)
    assert samples(small) == before


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> None:
    """Do something once all shards are built, before these are committed."""

    def changing_after(folder: str) -> Any:
        monkeypatch.setattr(compacting, "changing", changing)
        act()
        return changing(folder)

    monkeypatch.setattr(compacting, "changing", changing_after)


def test_what_is_dropped_and_annotated_meanwhile_is_carried_over(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [*samples(small)]

    def act() -> None:
        drop(small, keys=keys[3:5])
        annotate(small, {keys[7]: {"caption": "new"}}, missing="none")

    meanwhile(monkeypatch, act)
    done = compact(small, jobs=1)
    found = samples(small)
    assert found.keys() == {*keys} - {*keys[3:5]} and found[keys[7]]["caption"] == "new"
    assert done.versions[""] == newest(small).version_id
    assert verify(small).damages == []
    compact(small, jobs=1)
    assert samples(small) == found and newest(small).excluded is None


@pytest.mark.parametrize("what", ["append", "erase", "restore"])
def test_anything_else_meanwhile_ends_it(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    gone = "class2/001.jpg"  # which was dropped before: the new shards have it not
    (tmp_path / "keys.txt").write_text(f"{gone}\n")

    def act() -> None:
        if what == "append":
            with Writer(small, append=True) as writer:
                writer.write({"__key__": "own", "image": noise("own", 300), "label": 0})
        elif what == "erase":
            shardio("drop", small, "--keys", tmp_path / "keys.txt", "--erase")  # another process
        else:
            restore(small, log(small).versions[1].id)  # brings dropped records back

    meanwhile(monkeypatch, act)
    with pytest.raises(BusyError, match="Nothing was committed: run it again"):
        compact(small, jobs=1)
    expected = samples(small)
    assert [one.command for one in log(small).versions].count("compact") == 0
    compact(small, jobs=1)
    assert samples(small) == expected
    if what == "erase":
        assert verify(small, dropped=[gone]).damages != []  # in the older shards
        gc(small, keep_s=0)
        assert verify(small, dropped=[gone]).damages == []


def test_a_record_that_it_has_is_not_erased_meanwhile(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, told = "class1/001.jpg", list[str]()
    (tmp_path / "keys.txt").write_text(f"{gone}\n")
    call = ("drop", small, "--keys", tmp_path / "keys.txt", "--erase")
    meanwhile(monkeypatch, lambda: told.append(shardio(*call, code=5).stderr))
    compact(small, jobs=1)
    assert "another shardio process is packing here" in told[0] and gone in samples(small)
    shardio(*call)
    gc(small, keep_s=0)
    assert verify(small, dropped=[gone]).damages == [] and gone not in samples(small)


def test_two_do_not_work_at_once(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = samples(small)
    with changing(str(small)), pytest.raises(BusyError):
        compact(small, jobs=1)

    def again() -> Compacted:
        with pytest.raises(BusyError):
            compact(small, jobs=1)
        return Compacted("")

    meanwhile(monkeypatch, again)
    compact(small, jobs=1)
    assert samples(small) == before


def test_a_full_disk_at_the_values_leaves_the_old_version(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    annotate(small, {key: {"caption": f"of {key}"} for key in samples(small)})
    before = samples(small)
    write, here = local.Draft.write, list[str]()

    def full(self: Any, data: bytes) -> None:
        here.extend([self.directory] if self.directory == str(small) else [])
        if len(here) == 2:  # the second file of values
            raise StorageError("No space left on device")
        write(self, data)

    monkeypatch.setattr(local.Draft, "write", full)
    with pytest.raises(StorageError, match="run the same command again"):
        compact(small, jobs=1)
    monkeypatch.undo()
    assert samples(small) == before
    assert len([*(small / WORK).glob("*.shard")]) == 8  # to be gone on with
    compact(small, jobs=1)
    assert samples(small) == before and verify(small).damages == []


# --- the command ----------------------------------------------------------------------------------


def test_the_command(small: Path) -> None:
    said = shardio("compact", small, "--dry-run").stdout
    assert "30 records would be compacted: 10 shards" in said
    found = shardio_json("compact", small, "--jobs", "1")
    assert (found["records"], found["left_out"], found["old_shards"]) == (30, 2, 10)
    assert found["versions"][""] == log(small).versions[0].id and not found["already"]
    assert "nothing was done" in shardio("compact", small).stdout
    assert "expected" in shardio("compact", small, "--shard-size", "x", code=2).stderr
    assert json.loads(shardio("log", small, "--json").stdout)["versions"][0]["command"] == "compact"
