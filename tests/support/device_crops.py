"""What the device makes of a DeviceCrop, by Pillow, and images of all kinds to make it of."""

import functools
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from shardio.images.device_crop import DeviceCrop, Place, Reason

ORIENTATION_TAG = 0x0112


@functools.cache
def scene(width: int, height: int) -> Image.Image:
    """Waves of all colours with specks, so that each pixel differs from its neighbours."""
    y, x = np.mgrid[0:height, 0:width]
    noise = np.random.default_rng(width * 1000 + height).integers(-40, 40, (height, width, 3))
    waves = np.stack([np.sin(x / 5 + y / 11), np.cos(x / 7 - y / 3), np.sin((x + y) / 4)], -1)
    return Image.fromarray(np.clip(128 + 90 * waves + noise, 0, 255).astype(np.uint8))


@functools.cache
def encoded(
    width: int = 150,
    height: int = 100,
    kind: str = "JPEG",
    *,
    mode: str = "RGB",
    orientation: int = 1,
    tiled: bool = False,
    **options: object,
) -> bytes:
    """Encode the scene: in this mode, turned by EXIF, as a tile JPEG with tiles of four MCUs."""
    image, out = scene(width, height).convert(mode), io.BytesIO()
    if orientation != 1:
        exif = Image.Exif()
        exif[ORIENTATION_TAG] = orientation
        options["exif"] = exif
    if tiled:
        options["restart_marker_blocks"] = 4
    image.save(out, kind, **options)
    return out.getvalue()


def finish(crop: DeviceCrop) -> NDArray[np.uint8]:
    """Make the (H, W, 3) uint8 of a crop, as the docstring of Place says."""
    at = dict(zip(Place, crop.place, strict=True))
    whole = {place: int(at[place]) for place in Place if place > Place.BOTTOM}
    assert all(whole[place] == at[place] for place in whole)
    height, width = crop.shape
    if whole[Place.REASON] != Reason.NONE:
        assert at[Place.ORIENTATION] == 1 and not at[Place.FLIP]
        size = width, height
        for pair in ((Place.RIGHT, Place.BOTTOM), (Place.WHOLE_WIDTH, Place.WHOLE_HEIGHT)):
            assert tuple(at[one] for one in pair) == size
        assert (at[Place.WIDTH], at[Place.HEIGHT]) == size
        assert {at[one] for one in (Place.LEFT, Place.TOP, Place.X, Place.Y)} == {0}
        return np.frombuffer(crop.data, np.uint8).reshape(height, width, 3)
    file = Image.open(io.BytesIO(crop.data)).convert("RGB")
    assert file.size == (whole[Place.WIDTH], whole[Place.HEIGHT])
    # What no filter sees is of a colour that would show.
    size = whole[Place.WHOLE_WIDTH], whole[Place.WHOLE_HEIGHT]
    picture = Image.new("RGB", size, (255, 0, 255))
    picture.paste(file, (whole[Place.X], whole[Place.Y]))
    orientation = whole[Place.ORIENTATION]
    small = picture.resize(
        (height, width) if orientation >= 5 else (width, height),
        Image.Resampling[crop.interpolation.upper()],
        tuple(at[one] for one in (Place.LEFT, Place.TOP, Place.RIGHT, Place.BOTTOM)),
    )
    small.getexif()[ORIENTATION_TAG] = orientation
    upright = ImageOps.exif_transpose(small)
    return np.asarray(ImageOps.mirror(upright) if whole[Place.FLIP] else upright)
