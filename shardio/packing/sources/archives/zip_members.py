"""The members of a zip: its central directory, at the end of the file, and no local header.

End of central directory: 22 bytes, "PK\\5\\6", numbers of this disk and of the directory's (2
each), entries on this disk and in all (2 each), bytes and offset of the directory (4 each), length
of a comment behind it (2). Where a number does not fit, all its bits are set, and the zip64 record
has it: 20 bytes before, "PK\\6\\7" and its offset; there "PK\\6\\6", and the same numbers in 4 and
8 bytes. Entry: 46 bytes, "PK\\1\\2", versions, flags (bit 0: encrypted, bit 11: the name is UTF-8),
method, time, CRC-32, packed and plain size, lengths of name, extra and comment, disk, attributes,
offset of the local header. Extra: id and length (2 each); 1: sizes and offset of 8 bytes; 0x7075:
the name in UTF-8, behind a version and the CRC-32 of the name. Local header: 30 bytes, "PK\\3\\4",
lengths of name and extra at 26 and 28; the data follow.

Source: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3 and 4.5; for 0x7075 4.6.9
"""

from __future__ import annotations

import stat
import struct
from array import array
from collections.abc import Iterator
from itertools import compress
from typing import Any

import numpy as np

from ....errors import DamageError, SourceError, printable
from ....formats.foreign.tar import Readable
from . import deflate
from .member_table import DEFLATED, STORED, Link, MemberTable, plain_path, plain_paths

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s4B4H3L5H2L")
_LENGTHS = struct.Struct("<4s24x3H")  # of an entry: of its name, extra and comment
_LOCAL = struct.Struct("<26x2H")
_COLUMNS = np.dtype([
    ("mark", "S4"), ("made", "u1"), ("system", "u1"), ("needed", "<u2"), ("flags", "<u2"),
    ("method", "<u2"), ("time", "<u4"), ("checksum", "<u4"), ("packed", "<u4"), ("plain", "<u4"),
    ("name", "<u2"), ("extra", "<u2"), ("comment", "<u2"), ("disk", "<u2"), ("internal", "<u2"),
    ("attributes", "<u4"), ("offset", "<u4"), ("name_end", "u1"),
])  # fmt: skip
_COMMENT = 1 << 16  # bytes at most
_READ = 1 << 20
_FULL, _FULL16 = 0xFFFFFFFF, 0xFFFF
_WINDOWS = (0, 11)
_UNIX, _MAC = 3, 19  # systems whose attributes are those of Unix
_LINK, _REGULAR = stat.S_IFLNK >> 12, stat.S_IFREG >> 12  # kinds of files, in their attributes
_MOST_LINK = 4096  # bytes of what a link leads to
_EXTRA = 64  # bytes that a local header's extra usually has at most
_WAYS = {0: STORED, 8: DEFLATED}
_METHODS = {1: "shrunk", 6: "imploded", 9: "deflate64", 12: "bzip2", 14: "LZMA", 93: "zstd",
            95: "xz", 98: "PPMd", 99: "AES"}  # fmt: skip


def list_zip(file: Readable, shown: str) -> MemberTable:
    """Return the members of a zip. Raises DamageError, SourceError, StorageError."""
    begin, size, count, moved = _directory(file, shown)
    table = MemberTable()
    links: list[int] = []
    seen = 0
    for base, block, starts in _runs(file, begin, size, shown):
        seen += len(starts)
        columns = _columns(block, starts)
        first = 0
        for odd in [*np.flatnonzero(_are_odd(columns, file.size - moved)).tolist(), len(starts)]:
            one_by_one = starts[odd : odd + 1]
            files = columns[first:odd], block, starts[first:odd]
            if odd > first and not _add_files(table, *files, moved):
                one_by_one = starts[first : odd + 1]
            for at in one_by_one:
                _add_entry(table, links, block, at, base + at, moved, file.size, shown)
            first = odd + 1
    if seen != count and (seen & _FULL16 != count or count > _FULL16):
        raise DamageError(f"{shown}: its directory has {seen:,} entries, and states {count:,}")
    _take_links(table, links, file, shown)
    return table


def _are_odd(columns: Any, size: int) -> Any:
    """Return which entries `_add_entry` takes: all but files, stored or deflated, of small sizes.

    size: of the zip, without what was put before it. Names are not looked at.
    """
    kind = columns["attributes"] >> 28
    kind[~np.isin(columns["system"], (_UNIX, _MAC))] = 0
    stop = columns["offset"].astype(np.int64) + columns["packed"] + _LOCAL.size
    return (
        (columns["flags"] & 1 != 0)
        | ~np.isin(columns["method"], list(_WAYS))
        | ~np.isin(columns["disk"], (0, _FULL16))
        | ~np.isin(kind, (0, _REGULAR))
        | (columns["packed"] == _FULL)
        | (columns["plain"] == _FULL)
        | (columns["offset"] == _FULL)
        | (columns["name_end"] == ord("/"))
        | (stop > size)
    )


def _add_files(
    table: MemberTable, columns: Any, block: bytes, starts: list[int], moved: int
) -> bool:
    """Add entries, none of them odd, at once; return False, and add none, for odd names."""
    step = _ENTRY.size
    names = [
        block[at + step : at + step + length]
        for at, length in zip(starts, columns["name"].tolist(), strict=True)
    ]
    text = b"".join(names)
    if not text.isascii() or b"\0" in text:
        return False
    if b"\\" in text and np.isin(columns["system"], _WINDOWS).any():
        return False
    paths = plain_paths(names)
    if not all(paths):
        return False
    table.paths += filter(None, paths)
    table.sizes.frombytes(columns["plain"].astype(np.int64).tobytes())
    table.starts.frombytes((columns["offset"].astype(np.int64) + moved).tobytes())
    table.packed_sizes.frombytes(columns["packed"].astype(np.int64).tobytes())
    table.checksums.extend(columns["checksum"].tolist())
    table.methods.extend([_WAYS[method] for method in columns["method"].tolist()])
    return True


def _add_entry(
    table: MemberTable, links: list[int], block: bytes, i: int, at: int, moved: int, end: int,
    shown: str,
) -> None:  # fmt: skip
    """Add one entry of the directory, at byte `at` of the zip and `i` of a block. end: of the zip.

    Raises DamageError, SourceError.
    """
    (_, _, system, _, _, flags, method, _, _, checksum, packed, plain, length, extra_length, _,
     disk, _, attributes, offset) = _ENTRY.unpack_from(block, i)  # fmt: skip
    i += _ENTRY.size
    name, extra = block[i : i + length], block[i + length : i + length + extra_length]

    def where() -> str:
        return f"{shown}: byte {at}: {printable(path or name)}"

    if _FULL in (packed, plain, offset):
        packed, plain, offset = _zip64(extra, packed, plain, offset, f"{shown}: byte {at}")
    if system in _WINDOWS or not name.isascii():
        name = _name(name, extra, system, utf8=bool(flags & 0x800))
    is_folder = name[-1:] == b"/"
    path = plain_path(name.rstrip(b"/") if is_folder else name)
    if path is None:
        table.outside.append(name)
        return
    if is_folder and plain:
        table.problems.append((path or b"/", "is a folder by its name, and has data"))
        return
    if not path:
        return
    if is_folder:
        table.folders.add(path)
        return
    if flags & 1 or method == 99:
        raise SourceError(f"{where()} is encrypted; unpack it with its password, and pack that")
    if disk not in (0, _FULL16):
        raise SourceError(f"{where()} lies in another volume; join them: zip -s 0 IN --out OUT")
    if (way := _WAYS.get(method)) is None:
        called = _METHODS.get(method, f"method {method}")
        raise SourceError(f"{where()} is compressed by {called}; expected stored or deflated")
    kind = attributes >> 28 if system in (_UNIX, _MAC) else 0
    if kind == _LINK:
        links.append(len(table.paths))
    elif kind not in (0, _REGULAR):
        table.problems.append((path, "is no file, but a device or the like"))
        return
    if offset + moved + _LOCAL.size + packed > end:
        raise DamageError(f"{where()}: its {packed:,} bytes lie behind the end of the file")
    table.add(path, plain, offset + moved)
    table.packed_sizes.append(packed)
    table.checksums.append(checksum)
    table.methods.append(way)


def read_member(
    file: Readable, name: bytes, start: int, packed: int, size: int, way: int, checksum: int
) -> bytes:
    """Return the bytes of a zip's member. Raises ValueError, and what reading raises.

    name: its path; start: of its local header.
    """
    found = file.read(start, range_length(name, start, packed, file.size))
    begin = _data_begin(found, start)
    end = begin + packed
    if end > len(found):  # its extra is longer than usual
        found += file.read(start + len(found), end - len(found))
    if way == STORED:
        data = found[begin:end]
    else:
        inflater = deflate.inflater()
        try:
            data = inflater.decompress(memoryview(found)[begin:end], size + 1)
        except deflate.error as error:
            raise ValueError(f"its data cannot be inflated ({error})") from None
        if not inflater.eof and len(data) <= size:
            raise ValueError("its deflated data have no end")
    if len(data) != size:
        shown = f"{len(data):,} bytes{' or more' if len(data) > size else ''}"
        raise ValueError(f"it has {shown}, and its header states {size:,}")
    if (crc := deflate.crc32(data)) != checksum:
        raise ValueError(f"its CRC-32 is {crc:08x}, expected {checksum:08x}")
    return data


def range_length(name: bytes, start: int, packed: int, end: int) -> int:
    """Return how many bytes `read_member` reads at once, from `start`, of a zip of `end` bytes."""
    return min(_LOCAL.size + _EXTRA + len(name) + packed, end - start)


def data_start(file: Readable, start: int) -> int:
    """Return the byte of a member's data, by that of its local header. Raises ValueError."""
    return start + _data_begin(file.read(start, min(_LOCAL.size, file.size - start)), start)


def _data_begin(found: bytes, start: int) -> int:
    """Return where the data begin in bytes that were read from a local header on."""
    if found[:4] != b"PK\3\4" or len(found) < _LOCAL.size:
        raise ValueError(f"there is no local header at byte {start}")
    name, extra = _LOCAL.unpack_from(found)
    return int(_LOCAL.size + name + extra)


def _directory(file: Readable, shown: str) -> tuple[int, int, int, int]:
    """Return byte, bytes and entries of the directory, and by how much all offsets are moved."""
    start = max(0, file.size - _COMMENT - _END.size - _LOCATOR.size)
    tail = file.read(start, file.size - start)
    place = tail.rfind(b"PK\5\6")
    while place >= 0:
        if place + _END.size <= len(tail):
            end = _END.unpack_from(tail, place)
            if place + _END.size + end[7] == len(tail):
                break
        place = tail.rfind(b"PK\5\6", 0, place)
    else:
        raise DamageError(
            f"{shown}: it has no end of a zip's directory, so it is none, or was cut short"
        )
    _, disk, first, _, count, size, offset, _ = end
    at = start + place
    stop = at
    if place >= _LOCATOR.size and tail.startswith(b"PK\6\7", place - _LOCATOR.size):
        _, _, where, disks = _LOCATOR.unpack_from(tail, place - _LOCATOR.size)
        # It lies before its locator; where something was put before the zip, its offset is less.
        for stop in dict.fromkeys((at - _LOCATOR.size - _END64.size, where)):
            data = file.read(stop, _END64.size) if 0 <= stop <= at - _END64.size else b""
            if data.startswith(b"PK\6\6"):
                break
        else:
            raise DamageError(f"{shown}: byte {where}: there is no zip64 end of its directory")
        _, _, _, _, disk, first, _, count, size, offset = _END64.unpack(data)
        disk = max(disk, disks - 1)
    if disk not in (0, _FULL16) or first not in (0, _FULL16):
        raise SourceError(
            f"{shown}: the last of several volumes; join them: zip -s 0 {shown} --out joined.zip"
        )
    moved = stop - size - offset
    if moved < 0 or size < 0:
        raise DamageError(
            f"{shown}: its directory of {size:,} bytes at byte {offset} does not end at byte {stop}"
        )
    return offset + moved, size, count, moved


def _runs(
    file: Readable, begin: int, size: int, shown: str
) -> Iterator[tuple[int, bytes, list[int]]]:
    """Yield runs of the directory: its byte of the zip, its bytes, where entries begin in these."""
    unpack, step = _LENGTHS.unpack_from, _ENTRY.size
    stop = begin + size
    while begin < stop:
        block = file.read(begin, min(_READ, stop - begin))
        starts, at = [], 0
        while at + step <= len(block):
            mark, name, extra, comment = unpack(block, at)
            if mark != b"PK\1\2":
                raise DamageError(f"{shown}: byte {begin + at}: there is no entry of its directory")
            end = at + step + name + extra + comment
            if end > len(block):
                break
            starts.append(at)
            at = end
        if not starts:
            raise DamageError(f"{shown}: byte {begin}: its directory ends within an entry")
        yield begin, block, starts
        begin += at


def _columns(block: bytes, starts: list[int]) -> Any:
    """Return the numbers of entries as columns, with the last byte of each name."""
    data, at = np.frombuffer(block, np.uint8), np.array(starts)
    columns = np.zeros(len(starts), _COLUMNS)
    numbers = columns.view(np.uint8).reshape(len(starts), -1)
    numbers[:, : _ENTRY.size] = data[at[:, None] + np.arange(_ENTRY.size)]
    columns["name_end"] = data[at + (_ENTRY.size - 1) + columns["name"]]
    return columns


def _zip64(extra: bytes, packed: int, plain: int, offset: int, where: str) -> tuple[int, int, int]:
    """Return the sizes and the offset that do not fit into four bytes."""
    for kind, data in _extras(extra):
        if kind != 1:
            continue
        values = iter(struct.unpack(f"<{len(data) // 8}Q", data[: len(data) // 8 * 8]))
        try:
            plain = next(values) if plain == _FULL else plain
            packed = next(values) if packed == _FULL else packed
            offset = next(values) if offset == _FULL else offset
        except StopIteration:
            break
        return packed, plain, offset
    raise DamageError(f"{where}: a size of it is missing in its zip64 part")


def _extras(extra: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        yield kind, extra[at + 4 : at + 4 + length]
        at += 4 + length


def _name(name: bytes, extra: bytes, system: int, *, utf8: bool) -> bytes:
    """Return a name as a file system of Linux has it, as unzip makes it."""
    if system in _WINDOWS and b"/" not in name:
        name = name.replace(b"\\", b"/")
    if name.isascii() or utf8 or system == _UNIX:
        return name
    for kind, data in _extras(extra):
        if kind == 0x7075 and data[1:5] == deflate.crc32(name).to_bytes(4, "little"):
            return data[5:]
    try:
        name.decode()
    except UnicodeDecodeError:
        return name.decode("cp437").encode()
    return name


def _take_links(table: MemberTable, rows: list[int], file: Readable, shown: str) -> None:
    """Take the members that are links, whose data say where they lead, for such."""
    keep = bytearray(b"\1") * len(table.paths)
    for before, row in enumerate(rows):
        path, size = table.paths[row], table.sizes[row]
        start, packed = table.starts[row], table.packed_sizes[row]
        try:
            if size > _MOST_LINK:
                raise ValueError(f"a link of {size:,} bytes")
            method, checksum = table.methods[row], table.checksums[row]
            target = read_member(file, path, start, packed, size, method, checksum)
        except ValueError as error:
            raise DamageError(f"{shown}: {printable(path)}: {error}") from None
        table.links.append(Link(path, target, row - before))
        keep[row] = 0
    if rows:  # once for all: links may be many
        table.paths = list(compress(table.paths, keep))
        for name in ("sizes", "starts", "packed_sizes", "checksums", "methods"):
            column = getattr(table, name)
            setattr(table, name, array(column.typecode, compress(column, keep)))
