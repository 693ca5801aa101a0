"""Where those who make batches are, in memory that the trainer reads: who hangs answers nothing.

How it works. Each thread of each loader process has a row of 128 bytes. Before a record is decoded
its number, the time and its key are written there, by one call; and when it is made, that it is. So
the trainer can tell what a process is at that hangs, is stopped, or is dead. This costs 0.3 us a
record, of 9 at least that making one takes. Rejected: to ask the process. A transform that holds
Python's lock answers as little as a process that is stopped.

The memory is one tensor, so that spawned processes get it as forked ones do, and it has no name.
"""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import NamedTuple, Protocol

import torch

from ..errors import WorkerError, printable
from ..stack import users_level

_ROW = struct.Struct("<qd112s")  # number of the record, when it was begun, its key
_KEY = 112

# Seconds without a batch after which a warning says what is waited for. A batch takes seconds on a
# slow machine, and the first one some more: of spawned processes, or from cold storage.
PATIENCE_S = 60.0
_PAUSE_S = 1.0  # between two looks

# In place of a number.
STARTS, BETWEEN, COLLATES = -3, -2, -1


class PositionWriter:
    """Write where one thread is at.

    note(number, since, key)  a record, or one of the above; since: by time.perf_counter
    at                        at[0] = BETWEEN: the record is made
    """

    __slots__ = ("at", "note")

    def __init__(self, row: memoryview) -> None:
        self.note = partial(_ROW.pack_into, row, 0)
        self.at = row[:8].cast("q")


class Position(NamedTuple):
    """The record that a thread is at."""

    number: int
    since: float
    key: bytes


class Whereabouts:
    """The places of batch builders, each with as many threads."""

    def __init__(self, builders: int, threads: int, *, shared: bool = True) -> None:
        self._memory = torch.zeros((builders, threads, _ROW.size), dtype=torch.uint8)
        if shared:
            self._memory.share_memory_()  # type: ignore[no-untyped-call]
        for builder in range(builders):
            for place in self.places(builder):
                place.at[0] = STARTS

    def places(self, builder: int) -> list[PositionWriter]:
        """Return where the threads of a builder write what they are at."""
        return [PositionWriter(memoryview(row.numpy())) for row in self._memory[builder]]

    def read(self, builder: int) -> list[Position]:
        """Read what the threads of a builder are at; who is at a record, and for longest, first."""
        found = [Position(*_ROW.unpack(row.numpy())) for row in self._memory[builder]]
        return sorted(found, key=lambda one: (one.number in (STARTS, BETWEEN), one.since))

    def show(self, builder: int) -> str:
        """Say what a builder is at, as "at record 7 of the dataset, k/7.jpg, for 61 s"."""
        now, found = perf_counter(), self.read(builder)
        if all(one.number == STARTS for one in found):
            return "not at its first record yet: it starts, or waits for storage"
        busy = [one for one in found if one.number >= 0 or one.number == COLLATES]
        if not busy:
            return "between two records: it waits for storage, most likely"
        several = [f"at {_show(one)}, for {max(0.0, now - one.since):.0f} s" for one in busy[:3]]
        more = f", and {len(busy) - 3} more threads at others" if len(busy) > 3 else ""
        return "; ".join(several) + more

    def last(self, builder: int) -> str:
        """Say what a builder was at that is gone; "": nothing that is known."""
        busy = [one for one in self.read(builder) if one.number >= 0 or one.number == COLLATES]
        return " or ".join([_show(one) for one in busy[:3]])


class Waited(Protocol):
    """One that a batch is waited for from."""

    number: int  # of the builder

    @property
    def name(self) -> str:
        """Return its name in messages."""

    def is_stopped(self) -> bool:
        """Return True if it was stopped by a signal."""

    def end(self) -> None:
        """End it, and all that work with it."""


class BatchTimeout:
    """Warn once when a batch does not come; then, with a timeout, raise an error.

    Waited for are pauses of a second at most. One that takes much longer says that this process
    was stopped itself (Ctrl-Z), or starved: the time beyond is not counted.
    """

    def __init__(
        self,
        whereabouts: Whereabouts,
        timeout_s: float,
        patience_s: float,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.whereabouts = whereabouts
        self._timeout_s = timeout_s or math.inf
        self._patience_s = patience_s
        self._clock = clock
        self._since = -1.0  # when the wait began that the following is of
        self._uncounted_s = 0.0
        self._warned = False
        self._until = math.inf  # when the pause ends

    def pause_s(self, since: float) -> float:
        """Return the seconds to wait, for a batch asked for then, before `look` is called."""
        if since != self._since:
            self._since, self._uncounted_s, self._warned = since, 0.0, False
        ends = self._timeout_s if self._warned else min(self._timeout_s, self._patience_s)
        now = self._clock()
        pause = min(_PAUSE_S, max(0.0, since + self._uncounted_s + ends - now))
        self._until = now + pause
        return pause

    def look(self, since: float, who: Waited) -> None:
        """Say what is waited for, if it is time. Raises WorkerError."""
        now = self._clock()
        self._uncounted_s += max(0.0, now - self._until - _PAUSE_S)
        waited = now - since - self._uncounted_s
        if waited >= self._timeout_s:
            said = self._said(waited, who)
            who.end()
            raise WorkerError(
                f"timeout={self._timeout_s:g}: {said}. This pass is over; iterating anew starts "
                "others"
            )
        if waited >= self._patience_s and not self._warned:
            self._warned = True
            warnings.warn(
                f"ShardLoader: {self._said(waited, who)}. ShardLoader(timeout=...) makes an error "
                "of it",
                stacklevel=users_level(),
            )

    def _said(self, waited: float, who: Waited) -> str:
        where = f"{who.name} is {self.whereabouts.show(who.number)}"
        if who.is_stopped():
            where += ". It was stopped by a signal, as SIGSTOP, and goes on with SIGCONT"
        return f"no batch for {waited:.3g} s: {where}"


def _show(one: Position) -> str:
    if one.number == COLLATES:
        return "collate_fn"
    key = one.key.rstrip(b"\0")
    # A longer key was cut, in the middle of a character perhaps.
    shown = printable(key) + ("..." if len(key) == _KEY else "")
    return f"record {one.number:,} of the dataset, {shown}"
