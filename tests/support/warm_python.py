"""Python programs in forks of a process that has imported torch, which takes 2 s of CPU each time.

`command(...)` is the command line of a small program, ask_fork.py, that asks that process for a
fork, gives it its arguments, folder, environment and descriptors, hands on the signals it gets, and
ends as the fork does. Where it is killed, the fork's process group is killed, too. shardio is
imported by each fork anew; or, of "shardio", a fork has it, and no torch. `starts` makes what
multiprocessing would start such forks, and with it the helpers that read from URLs. For what is not
about how a process starts.
"""

import atexit
import fcntl
import marshal
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker, spawn
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tempfile

MARK = "SHARDIO_TESTS_MARK"  # that of support.programs
UNMARKED = "0" * 32  # as long as a mark
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ASK = os.path.join(ROOT, "tests", "support", "ask_fork.py")
STARTS = "SHARDIO_TESTS_STARTS"  # the program that multiprocessing starts, also in a fork
# What a fork of each kind has imported.
HAS = {
    "torch": (
        "torch._dynamo",  # by the first optimizer of a program
        *("torch.distributed.run", "torch.utils.data", "PIL.Image", "msgpack", "xxhash", "obstore"),
    ),
    "shardio": (
        *("shardio.cli.main", "shardio.formats", "shardio.packing.pack"),
        *("shardio.storage.helper", "shardio.storage.client", "obstore", "numpy.random"),
    ),
}
_started: "dict[str, tuple[int, subprocess.Popen[bytes], tempfile.TemporaryDirectory[str]]]" = {}


def command(*arguments: str | os.PathLike[str], kind: str = "torch") -> list[str]:
    """Return what runs `python *arguments`: a file, `-c` or `-m`, behind `-u` or `-W ...`, if any.

    The first call of a kind starts the process that is forked.
    """
    import tempfile

    if kind not in _started:
        folder = tempfile.TemporaryDirectory(prefix="w-")
        path = [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])] if kind == "shardio" else []
        server = subprocess.Popen(
            [sys.executable, __file__, os.path.join(folder.name, "s"), *HAS[kind]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), MARK: UNMARKED},
            start_new_session=True,
        )
        atexit.register(close)
        _started[kind] = (os.getpid(), server, folder)
        assert server.stdout and server.stdout.readline()
    at = os.path.join(_started[kind][2].name, "s")
    return [sys.executable, "-I", "-S", ASK, at, *map(os.fspath, arguments)]


class Process(subprocess.Popen[Any]):
    """One that runs a `command`, and whose end is that of the fork, also when it is killed."""

    def kill(self) -> None:
        """Kill the fork."""
        self.send_signal(signal.SIGUSR2)  # see ask_fork.py


def executable(folder: str | os.PathLike[str], kind: str = "torch") -> str:
    """Write a program `python` into a folder, and return its path."""
    import shlex

    path = os.path.join(folder, "python")
    with open(path, "w") as file:
        file.write(f'#!/bin/sh\nexec {shlex.join(command(kind=kind))} "$@"\n')
    os.chmod(path, 0o700)
    return path


@contextmanager
def starts(kind: str) -> Iterator[None]:
    """Let multiprocessing start forks of a kind: workers of spawn, helpers that read from URLs."""
    resource_tracker.ensure_running()  # spawn starts it once; it lives as long as this process
    command(kind=kind)
    before, name = spawn.get_executable(), os.environ.get(STARTS)
    os.environ[STARTS] = executable(os.path.dirname(command(kind=kind)[4]), kind)
    multiprocessing.set_executable(os.environ[STARTS])
    try:
        yield
    finally:
        multiprocessing.set_executable(before)
        del os.environ[STARTS]
        if name is not None:
            os.environ[STARTS] = name


def start_as_asked() -> None:
    """Let multiprocessing start what the environment says, in a fork."""
    multiprocessing.set_executable(os.environ.get(STARTS, sys.executable))


def close() -> None:
    """End the processes that are forked: each ends with its input. The next command begins one."""
    while _started:
        owner, server, folder = _started.popitem()[1]
        if owner == os.getpid():  # and no fork of it
            server.communicate()
            folder.cleanup()


# ---------------------------------------------------------------------- the process that is forked


@dataclass
class Fork:
    pid: int
    handle: int
    asker: socket.socket


def serve(at: str, modules: list[str]) -> tuple[Any, list[int]] | None:
    """Fork for each who asks, until the input ends. Returns in a fork: what is asked, its streams.

    Signals are those of the fork from its first moment on: nobody knows it before.
    """
    import gc
    import importlib
    import selectors

    for name in modules:
        with suppress(ImportError):  # the test that needs it says so
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each fork goes through all of it when it ends
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(at)
    listener.listen(64)
    os.write(1, b"here\n")
    forks: dict[int, Fork] = {}
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                for fork in forks.values():
                    kill(fork)
                return None
            if key.fileobj is listener:
                asker, _ = listener.accept()
                size, streams, _, _ = socket.recv_fds(asker, 4, 250)
                asked = asker.makefile("rb").read(int.from_bytes(size, "little"))
                pid = os.fork()
                if not pid:
                    os.setsid()
                    asker.sendall(os.getpid().to_bytes(4, "little"))
                    selector.close()
                    for other in (asker, listener, *(one.asker for one in forks.values())):
                        other.close()
                    for one in forks.values():
                        os.close(one.handle)
                    return marshal.loads(asked), streams
                for stream in streams:
                    os.close(stream)
                fork = forks[pid] = Fork(pid, os.pidfd_open(pid), asker)
                selector.register(fork.handle, selectors.EVENT_READ, fork)
                selector.register(asker, selectors.EVENT_READ, fork)
            elif key.data.pid in forks:
                fork = key.data
                selector.unregister(key.fileobj)
                if key.fileobj is fork.asker:  # it was killed
                    kill(fork)
                    continue
                with suppress(OSError):
                    code = os.waitpid(fork.pid, 0)[1]
                    fork.asker.sendall(code.to_bytes(4, "little"))
                with suppress(KeyError):
                    selector.unregister(fork.asker)
                fork.asker.close()
                os.close(fork.handle)
                del forks[fork.pid]


def kill(fork: Fork) -> None:
    with suppress(ProcessLookupError):
        os.kill(fork.pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(fork.pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------- in the fork


def become(asked: tuple[list[str], dict[str, str], str, list[int]], given: list[int]) -> None:
    """Be the program: this process ends as it does."""
    import warnings

    arguments, env, folder, numbers = asked
    os.environ.clear()
    os.environ.update(env)
    show(env.get(MARK, UNMARKED))
    os.chdir(folder)
    unbuffered = bool(env.get("PYTHONUNBUFFERED"))
    while arguments[0] in ("-u", "-W", "-B"):  # -B: multiprocessing's, of its environment
        if (option := arguments.pop(0)) == "-u":
            unbuffered = True
        elif option == "-W":
            sys.warnoptions.append(arguments[0])
            warnings.simplefilter(arguments.pop(0))  # type: ignore[arg-type]
    place(given, numbers)
    for number in range(3):
        stand(number, unbuffered, number in numbers)
    start_as_asked()
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    kind = arguments[0]
    first = "" if kind == "-c" else os.getcwd() if kind == "-m" else os.path.dirname(kind)
    sys.path[:1] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    end(run(arguments))


def run(arguments: list[str]) -> int:
    """Run the program, and return its exit code, negative for the signal that is to end it."""
    import builtins
    import runpy
    import types

    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    kind = arguments[0]
    sys.argv = {"-m": arguments[1:], "-c": ["-c", *arguments[2:]]}.get(kind, arguments)
    try:
        if kind == "-m":
            if not hasattr(sys.modules.get(arguments[1]), "__path__"):
                sys.modules.pop(arguments[1], None)  # else runpy warns that it was imported
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
        else:
            main.__file__ = kind
            with open(kind, "rb") as file:
                exec(compile(file.read(), kind, "exec"), main.__dict__)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        sys.excepthook(type(error), error, trace and trace.tb_next)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(code: int) -> None:
    """End as Python does, but for taking all modules down: those of torch take 0.3 s of CPU."""
    import gc
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()  # loaders end their workers
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        code = code or 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 255)


def place(given: list[int], numbers: list[int]) -> None:
    """Give descriptors the numbers that they had."""
    high = [out_of_the_way(one) for one in given]
    for number in {0, 1, 2}.difference(numbers):
        os.close(number)
    for one, number in zip(high, numbers, strict=True):
        os.dup2(one, number)
        os.close(one)


def out_of_the_way(one: int) -> int:
    high = fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 300)
    os.close(one)
    return high


def stand(number: int, unbuffered: bool, there: bool) -> None:
    """Make a descriptor stdin, stdout or stderr."""
    name, mode = ("stdin", "stdout", "stderr")[number], "w" if number else "r"
    if not there:  # it was closed
        setattr(sys, name, None)
        return
    line = unbuffered or number == 2 or os.isatty(number)
    errors = "backslashreplace" if number == 2 else "surrogateescape"
    stream = open(number, mode, 1 if line else -1, "utf-8", errors, closefd=False)  # noqa: SIM115
    if unbuffered and number:
        stream.reconfigure(write_through=True)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def show(mark: str) -> None:
    """Show a mark in the environment that /proc has, which is that of the process's beginning."""
    import ctypes

    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    at = ctypes.string_at(begin, end - begin).index(f"{MARK}=".encode()) + len(MARK) + 1
    ctypes.memmove(begin + at, mark.encode(), len(UNMARKED))


if __name__ == "__main__" and (found := serve(sys.argv[1], sys.argv[2:])):
    become(*found)
