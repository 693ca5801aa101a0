"""An archive as a run of bytes: of a file on storage, or of another archive."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ....errors import printable
from ....formats.foreign.tar import Readable
from ....names import key_text
from ....storage.local import LocalDirectory
from ..files import DiskFolder, changed, mtime
from ..store_folder import StoreFolder
from ..store_reader import StoredObject


class Bytes(Readable, Protocol):
    """A file that is read by range."""

    @property
    def descriptor(self) -> int:
        """Return the system's descriptor; -1 where there is none."""

    def will_need(self, start: int, length: int) -> None:
        """Announce a range that will be read soon."""

    def scattered(self) -> None:
        """Say that reads will be in no order."""

    def close(self) -> None:
        """Close it."""


class FileOpener(Protocol):
    """Where such files are."""

    def open(self, name: str) -> Any:
        """Open a file, a `Bytes`."""


@dataclass(frozen=True)
class Extent:
    """An archive on storage, or in another one: bytes of a file."""

    location: FileOpener
    name: str  # the file's name in `location`
    size: int  # bytes
    stamp: int  # changes with the archive that the user has
    shown: str  # the archive, with those it lies in, for messages
    start: int = 0  # byte of the file at which it begins
    file_size: int = -1  # bytes of the file, and its time of change, when it was listed; -1: none
    file_stamp: int = 0
    unpacked: int = 0  # times that it, or one around it, was inflated into a file of ours

    def inside(self, path: bytes, start: int, size: int) -> Extent:
        """Return an archive in it, whose bytes lie there as they are."""
        shown = f"{self.shown}/{printable(path)}"
        return replace(self, size=size, shown=shown, start=self.start + start)


class ExtentReader:
    """An extent, open for reading."""

    def __init__(self, file: Bytes, extent: Extent) -> None:
        self._file, self._start = file, extent.start
        self.size = extent.size

    def read(self, start: int, length: int) -> bytes:
        """Read exactly `length` bytes from `start` of the extent."""
        return self._file.read(self._start + start, length)


def check_same(file: Bytes, extent: Extent, path: bytes) -> None:
    """Raise SourceChangedError for an open file that is not as it was listed. path: its name."""
    if file.descriptor >= 0:
        status = os.fstat(file.descriptor)
        if (status.st_size, mtime(status)) != (extent.file_size, extent.file_stamp):
            raise changed(path, "its size or time of change is another")


def extent_of(path: bytes | StoredObject) -> Extent:
    """Return the archive at a path, or that an object of a store is. Raises OSError."""
    if isinstance(path, StoredObject):
        return Extent(path, path.name, path.size, path.stamp, path.shown)
    folder, name = os.path.split(os.path.abspath(path))
    status = os.stat(path)
    return Extent(
        LocalDirectory(os.fsdecode(folder)),
        key_text(name),
        status.st_size,
        mtime(status),
        printable(path),
        file_size=status.st_size,
        file_stamp=mtime(status),
    )


def extent_in(folder: DiskFolder | StoreFolder, path: bytes) -> Extent:
    """Return the archive at a path in a folder. Raises OSError."""
    if isinstance(folder, StoreFolder):
        return extent_of(folder.object_at(path))
    return extent_of(folder.path + b"/" + path)
