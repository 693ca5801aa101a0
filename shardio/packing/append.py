"""Append records to a packed dataset: new shards behind those that are there, and one commit.

How it works. The source is listed as `pack` lists it. What is new, by its key, is packed by the
options of the dataset into `.shardio-append`, a directory within it: a packing as any other, which
an interruption leaves to be resumed. Its shards have the dataset's id, and the numbers that follow.
Then the dataset is owned for a moment, the shards are moved beside the others, and the commit names
them. Shards that are there are read for their keys only, and never written.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..dataset.reader import Reader
from ..errors import BusyError, OptionError, printable
from ..formats import manifest
from ..formats.manifest import Manifest
from ..formats.version import NONE, Numbers, load_excluded
from ..images.decode import ppm_header
from ..names import key_text
from ..storage import local, lock
from ..storage.local import LocalDirectory
from ..storage.location import local_path, locate
from ..units import check_bool, refuse_options, show_count, show_size
from . import journal, output_dir, reencode, sources
from .drop import find_keys
from .job import Job, Run, unpackable
from .options import (
    ADVICE,
    ImageOptions,
    PackCall,
    PackOptions,
    PathLike,
    PlanOptions,
    SourceOptions,
)
from .pack import build_all, list_splits, make_request, resumable, with_kind
from .parts import Announce
from .plan import make_plan
from .process_pool import Progress, Report, processes
from .sources.base import Listing, SourceRequest, renumber
from .versions import changing, commit, with_excluded

WORK = ".shardio-append"  # in the dataset: where its new shards are built
_SHOWN = 10  # keys and classes that are named
_CHOICES = ("error", "skip", "replace")


@dataclass
class Appended:
    """The result of one call of `append`; as str, a summary."""

    out: str
    added: int = 0  # records
    replaced: int = 0  # of these, records that take the place of one with the same key
    skipped: int = 0  # that were there, by their keys
    shards: int = 0  # new ones
    bytes: int = 0  # of these
    seconds: float = 0.0
    classes: list[str] = field(default_factory=list)  # new ones
    rejected: list[tuple[str, str]] = field(default_factory=list)  # key, reason
    versions: dict[str, str] = field(default_factory=dict)  # the new ones, by split
    dry_run: bool = False

    def __repr__(self) -> str:
        return f"<{str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        verb = "would be appended" if self.dry_run else "appended"
        shards = f" in {show_count(self.shards, 'shard')}, {show_size(self.bytes)}"
        took = "" if self.dry_run else f"{shards}, in {self.seconds:.1f} s"
        records = show_count(self.added, "record")
        lines = [f"{printable(self.out, 4096)}: {records} {verb}{took if self.added else ''}"]
        if self.replaced:
            lines.append(f"{self.replaced:,} of these replace a record with the same key")
        if self.skipped:
            lines.append(f"{show_count(self.skipped, 'record')} were there, by their keys")
        if self.classes:
            lines.append(f"new classes: {_some(self.classes)}")
        if self.rejected:
            left = show_count(len(self.rejected), "file")
            lines.append(f"{left} left out; {journal.REJECTED} lists what, and why")
        lines += [
            f"version {one}{f' of {printable(split)}' if split else ''}"
            for split, one in self.versions.items()
        ]
        return "\n".join(lines)


@dataclass
class _Split:
    """One dataset, and what is appended to it."""

    name: str  # "": there are no splits
    folder: str
    base: Manifest
    listing: Listing | None  # of what is new; None: the source does not have this split
    classes: tuple[str, ...] | None  # the dataset's, and behind them those that are new
    replaced: Numbers = field(default_factory=lambda: NONE)  # of the records that go
    job: Job | None = None  # None: nothing is new

    @property
    def work(self) -> str:
        """Return the directory where its shards are built."""
        return os.path.join(self.folder, WORK)


@refuse_options("append", ADVICE)
def append(
    source: PathLike,
    out: PathLike,
    *,
    on_duplicate: str = "error",
    read: SourceOptions | None = None,
    jobs: int | None = None,
    on_error: str = "raise",
    restart: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> Appended:
    """Append what a source has to a packed dataset, or to its splits, as a new version.

    source        as of `pack`: a folder, an archive, a listing. Where OUT has splits, its top
                  folders are splits, too
    out           the directory of the dataset
    on_duplicate  of a key that the dataset has: "error": nothing is appended; "skip": the record
                  that is there stays; "replace": it is dropped, and the new one appended
    read          what of the source is packed, and under which names: shardio.SourceOptions
    jobs          processes; default: one for each core
    on_error      "raise": one SourceError lists all files that cannot be packed, and nothing is
                  appended; "skip": they are left out, and OUT/rejected.jsonl lists them
    restart       drop an unfinished `append` of another source
    dry_run       say what would be appended, and change nothing
    progress      called now and then with bytes done and bytes in all
    announce      called with lines to show before the work begins

    Format, size of shards, and what is done to images are as the dataset was packed. New classes
    get the next numbers, and no label changes. Shards that are there are not touched. Run again
    after an interruption, it resumes. Raises OptionError, SourceError, SourceChangedError,
    BusyError, NotPackedError, DamageError, StorageError.
    """
    began = time.monotonic()
    check_bool(dry_run=dry_run, restart=restart)
    if on_duplicate not in _CHOICES:
        raise OptionError(
            f"on_duplicate is {printable(repr(on_duplicate))}; expected 'error', 'skip' or "
            "'replace'"
        )
    if on_error not in ("raise", "skip"):
        raise OptionError(f"on_error is {on_error!r}; expected 'raise' or 'skip'")
    folder = local_path(out)
    bases = {name: manifest.load(locate(at)) for name, at in manifest.datasets(folder).items()}
    call = _as_packed(next(iter(bases.values())), read, restart)
    run = Run(processes(jobs), False, call.plan, on_error == "skip")
    work_dir = None if dry_run else folder
    splits = None if "" in bases else True
    request = make_request(source, call.read, splits, run.jobs, progress, work_dir, announce)
    request = with_kind(request, LocalDirectory(folder), None, None)
    done = Appended(folder, dry_run=dry_run)
    work = _new_records(call, request, folder, bases, on_duplicate, done)
    if run.skip:
        for one in work:
            journal.refuse_rejected(LocalDirectory(one.folder), False)
    if not dry_run:
        with resumable(), contextlib.ExitStack() as owners:
            _build(request, run, work, owners, progress)
            _commit(folder, work, done)
    done.seconds = time.monotonic() - began
    return done


# --- what is new ----------------------------------------------------------------------------------


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


def _new_records(
    call: PackCall,
    request: SourceRequest,
    folder: str,
    bases: Mapping[str, Manifest],
    on_duplicate: str,
    done: Appended,
) -> list[_Split]:
    """List the source, and find what of it each dataset does not have. Raises OptionError."""
    options = call.options(request.kind)
    reencode.check_tools(options)
    names = sources.split_names(request)
    there = ", ".join(map(printable, bases))
    for name in names:
        if name not in bases:
            what = f"the splits {there}" if "" not in bases else "one dataset, and no splits"
            raise OptionError(
                f"{request.shown}: it has the split {printable(name)!r}, and {printable(folder)} "
                f"has {what}. Give the folder of one, and the directory of one"
            )
    listings = dict(zip(names, list_splits(request, options, names, None), strict=True))
    classes = _extended(next(iter(bases.values())), listings, request)
    known = next(iter(bases.values())).classes or ()
    done.classes = [*(classes or ())[len(known) :]]
    work, alike = [], list[bytes]()
    for name, base in bases.items():
        root = manifest.split_folder(folder, name)
        one = _Split(name, root, base, listings.get(name), classes)
        work.append(one)
        if one.listing is not None:
            alike += _leave_out_alike(one, request, on_duplicate)
            done.added += len(one.listing.keys)
            done.replaced += len(one.replaced)
    if alike and on_duplicate == "error":
        raise OptionError(
            f"{printable(folder)}: {show_count(len(alike), 'record')} of the source are there, by "
            f"their keys: {_some([*map(key_text, alike)])}. Nothing was appended. Choose what "
            "becomes of them: --on-duplicate skip or replace"
        )
    done.skipped = len(alike)
    return work


def _leave_out_alike(one: _Split, request: SourceRequest, on_duplicate: str) -> list[bytes]:
    """Leave out of the listing of a split what the dataset has, or note what is replaced.

    Returns the keys that are left out. Raises OptionError.
    """
    assert one.listing is not None
    listing = one.listing
    if one.classes is not None and listing.classes is not None:
        listing = renumber(listing, one.classes)
    listing = replace(listing, fields=_same_fields(one.base, listing, request))
    reader = Reader(locate(one.folder), one.base)
    numbers, found = find_keys(reader, set(listing.keys), dropped=False)
    if on_duplicate == "replace":
        one.listing, one.replaced = listing, np.sort(numbers)
        return []
    fresh = [at for at, key in enumerate(listing.keys) if key not in found]
    one.listing = listing.take(np.array(fresh, np.int64))
    return sorted(found)


def _extended(
    base: Manifest, listings: Mapping[str, Listing], request: SourceRequest
) -> tuple[str, ...] | None:
    """Return the classes of a dataset, and behind them those that are new. Raises OptionError."""
    found = {name: None for one in listings.values() for name in one.classes or ()}
    if base.classes is None or not found:
        labelled = "label" in dict(base.schema.fields)
        if found and base.classes is None and labelled:
            raise OptionError(
                f"{request.shown}: it has classes, such as {_some([*found])}, and the labels of "
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
    expected = base.schema.fields[1:]
    if set(expected) != set(listing.fields):
        shown = (", ".join(f"{n} ({k})" for n, k in pairs) for pairs in (expected, listing.fields))
        raise OptionError(
            f"{request.shown}: its fields are not those of the dataset, {base.where}: expected "
            "{}; found {}. --fields NAME=THEIRS names fields of the source".format(*shown)
        )
    return expected


# --- shards ---------------------------------------------------------------------------------------


def _build(
    request: SourceRequest,
    run: Run,
    work: Sequence[_Split],
    owners: contextlib.ExitStack,
    progress: Progress | None,
) -> None:
    """Build the shards of what is new, each in a directory within its dataset. Raises SourceError.

    These directories are owned until `owners` ends.
    """
    for one in work:
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
        place = LocalDirectory(one.work)
        lock.refuse_if_busy(one.work, part=False)
        one.job = Job(planned, place, one.work, run, request)
    jobs = [one.job for one in work if one.job is not None]
    report = Report(progress, sum(job.result.source_bytes for job in jobs))
    build_all(request, jobs, owners, report)


def _remove_committed(one: _Split) -> None:
    """Remove what an earlier `append` left that was committed, or that others have overtaken."""
    if os.path.lexists(os.path.join(one.folder, lock.JOURNAL)):
        with changing(one.folder):  # which removes what was left
            pass
    with contextlib.suppress(FileNotFoundError), output_dir.own_unfinished(one.work) as owner:
        if journal.parse(owner.journal(), one.work, owner.read).first != one.base.shards:
            owner.clean()
    output_dir.remove_working_directory(one.work, [""])


# --- commit ---------------------------------------------------------------------------------------


def _commit(folder: str, work: Sequence[_Split], done: Appended) -> None:
    """Commit what was built, split by split. Raises BusyError, SourceChangedError."""
    done.added = 0  # and now without those that could not be packed
    for one in work:
        if one.job is None and not done.classes:
            continue
        with changing(one.folder) as newest:
            _add_shards(one, newest, done)
        if one.job is not None:
            assert one.job.owner is not None
            one.job.owner.clean()
            output_dir.remove_working_directory(one.work, [""])
    if work[0].name:
        output_dir.commit_splits(LocalDirectory(folder), [one.name for one in work])


def _add_shards(one: _Split, newest: Manifest, done: Appended) -> None:
    """Move new shards beside the others, and commit them."""
    if newest.shards != one.base.shards or newest.classes != one.base.classes:
        raise BusyError(
            f"{printable(one.folder)}: something else was appended here meanwhile. Nothing was "
            "committed: run it again"
        )
    built = [] if one.job is None else [shard for shard in one.job.built if shard.info is not None]
    infos = [shard.info for shard in built if shard.info is not None]
    for info in infos:
        local.move(os.path.join(one.work, info.name), one.folder)
    local.sync_directory(one.folder)
    after = manifest.extended(newest, infos, sum(shard.blob_bytes for shard in built), one.classes)
    dropped = load_excluded(locate(one.folder), newest)
    after, files = with_excluded(after, np.union1d(dropped, one.replaced))
    added = sum(info.records for info in infos)
    changes = {"added": added, "replaced": len(one.replaced)}
    done.versions[one.name] = commit(one.folder, newest, after, "append", changes, files).version_id
    done.added += added
    done.shards += len(infos)
    done.bytes += sum(info.size for info in infos)
    if one.job is not None and one.job.problems:
        place = LocalDirectory(one.folder)
        before = journal.own_rejected(place) or []
        journal.write_rejected(place, sorted({*before, *one.job.problems}))
        done.rejected += [(key_text(key), why) for key, why in one.job.problems]


def _some(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return ", ".join(map(printable, names[:_SHOWN])) + more
