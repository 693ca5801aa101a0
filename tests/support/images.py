"""Images made here, encoded in all formats, and their pixels as PIL has them."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from shardio.images.decode import decode, to_rgb
from shardio.images.transforms import Transform

IMAGENET = Path("/tmp/data/imagenet")
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def scene(width: int = 97, height: int = 61) -> Image.Image:
    """A smooth picture without any symmetry, so that every turn of it is another picture."""
    y, x = np.mgrid[0:height, 0:width]
    red = 255 * x / width
    green = 255 * y / height
    blue = 127 + 120 * np.sin(x / 9 + y / 23)
    return Image.fromarray(np.stack([red, green, blue], -1).astype(np.uint8))


def turned(orientation: int, image: Image.Image, kind: str = "PNG", **options) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif.tobytes(), **options)


def to_array(image: Image.Image) -> np.ndarray:
    return np.array(to_rgb(image))


def pixels(data: bytes, **options) -> np.ndarray:
    return to_array(decode(data, **options))


def apart(a: np.ndarray, b: np.ndarray) -> int:
    assert a.shape == b.shape
    return int(np.abs(a.astype(int) - b.astype(int)).max())


def png(width: int, height: int, depth: int, colour: int, body: bytes) -> bytes:
    """A PNG file written by hand: 'body' is the IDAT payload before compression."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(
            ">I", zlib.crc32(name + data)
        )  # fmt: skip

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(body))
        + chunk(b"IEND", b"")
    )


def straight(orientation: int) -> Image.Image:
    """The upright picture, the road everyone knows."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(turned(orientation, scene()))))


@dataclass(frozen=True)
class Boxed(Transform):
    """Any box, so that fractions and ties of the filters are tried, too."""

    box: tuple[float, float, float, float] = (0, 0, 1, 1)

    def _box(self, width, height, draw):
        a, b, c, d = self.box
        return (a * width, b * height, c * width, d * height), bool(draw & 1)


def reopened(data: bytes | None) -> Image.Image:
    assert data is not None
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def ids(width: int = 90, height: int = 60) -> np.ndarray[Any, Any]:
    """(H, W) uint8: a class id for each of 9 x 6 blocks, so that a place can be told by its id."""
    y, x = np.mgrid[0:height, 0:width]
    blocks: np.ndarray[Any, Any] = (y * 6 // height) * 9 + x * 9 // width
    return blocks.astype(np.uint8)


def palette(values: np.ndarray[Any, Any]) -> Image.Image:
    """A mask as annotation tools write it: indices, with a colour for each."""
    height, width = values.shape
    image = Image.frombytes("P", (width, height), values.tobytes())
    image.putpalette([v * k % 256 for v in range(256) for k in (3, 5, 7)])
    return image


def photograph(values: np.ndarray[Any, Any]) -> Image.Image:
    """An RGB picture of the same scene: four times the id, grey."""
    return Image.fromarray(np.repeat(values[:, :, None] * 4, 3, 2))
