"""Members of zips: names, links, damage, what cannot be read; entries at once and one by one."""

import io
import os
import random
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

from shardio.errors import DamageError, SourceError
from shardio.packing.sources.archives import zip_members
from shardio.packing.sources.archives.folder import open_archive
from shardio.packing.sources.archives.inflate import Inflating
from shardio.packing.sources.archives.member_table import MemberTable
from shardio.packing.sources.archives.zip_members import list_zip, read_member

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


class Bytes:
    """A file in memory, as `list_zip` reads it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def read(self, start: int, length: int) -> bytes:
        found = self.data[start : start + length]
        assert len(found) == length
        return found


def entry(name: str, system: int = 3, mode: int = 0o100644) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = system, mode << 16
    return info


def any_zip(rng: random.Random, count: int, odd: float) -> bytes:
    """A zip of files, among which are folders, links, devices, names of any kind, and twins."""
    kinds = (
        *(("{}/", 3, 0o40755), ("l{}", 3, 0o120777), ("d{}", 3, 0o20644), ("w\\{}.jpg", 0, 0)),
        *(("ä{}.jpg", 3, 0o100644), ("./p{}", 3, 0), ("../o{}", 3, 0), ("a//{}", 19, 0)),
        *(
            ("f{}/", 3, 0),
            ("n\0{}", 3, 0),
            ("c0/00001.jpg", 3, 0o100600),
            ("m{}.jpg", 19, 0o100644),
        ),
    )
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for number in range(count):
            info = entry(f"c{number % 3}/{number:05}.jpg")
            if rng.random() < odd:
                name, system, mode = rng.choice(kinds)
                info = entry("x", system, mode)
                info.filename = name.format(number)  # zipfile would make it a plain one
            info.comment = b"c" * rng.randrange(20_000)  # the directory is read in many runs
            info.compress_type = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
            file.NameToInfo.clear()  # it warns of twins
            is_file = not info.filename.endswith("/") and not info.filename.startswith("l")
            file.writestr(info, rng.randbytes(rng.randrange(200)) if is_file else b"")
    return b"put before" + data.getvalue()


def rows(table: MemberTable) -> list[tuple[Any, ...]]:
    columns = (table.sizes, table.starts, table.packed_sizes, table.checksums, table.methods)
    return list(zip(table.paths, *columns, strict=True))


@pytest.mark.parametrize("odd", [0, 0.02, 0.5, 1])
def test_entries_added_at_once_are_as_those_added_one_by_one(
    odd: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"zip {odd}")
    for _ in range(8):
        file = Bytes(any_zip(rng, 300, odd))
        at_once = list_zip(file, "x.zip")
        with monkeypatch.context() as patched:
            patched.setattr(zip_members, "_add_files", lambda *_: False)
            one_by_one = list_zip(file, "x.zip")
        assert rows(at_once) == rows(one_by_one)
        for name in ("folders", "problems", "outside", "links"):
            assert getattr(at_once, name) == getattr(one_by_one, name)
        assert len(at_once.paths) == 300 or odd
        with zipfile.ZipFile(io.BytesIO(file.data)) as reference:
            plain = {one.filename.encode(): one for one in reference.infolist()}
            for path, size, start, packed, crc, way in rows(at_once):
                if (info := plain.get(path)) and info.header_offset == start:
                    found = read_member(file, path, start, packed, size, way, crc)
                    assert found == reference.read(info)


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (0, b"\0", "there is no entry of its directory"),
        (8, b"\1", "c1/00049.jpg is encrypted"),
        (10, b"\x0c", "c1/00049.jpg is compressed by bzip2"),
        (34, b"\1", "c1/00049.jpg lies in another volume"),
        (45, b"\1", "c1/00049.jpg: its .* bytes lie behind the end"),
        (20, b"\xff" * 4, ".*a size of it is missing in its zip64 part"),
    ],
)
def test_what_cannot_be_read_is_told_among_plain_entries(at: int, value: bytes, why: str) -> None:
    data = bytearray(any_zip(random.Random(3), 50, 0))
    entry = data.rfind(b"PK\1\2")
    data[entry + at : entry + at + len(value)] = value
    with pytest.raises((DamageError, SourceError), match=rf"byte {entry}: {why}"):
        list_zip(Bytes(bytes(data)), "x.zip")
