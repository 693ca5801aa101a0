"""Ranges of remote objects that this process asked for: ahead of use, within bytes in flight.

Who sends the requests. A loader process, which nobody forks, holds a client itself (`Transfers`).
Every other process has a helper do it (`Helper`), and so has a loader process whose parent, or own
code, had a client in use when it forked: requests in such a child hang.

What is announced is asked for in that order while bytes in flight leave room: those that are under
way, and those that arrived and were not read yet. Who waits for a range asks for it at once.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from ..errors import StorageError
from .client import Reply, Request
from .helper import Helper
from .stores import BODY_S
from .transfers import Figures, Transfers, Waits

IN_FLIGHT = 256 << 20  # bytes of a machine: under way, or arrived and not read; processes share it
LEAST_IN_FLIGHT = 16 << 20  # of one process: two ranges
_STALE = 2  # budgets of bytes that were read since a range was asked for: nobody will read it now
_HANGS_S = 5.0  # more than a request may take, without any answer of the helper
_LOOK_S = 1.0  # between two looks whether there was one


class ReleasedError(Exception):
    """Report that a range was released before its bytes were read."""


class Range:
    """A range that was asked for. It counts as in flight until it is released, or dropped."""

    __slots__ = ("__weakref__", "_charged", "_future", "_owner", "_released", "done", "request")

    def __init__(
        self, owner: Ranges, request: Request, done: Callable[[Future[Reply]], None] | None = None
    ) -> None:
        self._owner, self.request, self.done = owner, request, done
        self._future: Future[Reply] | None = None  # None: not sent yet
        self._charged = 0  # bytes that count as in flight
        self._released = False

    def wait(self) -> Reply:
        """Return the reply, when it is there. Raises StorageError, ReleasedError."""
        future = self._owner.send_now(self)
        store = self.request.store
        limit_s = store.timeout_s + 2 * min(BODY_S, store.timeout_s / 2) + _HANGS_S
        heard, waited_s = self._owner.sender.heard, 0.0
        try:
            while future is not None:
                try:
                    return future.result(_LOOK_S)
                except concurrent.futures.CancelledError:
                    break
                except concurrent.futures.TimeoutError:
                    sender = self._owner.sender
                    waited_s += _LOOK_S  # not by the clock: this process may have been stopped
                    if sender.heard != heard:  # others are answered: it is this one's turn later
                        heard, waited_s = sender.heard, 0.0
                    if waited_s <= limit_s:
                        continue
                    sender.restart()
                    raise StorageError(
                        f"{self.request.shown}: no answer within {limit_s:.0f} s from the process "
                        "that reads from URLs for this one. The next read starts another"
                    ) from None
                except StorageError:
                    if self._owner.closed:
                        break
                    raise
        finally:
            future = None  # an error holds this frame, and would hold itself
        raise ReleasedError

    def keep(self) -> None:
        """Count as in flight only until the bytes have arrived: they stay here for good."""
        future = self._owner.send_now(self)
        if future is not None:
            future.add_done_callback(partial(_arrived, weakref.ref(self)))

    def release(self) -> None:
        """Let go of the bytes: others are asked for instead. A second call does no harm."""
        self._owner.release(self)

    def drop(self) -> None:
        """Let go of a range that nobody else has, in a `__del__`.

        The collector may call that within any line of this thread: so no lock is taken.
        """
        if self._charged or self._future is not None:
            self._owner.dropped.append((self._charged, self._future))
        self._charged, self._future, self._released = 0, None, True

    def __del__(self) -> None:
        self.drop()


def _arrived(wanted: weakref.ref[Range], _: Future[Reply]) -> None:
    if (found := wanted()) is not None:
        found._owner.arrived(found)


class Ranges:
    """All ranges that one process asked for."""

    def __init__(self, sender: Transfers | Helper, consumers: int) -> None:
        self.sender = sender
        self._lock = threading.Lock()
        self._waiting: deque[weakref.ref[Range]] = deque()  # announced, not sent yet
        self._sent: deque[tuple[weakref.ref[Range], int]] = deque()  # and `_read` when it was
        self.dropped: deque[tuple[int, Future[Reply] | None]] = deque()  # of ranges that are gone
        self._bytes = 0  # in flight
        self._read = 0  # bytes that were released until now
        self.closed = False
        self.budget = 0
        self.share(consumers)

    @property
    def in_flight(self) -> int:
        """Return the bytes that are under way, or arrived and were not read yet."""
        with self._lock:
            gone = self._drain()
            found = self._bytes
        _cancel(gone)
        return found

    def close(self, wait_s: float = 2.0) -> bool:
        """Ask for nothing more. Returns False if requests are still under way."""
        self.closed = True
        return self.sender.close(wait_s)

    def share(self, consumers: int) -> None:
        """Take this process's part of what the machine has in flight."""
        self.budget = max(LEAST_IN_FLIGHT, IN_FLIGHT // consumers)
        self.sender.share(consumers)

    def announce(
        self, request: Request, done: Callable[[Future[Reply]], None] | None = None
    ) -> Range:
        """Ask for a range that will be read soon, as soon as there is room for it.

        done: called when the answer is there, by a thread that others wait for.
        """
        wanted = Range(self, request, done)
        with self._lock:
            self._waiting.append(weakref.ref(wanted))
            gone = self._fill()
        _cancel(gone)
        return wanted

    def want(self, request: Request) -> Range:
        """Ask for a range that somebody waits for already."""
        return Range(self, request)

    def send_now(self, wanted: Range) -> Future[Reply] | None:
        """Send a range at once, whatever is in flight. Returns None if it was released."""
        with self._lock:
            if wanted._future is None and not wanted._released:
                self._send(wanted, urgent=True)
            future, gone = wanted._future, self._drain()
        _cancel(gone)
        return future

    def release(self, wanted: Range) -> None:
        """Let go of the bytes of a range."""
        with self._lock:
            gone = [*self._release(wanted), *self._fill()]
        _cancel(gone)

    def arrived(self, wanted: Range) -> None:
        """Take note that a range has arrived, and will be kept."""
        with self._lock:
            self._discharge(wanted)
            gone = self._fill()
        _cancel(gone)

    # Below, the lock is held. What is returned is to be cancelled without it.

    def _fill(self) -> list[Future[Reply]]:
        """Send what was announced, while there is room."""
        gone = self._drain()
        while self._waiting:
            wanted = self._waiting[0]()
            if wanted is not None and wanted._future is None and not wanted._released:
                length = wanted.request.length
                if self._bytes and self._bytes + length > self.budget:
                    stale = self._stale()
                    if stale is None:
                        break
                    gone += self._release(stale)
                    continue
                self._send(wanted, urgent=False)
            self._waiting.popleft()
        return gone

    def _send(self, wanted: Range, *, urgent: bool) -> None:
        wanted._charged = wanted.request.length
        self._bytes += wanted._charged
        self._sent.append((weakref.ref(wanted), self._read))
        wanted._future = self.sender.submit(wanted.request, urgent=urgent)
        if wanted.done is not None:
            wanted._future.add_done_callback(wanted.done)

    def _drain(self) -> list[Future[Reply]]:
        """Take note of ranges that are gone without having been released."""
        gone = []
        while self.dropped:
            charged, future = self.dropped.popleft()
            self._bytes -= charged
            if future is not None:
                gone.append(future)
        return gone

    def _stale(self) -> Range | None:
        """Return a range that arrived, and that readers have left behind; None: there is none.

        Of a pass that was left early, or of records that nobody asked for in the end. Without this
        such ranges would fill the budget for ever.
        """
        while self._sent:
            wanted, read = self._sent[0][0](), self._sent[0][1]
            if wanted is not None and wanted._charged:
                old = self._read - read > _STALE * self.budget
                return wanted if old and wanted._future and wanted._future.done() else None
            self._sent.popleft()
        return None

    def _release(self, wanted: Range) -> list[Future[Reply]]:
        future, wanted._future, wanted._released = wanted._future, None, True
        self._discharge(wanted)
        while self._sent and ((first := self._sent[0][0]()) is None or not first._charged):
            self._sent.popleft()
        return [] if future is None else [future]

    def _discharge(self, wanted: Range) -> None:
        self._bytes -= wanted._charged
        self._read += wanted._charged
        wanted._charged = 0


def _cancel(futures: list[Future[Reply]]) -> None:
    """Say that nobody wants these any more; no lock is held, since callbacks run."""
    for future in futures:
        future.cancel()


# ------------------------------------------------------------------------- those of this process

_RANGES: Ranges | None = None
_LOCK = threading.Lock()
_CONSUMERS = 1
_WAITS: Waits = None
_IS_OWN = False  # this process is one of shardio's, such as ShardLoader's
_INHERITED = False  # it was forked by a process in which a client was in use


def ranges() -> Ranges:
    """Return the ranges of this process."""
    global _RANGES
    with _LOCK:
        if _RANGES is None:
            kind = Transfers if _holds_client() else Helper
            _RANGES = Ranges(kind(waits=_WAITS), _CONSUMERS)
        return _RANGES


def send(request: Request) -> Future[Reply]:
    """Send a request whose answer holds no bytes of an object: an upload, or a look at one."""
    return ranges().sender.submit(request)


def share(consumers: int) -> None:
    """Say how many processes of this machine read from URLs, this one included."""
    global _CONSUMERS
    with _LOCK:
        if consumers != _CONSUMERS:
            _CONSUMERS = consumers
            if _RANGES is not None:
                _RANGES.share(consumers)


def figures() -> Figures | None:
    """Return what the requests of this process came to; None: there were none."""
    return None if _RANGES is None else _RANGES.sender.figures


class RequestCount(NamedTuple):
    """Count requests, those that were sent again, and those that were refused as too many."""

    requests: int = 0
    retries: int = 0
    throttled: int = 0


class RequestMeter:
    """Say what requests this process made since it was asked before."""

    def __init__(self) -> None:
        self._before = figures() or Figures()

    def new(self) -> RequestCount:
        """Return the requests since the last call. Where there are none: 0.1 us."""
        now = figures()
        if now is None:
            return _NONE
        if now.requests < self._before.requests:  # they began anew
            self._before = Figures()
        new, self._before = now.since(self._before), now
        return RequestCount(new.requests, sum(new.retries.values()), new.retries["throttled"])


_NONE = RequestCount()


def helper_pid() -> int | None:
    """Return the process id of this process's helper; None: it has none."""
    sender = None if _RANGES is None else _RANGES.sender
    return sender.pid if isinstance(sender, Helper) else None


def close() -> None:
    """End the helper, or the requests, of this process. The next read starts anew."""
    global _RANGES
    with _LOCK:
        ended, _RANGES = _RANGES, None
    if ended is not None:
        ended.close()


def hold_client() -> None:
    """Say that this process is shardio's own, and not forked: it may hold a client itself."""
    global _IS_OWN
    _IS_OWN = True


def tell_waits(waits: Waits) -> None:
    """Have a function told, from now on, while requests fail and are sent again.

    It is called in any thread, also of processes that are forked later.
    """
    global _WAITS
    _WAITS = waits


def _holds_client() -> bool:
    """Return True if this process may hold a client itself."""
    if _INHERITED or client_in_use():
        return False
    if _IS_OWN:
        return True
    data = sys.modules.get("torch.utils.data")  # asked, never imported
    return data is not None and data.get_worker_info() is not None


def client_in_use() -> bool:
    """Return True if the threads of a client run in this process, whoever started them."""
    if "obstore" not in sys.modules:
        return False
    try:
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
                if file.read().startswith("tokio"):
                    return True
    except OSError:
        return True  # it cannot be told here
    return False


def _before_fork() -> None:
    global _FORKING
    _FORKING = client_in_use()


_FORKING = False


def _after_fork() -> None:
    """Forget what a child has inherited: it is the parent's."""
    global _RANGES, _LOCK, _IS_OWN, _INHERITED, _CONSUMERS
    inherited, _RANGES, _LOCK = _RANGES, None, threading.Lock()
    _IS_OWN, _CONSUMERS = False, 1
    _INHERITED = _INHERITED or _FORKING
    if inherited is not None and isinstance(inherited.sender, Helper):
        inherited.sender.abandon()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def leave(code: int = 0) -> None:
    """End the helper; wait a moment for requests that are under way.

    Where some still are, the process ends here, with this exit code.
    """
    if _RANGES is not None and not _RANGES.close(1.0):
        # A thread that comes back from the client while Python ends would abort the process.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)


atexit.register(leave)
