"""Update a packed dataset to what its source is now: what is new, changed and gone.

How it works. Keys tell what is new, and what is gone. Of a key that both have, the contents are
compared, unless the size and time of its file are those that an earlier `update` noted in a file
beside the manifest (formats/version.py). What changed is packed anew, and its old record dropped.

The parts of a job array compare alike, or go on under a plan of what was compared once; it says
what `shardio commit` is to drop and to note, since the source is not asked then.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..dataset.decode import Decoder
from ..dataset.reader import Reader
from ..dataset.sequence import ShardSequence
from ..errors import OptionError, printable
from ..formats.sample import Sample
from ..formats.version import NONE, SourceNotes, load_sources
from ..names import KEY
from ..storage.options import Storage
from ..units import Summary, check_bool, check_choice, refuse_options, show_count, show_size
from . import process_pool
from .grow import (
    PLAIN,
    Call,
    Growth,
    Split,
    built_line,
    grow,
    grown_lines,
    leave_out_rejected,
)
from .options import ADVICE, PackOptions, PathLike, SourceOptions
from .parts import Announce, PartOptions
from .plan import Differences, cut
from .process_pool import Executor, Progress, Report
from .sources.base import Rejected
from .versions import version_lines

_PIECE = 256  # files, or
_TOLD = 64  # files between two looks at whether to stop
_PIECE_BYTES = 32 << 20  # bytes that one process reads and compares at a time


@dataclass(repr=False)
class Updated(Summary):
    """The result of one call of `update`; as str, a summary."""

    out: str
    new: int = 0  # records
    back: int = 0  # of these, those with keys of records that had been dropped
    changed: int = 0
    gone: int = 0  # from the source: dropped, unless they are to be kept
    unchanged: int = 0
    compared: int = 0  # of these, those whose contents were read
    assumed: int = 0  # of these, those that nobody looked at, as was asked for
    shards: int = 0  # new ones
    bytes: int = 0  # of these
    seconds: float = 0.0
    classes: list[str] = field(default_factory=list)  # new ones
    rejected: list[tuple[str, str]] = field(default_factory=list)  # key, reason
    versions: dict[str, str] = field(default_factory=dict)  # the new ones, by split
    rejected_before: int = 0  # files that were left out before, and are as they were
    kept: bool = False  # what is gone from the source stays
    dry_run: bool = False
    part: tuple[int, int] | None = None  # only this one was built, and of how many; not committed
    built: int = 0  # records of this part
    planned: bool = False  # only the plan was made

    def __str__(self) -> str:
        took = "" if self.dry_run or self.planned else f", in {self.seconds:.1f} s"
        gone = f"{self.gone:,} gone{', which stay' if self.kept and self.gone else ''}"
        lines = [
            f"{printable(self.out, 4096)}: {self.new:,} new, {self.changed:,} changed, {gone}, "
            f"{self.unchanged:,} as they were{took}"
        ]
        if self.part:
            lines = [built_line(self.out, self.built, self.shards, self.part, self.seconds)]
        if self.back:
            lines.append(f"{self.back:,} of the new ones had been dropped, and are back")
        if self.compared:
            lines.append(f"the contents of {self.compared:,} were compared")
        if self.assumed:
            lines.append(f"{self.assumed:,} were taken as unchanged, unseen")
        if self.planned:
            lines.append(f"planned: {show_count(self.shards, 'new shard')}")
        elif self.shards and not self.part:
            lines.append(f"{show_count(self.shards, 'new shard')}, {show_size(self.bytes)}")
        committed = not (self.dry_run or self.planned or self.part)
        lines += grown_lines(self.classes, self.rejected, self.rejected_before, committed)
        if self.dry_run:
            lines.append("nothing was changed, since this is a dry run")
        lines += version_lines(self.versions)
        return "\n".join(lines)


@refuse_options("update", ADVICE)
def update(
    source: PathLike,
    out: PathLike,
    *,
    checksum: bool = False,
    assume_unchanged: bool = False,
    gone: str | None = None,
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
) -> Updated:
    """Make a packed dataset, or its splits, what its whole source is now, as a new version.

    source    all of it, as of `pack`: what it has not any more is dropped
    out       the directory of the dataset, or its URL
    checksum  compare the contents of all files, also of those whose size and time are as an earlier
              `update` noted them
    assume_unchanged  of a file whose size and time are not noted yet, take the record that is there
              as unchanged, without reading either, and note the file's size and time
    gone      what becomes of records that the source has not: "drop", or "keep". Default: they are
              dropped, but where these are more than half of all, nothing is done
    read, jobs, on_error, restart, to, work_dir, progress, announce    as of `append`
    executor  a shardio.RayExecutor: a cluster that builds the shards; contents are compared here
    part, parts, stagger_s    as of `append`: build only this part of the new shards; then `commit`
    plan      only list and compare, and leave the plan in OUT: parts then do neither
    check_images  of what is new or changed, as of `append`
    dry_run   say what is new, changed and gone, and change nothing

    The first time, and where the source is no folder or archive of images alone, contents are
    compared: both are read. Where packing changed the images (`resize`, `encode`, `jpeg_tiles`
    without `keep_original`), this cannot be done: sizes and times tell what changed, and the first
    time `assume_unchanged` is needed. Raises as `append` does.
    """
    began = time.monotonic()
    check_bool(checksum=checksum, dry_run=dry_run, restart=restart)
    check_bool(assume_unchanged=assume_unchanged, check_images=check_images)
    if checksum and assume_unchanged:
        raise OptionError("--checksum compares all files, --assume-unchanged none: give one")
    check_choice("gone", gone, None, "drop", "keep")
    share = PartOptions(part=part, parts=parts, stagger_s=stagger_s)
    if plan and part is not None:
        raise OptionError("part: a plan is of all parts; give it to `shardio update` without plan")
    told = dry_run, progress, announce
    call = replace(
        Call(read, jobs, on_error, restart, *told, share, executor, plan),
        to=to,
        work_dir=work_dir,
        check_images=check_images,
        command="update",
    )
    growth = grow(source, out, call)
    done = Updated(growth.folder, kept=gone == "keep", dry_run=dry_run)
    done.planned = plan and not dry_run
    done.classes = [] if part is not None else growth.new_classes  # which the commit says
    found = list[_Found]()
    if any(one.job is not None for one in growth.work):
        if checksum or assume_unchanged or gone is not None:
            raise OptionError(
                f"{printable(growth.folder)}: a plan was made here by `shardio update --plan`, and "
                "it says what is unchanged and what is to go: leave out --checksum, "
                "--assume-unchanged and --gone; or plan anew, with `shardio update --plan "
                "--restart`"
            )
        _take_planned(growth, done)
    else:
        found = _compared(growth, done, checksum, assume_unchanged, gone)
    if dry_run:
        pass
    elif plan:
        done.shards = sum(job.write_plan().shards for job in growth.plan())
    elif part is not None:
        done.built = growth.build_part(done)
    else:
        committed = growth.build_and_commit()
        done.shards, done.bytes = committed.shards, committed.bytes
        done.rejected, done.versions = committed.rejected, committed.versions
        for each in found:
            left_out = {key for key, _ in each.split.problems}
            done.new -= sum(each.listing.keys[place] in left_out for place in each.new)
    done.seconds = time.monotonic() - began
    return done


def _take_planned(growth: Growth, done: Updated) -> None:
    """Learn from plans that were made ahead what differs. Raises as `Split.take`."""
    for one in growth.work:
        if one.job is not None:
            one.take(one.job.plan)
            done.changed += len(one.replaced)
            done.new += one.job.plan.records - len(one.replaced)
            done.gone += len(one.gone)
        done.unchanged += one.base.records - len(one.replaced) - len(one.gone)


def _compared(
    growth: Growth, done: Updated, checksum: bool, assumes: bool, gone: str | None
) -> list[_Found]:
    """Compare what was listed with the dataset, and choose what is to be done. Raises OptionError.

    Returns what was found, by splits.
    """
    for one in growth.work:
        if one.listing is not None:
            one.source_keys = {*one.listing.keys, *(key for key, _ in one.listing.problems)}
    done.rejected_before = 0 if checksum else leave_out_rejected(growth)
    found = [
        _Found(one, growth, checksum, assumes) for one in growth.work if one.listing is not None
    ]
    for each in found:
        each.compare(done)
        done.new += len(each.new)
        done.back += each.back
        done.changed += len(each.changed)
        done.gone += len(each.gone)
    known = done.gone + done.changed + done.unchanged
    if gone is None and 2 * done.gone > known:
        raise OptionError(
            f"{printable(growth.folder)}: {done.gone:,} of its {known:,} records are not in "
            f"{growth.request.shown}: expected all of the source. If they are to go, say so: "
            "--gone drop; or --gone keep. Nothing was changed"
        )
    for each in found:
        each.choose(keep=gone == "keep")
    return found


class _Found:
    """What differs between a dataset and the records that its source lists."""

    def __init__(self, split: Split, growth: Growth, checksum: bool, assumes: bool) -> None:
        assert split.listing is not None
        self.split, self.listing = split, split.listing
        self._growth = growth
        index = split.place.location
        # As it was packed: what was annotated since is no difference of the source.
        stored = replace(split.base, schema=split.base.stored_schema, overlays=())
        self._reader = Reader(index, stored)
        decoder = Decoder(stored.schema, fields=None, decode=None, transform=None)
        rows = range(self._reader.records)
        self._records = ShardSequence(self._reader, decoder, rows, text=False)
        self.notes = load_sources(index, split.base)
        joins = growth.request.joins
        plain = growth.request.kind in PLAIN and not (joins.tables or joins.boxes)
        self._trusts = plain and not checksum
        self._assumes, self._assumed = assumes, 0
        if assumes and not plain:
            raise OptionError(
                f"{growth.request.shown}: --assume-unchanged goes with a folder or an archive of "
                "files alone: what tables and lists say of them changes without a file. Leave it "
                "out"
            )
        there = self._records.stored_keys()
        for what, keys in (("the dataset", there), ("the source", self.listing.keys)):
            self._refuse_alike(what, keys)
        places = {key: row for row, key in enumerate(there)}
        self.new: list[int] = []  # places in the listing
        self._both: list[tuple[int, int]] = []  # places in the listing, and rows of the dataset
        for place, key in enumerate(self.listing.keys):
            row = places.pop(key, None)
            if row is None:
                self.new.append(place)
            else:
                self._both.append((place, row))
        # Of a file that cannot be packed as it is now, the record stays.
        gone = places.keys() - (split.source_keys or ())
        self.gone = [self._reader.number(places[key]) for key in gone]
        self.changed: list[tuple[int, int]] = []  # places in the listing, and numbers
        self.same: list[tuple[int, int]] = []

    @property
    def back(self) -> int:
        """Return how many of the new ones have keys of records that were dropped."""
        keys = {self.listing.keys[place] for place in self.new}
        return len(self.split.alike(keys, dropped=True)) if len(self._reader.dropped) else 0

    def _refuse_alike(self, what: str, keys: list[bytes]) -> None:
        """Raise OptionError where two records have one key: nobody knows which became which."""
        if len(set(keys)) < len(keys):
            key = next(key for key, count in Counter(keys).items() if count > 1)
            raise OptionError(
                f"{printable(self.split.folder)}: several records of {what} have the key "
                f"{printable(key)}, so what changed cannot be told. Use `shardio append` and "
                "`shardio drop`"
            )

    def compare(self, done: Updated) -> None:
        """Find out which records changed. Raises OptionError where they cannot be compared."""
        sizes, times = self.listing.sizes.tolist(), self.listing.mtimes.tolist()
        comparable, unsure = self._is_comparable(), []
        for place, row in self._both:
            number = self._reader.number(row)
            size, changed_ns = (-1, 0) if self.notes is None else self.notes.of(number)
            known = self._trusts and size != -1
            if known and times[place] and (size, changed_ns) == (sizes[place], times[place]):
                self.same.append((place, number))
            elif known and (size != sizes[place] or (times[place] and not comparable)):
                self.changed.append((place, number))
            elif self._assumes and not (known and times[place]):
                self.same.append((place, number))
                self._assumed += 1
            else:
                unsure.append((place, row, number))
        if unsure and not comparable:
            raise self._cannot_be_compared(unsure[0][0])
        done.compared += len(unsure)
        done.assumed += self._assumed
        for place, number, same in self._read_both(unsure):
            (self.same if same else self.changed).append((place, number))
        done.unchanged += len(self.same)

    def _is_comparable(self) -> bool:
        """Return whether records have the bytes of files, and not what packing made of them."""
        options = PackOptions.of(self.split.base.options)
        raw = options.encode is not None and options.source != "arrays"
        tiled = options.jpeg_tiles and not options.keep_original
        return not (options.resize is not None or raw or tiled)

    def _cannot_be_compared(self, place: int) -> OptionError:
        return OptionError(
            f"{printable(self.split.folder)}: packing changed the images, so files such as "
            f"{printable(self.listing.keys[place])} cannot be compared with them. If all files are "
            "as they were packed, but for new ones and those that are gone, say so once: "
            "--assume-unchanged. It notes their sizes and times, which tell `update` from then on "
            "what changed. Else append what is new: `shardio append --on-duplicate skip`; what "
            "changed: `--on-duplicate replace`, from a folder of these files; and drop what is "
            "gone: `shardio drop`"
        )

    def _read_both(self, pairs: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, bool]]:
        """Yield places, numbers, and whether the source has what the dataset has.

        Pieces of the source are read in several processes.
        """
        places = self.listing.own_places
        pairs = sorted(pairs, key=lambda pair: int(places[pair[0]]))
        sizes = self.listing.sizes[[place for place, *_ in pairs]]
        ends = cut(sizes, _PIECE_BYTES, _PIECE).tolist()
        pieces = [pairs[start:stop] for start, stop in itertools.pairwise(ends)]
        report = Report(self._growth.call.progress, int(sizes.sum()))
        jobs = self._growth.run.jobs
        found = process_pool.run(self._read_piece, pieces, jobs=jobs, report=report)
        for piece, same in zip(pieces, found, strict=True):
            for (place, _, number), one in zip(piece, same, strict=True):
                yield place, number, one

    def _read_piece(
        self, pairs: list[tuple[int, int, int]], add: Callable[[int], None]
    ) -> list[bool]:
        """Return of each record whether the source has what the dataset has. In any process."""
        source, same = self.listing.source, list[bool]()
        places = self.listing.own_places[[place for place, *_ in pairs]].tolist()
        with source.open() as read:
            for place in places:
                source.will_need(place)
            done = 0
            for (place, row, _), own in zip(pairs, places, strict=True):
                try:
                    same.append(self._is_same(read(own), self._records[row]))
                except Rejected:
                    same.append(False)  # and packing it will say why it cannot be packed
                done += int(self.listing.sizes[place])
                if len(same) % _TOLD == 0:
                    add(done)
                    done = 0
            add(done)
        return same

    def _is_same(self, ours: Sample, there: Sample) -> bool:
        """Return whether a sample of the source is the one that was packed."""
        kept = there.pop("original", None) if "original" not in ours else None
        if kept is not None:
            there["image"] = kept
        return all(_equal(value, ours.get(name)) for name, value in there.items() if name != KEY)

    def choose(self, keep: bool) -> None:
        """Take what is to be packed, and what is to go. keep: what is gone from the source stays"""
        split = self.split
        places = sorted([*self.new, *(place for place, _ in self.changed)])
        split.listing = self.listing.take(np.array(places, np.int64))
        split.replaced = {self.listing.keys[place]: [number] for place, number in self.changed}
        split.gone = np.array([] if keep else sorted(self.gone), np.int64)
        listed, numbers = np.array(sorted(self.same), np.int64).reshape(-1, 2).T
        sizes, times = self.listing.sizes[listed], self.listing.mtimes[listed]
        notes = self.notes or SourceNotes(NONE, NONE)
        known = notes.grown(split.base.stored_records)
        other = (known.sizes[numbers] != sizes) | (known.times[numbers] != times)
        must_commit = self.notes is None or self._assumed > 0
        noted = numbers[other], sizes[other], times[other]
        split.differences = Differences(split.gone, *noted, must_commit)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)
