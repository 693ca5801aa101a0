"""A folder of an object store whose files are packed: listed once, and read by ranges.

All of it is listed, since nothing else says which folders it has: a thousand objects a request. For
a table that names files it is listed as far as that is worth it, or each of these is looked at.
Paths are bytes, as of files. What is read must be what was listed: each answer says size and ETag
of the object, and both are compared.

Who reads announces what comes next (`will_need`), so that many requests are under way. As many as
`storage.ranges` has room for, of this process's part of the machine.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ...errors import StorageError
from ...names import key_bytes, key_text
from ...storage.client import RequestError
from ...storage.listing import PAGE
from ...storage.ranges import Range
from ...storage.remote import RemoteLocation
from .base import FileState, ReadFile, SourceRequest
from .files import MISSING, ignores_nothing, is_ignored, unfit_size
from .listed_folder import Listed, ListedFolder
from .store_reader import AheadReader, StoredObject, stamp_of, stamp_of_reply

_LOOKED_AHEAD = 256  # objects that are looked at, at once, where they are not listed
# Objects for each path of a listing up to which a bucket is listed to look at them: a request lists
# 1,000, one after the other; to look at one is a request, but many run at once.
WORTH = 8


class _Objects:
    """All objects below a URL, in bytewise order of their paths; listed when first asked for."""

    def __init__(self, location: RemoteLocation) -> None:
        self._location = location
        self._found: Listed | None = None

    @property
    def listed(self) -> Listed:
        """Return all of them. Raises OptionError, StorageError."""
        found = self.at_most(None)
        assert found is not None
        return found

    def at_most(self, most: int | None) -> Listed | None:
        """Return all of them; None where there are more. Raises as `listed` does."""
        if self._found is None:
            keys: list[bytes] = []
            sizes, stamps = array("q"), array("q")

            def forget() -> None:
                for column in (keys, sizes, stamps):
                    del column[:]

            for one in self._location.walk(forget):
                if len(keys) == most:
                    return None
                keys.append(key_bytes(one.path))
                sizes.append(one.size)
                stamps.append(stamp_of(one))
            order = sorted(range(len(keys)), key=keys.__getitem__)
            columns = [np.array(column, np.int64)[order] for column in (sizes, stamps)]
            self._found = Listed([keys[i] for i in order], columns[0], columns[1])
        return self._found


class StoreFolder(ListedFolder):
    """A folder of an object store. Objects whose names end with a slash are none of its files."""

    def __init__(
        self,
        location: RemoteLocation,
        inner: bytes = b"",
        objects: _Objects | None = None,
        ignores: Callable[[bytes], bool] = is_ignored,
    ) -> None:
        """inner: the path of a folder in the location, with a slash at its end, or b""."""
        super().__init__(key_bytes(location.url), inner, ignores)
        self._location = location
        self._objects = _Objects(location) if objects is None else objects
        self._reader = AheadReader(location.store)

    @property
    def listed(self) -> Listed:
        """Return all objects below the URL. Raises OptionError, StorageError."""
        return self._objects.listed

    def below(self, path: bytes) -> StoreFolder:
        """Return a folder in it."""
        return StoreFolder(self._location, self.within(path), self._objects, self.ignores)

    def look(self, paths: Iterable[bytes]) -> Iterator[FileState]:
        """Yield what each path leads to. Raises StorageError."""
        wanted = list(paths)
        if self._is_listed_for(len(wanted)):
            yield from super().look(wanted)
        else:
            yield from self._look_at_each(wanted)

    @contextlib.contextmanager
    def opened(self) -> Iterator[ReadFile]:
        """Give the function that reads an object; let go of what was announced in the end."""
        try:
            yield self._read
        finally:
            self._reader.let_go()

    def will_need(self, path: bytes, size: int) -> None:
        """Ask for an object."""
        self._reader.will_need(self._name(path), 0, size)

    @property
    def reached(self) -> str:
        """Return how its store is reached, with secrets: to compare, and never shown."""
        return self._location.store.client_key

    def object_at(self, path: bytes) -> StoredObject:
        """Return an object of it, as it was listed."""
        (seen,) = super().look([path])
        return StoredObject(self._location, self._name(path), seen.size, seen.mtime)

    def _name(self, path: bytes) -> str:
        return key_text(self.full(path) or b"")

    def _read(self, path: bytes, size: int, stamp: int) -> bytes:
        """Return the bytes of a listed object. Raises SourceChangedError, StorageError."""
        name = self._name(path)
        return self._reader.read(name, 0, size, shown=path, size=size, stamp=stamp)

    def _is_listed_for(self, paths: int) -> bool:
        """List what so many paths are looked up in; False where that may not, or need not, be."""
        if self._location.store.scheme in ("http", "https"):
            return False
        try:
            return self._objects.at_most(WORTH * (paths + PAGE)) is not None
        except StorageError as error:
            cause = error.__cause__
            if isinstance(cause, RequestError) and cause.kind == "denied":  # but to read may do
                return False
            raise

    @property
    def outside(self) -> str:
        """Say that a path leads out of the URL."""
        return f"is no path below {self._location.url}"

    def _look_at_each(self, paths: Iterable[bytes]) -> Iterator[FileState]:
        """Yield what each path leads to, by a request for each."""
        asked: deque[Range | None] = deque()

        def settle() -> FileState:
            one = asked.popleft()
            if one is None:
                return FileState(0, 0, self.outside)
            try:
                found = self._reader.wait(one)
            except FileNotFoundError:
                return FileState(0, 0, MISSING)
            finally:
                one.release()
            return FileState(found.size, stamp_of_reply(found), unfit_size(found.size))

        for path in paths:
            known = self.full(path) is not None
            asked.append(self._reader.ask(self._name(path), 0, 0)[0] if known else None)
            if len(asked) == _LOOKED_AHEAD:
                yield settle()
        while asked:
            yield settle()


def folder_in_store(request: SourceRequest) -> StoreFolder:
    """Return the folder of a store that is to be packed."""
    location = request.location
    assert isinstance(location, RemoteLocation)
    return StoreFolder(location, ignores=is_ignored if request.ignore else ignores_nothing)
