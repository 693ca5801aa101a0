"""Make smaller images for packing. The short side is reduced, or the central square is taken.

Packing writes these images once, so quality comes before speed. They are made by PIL alone, never
by the native core: what is packed does not depend on where the core was built.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from ..units import check_int
from .decode import ORIENTATION_TAG, decode_errors, open_image, orientation_of, pil_module
from .transforms import CenterCrop

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

_REWRITABLE = ("JPEG", "PNG", "WEBP", "BMP", "TIFF")
_TIFF_LOSSLESS = ("tiff_lzw", "tiff_adobe_deflate", "packbits")


def resize_short(
    data: bytes, size: int, quality: int, *, max_pixels: int | None = None
) -> bytes | None:
    """Reduce the short side of an image to `size` pixels, and encode it in its own file format.

    Returns None to keep the bytes: the short side is `size` or less already, the file is an
    animation or has several pages, or its format is not one of JPEG, PNG, WebP, BMP, TIFF.

    quality: 1 to 100, for JPEG and lossy WebP; other formats stay lossless. max_pixels: as for
    `decode`.

    The file format, the aspect (long side rounded), the EXIF bytes, the ICC profile and a JPEG's
    chroma subsampling are kept; pixels stay in their stored orientation (those of a TIFF come
    upright, without the tag). Grey, CMYK, alpha and 16-bit grey stay what they are; palettes and
    1-bit images become RGB(A) and grey, since their pixels cannot be averaged; 16-bit RGB becomes
    8-bit. The same bytes give the same result with the same PIL and codec libraries (`pil_info()`).

    Raises DecodeError as `decode` does, OptionError for size or quality.
    """
    size = check_int("resize_short: size", size, 1)
    quality = check_int("resize_short: quality", quality, 1, 100)
    with decode_errors(data):
        image = open_image(data, max_pixels)
        width, height = image.size
        short, long = min(image.size), max(image.size)
        if short <= size or image.format not in _REWRITABLE or getattr(image, "n_frames", 1) > 1:
            return None
        options = _save_options(image, data, quality)
        image.load()
        options["exif"] = _exif(image)  # after load: PNG may store it behind the pixels
        other = max(size, round(long * size / short))
        target = (size, other) if width <= height else (other, size)
        # Lanczos: this picture is resampled once more in training, so what counts is how much
        # detail survives. Random 224 crops of ImageNet stored at 256, against the same crops of the
        # originals: lanczos 34.5 dB, bicubic 33.9, bilinear 32.4, box 31.3.
        # No draft() and no reducing_gap: packing happens once.
        small = _averageable(image).resize(target, pil_module().Resampling.LANCZOS)
        out = io.BytesIO()
        small.save(out, image.format, **options)
        return out.getvalue()


def square(
    data: bytes, size: int, *, max_pixels: int | None = None
) -> tuple[NDArray[np.uint8], bool]:
    """Return the central square of an image, and whether the image was enlarged for it.

    The square is a (size, size, 3) uint8 RGB array, upright. The short side becomes `size` pixels,
    resampled as `resize_short` does it, but a smaller image is enlarged. The long side is cut off
    equally on both ends. max_pixels: as for `decode`. Raises DecodeError.
    """
    crop = CenterCrop(size, size, interpolation="lanczos", max_pixels=max_pixels)
    out = np.empty((size, size, 3), np.uint8)
    with decode_errors(data):
        short = min(open_image(data, max_pixels).size)
        crop.by_pil(data, 0, out)
    return out, short < size


def _averageable(image: Image.Image) -> Image.Image:
    """Convert an image to a mode whose pixels can be resampled, losing nothing."""
    mode, keyed = image.mode, "transparency" in image.info
    if mode in ("P", "PA"):
        return image.convert("RGBA" if keyed or mode == "PA" else "RGB")
    if mode in ("1", "L"):
        return image.convert("LA" if keyed else "L")  # a colour key does not survive averaging
    if mode == "RGB" and keyed:
        return image.convert("RGBA")
    return image


def _save_options(image: Any, data: bytes, quality: int) -> dict[str, Any]:
    """Return the arguments for save() that keep the file's kind.

    Call it before load(), which forgets some of them.
    """
    options: dict[str, Any] = {}
    if image.info.get("icc_profile"):
        options["icc_profile"] = image.info["icc_profile"]
    if image.format == "JPEG":
        from PIL import JpegImagePlugin

        # Not optimize=True: libjpeg then wants the whole file in one buffer, which PIL makes too
        # small for noisy 4:4:4 images at quality 90 and more, and the save fails.
        options["quality"] = quality
        sampling = JpegImagePlugin.get_sampling(image)
        if sampling >= 0:  # -1: one that PIL cannot write; 4:2:0, its default, then
            options["subsampling"] = sampling
    elif image.format == "WEBP":
        options |= {"quality": quality, "lossless": data[12:16] == b"VP8L"}
    elif image.format == "TIFF" and image.info.get("compression") in _TIFF_LOSSLESS:
        options["compression"] = image.info["compression"]
    return options


def _exif(image: Any) -> bytes:
    """Return the EXIF bytes to store with pixels that keep their orientation; empty for none.

    They are the file's own where those can be kept. Otherwise (too long for one JPEG segment, or
    the orientation stands elsewhere: in XMP, in a PNG text) they hold nothing but the orientation.
    """
    own = image.info.get("exif", b"")
    turned = orientation_of(image)
    fresh = pil_module().Exif()
    try:
        fresh.load(own)
        kept = len(own) <= 65_533 and fresh.get(ORIENTATION_TAG, 1) == turned
    except Exception:
        kept = False
    if kept or (not own and turned == 1):
        return bytes(own)
    least = pil_module().Exif()
    least[ORIENTATION_TAG] = turned
    return bytes(least.tobytes())
