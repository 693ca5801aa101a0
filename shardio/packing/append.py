"""Append records to a packed dataset: what is new in a source, by its keys (grow.py).

The parts of a job array build the same shards, each its own, and `shardio commit` commits them: it
knows from their plan which records are new, and which take the place of one with the same key.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import OptionError, printable
from ..names import key_text
from ..storage.options import Storage
from ..units import Summary, check_bool, check_choice, refuse_options, show_count, show_size
from .grow import (
    Call,
    Growth,
    Split,
    built_line,
    grow,
    grown_lines,
    leave_out_rejected,
    some,
)
from .options import ADVICE, PathLike, SourceOptions
from .parts import Announce, PartOptions
from .process_pool import Executor, Progress
from .versions import version_lines


@dataclass(repr=False)
class Appended(Summary):
    """The result of one call of `append`; as str, a summary."""

    out: str
    added: int = 0  # records
    replaced: int = 0  # of these, records that take the place of one with the same key
    skipped: int = 0  # that were there, by their keys
    hidden: int = 0  # that had been dropped, and stay so
    rejected_before: int = 0  # files that were left out before, and are as they were
    shards: int = 0  # new ones
    bytes: int = 0  # of these
    seconds: float = 0.0
    classes: list[str] = field(default_factory=list)  # new ones
    rejected: list[tuple[str, str]] = field(default_factory=list)  # key, reason
    versions: dict[str, str] = field(default_factory=dict)  # the new ones, by split
    dry_run: bool = False
    part: tuple[int, int] | None = None  # only this one was built, and of how many; not committed
    planned: bool = False  # only the plan was made

    def __str__(self) -> str:
        verb, took = "appended", f" in {show_count(self.shards, 'shard')}"
        if self.dry_run or self.planned:
            verb = "would be appended" if self.dry_run else "planned"
        if not self.planned:
            size = f", {show_size(self.bytes)}, in {self.seconds:.1f} s"
            took = "" if self.dry_run else f"{took}{size}"
        records = show_count(self.added, "record")
        lines = [f"{printable(self.out, 4096)}: {records} {verb}{took if self.added else ''}"]
        if self.part:
            lines = [built_line(self.out, self.added, self.shards, self.part, self.seconds)]
        if self.replaced:
            lines.append(replaced_line(self.replaced))
        if self.skipped:
            were = "was" if self.skipped == 1 else "were"
            lines.append(f"{show_count(self.skipped, 'record')} {were} there, by their keys")
        if self.hidden:
            lines.append(f"{show_count(self.hidden, 'record')} had been dropped, and stay so")
        committed = not (self.dry_run or self.planned or self.part)
        lines += grown_lines(self.classes, self.rejected, self.rejected_before, committed)
        lines += version_lines(self.versions)
        return "\n".join(lines)


@refuse_options("append", ADVICE)
def append(
    source: PathLike,
    out: PathLike,
    *,
    on_duplicate: str = "error",
    read: SourceOptions | None = None,
    jobs: int | None = None,
    executor: Executor | None = None,
    part: tuple[int, int] | str | None = None,
    parts: int | None = None,
    stagger_s: float = 0.0,
    plan: bool = False,
    check_images: bool = False,
    on_error: str = "raise",
    restart: bool = False,
    dry_run: bool = False,
    to: Storage | None = None,
    work_dir: PathLike | None = None,
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> Appended:
    """Append what a source has to a packed dataset, or to its splits, as a new version.

    source        as of `pack`: a folder, an archive, a listing. Where OUT has splits, its top
                  folders are splits, too
    out           the directory of the dataset, or its URL
    on_duplicate  of a key that the dataset has: "error": nothing is appended; "skip": the record
                  that is there stays, and one that was dropped stays dropped; "replace": it is
                  dropped, and the new one appended
    read          what of the source is packed, and under which names: shardio.SourceOptions
    jobs          processes; default: one for each core
    executor      a shardio.RayExecutor: a cluster that builds the shards
    part          (i, n) or "i/n", i from 1 to n: build only this part of the new shards; when all
                  are built, `commit(out)` appends them. "auto": the part that SLURM, torchrun or
                  Kubernetes gives this process
    parts         the number of parts, if part is "auto": Kubernetes does not say it
    stagger_s     wait first, for a random time up to so many seconds, so that many parts do not
                  list the source all at once
    plan          only list the source, and leave the plan in OUT: parts then list nothing
    check_images  decode every image that is appended, as `pack` does with this option; always, if
                  the dataset was packed so
    on_error      "raise": one SourceError lists all files that cannot be packed, and nothing is
                  appended; "skip": they are left out, and OUT/rejected.jsonl lists them
    restart       drop an unfinished `append` of another source
    dry_run       say what would be appended, and change nothing
    to            a shardio.Storage: how the store of OUT is reached; default: as the source, if
                  that has the same scheme, or is no URL
    work_dir      if OUT is a URL: the directory where shards are built before they are uploaded;
                  default: one in ~/.cache/shardio. Give the same one to resume, and to all parts
    progress      called now and then with bytes done and bytes in all
    announce      called with lines to show before the work begins

    Format, size of shards, and what is done to images are as the dataset was packed. New classes
    get the next numbers, and no label changes. Shards that are there are not touched. Run again
    after an interruption, it resumes. Raises OptionError, SourceError, SourceChangedError,
    BusyError, NotPackedError, DamageError, StorageError.
    """
    began = time.monotonic()
    check_bool(dry_run=dry_run, plan=plan, restart=restart, check_images=check_images)
    check_choice("on_duplicate", on_duplicate, "error", "skip", "replace")
    share = PartOptions(part=part, parts=parts, stagger_s=stagger_s)
    if plan and part is not None:
        raise OptionError("part: a plan is of all parts; give it to `shardio append` without plan")
    told = dry_run, progress, announce
    call = replace(
        Call(read, jobs, on_error, restart, *told, share, executor, plan),
        to=to,
        work_dir=work_dir,
        check_images=check_images,
        on_duplicate=on_duplicate,
    )
    growth = grow(source, out, call)
    done = Appended(growth.folder, dry_run=dry_run, planned=plan and not dry_run)
    done.classes = [] if part is not None else growth.new_classes  # which the commit says
    done.rejected_before = leave_out_rejected(growth)
    _choose(growth, on_duplicate, done)
    if dry_run:
        pass
    elif plan:
        for job in growth.plan():
            done.shards += job.write_plan().shards
    elif part is not None:
        done.added = growth.build_part(done)
        done.replaced = 0  # which the commit does
    else:
        committed = growth.build_and_commit()
        done = replace(done, **vars(committed), classes=growth.new_classes)
        done.replaced = sum(len(one.gone) for one in growth.work)
    done.seconds = time.monotonic() - began
    return done


def _choose(growth: Growth, on_duplicate: str, done: Appended) -> None:
    """Choose what is new, and what it replaces. Raises OptionError for keys that are there."""
    alike = list[bytes]()
    for one in growth.work:
        if one.listing is not None:
            if on_duplicate == "skip":
                done.hidden += _leave_out_dropped(one)
            alike += _leave_out_alike(one, on_duplicate)
            done.added += len(one.listing.keys)
        elif one.job is not None:
            planned = one.job.plan.on_duplicate
            if on_duplicate not in ("error", planned):  # which is what it is where nobody says it
                raise OptionError(
                    f"{printable(growth.folder)}: a plan was made here with --on-duplicate "
                    f"{planned}, and {on_duplicate} is asked for now: leave it out; or plan anew, "
                    "with `shardio append --plan --restart`"
                )
            one.take(one.job.plan)
            done.added += one.job.plan.records
        done.replaced += sum(map(len, one.replaced.values()))
    if alike and on_duplicate == "error":
        raise OptionError(
            f"{printable(growth.folder)}: it has {show_count(len(alike), 'record')} of the source "
            f"already, by the keys {some([*map(key_text, alike)])}. Nothing was appended. Choose "
            "what becomes of them: --on-duplicate skip or replace"
        )
    done.skipped = len(alike)


def _leave_out_alike(one: Split, on_duplicate: str) -> list[bytes]:
    """Leave out of the listing of a split what the dataset has, or note what is replaced.

    Returns the keys that are left out.
    """
    assert one.listing is not None
    if one.finished:
        _leave_out_finished(one)
    alike = one.alike(one.listing.keys)
    if on_duplicate == "replace":
        one.replaced = alike
        return []
    fresh = [at for at, key in enumerate(one.listing.keys) if key not in alike]
    one.listing = one.listing.take(np.array(fresh, np.int64))
    return sorted(alike)


def _leave_out_dropped(one: Split) -> int:
    """Leave out of a listing what was dropped from the dataset. Returns how many."""
    assert one.listing is not None
    listing, there = one.listing, one.alike(one.listing.keys)
    hidden = one.alike(listing.keys, dropped=True).keys() - there.keys() - one.finished.keys()
    left = [at for at, key in enumerate(listing.keys) if key not in hidden]
    if hidden:
        one.listing = listing.take(np.array(left, np.int64))
    return len(hidden)


def _leave_out_finished(one: Split) -> None:
    """Leave out of a listing what the same command committed before it was killed."""
    assert one.listing is not None
    listing = one.listing
    about = zip(listing.sizes.tolist(), listing.mtimes.tolist(), strict=True)
    pairs = enumerate(zip(listing.keys, about, strict=True))
    left = [at for at, (key, of) in pairs if one.finished.get(key) != of]
    one.listing = listing.take(np.array(left, np.int64))


def replaced_line(count: int) -> str:
    """Say how many of the new records replace one that was there."""
    return f"{count:,} of these replace a record with the same key"
