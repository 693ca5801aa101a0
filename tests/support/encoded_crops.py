"""Crops of JPEGs as workers hand them on, and their pixels as Pillow makes them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from shardio.images import decode
from shardio.images.device_crop import DeviceCrop, Place, Reason
from support import pillow_resize

SHAPE = (12, 20)


def jpeg(seed: int, *, mode: str = "RGB", exif: bytes = b"", smooth: bool = False) -> bytes:
    """A picture of 90 x 60 pixels and some more, other for each seed."""
    random = np.random.default_rng(seed)
    size = 90 + seed % 7, 60 + seed % 5
    if smooth:  # as photographs are, so that decoders differ by as much as they do on those
        noise = random.integers(0, 256, (6, 9, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)
    else:
        image = Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    file = io.BytesIO()
    image.convert(mode).save(file, "JPEG", quality=90, exif=exif)
    return file.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[decode.ORIENTATION_TAG] = orientation
    return exif.tobytes()


def encoded(number: int, **options: Any) -> DeviceCrop:
    """A crop of a JPEG, as a worker hands it on."""
    data = jpeg(number, **options)
    width, height = Image.open(io.BytesIO(data)).size
    place = [0.0] * len(Place)
    place[:4] = 3.25 + number % 3, 5.5, width - 4.125, height - number % 4
    place[Place.WHOLE_WIDTH] = place[Place.WIDTH] = width
    place[Place.WHOLE_HEIGHT] = place[Place.HEIGHT] = height
    place[Place.ORIENTATION], place[Place.FLIP] = number % 8 + 1, number % 2
    place[Place.NUMBER] = 1000 + number
    return DeviceCrop(data, tuple(place), SHAPE, "bicubic")


def finished(number: int, reason: Reason = Reason.PROCESS) -> DeviceCrop:
    """A crop that a worker has made."""
    pixels = np.random.default_rng(number).integers(0, 256, (*SHAPE, 3), dtype=np.uint8)
    place = [0.0] * len(Place)
    for right, across in ((Place.RIGHT, SHAPE[1]), (Place.BOTTOM, SHAPE[0])):
        for one in (right, right + 2, right + 6):  # of the box, the whole, the file
            place[one] = across
    place[Place.ORIENTATION], place[Place.REASON], place[Place.NUMBER] = 1, reason, number
    return DeviceCrop(pixels.tobytes(), tuple(place), SHAPE, "bicubic")


def expected(crop: DeviceCrop) -> np.ndarray:
    """(H, W, 3) as Pillow makes it of what PIL decodes."""
    place = crop.place
    if place[Place.REASON]:
        return np.frombuffer(crop.data, np.uint8).reshape(*crop.shape, 3)
    pixels = decode.pixels(bytes(crop.data), upright=False)
    return pillow_resize.crop(
        *(pixels, place[:4], crop.shape, crop.interpolation),
        *(int(place[Place.ORIENTATION]), bool(place[Place.FLIP])),
    )


def equal(images: torch.Tensor, crops: Sequence[DeviceCrop]) -> None:
    assert images.dtype == torch.uint8 and images.shape == (len(crops), 3, *SHAPE)
    for got, crop in zip(images, crops, strict=True):
        np.testing.assert_array_equal(got.permute(1, 2, 0).numpy(), expected(crop))


BATCH = [
    *(encoded(number) for number in range(10)),
    finished(20),
    encoded(10, mode="L"),
    finished(21, Reason.NOT_JPEG),
]


def damaged(number: int) -> DeviceCrop:
    crop = encoded(number)
    return DeviceCrop(crop.data[:700], crop.place, crop.shape, crop.interpolation)
