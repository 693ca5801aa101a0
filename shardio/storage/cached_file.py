"""One shard in the cache: which of its ranges are there, and who downloads the others.

How it works. `claim` gives a range to one of all threads and processes that want it. It is a lock
of the kernel on the bytes of the range's slot, so it ends with its holder, however that dies. The
others find the range there afterwards, or take over. A range is written first, then its slot by
one aligned write: after a kill -9 between the two, the range is absent. No lock is needed to be
right: without one (a file system that has none) a range is downloaded twice, and the same bytes
are written twice.

Locks are of an open file description (F_OFD_SETLK). Record locks (F_SETLK), taken where the system
has no others, end when this process closes any descriptor of the file; then a range is downloaded
twice, too.

A shared lock on the header says that a process has the file open: it is not evicted then.

Source: fcntl(2), "Open file description locks".
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Protocol

from ..errors import OptionError, StorageError, printable
from .cache_layout import (
    ABSENT,
    HEADER_BYTES,
    PRESENT,
    SLOT_BYTES,
    Layout,
    Slot,
    checksum,
    unpack,
    unpack_slot,
)
from .local import write_at

SHARED, EXCLUSIVE, FREE = fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK

_SET_LOCK: int = getattr(fcntl, "F_OFD_SETLK", fcntl.F_SETLK)
_BUSY = (errno.EAGAIN, errno.EACCES)
_SHORTEST_S, _LONGEST_S = 0.001, 0.02  # between two looks at another's claim; a download takes more
_DISTRUST_S = 1.0  # who holds the slot for longer downloads the range anew, which is as good


class CacheFull(StorageError):
    """Report that a range cannot be kept: its bytes are to be used, and not to be stored."""


class CacheSpace(Protocol):
    """What a cache has left: a CacheDirectory."""

    def reserve(self, needed: int) -> None:
        """Make room for so many bytes that will be written now. Raises CacheFull."""

    def check(self) -> None:
        """Raise CacheFull if nothing could be kept a moment ago."""

    def note_full(self, error: CacheFull) -> None:
        """Note that nothing can be kept now."""


class CachedFile:
    """A shard in the cache, open; `CacheDirectory.open` makes it. All threads may use it.

    descriptor  the system's, for reading only; offsets are those of the shard. It stays valid when
                the file is evicted or removed. -1: nothing is there and nothing can be stored
    name        the path, as messages print it

    In a forked child it reads on, and claims of its parent are not the child's.
    """

    def __init__(
        self,
        path: str,
        layout: Layout,
        descriptor: int,
        *,
        space: CacheSpace | None,
        problem: str = "",
    ) -> None:
        """Take over an open descriptor.

        space    gives room for what is stored; None: the cache is read-only
        problem  why nothing can be stored, where the descriptor is -1
        """
        self.layout, self.descriptor, self.name = layout, descriptor, printable(path, 4096)
        self._path, self._space, self._problem = path, space, problem
        self._trusted = bytearray(layout.ranges)  # 1: there, and its bytes were compared
        self._bad: set[int] = set()  # not to be used again, whatever the slot says
        self._guard = threading.RLock()  # a claim may be collected while its thread holds it
        self._writer = -1  # open while a claim of this process is, or a write
        self._writes = 0
        self._claimed: set[int] = set()
        _open.add(self)

    # --- what is there ----------------------------------------------------------------------------

    def has(self, first: int, stop: int) -> bool:
        """Return True if the ranges [first, stop) are there, and may be read.

        Each range that nobody compared with its checksum since this machine started is read and
        compared now, once; a wrong one is dropped.
        """
        return self._trusted.find(0, first, stop) < 0 or all(
            self._trusted[number] or self._check(number) for number in range(first, stop)
        )

    def is_removed(self) -> bool:
        """Return True if the file has no name any more: what is there can be read, no more stored.

        Another `CacheDirectory.open` of the shard gives a new file.
        """
        return self.descriptor >= 0 and os.fstat(self.descriptor).st_nlink == 0

    def missing(self, start: int, length: int) -> list[int]:
        """Return the numbers of the ranges of these bytes that are not there."""
        size = self.layout.range_bytes
        numbers = range(start // size, -(-(start + length) // size))
        return [one for one in numbers if not self.has(one, one + 1)]

    def distrust(self, number: int) -> None:
        """Drop a range whose records are damaged: nobody uses these bytes again."""
        with self._guard:
            self._trusted[number] = 0
            self._bad.add(number)
        if self._space is not None and self.descriptor >= 0:
            with contextlib.suppress(OSError, CacheFull):
                if self._wait(number, _DISTRUST_S):  # another may be renewing its slot
                    try:
                        self._write_slot(number, ABSENT)
                        self._bad.discard(number)
                    finally:
                        self.release(number)

    def _slot(self, number: int) -> Slot:
        try:
            return unpack_slot(os.pread(self.descriptor, SLOT_BYTES, self.layout.slot_at(number)))
        except OSError:  # a device that fails, or a closed file: nothing is there
            return ABSENT

    def _check(self, number: int) -> bool:
        """Look up a range that this process does not trust yet."""
        slot = self._slot(number)
        if slot.state != PRESENT or number in self._bad:
            return False
        old = slot.boot != boot()
        if old and not self._is_right(number, slot):
            self.distrust(number)
            return False
        with self._guard:
            if self._slot(number) != slot or number in self._bad:  # dropped, or renewed, meanwhile
                return False
            self._trusted[number] = 1
        if old:
            self._renew(number, slot)
        return True

    def _is_right(self, number: int, slot: Slot) -> bool:
        start, length = self.layout.byte_range(number)
        try:
            data = os.pread(self.descriptor, length, start)
        except OSError:
            return False
        return len(data) == length and checksum(data) == slot.checksum

    def _renew(self, number: int, slot: Slot) -> None:
        """Note that the range is right in this run of the kernel, unless somebody dropped it."""
        if self._space is None:
            return
        with contextlib.suppress(OSError, CacheFull):
            if self._take(number):
                try:
                    if self._slot(number) == slot:
                        self._write_slot(number, Slot(PRESENT, boot(), slot.checksum))
                finally:
                    self.release(number)

    # --- who downloads ----------------------------------------------------------------------------

    def is_kept(self) -> bool:
        """Return False if nothing is ever stored: the cache is read-only.

        Raises CacheFull where nothing could be stored a moment ago, of any shard: what is claimed
        would be downloaded in vain.
        """
        if self._space is not None:
            self._space.check()
        return self._space is not None

    def claim(self, number: int, timeout_s: float | None = None) -> Claim | None:
        """Wait until a range is there (None), or is this caller's to download (a Claim).

        timeout_s: of the wait for another's download, 0 for none; after it None is returned, and
        `has` says which. Waits for each other are possible: who waits without a limit must see to
        it that the ranges that it claimed itself are downloaded meanwhile.
        Raises CacheFull where nothing can be stored.
        """
        if number not in range(self.layout.ranges):
            raise OptionError(f"{self.name}: range {number}: there are {self.layout.ranges}")
        if self.has(number, number + 1):
            return None
        if self._space is None:
            return Claim(self, number)
        if not self._wait(number, timeout_s):
            return None
        try:
            if not self.has(number, number + 1):  # stored before the lock was ours
                return Claim(self, number)
        except BaseException:
            self.release(number)
            raise
        self.release(number)
        return None

    def _wait(self, number: int, timeout_s: float | None) -> bool:
        """Take a range's lock; False if it came to be there, or the time is up."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        pause = _SHORTEST_S
        while not self._take(number):
            if end is not None and time.monotonic() >= end:
                return False
            # Not F_OFD_SETLKW: no timeout, and only the main thread could be interrupted.
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_S)
            if self.has(number, number + 1):
                return False
        return True

    def _take(self, number: int) -> bool:
        """Take a range's lock, if it is free. Raises CacheFull where the file is not writable."""
        with self._guard:
            if number in self._claimed:
                return False
            with self._writing() as writer:
                taken = lock(writer, EXCLUSIVE, self.layout.slot_at(number), SLOT_BYTES)
                if taken:
                    self._claimed.add(number)
                return taken

    def release(self, number: int) -> None:
        """Give a claim back; another may then take over. `Claim.abandon` calls this."""
        with self._guard:
            if number in self._claimed:
                self._claimed.discard(number)
                lock(self._writer, FREE, self.layout.slot_at(number), SLOT_BYTES)
                self._close_writer()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[int]:
        """Hold the descriptor for writing open. Raises CacheFull.

        Not by a copy: a child forked meanwhile would keep the parent's locks by it.
        """
        with self._guard:
            if self._writer < 0:
                self._writer = self._open_writer()
            self._writes += 1
            writer = self._writer
        try:
            yield writer
        finally:
            with self._guard:
                self._writes -= 1
                self._close_writer()

    def _close_writer(self) -> None:
        if self._writer >= 0 and not self._claimed and self._writes <= 0:
            os.close(self._writer)
            self._writer = -1

    def _open_writer(self) -> int:
        """Open the file of `descriptor` once more, for writing. Raises CacheFull."""
        if self.descriptor < 0:
            raise self._full(self._problem or "the file is closed")
        try:
            descriptor = open_safely(self._path, os.O_RDWR)
        except OSError as error:
            raise self._full(error.strerror or str(error)) from None
        if not os.path.sameopenfile(descriptor, self.descriptor):
            os.close(descriptor)
            raise self._full("the file was removed, and another one is there")
        return descriptor

    def _full(self, why: str) -> CacheFull:
        return CacheFull(
            f"{self.name}: cannot keep a range in the cache: {why}. It will be downloaded again "
            "when it is needed again"
        )

    # --- what claims do ---------------------------------------------------------------------------

    def store(self, claim: Claim, data: bytes | bytearray | memoryview) -> None:
        """Store a range: its bytes, then its slot. `Claim.store` calls this."""
        number = claim.number
        if len(data) != claim.length:
            raise AssertionError(f"range {number}: {len(data)} bytes, expected {claim.length}")
        if self._space is None:
            return
        self._space.reserve(claim.length)
        slot = Slot(PRESENT, boot(), checksum(data))
        try:
            with self._writing() as writer:
                if number not in self._claimed:
                    raise self._full("it was claimed before a fork, or the file is closed")
                if self.is_removed():
                    raise self._full("the file was removed")
                write_at(writer, data, claim.start)
                self._write_slot(number, slot)
        except OSError as error:
            full = self._full(error.strerror or str(error))
            self._space.note_full(full)
            raise full from None
        with self._guard:
            self._bad.discard(number)
            self._trusted[number] = 1

    def _write_slot(self, number: int, slot: Slot) -> None:
        """Write a slot. Raises OSError, CacheFull."""
        with self._writing() as writer:
            os.pwrite(writer, slot.pack(), self.layout.slot_at(number))

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the file, and note when it was used last; open claims cannot store any more."""
        with self._guard:
            self._claimed.clear()
            self._close_writer()
            if self.descriptor >= 0:
                touch(self.descriptor)
                os.close(self.descriptor)
                self.descriptor = -1
            self._trusted = bytearray(self.layout.ranges)

    def forget_claims(self) -> None:
        """Drop what a forked child inherited of its parent's claims: only the parent has them."""
        self._guard = threading.RLock()  # another thread of the parent may have held it
        self._writes = 0
        self._claimed.clear()
        self._close_writer()

    def __del__(self) -> None:
        if hasattr(self, "_claimed"):
            self.close()


class Claim:
    """The right and the duty to download one range; at the end of a `with` it is given back.

    number         of the range
    start, length  its bytes in the shard
    """

    __slots__ = ("_done", "_file", "length", "number", "start")

    def __init__(self, file: CachedFile, number: int) -> None:
        self._file, self.number, self._done = file, number, False
        self.start, self.length = file.layout.byte_range(number)

    def store(self, data: bytes | bytearray | memoryview) -> None:
        """Store the bytes of the range, all of them, and give the claim back.

        A read-only cache stores nothing, without an error. Raises CacheFull: the disk is full, or
        the limit cannot be met, or the cache is gone; the caller goes on with the bytes it has.
        """
        try:
            self._file.store(self, data)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Give the claim back, with nothing stored; a second call does no harm."""
        if not self._done:
            self._done = True
            self._file.release(self.number)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def __del__(self) -> None:
        if hasattr(self, "length"):
            self.abandon()


# --- files and locks ------------------------------------------------------------------------------


def open_safely(path: str, flags: int) -> int:
    """Open a regular file that may be trusted; never through a link, never waiting.

    Its owner is this user or root; in a directory that a group shares (writable for the group, and
    not for all) it may be any. Raises OSError.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "expected a file, found something else")
        if status.st_uid not in (0, os.geteuid()) and not is_shared(os.path.dirname(path)):
            raise PermissionError(errno.EPERM, f"the file belongs to user {status.st_uid}")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_shared(directory: str) -> bool:
    """Return True if the users of a group share a directory: they may write, and others may not."""
    return stat.S_IMODE(os.stat(directory).st_mode) & 0o022 == 0o020


def read_layout(descriptor: int) -> Layout | None:
    """Return what the header of an open file says; None if the file is not the cache's."""
    size = os.fstat(descriptor).st_size
    if size < HEADER_BYTES:
        return None
    return unpack(os.pread(descriptor, HEADER_BYTES, size - HEADER_BYTES), size)


def lock(descriptor: int, kind: int, start: int, length: int) -> bool:
    """Take or free a lock on bytes of a file; False if another has it.

    A file system without locks gives them all.
    """
    if sys.platform == "darwin":
        wanted = struct.pack("qqihh", start, length, 0, kind, os.SEEK_SET)
    else:
        wanted = struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)
    try:
        fcntl.fcntl(descriptor, _SET_LOCK, wanted)
    except OSError as error:
        return error.errno not in _BUSY
    return True


def touch(descriptor: int) -> None:
    """Note that a file is used now, where the user may: by the time of its change."""
    with contextlib.suppress(OSError, NotImplementedError, TypeError):
        os.utime(descriptor)


def boot() -> int:
    """Return a number that stands for this run of the kernel: 32 bits.

    Where the system does not say, it stands for this process and those that it forks.
    """
    if not _boot:
        try:
            with open("/proc/sys/kernel/random/boot_id", "rb") as file:
                _boot.append(checksum(file.read()) & 0xFFFFFFFF)
        except OSError:
            _boot.append(secrets.randbits(32))
    return _boot[0]


_boot: list[int] = []
_open: weakref.WeakSet[CachedFile] = weakref.WeakSet()


def _forget_claims() -> None:
    """Leave a parent's claims to it: a lock lasts until the last copy of its descriptor is closed.

    Else a child that lives on would keep the claims of a parent that was killed.
    """
    for one in list(_open):
        one.forget_claims()


os.register_at_fork(after_in_child=_forget_claims)
