"""Members are read as files are: opened when needed, closed in the end, and as they were listed."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support import LIMIT_S, archives, sources
from support.archives import FORMS, class_tars, tar, write
from support.conformance import FileSourceConformance, change_file
from support.trees import environment, images, noise, plant, shardio

from shardio import SourceOptions
from shardio.errors import SourceChangedError, SourceError
from shardio.packing.sources.archives.extent import extent_of
from shardio.packing.sources.archives.folder import (
    ArchiveFolder,
    open_archive,
    open_folder_of_archives,
)
from shardio.packing.sources.archives.inflate import Inflating
from shardio.packing.sources.files import LOOP, MISSING, DiskFolder
from shardio.packing.sources.listed_folder import Listed, ListedFolder

pack_one = partial(sources.pack_one, max_records=9)


def test_what_is_packed_of_a_wrapped_archive_is_said(tmp_path: Path) -> None:
    source = write(tmp_path / "x.tar", tar(images(), "data/"))
    said = shardio("pack", source, tmp_path / "out").stdout
    assert "data/ is all that is in the archive" in said
    one_class = write(
        tmp_path / "y.tar", tar({f"{i}.jpg": noise(str(i), 60) for i in range(3)}, "cats/")
    )
    done = pack_one(one_class, tmp_path / "one")
    assert (done.records, done.classes) == (3, 1)
    assert (
        f"its only folder is the one class; if that is none, give its path, {one_class}/cats"
        in (done.notes)
    )


def test_many_archives_take_few_descriptors(tmp_path: Path) -> None:
    tars = {f"x{2 * i:03}.tar": tar({f"{i}.jpg": noise(str(i), 60)}) for i in range(150)}
    source = plant(tmp_path / "tars", tars)
    program = (
        "import resource, sys\nfrom shardio import pack\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (110, 110))\n"
        "print(pack(sys.argv[1], sys.argv[2], jobs=1)[0].records)\n"
    )
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "out")]
    done = subprocess.run(
        command, env=environment(), timeout=LIMIT_S, capture_output=True, text=True, check=False
    )
    assert done.stdout == "150\n", done.stderr


class TestTar(FileSourceConformance):
    KIND = "imagefolder"

    def make(self, root: Path) -> Path:
        tree = {f"{'ab'[i % 2]}/{i:02}.jpg": noise(str(i), 90 + i) for i in range(self.COUNT)}
        return write(root / "x.tar", tar(tree, "inner/")) / "inner"

    def file(self, path: Path) -> Path:
        return path.parent

    @pytest.mark.parametrize("change", ["size", "time", "gone"])
    def test_a_file_that_changes_after_the_listing_is_named(self, path: Path, change: str) -> None:
        """All members are of one file."""
        found, file = self.listing(path), self.file(path)
        change_file(file, change)
        with found.source.open() as read, pytest.raises(SourceChangedError, match=file.name):
            read(0)


@pytest.mark.parametrize("form", ["gnu.tar", "deflated.zip", "stored.zip"])
def test_an_archive_that_changes_while_it_is_read_is_named(form: str, tmp_path: Path) -> None:
    """Be it that a member is damaged then, or that nothing else says so."""
    for damage in (False, True):
        data = FORMS[form](images())
        folder, _ = open_archive(os.fsencode(write(tmp_path / form, data)), Inflating())
        walked = folder.walk()
        members = zip(walked.keys, walked.sizes.tolist(), walked.mtimes.tolist(), strict=True)
        with pytest.raises(SourceChangedError, match=form), folder.opened() as read:
            read(*next(members))
            (tmp_path / form).write_bytes(data[: len(data) // 3] * 3 if damage else data)
            for member in members:
                read(*member)


class InMemory(ListedFolder):
    """Files that are nowhere: a number for each, which is its size and its time."""

    outside = "is outside"

    def __init__(self, paths: str, inner: str = "", **more: list[tuple[bytes, str]]) -> None:
        super().__init__(b"top", inner.encode())
        names = [name.encode() for name in paths.split()]
        numbers = np.arange(1, len(names) + 1)
        folders = [b"a/", b"a/none/", b"d/", b"d/.hidden/"]
        self._listed = Listed(names, numbers, numbers * 10, folders, **more)

    @property
    def listed(self) -> Listed:
        return self._listed


def test_a_folder_among_listed_files_has_its_own_alone() -> None:
    paths = "a-b/1.jpg a.jpg a/.x/2.jpg a/3.jpg a/b/4.jpg a/b/_5.jpg a0/6.jpg"
    problems = [(b"a/.x/7.jpg", "is none"), (b"a/7.jpg", "is none"), (b"a/c/8.jpg", "is none")]
    problems += [(b"a/l", LOOP), (b"z/9.jpg", "is none")]
    outside = [(b"../9.jpg", "is outside")]
    folder = InMemory(paths, "a/", problems=problems, outside=outside)
    assert folder.path == b"top/a"
    top = folder.top()
    assert ({*top.folders}, top.files, top.loops, top.ignored) == (
        {b"b", b"none", b"c"}, [b"3.jpg", b"7.jpg"], [b"l"], [b".x"]
    )  # fmt: skip
    walked = folder.walk()
    assert walked.keys == [b"3.jpg", b"b/4.jpg", b"b/_5.jpg"]
    assert (walked.sizes.tolist(), walked.mtimes.tolist()) == ([4, 5, 6], [40, 50, 60])
    assert walked.problems == [
        *outside,
        (b"7.jpg", "is none"),
        (b"c/8.jpg", "is none"),
        (b"l", LOOP),
    ]
    assert walked.ignored == 1
    seen = folder.look([b"3.jpg", b"./b//4.jpg", b"7.jpg", b"8.jpg", b"../a.jpg", b"/a.jpg"])
    assert [(one.size, one.mtime, one.why) for one in seen] == [
        (4, 40, None), (5, 50, None), (0, 0, "is none"), (0, 0, MISSING),
        *[(0, 0, "is outside")] * 2,
    ]  # fmt: skip
    there = {"": True, "a/": True, "a-/": False, "d/": True, "e/": False}
    assert {inner: InMemory(paths, inner).is_there() for inner in there} == there
    assert InMemory("").walk().ignored == 1  # d/.hidden, in which nothing lies
    assert not InMemory("", "b/").is_there() and folder.within(b"..") == b""


def test_a_member_or_an_archive_that_is_not_there_is_named(tmp_path: Path) -> None:
    source = plant(
        tmp_path / "tars", {"x.tar": tar({"a/1.jpg": b"1"}), "y.tar": tar({"b/2.jpg": b"2"})}
    )
    folder = open_folder_of_archives(DiskFolder(os.fsencode(source)), Inflating())
    walked = folder.walk()
    first, second = zip(walked.keys, walked.sizes.tolist(), walked.mtimes.tolist(), strict=True)
    with folder.opened() as read:
        with pytest.raises(SourceChangedError, match=r"a/9\.jpg.* it is gone from the archive"):
            read(b"a/9.jpg", *first[1:])
        for size, stamp in ((first[1] + 1, first[2]), (first[1], first[2] + 1)):
            with pytest.raises(SourceChangedError, match=r"a/1\.jpg.* its archive is another"):
                read(first[0], size, stamp)
        assert read(*first) == b"1"
        (source / "y.tar").unlink()
        with pytest.raises(SourceChangedError, match=r"b/2\.jpg.*y\.tar is gone"):
            read(*second)
    with pytest.raises(SourceError, match=r"b/9\.jpg: "):
        folder.below(b"b").member(b"9.jpg")
    assert folder.archive_of(b"a/1.jpg").endswith("x.tar")
    assert folder.archive_of(b"b/9.jpg").endswith("tars")


def test_reading_opens_no_member_twice_and_closes_all(tmp_path: Path) -> None:
    write(tmp_path / "x.tar", tar(class_tars(images())))
    folder, _ = open_archive(os.fsencode(tmp_path / "x.tar"), Inflating())
    assert isinstance(folder, ArchiveFolder)
    before = len(os.listdir("/proc/self/fd"))
    walked = folder.walk()
    with folder.opened() as read:
        for key, size, stamp in zip(walked.keys, walked.sizes, walked.mtimes, strict=True):
            assert read(key, int(size), int(stamp)) == images()[key.decode()]
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before
    assert extent_of(os.fsencode(tmp_path / "x.tar")).file_size > 0
    assert archives.WHEN and SourceOptions()
