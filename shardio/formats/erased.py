"""Versions whose records were erased: which shards took the place of theirs, what is gone of them.

The newest manifest names the files that must go, each with the shard that took its place: with the
same records, but for those that were erased. So an older version that had dropped these records
already is read from the new files; one that shows one of them cannot be read any more.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import DamageError
from ..storage.base import Location
from .base import ShardInfo
from .lmdb import LmdbShard
from .manifest import Manifest, shard_name
from .record import RecordShard

_SHARDS: dict[str, type[RecordShard]] = {"record": RecordShard, "lmdb": LmdbShard}
Numbers = np.ndarray[Any, np.dtype[np.int64]]


def after_erasing(one: Manifest, newest: Manifest) -> Manifest:
    """Return a version with the shards that have its records now; itself, where all are there."""
    if not newest.erased or one.names is not None:
        return one
    sizes, digests = one.shard_sizes.copy(), one.shard_sha256.copy()
    indexes, blobs = one.shard_index.copy(), one.blob_bytes
    for number in range(one.shards):
        for _ in newest.erased:  # one may have followed another; whatever is written, this ends
            name = shard_name(number, digests[number].tobytes(), one.format)
            if (found := newest.erased.get(name)) is None:
                break
            sizes[number], indexes[number] = found.size, found.index_checksum
            digests[number] = np.frombuffer(found.sha256, np.uint8)
            blobs -= found.erased_bytes
    if np.array_equal(digests, one.shard_sha256):
        return one
    return replace(
        one, shard_sizes=sizes, shard_sha256=digests, shard_index=indexes, blob_bytes=max(0, blobs)
    )


def erased_since(index: Location, one: Manifest, now: Manifest) -> Numbers:
    """Return the numbers of the records of a version that were erased since, dropped or not.

    now: what `after_erasing` made of it. Raises DamageError, VersionError.
    """
    starts = np.concatenate([[0], np.cumsum(one.shard_records)])
    found = [np.empty(0, np.int64)]
    for number in np.flatnonzero((one.shard_sha256 != now.shard_sha256).any(axis=1)).tolist():
        info: ShardInfo = now.shard(number)
        try:
            file = index.open(info.name)
        except FileNotFoundError:
            raise DamageError(now.missing(info, index, index)) from None
        with contextlib.closing(file):
            shard = _SHARDS[one.format](file, info, one.dataset_id, schema=one.schema)
            found.append(shard.erased + starts[number])
    return np.concatenate(found)
