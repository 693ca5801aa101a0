"""How files are found and read: links, special files, odd names; nothing else is opened."""

import os
import socket
import sys
import unicodedata
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import sources
from support.sources import reasons
from support.trees import JPEG, content, noise, picture, plant, shardio

import shardio as library
from shardio.errors import SourceChangedError
from shardio.images.filetype import image_type
from shardio.packing.sources import imagefolder
from shardio.packing.sources.base import Rejected
from shardio.packing.sources.files import DiskFolder

listing = partial(sources.listing, kind="imagefolder")


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


def test_two_links_into_each_other_end(tmp_path: Path) -> None:
    root = plant(tmp_path / "root", {"a/x.jpg": JPEG, "b/y.jpg": JPEG})
    (root / "a" / "to_b").symlink_to("../b")
    (root / "b" / "to_a").symlink_to("../a")
    found = listing(root)
    assert found.keys == [b"a/to_b/y.jpg", b"a/x.jpg", b"b/to_a/x.jpg", b"b/y.jpg"]
    assert set(reasons(found)) == {b"a/to_b/to_a", b"b/to_a/to_b"}


def test_what_is_no_file_that_can_be_packed_is_a_problem_and_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = plant(tmp_path / "root", {"a/x.jpg": JPEG, "a/empty.jpg": b"", "a/huge.jpg": JPEG})
    os.truncate(root / "a" / "huge.jpg", 1 << 32)
    os.mkfifo(root / "a" / "pipe.jpg")  # opening it would wait for a writer
    monkeypatch.chdir(root / "a")  # names of sockets are short
    for name, target in (("gone", "nowhere"), ("self", "self.jpg"), ("device", "/dev/null")):
        (root / "a" / f"{name}.jpg").symlink_to(target)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket.jpg")
        found = reasons(listing(root))
    assert found.pop(b"a/self.jpg").startswith("cannot be followed")
    assert "the limit is" in found.pop(b"a/huge.jpg")
    assert found == {
        b"a/empty.jpg": "is empty",
        b"a/gone.jpg": "is a link to nothing",
        b"a/pipe.jpg": "is a FIFO, not a file; it was not opened",
        b"a/socket.jpg": "is a socket, not a file; it was not opened",
        b"a/device.jpg": "is a device, not a file; it was not opened",
    }


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


def test_no_ignore_packs_what_is_ignored_otherwise(tmp_path: Path) -> None:
    plant(tmp_path / "src", {"a/1.jpg": JPEG, "@eaDir/2.jpg": JPEG, "a/.b/3.jpg": JPEG})
    read = library.SourceOptions(kind="imagefolder", ignore=False)
    (packed,) = library.pack(tmp_path / "src", tmp_path / "out", read=read, jobs=1)
    assert (packed.records, packed.classes, packed.ignored) == (3, 2, 0)
    data = library.open(tmp_path / "out", decode=None)
    assert {one["__key__"] for one in data} == {"a/1.jpg", "@eaDir/2.jpg", "a/.b/3.jpg"}
    shardio("pack", tmp_path / "src", tmp_path / "by-command", "--no-ignore")
    assert content(tmp_path / "by-command") == content(tmp_path / "out")


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
