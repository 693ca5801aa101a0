"""Make JPEGs of each kind that a data set may hold, to see which of them a decoder takes.

python -m tools.gpu_check.kinds FOLDER      writes them there, as KIND.jpg
"""

from __future__ import annotations

import io
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 640, 480  # of a photograph of ImageNet, about
ADOBE_RGB = "RGB stored as RGB"


def picture(width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """Draw noise that is smooth as photographs are, always the same."""
    shape = height // 16, width // 16, 3
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def encode(image: Image.Image, **options: Any) -> bytes:
    made = io.BytesIO()
    image.save(made, "JPEG", **({"quality": 90, "subsampling": "4:2:0"} | options))
    return made.getvalue()


def kinds() -> dict[str, bytes]:
    """Return a JPEG of each kind by its name; what cannot be made here is left out."""
    image = picture()
    orientation = Image.Exif()
    orientation[0x0112] = 6
    grey = partial(encode, image.convert("L"), subsampling="4:4:4")
    plain = {name: encode(image, subsampling=name) for name in ("4:4:4", "4:2:2", "4:2:0")}
    made = {
        **{name: partial(bytes, data) for name, data in plain.items()},
        "4:4:0": partial(resample, plain["4:2:2"], 0x12),
        "4:1:1": partial(resample, plain["4:2:0"], 0x41),
        "grey": grey,
        "optimised Huffman tables": partial(encode, image, optimize=True),
        "333 x 251": partial(encode, picture(333, 251)),
        "33 x 17": partial(encode, picture(33, 17)),
        "4000 x 3000": partial(encode, picture(4000, 3000)),
        "EXIF orientation 6": partial(encode, image, exif=orientation),
        "progressive": partial(encode, image, progressive=True),
        "CMYK": partial(encode, image.convert("CMYK")),
        ADOBE_RGB: partial(encode, image, keep_rgb=True, subsampling="4:4:4"),
        **{
            f"restart marker each row, {name}": partial(
                encode, image, subsampling=name, restart_marker_rows=1
            )
            for name in plain
        },
        "restart marker each row, grey": partial(grey, restart_marker_rows=1),
        "restart marker each 8 MCUs": partial(encode, image, restart_marker_blocks=8),
        "restart marker each MCU": partial(encode, image, restart_marker_blocks=1),
        "restart markers, tile JPEG": partial(tile_jpeg, plain["4:2:0"]),
        "restart markers, cut of a tile JPEG": partial(cut, plain["4:2:0"]),
    }
    found = {}
    for name, make in made.items():
        try:
            found[name] = make()
        except (OSError, TypeError, ValueError, ImportError):
            continue  # this PIL cannot, or the core and jpegtran are not here
    return found


RATED = (  # the kinds whose images/s are measured
    *("4:2:0", "progressive", "restart marker each row, 4:2:0"),
    *("restart markers, tile JPEG", "restart markers, cut of a tile JPEG"),
)


def resample(data: bytes, sampling: int) -> bytes:
    """Say another sampling in the header, and a size at which the file has as many MCUs.

    sampling: horizontal and vertical factor of the first component, as SOF has it. Their product
    stays, so each MCU has as many blocks as before. The picture is another one, in another order.
    """
    at = next(i for i in range(2, len(data)) if data[i : i + 2] in (b"\xff\xc0", b"\xff\xc1"))
    height, width = (int.from_bytes(data[at + i : at + i + 2], "big") for i in (5, 7))
    before, first = data[at + 11], at + 11
    if (before >> 4) * (before & 15) != (sampling >> 4) * (sampling & 15):
        raise ValueError(f"an MCU of sampling {before:#x} has not as many blocks as {sampling:#x}")
    if width % 32 or height % 32:
        raise ValueError(f"{width} x {height} pixels: expected multiples of 32")
    width = width * (sampling >> 4) // (before >> 4)
    height = height * (sampling & 15) // (before & 15)
    size = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return data[: at + 5] + size + data[at + 9 : first] + bytes([sampling]) + data[first + 1 :]


def tile_jpeg(data: bytes) -> bytes:
    """Return the tile JPEG of a JPEG."""
    from shardio.errors import DependencyError
    from shardio.images.jpeg_rewrite import rewrite

    try:
        made = rewrite(data)
    except DependencyError as error:
        raise OSError(str(error)) from error
    if not isinstance(made, bytes):
        raise ValueError(made.reason)
    return made


def cut(data: bytes) -> bytes:
    """Return the tiles under the middle of a picture, about half of its width and height."""
    from shardio.images.jpeg_tiles import tiles

    found = tiles(tile_jpeg(data))
    if found is None:
        raise ValueError("it is no tile JPEG")
    width, height = found.width, found.height
    return bytes(found.cut((width // 4, height // 4, 3 * width // 4, 3 * height // 4)).data)


def expected(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the pixels as PIL decodes them: (H, W, 3), not turned by an orientation."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


if __name__ == "__main__":
    for kind, jpeg in kinds().items():
        Path(sys.argv[1], f"{kind}.jpg").write_bytes(jpeg)
