"""Folders of images, read in place: a record is a file, and a shard a run of files.

    field     value
    key       the file's path below the folder, as the bytes the file system gave
    image     the file
    label     the number of its class, where the folder has class folders

A run is read as if its files lay behind each other in one: record 7 is the range of the seventh
file. A read opens the files it needs, one by one, and closes them: no descriptor stays open. Their
sizes are compared then, and the index has a checksum of each, so that a file that was changed, cut
or removed since is named. Random access costs what the file system makes it cost, which is why
packing exists; this is for looking at, and debugging with, the very order that packing would give.

The description of a run, in its index: msgpack {"keys": bytes, separated by 0, "sizes": u32[n],
"labels": u32[n], or nothing without classes}.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from ...errors import DamageError, SourceError, StorageError, printable
from ...images.filetype import image_type
from ...names import KEY, file_name, key_text
from ...storage.base import File, KnownFile, Location, path_in
from ...units import show_count
from ..base import Column, Opening, ShardInfo
from ..sample import pack, unpack
from .base import ForeignFile, ForeignShard, Values, Walked, other_size

_MAX_REQUESTED_FILES = 1024  # by URL: asked for, and not read yet
_READ_AHEAD_BYTES = 16 << 20  # by URL: what a reader in order asks for ahead
# Of a path that would lead out of the folder: a part that is empty, or `.`, or `..`.
_OUTSIDE = re.compile(rb"(?:\A|[/\0])\.{0,2}(?:[/\0]|\Z)")


class NoImageError(SourceError):
    """Files that are no images; `problems` lists them, with the reason."""

    problems: Sequence[tuple[bytes, str]] = ()


class ImageRun(ForeignFile):
    """A run of image files as one. What it holds is said when it is opened, also to index it."""

    def __init__(
        self,
        storage: Location,
        name: str,
        extra: bytes = b"",
        *,
        size: int = -1,
        sweep: bool = False,
    ) -> None:
        self._storage = storage
        self.name = path_in(storage, name)
        described = unpack(extra)
        self._keys: bytes = described["keys"]
        sizes, labels = (np.frombuffer(described[part], "<u4") for part in ("sizes", "labels"))
        self.labels = labels if len(labels) else None
        ends = np.flatnonzero(np.frombuffer(self._keys + b"\0", np.uint8) == 0)
        self._ends: Column = ends if len(sizes) else ends[:0]  # of the keys
        self.starts: Column = np.append(0, np.cumsum(sizes, dtype=np.int64))  # of the files
        self.size = int(self.starts[-1])
        self._extra = extra
        self._expected: dict[int, File] = {}  # files of an object store that were asked for
        self._end = -1  # of the last read
        self.digest: bytes | None = None  # once all of it was read, to be indexed
        self.problems: list[tuple[bytes, str]] = []
        if len(self._ends) != len(sizes) or len(labels) not in (0, len(sizes)):
            raise ValueError(f"{len(self._ends):,} keys of {len(sizes):,} files")
        if not sizes.all():
            raise ValueError("a record is an empty file")
        if size not in (-1, self.size):
            raise other_size(self.name, self.size, size)
        if len(sizes) and (outside := _OUTSIDE.search(self._keys)):
            raise ValueError(f"a path in it leads out of the folder, by {outside[0]!r}")

    def key(self, record: int) -> bytes:
        """Return the key of a file: its path below the folder."""
        start = int(self._ends[record - 1]) + 1 if record else 0
        return self._keys[start : int(self._ends[record])]

    def path(self, record: int) -> str:
        """Return the path of a file, as messages name it."""
        return path_in(self._storage, file_name(key_text(self.key(record))))

    def open(self, record: int) -> File:
        """Open a file, of the size that it had. Raises DamageError, StorageError."""
        size = int(self.starts[record + 1] - self.starts[record])
        if self._storage.remote:  # its size is compared when it is read
            expected = self._expected.pop(record, None)
            return (
                self._storage.open(key_text(self.key(record)), KnownFile(size, b"", b"", 0))
                if expected is None
                else expected
            )
        try:
            file = self._storage.open(key_text(self.key(record)))
        except FileNotFoundError:
            raise self._missing(record) from None
        if file.size != size:
            found = file.size
            file.close()
            raise other_size(self.path(record), found, size, "the folder")
        return file

    def _missing(self, record: int) -> DamageError:
        size = int(self.starts[record + 1] - self.starts[record])
        return DamageError(
            f"{self.path(record)}: the file is not there, and had {size:,} bytes when it was "
            "indexed. If the folder lies elsewhere (`shardio index --out`), say where: --root, "
            "in Python storage=shardio.Storage(root=...); else restore it, or index the folder "
            "anew"
        )

    def read(self, start: int, length: int) -> bytes:
        """Read `length` bytes from `start`. Raises DamageError."""
        parts = []
        if not 0 <= start <= start + length <= self.size:
            raise DamageError(
                f"{self.name}: its index asks for {length:,} bytes from byte {start:,} of files "
                f"of {self.size:,}; index the folder anew"
            )
        if self._storage.remote:  # each file is a request: they run at once
            self.will_need(start, length + _READ_AHEAD_BYTES * (start == self._end))
            self._end = start + length
        record = int(np.searchsorted(self.starts, start, side="right")) - 1
        while length > 0:
            begin = start - int(self.starts[record])
            count = min(length, int(self.starts[record + 1]) - start)
            with contextlib.closing(self.open(record)) as file:
                try:
                    parts.append(file.read(begin, count))
                except FileNotFoundError:
                    raise self._missing(record) from None
            start, length, record = start + count, length - count, record + 1
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def sha256(self) -> bytes:
        """Return the SHA-256 of the files behind each other, 32 bytes."""
        if self.digest is not None:
            return self.digest
        seal = hashlib.sha256()
        for record in range(len(self.starts) - 1):
            start = int(self.starts[record])
            seal.update(self.read(start, int(self.starts[record + 1]) - start))
        return seal.digest()

    def will_need(self, start: int, length: int, *, keep: bool = False) -> None:
        """Announce a range that will be read soon."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, start + length, side="left"))
        for record in range(max(first, 0), min(last, len(self.starts) - 1)):
            if self._storage.remote:
                if len(self._expected) >= _MAX_REQUESTED_FILES:
                    return
                if record not in self._expected:
                    file = self.open(record)
                    file.will_need(0, file.size)
                    self._expected[record] = file
                continue
            with contextlib.suppress(DamageError, StorageError):  # reading it says so
                file = self.open(record)
                file.will_need(0, file.size)
                file.close()

    def scattered(self) -> None:
        """Do nothing: files are read as a whole."""

    def close(self) -> None:
        """Let go of files that were asked for."""
        while self._expected:
            self._expected.popitem()[1].close()

    def scan(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) of each record. Raises DamageError, SourceError."""
        return zip(self.starts.tolist(), np.diff(self.starts).tolist(), strict=False)

    def walk(self) -> Iterator[Walked]:
        """Read each file once; those that are no images are noted for `extra`."""
        seal = hashlib.sha256()
        for record, (start, length) in enumerate(self.scan()):
            data = self.read(start, length)
            seal.update(data)
            if image_type(data[:32]) is None:
                why = f"is not an image: it begins with '{printable(data[:12])}'"
                self.problems.append((self.key(record), why))
            yield start, length, data, self.values(data, record)
        self.digest = seal.digest()

    def extra(self) -> bytes:
        """Return the description. Raises NoImageError, naming all files that are no images."""
        if self.problems:
            error = NoImageError(
                f"{self.name}: {show_count(len(self.problems), 'file')} of no image"
            )
            error.problems = self.problems
            raise error
        return self._extra

    def without(self, keys: Collection[bytes]) -> bytes:
        """Return the description of the run without some of its files."""
        left = np.array([i for i in range(len(self._ends)) if self.key(i) not in keys], np.int64)
        labels = None if self.labels is None else self.labels[left].tolist()
        return describe([*map(self.key, left.tolist())], np.diff(self.starts)[left], labels)

    def values(self, data: bytes, record: int) -> Values:
        """Return the values of a record. Raises ValueError."""
        values: Values = {KEY: self.key(record), "image": data}
        if self.labels is not None:
            values["label"] = int(self.labels[record])
        return values


class ImageFolderShard(ForeignShard):
    """One run of files. See formats.base.Shard."""

    _file: ImageRun

    def __init__(self, kind: type[ForeignFile], opening: Opening, info: ShardInfo) -> None:
        super().__init__(kind, opening, info)
        if (count := len(self._file.starts) - 1) != self.records:
            raise DamageError(
                f"{printable(info.name)}: its index describes {count:,} files, not "
                f"{self.records:,}; `shardio index` makes it anew"
            )

    def key(self, record: int) -> bytes:
        """Return the key of a record. Raises DamageError."""
        return self._file.key(record)

    def keys(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the keys of records [start, stop), which the index has."""
        return map(self.key, range(start, stop))

    def sha256(self) -> bytes:
        """Return the SHA-256 of the files of the run, one behind the other."""
        return self._file.sha256()

    def _where(self, record: int) -> str:
        return self._file.path(record)


def described_keys(description: bytes) -> list[bytes]:
    """Return the keys of a run, by its description. Raises ValueError."""
    keys: bytes = unpack(description)["keys"]
    return keys.split(b"\0") if keys else []


def describe(keys: Sequence[bytes], sizes: Column, labels: Sequence[int] | None) -> bytes:
    """Return the description of a run, with which it is opened."""
    return pack(
        {
            "keys": b"\0".join(keys),
            "sizes": sizes.astype("<u4").tobytes(),
            "labels": np.array(() if labels is None else labels, "<u4").tobytes(),
        }
    )
