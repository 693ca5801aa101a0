"""Update a packed dataset to what its source is now: what is new, changed and gone.

How it works. Keys tell what is new, and what is gone. Of a key that both have, the contents are
compared, unless the size and time of its file are those that an earlier `update` noted in a file
beside the manifest (formats/version.py). What changed is packed anew, and its old record dropped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
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
from ..units import check_bool, refuse_options, show_count, show_size
from .grow import Call, Growth, Split, grow, grown_lines
from .options import ADVICE, PackOptions, PathLike, SourceOptions
from .parts import Announce
from .process_pool import Progress
from .sources.base import Rejected
from .versions import version_lines

_PLAIN = ("imagefolder", "files")  # sources whose records are files, and nothing else
_CHOICES = (None, "drop", "keep")


@dataclass
class Updated:
    """The result of one call of `update`; as str, a summary."""

    out: str
    new: int = 0  # records
    changed: int = 0
    gone: int = 0  # from the source: dropped, unless they are to be kept
    unchanged: int = 0
    compared: int = 0  # of these, those whose contents were read
    shards: int = 0  # new ones
    bytes: int = 0  # of these
    seconds: float = 0.0
    classes: list[str] = field(default_factory=list)  # new ones
    rejected: list[tuple[str, str]] = field(default_factory=list)  # key, reason
    versions: dict[str, str] = field(default_factory=dict)  # the new ones, by split
    kept: bool = False  # what is gone from the source stays
    dry_run: bool = False

    def __repr__(self) -> str:
        return f"<{str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        took = "" if self.dry_run else f", in {self.seconds:.1f} s"
        gone = f"{self.gone:,} gone{', which stay' if self.kept and self.gone else ''}"
        lines = [
            f"{printable(self.out, 4096)}: {self.new:,} new, {self.changed:,} changed, {gone}, "
            f"{self.unchanged:,} as they were{took}"
        ]
        if self.compared:
            lines.append(f"the contents of {self.compared:,} were compared")
        if self.shards:
            lines.append(f"{show_count(self.shards, 'new shard')}, {show_size(self.bytes)}")
        lines += grown_lines(self.classes, self.rejected)
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
    gone: str | None = None,
    read: SourceOptions | None = None,
    jobs: int | None = None,
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
    gone      what becomes of records that the source has not: "drop", or "keep". Default: they are
              dropped, but where these are more than half of all, nothing is done
    read, jobs, on_error, restart, to, work_dir, progress, announce    as of `append`
    dry_run   say what is new, changed and gone, and change nothing

    The first time, and where the source is no folder or archive of images alone, contents are
    compared: both are read. Where packing changed the images (`resize`, `encode`, `jpeg_tiles`
    without `keep_original`), this cannot be done. Raises as `append` does.
    """
    began = time.monotonic()
    check_bool(checksum=checksum, dry_run=dry_run, restart=restart)
    if gone not in _CHOICES:
        raise OptionError(f"gone is {printable(repr(gone))}; expected 'drop' or 'keep'")
    call = Call(read, jobs, on_error, restart, dry_run, progress, announce, to, work_dir)
    growth = grow(source, out, call)
    done = Updated(growth.folder, classes=growth.new_classes, kept=gone == "keep", dry_run=dry_run)
    found = {one.name: _Found(one, growth, checksum) for one in growth.work if one.listing}
    for each in found.values():
        each.compare(done)
        done.new += len(each.new)
        done.changed += len(each.changed)
        done.gone += len(each.gone)
    known = done.gone + done.changed + done.unchanged
    if gone is None and 2 * done.gone > known:
        raise OptionError(
            f"{printable(growth.folder)}: {done.gone:,} of its {known:,} records are not in "
            f"{growth.request.shown}: expected all of the source. If they are to go, say so: "
            "--gone drop; or --gone keep. Nothing was changed"
        )
    for each in found.values():
        each.choose(keep=gone == "keep")
    if not dry_run:
        committed = growth.build_and_commit(
            "update", lambda one, added: found[one.name].changes(added), partial(_noted, found)
        )
        done.shards, done.bytes = committed.shards, committed.bytes
        done.rejected, done.versions = committed.rejected, committed.versions
    done.seconds = time.monotonic() - began
    return done


class _Found:
    """What differs between a dataset and the records that its source lists."""

    def __init__(self, split: Split, growth: Growth, checksum: bool) -> None:
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
        plain = growth.request.kind in _PLAIN and not (joins.tables or joins.boxes)
        self._trusts = plain and not checksum and self.notes is not None
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
        self.gone = [*map(self._reader.number, places.values())]
        self.changed: list[tuple[int, int]] = []  # places in the listing, and numbers
        self.same: list[tuple[int, int]] = []

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
        unsure = []
        for place, row in self._both:
            number = self._reader.number(row)
            size, changed_ns = (-1, 0) if self.notes is None else self.notes.of(number)
            if self._trusts and times[place] and (size, changed_ns) == (sizes[place], times[place]):
                self.same.append((place, number))
            elif self._trusts and size not in (-1, sizes[place]):
                self.changed.append((place, number))
            else:
                unsure.append((place, row, number))
        if unsure:
            self._refuse_reencoded(unsure[0][0])
        done.compared += len(unsure)
        for place, number, same in self._read_both(unsure):
            (self.same if same else self.changed).append((place, number))
        done.unchanged += len(self.same)

    def _refuse_reencoded(self, place: int) -> None:
        """Raise OptionError where contents cannot be compared with what packing made of them."""
        options = PackOptions.of(self.split.base.options)
        raw = options.encode is not None and options.source != "arrays"
        if options.resize is not None or raw or (options.jpeg_tiles and not options.keep_original):
            raise OptionError(
                f"{printable(self.split.folder)}: packing changed the images, so files such as "
                f"{printable(self.listing.keys[place])} cannot be compared with them. Append what "
                "is new: `shardio append --on-duplicate skip`; what changed: `--on-duplicate "
                "replace`, from a folder of these files; and drop what is gone: `shardio drop`"
            )

    def _read_both(self, pairs: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, bool]]:
        """Yield places, numbers, and whether the source has what the dataset has."""
        places = self.listing.own_places
        progress = self._growth.call.progress
        total, read_bytes = int(self.listing.sizes.sum()), 0
        pairs = sorted(pairs, key=lambda pair: int(places[pair[0]]))
        with self.listing.source.open() as read:
            for place, row, number in pairs:
                try:
                    same = self._is_same(read(int(places[place])), self._records[row])
                except Rejected:
                    same = False  # and packing it will say why it cannot be packed
                yield place, number, same
                read_bytes += int(self.listing.sizes[place])
                if progress is not None:
                    progress(read_bytes, total)

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
        going = [number for _, number in self.changed] + ([] if keep else self.gone)
        split.gone = np.array(sorted(going), np.int64)
        split.must_commit = self.notes is None

    def changes(self, added: int) -> dict[str, int]:
        """Return the counts of a commit that added so many records."""
        going = len(self.split.gone)
        return {"added": added, "replaced": len(self.changed), "dropped": going - len(self.changed)}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def _noted(found: dict[str, _Found], one: Split, records: int) -> SourceNotes | None:
    """Return the sizes and times of the files of all records, of so many, as they are now."""
    each = found.get(one.name)
    if each is None:
        return None
    notes = (each.notes or SourceNotes(NONE, NONE)).grown(records)
    listing = each.listing
    for place, number in each.same:
        notes.put(number, int(listing.sizes[place]), int(listing.mtimes[place]))
    number = each.split.base.stored_records
    rejected = {key for key, _ in one.job.problems} if one.job is not None else set()
    for shard in range(one.job.plan.shards if one.job is not None else 0):
        assert one.job is not None
        keys, sizes, times, *_ = one.job.plan.rows(shard)
        for key, size, changed_ns in zip(keys, sizes.tolist(), times.tolist(), strict=True):
            if key not in rejected:
                notes.put(number, size, changed_ns)
                number += 1
    return notes
