"""Objects of a store as files: ranges that were announced, and single reads.

How it works. `will_need` asks for a range ahead of use; `read` takes its bytes from the announced
ranges, and asks for what none of them has. A range is let go when all of it was read. Reads that
follow each other read ahead by themselves.

Nothing is listed. An object's size is known from the manifest; every answer is compared with it.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import threading
import weakref
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from ..errors import DamageError, StorageError
from . import ranges
from .client import Reply, Request, RequestError, Store, quote_path
from .ranges import Range

RANGE = 8 << 20  # bytes of one request, at most
# Bytes that a reader in storage order has asked for ahead: twice as many with each read, up to the
# most.
_FIRST_AHEAD, _MOST_AHEAD = 1 << 20, 64 << 20
_NEAR = 8 << 10  # bytes between two reads in order that nobody reads: headers of a tar, of a page


class RemoteLocation:
    """A folder of an object store. It can be pickled."""

    remote = True

    def __init__(self, store: Store) -> None:
        self.store = store
        self.url = store.shown
        self._ends: dict[str, Range] = {}  # of files that will be opened

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteLocation, (self.store,)

    def will_open(self, name: str, size: int, end: int) -> None:
        """Announce that an object of `size` bytes will be opened soon, and its last `end` read."""
        if name not in self._ends:
            self._ends[name] = ranges.ranges().announce(self.end(name, size, end))

    def share(self, consumers: int) -> None:
        """Say how many processes of this machine read from it, this one included."""
        ranges.share(consumers)

    def end(self, name: str, size: int, length: int) -> Request:
        """Return the request for the last bytes of an object."""
        start = max(0, size - length)
        return Request(self.store, name, start, size - start)

    def read_end(self, name: str, size: int, length: int) -> Reply:
        """Read the last bytes of an object, announced or not. Raises as `read`."""
        announced = self._ends.pop(name, None)
        if announced is None or announced.request.length < min(size, length):
            return _read(self.end(name, size, length))
        try:
            return _wait(announced)
        finally:
            announced.release()

    def open(self, name: str, size: int | None = None) -> RemoteFile:
        """Open an object. size: its bytes, where they are known: then nothing is asked yet.

        Raises FileNotFoundError, StorageError.
        """
        return RemoteFile(self, name, size)

    def read(self, name: str, limit: int) -> bytes:
        """Read a small object. Raises as `open`, and DamageError above `limit`."""
        request = Request(self.store, name, 0, limit, "whole")
        reply = _read(request)
        if reply.size > limit:
            raise DamageError(
                f"{request.shown}: {reply.size:,} bytes, more than {limit:,} can be right"
            )
        return bytes(reply.data)

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
        root, query, secret = self.store.url.partition("?")
        return RemoteLocation(
            replace(self.store, url=f"{root.rstrip('/')}/{quote(name)}{query}{secret}")
        )

    def is_network(self) -> bool:
        """Return True: reads leave this machine."""
        return True


class RemoteFile:
    """One object, open for reading by range. Threads may share it."""

    __slots__ = (
        *("__weakref__", "_ahead", "_last", "_location", "_lock", "_name", "_starts"),
        *("_tail", "_there", "name", "size"),
    )
    descriptor = -1

    def __init__(self, location: RemoteLocation, name: str, size: int | None) -> None:
        self._location, self._name = location, name
        self.name = f"{location.url}/{quote_path(name)}"
        self._forget()
        if size is None:
            size = _read(Request(location.store, name, what="head")).size
        self.size = size
        _FILES.add(self)

    def read(self, start: int, length: int) -> bytes:
        """Read exactly `length` bytes from `start`. Raises DamageError if the file ends before."""
        if start + length > self.size:
            raise DamageError(
                f"{self.name}: ends at byte {self.size}, expected {length:,} bytes from byte "
                f"{start}. The file was cut short"
            )
        if not length:
            return b""
        kept, tail = self._tail
        if start >= kept and tail:
            return tail[start - kept : start - kept + length]
        parts, at, stop = [], start, start + length
        while at < stop:
            part = self._part(at, stop)
            parts.append(part)
            at += len(part)
        self._read_ahead(start, stop)
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def read_again(self, start: int, length: int) -> bytes:
        """Read bytes that were damaged when they came, by a request of their own."""
        request = Request(self._location.store, self._name, start, length)
        return bytes(self._check(_read(request)).data)

    def keep_end(self, length: int) -> bool:
        """Read the last `length` bytes by one request, and keep them while the file is open."""
        reply = self._check(self._location.read_end(self._name, self.size, length))
        self._tail = self.size - len(reply.data), bytes(reply.data)
        return True

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
                place = bisect.bisect_right(self._starts, at)
                if place:
                    known = self._there[self._starts[place - 1]]
                    if at < known.stop:
                        at = known.stop
                        continue
                end = min(stop, at + RANGE)
                if place < len(self._starts):
                    end = min(end, self._starts[place])
                request = Request(self._location.store, self._name, at, end - at)
                self._starts.insert(place, at)
                wanted = ranges.ranges().announce(request)
                self._there[at] = _Announced(at, end, wanted, keep)
            if keep:
                wanted.keep()
            at = end

    def scattered(self) -> None:
        """Say that reads will be in no order: nothing is read ahead."""
        self._ahead = -1

    def close(self) -> None:
        """Let go of what was announced."""
        for announced in self._there.values():
            announced.range.release()
        self._starts.clear()
        self._there.clear()

    def __del__(self) -> None:
        if hasattr(self, "_there"):
            self.close()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []  # of the announced ranges, ascending; they do not overlap
        self._there: dict[int, _Announced] = {}
        self._tail = 1 << 62, b""  # where the end that is kept begins, and its bytes
        self._last, self._ahead = -1, 0  # where the last read ended; bytes that are asked for ahead

    def _part(self, start: int, stop: int) -> Any:
        """Read from `start`, up to `stop` or to where an announced range begins or ends."""
        with self._lock:
            place = bisect.bisect_right(self._starts, start)
            announced = self._there[self._starts[place - 1]] if place else None
            if announced is None or start >= announced.stop:
                announced = None
                if place < len(self._starts):
                    stop = min(stop, self._starts[place])
        if announced is None:
            stop = min(stop, start + RANGE)
            request = Request(self._location.store, self._name, start, stop - start)
            return self._check(_read(request)).data
        stop = min(stop, announced.stop)
        data = self._check(_wait(announced.range)).data[
            start - announced.start : stop - announced.start
        ]
        with self._lock:
            announced.unread -= 0 if announced.keep else stop - start
            if announced.unread <= 0 and self._there.get(announced.start) is announced:
                del self._there[announced.start]
                self._starts.remove(announced.start)
                announced.range.release()
        return data

    def _check(self, reply: Reply) -> Reply:
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
        if self._ahead < 0:
            return
        # Other formats have gaps that nobody reads; heads of records are no reading in order.
        follows = 0 <= self._last <= start <= self._last + min(_NEAR, stop - start)
        self._ahead = min(_MOST_AHEAD, max(_FIRST_AHEAD, 2 * self._ahead)) if follows else 0
        self._last = stop
        if self._ahead:
            self._pass_by(start)
            self.will_need(stop, self._ahead)

    def _pass_by(self, start: int) -> None:
        """Let go of announced ranges that end before `start`, of which not all was read."""
        with self._lock:
            while self._starts and not (first := self._there[self._starts[0]]).keep:
                if first.stop > start:
                    return
                del self._starts[0], self._there[first.start]
                first.range.release()


class _Announced:
    """An announced range [start, stop) of a file."""

    __slots__ = ("keep", "range", "start", "stop", "unread")

    def __init__(self, start: int, stop: int, wanted: Range, keep: bool) -> None:
        self.start, self.stop, self.range, self.keep = start, stop, wanted, keep
        self.unread = stop - start  # bytes


def _read(request: Request) -> Reply:
    """Read one range, or object, now. Raises FileNotFoundError, DamageError, StorageError."""
    wanted = ranges.ranges().want(request)
    try:
        return _wait(wanted)
    finally:
        wanted.release()


def _wait(wanted: Range) -> Reply:
    """Wait for the bytes of a range. Raises FileNotFoundError, DamageError, StorageError."""
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


def _after_fork() -> None:
    for file in list(_FILES):
        file._there = {}  # what the parent asked for is the parent's
        file._forget()


os.register_at_fork(after_in_child=_after_fork)
