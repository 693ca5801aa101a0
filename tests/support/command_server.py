"""The command line in forked processes, so that Python and numpy are not imported each time.

As a program it reads commands from stdin, a line of JSON each, runs each in a fork of its own as
`python -m shardio` would, and answers with a line: how it ended. A command that starts anew takes
0.16 s of CPU, this way 0.03 s. Other programs, too. For what is not about how a process starts, or
its streams.
"""

import atexit
import gc
import json
import os
import subprocess
import sys
import tempfile
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
    arguments: Sequence[str | bytes | Path], env: Mapping[str, str], program: Path | None = None
) -> tuple[int, bytes, bytes]:
    """Run a command; its exit code (negative: the signal), stdout and stderr.

    program: a file of Python that gets the arguments instead.
    """
    server = _server(env)
    assert server.stdin and server.stdout
    with tempfile.TemporaryDirectory() as folder:
        said = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        asked = {
            "arguments": [os.fsdecode(one) for one in arguments],
            "env": dict(env),
            "folder": os.getcwd(),
            "said": said,
            "program": program and os.fspath(program),
        }
        print(json.dumps(asked), file=server.stdin, flush=True)
        code = json.loads(server.stdout.readline())
        return code, *(Path(one).read_bytes() for one in said)


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
    program = [asked["program"]] if asked["program"] else ["-m", "shardio"]
    warm_python.end(warm_python.run([*program, *asked["arguments"]]))


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
        child = os.fork()
        if not child:
            become(json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(1, b"%d\n" % code)


if __name__ == "__main__":
    main()
