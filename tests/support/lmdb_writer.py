"""Writes LMDB databases by liblmdb, as other libraries do."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lmdb


def write(path: Path, entries: Mapping[bytes, bytes], batch: int = 1000, **options: Any) -> Path:
    """Write a database of one file, `batch` entries a transaction, in the order given."""
    env = lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 28, sync=False, **options)
    keys = list(entries)
    for start in range(0, len(keys), batch):
        with env.begin(write=True) as transaction:
            for key in keys[start : start + batch]:
                transaction.put(key, entries[key])
    env.close()
    return path
