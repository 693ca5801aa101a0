"""The pool of P loader processes, each of which builds every P-th batch (`worker_process`).

How it works. Each process is asked for batches, and sends them, by a socket (`worker_connection`).
One more batch is asked for with each that is taken; and when all of a pass were asked for, those of
the pass that will most likely come next.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from multiprocessing import forkserver, resource_tracker
from time import perf_counter
from typing import Any, NoReturn

import torch

from ..dataset.reader import spare_descriptors
from ..dataset.stream import Stream
from ..dataset.whereabouts import BatchTimeout, Whereabouts
from ..errors import OptionError, RowError, WorkerError
from .base import OVER, Pass, PoolOptions, WorkerPool
from .buffer_pool import PrivateBuffers
from .job_thread import JobThread
from .stats import BatchStats, PoolFigures
from .transport import WrappedBatch, unwrap
from .worker_connection import GUARD, WAIT_S, WorkerConnection, join
from .worker_process import Sent, WorkerJob, run_worker

# Buffers beyond the ring that a loop may keep, at most. Each takes two descriptors here, and
# batches that are kept beyond what can be spared of these are copied to memory without any.
_MAX_KEPT_BUFFERS = 100


class WorkerProcesses(WorkerPool):
    """Run P loader processes: a WorkerPool.

    Batch i of a pass is built by process i mod P. Errors of rows end the pass; WorkerError, and
    whatever interrupts `begin` or `take`, these processes: they are closed.
    """

    def __init__(self, stream: Stream, options: PoolOptions) -> None:
        if multiprocessing.current_process().daemon:
            raise OptionError(
                "this process is a daemon of multiprocessing, as the workers of a DataLoader or of "
                "a Pool are, and such may not start processes: give ShardLoader "
                "num_workers=0, or start this process with daemon=False"
            )
        workers, lock = options.workers, options.lock
        max_buffers = options.prefetch + 2
        self._ring = workers * max_buffers
        self._own = PrivateBuffers(max_buffers)
        self._max_kept = min(_MAX_KEPT_BUFFERS, spare_descriptors() // 2)
        self._step = self._steps = 0
        self._now = -1  # the number of the pass that is being taken
        self._newest = -1  # and of the one that was told last
        self._what: Pass | None = None  # what that is
        self._epoch = 0  # of the pass that is being taken
        self._epoch_step = 0 if stream.evaluates else 1  # epochs from one pass to the next, so far
        self._all: list[WorkerConnection] = []
        self._peak_buffers = 0  # buffers that there have been at a time
        super().__init__(options, _close, self._all, self._own)
        whereabouts = Whereabouts(workers, options.threads)
        job = WorkerJob(
            stream, workers, options.threads, torch.initial_seed(), whereabouts, lock is not None
        )
        mapper = None if lock is None else JobThread("shardio-buffers")
        late = BatchTimeout(whereabouts, options.timeout_s, options.patience_s)
        context: Any = options.context or multiprocessing.get_context()
        method = context.get_start_method()
        if method != "fork":  # what these start is to get Ctrl-C as ever
            resource_tracker.ensure_running()
        if method == "forkserver":
            forkserver.ensure_running()
        for number in range(workers):
            (ours, theirs), (shows, shown) = context.Pipe(), context.Pipe()
            name = f"shardio-loader-{number}"
            process = context.Process(
                target=run_worker, args=(theirs, shown, number, job), name=name, daemon=True
            )
            with shows:
                one = WorkerConnection(
                    number, process, ours, shows, max_buffers, lock, late, mapper
                )
            self._all.append(one)
            _CONNECTIONS.add(one)
            with theirs, shown:
                _start(process, method)
        if mapper is not None:
            for one in self._all:
                one.watch(self._all)

    @property
    def figures(self) -> PoolFigures:
        """Return the processes, and what the buffers take that the trainer has mapped."""
        pids = [one.process.pid for one in self._all]
        nbytes = sum(mapped.size for one in self._all for mapped in one.mapped.values())
        nbytes += self._own.bytes
        return PoolFigures(
            pids=pids, buffers=self._peak_buffers, ring=self._ring, batch_bytes=nbytes
        )

    def begin(self, what: Pass, steps: int) -> None:
        """Begin a pass of so many batches. What was left of the last one is dropped."""
        self.passes += 1
        if self._newest == self._now or what != self._what:  # else it was told already
            if self._what is not None and 0 <= what.epoch - self._epoch <= 1:
                self._epoch_step = what.epoch - self._epoch
            self._newest += 1
            self._what = what
        self._now, self._epoch = self._newest, what.epoch
        self._step, self._steps = 0, steps
        with self._close_on_error():
            for process in self._all:
                if process.pass_number != self._now:
                    process.discard()
                    process.start_pass(self._now, what, self.options.prefetch)
                elif process.requested < self.options.prefetch:
                    process.more(self.options.prefetch - process.requested)

    def take(self) -> tuple[Any, BatchStats]:
        """Return the next batch of the pass, and how it was made."""
        if self.closed:
            raise WorkerError(OVER)
        process = self._all[self._step % len(self._all)]
        start = perf_counter()
        with self._close_on_error():
            while (sent := process.receive(start)).number != self._now:
                process.drop(sent)
            process.note(sent.spare)
            arrived = perf_counter()
            self._step += 1
            if sent.wrapped is not None:
                batch = self._unpack(process, sent, sent.wrapped)
        if sent.wrapped is None:
            _raise(sent)
        stats = sent.stats._replace(wait_s=arrived - start, transport_s=perf_counter() - arrived)
        return batch, stats

    def _unpack(self, process: WorkerConnection, sent: Sent, wrapped: WrappedBatch) -> Any:
        self._ask(process)
        buffers = sum([len(one.mapped) for one in self._all])
        self._peak_buffers = max(self._peak_buffers, buffers)
        mapped, freed, buffer = process.mapped[sent.buffer], process.freed, sent.buffer
        view = mapped.view(lambda _: freed.append(buffer))
        if self.options.copy or buffers > self._ring + self._max_kept:
            view = self._own.copy(view[: sent.used])
        return unwrap(wrapped, view)

    def ready(self) -> bool:
        """Return True if `take` would most likely not wait."""
        return self.closed or self._all[self._step % len(self._all)].is_ready()

    @contextlib.contextmanager
    def _close_on_error(self) -> Iterator[None]:
        """Close all when this is left early: a message may be half read, or a batch lost."""
        try:
            yield
        except BaseException as error:
            # By another thread: no failure. It may have dropped what a buffer waits for.
            if isinstance(error, WorkerError | CancelledError) and self.closed:
                raise WorkerError(OVER) from None
            self.close()
            raise

    def _ask(self, process: WorkerConnection) -> None:
        """Ask a process for one more batch, for the one that was taken."""
        all_of_it = len(range(process.number, self._steps, len(self._all)))
        if process.pass_number != self._now or process.requested < all_of_it:
            process.more()
            return
        # All its batches of this pass were asked for: on with the next, which is most likely this.
        assert self._what is not None
        if self._newest == self._now:
            self._what = self._what._replace(epoch=self._epoch + self._epoch_step, start=0)
            self._newest += 1
        process.start_pass(self._newest, self._what, 1, follows=True)


def _start(process: Any, method: str) -> None:
    """Start a loader process.

    Raises OptionError where the dataset cannot be sent to it, and WorkerError where the server of
    `forkserver` ended, as it does when it imports a script that starts processes itself.
    """
    # Until it ignores Ctrl-C, which takes seconds when it is spawned, it is not to get one. A mask
    # is inherited, by a spawned process as well; a handler would not be. This process may be
    # interrupted all the same, in another thread: it closes the socket then, and so ends the other.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of any other thread, such as CUDA's; the child touches nothing that
            # one may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if method == "fork":
            raise
        raise OptionError(
            f"multiprocessing_context={method!r} sends the dataset to its processes, and "
            f"this one cannot be pickled: {error}. Take functions and classes of a module "
            "for transforms and collate_fn, no lambda and none that another function made"
        ) from error
    except (ConnectionError, EOFError) as error:
        if method != "forkserver":
            raise
        raise WorkerError(
            f"no loader process started: Python's server for them ended ({type(error).__name__}); "
            f"what it said, if it did, stands above. {GUARD}. "
            'multiprocessing_context="fork" needs none'
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _raise(sent: Sent) -> NoReturn:
    """Raise the error of a row, as it was raised, with where that was as its cause."""
    try:
        error = pickle.loads(sent.error or b"")
    except Exception:  # it could be there, or it was not sent
        raise WorkerError(f"{sent.where}: {sent.text}") from None
    raise error from RowError(f"{sent.where}\n\n{sent.text}")


def _close(processes: list[WorkerConnection], own: PrivateBuffers) -> None:
    """End loader processes: without their sockets they leave."""
    for one in processes:
        one.close()
    own.close()
    end = perf_counter() + WAIT_S
    for one in processes:
        if one.process.pid is None:  # starting it failed
            continue
        join(one.process, end - perf_counter())
        if one.process.is_alive():
            one.process.kill()
            join(one.process, WAIT_S)  # the system itself may hang, and end nothing
    processes.clear()


# Sockets of the trainer are not for those that it forks: with a copy elsewhere, its own end would
# close nothing, and loader processes would outlive it.
_CONNECTIONS: weakref.WeakSet[WorkerConnection] = weakref.WeakSet()


def _forget() -> None:
    # A child of os.fork() that ends as Python does would end daemons that it takes for its own.
    known: set[Any] = getattr(multiprocessing.process, "_children", set())
    for one in list(_CONNECTIONS):
        one.leave()
        known.discard(one.process)


os.register_at_fork(after_in_child=_forget)
