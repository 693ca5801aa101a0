"""Hand out the records of one consumer, shuffled, while storage is read in storage order.

How it works. `Fetch` walks the batches of one consumer (a Partition) and hands out their records.
Where their bytes wait until then is decided in `buffering`; `window` knows the draws of each span,
and `reader` opens the shards.

Every record is checked when it is handed out, wherever it waited.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain, pairwise, repeat, starmap
from typing import NamedTuple, TypeAlias

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
    NextRequests,
    WholeRequested,
    calls_per_record,
    choose_policy,
    requests_of_spans,
)
from .reader import Reader, Row, ShardRows, UnopenedShard
from .window import NO_ROWS, NUMBER, DrawnPieces, DrawnRows, Pieces, Span


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
    """Iterate over the batches of one consumer's partition of an epoch, as `Rows`, in order.

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
        partition: Partition | RowRanges,
        *,
        selection: Selection | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        local_consumers: int = 1,
        machines: int = 1,
        batched_reads: bool = False,
    ) -> None:
        self.reader = reader
        self.partition = partition
        self._selection = selection
        # Of each shard, the number of its first record; with a selection, its place in that.
        self._starts = reader.starts if selection is None else selection.starts
        self._spans: dict[int, Span] = {}
        mean = reader.mean_bytes
        network = reader.storage.is_network()  # of a store that has a cache it is False
        self.policy = policy = choose_policy(
            partition,
            mean,
            network=network,
            remote=reader.storage.remote and network,
            buffer_bytes=buffer_bytes,
            local_consumers=local_consumers,
            machines=machines,
            batched_reads=batched_reads,
            calls_per_record=partial(calls_per_record, reader.manifest, selection),
        )
        if isinstance(policy, NextRequests) and not partition.epoch.shuffles_all:
            _warn_of_requests(partition, mean, reader.storage.url)
        reader.storage.share(local_consumers)
        policy.open(reader, selection)
        # Making all draws of a shared span costs 0.2 us each; making only one's own, 10 us a piece.
        several = policy.budget or partition.sharers * partition.epoch.unit <= 50
        chunk = window.CHUNK if several else 0
        # No method of its own, which would hold it, and all that waits here, in a cycle.
        self._numbers = partial(_numbers, self._starts, selection)
        self._new_span = partial(Span, partition.epoch, self._numbers, chunk)

    @property
    def held_bytes(self) -> int:
        """Return the bytes of records that were read and are not yet handed out."""
        return self.policy.held_bytes

    def __iter__(self) -> Iterator[Rows]:
        token = self.reader.begin_pass()
        try:
            yield from self._hand_out_all()
        finally:  # also of a pass that is left early
            self.reader.end_pass(token)

    def _hand_out_all(self) -> Iterator[Rows]:
        waiting: deque[_Batch] = deque()
        ahead = 0
        batches = self._batches()
        if self.reader.storage.remote:
            batches = self._expect_shards(batches)
        for drawn in starmap(self._draw, batches):
            waiting.append(drawn)
            ahead += drawn.size
            while waiting and ahead - waiting[0].size >= self.policy.rows_ahead:
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
                last, shard = at, self.reader.shard(at, self.policy.scattered)
            yield number, shard, record, held

    @property
    def rank_rows(self) -> int:
        """Return the records that one rank reads in this pass, or a few more."""
        return -(-self.partition.epoch.records // self.partition.world_size)

    def following(self, row: Row) -> Iterator[Row]:
        """Yield the records that follow that of a row: of its shard, round, then of the next ones.

        Of those that the epoch is of. Which they are, no worker and no rank changes.
        """
        number = row[0]
        first, shards = self.reader.locate(number)[0], len(self._starts) - 1
        for at in chain(range(first, shards), range(first)):
            begin, end = self._starts[at : at + 2].tolist()
            places = np.arange(begin, end)
            numbers = places if self._selection is None else self._selection.at(places)
            if at == first:
                split = int(np.searchsorted(numbers, number))
                numbers = np.concatenate((numbers[split + 1 :], numbers[:split]))
            shard = self.reader.shard(at, self.policy.scattered)
            start = int(self.reader.starts[at])
            for other in numbers.tolist():
                yield other, shard, other - start, None
                if isinstance(shard, UnopenedShard):
                    break  # none of it can be read

    def shard(self, number: int) -> Shard:
        """Give a shard, opened with the advice that these reads need. Raises DamageError."""
        shard = self.reader.shard(number, self.policy.scattered)
        if isinstance(shard, UnopenedShard):
            raise shard.error
        return shard

    def parts(self, rows: Rows) -> list[ShardRows]:
        """Sort these rows by shard, in storage order, to be read many at a time."""
        parts = []
        for shard, records, places in self._by_shard(rows.shards, rows.numbers):
            held = None if rows.held is None else [rows.held[i] for i in places.tolist()]
            parts.append(ShardRows(shard, records, places, held))
        return parts

    def draws(self, rows: Rows) -> UInt64s:
        """Return the word that each of these rows gives a random transform: (size,)."""
        epoch = self.partition.epoch
        return rng.draws(epoch.seed, epoch.epoch, rows.numbers)

    def _by_shard(self, shards: Int64s, numbers: Int64s) -> Iterator[tuple[Shard, Int64s, Int64s]]:
        """Yield each shard of these rows, its records in storage order, and which rows they are."""
        order = numbers.argsort()
        shards = shards[order]
        records = numbers[order] - self.reader.starts[shards]
        cuts = (np.flatnonzero(shards[1:] != shards[:-1]) + 1).tolist()
        for a, b in pairwise([0, *cuts, len(order)] if len(order) else []):
            yield self.shard(int(shards[a])), records[a:b], order[a:b]

    def _batches(self) -> Iterator[_BatchPlan]:
        """Yield the plan of each batch; without a batch_size, one plan for many steps."""
        partition = self.partition
        if isinstance(partition, RowRanges) or partition.batch_size is not None:
            for batch in partition:
                yield batch.pieces, batch.repeats, None
            return
        # Not more of a span than is held or announced ahead of it.
        policy, (least, most) = self.policy, buffering.STEPS
        most = max(least, min(most, partition.spans_read * (policy.lookahead or most)))
        steps, done = partition.worker_steps, 0
        while done < len(steps):
            some = steps[done : done + min(most, max(least, done - policy.rows_ahead))]
            pieces, turn, repeats = partition.samples(some)
            yield pieces, repeats, turn
            done += len(some)

    def _expect_shards(self, batches: Iterator[_BatchPlan]) -> Iterator[_BatchPlan]:
        """Announce the shards with which spans begin, all at once. Yield the batches as they are.

        To open a shard takes a round trip.
        """
        epoch, some, found = self.partition.epoch, [], dict[int, None]()
        if isinstance(self.policy, WholeRequested):
            found = dict.fromkeys(range(len(self._starts) - 1))
        for batch in batches:
            some.append(batch)
            pieces = [piece for piece in batch[0] if piece[0] not in self._spans]
            if not pieces or len(some) > self.partition.spans_read:
                break
            for index, first, _ in pieces:
                self._spans[index] = span = self._new_span(index, first)
                places = np.array(
                    [span.start_place, min(span.start_place + span.window, span.records) - 1]
                )
                found.update(dict.fromkeys(epoch.locate(epoch.position(index, places))[0].tolist()))
        self.reader.will_open(found)
        yield from some
        yield from batches

    def _draw(self, pieces: Pieces, repeats: Int64s, turn: Int64s | None) -> _Batch:
        """Find out which rows a batch has, and announce those that nothing else announced."""
        drawn: DrawnPieces = []
        for index, first, count in pieces:
            span = self._spans.get(index)
            if span is None:
                span = self._spans[index] = self._new_span(index, first)
            if first > span.done:
                self.policy.skip(span, first)
            rows = span.take(first, count)
            drawn.append((span, first + count, rows))
        rows = np.concatenate([NO_ROWS, *(rows for _, _, rows in drawn)], axis=1)
        self.policy.draw(pieces, drawn, rows)
        valid = rows.shape[1]
        if turn is not None:
            by_span, rows = rows, np.empty_like(rows)
            rows[:, turn] = by_span
        if len(repeats):
            shards, records = self.partition.epoch.locate(repeats)
            numbers = self._numbers(shards, records)
            again = np.stack((np.full_like(repeats, -1), shards, numbers))
            rows = np.concatenate((rows, again), axis=1)
        return _Batch(drawn, rows, valid, turn)

    def _hand_out(self, batch: _Batch) -> Iterator[Rows]:
        """Yield the batch with what was held for it, then hold or announce what comes after it."""
        held = self.policy.release(batch.drawn)
        _, shards, numbers = batch.rows
        if held is not None:
            if batch.turn is not None:
                by_span, held = held, held[:]
                for row, data in zip(batch.turn.tolist(), by_span, strict=True):
                    held[row] = data
            held += [None] * (batch.size - batch.valid)
        yield Rows(shards, numbers, held, batch.valid)
        self.policy.advance(batch.drawn)


# (pieces, repeats, turn): a batch's pieces; the records that a tail repeats in it; and for each row
# that the pieces give, which row of the batch it becomes. None: the rows are in order.
_BatchPlan: TypeAlias = tuple[Pieces, Int64s, Int64s | None]


class _Batch(NamedTuple):
    """A batch whose rows are known, before it is handed out."""

    drawn: DrawnPieces
    rows: DrawnRows  # those of all pieces, then repeats
    valid: int
    turn: Int64s | None  # as _BatchPlan has it

    @property
    def size(self) -> int:
        return len(self.rows[NUMBER])


def _numbers(
    starts: Int64s, selection: Selection | None, shards: Int64s, records: Int64s
) -> Int64s:
    """Return the numbers of records by their shards, and their places in the epoch's part."""
    places = starts[shards] + records
    return places if selection is None else selection.at(places)


def _warn_of_requests(partition: Partition | RowRanges, mean_bytes: float, url: str) -> None:
    """Warn, by the first process of a run alone, where spans of their own save many requests.

    Many: more than a dataset that is shuffled as a whole may cost by default. A run that goes on
    is not warned: its spans are chosen.
    """
    epoch = partition.epoch
    if (
        not isinstance(partition, Partition)
        or partition.rank
        or partition.worker
        or epoch.epoch
        or partition.start
    ):
        return
    spans = unshared_spans(partition)
    requests = requests_of_spans(epoch, spans, mean_bytes)
    if epoch.records - requests <= ALL_RECORDS:
        return
    processes = partition.world_size * partition.num_workers
    order = order_text(partition, spans=spans)
    warnings.warn(
        f"{printable(url)}: {processes:,} loader processes share "
        f"{epoch.spans:,} spans, so that each record is a request of its own: {epoch.records:,} an "
        f"epoch. With {order} each process has spans of its own, and asks "
        f"for ranges of 8 MiB: about {requests:,}; a cache does so with any order. Other spans are "
        "another order: choose them before the first epoch (docs/remote.md)",
        stacklevel=users_level(),
    )
