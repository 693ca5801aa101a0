"""A folder whose files are all known: of an object store, or in archives.

They are known by columns, in bytewise order of the paths. Paths are bytes, as those of files.
"""

from __future__ import annotations

import posixpath
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from .base import FileState, FolderNames, Ints, Problem, Walked
from .files import LOOP, MISSING, is_ignored, is_own, note_ignored, unfit_size


@dataclass
class Listed:
    """All files below a folder, in bytewise order of their paths."""

    paths: list[bytes]
    sizes: Ints  # bytes
    stamps: Ints  # numbers that change with the content
    folders: list[bytes] = field(default_factory=list)  # folders that may be empty; in order
    problems: list[Problem] = field(default_factory=list)  # what can be no file; in order
    outside: list[Problem] = field(default_factory=list)  # what lies in no folder here
    notes: list[str] = field(default_factory=list)


class ListedFolder:
    """A folder among listed files. Subclasses say how it is listed and read."""

    in_archives = False

    def __init__(
        self, path: bytes, inner: bytes, ignores: Callable[[bytes], bool] = is_ignored
    ) -> None:
        """path: of all that is listed; inner: of this folder in it, with a slash, or b""."""
        self.ignores, self._inner = ignores, inner
        self.path = b"/".join(filter(None, (path, inner.rstrip(b"/"))))

    @property
    def listed(self) -> Listed:
        """Return all files, of this folder and those it lies in. Raises StorageError."""
        raise NotImplementedError

    def top(self) -> FolderNames:
        """Return the names in it. Raises StorageError."""
        keys, at, stop = self._range()
        folders: dict[bytes, bool] = {}
        files: list[bytes] = []
        while at < stop:
            name, slash, _ = keys[at][len(self._inner) :].partition(b"/")
            if not slash:
                files.append(name)
                at += 1
                continue
            folders[name] = True
            at = bisect_left(keys, self._inner + name + b"0", at, stop)  # 0 comes next to the slash
        for path in self._within(self.listed.folders):
            folders[path.partition(b"/")[0]] = True
        loops = []
        for full, why in self.listed.problems:
            if not full.startswith(self._inner):
                continue
            name, slash, _ = full[len(self._inner) :].partition(b"/")
            if slash:
                folders[name] = True
            elif why == LOOP:
                loops.append(name)
            else:
                files.append(name)
        ignored = [name for name in folders if self.ignores(name)]
        return FolderNames([name for name in folders if name not in ignored], files, loops, ignored)

    def is_there(self) -> bool:
        """Return True if files lie in it. Raises OptionError, StorageError."""
        _, start, stop = self._range()
        return start < stop or any(True for _ in self._within(self.listed.folders))

    def walk(self, *, empty: bool = False) -> Walked:
        """Find every file below it."""
        keys, start, stop = self._range()
        found: list[bytes] = []
        places: list[int] = []
        problems = list(self.listed.outside)
        ignored: set[bytes] = set()
        listed = self.listed

        def is_left_out(path: bytes) -> bool:
            parts = path.split(b"/")
            for count, part in enumerate(parts, 1):
                if self.ignores(part):
                    ignored.add(b"/".join(parts[:count]))
                    return True
            return is_own(parts[0])

        plain = None  # a folder whose files are left out by their own names alone
        for place, size in enumerate(listed.sizes[start:stop].tolist(), start):
            key = keys[place][len(self._inner) :]
            above, _, name = key.rpartition(b"/")
            if above != plain or self.ignores(name):
                if is_left_out(key):
                    continue
                plain = above or None
            why = None if empty and not size else unfit_size(size)
            if why is None:
                found.append(key)
                places.append(place)
            else:
                problems.append((key, why))
        for path, why in listed.problems:
            if path.startswith(self._inner) and not is_left_out(path[len(self._inner) :]):
                problems.append((path[len(self._inner) :], why))
        for path in self._within(listed.folders):
            is_left_out(path.rstrip(b"/"))
        notes = note_ignored(posixpath.basename(path) for path in ignored)
        return Walked(
            found,
            listed.sizes[places],
            listed.stamps[places],
            problems,
            len(ignored),
            [*listed.notes, *notes],
        )

    def look(self, paths: Iterable[bytes]) -> Iterator[FileState]:
        """Yield what each path leads to. Raises StorageError."""
        listed = self.listed
        problems = dict(listed.problems)
        for path in paths:
            full = self.full(path)
            place = bisect_left(listed.paths, full) if full is not None else len(listed.paths)
            if place < len(listed.paths) and listed.paths[place] == full:
                size = int(listed.sizes[place])
                yield FileState(size, int(listed.stamps[place]), unfit_size(size))
            elif full is None:
                yield FileState(0, 0, self.outside)
            else:
                yield FileState(0, 0, problems.get(full, MISSING))

    def will_need(self, path: bytes, size: int) -> None:
        """Do nothing."""

    @property
    def outside(self) -> str:
        """Say that a path leads out of all that is listed."""
        raise NotImplementedError

    def full(self, path: bytes) -> bytes | None:
        """Return a path as it is listed; None for one that leads out of the folder."""
        plain = posixpath.normpath(path)
        return None if plain.startswith((b"/", b"..")) else self._inner + plain

    def within(self, path: bytes) -> bytes:
        """Return what is `inner` for a folder in it."""
        inner = posixpath.normpath(self._inner + path) + b"/"
        return b"" if inner == b"./" else inner

    def _range(self) -> tuple[list[bytes], int, int]:
        """Return the paths of all files, and where those of this folder begin and end."""
        keys = self.listed.paths
        start = bisect_left(keys, self._inner)
        stop = bisect_left(keys, self._inner[:-1] + b"0", start) if self._inner else len(keys)
        return keys, start, stop

    def _within(self, paths: list[bytes]) -> Iterator[bytes]:
        """Yield those of sorted paths that lie in this folder, from it on."""
        for place in range(bisect_left(paths, self._inner), len(paths)):
            if not paths[place].startswith(self._inner):
                return
            if path := paths[place][len(self._inner) :]:
                yield path
