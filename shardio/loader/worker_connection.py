"""The trainer's end of one loader process: what is asked of it, and what it sent.

How it works. Each batch lies in a buffer of shared memory, which is mapped here once. What the
trainer lets go of is told with the next request. A process that is gone has closed its socket:
`receive` says which and how.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
import select
import signal
import socket
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, NoReturn

from .. import machine
from ..dataset.whereabouts import Late
from ..errors import WorkerError
from ..storage import descriptors
from .base import Pass
from .buffer_pool import Lock, MappedBuffer
from .worker_process import Sent

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
    most: int  # buffers that it keeps when they are free
    lock: Lock | None
    late: Late
    told: int = -1  # the number of the pass that it was told last
    asked: int = 0  # batches of that, so far
    mapped: dict[int, MappedBuffer] = field(default_factory=dict)  # by buffer
    freed: deque[int] = field(default_factory=deque)  # whose last view died; any thread appends

    def __post_init__(self) -> None:
        self._arrives = select.poll()
        self._arrives.register(self.connection.fileno(), select.POLLIN)
        self._batches = 0
        self._spare = self.most  # the least of the last so many
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
        if self._batches % LOOK == 0:
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
            sent = Sent.load(self.connection.recv_bytes())
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
        while not self._arrives.poll(1e3 * self.late.pause_s(since) + 1):
            # What it forked may hold its socket open.
            if self.process.exitcode is not None and not self._arrives.poll(0):
                self._gone()
            self.late.look(since, self)

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
        self.connection.close()
        for mapped in self.mapped.values():
            mapped.close()
        self.mapped.clear()

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
        if code is not None and code >= 0 and self.told >= 0 and not self.mapped:
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
