"""Walk the shuffle window of each span, and announce or hold its storage ahead of use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from ..formats.base import Shard
from ..order.epoch import Epoch
from ..order.rng import Int64s
from ..order.subset import Selection
from . import buffering
from .buffering import BufferPlan
from .reader import Reader

RAMP = 4  # records announced for each one handed out, until the window is announced
CHUNK = 1024  # draws of a span that are made and located at once: 0.2 us each, alone 10 us

# (3, n) int64: of n rows the places in their span, in storage order; shards; and numbers of the
# records, in the dataset or selection.
Places: TypeAlias = Int64s
PLACE, SHARD, NUMBER = range(3)
NOWHERE: Places = np.empty((3, 0), np.int64)


class Span:
    """Remember where a consumer stands in one span."""

    __slots__ = (
        *("_base", "_bottom", "_chunk", "_epoch", "_held", "_index", "_order", "_rows", "_starts"),
        *("ahead", "asked", "began", "cut", "done", "records", "window"),
    )

    def __init__(self, epoch: Epoch, starts: Int64s, chunk: int, index: int, first: int) -> None:
        self._epoch, self._starts, self._chunk, self._index = epoch, starts, chunk, index
        self._order = epoch.span_order(index)
        self._base = first  # the draw of the first of _rows
        self._rows = NOWHERE  # of the draws made last
        self.records = self._order.n
        self.window = self._order.window
        # Storage before place `ahead` is held or announced. After a resume, what was left in the
        # window of earlier storage is a third of it, scattered; it is read one by one.
        self.ahead = self.began = first if first >= self.window else 0
        self.asked = self.ahead  # storage before this place is asked for, of an object store
        self.cut = 0  # no run reaches over this place: what the first draws need comes first
        self._bottom = self.ahead  # the place of _held[0]
        self._held: list[bytes | None] = []  # records by place, up to `ahead`; None: not held
        self.done = self.began  # draws handed out, by anyone

    def take(self, first: int, count: int) -> Places:
        """Return the rows of draws first .. first + count - 1. `first` never goes back."""
        self.done = first + count
        begin = first - self._base
        found = self._rows[:, begin : begin + count]
        missing = count - found.shape[1]
        if missing:
            self._make(self.done - missing, max(missing, self._chunk))
            found = np.concatenate((found, self._rows[:, :missing]), axis=1)
        return found

    def beyond(self, rows: Places) -> Places:
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
        self._base, self._rows = first, np.stack((places, shards, self._starts[shards] + records))

    def locate(self, place: int) -> tuple[int, int, int, int]:
        """Turn a place in storage order into a record's number, its shard, and its number there.

        The last is how many places from this one on follow each other in the shard.
        """
        epoch = self._epoch
        shard, record, count = epoch.stretch(epoch.span_start(self._index) + place)
        return int(self._starts[shard]) + record, shard, record, min(count, self.records - place)


class All:
    """Stand for all of storage, as one span, where the dataset is shuffled as a whole."""

    __slots__ = ("_starts", "ahead", "first", "records", "window")
    began = 0  # draws count from the first one here: a resume is ramped too
    cut = 0

    def __init__(self, starts: Int64s) -> None:
        self._starts = starts
        self.records = self.window = int(starts[-1])
        self.ahead = 0  # storage before this place is announced
        self.first = -1  # the place in the order of the first draw here

    def start(self, place: int) -> None:
        """Note the place in the order of the first draw of this consumer."""
        if self.first < 0:
            self.first = place

    def beyond(self, rows: Places) -> Places:
        """Choose the rows that are not announced yet."""
        return rows[:, rows[NUMBER] >= self.ahead]

    def locate(self, place: int) -> tuple[int, int, int, int]:
        """Turn a place into a record's number, its shard, and its number there, as Span does."""
        shard = int(self._starts.searchsorted(place, side="right")) - 1
        first, stop = int(self._starts[shard]), int(self._starts[shard + 1])
        return place, shard, place - first, stop - place


class Buffer:
    """Hold or announce storage ahead of use, as windows move on.

    plan       where bytes wait
    selection  the records that the epoch is of; None: all
    lead       records that are held or announced beyond a window
    gap        unwanted records between two that are announced with them
    between    records of a window between two of a batch that are announced with them
    """

    def __init__(
        self,
        reader: Reader,
        plan: BufferPlan,
        selection: Selection | None,
        *,
        lead: int,
        gap: int,
        between: int,
    ) -> None:
        self.held_bytes = 0  # of records that were read and not yet handed out
        # Whether shards read nothing ahead by themselves: records are read one by one, in no order,
        # or all that is read was asked for.
        self.scattered = not plan.budget or plan.asks
        self._reader, self._selection = reader, selection
        self._starts = reader.starts if selection is None else selection.starts
        self._mean = reader.mean_bytes
        self._plan, self._lead, self._gap, self._between = plan, lead, gap, between
        self._early: set[int] = set()  # handed out before their block is read: not to be held

    def skip(self, span: Span, first: int) -> None:
        """Let go of the draws of a span before draw `first`: other consumers hand them out."""
        others = span.take(span.done, first - span.done)
        self.release(span, others)
        self._early.update(span.beyond(others)[NUMBER].tolist())

    def release(self, span: Span, rows: Places) -> list[bytes | None]:
        """Give the bytes that were held for these rows. They are held no more."""
        held = span.release(rows[PLACE].tolist())
        self.held_bytes -= sum(map(len, filter(None, held)))
        return held

    def announce(self, rows: Places) -> None:
        """Announce these records, adjacent ones together. They are not held later.

        Where windows are announced, so is what lies between two of them, if it is little.
        """
        if not rows.size:
            return
        numbers = rows[NUMBER]
        if self._plan.budget:
            self._early.update(numbers.tolist())
        if self._selection is not None:
            numbers = self._selection.numbers[numbers]
        order = numbers.argsort()
        numbers, shards = numbers[order], rows[SHARD][order]
        new = np.ones(len(numbers) + 1, bool)  # whether a stretch ends before each row
        new[1:-1] = (np.diff(numbers) > 1 + self._between) | (shards[1:] != shards[:-1])
        firsts, lasts = np.flatnonzero(new[:-1]), np.flatnonzero(new[1:])
        shards = shards[firsts]
        starts = self._reader.starts[shards]
        begins, ends = numbers[firsts] - starts, numbers[lasts] - starts + 1
        for at, begin, end in zip(shards.tolist(), begins.tolist(), ends.tolist(), strict=True):
            self._reader.shard(at, self.scattered).will_need(begin, end)

    def advance(self, span: Span | All, done: int) -> None:
        """Hold or announce the storage that draws of a span need after `done` of them."""
        target = done + span.window + self._lead
        if not self._plan.in_memory and not (self._plan.first and isinstance(span, All)):
            target = min(target, span.began + RAMP * (done - span.began) + self._lead)
        target = min(target, span.records)
        while span.ahead < target:
            number, shard, chosen, ends = self._run(span, span.ahead)
            count = len(ends)
            if isinstance(span, All) or not self._plan.budget:
                for begin, end in stretches(chosen, count, self._gap):
                    if self._plan.first and self._plan.network:
                        if self._plan.ahead_bytes:
                            shard.will_need(begin, end, keep=True)
                        else:
                            shard.hold(begin, end)  # and let go: it is in the page cache then
                    else:
                        shard.will_need(begin, end)
                span.ahead += count
            elif number in self._early:
                self._early.remove(number)
                span.hold([None])
            elif self.held_bytes + int(ends[count - 1]) > self._plan.budget:
                span.hold([None] * count)
            else:
                if self._early:
                    run = range(number, number + count)
                    count = next((i for i, n in enumerate(run) if n in self._early), count)
                data = self._hold(shard, chosen, count)
                self.held_bytes += sum(map(len, filter(None, data)))
                span.hold(data)

    def ask(self, span: Span, done: int, lead: int) -> None:
        """Ask for the storage that `done` draws of a span need, and `lead` records more."""
        target = min(done + span.window + lead, span.records)
        if span.asked == span.began:
            span.cut = min(done + span.window, span.records)
        while span.asked < target:
            _, shard, chosen, ends = self._run(span, span.asked)
            for begin, end in self._stretches(chosen, len(ends)):
                shard.will_need(begin, end)
            span.asked += len(ends)
            after = span.asked + len(ends)
            if after < span.records:
                self._reader.will_open([span.locate(after)[1]])

    def _run(self, span: Span | All, place: int) -> tuple[int, Shard, slice | Int64s, Int64s]:
        """Return the next records of a span's storage: as many as are read or announced at once.

        The number of the first, their shard, which of its records they are (a slice, perhaps of
        more), and where each ends, in bytes from the first.
        """
        number, at, record, most = span.locate(place)
        shard = self._reader.shard(at, self.scattered)
        if place < span.cut:
            most = min(most, span.cut - place)
        most = min(most, 1 + int(2 * self._plan.run / self._mean))
        chosen: slice | Int64s = slice(record, record + most)
        if self._selection is not None:
            first = self._reader.starts[at]
            chosen = self._selection.numbers[number : number + most] - first
        ends = shard.sizes[chosen].cumsum()
        count = max(1, int(ends.searchsorted(self._plan.run, side="right")))
        return number, shard, chosen, ends[:count]

    def _stretches(self, chosen: slice | Int64s, count: int) -> Iterator[tuple[int, int]]:
        """Yield the first `count` of these records as (begin, end), each of which is one read."""
        gap, most = int(buffering.GAP / self._mean), max(1, int(self._plan.run / self._mean))
        return stretches(chosen, count, gap, most)

    def _hold(self, shard: Shard, chosen: slice | Int64s, count: int) -> Sequence[bytes | None]:
        """Read the bytes of the first `count` of these records of a shard."""
        if isinstance(chosen, slice):
            return shard.hold(chosen.start, chosen.start + count)
        data: list[bytes | None] = []
        records = chosen[:count].tolist()
        for begin, end in self._stretches(chosen, count):
            read = shard.hold(begin, end)
            while len(data) < count and records[len(data)] < end:
                data.append(read[records[len(data)] - begin])
        return data


def stretches(
    records: slice | Int64s, count: int, gap: int, most: int = 1 << 62
) -> Iterator[tuple[int, int]]:
    """Yield the first `count` of these ascending records as (begin, end), over gaps of records.

    most: records that such a stretch spans, about; gaps would make it many times the run.
    """
    if isinstance(records, slice):
        yield records.start, records.start + count
        return
    some = records[:count]
    cuts = np.flatnonzero((np.diff(some) > gap + 1) | np.diff(some // most).astype(bool)) + 1
    for first, last in pairwise([0, *cuts.tolist(), count]):
        yield int(records[first]), int(records[last - 1]) + 1
