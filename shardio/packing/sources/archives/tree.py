"""The folder that archives are: of one, or of several that lie in a folder or in an archive.

Several archives in one folder: those of files without folders are folders, named without their
suffix (a tar for each class, as of ImageNet), and so are those with images at their top; others,
which hold folders, are merged side by side. Both at once, and archives beside folders or images,
cannot be told apart from a mistake: an error.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....errors import DamageError, OptionError, SourceError, printable
from ....formats.foreign.tar import BLOCK, is_sealed
from ....units import show_count
from ..base import Problem, Walked
from ..files import DiskFolder, is_archive, without_suffix
from ..listed_folder import Listed
from ..store_folder import StoreFolder
from ..store_reader import refuse_page
from .extent import Bytes, Extent, ExtentReader, extent_in
from .inflate import Inflating, compression_of
from .member_table import DEFLATED, PLAIN, MemberTable
from .tar_members import list_tar
from .zip_members import data_start, list_zip

_IMAGES = re.compile(rb"(?i)\.(jpe?g|png|gif|bmp|tiff?|webp|jp2|jxl|ppm|avif|heic)\Z")
_DEEP = 8  # archives in archives
_OUTSIDE = "its path leads out of the archive"


@dataclass
class Members(Listed):
    """All members of all archives, and where their bytes are; a column has an entry a member."""

    extents: list[Extent] = field(default_factory=list)
    # Views, whose entries are ints of Python: those of numpy cost reading a member 1 us more.
    extent_numbers: Any = None  # places in `extents`
    starts: Any = None
    packed_sizes: Any = None
    checksums: Any = None
    methods: Any = None


# First members of the tar that was looked into last, which its tree begins with.
_FIRST_MEMBERS: dict[tuple[str, int, int], MemberTable] = {}


def look_into(
    extent: Extent, most: tuple[int, int | None], enough: Callable[[list[bytes]], bool]
) -> list[bytes]:
    """Return the paths of the first members of a tar; of more, or all, if these are not enough.

    most: members, first and then. Raises DamageError, SourceError, StorageError.
    """
    with contextlib.closing(extent.location.open(extent.name)) as file:
        part = ExtentReader(file, extent)
        table = list_tar(part, extent.shown, most[0])
        _FIRST_MEMBERS.clear()
        if not enough(table.paths):
            return list_tar(part, extent.shown, most[1], table).paths
    _FIRST_MEMBERS[extent.shown, extent.size, extent.stamp] = table
    return table.paths


def is_plain_tar(name: bytes) -> bool:
    """Return True if a file is a tar that is not compressed, by its name."""
    return name[-4:].lower() == b".tar"


def member(table: MemberTable | Members, row: int, extent: Extent, part: ExtentReader) -> Extent:
    """Return a member of an archive as a run of bytes, deflated or not. Raises DamageError."""
    path, start = table.paths[row], table.starts[row]
    if table.methods[row] == PLAIN:
        return extent.inside(path, start, int(table.sizes[row]))
    try:
        return extent.inside(path, data_start(part, start), table.packed_sizes[row])
    except ValueError as error:
        raise DamageError(f"{extent.shown}: {printable(path)}: {error}") from None


def tree_of_archive(
    extent: Extent, ignores: Callable[[bytes], bool], inflating: Inflating, inner: bytes = b""
) -> tuple[Members, bytes]:
    """Return the members of an archive and of those in it, and what is left of the path `inner`.

    inner: a path in the archive. Where it leads through archives, the members are those of the
    last of these, and the path that is left is the one in it.

    Raises DamageError, OptionError, SourceError, StorageError.
    """
    builder = _Builder(ignores, inflating)
    rest = builder.add_archive(extent, inner)
    return builder.finish(extent.shown), rest


def tree_of_folder(
    folder: DiskFolder | StoreFolder, walked: Walked, inflating: Inflating
) -> Members:
    """Return what is in the archives that lie in a folder, and below it. Raises as one does.

    walked: all files below the folder
    """
    builder = _Builder(folder.ignores, inflating)
    paths = [path for path in walked.keys if is_archive(path)]
    others = [path for path in walked.keys if not is_archive(path)]
    shown = printable(folder.path)
    for above, archives in builder.grouped(paths, others, shown).items():
        extents = [extent_in(folder, path) for path in archives]
        builder.add_side_by_side(extents, archives, above, shown)
    for path in others:
        builder.problems.append((path, "lies beside archives, in no one of them"))
    builder.problems += walked.problems
    return builder.finish(shown)


@dataclass
class _Added:
    """An archive that was added to a tree."""

    extent: Extent
    table: MemberTable
    rows: Sequence[int]  # rows of its table that are members of the tree
    prefix: bytes = b""  # start of their paths in the tree: a folder with a slash, or b""

    def paths(self) -> list[bytes]:
        """Return the paths of its members in the tree."""
        names = self.table.paths
        if len(self.rows) < len(names):
            names = [names[row] for row in self.rows]
        return [self.prefix + name for name in names] if self.prefix else names


class _Builder:
    """Gathers the members of archives under their paths in one folder."""

    def __init__(self, ignores: Callable[[bytes], bool], inflating: Inflating) -> None:
        self._ignores, self._inflating = ignores, inflating
        self._deep = 0  # archives around the one that is added
        self._files: dict[tuple[int, str], Bytes] = {}  # that are open
        self._added: list[_Added] = []
        self.problems: list[Problem] = []  # of no archive
        self._repeated = 0  # members that came again in their archive

    def add_archive(self, extent: Extent, inner: bytes = b"") -> bytes:
        """Add the members of an archive and of those in it. Returns what is left of `inner`.

        inner: a path in the archive. Where it leads through archives, only the members of the
        last of these are added, and the path that is left is the one in it.
        """
        if self._deep > _DEEP:
            raise SourceError(f"{extent.shown}: lies in {_DEEP} archives, one within the other")
        with self._opened(extent) as file:
            part = ExtentReader(file, extent)
            kind = compression_of(part.read(0, min(BLOCK, part.size)))
            if kind is None:
                return self._add(_members(part, extent), extent, part, inner)
        return self.add_archive(self._inflating.inflate(extent, kind), inner)

    @contextlib.contextmanager
    def _opened(self, extent: Extent) -> Iterator[Bytes]:
        """Give the file of an archive: the one that is open for an archive around it, or its own.

        So one that is read ahead goes on from archive to archive.
        """
        key = id(extent.location), extent.name
        if key in self._files:
            yield self._files[key]
            return
        with contextlib.closing(extent.location.open(extent.name)) as file:
            self._files[key] = file
            try:
                yield file
            finally:
                del self._files[key]

    def add_side_by_side(
        self, extents: Sequence[Extent], paths: Sequence[bytes], above: bytes, shown: str
    ) -> None:
        """Add archives that lie in one folder: classes as folders, others merged."""
        flat: list[bytes] = []
        deep: list[bytes] = []
        self._deep += 1
        for extent, path in zip(extents, paths, strict=True):
            before = len(self._added)
            self.add_archive(extent)
            added, prefix = self._added[before:], above
            if self._is_class(added):
                flat.append(path)
                prefix += without_suffix(posixpath.basename(path)) + b"/"
                added[0].table.folders.add(b"")
            else:
                deep.append(path)
            for one in added:
                one.prefix = prefix + one.prefix
        self._deep -= 1
        if flat and deep:
            raise OptionError(
                f"{shown}: some archives there hold folders, such as {printable(deep[0])}, and "
                f"some files without one, such as {printable(flat[0])}. The first kind would be "
                "merged, and each of the second be a class: pack them one by one, or move one kind "
                "away"
            )

    def grouped(
        self, paths: Sequence[bytes], others: Sequence[bytes], shown: str
    ) -> dict[bytes, list[bytes]]:
        """Return the archives in each folder. Raises OptionError for images or folders beside."""
        found: dict[bytes, list[bytes]] = defaultdict(list)
        for path in paths:
            found[path[: path.rfind(b"/") + 1]].append(path)
        for path in others:
            above = path[: path.rfind(b"/") + 1]
            while True:
                image = path[len(above) :].find(b"/") >= 0 or _IMAGES.search(path)
                if above in found and image:
                    raise OptionError(
                        f"{shown}: {printable(found[above][0])} is an archive, and beside it lies "
                        f"{printable(path)}. If one was unpacked from the other, move one of them "
                        f"away; or give the archive itself as SRC: {shown}/"
                        f"{printable(found[above][0])}"
                    )
                if not above:
                    break
                above = above[: above.rfind(b"/", 0, -1) + 1]
        return found

    def _add(self, table: MemberTable, extent: Extent, part: ExtentReader, inner: bytes) -> bytes:
        """Add a table, and the archives that lie in it; or only the one to which a path leads."""
        rows: Sequence[int] = range(len(table.paths))
        if table.dropped:
            rows = [row for row in rows if row not in table.dropped]
        nested = [row for row in rows if is_archive(table.paths[row])]
        nested = [row for row in nested if not self._is_ignored(table.paths[row])]
        for row in reversed(nested):  # of members with one name the last counts
            if (inner + b"/").startswith(table.paths[row] + b"/"):
                rest = inner[len(table.paths[row]) + 1 :]
                return self.add_archive(self._nested(table, row, extent, part), rest)
        if nested:
            inside = set(nested)
            rows = [row for row in rows if row not in inside]
        self._added.append(_Added(extent, table, rows))
        if not nested:
            return inner
        of_path = {table.paths[row]: row for row in nested}
        self._repeated += len(nested) - len(of_path)
        others = [table.paths[row] for row in rows if not self._is_ignored(table.paths[row])]
        for above, archives in self.grouped(list(of_path), others, extent.shown).items():
            extents = [self._nested(table, of_path[path], extent, part) for path in archives]
            self.add_side_by_side(extents, archives, above, extent.shown)
        return inner

    def _nested(self, table: MemberTable, row: int, extent: Extent, part: ExtentReader) -> Extent:
        """Return the extent of an archive in another one. Raises as `add_archive`."""
        inside = member(table, row, extent, part)
        deflated = table.methods[row] == DEFLATED
        return self._inflating.inflate(inside, "deflate") if deflated else inside

    def _is_ignored(self, path: bytes) -> bool:
        return any(map(self._ignores, path.split(b"/")))

    def _is_class(self, added: Sequence[_Added]) -> bool:
        """Tell whether an image lies at the top of an archive, or nothing in folders.

        added: the archive, and those in it
        """
        folders = False
        for path in (path for one in added for path in one.paths()):
            if b"/" in path:
                folders = folders or not self._is_ignored(path)
            elif _IMAGES.search(path) and not self._is_ignored(path):
                return True
        return not folders

    def finish(self, shown: str) -> Members:
        """Return all that was added, in bytewise order of the paths, each once."""
        added, paths = self._added, [path for one in self._added for path in one.paths()]
        chosen = [np.asarray(one.rows, np.int64) for one in added]

        def column(name: str, kind: Any) -> Any:
            tables = [np.asarray(getattr(one.table, name), kind) for one in added]
            parts = [one[rows] for one, rows in zip(tables, chosen, strict=True)]
            return np.concatenate(parts) if parts else np.zeros(0, kind)

        which = np.repeat(np.arange(len(added), dtype=np.int32), [len(rows) for rows in chosen])
        order = sorted(range(len(paths)), key=paths.__getitem__)  # stable
        for one in added:
            self.problems += [(one.prefix + path, why) for path, why in one.table.problems]
        order = self._drop_duplicates(order, paths, which)
        order = self._drop_folders(order, paths)
        kept = np.array(order, np.int64)
        stamps = np.array([one.extent.stamp for one in added], np.int64)
        which = which[kept]
        notes = []
        if self._repeated:
            again = show_count(self._repeated, "member has", "members have")
            notes.append(
                f"{shown}: {again} the name of one before it; of each name the last counts, as "
                "for tar"
            )
        return Members(
            [paths[i] for i in order],
            column("sizes", np.int64)[kept],
            stamps[which],
            sorted(
                {(one.prefix + path).rstrip(b"/") for one in added for path in one.table.folders}
            ),
            sorted(self.problems),
            sorted((name, _OUTSIDE) for one in added for name in one.table.outside),
            notes,
            extents=[one.extent for one in added],
            extent_numbers=which.data,
            starts=column("starts", np.int64)[kept].data,
            packed_sizes=column("packed_sizes", np.int64)[kept].data,
            checksums=column("checksums", np.uint32)[kept].data,
            methods=column("methods", np.uint8)[kept].data,
        )

    def _drop_duplicates(self, order: list[int], paths: list[bytes], which: Any) -> list[int]:
        """Leave out all but the last of the members with one path; those of two archives both."""
        alike = [i for i in range(1, len(order)) if paths[order[i]] == paths[order[i - 1]]]
        if not alike:
            return order
        places: dict[bytes, list[int]] = defaultdict(list)
        for i in alike:
            path = paths[order[i]]
            if path not in places:
                places[path].append(order[i - 1])
            places[path].append(order[i])
        dropped: set[int] = set()
        for path, rows in places.items():
            archives = list(dict.fromkeys(self._added[which[row]].extent.shown for row in rows))
            if len(archives) > 1:
                dropped.update(rows)
                self.problems.append((path, f"lies in {archives[0]} and in {archives[1]}"))
            else:
                dropped.update(rows[:-1])
                self._repeated += len(rows) - 1
        return [row for row in order if row not in dropped]

    def _drop_folders(self, order: list[int], paths: list[bytes]) -> list[int]:
        """Leave out the files that are folders, too."""
        folders = {path.rpartition(b"/")[0] for path in map(paths.__getitem__, order)} - {b""}
        for path in list(folders):
            while (path := path.rpartition(b"/")[0]) and path not in folders:
                folders.add(path)
        both = {row for row in order if paths[row] in folders}
        why = "is a file, and a folder by the path of another member"
        self.problems += [(paths[row], why) for row in sorted(both)]
        return [row for row in order if row not in both] if both else order


def _members(part: ExtentReader, extent: Extent) -> MemberTable:
    """List an archive, of the kind that its first bytes tell."""
    start = part.read(0, min(BLOCK, part.size))
    refuse_page(start, extent.shown)
    if start.startswith(b"PK\3\4") or start.startswith(b"PK\5\6"):
        table = list_zip(part, extent.shown)
    elif extent.shown.lower().endswith(".zip") and not is_sealed(start):
        table = list_zip(part, extent.shown)  # something lies before it; else says what is wrong
    elif len(start) == BLOCK and (is_sealed(start) or not any(start)):
        begun = _FIRST_MEMBERS.pop((extent.shown, extent.size, extent.stamp), None)
        table = list_tar(part, extent.shown, table=begun)
    else:
        raise SourceError(
            f"{extent.shown}: expected a tar or zip, but it begins with '{printable(start[:12])}'"
        )
    try:
        table.follow_links()
    except SourceError as error:
        raise SourceError(f"{extent.shown}: {error}") from None
    return table
