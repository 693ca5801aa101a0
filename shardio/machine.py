"""What this machine, and a tree of processes, are doing, as the kernel tells it to anyone.

CPU time, memory and reads of processes come from /proc; what it does not tell (there is none on
macOS) is None. Files are made cold by `posix_fadvise`, and whether that worked is looked at, since
it is a hint: on a RAM disk, or for pages in use, nothing happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Iterable, Sequence

import numpy as np

STAYED = 0.02  # of the pages; fewer are those of indexes, and what other programs just read
_TRIES = 3  # a page that was just in use stays; the next time it goes
_SAMPLE = 1 << 20  # bytes read back, where the kernel does not say what is in memory


def processors() -> int:
    """Count the processors that this process may run on, whatever share of their time it gets."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores() -> float:
    """Return how many processors this process may use at once: of a container, its share."""
    found = [float(processors())]
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as file:
        quota, period = file.read().split()  # "max 100000" is no number: no limit
        found.append(int(quota) / int(period))
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # version 1 of cgroups
        pair = [_number(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]
        if pair[0] > 0:
            found.append(pair[0] / pair[1])
    return min(found)


def is_whole() -> bool:
    """Return True if all processors are this process's to use: else other programs' are others."""
    return cores() >= (os.cpu_count() or 1)


def load() -> float | None:
    """Return how many programs wanted a processor in the minute before, mean; None if unknown."""
    try:
        return os.getloadavg()[0] if is_whole() else None
    except OSError:
        return None


def busy_seconds() -> float | None:
    """Return the CPU time of all on this machine since it started; None if it is unknown."""
    if not is_whole():
        return None
    with contextlib.suppress(OSError, ValueError), open("/proc/stat") as file:
        user, nice, system, _idle, _wait, irq, soft, steal = map(int, file.readline().split()[1:9])
        return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    return None


# --- a tree of processes --------------------------------------------------------------------------


def family(root: int) -> list[int]:
    """Return a process and all its descendants; itself alone where /proc is missing."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and (found := _stat(int(name))):
                children.setdefault(int(found[1]), []).append(int(name))
    tree = [root]
    for pid in tree:  # grows while it is walked
        tree += children.get(pid, [])
    return tree


def cpu_seconds(pids: Iterable[int]) -> float | None:
    """Return the CPU time of these processes, and of their ended children, in seconds."""
    found = [fields for pid in pids if (fields := _stat(pid))]
    if not found:
        return None
    return sum(sum(map(int, one[11:15])) for one in found) / os.sysconf("SC_CLK_TCK")


def read_bytes(pids: Iterable[int]) -> int | None:
    """Return the bytes that these processes had read from storage, not from the page cache."""
    found = [_entry(f"/proc/{pid}/io", "read_bytes:") for pid in pids]
    known = [one for one in found if one is not None]
    return sum(known) if known else None


def pss_bytes(pids: Iterable[int]) -> int | None:
    """Return the memory of these processes: shared memory counts for each by its part (PSS)."""
    found = [_entry(f"/proc/{pid}/smaps_rollup", "Pss:") for pid in pids]
    known = [one for one in found if one is not None]
    return sum(known) << 10 if known else None


def private_bytes(pid: int) -> int:
    """Return the memory that no other process shares; 0 if it is unknown."""
    path = f"/proc/{pid}/smaps_rollup"
    return sum(_entry(path, f"Private_{kind}:") or 0 for kind in ("Clean", "Dirty")) << 10


def is_stopped(pid: int) -> bool:
    """Return True if a process was stopped by a signal; False, too, where nothing is known."""
    return _stat(pid)[:1] in (["T"], ["t"])


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third: state, parent, ... (proc_pid_stat(5))."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        # The second is the program's name in brackets, which may hold blanks and brackets.
        return file.read().rpartition(b")")[2].decode("ascii", "replace").split()
    return []


def _entry(path: str, name: str) -> int | None:
    """Return the number behind a name, in a file of lines such as `Pss:  330 kB`."""
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            if line.startswith(name):
                return int(line.split()[1])
    return None


def _number(path: str) -> int:
    with open(path) as file:
        return int(file.read())


# --- cold files -----------------------------------------------------------------------------------


def evict(paths: Sequence[str]) -> float | None:
    """Drop the pages of these files from memory; return the share of them that stayed.

    None where this system has no way to. Raises OSError.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    stayed = 1.0
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(0.1)  # for whoever has them in use
        pages = resident = 0
        for path in paths:
            file = os.open(path, os.O_RDONLY)
            try:
                if attempt == 1:
                    os.fsync(file)  # a dirty page cannot be dropped
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                one, of = _resident(file)
            finally:
                os.close(file)
            resident, pages = resident + one, pages + of
        stayed = resident / max(1, pages)
        if stayed <= STAYED:
            return stayed
    # To who neither owns a file nor may write it, the kernel says that all its pages are there.
    return min(stayed, _cached(paths))


def _resident(file: int) -> tuple[int, int]:
    """Return the pages of an open file that are in memory, by mincore, and all its pages."""
    size = os.fstat(file).st_size
    if not size:
        return 0, 0
    count = -(-size // mmap.PAGESIZE)
    states = np.zeros(count, np.uint8)
    with mmap.mmap(file, size, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(start))
        failed = ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), states.ctypes)
        del start  # or the map cannot be closed
    if failed:
        return count, count
    return int((states & 1).sum()), count


def _cached(paths: Sequence[str]) -> float:
    """Return the share of a sample of these files that is read without the storage."""
    before = read_bytes([os.getpid()])
    done = 0
    for path in paths[: 1 + len(paths) // 8]:
        with open(path, "rb", buffering=0) as file:
            done += len(file.read(_SAMPLE))
        if done >= 8 * _SAMPLE:
            break
    after = read_bytes([os.getpid()])
    if before is None or after is None or not done:
        return 1.0
    return max(0.0, 1 - (after - before) / done)
