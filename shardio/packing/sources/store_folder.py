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
import hashlib
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ...errors import DamageError, StorageError
from ...names import key_bytes, key_text
from ...storage import ranges
from ...storage.client import Reply, Request, RequestError
from ...storage.listing import PAGE, plain_tag
from ...storage.listing import Listed as Object
from ...storage.location import locate
from ...storage.ranges import Range, Released
from ...storage.remote import RemoteLocation
from ...storage.remote_file import RANGE, read, wait
from .archived import root_in_archive
from .base import ReadFile, Seen, SourceFolder, SourceRequest
from .files import (
    MISSING,
    DiskFolder,
    changed,
    ignores_nothing,
    is_ignored,
    unfit_size,
)
from .listed_folder import Listed, ListedFolder

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
                stamps.append(_stamp(one))
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
        self._announced: dict[bytes, deque[list[Range]]] = {}  # by path

    @property
    def listed(self) -> Listed:
        """Return all objects below the URL. Raises OptionError, StorageError."""
        return self._objects.listed

    def below(self, path: bytes) -> StoreFolder:
        """Return a folder in it."""
        return StoreFolder(self._location, self.within(path), self._objects, self.ignores)

    def look(self, paths: Iterable[bytes]) -> Iterator[Seen]:
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
            for of_one_path in self._announced.values():
                for asked in of_one_path:
                    _let_go(asked)
            self._announced.clear()

    def will_need(self, path: bytes, size: int) -> None:
        """Ask for an object."""
        self._announced.setdefault(path, deque()).append(self._ask(path, size))

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

    def _look_at_each(self, paths: Iterable[bytes]) -> Iterator[Seen]:
        """Yield what each path leads to, by a request for each."""
        asked: deque[Range | None] = deque()

        def settle() -> Seen:
            one = asked.popleft()
            if one is None:
                return Seen(0, 0, self.outside)
            try:
                found = self._wait(one)
            except FileNotFoundError:
                return Seen(0, 0, MISSING)
            finally:
                one.release()
            seen = Object("", found.size, 0, plain_tag(found.tag))
            return Seen(found.size, _stamp(seen), unfit_size(found.size))

        for path in paths:
            asked.append(None if self.full(path) is None else self._ask(path, 0)[0])
            if len(asked) == _LOOKED_AHEAD:
                yield settle()
        while asked:
            yield settle()

    def _ask(self, path: bytes, size: int) -> list[Range]:
        store, where = self._location.store, key_text(self.full(path) or b"")
        asked = [
            Request(store, where, at, min(RANGE, size - at)) for at in range(0, size, RANGE)
        ] or [Request(store, where, what="head")]
        return [ranges.ranges().announce(one) for one in asked]

    def _read(self, path: bytes, size: int, stamp: int) -> bytes:
        """Return the bytes of a listed object. Raises SourceChangedError, StorageError."""
        announced = self._announced.get(path)
        asked = announced.popleft() if announced else self._ask(path, size)
        if not announced:
            self._announced.pop(path, None)
        try:
            replies = [self._wait(one) for one in asked]
        except FileNotFoundError:
            raise changed(path, "it is gone") from None
        except DamageError:
            raise changed(path, "it is shorter") from None
        finally:
            _let_go(asked)
        for reply in replies:
            tag = "" if self._location.store.scheme == "hf" else plain_tag(reply.tag)
            other = tag and stamp & 1 and _stamp(Object("", 0, 0, tag)) != stamp
            if reply.size != size or other:
                what = "size" if reply.size != size else "ETag"
                raise changed(path, f"its {what} is another")
        if len(replies) == 1:
            return bytes(replies[0].data)
        return b"".join(reply.data for reply in replies)

    @staticmethod
    def _wait(one: Range) -> Reply:
        """Wait for an answer, also where it was let go of. Raises FileNotFoundError and others."""
        try:
            return wait(one)
        except Released:
            return read(one.request)


def _let_go(asked: Iterable[Range]) -> None:
    """Let go of ranges, read or not."""
    for one in asked:
        one.release()


def _stamp(one: Object) -> int:
    """Return a number that changes with the content of an object: odd if it is of its ETag.

    Without one, the time is taken; and of other stores than the Hub, answers have the same ETag.
    """
    if not one.tag:
        return one.mtime_ns & ~1
    digest = hashlib.blake2b(one.tag.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) | 1


def folder_in_store(request: SourceRequest) -> StoreFolder:
    """Return the folder of a store that is to be packed."""
    location = request.location
    assert isinstance(location, RemoteLocation)
    return StoreFolder(location, ignores=is_ignored if request.ignore else ignores_nothing)


def root_of(request: SourceRequest) -> SourceFolder:
    """Return the folder that the paths in a listing refer to. Raises OptionError."""
    if request.root is None:
        root = os.path.dirname(os.path.abspath(request.path))
    else:
        location = locate(request.root, request.storage)
        if isinstance(location, RemoteLocation):
            return StoreFolder(location)
        root = os.fsencode(request.root)
    return root_in_archive(root, request) or DiskFolder(root)
