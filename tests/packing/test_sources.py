"""What of a folder is packed, what is ignored, and what is a problem; nothing else is opened."""

import os
import re
import socket
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conformance import FileSourceConformance
from support.trees import JPEG, content, images, noise, picture, plant, shardio

import shardio as library
from shardio.errors import OptionError, SourceChangedError, SourceError
from shardio.images.filetype import image_type
from shardio.packing import sources
from shardio.packing.sources import imagefolder
from shardio.packing.sources.base import Listing, Rejected, SourceRequest, renumber
from shardio.packing.sources.files import DiskFolder, Walk


def listing(root: Path, splits: bool | None = None) -> Listing:
    found = imagefolder.image_folder(SourceRequest(os.fsencode(root), splits=splits))
    assert list(found) == [""]
    return found[""]


def reasons(found: Listing) -> dict[bytes, str]:
    return dict(found.problems)


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
    found = imagefolder.image_folder(SourceRequest(os.fsencode(tmp_path)))
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
    found = imagefolder.image_folder(SourceRequest(os.fsencode(other), splits=True))
    assert {name: one.keys for name, one in found.items()} == {
        "day": [b"cat/x.jpg"],
        "night": [b"dog/y.jpg"],
    }


def test_splits_share_one_list_of_classes_and_know_which_are_absent(tmp_path: Path) -> None:
    plant(tmp_path, {"train/a/x.jpg": JPEG, "train/c/x.jpg": JPEG, "val/b/x.jpg": JPEG})
    found = imagefolder.image_folder(SourceRequest(os.fsencode(tmp_path)))
    assert found["train"].classes == found["val"].classes == ("a", "b", "c")
    assert found["train"].absent == ("b",)
    assert found["val"].absent == ("a", "c")


def test_a_test_split_without_class_folders_has_no_labels(tmp_path: Path) -> None:
    plant(tmp_path, {"train/a/x.jpg": JPEG, "test/1.jpg": JPEG, "test/2.jpg": JPEG})
    found = imagefolder.image_folder(SourceRequest(os.fsencode(tmp_path)))
    assert found["train"].classes == ("a",)
    assert found["test"].classes is None


def test_an_empty_split_is_an_error_that_names_it(tmp_path: Path) -> None:
    plant(tmp_path, {"train/a/x.jpg": JPEG, "val": None})
    with pytest.raises(SourceError, match=r"/val: there are no images"):
        imagefolder.image_folder(SourceRequest(os.fsencode(tmp_path)))


@pytest.mark.parametrize("top", ["", "train/"])
def test_loose_files_beside_class_folders_are_listed(tmp_path: Path, top: str) -> None:
    plant(tmp_path, {f"{top}a/x.jpg": JPEG, f"{top}one.jpg": JPEG, f"{top}two.txt": b"?"})
    with pytest.raises(SourceError, match=r"2 files beside class folders") as caught:
        imagefolder.image_folder(SourceRequest(os.fsencode(tmp_path)))
    assert "one.jpg" in str(caught.value)
    assert "two.txt" in str(caught.value)


def test_loose_files_beside_splits_are_listed(tmp_path: Path) -> None:
    plant(tmp_path, {"train/a/x.jpg": JPEG, "labels.csv": b"?"})
    with pytest.raises(SourceError, match=r"labels\.csv"):
        imagefolder.image_folder(SourceRequest(os.fsencode(tmp_path)))


def test_hidden_files_and_folders_and_thumbnails_are_ignored_and_counted(tmp_path: Path) -> None:
    tree = {"a/x.jpg": JPEG, "a/.DS_Store": b"?", "a/Thumbs.db": b"?", ".git/x": b"?"}
    found = listing(plant(tmp_path, {**tree, "desktop.ini": b"?", "a/.cache/y.jpg": JPEG}))
    assert found.keys == [b"a/x.jpg"]
    assert found.classes == ("a",)
    assert found.ignored == 5
    assert not found.problems


SYSTEMS = (
    *("@eaDir", "#recycle", "@Recycle", "@Recently-Snapshot", "$RECYCLE.BIN", "$Recycle.Bin"),
    *("System Volume Information", "lost+found", ".Trash-1000", ".snapshot"),
    *(".ipynb_checkpoints", "__MACOSX", "__pycache__"),
)


@pytest.mark.parametrize("kind", ["imagefolder", "files", "trees"])
def test_folders_of_nas_and_systems_are_no_records_and_no_classes(
    kind: str, tmp_path: Path
) -> None:
    below = ("images", "masks") if kind == "trees" else ("a", "b")
    clean = {f"{below[0]}/{n}.jpg": picture(8, 8) for n in range(3)}
    clean |= {f"{below[1]}/{n}.png": picture(8, 8, "PNG") for n in range(3)}
    plant(tmp_path / "clean", clean)
    left = {f"{at}/{name}/x/thumb.jpg": JPEG for at in (*below, "") for name in SYSTEMS}
    left |= {f"{below[0]}/deep/{name}/thumb.jpg": JPEG for name in SYSTEMS}
    plant(tmp_path / "nas", clean | {name.lstrip("/"): data for name, data in left.items()})
    read = library.SourceOptions(kind=kind)
    (expected,) = library.pack(tmp_path / "clean", tmp_path / "out", read=read, jobs=1)
    (found,) = library.pack(tmp_path / "nas", tmp_path / "of-nas", read=read, jobs=1)
    assert content(tmp_path / "of-nas") == content(tmp_path / "out")
    assert (expected.ignored, found.ignored) == (0, 4 * len(SYSTEMS))
    said = " ".join(found.notes)
    for name in SYSTEMS:
        assert name in said or name.startswith(".")


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


@pytest.mark.parametrize(
    "tree",
    [
        {f"{split}/{name}/1.jpg": JPEG for split in ("train", "val") for name in "ab"},
        {
            f"{split}/1.{end}": data
            for split in ("train", "val")
            for end, data in (("jpg", JPEG), ("txt", b"a"))
        },
        {
            f"{split}/{kind}/1.jpg": JPEG
            for split in ("train", "val")
            for kind in ("images", "masks")
        },
        {
            f"{kind}/{split}/1.jpg": JPEG
            for split in ("train", "val")
            for kind in ("images", "masks")
        },
    ],
    ids=["classes", "files", "trees", "trees of splits"],
)
def test_what_is_ignored_beside_splits_is_counted_and_named(tree: Any, tmp_path: Path) -> None:
    left = {"@eaDir/x.jpg": JPEG, ".hidden.jpg": JPEG}
    if "train/images/1.jpg" in tree:
        left["train/@eaDir/x.jpg"] = JPEG
    done = library.pack(plant(tmp_path / "src", tree | left), tmp_path / "out", jobs=1)
    assert [one.split for one in done] == ["train", "val"]
    assert sum(one.ignored for one in done) == len(left)
    assert "@eaDir" in " ".join(note for one in done for note in one.notes)


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


def test_no_ignore_packs_what_is_ignored_otherwise(tmp_path: Path) -> None:
    plant(tmp_path / "src", {"a/1.jpg": JPEG, "@eaDir/2.jpg": JPEG, "a/.b/3.jpg": JPEG})
    read = library.SourceOptions(kind="imagefolder", ignore=False)
    (packed,) = library.pack(tmp_path / "src", tmp_path / "out", read=read, jobs=1)
    assert (packed.records, packed.classes, packed.ignored) == (3, 2, 0)
    data = library.open(tmp_path / "out", decode=None)
    assert {one["__key__"] for one in data} == {"a/1.jpg", "@eaDir/2.jpg", "a/.b/3.jpg"}
    shardio("pack", tmp_path / "src", tmp_path / "by-command", "--no-ignore")
    assert content(tmp_path / "by-command") == content(tmp_path / "out")


def test_no_ignore_is_refused_where_nothing_is_ignored(tmp_path: Path) -> None:
    plant(tmp_path, {"src/a/1.jpg": JPEG, "list.csv": b"path,label\na/1.jpg,0\n"})
    said = shardio(
        "pack", tmp_path / "list.csv", tmp_path / "out", "--root", tmp_path / "src", "--no-ignore",
        code=2,
    ).stderr  # fmt: skip
    assert "--no-ignore" in said and "a source of kind listing" in said
    assert not (tmp_path / "out").exists()


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    elsewhere = plant(tmp_path / "elsewhere", {"x.jpg": b"12345", "deep/y.jpg": JPEG})
    root = plant(tmp_path / "root", {"a/z.jpg": JPEG})
    (root / "a" / "link.jpg").symlink_to(elsewhere / "x.jpg")
    (root / "b").symlink_to(elsewhere)
    found = listing(root)
    assert found.keys == [b"a/link.jpg", b"a/z.jpg", b"b/deep/y.jpg", b"b/x.jpg"]
    assert found.sizes.tolist() == [5, 4, 4, 5]
    assert found.classes == ("a", "b")


@pytest.mark.parametrize("target", ["..", ".", "../.."])
def test_a_link_to_a_folder_above_is_a_problem_not_a_loop(tmp_path: Path, target: str) -> None:
    root = plant(tmp_path / "root", {"a/b/x.jpg": JPEG})
    (root / "a" / "b" / "loop").symlink_to(target)
    found = listing(root)
    assert found.keys == [b"a/b/x.jpg"]
    assert reasons(found) == {b"a/b/loop": "is a link to a folder that contains it"}


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
    found = imagefolder.image_folder(SourceRequest(os.fsencode(root)))
    assert found["train"].classes == found["val"].classes == ("a",)
    assert reasons(found["train"]) == {b"0": "is a link to a folder that contains it"}
    (root / "loop").symlink_to(".")
    with pytest.raises(SourceError, match="loop"):
        imagefolder.image_folder(SourceRequest(os.fsencode(root)))


def test_two_links_into_each_other_end(tmp_path: Path) -> None:
    root = plant(tmp_path / "root", {"a/x.jpg": JPEG, "b/y.jpg": JPEG})
    (root / "a" / "to_b").symlink_to("../b")
    (root / "b" / "to_a").symlink_to("../a")
    found = listing(root)
    assert found.keys == [b"a/to_b/y.jpg", b"a/x.jpg", b"b/to_a/x.jpg", b"b/y.jpg"]
    assert set(reasons(found)) == {b"a/to_b/to_a", b"b/to_a/to_b"}


def test_dangling_links_and_links_to_themselves_are_problems(tmp_path: Path) -> None:
    root = plant(tmp_path, {"a/x.jpg": JPEG})
    (root / "a" / "gone.jpg").symlink_to("nowhere")
    (root / "a" / "self.jpg").symlink_to("self.jpg")
    found = reasons(listing(root))
    assert found[b"a/gone.jpg"] == "is a link to nothing"
    assert found[b"a/self.jpg"].startswith("cannot be followed")


def test_a_link_to_itself_at_the_top_is_listed_as_a_loose_file(tmp_path: Path) -> None:
    root = plant(tmp_path, {"a/x.jpg": JPEG})
    (root / "self").symlink_to("self")
    with pytest.raises(SourceError, match="self: in no class folder"):
        listing(root)


def test_special_files_are_problems_and_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = plant(tmp_path / "root", {"a/x.jpg": JPEG})
    os.mkfifo(root / "a" / "pipe.jpg")  # opening it would wait for a writer
    monkeypatch.chdir(root / "a")  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket.jpg")
        (root / "a" / "device.jpg").symlink_to("/dev/null")
        found = reasons(listing(root))
    assert found == {
        b"a/pipe.jpg": "is a FIFO, not a file; it was not opened",
        b"a/socket.jpg": "is a socket, not a file; it was not opened",
        b"a/device.jpg": "is a device, not a file; it was not opened",
    }


def test_empty_files_and_files_above_the_limit_are_problems(tmp_path: Path) -> None:
    root = plant(tmp_path, {"a/x.jpg": JPEG, "a/empty.jpg": b"", "a/huge.jpg": JPEG})
    os.truncate(root / "a" / "huge.jpg", 1 << 32)
    found = reasons(listing(root))
    assert found[b"a/empty.jpg"] == "is empty"
    assert "the limit is" in found[b"a/huge.jpg"]


def test_names_that_are_no_utf8_are_kept_as_they_are(tmp_path: Path) -> None:
    found = listing(plant(tmp_path, {b"caf\xe9/\xff.jpg": JPEG}))
    assert found.keys == [b"caf\xe9/\xff.jpg"]
    assert found.classes == (os.fsdecode(b"caf\xe9"),)


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems take such names for one")
def test_names_that_differ_only_by_normalisation_are_both_kept_and_noted(tmp_path: Path) -> None:
    names = [unicodedata.normalize(form, "a/é.jpg").encode() for form in ("NFC", "NFD")]
    found = listing(plant(tmp_path, dict.fromkeys(names, JPEG)))
    assert found.keys == sorted(names)
    assert len(found.notes) == 1
    assert "both were kept" in found.notes[0]


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems take such names for one")
def test_many_such_twins_are_summed_up(tmp_path: Path) -> None:
    tree = {unicodedata.normalize(f, f"é{i}.jpg"): JPEG for f in ("NFC", "NFD") for i in range(30)}
    found = listing(plant(tmp_path, tree))
    assert len(found.notes) == 21
    assert "10 more" in found.notes[-1]


def test_a_time_of_change_that_64_bits_cannot_hold_is_no_crash(tmp_path: Path) -> None:
    root = plant(tmp_path, {"x.jpg": JPEG})
    try:
        os.utime(root / "x.jpg", ns=(0, 2**63 + 10**9))
    except OverflowError:
        pytest.skip("this Python cannot set such a time")
    found = listing(root)
    with found.source.open() as read_place:
        assert read_place(0) == {"__key__": b"x.jpg", "image": JPEG}


@pytest.mark.parametrize("what", ["missing", "a file", "nothing in it"])
def test_no_images_at_all_is_an_error(tmp_path: Path, what: str) -> None:
    root = tmp_path / "root"
    if what == "a file":
        root.write_bytes(JPEG)
    elif what == "nothing in it":
        root.mkdir()
    with pytest.raises(SourceError):
        listing(root)


def test_a_folder_that_cannot_be_listed_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = plant(tmp_path, {"a/x.jpg": JPEG, "a/locked/y.jpg": JPEG})
    real = os.scandir

    def scandir(path: bytes) -> object:  # root may list anything
        if path.rstrip(b"/").endswith(b"locked"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert reasons(listing(root)) == {b"a/locked/": "cannot be listed: Permission denied"}
    (root / "b.locked").mkdir()  # a class all the same: labels do not depend on permissions
    found = listing(root)
    assert found.classes == ("a", "b.locked")
    assert b"b.locked/" in reasons(found)


def test_images_are_told_by_their_first_bytes() -> None:
    for kind in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM"):
        assert image_type(picture(9, 9, kind)[:12]), kind
    assert image_type(b"RIFF\0\0\0\0WEBP") == "WEBP"
    assert image_type(b"\0\0\0\x0cjP  \r\n\x87\n") == "JPEG 2000"
    assert image_type(b"\0\0\0\x20ftypavif") == "AVIF or HEIF"
    for start in (
        b"",
        b"\0" * 12,
        b"%PDF-1.7",
        b"PK\x03\x04",
        b"RIFF\0\0\0\0WAVE",
        b"<svg>",
        b"hi",
    ):
        assert image_type(start) is None, start


class TestImageFolder(FileSourceConformance):
    KIND = "imagefolder"

    def make(self, root: Path) -> Path:
        return plant(root, images(each=4))

    def file(self, path: Path) -> Path:
        return path / "class0" / "000.jpg"


def read(root: Path, key: bytes, size: int, mtime_ns: int = 10**18) -> bytes:
    sizes, times = np.array([size]), np.array([mtime_ns])
    folder = DiskFolder(os.fsencode(root))
    source = imagefolder.Folder(folder, [key], sizes, times, None)
    with source.open() as read_place:
        return bytes(read_place(0)["image"])


def test_reading_gives_the_bytes_or_says_why_not(tmp_path: Path) -> None:
    plant(tmp_path, {"x.jpg": noise("x", 5000), "no.jpg": b"\x1b[31mhello", "folder": None})
    assert read(tmp_path, b"x.jpg", 5000) == noise("x", 5000)
    with pytest.raises(Rejected, match="is not an image") as caught:
        read(tmp_path, b"no.jpg", 10)
    assert "\x1b" not in str(caught.value)
    status = (tmp_path / "folder").stat()
    with pytest.raises(Rejected, match=r"^cannot be read"):
        read(tmp_path, b"folder", status.st_size, status.st_mtime_ns)


@pytest.mark.parametrize(("size", "mtime"), [(5, 10**18), (3, 10**18), (4, 10**18 + 1)])
def test_reading_a_file_that_is_not_what_was_listed_says_so(
    tmp_path: Path, size: int, mtime: int
) -> None:
    plant(tmp_path, {"x.jpg": JPEG})
    with pytest.raises(SourceChangedError, match="--restart"):
        read(tmp_path, b"x.jpg", size, mtime)


def test_reading_a_file_that_is_gone_or_became_a_fifo_does_not_wait(tmp_path: Path) -> None:
    with pytest.raises(SourceChangedError, match="it is gone"):
        read(tmp_path, b"x.jpg", 4)
    os.mkfifo(tmp_path / "x.jpg")
    with pytest.raises(SourceChangedError):
        read(tmp_path, b"x.jpg", 4)


def test_a_file_that_is_written_to_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, {"x.jpg": noise("x", 100)})
    real = os.read

    def slow_read(descriptor: int, count: int) -> bytes:
        data = real(descriptor, count)
        os.utime(tmp_path / "x.jpg")  # as a write of the same size would
        return data

    monkeypatch.setattr(os, "read", slow_read)
    with pytest.raises(SourceChangedError, match="while it was read"):
        read(tmp_path, b"x.jpg", 100)


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
