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
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass
from operator import is_
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from ..dataset.assemble import Assembler, PendingBatch, mark
from ..dataset.collate import TENSORS, is_planes, places_of, rows_of
from ..dataset.decode import Progress
from ..dataset.protocol import BatchReader
from ..dataset.whereabouts import BETWEEN, COLLATES, Place
from ..errors import as_error
from ..names import key_text
from .buffer_pool import Buffer, BufferPool
from .stats import BatchStats
from .transport import SMALL, is_only_values

_Like = tuple[bool, Any, Any]  # of a field whose rows are arrays: whether tensors, shape, dtype
Layout = dict[int | str, _Like]  # by place in a tuple, or by name

_ARRAYS = (np.ndarray, torch.Tensor)
LISTEN_S = 0.005  # between rows of a batch, at least: a pass that is left is to end soon
_LEAST = 512  # bytes of an array that is worth 1 us to put in its place early


class Failure(NamedTuple):
    """Say why a row could not be built, and which one: `where` names the record."""

    error: BaseException
    where: str


@dataclass(eq=False)
class Batch:
    """Hold a batch that is being built, and the memory of its columns, for collating."""

    pending: PendingBatch
    assembler: Assembler
    number: int  # of this builder's batches, from 0
    buffer: Buffer
    likely: InitVar[Layout]  # that of the batch before
    collated: Any = None  # when it was built at once
    read_s: float = 0.0
    decode_s: float = 0.0
    transform_s: float = 0.0
    collate_s: float = 0.0
    slowest: tuple[float, int, bytes] = (0.0, -1, b"")  # seconds, record, key

    def __post_init__(self, likely: Layout) -> None:
        self.items: list[Any] = [None] * self.pending.size
        self.left = self.pending.size  # rows that are not built yet
        self._lock = threading.Lock()
        self._columns = {name: _Column(self, like) for name, like in likely.items()}

    @property
    def layout(self) -> Layout:
        """Return that of the fields whose rows were written in place; for the batch after this."""
        return {name: column.like for name, column in self._columns.items() if column.taken}

    def stats(self, worker: int, cpu_s: float = 0.0) -> BatchStats:
        """Say how the batch was built, and by which worker."""
        seconds, record, name = self.slowest
        return BatchStats(
            rows=self.pending.size,
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
        self._columns.clear()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that is not cleared; a large one lies in the batch's buffer."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes < SMALL:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self.buffer.place(nbytes)[1]).view(dtype).view(shape)

    def column(self, values: Sequence[Any]) -> torch.Tensor | None:
        """Return the tensor whose rows these values are; None: they are not all in place."""
        for column in self._columns.values():
            if values[0] is column.rows[0]:
                same = len(values) == len(column.rows) and all(map(is_, values, column.rows))
                return column.tensor if same else None
        return None

    def row(self, name: int | str | None, i: int) -> Any:
        """Return the array that the image of row i may be written to; None: there is none yet."""
        column = None if name is None else self._columns.get(name)
        return None if column is None or column.is_tensor else column.rows[i]

    def settle(self, i: int, item: Any) -> Any:
        """Return the item of row i, its arrays in their rows of the batch."""
        ragged: Collection[int | str] = self.assembler.ragged
        if type(item) is dict:
            return {
                name: self._settled(name, i, value)
                if type(value) in _ARRAYS and name not in ragged
                else value
                for name, value in item.items()
            }
        if type(item) is not tuple:
            return item
        if ragged:
            ragged = places_of(ragged, item, self.assembler.fields)
        return tuple(
            [
                self._settled(place, i, value)
                if type(value) in _ARRAYS and place not in ragged
                else value
                for place, value in enumerate(item)
            ]
        )

    def _settled(self, name: int | str, i: int, value: Any) -> Any:
        """Return an array of row i in its row of the column; itself, where it has none there."""
        column = self._columns.get(name)
        if column is not None and value is column.rows[i]:  # a built-in transform wrote it there
            column.taken = True
            return value
        is_tensor = type(value) is torch.Tensor
        if is_tensor and is_planes(value):
            is_tensor, value = False, rows_of(value)
        if is_tensor and not is_only_values(value):  # copying it would lose the rest
            return value
        like = is_tensor, value.shape, value.dtype
        if column is None or column.like != like:
            if not is_tensor and (value.dtype.type not in TENSORS or not value.dtype.isnative):
                return value
            if value.nbytes < _LEAST:
                return value
            with self._lock:
                column = self._columns.get(name)
                if column is None or not (column.taken or column.like == like):
                    column = self._columns[name] = _Column(self, like)
            if column.like != like:
                return value  # rows differ: collating will say so
        column.taken = True
        row = column.rows[i]
        if is_tensor:
            row.copy_(value)
        else:
            row[...] = value
        return row


class _Column:
    """Hold a field of a batch, and views of its rows."""

    def __init__(self, batch: Batch, like: _Like) -> None:
        self.like = like
        self.taken = False
        self.is_tensor, shape, dtype = like
        kind = dtype if self.is_tensor else torch.from_numpy(np.empty(0, dtype)).dtype
        self.tensor = batch.empty((len(batch.items), *shape), kind)
        self.rows: Any = self.tensor.unbind() if self.is_tensor else list(self.tensor.numpy())


class BatchBuilder:
    """Build the batches of one share, in order.

    pack(batch, buffer)  makes of a collated batch what is handed over; in any thread
    emit(batch, packed)  is called for each batch, in order, by one thread at a time; and, if there
                         is one, with the Failure that ends the pass in place of a batch
    places               where each thread says what it is at
    interrupts           `turn` is called by the training loop: Ctrl-C passes
    listen(wait)         asks what the trainer says, which calls `more` or `drop`; wait: until it
                         says something. None: others call them

    `more` and `drop` are for any thread; `turn` builds a row, `run` all of them.
    """

    def __init__(
        self,
        stream: BatchReader,
        reads: Iterator[PendingBatch],
        buffers: BufferPool,
        pack: Callable[[Any, Buffer], Any],
        emit: Callable[[Batch | Failure, Any], None],
        layout: Layout,
        *,
        places: Sequence[Place],
        interrupts: bool = False,
        listen: Callable[[bool], None] | None = None,
    ) -> None:
        self.layout = layout  # of the batch before
        self._places = places
        self._interrupts = interrupts
        self._listen = listen
        self._listened = 0.0  # when that was asked last
        self._buffers = buffers
        self._pack = pack
        self._emit = emit
        self._assembler = assembler = Assembler(
            stream.collate_fn,
            fields=stream.item_fields,
            exact=stream.tail == "exact",
            encoded=stream.encoded_fields,
        )
        self._in_place = assembler.is_own
        self._image = stream.image_place if self._in_place else None
        self._wanted = 0  # batches that may be begun
        self._dropped = False
        self._more = threading.Condition()
        self._pulling, self._counting, self._emitting = (threading.Lock() for _ in range(3))
        self._begun = 0  # batches
        self._at: Batch | None = None  # whose rows are being handed out
        self._open: dict[int, Batch] = {}  # begun, and not handed over
        self._done: dict[int, tuple[Batch | Failure, Any]] = {}  # by number, to be handed over
        self._next = 0  # the one that is to be handed over next
        self._tasks = self._rows(reads)

    def more(self, batches: int = 1) -> None:
        """Let so many more batches be built: the trainer wants them."""
        with self._more:
            self._wanted += batches
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
        """Give back the memory of batches begun in vain, after the last turn."""
        with suppress(ValueError):  # it is running: a signal's handler has closed the loader
            self._tasks.close()  # or it would keep the batch that it is at
        self._at = None
        for batch in self._open.values():
            batch.forget()
            batch.buffer.hand_over()  # what a collate_fn keeps of it is to be known
            self._buffers.free(batch.buffer.number)
        self._open.clear()

    def _run(self, thread: int) -> None:
        """Build rows until nothing is left, by the thread of this number."""
        work = Progress()
        work.note = self._places[thread].note
        while self.turn(work, thread):
            pass

    def turn(self, work: Progress, thread: int = 0) -> bool:
        """Build one row, once it is wanted. Returns False if nothing is left to be built."""
        batch, place = None, self._places[thread]
        try:
            work.number = -1
            with self._pulling:
                if self._listen is not None and perf_counter() - self._listened > LISTEN_S:
                    self._ask(self._listen, False)
                task = None if self._dropped else next(self._tasks, None)
            if task is None:
                return False
            batch, i, row, valid = task
            if batch.collated is None:
                start = perf_counter()
                work.out = batch.row(self._image, i)
                item = batch.pending.make(row, work)
                work.out = None  # or it would keep the batch in use
                place.at[0] = BETWEEN
                if valid is not None:
                    item = mark(item, valid)
                batch.items[i] = batch.settle(i, item) if self._in_place else item
                del item, row, task  # the batch may be handed over before the next turn
                end = perf_counter()
                with self._counting:
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
            work.out = None
            self._fail(batch, error, work)
            place.at[0] = BETWEEN  # only now: to pickle an error may end the process
            if self._interrupts and isinstance(error, KeyboardInterrupt):
                raise
        return True

    def _rows(
        self, reads: Iterator[PendingBatch]
    ) -> Generator[tuple[Batch, int, Any, Any], None, None]:
        """Yield what is to be built: (batch, row of it, what it is made of, how it is marked)."""
        while self._wait():
            start = perf_counter()
            pending = next(reads, None)
            if pending is None:
                return
            buffer = self._buffers.take()
            self._at = batch = Batch(pending, self._assembler, self._begun, buffer, self.layout)
            self._begun += 1
            self._open[batch.number] = batch
            batch.collated = self._assembler.at_once(pending, batch.empty)
            batch.read_s += perf_counter() - start
            if batch.collated is not None:
                yield batch, -1, None, None
            else:
                for i, (row, valid) in enumerate(self._assembler.rows(pending)):
                    yield batch, i, row, valid
            self._at = None
            del batch, pending

    def _wait(self) -> bool:
        """Wait until one more batch is wanted. Returns False if none is."""
        if self._listen is not None:
            self._ask(self._listen, False)
            while not (self._wanted or self._dropped):
                self._ask(self._listen, True)
        with self._more:
            while not (self._wanted or self._dropped):
                self._more.wait()
            self._wanted -= 1
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
            collated = self._assembler.collate(batch.pending, batch.items, batch)
        self.layout = batch.layout
        packed = self._pack(collated, batch.buffer)
        del collated  # in another process it may be done with at once, and its buffer be wanted
        batch.forget()
        batch.collate_s = perf_counter() - start
        self._hand_over(batch.number, batch, packed)

    def _fail(self, batch: Batch | None, error: BaseException, work: Progress) -> None:
        """End the pass by an error; batches before it are handed over first."""
        where = "" if batch is None else work.record
        if isinstance(error, StopIteration):  # as Python has it: nothing is to take it for the end
            stop, error = error, RuntimeError("a transform, or collate_fn, raised StopIteration")
            error.__cause__ = stop
        error = as_error(error, where, interrupts=self._interrupts)
        self.drop()
        batch = batch or self._at
        number = self._begun if batch is None else batch.number
        self._hand_over(number, Failure(error, where))

    def _hand_over(self, number: int, done: Batch | Failure, packed: Any = None) -> None:
        """Emit what comes next, in order, now that the batch of this number is done, or failed."""
        with self._emitting:
            self._done.setdefault(number, (done, packed))
            while self._next in self._done:
                done, packed = self._done.pop(self._next)
                if isinstance(done, Batch):
                    self._open.pop(self._next, None)
                self._next = self._next + 1 if isinstance(done, Batch) else -1
                self._emit(done, packed)
