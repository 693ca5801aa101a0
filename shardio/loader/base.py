"""What makes batches for a ShardLoader, and the passes that it is given.

Workers are processes (`worker_pool`), or threads of the trainer's own process (`in_process`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from ..dataset.assemble import PendingBatch
from ..dataset.protocol import BatchIterator, BatchReader
from ..dataset.ranks import Consumers
from ..order.options import Options
from .stats import BatchStats

OVER = "this pass was interrupted, or its loader closed: iterate anew"


class Pass(NamedTuple):
    """Say what is to be read: the batches of one rank, from a place in an epoch to its end."""

    options: Options
    epoch: int
    start: int  # units consumed before
    rank: int
    world_size: int
    consumers: Consumers

    def reads(self, stream: BatchReader, worker: int, workers: int) -> Iterator[PendingBatch]:
        """Yield the reads that one worker makes its batches of. Sets the options of the stream."""
        stream.options = self.options
        share = self.options.partition(
            self.options.epoch(stream.counts, self.epoch),
            rank=self.rank,
            world_size=self.world_size,
            worker=worker,
            num_workers=workers,
            start=self.start,
        )
        return stream.read_batches(share, self.consumers)


class WorkerPool(Protocol):
    """Make batches ahead, pass after pass: `begin` a pass, then `take` its batches, in order.

    One pass at a time: `begin` ends the one before. An error of a row ends the pass.
    """

    passes: int  # that were begun
    batch_stats: BatchStats | None  # of the batch that was taken last

    @property
    def closed(self) -> bool:
        """Return True once the pool makes no more batches, because of `close` or of an error."""

    @property
    def pids(self) -> list[int]:
        """Return the ids of the pool's processes; none, where there are no processes."""

    @property
    def ring(self) -> int:
        """Return the buffers that a loop needs which keeps no batch but the one it is at."""

    @property
    def most(self) -> int:
        """Return the most buffers that there have been at a time."""

    @property
    def bytes(self) -> int:
        """Return the bytes of all buffers that there are now."""

    def begin(self, what: Pass, steps: int) -> None:
        """Begin a pass of so many batches. What was left of the last one is dropped."""

    def take(self) -> Any:
        """Return the next batch of the pass. Raises what making it raised, and WorkerError."""

    def ready(self) -> bool:
        """Return True if `take` would most likely not wait."""

    def close(self) -> None:
        """End the workers. Batches that were handed out stay."""


class PlainBatches(BatchIterator):
    """Iterate over the batches of any iterator, which tells about them what it can."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __next__(self) -> Any:
        return next(self._iterator)

    @property
    def batch_stats(self) -> Any:
        """Return what the iterator says of its last batch; None: nothing."""
        return getattr(self._iterator, "batch_stats", None)

    @property
    def blocked_s(self) -> float:
        """Return the seconds that the iterator says it waited for a device."""
        return float(getattr(self._iterator, "blocked_s", 0.0))

    def ready(self) -> bool | None:
        """Return what the iterator's own `ready` says; None where it has none."""
        ready = getattr(self._iterator, "ready", None)
        return bool(ready()) if callable(ready) else None


def batch_iterator(batches: Iterable[Any]) -> BatchIterator:
    """Iterate over batches by what is declared of a BatchIterator."""
    iterator = iter(batches)
    return iterator if isinstance(iterator, BatchIterator) else PlainBatches(iterator)
