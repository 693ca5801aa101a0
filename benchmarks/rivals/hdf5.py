"""One HDF5 file: the images' bytes in one dataset of variable length, and their labels.

`vlen_dtype(uint8)` is what h5py's guide ("Special types", arbitrary vlen data) gives for items of
different lengths. Each worker opens the file for itself, as the HDF5 library asks of processes that
fork. No compression: JPEGs have theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..data import listing
from .base import Opened, crop, data_loader, epochs


class Hdf5(Opened):
    def _open(self) -> Callable[[int], bytes]:
        import h5py

        images = h5py.File(self.path, "r")["images"]
        return lambda index: bytes(images[index])


def write(folder: str, out: str) -> None:
    import h5py
    import numpy as np

    files = listing(folder)
    with h5py.File(out, "w") as file:
        images = file.create_dataset("images", len(files), h5py.vlen_dtype(np.uint8))
        for i, (path, _) in enumerate(files):
            images[i] = np.fromfile(path, np.uint8)
        file["labels"] = np.array([label for _, label in files])


def images(path: str, *, size: int, batch: int, workers: int) -> Iterator[Any]:
    dataset = Hdf5(path, _labels(path), crop(size))
    return epochs(data_loader(dataset, batch=batch, workers=workers, shuffle=True))


def records(path: str) -> Iterator[bytes]:
    return iter(Hdf5(path, _labels(path)).read())


def _labels(path: str) -> list[int]:
    import h5py

    with h5py.File(path, "r") as file:
        found: list[int] = file["labels"][:].tolist()
    return found
