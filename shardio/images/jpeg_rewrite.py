"""Rewrite JPEGs as tile JPEGs (jpeg_tiles.py), in which the pixels of a crop can be found.

`rewrite` codes the same coefficients anew, so the pixels stay the same; this is checked for each
file. Packing does it once, by the native core or by the program jpegtran.

Bytes come in and go out; nothing here decodes, and no length is believed before it is checked.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .. import native
from ..errors import DependencyError, StorageError, printable
from . import jpeg_tiles
from .jpeg_tiles import APP0, APP2, APP15, DHT, EOI, SOS, Frame, Segment

# Rewriting holds all coefficients, 2 bytes for each of 3 components, and twice those of progressive
# files: so up to 800 MB. (Reading has its own limit, `decode.MAX_PIXELS`.)
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

_FRAMES = {*range(0xC0, 0xD0)} - {DHT, 0xC8, 0xCC}  # 0xC8 is reserved, 0xCC is DAC
_PROGRESSIVE = 0xC2
_REWRITTEN = (0xC0, 0xC1, _PROGRESSIVE)


class Unfit(NamedTuple):
    """The reason why a file is not rewritten, and so stays as it is."""

    reason: str  # one of a few, to be counted: "CMYK", "damaged", ...
    detail: str = ""  # of this file


def rewrite(data: bytes, *, max_pixels: int = MAX_PIXELS) -> bytes | Unfit:
    """Rewrite a JPEG as a tile JPEG of the same picture, or return why the file should stay.

    max_pixels: the largest width * height to rewrite.

    It is lossless: quantised coefficients, sampling and quantisation tables stay the same, which is
    proven for this file, so any decoder gives the same pixels. APPn and COM segments are kept as
    they are, in order (EXIF, ICC profile, comments), and so are the bytes behind the picture.
    Progressive files become sequential ones.

    The work is done by the native core, or without it by the program jpegtran; the resulting bytes
    are the same. Raises DependencyError if neither is there (`rewriter` asks before) or jpegtran
    does not run, StorageError if jpegtran was killed or lacked memory, and MemoryError of the core.
    """
    tool = rewriter()
    found = _fit(data, max_pixels)
    if isinstance(found, Unfit):
        return found
    segments, frame, interval = found
    end = segments[-1].end
    bare = _bare(data, segments)
    done = (
        native.core.rewrite(bare, interval, frame.width * frame.height)
        if native.core
        else _jpegtran(tool, bare, interval)
    )
    if isinstance(done, str):
        return Unfit("damaged", printable(done.removeprefix("damaged: ")))
    parts = jpeg_tiles.read_segments(done)
    assert parts is not None  # libjpeg's own
    grey = bytes([frame.sampling[0][0] << 4 | frame.sampling[0][1]]) if len(frame.ids) == 1 else b""
    kept = [data[s.at : s.end] for s in segments if jpeg_tiles.is_metadata(s.marker)]
    drawn = [
        # jpegtran says 1 x 1 for the sampling of a grey picture; there it means nothing.
        done[s.at : s.at + 11] + grey + done[s.at + 12 : s.end]
        if s.marker in _FRAMES and grey
        else done[s.at : s.end]
        for s in parts
        if not jpeg_tiles.is_metadata(s.marker)
    ]
    result = b"".join([b"\xff\xd8", *kept, *drawn, done[parts[-1].end :], data[end:]])
    again = jpeg_tiles.tiles(result)
    if again is None or (again.width, again.height) != (frame.width, frame.height):
        raise _unusable(tool, "it writes another kind of JPEG than asked for, as mozjpeg's does")
    return result


def rewriter() -> str:
    """Return the tool that `rewrite` would use: the name of the core, or the path of jpegtran.

    Raises DependencyError if neither is here.
    """
    if native.core is not None:
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
    """Return the restart interval for rows of `mcus` MCUs: the divisor >= 4 that is nearest to 8.

    Of two equally near divisors it is the smaller one. A row of fewer than 4 MCUs is one tile.
    """
    divisors = [i for i in range(LEAST_INTERVAL, mcus + 1) if mcus % i == 0]
    return min(divisors, key=lambda i: (abs(i - BEST_INTERVAL), i), default=mcus)


def _fit(data: bytes, max_pixels: int) -> tuple[list[Segment], Frame, int] | Unfit:
    """Return all segments of a file, its frame, and the restart interval to use.

    Returns Unfit if the file cannot be rewritten.
    """
    if data[:3] != b"\xff\xd8\xff":
        return Unfit("not a JPEG")
    if jpeg_tiles.tiles(data) is not None:
        return Unfit(ALREADY)
    segments = _file(data)
    if isinstance(segments, str):
        return Unfit("damaged", segments)
    frame = _frame(data, segments)
    if isinstance(frame, Unfit):
        return frame
    pixels, shown = frame.width * frame.height, f"{frame.width} x {frame.height} pixels"
    if pixels > max_pixels:
        return Unfit("too large", f"{shown}, over {max_pixels:,}")
    if pixels > 512 * len(data):  # each 8 x 8 of them takes a bit at least
        return Unfit("damaged", f"too few bytes for {shown}")
    interval = interval_for(frame.mcus[0])
    count = frame.mcus[0] // interval * frame.mcus[1]
    if interval < 2 or count < MIN_TILES or pixels < MIN_PIXELS:
        return Unfit("too small", shown)
    if not _complete(data, segments, frame):
        # Decoders guess, by smoothing, what a progressive file has not sent.
        return Unfit("damaged", "its scans do not send each coefficient to its last bit")
    return segments, frame, interval


def _frame(data: bytes, segments: list[Segment]) -> Frame | Unfit:
    """Return the frame header of a file, or why its kind of JPEG cannot be rewritten."""
    frames = [s for s in segments if s.marker in _FRAMES]
    if not frames:
        return Unfit("damaged", "there is no frame header")
    if frames[0].marker in (0xC9, 0xCA):
        return Unfit("arithmetic coding")
    if frames[0].marker not in _REWRITTEN or len(frames) > 1:
        return Unfit("lossless or hierarchical")
    frame = jpeg_tiles.read_frame(data, frames[0].at, frames[0].end)
    if frame is None:
        return Unfit("damaged", "its frame header is not well formed")
    if frame.bits != 8:
        return Unfit("not 8 bits", f"{frame.bits} bits")
    if len(frame.ids) not in (1, 3):
        return Unfit("CMYK" if len(frame.ids) == 4 else "neither grey nor RGB")
    if any(s.marker == APP2 and data[s.at + 4 : s.at + 8] == b"MPF\0" for s in segments):
        # Its table says at which byte each picture starts.
        return Unfit("several pictures")
    scans = [i for i, s in enumerate(segments) if s.marker == SOS]
    if scans and any(APP0 <= s.marker <= APP15 for s in segments[scans[0] :]):
        # Decoders do not heed them there; before the first scan they would: another orientation,
        # other colours.
        return Unfit("metadata behind the first scan")
    return frame


def _file(data: bytes) -> list[Segment] | str:
    """Return all segments of a file from behind SOI to its EOI.

    Returns a text that says what is wrong with the file if they cannot be found.
    """
    body = np.frombuffer(data, np.uint8)
    marks = np.flatnonzero(body[:-1] == 0xFF)
    codes = body[1:][marks]
    # Within a scan: all but FF 00, which is a byte FF, restart markers, and fill bytes.
    marks = marks[(codes != 0) & (codes & 0xF8 != 0xD0) & (codes != 0xFF)]
    segments: list[Segment] = []
    at = 2
    for _ in range(_MAX_SCANS + 1):
        more = jpeg_tiles.read_segments(data, at)
        if more is None:
            return "its segments are not well formed, or it is cut"
        segments += more
        if more[-1].marker == EOI:
            return segments
        following = int(np.searchsorted(marks, more[-1].end))
        if following == marks.size:
            return "it is cut: there is no end marker"
        at = int(marks[following])
    return f"it has more than {_MAX_SCANS} scans"


def _complete(data: bytes, segments: list[Segment], frame: Frame) -> bool:
    """Return True if the scans together send all bits of all coefficients of all components."""
    progressive = any(s.marker == _PROGRESSIVE for s in segments)
    low = np.full((len(frame.ids), 64), -1)  # the lowest bit sent so far
    for segment in segments:
        if segment.marker != SOS:
            continue
        if (scan := jpeg_tiles.read_scan(data, segment)) is None:
            return False
        ids, first, last, _, bit = scan
        rows = [frame.ids.index(i) for i in ids if i in frame.ids]
        low[rows, slice(first, last + 1) if progressive else slice(None)] = (
            bit if progressive else 0
        )
    return not low.any()


def _bare(data: bytes, segments: list[Segment]) -> bytes:
    """Return the file with no more than its picture needs. This is the input of libjpeg.

    libjpeg would drop JFIF's thumbnail, sort JFIF and Adobe before EXIF, and write them where they
    were not. So APPn and COM go round it; coefficients do not depend on the colours that they
    stand for.
    """
    parts = [b"\xff\xd8"]
    for segment, following in pairwise([*segments, segments[-1]]):
        if not jpeg_tiles.is_metadata(segment.marker):
            end = following.at if segment.marker == SOS else segment.end
            parts.append(data[segment.at : end])
    return b"".join(parts)


def _jpegtran(program: str, bare: bytes, interval: int) -> bytes | str:
    """Rewrite a file by jpegtran, and prove the result. Returns a text if jpegtran complains.

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
    """Return the output of jpegtran, or its complaint.

    jpegtran must be silent: warnings count as damage of the file. Raises DependencyError if it does
    not run. Raises StorageError if it was killed, or says that this machine lacks memory or disk:
    that tells nothing of the file.
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
    """Make the error for a jpegtran that does not do its work."""
    return DependencyError(
        f"JPEGs cannot be rewritten: {program} does not run ({printable(why)}). Mend or install it "
        "(Debian, Ubuntu: libjpeg-turbo-progs), and run this again to resume"
    )
