"""The members of one archive, as columns: where each one's bytes lie, and how.

A path is that of the member, without `.`, and without slashes at its end. Nothing of a member is
read here, and nothing that a header says is believed: who reads a member compares.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from ....errors import SourceError, printable
from ..base import Problem

# How the bytes of a member lie: at its start; behind a zip's local header there, as they are or
# deflated.
PLAIN, STORED, DEFLATED = range(3)

_MOST_LINKS = 40  # that are followed one after the other, as Linux does
_MOST_ALIASES = 10_000_000  # of all links: a few that lead to one another are a bomb


class Link(NamedTuple):
    """A member that leads to another: by a path from its own folder, or from the top."""

    path: bytes
    target: bytes
    is_hard: bool


class MemberTable:
    """The files in an archive, and what else lies there. Columns have an entry a file."""

    def __init__(self) -> None:
        self.paths: list[bytes] = []
        self.sizes = array("q")  # bytes, as its header states
        self.starts = array("q")  # byte of its data in the archive; of a zip of its local header
        self.packed = array("q")  # bytes that the data take there
        self.checksums = array("I")  # CRC-32, of a zip
        self.ways = array("B")  # PLAIN, STORED, DEFLATED
        self.folders: set[bytes] = set()
        self.problems: list[Problem] = []
        self.outside: list[bytes] = []  # names that lead out of the archive
        self.links: list[Link] = []
        self.number = 0  # of its archive among others

    def add(self, path: bytes, size: int, start: int) -> None:
        """Add a member whose bytes lie at `start` as they are."""
        self.paths.append(path)
        self.sizes.append(size)
        self.starts.append(start)

    def fill(self) -> None:
        """Give the plain members, which `add` added, the columns that only a zip has."""
        count = len(self.paths)
        self.packed = self.sizes[:]
        self.checksums = array("I", bytes(4 * count))
        self.ways = array("B", bytes(count))

    def follow_links(self) -> None:
        """Replace the links by what they lead to; those that lead out of it are problems."""
        if self.links:
            _Links(self).follow()
            self.links = []

    def copy_row(self, row: int, path: bytes) -> None:
        """Add a member that is another one under a second path."""
        self.paths.append(path)
        for column in (self.sizes, self.starts, self.packed, self.checksums, self.ways):
            column.append(column[row])


class _Links:
    """What the links in an archive lead to."""

    def __init__(self, table: MemberTable) -> None:
        self._table = table
        self._rows = {path: row for row, path in enumerate(table.paths)}
        self._order = sorted(self._rows)
        self._links = {one.path: one for one in table.links}
        self._link_order = sorted(self._links)
        self._aliases = 0

    def follow(self) -> None:
        """Add the file, or all files of the folder, that each link leads to."""
        for one in self._links.values():
            if one.path not in self._rows:  # else a file of this name came later
                self._add(one.path, one, ())

    def _add(self, path: bytes, link: Link, above: tuple[bytes, ...]) -> None:
        """Add what a link leads to under a path. above: folders that were led to before."""
        kind = "hard link" if link.is_hard else "link"
        shown = printable(link.target)
        try:
            target = self._resolved(link)
        except ValueError as error:
            self._table.problems.append((path, f"is a {kind} {error}"))
            return
        if (row := self._rows.get(target)) is not None:
            self._alias(row, path)
        elif self._is_folder(target):
            if not target or (link.path + b"/").startswith(target + b"/") or target in above:
                why = "is a link to a folder that contains it"
                self._table.problems.append((path, why))
                return
            self._add_folder(path, target, above)
        else:
            why = f"is a {kind} to {shown}, which is not in the archive"
            self._table.problems.append((path, why))

    def _add_folder(self, path: bytes, target: bytes, above: tuple[bytes, ...]) -> None:
        start = target + b"/"
        for place in range(bisect_left(self._order, start), len(self._order)):
            found = self._order[place]
            if not found.startswith(start):
                break
            self._alias(self._rows[found], path + found[len(target) :])
        for place in range(bisect_left(self._link_order, start), len(self._link_order)):
            found = self._link_order[place]
            if not found.startswith(start):
                break
            self._add(path + found[len(target) :], self._links[found], (*above, target))

    def _alias(self, row: int, path: bytes) -> None:
        self._aliases += 1
        if self._aliases > _MOST_ALIASES:
            raise SourceError(f"its links name over {_MOST_ALIASES:,} files once more")
        self._table.copy_row(row, path)

    def _is_folder(self, path: bytes) -> bool:
        place = bisect_left(self._order, path + b"/")
        there = place < len(self._order) and self._order[place].startswith(path + b"/")
        return not path or there or path in self._table.folders

    def _resolved(self, link: Link) -> bytes:
        """Return where a link leads in the end. Raises ValueError, for a message."""
        above = [] if link.is_hard else link.path.split(b"/")[:-1]
        todo: list[bytes] = [*above, *_parts(link.target)]
        done: list[bytes] = []
        followed = 0
        while todo:
            part = todo.pop(0)
            if part in (b"", b"."):
                continue
            if part == b"..":
                if not done:
                    raise ValueError(f"to {printable(link.target)}, outside of the archive")
                done.pop()
                continue
            done.append(part)
            if (other := self._links.get(b"/".join(done))) is None:
                continue
            followed += 1
            if followed > _MOST_LINKS:
                raise ValueError("that leads into itself")
            done = [] if other.is_hard else done[:-1]
            todo = [*_parts(other.target), *todo]
        return b"/".join(done)


def _parts(target: bytes) -> Sequence[bytes]:
    if target.startswith(b"/"):
        raise ValueError(f"to {printable(target)}, outside of the archive")
    return target.split(b"/")


def plain_path(name: bytes) -> bytes | None:
    """Return the path of a member below the archive's top; b"" for the top; None for one outside.

    As tar and unzip would write it, but that these also take what begins with a slash.
    """
    if not (name.startswith((b"/", b".")) or b"/." in name or b"//" in name or name[-1:] == b"/"):
        return name
    if name.startswith(b"/"):
        return None
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    return None if b".." in parts else b"/".join(parts)
