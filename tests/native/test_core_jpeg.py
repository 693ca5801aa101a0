"""The compiled core's work on JPEGs, beside what PIL and jpegtran make of the same bytes.

A crop whose box has the size of the result is not resampled: there the core must give PIL's pixels,
all of them. Elsewhere one level of 255 may lie between the two.
"""

import functools
import io
import random
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import PIL
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from support import pillow_resize

import shardio.images.decode
from shardio import CenterCrop, RandomResizedCrop, native
from shardio.errors import DecodeError
from shardio.images import jpeg_rewrite
from shardio.images.decode import UPRIGHT, orientation_of

core = native.core
pytestmark = pytest.mark.skipif(core is None, reason=f"no compiled core: {native.missing}")
needs_cjpeg = pytest.mark.skipif(
    not (shutil.which("cjpeg") and shutil.which("jpegtran")),
    reason="cjpeg and jpegtran are missing (apt-get install libjpeg-turbo-progs)",
)

SIDES = ((8, 60), (60, 260), (8, 80), (8, 80))  # of a tall picture, and of its result
FILTERS = ("bilinear", "bicubic", "lanczos", "box", "hamming")
SAMPLINGS = ("1x1", "2x1", "2x2", "1x2", "4x1", "4x2", "3x1", "2x2,1x2,1x2", "2x2,2x1,1x2", "grey")
LIMIT = 2**28


@functools.cache
def picture(width, height, seed=0):
    """Edges, ramps and noise: (H, W, 3) uint8."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (-(-height // 5), -(-width // 5), 3), np.uint8)
    fine = rng.integers(0, 24, (height, width, 3), np.uint8)
    return (np.kron(coarse, np.ones((5, 5, 1), np.uint8))[:height, :width] // 2 + fine).astype("u1")


@functools.cache
def written(width, height, sampling="2x2", *options, seed=0):
    pixels = picture(width, height, seed)
    how = ("-grayscale",) if sampling == "grey" else ("-sample", sampling)
    source = b"P6\n%d %d\n255\n" % (width, height) + pixels.tobytes()
    return run("cjpeg", "-quality", "90", *how, *options, data=source)


def run(*command, data):
    return subprocess.run(command, input=data, capture_output=True, check=True).stdout


def by_pil(width, height, **options):
    """The same without cjpeg, for tests that any JPEG serves."""
    out = io.BytesIO()
    Image.fromarray(picture(width, height)).save(out, "JPEG", **options)
    return out.getvalue()


def decoded(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def cropped(data, box, out, interpolation="bilinear", scale=1, max_pixels=LIMIT):
    return core.crop(data, box, out, interpolation, scale, max_pixels)


def apart(a, b):
    return int(np.abs(a.astype(int) - b).max())


def tile_jpeg(data, interval):
    made = core.rewrite(data, interval)
    assert isinstance(made, bytes), made
    return made


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


@functools.cache
def encoded_grey(width, height):
    out = io.BytesIO()
    Image.fromarray(picture(width, height)).convert("L").save(out, "JPEG")
    return out.getvalue()


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


def unfinished():
    """A progressive JPEG without its last scans: (32, 24)."""
    data = by_pil(32, 24, progressive=True)
    scans = [i for i in range(len(data) - 1) if data[i : i + 2] == b"\xff\xda"]
    return data[: data.rindex(b"\xff\xc4", 0, scans[4])] + b"\xff\xd9"


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


# The lossless rewrite -------------------------------------------------------------------------


@needs_cjpeg
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("-progressive",),
        ("-optimize", "-restart", "1"),
        ("-quality", "1"),  # tables of quantisation have 16 bits
        ("-rgb",),  # all components have the same Huffman tables
        ("-rgb", "-progressive"),
    ],
    ids=" ".join,
)
def test_rewrite_is_what_jpegtran_makes(sampling, options):
    for width, height in ((161, 83), (16, 16), (1, 1), (64, 200)):
        data = written(width, height, sampling, *options)
        assert b"\xff\xc1" in data or "-quality" not in options
        for interval in (0, 1, 3, 8):
            tran = ["-optimize", "-copy", "all", "-restart", f"{interval}B"]
            assert core.rewrite(data, interval) == run("jpegtran", *tran, data=data)


def segment(marker, body):
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def by_hand(ac, *blocks, tail=b""):
    """A grey JPEG, 8 pixels high, that is coded as no program does it.

    ac: AC symbols that have codes. blocks: of each its symbols, DC first, and the bits behind each.
    tail: what stands before EOI.
    """
    dc, coded = bytes(range(12)), ""
    for block in blocks:
        for symbols, (symbol, bits) in zip([dc, *[ac] * len(block)], block, strict=False):
            coded += f"{symbols.index(symbol):08b}{bits}"  # all codes have 8 bits
    coded += "1" * (-len(coded) % 8)
    scan = int(coded, 2).to_bytes(len(coded) // 8, "big").replace(b"\xff", b"\xff\0")
    tables = [bytes(7) + bytes([len(s)]) + bytes(8) + s for s in (dc, ac)]
    return b"".join(
        [
            b"\xff\xd8" + segment(0xDB, b"\0" + bytes(range(1, 65))),
            segment(0xC0, b"\x08\0\x08\0" + bytes([8 * len(blocks)]) + b"\1\1\x11\0"),
            segment(0xC4, b"\0" + tables[0] + b"\x10" + tables[1]),
            segment(0xDA, b"\1\1\0\0\x3f\0") + scan + tail + b"\xff\xd9",
        ]
    )


AC = b"\x00\xf0\x01\x11\x22\x31\x3a\x10\xe1"
DC = (3, "101")
ODD = {
    "no AC": [(0, "")],
    "zeros before the end": [(0xF0, ""), (0x01, "1"), (0xF0, ""), (0xF0, ""), (0, "")],
    "zeros, then a value": [(0xF0, ""), (0xF0, ""), (0x22, "01"), (0, "")],
    "the last one": [(0xF0, ""), (0xF0, ""), (0xF0, ""), (0xE1, "0")],
    "the last one is 0": [(0xF0, ""), (0xF0, ""), (0xF0, ""), (0, "")],
    "zeros beyond the end": [(0x01, "1"), *[(0xF0, "")] * 4],
    "another end": [(0x22, "10"), (0x10, "")],
    "large": [(0x3A, "1111111111"), (0x3A, "0000000000"), (0, "")],
    "all": [(0x01, "1")] * 63,
    "too many": [(0x31, "1")] * 16,
}


@needs_cjpeg
@pytest.mark.parametrize("name", ODD)
def test_what_is_coded_in_odd_ways_is_rewritten_as_jpegtran_does(name):
    data = by_hand(AC, [DC, *ODD[name]])
    made = core.rewrite(data, 1)
    if name == "too many":
        assert "damaged" in made
        return
    assert (decoded(made) == decoded(data)).all()
    bare = run("jpegtran", "-optimize", "-copy", "none", "-restart", "1B", data=data)
    assert bare.startswith(b"\xff\xd8\xff\xe0\0\x10JFIF")
    assert made == bare[:2] + bare[20:]  # what it makes up
    # Codes for values that 8 bits cannot have: nothing uses them, but libjpeg is asked.
    wide = by_hand(AC + b"\x0b", [DC, *ODD[name]])
    assert core.rewrite(wide, 1) == made
    for tail in (b"\xff", b"\xff\xd0", segment(0xFE, b"late"), segment(0xDB, b"\1" + bytes(64))):
        assert core.rewrite(by_hand(AC, [DC, *ODD[name]], tail=tail), 1) == made


def test_what_8_bits_cannot_hold_is_damage():
    said = re.compile(r"damaged: DCT coefficient .*out of range")  # 3.0 has more words than 2.1
    assert said.fullmatch(core.rewrite(by_hand(AC + b"\x0b", [DC, (0x0B, "1" * 11), (0, "")]), 1))
    data = by_hand(AC, *[[(11, "1" * 11), (0, "")]] * 2)
    assert isinstance(core.rewrite(data, 0), bytes)  # 2047, and 2047 more
    assert said.fullmatch(core.rewrite(data, 1))


def test_two_scans_or_codes_of_ones_are_damage():
    data = by_hand(AC, [DC, (0, "")])
    tables, scan = data.index(b"\xff\xc4"), data.index(b"\xff\xda")
    assert "damaged" in core.rewrite(data[:-2] + data[scan:], 1)
    two = bytes([2]) + bytes(15) + b"\0\1"  # the codes 0 and 1, but 1 is not to be used
    ones = segment(0xC4, b"\0" + two + b"\x10" + two)
    bare = data[:tables] + ones + data[scan : scan + 10] + b"\x3f\xff\xd9"
    assert "Huffman table" in core.rewrite(bare, 1)


@needs_cjpeg
@pytest.mark.parametrize("interval", [1, 3])
def test_fill_bytes_before_markers_are_no_damage(interval):
    """Any marker may have some: T.81, B.1.1.2."""
    plain = written(100, 50, "2x2", "-restart", f"{interval}B")
    scan = plain.index(b"\xff\xda")
    coded, marks = re.subn(rb"\xff(?=[\xd0-\xd9])", b"\xff" * 3, plain[scan:])
    data = plain[:scan] + coded
    assert marks >= 9
    assert core.rewrite(data, 7) == core.rewrite(plain, 7)
    out = np.empty((50, 100, 3), np.uint8)
    assert cropped(data, (0, 0, 100, 50), out) and (out == decoded(plain)).all()


@needs_cjpeg
def test_a_scan_of_all_may_stand_between_others(tmp_path):
    """libjpeg reads it, and so must what reads a scan of all components in its place."""
    (tmp_path / "scans").write_text("0;\n1;\n2;\n")
    whole = written(70, 45, "2x2")
    apart = written(70, 45, "2x2", "-scans", str(tmp_path / "scans"))
    scans = [i for i in range(len(apart)) if apart[i : i + 2] == b"\xff\xda"]
    assert len(scans) == 3 and apart[: scans[0]] == whole[: scans[0]]
    data = apart[: scans[1]] + whole[scans[0] : -2] + apart[scans[1] :]
    assert core.rewrite(data, 5) == run("jpegtran", "-optimize", "-restart", "5B", data=data)
    out = np.empty((1, 45, 70, 3), np.uint8)
    assert core.decode_many([data], out) == 1
    assert (out[0] == decoded(data)).all() and (out[0] == decoded(whole)).all()


@needs_cjpeg
def test_blocks_beyond_the_rim_are_written_empty():
    whole = written(32, 32, "2x2")
    size = whole.index(b"\xff\xc0") + 5
    for height, width in ((32, 24), (24, 32), (17, 17)):
        data = whole[:size] + struct.pack(">HH", height, width) + whole[size + 4 :]
        tran = ["-optimize", "-copy", "all", "-restart", "1B"]
        assert core.rewrite(data, 1) == run("jpegtran", *tran, data=data)


def test_rewrite_keeps_pixels_and_metadata():
    exif = Image.Exif()
    exif[0x010E] = "a" * 3000
    data = by_pil(99, 70, exif=exif, icc_profile=bytes(range(256)) * 300, comment=b"hi", dpi=(7, 9))
    made = tile_jpeg(data, 7)
    old, new = (Image.open(io.BytesIO(d)) for d in (data, made))
    assert np.array_equal(old, new)
    for image in (old, new):
        image.info.pop("progressive", None)
    assert old.info == new.info
    assert made.count(b"\xff\xdd") == 1


def test_rewrite_says_why_not():
    data = by_pil(64, 64)
    at = data.index(b"\xff\xc0")
    cmyk = io.BytesIO()
    Image.new("CMYK", (64, 64)).save(cmyk, "JPEG")

    def patched(offset, value):
        return data[: at + offset] + value + data[at + offset + len(value) :]

    for bad, words in (
        (b"", "no JPEG"),
        (b"\x89PNG", "no JPEG"),
        (cmyk.getvalue(), "CMYK"),
        (patched(4, b"\x0c"), "8 bits"),
        (patched(1, b"\xc9"), "arithmetic"),
        (patched(1, b"\xc3"), "lossless"),
        (patched(5, b"\xff\xff\xff\xff"), "max_pixels"),
        (patched(5, b"\x3f\xff\x3f\xff"), "fewer bytes"),
        (data[:-2], "damaged"),
        (data[: len(data) // 2], "damaged"),
        (b"\xff\xd8\xff\xe2\0\x06MPF\0" + data[2:], "several"),
    ):
        said = core.rewrite(bad, 4)
        assert isinstance(said, str)
        assert words in said
    assert isinstance(core.rewrite(data, 4, 64 * 64), bytes)
    assert "max_pixels" in core.rewrite(data, 4, 64 * 64 - 1)


@needs_cjpeg
def test_progressive_without_its_last_scans_is_not_rewritten():
    data = written(64, 64, "2x2", "-progressive")
    scans = [i for i in range(len(data) - 1) if data[i : i + 2] == b"\xff\xda"]
    assert len(scans) > 5
    starts = [data.rindex(b"\xff\xc4", 0, s) for s in scans[1:]]
    for start in starts:
        said = core.rewrite(data[:start] + b"\xff\xd9", 4)
        assert isinstance(said, str)


@needs_cjpeg
def test_hundreds_of_scans_are_refused(tmp_path):
    """Valid, but each is a pass over all coefficients."""
    (tmp_path / "scans").write_text("0: 0-0, 0, 0;\n0: 1-1, 0, 3;\n0: 1-1, 3, 2;\n")
    flat = b"P5\n8 8\n255\n" + bytes([99]) * 64
    three = run("cjpeg", "-grayscale", "-scans", str(tmp_path / "scans"), data=flat)
    marks = [i for i in range(len(three)) if three[i : i + 2] in (b"\xff\xc4", b"\xff\xda")]
    assert [three[i + 1] for i in marks] == [0xC4, 0xDA] * 3
    scans = three[marks[2] : marks[4]], three[marks[4] : -2]
    many = three[: marks[2]]
    for k in range(1, 64):
        for bits in (0x03, 0x32, 0x21, 0x10):
            scan = scans[bits > 3]
            at = scan.index(b"\xff\xda") + 7
            many += scan[:at] + bytes([k, k, bits]) + scan[at + 3 :]
    many += b"\xff\xd9"
    out = np.empty((1, 8, 8, 3), np.uint8)
    assert (decoded(many) == 99).all()
    assert core.rewrite(many, 2) == "damaged: more than 200 scans"
    assert not cropped(many, (0, 0, 8, 8), out[0])
    assert core.decode_many([many], out) == 0


# Many small ones ------------------------------------------------------------------------------


def test_many_are_pils_pixels():
    images = [by_pil(32, 24, quality=q, subsampling=q % 3) for q in range(40, 95)]
    images[7:9] = [encoded_grey(32, 24), by_pil(32, 24, progressive=True)]
    images[20:22] = [by_pil(32, 24, optimize=True), by_pil(32, 24, restart_marker_blocks=1)]
    out = np.zeros((len(images) + 1, 24, 32, 3), np.uint8)
    views = [memoryview(d) if i % 2 else bytearray(d) for i, d in enumerate(images)]
    assert core.decode_many(views, out) == len(images)
    for data, row in zip(images, out, strict=False):
        assert (row == decoded(data)).all()
    assert not out[-1].any()
    assert core.decode_many([], out) == 0


def test_many_stop_at_the_first_that_is_not_plain():
    good = by_pil(32, 24)
    png = io.BytesIO()
    Image.fromarray(picture(32, 24)).save(png, "PNG")
    for bad in (
        by_pil(24, 32), by_pil(32, 25), png.getvalue(), b"", good[:-2], good[:400],
        good[:-9] + b"\xff\xd9", by_pil(31, 24),
    ):  # fmt: skip
        for place in (0, 1, 5):
            blobs = [good] * place + [bad, good]
            out = np.zeros((len(blobs), 24, 32, 3), np.uint8)
            assert core.decode_many(blobs, out) == place
            assert not out[place + 1 :].any()
            assert (out[:place] == decoded(good)).all()


def test_no_image_finds_the_tables_of_the_one_before():
    first = by_pil(32, 24, quality=30)
    second = by_pil(32, 24, quality=95)
    for marker in (b"\xff\xdb", b"\xff\xc4"):
        bare = second
        while marker in bare:
            at = bare.index(marker)
            bare = bare[:at] + bare[at + 2 + int.from_bytes(bare[at + 2 : at + 4], "big") :]
        out = np.zeros((2, 24, 32, 3), np.uint8)
        done = core.decode_many([first, bare], out)
        if done == 2:  # libjpeg-turbo has tables of its own for images of motion JPEG
            assert marker == b"\xff\xc4"
            alone = np.zeros((1, 24, 32, 3), np.uint8)
            assert core.decode_many([bare], alone) == 1
            assert (alone[0] == out[1]).all()


def test_one_table_of_quantisation_is_not_taken_for_two():
    """Precision 2 is 16 bits to libjpeg: 128 bytes of table 0, not 64 and then table 1."""
    double = bytearray(by_pil(32, 24))
    first, second = (double.index(b"\xff\xdb\0\x43" + bytes([k])) for k in (0, 1))
    table = b"\x20" + bytes(64) + b"\1" + bytes(63) + b"\0" + b"\x08" * 64
    del double[second : second + 69]
    double[first : first + 69] = b"\xff\xdb" + struct.pack(">H", len(table) + 2) + table
    out = np.zeros((2, 24, 32, 3), np.uint8)
    assert core.decode_many([double], out) == 0
    assert core.decode_many([by_pil(32, 24), double], out) == 1


def test_many_wrong_arguments_raise():
    good = by_pil(32, 24)
    out = np.empty((2, 24, 32, 3), np.uint8)
    frozen = out.copy()
    frozen.flags.writeable = False
    for wrong in (out[:, ::-1], frozen, out[0], out[..., :2].copy(), out[:1], out.astype("i2")):
        with pytest.raises((ValueError, BufferError)):
            core.decode_many([good, good], wrong)
    for blobs in ([good, None], [good, "text"], 5, [good, np.zeros((4, 4), np.uint8)[:, ::2]]):
        with pytest.raises((TypeError, ValueError, BufferError)):
            core.decode_many(blobs, out)


def crops(blobs, boxes, flips, out, interpolation="bilinear"):
    boxes, flips = np.array(boxes, np.float32).reshape(-1, 4), np.array(flips, bool)
    return list(core.crop_many(blobs, boxes, flips, out, interpolation, LIMIT))


def test_many_crops_are_those_of_one_by_one():
    """Whatever came before: libjpeg keeps tables, and some images lack theirs, or fail."""
    kinds = [
        by_pil(97, 61), by_pil(97, 61, quality=20, optimize=True), by_pil(64, 80, progressive=True),
        encoded_grey(97, 61), tile_jpeg(by_pil(97, 61), 7), by_pil(50, 50, subsampling=0),
        tile_jpeg(encoded_grey(97, 61), 13), by_pil(97, 61, restart_marker_blocks=1),
        by_pil(97, 61)[:-40] + b"\xff\xd9", by_pil(64, 80)[:300], b"", b"no image",
    ]  # fmt: skip
    kinds.append(kinds[0].replace(b"\xff\xdb", b"\xff\xed"))  # a JPEG without its tables
    draw, made = random.Random(7), set()
    for interpolation in FILTERS:
        blobs = [draw.choice(kinds) for _ in range(60)]
        boxes = []
        for data in blobs:
            width, height = (core.header(data) or (9, 9))[:2]
            left, top = draw.uniform(0, width - 2), draw.uniform(0, height - 2)
            boxes.append((left, top, draw.uniform(left + 1, width), draw.uniform(top + 1, height)))
        flips = [draw.random() < 0.5 for _ in blobs]
        out = np.full((61, 20, 17, 3), 7, np.uint8)
        done = crops(blobs, boxes, flips, out, interpolation)
        for data, box, flip, row, one in zip(blobs, boxes, flips, out, done, strict=False):
            alone = np.full((20, 17, 3), 7, np.uint8)
            assert cropped(data, box, alone[:, ::-1] if flip else alone, interpolation) == one
            assert (row == alone).all()
            made.add((kinds.index(data), one))
        assert (out[60] == 7).all()
    assert {(i, 1) for i in range(8)} | {(i, 0) for i in range(9, 13)} <= made
    assert crops([], [], [], out) == []


def test_wrong_arguments_of_many_crops_raise():
    good, box = by_pil(32, 24), (0, 0, 32, 24)
    out = np.full((2, 8, 9, 3), 7, np.uint8)
    frozen = out.copy()
    frozen.flags.writeable = False
    for wrong in (out[:, ::-1], frozen, out[0], out[..., :2].copy(), out[:1], out.astype("i2")):
        with pytest.raises((ValueError, BufferError)):
            crops([good] * 2, [box] * 2, [0] * 2, wrong)
    for blobs, boxes, flips in (([good] * 2, [box], [0] * 2), ([good], [box], [0] * 2),
                                ([good, None], [box] * 2, [0] * 2), (5, [box], [0])):  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            crops(blobs, boxes, flips, out)
    with pytest.raises(ValueError, match="no interpolation"):
        crops([good], [box], [0], out, "nearest")
    beyond = [(0, 0, 33, 24), (-1, 0, 9, 9), (5, 5, 5, 9), (0, 0, float("nan"), 9)]
    for wrong_box in beyond:
        assert crops([good, good], [wrong_box, box], [0, 1], out)[:2] == [0, 1]
        assert (out[0] == 7).all() and not (out[1] == 7).all()
    with pytest.raises(TypeError):
        core.headers([good, None])


def test_headers_are_those_of_one_by_one():
    blobs = [by_pil(97, 61), encoded_grey(31, 8), b"", b"no image", by_pil(5, 6)[:30]]
    blobs.append(
        by_pil(9, 7, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0")
    )
    found = np.frombuffer(core.headers(blobs), np.uint32).reshape(-1, 3).tolist()
    assert found == [list(core.header(data) or (0, 0, 0)) for data in blobs]
    assert found[0] == [97, 61, 1] and found[2] == [0, 0, 0] and found[-1][2] == 6


# Damage ---------------------------------------------------------------------------------------


def damaged(data, draw):
    """Flipped, cut, doubled or moved bytes; most often where the headers are."""
    data = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(data) if draw.random() < 0.5 else min(len(data), 700))
        kind = draw.randrange(5)
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at] = draw.choice((0, 0xFF, 0xD9, 0xDA, draw.randrange(256)))
        elif kind == 2:
            del data[at : at + draw.randrange(1, 9)]
        elif kind == 3:
            data[at:at] = data[at : at + draw.randrange(1, 40)]
        else:
            data[at:] = data[at : draw.randrange(at, len(data)) + 1]
        if not data:
            return b"\xff"
    return bytes(data)


def try_all(data, draw, outs):
    small, many = outs
    header = core.header(data)
    width, height = header[:2] if header else (40, 30)
    w, h = draw.randint(1, width), draw.randint(1, height)
    left, top = draw.randint(0, width - w), draw.randint(0, height - h)
    box = left, top, left + w, top + h
    cropped(data, box, small, draw.choice(FILTERS), 1, 2**20)
    scale = draw.choice((2, 4, 8))
    cropped(data, tuple(v / scale for v in box), small, draw.choice(FILTERS), scale, 2**20)
    core.rewrite(data, draw.randint(0, 8), 2**20)
    core.decode_many([data, data], many)
    crops([data, data], [box, box], [0, 1], np.empty((2, 20, 17, 3), np.uint8))


def sources():
    plain = by_pil(97, 61)
    return [
        plain,
        tile_jpeg(plain, 7),
        tile_jpeg(encoded_grey(97, 61), 13),
        by_pil(97, 61, progressive=True),
        by_pil(97, 61, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0"),
    ]


def test_no_damage_brings_the_core_down():
    draw = random.Random(5)
    outs = np.empty((20, 17, 3), np.uint8), np.empty((2, 61, 97, 3), np.uint8)
    for data in sources():
        for _ in range(150):
            try_all(damaged(data, draw), draw, outs)
        for size in range(0, len(data), 61):
            try_all(data[:size], draw, outs)


def test_what_the_core_accepts_of_damaged_tiles_is_what_pil_shows():
    """A wrong marker may not move tiles: then the whole is decoded, or it is left to PIL."""
    data = tile_jpeg(by_pil(160, 96), 5)
    whole = decoded(data)
    start = data.index(b"\xff\xda")
    marks = [
        i for i in range(start, len(data) - 1) if data[i] == 255 and 0xD0 <= data[i + 1] < 0xD8
    ]
    assert len(marks) == 11
    out = np.empty((96, 160, 3), np.uint8)
    small = np.empty((16, 16, 3), np.uint8)
    for i, at in enumerate(marks):
        for changed in (
            data[:at] + data[at + 2 :],  # missing
            data[:at] + data[at : at + 2] + data[at:],  # doubled
            data[: at + 1] + bytes([0xD0 | (i + 1) % 8]) + data[at + 2 :],  # another number
        ):
            assert not cropped(changed, (0, 0, 160, 96), out)
            assert not cropped(changed, (144, 80, 160, 96), small)
    longer = data[:-2] + b"\xff\xd3" + data[-2:]
    assert not cropped(longer, (0, 0, 160, 96), out) or (out == whole).all()


def test_only_the_tiles_under_the_box_are_read():
    data = tile_jpeg(by_pil(480, 320), 5)
    whole = decoded(data)
    start = int.from_bytes(data[(at := data.index(b"\xff\xda") + 2) : at + 2], "big") + at
    ends = [i for i in range(start, len(data) - 1) if data[i] == 255 and data[i + 1]]
    starts = [start, *(i + 2 for i in ends[:-1])]
    assert len(ends) == 6 * 20
    out = np.empty((40, 90, 3), np.uint8)
    for column, row in ((0, 0), (5, 19), (2, 9), (0, 11), (5, 3)):
        left, top = min(column * 80, 390), min(row * 16, 280)
        kept = bytearray(data)
        for tile in range(120):
            x, y = tile % 6 * 80, tile // 6 * 16
            if x > left + 94 or x + 80 < left - 4 or y > top + 44 or y + 16 < top - 4:
                kept[starts[tile] : ends[tile]] = bytes(ends[tile] - starts[tile])
        box = left, top, left + 90, top + 40
        assert cropped(bytes(kept), box, out)
        assert (out == whole[top : top + 40, left : left + 90]).all()
        assert not cropped(bytes(kept), (0, 0, 480, 320), out)


def resident_kib():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4


@pytest.mark.slow
def test_ten_thousand_damaged_images_leak_nothing():
    draw = random.Random(6)
    images = sources()
    outs = np.empty((20, 17, 3), np.uint8), np.empty((2, 61, 97, 3), np.uint8)
    for i in range(2000):
        try_all(damaged(images[i % 5], draw), draw, outs)
    before = resident_kib()
    for i in range(10_000):
        try_all(damaged(images[i % 5], draw), draw, outs)
    assert resident_kib() - before < 4096


def test_no_memory_is_an_error_and_no_damage():
    """In a process of its own, with ever less memory: an abort would be seen."""
    with_limits = """
import os, resource, sys
from shardio import native
data, found = open(sys.argv[1], "rb").read(), set()
for room in range(1 << 20, 16 << 20, 1 << 18):
    child = os.fork()
    if not child:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
        try:
            os._exit(0 if isinstance(native.core.rewrite(data, 8), bytes) else 2)
        except MemoryError:
            os._exit(1)
    found.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(sorted(found))
"""
    noise = np.random.default_rng(1).integers(0, 256, (700, 900, 3), np.uint8)
    with tempfile.NamedTemporaryFile(suffix=".jpg") as file:
        Image.fromarray(noise).save(file, quality=97)
        file.flush()
        command = [sys.executable, "-c", with_limits, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[0, 1]\n", done.stderr


@pytest.mark.parametrize("marker", ["frame", "scan"])
def test_a_count_that_changes_while_it_is_read_is_not_believed(marker):
    """Of shared memory. The header ends where memory ends, so that reading on would be seen."""
    with_writer = """
import ctypes, mmap, os, signal, sys
from shardio import native
header, at = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
memory, start = mmap.mmap(-1, 2 * mmap.PAGESIZE), mmap.PAGESIZE - len(header)
memory[start : mmap.PAGESIZE] = header
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + mmap.PAGESIZE), mmap.PAGESIZE, 0)
parent, child = os.getpid(), os.fork()
if not child:
    while os.getppid() == parent:
        for _ in range(1000):
            memory[start + at] = 255
            memory[start + at] = 3
    os._exit(0)
data, found = memoryview(memory)[start : mmap.PAGESIZE], set()
for _ in range(3_000_000):
    found.add(native.core.header(data))
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
print(found)
"""
    parts = b"".join(bytes([i, 0x11, 0]) for i in (1, 2, 3))
    header = b"\xff\xd8" + segment(0xC0, b"\x08\0\x10\0\x10\3" + parts)
    at = header.index(b"\3\1")
    if marker == "scan":
        at = len(header) + 4
        header += segment(0xDA, b"\3\1\0\2\0\3\0\0\x3f\0")
    command = [sys.executable, "-c", with_writer, header.hex(), str(at)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "None" in done.stdout


def test_threads_share_nothing():
    images = [by_pil(120, 90, quality=q) for q in (40, 60, 80, 95)]
    expected = [core.rewrite(d, 4) for d in images]
    wrong = []

    def work(k):
        for _ in range(25):
            out = np.empty((40, 40, 3), np.uint8)
            if core.rewrite(images[k], 4) != expected[k] or not cropped(
                images[k], (0, 0, 40, 40), out
            ):
                wrong.append(k)
            if not (out == decoded(images[k])[:40, :40]).all():
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
