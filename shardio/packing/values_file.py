"""Files of the values of a field for one shard: reading those that are there, writing one anew.

Who annotates, who erases records, and who gives a shard another number writes them so.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np

from ..errors import SampleError
from ..formats import PACKED
from ..formats.base import Opening, Overlay, ShardInfo
from ..formats.manifest import overlay_name
from ..formats.overlay import (
    ROW,
    files_of_shard,
    open_values,
    overlay_schema,
    rows_and_values,
    rows_of,
)
from ..formats.sample import Schema
from ..formats.version import Numbers
from ..names import KEY
from ..storage import local
from .shard_writer import ShardWriter

Values = Iterable[tuple[int, Any]]  # numbers of records in the shard, ascending, and their values


@contextlib.contextmanager
def values_of(
    opening: Opening,
    field: str,
    number: int,
    records: int,
    some: Collection[ShardInfo] | None = None,
) -> Iterator[list[Values]]:
    """Open the values of a field for a shard of so many records, file by file, the oldest first.

    some: only these files. Raises DamageError, StorageError.
    """
    with contextlib.ExitStack() as opened:
        files = list[Values]()
        for beside, here, info in files_of_shard(opening, number):
            if beside.field == field and (some is None or info in some):
                file = open_values(here, info, PACKED["record"].open)
                opened.callback(file.close)
                files.append(rows_and_values(file, records))
        yield files


def write_without(
    folder: str, here: Opening, beside: Overlay, info: ShardInfo, shard: ShardInfo, gone: Numbers
) -> tuple[ShardInfo | None, int]:
    """Write a file of values of a shard anew, without those of some records.

    Returns what the manifest says of the file then, and how many went: of none, the file stays as
    it is; of all, there is none (None). Raises DamageError, StorageError.
    """
    with contextlib.closing(open_values(here, info, PACKED["record"].open)) as file:
        left = np.isin(rows_of(file, shard.records), gone, invert=True).tolist()
        if all(left):
            return info, 0
        pairs = compress(rows_and_values(file, shard.records), left)
        new = None
        if any(left):
            new = write_values(folder, here.dataset_id, beside, shard.number, pairs, [])
        return new, left.count(False)


def write_values(
    folder: str,
    dataset_id: bytes,
    beside: Overlay,
    number: int,
    values: Values,
    fresh: list[str],
    named: Callable[[int], bytes] = lambda row: b"%d" % row,
) -> ShardInfo:
    """Write a file of values of a field for a shard; return what the manifest says of it.

    fresh: gets its path, if it was not there. named: what messages call a record. Raises
    SampleError, StorageError.
    """
    schema = overlay_schema(beside.field, beside.kind)
    with ShardWriter(folder, local.token(), schema, dataset_id, number) as writer:
        for record, value in values:
            try:
                writer.write({KEY: b"%d" % record, ROW: record, beside.field: value})
            except SampleError:
                own = Schema([(KEY, "key"), (beside.field, beside.kind)])
                own.encode({KEY: named(record), beside.field: value})
                raise
            writer.flush()
        info = writer.finish()
        info = replace(info, name=overlay_name(number, info.sha256))
        path = os.path.join(folder, info.name)
        fresh += [] if os.path.lexists(path) else [path]
        writer.commit(info.name)
        return info
