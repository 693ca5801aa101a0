"""The trainer's end of one loader process: what is asked of it, and what it sent.

How it works. Each batch lies in a buffer of shared memory, which is mapped here once. A process
sends the descriptors of its buffers by a second socket. Where pages are locked, the trainer reads
these sockets of all processes whenever it takes a batch, or waits for one, and a thread maps and
locks the buffers (`JobThread`). Each request also says which buffers are free again. A process that
is gone has closed its socket: `receive` says which one, and how it ended.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import signal
import socket
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, NoReturn

from .. import machine
from ..dataset.whereabouts import BatchTimeout
from ..errors import WorkerError
from ..storage import descriptors
from .base import Pass
from .buffer_pool import MappedBuffer, PageLock
from .job_thread import JobThread
from .worker_process import BUFFER_MESSAGE, Sent

WAIT_S = 5.0  # for a process that was told to leave, before it is killed
GUARD = 'A script needs `if __name__ == "__main__":` around all that it does'  # unless it forks
_ENDED_S = 0.02  # between two looks whether one that is to end has
_SIGNALS: dict[int, str] = {one.value: one.name for one in signal.Signals}
LOOK = 32  # batches of a process after which a buffer that was free all the time is given back


@dataclass(eq=False)
class WorkerConnection:
    """Hold the trainer's end of one loader process: its socket, and the buffers mapped of it."""

    number: int
    process: Any  # of multiprocessing
    connection: Connection
    buffer_socket: Connection  # by which it shows its buffers
    max_buffers: int  # that it keeps, used or free
    lock: PageLock | None
    late: BatchTimeout
    mapper: JobThread | None = None  # that maps and locks buffers
    pass_number: int = -1  # the pass that it was told last
    requested: int = 0  # batches of that pass, so far
    mapped: dict[int, MappedBuffer] = field(default_factory=dict)  # by buffer
    freed: deque[int] = field(default_factory=deque)  # whose last view died; any thread appends

    def __post_init__(self) -> None:
        # One for each use: two threads may not ask one at a time.
        self._arrives, self._is_there = select.poll(), select.poll()
        for one in self._arrives, self._is_there:
            one.register(self.connection.fileno(), select.POLLIN)
        self._buffer_socket = descriptors.as_socket(self.buffer_socket)
        self._others: dict[int, WorkerConnection] = {}  # by socket, who shows buffers early
        self._closed = False
        self._batches = 0
        self._spare = self.max_buffers  # the least of the last so many
        self._surplus = False  # a buffer is to be given back

    def watch(self, all_of_them: Iterable[WorkerConnection]) -> None:
        """Look at what these show, too, when a batch is received: they show buffers early."""
        for other in all_of_them:
            self._others[other._buffer_socket.fileno()] = other
            self._arrives.register(other._buffer_socket.fileno(), select.POLLIN)

    def start_pass(self, number: int, what: Pass, wanted: int, *, follows: bool = False) -> None:
        """Ask for the first batches of a pass. What is not made yet of the pass before is dropped;
        with follows=True it is made first."""
        self.pass_number, self.requested = number, wanted
        self._send(number, what, follows, wanted)

    def more(self, wanted: int = 1) -> None:
        """Ask for so many more batches of the pass that it was told last."""
        self.requested += wanted
        self._send(self.pass_number, None, False, wanted)

    def discard(self) -> None:
        """Receive what was made of a pass that was left, so that the next pass uses its buffers
        again."""
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
        if self._batches % LOOK == 0:
            self._surplus, self._spare = self._spare > 0, self.max_buffers

    def _send(self, number: int, what: Pass | None, follows: bool, wanted: int) -> None:
        """Send a request, with the buffers that are free again; those too many are given back."""
        free, gone = [], []
        while self.freed:
            buffer = self.freed.popleft()
            if self._surplus or len(self.mapped) > self.max_buffers or self.mapped[buffer].shared:
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
            sent = Sent.load(self.connection.recv_bytes())
        except (EOFError, OSError):
            self._gone()
        while sent.buffer >= 0 and not self._knows(sent):
            if not self._map_shown():
                self._gone()
        return sent

    def _knows(self, sent: Sent) -> bool:
        """Return True if the buffer of a batch is mapped, or is being mapped, as it is now."""
        return sent.buffer in self.mapped and self.mapped[sent.buffer].size >= sent.size

    def _map_shown(self) -> bool:
        """Map what it shows: a new buffer, or one that has grown. False: it is gone.

        Raises WorkerError where there is no room for a descriptor.
        """
        try:
            data, fd = descriptors.receive_with(self._buffer_socket, BUFFER_MESSAGE.size)
        except (EOFError, OSError):
            return False
        buffer, size = BUFFER_MESSAGE.unpack(data)
        if buffer in self.mapped:
            self.mapped[buffer].map(size)
        elif fd >= 0:
            self.mapped[buffer] = new = MappedBuffer(fd, size, self.lock, self.mapper)
            if self._closed:  # meanwhile, by another thread, which may not have seen it
                new.close()
                return False
        else:
            raise WorkerError(
                f"loader process {self.number} sent a descriptor, and this process has no room "
                "for another: too many files are open. Allow it more (ulimit -n)"
            ) from OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return True

    def _wait(self, since: float) -> None:
        """Wait until something comes from it, or it is gone."""
        while not self._comes(self.late.pause_s(since) + 1e-3):
            # What it forked may hold its socket open.
            if self.process.exitcode is not None and not self._comes(0):
                self._gone()
            self.late.look(since, self)

    def _comes(self, wait_s: float) -> bool:
        """Return True if something has come from it. Meets the buffers that are shown meanwhile."""
        end = perf_counter() + wait_s
        while True:
            ready = [fd for fd, _ in self._arrives.poll(1e3 * wait_s)]
            for fd in ready:
                other = self._others.get(fd)
                if other is not None and not other._map_shown():
                    self._others.pop(fd, None)  # `receive` says so when its batch is due
                    self._arrives.unregister(fd)
            if self.connection.fileno() in ready:
                return True
            wait_s = max(0.0, end - perf_counter())
            if not ready or not wait_s:
                return False

    def is_ready(self) -> bool:
        """Return True if something has come from it, as far as can be seen without waiting."""
        return bool(self._is_there.poll(0))

    @property
    def name(self) -> str:
        """Return the name of the process in messages."""
        return f"loader process {self.number} (pid {self.process.pid})"

    def end(self) -> None:
        """End the process at once: it answers nothing."""
        self.process.kill()

    def is_stopped(self) -> bool:
        """Return True if it was stopped by a signal, as far as the system says so."""
        return machine.is_stopped(self.process.pid)

    def close(self) -> None:
        """Close the socket, by which the process ends, and the descriptors of its memory."""
        # Shut down: whoever has a copy, and if a thread of ours is just reading from it.
        with contextlib.suppress(OSError), descriptors.as_socket(self.connection) as one:
            one.shutdown(socket.SHUT_RDWR)
        self._closed = True
        self.leave()
        self._others.clear()
        for mapped in list(self.mapped.values()):
            mapped.close()
        self.mapped.clear()
        self.mapper = None  # whose thread ends when nobody has it

    def leave(self) -> None:
        """Close the sockets, and nothing else: in a child that was forked they are its own."""
        self.connection.close()
        self._buffer_socket.close()

    def _gone(self) -> NoReturn:
        join(self.process, WAIT_S)
        code = self.process.exitcode
        how = f"left with exit code {code}"
        advice = "num_workers=0 does it all in this process, where a debugger sees it"
        if code is None:
            how = "closed its socket"
        elif code < 0:
            how = f"was killed by {_SIGNALS.get(-code, f'signal {-code}')}"
            if -code == signal.SIGKILL:
                how += ", as the system does where memory runs out (`dmesg` says so)"
                advice = f"Fewer workers, or a smaller prefetch_factor, take less memory; {advice}"
        last = self.late.whereabouts.last(self.number)
        how += f", while it was at {last}" if last else ""
        if code is not None and code >= 0 and self.pass_number >= 0 and not self.mapped:
            how += ", before it made a batch; what it said, if it did, stands above"
            if getattr(self.process, "_start_method", "fork") != "fork":
                how += f". {GUARD}"
        raise WorkerError(
            f"{self.name} {how}. This pass is over; iterating anew starts new processes. {advice}"
        ) from None


def join(process: Any, wait_s: float) -> None:
    """Wait for its end. Not by one join, which waits for what a child of it may hold open."""
    end = perf_counter() + wait_s
    while process.exitcode is None and perf_counter() < end:
        process.join(_ENDED_S)
