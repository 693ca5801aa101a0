"""The workers of num_workers=0: threads of the trainer's process or, with none, `take` itself."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

from ..dataset.decode import ThisRecord
from ..dataset.stream import Stream
from ..dataset.whereabouts import BatchTimeout, Whereabouts
from ..errors import RowError, ShardioError, WorkerError
from ..storage.ranges import RequestMeter
from .base import OVER, Pass, PoolOptions, WorkerPool
from .batch_builder import Batch, BatchBuilder, Failure
from .buffer_pool import BufferPool
from .stats import BatchStats, PoolFigures, add_requests

_WAIT_S = 5.0  # for a thread that was told to end


class InProcessWorkers(WorkerPool):
    """Build batches in the trainer's process: a pool without processes."""

    number = 0
    name = "a thread of this process"

    def __init__(self, stream: Stream, options: PoolOptions) -> None:
        self._stream = stream
        self._buffers = BufferPool(private=True)
        self._requests = RequestMeter()
        self._builders: list[BatchBuilder] = []  # at most one
        self._thread: threading.Thread | None = None
        self._queue = SimpleQueue[tuple[Batch | Failure, Any]]()
        super().__init__(options, _end, self._builders, self._buffers)

    @property
    def figures(self) -> PoolFigures:
        """Return what the buffers take; there are no processes."""
        ring, buffers = self.options.prefetch + 2, self._buffers
        return PoolFigures(buffers=buffers.peak, ring=ring, batch_bytes=buffers.bytes)

    def begin(self, what: Pass, steps: int) -> None:
        """Begin a pass. What was left of the last one is dropped."""
        self._stop()
        self.passes += 1
        queue = self._queue = SimpleQueue[tuple[Batch | Failure, Any]]()
        buffers = self._buffers

        def emit(done: Batch | Failure, packed: Any) -> None:
            if isinstance(done, Batch):
                done.buffer.hand_out(buffers.free)
            queue.put((done, packed))

        threads = self.options.threads
        # Anew for each pass: a thread that hung in another one may still write there.
        whereabouts = Whereabouts(1, max(1, threads), shared=False)
        self._late = BatchTimeout(whereabouts, self.options.timeout_s, self.options.patience_s)
        self._stream.name_pass(f"{what.pool}-{self.passes}")
        builder = BatchBuilder(
            *(what.assembler(self._stream, 0, 1), buffers, lambda collated, _: collated, emit),
            places=whereabouts.places(0),
            interrupts=not threads,
        )
        self._builders.append(builder)
        if threads:
            builder.more(self.options.prefetch)
            self._thread = threading.Thread(
                target=builder.run, args=(threads,), name="shardio-0", daemon=True
            )
            self._thread.start()

    def take(self) -> tuple[Any, BatchStats]:
        """Return the next batch of the pass, and how it was made."""
        if not self._builders or self.closed:
            raise WorkerError(OVER)
        builder = self._builders[0]
        start = perf_counter()
        builder.more()
        if not self.options.threads:
            work = ThisRecord()
            while self._queue.empty():
                if not builder.build_row(work) and self._queue.empty():
                    raise WorkerError(OVER)
        done, batch = self._next(start)
        if isinstance(done, Failure):
            self._stop()
            error = done.error
            if done.where and not isinstance(error, ShardioError):
                row = RowError(done.where)
                row.__cause__, row.__context__ = error.__cause__, error.__context__
                row.__suppress_context__ = error.__suppress_context__
                raise error from row
            raise error
        stats = add_requests(done.stats(0), self._requests)
        return batch, stats._replace(wait_s=perf_counter() - start)

    def _next(self, since: float) -> tuple[Batch | Failure, Any]:
        """Return what is built next, waited for since then. Raises WorkerError when it is late."""
        while True:
            try:
                return self._queue.get(timeout=self._late.pause_s(since))
            except Empty:
                self._late.look(since, self)

    def is_stopped(self) -> bool:
        """Return False: a process that was stopped cannot ask."""
        return False

    def end(self) -> None:
        """Leave a thread that hangs: nothing ends it."""
        self._stop(0.0)

    def ready(self) -> bool:
        """Return True if the next batch is built."""
        return not self._queue.empty()

    def close(self) -> None:
        """End the threads, and give back the memory of batches that nobody holds."""
        if not self.closed:
            self._stop()
        super().close()

    def _stop(self, wait_s: float = _WAIT_S) -> None:
        """End the pass, and its threads."""
        if not self._builders:
            return
        builder = self._builders.pop()
        builder.drop()
        self._queue.put((Failure(WorkerError(OVER), ""), None))  # a thread may wait in `take`
        if self._thread is not None:
            self._thread.join(wait_s)
            self._thread = None
        else:
            builder.finish()


def _end(builders: list[BatchBuilder], buffers: BufferPool) -> None:
    for builder in builders:
        builder.drop()
    buffers.close()
