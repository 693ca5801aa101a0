"""What one draw makes of several fields: images, their masks and boxes. Images as stored."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shardio import CenterCrop, DecodeError, OptionError, RandomResizedCrop
from shardio.images.decode import decode, gray, open_image, stored, stored_pixels
from shardio.images.transforms import move_boxes


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def ids(width: int = 90, height: int = 60) -> np.ndarray[Any, Any]:
    """(H, W) uint8: a class id for each of 9 x 6 blocks, so that a place can be told by its id."""
    y, x = np.mgrid[0:height, 0:width]
    blocks: np.ndarray[Any, Any] = (y * 6 // height) * 9 + x * 9 // width
    return blocks.astype(np.uint8)


def palette(values: np.ndarray[Any, Any]) -> Image.Image:
    """A mask as annotation tools write it: indices, with a colour for each."""
    height, width = values.shape
    image = Image.frombytes("P", (width, height), values.tobytes())
    image.putpalette([v * k % 256 for v in range(256) for k in (3, 5, 7)])
    return image


def photograph(values: np.ndarray[Any, Any]) -> Image.Image:
    """An RGB picture of the same scene: four times the id, grey."""
    return Image.fromarray(np.repeat(values[:, :, None] * 4, 3, 2))


def turned(orientation: int, image: Image.Image, kind: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif.tobytes())


# --- as stored ------------------------------------------------------------------------------------

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


# --- one draw for several fields ------------------------------------------------------------------

TRANSFORMS = [
    RandomResizedCrop((24, 40), flip=True, fields=("image", "mask")),
    RandomResizedCrop(33, flip=True, fields=("mask", "image"), interpolation="bicubic"),
    CenterCrop((30, 50), fields=("image", "mask")),
    CenterCrop(20, 40, fields=("image", "mask")),
]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_image_and_mask_show_the_same_place(transform: Any, kind: str, orientation: int) -> None:
    values = ids(180, 120)
    stored_as = np.ascontiguousarray(
        {1: values, 3: values[::-1, ::-1], 6: np.rot90(values)}[orientation]
    )
    photo = turned(orientation, photograph(stored_as), kind)
    for draw in range(2**60, 2**60 + 12):
        sample = {"image": photo, "mask": encoded(palette(values))}
        transform.together(sample, "image", (), draw)
        assert np.array_equal(sample["image"], transform(photo, draw))  # as of the image alone
        mask = sample["mask"]
        assert mask.shape == transform.size and mask.dtype == np.uint8 and mask.flags.c_contiguous
        assert set(np.unique(mask)) <= set(np.unique(values))
        shown = sample["image"][:, :, 0] / 4
        # Within a block both say its id; beside a border the picture is blurred.
        inner = np.ones(mask.shape, bool)
        for axis in (0, 1):
            for by in (-2, 2):
                inner &= np.roll(mask, by, axis) == mask
        inner[:2], inner[-2:], inner[:, :2], inner[:, -2:] = False, False, False, False
        assert inner.any() and np.abs(shown - mask)[inner].max() < 2.5


def test_16_bit_depths_are_cropped_by_nearest() -> None:
    crop = RandomResizedCrop(16, fields=("image", "depth"))
    depths = ids().astype(np.uint16) * 1000
    for data in (
        encoded(Image.fromarray(depths)),
        encoded(Image.fromarray(depths.astype(">u2")), "TIFF"),
    ):
        sample = {"image": encoded(photograph(ids())), "depth": data}
        crop.together(sample, "image", (), 5)
        other = {"image": encoded(photograph(ids())), "depth": encoded(palette(ids()))}
        crop.together(other, "image", (), 5)
        assert sample["depth"].dtype == np.uint16
        assert np.array_equal(sample["depth"], other["depth"].astype(np.uint16) * 1000)


def test_images_that_are_alike_are_resampled_as_the_first() -> None:
    crop = RandomResizedCrop(16, flip=True, fields=("left", "right"))
    data = encoded(photograph(ids()), "JPEG")
    sample = {"left": data, "right": data}
    crop.together(sample, "left", ("right",), 3)
    assert np.array_equal(sample["left"], sample["right"])


def test_fields_of_other_sizes_are_refused() -> None:
    crop = RandomResizedCrop(16, fields=("image", "mask"))
    sample = {"image": encoded(photograph(ids())), "mask": encoded(palette(ids(60, 90)))}
    with pytest.raises(DecodeError, match=r"'image' is 90 x 60 pixels, and 'mask' 60 x 90"):
        crop.together(sample, "image", (), 1)


def test_none_stays_none() -> None:
    crop = RandomResizedCrop(16, fields=("image", "mask"), boxes="boxes")
    mask = encoded(palette(ids()))
    sample: dict[str, Any] = {"image": None, "mask": mask, "boxes": None}
    crop.together(sample, "image", (), 1)
    assert sample["image"] is None and sample["mask"].shape == (16, 16) and sample["boxes"] is None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"fields": "mask"}, r"fields is 'mask', expected .* such as \('mask',\)"),
        ({"fields": ()}, r"fields is \(\), expected names"),
        ({"fields": ("a", "a")}, "fields is .* each once"),
        ({"boxes": ("a",)}, "boxes is .* expected the name of one field"),
    ],
)
def test_wrong_names_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=f"RandomResizedCrop: {message}"):
        RandomResizedCrop(8, **options)


# --- boxes ----------------------------------------------------------------------------------------


def block(mask: np.ndarray[Any, Any], number: int) -> list[int] | None:
    """[x, y, width, height] of the pixels with this id."""
    y, x = np.nonzero(mask == number)
    if not len(x):
        return None
    return [x.min(), y.min(), x.max() + 1 - x.min(), y.max() + 1 - y.min()]


@pytest.mark.parametrize("flip", [False, True])
def test_boxes_stay_around_what_they_are_of(flip: bool) -> None:
    crop = RandomResizedCrop(120, flip=flip, fields=("image", "mask"), boxes="boxes")
    values = ids(180, 120)
    found = [{"bbox": [float(v) for v in block(values, n)], "label": n} for n in range(54)]  # type: ignore[union-attr]
    seen = lost = 0
    for draw in range(30):
        sample = {
            "image": encoded(photograph(values)),
            "mask": encoded(palette(values)),
            "boxes": found,
        }
        crop.together(sample, "image", (), draw * 2**58)
        kept = {one["label"]: one["bbox"] for one in sample["boxes"]}
        for number in range(54):
            pixels = block(sample["mask"], number)
            if number in kept and pixels is not None:
                assert np.abs(np.array(kept[number]) - pixels).max() <= 1
                x, y, w, h = kept[number]
                assert x >= 0 and y >= 0 and x + w <= 120 + 1e-9 and y + h <= 120 + 1e-9
                assert w >= 1 and h >= 1
                seen += 1
            elif number not in kept:
                assert pixels is None or min(pixels[2:]) <= 1
                lost += 1
    assert seen > 100 and lost > 100


SIZE, BOX = (10, 20), (10.0, 20.0, 50.0, 40.0)  # half the size, from 10, 20 on


@pytest.mark.parametrize(
    "given, expected",
    [
        ([20, 24, 10, 8], [5, 2, 5, 4]),
        ([0, 0, 30, 30], [0, 0, 10, 5]),  # clipped
        ([0, 0, 500, 500], [0, 0, 20, 10]),
        ([0, 0, 11.9, 500], None),  # 0.95 of a pixel is left
        ([0, 0, 12, 500], [0, 0, 1, 10]),
        ([60, 20, 10, 10], None),  # beside it
    ],
)
def test_boxes_are_moved_scaled_and_clipped(
    given: list[float], expected: list[float] | None
) -> None:
    one = {"bbox": given, "category_id": 7, "area": 3, "segmentation": [[1, 2]], "iscrowd": 0}
    two = {"caption": "no box"}
    moved = move_boxes([one, two], BOX, SIZE, False)
    kept = [] if expected is None else [{"bbox": expected, "category_id": 7, "iscrowd": 0}]
    assert moved == [*kept, two] and one["area"] == 3
    rows = [] if expected is None else [[*expected, 7]]
    assert move_boxes([[*given, 7]], BOX, SIZE, False) == rows
    for dtype, result in ((np.float64, np.float64), (np.int64, np.float32)):
        if dtype == np.int64 and given != [int(v) for v in given]:
            continue
        array = move_boxes(np.array([[*given, 7]], dtype), BOX, SIZE, False)
        assert array.dtype == result and array.shape == (len(rows), 5) and array.tolist() == rows


def test_boxes_are_mirrored() -> None:
    assert move_boxes([[20, 24, 10, 8]], BOX, SIZE, True) == [[10, 2, 5, 4]]


@pytest.mark.parametrize(
    "value", [7, "boxes", [3], [[1, 2, 3]], [{"bbox": [1, 2]}], np.zeros(4), [None]]
)
def test_what_are_no_boxes_is_named(value: Any) -> None:
    with pytest.raises(DecodeError, match=r"expected boxes: .*\[x, y, width, height\]"):
        move_boxes(value, BOX, SIZE, False)


# --- the limit ------------------------------------------------------------------------------------


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
