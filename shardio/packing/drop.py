"""Drop records from a dataset: a list of their numbers beside the manifest hides them at once.

Shards are not touched, so dropping a few of very many costs one look at the index of each shard,
and one commit. Nothing of a reader's order, length, columns, exports or pages shows dropped records
then; an older version still does (versions.py). Erasing them also writes the shards that have them
anew, without their bytes (erase.py), and leaves none of them in what lies beside: unfinished work
(unfinished.py), lists of what packing left out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..dataset.decode import Decoder
from ..dataset.reader import DroppedShard, Reader
from ..dataset.sequence import ShardSequence
from ..errors import BusyError, DamageError, OptionError, StorageError, printable
from ..formats import manifest
from ..formats.version import Numbers
from ..images.decode import pil_info
from ..names import key_text
from ..order.subset import All, conditions, mark_where
from ..storage import local
from ..storage.base import Location
from ..storage.local import LocalDirectory
from ..storage.options import Storage
from ..units import check_bool, check_choice, check_int, show_count, show_size
from . import journal
from .erase import Erasing, choose, erased_numbers
from .grow import some
from .pack import resumable
from .place import Place, data_root, find_place
from .process_pool import Progress, Report, processes
from .sources.base import Problem
from .unfinished import Unfinished, unfinished_with
from .verify import Damage, FoundDamage, find_damage
from .versions import changing_all, check_keys, commit, keys_text, version_lines, with_excluded


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
    # Ids of the older versions that show them, and cannot be read any more, and their tags.
    unreadable: dict[str, list[str]] = field(default_factory=dict)
    discarded: int = 0  # shards with them that only such versions have
    unlisted: int = 0  # keys that went from lists of what packing left out
    unfinished: list[str] = field(default_factory=list)  # directories of work that was removed
    damages: list[Damage] = field(default_factory=list)  # with `damaged`: what was found
    unmended: int = 0  # of these, those that are of no record
    unerased: int = 0  # damaged records that were to be erased, of shards that cannot be opened

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
                f"copy, or `shardio compact {printable(self.out, 4096)}` writes all shards anew, "
                "and `shardio repair` values beside them"
            )
        if self.already:
            lines.append(f"{self.already:,} more were dropped before")
        lines += self._erased_lines(would)
        if self.missing:
            lines.append(f"no record has {keys_text(self.missing)}")
        lines += version_lines(self.versions)
        if self.erased and not self.dry_run and "://" in self.out:
            lines.append(
                "appends that other machines have planned are not seen; their commits look for "
                "these records, and say so"
            )
        if self.erased and not self.dry_run:
            lines.append(
                f"`shardio gc {printable(self.out, 4096)} --keep 0s` removes the old files, which "
                "still have the bytes"
            )
        return "\n".join(lines)

    def add(self, one: _Work) -> None:
        """Count what is done to one dataset."""
        self.records += one.fresh
        self.erased += one.erased
        self.unerased += one.unerased
        self.unlisted += one.unlisted
        if one.unfinished is not None and one.unfinished.is_there:
            self.unfinished.append(one.unfinished.folder)
        if one.erasing is not None:
            self.shards += one.erasing.shards
            self.discarded += len(one.erasing.parts) - one.erasing.shards
            self.unreadable |= one.erasing.unreadable

    def _erased_lines(self, would: str) -> Iterator[str]:
        """Say what was erased, and what became of what has it."""
        if self.erased:
            shards, records = show_count(self.shards, "shard"), show_count(self.erased, "record")
            yield f"{records} {would}erased: {shards} {would}written anew without them"
        if self.unerased:
            records, out = show_count(self.unerased, "record"), printable(self.out, 4096)
            yield (
                f"{records} not erased, since their shards cannot be opened: `shardio compact "
                f"{out}` writes all others anew"
            )
        if self.unreadable:
            versions = show_count(len(self.unreadable), "older version")
            shown = [
                f"{one}{f' [{printable(chr(44).join(tags))}]' if tags else ''}"
                for one, tags in self.unreadable.items()
            ]
            yield f"{versions} with them cannot be read any more: {some(shown)}"
        if self.discarded:
            shards = show_count(self.discarded, "shard")
            yield f"{shards} that only such versions have {would}given up"
        if self.unlisted:
            keys = show_count(self.unlisted, "key")
            yield f"{keys} {would}removed from {journal.REJECTED}"
        for folder in self.unfinished:
            yield f"unfinished work with them {would}removed: {printable(folder, 4096)}"


def drop(
    path: str | os.PathLike[str],
    *,
    keys: Iterable[str | bytes] | None = None,
    where: Mapping[str, Any] | Iterable[str] | None = None,
    missing: str = "error",
    erase: bool = False,
    restart: bool = False,
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
             were dropped before included, in all versions; no key of them is kept. Older versions
             that show them cannot be read any more, and `gc` removes the old files
    restart  with `erase`: also drop an unfinished `append` or `update` that has such records;
             default: then nothing is erased
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
    check_bool(dry_run=dry_run, erase=erase, restart=restart, damaged=damaged)
    if [keys is not None, where is not None, damaged].count(True) != 1:
        raise OptionError("drop: give keys, where or damaged, one of them")
    if (max_pixels, jobs) != (None, None) and not damaged:
        raise OptionError("drop: max_pixels and jobs go with damaged, which decodes all images")
    if restart and not erase:
        raise OptionError("restart: without erase, unfinished work stays as it is; leave it out")
    check_choice("missing", missing, "error", "ignore")
    top, data = find_place(path, storage), data_root(storage)
    wanted = None if keys is None else check_keys("keys", keys)
    chosen = where if isinstance(where, Mapping) or where is None else conditions(where)
    done = Dropped(top.url, dry_run=dry_run)
    looked = _find_damage(done, top, data, max_pixels, jobs, progress) if damaged else {}
    with resumable(), contextlib.ExitStack() as owners:
        work, seen, erased = list[_Work](), set[bytes](), 0
        for split, place, before in changing_all(top.datasets(), owners, dry_run):
            index = place.location
            reader = Reader(index, before, root=data)
            old, gone = reader.dropped, erased_numbers(reader)
            # What is dropped is looked at again where its bytes are still to go.
            chooser = Reader(index, before, root=data, excluded=gone) if erase else reader
            with _saying_what_helps(top.url, erase):
                if wanted is not None:
                    found = [*chooser.with_keys(wanted, dropped=True)]
                    numbers = np.array([reader.starts[at] + one for at, one, _ in found], np.int64)
                    own = {key for *_, key in found}
                else:
                    numbers = (
                        _still_damaged(looked[split], before, erase)
                        if damaged
                        else _numbers_where(chooser, chosen or {})
                    )
                    own = {*_keys_at(chooser, numbers)} if erase else set()
            fresh = np.setdiff1d(numbers, old)
            one = _Work(split, place, before, np.union1d(old, fresh), len(fresh))
            if erase:
                # A shard of which all is dropped then need not open: what it has is gone.
                after = Reader(index, before, root=data, excluded=one.excluded)
                one.find_all(after, numbers, own, wanted or own, restart)
            done.already += len(numbers) - len(fresh)
            done.remaining += reader.records - len(fresh)
            erased += len(gone)
            seen |= own | one.keys
            work.append(one)
            done.add(one)
        if damaged:
            _refuse_most(done)
        else:
            _check(done, wanted, seen, missing, where, erased)
        if not dry_run:
            _commit(done, work, progress)
    return done


@contextlib.contextmanager
def _saying_what_helps(out: str, erase: bool) -> Iterator[None]:
    """Say of a shard that cannot be opened what lets others be erased."""
    try:
        yield
    except DamageError as error:
        if not erase:
            raise
        shown = printable(out, 4096)
        raise DamageError(
            f"{error}\nNobody knows whether this shard has such records, so nothing was dropped. "
            f"Restore it from a copy; or do without it: `shardio drop {shown} --damaged`, `shardio "
            f"compact {shown}`, `shardio gc {shown} --keep-versions 1 --keep 0s`, then erase again"
        ) from None


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


@dataclass
class _Work:
    """What is to be done to one dataset."""

    split: str
    place: Place
    before: manifest.Manifest
    excluded: Numbers  # of all records that will be dropped
    fresh: int  # how many of them were not
    erasing: Erasing | None = None  # None: nothing is to be erased
    erased: int = 0  # records
    unerased: int = 0  # of shards that cannot be opened
    unfinished: Unfinished | None = None  # with such records
    listed: list[Problem] | None = None  # what packing left out, without them; None: as it is
    files: journal.Files = field(default_factory=dict)  # of these
    unlisted: int = 0
    keys: set[bytes] = field(default_factory=set)  # of records that the newest version has not

    def find_all(
        self, reader: Reader, numbers: Numbers, own: Set[bytes], keys: Set[bytes], restart: bool
    ) -> None:
        """Find all that has the records that are to be erased, or their keys.

        numbers: of the newest version's, which have the keys `own`. Raises OptionError,
        ExistsError, BusyError, DamageError, StorageError.
        """
        erasing = choose(self.place, reader, numbers, keys)
        self.erased = len(erasing.numbers) + len(erasing.keys - own)
        shards = np.unique(np.searchsorted(reader.starts, numbers, "right") - 1).tolist()
        unopened = (one for one in shards if isinstance(reader.shard(one), DroppedShard))
        self.unerased = sum(reader.manifest.shard(one).records for one in unopened)
        self.erasing = erasing if erasing.parts else None
        self.unfinished = unfinished_with(self.place, self.before, keys, restart)
        left_out, self.files = journal.own_list(self.place.location) or ([], {})
        if named := keys & {key for key, _ in left_out}:
            self.listed = [one for one in left_out if one[0] not in named]
            self.unlisted = len(named)
        self.keys = erasing.keys | named | (self.unfinished.keys if self.unfinished else set())

    def clean(self) -> None:
        """Remove what lies beside the dataset, and has the records or their keys."""
        if self.unfinished is not None:
            self.unfinished.remove()
        if self.listed:
            journal.write_rejected(self.place.location, self.listed, files=self.files)
        elif self.listed is not None:
            journal.remove_rejected(self.place.location)


def _commit(done: Dropped, work: Sequence[_Work], progress: Progress | None) -> None:
    """Write what is to be written, of all splits, then commit each. Raises StorageError."""
    erasing = [one.erasing for one in work if one.erasing]
    total = sum(one.size for one in erasing)
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
        one.erasing.write(report) if one.erasing else (one.before, dict[str, bytes]())
        for one in work
    ]
    for one in work:
        one.clean()
    for one, (new, files) in zip(work, written, strict=True):
        changes = {"dropped": one.fresh, "erased": one.erased}
        if any(changes.values()):
            after, more = with_excluded(new, one.excluded)
            new_version = commit(one.place, one.before, after, "drop", changes, files | more)
            done.versions[one.split] = new_version.version_id


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


def _keys_at(reader: Reader, numbers: Numbers) -> Iterator[bytes]:
    """Yield the keys of records, by their numbers; not of those whose heads are damaged."""
    for number in numbers.tolist():
        with contextlib.suppress(DamageError):
            yield reader.key_of(number)


def _numbers_where(reader: Reader, chosen: Mapping[str, Any]) -> Numbers:
    """Return the numbers of the records that meet conditions, of those that are not dropped."""
    decoder = Decoder(reader.manifest.schema, fields=None, decode=None, transform=None)
    rows = ShardSequence(reader, decoder, range(reader.records))
    marks = mark_where(chosen, rows.columns, reader.records, reader.manifest.classes)
    places: Numbers = np.flatnonzero(marks)
    return places if reader.remaining is None else reader.remaining.at(places)
