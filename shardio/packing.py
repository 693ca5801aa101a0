"""Sources to shards to a manifest: parallel by shard, reproducible, resumable, atomic.

Each shard of the plan is one independent, idempotent piece of work: this process, N processes, or
the parts of a job array build the same bytes. A shard gets its name when it is whole and flushed;
the manifest is renamed into place after all of them, and until then nothing was packed.

What lies in OUT while a packing is unfinished, and is gone once it is committed:

    .shardio-plan               the plan; bytes of it are locked while shards are built
    .shardio-TOKEN-NAME.tmp     files being written
    .shardio-rejected-*.jsonl   what was left out, by shard, with on_error="skip"
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import __version__, manifest, parallel, plan, sources
from .errors import (
    BusyError,
    DamageError,
    DecodeError,
    ExistsError,
    NotPackedError,
    OptionError,
    SourceChangedError,
    SourceError,
    StorageError,
    VersionError,
    printable,
)
from .formats import check_format
from .formats.base import MAX_RECORDS, ShardInfo
from .formats.record import RecordEncoder, RecordShard, may_be_shard
from .plan import JOURNAL, Before, Plan
from .sample import Schema
from .storage import local, locate

REJECTED = "rejected.jsonl"
QUALITY = 90  # of re-encoded JPEGs; FFCV's and ImageNet recipes' choice

_REJECTED_PART = ".shardio-rejected-{}.jsonl"  # of a shard, by its name, or of the scan
_SCAN = "scan"
_WRITE = 1 << 20  # bytes gathered for one write call
_CHECK = 64  # files, or
_CHECK_BYTES = 4 << 20  # bytes, between two looks at whether to stop
_TRIES, _PAUSE_S = 5, 0.05  # for a lock that another process may hold for a moment, to look

Problem = tuple[bytes, str]  # key, reason
Path_ = str | bytes | os.PathLike[Any]


@dataclass
class Packed:
    """What one call of `pack` or `commit` did, for one dataset."""

    out: str
    split: str = ""
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
    rejected: list[Problem] = field(default_factory=list)
    full_size: int = 0  # images built at full size: --resize cannot write them anew
    committed: bool = False
    already: bool = False  # it was packed before; nothing was touched
    unlocked: bool = False  # the file system has no locks


def pack(
    source: Path_,
    out: Path_,
    *,
    format: str = "record",
    shard_size: int | None = None,
    max_records: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    jobs: int | None = None,
    part: tuple[int, int] | None = None,
    splits: bool | None = None,
    classes: Path_ | None = None,
    resize: int | None = None,
    quality: int = QUALITY,
    overwrite: bool = False,
    restart: bool = False,
    on_error: str = "raise",
    dry_run: bool = False,
    progress: parallel.Progress | None = None,
) -> list[Packed]:
    """Pack a folder of images into OUT: one dataset, or one for each split.

    shard_size     bytes of source a shard; default 256 MiB, less where that gave under 16 shards
    max_records    records a shard, at most
    shuffle, seed  pack in an order shuffled by `seed`, so that neighbours on disk are unrelated
    jobs           processes; default: one a core
    part           (i, n), i from 1 to n: build only this part; `commit(out)` when all are built
    splits         whether top folders are splits; default: when all have names of splits
    classes        another dataset, whose numbering of classes is taken
    resize         shrink images to this short side (pixels), at `quality`; never enlarges
    overwrite      commit over another dataset in OUT; its shards stay until `gc`
    restart        drop an unfinished packing in OUT
    on_error       "raise": one SourceError lists all files that cannot be packed, and nothing is
                   committed; "skip": they are left out, and OUT/rejected.jsonl lists them
    dry_run        make the plan and touch nothing
    progress       called now and then with bytes done and bytes in all

    Run again after an interruption, it goes on where it was. Raises OptionError, SourceError,
    SourceChangedError, BusyError, ExistsError, StorageError.
    """
    check_format(format)
    jobs = parallel.processes(jobs)
    _check_options(shard_size, max_records, seed, part, resize, quality, on_error)
    source, out = os.fsencode(local_path(source)), local_path(out)
    if resize is not None:
        from . import image

        image.engine()  # fails now, not in the middle
    _check_directory(out)
    for folder in (out, *(os.path.join(out, name.decode()) for name in sources.SPLITS)):
        _refuse_if_busy(folder, part)
    _check_apart(source, out)
    numbering = None if classes is None else _classes_of(os.fsdecode(classes))
    listings = sources.image_folder(source, splits)
    if numbering is not None:
        listings = {
            name: listing if listing.classes is None else sources.renumber(listing, numbering)
            for name, listing in listings.items()
        }
        if all(listing.classes is None for listing in listings.values()):
            sources.renumber(next(iter(listings.values())), numbering)
    names = list(listings)
    _check_kind(out, names)
    packings = []
    for name, listing in listings.items():
        extra: dict[str, Any] = {"resize": resize, "quality": quality if resize else None}
        if name:
            extra |= {"split": name, "splits": names}
        made = plan.make(
            listing,
            shard_size=shard_size,
            max_records=max_records,
            shuffle=shuffle,
            seed=seed,
            extra=extra,
        )
        packings.append(_Packing(made, os.path.join(out, name) if name else out, listing.root))
    for packing in packings:
        packing.check(overwrite)  # all of them, before any is touched
    if dry_run:
        return [packing.dry_run() for packing in packings]
    total = sum(int(packing.plan.sizes.sum()) for packing in packings)
    report = parallel.Report(progress, total)
    done = []
    problems: list[Problem] = []
    for packing in packings:
        try:
            packing.run(
                jobs=jobs,
                part=part,
                overwrite=overwrite,
                restart=restart,
                skip=on_error == "skip",
                report=report,
            )
        except _ProblemsError as found:
            problems += [(_under(packing.result.split, key), why) for key, why in found.problems]
        done.append(packing.result)
    if problems:
        raise SourceError(_explain(problems, os.fsdecode(source)))
    if names != [""] and part is None:
        _commit_splits(out, names)
    return done


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
    folders = [out]
    if not os.path.exists(os.path.join(out, JOURNAL)):
        splits = _planned_splits(out)
        folders = [os.path.join(out, name) for name in splits] or [out]
    packings = []
    for folder in folders:
        try:
            with _locked(folder) as held:
                made = plan.parse(_journal_of_parts(held, folder), os.path.join(folder, JOURNAL))
        except FileNotFoundError:
            manifest.load(locate(folder))  # explains what is here, if it is nothing
        else:
            packings.append(_Packing(made, folder, b""))
    if not packings and (not splits or _has_splits(out, splits)):
        raise NotPackedError(f"{printable(out)}: already packed; there is nothing to commit")
    report = parallel.Report(progress, sum(int(one.plan.sizes.sum()) for one in packings))
    for packing in packings:
        packing.commit(jobs=jobs, overwrite=overwrite, report=report)
    if splits:
        _commit_splits(out, splits)
    return [packing.result for packing in packings]


@dataclass(frozen=True)
class _Task:
    """One shard to build, or to check where it is there already."""

    number: int
    root: bytes
    directory: str
    token: str
    dataset_id: bytes
    fields: tuple[tuple[str, str], ...]
    keys: list[bytes]
    sizes: list[int]
    mtimes: list[int]
    labels: list[int] | None
    resize: int | None
    quality: int | None
    skip: bool
    finished: list[str]  # names of files that may be this shard, from an interrupted packing
    build: bool = True


@dataclass
class _Built:
    info: ShardInfo | None  # None: not built, because of `problems`
    blob_bytes: int = 0
    kept: bool = False
    full_size: int = 0
    problems: list[Problem] = field(default_factory=list)


class _ProblemsError(Exception):
    """Files that cannot be packed; gathered over all splits before the user is told."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(problems)
        self.problems = problems


class _Packing:
    """One dataset on its way into one directory."""

    def __init__(self, made: Plan, directory: str, root: bytes) -> None:
        self.plan, self.directory, self.root = made, directory, root
        self.dataset_id = made.dataset_id
        self.token = local.token()
        header = made.header
        self.result = Packed(
            out=directory,
            split=header["options"].get("split", ""),
            shards=made.shards,
            records=len(made.keys),
            classes=None if header["classes"] is None else len(header["classes"]),
            source_bytes=int(made.sizes.sum()),
            ignored=header["ignored"],
            notes=list(header["notes"]),
        )
        self._started = time.monotonic()

    def check(self, overwrite: bool) -> None:
        """Raises ExistsError when another dataset is here."""
        self.result.already = self._is_packed(overwrite)

    def dry_run(self) -> Packed:
        self.result.rejected = self.plan.problems
        return self.result

    def run(
        self,
        *,
        jobs: int,
        part: tuple[int, int] | None,
        overwrite: bool,
        restart: bool,
        skip: bool,
        report: parallel.Report,
    ) -> None:
        if self._is_packed(overwrite):
            self._leave(skip)
            return
        local.make_directory(self.directory)
        start, stop = _share(self.plan.shards, part)
        held, planned = self._acquire((0, None) if part is None else (start, stop), restart)
        try:
            if planned is None and self._is_packed(overwrite):  # another packer was faster
                held.release()
                self._leave(skip)
                return
            self.result.unlocked = held.held is None
            if part is None and planned is not None:
                _remove_temporaries(self.directory)  # of packers that died
            problems = list(self.plan.problems)
            if part is not None:
                first, last = (int(self.plan.bounds[shard]) for shard in (start, stop))
                self.result.records = last - first
                self.result.source_bytes = int(self.plan.sizes[first:last].sum())
                if (skip or not problems) and (problems or (planned and planned.problems)):
                    _write_rejected(self.directory, _SCAN, problems)
            built = self._build(
                range(start, stop), jobs, skip, planned is not None, report, build=True
            )
            for one in built:
                problems += one.problems
            if problems and not skip:
                raise _ProblemsError(problems)
            self.result.rejected = sorted(problems)
            self.result.seconds = time.monotonic() - self._started
            if part is None:
                self._finish(built, problems, held)
        finally:
            held.release()

    def commit(self, *, jobs: int, overwrite: bool, report: parallel.Report) -> None:
        with _locked(self.directory) as held:
            journal = held.read()
            self.result.unlocked = held.held is None
            if is_committed(self.directory, journal):  # and killed before it had cleaned up
                self.result.already = True
                self._show_committed()
                clean(self.directory, journal)
                return
            if self._is_packed(overwrite):
                raise ExistsError(
                    f"{printable(self.directory)}: a dataset is packed here, of the same keys and "
                    "sizes as the new one. Replace it with `shardio commit --overwrite`"
                )
            problems = _load_rejected(self.directory, _REJECTED_PART.format(_SCAN))
            if problems is None and self.plan.problems:
                raise SourceError(_explain(self.plan.problems, self.directory))
            built = self._build(range(self.plan.shards), jobs, True, True, report, build=False)
            missing = [number for number, one in enumerate(built) if one.info is None]
            if missing:
                shown = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
                raise NotPackedError(
                    f"{printable(self.directory)}: not packed: {len(missing)} of "
                    f"{self.plan.shards} shards are not built: {shown}. Run the parts that build "
                    "them, then `shardio commit` again"
                )
            problems = [*(problems or ()), *(entry for one in built for entry in one.problems)]
            self.result.rejected = sorted(problems)
            self.result.seconds = time.monotonic() - self._started
            self._finish(built, problems, held)

    def _is_packed(self, overwrite: bool) -> bool:
        """Whether just this dataset is committed here. Raises ExistsError when another one is."""
        if overwrite:
            return False
        try:
            there = manifest.load(locate(self.directory))
        except NotPackedError:
            return False
        if there.dataset_id == self.dataset_id:
            infos = (there.shard(number) for number in range(there.shards))
            return all(_size(self.directory, info.name) == info.size for info in infos)
        raise ExistsError(
            f"{printable(self.directory)}: another dataset is packed here ({there.records:,} "
            f"records, id {there.dataset_id.hex()}). Choose another directory, or replace it with "
            "--overwrite"
        )

    def _leave(self, skip: bool) -> None:
        """What is committed here is what was asked for: say so, and clean up what a kill left."""
        self.result.already = True
        problems = self.plan.problems
        if problems and not skip:
            raise _ProblemsError(problems)
        self._show_committed()
        self.result.rejected = sorted({*self.result.rejected, *problems})
        with contextlib.suppress(FileNotFoundError, StorageError), _locked(self.directory) as held:
            journal = held.read()
            if is_committed(self.directory, journal):
                clean(self.directory, journal)

    def _show_committed(self) -> None:
        made = manifest.load(locate(self.directory))
        self.result.records, self.result.bytes = made.records, made.size
        self.result.rejected = _load_rejected(self.directory, REJECTED) or []

    def _acquire(
        self, bounds: tuple[int, int | None], restart: bool
    ) -> tuple[local.RangeLock, Plan | None]:
        """Lock these shards of the journal; the plan found in it, or None when we made it."""
        made, tries = False, 0
        while True:
            try:
                held = lock(self.directory, *bounds)
            except FileNotFoundError:
                restart = False
                fresh = dataclasses.replace(self.plan, before=shards_in(self.directory))
                try:
                    local.write_file(self.directory, JOURNAL, fresh.dump(), replace=False)
                    made = True
                except ExistsError:  # another was first: compare with its plan
                    pass
                continue
            except BusyError:
                tries += 1
                if tries == _TRIES:
                    raise
                time.sleep(_PAUSE_S)
                continue
            try:
                journal = held.read()
                planned = self._planned(journal, restart)
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

    def _planned(self, journal: bytes, restart: bool) -> Plan | None:
        """The plan of an unfinished packing, if it is this one; None when it is to be dropped.

        Raises SourceChangedError when it is another, DamageError, unless `restart`.
        """
        if journal.startswith(WRITER_MAGIC) or is_committed(self.directory, journal):
            return None  # of a Writer that died: nobody can resume it; or finished, but for this
        try:
            old = plan.parse(journal, os.path.join(self.directory, JOURNAL))
        except DamageError:
            if restart:
                return None
            raise
        if old.same(self.plan):
            return old
        if restart:
            return None
        raise SourceChangedError(
            f"{printable(self.directory)}: an unfinished packing is here, of another plan:\n"
            f"{plan.difference(old, self.plan)}\n"
            "Undo the change and run it again to resume, or drop the unfinished packing with "
            "--restart"
        )

    def _drop(self) -> None:
        """Remove an unfinished packing: the shards only it names, its temporary files, its plan."""
        with contextlib.suppress(FileNotFoundError), _locked(self.directory) as held:
            clean(self.directory, held.read())

    def _build(
        self,
        numbers: range,
        jobs: int,
        skip: bool,
        resumed: bool,
        report: parallel.Report,
        *,
        build: bool,
    ) -> list[_Built]:
        finished = self._finished() if resumed else {}
        tasks = (self._task(number, skip, finished.get(number, []), build) for number in numbers)
        built: list[_Built] = []
        try:
            for one in parallel.run(_do, tasks, jobs=min(jobs, len(numbers)), report=report):
                built.append(one)
                self.result.kept += one.kept
                self.result.built += one.info is not None and not one.kept
                self.result.full_size += one.full_size
        except BaseException:
            _remove_temporaries(self.directory, self.token)  # of workers that had to be killed
            raise
        return built

    def _task(self, number: int, skip: bool, finished: list[str], build: bool) -> _Task:
        start, stop = (int(bound) for bound in self.plan.bounds[number : number + 2])
        options = self.plan.header["options"]
        return _Task(
            number=number,
            root=self.root,
            directory=self.directory,
            token=self.token,
            dataset_id=self.dataset_id,
            fields=tuple((name, kind) for name, kind in self.plan.header["fields"]),
            keys=self.plan.keys[start:stop],
            sizes=self.plan.sizes[start:stop].tolist(),
            mtimes=self.plan.mtimes[start:stop].tolist(),
            labels=self.plan.labels(start, stop) if build else None,
            resize=options["resize"],
            quality=options["quality"],
            skip=skip,
            finished=finished,
            build=build,
        )

    def _finished(self) -> dict[int, list[str]]:
        """Files that may be shards of this packing, by number."""
        found: dict[int, list[str]] = {}
        for name, born in shards_in(self.directory).items():
            if self.plan.before.get(name) != born:
                found.setdefault(shard_number(name) or 0, []).append(name)
        return found

    def _finish(
        self, built: Sequence[_Built], problems: list[Problem], held: local.RangeLock
    ) -> None:
        """The commit: the manifest into place; before it nothing was packed, after it all was."""
        infos = [one.info for one in built if one.info is not None]
        header = self.plan.header
        made = manifest.make(
            infos,
            dataset_id=self.dataset_id,
            format="record",
            schema=Schema(header["fields"]),
            classes=None if header["classes"] is None else tuple(header["classes"]),
            options=header["options"],
            library=__version__,
            blob_bytes=sum(one.blob_bytes for one in built),
        )
        if problems:
            local.write_file(self.directory, REJECTED, _dump_rejected(sorted(problems)))
        else:
            remove_rejected(self.directory)  # of the dataset that is replaced
        local.write_file(self.directory, manifest.MANIFEST, made.dump())
        self.result.records, self.result.bytes = made.records, made.size
        self.result.committed = True
        clean(self.directory, held.read())


# --- one shard ------------------------------------------------------------------------------------


def _do(task: _Task, add: Callable[[int], None]) -> _Built:
    """Build a shard, or keep it when an interrupted packing finished it. Runs in any process."""
    found = [kept for name in task.finished if (kept := _keep(task, name))]
    if found:
        add(sum(task.sizes))
        return min(found, key=lambda kept: len(kept.problems))
    return _build_shard(task, add) if task.build else _Built(None)


def _build_shard(task: _Task, add: Callable[[int], None]) -> _Built:
    encoder = RecordEncoder(Schema(task.fields), task.dataset_id, task.number)
    draft = local.Draft(task.directory, f"{task.number:05d}", task.token)
    problems: list[Problem] = []
    try:
        folder = os.open(task.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            pieces, size = [encoder.header()], 0
            done = full_size = 0
            for i, key in enumerate(task.keys):
                data, problem = sources.read(folder, key, task.sizes[i], task.mtimes[i])
                if not problem and task.resize is not None:
                    data, problem, whole = _resized(data, task.resize, task.quality or QUALITY)
                    full_size += whole
                if problem:
                    problems.append((key, problem))
                else:
                    values = [key, len(data)]
                    if task.labels is not None:
                        values.append(task.labels[i])
                    record = encoder.append(values, (data,))
                    pieces += record
                    size += len(record[1])
                    if size >= _WRITE:
                        draft.write(b"".join(pieces))
                        pieces, size = [], 0
                done += task.sizes[i]
                if done >= _CHECK_BYTES or i % _CHECK == _CHECK - 1:
                    add(done)
                    done = 0
        finally:
            os.close(folder)
        if problems and not task.skip:
            draft.discard()
            return _Built(None, problems=problems)
        pieces.append(encoder.finish())
        draft.write(b"".join(pieces))
        digest = draft.digest()
        name = manifest.shard_name(task.number, digest)
        if problems:
            _write_rejected(task.directory, name.removesuffix(".shard"), problems)
        draft.commit(name)
        add(done)
    except BaseException:
        draft.discard()
        raise
    info = ShardInfo(name, task.number, encoder.records, draft.size, digest, encoder.index_checksum)
    return _Built(info, encoder.blob_bytes, full_size=full_size, problems=problems)


def _resized(data: bytes, side: int, quality: int) -> tuple[bytes, str, bool]:
    """The image to pack; why it cannot be packed; whether it stays at full size, though larger."""
    from . import image

    try:
        small = image.resize_short(data, side, quality)
        if small is not None:
            return small, "", False
        return data, "", min(image._open(data, image.MAX_PIXELS).size) > side
    except DecodeError as error:
        return b"", f"cannot be resized: {error}", False


def _keep(task: _Task, name: str) -> _Built | None:
    """A finished shard, if it is whole, and holds all that the plan gives it."""
    try:
        file = local.LocalStorage(task.directory).open(name)
    except (FileNotFoundError, StorageError):
        return None
    try:
        digest = file.sha256()
        if manifest.shard_name(task.number, digest) != name:
            return None
        shard = RecordShard(file, dataset_id=task.dataset_id)
        # Left out are only files that a part was told to skip; building anew finds out again why.
        left_out: list[Problem] = []
        if not task.build:
            part = _REJECTED_PART.format(name.removesuffix(".shard"))
            left_out = _load_rejected(task.directory, part) or []
        if shard.number != task.number or len(task.keys) - shard.records != len(left_out):
            return None
        info = ShardInfo(name, task.number, shard.records, file.size, digest, shard.index_checksum)
        return _Built(info, shard.blob_bytes(), kept=True, problems=left_out)
    except (DamageError, StorageError, VersionError):
        return None
    finally:
        file.close()


# --- files of ours --------------------------------------------------------------------------------

WRITER_MAGIC = b"shardio-writer 0\n"  # a Writer's journal: this, and one line of JSON


def local_path(path: Path_) -> str:
    """A directory as it is given to the operating system. Raises OptionError for other URLs."""
    text = os.fsdecode(os.fspath(path))
    if not text:
        raise OptionError("an empty path: a variable that is not set? Expected a directory")
    storage = locate(text)
    return storage.root if "://" in text and isinstance(storage, local.LocalStorage) else text


def shard_number(name: str) -> int | None:
    """The number in a shard's file name; None when it is no shard's name."""
    number, dash, rest = name.partition("-")
    digest, _, ending = rest.partition(".")
    plain = number.isascii() and number.isdigit() and len(number) >= 5
    if not (plain and dash and ending == "shard" and len(digest) == 8):
        return None
    return int(number) if all(c in "0123456789abcdef" for c in digest) else None


def is_ours(directory: str, name: str) -> bool:
    """Whether a file is provably a temporary one of shardio: by its name and its first bytes."""
    if not local.is_temporary(name):
        return False
    # A packer that is killed between link and unlink leaves the journal under two names. Opening
    # the second would end the lock on the first.
    with contextlib.suppress(OSError):
        if os.path.samefile(os.path.join(directory, name), os.path.join(directory, JOURNAL)):
            return True
    try:
        file = locate(directory).open(name)
        start = file.read(0, min(file.size, 64))
        file.close()
    except (OSError, StorageError, DamageError):
        return False
    ours = (plan.MAGIC, WRITER_MAGIC, b'{"', b"{\n")  # journals, lists of rejected keys, manifests
    return may_be_shard(start) or any(
        start.startswith(magic) or magic.startswith(start) for magic in ours
    )


def clean(directory: str, journal: bytes) -> None:
    """Remove what only an unfinished packing needs; the journal last: it explains the rest.

    `journal` was read through its lock: opening the file again would end the lock.
    """
    drop_shards(directory, journal)
    for name in os.listdir(directory):
        if is_rejected_part(directory, name):
            local.remove(os.path.join(directory, name))
    _remove_temporaries(directory)
    local.remove(os.path.join(directory, JOURNAL))
    local.sync_directory(directory)


def writer_journal(dataset_id: bytes, before: Before) -> bytes:
    """A new journal of a Writer, unlike any other."""
    value = {"id": dataset_id.hex(), "before": before, "token": local.token()}
    return WRITER_MAGIC + json.dumps(value).encode()


def owner(journal: bytes) -> tuple[bytes, Before]:
    """Of a journal: the id of its dataset, and the shards not its own. Raises DamageError."""
    if not journal.startswith(WRITER_MAGIC):
        made = plan.parse(journal, JOURNAL)
        return made.dataset_id, made.before
    try:
        value = json.loads(journal[len(WRITER_MAGIC) :])
        return bytes.fromhex(value["id"]), dict(value["before"])
    except (KeyError, TypeError, ValueError):
        raise DamageError(f"{JOURNAL}: a Writer's journal cannot be read") from None


def is_committed(directory: str, journal: bytes) -> bool:
    """Whether the packing of a journal has its manifest, and was killed before it cleaned up."""
    try:
        dataset_id, before = owner(journal)
        made = manifest.load(locate(directory))
    except (NotPackedError, DamageError, VersionError):
        return False
    if made.dataset_id != dataset_id:
        return False
    born = shards_in(directory)
    names = (made.shard(number).name for number in range(made.shards))
    return all(name in born and born[name] != before.get(name) for name in names)


def shards_in(directory: str) -> Before:
    """All files with names of shards, and their times of change."""
    with os.scandir(directory) as entries:
        return {
            entry.name: entry.stat(follow_symlinks=False).st_mtime_ns
            for entry in entries
            if shard_number(entry.name) is not None
        }


def drop_shards(directory: str, journal: bytes) -> None:
    """Remove the shards of the packing that a journal belongs to, but those a manifest names.

    They carry its dataset's id and were not there before it. A damaged journal removes nothing.
    """
    with contextlib.suppress(DamageError, VersionError):
        dataset_id, before = owner(journal)
        named = named_shards(directory)
        for name, born in sorted(shards_in(directory).items()):
            if (
                name not in named
                and before.get(name) != born
                and shard_id(directory, name) == dataset_id
            ):
                local.remove(os.path.join(directory, name))


def named_shards(directory: str) -> set[str]:
    """Names of the shards of the dataset that is committed here, if one is. Raises DamageError."""
    try:
        made = manifest.load(locate(directory))
    except NotPackedError:
        return set()
    return {made.shard(number).name for number in range(made.shards)}


def shard_id(directory: str, name: str) -> bytes | None:
    """The dataset id in a shard's header; None when the file is not one of our shards."""
    try:
        file = locate(directory).open(name)
        try:
            return RecordShard(file).dataset_id
        finally:
            file.close()
    except (OSError, StorageError, DamageError, VersionError):
        return None


def _write_rejected(directory: str, name: str, problems: Sequence[Problem]) -> None:
    local.write_file(directory, _REJECTED_PART.format(name), _dump_rejected(problems))


def _dump_rejected(problems: Sequence[Problem]) -> bytes:
    lines = [json.dumps({"key": os.fsdecode(key), "reason": why}) for key, why in problems]
    return "".join(f"{line}\n" for line in lines).encode()


def _load_rejected(directory: str, name: str) -> list[Problem] | None:
    """What a file of rejected keys lists; None when there is none. Raises DamageError."""
    try:
        lines = locate(directory).read(name, 1 << 30).splitlines()
        return [(os.fsencode(entry["key"]), entry["reason"]) for entry in map(json.loads, lines)]
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError):
        raise DamageError(f"{printable(directory)}/{name}: not a list of rejected keys") from None


def remove_rejected(directory: str) -> None:
    """Remove the list of rejected keys, if it is one."""
    with contextlib.suppress(DamageError):
        if _load_rejected(directory, REJECTED) is not None:
            local.remove(os.path.join(directory, REJECTED))


def is_rejected_part(directory: str, name: str) -> bool:
    """Whether a file is the list of what one part left out."""
    start, end = _REJECTED_PART.split("{}")
    if not (name.startswith(start) and name.endswith(end)):
        return False
    try:
        return _load_rejected(directory, name) is not None
    except (DamageError, StorageError):
        return False


def _remove_temporaries(directory: str, token: str | None = None) -> None:
    """Temporary files of one process, or of all; the caller knows that they are at an end."""
    for name in os.listdir(directory):
        if is_ours(directory, name) and (token is None or f"-{token}-" in name):
            local.remove(os.path.join(directory, name))


# --- checks ---------------------------------------------------------------------------------------


_mine: set[tuple[int, int, int]] = set()  # device and inode of journals this process has locked
_guard = threading.Lock()


class _Lock(local.RangeLock):
    """A lock that this process takes once: record locks are blind to their own process.

    A second one would succeed, and end both when it is closed.
    """

    __slots__ = ("_name", "_noted")

    def __init__(self, path: str, start: int, stop: int | None) -> None:
        self._noted, self._descriptor = False, -1
        status = os.stat(path)
        self._name = (status.st_dev, status.st_ino, os.getpid())
        with _guard:
            if self._name in _mine:
                raise BlockingIOError(errno.EAGAIN, path)
            _mine.add(self._name)
            self._noted = True
        try:
            super().__init__(path, start, stop)
            if os.fstat(self._descriptor).st_ino != status.st_ino:
                raise FileNotFoundError(path)  # replaced between the two
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        super().release()
        if self._noted:
            self._noted = False
            _mine.discard(self._name)


def lock(directory: str, start: int = 0, stop: int | None = None) -> local.RangeLock:
    """Lock shards of the packing in a directory.

    Raises BusyError, FileNotFoundError (no packing is here), StorageError.
    """
    try:
        return _Lock(os.path.join(directory, JOURNAL), start, stop)
    except BlockingIOError:
        raise BusyError(
            f"{printable(directory)}: another shardio process is packing here; wait for it, or "
            "choose another directory. Nothing was touched"
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(directory) from None
    except OSError as error:
        raise StorageError(f"{printable(directory)}: cannot be locked: {error.strerror}") from None


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[local.RangeLock]:
    """Lock a whole packing."""
    held = lock(directory)
    try:
        yield held
    finally:
        held.release()


def _refuse_if_busy(directory: str, part: tuple[int, int] | None) -> None:
    """Say so at once, before the source is listed, which may take minutes."""
    if part is None:
        with contextlib.suppress(FileNotFoundError), _locked(directory):
            pass


def _check_options(
    shard_size: int | None,
    max_records: int | None,
    seed: int,
    part: tuple[int, int] | None,
    resize: int | None,
    quality: int,
    on_error: str,
) -> None:
    for name, value in (
        ("shard_size", shard_size),
        ("max_records", max_records),
        ("resize", resize),
    ):
        if value is not None and not 1 <= value < 1 << 62:
            raise OptionError(f"{name} is {value}; expected 1 or more")
    if max_records is not None and max_records > MAX_RECORDS:
        raise OptionError(f"max_records is {max_records}; a shard holds at most {MAX_RECORDS:,}")
    if not 1 <= quality <= 100:
        raise OptionError(f"quality is {quality}; expected 1 to 100")
    if not 0 <= seed < 1 << 64:
        raise OptionError(f"seed is {seed}; expected 0 to 2**64 - 1")
    if on_error not in ("raise", "skip"):
        raise OptionError(f"on_error is {on_error!r}; expected 'raise' or 'skip'")
    if part is not None and not 1 <= part[0] <= part[1]:
        last = max(part[1], 1)
        raise OptionError(
            f"part {part[0]}/{part[1]}: parts count from 1, so from 1/{last} to {last}/{last}"
        )


def _check_apart(source: bytes, out: str) -> None:
    folder, target = os.path.realpath(os.fsdecode(source)), os.path.realpath(out)
    if f"{target}/".startswith(f"{folder.rstrip('/')}/"):
        raise OptionError(
            f"{printable(out)}: OUT lies in the folder to be packed; choose a directory outside "
            "of it"
        )


def _check_directory(out: str) -> None:
    if os.path.lexists(out) and not os.path.isdir(out):
        raise OptionError(f"{printable(out)}: expected a directory, or nothing yet; this is a file")


def _check_kind(out: str, names: Sequence[str]) -> None:
    """A directory holds one dataset or the splits of one, never both."""
    storage = locate(out)
    if names == [""] and storage.exists(manifest.SPLITS):
        raise ExistsError(f"{printable(out)}: splits are packed here; choose another directory")
    if names != [""] and (storage.exists(manifest.MANIFEST) or storage.exists(JOURNAL)):
        raise ExistsError(
            f"{printable(out)}: one dataset is packed here, and splits are to be; choose another "
            "directory"
        )


def _classes_of(other: str) -> tuple[str, ...]:
    storage = locate(other)
    splits = manifest.load_splits(storage)
    there = manifest.load(locate(os.path.join(other, splits[0])) if splits else storage)
    if there.classes is None:
        raise OptionError(f"--classes {printable(other)}: that dataset has no classes")
    return there.classes


def _planned_splits(out: str) -> list[str]:
    """The splits that parts were built of under OUT."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in sorted(os.listdir(out)):
            folder = os.path.join(out, name)
            if not os.path.isdir(folder):
                continue
            with contextlib.suppress(FileNotFoundError, NotPackedError):
                if os.path.exists(os.path.join(folder, JOURNAL)):
                    with _locked(folder) as held:
                        journal = _journal_of_parts(held, folder)
                    options = plan.parse(journal, folder).header["options"]
                else:
                    options = manifest.load(locate(folder)).options
                if options.get("split") == name:
                    return list(options["splits"])
    return []


def _splits_file(out: str, names: Sequence[str]) -> bytes:
    found = [manifest.load(locate(os.path.join(out, name))).classes for name in names]
    classes = next((classes for classes in found if classes is not None), None)
    return manifest.dump_splits(names, classes)


def _has_splits(out: str, names: Sequence[str]) -> bool:
    """Whether shardio.json is there, and right."""
    try:
        return locate(out).read(manifest.SPLITS, 1 << 30) == _splits_file(out, names)
    except (FileNotFoundError, DamageError):
        return False


def _commit_splits(out: str, names: Sequence[str]) -> None:
    if not _has_splits(out, names):
        for name in os.listdir(out):  # of a packer that was killed right here
            if name.endswith(f"-{manifest.SPLITS}.tmp") and is_ours(out, name):
                local.remove(os.path.join(out, name))
        local.write_file(out, manifest.SPLITS, _splits_file(out, names))


def _journal_of_parts(held: local.RangeLock, folder: str) -> bytes:
    journal = held.read()
    if journal.startswith(WRITER_MAGIC):
        raise NotPackedError(
            f"{printable(folder)}: not packed: a Writer ended here before its stream did; write "
            "it again"
        )
    return journal


def _share(shards: int, part: tuple[int, int] | None) -> tuple[int, int]:
    """The shards [start, stop) of a part."""
    if part is None:
        return 0, shards
    i, n = part
    return shards * (i - 1) // n, shards * i // n


def _size(directory: str, name: str) -> int | None:
    try:
        return os.stat(os.path.join(directory, name)).st_size
    except OSError:
        return None


def _under(split: str, key: bytes) -> bytes:
    return os.fsencode(split) + b"/" + key if split else key


def _explain(problems: Sequence[Problem], source: str) -> str:
    return (
        f"{printable(source)}: {len(problems):,} files cannot be packed, so nothing was "
        "committed:\n"
        f"{sources.listed(sorted(problems))}\n"
        "Mend or remove them and run it again, or leave them out with --on-error skip"
    )
