"""Pillow's resize of 8-bit pixels, written out: what the resize on a device has to equal.

After src/libImaging/Resample.c, line by line. Floats are its doubles, boxes its floats, and the
sums its integers of 32 bits. Rows are resized first, as in Pillow before 13.0; later releases begin
with the columns of some pictures (`columns_first`). Between the two passes pixels are rounded, and
cut to 0 to 255.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shardio.images.decode import TURNS, UPRIGHT


def box_filter(x: float) -> float:
    return 1.0 if -0.5 < x <= 0.5 else 0.0


def bilinear(x: float) -> float:
    x = abs(x)
    return 1.0 - x if x < 1.0 else 0.0


def hamming(x: float) -> float:
    x = abs(x)
    if x == 0.0 or x >= 1.0:
        return float(x == 0.0)
    x = x * math.pi
    return math.sin(x) / x * (float(np.float32(0.54)) + float(np.float32(0.46)) * math.cos(x))


def bicubic(x: float) -> float:
    x, a = abs(x), -0.5
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2.0 else 0.0


def sinc(x: float) -> float:
    return math.sin(x * math.pi) / (x * math.pi) if x else 1.0


def lanczos(x: float) -> float:
    return sinc(x) * sinc(x / 3) if -3.0 <= x < 3.0 else 0.0


FILTERS = {
    "box": (box_filter, 0.5),
    "bilinear": (bilinear, 1.0),
    "hamming": (hamming, 1.0),
    "bicubic": (bicubic, 2.0),
    "lanczos": (lanczos, 3.0),
}


def coefficients(
    size: int, low: float, high: float, count: int, name: str
) -> list[tuple[int, np.ndarray]]:
    """Of each pixel of the result: the first pixel that it is made of, and their weights."""
    function, support = FILTERS[name]
    start, length = float(np.float32(low)), float(np.float32(high) - np.float32(low))
    scale = length / count
    wider = max(scale, 1.0)
    support *= wider
    found = []
    for at in range(count):
        centre = start + (at + 0.5) * scale
        first = max(0, int(centre - support + 0.5))
        end = min(size, int(centre + support + 0.5))
        weights = [function((x + first - centre + 0.5) * (1.0 / wider)) for x in range(end - first)]
        total = 0.0
        for weight in weights:
            total += weight
        if total != 0.0:
            weights = [weight / total for weight in weights]
        fixed = [int((-0.5 if w < 0 else 0.5) + w * (1 << 22)) for w in weights]
        found.append((first, np.array(fixed, np.int64)))
    return found


def along_rows(pixels: np.ndarray, weights: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
    """(h, w, 3) -> (h, len(weights), 3), all uint8."""
    out = np.empty((len(pixels), len(weights), pixels.shape[2]), np.uint8)
    wide = pixels.astype(np.int64)
    for at, (first, fixed) in enumerate(weights):
        sums = (1 << 21) + np.tensordot(wide[:, first : first + len(fixed)], fixed, (1, 0))
        out[:, at] = np.clip(sums >> 22, 0, 255)
    return out


def columns_first(whole: tuple[int, int], size: tuple[int, int]) -> bool:
    """Whether Pillow 13 begins with the columns; sizes: (width, height) of the picture, the result.

    Of the whole picture, whatever the box is.
    """
    narrower, lower = whole[0] - size[0], whole[1] - size[1]
    return lower > 0 and lower > 2 * narrower


def resized(
    pixels: np.ndarray,
    size: tuple[int, int],
    box: Sequence[float],
    name: str,
    *,
    late: bool = False,
) -> np.ndarray:
    """What Image.resize(size, name, box) makes of (h, w, 3) pixels; late: that of Pillow 13."""
    height, width = pixels.shape[:2]
    columns = late and columns_first((width, height), size)
    for axis in (1, 0) if columns else (0, 1):  # 0: along the rows
        weights = coefficients(pixels.shape[1 - axis], box[axis], box[axis + 2], size[axis], name)
        turned = pixels.transpose(1, 0, 2) if axis else pixels
        turned = along_rows(turned, weights)
        pixels = turned.transpose(1, 0, 2) if axis else turned
    return pixels


def crop(
    pixels: np.ndarray,
    box: Sequence[float],
    shape: tuple[int, int],
    name: str,
    orientation: int = 1,
    flip: bool = False,
) -> np.ndarray:
    """(H, W, 3) of a box of a picture: resized as stored, then turned upright, then mirrored."""
    turn = TURNS.get(orientation, UPRIGHT)
    height, width = shape
    small = resized(pixels, (height, width) if turn.swap else (width, height), box, name)
    # Upright is where the turn's mirrors are undone, and then rows become columns.
    small = small[:, ::-1] if turn.mirror_x else small
    small = small[::-1] if turn.mirror_y else small
    small = small.transpose(1, 0, 2) if turn.swap else small
    return small[:, ::-1] if flip else small
