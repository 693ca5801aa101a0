"""The members of one archive, as columns: where each one's bytes lie, and how.

A path is that of the member, without `.`, and without slashes at its end. Nothing of a member is
read here, and nothing that a header says is believed: who reads a member compares.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ....errors import SourceError, printable
from ..base import Problem
from ..files import LOOP

# How the bytes of a member lie: at its start; behind a zip's local header there, as they are or
# deflated.
PLAIN, STORED, DEFLATED = range(3)

_MOST_LINKS = 40  # links followed one after the other, as Linux does
_MOST_ALIASES = 10_000_000  # files that links name; more are a bomb
_MOST_VISITS = 100_000  # folders visited through links
# What is in no plain path; zeros lie around each one.
_ODD = (b"\0/", b"\0.", b"/.", b"//", b"/\0")


class Link(NamedTuple):
    """A member that leads to another, by a path from its own folder."""

    path: bytes
    target: bytes
    at: int  # members that are files, before it


class MemberTable:
    """The files in an archive, and what else lies there. Columns have an entry a file."""

    def __init__(self) -> None:
        self.paths: list[bytes] = []
        self.sizes = array("q")  # bytes, as its header states
        self.starts = array("q")  # byte of its data in the archive; of a zip of its local header
        self.packed_sizes = array("q")  # bytes that the data take there
        self.checksums = array("I")  # CRC-32, of a zip
        self.methods = array("B")  # PLAIN, STORED, DEFLATED
        self.folders: set[bytes] = set()
        self.problems: list[Problem] = []
        self.outside: list[bytes] = []  # names that lead out of the archive
        self.links: list[Link] = []
        self.stop = 0  # byte of a tar behind the members that are here
        self.dropped: set[int] = set()  # rows that something later replaced
        self._rows: dict[bytes, int] | None = None

    def add(self, path: bytes, size: int, start: int) -> None:
        """Add a member whose bytes lie at `start` as they are."""
        self.paths.append(path)
        self.sizes.append(size)
        self.starts.append(start)

    def fill(self) -> None:
        """Give the plain members, which `add` added, the columns that only a zip has."""
        count = len(self.paths)
        self.packed_sizes = self.sizes[:]
        self.checksums = array("I", bytes(4 * count))
        self.methods = array("B", bytes(count))

    def add_hard_link(self, path: bytes, target: bytes) -> None:
        """Add a second name of a file. A later member with the first name does not change it."""
        if self._rows is None:
            self._rows = {one: row for row, one in enumerate(self.paths)}
        for row in range(len(self._rows), len(self.paths)):
            self._rows[self.paths[row]] = row
        found = plain_path(target)
        row = self._rows.get(found, -1) if found else -1
        if row >= 0:
            self.add(path, self.sizes[row], self.starts[row])
        else:
            where = "outside of the archive" if found is None else "which is not in the archive"
            self.problems.append((path, f"is a hard link to {printable(target)}, {where}"))

    def follow_links(self) -> None:
        """Replace the links by what they lead to; those that lead out of it are problems."""
        if self.links:
            _Links(self).follow()
            self.links = []

    def copy_row(self, row: int, path: bytes) -> None:
        """Add a member that is another one under a second path."""
        self.paths.append(path)
        for column in (self.sizes, self.starts, self.packed_sizes, self.checksums, self.methods):
            column.append(column[row])


class _Links:
    """What the links in an archive lead to."""

    def __init__(self, table: MemberTable) -> None:
        self._table = table
        self._rows = {path: row for row, path in enumerate(table.paths)}
        # Of a link and a file with one name, and of two links, the later one counts.
        self._links = {
            one.path: one for one in table.links if self._rows.get(one.path, -1) < one.at
        }
        for path in self._links:
            if path in self._rows:
                table.dropped.update(i for i, one in enumerate(table.paths) if one == path)
                del self._rows[path]
        self._order = sorted(self._rows)
        self._link_order = sorted(self._links)
        self._folders = sorted(table.folders)
        self._aliases = self._visits = 0

    def follow(self) -> None:
        """Add the file, or all files of the folder, that each link leads to."""
        for path in self._links:
            for found in self._below(self._order, path):
                why = "lies in a folder that is a link, by another member"
                self._table.problems.append((found, why))
                self._table.dropped.add(self._rows[found])
        for one in self._links.values():
            self._add(one.path, one, _ancestors(one.path))

    def _add(self, path: bytes, link: Link, above: tuple[bytes, ...]) -> None:
        """Add what a link leads to under a path. above: folders that lead there."""
        shown = printable(link.target)
        try:
            target = self._resolved(link)
        except ValueError as error:
            self._table.problems.append((path, f"is a link {error}"))
            return
        if (row := self._rows.get(target)) is not None:
            self._alias(row, path)
        elif not self._is_folder(target):
            why = f"is a link to {shown}, which is not in the archive"
            self._table.problems.append((path, why))
        elif not target or target in above:
            self._table.problems.append((path, LOOP))
        elif len(above) > _MOST_LINKS:
            self._table.problems.append((path, f"leads through over {_MOST_LINKS} folders"))
        else:
            self._add_folder(path, target, above)

    def _add_folder(self, path: bytes, target: bytes, above: tuple[bytes, ...]) -> None:
        self._visits += 1
        if self._visits > _MOST_VISITS:
            raise SourceError(f"its links lead through over {_MOST_VISITS:,} folders")
        self._table.folders.add(path)
        for found in self._below(self._folders, target):
            self._table.folders.add(path + found[len(target) :])
        for found in self._below(self._order, target):
            self._alias(self._rows[found], path + found[len(target) :])
        for found in self._below(self._link_order, target):
            within = (*above, target, *_ancestors(found)[len(_ancestors(target)) + 1 :])
            self._add(path + found[len(target) :], self._links[found], within)

    @staticmethod
    def _below(paths: list[bytes], folder: bytes) -> Iterator[bytes]:
        """Yield those of sorted paths that lie in a folder."""
        start = folder + b"/"
        for place in range(bisect_left(paths, start), len(paths)):
            if not paths[place].startswith(start):
                return
            yield paths[place]

    def _alias(self, row: int, path: bytes) -> None:
        self._aliases += 1
        if self._aliases > _MOST_ALIASES:
            raise SourceError(f"its links name over {_MOST_ALIASES:,} files once more")
        self._table.copy_row(row, path)

    def _is_folder(self, path: bytes) -> bool:
        there = next(self._below(self._order, path), None) is not None
        links = next(self._below(self._link_order, path), None) is not None
        return not path or there or links or path in self._table.folders

    def _resolved(self, link: Link) -> bytes:
        """Return where a link leads in the end. Raises ValueError, for a message."""
        todo: list[bytes] = [*link.path.split(b"/")[:-1], *_parts(link.target)]
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
            done, todo = done[:-1], [*_parts(other.target), *todo]
        return b"/".join(done)


def _ancestors(path: bytes) -> tuple[bytes, ...]:
    """Return the folders that a path lies in."""
    parts = path.split(b"/")
    return tuple(b"/".join(parts[:count]) for count in range(1, len(parts)))


def _parts(target: bytes) -> Sequence[bytes]:
    if target.startswith(b"/"):
        raise ValueError(f"to {printable(target)}, outside of the archive")
    return target.split(b"/")


def plain_path(name: bytes) -> bytes | None:
    """Return the path of a member below the archive's top; b"" for the top; None for one outside.

    As tar and unzip would write it, but that these also take what begins with a slash.
    """
    odd = name.startswith((b"/", b".")) or b"/." in name or b"//" in name or b"\0" in name
    if not odd and name[-1:] != b"/":
        return name
    if name.startswith(b"/") or b"\0" in name:
        return None
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    return None if b".." in parts else b"/".join(parts)


def plain_paths(names: list[bytes]) -> list[bytes | None]:
    """Return the path of each of some members, as `plain_path` does; no name has a byte of 0."""
    text = b"\0".join((b"", *names, b""))
    if text.count(b"\0./") == len(names):
        text = text.replace(b"\0./", b"\0")
    if any(odd in text for odd in _ODD):
        return [plain_path(name) for name in names]
    return [*text.split(b"\0")[1:-1]]
