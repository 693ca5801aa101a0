"""Directories of zips: entries that are added at once are those that would be added one by one."""

import io
import random
import zipfile
from typing import Any

import pytest

from shardio.errors import DamageError, SourceError
from shardio.packing.sources.archives import zip_members
from shardio.packing.sources.archives.member_table import MemberTable
from shardio.packing.sources.archives.zip_members import list_zip, read_member


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
        (0, 0, "there is no entry of its directory"),
        (8, 1, "c1/00049.jpg is encrypted"),
        (10, 12, "c1/00049.jpg is compressed by bzip2"),
        (34, 1, "c1/00049.jpg lies in another volume"),
        (45, 1, "c1/00049.jpg: its .* bytes lie behind the end"),
    ],
)
def test_what_cannot_be_read_is_told_among_plain_entries(at: int, value: int, why: str) -> None:
    data = bytearray(any_zip(random.Random(3), 50, 0))
    entry = data.rfind(b"PK\1\2")
    data[entry + at] = value
    with pytest.raises((DamageError, SourceError), match=rf"byte {entry}: {why}"):
        list_zip(Bytes(bytes(data)), "x.zip")
