"""WebDataset shards: tar files in which the members of one sample follow one another.

A member's name is split at the first dot of its last part: before it is the key of its sample,
behind it, in lower case, the name of the field (`train/cat.seg.png`: key `train/cat`, field
`seg.png`). A run of members with one key is a sample. Members whose names have no key, or begin
with `__x__`, are no data and are skipped. All of this is as webdataset does it, but for what it
loses without a word: a field that comes twice, a key that comes back, links, data behind the end.

A record is the bytes from the first header of its first member to the end of the padding of its
last. Member: header of 512 bytes, data, zeros up to a multiple of 512. Header: name at byte 0 (100
bytes), size at 124 (12, octal, or base 256 where the high bit is set), checksum at 148 (8, octal;
the sum of the header's bytes, these eight taken as blanks), type at 156, "ustar" at 257, and what
goes before the name at 345 (155). Longer names are the data of a member before: type x (pax: lines
"length keyword=value") or L (GNU). A block of zeros ends the file; so does the end of the file.

Source: https://pubs.opengroup.org/onlinepubs/9799919799/utilities/pax.html#tag_20_94_13_06, and
https://www.gnu.org/software/tar/manual/html_node/Standard.html; for names and values, the modules
tariterators and autodecode of webdataset 1.0.
"""

from __future__ import annotations

import io
import math
import re
import shlex
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from ...errors import DamageError, SourceError, printable
from ...names import KEY
from ...storage.base import File, Location
from ..sample import MAX_DIMENSIONS, MAX_FIELDS
from .base import ForeignFile, Values, Walked, parse_json

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_NO_TAIL = bytes(_BLOCK - 156)
_FILE, _PAX = b"0x"  # kinds of members
_FILES = frozenset((b"0", b"\0", b"7"))
_EXTENSIONS = frozenset((b"x", b"X", b"g", b"L", b"K"))  # say something of the next member
_NOTHING_SAID = (b"", -1)
_HEADER = struct.Struct("<100s24x11sB12x6s")  # name, size, byte behind it, checksum

MAX_EXTENSION = 1 << 20  # bytes of a pax header or long name; extended attributes make them large
_MAX_DIGITS = 64  # of an integer: int() of a long number takes quadratic time
_MAX_NPY_HEADER = 1024  # bytes; of an array without named parts it takes 128, or 700 at worst

# Read at once where members are small (malloc maps 128 KiB anew, see formats.record), and where
# the one before was large: what lies between is then not read.
_READ = 120 << 10
_LARGE = 4 << 10
_FAR = 32 << 10

_COMPRESSED = {  # first bytes, and what writes the content of such a file to its output
    b"\x1f\x8b": "gzip -dc",
    b"\x28\xb5\x2f\xfd": "zstd -dc",
    b"BZh": "bzip2 -dc",
    b"\xfd7zXZ\x00": "xz -dc",
    b"\x04\x22\x4d\x18": "lz4 -dc",
}
_ENDING = re.compile(r"\.(tar(\.(gz|zst|zstd|bz2|xz|lz4))?|t[gbx]z|tbz2|tzst)$", re.IGNORECASE)

# Extensions that webdataset decodes: to an int, a str, what JSON says.
INTS = ("cls", "cls2", "index", "inx", "id")
TEXTS = ("txt", "text", "transcript")
JSONS = ("json", "jsn")

_META = re.compile(rb"__[^/]*__($|/)")
_RESERVED = (KEY, "__url__")  # webdataset refuses them, too


_Member = tuple[bytes, bytes, int, int]  # key, extension; start and stop of the data in the record
# Byte and length of a sample, its bytes where they are at hand, its members.
_Sample = tuple[int, int, bytes | None, list[_Member]]


class _Unusable(ValueError):
    """A file that is intact, but has what cannot be read in place."""


class TarFile(ForeignFile):
    """A tar file as webdataset writes and reads them."""

    def _open(self, storage: Location, name: str, extra: bytes) -> None:
        self._alike = _Alike()

    def scan(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) of each record. Raises DamageError, SourceError."""
        for offset, length, _, _ in self._scanned():
            yield offset, length

    def walk(self) -> Iterator[Walked]:
        """Yield every record; headers are read once, and not again for the values."""
        for record, (offset, length, held, members) in enumerate(self._scanned()):
            if held is None:
                self.check_length(record, offset, length)
            data = self.read(offset, length) if held is None else held
            try:
                values = _decoded(data, members)
            except ValueError as error:
                raise self.undecodable(record, offset, error) from None
            yield offset, length, data, values

    def values(self, data: bytes, record: int) -> Values:
        """Return the values of a record. Raises ValueError."""
        return _decoded(data, _plain_members(data) or self._any_members(data))

    def _scanned(self) -> Iterator[_Sample]:
        _refuse_compressed(self)
        try:
            yield from _samples(self)
        except _Unusable as error:
            raise SourceError(f"{self.name}: {error}") from None
        except ValueError as error:
            raise DamageError(f"{self.name}: {error}") from None

    def _any_members(self, data: bytes) -> list[_Member]:
        """Return the members in a record, whatever their headers are. Raises ValueError."""
        found: list[_Member] = []
        for key, extension, _, start, stop, _ in _members(
            data, len(data), _nothing, self._alike, check=False
        ):
            if found and key != found[0][0]:
                raise ValueError(
                    f"members of samples {printable(found[0][0])} and {printable(key)}"
                )
            found.append((key, extension, start, stop))
        if not found:
            raise ValueError("there is no member of a sample in it")
        return found


# --- samples --------------------------------------------------------------------------------------


def split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Return the key of a member's sample and its extension, as written; None if it is no data.

    As base_plus_ext of webdataset, ^((?:.*/|)[^.]+)[.]([^/]*)$, which takes hours for 1 MB of "a/".
    """
    slash = name.rfind(b"/")
    if name.startswith(b"__") and (_META.match(name) or (slash < 0 and name.endswith(b"__"))):
        return None
    start = slash + 1
    if (line := name.find(b"\n")) >= 0:  # the dot of the pattern does not match one
        start = name.rfind(b"/", 0, line) + 1
    dot = name.find(b".", start)
    if dot == start > 0:  # a hidden file: its folder is the key
        start = name.rfind(b"/", 0, start - 1) + 1
        dot = name.find(b".", start)
    return (name[:dot], name[dot + 1 :]) if dot > max(slash, start) else None


@lru_cache(maxsize=4096)
def field_of(extension: bytes) -> tuple[str, Callable[[bytes], Any] | None]:
    """Return the field of this extension's members, and what decodes them; None: they are bytes.

    Raises ValueError.
    """
    try:
        field = extension.decode("utf-8").lower()
    except UnicodeDecodeError:
        raise _Unusable(f"the extension {printable(extension)!r} is not UTF-8") from None
    if field in _RESERVED:
        raise _Unusable(f"a member cannot have the extension {field}")
    return field, _DECODE.get(field.rpartition(".")[2])


def _samples(file: File) -> Iterator[_Sample]:
    """Yield all samples. Raises ValueError, _Unusable, and what reading raises."""
    blocks: list[tuple[int, bytes]] = [(0, b"")]  # what was read last, and where it begins

    def fetch(at: int, least: int) -> bytes:
        base, block = blocks[0]
        ahead = _READ if at - base - len(block) < _FAR else _LARGE
        block = file.read(at, min(max(ahead, least), file.size - at))
        blocks[0] = at, block
        return block

    began: dict[bytes, int] = {}  # byte of each sample, by key
    fields: dict[str, bytes] = {}  # extensions of this sample as written, by field
    members: list[_Member] = []
    current, first, last = None, 0, 0
    for key, extension, begin, start, stop, end in _members(
        b"", file.size, fetch, _Alike(), check=True
    ):
        if key != current:
            if current is not None:
                base, block = blocks[0]
                inside = base <= first and last <= base + len(block)
                data = block[first - base : last - base] if inside else None
                yield first, last - first, data, members
            if key in began:
                raise _Unusable(
                    f"byte {begin}: {printable(key + b'.' + extension)} belongs to sample "
                    f"{printable(key)}, which began at byte {began[key]}, but members of others "
                    "lie between.\nPack the files in the order of their names: tar --sort=name"
                )
            began[key] = first = begin
            current, fields, members = key, {}, []
        field = field_of(extension)[0]
        if field in fields:
            one, two = (printable(key + b"." + e) for e in (fields[field], extension))
            raise _Unusable(
                f"byte {begin}: {two} and {one}, of the sample at byte {first}, are both its field "
                f"{field!r}; rename or leave out one"
            )
        if len(fields) == MAX_FIELDS:
            raise _Unusable(
                f"byte {begin}: sample {printable(key)} has over {MAX_FIELDS:,} members"
            )
        fields[field] = extension
        members.append((key, extension, start - first, stop - first))
        last = end
    if current is not None:
        yield first, last - first, None, members


def _refuse_compressed(file: File) -> None:
    if file.size < _BLOCK:
        raise DamageError(f"{file.name}: {file.size} bytes are too few for a tar file")
    start = file.read(0, _BLOCK)
    for magic, command in _COMPRESSED.items():
        if start.startswith(magic) and not _sealed(start):  # a member may be called BZh.txt
            plain = _ENDING.sub("", file.name) + ".tar"
            source, target = shlex.quote(file.name), shlex.quote(plain)
            if source == target:
                target = shlex.quote(plain.removesuffix(".tar") + ".plain.tar")
            raise SourceError(
                f"{file.name}: it is compressed as a whole, so no record can be read without all "
                f"before it.\nUnpack it first: {command} {source} > {target}"
            )


# --- members --------------------------------------------------------------------------------------


class _Alike:
    """A memory of headers that are much alike in a file: they cost 4 us a record of four.

    Each is one tuple, so that threads may share them. Those that values() knows were not checked.
    """

    __slots__ = ("tail", "twins")

    def __init__(self) -> None:
        # Bytes 156 to 512 (type, owner, prefix) are often those of the header before: they, their
        # Adler-32, type and prefix.
        self.tail = _NO_TAIL, zlib.adler32(_NO_TAIL), b"\0", b""
        # The pax header for the time of a member, as Python writes it, is one of three, by the
        # digits of the time: the headers, and the beginning of all that they hold, "28 mtime=".
        self.twins: tuple[bytes, ...] = ()

    def take_tail(self, tail: bytes) -> tuple[bytes, int, bytes, bytes]:
        """Remember another tail; return it with its Adler-32, type and prefix."""
        prefix = b""
        if tail[189] and tail[101:107] == b"ustar\0":
            prefix = tail[189:344].partition(b"\0")[0] + b"/"
        self.tail = tail, zlib.adler32(tail), tail[:1], prefix
        return self.tail

    def take_twin(self, header: bytes, data: bytes) -> tuple[bytes, ...]:
        """Remember the header of a member's time, if this is one; return all of them."""
        time = b"%d mtime=" % len(data)
        if header[156] == _PAX and data.startswith(time) and len(data) < 64:
            self.twins = (header + time, *self.twins[:3])
        return self.twins


def _members(
    block: bytes, size: int, fetch: Callable[[int, int], bytes], alike: _Alike, *, check: bool
) -> Iterator[tuple[bytes, bytes, int, int, int, int]]:
    """Yield each data member: key, extension, then as `_files` gives them, first header to end.

    Parameters and errors are those of `_files`.
    """
    current = b""  # the key of the member before
    same: bytes | tuple[()] = ()  # what others of that key begin with; () where that cannot tell
    for name, begin, start, stop, end in _files(block, size, fetch, alike, check=check):
        if name.startswith(same) and name.find(b"/", len(same)) < 0:
            yield current, name[len(same) :], begin, start, stop, end
        elif pair := split_name(name):
            current, extension = pair
            same = () if current.startswith(b"__") else current + b"."
            yield current, extension, begin, start, stop, end


def _files(
    block: bytes, size: int, fetch: Callable[[int, int], bytes], alike: _Alike, *, check: bool
) -> Iterator[tuple[bytes, int, int, int, int]]:
    """Yield each file of a tar: name, first header, start of data, its end, end of padding.

    block: the first bytes that are at hand, of `size`; fetch(at, least) gives bytes from `at`.
    check: the sums of headers, and what lies behind the end; a record's were checked by the scan.
    Raises ValueError naming the byte, _Unusable.
    """
    unpack, adler = _HEADER.unpack_from, zlib.adler32
    at = base = 0
    begin = size  # byte of the first header that belongs to the member to come; `size`: none yet
    said = _NOTHING_SAID  # name and size of that member, by the headers before its own
    tail, tail_sum, kind, prefix = alike.tail
    twins = alike.twins
    while at < size:
        i = at - base
        if i + _BLOCK > len(block):
            block, base, i = _fetch_header(fetch, at, size), at, 0
        if block.startswith(twins, i):
            if begin == size:
                begin = at
            at += 2 * _BLOCK
            continue
        name, digits, after, seal = unpack(block, i)
        if not block.startswith(tail, i + 156):
            tail, tail_sum, kind, prefix = alike.take_tail(block[i + 156 : i + _BLOCK])
        try:
            length = int(digits, 8)
            # The low half of Adler-32 is 1 + the sum of the bytes, modulo 65,521 (no header of
            # ASCII sums up to that); sum() takes five times as long. All else: _sealed.
            plain = after <= 32 and (
                not check or int(seal, 8) == (adler(block[i : i + 148], tail_sum) & 0xFFFF) + 255
            )
        except ValueError:
            plain = False
        if not plain or length < 0:
            length = _odd_length(block[i : i + _BLOCK], at, check)
            if length < 0:
                _check_end(at, size, fetch)
                break
        start = at + _BLOCK
        if kind in _EXTENSIONS:
            end = start + (length + 511 & -512)
            if length > MAX_EXTENSION or end > size:
                raise ValueError(_cut(at, length, size))
            header = block[i : i + _BLOCK]
            if start + length - base > len(block):
                block, base = fetch(start, length), start
            data = block[start - base : start - base + length]
            if kind != b"g":
                begin = min(begin, at)
            twins = alike.take_twin(header, data)
            said = _said(kind, data, at, said)
            at = end
            continue
        name = said[0] or prefix + name.partition(b"\0")[0]
        data_bytes = length
        if kind not in _FILES:
            data_bytes = _passed(name, kind, at, length)
        elif said[1] >= 0:
            data_bytes = length = said[1]
        end = start + (data_bytes + 511 & -512)
        if end > size:
            raise ValueError(_cut(at, length, size))
        if kind in _FILES:
            yield name, at if begin == size else begin, start, start + data_bytes, end
        at, begin, said = end, size, _NOTHING_SAID
    if begin < size:
        raise ValueError(f"byte {begin}: a header without its member; the file was cut short")


def _fetch_header(fetch: Callable[[int, int], bytes], at: int, size: int) -> bytes:
    """Read a block that begins with a header. Raises ValueError if the file ends within it."""
    if at + _BLOCK > size:
        raise ValueError(f"byte {at}: {size - at} bytes are no header; it was cut short")
    return fetch(at, _BLOCK)


def _odd_length(header: bytes, at: int, check: bool) -> int:
    """Return the size that an unusual header states; -1 for zeros, which end the file.

    check: also compare its sum. Raises ValueError.
    """
    if check and header == _ZEROS:
        return -1
    if check and not _sealed(header):
        raise ValueError(
            f"byte {at}: the sum of the header's bytes is not the one it states; it is damaged, or "
            "no tar header"
        )
    return _number(header[124:136], at)


def _said(kind: bytes, data: bytes, at: int, said: tuple[bytes, int]) -> tuple[bytes, int]:
    """Return name and size of the next member, by an extension header and those before it."""
    name, size = b"", -1
    if kind == b"L":
        name = data.partition(b"\0")[0]
    elif kind != b"K" and (b"path=" in data or b"size=" in data or b"GNU.sparse" in data):
        name, size = _pax(data, at, everywhere=kind == b"g")
    return said[0] or name, said[1] if said[1] >= 0 else size


def _passed(name: bytes, kind: bytes, at: int, length: int) -> int:
    """Return the data bytes of a member that is no file and is passed over. Raises _Unusable."""
    shown = printable(name)
    if kind in b"3456":  # devices, folders, pipes; what size they state counts for nothing
        return 0
    if kind in b"12":
        if split_name(name) is None:
            return 0
        what, option = ("hard", "--hard-dereference") if kind == b"1" else ("symbolic", "-h")
        raise _Unusable(
            f"byte {at}: {shown} is a {what} link, so its content is not here.\nPack the files "
            f"again with content in place of links: tar {option}"
        )
    if kind in b"VD":  # the label of the volume; a list of the files in a folder
        return length
    if kind == b"S":
        raise _sparse(at)
    why = "goes on in, or comes from, another file" if kind == b"M" else "is of an unknown type"
    raise _Unusable(f"byte {at}: {shown} {why} ({printable(kind)!r}).\nPack the files again")


def _pax(data: bytes, at: int, *, everywhere: bool) -> tuple[bytes, int]:
    """Name and size of the member that follows, b"" and -1 where a pax header says neither."""
    name, size, i = b"", -1, 0
    while i < len(data) and data[i]:
        blank = data.find(b" ", i, i + 9)
        digits = data[i:blank] if blank > i else b""
        end = i + int(digits) if digits.isdigit() else 0
        if not i < blank < end <= len(data) or data[end - 1] != 0x0A:
            raise ValueError(f"byte {at}: its pax header is damaged at its byte {i}")
        keyword, _, value = data[blank + 1 : end - 1].partition(b"=")
        if keyword.startswith(b"GNU.sparse"):
            raise _sparse(at)
        if keyword in (b"path", b"size") and everywhere:
            raise _Unusable(f"byte {at}: a global pax header states a {keyword.decode()}")
        if keyword == b"path":
            name = value.rstrip(b"/")
        elif keyword == b"size":
            if not value.isdigit() or len(value) > 20:
                raise ValueError(f"byte {at}: its pax header states no size, but {value[:20]!r}")
            size = int(value)
        i = end
    return name, size


def _sparse(at: int) -> _Unusable:
    return _Unusable(
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


def _sealed(header: bytes) -> bool:
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
    """Raise _Unusable unless zeros follow: a reader would lose what lies behind, without a word."""
    end = at
    while at < size:
        data = fetch(at, min(1 << 20, size - at))
        if data.count(0) != len(data):
            found = at + len(data) - len(data.lstrip(b"\0"))
            raise _Unusable(
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


def _nothing(at: int, least: int) -> bytes:
    raise ValueError(f"its headers do not fit its {at} bytes")


def _plain_members(data: bytes) -> list[_Member]:
    """Return the members in a record with headers as most writers make them; [] for others.

    As `_members` finds them, in half the time: a record's headers were checked by the scan, and its
    bytes by its checksum.
    """
    found: list[_Member] = []
    key = same = b""
    at, size, waits = 0, len(data), False
    try:
        while at < size:
            kind = data[at + 156]
            length = int(data[at + 124 : at + 135], 8)
            start = at + _BLOCK
            stop = start + length
            end = stop + 511 & -512
            if length < 0 or data[at + 135] > 32 or end > size:
                return []
            if kind == _FILE:
                zero = data.find(0, at, at + 100)
                if data[at + 345] or zero < 0:  # longer names; or of GNU, the time of access
                    return []
                if found and data.startswith(same, at) and b"/" not in data[at + len(same) : zero]:
                    found.append((key, data[at + len(same) : zero], start, stop))
                else:
                    pair = split_name(data[at:zero])
                    if found or pair is None or pair[0].startswith(b"__"):
                        return []
                    key, extension = pair
                    same = key + b"."
                    found.append((key, extension, start, stop))
                waits = False
            elif kind == _PAX and data.startswith(b"%d mtime=" % length, start):
                waits = True
            else:
                return []
            at = end
    except (ValueError, IndexError):
        return []
    return [] if waits else found


# --- values ---------------------------------------------------------------------------------------


def _decoded(data: bytes, members: list[_Member]) -> Values:
    """Return the values of a record's members. Raises ValueError naming the member."""
    values: Values = {}
    for key, extension, start, stop in members:
        field, decode = field_of(extension)
        value = data[start:stop]
        if decode is None:
            values[field] = value
            continue
        try:
            values[field] = decode(value)
        except ValueError as error:
            raise ValueError(f"{printable(key + b'.' + extension)}: {error}") from None
    values[KEY] = members[0][0]
    return values


def _int(data: bytes) -> int:
    if len(data) > _MAX_DIGITS:
        raise ValueError(f"expected an integer, found {len(data):,} bytes")
    try:
        value = int(data)
    except ValueError:
        raise ValueError(f"expected an integer, found {printable(data)!r}") from None
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"{value} is outside of 64 bits")
    return value


def _npy(data: bytes) -> Any:
    """Return an array, in C order and the machine's byte order; bytes if it is no plain array."""
    if data[:6] != b"\x93NUMPY" or len(data) < 12:
        raise ValueError("it is no .npy file")
    begin = 10 if data[6] == 1 else 12
    begin += int.from_bytes(data[8:begin], "little")
    if begin > len(data):
        raise ValueError(f"its header takes {begin:,} bytes, more than it has")
    if data[6] > 2 or begin > _MAX_NPY_HEADER:  # what only arrays of named parts need
        return data
    shape, fortran, dtype = _npy_header(data[:begin])
    if dtype.kind not in "biufcmMSU" or dtype.char in "gG" or not dtype.itemsize:
        return data  # objects are pickles; a long double differs between machines
    size = math.prod(shape) * dtype.itemsize
    if (
        any(type(n) is not int or n < 0 for n in shape)
        or len(shape) > MAX_DIMENSIONS
        or size != len(data) - begin
    ):
        raise ValueError(f"shape {shape} of {dtype} does not take {len(data) - begin:,} bytes")
    seen = np.ndarray(shape, dtype, data, begin, order="F" if fortran else "C")
    return np.array(seen, dtype.newbyteorder("="), order="C")


@lru_cache(maxsize=256)  # parsing takes 30 us, and the arrays of a data set are often of one shape
def _npy_header(start: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    stream = io.BytesIO(start)
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            return np.lib.format.read_array_header_1_0(stream)
        return np.lib.format.read_array_header_2_0(stream)
    except Exception as error:  # of numpy, its tokenizer and Python's parser
        raise ValueError(f"its header is no .npy header: {type(error).__name__}") from None


_DECODE: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(INTS, _int),
    **dict.fromkeys(TEXTS, bytes.decode),
    **dict.fromkeys(JSONS, parse_json),
    "npy": _npy,
}
