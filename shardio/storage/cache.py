"""A bounded directory on a node's disk that keeps ranges of remote shards. It downloads nothing.

    cache = CacheDirectory("/nvme/cache", "200GiB")
    file = cache.open(key, size, dataset_id, shard)       # cached_file.CachedFile
    claim = file.claim(3)                                 # None: range 3 is there
    if claim is not None:
        with claim:
            claim.store(download(claim.start, claim.length))
    os.pread(file.descriptor, 100, claim.start)           # the offsets are those of the shard

One sparse file a shard (cache_layout.py), named by dataset, shard and content, so nothing in it can
go stale. Manifests lie in it by the SHA-256 that they end with. Processes agree by locks of the
kernel alone (cached_file.py).

The limit is kept by what the file system has allocated. A file `shardio-usage.cache` has the sum;
a range is added to it before it is written, under a flock on the directory itself, which takes 15
us and no look at the files. Where the sum reaches the limit, the files are looked at: this corrects
the sum, and files that no process has open are removed, least recently used first, until a 64th of
the limit is free. A file in use stays, since to remove it would free nothing until it is closed. If
all are in use, CacheFull is raised: the caller uses its bytes and does not store them.
So the files exceed the limit at most by the ranges that are being written while another process
looks (one a thread that stores). Files that were removed by hand, or by `clear`, while a process
has them open are not counted, and free their space when it closes them.

What is not ours is never removed nor written to: ours is a regular file with such a name whose
header is right, says the same name, and fits the length of the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import NotPackedError, OptionError, StorageError, printable
from ..stack import users_level
from ..units import check_int, check_size, show_count, show_size
from . import local
from .cache_layout import HEADER_BYTES, SLOT_BYTES, Layout, checksum, is_name
from .cached_file import (
    EXCLUSIVE,
    SHARED,
    CachedFile,
    CacheFull,
    is_shared,
    lock,
    open_safely,
    read_layout,
    touch,
)
from .lock import JOURNAL

RANGE_BYTES = 8 << 20
SMALL = bytes(16)  # in place of a dataset's id: manifests, whose key is the SHA-256 in them

_OF_DATASETS = ("manifest.json", "shardio.json", JOURNAL)
_USAGE = "shardio-usage.cache"
_USAGE_MAGIC = b"shardio-usage 0\n"
_USAGE_BYTES = 32  # the magic, the sum, a checksum of both
_NEW_BYTES = 8192  # that a new file takes: header and slots
_BLOCK = 4096
_FREED_PART = 64  # of the limit is made free at once, so that files are looked at rarely
_SHOWN_FILES = 10  # files that an error lists
_LOCK_S, _PAUSE_S = 5.0, 0.0005  # the lock is held for microseconds; a look at 10,000 files: 50 ms
# Until it is tried again to keep something, after all files were found in use, or the disk full: to
# try costs the download of a range. After another process has held the lock, which is stopped then.
_FULL_S, _STOPPED_S = 5.0, 60.0


class CacheDirectory:
    """A directory that keeps ranges of remote shards, within a limit. It can be pickled.

    A directory that is not there is created, for this user alone (mode 0700). One that is there
    stays as it is; if it is writable for its group, and not for all, files in it are, too.
    If this process may not write in it, what is there is read, and nothing is stored; where nothing
    is there, a warning says so.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        limit_bytes: int | str,
        *,
        range_bytes: int = RANGE_BYTES,
    ) -> None:
        """Check the directory, or create it.

        limit_bytes  of disk that the cache takes, or "200GiB"; at least two ranges
        range_bytes  that are downloaded, stored and checked at once; of one dataset always the same

        Raises OptionError (a limit that is too small, a dataset's own directory), StorageError.
        """
        self.path = _absolute(path)
        self.range_bytes = check_int("range_bytes", range_bytes, _BLOCK)
        if self.range_bytes % _BLOCK:
            raise OptionError(f"range_bytes is {range_bytes}: expected a multiple of {_BLOCK}")
        self.limit_bytes = check_size("limit_bytes", limit_bytes)
        if self.limit_bytes < 2 * self.range_bytes + _NEW_BYTES:
            raise OptionError(
                f"the limit of the cache {printable(self.path)} is {show_size(self.limit_bytes)}: "
                f"expected more than two ranges of {show_size(self.range_bytes)}"
            )
        self._full_until, self._why = 0.0, ""
        _refuse_dataset(self.path)
        _make(self.path)
        _warn_if_useless(self.path)  # here, and not in each worker, which gets a copy

    def __getstate__(self) -> dict[str, object]:
        """Leave out what another machine's clock says."""
        return self.__dict__ | {"_full_until": 0.0}

    def open(self, key: str, size: int, dataset_id: bytes, shard: int) -> CachedFile:
        """Open what the cache has of a shard, or begin to keep it.

        key         the SHA-256 of the shard, in hex
        size        bytes of the shard
        dataset_id  16 bytes

        Never fails for what it finds on the disk: then nothing is there, and `claim` says why
        nothing can be stored, by CacheFull.
        """
        layout = Layout(bytes.fromhex(key), dataset_id, shard, size, self.range_bytes)
        if len(layout.key) != 32 or len(dataset_id) != 16 or shard < 0 or size < 0:
            raise OptionError(f"shard {shard}: a key of 32 bytes and an id of 16 are expected")
        path, problem, found = os.path.join(self.path, layout.name), "", -1
        writable = os.access(self.path, os.W_OK | os.X_OK) or not os.path.isdir(self.path)
        try:
            found = _find(path, layout)
            if found < 0 and writable:
                found = self._begin(path, layout)
        except CacheFull as error:
            problem = str(error)
        except OSError as error:
            problem = error.strerror or str(error)
        space = self if writable else None
        return CachedFile(path, layout, found, space=space, problem=problem)

    def _begin(self, path: str, layout: Layout) -> int:
        """Create the file of a shard; return its descriptor. Raises CacheFull, OSError."""
        with self._locked():
            found = _find(path, layout)
            if found >= 0:
                return found
            self._add(_NEW_BYTES)
            with contextlib.suppress(FileNotFoundError):
                # Of another size, as an index of other options may say; or nobody's, and stays.
                if not _remove(path, in_use=False) and os.lstat(path).st_size:
                    raise self._full(f"{printable(path, 4096)} is in use, or not the cache's")
            # An empty file is taken over: its creator was killed before it wrote the first byte.
            with _opened(path, os.O_RDWR | os.O_CREAT) as writer:
                if os.fstat(writer).st_size:
                    raise self._full(f"{printable(path, 4096)} is not the cache's")
                if is_shared(self.path):
                    with contextlib.suppress(OSError):  # the umask took the group's part
                        os.fchmod(writer, 0o660)
                os.pwrite(writer, layout.pack(), layout.header)
                found = _find(path, layout)
        if found < 0:
            raise self._full(f"{printable(path, 4096)} was removed while it was created")
        # Else a loss of power could leave a name and a length without the header, which proves
        # that the file is ours. Once a shard: 0.1 to 10 ms.
        with contextlib.suppress(OSError):
            os.fsync(found)
        return found

    # --- the limit --------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise CacheFull if nothing could be kept a moment ago."""
        if time.monotonic() < self._full_until:
            raise CacheFull(self._why)

    def note_full(self, error: CacheFull, for_s: float = _FULL_S) -> None:
        """Note that nothing can be kept now."""
        self._full_until, self._why = time.monotonic() + for_s, str(error)

    def reserve(self, needed: int) -> None:
        """Make room for so many bytes that will be written now. Raises CacheFull."""
        needed = -(-needed // _BLOCK) * _BLOCK
        try:
            with self._locked():
                self._add(needed)
        except OSError as error:
            raise self._noted(error.strerror or str(error)) from None

    def _add(self, needed: int) -> None:
        """Add to the sum of what is there; where that exceeds the limit, make room first."""
        path = os.path.join(self.path, _USAGE)
        with _opened(path, os.O_RDWR | os.O_CREAT) as usage:
            data = os.pread(usage, _USAGE_BYTES + 1, 0)
            total = _sum(data)
            if total is None or total + needed > self.limit_bytes:
                total = self._make_room(needed)
            if not data and is_shared(self.path):
                os.fchmod(usage, 0o660)
            if not data or (len(data) == _USAGE_BYTES and data.startswith(_USAGE_MAGIC)):
                body = _USAGE_MAGIC + (total + needed).to_bytes(8, "little")
                os.pwrite(usage, body + checksum(body).to_bytes(8, "little"), 0)

    def _make_room(self, needed: int) -> int:
        """Look at all files, and remove some if need be; return what the others take."""
        found = sorted(_scan(self.path), key=lambda one: one.st_mtime_ns)
        total = sum(one.allocated for one in found)
        if total + needed > self.limit_bytes:
            target = self.limit_bytes - max(needed, self.limit_bytes // _FREED_PART)
            for one in found:
                if total <= target:
                    break
                with contextlib.suppress(OSError):
                    if _remove(one.path, in_use=False):
                        total -= one.allocated
        if total + needed > self.limit_bytes:
            raise self._noted(
                f"all files are in use, and together they reach the limit of "
                f"{show_size(self.limit_bytes)}"
            )
        return total

    def _full(self, why: str) -> CacheFull:
        return CacheFull(
            f"{printable(self.path, 4096)}: cannot keep more in this cache: {why}. What is not "
            "kept is downloaded again when it is needed again"
        )

    def _noted(self, why: str, for_s: float = _FULL_S) -> CacheFull:
        """Return the error, and note that nothing can be kept now."""
        full = self._full(why)
        self.note_full(full, for_s)
        return full

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the directory. Raises CacheFull, after 5 s at most, and OSError."""
        self.check()
        with locked(self.path) as held:
            if not held:
                why = "another process has held its lock for 5 s; is it stopped?"
                raise self._noted(why, _STOPPED_S)
            yield


# --- `shardio cache` ------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheEntry:
    """What a cache has of one shard.

    size         bytes of the shard
    present      bytes of it that are there
    allocated    bytes that its file takes on the disk
    last_use     seconds since 1970
    """

    path: str
    dataset_id: bytes
    shard: int
    size: int
    present: int
    allocated: int
    last_use: float


def entries(path: str | os.PathLike[str]) -> list[CacheEntry]:
    """List what a cache directory has, by dataset and shard.

    Raises NotPackedError, StorageError.
    """
    found = []
    for one in _listed(path):
        with contextlib.suppress(OSError):
            with _opened(one.path, os.O_RDONLY) as descriptor:
                layout = read_layout(descriptor)
                if layout is None or layout.name != os.path.basename(one.path):
                    continue
                slots = os.pread(descriptor, SLOT_BYTES * layout.ranges, layout.table)
            found.append(
                CacheEntry(
                    one.path,
                    layout.dataset_id,
                    layout.shard,
                    layout.size,
                    layout.present_bytes(slots),
                    one.allocated,
                    one.st_mtime_ns / 1e9,
                )
            )
    return sorted(found, key=lambda one: (one.dataset_id, one.shard, one.path))


def clear(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Remove all that a cache directory has, and nothing else; return files and bytes on the disk.

    Running jobs read on from the files that they have open, which free their space when closed.
    Raises NotPackedError, StorageError, which lists what could not be removed.
    """
    files, size, left = 0, 0, []
    listed = _listed(path)
    folder = _absolute(path)
    with contextlib.suppress(FileNotFoundError), locked(folder):  # stopped or not: it is asked for
        for one in listed:
            try:
                if _remove(one.path, in_use=True):
                    files, size = files + 1, size + one.allocated
            except FileNotFoundError:  # another process was faster
                pass
            except OSError as error:
                left.append(f"  {printable(one.path, 4096)}: {error.strerror}")
        with contextlib.suppress(OSError):
            usage = os.path.join(folder, _USAGE)
            with _opened(usage, os.O_RDONLY) as descriptor:
                ours = _sum(os.pread(descriptor, _USAGE_BYTES + 1, 0)) is not None
            if ours:
                os.unlink(usage)
    if left:
        more = [f"  ... and {len(left) - _SHOWN_FILES:,} more"] if len(left) > _SHOWN_FILES else []
        lines = "\n".join([*left[:_SHOWN_FILES], *more])
        raise StorageError(
            f"{printable(folder, 4096)}: {show_count(files, 'file')}, {show_size(size)}, removed, "
            f"but not these {len(left):,}:\n{lines}\nRemove them as their owner, with the right to "
            "write into the directory"
        )
    return files, size


def _absolute(path: str | os.PathLike[str]) -> str:
    """Return the path of a cache. Raises OptionError for a URL."""
    text = os.fsdecode(path)
    if "://" in text:
        raise OptionError(f"the cache {printable(text)}: expected a directory of this machine")
    return os.path.abspath(text)


def _listed(path: str | os.PathLike[str]) -> list[_Found]:
    folder = _absolute(path)
    if not os.path.isdir(folder):
        raise NotPackedError(f"{printable(folder, 4096)}: no such directory; expected a cache")
    try:
        return list(_scan(folder))
    except OSError as error:
        raise StorageError(
            f"{printable(folder, 4096)}: cannot be listed: {error.strerror}"
        ) from None


# --- files of the directory -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """A file that may be the cache's, by its name."""

    path: str
    allocated: int
    st_mtime_ns: int


def _scan(folder: str) -> Iterator[_Found]:
    with os.scandir(folder) as listed:
        for one in listed:
            if is_name(one.name):
                with contextlib.suppress(OSError):  # gone meanwhile
                    status = one.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield _Found(one.path, status.st_blocks * 512, status.st_mtime_ns)


def _find(path: str, layout: Layout) -> int:
    """Open the file of a shard, and say that it is in use; -1 if it is not there.

    Raises OSError for what is not to be opened.
    """
    try:
        descriptor = open_safely(path, os.O_RDONLY)
    except FileNotFoundError:
        return -1
    try:
        found = read_layout(descriptor)
        if (
            found == layout
            and lock(descriptor, SHARED, layout.header, HEADER_BYTES)
            and os.fstat(descriptor).st_nlink  # else it was evicted before the lock
        ):
            touch(descriptor)
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return -1


def _remove(path: str, *, in_use: bool) -> bool:
    """Remove a file that proves to be the cache's, under the lock of the directory; False: stays.

    in_use: also one that a process has open. Raises OSError.
    """
    with _opened(path, os.O_RDONLY if in_use else os.O_RDWR) as descriptor:
        layout = read_layout(descriptor)
        if layout is None or layout.name != os.path.basename(path):
            return False
        if not in_use and not lock(descriptor, EXCLUSIVE, layout.header, HEADER_BYTES):
            return False
        if not os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            return False
        os.unlink(path)
        return True


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    """Hold a file open, as `open_safely` opens it. Raises OSError."""
    descriptor = open_safely(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sum(data: bytes) -> int | None:
    """Return the sum of what the files take, by the file that has it; None if it is not there."""
    body, seal = data[:24], data[24:]
    if not body.startswith(_USAGE_MAGIC) or checksum(body).to_bytes(8, "little") != seal:
        return None
    return int.from_bytes(body[16:], "little")


@contextlib.contextmanager
def locked(folder: str) -> Iterator[bool]:
    """Hold the lock of a directory; yield False where another has held it for 5 s. Raises OSError.

    By looking again and again: a wait in the kernel for a process that was stopped has no end. A
    file system that has no such lock does without.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    held, end = False, time.monotonic() + _LOCK_S
    try:
        while not held and time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                time.sleep(_PAUSE_S)
            except OSError:
                held = True
        yield held
    finally:
        with contextlib.suppress(OSError):  # also for a copy that a fork made meanwhile
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _refuse_dataset(path: str) -> None:
    for name in _OF_DATASETS:
        if os.path.lexists(os.path.join(path, name)):
            raise OptionError(
                f"{printable(path, 4096)}: is a dataset's own directory, {name} is in it; a cache "
                "needs another one"
            )


def _make(path: str) -> None:
    if os.path.isdir(path):
        return
    try:
        local.make_directory(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    except (OSError, StorageError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise StorageError(
            f"{printable(path, 4096)}: the cache cannot be created: {why}. Choose another directory"
        ) from None
    if not os.path.isdir(path):
        raise StorageError(f"{printable(path, 4096)}: expected a directory, found a file")


def _warn_if_useless(path: str) -> None:
    """Warn of a directory that may not be written, and holds nothing that this user may read."""
    if os.access(path, os.W_OK | os.X_OK):
        return
    with contextlib.suppress(OSError):
        for one in _scan(path):
            with contextlib.suppress(OSError):
                os.close(open_safely(one.path, os.O_RDONLY))
                return
    warnings.warn(
        f"{printable(path, 4096)}: the cache keeps nothing: this user has no permission to write "
        "into it, and it holds no shards that this user may read. All is downloaded in each epoch; "
        "choose a directory that can be written",
        stacklevel=users_level(),
    )
