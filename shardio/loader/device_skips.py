"""Rows of a batch whose image the device cannot decode: other rows of the batch take their place.

How it works. With decode="cuda" a worker reads the header of an image, and the trainer's decoder
finds out that the rest is no image. By then the batch is made. So such a row becomes a copy of the
next good row of the batch, in all its columns, and the record is noted as those are that a worker
skips. What the rows of a batch are is known of what `shardio.collate` makes; where a column has no
row for each image, the error is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..dataset.assemble import VALID
from ..dataset.encoded import EncodedImages
from ..dataset.shard_dataset import ShardDataset
from ..dataset.skipping import SkippingPass
from ..errors import DecodeError, SkipError


class Undecoded(NamedTuple):
    """A row of a batch, the number of its record in the dataset, and why it is not decoded."""

    row: int
    number: int
    error: DecodeError


class DeviceSkips:
    """Fill the rows of one pass over a dataset that notes what it skips. For any thread.

    What is skipped here counts by itself: a pass may skip as many, besides those of its workers.
    """

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset
        self._pass: SkippingPass | None = None  # nothing was skipped

    def fill(self, batch: Any, undecoded: Sequence[Undecoded], size: int) -> Any:
        """Return a batch of `size` rows on the device, without rows that have no image.

        Raises SkipError, and the DecodeError of the first where its columns are of another size.
        """
        bad = {one.row for one in undecoded}
        for one in undecoded:
            self._note(one)
        good = [row for row in range(size) if row not in bad]
        first = undecoded[0].error
        if not good:
            raise SkipError(
                f"{first}: on_error='skip' fills its row with another one of its batch, and of "
                f"{size:,} the device can decode none"
            ) from first
        fills = {row: next((one for one in good if one > row), good[0]) for row in sorted(bad)}
        assert self._pass is not None
        self._pass.count_good()
        try:
            if isinstance(batch, list):  # that torch's DataLoader makes of a tuple
                filled: Any = [_columns(column, fills, size) for column in batch]
            else:
                filled = _columns(batch, fills, size)
            if self._dataset.tail == "exact":
                _mark(filled, [*fills])
        except _NoRowsError:
            raise first from None
        return filled

    def end(self) -> None:
        """Say at the end of the pass how many were skipped."""
        if self._pass is not None:
            self._pass.tell()

    def _note(self, one: Undecoded) -> None:
        dataset = self._dataset
        if self._pass is None:
            rows = -(-dataset.records // dataset.ranks()[1])
            self._pass = SkippingPass(dataset.skips[0], dataset.epochs.epoch, rows, own=True)
        at, record = dataset.reader.locate(one.number)
        shard = dataset.reader.shard(at)
        self._pass.skip((one.number, shard, record, None), b"", one.error)


def device_skips(dataset: object) -> DeviceSkips | None:
    """Return what fills rows of batches of a dataset; None: there, errors are raised."""
    if isinstance(dataset, ShardDataset) and dataset.skips:
        return DeviceSkips(dataset)
    return None


class _NoRowsError(Exception):
    """Say that a column has not one row for each image."""


def _columns(batch: Any, fills: dict[int, int], size: int) -> Any:
    """Fill the rows of all columns of a batch: of dicts and tuples, nested to any depth."""
    if type(batch) is dict:
        return {name: _columns(column, fills, size) for name, column in batch.items()}
    if isinstance(batch, tuple):
        columns = [_columns(column, fills, size) for column in batch]
        return type(batch)(*columns) if hasattr(batch, "_fields") else tuple(columns)
    if isinstance(batch, torch.Tensor):
        if batch.layout is not torch.strided or not batch.ndim or len(batch) != size:
            raise _NoRowsError
        batch = batch.clone()  # it may be the caller's own
        batch[[*fills]] = batch[[*fills.values()]]
        return batch
    if not isinstance(batch, (list, EncodedImages)) or len(batch) != size:
        raise _NoRowsError
    rows = [batch[fills.get(row, row)] for row in range(size)]
    return EncodedImages.join(rows) if isinstance(batch, EncodedImages) else rows


def _mark(batch: Any, rows: list[int]) -> None:
    """Mark filled rows in the field that tail="exact" adds; of a tuple it is the last."""
    valid = batch.get(VALID) if isinstance(batch, dict) else batch[-1]
    if not isinstance(valid, torch.Tensor) or valid.dtype != torch.bool:
        raise _NoRowsError
    valid[rows] = False
