"""Values that nobody wrote: one junk value in a tree of dicts, lists and arrays, somewhere."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

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
