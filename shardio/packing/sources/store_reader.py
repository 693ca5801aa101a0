"""Objects of a store that are packed: each answer is compared with what was listed.

Two ways to read one. Files and members are announced before they are read, in any order, each by
ranges of its own (`AheadReader`). Headers are read front to back, with gaps (`ListedFile`): as far
ahead as the run of reads is long. So what is small is read through by large ranges, and what is
large is passed over.
"""

from __future__ import annotations

import hashlib
from collections import deque

from ...errors import DamageError, SourceError
from ...names import key_bytes
from ...storage import ranges
from ...storage.base import KnownFile
from ...storage.client import Reply, Request
from ...storage.listing import ObjectEntry as Object
from ...storage.listing import plain_tag
from ...storage.ranges import Range, ReleasedError
from ...storage.remote import RemoteLocation
from ...storage.remote_file import RANGE, RemoteFile, read, wait
from ...storage.stores import Store
from .files import changed

# Of headers. Bytes that are read at least; that are read rather than passed over: what a connection
# brings in the 20 to 50 ms of a request; that are asked for ahead at most, in how many requests.
_LEAST = 16 << 10
_PASSED = 1 << 20
_FIRST_AHEAD, _MOST_AHEAD, _AT_ONCE = 128 << 10, 64 << 20, 8
_PAGE = 1 << 20  # bytes that are read of the web, to see whether it gives a page in place of a file


def stamp_of(one: Object) -> int:
    """Return a number that changes with the content of an object: odd if it is of its ETag.

    Without one, the time is taken; and of other stores than the Hub, answers have the same ETag.
    """
    if not one.tag:
        return one.mtime_ns & ~1
    digest = hashlib.blake2b(one.tag.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) | 1


def stamp_of_reply(reply: Reply) -> int:
    """Return the same number of an answer; 0 where it has no tag."""
    return stamp_of(Object("", 0, 0, plain_tag(reply.tag)))


def check_reply(store: Store, reply: Reply, shown: bytes, size: int, stamp: int) -> None:
    """Raise SourceChangedError where an answer is of another object than was listed."""
    found = 0 if store.scheme == "hf" else stamp_of_reply(reply)
    if reply.size != size:
        raise changed(shown, "its size is another")
    if found and stamp & 1 and found != stamp:
        web = store.scheme in ("http", "https")
        raise changed(shown, f"its ETag{', or time of change,' if web else ''} is another")


class AheadReader:
    """Ranges of objects of a store, each asked for before it is read, and read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._announced: dict[tuple[str, int, int], deque[list[Range]]] = {}

    def ask(self, name: str, start: int, length: int) -> list[Range]:
        """Ask for some bytes of an object; without any, for what it is."""
        asked = [
            Request(self._store, name, at, min(RANGE, start + length - at))
            for at in range(start, start + length, RANGE)
        ] or [Request(self._store, name, what="head")]
        return [ranges.ranges().announce(one) for one in asked]

    def will_need(self, name: str, start: int, length: int) -> None:
        """Announce that these bytes will be read."""
        asked = self.ask(name, start, length)
        self._announced.setdefault((name, start, length), deque()).append(asked)

    def read(
        self, name: str, start: int, length: int, *, shown: bytes, size: int, stamp: int
    ) -> bytes:
        """Return bytes of an object that was listed so. Raises SourceChangedError, StorageError."""
        key = name, start, length
        announced = self._announced.get(key)
        asked = announced.popleft() if announced else self.ask(*key)
        if not announced:
            self._announced.pop(key, None)
        try:
            replies = [self.wait(one) for one in asked]
        except FileNotFoundError:
            raise changed(shown, "it is gone") from None
        except DamageError:
            raise changed(shown, "it is shorter") from None
        finally:
            let_go(asked)
        for reply in replies:
            check_reply(self._store, reply, shown, size, stamp)
        if len(replies) == 1:
            return bytes(replies[0].data)
        return b"".join(reply.data for reply in replies)

    def let_go(self) -> None:
        """Let go of what was announced and not read."""
        for of_one in self._announced.values():
            for asked in of_one:
                let_go(asked)
        self._announced.clear()

    @staticmethod
    def wait(one: Range) -> Reply:
        """Wait for an answer, also where it was let go of. Raises FileNotFoundError and others."""
        try:
            return wait(one)
        except ReleasedError:
            return read(one.request)


def let_go(asked: list[Range]) -> None:
    """Let go of ranges, read or not."""
    for one in asked:
        one.release()


class StoredObject:
    """An object as it was listed: the place of an archive. Forked workers inherit it."""

    def __init__(self, location: RemoteLocation, name: str, size: int, stamp: int) -> None:
        self.location, self.name, self.size, self.stamp = location, name, size, stamp
        self.shown = location.store.show(name)

    def open(self, name: str) -> ListedFile:
        """Open it; nothing is asked yet."""
        return ListedFile(self)


class ListedFile(RemoteFile):
    """An object that was listed, open for reading: its headers in order, or then its members."""

    __slots__ = ("_edge", "_held", "_object", "_reader", "_run")

    def __init__(self, of: StoredObject) -> None:
        self._object = of
        self._reader: AheadReader | None = None  # of members
        self._held = 0, b""  # bytes that were read last, and where they begin
        self._run = self._edge = 0  # where the reads in order began; what is asked for ends
        known = KnownFile(of.size, b"", b"", 0)
        super().__init__(of.location.store, of.name, of.location.ends, known)

    def read(self, start: int, length: int) -> bytes:
        """Read exactly `length` bytes from `start`. Raises DamageError, SourceChangedError."""
        of = self._object
        base, held = self._held
        if not length or start + length > self.size:
            return super().read(start, length)  # says so
        if self._reader is not None:
            return self._reader.read(
                of.name, start, length, shown=self._shown, size=of.size, stamp=of.stamp
            )
        data = held[start - base : start - base + length] if start >= base else b""
        at = start + len(data)
        if len(data) < length:
            try:
                data += super().read(at, min(max(start + length - at, _LEAST), self.size - at))
            except DamageError:
                raise changed(self._shown, "it is shorter") from None
            self._held = start, data
        return data[:length]

    def will_need(self, start: int, length: int, *, keep: bool = False) -> None:
        """Announce a range: of a member, if it was said that these are read."""
        if self._reader is None:
            super().will_need(start, length, keep=keep)
        elif length:
            self._reader.will_need(self._object.name, start, length)

    def scattered(self) -> None:
        """Say that members are read from now on, in no order."""
        if self._reader is None:
            self._reader = AheadReader(self.store)

    def forget(self) -> None:
        """Forget what was announced: it is a parent's."""
        super().forget()
        if self._reader is not None:
            self._reader = AheadReader(self.store)

    def close(self) -> None:
        """Let go of what was announced."""
        if self._reader is not None:
            self._reader.let_go()
        super().close()

    def miss(self, start: int, length: int) -> None:
        """Raise SourceChangedError: it was there when it was listed."""
        raise changed(self._shown, "it is gone") from None

    def check(self, reply: Reply) -> Reply:
        """Compare an answer with what was listed. Raises SourceChangedError."""
        check_reply(self.store, reply, self._shown, self._object.size, self._object.stamp)
        return reply

    @property
    def _shown(self) -> bytes:
        return key_bytes(self.name)

    def _read_ahead(self, start: int, stop: int) -> None:
        """Ask for as much as the reads in order came to, by whole ranges."""
        if not 0 <= self._last <= start <= max(self._last + _PASSED, self._edge):
            self.let_go()
            self._run = self._edge = start
        self._last = stop
        ahead = min(_MOST_AHEAD, max(_FIRST_AHEAD, stop - self._run))
        if self._run == start or self._edge - stop > ahead // 2:
            return
        self._pass_by(start)
        self._edge = max(self._edge, stop)
        step = min(RANGE, max(_FIRST_AHEAD, ahead // _AT_ONCE))
        while self._edge < min(stop + ahead, self.size):
            self.will_need(self._edge, step)
            self._edge += step


def look_at(location: RemoteLocation, name: str) -> StoredObject:
    """Return an archive as it is now. Raises FileNotFoundError, SourceError, StorageError.

    The web is asked for all of it, which is read up to the size of a page: what makes pages knows
    no ranges, and a signed URL may be for GET alone.
    """
    store, web = location.store, location.store.scheme in ("http", "https")
    reply = read(
        Request(store, name, 0, _PAGE, "whole") if web else Request(store, name, what="head")
    )
    refuse_page(reply.data, store.show(name))
    return StoredObject(location, name, reply.size, stamp_of_reply(reply))


def refuse_page(data: bytes | memoryview, shown: str) -> None:
    """Raise SourceError for what is a page of the web, and no archive."""
    if bytes(data[:64]).lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        raise SourceError(
            f"{shown}: it is a page of HTML, and no archive. Look at it in a browser: the server "
            "may ask for a login, or give the archive by another URL"
        )
