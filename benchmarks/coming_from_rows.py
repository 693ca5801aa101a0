"""Write batches down: what `...  # train` of docs/coming-from becomes, in any environment."""

from __future__ import annotations

import json
from typing import Any

import numpy as np


def record(path: str, images: Any, labels: Any) -> None:
    """Append a line: of each row its label and its mean colour, from 0 to 255.

    images: (B, 3, H, W) or (B, H, W, 3), uint8 or floats from 0 to 1.
    """
    pixels = np.asarray(images, np.float64)
    if pixels.shape[-1] != 3:
        pixels = pixels.transpose(0, 2, 3, 1)
    if not str(getattr(images, "dtype", "")).endswith("uint8"):
        pixels *= 255
    rows = [
        [int(label), *map(round, image.mean((0, 1)))]
        for image, label in zip(pixels, labels, strict=True)
    ]
    with open(path, "a") as file:  # ranks append to one file, each line by one write
        file.write(json.dumps(rows) + "\n")
