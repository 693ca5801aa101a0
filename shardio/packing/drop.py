"""Drop records from a dataset: a list of their numbers beside the manifest hides them at once.

Shards are not touched, so dropping a few of very many costs one look at the index of each shard,
and one commit. Nothing of a reader's order, length, columns, exports or pages shows dropped records
then; an older version still does (versions.py). Erasing them also writes the shards that have them
anew, without their bytes (erase.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..dataset.decode import Decoder
from ..dataset.reader import Reader
from ..dataset.sequence import ShardSequence
from ..errors import (
    BusyError,
    DamageError,
    NotPackedError,
    OptionError,
    StorageError,
    printable,
)
from ..formats import manifest
from ..formats.erased import after_erasing
from ..formats.version import Numbers, history
from ..images.decode import pil_info
from ..names import key_text
from ..order.subset import All, conditions, mark_where
from ..storage import local
from ..storage.base import Location
from ..storage.local import LocalDirectory
from ..storage.options import Storage
from ..units import check_bool, check_int, show_count, show_size
from . import journal, output_dir
from .erase import Erasing, choose, erased_numbers
from .pack import resumable
from .place import Place, data_root, find_place
from .process_pool import Progress, Report, processes
from .verify import Damage, FoundDamage, find_damage
from .versions import changing, check_keys, commit, keys_text, version_lines, with_excluded


@dataclass
class Dropped:
    """The result of one call of `drop`; as str, a summary."""

    out: str
    records: int = 0  # that were dropped
    remaining: int = 0
    already: int = 0  # that are to be dropped, and were before
    missing: list[str] = field(default_factory=list)  # keys that no record has
    versions: dict[str, str] = field(default_factory=dict)  # the new ones, by split
    dry_run: bool = False
    erased: int = 0  # records whose bytes went, those that were dropped before included
    shards: int = 0  # that were written anew, without them
    others: int = 0  # older versions with shards of their own, where nothing was erased
    damages: list[Damage] = field(default_factory=list)  # with `damaged`: what was found
    unmended: int = 0  # of these, those that are of no record

    def __repr__(self) -> str:
        return f"<{self._summary()}>"

    def _summary(self) -> str:
        verb = "would be dropped" if self.dry_run else "dropped"
        records, left = (show_count(n, "record") for n in (self.records, self.remaining))
        return f"{printable(self.out, 4096)}: {records} {verb}, {left} left"

    def __str__(self) -> str:
        would = "would be " if self.dry_run else ""
        lines = [*map(str, self.damages), self._summary()]
        if self.unmended:
            lines.append(
                f"{show_count(self.unmended, 'damage')} of no record: restore the file from a "
                f"copy, or `shardio compact {printable(self.out, 4096)}` writes all anew"
            )
        if self.already:
            lines.append(f"{self.already:,} more were dropped before")
        if self.erased:
            shards = show_count(self.shards, "shard")
            records = show_count(self.erased, "record")
            lines.append(f"{records} {would}erased: {shards} {would}written anew without them")
        if self.missing:
            lines.append(f"no record has {keys_text(self.missing)}")
        lines += version_lines(self.versions)
        if self.erased and not self.dry_run:
            lines += [
                "older versions that show them cannot be read any more",
                f"`shardio gc {printable(self.out, 4096)} --keep 0s` removes the old files, which "
                "still have the bytes",
            ]
        if self.others and not self.dry_run:
            lines.append(
                f"{show_count(self.others, 'older version')} with other shards, as before a "
                "compaction, may still show them: `shardio gc "
                f"{printable(self.out, 4096)} --keep-versions 1 --keep 0s` removes these"
            )
        return "\n".join(lines)


def drop(
    path: str | os.PathLike[str],
    *,
    keys: Iterable[str | bytes] | None = None,
    where: Mapping[str, Any] | Iterable[str] | None = None,
    missing: str = "error",
    erase: bool = False,
    dry_run: bool = False,
    damaged: bool = False,
    max_pixels: int | None = None,
    jobs: int | None = None,
    storage: Storage | None = None,
    progress: Progress | None = None,
) -> Dropped:
    """Drop records from a dataset, or from all its splits: they are hidden from every reader.

    path     the directory of the dataset, or its URL
    keys     of the records; several records may have one key
    where    conditions on the index, as ShardDataset has them, or like "label=cat"
    missing  "error": a key that no record has, in any split, is refused, and nothing is dropped;
             "ignore": such keys are listed
    erase    also write the shards that have them anew, without their bytes, those of records that
             were dropped before included; no key of them is kept. Older versions that show them
             cannot be read any more, and `gc` removes the old files
    dry_run  say what would be dropped, and change nothing
    damaged  instead of keys: all records that `verify(decode=True)` finds damaged, and all of a
             shard that is gone, or cannot be opened. More than half of all are not dropped
    max_pixels  with `damaged`: of an image that is decoded, instead of the default limit
    jobs     with `damaged`: processes; default: one a core
    storage  a shardio.Storage: how an object store is reached; its `root`: where files of others
             are, when `shardio index --out` put their index elsewhere
    progress called now and then, while files are written anew, or checked for damage, with bytes
             done and bytes in all

    Without `erase` their bytes stay in the shards, and older versions have them. Raises
    OptionError, BusyError, NotPackedError, DamageError, StorageError; DependencyError where images
    are of a kind that nothing decodes here.
    """
    check_bool(dry_run=dry_run, erase=erase, damaged=damaged)
    if [keys is not None, where is not None, damaged].count(True) != 1:
        raise OptionError("drop: give keys, where or damaged, one of them")
    if (max_pixels, jobs) != (None, None) and not damaged:
        raise OptionError("drop: max_pixels and jobs go with damaged, which decodes all images")
    if missing not in ("error", "ignore"):
        raise OptionError(f"missing is {printable(repr(missing))}; expected 'error' or 'ignore'")
    top, data = find_place(path, storage), data_root(storage)
    wanted = None if keys is None else check_keys("keys", keys)
    chosen = where if isinstance(where, Mapping) or where is None else conditions(where)
    done = Dropped(top.url, dry_run=dry_run)
    looked = _find_damage(done, top, data, max_pixels, jobs, progress) if damaged else {}
    with resumable(), contextlib.ExitStack() as owners:
        work, seen, erased = list[_Work](), set[bytes](), 0
        for split, place in top.datasets().items():
            index = place.location
            before = manifest.load(index) if dry_run else owners.enter_context(changing(place))
            reader = Reader(index, before, root=data)
            old, gone = reader.dropped, erased_numbers(reader)
            # What is dropped is looked at again where its bytes are still to go.
            chooser = Reader(index, before, root=data, excluded=gone) if erase else reader
            if damaged:
                numbers = _still_damaged(looked[split], before, erase)
            elif wanted is None:
                numbers = _numbers_where(chooser, chosen or {})
            else:
                found = [*chooser.with_keys(wanted, dropped=True)]
                numbers = np.array([reader.starts[at] + one for at, one, _ in found], np.int64)
                seen |= {key for *_, key in found}
            fresh = np.setdiff1d(numbers, old)
            # A shard of which all is dropped then need not open: what it has is gone.
            after = Reader(index, before, root=data, excluded=np.union1d(old, fresh))
            erasing = choose(place, after, numbers) if erase else None
            done.already += len(numbers) - len(fresh)
            done.records += len(fresh)
            done.remaining += reader.records - len(fresh)
            done.erased += erasing.records if erasing else 0
            done.shards += len(erasing.numbers) if erasing else 0
            erased += len(gone)
            work.append(_Work(split, place, before, np.union1d(old, fresh), len(fresh), erasing))
        if damaged:
            _refuse_most(done)
        else:
            _check(done, wanted, seen, missing, where, erased)
        if not dry_run:
            _commit(done, work, progress)
    return done


class _Looked(NamedTuple):
    """A dataset that was checked, and what was found."""

    dataset: manifest.Manifest
    found: FoundDamage


def _find_damage(
    done: Dropped,
    top: Place,
    data: Location | None,
    max_pixels: int | None,
    jobs: int | None,
    progress: Progress | None,
) -> dict[str, _Looked]:
    """Check all splits, which nobody owns meanwhile. Raises as `find_damage` does."""
    pil_info()
    if max_pixels is not None:
        max_pixels = check_int("max_pixels", max_pixels, 1)
    how: dict[str, Any] = {"max_pixels": max_pixels, "jobs": processes(jobs)}
    places = {split: place.location for split, place in top.datasets().items()}
    datasets = {split: manifest.load(index) for split, index in places.items()}
    report, looked = Report(progress, sum(one.size for one in datasets.values())), {}
    for split, one in datasets.items():
        found = find_damage(places[split], one, data, report=report, **how)
        looked[split] = _Looked(one, found)
        done.damages += found.damages
        done.unmended += found.others
    return looked


def _still_damaged(looked: _Looked, now: manifest.Manifest, erase: bool) -> Numbers:
    """Return the numbers of damaged records in what is owned now.

    erase: also of those that were dropped before. Raises BusyError where they are of other records.
    """
    one, found = looked
    same = np.array_equal(now.shard_sha256[: one.shards], one.shard_sha256)
    if now.dataset_id != one.dataset_id or not same:
        raise BusyError(
            f"{one.where}: something else wrote its shards anew while they were checked. Nothing "
            "was dropped: run it again"
        )
    return np.union1d(found.numbers, found.hidden) if erase else found.numbers


def _refuse_most(done: Dropped) -> None:
    """Raise DamageError where more than half of all records would go: then it is something else."""
    if done.records > done.remaining:
        raise DamageError(
            f"{printable(done.out, 4096)}: {done.records:,} of {done.records + done.remaining:,} "
            "records are damaged, or their files are not there. Nothing was dropped, since it is "
            "more than half. `shardio verify --decode` lists what is wrong, such as "
            f"{done.damages[0]}. Restore the files from a copy, or pack the source again; "
            "--root DIR says where files are that lie elsewhere"
        )


class _Work(NamedTuple):
    """What is to be done to one dataset."""

    split: str
    place: Place
    before: manifest.Manifest
    excluded: Numbers  # of all records that will be dropped
    fresh: int  # how many of them were not
    erasing: Erasing | None


def _commit(done: Dropped, work: Sequence[_Work], progress: Progress | None) -> None:
    """Write what is to be written, of all splits, then commit each. Raises StorageError."""
    erasing = [one.erasing for one in work if one.erasing and one.erasing.records]
    total = sum(one.bytes for one in erasing)
    in_directory = all(isinstance(one.place.location, LocalDirectory) for one in erasing)
    if erasing and in_directory and total > (free := local.free_bytes(done.out)):
        raise StorageError(
            f"{printable(done.out, 4096)}: erasing writes {show_count(done.shards, 'shard')} anew, "
            f"which takes up to {show_size(total)}, and {show_size(free)} are free there. Nothing "
            "was changed. Make room, or erase fewer records at a time, with `shardio gc --keep 0s` "
            "in between"
        )
    report = Report(progress, total)
    written = [
        one.erasing.write(report) if one.erasing and one.erasing.records else one.before
        for one in work
    ]
    for one, new in zip(work, written, strict=True):
        changes = {"dropped": one.fresh, "erased": one.erasing.records if one.erasing else 0}
        if any(changes.values()):
            after, files = with_excluded(new, one.excluded)
            new_version = commit(one.place, one.before, after, "drop", changes, files)
            done.versions[one.split] = new_version.version_id
            if one.erasing and one.erasing.records:
                done.others += _with_other_shards(one.place, new_version)
                _drop_compaction(one.place, new_version)


def _with_other_shards(place: Place, newest: manifest.Manifest) -> int:
    """Count the versions that have shards which the newest has not, nor had before it erased."""
    own = {digest.tobytes() for digest in newest.shard_sha256}
    older = (after_erasing(one, newest) for one in history(place.location, newest))
    return sum(any(digest.tobytes() not in own for digest in one.shard_sha256) for one in older)


def _drop_compaction(place: Place, newest: manifest.Manifest) -> None:
    """Remove what an interrupted `compact` built: it has the records, and cannot go on now."""
    if not isinstance(place.location, LocalDirectory):
        return
    work = place.builds_in(None)
    with contextlib.suppress(FileNotFoundError, BusyError, NotPackedError, DamageError):
        with output_dir.own_unfinished(work) as owner:
            if journal.parse(owner.journal(), work).dataset_id != newest.dataset_id:
                owner.clean()
        output_dir.remove_working_directory(work, [""])


def _check(
    done: Dropped,
    wanted: set[bytes] | None,
    seen: set[bytes],
    missing: str,
    where: Any,
    erased: int,
) -> None:
    """Note the keys that no record has. Raises OptionError where nothing may be dropped."""
    done.missing = [key_text(key) for key in sorted((wanted or set()) - seen)]
    shown = printable(done.out, 4096)
    if done.missing and missing == "error":
        more = f" ({erased:,} records were erased here, of which no key is kept)" if erased else ""
        raise OptionError(
            f"{shown}: no record has {keys_text(done.missing)}{more}. Nothing was dropped. Correct "
            "them, or leave them out with --missing ignore"
        )
    if wanted is None and not done.records and not done.erased:
        texts = where
        if isinstance(where, Mapping):
            texts = {n: one.texts if isinstance(one, All) else one for n, one in where.items()}
        raise OptionError(f"{shown}: no record meets {printable(repr(texts))}")


def _numbers_where(reader: Reader, chosen: Mapping[str, Any]) -> Numbers:
    """Return the numbers of the records that meet conditions, of those that are not dropped."""
    decoder = Decoder(reader.manifest.schema, fields=None, decode=None, transform=None)
    rows = ShardSequence(reader, decoder, range(reader.records))
    marks = mark_where(chosen, rows.columns, reader.records, reader.manifest.classes)
    places: Numbers = np.flatnonzero(marks)
    return places if reader.remaining is None else reader.remaining.at(places)
