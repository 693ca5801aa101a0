"""The folder that a run of the suite has for itself, and what it may neither leave nor touch.

All processes of a run, those of pytest-xdist too, have HOME and the temporary directory in a folder
of this run alone. So what is left there at the end is this run's, and a process is known by having
the folder in its environment, whatever else runs on the machine. Canaries lie in the places that
the machine's user has: a program that does not keep to the folder, and deletes there, is seen.
"""

import gc
import multiprocessing.util
import os
import shutil
import signal
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

from benchmarks import own_home
from support import command_server, programs, warm_python

GRACE_S = programs.GRACE_S
CANARY = "shardio-tests-canary-"
LONGEST = 24  # bytes of the path of a temporary directory below which Ray's sockets find room
# What others leave in the temporary directory, not told otherwise: torchrun a folder of logs,
# MosaicML Streaming its locks, Python's multiprocessing in a process that is killed the folder of
# its sockets. It goes with the folder of the run.
_OF_OTHERS = ("torchelastic_*", "*_filelock", "pymp-*")
# What Python's multiprocessing runs as long as the process that began it.
_OF_PYTHON = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


class Ground:
    """begin() before anything is run, end() when all has run: what is wrong, a line each."""

    def begin(self) -> None:
        """Put canaries out, and make the folder that this process and its children work in."""
        multiprocessing.util.get_temp_dir()  # of this process: Python removes it at exit
        machine, home = Path(tempfile.gettempdir()), Path.home()
        self._made: list[Path] = []
        self._canaries = [
            canary
            for place in (machine / "data", machine / "chunks", home, home / ".cache")
            if (canary := self._canary(place))
        ]
        self._memory = programs.shared_memory()
        short = len(os.fsencode(machine)) <= LONGEST or not os.access("/tmp", os.W_OK)
        self.folder = Path(tempfile.mkdtemp(prefix="st-", dir=machine if short else "/tmp"))
        variables = own_home.variables(self.folder)
        self.temporary = Path(variables["TMPDIR"])
        for path in (self.folder, self.temporary):
            path.chmod(0o755)  # servers that root starts read there as another user
        # What is pip's, git's and pytest's is where it was: packages are not fetched anew, folders
        # of the user stay safe to git, and those of failed tests are there to be looked at.
        kept = {
            "PIP_CACHE_DIR": home / ".cache" / "pip",
            "GIT_CONFIG_GLOBAL": home / ".gitconfig",
            "PYTEST_DEBUG_TEMPROOT": machine,
        }
        for name, path in kept.items():
            if path.exists():
                os.environ.setdefault(name, str(path))
        os.environ.update(variables)
        tempfile.tempdir = None  # it is looked up again

    def _canary(self, place: Path) -> Path | None:
        with suppress(OSError):  # a home that nobody can write to is safe
            if not place.exists():
                place.mkdir()
                self._made.append(place)
            canary = place / f"{CANARY}{uuid.uuid4().hex}"
            canary.write_text("Not to be touched: the suite looks for it at its end.\n")
            return canary
        return None

    def end(self, grace_s: float = GRACE_S) -> list[str]:
        """Remove all that was made; return what was left, and which canaries are gone."""
        command_server.close()
        warm_python.close()
        gc.collect()  # loaders that an error still holds end their workers
        faults = [f"process {one}" for one in self._processes(grace_s)]
        for name in sorted(programs.left_in_memory(self._memory, grace_s)):
            faults.append(f"shared memory /dev/shm/{name}")
        for path in sorted(self.temporary.iterdir()):
            if any(path.match(name) for name in _OF_OTHERS):
                continue
            faults.append(f"{path.name} in the temporary directory{_content(path)}")
        faults = [f"left behind: {fault}" for fault in faults]
        for canary in self._canaries:
            if not canary.is_file():
                faults.append(f"a program of the suite has deleted the user's files: {canary}")
            canary.unlink(missing_ok=True)
        for place in reversed(self._made):
            with suppress(OSError):  # meanwhile somebody else uses it
                place.rmdir()
        shutil.rmtree(self.folder, ignore_errors=True)
        return faults

    def _processes(self, grace_s: float) -> list[str]:
        """Wait for those of this run; the command lines of those that do not end, now killed."""
        until = time.monotonic() + grace_s
        while (pids := self._living()) and time.monotonic() < until:
            time.sleep(0.1)
        found = [*map(programs.shown, pids)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found

    def _living(self) -> list[int]:
        mark, own = os.fsencode(self.folder) + b"/", programs.command_line(os.getpid())
        group, found = os.getpgrp(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            pid = int(path.parent.name)
            with suppress(OSError):  # it ended meanwhile, or belongs to another user
                line = programs.command_line(pid)
                # A fork has the environment with which this process began, and its command line.
                forked = line == own and os.getpgid(pid) == group
                if pid == os.getpid() or not (mark in path.read_bytes() or forked):
                    continue
                if not (_parent(pid) == os.getpid() and any(one in line for one in _OF_PYTHON)):
                    found.append(pid)
        return found


def _content(path: Path) -> str:
    inside = sorted(one.name for one in path.iterdir()) if path.is_dir() else []
    return f", with {', '.join(inside[:5])}" if inside else ""


def _parent(pid: int) -> int:
    return int(
        Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1]
    )
