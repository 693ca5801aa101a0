"""Members of zips: their names, links, damage, and what cannot be read."""

import io
import os
import stat
import struct
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import sources
from support.archives import deflated, write, zipped
from support.sources import problems
from support.trees import JPEG, images

from shardio.errors import SourceError
from shardio.packing.sources.archives.folder import open_archive
from shardio.packing.sources.archives.inflate import Inflating

pack_one = partial(sources.pack_one, max_records=9)


def test_a_link_in_a_zip_is_followed(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("a/1.jpg", JPEG + b"1")
        for name, target in (("b/2.jpg", "../a/1.jpg"), ("b/3.jpg", "/etc/passwd")):
            info = zipfile.ZipInfo(name)
            info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
            file.writestr(info, target)
    source = write(tmp_path / "x.zip", out.getvalue())
    assert [key for key, _ in problems(source)] == [b"b/3.jpg"]
    assert pack_one(source, tmp_path / "out", on_error="skip").records == 2


@pytest.mark.parametrize(
    ("system", "flag", "stored", "right"),
    [
        (3, True, "ä".encode(), "ä".encode()),
        (0, False, b"\x84", "ä".encode()),  # code page 437, as of DOS
        (0, False, "ä".encode(), "ä".encode()),  # UTF-8 that is not said
        (3, False, b"\xe4", b"\xe4"),  # as zip of Linux writes what is there
    ],
)
def test_names_in_a_zip(
    system: int, flag: bool, stored: bytes, right: bytes, tmp_path: Path
) -> None:
    plain = b"q" * len(stored)
    data = zipped({f"c/{plain.decode()}.jpg": JPEG}).replace(plain, stored)
    data = data.replace(b"PK\1\2\x14\3", b"PK\1\2\x14" + bytes([system]))
    if flag:
        for mark, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
            place = data.index(mark) + at
            data = data[:place] + struct.pack("<H", 0x800) + data[place + 2 :]
    folder, _ = open_archive(os.fsencode(write(tmp_path / "x.zip", data)), Inflating())
    assert folder.walk().keys == [b"c/" + right + b".jpg"]


def test_names_with_backslashes_of_windows_are_paths(tmp_path: Path) -> None:
    data = (
        zipped({"a_1.jpg": JPEG, "b_2.jpg": JPEG}).replace(b"a_1", b"a\\1").replace(b"b_2", b"b\\2")
    )
    data = data.replace(b"PK\1\2\x14\3", b"PK\1\2\x14\0")
    assert pack_one(write(tmp_path / "x.zip", data), tmp_path / "out").classes == 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data.replace(b"\x14\0\0\0", b"\x14\0\1\0"), "encrypted"),
        (lambda data: data[:-18] + b"\3\0" + data[-16:], "volumes"),
    ],
)
def test_zips_that_cannot_be_read_say_why(change: Any, why: str, tmp_path: Path) -> None:
    data = change(zipped(images()))
    with pytest.raises(SourceError, match=why):
        pack_one(write(tmp_path / "x.zip", data), tmp_path / "out")
    lzma_zip = zipped(images(), way=zipfile.ZIP_LZMA)
    with pytest.raises(SourceError, match="compressed by LZMA"):
        pack_one(write(tmp_path / "y.zip", lzma_zip), tmp_path / "out")


def test_a_member_that_grows_beyond_its_size_is_bounded(tmp_path: Path) -> None:
    """A deflated member of 100 MB whose headers state 100 bytes takes no 100 MB."""
    data = bytearray(deflated({"c/1.jpg": JPEG + bytes(100 << 20)}))
    at = data.index(b"PK\1\2")
    data[at + 24 : at + 28] = struct.pack("<L", 100)
    source = write(tmp_path / "x.zip", bytes(data))
    with pytest.raises(SourceError, match="its header states 100"):
        pack_one(source, tmp_path / "out")


def test_many_members_of_a_zip(tmp_path: Path) -> None:
    """More than 65,535, which need the zip64 end of the directory."""
    tree: Any = {f"c{i % 7}/{i:06}.jpg": JPEG for i in range(66_000)}
    folder, _ = open_archive(os.fsencode(write(tmp_path / "x.zip", zipped(tree))), Inflating())
    assert len(folder.walk().keys) == 66_000
