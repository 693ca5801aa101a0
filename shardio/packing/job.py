"""One dataset on its way into one directory: checked, owned, built, committed.

Each shard of the plan is one independent, idempotent piece of work: this process, N processes, or
the parts of a job array build the same bytes. A shard gets its name when it is whole and flushed;
the manifest is renamed into place after all of them, and until then nothing was packed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DamageError, ExistsError, SourceChangedError, SourceError, printable
from ..formats import manifest
from ..formats.sample import Schema
from ..names import key_text
from ..storage import local, lock
from ..storage.local import LocalDirectory
from ..storage.location import Target
from ..storage.lock import JOURNAL
from ..storage.remote import RemoteLocation
from ..units import show_count, show_size
from . import build_shard, journal, output_dir, piece, process_pool
from .build_shard import Work
from .built import Built
from .earlier_plan import plan_is_gone
from .missing import show_missing
from .options import PlanOptions
from .output_dir import Owner
from .packed import Packed
from .parts import Announce
from .plan import Plan, difference
from .reencode import ONE_SIZE
from .sources.base import Problem, SourceRequest, listed
from .uploads import Uploads

_FILES = frozenset(("imagefolder", "files"))  # sources whose bytes are packed as they are
_SCAN = "scan"  # names the list of what the listing leaves out, among those of shards


@dataclass(frozen=True)
class Run:
    """How one call builds shards."""

    jobs: int
    overwrite: bool
    plan: PlanOptions  # its part and restart
    skip: bool = True  # what cannot be packed is left out
    parts: int | None = None  # how many there were, where a commit knows that
    executor: process_pool.Executor | None = None  # builds them, not this machine
    quick: bool = False  # the parts' notes are believed

    @property
    def is_whole(self) -> bool:
        """Return False where only a part of the shards is built."""
        return self.plan.part is None


class Job:
    """One dataset that is to be packed into one directory; `result` says what became of it.

    From `build` on, or from the beginning, the directory is owned by `owner` until `commit`, so
    that several splits are committed together. place: where the dataset will be: the directory, or
    in an object store; then shards are built in the directory, and uploaded. request: for the
    source, where shards are built. reopen: opens the source where the plan lies in the directory.
    """

    def __init__(
        self,
        plan: Plan,
        place: Target,
        directory: str,
        run: Run,
        request: SourceRequest | None = None,
        reopen: journal.Reopen | None = None,
        owner: Owner | None = None,
    ) -> None:
        Schema(plan.fields)  # too many, or what cannot be one: refused before all is locked
        self.plan, self.place, self.directory, self.run = plan, place, directory, run
        self.owner, self._request, self._reopen = owner, request, reopen
        self._token, self._restart = local.token(), run.plan.restart
        self._resumed: Plan | None = None  # the plan in the journal that we go on under
        self._shards = run.plan.shards_of(plan.shards)
        self.result = Packed.begun(plan, self.place.url, self._shards, run.skip)
        self.built: list[Built] = []
        self.problems: list[Problem] = []
        self._started = time.monotonic()
        # Whether nothing of ours is here, so that a list of rejected keys is none of ours either.
        begun = os.path.lexists(os.path.join(directory, JOURNAL))
        self._empty = not begun and not self.place.exists(manifest.MANIFEST)

    # --- before a byte is written -----------------------------------------------------------------

    def check(self, sized: bool) -> None:
        """Raise ExistsError for another dataset, or a user's list of rejected keys.

        sized: the size of shards was asked for, and is not a default.
        """
        self.result.already = self._is_packed(sized)
        if self.run.skip and not self.result.already:
            journal.refuse_rejected(self.place, self._empty)

    def dry_run(self) -> Packed:
        """Find out what `build` would do, and raise what it would raise for what lies there."""
        self.result.dry_run = True
        self.result.shards = len(self._shards)
        self.result.rejected = _shown(self.plan.problems)
        self.result.tiles = None  # nobody has looked
        with contextlib.suppress(FileNotFoundError):
            head, read = lock.look(self.directory)
            if not self.result.already and self._can_resume(head, read):
                there = self._finished().keys() | self._sent().keys()
                self.result.kept = len(there & set(self._shards))
        return self.result

    def write_plan(self) -> Packed:
        """Leave the plan in the directory, for those who build its shards."""
        self.result.planned = True
        self.result.rejected = _shown(self.plan.problems)
        if not self.result.already:
            owner = self._own()
            self.result.already = owner is None
            if owner is not None:
                self.result.joined = owner.joined
                owner.release()
        return self.result

    # --- shards -----------------------------------------------------------------------------------

    def build(self, owners: contextlib.ExitStack, report: process_pool.Report) -> Sequence[Problem]:
        """Own the directory, as long as `owners` says, and build its shards.

        Returns what cannot be packed, where nothing may be left out.
        """
        self._started = time.monotonic()
        if self._is_packed():
            return self._leave()
        owner = self._own(None if self.run.is_whole else self._shards)
        if owner is None:
            return self._leave()
        self.owner = owners.enter_context(owner)
        self.result.already = False  # whatever `check` saw
        problems: Sequence[Problem] = self.plan.problems
        if self.run.is_whole and owner.joined:
            journal.remove_temporaries(self.directory)  # of packers that died
        noted = problems or (self._resumed is not None and self._resumed.problems)
        if not self.run.is_whole and noted and (self.run.skip or not problems):
            if self._reopen is not None:  # `plan` has said them, and `commit` has them from it
                problems = []
            journal.write_rejected(LocalDirectory(self.directory), problems, _SCAN)
        return self._build_shards(problems, report)

    def _own(self, shards: range | None = None) -> Owner | None:
        """Own the directory, or shards in it; None where another packer was faster."""
        local.make_directory(self.directory)
        owner = output_dir.own(self.directory, self._new_journal, self._can_resume, shards)
        try:
            if owner.joined or not self._is_packed():
                return owner
            owner.release_to_winner(packed=True)
            return None
        except BaseException:
            owner.release_to_winner(packed=False)
            raise

    def check_parts(self, report: process_pool.Report, committed: bool) -> str | None:
        """Check what parts built, if it is not committed; say what is missing. Raises as build."""
        self.result.checked, self.result.already = True, committed
        if committed:
            if self.plan.command == "pack":
                self._show_committed()
            return None
        if self._is_packed():
            raise ExistsError(
                f"{printable(self.place.url)}: a dataset is packed here, of the same keys and "
                "sizes as the new one. Replace it with `shardio commit --overwrite`"
            )
        problems = journal.load_rejected(LocalDirectory(self.directory), journal.part_list(_SCAN))
        if problems is None and self.plan.problems:
            raise unpackable(self.plan.problems, self.directory, "the parts")
        self._build_shards(self.plan.problems if self.plan.ahead else problems or [], report)
        missing = [number for number, one in enumerate(self.built) if one.info is None]
        if not missing:
            return None
        shown = show_missing(missing, self.plan.shards, self.run.parts)
        return f"{printable(self.directory)}: not packed: {shown}"

    def _build_shards(
        self, problems: Sequence[Problem], report: process_pool.Report
    ) -> Sequence[Problem]:
        """Build the shards, or check them; return all problems where nothing may be left out."""
        assert self.owner is not None
        self.result.unlocked = not self.owner.is_locked
        work = Work(
            self.plan,
            self.directory,
            self._token,
            self.run.skip,
            self._finished(),
            self._sent(),
            builds=not self.result.checked,
            note=not self.run.is_whole and not self.place.remote,  # else uploads do
            quick=self.run.quick,
        )
        try:
            with self._uploads() as uploads:
                keep = None if uploads is None else uploads.add
                build, tasks = _tasks(work, self._shards, self.place, self.run, self._request)
                pool = functools.partial(process_pool.run, build, tasks, executor=self.run.executor)
                for one in pool(jobs=self.run.jobs, report=report, seen=keep):
                    self.built.append(one)
                    self.result.kept += one.reused
                    self.result.built += one.info is not None and not one.reused
                    self.result.add(one.reencoded)
                if uploads is not None:
                    uploads.finish()
        except BaseException:
            journal.remove_temporaries(self.directory, self._token)  # of workers that were killed
            raise
        problems = [*problems, *(entry for one in self.built for entry in one.problems)]
        if problems and not self.run.skip:
            return problems
        self.problems = sorted(problems)
        self.result.rejected = _shown(self.problems)
        self.result.seconds = time.monotonic() - self._started
        return []

    def _finished(self) -> dict[int, list[str]]:
        """Return the files that may be shards of this packing, by number."""
        found: dict[int, list[str]] = {}
        for name in sorted(journal.new_shards(self.directory, self.plan.before)):
            number = (journal.shard_number(name) or 0) - self.plan.first
            found.setdefault(number, []).append(name)
        return found

    def _uploads(self) -> contextlib.AbstractContextManager[Uploads | None]:
        """Return the uploads of this packing; None where it goes into a directory."""
        if isinstance(self.place, RemoteLocation):
            return Uploads(self.place, self.directory, self.plan.dataset_id)
        return contextlib.nullcontext()

    def _sent(self) -> dict[int, Built]:
        """Return the shards that an interrupted packing uploaded, by number."""
        with self._uploads() as uploads:
            return {} if uploads is None else uploads.sent(self.plan.first)

    # --- the journal ------------------------------------------------------------------------------

    def _new_journal(self) -> Iterator[bytes]:
        """Write a journal for a directory that has none. Raises SourceChangedError."""
        if self._reopen is not None:
            raise plan_is_gone(self.place.url)
        self._restart = False  # there is nothing to be dropped
        before = journal.shards_in(self.directory)
        self.plan = dataclasses.replace(self.plan, before=before)
        return journal.dump(self.plan)

    def _can_resume(self, data: bytes, read: journal.ReadBytes) -> bool:
        """Return whether to go on under a journal that is there; False where it is to be dropped.

        Raises SourceChangedError when it is of another plan, DamageError, unless `restart`.
        """
        whole = self.run.is_whole
        if not journal.is_resumable(self.directory, data):
            return False  # of a Writer that died, or committed, and not cleaned up
        try:
            old = journal.parse(data, self.directory, read, self._reopen)
        except DamageError:
            if self._restart:
                return False
            raise
        if self._reopen is not None:
            if old.ahead is None or not old.same(self.plan):
                raise plan_is_gone(self.place.url)
            self.plan = old
            return True
        usable = old.ahead is not None or self.plan.ahead is None
        if old.same(self.plan) and usable:
            # A part goes on under an equal plan: another part has restarted it a moment ago.
            if self._restart and whole:
                return False
            self.plan, self._resumed = dataclasses.replace(self.plan, before=old.before), old
            return True
        # Of one that was killed before its first shard nothing is lost. Parts run at once, and must
        # agree: they are told, and one part does not drop the plan that was made for all of them.
        planned = old.ahead is not None and not whole
        if (self._restart and not planned) or (
            whole and not journal.has_work(self.directory, data)
        ):
            return False
        raise _another_plan(self.place, old, self.plan, planned)

    # --- what is committed ------------------------------------------------------------------------

    def commit(self) -> None:
        """Put the manifest into place: before it nothing was packed, after it all was."""
        if self.owner is not None and not self.result.already:  # it was not packed before
            self._write_manifest()
        if not self.place.remote:  # else it says which splits there are, and goes after all
            self.clean()

    def clean(self) -> None:
        """Remove what only the unfinished packing needed."""
        if self.owner is not None:
            kept = self.plan.ahead is not None and self.result.checked and not self.place.remote
            self.owner.clean(keep=kept)

    def _write_manifest(self) -> None:
        options = self.plan.options.record()
        if self.result.tiles is not None:  # known only now: no part of the plan, nor of the id
            options["tiles"] = self.result.tiles
        infos = [one.info for one in self.built if one.info is not None]
        written = manifest.make(
            infos,
            dataset_id=self.plan.dataset_id,
            format=self.plan.options.format,
            schema=Schema(self.plan.fields),
            classes=self.plan.classes,
            options=options,
            blob_bytes=sum(one.blob_bytes for one in self.built),
        )
        if self.place.remote and self._is_packed():
            self._empty = False  # another packer was faster: a store has no locks
        if self.problems:
            journal.refuse_rejected(self.place, self._empty)
            files = journal.files_in(self.plan, dict(self.problems))
            files = dict.fromkeys(dict(self.problems), journal.UNKNOWN) | files
            journal.write_rejected(self.place, self.problems, files=files)
        elif not self._empty:
            journal.remove_rejected(self.place)  # of the dataset that is replaced
        if self.run.executor is not None:
            output_dir.refuse_unseen(self.place, [one.name for one in infos])
        self.place.write(manifest.MANIFEST, written.dump())
        self.result.records, self.result.bytes = written.records, written.size
        self.result.committed = True

    def _is_packed(self, sized: bool = True) -> bool:
        """Return whether just this dataset is committed here. Raises ExistsError for another."""
        return not self.run.overwrite and output_dir.is_packed(self.place, self.plan, sized)

    def _leave(self) -> Sequence[Problem]:
        """Leave what is committed, as it is what was asked for; clean up what a kill left."""
        self.result.already = True
        if self.plan.problems and not self.run.skip:
            return self.plan.problems
        self._show_committed()
        with contextlib.suppress(SourceChangedError):  # the plan was in the journal, which is gone
            self.result.rejected = sorted({*self.result.rejected, *_shown(self.plan.problems)})
        stored = self.plan.dataset_id if self.place.remote else None
        output_dir.clean_up(self.directory, stored=stored)
        return []

    def _show_committed(self) -> None:
        committed = manifest.load(self.place)
        self.result.records, self.result.bytes = committed.records, committed.size
        self.result.source_bytes = int(self.plan.shard_bytes.sum())  # of all parts, too
        self.result.tiles = committed.options.get("tiles")
        self.result.rejected = _shown(journal.own_rejected(self.place) or [])


def _another_plan(place: Target, old: Plan, new: Plan, planned: bool) -> SourceChangedError:
    """Return the error for another plan that is there; planned: by `shardio plan`, for parts."""
    planner = journal.planner(old)
    differ = difference(old, new) or f"  it was begun without `{planner}`"
    return SourceChangedError(
        f"{printable(place.url)}: an unfinished packing is here, of another plan:\n"
        f"{differ}\n"
        "Undo the change and run it again to resume, or drop the unfinished packing with "
        f"{f'`{planner} --restart`' if planned else '--restart'}"
    )


def least_bytes(job: Job) -> int:
    """Return the bytes that `Job.build` will surely write here, as far as that is known before."""
    options = job.plan.options
    if job.result.already or job.place.remote:
        return 0
    if job.result.pixels is not None:
        height, width = job.result.pixels
        needed = job.result.records * 3 * height * width
    elif options.resize is not None or options.source not in _FILES:
        return 0
    else:
        needed = job.result.source_bytes
        if options.jpeg_tiles:  # the smallest that tiles were seen to be: 0.92
            needed = needed * 9 // 10
    if os.path.lexists(os.path.join(job.directory, JOURNAL)):  # what is there may be kept
        for name in journal.shards_in(job.directory):
            with contextlib.suppress(OSError):
                needed -= os.path.getsize(os.path.join(job.directory, name))
    return max(0, needed)


def show_pixels(work: Sequence[Job], announce: Announce | None) -> None:
    """Say of each job how large raw pixels will be, of all parts."""
    for job in work:
        if announce is None or job.result.pixels is None or job.result.already:
            continue
        (height, width), count = job.result.pixels, job.plan.records
        split = f"{job.result.split}: " if job.result.split else ""
        announce(
            f"{split}raw pixels: {count:,} images of {width} x {height}, "
            f"{show_size(count * 3 * height * width)} (the source has "
            f"{show_size(int(job.plan.shard_bytes.sum()))})"
        )


def _tasks(
    work: Work, shards: range, place: Target, run: Run, request: SourceRequest | None
) -> tuple[piece.BuildPiece, Sequence[Any]]:
    """Return what builds the shards, here or elsewhere, and what it is given for each."""
    if run.executor is None:
        return functools.partial(build_shard.build_or_keep, work), shards
    assert request is not None
    return piece.cut(work, shards, request, place if isinstance(place, RemoteLocation) else None)


def unpackable(
    problems: Sequence[Problem], source: str, what: str = "the same command"
) -> SourceError:
    """Return the error that says which files cannot be packed, and what to do about it."""
    one_size = any(why.endswith(ONE_SIZE) for _, why in problems)
    return SourceError(
        f"{printable(source)}: {show_count(len(problems), 'file')} cannot be packed, so nothing "
        "was committed:\n"
        f"{listed(sorted(problems))}\n"
        f"Run {what} again, with\n"
        "  --on-error skip        to leave them out; what is finished is kept\n"
        + ("  --restart --resize N   to make all images squares of N x N\n" if one_size else "")
        + "  --restart              once you have mended or removed them, to pack anew"
    )


def _shown(problems: Sequence[Problem]) -> list[tuple[str, str]]:
    """Return problems as users get them."""
    return [(key_text(key), why) for key, why in problems]
