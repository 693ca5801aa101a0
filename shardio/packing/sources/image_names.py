"""Names of images in tables and lists: paths, or their last parts, with the ending or without."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ...errors import SourceError, printable
from ...names import key_bytes
from .base import Ints, Listings, SourceRequest
from .files import not_images

_ENDING = re.compile(rb"(?<=[^/])\.[^./]*\Z")


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
        self._known: dict[tuple[int, bool], tuple[dict[bytes, int], set[bytes]]] = {}

    def starts(self) -> dict[str, int]:
        """Return the number of the first image of each split."""
        counts = [len(listing.keys) for listing in self.listings.values()]
        return dict(zip(self.listings, itertools.accumulate(counts, initial=0), strict=False))

    def ways(self) -> Iterator[tuple[int, bool]]:
        """Yield ways to name an image: by the last parts of its path, with its ending or not."""
        for parts in range(self.depth, 0, -1):
            yield parts, True
            yield parts, False

    def places(self, way: tuple[int, bool]) -> tuple[dict[bytes, int], set[bytes]]:
        """Return the images by their names of a way, and names that several of them have.

        A file that is no image by its name yields its name to one that is: a.mat to a.jpg.
        """
        if way not in self._known:
            found: dict[bytes, int] = {}
            again = set()
            odd = set(not_images(self.paths))
            for place, path in enumerate(self.paths):
                name = image_name(path, way)
                first = found.setdefault(name, place)
                if first != place and self.paths[first] in odd:
                    found[name] = place
                elif first != place and path not in odd:
                    again.add(name)
            self._known[way] = found, again
        return self._known[way]

    def way_of(self, names: Sequence[bytes]) -> tuple[int, tuple[int, bool]]:
        """Return how many of some names are of images, and by which way of naming."""
        best, chosen = 0, (1, True)
        for way in self.ways():
            found, again = self.places(way)
            known_so = [name for name in (image_name(one, way) for one in names) if name in found]
            if len(known_so) > best:
                best, chosen = len(known_so), way
            if best == len(names) and not again:
                break
        return best, chosen

    def find(
        self, names: Iterable[bytes | None], way: tuple[int, bool], what: str
    ) -> tuple[Ints, list[tuple[int, bytes]]]:
        """Return (images,) the rows that name images, -1 where none does; and rows that name none.

        Raises SourceError for names that several images have, and images that several rows name.
        """
        found, again = self.places(way)
        rows = np.full(len(self.paths), -1, np.int64)
        lost = []
        for row, text in enumerate(names):
            name = b"" if text is None else image_name(text, way)
            place = found.get(name)
            if place is None:
                lost.append((row, text or b""))
                continue
            if name in again:
                both = [printable(path) for path in self.paths if image_name(path, way) == name][:2]
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


def image_name(path: bytes, way: tuple[int, bool]) -> bytes:
    """Return the last parts of a path, with its ending or not."""
    parts, whole = way
    if path[:1] in (b"/", b"."):
        path = os.path.normpath(path).lstrip(b"/")
    if path.count(b"/") >= parts:
        path = b"/".join(path.split(b"/")[-parts:])
    return path if whole else _ENDING.sub(b"", path)
