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

from dataclasses import dataclass
from enum import IntEnum


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
    """

    NONE = 0
    NOT_JPEG = 1
    HEADER = 2
    PROCESS = 3
    SCANS = 4
    COLOURS = 5
    SAMPLING = 6


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
