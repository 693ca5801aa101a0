"""Members are read as files are: opened when needed, closed in the end, and as they were listed."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support import LIMIT_S, archives, sources
from support.archives import FORMS, class_tars, tar, write
from support.conformance import FileSourceConformance, change_file
from support.trees import environment, images, noise, plant, shardio

from shardio import SourceOptions
from shardio.errors import SourceChangedError
from shardio.packing.sources.archives.extent import extent_of
from shardio.packing.sources.archives.folder import ArchiveFolder, open_archive
from shardio.packing.sources.archives.inflate import Inflating

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
