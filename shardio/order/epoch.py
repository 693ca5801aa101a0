"""Cut an epoch into spans and units, and say which record comes at each place of its order.

How it works. There are three numberings of an epoch's N records, and an Epoch leads from the last
to the first:

    record             (shard, record within it), as the manifest has them
    virtual position   the shards in the epoch's own order, their records end to end; a span is a
                       range of these, so that a span is read from few shards. Where nodes keep to
                       shards of their own, `nodes` says which shards are where
    place              the flat order, in which batches are cut: units of u records are taken from
                       the spans in turn, each span handing out its records by a SpanOrder

`pieces` turns a range of places into draws of spans, a span's SpanOrder turns draws into positions,
and `locate` turns virtual positions into records.

This file also says how large a unit is when nobody says (`default_unit`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Final, Literal, TypeAlias

import numpy as np

from ..errors import OptionError
from ..units import check_fields, check_given, check_int
from .nodes import deal_shards
from .rng import MASK, RECORDS, SHARDS, SPAN, Int64s, key, permutation
from .shuffle import MAX_WINDOW, SpanOrder

Tail: TypeAlias = Literal["pad", "drop", "exact"]

# Kept in every saved state: raise it when any (seed, epoch, options) would give another order.
ORDER_VERSION: Final = 1


@dataclass(frozen=True, eq=False)
class Epoch:
    """Hold one epoch of a dataset: its virtual sequence, cut into spans.

    shard_records      (shards,) integers >= 0: the records in each shard, in the manifest's order
    seed, epoch        in [0, 2^64) and [0, 2^63)
    spans              C >= 1, their number
    unit               u >= 1, records
    shuffle_buffer     records in the windows of all spans together, >= 0; each span has
                       ceil(shuffle_buffer / C), at least 1. None ("all"), or at least as many as
                       there are records: a uniform permutation of all records, at 8 bytes each.
    shuffle            False: the records in the manifest's order, from one span; shuffle_buffer
                       and spans are to be 1
    nodes              machines that keep to shards of their own; 1: shards are of all. Spans are a
                       multiple of nodes * node_spans, and the buffer does not hold all
    node_spans         spans side by side that are of one node: the units of a batch

    Costs O(shards), not O(records), unless the buffer holds all. Raises OptionError for values out
    of these ranges.
    """

    shard_records: Int64s
    _: KW_ONLY
    seed: int
    epoch: int
    spans: int
    unit: int
    shuffle_buffer: int | None
    shuffle: bool = True
    nodes: int = 1
    node_spans: int = 1

    def __post_init__(self) -> None:
        """Check the fields, and copy the counts."""
        counts = np.asarray(self.shard_records)
        if counts.ndim != 1 or (counts.size and counts.dtype.kind not in "iu"):
            raise OptionError(
                f"shard_records: expected one integer per shard, found shape {counts.shape} of "
                f"{counts.dtype}."
            )
        counts = counts.astype(np.int64)  # a copy: nobody else can change this epoch
        if counts.size and int(counts.min()) < 0:
            raise OptionError(
                f"shard_records: shard {int(counts.argmin())} has {int(counts.min())} records; "
                f"expected 0 or more."
            )
        counts.flags.writeable = False
        object.__setattr__(self, "shard_records", counts)
        check_fields(self, seed=(0, MASK), epoch=(0, MASK >> 1), spans=(1,), unit=(1,))
        check_fields(self, nodes=(1,), node_spans=(1,))
        check_given(self, shuffle_buffer=(0,))
        if self.nodes > 1:
            self._check_nodes()
        if self.window > MAX_WINDOW:
            check_int("shuffle_buffer / spans", self.window, 1, MAX_WINDOW)

    def _check_nodes(self) -> None:
        """Raise OptionError where nodes cannot have shards of their own."""
        period, shards = self.nodes * self.node_spans, int((self.shard_records > 0).sum())
        if self.spans % period:
            next_one = -(-self.spans // period) * period
            raise OptionError(
                f"spans is {self.spans}: expected a multiple of {period}, nodes x the units of a "
                f"batch, {self.nodes} x {self.node_spans}; give spans={next_one}, or none"
            )
        if self.nodes > max(1, shards):
            raise OptionError(
                f"nodes is {self.nodes}, but only {shards} shards have records: leave nodes out, "
                "or pack with a smaller --shard-size"
            )
        if self.shuffles_all:
            raise OptionError(
                f"nodes is {self.nodes}, but a buffer of all {self.records} records mixes the "
                "shards of all nodes: leave nodes out, or give a smaller shuffle_buffer"
            )

    @cached_property
    def records(self) -> int:
        """Return N, the number of records in the epoch."""
        return int(self.shard_records.sum())

    @property
    def units(self) -> int:
        """Return U = ceil(N / u), the number of units in the epoch."""
        return -(-self.records // self.unit)

    @property
    def shuffles_all(self) -> bool:
        """Return True if the buffer holds every record: the order is a uniform permutation."""
        if not self.shuffle:
            return False
        return self.shuffle_buffer is None or self.shuffle_buffer >= self.records

    @property
    def window(self) -> int:
        """Return the records in each span's window, >= 1; 1 (none is needed) when shuffling all."""
        if self.shuffle_buffer is None or self.shuffles_all:
            return 1
        return max(1, -(-self.shuffle_buffer // self.spans))

    def span_records(self, span: int) -> int:
        """Count the records of a span: whole units, but for the epoch's last one if it is short."""
        return self.span_start(span + 1) - self.span_start(span)

    def span_start(self, span: int) -> int:
        """Return the virtual position of a span's first record; N for span = C."""
        each, longer = divmod(self.units, self.spans)
        # The epoch's last unit may be short; the spans behind the one that holds it start earlier.
        last = (self.units - 1) % self.spans
        short = self.units * self.unit - self.records if span > last else 0
        return (span * each + min(span, longer)) * self.unit - short

    def node(self, spans: Int64s) -> Int64s:
        """Return the node whose shards each of these spans holds, in [0, nodes): (n,) -> (n,)."""
        return spans // self.node_spans % self.nodes

    def span_order(self, span: int) -> SpanOrder:
        """Start the draws of a span, as positions relative to the span's start."""
        stream = key(SPAN, self.seed, self.epoch, span)
        return SpanOrder(self.span_records(span), self.window, key=stream)

    def position(self, span: int, relative: Int64s) -> Int64s:
        """Turn positions relative to a span's start into virtual positions: (n,) -> (n,) int64."""
        return relative + self.span_start(span)

    def pieces(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Cut places start .. stop - 1 of the flat order into (span, first draw, count).

        0 <= start, stop <= N. The pieces are in the flat order.
        """
        unit, spans = self.unit, self.spans
        if start >= stop:
            return []
        if spans == 1:  # the next draws of the one span, in one piece
            return [(0, start, stop - start)]
        first, last = start // unit, -(-stop // unit)
        pieces = [(g % spans, g // spans * unit, unit) for g in range(first, last)]
        if begun := start - first * unit:
            span, draw, count = pieces[0]
            pieces[0] = (span, draw + begun, count - begun)
        if over := last * unit - stop:
            span, draw, count = pieces[-1]
            pieces[-1] = (span, draw, count - over)
        return pieces

    def places(self, pieces: Iterable[tuple[int, int, int]]) -> range:
        """Return the range of places, of the flat order, that the draws of these pieces span."""
        unit, spans = self.unit, self.spans
        found = [
            (draw // unit * spans + span) * unit + draw % unit
            for span, first, count in pieces
            for draw in (first, first + count - 1)
        ]
        return range(min(found), max(found) + 1)

    def flat(self) -> Int64s:
        """Compute the whole order: (N,) int64, the virtual position of each place. 0.1 us each."""
        unit, spans = self.unit, self.spans
        order = np.empty((self.units, unit), np.int64)
        for span in range(min(spans, self.units)):
            count = self.span_records(span)
            places = self.position(span, self.span_order(span).take(count))
            full = count // unit
            order[span::spans][:full] = places[: full * unit].reshape(full, unit)
            if count % unit:  # the epoch's last unit
                order[-1, : count % unit] = places[full * unit :]
        return order.reshape(-1)[: self.records]

    def locate(self, virtual: Int64s) -> tuple[Int64s, Int64s]:
        """Turn virtual positions into shard numbers, and record numbers within those shards.

        (n,) int64 in [0, N) -> (n,) int64, (n,) int64. Shards are numbered as in shard_records.
        """
        shards, ends, starts = self._layout
        if self._permutation is not None:
            virtual = self._permutation[virtual]
        place = np.searchsorted(ends, virtual, side="right")  # right: passes over empty shards
        return shards[place], virtual - starts[place]

    def contiguous_run(self, virtual: int) -> tuple[int, int, int]:
        """Return shard and record of a virtual position, and how many follow in storage from there.

        Itself included. Only where windows shuffle.
        """
        shards, ends, starts = self._layout
        place = int(np.searchsorted(ends, virtual, side="right"))
        return int(shards[place]), virtual - int(starts[place]), int(ends[place]) - virtual

    def virtual_position(self, shards: Int64s, records: Int64s) -> Int64s:
        """Turn shard numbers, and record numbers within them, into virtual positions.

        (n,) int64, (n,) int64 -> (n,) int64: the inverse of `locate`, in O(shards) also of one
        record; in O(N) where the buffer holds all.
        """
        in_order, ends, starts = self._layout
        if self.nodes > 1:  # a shard may lie in several pieces
            before = np.cumsum(self.shard_records) - self.shard_records
            begins = np.concatenate(([0], ends[:-1]))
            firsts = before[in_order] + begins - starts  # of each piece the number of its first
            by_first = np.argsort(firsts)
            numbers = before[shards] + records
            piece = by_first[np.searchsorted(firsts[by_first], numbers, side="right") - 1]
            found: Int64s = begins[piece] + numbers - firsts[piece]
            return found
        virtual = starts[np.argsort(in_order)][shards] + records
        if self._permutation is not None:
            virtual = np.argsort(self._permutation)[virtual]
        return virtual

    @cached_property
    def _layout(self) -> tuple[Int64s, Int64s, Int64s]:
        """Return the shard numbers in virtual order, and the virtual end and start of each.

        Of pieces of shards, instead, where nodes have shards of their own.
        """
        if self.nodes > 1:
            edges = range(0, self.spans + 1, self.node_spans)
            blocks = np.diff([self.span_start(span) for span in edges]).astype(np.int64)
            pieces = deal_shards(
                self.shard_records, blocks, nodes=self.nodes, seed=self.seed, epoch=self.epoch
            )
            return pieces.shards, pieces.ends, pieces.ends - pieces.records - pieces.firsts
        if self.shuffles_all or not self.shuffle:  # where records are permuted, shards need not be
            shards = np.arange(len(self.shard_records), dtype=np.int64)
        else:
            shards = permutation(len(self.shard_records), key(SHARDS, self.seed, self.epoch))
        counts = self.shard_records[shards]
        ends = np.cumsum(counts, dtype=np.int64)
        return shards, ends, ends - counts

    @cached_property
    def _permutation(self) -> Int64s | None:
        """Return the permutation of all records, (N,) int64; None when windows shuffle them."""
        if not self.shuffles_all:
            return None
        return permutation(self.records, key(RECORDS, self.seed, self.epoch))


def default_unit(batch_size: int) -> int:
    """Return the largest divisor of batch_size of at most 32; below 256, of 16 and half of it.

    Smaller units mix more spans in a batch; with larger ones more consumers share no span. Of the
    pairs of a batch, with a buffer of 10,000, so many share one again in the next epoch, in 16
    shards (what `tune` tolerates is 5 %): batch 256, unit 256: 25-30 %, unit 32: 2-3 %; batch 128,
    unit 32: 6 %, 16: 2 %; batch 64, unit 32: 6 %, 16: 3 %; batch 32, unit 32: 7 %, 16: 3 %.
    """
    batch_size = check_int("batch_size", batch_size, 1)
    most = 32 if batch_size >= 256 else max(1, min(16, batch_size // 2))
    return max(d for d in range(1, most + 1) if batch_size % d == 0)
