"""One object of a store of which a cache keeps what is read.

How it works. What is announced is asked for in the cache's ranges. Of all processes and threads
that want one, the cache lets one download it (a claim). What has arrived is stored by threads of
their own; who waits for it stores it itself. What the cache turns out not to keep is held until it
is read; after that, and where it keeps nothing, no more is asked for than is needed.

A process that is stopped keeps its claims. Who has waited for one of another process as long as for
a request that fails streams the range, and hardly waits for others' any more, until one comes.
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
from .ranges import Range, ReleasedError
from .remote_file import Ends, RemoteFile, wait
from .stores import Store

_THREADS = 2  # of a process, which write what has arrived: 18 ms for 8 MiB
_OTHERS_S = 0.05  # between two looks at a range that another process downloads
_PASS_BY_S = 5.0  # in which nobody waits anew for a range that was waited for in vain


class CachedRemoteFile(RemoteFile):
    """One object of which a cache keeps what is read. Threads may share it.

    Its descriptor is that of the cache's sparse file, so that native reads work on it: what is not
    there yet reads as zeros, whose checksum is wrong; then `read` is asked, which downloads it.
    What the cache cannot keep is held as by a RemoteFile.
    """

    __slots__ = ("_cached", "_coming", "_local", "_passed_by", "descriptor")

    def __init__(
        self, store: Store, path: str, ends: Ends, known: KnownFile, cached: CachedFile
    ) -> None:
        self._cached = cached
        self._coming: dict[int, _Coming] = {}  # ranges that are downloaded, by number
        self._passed_by: dict[int, float] = {}  # until when ranges are streamed, by number
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
            if number not in self._coming and (
                not self._begin(number, 0.0) or self._is_late(number)
            ):
                first, size = self._cached.layout.byte_range(number)
                first, last = max(start, first), min(stop, first + size)
                super().will_need(first, last - first, keep=keep)
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
            if not self._cached.is_kept():
                return False
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
        global _LATE
        now, waited = time.monotonic(), False
        if now < self._passed_by.get(number, 0.0):
            return False
        end = now + (_OTHERS_S if _LATE else self.store.timeout_s)
        while not self._cached.has(number, number + 1):
            coming = self._coming.get(number)
            if coming is not None:
                waited = False
                if not coming.wait():
                    return False
            elif (now := time.monotonic()) > end:
                _LATE = True
                self._passed_by[number] = now + _PASS_BY_S
                return False
            elif not self._begin(number, _OTHERS_S):
                return False
            else:
                waited = True
        _LATE = _LATE and not waited  # another process has downloaded it
        return True

    def _is_late(self, number: int) -> bool:
        """Return True for a range that another process claimed which may be stopped."""
        return _LATE and number not in self._coming and not self._cached.has(number, number + 1)

    def keep(self, coming: _Coming) -> bool:
        """Keep a range that has arrived. Raises StorageError where it has not."""
        adopted = False
        try:
            coming.claim.store(self.check(wait(coming.range)).data)
        except CacheFull as error:
            self._warn(error)
            adopted = self.descriptor >= 0 and self.adopt(coming.range)
            return False
        except ReleasedError:  # the file was closed meanwhile
            return False
        finally:
            coming.drop(release=not adopted)
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

    def __init__(self, file: CachedRemoteFile, claim: Claim) -> None:
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

    def drop(self, *, release: bool = True) -> None:
        """Give the claim back, and let go of the bytes, unless another one has them."""
        self._kept = bool(self._kept)
        self.claim.abandon()
        if release:
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
# In this process: it was warned; it has waited in vain for what another one claimed.
_WARNED = _LATE = False


def _after_fork() -> None:
    global _KEEPERS
    _KEEPERS = None


os.register_at_fork(after_in_child=_after_fork)
