"""One shard on its way to disk: records are gathered, hashed as they are written, named when whole.

Packing and Writer build shards with this; the formats know the bytes, storage/local.py the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..formats import PACKED, manifest
from ..formats.base import ShardInfo
from ..formats.record import RecordShard
from ..formats.sample import Schema
from ..storage import local
from ..storage.base import File

_WRITE = 1 << 20  # bytes gathered for one write call


class ShardWriter:
    """Records, one after the other, to a draft in a directory; `commit` gives it its name."""

    def __init__(
        self,
        directory: str,
        token: str,
        schema: Schema,
        dataset_id: bytes,
        number: int,
        format: str = "record",
        *,
        version: int = 0,
    ) -> None:
        self._encoder = PACKED[format].encoder(schema, dataset_id, number, version=version)
        self._format = format
        self._draft = local.Draft(
            directory, f"{number:05d}", token, patched=self._encoder.starts_last
        )
        self._pieces: list[bytes] = [self._encoder.header()]
        self._gathered = 0  # bytes of records among the pieces

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()  # unless it has its name

    @property
    def records(self) -> int:
        """Return how many records it has."""
        return self._encoder.records

    @property
    def blob_bytes(self) -> int:
        """Return the bytes of blobs so far."""
        return self._encoder.blob_bytes

    @property
    def size(self) -> int:
        """Return the bytes of records so far, and some of the header."""
        return self._draft.size + self._gathered

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a sample. Raises SampleError when it does not fit; it is not added then."""
        self._add(self._encoder.record(sample))

    def write_stored(self, stored: bytes | None) -> None:
        """Add a record as another shard of this number has it; None: one that is erased.

        Raises StorageError.
        """
        self._add(self._encoder.append_stored(stored))
        self.flush()

    def index_as(self, hashes: Sequence[int], columns: Mapping[str, Sequence[Any]]) -> None:
        """Index the records that `write_stored` added by these key hashes and values."""
        self._encoder.index_as(hashes, columns)

    def _add(self, record: tuple[bytes, ...]) -> None:
        self._pieces += record
        for piece in record:
            self._gathered += len(piece)

    def flush(self) -> None:
        """Hand over what is gathered, once that is enough. Raises StorageError."""
        if self._gathered >= _WRITE:
            self._hand_over()

    def finish(self) -> ShardInfo:
        """Write the index; return what the manifest will say. The file is still temporary."""
        self._pieces.append(self._encoder.finish())
        self._hand_over()
        if self._encoder.starts_last:
            self._draft.patch(self._encoder.start)
        encoder, digest = self._encoder, self._draft.digest()
        return ShardInfo(
            manifest.shard_name(encoder.number, digest, self._format),
            encoder.number,
            encoder.records,
            self._draft.size,
            digest,
            encoder.index_checksum,
        )

    def commit(self, name: str) -> None:
        """Flush to the device and take the final name."""
        self._draft.commit(name)

    def discard(self) -> None:
        """Remove the temporary file, if it is still there."""
        self._draft.discard()

    def _hand_over(self) -> None:
        self._draft.write(b"".join(self._pieces))
        self._pieces, self._gathered = [], 0


def open_own(file: File, name: str, dataset_id: bytes | None = None) -> RecordShard:
    """Open a shard that shardio packed, by the ending of its name. Raises as opening it does."""
    packed = next(row for row in PACKED.values() if name.endswith(row.suffix))
    return packed.shard(file, dataset_id=dataset_id)
