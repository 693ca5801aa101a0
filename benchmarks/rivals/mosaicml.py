"""MosaicML Streaming: MDS shards of 64 MB, its writer's default, images as bytes.

Settings of its documentation (Getting started, "Main Concepts"): StreamingDataset(shuffle=True)
with the batch size told, a subclass whose `__getitem__` transforms, its own StreamingDataLoader.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..data import listing
from .base import AHEAD, as_bucket, collated, crop, decoded, epochs, listed


def write(folder: str, out: str) -> None:
    columns = {"image": "bytes", "label": "int"}
    with _streaming().MDSWriter(out=out, columns=columns) as writer:
        for path, label in listing(folder):
            writer.write({"image": Path(path).read_bytes(), "label": label})


def images(path: str, *, size: int, batch: int, workers: int) -> Iterator[Any]:
    streaming, transform = _streaming(), crop(size)

    class Images(streaming.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return decoded(sample["image"], transform), sample["label"]

    loader = streaming.StreamingDataLoader(
        *(Images(local=path, shuffle=True, batch_size=batch),), batch_size=batch,
        num_workers=workers, collate_fn=collated, prefetch_factor=AHEAD, persistent_workers=True,
    )  # fmt: skip
    return epochs(loader)


def records(path: str) -> Iterator[bytes]:
    """batch_size decides how far it reads ahead: with 1 it waits 0.9 ms a record."""
    dataset = _streaming().StreamingDataset(local=path, shuffle=False, batch_size=256)
    return (sample["image"] for sample in dataset)


def stream(url: str, files: list[str], cache: str, *, batch: int, workers: int) -> Iterator[Any]:
    """From a bucket into a local folder (Main Concepts, "Data loading"); boto3 finds the server."""
    import os

    streaming, options = _streaming(), dict[str, str]()
    remote = as_bucket(url, options)
    os.environ.update(options)

    class Images(streaming.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return sample["image"], sample["label"]

    dataset = Images(remote=remote, local=cache, shuffle=True, batch_size=batch)
    loader = streaming.StreamingDataLoader(
        *(dataset,), batch_size=batch, num_workers=workers, collate_fn=listed, prefetch_factor=AHEAD
    )
    return iter(loader)


def by_number(path: str) -> Iterator[bytes]:
    """As `dataset[i]`: without the threads of its iterator."""
    dataset = _streaming().StreamingDataset(local=path, shuffle=False, batch_size=256)
    return (dataset[i]["image"] for i in range(len(dataset)))


def _streaming() -> Any:
    """With stand-ins for torchvision and transformers, whose names it imports."""
    from ..formats import _streaming as found  # here: `formats` reads by `raw`, which imports us

    return found()
