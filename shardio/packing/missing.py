"""What the parts of a packing have not built yet, by the names of shards: no shard is read.

A shard gets its name when it is whole. `commit` checks the contents.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence

from ..errors import NotPackedError, printable
from ..formats import manifest
from ..storage import lock
from ..storage.lock import JOURNAL
from . import journal, output_dir
from .parts import part_of
from .plan import Plan

_LOOK_S = 1.0  # between two looks into the directory
_TELL_S = 30.0  # between two lines that say what is missing
_NUMBERS_SHOWN = 20  # numbers that a line lists


class Waiting:
    """Look again and again what is missing in OUT.

    parts: how many there are, so that messages name the parts; None: messages name the shards
    overwrite: another dataset may be there, which is to be replaced
    within: the folder in each dataset where the parts build
    """

    def __init__(self, out: str, parts: int | None, overwrite: bool, within: str = "") -> None:
        self._out, self._parts, self._overwrite, self._within = out, parts, overwrite, within
        self._plans: dict[str, tuple[tuple[int, int], Plan]] = {}  # by directory

    def wait(self, limit_s: float, announce: Callable[[str], None]) -> None:
        """Wait until nothing is missing. Raises NotPackedError after so many seconds."""
        began, told, last = time.monotonic(), -_TELL_S, ""
        while lines := self.missing():
            now, text = time.monotonic() - began, "\n".join(lines)
            if now >= limit_s:
                raise NotPackedError(f"{text}\nNothing was committed: waited {limit_s:.0f} s")
            if text != last and now - told >= _TELL_S:
                announce(f"waiting: {text}")
                told, last = now, text
            time.sleep(min(_LOOK_S, limit_s - now))

    def missing(self) -> list[str]:
        """Say what is not built yet, a line for each directory that misses something."""
        lines = []
        names = output_dir.begun_splits(self._out, self._within) or [""]
        late = not_begun(self._out, names, self._overwrite, self._within)
        for folder in (output_dir.building_folder(self._out, name, self._within) for name in names):
            try:
                plan = self._plan(folder)
            except FileNotFoundError:
                if folder in late and folder not in self._plans:  # else it was committed just now
                    lines.append(late[folder])
                continue
            files = journal.new_shards(folder, plan.before)
            built = {journal.shard_number(name) or 0 for name in files}
            built |= journal.sent_numbers(folder)  # those that are in a store are no files here
            numbers = range(plan.first, plan.first + plan.shards)
            if left := [one - plan.first for one in numbers if one not in built]:
                lines.append(f"{printable(folder)}: {show_missing(left, plan.shards, self._parts)}")
        return lines

    def _plan(self, folder: str) -> Plan:
        status = os.stat(os.path.join(folder, JOURNAL))
        version = status.st_ino, status.st_mtime_ns
        known = self._plans.get(folder)
        if known is None or known[0] != version:
            known = self._plans[folder] = version, journal.parse(lock.head(folder), folder)
        return known[1]


def not_begun(out: str, splits: Sequence[str], overwrite: bool, within: str = "") -> dict[str, str]:
    """Return the directories of splits in which no part has begun, and a line that says so.

    overwrite: what is packed there is to be replaced. Only a manifest that is newer than the
    journals of other splits is of this packing: its commit was killed between two of them.
    """
    folders = [output_dir.building_folder(out, name, within) for name in splits]
    begun = {folder: _changed(folder, JOURNAL) for folder in folders}
    newest = max(begun.values()) or math.inf
    return {
        folder: f"{printable(folder)}: no part has begun to pack here"
        for folder in folders
        if not begun[folder] and _changed(folder, manifest.MANIFEST) < (newest if overwrite else 1)
    }


def _changed(folder: str, name: str) -> float:
    """Return when a file was changed, in ns; 0 where there is none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.lstat(os.path.join(folder, name)).st_mtime_ns
    return 0


def show_missing(left: Sequence[int], shards: int, parts: int | None) -> str:
    """Say which shards are not built, and of which parts they are, where their number is known."""
    text = f"{len(left):,} of {shards:,} shards are not built: {_listed(left)}"
    if parts is None:
        return text
    return f"{text}; of parts {_listed(sorted({part_of(one, parts, shards) for one in left}))}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:_NUMBERS_SHOWN])) + (
        ", ..." if len(numbers) > _NUMBERS_SHOWN else ""
    )
