"""A batch as bytes: whatever it holds comes out as it went in, and large tensors cross uncopied."""

import gc
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shardio import EncodedCrops
from shardio.images.device_crop import DeviceCrop, Place
from shardio.loader.buffer_pool import Buffer, MappedBuffer
from shardio.loader.transport import SMALL, WrappedBatch, unwrap, wrap

DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
)


class Pair(NamedTuple):
    x: Any
    y: Any


class Plain:
    """An object of the user's, with a tensor in it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Across:
    """A buffer, as its builder and as its user see it."""

    def __init__(self) -> None:
        self.buffer = Buffer(0, 0)
        self.buffer.begin()
        self.freed: list[Any] = []

    def wrap(self, batch: Any) -> WrappedBatch:
        wrapped = wrap(batch, self.buffer)
        return pickle.loads(pickle.dumps(wrapped))

    def unwrap(self, wrapped: WrappedBatch) -> Any:
        self.mapped = MappedBuffer(
            os.dup(self.buffer.fd), self.buffer.size
        )  # which is told of the death
        try:
            return unwrap(wrapped, self.mapped.view(self.freed.append))
        finally:
            self.mapped.close()

    def __call__(self, batch: Any) -> Any:
        return self.unwrap(self.wrap(batch))


@pytest.fixture
def across() -> Iterator[Across]:
    made = Across()
    yield made
    made.buffer.close()


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of its own for each place."""
    count = torch.Size(shape).numel()
    flat = torch.arange(count) % 120
    return (flat % 2 == 1 if dtype == torch.bool else flat.to(dtype)).view(shape)


def assert_same(found: torch.Tensor, given: torch.Tensor) -> None:
    assert type(found) is torch.Tensor
    assert (found.dtype, found.shape, found.stride()) == (given.dtype, given.shape, given.stride())
    assert torch.equal(found, given)


SHAPES = [(), (1,), (0,), (3, 0, 2), (7, 1, 3), (64, 600), (2, 3, 100, 100)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_size_come_out_as_they_went_in(across: Across, dtype: torch.dtype) -> None:
    tensors = [tensor(*shape, dtype=dtype) for shape in SHAPES]
    for found, given_ in zip(across(tensors), tensors, strict=True):
        assert_same(found, given_)


LAID_OUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "permuted": lambda t: t.permute(3, 0, 2, 1),
    "expanded": lambda t: t[:1].expand(8, -1, -1, -1),
    "expanded in the middle": lambda t: t[:1, :1].expand(-1, 7, -1, -1).permute(2, 0, 1, 3),
    "a part": lambda t: t[2:5],
    "one constant": lambda t: t[0, 0, 0, 0].expand(4, 5),
}


@pytest.mark.parametrize("layout", LAID_OUT.values(), ids=LAID_OUT.keys())
@pytest.mark.parametrize("shape", [(6, 3, 4, 5), (6, 3, 40, 600)], ids=["small", "large"])
def test_strides_are_kept(
    across: Across, layout: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]
) -> None:
    given_ = layout(tensor(*shape))
    assert_same(across(given_), given_)


def test_a_tensor_with_gaps_comes_without_them(across: Across) -> None:
    for given_ in (tensor(100, 100)[:, ::2], tensor(9, 9)[::3, 1:4], tensor(50, 50).T[3:, 5:]):
        found = across(given_)
        assert torch.equal(found, given_) and found.is_contiguous()


def test_an_expanded_constant_takes_the_memory_of_one(across: Across) -> None:
    given_ = torch.zeros(1).expand(1000, 1000, 1000)
    wrapped = across.wrap(given_)
    assert across.buffer.used == 0 and isinstance(wrapped, bytes) and len(wrapped) < 1000
    found = across.unwrap(wrapped)
    assert found.shape == given_.shape and found.stride() == given_.stride()


def test_structure_is_kept(across: Across) -> None:
    image = Image.linear_gradient("L")
    batch = {
        "pair": Pair(tensor(3), tensor(200, 200)),
        "list": [None, 1 << 70, "text", b"bytes", 2.5, True],
        "tuple": (tensor(2), (tensor(3),)),
        "object": Plain(tensor(100, 100)),
        "images": [image],
        "arrays": [np.arange(5), np.arange(7, dtype=">i2"), np.float32(3)],
    }
    found = across(batch)
    assert list(found) == list(batch)
    assert type(found["pair"]) is Pair
    assert_same(found["pair"].x, batch["pair"].x)
    assert_same(found["pair"].y, batch["pair"].y)
    assert found["list"] == batch["list"] and found["list"][5] is True
    assert_same(found["tuple"][1][0], tensor(3))
    assert_same(found["object"].tensor, tensor(100, 100))
    assert found["images"][0].tobytes() == image.tobytes()
    for a, b in zip(found["arrays"], batch["arrays"], strict=True):
        assert type(a) is type(b) and a.dtype == b.dtype and (a == b).all()


@pytest.mark.parametrize(
    "special",
    [
        torch.nn.Parameter(tensor(5, 5)),
        tensor(5, 5).requires_grad_(),
        tensor(5, 5).to_sparse(),
        tensor(4, dtype=torch.complex64).conj(),
        torch.zeros(2, device="meta"),
    ],
    ids=["parameter", "grad", "sparse", "conj", "meta"],
)
def test_tensors_that_are_more_than_values_are_pickled_as_torch_does_it(
    across: Across, special: torch.Tensor
) -> None:
    found = across([special])[0]
    assert type(found) is type(special)
    assert found.requires_grad == special.requires_grad and found.layout == special.layout
    assert found.shape == special.shape and found.dtype == special.dtype
    if special.device.type == "cpu":
        assert torch.equal(found.resolve_conj().to_dense(), special.resolve_conj().to_dense())


def test_what_was_made_in_the_buffer_is_not_copied(across: Across) -> None:
    start, place = across.buffer.allocate(4 * SMALL)
    batch = torch.from_numpy(place).view(torch.float32).view(4, -1)
    batch[:] = 1
    used = across.buffer.used
    wrapped = across.wrap((batch, batch[1]))
    assert across.buffer.used == used
    batch[:] = 2  # the same memory: what is written now is seen there
    found, row = across.unwrap(wrapped)
    assert (found == 2).all() and (row == 2).all()
    found[1] = 3
    assert (row == 3).all() and start == 0


def test_crops_cross_with_their_files_in_the_buffer(across: Across) -> None:
    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(across.buffer.allocate(shape[0])[1])

    places = tuple(i / 8 for i in range(len(Place)))
    crops = [DeviceCrop(bytes([i]) * 9_000, places, (5, 4), "box") for i in range(8)]
    built, labels = EncodedCrops.join(crops, empty), torch.arange(8)
    wrapped = across.wrap((built, labels, {"few": built[:2]}))
    assert across.buffer.used == 8 * 9_000  # what was made in the buffer is not copied
    found = across.unwrap(wrapped)
    assert type(found[0]) is EncodedCrops and list(found[0]) == crops
    assert torch.equal(found[1], labels) and found[2]["few"] == built[:2]


def test_a_large_tensor_from_elsewhere_is_copied_once(across: Across) -> None:
    given_ = tensor(SMALL)
    wrapped = across.wrap(given_)
    assert across.buffer.used >= given_.nbytes
    given_[:] = 0
    assert torch.equal(across.unwrap(wrapped), tensor(SMALL))


def test_small_tensors_do_not_keep_the_buffer(across: Across) -> None:
    labels, images = across((tensor(256, dtype=torch.int64), tensor(SMALL)))
    gc.collect()
    assert not across.freed
    del images
    assert len(across.freed) == 1
    labels += 1  # and it is the user's own
    assert torch.equal(labels, tensor(256, dtype=torch.int64) + 1)


@pytest.mark.parametrize("count", [5, SMALL], ids=["small", "large"])
def test_tensors_are_no_views(across: Across, count: int) -> None:
    found = across(tensor(count).view(-1, 1))
    assert not found._is_view()
    assert found.untyped_storage().nbytes() == found.nbytes  # torch.save writes no more than that
    found.detach_()
    found.requires_grad_()
    (found * 2).sum().backward()
    assert found.grad is not None


def test_a_long_pickle_goes_through_the_buffer(across: Across) -> None:
    batch = [bytes([i]) * 1000 for i in range(200)]
    wrapped = across.wrap(batch)
    assert len(pickle.dumps(wrapped)) < 1000
    found = across.unwrap(wrapped)
    assert found == batch
    gc.collect()
    assert len(across.freed) == 1  # bytes are copies


def test_arrays_are_writable(across: Across) -> None:
    found = across([np.zeros(5), np.zeros((100, 300))])
    for array in found:
        array += 1
        assert (array == 1).all()


def test_what_cannot_be_pickled_is_an_error_here(across: Across) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        across.wrap([lambda: None])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    if shape and draw(st.booleans()):
        shape[draw(st.integers(0, len(shape) - 1))] = draw(st.integers(1, 3000))
    made = tensor(*shape, dtype=draw(st.sampled_from(DTYPES)))
    made = made.permute(draw(st.permutations(range(made.dim()))))
    for dim in range(made.dim()):
        step = draw(st.integers(1, 3))
        first = draw(st.integers(0, made.shape[dim]))
        made = made[(slice(None),) * dim + (slice(first, None, step),)]
        if made.shape[dim] == 1 and draw(st.booleans()):
            made = made.expand(*made.shape[:dim], draw(st.integers(1, 5)), *made.shape[dim + 1 :])
    return made


@given(st.lists(tensors(), max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_tensors_come_out_equal(given_: list[torch.Tensor]) -> None:
    across = Across()
    for found, one in zip(across(given_), given_, strict=True):
        assert found.dtype == one.dtype and found.shape == one.shape and torch.equal(found, one)
    across.buffer.close()
