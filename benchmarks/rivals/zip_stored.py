"""One zip, its members stored as they are, named as the files of an image folder.

Python's zipfile, which compares the CRC-32 of each member that it reads. Each worker opens the zip
for itself and reads its directory once: a descriptor that is shared has one position for all.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

from ..data import listing
from .base import Opened, crop, data_loader, epochs


class Zip(Opened):
    def _open(self) -> Callable[[int], bytes]:
        archive = zipfile.ZipFile(self.path)
        names = archive.namelist()
        return lambda index: archive.read(names[index])


def write(folder: str, out: str) -> None:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for path, _ in listing(folder):
            archive.write(path, os.path.relpath(path, folder))


def images(path: str, *, size: int, batch: int, workers: int) -> Iterator[Any]:
    dataset = Zip(path, _labels(path), crop(size))
    return epochs(data_loader(dataset, batch=batch, workers=workers, shuffle=True))


def records(path: str) -> Iterator[bytes]:
    return iter(Zip(path, _labels(path)).read())


def _labels(path: str) -> list[int]:
    with zipfile.ZipFile(path) as archive:
        classes = [os.path.dirname(name) for name in archive.namelist()]
    numbers = {name: number for number, name in enumerate(sorted(set(classes)))}
    return [numbers[name] for name in classes]
