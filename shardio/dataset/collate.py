"""Items to one batch: images as one uint8 tensor, numbers as tensors, all else as lists.

    (H, W, 3) uint8 numpy arrays of one size    (B, 3, H, W) uint8, channels_last strides
    numpy arrays of one shape and plain dtype   (B, ...) tensor of that dtype
    torch tensors of one shape and dtype        torch.stack; images that lie in memory as (H, W, 3)
                                                keep channels_last strides
    the bytes of image files (decode=None)      EncodedImages: one uint8 buffer, and offsets
    DeviceCrops (decode="cuda")                 EncodedCrops: EncodedImages, and the crop of each
    int                                         (B,) int64
    float (ints among them)                     (B,) float64
    bool                                        (B,) bool
    tuples                                      a tuple of these, field by field
    anything else: PIL, bytes, str, dicts,      a list
    lists; and the fields of `ragged`

Arrays, tensors or crops that differ in shape or dtype, and a None among them, numbers or image
files, are an error: they would be a tensor in one batch and a list in the next. Which bytes are
image files the dataset says, to its own batches: to others that call `collate` all bytes are alike.

Bytes cross to the GPU; floats are made there. Each array is copied once, straight into the batch;
in a DataLoader worker the batch lies in the shared memory that takes it to the trainer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from ..errors import CollateError, OptionError, printable
from ..images.device_crop import DeviceCrop
from .encoded import PICKLED, Empty, EncodedImages
from .encoded_crops import EncodedCrops

_INT64 = range(-(1 << 63), 1 << 63)


def _refuse_crops(batch: Any, *, collate_fn_map: Any = None) -> NoReturn:
    """Say what makes a batch of DeviceCrops: torch's own function does not."""
    raise CollateError(
        'the dataset yields samples of decode="cuda", and DataLoader\'s own collate_fn makes no '
        "batch of them: give batch_size to the dataset, and batch_size=None to the DataLoader; or "
        "give the DataLoader collate_fn=shardio.collate"
    )


default_collate_fn_map[DeviceCrop] = _refuse_crops


class Memory(Protocol):
    """Memory that a loader gives to its batches."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Take memory for a column of a batch."""

    def column(self, values: Sequence[Any]) -> torch.Tensor | None:
        """Return the column that these arrays or tensors are the rows of already, if they are."""


class Names(NamedTuple):
    """Names of the items of a batch, and of the fields of each, in messages."""

    records: Callable[[], Sequence[str]]
    fields: Sequence[str] | None


class _Here(threading.local):
    """What this thread collates for."""

    memory: Memory | None = None
    names: Names | None = None
    encoded: Collection[int | str] = ()


_here = _Here()


@contextmanager
def collating_into(
    memory: Memory | None, names: Names | None = None, encoded: Collection[int | str] = ()
) -> Iterator[None]:
    """Put what this thread collates meanwhile into that memory, and name items so.

    encoded: the fields of items, by name or place, that become EncodedImages.
    """
    _here.memory, _here.names, _here.encoded = memory, names, encoded
    try:
        yield
    finally:
        _here.memory = _here.names = None
        _here.encoded = ()


def ragged_fields(collate_fn: Any) -> tuple[int | str, ...] | None:
    """Return the ragged fields of a collate_fn that is `collate`, or a partial of it; else None."""
    if collate_fn is collate:
        return ()
    if isinstance(collate_fn, partial) and collate_fn.func is collate and not collate_fn.args:
        return _ragged(collate_fn.keywords.get("ragged", ()))
    return None


def collate(items: Sequence[Any], *, ragged: Sequence[int | str] = ()) -> Any:
    """Stack items, all tuples, all dicts or all values, to a batch: a tuple, a dict, or one value.

    ragged: fields that stay lists, of dicts by name, of tuples by place (or by name, where the
    samples are those of a ShardDataset with `fields` and without `map`).

    As a collate_fn: `functools.partial(shardio.collate, ragged=("boxes",))`.

    Raises CollateError when items differ in structure (keys, lengths), or in shape, naming two.
    """
    if not items:
        raise CollateError("a batch of no items cannot be collated")
    first = items[0]
    lists = _ragged(ragged) if ragged else ()
    if isinstance(first, dict):
        for i, item in enumerate(items):
            if not isinstance(item, dict) or item.keys() != first.keys():
                raise _odd(items, i)
        _check_ragged(lists, list(first))
        return {
            name: [item[name] for item in items]
            if name in lists
            else _field_of([item[name] for item in items], items, name)
            for name in first
        }
    if isinstance(first, tuple):
        return _tuple(items, lists, _field_of)
    _check_ragged(lists, [])
    return _column(items, items, None)


def _tuple(
    items: Sequence[Any], lists: Sequence[int | str], make: Callable[..., Any]
) -> tuple[Any, ...]:
    """Collate tuples; make: a column, as _column does it."""
    first = items[0]
    for i, item in enumerate(items):
        if not isinstance(item, tuple) or len(item) != len(first):
            raise _odd(items, i)
    places = places_of(lists, first, _fields(len(first))) if lists else frozenset()
    columns = [
        list(column) if i in places else make(column, items, i)
        for i, column in enumerate(zip(*items, strict=True))
    ]
    named = hasattr(first, "_fields")
    return type(first)(*columns) if named else tuple(columns)


def _field_of(values: Sequence[Any], items: Sequence[Any], name: int | str) -> Any:
    """Make one field of a batch, of the items themselves: it may be one of image files."""
    kinds = set(map(type, values)) if name in _here.encoded else set()
    if bytes not in kinds:
        return _column(values, items, name)
    if len(kinds) > 1:
        raise _unequal(values, items, name)
    return EncodedImages.join(values, empty_files)


def _column(values: Sequence[Any], items: Sequence[Any], name: int | str | None) -> Any:
    """Make one field of a batch; items, name: of which it is, for messages."""
    kinds = set(map(type, values))
    if kinds == {int}:
        fits = min(values) in _INT64 and max(values) in _INT64
        return torch.tensor(values, dtype=torch.int64) if fits else list(values)
    if kinds == {bool}:
        return torch.tensor(values, dtype=torch.bool)
    if kinds <= {int, float}:
        return torch.tensor(values, dtype=torch.float64)
    if len(kinds) == 1 and kinds <= TENSORS:
        return torch.from_numpy(np.array(values))
    if kinds == {DeviceCrop}:
        if len({(crop.shape, crop.interpolation) for crop in values}) > 1:
            raise _unequal(values, items, name)
        return EncodedCrops.join(values, empty_files)
    if all(issubclass(kind, tuple) for kind in kinds):
        return _tuple(values, (), _column)
    if all(issubclass(kind, torch.Tensor) for kind in kinds):
        return _tensors(values, items, name)
    if all(issubclass(kind, np.ndarray) for kind in kinds):
        masked = any(issubclass(kind, np.ma.MaskedArray) for kind in kinds)
        return list(values) if masked else _arrays([*map(np.asarray, values)], items, name)
    unlike = _STACKED if type(None) not in kinds else _STACKED + _NUMBERS
    if any(issubclass(kind, unlike) for kind in kinds):
        raise _unequal(values, items, name)
    return list(values)


def _arrays(arrays: Sequence[Any], items: Sequence[Any], name: int | str | None) -> Any:
    shape, dtype = arrays[0].shape, arrays[0].dtype
    if dtype.type not in TENSORS and not any(a.dtype.type in TENSORS for a in arrays):
        return list(arrays)  # of str, dates, objects
    if any(a.shape != shape or a.dtype != dtype for a in arrays):
        raise _unequal(arrays, items, name)
    native = dtype.newbyteorder("=")
    batch = _in_place(arrays)
    if batch is None:
        batch = empty((len(arrays), *shape), torch.from_numpy(np.empty(0, native)).dtype)
        np.stack(arrays, out=batch.numpy())
    if native == np.uint8 and len(shape) == 3 and shape[2] == 3:
        return batch.permute(0, 3, 1, 2)
    return batch


def _tensors(tensors: Sequence[torch.Tensor], items: Sequence[Any], name: int | str | None) -> Any:
    first = tensors[0]
    if any(t.shape != first.shape or t.dtype != first.dtype for t in tensors):
        raise _unequal(tensors, items, name)
    if any(t.is_quantized for t in tensors):
        raise CollateError(
            f"{_field(name)} holds quantised tensors ({_dtype(first)}), and these cannot be "
            "stacked; return tensor.dequantize() or tensor.int_repr() from your transform"
        )
    if all(map(is_planes, tensors)):
        return _arrays([rows_of(t) for t in tensors], items, name)
    if (batch := _in_place(tensors)) is not None:
        return batch
    plain = first.device.type == "cpu" and first.layout == torch.strided
    private = get_worker_info() is None and _here.memory is None
    if private or not plain or any(t.requires_grad for t in tensors):
        return torch.stack(list(tensors))
    return torch.stack(list(tensors), out=empty((len(tensors), *first.shape), first.dtype))


def planes(pixels: Any) -> Any:
    """Turn the pixels of a built-in transform, (H, W, 3) uint8, into a (3, H, W) tensor.

    A view: its strides are those of channels_last. Of other arrays the tensor; of a DeviceCrop
    itself.
    """
    if type(pixels) is DeviceCrop or pixels.dtype.type not in TENSORS:
        return pixels
    tensor = torch.from_numpy(pixels)
    if pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3:
        return tensor.permute(2, 0, 1)
    return tensor


def is_planes(tensor: torch.Tensor) -> bool:
    """Return whether this is an image of `planes`: (3, H, W) uint8 that lies as (H, W, 3)."""
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype == torch.uint8
        and tensor.dim() == 3
        and tensor.shape[0] == 3
        and tensor.stride() == (1, 3 * tensor.shape[2], 3)
        and tensor.device.type == "cpu"
    )


def rows_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the (H, W, 3) array that a tensor of `planes` is a view of."""
    array: np.ndarray[Any, Any] = tensor.permute(1, 2, 0).numpy()
    return array


def _in_place(values: Sequence[Any]) -> torch.Tensor | None:
    return None if _here.memory is None else _here.memory.column(values)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Take memory for a batch: where this thread collates into, or `allocate`."""
    return allocate(shape, dtype) if _here.memory is None else _here.memory.empty(shape, dtype)


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Take new memory: shared memory in a worker, or it would be copied once more."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    size = max(1, torch.Size(shape).numel()) * dtype.itemsize
    # As torch's own collate does it; there is no public way that does not copy.
    storage = torch.UntypedStorage._new_shared(size, device="cpu")  # type: ignore[no-untyped-call]
    return (
        torch.empty(0, dtype=dtype).set_(storage).view(-1)[: torch.Size(shape).numel()].view(shape)
    )


def empty_files(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Take memory for the image files of a batch: as `empty`, but where they are pickled whole."""
    if _here.memory is None and shape[0] < PICKLED:
        return torch.empty(shape, dtype=dtype)
    return empty(shape, dtype)


def images(
    count: int, height: int, width: int, empty: Empty
) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """Take a batch of images, still to be written, as `collate` has it; and its (B, H, W, 3)."""
    batch = empty((count, height, width, 3), torch.uint8)
    return batch.permute(0, 3, 1, 2), batch.numpy()


def numbers(values: np.ndarray[Any, Any]) -> torch.Tensor:
    """Make the (B,) int64, float64 or bool that `collate` makes of ints, floats or bools."""
    return torch.from_numpy(values)


# --- messages -------------------------------------------------------------------------------------


def _ragged(given: Any) -> tuple[int | str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise OptionError(
            f"collate: ragged is {given!r}, expected several fields, such as ({given!r},)"
        )
    return tuple(given)


def _check_ragged(lists: Sequence[int | str], known: Sequence[Any]) -> None:
    for one in lists:
        if one not in known:
            raise CollateError(
                f"collate: ragged has {one!r}, but samples "
                + (f"have {', '.join(map(repr, known))}" if known else "are single values")
            )


def places_of(
    lists: Collection[int | str], sample: tuple[Any, ...], fields: Sequence[str] | None
) -> frozenset[int]:
    """Return the places of ragged fields in a tuple; fields: their names. Raises CollateError."""
    fields = getattr(sample, "_fields", fields)
    if fields is not None and len(fields) != len(sample):
        fields = None
    found = set()
    for one in lists:
        if isinstance(one, int) and 0 <= one < len(sample):
            found.add(one)
        elif fields is not None and one in fields:
            found.add(fields.index(one))
        else:
            raise CollateError(
                f"collate: ragged has {one!r}, but samples are tuples of "
                + (
                    ", ".join(map(repr, fields))
                    if fields
                    else f"{len(sample)} whose names are not known: give a place, from 0 on"
                )
            )
    return frozenset(found)


def _fields(count: int) -> Sequence[str] | None:
    names = _here.names
    fields = None if names is None else names.fields
    return fields if fields is not None and len(fields) == count else None


def _unequal(values: Sequence[Any], items: Sequence[Any], name: int | str | None) -> CollateError:
    """Make the error for values that would be a tensor in one batch, and a list in another."""
    first = next(i for i, value in enumerate(values) if value is not None)
    like = _like(values[first])
    other = next((i for i, value in enumerate(values) if _like(value) != like), first)
    field = _field(name, len(items[0]) if isinstance(items[0], tuple) else 0)
    said = repr(name)
    if isinstance(name, int) and (fields := _fields(len(items[0]))) is not None:
        said = repr(fields[name])
    advice = "a transform that makes them alike (RandomResizedCrop, CenterCrop), or "
    if values[first] is None or values[other] is None:
        advice = "a value for those without one (target_transform, map), or "
    advice += f"collate_fn=functools.partial(shardio.collate, ragged=({said},)), which gives a list"
    if name is None:
        advice = "a collate_fn of your own"
    return CollateError(
        f"{field} cannot be stacked to one tensor: {_item(items, first)} has {like}, and "
        f"{_item(items, other)} has {_like(values[other])}; give {advice}"
    )


def _like(value: Any) -> str:
    """Describe what two values must have alike to be rows of one tensor."""
    if value is None:
        return "None"
    if isinstance(value, bytes):
        return "an image file"
    if isinstance(value, DeviceCrop):
        return f"a crop {value.shape} by {value.interpolation}, for the device"
    if isinstance(value, _ARRAYS):
        return f"{tuple(value.shape)} {_dtype(value)}"
    return f"a {type(value).__name__}" if not isinstance(value, int | float) else "a number"


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _field(name: int | str | None, count: int = 0) -> str:
    """Return what messages call a field of tuples of so many."""
    if name is None:
        return "this batch"
    fields = _fields(count) if isinstance(name, int) else None
    return f"field {(fields[name] if fields else name)!r}"  # type: ignore[index]


def _item(items: Sequence[Any], place: int) -> str:
    """Return what messages call an item of the batch."""
    names = _here.names
    if names is not None:
        records = names.records()
        if len(records) == len(items):
            return records[place]
    item = items[place]
    key = item.get("__key__") if isinstance(item, dict) else None
    shown = f", {printable(key)}," if isinstance(key, bytes | str) else ""
    return f"item {place} of the batch{shown}"


def _odd(items: Sequence[Any], place: int) -> CollateError:
    return CollateError(
        f"{_item(items, place)} is {_structure(items[place])}, but {_item(items, 0)} is "
        f"{_structure(items[0])}; give a `collate_fn` for samples of different structure"
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
        *(np.bool_, np.uint8, np.uint16, np.int8, np.int16, np.int32, np.int64),
        *(np.float16, np.float32, np.float64, np.complex64, np.complex128),
    )
)
_ARRAYS = (np.ndarray, torch.Tensor)
_STACKED = (*_ARRAYS, DeviceCrop)
_NUMBERS = (int, float, np.number, np.bool_)
