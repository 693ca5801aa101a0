"""Bytes to pixels: modes, orientation, limits, damage, and which PIL is there.

The suite passes with either PIL; CI runs it on both.
"""

from __future__ import annotations

import importlib.metadata
import pickle
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps, features
from support.images import (
    apart,
    encoded,
    ids,
    palette,
    photograph,
    pixels,
    png,
    reopened,
    scene,
    straight,
    to_array,
    turned,
)

from shardio import native
from shardio.errors import DecodeError, DependencyError, ShardioError
from shardio.images import decode as decoding
from shardio.images.decode import (
    LEAST_PIL,
    check,
    decode,
    decode_errors,
    gray,
    open_image,
    pil_info,
    pil_module,
    stored,
    stored_pixels,
)
from shardio.images.resize import resize_short
from shardio.images.transforms import CenterCrop, RandomResizedCrop

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


# Orientation ----------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        ("decoder jpeg2k not available", "JPEG 2000: .*libopenjp2-7-dev"),
        ("image file cannot be identified: AVIF support not installed", "AVIF: .*libavif"),
        ("image file cannot be identified: WEBP support not installed", "WebP: .*libwebp"),
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


# As stored ------------------------------------------------------------------------------------

MODES = {  # of the file: the values, and what an array of them is
    "P": (palette(ids()), ids()),
    "L": (Image.fromarray(ids()), ids()),
    "1": (Image.fromarray(ids() > 20), ids() > 20),
    "I;16": (Image.fromarray(ids().astype(np.uint16) * 1000), ids().astype(np.uint16) * 1000),
    "RGB": (photograph(ids()), np.asarray(photograph(ids()))),
    "LA": (Image.fromarray(ids()).convert("LA"), None),
}


@pytest.mark.parametrize("mode", MODES)
def test_stored_values_stay_what_they_are(mode: str) -> None:
    image, expected = MODES[mode]
    data = encoded(image)
    assert stored(data).mode == mode and stored(data).tobytes() == image.tobytes()
    array = stored_pixels(data)
    expected = np.asarray(image) if expected is None else expected
    assert array.dtype == expected.dtype and np.array_equal(array, expected)
    assert array.flags.writeable and array.flags.c_contiguous


def test_stored_is_turned_by_its_own_tag() -> None:
    upright = ids()
    data = turned(6, palette(np.ascontiguousarray(np.rot90(upright))))
    assert np.array_equal(stored_pixels(data), upright)
    assert np.array_equal(stored_pixels(data, upright=False), np.rot90(upright))
    assert "exif" not in stored(data).info


def test_big_endian_16_bits_become_the_machines() -> None:
    data = encoded(Image.fromarray(ids().astype(">u2") * 1000), "TIFF")
    array = stored_pixels(data)
    assert array.dtype == np.uint16 and array.dtype.isnative
    assert np.array_equal(array, ids().astype(np.uint16) * 1000)


def test_gray_is_8_bits_of_whatever_there_is() -> None:
    assert np.array_equal(np.asarray(gray(encoded(MODES["L"][0]))), ids())
    deep = np.asarray(gray(encoded(MODES["I;16"][0])))
    assert deep.dtype == np.uint8 and deep.max() == round(int(ids().max()) * 1000 / 257)
    assert np.array_equal(np.asarray(gray(encoded(photograph(ids())))), ids() * 4)
    assert gray(turned(6, photograph(ids()))).size == (60, 90)


def test_a_format_that_decodes_as_a_whole_has_a_lower_limit() -> None:
    bomb = encoded(Image.new("RGB", (1, 1)), "WEBP", lossless=True)
    at = bomb.index(b"VP8L") + 9  # 14 bits each of width - 1 and height - 1
    head = int.from_bytes(bomb[at : at + 4], "little") & ~(2**28 - 1)
    wide = bytearray(bomb)
    wide[at : at + 4] = (head | (8192 << 14) | 8191).to_bytes(
        4, "little"
    )  # one row above the limit
    for read in (decode, stored, CenterCrop(8)):
        with pytest.raises(
            DecodeError,
            match=r"8192 x 8193 = 67,117,056 pixels, over .* 67,108,864.*max_pixels=67117056",
        ):
            read(bytes(wide))
    with pytest.raises(DecodeError, match="over the limit of 67,117,055"):
        decode(bytes(wide), max_pixels=67_117_055)
    assert open_image(bytes(wide), 67_117_056).size == (8192, 8193)


def files_to_check() -> dict[str, bytes]:
    """One image of each kind that the core and PIL tell apart."""
    image = scene()
    found = {
        "baseline": encoded(image, "JPEG"),
        "progressive": encoded(image, "JPEG", progressive=True),
        "grey": encoded(image.convert("L"), "JPEG"),
        "cmyk": encoded(image.convert("CMYK"), "JPEG"),
        "turned": turned(6, image, "JPEG"),
        "two": encoded(image, "MPO", save_all=True, append_images=[scene(40, 30)]),
        "png": encoded(image),
        "float": encoded(Image.new("F", (9, 7), 0.5), "TIFF"),
        "raw": decoding.ppm(np.asarray(image)),
    }
    if native.core is not None:
        found["tiles"] = native.core.rewrite(found["baseline"], 2)
    return found


@pytest.mark.parametrize("core", [True, False], ids=["core", "PIL"])
@pytest.mark.parametrize("rgb", [True, False], ids=["rgb", "stored"])
def test_check_says_what_decoding_says(rgb: bool, core: bool, monkeypatch) -> None:
    """Of whole images, and of such that are cut or have a flipped bit somewhere."""
    draw, files = np.random.default_rng(38), files_to_check()
    if not core:
        monkeypatch.setattr(native, "core", None)

    def said(read, data, **options) -> str:
        try:
            read(data, **options)
        except DecodeError as error:
            return str(error)
        return ""

    refused = 0
    for name, data in files.items():
        assert not said(check, data, rgb=rgb) or (name, rgb) == ("float", True)
        damaged = [data[: draw.integers(len(data))] for _ in range(12)] + [data[:-2]]
        for place in draw.integers(8 * len(data), size=24).tolist():
            flipped = bytearray(data)
            flipped[place // 8] ^= 1 << place % 8
            damaged.append(bytes(flipped))
        for some in (data, *damaged):
            expected = said(decode if rgb else stored, some)
            assert said(check, some, rgb=rgb) == expected, name
            refused += bool(expected)
    assert refused > 100


@pytest.mark.skipif(native.core is None, reason="the core was not built")
def test_check_needs_pil_for_the_header_of_a_jpeg_alone(monkeypatch) -> None:
    def load(image):
        raise AssertionError("PIL decoded it")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    for name, data in files_to_check().items():
        if name in ("baseline", "grey", "progressive", "turned", "tiles"):
            check(data)


def test_check_looks_at_the_limit_first() -> None:
    data = encoded(scene(), "JPEG")
    check(data, max_pixels=97 * 61)
    with pytest.raises(DecodeError, match="over the limit of 5,916"):
        check(data, max_pixels=97 * 61 - 1)
