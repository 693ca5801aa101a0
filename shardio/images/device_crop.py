"""Plan the crop of an image that the trainer's device decodes: `decode="cuda"`.

How it works. A worker reads the header of an image, draws the box, and hands on the bytes: of a
tile JPEG only those of the tiles under the box. The device decodes them, and then it resizes, turns
and mirrors, as `Transform.by_pil` does.

    bytes --header, draw--> box --cut tiles--> DeviceCrop

JPEG decoders of GPUs take some JPEGs and no others. The header tells which, in some microseconds.
The worker makes the crops of all others itself, and hands on their pixels.

Source: ITU-T T.81 (the JPEG standard). The kinds of JPEG: the documentation of nvJPEG, "Hardware
decoder". Colours: jdapimin.c of libjpeg-turbo, default_decompress_parms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from .. import native
from . import decode, jpeg_tiles
from .jpeg_tiles import Data, Frame
from .transforms import MIN_TILED_PIXELS, Transform, cut_tiles

_JPEG = b"\xff\xd8\xff"  # how each begins
_END = b"\xff\xd9"
_SOF0 = 0xC0  # of the baseline process
_TABLES = (jpeg_tiles.DQT, jpeg_tiles.DHT, jpeg_tiles.DRI, jpeg_tiles.SOS)
_YCC = 1  # the transform in an Adobe segment: YCbCr
_RGB = (ord("R"), ord("G"), ord("B"))  # ids of components by which libjpeg knows RGB
# Of luminance, where chroma has (1, 1): 4:4:4, 4:2:2, 4:2:0 and 4:4:0.
_SAMPLINGS = ((1, 1), (2, 1), (2, 2), (1, 2))


class Place(IntEnum):
    """Number the values that say how one crop is made of its file: `EncodedCrops.places`.

    LEFT, TOP, RIGHT, BOTTOM    the box of the crop, in pixels of the whole picture as stored
    WHOLE_WIDTH, WHOLE_HEIGHT   of the whole picture as stored
    X, Y                        where the file's picture begins in the whole: 0 unless it is cut
    WIDTH, HEIGHT               of the file's picture, which a decoder of it gives
    ORIENTATION                 1 to 8, as in EXIF: how to turn the result of the resize. 1: not
    FLIP                        1: mirror the turned result left-right. 0: do not
    REASON                      0: the file is a JPEG. Else a Reason: it is finished pixels
    NUMBER                      of the record in its dataset, for messages

    The box is resized to the (H, W) of the crops; where ORIENTATION is 5 to 8, to (W, H). It is
    resized as a part of the whole: filters see the pixels beside the box. All pixels that they see
    are in the file. Only LEFT, TOP, RIGHT and BOTTOM are not whole numbers.

    Of finished pixels the box and all sizes are those of the result, and nothing is turned.
    """

    LEFT = 0
    TOP = 1
    RIGHT = 2
    BOTTOM = 3
    WHOLE_WIDTH = 4
    WHOLE_HEIGHT = 5
    X = 6
    Y = 7
    WIDTH = 8
    HEIGHT = 9
    ORIENTATION = 10
    FLIP = 11
    REASON = 12
    NUMBER = 13


class Reason(IntEnum):
    """Say why a worker has made a crop itself: `Place.REASON`.

    NONE        it has not: the file is a JPEG for the device
    NOT_JPEG    another format, or raw pixels
    HEADER      a JPEG whose header is not as the standard has it, but PIL reads it
    PROCESS     not baseline: progressive, lossless, arithmetic coding, extended sequential
    SCANS       a JPEG with a scan for each component
    COLOURS     CMYK, YCCK, or RGB stored as RGB
    SAMPLING    of chroma, but not 4:4:4, 4:2:2, 4:2:0 or 4:4:0
    END         a JPEG without the marker of its end: it is cut, and PIL says so
    """

    NONE = 0
    NOT_JPEG = 1
    HEADER = 2
    PROCESS = 3
    SCANS = 4
    COLOURS = 5
    SAMPLING = 6
    END = 7


@dataclass(frozen=True, slots=True)
class DeviceCrop:
    """Hold one image that is to become a crop on the device.

    data           a JPEG, whole or cut; or H * W * 3 bytes of finished pixels, RGB
    place          the values of Place, in order
    shape          (H, W) of the result
    interpolation  of the resize, as PIL names it: bilinear, bicubic, lanczos, box or hamming
    """

    data: bytes | bytearray
    place: tuple[float, ...]
    shape: tuple[int, int]
    interpolation: str


class _Jpeg(NamedTuple):
    """Hold what the header of a JPEG for the device says."""

    width: int
    height: int
    has_app1: bool


def plan_crop(transform: Transform, image: Any, draw: int, number: int) -> DeviceCrop:
    """Plan the crop that `transform(image, draw)` makes, for the device.

    image: encoded bytes, or a PIL image. number: of the record in its dataset.

    The crop is finished here where the device cannot decode the image. Raises DecodeError as the
    transform does. Damage in the midst of a JPEG is found later, if the device's decoder finds it.
    """
    with decode.decode_errors(image):
        found = _read_header(image)
        if isinstance(found, Reason):
            return _finished(transform, image, draw, found, number)
        width, height, has_app1 = found
        decode.check_pixels("JPEG", (width, height), transform.max_pixels)
        orientation = 1
        if has_app1 and transform.upright:
            orientation = _orientation(image, transform.max_pixels)
        turn = decode.TURNS.get(orientation, decode.UPRIGHT)
        box, target, _, flip = transform.choose_crop(width, height, turn, draw, fast=False)
    data, cut_box = image, (0, 0, width, height)
    if (tiles := jpeg_tiles.tiles(image, min_pixels=MIN_TILED_PIXELS)) is not None:
        cut = cut_tiles(tiles, box, target, transform.interpolation)
        data, cut_box = cut.data, (cut.left, cut.top, cut.width, cut.height)
    place = (*box, width, height, *cut_box, orientation if turn.method else 1, flip, 0, number)
    return _crop(transform, data if isinstance(data, bytes | bytearray) else bytes(data), place)


def _finished(
    transform: Transform, image: Any, draw: int, reason: Reason, number: int
) -> DeviceCrop:
    """Make a crop by the CPU."""
    height, width = transform.shape
    size = width, height
    place = (0, 0, *size, *size, 0, 0, *size, 1, 0, reason, number)
    return _crop(transform, transform(image, draw).tobytes(), place)


def _crop(transform: Transform, data: bytes | bytearray, place: Sequence[float]) -> DeviceCrop:
    """Make a crop of values of Place, in order."""
    values = tuple(map(float, place))
    return DeviceCrop(data, values, transform.shape, transform.interpolation)


def _read_header(image: Any) -> _Jpeg | Reason:
    """Read the header of a JPEG for the device, or find the reason why the image is none."""
    if not isinstance(image, bytes | bytearray | memoryview) or bytes(image[:3]) != _JPEG:
        return Reason.NOT_JPEG
    segments = jpeg_tiles.read_segments(image)
    if segments is None:
        return Reason.HEADER
    frame, has_app1, adobe = None, False, _YCC
    for marker, at, end in segments:
        if jpeg_tiles.is_metadata(marker):
            has_app1 |= marker == jpeg_tiles.APP1
            if marker == jpeg_tiles.APP14 and bytes(image[at + 4 : at + 9]) == b"Adobe":
                adobe = image[at + 15] if end > at + 15 else -1
        elif marker == _SOF0 and frame is None:
            frame = jpeg_tiles.read_frame(image, at, end)
        elif marker not in _TABLES:
            return Reason.PROCESS
    scan = jpeg_tiles.read_scan(image, segments[-1])
    if frame is None or scan is None:
        return Reason.HEADER
    if reason := _reason(frame, scan[0], adobe):
        return reason
    # An engine decodes what is there of a file that is cut, and says nothing. Behind the head of a
    # scan the first such marker ends the picture: what follows is no part of it.
    if bytes(image[-2:]) != _END and _END not in bytes(image[segments[-1].end :]):
        return Reason.END
    return _Jpeg(frame.width, frame.height, has_app1)


def _reason(frame: Frame, scan: tuple[int, ...], adobe: int) -> Reason:
    """Return the reason why the device cannot decode a baseline JPEG, or Reason.NONE.

    scan: ids of the components in the first scan. adobe: the transform in its Adobe segment.
    """
    if frame.bits != 8:
        return Reason.PROCESS
    if len(frame.ids) == 1:
        return Reason.NONE if frame.sampling == ((1, 1),) else Reason.SAMPLING
    if len(frame.ids) != 3 or adobe != _YCC or frame.ids == _RGB:
        return Reason.COLOURS
    luminance, *chroma = frame.sampling
    if luminance not in _SAMPLINGS or chroma != [(1, 1), (1, 1)]:
        return Reason.SAMPLING
    return Reason.NONE if scan == frame.ids else Reason.SCANS


def _orientation(image: Data, max_pixels: int | None) -> int:
    """Return the EXIF orientation of a JPEG. The number may be nonsense."""
    core = native.core
    header = None if core is None else core.header(image)
    if header is not None and header[2]:
        return int(header[2])
    return decode.orientation_of(decode.open_image(image, max_pixels))
