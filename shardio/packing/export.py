"""Packed datasets as files of other formats: what their own readers read.

    export("packed/", "wds/", format="webdataset")

Records are read and checked in storage order, and written one by one by the format's target.
All files are written into a hidden folder within the directory, and take their names when the last
of them is complete: an export that fails leaves nothing. One that is killed while they take their
names is gone on with by the same call; a receipt tells (receipt.py). A part of a job array leaves
its hidden folder for the last call (export_parts.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._version import __version__
from ..dataset import sequence
from ..dataset.sequence import ShardSequence
from ..errors import ExistsError, OptionError, printable, there_are
from ..formats import exporter, manifest
from ..formats.foreign.writer import ExportSpec, Field, FormatWriter, RestartExport
from ..formats.manifest import Manifest
from ..machine import processors
from ..names import KEY, file_name, from_file_name, key_bytes
from ..storage import local
from ..storage.base import Location
from ..storage.local import LocalDirectory
from ..storage.location import local_path, locate
from ..storage.lock import JOURNAL
from ..storage.options import Storage, with_root
from ..storage.staging import Staging, refuse_taken
from ..units import check_bool, check_size, show_count, show_size
from . import export_parts, receipt
from .export_parts import Written
from .parts import Announce, PartOptions, show_closing
from .process_pool import Executor, Progress, Report, check_executor, run
from .receipt import Receipt

Fields = Mapping[str, str | None] | Sequence[str]
_BESIDE = (receipt.NAME, JOURNAL)  # may lie in the directory
_OWN = {*_BESIDE, export_parts.NOTE}


@dataclass
class Exported:
    """The result of one call of `export`; as str, a summary of lines."""

    out: str
    format: str
    records: int = 0
    without: int = 0  # records of which nothing was written: their fields are None
    files: int = 0
    bytes: int = 0
    removed: int = 0  # files of an older and longer export
    fields: dict[str, str] = field(default_factory=dict)  # and what they are called there
    notes: list[str] = field(default_factory=list)  # what is not as it was
    part: tuple[int, int] | None = None  # which part was written, and of how many; None: all

    def __repr__(self) -> str:
        out = f"; {self.without:,} left out" if self.without else ""
        return f"<{str(self).splitlines()[0]}{out}>"

    def __str__(self) -> str:
        called = (f"{printable(name)} as {printable(its)}" for name, its in self.fields.items())
        records, files = show_count(self.records, "record"), show_count(self.files, "file")
        lines = [
            f"{printable(self.out)}: {self.format}: {records} in {files}, {show_size(self.bytes)}",
            f"fields: {', '.join(called)}",
            *(printable(note, 4096) for note in self.notes),
        ]
        if self.without:
            without = show_count(self.without, "record")
            lines.append(f"{without} without anything that could be written")
        if self.removed:
            lines.append(f"removed: {show_count(self.removed, 'file')} of an older export")
        if self.part is not None:
            lines.append(show_closing(self.part, "exported"))
        return "\n".join(lines)


def export(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    format: str,
    fields: Fields | None = None,
    shard_size: int | str | None = None,
    keys: str = "own",
    root: str | os.PathLike[str] | None = None,
    storage: Storage | None = None,
    overwrite: bool = False,
    executor: Executor | None = None,
    part: tuple[int, int] | str | None = None,
    parts: int | None = None,
    stagger_s: float = 0.0,
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> Exported:
    """Write a dataset, or all its splits, in another format into a directory.

    path        of the dataset, or its URL
    format      webdataset, tfrecord, recordio, mds, lmdb-caffe, parquet or imagefolder
    fields      only these, or {name: what it is called there, or None}; default: all fields
    shard_size  bytes of a file, or like "256MiB"; default: what is usual in the format
    keys        "own", or "number": records are named by their numbers
    root        where the data lies, when `shardio index --out` put its index elsewhere
    storage     a shardio.Storage: how an object store is reached
    overwrite   replace the files of an earlier export
    executor    a shardio.RayExecutor: a cluster that writes a part for each shard of the dataset
    part        (i, n) or "i/n", i from 1 to n: write only this part of the records, into a hidden
                folder; when all are written, the same call without it moves them into place.
                "auto": the part that SLURM, torchrun or Kubernetes gives this process
    parts       the number of parts, if part is "auto": Kubernetes does not say it
    stagger_s   wait first, for a random time up to so many seconds
    progress    called with records written, and of how many
    announce    called with lines to show before the work begins: which part this is

    The directory must be empty, unless `overwrite` replaces the files of an earlier export. Files
    of that export that the new one does not have are removed. Files with names of this format that
    no export wrote are refused. Raises ExistsError, NotPackedError,
    DamageError, OptionError (a field or key that the format cannot hold), SampleError (a value that
    it cannot hold), DependencyError, StorageError; then nothing was written.
    """
    check_bool(overwrite=overwrite)
    check_executor(executor)
    chosen = PartOptions(part=part, parts=parts, stagger_s=stagger_s).begun(announce)
    options, target = with_root(storage, root), local_path(directory)
    kind = exporter(format)
    if not kind.shards and (chosen.chosen is not None or executor is not None):
        what = "part" if executor is None else "executor"
        raise OptionError(f"{what} is given, but {format} has no shards to share out: leave it out")
    if executor is not None and chosen.chosen is not None:
        raise OptionError("executor is given, which writes all parts: leave part out")
    if keys not in ("own", "number"):
        raise OptionError(f"keys is {keys!r}: expected 'own' or 'number'")
    if shard_size is not None:
        if not kind.shards:
            raise OptionError(f"shard_size: {format} has no shards; leave it out")
        shard_size = check_size("shard_size", shard_size)
    datasets = _opened(locate(path, options), target, options, kind)
    selected = {name: _fields(one.manifest, fields, kind, format) for name, one in datasets.items()}
    by_number = keys == "number"
    request = _Request(target, format, kind, datasets, selected, shard_size, by_number, progress)
    what, before = request.seal(), receipt.load(target)
    if overwrite and kind.own_files is not None:
        _refuse_others(target, _places(kind, datasets), kind.own_files, before)
    if chosen.chosen is None:
        if executor is not None:
            call: dict[str, Any] = {"format": format, "fields": fields, "keys": keys}
            call |= {"shard_size": shard_size, "root": root, "storage": storage}
            again = functools.partial(export, path, target, overwrite=overwrite, **call)
            _export_elsewhere(request, what, executor, again)
        begun = export_parts.begun(target, what)
        with export_parts.owned(target, what, None, begun):
            return _export(request, what, before, overwrite, begun)
    resumed = not before.complete and before.what == what
    if not (overwrite or resumed):
        refuse_taken(target, _BESIDE)
    with export_parts.owned(target, what, chosen.chosen):
        return _export_part(request, what, chosen)


def _export(request: _Request, what: str, before: Receipt, overwrite: bool, parts: int) -> Exported:
    """Write all files, or join those that parts wrote, if any did, and give them their names."""
    target, kind = request.target, request.kind
    resumed = not before.complete and before.what == what
    while True:
        done = Exported(target, request.format)
        staging = Staging(target, replace=overwrite or resumed, beside=_BESIDE)
        try:
            if parts:
                _join_parts(request, what, parts, staging.path, done)
            else:
                _write(request, staging.path, done, PartOptions())
            kind.describe(staging.path)
            written = _files(staging.path)
            done.files, done.bytes = len(written), sum(written.values())
            listed = written if kind.own_files is not None or resumed else ()
            note = receipt.of_files(what, staging.path, listed)
            begun = note.begun(os.path.basename(staging.path), before)
            if resumed and not overwrite:
                _refuse_mixed(target, written, begun)
            begun.save(target)
            staging.commit()
            break
        except RestartExport:
            continue
        finally:
            staging.discard()
    if overwrite:
        done.removed = _remove_older(target, before, written)
    if kind.own_files is None:
        local.remove(os.path.join(target, receipt.NAME))
    else:
        note.save(target)
    export_parts.remove(target, what, parts)
    if local.is_temporary(before.staging):  # what a kill left there
        shutil.rmtree(os.path.join(target, before.staging), ignore_errors=True)
    done.notes += _notes(request, written, overwrite)
    return done


@dataclass(frozen=True)
class _Request:
    """What is to be exported, and how."""

    target: str
    format: str
    kind: type[FormatWriter]
    datasets: Mapping[str, ShardSequence]  # by split
    fields: Mapping[str, tuple[list[Field], Field | None]]  # fields of each, and its key
    shard_size: int | None
    numbered: bool
    progress: Progress | None
    learned: dict[str, str] = field(default_factory=dict)  # what `RestartExport` was raised for

    def seal(self) -> str:
        """Return what tells this export from others, so that a killed one is gone on with."""
        keys = "number" if self.numbered else "own"
        values = (__version__, self.format, self.shard_size, keys, self.fields)
        seal = hashlib.sha256(repr(values).encode())
        for name, dataset in self.datasets.items():
            seal.update(key_bytes(name) + b"\0" + hashlib.sha256(dataset.manifest.dump()).digest())
        return seal.hexdigest()[:32]


def _places(kind: type[FormatWriter], splits: Iterable[str]) -> set[str]:
    """Return the folders that an export writes into, below its directory."""
    places = set(map(kind.split_folder, splits))
    # Where a split has no folder of its own, a file at the top describes them all.
    return places | {""} if kind.split_folder("") else places


def _opened(
    source: Location, target: str, options: Storage, kind: type[FormatWriter]
) -> dict[str, ShardSequence]:
    """Open all splits of a dataset. Raises OptionError where it lies in the target itself."""
    indexes = manifest.datasets_in(source)
    datasets = {name: sequence.stored_in(index, options) for name, index in indexes.items()}
    own = {one.root for one in (source, *indexes.values()) if isinstance(one, LocalDirectory)}
    for dataset in datasets.values():
        data = dataset.reader.storage
        if isinstance(data, LocalDirectory):
            names = dataset.manifest.names or ("",)
            own |= {os.path.join(data.root, file_name(os.path.dirname(one))) for one in names}
    places = {"", *indexes, *_places(kind, indexes)}
    into = {os.path.realpath(manifest.split_folder(target, name)) for name in places}
    if into & set(map(os.path.realpath, own)):
        raise OptionError(f"{printable(target)}: the dataset is there itself; choose another one")
    return datasets


def _write(request: _Request, path: str, done: Exported, chosen: PartOptions) -> None:
    """Write all splits, or a part of each, into a folder. Raises RestartExport, to begin anew."""
    rows = {split: chosen.shards_of(len(one)) for split, one in request.datasets.items()}
    total = sum(map(len, rows.values()))
    for split, dataset in request.datasets.items():
        folder = manifest.split_folder(path, request.kind.split_folder(split))
        local.make_directory(folder)
        shown, key = request.fields[split]
        # By URL each key would be a request; a failed export leaves nothing, whenever it fails.
        unknown = request.numbered or dataset.reader.storage.remote
        keys = list if unknown else dataset.stored_keys
        target = request.kind(
            ExportSpec(
                folder,
                dataset.manifest,
                shown,
                key,
                request.shard_size,
                keys,
                request.learned,
                split,
            )
        )
        own = rows[split]
        with contextlib.closing(target):
            if chosen.chosen is not None and len(dataset):
                target.begin(dataset[0])
            for number, sample in zip(own, dataset[own.start : own.stop], strict=True):
                if request.numbered:
                    sample[KEY] = b"%08d" % number
                if target.add(number, sample):
                    done.records += 1
                else:
                    done.without += 1
                if request.progress is not None:
                    request.progress(done.records + done.without, total)
            target.finish()
        done.fields |= target.exported_names
        done.notes += [note for note in target.notes if note not in done.notes]


# --- parts ----------------------------------------------------------------------------------------


def _export_elsewhere(
    request: _Request, what: str, executor: Executor, write: Callable[..., Exported]
) -> None:
    """Have the executor write all parts: one for each shard, or those that were begun.

    write: this very export.
    """
    shards = max(one.manifest.shards for one in request.datasets.values())
    parts = export_parts.begun(request.target, what) or shards
    report = Report(request.progress, sum(map(len, request.datasets.values())))
    tasks = [(number, parts) for number in range(1, parts + 1)]
    work = functools.partial(_write_one, write)
    for _ in run(work, tasks, jobs=processors(), report=report, executor=executor):
        pass


def _write_one(
    write: Callable[..., Exported], part: tuple[int, int], add: Callable[[int], None]
) -> None:
    """Write a part, on a node."""
    done = write(part=part)
    add(done.records + done.without)


def _export_part(request: _Request, what: str, chosen: PartOptions) -> Exported:
    """Write the files of a part into its folder, unless they are there."""
    assert chosen.chosen is not None
    name = export_parts.folder_name(what, chosen.chosen)
    folder = os.path.join(request.target, name)
    written = export_parts.load(folder)
    if written is None:
        written = _write_part(request, name, chosen)
    done = Exported(request.target, request.format, part=chosen.chosen)
    _add(done, written)
    done.files, done.bytes = len(written.files), sum(written.files.values())
    return done


def _write_part(request: _Request, name: str, chosen: PartOptions) -> Written:
    """Write the files of a part into the folder of this name, anew."""
    shutil.rmtree(os.path.join(request.target, name), ignore_errors=True)
    while True:
        done = Exported(request.target, request.format)
        staging = Staging(request.target, replace=True, name=name)
        try:
            _write(request, staging.path, done, chosen)
            learned, files = dict(request.learned), _files(staging.path)
            counts = done.records, done.without
            written = Written(*counts, done.fields, done.notes, learned, files)
            export_parts.save(staging.path, written)
            return written
        except RestartExport:
            staging.discard()
        except BaseException:
            staging.discard()
            raise


def _join_parts(request: _Request, what: str, parts: int, path: str, done: Exported) -> None:
    """Put the files of all parts into a folder, under their numbers.

    Parts are written that nobody wrote, or that did not know what others learned.
    """
    options = [PartOptions(part=(number, parts)) for number in range(1, parts + 1)]
    names = [export_parts.folder_name(what, (number, parts)) for number in range(1, parts + 1)]
    folders = [os.path.join(request.target, name) for name in names]
    found = [export_parts.load(folder) for folder in folders]
    for one in found:
        request.learned.update({} if one is None else one.learned)
    at = 0
    while at < parts:
        one = found[at]
        if one is None or one.learned != request.learned:
            before = dict(request.learned)
            one = found[at] = _write_part(request, names[at], options[at])
            if before != request.learned:
                at = -1  # look at all of them again
        at += 1
    for one in found:
        assert one is not None
        _add(done, one)
    for split in request.datasets:
        place = request.kind.split_folder(split)
        into = manifest.split_folder(path, place)
        local.make_directory(into)
        request.kind.join([manifest.split_folder(one, place) for one in folders], into, split)
        local.sync_directory(into)


def _add(done: Exported, written: Written) -> None:
    """Add what a part wrote to what is done."""
    for name, called in written.fields.items():
        known = done.fields.get(name) if done.records else None
        if known is not None and written.records and known != called:  # by what is in the files
            called = "/".join(sorted({*known.split("/"), *called.split("/")}))
        if known is None or written.records:
            done.fields[name] = called
    done.records += written.records
    done.without += written.without
    done.notes += [note for note in written.notes if note not in done.notes]


def _notes(request: _Request, written: Mapping[str, int], overwrite: bool) -> Iterator[str]:
    """Say what is not as it was, and what lies beside the files that were written."""
    target = request.target
    named = any(one.manifest.classes for one in request.datasets.values())
    if not request.kind.keeps_classes and named:
        yield "names of classes are not kept: the format has no place for them"
    if os.path.lexists(os.path.join(target, manifest.MANIFEST)):
        yield (
            f"{printable(target)} has an index of what was there before; `shardio index "
            "--overwrite` makes it anew"
        )
    shards = request.kind.shards
    if overwrite and not shards and (others := _files(target).keys() - written.keys()):
        yield (
            f"still in {printable(target)}: {show_count(len(others), 'file')} from before, such as "
            f"{printable(min(others))}; readers take them for files of this export"
        )


def _refuse_mixed(target: str, written: Collection[str], begun: Receipt) -> None:
    """Raise ExistsError where an interrupted export left a directory that others wrote to."""
    for path in sorted(_files(target)):
        if path not in written or not begun.vouches(target, path):
            raise ExistsError(
                f"{printable(target)}: an export was interrupted here, and {printable(path)} is "
                "none of its files, or was changed since; move it away, or choose another "
                "directory"
            )


def _fields(
    source: Manifest, wanted: Fields | None, kind: type[FormatWriter], format: str
) -> tuple[list[Field], Field | None]:
    """Return the fields to be written, and the key where it is to be one. Raises OptionError."""
    kinds = dict(source.schema.fields)
    if wanted is None:
        rest = [Field(name, its) for name, its in kinds.items() if name != KEY]
        return rest, Field(KEY, "key") if kind.keyed else None
    if isinstance(wanted, str):
        raise OptionError(f"fields is {wanted!r}: expected a list of names, or a dict")
    names = wanted if isinstance(wanted, Mapping) else dict.fromkeys(wanted)
    if unknown := [name for name in names if name not in kinds]:
        raise OptionError(
            f"{source.where}: no field is called {printable(str(unknown[0]))!r}; "
            f"{there_are(kinds, str(unknown[0]))}"
        )
    if KEY in names and not kind.keyed:
        raise OptionError(
            f"{KEY} is no field in {format}, where records have names or numbers; leave it out"
        )
    found = [Field(name, kinds[name], theirs) for name, theirs in names.items()]
    key = next((one for one in found if one.name == KEY), None)
    return [one for one in found if one.name != KEY], key


def _files(folder: str) -> dict[str, int]:
    """Return the files below a folder, but shardio's own, by their paths, and their units."""
    found = {}
    for top, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not local.is_temporary(name)]
        for name in names:
            path = os.path.join(top, name)
            if name not in _OWN and not local.is_temporary(name):
                found[from_file_name(os.path.relpath(path, folder))] = os.lstat(path).st_size
    return found


def _refuse_others(
    target: str, splits: Iterable[str], ours: re.Pattern[str], before: Receipt
) -> None:
    """Raise ExistsError for files called like those of this format that no export wrote here."""
    others = []
    for split in splits:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in sorted(os.listdir(manifest.split_folder(target, split))):
                path = f"{split}/{name}" if split else name
                if ours.fullmatch(name) and not before.vouches(target, path):
                    others.append(path)
    if others:
        raise ExistsError(
            f"{printable(target)}: {show_count(len(others), 'file')} would be replaced or removed "
            f"that no export wrote here, or that changed since ({receipt.NAME} lists what it "
            f"wrote): {', '.join(map(printable, others[:10]))}{', ...' if others[10:] else ''}. "
            "Move them away, or choose another directory. Nothing was touched"
        )


def _remove_older(target: str, before: Receipt, written: Mapping[str, int]) -> int:
    """Remove the files of an older export that the new one does not have; return how many."""
    removed = 0
    for path in sorted(before.files.keys() - written.keys()):
        if before.vouches(target, path):
            local.remove(os.path.join(target, file_name(path)))
            removed += 1
    return removed
