"""Files that differ only in their endings are one record, when it can be told or is asked for."""

import io
import json
import os
import tarfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import sources
from support.conformance import FileSourceConformance
from support.packing import interrupted
from support.sources import kind_of
from support.trees import (
    JPEG,
    content,
    grouped_files,
    images,
    noise,
    picture,
    plant,
    shardio,
    shardio_json,
)

from shardio import index, unpack
from shardio.dataset import sequence as sequences
from shardio.errors import OptionError, SourceChangedError, SourceError
from shardio.packing.sources.base import Listing

listings = partial(sources.listings, kind="files")
listing = partial(sources.listing, kind="files")
pack_one = partial(sources.pack_one, max_records=3)


def records(found: Listing) -> dict[bytes, dict[str, Any]]:
    by_key = sources.records(found)
    assert all(one.keys() == dict(found.fields).keys() for one in by_key.values())
    return by_key


def npy(array: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, **options)
    return out.getvalue()


# --- what a record is -----------------------------------------------------------------------------


def test_files_of_one_name_are_one_record_with_fields_by_their_endings(tmp_path: Path) -> None:
    tree = {
        "cat/a.jpg": JPEG,
        "cat/a.txt": "ä cat\n".encode(),
        "cat/a.cls": b" 7\n",
        "cat/a.json": b'{"boxes": [[1, 2.5]]}',
        "cat/a.npy": npy(np.arange(6, dtype=">f4").reshape(2, 3)),
        "cat/a.xyz": b"\0raw",
        "cat/a.caption": b"sits",
    }
    found = listing(plant(tmp_path, tree))
    assert found.keys == [b"cat/a"]
    assert found.sizes.tolist() == [sum(map(len, tree.values()))]
    assert found.fields == (
        *(("image", "image"), ("label", "int"), ("caption", "str"), ("json", "json")),
        *(("npy", "array"), ("txt", "str"), ("xyz", "bytes")),
    )
    one = records(found)[b"cat/a"]
    assert one.pop("npy").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert one == {
        **{"image": JPEG, "label": 7, "caption": "sits", "txt": "ä cat\n", "xyz": b"\0raw"},
        "json": {"boxes": [[1, 2.5]]},
    }
    assert found.options["fields"] == {"image": "jpg", "label": "cls"}
    assert found.classes is None


def test_records_are_those_of_a_tar_of_the_same_files(tmp_path: Path) -> None:
    tree: dict[str | bytes, bytes | None] = {}
    for i in range(5):
        for ending in ("cls", "cls2", "class", "count", "index", "inx", "id", "pose.id"):
            tree[f"d/{i}.{ending}"] = b"%d" % i
        for ending in ("txt", "text", "transcript", "en.TXT"):
            tree[f"d/{i}.{ending}"] = b"text %d" % i
        for ending in ("json", "jsn"):
            tree[f"d/{i}.{ending}"] = b'{"i": [%d, null, 0.5]}' % i
        tree[f"d/{i}.npy"] = npy(np.full((2, i + 1), i, ">i2"))
        tree[f"d/{i}.seg.png"] = picture(8, 9, "PNG")
        tree[f"d/{i}.jpg"] = picture(9, 8)
        tree[f"d/{i}.pyd"] = b"cos\nsystem\n"
    plant(tmp_path / "src", tree)
    (tmp_path / "wds").mkdir()
    with tarfile.open(tmp_path / "wds" / "0.tar", "w") as tar:
        for key in sorted(map(str, tree)):
            tar.add(tmp_path / "src" / key, key)
    index(tmp_path / "wds", jobs=1)
    pack_one(tmp_path / "src", tmp_path / "out", shuffle=False, kind="files")
    theirs = sequences.stored(tmp_path / "wds")
    ours = sequences.stored(tmp_path / "out")
    assert dict(ours.manifest.schema.fields) == dict(theirs.manifest.schema.fields)
    for one, other in zip(ours, theirs, strict=True):
        assert np.array_equal(one.pop("npy"), other.pop("npy"))
        assert one == other


def test_the_key_ends_at_the_first_dot_of_the_name_and_case_of_endings_counts_for_nothing(
    tmp_path: Path,
) -> None:
    tree = {"v1.0/b.JPG": JPEG, "v1.0/b.seg.png": picture(8, 8, "PNG"), "v1.0/a.jpg": JPEG}
    found = listing(plant(tmp_path, {**tree, "v1.0/a/x.jpg": JPEG, "v1.0/a-b.jpg": noise("-", 99)}))
    assert found.keys == [b"v1.0/a", b"v1.0/a-b", b"v1.0/a/x", b"v1.0/b"]
    assert found.fields == (("image", "image"), ("seg.png", "image"))
    read = records(found)
    assert read[b"v1.0/b"]["seg.png"] == picture(8, 8, "PNG")
    assert read[b"v1.0/a-b"]["image"] == noise("-", 99)


def test_all_plain_images_are_one_field_unless_a_record_has_two(tmp_path: Path) -> None:
    root = plant(tmp_path, {"a.jpg": JPEG, "a.txt": b"a", "b.PNG": picture(8, 8, "PNG")})
    found = listing(root)
    assert dict(found.fields) == {"image": "image", "txt": "str"}
    assert found.options["fields"] == {"image": "jpg/png"}
    assert records(found)[b"b"] == {"image": picture(8, 8, "PNG"), "txt": None}
    plant(tmp_path, {"a.png": picture(9, 9, "PNG")})
    found = listing(root)
    assert dict(found.fields) == {"jpg": "image", "png": "image", "txt": "str"}
    assert any("--fields image=jpg" in note for note in found.notes)
    assert records(found)[b"b"] == {"jpg": None, "png": picture(8, 8, "PNG"), "txt": None}


def test_fields_can_be_named(tmp_path: Path) -> None:
    files = {"a.jpg": JPEG, "a.png": picture(8, 8, "PNG"), "a.cls": b"1"}
    root = plant(tmp_path / "source", files)
    found = listing(root, fields={"image": "jpg", "depth": "png", "n": "cls"})
    assert found.fields == (("image", "image"), ("n", "int"), ("depth", "image"))
    assert records(found)[b"a"]["depth"] == picture(8, 8, "PNG")
    assert found.options["fields"] == {"image": "jpg", "depth": "png", "n": "cls"}
    for fields in ({"x": "nope"}, {"png": "jpg"}, {"x": "jpg", "y": "jpg"}, {"__key__": "jpg"}):
        with pytest.raises(OptionError, match="field"):
            pack_one(root, tmp_path / "out", fields=fields)
    assert not (tmp_path / "out").exists()


def test_a_record_without_an_image_is_packed_and_noted(tmp_path: Path) -> None:
    found = listing(plant(tmp_path, {"a.jpg": JPEG, "a.txt": b"a", "README.md": b"read"}))
    assert records(found)[b"README"] == {"image": None, "md": b"read", "txt": None}
    assert any("1 of 2 records have no image, such as README" in note for note in found.notes)


def test_hidden_files_are_ignored_and_counted(tmp_path: Path) -> None:
    found = listing(plant(tmp_path, grouped_files(2) | {".DS_Store": b"?", "x/Thumbs.db": b"?"}))
    assert (len(found.keys), found.ignored, found.problems) == (2, 2, [])


def test_splits_are_datasets_with_the_same_names_of_fields(tmp_path: Path) -> None:
    tree = {f"train/{key}": data for key, data in grouped_files(3).items()}
    tree |= {"train/000.png": picture(8, 8, "PNG"), "val/x.jpg": JPEG, "val/x.json": b"[1]"}
    root = plant(tmp_path, tree)
    assert kind_of(root) == "files"
    found = listings(root)
    assert {name: one.keys for name, one in found.items()} == {
        "train": [b"000", b"001", b"002"],
        "val": [b"x"],
    }
    assert dict(found["val"].fields) == {"jpg": "image", "json": "json"}  # not `image`: as in train
    assert listing(root, splits=False).keys[-1] == b"val/x"


def test_unpacking_gives_the_files_back(tmp_path: Path) -> None:
    array = npy(np.arange(4, dtype="<i4"))
    tree = grouped_files(3) | {
        "a/000.jpg": JPEG,
        "a/b.png": picture(8, 8, "PNG"),
        "a/b.seg.png": JPEG,
    }
    tree |= {"a/b.cls": b"5\n", "a/b.json": b'{"a":[1.5]}', "a/b.npy": array, "a/b.bin": b"\0"}
    pack_one(plant(tmp_path / "src", tree), tmp_path / "out")
    unpack(tmp_path / "out", tmp_path / "back")
    before, back = content(tmp_path / "src"), content(tmp_path / "back")
    assert before.keys() == back.keys()  # `a` and `a/b` are keys, and a folder
    for key, data in before.items():
        if key.endswith((b".cls", b".json")):  # the same values, written anew
            assert json.loads(data or b"") == json.loads(back[key] or b"")
        else:
            assert data == back[key]


# --- what cannot be packed ------------------------------------------------------------------------


def test_what_the_listing_shows_to_be_wrong_leaves_out_the_record(tmp_path: Path) -> None:
    tree = grouped_files(9) | {"001.jpg": b"", "002.JPG": JPEG, "003.bad\n": b"?", "004.cls": b""}
    root = plant(tmp_path, tree | {b"005.\xff": b"?", "006.__key__": b"?", "LICENSE": b"?"})
    (root / "007.json").symlink_to("nowhere")
    plant(root, {"008.txt": b"", "008.bin": b""})  # a text, and bytes, of none
    found = listing(root)
    reasons = {key.split(b".")[0]: why for key, why in found.problems}
    assert found.keys == [b"000", b"008"]
    assert records(found)[b"008"]["txt"] == "" and records(found)[b"008"]["bin"] == b""
    assert reasons[b"001"] == reasons[b"004"] == "is empty"
    assert "field 'jpg', as is the file .JPG" in reasons[b"002"]
    assert "name of a field" in reasons[b"003"]
    assert "UTF-8" in reasons[b"005"] and "__key__" in reasons[b"006"]
    assert reasons[b"007"] == "is a link to nothing"
    assert "has no ending" in reasons[b"LICENSE"]


BAD: Mapping[str, bytes] = {
    "jpg": b"no image",
    "cls": b"cat",
    "id": b"9" * 5000,
    "txt": b"caf\xe9",
    "json": b"{",
    "deep.json": b"[" * 100_000,
    "npy": b"\x93NUMPY cut",
    "object.npy": npy(np.array([{}]), allow_pickle=True),
    "parts.npy": npy(np.zeros(2, [("a", "<i4"), ("b", "<f4")])),
}


def test_what_does_not_decode_is_left_out_by_the_name_of_the_file(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", grouped_files(4))
    plant(source, {f"bad-{ending}.{ending}": data for ending, data in BAD.items()})
    names = [os.fsdecode(key) for key in listing(source).keys if key.startswith(b"bad")]
    done = pack_one(source, tmp_path / "out", on_error="skip")
    assert sorted(key for key, _ in done.rejected) == sorted(names)
    for ending in BAD:
        assert any(f"bad-{ending}.{ending}: " in why for _, why in done.rejected), ending
    assert done.records == 4
    with pytest.raises(SourceError, match="9 files cannot be packed"):
        pack_one(source, tmp_path / "again")


def test_json_that_no_record_holds_is_left_out(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", grouped_files(2))
    plant(source, {"big.json": b'"' + b"x" * (1 << 20) + b'"', "far.json": b"9" * 30})
    plant(source, {"odd.json": b'"\\ud800"'})
    done = pack_one(source, tmp_path / "out", on_error="skip")
    assert [key for key, _ in done.rejected] == ["big", "far", "odd"]


def test_too_many_endings_are_an_error_that_says_where_they_begin(tmp_path: Path) -> None:
    tree: dict[str | bytes, bytes | None] = {f"IMG.{i}.jpg": JPEG for i in range(1000)}
    with pytest.raises(SourceError, match="first dot"):
        listing(plant(tmp_path, tree))


@pytest.mark.parametrize("option", ["where", "root", "classes"])
def test_options_for_other_sources_are_refused(tmp_path: Path, option: str) -> None:
    source = plant(tmp_path / "src", grouped_files(2))
    pack_one(plant(tmp_path / "images", images()), tmp_path / "other")
    given = {"where": {"label": 1}, "root": tmp_path, "classes": tmp_path / "other"}[option]
    with pytest.raises(OptionError):
        pack_one(source, tmp_path / "out", **{option: given})


# --- resumed, or another plan ---------------------------------------------------------------------


class TestGrouped(FileSourceConformance):
    KIND = "files"

    def make(self, root: Path) -> Path:
        return plant(root, grouped_files())

    def file(self, path: Path) -> Path:
        return path / "000.txt"


@pytest.mark.parametrize("change", ["content", "time", "times swapped", "renamed", "gone"])
def test_a_changed_file_of_a_record_is_another_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    source = plant(tmp_path / "src", grouped_files())
    os.utime(source / "003.cls", ns=(5, 5))
    interrupted(monkeypatch, pack_one, source, tmp_path / "out")
    if change == "content":  # of as many bytes in all
        plant(source, {"003.txt": b"caption 33", "003.cls": b"0"})
        os.utime(source / "003.cls", ns=(5, 5))
    elif change == "time":
        os.utime(source / "003.txt")
    elif change == "times swapped":
        os.utime(source / "003.cls", ns=(10**18, 10**18))
        os.utime(source / "003.txt", ns=(5, 5))
    elif change == "renamed":
        (source / "003.txt").rename(source / "003.text")
    else:
        (source / "003.txt").unlink()
    with pytest.raises(SourceChangedError, match="--restart"):
        pack_one(source, tmp_path / "out")


def test_which_files_records_have_is_in_the_id(tmp_path: Path) -> None:
    tree = grouped_files(3) | {"000.a": b"x", "001.b": b"x"}
    ids = []
    for name, more in (("one", {"002.a": b"x"}), ("two", {"002.b": b"x"})):
        pack_one(plant(tmp_path / name, tree | more), tmp_path / f"{name}.out")
        ids.append(shardio_json("info", tmp_path / f"{name}.out")["dataset_id"])
    assert ids[0] != ids[1]


# --- from end to end ------------------------------------------------------------------------------


def test_the_command_line_and_training(tmp_path: Path) -> None:
    from shardio import ShardDataset

    tree = grouped_files(40) | {f"{i:03d}.jpg": picture(8 + i, 8) for i in range(40)}
    source = plant(tmp_path / "src", tree | {f"{i:03d}.json": b'{"i": %d}' % i for i in range(40)})
    out = tmp_path / "out"
    done = shardio("pack", source, out, "--max-records", "9")
    assert "fields: image (image) from jpg, label (int) from cls, json (json), txt" in done.stdout
    assert shardio_json("info", out)["records"] == 40
    assert shardio("verify", out, "--decode").returncode == 0
    assert json.loads(shardio("cat", out, "--key", "007", "--field", "json").stdout) == {"i": 7}
    data = ShardDataset(
        out, batch_size=8, fields=("image", "label", "txt"), decode=lambda data: len(data)
    )
    rows = [row for batch in data for row in zip(*batch, strict=True)]
    assert sorted(text for _, _, text in rows) == sorted(f"caption {i}" for i in range(40))
    assert all(int(text.split()[1]) % 3 == int(label) for _, label, text in rows)
    some = ShardDataset(out, batch_size=4, fields=("txt",), where={"label": 2})
    assert sum(len(texts) for (texts,) in some) == 13
