"""shardio/images/{jpeg_tiles,jpeg_rewrite}.py: where tiles lie, what cuts show and rewrites keep;
hostile bytes.

The oracle is PIL's decoder: a cut shows the pixels of the whole, a rewritten file has the same.
Everything that rewrites runs with each tool that is here: the compiled core, and jpegtran.
"""

from __future__ import annotations

import functools
import io
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.device_crops import scene

from shardio import native
from shardio.errors import DependencyError
from shardio.images import jpeg_rewrite, jpeg_tiles
from shardio.images.jpeg_rewrite import Unfit, interval_for, rewrite
from shardio.images.jpeg_tiles import Tiles, tiles

IMAGENET = Path("/tmp/data/imagenet")
CORE = native.core
# Luma's sampling against that of chroma, as `cjpeg -sample` takes it.
SAMPLINGS = {
    "4:4:4": "1x1",
    "4:2:2": "2x1",
    "4:2:0": "2x2",
    "4:4:0": "1x2",
    "4:1:1": "4x1",
    "4:1:0": "4x2",
    "mixed": "2x2,1x2,2x1",
}

needs_programs = pytest.mark.skipif(
    shutil.which("jpegtran") is None or shutil.which("cjpeg") is None,
    reason="cjpeg and jpegtran are not here (libjpeg-turbo-progs): tile JPEGs are NOT tested",
)
pytestmark = needs_programs


@pytest.fixture(params=["core", "jpegtran"])
def tool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "core" and (CORE is None or not hasattr(CORE, "rewrite")):
        pytest.skip("shardio's compiled core is not built: rewriting by it is NOT tested")
    if request.param == "jpegtran":
        monkeypatch.setattr(native, "core", None)
    yield request.param


def run(*command: str, data: bytes) -> bytes:
    done = subprocess.run(command, input=data, capture_output=True)
    assert done.returncode == 0 and not done.stderr, (command, done.stderr)
    return done.stdout


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@functools.cache
def made(kind: str, width: int, height: int, progressive: bool = False) -> bytes:
    """A JPEG of `scene`: a sampling of SAMPLINGS, "grey", or "grey 2x2" (its sampling says so)."""
    ppm = encoded(scene(width, height), "PPM")
    options = ["-quality", "85", *(["-progressive"] if progressive else [])]
    if kind.startswith("grey"):
        options += ["-grayscale", "-sample", kind[5:] or "1x1"]
    else:
        options += ["-sample", SAMPLINGS[kind]]
    return run("cjpeg", *options, data=ppm)


@functools.cache
def tiled(kind: str, width: int, height: int, interval: int) -> bytes:
    """The same with a restart marker every so many MCUs."""
    data = made(kind, width, height)
    return run("jpegtran", "-copy", "all", "-restart", f"{interval}B", data=data)


def shown(data: bytes, scale: int = 1) -> np.ndarray:
    image = Image.open(io.BytesIO(data))
    if scale > 1:
        width, height = image.size
        image.draft("RGB", (width // scale, height // scale))
        assert image.size == (-(-width // scale), -(-height // scale))
    return np.array(image)


KINDS = [*SAMPLINGS, "grey", "grey 2x2"]


# Cutting --------------------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, int, int, int, tuple[int, int, int, int]]:
    """Kind, size, interval, box. Few sizes, so that most files come from the cache."""
    kind = draw(st.sampled_from(KINDS))
    width, height = draw(st.sampled_from([(203, 97), (128, 64), (161, 33), (70, 150), (258, 40)]))
    across = max(int(s[0]) for s in SAMPLINGS.get(kind, "1x1").split(","))
    mcus = -(-width // (8 * across))
    interval = draw(st.sampled_from([i for i in range(2, mcus + 1) if mcus % i == 0]))
    left = draw(st.integers(0, width - 1))
    top = draw(st.integers(0, height - 1))
    right = draw(st.integers(left + 1, width))
    bottom = draw(st.integers(top + 1, height))
    return kind, width, height, interval, (left, top, right, bottom)


@settings(max_examples=150, deadline=None)
@given(cuts())
def test_a_cut_shows_the_pixels_of_the_whole(case) -> None:
    kind, width, height, interval, box = case
    data = tiled(kind, width, height, interval)
    found = tiles(data)
    assert found is not None
    assert (found.width, found.height) == (width, height)
    left, top, right, bottom = box
    cut = found.cut(box)
    part, whole = shown(cut.data), shown(data)
    assert part.shape[:2] == (cut.height, cut.width)
    assert found.grey == cut.grey == kind.startswith("grey")
    x, y = left - cut.left, top - cut.top
    assert np.array_equal(
        part[y : y + bottom - top, x : x + right - left], whole[top:bottom, left:right]
    )


@settings(max_examples=100, deadline=None)
@given(cuts(), st.sampled_from([2, 4, 8]))
def test_a_cut_shows_the_pixels_of_the_whole_at_a_smaller_scale(case, scale: int) -> None:
    kind, width, height, interval, (left, top, right, bottom) = case
    # Whole pixels of the small picture; its last ones may be half outside.
    small = -(-width // scale), -(-height // scale)
    a, b = min(left // scale, small[0] - 1), min(top // scale, small[1] - 1)
    c, d = max(a + 1, min(right // scale, small[0])), max(b + 1, min(bottom // scale, small[1]))
    data = tiled(kind, width, height, interval)
    found = tiles(data)
    assert found is not None
    cut = found.cut((a * scale, b * scale, min(width, c * scale), min(height, d * scale)))
    if min(cut.width, cut.height) < scale:
        return  # PIL cannot be asked for less than a pixel
    x, y = cut.left // scale, cut.top // scale
    assert np.array_equal(
        shown(cut.data, scale)[b - y : d - y, a - x : c - x], shown(data, scale)[b:d, a:c]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_is_no_larger_than_tiles_and_margin_make_it(kind: str) -> None:
    data = tiled(kind, 512, 96, 2)
    found = tiles(data)
    assert found is not None
    wide, high = found.tile_width, found.tile_height
    assert found.columns * wide == 512 and found.rows == -(-96 // high)
    # Away from the rim of a tile, one tile is enough.
    x, y = wide + wide // 2, high + high // 2
    middle = found.cut((x, y, x + 1, y + 1))
    assert (middle.left, middle.top, middle.width, middle.height) == (wide, high, wide, high)
    assert len(middle.data) < len(data) / 4
    # At the rim, chroma that is shared with the next tile needs that one, too; else it does not.
    rim = found.cut((wide, 0, wide + 1, high - 1))
    shared = wide > 16
    assert (rim.left, rim.width) == ((0, 2 * wide) if shared else (wide, wide))
    beside = found.cut((wide + 1, high + 1, 2 * wide - 1, 2 * high - 1))
    assert (beside.left, beside.top, beside.width, beside.height) == (wide, high, wide, high)
    whole = found.cut((0, 0, 512, 96))
    assert (whole.left, whole.top, whole.width, whole.height) == (0, 0, 512, 96)
    assert np.array_equal(shown(whole.data), shown(data))


def test_a_cut_numbers_its_markers_in_turn_and_drops_what_is_not_needed() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = encoded(scene(400, 200), exif=exif, comment=b"c" * 500, icc_profile=b"i" * 900)
    data = run("jpegtran", "-copy", "all", "-restart", "5B", data=plain)
    found = tiles(data)
    assert found is not None and found.has_app1
    cut = found.cut((100, 50, 300, 150))
    assert b"Exif" not in cut.data and b"ICC" not in cut.data and b"ccc" not in cut.data
    assert b"JFIF" in cut.data  # it says that the colours are YCbCr
    again = tiles(cut.data)  # checks the number of tiles and their turn
    assert again is not None and not again.has_app1
    assert (again.width, again.height) == (cut.width, cut.height)
    assert again.tile_width == found.tile_width
    assert len(cut.data) < 0.7 * len(data)


def test_cuts_keep_what_tells_the_colours() -> None:
    data = encoded(scene(300, 200), keep_rgb=True, subsampling=0)  # Adobe's segment says RGB
    found = tiles(run("jpegtran", "-copy", "all", "-restart", "19B", data=data))
    assert found is not None
    cut = found.cut((0, 0, 100, 100))
    assert b"Adobe" in cut.data
    assert np.array_equal(shown(cut.data)[:100, :100], shown(data)[:100, :100])


@pytest.mark.parametrize("box", [(-1, 0, 5, 5), (0, 0, 204, 5), (5, 0, 5, 9), (0, 90, 9, 98)])
def test_a_box_outside_the_picture_is_refused(box) -> None:
    found = tiles(tiled("4:2:0", 203, 97, 13))
    assert found is not None
    with pytest.raises(ValueError, match="not inside 203 x 97"):
        found.cut(box)


def test_any_buffer_serves() -> None:
    data = tiled("4:2:0", 203, 97, 13)
    cut = tiles(data).cut((20, 20, 60, 60))  # type: ignore[union-attr]
    for buffer in (bytearray(data), memoryview(data), memoryview(b"x" + data)[1:]):
        assert tiles(buffer).cut((20, 20, 60, 60)) == cut  # type: ignore[union-attr]


# What is no tile JPEG -------------------------------------------------------------------------


def marks(data: bytes) -> list[int]:
    """Where the restart markers stand."""
    start = data.index(b"\xff\xda")
    return [
        i
        for i in range(start + 2, len(data) - 1)
        if data[i] == 0xFF and 0xD0 <= data[i + 1] <= 0xD7
    ]


def patched(data: bytes, at: int, new: bytes, old: int = -1) -> bytes:
    """`new` in the place of as many bytes, or of `old` ones."""
    return data[:at] + new + data[at + (len(new) if old < 0 else old) :]


GOOD = (("4:2:0", 203, 97, 13), ("grey", 128, 64, 8))


@pytest.mark.parametrize("which", GOOD)
def test_what_is_not_quite_a_tile_jpeg_is_none(which) -> None:
    data = tiled(*which)
    assert tiles(data) is not None
    assert tiles(data + b"what follows") is not None  # decoders do not read that far
    first, second, *_ = marks(data)
    size = 2 + data[data.index(b"\xff\xc0") + 3]
    dri, sof, sos = data.index(b"\xff\xdd"), data.index(b"\xff\xc0"), data.index(b"\xff\xda")
    bad = {
        "no restarts": made(*which[:3]),
        "rows of tiles": run("jpegtran", "-restart", "2", data=made(*which[:3])),
        "progressive": made(*which[:3], progressive=True),
        "marker missing": patched(data, first, b"", 2),
        "marker twice": patched(data, first, data[first : first + 2] * 2, 2),
        "marker out of turn": patched(data, second, b"\xff\xd5"),
        "two markers swapped": patched(patched(data, first, b"\xff\xd1"), second, b"\xff\xd0"),
        "marker too many": data[:-2] + b"\xff\xd0\xff\xd9",
        "other marker in the scan": patched(data, first + 5, b"\xff\x01"),
        "fill bytes in the scan": patched(data, first, b"\xff" + data[first : first + 2], 2),
        "end missing": data[:-2],
        "end is another marker": data[:-2] + b"\xff\xd8",
        "end half": data[:-1],
        "interval longer": patched(data, dri + 4, b"\0\x1a"),
        "interval shorter": patched(data, dri + 4, b"\0\x01"),
        "interval none": patched(data, dri + 4, b"\0\0"),
        "interval divides no row": patched(data, dri + 4, b"\0\x05"),
        "length of DRI": patched(data, dri + 2, b"\0\x05\0\x0d\0", 4),
        "taller": patched(data, sof + 5, b"\x01\0"),
        "wider": patched(data, sof + 7, b"\x02\0"),
        "no height": patched(data, sof + 5, b"\0\0"),
        "no width": patched(data, sof + 7, b"\0\0"),
        "12 bits": patched(data, sof + 4, b"\x0c"),
        "components": patched(data, sof + 9, b"\x02"),
        "sampling": patched(data, sof + 11, b"\x50"),
        "other frame": patched(data, sof, b"\xff\xc9"),
        "two frames": patched(data, sof, data[sof : sof + size] * 2, size),
        "components of the scan": patched(data, sos + 5, bytes([data[sos + 5] ^ 8])),
        "spectrum of the scan": patched(data, sos + 2 + data[sos + 3] - 2, b"\x3e"),
        "length beyond the end": patched(data, 4, b"\xff\xff"),
        "length too short": patched(data, 4, b"\0\x01"),
        "junk between segments": patched(data, sof, b"\0\0", 0),
        "no JPEG": b"\x89PNG" + data,
        "nothing": b"",
        "start alone": data[:2],
    }  # fmt: skip
    for name, hostile in bad.items():
        assert tiles(hostile) is None, name


def test_small_pictures_are_none_when_asked() -> None:
    data = tiled("4:2:0", 203, 97, 13)
    assert tiles(data, min_pixels=203 * 97) is not None
    assert tiles(data, min_pixels=203 * 97 + 1) is None


def test_no_tile_jpeg_costs_no_look_at_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "frombuffer", None)
    assert tiles(made("4:2:0", 203, 97)) is None
    assert tiles(encoded(scene(203, 97), "PNG")) is None


@pytest.mark.parametrize("which", GOOD)
def test_every_truncation_is_none(which) -> None:
    data = tiled(*which)
    assert tiles(data[:-1]) is None
    for size in (*range(0, 700), *range(700, len(data), 61)):
        assert tiles(data[:size]) is None


def test_an_interval_of_one_mcu_is_none() -> None:
    """libjpeg upsamples a picture of two chroma columns plainly: a cut that narrow would differ."""
    assert tiles(tiled("4:2:2", 128, 64, 1)) is None


def check_hostile(data: bytes, seed: int, rounds: int) -> int:
    """Flips, inserts and drops bytes; where tiles are still found, cuts show the whole's pixels."""
    draw = random.Random(seed)
    header = data.index(b"\xff\xda") + 20
    found = 0
    for _ in range(rounds):
        hostile = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(header if draw.random() < 0.7 else len(hostile))
            match draw.randrange(4):
                case 0:
                    hostile[at] ^= 1 << draw.randrange(8)
                case 1:
                    hostile[at] = draw.choice((0, 1, 2, 8, 0xD0, 0xDD, 0xFF))
                case 2:
                    hostile.insert(at, draw.choice((0, 0xFF, 0xD3, 0xD9)))
                case _:
                    del hostile[at]
        if (there := tiles(bytes(hostile))) is None:
            continue
        try:
            whole = shown(bytes(hostile))
        except (OSError, SyntaxError):
            continue  # the tables are broken, and with them each cut
        found += 1
        box = there.width // 3, there.height // 3, there.width // 2, there.height // 2
        cut = there.cut(box)
        x, y = cut.left, cut.top
        assert np.array_equal(
            shown(cut.data)[box[1] - y : box[3] - y, box[0] - x : box[2] - x],
            whole[box[1] : box[3], box[0] : box[2]],
        )
    return found


@pytest.mark.filterwarnings("ignore:Image appears to be a malformed MPO file")
@pytest.mark.parametrize("which", GOOD)
def test_hostile_bytes_are_none_or_show_what_the_whole_shows(which) -> None:
    assert check_hostile(tiled(*which), 1, 500) > 50


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Image appears to be a malformed MPO file")
@pytest.mark.parametrize("kind", KINDS)
def test_very_many_hostile_bytes(kind: str) -> None:
    assert check_hostile(tiled(kind, 256, 64, 4), 2, 20_000) > 2_000


# Rewriting ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sampled_from([(203, 97), (129, 130), (300, 61), (161, 140)]),
    st.booleans(),
)
def test_a_rewritten_file_has_the_same_pixels(kind: str, size, progressive: bool) -> None:
    data = made(kind, *size, progressive)
    results = []
    for core in {CORE, None}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "core", core)
            results.append(rewrite(data))
    assert all(result == results[0] for result in results)  # both tools write the same bytes
    result = results[0]
    assert isinstance(result, bytes)
    assert np.array_equal(shown(result), shown(data))
    found = tiles(result)
    assert found is not None and found.columns * found.rows >= 4
    assert rewrite(result) == Unfit("tiles already")


def segments(data: bytes) -> list[bytes]:
    """Its APPn and COM segments."""
    at, found = 2, []
    while data[at : at + 2] != b"\xff\xd9":
        marker = data[at + 1]
        if data[at] != 0xFF or marker in (0, 0xFF) or 0xD0 <= marker <= 0xD7:
            at += 1  # within a scan
            continue
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if 0xE0 <= marker <= 0xEF or marker == 0xFE:
            found.append(data[at:end])
        at = end
    return found


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(body) + 2).to_bytes(2, "big") + body


def test_all_that_is_not_the_picture_is_kept_in_its_place(tool: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = encoded(scene(203, 97), exif=exif)
    thumbnail = b"JFIF\0\1\2\1\0\x48\0\x48\2\1" + b"\7" * 6
    own = [
        segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>"),
        segment(0xFE, b"before JFIF"),
        segment(0xE0, thumbnail),  # libjpeg would drop it, and write JFIF first
        segment(0xE0, b"JFXX\0\x13"),
        segment(0xE2, b"ICC_PROFILE\0\1\2" + b"i" * 60_000),
        segment(0xE2, b"ICC_PROFILE\0\2\2" + b"j" * 60_000),
        segment(0xFE, b""),
        segment(0xED, b"Photoshop 3.0\0"),
    ]
    head = jpeg_tiles.read_segments(plain)
    assert head is not None
    exif_at = next(s for s in head if s.marker == 0xE1)
    data = b"".join([b"\xff\xd8", *own, plain[exif_at.at :], b"a movie"])
    result = rewrite(data)
    assert isinstance(result, bytes)
    assert segments(result) == segments(data) == [*own, *segments(plain)[1:]]
    assert result.endswith(b"\xff\xd9a movie")
    assert Image.open(io.BytesIO(result)).getexif()[0x0112] == 6
    assert np.array_equal(shown(result), shown(data))


def test_comments_between_scans_are_kept(tool: str) -> None:
    data = made("4:2:0", 203, 97, progressive=True)
    assert data.count(b"\xff\xda") > 3
    at = data.rindex(b"\xff\xc4")
    result = rewrite(patched(data, at, segment(0xFE, b"late"), 0))
    assert isinstance(result, bytes)
    assert segments(result)[-1] == segment(0xFE, b"late")
    assert np.array_equal(shown(result), shown(data))


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize(
    "late",
    [
        segment(0xEE, b"Adobe\0\x64" + bytes(5)),  # in front it would say RGB
        segment(0xE0, b"JFIF\0\1\2" + bytes(7)),
        segment(0xE1, b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6" + bytes(6)),
    ],
    ids=["colours", "jfif", "orientation"],
)
def test_what_no_decoder_heeds_does_not_come_to_be_heeded(
    tool: str, late: bytes, progressive: bool
) -> None:
    plain = patched(made("4:2:0", 203, 97, progressive=progressive), 2, b"", 18)
    assert segments(plain) == [] and isinstance(rewrite(plain), bytes)
    at = plain.rindex(b"\xff\xc4" if progressive else b"\xff\xd9")
    assert rewrite(patched(plain, at, late, 0)) == Unfit("metadata behind the first scan")
    early = rewrite(patched(plain, 2, late, 0))
    assert isinstance(early, bytes) and segments(early) == [late]


def test_no_jfif_header_is_invented(tool: str) -> None:
    plain = made("4:2:0", 203, 97)
    data = patched(plain, 2, b"", 18)  # as some cameras write it: neither JFIF nor EXIF
    assert segments(data) == []
    result = rewrite(data)
    assert isinstance(result, bytes) and segments(result) == []
    assert np.array_equal(shown(result), shown(data))


def test_rgb_stays_rgb(tool: str) -> None:
    data = encoded(scene(203, 97), keep_rgb=True, subsampling=0)
    result = rewrite(data)
    assert isinstance(result, bytes)
    assert segments(result) == segments(data)
    assert np.array_equal(shown(result), shown(data))


def unfinished(data: bytes, scans: int) -> bytes:
    """A progressive file without its last scans."""
    at = -1
    for _ in range(scans):
        at = data.rindex(b"\xff\xda", 0, at)
    return data[:at] + b"\xff\xd9"


UNFIT = {
    "a PNG": "not a JPEG",
    "nothing": "not a JPEG",
    "CMYK": "CMYK",
    "12 bits": "not 8 bits",
    "arithmetic": "arithmetic coding",
    "lossless": "lossless or hierarchical",
    "several": "several pictures",
    "small": "too small",
    "narrow": "too small",
    "few tiles": "too small",
    "huge": "too large",
    "large for its bytes": "damaged",
    "cut": "damaged",
    "cut, with an end": "damaged",
    "no end": "damaged",
    "progressive, cut": "damaged",
    "progressive, unfinished": "damaged",
    "progressive, only its start": "damaged",
    "no frame": "damaged",
    "frame too short": "damaged",
    "wrong codes": "damaged",
}


@functools.cache
def unfit_files() -> dict[str, bytes]:
    size = (203, 97)
    plain, progressive = made("4:2:0", *size), made("4:2:0", *size, progressive=True)
    sof, half = plain.index(b"\xff\xc0"), plain[: len(plain) // 2]
    return {
        "a PNG": encoded(scene(*size), "PNG"),
        "nothing": b"",
        "CMYK": encoded(scene(*size).convert("CMYK")),
        "12 bits": patched(plain, sof + 4, b"\x0c"),
        "arithmetic": run("cjpeg", "-arithmetic", data=encoded(scene(*size), "PPM")),
        "lossless": patched(plain, sof, b"\xff\xc3"),
        "several": encoded(scene(*size), "MPO", save_all=True, append_images=[scene(*size)]),
        "small": made("4:4:4", 127, 128),
        "narrow": made("4:2:0", 15, 2000),
        "few tiles": made("4:1:0", 992, 48),
        "huge": patched(plain, sof + 5, b"\xff\xff\xff\xff"),
        "large for its bytes": patched(plain, sof + 5, b"\x20\0\x1f\0"),
        "cut": half,
        "cut, with an end": half + b"\xff\xd9",
        "no end": plain[:-2],
        "progressive, cut": progressive[:-500],
        "progressive, unfinished": unfinished(progressive, 1),
        "progressive, only its start": unfinished(progressive, 8),
        "no frame": patched(plain, sof, b"\xff\xe9"),
        "frame too short": patched(plain, sof + 2, b"\0\x0e" + plain[sof + 4 : sof + 16], 17),
        "wrong codes": patched(plain, len(plain) - 900, b"\xfe" * 300),
    }


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_be_rewritten_says_why(name: str, tool: str) -> None:
    found = rewrite(unfit_files()[name])
    assert isinstance(found, Unfit) and found.reason == UNFIT[name]
    if name == "large for its bytes":  # seen before memory is taken for all these pixels
        assert "too few bytes for 7936 x 8192" in found.detail


def test_unfinished_progressive_files_would_look_different() -> None:
    """Why they are left: decoders smooth what was not sent, and take the rewritten file as sent."""
    data = unfinished(made("4:2:0", 203, 97, progressive=True), 8)
    rewritten = run("jpegtran", data=data)
    assert not np.array_equal(shown(rewritten), shown(data))


def test_the_limit_of_pixels_is_checked_before_memory_is_taken(tool: str) -> None:
    data = made("4:2:0", 203, 97)
    assert isinstance(rewrite(data, max_pixels=203 * 97), bytes)
    found = rewrite(data, max_pixels=203 * 97 - 1)
    assert isinstance(found, Unfit) and found.reason == "too large" and "203 x 97" in found.detail


def test_many_scans_are_refused_before_work(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = made("4:2:0", 203, 97, progressive=True)
    monkeypatch.setattr(jpeg_rewrite, "_MAX_SCANS", data.count(b"\xff\xda") - 1)
    found = rewrite(data)
    assert isinstance(found, Unfit) and "scans" in found.detail


@pytest.mark.parametrize(
    ("mcus", "interval"),
    [(63, 7), (32, 8), (47, 47), (42, 7), (38, 19), (60, 6), (50, 10), (24, 8), (3, 3), (12, 6)],
)
def test_the_interval_is_the_divisor_nearest_to_8(mcus: int, interval: int) -> None:
    assert interval_for(mcus) == interval


def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A jpegtran of our own, and no core."""
    path = tmp_path / "jpegtran"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(native, "core", None)


def test_a_rewrite_that_changes_coefficients_is_refused(tmp_path, monkeypatch) -> None:
    data = made("4:2:0", 203, 97)
    other = tmp_path / "other.jpg"
    image = shown(data)
    image[40:48, 40:48] ^= 8
    other.write_bytes(
        run(
            "cjpeg",
            "-quality",
            "85",
            "-restart",
            "13B",
            data=encoded(Image.fromarray(image), "PPM"),
        )
    )
    real = shutil.which("jpegtran")
    script = f'case "$*" in *restart*) cat >/dev/null; cat {other};; *) exec {real} "$@";; esac'
    program(tmp_path, monkeypatch, script)
    assert rewrite(data) == Unfit("damaged", "the rewritten picture would differ")


def test_what_jpegtran_complains_of_is_damage(tmp_path, monkeypatch) -> None:
    real = shutil.which("jpegtran")
    program(tmp_path, monkeypatch, f'echo "Corrupt\033 data" >&2; exec {real} "$@"')
    found = rewrite(made("4:2:0", 203, 97))
    assert found == Unfit("damaged", "Corrupt\\x1b data")  # and nothing that steers a terminal
    program(tmp_path, monkeypatch, "exit 3")
    assert rewrite(made("4:2:0", 203, 97)) == Unfit("damaged", "jpegtran: 3")


def test_a_jpegtran_that_writes_progressive_files_is_none_for_this(tmp_path, monkeypatch) -> None:
    program(tmp_path, monkeypatch, f'exec {shutil.which("jpegtran")} -progressive "$@"')
    with pytest.raises(DependencyError, match="another kind of JPEG"):
        rewrite(made("4:2:0", 203, 97))


def test_a_jpegtran_that_takes_too_long_is_ended(tmp_path, monkeypatch) -> None:
    program(tmp_path, monkeypatch, "exec tail -f /dev/null")
    monkeypatch.setattr(jpeg_rewrite, "_TIME_LIMIT_S", 0.05)
    found = rewrite(made("4:2:0", 203, 97))
    assert isinstance(found, Unfit) and "more than 0.05 s" in found.detail


def test_without_core_and_jpegtran_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(native, "core", None)
    monkeypatch.setenv("PATH", "/nowhere")
    data = made("4:2:0", 203, 97)
    for call in (jpeg_rewrite.rewriter, lambda: rewrite(data)):
        with pytest.raises(DependencyError, match="libjpeg-turbo-progs"):
            call()


def test_photographs_keep_their_pixels_and_cuts_show_them(tool: str) -> None:
    files = sorted(IMAGENET.glob("*/*"))[::60]
    if not files:
        pytest.skip(f"{IMAGENET} is not here: real photographs are NOT tested")
    for number, file in enumerate(files):
        data = file.read_bytes()
        result = rewrite(data)
        assert isinstance(result, bytes)
        assert segments(result) == segments(data)
        whole = shown(data)
        assert np.array_equal(shown(result), whole)
        found = tiles(result)
        assert isinstance(found, Tiles)
        draw = random.Random(number)
        left, top = draw.randrange(found.width), draw.randrange(found.height)
        right, bottom = draw.randint(left + 1, found.width), draw.randint(top + 1, found.height)
        cut = found.cut((left, top, right, bottom))
        x, y = left - cut.left, top - cut.top
        assert np.array_equal(
            shown(cut.data)[y : y + bottom - top, x : x + right - left],
            whole[top:bottom, left:right],
        )
