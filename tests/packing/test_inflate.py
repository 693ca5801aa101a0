"""What is compressed as a whole is unpacked once; damage is found, and nothing is left."""

import bz2
import errno
import gzip
import importlib
import lzma
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, sources
from support.archives import FORMS, tar, write, zipped
from support.trees import JPEG, content, environment, images, noise, plant, shardio

from shardio import pack, unpack
from shardio.errors import DamageError, ShardioError, SourceError
from shardio.packing.gc import gc
from shardio.packing.sources.archives import deflate, inflate
from shardio.packing.sources.archives.extent import extent_of
from shardio.packing.sources.archives.inflate import Inflating

pack_one = partial(sources.pack_one, max_records=9)


@pytest.fixture(params=["isal", "zlib"])
def library(request: pytest.FixtureRequest) -> Iterator[str]:
    """What inflates; Python's own where isal is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "zlib":
            patch.setitem(sys.modules, "isal", None)
            patch.setitem(sys.modules, "isal.igzip", None)
        else:
            pytest.importorskip("isal")
        importlib.reload(deflate)
        assert (deflate.crc32 is zlib.crc32) == (request.param == "zlib")
        yield request.param
    importlib.reload(deflate)


@pytest.mark.usefixtures("library")
def test_what_is_inflated_ends_where_it_ends(tmp_path: Path) -> None:
    """Its last bytes may come when all that was deflated has been given."""
    for more in (-1, 0, 1, 100, 258, 1 << 20):  # than are inflated at a time
        for plain in (bytes((1 << 20) + more), b"ab" * ((1 << 19) + more)):
            packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
            packed = packer.compress(plain) + packer.flush()
            extent = extent_of(os.fsencode(write(tmp_path / "packed", packed)))
            assert b"".join(inflate.content(extent, "deflate")) == plain
            extent = extent_of(os.fsencode(write(tmp_path / "packed", packed[:-1])))
            with pytest.raises(DamageError, match="cut short"):
                list(inflate.content(extent, "deflate"))


@pytest.mark.usefixtures("library")
def test_a_damaged_member_of_a_zip_is_a_problem(tmp_path: Path) -> None:
    tree = images()
    for way in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        data = bytearray(zipped(tree, way=way))
        data[len(data) // 3] ^= 8
        source = write(tmp_path / f"{way}.zip", bytes(data))
        with pytest.raises(SourceError, match=r"1 file cannot be packed[\s\S]*(CRC-32|inflated)"):
            pack_one(source, tmp_path / "out")
        assert pack_one(source, tmp_path / f"out{way}", on_error="skip").records == len(tree) - 1


@pytest.mark.parametrize(
    "form", ["gnu.tar", "a.tar.gz", "a.tar.bz2", "a.tar.xz", "a.tar.zst", "deflated.zip"]
)
@pytest.mark.usefixtures("library")
def test_an_archive_that_was_cut_short_is_an_error(form: str, tmp_path: Path) -> None:
    whole = FORMS[form](images())
    for share in (0.133, 0.52, 0.71):
        source = write(tmp_path / f"{share}-{form}", whole[: int(share * len(whole))])
        with pytest.raises(DamageError, match=form) as caught:
            pack_one(source, tmp_path / "out")
        assert "byte" in str(caught.value) or "cut short" in str(caught.value)
        assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("form", ["a.tar.gz", "a.tar.xz", "a.tar.zst"])
def test_an_error_says_up_to_which_member_a_compressed_tar_is_whole(
    form: str, tmp_path: Path
) -> None:
    tree = {f"a/{n}.jpg": noise(f"{n}", 200_000) for n in range(8)}
    whole = FORMS[form](tree)
    source = write(tmp_path / form, whole[: len(whole) * 3 // 4])
    with pytest.raises(DamageError, match=r"its last whole member is a/[345]\.jpg$"):
        pack_one(source, tmp_path / "out")


@pytest.mark.parametrize("kind", ["xz", "bz2"])
def test_what_is_no_stream_behind_a_stream_is_an_error(kind: str, tmp_path: Path) -> None:
    """The libraries of Python end there without a word."""
    data = tar(images())
    one, two = (lzma.compress if kind == "xz" else bz2.compress)(data[:9216]), data[9216:]
    two = (lzma.compress if kind == "xz" else bz2.compress)(two)
    right = write(tmp_path / f"right.tar.{kind}", one + two)
    pack_one(right, tmp_path / "right")
    with pytest.raises(DamageError, match="damaged, or cut short"):
        pack_one(write(tmp_path / f"x.tar.{kind}", one + b"XX" + two[2:]), tmp_path / "out")


def test_of_many_compressed_archives_only_the_first_have_a_line_each(tmp_path: Path) -> None:
    """ImageNet-21k's classes may be 20,000 of them."""
    for name in "abcdef":
        data = tar({f"{i}.jpg": noise(f"{name}{i}", 60) for i in range(2)})
        write(tmp_path / "in" / f"{name}.tgz", gzip.compress(data))
    done = shardio("pack", tmp_path / "in", tmp_path / "out")
    lines = done.stderr.splitlines()
    assert [line.count("compressed as a whole") for line in lines] == [1] * 4
    assert ["so it is with all that follow" in line for line in lines] == [False] * 3 + [True]
    assert "12 files, 6 classes" in done.stdout


def test_archives_of_one_name_size_and_time_are_unpacked_apart(tmp_path: Path) -> None:
    data = {split: {f"{c}/1.jpg": noise(split, 900) for c in "ab"} for split in ("train", "val")}
    for split, files in data.items():
        write(tmp_path / f"p/{split}/x.tar.gz", gzip.compress(tar(files), 0, mtime=1))
    pack(tmp_path / "p", tmp_path / "out", jobs=1)
    unpack(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back/val/a/1.jpg").read_bytes() == data["val"]["a/1.jpg"]


@pytest.mark.parametrize("calls", [1, 3])
def test_a_kill_while_it_is_unpacked_starts_that_over(tmp_path: Path, calls: int) -> None:
    tree = {f"c{i % 3}/{i}.jpg": os.urandom(200_000) for i in range(24)}
    tree = {key: JPEG + data for key, data in tree.items()}
    source, out = write(tmp_path / "a.tgz", FORMS["a.tar.gz"](tree)), tmp_path / "out"
    program = (
        "import os, signal, sys\nfrom shardio import pack\nfrom shardio.storage import local\n"
        "write, left = local.OnceFile.write, [int(sys.argv[3])]\n"
        "def dying(self, data):\n    left[0] -= 1\n"
        "    left[0] or os.kill(os.getpid(), signal.SIGKILL)\n    write(self, data)\n"
        "local.OnceFile.write = dying\npack(sys.argv[1], sys.argv[2], jobs=1)\n"
    )
    command = [sys.executable, "-c", program, str(source), str(out), str(calls)]
    assert subprocess.run(command, env=environment(), timeout=LIMIT_S).returncode == -9
    assert len(list(out.glob("unpacked-*"))) == 1
    pack_one(source, out)
    pack_one(plant(tmp_path / "tree", tree), tmp_path / "right")
    assert content(out) == content(tmp_path / "right")


def test_gc_removes_what_was_unpacked_for_splits(tmp_path: Path) -> None:
    """A packing that was killed before its first shard has left it beside the splits."""
    tree = {
        f"{split}/a/{i}.jpg": noise(f"{split}{i}", 50) for split in ("train", "val") for i in (1, 2)
    }
    source, out = write(tmp_path / "a.tgz", FORMS["a.tgz"](tree)), tmp_path / "out"
    pack(source, out, jobs=1)
    program = (
        "import os, signal, sys\nfrom shardio import pack\n"
        "def die(*given, **more):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.modules['shardio.packing.pack']._from_listing = die\n"
        "pack(sys.argv[1], sys.argv[2], jobs=1, overwrite=True)\n"
    )
    command = [sys.executable, "-c", program, str(source), str(out)]
    assert subprocess.run(command, env=environment(), timeout=LIMIT_S).returncode == -9
    [left] = out.glob("unpacked-*")
    assert gc(out).removed == []
    assert gc(out, keep_s=0).removed == [str(left)]
    assert not left.exists()


def test_a_process_may_pack_an_archive_again(tmp_path: Path) -> None:
    """What was unpacked for the first time is gone."""
    source = write(tmp_path / "x.tgz", FORMS["a.tar.gz"](images()))
    for size in (10_000, 20_000):
        pack_one(source, tmp_path / "out", overwrite=True, shard_size=size, max_records=None)


def test_what_is_refused_after_it_was_unpacked_leaves_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "x.tgz", FORMS["a.tar.gz"]({"a/1.txt": b"x", "b/2.txt": b"y"}))
    pack_one(plant(tmp_path / "tree", images()), tmp_path / "out")
    there = content(tmp_path / "out")
    with pytest.raises(ShardioError):
        pack_one(source, tmp_path / "out", kind="imagefolder")
    assert content(tmp_path / "out") == there


def test_what_waits_goes_on_where_the_writer_gave_up(tmp_path: Path) -> None:
    """The file that it waits for is removed by whoever gives up."""
    source = extent_of(os.fsencode(write(tmp_path / "x.tgz", FORMS["a.tar.gz"](images()))))
    out = tmp_path / "out"
    name = Inflating(str(out)).inflate(source, "gzip").name
    (out / name).unlink()
    program = (
        "import os, sys, time\nfrom shardio.storage.local import OnceFile\n"
        "file = OnceFile(sys.argv[1], sys.argv[2], b'')\nassert file.take()\n"
        "print('held', flush=True)\nsys.stdin.readline()\n"
        "os.unlink(os.path.join(sys.argv[1], sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", program, str(out), name]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None and writer.stdin is not None
        assert writer.stdout.readline() == "held\n"
        stdin = writer.stdin

        def notify(line: str) -> None:
            if "waiting for another process" in line:
                stdin.write("\n")
                stdin.flush()

        found = Inflating(str(out), notify=notify).inflate(source, "gzip")
    assert (out / found.name).stat().st_size == found.file_size


def test_without_locks_each_process_unpacks_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    source = write(tmp_path / "x.tgz", FORMS["a.tar.gz"](images()))
    pack_one(source, tmp_path / "right")
    extent, out = extent_of(os.fsencode(source)), str(tmp_path / "out")
    monkeypatch.setattr("fcntl.lockf", refuse)
    one, two = (Inflating(out).inflate(extent, "gzip") for _ in range(2))
    assert one.name != two.name and one.file_size == two.file_size
    pack_one(source, tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "right")
