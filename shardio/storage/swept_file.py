"""An object that is read once, nearly from front to back, and hashed on the way.

How it works. Whole ranges of 8 MiB are read, those that follow are asked for ahead, and some are
held: reads are small, go back a little, and begin at the end where a format has its table there. A
range is hashed when all before it were. So each byte is downloaded once, also for the SHA-256,
unless reads jump about in more than is held.

All answers must be of one object: one that was replaced meanwhile is an error.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

from ..errors import DamageError
from .client import Reply
from .listing import plain_tag
from .remote_file import RANGE, Ends, RemoteFile
from .stores import Store

_AHEAD_BYTES = 64 << 20  # bytes that are asked for ahead, as far as the process's part has room
_HELD_RANGES = 8  # ranges


class SweptFile(RemoteFile):
    """An object that is read once, nearly from front to back. One thread reads it."""

    __slots__ = ("_done", "_held", "_seal", "_tag")

    def __init__(self, store: Store, path: str, ends: Ends) -> None:
        """Raise FileNotFoundError, StorageError."""
        self._tag = ""
        super().__init__(store, path, ends, None)
        self.scattered()  # what is asked for ahead is decided here
        self._held: OrderedDict[int, Any] = OrderedDict()  # by number; the last used at the end
        self._seal, self._done = hashlib.sha256(), 0  # ranges that are hashed

    def read(self, start: int, length: int) -> bytes:
        """Read exactly `length` bytes from `start`. Raises DamageError if the file ends before."""
        return bytes(self.view(start, length))

    def view(self, start: int, length: int) -> bytes | memoryview:
        """Read as `read` does, without a copy of what lies in one range."""
        if not length or start + length > self.size:
            return super().view(start, length)  # says so
        parts = []
        at, stop = start, start + length
        while at < stop:
            number, offset = divmod(at, RANGE)
            parts.append(self._range(number)[offset : offset + stop - at])
            at += len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def sha256(self) -> bytes:
        """Return the SHA-256 of the whole object, 32 bytes."""
        while self._done * RANGE < self.size:
            self._range(self._done)
        return self._seal.digest()

    def check(self, reply: Reply) -> Reply:
        """Compare what an answer says of the object with the answers before."""
        tag = plain_tag(reply.tag)
        if reply.size != getattr(self, "size", reply.size) or (self._tag and tag != self._tag):
            raise DamageError(
                f"{self.name}: was replaced by another object while it was read. Run it again"
            )
        self._tag = tag
        return reply

    def close(self) -> None:
        """Let go of all that is held."""
        self._held.clear()
        super().close()

    def _range(self, number: int) -> memoryview:
        """Return a range, held or read."""
        data = self._held.get(number)
        if data is None:
            start = number * RANGE
            self.will_need(start, RANGE + _AHEAD_BYTES)
            data = memoryview(super().view(start, min(RANGE, self.size - start)))
            self._held[number] = data
            while (hashed := self._held.get(self._done)) is not None:
                self._seal.update(hashed)
                self._done += 1
            if len(self._held) > _HELD_RANGES:  # drop one that is hashed, if there is one
                done = (held for held in self._held if held < self._done)
                del self._held[next(done, next(iter(self._held)))]
        self._held.move_to_end(number)
        return data
