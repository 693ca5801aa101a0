"""WebDataset shards: tar files in which the members of one sample follow one another.

A member's name is split at the first dot of its last part: before it is the key of its sample,
behind it, in lower case, the name of the field (`train/cat.seg.png`: key `train/cat`, field
`seg.png`). A run of members with one key is a sample. Members whose names have no key, or begin
with `__x__`, are no data and are skipped. All of this is as webdataset does it, but for what it
loses without a word: a field that comes twice, a key that comes back, links, data behind the end.

A record is the bytes from the first header of its first member to the end of the padding of its
last (tar.py has the headers).

Source: for names and values, the modules tariterators and autodecode of webdataset 1.0.
"""

from __future__ import annotations

import io
import math
import re
import shlex
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from ...errors import DamageError, SourceError, printable
from ...names import KEY
from ...storage.base import Location
from ..base import Readable
from ..sample import MAX_DIMENSIONS, MAX_FIELDS
from .base import ForeignFile, Values, Walked, parse_json
from .tar import BLOCK, FILE, PAX, Alike, Blocks, Unusable, is_sealed, sparse, walk_files

_MAX_DIGITS = 64  # of an integer: int() of a long number takes quadratic time
_MAX_NPY_HEADER = 1024  # bytes; of an array without named parts it takes 128, or 700 at worst

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


class TarFile(ForeignFile):
    """A tar file as webdataset writes and reads them."""

    def _open(self, storage: Location, name: str, extra: bytes) -> None:
        self._alike = Alike()

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
        except Unusable as error:
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
        raise Unusable(f"the extension {printable(extension)!r} is not UTF-8") from None
    if field in _RESERVED:
        raise Unusable(f"a member cannot have the extension {field}")
    return field, _DECODE.get(field.rpartition(".")[2])


def _samples(file: Readable) -> Iterator[_Sample]:
    """Yield all samples. Raises ValueError, Unusable, and what reading raises."""
    blocks = Blocks(file)
    began: dict[bytes, int] = {}  # byte of each sample, by key
    fields: dict[str, bytes] = {}  # extensions of this sample as written, by field
    members: list[_Member] = []
    current, first, last = None, 0, 0
    for key, extension, begin, start, stop, end in _members(
        b"", file.size, blocks.fetch, Alike(), check=True
    ):
        if key != current:
            if current is not None:
                base, block = blocks.base, blocks.block
                inside = base <= first and last <= base + len(block)
                data = block[first - base : last - base] if inside else None
                yield first, last - first, data, members
            if key in began:
                raise Unusable(
                    f"byte {begin}: {printable(key + b'.' + extension)} belongs to sample "
                    f"{printable(key)}, which began at byte {began[key]}, but members of others "
                    "lie between.\nPack the files in the order of their names: tar --sort=name; or "
                    "`shardio pack --from files` takes them in any order"
                )
            began[key] = first = begin
            current, fields, members = key, {}, []
        field = field_of(extension)[0]
        if field in fields:
            one, two = (printable(key + b"." + e) for e in (fields[field], extension))
            raise Unusable(
                f"byte {begin}: {two} and {one}, of the sample at byte {first}, are both its field "
                f"{field!r}; rename or leave out one"
            )
        if len(fields) == MAX_FIELDS:
            raise Unusable(f"byte {begin}: sample {printable(key)} has over {MAX_FIELDS:,} members")
        fields[field] = extension
        members.append((key, extension, start - first, stop - first))
        last = end
    if current is not None:
        yield first, last - first, None, members


def _refuse_compressed(file: Readable) -> None:
    if file.size < BLOCK:
        raise DamageError(f"{file.name}: {file.size} bytes are too few for a tar file")
    start = file.read(0, BLOCK)
    for magic, command in _COMPRESSED.items():
        if start.startswith(magic) and not is_sealed(start):  # a member may be called BZh.txt
            plain = _ENDING.sub("", file.name) + ".tar"
            source, target = shlex.quote(file.name), shlex.quote(plain)
            if source == target:
                target = shlex.quote(plain.removesuffix(".tar") + ".plain.tar")
            raise SourceError(
                f"{file.name}: it is compressed as a whole, so no record can be read without all "
                "before it (`shardio pack` takes it as it is).\n"
                f"Unpack it first: {command} {source} > {target}"
            )


# --- members --------------------------------------------------------------------------------------


def _members(
    block: bytes, size: int, fetch: Callable[[int, int], bytes], alike: Alike, *, check: bool
) -> Iterator[tuple[bytes, bytes, int, int, int, int]]:
    """Yield each data member: key, extension, then as `walk_files` gives them, first header to end.

    Parameters and errors are those of `walk_files`.
    """
    current = b""  # the key of the member before
    same: bytes | tuple[()] = ()  # what others of that key begin with; () where that cannot tell
    for name, begin, start, stop, end in walk_files(
        block, size, fetch, alike, _passed, check=check
    ):
        if name.startswith(same) and name.find(b"/", len(same)) < 0:
            yield current, name[len(same) :], begin, start, stop, end
        elif pair := split_name(name):
            current, extension = pair
            same = () if current.startswith(b"__") else current + b"."
            yield current, extension, begin, start, stop, end


def _passed(name: bytes, kind: bytes, at: int, length: int, link: bytes) -> int:
    """Return the data bytes of a member that is no file and is passed over. Raises Unusable."""
    shown = printable(name)
    if kind in b"3456":  # devices, folders, pipes; what size they state counts for nothing
        return 0
    if kind in b"12":
        if split_name(name) is None:
            return 0
        what, option = ("hard", "--hard-dereference") if kind == b"1" else ("symbolic", "-h")
        raise Unusable(
            f"byte {at}: {shown} is a {what} link, so its content is not here.\nPack the files "
            f"again with content in place of links: tar {option}"
        )
    if kind in b"VD":  # the label of the volume; a list of the files in a folder
        return length
    if kind == b"S":
        raise sparse(at)
    why = "goes on in, or comes from, another file" if kind == b"M" else "is of an unknown type"
    raise Unusable(f"byte {at}: {shown} {why} ({printable(kind)!r}).\nPack the files again")


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
            start = at + BLOCK
            stop = start + length
            end = stop + 511 & -512
            if length < 0 or data[at + 135] > 32 or end > size:
                return []
            if kind == FILE:
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
            elif kind == PAX and data.startswith(b"%d mtime=" % length, start):
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
    shape, fortran, dtype = npy_header(data[:begin])
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
def npy_header(start: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
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
