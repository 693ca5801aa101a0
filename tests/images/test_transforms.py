"""Crops: their boxes, their pixels, and their options.

Where two roads must give the same picture, "the same" is exact, or within 1 or 2 levels of 255
where rounding may fall either way.
"""

from __future__ import annotations

import io
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from support.images import (
    IMAGENET,
    RATIO,
    SCALE,
    Boxed,
    apart,
    encoded,
    scene,
    straight,
    to_array,
    turned,
)

from shardio.errors import DecodeError, OptionError
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


def test_users_palette_image_is_left_as_it_is():
    image = Image.new("P", (4, 4), 1)
    image.putpalette([1, 2, 3, 200, 100, 50])
    image.info["transparency"] = b"\x00\x80"
    CenterCrop(2)(image)
    to_array(image)
    assert image.mode == "P"
    assert image.info["transparency"] == b"\x00\x80"


def test_16_bit_grey_is_scaled_in_transforms_too():
    data = encoded(Image.fromarray(np.full((40, 40), 257 * 100, np.uint16)))
    assert (RandomResizedCrop(16)(data, 5) == 100).all()


def test_array_is_new_writable_contiguous_and_owned():
    image = scene()
    for array in (CenterCrop(16)(image), RandomResizedCrop(16, flip=True)(image)):
        assert array.dtype == np.uint8
        assert array.flags.c_contiguous and array.flags.writeable and array.flags.owndata
        array[:] = 0
    assert np.asarray(image).any()


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
