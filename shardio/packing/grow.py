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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import BusyError, OptionError, printable
from ..formats import manifest
from ..formats.manifest import Manifest
from ..formats.version import NONE, Numbers, SourceNotes, load_excluded
from ..images.decode import ppm_header
from ..names import key_text
from ..storage import lock
from ..storage.location import local_path, locate_target
from ..storage.options import Storage
from ..units import check_group, show_count
from . import journal, output_dir, reencode, sources
from .job import Job, Run, unpackable
from .options import ImageOptions, PackCall, PackOptions, PathLike, PlanOptions, SourceOptions
from .pack import build_all, list_splits, make_request, resumable, with_kind
from .parts import Announce
from .place import Place, place_at
from .plan import make_plan
from .process_pool import Progress, Report, processes
from .sources.base import Listing, SourceRequest, renumber
from .versions import changing, commit, with_excluded

_SHOWN = 10  # keys and classes that are named


@dataclass
class Split:
    """One dataset, and what becomes of it."""

    name: str  # "": there are no splits
    place: Place
    work: str  # the directory where its shards are built
    base: Manifest
    listing: Listing | None  # of the source, then of what is new; None: it lacks this split
    classes: tuple[str, ...] | None  # the dataset's, and behind them those that are new
    must_commit: bool = False  # whatever becomes of its records
    gone: Numbers = field(default_factory=lambda: NONE)  # numbers of the records that go
    job: Job | None = None  # None: nothing is new

    @property
    def folder(self) -> str:
        """Return the path or URL of the dataset, for messages."""
        return self.place.url


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
    to: Storage | None = None
    work_dir: PathLike | None = None


@dataclass
class Growth:
    """A dataset, or its splits, and what a source has for each."""

    place: Place
    request: SourceRequest
    run: Run
    call: Call
    work: list[Split]
    new_classes: list[str]

    @property
    def folder(self) -> str:
        """Return the path or URL of the dataset, for messages."""
        return self.place.url

    def build_and_commit(
        self,
        command: str,
        changes: Callable[[Split, int], Mapping[str, int]],
        notes: Callable[[Split, int], SourceNotes | None] = lambda one, records: None,
    ) -> Grown:
        """Build the shards of what is new, and commit them, split by split.

        changes: how many records a split of so many new ones got, lost and so on. notes: what is
        known of the files of all its records, of so many. Raises BusyError, SourceError,
        SourceChangedError, StorageError.
        """
        done = Grown()
        if self.run.skip:
            for one in self.work:
                journal.refuse_rejected(one.place.location, False)
        with resumable(self.place.location.remote), contextlib.ExitStack() as owners:
            _build(self, owners)
            for one in self.work:
                changed = one.job is not None or self.new_classes or len(one.gone)
                if not (changed or one.must_commit):
                    continue
                with changing(one.place) as newest:
                    _add_shards(one, newest, done, command, changes, notes)
                if one.job is not None and one.job.owner is not None:
                    one.job.owner.clean()
                    output_dir.remove_working_directory(one.work, [""])
            if self.call.work_dir is not None:
                output_dir.remove_working_directory(local_path(self.call.work_dir), [""])
            if self.work[0].name:
                names = [one.name for one in self.work]
                output_dir.commit_splits(self.place.location, names)
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
    """
    if call.on_error not in ("raise", "skip"):
        raise OptionError(f"on_error is {call.on_error!r}; expected 'raise' or 'skip'")
    here = SourceOptions() if call.read is None else call.read
    top = place_at(
        locate_target(out, call.to, source, check_group("storage", here.storage, Storage))
    )
    places, folder = top.datasets(), top.url
    bases = {name: manifest.load(at.location) for name, at in places.items()}
    first = next(iter(bases.values()))
    packing = _as_packed(first, call.read, call.restart)
    # That the dataset is there is no reason to leave, where shards go into a store.
    run = Run(processes(call.jobs), True, packing.plan, call.on_error == "skip")
    splits = None if "" in bases else True
    given = None if call.work_dir is None else local_path(call.work_dir)
    work_dir = top.builds_in(given)
    unpacked = None if call.dry_run else (work_dir if top.location.remote else folder)
    told = call.progress, unpacked, call.announce
    request = make_request(source, packing.read, splits, run.jobs, *told)
    request = with_kind(request, top.location, None, None)
    options = packing.options(request.kind)
    reencode.check_tools(options)
    names = sources.split_names(request)
    for name in names:
        if name not in bases:
            there = ", ".join(map(printable, bases))
            what = f"the splits {there}" if "" not in bases else "one dataset, and no splits"
            raise OptionError(
                f"{request.shown}: it has the split {printable(name)!r}, and {printable(folder)} "
                f"has {what}. Give the folder of one, and the directory of one"
            )
    listings = dict(zip(names, list_splits(request, options, names, None), strict=True))
    classes = _extended(first, listings, request)
    work = []
    for name, base in bases.items():
        listing = listings.get(name)
        if listing is not None:
            if classes is not None and listing.classes is not None:
                listing = renumber(listing, classes)
            listing = replace(listing, fields=_same_fields(base, listing, request))
            if (keys := listing.source.keys(listing.own_places)) is not None:
                listing = replace(listing, keys=[*keys])
        place, own = places[name], None if given is None else manifest.split_folder(given, name)
        work.append(Split(name, place, place.builds_in(own), base, listing, classes))
    known = len(first.classes or ())
    return Growth(top, request, run, call, work, [*(classes or ())[known:]])


def _as_packed(base: Manifest, read: SourceOptions | None, restart: bool) -> PackCall:
    """Return a call of `pack` with the options that a dataset was packed by. Raises OptionError."""
    if base.names is not None:
        raise OptionError(
            f"{base.where}: it is an index of files of another format ({base.format}), and has no "
            "shards of its own: add files there, and run `shardio index --overwrite`"
        )
    options = PackOptions.of(base.options)
    names = ("encode", "quality", "jpeg_tiles", "keep_original", "max_pixels")
    images = {name: getattr(options, name) for name in names}
    if options.resize is None or options.encode is not None:
        images["quality"] = None
    plan = PlanOptions(
        shuffle=options.shuffle,
        seed=options.seed or 0,
        max_records=options.max_records,
        restart=restart,
    )
    read = read or SourceOptions()
    if read.classes is not None:
        raise OptionError("--classes: the dataset numbers its classes itself; leave it out")
    own: dict[str, Any] = {"label": options.label, "layout": options.layout}
    if options.source == (read.kind or options.source):
        own["fields"] = options.of_source.get("fields")
    given = {name: value for name, value in own.items() if getattr(read, name) is None}
    read = replace(read, **given)
    size = options.shard_size
    return PackCall(base.format, size, options.resize, read, ImageOptions(**images), plan)


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
        raise OptionError(
            f"{request.shown}: its fields are not those of the dataset, {base.where}: expected "
            "{}; found {}. --fields NAME=THEIRS names fields of the source".format(*shown)
        )
    return expected


# --- shards ---------------------------------------------------------------------------------------


def _build(growth: Growth, owners: contextlib.ExitStack) -> None:
    """Build the shards of what is new, each in a directory within its dataset. Raises SourceError.

    These directories are owned until `owners` ends.
    """
    request, run = growth.request, growth.run
    for one in growth.work:
        _remove_committed(one)
        if one.listing is None:
            continue
        if not one.listing.keys:
            if one.listing.problems and not run.skip:
                raise unpackable(one.listing.problems, request.location.url)
            continue
        options = replace(
            PackOptions.of(one.base.options),
            format=one.base.format,
            source=request.kind or "imagefolder",
        )
        size = None
        if options.encode is not None and options.pixels is not None:
            height, width = options.pixels
            size = len(ppm_header(height, width)) + 3 * height * width
        planned = make_plan(one.listing, options, size)
        planned = planned.added_to(one.base.dataset_id, one.base.shards)
        lock.refuse_if_busy(one.work, part=False)
        there = one.place.packing(one.work, request.location)
        one.job = Job(planned, there, one.work, run, request)
    jobs = [one.job for one in growth.work if one.job is not None]
    report = Report(growth.call.progress, sum(job.result.source_bytes for job in jobs))
    build_all(request, jobs, owners, report)


def _remove_committed(one: Split) -> None:
    """Remove what an earlier `append` left that was committed, or that others have overtaken."""
    one.place.prepare()
    with contextlib.suppress(FileNotFoundError), output_dir.own_unfinished(one.work) as owner:
        if journal.parse(owner.journal(), one.work, owner.read).first != one.base.shards:
            owner.clean()
    output_dir.remove_working_directory(one.work, [""])


def _add_shards(
    one: Split,
    newest: Manifest,
    done: Grown,
    command: str,
    changes: Callable[[Split, int], Mapping[str, int]],
    notes: Callable[[Split, int], SourceNotes | None],
) -> None:
    """Move new shards beside the others, and commit them."""
    if newest.shards != one.base.shards or newest.classes != one.base.classes:
        raise BusyError(
            f"{printable(one.folder)}: something else was appended here meanwhile. Nothing was "
            "committed: run it again"
        )
    built = [] if one.job is None else [shard for shard in one.job.built if shard.info is not None]
    infos = [shard.info for shard in built if shard.info is not None]
    one.place.add(one.work, [info.name for info in infos])
    after = manifest.extended(newest, infos, sum(shard.blob_bytes for shard in built), one.classes)
    dropped = load_excluded(one.place.location, newest)
    after, files = with_excluded(after, np.union1d(dropped, one.gone))
    if (known := notes(one, after.stored_records)) is not None:
        side, data = known.dump(after.dataset_id)
        after, files = replace(after, sources=side), {**files, side.name: data}
    added = sum(info.records for info in infos)
    new = commit(one.place, newest, after, command, changes(one, added), files)
    done.versions[one.name] = new.version_id
    done.added += added
    done.shards += len(infos)
    done.bytes += sum(info.size for info in infos)
    if one.job is not None and one.job.problems:
        place = one.place.location
        before = journal.own_rejected(place) or []
        journal.write_rejected(place, sorted({*before, *one.job.problems}))
        done.rejected += [(key_text(key), why) for key, why in one.job.problems]


def grown_lines(classes: Sequence[str], rejected: Sequence[tuple[str, str]]) -> list[str]:
    """Say which classes are new, and how many files were left out."""
    lines = [f"new classes: {some(classes)}"] if classes else []
    if rejected:
        left = show_count(len(rejected), "file")
        lines.append(f"{left} left out; {journal.REJECTED} lists what, and why")
    return lines


def some(names: Sequence[str]) -> str:
    """Return the first of some names, for a message."""
    more = ", ..." if len(names) > _SHOWN else ""
    return ", ".join(map(printable, names[:_SHOWN])) + more
