"""A packed dataset that grows: new shards behind those that are there, and one commit.

How it works. The source is listed as `pack` lists it. What is new is packed by the options of the
dataset into `.shardio-append`, a directory within it, or for a store into one of this machine, from
which shards are uploaded as they are finished: a packing as any other, which an interruption leaves
to be resumed. Its shards have the dataset's id, and the numbers that follow. Then the dataset is
owned for a moment, the shards are moved beside the others, and the commit names them. Shards that
are there are read for their keys only, and never written. `append` and `update` say which records
of the source are new, and which of the dataset go.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from ..dataset.reader import Reader
from ..errors import (
    BusyError,
    DamageError,
    NotPackedError,
    OptionError,
    ShardioError,
    printable,
)
from ..formats import manifest
from ..formats.erased import after_erasing
from ..formats.index import key_hash
from ..formats.manifest import Manifest
from ..formats.version import (
    NONE,
    Numbers,
    SourceNotes,
    history,
    load_excluded,
    load_sources,
)
from ..images.decode import ppm_header
from ..names import key_text
from ..order.subset import describe_conditions
from ..storage import lock
from ..storage.local import LocalDirectory
from ..storage.location import local_path, locate_target
from ..storage.options import Storage
from ..units import check_choice, check_group, show_count
from . import journal, output_dir, reencode, sources
from .built import Built, read_sent
from .earlier_plan import earlier_plans, refuse_others
from .erase import erased_numbers
from .job import Job, Run, unpackable
from .journal import WORK
from .options import ImageOptions, PackCall, PackOptions, PathLike, PlanOptions, SourceOptions
from .pack import (
    build_all,
    find_archives,
    list_splits,
    make_request,
    planned_job,
    resumable,
    with_kind,
    without_leftovers,
)
from .parts import Announce, PartOptions
from .place import Place, find_place, place_at
from .plan import Differences, Plan, make_plan, prepare
from .process_pool import Executor, Progress, Report, check_executor, processes
from .sources.archives.inflate import remove_unpacked
from .sources.base import Listing, Problem, SourceRequest, renumber
from .versions import changing, commit, with_excluded

PLAIN = ("imagefolder", "files")  # sources whose records are files, and nothing else
_SHOWN = 10  # keys and classes that are named


@dataclass
class Split:
    """One dataset, and what becomes of it."""

    name: str  # "": there are no splits
    place: Place
    work: str  # the directory where its shards are built
    base: Manifest
    listing: Listing | None  # of the source, then of what is new; None: it is not listed
    classes: tuple[str, ...] | None  # the dataset's, and behind them those that are new
    differences: Differences | None = None  # that an update found
    gone: Numbers = field(default_factory=lambda: NONE)  # numbers of the records that go
    replaced: dict[bytes, list[int]] = field(default_factory=dict)  # and those, by key, if it came
    job: Job | None = None  # None: nothing is new
    source_keys: set[bytes] | None = None  # all of them, good or bad; None: these may be a part
    known_bad: set[bytes] = field(default_factory=set)  # of these, left out before, as they were
    # Size and time of each file, by key, of a commit that was killed before it had cleaned up.
    finished: dict[bytes, tuple[int, int]] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Return the path or URL of the dataset, for messages."""
        return self.place.url

    @property
    def fits(self) -> bool:
        """Return whether what was begun in that directory can be gone on with."""
        head, read = lock.look(self.work)
        return self.is_open(journal.parse(head, self.work, read))

    def is_open(self, plan: Plan) -> bool:
        """Return whether a plan can be gone on with, and is not done.

        Of what adds no shards there are the numbers alone to tell it by.
        """
        if not self.takes(plan) or plan.shards or plan.differences is None:
            return self.takes(plan)
        found = self._checked(plan.differences())
        dropped = load_excluded(self.place.location, self.base)
        return len(np.setdiff1d(found.gone, dropped)) > 0 or self._is_to_note(found)

    def _checked(self, found: Differences) -> Differences:
        """Return what a plan of an update found. Raises DamageError: of records that are not."""
        numbers = np.concatenate([found.gone, found.noted])
        if np.any((numbers < 0) | (numbers >= self.base.stored_records)):
            raise DamageError(
                f"{printable(self.work)}: the plan of an update is of records that there are "
                "not. `shardio update --restart` drops it"
            )
        return found

    def takes(self, plan: Plan) -> bool:
        """Return whether the shards of a plan go behind those that there are."""
        there = plan.dataset_id, plan.first
        return there == (self.base.dataset_id, self.base.shards) and plan.base in (b"", self.seal)

    @property
    def seal(self) -> bytes:
        """Return by what its shards are known."""
        return hashlib.sha256(self.base.shard_sha256.tobytes()).digest()

    @property
    def is_to_change(self) -> bool:
        """Return whether its listing has something new, or an update found what to change."""
        found = self.differences
        changes = found is not None and (found.must_commit or len(found.gone) > 0)
        return self.listing is not None and (changes or len(self.listing.keys) > 0)

    @property
    def must_commit(self) -> bool:
        """Return whether there are files to be noted, whatever becomes of records."""
        return self.differences is not None and self._is_to_note(self.differences)

    def _is_to_note(self, found: Differences) -> bool:
        if not found.must_commit:
            return False
        if (notes := load_sources(self.place.location, self.base)) is None:
            return True
        notes = notes.grown(self.base.stored_records)
        there = notes.sizes[found.noted], notes.times[found.noted]
        return not np.array_equal(there, (found.sizes, found.times))

    def has(self, plan: Plan) -> bool:
        """Return whether its dataset has just the records of a plan, but for those left out.

        An earlier call committed them, then, and was killed before it had cleaned up. Of shards
        that it left the names are compared, too, which are of their content.
        """
        if not plan.shards:
            return self.takes(plan) and not self.is_open(plan)
        if plan.dataset_id != self.base.dataset_id or plan.first >= self.base.shards:
            return False
        reader, built, left_out = Reader(self.place.location, self.base), *self._left(plan)
        for number, rows in enumerate(plan.all_rows(), plan.first):
            hashes = {key_hash(key) for key in rows.keys if key not in left_out}
            there = set[int]()
            if number < self.base.shards:
                there = {*reader.shard(number).key_hashes.tolist()}
                names = {name for name in built if journal.shard_number(name) == number}
                if names and self.base.shard(number).name not in names:
                    return False
            if there != hashes:
                return False
        return True

    def _left(self, plan: Plan) -> tuple[set[str], set[bytes]]:
        """Return what is left of what was built: names of shards, and keys that are left out."""
        names, left_out = journal.new_shards(self.work, plan.before), set[bytes]()
        for name in os.listdir(self.work):
            if journal.is_note(name):
                note = read_sent(self.work, name, plan.dataset_id)
                if note is not None and note.info is not None:
                    names.add(note.info.name)
                    left_out.update(key for key, _ in note.problems)
            elif journal.is_rejected_part(self.work, name):
                found = journal.load_rejected(LocalDirectory(self.work), name) or []
                left_out.update(key for key, _ in found)
        listed = journal.own_rejected(self.place.location) or []
        return names, left_out.union(key for key, _ in listed)

    @property
    def problems(self) -> Sequence[Problem]:
        """Return what is left out, but for what was so before and stayed as it was."""
        if self.job is not None:
            return self.job.problems
        return [] if self.listing is None else self.listing.problems

    @property
    def built(self) -> list[Built]:
        """Return the new shards, without those at the end of which no record could be packed."""
        found = [] if self.job is None else [one for one in self.job.built if one.info is not None]
        while found and found[-1].info is not None and not found[-1].info.records:
            found.pop()
        return found

    def settle(self) -> None:
        """Let go what is replaced, but for records whose new ones could not be packed."""
        left_out = {key for key, _ in self.problems}
        numbers = [one for key, of in self.replaced.items() if key not in left_out for one in of]
        self.gone = np.union1d(self.gone, np.array(numbers, np.int64))

    def take(self, plan: Plan) -> None:
        """Learn from a plan which records go. Raises BusyError, DamageError; OptionError as below.

        Where it was committed already, nothing goes.
        """
        if not self.takes(plan):
            raise self.overtaken()
        if plan.differences is not None:
            found = self._checked(plan.differences())
            dropped = load_excluded(self.place.location, self.base)
            self.gone = np.setdiff1d(found.gone, dropped)
            self.differences = found._replace(gone=self.gone)
        self.replace_alike(plan)

    def overtaken(self) -> BusyError:
        """Return the error for a dataset that is not the one any more that was planned for."""
        parts = self.job is not None and self.job.result.checked
        again = "the parts again, and then `shardio commit`" if parts else "it again"
        return BusyError(
            f"{printable(self.folder, 4096)}: something else changed this dataset meanwhile. "
            f"Nothing was committed: run {again}"
        )

    def replace_alike(self, plan: Plan) -> None:
        """Note what the records of a plan replace. Raises OptionError where they are not to."""
        keys = (key for rows in plan.all_rows() for key in rows.keys)
        alike = self.alike(keys)
        if alike.keys() - self.replaced.keys() and plan.on_duplicate != "replace":
            raise OptionError(
                f"{printable(self.folder)}: it has {show_count(len(alike), 'record')} of what was "
                f"planned with --on-duplicate {plan.on_duplicate} since, by the keys "
                f"{some([*map(key_text, sorted(alike))])}. Nothing was appended. Choose what "
                "becomes of them: `shardio drop` these records, and give the same command again; "
                "or append anew, with --restart, and --on-duplicate skip or replace"
            )
        self.replaced |= alike

    def alike(self, keys: Iterable[bytes], *, dropped: bool = False) -> dict[bytes, list[int]]:
        """Return those keys that its dataset has, and the numbers of their records.

        dropped: also of those that were dropped, but not erased.
        """
        reader = Reader(self.place.location, self.base)
        found: dict[bytes, list[int]] = {}
        for at, record, key in reader.with_keys(set(keys), dropped=dropped):
            found.setdefault(key, []).append(int(reader.starts[at]) + record)
        return found


@dataclass(frozen=True)
class Call:
    """What a call of `append` or `update` was given, but for what is its own."""

    read: SourceOptions | None
    jobs: int | None
    on_error: str
    restart: bool
    dry_run: bool
    progress: Progress | None
    announce: Announce | None
    part: PartOptions = field(default_factory=PartOptions)
    executor: Executor | None = None
    ahead: bool = False  # only the plan is made, for all parts
    to: Storage | None = None
    work_dir: PathLike | None = None
    check_images: bool = False  # else as the dataset was packed
    on_duplicate: str = "replace"  # as of `append`
    command: str = "append"


@dataclass
class Growth:
    """A dataset, or its splits, and what a source has for each."""

    place: Place
    request: SourceRequest
    run: Run
    call: Call
    work: list[Split]
    unpacked: str  # the directory where archives are unpacked that are compressed

    @property
    def new_classes(self) -> list[str]:
        """Return the classes that the dataset has not yet."""
        first = self.work[0]
        return [*(first.classes or ())[len(first.base.classes or ()) :]]

    def plan(self) -> list[Job]:
        """Plan the shards of what is new in each listing. Raises SourceError."""
        new = [one for one in self.work if one.is_to_change]
        for one in self.work:
            if one in new:
                one.job = self._job(one, [other.name for other in new])
            elif one.listing is not None and one.listing.problems and not self.run.skip:
                raise unpackable(one.listing.problems, self.request.location.url)
        return [one.job for one in self.work if one.job is not None]

    def _job(self, one: Split, names: list[str]) -> Job:
        """Plan the shards of one split. names: of all splits for which there is something new."""
        assert one.listing is not None
        options = PackOptions.of(one.base.options)
        options = replace(
            options,
            format=one.base.format,
            source=self.request.kind or "imagefolder",
            where=describe_conditions(self.request.where) if self.request.where else None,
            split=one.name,
            splits=[],
            check_images=options.check_images or self.call.check_images,
        )
        size = None
        if options.encode is not None and options.pixels is not None:
            height, width = options.pixels
            size = len(ppm_header(height, width)) + 3 * height * width
        planned = make_plan(one.listing, options, size)
        there = one.base.dataset_id, one.base.shards
        over = one.base.version_id
        planned = planned.added_to(*there, self.call.command, self.call.on_duplicate, over)
        if one.differences is not None:
            planned = planned.updating(one.seal, one.differences)
        if one.name:  # known to the commit, and no part of what makes a plan another one
            planned = replace(planned, options=replace(planned.options, splits=names))
        if self.call.ahead:
            planned = prepare(planned, one.listing.source, self.request)
        lock.refuse_if_busy(one.work, part=not self.run.is_whole)
        into = one.place.packing(one.work, self.request.location)
        return Job(planned, into, one.work, self.run, self.request)

    def build(self, owners: contextlib.ExitStack) -> list[Job]:
        """Build the shards of what is new, each in a directory within its dataset.

        These directories are owned until `owners` ends. Raises BusyError, SourceError,
        SourceChangedError, StorageError.
        """
        jobs = [one.job for one in self.work if one.job is not None] or self.plan()
        if self.run.executor is not None and jobs:
            owners.enter_context(self.run.executor.connected(self.run.jobs))
        report = Report(self.call.progress, sum(job.result.source_bytes for job in jobs))
        build_all(self.request, jobs, owners, report)
        return jobs

    def build_part(self, done: Any) -> int:
        """Build the part of the shards that was asked for; return how many records it has.

        done: the result of the call, which says what was built. Raises as `build` does.
        """
        self._refuse_rejected()
        with contextlib.ExitStack() as owners:
            jobs = self.build(owners)
        results = [job.result for job in jobs]
        done.part = self.run.plan.chosen
        done.shards = sum(one.built + one.kept for one in results)
        done.rejected = [problem for one in results for problem in one.rejected]
        infos = (one.info for job in jobs for one in job.built)
        return sum(info.records for info in infos if info is not None)

    def _refuse_rejected(self) -> None:
        for one in self.work if self.run.skip else ():
            journal.refuse_rejected(one.place.location, False)

    @property
    def folder(self) -> str:
        """Return the path or URL of the dataset, for messages."""
        return self.place.url

    def build_and_commit(self) -> Grown:
        """Build the shards of what is new, and commit them, split by split.

        Raises as `build` does.
        """
        self._refuse_rejected()
        with resumable(self.place.location.remote), contextlib.ExitStack() as owners:
            self.build(owners)
            done = commit_grown(self.place, self.work, self.call.command)
            remove_unpacked(self.unpacked)
            if self.call.work_dir is not None:
                output_dir.remove_working_directory(local_path(self.call.work_dir), [""])
        return done


@dataclass
class Grown:
    """What was committed."""

    added: int = 0  # records
    shards: int = 0
    bytes: int = 0  # of the shards
    rejected: list[tuple[str, str]] = field(default_factory=list)  # key, reason
    versions: dict[str, str] = field(default_factory=dict)  # by split


def grow(source: PathLike, out: PathLike, call: Call) -> Growth:
    """List a source for a packed dataset, or for its splits. Raises OptionError, SourceError.

    All records of the source are listed, with the numbers that its classes have in the dataset.
    Where `append` planned ahead, nothing is listed.
    """
    check_choice("on_error", call.on_error, "raise", "skip")
    check_executor(call.executor)
    here = SourceOptions() if call.read is None else call.read
    top = place_at(
        locate_target(out, call.to, source, check_group("storage", here.storage, Storage))
    )
    remote, folder = top.location.remote, top.url
    if call.part.part is not None or call.ahead:
        output_dir.check_shared(top.location, call.work_dir)
    chosen = call.part.begun(call.announce, wait=not call.dry_run)
    places = top.datasets()
    bases = {name: manifest.load(at.location) for name, at in places.items()}
    packing = _as_packed(next(iter(bases.values())), call)
    plan, skip = replace(packing.plan, part=chosen.part), call.on_error == "skip"
    # That the dataset is there is no reason to leave, where shards go into a store.
    run = Run(processes(call.jobs), remote, plan, skip, executor=call.executor)
    splits = None if "" in bases else True
    given = None if call.work_dir is None else local_path(call.work_dir)
    work_dir = top.builds_in(given)
    unpacked = None if call.dry_run else (work_dir if top.location.remote else folder)
    told = call.progress, unpacked, call.announce
    request = make_request(source, packing.read, splits, run.jobs, *told)
    work = []
    for name, base in bases.items():
        own = None if given is None else manifest.split_folder(given, name)
        place = places[name]
        work.append(Split(name, place, place.builds_in(own), base, None, base.classes))
    growth = Growth(top, request, run, call, work, work_dir if remote else folder)
    if not call.dry_run:
        for one in work:
            _remove_others(one, run.is_whole)
    if not _take_plans(growth, packing):
        with without_leftovers(request, run):
            _list(growth, packing)
    return growth


def _take_plans(growth: Growth, packing: PackCall) -> bool:
    """Take the plans that `append` made ahead for all parts, if it did. Raises OptionError."""
    if growth.call.restart or growth.call.ahead:
        return False
    remote = growth.place.location.remote
    where = (growth.unpacked, "") if remote else (growth.folder, WORK)
    found = earlier_plans(where[0], growth.call.command, where[1])
    there = {one.name: one for one in growth.work}
    if not found or not all(name in there and there[name].takes(found[name]) for name in found):
        return False
    output_dir.check_place(growth.place.location, growth.request.location)
    for name, planned in found.items():
        refuse_others(there[name].work, planned, growth.request, packing, None)
        one, request = there[name], growth.request
        target = one.place.packing(one.work, request.location)
        one.job = planned_job(planned, target, one.work, growth.run, request)
    classes = next(iter(found.values())).classes
    for one in growth.work:
        one.classes = classes or one.base.classes
    find_archives(found, growth.request, growth.run)
    return True


def _list(growth: Growth, packing: PackCall) -> None:
    """List the source for all splits. Raises OptionError, SourceError."""
    call = growth.call
    request = with_kind(growth.request, growth.place.location, None, call.executor)
    if call.ahead:
        sources.check_pieces(request)
    growth.request = request
    options = packing.options(request.kind)
    reencode.check_tools(options)
    bases = {one.name: one.base for one in growth.work}
    names = sources.split_names(request)
    if not names or not bases.keys() >= {*names}:  # none: there is no folder in it
        raise OptionError(f"{request.shown}: {_of_splits(growth, names)}")
    listings = dict(zip(names, list_splits(request, options, names, None), strict=True))
    classes = _extended(_with_most_classes(growth), listings, request)
    _refuse_one_split(growth, classes)
    for one in growth.work:
        one.classes = classes
        if (listing := listings.get(one.name)) is not None:
            if classes is not None and listing.classes is not None:
                listing = renumber(listing, classes)
            listing = replace(listing, fields=_same_fields(one.base, listing, request))
            if (keys := listing.source.keys(listing.own_places)) is not None:
                listing = replace(listing, keys=[*keys])
            one.listing = listing


def _of_splits(growth: Growth, names: Sequence[str]) -> str:
    """Say what to give where the folders of a source are not the splits of the dataset."""
    source, folder = growth.request.shown, printable(growth.folder, 4096)
    there = [one.name for one in growth.work]
    if there == [""]:
        return (
            f"it has the splits {some(names)}, and {folder} is one dataset without splits. Give "
            f"one of them: {source}/{printable(names[0])}"
        )
    others = [name for name in names if name not in there]
    advice = f"If it is all of one split, give that one as OUT: {folder}/{printable(there[0])}"
    if len(others) < len(names):
        advice = f"Leave {some(others)} out, or pack it as a dataset of its own"
    return (
        f"expected the folders {some(there)}, since {folder} has these splits; found "
        f"{some(names) if names else 'no folder'}. {advice}"
    )


def _as_packed(base: Manifest, call: Call) -> PackCall:
    """Return a call of `pack` with the options that a dataset was packed by. Raises OptionError."""
    if base.names is not None:
        raise OptionError(
            f"{base.where}: it is an index of files of another format ({base.format}), and has no "
            "shards of its own: add files there, and run `shardio index` again"
        )
    options = PackOptions.of(base.options)
    images = {one.name: getattr(options, one.name) for one in fields(ImageOptions)}
    images["check_images"] = images["check_images"] or call.check_images
    if options.resize is None or options.encode is not None:
        images["quality"] = None
    plan = PlanOptions(
        shuffle=options.shuffle,
        seed=options.seed or 0,
        max_records=options.max_records,
        restart=call.restart,
    )
    read = call.read or SourceOptions()
    if read.classes is not None:
        raise OptionError("--classes: the dataset numbers its classes itself; leave it out")
    own: dict[str, Any] = {"label": options.label, "layout": options.layout}
    if options.source == (read.kind or options.source):
        own["fields"] = options.of_source.get("fields")
    given = {name: value for name, value in own.items() if getattr(read, name) is None}
    read = replace(read, **given)
    size = options.shard_size
    return PackCall(base.format, size, options.resize, read, ImageOptions(**images), plan)


def _with_most_classes(growth: Growth) -> Manifest:
    """Return the split that has the most classes. Raises OptionError where they number them apart.

    Each has those of the others, or the first of these.
    """
    most = max((one.base for one in growth.work), key=lambda base: len(base.classes or ()))
    for one in growth.work:
        own = one.base.classes or ()
        if own != (most.classes or ())[: len(own)]:
            raise OptionError(
                f"{printable(growth.folder, 4096)}: its splits number their classes apart: "
                f"{some(own)} in {printable(one.name)}, {some(most.classes or ())} in another. "
                "Append to each split alone"
            )
    return most


def _refuse_one_split(growth: Growth, classes: tuple[str, ...] | None) -> None:
    """Raise OptionError where one of several splits would get classes that the others have not."""
    base = growth.work[0].base
    if growth.work[0].name or classes == base.classes:
        return
    remote, url = growth.place.location.remote, growth.place.url
    above, _, name = (url if remote else os.path.abspath(url)).rpartition("/")
    splits: Collection[str] = ()
    with contextlib.suppress(ShardioError):  # whatever lies there is none of ours, then
        splits = find_place(above, growth.call.to).datasets()
    if name in splits:
        new = some((classes or ())[len(base.classes or ()) :])
        raise OptionError(
            f"{growth.request.shown}: it has classes that are new: {new}. All splits are to number "
            f"them alike: append to {printable(above, 4096)}, from a folder with a folder "
            f"{printable(name)!r} in it. Nothing was appended"
        )


def _extended(
    base: Manifest, listings: Mapping[str, Listing], request: SourceRequest
) -> tuple[str, ...] | None:
    """Return the classes of a dataset, and behind them those that are new. Raises OptionError."""
    found = {name: None for one in listings.values() for name in one.classes or ()}
    if base.classes is None or not found:
        labelled = "label" in dict(base.stored_schema.fields)
        if found and base.classes is None and labelled:
            raise OptionError(
                f"{request.shown}: it has classes, such as {some([*found])}, and the labels of "
                f"{base.where} have no names: give the labels as numbers, in a listing"
            )
        return None if base.classes is None else base.classes
    known = set(base.classes)
    return (*base.classes, *sorted(name for name in found if name not in known))


def _same_fields(
    base: Manifest, listing: Listing, request: SourceRequest
) -> tuple[tuple[str, str], ...]:
    """Return the fields of a dataset, without the key, if a source has just these.

    Raises OptionError.
    """
    expected = base.stored_schema.fields[1:]
    if set(expected) != set(listing.fields):
        shown = (", ".join(f"{n} ({k})" for n, k in pairs) for pairs in (expected, listing.fields))
        advice = "--fields NAME=THEIRS names fields of the source"
        lacks = [name for name, _ in expected if name not in dict(listing.fields)]
        if lacks == ["label"] and request.kind in PLAIN:
            advice = "If it is the folder of one class, give the folder above, in which it lies"
        raise OptionError(
            f"{request.shown}: its fields are not those of the dataset, {base.where}: expected "
            "{}; found {}. {}".format(*shown, advice)
        )
    return expected


# --- shards ---------------------------------------------------------------------------------------


def _remove_others(one: Split, whole: bool) -> None:
    """Remove what an earlier `append` left that was committed, or that others have overtaken.

    whole: no part is meant, which may not disturb others.
    """
    if whole or one.place.location.remote:
        one.place.prepare()
    with contextlib.suppress(FileNotFoundError, DamageError, NotPackedError):
        if not one.fits:
            with output_dir.own_unfinished(one.work) as owner:
                head = owner.journal()
                if not one.is_open(plan := journal.parse(head, one.work, owner.read)):
                    if one.has(plan):
                        for rows in plan.all_rows():
                            about = zip(rows.sizes.tolist(), rows.mtimes.tolist(), strict=True)
                            one.finished |= zip(rows.keys, about, strict=True)
                    owner.clean()
    if whole:
        output_dir.remove_working_directory(one.work, [""])


def commit_grown(place: Place, work: Sequence[Split], command: str) -> Grown:
    """Commit the shards that were built for splits, and what else becomes of their records.

    What is left of the building goes when all are committed. Raises BusyError.
    """
    for one in work:
        if one.problems:
            journal.refuse_rejected(one.place.location, False)
    done = Grown()
    if not any(one.built for one in work):  # nor is there anything of a new class
        for one in work:
            one.classes = one.base.classes
    for one in work:
        one.settle()
        already = one.job is not None and one.job.result.already
        changed = not already and one.built
        if changed or one.classes != one.base.classes or len(one.gone) or one.must_commit:
            with changing(one.place) as newest:
                _add_shards(one, newest, done, command)
        elif not already and _left_out(one) is not None:
            with changing(one.place):
                _list_left_out(one)
        else:
            one.place.prepare()
        done.rejected += [(key_text(key), why) for key, why in one.problems]
    for one in work:
        if one.job is not None and one.job.owner is not None:
            one.job.owner.clean()
            output_dir.remove_working_directory(one.work, [""])
    if work[0].name:
        output_dir.commit_splits(place.location, [one.name for one in work])
    return done


def _add_shards(one: Split, newest: Manifest, done: Grown, command: str) -> None:
    """Put new shards beside the others, and commit them.

    They keep their names where they were built, too, until that is cleaned up: killed before the
    commit, nothing is built again.
    """
    plan = None if one.job is None else one.job.plan
    if (  # records may have been erased meanwhile, since they keep their numbers
        not np.array_equal(after_erasing(one.base, newest).shard_sha256, newest.shard_sha256)
        or newest.classes != one.base.classes
        or (one.classes or ())[: len(newest.classes or ())] != (newest.classes or ())
        or (plan is not None and not one.takes(plan))
    ):
        raise one.overtaken()
    if one.job is not None:
        refuse_erased(one, newest, one.job)
    if newest.version_id != one.base.version_id:
        one.base = newest
        if plan is not None:
            one.replace_alike(plan)
            one.settle()
    built = one.built
    infos = [shard.info for shard in built if shard.info is not None]
    one.place.add(one.work, [info.name for info in infos])
    after = manifest.extended(newest, infos, sum(shard.blob_bytes for shard in built), one.classes)
    dropped = load_excluded(one.place.location, newest)
    if (known := _noted(one, after.stored_records)) is not None:
        known = known.without(erased_numbers(Reader(one.place.location, newest)))
    after, files = with_excluded(after, np.union1d(dropped, one.gone), known)
    added = sum(info.records for info in infos)
    _list_left_out(one)
    gone = 0 if one.differences is None else len(one.differences.gone)
    changes = {"added": added, "replaced": len(one.gone) - gone, "dropped": gone}
    new = commit(one.place, newest, after, command, changes, files)
    done.versions[one.name] = new.version_id
    done.added += added
    done.shards += len(infos)
    done.bytes += sum(info.size for info in infos)


def refuse_erased(one: Split, newest: Manifest, job: Job) -> None:
    """Raise BusyError where records that are to be appended were erased since that was planned.

    An erasing sees plans that lie in the dataset, and none of other machines.
    """
    index, plan, erased, then = one.place.location, job.plan, False, None
    for version in history(index, newest):
        if version.version_id == plan.over:
            then = version
            break
        erased |= version.commit is not None and "erased" in version.commit.changes
    if not erased and (then is not None or not newest.erased):
        return
    shown = printable(one.folder, 4096)
    keys, there = {key for rows in plan.all_rows() for key in rows.keys}, None
    with contextlib.suppress(FileNotFoundError, DamageError):  # `gc` removed what was there then
        there = None if then is None else replace(one, base=then).alike(keys, dropped=True)
    which = "were erased here meanwhile, and may be among those that are to be appended"
    if there is not None:
        gone = erased_numbers(Reader(index, newest))
        back = sorted(key for key, numbers in there.items() if np.isin(numbers, gone).any())
        if not back:
            return
        which = "that are to be appended were erased here meanwhile, by the keys "
        which += some([*map(key_text, back)])
    elif not index.remote:
        return
    elif job.result.checked:
        note = (
            "records were erased here since this was planned, and may be among those that were "
            f"appended: `shardio verify {shown} --dropped KEYS` finds them by the list of their "
            "keys; erase them again then"
        )
        job.result.notes += [note] if note not in job.result.notes else []
        return
    raise BusyError(
        f"{shown}: records {which}. Nothing was committed. Remove them from the source, and begin "
        f"anew: `shardio {plan.command} --restart` without --part, or with --plan for parts"
    )


def _list_left_out(one: Split) -> None:
    """Write the list of what a split leaves out, without what it is about to have."""
    after = _left_out(one)
    if after is None:
        return
    problems, files = after
    if problems:
        journal.write_rejected(one.place.location, problems, files=files)
    else:
        journal.remove_rejected(one.place.location)


def _left_out(one: Split) -> journal.OwnList | None:
    """Return what a split will leave out, and of what files it is known; None: that is listed."""
    place = one.place.location
    before, files = journal.own_list(place) or ([], {})
    listed, left_out = dict([*before, *one.problems]), dict(one.problems)
    gone = {*one.gone.tolist()}
    if not listed:
        return None
    has = {key for key, numbers in one.alike(listed).items() if not gone.issuperset(numbers)}
    tried = {} if one.job is None else journal.files_in(one.job.plan, listed)
    now = dict(files) | {key: of for key, of in tried.items() if key in left_out and of[1]}
    done = tried.keys() - left_out.keys()
    if one.source_keys is not None:  # so what is bad still was looked at
        done |= (listed.keys() - one.source_keys) | (has - left_out.keys() - one.known_bad)
    after = sorted((key, why) for key, why in listed.items() if key not in done)
    now = {key: now.get(key, journal.UNKNOWN) for key, _ in after}
    return None if (after, now) == (sorted(before), files) else (after, now)


def leave_out_rejected(growth: Growth) -> int:
    """Leave out of all listings what was left out before, and is as it was. Returns how many.

    Where nothing may be left out, it is an error once more.
    """
    request, count = growth.request, 0
    plain = request.kind in PLAIN and not (request.joins.tables or request.joins.boxes)
    if not (growth.run.skip and growth.run.is_whole and plain) or growth.call.ahead:
        return 0
    for one in growth.work:
        if one.listing is not None:
            place = one.place.location
            one.listing, left_out = journal.without_rejected(place, one.listing)
            one.known_bad |= left_out
            count += len(left_out)
    return count


def _noted(one: Split, records: int) -> SourceNotes | None:
    """Return the sizes and times of the files of all records, of so many; None: not noted.

    An update notes those that stay; those of new records are noted where others are.
    """
    notes, found = load_sources(one.place.location, one.base), one.differences
    number, job = one.base.stored_records, one.job
    if job is None or (found is None and (notes is None or job.plan.options.source not in PLAIN)):
        return None
    notes = (notes or SourceNotes(NONE, NONE)).grown(records)
    if found is not None:
        notes.sizes[found.noted], notes.times[found.noted] = found.sizes, found.times
    left_out = {key for key, _ in job.problems}
    for rows in job.plan.all_rows():
        columns = rows.keys, rows.sizes.tolist(), rows.mtimes.tolist()
        for key, size, changed_ns in zip(*columns, strict=True):
            if key not in left_out:
                notes.put(number, size, changed_ns)
                number += 1
    return notes


def built_line(out: str, records: int, shards: int, part: tuple[int, int], seconds: float) -> str:
    """Say what a part built."""
    took = f" in {show_count(shards, 'shard')}, in {seconds:.1f} s" if records else ""
    built = "{} of {}, not committed".format(*part)
    return f"{printable(out, 4096)}: {show_count(records, 'record')} built ({built}){took}"


def grown_lines(
    classes: Sequence[str], rejected: Sequence[tuple[str, str]], before: int, committed: bool
) -> list[str]:
    """Say which classes are new, and how many files were left out, now and before."""
    lines = [f"new classes: {some(classes)}"] if classes else []
    return lines + journal.left_out_lines(rejected, before, committed)


def some(names: Sequence[str]) -> str:
    """Return the first of some names, for a message."""
    more = ", ..." if len(names) > _SHOWN else ""
    return ", ".join(map(printable, names[:_SHOWN])) + more
