"""Shards back to files: the same tree, and never a byte outside the directory."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.trees import JPEG, content, images, noise, plant, shardio, shardio_json, shards

from shardio.errors import (
    DamageError,
    ExistsError,
    NotPackedError,
    OptionError,
    ShardioError,
    StorageError,
)
from shardio.packing.pack import pack
from shardio.packing.unpack import unpack
from shardio.packing.writer import Writer


def written(out: Path, *keys: bytes, **options: object) -> Path:
    with Writer(out, fields={"image": "image"}, **options) as writer:
        for key in keys:
            writer.write({"__key__": key, "image": JPEG})
    return out


def test_the_tree_comes_back_with_its_empty_classes(tmp_path: Path) -> None:
    tree = {"a/deep/er/x.jpg": noise("x", 70_000), "empty": None, b"caf\xe9/\xff.jpg": JPEG}
    source = plant(tmp_path / "src", {**images(), **tree})
    pack(source, tmp_path / "out", jobs=1)
    done = unpack(tmp_path / "out", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)
    assert (done.files, done.folders, done.without) == (26, 6, 0)


def test_a_folder_without_classes_comes_back(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", {"x.jpg": JPEG, "y.jpg": noise("y", 99)})
    pack(source, tmp_path / "out", jobs=1)
    unpack(tmp_path / "out", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)


def test_many_folders_cost_few_descriptors(tmp_path: Path) -> None:
    import resource

    tree = {f"{i:03d}/a/b/x.jpg": noise(str(i), 50) for i in range(300)}
    source = plant(tmp_path / "src", tree)
    pack(source, tmp_path / "out", jobs=1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    here = len(os.listdir("/dev/fd"))  # what other tests hold in this process
    resource.setrlimit(resource.RLIMIT_NOFILE, (here + 310, limits[1]))
    try:
        unpack(tmp_path / "out", tmp_path / "back")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert content(tmp_path / "back") == content(source)


def test_existing_files_are_refused_unless_told_to_replace_them(tmp_path: Path) -> None:
    out = written(tmp_path / "out", b"a/x.jpg")
    plant(tmp_path / "back", {"a/x.jpg": b"mine", "a/other": b"mine"})
    with pytest.raises(ExistsError, match="--overwrite"):
        unpack(out, tmp_path / "back")
    assert (tmp_path / "back" / "a" / "x.jpg").read_bytes() == b"mine"
    unpack(out, tmp_path / "back", overwrite=True)
    assert (tmp_path / "back" / "a" / "x.jpg").read_bytes() == JPEG
    assert (tmp_path / "back" / "a" / "other").read_bytes() == b"mine"


def test_run_again_it_keeps_what_is_there_and_writes_the_rest(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", images())
    pack(source, tmp_path / "out", jobs=1)
    back = tmp_path / "back"
    assert unpack(tmp_path / "out", back).kept == 0
    missing, cut, empty, *others = sorted(path for path in back.rglob("*") if path.is_file())
    missing.unlink()
    os.truncate(cut, 10)  # by a kill in the middle of it
    os.truncate(empty, 0)
    before = {path: path.stat() for path in others}
    done = shardio_json("unpack", tmp_path / "out", back)
    assert (done["files"], done["kept"]) == (24, 21)
    assert content(back) == content(source)
    assert {path: path.stat().st_mtime_ns for path in others} == {
        path: was.st_mtime_ns for path, was in before.items()
    }
    assert "24 of these were there already" in shardio("unpack", tmp_path / "out", back).stdout


@pytest.mark.parametrize("other", [JPEG + b"x", b"x" + JPEG[1:], JPEG[:-1] + b"x", b"x"])
def test_a_file_that_differs_is_not_taken_for_an_unfinished_one(
    tmp_path: Path, other: bytes
) -> None:
    out = written(tmp_path / "out", b"a/x.jpg")
    plant(tmp_path / "back", {"a/x.jpg": other})
    with pytest.raises(ExistsError, match=r"a/x\.jpg: another file is there; .*--overwrite"):
        unpack(out, tmp_path / "back")
    assert content(tmp_path / "back")[b"a/x.jpg"] == other


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_what_is_no_file_is_not_taken_for_one(tmp_path: Path, kind: str) -> None:
    out = written(tmp_path / "out", b"x.jpg")
    (tmp_path / "same.jpg").write_bytes(JPEG)
    (tmp_path / "back").mkdir()
    place = tmp_path / "back" / "x.jpg"
    if kind == "link":
        place.symlink_to(tmp_path / "same.jpg")
    else:
        (os.mkdir if kind == "folder" else os.mkfifo)(place)
    with pytest.raises(ExistsError, match=r"x\.jpg: another file is there"):
        unpack(out, tmp_path / "back")
    assert (tmp_path / "same.jpg").read_bytes() == JPEG


def test_a_disk_that_the_first_run_nearly_filled_is_enough_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = written(tmp_path / "out", b"x.jpg", b"y.jpg")
    free = SimpleNamespace(f_blocks=1000, f_bavail=len(JPEG), f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda path: free)
    with pytest.raises(StorageError, match="are to be written"):
        unpack(out, tmp_path / "back")
    plant(tmp_path / "back", {"x.jpg": JPEG})
    assert unpack(out, tmp_path / "back").kept == 1


@pytest.mark.parametrize(
    "key",
    [
        b"../x",
        b"a/../../x",
        b"/abs",
        b"a//b",
        b"a/./b",
        b"..",
        b".",
        b"a/",
        b"a\0b",
        b"a/b/..",
        b"x/" * 30_000 + b"x",
    ],
)
def test_hostile_keys_write_nothing(tmp_path: Path, key: bytes) -> None:
    out = written(tmp_path / "out", key)
    before = content(tmp_path)
    with pytest.raises(DamageError, match="no path within a directory"):
        unpack(out, tmp_path / "in" / "back")
    del before[b"out"]
    after = content(tmp_path)
    assert {k: v for k, v in after.items() if v is not None and k not in before} == {}


@pytest.mark.parametrize("key", [b"x/" * 2_000 + b"x", b"y" * 300, b"z/" + b"y" * 300])
def test_keys_that_the_file_system_cannot_hold_are_an_error(tmp_path: Path, key: bytes) -> None:
    out = written(tmp_path / "out", key)
    try:
        unpack(out, tmp_path / "back")
    except ShardioError:
        assert not any(content(tmp_path / "back").values())
    else:  # two thousand folders, one in the other: allowed, if the system allows it
        os.system(f"rm -rf {tmp_path / 'back'}")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("what", ["folder", "file", "top"])
def test_links_in_the_directory_are_never_followed(
    tmp_path: Path, what: str, overwrite: bool
) -> None:
    out = written(tmp_path / "out", b"a/x.jpg" if what != "top" else b"x.jpg")
    outside = plant(tmp_path / "outside", {"x.jpg": b"precious"})
    back = tmp_path / "back"
    back.mkdir()
    if what == "folder":
        (back / "a").symlink_to(outside)
    else:
        folder = back / "a" if what == "file" else back
        folder.mkdir(exist_ok=True)
        (folder / "x.jpg").symlink_to(outside / "x.jpg")
    if overwrite and what != "folder":
        unpack(out, back, overwrite=True)  # the link is replaced, not what it leads to
        assert content(back)[b"a/x.jpg" if what == "file" else b"x.jpg"] == JPEG
    else:
        with pytest.raises((StorageError, ExistsError)):
            unpack(out, back, overwrite=overwrite)
    assert content(outside) == {b"x.jpg": b"precious"}


@pytest.mark.parametrize("keys", [(b"x", b"a", b"a/b"), (b"x", b"a/b/c", b"a/b")])
def test_a_key_below_another_key_is_an_error_before_a_file_is_written(
    tmp_path: Path, keys: tuple[bytes, ...]
) -> None:
    out = written(tmp_path / "out", *keys, max_records=1)
    with pytest.raises(OptionError, match=r"is the folder of another.* nothing was written"):
        unpack(out, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_record_without_a_file_may_have_the_key_of_a_folder(tmp_path: Path) -> None:
    with Writer(tmp_path / "out", fields={"image": "image"}) as writer:
        writer.write({"__key__": "a", "image": None})
        writer.write({"__key__": "a/b", "image": JPEG})
    done = unpack(tmp_path / "out", tmp_path / "back")
    assert (done.files, done.without) == (1, 1)
    assert content(tmp_path / "back") == {b"a": None, b"a/b": JPEG}


def test_the_directory_may_not_be_a_file(tmp_path: Path) -> None:
    out = written(tmp_path / "out", b"a")
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(StorageError, match="found a file"):
        unpack(out, tmp_path / "file")


def test_names_of_classes_of_a_stream_make_no_folders(tmp_path: Path) -> None:
    fields = {"image": "image", "label": "int"}
    with Writer(tmp_path / "out", fields=fields, classes=["../up", "", "ok"]) as writer:
        writer.write({"__key__": "x", "image": JPEG, "label": 0})
    unpack(tmp_path / "out", tmp_path / "back")
    assert content(tmp_path / "back") == {b"x": JPEG}


def test_a_dataset_without_files_is_refused(tmp_path: Path) -> None:
    with Writer(tmp_path / "out", fields={"n": "int"}) as writer:
        writer.write({"n": 1})
    with pytest.raises(OptionError, match="shardio cat"):
        unpack(tmp_path / "out", tmp_path / "back")


def test_what_is_not_packed_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotPackedError):
        unpack(tmp_path, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_damage_stops_and_is_named(tmp_path: Path) -> None:
    pack(plant(tmp_path / "src", images()), tmp_path / "out", jobs=1)
    [shard] = shards(tmp_path / "out")
    data = bytearray(shard.read_bytes())
    data[2000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamageError, match=r"record \d+ at byte"):
        unpack(tmp_path / "out", tmp_path / "back")
    done = shardio("unpack", tmp_path / "out", tmp_path / "again", code=3)
    assert "shardio verify" in done.stderr


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = written(tmp_path / "out", b"a/x.jpg")
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if len(data) == 1:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[: len(data) - 1])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(StorageError, match="No space left"):
        unpack(out, tmp_path / "back")
    assert content(tmp_path / "back") == {b"a": None}


@pytest.mark.parametrize("name", ["manifest.json", "shardio.json", ".shardio-plan"])
def test_files_are_not_written_among_shards(tmp_path: Path, name: str) -> None:
    out = written(tmp_path / "out", b"a/x.jpg")
    other = plant(tmp_path / "other", {name: b"x"})
    with pytest.raises(ExistsError, match=r"other: a dataset is here, .*choose another directory"):
        unpack(out, other)
    assert content(other) == {name.encode(): b"x"}
