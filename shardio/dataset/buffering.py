"""Hold or announce the bytes of a consumer's shuffle windows, as is cheapest.

The shuffle buffer is an order, and holds no bytes by itself. Where the bytes wait depends on what
is cheapest:

    page_cache  the default. The page cache is the buffer: as the window of a span moves on, its
                storage is announced in runs of adjacent records, 1 MiB each, and each record is
                read when it is handed out. Costs the process next to nothing, and all workers of
                a machine share the pages.
    in_memory   small records, in windows that fit HELD_BYTES: each span is read in blocks, and the
                raw bytes of each record wait in this process. 0.9 KB: 0.7 us a record less.
    remote      of an object store no page is cached: each span is asked for ahead, in ranges of
                8 MiB and in the order of use, and all of its window waits in this process. Where
                spans are shared, or all is shuffled, a consumer asks for its own records only;
                but a small dataset that is shuffled as a whole is kept in this process.
    network     announcements to a network file system are not to be trusted: records wait in this
                process, up to `buffer_bytes` on this machine; where that is full, blocks are left
                out and their records are read one by one when handed out, so nothing is read twice.

If a span announced its whole window at its start (1 GB in all for 10,000 photographs), the first
batch would wait behind it. So the first batches announce their own records, one batch ahead, with
what lies between these, up to a run. The window grows by RAMP records for each one handed out.
A dataset of small records that is shuffled as a whole is one window, announced so from its
first byte to its last. One of at most ALL_BYTES is announced before the first batch, or read, if it
is on a network file system: sequential reads, on any storage, for which nobody waits long.

Storage order does not help where larger records are shuffled as a whole, where a span is shared
with other machines, and where memory is too short to keep the windows until they are used. There
only the records of the next batches are announced; the order is arithmetic, so they are known.

Each of these is a `Policy`, chosen by `choose_policy`. It needs no storage to say what it costs;
`open` gives it some, and Fetch then asks it to draw, release and advance, batch by batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .. import native
from ..formats.base import Shard
from ..formats.manifest import Manifest
from ..order.epoch import Epoch
from ..order.options import ALL_BYTES
from ..order.partition import Partition, RowRanges
from ..order.rng import Int64s
from ..order.subset import Selection
from ..storage.local import memory_available
from ..storage.ranges import IN_FLIGHT, LEAST_IN_FLIGHT
from ..storage.remote_file import RANGE
from .reader import Reader
from .window import (
    NO_ROWS,
    NUMBER,
    PLACE,
    RAMP,
    SHARD,
    DrawnPieces,
    DrawnRows,
    Pieces,
    Span,
    contiguous_runs,
    unannounced_rows,
)

HELD_BYTES = 24 << 20  # held windows and read-ahead of a process that reads local storage
SMALL = 8 << 10  # mean record below which holding beats reading: 0.7 us at 0.9 KB, 0 at 8 KB
RUN = 1 << 20  # bytes of storage that are read or announced at a time
# Of a block of small local records, which takes memory in each process for each span that it reads.
# CIFAR, 64 spans: the same speed as 1 MiB, warm and cold, and 20 MB less in each of two processes.
HELD_RUN = 128 << 10
# Unwanted bytes between records of a selection that are read rather than sought over. Of 0.9 KB
# records, warm, each 30th: 8.3 us a record, and 20 us with 64 KiB.
GAP = 16 << 10
LEAST_BLOCK = 64 << 10  # with less room than this per span, held blocks are not worth it
BUFFER_BYTES = 256 << 20  # a machine's held windows on network file systems
# Share of the available memory that announced windows may take; with more, the kernel drops pages
# before their use. 2 GiB of photographs, 1 GiB of memory, a window of 1 GiB: 1.9 times the payload
# is read; 1.2 when only a quarter of the blocks is announced, 1.03 when just the next batches are.
CACHED_PART = 0.25
ROWS_AHEAD = 256  # records announced ahead of use where storage order does not help, at least
# Of records of a dataset that is shuffled as a whole, mean bytes x consumers on a machine, each of
# which announces all: at 9 us for 128 KiB in the cache as dear as 4.5 us for each one's own. So is
# each call where records do not lie side by side (`calls_per_record`): 12 consumers, 4 KB files of
# a folder: 173 us of processors a record, 35 when each announces its own; one record in ten: 35
# and 9.
WHOLE_BYTES = 64 << 10
# Calls of a consumer that announce a small dataset before the first batch: 0.1 s where all is
# cached.
ANNOUNCE_CALLS = 1 << 14
# Rows of an object store that are drawn ahead of use, at most: what they need is asked for in
# the order of use. Of small records more is asked for, span by span.
MAX_ROWS_DRAWN = 4096
# Rows that are looked up at once without a batch_size, at first and at most: 3 us each of 1 alone.
STEPS = (64, 256)
REQUEST = 128 << 10  # bytes: read-ahead of Linux, if nobody has set it
# Memory that malloc takes for photographs that come and go, of their bytes: in two processes 1.2,
# in one 1.4.
HEAP_FACTOR = 1.3


@dataclass(eq=False)
class Policy:
    """Announce storage ahead of use, and say what that costs; the subclasses are ways to do so.

    partition        of one consumer
    mean_bytes       of a record in storage
    local_consumers  on this machine, this one included
    run              bytes of storage that are read or announced at a time
    """

    partition: Partition | RowRanges
    mean_bytes: float
    local_consumers: int
    run: int

    name = "page_cache"  # for programs: see Explanation.policy
    waits = ""  # where bytes wait, in words
    reads_all = "random reads, for local flash or memory"  # a dataset that is shuffled as a whole
    # Shards read nothing ahead by themselves: records come in no order, or all was asked for.
    scattered = True
    budget = 0  # bytes that may be held in the process; 0: none are
    held_bytes = 0  # of records that were read and are not yet handed out
    # By arithmetic: records that wait in the process, or come to it, at worst; and what is
    # announced, and not yet read, in the page cache of this machine.
    records_bytes = 0
    cached_bytes = 0

    def __post_init__(self) -> None:
        """Do the arithmetic."""
        epoch, mean = self.partition.epoch, self.mean_bytes
        self.dataset_bytes = epoch.records * mean
        self.window_bytes = epoch.window * mean  # of a span
        # That a reader of an object store asks for ahead of use.
        self.in_flight = max(LEAST_IN_FLIGHT, IN_FLIGHT // self.local_consumers)
        self.lookahead = max(epoch.unit, math.ceil(self.run / mean))  # records beyond a window
        self.rows_ahead = self.partition.batch_size or 1  # drawn before the first is handed out

    def first_batch_bytes(self) -> int:
        """Estimate the bytes that are read before the first batch: it alone, if windows grow."""
        batch = min(self.partition.epoch.records, self.partition.batch_size or 1)
        return math.ceil(batch * self.mean_bytes)

    def cold_requests(self) -> tuple[int, int]:
        """Estimate the requests of a cold epoch to storage, and their bytes, of all consumers."""
        return self._requests(0.0, self.dataset_bytes)

    def _requests(self, one_by_one: float, in_runs: float, times: int = 1) -> tuple[int, int]:
        """Count requests, and bytes, of so many records by themselves and bytes in runs."""
        requests = one_by_one * math.ceil(self.mean_bytes / REQUEST) + in_runs / REQUEST * times
        return math.ceil(requests), math.ceil(self.dataset_bytes * times)

    def store_traffic(self, consumers: int, part: float) -> tuple[float, float]:
        """Estimate what a machine's consumers ask an object store for in an epoch.

        part: of all records that this machine hands out. Returns bytes and requests.
        """
        return self.dataset_bytes * part, self.partition.epoch.records * part

    def open(self, reader: Reader, selection: Selection | None) -> None:
        """Get ready to read. selection: the records that the epoch is of; None: all."""
        self._reader, self._selection = reader, selection
        self._starts = reader.starts if selection is None else selection.starts

    def skip(self, span: Span, first: int) -> None:
        """Let go of the draws of a span before draw `first`: other consumers hand them out."""

    def draw(self, pieces: Pieces, drawn: DrawnPieces, rows: DrawnRows) -> None:
        """Announce what a batch needs, some batches ahead, and nothing else has announced."""

    def release(self, drawn: DrawnPieces) -> list[bytes | None] | None:
        """Return what is held of a batch, which is held no more. None: nothing ever is."""
        return None

    def advance(self, drawn: DrawnPieces) -> None:
        """Hold or announce what comes after a batch that was handed out."""

    def announce(self, rows: DrawnRows, between: int = 0) -> None:
        """Announce these records, adjacent ones together.

        between: other records between two of them that are announced, too.
        """
        if not rows.size:
            return
        numbers = rows[NUMBER]
        order = numbers.argsort()
        numbers, shards = numbers[order], rows[SHARD][order]
        new = np.ones(len(numbers) + 1, bool)  # whether a stretch ends before each row
        new[1:-1] = (np.diff(numbers) > 1 + between) | (shards[1:] != shards[:-1])
        firsts, lasts = np.flatnonzero(new[:-1]), np.flatnonzero(new[1:])
        shards = shards[firsts]
        starts = self._reader.starts[shards]
        begins, ends = numbers[firsts] - starts, numbers[lasts] - starts + 1
        for at, begin, end in zip(shards.tolist(), begins.tolist(), ends.tolist(), strict=True):
            self._reader.shard(at, self.scattered).will_need(begin, end)

    def _run(self, at: int, record: int, most: int) -> tuple[Shard, slice | Int64s, Int64s]:
        """Return the next records of storage: as many as are read or announced at once.

        at, record, most: as `Span.locate` gives them. Returns the shard, which of its
        records they are (a slice, perhaps of more), and where each ends, in bytes from the first.
        """
        shard = self._reader.shard(at, self.scattered)
        most = min(most, 1 + int(2 * self.run / self.mean_bytes))
        chosen: slice | Int64s = slice(record, record + most)
        if self._selection is None:
            sizes = shard.sizes[chosen]
        else:
            place = int(self._starts[at]) + record
            some = self._selection.at(slice(place, place + most)) - self._reader.starts[at]
            first, last = int(some[0]), int(some[-1])
            near = last - first < 4 * len(some)  # a slice of sizes comes 10 times as fast
            sizes = shard.sizes[first : last + 1][some - first] if near else shard.sizes[some]
            chosen = some
        ends = sizes.cumsum()
        count = max(1, int(ends.searchsorted(self.run, side="right")))
        return shard, chosen, ends[:count]


# --- the page cache is the buffer -----------------------------------------------------------------


class NextBatches(Policy):
    """Announce the records of the next batches, one by one, where storage order does not help."""

    waits = "in storage; only those of the next batches are announced to the page cache"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rows_ahead = max(ROWS_AHEAD, self.rows_ahead)
        batch = self.partition.batch_size or STEPS[1]
        rows = self.local_consumers * (max(ROWS_AHEAD, batch) + batch)
        self.cached_bytes = math.ceil(rows * self.mean_bytes)

    def cold_requests(self) -> tuple[int, int]:
        return self._requests(self.partition.epoch.records, 0.0)

    def draw(self, pieces: Pieces, drawn: DrawnPieces, rows: DrawnRows) -> None:
        self.announce(rows)


class NextRequests(NextBatches):
    """Ask an object store for the records of the next batches, one by one."""

    waits = "in each process; those of the next batches are asked for ahead"

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = math.ceil(self.in_flight / self.mean_bytes)
        self.rows_ahead = max(self.rows_ahead, min(rows, MAX_ROWS_DRAWN))
        self.records_bytes, self.cached_bytes = self.in_flight, 0


class Windows(Policy):
    """Announce the windows of all spans as they move on, in runs of adjacent records."""

    waits = "in the page cache, announced as the windows move on"
    _gap = 0  # unwanted records between two that are announced with them

    def __post_init__(self) -> None:
        super().__post_init__()
        spans = min(self.partition.spans_read * self.local_consumers, self.partition.epoch.spans)
        self.cached_bytes = math.ceil(spans * (self.window_bytes + self.run))

    def open(self, reader: Reader, selection: Selection | None) -> None:
        super().open(reader, selection)
        # What lies between records of the first batches, up to a run, is wanted soon. Without it
        # each of them is a request, and cuts a run of the window in two. Photographs of 110 KB,
        # half of 5,000 in the buffer: 1,941 requests an epoch, and 738 so.
        self._between = int(self.run / self.mean_bytes) if selection is None else 0

    def draw(self, pieces: Pieces, drawn: DrawnPieces, rows: DrawnRows) -> None:
        self.announce(_joined(unannounced_rows(drawn)), self._between)

    def advance(self, drawn: DrawnPieces) -> None:
        for span, done, _ in drawn:
            self._announce_to(span, span.ramp_target(done, self.lookahead))

    def _announce_to(self, span: Span | Whole, target: int) -> None:
        """Announce the storage of a span up to a place."""
        while span.ahead < target:
            shard, chosen, ends = self._run(*span.locate(span.ahead))
            for begin, end in contiguous_runs(chosen, len(ends), self._gap):
                self._expect(shard, begin, end)
            span.ahead += len(ends)

    def _expect(self, shard: Shard, begin: int, end: int) -> None:
        """Announce adjacent records of a shard."""
        shard.will_need(begin, end)


class Whole(Windows):
    """Announce all of storage, as if it were the one window of a span, as batches go by."""

    waits = "in the page cache, all announced in the first quarter of the epoch"
    reads_all = "read ahead in storage order, since memory holds them"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cached_bytes = math.ceil(self.dataset_bytes)

    def cold_requests(self) -> tuple[int, int]:
        # An eighth is of the first batches, which are ahead of the announcements.
        return self._requests(self.partition.epoch.records / 8, self.dataset_bytes)

    def open(self, reader: Reader, selection: Selection | None) -> None:
        super().open(reader, selection)
        if selection is not None:
            self._gap = gap_between(selection, self.mean_bytes)
        self.ahead = 0  # storage before this place is announced
        self.records = int(self._starts[-1])
        self._first = -1  # the place in the order of the first draw here: a resume is ramped, too
        self._ends = deque[int]()  # of batches drawn, where they end, counted from there

    def draw(self, pieces: Pieces, drawn: DrawnPieces, rows: DrawnRows) -> None:
        if not drawn:
            self._ends.append(0)
            return
        places = self.partition.epoch.places(pieces)
        if self._first < 0:
            self._first = places.start
        self._ends.append(places.stop - self._first)
        if self.ahead < self.records:
            self.announce(rows[:, rows[NUMBER] >= self._ahead_number()])

    def advance(self, drawn: DrawnPieces) -> None:
        self._announce_to(self, min(RAMP * self._ends.popleft() + self.lookahead, self.records))

    def _ahead_number(self) -> int:
        """Return the number of the first record that is not announced."""
        if self._selection is None:
            return self.ahead
        return int(self._selection.at(np.array([self.ahead]))[0])

    def locate(self, place: int) -> tuple[int, int, int]:
        """Turn a place into a shard, and the place in the epoch's part of it, as Span does."""
        shard = int(self._starts.searchsorted(place, side="right")) - 1
        first, stop = int(self._starts[shard]), int(self._starts[shard + 1])
        return shard, place - first, stop - place


class WholeFirst(Whole):
    """Announce all of a small dataset before the first batch."""

    waits = "in the page cache, all announced before the first batch"
    reads_all = "all are read ahead, in storage order"

    def first_batch_bytes(self) -> int:
        return math.ceil(self.dataset_bytes)

    def cold_requests(self) -> tuple[int, int]:
        return self._requests(0.0, self.dataset_bytes)

    def draw(self, pieces: Pieces, drawn: DrawnPieces, rows: DrawnRows) -> None:
        if drawn:
            self._announce_to(self, self.records)

    def advance(self, drawn: DrawnPieces) -> None:
        """All is announced."""


class WholeRead(WholeFirst):
    """Read all of a small dataset on a network file system before the first batch."""

    waits = "in the page cache, all read before the first batch"

    def _expect(self, shard: Shard, begin: int, end: int) -> None:
        shard.hold(begin, end)  # and let go: it is in the page cache then


class WholeRequested(WholeFirst):
    """Ask an object store for all of a small dataset before the first batch, and keep it."""

    waits = "in each process; all are asked for ahead"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.records_bytes, self.cached_bytes = self.cached_bytes, 0

    def store_traffic(self, consumers: int, part: float) -> tuple[float, float]:
        shards = int((self.partition.epoch.shard_records > 0).sum())
        size = self.dataset_bytes
        return size * consumers, consumers * (shards + size / RANGE)

    def _expect(self, shard: Shard, begin: int, end: int) -> None:
        shard.will_need(begin, end, keep=True)


# --- the process is the buffer --------------------------------------------------------------------


@dataclass(eq=False)
class Held(Policy):
    """Read storage in blocks, and hold the records in this process until they are handed out.

    budget  bytes that may be held in the process
    """

    budget: int

    scattered = False

    def __post_init__(self) -> None:
        super().__post_init__()
        # Of all windows, were there no budget.
        self.windows_bytes = math.ceil(
            self.partition.spans_read * (self.window_bytes + self._beyond_bytes())
        )
        self.records_bytes = min(self.windows_bytes, self.budget)

    def _beyond_bytes(self) -> float:
        """Return what is held of a span beyond its window: the block that reaches over its end."""
        return max(self.run, self.mean_bytes)

    def skip(self, span: Span, first: int) -> None:
        others = span.take(span.done, first - span.done)
        self._pop(span, others)
        span.early.update(span.unannounced(others)[PLACE].tolist())

    def release(self, drawn: DrawnPieces) -> list[bytes | None]:
        return [data for span, _, rows in drawn for data in self._pop(span, rows)]

    def _pop(self, span: Span, rows: DrawnRows) -> list[bytes | None]:
        """Return the bytes that were held for these rows. They are held no more."""
        held = span.release(rows[PLACE].tolist())
        self.held_bytes -= sum(map(len, filter(None, held)))
        return held

    def _hold_to(self, span: Span, target: int) -> None:
        """Read the storage of a span up to a place, and hold it as far as the budget goes."""
        while span.ahead < target:
            shard, chosen, ends = self._run(*span.locate(span.ahead))
            count, place, early = len(ends), span.ahead, span.early
            if place in early:
                early.remove(place)
                span.hold([None])
            elif self.held_bytes + int(ends[-1]) > self.budget:
                span.hold([None] * count)
            else:
                if early:
                    count = next((i for i in range(count) if place + i in early), count)
                data = self._read(shard, chosen, count)
                self.held_bytes += sum(map(len, filter(None, data)))
                span.hold(data)

    def _read(self, shard: Shard, chosen: slice | Int64s, count: int) -> Sequence[bytes | None]:
        """Read the bytes of the first `count` of these records of a shard."""
        if isinstance(chosen, slice):
            return shard.hold(chosen.start, chosen.start + count)
        data: list[bytes | None] = []
        records = chosen[:count].tolist()
        for begin, end in self._contiguous_runs(chosen, count):
            read = shard.hold(begin, end)
            while len(data) < count and records[len(data)] < end:
                data.append(read[records[len(data)] - begin])
        return data

    def _contiguous_runs(self, chosen: slice | Int64s, count: int) -> Iterator[tuple[int, int]]:
        """Yield the first `count` of these records as (begin, end), each of which is one read."""
        gap, most = int(GAP / self.mean_bytes), max(1, int(self.run / self.mean_bytes))
        return contiguous_runs(chosen, count, gap, most)


class Blocks(Held):
    """Read blocks of small local records when a window reaches them."""

    name = "in_memory"
    waits = "in each process, read in blocks"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lookahead = self.rows_ahead = 0

    def first_batch_bytes(self) -> int:
        # The windows of all spans that the batch takes from.
        epoch = self.partition.epoch
        block = min(self.window_bytes + self.run, epoch.span_records(0) * self.mean_bytes)
        spans = min(
            epoch.spans, max(1, epoch.units), (self.partition.batch_size or 1) // epoch.unit
        )
        return math.ceil(spans * block)

    def release(self, drawn: DrawnPieces) -> list[bytes | None]:
        for span, done, _ in drawn:
            self._hold_to(span, min(done + span.window, span.records))
        return super().release(drawn)


class NetworkBlocks(Held):
    """Read blocks on a network file system, early enough that no batch waits for one."""

    name = "network"
    waits = "in each process, up to its part of buffer_bytes; others are read one by one"

    def _beyond_bytes(self) -> float:
        early = max(self.run, self.partition.epoch.unit * self.mean_bytes)
        return super()._beyond_bytes() + early

    def cold_requests(self) -> tuple[int, int]:
        one_by_one = self.partition.epoch.records * max(0.0, 1 - self.budget / self.windows_bytes)
        in_runs = self.dataset_bytes - one_by_one * self.mean_bytes
        return self._requests(one_by_one, in_runs, self.partition.sharers)

    def draw(self, pieces: Pieces, drawn: DrawnPieces, rows: DrawnRows) -> None:
        found = unannounced_rows(drawn)
        for span, early in found:
            span.early.update(early[PLACE].tolist())
        self.announce(_joined(found))

    def advance(self, drawn: DrawnPieces) -> None:
        for span, done, _ in drawn:
            self._hold_to(span, span.ramp_target(done, self.lookahead))


class Ranges(Blocks):
    """Ask an object store for each span ahead, in large ranges, and hold all of its window."""

    name = "remote"
    waits = "in each process, asked for ahead in ranges of 8 MiB"
    scattered = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.records_bytes = round(HEAP_FACTOR * self.windows_bytes) + self.in_flight
        rows = math.ceil(self.in_flight / self.mean_bytes)
        self.rows_ahead = min(rows, MAX_ROWS_DRAWN)
        # Records of each span that are asked for beyond those of batches drawn.
        self._request_lookahead = (rows - self.rows_ahead) // self.partition.spans_read

    def _beyond_bytes(self) -> float:
        return RANGE / 2

    def store_traffic(self, consumers: int, part: float) -> tuple[float, float]:
        epoch = self.partition.epoch
        touched = min(1.0, self.partition.spans_read * consumers / epoch.spans)
        requests = touched * requests_of_spans(epoch, epoch.spans, self.mean_bytes)
        return self.dataset_bytes * part, requests

    def draw(self, pieces: Pieces, drawn: DrawnPieces, rows: DrawnRows) -> None:
        for span, done, _ in drawn:
            self._request(span, done)
        if early := [
            own[:, own[PLACE] < span.start_place] for span, _, own in drawn if span.start_place
        ]:
            self.announce(np.concatenate(early, axis=1))  # left in windows of before a resume

    def _request(self, span: Span, done: int) -> None:
        """Ask for the storage that `done` draws of a span need, and some more."""
        target = min(done + span.window + self._request_lookahead, span.records)
        if span.requested_to == span.start_place:
            span.first_window_end = min(done + span.window, span.records)
        while span.requested_to < target:
            shard, chosen, ends = self._run(*span.locate(span.requested_to))
            for begin, end in self._contiguous_runs(chosen, len(ends)):
                shard.will_need(begin, end)
            span.requested_to += len(ends)
            after = span.requested_to + len(ends)
            if after < span.records:
                self._reader.will_open([span.locate(after)[0]])


def _joined(found: list[tuple[Span, DrawnRows]]) -> DrawnRows:
    return np.concatenate([NO_ROWS, *(rows for _, rows in found)], axis=1)


# --- which one ------------------------------------------------------------------------------------


def choose_policy(
    partition: Partition | RowRanges,
    mean_bytes: float,
    *,
    network: bool,
    remote: bool = False,
    buffer_bytes: int = BUFFER_BYTES,
    local_consumers: int = 1,
    machines: int = 1,
    available_bytes: int | None = None,
    batched_reads: bool = False,
    calls_per_record: Callable[[], float] = lambda: 0.0,
) -> Policy:
    """Decide where a consumer's bytes wait, by arithmetic. Nothing is read. Options as of Fetch.

    mean_bytes        of a record in storage
    network           whether the storage is a network file system
    remote            whether it is an object store
    available_bytes   memory of this machine for processes and page cache; default: what it has
    batched_reads     the core reads many records at a time, so that holding them gains nothing
    calls_per_record  asked where all is shuffled: the calls that announce all records, for each
    """
    epoch, touched, shared = partition.epoch, partition.spans_read, partition.sharers > 1
    here = partition, mean_bytes, local_consumers
    if remote:
        if not shared and not epoch.shuffles_all:
            return Ranges(*here, RANGE, budget=1 << 62)
        small = epoch.shuffles_all and math.ceil(epoch.records * mean_bytes) <= ALL_BYTES
        return (WholeRequested if small else NextRequests)(*here, RANGE)
    if not epoch.shuffles_all and partition.sharers <= 2:
        room = (HELD_BYTES - touched * epoch.window * mean_bytes) / touched
        if network:
            budget = max(1, buffer_bytes // local_consumers)
            run = max(1, min(RUN, budget // (2 * touched)))
            return NetworkBlocks(*here, run, budget)
        if mean_bytes < SMALL and room >= LEAST_BLOCK and not batched_reads:
            return Blocks(*here, int(min(RUN, HELD_RUN, room)), HELD_BYTES)
    policy: Policy = Windows(*here, RUN)
    one_by_one = shared and (network or machines > 1)  # storage order does not help
    if epoch.shuffles_all:
        policy = Whole(*here, RUN)
        each = calls_per_record()
        one_by_one = (
            network or machines > 1 or local_consumers * (mean_bytes / WHOLE_BYTES + each) > 1
        )
        if policy.cached_bytes <= ALL_BYTES and epoch.records * each <= ANNOUNCE_CALLS:
            policy = (WholeRead if network else WholeFirst)(*here, RUN)
            one_by_one = False
    if not one_by_one:
        available = memory_available() if available_bytes is None else available_bytes
        one_by_one = policy.cached_bytes > CACHED_PART * available
    return NextBatches(*here, RUN) if one_by_one else policy


def requests_of_spans(epoch: Epoch, spans: int, mean_bytes: float) -> int:
    """Estimate the requests to an object store for an epoch of so many spans that nobody shares."""
    size, shards = epoch.records * mean_bytes, int((epoch.shard_records > 0).sum())
    return spans * (math.ceil(size / spans / RANGE) + 1) + shards


def reads_batches_in_core(manifest: Manifest) -> bool:
    """Say whether the core reads batches of raw pixels, as far as the manifest tells.

    A transform that takes records one by one is not considered: 0.4 us of each do not matter.
    """
    raw = manifest.format == "record" and manifest.options.get("encode") == "raw"
    return raw and native.records() is not None


def calls_per_record(manifest: Manifest, selection: Selection | None) -> float:
    """Count the calls that announce all these records in storage order, for each: 0 to 1."""
    if manifest.format == "imagefolder":  # each is a file
        return 1.0
    if selection is None:
        return 0.0
    wide = selection.gaps() > gap_between(selection, manifest.mean_bytes)
    return float(wide.sum() + 1) / max(1, len(selection))


def gap_between(selection: Selection, mean_bytes: float) -> int:
    """Choose how many unwanted records between two are announced with them.

    In all no more of them are announced than wanted ones.
    """
    between, gap = selection.gaps(), int(GAP / mean_bytes)
    return gap if between[between <= gap].sum() <= len(selection) else 0
