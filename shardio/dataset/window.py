"""Know where a consumer stands in each span: its draws, and the storage ahead of its window."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from ..order.epoch import Epoch
from ..order.rng import Int64s

RAMP = 4  # records announced for each one handed out, until the window is announced
CHUNK = 1024  # draws of a span that are made and located at once: 0.2 us each, alone 10 us

# (3, n) int64: of n rows the places in their span, in storage order; shards; and numbers of the
# records in the dataset.
DrawnRows: TypeAlias = Int64s
PLACE, SHARD, NUMBER = range(3)
NO_ROWS: DrawnRows = np.empty((3, 0), np.int64)


class Span:
    """Remember where a consumer stands in one span."""

    __slots__ = (
        *("_base", "_bottom", "_chunk", "_epoch", "_held", "_index", "_numbers", "_order", "_rows"),
        *("ahead", "done", "early", "first_window_end", "records", "requested_to", "start_place"),
        "window",
    )

    def __init__(
        self,
        epoch: Epoch,
        numbers: Callable[[Int64s, Int64s], Int64s],
        chunk: int,
        index: int,
        first: int,
    ) -> None:
        """numbers: of records, by their shards and their places in the epoch's part of these."""
        self._epoch, self._numbers, self._chunk, self._index = epoch, numbers, chunk, index
        self._order = epoch.span_order(index)
        self._base = first  # the draw of the first of _rows
        self._rows = NO_ROWS  # of the draws made last
        self.records = self._order.n
        self.window = self._order.window
        # Storage before place `ahead` is held or announced. After a resume, a third of the window
        # is records of earlier storage. They lie scattered, and are read one by one.
        self.ahead = self.start_place = first if first >= self.window else 0
        self.requested_to = self.ahead  # storage before this place is asked for, of an object store
        # No run reaches over this place, so that what the first draws need comes first.
        self.first_window_end = 0
        self._bottom = self.ahead  # the place of _held[0]
        self._held: list[bytes | None] = []  # records by place, up to `ahead`; None: not held
        self.early: set[int] = set()  # places of records handed out before they could be held
        self.done = self.start_place  # draws handed out, by anyone

    def take(self, first: int, count: int) -> DrawnRows:
        """Return the rows of draws first .. first + count - 1. `first` never goes back."""
        self.done = first + count
        begin = first - self._base
        found = self._rows[:, begin : begin + count]
        missing = count - found.shape[1]
        if missing:
            self._make(self.done - missing, max(missing, self._chunk))
            found = np.concatenate((found, self._rows[:, :missing]), axis=1)
        return found

    def unannounced(self, rows: DrawnRows) -> DrawnRows:
        """Choose the rows that are neither held nor announced yet."""
        return rows[:, rows[PLACE] >= self.ahead]

    def hold(self, data: Sequence[bytes | None]) -> None:
        """Keep the records from `ahead` on."""
        held = self._held
        if len(held) > 4 * (self.window + len(data)):  # most of them were handed out long ago
            bottom = next((i for i, kept in enumerate(held) if kept is not None), len(held))
            del held[:bottom]
            self._bottom += bottom
        held += data
        self.ahead += len(data)

    def release(self, places: list[int]) -> list[bytes | None]:
        """Return the bytes held of the records at these places, which are then held no more."""
        held, bottom = self._held, self._bottom
        if min(places) < bottom or max(places) - bottom >= len(held):
            return [self._pop(place - bottom) for place in places]  # left from before, or early
        found = [held[place - bottom] for place in places]
        for place in places:
            held[place - bottom] = None
        return found

    def _pop(self, place: int) -> bytes | None:
        if not 0 <= place < len(self._held):
            return None
        found, self._held[place] = self._held[place], None
        return found

    def _make(self, first: int, count: int) -> None:
        """Make and locate the next draws."""
        self._order.seek(first)
        places = self._order.take(min(count, self.records - first))
        shards, records = self._epoch.locate(self._epoch.position(self._index, places))
        self._base, self._rows = first, np.stack((places, shards, self._numbers(shards, records)))

    def locate(self, place: int) -> tuple[int, int, int]:
        """Turn a place in storage order into a shard, and the place in the epoch's part of it.

        The last is how many places from this one on follow each other in the shard.
        """
        epoch = self._epoch
        shard, record, count = epoch.contiguous_run(epoch.span_start(self._index) + place)
        stop = self.first_window_end if place < self.first_window_end else self.records
        return shard, record, min(count, stop - place)

    def ramp_target(self, done: int, lookahead: int) -> int:
        """Return up to where storage is held or announced after so many draws: it grows by RAMP.

        lookahead: records beyond the window.
        """
        grown = self.start_place + RAMP * (done - self.start_place)
        return min(min(done + self.window, grown) + lookahead, self.records)


# Of the pieces of a batch: the span, how many of its draws are done with the piece, and its rows.
DrawnPieces: TypeAlias = list[tuple[Span, int, DrawnRows]]
Pieces: TypeAlias = Sequence[tuple[int, int, int]]  # (span, first draw, count), as Batch has them


def unannounced_rows(drawn: DrawnPieces) -> list[tuple[Span, DrawnRows]]:
    """Return the rows that are not held or announced yet, of spans whose windows still grow."""
    return [
        (span, span.unannounced(rows))
        for span, done, rows in drawn
        if span.ahead < min(done + span.window, span.records)
    ]


def contiguous_runs(
    records: slice | Int64s, count: int, gap: int, most: int = 1 << 62
) -> Iterator[tuple[int, int]]:
    """Yield the first `count` of these ascending records as (begin, end), over gaps of records.

    most: records that such a stretch spans, about; gaps would make it many times the run.
    """
    if isinstance(records, slice):
        yield records.start, records.start + count
        return
    begin, end = int(records[0]), int(records[count - 1])
    if end - begin < count + gap and begin // most == end // most:  # in all no more than one gap
        yield begin, end + 1
        return
    some = records[:count]
    cuts = np.flatnonzero((np.diff(some) > gap + 1) | np.diff(some // most).astype(bool)) + 1
    for first, last in pairwise([0, *cuts.tolist(), count]):
        yield int(records[first]), int(records[last - 1]) + 1
