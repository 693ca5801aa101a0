"""A dataset copied between disks and object stores, byte for byte: its shards, then its manifest.

How it works. Every file is named by a manifest, with its size and its SHA-256 (indexes of foreign
shards: with a checksum of their own). It is compared on the way, and takes its name only when it is
right. The manifest is copied last, so that nobody finds half a dataset. Run again, a copy goes on
where it was: what is there and right is kept.

What is there is read back, and hashed. In an object store this would cost as much as copying, so
the hash that a copy notes with each object is trusted; `recheck` reads those, too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import DamageError, ExistsError, OptionError, printable
from ..formats import manifest
from ..formats.base import known_file
from ..formats.foreign.base import read_sidecar, sidecar_checksum
from ..formats.manifest import MANIFEST, SPLITS, Manifest
from ..formats.overlay import files_of_shard
from ..formats.version import dump_excluded, load_excluded, load_sources
from ..names import file_name
from ..storage import local
from ..storage.base import File, KnownFile, Location, path_in
from ..storage.client import Reply, Request
from ..storage.local import LocalDirectory
from ..storage.location import Target, locate, locate_target
from ..storage.lock import JOURNAL
from ..storage.options import Storage
from ..storage.remote import RemoteLocation
from ..storage.upload import DIFFERS, Upload
from ..units import Summary, check_bool, check_group, check_int, show_count, show_size
from . import output_dir
from .objects import LOOKS, each, looked
from .options import PathLike
from .parts import Announce, PartOptions, show_closing
from .process_pool import Executor, Progress, Report, check_executor, run

JOBS = 4  # uploads at once, each of 4 parts: 200 MB of memory
_PIECE = 8 << 20  # bytes that are read, hashed and written at a time
_AGAIN = 3  # times that a file that came damaged from a store is read anew
_AHEAD = 64 << 20  # bytes of the next file that are asked for, while the one before is copied


@dataclass(repr=False)
class Copied(Summary):
    """The result of one call of `copy`; as str, a summary."""

    out: str
    files: int = 0  # of all datasets, manifests included
    bytes: int = 0
    kept: int = 0  # files that were there already
    copied: int = 0
    copied_bytes: int = 0
    replaced: bool = False  # another dataset, whose shards are still there
    seconds: float = 0.0
    part: tuple[int, int] | None = None  # which part was copied, and of how many; None: all

    def __str__(self) -> str:
        what = f"{show_count(self.files, 'file')}, {show_size(self.bytes)}"
        rate = self.copied_bytes / max(self.seconds, 1e-9) / 1e6
        lines = [
            f"{printable(self.out, 4096)}: {what}: {self.copied:,} copied, {self.kept:,} kept from "
            f"before, in {self.seconds:.1f} s, {rate:,.0f} MB/s"
        ]
        if self.part is not None:
            lines.append(show_closing(self.part, "copied"))
        if self.replaced:
            lines.append("another dataset was replaced there; files that were its alone are left")
        return "\n".join(lines)


class _Item(NamedTuple):
    """One file that is to be there."""

    name: str
    size: int
    sha256: bytes
    data: bytes | None  # of a small file; None: it is read from the source
    known: KnownFile | None
    ours: bool  # its name is of its content, so that another file of this name is damaged


class _Work(NamedTuple):
    """One dataset, or the file that names the splits, and where it goes."""

    items: list[_Item]
    last: _Item  # the manifest, or shardio.json
    root: Location  # of the data
    target: Target
    dataset_id: bytes  # b"" of the splits
    shards: range | None  # that a part copies; None: all, and the manifest


def copy(
    source: PathLike,
    target: PathLike,
    *,
    storage: Storage | None = None,
    to: Storage | None = None,
    overwrite: bool = False,
    recheck: bool = False,
    jobs: int = JOBS,
    executor: Executor | None = None,
    part: tuple[int, int] | str | None = None,
    parts: int | None = None,
    stagger_s: float = 0.0,
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> Copied:
    """Copy a dataset, or all its splits, to another directory or object store.

    source     the packed or indexed directory, or its URL
    target     a directory, or an s3://, gs:// or az:// URL
    storage    a shardio.Storage: how the source is reached, and where its data lies, when
               `shardio index --out` put its index elsewhere; the copy has both in one place
    to         a shardio.Storage: how the target is reached; default: as the source, if that has the
               same scheme, or is no URL
    overwrite  replace another dataset there; its shards stay
    recheck    read back the objects that are in an object store already, instead of trusting the
               SHA-256 that an earlier copy stored with them
    jobs       uploads at once; default 4
    executor   a shardio.RayExecutor: a cluster that copies the files
    part       (i, n) or "i/n", i from 1 to n: copy only this part of the shards, and no manifest;
               when all are copied, call it again without it. "auto": the part that SLURM, torchrun
               or Kubernetes gives this process
    parts      the number of parts, if part is "auto": Kubernetes does not say it
    stagger_s  wait first, for a random time up to so many seconds
    progress   called now and then with bytes done and bytes in all
    announce   called with lines to show before the work begins: which part this is

    Run again after an interruption, it resumes. Raises DamageError (the source is damaged: the
    damaged file is not written, and no manifest), NotPackedError,
    ExistsError, BusyError, OptionError, StorageError.
    """
    check_bool(overwrite=overwrite, recheck=recheck)
    check_executor(executor)
    jobs = check_int("jobs", jobs)
    chosen = PartOptions(part=part, parts=parts, stagger_s=stagger_s).begun(announce)
    began = time.monotonic()
    here = check_group("storage", storage, Storage)
    index, into = locate(source, here), locate_target(target, to, source, here)
    root = None if here.root is None else locate(here.root, here)
    work = list(_work_of(index, root, into, chosen))
    _refuse_itself([index, *([] if root is None else [root])], into)
    output_dir.refuse_images(into)
    done = Copied(into.url, part=chosen.chosen)
    for one in work:  # all of them, before any is touched
        done.replaced |= _refuse_other(one, overwrite) and one.shards is None
    files = [item for one in work for item in (*one.items, *([one.last] * (one.shards is None)))]
    done.files, done.bytes = len(files), sum(item.size for item in files)
    count = _Count(done, progress)
    how = _CopyOptions(overwrite, recheck, jobs, executor)
    for one in work:
        _copy_dataset(one, how, count)
    done.seconds = time.monotonic() - began
    return done


class _CopyOptions(NamedTuple):
    """How files are written."""

    overwrite: bool
    recheck: bool
    jobs: int
    executor: Executor | None


class _Count:
    """What is done, for the result and for `progress`."""

    def __init__(self, done: Copied, progress: Progress | None) -> None:
        self._done, self._progress, self._bytes = done, progress, 0

    def keep(self, item: _Item) -> None:
        """Count a file that is there already."""
        self._done.kept += 1
        self.add(item.size)

    def finish(self, item: _Item) -> None:
        """Count a file that was copied, but for its bytes."""
        self._done.copied += 1
        self._done.copied_bytes += item.size

    def add(self, count: int) -> None:
        """Count bytes."""
        self._bytes += count
        if self._progress is not None:
            self._progress(self._bytes, self._done.bytes)


# --- from what is asked for to a list of files ----------------------------------------------------


def _work_of(
    index: Location, root: Location | None, into: Target, chosen: PartOptions
) -> Iterator[_Work]:
    """Yield the datasets that are to be copied, and what names them as splits, last."""
    splits = manifest.load_splits(index)
    for name in splits or [""]:
        source, target = (index.below(name), into.below(name)) if name else (index, into)
        found, data = _manifest(source)
        shards = chosen.shards_of(found.shards)
        items = list(_items(found, source, root or source, shards))
        ours = None if chosen.chosen is None else shards
        yield _Work(items, _small(MANIFEST, data), root or source, target, found.dataset_id, ours)
    if splits is not None and chosen.chosen is None:
        data = index.read(SPLITS, manifest.MAX_SPLITS)
        yield _Work([], _small(SPLITS, data), index, into, b"", None)


def _manifest(source: Location) -> tuple[Manifest, bytes]:
    """Read a manifest, and its bytes. Raises as `manifest.load`."""
    with contextlib.suppress(FileNotFoundError, DamageError):
        data = source.read(MANIFEST, manifest.MAX_MANIFEST)
        return manifest.parse(data, f"{source.url.rstrip('/')}/{MANIFEST}"), data
    found = manifest.load(source)  # says what is there instead
    return found, found.dump()


def _small(name: str, data: bytes) -> _Item:
    return _Item(name, len(data), hashlib.sha256(data).digest(), data, None, False)


def _small_of(index: Location, item: _Item) -> _Item:
    """Return a file that lies beside the manifest as its bytes. Raises DamageError."""
    with contextlib.closing(index.open(item.name, item.known)) as file:
        data = file.read(0, file.size)
    if hashlib.sha256(data).digest() != item.sha256:
        raise DamageError(
            f"{path_in(index, item.name)}: it is not the file that the manifest names"
        )
    return item._replace(data=data)


def _items(found: Manifest, index: Location, root: Location, shards: range) -> Iterator[_Item]:
    """Yield shards of a dataset, which are in `root`, and the indexes of foreign ones."""
    if found.format == "imagefolder":
        raise OptionError(
            f"{found.where}: an index of a folder of images; its files are copied by any tool, and "
            "`shardio pack` makes shards of them"
        )
    if found.names and not root.exists(found.names[0]):
        raise DamageError(found.missing(found.shard(0), index, root))
    if found.excluded is not None:
        data = dump_excluded(found.dataset_id, load_excluded(index, found))[1]
        yield _small(found.excluded.name, data)._replace(ours=True)
    if found.sources is not None and (notes := load_sources(index, found)) is not None:
        yield _small(found.sources.name, notes.dump(found.dataset_id)[1])._replace(ours=True)
    opening = found.opening(index)
    for info in map(found.shard, shards):
        for _, here, beside in files_of_shard(opening, info.number):
            known = known_file(here, beside)
            one = _Item(beside.name, beside.size, beside.sha256, None, known, True)
            # What is copied as a file lies with the shards.
            yield one if root is index else _small_of(index, one)
        known = known_file(opening, info)
        yield _Item(info.name, info.size, info.sha256, None, known, found.names is None)
        if found.names is not None:
            name, data = read_sidecar(index, info)
            if sidecar_checksum(data) != info.index_checksum:
                raise DamageError(
                    f"{index.url.rstrip('/')}/{name}: it is not the index that the manifest names"
                )
            yield _small(name, data)._replace(ours=True)


def _refuse_itself(sources: Iterable[Location], into: Target) -> None:
    for one in sources:
        same = one.url.rstrip("/") == into.url.rstrip("/")
        if isinstance(one, LocalDirectory) and isinstance(into, LocalDirectory):
            same = os.path.realpath(one.root) == os.path.realpath(into.root)
        if same:
            raise OptionError(f"{into.url}: the dataset is there itself; choose another place")


def _refuse_other(one: _Work, overwrite: bool) -> bool:
    """Raise ExistsError where another dataset is; return whether one is to be replaced."""
    others = [SPLITS] if one.dataset_id else [MANIFEST, JOURNAL]
    shown = printable(one.target.url, 4096)
    for name in others:
        if one.target.exists(name):
            kind = "splits are" if name == SPLITS else "one dataset is"
            raise ExistsError(f"{shown}: {kind} packed here; choose another place")
    try:
        data = one.target.read(one.last.name, manifest.MAX_MANIFEST)
    except FileNotFoundError:
        return False
    except DamageError:
        data = b""
    if data == one.last.data:
        return False
    if not overwrite:
        raise ExistsError(
            f"{shown}: another dataset is here; choose another place, or replace it with "
            "--overwrite"
        )
    if not all(item.ours for item in one.items):
        raise ExistsError(
            f"{shown}: another dataset is here, and the files to be copied may have the names of "
            "its own, which people read: remove it first, or choose another place"
        )
    return True


# --- one dataset ----------------------------------------------------------------------------------


def _copy_dataset(one: _Work, how: _CopyOptions, count: _Count) -> None:
    """Copy a dataset, or the file of the splits. A directory is locked while it is written."""
    if not one.dataset_id or not isinstance(one.target, LocalDirectory):
        _copy_items(one.items, one.root, one.target, how, count)
        if one.shards is None:
            _write_last(one.target, one.last, count)
        return
    folder = one.target.root
    local.make_directory(folder)
    with output_dir.own_unplanned(folder, one.dataset_id, resumes=True, shards=one.shards) as owner:
        for item in one.items:
            _remove_drafts(folder, item)
        _copy_items(one.items, one.root, one.target, how, count)
        if one.shards is None:
            _write_last(one.target, one.last, count)
            owner.clean()
    if one.shards is not None and _has_last(one.target, one.last):  # a part that is copied again
        output_dir.clean_up(folder, stored=one.dataset_id)


def _copy_items(
    items: list[_Item], root: Location, target: Target, how: _CopyOptions, count: _Count
) -> None:
    """Copy the files that are not there, and right: here, or by the executor, a task each."""
    if how.executor is None:
        if isinstance(target, LocalDirectory):
            _copy_files(items, root, target.root, how.overwrite, count)
        else:
            _put_files(items, root, target, how, count)
        return
    work = functools.partial(_copy_one, root, target, how._replace(executor=None))
    done = run(work, items, jobs=how.jobs, report=Report(None, 0), executor=how.executor)
    with contextlib.closing(done) as results:
        for item, kept in zip(items, results, strict=True):
            if kept:
                count.keep(item)
            else:
                count.add(item.size)
                count.finish(item)


def _copy_one(
    root: Location, target: Target, how: _CopyOptions, item: _Item, add: Callable[[int], None]
) -> bool:
    """Copy a file; return True if it was there, and right."""
    done = Copied(target.url)
    _copy_items([item], root, target, how, _Count(done, None))
    return done.kept == 1


# --- into a directory -----------------------------------------------------------------------------


def _copy_files(
    items: list[_Item], root: Location, folder: str, overwrite: bool, count: _Count
) -> None:
    """Write the files of a directory that are not there, and right."""
    missing = []
    for item in items:
        if _is_right(folder, item, overwrite):
            count.keep(item)
        else:
            missing.append(item)
    local.refuse_if_full(folder, sum(item.size for item in missing))
    try:
        for item, file in _opened(root, missing):
            _write_file(folder, item, file, count, _AGAIN if root.remote else 0)
            count.finish(item)
    except FileNotFoundError as error:
        where = printable(error.filename or str(error), 4096)
        raise DamageError(f"{where}: the manifest names it, but it is not there") from None


def _remove_drafts(folder: str, item: _Item) -> None:
    """Remove what a copy that was killed had begun to write under a temporary name."""
    directory, name = os.path.split(os.path.join(folder, file_name(item.name)))
    with contextlib.suppress(FileNotFoundError):
        for found in os.listdir(directory):
            if local.is_temporary(found) and found.endswith(f"-{name}.tmp"):
                local.remove(os.path.join(directory, found))


def _is_right(folder: str, item: _Item, overwrite: bool) -> bool:
    """Return whether a file is there and right. Raises ExistsError for another one of its name."""
    try:
        with contextlib.closing(LocalDirectory(folder).open(item.name)) as file:
            if file.size == item.size and file.sha256() == item.sha256:
                return True
    except FileNotFoundError:
        return False
    _refuse_file(os.path.join(folder, file_name(item.name)), item, overwrite)
    return False


def _refuse_file(shown: str, item: _Item, overwrite: bool) -> None:
    """Raise ExistsError for a file that is there, may be anybody's, and is not the one to copy."""
    if not item.ours and not overwrite:
        raise ExistsError(
            f"{printable(shown, 4096)}: another file of this name is there; choose another place, "
            "or replace it with --overwrite"
        )


def _opened(root: Location, items: list[_Item]) -> Iterator[tuple[_Item, File | None]]:
    """Yield files with what they are read from, of which the next one is asked for ahead."""
    files: list[File | None] = []
    try:
        for place, item in enumerate(items):
            for ahead in items[len(files) : place + 2]:
                file = root.open(ahead.name, ahead.known) if ahead.data is None else None
                if file is not None and root.remote:
                    file.will_need(0, _AHEAD)
                files.append(file)
            now = files[place]
            yield item, now
            if now is not None:
                now.close()
    finally:
        for file in files:
            if file is not None:
                file.close()


def _write_file(folder: str, item: _Item, file: File | None, count: _Count, again: int) -> None:
    """Write one file, whole and right, or not at all. Raises DamageError, StorageError.

    again: how often it is read anew where it came damaged, as networks do
    """
    directory, name = os.path.split(os.path.join(folder, file_name(item.name)))
    local.make_directory(directory)
    with local.Draft(directory, name, local.token()) as draft:
        if file is None:
            draft.write(item.data or b"")
            count.add(item.size)
        else:
            if file.size != item.size:
                raise DamageError(
                    f"{file.name}: is {file.size:,} bytes long, but the manifest says "
                    f"{item.size:,}. {DIFFERS}"
                )
            for start in range(0, item.size, _PIECE):
                piece = file.read(start, min(_PIECE, item.size - start))
                draft.write(piece)
                count.add(len(piece))
                file.will_need(start + _AHEAD, _PIECE)
        if draft.digest() == item.sha256:
            draft.commit(name)
            return
    if not again:
        shown = item.name if file is None else file.name
        raise DamageError(
            f"{printable(shown, 4096)}: its SHA-256 is {draft.digest().hex()}, expected "
            f"{item.sha256.hex()}. {DIFFERS}"
        )
    count.add(-item.size)
    _write_file(folder, item, file, count, again - 1)


# --- what comes last ------------------------------------------------------------------------------


def _write_last(target: Target, item: _Item, count: _Count) -> None:
    """Write the manifest, or the file of the splits, unless it is there."""
    assert item.data is not None
    if _has_last(target, item):
        count.keep(item)
        return
    target.write(item.name, item.data)
    count.add(item.size)
    count.finish(item)


def _has_last(target: Target, item: _Item) -> bool:
    """Return whether just this manifest, or file of the splits, is there."""
    with contextlib.suppress(FileNotFoundError, DamageError):
        return target.read(item.name, manifest.MAX_MANIFEST) == item.data
    return False


# --- into an object store -------------------------------------------------------------------------


def _put_files(
    items: list[_Item], root: Location, target: RemoteLocation, how: _CopyOptions, count: _Count
) -> None:
    """Put the files into a store that are not there, and right."""
    missing = []
    looks = ((item, Request(target.store, item.name, what="noted")) for item in items)
    for item, look in each(looks, LOOKS):
        if _is_there(item, look, target, how):
            count.keep(item)
        else:
            missing.append(item)
    for left in reversed(range(_AGAIN + 1 if root.remote else 1)):
        puts = ((item, target.put_request(item.name, _upload(item, root))) for item in missing)
        missing = []
        for item, put in each(puts, how.jobs):
            try:
                put.result()
            except DamageError:
                if not left:
                    raise
                missing.append(item)  # the network may have damaged what the store has undamaged
                continue
            count.add(item.size)
            count.finish(item)


def _upload(item: _Item, root: Location) -> Upload:
    """Say what the object of a file is to hold."""
    if item.data is not None:
        return Upload(item.data, item.size, item.sha256, item.name)
    shown = f"{root.url.rstrip('/')}/{item.name}"
    if isinstance(root, RemoteLocation):
        return Upload((root.store, item.name), item.size, item.sha256, printable(shown, 4096))
    assert isinstance(root, LocalDirectory)
    return Upload(root.path(item.name), item.size, item.sha256, printable(shown, 4096))


def _is_there(item: _Item, look: Future[Reply], target: RemoteLocation, how: _CopyOptions) -> bool:
    """Return whether an object is there and right. Raises ExistsError for another one."""
    found = looked(look)
    if found is None:
        return False
    if found.size == item.size:
        if found.tag == item.sha256.hex() and not how.recheck:
            return True
        known = KnownFile(item.size, b"", b"", 0)
        with contextlib.closing(target.open(item.name, known)) as file:
            if file.sha256() == item.sha256:
                return True
    _refuse_file(f"{target.url.rstrip('/')}/{item.name}", item, how.overwrite)
    return False
