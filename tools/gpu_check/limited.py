"""Run a program with a limit, and leave no process of it behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ENDING = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 10.0  # to end by itself after an interrupt, which shows in the log where it was
TAIL = 4_000  # bytes of the log that a result keeps


class Ended(NamedTuple):
    """Say how a program ended.

    code: its exit code, negative for a signal; None if it ran past its limit and was ended.
    tail: the end of what it printed.
    """

    code: int | None
    seconds: float
    tail: str

    @property
    def why(self) -> str:
        """Say it in words; "" if the program ended with 0."""
        if self.code is None:
            return f"ended after {self.seconds:.0f} s: it ran past its limit"
        if self.code < 0:
            return f"ended by signal {-self.code} ({signal.Signals(-self.code).name})"
        return f"exit code {self.code}" if self.code else ""


def run(
    command: Sequence[str],
    limit_s: float,
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: Path | None = None,
    grace_s: float = GRACE_S,
) -> Ended:
    """Run a program until it ends, or its limit is over. All that it started ends with it.

    log: a file to which its output is appended. stdout: a file for its stdout alone.
    """
    began = time.monotonic()
    code: int | None = None
    with log.open("ab") as printed, (stdout or log).open("ab") as out:
        at = printed.tell()
        before: dict[int, str] = {}
        # Whoever ends the call while the program starts would leave it running, unknown to all.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=printed,
                env=env,
                cwd=cwd,
                preexec_fn=_begin,
            )
        except BaseException:
            _let_in()
            raise
        try:
            _let_in()
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            before = family(process.pid)  # some may lose their parent in what follows
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        finally:
            _kill(before | family(process.pid))
            process.wait()
    with log.open("rb") as file:
        file.seek(max(at, log.stat().st_size - TAIL))
        tail = file.read().decode(errors="replace")
    return Ended(code, time.monotonic() - began, tail)


def _begin() -> None:
    """Make the program the leader of a group.

    Not of a session: who ends all of a session, as the end of a call may, ends a part too.
    """
    os.setpgrp()
    _let_in()


def _let_in() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def family(leader: int) -> dict[int, str]:
    """Return the processes that descend from a process, or are of its group. Needs /proc.

    Each has the time of its start as its value: a number that is given again has another.
    """
    every = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            every[int(entry.name)] = stat
    found = {pid for pid, stat in every.items() if leader in (pid, int(stat[2]))}
    while more := {pid for pid, stat in every.items() if int(stat[1]) in found} - found:
        found |= more
    return {pid: every[pid][19] for pid in found}


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on; [] if there is no such process."""
    with suppress(OSError):
        # The name of the program, in brackets, may hold anything, brackets included.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _kill(processes: Mapping[int, str]) -> None:
    """Kill processes, and wait until they have given back what they held."""
    for pid, began in processes.items():
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            if (stat := _stat(pid)) and stat[19] == began:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                select.select([handle], [], [], GRACE_S)
            os.close(handle)
