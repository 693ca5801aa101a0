"""What a test may leave behind: processes, descriptors, shared memory. Nothing."""

import gc
import multiprocessing
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from support import LIMIT_S, programs

# torch leaves a socket open by which a batch's memory was handed over: of a killed worker, or of
# another one, where the error about the killed one came in the middle of that.
of_killed_workers = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

CLOSED_S = 60  # until what was closed is closed, on a busy machine


def descriptors() -> list[str]:
    """What the open descriptors of this process lead to; without numbers, which differ."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        found.append(re.sub(r"\d+", "#", target))
    return sorted(found)


def children() -> set[int]:
    """Children of this process, also those that ended and were not waited for."""
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends just now
            found.update(map(int, task.read_text().split()))
    return found


def settle() -> None:
    """Drop what nobody holds any more; threads of closed queues end, and close their pipes."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(LIMIT_S)


@contextmanager
def nothing_left() -> Iterator[None]:
    """What is done inside leaves no process, no descriptor, and no file in shared memory."""
    if not sys.platform.startswith("linux"):
        yield
        return
    resource_tracker.ensure_running()  # spawn starts it once; it lives as long as this process
    settle()
    memory, opened, living = programs.shared_memory(), descriptors(), children()
    yield
    settle()
    for child in multiprocessing.active_children():
        child.join(CLOSED_S)  # torch ends late ones by a signal, and does not wait for them
    assert not multiprocessing.active_children()
    assert not children() - living
    until = time.monotonic() + CLOSED_S
    # Not equal: what an earlier test had left open may be closed meanwhile.
    while (more := Counter(descriptors()) - Counter(opened)) and time.monotonic() < until:
        time.sleep(0.05)  # torch closes some in threads of its own
        gc.collect()
    assert not more, more
    left = programs.left_in_memory(memory)
    assert not left, left
