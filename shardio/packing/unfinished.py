"""Work that was begun for a dataset and not committed: whether it holds records that are erased.

What `append`, `update` and `compact` build lies in a directory of its own (grow.py), with a plan
that has the keys. Nobody may commit a record after it was erased. So work that holds one is
removed, if it cannot be gone on with, as a compaction; else its user says what becomes of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Set
from dataclasses import dataclass

from ..errors import DamageError, ExistsError, printable
from ..formats.manifest import Manifest
from ..names import key_text
from ..storage import local, lock
from . import journal, output_dir
from .grow import some
from .place import Place


@dataclass(frozen=True)
class Unfinished:
    """Work in a directory, and those keys of which it holds records."""

    folder: str
    keys: Set[bytes] = frozenset()
    is_there: bool = True

    def remove(self) -> None:
        """Remove it, or what is left of it. Raises BusyError, StorageError."""
        with contextlib.suppress(FileNotFoundError):
            if self.is_there:
                with output_dir.own_unfinished(self.folder) as owner:
                    owner.clean()
                for name in journal.shards_in(self.folder):  # of a plan that cannot be read, too
                    if journal.shard_id(self.folder, name) is not None:
                        local.remove(os.path.join(self.folder, name))
        output_dir.remove_working_directory(self.folder, [""])


def unfinished_with(
    place: Place, newest: Manifest, keys: Set[bytes], restart: bool
) -> Unfinished | None:
    """Return the unfinished work for a dataset that holds records of these keys, if any does.

    restart: it may be dropped, whatever it is. Raises ExistsError where it is not to be, BusyError
    where somebody works on it, DamageError, StorageError.
    """
    folder = place.builds_in(None)
    try:
        head, read = lock.look(folder)
        plan = journal.parse(head, folder, read)
        keys = {key for rows in plan.all_rows() for key in rows.keys if key in keys} | {
            key for key, _ in plan.problems if key in keys
        }
    except FileNotFoundError:
        return Unfinished(folder, is_there=False)
    except DamageError:
        if not restart:
            raise
        return Unfinished(folder)
    if not keys:
        return None
    appends = (plan.dataset_id, plan.first) == (newest.dataset_id, newest.shards)
    if appends and not restart:
        raise ExistsError(
            f"{printable(place.url, 4096)}: an unfinished `shardio append` or `update` is here, "
            f"with records that are to be erased: {some([*map(key_text, sorted(keys))])}. Nothing "
            "was dropped. Run it again until it is committed, and erase then; or drop it, too, by "
            "--restart"
        )
    lock.refuse_if_busy(folder, part=False)
    return Unfinished(folder, keys)
