"""One object of a store of which a cache keeps what is read.

How it works. What is announced is asked for in the cache's ranges. Of all processes and threads
that want one, the cache lets one download it (a claim). What has arrived is stored by threads of
their own; who waits for it stores it itself. What the cache cannot keep is held, or streamed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from queue import SimpleQueue

from . import local, ranges
from .base import KnownFile
from .cached_file import CachedFile, CacheFull, Claim
from .client import Request
from .ranges import Range, Released
from .remote_file import Ends, RemoteFile, wait
from .stores import Store

_THREADS = 2  # of a process, which write what has arrived: 18 ms for 8 MiB
_OTHERS_S = 0.05  # between two looks at a range that another process downloads


class KeptFile(RemoteFile):
    """One object of which a cache keeps what is read. Threads may share it.

    Its descriptor is that of the cache's sparse file, so that native reads work on it: what is not
    there yet reads as zeros, whose checksum is wrong; then `read` is asked, which downloads it.
    What the cache cannot keep is held as by a RemoteFile.
    """

    __slots__ = ("_cached", "_coming", "_local", "descriptor")

    def __init__(
        self, store: Store, path: str, ends: Ends, known: KnownFile, cached: CachedFile
    ) -> None:
        self._cached = cached
        self._coming: dict[int, _Coming] = {}  # ranges that are downloaded, by number
        super().__init__(store, path, ends, known)
        self.descriptor = cached.descriptor
        self._local: local.LocalFile | None = None
        if cached.descriptor >= 0:
            self._local = local.wrap(os.dup(cached.descriptor), self.name)

    def read(self, start: int, length: int) -> bytes:
        """Read exactly `length` bytes from `start`. Raises DamageError if the file ends before."""
        kept, tail = self._tail
        if self._local is None or start + length > self.size or (start >= kept and tail):
            return super().read(start, length)
        try:
            for number in self._cached.missing(start, length):
                if not self._fetch(number):
                    return super().read(start, length)
        except FileNotFoundError:
            self.miss(start, length)
            raise
        self.found = True
        return self._local.read(start, length)

    def view(self, start: int, length: int) -> bytes:
        """Read as `read` does."""
        return self.read(start, length)

    def read_again(self, start: int, length: int) -> bytes:
        """Read bytes that were damaged when they came: the cache's are not used again."""
        size = self._cached.layout.range_bytes
        for number in range(start // size, -(-(start + length) // size)):
            self._cached.distrust(number)
        return super().read_again(start, length)

    def keep_end(self, length: int) -> bool:
        """Read the last `length` bytes: from the cache, or by one request."""
        start = max(0, self.size - length)
        if self._local is None or self._cached.missing(start, self.size - start):
            return super().keep_end(length)
        self.found = True
        return True

    def will_need(self, start: int, length: int, *, keep: bool = False) -> None:
        """Ask for what is missing of a range that will be read soon; the disk for what is there."""
        stop = min(start + length, self.size)
        if self._local is None:
            super().will_need(start, length, keep=keep)
            return
        for number in self._cached.missing(start, stop - start):
            if number not in self._coming and not self._begin(number, 0.0):
                first, size = self._cached.layout.span(number)
                super().will_need(first, size, keep=keep)
        self._local.will_need(start, stop - start)

    def scattered(self) -> None:
        """Say that reads will be in no order."""
        super().scattered()
        if self._local is not None:
            self._local.scattered()

    def close(self) -> None:
        """Close the cache's file. What is under way is let go of."""
        super().close()
        while self._coming:
            _, coming = self._coming.popitem()
            coming.drop()
        if self._local is not None:
            self._local.close()
        self._cached.close()
        self.descriptor = -1

    def forget(self) -> None:
        """Forget what was announced, without letting go of it: it is a parent's."""
        super().forget()
        self._coming = {}

    def _begin(self, number: int, timeout_s: float) -> bool:
        """Ask for a range, unless somebody else does; False if the cache cannot keep it."""
        try:
            claim = self._cached.claim(number, timeout_s)  # of all threads, one gets it
        except CacheFull as error:
            self._warn(error)
            return False
        if claim is not None:
            request = Request(self.store, self.path, claim.start, claim.length)
            coming = self._coming[number] = _Coming(self, claim)
            coming.ask(request)
        return True

    def _fetch(self, number: int) -> bool:
        """Wait until a range is in the cache; False if it cannot be, or another takes too long."""
        end = time.monotonic() + self.store.timeout_s
        while not self._cached.has(number, number + 1):
            coming = self._coming.get(number)
            if coming is not None:
                if not coming.wait():
                    return False
            elif time.monotonic() > end or not self._begin(number, _OTHERS_S):
                return False
        return True

    def keep(self, coming: _Coming) -> bool:
        """Keep a range that has arrived. Raises StorageError where it has not."""
        try:
            coming.claim.store(self.check(wait(coming.range)).data)
        except CacheFull as error:
            self._warn(error)
            return False
        except Released:  # the file was closed meanwhile
            return False
        finally:
            coming.drop()
            self._coming.pop(coming.claim.number, None)
        return True

    def _warn(self, error: CacheFull) -> None:
        """Say once in this process that the cache cannot keep what is read."""
        global _WARNED
        closed = self.descriptor < 0 and self._local is not None
        if not _WARNED and not closed:
            _WARNED = True
            warnings.warn(f"{error}. This is said once", stacklevel=2)


class _Coming:
    """A range on its way into the cache: stored by a thread of its own, or by who waits for it."""

    __slots__ = ("_file", "_guard", "_kept", "claim", "range")
    range: Range

    def __init__(self, file: KeptFile, claim: Claim) -> None:
        self._file, self.claim = file, claim
        self._guard = threading.Lock()
        self._kept: bool | None = None

    def ask(self, request: Request) -> None:
        """Ask for the range; when it has arrived, it is stored."""
        with self._guard:  # it may be there before it has its name
            self.range = ranges.ranges().announce(request, lambda _: _keep(self))

    def wait(self) -> bool:
        """Return True when the range is in the cache; False if it cannot be.

        Raises StorageError.
        """
        with self._guard:
            if self._kept is None:
                self._kept = False
                self._kept = self._file.keep(self)
            return self._kept

    def drop(self) -> None:
        """Let go of the range."""
        self._kept = bool(self._kept)
        self.claim.abandon()
        self.range.release()


def _keep(coming: _Coming) -> None:
    """Have a thread store a range that has arrived."""
    global _KEEPERS
    if _KEEPERS is None:
        _KEEPERS = SimpleQueue()
        for _ in range(_THREADS):
            threading.Thread(
                target=_store_all, args=(_KEEPERS,), name="shardio-cache", daemon=True
            ).start()
    _KEEPERS.put(coming)


def _store_all(arrived: SimpleQueue[_Coming]) -> None:
    while True:
        with contextlib.suppress(Exception):  # who reads the range is told
            arrived.get().wait()


_KEEPERS: SimpleQueue[_Coming] | None = None
_WARNED = False  # in this process


def _after_fork() -> None:
    global _KEEPERS
    _KEEPERS = None


os.register_at_fork(after_in_child=_after_fork)
