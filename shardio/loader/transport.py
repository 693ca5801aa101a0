"""The transport of a batch to another process: large tensors in its buffer, the rest pickled.

    batch --wrap--> offsets of tensors in the buffer, and a small pickle --unwrap--> the same batch

Any structure of tensors passes: tuples, dicts, lists, PIL images, strings, objects. A tensor that
was made in the buffer stays where it is; another large one is copied there, once; a small one
travels within the pickle, so that who keeps the labels of an epoch does not keep its images. The
pickle is between two processes of one program, as in torch's own DataLoader; none is ever read from
disk.
"""

from __future__ import annotations

import io
import pickle
from functools import cache
from typing import Any

import numpy as np
import torch

from ..dataset.assemble import is_only_values
from ..dataset.encoded import EncodedImages, from_parts
from .buffer_pool import Buffer, Bytes

# Bytes of a tensor from which on it lies in the buffer. Below, a copy costs less (8 us) than a view
# of 38 MB costs who keeps it.
SMALL = 32 << 10
_INLINE = 64 << 10  # bytes of a pickle that go through the socket; more would fill its buffer


# What is sent of a batch besides its buffer: its pickle, or where that begins and ends there.
WrappedBatch = bytes | tuple[int, int]

# A tensor: where it begins in the buffer, or its bytes; dtype, shape, stride. The dtype by name,
# and no class: to look either up takes the trainer 3 us.
_Place = tuple[int | bytes, str, tuple[int, ...], tuple[int, ...]]
_Files = tuple[_Place, bytes]  # encoded images: where their buffer is, and their offsets


def wrap(batch: Any, buffer: Buffer) -> WrappedBatch:
    """Place in the buffer what of the batch is not there yet. Raises what pickling raises."""
    if type(batch) is tuple and all(map(_has_place, batch)):
        # Most batches; a pickler that asks for the place of each object takes 20 us more.
        places = [_place(value, buffer) for value in batch]
        data: Any = _TUPLE + pickle.dumps(places, protocol=5)
    else:
        file = io.BytesIO()
        _Wrapper(file, buffer).dump(batch)
        data = file.getbuffer()
    if len(data) < _INLINE:
        return bytes(data)
    start, place = buffer.allocate(len(data))
    place[:] = np.frombuffer(data, np.uint8)
    return start, start + len(data)


def unwrap(wrapped: WrappedBatch, memory: Bytes) -> Any:
    """Return the batch. Its large tensors are views of `memory`, the buffer's bytes."""
    pickled: Any = wrapped if isinstance(wrapped, bytes) else memory[slice(*wrapped)].data
    if pickled[0] == _TUPLE[0]:
        return tuple([_load(place, memory) for place in pickle.loads(memoryview(pickled)[1:])])
    return _Unwrapper(io.BytesIO(pickled), memory).load()


_TUPLE = b"T"  # before the places of a tuple's values, all of which have one; no pickle begins so


def _has_place(value: Any) -> bool:
    """Return True if a value travels in the buffer, or as its bytes."""
    if type(value) is EncodedImages:
        value = value.buffer
    return type(value) is torch.Tensor and is_only_values(value)


def _place(value: Any, buffer: Buffer) -> _Place | _Files:
    """Return the place of a tensor, or of encoded images."""
    if type(value) is EncodedImages:
        return _tensor_place(value.buffer, buffer), value.offsets.numpy().tobytes()
    return _tensor_place(value, buffer)


def _tensor_place(value: torch.Tensor, buffer: Buffer) -> _Place:
    """Return the place of a tensor, to which it is copied if need be."""
    name, shape, stride = _name(value.dtype), value.shape, value.stride()
    start = buffer.offset(value.data_ptr(), value.nbytes) if value.nbytes else None
    if start is not None and _dense(value):
        return start, name, tuple(shape), stride
    if 0 in stride and value.nbytes:  # expanded: one constant may stand for gigabytes
        value = value[tuple([slice(1) if step == 0 else slice(None) for step in stride])]
    if not _dense(value):
        value = value.contiguous()
        steps = zip(stride, value.stride(), strict=True)
        stride = tuple([old and new for old, new in steps])
    # The same bytes in the order of memory, whatever the strides: channels_last stays so.
    flat = value.as_strided((value.numel(),), (1,)).view(torch.uint8)
    if value.nbytes < SMALL:
        return flat.numpy().tobytes(), name, tuple(shape), stride
    start, place = buffer.allocate(value.nbytes)
    torch.from_numpy(place).copy_(flat)
    return start, name, tuple(shape), stride


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _load(place: Any, memory: Any) -> Any:
    """Return what a place is of: a tensor, or encoded images."""
    if len(place) == 2:
        return from_parts(_load(place[0], memory), place[1])
    data, name, shape, stride = place
    dtype = getattr(torch, name)
    if data == b"":
        return torch.empty_strided(shape, stride, dtype=dtype)
    if isinstance(data, bytes):
        memory, data = bytearray(data), 0  # the user's own, so it is to be writable
    count = 1 + sum([(size - 1) * step for size, step in zip(shape, stride, strict=True)])
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=data)
    if len(shape) == 1 == stride[0]:
        return flat
    # No view: who saves the tensor saves nothing else of the buffer, and may call detach_().
    return flat.set_(flat.untyped_storage(), 0, shape, stride)


class _Wrapper(pickle.Pickler):
    """Pickle a batch, with its tensors beside: in the buffer, or as bytes."""

    def __init__(self, file: io.BytesIO, buffer: Buffer) -> None:
        super().__init__(file, protocol=5)
        self._buffer = buffer

    def persistent_id(self, value: Any) -> _Place | _Files | None:
        """Return the place of a tensor; None: the value is pickled as ever."""
        return _place(value, self._buffer) if _has_place(value) else None


class _Unwrapper(pickle.Unpickler):
    """Unpickle a batch, with its tensors as views of a buffer, or in memory of their own."""

    def __init__(self, file: io.BytesIO, memory: Bytes) -> None:
        super().__init__(file)
        self._memory = memory

    def persistent_load(self, place: Any) -> Any:
        """Return what a place is of."""
        return _load(place, self._memory)


def _dense(tensor: torch.Tensor) -> bool:
    """Return True if its values, in some order, fill its memory without gaps or overlaps."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
