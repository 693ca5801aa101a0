"""Remove what no manifest names: shards and indexes of replaced datasets, and what killed packers
left.

Deleted is only what shardio provably wrote: by its name and by its first bytes. Readers of a
replaced dataset go on for `keep_s` seconds; unfinished packings stay, to be resumed. All versions
of the dataset stay, unless only the newest are to. While files are removed the directory is locked,
as by a packer, or by `index`. A store has no locks, and no unfinished packings that could be seen:
what a change has written and not committed yet is younger than `keep_s`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ..errors import BusyError, printable
from ..formats import manifest
from ..formats.erased import after_erasing
from ..formats.version import history, kept_name, load_tags
from ..storage import local
from ..storage.listing import ObjectEntry
from ..storage.local import LocalDirectory
from ..storage.location import Target, locate
from ..storage.lock import JOURNAL
from ..storage.options import Storage
from ..storage.remote import RemoteLocation
from ..units import check_bool, check_int, show_count, show_size
from . import journal, output_dir
from .index import is_sidecar
from .objects import LOOKS, each
from .place import find_place
from .sources.archives.inflate import is_unpacked
from .versions import files_of, is_ours

KEEP_S = 24 * 3600.0

_Unnamed = tuple[str, os.stat_result, bool]  # a file that no manifest names, and whether it may go


@dataclass
class Cleaned:
    """The result of one call of `gc`; as str, the files that it removed, or would remove."""

    removed: list[str] = field(default_factory=list)
    bytes: int = 0
    kept: list[str] = field(default_factory=list)  # not named by a manifest, but too young
    dry_run: bool = False  # nothing was removed

    def __repr__(self) -> str:
        return f"<{self._summary()}>"

    def __str__(self) -> str:
        return "\n".join([*(printable(path, 4096) for path in self.removed), self._summary()])

    def _summary(self) -> str:
        verb = "would be removed" if self.dry_run else "removed"
        young = f"; {len(self.kept):,} younger than --keep stay" if self.kept else ""
        files = show_count(len(self.removed), "file")
        return f"{files}, {show_size(self.bytes)}, {verb}{young}"


def gc(
    path: str | os.PathLike[str],
    *,
    keep_s: float = KEEP_S,
    keep_versions: int | None = None,
    dry_run: bool = False,
    storage: Storage | None = None,
) -> Cleaned:
    """Clean a packed directory, or a folder of an object store, or all splits in it.

    keep_s         seconds: a file goes only when it, and the manifest that does not name it, are
                   older; default: a day
    keep_versions  keep only so many of the newest versions, and those that have a tag; default: all
    dry_run        say what would be removed, and remove nothing
    storage        a shardio.Storage: how an object store is reached

    In a store, files of a change that is under way are told by their age alone: leave `keep_s` more
    than the longest one takes. Raises NotPackedError where nothing is packed, BusyError while a
    packer works.
    """
    check_bool(dry_run=dry_run)
    if keep_versions is not None:
        keep_versions = check_int("keep_versions", keep_versions)
    done, place = Cleaned(dry_run=dry_run), find_place(path, storage)
    if isinstance(place.location, RemoteLocation):
        for one in place.datasets().values():
            _clean_store(one.location, keep_s, keep_versions, done)
        return done
    top = place.url
    folders = list(manifest.datasets(top).values())
    for folder in folders:
        manifest.load(locate(folder))  # without one, nothing says what may go
        with contextlib.ExitStack() as stack:
            data: bytes | None = None
            try:
                data = stack.enter_context(output_dir.own_unfinished(folder)).journal()
            except FileNotFoundError:
                # Without a journal a packer that begins now could give a new shard the name that we
                # are removing: we make one, if there is anything to do.
                found = _unnamed(folder, None, keep_s, keep_versions)
                if not dry_run and any(old for *_, old in found):
                    stack.enter_context(_alone(folder))
            _clean(folder, _unnamed(folder, data, keep_s, keep_versions), done)
    if top not in folders and not any(os.path.exists(os.path.join(f, JOURNAL)) for f in folders):
        _clean(top, _unpacked(top, keep_s), done)
    return done


def _clean_store(index: Target, keep_s: float, keep_versions: int | None, done: Cleaned) -> None:
    """Remove what nobody needs of a dataset in a store. Raises BusyError, StorageError."""
    assert isinstance(index, RemoteLocation)
    there = index.objects()
    # Listed first: what was committed since is named now.
    versions, named = _named(index, keep_versions)
    replaced = max((one.mtime_ns for one in there if one.path == manifest.MANIFEST), default=0)
    unnamed = [one for one in there if "/" not in one.path and one.path not in named]
    with ThreadPoolExecutor(LOOKS, "shardio-gc") as pool:
        ours = [*pool.map(lambda one: is_ours(index, one.path), unnamed)]
    going = list[ObjectEntry]()
    for one in itertools.compress(unnamed, ours):
        age_s = time.time() - max(one.mtime_ns, replaced) / 1e9  # by two clocks
        if keep_s and age_s < keep_s:
            done.kept.append(f"{index.url}/{one.path}")
        else:
            going.append(one)
    removed = 0
    for first in range(0, len(going), LOOKS):
        some = going[first : first + LOOKS]
        # Who drops the same records again, or goes back, names what is here already.
        if manifest.load(index).version_id != versions[0].version_id:
            was = f"{removed:,} files were removed, which it did not name" if removed else ""
            raise BusyError(
                f"{printable(index.url, 4096)}: something else changed this dataset meanwhile. "
                f"{was or 'Nothing was removed'}: run it again"
            )
        if not done.dry_run:
            for _, gone in each(((one, index.remove_request(one.path)) for one in some), LOOKS):
                gone.result()
            removed += len(some)
        done.removed += [f"{index.url}/{one.path}" for one in some]
        done.bytes += sum(one.size for one in some)


def _named(index: Target, keep_versions: int | None) -> tuple[list[manifest.Manifest], set[str]]:
    """Return the versions that stay, and the names of the files that they need."""
    kept = _kept_versions(index, keep_versions)
    named = {name for one in kept for name in files_of(one)}
    return kept, named | {kept_name(one.version_id) for one in kept[1:]}


def _kept_versions(index: Target, newest: int | None) -> list[manifest.Manifest]:
    """Return the versions of a dataset that are to stay, the newest first, as their files are.

    Files that records were erased from are not among these, whichever version named them.
    """
    tagged, current = {*load_tags(index).values()}, manifest.load(index)
    versions = enumerate(history(index, current))
    return [
        after_erasing(one, current)
        for age, one in versions
        if newest is None or age < newest or one.version_id in tagged
    ]


def _unpacked(folder: str, keep_s: float) -> Iterator[_Unnamed]:
    """Give what was unpacked of an archive for several splits, whose packing was killed."""
    for name in sorted(os.listdir(folder)):
        if is_unpacked(folder, name):
            status = os.lstat(os.path.join(folder, name))
            yield name, status, time.time() - status.st_mtime >= keep_s


def _alone(folder: str) -> contextlib.AbstractContextManager[None]:
    """Own a folder that has no journal, by one of our own. Raises BusyError."""

    def refuse(data: bytes, _: journal.ReadBytes) -> bool:
        raise BusyError(
            f"{printable(folder)}: another shardio process began to pack here just now. Nothing "
            "was touched"
        )

    # A Writer's: should we be killed, the next packer, Writer or gc removes it.
    ours = journal.of_writer(secrets.token_bytes(16), journal.shards_in(folder))
    return output_dir.own(folder, lambda: [ours], refuse).for_one_call()


def _clean(folder: str, found: Iterable[_Unnamed], done: Cleaned) -> None:
    """Remove those files that are old enough, under a lock, and note all of them."""
    for name, status, old in found:
        path = os.path.join(folder, name)
        if not old:
            done.kept.append(path)
            continue
        if not done.dry_run:
            local.remove(path)
        done.removed.append(path)
        done.bytes += status.st_size
    if done.removed and not done.dry_run:
        local.sync_directory(folder)


def _unnamed(
    folder: str, data: bytes | None, keep_s: float, keep_versions: int | None
) -> Iterator[_Unnamed]:
    """Give the files of ours that nobody needs, and whether they are old enough to go.

    data: the bytes of the journal; None: there was none before us.
    """
    named = _named(LocalDirectory(folder), keep_versions)[1]
    # A packing that was interrupted can be resumed. A Writer that died cannot, and one that was
    # committed, and killed before it had cleaned up, need not; nor one without a shard.
    resumable = (
        data is not None and journal.is_resumable(folder, data) and journal.has_work(folder, data)
    )
    unfinished, before = journal.identity(data) if data and resumable else (None, {})
    replaced = os.stat(os.path.join(folder, manifest.MANIFEST)).st_mtime
    for name in sorted(os.listdir(folder)):
        try:
            status = os.lstat(os.path.join(folder, name))
        except FileNotFoundError:  # gone since it was listed
            continue
        if not stat.S_ISREG(status.st_mode):
            continue
        if journal.shard_number(name) is not None:
            owner = None if name in named else journal.shard_id(folder, name)
            new = owner is not None and owner == unfinished
            new = new and before.get(name) != status.st_mtime_ns
            # One that is damaged may be of what is unfinished.
            ours = owner is not None or (not resumable and is_ours(LocalDirectory(folder), name))
            needed = name in named or new or not ours
        elif name == JOURNAL:
            needed = resumable or data is None
        elif is_ours(LocalDirectory(folder), name) or is_sidecar(folder, name):
            needed = name in named
        else:
            ours = journal.is_ours(folder, name) or journal.is_rejected_part(folder, name)
            ours = ours or journal.is_own_note(folder, name, journal.SCAN_NOTE)
            ours = ours or is_unpacked(folder, name)
            needed = resumable or not ours
        if not needed:
            old = time.time() - max(status.st_mtime, replaced) >= keep_s
            yield name, status, old
