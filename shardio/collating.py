"""Items to one batch: images as one uint8 tensor, numbers as tensors, all else as lists.

    (H, W, 3) uint8 numpy arrays of one size    (B, 3, H, W) uint8, channels_last strides
    numpy arrays of one shape and plain dtype   (B, ...) tensor of that dtype
    torch tensors of one shape and dtype        torch.stack
    int                                         (B,) int64
    float (ints among them)                     (B,) float64
    bool                                        (B,) bool
    tuples                                      a tuple of these, field by field
    anything else: PIL, bytes, str, None,       a list
    arrays of different sizes, dicts, lists

Bytes cross to the GPU; floats are made there. Each array is copied once, straight into the batch;
in a DataLoader worker the batch lies in the shared memory that takes it to the trainer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import get_worker_info

from .errors import CollateError

_INT64 = range(-(1 << 63), 1 << 63)

Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class Memory(Protocol):
    """Where a loader wants its batches."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a column of a batch."""

    def column(self, values: Sequence[Any]) -> torch.Tensor | None:
        """The column that these arrays or tensors are the rows of already, if they are."""


_here = threading.local()  # .memory: that of the batch which this thread collates


@contextmanager
def into(memory: Memory) -> Iterator[None]:
    """What this thread collates meanwhile goes there."""
    _here.memory = memory
    try:
        yield
    finally:
        _here.memory = None


def collate(items: Sequence[Any]) -> Any:
    """Stack items, all tuples, all dicts or all values, to a batch: a tuple, a dict, or one value.

    Raises CollateError when items differ in structure (keys, lengths), naming the first odd one.
    """
    if not items:
        raise CollateError("a batch of no items cannot be collated")
    first = items[0]
    if isinstance(first, dict):
        for i, item in enumerate(items):
            if not isinstance(item, dict) or item.keys() != first.keys():
                raise _odd(i, item, first)
        return {name: _column([item[name] for item in items]) for name in first}
    return _tuple(items) if isinstance(first, tuple) else _column(items)


def _tuple(items: Sequence[Any]) -> tuple[Any, ...]:
    first = items[0]
    for i, item in enumerate(items):
        if not isinstance(item, tuple) or len(item) != len(first):
            raise _odd(i, item, first)
    columns = [_column(column) for column in zip(*items, strict=True)]
    named = hasattr(first, "_fields")
    return type(first)(*columns) if named else tuple(columns)


def _column(values: Sequence[Any]) -> Any:
    """One field of a batch."""
    kinds = set(map(type, values))
    if len(kinds) == 1:
        (kind,) = kinds
        if kind is int:
            fits = min(values) in _INT64 and max(values) in _INT64
            return torch.tensor(values, dtype=torch.int64) if fits else list(values)
        if kind is bool:
            return torch.tensor(values, dtype=torch.bool)
        if kind is np.ndarray:
            return _arrays(values)
        if issubclass(kind, np.generic) and kind in TENSORS:
            return torch.from_numpy(np.array(values))
        if issubclass(kind, torch.Tensor):
            return _tensors(values)
    if kinds <= {int, float} and kinds:
        return torch.tensor(values, dtype=torch.float64)
    if all(issubclass(kind, tuple) for kind in kinds):
        return _tuple(values)
    return list(values)


def _arrays(arrays: Sequence[Any]) -> Any:
    shape, dtype = arrays[0].shape, arrays[0].dtype
    if dtype.type not in TENSORS or any(a.shape != shape or a.dtype != dtype for a in arrays):
        return list(arrays)
    native = dtype.newbyteorder("=")
    batch = _in_place(arrays)
    if batch is None:
        batch = empty((len(arrays), *shape), torch.from_numpy(np.empty(0, native)).dtype)
        np.stack(arrays, out=batch.numpy())
    if native == np.uint8 and len(shape) == 3 and shape[2] == 3:
        return batch.permute(0, 3, 1, 2)
    return batch


def _tensors(tensors: Sequence[torch.Tensor]) -> Any:
    first = tensors[0]
    if any(t.shape != first.shape or t.dtype != first.dtype for t in tensors):
        return list(tensors)
    if (batch := _in_place(tensors)) is not None:
        return batch
    plain = first.device.type == "cpu" and first.layout == torch.strided
    private = get_worker_info() is None and getattr(_here, "memory", None) is None
    if private or not plain or any(t.requires_grad for t in tensors):
        return torch.stack(list(tensors))
    return torch.stack(list(tensors), out=empty((len(tensors), *first.shape), first.dtype))


def _in_place(values: Sequence[Any]) -> torch.Tensor | None:
    memory: Memory | None = getattr(_here, "memory", None)
    return None if memory is None else memory.column(values)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a batch: in a worker shared memory, or the batch would be copied once more."""
    memory: Memory | None = getattr(_here, "memory", None)
    if memory is not None:
        return memory.empty(shape, dtype)
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    size = max(1, torch.Size(shape).numel()) * dtype.itemsize
    # As torch's own collate does it; there is no public way that does not copy.
    storage = torch.UntypedStorage._new_shared(size, device="cpu")  # type: ignore[no-untyped-call]
    return (
        torch.empty(0, dtype=dtype).set_(storage).view(-1)[: torch.Size(shape).numel()].view(shape)
    )


def images(
    count: int, height: int, width: int, empty: Empty
) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """A batch of images, still to be written, as `collate` lays it out; and (B, H, W, 3) of it."""
    batch = empty((count, height, width, 3), torch.uint8)
    return batch.permute(0, 3, 1, 2), batch.numpy()


def numbers(values: np.ndarray[Any, Any]) -> torch.Tensor:
    """(B,) int64, float64 or bool, as `collate` makes them of ints, floats or bools."""
    return torch.from_numpy(values)


def _odd(index: int, item: Any, first: Any) -> CollateError:
    return CollateError(
        f"item {index} of the batch is {_structure(item)}, but item 0 is {_structure(first)}; "
        "give a `collate_fn` for samples of different structure"
    )


def _structure(item: Any) -> str:
    if isinstance(item, dict):
        return f"a dict of {', '.join(map(repr, item))}"
    if isinstance(item, tuple):
        return f"a tuple of {len(item)}"
    return f"a {type(item).__name__}"


# Types of numpy that torch has as well.
TENSORS = frozenset(
    (
        *(np.bool_, np.uint8, np.int8, np.int16, np.int32, np.int64),
        *(np.float16, np.float32, np.float64, np.complex64, np.complex128),
    )
)
