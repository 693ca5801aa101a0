"""Images that the demo makes where none are given: small ones, and photographs. The same each time.

Each class has one large soft texture with some grain, and images are crops of it: they compress as
photographs do, where noise would not.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

import numpy as np
from PIL import Image

CLASSES: Final = 10
_TEXTURE: Final = 1280  # pixels, of each side


class Kind(NamedTuple):
    """A kind of images to make."""

    name: str
    sides: tuple[tuple[int, int], tuple[int, int]]  # least and most width, least and most height
    grain: int  # of 255: as fine as a camera's, so that files are as large
    quality: int


SMALL: Final = Kind("small images", ((112, 144), (112, 144)), 6, 85)
PHOTOGRAPHS: Final = Kind("photographs", ((480, 560), (360, 420)), 20, 88)


def make(folder: str, kind: Kind, count: int) -> None:
    """Write so many JPEGs into class folders below `folder`."""
    random = np.random.default_rng(0)
    widths, heights = kind.sides
    for number in range(min(CLASSES, count)):
        inside = os.path.join(folder, f"class{number}")
        os.makedirs(inside)
        coarse = Image.fromarray(random.integers(0, 256, (96, 96, 3), dtype=np.uint8))
        soft = coarse.resize((_TEXTURE, _TEXTURE), Image.Resampling.BICUBIC)
        grain = random.integers(-kind.grain, kind.grain + 1, (_TEXTURE, _TEXTURE, 1))
        texture = np.clip(np.asarray(soft) + grain, 0, 255).astype(np.uint8)
        for i in range(number, count, CLASSES):
            wide = int(random.integers(widths[0], widths[1] + 1))
            high = int(random.integers(heights[0], heights[1] + 1))
            x, y = (int(random.integers(0, _TEXTURE - side)) for side in (wide, high))
            part = np.ascontiguousarray(texture[y : y + high, x : x + wide])
            name = os.path.join(inside, f"{i:05d}.jpg")
            Image.fromarray(part).save(name, quality=kind.quality)
