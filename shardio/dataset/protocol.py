"""Declare what loaders, iterations and mixtures ask of a dataset.

    ShareReader   reads the batches of one consumer's share of an epoch
    BatchReader   gives a ShareReader of any share: what a loader process needs
    EpochReader   has an epoch, too, and ranks: what an iteration needs
    Component     one dataset of a mixture
    BatchIterator tells how its batches came: what an iteration asks of a loader, and the meter

ShardDataset is a BatchReader, an EpochReader and a Component; a mixture the first two of these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ..order.options import Options
from ..order.partition import Partition, RowRanges
from ..order.rng import Int64s
from .decode import ThisRecord
from .encoded import Empty
from .epoch_state import EpochState, Ticket
from .ranks import Consumers
from .skipping import Skips


class BatchRows(Protocol):
    """Tell the rows of a batch that is not made yet. Without a batch_size: of some samples."""

    @property
    def valid(self) -> int:
        """Count the epoch's own rows; those after them repeat some."""

    @property
    def size(self) -> int:
        """Count all rows."""


class ShareReader(ABC):
    """Read the batches of one consumer's share of an epoch, and make items of their rows."""

    @abstractmethod
    def __iter__(self) -> Iterator[BatchRows]:
        """Begin to read, and iterate over the rows of each batch, in order. Only once."""

    @abstractmethod
    def rows(self, batch: Any, /) -> Iterator[Any]:
        """Iterate over the rows of a batch, in order, before the next batch is asked for.

        Only once, by one thread at a time.
        """

    @abstractmethod
    def make(self, row: Any, work: ThisRecord) -> Any:
        """Make the item of a row. Any thread may call it."""

    def whole(self, batch: Any, empty: Empty, /) -> Any:
        """Make a batch as collating its items would; None: it cannot be made so.

        empty: gives the memory for its images. Raises DamageError, StorageError.
        """
        return None

    @abstractmethod
    def names(self, batch: Any, /) -> Sequence[str]:
        """Return the names of a batch's records in messages, once its rows are read."""


class BatchReader(Protocol):
    """Read the batches of any consumer's share, whoever decided on it."""

    options: Options
    counts: Int64s  # (shards,) int64: the records of each that are read
    collate_fn: Callable[[list[Any]], Any]

    @property
    def batch_size(self) -> int | None:
        """Return the rows of a batch; None: items are handed out one by one."""

    @property
    def image_column(self) -> tuple[int | str, tuple[int, ...]] | None:
        """Return the field of an item that a built-in transform makes, by name or place, and its
        shape; None: there is none."""

    @property
    def item_fields(self) -> tuple[str, ...] | None:
        """Return the names of the fields of items that are tuples, where they are known."""

    @property
    def encoded_fields(self) -> Collection[int | str]:
        """Return the fields of items that are the bytes of image files, by name or place."""

    @property
    def device_crop(self) -> tuple[tuple[int, int], str] | None:
        """Return (H, W) and interpolation of DeviceCrops in items; None: there are none."""

    def name_pass(self, pass_id: str, /) -> None:
        """Name the pass that begins now in this process, as in all that make batches of it."""

    def read_share(
        self, share: Partition, consumers: Consumers, options: Options, /
    ) -> ShareReader:
        """Read a consumer's share, of a pass with these options."""


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
    skips: tuple[Skips, ...]  # what notes its records that cannot be read; (): they raise

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

    def read_share(
        self,
        share: Partition | RowRanges,
        consumers: Consumers,
        options: Options,
        /,
        *,
        hands_out: bool | None = None,
    ) -> ShareReader:
        """Read as BatchReader does. RowRanges are the parts of passes that a mixture takes.

        hands_out: as of the mixture, which hands the items out; None: this dataset does.
        """


class BatchIterator(Iterator[Any]):
    """Iterate over batches, and tell how the last one came, as far as that is known.

    inner: the iterator whose batches it hands on, and whose figures are its own; None: none.
    """

    inner: BatchIterator | None = None

    @property
    def batch_stats(self) -> Any:
        """Return the figures of the batch handed out last, a loader's BatchStats; None: none."""
        return None if self.inner is None else self.inner.batch_stats

    @property
    def blocked_s(self) -> float:
        """Return the seconds of the last next() in which a device was waited for."""
        return 0.0 if self.inner is None else self.inner.blocked_s

    @property
    def idle_s(self) -> float | None:
        """Return the seconds for which the device had nothing to do when the last batch came; None:
        it is not known."""
        return None if self.inner is None else self.inner.idle_s

    @property
    def behind(self) -> bool:
        """Return True if the device was a whole step behind when the last batch was asked for;
        False: it was not, or it is not known."""
        return self.inner is not None and self.inner.behind

    def ready(self) -> bool | None:
        """Return True if the next batch would come at once; None: it is not known."""
        return None
