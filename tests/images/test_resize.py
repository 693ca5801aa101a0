"""resize_short: smaller images for packing, in their own format, mode and orientation."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from PIL import Image, features
from support.images import encoded, pixels, reopened, scene, turned

from shardio.images.resize import resize_short


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
