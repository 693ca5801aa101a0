"""The commit of what the parts of a job array built: of a packing, or of what is appended.

Parts build shards in OUT, or, to be appended, in a directory within the dataset (grow.py). Both are
looked for here, and checked, in the same way.
"""

from __future__ import annotations

import contextlib
import os
import time

from ..errors import BusyError, NotPackedError, printable
from ..formats import manifest
from ..storage import lock
from ..storage.local import LocalDirectory
from ..storage.location import local_path, locate
from ..units import check_bool, check_int
from . import journal, output_dir
from .append import commit_appended
from .job import Job, Run
from .journal import WORK
from .missing import Waiting, not_begun
from .options import PathLike, PlanOptions
from .pack import commit_jobs, resumable
from .packed import Packed
from .parts import Announce
from .plan import Plan
from .process_pool import Progress, Report, processes
from .sources.archives.inflate import remove_unpacked


def commit(
    out: PathLike,
    *,
    jobs: int | None = None,
    parts: int | None = None,
    wait_s: float | None = None,
    quick: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> list[Packed]:
    """Commit what the parts of a packing built: check every shard, then write the manifest.

    What the parts of an `append` built is checked in the same way, and is then a new version.

    parts     the number of parts: missing shards are then reported by part, too
    wait_s    wait at most so many seconds until all parts have built their shards
    quick     of shards that have not changed since their parts wrote and noted them, check only
              headers, indices and sizes. `verify` reads them completely, also by parts
    announce  called with lines that say, while it waits, which shards are missing

    Raises NotPackedError when shards are missing (naming them), and as `pack` does.
    """
    check_bool(overwrite=overwrite, quick=quick)
    parts = None if parts is None else check_int("parts", parts)
    run = Run(processes(jobs), overwrite, PlanOptions(), parts=parts, quick=quick)
    out = local_path(out)
    within = _within(out)
    if wait_s is None:
        return _commit_parts(out, run, progress, within)
    began, waiting = time.monotonic(), Waiting(out, parts, overwrite, within)
    while True:
        left_s = max(0.0, began + wait_s - time.monotonic())
        waiting.wait(left_s, announce or (lambda line: None))
        try:
            return _commit_parts(out, run, progress, within)
        except BusyError:  # a part that has built its last shard is about to end
            if left_s <= 0:
                raise
            time.sleep(0.1)


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


def _refuse_compacting(folder: str, planned: Plan) -> None:
    """Raise NotPackedError where what has begun is a compaction: it has no parts."""
    if planned.dataset_id != manifest.load(locate(folder)).dataset_id:
        raise NotPackedError(
            f"{printable(folder)}: nothing to commit here: a `shardio compact` was interrupted. "
            "Run it again"
        )


def _commit_parts(out: str, run: Run, progress: Progress | None, within: str) -> list[Packed]:
    """Check what parts built in a directory, and commit it."""
    splits = output_dir.begun_splits(out, within)
    if within and splits:  # what came while parts were begun is known to some of them only
        there = manifest.datasets(out)
        begun = [name for name, at in there.items() if os.path.lexists(os.path.join(at, WORK))]
        splits = [*dict.fromkeys([*splits, *begun])]
    work = {}
    with resumable(), contextlib.ExitStack() as owners:
        for name in splits or [""]:
            folder = output_dir.building_folder(out, name, within)
            try:
                owner = owners.enter_context(output_dir.own_unfinished(folder))
            except FileNotFoundError:
                # It explains what is here, if it is nothing.
                manifest.load(locate(manifest.split_folder(out, name)))
                continue
            planned = journal.parse(owner.journal(), folder, owner.read)
            if within:
                _refuse_compacting(manifest.split_folder(out, name), planned)
            work[name] = Job(planned, LocalDirectory(folder), folder, run, owner=owner)
        jobs = [*work.values()]
        if not jobs and (not splits or output_dir.has_splits(LocalDirectory(out), splits)):
            raise NotPackedError(f"{printable(out)}: already packed; there is nothing to commit")
        report = Report(progress, sum(job.result.source_bytes for job in jobs))
        unbuilt = [why for job in jobs if (why := job.check_parts(report)) is not None]
        missing = list[str]()
        # Where one split is committed, a commit was killed, and those that are gone were, too.
        if jobs and not (within and any(job.result.already for job in jobs)):
            missing += not_begun(out, splits or [""], run.overwrite, within).values()
        missing += unbuilt
        if missing:
            raise NotPackedError(
                "\n".join(missing)
                + "\nNothing was committed. Run the parts that build them, then `shardio commit` "
                "again" + ("; with `--parts N` it says which" if run.parts is None else "")
            )
        results = [job.result for job in jobs]
        if within:
            results = commit_appended(out, work)
        else:
            commit_jobs(LocalDirectory(out), jobs, splits)
        remove_unpacked(out)
    return results
