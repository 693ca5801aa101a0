"""What one draw makes of several fields: images, their masks and boxes."""

from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.images import encoded, ids, palette, photograph, turned

from shardio import CenterCrop, DecodeError, OptionError, RandomResizedCrop
from shardio.images.transforms import move_boxes

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
