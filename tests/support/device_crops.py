"""What the device makes of a DeviceCrop, by Pillow, and images of all kinds to make it of."""

import functools
import io

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from shardio.images.device_crop import DeviceCrop, Place, Reason
from support import pillow_resize

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


class Picture:
    """A picture of noise, sharp edges or both, and a crop of it."""

    def __init__(self, seed: int, most: int = 90) -> None:
        random = np.random.default_rng(seed)
        width, height = (int(side) for side in random.integers(1, most, 2))
        self.pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        if seed % 3 == 0:
            self.pixels = self.pixels // 128 * 255
        left, top = random.uniform(0, 0.7 * width), random.uniform(0, 0.7 * height)
        right, bottom = random.uniform(left + 0.1, width), random.uniform(top + 0.1, height)
        if seed % 4 == 0:
            left, top, right, bottom = 0, 0, width, height
        if seed % 4 == 1:
            left, top = int(left), int(top)
            right, bottom = max(left + 1, int(right)), max(top + 1, int(bottom))
        self.box = left, top, right, bottom
        self.orientation = seed % 8 + 1
        self.flip = seed % 5 < 2
        self.place = [0.0] * len(Place)
        self.place[:4] = self.box
        self.place[Place.WHOLE_WIDTH] = self.place[Place.WIDTH] = width
        self.place[Place.WHOLE_HEIGHT] = self.place[Place.HEIGHT] = height
        self.place[Place.ORIENTATION], self.place[Place.FLIP] = self.orientation, self.flip

    def tensor(self, strides: int = 0) -> torch.Tensor:
        """(3, h, w): as PIL has it, planar as torch's decoders, or with gaps."""
        planar = torch.from_numpy(self.pixels).permute(2, 0, 1)
        if strides % 3 == 1:
            return planar.contiguous()
        if strides % 3 == 2:
            return torch.nn.functional.pad(planar, (2, 3, 1, 1))[:, 1:-1, 2:-3]
        return planar

    def expected(self, shape: tuple[int, int], name: str) -> np.ndarray:
        return pillow_resize.crop(self.pixels, self.box, shape, name, self.orientation, self.flip)
