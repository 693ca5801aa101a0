"""Search the keys of records for a text, for a bounded time, and go on from there.

Keys lie in the records; the index has only their hashes. So a search reads records, in the order
that is shown, until the page is full or its time is over. Small records are read in large blocks,
2 us each; of large ones only the heads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Executor
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..dataset.reader import Reader
from ..errors import ShardioError
from ..formats.base import Shard
from ..names import KEY, key_bytes
from ..order.rng import Int64s
from .rows import Rows, Sorted

CHUNK = 1024  # records between two looks at the clock
_REMOTE = 256  # the same, of an object store: the requests that are made at once
_SELECTED = 1 << 16  # of a sorted order, of which each part takes a pass over all records
_SCATTERED = 64  # the same, of records that are read one by one
_SMALL = 4096  # bytes of a mean record up to which a scan costs less than reading the heads alone


class Found(NamedTuple):
    """Positions of records whose keys match, and where the search stands."""

    positions: list[int]
    next: int  # the first position that was not looked at
    searched: int
    unread: int  # records whose keys could not be read


def search(
    reader: Reader,
    rows: Rows,
    text: str,
    start: int,
    count: int,
    budget_s: float,
    pool: Executor | None = None,
) -> Found:
    """Look from a position on for keys that contain a text, until `count` are found.

    The case of ASCII letters does not matter. pool: threads that wait for an object store.
    """
    wanted = key_bytes(text).lower()
    end, positions, unread, at = time.monotonic() + budget_s, list[int](), 0, start
    small = reader.mean_bytes <= _SMALL
    chunk = _SELECTED if isinstance(rows, Sorted) else _REMOTE if pool is not None else CHUNK
    while at < rows.total and len(positions) < count:
        numbers = rows.numbers(at, min(at + chunk, rows.total))
        together = bool(len(numbers) > 1 and (np.diff(numbers) == 1).all())
        for part in np.array_split(numbers, 1 if together else -(-len(numbers) // _SCATTERED)):
            for key in _keys(reader, part, together, small, pool):
                unread += key is None
                if key is not None and wanted in key.lower():
                    positions.append(at)
                at += 1
                if len(positions) == count:
                    break
            if len(positions) == count or time.monotonic() > end:
                return Found(positions, at, at - start, unread)
    return Found(positions, at, at - start, unread)


def _keys(
    reader: Reader, numbers: Int64s, together: bool, small: bool, pool: Executor | None
) -> Iterator[bytes | None]:
    """Yield the keys of these records; None where one cannot be read."""
    if pool is not None and not together:
        yield from pool.map(partial(_key_of, reader), numbers.tolist())
        return
    shards = np.searchsorted(reader.starts, numbers, side="right") - 1
    cuts = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(numbers)]
    for a, b in pairwise(cuts):
        try:
            shard = reader.shard(int(shards[a]))
        except ShardioError:
            yield from [None] * (b - a)
            continue
        records = (numbers[a:b] - reader.starts[shards[a]]).tolist()
        if not together:
            yield from (_key(shard, record) for record in records)
            continue
        done = 0
        try:
            first, stop = records[0], records[-1] + 1
            several: Iterator[bytes] = (
                (sample[KEY] for sample in shard.scan(first, stop))
                if small
                else shard.keys(first, stop)
            )
            for key in several:
                yield key
                done += 1
        except ShardioError:  # one of them is damaged
            yield from (_key(shard, record) for record in records[done:])


def _key_of(reader: Reader, number: int) -> bytes | None:
    at, record = reader.locate(number)
    try:
        return _key(reader.shard(at), record)
    except ShardioError:
        return None


def _key(shard: Shard, record: int) -> bytes | None:
    try:
        return shard.key(record)
    except ShardioError:
        return None
