"""Objects written to a store: whole and checked, or not at all.

How it works. The process that holds the client reads the content itself, piece by piece, and hashes
it on the way: from bytes, a file of this machine, or an object of a store. Pieces become the parts
of a multipart upload. When the hash is not the expected one, the upload is dropped before it is
completed, so that nobody ever sees the object. The hash is noted with the object, and says later
that it is there, without another reading of it.

A put may be sent again: it writes the same bytes. A file that is finished can so be put while
others are still being written.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from ..errors import DamageError
from . import local

ReadRange = Callable[[Any, str, int, int], memoryview]  # of a store, path, first byte, length

PIECE = 8 << 20  # bytes that are read at a time; of a part of an upload, at least
MOST_PARTS = 9_000  # S3 takes 10,000
DIFFERS = (
    "The file differs from what was packed, and was not copied. `shardio repair` saves the rest; "
    "where all that is damaged was dropped, `shardio compact` writes the others anew"
)
_READERS = 3  # pieces of an object of another store that are read at once


class Upload(NamedTuple):
    """Say what an object is to hold. It can be pickled.

    content  bytes; the path of a file; or a Store and the path of an object in it
    size     bytes
    sha256   of the content, 32 bytes
    name     of the content, as messages print it
    """

    content: bytes | str | tuple[Any, str]
    size: int
    sha256: bytes
    name: str

    @property
    def part_bytes(self) -> int:
        """Return the bytes of each part."""
        return max(PIECE, -(-self.size // MOST_PARTS))

    def pieces(self, read: ReadRange) -> Generator[bytes, None, None]:
        """Yield the content, and raise DamageError behind its last byte where it is another one.

        read: reads a range of an object of a store. Raises as it does, and StorageError.
        """
        seal, size = hashlib.sha256(), 0
        with contextlib.closing(self._read(read)) as found:
            for piece in found:
                seal.update(piece)
                size += len(piece)
                yield bytes(piece)
        if (size, seal.digest()) != (self.size, self.sha256):
            raise DamageError(
                f"{self.name}: its SHA-256 is {seal.hexdigest()}, expected {self.sha256.hex()}. "
                f"{DIFFERS}"
            )

    def _read(self, read: ReadRange) -> Generator[bytes | memoryview, None, None]:
        if isinstance(self.content, bytes):
            yield self.content
        elif isinstance(self.content, str):
            try:
                opened = local.open_file(self.content, self.name)
            except FileNotFoundError:
                raise DamageError(f"{self.name}: it is not there, and is to be copied") from None
            with contextlib.closing(opened) as file:
                for start in range(0, file.size, PIECE):
                    yield file.read(start, min(PIECE, file.size - start))
        else:
            yield from _ranges(read, *self.content, self.size)


def _ranges(read: ReadRange, store: Any, path: str, size: int) -> Generator[memoryview, None, None]:
    """Yield the ranges of an object, of which the next ones are read ahead.

    In threads: whoever takes the pieces may be a thread of the client, which may not call it.
    """
    coming: deque[Future[memoryview]] = deque()
    pool = ThreadPoolExecutor(_READERS, "shardio-upload")
    try:
        for start in range(0, size, PIECE):
            coming.append(pool.submit(read, store, path, start, min(PIECE, size - start)))
            if len(coming) == _READERS:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
