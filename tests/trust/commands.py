"""The command line in forks of a process that has imported all of it; a call of it fails, if told.

A start of Python and shardio is 0.2 s of CPU, and strace as much again; a fork here is 0.01 s. As
a program it reads what to run from stdin, a line of JSON each, and answers with a line each.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy.ma  # noqa: F401  (numpy imports it by and by)
from support import LIMIT_S
from support.trees import environment

from shardio import cli, packing
from shardio.cli import parser
from shardio.cli.main import main

HOW = ("count", "kill", "fail", "short", "full")  # as in calls.c


class Done(NamedTuple):
    """How a command ended. calls: those that changed something below the folder, by name."""

    args: list[str]
    returncode: int
    stdout: str
    stderr: str
    calls: list[str]
    pid: int  # and its session


class Commands:
    """The process that is forked, and what is asked of it."""

    def __init__(self, folder: Path) -> None:
        """Start it. folder: gets what is preloaded."""
        library = folder / "calls.so"
        source = Path(__file__).with_name("calls.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "trust.commands"],
            env=environment(LD_PRELOAD=str(library)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(
        self,
        *arguments: str | bytes | Path,
        below: Path | None = None,
        number: int = 0,
        how: str = "count",
        error: int = 0,
        limit_s: float | None = None,
        alone: bool = True,
    ) -> Done:
        """Run a command to its end.

        number: of the call below a folder that is met by `how`, from 1; error: the errno of a call
        that fails. limit_s: when it is killed, `alone` or with its processes.
        """
        words = [os.fsdecode(one) for one in arguments]
        asked = {"words": words, "below": below and str(below), "number": number, "error": error}
        asked |= {"how": HOW.index(how), "limit_s": limit_s, "alone": alone}
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        done = Done(words, **json.loads(self._process.stdout.readline()))
        assert "Traceback" not in done.stderr, done
        return done

    def close(self) -> None:
        """End the process: it ends with its input."""
        self._process.communicate()


# ---------------------------------------------------------------------------- the process of forks


def serve() -> None:
    os.environ.pop("LD_PRELOAD", None)  # only this process and its forks
    for room in (cli, packing):  # and what they import, so no torch, which makes forks slow
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            with contextlib.suppress(ImportError):  # what it needs is not installed
                importlib.import_module(module.name)
    for words in (["--help"], *([one.name, "--help"] for one in parser.COMMANDS)):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            main(words)  # what the first use of a parser compiles
    gc.collect()
    gc.freeze()
    for line in sys.stdin.buffer:
        os.write(1, json.dumps(_fork(json.loads(line))).encode() + b"\n")


def _fork(asked: dict[str, Any]) -> dict[str, Any]:
    said = [os.memfd_create(name) for name in ("stdout", "stderr", "calls")]
    pid = os.fork()
    if not pid:
        _become(asked, said)
    handle = os.pidfd_open(pid)
    limit_s = LIMIT_S if asked["limit_s"] is None else asked["limit_s"]
    if not select.select([handle], [], [], limit_s)[0]:
        with contextlib.suppress(ProcessLookupError):  # it has no session of its own yet
            if not asked["alone"]:
                os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(handle)
    texts = []
    for file in said:
        size = os.fstat(file).st_size
        texts.append(os.pread(file, size, 0).decode(errors="replace"))
        os.close(file)
    out, err, calls = texts
    return {
        "returncode": code,
        "stdout": out,
        "stderr": err,
        "calls": calls.split(),
        "pid": pid,
    }


def _become(asked: dict[str, Any], said: list[int]) -> None:
    """Be the command."""
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (1, 2):
            os.dup2(said[number - 1], number)
        sys.argv = ["shardio", *asked["words"]]
        if asked["below"] is not None:
            ctypes.CDLL(None).trust_arm(
                os.fsencode(asked["below"]),
                ctypes.c_long(asked["number"]),
                asked["how"],
                asked["error"],
                said[2] if asked["how"] == HOW.index("count") else -1,
            )
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
