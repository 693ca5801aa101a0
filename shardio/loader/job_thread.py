"""One thread that runs jobs in order: what blocks goes there, and the training loop goes on.

How it works. It is a ThreadPoolExecutor of one thread, which ends when nobody has the executor any
more. An interpreter that ends waits for the jobs that were submitted.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_here = threading.local()  # has `works` in each thread of a JobThread


class JobThread:
    """Run jobs on one thread of its own, in the order in which they are submitted."""

    def __init__(self, name: str) -> None:
        """Take a name for the thread, which begins with the first job."""
        self._executor = ThreadPoolExecutor(1, name, _works_here)
        self._owner = os.getpid()
        self._last: Callable[[], Future[Any] | None] = lambda: None

    def submit(self, function: Callable[..., T], *args: Any, **options: Any) -> ThreadJob[T]:
        """Run function(*args, **options) there, after all jobs before it."""
        future = self._executor.submit(function, *args, **options)
        self._last = weakref.ref(future)  # who has the job has what it returned, nobody else
        return ThreadJob(future)

    def wait(self) -> None:
        """Wait until all jobs are over."""
        last = self._last()
        if last is not None and _may_wait(self._owner):
            wait([last])


class ThreadJob(Generic[T]):
    """Hold a job of a JobThread, and what it returned or raised."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future
        self._owner = os.getpid()

    def done(self) -> bool:
        """Return True if the job is over."""
        return self._future.done()

    def result(self) -> T:
        """Return what the job returned, or raise what it raised, when it is over."""
        try:
            return self._future.result()
        finally:
            del self  # the traceback of what is raised holds this frame

    def end(self) -> T | None:
        """Drop the job if it has not begun, else wait for it. Return its result, if it has one."""
        if self._future.cancel() or not _may_wait(self._owner):
            return None
        wait([self._future])
        return None if self._future.exception() else self._future.result()


def _works_here() -> None:
    _here.works = True


def _may_wait(owner: int) -> bool:
    """Return False on the thread itself, where the collector may bring us, and in a fork."""
    return not hasattr(_here, "works") and owner == os.getpid()
