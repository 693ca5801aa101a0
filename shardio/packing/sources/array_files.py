"""Arrays in files, by their headers: .npy, .npz, MNIST's idx, and records of one size.

    npy      \\x93NUMPY, version, length of a header, a dict: dtype, order, shape | entries
    npz      a zip of these, stored or deflated
    idx      0, 0, type, number of dimensions | each of them, 4 bytes, big-endian | entries
    records  without a header: their fields one after another, each so many bytes: an option says it

An array is cut into entries, one for each record: a run of bytes each, read by range. What is
compressed is read from its beginning on, or inflated once into a file (archives/inflate). Nothing
is unpickled. Sources: numpy.lib.format; yann.lecun.com/exdb/mnist.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import DamageError, SourceError, printable
from ...formats.foreign.webdataset import npy_header
from ...formats.sample import MAX_DIMENSIONS
from ...names import key_text
from .archives import deflate
from .archives.extent import Extent, ExtentReader, extent_of
from .archives.folder import ArchiveFolder
from .archives.inflate import Inflating, compression_of, content
from .archives.member_table import DEFLATED
from .archives.tree import member
from .archives.zip_members import list_zip
from .base import SourceFolder
from .files import SPLITS, DiskFolder

_NAMES = re.compile(r"(?i)(\.npy|\.npz|[-._]idx[1-9](-\w+)?)(\.gz)?\Z")
_IDX = {8: "|u1", 9: "|i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_MAGIC = b"\x93NUMPY"
_BLOCK = 1 << 22  # bytes of records that are looked at at once
# What in a name says of which split an array is, and how that is called.
_SPLITS = {
    **{key_text(name): key_text(name) for name in SPLITS},
    **{name: name for name in ("training", "testing", "dev", "extra", "unlabeled", "unlabelled")},
    "t10k": "test",  # MNIST's
}
_SPLIT = re.compile(rf"(?i)(?:(?<=[-_./ ])|\A)({'|'.join(_SPLITS)})(?=[-_./ ]|\Z)")


@dataclass(frozen=True)
class Stored:
    """A file, or a member of one, as a run of bytes."""

    path: str  # path in the folder that is packed; of an .npz, and the name of the member
    extent: Extent
    packed: str | None = None  # how it is compressed
    checksum: int | None = None  # CRC-32 of its content

    @property
    def identity(self) -> list[Any]:
        """Its path, and size and time of change of the file it lies in."""
        return [self.path, self.extent.size, self.extent.stamp]

    def pieces(self) -> Iterator[bytes]:
        """Yield its content. Raises DamageError, StorageError."""
        found = 0
        for piece in content(self.extent, self.packed):
            found = deflate.crc32(piece, found) if self.checksum is not None else 0
            yield piece
        if self.checksum is not None and found != self.checksum:
            raise DamageError(
                f"{self.extent.shown}: its CRC-32 is {found:08x}, expected {self.checksum:08x}"
            )

    def begin(self) -> bytes:
        """Return its first bytes, enough for a header."""
        with contextlib.closing(content(self.extent, self.packed)) as pieces:
            return next(pieces, b"")


@dataclass(frozen=True)
class Array:
    """One array, as its header describes it; or, of records, one field of all in a file."""

    name: str  # without what says its split
    split: str
    stored: Stored
    start: int  # byte of the first entry
    stride: int  # bytes from one entry to the next
    count: int
    shape: tuple[int, ...]  # shape of an entry
    dtype: np.dtype[Any]
    why: str | None = None  # its entries cannot be read by range

    @property
    def entry_bytes(self) -> int:
        """The bytes of an entry."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        shape = (self.count, *self.shape)
        of = f" of {self.split}" if self.split else ""
        return f"{printable(self.name)!r}{of} {shape} {self.dtype}"

    def check_size(self, size: int) -> None:
        """Raise DamageError for a file that has not as many bytes as its header states."""
        needed = self.start + self.count * self.stride
        if self.is_alone and size != needed:
            raise DamageError(
                f"{self.stored.extent.shown}: it has {size:,} bytes, and its header states "
                f"{needed:,}"
            )

    @property
    def is_alone(self) -> bool:
        """Whether its entries lie one behind the other."""
        return self.stride == self.entry_bytes

    def unpacked(self, inflating: Inflating) -> Array:
        """Return the array as it is read by range, once its content was compared with its CRC-32.

        Raises DamageError, StorageError.
        """
        stored = self.stored
        if stored.packed is not None:
            extent = inflating.inflate(stored.extent, stored.packed)
            self.check_size(extent.size)
            stored = replace(stored, extent=extent, packed=None)
        if stored.checksum is not None:
            for _ in stored.pieces():
                pass
        return replace(self, stored=stored)

    def load(self) -> Any:
        """Return all entries, (count, *shape). Raises DamageError."""
        found, size, held = [], 0, b""
        each = max(1, _BLOCK // self.stride) * self.stride
        for piece in self.stored.pieces():
            held += piece[max(0, self.start - size) :]
            size += len(piece)
            if len(held) >= each:
                whole = len(held) // self.stride * self.stride
                found.append(self._entries(held[:whole]))
                held = held[whole:]
        if held:  # of a field that others precede, the last entry ends before its record would
            found.append(self._entries(held + bytes(-len(held) % self.stride)))
        self.check_size(size)
        joined = np.concatenate(found) if found else np.zeros(0, self.dtype)
        return joined.reshape(self.count, *self.shape)

    def _entries(self, data: bytes) -> Any:
        entries = np.frombuffer(data, np.uint8).reshape(-1, self.stride)[:, : self.entry_bytes]
        return np.ascontiguousarray(entries).view(self.dtype)


def names_array(path: bytes) -> bool:
    """Tell whether a file holds an array, or several, by its name."""
    return _NAMES.search(key_text(path)) is not None


def split_of(name: str) -> tuple[str, str]:
    """Return which split a name is of, or "", and the name without that."""
    found = _SPLIT.search(name)
    if found is None:
        return "", name
    parts = name[: found.start()].rstrip("-_./ "), name[found.end() :].lstrip("-_./ ")
    return _SPLITS[found[1].lower()], "_".join(filter(None, parts))


def stored_in(folder: SourceFolder, path: bytes, inflating: Inflating) -> Stored:
    """Return a file of a folder. Raises SourceError, DamageError, StorageError."""
    shown = key_text(path)
    checksum = None
    if isinstance(folder, ArchiveFolder):
        extent, deflated, checksum = folder.member(path)
        if deflated:
            found = Stored(shown, extent, "deflate", checksum)
            start = found.begin()
            if compression_of(start) is None and not start.startswith(b"PK"):
                return found
            extent, checksum = inflating.inflate(extent, "deflate"), None
    elif isinstance(folder, DiskFolder):
        full = os.path.join(folder.path, path)
        try:
            extent = extent_of(full)
        except OSError as error:
            raise SourceError(f"{printable(full)}: cannot be opened: {error.strerror}") from None
    else:
        raise SourceError(
            f"{printable(folder.path)}: arrays in an object store are not read; copy them first"
        )
    kind = compression_of(Stored(shown, extent).begin())
    return Stored(shown, extent, kind, checksum if kind is None else None)


def arrays_in(
    stored: Stored, alone: bool, layout: Mapping[str, tuple[int, ...]] | None
) -> list[Array]:
    """Return the arrays that a file holds.

    alone: it is all there is, so its name says nothing of arrays in it. layout: the fields of a
    record, and their shapes, if it is a file of such. Raises SourceError, DamageError,
    StorageError.
    """
    name = _NAMES.sub("", stored.path)
    if layout is not None:
        return _records(stored, name, layout)
    start = stored.begin()
    if start.startswith(b"PK"):
        return list(_npz(stored, "" if alone else f"{name}_"))
    if start.startswith(_MAGIC):
        return [_npy(stored, name, start)]
    if start[:2] == b"\0\0" and start[2:3] and start[2] in _IDX:
        return [_idx(stored, name, start)]
    raise SourceError(
        f"{stored.extent.shown}: expected an array of numpy, or an idx file, but it begins with "
        f"'{printable(start[:12])}'"
    )


def _npz(stored: Stored, prefix: str) -> Iterator[Array]:
    """Yield the arrays of an .npz. prefix: of their names."""
    extent = stored.extent
    with contextlib.closing(extent.location.open(extent.name)) as file:
        part = ExtentReader(file, extent)
        table = list_zip(part, extent.shown)
        for row, path in enumerate(table.paths):
            inside = replace(
                stored,
                path=f"{stored.path}/{key_text(path)}",
                extent=member(table, row, extent, part),
                packed="deflate" if table.methods[row] == DEFLATED else None,
                checksum=table.checksums[row],
            )
            start = inside.begin()
            if not start.startswith(_MAGIC):
                raise SourceError(f"{inside.extent.shown}: expected an array of numpy")
            found = _npy(inside, prefix + _NAMES.sub("", key_text(path)), start)
            if found.why is None:
                found.check_size(table.sizes[row])
            yield found


def _npy(stored: Stored, name: str, start: bytes) -> Array:
    """Return the array of a .npy file. Raises DamageError."""
    begin = 10 if start[6:7] == b"\1" else 12
    begin += int.from_bytes(start[8:begin], "little")
    try:
        shape, fortran, dtype = npy_header(start[:begin])
        if any(type(n) is not int or n < 0 for n in shape) or len(shape) > MAX_DIMENSIONS:
            raise ValueError(f"its header has the shape {shape}")
    except ValueError as error:
        raise DamageError(f"{stored.extent.shown}: {error}") from None
    why = None
    if not shape:
        why = "it is one value, and has no entries"
    elif dtype.kind == "O":
        why = (
            "it holds objects, which numpy stores as a pickle: code that is run to read them; save "
            "plain numbers, or text by astype(str)"
        )
    elif dtype.kind not in "biufcmMSU" or dtype.char in "gG" or not dtype.itemsize:
        why = f"its type is {dtype}; expected plain numbers or text"
    elif fortran and math.prod(shape[1:]) > 1:
        why = "it lies in Fortran's order; save numpy.ascontiguousarray(it)"
    return _array(stored, name, begin, shape or (1,), dtype, why)


def _idx(stored: Stored, name: str, start: bytes) -> Array:
    """Return the array of an idx file. Raises DamageError."""
    begin = 4 + 4 * start[3]
    if not start[3] or len(start) < begin:
        raise DamageError(f"{stored.extent.shown}: its header ends after {len(start):,} bytes")
    shape = struct.unpack_from(f">{start[3]}I", start, 4)
    return _array(stored, name, begin, shape, np.dtype(_IDX[start[2]]), None)


def _array(
    stored: Stored,
    name: str,
    begin: int,
    shape: Sequence[int],
    dtype: np.dtype[Any],
    why: str | None,
) -> Array:
    split, rest = split_of(name)
    if not rest and (dtype != np.uint8 or len(shape) < 3):  # `extra` is a split of images only
        split, rest = "", name
    stride = math.prod(shape[1:]) * dtype.itemsize
    if not stride and why is None:
        why = "its entries have no bytes"
    found = Array(
        rest or "image", split, stored, begin, stride, shape[0], tuple(shape[1:]), dtype, why
    )
    if stored.packed is None and why is None:
        found.check_size(stored.extent.size)
    return found


def _records(stored: Stored, name: str, layout: Mapping[str, tuple[int, ...]]) -> list[Array]:
    """Return each field of the records in a file as an array. Raises SourceError, DamageError."""
    each = sum(map(math.prod, layout.values()))
    size = sum(map(len, stored.pieces())) if stored.packed else stored.extent.size
    count, rest = divmod(size, each)
    if rest:
        raise SourceError(
            f"{stored.extent.shown}: its {size:,} bytes are no whole number of records of {each:,} "
            "bytes, as layout says"
        )
    found, start = [], 0
    for field, shape in layout.items():
        shape = () if shape == (1,) else shape
        one = Array(field, split_of(name)[0], stored, start, each, count, shape, np.dtype(np.uint8))
        found.append(one)
        start += one.entry_bytes
    return found
