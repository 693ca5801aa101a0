"""Seconds and rows of a batch: loaders fill them in, and the meter sums them up."""

from __future__ import annotations

from typing import NamedTuple


class BatchStats(NamedTuple):
    """Say how one batch was made: the attribute `batch_stats` of a loader's iterator.

    Seconds of the first four stages are summed over the rows, in whatever threads they were made.
    A built-in transform, which decodes and crops in one call, counts as decode.
    """

    rows: int = 0
    wait_s: float = 0.0  # the trainer waited in next()
    read_s: float = 0.0
    decode_s: float = 0.0
    transform_s: float = 0.0
    collate_s: float = 0.0
    transport_s: float = 0.0  # the trainer's own time to take the batch: message, mapping, copying
    device_s: float = 0.0  # its way to the device
    worker: int = 0  # which loader process
    slowest_s: float = 0.0  # the row that took longest
    slowest_record: int = -1  # its number in the dataset
    slowest_key: str = ""
    cpu_s: float = 0.0  # CPU time of its process since its batch before; 0: not known
