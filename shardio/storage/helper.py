"""A helper process that reads from object stores for a process that must not hold a client.

A process that may be forked holds no client: see `client`. Its requests go to a helper of its own,
which is started by exec and tied to it by a socket pair that it inherits. So the helper has no
name, is shared with nobody, and ends with its owner, however that ends: the socket closes. It is
in a session of its own, so that Ctrl-C at the terminal does not reach it. Stores, options and
secrets go over the socket, never over the command line or files.

Ranges come back as descriptors of sealed memory, which the owner maps and closes at once; small
ones come in the message.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable
from queue import SimpleQueue
from typing import Any, NamedTuple

from .. import errors
from ..errors import ShardioError, StorageError
from . import credentials, descriptors
from .client import Reply, Request, RequestError
from .local import write_at
from .transfers import Figures, Transfers, Waits, settle, start_thread

INLINE = 64 << 10  # bytes of a reply that come in the message itself
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# The owner's own path: the directory where it was started, say, may hold a `queue.py`.
_START = "import sys; sys.path[:] = sys.argv[2:]\nfrom {} import serve\nserve(int(sys.argv[1]))"
_LEAVE_S = 2.0  # for the helper to end when its owner does


class _Answer(NamedTuple):
    """Hold a reply on its way to the owner. length: of the bytes in the descriptor that follows."""

    number: int  # 0: it is only told that requests fail, in the error's text
    data: bytes
    length: int
    size: int
    tag: str
    error: tuple[str, str, str]  # name of its class, text, kind of its cause; "": none
    figures: Figures


# ------------------------------------------------------------------------------ the owner's side


class Helper:
    """Run requests in a process of its own, each as a Future of its Reply.

    Raises StorageError through them, also when the process dies; the next request starts another.
    """

    def __init__(self, consumers: int = 1, waits: Waits = None) -> None:
        self._consumers, self.waits = consumers, waits
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._number = 0
        self._closed = False
        self._before = Figures()  # of processes that have ended
        self.heard = time.monotonic()
        self.refused = False  # its credentials were, so that it has to know of new ones

    @property
    def figures(self) -> Figures:
        """Return what the requests came to, as of the last answer."""
        link = self._link
        return self._before if link is None else self._before.plus(link.figures)

    def share(self, consumers: int) -> None:
        """Take this process's part of the machine's requests."""
        with self._lock:
            self._consumers = consumers
            if self._link is not None:
                self._link.post(consumers)

    def submit(self, request: Request, *, urgent: bool = False) -> Future[Reply]:
        """Send a request to the helper, which is started by the first one. It raises nothing."""
        future: Future[Reply] = Future()
        with self._lock:
            if self._closed:
                settle(future, _ended(" with this process's reading"))
                return future
            self._number += 1
            if self.refused and self._link is not None:
                # A user who sets what the error asked for, and tries again, is not to wonder why
                # it says the same.
                self.refused = False
                self._link.post(credentials.environment())
            if self._link is None or not self._link.ask(self._number, request, urgent, future):
                if self._link is not None:
                    self._before = self._before.plus(self._link.figures)
                self._link = _Link(self, self._consumers)
                if not self._link.ask(self._number, request, urgent, future):
                    settle(future, _ended(": no thread can be started"))
        return future

    def restart(self) -> None:
        """End a helper that does not answer. The next request starts another."""
        link = self._link
        if link is not None:
            link.kill()

    def close(self, wait_s: float = _LEAVE_S) -> bool:
        """End the helper. Returns True."""
        with self._lock:
            self._closed, link = True, self._link
        if link is not None:
            link.close(wait_s)
        return True

    def abandon(self) -> None:
        """Let go of a helper that was inherited by a fork: it is the parent's."""
        if self._link is not None:
            self._link.abandon()

    @property
    def pid(self) -> int | None:
        """Return the helper's process id; None: there is none."""
        link = self._link
        return None if link is None or link.ended else link.pid


class _Process(NamedTuple):
    """Hold a helper process, and the owner's end of the socket to it.

    socket  the connection once more: it carries descriptors, also where there is no room for more
    """

    popen: subprocess.Popen[bytes]
    connection: Connection
    socket: socket.socket


class _Link:
    """One helper process and the socket to it, from its start to its end.

    Two threads of the owner start it, write and read. So what the owner's own threads do takes no
    time, and Ctrl-C, which reaches its main thread, leaves no message half written.
    """

    def __init__(self, owner: Helper, consumers: int) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Reply]] = {}
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._process: _Process | None = None  # it was not started yet
        self._closing = False
        self.ended = False
        self.figures = Figures()
        self.post(consumers)
        self._writer = start_thread(self._write, "shardio-helper-writer")
        if self._writer is None:
            self.ended = True

    @property
    def pid(self) -> int | None:
        """Return the process id; None: it was not started yet."""
        return None if self._process is None else self._process.popen.pid

    def post(self, message: Any) -> None:
        """Send a message, as soon as those before it are sent."""
        self._outbox.put(message)

    def ask(self, number: int, request: Request, urgent: bool, future: Future[Reply]) -> bool:
        """Send a request. Returns False if the helper has ended."""
        with self._lock:
            if self.ended or self._closing:
                return False
            self._pending[number] = future
        future.add_done_callback(partial(self._settled, number))
        self.post((number, request, urgent))
        return True

    def kill(self) -> None:
        """End the process at once. Its requests fail, and it is asked for nothing more."""
        with self._lock:
            self._closing = True
        if self._process is not None:
            self._process.popen.kill()

    def close(self, wait_s: float) -> None:
        """Let the process end, and wait for it; after `wait_s` it is killed."""
        with self._lock:
            self._closing = True
            if self._process is not None:  # the threads end, and so does the process
                with contextlib.suppress(OSError):
                    self._process.socket.shutdown(2)
        self._outbox.put(None)
        if self._writer is None:
            return
        self._writer.join(wait_s)
        if self._writer.is_alive():
            self.kill()
            self._writer.join(wait_s)

    def abandon(self) -> None:
        """Let go of what a fork inherited."""
        if self._process is not None:
            self._process.popen.returncode = 0  # not this process's child
            self._process.connection.close()
            self._process.socket.close()

    def _settled(self, number: int, future: Future[Reply]) -> None:
        if future.cancelled():
            self.post(-number)  # nobody wants it any more

    def _write(self) -> None:
        """Start the process, send messages, and clean up when it has ended."""
        if hasattr(signal, "pthread_sigmask"):  # it may have died: that is no reason to die too
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        try:
            process = self._start()
        except OSError as error:
            self._fail(_ended(f": it cannot be started: {error.strerror or error}", error))
            return
        reader = start_thread(partial(self._read, process), "shardio-helper")
        if reader is None:
            process.popen.kill()
        while reader is not None and (message := self._outbox.get()) is not None:
            try:
                process.connection.send(message)
            except OSError:  # it has died: the reader says so
                break
            del message
        with contextlib.suppress(OSError):
            process.socket.shutdown(2)
        self._bury(process, reader)

    def _bury(self, process: _Process, reader: threading.Thread | None) -> None:
        """Wait for the end of process and reader, and close the socket."""
        try:
            process.popen.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            process.popen.kill()
            process.popen.wait()
        if reader is not None:
            reader.join()
        code = process.popen.returncode
        said = f" (signal {-code})" if code < 0 else f" (exit code {code})"
        self._fail(_ended(said))
        with self._lock:
            process.connection.close()
            process.socket.close()

    def _fail(self, error: StorageError) -> None:
        with self._lock:
            self.ended = True
            pending, self._pending = self._pending, {}
        for future in pending.values():
            # Of its own: one that is raised holds frames, and by these what others still have.
            told = StorageError(str(error))
            told.__cause__ = error.__cause__
            settle(future, told)

    def _start(self) -> _Process:
        with _STARTING:  # a child that is forked meanwhile would keep the socket open
            ours, theirs = socket.socketpair()
            path = [os.path.abspath(one) for one in sys.path]
            path += [] if _ROOT in path else [_ROOT]
            with theirs, contextlib.ExitStack() as on_error:
                on_error.callback(ours.close)
                fd = theirs.fileno()
                popen = subprocess.Popen(
                    [get_executable(), "-c", _START.format(__name__), str(fd), *path],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[fd],
                    start_new_session=True,
                )
                on_error.callback(popen.kill)
                connection = Connection(os.dup(ours.fileno()))
                ours.setblocking(True)  # whatever socket.setdefaulttimeout says
                on_error.pop_all()
            with self._lock:
                self._process = process = _Process(popen, connection, ours)
                if self._closing:
                    popen.kill()
        return process

    def _read(self, process: _Process) -> None:
        """Take answers, until the helper has ended."""
        try:
            while True:
                answer: _Answer = process.connection.recv()
                if not answer.number:
                    if self._owner.waits is not None:
                        self._owner.waits(answer.error[1])
                    continue
                self._owner.heard = time.monotonic()
                self.figures = answer.figures
                found: Reply | BaseException
                if answer.error[0]:
                    found = _error(*answer.error)
                    self._owner.refused = self._owner.refused or answer.error[2] == "denied"
                elif not answer.length:
                    found = Reply(memoryview(answer.data), answer.size, answer.tag)
                else:
                    found = _received(process.socket, answer)
                with self._lock:
                    future = self._pending.pop(answer.number, None)
                if future is not None:
                    settle(future, found)
                del answer, found, future
        except (EOFError, ConnectionError):
            pass
        except Exception as error:  # a message that is none
            self._fail(_ended(f": {error}", error))
            process.popen.kill()
        self._outbox.put(None)


def _ended(why: str, cause: BaseException | None = None) -> StorageError:
    error = StorageError(
        f"the process that reads from URLs for this one has ended{why}. "
        "The next read starts another"
    )
    error.__cause__ = cause
    return error


def _received(one: socket.socket, answer: _Answer) -> Reply | StorageError:
    """Receive a descriptor of sealed memory, and return its bytes, or why there is no room."""
    try:
        fd = descriptors.receive_from(one)
        try:
            data = memoryview(mmap.mmap(fd, answer.length, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
    except ConnectionError:
        raise
    except OSError as error:
        failed = StorageError(
            f"no room for {answer.length:,} bytes that arrived from a URL: {error.strerror}. "
            "Check the limits of open files (ulimit -n) and of memory"
        )
        failed.__cause__ = error  # who reads may close files, and read again
        return failed
    return Reply(data, answer.size, answer.tag)


def _error(name: str, text: str, kind: str) -> ShardioError:
    """Return an error of the helper as it was raised there."""
    raised: type[ShardioError] = getattr(errors, name, StorageError)
    error = raised(text)
    if kind:
        error.__cause__ = RequestError(kind, text)
    return error


_STARTING = threading.Lock()


def _release() -> None:
    _STARTING.release()


os.register_at_fork(before=_STARTING.acquire, after_in_parent=_release, after_in_child=_release)


# ------------------------------------------------------------------------------ the helper itself


def serve(fd: int) -> None:
    """Answer the requests of the owner, at the other end of this socket, until it is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # what a scheduler sends to all is for the owner
    connection = Connection(fd)
    os.set_inheritable(fd, False)
    answers: SimpleQueue[tuple[int, Future[Reply]]] = SimpleQueue()

    def tell(trouble: str) -> None:  # as an answer to nothing that was asked
        told: Future[Reply] = Future()
        told.set_exception(StorageError(trouble))
        answers.put((0, told))

    transfers = Transfers(waits=tell)
    running: dict[int, Future[Reply]] = {}
    threading.Thread(
        target=_answer, args=(connection, answers, transfers), name="shardio-answer", daemon=True
    ).start()

    def done(number: int, future: Future[Reply]) -> None:
        running.pop(number, None)
        answers.put((number, future))

    try:
        while True:
            message = connection.recv()
            if isinstance(message, int):
                if message > 0:
                    transfers.share(message)
                elif (unwanted := running.get(-message)) is not None:
                    unwanted.cancel()
                continue
            if isinstance(message, dict):
                credentials.adopt(message)
                continue
            number, request, urgent = message
            running[number] = future = transfers.submit(request, urgent=urgent)
            future.add_done_callback(partial(done, number))
            del future, request
    except (EOFError, OSError):
        os._exit(0)  # the owner is gone; requests under way are nobody's
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _answer(
    connection: Connection, answers: SimpleQueue[tuple[int, Future[Reply]]], transfers: Transfers
) -> None:
    """Send each answer as it comes."""
    one = descriptors.as_socket(connection)
    try:
        while True:
            number, future = answers.get()
            fd, answer = _prepare(number, future, transfers.figures)
            del future
            try:
                connection.send(answer)
                if fd >= 0:
                    descriptors.send(one, fd)
            finally:
                if fd >= 0:
                    os.close(fd)
            del answer
    except OSError:
        os._exit(0)  # the owner is gone
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _prepare(number: int, future: Future[Reply], figures: Figures) -> tuple[int, _Answer]:
    """Return the answer to a request, and a descriptor of its bytes; -1: they are in the answer."""
    told = "StorageError", "", ""
    try:
        data, size, tag = future.result()
        if len(data) <= INLINE:
            return -1, _Answer(number, bytes(data), 0, size, tag, ("", "", ""), figures)
        return _in_memory(data), _Answer(number, b"", len(data), size, tag, ("", "", ""), figures)
    except CancelledError:
        told = "StorageError", "nobody wants it", ""
    except ShardioError as error:
        told = type(error).__name__, str(error), getattr(error.__cause__, "kind", "")
    except BaseException as error:
        told = "StorageError", f"reading from a URL failed: {type(error).__name__}: {error}", ""
    return -1, _Answer(number, b"", 0, 0, "", told, figures)


def _in_memory(data: memoryview) -> int:
    """Return a descriptor of sealed memory that holds these bytes. Raises OSError."""
    fd = descriptors.anonymous_memory()
    try:
        write_at(fd, data, 0)
        if hasattr(fcntl, "F_ADD_SEALS"):
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            with contextlib.suppress(OSError):  # macOS's is an unlinked file
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd
