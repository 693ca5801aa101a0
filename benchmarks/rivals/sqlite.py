"""One SQLite database: a row an image, asked for by its number.

`INTEGER PRIMARY KEY` is the row's own number, so a SELECT goes through one B-tree. Read-only, and
each worker connects for itself: sqlite.org/howtocorrupt.html, 2.6, forbids to carry a connection
across a fork. mmap_size lets SQLite read by mmap, as its page of that name advises for large reads.
"""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from ..data import listing
from .base import Opened, crop, data_loader, epochs

ONE = "SELECT image FROM images WHERE id = ?"


class Sqlite(Opened):
    def _open(self) -> Callable[[int], bytes]:
        rows = _connect(self.path)

        def read(index: int) -> bytes:
            found: bytes = rows.execute(ONE, (index,)).fetchone()[0]
            return found

        weakref.finalize(read, rows.close)  # Python 3.13 warns of those that nobody closes
        return read


def write(folder: str, out: str) -> None:
    with closing(sqlite3.connect(out)) as rows, rows:
        rows.execute("CREATE TABLE images (id INTEGER PRIMARY KEY, label INTEGER, image BLOB)")
        rows.executemany(
            "INSERT INTO images VALUES (?, ?, ?)",
            (
                (i, label, Path(path).read_bytes())
                for i, (path, label) in enumerate(listing(folder))
            ),
        )


def images(path: str, *, size: int, batch: int, workers: int) -> Iterator[Any]:
    dataset = Sqlite(path, _labels(path), crop(size))
    return epochs(data_loader(dataset, batch=batch, workers=workers, shuffle=True))


def records(path: str) -> Iterator[bytes]:
    return iter(Sqlite(path, _labels(path)).read())


def _connect(path: str) -> sqlite3.Connection:
    rows = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    rows.execute("PRAGMA mmap_size = 17179869184")
    return rows


def _labels(path: str) -> list[int]:
    # A label lies before its image, so the pages of the images are not read.
    with closing(_connect(path)) as rows:
        return [label for (label,) in rows.execute("SELECT label FROM images ORDER BY id")]
