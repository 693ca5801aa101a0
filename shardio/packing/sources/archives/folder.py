"""A folder in archives, as sources read it: members are read by range, and nothing is unpacked."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ....errors import DamageError, SourceError, printable
from ....names import key_bytes
from ..base import ReadFile, Rejected, Walked
from ..files import (
    MISSING,
    DiskFolder,
    changed,
    ignores_nothing,
    is_archive,
    is_ignored,
    not_images,
)
from ..listed_folder import Listed, ListedFolder
from ..store_folder import StoreFolder
from ..store_reader import StoredObject
from .extent import Bytes, Extent, ExtentReader, check_same, extent_of
from .inflate import Inflating, is_there
from .member_table import DEFLATED, PLAIN
from .tree import Members, member, tree_of_archive, tree_of_folder
from .zip_members import range_length, read_member

_MOST_OPEN = 64  # archives of a source, in a process
_Files = dict[tuple[int, str], tuple[Bytes, Extent]]  # by place and name


class ArchiveFolder(ListedFolder):
    """A folder in one archive, or in several that are one folder together."""

    in_archives = True

    def __init__(
        self,
        path: bytes,
        tree: Members,
        inner: bytes = b"",
        ignores: Callable[[bytes], bool] = is_ignored,
        said: Sequence[str] = (),
    ) -> None:
        """path: of the archive, or of the folder of archives. said: notes on how it was found."""
        super().__init__(path, inner, ignores)
        self._root, self._tree, self._said = path, tree, said
        self._files: _Files = {}  # that are open
        self._next = 0  # the row behind the one that was asked for last

    @property
    def listed(self) -> Listed:
        """Return all members."""
        return self._tree

    @property
    def outside(self) -> str:
        """Say that a path leads out of the archive."""
        return f"is no path in {printable(self._root)}"

    @property
    def is_unpacked(self) -> bool:
        """Return whether an archive of it was compressed as a whole, and is a file of ours now."""
        return any(extent.unpacked for extent in self._tree.extents)

    def below(self, path: bytes) -> ArchiveFolder:
        """Return a folder in it."""
        return ArchiveFolder(self._root, self._tree, self.within(path), self.ignores, self._said)

    def walk(self, *, empty: bool = False) -> Walked:
        """Find every member below it."""
        found = super().walk(empty=empty)
        return found._replace(notes=[*self._said, *found.notes])

    @contextlib.contextmanager
    def opened(self) -> Iterator[ReadFile]:
        """Give the function that reads a member; archives are opened when they are needed.

        Each must be the one that was listed when it is opened, and still after all was read.
        """
        files = self._files
        try:
            yield self._read
            for file, extent in files.values():
                check_same(file, extent, key_bytes(extent.name))
        finally:
            for file, _ in files.values():
                file.close()
            files.clear()

    def will_need(self, path: bytes, size: int) -> None:
        """Ask for a member of an archive in a store."""
        if not self._in_store:
            return
        row = self._row(path)
        if row is None or not size:  # reading it says so
            return
        tree = self._tree
        extent, start = tree.extents[tree.extent_numbers[row]], tree.starts[row]
        if isinstance(extent.location, StoredObject):  # what was unpacked is a file of ours
            if tree.methods[row] != PLAIN:
                size = range_length(tree.paths[row], start, tree.packed_sizes[row], extent.size)
            self._opened(extent, path).will_need(extent.start + start, size)

    @functools.cached_property
    def _in_store(self) -> bool:
        return any(isinstance(one.location, StoredObject) for one in self._tree.extents)

    def unwrapped(self) -> ArchiveFolder:
        """Return the folder that it wraps, if any does: alone on top, and no image in it.

        Folders with texts beside them are wrapped, too: as one class they would lose their labels.
        """
        folder = self
        while True:
            folders, files, *_ = folder.top()
            if len(folders) != 1 or not all(map(self.ignores, files)):
                break
            inner = folder.below(folders[0])
            within, loose, *_ = inner.top()
            if not within or len(not_images(loose)) < len(loose):
                break
            folder = inner
        if folder is not self:
            shown = printable(folder._inner)
            folder._said = [f"{shown} is all that is in the archive, and is packed as its folder"]
        return folder

    def archive_of(self, path: bytes) -> str:
        """Return the archive that a member lies in, for messages."""
        row = self._row(path)
        if row is None:
            return printable(self._root)
        extent: Extent = self._tree.extents[self._tree.extent_numbers[row]]
        return extent.shown

    def member(self, path: bytes) -> tuple[Extent, bool, int | None]:
        """Return a listed member as a run of bytes, whether it is deflated, and its CRC-32, if any.

        Raises SourceError, DamageError, StorageError.
        """
        tree, row = self._tree, self._row(path)
        if row is None:
            full = self._inner + path
            raise SourceError(f"{printable(full)}: {dict(tree.problems).get(full, MISSING)}")
        extent, way = tree.extents[tree.extent_numbers[row]], tree.methods[row]
        with contextlib.closing(extent.location.open(extent.name)) as file:
            found = member(tree, row, extent, ExtentReader(file, extent))
        return found, way == DEFLATED, None if way == PLAIN else tree.checksums[row]

    def _row(self, path: bytes) -> int | None:
        """Return where a member is listed; None: nowhere."""
        paths, full = self._tree.paths, self._inner + path
        row = self._next  # most are read in order
        if row >= len(paths) or paths[row] != full:
            row = bisect_left(paths, full)
        self._next = row + 1
        if row == len(paths) or paths[row] != full:
            full = self.full(path) or b""  # of a listing, with `.` or `//` in it
            row = bisect_left(paths, full)
        return None if row == len(paths) or paths[row] != full else row

    def _read(self, path: bytes, size: int, stamp: int) -> bytes:
        """Return the bytes of a listed member. Raises Rejected, SourceChangedError."""
        tree, row = self._tree, self._row(path)
        if row is None:
            raise changed(path, "it is gone from the archive")
        full, extent = tree.paths[row], tree.extents[tree.extent_numbers[row]]
        if tree.sizes[row] != size or extent.stamp != stamp:
            raise changed(path, "its archive is another")
        file = self._opened(extent, path)
        start, way = tree.starts[row], tree.methods[row]
        try:
            if way == PLAIN:
                return file.read(extent.start + start, size)
            packed, checksum = tree.packed_sizes[row], tree.checksums[row]
            return read_member(ExtentReader(file, extent), full, start, packed, size, way, checksum)
        except (DamageError, ValueError) as error:
            check_same(file, extent, key_bytes(extent.name))
            raise Rejected(f"cannot be read from {extent.shown}: {error}") from None

    def _opened(self, extent: Extent, path: bytes) -> Bytes:
        """Return the file of an extent, which must be the one that was listed."""
        files, key = self._files, (id(extent.location), extent.name)
        if key in files:
            return files[key][0]
        if len(files) >= _MOST_OPEN:  # but those of a store have members under way
            first = next((one for one, (file, _) in files.items() if file.descriptor >= 0), None)
            if first is not None:
                check_same(*files[first], key_bytes(files[first][1].name))
                files.pop(first)[0].close()
        try:
            file: Bytes = extent.location.open(extent.name)
        except FileNotFoundError:
            raise changed(path, f"{extent.shown} is gone") from None
        file.scattered()
        check_same(file, extent, key_bytes(extent.name))
        files[key] = file, extent
        return file


# What this process listed last: pieces of one source are opened one after the other. Two, since
# labels may lie in an archive of their own.
_INDEX_CACHE: dict[tuple[Any, ...], tuple[Members, bytes]] = {}


def open_archive(
    path: bytes | StoredObject, inflating: Inflating, inner: bytes = b"", *, ignore: bool = True
) -> tuple[ArchiveFolder, bytes]:
    """Return the folder that an archive is, and a path in that folder.

    inner: a path in the archive. Where it leads through archives, the folder is the last of these.

    Raises SourceError, OptionError, StorageError.
    """
    ignores = is_ignored if ignore else ignores_nothing
    if isinstance(path, StoredObject):
        whole, reached = key_bytes(path.shown), path.location.store.client_key
    else:
        whole, reached = os.path.abspath(path), ""
    try:
        extent = extent_of(path)
    except OSError as error:
        raise SourceError(f"{printable(whole)}: cannot be opened: {error.strerror}") from None
    names = inner.split(b"/")
    while names and not is_archive(names[-1]):
        names.pop()
    through = b"/".join(names)
    key = whole, through, extent.size, extent.stamp, ignores, inflating.directory, reached
    tree, left = _cached(key, lambda: tree_of_archive(extent, ignores, inflating, through))
    root = os.path.join(whole, through.removesuffix(left)).rstrip(b"/")
    folder = ArchiveFolder(root, tree, b"", ignores)
    return folder, (left + inner[len(through) :]).strip(b"/")


def open_folder_of_archives(
    folder: DiskFolder | StoreFolder, inflating: Inflating
) -> ArchiveFolder:
    """Return the folder that the archives in a folder are. Raises as `open_archive`."""
    walked = folder.walk()
    seal = hashlib.sha256(b"\0".join(walked.keys))
    seal.update(walked.sizes.tobytes() + walked.mtimes.tobytes())
    reached = folder.reached if isinstance(folder, StoreFolder) else ""
    key = folder.path, seal.digest(), folder.ignores, inflating.directory, reached
    tree, _ = _cached(key, lambda: (tree_of_folder(folder, walked, inflating), b""))
    return ArchiveFolder(folder.path, tree, b"", folder.ignores)


def _cached(
    key: tuple[Any, ...], make: Callable[[], tuple[Members, bytes]]
) -> tuple[Members, bytes]:
    """Return what was listed last, if it was this; else list it."""
    found = _INDEX_CACHE.get(key)
    if found is None or not all(map(is_there, found[0].extents)):
        found = make()
        while len(_INDEX_CACHE) > 1:
            _INDEX_CACHE.pop(next(iter(_INDEX_CACHE)))
        _INDEX_CACHE[key] = found
    return found
