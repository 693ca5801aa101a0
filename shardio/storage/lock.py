"""Who works in a directory: the name of its journal, the first bytes of it, and the lock on it.

`.shardio-plan` lies in OUT from the first byte that is written until the commit. It holds the plan
of a packing, or one line of a Writer or of gc. Packers lock byte k of it for shard k; who needs the
whole directory (a pack, a commit, a Writer, gc) locks all bytes, to the last that a file can have.
The locks are the kernel's and end with their process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator

from ..errors import BusyError, ExistsError, StorageError, printable
from . import local

JOURNAL = ".shardio-plan"
PLAN_MAGIC = b"shardio-plan 0\n"  # the journal of a packing
WRITER_MAGIC = b"shardio-writer 0\n"  # of what cannot be resumed: this, and one line of JSON

_LAST = 1 << 62  # a byte behind those of all shards: only who locks the whole journal holds it
_TRIES, _PAUSE_S = 5, 0.05  # for a lock that another process may hold for a moment, to look

_mine: set[tuple[int, int, int]] = set()  # device and inode of journals this process has locked
_guard = threading.Lock()


class Lock(local.RangeLock):
    """A lock that this process takes once: record locks are blind to their own process.

    A second one would succeed, and end both when it is closed.
    """

    __slots__ = ("_name", "_noted")

    def __init__(self, path: str, start: int, stop: int | None) -> None:
        self._noted, self._descriptor = False, -1
        status = os.stat(path)
        self._name = (status.st_dev, status.st_ino, os.getpid())
        with _guard:
            if self._name in _mine:
                raise BlockingIOError(errno.EAGAIN, path)
            _mine.add(self._name)
            self._noted = True
        try:
            super().__init__(path, start, stop)
            if os.fstat(self._descriptor).st_ino != status.st_ino:
                raise FileNotFoundError(path)  # replaced between the two
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give the lock back; a second call does no harm."""
        super().release()
        if self._noted:
            self._noted = False
            _mine.discard(self._name)


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
def whole(directory: str) -> Iterator[Lock]:
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


def begin(directory: str, journal: bytes) -> bool:
    """Put a journal into place, whole and never over another; False: another was there first."""
    for tries in range(_TRIES):
        try:
            local.write_file(directory, JOURNAL, journal, replace=False)
            return True
        except ExistsError:
            path = os.path.join(directory, JOURNAL)
            if os.path.islink(path) and not os.path.exists(path):
                raise StorageError(f"{printable(path)}: is a link to nothing; remove it") from None
            break
        except StorageError as error:
            # Somebody who cleaned up behind a dead packer took our draft for one of its.
            if not isinstance(error.__cause__, FileNotFoundError) or tries == _TRIES - 1:
                raise
    return False


def read(directory: str, limit: int | None = None) -> bytes:
    """Read the first `limit` bytes, or all, of a journal that is not locked here.

    Raises FileNotFoundError, BusyError (this process holds it: closing any descriptor of the file
    would end its lock), StorageError, DamageError.
    """
    path = os.path.join(directory, JOURNAL)
    with _guard:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if (status.st_dev, status.st_ino, os.getpid()) in _mine:
                raise BusyError(f"{printable(directory)}: this process is packing here")
        with contextlib.closing(local.open_file(path, path)) as file:
            return file.read(0, file.size if limit is None else min(file.size, limit))
