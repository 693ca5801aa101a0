"""WebDataset: tar shards, eight of one size, so that both workers have as much to read.

Settings of its README (PyTorch, "Creating a WebDataset" and the ImageNet example): shards in random
order, `shuffle(1000)`, decoded and batched in the workers, WebLoader(batch_size=None).
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..data import listing
from .base import AHEAD, collated, crop, decoded, epochs, listed

SHARDS = 8


def write(folder: str, out: str) -> None:
    import webdataset

    os.makedirs(out)
    files = listing(folder)
    options = {"maxcount": -(-len(files) // SHARDS), "maxsize": 1 << 40, "verbose": 0}
    with webdataset.ShardWriter(f"{out}/%05d.tar", **options) as writer:
        for i, (path, label) in enumerate(files):
            writer.write({"__key__": f"{i:08d}", "jpg": Path(path).read_bytes(), "cls": label})


def images(path: str, *, size: int, batch: int, workers: int) -> Iterator[Any]:
    import webdataset

    transform = crop(size)
    dataset = (
        webdataset.WebDataset(_shards(path), shardshuffle=100)
        .shuffle(1000)
        .to_tuple("jpg", "cls")
        .map_tuple(lambda image: decoded(image, transform), int)
        .batched(batch, collation_fn=collated)
    )
    loader = webdataset.WebLoader(
        *(dataset,), batch_size=None, num_workers=workers, prefetch_factor=AHEAD,
        persistent_workers=True,
    )  # fmt: skip
    return epochs(loader)


def records(path: str) -> Iterator[bytes]:
    import webdataset

    return (sample["jpg"] for sample in webdataset.WebDataset(_shards(path), shardshuffle=False))


def stream(url: str, files: list[str], cache: str, *, batch: int, workers: int) -> Iterator[Any]:
    """Nothing is cached: its README's own way with http:// URLs, which it reads by curl."""
    import webdataset

    urls = [f"{url}/{name}" for name in files if name.endswith(".tar")]
    dataset = (
        webdataset.WebDataset(urls, shardshuffle=100)
        .shuffle(1000)
        .to_tuple("jpg", "cls")
        .map_tuple(bytes, int)
        .batched(batch, collation_fn=listed)
    )
    return iter(
        webdataset.WebLoader(
            *(dataset,), batch_size=None, num_workers=workers, prefetch_factor=AHEAD
        )
    )


def _shards(path: str) -> list[str]:
    return sorted(glob.glob(f"{path}/*.tar"))
