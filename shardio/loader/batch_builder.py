"""Rows to batches, by several threads, in memory that is used again: the work of a loader process.

How it works. All threads take rows from one place, batch after batch, each row by whichever thread
is free, so a slow row holds up nobody else. An array that a row gives is written into its row of
the batch at once, and a built-in transform writes there itself. Who builds the last row of a batch
collates it: with `collate`, columns that are complete in their place are taken as they are. Batches
are handed over in order.

A batch is begun only when the trainer wants one more (`more`); so no more are built ahead than it
asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch

from ..dataset.assemble import Assembler, Columns
from ..dataset.decode import ThisRecord
from ..dataset.protocol import BatchRows
from ..dataset.whereabouts import BETWEEN, COLLATES, PositionWriter
from ..errors import as_error
from ..names import key_text
from .buffer_pool import Buffer, BufferPool
from .stats import BatchStats
from .transport import SMALL

LISTEN_S = 0.005  # between rows of a batch, at least: a pass that is left is to end soon


class Failure(NamedTuple):
    """Say why a row could not be built, and which one: `where` names the record."""

    error: BaseException
    where: str


@dataclass(eq=False)
class Batch:
    """Hold a batch that is being built, and the memory of its columns."""

    rows: BatchRows
    number: int  # of this builder's batches, from 0
    buffer: Buffer
    columns: Columns | None = None  # its rows are written to
    collated: Any = None  # when it was built as a whole
    read_s: float = 0.0
    decode_s: float = 0.0
    transform_s: float = 0.0
    collate_s: float = 0.0
    slowest: tuple[float, int, bytes] = (0.0, -1, b"")  # seconds, record, key

    def __post_init__(self) -> None:
        self.items: list[Any] = [None] * self.rows.size
        self.left = self.rows.size  # rows that are not built yet

    def stats(self, worker: int, cpu_s: float = 0.0) -> BatchStats:
        """Say how the batch was built, and by which worker."""
        seconds, record, name = self.slowest
        return BatchStats(
            rows=self.rows.size,
            read_s=self.read_s,
            decode_s=self.decode_s,
            transform_s=self.transform_s,
            collate_s=self.collate_s,
            worker=worker,
            slowest_s=seconds,
            slowest_record=record,
            slowest_key=key_text(name),
            cpu_s=cpu_s,
        )

    def forget(self) -> None:
        """Forget all that the batch is made of."""
        self.items.clear()
        if self.columns is not None:
            self.columns.clear()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that is not cleared; a large one lies in the batch's buffer."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes < SMALL:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self.buffer.allocate(nbytes)[1]).view(dtype).view(shape)


class BatchBuilder:
    """Build the batches of one share, which an assembler has, in order.

    pack(batch, buffer)  makes of a collated batch what is handed over; in any thread
    emit(batch, packed)  is called for each batch, in order, by one thread at a time; and, if there
                         is one, with the Failure that ends the pass in place of a batch
    places               where each thread says what it is at
    interrupts           `build_row` is called by the training loop: Ctrl-C passes
    listen(wait)         asks what the trainer says, which calls `more` or `drop`; wait: until it
                         says something. None: others call them

    `more` and `drop` are for any thread; `build_row` builds a row, `run` all of them.
    """

    def __init__(
        self,
        assembler: Assembler,
        buffers: BufferPool,
        pack: Callable[[Any, Buffer], Any],
        emit: Callable[[Batch | Failure, Any], None],
        *,
        places: Sequence[PositionWriter],
        interrupts: bool = False,
        listen: Callable[[bool], None] | None = None,
    ) -> None:
        self._places = places
        self._interrupts = interrupts
        self._listen = listen
        self._listened = 0.0  # when that was asked last
        self._buffers = buffers
        self._pack = pack
        self._emit = emit
        self._assembler = assembler
        self._permits = 0  # batches that may be begun
        self._dropped = False
        self._more = threading.Condition()
        self._row_lock, self._stats_lock, self._emit_lock = (threading.Lock() for _ in range(3))
        self._begun = 0  # batches
        self._current: Batch | None = None  # whose rows are being handed out
        self._open: dict[int, Batch] = {}  # begun, and not handed over
        self._done: dict[int, tuple[Batch | Failure, Any]] = {}  # by number, to be handed over
        self._next = 0  # the one that is to be handed over next
        self._tasks = self._rows()

    def more(self, batches: int = 1) -> None:
        """Let so many more batches be built: the trainer wants them."""
        with self._more:
            self._permits += batches
            self._more.notify_all()

    def drop(self) -> None:
        """Build no more batches: nobody wants the rest."""
        with self._more:
            self._dropped = True
            self._more.notify_all()

    def run(self, threads: int) -> None:
        """Build all batches, as they are wanted, by this thread and others."""
        others = [
            threading.Thread(target=self._run, args=(i,), name=f"shardio-{i}", daemon=True)
            for i in range(1, threads)
        ]
        for thread in others:
            thread.start()
        self._run(0)
        for thread in others:
            thread.join()
        self.finish()

    def finish(self) -> None:
        """Give back the memory of batches begun in vain, after the last row."""
        with suppress(ValueError):  # it is running: a signal's handler has closed the loader
            self._tasks.close()  # or it would keep the batch that it is at
        self._current = None
        for batch in self._open.values():
            batch.forget()
            batch.buffer.hand_over()  # what a collate_fn keeps of it is to be known
            self._buffers.free(batch.buffer.number)
        self._open.clear()

    def _run(self, thread: int) -> None:
        """Build rows until nothing is left, by the thread of this number."""
        work = ThisRecord()
        work.note = self._places[thread].note
        while self.build_row(work, thread):
            pass

    def build_row(self, work: ThisRecord, thread: int = 0) -> bool:
        """Build one row, once it is wanted. Returns False if nothing is left to be built."""
        batch, place = None, self._places[thread]
        try:
            work.number = -1
            with self._row_lock:
                if self._listen is not None and perf_counter() - self._listened > LISTEN_S:
                    self._ask(self._listen, False)
                task = None if self._dropped else next(self._tasks, None)
            if task is None:
                return False
            batch, i, row = task
            if batch.collated is None:
                start = perf_counter()
                batch.items[i] = self._assembler.item(batch.rows, i, row, work, batch.columns)
                place.at[0] = BETWEEN
                del row, task  # the batch may be handed over before the next row
                end = perf_counter()
                with self._stats_lock:
                    batch.read_s += work.read - start
                    batch.decode_s += work.decoded - work.read
                    batch.transform_s += end - work.decoded
                    if end - start > batch.slowest[0]:
                        batch.slowest = (end - start, work.number, work.key)
                    batch.left -= 1
                    if batch.left:
                        return True
            work.number = -1
            place.note(COLLATES, perf_counter(), b"")
            self._finish(batch)
            place.at[0] = BETWEEN
        except BaseException as error:
            self._fail(batch, error, work)
            place.at[0] = BETWEEN  # only now: to pickle an error may end the process
            if self._interrupts and isinstance(error, KeyboardInterrupt):
                raise
        return True

    def _rows(self) -> Generator[tuple[Batch, int, Any], None, None]:
        """Yield what is to be built: (batch, row of it, what it is made of)."""
        assembler, batches = self._assembler, None
        while self._wait():
            start = perf_counter()
            if batches is None:
                batches = iter(assembler.reader)
            rows = next(batches, None)
            if rows is None:
                return
            self._current = batch = Batch(rows, self._begun, self._buffers.take())
            self._begun += 1
            self._open[batch.number] = batch
            batch.collated = assembler.whole(rows, batch.empty)
            batch.read_s += perf_counter() - start
            if batch.collated is not None:
                yield batch, -1, None
            else:
                batch.columns = assembler.columns(rows, batch.empty)
                for i, row in enumerate(assembler.reader.rows(rows)):
                    yield batch, i, row
            self._current = None
            del batch, rows

    def _wait(self) -> bool:
        """Wait until one more batch is wanted. Returns False if none is."""
        if self._listen is not None:
            self._ask(self._listen, False)
            while not (self._permits or self._dropped):
                self._ask(self._listen, True)
        with self._more:
            while not (self._permits or self._dropped):
                self._more.wait()
            self._permits -= 1
            return not self._dropped

    def _ask(self, listen: Callable[[bool], None], wait: bool) -> None:
        """Ask what the trainer says, and note when."""
        listen(wait)
        self._listened = perf_counter()

    def _finish(self, batch: Batch) -> None:
        """Collate a batch whose rows are built, and hand it over."""
        start = perf_counter()
        collated, batch.collated = batch.collated, None
        if collated is None:
            collated = self._assembler.collate(batch.rows, batch.items, batch.columns)
        packed = self._pack(collated, batch.buffer)
        del collated  # in another process it may be done with at once, and its buffer be wanted
        batch.forget()
        batch.collate_s = perf_counter() - start
        self._hand_over(batch.number, batch, packed)

    def _fail(self, batch: Batch | None, error: BaseException, work: ThisRecord) -> None:
        """End the pass by an error; batches before it are handed over first."""
        where = "" if batch is None else work.record
        if isinstance(error, StopIteration):  # as Python has it: nothing is to take it for the end
            stop, error = error, RuntimeError("a transform, or collate_fn, raised StopIteration")
            error.__cause__ = stop
        error = as_error(error, where, interrupts=self._interrupts)
        self.drop()
        batch = batch or self._current
        number = self._begun if batch is None else batch.number
        self._hand_over(number, Failure(error, where))

    def _hand_over(self, number: int, done: Batch | Failure, packed: Any = None) -> None:
        """Emit what comes next, in order, now that the batch of this number is done, or failed."""
        with self._emit_lock:
            self._done.setdefault(number, (done, packed))
            while self._next in self._done:
                done, packed = self._done.pop(self._next)
                if isinstance(done, Batch):
                    self._open.pop(self._next, None)
                self._next = self._next + 1 if isinstance(done, Batch) else -1
                self._emit(done, packed)
