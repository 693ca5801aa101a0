"""Compact a dataset: its newest version is packed anew, into few shards, as if packed at once.

How it works. The records of the newest version are listed by their keys, as a folder is, and packed
by the options of the dataset, in the working directory that `append` has (grow.py): so it resumes,
and its plan gives the id. Records are copied as they are stored; what is annotated stays beside the
shards. Then the shards are moved beside the old ones, and the commit names the new ones alone. What
was dropped or annotated meanwhile is carried over; whatever else was committed, it is not done.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..dataset.reader import DroppedShard, Reader
from ..dataset.sequence import stored_of
from ..errors import BusyError, DamageError, ExistsError, OptionError, StorageError, printable
from ..formats import manifest
from ..formats.base import Overlay, Shard
from ..formats.manifest import Manifest
from ..formats.overlay import OverlaidShard, without_overlays
from ..formats.record import erased_in
from ..formats.sample import Sample, Schema
from ..formats.version import NONE, Numbers, SourceNotes, history, load_excluded, load_sources
from ..storage import local
from ..storage.location import local_path
from ..storage.options import Storage
from ..units import Summary, check_bool, check_size, refuse_options, show_count, show_size
from . import journal, output_dir
from .job import Job, Run
from .options import ADVICE, PackOptions, PathLike, PlanOptions
from .pack import resumable
from .place import Place, Workspace, find_place
from .plan import make_plan, usual_shard_size
from .process_pool import Progress, Report, processes
from .sources.base import Listing, Problem, Read, Rejected, Source, bytewise, listed
from .values_file import write_values
from .versions import changing, commit, version_lines, with_excluded

COMMAND = "compact"  # in the log
VALUES = 1 << 16  # values of a field that are in memory at once
_TOGETHER = 32  # shards whose records are asked for at once, where each read is a round trip
_BY_KEY = ("imagefolder", "files", "trees", "listing", "coco")  # sources that list by keys
_SEALS = {"values", "members"}  # options that are hashes of what a source has


@dataclass(repr=False)
class Compacted(Summary):
    """The result of one call of `compact`; as str, a summary."""

    out: str
    records: int = 0
    left_out: int = 0  # records that were dropped before, and are in no new shard
    old_shards: int = 0
    old_bytes: int = 0  # of these
    shards: int = 0
    bytes: int = 0  # of these; of a dry run, about
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)  # the new ones, by split
    dry_run: bool = False
    already: bool = False  # its shards are as they would be; nothing was done

    def __str__(self) -> str:
        shown, records = printable(self.out, 4096), show_count(self.records, "record")
        old = f"{show_count(self.old_shards, 'shard')}, {show_size(self.old_bytes)}"
        new = f"{show_count(self.shards, 'shard')}, {show_size(self.bytes)}"
        if self.already:
            return f"{shown}: {records} in {old}: compact already; nothing was done"
        if self.dry_run:
            lines = [f"{shown}: {records} would be compacted: {old} now, about {new} then"]
        else:
            took = f"in {self.seconds:.1f} s"
            lines = [f"{shown}: {records} compacted: {old} before, {new} now, {took}"]
        if self.left_out:
            left = show_count(self.left_out, "dropped record")
            lines.append(f"{left} {'would be ' * self.dry_run}left out; older versions have them")
        lines += version_lines(self.versions)
        if not self.dry_run:
            lines.append(
                f"the old shards stay for older versions; `shardio gc {shown} --keep-versions 1` "
                "removes both, when a day has passed"
            )
        return "\n".join(lines)


@refuse_options("compact", ADVICE)
def compact(
    path: PathLike,
    *,
    shard_size: int | str | None = None,
    jobs: int | None = None,
    restart: bool = False,
    dry_run: bool = False,
    storage: Storage | None = None,
    work_dir: PathLike | None = None,
    progress: Progress | None = None,
) -> Compacted:
    """Merge the shards of a dataset, or of its splits, and shuffle them anew, as a new version.

    path        the directory of the dataset, or its URL
    shard_size  bytes of images of a shard, or like "64MB"; default: as the dataset was packed, or
                where nobody asked for a size, what `pack` would take for all of it
    jobs        processes; default: one for each core
    restart     drop an unfinished `append` that is here
    dry_run     say how many shards there would be, and change nothing
    storage     a shardio.Storage: how an object store is reached
    work_dir    of a dataset in a store: the directory where shards are built before they are
                uploaded; default: one in ~/.cache/shardio. Give the same one to resume
    progress    called now and then with bytes done and bytes in all

    Of a folder of images that were packed as they are, the shards are those of a dataset that was
    packed at once, with the same options and classes, byte for byte. Dropped records are left out,
    annotated fields stay beside the shards, older versions stay as they are. It needs room for all
    records once more, until `gc`. Run again after an interruption, it resumes. Raises OptionError,
    BusyError, ExistsError, NotPackedError, DamageError, StorageError.
    """
    began = time.monotonic()
    check_bool(dry_run=dry_run, restart=restart)
    size = None if shard_size is None else check_size("shard_size", shard_size)
    top = find_place(path, storage)
    # That a dataset is there is no reason to leave, where shards go into a store.
    run = Run(processes(jobs), top.location.remote, PlanOptions(), skip=False)
    given = None if work_dir is None else local_path(work_dir)
    top.builds_in(given)  # refuses one that is not needed
    bases = [(split, at, manifest.load(at.location)) for split, at in top.datasets().items()]
    done = Compacted(top.url, dry_run=dry_run)
    work = list[_Work]()
    for *_, base in bases:
        _refuse_foreign(base)
    for split, place, base in bases:
        own = None if given is None else manifest.split_folder(given, split)
        one = _Work(split, place, place.builds_in(own), base, size)
        if not dry_run:
            _remove_others(one, restart)
        done.records += one.reader.records
        done.old_shards += base.shards
        done.old_bytes += base.size
        if one.is_done:
            done.shards += base.shards
            done.bytes += base.size
            continue
        work.append(one)
        done.left_out += one.left_out
        if dry_run:
            done.shards += one.plan.shards
            done.bytes += one.needed
    done.already = not work
    if not dry_run and work:
        needed = sum(one.needed + one.beside - one.finished for one in work)
        if not top.location.remote:
            local.refuse_if_full(top.url, needed)
        _build_and_commit(work, run, done, progress)
        if given is not None:
            output_dir.remove_working_directory(given, [""])
    done.seconds = time.monotonic() - began
    return done


def _refuse_foreign(base: Manifest) -> None:
    if base.names is not None:
        raise OptionError(
            f"{base.where}: it is an index of files of another format ({base.format}), which "
            "shardio never changes: pack them (`shardio pack`)"
        )


def _remove_others(one: _Work, restart: bool) -> None:
    """Remove what an earlier call left, if it is not to be gone on with.

    That is of another version, or committed. Raises ExistsError where an append is unfinished.
    """
    one.place.prepare()
    with contextlib.suppress(FileNotFoundError), output_dir.own_unfinished(one.work) as owner:
        try:
            plan = journal.parse(owner.journal(), one.work, owner.read)
        except DamageError:
            if not restart:
                raise
            owner.clean()
        else:
            appends = (plan.dataset_id, plan.first) == (one.base.dataset_id, one.base.shards)
            if appends and not restart:
                raise ExistsError(
                    f"{printable(one.place.url, 4096)}: an unfinished `shardio append` or `update` "
                    "is here: run it again, or drop it with --restart"
                )
            if one.is_done or not plan.same(one.plan):
                owner.clean()
    output_dir.remove_working_directory(one.work, [""])


# --- what is to be done ---------------------------------------------------------------------------


class _AsStored(Source):
    """The records of the dataset itself, by their numbers; images are as they were packed.

    Those that are announced are read in the order of the old shards: of many small ones few are
    open, and to open one costs more than to read a small record.
    """

    as_stored = True

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._ahead = list[int]()  # records that were announced

    def will_need(self, place: int) -> None:
        """Note a record that will be read soon."""
        self._ahead.append(place)

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        """Open the dataset."""
        held = dict[int, Sample | Rejected]()
        self._ahead.clear()

        def read(place: int) -> Sample:
            if place not in held:
                held.update(self._read({place, *self._ahead}))
                self._ahead.clear()
            found = held.pop(place)
            if isinstance(found, Rejected):
                raise found
            return found

        yield read

    def _read(self, places: Iterable[int]) -> Iterator[tuple[int, Sample | Rejected]]:
        """Yield records, or the error that is to be raised when their turn comes."""
        numbers = np.array([*places], np.int64)
        for shard, own, records in _opened(self._reader, numbers, _announce):
            for number, record in zip(numbers[own].tolist(), records.tolist(), strict=True):
                try:
                    yield number, shard.read(record)
                except (DamageError, StorageError) as error:
                    yield number, Rejected(str(error).splitlines()[0])


def _want_heads(shard: Shard, records: Numbers) -> None:
    if isinstance(shard, DroppedShard):
        return  # it cannot be opened, and nobody needs a record of it
    without_overlays(shard).will_need_heads(records.tolist())


def _announce(shard: Shard, records: Numbers) -> None:
    """Announce records of a shard, ascending: neighbours come by one request."""
    for run in np.split(records, np.flatnonzero(np.diff(records) > 1) + 1):
        shard.will_need(int(run[0]), int(run[-1]) + 1)


def _opened(
    reader: Reader, numbers: Numbers, announce: Callable[[Shard, Numbers], None]
) -> Iterator[tuple[Shard, Numbers, Numbers]]:
    """Yield the shards of records, opened, with the places of their numbers among these.

    And their numbers in the shard, ascending. Where each read is a round trip, the records of
    several shards are announced together.
    """
    order = np.argsort(numbers)
    bounds = np.searchsorted(numbers[order], reader.starts)
    places = np.flatnonzero(np.diff(bounds)).tolist()
    parts = [(at, order[bounds[at] : bounds[at + 1]]) for at in places]
    for first in range(0, len(parts), most := min(_TOGETHER, reader.limit)):
        some = parts[first : first + most]
        reader.will_open(int(at) for at, _ in some)
        opened = [
            (reader.shard(int(at)), own, numbers[own] - reader.starts[at]) for at, own in some
        ]
        for shard, _, records in opened if reader.storage.remote else ():
            announce(shard, records)
        yield from opened


class _Work:
    """One dataset, and the plan by which it is packed anew."""

    def __init__(
        self, split: str, place: Place, work: str, base: Manifest, size: int | None
    ) -> None:
        """work: the directory where its shards are built. size: bytes of a shard that are asked
        for. Raises DamageError, StorageError.
        """
        self.split, self.place, self.work, self.base = split, place, work, base
        # As it was packed: what was annotated since lies beside the shards, and stays there.
        stored = replace(base, schema=base.stored_schema, overlays=())
        self.reader = Reader(place.location, stored)
        self.left_out = 0  # records that were dropped, and not erased
        self.needed = base.size  # bytes of the new shards, about
        options = self._options(size)
        self.plan = make_plan(self._listing(options), options)
        # A number may have been another record's, before `restore`: only shards tell.
        shards = hashlib.sha256(self.plan.changes + base.shard_sha256.tobytes()).digest()
        self.plan = replace(self.plan, changes=shards, command="compact")
        rows = self.plan.all_rows()
        # Of each new record its number in the old shards, which the listing has as its time.
        self.numbers: Numbers = np.concatenate([NONE, *(one.mtimes for one in rows)])
        self.job: Job | None = None

    @cached_property
    def is_done(self) -> bool:
        """Return whether each record lies already where the plan would put it."""
        if self.base.excluded or not np.array_equal(self.plan.bounds, self.reader.starts):
            return False
        # By keys: of several records with one key, none is the first.
        return self._keys == [key for rows in self.plan.all_rows() for key in rows.keys]

    @property
    def beside(self) -> int:
        """Return the bytes of the values beside the shards."""
        each = (infos for overlay in self.base.overlays for infos in overlay.files.values())
        return sum(info.size for infos in each for info in infos)

    @property
    def finished(self) -> int:
        """Return the bytes of shards that an interrupted call left."""
        with contextlib.suppress(FileNotFoundError):
            names = journal.shards_in(self.work)
            return sum(os.path.getsize(os.path.join(self.work, name)) for name in names)
        return 0

    def _options(self, size: int | None) -> PackOptions:
        """Return the options that the dataset was packed by, but for what follows from records."""
        base, options = self.base, PackOptions.of(self.base.options)
        of_source = {name: value for name, value in options.of_source.items() if name != "tiles"}
        # Of what a source has of records, besides files. Of all its parts together nobody knows it.
        seal = hashlib.sha256(base.shard_sha256.tobytes() + self.reader.dropped.tobytes())
        of_source |= dict.fromkeys(_SEALS & of_source.keys(), seal.hexdigest()[:32])
        packed = self._as_planned()
        if size is None and options.shard_size != usual_shard_size(packed.blob_bytes):
            size = options.shard_size
        absent = {*options.absent, *range(len(packed.classes or ()), len(base.classes or ()))}
        if absent and dict(base.stored_schema.fields).get("label") == "int":
            absent -= {*stored_of(self.reader).targets.tolist()}
        return replace(
            options,
            format=base.format,
            shuffle=bool(options.shuffle),
            shard_size=size,
            absent=sorted(absent),
            of_source=of_source,
        )

    def _as_planned(self) -> Manifest:
        """Return the version whose plan gave the dataset its id; where it is gone, the newest."""
        for one in history(self.reader.index, self.base):
            planned = one.commit is None or one.commit.command == COMMAND
            if planned and one.dataset_id == self.base.dataset_id:
                return one
        return self.base

    def _listing(self, options: PackOptions) -> Listing:
        """List the records in the order in which a source of all of them would have them."""
        base, reader = self.base, self.reader
        keys, sizes, numbers = list[bytes](), [NONE], [NONE]
        everything = np.arange(reader.stored_records)
        for shard, own, records in _opened(reader, everything, _want_heads):
            kept = np.isin(own, reader.dropped, invert=True)
            # Of a shard that does not open, nobody knows what was erased.
            erased = 0 if isinstance(shard, DroppedShard) else len(erased_in(shard))
            self.left_out += len(own) - int(kept.sum()) - erased
            self.needed -= int(shard.sizes[records[~kept]].sum())
            if not kept.any():
                continue  # it may be damaged, and nobody minds
            heads = [*without_overlays(shard).heads(records[kept].tolist())]
            keys += (key for key, _ in heads)
            sizes.append(np.array([size for _, size in heads], np.int64))
            numbers.append(own[kept])
        self._keys, by_key = keys, options.shuffle or options.source in _BY_KEY
        order = np.array(bytewise(keys) if by_key else range(len(keys)), np.int64)
        ordered = np.concatenate(numbers)[order]
        return Listing(
            root=os.fsencode(self.place.url),
            keys=[keys[place] for place in order.tolist()],
            sizes=np.concatenate(sizes)[order],
            mtimes=ordered,
            source=_AsStored(reader),
            fields=base.stored_schema.fields[1:],
            classes=base.classes,
            absent=tuple((base.classes or ())[number] for number in options.absent),
            places=ordered,
        )


# --- shards and commit ----------------------------------------------------------------------------


def _build_and_commit(
    work: list[_Work], run: Run, done: Compacted, progress: Progress | None
) -> None:
    """Build the shards of all splits, then commit one after the other."""
    with resumable(work[0].place.location.remote), contextlib.ExitStack() as owners:
        for one in work:
            there = one.place.packing(one.work, one.place.location)
            one.job = Job(one.plan, there, one.work, run)
        report = Report(progress, sum(int(one.plan.shard_bytes.sum()) for one in work))
        problems = list[Problem]()
        for one in work:
            assert one.job is not None
            problems += one.job.build(owners, report)
        if problems:
            raise DamageError(
                f"{printable(done.out)}: {show_count(len(problems), 'record')} cannot be read:\n"
                f"{listed(sorted(problems))}\n"
                "Nothing was committed; what is finished is kept. Restore the shards from a copy, "
                "or drop these records (`shardio drop`), and run it again"
            )
        for one in work:
            assert one.job is not None
            with changing(one.place) as newest:
                _replace_shards(one, one.job, newest, done)
            if one.job.owner is not None:
                one.job.owner.clean()
                output_dir.remove_working_directory(one.work, [""])


def _replace_shards(one: _Work, job: Job, newest: Manifest, done: Compacted) -> None:
    """Put the new shards beside the old ones, and commit a version of them alone."""
    index, plan = one.place.location, one.plan
    dropped = load_excluded(index, newest)
    _refuse_changed(one, newest, dropped)
    with one.place.workspace() as space:
        overlays = tuple(_carried(one, newest, space))
    infos = [built.info for built in job.built if built.info is not None]
    one.place.add(one.work, [info.name for info in infos])
    options = plan.options.record()
    if job.result.tiles is not None:
        options["tiles"] = job.result.tiles
    after = manifest.make(
        infos,
        dataset_id=plan.dataset_id,
        format=one.base.format,
        schema=Schema([*plan.fields, *((o.field, o.kind) for o in overlays if o.added)]),
        classes=plan.classes,
        options=options,
        blob_bytes=sum(built.blob_bytes for built in job.built),
        overlays=overlays,
    )
    if (notes := load_sources(index, newest)) is not None:
        notes = notes.grown(newest.stored_records)
        notes = SourceNotes(notes.sizes[one.numbers], notes.times[one.numbers])
    after, files = with_excluded(after, np.flatnonzero(np.isin(one.numbers, dropped)), notes)
    changes = {"left out": one.left_out}
    done.versions[one.split] = commit(one.place, newest, after, COMMAND, changes, files).version_id
    done.shards += len(infos)
    done.bytes += sum(info.size for info in infos)


def _refuse_changed(one: _Work, newest: Manifest, dropped: Numbers) -> None:
    """Raise BusyError where more than drops and values came since the work began."""
    base = one.base
    same = newest.dataset_id == base.dataset_id and newest.classes == base.classes
    same = same and np.array_equal(newest.shard_sha256, base.shard_sha256)
    if not same or len(np.setdiff1d(one.reader.dropped, dropped)):
        raise BusyError(
            f"{printable(one.place.url, 4096)}: something else was committed here meanwhile, which "
            "the new shards do not have. Nothing was committed: run it again"
        )


def _carried(one: _Work, newest: Manifest, space: Workspace) -> Iterator[Overlay]:
    """Write the values beside the old shards to files beside the new ones."""
    reader = Reader(one.place.location, newest)
    for old in newest.overlays:
        reader.want([old.field])
        files = {}
        for number, (start, stop) in enumerate(itertools.pairwise(one.plan.bounds.tolist())):
            values = _values_of(reader, old, one.numbers[start:stop])
            if (first := next(values, None)) is not None:
                all_values = itertools.chain([first], values)
                where = space.folder, one.plan.dataset_id
                info = write_values(*where, old, number, all_values, [])
                space.take(info)
                files[number] = (info,)
        if files or old.added:
            yield replace(old, files=files)


def _values_of(reader: Reader, old: Overlay, numbers: Numbers) -> Iterator[tuple[int, Any]]:
    """Yield the places of those records that have a value of a field beside them, and the value."""

    def with_values(shard: Shard, records: Numbers) -> Numbers:
        if not isinstance(shard, OverlaidShard):
            return NONE
        return np.flatnonzero(np.isin(records, shard.rows_beside(old.field)))

    def announce(shard: Shard, records: Numbers) -> None:
        if isinstance(shard, OverlaidShard):
            shard.will_need_values(old.field, records[with_values(shard, records)].tolist())

    annotated = np.isin(np.searchsorted(reader.starts, numbers, "right") - 1, [*old.files])
    for first in range(0, len(numbers), VALUES):
        some = first + np.flatnonzero(annotated[first : first + VALUES])
        found = dict[int, Any]()
        for shard, own, records in _opened(reader, numbers[some], announce):
            assert isinstance(shard, OverlaidShard)
            has = with_values(shard, records)
            for place, record in zip(own[has].tolist(), records[has].tolist(), strict=True):
                found[int(some[place])] = shard.value_of(old.field, record)
        yield from sorted(found.items(), key=operator.itemgetter(0))
