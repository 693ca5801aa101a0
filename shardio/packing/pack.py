"""Sources to shards to a manifest: parallel by shard, reproducible, resumable, atomic.

Each shard of the plan is one independent, idempotent piece of work: this process, N processes, or
the parts of a job array build the same bytes. A shard gets its name when it is whole and flushed;
the manifest is renamed into place after all of them, and until then nothing was packed. Of several
splits, all are built before the first is committed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import units as sizes
from .._version import __version__
from ..errors import (
    BusyError,
    DamageError,
    ExistsError,
    NotPackedError,
    OptionError,
    SourceChangedError,
    SourceError,
    StorageError,
    printable,
)
from ..formats import manifest
from ..formats.sample import Schema
from ..images import decode as image
from ..names import key_bytes, key_text
from ..order.subset import described
from ..storage import local, local_path, locate, lock
from ..storage.lock import JOURNAL, WRITER_MAGIC
from ..units import show_count
from . import build_shard as building
from . import journal, plan, sources
from . import output_dir as destination
from . import process_pool as parallel
from . import reencode as recoding
from .build_shard import Built, Task
from .journal import Problem
from .plan import Plan
from .reencode import Recoded, Recoding
from .shard_writer import check_packed
from .sources.field_names import fields_text

_FILES = frozenset(("imagefolder", "files"))  # sources whose bytes are packed as they are
_SCAN = "scan"  # names the list of what the listing leaves out, among those of shards

Path_ = str | bytes | os.PathLike[Any]


@dataclass
class Packed:
    """What one call of `pack` or `commit` did, for one dataset."""

    out: str
    split: str = ""
    source: str = "imagefolder"  # its kind
    fields: dict[str, str] = field(default_factory=dict)  # name and kind
    theirs: dict[str, str] = field(default_factory=dict)  # names of the source, where others
    shards: int = 0
    records: int = 0
    classes: int | None = None
    source_bytes: int = 0
    bytes: int = 0  # of the shards
    seconds: float = 0.0
    kept: int = 0  # shards that an earlier, interrupted packing had finished
    built: int = 0
    ignored: int = 0  # hidden files and the like
    notes: list[str] = field(default_factory=list)
    rejected: list[tuple[str, str]] = field(default_factory=list)  # key, reason
    full_size: int = 0  # images built at full size: --resize cannot write them anew
    enlarged: int = 0  # images that were smaller than the raw pixels of --resize
    pixels: tuple[int, int] | None = None  # height and width of raw pixels
    tiles: int | None = None  # images that are JPEG tiles; None: not asked for
    tiled: int = 0  # of these, rewritten by this call,
    tiled_from: int = 0  # from so many bytes
    tiled_to: int = 0  # to so many
    untiled: dict[str, int] = field(default_factory=dict)  # why others stayed as they were
    committed: bool = False
    already: bool = False  # it was packed before; nothing was touched
    checked: bool = False  # `commit` found all shards built, by parts
    unlocked: bool = False  # the file system has no locks
    dry_run: bool = False  # nothing was touched: what would be done

    def __repr__(self) -> str:
        out = f"; {len(self.rejected):,} left out" if self.rejected else ""
        return f"<{printable(self.out)}: {self._summary()}{out}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, skips: bool = True) -> str:
        """Say what was done, and what is to be noted. skips: of a dry run, as on_error says."""
        where = printable(self.out)
        lines = [self._summary()]
        if self.source != "imagefolder":
            lines.append(f"{self.source}: {fields_text(self.fields, self.theirs)}")
        if self.full_size:
            lines.append(
                f"not resized: {show_count(self.full_size, 'image')}, of several pages or pictures "
                "(animations, too), or of formats that are not written"
            )
        if self.tiles is not None and not self.dry_run:
            lines.append(self._tiles())
        if self.enlarged:
            lines.append(f"enlarged, since smaller: {show_count(self.enlarged, 'image')}")
        if self.ignored:
            lines.append(f"ignored: {show_count(self.ignored, 'hidden file')}")
        if self.rejected:
            fate = f"left out; see {journal.REJECTED}"
            if self.dry_run:
                fate = "would be left out" if skips else "cannot be packed, so nothing would be"
            lines.append(f"{show_count(len(self.rejected), 'file')} {fate}:")
        said = [f"{where}: {line}" for line in lines]
        said += [f"  {printable(key)}: {why}" for key, why in self.rejected[:10]]
        if len(self.rejected) > 10:
            said.append(f"  ... and {len(self.rejected) - 10:,} more")
        said += [f"{where}: {note}" for note in self.notes[:10]]
        if self.unlocked:
            said.append(f"{where}: this file system has no locks; do not pack here twice at once")
        return "\n".join(said)

    def _summary(self) -> str:
        labels = "no classes"
        if self.classes is not None:
            labels = show_count(self.classes, "class", "classes")
        unit = "file" if self.source == "imagefolder" else "record"
        what = f"{show_count(self.records, unit)}, {labels}, {sizes.show_size(self.source_bytes)}"
        if self.already:
            return (
                f"already packed: {what}, with the same keys, sizes and options (contents are not "
                "compared; --overwrite packs again)"
            )
        if self.dry_run:
            there = f"; {self.kept:,} of these are there, to be checked" if self.kept else ""
            return f"would pack {what} into {show_count(self.shards, 'shard')}{there}"
        resumed = self.kept and not self.checked
        kept = f", {self.kept:,} kept from before" if resumed else ""
        size = f", {sizes.show_size(self.bytes)}" if self.committed else " (not committed)"
        rate = self.source_bytes / max(self.seconds, 1e-9) / 1e6
        return (
            f"{what} -> {show_count(self.built + self.kept, 'shard')}{kept}{size}, in "
            f"{self.seconds:.1f} s, {rate:,.0f} MB/s"
        )

    def _tiles(self) -> str:
        """How many images are tiles, what this call did for it, and why others are none."""
        text = f"{self.tiles:,} of {self.records:,} images are JPEG tiles"
        if self.tiled:
            text += (
                f": {self.tiled:,} rewritten, {sizes.show_size(self.tiled_from)} -> "
                f"{sizes.show_size(self.tiled_to)} ({self.tiled_to / self.tiled_from - 1:+.1%})"
            )
        if self.untiled:
            reasons = sorted(self.untiled.items(), key=lambda found: (-found[1], found[0]))
            text += "; left as they were: " + ", ".join(f"{n:,} {why}" for why, n in reasons)
        return text

    def add(self, done: Recoded) -> None:
        """What was done to the images of one more shard."""
        self.full_size += done.full_size
        self.enlarged += done.enlarged
        if self.tiles is not None:
            self.tiles += done.tiles.images
        self.tiled += done.tiles.rewritten
        self.tiled_from += done.tiles.before
        self.tiled_to += done.tiles.after
        for why, count in done.tiles.others.items():
            self.untiled[why] = self.untiled.get(why, 0) + count


def pack(
    source: Path_,
    out: Path_,
    *,
    format: str = "record",
    shard_size: int | str | None = None,
    max_records: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    from_: str | None = None,
    root: Path_ | None = None,
    fields: Mapping[str, str] | None = None,
    where: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    part: tuple[int, int] | str | None = None,
    splits: bool | None = None,
    classes: Path_ | None = None,
    resize: int | None = None,
    quality: int | None = None,
    encode: str | None = None,
    jpeg_tiles: bool = False,
    keep_original: bool = False,
    max_pixels: int | None = None,
    overwrite: bool = False,
    restart: bool = False,
    on_error: str = "raise",
    dry_run: bool = False,
    progress: parallel.Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> list[Packed]:
    """Pack a folder of images, or another source, into OUT: one dataset, or one for each split.

    format         of the shards: "record" or "lmdb"
    shard_size     bytes of source a shard (of raw pixels, where these are packed), or like "64MB";
                   default 256 MiB, less where that gave under 16 shards
    max_records    records a shard, at most
    shuffle, seed  pack in an order shuffled by `seed`, so that neighbours on disk are unrelated;
                   default: but for sources that are read slowly in any order but their own
    from_          the kind of source, where it cannot be told: see docs/sources.md
    root           the folder that the paths of a listing are relative to, or that holds the data
                   of an index
    fields         our names of fields, and the source's: {"image": "jpg"}; of folders side by side
                   {"image": "images/", "mask": "masks/"}
    where          only records that meet conditions on their small fields: {"label": ["cat"]}
    jobs           processes; default: one a core
    part           (i, n) or "i/n", i from 1 to n: build only this part; `commit(out)` when all are
                   built
    splits         whether top folders are splits; default: when all have names of splits
    classes        another dataset, whose numbering of classes is taken
    resize         shrink images to this short side (pixels), at `quality` (default 90); never
                   enlarges
    encode         "raw": images as pixels, which need no decoding; all of one size, or with
                   `resize` the central square of that side, of which all are made
    jpeg_tiles     rewrite JPEGs, without loss, so that a crop decodes only its part of them;
                   images that this cannot be done to stay as they are (docs/jpeg-tiles.md)
    keep_original  with `jpeg_tiles`: the files' own bytes, too, in the field `original`, so that
                   `unpack` gives these back
    max_pixels     of an image that is decoded for any of these, instead of the default limit
    overwrite      commit over another dataset in OUT; its shards stay until `gc`
    restart        drop an unfinished packing in OUT
    on_error       "raise": one SourceError lists all files that cannot be packed, and nothing is
                   committed; "skip": they are left out, and OUT/rejected.jsonl lists them
    dry_run        touch nothing; raise what a real run would raise before it builds
    progress       called now and then with bytes done and bytes in all
    announce       called with lines that are to be shown before the work begins: the size of raw
                   pixels

    Run again after an interruption, it goes on where it was. Raises OptionError, SourceError,
    SourceChangedError, BusyError, ExistsError, StorageError.
    """
    check_packed(format)
    jobs = parallel.processes(jobs)
    if fields is not None and not (
        isinstance(fields, Mapping) and all(isinstance(one, str) for one in fields.values())
    ):
        raise OptionError(
            f"fields is {printable(repr(fields))}: expected our names and the source's, such as "
            "{'image': 'jpg'}"
        )
    source, out = os.fsencode(local_path(source)), local_path(out)
    asked = sources.detect_kind(
        sources.SourceRequest(
            path=source,
            kind=from_,
            splits=_splits(splits),
            fields=dict(fields or {}),
            where=where,
            root=None if root is None else local_path(root),
            jobs=jobs,
            progress=progress,
        )
    )
    wanted = plan.options(
        source=asked.kind or "imagefolder",
        shard_size=shard_size,
        max_records=max_records,
        shuffle=shuffle,
        seed=seed,
        extra=recoding.options(
            resize=resize,
            quality=quality,
            encode=encode,
            jpeg_tiles=jpeg_tiles,
            keep_original=keep_original,
            max_pixels=max_pixels,
        ),
    )
    if format != "record":  # which datasets had before there was another
        wanted["format"] = format
    if isinstance(where, Mapping):
        wanted["where"] = described(where)
    chosen = plan.part(part)
    if on_error not in ("raise", "skip"):
        raise OptionError(f"on_error is {on_error!r}; expected 'raise' or 'skip'")
    recoding.check_tools(wanted)
    names = sources.split_names(asked)
    destination.check(out, source, names)
    folders = {name: manifest.split_folder(out, name) for name in names}
    for name, folder in folders.items():
        lock.refuse_if_busy(folder, part=chosen is not None)
        if not overwrite:
            destination.refuse_other(folder, wanted | _of_split(name, names))
    numbering = None if classes is None else manifest.classes_of(local_path(classes))
    listings = sources.list_records(asked)
    if numbering is not None:
        listings = {
            name: listing if listing.classes is None else sources.renumber(listing, numbering)
            for name, listing in listings.items()
        }
        if all(listing.classes is None for listing in listings.values()):
            sources.renumber(next(iter(listings.values())), numbering)
    recoding.check_fields(listings, wanted)
    if list(listings) != names:
        raise SourceChangedError(f"{printable(source)}: its top folders changed just now")
    listings = {
        name: recoding.with_originals(listing, asked, name, keep_original)
        for name, listing in listings.items()
    }
    packings = []
    for name, listing in listings.items():
        options, each = wanted | _of_split(name, names), None
        if encode is not None:
            height, width = recoding.size(listing, wanted)
            options["pixels"] = [height, width]
            each = len(image.ppm_header(height, width)) + 3 * height * width
        made = plan.make(listing, options, each)
        packings.append(_Packing(made, folders[name], listing.source, chosen))
    for packing in packings:
        # All of them, before any is touched.
        packing.check(overwrite, () if shard_size else ("shard_size",))
        if on_error == "skip" and not packing.result.already:
            packing.refuse_rejected()
    local.refuse_if_full(out, sum(packing.least_bytes() for packing in packings))
    if announce is not None:
        for packing in packings:
            if packing.result.pixels is not None and not packing.result.already:
                announce(packing.announced())
    if dry_run:
        return [packing.dry_run(restart) for packing in packings]
    total = sum(int(packing.plan.sizes.sum()) for packing in packings)
    report = parallel.Report(progress, total)
    problems: list[Problem] = []
    with _resumable(), contextlib.ExitStack() as locks:
        for packing in packings:
            found = packing.build(
                locks,
                jobs=jobs,
                overwrite=overwrite,
                restart=restart,
                skip=on_error == "skip",
                report=report,
            )
            result = packing.result
            split = "" if result.source == "trees" else result.split  # whose problems name it
            problems += [(_under(split, key), why) for key, why in found]
        if problems:
            raise SourceError(_explain(problems, os.fsdecode(source)))
        if chosen is None:
            for packing in packings:
                packing.finish()
            if names != [""]:
                destination.commit_splits(out, names)
    return [packing.result for packing in packings]


def commit(
    out: Path_,
    *,
    jobs: int | None = None,
    overwrite: bool = False,
    progress: parallel.Progress | None = None,
) -> list[Packed]:
    """Commit what the parts of a packing built: check every shard, then write the manifest.

    Raises NotPackedError when shards are missing (naming the parts to run), and as `pack` does.
    """
    jobs = parallel.processes(jobs)
    out = local_path(out)
    splits: list[str] = []
    if not os.path.lexists(os.path.join(out, JOURNAL)):
        splits = manifest.planned_splits(out)
    packings = []
    with _resumable(), contextlib.ExitStack() as locks:
        for folder in [manifest.split_folder(out, name) for name in splits] or [out]:
            try:
                held = locks.enter_context(lock.whole(folder))
            except FileNotFoundError:
                manifest.load(locate(folder))  # explains what is here, if it is nothing
                continue
            packings.append(_Packing(_plan_of_parts(held, folder), folder, None, None, held))
        if not packings and (not splits or destination.has_splits(out, splits)):
            raise NotPackedError(f"{printable(out)}: already packed; there is nothing to commit")
        report = parallel.Report(progress, sum(int(one.plan.sizes.sum()) for one in packings))
        missing = [
            why for one in packings if (why := one.check_parts(jobs, overwrite, report)) is not None
        ]
        if missing:
            raise NotPackedError(
                "\n".join(missing)
                + "\nNothing was committed. Run the parts that build them, then `shardio commit` "
                "again"
            )
        for packing in packings:
            packing.finish()
        if splits:
            destination.commit_splits(out, splits)
    return [packing.result for packing in packings]


class _Packing:
    """One dataset on its way into one directory: `check`, `build`, then `finish`.

    `part` None: all shards. After `build`, or `check_parts`, it stays locked by `held` until
    `finish`, so that several splits are committed together.
    """

    def __init__(
        self,
        made: Plan,
        directory: str,
        source: sources.Source | None,
        part: tuple[int, int] | None,
        held: lock.Lock | None = None,
    ) -> None:
        self.plan, self.directory, self._source = made, directory, source
        self.dataset_id = made.dataset_id
        self.token = local.token()
        header = made.header
        self._recoding = Recoding.of(header["options"])
        Schema(header["fields"])  # too many, or what cannot be one: refused before all is locked
        self._part, self._held = part, held
        self._start, self._stop = plan.share(made.shards, part)
        first, last = int(made.bounds[self._start]), int(made.bounds[self._stop])
        self.result = Packed(
            out=directory,
            split=header["options"].get("split", ""),
            source=header["options"]["source"],
            fields=dict(header["fields"]),
            theirs=dict(header["options"].get("fields", {})),
            shards=made.shards,
            records=last - first,
            classes=None if header["classes"] is None else len(header["classes"]),
            source_bytes=int(made.sizes[first:last].sum()),
            ignored=header["ignored"],
            notes=list(header["notes"]),
            pixels=self._recoding.pixels,
            tiles=0 if self._recoding.jpeg_tiles else None,
        )
        self._seal = b""  # SHA-256 of the journal, if we made it
        self._built: list[Built] = []
        self._problems: list[Problem] = []
        self._started = time.monotonic()
        # Whether nothing of ours is here, so that a list of rejected keys is none of ours either.
        self._empty = not any(
            os.path.lexists(os.path.join(directory, name)) for name in (JOURNAL, manifest.MANIFEST)
        )

    def refuse_rejected(self) -> None:
        """Raise ExistsError where the list of what is left out would replace a user's own file."""
        if self._empty and journal.has_rejected(self.directory):
            raise ExistsError(
                f"{printable(self.directory)}: {journal.REJECTED} lies here, and nothing is packed "
                "here that it could be of; move it away, or choose another directory"
            )
        journal.refuse_rejected(self.directory)

    def check(self, overwrite: bool, by_default: Sequence[str]) -> None:
        """Raises ExistsError when another dataset is here; by_default: options not given."""
        self.result.already = self._is_packed(overwrite, by_default)

    def least_bytes(self) -> int:
        """The bytes that `build` will surely write, as far as that is known before."""
        if self.result.already:
            return 0
        if self._recoding.pixels is not None:
            height, width = self._recoding.pixels
            needed = self.result.records * 3 * height * width
        elif self._recoding.resize is not None or self.result.source not in _FILES:
            return 0
        else:
            needed = self.result.source_bytes
            if self._recoding.jpeg_tiles:  # the smallest that tiles were seen to be: 0.92
                needed = needed * 9 // 10
        if os.path.lexists(os.path.join(self.directory, JOURNAL)):  # what is there may be kept
            for name in journal.shards_in(self.directory):
                with contextlib.suppress(OSError):
                    needed -= os.path.getsize(os.path.join(self.directory, name))
        return max(0, needed)

    def announced(self) -> str:
        """How large raw pixels will be, of all parts, for who may want to think again."""
        assert self.result.pixels is not None
        (height, width), count = self.result.pixels, len(self.plan.keys)
        split = f"{self.result.split}: " if self.result.split else ""
        return (
            f"{split}raw pixels: {count:,} images of {width} x {height}, "
            f"{sizes.show_size(count * 3 * height * width)} (the source has "
            f"{sizes.show_size(int(self.plan.sizes.sum()))})"
        )

    def dry_run(self, restart: bool) -> Packed:
        """What `build` would find. Raises what it would raise for what lies in the directory."""
        self.result.dry_run = True
        self.result.rejected = _shown(self.plan.problems)
        self.result.tiles = None  # nobody has looked
        if self.result.already:
            return self.result
        with contextlib.suppress(FileNotFoundError):
            planned = self._planned(lock.read(self.directory), restart)
            if planned is not None and not (restart and self._part is None):
                self.plan = dataclasses.replace(self.plan, before=planned.before)
                self.result.kept = len(
                    self._finished().keys() & set(range(self._start, self._stop))
                )
        return self.result

    def build(
        self,
        locks: contextlib.ExitStack,
        *,
        jobs: int,
        overwrite: bool,
        restart: bool,
        skip: bool,
        report: parallel.Report,
    ) -> list[Problem]:
        """Lock the shards, as long as `locks` says, and build them; what cannot be packed."""
        self._started = time.monotonic()
        if self._is_packed(overwrite):
            return self._leave(skip)
        local.make_directory(self.directory)
        whole = self._part is None
        held, planned = self._acquire((0, None) if whole else (self._start, self._stop), restart)
        locks.callback(held.release)
        try:
            faster = planned is None and self._is_packed(overwrite)  # another packer was
        except ExistsError:
            self._take_back(held)
            raise
        if faster:
            held.release()
            return self._leave(skip)
        self._held = held
        self.result.already = False  # whatever `check` saw
        self.result.unlocked = held.held is None
        if whole and planned is not None:
            journal.remove_temporaries(self.directory)  # of packers that died
        problems = list(self.plan.problems)
        if (
            not whole
            and (skip or not problems)
            and (problems or (planned is not None and planned.problems))
        ):
            journal.write_rejected_part(self.directory, _SCAN, problems)
        self._build(jobs, skip, planned is not None, report, build=True)
        return self._sum_up(problems, skip)

    def check_parts(self, jobs: int, overwrite: bool, report: parallel.Report) -> str | None:
        """Check the shards that parts built; which are missing, in words, if any are.

        Raises ExistsError, SourceError.
        """
        assert self._held is not None
        self.result.checked = True
        data = self._held.read()
        self.result.unlocked = self._held.held is None
        if journal.is_committed(self.directory, data):  # and killed before it had cleaned up
            self.result.already = True
            self._show_committed()
            return None
        if self._is_packed(overwrite):
            raise ExistsError(
                f"{printable(self.directory)}: a dataset is packed here, of the same keys and "
                "sizes as the new one. Replace it with `shardio commit --overwrite`"
            )
        problems = journal.load_rejected_part(self.directory, _SCAN)
        if problems is None and self.plan.problems:
            raise SourceError(_explain(self.plan.problems, self.directory, "the parts"))
        self._build(jobs, True, True, report, build=False)
        missing = [number for number, one in enumerate(self._built) if one.info is None]
        self._sum_up(problems or [], True)
        if not missing:
            return None
        shown = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
        return (
            f"{printable(self.directory)}: not packed: {len(missing)} of {self.plan.shards} shards "
            f"are not built: {shown}"
        )

    def finish(self) -> None:
        """The commit: the manifest into place; before it nothing was packed, after it all was."""
        if self._held is None:  # it was packed before
            return
        data = self._held.read()
        if not self.result.already:
            self._commit()
        journal.clean(self.directory, data)
        self._held.release()

    def _is_packed(self, overwrite: bool, by_default: Sequence[str] = ()) -> bool:
        """Whether just this dataset is committed here. Raises ExistsError when another one is."""
        return not overwrite and destination.is_packed(
            self.directory, self.dataset_id, self.plan.header["options"], by_default
        )

    def _leave(self, skip: bool) -> list[Problem]:
        """What is committed here is what was asked for: say so, and clean up what a kill left."""
        self.result.already = True
        problems = self.plan.problems
        if problems and not skip:
            return problems
        self._show_committed()
        self.result.rejected = sorted({*self.result.rejected, *_shown(problems)})
        with (
            contextlib.suppress(FileNotFoundError, BusyError, StorageError),
            lock.whole(self.directory) as held,
        ):
            data = held.read()
            ours = data[-32:] == self._seal  # made, while another packer committed
            if ours or journal.is_committed(self.directory, data):
                journal.clean(self.directory, data)
        return []

    def _take_back(self, held: lock.Lock) -> None:
        """Remove the journal that we made, a moment after another dataset was committed here."""
        held.release()
        with (
            contextlib.suppress(FileNotFoundError, BusyError, StorageError),
            lock.whole(self.directory) as whole,
        ):
            data = whole.read()
            # Parts of this packing may have joined it; what they have built is theirs.
            if data[-32:] == self._seal and not journal.has_work(self.directory, data):
                journal.clean(self.directory, data)

    def _show_committed(self) -> None:
        made = manifest.load(locate(self.directory))
        self.result.records, self.result.bytes = made.records, made.size
        self.result.tiles = made.options.get("tiles")
        self.result.rejected = _shown(journal.load_rejected(self.directory))

    def _acquire(
        self, bounds: tuple[int, int | None], restart: bool
    ) -> tuple[lock.Lock, Plan | None]:
        """Lock these shards of the journal; the plan found in it, or None when we made it."""
        made = False
        while True:
            try:
                held = lock.take(self.directory, *bounds)
            except FileNotFoundError:
                restart = False
                before = journal.shards_in(self.directory)
                fresh = dataclasses.replace(self.plan, before=before).dump()
                # Where another was first, its plan is compared with ours.
                if lock.begin(self.directory, fresh):
                    made, self._seal = True, fresh[-32:]
                continue
            try:
                planned = self._planned(held.read(), restart)
                # A part goes on under an equal plan: another part has restarted it a moment ago.
                if planned is None or (restart and bounds == (0, None)):
                    held.release()
                    self._drop()
                    continue
                self.plan = dataclasses.replace(self.plan, before=planned.before)
                return held, None if made else planned
            except BaseException:
                held.release()
                raise

    def _planned(self, data: bytes, restart: bool) -> Plan | None:
        """The plan of an unfinished packing, if it is this one; None when it is to be dropped.

        Raises SourceChangedError when it is another, DamageError, unless `restart`.
        """
        if data.startswith(WRITER_MAGIC) or journal.is_committed(self.directory, data):
            return None  # of a Writer that died: nobody can resume it; or finished, but for this
        try:
            old = plan.parse(data, os.path.join(self.directory, JOURNAL))
        except DamageError:
            if restart:
                return None
            raise
        if old.same(self.plan):
            return old
        # Of one that was killed before its first shard nothing is lost. Parts run at once, and must
        # agree: they are told.
        if restart or (self._part is None and not journal.has_work(self.directory, data)):
            return None
        raise SourceChangedError(
            f"{printable(self.directory)}: an unfinished packing is here, of another plan:\n"
            f"{plan.difference(old, self.plan)}\n"
            "Undo the change and run it again to resume, or drop the unfinished packing with "
            "--restart"
        )

    def _drop(self) -> None:
        """Remove an unfinished packing: the shards only it names, its temporary files, its plan."""
        with contextlib.suppress(FileNotFoundError), lock.whole(self.directory) as held:
            journal.clean(self.directory, held.read())

    def _build(
        self, jobs: int, skip: bool, resumed: bool, report: parallel.Report, *, build: bool
    ) -> None:
        numbers = range(self._start, self._stop)
        finished = self._finished() if resumed else {}
        tasks = (self._task(number, skip, finished.get(number, []), build) for number in numbers)
        try:
            # Inherited by workers, never pickled.
            work = functools.partial(building.build_or_keep, self._source)
            for one in parallel.run(work, tasks, jobs=min(jobs, len(numbers)), report=report):
                self._built.append(one)
                self.result.kept += one.kept
                self.result.built += one.info is not None and not one.kept
                self.result.add(one.recoded)
        except BaseException:
            journal.remove_temporaries(self.directory, self.token)  # of workers that were killed
            raise

    def _sum_up(self, problems: list[Problem], skip: bool) -> list[Problem]:
        """Note what is left out, or return it where nothing may be."""
        problems = problems + [entry for one in self._built for entry in one.problems]
        if problems and not skip:
            return problems
        self._problems = sorted(problems)
        self.result.rejected = _shown(self._problems)
        self.result.seconds = time.monotonic() - self._started
        return []

    def _task(self, number: int, skip: bool, finished: list[str], build: bool) -> Task:
        start, stop = (int(bound) for bound in self.plan.bounds[number : number + 2])
        return Task(
            number=number,
            directory=self.directory,
            token=self.token,
            dataset_id=self.dataset_id,
            fields=tuple((name, kind) for name, kind in self.plan.header["fields"]),
            keys=self.plan.keys[start:stop],
            sizes=self.plan.sizes[start:stop].tolist(),
            places=[] if self.plan.places is None else self.plan.places[start:stop].tolist(),
            recoding=self._recoding,
            format=_format(self.plan.header["options"]),
            skip=skip,
            finished=finished,
            build=build,
        )

    def _finished(self) -> dict[int, list[str]]:
        """Files that may be shards of this packing, by number."""
        found: dict[int, list[str]] = {}
        for name, born in journal.shards_in(self.directory).items():
            if self.plan.before.get(name) != born:
                found.setdefault(journal.shard_number(name) or 0, []).append(name)
        return found

    def _commit(self) -> None:
        infos = [one.info for one in self._built if one.info is not None]
        header = self.plan.header
        options = header["options"]
        if self.result.tiles is not None:  # known only now: no part of the plan, nor of the id
            options = options | {"tiles": self.result.tiles}
        made = manifest.make(
            infos,
            dataset_id=self.dataset_id,
            format=_format(options),
            schema=Schema(header["fields"]),
            classes=None if header["classes"] is None else tuple(header["classes"]),
            options=options,
            library=__version__,
            blob_bytes=sum(one.blob_bytes for one in self._built),
        )
        if self._problems:
            self.refuse_rejected()
            journal.write_rejected(self.directory, self._problems)
        elif not self._empty:
            journal.remove_rejected(self.directory)  # of the dataset that is replaced
        local.write_file(self.directory, manifest.MANIFEST, made.dump())
        self.result.records, self.result.bytes = made.records, made.size
        self.result.committed = True


def _format(options: dict[str, Any]) -> str:
    return str(options.get("format", "record"))


# --- checks ---------------------------------------------------------------------------------------


def _splits(splits: Any) -> bool | None:
    """Raises OptionError."""
    if splits is None or splits in (True, False):
        return None if splits is None else bool(splits)
    raise OptionError(f"splits is {splits!r}; expected True, False or None")


def _of_split(name: str, names: Sequence[str]) -> dict[str, Any]:
    """What the options of a dataset say of the splits it is one of."""
    return {"split": name, "splits": list(names)} if name else {}


def _plan_of_parts(held: lock.Lock, folder: str) -> Plan:
    data = held.read()
    if data.startswith(WRITER_MAGIC):
        raise NotPackedError(
            f"{printable(folder)}: not packed: a Writer ended here before its stream did; write "
            "it again"
        )
    return plan.parse(data, os.path.join(folder, JOURNAL))


def _shown(problems: Sequence[Problem]) -> list[tuple[str, str]]:
    """Return problems as users get them."""
    return [(key_text(key), why) for key, why in problems]


def _under(split: str, key: bytes) -> bytes:
    return key_bytes(split) + b"/" + key if split else key


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
    """Say of a disk that is full that what was written to it is not lost."""
    try:
        yield
    except StorageError as error:
        if not local.is_full(error):
            raise
        raise StorageError(
            f"{error}\nWhat is finished is kept: make room, then run the same command again, and "
            "it goes on where it was"
        ) from error


def _explain(problems: Sequence[Problem], source: str, what: str = "the same command") -> str:
    one_size = any(why.endswith(recoding.ONE_SIZE) for _, why in problems)
    return (
        f"{printable(source)}: {show_count(len(problems), 'file')} cannot be packed, so nothing "
        "was committed:\n"
        f"{sources.listed(sorted(problems))}\n"
        f"Run {what} again, with\n"
        "  --on-error skip        to leave them out; what is finished is kept\n"
        + ("  --restart --resize N   to make all images squares of N x N\n" if one_size else "")
        + "  --restart              once you have mended or removed them, to pack anew"
    )
