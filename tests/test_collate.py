"""collate: items to one batch of tensors."""

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from shardio import CollateError, collate


def pictures(count: int, size: tuple[int, int] = (5, 7)) -> list[Any]:
    noise = np.random.default_rng(0)
    return [noise.integers(0, 256, (*size, 3), dtype=np.uint8) for _ in range(count)]


def test_images_become_one_channels_last_tensor() -> None:
    images = pictures(4)
    batch = collate(images)
    assert batch.shape == (4, 3, 5, 7) and batch.dtype == torch.uint8
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert batch.stride() == (5 * 7 * 3, 1, 7 * 3, 3)
    for got, image in zip(batch, images, strict=True):
        assert np.array_equal(got.permute(1, 2, 0).numpy(), image)


def test_a_batch_is_a_copy() -> None:
    images = pictures(2)
    batch = collate(images)
    images[0][:] = 0
    assert batch[0].any()


def test_tuples_and_dicts_are_collated_field_by_field() -> None:
    images = pictures(3)
    batch, labels = collate([(image, i) for i, image in enumerate(images)])
    assert batch.shape == (3, 3, 5, 7)
    assert labels.dtype == torch.int64 and labels.tolist() == [0, 1, 2]
    keyed = collate([{"__key__": b"%d" % i, "label": i} for i in range(3)])
    assert keyed["__key__"] == [b"0", b"1", b"2"] and keyed["label"].tolist() == [0, 1, 2]
    assert list(keyed) == ["__key__", "label"]


def test_named_tuples_stay_named() -> None:
    class Pair(NamedTuple):
        image: Any
        label: int

    batch = collate([Pair(image, 3) for image in pictures(2)])
    assert type(batch) is Pair and batch.label.tolist() == [3, 3]


def test_tuples_in_a_sample_are_collated_too() -> None:
    (one, two), labels = collate([((a, a), 1) for a in pictures(2)])
    assert one.shape == two.shape == (2, 3, 5, 7) and labels.tolist() == [1, 1]


@pytest.mark.parametrize(
    "values, dtype",
    [
        ([1, 2, 3], torch.int64),
        ([-(2**63), 2**63 - 1], torch.int64),
        ([True, False], torch.bool),
        ([1.5, 2.5], torch.float64),
        ([1.5, 2], torch.float64),
        ([np.float32(1), np.float32(2)], torch.float32),
        ([np.int16(1), np.int16(2)], torch.int16),
        ([np.bool_(True), np.bool_(False)], torch.bool),
    ],
)
def test_numbers(values: list[Any], dtype: torch.dtype) -> None:
    batch = collate(values)
    assert batch.dtype == dtype and batch.tolist() == values


@pytest.mark.parametrize(
    "dtype", ["u1", "i1", "<i2", ">i2", "<i8", "<f2", "<f4", ">f8", "?", "<c8"]
)
@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 3), (2, 3, 4)])
def test_arrays_of_one_shape(dtype: str, shape: tuple[int, ...]) -> None:
    arrays = [np.full(shape, i, dtype) for i in range(3)]
    batch = collate(arrays)
    assert batch.shape == (3, *shape)
    assert np.array_equal(batch.numpy(), np.stack(arrays))


def test_tensors_of_one_shape() -> None:
    batch = collate([torch.full((2, 3), i, dtype=torch.float16) for i in range(3)])
    assert batch.shape == (3, 2, 3) and batch.dtype == torch.float16


@pytest.mark.parametrize(
    "values",
    [
        [b"a", b"b"],
        ["a", "b"],
        [None, None],
        [1, None],
        [True, 1],
        [2**63, 1],
        [[1], [1, 2]],
        [{"a": 1}, {"b": 1}],
        [np.zeros(2), np.zeros(3)],
        [np.zeros(2, "f4"), np.zeros(2, "f8")],
        [np.zeros(2), None],
        [np.array(["a"]), np.array(["b"])],
        [np.zeros(2, "M8[s]"), np.zeros(2, "M8[s]")],
        [torch.zeros(2), torch.zeros(3)],
        [torch.zeros(2), torch.zeros(2, dtype=torch.int64)],
        [Image.new("RGB", (2, 2)), Image.new("RGB", (2, 2))],
    ],
)
def test_all_else_is_a_list(values: list[Any]) -> None:
    (batch,) = collate([(value,) for value in values])
    assert type(batch) is list
    assert all(got is value for got, value in zip(batch, values, strict=True))


def test_images_of_several_sizes_are_a_list() -> None:
    batch = collate([*pictures(1), *pictures(1, (6, 6))])
    assert type(batch) is list and len(batch) == 2


@pytest.mark.parametrize(
    "items, message",
    [
        ([(1, 2), (1, 2), (1,)], "item 2 of the batch is a tuple of 1, but item 0 is a tuple of 2"),
        ([(1, 2), 3], "item 1 of the batch is a int, but item 0 is a tuple of 2"),
        ([{"a": 1}, {"a": 1, "b": 2}], "item 1 of the batch is a dict of 'a', 'b', but item 0"),
        ([{"a": 1}, (1,)], "item 1 of the batch is a tuple of 1, but item 0 is a dict of 'a'"),
        ([], "no items"),
    ],
)
def test_items_of_different_structure_are_named(items: list[Any], message: str) -> None:
    with pytest.raises(CollateError, match=re.escape(message)):
        collate(items)


def _shared(items: list[Any]) -> Any:
    """collate, in a worker: what it makes lies in shared memory before it is sent."""
    batch = collate(items)
    assert batch[0].is_shared() and batch[3].is_shared()
    return batch


class Made(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Any:
        image = np.full((5, 7, 3), i, np.uint8)
        return image, i, np.zeros((0, 4), "f4"), torch.full((2,), float(i)), b"x", True


def test_a_worker_sends_its_batches_in_shared_memory() -> None:
    loader = DataLoader(Made(), batch_size=3, num_workers=1, collate_fn=_shared)
    batches = list(loader)
    for start, (images, labels, empty, tensors, raw, flags) in zip((0, 3), batches, strict=True):
        assert images.is_shared() and images.is_contiguous(memory_format=torch.channels_last)
        assert images[:, 0, 0, 0].tolist() == labels.tolist() == [start, start + 1, start + 2]
        assert empty.shape == (3, 0, 4)
        assert tensors.tolist() == [[float(start + i)] * 2 for i in range(3)]
        assert raw == [b"x"] * 3 and flags.tolist() == [True] * 3
