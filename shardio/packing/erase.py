"""Erase records: write the shards that have them anew, without their bytes, beside the old ones.

The others keep their numbers, bytes and checksums, so selections, states and exclusions hold. So
are files of values beside them written anew, those of older versions included. The old files go by
`gc`, which counts them as needed by no version (formats/erased.py). Killed anywhere, the old
version is whole: the manifest that names the new files is renamed last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..dataset.reader import Reader
from ..errors import OptionError, printable
from ..formats import PACKED, open_shard
from ..formats.base import Column, Opening, Overlay, Shard, ShardInfo
from ..formats.erased import after_erasing
from ..formats.manifest import Manifest, Successor
from ..formats.overlay import files_of_shard, open_values, rows_and_values, rows_of
from ..formats.record import ERASED, FRAME, RecordShard, erased_in
from ..formats.version import NONE, Numbers, history
from ..storage import local
from .place import Place, Workspace
from .process_pool import Report
from .shard_writer import ShardWriter
from .values_file import write_values

_ZERO: Mapping[str, Any] = {"b": False, "f": 0.0}  # what takes the place of a value; of others 0


@dataclass
class Erasing:
    """Records of one dataset that are to be erased: their numbers in each shard."""

    place: Place
    reader: Reader
    numbers: Mapping[int, Numbers] = field(default_factory=dict)

    @property
    def records(self) -> int:
        """Return how many records are to be erased."""
        return sum(map(len, self.numbers.values()))

    @property
    def bytes(self) -> int:
        """Return the bytes of the files that are to be written anew: they take these, or less."""
        sizes = self.reader.manifest.shard_sizes[[*self.numbers]].sum()
        return int(sizes) + sum(info.size for _, _, info in self._values())

    def write(self, report: Report) -> Manifest:
        """Write the new files; return a manifest that names them. Raises StorageError."""
        dataset, token = self.reader.manifest, local.token()
        sizes, digests = dataset.shard_sizes.copy(), dataset.shard_sha256.copy()
        indexes, blobs = dataset.shard_index.copy(), dataset.blob_bytes
        erased = dict(dataset.erased)
        with self.place.workspace() as space:
            for number, records in self.numbers.items():
                info = dataset.shard(number)
                new, gone = self._write(space.folder, info, records, token)
                space.take(new)
                report.add(info.size)
                report.show()
                sizes[number], indexes[number] = new.size, new.index_checksum
                digests[number] = np.frombuffer(new.sha256, np.uint8)
                erased[info.name] = Successor(new.size, new.sha256, new.index_checksum, gone)
                blobs -= gone
            for beside, opening, info in self._values():
                gone = self._gone_of(opening, info)
                if gone == info.records:
                    erased[info.name] = Successor(0, bytes(32), 0, gone)
                elif gone:
                    new = self._write_values(space, beside, opening, info)
                    erased[info.name] = Successor(new.size, new.sha256, new.index_checksum, gone)
                report.add(info.size)
                report.show()
        after = replace(
            dataset,
            shard_sizes=sizes,
            shard_sha256=digests,
            shard_index=indexes,
            blob_bytes=max(0, blobs),
            erased=erased,
        )
        return after_erasing(after, after)

    def _values(self) -> list[tuple[Overlay, Opening, ShardInfo]]:
        """Return the files of values for the shards that are written anew, of all versions.

        In another version a shard of the same number may be another one: then its records are.
        """
        index, newest = self.reader.index, self.reader.manifest
        found = {}
        for each in history(index, newest):
            one = after_erasing(each, newest)
            if one.dataset_id != newest.dataset_id:
                continue
            opening = one.opening(index)
            for number in self.numbers:
                same = (
                    number < one.shards and one.shard(number).sha256 == newest.shard(number).sha256
                )
                for file in files_of_shard(opening, number) if same else ():
                    found[file[-1].name] = file
        return [*found.values()]

    def _gone_of(self, opening: Opening, info: ShardInfo) -> int:
        """Return of how many of the records a file has values. Raises DamageError."""
        with contextlib.closing(open_values(opening, info, PACKED["record"].open)) as file:
            return int(np.isin(self._rows_of(file), self.numbers[info.number]).sum())

    def _rows_of(self, file: RecordShard) -> Column:
        """Return the records that a file has values of. Raises DamageError."""
        return rows_of(file, int(self.reader.manifest.shard_records[file.number]))

    def _write_values(
        self, space: Workspace, beside: Overlay, opening: Opening, info: ShardInfo
    ) -> ShardInfo:
        """Write a file of values without those of the records. Raises DamageError, StorageError."""
        gone = {*self.numbers[info.number].tolist()}
        with contextlib.closing(open_values(opening, info, PACKED["record"].open)) as file:
            pairs = rows_and_values(file, int(self.reader.manifest.shard_records[file.number]))
            kept = ((row, value) for row, value in pairs if row not in gone)
            id_ = opening.dataset_id
            new = write_values(space.folder, id_, beside, info.number, kept, [])
        space.take(new)
        return new

    def _write(
        self, folder: str, info: ShardInfo, records: Numbers, token: str
    ) -> tuple[ShardInfo, int]:
        """Write one shard anew into a folder.

        Returns what the manifest will say, and the bytes of blobs that were erased.
        Raises DamageError, StorageError.
        """
        dataset = self.reader.manifest
        opening = replace(dataset.opening(self.reader.index), overlays=())
        with contextlib.closing(open_shard(dataset.format, opening, info)) as shard:
            assert isinstance(shard, RecordShard)
            gone, blobs = {*records.tolist()}, 0
            schema, id_ = dataset.stored_schema, dataset.dataset_id
            writer = ShardWriter(
                folder, token, schema, id_, info.number, dataset.format, version=ERASED
            )
            try:
                for record, stored in enumerate(shard.stored(0, shard.records)):
                    if record in gone:
                        _, length, head = FRAME.unpack_from(stored)
                        blobs += max(0, min(length, len(stored)) - head)  # whatever it says
                    writer.write_stored(None if record in gone else stored)
                    writer.flush()
                hashes = shard.key_hashes.copy()
                hashes[records] = 0
                writer.index_as(hashes.tolist(), dict(_columns(shard, records)))
                new = writer.finish()
                writer.commit(new.name)
            finally:
                writer.discard()
        return new, blobs


def _columns(shard: Shard, gone: Numbers) -> Iterator[tuple[str, list[Any]]]:
    """Yield the columns of a shard, without what they say of these records.

    It is None where the column has a None, and else 0: so a column of a type stays of its type.
    """
    for name, column in shard.columns.items():
        values = column.tolist()  # None where masked
        masked = isinstance(column, np.ma.MaskedArray)
        none = None if masked else _ZERO.get(column.dtype.kind, 0)
        for record in gone.tolist():
            values[record] = none
        yield name, values


def choose(place: Place, reader: Reader, numbers: Numbers) -> Erasing:
    """Return what is to be done to erase these records; those that are erased are passed over.

    numbers: in the dataset, ascending. Raises OptionError where the format cannot do it.
    """
    dataset, chosen = reader.manifest, dict[int, Numbers]()
    shown = printable(place.url, 4096)
    if dataset.format not in PACKED:
        raise OptionError(
            f"{shown}: its records lie in files of others ({dataset.format}), "
            "which shardio never changes. Nothing was erased. Pack them into shards (`shardio pack "
            f"{shown} OUT`), erase there, and remove these files"
        )
    bounds = np.searchsorted(numbers, reader.starts)
    for number in np.flatnonzero(np.diff(bounds)).tolist():
        own = numbers[bounds[number] : bounds[number + 1]] - reader.starts[number]
        fresh: Column = np.setdiff1d(own, erased_in(reader.shard(number)))
        if len(fresh):
            chosen[number] = fresh
    return Erasing(place, reader, chosen)


def erased_numbers(reader: Reader) -> Numbers:
    """Return the numbers of the records whose bytes were erased. Raises DamageError."""
    dataset, found = reader.manifest, [NONE]
    followed = {one.sha256 for one in dataset.erased.values()}  # others have none
    for at, first in enumerate(reader.starts[:-1].tolist() if followed else ()):
        if dataset.shard_sha256[at].tobytes() in followed:
            found.append(erased_in(reader.shard(at)) + first)
    return np.concatenate(found)
