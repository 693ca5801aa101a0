"""Where to decode: what ShardLoader.explain says, by cores for each GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support import raw_pixels, small_datasets

from shardio import CenterCrop, ShardDataset, ShardLoader, machine
from shardio.loader.decode_advice import DecodeAdvice, decode_advice


@pytest.mark.parametrize(
    "cores, tiles, on_gpu, code, rate",
    [
        (4, False, True, "decode_on_gpu", 2356),
        (5, False, True, "decode_on_gpu", 2945),
        (6, False, True, "decode_on_cores", 3534),
        (3, True, True, "decode_on_gpu", 2340),
        (4, True, True, "decode_on_cores", 3120),
        (4, False, False, "try_decode_on_gpu", 2356),
        (16, False, True, "decode_on_cores", 9424),
    ],
)
def test_few_cores_want_the_gpu_and_many_do_not(
    cores: int, tiles: bool, on_gpu: bool, code: str, rate: int
) -> None:
    found = decode_advice(cores, tiles=tiles, on_gpu=on_gpu)
    assert found is not None
    assert (found.code, found.cores, found.images_per_s) == (code, cores, rate)
    assert f"{rate:,}" in found.what and ("tile JPEGs" in found.what) is tiles
    assert (f"more than {rate:,} images/s" in found.mend) is (rate < 6000)
    assert ('decode="pil"' in found.mend) is on_gpu


def test_cores_that_suffice_and_decode_already_are_left_alone() -> None:
    assert decode_advice(6, tiles=False, on_gpu=False) is None


def photographs(folder: Path, size: int) -> Path:
    """Pack noisy JPEGs of so many pixels a side: 20 KB and more from 200 on."""

    def image(number: int) -> bytes:
        noise = np.random.default_rng(number).integers(0, 256, (size, size, 3), np.uint8)
        return raw_pixels.encoded(noise, "JPEG")

    return small_datasets.make(folder, [8], image=image)


def advice_of(
    folder: Path, decode: str, device: str | None = "cpu", cuda: bool = False, **options: str
) -> DecodeAdvice | None:
    crop = CenterCrop(32)
    train = ShardDataset(
        folder, batch_size=4, fields=("image", "label"), decode=decode, transform=crop
    )
    with ShardLoader(train, num_workers=0, device=device, **options) as loader:
        if cuda:  # as on a machine with a GPU: nothing is sent there
            assert loader.target is not None
            loader.target.device = torch.device("cuda")
        explained = loader.explain()
        text = f"where to decode  {explained.advice}"
        assert (text in explained.text()) is (explained.advice is not None)
        return explained.advice


def test_a_loader_says_where_to_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = photographs(tmp_path / "large", 200)
    for cores, code in ((4.0, "decode_on_gpu"), (16.0, "decode_on_cores")):
        monkeypatch.setattr(machine, "cores", lambda cores=cores: cores)
        found = advice_of(folder, "cuda")
        assert found is not None and (found.code, found.cores) == (code, cores)
    assert advice_of(folder, "pil", cuda=True) is None
    monkeypatch.setattr(machine, "cores", lambda: 2.0)
    found = advice_of(folder, "pil", cuda=True)
    assert found is not None and (found.code, found.images_per_s) == ("try_decode_on_gpu", 1178)


def test_it_says_nothing_of_what_it_has_no_figures_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2.0)
    large, small = photographs(tmp_path / "large", 200), photographs(tmp_path / "small", 32)
    assert advice_of(large, "pil") is None  # to no GPU
    assert advice_of(large, "pil", device=None) is None
    assert advice_of(large, "pil", cuda=True, resident="ram") is None  # decoded once
    assert advice_of(small, "pil", cuda=True) is None
