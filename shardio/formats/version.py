"""Versions of a dataset: what each commit left, and the records that later ones dropped.

A version is its shards and its exclusions: the numbers of records that were dropped. Each commit
writes a manifest; the one before stays beside it as `manifest-ID.json`, named by its id. So the
newest version is opened as if there were no other, and an older one by its own manifest.

    excluded-HHHHHHHH.bin   magic 8 | dataset id 16 | count u64 | numbers u64[count], ascending

The numbers are those of the records in the dataset, which shards that are added behind do not
change. docs/format.md specifies it.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .._version import __version__
from ..errors import DamageError, OptionError, printable, there_are
from ..storage.base import Location, path_in
from . import manifest
from .erased import after_erasing, erased_since
from .manifest import MANIFEST, Manifest, Sidecar

TAGS = "tags.json"
MAGIC = b"\x89SHX\r\n\x1a\n"
Numbers = np.ndarray[Any, np.dtype[np.int64]]
NONE: Numbers = np.empty(0, np.int64)

_HEAD = struct.Struct("<8s16sQ")
_MAX_TAGS = 1 << 20  # bytes
_EXCLUDED = re.compile(r"excluded-[0-9a-f]{8}\.bin\Z")
_KEPT = re.compile(r"manifest-([0-9a-f]{16})\.json\Z")
_ID = re.compile(r"[0-9a-f]{4,16}\Z")
_TAG = re.compile(r"[^\x00-\x1f\x7f/]{1,100}\Z")


def kept_name(version_id: str) -> str:
    """Return the name of the file that keeps the manifest of an older version."""
    return f"manifest-{version_id}.json"


def kept_id(name: str) -> str | None:
    """Return the id of the version whose manifest a file of this name keeps, if it keeps one."""
    found = _KEPT.match(name)
    return None if found is None else found[1]


def has_excluded_name(name: str) -> bool:
    """Return whether a file has the name of a list of dropped records."""
    return _EXCLUDED.match(name) is not None


# --- exclusions -----------------------------------------------------------------------------------


def dump_excluded(dataset_id: bytes, numbers: Numbers) -> tuple[Sidecar, bytes]:
    """Return what the manifest says of the file of these numbers, and its bytes."""
    data = _HEAD.pack(MAGIC, dataset_id, len(numbers)) + numbers.astype("<u8").tobytes()
    digest = hashlib.sha256(data).digest()
    return Sidecar(f"excluded-{digest[:4].hex()}.bin", len(numbers), digest), data


def load_excluded(index: Location, dataset: Manifest) -> Numbers:
    """Return the numbers of the records that were dropped: (n,) int64, ascending.

    Raises DamageError.
    """
    if dataset.excluded is None:
        return NONE
    name, count, digest = dataset.excluded
    where, size = path_in(index, name), _HEAD.size + 8 * count
    try:
        data = index.read(name, size)
    except FileNotFoundError:
        raise DamageError(
            f"{where}: the manifest names this list of {count:,} dropped records, but it is not "
            "there. Restore it from a copy: without it, dropped records would come back"
        ) from None
    if hashlib.sha256(data).digest() != digest:
        raise DamageError(
            f"{where}: its SHA-256 is {hashlib.sha256(data).hexdigest()}, but the manifest says "
            f"{digest.hex()}. Restore it from a copy"
        )
    numbers = np.frombuffer(data, "<i8", -1, _HEAD.size)
    expected = MAGIC, dataset.dataset_id, count
    if (
        len(data) != size
        or _HEAD.unpack_from(data) != expected
        or (numbers[1:] <= numbers[:-1]).any()
        or not 0 <= numbers[0] <= numbers[-1] < dataset.stored_records
    ):
        raise DamageError(f"{where}: it is no list of {count:,} records of this dataset")
    return numbers


# --- versions -------------------------------------------------------------------------------------


def load_version(index: Location, version: str | None) -> Manifest:
    """Read the manifest of a version, by its id, the first 4 digits or more of it, or its tag.

    None: the newest. Raises OptionError where there is no such version, or records of it were
    erased since, and as `manifest.load`.
    """
    newest = manifest.load(index)
    return newest if version is None else readable(index, find_version(index, version), newest)


def readable(index: Location, one: Manifest, newest: Manifest) -> Manifest:
    """Return a version as its files are now. Raises OptionError where records of it were erased."""
    now = after_erasing(one, newest)
    if count := erased_count(index, one, newest):
        raise OptionError(
            f"version {one.version_id}: {count:,} of its records were erased since, by `shardio "
            f"drop --erase`, so it cannot be read any more. `shardio log {printable(index.url)}` "
            "lists the versions that can"
        )
    return now


def erased_count(index: Location, one: Manifest, newest: Manifest) -> int:
    """Count the records that a version shows, and that were erased since. Raises DamageError."""
    now = after_erasing(one, newest)
    if now is one:
        return 0
    return len(np.setdiff1d(erased_since(index, one, now), load_excluded(index, one)))


def find_version(index: Location, version: str) -> Manifest:
    """Read the manifest that a version had, whether its files are there or not. Raises OptionError.

    version: as of `load_version`.
    """
    newest = manifest.load(index)
    if not isinstance(version, str):
        raise OptionError(f"version is {printable(repr(version))}: expected an id or a tag")
    tags = load_tags(index)
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
            ends = sorted((one for one in tagged if one is not None), key=_committed_at)


def _committed_at(one: Manifest) -> str:
    """Return the time of a version's commit; that of one that was packed is before all others."""
    return one.commit.time if one.commit else ""


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
    tags = manifest.parse_sealed(data, path_in(index, TAGS)).get("tags")
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
