"""FFCV: one .beton file, images re-encoded as JPEG of quality 90, decoded by its own C code.

Its writer takes pixels, so original bytes cannot be kept. Written as its ImageNet script does for
full-size JPEGs (libffcv/ffcv-imagenet, write_imagenet.sh: quality 90), but without its limit on the
longer side: what is decoded is less work than the originals are. Read as its tuning guide says for
what fits in memory (docs.ffcv.io/parameter_tuning.html): os_cache=True, order RANDOM. Decoding uses
libturbojpeg with the fast DCT and the accurate upsampling; resizing is OpenCV's INTER_AREA.
Each batch is a view of memory that a later one overwrites.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..data import listing
from .base import AREA, RATIO, epochs

PAGE_BYTES = 8 << 20  # the writer waits for ever on an image that is larger: its pages


class _Files:
    def __init__(self, folder: str) -> None:
        self.files = listing(folder)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        path, label = self.files[index]
        return np.fromfile(path, np.uint8), label


class _Pixels(_Files):
    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        path, label = self.files[index]
        return Image.open(path).convert("RGB"), label


def write(folder: str, out: str) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    dataset = _Pixels(folder)
    for path, _ in dataset.files:
        _check_size(path)
    fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=90), "label": IntField()}
    DatasetWriter(out, fields, page_size=PAGE_BYTES, num_workers=2).from_indexed_dataset(dataset)


def _check_size(path: str) -> None:
    if os.path.getsize(path) > PAGE_BYTES // 2:
        raise ValueError(f"{path}: FFCV's writer may wait for ever on an image above its page")


def images(path: str, *, size: int, batch: int, workers: int) -> Iterator[Any]:
    from ffcv.fields import decoders
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage

    whole = size == 32
    pixels = (
        [decoders.SimpleRGBImageDecoder()]
        if whole
        else [
            decoders.RandomResizedCropRGBImageDecoder((size, size), scale=AREA, ratio=RATIO),
            RandomHorizontalFlip(),
        ]
    )
    loader = Loader(
        path, batch_size=batch, num_workers=workers, order=OrderOption.RANDOM, os_cache=True,
        drop_last=False,
        pipelines={
            "image": [*pixels, ToTensor(), ToTorchImage()],
            "label": [decoders.IntDecoder(), ToTensor(), Squeeze()],
        },
    )  # fmt: skip
    return epochs(loader)


def write_files(folder: str, out: str) -> None:
    """The files as they are, each a row of bytes."""
    from ffcv.fields import BytesField, IntField
    from ffcv.writer import DatasetWriter

    fields = {"image": BytesField(), "label": IntField()}
    DatasetWriter(out, fields, num_workers=2).from_indexed_dataset(_Files(folder))


def files(path: str, *, batch: int, workers: int) -> Any:
    """A loader of files, padded to the longest of all: (batch, longest) uint8, and labels."""
    from ffcv.fields import decoders
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import Squeeze, ToTensor

    return Loader(
        path, batch_size=batch, num_workers=workers, order=OrderOption.RANDOM, os_cache=True,
        drop_last=False,
        pipelines={
            "image": [decoders.BytesDecoder(), ToTensor()],
            "label": [decoders.IntDecoder(), ToTensor(), Squeeze()],
        },
    )  # fmt: skip
