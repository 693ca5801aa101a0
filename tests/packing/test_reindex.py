"""Files in place that are indexed again: what is new, changed and gone is a version."""

import importlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.object_stores import ObjectStore
from support.small_datasets import jpeg
from support.trees import content, images, noise, plant, shardio, shardio_json

import shardio as api
from shardio import (
    BusyError,
    OptionError,
    ShardDataset,
    SourceError,
    StateError,
    StorageError,
    export,
    verify,
)
from shardio.formats import manifest
from shardio.packing import reindex
from shardio.packing.annotate import annotate
from shardio.packing.copy import copy
from shardio.packing.drop import drop
from shardio.packing.gc import gc
from shardio.packing.index import index
from shardio.packing.pack import pack
from shardio.packing.versions import changing, diff, log, restore, tag
from shardio.storage.location import locate


def write_tar(path: Path, numbers: Any, other: bool = False) -> None:
    """A tar of images with labels; other: the images are others."""
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            image = jpeg(number + 1000 * other)
            for ending, data in (("jpg", image), ("cls", b"%d" % (number % 3))):
                member = tarfile.TarInfo(f"k/{number:04d}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


@pytest.fixture
def wds(tmp_path: Path) -> Path:
    """Three tars of 4 records: b, d and f, with an index."""
    folder = tmp_path / "wds"
    folder.mkdir()
    for at, name in enumerate("bdf"):
        write_tar(folder / f"{name}.tar", range(4 * at, 4 * at + 4))
    index(folder, jobs=1)
    return folder


def key(number: int) -> str:
    return f"k/{number:04d}"


def rows(folder: Path, **more: Any) -> dict[str, dict[str, Any]]:
    """All records by their keys, as a pass reads them, and as they lie."""
    data = api.open(folder, decode=None, **more)
    there = {one["__key__"]: one for one in data}
    assert len(there) == len(data)
    seen = [one["__key__"] for one in ShardDataset(folder, decode=None, shuffle_buffer=3, **more)]
    assert sorted(seen) == sorted(there)
    return there


def own(folder: Path) -> manifest.Manifest:
    return manifest.load(locate(folder))


def again(folder: Path, **more: Any) -> Any:
    """Index again; all is as it should be then, and nothing is left to do."""
    done = index(folder, jobs=1, **more)
    assert verify(folder, sha256=True).damages == []
    before = content(folder)
    assert index(folder, jobs=1).version == "" and content(folder) == before
    return done


def test_what_is_new_changed_and_gone_is_a_version(wds: Path) -> None:
    first = own(wds)
    write_tar(wds / "a.tar", range(20, 22))
    write_tar(wds / "d.tar", [4, 5, 30])
    (wds / "f.tar").unlink()
    done = again(wds)
    assert (done.new, done.changed, done.gone) == (["a.tar"], ["d.tar"], ["f.tar"])
    assert (done.unchanged, done.records, done.shards, done.compared) == (1, 9, 3, 1)
    now = own(wds)
    assert now.names == ("a.tar", "b.tar", "d.tar") and now.dataset_id == first.dataset_id
    assert [*rows(wds)] == [key(n) for n in (20, 21, 0, 1, 2, 3, 4, 5, 30)]
    assert all(one["image"] == jpeg(int(name[2:])) for name, one in rows(wds).items())
    assert done.version == now.version_id and now.commit is not None
    assert now.commit.command == "index" and now.commit.parent == first.version_id
    assert now.commit.changes == {"added": 2, "changed": 3, "removed": 4}


def test_it_equals_an_index_that_is_made_at_once(wds: Path, tmp_path: Path) -> None:
    write_tar(wds / "a.tar", range(20, 22))
    write_tar(wds / "d.tar", [4, 5, 30])
    shutil.copytree(wds, tmp_path / "fresh")
    again(wds)
    index(tmp_path / "fresh", overwrite=True, jobs=1)
    assert [*rows(wds).values()] == [*rows(tmp_path / "fresh").values()]
    one, other = own(wds), own(tmp_path / "fresh")
    assert (one.schema.fields, one.names) == (other.schema.fields, other.names)
    assert one.shard_sha256.tolist() == other.shard_sha256.tolist()


def test_nothing_new_commits_nothing(wds: Path) -> None:
    before = content(wds)
    done = index(wds, jobs=1)
    assert (done.new, done.changed, done.gone, done.unchanged) == ([], [], [], 3)
    assert (done.version, done.compared) == ("", 3) and content(wds) == before
    assert "all is as it was; the version stays" in str(done)


def test_times_are_noted_with_a_version_and_contents_compared_where_they_differ(wds: Path) -> None:
    write_tar(wds / "g.tar", [40])
    assert index(wds, jobs=1).compared == 3  # none were noted before
    assert index(wds, jobs=1).compared == 0
    assert index(wds, jobs=1, checksum=True).compared == 4
    os.utime(wds / "b.tar")
    done = index(wds, jobs=1)
    assert (done.compared, done.unchanged, done.version) == (1, 4, "")
    status = os.stat(wds / "b.tar")
    data = bytearray((wds / "b.tar").read_bytes())
    at = data.index(jpeg(1)[40:60])
    data[at] ^= 1
    (wds / "b.tar").write_bytes(data)
    os.utime(wds / "b.tar", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert again(wds).changed == ["b.tar"]
    data[at] ^= 1
    (wds / "b.tar").write_bytes(data)
    os.utime(wds / "b.tar", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert index(wds, jobs=1).version == ""  # size and time are as they were noted
    assert index(wds, jobs=1, checksum=True).changed == ["b.tar"]


def test_a_dry_run_changes_nothing(wds: Path, tmp_path: Path) -> None:
    write_tar(wds / "a.tar", [20])
    before = content(wds)
    done = index(wds, jobs=1, dry_run=True)
    assert (done.new, done.version) == (["a.tar"], "") and content(wds) == before
    assert "since this is a dry run" in str(done)
    plain = tmp_path / "plain"
    plain.mkdir()
    write_tar(plain / "a.tar", [20])
    with pytest.raises(OptionError, match="no index is here yet"):
        index(plain, jobs=1, dry_run=True)
    assert [*content(plain)] == [b"a.tar"]


# --- dropped and annotated ------------------------------------------------------------------------


def test_what_was_dropped_stays_dropped(wds: Path) -> None:
    drop(wds, keys=[key(n) for n in (1, 5, 6, 9)])
    write_tar(wds / "a.tar", [20])  # all others move
    write_tar(wds / "d.tar", [30, 6, 4, 31, 5], other=True)  # dropped are 5 and 6
    (wds / "f.tar").rename(wds / "z.tar")  # dropped is 9
    done = again(wds)
    assert done.dropped == 3
    assert [*rows(wds)] == [key(n) for n in (20, 0, 2, 3, 30, 4, 31, 8, 10, 11)]
    assert rows(wds)[key(4)]["image"] == jpeg(1004)


def test_it_stays_dropped_in_a_file_that_was_gone_for_a_while(wds: Path, tmp_path: Path) -> None:
    drop(wds, keys=[key(5)])
    annotate(wds, {key(4): {"caption": "four"}}, missing="none")
    shutil.move(wds / "d.tar", tmp_path / "d.tar")
    assert again(wds).records == 8
    write_tar(wds / "g.tar", [50])
    again(wds)
    shutil.move(tmp_path / "d.tar", wds / "d.tar")
    done = again(wds)
    assert (done.new, done.dropped) == (["d.tar"], 1)
    assert key(5) not in rows(wds) and rows(wds)[key(4)]["caption"] == "four"


def test_what_was_annotated_stays_with_its_records(wds: Path) -> None:
    annotate(wds, {key(n): {"caption": f"of {n}", "score": n / 2} for n in range(12)})
    annotate(wds, {key(n): {"label": (n + 1) % 3} for n in (0, 5, 6)})
    annotate(wds, {key(3): {"caption": "again"}})
    write_tar(wds / "a.tar", [20])
    write_tar(wds / "d.tar", [30, 6, 4, 31, 5], other=True)  # without 7
    done = again(wds)
    assert done.lost == 1 and "1 annotated record not found any more" in str(done)
    found = rows(wds)
    for number in (0, 1, 2, 4, 5, 6, 8, 11):
        one = found[key(number)]
        assert (one["caption"], one["score"]) == (f"of {number}", number / 2)
        assert one["label"] == (number + (number in (0, 5, 6))) % 3
    assert found[key(3)]["caption"] == "again"
    for number in (20, 30, 31):
        assert found[key(number)]["caption"] is found[key(number)]["score"] is None
    gc(wds, keep_s=0, keep_versions=1)
    assert rows(wds) == found
    annotate(wds, {key(20): {"caption": "new"}})
    assert rows(wds)[key(20)]["caption"] == "new" and rows(wds)[key(5)]["caption"] == "of 5"


def test_records_that_move_to_another_file_are_found_by_their_keys(wds: Path) -> None:
    drop(wds, keys=[key(4)])
    annotate(wds, {key(5): {"caption": "five"}}, missing="none")
    write_tar(wds / "d.tar", [6, 7])
    write_tar(wds / "e.tar", [4, 5])
    done = again(wds)
    assert (done.dropped, done.lost) == (1, 0)
    assert key(4) not in rows(wds) and rows(wds)[key(5)]["caption"] == "five"


@pytest.fixture
def tfrecords(out: Path, tmp_path: Path) -> Path:
    """Records without keys of their own: they are called by their places."""
    export(out, tmp_path / "tf", format="tfrecord", shard_size=2_000)
    for path in (tmp_path / "tf").iterdir():
        if not path.name.endswith(".tfrecord"):
            path.unlink()
    index(tmp_path / "tf", jobs=1)
    return tmp_path / "tf"


def test_records_that_are_called_by_their_places_are_found_by_their_bytes(tfrecords: Path) -> None:
    names = own(tfrecords).names or ()
    data = api.open(tfrecords, decode=None)
    count = int(own(tfrecords).shard_records[0])
    assert count > 2 and data[1]["__key__"] == names[0].removesuffix(".tfrecord") + "/00000001"
    gone, kept = data[1], data[2]
    drop(tfrecords, keys=[gone["__key__"]])
    annotate(tfrecords, {kept["__key__"]: {"caption": "two"}}, missing="none")
    first, second = (tfrecords / name for name in names[:2])
    first.write_bytes(second.read_bytes() + first.read_bytes())  # all of its records move
    done = again(tfrecords)
    assert done.changed == [names[0]] and done.dropped == 1
    now = api.open(tfrecords, decode=None)
    assert gone["image"] not in [one["image"] for one in now]
    assert [one["image"] for one in now if one["caption"]] == [kept["image"]]
    assert len(now) == len(data) - 1 + int(own(tfrecords).shard_records[1])


def parquet(folder: Path, name: str, values: Any, numbers: Any = None) -> None:
    table = pytest.importorskip("pyarrow")
    query = pytest.importorskip("pyarrow.parquet")
    columns = {"image": [jpeg(n) for n in numbers or values], "n": [*values]}
    query.write_table(table.table(columns), folder / name)


def test_records_that_cannot_be_found_again_are_an_error_or_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "pq"
    folder.mkdir()
    parquet(folder, "a.parquet", range(4))
    parquet(folder, "b.parquet", range(4, 8))
    index(folder, jobs=1)
    drop(folder, keys=["a/00000001", "b/00000002"])
    os.rename(folder / "b.parquet", folder / "c.parquet")  # the same bytes
    assert again(folder).dropped == 1
    assert [one["n"] for one in api.open(folder, decode=None)] == [0, 2, 3, 4, 5, 7]
    parquet(folder, "a.parquet", [9, 0, 1, 2, 3])
    before = content(folder)
    with pytest.raises(OptionError, match=r"a\.parquet: it changed.*--forget takes them for new"):
        index(folder, jobs=1)
    assert content(folder) == before
    again(folder, forget=True)
    assert [one["n"] for one in api.open(folder, decode=None)] == [9, 0, 1, 2, 3, 4, 5, 7]


# --- folders of images ----------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    plant(tmp_path / "photos", images())
    index(tmp_path / "photos", jobs=1)
    return tmp_path / "photos"


def test_a_folder_of_images_keeps_its_order_and_gets_new_ones_behind(photos: Path) -> None:
    before = [*rows(photos)]
    drop(photos, keys=before[3:5])
    annotate(photos, {before[0]: {"caption": "first"}}, missing="none")
    annotate(photos, {before[7]: {"label": 0}})
    tag(photos, "reviewed")
    assert index(photos, jobs=1).version == ""  # what is written beside them are no images
    plant(photos, {"class0/new.jpg": noise("new", 400), "zebra/1.jpg": noise("z", 300)})
    (photos / before[5]).unlink()
    (photos / before[6]).write_bytes(noise("anew", 999))
    (photos / before[7]).write_bytes(noise("same size", 300))
    told = index(photos, jobs=1, dry_run=True)
    done = again(photos)
    assert (told.new, told.changed, told.gone) == (done.new, done.changed, done.gone)
    assert sorted(done.new) == ["class0/new.jpg", "zebra/1.jpg"]
    assert sorted(done.changed) == sorted(before[6:8]) and done.gone == [before[5]]
    assert done.unchanged == 24 - 3
    data = rows(photos)
    assert [*data][:21] == before[:3] + before[6:]
    assert data[before[0]]["caption"] == "first" and data[before[7]]["label"] == 0
    assert data["zebra/1.jpg"]["label"] == 3
    assert api.open(photos).classes == ["class0", "class1", "class2", "zebra"]
    assert data[before[6]]["image"] == noise("anew", 999)
    shutil.rmtree(photos / "zebra")
    assert again(photos).gone == ["zebra/1.jpg"] and own(photos).options["absent"] == [3]
    assert "images" in str(done)


def test_what_is_no_image_stays_left_out_until_it_changes(photos: Path) -> None:
    before, skip = [*rows(photos)], {"jobs": 1, "on_error": "skip"}
    plant(photos, {"class0/bad.jpg": b"text", "class1/empty.jpg": b""})
    with pytest.raises(SourceError, match="2 files cannot be indexed"):
        index(photos, jobs=1)
    done = index(photos, **skip)
    assert [key for key, _ in done.rejected] == ["class0/bad.jpg", "class1/empty.jpg"]
    assert (done.version, done.new, done.unchanged, done.records) == ("", [], 24, 24)
    files = content(photos)
    done = index(photos, **skip)
    assert (done.rejected, done.rejected_before, done.new) == ([], 2, [])
    assert "2 files left out before, and not changed" in str(done)
    assert content(photos) == files  # no index of nothing is left
    assert len(index(photos, checksum=True, **skip).rejected) == 2
    plant(photos, {"class0/new.jpg": noise("new", 400)})
    done = index(photos, **skip)
    assert (done.new, done.rejected_before, done.records) == (["class0/new.jpg"], 2, 25)
    plant(photos, {"class2/last.jpg": noise("last", 400), "class0/new.jpg": b"text now"})
    (photos / before[2]).write_bytes(b"no image any more")
    done = index(photos, **skip)
    assert (done.new, done.changed) == (["class2/last.jpg"], [])
    assert sorted(done.gone) == sorted([before[2], "class0/new.jpg"])
    assert [key for key, _ in done.rejected] == sorted(done.gone)
    expected = [*before[:2], *before[3:], "class2/last.jpg"]
    assert [*rows(photos)] == expected  # a run between has no image now
    data = api.ShardDataset(photos, decode=None, batch_size=2, fields=("__key__",))
    assert sorted(key for (keys,) in data for key in keys) == sorted(expected)
    assert api.verify(photos).damages == []
    assert log(photos).versions[0].changes == {"added": 1, "removed": 2}
    plant(photos, {"class0/bad.jpg": noise("good", 300), before[2]: noise("again", 300)})
    (photos / "class1/empty.jpg").unlink()
    done = index(photos, **skip)
    assert sorted(done.new) == sorted(["class0/bad.jpg", before[2]]) and done.rejected_before == 1
    lines = (photos / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["class0/new.jpg"]
    (photos / "class0/new.jpg").unlink()
    index(photos, jobs=1)
    assert not (photos / "rejected.jsonl").exists()


def test_an_empty_file_alone_is_told(photos: Path) -> None:
    plant(photos, {"class0/empty.jpg": b""})
    with pytest.raises(SourceError, match=r"class0/empty\.jpg: is empty"):
        index(photos, jobs=1)
    done = index(photos, jobs=1, on_error="skip")
    assert (done.rejected, done.version) == ([("class0/empty.jpg", "is empty")], "")


def test_an_index_that_ends_at_its_commit_goes_on(photos: Path) -> None:
    skip: dict[str, Any] = {"jobs": 1, "on_error": "skip"}
    plant(photos, {"class0/a.jpg": b"text", "class0/b.jpg": b"text"})
    index(photos, **skip)
    plant(photos, {"class0/a.jpg": noise("good", 300), "class0/c.jpg": b"text"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reindex, "commit", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            index(photos, **skip)
    assert len(api.open(photos)) == 24
    done = index(photos, **skip)
    assert (done.new, done.rejected_before, done.rejected) == (["class0/a.jpg"], 2, [])


def test_a_list_beside_an_index_that_is_elsewhere(tmp_path: Path) -> None:
    folder, idx = plant(tmp_path / "photos", images(1, 3)), tmp_path / "idx"
    plant(folder, {"class0/bad.jpg": b"text"})
    for rejected, before in ((1, 0), (0, 1)):
        done = index(folder, out=idx, jobs=1, on_error="skip")
        assert (len(done.rejected), done.rejected_before) == (rejected, before)
    assert (idx / "rejected.jsonl").exists() and not (folder / "rejected.jsonl").exists()


def test_a_file_that_is_called_as_our_tags_is_packed(tmp_path: Path) -> None:
    source = plant(tmp_path / "files", {"tags.json": b"{}", "a.txt": b"a"})
    pack(source, tmp_path / "out", read=api.SourceOptions(kind="files"), jobs=1)
    assert api.open(tmp_path / "out", decode=None).keys() == ["a", "tags"]


def test_classes_of_another_dataset_are_those_that_it_has(tmp_path: Path) -> None:
    train = plant(tmp_path / "train", images(3, 2))
    val = plant(tmp_path / "val", images(2, 2))
    index(train, jobs=1)
    index(val, classes=train, jobs=1)
    plant(train, {"ant/1.jpg": noise("a", 300)})
    plant(val, {"ant/2.jpg": noise("b", 300)})
    again(train)
    assert again(val, classes=train).new == ["ant/2.jpg"]
    assert api.open(val).classes == api.open(train).classes
    assert rows(val)["ant/2.jpg"]["label"] == rows(train)["ant/1.jpg"]["label"] == 3
    index(plant(tmp_path / "other", images(1, 2)), jobs=1)
    with pytest.raises(OptionError, match="--classes"):
        index(train, classes=tmp_path / "other", jobs=1)


# --- versions -------------------------------------------------------------------------------------


def test_older_versions_are_read_while_their_files_are_as_they_were(wds: Path) -> None:
    tag(wds, "first")
    old = rows(wds)
    write_tar(wds / "a.tar", [20])
    second = again(wds).version
    assert rows(wds, version="first") == old
    found = diff(wds, "first")
    assert (found.added, found.dropped, found.changed) == ([key(20)], [], [])
    data = ShardDataset(wds, version="first", decode=None)
    state = data.state_dict()
    new = ShardDataset(wds, decode=None)
    with pytest.warns(UserWarning, match="it goes on with the state's version"):
        new.load_state_dict(state)
    write_tar(wds / "d.tar", [4, 5])
    again(wds)
    said = r"d\.tar.*changed since, or is gone.*cannot be read any more"
    for call in (
        lambda: api.open(wds, version="first"),
        lambda: ShardDataset(wds, version=second),
        lambda: diff(wds, "first"),
        lambda: tag(wds, "again", version="first"),
    ):
        with pytest.raises(OptionError, match=said):
            call()
    with pytest.raises(OptionError, match=r"d\.tar: it is not as it was then.*bring it back"):
        restore(wds, "first")
    with pytest.raises(StateError, match=said):
        ShardDataset(wds, decode=None).load_state_dict(state)
    assert [one.changed for one in log(wds).versions] == [0, 1, 1]
    assert "1 file changed since: cannot be read" in shardio("log", wds).stdout
    tag(wds, "first", remove=True)


def test_going_back_where_the_files_came_back(wds: Path, tmp_path: Path) -> None:
    drop(wds, keys=[key(6)])
    annotate(wds, {key(5): {"caption": "five"}}, missing="none")
    tag(wds, "good")
    old = rows(wds)
    shutil.copy2(wds / "d.tar", tmp_path / "d.tar")
    write_tar(wds / "d.tar", [4, 5])
    again(wds)
    shutil.copy2(tmp_path / "d.tar", wds / "d.tar")
    restore(wds, "good")
    assert rows(wds) == old and verify(wds, sha256=True).damages == []
    assert rows(wds, version="good") == old
    assert index(wds, jobs=1).version == ""


def test_an_index_elsewhere_is_gone_on_from(wds: Path, tmp_path: Path) -> None:
    out, storage = tmp_path / "idx", api.Storage(root=wds)
    for path in [*wds.glob("*.index"), wds / "manifest.json"]:
        path.unlink()
    index(wds, out=out, jobs=1)
    drop(out, keys=[key(1)], storage=storage)
    annotate(out, {key(2): {"caption": "two"}}, missing="none", storage=storage)
    tag(out, "first")
    write_tar(wds / "a.tar", [20])
    assert index(wds, out=out, jobs=1).new == ["a.tar"]
    assert [*rows(out, storage=storage)] == [key(n) for n in (20, 0, *range(2, 12))]
    assert rows(out, storage=storage)[key(2)]["caption"] == "two"
    assert diff(out, "first", storage=storage).added == [key(20)]
    restore(out, "first", storage=storage)
    (wds / "d.tar").unlink()
    index(wds, out=out, jobs=1)
    with pytest.raises(OptionError, match=r"d\.tar"):
        restore(out, "first", storage=storage)
    with pytest.raises(OptionError, match="--root"):
        restore(out, "first")


# --- what is refused ------------------------------------------------------------------------------


def test_a_wrong_folder_is_not_taken_for_the_right_one(wds: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in "bxyz":
        write_tar(other / f"{name}.tar", [0])
    index(wds, out=tmp_path / "idx", jobs=1)
    before = content(tmp_path / "idx")
    with pytest.raises(
        OptionError, match=r"2 files of its index.*--gone drop.*Nothing was changed"
    ):
        index(other, out=tmp_path / "idx", jobs=1)
    assert content(tmp_path / "idx") == before
    done = index(other, out=tmp_path / "idx", jobs=1, gone="drop")
    assert (len(done.new), len(done.gone), done.records) == (3, 2, 4)
    with pytest.raises(OptionError, match="gone is 'keep'"):
        index(other, gone="keep")


def test_fields_stay_and_new_ones_come_behind(wds: Path) -> None:
    with pytest.raises(OptionError, match="has other names of fields"):
        index(wds, fields={"picture": "jpg"}, jobs=1)
    annotate(wds, {key(0): {"txt": "mine"}}, missing="none")

    def with_member(ending: str, data: bytes) -> None:
        write_tar(wds / "g.tar", [40])
        with tarfile.open(wds / "g.tar", "a") as tar:
            member = tarfile.TarInfo(f"{key(40)}.{ending}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))

    with_member("txt", b"theirs")
    before = content(wds)
    with pytest.raises(OptionError, match="the field 'txt' was annotated"):
        index(wds, jobs=1)
    assert content(wds) == before
    again(wds, fields={"text": "txt"})
    assert own(wds).schema.names == ("__key__", "image", "label", "text", "txt")
    assert rows(wds)[key(40)]["text"] == "theirs" and rows(wds)[key(0)]["txt"] == "mine"
    assert rows(wds)[key(0)]["text"] is None


def test_a_field_of_another_kind_is_refused(tmp_path: Path) -> None:
    parquet(tmp_path, "a.parquet", range(4))
    index(tmp_path, jobs=1)
    parquet(tmp_path, "b.parquet", "xyz", [0, 1, 2])
    before = content(tmp_path)
    with pytest.raises(SourceError, match="'n' is of kind int, and would be of kind json"):
        index(tmp_path, jobs=1)
    assert content(tmp_path) == before


def test_a_file_that_cannot_be_indexed_leaves_the_version_as_it_was(wds: Path) -> None:
    drop(wds, keys=[key(1)])
    annotate(wds, {key(5): {"caption": "five"}}, missing="none")
    write_tar(wds / "a.tar", [20])
    (wds / "c.tar").write_bytes(b"\xff" * 2048)
    before = content(wds)
    for jobs in (1, 2):
        with pytest.raises(api.DamageError, match=r"c\.tar"):
            index(wds, jobs=jobs)
        assert content(wds) == before


@pytest.mark.parametrize("first", [True, False])
def test_an_error_after_the_commit_takes_nothing_back(
    wds: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Such as of flushing the directory, when the manifest has been renamed."""
    write_tar(wds / "a.tar", [20])
    annotate(wds, {key(5): {"caption": "five"}}, missing="none")

    def failing(*arguments: Any, **more: Any) -> Any:
        work(*arguments, **more)
        raise StorageError("cannot flush: No space left on device")

    module, name = ("index", "_write_manifest") if first else ("reindex", "commit")
    work = getattr(importlib.import_module(f"shardio.packing.{module}"), name)
    monkeypatch.setattr(f"shardio.packing.{module}.{name}", failing)
    with pytest.raises(StorageError, match="No space left"):
        index(wds, jobs=1, overwrite=first)
    assert len(rows(wds)) == 13 and verify(wds, sha256=True).damages == []


def test_two_do_not_index_again_at_once(wds: Path) -> None:
    write_tar(wds / "a.tar", [20])
    before = content(wds)
    with changing(str(wds)), pytest.raises(BusyError):
        index(wds, jobs=1)
    assert content(wds) == before


def test_a_packed_dataset_and_an_append_say_what_to_do(out: Path, wds: Path, source: Path) -> None:
    with pytest.raises(api.ExistsError, match="needs no index"):
        index(out)
    with pytest.raises(OptionError, match="add files there, and run `shardio index` again"):
        api.append(source, wds)


def test_the_command_tells_files_and_counts(wds: Path) -> None:
    write_tar(wds / "a.tar", [20])
    said = shardio("index", wds, "--dry-run").stdout.splitlines()
    assert said[0].endswith("webdataset: 1 new file, 0 changed, 0 gone, 3 as they were")
    assert said[1:3] == ["new: a.tar", "the contents of 3 files were compared"]
    found = shardio_json("index", wds)
    assert (found["new"], found["unchanged"], found["records"]) == (["a.tar"], 3, 13)
    assert found["version"] == own(wds).version_id
    assert shardio("index", wds).stdout.splitlines()[-1] == "all is as it was; the version stays"


def test_overwrite_makes_another_dataset(wds: Path) -> None:
    drop(wds, keys=[key(1)])
    write_tar(wds / "a.tar", [20])
    before = own(wds).dataset_id
    index(wds, overwrite=True, jobs=1)
    assert own(wds).dataset_id != before and len(rows(wds)) == 13
    assert own(wds).commit is None


def test_a_dataset_that_was_indexed_again_is_packed_as_any(wds: Path, tmp_path: Path) -> None:
    drop(wds, keys=[key(1)])
    annotate(wds, {key(5): {"caption": "five"}}, missing="none")
    write_tar(wds / "a.tar", [20])
    again(wds)
    copy(wds, tmp_path / "copied")
    assert rows(tmp_path / "copied") == rows(wds)
    write_tar(tmp_path / "copied/g.tar", [50])
    assert index(tmp_path / "copied", jobs=1).records == 13 and len(rows(wds)) == 12
    pack(wds, tmp_path / "packed", jobs=1)
    assert rows(tmp_path / "packed").keys() == rows(wds).keys()
    assert rows(tmp_path / "packed")[key(5)]["caption"] == "five"


def test_numbers_are_those_of_the_order_of_files(wds: Path) -> None:
    """An array in the order of the dataset is annotated, then a file comes before all."""
    annotate(wds, np.arange(12, dtype=np.float32).reshape(12, 1), fields="clip")
    write_tar(wds / "a.tar", [20])
    again(wds)
    found = rows(wds)
    assert [float(found[key(n)]["clip"][0]) for n in range(12)] == [*range(12)]


@pytest.mark.parametrize("fault", ["gone", "flipped"])
def test_an_index_that_is_damaged_is_written_anew(wds: Path, fault: str) -> None:
    write_tar(wds / "e.tar", [20])
    drop(wds, keys=[key(5)])
    annotate(wds, {key(4): {"caption": "four"}}, missing="none")
    again(wds)
    before, whole = content(wds), rows(wds)
    path = next(wds.glob("00001-*.index"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink() if fault == "gone" else path.write_bytes(data)
    assert verify(wds).damages
    done = index(wds, jobs=1)
    assert (done.repaired, done.changed, done.version, done.unchanged) == (1, [], "", 4)
    assert "1 index had been missing or damaged" in str(done)
    assert content(wds) == before and rows(wds) == whole
    path.unlink()
    write_tar(wds / "d.tar", [4, 5, 6])
    with pytest.raises(OptionError, match=r"d\.tar: .*its old index is damaged.*--forget"):
        index(wds, jobs=1)
    again(wds, forget=True)
    assert key(5) in rows(wds)


def test_a_damaged_index_of_images_makes_them_new(photos: Path) -> None:
    before = [*rows(photos)]
    next(photos.glob("*.index")).unlink()
    done = again(photos)
    assert sorted(done.new) == sorted(before) == sorted(rows(photos))


@pytest.mark.usefixtures("ranges_closed")
def test_files_in_a_store_are_told_by_their_tags(
    wds: Path, tmp_path: Path, bucket: ObjectStore
) -> None:
    def put(*names: str) -> None:
        bucket.put({f"tars/{name}": wds / name for name in names})

    put("b.tar", "d.tar", "f.tar")
    url, out = f"{bucket.url}/tars", tmp_path / "idx"
    options = {**bucket.options, "client_options": {"allow_http": True}}
    storage = api.Storage(options=options)
    index(url, out=out, storage=storage, jobs=1)
    write_tar(wds / "a.tar", [20])
    put("a.tar")
    done = index(url, out=out, storage=storage, jobs=1)
    assert (done.new, done.unchanged, done.compared) == (["a.tar"], 3, 3)
    assert index(url, out=out, storage=storage, jobs=1).compared == 0
    write_tar(wds / "d.tar", [4, 5, 6, 7], other=True)  # of the same size, or nearly so
    put("d.tar")
    assert index(url, out=out, storage=storage, jobs=1).changed == ["d.tar"]
    there = api.Storage(options=options, root=url)
    assert rows(out, storage=there)[key(5)]["image"] == jpeg(1005)


def tar_of(path: Path, first: int, count: int) -> None:
    """A tar whose keys count from 0, as those of many writers do."""
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            for suffix, data in (("jpg", jpeg(first + number)), ("cls", b"%d" % (first // 100))):
                member = tarfile.TarInfo(f"{number:04d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def test_files_with_the_same_keys_keep_each_its_own(tmp_path: Path) -> None:
    first, second = tmp_path / "A.tar", tmp_path / "B.tar"
    tar_of(first, 0, 5)
    tar_of(second, 100, 5)
    index(tmp_path, jobs=1)
    annotate(tmp_path, np.arange(10) * 10, fields="num")
    drop(tmp_path, where={"num": [10]})  # of the first
    tar_of(first, 0, 6)
    tar_of(second, 100, 6)
    assert index(tmp_path, jobs=1).dropped == 1
    rows = api.open(tmp_path, decode=None)
    assert [(row["__key__"], row["label"], row["num"]) for row in rows] == [
        *((f"{i:04d}", 0, 10 * i) for i in (0, 2, 3, 4)),
        ("0005", 0, None),
        *((f"{i:04d}", 1, 50 + 10 * i) for i in range(5)),
        ("0005", 1, None),
    ]


def test_images_that_were_away_are_as_they_were(tmp_path: Path) -> None:
    names = [f"{c}/{i:03d}.jpg" for c in "ab" for i in range(10)]
    folder, away = plant(tmp_path / "src", {n: jpeg(i) for i, n in enumerate(names)}), []
    index(folder, jobs=1)
    annotate(folder, {name: {"caption": f"of {name}"} for name in names})
    drop(folder, keys=["a/004.jpg", "a/006.jpg"])
    restored = log(folder).versions[0].id
    drop(folder, keys=["a/007.jpg"])
    restore(folder, restored)  # so that one is there again
    for name in ("a/004.jpg", "a/005.jpg", "a/007.jpg"):
        away.append(tmp_path / name.replace("/", "-"))
        (folder / name).rename(away[-1])
    index(folder, jobs=1)
    for name, path in zip(("a/004.jpg", "a/005.jpg", "a/007.jpg"), away, strict=True):
        path.rename(folder / name)
    index(folder, jobs=1)
    rows = {row["__key__"]: row["caption"] for row in api.open(folder, decode=None)}
    assert rows == {n: f"of {n}" for n in names if n not in ("a/004.jpg", "a/006.jpg")}
