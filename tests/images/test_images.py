"""shardio/images/{decode,transforms,resize}.py: pixels, limits, boxes, errors; images made here.

The suite passes with either PIL; CI runs it on both. Where two roads must give the same picture,
"the same" is exact, or within 1 or 2 levels of 255 where rounding may fall either way.
"""

from __future__ import annotations

import functools
import importlib.metadata
import io
import math
import pickle
import random
import struct
import subprocess
import sys
import tracemalloc
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps, features

from shardio.errors import DecodeError, DependencyError, OptionError, ShardioError
from shardio.images import decode as decoding
from shardio.images import jpeg_rewrite, jpeg_tiles, transforms
from shardio.images.decode import (
    LEAST_PIL,
    decode,
    decode_errors,
    open_image,
    pil_info,
    pil_module,
    to_rgb,
)
from shardio.images.resize import resize_short
from shardio.images.transforms import (
    CenterCrop,
    RandomResizedCrop,
    Transform,
    crop_box,
    crop_boxes,
    crop_many,
)
from shardio.native import core as CORE
from shardio.order.rng import words

IMAGENET = Path("/tmp/data/imagenet")
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def scene(width: int = 97, height: int = 61) -> Image.Image:
    """A smooth picture without any symmetry, so that every turn of it is another picture."""
    y, x = np.mgrid[0:height, 0:width]
    red = 255 * x / width
    green = 255 * y / height
    blue = 127 + 120 * np.sin(x / 9 + y / 23)
    return Image.fromarray(np.stack([red, green, blue], -1).astype(np.uint8))


def turned(orientation: int, image: Image.Image, kind: str = "PNG", **options) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif.tobytes(), **options)


def to_array(image: Image.Image) -> np.ndarray:
    return np.array(to_rgb(image))


def pixels(data: bytes, **options) -> np.ndarray:
    return to_array(decode(data, **options))


def apart(a: np.ndarray, b: np.ndarray) -> int:
    assert a.shape == b.shape
    return int(np.abs(a.astype(int) - b.astype(int)).max())


def png(width: int, height: int, depth: int, colour: int, body: bytes) -> bytes:
    """A PNG file written by hand: 'body' is the IDAT payload before compression."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(
            ">I", zlib.crc32(name + data)
        )  # fmt: skip

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(body))
        + chunk(b"IEND", b"")
    )


# Modes ----------------------------------------------------------------------------------------


def test_rgb_keeps_every_pixel():
    assert (pixels(encoded(scene())) == np.asarray(scene())).all()


def test_decoded_image_is_loaded_and_rgb():
    image = decode(encoded(scene(), "JPEG"))
    assert isinstance(image, Image.Image)
    assert image.mode == "RGB"
    assert not getattr(image, "tile", None)


def test_grey_fills_three_channels():
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    assert (pixels(encoded(Image.fromarray(grey))) == grey[..., None]).all()


def test_one_bit_is_black_and_white():
    image = Image.new("1", (4, 2))
    image.putpixel((3, 1), 1)
    out = pixels(encoded(image))
    assert out[1, 3].tolist() == [255, 255, 255]
    assert out.sum() == 3 * 255


def test_grey_with_alpha_drops_alpha():
    assert pixels(encoded(Image.new("LA", (3, 2), (90, 7))))[1, 2].tolist() == [90, 90, 90]


def test_alpha_is_dropped_not_blended():
    assert pixels(encoded(Image.new("RGBA", (3, 2), (10, 20, 30, 0))))[0, 0].tolist() == [
        10,
        20,
        30,
    ]


@pytest.mark.parametrize("transparency", [None, 1, b"\x00\x80"])
def test_palette_gives_its_colours_whatever_its_transparency(transparency):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([1, 2, 3, 200, 100, 50])
    options = {} if transparency is None else {"transparency": transparency}
    data = encoded(image, **options)
    assert (pixels(data) == [200, 100, 50]).all()
    assert (CenterCrop(2)(data) == [200, 100, 50]).all()


def test_users_palette_image_is_left_as_it_is():
    image = Image.new("P", (4, 4), 1)
    image.putpalette([1, 2, 3, 200, 100, 50])
    image.info["transparency"] = b"\x00\x80"
    CenterCrop(2)(image)
    to_array(image)
    assert image.mode == "P"
    assert image.info["transparency"] == b"\x00\x80"


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_solid_colour_comes_back(kind):
    # Adobe stores CMYK JPEGs inverted; PIL writes and reads them so. 0 black ink, full cyan.
    options = {"quality": 100} if kind == "JPEG" else {}
    data = encoded(Image.new("CMYK", (16, 16), (255, 0, 128, 0)), kind, **options)
    assert apart(pixels(data), np.full((16, 16, 3), [0, 255, 127], np.uint8)) <= 2


def test_adobe_cmyk_jpeg_is_stored_inverted():
    data = encoded(Image.new("CMYK", (16, 16), (0, 0, 0, 0)), "JPEG", quality=100)
    assert b"Adobe" in data
    assert (pixels(data) == 255).all()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_is_scaled_not_clipped(kind):
    ramp = np.linspace(0, 65535, 64 * 64).round().astype(np.uint16).reshape(64, 64)
    out = pixels(encoded(Image.fromarray(ramp), kind))
    assert (out == np.round(ramp / 257)[..., None]).all()
    assert out[0, 0, 0] == 0
    assert out[-1, -1, 0] == 255


def test_big_endian_16_bit_grey_is_scaled():
    ramp = np.linspace(0, 65535, 64).round().astype(np.uint16).reshape(8, 8)
    image = Image.frombytes("I;16B", (8, 8), ramp.astype(">u2").tobytes())
    assert (to_array(image) == np.round(ramp / 257)[..., None]).all()


def test_32_bit_grey_beyond_16_bits_is_white_and_negative_black():
    image = Image.fromarray(np.array([[-5, 0, 65535, 2**31 - 1]], np.int32))
    assert image.mode == "I"
    assert to_array(image)[0, :, 0].tolist() == [0, 0, 255, 255]


def test_16_bit_grey_is_scaled_in_transforms_too():
    data = encoded(Image.fromarray(np.full((40, 40), 257 * 100, np.uint16)))
    assert (RandomResizedCrop(16)(data, 5) == 100).all()


def test_16_bit_rgb_is_its_high_byte():
    words = np.arange(0, 65536, 65536 // 48, dtype=np.uint16)[:48].reshape(4, 4, 3)
    body = b"".join(b"\0" + row.astype(">u2").tobytes() for row in words)
    assert (pixels(png(4, 4, 16, 2, body)) == words >> 8).all()


def test_float_pixels_are_refused_with_advice():
    data = encoded(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF")
    with pytest.raises(DecodeError, match=r"no agreed range.*decode="):
        decode(data)
    with pytest.raises(DecodeError, match="no agreed range"):
        CenterCrop(2)(data)


@pytest.mark.parametrize("mode", ["RGBa", "La", "PA", "RGBX", "YCbCr", "HSV"])
def test_rarer_modes_become_rgb(mode):
    assert to_array(Image.new(mode, (5, 4))).shape == (4, 5, 3)


def test_animated_gif_gives_its_first_frame():
    frames = [Image.new("RGB", (20, 10), c) for c in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (pixels(data) == [255, 0, 0]).all()
    assert (CenterCrop(5)(data) == [255, 0, 0]).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM", "WEBP", "QOI"])
def test_format_is_decoded(kind):
    if kind == "WEBP" and not features.check("webp"):
        pytest.skip("this PIL is built without WebP: WebP is NOT tested here")
    data = encoded(Image.new("RGB", (20, 10), (200, 100, 48)), kind)
    assert apart(pixels(data), np.full((10, 20, 3), [200, 100, 48], np.uint8)) <= 4
    assert (pixels(memoryview(data)) == pixels(data)).all()
    assert (CenterCrop(4)(memoryview(data)) == CenterCrop(4)(data)).all()


def test_array_is_new_writable_contiguous_and_owned():
    image = scene()
    for array in (CenterCrop(16)(image), RandomResizedCrop(16, flip=True)(image)):
        assert array.dtype == np.uint8
        assert array.flags.c_contiguous and array.flags.writeable and array.flags.owndata
        array[:] = 0
    assert np.asarray(image).any()


# Orientation ----------------------------------------------------------------------------------


def straight(orientation: int) -> Image.Image:
    """The upright picture, the road everyone knows."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(turned(orientation, scene()))))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_decode_applies_orientation(orientation):
    image = decode(turned(orientation, scene()))
    assert (to_array(image) == np.asarray(straight(orientation))).all()
    # Nobody who asks again turns it a second time.
    assert (np.asarray(ImageOps.exif_transpose(image)) == np.asarray(image)).all()
    assert (CenterCrop(30)(image) == CenterCrop(30)(straight(orientation))).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_decode_leaves_orientation_when_told(orientation):
    out = pixels(turned(orientation, scene()), upright=False)
    assert (out == np.asarray(scene())).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_tiff_is_turned_once(orientation):
    data = turned(orientation, scene(), "TIFF")
    assert (pixels(data) == np.asarray(straight(orientation))).all()
    assert apart(CenterCrop(30, 40)(data), CenterCrop(30, 40)(straight(orientation))) <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    "transform",
    [
        RandomResizedCrop((20, 33), flip=True),
        RandomResizedCrop((20, 33), interpolation="bicubic"),
        CenterCrop((20, 33)),
        CenterCrop((20, 33), 40),
        CenterCrop((80, 33)),
    ],
)
def test_turning_the_small_result_equals_turning_the_picture(orientation, transform):
    data = turned(orientation, scene())
    for draw in range(8):
        straightforward = transform(straight(orientation), draw)
        assert straightforward.shape == (*transform.size, 3)
        # Rows before columns instead of after: rounding may differ, by one level a pass.
        assert apart(transform(data, draw), straightforward) <= 2
        asis = type(transform)(transform.size, upright=False)
        assert (asis(data, draw) == asis(scene(), draw)).all()


def test_turned_picture_without_resampling_is_exact():
    for orientation in range(1, 9):
        data = turned(orientation, scene())
        assert (CenterCrop((30, 21))(data) == CenterCrop((30, 21))(straight(orientation))).all()


def test_damaged_exif_leaves_the_picture():
    data = encoded(scene(), exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert (pixels(data) == np.asarray(scene())).all()
    nonsense = turned(77, scene())
    assert (pixels(nonsense) == np.asarray(scene())).all()
    assert reopened(resize_short(nonsense, 30, 90)).getexif()[0x0112] == 77  # kept as it was


# Limits and damage ----------------------------------------------------------------------------


def test_pixel_limit_is_checked_from_the_header_without_allocating():
    bomb = png(60_000, 60_000, 8, 2, b"\0" * 100)
    assert len(bomb) < 200
    for read in (decode, CenterCrop(8), RandomResizedCrop(8), lambda d: resize_short(d, 8, 90)):
        tracemalloc.start()
        with pytest.raises(DecodeError, match=r"60000 x 60000 = 3,600,000,000 pixels.*268,435,456"):
            read(bomb)
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()


def test_between_pils_two_levels_only_our_limit_counts():
    # 100 million pixels: PIL's Image.open would warn (an error in this suite).
    data = png(10_000, 10_000, 1, 0, b"\0" * 1251 * 10_000)
    with pytest.raises(DecodeError, match="over the limit of 99,999,999"):
        decode(data, max_pixels=99_999_999)
    assert open_image(data, 10**8).size == (10_000, 10_000)
    # 200 million: it would refuse.
    assert open_image(png(20_000, 10_000, 1, 0, b""), 2**28).size == (20_000, 10_000)


def gif(screen: tuple[int, int], frame: tuple[int, int], disposal: int = 0) -> bytes:
    return (
        b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + b"," * 6
        + b"!\xfe\x03abc\0" + b"!\xf9\x04" + bytes([disposal << 2, 0, 0, 0]) + b"\0"
        + b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x02\x4c\x01\0;"
    )  # fmt: skip


@pytest.mark.parametrize("disposal", [0, 2, 3])
@pytest.mark.parametrize("frame", [(10_000, 10_000), (13_000, 13_000), (65_535, 65_535)])
def test_gif_whose_frame_outgrows_its_screen_is_refused_before_allocating(frame, disposal):
    with pytest.raises(DecodeError, match=f"GIF image: its header says {frame[0]} x {frame[1]}"):
        decode(gif((1, 1), frame, disposal))


def test_gif_built_by_hand_decodes():
    assert pixels(gif((1, 1), (1, 1), 2)).shape == (1, 1, 3)


def test_tiff_above_pils_guard_is_refused_without_warning():
    head = encoded(Image.new("1", (8, 8)), "TIFF")
    wide = bytearray(head)
    at = struct.unpack_from("<I", wide, 4)[0]
    for entry in range(struct.unpack_from("<H", wide, at)[0]):
        place = at + 2 + 12 * entry
        if struct.unpack_from("<H", wide, place)[0] in (256, 257):
            struct.pack_into("<HII", wide, place + 2, 4, 1, 10_000)
    with pytest.raises(DecodeError, match=r"10000 x 10000.*MAX_IMAGE_PIXELS"):
        decode(bytes(wide))


def test_pil_settings_stay_as_they_were():
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, ImageFile.MAXBLOCK
    decode(encoded(scene(), "JPEG"))
    CenterCrop(8, fast=True)(encoded(scene(), "JPEG"))
    resize_short(encoded(scene(), "JPEG"), 16, 80)
    after = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, ImageFile.MAXBLOCK
    assert before == after
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "TIFF"])
def test_truncated_image_is_an_error_not_a_grey_rest(kind):
    data = encoded(scene(300, 200), kind)
    for cut in (len(data) // 4, len(data) // 2, len(data) * 3 // 4):
        for read in (decode, CenterCrop(8), lambda d: resize_short(d, 50, 90)):
            with pytest.raises(DecodeError) as caught:
                read(data[:cut])
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xd8\xff", b"GIF89a", b"BM", b"II*\0", b"\x89PNG\r\n\x1a\n", b"P6", b"x" * 99],
)
def test_garbage_is_a_decode_error_in_one_line(data):
    for read in (decode, CenterCrop(8), RandomResizedCrop(8), lambda d: resize_short(d, 8, 90)):
        with pytest.raises(DecodeError) as caught:
            read(data)
        assert "\n" not in str(caught.value)
        assert f"{len(data):,} bytes" in str(caught.value)


def test_unknown_format_says_what_it_starts_with_and_what_to_do():
    with pytest.raises(DecodeError, match=r"JPEG, PNG.*starts with b'%!PS-Adobe.*decode="):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")  # would run Ghostscript


def test_missing_codec_is_named(monkeypatch):
    reason = "image file cannot be identified: WEBP support not installed"
    Image.init()
    monkeypatch.setitem(Image.OPEN, "WEBP", (None, lambda prefix: prefix[:4] == b"RIFF" and reason))
    with pytest.raises(DecodeError, match=reason):
        decode(b"RIFF\0\0\0\0WEBPVP8 " + b"\0" * 40)


def test_text_from_hostile_bytes_cannot_steer_a_terminal():
    with pytest.raises(DecodeError) as caught, decode_errors(b""):
        raise ValueError("bad \x1b[2J\n chunk")
    assert str(caught.value) == r"image of 0 bytes: bad \x1b[2J\n chunk"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "TIFF"])
def test_decoded_image_can_be_sent_between_processes(kind):
    image = decode(turned(6, scene(), kind))
    again = pickle.loads(pickle.dumps(image))
    assert (np.asarray(again) == np.asarray(image)).all()


def test_flipped_bytes_give_a_picture_or_a_shardio_error():
    rng = np.random.default_rng(0)
    crop = RandomResizedCrop(8, flip=True)
    sources = [encoded(scene(40, 30), kind) for kind in ("JPEG", "PNG", "GIF", "BMP", "PPM", "QOI")]
    sources += [turned(6, scene(40, 30), "JPEG"), encoded(scene(40, 30).convert("P"), "GIF")]
    for data in sources:
        for _ in range(60):
            broken = bytearray(data)
            for at in rng.integers(0, len(data), 3):
                broken[at] = rng.integers(256)
            for read in (crop, lambda d: resize_short(d, 20, 80)):
                try:
                    out = read(bytes(broken))
                except DecodeError:
                    continue
                if isinstance(out, np.ndarray):
                    assert out.shape == (8, 8, 3)


def test_errors_are_one_string_and_survive_pickle():
    calls = [
        lambda: decode(b"junk"),
        lambda: decode(png(60_000, 60_000, 8, 2, b"")),
        lambda: decode(encoded(scene(), "JPEG")[:900]),
        lambda: CenterCrop(2)(Image.new("F", (2, 2))),
        lambda: CenterCrop(8)("a path"),  # type: ignore[arg-type]
        lambda: CenterCrop(0),
        lambda: resize_short(b"", 0, 90),
    ]
    for call in calls:
        with pytest.raises(ShardioError) as caught:
            call()
        error = caught.value
        assert len(error.args) == 1 and isinstance(error.args[0], str)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)


# Boxes ----------------------------------------------------------------------------------------


def test_boxes_never_change():
    assert crop_box(640, 480, 1234567, SCALE, RATIO) == (34, 31, 274, 269, False)


def test_boxes_follow_the_inception_distribution():
    width, height, n = 640, 480, 20_000
    boxes = np.array([crop_box(width, height, draw, SCALE, RATIO) for draw in range(n)])
    left, top, w, h, flip = boxes.T
    assert (left >= 0).all() and (top >= 0).all() and (w > 0).all() and (h > 0).all()
    assert (left + w <= width).all() and (top + h <= height).all()
    # The same numbers drawn independently, with numpy's generator: the distribution, not the words.
    rng = np.random.default_rng(1)
    wide, high = [], []
    while len(wide) < n:
        area = width * height * rng.uniform(*SCALE)
        aspect = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        a, b = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if a <= width and b <= height:
            wide.append(a)
            high.append(b)
    for ours, theirs in ((w, wide), (h, high), (w * h, np.multiply(wide, high))):
        assert abs(np.mean(ours) / np.mean(theirs) - 1) < 0.015
        levels = np.linspace(0.02, 0.98, 49)
        drift = np.quantile(ours, levels) - np.quantile(theirs, levels)
        assert np.abs(drift).max() < 0.03 * np.max(theirs)
    ratio = w / h
    assert (ratio > RATIO[0] * 0.98).all() and (ratio < RATIO[1] * 1.02).all()
    assert abs(np.log(ratio).mean() - np.log(np.divide(wide, high)).mean()) < 0.006
    # Placed uniformly over what is left, both ends reached.
    shares = []
    for place, room in ((left, width - w), (top, height - h)):
        share = (place + 0.5) / (room + 1)
        assert abs(share.mean() - 0.5) < 0.01
        assert abs(share.std() - math.sqrt(1 / 12)) < 0.01
        shares.append(share)
        assert (place == 0).any() and (place == room).any()
    # The five numbers of a box have nothing to do with each other.
    independent = np.corrcoef([*shares, w * h, np.log(ratio), flip])
    independent[2, 3] = independent[3, 2] = 0  # large boxes must be wide to fit this image
    assert np.abs(independent - np.eye(5)).max() < 0.03
    assert abs(flip.mean() - 0.5) < 0.02


def test_area_is_uniform_where_every_box_fits():
    boxes = np.array([crop_box(1000, 1000, draw, (0.1, 0.5), (1.0, 1.0)) for draw in range(10_000)])
    area = np.sort(boxes[:, 2] * boxes[:, 3] / 1e6)
    assert (boxes[:, 2] == boxes[:, 3]).all()
    assert np.abs(area - np.linspace(0.1, 0.5, 10_000)).max() < 0.01  # Kolmogorov-Smirnov: 0.024


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (1000, 10, (493, 0, 13, 10)),  # too wide: 4/3 of the height, centred
        (10, 1000, (0, 493, 10, 13)),  # too tall: width / (3/4), centred
    ],
)
def test_extreme_aspect_falls_back_to_the_central_crop(width, height, expected):
    # Whole-area crops never fit such a strip, so all ten tries fail.
    for draw in range(50):
        assert crop_box(width, height, draw, (0.9, 1.0), RATIO)[:4] == expected


def test_ten_tries_then_the_whole_image():
    # Boxes of 0.9 to 1 of the area fit a 2:1 image only near ratio 2, so most draws fail ten times.
    width, height = 10_000, 5_000
    boxes = [crop_box(width, height, draw, (0.9, 1.0), (0.5, 2.0))[:4] for draw in range(8000)]
    fallbacks = boxes.count((0, 0, width, height)) / len(boxes)
    # A try of area share a fits if its ratio, log-uniform in [1/2, 2], is at least 2a.
    once = np.mean([-math.log(a) / math.log(4) for a in np.linspace(0.9, 1, 1001)])
    assert abs(fallbacks - (1 - once) ** 10) < 0.02  # 0.68; nine tries would give 0.71


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.integers(0, 2**64 - 1),
    st.tuples(st.floats(1e-6, 1), st.floats(1e-6, 1)).map(sorted).map(tuple),
    st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)).map(sorted).map(tuple),
)
def test_box_is_inside_any_image(width, height, draw, scale, ratio):
    left, top, w, h, flip = crop_box(width, height, draw, scale, ratio)
    assert 0 <= left <= left + w <= width and w >= 1
    assert 0 <= top <= top + h <= height and h >= 1
    assert flip in (False, True)


@pytest.mark.parametrize(
    "scale, ratio", [(SCALE, RATIO), ((0.9, 1.0), (0.5, 2.0)), ((1e-4, 1), (1e-2, 1e2))]
)
def test_boxes_of_many_are_those_of_one_by_one(scale, ratio):
    draws = words(7, 0, 4000)
    sizes = (words(8, 0, 8000) % np.uint64(90)).astype(np.int64).reshape(-1, 2) + 1
    sizes[:1000] = 32
    sizes[1000:1100, 0] *= 50  # where most tries are in vain
    boxes, flips = crop_boxes(sizes, draws, scale, ratio)
    found = [(*box, flip) for box, flip in zip(boxes.tolist(), flips.tolist(), strict=True)]
    pairs = zip(sizes.tolist(), draws.tolist(), strict=True)
    assert found == [crop_box(*size, draw, scale, ratio) for size, draw in pairs]
    assert crop_boxes(sizes[:0], draws[:0], scale, ratio)[0].shape == (0, 4)


MANY = [
    RandomResizedCrop((16, 20), flip=True), CenterCrop(16), CenterCrop((16, 8), 20),
    RandomResizedCrop(16, interpolation="lanczos", upright=False, scale=(0.5, 0.6)),
    RandomResizedCrop(16, interpolation="nearest"), CenterCrop(16, fast=True),
]  # fmt: skip


@pytest.mark.parametrize("transform", MANY)
@pytest.mark.parametrize("with_core", [True, False])
def test_many_are_those_of_one_by_one(transform, with_core, monkeypatch):
    if not with_core:
        monkeypatch.setattr("shardio.native.core", None)
    turned, data = Image.Exif(), []
    turned[0x0112] = 6
    for i in range(40):
        pixels = scene(20 + i, 60 - i)
        data.append(encoded(pixels, "JPEG", quality=60 + i, subsampling=i % 3))
    data[3], data[9] = encoded(scene(30, 40), "PNG"), encoded(scene(30, 40), "JPEG", exif=turned)
    data[7] = encoded(scene(30, 40).convert("L"), "JPEG")
    draws = words(3, 0, 40)
    out = np.zeros((40, *transform.shape, 3), np.uint8)
    made = crop_many(transform, data, draws, out)
    plain = transform.interpolation != "nearest" and not transform.fast
    turns = 1 if transform.upright else 0
    assert made == (39 - turns if plain and with_core and CORE is not None else 0)
    for one, draw, row in zip(data, draws.tolist(), out, strict=True):
        assert np.array_equal(transform(one, draw), row)
    small = transform.limited(30 * 40 - 1)
    with pytest.raises(DecodeError, match=r"1,199|1199"):
        crop_many(small, [data[7]], draws[:1], out)
    with pytest.raises(DecodeError):
        crop_many(transform, [data[0], data[1][:200]], draws[:2], out)


def test_tiny_images_are_cropped():
    for size in ((1, 1), (1, 50), (50, 1), (3, 2)):
        data = encoded(scene(*size))
        assert RandomResizedCrop(16, flip=True)(data, 9).shape == (16, 16, 3)
        assert CenterCrop((16, 8), 20)(data).shape == (16, 8, 3)
        assert CenterCrop(16)(data).shape == (16, 16, 3)


# Transforms -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "interpolation", ["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_random_crop_equals_the_naive_road(interpolation, mode, monkeypatch):
    data = encoded(scene(300, 200).convert(mode), "JPEG")
    crop = RandomResizedCrop((40, 56), flip=True, interpolation=interpolation)
    for draw in range(20):
        left, top, w, h, flip = crop_box(300, 200, draw, SCALE, RATIO)
        naive = Image.open(io.BytesIO(data)).convert("RGB").resize(
            (56, 40), Image.Resampling[interpolation.upper()], box=(left, top, left + w, top + h)
        )  # fmt: skip
        expected = np.asarray(naive)[:, ::-1] if flip else np.asarray(naive)
        assert apart(crop(data, draw), expected) <= 1  # by the core, if it is there
        assert (crop(Image.open(io.BytesIO(data)), draw) == expected).all()
        with monkeypatch.context() as patch:
            patch.setattr("shardio.native.core", None)
            assert (crop(data, draw) == expected).all()


def test_result_is_a_function_of_draw():
    data = encoded(scene(), "JPEG")
    crop = RandomResizedCrop(16, flip=True)
    again = pickle.loads(pickle.dumps(crop))
    draws = [0, 1, 2, 2**63, 2**64 - 1]
    outs = [crop(data, draw).tobytes() for draw in draws]
    assert outs == [again(data, draw).tobytes() for draw in draws]
    assert len(set(outs)) == len(draws)


def test_flip_mirrors_half_and_leaves_the_box():
    data = encoded(scene())
    plain, flipped = RandomResizedCrop(16), RandomResizedCrop(16, flip=True)
    mirrored = 0
    for draw in range(200):
        a, b = plain(data, draw), flipped(data, draw)
        assert (b == a).all() or (b == a[:, ::-1]).all()
        mirrored += int(not (b == a).all())
    assert 70 < mirrored < 130


@pytest.mark.parametrize("width", [1, 3, 7, 8, 9, 12, 16, 224])
def test_mirrored_pixels_of_any_width(width):
    picture = scene(width, 5)
    assert (CenterCrop((5, width))(picture) == np.asarray(picture)).all()
    mirrored = Boxed((5, width), box=(0, 0, 1, 1))(picture, 1)
    assert (mirrored == np.asarray(picture)[:, ::-1]).all()
    assert mirrored.flags.c_contiguous and mirrored.flags.writeable and mirrored.flags.owndata


def test_center_crop_equals_resize_then_crop():
    for width, height in ((300, 200), (200, 300), (97, 61), (301, 299), (256, 256)):
        image = scene(width, height)
        short = 64
        w, h = (short, int(short * height / width)) if width <= height else (
            int(short * width / height), short)  # fmt: skip
        top, left = round((h - 48) / 2), round((w - 56) / 2)
        naive = image.resize((w, h), Image.Resampling.BILINEAR)
        naive = naive.crop((left, top, left + 56, top + 48))
        # PIL keeps a box in single precision: a weight may round the other way.
        assert apart(CenterCrop((48, 56), 64)(image), np.asarray(naive)) <= 1


def test_center_crop_without_resize_cuts_pixels():
    for interpolation in ("nearest", "bilinear", "bicubic", "lanczos"):
        out = CenterCrop((30, 22), interpolation=interpolation)(encoded(scene()))
        top, left = round((61 - 30) / 2), round((97 - 22) / 2)
        assert (out == np.asarray(scene())[top : top + 30, left : left + 22]).all()


def test_rounding_never_pushes_a_turned_box_over_the_edge():
    sizes = [(w, s) for w in range(20, 400) for s in (98, 224) if s * (w / s) > w]
    assert sizes
    for width, size in sizes[:8]:
        for orientation in (2, 3, 4, 7):
            data = turned(orientation, Image.new("L", (width, width), 9))
            assert (CenterCrop(size, size)(data) == 9).all()


def test_center_crop_enlarges_a_small_image_until_it_covers():
    out = CenterCrop(122)(scene())  # 97 x 61, doubled: the height fits, the width is cut
    naive = scene().resize((194, 122), Image.Resampling.BILINEAR).crop((36, 0, 158, 122))
    assert apart(out, np.asarray(naive)) <= 1


def test_fast_decodes_smaller_only_where_the_crop_is_twice_the_target(monkeypatch):
    monkeypatch.setattr("shardio.native.core", None)  # it never asks PIL
    calls = []
    plugin = type(Image.open(io.BytesIO(encoded(scene(), "JPEG"))))
    draft = plugin.draft
    monkeypatch.setattr(plugin, "draft", lambda s, *a: calls.append(draft(s, *a)) or calls[-1])
    data = encoded(scene(801, 603), "JPEG", quality=95)
    for size, factor in ((500, 1), (302, 1), (301, 2), (151, 2), (150, 4), (75, 8), (20, 8)):
        calls.clear()
        slow, fast = CenterCrop(size, size), CenterCrop(size, size, fast=True)
        near = fast(data)
        assert len(calls) == (factor > 1)
        if factor > 1:
            assert calls[0][1][2] == 801 / factor
        else:
            assert (near == slow(data)).all()
        assert np.abs(near.astype(int) - slow(data).astype(int)).mean() < 2
    calls.clear()
    slow(data), fast(encoded(scene(801, 603))), fast(scene(801, 603))
    assert not calls  # not asked, not a JPEG, not bytes


@pytest.mark.parametrize("orientation", range(1, 9))
def test_fast_keeps_the_box_of_turned_jpegs(orientation):
    data = turned(orientation, scene(403, 301), "JPEG", quality=95)
    for draw in range(6):
        slow = RandomResizedCrop((24, 32), flip=True)(data, draw)
        fast = RandomResizedCrop((24, 32), flip=True, fast=True)(data, draw)
        assert np.abs(slow.astype(int) - fast.astype(int)).mean() < 3


def test_draft_takes_the_factor_that_was_chosen(monkeypatch):
    monkeypatch.setattr("shardio.native.core", None)  # it never asks PIL
    seen = []
    resize = Image.Image.resize

    def spy(image, size, resample, box):
        seen.append((image.size, box))
        return resize(image, size, resample, box)

    monkeypatch.setattr(Image.Image, "resize", spy)
    for width in (*range(1, 40), 1000, 1001, 1007):
        data = encoded(Image.new("L", (width, width)), "JPEG")
        for target in {1, width // 2, width // 4, width // 8} - {0}:
            seen.clear()
            CenterCrop(target, target, fast=True)(data)
            factor = next(f for f in (8, 4, 2, 1) if width / target >= f)
            [(size, box)] = seen
            assert size == (-(-width // factor),) * 2
            assert box == pytest.approx((0, 0, width / factor, width / factor), rel=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomResizedCrop(0),
        lambda: RandomResizedCrop(-3),
        lambda: RandomResizedCrop(True),
        lambda: RandomResizedCrop(22.4),  # type: ignore[arg-type]
        lambda: RandomResizedCrop(None),  # type: ignore[arg-type]
        lambda: RandomResizedCrop((224,)),  # type: ignore[arg-type]
        lambda: RandomResizedCrop((224, 0)),
        lambda: RandomResizedCrop(224, interpolation="cubic"),
        lambda: RandomResizedCrop(224, scale=(0.0, 1.0)),
        lambda: RandomResizedCrop(224, scale=(0.5, 1.1)),
        lambda: RandomResizedCrop(224, scale=(0.9, 0.1)),
        lambda: RandomResizedCrop(224, scale=0.5),  # type: ignore[arg-type]
        lambda: RandomResizedCrop(224, scale=(math.nan, 1.0)),
        lambda: RandomResizedCrop(224, ratio=(0.0, 1.0)),
        lambda: RandomResizedCrop(224, ratio=(1.0, math.inf)),
        lambda: RandomResizedCrop(224, max_pixels=0),
        lambda: CenterCrop("224"),  # type: ignore[arg-type]
        lambda: CenterCrop(224, 0),
        lambda: CenterCrop(224, 200),
        lambda: CenterCrop(224, (256, 256)),  # type: ignore[arg-type]
        lambda: resize_short(b"", 0, 90),
        lambda: resize_short(b"", 256, 0),
        lambda: resize_short(b"", 256, 101),
    ],
)
def test_bad_option_says_where_what_was_expected_and_found(make):
    with pytest.raises(OptionError, match=r"^(RandomResizedCrop|CenterCrop|resize_short): \w+ is "):
        make()


def test_transforms_have_a_telling_repr_and_compare():
    crop = RandomResizedCrop(224, flip=True)
    assert isinstance(crop, Transform) and isinstance(CenterCrop(8), Transform)
    assert eval(repr(crop)) == crop == RandomResizedCrop([224, 224], flip=True)  # type: ignore
    assert repr(CenterCrop((8, 9), 16)).startswith("CenterCrop(size=(8, 9), ")
    assert crop != RandomResizedCrop(224)
    assert hash(crop) == hash(RandomResizedCrop(224, flip=True))


def test_what_is_no_image_is_named():
    with pytest.raises(DecodeError, match="expected encoded image bytes or a PIL image, found str"):
        CenterCrop(8)("photo.jpg")  # type: ignore[arg-type]


# Tile JPEGs -----------------------------------------------------------------------------------

KINDS = ("4:4:4", "4:2:2", "4:2:0", "grey")
FILTERS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")


@dataclass(frozen=True)
class Boxed(Transform):
    """Any box, so that fractions and ties of the filters are tried, too."""

    box: tuple[float, float, float, float] = (0, 0, 1, 1)

    def _box(self, width, height, draw):
        a, b, c, d = self.box
        return (a * width, b * height, c * width, d * height), bool(draw & 1)


@functools.cache
def pair(kind: str, width: int, height: int, orientation: int = 1) -> tuple[bytes, bytes]:
    """A JPEG, and the same as tiles."""
    image = scene(width, height)
    noise = np.random.default_rng(7).integers(-50, 50, (height, width, 3))
    image = Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))
    if kind == "grey":
        plain = turned(orientation, image.convert("L"), "JPEG")
    else:
        plain = turned(orientation, image, "JPEG", subsampling=kind)
    return plain, as_tiles(plain)


def as_tiles(plain: bytes) -> bytes:
    """The same as tiles, by the core if it is built: tests that go without it need no jpegtran."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardio.native.core", CORE)
        tiled = jpeg_rewrite.rewrite(plain)
    assert isinstance(tiled, bytes)
    return tiled


@pytest.fixture
def cuts(monkeypatch) -> list[tuple[int, int, int]]:
    """Width, height and bytes of the cuts that are made. No picture is too small for tiles."""
    try:
        jpeg_rewrite.rewriter()
    except DependencyError:
        pytest.skip("neither core nor jpegtran is here: tile JPEGs are NOT tested")
    made = []
    real = jpeg_tiles.Tiles.cut
    monkeypatch.setattr("shardio.native.core", None)
    monkeypatch.setattr(transforms, "MIN_TILED_PIXELS", 0)

    def cut(self: jpeg_tiles.Tiles, box: tuple[int, int, int, int]) -> jpeg_tiles.Cut:
        found = real(self, box)
        made.append((found.width, found.height, len(found.data)))
        return found

    monkeypatch.setattr(jpeg_tiles.Tiles, "cut", cut)
    return made


NO_RESET = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@NO_RESET
@given(
    st.sampled_from(KINDS),
    st.sampled_from([(399, 301), (256, 192), (190, 331)]),
    st.sampled_from([1, 1, 1, 3, 5, 6, 8]),
    st.sampled_from(FILTERS),
    st.booleans(),
    st.sampled_from([(24, 32), (64, 64), (97, 61), (224, 224)]),
    st.integers(0, 2**64 - 1),
)
@example("4:4:4", (190, 331), 1, "bicubic", False, (224, 224), 1)  # has a tie
def test_random_crops_of_tiles_are_those_of_the_whole(
    cuts, kind, size, orientation, interpolation, fast, target, draw
):
    plain, tiled = pair(kind, *size, orientation)
    crop = RandomResizedCrop(target, interpolation=interpolation, fast=fast, flip=True)
    cuts.clear()
    assert np.array_equal(crop(tiled, draw), crop(plain, draw))
    assert len(cuts) == 1


@NO_RESET
@given(
    st.sampled_from(KINDS),
    st.sampled_from(FILTERS),
    st.booleans(),
    st.sampled_from([224, 97, 7, 30]),
    st.tuples(*[st.floats(0, 1, width=16)] * 4),
    st.integers(1, 3),
)
def test_any_box_of_tiles_is_that_of_the_whole(cuts, kind, interpolation, fast, side, at, draw):
    plain, tiled = pair(kind, 399, 301)
    left, right = sorted(at[:2])
    top, bottom = sorted(at[2:])
    box = left * 0.99, top * 0.99, min(1, right + 0.01), min(1, bottom + 0.01)
    crop = Boxed(side, interpolation=interpolation, fast=fast, box=box)
    assert np.array_equal(crop(tiled, draw), crop(plain, draw))


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_ties_of_the_filters_fall_as_in_the_whole(cuts, kind, interpolation):
    # 224 from 64 j: the centre of every 7th pixel lies between two of the source.
    plain, tiled = pair(kind, 399, 301)
    for left, top in ((1, 1), (35, 77), (100, 20), (211, 40), (274, 173)):
        for wide, high in ((64, 128), (128, 64), (192, 128)):
            if left + wide > 399 or top + high > 301:
                continue
            box = left / 399, top / 301, (left + wide) / 399, (top + high) / 301
            crop = Boxed(224, interpolation=interpolation, box=box)
            assert np.array_equal(crop(tiled), crop(plain))


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_central_crops_of_tiles_are_those_of_the_whole(cuts, kind, interpolation):
    for orientation in (1, 6, 7):
        plain, tiled = pair(kind, 399, 301, orientation)
        for crop in (
            CenterCrop(100, 120, interpolation=interpolation),
            CenterCrop((37, 61), interpolation=interpolation),
            CenterCrop((224, 500), interpolation=interpolation),
            CenterCrop(20, 25, interpolation=interpolation, fast=True),
        ):
            assert np.array_equal(crop(tiled), crop(plain))


def test_tiles_are_written_to_a_row_with_any_strides(cuts):
    plain, tiled = pair("4:2:0", 399, 301)
    crop = RandomResizedCrop(64)
    row = np.zeros((3, 64, 64), np.uint8)
    assert crop(memoryview(tiled), 5, row.transpose(1, 2, 0)).base is not None
    assert np.array_equal(row.transpose(1, 2, 0), crop(plain, 5)) and cuts


def test_only_the_tiles_of_the_crop_are_decoded(cuts):
    _, tiled = pair("4:2:0", 399, 301)
    Boxed(24, box=(0.45, 0.5, 0.55, 0.6))(tiled)
    width, height, size = cuts[0]
    assert (width, height) == (80, 48)  # one tile wide, three high
    assert size < len(tiled) / 20
    # Halved, bilinear: one pixel beyond the box on each side counts, which is the tile's last one.
    _, tiled = pair("4:4:4", 399, 301)
    Boxed((39, 29), box=(81 / 399, 17 / 301, 159 / 399, 75 / 301))(tiled)
    assert cuts[1][:2] == (80, 64)


def test_tiles_are_resized_in_a_picture_as_large_as_the_whole(cuts, monkeypatch):
    # From Pillow 13 on its size decides whether rows or columns come first, and so what is rounded.
    seen = []
    resize = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda s, *a: seen.append(s.size) or resize(s, *a))
    _, tiled = pair("4:2:0", 399, 301)
    for fast in (False, True):
        Boxed(24, box=(0.1, 0.2, 0.4, 0.5), fast=fast)(tiled)
    assert seen == [(399, 301), (200, 151)] and len(cuts) == 2


def test_tall_tiles_of_a_wide_picture_are_resized_as_the_whole(cuts):
    plain, tiled = pair("4:4:4", 1000, 301)
    for draw in range(10):
        crop = Boxed((24, 32), box=(0.01 * draw, 0.5, 0.01 * draw + 0.1, 0.9), interpolation="box")
        assert np.array_equal(crop(tiled, draw), crop(plain, draw))


@pytest.mark.parametrize("error", [AttributeError, TypeError])
@pytest.mark.parametrize("inside", ["_getdecoder", "_getencoder"])
def test_a_pil_that_is_another_one_inside_gives_the_same(cuts, monkeypatch, inside, error):
    files = [pair("4:2:0", 399, 301)[1], pair("grey", 399, 301)[1]]
    crop = RandomResizedCrop((24, 37), flip=True, fast=True)
    expected = [crop(data, draw) for data in files for draw in range(5)]
    real, asked = getattr(Image, inside), []

    def other(*args):
        asked.append(args)
        if len(asked) % 2:
            raise error  # to us; the next one who asks is PIL
        return real(*args)

    monkeypatch.setattr(Image, inside, other)
    found = [crop(data, draw) for data in files for draw in range(5)]
    assert np.array_equal(found, expected) and len(asked) == 20


def test_orientation_of_tiles_is_left_when_told(cuts):
    plain, tiled = pair("4:2:0", 399, 301, 6)
    crop = RandomResizedCrop(64, upright=False)
    assert np.array_equal(crop(tiled, 9), crop(plain, 9)) and len(cuts) == 1


def test_small_tile_jpegs_are_decoded_whole(cuts, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("shardio.native.core", None)
    monkeypatch.setattr(jpeg_tiles.Tiles, "cut", None)
    plain, tiled = pair("4:2:0", 256, 192)
    assert np.array_equal(RandomResizedCrop(64)(tiled, 3), RandomResizedCrop(64)(plain, 3))


def error(call) -> str:
    with pytest.raises(DecodeError) as found:
        call()
    return str(found.value)


def test_errors_of_tile_jpegs_are_those_of_other_jpegs(cuts, monkeypatch):
    _, tiled = pair("4:2:0", 399, 301)
    crop = RandomResizedCrop(64, max_pixels=399 * 301 - 1, upright=False)
    dht = tiled.index(b"\xff\xc4")
    broken = tiled[: dht + 5] + b"\xff" * 16 + tiled[dht + 21 :]  # more codes than there can be
    sof = tiled.index(b"\xff\xc0")
    odd = tiled[: sof + 14] + b"\x31" + tiled[sof + 15 :]  # 2 : 3, which cannot be upsampled
    for hostile in (broken, tiled[: len(tiled) // 2], odd):
        with_tiles = error(lambda: RandomResizedCrop(64)(hostile, 3))  # noqa: B023
        with monkeypatch.context() as patch:
            patch.setattr(jpeg_tiles, "tiles", lambda *a, **options: None)
            assert error(lambda: RandomResizedCrop(64)(hostile, 3)) == with_tiles  # noqa: B023
    with_tiles = error(lambda: crop(tiled))
    assert "399 x 301" in with_tiles
    monkeypatch.setattr(jpeg_tiles, "tiles", lambda *a, **options: None)
    assert error(lambda: crop(tiled)) == with_tiles


def test_flipped_bytes_of_tile_jpegs_give_what_the_whole_gives(cuts, monkeypatch):
    _, tiled = pair("4:2:0", 256, 192)
    draw = random.Random(3)
    crop = RandomResizedCrop(32)

    def outcome(data: bytes, at: int):
        try:
            return crop(data, at).tobytes()
        except DecodeError as found:
            return str(found).partition(": ")[0]

    equal = []
    for at in range(300):
        hostile = bytearray(tiled)
        end = tiled.index(b"\xff\xda") + 14 if at % 2 else len(tiled)
        hostile[draw.randrange(2, end)] ^= 1 << draw.randrange(8)
        cuts.clear()
        by_tiles, used = outcome(bytes(hostile), at), bool(cuts)
        with monkeypatch.context() as patch:
            patch.setattr(jpeg_tiles, "tiles", lambda *a, **options: None)
            assert by_tiles == outcome(bytes(hostile), at)
        equal.append(used and isinstance(by_tiles, bytes))
    assert sum(equal) > 100


def test_real_photographs_as_tiles_give_the_same_crops(cuts):
    files = sorted(IMAGENET.glob("*/*"))[7::50]
    if not files:
        pytest.skip(f"{IMAGENET} is not here: real photographs are NOT tested")
    for draw, file in enumerate(files):
        plain = file.read_bytes()
        tiled = as_tiles(plain)
        for interpolation in FILTERS:
            for fast in (False, True):
                crop = RandomResizedCrop(96, interpolation=interpolation, fast=fast)
                assert np.array_equal(crop(tiled, draw), crop(plain, draw))
        assert np.array_equal(CenterCrop(224, 256)(tiled), CenterCrop(224, 256)(plain))


# resize_short ---------------------------------------------------------------------------------


def reopened(data: bytes | None) -> Image.Image:
    assert data is not None
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "TIFF", "WEBP"])
def test_short_side_is_reduced_in_the_same_format(kind):
    if kind == "WEBP" and not features.check("webp"):
        pytest.skip("this PIL is built without WebP: WebP is NOT tested here")
    for width, height, expected in (
        (300, 200, (150, 100)),
        (201, 402, (100, 200)),
        (101, 333, (100, 330)),
    ):
        data = encoded(scene(width, height), kind)
        out = reopened(resize_short(data, 100, 90))
        assert out.format == kind
        assert out.size == expected
        naive = scene(width, height).resize(expected, Image.Resampling.LANCZOS)
        assert np.abs(np.asarray(out.convert("RGB")).astype(int) - np.asarray(naive)).mean() < 3
        assert resize_short(data, 100, 90) == resize_short(memoryview(data), 100, 90)


def test_small_images_keep_their_bytes():
    data = encoded(scene(300, 200), "JPEG")
    assert resize_short(data, 200, 90) is None
    assert resize_short(data, 201, 90) is None
    assert resize_short(data, 199, 90) is not None


def test_other_formats_and_many_frames_keep_their_bytes():
    frames = [Image.new("RGB", (200, 100), c) for c in ((255, 0, 0), (0, 255, 0))]
    assert resize_short(encoded(frames[0], "GIF"), 50, 90) is None
    assert resize_short(encoded(frames[0], "PPM"), 50, 90) is None
    for kind in ("GIF", "TIFF", "PNG"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        assert resize_short(data, 50, 90) is None


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_resized_picture_still_stands_upright(kind, orientation):
    data = turned(orientation, scene(200, 120), kind)
    small = resize_short(data, 60, 95)
    assert small is not None
    whole, out = pixels(data), pixels(small)
    naive = Image.fromarray(whole).resize(out.shape[1::-1], Image.Resampling.LANCZOS)
    assert np.abs(out.astype(int) - np.asarray(naive)).mean() < 3
    if kind != "TIFF":
        assert reopened(small).size == (100, 60)  # stored as before; the tag turns it
        assert reopened(small).info["exif"] == reopened(data).info["exif"]


def test_orientation_from_xmp_survives():
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    data = encoded(scene(200, 120), "JPEG", xmp=xmp)
    assert pixels(data).shape == (200, 120, 3)
    assert pixels(resize_short(data, 60, 90)).shape == (100, 60, 3)


def test_exif_too_long_to_write_keeps_the_orientation():
    whole = turned(6, scene(200, 120), "JPEG")
    block = b"Exif\0\0" + b"\0" * 60_000
    extra = b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block
    at = whole.index(b"\xff\xdb")
    data = whole[:at] + extra * 2 + whole[at:]
    assert len(reopened(data).info["exif"]) > 65_533
    assert pixels(resize_short(data, 60, 90)).shape == (100, 60, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_icc_profile_is_kept(kind):
    profile = b"not a real profile, but bytes" * 20
    data = encoded(scene(200, 120), kind, icc_profile=profile)
    assert reopened(resize_short(data, 60, 90)).info["icc_profile"] == profile


@pytest.mark.parametrize(
    ("kind", "mode", "becomes"),
    [
        ("JPEG", "L", "L"),
        ("JPEG", "CMYK", "CMYK"),
        ("PNG", "L", "L"),
        ("PNG", "LA", "LA"),
        ("PNG", "RGBA", "RGBA"),
        ("PNG", "1", "L"),
        ("PNG", "P", "RGB"),
        ("BMP", "P", "RGB"),
        ("BMP", "1", "L"),
        ("TIFF", "CMYK", "CMYK"),
        ("TIFF", "F", "F"),
    ],
)
def test_mode_is_kept_where_pixels_can_be_averaged(kind, mode, becomes):
    data = encoded(scene(200, 120).convert(mode), kind)
    out = reopened(resize_short(data, 60, 95))
    assert out.mode == becomes
    naive = reopened(data).convert("RGB").resize((100, 60), Image.Resampling.LANCZOS)
    if mode != "1":
        away = np.asarray(out.convert("RGB")).astype(int) - np.asarray(naive)
        assert np.abs(away).mean() < 3


def test_palette_transparency_becomes_alpha():
    image = scene(200, 120).convert("P")
    out = reopened(resize_short(encoded(image, transparency=0), 60, 90))
    assert out.mode == "RGBA"


def test_colour_key_becomes_alpha():
    for mode, key in (("L", 9), ("RGB", (1, 2, 3))):
        data = encoded(Image.new(mode, (200, 120), key), transparency=key)
        out = reopened(resize_short(data, 60, 90))
        assert out.mode == mode.replace("L", "LA").replace("RGB", "RGBA")
        assert out.getchannel("A").getextrema() == (0, 0)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_stays_16_bit(kind):
    ramp = np.tile(np.linspace(0, 65535, 200), (120, 1)).round().astype(np.uint16)
    out = np.asarray(reopened(resize_short(encoded(Image.fromarray(ramp), kind), 60, 90)))
    assert out.dtype == np.uint16
    assert np.abs(out.astype(int) - ramp.reshape(60, 2, 100, 2).mean((1, 3))).max() < 600
    # Hard edges: Lanczos overshoots, and must be clamped, not wrapped around.
    edge = np.zeros((120, 200), np.uint16)
    edge[:, 100:] = 65535
    out = np.asarray(reopened(resize_short(encoded(Image.fromarray(edge), kind), 60, 90)))
    assert out[:, :45].max() == 0 and out[:, 55:].min() == 65535
    assert (np.diff(out.astype(int), axis=1) > -6000).all()


@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_jpeg_subsampling_is_kept(subsampling):
    from PIL.JpegImagePlugin import get_sampling

    data = encoded(scene(200, 120), "JPEG", subsampling=subsampling)
    assert get_sampling(reopened(resize_short(data, 60, 90))) == subsampling


def test_noise_at_full_quality_is_encoded():
    noise = np.random.default_rng(0).integers(0, 256, (300, 301, 3), np.uint8)
    data = encoded(Image.fromarray(noise), "JPEG", quality=100, subsampling=0)
    for quality in (90, 94, 95, 100):
        assert reopened(resize_short(data, 290, quality)).size == (291, 290)


def test_quality_counts():
    data = encoded(scene(400, 300), "JPEG", quality=95)
    assert len(resize_short(data, 200, 30)) < len(resize_short(data, 200, 95))


# The installed PIL ----------------------------------------------------------------------------


def test_pil_info_names_the_active_pil():
    import PIL

    info = pil_info()
    assert info["name"] == ("pillow-simd" if ".post" in PIL.__version__ else "pillow")
    assert info["version"] == PIL.__version__
    assert info["name"] in info["installed"]
    assert info["jpeg"].startswith("libjpeg") and info["zlib"].startswith("zlib")
    assert all(isinstance(v, str) for v in info.values())


@pytest.mark.parametrize(("active", "name"), [("19.9.post1", "pillow-simd"), ("19.9", "pillow")])
def test_pil_info_names_both_when_both_are_installed(monkeypatch, active, name):
    versions = {"pillow": "19.9", "pillow-simd": "19.9.post1"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    monkeypatch.setattr("PIL.__version__", active)
    assert pil_info()["name"] == name
    assert pil_info()["installed"] == "pillow-simd 19.9.post1, pillow 19.9"


def test_pil_info_is_named_without_metadata(monkeypatch):
    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", unknown)
    monkeypatch.setattr("PIL.__version__", "19.9.post1")
    assert (pil_info()["name"], pil_info()["installed"]) == ("pillow-simd", "unknown")


def run_python(code: str) -> str:
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_pil_the_error_names_both_extras():
    out = run_python(
        "import sys; sys.modules['PIL'] = None\n"
        "from shardio.images.transforms import *\n"
        "from shardio.images.decode import *\n"
        "from shardio.images.resize import *\n"
        "import shardio.errors as e\n"
        "crop = CenterCrop(8)\n"
        "for f in (lambda: decode(b'x'), lambda: crop(b'x'), pil_info,\n"
        "          lambda: resize_short(b'x', 8, 90)):\n"
        "    try: f()\n"
        "    except e.DependencyError as error: print(error)\n"
    )
    lines = out.splitlines()
    assert len(lines) == 4
    assert all("shardio-torch[simd]" in line and "shardio-torch[pillow]" in line for line in lines)


@pytest.mark.parametrize("version", ["9.5.0", "9.5.0.post2", "11.2.1"])
def test_an_old_pil_is_refused_by_name(monkeypatch, version):
    monkeypatch.setattr("PIL.__version__", version)
    pil_module.cache_clear()
    with pytest.raises(DependencyError, match=rf"PIL is {version}, expected 11\.3 .*\[pillow\]"):
        decode(encoded(Image.new("RGB", (2, 2))))


def test_the_extras_and_the_docs_name_the_same_least_pil():
    root = Path(__file__).resolve().parent.parent.parent
    least = ".".join(map(str, LEAST_PIL))
    extras = (root / "pyproject.toml").read_text()
    assert f'["pillow>={least}"]' in extras and f'["pillow-simd>={least}"]' in extras
    assert f"{least} or newer" in (root / "docs" / "install.md").read_text()


@pytest.mark.parametrize("version", ["11.3.0", "12.1.1.post0", "13.0.0.dev0", "unknown"])
def test_a_new_pil_is_taken(monkeypatch, version):
    monkeypatch.setattr("PIL.__version__", version)
    assert pil_module.__wrapped__() is Image


def test_importing_the_module_imports_neither_pil_nor_torch():
    out = run_python(
        "import sys, shardio.images.resize, shardio.images.transforms as t\n"
        "t.RandomResizedCrop(8); t.crop_box(9, 9, 1, (1, 1), (1, 1))\n"
        "print([m for m in ('PIL', 'torch') if m in sys.modules])"
    )
    assert out.strip() == "[]"


def test_real_photographs_equal_the_naive_road():
    files = sorted(IMAGENET.glob("*/*"))[:20]
    if not files:
        pytest.skip(f"{IMAGENET} is not here: real photographs are NOT tested")
    crop = RandomResizedCrop(224)
    for draw, file in enumerate(files):
        data = file.read_bytes()
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        left, top, w, h, _ = crop_box(*image.size, draw, SCALE, RATIO)
        box = (left, top, left + w, top + h)
        naive = image.resize((224, 224), Image.Resampling.BILINEAR, box=box)
        assert apart(crop(data, draw), np.asarray(naive)) <= 1


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        ("decoder jpeg2k not available", "JPEG 2000: .*libopenjp2-7-dev"),
        (
            "image file cannot be identified: AVIF support not installed",
            "AVIF: .*libavif",
        ),
        (
            "image file cannot be identified: WEBP support not installed",
            "WebP: .*libwebp",
        ),
        (
            "cannot import name '_imagingcms' from 'PIL'",
            "colour profiles, which LAB needs: .*liblcms2-dev",
        ),
    ],
)
def test_a_codec_that_pil_lacks_is_named_with_what_brings_it(error: str, lacks: str) -> None:
    pil = decoding.pil_info()
    said = rf"{error}\. PIL here is {pil['name']} {pil['version']}, built without {lacks}"
    with pytest.raises(DecodeError, match=said), decoding.decode_errors(b"\0\0"):
        raise OSError(error)
    with pytest.raises(DecodeError, match=r"truncated$"), decoding.decode_errors(b"\0\0"):
        raise OSError("image file is truncated")
