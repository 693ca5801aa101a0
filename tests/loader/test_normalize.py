"""normalize: uint8 images to floats, where they lie, as ShardLoader does it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import small_datasets

import shardio
from shardio import CenterCrop, OptionError, ShardDataset, ShardLoader

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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
