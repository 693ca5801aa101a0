"""Thumbnails, overlays and crops: files that a browser shows, with the right pixels."""

import io
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.small_datasets import jpeg
from support.trees import picture
from support.viewer_records import encoded, fields, pixels, write

from shardio import DecodeError, RandomResizedCrop, ShardDataset
from shardio.images.decode import ppm
from shardio.viewer.pages import Pages
from shardio.viewer.view import open_view
from shardio.viewer.views import Views


def test_an_overlay_of_a_huge_mask_is_drawn_smaller(tmp_path: Path) -> None:
    mask = encoded(Image.new("L", (5000, 8)), "PNG")
    folder = write(tmp_path / "out", {"image": "image", "mask": "image"}, {"mask": mask})
    with closing(Views(folder)) as views:
        answer = Pages(views)("image/0", {"field": ["mask"], "overlay": ["1"]})
    assert pixels(answer.body).shape == (7, 4096, 4)


def test_a_bomb_is_not_left_to_the_browser(tmp_path: Path) -> None:
    """Its few bytes would be handed out as they are; what is cut is."""
    bomb = bytearray(picture(8, 8, "PNG"))
    bomb[16:24] = (60_000).to_bytes(4, "big") * 2
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    samples = [{"image": bytes(bomb)}, {"image": picture(64, 64, "PNG")[:40]}]
    with open_view(write(tmp_path / "out", {"image": "image"}, *samples)) as view:
        for side in (None, 64):
            with pytest.raises(DecodeError, match="60000 x 60000"):
                view.image(0, side=side)
        assert view.image(1).data == samples[1]["image"]


def test_masks_are_told_from_images_and_laid_over_them(tmp_path: Path) -> None:
    ids = np.zeros((16, 24), np.uint8)
    ids[4:8, :12], ids[8:, :], ids[0, 0] = 1, 2, 255
    grey = encoded(Image.fromarray(ids), "PNG")
    palette = Image.fromarray(ids).convert("P")
    palette.putpalette([0, 0, 0, 10, 20, 30, 40, 50, 60])
    kinds = dict.fromkeys(("image", "mask", "palette", "second", "small"), "image")
    sample = {
        "image": jpeg(0),
        "mask": grey,
        "palette": encoded(palette, "PNG"),
        "second": jpeg(1),
        "small": encoded(Image.new("L", (8, 8)), "PNG"),
    }
    with open_view(write(tmp_path / "out", kinds, sample)) as view:
        found = {one.name: (one.image, one.mask) for one in view.record(0).fields}
        assert found == {
            "image": (True, False), "mask": (True, True), "palette": (True, True),
            "second": (True, False), "small": (True, False),
        }  # fmt: skip
        laid = pixels(view.image(0, "mask", overlay=True).data)
        assert laid.shape == (16, 24, 4) and view.image(0, "mask").media_type == "image/png"
        assert laid[1, 1, 3] == 0 < laid[5, 5, 3] < 255 and laid[0, 0, 3] > 0
        assert (laid[5, 5, :3] != laid[9, 9, :3]).any()
        own = pixels(view.image(0, "palette", overlay=True).data)
        assert own[5, 5, :3].tolist() == [10, 20, 30] and own[9, 9, :3].tolist() == [40, 50, 60]
        small = pixels(view.image(0, "mask", 12, overlay=True).data)
        assert small.shape == (8, 12, 4)
        assert {tuple(c) for c in small.reshape(-1, 4).tolist()} <= {
            tuple(c) for c in laid.reshape(-1, 4).tolist()
        }  # no colours between classes


def test_images_that_no_browser_shows_become_png(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)
    deep = Image.fromarray(np.arange(54, dtype=np.uint16).reshape(6, 9) * 1000)
    folder = write(
        tmp_path / "out",
        {"image": "image"},
        {"image": ppm(array)},
        {"image": encoded(Image.fromarray(array), "TIFF")},
        {"image": encoded(deep, "PNG")},
        {"image": None},
        {"image": b"\xff\xd8\xff no image"},
    )
    with open_view(folder) as view:
        for number in (0, 1):
            shown = view.image(number)
            assert shown.media_type == "image/png" and (pixels(shown.data) == array).all()
        assert view.record(0).image_format == "PPM, 9 x 6, RGB"
        assert pixels(view.image(2, side=100).data).dtype == np.uint8
        with pytest.raises(KeyError):
            view.image(3)
        empty = view.record(3)
        assert fields(empty) == {"image": "null"} and empty.damaged is None
        with pytest.raises(DecodeError, match="image of 12 bytes"):
            view.image(4, side=64)
        assert "12 bytes" in (view.record(4).damaged or "")
        assert [one.number for one in view.damaged()] == [4]
        assert len(view.page().cards) == 5


def test_pixels_in_arrays_and_images_in_bytes_are_shown(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)
    ids = np.arange(54).reshape(6, 9) % 4
    kinds = {"image": "array", "mask": "array", "file": "bytes", "other": "array"}
    first = {"image": array, "mask": ids, "file": jpeg(0), "other": np.zeros((2, 2))}
    second = {"image": np.zeros(3), "file": b"text"}
    with open_view(write(tmp_path / "out", kinds, first, second)) as view:
        summary = view.summary()
        assert (summary.images, summary.main_image) == (("image",), "image")
        record = view.record(0)
        assert (record.width, record.height) == (9, 6)
        assert {one.name: (one.image, one.mask) for one in record.fields} == {
            "image": (True, False), "mask": (True, True), "file": (True, False),
            "other": (False, False),
        }  # fmt: skip
        assert (pixels(view.image(0).data) == array).all()
        assert pixels(view.image(0, "mask", overlay=True).data).shape == (6, 9, 4)
        assert view.image(0, "file").data == jpeg(0)
        assert view.record(1).damaged is None and fields(view.record(1))["file"] == "text"
        with pytest.raises(DecodeError, match="holds no image"):
            view.image(1)


def test_sizes_are_those_of_the_upright_image(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(Image.new("RGB", (30, 20)), "JPEG", exif=exif)
    with open_view(write(tmp_path / "out", {"image": "image"}, {"image": turned})) as view:
        record = view.record(0)
        assert (record.width, record.height) == (20, 30)
        assert record.image_format == "JPEG, 20 x 30, RGB, turned by EXIF"
        assert pixels(view.image(0, side=15).data).shape == (15, 10, 3)
        [crop] = view.crops(0, RandomResizedCrop(224, scale=(1.0, 1.0), ratio=(2 / 3, 2 / 3)), (1,))
        assert (crop.x, crop.y, crop.width, crop.height) == (0, 0, 20, 30)


Packed = Callable[..., Path]


def test_crops_are_those_that_training_gets(packed: Packed) -> None:
    folder = packed([6, 5], image=lambda number: jpeg(number, (90 + number, 60)))
    transform = RandomResizedCrop(32, scale=(0.2, 0.9), ratio=(0.5, 2.0), flip=True)
    data = ShardDataset(folder, batch_size=4, seed=5, transform=transform, map=None)
    with open_view(folder) as view:
        for epoch in (0, 3):
            data.set_epoch(epoch)
            for batch in data:
                for key, image in zip(batch["__key__"], batch["image"].numpy(), strict=True):
                    number = int(key[2:8])
                    picture = view.crop_image(number, transform, epoch, seed=5)
                    found = np.array(Image.open(io.BytesIO(picture.data)))
                    assert (found == image.transpose(1, 2, 0)).all()
        plain = RandomResizedCrop(32)
        assert not any(crop.flip for n in range(11) for crop in view.crops(n, plain))
        first, second = view.crops(3, transform, (0, 7), seed=5)
        assert first != second
        whole = Image.open(io.BytesIO(view.image(3).data))
        box = (second.x, second.y, second.x + second.width, second.y + second.height)
        cut = whole.resize((32, 32), Image.Resampling.BILINEAR, box)
        expected = np.array(cut)[:, :: -1 if second.flip else 1].astype(int)
        picture = view.crop_image(3, transform, 7, seed=5)
        assert np.abs(np.array(Image.open(io.BytesIO(picture.data))) - expected).max() <= 1
