"""The command line in forked processes, so that Python and numpy are not imported each time.

As a program it reads commands from stdin, a line of JSON each, runs each in a fork of its own as
`python -m shardio` would, and answers with a line: how it ended. A command that starts anew takes
0.16 s of CPU, this way 0.03 s. Other programs, too; and all of them traced by strace, whose counts
of calls begin where the command does. For what is not about how a process starts, or its streams.
"""

import atexit
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support import warm_python

_started: "list[subprocess.Popen[str]]" = []  # one, by the first command


def _server(env: Mapping[str, str]) -> "subprocess.Popen[str]":
    if not _started:
        server = subprocess.Popen(
            [sys.executable, "-W", "error", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(env),
        )
        atexit.register(close)
        _started.append(server)
    return _started[0]


def close() -> None:
    """End the process: it ends with its input. The next command begins another."""
    while _started:
        _started.pop().communicate()


def run(
    arguments: Sequence[str | bytes | Path],
    env: Mapping[str, str],
    program: Sequence[str] = ("-m", "shardio"),
    strace: Sequence[str] = (),
) -> tuple[int, bytes, bytes]:
    """Run a command; its exit code (negative: the signal), stdout and stderr.

    program: what of Python gets the arguments instead: a file, or `-c` and its text.
    strace: the command line of one that is attached before the program runs.
    """
    server = _server(env)
    assert server.stdin and server.stdout
    with tempfile.TemporaryDirectory() as folder:
        said = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        asked = {
            "arguments": [*program, *map(os.fsdecode, arguments)],
            "env": dict(env),
            "folder": os.getcwd(),
            "said": said,
            "stops": bool(strace),
        }
        print(json.dumps(asked), file=server.stdin, flush=True)
        if strace:
            tracer = _attach(strace, int(server.stdout.readline()))
            code = json.loads(server.stdout.readline())
            error = tracer.communicate()[1]
            assert tracer.returncode == 0, error
        else:
            code = json.loads(server.stdout.readline())
        return code, *(Path(one).read_bytes() for one in said)


def _attach(strace: Sequence[str], pid: int) -> "subprocess.Popen[bytes]":
    """Trace a stopped process, and let it go on."""
    tracer = subprocess.Popen([*strace, "-p", str(pid)], stderr=subprocess.PIPE)
    try:
        while "\nTracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
            if tracer.poll() is not None:
                raise AssertionError(tracer.communicate()[1])
            time.sleep(0.001)
        os.kill(pid, signal.SIGCONT)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    return tracer


def stop() -> None:
    """Wait for whoever traces this process: any process may, also where only parents could."""
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER
    os.kill(os.getpid(), signal.SIGSTOP)


def become(asked: dict[str, Any]) -> None:
    """Be the command: this process ends as it does."""
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["folder"])
    streams = [os.open(os.devnull, os.O_RDONLY)]
    streams += [os.open(one, os.O_WRONLY | os.O_CREAT, 0o600) for one in asked["said"]]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if asked["stops"]:
        stop()
    warm_python.start_as_asked()
    warm_python.end(warm_python.run(asked["arguments"]))


def main() -> None:
    # What most commands import, and none of what only some do.
    import argparse  # noqa: F401

    import shardio.cli.main
    import shardio.formats
    import shardio.packing.pack  # noqa: F401

    gc.freeze()  # else each child goes through all that was imported when it ends
    while line := os.read(0, 1 << 20):  # unbuffered: a child is to find nothing of it
        while not line.endswith(b"\n"):
            more = os.read(0, 1 << 20)
            if not more:
                return
            line += more
        asked = json.loads(line)
        child = os.fork()
        if not child:
            become(asked)
        if asked["stops"]:
            os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            os.write(1, b"%d\n" % child)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(1, b"%d\n" % code)


if __name__ == "__main__":
    main()
