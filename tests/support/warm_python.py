"""Python programs in forks of a process that has imported torch, which takes 2 s of CPU each time.

`command(...)` is the command line of a small program that asks that process for a fork, gives it
its arguments, folder, environment and streams, hands on the signals it gets, and ends as the fork
does. Where it is killed, the fork's process group is killed, too. shardio is imported by each fork
anew. For what is not about how a process starts.
"""

import atexit
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the small program is to start fast
    import subprocess
    import tempfile

MARK = "SHARDIO_TESTS_MARK"  # that of support.programs
UNMARKED = "0" * 32  # as long as a mark
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_started: "list[tuple[int, subprocess.Popen[bytes], tempfile.TemporaryDirectory[str]]]" = []


def command(*arguments: str | os.PathLike[str]) -> list[str]:
    """Return what runs `python *arguments`: a file, `-c` or `-m`, behind `-u` or `-W ...`, if any.

    The first call starts the process that is forked.
    """
    import subprocess
    import tempfile

    if not _started:
        folder = tempfile.TemporaryDirectory(prefix="w-")
        server = subprocess.Popen(
            [sys.executable, __file__, os.path.join(folder.name, "s")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": "", MARK: UNMARKED},
            start_new_session=True,
        )
        atexit.register(close)
        _started.append((os.getpid(), server, folder))
        assert server.stdout and server.stdout.readline()
    at = os.path.join(_started[0][2].name, "s")
    return [sys.executable, "-I", "-S", __file__, at, *map(os.fspath, arguments)]


def executable(folder: str | os.PathLike[str]) -> str:
    """Write a program `python` into a folder, and return its path."""
    import shlex

    path = os.path.join(folder, "python")
    with open(path, "w") as file:
        file.write(f'#!/bin/sh\nexec {shlex.join(command())} "$@"\n')
    os.chmod(path, 0o700)
    return path


def close() -> None:
    """End the process that is forked: it ends with its input. The next command begins another."""
    while _started:
        owner, server, folder = _started.pop()
        if owner == os.getpid():  # and no fork of it
            server.communicate()
            folder.cleanup()


# ------------------------------------------------------------------------------ the small program


def ask(at: str, arguments: list[str]) -> None:
    """Have a fork run, and end as it does."""
    import json

    def hand_on(number: int, frame: object) -> None:
        with suppress(ProcessLookupError):
            (os.killpg if number == signal.SIGINT else os.kill)(pid, number)

    signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)  # until there is who gets them
    asked = {"arguments": arguments, "env": dict(os.environ), "folder": os.getcwd()}
    data = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(at)
        socket.send_fds(server, [len(data).to_bytes(4, "little")], [0, 1, 2])
        server.sendall(data)
        pid = int.from_bytes(server.recv(4), "little")
        for number in HANDED_ON:
            signal.signal(number, hand_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
        code = os.waitstatus_to_exitcode(int.from_bytes(server.recv(4), "little"))
    if code < 0:
        with suppress(OSError):  # SIGKILL has no other way
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# ---------------------------------------------------------------------- the process that is forked


@dataclass
class Fork:
    pid: int
    handle: int
    asker: socket.socket


def serve(at: str) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each who asks, until the input ends. Returns in a fork: what is asked, its streams.

    Signals are those of the fork from its first moment on: nobody knows it before.
    """
    import gc
    import json
    import selectors

    import torch._dynamo  # by the first optimizer of a program
    import torch.distributed.run
    import torch.utils.data  # noqa: F401

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
                size, streams, _, _ = socket.recv_fds(asker, 4, 3)
                asked = asker.makefile("rb").read(int.from_bytes(size, "little"))
                pid = os.fork()
                if not pid:
                    os.setsid()
                    asker.sendall(os.getpid().to_bytes(4, "little"))
                    for other in (asker, listener, *(one.asker for one in forks.values())):
                        other.close()
                    return json.loads(asked), streams
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


def become(asked: dict[str, Any], streams: list[int]) -> None:
    """Be the program: this process ends as it does."""
    import warnings

    arguments, env = asked["arguments"], asked["env"]
    os.environ.clear()
    os.environ.update(env)
    show(env.get(MARK, UNMARKED))
    os.chdir(asked["folder"])
    unbuffered = bool(env.get("PYTHONUNBUFFERED"))
    while arguments[0] in ("-u", "-W"):
        if arguments.pop(0) == "-u":
            unbuffered = True
        else:
            sys.warnoptions.append(arguments[0])
            warnings.simplefilter(arguments.pop(0))  # type: ignore[arg-type]
    stand(streams, unbuffered)
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


def stand(streams: list[int], unbuffered: bool) -> None:
    """Make these stdin, stdout and stderr."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(streams[number], number)
        os.close(streams[number])
        line = unbuffered or number == 2 or os.isatty(number)
        errors = ("surrogateescape", "surrogateescape", "backslashreplace")[number]
        mode = "w" if number else "r"
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


if __name__ == "__main__":
    if len(sys.argv) > 2:
        ask(sys.argv[1], sys.argv[2:])
    elif found := serve(sys.argv[1]):
        become(*found)
