"""Who works in a directory: the name of its journal, the first bytes of it, and the lock on it.

`.shardio-plan` lies in OUT from the first byte that is written until the commit. It holds the plan
of a packing, or one line of a Writer or of gc. Packers lock byte k of it for shard k; who needs the
whole directory (a pack, a commit, a Writer, gc) locks all bytes, to the last that a file can have.
The locks are the kernel's and end with their process.

A plan may be large. Its head, what all shards need, is its first bytes and its last ones, which
say where these are; in between lie the pieces, one a shard (packing/journal.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from ..errors import BusyError, ExistsError, StorageError, printable
from . import local
from .base import File

JOURNAL = ".shardio-plan"
PLAN_MAGIC = b"shardio-plan 1\n"  # the journal of a packing
WRITER_MAGIC = b"shardio-writer 0\n"  # of what cannot be resumed: this, and one line of JSON

# The last bytes of a plan: where its first piece begins, and where the last one ends; SHA-256 of
# all before the first and behind the last, but for itself: these SEAL bytes tell it from others.
FOOTER, SEAL = struct.Struct("<QQ32s"), 32

_LAST = 1 << 62  # a byte behind those of all shards: only who locks the whole journal holds it
_TRIES, _PAUSE_S = 5, 0.05  # for a lock that another process may hold for a moment, to look

_mine: set[tuple[int, int, int]] = set()  # device and inode of journals this process has locked
_guard = threading.Lock()


class Lock:
    """A lock on bytes [start, stop) of a file, held by this process and gone with it.

    POSIX record locks: the kernel drops them when the process dies, however it dies, so there is
    no lock file whose age must be guessed. They are blind to their own process, which so takes a
    lock once: a second one would succeed, and end both when it is closed. They also go when the
    process closes *any* descriptor of the file, so the holder reads it by `read` only. `held` is
    None where the file system has no locks.
    """

    __slots__ = ("_file", "_name", "held")

    def __init__(self, path: str, start: int = 0, stop: int | None = None) -> None:
        """Take the lock, or raise BlockingIOError at once. `stop` None: without end.

        Raises FileNotFoundError when there is no such file (any more), StorageError when it cannot
        be opened for writing.
        """
        self.held: bool | None = True
        self._file = local.LocalFile(-1, 0, 0, path)  # closed
        self._name: tuple[int, int, int] | None = None
        status = os.stat(path)
        name = (status.st_dev, status.st_ino, os.getpid())
        with _guard:
            if name in _mine:
                raise BlockingIOError(errno.EAGAIN, path)
            _mine.add(name)
            self._name = name
        try:
            self._take(path, start, stop)
            inodes = {os.fstat(self._file.descriptor).st_ino, os.stat(path).st_ino}
            if inodes != {status.st_ino}:
                raise FileNotFoundError(path)  # replaced meanwhile
        except BaseException:
            self.release()
            raise

    def _take(self, path: str, start: int, stop: int | None) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageError(
                f"{printable(path, 4096)}: cannot be opened to lock it: {error.strerror}"
            ) from None
        self._file = local.wrap(descriptor, printable(path, 4096))
        if stop is not None and stop <= start:
            return
        try:
            length = 0 if stop is None else stop - start
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise BlockingIOError(error.errno, path) from None
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                raise
            self.held = None

    def head(self) -> bytes:
        """Read the head of the journal."""
        return _head(self._file.size, self.read)

    def read(self, start: int, length: int) -> bytes:
        """Read so many bytes of the locked file; fewer where it ends."""
        return self._file.read(start, max(0, min(self._file.size - start, length)))

    def release(self) -> None:
        """Give the lock back; a second call does no harm."""
        self._file.close()
        if self._name is not None:
            _mine.discard(self._name)
            self._name = None


def take(directory: str, start: int = 0, stop: int | None = None) -> Lock:
    """Lock shards [start, stop) of the packing in a directory; stop None: all there can be.

    Raises BusyError, after a moment, FileNotFoundError (no packing is here), StorageError.
    """
    try:
        for _ in range(_TRIES - 1):
            with contextlib.suppress(BlockingIOError):
                return Lock(os.path.join(directory, JOURNAL), start, stop)
            time.sleep(_PAUSE_S)
        return Lock(os.path.join(directory, JOURNAL), start, stop)
    except BlockingIOError:
        raise BusyError(
            f"{printable(directory)}: another shardio process is packing here; wait for it, or "
            "choose another directory. Nothing was touched"
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(directory) from None
    except OSError as error:
        raise StorageError(f"{printable(directory)}: cannot be locked: {error.strerror}") from None


@contextlib.contextmanager
def hold_all(directory: str) -> Iterator[Lock]:
    """Hold all of a packing. Raises as `take` does."""
    held = take(directory)
    try:
        yield held
    finally:
        held.release()


def refuse_if_busy(directory: str, *, part: bool) -> None:
    """Raise BusyError when somebody holds the whole directory; unless `part`, or a part of it."""
    start, stop = (_LAST, _LAST + 1) if part else (0, None)
    with contextlib.suppress(FileNotFoundError):
        take(directory, start, stop).release()


def begin(directory: str, fresh: Callable[[], Iterable[bytes]]) -> bytes | None:
    """Put a journal into place, whole and never over another; None: another was there first.

    fresh: its bytes, in order. Returns its last ones.
    """
    for tries in range(_TRIES):
        try:
            with local.Draft(directory, JOURNAL, local.token()) as draft:
                for part in fresh():
                    draft.write(part)
                draft.commit(JOURNAL, replace=False)
            return part[-SEAL:]
        except ExistsError:
            path = os.path.join(directory, JOURNAL)
            if os.path.islink(path) and not os.path.exists(path):
                raise StorageError(f"{printable(path)}: is a link to nothing; remove it") from None
            break
        except StorageError as error:
            # Somebody who cleaned up behind a dead packer took our draft for one of its.
            if not isinstance(error.__cause__, FileNotFoundError) or tries == _TRIES - 1:
                raise
    return None


def read(directory: str, start: int, length: int, seal: bytes | None = None) -> bytes:
    """Read so many bytes of a journal that is not locked here; fewer where it ends.

    seal: the last bytes of the journal that is meant. Raises as `head` does; FileNotFoundError
    where another one is there.
    """
    with _opened(directory) as file:
        if seal is not None and file.read(max(0, file.size - SEAL), min(SEAL, file.size)) != seal:
            raise FileNotFoundError(directory)
        return file.read(start, max(0, min(file.size - start, length)))


def look(directory: str) -> tuple[bytes, Callable[[int, int], bytes]]:
    """Return the head of a journal that is not locked here, and what reads bytes of it later.

    That raises FileNotFoundError where another journal is there by then. Raises as `head` does.
    """
    found = head(directory)
    return found, functools.partial(read, directory, seal=found[-SEAL:])


def head(directory: str) -> bytes:
    """Read the head of a journal that is not locked here.

    Raises FileNotFoundError, BusyError (this process holds it: closing any descriptor of the file
    would end its lock), StorageError, DamageError.
    """
    with _opened(directory) as file:
        return _head(file.size, file.read)


@contextlib.contextmanager
def _opened(directory: str) -> Iterator[File]:
    """Open a journal that is not locked here; meanwhile it cannot be."""
    path = os.path.join(directory, JOURNAL)
    with _guard:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if (status.st_dev, status.st_ino, os.getpid()) in _mine:
                raise BusyError(f"{printable(directory)}: this process is packing here")
        with contextlib.closing(local.open_file(path, path)) as file:
            yield file


def _head(size: int, read: Callable[[int, int], bytes]) -> bytes:
    """Read the head of a journal; all of one without pieces.

    Where it is damaged it fits no seal.
    """
    start, end = read(0, min(size, len(PLAN_MAGIC))), size - FOOTER.size
    if start != PLAN_MAGIC or end < len(start):
        return read(0, size)
    footer = read(end, FOOTER.size)
    first, last, _ = FOOTER.unpack(footer)
    if not len(start) <= first <= last <= end:
        return start + footer
    return read(0, first) + read(last, end - last) + footer
