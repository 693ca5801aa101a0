"""The formats of shards, one row each: those that shardio packs, and those of others.

A format is its modules and one row here. They never import this table. A file belongs to the first
row whose pattern its name matches.

    sample    a sample, to and from the bytes of one record
    base      what every shard provides, and what opening one needs
    index     the index of a shard: key hashes, columns of small values
    places    where the records of a shard lie, in little memory
    record    the record shard
    lmdb      the LMDB shard: records as values of one environment
    manifest  the list of a dataset's shards; the commit
    overlay   fields beside the shards, that were added or corrected
    version   older manifests, records that were dropped, tags
    erased    versions whose records were erased since
    tree      records written as files, which never leave their folder
    foreign   formats of other libraries
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import DamageError, OptionError, VersionError, printable, there_are
from .base import Opening, Shard, ShardInfo, known_file
from .foreign.arrow import ArrowFile
from .foreign.base import ForeignFile, ForeignShard
from .foreign.caffe_writer import Caffe
from .foreign.imagefolder import ImageFolderShard, ImageRun
from .foreign.imagefolder_writer import ImageFolder
from .foreign.litdata import LitDataFile
from .foreign.lmdb import LmdbFile
from .foreign.mds import MdsFile
from .foreign.mds_writer import Mds
from .foreign.parquet import ParquetFile
from .foreign.parquet_writer import HubParquet
from .foreign.recordio import RecordIOFile
from .foreign.recordio_writer import RecordIO
from .foreign.row_groups import GroupedFile, GroupedShard
from .foreign.tfrecord import TFRecordFile
from .foreign.tfrecord_writer import TFRecord
from .foreign.webdataset import TarFile
from .foreign.webdataset_writer import WebDataset
from .foreign.writer import FormatWriter
from .lmdb import START, LmdbEncoder, LmdbShard
from .manifest import SUFFIXES, Manifest
from .overlay import files_of_shard, overlaid
from .record import ATTEMPTS, MAGIC, RecordEncoder, RecordShard, most_of_end


@dataclass(frozen=True)
class PackedFormat:
    """A format that shardio packs."""

    encoder: type[RecordEncoder]
    shard: type[RecordShard]
    suffix: str  # of the names of its files
    magic: bytes  # with which they begin

    def open(self, opening: Opening, info: ShardInfo) -> Shard:
        """Open one shard. Raises as `open_shard`."""
        # A network may damage what the store has undamaged.
        for _ in range(ATTEMPTS if opening.storage.remote else 0):
            try:
                return self._open(opening, info)
            except (DamageError, VersionError):  # bytes that say which version it is, too
                end = most_of_end(info.records, opening.schema)
                opening.storage.distrust_end(known_file(opening, info), end)
        return self._open(opening, info)

    def _open(self, opening: Opening, info: ShardInfo) -> Shard:
        file = opening.storage.open(info.name, known_file(opening, info))
        try:
            return self.shard(
                file, info, opening.dataset_id, verify=opening.verify, schema=opening.schema
            )
        except BaseException:
            file.close()
            raise


@dataclass(frozen=True)
class ForeignFormat:
    """A format of others: files of it are read in place."""

    file: type[ForeignFile]
    names: str  # pattern; compressed files match, too: the error says what converts them
    writer: type[FormatWriter] | None = None  # exports; None: shardio does not write it
    exported_as: str = ""  # where that is not the format's name
    shard: type[ForeignShard] = ForeignShard

    def open(self, opening: Opening, info: ShardInfo) -> Shard:
        """Open one shard. Raises as `open_shard`."""
        return self.shard(self.file, opening, info)


PACKED = {
    "record": PackedFormat(RecordEncoder, RecordShard, SUFFIXES["record"], MAGIC),
    "lmdb": PackedFormat(LmdbEncoder, LmdbShard, SUFFIXES["lmdb"], START),
}
FOREIGN = {
    "webdataset": ForeignFormat(
        TarFile, r"(?i)\.(tar(\.(gz|zst|zstd|bz2|xz|lz4))?|t[gbx]z|tbz2|tzst)\Z", WebDataset
    ),
    "tfrecord": ForeignFormat(
        TFRecordFile,
        r"(?i)\.(tfrecords?|tfrec|tfr)(\.(gz|zz|zlib))?(-\d{5}-of-\d{5})?\Z|-\d{5}-of-\d{5}\Z",
        TFRecord,
    ),
    "recordio": ForeignFormat(RecordIOFile, r"(?i)\.rec\Z", RecordIO),
    "mds": ForeignFormat(MdsFile, r"\.mds(\.(zstd|gz|bz2|br|snappy))?\Z", Mds),
    "lmdb-foreign": ForeignFormat(
        LmdbFile, r"(?i)(^|/)(?!lock\.mdb\Z)[^/]+\.(mdb|lmdb)\Z", Caffe, "lmdb-caffe"
    ),
    "parquet": ForeignFormat(
        ParquetFile, r"(?i)\.(parquet|pq|parq)\Z", HubParquet, shard=GroupedShard
    ),
    "arrow": ForeignFormat(ArrowFile, r"(?i)\.arrow\Z", shard=GroupedShard),
    "litdata": ForeignFormat(LitDataFile, r"(^|/)chunk-\d+-\d+(\.zstd(:\d+)?)?\.bin\Z"),
    "imagefolder": ForeignFormat(  # where no other format has a file
        ImageRun, r"(?!)", ImageFolder, shard=ImageFolderShard
    ),
}
FORMATS: dict[str, PackedFormat | ForeignFormat] = {**PACKED, **FOREIGN}  # by the manifest's names
# Their rows lie in groups that are decoded as a whole: another order costs one group a record.
GROUPED = {name for name, row in FOREIGN.items() if issubclass(row.file, GroupedFile)}
EXPORTED = {row.exported_as or name: row.writer for name, row in FOREIGN.items() if row.writer}


def open_shard(format: str, opening: Opening, info: ShardInfo) -> Shard:
    """Open one shard. Raises FileNotFoundError, StorageError, DamageError, VersionError."""
    shard = FORMATS[format].open(opening, info)
    if not opening.overlays:
        return shard
    return overlaid(shard, opening, info.number, PACKED["record"].open)


def expect_shard(format: str, opening: Opening, info: ShardInfo) -> None:
    """Announce that a shard will be opened soon: an object store is asked for its end."""
    if format in PACKED:
        end = most_of_end(info.records, opening.schema)
        opening.storage.will_open(info.name, known_file(opening, info), end)
    for _, here, of_values in files_of_shard(opening, info.number):
        end = most_of_end(of_values.records, here.schema)
        here.storage.will_open(of_values.name, known_file(here, of_values), end)


def sha256(format: str, opening: Opening, info: ShardInfo) -> bytes:
    """Return the SHA-256 of a shard's file, or files, 32 bytes. Raises as opening it does."""
    if format == "imagefolder":
        return ImageFolderShard(ImageRun, opening, info).sha256()
    with contextlib.closing(opening.storage.open(info.name, known_file(opening, info))) as file:
        return file.sha256()


def claims(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each format, by their names; the first that matches counts."""
    claimed: dict[str, list[str]] = {}
    for name in names:
        for format, row in FOREIGN.items():
            if re.search(row.names, name):
                claimed.setdefault(format, []).append(name)
                break
    return claimed


def begins_packed(start: bytes) -> bool:
    """Return True if a file that begins so may be a packed shard, or the torn beginning of one."""
    return any(row.magic.startswith(start[: len(row.magic)]) for row in PACKED.values())


def check_format(one: Manifest) -> None:
    """Raise VersionError if shards of a dataset are of a format that is not known here."""
    if one.format not in FORMATS:
        raise VersionError(
            f"{printable(one.where)}: shards of format {printable(one.format)!r}, written by "
            f"shardio {printable(one.library)}; this one knows {', '.join(FORMATS)}"
        )


def check_packed(name: str) -> str:
    """Return the name if shardio packs shards of this format. Raises OptionError."""
    if name not in PACKED:
        raise OptionError(
            f"format {printable(repr(name))}: shardio packs {' and '.join(PACKED)} shards; "
            "`shardio export` writes other formats from these"
        )
    return name


def check_foreign(name: str) -> str:
    """Return the name if files of this format are read in place. Raises OptionError."""
    if name not in FOREIGN:
        raise OptionError(
            f"--format {printable(name)}: not a format that is read in place; "
            f"{there_are(FOREIGN, name)}"
        )
    return name


def exporter(name: str) -> type[FormatWriter]:
    """Return the class that exports to this format. Raises OptionError."""
    if name not in EXPORTED:
        raise OptionError(
            f"format {printable(str(name))!r} is not one that is exported; "
            f"{there_are(EXPORTED, str(name))}"
        )
    return EXPORTED[name]
