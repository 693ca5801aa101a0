"""Bytes at rest: named files that are read by byte range. Nothing here knows samples or shards.

A `Location` is a place (a directory, a bucket's folder) and a `File` an immutable object in it.
Files are opened after a fork, never inherited: a Location can be pickled, a File cannot.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple, Protocol

from ..errors import printable

# Finds the seal in the last SEAL_BYTES of a file: group 1 is the SHA-256, in hex, of all before it.
Seal = re.Pattern[bytes] | None
SEAL_BYTES = 128


def is_right(data: bytes, seal: re.Pattern[bytes]) -> bool:
    """Return True if a file has a seal, and the right one."""
    stated = seal.search(data, max(0, len(data) - SEAL_BYTES))
    if stated is None:
        return False
    return hashlib.sha256(memoryview(data)[: stated.start()]).hexdigest() == stated[1].decode()


class KnownFile(NamedTuple):
    """Say what a manifest knows of a shard's file."""

    size: int  # bytes
    sha256: bytes  # of the file, 32 bytes; b"" where it is not known, and a cache keeps nothing
    dataset_id: bytes  # 16 bytes
    shard: int  # its number


class File(Protocol):
    """One immutable file, open for reading by byte range."""

    __slots__ = ()
    size: int  # bytes

    @property
    def name(self) -> str:
        """Return the name of the file, as messages print it."""

    @property
    def descriptor(self) -> int:
        """Return the system's descriptor, for native reads; -1: closed, or there is none."""

    def read(self, start: int, length: int) -> bytes:
        """Read exactly `length` bytes from `start`. Raises DamageError if the file ends before."""

    def view(self, start: int, length: int) -> bytes | memoryview:
        """Read as `read` does, without a copy where the bytes are in memory already."""
        return self.read(start, length)

    def read_again(self, start: int, length: int) -> bytes:
        """Read bytes that were damaged when they came, past all that is kept here. As `read`."""
        return self.read(start, length)

    def sha256(self) -> bytes:
        """Return the SHA-256 of the whole file, 32 bytes."""

    def will_need(self, start: int, length: int, *, keep: bool = False) -> None:
        """Announce a range that will be read soon: a hint, which may do nothing.

        keep: a remote file holds the range until it is closed, and not just until it is read.
        """

    def keep_end(self, length: int) -> bool:
        """Read the last bytes at once where each read is a round trip; keep them while it is open.

        Returns False where reads are cheap: nothing is read then.
        """
        return False

    def forget_end(self) -> None:
        """Keep no longer what `keep_end` read."""
        return  # where nothing is kept

    def scattered(self) -> None:
        """Say that reads will be in no order: the system is not to read ahead by itself."""

    def close(self) -> None:
        """Give the descriptor back; closing twice does no harm."""


def path_in(location: Location, name: str) -> str:
    """Return the path or URL of a file in a place, as messages print it."""
    return printable(f"{location.url.rstrip('/')}/{name}", 4096)


class Location:
    """A place that holds files by name: the base class. What announces reads may do nothing."""

    url: str  # as the user gave it, for messages; without secrets
    remote: bool = False  # an object store: every read is a request, or from its cache

    def open(self, name: str, known: KnownFile | None = None) -> File:
        """Open a file. Where it is known what file it is, none of it may be read yet.

        Raises FileNotFoundError, StorageError, as the first read may then.
        """
        raise NotImplementedError

    def sweep(self, name: str) -> File:
        """Open a file that is read once, nearly from front to back, and hashed. As `open`."""
        return self.open(name)

    def will_open(self, name: str, known: KnownFile, end: int) -> None:
        """Announce that a file will be opened soon, and its last `end` bytes read."""

    def distrust_end(self, known: KnownFile, end: int) -> None:
        """Keep the last `end` bytes of a file no longer: they are damaged."""

    def let_go(self) -> None:
        """Let go of what was announced and not read: a pass has ended."""

    def share(self, consumers: int) -> None:
        """Say how many processes of this machine read from it, this one included."""

    def below(self, name: str) -> Location:
        """Return the folder of this name in it."""
        raise NotImplementedError

    def read(self, name: str, limit: int, *, seal: Seal = None) -> bytes:
        """Read a small file. seal: it has one, which is compared where a network may damage it.

        Raises FileNotFoundError, StorageError, DamageError above `limit`.
        """
        raise NotImplementedError

    def exists(self, name: str) -> bool:
        """Return True if a file or folder of this name is there."""
        raise NotImplementedError

    def is_network(self) -> bool:
        """Return True if reads leave this machine, so that its page cache cannot be trusted."""
        return False
