"""One object of a store as a file: ranges that were announced, and single reads.

How it works. `will_need` asks for a range ahead of use; `read` takes its bytes from the announced
ranges, and asks for what none of them has. A range is let go when all of it was read. Reads that
follow each other read ahead by themselves.

An object's size is known from the manifest; every answer is compared with it. An object that is not
there raises FileNotFoundError, as opening it would have, unless something was read of it before.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import operator
import os
import threading
import weakref
from typing import Any

from ..errors import DamageError, ShardioError, StorageError
from . import ranges
from .base import KnownFile
from .client import Reply, Request, RequestError
from .ranges import Range, ReleasedError
from .stores import Store

RANGE = 8 << 20  # bytes of one request, at most
# Bytes that a reader in storage order has asked for ahead: twice as many with each read, up to the
# most.
_FIRST_AHEAD, _MOST_AHEAD = 1 << 20, 64 << 20
_NEAR = 8 << 10  # bytes between two reads in order that nobody reads: headers of a tar, of a page


class Ends:
    """The last bytes of objects that will be opened soon, asked for ahead: several at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.files: weakref.WeakSet[RemoteFile] = weakref.WeakSet()  # that were opened
        self.forget()
        _ENDS.add(self)

    def forget(self) -> None:
        """Forget what was announced: it is a parent's."""
        self._announced: dict[str, Range] = {}  # by path

    def announce(self, path: str, size: int, length: int) -> None:
        """Ask for the last `length` bytes of an object of `size` bytes."""
        if path not in self._announced:
            self._announced[path] = ranges.ranges().announce(self.request(path, size, length))

    def request(self, path: str, size: int, length: int) -> Request:
        """Return the request for the last bytes of an object."""
        start = max(0, size - length)
        return Request(self._store, path, start, size - start)

    def read(self, path: str, size: int, length: int) -> Reply:
        """Read the last bytes of an object, announced or not."""
        announced = self._announced.pop(path, None)
        if announced is None or announced.request.length < min(size, length):
            return read(self.request(path, size, length))
        try:
            return wait(announced)
        except ReleasedError:
            return read(self.request(path, size, length))
        finally:
            announced.release()

    def let_go(self) -> None:
        """Let go of what was announced and not read, also of what files have announced."""
        self._announced = {}  # and with the last reference, of the ranges
        for file in list(self.files):
            file.let_go()


class RemoteFile:
    """One object, open for reading by range. Threads may share it."""

    __slots__ = (
        *("__weakref__", "_ahead_bytes", "_announced", "_ends", "_last", "_lock"),
        *("_tail", "found", "name", "path", "size", "store"),
    )
    descriptor = -1

    def __init__(self, store: Store, path: str, ends: Ends, known: KnownFile | None) -> None:
        self.store, self.path, self._ends = store, path, ends
        request = Request(store, path, what="head")
        self.name = request.shown
        self.forget()
        self.found = known is None  # something was read of it
        self.size = read(request).size if known is None else known.size
        _FILES.add(self)
        ends.files.add(self)

    def read(self, start: int, length: int) -> bytes:
        """Read exactly `length` bytes from `start`. Raises DamageError if the file ends before."""
        return bytes(self._view(start, length))

    def view(self, start: int, length: int) -> bytes | memoryview:
        """Read as `read` does, without a copy of bytes that are of one announced range."""
        return self._view(start, length)

    def _view(self, start: int, length: int) -> bytes | memoryview:
        if start + length > self.size:
            raise DamageError(
                f"{self.name}: ends at byte {self.size}, expected {length:,} bytes from byte "
                f"{start}. The file was cut short"
            )
        if not length:
            return b""
        kept, tail = self._tail
        stop = start + length
        if start >= kept:
            return tail[start - kept : stop - kept]
        parts: list[bytes | memoryview] = []
        at, wanted = start, min(stop, kept)
        try:
            while at < wanted:
                part = self._part(at, wanted)
                parts.append(part)
                at += len(part)
        except FileNotFoundError:
            self.miss(start, length)
            raise
        if stop > kept:
            parts.append(tail[: stop - kept])
        self.found = True
        self._read_ahead(start, stop)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_again(self, start: int, length: int) -> bytes:
        """Read bytes that were damaged when they came, by a request of their own."""
        request = Request(self.store, self.path, start, length)
        try:
            return bytes(self.check(read(request)).data)
        except FileNotFoundError:
            self.miss(start, length)
            raise

    def miss(self, start: int, length: int) -> None:
        """Raise StorageError if the store denies an object of which something was read before."""
        if self.found:
            raise StorageError(
                f"{self.name}: cannot read bytes {start}-{start + length - 1}: it is not there any "
                "more, although it was when it was opened. Restore it; datasets in use must not be "
                "removed"
            ) from None

    def keep_end(self, length: int) -> bool:
        """Read the last `length` bytes by one request, and keep them while the file is open."""
        reply = self.check(self._ends.read(self.path, self.size, length))
        self._tail = self.size - len(reply.data), bytes(reply.data)
        self.found = True
        return True

    def forget_end(self) -> None:
        """Keep no longer what `keep_end` read."""
        self._tail = 1 << 62, b""  # where the end that is kept begins, and its bytes

    def sha256(self) -> bytes:
        """Return the SHA-256 of the whole object, 32 bytes."""
        seal = hashlib.sha256()
        for start in range(0, self.size, RANGE):
            self.will_need(start + RANGE, 4 * RANGE)
            seal.update(self.read(start, min(RANGE, self.size - start)))
        return seal.digest()

    def will_need(self, start: int, length: int, *, keep: bool = False) -> None:
        """Ask for a range that will be read soon, as far as it was not asked for yet."""
        at, stop = max(start, 0), min(start + length, self.size, self._tail[0])
        while at < stop:
            with self._lock:
                place = self._place(at)
                if place and at < self._announced[place - 1].stop:
                    at = self._announced[place - 1].stop
                    continue
                end = min(stop, at + RANGE)
                if place < len(self._announced):
                    end = min(end, self._announced[place].start)
                wanted = ranges.ranges().announce(Request(self.store, self.path, at, end - at))
                self._announced.insert(place, _Announced(at, end, wanted, keep))
            if keep:
                wanted.keep()
            at = end

    def adopt(self, arrived: Range) -> bool:
        """Take over a range that has arrived, as if it had been announced.

        Returns False if a part of it was announced already.
        """
        start = arrived.request.start
        stop = start + arrived.request.length
        with self._lock:
            place = self._place(start)
            before, behind = self._announced[:place], self._announced[place:]
            if (before and before[-1].stop > start) or (behind and behind[0].start < stop):
                return False
            self._announced.insert(place, _Announced(start, stop, arrived, keep=False))
        return True

    def scattered(self) -> None:
        """Say that reads will be in no order: nothing is read ahead."""
        self._ahead_bytes = -1

    def let_go(self) -> None:
        """Let go of what was announced and not read, but for what is kept: a pass has ended.

        Called by the collector, perhaps: while the lock is taken, nothing is done.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._drop([one for one in self._announced if not one.keep])
            finally:
                self._lock.release()

    def close(self) -> None:
        """Let go of what was announced."""
        with self._lock:
            ended = self._announced[:]
            self._drop(ended)
        for one in ended:
            one.range.release()

    def _drop(self, announced: list[_Announced]) -> None:
        """Forget announced ranges. With the last reference to it, a range is let go of."""
        for one in announced:
            with contextlib.suppress(ValueError):  # another thread was faster
                self._announced.remove(one)

    def _place(self, at: int) -> int:
        """Return how many announced ranges begin at a byte, or before. The lock is held."""
        return bisect.bisect_right(self._announced, at, key=operator.attrgetter("start"))

    def forget(self) -> None:
        """Forget what was announced, without letting go of it: it is a parent's."""
        self._lock = threading.Lock()
        self._announced: list[_Announced] = []  # ascending; they do not overlap
        self.forget_end()
        self._last, self._ahead_bytes = (
            -1,
            0,
        )  # where the last read ended; bytes that are asked for ahead

    def _part(self, start: int, stop: int) -> Any:
        """Read from `start`, up to `stop` or to where an announced range begins or ends."""
        with self._lock:
            place = self._place(start)
            announced = self._announced[place - 1] if place else None
            if announced is None or start >= announced.stop:
                announced = None
                if place < len(self._announced):
                    stop = min(stop, self._announced[place].start)
        if announced is None:
            stop = min(stop, start + RANGE)
            request = Request(self.store, self.path, start, stop - start)
            return self.check(read(request)).data
        stop = min(stop, announced.stop)
        try:
            data = self.check(wait(announced.range)).data
        except ReleasedError:  # by another thread, which has read all of it, or closed the file
            with self._lock:
                self._drop([announced])
            return self._part(start, stop)
        except (ShardioError, FileNotFoundError):
            with self._lock:
                self._drop([announced])  # the next read is to ask anew
            announced.range.release()
            raise
        with self._lock:
            announced.unread -= 0 if announced.keep else stop - start
            done = announced.unread <= 0
            if done:
                self._drop([announced])
        if done:
            announced.range.release()
        return data[start - announced.start : stop - announced.start]

    def check(self, reply: Reply) -> Reply:
        """Compare what an answer says of the object with what is known of it."""
        known = getattr(self, "size", reply.size)
        if reply.size != known:
            raise DamageError(
                f"{self.name}: is {reply.size:,} bytes long, but the manifest says {known:,}. The "
                "file is not the one that was packed"
            )
        return reply

    def _read_ahead(self, start: int, stop: int) -> None:
        """Ask for what follows, where reads follow each other."""
        if self._ahead_bytes < 0:
            return
        # Other formats have gaps that nobody reads; heads of records are no reading in order.
        follows = 0 <= self._last <= start <= self._last + min(_NEAR, stop - start)
        self._ahead_bytes = (
            min(_MOST_AHEAD, max(_FIRST_AHEAD, 2 * self._ahead_bytes)) if follows else 0
        )
        self._last = stop
        if self._ahead_bytes:
            self._pass_by(start)
            self.will_need(stop, self._ahead_bytes)

    def _pass_by(self, start: int) -> None:
        """Let go of announced ranges that end before `start`, of which not all was read."""
        with self._lock:
            while self._announced and not (first := self._announced[0]).keep:
                if first.stop > start:
                    return
                del self._announced[0]
                first.range.release()


class _Announced:
    """An announced range [start, stop) of a file."""

    __slots__ = ("keep", "range", "start", "stop", "unread")

    def __init__(self, start: int, stop: int, wanted: Range, keep: bool) -> None:
        self.start, self.stop, self.range, self.keep = start, stop, wanted, keep
        self.unread = stop - start  # bytes


def read(request: Request) -> Reply:
    """Read one range, or object, now. Raises FileNotFoundError, DamageError, StorageError."""
    while True:
        wanted = ranges.ranges().want(request)
        try:
            return wait(wanted)
        except ReleasedError:  # `ranges.close` has ended all that was under way
            continue
        finally:
            wanted.release()


def wait(wanted: Range) -> Reply:
    """Wait for the bytes of a range.

    Raises FileNotFoundError, DamageError, StorageError; ReleasedError, where others let go of it.
    """
    request = wanted.request
    try:
        return wanted.wait()
    except StorageError as error:
        if isinstance(error.__cause__, RequestError):
            if error.__cause__.kind == "missing":
                raise FileNotFoundError(request.shown) from None
            if error.__cause__.kind == "short":
                raise DamageError(
                    f"{request.shown}: ends before byte {request.start + request.length}. The file "
                    "was cut short"
                ) from None
        raise


_FILES: weakref.WeakSet[RemoteFile] = weakref.WeakSet()
_ENDS: weakref.WeakSet[Ends] = weakref.WeakSet()


def _after_fork() -> None:
    for file in list(_FILES):  # what the parent asked for is the parent's
        file.forget()
    for ends in list(_ENDS):
        ends.forget()


os.register_at_fork(after_in_child=_after_fork)
