"""Names of images in tables and lists: paths, or their last parts, with the ending or without."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ...errors import SourceError, printable
from ...names import key_bytes
from .base import Ints, Listings, SourceRequest, some_of
from .field_names import LABELS, PATHS, known
from .files import not_images
from .tables import Column

_TRIED = 1000  # rows of a column that are looked at first for names of images
_ENDING = re.compile(rb"(?<=[^/])\.[^./\s]*\Z")

# How rows name images: by how many last parts of a path; whether the ending of the image counts,
# and that of the row; whether folders before these parts may be called otherwise.
NameMatch = tuple[int, bool, bool, bool]


class ImageNames:
    """The images of all splits, one after the other, and how they may be named."""

    def __init__(self, listings: Listings, request: SourceRequest) -> None:
        self.listings, self.request = listings, request
        self.paths = [
            key_bytes(f"{name}/" if name else "") + key
            for name, listing in listings.items()
            for key in listing.keys
        ]
        self.depth = max((path.count(b"/") + 1 for path in self.paths), default=1)
        self._odd = {*not_images(self.paths)}
        self._known: dict[tuple[int, bool], tuple[dict[bytes, int], set[bytes]]] = {}

    def starts(self) -> dict[str, int]:
        """Return the number of the first image of each split."""
        counts = [len(listing.keys) for listing in self.listings.values()]
        return dict(zip(self.listings, itertools.accumulate(counts, initial=0), strict=False))

    def places(self, way: NameMatch) -> tuple[dict[bytes, int], set[bytes]]:
        """Return the images by their names of a way, and names that several of them have.

        A file that is no image by its ending leaves its name to one that is.
        """
        if way[:2] not in self._known:
            found: dict[bytes, int] = {}
            again = set()
            images = sorted(range(len(self.paths)), key=lambda i: self.paths[i] in self._odd)
            for place in images:
                name = image_name(self.paths[place], *way[:2])
                first = self.paths[found.setdefault(name, place)]
                odd = self.paths[place] in self._odd and first not in self._odd
                if found[name] != place and not odd:
                    again.add(name)
            self._known[way[:2]] = found, again
        return self._known[way[:2]]

    def way_of(self, names: Collection[bytes], *, loose: bool = False) -> tuple[int, NameMatch]:
        """Return how many of some names are of images, and by which way of naming."""
        best, chosen = 0, (1, True, True, loose)
        for parts in range(self.depth, 0, -1):
            for ending in ((True, True), (False, True), (False, False)):
                way = (parts, *ending, loose)
                _, again = self.places(way)
                count = sum(self._place(one, way) is not None for one in names)
                if count > best:
                    best, chosen = count, way
                if best == len(names) and not again:
                    return best, chosen
        return best, chosen

    def _place(self, text: bytes, way: NameMatch) -> int | None:
        """Return the image that a row names; None: none does."""
        parts = way[0]
        place = self.places(way)[0].get(image_name(text, parts, way[2]))
        if place is None or way[3] or b"/" not in text or b"/" not in (path := self.paths[place]):
            return place
        folders, others = (
            image_name(one, self.depth, True).split(b"/")[:-1] for one in (text, path)
        )
        common = min(len(folders), len(others))
        return place if folders[len(folders) - common :] == others[len(others) - common :] else None

    def naming(self, columns: Mapping[str, Column], shown: str) -> tuple[str, NameMatch] | None:
        """Return the column that names images, and how; None where none does.

        Raises SourceError where it cannot be told which of several it is.
        """
        asked = self.request.fields.get("image")
        typed = {name: one for name, one in columns.items() if one.kind in ("int", "str")}
        typed = {name: one for name, one in typed.items() if name == asked} or typed
        found = {}
        for most, least in ((_TRIED, None), (None, len(self.paths))):
            for name, column in typed.items():
                tried = {text for text in texts(column, most) if text}
                fits, way = self.way_of(tried, loose=asked in columns)
                if 2 * fits > (len(tried) if least is None else least):
                    found[name] = way
            if found:  # else by all rows: those of other images may come first
                break
        better: tuple[Callable[[str], bool], ...] = (
            lambda name: found[name][1],  # with its ending
            lambda name: known((*PATHS, "image_id"), [name]) is not None,
            lambda name: known(LABELS, [name]) is None,
            lambda name: len({*texts(typed[name])}) == len(typed[name]),
        )
        for is_better in better:
            if len(found) > 1:
                found = {name: way for name, way in found.items() if is_better(name)} or found
        if len(found) > 1:
            rows = [self.find(texts(typed[name]), way, shown)[0] for name, way in found.items()]
            if any(not np.array_equal(rows[0], one) for one in rows):
                raise SourceError(
                    f"{shown}: the values of each of the columns {some_of(found)} are names of "
                    "images, but not of the same ones; --fields image=COLUMN says which it is"
                )
        return next(iter(found.items()), None)

    def show(self, way: NameMatch, example: bytes) -> str:
        """Say how rows name images, as this one does."""
        parts, whole = way[:2]
        how = "file name" if parts == 1 else f"last {parts} parts of the path"
        how = "path" if parts == self.depth > 1 else how
        left = example.strip(b"./").count(b"/") >= self.depth
        more = f"; the folders before, as in {printable(example)}, are not compared" if left else ""
        return f"by {how}, {'with' if whole else 'without'} its ending{more}"

    def find(
        self, names: Iterable[bytes | None], way: NameMatch, what: str
    ) -> tuple[Ints, list[tuple[int, bytes]]]:
        """Return (images,) the rows that name images, -1 where none does; and rows that name none.

        Raises SourceError for names that several images have, and images that several rows name.
        """
        _, again = self.places(way)
        rows = np.full(len(self.paths), -1, np.int64)
        lost = []
        for row, text in enumerate(names):
            place = None if text is None else self._place(text, way)
            if place is None:
                lost.append((row, text or b""))
                continue
            if (name := image_name(self.paths[place], *way[:2])) in again:
                both = [
                    printable(path) for path in self.paths if image_name(path, *way[:2]) == name
                ][:2]
                raise SourceError(
                    f"{what}: row {row + 1}: several images are called {printable(name)}, such as "
                    f"{' and '.join(both)}; expected their paths"
                )
            if rows[place] >= 0:
                raise SourceError(
                    f"{what}: rows {rows[place] + 1} and {row + 1} both name "
                    f"{printable(self.paths[place])}; expected one row for each image"
                )
            rows[place] = row
        return rows, lost


def image_name(path: bytes, parts: int, whole: bool) -> bytes:
    """Return the last parts of a path, with its ending or not."""
    if path[:1] in (b"/", b"."):
        path = os.path.normpath(path).lstrip(b"/")
    if path.count(b"/") >= parts:
        path = b"/".join(path.split(b"/")[-parts:])
    return path if whole else _ENDING.sub(b"", path)


def texts(column: Column, most: int | None = None) -> Iterator[bytes | None]:
    """Yield values as text, of all rows or of so many at most; None where there is none."""
    rows = np.arange(len(column))
    if most is not None and most < len(column):  # spread, since rows may be sorted
        rows = rows[:: -(-len(column) // most)]
    for value in column.raw(rows):
        yield value if value is None else bytes(value) if column.ends is not None else _text(value)


def _text(value: Any) -> bytes:
    return str(value).encode()
