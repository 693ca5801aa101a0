"""Versions of a dataset: what each commit left, and the records that later ones dropped.

A version is its shards and its exclusions: the numbers of records that were dropped. Each commit
writes a manifest; the one before stays beside it as `manifest-ID.json`, named by its id. So the
newest version is opened as if there were no other, and an older one by its own manifest.

    excluded-HHHHHHHH.bin  magic 8 | dataset id 16 | count u64 | numbers i64[count], ascending
    sources-HHHHHHHH.bin   magic 8 | dataset id 16 | count u64 | sizes i64[count] | times i64[count]

Numbers are those of the records in the dataset, which shards that are added behind do not change.
The second file has, by these numbers, what `update` knows of the files. docs/format.md specifies
both.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._version import __version__
from ..errors import DamageError, OptionError, printable, there_are
from ..storage.base import Location, path_in
from ..units import show_count
from . import manifest
from .erased import after_erasing, erased_since, lost_with_shards
from .manifest import MANIFEST, Manifest, Sidecar, sidecar_name

TAGS = "tags.json"
MAGICS = {"excluded": b"\x89SHX\r\n\x1a\n", "sources": b"\x89SHN\r\n\x1a\n"}
_COLUMNS = {"excluded": 1, "sources": 2}
Numbers = np.ndarray[Any, np.dtype[np.int64]]
NONE: Numbers = np.empty(0, np.int64)

_HEAD = struct.Struct("<8s16sQ")
_MAX_TAGS = 1 << 20  # bytes
_SIDECAR = re.compile(r"(excluded|sources)-[0-9a-f]{8}\.bin\Z")
_KEPT = re.compile(r"manifest-([0-9a-f]{16})\.json\Z")
_ID = re.compile(r"[0-9a-f]{4,16}\Z")
_SUM = re.compile(r"sha256:([0-9a-f]{64})\Z")
_TAG = re.compile(r"[^\x00-\x1f\x7f/]{1,100}\Z")


def kept_name(version_id: str) -> str:
    """Return the name of the file that keeps the manifest of an older version."""
    return f"manifest-{version_id}.json"


def kept_id(name: str) -> str | None:
    """Return the id of the version whose manifest a file of this name keeps, if it keeps one."""
    found = _KEPT.match(name)
    return None if found is None else found[1]


def sidecar_magic(name: str) -> bytes | None:
    """Return how a file begins that a manifest names beside its shards; None: it names it not."""
    found = _SIDECAR.match(name)
    return None if found is None else MAGICS[found[1]]


# --- files beside the manifest --------------------------------------------------------------------


def dump_excluded(dataset_id: bytes, numbers: Numbers) -> tuple[Sidecar, bytes]:
    """Return what the manifest says of the file of these numbers, and its bytes."""
    return _dump("excluded", dataset_id, [numbers])


def load_excluded(index: Location, dataset: Manifest) -> Numbers:
    """Return the numbers of the records that were dropped: (n,) int64, ascending.

    Raises DamageError.
    """
    side = dataset.excluded
    if side is None:
        return NONE
    where = path_in(index, side.name)
    try:
        (numbers,) = _load("excluded", index, dataset, side)
        if (numbers[1:] <= numbers[:-1]).any() or not (
            0 <= numbers[0] <= numbers[-1] < dataset.stored_records
        ):
            raise DamageError(f"{where}: it is no list of {side.entries:,} records of this dataset")
    except FileNotFoundError:
        raise DamageError(
            f"{where}: the manifest names this list of {side.entries:,} dropped records, but it is "
            "not there. Restore it from a copy: without it, dropped records would come back"
        ) from None
    return numbers


class SourceNotes:
    """Hold the sizes and times of the files that records were packed of, by number.

    sizes, times: (n,) int64; a size of -1 is not known.
    """

    def __init__(self, sizes: Numbers, times: Numbers) -> None:
        """Keep them, for this many records."""
        self.sizes, self.times = sizes, times

    def of(self, number: int) -> tuple[int, int]:
        """Return the size and the time of a record's file; -1 and 0 where they are not known."""
        if number >= len(self.sizes):
            return -1, 0
        return int(self.sizes[number]), int(self.times[number])

    def grown(self, records: int) -> SourceNotes:
        """Return a copy for so many records: of more, nothing is known."""
        sizes, times = np.full(records, -1, np.int64), np.zeros(records, np.int64)
        known = min(records, len(self.sizes))
        sizes[:known], times[:known] = self.sizes[:known], self.times[:known]
        return SourceNotes(sizes, times)

    def without(self, numbers: Numbers) -> SourceNotes:
        """Return them after what they say of some records, whose bytes are gone, was forgotten."""
        numbers = numbers[numbers < len(self.sizes)]
        self.sizes[numbers], self.times[numbers] = -1, 0
        return self

    def put(self, number: int, size: int, time: int) -> None:
        """Note the size and the time of a record's file."""
        self.sizes[number], self.times[number] = size, time

    def dump(self, dataset_id: bytes) -> tuple[Sidecar, bytes]:
        """Return what the manifest says of the file of these notes, and its bytes."""
        return _dump("sources", dataset_id, [self.sizes, self.times])


def load_sources(index: Location, dataset: Manifest) -> SourceNotes | None:
    """Return the notes of the files that records were packed of.

    None: there are none, or they are damaged: whoever asks reads the files then.
    """
    with contextlib.suppress(FileNotFoundError, DamageError):
        if dataset.sources is not None:
            return SourceNotes(*_load("sources", index, dataset, dataset.sources))
    return None


def _dump(member: str, dataset_id: bytes, columns: Sequence[Numbers]) -> tuple[Sidecar, bytes]:
    """Return what the manifest says of a file of columns of numbers, and its bytes."""
    head = _HEAD.pack(MAGICS[member], dataset_id, len(columns[0]))
    data = head + b"".join(column.astype("<i8").tobytes() for column in columns)
    digest = hashlib.sha256(data).digest()
    return Sidecar(sidecar_name(member, digest), len(columns[0]), digest), data


def _load(member: str, index: Location, dataset: Manifest, side: Sidecar) -> list[Numbers]:
    """Read the columns of a file that a manifest names. Raises FileNotFoundError, DamageError."""
    where, columns = path_in(index, side.name), _COLUMNS[member]
    size = _HEAD.size + 8 * columns * side.entries
    data = index.read(side.name, size)
    found = hashlib.sha256(data).hexdigest()
    if found != side.sha256.hex():
        raise DamageError(
            f"{where}: its SHA-256 is {found}, but the manifest says {side.sha256.hex()}. Restore "
            "it from a copy"
        )
    expected = MAGICS[member], dataset.dataset_id, side.entries
    if len(data) != size or _HEAD.unpack_from(data) != expected:
        raise DamageError(f"{where}: it is not of {side.entries:,} records of this dataset")
    return np.split(np.frombuffer(data, "<i8", -1, _HEAD.size), columns)


# --- versions -------------------------------------------------------------------------------------


def load_version(index: Location, version: str | None) -> Manifest:
    """Read the manifest of a version, by its id, the first 4 digits or more of it, or its tag.

    Or by "sha256:" and the sum at the end of its manifest: it is no other then. None: the newest.
    Raises OptionError where there is no such version, or records of it were erased since,
    DamageError where it has another sum, and as `manifest.load`.
    """
    newest = manifest.load(index)
    return newest if version is None else readable(index, find_version(index, version), newest)


def readable(index: Location, one: Manifest, newest: Manifest) -> Manifest:
    """Return a version as its files are now.

    Raises OptionError where records of it were erased, or files of others changed.
    """
    now = after_erasing(one, newest)
    if others := changed_since(one, newest):
        name = printable(one.names[others[0]]) if one.names else ""
        raise OptionError(
            f"version {one.version_id}: {name} changed since, or is gone, as `shardio index` found "
            f"({show_count(len(others), 'file')} of it in all), so it cannot be read any more. "
            "Bring its files back, and `shardio restore` makes it the newest one"
        )
    if count := erased_count(index, one, newest):
        raise OptionError(
            f"version {one.version_id}: {count:,} of its records were erased since, by `shardio "
            f"drop --erase`, so it cannot be read any more. `shardio log {printable(index.url)}` "
            "lists the versions that can"
        )
    return now


def changed_since(one: Manifest, newest: Manifest) -> list[int]:
    """Return the shards of a version, in files of others, that the newest one has not as such."""
    if one.names is None or one is newest:
        return []
    known = {*zip(newest.names or (), map(bytes, newest.shard_sha256), strict=False)}
    there = zip(one.names, map(bytes, one.shard_sha256), strict=True)
    return [number for number, name in enumerate(there) if name not in known]


def erased_count(index: Location, one: Manifest, newest: Manifest) -> int:
    """Count the records that a version shows, and that were erased since. Raises DamageError."""
    now = after_erasing(one, newest)
    if now is one:
        return 0
    shown = np.setdiff1d(erased_since(index, one, now), load_excluded(index, one))
    return len(shown) + lost_with_shards(one, newest)


def find_version(index: Location, version: str) -> Manifest:
    """Read the manifest that a version had, whether its files are there or not. Raises OptionError.

    version: as of `load_version`.
    """
    newest = manifest.load(index)
    if not isinstance(version, str):
        raise OptionError(f"version is {printable(repr(version))}: expected an id or a tag")
    tags = load_tags(index)
    if pinned := _SUM.match(version):
        found = find_version(index, pinned[1][: len(newest.version_id)])
        if found.digest != pinned[1]:
            raise DamageError(
                f"{path_in(index, MANIFEST)}: the manifest of version {found.version_id} has the "
                f"SHA-256 {found.digest}, expected {pinned[1]}: it is not the dataset that you want"
            )
        return found
    wanted = tags.get(version, version)
    if _ID.match(wanted):
        fitting = []
        for one in history(index, newest):
            if one.version_id == wanted:
                return one
            if one.version_id.startswith(wanted):
                fitting.append(one)
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            ids = ", ".join(one.version_id for one in fitting)
            raise OptionError(f"version {wanted!r}: several begin so: {ids}")
        if version in tags:
            raise OptionError(f"version {printable(version)!r}: {_gone(index, wanted)}")
        if len(wanted) == len(newest.version_id):
            raise OptionError(f"version: {_gone(index, wanted)}")
    tagged = f"; {there_are(tags, version)}" if tags else ""
    raise OptionError(
        f"{path_in(index, MANIFEST)}: no version is called {printable(version)!r}{tagged}. "
        f"`shardio log {printable(index.url)}` lists those that there are"
    )


def _gone(index: Location, version_id: str) -> str:
    return (
        f"{path_in(index, kept_name(version_id))} is not there: that version was removed, by "
        f"`shardio gc`, or is of another dataset. `shardio log {printable(index.url)}` lists those "
        "that there are"
    )


def history(index: Location, newest: Manifest) -> Iterator[Manifest]:
    """Yield the manifests of all versions that are kept, the newest first.

    Between those that have a tag others may have been removed. Raises DamageError.
    """
    seen = set[str]()
    ends = [newest]
    while ends:
        one: Manifest | None = ends.pop()
        while one is not None and one.version_id not in seen:
            seen.add(one.version_id)
            yield one
            parent = one.commit.parent if one.commit else None
            one = None if parent is None else load_kept(index, parent)
        if not ends:
            tagged = [load_kept(index, of) for of in {*load_tags(index).values()} - seen]
            # One that was packed is before all that were committed.
            ends = [one for one in tagged if one is not None]
            ends.sort(key=lambda one: one.commit.time if one.commit else "")


def first_version(index: Location, newest: Manifest) -> Manifest:
    """Read the manifest of the version that was packed. Raises OptionError where it is gone."""
    for one in history(index, newest):
        if one.commit is None:
            return readable(index, one, newest)
    raise OptionError("the version that was packed was removed, by `shardio gc`")


def load_kept(index: Location, version_id: str) -> Manifest | None:
    """Read the manifest of an older version, if it is kept. Raises DamageError, VersionError."""
    name = kept_name(version_id)
    try:
        data = index.read(name, manifest.MAX_MANIFEST)
    except FileNotFoundError:
        return None
    found = manifest.parse(data, path_in(index, name))
    if found.version_id != version_id:
        raise DamageError(
            f"{path_in(index, name)}: it is version {found.version_id}, and no file of this name. "
            "Restore it from a copy"
        )
    return found


# --- tags -----------------------------------------------------------------------------------------


def load_tags(index: Location) -> dict[str, str]:
    """Return the ids of versions by their tags. Raises DamageError."""
    try:
        data = index.read(TAGS, _MAX_TAGS)
    except FileNotFoundError:
        return {}
    return parse_tags(data, index)


def parse_tags(data: bytes, index: Location) -> dict[str, str]:
    """Read the bytes of tags.json. Raises DamageError."""
    tags = manifest.parse_sealed(data, path_in(index, TAGS), "shardio-tags").get("tags")
    if (
        not isinstance(tags, dict)
        or not all(map(_TAG.match, tags))
        or not all(isinstance(one, str) and len(one) == 16 for one in tags.values())
    ):
        raise DamageError(f"{path_in(index, TAGS)}: not a list of tags")
    return tags


def dump_tags(tags: Mapping[str, str]) -> bytes:
    """Return the bytes of tags.json."""
    head = {"format": "shardio-tags", "version": manifest.VERSION, "library": __version__}
    return manifest.dump_sealed(head | {"tags": dict(tags)})


def check_tag(name: str) -> str:
    """Return a name that a version can have. Raises OptionError."""
    if not isinstance(name, str) or not _TAG.match(name) or _ID.match(name):
        raise OptionError(
            f"tag {printable(repr(name))}: expected a name of up to 100 characters, without / and "
            "unlike an id"
        )
    return name
