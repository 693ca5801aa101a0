"""One file per image, listed once, opened when asked for: a plain torchvision ImageFolder.

DataLoader with shuffle=True, as in torchvision's ImageNet example (pytorch/examples, imagenet): the
workers decode by PIL, which is what ImageFolder's default loader does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..data import listing
from .base import Transform, crop, data_loader, decoded, epochs


class Folder:
    """Map-style, for DataLoader(shuffle=True): (image, label)."""

    def __init__(self, folder: str, transform: Transform = None) -> None:
        self.files, self.transform = listing(folder), transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        path, label = self.files[index]
        with open(path, "rb") as file:
            if self.transform is None:
                return file.read(), label
            return decoded(file, self.transform), label


def images(path: str, *, size: int, batch: int, workers: int) -> Iterator[Any]:
    dataset = Folder(path, crop(size))
    return epochs(data_loader(dataset, batch=batch, workers=workers, shuffle=True))


def records(path: str) -> Iterator[bytes]:
    dataset = Folder(path)
    return (dataset[i][0] for i in range(len(dataset)))
