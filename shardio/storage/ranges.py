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
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from ..errors import StorageError
from .client import Reply, Request
from .helper import Helper
from .stores import BODY_S
from .transfers import Figures, Transfers

IN_FLIGHT = 256 << 20  # bytes of a machine: under way, or arrived and not read; processes share it
LEAST_IN_FLIGHT = 16 << 20  # of one process: two ranges
_HANGS_S = 2 * BODY_S  # longer than a request may take, without any answer of the helper


class Sender(Protocol):
    """Send requests, each as a Future of its Reply."""

    figures: Figures

    def submit(self, request: Request, *, urgent: bool = False) -> Future[Reply]:
        """Send a request. urgent: before all that are not."""

    def share(self, consumers: int) -> None:
        """Take this process's part of the machine's requests."""

    def close(self, wait_s: float = ...) -> bool:
        """Send nothing more. Returns False if requests are still under way."""


class Range:
    """A range that was asked for. It counts as in flight until it is released."""

    __slots__ = ("__weakref__", "_future", "_owner", "_released", "done", "request")

    def __init__(
        self,
        owner: Ranges,
        request: Request,
        done: Callable[[Future[Reply]], None] | None = None,
    ) -> None:
        self._owner, self.request, self.done = owner, request, done
        self._future: Future[Reply] | None = None  # None: not sent yet
        self._released = False

    def wait(self) -> Reply:
        """Return the reply, when it is there. Raises StorageError."""
        if self._future is None:
            self._owner.hurry(self)
        assert self._future is not None
        limit_s = self.request.store.timeout_s + _HANGS_S
        try:
            return self._future.result(limit_s)
        except concurrent.futures.CancelledError:
            raise StorageError(f"{self.request.shown}: the file was closed") from None
        except concurrent.futures.TimeoutError:
            raise StorageError(
                f"{self.request.shown}: no answer within {limit_s:.0f} s from the process that "
                "reads from URLs for this one"
            ) from None

    def keep(self) -> None:
        """Count as in flight only until the bytes have arrived: they stay here for good."""
        if self._future is None:
            self._owner.hurry(self)
        assert self._future is not None
        self._future.add_done_callback(lambda _: self._owner.released(self))

    def release(self) -> None:
        """Let go of the bytes: others are asked for instead. A second call does no harm."""
        if not self._released:
            self._released = True
            if self._future is not None:
                self._future.cancel()
            self._owner.released(self)
            self._future = None


class Ranges:
    """All ranges that one process asked for."""

    def __init__(self, sender: Sender, consumers: int) -> None:
        self.sender = sender
        self._lock = threading.Lock()
        self._waiting: deque[Range] = deque()  # announced, not sent yet
        self._flying: set[int] = set()  # ids of those that were sent, and not released
        self._bytes = 0  # in flight
        self.budget = 0
        self.share(consumers)

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
            self._waiting.append(wanted)
            self._fill()
        return wanted

    def want(self, request: Request) -> Range:
        """Ask for a range that somebody waits for already."""
        return Range(self, request)

    def hurry(self, wanted: Range) -> None:
        """Send a range at once, whatever is in flight."""
        with self._lock:
            if wanted._future is None:
                self._send(wanted, urgent=True)

    def released(self, wanted: Range) -> None:
        """Take note that the bytes of a range are gone."""
        with self._lock:
            if id(wanted) in self._flying:
                self._flying.remove(id(wanted))
                self._bytes -= wanted.request.length
                self._fill()

    def _fill(self) -> None:
        while self._waiting:
            wanted = self._waiting[0]
            if wanted._future is None and not wanted._released:
                length = wanted.request.length
                if self._bytes and self._bytes + length > self.budget:
                    return
                self._send(wanted, urgent=False)
            self._waiting.popleft()

    def _send(self, wanted: Range, *, urgent: bool) -> None:
        self._flying.add(id(wanted))
        self._bytes += wanted.request.length
        wanted._future = self.sender.submit(wanted.request, urgent=urgent)
        if wanted.done is not None:
            wanted._future.add_done_callback(wanted.done)


# ------------------------------------------------------------------------- those of this process

_RANGES: Ranges | None = None
_LOCK = threading.Lock()
_CONSUMERS = 1
_IS_OWN = False  # this process is one of shardio's, such as ShardLoader's
_INHERITED = False  # it was forked by a process in which a client was in use


def ranges() -> Ranges:
    """Return the ranges of this process."""
    global _RANGES
    with _LOCK:
        if _RANGES is None:
            sender: Sender = Transfers() if _holds_client() else Helper()
            _RANGES = Ranges(sender, _CONSUMERS)
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
        ended.sender.close()


def hold_client() -> None:
    """Say that this process is shardio's own, and not forked: it may hold a client itself."""
    global _IS_OWN
    _IS_OWN = True


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
    if _RANGES is not None and not _RANGES.sender.close(1.0):
        # A thread that comes back from the client while Python ends would abort the process.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)


atexit.register(leave)
