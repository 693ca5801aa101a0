"""Files of this machine, and of what is mounted on it: positioned reads, and writes that are whole.

Reading is `pread`: it has no shared offset (threads and forks cannot disturb each other), releases
the GIL, and a file that shrinks is an error. An mmap is neither: its faults hold the GIL, and a
file truncated under it kills the process (SIGBUS).

Writing is: a temporary name, `fsync`, `rename`, `fsync` of the directory. A reader sees a whole
file or none. This module creates, renames and deletes files; else only the cache does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator

from ..errors import DamageError, ExistsError, StorageError, printable
from ..names import file_name
from ..units import show_size
from .base import File, KnownFile, Location, Seal

READ_AHEAD = 128 << 10  # Linux's default, where the device does not say
_MOST_READ = 1 << 30  # bytes of one pread: macOS refuses 2 GiB and more (EINVAL), Linux gives fewer
_HASHED_BYTES = 1 << 20  # bytes that are read and hashed at a time
_NETWORK = re.compile(  # types of file systems, without "fuse."
    "nfs4?|cifs|smb3|smbfs|9p|ceph|lustre|gpfs|beegfs|afs|glusterfs|virtiofs|davfs|sshfs|s3fs"
    "|gcsfuse|rclone|juicefs|goofys|blobfuse2"
)
_COMPRESSING = ("btrfs", "zfs", "bcachefs")
_TEMPORARY = re.compile(r"\.shardio-[0-9a-f]{16}-.*\.tmp\Z", re.DOTALL)


class LocalDirectory(Location):
    """A directory. Names of files in it are stored names (names.py), whatever the locale."""

    def __init__(self, root: str) -> None:
        self.url = root
        self.root = os.path.abspath(root)
        self._network: bool | None = None

    def path(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.root, file_name(name))

    def open(self, name: str, known: KnownFile | None = None) -> LocalFile:
        """Open a file. Raises FileNotFoundError, StorageError."""
        found = file_name(name)
        return open_file(os.path.join(self.root, found), os.path.join(self.url, found))

    def read(self, name: str, limit: int, *, seal: Seal = None) -> bytes:
        """Read a small file. Raises FileNotFoundError, StorageError, DamageError above `limit`."""
        with contextlib.closing(self.open(name)) as file:
            if file.size > limit:
                raise DamageError(
                    f"{file.name}: {file.size:,} bytes, more than {limit:,} can be right"
                )
            return file.read(0, file.size)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, whole or not at all. Raises StorageError."""
        write_file(self.url, file_name(name), data)

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there does no harm. Raises StorageError."""
        remove(os.path.join(self.url, file_name(name)))

    def exists(self, name: str) -> bool:
        """Return True if a file or folder of this name is there."""
        return os.path.lexists(self.path(name))

    def below(self, name: str) -> LocalDirectory:
        """Return the directory of this name in it."""
        return LocalDirectory(os.path.join(self.url, file_name(name)))

    def is_network(self) -> bool:
        """Return True if reads leave this machine."""
        if self._network is None:
            self._network = _NETWORK.fullmatch(_file_system(self.root)) is not None
        return self._network


class LocalFile(File):
    """One file, open for reading; not to be shared across a fork (it is opened in each process).

    name  its path, as messages print it
    """

    __slots__ = ("_device_ahead", "descriptor", "name", "size")
    name: str
    descriptor: int

    def __init__(self, descriptor: int, size: int, ahead: int, name: str) -> None:
        self.name, self._device_ahead = name, ahead
        self.descriptor, self.size = descriptor, size

    def read(self, start: int, length: int) -> bytes:
        """Read `length` bytes from `start`. Raises DamageError."""
        try:
            data = os.pread(self.descriptor, length if length < _MOST_READ else _MOST_READ, start)
            if len(data) == length:
                return data
            parts = [data]  # one call returns fewer bytes where a signal came, too
            missing = length - len(data)
            while data and missing:
                data = os.pread(self.descriptor, min(missing, _MOST_READ), start + length - missing)
                parts.append(data)
                missing -= len(data)
        except OSError as error:
            raise StorageError(
                f"{self.name}: cannot read {length:,} bytes at byte {start}: {error.strerror}"
            ) from None
        if missing:
            raise DamageError(
                f"{self.name}: ends at byte {start + length - missing}, expected {length:,} bytes "
                f"from byte {start}. The file was cut short"
            )
        return b"".join(parts)

    def sha256(self) -> bytes:
        """Return the SHA-256 of the file, 32 bytes."""
        seal = hashlib.sha256()
        for start in range(0, self.size, _HASHED_BYTES):
            seal.update(self.read(start, min(_HASHED_BYTES, self.size - start)))
        return seal.digest()

    def will_need(self, start: int, length: int, *, keep: bool = False) -> None:
        """Announce a range that will be read soon."""
        if not hasattr(os, "posix_fadvise"):
            return
        # A larger call is silently cut to the device's read-ahead: the range goes piece by piece.
        with contextlib.suppress(OSError):
            stop = min(start + length, self.size)  # whatever an index says
            for at in range(max(start, 0), stop, self._device_ahead):
                piece = min(self._device_ahead, stop - at)
                os.posix_fadvise(self.descriptor, at, piece, os.POSIX_FADV_WILLNEED)

    def scattered(self) -> None:
        """Say that reads will be in no order."""
        # The kernel takes a read behind cached pages for a sequential one and reads ahead. Where
        # pages are gone before use, that was 5.0 bytes read for each one used; so it is 2.0.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def close(self) -> None:
        """Close the file."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()


def wrap(descriptor: int, name: str) -> LocalFile:
    """Return a file for an open descriptor, which it closes."""
    status = os.fstat(descriptor)
    return LocalFile(descriptor, status.st_size, _read_ahead(status.st_dev), name)


def open_file(path: str, name: str) -> LocalFile:
    """Open a file, which messages call `name`. Raises FileNotFoundError, StorageError."""
    descriptor, name = -1, printable(name, 4096)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(f"{name}: expected a file, found something else")
        return LocalFile(descriptor, status.st_size, _read_ahead(status.st_dev), name)
    except BaseException as error:
        if descriptor >= 0:
            os.close(descriptor)
        if not isinstance(error, OSError) or isinstance(error, FileNotFoundError):
            raise
        raise StorageError(f"{name}: cannot be opened: {error.strerror}") from error


class Draft:
    """A file being written under a temporary name, hashed as it grows; `commit` makes it real.

    `descriptor` is raw: each `write` is one system call or more, so callers hand over large pieces.
    patched: its first bytes change when the others are known (`patch`); it is hashed after that,
    which reads it from the page cache.
    At the end of a `with` it is discarded, unless it was committed.
    """

    __slots__ = ("_descriptor", "_hash", "_path", "_shown", "directory", "size")

    def __init__(self, directory: str, name: str, token: str, *, patched: bool = False) -> None:
        self.directory = directory
        self._path = os.path.join(directory, f".shardio-{token}-{name}.tmp")
        self._shown = os.path.join(directory, name)  # the temporary name says nothing to users
        self._hash = None if patched else hashlib.sha256()
        self.size = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with _explained(self._shown, "create"):
            self._descriptor = os.open(self._path, flags, 0o666)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def write(self, data: bytes | bytearray) -> None:
        """Append bytes to the file. Raises StorageError."""
        if self._hash is not None:
            self._hash.update(data)
        self.size += len(data)
        with _explained(self._shown, "write"):
            done = os.write(self._descriptor, data)
            view = memoryview(data)
            while done < len(data):
                done += os.write(self._descriptor, view[done:])

    def patch(self, data: bytes) -> None:
        """Write over the first bytes."""
        assert self._hash is None and len(data) <= self.size
        with _explained(self._shown, "write"):
            write_at(self._descriptor, data, 0)

    def digest(self) -> bytes:
        """Return the SHA-256 of what was written so far, 32 bytes."""
        if self._hash is not None:
            return self._hash.digest()
        seal, at = hashlib.sha256(), 0
        with _explained(self._shown, "read"):
            while data := os.pread(self._descriptor, _HASHED_BYTES, at):
                seal.update(data)
                at += len(data)
        if at != self.size:
            raise StorageError(
                f"{printable(self._shown, 4096)}: wrote {self.size:,} bytes, and read {at:,} back"
            )
        return seal.digest()

    def commit(self, name: str, *, replace: bool = True) -> None:
        """Flush to the device, take the final name, flush the directory.

        `replace=False` raises ExistsError when the name is taken, atomically.
        """
        target = os.path.join(self.directory, name)
        try:
            with _explained(self._shown, "flush"):
                _flush(self._descriptor)
                self._close()
            with _explained(target, "create"):
                if replace:
                    os.rename(self._path, target)
                else:
                    link(self._path, target)
        finally:
            self.discard()
        sync_directory(self.directory)

    def discard(self) -> None:
        """Close and remove the temporary file, if it is still there."""
        self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def token() -> str:
    """Draw sixteen hex digits that mark the temporary files of one process."""
    return secrets.token_hex(8)


def is_temporary(name: str) -> bool:
    """Return True if a file's name is one that Draft gives."""
    return _TEMPORARY.match(name) is not None


def write_file(directory: str, name: str, data: bytes, *, replace: bool = True) -> None:
    """Write a small file, whole or not at all. Raises ExistsError (replace=False), StorageError."""
    with Draft(directory, name, token()) as draft:
        draft.write(data)
        draft.commit(name, replace=replace)


def free_bytes(path: str) -> int:
    """Return the bytes that may still be written below a directory. Raises StorageError."""
    with _explained(path, "look at"):
        found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def make_directory(path: str) -> None:
    """Create a directory and its parents, durably; one that is there already is fine."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(os.path.abspath(path))
    make_directory(parent)
    with _explained(path, "create"), contextlib.suppress(FileExistsError):
        os.mkdir(path)
    if not os.path.isdir(path):
        raise StorageError(f"{printable(path)}: expected a directory, found a file")
    sync_directory(parent)


def sync_directory(path: str) -> None:
    """Make renames and removals in a directory durable."""
    with _explained(path, "flush"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _flush(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
                raise  # some network file systems cannot flush a directory
        finally:
            os.close(descriptor)


def remove(path: str) -> None:
    """Remove a file; one that is gone already is fine."""
    with _explained(path, "remove"), contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def write_at(descriptor: int, data: bytes | bytearray | memoryview, start: int) -> None:
    """Write all of some bytes, from byte `start` of a file on. Raises OSError."""
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, start)
        start, view = start + done, view[done:]


class OnceFile:
    """A file that several processes need: one of them writes it, in place, and the others wait.

    Its first bytes say whether it is whole, and are written last. Who writes holds a lock on it, as
    `lock.Lock`: whoever comes after one that died begins anew. Where the file system has no locks,
    each needs one of its own.
    """

    __slots__ = ("_at", "_descriptor", "_directory", "_head", "_path", "locks")

    def __init__(self, directory: str, name: str, head: bytes) -> None:
        """Open or create the file. head: its first bytes where it is whole."""
        self._directory, self._path = directory, os.path.join(directory, name)
        self._head, self._at = head, 0
        self.locks = True  # False: the file system has none, as `take` found
        with _explained(self._path, "create"):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self._path, flags, 0o666)

    def take(self) -> bool:
        """Return whether it is ours to write, or to read; False where another process writes it."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.locks = error.errno in (errno.EACCES, errno.EAGAIN)
            return not self.locks
        return True

    @property
    def is_there(self) -> bool:
        """Return whether the file is still where it was opened: nobody removed it."""
        with contextlib.suppress(FileNotFoundError):
            return os.fstat(self._descriptor).st_ino == os.stat(self._path).st_ino
        return False

    @property
    def is_whole(self) -> bool:
        """Return whether it is written, and still there."""
        head = os.pread(self._descriptor, len(self._head), 0)
        return head == self._head and self.is_there

    def begin(self, head: bytes) -> None:
        """Empty it, and write first bytes of the same length, which say that it is not whole."""
        with _explained(self._path, "write"):
            os.ftruncate(self._descriptor, 0)
        self.write(head)

    def write(self, data: bytes) -> None:
        """Append bytes. Raises StorageError."""
        with _explained(self._path, "write"):
            write_at(self._descriptor, data, self._at)
        self._at += len(data)

    def finish(self) -> None:
        """Flush it to the device, and say that it is whole."""
        with _explained(self._path, "flush"):
            _flush(self._descriptor)
            os.pwrite(self._descriptor, self._head, 0)
            _flush(self._descriptor)
        sync_directory(self._directory)

    def close(self) -> None:
        """Give the file, and its lock, back."""
        os.close(self._descriptor)


def check_target(path: str | os.PathLike[str]) -> None:
    """Raise StorageError where no file can be written at a path, before the work it is to hold."""
    shown, folder = printable(os.fspath(path), 4096), os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise StorageError(f"{shown}: there is no directory {printable(folder)} to write it into")
    if os.path.isdir(path):
        raise StorageError(f"{shown}: expected the name of a file, and this is a directory")
    if os.path.exists(path) and not os.path.isfile(path):  # a rename would put a file in its place
        raise StorageError(f"{shown}: expected the name of a file, and this is a device or a pipe")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"{shown}: no permission to write into {printable(folder)}")


def check_directory(path: str) -> None:
    """Raise StorageError where a directory that is not there cannot be made, before any work."""
    above = os.path.abspath(path)
    if os.path.isdir(above):
        return
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        raise StorageError(f"{printable(path)}: {printable(above)} is a file, no directory")
    if not os.access(above, os.W_OK | os.X_OK):
        raise StorageError(f"{printable(path)}: no permission to write into {printable(above)}")


def refuse_if_full(directory: str, needed: int) -> None:
    """Raise StorageError where so many bytes cannot fit, before the first of them is written.

    Nothing is said of file systems that compress, nor of those that do not know what is free.
    """
    path = os.path.abspath(directory)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    with contextlib.suppress(OSError):
        status = os.statvfs(path)
        free = status.f_bavail * status.f_frsize
        if not status.f_blocks or needed <= free or _file_system(path) in _COMPRESSING:
            return
        raise StorageError(
            f"{printable(directory)}: {show_size(needed)} are to be written, and "
            f"{show_size(free)} are free there. Nothing was written: make room, or choose another "
            "directory"
        )


def is_full(error: BaseException) -> bool:
    """Return True if an error, perhaps of another process, says that there is no room left."""
    return any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))


def memory_available() -> int:
    """Return the bytes that this machine, or container, can give or keep as page cache."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as file:
        found += [int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")]
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups, version 2 and 1
        with contextlib.suppress(OSError, ValueError), open(f"/sys/fs/cgroup/{limit}") as file:
            found.append(int(file.read()))
    return min(found)


def _flush(descriptor: int) -> None:
    """Wait until what was written is on the device, and not in its cache."""
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync stops at the drive's cache
    if full is not None:
        with contextlib.suppress(OSError):  # not every file system there has it
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def move(path: str, directory: str) -> None:
    """Move a file into another directory of the same disk, over one of its name."""
    with _explained(path, "move"):
        os.replace(path, os.path.join(directory, os.path.basename(path)))


def share(path: str, directory: str) -> None:
    """Have a file in another directory of the same disk, too, over one of its name.

    Where there are no hard links, or one of its name is there, it is moved.
    """
    target = os.path.join(directory, os.path.basename(path))
    with contextlib.suppress(FileNotFoundError):
        if os.path.samefile(path, target):
            return
    try:
        link(path, target)
    except ExistsError:
        move(path, directory)


def link(path: str, target: str) -> None:
    """Give a file another name, never over another; where there are no hard links, rename it.

    Raises ExistsError, StorageError.
    """
    with _explained(target, "create"):
        try:
            os.link(path, target)
        except FileExistsError:
            raise ExistsError(f"{printable(target)} is there already") from None
        except OSError as error:  # the next best thing is not atomic, only careful
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            if os.path.lexists(target):
                raise ExistsError(f"{printable(target)} is there already") from None
            os.rename(path, target)


@contextlib.contextmanager
def _explained(path: str, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{printable(path, 4096)}: cannot {what}: {error.strerror}") from error


def _read_ahead(device: int, known: dict[int, int] = {}) -> int:  # noqa: B006 - a cache per process
    if device not in known:
        node = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
        known[device] = READ_AHEAD
        for queue in (f"{node}/queue", f"{node}/../queue"):  # a partition's queue is its disk's
            with contextlib.suppress(OSError, ValueError), open(f"{queue}/read_ahead_kb") as file:
                known[device] = max(int(file.read()) << 10, 4096)
                break
    return known[device]


def _file_system(path: str) -> str:
    """Return the type of the file system a path lies on, "" if it cannot be told."""
    best, kind = "", ""
    with contextlib.suppress(OSError), open("/proc/self/mounts", "rb") as file:
        real = os.path.realpath(path)
        for line in file:
            _, mounted, name, *_ = line.split()
            # the kernel escapes blanks in mount points as octal: \040
            point = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), mounted)
            folder = os.fsdecode(point).rstrip("/") + "/"
            if (real + "/").startswith(folder) and len(folder) >= len(best):
                best, kind = folder, name.decode("ascii", "replace")
    return kind.removeprefix("fuse.")
