"""A loader process: builds every P-th batch of a pass, in memory that it shares with the trainer.

How it works. It has one socket to the trainer. Downwards go the passes (which epoch, from where),
how many batches more are wanted, and which buffers are free again; upwards, for each batch, its
buffer and a small pickle. By a second socket it shows the trainer each buffer, once, and its size
when that has grown: before the batch, or, where the trainer locks pages, as soon as the size is
known, so that this is done when the batch comes. So there is no name,
no lock and no file that could be left behind, and the end of either side closes the socket: a
process whose trainer is gone leaves, at once.

It stays from pass to pass. As soon as it has built its last batch it goes on with the first ones of
the pass that will most likely come next, so that a new epoch begins at once. `worker_pool` is
the trainer's end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import re
import select
import signal
import struct
import sys
import threading
import traceback
from collections import deque
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter, process_time
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from ..dataset.protocol import BatchReader
from ..dataset.whereabouts import Whereabouts
from ..order.rng import key
from ..storage import descriptors, ranges
from .base import Pass
from .batch_builder import Batch, BatchBuilder, Failure
from .buffer_pool import Buffer, BufferPool
from .stats import BatchStats, add_requests
from .transport import WrappedBatch, wrap

BUFFER_MESSAGE = struct.Struct("<QQ")  # the number of a buffer, and its bytes
_CPU_EVERY_S = 0.005
_SEED = 0x10AD  # what the seeds of Python's, numpy's and torch's generators are drawn for


class Sent(NamedTuple):
    """Hold a batch, or the error instead of one, on its way to the trainer."""

    number: int  # of the pass
    buffer: int = -1
    size: int = 0  # bytes of the buffer
    used: int = 0  # bytes of it that the batch takes
    spare: int = 0  # other buffers that its process had free when it took this one
    wrapped: WrappedBatch | None = None
    stats: BatchStats = BatchStats()
    error: bytes | None = None  # a pickled exception; None: it could not be
    text: str = ""  # of the error: type, message, traceback
    where: str = ""

    def dump(self) -> bytes:
        """Pickle this as plain tuples: to look up classes takes either side 10 us."""
        return pickle.dumps(tuple(self._replace(stats=tuple(self.stats))))  # type: ignore[arg-type]

    @staticmethod
    def load(data: bytes) -> Sent:
        """Return what `dump` pickled."""
        sent = Sent._make(pickle.loads(data))
        return sent._replace(stats=BatchStats._make(sent.stats))


@dataclass(frozen=True)
class WorkerJob:
    """Hold what is the same for all loader processes of a pool: what they read, and how."""

    stream: BatchReader
    workers: int  # processes
    threads: int  # in each
    seed: int
    whereabouts: Whereabouts
    shows_early: bool  # buffers, before they have a batch


def run_worker(
    connection: Connection, buffer_socket: Connection, worker: int, job: WorkerJob
) -> None:
    """Run a loader process, the one of this number, until the trainer is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's; it closes the socket
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # So is what a scheduler sends to all: a copy of the trainer's handler would save a checkpoint.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if callable(signal.getsignal(number)):
            ends = number == signal.SIGTERM  # as multiprocessing ends what is left
            signal.signal(number, signal.SIG_DFL if ends else signal.SIG_IGN)
    # What the trainer left as garbage is not for this process: to free its CUDA tensors calls CUDA.
    gc.freeze()
    torch.set_num_threads(1)  # there is a process for each core
    ranges.hold_client()
    _Worker(connection, buffer_socket, worker, job).run()


class _Worker:
    """Build the batches that the trainer asks for, and send them."""

    def __init__(
        self, connection: Connection, buffer_socket: Connection, worker: int, job: WorkerJob
    ) -> None:
        self._connection = connection
        self._buffer_socket = descriptors.as_socket(buffer_socket)
        buffer_socket.close()
        # A transform may fork. With the socket in its child, the trainer would not learn of the end
        # of this process; and a child that comes back from the transform is not to send batches.
        os.register_at_fork(after_in_child=connection.close)
        os.register_at_fork(after_in_child=self._buffer_socket.close)
        self._worker, self._job = worker, job
        self._buffers = BufferPool(grown=self._show) if job.shows_early else BufferPool()
        self._showing = threading.Lock()
        self._passes: deque[tuple[int, Pass]] = deque()
        self._said = select.poll()
        self._said.register(connection.fileno(), select.POLLIN)
        self._lock = threading.Lock()
        self._requested: dict[int, int] = {}  # by pass that is not begun: batches asked for
        self._building = -1  # the pass of the builder
        self._builder: BatchBuilder | None = None
        self._cpu_s, self._cpu_at = process_time(), perf_counter()  # when that was asked last
        self._requests = ranges.RequestMeter()

    def run(self) -> NoReturn:
        """Build pass after pass."""
        threading.Thread(target=self._watch, name="shardio-watch", daemon=True).start()
        while True:
            while not self._passes:
                self._listen(True)
            self._build(*self._passes.popleft())

    def _build(self, number: int, what: Pass) -> None:
        """Build the batches of one pass."""
        job = self._job
        _seed(key(_SEED, job.seed, what.epoch, what.rank, self._worker))
        emit = partial(self._emit, number)
        try:
            job.stream.name_pass(f"{what.pool}-{number}")
            assembler = what.assembler(job.stream, self._worker, job.workers)
        except Exception as error:
            emit(Failure(error, ""), None)
            return
        builder = BatchBuilder(
            *(assembler, self._buffers, wrap, emit),
            places=job.whereabouts.places(self._worker),
            listen=self._listen,
        )
        with self._lock:
            wanted = self._requested.pop(number, None)
            if wanted is None:  # nobody wants it any more
                return
            self._builder, self._building = builder, number
            builder.more(wanted + int(bool(self._requested)))  # see _do
        builder.run(job.threads)
        with self._lock:
            self._builder = None

    def _emit(self, number: int, batch: Batch | Failure, packed: Any) -> None:
        """Send a batch of a pass, or the Failure that ends it."""
        if isinstance(batch, Failure):
            text = "".join(traceback.format_exception(batch.error)).rstrip()
            where = f"in loader process {self._worker}"
            where = f"{batch.where}, {where}" if batch.where else where
            self._send(Sent(number, error=_pickled(batch.error), text=text, where=where))
            return
        buffer = batch.buffer
        buffer.hand_over()
        if buffer.shown_bytes < buffer.size:
            self._show(buffer)
        stats = batch.stats(self._worker, self._new_cpu_s())
        stats = add_requests(stats, self._requests)
        shown = buffer.number, buffer.size, buffer.used
        self._send(Sent(number, *shown, self._buffers.take_min_free(), packed, stats))

    def _show(self, buffer: Buffer) -> None:
        """Show the trainer a buffer that is new, or its size when that has grown. In any thread."""
        with self._showing:
            data = BUFFER_MESSAGE.pack(buffer.number, buffer.size)
            try:
                if buffer.shown_bytes:
                    self._buffer_socket.sendall(data)
                else:
                    descriptors.send(self._buffer_socket, buffer.fd, data)
            except ConnectionError:  # the trainer is gone
                _leave(0)
            except BaseException:  # too many descriptors under way: it would wait for ever
                traceback.print_exc()
                _leave(1)
            buffer.shown_bytes = buffer.size

    def _new_cpu_s(self) -> float:
        """Return the CPU time since it was asked last; 0 within 5 ms, since asking takes 17 us."""
        now = perf_counter()
        if now - self._cpu_at < _CPU_EVERY_S:
            return 0.0
        before, self._cpu_s, self._cpu_at = self._cpu_s, process_time(), now
        return self._cpu_s - before

    def _send(self, sent: Sent) -> None:
        try:
            self._connection.send_bytes(sent.dump())
        except ConnectionError:  # the trainer is gone
            _leave(0)
        except BaseException:  # it would wait for ever for what was not sent
            traceback.print_exc()
            _leave(1)

    def _watch(self) -> NoReturn:
        """Leave when the trainer is gone, whatever the other threads are at."""
        # Asked for nothing, poll tells of the socket's end alone. A thread that reads what the
        # trainer says would be woken for each batch, and wait for the GIL: a fourth of all CPU time
        # where a batch takes 0.3 ms.
        gone = select.poll()
        gone.register(self._connection.fileno(), 0)
        gone.poll()
        _leave(0)

    def _listen(self, wait: bool) -> None:
        """Do all that the trainer has said; wait: until it has said something. One thread at a
        time."""
        try:
            while wait or self._said.poll(0):
                try:
                    message = self._connection.recv_bytes()
                except (EOFError, ConnectionError):
                    _leave(0)
                self._do(*pickle.loads(message))
                wait = False
        except BaseException:
            traceback.print_exc()
            _leave(1)

    def _do(
        self,
        number: int,
        what: Pass | None,
        follows: bool,
        wanted: int,
        free: list[int],
        gone: list[int],
    ) -> None:
        for buffer in free:
            self._buffers.free(buffer)
        for buffer in gone:
            self._buffers.free(buffer, reuse=False)
        with self._lock:
            if what is not None:
                if not follows:
                    self._requested.clear()
                if self._builder is not None:
                    # All batches of a pass were asked for before the next one follows it; with one
                    # more the builder sees that there is none.
                    self._builder.more() if follows else self._builder.drop()
                self._requested[number] = wanted
                self._passes.append((number, what))
            elif self._builder is not None and number == self._building:
                self._builder.more(wanted)
            elif number in self._requested:
                self._requested[number] += wanted


def _leave(code: int) -> NoReturn:
    """End this process, from any thread, whatever the others are at."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class _Bare:
    """Pickle an exception so that it is made again without its constructor."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _rebuilt, (type(self.error), self.error.args, self.error.__dict__)


def _rebuilt(kind: type[BaseException], args: Any, state: dict[str, Any]) -> BaseException:
    """Return an exception of these attributes."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def _pickled(error: BaseException) -> bytes | None:
    """Return an exception, pickled so that its type and text come back; None: it cannot be."""
    # Pickle calls the constructor with `args`, the finished text: one that makes the text of other
    # arguments fails, or puts its words around it once more.
    for one in (error, _Bare(error)):
        with contextlib.suppress(Exception):
            data = pickle.dumps(one)
            if _shown(pickle.loads(data)) == _shown(error):
                return data
    return None


def _shown(error: BaseException) -> str:
    """Return the type and text of an exception, but for the addresses of objects."""
    return re.sub("0x[0-9a-f]+", "", "".join(traceback.format_exception_only(error)))


def _seed(seed: int) -> None:
    """Seed the generators that transforms may draw from, for each process another."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed >> 1)
