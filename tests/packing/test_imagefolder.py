"""What of a folder is packed, what is ignored, and what is a problem; nothing else is opened."""

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import sources as support_sources
from support.conformance import FileSourceConformance
from support.sources import reasons
from support.trees import JPEG, content, images, noise, picture, plant, shardio

import shardio as library
from shardio.errors import OptionError, SourceChangedError, SourceError
from shardio.packing import sources
from shardio.packing.sources.base import SourceRequest, renumber
from shardio.packing.sources.files import Walk

listing = partial(support_sources.listing, kind="imagefolder")
listings = partial(support_sources.listings, kind="imagefolder")


def test_class_folders_are_classes_and_nested_files_belong_to_the_top_one(tmp_path: Path) -> None:
    found = listing(
        plant(tmp_path, {"b/x.jpg": JPEG, "a/deep/er/y.jpg": JPEG, "a/z.jpg": JPEG, "c": None})
    )
    assert found.keys == [b"a/deep/er/y.jpg", b"a/z.jpg", b"b/x.jpg"]
    assert found.classes == ("a", "b", "c")
    assert found.absent == ()
    assert found.sizes.tolist() == [4, 4, 4]
    assert found.mtimes.tolist() == [10**18] * 3


def test_labels_are_the_numbers_of_the_top_folders_however_their_names_sort(tmp_path: Path) -> None:
    names = ["a", "a-b", "a.b", "a0", "a b", "aa", "\xe4", "z"]
    plant(
        tmp_path, {"empty": None} | {f"{n}/{deep}x.jpg": JPEG for n in names for deep in ("", "d/")}
    )
    found = listing(tmp_path)
    assert found.classes == tuple(sorted([*names, "empty"], key=os.fsencode))
    with found.source.open() as read_place:
        for place, key in enumerate(found.keys):
            label = read_place(place)["label"]
            assert os.fsencode(found.classes[label]) == key[: key.index(b"/")]


def test_a_folder_without_folders_has_no_classes(tmp_path: Path) -> None:
    found = listing(plant(tmp_path, {"x.jpg": JPEG, "y.png": JPEG}))
    assert found.classes is None
    assert found.keys == [b"x.jpg", b"y.png"]


def test_keys_are_sorted_bytewise(tmp_path: Path) -> None:
    names = ["a/é.jpg", "a/z.jpg", "a/Z.jpg", "a-b/x.jpg", "a/b/x.jpg", "ab/x.jpg"]
    found = listing(plant(tmp_path, dict.fromkeys(names, JPEG)))
    assert found.keys == sorted(name.encode() for name in names)
    assert found.classes == ("a", "a-b", "ab")


@pytest.mark.parametrize("name", ["train", "val", "valid", "validation", "test"])
def test_folders_that_all_have_names_of_splits_are_splits(tmp_path: Path, name: str) -> None:
    plant(tmp_path, {f"{name}/cat/x.jpg": JPEG})
    found = listings(tmp_path)
    assert list(found) == [name]
    assert found[name].keys == [b"cat/x.jpg"]
    assert found[name].classes == ("cat",)


def test_one_other_folder_makes_them_all_classes(tmp_path: Path) -> None:
    found = listing(plant(tmp_path, {"train/x.jpg": JPEG, "val/x.jpg": JPEG, "dog/x.jpg": JPEG}))
    assert found.classes == ("dog", "train", "val")


def test_folders_of_which_some_are_called_like_splits_are_classes_with_a_note(
    tmp_path: Path,
) -> None:
    plant(tmp_path, {"train/a/x.jpg": JPEG, "val/a/y.jpg": JPEG, "test2": None})
    found = listing(tmp_path)
    assert found.classes == ("test2", "train", "val")
    assert any("train, val are called like splits, but test2 is not" in n for n in found.notes)
    assert not listing(tmp_path, splits=False).notes


def test_splits_can_be_asked_for_and_refused(tmp_path: Path) -> None:
    plant(tmp_path, {"train/cat/x.jpg": JPEG, "val/cat/y.jpg": JPEG})
    assert listing(tmp_path, splits=False).classes == ("train", "val")
    other = plant(tmp_path / "other", {"day/cat/x.jpg": JPEG, "night/dog/y.jpg": JPEG})
    found = listings(other, splits=True)
    assert {name: one.keys for name, one in found.items()} == {
        "day": [b"cat/x.jpg"],
        "night": [b"dog/y.jpg"],
    }


def test_splits_share_one_list_of_classes_and_know_which_are_absent(tmp_path: Path) -> None:
    plant(tmp_path, {"train/a/x.jpg": JPEG, "train/c/x.jpg": JPEG, "val/b/x.jpg": JPEG})
    found = listings(tmp_path)
    assert found["train"].classes == found["val"].classes == ("a", "b", "c")
    assert found["train"].absent == ("b",)
    assert found["val"].absent == ("a", "c")


def test_a_test_split_without_class_folders_has_no_labels(tmp_path: Path) -> None:
    plant(tmp_path, {"train/a/x.jpg": JPEG, "test/1.jpg": JPEG, "test/2.jpg": JPEG})
    found = listings(tmp_path)
    assert found["train"].classes == ("a",)
    assert found["test"].classes is None


def test_an_empty_split_is_an_error_that_names_it(tmp_path: Path) -> None:
    plant(tmp_path, {"train/a/x.jpg": JPEG, "val": None})
    with pytest.raises(SourceError, match=r"/val: there are no images"):
        listings(tmp_path)


@pytest.mark.parametrize("top", ["", "train/"])
def test_loose_files_beside_class_folders_are_listed(tmp_path: Path, top: str) -> None:
    plant(tmp_path, {f"{top}a/x.jpg": JPEG, f"{top}one.jpg": JPEG, f"{top}two.txt": b"?"})
    with pytest.raises(SourceError, match=r"2 files beside class folders") as caught:
        listings(tmp_path)
    assert "one.jpg" in str(caught.value)
    assert "two.txt" in str(caught.value)


def test_loose_files_beside_splits_are_listed(tmp_path: Path) -> None:
    plant(tmp_path, {"train/a/x.jpg": JPEG, "labels.csv": b"?"})
    with pytest.raises(SourceError, match=r"labels\.csv"):
        listings(tmp_path)


def test_yolos_layout_names_the_option_that_packs_it(tmp_path: Path) -> None:
    tree = {f"images/train/{n}.jpg": picture(8, 8) for n in range(3)}
    tree |= {f"labels/train/{n}.txt": b"0 .5 .5 .1 .1" for n in range(3)}
    plant(tmp_path / "yolo", tree)
    option = "--fields image=images/ --boxes SRC"
    for loose in ({}, {"data.yaml": b"names: [a]"}):
        plant(tmp_path / "yolo", loose)
        assert option in shardio("pack", tmp_path / "yolo", tmp_path / "out", code=1).stderr
    inside_out = {"train/images/1.jpg": picture(8, 8), "train/labels/1.txt": b"0 .5 .5 .1 .1"}
    export = plant(tmp_path / "roboflow", inside_out | {"data.yaml": b"names: [a]"})
    assert option in shardio("pack", export, tmp_path / "other", code=1).stderr
    for source in (tmp_path / "yolo", export):
        options = option.replace("SRC", str(source)).split()
        shardio("pack", source, tmp_path / f"packed {source.name}", *options)
        data = library.open(tmp_path / f"packed {source.name}", split="train", decode=None)
        assert list(data.classes) == ["a"] and len(data) in (1, 3)
        for one in data:
            assert one["annotations"] == [{"bbox": [3.6, 3.6, 0.8, 0.8], "label": 0}]


def test_a_folder_with_nothing_but_what_is_ignored_says_so(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", {"@eaDir/x.jpg": JPEG})
    said = shardio("pack", source, tmp_path / "out", code=1).stderr
    assert "there are no images in it\nignored, with all that is in them: @eaDir; " in said


def test_a_pattern_finds_the_class_in_a_path(tmp_path: Path) -> None:
    names = ["a/cat.1.jpg", "b/dog.1.jpg", "dog.2.jpg", "cat.3.jpg", "b/é9.jpg"]
    source = plant(tmp_path / "src", {name: noise(name, 60) for name in names})
    read = library.SourceOptions(label=r"([a-z]+)\.\d+\.jpg$")
    with pytest.raises(SourceError, match=r"b/é9\.jpg: --label .* finds no class in its path"):
        library.pack(source, tmp_path / "out", read=read, jobs=1)
    [done] = library.pack(source, tmp_path / "out", read=read, jobs=2, on_error="skip")
    data = library.open(tmp_path / "out", decode=None)
    assert data.classes == ["cat", "dog"] or tuple(data.classes) == ("cat", "dog")
    labels = {one["__key__"]: one["label"] for one in data}
    assert labels == {"a/cat.1.jpg": 0, "b/dog.1.jpg": 1, "dog.2.jpg": 1, "cat.3.jpg": 0}
    chosen = library.SourceOptions(label=read.label, where={"label": "dog"})
    [done] = library.pack(source, tmp_path / "dogs", read=chosen, jobs=1, on_error="skip")
    assert (done.records, done.classes) == (2, 2)
    with pytest.raises(library.ExistsError, match="label: was"):
        other = library.SourceOptions(label=r"([a-z]+)\.\d")
        library.pack(source, tmp_path / "out", read=other, jobs=1, on_error="skip")


def test_a_pattern_of_labels_holds_for_splits_parts_and_archives(tmp_path: Path) -> None:
    tree = {f"{split}/{name}.{i}.jpg": noise(f"{split}{name}{i}", 60 + i)
            for split, names in (("train", ("cat", "dog")), ("val", ("dog",)))
            for name in names for i in range(5)}  # fmt: skip
    source = plant(tmp_path / "src", tree)
    read = library.SourceOptions(label=r"^(\w+)\.")
    plan = library.PlanOptions(max_records=2)
    train, val = library.pack(source, tmp_path / "out", read=read, jobs=1, plan=plan)
    assert (train.classes, val.classes) == (2, 2)
    assert library.open(tmp_path / "out", split="val").targets.tolist() == [1] * 5
    library.plan(source, tmp_path / "parts", read=read, plan=plan)
    for part in ("1/2", "2/2"):
        share = library.PlanOptions(max_records=2, part=part)
        library.pack(source, tmp_path / "parts", read=read, jobs=1, plan=share)
    library.commit(tmp_path / "parts", jobs=1)
    for split in ("train", "val"):
        right, parts = content(tmp_path / "out" / split), content(tmp_path / "parts" / split)
        assert {k: v for k, v in parts.items() if k.endswith(b".shard")} == {
            k: v for k, v in right.items() if k.endswith(b".shard")
        }


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ("(cat", "no regular expression: missing"),
        ("cat", "it has 0 groups in parentheses; expected one"),
        ("(c)(a)t", "it has 2 groups"),
        (5, "expected a regular expression"),
    ],
)
def test_a_pattern_that_is_none_is_refused(label: Any, why: str) -> None:
    with pytest.raises(OptionError, match=re.escape(why)):
        library.SourceOptions(label=label)


def test_a_pattern_is_for_folders_of_images(tmp_path: Path) -> None:
    table = plant(tmp_path, {"t.csv": b"path\na.jpg\n", "a.jpg": JPEG}) / "t.csv"
    said = shardio("pack", table, tmp_path / "out", "--label", "(a)", "--from", "listing", code=2)
    assert "--label: for a folder of images, not for a source of kind listing" in said.stderr


def test_no_ignore_is_refused_where_nothing_is_ignored(tmp_path: Path) -> None:
    plant(tmp_path, {"src/a/1.jpg": JPEG, "list.csv": b"path,label\na/1.jpg,0\n"})
    said = shardio(
        "pack", tmp_path / "list.csv", tmp_path / "out", "--root", tmp_path / "src", "--no-ignore",
        code=2,
    ).stderr  # fmt: skip
    assert "--no-ignore" in said and "a source of kind listing" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", [".", "..", "../.."])
def test_a_link_at_the_top_to_a_folder_above_is_a_problem_not_a_class(
    tmp_path: Path, target: str
) -> None:
    root = plant(tmp_path / "root", {"b/x.jpg": JPEG, "c/y.jpg": JPEG})
    (root / "a").symlink_to(target)
    found = listing(root)
    assert found.classes == ("b", "c")
    assert reasons(found) == {b"a": "is a link to a folder that contains it"}
    request = SourceRequest(os.fsencode(root), "imagefolder")
    assert sources.split_names(request) == [""]


def test_a_link_to_a_folder_above_beside_or_in_splits_is_never_dropped(tmp_path: Path) -> None:
    root = plant(tmp_path / "root", {"train/a/x.jpg": JPEG, "val/a/y.jpg": JPEG})
    (root / "train" / "0").symlink_to("..")
    found = listings(root)
    assert found["train"].classes == found["val"].classes == ("a",)
    assert reasons(found["train"]) == {b"0": "is a link to a folder that contains it"}
    (root / "loop").symlink_to(".")
    with pytest.raises(SourceError, match="loop"):
        listings(root)


def test_a_link_to_itself_at_the_top_is_listed_as_a_loose_file(tmp_path: Path) -> None:
    root = plant(tmp_path, {"a/x.jpg": JPEG})
    (root / "self").symlink_to("self")
    with pytest.raises(SourceError, match="self: in no class folder"):
        listing(root)


@pytest.mark.parametrize("what", ["missing", "a file", "nothing in it"])
def test_no_images_at_all_is_an_error(tmp_path: Path, what: str) -> None:
    root = tmp_path / "root"
    if what == "a file":
        root.write_bytes(JPEG)
    elif what == "nothing in it":
        root.mkdir()
    with pytest.raises(SourceError):
        listing(root)


class TestImageFolder(FileSourceConformance):
    KIND = "imagefolder"

    def make(self, root: Path) -> Path:
        return plant(root, images(each=4))

    def file(self, path: Path) -> Path:
        return path / "class0" / "000.jpg"


def test_renumbering_takes_the_other_classes_and_refuses_missing_ones(tmp_path: Path) -> None:
    found = listing(plant(tmp_path, {"b/x.jpg": JPEG, "d/x.jpg": JPEG}))
    renumbered = renumber(found, ["a", "b", "c", "d"])
    assert renumbered.classes == ("a", "b", "c", "d")
    assert renumbered.absent == ("a", "c")
    with pytest.raises(OptionError, match="d"):
        renumber(found, ["a", "b"])


def test_a_large_listing_takes_little_memory_a_file(tmp_path: Path) -> None:
    import tracemalloc

    root = plant(tmp_path, images(4, 300, 10))
    tracemalloc.start()
    found = listing(root)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found.keys) == 1200
    assert peak < 1200 * 130  # bytes: the keys, and 16 of numbers; sorted all at once it was 156


def test_a_class_that_comes_while_files_are_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = plant(tmp_path, images())
    real = Walk.run

    def late(walk: Walk) -> object:
        plant(root, {"class00/new.jpg": JPEG})
        return real(walk)

    monkeypatch.setattr(Walk, "run", late)
    with pytest.raises(SourceChangedError, match=r"class00/new\.jpg"):
        listing(root)
