"""What every shard format provides: records by number, in storage order, checked on every read.

A format turns bytes into samples and samples into bytes. It opens nothing (storage does), and
knows nothing of datasets: not the order, not the classes, not the other shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..storage.base import KnownFile, Location
from .sample import Sample, Schema

Column = np.ndarray[Any, Any]
MAX_RECORDS = (1 << 32) - 1  # in a shard


@dataclass(frozen=True)
class ShardInfo:
    """An entry of the manifest: one shard."""

    name: str  # the file, relative to the manifest
    number: int  # position in the manifest
    records: int
    size: int  # bytes of the file
    sha256: bytes  # of the file, 32 bytes
    index_checksum: int


@dataclass(frozen=True)
class Overlay:
    """A field whose values lie beside the shards, in files of the shards that have some."""

    field: str
    kind: str
    added: bool  # the shards have no such field; else these values replace theirs
    # By the number of the shard, the oldest first: a value replaces one of a file before.
    files: Mapping[int, tuple[ShardInfo, ...]]

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(info.size for infos in self.files.values() for info in infos)


@dataclass(frozen=True)
class Opening:
    """A request to open a shard: all that is needed besides its entry in the manifest."""

    storage: Location  # where the shards are
    index_location: Location  # of manifest and sidecars; another one if indexed with --out
    dataset_id: bytes
    schema: Schema  # of what the shards store
    options: Mapping[str, Any]  # of the manifest: how the dataset was packed or indexed
    verify: bool = True  # formats whose index is not checked on every read check it when opened
    classes: int | None = None  # how many there are
    overlays: Sequence[Overlay] = ()  # which are beside the manifest
    wanted: frozenset[str] | None = None  # fields that samples need at least; None: all


def known_file(opening: Opening, info: ShardInfo) -> KnownFile:
    """Return what the manifest knows of a shard's file."""
    return KnownFile(info.size, info.sha256, opening.dataset_id, info.number)


class Sizes(Protocol):
    """Bytes of the records of a shard, to be indexed: by [:] they are (records,) int64."""

    def __getitem__(self, chosen: Any, /) -> Any:
        """Return those of one record; of a slice or an array of numbers, (n,) int64."""


class Readable(Protocol):
    """A file, or a part of one, that is read by range."""

    size: int  # bytes

    @property
    def name(self) -> str:
        """Return its name, as messages print it."""

    def read(self, start: int, length: int) -> bytes:
        """Read `length` bytes from `start`."""


class Shard(Protocol):
    """One open shard. All samples are dicts of owned values in the order of the fields."""

    name: str
    records: int
    memory: int  # bytes that it takes while it is open, where those are many

    @property
    def sizes(self) -> Sizes:
        """Return the bytes that reading each record costs."""

    @property
    def key_hashes(self) -> Column:
        """Return the low half of the xxh3_64 of each key: (records,) uint32. Raises DamageError."""

    @property
    def columns(self) -> Mapping[str, Column]:
        """Return small scalar fields by name, one value a record, masked where None.

        Raises DamageError.
        """

    def read(self, record: int) -> Sample:
        """Read one record. Raises DamageError if it differs from what was packed."""

    def scan(self, start: int, stop: int, *, text: bool = False) -> Iterator[Sample]:
        """Yield records [start, stop) in storage order, by large reads. text: with keys as str."""

    def hold(self, start: int, stop: int) -> Sequence[bytes | None]:
        """Return records [start, stop) as bytes, to be decoded later; None: `read` it alone."""

    def decode(self, record: int, held: bytes) -> Sample:
        """Decode what `hold` gave for a record. Raises DamageError."""

    def key(self, record: int) -> bytes:
        """Return the key of a record, read without its blobs where the format allows that.

        Raises DamageError when it is not the one in the index.
        """

    def keys(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the keys of records [start, stop), by few round trips. Raises DamageError."""

    def offset(self, record: int) -> int:
        """Return the byte at which a record begins, for messages."""

    def checksums(self, record: int) -> tuple[int, int] | None:
        """Return the checksum that is stored of a record, and that of its bytes as they are.

        None: the format keeps none of a record. Raises DamageError if there are no such bytes.
        """

    def will_need(self, start: int, stop: int, *, keep: bool = False) -> None:
        """Announce that records [start, stop) will be read soon; keep: more than once, perhaps."""

    def scattered(self) -> None:
        """Say that records will be read in no order, and announced by will_need."""

    def check(self) -> None:
        """Compare all that no reading of a record checks. Raises DamageError."""

    def close(self) -> None:
        """Give descriptors back."""
