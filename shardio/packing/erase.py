"""Erase records: write the shards that have them anew, without their bytes, beside the old ones.

The others keep their numbers, bytes and checksums, so selections, states and exclusions hold. All
versions are looked through: in their other shards, as those before a compaction, records are found
by their keys. A shard is written anew where the newest version, or an older one that stays
readable, has it; else it goes without a successor. So do the files of values beside them. The old
files go by `gc`, which counts them as needed by no version (formats/erased.py). Killed anywhere,
the old version is whole: the manifest that names the new files is renamed last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..dataset.reader import DroppedShard, Reader, key_hashes, records_with_keys
from ..errors import DamageError, OptionError, printable
from ..formats import PACKED, open_shard
from ..formats.base import Column, Opening, Overlay, Shard, ShardInfo
from ..formats.erased import after_erasing
from ..formats.manifest import Manifest, Successor
from ..formats.overlay import files_of_shard
from ..formats.record import ERASED, FRAME, RecordShard, erased_in
from ..formats.version import NONE, Numbers, history, load_excluded, load_sources, load_tags
from ..storage import local
from .place import Place
from .process_pool import Report
from .shard_writer import ShardWriter
from .values_file import write_without

_ZERO: Mapping[str, Any] = {"b": False, "f": 0.0}  # what takes the place of a value; of others 0
_NOTHING = Successor(0, bytes(32), 0, 0)


class _Part(NamedTuple):
    """The records of a shard that are to be erased, and a version that has it."""

    one: Manifest
    number: int
    records: Numbers  # in the shard, ascending

    @property
    def info(self) -> ShardInfo:
        """Return what the version says of the shard."""
        return self.one.shard(self.number)


class _Values(NamedTuple):
    """A file of values beside a shard that has such records."""

    shard: bytes  # its SHA-256
    beside: Overlay
    opening: Opening
    info: ShardInfo


@dataclass
class Erasing:
    """Records of one dataset that are to be erased, in all of its versions."""

    place: Place
    reader: Reader
    parts: dict[bytes, _Part] = field(default_factory=dict)  # by the SHA-256 of the shards
    numbers: Numbers = field(default_factory=lambda: NONE)  # of the newest version's records
    keys: set[bytes] = field(default_factory=set)  # that records in other shards have
    # Ids of older versions that show such a record, and so cannot be read any more; and their tags.
    unreadable: dict[str, list[str]] = field(default_factory=dict)
    _needed: set[bytes] = field(default_factory=set)  # shards that are written anew
    _values: dict[str, _Values] = field(default_factory=dict)  # by names of files
    _notes: set[str] = field(default_factory=set)  # of files that tell of such records' sources

    @property
    def shards(self) -> int:
        """Return how many shards are written anew."""
        return len(self._needed)

    @property
    def size(self) -> int:
        """Return the bytes of the files that are to be written anew: they take these, or less."""
        sizes = [part.info.size for digest, part in self.parts.items() if digest in self._needed]
        return sum(sizes) + sum(
            one.info.size for one in self._values.values() if one.shard in self._needed
        )

    def look_back(self, keys: Collection[bytes]) -> None:
        """Look through all versions for files that have these records, or tell of them.

        keys: of the records, by which they are found in shards that the newest version has not.
        Raises DamageError, StorageError.
        """
        index, newest = self.reader.index, self.reader.manifest
        tags = load_tags(index)
        hashes, searched = key_hashes(keys), {*map(bytes, newest.shard_sha256)}
        for each in history(index, newest):
            one = after_erasing(each, newest)
            if one.names is not None:  # an index of files of others
                continue
            digests = [*map(bytes, one.shard_sha256)]
            for number, digest in enumerate(digests):
                if digest not in searched:
                    searched.add(digest)
                    if len(found := self._found(one, number, keys, hashes)):
                        self.parts[digest] = _Part(one, number, found)
            parts = [
                (n, self.parts[digest]) for n, digest in enumerate(digests) if digest in self.parts
            ]
            if not parts:
                continue
            starts = np.cumsum([0, *one.shard_records.tolist()])
            shown = np.concatenate([starts[n] + part.records for n, part in parts])
            is_shown = len(np.setdiff1d(shown, load_excluded(index, each))) > 0
            if is_shown:
                of = sorted(tag for tag, id_ in tags.items() if id_ == each.version_id)
                self.unreadable[each.version_id] = of
            if each is newest or not is_shown:  # the next version has its shards
                self._needed |= {digests[n] for n, _ in parts}
            opening = one.opening(index)
            for number, _ in parts:
                for file in files_of_shard(opening, number):
                    self._values[file[-1].name] = _Values(digests[number], *file)
            if one.sources is not None:
                self._notes.add(one.sources.name)

    def _found(
        self, one: Manifest, number: int, keys: Collection[bytes], hashes: Column
    ) -> Numbers:
        """Return the records of a shard that only older versions have with one of these keys."""
        index, info = self.reader.index, one.shard(number)
        opening = replace(one.opening(index), overlays=())
        try:
            if not info.size:
                return NONE
            with contextlib.closing(open_shard(one.format, opening, info)) as shard:
                found = dict(records_with_keys(shard, keys, hashes, erased_in(shard)))
        except FileNotFoundError:  # so nothing of them is there
            return NONE
        except DamageError as error:
            raise DamageError(
                f"{error}\nOlder versions have this shard, so nobody knows whether they show these "
                f"records. Nothing was dropped. `shardio gc {printable(index.url, 4096)} "
                "--keep-versions 1 --keep 0s` removes them, if they have no tag"
            ) from None
        self.keys |= {*found.values()}
        return np.array([*found], np.int64)

    def write(self, report: Report) -> tuple[Manifest, dict[str, bytes]]:
        """Write the new files.

        Returns a manifest that names them, and the files that it names and are still to be written.
        Raises DamageError, StorageError.
        """
        dataset, token = self.reader.manifest, local.token()
        erased = dict(dataset.erased) | dict.fromkeys(self._notes, _NOTHING)
        with self.place.workspace() as space:
            for digest, part in self.parts.items():
                if digest not in self._needed:
                    erased[part.info.name] = _NOTHING._replace(gone=len(part.records))
                    continue
                new, gone = self._write(space.folder, part, token)
                space.take(new)
                report.add(part.info.size)
                report.show()
                erased.pop(new.name, None)  # of a shard that was there before, and is again
                erased[part.info.name] = Successor(new.size, new.sha256, new.index_checksum, gone)
            for name, values in self._values.items():
                info, part = values.info, self.parts[values.shard]
                left, gone = None, info.records
                if values.shard in self._needed:
                    own = values.opening, values.beside, info, part.info, part.records
                    left, gone = write_without(space.folder, *own)
                    report.add(info.size)
                    report.show()
                if left is None:
                    erased[name] = _NOTHING._replace(gone=gone)
                elif gone:
                    space.take(left)
                    erased.pop(left.name, None)
                    erased[name] = Successor(left.size, left.sha256, left.index_checksum, gone)
        files, side = dict[str, bytes](), dataset.sources
        if side is not None and side.name in self._notes:
            if (notes := load_sources(self.reader.index, dataset)) is None:
                side = None
            else:
                notes = notes.grown(len(notes.sizes)).without(self.numbers)
                side, files[side.name] = notes.dump(dataset.dataset_id)
                erased.pop(side.name, None)
        after = replace(dataset, erased=erased, sources=side)
        return after_erasing(after, after), files

    def _write(self, folder: str, part: _Part, token: str) -> tuple[ShardInfo, int]:
        """Write one shard anew into a folder.

        Returns what the manifest will say, and the bytes of blobs that were erased.
        Raises DamageError, StorageError.
        """
        one, records = part.one, part.records
        opening = replace(one.opening(self.reader.index), overlays=())
        with contextlib.closing(open_shard(one.format, opening, part.info)) as shard:
            assert isinstance(shard, RecordShard)
            gone, blobs = {*records.tolist()}, 0
            own = folder, token, one.stored_schema, one.dataset_id, part.number, one.format
            with ShardWriter(*own, version=ERASED) as writer:
                for record, stored in enumerate(shard.stored(0, shard.records)):
                    if record in gone:
                        _, length, head = FRAME.unpack_from(stored)
                        blobs += max(0, min(length, len(stored)) - head)  # whatever it says
                    writer.write_stored(None if record in gone else stored)
                hashes = shard.key_hashes.copy()
                hashes[records] = 0
                writer.index_as(hashes.tolist(), dict(_columns(shard, records)))
                new = writer.finish()
                writer.commit(new.name)
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


def choose(place: Place, reader: Reader, numbers: Numbers, keys: Collection[bytes]) -> Erasing:
    """Return what is to be done to erase these records; those that are erased are passed over.

    numbers: in the dataset, ascending. keys: of the records; others of these keys, in shards that
    only older versions have, are erased, too. Raises OptionError where the format cannot do it,
    DamageError, StorageError.
    """
    dataset, erasing, chosen = reader.manifest, Erasing(place, reader), [NONE]
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
            part = _Part(dataset, number, fresh)
            erasing.parts[part.info.sha256] = part
            chosen.append(fresh + reader.starts[number])
    erasing.numbers = np.concatenate(chosen)
    erasing.look_back(keys)
    return erasing


def erased_numbers(reader: Reader) -> Numbers:
    """Return the numbers of the records whose bytes were erased. Raises DamageError."""
    dataset, found = reader.manifest, [NONE]
    followed = {one.sha256 for one in dataset.erased.values()}  # others have none
    for at, first in enumerate(reader.starts[:-1].tolist() if followed else ()):
        if dataset.shard_sha256[at].tobytes() in followed:
            shard = reader.shard(at)
            if not isinstance(shard, DroppedShard):  # of which nobody knows what is in it
                found.append(erased_in(shard) + first)
    return np.concatenate(found)
