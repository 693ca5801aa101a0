"""The commit of what the parts of a job array built: of a packing, or of what is appended.

Parts build shards in OUT, or, to be appended, in a directory within the dataset (grow.py); for a
store in a directory that they share, from which they are uploaded. All are looked for here, and
checked, in the same way. Their plan says which command it is of.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..errors import BusyError, DamageError, NotPackedError, OptionError, printable
from ..formats import manifest
from ..formats.version import history
from ..storage import lock
from ..storage.local import LocalDirectory
from ..storage.location import local_path
from ..storage.options import Storage
from ..storage.remote import RemoteLocation
from ..units import check_bool, check_int, show_count
from . import append, journal, output_dir
from .grow import Split, commit_grown, grown_lines, refuse_erased
from .job import Job, Run
from .journal import WORK
from .missing import Waiting, not_begun
from .options import PathLike, PlanOptions
from .pack import commit_jobs, resumable
from .packed import Packed
from .parts import Announce
from .place import Place, find_place
from .plan import Plan
from .process_pool import Progress, Report, processes
from .sources.archives.inflate import remove_unpacked
from .uploads import Uploads


def commit(
    out: PathLike,
    *,
    jobs: int | None = None,
    parts: int | None = None,
    wait_s: float | None = None,
    quick: bool = False,
    overwrite: bool = False,
    storage: Storage | None = None,
    work_dir: PathLike | None = None,
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> list[Packed]:
    """Commit what the parts of a packing built: check every shard, then write the manifest.

    What the parts of an `append` built is checked in the same way, and is then a new version.

    parts     the number of parts: missing shards are then reported by part, too
    wait_s    wait at most so many seconds until all parts have built their shards
    quick     of shards that have not changed since their parts wrote and noted them, check only
              headers, indices and sizes. `verify` reads them completely, also by parts
    storage   a shardio.Storage: how the store of OUT is reached
    work_dir  if OUT is a URL: the directory that was given to the parts
    announce  called with lines that say, while it waits, which shards are missing

    Raises NotPackedError when shards are missing (naming them), and as `pack` does.
    """
    check_bool(overwrite=overwrite, quick=quick)
    parts = None if parts is None else check_int("parts", parts)
    run = Run(processes(jobs), overwrite, PlanOptions(), parts=parts, quick=quick)
    begun = _begun(find_place(out, storage), work_dir)
    if wait_s is None or (_is_packed(begun) and not overwrite):
        return _commit_parts(begun, run, progress)
    began, waiting = time.monotonic(), Waiting(begun.folder, parts, overwrite, begun.within)
    while True:
        left_s = max(0.0, began + wait_s - time.monotonic())
        waiting.wait(left_s, announce or (lambda line: None))
        try:
            return _commit_parts(begun, run, progress)
        except BusyError:  # a part that has built its last shard is about to end
            if left_s <= 0:
                raise
            time.sleep(0.1)


class _Begun(NamedTuple):
    """Where parts have begun to build, and for which place."""

    top: Place
    folder: str  # OUT, or the working directory that they share
    within: str  # the folder in each dataset where what is appended is built; or ""


def _begun(top: Place, work_dir: PathLike | None) -> _Begun:
    """Find out where parts have begun to build. Raises OptionError."""
    given = None if work_dir is None else local_path(work_dir)
    top.builds_in(given)  # refuses one that is not needed
    if not top.location.remote:
        return _Begun(top, top.url, _within(top.url))
    if given is None:
        raise OptionError(
            f"{printable(top.url, 4096)}: give the directory that was given to the parts: "
            "--work-dir DIR"
        )
    return _Begun(top, given, "")


def _is_packed(begun: _Begun) -> bool:
    """Return whether a dataset is in a store, and no part has begun: nobody has to be waited for.

    Of a directory the wait finds it.
    """
    top, folder, _ = begun
    begins = os.path.lexists(os.path.join(folder, lock.JOURNAL))
    if top.location.remote and not begins and not output_dir.begun_splits(folder):
        with contextlib.suppress(NotPackedError):
            return bool(top.datasets())
    return False


def _within(out: str) -> str:
    """Return the folder in each dataset where parts have begun to build what is appended; or ""."""
    splits = output_dir.begun_splits(out, WORK)
    folders = [manifest.split_folder(out, name) for name in splits or [""]]
    if any(_is_begun(folder) for folder in folders):  # another packing, into the same place
        return ""
    begun = (os.path.join(folder, WORK, lock.JOURNAL) for folder in folders)
    return WORK if any(map(os.path.lexists, begun)) else ""


def _is_begun(folder: str) -> bool:
    """Return whether a packing has begun in a folder, by its plan."""
    with contextlib.suppress(FileNotFoundError):
        return lock.read(folder, 0, len(lock.PLAN_MAGIC)) == lock.PLAN_MAGIC
    return False


def _refuse_others(place: Place, folder: str, planned: Plan) -> None:
    """Raise NotPackedError where what has begun is added to no dataset, as a compaction."""
    if (
        planned.command == "compact"
        or planned.dataset_id != manifest.load(place.location).dataset_id
    ):
        raise NotPackedError(
            f"{printable(place.url, 4096)}: nothing to commit here: what was interrupted in "
            f"{printable(folder, 4096)} is no append: a `shardio compact`, perhaps. Run it again"
        )


def _commit_parts(begun: _Begun, run: Run, progress: Progress | None) -> list[Packed]:
    """Check what parts built in a directory, and commit it."""
    top, out, within = begun
    splits, appends = _begun_splits(begun)
    with resumable(top.location.remote), contextlib.ExitStack() as owners:
        work = _own_jobs(begun, splits or [""], appends, run, owners)
        jobs = [*work.values()]
        if not jobs and (not splits or output_dir.has_splits(top.location, splits)):
            newest = None if splits else manifest.load(top.location)
            was = f" The newest version is {newest.version_id}." if newest and newest.commit else ""
            raise NotPackedError(
                f"{printable(top.url, 4096)}: already packed; there is nothing to commit.{was}"
            )
        grown = _grown(top, work) if appends else []
        has = _committed(work, grown)
        report = Report(progress, sum(job.result.source_bytes for job in jobs))
        unbuilt = [job.check_parts(report, has[name]) for name, job in work.items()]
        missing = [why for why in unbuilt if why is not None]
        # Where one split is committed, a commit was killed, and those that are gone were, too.
        if jobs and not any(job.result.already for job in jobs):
            missing[:0] = not_begun(out, splits or [""], run.overwrite, within).values()
        _refuse_missing(missing, run)
        results = [job.result for job in jobs]
        if appends:
            results = _commit_grown(top, grown)
        else:
            commit_jobs(top.location, jobs, splits)
        remove_unpacked(out)
        if top.location.remote:
            output_dir.remove_working_directory(out, splits)
    return results


def _begun_splits(begun: _Begun) -> tuple[list[str], bool]:
    """Return the splits for which parts have begun, none where there are no splits.

    And whether it is added to datasets that are there: so says a plan, if one is left.
    """
    top, out, within = begun
    splits, appends = output_dir.begun_splits(out, within), within != ""
    for name in splits or [""]:
        folder = output_dir.building_folder(out, name, within)
        with contextlib.suppress(FileNotFoundError, DamageError):  # which its owner is told
            appends = journal.parse(lock.head(folder), folder).command != "pack"
            break
    if appends and splits:  # what came while parts were begun is known to some of them only
        folders = {name: output_dir.building_folder(out, name, within) for name in top.datasets()}
        splits += [one for one, at in folders.items() if one not in splits and os.path.isdir(at)]
    return splits, appends


def _committed(work: Mapping[str, Job], grown: Sequence[Split]) -> dict[str, bool]:
    """Return of each split whether what parts built is committed, and not cleaned up."""
    if grown:
        return {one.name: one.has(one.job.plan) for one in grown if one.job is not None}
    return {name: _is_committed(job) for name, job in work.items()}


def _is_committed(job: Job) -> bool:
    """Return whether the shards that parts packed are those of the dataset that is there."""
    if isinstance(job.place, RemoteLocation):
        with Uploads(job.place, job.directory, job.plan.dataset_id) as uploads:
            return output_dir.is_of(job.place, job.plan, uploads.sent(0).values())
    return job.owner is not None and journal.is_committed(job.directory, job.owner.journal())


def _refuse_missing(missing: Sequence[str], run: Run) -> None:
    if missing:
        raise NotPackedError(
            "\n".join(missing)
            + "\nNothing was committed. Run the parts that build them, then `shardio commit` "
            "again" + ("; with `--parts N` it says which" if run.parts is None else "")
        )


def _own_jobs(
    begun: _Begun, splits: Sequence[str], appends: bool, run: Run, owners: contextlib.ExitStack
) -> dict[str, Job]:
    """Own what was begun for each split, until `owners` ends. Raises BusyError, NotPackedError."""
    remote, work = begun.top.location.remote, {}
    for name in splits:
        folder = output_dir.building_folder(begun.folder, name, begun.within)
        place = begun.top.below(name) if name else begun.top
        try:
            owner = owners.enter_context(output_dir.own_unfinished(folder))
        except FileNotFoundError:
            manifest.load(place.location)  # it explains what is here, if it is nothing
            continue
        planned = journal.parse(owner.journal(), folder, owner.read)
        if appends:
            _refuse_others(place, folder, planned)
        target = place.location if remote else LocalDirectory(folder)
        # That a dataset is there is no reason to leave, where they are added to it in a store.
        own = replace(run, overwrite=run.overwrite or (remote and appends))
        work[name] = Job(planned, target, folder, own, owner=owner)
    return work


# --- what is added to a dataset -------------------------------------------------------------------


def _grown(top: Place, built: Mapping[str, Job]) -> list[Split]:
    """Return a dataset, or its splits, with what parts built for it, by the names of splits."""
    work = []
    classes = next((job.plan.classes for job in built.values()), None)
    for name, place in top.datasets().items():
        base, job = manifest.load(place.location), built.get(name)
        where = "" if job is None else job.directory
        work.append(Split(name, place, where, base, None, classes or base.classes, job=job))
    return work


def _commit_grown(top: Place, work: list[Split]) -> list[Packed]:
    """Commit what parts built for a dataset, or for its splits.

    Raises BusyError, where something else changed it meanwhile, and as `commit` does.
    """
    jobs = [one.job for one in work if one.job is not None]
    for one in work:
        if one.job is not None and not one.job.result.already:
            refuse_erased(one, one.base, one.job)
            one.take(one.job.plan)
    command = jobs[0].plan.command if jobs else "append"
    done = commit_grown(top, work, command)
    results = list[Packed]()
    for one in work:
        if one.job is None:
            continue
        result = one.job.result
        result.out, result.version = one.folder, done.versions.get(one.name)
        result.committed = result.version is not None
        infos = [shard.info for shard in one.job.built if shard.info is not None]
        if result.already:  # of these nobody looked at what was built
            first, stop = one.job.plan.first, one.job.plan.first + one.job.plan.shards
            infos = [one.base.shard(at) for at in range(first, min(stop, one.base.shards))]
        result.records = sum(info.records for info in infos)
        result.bytes = sum(info.size for info in infos)
        if not result.committed and not one.problems:
            result.already, result.version = True, _version_by(command, one.place)
        elif result.committed:
            new = (one.classes or ())[len(one.base.classes or ()) :]
            result.notes += [*grown_lines([] if results else new, [], 0, True), *_gone_lines(one)]
        results.append(result)
    return results


def _version_by(command: str, place: Place) -> str:
    """Return the id of the newest version that a command committed."""
    newest = manifest.load(place.location)
    all_of_them = ((one.version_id, one.commit) for one in history(place.location, newest))
    of_it = (found for found, this in all_of_them if this and this.command == command)
    return next(of_it, newest.version_id)


def _gone_lines(one: Split) -> list[str]:
    """Say which records a commit replaced, and which it dropped."""
    dropped = 0 if one.differences is None else len(one.differences.gone)
    replaced = len(one.gone) - dropped
    lines = [append.replaced_line(replaced)] if replaced else []
    if dropped:
        lines.append(f"{show_count(dropped, 'record')} dropped, which the source has not any more")
    return lines
