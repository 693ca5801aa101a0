"""Child programs with a time limit, and what they leave behind.

A launcher starts ranks in sessions of their own, so that killing a process group does not reach
them. All that a program starts carries a mark in its environment, and is found by it.
"""

import fcntl
import os
import pty
import select
import signal
import stat
import subprocess
import sys
import tempfile
import termios
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from support import warm_python
from support.trees import environment

MARK = "SHARDIO_TESTS_MARK"
# torch's workers look every 5 s whether their parent still lives; what is there long after that is
# left over.
GRACE_S = 60.0


class Done(NamedTuple):
    code: int  # negative: the signal that ended it
    output: str  # stdout and stderr
    left: list[str]  # processes that outlived it, killed meanwhile
    timed_out: bool

    def __str__(self) -> str:
        late = ", its time was up" if self.timed_out else ""
        return f"exit code {self.code}{late}; left over: {self.left}\n{self.output}"


class Program:
    """A running Python program in a session of its own, and all that it starts.

    After `limit_s` everything that carries its mark is killed, so that nothing here waits for ever:
    reading then comes to the end of the output, and `finish` says that the time was up.

    terminal: its stdin, stdout and stderr are a new terminal; `take_terminal` makes it its own.
    warm: it is forked from a process that has imported torch (warm_python), and so are the ranks
        that torchrun starts.
    """

    def __init__(
        self, *arguments: str | Path, limit_s: float, terminal: bool = False, warm: bool = False
    ) -> None:
        self.mark = uuid.uuid4().hex
        self._timed_out = False
        self._output = b""
        # What is killed cannot remove what it has there, and torch's elastic launcher never does.
        self._temporary = tempfile.TemporaryDirectory(prefix="p-")
        line, more = [sys.executable, *map(os.fspath, arguments)], {}
        if warm:
            line = warm_python.command(*arguments)
            more["PYTHON_EXEC"] = warm_python.executable(self._temporary.name)
        if terminal:
            self._end, theirs = pty.openpty()
        else:
            self._end, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                line,
                stdin=theirs if terminal else subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                # From Python 3.13 on, tracebacks are coloured on a terminal.
                env=environment(
                    PYTHONUNBUFFERED="1",
                    PYTHON_COLORS="0",
                    TMPDIR=self._temporary.name,
                    **more,
                    **{MARK: self.mark},
                ),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._end)
            raise
        finally:
            os.close(theirs)
        self.pid = self._process.pid
        self._timer = threading.Timer(limit_s, self._time_is_up)
        self._timer.start()

    def read_until(self, text: str) -> bool:
        """Read on until the output holds this text; False where it ends without."""
        while text.encode() not in self._output:
            if not self._read():
                return False
        return True

    def ended(self) -> bool:
        """Tell whether it has ended."""
        return self._process.poll() is not None

    def interrupt(self) -> None:
        """SIGINT to the process group, as a shell's Ctrl-C sends it."""
        os.killpg(self.pid, signal.SIGINT)

    def type(self, keys: bytes) -> None:
        """What a user types at the terminal."""
        os.write(self._end, keys)

    def kill(self) -> None:
        """SIGKILL to the program alone, and not to what it started."""
        self._process.kill()

    def finish(self) -> Done:
        """Wait for its end and for that of all it started; kill what is left after GRACE_S."""
        try:
            while self._read():  # it ends when all who have it open are gone
                pass
            code = self._process.wait()
            left = _outlive(self.mark, GRACE_S)
        finally:
            self._timer.cancel()
            self._timer.join()
            kill_marked(self.mark)
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._end)
            self._temporary.cleanup()
        return Done(code, self._output.decode("utf-8", "replace"), left, self._timed_out)

    def _read(self) -> bool:
        try:
            data = os.read(self._end, 1 << 16)
        except OSError:  # a terminal whose last user is gone
            return False
        self._output += data
        return bool(data)

    def _time_is_up(self) -> None:
        self._timed_out = True
        self._process.kill()
        kill_marked(self.mark)


def run(*arguments: str | Path, limit_s: float, warm: bool = False) -> Done:
    return Program(*arguments, limit_s=limit_s, warm=warm).finish()


def take_terminal() -> None:
    """Called by a program: make the terminal at stdin its own, so that Ctrl-C reaches it."""
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def shared_memory() -> set[str]:
    """Names of files in shared memory: torch's tensors, multiprocessing's semaphores."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def left_in_memory(before: set[str], grace_s: float = 60) -> set[str]:
    """Files in shared memory that are new, and that no other living process has mapped.

    Other tests may run on this machine at the same time, and those have theirs: a file is made a
    moment before it is mapped, and unlinked a moment after it was. So what is left is what stays
    through the time of grace.
    """
    until = time.monotonic() + grace_s
    found = _unmapped(before)
    while found and time.monotonic() < until:
        time.sleep(0.1)
        found &= _unmapped(before)
    return found


def _unmapped(before: set[str]) -> set[str]:
    """Files in shared memory, but for those before, that no other process has mapped just now.

    A semaphore is known by its inode: it is mapped under the name that it had before it got its
    own.
    """
    inodes = {}
    for name in shared_memory() - before:
        with suppress(FileNotFoundError):
            status = os.stat(f"/dev/shm/{name}")
            # What others have mapped cannot be seen, and folders are of who has his scratch there.
            if status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode):
                inodes[name] = status.st_ino
    mapped = set()
    for path in Path("/proc").glob("[0-9]*/maps") if inodes else ():
        if path.parent.name != str(os.getpid()):
            with suppress(OSError):
                lines = path.read_text("utf-8", "replace").splitlines()
                mapped |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    return {name for name, inode in inodes.items() if inode not in mapped} & shared_memory()


def _marked(mark: str) -> list[int]:
    """Processes that carry a mark. Elsewhere than on Linux none are found."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it ended meanwhile, or belongs to another user
            if wanted in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def _outlive(mark: str, grace_s: float) -> list[str]:
    """Wait for the processes that carry a mark; the command lines of those that do not end."""
    until = time.monotonic() + grace_s
    while pids := _marked(mark):
        for pid in pids:
            with suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                try:
                    poll = select.poll()
                    poll.register(handle, select.POLLIN)
                    if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                        return [shown(pid) for pid in _marked(mark)]
                finally:
                    os.close(handle)
    return []


def command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
    return b""


def shown(pid: int) -> str:
    """A process, for messages."""
    return f"{pid} {command_line(pid).decode('utf-8', 'replace')}"


def kill_marked(mark: str) -> None:
    """Kill all that carry a mark, also what they started while others were being killed."""
    for _ in range(100):
        pids = _marked(mark)
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
