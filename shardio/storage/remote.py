"""A folder of an object store as a location. Nothing is listed, but by `walk`, for packing."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import DamageError, OptionError, StorageError
from . import ranges
from .base import SEAL_BYTES, KnownFile, Location, Seal, is_right
from .cache import SMALL, CacheDirectory
from .cached_file import CachedFile
from .cached_remote_file import CachedRemoteFile
from .client import Reply, Request, RequestError
from .listing import ObjectEntry
from .remote_file import Ends, RemoteFile, read
from .stores import Store
from .swept_file import SweptFile
from .upload import Upload
from .walk import walk


class RemoteLocation(Location):
    """A folder of an object store. It can be pickled."""

    remote = True

    def __init__(self, store: Store, cache: CacheDirectory | None = None) -> None:
        """cache: keeps what is read, where what is opened is a dataset's."""
        self.store, self.cache = store, cache
        self.url = store.shown
        self.ends = Ends(store)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteLocation, (self.store, self.cache)

    def will_open(self, name: str, known: KnownFile, end: int) -> None:
        """Announce that an object will be opened soon, and its last `end` bytes read."""
        if self.cache is not None:
            cached = _open_cached(self.cache, known)
            missing = cached.missing(max(0, known.size - end), min(end, known.size))
            cached.close()
            if not missing:
                return
        self.ends.announce(name, known.size, end)

    def distrust_end(self, known: KnownFile, end: int) -> None:
        """Keep the last `end` bytes of an object no longer: they are damaged."""
        if self.cache is not None:
            cached = _open_cached(self.cache, known)
            size = cached.layout.range_bytes
            for number in range(max(0, known.size - end) // size, cached.layout.ranges):
                cached.distrust(number)
            cached.close()

    def let_go(self) -> None:
        """Let go of what was announced and not read: a pass has ended."""
        self.ends.let_go()

    def share(self, consumers: int) -> None:
        """Say how many processes of this machine read from it, this one included."""
        ranges.share(consumers)

    def open(self, name: str, known: KnownFile | None = None) -> RemoteFile:
        """Open an object. Where it is known, nothing is asked yet.

        Raises FileNotFoundError, StorageError.
        """
        if self.cache is None or known is None or not known.sha256:
            return RemoteFile(self.store, name, self.ends, known)
        cached = _open_cached(self.cache, known)
        return CachedRemoteFile(self.store, name, self.ends, known, cached)

    def sweep(self, name: str) -> SweptFile:
        """Open an object that is read once, nearly from front to back. As `open`."""
        return SweptFile(self.store, name, self.ends)

    def read(self, name: str, limit: int, *, seal: Seal = None) -> bytes:
        """Read a small object. Raises as `open`, and DamageError above `limit`.

        seal: what comes with a wrong one is asked for again. A cache keeps what has a right one by
        the SHA-256 in it, so that it is downloaded once for all that share the cache.
        """
        if seal is not None and (kept := self._read_kept(name, limit, seal)):
            return kept
        data = self._read(name, limit)
        return data if seal is None or is_right(data, seal) else self._read(name, limit)

    def _read(self, name: str, limit: int) -> bytes:
        return bytes(self._ask(name, limit, "whole").data)

    def _ask(self, name: str, limit: int, what: str) -> Reply:
        request = Request(self.store, name, 0, limit, what)
        reply = read(request)
        if reply.size > limit:
            raise DamageError(
                f"{request.shown}: {reply.size:,} bytes, more than {limit:,} can be right"
            )
        return reply

    def _read_kept(self, name: str, limit: int, seal: re.Pattern[bytes]) -> bytes:
        """Read a small object through the cache; b"": there is none, or this cannot be done."""
        if self.cache is None:
            return b""
        try:
            end = read(Request(self.store, name, 0, SEAL_BYTES, "end"))
            stated = seal.search(end.data)
            if stated is None or end.size > limit:
                return b""
            known = KnownFile(end.size, bytes.fromhex(stated[1].decode()), SMALL, 0)
            with contextlib.closing(self.open(name, known)) as file:
                file.will_need(0, file.size)
                data = file.read(0, file.size)
        except DamageError:  # the plain road says what is wrong
            return b""
        except StorageError as error:
            if isinstance(error.__cause__, RequestError) and error.__cause__.transient:
                raise  # its time is over
            return b""
        if is_right(data, seal) and data[-len(end.data) :] == end.data:
            return data
        self.distrust_end(known, known.size)
        return b""

    def put_request(self, name: str, upload: Upload) -> Request:
        """Return the request that writes an object; `ranges.send` sends it, and may do so again."""
        return Request(self.store.with_retries(), name, 0, upload.size, "put", upload)

    def write(self, name: str, data: bytes) -> None:
        """Write a small object, whole or not at all. Raises StorageError, OptionError."""
        seal = hashlib.sha256(data).digest()
        upload = Upload(data, len(data), seal, self.store.show(name))
        ranges.send(self.put_request(name, upload)).result()

    def read_marked(self, name: str, limit: int) -> tuple[bytes, str]:
        """Read a small object from the store, and its mark, for `replace`. Raises as `read`."""
        reply = self._ask(name, limit, "marked")
        return bytes(reply.data), reply.tag

    def replace(self, name: str, data: bytes, mark: str) -> bool:
        """Write a small object in place of the content with a mark; ABSENT: of none.

        Returns False where something else is there now; it may be what this call wrote, and was
        not answered for. Raises StorageError.
        """
        seal = hashlib.sha256(data).digest()
        upload = Upload(data, len(data), seal, self.store.show(name))
        request = self.put_request(name, upload)._replace(after=mark)
        try:
            ranges.send(request).result()
        except StorageError as error:
            cause = error.__cause__
            if isinstance(cause, RequestError) and cause.kind in ("changed", "missing"):
                return False
            raise
        return True

    def remove(self, name: str) -> None:
        """Remove an object; one that is not there does no harm. Raises StorageError."""
        ranges.send(self.remove_request(name)).result()

    def remove_request(self, name: str) -> Request:
        """Return the request that removes an object, as `remove` sends it."""
        return Request(self.store, name, what="remove")

    def exists(self, name: str) -> bool:
        """Return True if an object of this name is there; "", the folder itself, always is."""
        if not name:
            return True
        try:
            self.open(name).close()
        except FileNotFoundError:
            return False
        return True

    def walk(self, forget: Callable[[], object]) -> Iterator[ObjectEntry]:
        """Yield all objects below the folder, in no order. Markers of folders are passed over.

        forget: called where all that was yielded does not count, and comes again. Raises
        OptionError for stores that cannot be listed, StorageError.
        """
        if self.store.kind == "http":
            raise OptionError(
                f"{self.url}: {self.store.scheme}:// cannot be listed. Give a listing of the "
                "files, with this URL as --root, or copy them to a directory first"
            )
        return walk(self.store, forget)

    def objects(self) -> list[ObjectEntry]:
        """Return what `walk` yields, in the order of the paths. Raises as `walk`."""
        found = list[ObjectEntry]()
        for entry in self.walk(found.clear):
            found.append(entry)
        return sorted(found)

    def below(self, name: str) -> RemoteLocation:
        """Return the folder of this name in it."""
        return RemoteLocation(self.store.below(name), self.cache)

    def above(self) -> tuple[RemoteLocation, str]:
        """Return the folder that it lies in, and its name there; "": it is the top of a store."""
        store, name = self.store.above()
        return RemoteLocation(store, self.cache), name

    def is_network(self) -> bool:
        """Return True if reads leave this machine: with a cache the page cache can be trusted."""
        return self.cache is None


def _open_cached(cache: CacheDirectory, known: KnownFile) -> CachedFile:
    """Open what a cache has of a file."""
    return cache.open(known.sha256.hex(), known.size, known.dataset_id, known.shard)
