"""Hand out the records of one consumer, shuffled, while storage is read in storage order.

How it works. `Fetch` walks the batches of one consumer (a Partition) and hands out their records.
Where their bytes wait until then is decided in `buffering`; `window` knows the draws of each span,
and `reader` opens the shards.

Every record is checked when it is handed out, wherever it waited.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise, repeat, starmap
from typing import Any, NamedTuple

import numpy as np

from ..errors import printable
from ..formats.base import Shard
from ..order import rng
from ..order.options import ALL_RECORDS, order_text
from ..order.partition import Partition, RowRanges, unshared_spans
from ..order.rng import Int64s, UInt64s
from ..order.subset import Selection
from ..stack import users_level
from . import buffering, window
from .buffering import (
    BUFFER_BYTES,
    calls_per_record,
    gap_between,
    plan_buffering,
    requests_of_spans,
)
from .reader import Part, Reader, Row
from .window import NOWHERE, NUMBER, PLACE, All, Buffer, Places, Span


class Rows(NamedTuple):
    """Tell the rows of one batch, in order. Without a batch_size: of many steps, one row each."""

    shards: Int64s  # (size,) of each row its shard
    numbers: Int64s  # (size,) and its record, by number in the dataset
    held: list[bytes | None] | None  # the bytes of the records, where they were held
    valid: int  # rows before this one are the epoch's own; those from it on are a tail's repeats

    @property
    def size(self) -> int:
        """Return the number of rows, a tail's repeats included."""
        return len(self.numbers)


class Fetch:
    """Iterate over the batches of one consumer's share of an epoch, as `Rows`, in order.

    `read` reads each row of `rows(batch)`.

    buffer_bytes     memory for held records on network file systems, of all consumers of a machine
    selection        the records that the epoch is of; None: all
    local_consumers  consumers on this machine, this one included
    machines         machines that read this epoch
    batched_reads    records are read by `parts`, many at a time, by the core
    """

    def __init__(
        self,
        reader: Reader,
        share: Partition | RowRanges,
        *,
        selection: Selection | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        local_consumers: int = 1,
        machines: int = 1,
        batched_reads: bool = False,
    ) -> None:
        self.reader = reader
        self.share = share
        self._selection = selection
        # Of each shard, the number of its first record; with a selection, its place in that. All
        # below counts so, until records are read or announced.
        self._starts = reader.starts if selection is None else selection.starts
        self._spans: dict[int, Span] = {}
        self.kept: dict[int, Any] = {}  # by shard, what is found once for all batches of this pass
        epoch = share.epoch
        mean = reader.mean_bytes
        network = reader.storage.is_network()  # of a store that has a cache it is False
        remote = reader.storage.remote and network
        self.plan = plan = plan_buffering(
            share,
            mean,
            network=network,
            remote=remote,
            buffer_bytes=buffer_bytes,
            local_consumers=local_consumers,
            machines=machines,
            batched_reads=batched_reads,
            calls_per_record=partial(calls_per_record, reader.manifest, selection),
        )
        if plan.exact and remote and not epoch.shuffles_all:
            _warn_of_requests(share, mean, reader.storage.url)
        self._lead = 0 if plan.in_memory else max(epoch.unit, math.ceil(plan.run / mean))
        self._ahead = 0 if plan.in_memory else share.batch_size or 1
        if plan.exact:
            self._ahead = max(buffering.AHEAD, self._ahead)
        self._ask_lead = 0  # records of a span that are asked for beyond those of batches drawn
        reader.storage.share(local_consumers)
        if plan.ahead_bytes and not plan.first:
            rows = math.ceil(plan.ahead_bytes / mean)
            self._ahead = max(self._ahead, min(rows, buffering.DRAWN))
            self._ask_lead = max(0, rows - self._ahead) // share.touched
        # Making all draws of a shared span costs 0.2 us each; making only one's own, 10 us a piece.
        chunk = window.CHUNK if plan.budget or share.sharers * epoch.unit <= 50 else 0
        self._new_span = partial(Span, epoch, self._starts, chunk)
        self._all = None if plan.exact or not epoch.shuffles_all else All(self._starts)
        gap = 0
        if self._all is not None and selection is not None:
            gap = gap_between(selection.numbers, mean)
        # What lies between records of the first batches, up to a run, is wanted soon. Without it
        # each of them is a request, and cuts a run of the window in two. Photographs of 110 KB,
        # half of 5,000 in the buffer: 1,941 requests an epoch, and 738 so.
        between = 0
        if not (plan.exact or plan.budget or epoch.shuffles_all) and selection is None:
            between = int(plan.run / mean)
        self.buffer = Buffer(reader, plan, selection, lead=self._lead, gap=gap, between=between)

    @property
    def held_bytes(self) -> int:
        """Return the bytes of records that were read and are not yet handed out."""
        return self.buffer.held_bytes

    def __iter__(self) -> Iterator[Rows]:
        token = self.reader.begin_pass()
        try:
            yield from self._hand_out_all()
        finally:  # also of a pass that is left early
            self.reader.end_pass(token)

    def _hand_out_all(self) -> Iterator[Rows]:
        waiting: deque[_Drawn] = deque()
        ahead = 0
        batches = self._batches()
        if self.reader.storage.remote:
            batches = self._expect_shards(batches)
        for drawn in starmap(self._draw, batches):
            waiting.append(drawn)
            ahead += drawn.size
            while waiting and ahead - waiting[0].size >= self._ahead:
                ahead -= waiting[0].size
                yield from self._hand_out(waiting.popleft())
        for drawn in waiting:
            yield from self._hand_out(drawn)

    def rows(self, rows: Rows) -> Iterator[Row]:
        """Yield these rows in order, each as `reader.read` takes it."""
        records = (rows.numbers - self.reader.starts[rows.shards]).tolist()
        several = zip(rows.shards.tolist(), rows.numbers.tolist(), records, strict=True)
        last, shard = -1, None
        for (at, number, record), held in zip(several, rows.held or repeat(None), strict=False):
            if at != last or shard is None:
                last, shard = at, self.reader.shard(at, self.buffer.scattered)
            yield number, shard, record, held

    def shard(self, number: int) -> Shard:
        """Give a shard, opened with the advice that these reads need."""
        return self.reader.shard(number, self.buffer.scattered)

    def parts(self, rows: Rows) -> list[Part]:
        """Sort these rows by shard, in storage order, to be read many at a time."""
        parts = []
        for shard, records, places in self._by_shard(rows.shards, rows.numbers):
            held = None if rows.held is None else [rows.held[i] for i in places.tolist()]
            parts.append(Part(shard, records, places, held))
        return parts

    def draws(self, rows: Rows) -> UInt64s:
        """Return the word that each of these rows gives a random transform: (size,)."""
        epoch = self.share.epoch
        return rng.draws(epoch.seed, epoch.epoch, rows.numbers)

    def _by_shard(self, shards: Int64s, numbers: Int64s) -> Iterator[tuple[Shard, Int64s, Int64s]]:
        """Yield each shard of these rows, its records in storage order, and which rows they are."""
        order = numbers.argsort()
        shards = shards[order]
        records = numbers[order] - self.reader.starts[shards]
        cuts = (np.flatnonzero(shards[1:] != shards[:-1]) + 1).tolist()
        for a, b in pairwise([0, *cuts, len(order)] if len(order) else []):
            yield self.shard(int(shards[a])), records[a:b], order[a:b]

    def _batches(self) -> Iterator[tuple[_Pieces, Int64s, Int64s | None]]:
        """Yield of each batch pieces, repeats, and the row of each row of the pieces.

        None instead of the rows: they are in order. Without a batch_size, of many steps at a time.
        """
        share = self.share
        if isinstance(share, RowRanges) or share.batch_size is not None:
            for batch in share:
                yield batch.pieces, batch.repeats, None
            return
        # Not more of a span than is held or announced ahead of it.
        most = max(
            buffering.STEPS[0],
            min(buffering.STEPS[1], share.touched * (self._lead or buffering.STEPS[1])),
        )
        steps, done = share.worker_steps, 0
        while done < len(steps):
            some = steps[done : done + min(most, max(buffering.STEPS[0], done - self._ahead))]
            pieces, turn, repeats = share.samples(some)
            yield pieces, repeats, turn
            done += len(some)

    def _expect_shards(
        self, batches: Iterator[tuple[_Pieces, Int64s, Int64s | None]]
    ) -> Iterator[tuple[_Pieces, Int64s, Int64s | None]]:
        """Announce the shards with which spans begin, all at once. Yield the batches as they are.

        To open a shard takes a round trip.
        """
        epoch, some, found = self.share.epoch, [], dict[int, None]()
        if self.plan.first:
            found = dict.fromkeys(range(len(self._starts) - 1))
        for batch in batches:
            some.append(batch)
            pieces = [piece for piece in batch[0] if piece[0] not in self._spans]
            if not pieces or len(some) > self.share.touched:
                break
            for index, first, _ in pieces:
                self._spans[index] = span = self._new_span(index, first)
                places = np.array([span.began, min(span.began + span.window, span.records) - 1])
                found.update(dict.fromkeys(epoch.locate(epoch.position(index, places))[0].tolist()))
        self.reader.will_open(found)
        yield from some
        yield from batches

    def _draw(self, pieces: _Pieces, repeats: Int64s, turn: Int64s | None) -> _Drawn:
        """Find out which rows a batch has, and announce those that nothing else announced."""
        buffer = self.buffer
        drawn: list[tuple[Span, int, Places]] = []
        early: list[Places] = []
        end = 0
        if self._all is not None and pieces:
            places = self.share.epoch.places(pieces)
            self._all.start(places.start)
            if self.plan.first:
                buffer.advance(self._all, self._all.records)
            end = places.stop - self._all.first
        for index, first, count in pieces:
            span = self._spans.get(index)
            if span is None:
                span = self._spans[index] = self._new_span(index, first)
            if self.plan.budget and first > span.done:
                buffer.skip(span, first)
            rows = span.take(first, count)
            done = first + count
            drawn.append((span, done, rows))
            if self.plan.asks:
                buffer.ask(span, done, self._ask_lead)
                if span.began:  # left in the window of before a resume
                    early.append(rows[:, rows[PLACE] < span.began])
            elif self.plan.exact:
                early.append(rows)
            elif self._all is not None:
                if self._all.ahead < self._all.records:
                    early.append(self._all.beyond(rows))
            elif not self.plan.in_memory and span.ahead < min(done + span.window, span.records):
                early.append(span.beyond(rows))
        if early:
            buffer.announce(np.concatenate(early, axis=1))
        rows = np.concatenate([NOWHERE, *(rows for _, _, rows in drawn)], axis=1)
        valid = rows.shape[1]
        if turn is not None:
            by_span, rows = rows, np.empty_like(rows)
            rows[:, turn] = by_span
        if len(repeats):
            shards, records = self.share.epoch.locate(repeats)
            again = np.stack((np.full_like(repeats, -1), shards, self._starts[shards] + records))
            rows = np.concatenate((rows, again), axis=1)
        return _Drawn(drawn, rows, valid, end, turn)

    def _hand_out(self, batch: _Drawn) -> Iterator[Rows]:
        """Yield the batch with what was held for it, then hold or announce what comes after it."""
        buffer = self.buffer
        held: list[bytes | None] = []
        for span, done, rows in batch.pieces:
            if self.plan.in_memory and span.ahead < min(done + span.window, span.records):
                buffer.advance(span, done)
            if self.plan.budget:
                held += buffer.release(span, rows)
        _, shards, numbers = batch.rows
        if self._selection is not None:
            numbers = self._selection.numbers[numbers]
        if self.plan.budget:
            if batch.turn is not None:
                by_span, held = held, held[:]
                for row, data in zip(batch.turn.tolist(), by_span, strict=True):
                    held[row] = data
            held += [None] * (batch.size - batch.valid)
        yield Rows(shards, numbers, held if self.plan.budget else None, batch.valid)
        if self._all is not None:
            buffer.advance(self._all, batch.end)
        elif not self.plan.in_memory and not self.plan.exact:
            for span, done, _ in batch.pieces:
                buffer.advance(span, done)


_Pieces = Sequence[tuple[int, int, int]]  # (span, first draw, count), as Batch has them


class _Drawn(NamedTuple):
    """A batch whose rows are known, before it is handed out."""

    pieces: list[tuple[Span, int, Places]]  # span, its draws done with this piece, rows
    rows: Places  # those of all pieces, then repeats
    valid: int
    end: int  # where all is announced: places of the epoch's order from this consumer's first on
    turn: Int64s | None  # of each row of the pieces which row it is; None: they are in order

    @property
    def size(self) -> int:
        return len(self.rows[NUMBER])


def _warn_of_requests(share: Partition | RowRanges, mean_bytes: float, url: str) -> None:
    """Warn, by the first process of a run alone, where spans of their own save many requests.

    Many: more than a dataset that is shuffled as a whole may cost by default. A run that goes on
    is not warned: its spans are chosen.
    """
    epoch = share.epoch
    if not isinstance(share, Partition) or share.rank or share.worker or epoch.epoch or share.start:
        return
    spans = unshared_spans(share)
    requests = requests_of_spans(epoch, spans, mean_bytes)
    if epoch.records - requests <= ALL_RECORDS:
        return
    warnings.warn(
        f"{printable(url)}: {share.world_size * share.num_workers:,} loader processes share "
        f"{epoch.spans:,} spans, so that each record is a request of its own: {epoch.records:,} an "
        f"epoch. With {order_text(share, spans=spans)} each process has spans of its own, and asks "
        f"for ranges of 8 MiB: about {requests:,}; a cache does so with any order. Other spans are "
        "another order: choose them before the first epoch (docs/remote.md)",
        stacklevel=users_level(),
    )
