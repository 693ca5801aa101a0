"""EncodedImages: the image files of a batch, in one buffer."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data._utils.pin_memory import pin_memory

from shardio import EncodedImages


@given(st.lists(st.binary(max_size=9), max_size=7), st.data())
def test_it_is_a_sequence_of_views(files: list[bytes], data: st.DataObject) -> None:
    images = EncodedImages.join(files)
    assert len(images) == len(files) and images.tolist() == files == list(map(as_bytes, images))
    for view in images:
        assert view.dtype == torch.uint8 and view.dim() == 1
        assert view.untyped_storage().data_ptr() == images.buffer.untyped_storage().data_ptr()
    for i in range(-len(files), len(files)):
        assert as_bytes(images[i]) == files[i]
    for i in (len(files), -len(files) - 1):
        with pytest.raises(IndexError):
            images[i]
    ends = st.none() | st.integers(-9, 9)
    part = slice(data.draw(ends), data.draw(ends), data.draw(ends.filter(lambda step: step != 0)))
    some = images[part]
    assert type(some) is EncodedImages and some.tolist() == files[part]
    assert int(some.offsets[0]) == 0 and int(some.offsets[-1]) == len(some.buffer)
    assert some == EncodedImages.join(files[part]) == EncodedImages.join(list(some))
    for twin in (pickle.loads(pickle.dumps(images)), copy.deepcopy(images), copy.copy(images)):
        assert type(twin) is EncodedImages and twin == images and twin.tolist() == files


def as_bytes(view: torch.Tensor) -> bytes:
    return io.BytesIO(view.numpy()).read()


def test_equality_is_that_of_the_bytes() -> None:
    images = EncodedImages.join([b"ab", b"c"])
    assert images == EncodedImages.join([b"ab", b"c"]) == [b"ab", b"c"]
    assert images == [b"ab", b"c"]
    assert images != EncodedImages.join([b"a", b"bc"])
    assert images != EncodedImages.join([b"ab", b"d"]) and images != EncodedImages.join([b"ab"])
    assert images != [b"a", b"bc"] and images != (b"ab", b"c") and images != 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(images)
    assert repr(images) == "<2 encoded images, 3 bytes>"


def test_a_large_one_is_pickled_as_one_too() -> None:
    images = EncodedImages.join([bytes([i]) * 40_000 for i in range(5)])
    assert pickle.loads(pickle.dumps(images)) == images


def test_torch_pins_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    images = EncodedImages.join([b"ab", b"", b"c"])
    result, labels = pin_memory((images, torch.arange(3)))
    assert type(result) is EncodedImages and result == images
    assert result.buffer is pinned[0] and labels is pinned[1] and len(pinned) == 2
