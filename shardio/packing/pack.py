"""Sources to shards to a manifest: parallel by shard, reproducible, resumable, atomic.

What is asked for becomes a plan for each split; each directory is owned while its shards are built;
the manifests are renamed into place after all of them, and until then nothing was packed (job.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..errors import (
    BusyError,
    OptionError,
    ShardioError,
    SourceChangedError,
    StorageError,
)
from ..formats import manifest
from ..images.decode import ppm_header
from ..names import key_bytes
from ..storage import local, lock
from ..storage.local import LocalDirectory
from ..storage.location import Target, local_path, locate, locate_target, path_text
from ..storage.options import Storage
from ..units import check_bool, check_choice, check_group, refuse_options
from . import output_dir, reencode, sources
from .earlier_plan import committed_plans, earlier_plans, refuse_others
from .job import Job, Run, least_bytes, show_pixels, unpackable
from .options import (
    ADVICE,
    ImageOptions,
    PackCall,
    PackOptions,
    PathLike,
    PlanOptions,
    SourceOptions,
)
from .packed import Packed
from .parts import Announce
from .plan import Plan, make_plan, prepare
from .process_pool import Executor, Progress, Report, check_executor, processes
from .sources import arrays
from .sources.archives.folder import ArchiveFolder
from .sources.archives.inflate import remove_unpacked
from .sources.base import Listing, Problem, SourceRequest, renumber
from .sources.files import is_archive


@refuse_options("pack", ADVICE)
def pack(
    source: PathLike,
    out: PathLike,
    *,
    format: str = "record",
    shard_size: int | str | None = None,
    resize: int | None = None,
    splits: bool | None = None,
    read: SourceOptions | None = None,
    images: ImageOptions | None = None,
    plan: PlanOptions | None = None,
    jobs: int | None = None,
    executor: Executor | None = None,
    overwrite: bool = False,
    on_error: str = "raise",
    to: Storage | None = None,
    work_dir: PathLike | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> list[Packed]:
    """Pack a folder of images, or another source, into OUT: one dataset, or one for each split.

    out         a directory, or an s3://, gs:// or az:// URL
    format      of the shards: "record" or "lmdb"
    shard_size  source bytes of a shard (with `encode`: bytes of pixels), or like "64MB"; default
                256 MiB, less if that gives under 16 shards
    resize      shrink images to this short side (pixels), with `images.quality`; never enlarges
    splits      whether the top folders are splits; default: if all have names of splits
    read        what of the source is packed, and under which names: shardio.SourceOptions
    images      how images are written into shards: shardio.ImageOptions
    plan        which record goes to which shard, and which part is built: shardio.PlanOptions
    jobs        processes; default: one for each core
    executor    a shardio.RayExecutor: a cluster that builds the shards
    overwrite   commit over another dataset in OUT; its shards stay until `gc`
    on_error    "raise": one SourceError lists all files that cannot be packed, and nothing is
                committed; "skip": they are left out, and OUT/rejected.jsonl lists them
    to          a shardio.Storage: how the store of OUT is reached; default: as the source, if that
                has the same scheme, or is no URL
    work_dir    if OUT is a URL: the directory where shards are built before they are uploaded;
                default: one in ~/.cache/shardio. Give the same one to resume, and to all parts. If
                SRC is a compressed archive, such as a .tgz: where it is unpacked; default: OUT
    dry_run     touch nothing; raise what a real run would raise before it builds
    progress    called now and then with bytes done and bytes in all
    announce    called with lines to show before the work begins: the part, the size of pixels

    Run again after an interruption, it resumes. Raises OptionError, SourceError,
    SourceChangedError, BusyError, ExistsError, StorageError.
    """
    call = PackCall(format, shard_size, resize, read, images, plan)
    check_bool(overwrite=overwrite, dry_run=dry_run)
    check_executor(executor)
    check_choice("on_error", on_error, "raise", "skip")
    chosen = call.plan.begun(announce, wait=not dry_run)
    run = Run(processes(jobs), overwrite, chosen, on_error == "skip", executor=executor)
    place = locate_target(out, to, source, call.storage)
    folder, unpacks = _working_directories(place, work_dir, not run.is_whole)
    unpacks_in = None if dry_run else unpacks
    request = make_request(source, call.read, splits, run.jobs, progress, unpacks_in, announce)
    work = []
    if not chosen.restart:
        work = _from_plans(call, request, run, place, folder)
    if not work:
        with without_leftovers(request, run):
            request = with_kind(request, place, work_dir, executor)
            work = _from_listing(call, request, run, place, folder)
    local.refuse_if_full(folder, sum(map(least_bytes, work)))
    show_pixels(work, announce)
    if dry_run:
        return [job.dry_run() for job in work]
    report = Report(progress, sum(job.result.source_bytes for job in work))
    remote = place.remote or request.location.remote
    remote = remote or (request.root is not None and locate(request.root).remote)
    with resumable(remote), contextlib.ExitStack() as owners:
        if executor is not None and not all(job.result.already for job in work):
            owners.enter_context(executor.connected(run.jobs))  # once for all splits
        build_all(request, work, owners, report)
        if run.is_whole:
            commit_jobs(place, work, work[0].plan.options.splits)
        if run.is_whole or all(job.result.already for job in work):
            remove_unpacked(unpacks)
    if place.remote:
        output_dir.remove_working_directory(folder, work[0].plan.options.splits)
    return [job.result for job in work]


@refuse_options("plan", ADVICE)
def plan(
    source: PathLike,
    out: PathLike,
    *,
    format: str = "record",
    shard_size: int | str | None = None,
    resize: int | None = None,
    splits: bool | None = None,
    read: SourceOptions | None = None,
    images: ImageOptions | None = None,
    plan: PlanOptions | None = None,
    overwrite: bool = False,
    to: Storage | None = None,
    work_dir: PathLike | None = None,
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> list[Packed]:
    """Write the plan of a packing into OUT, so that `pack` does not list the source.

    It lists the source once. Each `pack` of it into OUT, or of a part, then reads what it needs of
    the plan, and takes all options from it that are not given. The plan is a snapshot: files that
    come later are not packed, and one that changes is an error.

    work_dir  if OUT is a URL: the directory that all parts share, where the plan then lies

    All other options are those of `pack`.

    Returns what is to be packed, a Packed of each split. Raises as `pack` does; OptionError for
    files of another format, which are read as a whole.
    """
    call = PackCall(format, shard_size, resize, read, images, plan)
    check_bool(overwrite=overwrite)
    if call.plan.part is not None:
        raise OptionError("part: a plan is of all parts; give it to `shardio pack`")
    place = locate_target(out, to, source, call.storage)
    folder, unpacks = _working_directories(place, work_dir, True)
    request = make_request(source, call.read, splits, None, progress, unpacks, announce)
    request = with_kind(request, place, None, None)
    sources.check_pieces(request)
    run = Run(1, overwrite, call.plan)
    work = _from_listing(call, request, run, place, folder, ahead=True)
    show_pixels(work, announce)
    return [job.write_plan() for job in work]


# --- from what is asked for to the commit ---------------------------------------------------------


def make_request(
    source: PathLike,
    read: SourceOptions,
    splits: bool | None,
    jobs: int | None,
    progress: Progress | None,
    work_dir: str | None,
    tell: Announce | None,
) -> SourceRequest:
    """Return what is asked of the source. Raises OptionError."""
    if splits not in (None, True, False):
        raise OptionError(f"splits is {splits!r}; expected True, False or None")
    return SourceRequest(
        path=os.fsencode(_plain_path(source)),
        kind=read.kind,
        splits=None if splits is None else bool(splits),
        fields=dict(read.fields or {}),
        where=read.where,
        root=None if read.root is None else _plain_path(read.root),
        label=read.label,
        joins=read.joins(),
        layout=read.layout,
        ignore=read.ignore,
        jobs=jobs,
        progress=progress,
        storage=check_group("storage", read.storage, Storage),
        work_dir=work_dir,
        tell=tell,
    )


def _plain_path(path: PathLike) -> str:
    """Return a path or URL as it was given, but file:// as a path. Raises OptionError."""
    text = path_text(path)
    return text if locate(text).remote else local_path(text)


def _working_directories(place: Target, given: PathLike | None, shared: bool) -> tuple[str, str]:
    """Return the directory where shards are built, and the one where archives are unpacked.

    Both are OUT itself, where that is one, and nothing is given. shared: by parts. Raises
    OptionError.
    """
    if isinstance(place, LocalDirectory):
        if given is not None and shared:
            raise OptionError(
                "work_dir: not with a part: all parts share what is unpacked in OUT, and the "
                "commit removes it"
            )
        return place.url, place.url if given is None else local_path(given)
    if shared:
        output_dir.check_shared(place, given)
    found = output_dir.working_directory(place, None if given is None else local_path(given))
    return found, found


@contextlib.contextmanager
def without_leftovers(request: SourceRequest, run: Run) -> Iterator[None]:
    """Remove what was unpacked of an archive that is then refused."""
    try:
        yield
    except ShardioError as error:
        if request.work_dir is not None and run.is_whole and not isinstance(error, BusyError):
            remove_unpacked(request.work_dir)
        raise


def with_kind(
    request: SourceRequest, place: Target, given: PathLike | None, executor: Executor | None
) -> SourceRequest:
    """Return a request with its kind, once it is known that OUT may take what is unpacked of it.

    given: a working directory. Raises OptionError, ExistsError, SourceError.
    """
    sources.check_kind(request)
    output_dir.check_place(place, request.location)
    request = sources.detect_kind(request)
    if executor is not None:
        sources.check_pieces(request)
    unpacked = isinstance(request.files, ArchiveFolder) and request.files.is_unpacked
    unpacked = unpacked or (request.root is not None and is_archive(os.fsencode(request.root)))
    unpacked = unpacked or (request.kind == "arrays" and arrays.is_unpacked(request))
    if given is not None and not place.remote and not unpacked:
        raise OptionError(
            "work_dir: only where OUT is a URL, or SRC an archive that is compressed as a whole; "
            "shards are built in OUT itself"
        )
    if executor is not None and unpacked and (place.remote or given is not None):
        raise OptionError(
            f"{request.shown}: is compressed as a whole, and nodes read it unpacked: pack it into "
            "a directory that all of them share, without --work-dir; or unpack it to a .tar first"
        )
    return request


def _from_plans(
    call: PackCall, request: SourceRequest, run: Run, place: Target, directory: str
) -> list[Job]:
    """Take the plan of each split that `plan` made; none where it made none. Raises OptionError.

    A part that starts again when all is committed takes the plan that it was committed under; but
    not of a store, where none is kept.
    """
    if place.remote:
        output_dir.check_working_directory(directory, request.location, [""])
    found = earlier_plans(directory)
    done = not (found or run.is_whole or run.overwrite or place.remote)
    if done:
        found = committed_plans(directory)
    if not found:
        return []
    numbering = _numbering(call)
    names = next(iter(found.values())).options.splits or [""]
    output_dir.check(place, request.location, names)
    work = []
    for name, planned in found.items():
        try:
            refuse_others(place.url, planned, request, call, numbering)
        except OptionError:
            if done:
                return []  # what is packed there says which option differs
            raise
        folder = manifest.split_folder(directory, name)
        there = place.below(name) if name else place
        work.append(planned_job(planned, there, folder, run, request))
    for job in work:
        job.check(sized=True)
        job.result.by_plan = done
    if all(job.result.already for job in work):
        return work
    if done:
        return []  # shards are gone
    find_archives(found, request, run)
    return work


def planned_job(planned: Plan, place: Target, folder: str, run: Run, request: SourceRequest) -> Job:
    """Return the job of a plan that was made ahead. Raises BusyError, DependencyError."""
    reencode.check_tools(planned.options)
    reopen = functools.partial(sources.reopen, request)
    lock.refuse_if_busy(folder, part=not run.is_whole)
    return Job(planned, place, folder, run, request, reopen)


def find_archives(found: Mapping[str, Plan], request: SourceRequest, run: Run) -> None:
    """Open archives that plans made ahead read: once here, and not in each process."""
    first = next(iter(found.values()))
    if run.executor is None and first.ahead is not None and first.ahead["source"].get("archives"):
        sources.detect_kind(replace(request, kind=request.kind or "imagefolder"))


def _from_listing(
    call: PackCall,
    request: SourceRequest,
    run: Run,
    place: Target,
    directory: str,
    *,
    ahead: bool = False,
) -> list[Job]:
    """Plan each split of a source, once all is refused that is known without listing it.

    ahead: for whoever builds the shards later.
    """
    options = call.options(request.kind)
    reencode.check_tools(options)
    names = sources.split_names(request)
    output_dir.check_names(place, names)
    if place.remote:
        output_dir.check_working_directory(directory, request.location, names)
    splits = [
        (
            replace(options, split=name, splits=names) if name else options,
            place.below(name) if name else place,
            manifest.split_folder(directory, name),
        )
        for name in names
    ]
    for wanted, there, folder in splits:
        lock.refuse_if_busy(folder, part=not run.is_whole)
        if not run.overwrite:
            output_dir.refuse_other(there, wanted)
    work = []
    listings = list_splits(request, options, names, _numbering(call))
    for listing, (wanted, there, folder) in zip(listings, splits, strict=True):
        size = None
        if options.encode is not None:
            height, width = pixels = reencode.size_of_pixels(listing, options)
            wanted = replace(wanted, pixels=pixels)
            size = len(ppm_header(height, width)) + 3 * height * width
        planned = make_plan(listing, wanted, size)
        if ahead:
            planned = prepare(planned, listing.source, request)
        work.append(Job(planned, there, folder, run, request))
    for job in work:  # all of them, before any is touched
        job.check(sized=call.shard_size is not None)
    return work


def _numbering(call: PackCall) -> tuple[str, ...] | None:
    """Return the classes of the dataset that numbers them, if one is given."""
    given = call.read.classes
    return None if given is None else manifest.classes_of(locate(given, call.storage))


def list_splits(
    request: SourceRequest,
    options: PackOptions,
    names: list[str],
    numbering: tuple[str, ...] | None,
) -> list[Listing]:
    """List the splits of a source, with their classes numbered as is asked, and all fields."""
    found = sources.list_records(request)
    if numbering is not None:
        numbered = [name for name, one in found.items() if one.classes is not None]
        for name in numbered or list(found)[:1]:  # without any it is an error
            found[name] = renumber(found[name], numbering)
    reencode.check_fields(found, options)
    if list(found) != names:
        raise SourceChangedError(f"{request.shown}: its top folders changed just now")
    keep = options.keep_original
    return [reencode.with_originals(one, request, n, keep) for n, one in found.items()]


def build_all(
    request: SourceRequest, work: list[Job], owners: contextlib.ExitStack, report: Report
) -> None:
    """Own each directory, until `owners` ends, and build its shards.

    Raises SourceError for all that cannot be packed, where nothing may be left out.
    """
    problems: list[Problem] = []
    for job in work:
        folder = b""
        splits = request.joins.splits or request.joins.split_files  # that are no folders
        if job.result.split and not splits and job.result.source != "trees":  # whose name it
            folder = key_bytes(job.result.split) + b"/"
        problems += [(folder + key, why) for key, why in job.build(owners, report)]
    if problems:
        raise unpackable(problems, request.location.url)


def commit_jobs(place: Target, work: list[Job], splits: Sequence[str]) -> None:
    """Commit one dataset after the other, then the file that names them as splits; clean up."""
    for job in work:
        job.commit()
    if splits:
        output_dir.commit_splits(place, splits)
    for job in work if place.remote else ():
        job.clean()


@contextlib.contextmanager
def resumable(remote: bool = False) -> Iterator[None]:
    """Say of a disk that is full, or of a store that fails, that what is finished is not lost."""
    try:
        yield
    except StorageError as error:
        full = local.is_full(error)
        if not full and (not remote or "is kept" in str(error)):
            raise
        raise StorageError(
            f"{error}\nWhat is finished is kept: {'make room, then ' if full else ''}run the same "
            "command again, and it goes on where it was"
        ) from error
