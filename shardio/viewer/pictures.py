"""Thumbnails, overlays and crops of stored images, as files that a browser shows."""

from __future__ import annotations

import io
from typing import Any

from ..images import decode
from ..images.filetype import image_type
from .results import Picture

# What browsers show as it is; all else is made PNG.
_SHOWN = {"JPEG": "image/jpeg", "PNG": "image/png", "GIF": "image/gif", "WEBP": "image/webp"}
_QUALITY = 85  # of thumbnails


def original(data: bytes, max_pixels: int | None) -> Picture:
    """Return the bytes of an image file if browsers show it, else a PNG of it."""
    media = _SHOWN.get(image_type(data[:32]) or "")
    if media is not None:
        return Picture(data, media)
    return _saved(decode.decode(data, max_pixels=max_pixels), "PNG")


def thumbnail(data: bytes, side: int, max_pixels: int | None) -> Picture:
    """Return an image, upright, RGB, at most `side` pixels wide and high. Raises DecodeError."""
    image = decode.decode(data, max_pixels=max_pixels)
    image.thumbnail((side, side))
    return _saved(image, "JPEG", quality=_QUALITY)


def _saved(image: Any, kind: str, **options: Any) -> Picture:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return Picture(file.getvalue(), f"image/{kind.lower()}")
