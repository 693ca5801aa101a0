"""Independent tasks on all cores: processes that report progress, stop together, and leave nothing.

Tasks are processes' work, not threads': encoding and checking records holds the GIL. Workers are
forked (`spawn` would import the user's main module again, and need its `__main__` guard), and get
one task at a time through a pipe. There is no thread, no semaphore and no shared file here, so that
it works without /dev/shm; `concurrent.futures` needs all three, and cannot end a worker that hangs.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing.connection
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from ..errors import StorageError
from ..machine import processors
from ..storage import ranges
from ..units import check_int, unexpected

Task = TypeVar("Task")
Result = TypeVar("Result")
Progress = Callable[[int, int], None]  # done, in all
Reply = tuple[Any, Exception | None, str]  # a result, or an error and its traceback

_LOOK_S = 0.2  # between two looks at how much is done
_GRACE_S = 1.0  # that workers have to stop by themselves
_MAX_JOBS = 1023

_Connection = Any  # multiprocessing.connection.Connection; generic in some releases of typeshed


class StoppedError(BaseException):
    """Other work failed or was interrupted; what is in flight is dropped."""


class Report:
    """How much is done, over all processes, and the flag that stops them.

    Shared, anonymous memory: number 0 is the flag, and each worker adds to a number of its own, so
    nothing is locked.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total = progress, total
        self._counts = memoryview(mmap.mmap(-1, 8 * (_MAX_JOBS + 1))).cast("q")

    def add(self, count: int, worker: int = 0) -> None:
        """Count what the work has done, now and then. Raises StoppedError when it is to end."""
        if self._counts[0]:
            raise StoppedError
        self._counts[1 + worker] += count

    def show(self) -> None:
        """Tell the caller's `progress`. Call it in the process that waits."""
        if self._progress is not None:
            self._progress(sum(self._counts[1:]), self._total)

    def stop(self, value: bool) -> None:
        """Ask all work to end, or let new work begin."""
        self._counts[0] = value


def check_executor(executor: Executor | None) -> None:
    """Raise OptionError for what is no executor."""
    if not isinstance(executor, Executor | None):
        raise unexpected("executor", executor, "a shardio.RayExecutor, or nothing")


def processes(jobs: int | None) -> int:
    """Return how many processes `jobs` asks for: one a core when it is None. Raises OptionError."""
    return processors() if jobs is None else check_int("jobs", jobs)


@runtime_checkable
class Executor(Protocol):
    """Run tasks elsewhere than in processes of this machine."""

    def connected(self, jobs: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which `run` need not connect anew."""

    def run(
        self,
        work: Callable[[Task, Callable[[int], None]], Result],
        tasks: Sequence[Task],
        *,
        jobs: int,
        report: Report,
        seen: Callable[[Result], None] | None = None,
    ) -> Generator[Result, None, None]:
        """Do as the function `run` does; work, tasks and results can be pickled."""


def run(
    work: Callable[[Task, Callable[[int], None]], Result],
    tasks: Sequence[Task],
    *,
    jobs: int,
    report: Report,
    seen: Callable[[Result], None] | None = None,
    executor: Executor | None = None,
) -> Generator[Result, None, None]:
    """Give work(task, add) of each task, in order. `add` counts what is done, and stops the work.

    seen: called in this process with each result as it comes, in any order; while it waits, no task
    begins. executor: does it instead of processes of this machine.

    Worker processes end with this one, however it ends. Raises what work raises, and StorageError
    when a worker is killed.
    """
    if executor is not None:
        yield from executor.run(work, tasks, jobs=jobs, report=report, seen=seen)
        return
    jobs = min(jobs, len(tasks), _MAX_JOBS)
    # Processes that are daemons themselves (a Pool's workers are) may not have children.
    if jobs <= 1 or multiprocessing.current_process().daemon:

        def add(count: int) -> None:
            report.add(count)
            report.show()

        for task in tasks:
            result = work(task, add)
            if seen is not None:
                seen(result)
            yield result
        return
    pool = _Pool(work, jobs, report, seen)
    try:
        yield from pool.run(tasks)
    except BaseException:
        report.stop(True)
        raise
    finally:
        pool.close()
        report.stop(False)


class _Pool:
    def __init__(
        self,
        work: Callable[..., Any],
        jobs: int,
        report: Report,
        seen: Callable[[Any], None] | None,
    ) -> None:
        self._work, self._jobs, self._report, self._seen = work, jobs, report, seen
        self._idle: list[_Connection] = []
        self._busy: dict[_Connection, int] = {}  # to the number of the task
        self._processes: list[Any] = []

    def run(self, tasks: Sequence[Any]) -> Iterator[Any]:
        found: dict[int, Any] = {}
        number = turn = 0  # the next task to send, and the next result to give
        while True:
            while number < len(tasks) and (self._idle or len(self._processes) < self._jobs):
                connection = self._idle.pop() if self._idle else self._start()
                try:
                    connection.send(tasks[number])
                except (BrokenPipeError, ConnectionResetError):
                    raise _killed() from None
                self._busy[connection] = number
                number += 1
            while turn in found:
                yield found.pop(turn)
                turn += 1
            if not self._busy:
                return
            for connection in multiprocessing.connection.wait(list(self._busy), _LOOK_S):
                found[turned := self._busy.pop(connection)] = _receive(connection)
                self._idle.append(connection)
                if self._seen is not None:
                    self._seen(found[turned])
            self._report.show()

    def _start(self) -> _Connection:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        inherited = [ours, *self._idle, *self._busy]
        process = context.Process(
            target=_serve,
            args=(
                *(self._work, theirs, inherited, self._report),
                *(len(self._processes), self._jobs, os.getpid()),
            ),
            daemon=True,
        )
        # Ctrl-C reaches the whole group; the child must not meet it before it ignores it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of any other thread; the child touches nothing that one may hold
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()  # so that the end of the child is the end of its pipe
        self._processes.append(process)
        return ours

    def close(self) -> None:
        """End all workers: those that wait at once, others when they look, or after a second."""
        for connection in (*self._idle, *self._busy):
            connection.close()
        until = time.monotonic() + _GRACE_S
        for process in self._processes:
            process.join(max(until - time.monotonic(), 0.0))
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def _receive(connection: _Connection) -> Any:
    try:
        reply = connection.recv()
    except (EOFError, ConnectionResetError):
        raise _killed() from None
    return unwrap(reply)


def unwrap(reply: Reply) -> Any:
    """Return the result in a reply, or raise its error."""
    result, error, text = reply
    if error is not None:
        raise error from (_InWorkerError(text) if text else None)
    return result


class _InWorkerError(Exception):
    """The traceback of what a worker raised, shown above ours."""


def _killed() -> StorageError:
    return StorageError(
        "a worker process was killed (out of memory?). What is finished is kept: run it again to "
        "resume, with fewer --jobs if memory was short"
    )


def _serve(
    work: Callable[..., Any],
    connection: _Connection,
    inherited: list[_Connection],
    report: Report,
    worker: int,
    jobs: int,
    parent: int,
) -> None:
    """Live as a worker: do tasks until the pipe ends."""
    ranges.hold_client()
    ranges.share(jobs)  # the machine's requests, and its memory for them
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for other in inherited:
        other.close()
    _die_with(parent)

    def add(count: int) -> None:
        if os.getppid() != parent:  # it was killed, and can stop nobody
            os._exit(1)
        report.add(count, worker)

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, StoppedError):
        while True:
            connection.send(attempt(work, connection.recv(), add))


def attempt(work: Callable[..., Any], task: Any, add: Callable[[int], None]) -> Reply:
    """Do a task; return its result, or what it raised, as they can be sent."""
    try:
        return work(task, add), None, ""
    except Exception as error:
        return None, *_portable(error)


def _portable(error: Exception) -> tuple[Exception, str]:
    """Return an exception, and its traceback, as they can be sent."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}"), text
    return error, text


def _die_with(parent: int) -> None:
    """Have Linux end this process with its parent, also a killed one; elsewhere `add` looks."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
