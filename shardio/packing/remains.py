"""What is left of records that were erased: all files of a directory are searched for their keys.

In shards, those that no manifest names included, a record is found by the hash of its key, and then
by the key. Other files are searched for the bytes of the keys: drafts, journals, files of others.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..dataset.reader import Reader
from ..errors import (
    BusyError,
    DamageError,
    OptionError,
    ShardioError,
    StorageError,
    VersionError,
    printable,
)
from ..formats import PACKED, manifest
from ..formats.base import Column
from ..formats.erased import after_erasing
from ..formats.index import key_hash
from ..formats.manifest import MANIFEST, SPLITS, SUFFIXES, Manifest
from ..formats.overlay import has_overlay_name, rows_of
from ..formats.record import RecordShard, erased_in
from ..formats.version import NONE, TAGS, history, kept_id, load_excluded, sidecar_magic
from ..names import key_text
from ..storage import lock
from ..storage.base import File
from ..storage.local import LocalDirectory, open_file
from ..storage.location import Target
from ..storage.lock import JOURNAL
from ..storage.options import Storage
from ..units import show_count, show_size
from .journal import REJECTED, WORK, load_rejected, part_list
from .place import find_place
from .versions import check_keys, files_of

LEAST = 4  # bytes of a key that is searched for in other files than shards
_CHUNK = 1 << 20  # bytes of a file that are searched at a time
_WIDE = 8  # bytes of a key's end by which it is found; of a shorter one, LEAST
_MIX = np.uint64(0x9E3779B97F4A7C15)
_ELSEWHERE = "not seen: caches, copies and backups elsewhere"
_OF_PLACE = {  # by whether it is a store
    False: (
        "not seen: files that a running process holds open, and blocks of the device that are free"
    ),
    True: (
        "not seen: older versions of objects, where the bucket keeps them (S3's versioning, soft "
        "deletion), and uploads in parts that were never finished"
    ),
}
_SAME_IMAGE = "not seen: the same image under another key"


class Left(NamedTuple):
    """Something that is left of a record."""

    file: str
    record: int | None  # its number in the shard; None: the file is none
    offset: int  # bytes
    key: str | None  # None: it is damaged
    what: str


@dataclass
class Sought:
    """Where keys were looked for; as str, a summary."""

    keys: int
    files: int = 0
    shards: int = 0  # of these files
    records: int = 0  # in these shards
    erased: int = 0  # of these records
    bytes: int = 0  # of all files
    unseen: list[str] = field(default_factory=list)  # what this cannot find

    def __str__(self) -> str:
        shards = f"{show_count(self.shards, 'shard')} of {show_count(self.records, 'record')}"
        return (
            f"{show_count(self.keys, 'key')} looked for in {show_count(self.files, 'file')}, "
            f"{show_size(self.bytes)}, among them {shards}, {self.erased:,} erased"
        )


def seek(
    path: str | os.PathLike[str], keys: Iterable[str | bytes], storage: Storage | None = None
) -> tuple[Sought, list[Left]]:
    """Look into each file of a directory for records with these keys, and the keys themselves.

    Of a URL: into each object below it. Raises OptionError, NotPackedError, DamageError,
    StorageError.
    """
    place, wanted = find_place(path, storage), check_keys("dropped", keys)
    top = place.location
    if not wanted:
        raise OptionError("dropped: no key is in it")
    unseen = [_ELSEWHERE, _OF_PLACE[top.remote], _SAME_IMAGE]
    found, left = Sought(len(wanted), unseen=unseen), list[Left]()
    datasets = {
        _identity(one.location): _Dataset(one.location) for one in place.datasets().values()
    }
    for one in datasets.values():
        if one.newest.names is not None:
            found.unseen.append(
                f"not seen: what files of {one.newest.format} hold compressed or in other words; "
                f"nothing is erased from such files ({printable(one.index.url, 4096)})"
            )
    if short := sum(len(key) < LEAST for key in wanted):
        found.unseen.append(
            f"not seen: {show_count(short, 'key')} of fewer than {LEAST} bytes, in other files "
            "than shards"
        )
    search = _Search(wanted)
    for index, name in _files_in(top):
        try:
            file = _open_file(index, name)
        except FileNotFoundError:
            continue
        except (StorageError, BusyError) as error:
            found.unseen.append(f"not seen: {error}")
            continue
        with contextlib.closing(file):
            found.files += 1
            found.bytes += file.size
            left += _look(file, index, name, datasets.get(_identity(index)), search, found)
    return found, left


def _identity(index: Target) -> str:
    return os.path.abspath(index.root) if isinstance(index, LocalDirectory) else index.url


def _files_in(top: Target) -> Iterator[tuple[Target, str]]:
    """Yield the files below a folder: (folder, name)."""
    if isinstance(top, LocalDirectory):
        for folder, folders, names in os.walk(top.url):
            folders.sort()
            for name in sorted(names):
                yield LocalDirectory(folder), name
        return
    for path, *_ in top.objects():
        within, _, name = path.rpartition("/")
        yield top.below(within) if within else top, name


def _open_file(index: Target, name: str) -> File:
    """Open any file. Raises FileNotFoundError, StorageError, BusyError."""
    if not isinstance(index, LocalDirectory):
        return index.open(name)
    if name == JOURNAL:  # opening it would end a lock that this process has on it
        lock.read(index.url, 0, 1)
    shown = os.path.join(index.url, name)  # whatever its name is: it may be anybody's
    return open_file(shown, shown)


class _Dataset:
    """The versions of a dataset, for what is said of a record that is left."""

    def __init__(self, index: Target) -> None:
        self.index = index
        self.newest: Manifest = manifest.load(index)
        self.excluded = load_excluded(index, self.newest)
        self._starts = np.cumsum([0, *self.newest.shard_records.tolist()])
        self.named = files_of(self.newest)
        self.older = set[str]()
        # Shards of all versions by their dataset and number, and by the files of values beside
        # them, with a version that has each.
        self._shards: dict[tuple[bytes, int], dict[bytes, Manifest]] = {}
        self._beside: dict[str, dict[bytes, Manifest]] = {}
        self._gone: dict[bytes, Column] = {}  # records that were erased from these
        for each in history(index, self.newest):
            one = after_erasing(each, self.newest)
            self.older |= files_of(one)
            if one.names is None:
                for number, digest in enumerate(map(bytes, one.shard_sha256)):
                    place = one.dataset_id, number
                    self._shards.setdefault(place, {}).setdefault(digest, one)
            for beside in one.overlays:
                for number, infos in beside.files.items():
                    for info in infos:
                        digest = one.shard(number).sha256
                        self._beside.setdefault(info.name, {})[digest] = one

    def erased_beside(self, name: str, dataset_id: bytes, number: int) -> tuple[int, Column]:
        """Return the records erased from the shards that a file of values may be of; their most.

        Of one that no version names: from all of its dataset and number. Raises LookupError where
        there are none, DamageError.
        """
        if not self.newest.erased:
            return 0, NONE
        of = self._beside.get(name) or self._shards[dataset_id, number]
        gone = [self._erased_in(digest, one, number) for digest, one in of.items()]
        return max(int(one.shard_records[number]) for one in of.values()), np.concatenate(gone)

    def _erased_in(self, digest: bytes, one: Manifest, number: int) -> Column:
        """Return the records that were erased from a shard of a version. Raises DamageError."""
        if not one.shard_sizes[number]:  # nobody knows which, where nothing followed it
            return np.arange(one.shard_records[number])
        if digest not in self._gone:
            # Without its annotated fields: files of theirs are looked at one by one.
            stored = replace(one, schema=one.stored_schema, overlays=())
            self._gone[digest] = erased_in(Reader(self.index, stored, excluded=NONE).shard(number))
        return self._gone[digest]

    def tell_of_file(self, name: str) -> str:
        """Say what removes a file that has something of a record that was erased."""
        folder = printable(self.index.url, 4096)
        if name in self.named:
            return "the newest version names this file, which no erasing of shardio leaves so"
        return f"`shardio gc {folder} --keep 0s` removes this file, if shardio wrote it"

    def tell(self, name: str, shard: RecordShard, record: int) -> str:
        """Say why a record is still there."""
        if name not in self.named and name in self.older:
            return "an older version has this file: `shardio drop --erase` erases it there, too"
        if name not in self.named:
            return (
                "the newest version does not name this file: `shardio gc "
                f"{printable(self.index.url, 4096)} --keep 0s` removes it, if shardio wrote it"
            )
        if np.isin(self._starts[shard.number] + record, self.excluded):
            return "it was dropped, but not erased: `shardio drop --erase` does that"
        return "it is a record of the dataset: `shardio drop --erase` erases it"


def _look(
    file: File, index: Target, name: str, one: _Dataset | None, search: _Search, found: Sought
) -> Iterator[Left]:
    """Yield what one file holds of the keys."""
    shard = _open(file, name)
    if shard is not None:
        found.shards += 1
        found.records += shard.records
        found.erased += len(shard.erased)
        if has_overlay_name(name):  # its keys are numbers of records
            yield from _in_values(shard, name, one, found)
            return
        begun = os.path.basename(index.url.rstrip("/")) == WORK
        for record, key in search.in_shard(shard):
            if one is not None:
                what = one.tell(name, shard, record)
            elif begun:
                what = (
                    "an append, update or compaction did not finish here: `shardio drop --erase` "
                    "removes it, or says what to do"
                )
            else:
                what = "no dataset is in this folder"
            text = None if key is None else key_text(key)
            yield Left(file.name, record, shard.offset(record), text, what)
        return
    listed = name == REJECTED or fnmatch.fnmatchcase(name, part_list("*"))
    if listed and (rejected := _rejected(index, name)) is not None:
        for line, key in enumerate(rejected, 1):
            if key in search.keys:
                what = (
                    f"line {line:,} of what packing left out has this key: `shardio drop --erase` "
                    "removes it"
                )
                yield Left(file.name, None, 0, key_text(key), what)
        return
    if _has_no_keys(file, name):
        for key in search.in_data(_conditions(file)):
            what = "its records were chosen by a condition that names this key: pack without it"
            yield Left(file.name, None, 0, key_text(key), what)
        return
    for key, at in search.in_bytes(file):
        yield Left(file.name, None, at, key_text(key), f"the key stands at byte {at:,}")


def _in_values(
    shard: RecordShard, name: str, one: _Dataset | None, found: Sought
) -> Iterator[Left]:
    """Yield the values of erased records that a file of a field's values has."""
    if one is None:
        found.unseen.append(
            f"not seen: {shard.name}: values of a dataset that is not in its folder"
        )
        return
    try:
        most, gone = one.erased_beside(name, shard.dataset_id, shard.number)
        rows = rows_of(shard, most) if len(gone) else gone
    except LookupError:
        found.unseen.append(
            f"not seen: {shard.name}: values for a shard that no version has: "
            f"{one.tell_of_file(name)}"
        )
        return
    except DamageError as error:
        found.unseen.append(f"not seen: {error}")
        return
    for place in np.flatnonzero(np.isin(rows, gone)).tolist():
        what = (
            f"it has a value of record {int(rows[place])} of shard {shard.number}, which was "
            f"erased: {one.tell_of_file(name)}"
        )
        yield Left(shard.name, place, shard.offset(place), None, what)


def _open(file: File, name: str) -> RecordShard | None:
    """Open a file as a shard that shardio packed, by how it begins; None: it is no whole one."""
    start = file.read(0, min(file.size, 64))
    for format in sorted(PACKED, key=lambda one: not name.endswith(SUFFIXES[one])):
        row = PACKED[format]
        if start.startswith(row.magic):
            with contextlib.suppress(DamageError, VersionError):
                return row.shard(file)
    return None


def _rejected(index: Target, name: str) -> list[bytes] | None:
    with contextlib.suppress(DamageError):
        return [key for key, _ in load_rejected(index, name) or ()]
    return None


def _conditions(file: File) -> bytes:
    """Return by what the records of a manifest were chosen, if it says that."""
    with contextlib.suppress(ShardioError, ValueError):
        one = manifest.parse(file.read(0, file.size), file.name)
        return json.dumps(one.options.get("where")).encode()
    return b""


def _has_no_keys(file: File, name: str) -> bool:
    """Return whether a file is one of ours that names no record: a manifest, tags, exclusions."""
    if name in (MANIFEST, SPLITS, TAGS) or kept_id(name) is not None:
        with contextlib.suppress(ShardioError):
            if file.size <= manifest.MAX_MANIFEST:
                return bool(manifest.parse_sealed(file.read(0, file.size), file.name))
    magic = sidecar_magic(name)
    return magic is not None and file.size > len(magic) and file.read(0, len(magic)) == magic


class _Search:
    """Keys, and how they are found."""

    def __init__(self, keys: set[bytes]) -> None:
        self.keys = keys
        self._hashes = np.array([*map(key_hash, keys)], np.uint32)
        forms = {form: key for key in keys for form in _forms(key) if len(form) >= LEAST}
        self._longest = max(map(len, forms), default=0)
        self._by_end = [
            _Ends(width, {form: key for form, key in forms.items() if fits(len(form), _WIDE)})
            for width, fits in ((_WIDE, operator.ge), (LEAST, operator.lt))
        ]

    def in_shard(self, shard: RecordShard) -> Iterator[tuple[int, bytes | None]]:
        """Yield the records of a shard that have one of the keys: (number, key).

        None: a key has this hash, and the record's own is damaged; its bytes are there.
        """
        places = np.flatnonzero(np.isin(shard.key_hashes, self._hashes))
        for record in np.setdiff1d(places, shard.erased).tolist():
            try:
                key = shard.key(record)
            except DamageError:
                yield record, None
                continue
            if key in self.keys:
                yield record, key

    def in_data(self, data: bytes) -> set[bytes]:
        """Return the keys whose bytes are in these."""
        return {key for ends in self._by_end for key, _ in ends.found(data)}

    def in_bytes(self, file: File) -> Iterator[tuple[bytes, int]]:
        """Yield the keys whose bytes a file holds, each once: (key, byte)."""
        seen = set[bytes]()
        overlap = self._longest - 1
        for start in range(0, file.size if self._longest else 0, _CHUNK):
            begin = max(0, start - overlap)
            data = file.read(begin, min(start + _CHUNK, file.size) - begin)
            for ends in self._by_end:
                for key, at in ends.found(data):
                    if key not in seen:
                        seen.add(key)
                        yield key, begin + at


class _Ends:
    """Keys by the last bytes of each, so that all are searched for at once."""

    def __init__(self, width: int, forms: Mapping[bytes, bytes]) -> None:
        self._width = width
        self._forms: dict[int, list[tuple[bytes, bytes]]] = {}
        for form, key in forms.items():
            end = int.from_bytes(form[-width:], "little")
            self._forms.setdefault(end, []).append((form, key))
        self._ends = np.array([*self._forms], np.uint64)
        self._marks = np.zeros(1 << 16, bool)
        self._marks[_mixed(self._ends)] = True

    def found(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield the keys that some bytes hold, and where each begins."""
        count = len(data) - self._width + 1
        if not len(self._ends) or count <= 0:
            return
        bytes_ = np.frombuffer(data, np.uint8)
        values = np.zeros(count, np.uint64)
        for i in range(self._width):
            values |= bytes_[i : i + count].astype(np.uint64) << np.uint64(8 * i)
        likely = np.flatnonzero(self._marks[_mixed(values)])
        likely = likely[np.isin(values[likely], self._ends)]
        for at, value in zip(likely.tolist(), values[likely].tolist(), strict=True):
            for form, key in self._forms[value]:
                begin = at + self._width - len(form)
                if begin >= 0 and data.startswith(form, begin):
                    yield key, begin


def _mixed(values: np.ndarray[Any, np.dtype[np.uint64]]) -> Sequence[int] | Any:
    """Return 16 bits of each value, which all of its bits decide."""
    return (values * _MIX) >> np.uint64(48)


def _forms(key: bytes) -> set[bytes]:
    """Return how a key is written: its bytes, and as in JSON."""
    return {key, json.dumps(key_text(key))[1:-1].encode()}
