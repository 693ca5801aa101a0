"""Where the pixels of a crop lie inside a JPEG, and how to write one so that they can be found.

Three quarters of the time for a photograph go into its entropy coding, which must be read from its
first bit: what stands in the middle cannot be found. Restart markers are the exception: at each,
the decoder is byte aligned and starts anew. A *tile JPEG* is an ordinary baseline JPEG with a
restart marker after every few MCUs (the squares of 8 x 8 to 32 x 32 pixels that a JPEG is coded
in), a number that divides the MCUs of a row. So its picture lies in the file as a grid of tiles:

    header | tile 0 | RST0 | tile 1 | RST1 | ... | tile 8 | RST0 | ... | last tile | EOI

`tiles` finds them, `Tiles.cut` puts those that a box needs behind a header with their own width and
height, with the markers numbered anew: a small JPEG that any decoder reads. Its pixels are those of
the whole, since in a baseline JPEG nothing but the upsampling of chroma looks beyond an MCU; for
that the cut has a margin. `rewrite` makes a tile JPEG of another one: the same coefficients coded
anew, so the same pixels, which is checked for each file.

Bytes in, bytes out; nothing here decodes, and no length is believed before it is checked: whatever
is not quite a tile JPEG is none (`tiles` gives None), and is decoded whole, as ever.

Source: ITU-T T.81 (the JPEG standard), annex B for markers, A.2 for MCUs, E.1.4 for restarts; what
the upsampling looks at: jdsample.c and jdmainct.c of libjpeg-turbo.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import native as engine
from ..errors import DependencyError, StorageError, printable

Data = bytes | bytearray | memoryview

# Rewriting holds all coefficients, 2 bytes for each of 3 components, and twice those of progressive
# files: so up to 800 MB. (Reading has its own limit, `image.MAX_PIXELS`.)
MAX_PIXELS = 2**26

# Smaller pictures are decoded before their tiles are found and joined: 128 x 128 in 0.2 ms.
MIN_PIXELS, MIN_TILES = 2**14, 4

# Tiles are near to 8 MCUs wide, and never below 4. Each tile costs 2 bytes of marker, half a byte
# of padding and DC values that are coded in full; wide ones make each crop decode more.
BEST_INTERVAL, LEAST_INTERVAL = 8, 4

# A progressive file has some 10 scans. Each costs a pass over all coefficients, so that a small
# hostile file with thousands would take hours.
_MAX_SCANS = 200
_TIME_LIMIT_S = 120.0  # for one run of jpegtran: 64 megapixels take some 5 seconds

# What libjpeg says when memory or disk is short: of the machine, not of the file.
_SHORT_OF = ("Insufficient memory", "temporary file", "out of disk space")

ALREADY = "tiles already"  # the reason of a file that needs no rewriting

_SOI, _EOI, _SOS, _DQT, _DHT, _DRI, _COM = 0xD8, 0xD9, 0xDA, 0xDB, 0xC4, 0xDD, 0xFE
_APP0, _APP1, _APP2, _APP14, _APP15 = 0xE0, 0xE1, 0xE2, 0xEE, 0xEF
_FRAMES = {*range(0xC0, 0xD0)} - {_DHT, 0xC8, 0xCC}  # 0xC8 is reserved, 0xCC is DAC
_IN_TURN = bytes(range(0xD0, 0xD8))  # RST0 to RST7
_SAMPLINGS = frozenset((h, v) for h in range(1, 5) for v in range(1, 5))
_BASELINE, _SEQUENTIAL = (0xC0, 0xC1), (0xC0, 0xC1, 0xC2)


class Unfit(NamedTuple):
    """Why a file is not rewritten, and so stays as it is."""

    reason: str  # one of a few, to be counted: "CMYK", "damaged", ...
    detail: str = ""  # of this file


class _Segment(NamedTuple):
    """data[at:end] with its marker and its length."""

    marker: int
    at: int
    end: int


class _Frame(NamedTuple):
    """What a SOF says.

    sampling: (horizontal, vertical) of each component.
    mcu: width and height in pixels of what one MCU of a scan with all components covers.
    mcus: in a row, and rows.
    """

    bits: int
    height: int
    width: int
    ids: tuple[int, ...]
    sampling: tuple[tuple[int, int], ...]
    mcu: tuple[int, int]
    mcus: tuple[int, int]


# Reading --------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """A JPEG with a part of the picture."""

    data: bytearray
    left: int  # where its first pixel lies in the whole
    top: int
    width: int
    height: int
    grey: bool


class Tiles:
    """Where the tiles of a tile JPEG lie in its bytes.

    width, height: of the picture, in pixels as stored.
    tile_width, tile_height: of one tile; those at the right and at the bottom may show less.
    columns, rows: of tiles.
    grey: there is one component.
    has_app1: some segment may hold EXIF or XMP, and so an orientation.
    """

    __slots__ = (
        *("width", "height", "tile_width", "tile_height", "columns", "rows", "grey", "has_app1"),
        *("_data", "_head", "_size_at", "_starts", "_ends", "_margin"),
    )

    def __init__(
        self,
        data: Data,
        head: bytearray,
        size_at: int,
        has_app1: bool,
        frame: _Frame,
        interval: int,
        edges: NDArray[np.intp],
    ) -> None:
        """head: what a cut begins with; size_at: where in it height and width stand.

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
        """A JPEG of the tiles under a box.

        box: left, top, right, bottom in pixels as stored, inside the picture and not empty. Decoded
        as the whole would be, the cut has the same pixels there; at its own rim it may not. So too
        where both are decoded at 1/2, 1/4 or 1/8, if the box begins and ends at whole pixels then.
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
    """The tiles of a tile JPEG; None where these bytes are none, whatever else they may be.

    min_pixels: None also for pictures with fewer.

    A tile JPEG here: 8 bits, Huffman coded and sequential, 1 or 3 components in one scan, a restart
    interval of 2 MCUs or more that divides the MCUs of a row, and exactly the restart markers that
    this makes, in turn, with EOI behind the last tile. What follows EOI is ignored, as decoders do.

    For other JPEGs this costs the walk through their header, some microseconds.
    """
    if bytes(data[:3]) != b"\xff\xd8\xff" or (segments := _header(data)) is None:
        return None
    head, kept, size_at, has_app1 = bytearray(), 0, 0, False
    frame, interval = None, 0
    for marker, at, end in segments:
        if marker in (_DQT, _DHT, _SOS):
            continue
        if marker == _DRI:
            if end - at != 6:
                return None
            interval = data[at + 4] << 8 | data[at + 5]
        elif marker in _BASELINE and frame is None:
            frame, size_at = _frame(data, at, end), len(head) + at - kept + 5
        elif not _is_text(marker):
            return None  # another kind of JPEG, or two frames
        else:
            has_app1 |= marker == _APP1
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
    if rest or count > len(data) or _scan(data, last) != (frame.ids, 0, 63, 0, 0):
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
    """The second bytes of the markers behind so many tiles: RST0 to RST7 in turn, then EOI."""
    return (_IN_TURN * (count // 8 + 1))[: count - 1] + b"\xd9"


def _header(data: Data, at: int = 2) -> list[_Segment] | None:
    """The segments from `at` on, up to and with SOS or EOI; None where they are not well formed."""
    found: list[_Segment] = []
    size = len(data)
    while at + 2 <= size and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if marker == _EOI:
            return [*found, _Segment(marker, at, at + 2)]
        if marker < 0xC0 or 0xD0 <= marker <= _SOI or at + 4 > size:
            return None  # none that has a length, or no room for it
        end = at + 2 + (data[at + 2] << 8 | data[at + 3])
        if end < at + 4 or end > size:
            return None
        found.append(_Segment(marker, at, end))
        if marker == _SOS:
            return found
        at = end
    return None


def _frame(data: Data, at: int, end: int) -> _Frame | None:
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
    return _Frame(body[0], height, width, ids, sampling, (wide, high), mcus)


def _scan(data: Data, segment: _Segment) -> tuple[tuple[int, ...], int, int, int, int] | None:
    """A SOS: the ids of its components, first and last coefficient, high and low bit."""
    body = bytes(data[segment.at + 4 : segment.end])
    if len(body) < 4 or len(body) != 4 + 2 * body[0]:
        return None
    return tuple(body[1:-3:2]), body[-3], body[-2], body[-1] >> 4, body[-1] & 15


def _is_text(marker: int) -> bool:
    """Whether a segment only says something about the picture: APPn, COM."""
    return marker == _COM or _APP0 <= marker <= _APP15


def _tells_colour(data: Data, marker: int, at: int) -> bool:
    """Whether a decoder needs this segment to know what the components are."""
    if marker == _APP0:
        return bytes(data[at + 4 : at + 9]) == b"JFIF\0"
    return marker == _APP14 and bytes(data[at + 4 : at + 9]) == b"Adobe"


# Writing --------------------------------------------------------------------------------------


def rewrite(data: bytes, *, max_pixels: int = MAX_PIXELS) -> bytes | Unfit:
    """The same picture as a tile JPEG, or why this file should stay as it is.

    Lossless: quantised coefficients, sampling and tables of quantisation are the same, which is
    proven for this file, so any decoder gives the same pixels. APPn and COM segments are kept as
    they are, in order (EXIF, ICC profile, comments), and so is what follows the picture.
    Progressive files become sequential ones.

    The work is done by the compiled core, else by the program jpegtran, with the same bytes as
    result. Raises DependencyError when neither is there (`rewriter` asks before), or jpegtran does
    not do it; StorageError when jpegtran was killed, or lacked memory; MemoryError of the core.
    """
    tool = rewriter()
    found = _fit(data, max_pixels)
    if isinstance(found, Unfit):
        return found
    segments, frame, interval = found
    end = segments[-1].end
    bare = _bare(data, segments)
    done = (
        engine.core.rewrite(bare, interval, frame.width * frame.height)
        if engine.core
        else _jpegtran(tool, bare, interval)
    )
    if isinstance(done, str):
        return Unfit("damaged", printable(done.removeprefix("damaged: ")))
    made = _header(done)
    assert made is not None  # libjpeg's own
    grey = bytes([frame.sampling[0][0] << 4 | frame.sampling[0][1]]) if len(frame.ids) == 1 else b""
    kept = [data[s.at : s.end] for s in segments if _is_text(s.marker)]
    drawn = [
        # jpegtran says 1 x 1 for the sampling of a grey picture; there it means nothing.
        done[s.at : s.at + 11] + grey + done[s.at + 12 : s.end]
        if s.marker in _FRAMES and grey
        else done[s.at : s.end]
        for s in made
        if not _is_text(s.marker)
    ]
    result = b"".join([b"\xff\xd8", *kept, *drawn, done[made[-1].end :], data[end:]])
    again = tiles(result)
    if again is None or (again.width, again.height) != (frame.width, frame.height):
        raise _unusable(tool, "it writes another kind of JPEG than asked for, as mozjpeg's does")
    return result


def rewriter() -> str:
    """What `rewrite` would use: the core's name, or jpegtran's path.

    Raises DependencyError when neither is here.
    """
    if engine.core is not None:
        return "shardio.native._core"
    if (found := shutil.which("jpegtran")) is not None:
        return found
    raise DependencyError(
        "JPEGs cannot be rewritten as tiles: neither shardio's compiled core nor the program "
        "jpegtran is here. Install jpegtran (Debian, Ubuntu: apt-get install libjpeg-turbo-progs; "
        "macOS: brew install jpeg-turbo), or a C compiler and libjpeg's headers (libjpeg-dev) and "
        "shardio again"
    )


def interval_for(mcus: int) -> int:
    """The restart interval for rows of so many MCUs: the divisor >= 4 that is nearest to 8.

    Of two equally near the smaller one. A row of fewer than 4 MCUs is one tile.
    """
    divisors = [i for i in range(LEAST_INTERVAL, mcus + 1) if mcus % i == 0]
    return min(divisors, key=lambda i: (abs(i - BEST_INTERVAL), i), default=mcus)


def _fit(data: bytes, max_pixels: int) -> tuple[list[_Segment], _Frame, int] | Unfit:
    """All segments of a file that can be rewritten, its frame, and the restart interval to use."""
    if data[:3] != b"\xff\xd8\xff":
        return Unfit("not a JPEG")
    if tiles(data) is not None:
        return Unfit(ALREADY)
    segments = _file(data)
    if isinstance(segments, str):
        return Unfit("damaged", segments)
    frames = [s for s in segments if s.marker in _FRAMES]
    if not frames:
        return Unfit("damaged", "there is no frame header")
    marker = frames[0].marker
    if marker in (0xC9, 0xCA):
        return Unfit("arithmetic coding")
    if marker not in _SEQUENTIAL or len(frames) > 1:
        return Unfit("lossless or hierarchical")
    frame = _frame(data, frames[0].at, frames[0].end)
    if frame is None:
        return Unfit("damaged", "its frame header is not well formed")
    if frame.bits != 8:
        return Unfit("not 8 bits", f"{frame.bits} bits")
    if len(frame.ids) not in (1, 3):
        return Unfit("CMYK" if len(frame.ids) == 4 else "neither grey nor RGB")
    if any(s.marker == _APP2 and data[s.at + 4 : s.at + 8] == b"MPF\0" for s in segments):
        # Its table says at which byte each picture starts.
        return Unfit("several pictures")
    scans = [i for i, s in enumerate(segments) if s.marker == _SOS]
    if scans and any(_APP0 <= s.marker <= _APP15 for s in segments[scans[0] :]):
        # Decoders do not heed them there; before the first scan they would: another orientation,
        # other colours.
        return Unfit("metadata behind the first scan")
    if frame.width * frame.height > max_pixels:
        return Unfit("too large", f"{frame.width} x {frame.height} pixels, over {max_pixels:,}")
    if frame.width * frame.height > 512 * len(data):  # each 8 x 8 of them takes a bit at least
        return Unfit("damaged", f"too few bytes for {frame.width} x {frame.height} pixels")
    interval = interval_for(frame.mcus[0])
    count = frame.mcus[0] // interval * frame.mcus[1]
    if interval < 2 or count < MIN_TILES or frame.width * frame.height < MIN_PIXELS:
        return Unfit("too small", f"{frame.width} x {frame.height} pixels")
    if not _complete(data, segments, frame, progressive=marker == 0xC2):
        # Decoders guess, by smoothing, what a progressive file has not sent.
        return Unfit("damaged", "its scans do not send each coefficient to its last bit")
    return segments, frame, interval


def _file(data: bytes) -> list[_Segment] | str:
    """All segments of a file from behind SOI to its EOI, or what is wrong with it."""
    body = np.frombuffer(data, np.uint8)
    marks = np.flatnonzero(body[:-1] == 0xFF)
    codes = body[1:][marks]
    # Within a scan: all but FF 00, which is a byte FF, restart markers, and fill bytes.
    marks = marks[(codes != 0) & (codes & 0xF8 != 0xD0) & (codes != 0xFF)]
    segments: list[_Segment] = []
    at = 2
    for _ in range(_MAX_SCANS + 1):
        more = _header(data, at)
        if more is None:
            return "its segments are not well formed, or it is cut"
        segments += more
        if more[-1].marker == _EOI:
            return segments
        following = int(np.searchsorted(marks, more[-1].end))
        if following == marks.size:
            return "it is cut: there is no end marker"
        at = int(marks[following])
    return f"it has more than {_MAX_SCANS} scans"


def _complete(data: bytes, segments: list[_Segment], frame: _Frame, *, progressive: bool) -> bool:
    """Whether the scans together send all bits of all coefficients of all components."""
    low = np.full((len(frame.ids), 64), -1)  # the lowest bit sent so far
    for segment in segments:
        if segment.marker != _SOS:
            continue
        if (scan := _scan(data, segment)) is None:
            return False
        ids, first, last, _, bit = scan
        rows = [frame.ids.index(i) for i in ids if i in frame.ids]
        low[rows, slice(first, last + 1) if progressive else slice(None)] = (
            bit if progressive else 0
        )
    return not low.any()


def _bare(data: bytes, segments: list[_Segment]) -> bytes:
    """The file with no more than what its picture needs: what libjpeg shall see.

    It would drop JFIF's thumbnail, sort JFIF and Adobe before EXIF, and write them where they were
    not. So APPn and COM go round it; coefficients do not depend on what colours they stand for.
    """
    parts = [b"\xff\xd8"]
    for segment, following in pairwise([*segments, segments[-1]]):
        if not _is_text(segment.marker):
            end = following.at if segment.marker == _SOS else segment.end
            parts.append(data[segment.at : end])
    return b"".join(parts)


def _jpegtran(program: str, bare: bytes, interval: int) -> bytes | str:
    """The rewrite by jpegtran and its proof, or what jpegtran found wrong.

    Proof: both files, written once more in one way (no restarts, the standard's Huffman tables),
    are equal byte for byte. Such a file follows from size, sampling, tables of quantisation and
    coefficients alone, and coefficients can be read from it; so equal files had equal ones. It
    takes on trust that libjpeg writes plain Huffman codes without loss, not that it does so with
    restarts, or with the tables that it made for this file.
    """
    result = _run(program, bare, "-optimize", "-restart", f"{interval}B")
    if isinstance(result, str):
        return result
    first, second = _run(program, bare), _run(program, result)
    if isinstance(first, str) or isinstance(second, str) or first != second:
        return "the rewritten picture would differ"
    return result


def _run(program: str, data: bytes, *options: str) -> bytes | str:
    """The output of jpegtran, or its complaint: it must be silent, and warnings count as damage.

    Raises DependencyError when it does not run, StorageError when it was killed, or says that this
    machine has not what it needs: that tells nothing of the file.
    """
    try:
        done = subprocess.run(
            [program, "-copy", "none", *options],
            input=data,
            capture_output=True,
            timeout=_TIME_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"jpegtran took more than {_TIME_LIMIT_S:g} s"
    except OSError as error:
        raise _unusable(program, error.strerror or str(error)) from None
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode in (126, 127):  # of a shell, or the loader of shared libraries
        raise _unusable(program, said or f"exit code {done.returncode}")
    ended = said if any(one in said for one in _SHORT_OF) else ""
    if done.returncode < 0:
        known = {one.value: one.name for one in signal.Signals}
        ended = f"killed by {known.get(-done.returncode, f'signal {-done.returncode}')}"
        ended += " (out of memory?)" if done.returncode == -signal.SIGKILL else ""
    if ended:
        raise StorageError(
            f"{program} ended before a JPEG of {len(data):,} bytes was rewritten: "
            f"{printable(ended)}. Nothing is wrong with what is packed so far: run it again to "
            "resume, with fewer --jobs if memory was short"
        )
    if done.returncode or said:
        return said or f"jpegtran: {done.returncode}"
    return done.stdout


def _unusable(program: str, why: str) -> DependencyError:
    return DependencyError(
        f"JPEGs cannot be rewritten: {program} does not run ({printable(why)}). Mend or install it "
        "(Debian, Ubuntu: libjpeg-turbo-progs), and run this again to resume"
    )
