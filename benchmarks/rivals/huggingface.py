"""Hugging Face datasets: a folder of images saved to disk as Arrow, its bytes within.

Settings of its documentation ("Use with PyTorch", "Load image data"): load_dataset("imagefolder"),
`with_transform` for what is done while reading, torch's DataLoader with shuffle=True.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from ..data import listing
from .base import AHEAD, crop, data_loader, epochs, listed

FILES = 8  # of Parquet: as many for both workers


def write(folder: str, out: str) -> None:
    import datasets

    # Every file, named: else it takes the one whose name has "train" in it for the training split.
    files = [path for path, _ in listing(folder)]
    found = datasets.load_dataset("imagefolder", data_files=files, split="train", drop_labels=False)
    found.save_to_disk(out)


def write_parquet(folder: str, out: str) -> None:
    """Parquet files with the images within, as `push_to_hub` makes them."""
    import os

    import datasets

    files = [path for path, _ in listing(folder)]
    found = datasets.load_dataset("imagefolder", data_files=files, split="train", drop_labels=False)
    found = found.cast_column("image", datasets.Image(decode=False))
    os.makedirs(out)
    for i in range(FILES):
        part = found.shard(FILES, i, contiguous=True).map(_embedded)
        part.to_parquet(f"{out}/{i:05d}.parquet")


def _embedded(row: dict[str, Any]) -> dict[str, Any]:
    image = row["image"]
    if image["bytes"] is None:
        with open(image["path"], "rb") as file:
            image = {"bytes": file.read(), "path": None}
    return {"image": image}


def stream(url: str, files: list[str], cache: str, *, batch: int, workers: int) -> Iterator[Any]:
    """load_dataset(streaming=True), with the prefetching of ParquetConfig's documentation."""
    import datasets
    import pyarrow
    import pyarrow.dataset
    from torch.utils.data import DataLoader

    ahead = pyarrow.CacheOptions(prefetch_limit=1, range_size_limit=128 << 20)
    rows = datasets.load_dataset(
        "parquet",
        data_files=[f"{url}/{name}" for name in files if name.endswith(".parquet")],
        split="train",
        streaming=True,
        cache_dir=cache,
        fragment_scan_options=pyarrow.dataset.ParquetFragmentScanOptions(cache_options=ahead),
    )
    rows = rows.cast_column("image", datasets.Image(decode=False)).shuffle(buffer_size=1000, seed=0)

    def pairs(items: list[dict[str, Any]]) -> Any:
        return listed([(item["image"]["bytes"], item["label"]) for item in items])

    return iter(
        DataLoader(
            *(rows,), batch_size=batch, num_workers=workers, collate_fn=pairs,
            prefetch_factor=AHEAD,
        )
    )  # fmt: skip


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
