"""Index files in place again: what became of them is a new version of their dataset.

How it works. A file that has the name, size, and time or content that it had is unchanged: its
index is kept, under another number where files before it came or went. All others are scanned.
Records that were dropped or annotated stay so by their places in unchanged files. Those of files
that changed or went are looked for in what was scanned: by the hash of their keys, since the old
bytes are not ours, and are gone; where keys are but places, by the checksum of their bytes.

A folder of images keeps its runs, so no record moves: new images are runs behind them, and a run
of which images changed or went is scanned anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..dataset.reader import Reader
from ..errors import DamageError, OptionError, SourceError, printable
from ..formats import FOREIGN, sha256
from ..formats.base import Column, Opening, Overlay, ShardInfo
from ..formats.foreign.base import (
    MAX_SIDECAR,
    Sidecar,
    load,
    own_key,
    renumbered,
    sidecar_checksum,
    sidecar_name,
)
from ..formats.foreign.imagefolder import ImageRun, described_keys
from ..formats.index import checksum, key_hash
from ..formats.manifest import Manifest
from ..formats.overlay import newest_of
from ..formats.sample import Schema
from ..formats.version import NONE, Numbers, SourceNotes, history, load_sources
from ..names import key_text
from ..storage import local
from ..storage.base import Location
from ..storage.location import locate
from ..units import show_count
from .options import PackOptions
from .plan import make_plan
from .process_pool import Executor, Progress, Report, run
from .scan import FieldValues, Found, Runs, Scanned, manifest_of, problems_of, scan_all
from .sources.base import Listing, Problem, renumber
from .values_file import values_of, write_values
from .versions import commit, with_excluded

# What a scan would have seen of a field of each kind; of others its own name, which stays as it is.
_SEEN = {"bytes": "bytes", "image": "bytes", "array": "ndarray"}


@dataclass(frozen=True)
class How:
    """How files are indexed; as of `index`."""

    fields: Mapping[str, str]
    numbered: bool  # by the classes of another dataset
    checksum: bool
    gone: str | None
    forget: bool
    jobs: int
    executor: Executor | None
    progress: Progress | None
    skip: bool = False  # files that are no images are left out


@dataclass
class Again:
    """The files of an index as they are now, and what they were."""

    found: Found
    before: Manifest
    same: dict[int, int] = field(default_factory=dict)  # of shards that are: now, and before
    new: list[str] = field(default_factory=list)  # names of files
    changed: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    compared: int = 0  # shards whose contents were read
    dropped: int = 0  # records of what was scanned that stay dropped
    lost: int = 0  # annotated records that are not there any more
    repaired: int = 0  # shards that are as they were, whose index was not
    rejected: Sequence[Problem] = ()  # images that were left out

    @property
    def is_same(self) -> bool:
        """Return whether all is as it was."""
        return len(self.same) == len(self.found.names) == self.before.shards

    @property
    def unchanged(self) -> int:
        """Return how many files are as they were."""
        if (listing := self.found.listing) is None:
            return len(self.same)
        return len(listing.keys) - len(self.new) - len(self.changed)


def compare(found: Found, before: Manifest, index: Location, how: How) -> Again:
    """Find out which files are new, changed and gone. Raises OptionError, StorageError."""
    names, notes = before.names or (), load_sources(index, before)
    _theirs(before, how.fields)
    if found.format != before.format:
        raise OptionError(
            f"{printable(found.root)}: holds files of {found.format}, and the index that is here "
            f"is of {before.format}; choose by --format, or another directory by --out. "
            "--overwrite makes another dataset in its place"
        )
    again = Again(found, before)
    if found.listing is not None:
        again.found = found = _in_runs(again, index, found.listing, how.numbered)
    old = {name: number for number, name in enumerate(names)}
    unsure, opening = list[tuple[int, int]](), before.opening(index, found.place)
    for number, name in enumerate(found.names):
        at = old.pop(name, None)
        if at is None:
            again.new += [name] * (found.listing is None)
            continue
        noted = (found.sizes[number], _mark(found.marks[number]))
        side = _whole(index, before, at)
        if (
            side is None
            or found.sizes[number] != int(before.shard_sizes[at])
            or (found.extras and found.extras[number] != side.extra)
        ):
            again.changed += [name] * (found.listing is None)
        elif not how.checksum and found.marks[number] and notes and notes.of(at) == noted:
            again.same[number] = at
        else:
            unsure.append((number, at))
    again.gone += [*old] if found.listing is None else []
    again.compared = len(unsure)  # runs, of a folder of images
    report = Report(how.progress, sum(found.sizes[number] for number, _ in unsure))
    infos = [before.shard(at) for _, at in unsure]
    results = run(partial(_is_same, found.format, opening), infos, jobs=how.jobs, report=report)
    for (number, at), same in zip(unsure, results, strict=True):
        if same:
            again.same[number] = at
        elif found.listing is None:
            again.changed.append(found.names[number])
    if found.listing is not None:
        again.changed += _other_images(again, index)
    return again


def _is_same(format: str, opening: Opening, info: ShardInfo, add: Callable[[int], None]) -> bool:
    """Return whether a file has the bytes that were indexed."""
    try:
        same = sha256(format, opening, info) == info.sha256
    except (DamageError, FileNotFoundError):
        same = False
    add(info.size)
    return same


def _whole(index: Location, one: Manifest, number: int) -> Sidecar | None:
    """Load the index of a shard; None: it is missing or damaged, so the shard is scanned."""
    with contextlib.suppress(DamageError):
        return load(*_of(index, one, number))
    return None


def _mark(mark: str) -> int:
    """Return what tells that a file changed as a number: of a directory's, its time."""
    if mark.isdigit() and int(mark) < 1 << 63:
        return int(mark)
    return int.from_bytes(hashlib.sha256(mark.encode()).digest()[:8], "little", signed=True)


def _of(index: Location, one: Manifest, number: int) -> tuple[Location, ShardInfo, bytes]:
    """Return by what the index of a shard is loaded."""
    return index, one.shard(number), one.dataset_id


# --- folders of images ----------------------------------------------------------------------------


def _in_runs(again: Again, index: Location, listing: Listing, numbered: bool) -> Found:
    """Return the images of a folder in the runs that they have, and new ones in runs behind.

    Notes which images are new, gone, and of another size. Raises OptionError.
    """
    before = again.before
    listing = _with_classes(before, listing, numbered)
    runs = Runs(listing)
    places = {key: place for place, key in enumerate(listing.keys)}
    for at, name in enumerate(before.names or ()):
        if (side := _whole(index, before, at)) is None:
            continue  # nobody knows which images it had: these are new
        there = []
        keys = described_keys(side.extra)
        for key, size in zip(keys, side.lengths.tolist(), strict=True):
            if (place := places.pop(key, None)) is None:
                again.gone.append(key_text(key))
                continue
            there.append(place)
            if size != int(listing.sizes[place]):
                again.changed.append(key_text(key))
        if there:
            runs.add(name, there)
    rest = np.array(sorted(places.values()), np.int64)
    again.new += [key_text(listing.keys[place]) for place in rest.tolist()]
    if len(rest):
        size = before.options.get("shard_size")
        options = PackOptions(format="imagefolder", shuffle=True, shard_size=size)
        plan = make_plan(listing.take(rest), options)
        first = 1 + max((int(name.rpartition("-")[2]) for name in before.names or ()), default=-1)
        for shard in range(plan.shards):
            runs.add(f"files-{first + shard:05d}", [places[key] for key in plan.rows(shard).keys])
    absent = [i for i, name in enumerate(listing.classes or ()) if name in {*listing.absent}]
    options_now = {name: value for name, value in before.options.items() if name != "absent"}
    return replace(
        again.found,
        names=runs.names,
        sizes=runs.sizes,
        marks=runs.marks,
        extras=runs.extras,
        classes=listing.classes,
        options=options_now | ({"absent": absent} if absent else {}),
        listing=listing,
    )


def _with_classes(before: Manifest, listing: Listing, numbered: bool) -> Listing:
    """Return a listing with the classes of an index, and new ones behind. Raises OptionError.

    numbered: it has the classes of another dataset
    """
    if listing.classes is None or before.classes is None:
        return listing
    known = set(before.classes)
    own = (*before.classes, *(name for name in listing.classes if name not in known))
    if numbered and own != listing.classes:
        raise OptionError(
            "--classes: the classes of the other dataset are not those that this index has, "
            "with new ones behind them. --overwrite makes another dataset in its place"
        )
    return renumber(listing, own)


def _other_images(again: Again, index: Location) -> Iterator[str]:
    """Yield the images in runs that are not the same whose bytes are others, of the same size."""
    found, old = again.found, {name: at for at, name in enumerate(again.before.names or ())}
    for number, name in enumerate(found.names):
        if number in again.same or name not in old:
            continue
        if (side := _whole(index, again.before, old[name])) is None:
            continue
        told = zip(side.lengths.tolist(), side.checksums.tolist(), strict=True)
        there = dict(zip(described_keys(side.extra), told, strict=True))
        run_now = ImageRun(found.place, name, found.extras[number])
        for record, (start, length) in enumerate(run_now.scan()):
            size, checked = there.get(run_now.key(record), (-1, 0))
            if size == length and checksum(run_now.read(start, length)) != checked:
                yield key_text(run_now.key(record))


# --- the new version ------------------------------------------------------------------------------


def commit_again(
    again: Again, folder: str, how: How, list_left_out: Callable[[Sequence[Problem]], None]
) -> tuple[Manifest, list[str]]:
    """Scan what is new, and commit it, while the folder is owned. Raises as `index` does.

    list_left_out: called with what is left out, before the commit: a list of keys that the dataset
    has is taken for a user's.

    Returns the manifest, and the fields that were left out for their names.
    """
    before, found = again.before, again.found
    theirs = {**_theirs(before, how.fields), **how.fields}
    known = {now: Scanned(_renumbered(folder, before, at, now)) for now, at in again.same.items()}
    of_call = how.jobs, how.progress, None, known, None, how.executor, how.skip
    scanned = scan_all(found, folder, before.dataset_id, *of_call)
    _leave_out(again, folder, scanned)
    list_left_out(again.rejected)
    found = again.found
    after, left_out = manifest_of(
        found, scanned, theirs, before.dataset_id, _known(before, theirs, again)
    )
    if after.names == before.names:
        same = (after.shard_sha256 == before.shard_sha256).all(axis=1)
        for number in np.flatnonzero(same & (after.shard_index == before.shard_index)).tolist():
            again.repaired += number not in again.same
            again.same[number] = number
            again.changed = [one for one in again.changed if one != found.names[number]]
        if again.is_same:
            return before, left_out
    options = after.options if found.listing is not None else before.options | after.options
    after = replace(after, schema=_schema(before, after), options=options)
    after, numbers = _carried(again, after, folder, how.forget)
    noted = zip(found.sizes, found.marks, strict=True)
    sizes = np.array([size if mark else -1 for size, mark in noted], np.int64)
    times = np.array([*map(_mark, found.marks)], np.int64)
    after, files = with_excluded(after, numbers, SourceNotes(sizes, times))
    return commit(folder, before, after, "index", _changes(again, after), files), left_out


def _leave_out(again: Again, folder: str, scanned: list[Scanned]) -> None:
    """Note which images were left out, and remove the last runs, if nothing of them is left."""
    found = again.found
    again.rejected = problems_of(found, scanned)
    bad = {key_text(key) for key, _ in again.rejected}
    if not bad or found.listing is None:
        return
    again.gone += [one for one in again.changed if one in bad]
    again.new, again.changed = (
        [o for o in some if o not in bad] for some in (again.new, again.changed)
    )
    left = [at for at, key in enumerate(found.listing.keys) if key_text(key) not in bad]
    again.found = replace(found, listing=found.listing.take(np.array(left, np.int64)))
    while scanned and (info := scanned[-1].info) is not None and not info.records:
        if info.name in (again.before.names or ()):
            break
        for each in (found.names, found.sizes, found.marks, found.extras, scanned):
            each.pop()
        local.remove(os.path.join(folder, sidecar_name(info.number, info.index_checksum)))


def _theirs(before: Manifest, fields: Mapping[str, str]) -> dict[str, str]:
    """Return what the files call the fields of an index. Raises OptionError for other names."""
    renamed = before.options.get("fields", {})
    theirs = {name: renamed.get(name, name) for name, _ in before.stored_schema.fields[1:]}
    ours = {source: name for name, source in theirs.items()}
    for name, source in fields.items():
        if theirs.get(name, source) != source or ours.get(source, name) != name:
            raise OptionError(
                f"--fields {printable(name)}={printable(source)}: the index that is here, "
                f"{before.where}, has other names of fields; leave it out. --overwrite makes "
                "another dataset in its place"
            )
    return theirs


def _changes(again: Again, after: Manifest) -> dict[str, int]:
    """Return how many records came and went with their files, or are of files that changed."""
    if again.found.listing is not None:
        added, changed, removed = len(again.new), len(again.changed), len(again.gone)
    else:
        now, old = ({n: i for i, n in enumerate(m.names or ())} for m in (after, again.before))
        added = sum(int(after.shard_records[now[name]]) for name in again.new)
        changed = sum(int(after.shard_records[now[name]]) for name in again.changed)
        removed = sum(int(again.before.shard_records[old[name]]) for name in again.gone)
    return {"added": added, "changed": changed, "removed": removed}


def _renumbered(folder: str, before: Manifest, at: int, number: int) -> ShardInfo:
    """Return the entry of an unchanged shard under its number, and write its index for that."""
    info = before.shard(at)
    if at == number:
        return info
    index = locate(folder)
    load(*_of(index, before, at))  # which checks it
    data = renumbered(index.read(sidecar_name(at, info.index_checksum), MAX_SIDECAR), number)
    stated = sidecar_checksum(data)
    assert stated is not None
    local.write_file(folder, sidecar_name(number, stated), data)
    return replace(info, number=number, index_checksum=stated)


def _known(before: Manifest, theirs: dict[str, str], again: Again) -> Scanned:
    """Return what an index says of the shards that are unchanged."""
    seen = {
        theirs[name]: FieldValues({_SEEN.get(kind, kind)}, kind != "bytes")
        for name, kind in before.stored_schema.fields[1:]
    }
    kept = int(before.shard_sizes[list(again.same.values())].sum())
    blobs = before.blob_bytes * kept // max(1, before.size)  # of files that went, by their size
    classes = {} if before.classes is None else {theirs.get("label", ""): before.classes}
    group = before.options.get("row_group", {"rows": 0, "bytes": 0})
    return Scanned(None, seen, blobs, classes, (group["rows"], group["bytes"]))


def _schema(before: Manifest, after: Manifest) -> Schema:
    """Return the fields in their order, and behind them those that are new.

    Raises SourceError where one is of another kind now, OptionError where one was annotated.
    """
    kinds, old = dict(after.schema.fields), dict(before.stored_schema.fields)
    for name, kind in old.items():
        if kinds.get(name, kind) != kind:
            raise SourceError(
                f"{before.where}: field {printable(name)!r} is of kind {kind}, and would be of "
                f"kind {kinds[name]} with the files that are new or changed. Correct them; or "
                "--overwrite makes another dataset, of which nothing is dropped or annotated"
            )
    added = {one.field for one in before.overlays if one.added}
    if taken := [name for name in kinds if name in added]:
        raise OptionError(
            f"{before.where}: the field {printable(taken[0])!r} was annotated, and files that are "
            "new or changed have one of this name: give theirs another one, by --fields NAME="
            f"{printable(taken[0])}"
        )
    return Schema([*old.items(), *((n, k) for n, k in kinds.items() if n not in old)])


# --- what was dropped and annotated ---------------------------------------------------------------


class _Records(NamedTuple):
    """The records of a file that changed or went that were dropped or annotated."""

    one: Manifest  # the last version that had the file
    info: ShardInfo
    dropped: Numbers
    values: dict[str, dict[int, Any]]  # by field and record

    @property
    def rows(self) -> list[int]:
        """Return their numbers in the shard, ascending."""
        return sorted(
            {*self.dropped.tolist(), *(row for rows in self.values.values() for row in rows)}
        )


def _carried(again: Again, after: Manifest, folder: str, forget: bool) -> tuple[Manifest, Numbers]:
    """Return the manifest with its annotated fields, and the numbers of the dropped records.

    Raises OptionError where a record cannot be looked for, DamageError, StorageError.
    """
    index, before = locate(folder), again.before
    reader, starts = Reader(index, before), np.cumsum([0, *after.shard_records.tolist()])
    numbers = [reader.dropped_in(at) + starts[now] for now, at in again.same.items()]
    values: dict[str, dict[int, dict[int, Any]]] = defaultdict(lambda: defaultdict(dict))
    found, stays = set[tuple[str, int]](), set[int]()
    left = [*_left(again, index)] if len(again.same) < after.shards or again.gone else []
    for one, row, number, record in _places(again, after, index, left, forget):
        found.add((one.info.name, row))
        if np.isin(row, one.dropped):
            stays.add(int(starts[number]) + record)
        for name, own in one.values.items():
            if row in own:
                values[name][number].setdefault(record, own[row])
    again.dropped = len(stays)
    lost = {
        (one.info.name, row)
        for one in left
        if one.one is before
        for row in np.setdiff1d(one.rows, one.dropped).tolist()
    }
    again.lost = len(lost - found)
    overlays, fresh = [], list[str]()
    opening = before.opening(index)
    for beside in before.overlays:
        files = dict[int, tuple[ShardInfo, ...]]()
        for now, at in again.same.items():
            files |= _moved(folder, opening, before, beside, at, now, fresh)
        for number, rows in values[beside.field].items():
            pairs = sorted(rows.items())
            info = write_values(folder, before.dataset_id, beside, number, pairs, fresh)
            files[number] = (info,)
        overlays.append(replace(beside, files=dict(sorted(files.items()))))
    schema = [*after.schema.fields, *((one.field, one.kind) for one in overlays if one.added)]
    after = replace(after, schema=Schema(schema), overlays=tuple(overlays))
    return after, np.unique(np.concatenate([NONE, *numbers, np.array(sorted(stays), np.int64)]))


def _moved(
    folder: str,
    opening: Opening,
    before: Manifest,
    beside: Overlay,
    at: int,
    number: int,
    fresh: list[str],
) -> dict[int, tuple[ShardInfo, ...]]:
    """Return the files of values of an unchanged shard, under its number now."""
    if at not in beside.files:
        return {}
    if at == number:
        return {number: beside.files[at]}
    with values_of(opening, beside.field, at, int(before.shard_records[at])) as files:
        values = newest_of(files)
        info = write_values(folder, before.dataset_id, beside, number, values, fresh)
    return {number: (info,)}


def _left(again: Again, index: Location) -> Iterator[_Records]:
    """Yield the records of files that changed or went, of each file by its last version.

    A file may have gone with an earlier version, and be back. A run of images is no file: any that
    was in it may be back, so each that there was is told, the newest first. Raises DamageError.
    """
    runs = again.before.format == "imagefolder"
    names = {again.found.names[number] for number in again.same}
    seen: set[Any] = {
        (again.before.names or ())[at] if not runs else again.before.shard(at).sha256
        for at in again.same.values()
    }
    seen |= set() if runs else names
    kinds = {one.field: one.kind for one in again.before.overlays}
    for one in history(index, again.before):
        reader, opening = Reader(index, one), one.opening(index)
        for at, name in enumerate(one.names or ()):
            info, values = one.shard(at), {}
            what = info.sha256 if runs else name
            if what in seen:
                continue
            seen.add(what)
            for beside in one.overlays:
                if at in beside.files and kinds.get(beside.field) == beside.kind:
                    with values_of(opening, beside.field, at, info.records) as files:
                        values[beside.field] = dict(newest_of(files))
            if len(dropped := reader.dropped_in(at)) or values or runs:
                yield _Records(one, info, dropped, values)


def _matches(
    sides: Mapping[int, Sidecar],
    numbers: Mapping[str, int],
    wanted: Mapping[str, Mapping[int, list[tuple[_Records, int]]]],
) -> Iterator[tuple[_Records, int, int, int]]:
    """Yield the records of files that were scanned which are wanted by a column of their index."""
    for number, side in sides.items():
        for name, known in wanted.items():
            column: Column = getattr(side, name)
            places = np.flatnonzero(np.isin(column, np.array([*known], column.dtype)))
            for record in places.tolist():
                value = int(column[record])
                # Files may have the same keys: a record is looked for in its own file first.
                for one, row in known[value]:
                    own = numbers.get(one.info.name, number)
                    if own == number or value not in getattr(sides[own], name):
                        yield one, row, number, record


def _places(
    again: Again, after: Manifest, index: Location, left: Iterable[_Records], forget: bool
) -> Iterator[tuple[_Records, int, int, int]]:
    """Yield where records are now: file and number before, shard and number in what was scanned.

    Raises OptionError where records cannot be looked for, unless they are to be forgotten.
    """
    fresh = [number for number in range(after.shards) if number not in again.same]
    sides = {number: load(*_of(index, after, number)) for number in fresh}
    numbers = {after.shard(number).name: number for number in fresh}
    keys: dict[int, list[tuple[_Records, int]]] = defaultdict(list)  # by hash
    contents: dict[int, list[tuple[_Records, int]]] = defaultdict(list)  # by checksum
    ranges = FOREIGN[after.format].file.ranges
    newer: dict[str, set[int]] = defaultdict(set)  # by run: hashes of keys that it had since
    for one in left:
        side = _whole(index, one.one, one.info.number)
        twins = [n for n in fresh if after.shard(n).sha256 == one.info.sha256]  # of another name
        yield from ((one, row, number, row) for number in twins for row in one.rows)
        untold = len(one.rows) if side is None and not twins else 0
        for row in one.rows if side is not None else ():
            assert side is not None
            hashed = int(side.key_hashes[row])
            if hashed in newer[one.info.name]:
                continue
            if hashed != key_hash(own_key(one.info.name, row)):
                keys[hashed].append((one, row))
            elif ranges:
                contents[int(side.checksums[row])].append((one, row))
            else:
                untold += not twins
        if side is not None:
            newer[one.info.name] |= {*side.key_hashes.tolist()}
        if untold and fresh and not forget:
            raise OptionError(
                f"{printable(one.info.name)}: it changed, or is gone, and "
                f"{show_count(untold, 'record')} of it were dropped or annotated, which cannot be "
                "found again: its old index is damaged, or they have no keys of their own in "
                f"{after.format}. Nothing was changed. --forget takes them for new ones: drop or "
                "annotate them again"
            )
    yield from _matches(sides, numbers, {"key_hashes": keys, "checksums": contents})
