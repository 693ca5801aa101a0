"""Tile JPEGs: where tiles lie, what cuts of them show, and what is no tile JPEG.

The oracle is PIL's decoder: a cut shows the pixels of the whole.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.device_crops import scene
from support.images import encoded
from support.jpegs import KINDS, SAMPLINGS, made, needs_programs, patched, run, shown, tiled

from shardio.images.jpeg_tiles import tiles

pytestmark = needs_programs


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
    plain = encoded(scene(400, 200), "JPEG", exif=exif, comment=b"c" * 500, icc_profile=b"i" * 900)
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
    data = encoded(
        scene(300, 200), "JPEG", keep_rgb=True, subsampling=0
    )  # Adobe's segment says RGB
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


def marks(data: bytes) -> list[int]:
    """Where the restart markers stand."""
    start = data.index(b"\xff\xda")
    return [
        i
        for i in range(start + 2, len(data) - 1)
        if data[i] == 0xFF and 0xD0 <= data[i + 1] <= 0xD7
    ]


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
