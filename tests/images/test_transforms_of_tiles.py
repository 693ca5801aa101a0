"""Crops of tile JPEGs: the pixels that the same picture gives without tiles."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from support.images import IMAGENET, Boxed, scene, turned

from shardio.errors import DecodeError, DependencyError
from shardio.images import jpeg_rewrite, jpeg_tiles, transforms
from shardio.images.transforms import CenterCrop, RandomResizedCrop
from shardio.native import core as CORE

KINDS = ("4:4:4", "4:2:2", "4:2:0", "grey")
FILTERS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")


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
