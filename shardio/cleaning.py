"""Remove what no manifest names: shards of replaced datasets, and what killed packers left.

Deleted is only what shardio provably wrote: by its name and by its first bytes. Readers of a
replaced dataset go on for `keep_s` seconds; unfinished packings stay, to be resumed.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from . import manifest, packing
from .plan import JOURNAL
from .storage import local, locate

KEEP_S = 24 * 3600.0


@dataclass
class Cleaned:
    """What one call of `gc` removed, or would remove."""

    removed: list[str] = field(default_factory=list)
    bytes: int = 0
    kept: list[str] = field(default_factory=list)  # not named by a manifest, but too young


def gc(path: str | os.PathLike[str], *, keep_s: float = KEEP_S, dry_run: bool = False) -> Cleaned:
    """Clean a packed directory, or all splits in it.

    keep_s: a file goes only when it, and the manifest that does not name it, are older than this.
    Raises NotPackedError where nothing is packed, BusyError while a packer works.
    """
    root = packing.local_path(path)
    splits = manifest.load_splits(locate(root))
    done = Cleaned()
    for folder in [os.path.join(root, name) for name in splits] if splits else [root]:
        manifest.load(locate(folder))  # without one, nothing says what may go
        try:
            lock = packing.lock(folder)
        except FileNotFoundError:
            _clean(folder, None, keep_s, dry_run, done)
            continue
        try:
            _clean(folder, lock.read(), keep_s, dry_run, done)
        finally:
            lock.release()
    return done


def _clean(folder: str, journal: bytes | None, keep_s: float, dry_run: bool, done: Cleaned) -> None:
    named = packing.named_shards(folder)
    # A packing that was interrupted can be resumed. A Writer that died cannot, and one that was
    # committed, and killed before it had cleaned up, need not.
    resumable = (
        journal is not None
        and not journal.startswith(packing.WRITER_MAGIC)
        and not packing.is_committed(folder, journal)
    )
    unfinished, before = packing.owner(journal) if journal and resumable else (None, {})
    replaced = os.stat(os.path.join(folder, manifest.MANIFEST)).st_mtime
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if packing.shard_number(name) is not None:
            owner = None if name in named else packing.shard_id(folder, name)
            born = os.stat(path).st_mtime_ns
            if owner is None or (owner == unfinished and before.get(name) != born):
                continue
        elif name == JOURNAL:
            if resumable:
                continue
        elif resumable or not (
            packing.is_ours(folder, name) or packing.is_rejected_part(folder, name)
        ):
            continue
        status = os.stat(path)
        if time.time() - max(status.st_mtime, replaced) < keep_s:
            done.kept.append(path)
            continue
        if not dry_run:
            local.remove(path)
        done.removed.append(path)
        done.bytes += status.st_size
    if not dry_run:
        local.sync_directory(folder)
