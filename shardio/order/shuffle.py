"""Shuffle the records of one span through a bounded window.

How it works. The window has w slots, and holds the first w records of the span at the start. Each
draw picks a slot by a random word, hands out the record in it, and puts the next record of the span
there. The last w draws find no next record; there the number of slots shrinks by one a draw. So a
record never comes more than w - 1 draws early, and memory does not depend on the span's length.

Draws are computed in blocks of numpy operations: 0.02 us a draw, a plain loop takes 0.1 to 0.2.
`seek` finds the window's content at any draw without the draws before it: the last write to each
slot decides what the slot holds, so draws are scanned backwards until every slot has one.

Words become slots by Lemire's multiply-shift (Fast random integer generation in an interval, 2019).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from .rng import Int64s, UInt64s, words

# So many draws are computed at a time: a block costs ~30 numpy calls. Taken 32 at a time through
# a window of 157: 0.040 us a record in blocks of 1,024, 0.028 of 2,048, 0.021 of 4,096, 0.018 of
# 8,192; and 64 spans of blocks stay at 2 MiB.
BLOCK = 4096

# A step of a seek's backward scan is at most this long, to bound its memory.
SCAN: Final = 1 << 20

# Multiply-shift uses 32 random bits: a window beyond 2^32 would leave slots that are never drawn.
MAX_WINDOW: Final = 1 << 32

NO_ROWS: Final[Int64s] = np.empty(0, np.int64)
NO_ROWS.flags.writeable = False  # it is shared by every batch that repeats nothing


class SpanOrder:
    """Hand out the records 0 .. n - 1 of one span, shuffled through a window of w slots.

    w = min(window, n). The slots first hold 0 .. w - 1. Draw k = 0 .. n - 1, with
    m = min(w, n - k) slots alive, picks slot j of m by word k of `key` and emits the record in it;
    then record k + w moves into slot j, or, when there is none left, the last living slot does.
    So record p is never emitted before draw p - w + 1. A window of 0 or 1 is storage order.

    Memory is O(w), whatever n. 0 <= n < 2^63, 0 <= window <= 2^32; else raises OptionError. An
    object is for one thread.
    """

    __slots__ = ("_at", "_block", "_computed", "_dying", "_key", "_slots", "n", "window")

    def __init__(self, n: int, window: int, *, key: int) -> None:
        """Stand before draw 0. n and window are in records; key names the stream of words."""
        if n < 0 or not 0 <= window <= MAX_WINDOW:
            raise OptionError(
                f"a span of {n} records and a window of {window}: expected n >= 0 and "
                f"0 <= window <= {MAX_WINDOW}; choose a smaller shuffle_buffer."
            )
        self.n: Final = n
        self.window: Final = min(window, n)
        self._key = key
        self._computed = 0  # draws so far; those of the last block may not be handed out yet
        self._block = NO_ROWS  # the records of draws computed - len(block) .. computed - 1
        self._at = 0  # how many of the block are handed out
        self._slots: Int64s = np.arange(self.window, dtype=np.int64)  # steady phase
        self._dying: list[int] | None = None  # the slots in the last w draws, as a list

    @property
    def drawn(self) -> int:
        """Return the number of the next draw, in [0, n]: take(1) returns its record."""
        return self._computed - len(self._block) + self._at

    def take(self, count: int) -> Int64s:
        """Return the records of the next `count` draws.

        (count,) int64, positions relative to the span's start, in [0, n), read-only. Raises
        OptionError when fewer than `count` draws are left.
        """
        end = self._at + count
        if self._at <= end <= len(self._block):
            out = self._block[self._at : end]
            self._at = end
            return out
        if not 0 <= count <= self.n - self.drawn:
            raise OptionError(
                f"take({count}) at draw {self.drawn} of {self.n}: expected 0 to "
                f"{self.n - self.drawn} more."
            )
        pieces = [self._block[self._at :]]
        missing = count - len(pieces[0])
        while missing > 0:
            self._fill()
            pieces.append(self._block[:missing])
            self._at = len(pieces[-1])
            missing -= self._at
        out = np.concatenate(pieces)
        out.flags.writeable = False  # as the views of a block are
        return out

    def seek(self, k: int) -> None:
        """Go to draw k in [0, n], forwards or backwards; raise OptionError for another k.

        Costs O(w log w) at most, wherever k is: the last write to each slot before draw k decides
        the window, so draws are scanned backwards from k until every slot has one.
        """
        if not 0 <= k <= self.n:
            raise OptionError(f"seek to draw {k}: expected 0 to {self.n}.")
        if not self._computed - len(self._block) <= k <= self._computed:
            # Short ways forward are walked: the scan passes over about w ln w draws itself.
            if not self._computed <= k <= self._computed + self.window * self.window.bit_length():
                self._scan(k)
            while self._computed < k:
                self._fill()
        self._at = k - (self._computed - len(self._block))

    def _fill(self) -> None:
        """Compute the records of the next block of draws."""
        w, k = self.window, self._computed
        count = min(BLOCK, (self.n if k >= self.n - w or w <= 1 else self.n - w) - k)
        if w <= 1:
            self._block = np.arange(k, k + count, dtype=np.int64)
        elif k < self.n - w:
            self._block = self._steady(k, count)
        else:
            self._block = self._last(k, count)
        self._block.flags.writeable = False  # a seek back may hand it out again
        self._computed += count
        self._at = 0

    def _steady(self, k: int, count: int) -> Int64s:
        """Compute draws k .. k + count - 1, each followed by a new record: k + count <= n - w.

        Draw i moves record i + w into its slot. So a draw emits i + w of the previous draw i of the
        same slot, or, when it is the slot's first in this block, the record that the slot held.
        """
        slots = self._slots_drawn(k, count)
        draws = self._by_slot(slots)
        slots = slots[draws]
        last = _ends(slots)
        emitted = self._slots[slots]
        moved = draws + (k + self.window)
        np.copyto(emitted[1:], moved[:-1], where=~last[:-1])
        self._slots[slots[last]] = moved[last]
        out = np.empty(count, np.int64)
        out[draws] = emitted
        return out

    def _last(self, k: int, count: int) -> Int64s:
        """Compute draws k .. k + count - 1 of the last w, n - w <= k: no new records, slots die.

        A plain loop, 0.1-0.2 us a draw up to w = 100,000, 0.5 at a million (cache misses): each
        draw moves a slot that an earlier one may have moved.
        """
        if self._dying is None:
            self._dying = self._slots.tolist()
        slots, out = self._dying, []
        alive = np.arange(self.n - k, self.n - k - count, -1, dtype=np.uint64)
        for j in self._slots_drawn(k, count, alive).tolist():
            out.append(slots[j])
            moved = slots.pop()
            if j < len(slots):
                slots[j] = moved
        return np.array(out, np.int64)

    def _slots_drawn(self, k: int, count: int, alive: UInt64s | None = None) -> Int64s:
        """Return the slots j that draws k .. k + count - 1 pick, of w or of `alive` ones each.

        Multiply-shift: 32 random bits times m, high half. No slot's probability is off by more
        than m / 2^32 of itself.
        """
        j = words(self._key, k, count)
        j >>= np.uint64(32)
        j *= np.uint64(self.window) if alive is None else alive
        j >>= np.uint64(32)
        return j.view(np.int64)

    def _scan(self, k: int) -> None:
        """Put the window into its state before draw min(k, n - w), with an empty block."""
        w = self.window
        k = k if w <= 1 else min(k, self.n - w)
        self._computed, self._block, self._at, self._dying = k, NO_ROWS, 0, None
        self._slots = np.arange(w, dtype=np.int64)
        if w <= 1:
            return
        writes = np.full(w, -1, np.int64)  # the last draw before k that wrote to each slot
        end = k
        while end and (writes < 0).any():
            count = min(end, max(BLOCK, w), SCAN)
            end -= count
            slots = self._slots_drawn(end, count)
            draws = np.flatnonzero(writes[slots] < 0)  # later draws wrote to the other slots
            np.maximum.at(writes, slots[draws], draws + end)
        self._slots = np.where(writes < 0, self._slots, writes + w)

    def _by_slot(self, slots: Int64s) -> Int64s:
        """Sort draws by slot, those of one slot in order (stable): (n,) -> (n,) int64 indices."""
        # numpy sorts 16 bits by radix: 5 us for 2,048, against 25 us for int64 and 33 us for
        # sorting (slot, draw) as one number.
        keys = slots.astype(np.uint16) if self.window <= 1 << 16 else slots
        return keys.argsort(kind="stable")


def _ends(slots: Int64s) -> NDArray[np.bool_]:
    """Mark where runs of equal values end: (n,) -> (n,) bool, the last one True.

    It chooses the one write to each slot: of two writes to one place in one assignment, numpy does
    not promise which wins.
    """
    ends = np.ones(len(slots), np.bool_)
    np.not_equal(slots[1:], slots[:-1], out=ends[:-1])
    return ends
