"""Versions of a dataset: commit a new one, list them, name one, go back to one.

A commit keeps the manifest that is there under its id, then puts the new one into its place.
Shards are not touched. Killed anywhere, the old version is whole; what was written for a new one is
removed by `gc`. Of two writers one is told: in a directory at once, since who commits owns it, as a
packer does; in a store by its commit, which is on condition (place.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .._version import __version__
from ..dataset.reader import Reader
from ..dataset.sequence import stored_of
from ..errors import (
    DamageError,
    OptionError,
    StorageError,
    VersionError,
    printable,
    there_are,
)
from ..formats import manifest, sha256
from ..formats.foreign.base import MAGIC, has_sidecar_name, sidecar_name
from ..formats.manifest import GROWN, MANIFEST, Commit, Manifest
from ..formats.overlay import has_overlay_name, rows_that_differ
from ..formats.record import MAGIC as RECORDS
from ..formats.sample import pack_columns
from ..formats.version import (
    NONE,
    TAGS,
    Numbers,
    SourceNotes,
    changed_since,
    check_tag,
    dump_excluded,
    dump_tags,
    erased_count,
    find_version,
    history,
    kept_id,
    kept_name,
    load_excluded,
    load_kept,
    load_tags,
    load_version,
    parse_tags,
    readable,
    sidecar_magic,
)
from ..names import KEY, key_bytes, key_text
from ..storage.base import Location, path_in
from ..storage.local import LocalDirectory
from ..storage.location import Target, locate
from ..storage.options import Storage
from ..units import check_bool, show_count
from .journal import shard_number
from .objects import missing_in
from .place import Place, Stored, data_root, find_place
from .shard_writer import open_own

_SHOWN = 10  # keys that are named
_OF_COMMIT = ("commit", "version", "library", "erased")  # not of what is shown

# --- commit ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def changing(place: Place | str) -> Iterator[Manifest]:
    """Own a place, as far as it can be, and give the manifest of the dataset that is changed.

    A str is a directory. Raises as `Place.owned`, and NotPackedError.
    """
    found = find_place(place) if isinstance(place, str) else place
    with found.owned():
        yield manifest.load(found.location)


def commit(
    place: Place | str,
    before: Manifest,
    after: Manifest,
    command: str,
    changes: Mapping[str, int],
    files: Mapping[str, bytes],
) -> Manifest:
    """Make a version the newest, in a place that is owned. Returns its manifest.

    before   the newest version until then
    after    shards and dropped records of the new one
    changes  how many records it added, dropped, brought back; those that are 0 are left out
    files    those that it names, and are not there yet

    Raises BusyError where another one was committed since, StorageError.
    """
    own = {name: count for name, count in changes.items() if count}
    this = Commit(before.version_id, commit_time(), command, own)
    named = files_of(after)
    gone = {old: one for old, one in {**before.erased, **after.erased}.items() if old not in named}
    new = replace(after, version=GROWN, library=__version__, commit=this, erased=gone, digest="")
    place = find_place(place) if isinstance(place, str) else place
    old = place.stored(MANIFEST)
    if not manifest.is_dump_of(old.data, before):
        raise place.changed_meanwhile()
    for name, data in files.items():
        place.location.write(name, data)
    # A copy, and no hard link: the file system may have none, and a manifest is small. Its bytes,
    # and not what we would write: its id is of these.
    place.location.write(kept_name(before.version_id), old.data)
    place.replace(MANIFEST, old, new.dump(), kept_name(new.version_id))
    return new


def commit_time() -> str:
    """Return the time, in UTC, as manifests have it."""
    # https://reproducible-builds.org/specs/source-date-epoch: equal commits make equal files.
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    seconds = int(given) if re.fullmatch("[0-9]{1,11}", given) else None
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def with_excluded(
    one: Manifest, numbers: Numbers, notes: SourceNotes | None = None
) -> tuple[Manifest, dict[str, bytes]]:
    """Return a manifest of which just these records are dropped, and the files that it names.

    notes: of the files that records were packed of; None: those that it names stay.
    """
    one, files = replace(one, excluded=None), dict[str, bytes]()
    if len(numbers):
        side, files[side.name] = dump_excluded(one.dataset_id, numbers)
        one = replace(one, excluded=side)
    if notes is not None:
        side, files[side.name] = notes.dump(one.dataset_id)
        one = replace(one, sources=side)
    return one, files


def changing_all(
    datasets: Mapping[str, Place], owners: contextlib.ExitStack, dry_run: bool = False
) -> Iterator[tuple[str, Place, Manifest]]:
    """Yield datasets that are changed: split, place and manifest, owned as `changing` does.

    Until `owners` ends; of a dry run nobody owns them.
    """
    for split, place in datasets.items():
        found = manifest.load(place.location) if dry_run else owners.enter_context(changing(place))
        yield split, place, found


def version_lines(versions: Mapping[str, str]) -> list[str]:
    """Say which versions a change left, a line for each split."""
    return [
        f"version {one}{f' of {printable(split)}' if split else ''}"
        for split, one in versions.items()
    ]


def check_keys(option: str, keys: Iterable[str | bytes]) -> set[bytes]:
    """Return keys as they are stored. Raises OptionError."""
    if isinstance(keys, (str, bytes)):
        raise OptionError(f"{option} is {printable(repr(keys))}: expected several keys, as a list")
    found = set()
    for key in keys:
        try:
            found.add(key_bytes(key))
        except (UnicodeEncodeError, TypeError, AttributeError):
            text = printable(repr(key))
            raise OptionError(f"{option}: {text} is no key of a record") from None
    return found


def keys_text(keys: Sequence[str]) -> str:
    """Return keys that no record has, for a message: the first of them."""
    more = f", ... ({len(keys):,} keys)" if len(keys) > _SHOWN else ""
    word = "the key" if len(keys) == 1 else "one of the keys"
    return f"{word} {', '.join(printable(repr(key)) for key in keys[:_SHOWN])}{more}"


def files_of(one: Manifest) -> set[str]:
    """Return the names of the files of ours that a version consists of, but for its manifest."""
    infos = map(one.shard, range(one.shards))
    if one.names is None:
        named = {info.name for info in infos}
    else:  # shards of another format: the files of ours are their indexes
        named = {sidecar_name(info.number, info.index_checksum) for info in infos}
    beside = (infos for overlay in one.overlays for infos in overlay.files.values())
    named |= {info.name for infos in beside for info in infos}
    return named | {side.name for side in (one.excluded, one.sources) if side is not None}


def is_overlay(folder: str, name: str) -> bool:
    """Return whether a file is one of a field's values, by its name and its first bytes."""
    return has_overlay_name(name) and _begins(LocalDirectory(folder), name, RECORDS)


def is_ours(index: Location, name: str) -> bool:
    """Return whether a file is one that a version may name, or keeps one, by its name and bytes."""
    if shard_number(name) is not None:
        with (
            contextlib.suppress(FileNotFoundError, StorageError, DamageError, VersionError),
            contextlib.closing(index.open(name)) as file,
        ):
            try:
                return open_own(file, name) is not None
            except DamageError:  # anybody's LMDB begins as ours
                return _begins(index, name, RECORDS)
        return False
    magic = RECORDS if has_overlay_name(name) else sidecar_magic(name)
    if has_sidecar_name(name):  # of the index of a foreign shard
        magic = MAGIC
    return _keeps(index, name) if magic is None else _begins(index, name, magic)


def _keeps(index: Location, name: str) -> bool:
    with contextlib.suppress(DamageError, VersionError, FileNotFoundError):
        return (one := kept_id(name)) is not None and load_kept(index, one) is not None
    return False


def _begins(index: Location, name: str, magic: bytes) -> bool:
    with (
        contextlib.suppress(FileNotFoundError, StorageError),
        contextlib.closing(index.open(name)) as file,
    ):
        return file.size >= len(magic) and file.read(0, len(magic)) == magic
    return False


# --- log ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Version:
    """One version of a dataset; as str, a line."""

    id: str
    time: str | None  # of its commit, in UTC; None: it was packed so
    command: str  # that made it
    changes: Mapping[str, int]  # how many records it added, dropped, brought back
    records: int
    tags: tuple[str, ...] = ()
    split: str = ""  # "": the dataset has no splits
    erased: int = 0  # records of it that were erased since: it cannot be read any more
    changed: int = 0  # files of others in it that changed since: the same
    moved_from: str = ""  # the version that had the tag until now; "": none
    already: bool = False  # it showed what was to be restored; nothing was done

    def __str__(self) -> str:
        what = ", ".join(f"{count:,} {name}" for name, count in sorted(self.changes.items()))
        tags = "".join(f"  [{printable(tag)}]" for tag in self.tags)
        when = f"{self.time or '-':<20}  {printable(self.command):<8}"
        records = show_count(self.records, "record")
        gone = f"  {self.erased:,} erased since: cannot be read" if self.erased else ""
        if self.changed:
            gone += f"  {show_count(self.changed, 'file')} changed since: cannot be read"
        moved = f"  moved from {self.moved_from}" if self.moved_from else ""
        moved += "  shows the same already: nothing was done" if self.already else ""
        return f"{self.id}  {when}  {records}{f' ({what})' if what else ''}{tags}{moved}{gone}"


@dataclass
class Log:
    """Versions of a dataset, or of all its splits, the newest first; as str, a line each."""

    versions: list[Version] = field(default_factory=list)

    def __str__(self) -> str:
        lines, split = [], ""
        for one in self.versions:
            if one.split != split:
                split = one.split
                lines.append(f"{printable(split)}:")
            lines.append(str(one))
        return "\n".join(lines)


def log(path: str | os.PathLike[str], *, storage: Storage | None = None) -> Log:
    """List the versions of a dataset, or of all its splits, the newest first.

    path     of the dataset, or its URL
    storage  a shardio.Storage: how an object store is reached

    A version whose manifest was removed ends the list. Raises NotPackedError, DamageError.
    """
    found = Log()
    for split, index in manifest.datasets_in(locate(path, storage)).items():
        tags, newest = load_tags(index), manifest.load(index)
        for one in history(index, newest):
            gone = erased_count(index, one, newest)
            changed = len(changed_since(one, newest))
            found.versions.append(_described(one, tags, split, gone, changed))
    return found


def _described(
    one: Manifest, tags: Mapping[str, str], split: str = "", erased: int = 0, changed: int = 0
) -> Version:
    """Describe a version for people."""
    own = tuple(sorted(tag for tag, of in tags.items() if of == one.version_id))
    this = one.commit or Commit(None, "", "pack" if one.names is None else "index", {})
    named = one.version_id, this.time or None, this.command, dict(this.changes)
    return Version(*named, one.records, own, split, erased, changed)


# --- diff -----------------------------------------------------------------------------------------


@dataclass
class Diff:
    """What differs between two versions, by keys; as str, a line for each key."""

    old: str  # ids of the versions
    new: str
    added: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # in both, by another record or value
    fields: list[str] = field(default_factory=list)  # that were annotated in between, or before

    def __str__(self) -> str:
        named = (("+", "added"), ("-", "dropped"), ("~", "changed"))
        parts = [(sign, name, getattr(self, name)) for sign, name in named]
        lines = [f"{sign} {printable(key, 4096)}" for sign, _, keys in parts for key in keys]
        counts = (f"{len(keys):,} {name}" for _, name, keys in parts)
        of = f"; fields: {', '.join(map(printable, self.fields))}" if self.fields else ""
        return "\n".join([*lines, f"{self.old} to {self.new}: {', '.join(counts)}{of}"])


def diff(
    path: str | os.PathLike[str],
    old: str,
    new: str | None = None,
    *,
    storage: Storage | None = None,
) -> Diff:
    """Compare two versions of one dataset: which keys were added, dropped or changed.

    path     of the dataset, or its URL
    old      a version, by its id or its tag
    new      another one; default: the newest
    storage  a shardio.Storage: how an object store is reached

    Only keys of records that differ are read, and values that were annotated; but all records
    where one version was compacted and the other was not. Raises OptionError, NotPackedError,
    DamageError.
    """
    index, data = locate(path, storage), data_root(storage)
    before, after = load_version(index, old), load_version(index, new)
    readers = Reader(index, before, root=data), Reader(index, after, root=data)
    if before.dataset_id != after.dataset_id:  # compacted in between: no record is at its place
        return _diff_of_contents(*readers)
    gone, come = _keys_of_one(*readers), _keys_of_one(*reversed(readers))
    fields = _fields_that_differ(before, after)
    both = (gone & come) | _keys_of_other_values(*readers)
    return _as_diff(before, after, come - both, gone - both, both, fields=fields)


def _as_diff(one: Manifest, other: Manifest, *keys: set[bytes], fields: list[str]) -> Diff:
    """Return what differs: keys that were added, dropped and changed, and fields."""
    added, dropped, changed = ([*map(key_text, sorted(some))] for some in keys)
    return Diff(one.version_id, other.version_id, added, dropped, changed, fields)


def _diff_of_contents(one: Reader, other: Reader) -> Diff:
    """Compare two versions of which all records lie elsewhere: all of both are read."""
    here, there = map(stored_of, (one, other))
    places = dict[bytes, list[int]]()
    for row, key in enumerate(there.stored_keys()):
        places.setdefault(key, []).append(row)
    gone, changed, fields = set[bytes](), set[bytes](), set[str]()
    annotated = {beside.field for of in (one, other) for beside in of.manifest.overlays}
    for sample in here:
        if not (rows := places.get(sample[KEY])):
            gone.add(sample[KEY])
            continue
        now = there[rows.pop(0)]
        differ = {
            name
            for name in {**sample, **now}
            if pack_columns(sample.get(name)) != pack_columns(now.get(name))
        }
        if differ:
            changed.add(sample[KEY])
            fields |= differ & annotated
    come = {key for key, rows in places.items() if rows}
    return _as_diff(one.manifest, other.manifest, come, gone, changed, fields=sorted(fields))


def _keys_of_one(one: Reader, other: Reader) -> set[bytes]:
    """Return the keys of the records that only the first of two versions has."""
    keys, places = set[bytes](), _same_shards(one.manifest, other.manifest)
    for shard, count in enumerate(one.manifest.shard_records.tolist()):
        there = places.get(shard)
        records = np.arange(count) if there is None else other.dropped_in(there)
        own = np.setdiff1d(records, one.dropped_in(shard)).tolist()
        keys |= {one.shard(shard).key(record) for record in own}
    return keys


def _fields_that_differ(one: Manifest, other: Manifest) -> list[str]:
    """Return the fields whose values beside the shards are not the same in two versions."""
    sides = [{beside.field: beside for beside in of.overlays} for of in (one, other)]
    names = {**sides[0], **sides[1]}
    return [name for name in names if sides[0].get(name) != sides[1].get(name)]


def _keys_of_other_values(one: Reader, other: Reader) -> set[bytes]:
    """Return the keys of the records in both versions of which an annotated field differs."""
    keys = set[bytes]()
    for shard, there in _same_shards(one.manifest, other.manifest).items():
        pairs = ((one.manifest, shard), (other.manifest, there))
        sides = [{(o.field, o.files.get(number)) for o in of.overlays} for of, number in pairs]
        names = {name for name, _ in sides[0] ^ sides[1]}
        if not names:
            continue
        both = one.shard(shard), other.shard(there)
        for record in {row for name in names for row in rows_that_differ(*both, name)}:
            own, now = int(one.starts[shard]) + record, int(other.starts[there]) + record
            if None not in (one.place(own), other.place(now)):
                keys.add(both[0].key(record))
    return keys


def _same_shards(one: Manifest, other: Manifest) -> dict[int, int]:
    """Return by the numbers of the shards of a version those of the same files in another one."""
    there = {(name, digest): number for number, name, digest in _files(other)}
    found = {number: there.get((name, digest)) for number, name, digest in _files(one)}
    return {number: place for number, place in found.items() if place is not None}


def _files(one: Manifest) -> Iterator[tuple[int, str, bytes]]:
    """Yield the numbers, names and SHA-256 of shards."""
    for number, digest in enumerate(map(bytes, one.shard_sha256)):
        yield number, str(number) if one.names is None else one.names[number], digest


# --- tag and restore ------------------------------------------------------------------------------


def tag(
    path: str | os.PathLike[str],
    name: str,
    *,
    version: str | None = None,
    remove: bool = False,
    force: bool = False,
    storage: Storage | None = None,
) -> Log:
    """Name a version of a dataset, so that it is found by this name, and that `gc` keeps it.

    path     the directory of a dataset, or its URL. Where it has splits, one version of each is
             named
    name     up to 100 characters, without /
    version  by its id or another tag; of splits, by a tag that all have; default: the newest
    remove   take the name away instead
    force    move a name that another version has; else this is an error
    storage  a shardio.Storage: how an object store is reached

    Returns the version that has the name, or had it, of each split one. Raises OptionError,
    BusyError, NotPackedError.
    """
    check_bool(remove=remove, force=force)
    top, name = find_place(path, storage), check_tag(name)
    done, work, known = Log(), list[tuple[Place, Stored | None, dict[str, str]]](), dict[str, str]()
    with contextlib.ExitStack() as owners:
        for split, place, _ in changing_all(top.datasets(), owners):
            old = None
            with contextlib.suppress(FileNotFoundError):
                old = place.stored(TAGS)
            tags = {} if old is None else parse_tags(old.data, place.location)
            known |= tags
            if remove and name not in tags:
                continue
            index = place.location
            with _naming_all(top, split):
                one = find_version(index, name) if remove else load_version(index, version)
            was = "" if remove or tags.get(name) == one.version_id else tags.get(name, "")
            if was and not force:
                raise OptionError(
                    f"{printable(place.url, 4096)}: the tag {printable(name)!r} is of version "
                    f"{was} already. Choose another name, or --force moves it to version "
                    f"{one.version_id}. No tag was changed"
                )
            tags.pop(name, None)
            if not remove:
                tags[name] = one.version_id
            work.append((place, old, tags))
            done.versions.append(replace(_described(one, tags, split), moved_from=was))
        if not work:
            there = there_are(known, name) if known else "there are none"
            raise OptionError(f"tag {printable(name)!r}: no version is called so; {there}")
        for place, old, tags in work:
            place.replace(TAGS, old, dump_tags(tags))
    return done


@contextlib.contextmanager
def _naming_all(top: Place, split: str) -> Iterator[None]:
    """Say of an error of one of several splits how a version of all is named."""
    try:
        yield
    except OptionError as error:
        if not split:
            raise
        raise OptionError(
            f"{error}. Nothing was changed. A version of all splits is named by a tag that all of "
            f"them have; or give the path of one split, such as {printable(top.below(split).url)}"
        ) from None


def restore(path: str | os.PathLike[str], version: str, *, storage: Storage | None = None) -> Log:
    """Make the newest version what an older one was, by a new commit; of each split by one.

    path     the directory of a dataset, or its URL
    version  the older one, by its id or its tag; of splits, by a tag that all have
    storage  a shardio.Storage: how an object store is reached, and where files of others are

    Files of others must be there as they were then. Raises OptionError where the files of that
    version are gone, or others, BusyError, NotPackedError. Where the newest one is so already, it
    stays, and is returned: whoever was interrupted gives the same command again.
    """
    top, data, done = find_place(path, storage), data_root(storage), Log()
    with contextlib.ExitStack() as owners:
        work = []
        for split, place, newest in changing_all(top.datasets(), owners):
            with _naming_all(top, split):
                old = _restorable(place.location, data, newest, version)
            old = replace(old, erased=newest.erased)  # what was said then may be wrong by now
            work.append((split, place, newest, old))
        for split, place, newest, old in work:
            index, after = place.location, newest
            same = replace(old, **{name: getattr(newest, name) for name in _OF_COMMIT})
            if not (already := same.dump() == newest.dump()):
                changes = _restored(index, newest, old)
                after = commit(place, newest, old, "restore", changes, {})
            described = _described(after, load_tags(index), split)
            done.versions.append(replace(described, already=already))
    return done


def _restorable(index: Target, data: Location | None, newest: Manifest, version: str) -> Manifest:
    """Return an older version, all files of which are there. Raises OptionError, DamageError."""
    old = find_version(index, version)
    if others := changed_since(old, newest):
        _refuse_changed(old, index, index if data is None else data, others)
    else:
        old = readable(index, old, newest)
    if missing := missing_in(index, sorted(files_of(old))):
        raise OptionError(
            f"{path_in(index, missing[0])}: version {old.version_id} needs this file, and it "
            "was removed"
        )
    return old


def _restored(index: Location, newest: Manifest, old: Manifest) -> dict[str, int]:
    """Return what going back changes: counts of records."""
    ids = [load_excluded(index, one) for one in (newest, old)]
    counts = [newest.stored_records, old.stored_records]
    if old.dataset_id != newest.dataset_id:  # compacted in between: numbers are others
        ids, counts = [NONE, NONE], [newest.records, old.records]
    changes = {
        "added": max(0, counts[1] - counts[0]),
        "removed": max(0, counts[0] - counts[1]),
    }
    if old.names is None or old.names == newest.names:  # else numbers are of other records
        changes["dropped"] = len(np.setdiff1d(ids[1], ids[0]))
        changes["brought back"] = len(np.setdiff1d(ids[0], ids[1]))
    return changes


def _refuse_changed(old: Manifest, index: Location, data: Location, numbers: Sequence[int]) -> None:
    """Raise OptionError where files of others are not as they were in a version.

    numbers: of those that the newest version has not, or not as they were
    """
    for number in numbers:
        info, why = old.shard(number), "is not as it was then"
        try:
            if sha256(old.format, old.opening(index, data), info) == info.sha256:
                continue
        except FileNotFoundError:
            why = "is not there (if the data lies elsewhere, say where: --root DIR)"
        except DamageError as error:
            why = f"is not as it was then: {error}"
        raise OptionError(
            f"{path_in(data, info.name)}: it {why}. Version {old.version_id} has this file, and "
            "it changed since: bring it back first. Nothing was changed"
        )
