"""Data that fits in memory: decoded once, into one tensor a field; a batch is then one gather.

How it works. The loader's own processes read the dataset once, in storage order, and each batch is
written to its rows. From then on the order of an epoch, which is arithmetic, is made at once, and a
batch is `tensor.index_select(0, rows)` for each field: no worker, no decoding, no transport. The
batches are those that any loader over this dataset gives, in the same order.

What is decoded once is the same in each epoch, so a transform that draws is refused: such belong
after the loader, on the device, whole batches at a time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch

from ..dataset.assemble import mark_all
from ..dataset.collate import collate, places_of, ragged_fields
from ..dataset.encoded import EncodedImages
from ..dataset.mixture import Mixture
from ..dataset.stream import Stream
from ..errors import OptionError
from ..order.epoch import Epoch
from ..order.partition import Partition
from ..order.rng import Int64s
from ..storage.local import memory_available
from ..units import show_size


class Resident:
    """Hold the records of a dataset as tensors, on the CPU or a device, by their numbers."""

    def __init__(self, stream: Stream, device: torch.device) -> None:
        _check(stream)
        self.device = device
        self._starts = np.cumsum(stream.counts) - stream.counts
        self._ragged = ragged_fields(stream.collate_fn) or ()
        self._fields = stream.item_fields
        self._columns: dict[int | str, _Column] | None = None
        self._tuple = True  # what batches are: tuples, or dicts

    @property
    def filled(self) -> bool:
        """Return True once all records are held."""
        return self._columns is not None

    @property
    def bytes(self) -> int:
        """Return the bytes of all that is held."""
        return sum(column.bytes for column in (self._columns or {}).values())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_columns": None}  # another process fills its own

    def clear(self) -> None:
        """Let it go; passes under way go on."""
        self._columns = None

    def fill(self, epoch: Epoch, batches: Iterator[Any]) -> None:
        """Take up all records: the batches of an epoch of one rank, with no tail."""
        rows = torch.from_numpy(self._numbers(epoch, epoch.flat()))
        done = 0
        columns: dict[int | str, _Column] = {}
        for batch in batches:
            self._tuple = isinstance(batch, tuple)
            fields = dict(enumerate(batch)) if self._tuple else batch
            if not columns:
                lists: Collection[int | str] = self._ragged
                if lists and self._tuple:
                    lists = places_of(lists, batch, self._fields)
                columns = {
                    name: _column(name, value, len(rows), name in lists)
                    for name, value in fields.items()
                }
                _check_room(sum(column.bytes for column in columns.values()), len(rows))
            size = 0
            for name, value in fields.items():
                size = len(value)
                columns[name].put(name, rows[done : done + size], value)
            done += size
        if done != len(rows):
            raise OptionError(f"resident: {done:,} of {len(rows):,} records came")
        for column in columns.values():
            column.finish(self.device)
        self._columns = columns

    def batches(self, share: Partition) -> Iterator[Any]:
        """Yield the batches of a rank's share, in order."""
        assert self._columns is not None
        return self._batches(self._columns, share)

    def _batches(self, columns: dict[int | str, _Column], share: Partition) -> Iterator[Any]:
        epoch, size = share.epoch, share.batch_size or 1
        rows = torch.from_numpy(self._numbers(epoch, epoch.flat())).to(self.device)
        takes = [column.take for column in columns.values()]
        exact = share.tail == "exact"
        for step in range(share.steps):
            at = share.first_unit(step) * epoch.unit
            chosen = rows[at : at + size]
            valid = len(chosen)
            if valid < size:
                again = self._numbers(epoch, share.batch(step).repeats)
                chosen = torch.cat([chosen, torch.from_numpy(again).to(self.device)])
            values = [take(chosen) for take in takes]
            batch: Any = tuple(values) if self._tuple else dict(zip(columns, values, strict=True))
            yield mark_all(batch, valid, len(chosen)) if exact else batch

    def _numbers(self, epoch: Epoch, virtual: Int64s) -> Int64s:
        """Return the numbers of records in the dataset, (n,) int64, by their virtual positions."""
        shards, records = epoch.locate(virtual)
        numbers: Int64s = self._starts[shards] + records
        return numbers


class _Column:
    """Hold a field of all records: a tensor of rows, gathered as the widest integers that fit."""

    def __init__(self, like: torch.Tensor, records: int) -> None:
        # Images come as (B, 3, H, W) with channels_last strides: their rows are (H, W, 3).
        self._images = like.dim() == 4 and like.stride(1) == 1 and like.shape[1] == 3
        self._shape, self._dtype = tuple(like.shape[1:]), like.dtype
        rows = like.permute(0, 2, 3, 1) if self._images else like
        self._stored = (records, *rows.shape[1:])
        self.bytes = records * rows[0].numel() * like.element_size()
        self._rows = torch.empty(0)  # until the first ones come

    def put(self, name: int | str, rows: torch.Tensor, values: Any) -> None:
        """Take up the values of some rows. Raises OptionError for others than the first were."""
        if not isinstance(values, torch.Tensor) or (
            (tuple(values.shape[1:]), values.dtype) != (self._shape, self._dtype)
        ):
            raise _odd(name, f"tensors of {self._dtype} {self._shape}")
        if not len(self._rows):
            self._rows = torch.empty(self._stored, dtype=self._dtype)
        self._rows[rows] = values.permute(0, 2, 3, 1) if self._images else values

    def finish(self, device: torch.device) -> None:
        """Move the rows, all of which are there, to where batches are gathered."""
        self._rows = self._rows.to(device)
        if len(self._stored) == 1 or not self._rows.numel():
            return
        self._rows = self._rows.flatten(1)
        # Rows are copied element by element: 784 bytes as 98 words take a third of the time.
        for dtype in (torch.int64, torch.int32, torch.int16):
            if self._rows.shape[1] * self._dtype.itemsize % dtype.itemsize == 0:
                self._rows = self._rows.view(dtype)
                break

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of a batch, in memory of their own."""
        got = self._rows.index_select(0, rows)
        if got.dtype != self._dtype:
            got = got.view(self._dtype)
        if len(self._stored) > 2:
            got = got.view(len(rows), *self._stored[1:])
        return got.permute(0, 3, 1, 2) if self._images else got


class _ListColumn(_Column):
    """Hold a field of values that are no tensors: objects, kept as they are."""

    def __init__(self, like: list[Any], records: int, ragged: bool) -> None:
        self._ragged = (0,) if ragged else ()
        self._values: list[Any] = [None] * records
        self.bytes = math.ceil(sum(map(_nbytes, like)) / max(1, len(like)) * records)  # about

    def put(self, name: int | str, rows: torch.Tensor, values: Any) -> None:
        """Take up the values of some rows. Raises OptionError for others than the first were."""
        if not isinstance(values, list):
            raise _odd(name, "a list")
        for row, value in zip(rows.tolist(), values, strict=True):
            self._values[row] = value

    def finish(self, device: torch.device) -> None:
        """Leave the objects where they are."""

    def take(self, rows: torch.Tensor) -> Any:
        """Return the values of a batch: stacked, or a list of them."""
        values = self._values
        # What no batch of the filling could stack, one of another epoch may.
        (column,) = collate([(values[row],) for row in rows.tolist()], ragged=self._ragged)
        return column


class _FileColumn(_ListColumn):
    """Hold the image files of all records, as bytes."""

    def put(self, name: int | str, rows: torch.Tensor, values: Any) -> None:
        """Take up the files of some rows. Raises OptionError for others than the first were."""
        if not isinstance(values, EncodedImages):
            raise _odd(name, "image files")
        super().put(name, rows, values.tolist())

    def take(self, rows: torch.Tensor) -> Any:
        """Return the files of a batch, in a buffer of their own."""
        return EncodedImages.join([self._values[row] for row in rows.tolist()])


def _check(stream: Stream) -> None:
    """Raise OptionError for what cannot be resident."""
    if isinstance(stream, Mixture):
        raise OptionError("resident holds one ShardDataset, and this is a mixture; leave it out")
    if stream.draws:
        raise OptionError(
            "resident decodes once, and this transform, or map, draws another crop in each epoch: "
            "give one that does not, CenterCrop(size) or decode='numpy', and crop and flip whole "
            "batches behind the loader; or leave resident out"
        )
    if stream.skips:
        raise OptionError(
            "resident reads each record once, and what it skips then would be no news in later "
            "epochs: leave on_error out, or leave resident out"
        )
    if stream.device_crop is not None:
        raise OptionError(
            "resident decodes once, and with decode='cuda' the device decodes in each epoch: give "
            "decode='pil', or leave resident out"
        )
    if ragged_fields(stream.collate_fn) is None:
        raise OptionError("resident gathers the batches itself: leave collate_fn out")


def _odd(name: int | str, what: str) -> OptionError:
    """Return the error of a field that comes in two ways."""
    return OptionError(
        f"resident: field {name!r} comes as {what} in one batch, and otherwise in another; give a "
        "transform that makes all samples alike"
    )


def _column(name: int | str, values: Any, records: int, ragged: bool) -> _Column:
    """Return a column for values like these, of a batch. Raises OptionError."""
    if isinstance(values, torch.Tensor):
        return _Column(values, records)
    if isinstance(values, list):
        return _ListColumn(values, records, ragged)
    if isinstance(values, EncodedImages):
        return _FileColumn(values.tolist(), records, ragged)
    raise OptionError(
        f"resident: field {name!r} comes as a {type(values).__name__} of columns: expected one "
        "value a sample; give a transform that returns one array, or leave resident out"
    )


def _nbytes(value: Any) -> int:
    """Return the bytes of an object; of an image, those of its pixels, decoded."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return int(value.nbytes)
    if hasattr(value, "getbands"):  # PIL's
        return int(math.prod(value.size)) * len(value.getbands())
    return sys.getsizeof(value)


def _check_room(needed: int, records: int) -> None:
    """Raise OptionError where so many bytes are not available."""
    available = memory_available()
    if needed > available:
        raise OptionError(
            f"resident: {records:,} decoded records take {show_size(needed)}, and "
            f"{show_size(available)} of memory are available; make them smaller (a transform, "
            "`pack --resize`), choose some (where=), or leave resident out"
        )
