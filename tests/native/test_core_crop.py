"""The compiled core's crops of JPEGs, beside what PIL makes of the same bytes.

A crop whose box has the size of the result is not resampled: there the core must give PIL's pixels,
all of them. Elsewhere one level of 255 may lie between the two.
"""

import io
import random
import resource
import struct
import warnings
from types import SimpleNamespace

import numpy as np
import PIL
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from support import pillow_resize
from support.core_jpegs import (
    FILTERS,
    LIMIT,
    SAMPLINGS,
    apart,
    by_pil,
    core,
    cropped,
    decoded,
    encoded_grey,
    needs_cjpeg,
    picture,
    tile_jpeg,
    unfinished,
    written,
)

import shardio.images.decode
from shardio import CenterCrop, RandomResizedCrop, native
from shardio.errors import DecodeError
from shardio.images import jpeg_rewrite
from shardio.images.decode import UPRIGHT, orientation_of

pytestmark = pytest.mark.skipif(core is None, reason=f"no compiled core: {native.missing}")

SIDES = ((8, 60), (60, 260), (8, 80), (8, 80))  # of a tall picture, and of its result


# Crops ----------------------------------------------------------------------------------------


@needs_cjpeg
@settings(max_examples=120, deadline=None)
@given(
    width=st.integers(1, 300),
    height=st.integers(1, 200),
    sampling=st.sampled_from(SAMPLINGS),
    progressive=st.booleans(),
    tiled=st.booleans(),
    interpolation=st.sampled_from(FILTERS),
    seed=st.integers(0, 2**32),
)
@example(300, 200, "2x2", False, True, "bilinear", 1)
@example(300, 200, "1x2", False, False, "lanczos", 2)
def test_unscaled_crops_are_pils_pixels(
    width, height, sampling, progressive, tiled, interpolation, seed
):
    data = written(width, height, sampling, *["-progressive"] * progressive)
    if tiled and isinstance(made := jpeg_rewrite.rewrite(data), bytes):
        data = made
    whole, draw = decoded(data), random.Random(seed)
    for _ in range(6):
        w, h = draw.randint(1, width), draw.randint(1, height)
        left, top = draw.randint(0, width - w), draw.randint(0, height - h)
        out = np.empty((h, w, 3), np.uint8)
        assert cropped(data, (left, top, left + w, top + h), out, interpolation)
        assert (out == whole[top : top + h, left : left + w]).all()


@settings(max_examples=80, deadline=None)
@given(
    tiled=st.booleans(),
    interpolation=st.sampled_from(FILTERS),
    target=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    corners=st.tuples(*[st.floats(0, 1, width=32)] * 4),
    grey=st.booleans(),
)
@example(False, "box", (94, 140), (0, 1, 0, 1), False)  # by 2 / 3: some pixels lie at its very edge
def test_resize_is_within_one_level_of_pillows(tiled, interpolation, target, corners, grey):
    data = by_pil(210, 141, subsampling=2)
    if grey:
        data = encoded_grey(210, 141)
    plain = data
    if tiled:
        data = tile_jpeg(data, 27 if grey else 7)
    x, y = sorted(np.float32(210) * c for c in corners[:2]), sorted(141 * c for c in corners[2:])
    box = float(x[0]), float(y[0]), float(x[1]), float(y[1])
    if box[2] - box[0] < 0.01 or box[3] - box[1] < 0.01:
        return
    out = np.empty((*target, 3), np.uint8)
    assert cropped(data, box, out, interpolation)
    pil = Image.fromarray(decoded(data)).resize(
        target[::-1], Image.Resampling[interpolation.upper()], box
    )
    # pillow-simd's weights are rough: up to a fifth of its values are a level away from Pillow's,
    # and here and there by two where weights may be negative.
    rough = shardio.images.decode.pil_info()["name"] != "pillow"
    most = 2 if rough and interpolation in ("bicubic", "lanczos") else 1
    assert apart(out, np.asarray(pil)) <= most
    # From release 13 on Pillow takes that pass first which saves more, so that it rounds elsewhere.
    many = rough or int(PIL.__version__.partition(".")[0]) >= 13
    assert (out != np.asarray(pil)).sum() <= 8 + out.size // (3 if many else 20)
    if tiled:
        again = np.empty_like(out)
        assert cropped(plain, box, again, interpolation)
        assert (again == out).all()


@needs_cjpeg
@pytest.mark.parametrize("interpolation", FILTERS)
def test_resize_is_within_one_level_of_pillow_s_before_13_also_of_tall_pictures(interpolation):
    """Of noise and of hard edges, where Pillow 13 cuts values beyond 0 to 255 in other places."""
    near = far = 0
    for seed in range(60):
        draw = np.random.default_rng(seed)
        width, height, *size = (int(draw.integers(*ends)) for ends in SIDES)
        if seed == 0:  # box: some pixels lie at the very edge of what a pixel is made of
            width, height, size = 45, 125, [24, 79]
        pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        if seed % 3:
            pixels = pixels[:, :, :1].repeat(3, 2) // 128 * 255
        if seed % 3 == 2:
            pixels = pixels[::8, ::8].repeat(8, 0).repeat(8, 1)[:height, :width]
        data = io.BytesIO()
        Image.fromarray(pixels).save(data, "JPEG", quality=100, subsampling=0)
        whole, box = decoded(data.getvalue()), (0.5, 0.25, width - 0.5, height - 0.75)
        out = np.empty((size[1], size[0], 3), np.uint8)
        assert cropped(data.getvalue(), box, out, interpolation)
        before, since = (
            pillow_resize.resized(whole, tuple(size), box, interpolation, late=late)
            for late in (False, True)
        )
        near, far = max(near, apart(out, before)), max(far, apart(out, since))
    # docs/device.md: from Pillow 13 as far as Pillow 12 is.
    least, most = {"bicubic": (20, 28), "lanczos": (40, 50)}.get(interpolation, (1, 1))
    assert near <= 1 and least <= far <= most


@needs_cjpeg
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_scaled_crops_are_pils_draft(sampling):
    draw = random.Random(sampling)
    for width, height in ((333, 217), (128, 64), (65, 130)):
        data = written(width, height, sampling)
        for image in (data, tile_jpeg(data, jpeg_rewrite.interval_for(-(-width // 16)))):
            for scale in (2, 4, 8):
                pil = Image.open(io.BytesIO(image))
                pil.draft("RGB", (max(1, width // scale), max(1, height // scale)))
                whole = np.asarray(pil.convert("RGB"))
                high, wide, _ = whole.shape
                assert (wide, high) == (-(-width // scale), -(-height // scale))
                for _ in range(4):
                    w, h = draw.randint(1, wide), draw.randint(1, high)
                    left, top = draw.randint(0, wide - w), draw.randint(0, high - h)
                    out = np.empty((h, w, 3), np.uint8)
                    assert cropped(image, (left, top, left + w, top + h), out, scale=scale)
                    assert (out == whole[top : top + h, left : left + w]).all()


def test_out_may_have_any_strides_but_between_colours():
    data, box = by_pil(120, 90), (3.25, 4.5, 100.0, 80.0)
    plain = np.empty((31, 47, 3), np.uint8)
    assert cropped(data, box, plain)
    backing = np.full((2, 40, 60, 4), 7, np.uint8)
    for view in (
        backing[1, 4:35, 5:52, :3],
        backing[1, 34:3:-1, 5:52, :3],
        backing[1, 4:35, 51:4:-1, 1:4],
        np.full((47, 31, 3), 7, np.uint8).swapaxes(0, 1),
        np.full((3, 31, 60, 3), 7, np.uint8)[1, :, 46::-1],
    ):
        backing[...] = 7
        assert cropped(data, box, view)
        assert (view == plain).all()
        view[...] = 7
        base = view if view.base is None else view.base
        assert (base == 7).all()  # nothing was written beside it


def test_nothing_is_written_when_it_is_not_the_cores():
    whole = by_pil(100, 80)
    cmyk = io.BytesIO()
    Image.fromarray(picture(64, 64)).convert("CMYK").save(cmyk, "JPEG")
    png = io.BytesIO()
    Image.fromarray(picture(64, 64)).save(png, "PNG")
    out = np.full((8, 8, 3), 7, np.uint8)
    middle = len(whole) * 3 // 4
    for data, box, limit in (
        (cmyk.getvalue(), (0, 0, 8, 8), LIMIT),
        (png.getvalue(), (0, 0, 8, 8), LIMIT),
        (b"", (0, 0, 8, 8), LIMIT),
        (whole[:-2], (0, 0, 8, 8), LIMIT),  # cut short below what the box needs
        (whole[:middle] + b"\xff\xd9", (0, 70, 8, 78), LIMIT),  # and above
        (whole, (0, 0, 8, 8), 100 * 80 - 1),
        (whole, (0, 0, 101, 8), LIMIT),
        (whole, (0, 0, 8, 81), LIMIT),
        (whole, (-1, 0, 8, 8), LIMIT),
        (whole, (0, -1, 8, 8), LIMIT),
        (whole, (8, 0, 8, 8), LIMIT),
        (whole, (9, 0, 8, 8), LIMIT),
        (whole, (0, 8, 8, 8), LIMIT),
        (whole, (float("nan"), 0, 8, 8), LIMIT),
        (whole, (0, 0, float("inf"), 8), LIMIT),
        (whole, (0, 0, 8, float("nan")), LIMIT),
    ):
        assert not cropped(data, box, out, max_pixels=limit)
        assert (out == 7).all()
    assert cropped(whole, (0, 0, 100, 80), out, max_pixels=100 * 80)


def test_a_header_alone_cannot_ask_for_memory():
    data = by_pil(40, 30, progressive=True)
    at = data.index(b"\xff\xc2") + 5
    huge = data[:at] + b"\x3f\xff\x3f\xff" + data[at + 4 :]
    out = np.empty((8, 8, 3), np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not cropped(huge, (0, 0, 64, 64), out)
    assert "fewer bytes" in core.rewrite(huge, 4)
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    )  # KiB; it says 2 GB


def test_wrong_arguments_raise():
    data, box = by_pil(32, 32), (0, 0, 32, 32)
    good = np.empty((8, 8, 3), np.uint8)
    for out in (
        np.empty((8, 8), np.uint8),
        np.empty((8, 8, 4), np.uint8),
        np.empty((0, 8, 3), np.uint8),
        np.empty((2**15 + 1, 1, 3), np.uint8),
        np.empty((8, 8, 3), np.int16),
        np.empty((8, 3, 8), np.uint8).swapaxes(1, 2),
        np.broadcast_to(good, (8, 8, 3)),
    ):
        with pytest.raises(ValueError):
            cropped(data, box, out)
    for scale in (0, 3, 16, -1):
        with pytest.raises(ValueError):
            cropped(data, box, good, scale=scale)
    for name in ("nearest", "", "Bilinear", 3, None):
        with pytest.raises(ValueError):
            cropped(data, box, good, name)
    for call in (core.crop, core.rewrite, core.decode_many, core.header):
        with pytest.raises(TypeError):
            call(None, None)
    with pytest.raises(TypeError):
        core.header("text")
    with pytest.raises(ValueError):
        core.rewrite(data, 65536)
    with pytest.raises((OverflowError, TypeError)):
        cropped(data, box, good, max_pixels=None)


def test_what_decoders_smooth_each_in_its_way_is_left_to_pil():
    """Pixels that were not sent to the last bit depend on those around, and on the release."""
    out = np.zeros((2, 24, 32, 3), np.uint8)
    assert not cropped(unfinished(), (0, 0, 32, 24), out[0])
    assert core.decode_many([by_pil(32, 24), unfinished()], out) == 1
    assert not out[1].any()


# Transforms -----------------------------------------------------------------------------------


def both(monkeypatch, transform, data, draw=0, out=None):
    monkeypatch.setattr(native, "core", core)
    with_core = np.array(transform(data, draw, out))
    monkeypatch.setattr(native, "core", None)
    return with_core, transform(data, draw)


@pytest.mark.parametrize("orientation", range(9))
@pytest.mark.parametrize("tiled", [False, True])
def test_transforms_give_the_same_upright_picture(monkeypatch, orientation, tiled):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = by_pil(165, 120, exif=exif)
    if tiled:
        data = jpeg_rewrite.rewrite(data)
    left = []  # to PIL
    for kind in (CenterCrop, RandomResizedCrop):
        monkeypatch.setattr(kind, "by_pil", spy(kind.by_pil, left))
    for transform in (
        CenterCrop((31, 40), 50),
        CenterCrop((31, 20), fast=True, interpolation="bicubic"),
        CenterCrop((31, 20), 32, fast=True, upright=False),
        RandomResizedCrop((60, 41), flip=True, interpolation="lanczos"),
    ):
        for draw in (1, 2**63 + 5, 77 << 40):
            mine, pils = both(monkeypatch, transform, data, draw)
            assert apart(mine, pils) <= 1
            assert len(left) == 1  # without the core
            out = np.empty((4, *mine.shape), np.uint8)[2]
            assert (both(monkeypatch, transform, data, draw, out)[0] == mine).all()
            assert (out == mine).all()
            assert len(left) == 2
            left.clear()


def spy(method, used):
    def call(*args):
        used.append(method(*args))
        return used[-1]

    return call


def test_damage_is_told_in_pils_words(monkeypatch):
    data = by_pil(100, 80)
    for broken in (data[: len(data) // 2], data[:30], data[:200] + data[260:], b"\xff\xd8\xff"):
        said = []
        for which in (core, None):
            monkeypatch.setattr(native, "core", which)
            try:
                said.append(CenterCrop(16)(broken).tolist())
            except DecodeError as error:
                said.append(str(error))
        assert said[0] == said[1]


def test_too_many_pixels_and_bad_out_raise_as_ever(monkeypatch):
    data = by_pil(100, 80)
    with pytest.raises(DecodeError, match="over the limit"):
        CenterCrop(16, max_pixels=7999)(data)
    calls = []
    refuses = SimpleNamespace(**vars(core) | {"header": calls.append})
    monkeypatch.setattr(native, "core", refuses)
    CenterCrop(16)(data)
    assert calls == [data]


def exif_block(entries, little, offset=8):
    order = "<" if little else ">"
    block = (b"II*\0" if little else b"MM\0*") + struct.pack(order + "I", offset)
    block = block.ljust(offset, b"\0") + struct.pack(order + "H", len(entries))
    for tag, kind, count, value in entries:
        block += struct.pack(order + "HHI", tag, kind, count) + value
    return b"Exif\0\0" + block + b"\0\0\0\0"


def with_app1(*bodies):
    segments = b"".join(b"\xff\xe1" + struct.pack(">H", len(b) + 2) + b for b in bodies)
    return b"\xff\xd8" + segments + by_pil(24, 16)[2:]


XMP = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="8"/>'


@settings(max_examples=150, deadline=None)
@given(
    little=st.booleans(),
    values=st.lists(st.integers(0, 9), max_size=2),
    kind=st.sampled_from([3, 3, 3, 1, 4, 9, 2]),
    count=st.sampled_from([1, 1, 1, 0, 2]),
    offset=st.sampled_from([8, 8, 20, 0, 4000]),
    cut=st.integers(0, 40),
    xmp=st.sampled_from(["", "", "before", "after"]),
    first=st.sampled_from([None, None, (2, 4), (2, 5), (10, 1), (77, 99), (3, 2**32 - 1)]),
    at=st.sampled_from([0, 8, 200, 2**32 - 1]),
)
@example(True, [6], 3, 1, 8, 0, "", None, 0)
@example(False, [6], 3, 1, 8, 0, "after", None, 0)
@example(False, [], 3, 1, 8, 0, "after", None, 0)
@example(False, [3, 6], 3, 1, 8, 0, "", None, 0)
@example(False, [6], 4, 1, 8, 0, "", None, 0)
@example(False, [6], 3, 2, 8, 0, "", None, 0)
@example(True, [6], 3, 2, 8, 0, "", None, 0)
@example(True, [6], 3, 1, 8, 0, "", (2, 5), 200)
@example(False, [6], 3, 1, 8, 0, "", (3, 2**32 - 1), 8)
def test_orientation_is_pils_or_left_to_it(
    little, values, kind, count, offset, cut, xmp, first, at
):
    order = "<H" if little else ">H"
    entries = [(0x0100, 3, 1, struct.pack(order, 24) + b"\0\0")]
    if first is not None:  # PIL stops at a value that lies outside
        entries += [(0x010E, *first, struct.pack(order[0] + "I", at))]
    entries += [(0x0112, kind, count, struct.pack(order, v) + b"\0\0") for v in values]
    block = (
        exif_block(entries, little, offset)
        if offset in (8, 20)
        else b"Exif\0\0MM\0*" + (struct.pack(">I", offset) + b"\0" * 20)
    )
    bodies = [block[: len(block) - cut]] if cut else [block]
    bodies = [XMP] * (xmp == "before") + bodies + [XMP] * (xmp == "after")
    data = with_app1(*bodies)
    width, height, found = core.header(data)
    assert (width, height) == (24, 16)
    if found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged EXIF
            pils = orientation_of(Image.open(io.BytesIO(data)))
        assert found == (pils if 1 <= pils <= 8 else 1)
    plain = kind == 3 and count == 1 and offset == 8 and not cut and not xmp and first is None
    if plain and len(values) < 2 and all(1 <= v <= 8 for v in values):
        assert found == (values[0] if values else 1)  # the usual ones are never left to PIL


def test_header_of_what_is_no_jpeg():
    assert core.header(by_pil(30, 20)) == (30, 20, 1)
    assert core.header(b"\xff\xd8\xff\xff" + by_pil(30, 20)[2:]) == (30, 20, 1)  # fill bytes
    for data in (b"", b"\xff\xd8", b"\x89PNG\r\n\x1a\n" + bytes(40), by_pil(30, 20)[:100]):
        assert core.header(data) is None
    assert UPRIGHT.method == ""
