"""The stack of this thread: which frame is the user's, and who called this package."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

# Packages whose frames are no place that a user knows.
_BETWEEN = ("torch", "torchdata", "multiprocessing", __name__.partition(".")[0])


def _frames() -> Iterator[FrameType]:
    """Yield the frames of this thread's stack, from the caller's; in a fork, its parent's too."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def callers(modules: Collection[str]) -> list[Any]:
    """Return the `self` of each function of these modules on this thread's stack; None of others.

    The innermost comes first. A forked process has the stack of its parent, too.
    """
    return [f.f_locals.get("self") for f in _frames() if f.f_globals.get("__name__") in modules]


def users_level() -> int:
    """Return the stacklevel, for the caller's warning, of the user's own line.

    In a forked worker that is where its loader was started. Where no frame is the user's, as in a
    spawned worker, it is the outermost one.
    """
    level = 1
    for level, frame in enumerate(_frames()):  # noqa: B007
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _BETWEEN:
            break
    return max(1, level)
