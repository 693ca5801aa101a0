"""Values that nobody wrote, and what reads them: in little memory, or in a process of its own.

`change` puts one junk value into a tree of dicts, lists and arrays, somewhere.
"""

import copy
import hashlib
import os
import random
import resource
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from support import LIMIT_S

Path = tuple[Any, ...]

JUNK = (
    *(None, True, -1, 0, 1, 7, 1 << 31, 1 << 63, (1 << 64) - 1, -1 << 63, 1.5, float("nan")),
    *("", "x", "../x", "a/b\0", "\udc80", "n" * 300, b"", b"x", [], [1], ["x"], [[]], {}, {"a": 1}),
    *(np.zeros(3), np.arange(4), np.array([], np.int64)),
)
PLAIN = tuple(one for one in JUNK if not isinstance(one, (bytes, np.ndarray)))  # what JSON has


def change(value: Any, rng: random.Random, junk: tuple[Any, ...] = JUNK, below: int = 1) -> Any:
    """Return the value with one of its parts, at this depth or below, replaced or left out."""
    path = rng.choice([one for one in _paths(value) if len(one) > below])
    return _put(value, path, None if rng.random() < 0.15 else [rng.choice(junk)])


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    if isinstance(value, dict):
        for name in value:
            yield from _paths(value[name], (*path, name))
    elif isinstance(value, list | tuple):
        for i in range(min(len(value), 4)):
            yield from _paths(value[i], (*path, i))


def _put(value: Any, path: Path, new: list[Any] | None) -> Any:
    """Return a copy with another part; new: None leaves it out."""
    value = list(value) if isinstance(value, tuple) else copy.copy(value)
    at, *rest = path
    if rest:
        value[at] = _put(value[at], tuple(rest), new)
    elif new is None:
        del value[at]
    else:
        value[at] = new[0]
    return value


def sealed(lines: bytes) -> bytes:
    """Put the line behind others that vouches for them, as at the end of a manifest."""
    return lines + b'"sha256": "%s"\n}\n' % hashlib.sha256(lines).hexdigest().encode()


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """Fail where the block holds as many bytes as the limit at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def in_child(work: Callable[[], object], memory: int | None = None) -> int:
    """Return the exit status of a fork that does this; negative: the signal that ended it.

    memory: bytes that the child can have at most.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        signal.alarm(LIMIT_S)  # a child that waits for ever fails the test, rather than hang it
        try:
            if memory is not None:
                resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
