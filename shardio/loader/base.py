"""The protocol of those who build a loader's batches, and the passes that they are given.

Workers are processes (`worker_pool`), or threads of the trainer's own process (`in_process`).
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

from ..dataset.assemble import Assembler
from ..dataset.protocol import BatchReader
from ..dataset.ranks import Consumers
from ..dataset.whereabouts import PATIENCE_S
from ..order.options import Options
from .buffer_pool import PageLock
from .stats import BatchStats, PoolFigures

OVER = "this pass was interrupted, or its loader closed: iterate anew"


_POOLS = count()


class Pass(NamedTuple):
    """Say what is to be read: the batches of one rank, from a place in an epoch to its end."""

    options: Options
    epoch: int
    start: int  # units consumed before
    rank: int
    world_size: int
    consumers: Consumers
    pool: int = 0  # the number of the pool

    def assembler(self, stream: BatchReader, worker: int, workers: int) -> Assembler:
        """Return what assembles the batches of one worker."""
        share = self.options.partition(
            self.options.epoch(stream.counts, self.epoch),
            rank=self.rank,
            world_size=self.world_size,
            worker=worker,
            num_workers=workers,
            start=self.start,
        )
        return Assembler(stream, self.options, share, self.consumers)


@dataclass(frozen=True)
class PoolOptions:
    """Say who builds batches, and how far ahead."""

    workers: int  # processes; 0: none
    threads: int  # in each of them, or in this process; 0: `take` builds the batches itself
    prefetch: int  # batches ahead, of each process
    timeout_s: float = 0.0  # to wait for a batch; 0: for ever
    copy: bool = False  # batches to memory of this process alone
    lock: PageLock | None = None  # page-locks the memory of batches
    context: BaseContext | None = None  # that starts processes
    patience_s: float = PATIENCE_S  # without a batch, until a warning says what is waited for


class WorkerPool(ABC):
    """Build batches ahead, pass after pass: `begin` a pass, then `take` its batches, in order.

    There is one pass at a time: `begin` ends the one before. An error of a row ends the pass. A
    pool works only in the process that made it. In a forked child it counts as closed, and `close`
    ends nothing there.
    """

    def __init__(self, options: PoolOptions, end: Callable[..., None], *args: Any) -> None:
        """Note how to end what the pool runs: end(*args), by `close`, or when nobody has it."""
        self.options = options
        self.workers = max(1, options.workers)  # readers of the dataset
        self.passes = 0  # that were begun
        self.pool_number = next(_POOLS)  # of this process's pools
        self._owner = os.getpid()
        self._closer = weakref.finalize(self, _end, self._owner, end, *args)

    @property
    def closed(self) -> bool:
        """Return True once the pool makes no more batches, because of `close` or of an error."""
        return not self._closer.alive or self._owner != os.getpid()

    @property
    @abstractmethod
    def figures(self) -> PoolFigures:
        """Return what the pool runs, and what its buffers take."""

    @abstractmethod
    def begin(self, what: Pass, steps: int) -> None:
        """Begin a pass of so many batches. What was left of the last one is dropped."""

    @abstractmethod
    def take(self) -> tuple[Any, BatchStats]:
        """Return the next batch of the pass, and how it was made.

        Raises what building it raised, and WorkerError.
        """

    @abstractmethod
    def ready(self) -> bool:
        """Return True if `take` would most likely not wait."""

    def close(self) -> None:
        """End the workers. Batches that were handed out stay."""
        self._closer()


def _end(owner: int, end: Callable[..., None], *args: Any) -> None:
    if os.getpid() == owner:  # in a child that was forked, processes and locks are not its own
        end(*args)
