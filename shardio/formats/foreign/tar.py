"""The headers of a tar file: one pass over them finds every file in it, by name and range.

Member: header of 512 bytes, data, zeros up to a multiple of 512. Header: name at byte 0 (100
bytes), size at 124 (12, octal, or base 256 where the high bit is set), checksum at 148 (8, octal;
the sum of the header's bytes, these eight taken as blanks), type at 156, what a link leads to at
157 (100), "ustar" at 257, and what goes before the name at 345 (155). Longer names are the data of
a member before: type x (pax: lines "length keyword=value"), or L and K (GNU: of the member, of what
its link leads to). A block of zeros ends the file; so does the end of the file.

Source: https://pubs.opengroup.org/onlinepubs/9799919799/utilities/pax.html#tag_20_94_13_06, and
https://www.gnu.org/software/tar/manual/html_node/Standard.html
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import compress
from typing import NamedTuple, Protocol

import numpy as np

BLOCK = 512
FILE, PAX = b"0x"  # kinds of members
_ZEROS = bytes(BLOCK)
_NO_TAIL = bytes(BLOCK - 156)
_FILES = frozenset((b"0", b"\0", b"7"))
_EXTENSIONS = frozenset((b"x", b"X", b"g", b"L", b"K"))  # say something of the next member
_HEADER = struct.Struct("<100s24x11sB12x6s")  # name, size, byte behind it, checksum
_OCTAL = 8 ** np.arange(5, -1, -1)
_RUN = 1024  # headers that are compared at once
MAX_EXTENSION = 1 << 20  # bytes of a pax header or long name; extended attributes make them large

# Bytes read at once where members are small (malloc maps 128 KiB anew, see formats.record), and
# where the one before was large: what lies between is then not read.
_READ = 120 << 10
_LARGE = 4 << 10
_FAR = 32 << 10


class Readable(Protocol):
    """Bytes that are read by range, of a file or of a part of one."""

    size: int

    def read(self, start: int, length: int) -> bytes:
        """Read exactly `length` bytes from `start`. Raises DamageError, StorageError."""


class Unusable(ValueError):
    """A file that is intact, but has what cannot be read in place."""


class ExtendedHeader(NamedTuple):
    """What the headers before a member say of it."""

    name: bytes = b""
    size: int = -1
    link: bytes = b""  # what it leads to


_NO_EXTENDED = ExtendedHeader()
# What is to be done with a member that is no file, by its name, kind, byte, size as stated, and
# where it leads if it is a link: returns the bytes of its data. Raises ValueError, Unusable.
Other = Callable[[bytes, bytes, int, int, bytes], int]


class Alike:
    """A memory of headers that are much alike in a file: they cost 4 us a record of four.

    Each is one tuple, so that threads may share them. Those that values() knows were not checked.
    """

    __slots__ = ("tail", "time_headers")

    def __init__(self) -> None:
        # Bytes 156 to 512 (type, owner, prefix) are often those of the header before: they, their
        # Adler-32, type and prefix.
        self.tail = _NO_TAIL, zlib.adler32(_NO_TAIL), b"\0", b""
        # The pax header for the time of a member, as Python writes it, is one of three, by the
        # digits of the time: the headers, and the beginning of all that they hold, "28 mtime=".
        self.time_headers: tuple[bytes, ...] = ()

    def keep_tail(self, tail: bytes) -> tuple[bytes, int, bytes, bytes]:
        """Remember another tail; return it with its Adler-32, type and prefix."""
        prefix = b""
        if tail[189] and tail[101:107] == b"ustar\0":
            prefix = tail[189:344].partition(b"\0")[0] + b"/"
        self.tail = tail, zlib.adler32(tail), tail[:1], prefix
        return self.tail

    def keep_time_header(self, header: bytes, data: bytes) -> tuple[bytes, ...]:
        """Remember the header of a member's time, if this is one; return all of them."""
        time = b"%d mtime=" % len(data)
        if header[156] == PAX and data.startswith(time) and len(data) < 64:
            self.time_headers = (header + time, *self.time_headers[:3])
        return self.time_headers


class Blocks:
    """Reads a file nearly from front to back: much at once where members are small, else little."""

    __slots__ = ("_far", "_file", "_large", "base", "block")

    def __init__(self, file: Readable, large: int = _LARGE, far: int = _FAR) -> None:
        """far: bytes of a member that is large; large: bytes read at once behind such a one."""
        self._file, self._large, self._far = file, large, far
        self.base, self.block = 0, b""  # what was read last, and where it begins

    def fetch(self, at: int, least: int) -> bytes:
        """Read at least so many bytes from one on, as far as the file has them."""
        ahead = _READ if at - self.base - len(self.block) < self._far else self._large
        if ahead < least:
            ahead = least
        left = self._file.size - at
        self.block = self._file.read(at, ahead if ahead < left else left)
        self.base = at
        return self.block


class Run(NamedTuple):
    """Members that lie one behind the other, with one plain header each: files and folders."""

    names: list[bytes]  # of the files
    starts: list[int]  # of their data
    sizes: list[int]
    folders: list[bytes]
    stop: int  # where the next header begins


def plain_run(fetch: Callable[[int, int], bytes], at: int, size: int, most: int = _RUN) -> Run:
    """Return what lies from a header on, up to the first that is for `walk_files`; perhaps none.

    1.3 us a member where they are small, a third of what `walk_files` takes: sizes are followed one
    by one, and all else is compared at once. Parameters are those of `walk_files`.
    """
    block, base = b"", at
    headers: list[bytes] = []
    starts: list[int] = []
    sizes: list[int] = []
    for _ in range(min(most, _RUN)):
        i = at - base
        if i + BLOCK > len(block):
            if at + BLOCK > size:
                break
            block, base, i = fetch(at, BLOCK), at, 0
        header = block[i : i + BLOCK]
        try:
            length = int(header[124:135], 8)
        except ValueError:
            break
        kind, end = header[156:157], at + BLOCK
        if kind in _FILES:
            end += length + 511 & -512
        elif kind != b"5":
            break
        if length < 0 or end > size:
            break
        headers.append(header)
        starts.append(at + BLOCK)
        sizes.append(length)
        at = end
    rows = np.frombuffer(b"".join(headers), np.uint8).reshape(-1, BLOCK)
    seals = rows[:, 148:154] - ord("0")
    sums = rows.sum(1, dtype=np.int64) - rows[:, 148:156].sum(1, dtype=np.int64) + 8 * ord(" ")
    plain = (seals < 8).all(1) & (seals @ _OCTAL == sums)
    plain &= (rows[:, 135] <= 32) & (rows[:, 345] == 0)  # there the prefix of a name would begin
    if not plain.all():
        count = int(plain.argmin())
        at = starts[count] - BLOCK
        rows = rows[:count]
    names = rows[:, :100].copy().view("S100").ravel().tolist()
    if b"\0" in b"".join(names):
        names = [name.partition(b"\0")[0] for name in names]
    files = rows[:, 156] != ord("5")
    kept = files.tolist()
    return Run(
        list(compress(names, kept)),
        list(compress(starts, kept)),
        list(compress(sizes, kept)),
        list(compress(names, (~files).tolist())),
        at,
    )


def walk_files(
    block: bytes,
    size: int,
    fetch: Callable[[int, int], bytes],
    alike: Alike,
    other: Other,
    *,
    check: bool,
    at: int = 0,
) -> Iterator[tuple[bytes, int, int, int, int]]:
    """Yield each file of a tar: name, first header, start of data, its end, end of padding.

    block: the first bytes that are at hand, of `size`; fetch(at, least) gives bytes from `at`. at:
    where the first header begins.
    other: is called with each member that is no file, and says how long it is. check: the sums
    of headers, and what lies behind the end; a record's were checked by the scan.
    Raises ValueError naming the byte, Unusable.
    """
    unpack, adler = _HEADER.unpack_from, zlib.adler32
    base = at
    begin = size  # byte of the first header that belongs to the member to come; `size`: none yet
    extended = _NO_EXTENDED  # of that member
    tail, tail_sum, kind, prefix = alike.tail
    time_headers = alike.time_headers
    while at < size:
        i = at - base
        if i + BLOCK > len(block):
            block, base, i = _fetch_header(fetch, at, size), at, 0
        if block.startswith(time_headers, i):
            if begin == size:
                begin = at
            at += 2 * BLOCK
            continue
        name, digits, after, seal = unpack(block, i)
        if not block.startswith(tail, i + 156):
            tail, tail_sum, kind, prefix = alike.keep_tail(block[i + 156 : i + BLOCK])
        try:
            length = int(digits, 8)
            # The low half of Adler-32 is 1 + the sum of the bytes, modulo 65,521 (no header of
            # ASCII sums up to that); sum() takes five times as long. All else: is_sealed.
            plain = after <= 32 and (
                not check or int(seal, 8) == (adler(block[i : i + 148], tail_sum) & 0xFFFF) + 255
            )
        except ValueError:
            plain = False
        if not plain or length < 0:
            length = _odd_length(block[i : i + BLOCK], at, check)
            if length < 0:
                _check_end(at, size, fetch)
                break
        start = at + BLOCK
        if kind in _EXTENSIONS:
            end = start + (length + 511 & -512)
            if length > MAX_EXTENSION or end > size:
                raise ValueError(_cut(at, length, size))
            header = block[i : i + BLOCK]
            if start + length - base > len(block):
                block, base = fetch(start, length), start
            data = block[start - base : start - base + length]
            if kind != b"g":
                begin = min(begin, at)
            time_headers = alike.keep_time_header(header, data)
            extended = _extended(kind, data, at, extended)
            at = end
            continue
        name = extended.name or prefix + name.partition(b"\0")[0]
        data_bytes = length
        if kind not in _FILES:
            link = extended.link or block[i + 157 : i + 257].partition(b"\0")[0]
            data_bytes = other(name, kind, at, length, link)
        elif extended.size >= 0:
            data_bytes = length = extended.size
        end = start + (data_bytes + 511 & -512)
        if end > size:
            raise ValueError(_cut(at, length, size))
        if kind in _FILES:
            yield name, at if begin == size else begin, start, start + data_bytes, end
        at, begin, extended = end, size, _NO_EXTENDED
    if begin < size:
        raise ValueError(f"byte {begin}: a header without its member; the file was cut short")


def _fetch_header(fetch: Callable[[int, int], bytes], at: int, size: int) -> bytes:
    """Read a block that begins with a header. Raises ValueError if the file ends within it."""
    if at + BLOCK > size:
        raise ValueError(f"byte {at}: {size - at} bytes are no header; it was cut short")
    return fetch(at, BLOCK)


def _odd_length(header: bytes, at: int, check: bool) -> int:
    """Return the size that an unusual header states; -1 for zeros, which end the file.

    check: also compare its sum. Raises ValueError.
    """
    if check and header == _ZEROS:
        return -1
    if check and not is_sealed(header):
        raise ValueError(
            f"byte {at}: the sum of the header's bytes is not the one it states; it is damaged, or "
            "no tar header"
        )
    return _number(header[124:136], at)


def _extended(kind: bytes, data: bytes, at: int, extended: ExtendedHeader) -> ExtendedHeader:
    """Return what is said of the next member, by an extension header and those before it."""
    found = _NO_EXTENDED
    if kind in b"LK":
        text = data.partition(b"\0")[0]
        found = ExtendedHeader(name=text) if kind == b"L" else ExtendedHeader(link=text)
    elif b"path=" in data or b"size=" in data or b"GNU.sparse" in data:
        found = _pax(data, at, everywhere=kind == b"g")
    return ExtendedHeader(
        extended.name or found.name,
        extended.size if extended.size >= 0 else found.size,
        extended.link or found.link,
    )


def _pax(data: bytes, at: int, *, everywhere: bool) -> ExtendedHeader:
    """Return what a pax header says of the member that follows."""
    name, size, link, i = b"", -1, b"", 0
    while i < len(data) and data[i]:
        blank = data.find(b" ", i, i + 9)
        digits = data[i:blank] if blank > i else b""
        end = i + int(digits) if digits.isdigit() else 0
        if not i < blank < end <= len(data) or data[end - 1] != 0x0A:
            raise ValueError(f"byte {at}: its pax header is damaged at its byte {i}")
        keyword, _, value = data[blank + 1 : end - 1].partition(b"=")
        if keyword.startswith(b"GNU.sparse"):
            raise sparse(at)
        if keyword in (b"path", b"size", b"linkpath") and everywhere:
            raise Unusable(f"byte {at}: a global pax header states a {keyword.decode()}")
        if keyword == b"path":
            name = value.rstrip(b"/")
        elif keyword == b"linkpath":
            link = value
        elif keyword == b"size":
            if not value.isdigit() or len(value) > 20:
                raise ValueError(f"byte {at}: its pax header states no size, but {value[:20]!r}")
            size = int(value)
        i = end
    return ExtendedHeader(name, size, link)


def sparse(at: int) -> Unusable:
    return Unusable(
        f"byte {at}: a sparse member, whose holes are left out.\nPack the files again without "
        "--sparse"
    )


def _number(digits: bytes, at: int) -> int:
    """Read a size that is not eleven octal digits: more, fewer, none, or in base 256."""
    if digits[0] == 0x80:
        return int.from_bytes(digits[1:], "big")
    try:
        length = int(digits.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        length = -1
    if length < 0:
        raise ValueError(f"byte {at}: its header states no size, but {digits!r}")
    return length


def is_sealed(header: bytes) -> bool:
    """Return True if the sum of a header's bytes is the one it states, unsigned or signed."""
    field = header[148:156]
    try:
        stated = int(field.partition(b"\0")[0].strip(), 8)
    except ValueError:
        return False
    rest = header[:148] + header[156:]
    total = sum(rest) + 8 * ord(" ")
    return stated in (total, total - 256 * sum(byte > 127 for byte in rest))


def _check_end(at: int, size: int, fetch: Callable[[int, int], bytes]) -> None:
    """Raise Unusable unless zeros follow: a reader would lose what lies behind, without a word."""
    end = at
    while at < size:
        data = fetch(at, min(1 << 20, size - at))
        if data.count(0) != len(data):
            found = at + len(data) - len(data.lstrip(b"\0"))
            raise Unusable(
                f"byte {end}: zeros end the tar file here, but data follow at byte {found}: zeros "
                "were written over members, or tar files were joined.\nRestore it, or take it "
                "apart and pack the files again: tar --ignore-zeros -x"
            )
        at += len(data)


def _cut(at: int, length: int, size: int) -> str:
    return (
        f"byte {at}: its header states {length:,} bytes, but the file ends at byte {size}; it was "
        "cut short, or the header is damaged"
    )
