"""Hugging Face datasets: a folder of images saved to disk as Arrow, its bytes within.

Settings of its documentation ("Use with PyTorch", "Load image data"): load_dataset("imagefolder"),
`with_transform` for what is done while reading, torch's DataLoader with shuffle=True.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from ..data import listing
from .base import crop, data_loader, epochs


def write(folder: str, out: str) -> None:
    import datasets

    # Every file, named: else it takes the one whose name has "train" in it for the training split.
    files = [path for path, _ in listing(folder)]
    found = datasets.load_dataset("imagefolder", data_files=files, split="train", drop_labels=False)
    found.save_to_disk(out)


def images(path: str, *, size: int, batch: int, workers: int) -> Iterator[Any]:
    import datasets

    transform = crop(size)

    def cropped(rows: dict[str, Any]) -> dict[str, Any]:
        found = [transform(image, draw=random.getrandbits(64)) for image in rows["image"]]
        return {"pair": list(zip(found, rows["label"], strict=True))}

    class Pairs:
        """The values of a row, as all others here have them."""

        def __init__(self) -> None:
            self.rows = datasets.load_from_disk(path).with_transform(cropped)

        def __len__(self) -> int:
            return len(self.rows)

        def __getitems__(self, indexes: list[int]) -> Any:  # torch asks for a batch by this
            return [row["pair"] for row in self.rows.__getitems__(indexes)]

        def __getitem__(self, index: int) -> Any:
            return self.rows[index]["pair"]

    return epochs(data_loader(Pairs(), batch=batch, workers=workers, shuffle=True))


def records(path: str) -> Iterator[bytes]:
    import datasets

    rows = datasets.load_from_disk(path).cast_column("image", datasets.Image(decode=False))
    return (row["image"]["bytes"] for row in rows)
