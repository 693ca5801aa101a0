"""Loader processes: each of P makes every P-th batch, in memory that it shares with the trainer.

How it works. A process has one socket to the trainer. Downwards go the passes (which epoch, from
where), how many batches more are wanted, and which slots are free again; upwards, for each batch,
its slot and a small pickle. A slot's descriptor is sent with its first batch. So there is no name,
no lock and no file that could be left behind, and the end of either side closes the socket: a
process whose trainer is gone leaves, at once; a trainer whose process is gone says which and how.

The processes stay from pass to pass. As soon as one has made its last batch it goes on with the
first ones of the pass that will most likely come next, so that a new epoch begins at once.

`Here` does the same without processes: for workers=0.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from .decoding import Work
from .errors import OptionError, RowError, ShardioError, WorkerError
from .making import Batch, Failure, Layout, Maker
from .meter import Made
from .options import Options
from .order import key
from .parcel import Parcel, unwrap, wrap
from .slots import Bytes, Lock, Mapped, Slots
from .stream import Consumers, Items, Stream

_WAIT_S = 5.0  # for a process that was told to leave, before it is killed
# Slots beyond the ring that a loop may keep. Each takes two descriptors here, and 1,024 are what a
# process often may have; so batches that are kept beyond that are copied to memory without any.
_KEPT = 100
_OVER = "this pass was interrupted, or its loader closed: iterate anew"
_SEED = 0x10AD  # what the seeds of Python's, numpy's and torch's generators are drawn for


class Pass(NamedTuple):
    """What is to be read: the batches of one rank, from a place in an epoch to its end."""

    options: Options
    epoch: int
    start: int  # units consumed before
    rank: int
    world_size: int
    consumers: Consumers

    def reads(self, stream: Stream, worker: int, workers: int) -> Iterator[Items]:
        """What one worker makes its batches of."""
        stream.options = self.options
        share = self.options.share(
            self.options.epoch(stream.counts, self.epoch),
            rank=self.rank,
            world_size=self.world_size,
            worker=worker,
            num_workers=workers,
            start=self.start,
        )
        return stream._read(share, self.consumers)


class _Sent(NamedTuple):
    """A batch, or the error instead of one, on its way to the trainer."""

    number: int  # of the pass
    slot: int = -1
    size: int = 0  # bytes of the slot
    used: int = 0  # bytes of it that the batch takes
    fresh: bool = False  # its descriptor follows
    parcel: Parcel | None = None
    made: Made = Made()
    error: bytes | None = None  # a pickled exception; None: it could not be
    text: str = ""  # of the error: type, message, traceback
    where: str = ""


def _socket(connection: Connection) -> socket.socket:
    """The connection as a socket, which can carry descriptors and be shut down.

    Rejected: multiprocessing's send_handle. On macOS it waits for an acknowledgement, which the
    thread that listens would read. None is needed: the maker keeps its own descriptor.
    """
    one = socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
    one.setblocking(True)  # whatever socket.setdefaulttimeout says: it holds for the connection too
    return one


# --- the loader process ------------------------------------------------------------------------


def _serve(
    connection: Connection, stream: Stream, worker: int, workers: int, threads: int, seed: int
) -> None:
    """All that a loader process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's; it closes the socket
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)  # there is a process for each core
    _Server(connection, stream, worker, workers, threads, seed).serve()


class _Server:
    def __init__(
        self,
        connection: Connection,
        stream: Stream,
        worker: int,
        workers: int,
        threads: int,
        seed: int,
    ) -> None:
        self._connection = connection
        self._socket = _socket(connection)
        self._stream = stream
        self._worker, self._workers, self._threads = worker, workers, threads
        self._seed = seed
        self._slots = Slots()
        self._known: set[int] = set()  # slots whose descriptors the trainer has
        self._passes: SimpleQueue[tuple[int, Pass]] = SimpleQueue()
        self._lock = threading.Lock()
        self._wanted: dict[int, int] = {}  # by pass that is not begun: batches asked for
        self._oldest = 0  # the first pass that is still wanted
        self._making = -1  # the pass of the maker
        self._maker: Maker | None = None
        self._layout: Layout = {}

    def serve(self) -> NoReturn:
        threading.Thread(target=self._listen, name="shardio-listen", daemon=True).start()
        while True:
            self._make(*self._passes.get())

    def _make(self, number: int, what: Pass) -> None:
        """The batches of one pass."""
        _seed(key(_SEED, self._seed, what.epoch, what.rank, self._worker))

        def emit(batch: Batch | None, packed: Any) -> None:
            self._emit(number, batch, packed)

        def pack(batch: Batch, collated: Any) -> Parcel:
            return wrap(collated, batch.slot)

        try:
            reads = what.reads(self._stream, self._worker, self._workers)
        except Exception as error:
            emit(None, Failure(error, ""))
            return
        maker = Maker(self._stream, reads, self._slots, pack, emit, self._layout)
        with self._lock:
            wanted = self._wanted.pop(number, 0)
            if number < self._oldest:
                return
            self._maker, self._making = maker, number
            maker.more(wanted + int(bool(self._wanted)))  # see _do
        maker.run(self._threads)
        self._layout = maker.layout
        with self._lock:
            self._maker = None

    def _emit(self, number: int, batch: Batch | None, packed: Any) -> None:
        if isinstance(packed, Failure):
            self._send(_failed(number, packed, f"loader process {self._worker}"))
            return
        assert batch is not None
        slot = batch.slot
        slot.hand_over()
        fresh = slot.number not in self._known
        sent = _Sent(
            number, slot.number, slot.size, slot.used, fresh, packed, _made(batch, self._worker)
        )
        self._known.add(slot.number)
        self._send(sent, slot.fd if fresh else -1)

    def _send(self, sent: _Sent, fd: int = -1) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(sent))
            if fd >= 0:
                socket.send_fds(self._socket, [b"."], [fd])
        except ConnectionError:  # the trainer is gone
            _leave(0)
        except BaseException:  # it would wait for ever for what was not sent
            traceback.print_exc()
            _leave(1)

    def _listen(self) -> NoReturn:
        """Do what the trainer says; leave when it is gone, whatever the other threads are at."""
        code = 1
        try:
            while True:
                try:
                    message = self._connection.recv_bytes()
                except (EOFError, OSError):
                    code = 0
                    break
                self._do(*pickle.loads(message))
        except BaseException:
            traceback.print_exc()
        _leave(code)

    def _do(
        self,
        number: int,
        what: Pass | None,
        follows: bool,
        wanted: int,
        free: list[int],
        gone: list[int],
    ) -> None:
        for slot in free:
            self._slots.free(slot)
        for slot in gone:
            self._known.discard(slot)
            self._slots.free(slot, keep=False)
        with self._lock:
            if what is not None:
                if not follows:
                    self._oldest = number
                    self._wanted.clear()
                if self._maker is not None:
                    # All batches of a pass were asked for before the next one follows it; with one
                    # more the maker sees that there is none.
                    self._maker.more() if follows else self._maker.drop()
                self._wanted[number] = wanted
                self._passes.put((number, what))
            elif self._maker is not None and number == self._making:
                self._maker.more(wanted)
            elif number in self._wanted:
                self._wanted[number] += wanted


def _leave(code: int) -> NoReturn:
    """End this process, from any thread, whatever the others are at."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _made(batch: Batch, worker: int) -> Made:
    seconds, record, name = batch.slowest
    return Made(
        rows=batch.rows,
        read_s=batch.read_s,
        decode_s=batch.decode_s,
        transform_s=batch.transform_s,
        collate_s=batch.collate_s,
        maker=worker,
        slowest_s=seconds,
        slowest_record=record,
        slowest_key=name,
    )


def _failed(number: int, failure: Failure, where: str) -> _Sent:
    error = failure.error
    text = "".join(traceback.format_exception(error)).rstrip()
    pickled = None
    with contextlib.suppress(Exception):
        data = pickle.dumps(error)
        if type(pickle.loads(data)) is type(error):
            pickled = data
    where = f"{failure.where}, in {where}" if failure.where else f"in {where}"
    return _Sent(number, error=pickled, text=text, where=where)


def _seed(seed: int) -> None:
    """The generators that transforms of the user may draw from; each process draws its own."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed >> 1)


# --- the trainer -------------------------------------------------------------------------------


class _Process:
    """A loader process, as the trainer sees it."""

    def __init__(
        self, number: int, process: Any, connection: Connection, most: int, lock: Lock | None
    ) -> None:
        self.number = number
        self.process = process
        self.connection = connection
        self.lock = lock
        self.most = most  # slots that it keeps when they are free
        self.told = -1  # the number of the pass that it was told last
        self.asked = 0  # batches of that, so far
        self.mapped: dict[int, Mapped] = {}  # by slot
        self.freed: deque[int] = deque()  # slots whose last view died; any thread appends

    def tell(self, number: int, what: Pass, wanted: int, *, follows: bool = False) -> None:
        """On with this pass; what it has not made of another one is dropped, or, if this one
        follows it, made before."""
        self.told, self.asked = number, wanted
        self._send(number, what, follows, wanted)

    def more(self, wanted: int = 1) -> None:
        """So many more batches of the pass that it was told last."""
        self.asked += wanted
        self._send(self.told, None, False, wanted)

    def _send(self, number: int, what: Pass | None, follows: bool, wanted: int) -> None:
        """Also says which slots are free again; those that are too many are given back."""
        free, gone = [], []
        while self.freed:
            slot = self.freed.popleft()
            if len(self.mapped) > self.most or self.mapped[slot].shared:
                self.mapped.pop(slot).close()
                gone.append(slot)
            else:
                free.append(slot)
        with contextlib.suppress(OSError):  # it is gone: `receive` says so, after what it had sent
            self.connection.send_bytes(pickle.dumps((number, what, follows, wanted, free, gone)))

    def receive(self) -> _Sent:
        """What it sends next. Raises WorkerError when it is gone."""
        try:
            sent: _Sent = pickle.loads(self.connection.recv_bytes())
            fd = self._descriptor() if sent.fresh else -1
        except (EOFError, OSError) as error:
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
                raise WorkerError(
                    f"loader process {self.number} sent a descriptor, and this process has no room "
                    "for another: too many files are open. Allow it more (ulimit -n)"
                ) from error
            self._gone()
        if sent.fresh:
            os.set_inheritable(fd, False)
            self.mapped[sent.slot] = Mapped(fd, sent.size, self.lock)
        if sent.slot >= 0 and self.mapped[sent.slot].size < sent.size:
            self.mapped[sent.slot].map(sent.size)
        return sent

    def _descriptor(self) -> int:
        with _socket(self.connection) as one:
            data, fds, _, _ = socket.recv_fds(one, 1, 1)
        if not data:
            raise EOFError
        if not fds:  # the system leaves out what there is no room for
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return fds[0]

    def close(self) -> None:
        # Shut down: whoever has a copy, and if a thread of ours is just reading from it.
        with contextlib.suppress(OSError), _socket(self.connection) as one:
            one.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        for mapped in self.mapped.values():
            mapped.close()
        self.mapped.clear()

    def _gone(self) -> NoReturn:
        self.process.join(_WAIT_S)
        code = self.process.exitcode
        how = f"left with exit code {code}"
        advice = "workers=0 does it all in this process, where a debugger sees it"
        if code is None:
            how = "closed its socket"
        elif code < 0:
            how = f"was killed by {_signal_name(-code)}"
            if -code == signal.SIGKILL:
                how += ", as the system does where memory runs out (`dmesg` says so)"
            advice = f"Fewer workers, or a smaller prefetch, take less memory; {advice}"
        elif self.told >= 0 and not self.mapped:
            how += " before it made a batch; what it said stands above"
            if getattr(self.process, "_start_method", "fork") != "fork":
                how += '. A script needs `if __name__ == "__main__":` around all that it does'
        raise WorkerError(
            f"loader process {self.number} (pid {self.process.pid}) {how}. This pass is over; "
            f"iterating anew starts new processes. {advice}"
        ) from None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Processes:
    """P loader processes. `begin` a pass, then `take` its batches, in order.

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
    ) -> None:
        if multiprocessing.current_process().daemon:
            raise OptionError(
                "this process is a daemon of multiprocessing, as the workers of a DataLoader or of "
                "a Pool are, and such may not start processes: give ShardLoader workers=0, or "
                "start this process with daemon=False"
            )
        self._prefetch = prefetch
        self._own = Own(lock, prefetch + 2)
        self._always = own  # every batch goes to memory of its own
        self._step = self._steps = 0
        self._now = -1  # the number of the pass that is being taken
        self._newest = -1  # and of the one that was told last
        self._what: Pass | None = None  # what that is
        self._epoch = 0  # of the pass that is being taken
        self._onwards = 0 if stream.evaluates else 1  # epochs from one pass to the next, so far
        self._all: list[_Process] = []
        self.passes = 0
        self.made: Made | None = None
        self.most = 0  # slots that there have been at a time
        self._owner = os.getpid()
        self._closer = weakref.finalize(self, _close, self._all, self._own, self._owner)
        seed = torch.initial_seed()
        method = context.get_start_method()
        if method != "fork":  # what these start is to get Ctrl-C as ever
            resource_tracker.ensure_running()
        if method == "forkserver":
            forkserver.ensure_running()
        for number in range(workers):
            here, there = context.Pipe()
            _CONNECTIONS.add(here)
            process = context.Process(  # type: ignore[attr-defined]
                target=_serve,
                args=(there, stream, number, workers, threads, seed),
                name=f"shardio-loader-{number}",
                daemon=True,
            )
            self._all.append(_Process(number, process, here, prefetch + 2, lock))
            _PROCESSES.add(process)
            # Until it ignores Ctrl-C, which takes seconds when it is spawned, it is not to get one.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                process.start()
            finally:
                there.close()
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @property
    def closed(self) -> bool:
        return not self._closer.alive

    @property
    def pids(self) -> list[int]:
        return [one.process.pid for one in self._all]

    @property
    def ring(self) -> int:
        """Slots that a loop needs which keeps no batch but the one it is at."""
        return len(self._all) * (self._prefetch + 2)

    @property
    def bytes(self) -> int:
        """Of all slots that the trainer has mapped."""
        shared = sum(mapped.size for one in self._all for mapped in one.mapped.values())
        return self._own.bytes + shared

    def begin(self, what: Pass, steps: int) -> None:
        """A pass of so many batches. What was left of the last one is dropped."""
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
                    process.tell(self._now, what, self._prefetch)
                elif process.asked < self._prefetch:
                    process.more(self._prefetch - process.asked)

    def take(self) -> Any:
        """The next batch of the pass. Raises what making it raised, WorkerError."""
        if self.closed or self._owner != os.getpid():
            raise WorkerError(_OVER)
        process = self._all[self._step % len(self._all)]
        start = perf_counter()
        with self._unbroken():
            while (sent := process.receive()).number != self._now:
                if sent.slot >= 0:
                    process.freed.append(sent.slot)
            arrived = perf_counter()
            self._step += 1
            if sent.parcel is not None:
                batch = self._unpack(process, sent, sent.parcel)
        if sent.parcel is None:
            _raise(sent)
        self.made = sent.made._replace(wait_s=arrived - start, transport_s=perf_counter() - arrived)
        return batch

    def _unpack(self, process: _Process, sent: _Sent, parcel: Parcel) -> Any:
        self._ask(process)
        slots = sum([len(one.mapped) for one in self._all])
        self.most = max(self.most, slots)
        mapped, freed, slot = process.mapped[sent.slot], process.freed, sent.slot
        view = mapped.view(lambda _: freed.append(slot))
        if self._always or slots > self.ring + _KEPT:
            view = self._own.copy(view[: sent.used])
        return unwrap(parcel, view)

    def ready(self) -> bool:
        """Whether `take` would most likely not wait."""
        if self.closed:
            return True
        return bool(self._all[self._step % len(self._all)].connection.poll())

    def close(self) -> None:
        self._closer()

    @contextlib.contextmanager
    def _unbroken(self) -> Iterator[None]:
        """What ends this early, such as Ctrl-C, may leave a message half read, or a batch lost."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _ask(self, process: _Process) -> None:
        """One more batch of a process, for the one that was taken."""
        if process.told != self._now or process.asked < self._batches(process):
            process.more()
            return
        # All its batches of this pass were asked for: on with the next, which is most likely this.
        assert self._what is not None
        if self._newest == self._now:
            self._what = self._what._replace(epoch=self._epoch + self._onwards, start=0)
            self._newest += 1
        process.tell(self._newest, self._what, 1, follows=True)

    def _batches(self, process: _Process) -> int:
        """That a process makes of this pass."""
        return len(range(process.number, self._steps, len(self._all)))


class Own:
    """Memory of the trainer alone, that batches are copied to, and that is used again."""

    def __init__(self, lock: Lock | None, most: int) -> None:
        self._all: set[Mapped] = set()
        self._free: deque[Mapped] = deque()
        self._lock = lock
        self._most = most  # pieces that are free, and kept for what comes

    @property
    def bytes(self) -> int:
        return sum(own.size for own in self._all)

    def copy(self, data: Bytes) -> Bytes:
        """A copy; its memory is used again when its last view is gone."""
        size = len(data)
        while self._free:
            own = self._free.popleft()
            if own.size >= size and len(self._free) < self._most:
                break
            own.close()
            self._all.discard(own)
        else:
            own = Mapped(-1, max(1, size), self._lock)
            self._all.add(own)
        free = self._free
        view = own.view(lambda _: free.append(own))
        # By this thread alone: 4.5 ms of CPU for 38 MB. torch's copy_ takes 9, as its threads spin
        # where loader processes have the cores (benchmarks/transport.py).
        np.copyto(view[:size], data)
        return view

    def close(self) -> None:
        """Unlock its pages, also where batches are still in use."""
        for own in self._all:
            own.close()
        self._all.clear()
        self._free.clear()


def _raise(sent: _Sent) -> NoReturn:
    """The error of a row, as it was raised, with where that was as its cause."""
    if sent.error is None:
        raise WorkerError(f"{sent.where}: {sent.text}")
    try:
        error = pickle.loads(sent.error)
    except Exception:  # it could there
        raise WorkerError(f"{sent.where}: {sent.text}") from None
    raise error from RowError(f"{sent.where}\n\n{sent.text}")


def _close(processes: list[_Process], own: Own, owner: int) -> None:
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
        one.process.join(max(0.0, end - perf_counter()))
        if one.process.is_alive():
            one.process.kill()
            one.process.join()
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


class Here:
    """The same in this process: with threads in the background, or, with none, in `take`."""

    def __init__(self, stream: Stream, *, threads: int, prefetch: int) -> None:
        self._stream = copy.copy(stream)  # each pass sets its options, and they are the user's
        self._threads = threads
        self._prefetch = prefetch
        self._slots = Slots(private=True)
        self._layout: Layout = {}
        self._makers: list[Maker] = []  # at most one
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[tuple[Batch | None, Any]] = SimpleQueue()
        self.passes = 0
        self.made: Made | None = None
        self.pids: list[int] = []
        self._owner = os.getpid()
        self._closer = weakref.finalize(self, _end, self._makers, self._slots, self._owner)

    @property
    def closed(self) -> bool:
        return not self._closer.alive

    @property
    def ring(self) -> int:
        return self._prefetch + 2

    @property
    def bytes(self) -> int:
        return self._slots.bytes

    @property
    def most(self) -> int:
        return self._slots.most

    def begin(self, what: Pass, steps: int) -> None:
        self._stop()
        self.passes += 1
        queue: SimpleQueue[tuple[Batch | None, Any]] = SimpleQueue()
        self._queue = queue
        slots = self._slots

        def emit(batch: Batch | None, packed: Any) -> None:
            if batch is not None and not isinstance(packed, Failure):
                batch.slot.hand_out(slots.free)
            queue.put((batch, packed))

        reads = what.reads(self._stream, 0, 1)
        maker = Maker(self._stream, reads, slots, lambda _, collated: collated, emit, self._layout)
        self._makers.append(maker)
        if self._threads:
            maker.more(self._prefetch)
            self._thread = threading.Thread(
                target=maker.run, args=(self._threads,), name="shardio-0", daemon=True
            )
            self._thread.start()

    def take(self) -> Any:
        if not self._makers or self._owner != os.getpid():
            raise WorkerError(_OVER)
        maker = self._makers[0]
        start = perf_counter()
        maker.more()
        if not self._threads:
            work = Work()
            while self._queue.empty():
                if not maker.turn(work) and self._queue.empty():
                    raise WorkerError(_OVER)
        batch, packed = self._queue.get()
        if isinstance(packed, Failure):
            self._stop()
            error = packed.error
            if packed.where and not isinstance(error, ShardioError):
                row = RowError(packed.where)
                row.__cause__, row.__context__ = error.__cause__, error.__context__
                row.__suppress_context__ = error.__suppress_context__
                raise error from row
            raise error
        assert batch is not None
        self.made = _made(batch, 0)._replace(wait_s=perf_counter() - start)
        return packed

    def ready(self) -> bool:
        return not self._queue.empty()

    def close(self) -> None:
        self._stop()
        self._closer()

    def _stop(self) -> None:
        if not self._makers:
            return
        maker = self._makers.pop()
        maker.drop()
        self._queue.put((None, Failure(WorkerError(_OVER), "")))  # a thread may wait in `take`
        if self._thread is not None:
            self._thread.join(_WAIT_S)
            self._thread = None
        else:
            maker.finish()
        self._layout = maker.layout


def _end(makers: list[Maker], slots: Slots, owner: int) -> None:
    if os.getpid() == owner:  # in a child that was forked, locks may be held for ever
        for maker in makers:
            maker.drop()
    slots.close()
