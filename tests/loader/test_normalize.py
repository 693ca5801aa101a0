"""normalize, and the images of batches for a device: floats of uint8, where they lie."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support import small_datasets
from support.device_batches import MEAN, STD, pictures, wanted

import shardio
from shardio import CenterCrop, OptionError, ShardDataset, ShardLoader
from shardio.loader.device import prefetch


def pixels(*shape: int) -> torch.Tensor:
    noise = np.random.default_rng(0)
    return torch.from_numpy(noise.integers(0, 256, shape, dtype=np.uint8))


def test_a_batch_has_the_numbers_of_the_loader(packed: Callable[..., Path]) -> None:
    folder = packed([9], image=small_datasets.jpeg)
    train = ShardDataset(folder, batch_size=4, fields=("image",), transform=CenterCrop(12))
    raw = [images for (images,) in train]
    train.set_epoch(0)
    with ShardLoader(train, num_workers=0, threads=0, device="cpu", mean=MEAN, std=STD) as loader:
        for images, (expected,) in zip(raw, loader, strict=True):
            before = images.clone()
            made = shardio.normalize(images, MEAN, STD)
            assert torch.equal(made, expected) and made.dtype == torch.float32
            assert made.stride() == images.stride() and torch.equal(images, before)


def test_it_is_pixels_from_0_to_1_less_mean_by_std() -> None:
    images = pixels(2, 3, 4, 5)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
    expected = (images / 255 - mean) / std
    for given in (
        (MEAN, STD),
        (list(MEAN), np.array(STD)),
        (torch.tensor(MEAN), torch.tensor(STD)),
    ):
        torch.testing.assert_close(shardio.normalize(images, *given), expected)
    half = shardio.normalize(images, MEAN, STD, torch.bfloat16)
    assert torch.equal(half, shardio.normalize(images, MEAN, STD).to(torch.bfloat16))


def test_one_image_and_one_number_for_all() -> None:
    for shape in ((3, 4, 5), (1, 4, 5), (2, 1, 4, 5), (0, 3, 4, 5)):
        images = pixels(*shape)
        made = shardio.normalize(images, 0.5, 0.25)
        assert made.shape == images.shape
        torch.testing.assert_close(made, (images / 255 - 0.5) / 0.25)


@pytest.mark.parametrize(
    "images, message",
    [
        (torch.zeros(2, 3, 4, 4), "images are float32, expected a uint8 tensor"),
        (np.zeros((3, 4, 4), np.uint8), "images are a ndarray, expected a uint8 tensor"),
        ([1], "images are a list, expected"),
        (pixels(2, 4, 4, 3), r"images are \(2, 4, 4, 3\), expected \(B, 3, H, W\) or \(3, H, W\)"),
        (pixels(4, 4), r"images are \(4, 4\), expected"),
    ],
)
def test_what_are_no_images_is_named(images: Any, message: str) -> None:
    with pytest.raises(OptionError, match=f"normalize: {message}"):
        shardio.normalize(images, MEAN, STD)


def test_wrong_numbers_are_refused_as_by_the_loader() -> None:
    with pytest.raises(OptionError, match="divide values for pixels from 0 to 255 by 255"):
        shardio.normalize(pixels(1, 3, 2, 2), (124, 116, 104), (58, 57, 57))
    with pytest.raises(OptionError, match="std is 0"):
        shardio.normalize(pixels(1, 3, 2, 2), MEAN, (0, 1, 1))


class Pair(NamedTuple):
    images: Any
    labels: Any


def test_without_options_bytes_stay_bytes() -> None:
    pixels = pictures()
    (images,) = prefetch([pixels], "cpu")
    assert images is pixels


def test_a_dtype_alone_only_casts() -> None:
    pixels = pictures()
    (images,) = prefetch([pixels], "cpu", dtype=torch.bfloat16)
    assert torch.equal(images, pixels.to(torch.bfloat16)) and images.max() > 1


def test_one_number_stands_for_all_channels_and_one_option_for_both() -> None:
    pixels = pictures()
    (images,) = prefetch([pixels], "cpu", mean=0)
    assert torch.allclose(images.double(), pixels.double() / 255, atol=1e-7)
    (images,) = prefetch([pixels], "cpu", std=np.float32(0.5))
    assert torch.allclose(images.double(), pixels.double() / 127.5, atol=1e-6)
    (images,) = prefetch([pixels], "cpu", mean=MEAN, std=0.5)
    assert torch.allclose(images.double(), wanted(pixels, MEAN, (0.5,) * 3), atol=1e-6)


def test_images_have_as_many_channels_as_mean_has_values() -> None:
    grey, masks = pictures(channels=1), pictures(channels=2)
    images, others = next(iter(prefetch([(grey, masks)], "cpu", mean=[0.5], std=[0.25])))
    assert torch.allclose(images.double(), wanted(grey, (0.5,), (0.25,)), atol=1e-6)
    assert others is masks


@pytest.mark.parametrize("mean", [None, MEAN])
def test_strides_stay_unless_they_are_asked_for(mean: Any) -> None:
    last = pictures(3, (6, 7))
    first = last.contiguous()

    def strides(pixels: torch.Tensor, channels_last: bool | None) -> tuple[int, ...]:
        (images,) = prefetch([pixels], "cpu", mean=mean, channels_last=channels_last)
        assert torch.equal(images.float(), images.contiguous().float())
        found: tuple[int, ...] = images.stride()
        return found

    for pixels in (last, first):
        assert strides(pixels, None) == pixels.stride()
        assert strides(pixels, True) == last.stride()
        assert strides(pixels, False) == first.stride()


def test_the_user_s_batch_is_not_written_to() -> None:
    pixels = pictures()
    before = pixels.clone()
    (images,) = prefetch([pixels], "cpu", mean=MEAN, std=STD)
    images.zero_()
    assert torch.equal(pixels, before)


def test_tuples_lists_and_dicts_keep_their_structure() -> None:
    pixels, labels = pictures(), torch.tensor([1, 2])
    batch = {
        "pair": Pair(pixels, labels),
        "list": [pixels, b"bytes", None],
        "ordered": OrderedDict(b=(pixels,), a=3.5),
        "deep": ({"x": [(pixels,)]},),
    }
    (found,) = prefetch([batch], "cpu", mean=MEAN)
    assert list(found) == list(batch) and batch["pair"].images is pixels
    assert type(found["pair"]) is Pair and found["pair"].labels is labels
    assert type(found["list"]) is list and found["list"][1:] == [b"bytes", None]
    assert type(found["ordered"]) is OrderedDict and list(found["ordered"]) == ["b", "a"]
    images = found["pair"].images
    for other in (found["list"][0], found["ordered"]["b"][0], found["deep"][0]["x"][0][0]):
        assert other.dtype == torch.float32 and torch.equal(other, images)


def test_what_is_no_tensor_passes_unchanged() -> None:
    for batch in (None, 3, "text", [b"\xff\xd8", b"\xff\xd8"], np.zeros(3)):
        (found,) = prefetch([batch], "cpu")
        assert found is batch or found == batch


@pytest.mark.parametrize(
    "batch, words",
    [
        ((pictures(channels=1), 3), ["for 3 channels", "have 1", "(2, 1, 4, 5) uint8"]),
        ((pictures().float(), 3), ["has none", "uint8 (B, 3, H, W)", "(2, 3, 4, 5) float32"]),
        (pictures(2, (6, 7)).permute(0, 2, 3, 1), ["has none", "(2, 6, 7, 3) uint8"]),
        ([b"\xff\xd8"], ["has none", "no tensor of pixels"]),
    ],
)
def test_a_batch_without_images_to_normalise_is_an_error(batch: Any, words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        next(iter(prefetch([batch], "cpu", mean=MEAN)))
    for word in words:
        assert word in str(caught.value)
