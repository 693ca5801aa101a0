"""The trainer's end of P loader processes, each of which makes every P-th batch (`worker_process`).

How it works. A process is told what to make by its socket, and sends batches that lie in buffers of
shared memory, each mapped here once. What the trainer lets go of is told with the next request. A
process that is gone has closed its socket: the trainer says which and how. One more batch is asked
for with each that is taken; and when all of a pass were asked for, those of the pass that will most
likely come next.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import select
import signal
import socket
import weakref
from collections import deque
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from time import perf_counter
from typing import Any, NoReturn

import numpy as np
import torch

from .. import native
from ..dataset.reader import spare_descriptors
from ..dataset.stream import Stream
from ..dataset.whereabouts import PATIENCE_S, Late, Whereabouts
from ..errors import OptionError, RowError, WorkerError
from ..storage import descriptors
from .base import OVER, Pass
from .buffer_pool import Bytes, Lock, MappedBuffer
from .stats import BatchStats
from .transport import WrappedBatch, unwrap
from .worker_process import Sent, serve

_WAIT_S = 5.0  # for a process that was told to leave, before it is killed
# Buffers beyond the ring that a loop may keep, at most. Each takes two descriptors here, and
# batches that are kept beyond what can be spared of these are copied to memory without any.
_KEPT = 100
_ENDED_S = 0.02  # between two looks whether one that is to end has
_LOOK = 32  # batches of a process after which a buffer that was free all the time is given back


class _Worker:
    """Talk to one loader process, from the trainer."""

    def __init__(
        self,
        number: int,
        process: Any,
        connection: Connection,
        most: int,
        lock: Lock | None,
        late: Late,
    ) -> None:
        self.number = number
        self.process = process
        self.connection = connection
        self._late = late
        self._arrives = select.poll()
        self._arrives.register(connection.fileno(), select.POLLIN)
        self.lock = lock
        self.most = most  # buffers that it keeps when they are free
        self.told = -1  # the number of the pass that it was told last
        self.asked = 0  # batches of that, so far
        self.mapped: dict[int, MappedBuffer] = {}  # by buffer
        self.freed: deque[int] = deque()  # buffers whose last view died; any thread appends
        self._batches = 0
        self._spare = most  # the least of the last so many
        self._surplus = False  # a buffer is to be given back

    def tell(self, number: int, what: Pass, wanted: int, *, follows: bool = False) -> None:
        """Tell it to make this pass. Batches of another one that it has not made are dropped, or,
        if this pass follows that one, made before."""
        self.told, self.asked = number, wanted
        self._send(number, what, follows, wanted)

    def more(self, wanted: int = 1) -> None:
        """Ask for so many more batches of the pass that it was told last."""
        self.asked += wanted
        self._send(self.told, None, False, wanted)

    def discard(self) -> None:
        """Receive what was made of a pass that was left: its buffers serve the one that is told
        next, or that would be made in others."""
        while self.connection.poll():
            self.drop(self.receive(perf_counter()))

    def drop(self, sent: Sent) -> None:
        """Free the memory of a batch that nobody wants."""
        if sent.buffer >= 0:
            self.freed.append(sent.buffer)

    def note(self, spare: int) -> None:
        """Note how many buffers were free when it began a batch. One never wanted is surplus."""
        self._spare = min(self._spare, spare)
        self._batches += 1
        if self._batches % _LOOK == 0:
            self._surplus, self._spare = self._spare > 0, self.most

    def _send(self, number: int, what: Pass | None, follows: bool, wanted: int) -> None:
        """Send a request, with the buffers that are free again; those too many are given back."""
        free, gone = [], []
        while self.freed:
            buffer = self.freed.popleft()
            if self._surplus or len(self.mapped) > self.most or self.mapped[buffer].shared:
                self._surplus = False
                self.mapped.pop(buffer).close()
                gone.append(buffer)
            else:
                free.append(buffer)
        with contextlib.suppress(OSError):  # it is gone: `receive` says so, after what it had sent
            self.connection.send_bytes(pickle.dumps((number, what, follows, wanted, free, gone)))

    def receive(self, since: float) -> Sent:
        """Return what it sends next, awaited since then. Raises WorkerError when late, or gone."""
        try:
            self._wait(since)
            sent: Sent = pickle.loads(self.connection.recv_bytes())
            fd = -1
            if sent.fresh:
                self._wait(since)
                fd = descriptors.receive(self.connection)
        except (EOFError, OSError) as error:
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
                raise WorkerError(
                    f"loader process {self.number} sent a descriptor, and this process has no room "
                    "for another: too many files are open. Allow it more (ulimit -n)"
                ) from error
            self._gone()
        if sent.fresh:
            self.mapped[sent.buffer] = MappedBuffer(fd, sent.size, self.lock)
        if sent.buffer >= 0 and self.mapped[sent.buffer].size < sent.size:
            self.mapped[sent.buffer].map(sent.size)
        return sent

    def _wait(self, since: float) -> None:
        """Wait until something comes from it, or it is gone."""
        while not self._arrives.poll(1e3 * self._late.pause_s(since) + 1):
            # What it forked may hold its socket open.
            if self.process.exitcode is not None and not self._arrives.poll(0):
                self._gone()
            self._late.look(since, self)

    @property
    def name(self) -> str:
        """Return the name of the process in messages."""
        return f"loader process {self.number} (pid {self.process.pid})"

    def end(self) -> None:
        """End the process at once: it answers nothing."""
        self.process.kill()

    def is_stopped(self) -> bool:
        """Return True if it was stopped by a signal, as far as the system says so."""
        try:
            with open(f"/proc/{self.process.pid}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except (OSError, IndexError):
            return False

    def close(self) -> None:
        """Close the socket, by which the process ends, and the descriptors of its memory."""
        # Shut down: whoever has a copy, and if a thread of ours is just reading from it.
        with contextlib.suppress(OSError), descriptors.as_socket(self.connection) as one:
            one.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        for mapped in self.mapped.values():
            mapped.close()
        self.mapped.clear()

    def _gone(self) -> NoReturn:
        _join(self.process, _WAIT_S)
        code = self.process.exitcode
        how = f"left with exit code {code}"
        advice = "num_workers=0 does it all in this process, where a debugger sees it"
        if code is None:
            how = "closed its socket"
        elif code < 0:
            how = f"was killed by {_signal_name(-code)}"
            if -code == signal.SIGKILL:
                how += ", as the system does where memory runs out (`dmesg` says so)"
                advice = f"Fewer workers, or a smaller prefetch_factor, take less memory; {advice}"
        last = self._late.whereabouts.last(self.number)
        how += f", while it was at {last}" if last else ""
        if code is not None and code >= 0 and self.told >= 0 and not self.mapped:
            how += ", before it made a batch; what it said, if it did, stands above"
            if getattr(self.process, "_start_method", "fork") != "fork":
                how += '. A script needs `if __name__ == "__main__":` around all that it does'
        raise WorkerError(
            f"{self.name} {how}. This pass is over; iterating anew starts new processes. {advice}"
        ) from None


def _join(process: Any, wait_s: float) -> None:
    """Wait for its end. Not by one join, which waits for what a child of it may hold open."""
    end = perf_counter() + wait_s
    while process.exitcode is None and perf_counter() < end:
        process.join(_ENDED_S)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class WorkerProcesses:
    """Run P loader processes: a WorkerPool.

    Batch i of a pass is made by process i mod P. Errors of rows end the pass; WorkerError, and
    whatever interrupts `begin` or `take`, these processes: they are closed.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        workers: int,
        threads: int,
        prefetch: int,
        context: BaseContext,
        own: bool,
        lock: Lock | None,
        timeout_s: float = 0.0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        if multiprocessing.current_process().daemon:
            raise OptionError(
                "this process is a daemon of multiprocessing, as the workers of a DataLoader or of "
                "a Pool are, and such may not start processes: give ShardLoader "
                "num_workers=0, or start this process with daemon=False"
            )
        self._prefetch = prefetch
        self._own = PrivateBuffers(lock, prefetch + 2)
        self._always = own  # every batch goes to memory of its own
        self._kept = min(_KEPT, spare_descriptors() // 2)
        self._step = self._steps = 0
        self._now = -1  # the number of the pass that is being taken
        self._newest = -1  # and of the one that was told last
        self._what: Pass | None = None  # what that is
        self._epoch = 0  # of the pass that is being taken
        self._onwards = 0 if stream.evaluates else 1  # epochs from one pass to the next, so far
        self._all: list[_Worker] = []
        self.passes = 0
        self.batch_stats: BatchStats | None = None
        self.most = 0  # buffers that there have been at a time
        self._owner = os.getpid()
        self._closer = weakref.finalize(self, _close, self._all, self._own, self._owner)
        seed = torch.initial_seed()
        whereabouts = Whereabouts(workers, threads)
        late = Late(whereabouts, timeout_s, patience_s)
        method = context.get_start_method()
        if method != "fork":  # what these start is to get Ctrl-C as ever
            resource_tracker.ensure_running()
        if method == "forkserver":
            forkserver.ensure_running()
        for number in range(workers):
            here, there = context.Pipe()
            _CONNECTIONS.add(here)
            process = context.Process(  # type: ignore[attr-defined]
                target=serve,
                args=(there, stream, number, workers, threads, seed, whereabouts),
                name=f"shardio-loader-{number}",
                daemon=True,
            )
            self._all.append(_Worker(number, process, here, prefetch + 2, lock, late))
            _PROCESSES.add(process)
            # Until it ignores Ctrl-C, which takes seconds when it is spawned, it is not to get one.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                if method == "fork":
                    raise
                raise OptionError(
                    f"multiprocessing_context={method!r} sends the dataset to its processes, and "
                    f"this one cannot be pickled: {error}. Take functions and classes of a module "
                    "for transforms and collate_fn, no lambda and none that another function made"
                ) from error
            finally:
                there.close()
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @property
    def closed(self) -> bool:
        """Return True once the processes are ended, by `close` or because of an error."""
        return not self._closer.alive

    @property
    def pids(self) -> list[int]:
        """Return the ids of the processes."""
        return [one.process.pid for one in self._all]

    @property
    def ring(self) -> int:
        """Return the buffers that a loop needs which keeps no batch but the one it is at."""
        return len(self._all) * (self._prefetch + 2)

    @property
    def bytes(self) -> int:
        """Return the bytes of all buffers that the trainer has mapped."""
        shared = sum(mapped.size for one in self._all for mapped in one.mapped.values())
        return self._own.bytes + shared

    def begin(self, what: Pass, steps: int) -> None:
        """Begin a pass of so many batches. What was left of the last one is dropped."""
        self.passes += 1
        guessed = self._newest > self._now and what == self._what
        if not guessed:
            if self._what is not None and 0 <= what.epoch - self._epoch <= 1:
                self._onwards = what.epoch - self._epoch
            self._newest += 1
            self._what = what
        self._now, self._epoch = self._newest, what.epoch
        self._step, self._steps = 0, steps
        with self._unbroken():
            for process in self._all:
                if process.told != self._now:
                    process.discard()
                    process.tell(self._now, what, self._prefetch)
                elif process.asked < self._prefetch:
                    process.more(self._prefetch - process.asked)

    def take(self) -> Any:
        """Return the next batch of the pass. Raises what making it raised, WorkerError."""
        if self.closed or self._owner != os.getpid():
            raise WorkerError(OVER)
        process = self._all[self._step % len(self._all)]
        start = perf_counter()
        with self._unbroken():
            while (sent := process.receive(start)).number != self._now:
                process.drop(sent)
            process.note(sent.spare)
            arrived = perf_counter()
            self._step += 1
            if sent.wrapped is not None:
                batch = self._unpack(process, sent, sent.wrapped)
        if sent.wrapped is None:
            _raise(sent)
        self.batch_stats = sent.stats._replace(
            wait_s=arrived - start, transport_s=perf_counter() - arrived
        )
        return batch

    def _unpack(self, process: _Worker, sent: Sent, wrapped: WrappedBatch) -> Any:
        self._ask(process)
        buffers = sum([len(one.mapped) for one in self._all])
        self.most = max(self.most, buffers)
        mapped, freed, buffer = process.mapped[sent.buffer], process.freed, sent.buffer
        view = mapped.view(lambda _: freed.append(buffer))
        if self._always or buffers > self.ring + self._kept:
            view = self._own.copy(view[: sent.used])
        return unwrap(wrapped, view)

    def ready(self) -> bool:
        """Return True if `take` would most likely not wait."""
        if self.closed:
            return True
        return bool(self._all[self._step % len(self._all)].connection.poll())

    def close(self) -> None:
        """End the processes. Batches that were handed out stay."""
        self._closer()

    @contextlib.contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Close all when this is left early: a message may be half read, or a batch lost."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, WorkerError) and self.closed:  # by another thread: no failure
                raise WorkerError(OVER) from None
            self.close()
            raise

    def _ask(self, process: _Worker) -> None:
        """Ask a process for one more batch, for the one that was taken."""
        if process.told != self._now or process.asked < self._batches(process):
            process.more()
            return
        # All its batches of this pass were asked for: on with the next, which is most likely this.
        assert self._what is not None
        if self._newest == self._now:
            self._what = self._what._replace(epoch=self._epoch + self._onwards, start=0)
            self._newest += 1
        process.tell(self._newest, self._what, 1, follows=True)

    def _batches(self, process: _Worker) -> int:
        """Return the number of batches that a process makes of this pass."""
        return len(range(process.number, self._steps, len(self._all)))


class PrivateBuffers:
    """Copy batches to memory of the trainer alone, which is used again."""

    def __init__(self, lock: Lock | None, most: int) -> None:
        self._all: set[MappedBuffer] = set()
        self._free: deque[MappedBuffer] = deque()
        self._lock = lock
        self._most = most  # pieces that are free, and kept for what comes

    @property
    def bytes(self) -> int:
        """Return the bytes of all its memory."""
        return sum(own.size for own in self._all)

    def copy(self, data: Bytes) -> Bytes:
        """Return a copy, whose memory is used again when its last view is gone."""
        size = len(data)
        while self._free:
            own = self._free.popleft()
            if own.size >= size and len(self._free) < self._most:
                break
            own.close()
            self._all.discard(own)
        else:
            own = MappedBuffer(-1, max(1, size), self._lock)
            self._all.add(own)
        free = self._free
        view = own.view(lambda _: free.append(own))
        # By this thread alone: 4 ms of CPU for 38 MB, by the core 2.5. torch's copy_ takes 9, as
        # its threads spin where loader processes have the cores (benchmarks/transport.py).
        if native.core is not None:
            native.core.copy(view, data)
        else:
            np.copyto(view[:size], data)
        return view

    def close(self) -> None:
        """Unlock its pages, also where batches are still in use."""
        for own in self._all:
            own.close()
        self._all.clear()
        self._free.clear()


def _raise(sent: Sent) -> NoReturn:
    """Raise the error of a row, as it was raised, with where that was as its cause."""
    if sent.error is None:
        raise WorkerError(f"{sent.where}: {sent.text}")
    try:
        error = pickle.loads(sent.error)
    except Exception:  # it could there
        raise WorkerError(f"{sent.where}: {sent.text}") from None
    raise error from RowError(f"{sent.where}\n\n{sent.text}")


def _close(processes: list[_Worker], own: PrivateBuffers, owner: int) -> None:
    """End loader processes: without their sockets they leave."""
    if os.getpid() != owner:  # a child that was forked: they are not its own
        return
    for one in processes:
        one.close()
    own.close()
    end = perf_counter() + _WAIT_S
    for one in processes:
        if one.process.pid is None:  # starting it failed
            continue
        _join(one.process, end - perf_counter())
        if one.process.is_alive():
            one.process.kill()
            _join(
                one.process, _WAIT_S
            )  # where the system itself hangs, that does not end it either
    processes.clear()


# Sockets of the trainer are not for those that it forks: with a copy elsewhere, its own end would
# close nothing, and loader processes would outlive it.
_CONNECTIONS: weakref.WeakSet[Connection] = weakref.WeakSet()
_PROCESSES: weakref.WeakSet[Any] = weakref.WeakSet()


def _forget() -> None:
    for connection in list(_CONNECTIONS):
        connection.close()
    # A child of os.fork() that ends as Python does would end daemons that it takes for its own.
    known: set[Any] = getattr(multiprocessing.process, "_children", set())
    known.difference_update(list(_PROCESSES))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
