"""Declare what loaders, iterations and mixtures ask of a dataset.

    BatchReader   reads the batches of a consumer's share: what a loader process needs
    EpochReader   has an epoch, too, and ranks: what an iteration needs
    Component     one dataset of a mixture
    BatchIterator tells how its batches came: what an iteration asks of a loader, and the meter

ShardDataset is the first three; a mixture is the first two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ..order.epoch import Tail
from ..order.options import Options
from ..order.partition import Partition, RowRanges
from ..order.rng import Int64s
from .assemble import PendingBatch
from .epoch_state import EpochState, Ticket
from .ranks import Consumers


class BatchReader(Protocol):
    """Read the batches of any consumer's share, whoever decided on it."""

    options: Options  # a loader process sets those of the pass that it makes
    counts: Int64s  # (shards,) int64: the records of each that are read
    collate_fn: Callable[[list[Any]], Any]

    @property
    def batch_size(self) -> int | None:
        """Return the rows of a batch; None: items are handed out one by one."""

    @property
    def tail(self) -> Tail:
        """Return the treatment of the rows that fill no batch on every rank."""

    @property
    def image_place(self) -> int | str | None:
        """Return the field of an item that a built-in transform makes; None: there is none."""

    @property
    def item_fields(self) -> tuple[str, ...] | None:
        """Return the names of the fields of items that are tuples, where they are known."""

    @property
    def encoded_fields(self) -> Collection[int | str]:
        """Return the fields of items that are the bytes of image files, by name or place."""

    @property
    def device_crop(self) -> tuple[tuple[int, int], str] | None:
        """Return (H, W) and interpolation of DeviceCrops in items; None: there are none."""

    def read_batches(self, share: Partition, consumers: Consumers, /) -> Iterator[PendingBatch]:
        """Read a consumer's share, in order. The `rows` of each are used up before the next."""


class EpochReader(BatchReader, Protocol):
    """Read epoch after epoch, on some rank."""

    ticket: Ticket | None  # of the worker that this process is, or is to start

    @property
    def name(self) -> str:
        """Return the name of the dataset in messages."""

    @property
    def epochs(self) -> EpochState:
        """Return the state that this process shares with the workers of its DataLoaders."""

    @property
    def evaluates(self) -> bool:
        """Return whether every pass reads the same epoch, until `set_epoch`."""

    def ranks(self) -> tuple[int, int]:
        """Return rank and world size. Raises OptionError when they contradict the launcher."""

    def share_of(
        self, epoch: int, worker: int = 0, num_workers: int = 1, start: int = 0, done: int = 0
    ) -> Partition:
        """Return a worker's share of an epoch, on this rank. Raises OptionError."""

    def state_at(self, epoch: int, units: int) -> dict[str, Any]:
        """Make the saved state of a place in an epoch: plain JSON."""

    def fingerprint(self) -> int:
        """Return a number that tells one order from another."""


class Component(BatchReader, Protocol):
    """Be one dataset of a mixture."""

    given_ranks: tuple[int, int] | None  # rank and world size, where the user said them
    label_names: Sequence[str] | None  # of labels as they are stored; None: not known

    @property
    def structure(self) -> Any:
        """Return what all datasets of a mixture must have alike; `Any` where a map makes items."""

    @property
    def records(self) -> int:
        """Return the number of records of an epoch."""

    def source_identity(self) -> dict[str, Any]:
        """Tell which records are read: what a saved state must have been saved of."""

    def options_after(self, state: Mapping[str, Any]) -> Options:
        """Return the options to go on with after this state. Raises StateError."""

    def record_name(self, number: int) -> str:
        """Return the name of a record in messages, by its number in the dataset."""

    def read_batches(
        self,
        reads: Partition | RowRanges,
        consumers: Consumers,
        /,
        *,
        hands_out: bool | None = None,
    ) -> Iterator[PendingBatch]:
        """Read as BatchReader does. RowRanges are the parts of passes that a mixture takes.

        hands_out: as of the mixture, which hands the items out; None: this dataset does.
        """


class BatchIterator(Iterator[Any]):
    """Iterate over batches, and tell how the last one came, as far as that is known."""

    @property
    def batch_stats(self) -> Any:
        """Return the figures of the batch handed out last, a loader's BatchStats; None: none."""
        return None

    @property
    def blocked_s(self) -> float:
        """Return the seconds of the last next() in which a device was waited for."""
        return 0.0

    @property
    def idle_s(self) -> float | None:
        """Return the seconds for which the device had nothing to do when the last batch came; None:
        it is not known."""
        return None

    @property
    def behind(self) -> bool:
        """Return True if the device was a whole step behind when the last batch was asked for;
        False: it was not, or it is not known."""
        return False

    def ready(self) -> bool | None:
        """Return True if the next batch would come at once; None: it is not known."""
        return None
