"""Append records to a packed dataset: what is new in a source, by its keys (grow.py)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from ..dataset.reader import Reader
from ..errors import OptionError, printable
from ..names import key_text
from ..storage.options import Storage
from ..units import check_bool, refuse_options, show_count, show_size
from .grow import Call, Split, grow, grown_lines, some
from .options import ADVICE, PathLike, SourceOptions
from .parts import Announce
from .process_pool import Progress
from .versions import version_lines

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
        lines += grown_lines(self.classes, self.rejected)
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
                  that is there stays; "replace": it is dropped, and the new one appended
    read          what of the source is packed, and under which names: shardio.SourceOptions
    jobs          processes; default: one for each core
    on_error      "raise": one SourceError lists all files that cannot be packed, and nothing is
                  appended; "skip": they are left out, and OUT/rejected.jsonl lists them
    restart       drop an unfinished `append` of another source
    dry_run       say what would be appended, and change nothing
    to            a shardio.Storage: how the store of OUT is reached; default: as the source, if
                  that has the same scheme, or is no URL
    work_dir      if OUT is a URL: the directory where shards are built before they are uploaded;
                  default: one in ~/.cache/shardio. Give the same one to resume
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
    call = Call(read, jobs, on_error, restart, dry_run, progress, announce, to, work_dir)
    growth = grow(source, out, call)
    done = Appended(growth.folder, classes=growth.new_classes, dry_run=dry_run)
    alike = list[bytes]()
    for one in growth.work:
        if one.listing is not None:
            alike += _leave_out_alike(one, on_duplicate)
            done.added += len(one.listing.keys)
            done.replaced += len(one.gone)
    if alike and on_duplicate == "error":
        raise OptionError(
            f"{printable(growth.folder)}: it has {show_count(len(alike), 'record')} of the source "
            f"already, by the keys {some([*map(key_text, alike)])}. Nothing was appended. Choose "
            "what becomes of them: --on-duplicate skip or replace"
        )
    done.skipped = len(alike)
    if not dry_run:
        committed = growth.build_and_commit("append", _changes)
        done = replace(done, **vars(committed))
    done.seconds = time.monotonic() - began
    return done


def _changes(one: Split, added: int) -> dict[str, int]:
    return {"added": added, "replaced": len(one.gone)}


def _leave_out_alike(one: Split, on_duplicate: str) -> list[bytes]:
    """Leave out of the listing of a split what the dataset has, or note what is replaced.

    Returns the keys that are left out.
    """
    assert one.listing is not None
    reader = Reader(one.place.location, one.base)
    alike = [*reader.with_keys(set(one.listing.keys))]
    if on_duplicate == "replace":
        one.gone = np.array([reader.starts[at] + record for at, record, _ in alike], np.int64)
        return []
    found = {key for *_, key in alike}
    fresh = [at for at, key in enumerate(one.listing.keys) if key not in found]
    one.listing = one.listing.take(np.array(fresh, np.int64))
    return sorted(found)
