"""Records written as a tree of files, which never leaves its directory.

Keys come from a file that may be anybody's. Each is checked part by part, and every folder on the
way is opened relative to the one above without following links.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence

from ..errors import DamageError, ExistsError, StorageError, printable
from ..names import key_bytes
from ..storage import local
from .manifest import Manifest

_OPEN = 256  # folders at a time
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MAX_PATH = 4096  # bytes of a key; no file that was packed has a longer path


class Tree:
    """A directory that is written into, and never left."""

    def __init__(self, root: str, overwrite: bool) -> None:
        local.make_directory(root)
        self._root, self._overwrite = root, overwrite
        with self._explained(()):
            self._top = os.open(root, _FOLDER)
        self._open: dict[tuple[bytes, ...], int] = {(): self._top}  # by their path

    def folder(self, parts: Sequence[bytes]) -> int:
        """Return the descriptor of a folder, made if it is missing; valid until the next call."""
        path = tuple(parts)
        if path in self._open:
            return self._open[path]
        if len(self._open) > _OPEN:
            self._close_folders(1)
        folder = self._top
        try:
            for at, name in enumerate(path, 1):
                with self._explained(path[:at]):
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=folder)
                    below = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
                if folder != self._top:
                    os.close(folder)
                folder = below
        except BaseException:
            if folder != self._top:
                os.close(folder)
            raise
        self._open[path] = folder
        return folder

    def write(self, parts: Sequence[bytes], data: bytes) -> None:
        """Write a file of this path. Raises ExistsError, StorageError."""
        folder = self.folder(parts[:-1])
        with self._explained(parts):
            if self._overwrite:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(parts[-1], dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(parts[-1], flags, 0o666, dir_fd=folder)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
            except BaseException:
                os.unlink(parts[-1], dir_fd=folder)  # half a file is worse than none
                raise
            finally:
                os.close(descriptor)

    def complete(self, parts: Sequence[bytes], data: bytes) -> bool:
        """Write a file, but leave it where it is there with these bytes; return False then.

        One that only begins with them, as a killed process leaves it, is written anew.
        Raises ExistsError for another file, StorageError.
        """
        try:
            self.write(parts, data)
        except ExistsError:
            there = self._read(parts, len(data))
            if there == data:
                return False
            if there is None or not data.startswith(there):
                raise
            with self._explained(parts):
                os.unlink(parts[-1], dir_fd=self.folder(parts[:-1]))
            self.write(parts, data)
        return True

    def _read(self, parts: Sequence[bytes], most: int) -> bytes | None:
        """Read a file; None if it has more bytes, is a link or no file, or may not be read."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with contextlib.suppress(OSError, StorageError):
            descriptor = os.open(parts[-1], flags, dir_fd=self.folder(parts[:-1]))
            with contextlib.closing(local.wrap(descriptor, "")) as file:
                return file.read(0, file.size) if file.size <= most else None
        return None

    def close(self) -> None:
        """Close all folders; a second call does no harm."""
        self._close_folders(0)

    def _close_folders(self, left: int) -> None:
        while len(self._open) > left:
            os.close(self._open.popitem()[1])  # the last one first, the top at the end

    @contextlib.contextmanager
    def _explained(self, parts: Sequence[bytes]) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            shown = printable(os.path.join(os.fsencode(self._root), *parts), 4096)
            if isinstance(error, FileExistsError):
                raise ExistsError(
                    f"{shown}: another file is there; unpack into an empty directory, or replace "
                    "files with --overwrite"
                ) from None
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise StorageError(
                    f"{shown}: expected a folder, found a file or a link; links are not followed"
                ) from None
            raise StorageError(f"{shown}: cannot be written: {error.strerror}") from None


def key_parts(key: bytes, where: str) -> list[bytes]:
    """Split a key into the names on its path. Raises DamageError if it leaves the directory."""
    parts = key.split(b"/")
    if len(key) > _MAX_PATH or any(p in (b"", b".", b"..") or b"\0" in p for p in parts):
        raise DamageError(f"{where}: the key {printable(key)} is no path within a directory")
    return parts


def class_bytes(name: str) -> bytes:
    """Return the stored bytes of a class's name; none where it cannot have been a folder's."""
    try:
        return key_bytes(name)
    except UnicodeEncodeError:  # half of a surrogate pair
        return b""


def is_raw(manifest: Manifest, name: str) -> bool:
    """Return True if a field was packed as pixels: PPM files, whatever they were before."""
    return name == "image" and manifest.options.get("encode") == "raw"


def raw_ending(key: bytes) -> bytes:
    """Return what the name of a file of raw pixels lacks.

    It is added, not put in place of another ending: `a.jpg` and `a.png` may both be there.
    """
    return b"" if key.lower().endswith(b".ppm") else b".ppm"


def class_folders(manifest: Manifest) -> list[str]:
    """Return the class folders of the tree that was packed; [] for a stream of samples."""
    if manifest.options.get("source") != "imagefolder":
        return []
    absent = manifest.options.get("absent", [])
    return [name for i, name in enumerate(manifest.classes or ()) if i not in absent]
