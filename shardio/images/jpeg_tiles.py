"""Find the pixels of a crop inside a tile JPEG, and cut out the tiles that hold them.

Three quarters of the time for a photograph go into its entropy coding, which must be read from its
first bit: a part in the middle cannot be found. Restart markers are the exception: at each, the
decoder is byte aligned and starts anew. A *tile JPEG* is an ordinary baseline JPEG with a restart
marker after every few MCUs (the squares of 8 x 8 to 32 x 32 pixels that a JPEG is coded in), a
number that divides the MCUs of a row. So its picture lies in the file as a grid of tiles:

    header | tile 0 | RST0 | tile 1 | RST1 | ... | tile 8 | RST0 | ... | last tile | EOI

`tiles` finds them. `Tiles.cut` puts those that a box needs behind a header with their own width and
height, with the markers numbered anew: a small JPEG that any decoder reads. Its pixels are those of
the whole, since in a baseline JPEG nothing but the upsampling of chroma looks beyond an MCU; for
that the cut has a margin. jpeg_rewrite.py makes a tile JPEG of another JPEG.

Bytes come in and go out; nothing here decodes, and no length is believed before it is checked.
Bytes that are not quite a tile JPEG are treated as none: `tiles` returns None, and the image is
decoded whole, as any other.

Source: ITU-T T.81 (the JPEG standard), annex B for markers, A.2 for MCUs, E.1.4 for restarts. The
reach of the upsampling: jdsample.c and jdmainct.c of libjpeg-turbo.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Data = bytes | bytearray | memoryview

SOI, EOI, SOS, DQT, DHT, DRI, COM = 0xD8, 0xD9, 0xDA, 0xDB, 0xC4, 0xDD, 0xFE
APP0, APP1, APP2, APP14, APP15 = 0xE0, 0xE1, 0xE2, 0xEE, 0xEF
_IN_TURN = bytes(range(0xD0, 0xD8))  # RST0 to RST7
_SAMPLINGS = frozenset((h, v) for h in range(1, 5) for v in range(1, 5))
_BASELINE = (0xC0, 0xC1)


class Segment(NamedTuple):
    """Mark a segment of a JPEG: data[at:end], with its marker and its length."""

    marker: int
    at: int
    end: int


class Frame(NamedTuple):
    """Hold the values of a SOF segment, the frame header.

    bits: of a sample.
    height, width: in pixels.
    ids: of the components.
    sampling: (horizontal, vertical) of each component.
    mcu: width and height in pixels of what one MCU of a scan with all components covers.
    mcus: the number of MCUs in a row, and the number of rows.
    """

    bits: int
    height: int
    width: int
    ids: tuple[int, ...]
    sampling: tuple[tuple[int, int], ...]
    mcu: tuple[int, int]
    mcus: tuple[int, int]


class Cut(NamedTuple):
    """Hold a JPEG with a part of the picture.

    left, top: the place of its first pixel in the whole. width, height: its size in pixels.
    grey: whether there is one component.
    """

    data: bytearray
    left: int
    top: int
    width: int
    height: int
    grey: bool


class Tiles:
    """Say where the tiles of a tile JPEG lie in its bytes.

    width, height: of the picture, in pixels as stored.
    tile_width, tile_height: of one tile; those at the right and at the bottom may show less.
    columns, rows: of tiles.
    grey: whether there is one component.
    has_app1: whether some segment may hold EXIF or XMP, and so an orientation.
    """

    def __init__(
        self,
        data: Data,
        head: bytearray,
        size_at: int,
        has_app1: bool,
        frame: Frame,
        interval: int,
        edges: NDArray[np.intp],
    ) -> None:
        """Store where the tiles lie. `tiles` makes these objects.

        head: the bytes that a cut begins with. size_at: where in it height and width stand.
        interval: MCUs in a tile.
        edges: where in data each tile starts, and the end of the marker behind the last one.
        """
        self.width, self.height = frame.width, frame.height
        wide, high = frame.mcu
        self.tile_width, self.tile_height = interval * wide, high
        self.columns, self.rows = shape = frame.mcus[0] // interval, frame.mcus[1]
        self.grey = len(frame.ids) == 1
        self.has_app1 = has_app1
        # Upsampling looks at no more than the next sample of chroma on each side, and at that only
        # from the half of a sample that is nearer to it: the pixels beside its border.
        self._margin = int(wide > 8), int(high > 8)
        self._data = memoryview(data)
        self._head, self._size_at = head, size_at
        self._starts = edges[:-1].reshape(shape[::-1])
        self._ends = edges[1:].reshape(shape[::-1])

    def cut(self, box: tuple[int, int, int, int]) -> Cut:
        """Make a JPEG of the tiles under a box.

        box: left, top, right, bottom in pixels as stored, inside the picture and not empty. Decoded
        as the whole would be, the cut has the same pixels there; at its own rim it may not. So too
        where both are decoded at 1/2, 1/4 or 1/8, if the box begins and ends at whole pixels then.

        Raises ValueError if the box is not inside the picture.
        """
        left, top, right, bottom = box
        if not (0 <= left < right <= self.width and 0 <= top < bottom <= self.height):
            raise ValueError(f"box {box} is not inside {self.width} x {self.height} pixels")
        wide, high = self.tile_width, self.tile_height
        x, y = self._margin
        a, c = max(0, left - x) // wide, min(self.columns, -(-(right + x) // wide))
        b, d = max(0, top - y) // high, min(self.rows, -(-(bottom + y) // high))

        # Each row of tiles is one run of bytes, with the markers between its tiles and behind them.
        ends = self._ends[b:d, a:c]
        starts, stops = self._starts[b:d, a], ends[:, -1]
        size_at, head, data = self._size_at, self._head, self._data
        runs = [data[i:j] for i, j in zip(starts.tolist(), stops.tolist(), strict=True)]
        cut = bytearray().join([head, *runs])
        width, height = min(self.width, c * wide) - a * wide, min(self.height, d * high) - b * high
        cut[size_at : size_at + 4] = height.to_bytes(2, "big") + width.to_bytes(2, "big")

        # Behind the k-th tile stands RST(k mod 8), behind the last one EOI.
        shift = (stops - starts).cumsum() - stops + (len(head) - 1)
        marks = (ends + shift[:, None]).ravel()
        np.frombuffer(cut, np.uint8)[marks] = np.frombuffer(_restarts(marks.size), np.uint8)
        return Cut(cut, a * wide, b * high, width, height, self.grey)


def tiles(data: Data, *, min_pixels: int = 0) -> Tiles | None:
    """Find the tiles of a tile JPEG. Returns None if these bytes are none, whatever else they are.

    min_pixels: pictures with fewer pixels give None, too.

    A tile JPEG here: 8 bits, Huffman coded and sequential, 1 or 3 components in one scan, a restart
    interval of 2 MCUs or more that divides the MCUs of a row, and exactly the restart markers that
    this makes, in turn, with EOI behind the last tile. Bytes behind EOI are ignored, as decoders
    ignore them.

    For other JPEGs this costs the walk through their header, some microseconds.
    """
    if bytes(data[:3]) != b"\xff\xd8\xff" or (segments := read_segments(data)) is None:
        return None
    head, kept, size_at, has_app1 = bytearray(), 0, 0, False
    frame, interval = None, 0
    for marker, at, end in segments:
        if marker in (DQT, DHT, SOS):
            continue
        if marker == DRI:
            if end - at != 6:
                return None
            interval = data[at + 4] << 8 | data[at + 5]
        elif marker in _BASELINE and frame is None:
            frame, size_at = read_frame(data, at, end), len(head) + at - kept + 5
        elif not is_metadata(marker):
            return None  # another kind of JPEG, or two frames
        else:
            has_app1 |= marker == APP1
            if not _tells_colour(data, marker, at):  # decoders would take it apart once more
                head += data[kept:at]
                kept = end
    # Where a cut is one MCU wide libjpeg upsamples in another way.
    if interval < 2 or frame is None or frame.bits != 8 or len(frame.ids) not in (1, 3):
        return None
    if frame.width * frame.height < min_pixels:
        return None
    columns, rest = divmod(frame.mcus[0], interval)
    count = columns * frame.mcus[1]
    last = segments[-1]
    if rest or count > len(data) or read_scan(data, last) != (frame.ids, 0, 63, 0, 0):
        return None
    body = np.frombuffer(data, np.uint8)[last.end :]
    codes, found = body[1:], body[:-1] == 0xFF
    # FF 00 is a byte FF of the coded data. The lesser of 1 and the code is 1 for all others: 10 us
    # less than leaving the zeros out behind nonzero, 5 less than `& (codes != 0)`.
    ones = found.view(np.uint8)
    np.minimum(ones, codes, out=ones)
    marks = found.nonzero()[0][:count]
    if codes[marks].tobytes() != _restarts(count):
        return None
    head += data[kept : last.end]
    edges = np.empty(count + 1, np.intp)
    edges[0] = last.end
    np.add(marks, last.end + 2, out=edges[1:])
    return Tiles(data, head, size_at, has_app1, frame, interval, edges)


def _restarts(count: int) -> bytes:
    """Return the second bytes of the markers behind `count` tiles.

    They are RST0 to RST7 in turn, and EOI behind the last tile.
    """
    return (_IN_TURN * (count // 8 + 1))[: count - 1] + b"\xd9"


def read_segments(data: Data, at: int = 2) -> list[Segment] | None:
    """Return the segments from `at` on, up to and with SOS or EOI.

    Returns None if they are not well formed, or the data end before.
    """
    found: list[Segment] = []
    size = len(data)
    while at + 2 <= size and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if marker == EOI:
            return [*found, Segment(marker, at, at + 2)]
        if marker < 0xC0 or 0xD0 <= marker <= SOI or at + 4 > size:
            return None  # none that has a length, or no room for it
        end = at + 2 + (data[at + 2] << 8 | data[at + 3])
        if end < at + 4 or end > size:
            return None
        found.append(Segment(marker, at, end))
        if marker == SOS:
            return found
        at = end
    return None


def read_frame(data: Data, at: int, end: int) -> Frame | None:
    """Read the frame header, data[at:end]. Returns None if it is not well formed."""
    body = bytes(data[at + 4 : end])
    if len(body) < 6 or len(body) != 6 + 3 * body[5]:
        return None
    ids, sampling = tuple(body[6::3]), tuple([(b >> 4, b & 15) for b in body[7::3]])
    height, width = body[1] << 8 | body[2], body[3] << 8 | body[4]
    if not (height and width and ids and _SAMPLINGS.issuperset(sampling)):
        return None
    wide, high = 8, 8  # a scan of one component has one block in each MCU, whatever its sampling
    if len(ids) > 1:
        wide, high = 8 * max([h for h, _ in sampling]), 8 * max([v for _, v in sampling])
    mcus = -(-width // wide), -(-height // high)
    return Frame(body[0], height, width, ids, sampling, (wide, high), mcus)


def read_scan(data: Data, segment: Segment) -> tuple[tuple[int, ...], int, int, int, int] | None:
    """Read a SOS: the ids of its components, first and last coefficient, high and low bit.

    Returns None if the segment is not well formed.
    """
    body = bytes(data[segment.at + 4 : segment.end])
    if len(body) < 4 or len(body) != 4 + 2 * body[0]:
        return None
    return tuple(body[1:-3:2]), body[-3], body[-2], body[-1] >> 4, body[-1] & 15


def is_metadata(marker: int) -> bool:
    """Return True if segments of this marker only describe the picture: APPn, COM."""
    return marker == COM or APP0 <= marker <= APP15


def _tells_colour(data: Data, marker: int, at: int) -> bool:
    """Return True if a decoder needs this segment to know what the components are."""
    if marker == APP0:
        return bytes(data[at + 4 : at + 9]) == b"JFIF\0"
    return marker == APP14 and bytes(data[at + 4 : at + 9]) == b"Adobe"
