"""A control group: processes whose reads from one disk are counted, and held to so many a second.

    with Group("/data", reads_per_s=500) as group:
        ...  # in a process that is to be held: join(group.members)
        group.reads()

How it works. Linux's block controller holds back the reads of a group's processes before they reach
the disk, as a cloud provider holds a disk to the requests that were paid for. What is in the page
cache is not held, since it does not reach the disk; what is written neither. The group is a folder
in the kernel's own file system, made on entering and removed on leaving. Making one needs root, or
a hierarchy that was delegated.

Requests are counted as they enter the block layer: the kernel's read-ahead is one, and the next
64 KB of the same file are another. A file's directory entries count, too, when they are cold.

Source: the kernel's Documentation/admin-guide/cgroup-v1/blkio-controller.rst (throttling policy)
and cgroup-v2.rst (IO interface files).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from dataclasses import dataclass
from typing import Final

from shardio.errors import StorageError, printable

_UNHELD: Final = 10**9  # a limit that holds nobody: the kernel counts only where there is one
_LEAVE_S: Final = 5.0  # for processes that were just killed to leave the group
_NAME: Final = "shardio-{}-{}"  # process and number


@dataclass(frozen=True)
class Controller:
    """The block controller of this machine, and what its files are called."""

    version: int
    folder: str  # that new groups are made in

    def limit(self, device: str, reads_per_s: int) -> tuple[str, str]:
        """Return the file that takes a limit, and what is written there."""
        if self.version == 1:
            return "blkio.throttle.read_iops_device", f"{device} {reads_per_s}"
        return "io.max", f"{device} riops={reads_per_s}"

    def count(self, device: str, text: str) -> int:
        """Return the reads so far, from the text of the file `counts`."""
        form = r"^{} Read (\d+)$" if self.version == 1 else r"^{} .*\brios=(\d+)"
        found = re.search(form.format(re.escape(device)), text, re.MULTILINE)
        return int(found[1]) if found else 0

    @property
    def counts(self) -> str:
        """Return the name of the file of the counts."""
        return "blkio.throttle.io_serviced" if self.version == 1 else "io.stat"


class Group:
    """A control group for the disk that `path` lies on; a context manager.

    reads_per_s: the most that the disk is asked for; None: reads are counted only.
    Raises StorageError on entering, where none can be made: its text says why.
    """

    _numbers = itertools.count(1)

    def __init__(self, path: str | os.PathLike[str], reads_per_s: int | None = None) -> None:
        self.reads_per_s = reads_per_s
        self._path = os.fspath(path)

    @property
    def members(self) -> str:
        """Return the file that takes the ids of processes; "0" is who writes it."""
        return os.path.join(self._folder, "cgroup.procs")

    def __enter__(self) -> Group:
        self._device, self._controller = disk(self._path), controller()
        above = self._controller.folder
        self._folder = os.path.join(above, _NAME.format(os.getpid(), next(self._numbers)))
        try:
            with contextlib.ExitStack() as undo:
                if self._controller.version == 2 and _enable(above):
                    undo.callback(_disable, above)
                os.mkdir(self._folder)
                undo.callback(self._remove)
                file, text = self._controller.limit(self._device, self.reads_per_s or _UNHELD)
                _write(os.path.join(self._folder, file), text)
                self._undo = undo.pop_all()
        except OSError as error:
            raise StorageError(
                f"reads cannot be held to a limit: {self._folder}: {error.strerror}; a control "
                "group needs root"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def reads(self) -> int:
        """Count the requests to read that the group's processes have made of the disk so far."""
        with open(os.path.join(self._folder, self._controller.counts)) as file:
            return self._controller.count(self._device, file.read())

    def _remove(self) -> None:
        """Remove the group, once who is in it has left, or was sent away."""
        until = time.monotonic() + _LEAVE_S
        while True:
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(self._folder)
                return
            except OSError:  # busy: someone has not left yet
                if time.monotonic() > until + 1:
                    raise
                if time.monotonic() > until:
                    self._send_away()
                time.sleep(0.02)

    def _send_away(self) -> None:
        """Send those who are still in the group back to where they came from."""
        with open(self.members) as file:
            for pid in file.read().split():
                with contextlib.suppress(OSError):
                    _write(os.path.join(self._controller.folder, "cgroup.procs"), pid)


def join(members: str) -> None:
    """Let this process belong to the group of this file. Raises OSError."""
    _write(members, "0")


def _enable(folder: str) -> bool:
    """Give groups in a folder the controller; False: they have it. In version 2, it decides."""
    control = os.path.join(folder, "cgroup.subtree_control")
    with open(control) as file:
        if "io" in file.read().split():
            return False
    _write(control, "+io")
    return True


def _disable(folder: str) -> None:
    """Take the controller back from groups in a folder, if that can be."""
    with contextlib.suppress(OSError):
        _write(os.path.join(folder, "cgroup.subtree_control"), "-io")


def controller() -> Controller:
    """Find the block controller of this machine. Raises StorageError where there is none."""
    try:
        with open("/proc/self/mounts") as file:
            mounts = [line.split() for line in file]
        with open("/proc/self/cgroup") as file:
            own = dict(line.strip().split(":", 2)[1:] for line in file)
    except OSError:
        raise StorageError("reads cannot be held to a limit: this system has no /proc") from None
    for _, mounted, kind, options, *_ in mounts:
        if kind == "cgroup" and "blkio" in options.split(","):
            inside = next((at for names, at in own.items() if "blkio" in names.split(",")), "/")
            folder = os.path.join(mounted, inside.strip("/")).rstrip("/")
            return Controller(1, folder if os.path.isdir(folder) else mounted)
    for _, mounted, kind, *_ in mounts:
        if kind == "cgroup2":
            with contextlib.suppress(OSError), open(f"{mounted}/cgroup.controllers") as file:
                if "io" in file.read().split():
                    return Controller(2, mounted)
    raise StorageError(
        "reads cannot be held to a limit: this system has no block controller (a control group of "
        "version 1, blkio, or of version 2, io)"
    )


def disk(path: str) -> str:
    """Find the disk that a path lies on, as "MAJOR:MINOR". Raises StorageError if there is none."""
    number = os.stat(path).st_dev
    block = f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"
    if not os.path.exists(block):
        raise StorageError(
            f"reads of {printable(path, 4096)} cannot be held to a limit: it lies on no disk of "
            "its own (a RAM disk, a network file system, or one of several disks)"
        )
    if os.path.exists(f"{block}/partition"):  # limits are set for whole disks
        block = os.path.dirname(os.path.realpath(block))
    with open(f"{block}/dev") as file:
        return file.read().strip()


def _write(path: str, text: str) -> None:
    """Write a file in one system call: each is a command to the kernel."""
    with open(path, "r+b", buffering=0) as file:
        file.write(text.encode())
