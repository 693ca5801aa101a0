"""Is every byte what was packed? Each shard is checked by itself, on all cores.

Checked are the manifest, each shard's header, index and trailer against it, every record's
checksum, that keys and columns in the index are those of the records, and the pages of LMDB shards.
Of records that were erased: that they are, and that every reader hides them. `dropped` asks another
question: is anything of these keys left in the directory (remains.py)?
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..dataset.reader import Reader
from ..errors import (
    DamageError,
    DecodeError,
    DependencyError,
    OptionError,
    StorageError,
    VersionError,
    printable,
)
from ..formats import check_format, manifest, open_shard, sha256
from ..formats.base import Opening, Shard, ShardInfo
from ..formats.index import key_hash
from ..formats.manifest import Manifest
from ..formats.overlay import files_of_shard
from ..formats.record import erased_in, whole_runs
from ..formats.sample import Sample
from ..formats.version import Numbers
from ..images.decode import check, pil_info
from ..names import KEY, key_text
from ..storage.base import Location, path_in
from ..storage.location import locate
from ..storage.options import Storage, with_root
from ..units import check_bool, check_int, show_count, show_size
from .parts import Announce, PartOptions
from .process_pool import Executor, Progress, Report, check_executor, processes, run
from .remains import Sought, seek

Bad = DamageError | StorageError
Read = TypeVar("Read")
_GIVES_UP = 4  # shards in a row that could not be read by URL: it is not the shards
_MISSING = "the file is missing"
_CHUNK = 256  # records that are read together, and one by one when one of them is damaged


@dataclass(frozen=True)
class Damage:
    """One thing that differs from what was packed. `record` None: the shard as a whole."""

    shard: str
    record: int | None
    offset: int | None  # of the record, in bytes
    key: str | None  # where it can still be read
    what: str

    def __str__(self) -> str:
        if self.record is None and self.offset is not None:
            return f"{self.shard}: key {printable(self.key or '')}: {self.what}"
        if self.record is None:
            return f"{self.shard}: {self.what.removeprefix(f'{self.shard}: ')}"
        key = "unknown" if self.key is None else printable(self.key)
        what = self.what.splitlines()[0]
        if what.startswith(self.shard):  # with the place, which is said here
            what = what.split("): ", 1)[-1]
        return f"{self.shard}: record {self.record} at byte {self.offset}, key {key}: {what}"


@dataclass
class Verified:
    """What one call of `verify` found.

    Damaged records that were dropped are counted, but not listed: no reader shows them.
    """

    shards: int = 0
    records: int = 0  # that were read
    bytes: int = 0
    damages: list[Damage] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)  # why a shard could not be read by URL
    untried: int = 0  # shards that were left, since several before could not be read
    elsewhere: bool = False  # files of others are missing, and no root was given
    part: tuple[int, int] | None = None  # which part was checked, and of how many; None: all
    erased: int = 0  # records whose bytes were erased: they are among the records
    hidden: int = 0  # damaged records that were dropped
    sought: Sought | None = None  # with `dropped`: where these keys were looked for

    def __repr__(self) -> str:
        return f"<{self._summary()}>"

    def __str__(self) -> str:
        lines = [*map(str, self.damages), *self.unread, self._summary()]
        if self.sought is not None:
            lines += self.sought.unseen
        if self.elsewhere:
            lines.append(
                "files that the manifest names are not beside it. If they lie elsewhere (`shardio "
                "index --out`), say where: --root DIR or URL"
            )
        return "\n".join(lines)

    def _summary(self) -> str:
        if self.sought is not None:
            left = f"{len(self.damages):,}" if self.damages else "nothing"
            return f"{self.sought}: {left} left of them"
        what = f"{show_count(self.records, 'record')} in {show_count(self.shards, 'shard')}"
        others = " others" if self.hidden or self.unread else ""
        verdict = f"{len(self.damages):,} damaged" if self.damages else f"all{others} as packed"
        if self.erased:
            verdict += f", {self.erased:,} erased"
        if self.hidden:
            were = "was" if self.hidden == 1 else "were"
            verdict += f"; {show_count(self.hidden, 'damaged record')} {were} dropped"
        if self.unread:
            number = len(self.unread) + self.untried
            none = number == self.shards and not self.damages
            rest = "" if none else f"; {verdict}"
            verdict = f"{show_count(number, 'shard')} could not be read{rest}"
        part = "" if self.part is None else f"part {self.part[0]} of {self.part[1]}: "
        return f"{part}{what}, {show_size(self.bytes)}: {verdict}"


@dataclass(frozen=True)
class _Task:
    """One shard to be checked, and how."""

    format: str
    opening: Opening
    info: ShardInfo
    images: tuple[tuple[str, bool], ...]  # fields to decode, and whether to RGB
    max_pixels: int | None
    sha256: bool
    dropped: Numbers  # records of this shard that every reader hides
    strict: bool = False  # what says nothing of the bytes is no damage: files that are locked, say


class _Checked(NamedTuple):
    """What was found in one shard."""

    records: int  # that were read
    damages: list[Damage]
    erased: int = 0
    hidden: Sequence[Damage] = ()  # of records that were dropped
    unread: str | None = None  # why it could not be read
    is_whole: bool = False  # damage is of all its records


def verify(
    path: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    storage: Storage | None = None,
    decode: bool = False,
    max_pixels: int | None = None,
    sha256: bool = False,
    dropped: Iterable[str | bytes] | None = None,
    jobs: int | None = None,
    executor: Executor | None = None,
    part: tuple[int, int] | str | None = None,
    parts: int | None = None,
    stagger_s: float = 0.0,
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> Verified:
    """Check a dataset, or all its splits, and list every damage.

    path        of the dataset, or its URL
    root        where the data lies, when `shardio index --out` put its index elsewhere
    storage     a shardio.Storage: how an object store is reached
    decode      also decode every image
    max_pixels  with `decode`: of an image, instead of the default limit
    sha256      also compare each file's SHA-256 with the manifest
    dropped     keys: look instead, in every file of the directory, for what is left of these
                records, which were dropped and erased; other options are not for this
    jobs        processes; default: one a core
    executor    a shardio.RayExecutor: a cluster that does it instead
    part        (i, n) or "i/n", i from 1 to n: check only this part of the shards. "auto": the part
                that SLURM, torchrun or Kubernetes gives this process
    parts       the number of parts, if part is "auto": Kubernetes does not say it
    stagger_s   wait first, for a random time up to so many seconds
    progress    called now and then with bytes done and bytes in all
    announce    called with lines to show before the work begins: which part this is

    Raises DamageError when the manifest itself is damaged, NotPackedError.
    """
    check_bool(decode=decode, sha256=sha256)
    if dropped is not None:
        return _seek(
            path, dropped, storage, decode, sha256, root, executor, part, parts, max_pixels
        )
    check_executor(executor)
    jobs = processes(jobs)
    chosen = PartOptions(part=part, parts=parts, stagger_s=stagger_s).begun(announce)
    options = with_root(storage, root)
    shards = None if options.root is None else locate(options.root, options)
    datasets = [
        (index, manifest.load(index))
        for index in manifest.datasets_in(locate(path, options)).values()
    ]
    for _, one in datasets:
        check_format(one)
    if max_pixels is not None:
        max_pixels = check_int("max_pixels", max_pixels, 1)
        if not decode:
            raise OptionError(
                f"max_pixels is {max_pixels}, but no image is decoded: give --decode, too, or "
                "leave it out"
            )
    if decode:
        pil_info()
    how = _Checks(decode, max_pixels, sha256)
    tasks = [task for index, one in datasets for task in _tasks(index, shards, one, how)]
    numbers = chosen.shards_of(len(tasks))
    tasks = tasks[numbers.start : numbers.stop]
    size = sum(
        task.info.size + sum(one.size for *_, one in files_of_shard(task.opening, task.info.number))
        for task in tasks
    )
    found = Verified(shards=len(tasks), bytes=size, part=chosen.chosen)
    report = Report(progress, found.bytes)
    failed = 0  # shards in a row
    results = run(_check_shard, tasks, jobs=jobs, report=report, executor=executor)
    with contextlib.closing(results):
        for number, checked in enumerate(results):
            found.records += checked.records
            found.erased += checked.erased
            found.damages += checked.damages
            everything = checked.is_whole and checked.hidden
            found.hidden += tasks[number].info.records if everything else len(checked.hidden)
            found.unread += [] if checked.unread is None else [checked.unread]
            failed = 0 if checked.unread is None else failed + 1
            if failed == _GIVES_UP:
                found.untried = len(tasks) - number - 1
                break
    if shards is None and any(one.names for _, one in datasets):
        found.elsewhere = any(damage.what == _MISSING for damage in found.damages)
    return found


def _seek(
    path: str | os.PathLike[str],
    dropped: Iterable[str | bytes],
    storage: Storage | None,
    *others: Any,
) -> Verified:
    """Look for what is left of records with these keys. Raises OptionError for other options."""
    usual = Storage()
    given = replace(storage or usual, options=None, timeout_s=usual.timeout_s)
    if given != usual or any(one not in (None, False) for one in others):
        raise OptionError("dropped looks for keys alone: leave out the rest")
    sought, left = seek(path, dropped, storage)
    counts = sought.shards, sought.records, sought.bytes
    damages = [Damage(*one) for one in left]
    return Verified(*counts, damages, erased=sought.erased, sought=sought)


class FoundDamage(NamedTuple):
    """What is damaged in one dataset, and which records that makes useless."""

    damages: list[Damage]  # but those of records that were dropped
    numbers: Numbers  # of the records in the dataset, ascending; of a damaged shard all of them
    hidden: Numbers  # of those that were dropped before
    others: int  # damages that are of no record, such as of a page between records


def find_damage(
    index: Location,
    dataset: Manifest,
    root: Location | None,
    *,
    max_pixels: int | None,
    jobs: int,
    report: Report,
) -> FoundDamage:
    """Find what `verify(decode=True)` lists as damage in one dataset.

    Raises StorageError for a shard that cannot be read, for whatever reason but its bytes, and
    DependencyError for images of a kind that nothing decodes here.
    """
    tasks = [*_tasks(index, root, dataset, _Checks(True, max_pixels, False, strict=True))]
    damages, numbers, hidden = list[Damage](), list[int](), list[int]()
    start = others = 0
    with contextlib.closing(run(_check_shard, tasks, jobs=jobs, report=report)) as checked:
        for task, one in zip(tasks, checked, strict=True):
            if one.unread is not None:
                raise StorageError(f"{one.unread}. Nothing was dropped")
            damages += one.damages
            others += sum(each.record is None for each in one.damages if not one.is_whole)
            for found, into in ((one.damages, numbers), (one.hidden, hidden)):
                if one.is_whole and found:
                    into += range(start, start + task.info.records)
                else:
                    into += (start + each.record for each in found if each.record is not None)
            start += task.info.records
    gone, before = (np.unique(np.array(found, np.int64)) for found in (numbers, hidden))
    return FoundDamage(damages, gone, before, others)


class _Checks(NamedTuple):
    """What is checked besides checksums and the index."""

    decode: bool
    max_pixels: int | None
    sha256: bool
    strict: bool = False


def _tasks(index: Location, root: Location | None, one: Manifest, how: _Checks) -> Iterator[_Task]:
    """Yield a task for each shard of a dataset. Raises DamageError."""
    main, opening = one.schema.main_image, one.opening(index, root)
    images = tuple((name, name == main) for name in one.schema.images) if how.decode else ()
    reader = Reader(index, one, root=root)
    for number in range(one.shards):
        checks = how.max_pixels, how.sha256, reader.dropped_in(number), how.strict
        yield _Task(one.format, opening, one.shard(number), images, *checks)


def _check_shard(task: _Task, add: Callable[[int], None]) -> _Checked:
    """Check one shard, and its records."""
    info = task.info
    name = printable(os.path.join(task.opening.storage.url, info.name), 4096)
    damages: list[Damage] = []
    others: list[Damage] = []  # of values beside it
    differs: list[Damage] = []  # told where nothing else says what is wrong
    damaged = functools.partial(Damage, name, None, None, None)
    try:
        if task.sha256 and sha256(task.format, task.opening, info) != info.sha256:
            differs = [damaged("its SHA-256 is not the manifest's")]
        shard, beside = _opened(task)
        with contextlib.closing(shard):
            if beside is not None:  # the images may be good: no record is damaged by it
                others.append(damaged(str(beside)))
            check_values = task.sha256 and beside is None
            for _, here, one in files_of_shard(task.opening, info.number) if check_values else ():
                if sha256("record", here, one) != one.sha256:
                    where = path_in(here.storage, one.name)
                    others.append(damaged(f"{where}: its SHA-256 is not the manifest's"))
            if task.opening.storage.remote:
                shard.will_need(0, shard.records)  # within what may be in flight
            for start in range(0, shard.records, _CHUNK):
                stop = min(start + _CHUNK, shard.records)
                for run in whole_runs(shard, start, stop):
                    damages += _check_records(shard, *run, task, name)
                add(int(shard.sizes[start:stop].sum()))
            erased, dropped = erased_in(shard), {*task.dropped.tolist()}
            hidden = [one for one in damages if one.record in dropped]
            damages = [one for one in damages if one.record not in dropped]
            for record in erased.tolist():
                if what := _wrongly_erased(shard, record, dropped):
                    damages.append(Damage(name, record, shard.offset(record), None, what))
            try:
                shard.check()
            except DamageError as error:
                damages.append(damaged(str(error)))
            return _Checked(shard.records, others + (damages or differs), len(erased), hidden)
    except FileNotFoundError:
        damages = [damaged(_MISSING)]
    except (DamageError, StorageError, VersionError) as error:
        if _tells_nothing(task, error):
            return _Checked(0, others + (damages or differs), unread=str(error))
        damages = [*others, *damages, damaged(str(error))]
    if info.records and len(task.dropped) == info.records:
        return _Checked(0, [], hidden=damages, is_whole=True)
    return _Checked(0, damages, is_whole=True)


def _opened(task: _Task) -> tuple[Shard, DamageError | None]:
    """Open a shard; without the values beside it, and with an error, where these do not open.

    Raises as `open_shard`, of the shard itself, and where all of its records were dropped.
    """
    try:
        return open_shard(task.format, task.opening, task.info), None
    except DamageError as error:
        if not task.opening.overlays or len(task.dropped) == task.info.records:
            raise
        stored = replace(task.opening, overlays=())
        return open_shard(task.format, stored, task.info), error


def _wrongly_erased(shard: Shard, record: int, hidden: set[int]) -> str | None:
    """Say what is wrong with a record that was erased; None if all is right."""
    found = _attempt(shard.checksums, record)
    if isinstance(found, Bad):
        return str(found)
    if found is not None and found[0] != found[1]:
        return f"it was erased, but its checksum is {found[0]:#018x}, expected {found[1]:#018x}"
    if shard.key_hashes[record] or any(
        column[record] is not np.ma.masked and column[record] for column in shard.columns.values()
    ):
        return "it was erased, but the index still tells of it"
    if record not in hidden:
        return "it was erased, but no list of dropped records hides it"
    return None


def _tells_nothing(task: _Task, error: Exception) -> bool:
    """Return True for an error that says nothing of the bytes in the store, or on the disk."""
    if task.strict and not isinstance(error, DamageError):
        return True
    return task.opening.storage.remote and isinstance(error, StorageError)


def _check_records(shard: Shard, start: int, stop: int, task: _Task, name: str) -> Iterator[Damage]:
    """Give the damages of some records, which are read together if they are as they were."""
    try:
        samples: list[Sample | Bad] = list(shard.scan(start, stop))
    except (DamageError, StorageError) as error:
        if _tells_nothing(task, error):
            raise
        samples = [_attempt(shard.read, record) for record in range(start, stop)]
    for record, sample in enumerate(samples, start):
        if isinstance(sample, Bad):
            if _tells_nothing(task, sample):
                raise sample
            key = _attempt(shard.key, record)
            shown = None if isinstance(key, Bad) else key_text(key)
            yield Damage(name, record, shard.offset(record), shown, str(sample))
        elif what := _wrong(shard, record, sample, task):
            yield Damage(name, record, shard.offset(record), key_text(sample[KEY]), what)


def _attempt(read: Callable[[int], Read], record: int) -> Read | Bad:
    """Return what is read of a record, or the error that reading raised."""
    try:
        return read(record)
    except (DamageError, StorageError) as error:
        return error


def _wrong(shard: Shard, record: int, sample: Sample, task: _Task) -> str | None:
    """Say what is wrong with a record whose own checksum is right; None if all is right."""
    if key_hash(sample[KEY]) != shard.key_hashes[record]:
        return "the index has another key for it"
    for name, column in shard.columns.items():
        value, indexed = sample[name], column[record]
        if (value is None) != (indexed is np.ma.masked):
            return f"the index has another {name} for it"
        if value is not None and value != indexed and not (value != value and indexed != indexed):
            return f"the index has another {name} for it"
    for field_name, is_main in task.images:
        if sample[field_name] is not None:
            try:  # values of others may be no colours
                check(sample[field_name], rgb=is_main, max_pixels=task.max_pixels)
            except DecodeError as error:
                if task.strict and error.lacks_codec:
                    key = printable(key_text(sample[KEY]))
                    raise DependencyError(
                        f"{shard.name}: record {record}, key {key}: {error}"
                    ) from None
                return f"{field_name} cannot be decoded: {error}"
    return None
