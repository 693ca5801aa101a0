"""A folder of an object store as a location. Nothing is listed."""

from __future__ import annotations

import hashlib
from typing import Any

from ..errors import DamageError
from . import ranges
from .base import KnownFile
from .cache import CacheDirectory
from .cached_file import CachedFile
from .client import Request
from .kept_file import KeptFile
from .remote_file import Ends, RemoteFile, read
from .stores import Store
from .upload import Upload


class RemoteLocation:
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
        return KeptFile(self.store, name, self.ends, known, cached)

    def read(self, name: str, limit: int) -> bytes:
        """Read a small object. Raises as `open`, and DamageError above `limit`."""
        request = Request(self.store, name, 0, limit, "whole")
        reply = read(request)
        if reply.size > limit:
            raise DamageError(
                f"{request.shown}: {reply.size:,} bytes, more than {limit:,} can be right"
            )
        return bytes(reply.data)

    def put_request(self, name: str, upload: Upload) -> Request:
        """Return the request that writes an object; `ranges.send` sends it, and may do so again."""
        return Request(self.store.patient(), name, 0, upload.size, "put", upload)

    def write(self, name: str, data: bytes) -> None:
        """Write a small object, whole or not at all. Raises StorageError, OptionError."""
        seal = hashlib.sha256(data).digest()
        upload = Upload(data, len(data), seal, self.store.show(name))
        ranges.send(self.put_request(name, upload)).result()

    def remove(self, name: str) -> None:
        """Remove an object; one that is not there does no harm. Raises StorageError."""
        ranges.send(Request(self.store, name, what="remove")).result()

    def exists(self, name: str) -> bool:
        """Return True if an object of this name is there; "", the folder itself, always is."""
        if not name:
            return True
        try:
            self.open(name).close()
        except FileNotFoundError:
            return False
        return True

    def below(self, name: str) -> RemoteLocation:
        """Return the folder of this name in it."""
        return RemoteLocation(self.store.below(name), self.cache)

    def is_network(self) -> bool:
        """Return True if reads leave this machine: with a cache the page cache can be trusted."""
        return self.cache is None


def _open_cached(cache: CacheDirectory, known: KnownFile) -> CachedFile:
    """Open what a cache has of a file."""
    return cache.open(known.sha256.hex(), known.size, known.dataset_id, known.shard)
