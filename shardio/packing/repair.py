"""Repair a damaged dataset: what is whole of it goes into a new one, and what is lost is listed.

How it works. A file that is as the manifest says is copied, and so is one that is whole in a copy
of the dataset. Of others the records that are whole are found (salvage.py), in all places where
there may be some, and a shard is written of them. One that has all its records is, to the last
byte, the shard that was packed. In the place of a lost record stands one that was erased, and it is
dropped (erase.py says why): the others keep their numbers, bytes and checksums, so that orders,
labels, selections and fields beside the shards hold. Nothing of the original is written to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from .._version import __version__
from ..dataset.reader import Reader
from ..errors import BusyError, DamageError, ExistsError, OptionError, StorageError, printable
from ..formats import PACKED, manifest, open_shard
from ..formats.base import Opening, Overlay, ShardInfo
from ..formats.index import SCALARS, key_hash
from ..formats.manifest import GROWN, MANIFEST, SPLITS, Commit, Manifest, Successor, overlay_name
from ..formats.overlay import ROW, files_of_shard, rows_of
from ..formats.record import ERASED, RecordShard, erased_in, seed_of
from ..formats.version import Numbers, load_excluded, load_sources
from ..names import KEY, from_file_name, key_text
from ..storage import local, lock
from ..storage.base import File, Location, path_in
from ..storage.local import LocalDirectory
from ..storage.location import local_path, locate
from ..storage.lock import JOURNAL
from ..storage.options import Storage
from ..units import Summary, check_group, show_count, show_size
from . import journal, output_dir, rebuild
from .process_pool import Progress, Report, processes, run
from .salvage import Damaged, Piece, find, index_of, read, sample_of, why_lost
from .shard_writer import ShardWriter
from .values_file import write_values, write_without
from .versions import commit_time, version_lines, with_excluded

LOST = "lost.jsonl"
_SHOWN = 10  # of what was lost
_PIECE = 8 << 20  # bytes that are read, hashed and written at a time
_LEAST = 24  # bytes that a record takes of a shard, at least: its frame, its place in the index
_AGAIN = 3  # times that a file that came damaged from a store is read anew
_ZERO: Mapping[str, Any] = {"int": 0, "float": 0.0, "bool": False}  # of a lost record, in a column


@dataclass(frozen=True)
class Lost:
    """A record that is lost, or a value of an annotated field."""

    key: str | None  # where it could be read
    shard: str  # the file that had it
    record: int | None  # its number in the shard; None: values, of which records is not known
    field: str | None  # whose value is lost; None: the record
    why: str

    def __str__(self) -> str:
        what = "values" if self.record is None else f"record {self.record}"
        what += "" if self.field is None else f", {printable(self.field)}"
        key = "" if self.key is None else f", key {printable(self.key)}"
        return f"{printable(self.shard)}: {what}{key}: {self.why}"


@dataclass(repr=False)
class Repaired(Summary):
    """The result of one call of `repair`; as str, a summary of lines."""

    out: str
    new: str
    records: int = 0  # that the new dataset shows, in all splits
    shards: int = 0
    bytes: int = 0
    whole: int = 0  # files that were copied as they were, shards and those of values beside them
    copied: int = 0  # files that were damaged, and came from the copy
    written: int = 0  # files that were damaged, and were written anew of the records that are whole
    lost: list[Lost] = field(default_factory=list)
    same: bool = True  # as it was packed: the same bytes, manifests included
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)  # the new ones, by split

    def __str__(self) -> str:
        records = [one for one in self.lost if one.field is None]
        values = len(self.lost) - len(records)
        lost = [show_count(len(records), "record")] if records else []
        lost += [f"{values:,} of values"] if values else []
        verdict = f"{' and '.join(lost)} lost, listed in {LOST}" if lost else "nothing was lost"
        verdict = "all as packed" if self.same else verdict
        what = f"{show_count(self.records, 'record')} in {show_count(self.shards, 'shard')}"
        lines = [f"{printable(self.new, 4096)}: {what}, {show_size(self.bytes)}: {verdict}"]
        ways = ((self.copied, "taken from the copy"), (self.written, "written anew"))
        done = [f"{count:,} {way}" for count, way in ways if count]
        damaged = show_count(self.copied + self.written, "file")
        lines.append(f"{damaged} damaged or missing{': ' * bool(done)}{', '.join(done)}")
        lines += self.notes
        lines += [f"  {one}" for one in self.lost[:_SHOWN]]
        if len(self.lost) > _SHOWN:
            lines.append(f"  ... and {len(self.lost) - _SHOWN:,} more")
        if records:
            again = f"`shardio append SRC {printable(self.new, 4096)} --on-duplicate skip`"
            lines.append(f"with their source, {again} packs lost records anew")
        return "\n".join([*lines, *version_lines(self.versions)])


_Place = tuple[Location, str, bool]  # a file that may be there, and whether in the copy


class _Mended(NamedTuple):
    """What became of one file."""

    info: ShardInfo | None  # of the new one; None: nothing was left of a file of values
    counter: str  # of Repaired: "whole", "copied" or "written"
    lost: list[tuple[int | None, str | None, str]]  # records, keys, and why


@dataclass(frozen=True)
class _Task:
    """One file that is to be in the new dataset: a shard, or values beside one."""

    format: str
    opening: Opening
    info: ShardInfo
    beside: Overlay | None  # the field, of a file of values
    folder: str
    places: tuple[_Place, ...]
    dropped: Numbers  # records of the shard that every reader hides
    erased: bool  # whether some of these may have been erased
    rows: int  # records of the shard

    @property
    def id(self) -> bytes:
        """Return the dataset's id."""
        return self.opening.dataset_id


@dataclass
class _Dataset:
    """One dataset that is to be repaired."""

    index: Location
    copy: Location | None
    folder: str
    before: Manifest
    data: bytes | None  # its manifest, as a file has it
    notes: list[str]
    claims: list[rebuild.Claim]

    def __post_init__(self) -> None:
        if (self.before.shard_records * _LEAST > self.before.shard_sizes).any():
            raise DamageError(f"{self.before.where}: a shard of it cannot have so many records")
        self.excluded = _excluded(self.index, self.copy, self.before)
        self.theirs = self.before
        if self.copy is not None:
            with contextlib.suppress(DamageError):
                self.theirs = manifest.load_if_packed(self.copy) or self.before
            if self.theirs.dataset_id != self.before.dataset_id:
                raise OptionError(
                    f"{printable(self.copy.url, 4096)}: its dataset is "
                    f"{self.theirs.dataset_id.hex()}, expected {self.before.dataset_id.hex()}: it "
                    "is no copy"
                )

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return self.before.size + sum(beside.size for beside in self.before.overlays)

    def tasks(self) -> Iterator[_Task]:
        """Yield a task for each shard, and then for each file of values."""
        one, opening = self.before, self.before.opening(self.index)
        reader = Reader(self.index, one, excluded=self.excluded)
        followed = {new.sha256 for new in one.erased.values()}
        values = list[_Task]()
        for number in range(one.shards):
            info, dropped = one.shard(number), reader.dropped_in(number)
            says = number, one.dataset_id, one.stored_schema.fields
            own = [info.name, *(claim.name for claim in self.claims if claim.says == says)]
            theirs = [info.name]
            if number < self.theirs.shards and self.theirs.format == one.format:
                theirs.append(self.theirs.shard(number).name)
            places, erased = self._places(own, theirs), info.sha256 in followed
            of_all = self.folder, places, dropped, erased, info.records
            yield _Task(one.format, opening, info, None, *of_all)
            for beside, here, file in files_of_shard(opening, number):
                places = self._places([file.name], [file.name])
                of_all = self.folder, places, dropped, erased, info.records
                values.append(_Task("record", here, file, beside, *of_all))
        yield from values

    def _places(self, own: Sequence[str], theirs: Sequence[str]) -> tuple[_Place, ...]:
        """Return where a file may be, by these names: here, then in the copy."""
        found = [(self.index, name, False) for name in own]
        if self.copy is not None:
            found += [(self.copy, name, True) for name in theirs]
        return tuple(dict.fromkeys(found))


def repair(
    path: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    copy: str | os.PathLike[str] | None = None,
    storage: Storage | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Repaired:
    """Write what is whole of a damaged dataset, or of all its splits, into a new one.

    path      of the damaged dataset, or its URL; nothing of it is changed
    new       the directory of the new one; empty, or not there
    copy      another copy of the dataset, or its URL, which may be damaged, too: what is whole
              there takes the place of what is not
    storage   a shardio.Storage: how object stores are reached
    jobs      processes; default: one a core
    progress  called now and then with bytes done and bytes in all

    Where all is found, the new one has the bytes of the dataset as it was. Else it is a new version
    of it, with the same id: lost records are dropped, the others keep their numbers, and
    `lost.jsonl` lists what is lost. Older versions and tags stay behind, as they do in a copy.
    Killed, it leaves no dataset; the same call begins anew. Raises DamageError where nobody can say
    what the dataset was, or which of its records were dropped, ExistsError, OptionError, BusyError,
    NotPackedError, StorageError.
    """
    jobs = processes(jobs)
    given = replace(
        check_group("storage", storage, Storage), root=None, cache=None, cache_bytes=None
    )
    index, other = locate(path, given), None if copy is None else locate(copy, given)
    target = local_path(new)
    _refuse_itself([index, other], target)
    names, splits = _splits(index, other)
    work = []
    for name in names:
        here = index.below(name) if name else index
        there = other.below(name) if name and other is not None else other
        found = rebuild.claims(here)
        classes = None if splits is None else _classes(splits)
        stated = rebuild.load(here, there, found, classes)
        _refuse_foreign(stated[0])
        work.append(_Dataset(here, there, manifest.split_folder(target, name), *stated, found))
    _refuse_used(target, names, [one.before.dataset_id for one in work])
    local.refuse_if_full(target, sum(one.size for one in work))
    done = Repaired(index.url, target)
    report = Report(progress, sum(one.size for one in work))
    with contextlib.ExitStack() as owners:
        owned = []
        for one in work:
            local.make_directory(one.folder)
            own_id = _own_id(one.before.dataset_id)
            owner = output_dir.own_unplanned(one.folder, own_id, resumes=True)
            owned.append(owners.enter_context(owner))
        built = [_build(one, jobs, report, done) for one in work]
        for name, one, (after, data) in zip(names, work, built, strict=True):
            local.write_file(one.folder, MANIFEST, data)
            done.records += after.records
            done.shards += after.shards
            done.bytes += after.size
            if data != one.data:
                done.versions[name] = after.version_id
                done.same = False
        if names != [""]:
            if splits is None:
                output_dir.commit_splits(LocalDirectory(target), names)
                done.notes.append(f"{SPLITS} was damaged or missing: a new one names the splits")
            else:
                local.write_file(target, SPLITS, splits)
        for owner in owned:
            owner.clean()
    return done


# --- what there is --------------------------------------------------------------------------------


def _splits(index: Location, copy: Location | None) -> tuple[list[str], bytes | None]:
    """Return the splits of a dataset, and the file that names them; [""] where it has none."""
    damaged = False
    for place in filter(None, (index, copy)):
        if place is copy and not damaged and index.exists(MANIFEST):
            break
        try:
            if (names := manifest.load_splits(place)) is not None:
                return names, place.read(SPLITS, manifest.MAX_SPLITS)
        except DamageError:
            damaged = True
    if isinstance(index, LocalDirectory) and not index.exists(MANIFEST):
        below = sorted(os.listdir(index.root)) if os.path.isdir(index.root) else []
        folders = [name for name in below if os.path.isdir(os.path.join(index.root, name))]
        names = [one for one in map(from_file_name, folders) if _has_dataset(index.below(one))]
        if names and (damaged or not rebuild.claims(index)):
            return names, None
    if damaged:
        raise DamageError(
            f"{path_in(index, SPLITS)}: it is damaged, and no folder here has a dataset. Repair "
            "each split by itself, or give a copy: --from COPY"
        )
    return [""], None


def _has_dataset(place: LocalDirectory) -> bool:
    return place.exists(MANIFEST) or bool(journal.shards_in(place.root))


def _classes(splits: bytes) -> tuple[str, ...] | None:
    """Return the names of the classes in the file of the splits."""
    found = manifest.parse_sealed(splits, SPLITS, "shardio-splits").get("classes")
    names = isinstance(found, list) and all(isinstance(one, str) for one in found)
    return tuple(found) if found and names else None


def _excluded(index: Location, copy: Location | None, one: Manifest) -> Numbers:
    """Return the numbers of the records that were dropped. Raises DamageError."""
    try:
        return load_excluded(index, one)
    except DamageError as error:
        if copy is not None:
            with contextlib.suppress(DamageError):
                return load_excluded(copy, one)
        raise DamageError(
            f"{error}. A copy of this version has it, too: --from COPY. Nothing was written"
        ) from None


# --- where it goes --------------------------------------------------------------------------------


def _own_id(dataset_id: bytes) -> bytes:
    """Return the id by which a repair that was killed is known: none but its journal has it."""
    return hashlib.sha256(b"repair" + dataset_id).digest()[:16]


def _refuse_itself(sources: Sequence[Location | None], target: str) -> None:
    for one in sources:
        if output_dir.lies_in(target, one):
            raise OptionError(
                f"{printable(target, 4096)}: it lies in a dataset that is read; choose another "
                "directory"
            )


def _refuse_foreign(one: Manifest) -> None:
    if one.format not in PACKED:
        raise OptionError(
            f"{one.where}: its records lie in files of others ({one.format}): restore these from "
            "where they came, then `shardio index` makes their index anew"
        )


def _refuse_used(target: str, names: Sequence[str], ids: Sequence[bytes]) -> None:
    """Raise ExistsError where anything is in the directory but what a killed repair left."""
    folders = {
        manifest.split_folder(target, name): id_ for name, id_ in zip(names, ids, strict=True)
    }
    for folder in {target: b""} | folders:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = sorted(os.listdir(folder))
            if JOURNAL in found and folder in folders:
                with contextlib.suppress(BusyError, DamageError, StorageError):
                    owner = journal.identity(lock.read(folder, 0, 1 << 20))[0]
                    if owner == _own_id(folders[folder]):
                        continue
            for name in found:
                below = os.path.join(folder, name) in folders
                if not local.is_temporary(name) and not below:
                    raise ExistsError(
                        f"{printable(folder, 4096)}: is not empty, {printable(name)} is in it; "
                        "choose an empty directory, or a new one"
                    )


# --- one dataset ----------------------------------------------------------------------------------


class _Files(NamedTuple):
    """What became of the files of a dataset."""

    shards: list[ShardInfo]
    values: dict[str, dict[int, tuple[ShardInfo, ...]]]  # by field and shard
    gone: list[int]  # numbers of the records that are lost
    lost: list[Lost]


def _mend_all(one: _Dataset, jobs: int, report: Report, done: Repaired) -> _Files:
    """Write the shards of a dataset, and the values beside them."""
    tasks, before = list(one.tasks()), one.before
    starts = np.concatenate([[0], np.cumsum(before.shard_records)])
    found = _Files([], {beside.field: {} for beside in before.overlays}, [], [])
    with contextlib.closing(run(_mend, tasks, jobs=jobs, report=report)) as results:
        for task, mended in zip(tasks, results, strict=True):
            vars(done)[mended.counter] += 1
            number, named = task.info.number, None if task.beside is None else task.beside.field
            shard = before.shard(number).name
            found.lost.extend(Lost(key, shard, at, named, why) for at, key, why in mended.lost)
            if named is None and mended.info is not None:
                found.shards.append(mended.info)
                gone = [int(starts[number]) + at for at, *_ in mended.lost if at is not None]
                found.gone.extend(gone)
            elif named is not None and mended.info is not None:
                of_field = found.values[named]
                of_field[number] = (*of_field.get(number, ()), mended.info)
    _leave_out_values(one, found)
    return found


def _leave_out_values(one: _Dataset, found: _Files) -> None:
    """Leave out the values of records of which nothing is left: they are as if erased."""
    beside = (replace(old, files=found.values[old.field]) for old in one.before.overlays)
    after = replace(one.before, overlays=tuple(beside))
    opening = after.opening(LocalDirectory(one.folder))
    for number, info in enumerate(found.shards):
        if info.sha256 == one.before.shard(number).sha256 or not after.overlays:
            continue
        stored = open_shard(after.format, replace(opening, overlays=()), info)
        with contextlib.closing(stored):
            gone = erased_in(stored)
        for old, here, file in files_of_shard(opening, number):
            new, count = write_without(one.folder, here, old, file, info, gone)
            if not count:
                continue
            local.remove(os.path.join(one.folder, file.name))
            of_field = found.values[old.field]
            left = (new if other == file else other for other in of_field[number])  # newest last
            of_field[number] = tuple(info for info in left if info is not None)
            if not of_field[number]:
                del of_field[number]


def _build(one: _Dataset, jobs: int, report: Report, done: Repaired) -> tuple[Manifest, bytes]:
    """Write all files of a dataset; return its manifest, and the bytes that are to be written."""
    before, found = one.before, _mend_all(one, jobs, report, done)
    erased = dict(before.erased)
    for number, new in enumerate(found.shards):
        old = before.shard(number)
        if new.name in erased:
            raise DamageError(
                f"{path_in(one.index, old.name)}: it is the file as it was before records were "
                "erased. Nothing was committed. Move it away, and run it again"
            )
        if old.sha256 != new.sha256:
            less = max(0, old.size - new.size)
            erased[old.name] = Successor(new.size, new.sha256, new.index_checksum, less)
    overlays = (replace(beside, files=found.values[beside.field]) for beside in before.overlays)
    notes = load_sources(one.index, before)
    if notes is None and one.copy is not None:
        notes = load_sources(one.copy, before)
    after = replace(
        manifest.with_shards(before, found.shards),
        blob_bytes=max(0, before.blob_bytes - before.size + sum(one.size for one in found.shards)),
        overlays=tuple(overlays),
        erased=erased,
        sources=None,
        digest="",
    )
    gone = np.array(found.gone, np.int64)
    after, files = with_excluded(after, np.union1d(one.excluded, gone), notes)
    if notes is None and before.sources is not None:
        one.notes.append("what `update` knows of the files is lost: the next one reads all of them")
    for name, data in files.items():
        local.write_file(one.folder, name, data)
    _list_lost(one, after, found.lost)
    done.lost += found.lost
    done.notes += one.notes
    if one.data is not None and after.dump() == before.dump():
        return before, one.data
    parent = None if one.data is None else before.version_id
    changes = {"lost": len(gone)} if len(gone) else {}
    this_one = Commit(parent, commit_time(), "repair", changes)
    after = replace(after, version=GROWN, library=__version__, commit=this_one)
    return after, after.dump()


def _list_lost(one: _Dataset, after: Manifest, lost: list[Lost]) -> None:
    """Write the list of what was lost, with the keys of values; of dropped records none is lost."""
    reader = Reader(LocalDirectory(one.folder), after) if lost else None
    for place, each in enumerate(lost):
        if reader is not None and each.field is not None and each.record is not None:
            number = journal.shard_number(each.shard) or 0
            with contextlib.suppress(DamageError):
                key = key_text(reader.shard(number).key(each.record))
                lost[place] = replace(each, key=key)
    path = os.path.join(one.folder, LOST)
    if lost:
        text = "".join(f"{json.dumps(vars(each))}\n" for each in lost)
        local.write_file(one.folder, LOST, text.encode())
    else:
        local.remove(path)  # of a call that was killed


# --- one file -------------------------------------------------------------------------------------


def _mend(task: _Task, add: Callable[[int], None]) -> _Mended:
    """Write one file into the new dataset, as it was, or of what is whole of it."""
    for location, name, is_copy in task.places:
        if any(_copied(task, location, name) for _ in range(_AGAIN if location.remote else 1)):
            add(task.info.size)
            return _Mended(task.info, "copied" if is_copy else "whole", [])
    files: dict[str, Damaged | None] = {}
    with contextlib.ExitStack() as opened:
        for location, name, _ in task.places:
            files[path_in(location, name)] = _opened(task, location, name, opened)
        mended = _rewritten(task, files)
    add(task.info.size)
    return mended


def _copied(task: _Task, location: Location, name: str) -> bool:
    """Copy a file, if it is the one that the manifest names. Raises StorageError."""
    file, info = _open(location, name), task.info
    if file is None:
        return False
    with contextlib.closing(file), local.Draft(task.folder, info.name, local.token()) as draft:
        if file.size != info.size:
            return False
        for start in range(0, file.size, _PIECE):
            size = min(_PIECE, file.size - start)
            draft.write(file.read(start, size) if location.remote else read(file, start, size))
        if whole := draft.digest() == info.sha256:
            draft.commit(info.name)
        return whole


def _open(location: Location, name: str) -> File | None:
    """Open a file; None where there is none that can be opened. Raises StorageError of a store."""
    try:
        return location.open(name)
    except FileNotFoundError:
        return None
    except StorageError:
        if location.remote:
            raise
        return None


def _opened(
    task: _Task, location: Location, name: str, opened: contextlib.ExitStack
) -> Damaged | None:
    """Open a file that may have whole records; None: there is none."""
    file = _open(location, name)
    if file is None:
        return None
    opened.callback(file.close)
    if location.remote:  # each record would be a request
        file = _downloaded(file, task.folder)
        opened.callback(file.close)
    return Damaged(file, task.format, task.info, task.id, task.opening.schema)


def _downloaded(file: File, folder: str) -> File:
    """Return a file of a store as one of this machine, which is gone when it is closed."""
    try:
        with tempfile.TemporaryFile(dir=folder) as here:
            for start in range(0, file.size, _PIECE):
                here.write(file.read(start, min(_PIECE, file.size - start)))
            here.flush()
            return local.wrap(os.dup(here.fileno()), file.name)
    except OSError as error:
        raise StorageError(f"{printable(folder, 4096)}: {error.strerror}") from error


def _rewritten(task: _Task, files: Mapping[str, Damaged | None]) -> _Mended:
    """Write a file of what is whole of it."""
    info, index = task.info, index_of(files, task.info)
    barred = {*task.dropped.tolist()} if task.erased else set[int]()
    if index is not None:
        barred = {*erased_in(index).tolist()}
    of_shard = barred if task.beside is None else set[int]()
    found = find(files, info, task.id, task.opening.schema, of_shard)
    if task.beside is not None and (len(found) < info.records or barred):
        return _rewritten_values(task, files, found, index, barred)
    new = _write(task, found, index)
    why, hidden = why_lost(files, info), {*task.dropped.tolist()}
    shards = [one.shard for one in files.values() if one is not None and one.shard is not None]
    lost: list[tuple[int | None, str | None, str]] = [
        (record, _key(shards, record), why)
        for record in range(info.records)
        if record not in found and record not in hidden
    ]
    return _Mended(new, "written", lost)


def _key(shards: Sequence[RecordShard], record: int) -> str | None:
    """Return the key of a lost record, where a head of it is left."""
    for shard in shards:
        with contextlib.suppress(DamageError, StorageError):
            return key_text(shard.key(record))
    return None


def _write(task: _Task, found: Mapping[int, Piece], index: RecordShard | None) -> ShardInfo:
    """Write a shard of the records that were found; others are as such that were erased."""
    info, schema = task.info, task.opening.schema
    version = ERASED if len(found) < info.records else 0
    kinds = {name: kind for name, kind in schema.fields if kind in SCALARS}
    hashes, columns = list[int](), {name: list[Any]() for name in kinds}
    seed = seed_of(task.id, info.number)
    own = task.folder, local.token(), schema, task.id, info.number, task.format
    with ShardWriter(*own, version=version) as writer:
        for record in range(info.records):
            piece, stored, sample = found.get(record), None, dict[str, Any]()
            if piece is not None:
                stored = _read(piece, record, seed)
                sample = sample_of(stored, schema)
            writer.write_stored(stored)
            hashes.append(key_hash(sample[KEY]) if sample else 0)
            for name, values in columns.items():
                values.append(sample.get(name))
        nowhere = [record for record in range(info.records) if record not in found]
        for name, values in columns.items():
            masked = index is not None and isinstance(index.columns.get(name), np.ma.MaskedArray)
            if not masked and values.count(None) == len(nowhere):
                for record in nowhere:
                    values[record] = _ZERO[kinds[name]]
        writer.index_as(hashes, columns)
        new = writer.finish()
        if task.beside is not None:
            new = replace(new, name=overlay_name(new.number, new.sha256))
        writer.commit(new.name)
        return new


def _read(piece: Piece, record: int, seed: int) -> bytes:
    """Read a record that was found. Raises StorageError where it is another one now."""
    stored = piece.file.record(record, piece.start, piece.size, seed)
    if stored is None:
        raise StorageError(
            f"{piece.file.name}: byte {piece.start} was read twice, and not alike. Nothing was "
            "committed: run it again"
        )
    return stored


def _rewritten_values(
    task: _Task,
    files: Mapping[str, Damaged | None],
    found: Mapping[int, Piece],
    index: RecordShard | None,
    barred: set[int],
) -> _Mended:
    """Write a file of values of what is whole of it; a value that is lost is None from now on.

    Else the value would be seen that was there before it was corrected. Of which records the lost
    ones are, the index says, or that all of the shard have one. barred: records that may have been
    erased, of which no value is taken.
    """
    assert task.beside is not None
    info, schema = task.info, task.opening.schema
    why, seed = f"{task.info.name}: {why_lost(files, info)}", seed_of(task.id, info.number)
    known = [*range(task.rows)] if info.records == task.rows else None
    if index is not None:
        with contextlib.suppress(DamageError):
            known = rows_of(index, task.rows).tolist()
    values = dict[int, Any]()
    for number, piece in found.items():
        sample = sample_of(_read(piece, number, seed), schema)
        if sample[ROW] not in barred:
            values[sample[ROW]] = sample[task.beside.field]
    lost = list[tuple[int | None, str | None, str]]()
    if known is None:
        if count := info.records - len(values):
            lost.append((None, None, f"{why}: {show_count(count, 'value')}, of unknown records"))
    else:
        gone = sorted({*known} - values.keys())
        values |= dict.fromkeys(gone)
        hidden = {*task.dropped.tolist()}
        lost += [(row, None, why) for row in gone if row not in hidden]
    if not values:
        return _Mended(None, "written", lost)
    pairs = sorted(values.items())
    new = write_values(task.folder, task.id, task.beside, info.number, pairs, [])
    return _Mended(new, "written", lost)
