"""Encoded crops: what workers hand on under decode="cuda"."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data._utils.pin_memory import pin_memory

from shardio import EncodedCrops, EncodedImages
from shardio.images.device_crop import DeviceCrop, Place, Reason

# --- the type -------------------------------------------------------------------------------------


def crops_of(files: list[bytes]) -> list[DeviceCrop]:
    return [
        DeviceCrop(data, tuple(i + p / 8 for p in Place), (4, 5), "bicubic")
        for i, data in enumerate(files)
    ]


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=7), st.data())
def test_it_is_a_sequence_of_crops(files: list[bytes], data: st.DataObject) -> None:
    crops = crops_of(files)
    joined = EncodedCrops.join(crops)
    assert type(joined.files) is EncodedImages and joined.files == files
    assert joined.places.shape == (len(files), len(Place))
    assert joined.places.dtype == torch.float64
    assert (joined.shape, joined.interpolation) == ((4, 5), "bicubic")
    assert joined.column(Place.TOP) == [i + 1 / 8 for i in range(len(files))]
    assert len(joined) == len(files) and list(joined) == crops and joined[-1] == crops[-1]
    with pytest.raises(IndexError):
        joined[len(files)]
    ends = st.none() | st.integers(-9, 9)
    part = slice(data.draw(ends), data.draw(ends), data.draw(ends.filter(lambda step: step != 0)))
    some = joined[part]
    assert type(some) is EncodedCrops and list(some) == crops[part]
    for twin in (joined, some):
        for made in (pickle.loads(pickle.dumps(twin)), copy.deepcopy(twin), copy.copy(twin)):
            assert type(made) is EncodedCrops and made == twin and list(made) == list(twin)


def test_equality_is_that_of_files_and_crops() -> None:
    crops = crops_of([b"ab", b"c"])
    joined = EncodedCrops.join(crops)
    assert joined == EncodedCrops.join(crops) and joined != joined[:1] and joined != crops
    assert joined != EncodedCrops.join(crops_of([b"a", b"bc"]))
    for other in (
        EncodedCrops(joined.files, joined.places + 1, (4, 5), "bicubic"),
        EncodedCrops(joined.files, joined.places, (5, 4), "bicubic"),
        EncodedCrops(joined.files, joined.places, (4, 5), "lanczos"),
    ):
        assert joined != other
    with pytest.raises(TypeError, match="unhashable"):
        hash(joined)


def test_its_text_says_how_many_are_for_the_device() -> None:
    joined = EncodedCrops.join(crops_of([b"ab", b"c", b"def"]))
    joined.places[:, Place.REASON] = torch.tensor([0, Reason.SCANS, 0])
    assert repr(joined) == "<3 encoded crops, 4 x 5, 6 bytes, 1 finished by the CPU>"


def test_torch_pins_files_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    joined = EncodedCrops.join(crops_of([b"ab", b""]))
    (result,) = pin_memory((joined,))
    assert type(result) is EncodedCrops and result == joined
    assert result.files.buffer is pinned[0] and result.places is pinned[1] and len(pinned) == 2
