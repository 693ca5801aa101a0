"""The formats a shard can have, by the name in the manifest: those that shardio packs, and those
of others, which are read in place. A format is one file beside this one, and one row here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial

from ..errors import OptionError
from . import lmdb, record
from .base import Opening, Shard, ShardInfo
from .foreign import imagefolder, mds, parquet, recordio, tfrecord
from .foreign import lmdb as lmdb_foreign
from .foreign import webdataset as tar
from .foreign.base import ForeignShard, Layout

# Layouts, and what the names of their files look like. The first that fits has a file; compressed
# ones fit too, so that they are refused with the command that converts them.
_LAYOUTS: list[tuple[Layout, str]] = [
    (tar.TarLayout(), r"(?i)\.(tar(\.(gz|zst|zstd|bz2|xz|lz4))?|t[gbx]z|tbz2|tzst)\Z"),
    (mds.MdsLayout(), r"\.mds(\.(zstd|gz|bz2|br|snappy))?\Z"),
    (lmdb_foreign.LmdbForeignLayout(), r"(?i)(^|/)(?!lock\.mdb\Z)[^/]+\.(mdb|lmdb)\Z"),
    (parquet.ParquetLayout(), r"(?i)\.(parquet|pq|parq)\Z"),
    (recordio.RecordIOLayout(), r"(?i)\.rec\Z"),
    (
        tfrecord.TFRecordLayout(),
        r"(?i)\.(tfrecords?|tfrec|tfr)(\.(gz|zz|zlib))?(-\d{5}-of-\d{5})?\Z|-\d{5}-of-\d{5}\Z",
    ),
]
FOREIGN: dict[str, Layout] = {
    **{layout.name: layout for layout, _ in _LAYOUTS},
    "imagefolder": imagefolder.ImageFolderLayout(),  # where no other format has a file
}
FOREIGN_FILES = {layout.name: re.compile(pattern) for layout, pattern in _LAYOUTS}
FORMATS: dict[str, Callable[[Opening, ShardInfo], Shard]] = {
    "record": record.open_shard,
    "lmdb": lmdb.open_shard,
    **{name: partial(ForeignShard, layout) for name, layout in FOREIGN.items()},
    "parquet": parquet.open_shard,
    "imagefolder": imagefolder.open_shard,
}


def open_shard(format: str, opening: Opening, info: ShardInfo) -> Shard:
    """Open one shard. Raises FileNotFoundError, StorageError, DamageError, VersionError."""
    return FORMATS[format](opening, info)


def sha256(format: str, opening: Opening, info: ShardInfo) -> bytes:
    """SHA-256 of a shard's file, or files, 32 bytes. Raises as opening it does."""
    if format == "imagefolder":
        return imagefolder.open_shard(opening, info).sha256()
    file = opening.storage.open(info.name)
    try:
        return file.sha256()
    finally:
        file.close()


def claims(names: Iterable[str]) -> dict[str, list[str]]:
    """The files that each format claims by their names."""
    claimed: dict[str, list[str]] = {}
    for name in names:
        for format, pattern in FOREIGN_FILES.items():
            if pattern.search(name):
                claimed.setdefault(format, []).append(name)
                break
    return claimed


def check_format(name: str) -> str:
    """The name, if a format has it. Raises OptionError."""
    if name not in FORMATS:
        known = ", ".join(FORMATS)
        raise OptionError(f"format {name!r}: no format has this name; available: {known}")
    return name
