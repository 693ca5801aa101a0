"""collate: items to one batch of tensors."""

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from shardio import CollateError, OptionError, collate


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
        [True, 1],
        [2**63, 1],
        [[1], [1, 2]],
        [{"a": 1}, {"b": 1}],
        ["a", None],
        [b"a", None],
        [[1], None],
        [{"a": 1}, None],
        [1, "a"],
        [np.array(["a"]), np.array(["b"])],
        [np.array(["a"]), np.array(["a", "b"])],
        [np.zeros(2, "M8[s]"), np.zeros(2, "M8[s]")],
        [np.ma.masked_less([1, 2], 2), np.ma.masked_less([3, 4], 2)],
        [Image.new("RGB", (2, 2)), Image.new("RGB", (2, 2))],
        [Image.new("RGB", (2, 2)), None],
    ],
)
def test_all_else_is_a_list(values: list[Any]) -> None:
    (batch,) = collate([(value,) for value in values])
    assert type(batch) is list
    assert all(got is value for got, value in zip(batch, values, strict=True))


UNLIKE = [
    ([np.zeros(2), np.zeros(3)], "(2,) float64", "(3,) float64"),
    ([np.zeros(2, "f4"), np.zeros(2, "f8")], "(2,) float32", "(2,) float64"),
    ([np.zeros(2), None], "(2,) float64", "None"),
    ([None, 1], "None", "a number"),
    ([np.float32(1), None], "a float32", "None"),
    ([torch.zeros(2), torch.zeros(3)], "(2,) float32", "(3,) float32"),
    ([torch.zeros(2), torch.zeros(2, dtype=torch.int64)], "(2,) float32", "(2,) int64"),
    ([torch.zeros(2), np.zeros(2)], "(2,) float32", "(2,) float64"),
    ([torch.zeros(2), 1], "(2,) float32", "a number"),
    ([np.zeros(2), [1.0]], "(2,) float64", "a list"),
    ([*pictures(1), *pictures(1, (6, 6))], "(5, 7, 3) uint8", "(6, 6, 3) uint8"),
]


@pytest.mark.parametrize("values, one, other", UNLIKE, ids=[f"{a}, {b}" for _, a, b in UNLIKE])
def test_values_that_are_no_rows_of_one_tensor_are_named(
    values: list[Any], one: str, other: str
) -> None:
    values = [values[0], values[0], values[1]]
    first, second = sorted([(0, one), (2, other)], key=lambda place: place[1] == "None")
    text = (
        f"cannot be stacked to one tensor: item {first[0]} of the batch{{}} has {first[1]}, and "
        f"item {second[0]} of the batch{{}} has {second[1]}"
    )
    for items, field, keys in (
        ([(0, value) for value in values], "field 1", ("", "")),
        (
            [{"__key__": b"k%d" % i, "x": v} for i, v in enumerate(values)],
            "field 'x'",
            (", k0,", ", k2,"),
        ),
        (values, "this batch", ("", "")),
    ):
        shown = text.format(*(keys if first[0] == 0 else keys[::-1]))
        with pytest.raises(CollateError, match=re.escape(f"{field} {shown}")):
            collate(items)
    batch = collate([(0, value) for value in values], ragged=(1,))
    assert type(batch[1]) is list and batch[0].tolist() == [0, 0, 0]
    assert all(got is value for got, value in zip(batch[1], values, strict=True))
    assert type(collate([{"x": value} for value in values], ragged=["x"])["x"]) is list


def test_ragged_fields_of_tuples_by_place_or_by_name() -> None:
    class Pair(NamedTuple):
        image: Any
        boxes: Any

    items = [Pair(i, np.zeros((i, 4))) for i in range(3)]
    for ragged in (("boxes",), (1,)):
        batch = collate(items, ragged=ragged)
        assert (
            type(batch) is Pair and type(batch.boxes) is list and batch.image.tolist() == [0, 1, 2]
        )


@pytest.mark.parametrize(
    "items, ragged, message",
    [
        (
            [(1, 2)],
            ("boxes",),
            "ragged has 'boxes', but samples are tuples of 2 whose names are not",
        ),
        ([(1, 2)], (2,), "ragged has 2, but samples are tuples of 2"),
        ([{"a": 1}], ("boxes",), "ragged has 'boxes', but samples have 'a'"),
        ([1, 2], ("boxes",), "ragged has 'boxes', but samples are single values"),
    ],
)
def test_ragged_fields_that_are_not_there_are_named(items: Any, ragged: Any, message: str) -> None:
    with pytest.raises(CollateError, match=re.escape(message)):
        collate(items, ragged=ragged)


def test_ragged_is_several_fields() -> None:
    with pytest.raises(OptionError, match=r"such as \('boxes',\)"):
        collate([{"boxes": 1}], ragged="boxes")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_tensors_are_an_error() -> None:
    made = [torch.quantize_per_tensor(torch.rand(2), 0.1, 0, torch.quint8) for _ in range(2)]
    with pytest.raises(
        CollateError, match=r"field 0 holds quantised tensors \(quint8\).*dequantize"
    ):
        collate([(tensor,) for tensor in made])


def test_images_as_planes_keep_the_strides_of_channels_last() -> None:
    images = pictures(3)
    batch = collate([torch.from_numpy(image).permute(2, 0, 1) for image in images])
    assert torch.equal(batch, collate(images)) and batch.stride() == collate(images).stride()
    mixed = [torch.from_numpy(image).permute(2, 0, 1) for image in images]
    mixed[1] = mixed[1].contiguous()
    assert torch.equal(collate(mixed), batch)


def test_16_bit_arrays_become_a_tensor() -> None:
    batch = collate([np.full((2, 3), 40_000 + i, np.uint16) for i in range(2)])
    assert batch.dtype == torch.uint16 and batch[1, 0, 0].item() == 40_001


def test_subclasses_of_arrays_and_tensors_are_stacked() -> None:
    arrays = [np.zeros(2).view(np.recarray), np.ones(2)]
    assert collate(arrays).tolist() == [[0, 0], [1, 1]]
    tensors = [torch.zeros(2), torch.nn.Parameter(torch.ones(2), requires_grad=False)]
    assert collate(tensors).tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    "items, message",
    [
        (
            [(1, 2), (1, 2), (1,)],
            "item 2 of the batch is a tuple of 1, but item 0 of the batch is a tuple of 2",
        ),
        ([(1, 2), 3], "item 1 of the batch is a int, but item 0 of the batch is a tuple of 2"),
        ([{"a": 1}, {"a": 1, "b": 2}], "item 1 of the batch is a dict of 'a', 'b', but item 0"),
        (
            [{"a": 1}, (1,)],
            "item 1 of the batch is a tuple of 1, but item 0 of the batch is a dict of 'a'",
        ),
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
