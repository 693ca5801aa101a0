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
import subprocess
import sys
import threading
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable
from queue import SimpleQueue
from socket import socketpair
from typing import Any, NamedTuple

from .. import errors
from ..errors import ShardioError, StorageError
from . import credentials, descriptors
from .client import Reply, Request, RequestError
from .transfers import Figures, Transfers

INLINE = 64 << 10  # bytes of a reply that come in the message itself
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_START = (
    "import sys; sys.path.insert(0, sys.argv[2])\nfrom {} import serve\nserve(int(sys.argv[1]))"
)
_LEAVE_S = 2.0  # for the helper to end when its owner does


class _Answer(NamedTuple):
    """Hold a reply on its way to the owner. length: of the bytes in the descriptor that follows."""

    number: int
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

    def __init__(self, consumers: int = 1) -> None:
        self._consumers = consumers
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Reply]] = {}
        self._number = 0
        self._refused = False  # its credentials were, so that it has to know of new ones
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self.figures = Figures()

    def share(self, consumers: int) -> None:
        """Take this process's part of the machine's requests."""
        with self._lock:
            self._consumers = consumers
            if self._connection is not None:
                self._send(self._connection, consumers)

    def submit(self, request: Request, *, urgent: bool = False) -> Future[Reply]:
        """Send a request to the helper, which is started by the first one."""
        future: Future[Reply] = Future()
        with self._lock:
            connection = self._connection or self._start()
            self._number += 1
            self._pending[self._number] = future
            if self._refused:
                # A user who sets what the error asked for, and tries again, is not to wonder why
                # it says the same.
                self._refused = False
                self._send(connection, credentials.environment())
            self._send(connection, (self._number, request, urgent))
        return future

    def close(self, wait_s: float = _LEAVE_S) -> bool:
        """End the helper. Returns True."""
        with self._lock:
            process, connection = self._process, self._connection
            self._process = self._connection = None
        if connection is not None:
            with contextlib.suppress(OSError), descriptors.as_socket(connection) as one:
                one.shutdown(2)  # the thread that listens ends
        if process is not None:
            try:
                process.wait(wait_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return True

    def abandon(self) -> None:
        """Let go of a helper that was inherited by a fork: it is the parent's."""
        if self._process is not None:
            self._process.returncode = 0  # not this process's child
        if self._connection is not None:
            self._connection.close()

    @property
    def pid(self) -> int | None:
        """Return the helper's process id; None: there is none."""
        return None if self._process is None else self._process.pid

    def _send(self, connection: Connection, message: Any) -> None:
        with contextlib.suppress(OSError):  # it has died: the thread that listens says so
            connection.send(message)

    def _start(self) -> Connection:
        ours, theirs = socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [get_executable(), "-c", _START.format(__name__), str(fd), _ROOT],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[fd],
                start_new_session=True,
            )
        self._connection = connection = Connection(ours.detach())
        threading.Thread(
            target=self._listen,
            args=(connection, self._process),
            name="shardio-helper",
            daemon=True,
        ).start()
        self._send(connection, self._consumers)
        return connection

    def _listen(self, connection: Connection, process: subprocess.Popen[bytes]) -> None:
        why = ""
        try:
            while True:
                answer: _Answer = connection.recv()
                data = memoryview(answer.data)
                if answer.length:
                    data = _mapped(connection, answer.length)
                future = self._pending.pop(answer.number)
                self.figures = answer.figures
                if answer.error[0]:
                    self._refused = self._refused or answer.error[2] == "denied"
                    future.set_exception(_error(*answer.error))
                elif not future.cancelled():
                    future.set_result(Reply(data, answer.size, answer.tag))
                del answer, data, future
        except (EOFError, ConnectionError):
            pass
        except Exception as error:  # no descriptor left, no memory
            why = f": {error}"
        with self._lock:
            if self._connection is connection:
                self._process = self._connection = None
            pending, self._pending = self._pending, {}
            connection.close()
        if pending:
            if why:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(_LEAVE_S)
                why = why or f" (signal {-code})" * (code < 0) or f" (exit code {code})"
            for future in pending.values():
                if not future.cancelled():
                    future.set_exception(
                        StorageError(
                            f"the process that reads from URLs for this one has ended{why}. "
                            "The next read starts another"
                        )
                    )
        else:
            process.wait()


def _mapped(connection: Connection, length: int) -> memoryview:
    """Receive a descriptor of sealed memory, and return its bytes."""
    fd = descriptors.receive(connection)
    try:
        return memoryview(mmap.mmap(fd, length, prot=mmap.PROT_READ))
    finally:
        os.close(fd)


def _error(name: str, text: str, kind: str) -> ShardioError:
    """Return an error of the helper as it was raised there."""
    raised: type[ShardioError] = getattr(errors, name, StorageError)
    error = raised(text)
    if kind:
        error.__cause__ = RequestError(kind, text)
    return error


# ------------------------------------------------------------------------------ the helper itself


def serve(fd: int) -> None:
    """Answer the requests of the owner, at the other end of this socket, until it is gone."""
    connection = Connection(fd)
    os.set_inheritable(fd, False)
    transfers = Transfers()
    answers: SimpleQueue[tuple[int, Future[Reply]]] = SimpleQueue()
    threading.Thread(
        target=_answer, args=(connection, answers, transfers), name="shardio-answer", daemon=True
    ).start()
    try:
        while True:
            message = connection.recv()
            if isinstance(message, int):
                transfers.share(message)
                continue
            if isinstance(message, dict):
                credentials.adopt(message)
                continue
            number, request, urgent = message
            future = transfers.submit(request, urgent=urgent)
            future.add_done_callback(partial(_enqueue, answers, number))
    except (EOFError, OSError):
        os._exit(0)  # the owner is gone; requests under way are nobody's
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _enqueue(
    answers: SimpleQueue[tuple[int, Future[Reply]]], number: int, future: Future[Reply]
) -> None:
    answers.put((number, future))


def _answer(
    connection: Connection,
    answers: SimpleQueue[tuple[int, Future[Reply]]],
    transfers: Transfers,
) -> None:
    """Send each answer as it comes."""
    one = descriptors.as_socket(connection)
    while True:
        number, future = answers.get()
        try:
            reply = future.result()
        except ShardioError as error:
            kind = getattr(error.__cause__, "kind", "")
            told = type(error).__name__, str(error), kind
            answer = _Answer(number, b"", 0, 0, "", told, transfers.figures)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            told = "StorageError", f"reading from a URL failed: {text}", ""
            answer = _Answer(number, b"", 0, 0, "", told, transfers.figures)
        else:
            data, size, tag = reply
            small = len(data) <= INLINE
            inline, length = (bytes(data), 0) if small else (b"", len(data))
            answer = _Answer(number, inline, length, size, tag, ("", "", ""), transfers.figures)
        try:
            connection.send(answer)
            if answer.length:
                _send_memory(one, reply.data)
        except OSError:
            os._exit(0)
        del future, answer
        reply = Reply(memoryview(b""), 0, "")


def _send_memory(one: Any, data: memoryview) -> None:
    """Send bytes as a descriptor of sealed memory."""
    fd = descriptors.anonymous_memory()
    try:
        done = 0
        while done < len(data):
            done += os.write(fd, data[done:])
        if hasattr(fcntl, "F_ADD_SEALS"):
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            with contextlib.suppress(OSError):  # macOS's is an unlinked file
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        descriptors.send(one, fd)
    finally:
        os.close(fd)
