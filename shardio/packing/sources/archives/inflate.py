"""Archives that are compressed as a whole: inflated once, front to back, into a file of ours.

The file lies in the directory where a packing works, under a name that says which archive it is of:
`unpacked-<16 hex digits>`. It has a head of 4,096 bytes, by which it is known as ours, and then the
archive. The head says when it is whole: a packing that starts again, and other parts of it, take it
then, and who comes while it is written waits. The commit removes it. What packs nothing
(`--dry-run`) inflates the archive once more for each pass over it, and writes no file.
"""

from __future__ import annotations

import bz2
import contextlib
import hashlib
import io
import lzma
import os
import re
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from ....errors import DamageError, SourceError, printable
from ....formats.foreign.inflate import unzstd_pieces
from ....storage import local
from ....storage.local import LocalDirectory
from ....units import show_size
from ...process_pool import Progress
from ..files import mtime
from . import deflate
from .extent import Extent, ExtentReader
from .member_table import MemberTable
from .tar_members import list_tar

_MAGIC = b"shardio: an archive, unpacked for packing\n"
_HEAD = 4096  # bytes before the archive
_WHOLE, _PART = ((_MAGIC + what).ljust(_HEAD, b"\0") for what in (b"whole", b"part"))
_WAIT_S = 0.2  # for another process that unpacks the same archive
_NAME = re.compile(r"unpacked-[0-9a-f]{16}(-[0-9a-f]{16})?\Z")
_NAMED = len("unpacked-") + 16
_PIECE = 1 << 20  # bytes that are inflated at a time
_MAX_NOTICES = 3  # archives that are unpacked with a line each
_BACK = 256 << 10  # bytes that a stream still holds, for reads that go back a little
# First bytes, and what reads such a file.
_KINDS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_SKIPPED = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # a frame of zstd that pzstd writes first
_FAILS = (EOFError, OSError, ValueError, lzma.LZMAError)


def compression_of(start: bytes) -> str | None:
    """Return how a file that begins so is compressed; None where it is not."""
    found = next((kind for magic, kind in _KINDS.items() if start.startswith(magic)), None)
    return "zstd" if _SKIPPED.match(start) else found


@dataclass
class Inflating:
    """Where archives are inflated, and who is told. Forked workers inherit it."""

    directory: str | None = None  # where the packing works; None: nothing is written
    progress: Progress | None = None
    notify: Callable[[str], None] | None = None
    notices: int = 0  # archives that `notify` was called for

    def inflate(self, extent: Extent, kind: str) -> Extent:
        """Return the archive in a compressed one. Raises DamageError, StorageError.

        kind: "gzip", "bzip2", "xz", "zstd", or "deflate" of a zip's member.
        """
        if extent.unpacked > 1:
            raise SourceError(f"{extent.shown}: it is compressed three times over; unpack it first")
        if self.directory is None:
            stream = _Streamed(extent, kind)
            return replace(
                extent, location=stream, size=stream.size, start=0, unpacked=extent.unpacked + 1
            )
        named = f"{getattr(extent.location, 'root', '')}\0{extent.shown}\0{extent.size}"
        seal = hashlib.sha256(named.encode("utf-8", "surrogateescape"))
        seal.update(extent.stamp.to_bytes(8, "little", signed=True))
        name = self._unpack(extent, kind, f"unpacked-{seal.hexdigest()[:16]}")
        path = os.path.join(self.directory, name)
        status = os.stat(path)
        return replace(
            extent,
            location=LocalDirectory(self.directory),
            name=name,
            size=status.st_size - _HEAD,
            start=_HEAD,
            file_size=status.st_size,
            file_stamp=mtime(status),
            unpacked=extent.unpacked + 1,
        )

    def _unpack(self, extent: Extent, kind: str, name: str) -> str:
        """Write the file, or wait until another process has; return its name."""
        assert self.directory is not None
        local.make_directory(self.directory)
        waited = False
        while True:
            with contextlib.closing(local.OnceFile(self.directory, name, _WHOLE)) as file:
                while not file.take():
                    if not waited and self.notify is not None:
                        waits = "waiting for another process, which unpacks it"
                        self.notify(f"{extent.shown}: {waits}")
                    waited = True
                    time.sleep(_WAIT_S)
                if file.is_whole:
                    return name
                if not file.locks and len(name) == _NAMED:  # each process has a file of its own
                    name = f"{name}-{local.token()}"
                elif file.is_there:  # else whoever wrote it gave up
                    self._write(extent, kind, file, name)
                    return name

    def _write(self, extent: Extent, kind: str, out: local.OnceFile, name: str) -> None:
        assert self.directory is not None
        if self.notify is not None and self.notices <= _MAX_NOTICES:
            text = f"{extent.shown} is compressed as a whole ({show_size(extent.size)}): it is "
            text += (
                f"unpacked once into {printable(self.directory)}/{name}, which the commit removes"
            )
            self.notify(text + "; so it is with all that follow" * (self.notices == _MAX_NOTICES))
            self.notices += 1
        try:
            local.refuse_if_full(self.directory, extent.size)
            with contextlib.closing(extent.location.open(extent.name)) as file:
                out.begin(_PART)
                source = _ExtentStream(ExtentReader(file, extent))
                try:
                    for data in _inflated(source, kind, extent.shown):
                        out.write(data)
                        if self.progress is not None:
                            self.progress(min(source.at, extent.size), extent.size)
                except DamageError as error:
                    raise DamageError(f"{error}{self._last_member(name, extent)}") from None
            out.finish()
        except BaseException:
            local.remove(os.path.join(self.directory, name))
            raise

    def _last_member(self, name: str, extent: Extent) -> str:
        """Return in words which member of a tar was the last to be unpacked; "" of others."""
        assert self.directory is not None
        table = MemberTable()
        with (
            contextlib.suppress(DamageError, SourceError),
            contextlib.closing(LocalDirectory(self.directory).open(name)) as file,
        ):
            part = ExtentReader(file, replace(extent, start=_HEAD, size=file.size - _HEAD))
            list_tar(part, extent.shown, table=table)
        return f"; its last whole member is {printable(table.paths[-1])}" if table.paths else ""


def content(extent: Extent, kind: str | None) -> Generator[bytes, None, None]:
    """Yield the bytes of an extent, piece by piece, inflated if it is compressed.

    Raises SourceError, DamageError, StorageError.
    """
    try:
        opened = extent.location.open(extent.name)
    except FileNotFoundError:
        raise SourceError(f"{extent.shown}: it is gone") from None
    with contextlib.closing(opened) as file:
        source = _ExtentStream(ExtentReader(file, extent))
        if kind is None:
            yield from iter(lambda: source.read(_PIECE), b"")
        else:
            yield from _inflated(source, kind, extent.shown)


def is_there(extent: Extent) -> bool:
    """Return whether the file of an archive is there, if it is one of ours."""
    place = extent.location
    if not extent.unpacked or not isinstance(place, LocalDirectory):
        return True
    return os.path.exists(os.path.join(place.root, extent.name))


def is_unpacked(directory: str, name: str) -> bool:
    """Return whether a file is an archive that was unpacked here, by its name and first bytes.

    Whoever is killed just when it begins leaves an empty one.
    """
    if _NAME.match(name) is None:
        return False
    try:
        with open(os.path.join(directory, name), "rb") as file:
            return file.read(len(_MAGIC)) in (_MAGIC, b"")
    except OSError:
        return False


def remove_unpacked(directory: str) -> None:
    """Remove the archives that were unpacked in a directory. Raises StorageError."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(directory):
            if is_unpacked(directory, name):
                local.remove(os.path.join(directory, name))


class _ExtentStream(io.RawIOBase):
    """The bytes of an extent, as a file that is read from its beginning on."""

    def __init__(self, part: ExtentReader) -> None:
        super().__init__()
        self._part, self.at = part, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def read(self, size: int = -1) -> bytes:
        """Read some bytes; none at the end."""
        left = self._part.size - self.at
        data = self._part.read(self.at, left if size < 0 else min(size, left))
        self.at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _inflated(source: _ExtentStream, kind: str, shown: str) -> Iterator[bytes]:
    """Yield the content of a compressed stream, piece by piece. Raises DamageError."""
    done, buffered = 0, io.BufferedReader(source, _PIECE)
    try:
        for data in _pieces(buffered, kind, shown):
            done += len(data)
            yield data
    except (*_FAILS, deflate.error) as error:
        raise DamageError(
            f"{shown}: damaged, or cut short, at byte {source.at:,} of its {kind} stream, after "
            f"{done:,} bytes of content or more ({error})"
        ) from None


def _pieces(file: BinaryIO, kind: str, shown: str) -> Iterator[bytes]:
    """Yield the content of a compressed file. Raises what its library raises."""
    reader: Any
    if kind == "zstd":
        return unzstd_pieces(file, shown)
    if kind == "deflate":
        reader = _Deflated(file)
    elif kind == "gzip":
        reader = deflate.GzipFile(fileobj=file)
    else:
        return _streams(file, kind)
    return iter(lambda: reader.read(_PIECE), b"")


def _streams(file: BinaryIO, kind: str) -> Iterator[bytes]:
    """Yield the content of all streams in a file. Raises ValueError for what lies behind them."""
    new = bz2.BZ2Decompressor if kind == "bzip2" else lzma.LZMADecompressor
    one: Any = None
    given = b""
    while True:
        given = given or file.read(_PIECE)
        if one is None and kind == "xz" and given:  # zeros may lie between and behind streams
            given = given.lstrip(b"\0")
            if not given:
                continue
        if not given:
            break
        one = one or new()
        data = one.decompress(given, _PIECE)
        given = b""
        while data or not (one.needs_input or one.eof):
            yield data
            data = b"" if one.needs_input or one.eof else one.decompress(b"", _PIECE)
        if one.eof:
            given, one = one.unused_data, None
    if one is not None:
        raise EOFError("it ends within a stream")


class _Deflated:
    """A deflated stream without a head, as of a zip's member."""

    def __init__(self, source: BinaryIO) -> None:
        self._source, self._inflater = source, deflate.inflater()

    def read(self, size: int) -> bytes:
        """Read up to so many bytes; none at the end. Raises EOFError."""
        while not self._inflater.eof:
            given = self._inflater.unconsumed_tail or self._source.read(_PIECE)
            data: bytes = self._inflater.decompress(given, size)  # without more, what it holds
            if data:
                return data
            if not given and not self._inflater.eof:
                raise EOFError("it has no end")
        return b""


class _Streamed:
    """The place, and the file, of an archive that is inflated anew for each pass over it."""

    def __init__(self, extent: Extent, kind: str) -> None:
        self._extent, self._kind = extent, kind
        self.name, self.descriptor = extent.shown, -1
        self._pieces: Iterator[bytes] = iter(())
        self._file: Any = None
        self._held, self._at = b"", 0  # the bytes that were inflated last, and where they begin
        self.size = sum(map(len, self._begin()))
        self._stop()

    def open(self, name: str) -> _Streamed:
        """Return the file."""
        return self

    def read(self, start: int, length: int) -> bytes:
        """Read exactly `length` bytes from `start`. Raises DamageError."""
        if start < self._at or self._file is None:
            self._pieces = self._begin()
            self._held, self._at = b"", 0
        while self._at + len(self._held) < start + length:
            piece = next(self._pieces, b"")
            if not piece:
                raise DamageError(f"{self.name}: ends before byte {start + length:,}")
            kept = max(0, min(len(self._held), start - self._at, len(self._held) - _BACK))
            self._held, self._at = self._held[kept:] + piece, self._at + kept
        return self._held[start - self._at : start - self._at + length]

    def will_need(self, start: int, length: int) -> None:
        """Do nothing."""

    def scattered(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: what is read next may lie behind what was read last."""

    def _stop(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        self._stop()

    def _begin(self) -> Iterator[bytes]:
        self._stop()
        self._file = self._extent.location.open(self._extent.name)
        source = _ExtentStream(ExtentReader(self._file, self._extent))
        return _inflated(source, self._kind, self._extent.shown)
