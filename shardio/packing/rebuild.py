"""What a damaged dataset is: by its manifest, by that of a copy, or by its shards alone.

A manifest says which records were dropped. So another one takes its place only where nothing in the
directory speaks of a change that it does not know: dropped records must not come back.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import DamageError, NotPackedError, OptionError, StorageError, VersionError, printable
from ..formats import PACKED, manifest
from ..formats.base import ShardInfo
from ..formats.manifest import MANIFEST, Manifest
from ..formats.overlay import has_overlay_name
from ..formats.record import ERASED, RecordShard, read_header
from ..formats.sample import Schema
from ..formats.version import MAGICS, TAGS, history, kept_id, kept_name, sidecar_magic
from ..names import from_file_name, key_text
from ..storage.base import File, Location, path_in
from ..storage.local import LocalDirectory
from .journal import shard_number

_NOTE = "its manifest was {}: {}"


class Claim(NamedTuple):
    """What a file says of itself: the number of a shard, the id of a dataset, and fields."""

    name: str
    says: tuple[int, bytes, tuple[tuple[str, str], ...]]
    version: int  # of the format


def claims(index: Location) -> list[Claim]:
    """Return the shards in a directory, by what they say, whatever they are called.

    Those of which this is damaged are not among them, nor are any of an object store.
    """
    found = []
    for name in _names(index):
        if not has_overlay_name(name):
            with (
                contextlib.suppress(OSError, StorageError, DamageError, VersionError),
                contextlib.closing(index.open(name)) as file,
            ):
                found += [Claim(name, *said)] if (said := _said(file)) else []
    return found


def _said(file: File) -> tuple[tuple[int, bytes, tuple[tuple[str, str], ...]], int] | None:
    """Return number, dataset id and fields, and version, of a file. Raises DamageError."""
    start = file.read(0, min(file.size, 64))
    for format, row in PACKED.items():
        if start.startswith(row.magic):
            if format == "record":
                schema, id_, number, _, version = read_header(file)
                return (number, id_, schema.fields), version
            shard = row.shard(file, verify=False)
            return (shard.number, shard.dataset_id, shard.schema.fields), shard.version
    return None


def load(
    index: Location,
    copy: Location | None,
    there: Sequence[Claim],
    classes: tuple[str, ...] | None = None,
) -> tuple[Manifest, bytes | None, list[str]]:
    """Return the manifest of a dataset, its bytes where it is a file, and what is to be told.

    there: what `claims` gives. classes: names of classes, where the file of the splits has them.
    Raises DamageError where none can be had, NotPackedError, OptionError, VersionError.
    """
    try:
        return *_read(index), []
    except FileNotFoundError:
        why = "not there"
    except DamageError:
        why = "damaged"
    if copy is not None:
        one, data = _read_copy(copy)
        _refuse_older(index, one, there)
        if there and one.dataset_id not in {claim.says[1] for claim in there}:
            raise OptionError(
                f"{printable(copy.url, 4096)}: its dataset is {one.dataset_id.hex()}, and none of "
                f"the shards in {printable(index.url, 4096)} is of it: it is no copy"
            )
        return one, data, [_NOTE.format(why, "that of the copy takes its place")]
    one, told = _of_shards(index, classes)
    return one, None, [_NOTE.format(why, told)]


def _read(index: Location) -> tuple[Manifest, bytes]:
    data = index.read(MANIFEST, manifest.MAX_MANIFEST)
    return manifest.parse(data, path_in(index, MANIFEST)), data


def _read_copy(copy: Location) -> tuple[Manifest, bytes]:
    """Read the manifest of a copy. Raises NotPackedError, DamageError."""
    with contextlib.suppress(FileNotFoundError):
        return _read(copy)
    manifest.load(copy)  # says what is there instead
    raise NotPackedError(path_in(copy, MANIFEST))


def _names(index: Location) -> list[str]:
    """Return the names in a directory; none of one that is not there, or of an object store."""
    if not isinstance(index, LocalDirectory) or not os.path.isdir(index.root):
        return []
    return [from_file_name(name) for name in sorted(os.listdir(index.root))]


def _refuse_older(index: Location, one: Manifest, there: Sequence[Claim]) -> None:
    """Raise DamageError where a directory was changed in a way that a manifest does not know.

    One that has a number of its shards, under another name, took the place of that one: records
    were erased, and their list may be the same, since they had been dropped before.
    """
    known, id_ = [one], one.dataset_id
    with contextlib.suppress(DamageError, VersionError):
        known += history(index, one)
    named = {older.excluded.name for older in known if older.excluded is not None}
    lists = {name for name in _names(index) if sidecar_magic(name) == MAGICS["excluded"]}
    shards = {older.shard(number).name for older in known for number in range(older.shards)}
    others = {of.name for of in there if of.version < ERASED or of.says[1] != id_}
    anew = {
        name
        for name in {*_names(index)} - shards - {*one.erased} - others
        if (number := shard_number(name)) is not None and number < one.shards
    }
    if index.exists(kept_name(one.version_id)) or lists - named or anew:
        raise DamageError(
            f"{path_in(index, MANIFEST)}: the manifest cannot be read, and the copy is of another "
            f"version, {one.version_id}: records that were dropped since would come back. Give a "
            "copy of the newest version, or take that copy as it is (`shardio copy`)"
        )


# --- of shards ------------------------------------------------------------------------------------


def _of_shards(index: Location, classes: tuple[str, ...] | None) -> tuple[Manifest, str]:
    """Make a manifest of the shards that lie in a directory, and say what it lacks.

    Only of a dataset that was packed and never changed. Raises DamageError, NotPackedError.
    """
    where = path_in(index, MANIFEST)
    shards = [name for name in _names(index) if shard_number(name) is not None]
    if not shards:
        manifest.load(index)  # says what is there instead, or what is wrong
    _refuse_changed(index)
    infos, blobs, folders = dict[int, ShardInfo](), 0, dict[int, str]()
    seen = set[tuple[bytes, tuple[tuple[str, str], ...], str]]()
    for name in shards:
        format = next(one for one, row in PACKED.items() if name.endswith(row.suffix))
        with contextlib.closing(index.open(name)) as file:
            shard = _open(index, format, file)
            if shard.version or shard.number in infos:
                raise DamageError(
                    f"{where}: the manifest cannot be read, and {printable(name)} is of another "
                    "version, or another dataset, than others beside it. Give a copy: --from COPY"
                )
            seen.add((shard.dataset_id, shard.schema.fields, format))
            infos[shard.number] = _info(name, shard, file)
            with contextlib.suppress(DamageError, StorageError):
                blobs += shard.blob_bytes()
                _note_folders(shard, folders)
    if len(seen) != 1 or sorted(infos) != [*range(len(infos))]:
        raise DamageError(
            f"{where}: the manifest cannot be read, and the shards here are not those of one "
            "dataset, one for each number from 0. Give a copy: --from COPY"
        )
    [(id_, fields, format)] = seen
    names = tuple(folders[label] for label in sorted(folders))
    # As packing numbers folders; where one is empty, nobody knows its name.
    if classes is None and names and [*names] == sorted({*names}) and max(folders) < len(names):
        classes = names
    one = manifest.make(
        [infos[number] for number in sorted(infos)],
        dataset_id=id_,
        format=format,
        schema=Schema(fields),
        classes=classes,
        options={},
        blob_bytes=blobs,
    )
    lacks = "" if classes else "the names of the classes, "
    told = (
        f"a new one names the {len(infos):,} shards that are here; it lacks {lacks}how they were "
        "packed, and shards that followed the last one, if there were any"
    )
    return one, told


def _refuse_changed(index: Location) -> None:
    """Raise DamageError where files tell that the dataset was changed after it was packed."""
    for name in _names(index):
        if name == TAGS or kept_id(name) or sidecar_magic(name) or has_overlay_name(name):
            raise DamageError(
                f"{path_in(index, MANIFEST)}: the manifest cannot be read, and the dataset was "
                f"changed after it was packed ({printable(name)} is there): the shards do not say "
                "which records were dropped. Give a copy of the newest version: --from COPY"
            )


def _open(index: Location, format: str, file: File) -> RecordShard:
    """Open a shard of which nothing is known. Raises DamageError."""
    try:
        return PACKED[format].shard(file, verify=False)
    except (DamageError, StorageError, VersionError) as error:
        raise DamageError(
            f"{path_in(index, MANIFEST)}: the manifest cannot be read, and neither can this shard, "
            f"so nobody knows how many records it has: {error}\nGive a copy: --from COPY"
        ) from None


def _info(name: str, shard: RecordShard, file: File) -> ShardInfo:
    """Return what a manifest said of a shard, by its name, whose digits its SHA-256 begins with."""
    stated = bytes.fromhex(name.partition("-")[2][:8])
    with contextlib.suppress(StorageError):
        if (digest := file.sha256())[:4] == stated:
            stated = digest
    # Else nobody knows what it was, and it is not taken as it is.
    digest = stated.ljust(32, b"\0")
    return ShardInfo(name, shard.number, shard.records, file.size, digest, shard.index_checksum)


def _note_folders(shard: RecordShard, folders: dict[int, str]) -> None:
    """Note the folder that a key of each label begins with. Raises DamageError."""
    labels = shard.columns.get("label", np.empty(0))
    if isinstance(labels, np.ma.MaskedArray):
        return
    for label, first in zip(*np.unique(labels, return_index=True), strict=True):
        if label not in folders and labels.dtype.kind in "iu":
            folder, slash, _ = shard.key(int(first)).partition(b"/")
            folders[int(label)] = key_text(folder) if slash else ""
