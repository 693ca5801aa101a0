"""Thumbnails, overlays and crops of stored images, as files that a browser shows."""

from __future__ import annotations

import colorsys
import io
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import DecodeError
from ..formats.sample import Schema
from ..images import decode
from ..images.decode import decode_errors, pil_module, raw_pixels
from ..images.filetype import image_type
from ..images.transforms import RandomResizedCrop, crop_box
from ..order import rng
from .results import Crop, Picture

# What browsers show as it is; all else is made PNG.
_SHOWN = {"JPEG": "image/jpeg", "PNG": "image/png", "GIF": "image/gif", "WEBP": "image/webp"}
SHOWABLE = frozenset(("image", "bytes", "array"))  # kinds of fields that may hold an image
_QUALITY = 85  # of thumbnails
_IGNORED = 255  # the class number that stands for no class, in masks of 8 bits
_OPAQUE = 150  # of 255, of a class in an overlay


class Header(NamedTuple):
    """What the first bytes of an image say. Width and height are those of the upright image."""

    format: str
    mode: str
    width: int
    height: int
    turned: bool  # EXIF turns or mirrors it

    def __str__(self) -> str:
        turned = ", turned by EXIF" if self.turned else ""
        return f"{self.format}, {self.width} x {self.height}, {self.mode}{turned}"


def image_fields(schema: Schema) -> tuple[str, ...]:
    """Return the fields that are shown as images in pages: the main one first.

    Those of kind image; and `image`, where a format of others has pixels or bytes there.
    """
    main = schema.main_image
    first = (main,) if main is not None and dict(schema.fields)[main] in SHOWABLE else ()
    return tuple(dict.fromkeys((*first, *schema.images)))


def as_file(value: Any) -> bytes | None:
    """Return a value as the bytes of an image file: they themselves, or pixels as PNG; or None.

    Pixels are arrays (H, W, 3), (H, W, 4) of uint8, or (H, W), (H, W, 1) of integers up to 255.
    """
    if isinstance(value, bytes):
        return value
    if not isinstance(value, np.ndarray) or not value.size:
        return None
    pixels = value[..., 0] if value.ndim == 3 and value.shape[2] == 1 else value
    if pixels.ndim == 2 and pixels.dtype.kind in "biu" and 0 <= pixels.min() <= pixels.max() < 256:
        pixels = pixels.astype(np.uint8)
    elif pixels.ndim != 3 or pixels.shape[2] not in (3, 4) or pixels.dtype != np.uint8:
        return None
    return _saved(pil_module().fromarray(np.ascontiguousarray(pixels)), "PNG").data


def read_header(data: bytes, max_pixels: int | None) -> Header:
    """Read the header of an image, without its pixels. Raises DecodeError."""
    if (raw := raw_pixels(data, max_pixels)) is not None:
        return Header("PPM", "RGB", raw.shape[1], raw.shape[0], False)
    with decode_errors(data):
        image = decode.open_image(data, max_pixels)
        if image.format == "TIFF":  # PIL turns it while loading
            image.load()
        width, height = image.size
        turn = decode.turn_of(image)
    if turn.swap:
        width, height = height, width
    return Header(str(image.format), image.mode, width, height, turn != decode.UPRIGHT)


def original(data: bytes, max_pixels: int | None) -> Picture:
    """Return the bytes of an image file if browsers show it, else a PNG of it.

    Raises DecodeError above the limit, too: a browser would decode a bomb.
    """
    media = _SHOWN.get(image_type(data[:32]) or "")
    if media is not None:
        try:
            decode.open_image(data, max_pixels)
        except DecodeError:
            raise
        except Exception:  # PIL's: what is cut is shown as far as it goes
            pass
        return Picture(data, media)
    return _saved(decode.decode(data, max_pixels=max_pixels), "PNG")


def thumbnail(data: bytes, side: int, max_pixels: int | None) -> Picture:
    """Return an image, upright, RGB, at most `side` pixels wide and high. Raises DecodeError."""
    if raw_pixels(data, max_pixels) is not None:
        image = decode.decode(data, max_pixels=max_pixels)
    else:
        with decode_errors(data):
            image = decode.open_image(data, max_pixels)
            if image.format in ("JPEG", "MPO"):  # 24 megapixels take 30 ms instead of 250
                image.draft(None, (2 * side, 2 * side))
            image.load()
            turn = decode.turn_of(image)
            image = decode.to_rgb(image)
            if turn.method:
                image = image.transpose(pil_module().Transpose[turn.method])
    if max(image.size) * 4 < side:  # few pixels, which JPEG would smear
        return _saved(image, "PNG")
    image.thumbnail((side, side))
    return _saved(image, "JPEG", quality=_QUALITY)


def overlay(data: bytes, side: int | None, max_pixels: int | None) -> Picture:
    """Return a mask of class numbers as PNG in colours, class 0 transparent. Raises DecodeError."""
    image = decode.stored(data, max_pixels=max_pixels)
    if side is not None and max(image.size) > side:
        scale = side / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image = image.resize(size, pil_module().Resampling.NEAREST)
    classes = decode.stored_array(image)
    if classes.ndim == 3:  # colours, not numbers: shown as they are
        return _saved(decode.to_rgb(image), "PNG")
    table = np.array(_colours())
    if image.mode == "P" and (own := image.getpalette("RGB")):
        palette = np.array(own, np.uint8).reshape(-1, 3)[:256]
        table[: len(palette), :3] = palette
    return _saved(pil_module().fromarray(table[classes.astype(np.int64) % 256]), "PNG")


@cache
def _colours() -> Any:
    """Return a colour of each class number, unlike its neighbours': (256, 4) uint8 RGBA."""
    table = np.zeros((256, 4), np.uint8)
    for number in range(1, 256):
        hue, light = number * 0.61803398875 % 1, (0.5, 0.65, 0.4)[number // 16 % 3]
        red, green, blue = colorsys.hls_to_rgb(hue, light, 0.9)
        table[number] = round(red * 255), round(green * 255), round(blue * 255), _OPAQUE
    table[_IGNORED] = 255, 255, 255, _OPAQUE // 2
    return table


def crops(
    header: Header, number: int, epochs: tuple[int, ...], seed: int, transform: RandomResizedCrop
) -> tuple[Crop, ...]:
    """Return the box that a transform draws for a record in each epoch."""
    found = []
    for epoch in epochs:
        draw = rng.draw(seed, epoch, number)
        left, top, width, height, flip = crop_box(
            header.width, header.height, draw, transform.scale, transform.ratio
        )
        found.append(Crop(epoch, left, top, width, height, flip and transform.flip))
    return tuple(found)


def crop(data: bytes, number: int, epoch: int, seed: int, transform: RandomResizedCrop) -> Picture:
    """Return what a transform makes of a record's image in an epoch. Raises DecodeError."""
    pixels = transform(data, rng.draw(seed, epoch, number))
    return _saved(pil_module().fromarray(pixels), "PNG")


def _saved(image: Any, kind: str, **options: Any) -> Picture:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return Picture(file.getvalue(), f"image/{kind.lower()}")
