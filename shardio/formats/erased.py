"""Versions whose records were erased: which files took the place of theirs, what is gone of them.

The newest manifest names the files that must go, each with the one that took its place: with the
same records, or values beside them, but for those that were erased. So an older version that had
dropped these records already is read from the new files; one that shows one of them cannot be read
any more. A file that only such versions have goes without a successor: its size is 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import DamageError
from ..storage.base import Location
from .base import Overlay, ShardInfo
from .lmdb import LmdbShard
from .manifest import Manifest, Successor, overlay_name, shard_name
from .record import RecordShard

_SHARDS: dict[str, type[RecordShard]] = {"record": RecordShard, "lmdb": LmdbShard}
Numbers = np.ndarray[Any, np.dtype[np.int64]]


def after_erasing(one: Manifest, newest: Manifest) -> Manifest:
    """Return a version with the files that have its records now; itself, where all are there."""
    if not newest.erased or one.names is not None:
        return one
    sizes, digests = one.shard_sizes.copy(), one.shard_sha256.copy()
    indexes, blobs = one.shard_index.copy(), one.blob_bytes
    for number in range(one.shards):
        info = one.shard(number)
        for found in _followed(info.name, number, newest.erased, one.format):
            sizes[number], indexes[number] = found.size, found.index_checksum
            digests[number] = np.frombuffer(found.sha256, np.uint8)
            blobs -= found.gone if found.size else 0
    overlays = tuple(_overlay(beside, newest.erased) for beside in one.overlays)
    sources = None if one.sources is None or one.sources.name in newest.erased else one.sources
    same = np.array_equal(digests, one.shard_sha256) and overlays == one.overlays
    if same and sources is one.sources:
        return one
    return replace(
        one,
        shard_sizes=sizes,
        shard_sha256=digests,
        shard_index=indexes,
        blob_bytes=max(0, blobs),
        overlays=overlays,
        sources=sources,
    )


def _followed(
    name: str, number: int, erased: Mapping[str, Successor], format: str | None
) -> Iterator[Successor]:
    """Yield what took the place of a file, one after the other. format: None: a file of values."""
    for _ in erased:  # one may have followed another; whatever is written, this ends
        if (found := erased.get(name)) is None:
            return
        yield found
        name = (
            overlay_name(number, found.sha256)
            if format is None
            else shard_name(number, found.sha256, format)
        )


def _overlay(beside: Overlay, erased: Mapping[str, Successor]) -> Overlay:
    """Return a field with the files that have its values now."""
    files = {
        number: tuple(info for info in (_values(one, erased) for one in infos) if info.records)
        for number, infos in beside.files.items()
    }
    return replace(beside, files={number: infos for number, infos in files.items() if infos})


def _values(info: ShardInfo, erased: Mapping[str, Successor]) -> ShardInfo:
    """Return the file that has the values of another one now; of no records: none has."""
    for found in _followed(info.name, info.number, erased, None):
        info = ShardInfo(
            overlay_name(info.number, found.sha256),
            info.number,
            max(0, info.records - found.gone),
            found.size,
            found.sha256,
            found.index_checksum,
        )
    return info


def lost_with_shards(one: Manifest, newest: Manifest) -> int:
    """Count the records of a version that were erased since with shards that nothing followed."""
    infos = map(one.shard, range(one.shards))
    followed = (_followed(info.name, info.number, newest.erased, one.format) for info in infos)
    return sum(found.gone for each in followed for found in each if not found.size)


def erased_since(index: Location, one: Manifest, now: Manifest) -> Numbers:
    """Return the numbers of the records of a version that were erased since, dropped or not.

    But of shards that nothing followed. now: what `after_erasing` made of it. Raises DamageError,
    VersionError.
    """
    starts = np.concatenate([[0], np.cumsum(one.shard_records)])
    found = [np.empty(0, np.int64)]
    for number in np.flatnonzero((one.shard_sha256 != now.shard_sha256).any(axis=1)).tolist():
        info: ShardInfo = now.shard(number)
        if not info.size:
            continue
        try:
            file = index.open(info.name)
        except FileNotFoundError:
            raise DamageError(now.missing(info, index, index)) from None
        with contextlib.closing(file):
            shard = _SHARDS[one.format](file, info, one.dataset_id, schema=one.stored_schema)
            found.append(shard.erased + starts[number])
    return np.concatenate(found)
