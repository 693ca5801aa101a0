"""Decode encoded images to pixels. It also opens images, limits their size, and reads raw PPM.

How it works. The header of an image is read first, and its size is checked against `max_pixels`
before any pixel is decoded. PIL then decodes the image, and the result is brought to RGB, to grey,
or left as stored. Crops are made in transforms.py, and the smaller images that packing writes in
resize.py. These three files are the only door to PIL.

Two packages install PIL: `pillow-simd` and `pillow`. Either serves, and `pil_info()` names the
active one. PIL is imported by the first call, not with this module. None of its settings are
changed, because they belong to the user's program.

To RGB. 8-bit modes become what PIL's `convert("RGB")` gives. Alpha and palette transparency are
dropped, not blended; torchvision's loader trains on the same pixels. CMYK is converted without its
profile, and a CMYK JPEG is taken as inverted, as Adobe writes it. Grey of more than 8 bits
(`I;16`, `I`) is taken as 0..65535 and divided by 257, rounded, so that 65535 becomes 255. PIL would
clip it at 255, which turns nearly every pixel white. PIL reads RGB of 16 bits as its high byte.
Float pixels are refused: 0..1 and 0..255 are both in use, and a guess would make some data sets
black, silently. Animations give their first frame. Colour profiles are not applied.

Raw pixels are binary PPM files. `ppm` writes just one of the spellings that the format allows. Any
program shows such a file. Here its pixels are taken as they are, without PIL.

Source. Orientation: EXIF 2.3, tag 0x0112.
"""

from __future__ import annotations

import functools
import io
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import native
from .._version import installed
from ..errors import DecodeError, DependencyError, ShardioError, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

# The oldest that passes this module's tests. 9.5 shows TIFFs wrongly that their EXIF turns, and
# 11.1 loses an orientation that stands in XMP; 11.2 cannot write QOI for the test of reading it.
# Tested: Pillow 11.3, 12.0, 12.1 and 13.0, pillow-simd 12.1.
LEAST_PIL = (11, 3)

# 1 GiB as PIL holds RGB (4 bytes a pixel), and room for the 200-megapixel photographs of phones,
# which PIL's own guard (an error above 179 million, a mere warning above 89 million) would refuse.
MAX_PIXELS = 2**28

# The same 1 GiB for formats whose decoder holds the whole image beside PIL's, often more than once.
# Bytes a pixel: JPEG2000 19, WebP 16, AVIF 9; and 4 to 8 for JPEG (progressive and CMYK too), PNG
# (interlaced too), TIFF (of one strip too), GIF and QOI, each 6,000 x 6,000 of one colour, which
# WebP says in 34 bytes. With MAX_PIXELS such a WebP took 4.2 GiB and 12 s in each process.
MAX_WHOLE = 2**26
WHOLE = frozenset(("WEBP", "JPEG2000", "AVIF", "HEIF", "JXL"))

# What may be opened, most frequent first. Not everything that PIL can open: EPS runs Ghostscript on
# the bytes, icon files hold images whose size is not in the header, and TGA has no magic, so that
# garbage may pass for one. The last two need a plugin that registers itself with PIL.
FORMATS = (
    "JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "QOI", "HEIF", "JXL",
)  # fmt: skip

ORIENTATION_TAG = 0x0112  # the EXIF tag
# Comments, other blanks, other depths, and pixels that are too few or too many are for PIL.
_PPM = re.compile(rb"P6\n([1-9]\d{0,9}) ([1-9]\d{0,9})\n255\n")


# Decode ---------------------------------------------------------------------------------------


def decode(
    data: bytes | memoryview, *, upright: bool = True, max_pixels: int | None = None
) -> Image.Image:
    """Decode one image to a loaded PIL image of mode RGB.

    upright: whether to apply the EXIF orientation, as ImageOps.exif_transpose does, and remove it
    from `info`. (PIL turns TIFF files while loading, whatever is asked here.)
    max_pixels: the largest width * height to decode, checked from the header. The default is
    MAX_PIXELS, or MAX_WHOLE for the formats in WHOLE.

    Raises DecodeError if the bytes are no image in one of FORMATS, are cut or damaged, or claim
    too many pixels.
    """
    return _decoded(data, upright, max_pixels, to_rgb)


def stored(
    data: bytes | bytearray | memoryview, *, upright: bool = True, max_pixels: int | None = None
) -> Image.Image:
    """Decode one image to a loaded PIL image of the mode that the file has. No value changes.

    A palette image keeps its indices (mode P), 16 bits stay 16 (I;16), grey stays grey (L), and one
    bit stays one (1). Options and errors are those of `decode`. The image is turned upright, too,
    by its own EXIF tag, since that moves values and changes none.
    """
    return _decoded(data, upright, max_pixels, _unchanged)


def gray(
    data: bytes | memoryview, *, upright: bool = True, max_pixels: int | None = None
) -> Image.Image:
    """Decode one image to a loaded PIL image of 8-bit grey, mode L.

    Options and errors are those of `decode`.
    """
    return _decoded(data, upright, max_pixels, _to_gray)


def _decoded(
    data: bytes | bytearray | memoryview,
    upright: bool,
    max_pixels: int | None,
    convert: Callable[[Image.Image], Image.Image],
) -> Image.Image:
    """Decode an image, convert it by `convert`, and turn it upright if asked."""
    with decode_errors(data):
        if (raw := raw_pixels(data, max_pixels)) is not None:
            return convert(raw_image(raw))
        image: Image.Image = open_image(data, max_pixels)
        image.load()
        turn = turn_of(image) if upright else UPRIGHT
        image = convert(image)
        if turn.method:
            image = image.transpose(pil_module().Transpose[turn.method])
            for stale in ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"):
                image.info.pop(stale, None)  # else the next reader turns it a second time
        return image


def check(data: bytes | memoryview, *, rgb: bool = True, max_pixels: int | None = None) -> None:
    """Decode one image, and keep nothing of it. Raises DecodeError, as `decode` does.

    rgb: whether it is to become RGB; else its values are as stored, as `stored` gives them.

    PIL reads its header. Where the core was built, it then decodes a JPEG at 1/8, for which it
    reads the same codes, and needs half of the time. What is not flawless to it, PIL decodes.
    """
    with decode_errors(data):
        image = open_image(data, max_pixels)
        if native.core is not None and image.format in ("JPEG", "MPO"):
            box = tuple(-(-float(side) // 8) for side in image.size)
            pixel = np.empty((1, 1, 3), np.uint8)
            if native.core.crop(data, (0.0, 0.0, *box), pixel, "box", 8, MAX_PIXELS):
                return
    _decoded(data, True, max_pixels, to_rgb if rgb else _unchanged)


def stored_pixels(
    data: bytes | memoryview, *, upright: bool = True, max_pixels: int | None = None
) -> NDArray[Any]:
    """Decode one image to an array of the values that are stored, as `stored` reads them.

    The array is (H, W) uint8 for palette indices and grey, (H, W) bool for one bit, (H, W) uint16
    for 16 bits, and (H, W, C) uint8 for colours. It is C-contiguous, writable, and owned by the
    caller. Options and errors are those of `decode`.
    """
    return stored_array(stored(data, upright=upright, max_pixels=max_pixels))


def pixels(
    data: bytes | memoryview, *, upright: bool = True, max_pixels: int | None = None
) -> NDArray[np.uint8]:
    """Decode one image to an (H, W, 3) uint8 RGB array.

    The array is C-contiguous, writable, and owned by the caller. Options and errors are those of
    `decode`. Raw pixels are only copied: 32 x 32 take 3 us, where PIL and numpy take 29, and
    224 x 224 take 6 us instead of 84.
    """
    with decode_errors(data):
        if (raw := raw_pixels(data, max_pixels)) is not None:
            return raw.copy()
    return rgb_array(decode(data, upright=upright, max_pixels=max_pixels)).copy()


def ppm(array: NDArray[np.uint8]) -> bytes:
    """Encode an (H, W, 3) uint8 RGB array as a binary PPM file of maxval 255.

    Source: netpbm.sourceforge.net/doc/ppm.html.
    """
    height, width, _ = array.shape
    return ppm_header(height, width) + array.tobytes()


def ppm_header(height: int, width: int) -> bytes:
    """Return the header that `ppm` writes before the pixels. Both sizes are in pixels."""
    return b"P6\n%d %d\n255\n" % (width, height)


# The installed PIL ----------------------------------------------------------------------------


def pil_info() -> dict[str, str]:
    """Describe the active PIL as text. The keys are name, version, installed, jpeg, zlib.

    name: "pillow-simd" or "pillow". Both install the package PIL. The last one installed wins, and
    pip does not notice. `installed` lists each distribution found, so two names there are a
    warning.

    Raises DependencyError as `pil_module` does.
    """
    pil_module()
    import PIL
    from PIL import features

    found = installed("pillow-simd", "pillow")
    version = PIL.__version__
    # A release of pillow-simd is pillow's number and .postN. The metadata are only the second
    # witness: they say what was installed, the number says what is imported.
    name = "pillow-simd" if ".post" in version or version == found.get("pillow-simd") else "pillow"
    turbo = features.version("libjpeg_turbo")
    zlib_ng = "zlib_ng" in features.features and features.version("zlib_ng")
    return {
        "name": name,
        "version": version,
        "installed": ", ".join(f"{key} {value}" for key, value in found.items()) or "unknown",
        "jpeg": f"libjpeg-turbo {turbo}" if turbo else f"libjpeg {features.version('jpg')}",
        "zlib": f"zlib-ng {zlib_ng}" if zlib_ng else f"zlib {features.version('zlib')}",
    }


@functools.cache
def pil_module() -> ModuleType:
    """Return the module PIL.Image, which the first call imports.

    Raises DependencyError if PIL does not import, or is older than LEAST_PIL.
    """
    install = (
        "Install one engine, not both: pip install 'shardio-torch[simd]' (pillow-simd, compiled "
        "here) or pip install 'shardio-torch[pillow]' (a wheel for any platform)"
    )
    try:
        import PIL
        from PIL import Image
    except ImportError as error:
        raise DependencyError(
            f"images cannot be decoded: PIL does not import ({_one_line(error)}). {install}"
        ) from None
    found = re.match(r"(\d+)\.(\d+)", PIL.__version__)
    if found and (int(found[1]), int(found[2])) < LEAST_PIL:
        raise DependencyError(
            f"images cannot be decoded: PIL is {PIL.__version__}, expected {LEAST_PIL[0]}."
            f"{LEAST_PIL[1]} or newer, since older ones decode some images wrongly. {install}"
        )
    return Image


# Opening --------------------------------------------------------------------------------------


def raw_pixels(data: Any, max_pixels: int | None) -> NDArray[np.uint8] | None:
    """Return the pixels of raw pixel data as a view of its bytes, (H, W, 3) uint8.

    Returns None if the data are no bytes, no PPM file as `ppm` spells it, or more than max_pixels
    pixels (default: MAX_PIXELS). PIL decodes such data, or says what is wrong with them.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        return None
    found = _PPM.match(data)
    if found is None:
        return None
    width, height, start = int(found[1]), int(found[2]), found.end()
    limit = MAX_PIXELS if max_pixels is None else max_pixels
    if width * height > limit or len(data) != start + 3 * width * height:
        return None
    return np.frombuffer(data, np.uint8, offset=start).reshape(height, width, 3)


def raw_image(raw: NDArray[np.uint8]) -> Image.Image:
    """Copy raw pixels, (H, W, 3) uint8, to a PIL image.

    This takes 6 us for 32 x 32 and 29 us for 224 x 224. PIL's plugin takes 18 and 63.
    """
    image: Image.Image = pil_module().frombytes("RGB", (raw.shape[1], raw.shape[0]), raw.data)
    image.format = "PPM"
    return image


def open_image(data: bytes | bytearray | memoryview, max_pixels: int | None) -> Any:
    """Open an image lazily: its header is read, and its size checked. No pixel is decoded.

    Returns a PIL ImageFile. max_pixels: as for `decode`. Raises DecodeError if the bytes are no
    image in one of FORMATS or claim too many pixels, and any exception that PIL's plugins raise
    for damaged bytes. Call it within `decode_errors`.

    Image.open would do but for its pixel guard, which has two fixed levels, reads a global of PIL
    and warns between them. Silencing a warning is not safe with threads, so its loop is walked
    here: ask each format's own `accept` for the first 16 bytes, then build that plugin.
    """
    pil = pil_module()
    prefix = bytes(data[:16])
    if prefix.startswith(b"GIF8"):
        check_pixels("GIF", _gif_size(data), max_pixels)  # PIL allocates in the constructor
    pil.preinit()
    reason = ""
    for name in FORMATS:
        if name not in pil.OPEN:
            pil.init()  # the rarer plugins; does nothing from the second call on
            if name not in pil.OPEN:
                continue
        factory, accept = pil.OPEN[name]
        accepted = accept is None or accept(prefix)
        if isinstance(accepted, str):  # recognised, but PIL was built without the codec
            reason = accepted
        elif accepted:
            image = factory(io.BytesIO(data), "")
            check_pixels(name, image.size, max_pixels)
            return image
    if reason:
        raise _undecodable(data, reason)
    raise DecodeError(
        f"{_what(data)}: not a format that shardio decodes ({', '.join(FORMATS)}); "
        f"it starts with {prefix!r}. Give `decode=` to read it your own way"
    )


def check_pixels(name: str, size: tuple[int, int], max_pixels: int | None) -> None:
    """Raise DecodeError if an image has too many pixels.

    name: the format of the image, one of FORMATS. size: width and height in pixels.
    max_pixels: None means the default of the format.
    """
    width, height = size
    most = f"max_pixels={width * height}"
    remedy = f"if it is a true picture, give {most}, to a dataset storage=shardio.Storage({most})"
    if max_pixels is None:
        max_pixels = MAX_WHOLE if name in WHOLE else MAX_PIXELS
    guard = pil_module().MAX_IMAGE_PIXELS
    if name in ("GIF", "TIFF") and guard is not None and guard < max_pixels:
        # These two plugins ask PIL's guard again when they allocate, and it would warn.
        max_pixels = guard
        remedy += " and raise PIL.Image.MAX_IMAGE_PIXELS"
    if width * height > max_pixels:
        raise DecodeError(
            f"{name} image: its header says {width} x {height} = {width * height:,} pixels, over "
            f"the limit of {max_pixels:,}; nothing was decoded; {remedy}"
        )


def _gif_size(data: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Return the width and height that PIL will allocate for a GIF.

    They are those of its screen, grown by its first frame.
    """
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while at < len(data):
        if data[at] == 0x2C:  # image descriptor
            x, y, w, h = struct.unpack_from("<HHHH", data, at + 1)
            return max(width, x + w), max(height, y + h)
        if data[at] == 0x21:  # extension: label, then blocks up to an empty one
            at += 2
            while at < len(data) and data[at]:
                at += 1 + data[at]
        at += 1
    return width, height


def rgb_array(image: Image.Image, *, mirrored: bool = False) -> NDArray[np.uint8]:
    """Copy the pixels of an RGB image, or of its mirror image, to an (H, W, 3) uint8 array.

    The array may be read-only and may have any strides. PIL's encoder makes the copy, as in PIL's
    `tobytes`, but in one piece instead of pieces of 64 KiB, and without numpy's questions:
    224 x 224 take 20 us instead of 40. The mirror image is blue, green, red, read from the end of
    each row to its start. That takes 15 us in words of 8 bytes, and PIL's transpose takes 30.
    """
    width, height = image.size
    mode, data = "BGR" if mirrored else "RGB", b""
    with suppress(AttributeError, TypeError):  # a PIL that is another one inside
        encoder = pil_module()._getencoder("RGB", "raw", (mode,))
        encoder.setimage(image.im, (0, 0, width, height))
        data = encoder.encode(3 * width * height)[2]
    if len(data) != 3 * width * height:
        data = image.tobytes("raw", mode)
    if mirrored and width % 8 == 0:
        words = np.frombuffer(data, ">u8").reshape(height, -1)[:, ::-1].astype("<u8")
        return words.view(np.uint8).reshape(height, width, 3)
    array = np.frombuffer(data, np.uint8).reshape(height, width, 3)
    return array[:, ::-1, ::-1] if mirrored else array


def stored_array(image: Image.Image) -> NDArray[Any]:
    """Copy the values of an image of any mode to an array, (H, W) or (H, W, C).

    The array has the byte order of this machine.
    """
    array = np.array(image)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


# Orientation ----------------------------------------------------------------------------------

Box = tuple[float, float, float, float]  # left, top, right, bottom, as PIL has them


class Turn(NamedTuple):
    """Say how a stored image becomes upright, and where an upright box lies in the stored one."""

    method: str  # of PIL's Transpose, which counts angles counterclockwise; "" is as it is
    swap: bool = False  # rows are columns
    mirror_x: bool = False
    mirror_y: bool = False

    def stored(self, box: Box, width: int, height: int) -> Box:
        """Map a box of the upright image to the stored image.

        width, height: of the stored image, in pixels.
        """
        left, top, right, bottom = box
        if self.swap:
            left, top, right, bottom = top, left, bottom, right
        if self.mirror_x:
            left, right = width - right, width - left
        if self.mirror_y:
            top, bottom = height - bottom, height - top
        return left, top, right, bottom


UPRIGHT = Turn("")
TURNS = {
    2: Turn("FLIP_LEFT_RIGHT", mirror_x=True),
    3: Turn("ROTATE_180", mirror_x=True, mirror_y=True),
    4: Turn("FLIP_TOP_BOTTOM", mirror_y=True),
    5: Turn("TRANSPOSE", swap=True),
    6: Turn("ROTATE_270", swap=True, mirror_y=True),
    7: Turn("TRANSVERSE", swap=True, mirror_x=True, mirror_y=True),
    8: Turn("ROTATE_90", swap=True, mirror_x=True),
}


def turn_of(image: Image.Image) -> Turn:
    """Return the turn that makes an opened image upright, by its EXIF orientation."""
    return TURNS.get(orientation_of(image), UPRIGHT)


def upright_size(data: bytes) -> tuple[int, int]:
    """Return width and height of an image, turned upright, by its header. Raises DecodeError."""
    with decode_errors(data):
        image = open_image(data, None)
        width, height = image.size
        return (height, width) if turn_of(image).swap else (width, height)


def orientation_of(image: Any) -> int:
    """Return the EXIF orientation of an opened image. The number may be nonsense.

    Returns 1 if EXIF is missing or damaged, since the pixels are worth keeping.
    """
    try:
        value = image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:
        return 1
    return value if isinstance(value, int) else 1


# Modes ----------------------------------------------------------------------------------------


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to mode RGB, by the rules at the top of this file.

    Returns the image itself if it is RGB already. Raises DecodeError for float pixels.
    """
    mode = image.mode
    if mode == "RGB":
        return image
    if mode == "I" or mode.startswith("I;16"):
        grey = np.asarray(image)
        scaled = np.empty(grey.shape, np.uint8)
        for at in range(0, len(grey), 64):  # rows: at once it would take 12 bytes a pixel, not 7
            some = grey[at : at + 64]
            if mode == "I":  # 32 bits signed: what PIL makes of 16-bit PGM and signed TIFF
                some = np.clip(some, 0, 65535)
            scaled[at : at + 64] = (some.astype(np.uint32) + 128) // 257
        image = pil_module().fromarray(scaled)
    elif mode == "F":
        raise DecodeError(
            "float pixels (mode F) have no agreed range (0..1 and 0..255 are both in use); "
            "give `decode=` to scale them your own way"
        )
    elif mode == "P" and "transparency" in image.info:
        image = image.copy()  # it may be the user's own
        del image.info["transparency"]  # PIL warns when it must drop this itself
    elif mode in ("RGBa", "La"):
        image = image.convert(mode.upper())  # there is no direct way from premultiplied alpha
    return image.convert("RGB")


def _to_gray(image: Image.Image) -> Image.Image:
    """Convert an image to mode L.

    Colours are weighed as PIL weighs them. More than 8 bits follow the rules at the top.
    """
    return image if image.mode == "L" else to_rgb(image).convert("L")


def _unchanged(image: Image.Image) -> Image.Image:
    """Return the image itself."""
    return image


# Errors ---------------------------------------------------------------------------------------


@contextmanager
def decode_errors(data: object) -> Iterator[None]:
    """Turn any exception that PIL raises for hostile bytes into a DecodeError of one line.

    data: the image that the message is to describe. The plugins of PIL raise OSError, SyntaxError,
    ValueError, struct.error, KeyError, zlib.error and more; a list would be forever one short.
    ShardioError passes, and so does MemoryError, which is the machine's fault.
    """
    try:
        yield
    except (ShardioError, MemoryError):
        raise
    except Exception as error:
        raise _undecodable(data, _one_line(error)) from error


def _undecodable(data: object, why: str) -> DecodeError:
    """Return the error for an image, and for why it cannot be decoded."""
    lacking = _lacking(why)
    error = DecodeError(f"{_what(data)}: {why}{lacking}")
    error.lacks_codec = bool(lacking)
    return error


# What PIL may be built without: words of its errors, the formats, and Debian's packages for it.
_LIBRARIES = {
    "jpeg2k": ("JPEG 2000", "libopenjp2-7-dev"),
    "avif": ("AVIF", "libavif-dev, 1.0 or newer"),
    "webp": ("WebP", "libwebp-dev"),
    "libtiff": ("compressed TIFF", "libtiff-dev"),
    "imagingcms": ("colour profiles, which LAB needs", "liblcms2-dev"),
}


def _lacking(error: str) -> str:
    """Return which PIL this is and what to install, where an error says that it lacks a decoder."""
    if not re.search("not available|not installed|unavailable|halted|cannot import", error):
        return ""
    for word, (what, package) in _LIBRARIES.items():
        if word in error.lower():
            pil = pil_info()
            return (
                f". PIL here is {pil['name']} {pil['version']}, built without {what}: uninstall "
                f"{pil['name']}, and install pillow, whose wheels have it; or install {package} "
                f"(Debian, Ubuntu), and build {pil['name']} again"
            )
    return ""


def _what(data: object) -> str:
    """Describe the data of an image for an error text, by their length or their type."""
    if isinstance(data, bytes | bytearray | memoryview):
        return f"image of {len(data):,} bytes"
    return f"{type(data).__name__} image"


def _one_line(error: BaseException) -> str:
    """Return the text of an error, safe to print, or the name of its type."""
    return printable(str(error)) or type(error).__name__
