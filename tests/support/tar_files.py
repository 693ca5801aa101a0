"""Tar files written byte by byte, by the layout's description alone, and read back every way."""

from collections.abc import Callable
from typing import Any

from shardio.formats.foreign import webdataset as tar
from shardio.formats.foreign.webdataset import TarFile

from .one_file import OneFile

JPG = b"\xff\xd8\xff\xe0"

END = bytes(1024)

NO_FILE = TarFile(OneFile(), "nothing")  # for what needs no file


class Bytes:
    """A File in memory that remembers how much was read."""

    def __init__(self, data: bytes, name: str = "here.tar") -> None:
        self.name, self.size, self.data, self.taken, self.most = name, len(data), data, 0, 0

    def read(self, start: int, length: int) -> bytes:
        assert 0 <= start <= start + length <= self.size
        self.taken += length
        self.most = max(self.most, length)
        return self.data[start : start + length]


def tar_file(file: Any) -> TarFile:
    return TarFile(OneFile(file), "here.tar")


def member(
    name: bytes,
    data: bytes = b"",
    kind: bytes = b"0",
    *,
    size: bytes | None = None,
    magic: bytes = b"ustar\x0000",
    prefix: bytes = b"",
    seal: Callable[[int], bytes] = lambda total: b"%06o\0 " % total,
) -> bytes:
    """A header and its data, written by the layout's description alone."""
    digits = b"%011o\0" % len(data) if size is None else size
    start = name.ljust(100, b"\0") + b"0000644\0" + 2 * b"0000000\0" + digits + b"00000000000\0"
    rest = (kind + bytes(100) + magic).ljust(345 - 156, b"\0") + prefix.ljust(167, b"\0")
    assert len(start) == 148 and len(rest) == 356
    return start + seal(sum(start) + sum(rest) + 256) + rest + data + bytes(-len(data) % 512)


def pax(*pairs: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    lines = b""
    for keyword, value in pairs:
        length = len(keyword) + len(value) + 3
        length += len(str(length + len(str(length))))
        lines += b"%d %s=%s\n" % (length, keyword, value)
    return member(b"pax", lines, kind)


def scan(data: bytes) -> list[tuple[int, int]]:
    return list(tar_file(Bytes(data)).scan())


def read(data: bytes) -> list[dict[str, Any]]:
    """The values of all records, which must be the same however they are found."""
    places = scan(data)
    found = [NO_FILE.values(data[at : at + n], i) for i, (at, n) in enumerate(places)]
    walked = list(tar_file(Bytes(data)).walk())
    assert [one[:3] for one in walked] == [(at, n, data[at : at + n]) for at, n in places]
    assert repr([values for *_, values in walked]) == repr(found)
    for (at, n), values in zip(places, found, strict=True):
        record = data[at : at + n]
        assert repr(tar._decoded(record, NO_FILE._any_members(record))) == repr(values)
    return found


def value_of(extension: str, data: bytes) -> Any:
    return read(member(f"k.{extension}".encode(), data))[0][extension]
