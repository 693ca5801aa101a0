"""Which record each consumer yields, and when: arithmetic on (seed, epoch, rank, worker).

How it works. No bytes are read. The epoch's shards are permuted by (seed, epoch); their records,
end to end, are one virtual sequence of N. It is cut into C contiguous spans of whole units of u
records. Each span hands out its records through a bounded window (its part of the shuffle buffer),
by a sequence of draws. The flat order of the epoch takes units from the spans in turn, as cards are
dealt: unit g is the (g div C)-th unit of span g mod C. A batch is m units in a row; ranks and
workers take batches in turn. So the flat order knows nothing of ranks, workers or resumption: they
only decide who makes which batch.

A small example: N = 9 records in units of u = 2 on C = 2 spans, two ranks with batches of 4.

    U = ceil(9 / 2) = 5 units; only the epoch's last one, unit 4, is short (1 record)

    span 0 holds units 0, 2, 4   virtual 0..4     unit     0      1      2      3      4
    span 1 holds units 1, 3      virtual 5..8     span     0      1      0      1      0
                                                  draws   0,1    0,1    2,3    2,3     4

>>> epoch = Epoch(
...     np.array([4, 0, 5]), seed=0, epoch=0, canonical_workers=2, unit=2, shuffle_buffer=4
... )
>>> epoch.records, epoch.units, [epoch.span_start(s) for s in (0, 1)]
(9, 5, [0, 5])
>>> for batch in Share(epoch, 4, rank=0, world_size=2, tail="pad"):    # units 0, 1 then 4, 5
...     print(batch.step, batch.pieces, batch.repeats)                 # (span, first draw, count)
0 ((0, 0, 2), (1, 0, 2)) []
1 ((0, 4, 1),) [0 1 2]
>>> for batch in Share(epoch, 4, rank=1, world_size=2, tail="pad"):    # units 2, 3 then 6, 7
...     print(batch.step, batch.pieces, batch.repeats)
0 ((0, 2, 2), (1, 2, 2)) []
1 () [3 4 5 6]
>>> relative = epoch.span_order(0).take(5)                             # span 0's five draws
>>> epoch.locate(epoch.position(0, relative))                          # -> shard, record in it
(array([2, 2, 2, 2, 2]), array([0, 1, 3, 4, 2]))

Randomness is splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
OOPSLA 2014): word k of a stream is a pure function of (key, k), so that any place can be reached
without the draws before it. Words become slots by Lemire's multiply-shift (Fast random integer
generation in an interval, 2019). Never numpy's Generator: it does not promise its streams across
versions, and it does not seek.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, lru_cache
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..units import whole

Int64s: TypeAlias = NDArray[np.int64]
UInt64s: TypeAlias = NDArray[np.uint64]
Tail: TypeAlias = Literal["pad", "drop", "exact"]

# Kept in every saved state: raise it when any (seed, epoch, options) would give another order.
ORDER_VERSION: Final = 1

# What a key is for. Parts of a key, so that one seed never gives two purposes the same words.
SHARDS: Final = 1  # (seed, epoch): the order of an epoch's shards
SPAN: Final = 2  # (seed, epoch, span): the draws of one span
RECORDS: Final = 3  # (seed, epoch): the permutation of records when the buffer holds them all
PACK: Final = 4  # (seed): the permutation of samples when packing
TRANSFORM: Final = 5  # (seed, epoch): one word per record for random transforms
MIX: Final = 6  # (seed, dataset): the seed of one dataset of a mixture

GAMMA: Final = 0x9E3779B97F4A7C15  # splitmix64's odd step, 2^64 / golden ratio
_MIX1: Final = 0xBF58476D1CE4E5B9  # Stafford's variant 13, as splitmix64 uses it
_MIX2: Final = 0x94D049BB133111EB
_MASK: Final = (1 << 64) - 1

# Emissions are made this many at a time: a block costs ~30 numpy calls. Taken 32 at a time through
# a window of 157: 0.040 us a record in blocks of 1,024, 0.028 of 2,048, 0.021 of 4,096, 0.018 of
# 8,192; and 64 spans of blocks stay at 2 MiB.
_BLOCK = 4096

# A step of a seek's backward scan is at most this long, to bound its memory.
_SCAN: Final = 1 << 20

# Multiply-shift uses 32 random bits: a window beyond 2^32 would leave slots that are never drawn.
_MAX_WINDOW: Final = 1 << 32

_NO_ROWS: Final[Int64s] = np.empty(0, np.int64)
_NO_ROWS.flags.writeable = False  # it is shared by every batch that repeats nothing


# --- randomness ------------------------------------------------------------------------------


def splitmix64(x: UInt64s) -> UInt64s:
    """The finaliser of splitmix64: a bijection of 64-bit words. (n,) uint64 -> new (n,) uint64."""
    z = x >> np.uint64(30)
    z ^= x
    z *= np.uint64(_MIX1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX2)
    z ^= z >> np.uint64(31)
    return z


def words(key: int, start: int, count: int) -> UInt64s:
    """Words start .. start + count - 1 of the stream of `key`: (count,) uint64."""
    x = np.arange(count, dtype=np.uint64)
    x *= np.uint64(GAMMA)
    x += np.uint64((key + start * GAMMA) & _MASK)
    return splitmix64(x)


def word(key: int, index: int) -> int:
    """Word `index` of the stream of `key`, as a plain int: words(key, index, 1)[0]."""
    z = (key + index * GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


def key(*parts: int) -> int:
    """Mix integers (taken modulo 2^64) into one key in [0, 2^64).

    The first part says what the key is for (SHARDS, SPAN, ...). The count of parts is mixed in as
    well, so key(a) and key(a, 0) are unrelated.
    """
    h = len(parts)
    for part in parts:
        h = word(h ^ (int(part) & _MASK), 1)
    return h


def permutation(n: int, key: int) -> Int64s:
    """A uniform permutation of 0 .. n - 1: (n,) int64, the argsort of n words of `key`."""
    # The words of one key are all different (an odd step, then a bijection), so every argsort is
    # a stable one: numpy's default kind gives the same answer, faster.
    return np.argsort(words(key, 0, n)).astype(np.int64, copy=False)


@lru_cache(maxsize=64)
def _transform_key(seed: int, epoch: int) -> int:
    return key(TRANSFORM, seed, epoch)


def draw(seed: int, epoch: int, record: int) -> int:
    """One word in [0, 2^64) for the random transform of a record (its number in the data set).

    Where a transform needs more: word(draw(...), 1), word(draw(...), 2), ...
    """
    return word(_transform_key(seed, epoch), record)


# --- one span: the bounded window ------------------------------------------------------------


class SpanOrder:
    """The order in which one span hands out its records 0 .. n - 1 through a window of w slots.

    w = min(window, n). The slots first hold 0 .. w - 1. Draw k = 0 .. n - 1, with
    m = min(w, n - k) slots alive, picks slot j of m by word k of `key` and emits what it holds;
    then record k + w moves into slot j, or, when there is none left, the last living slot does.
    So record p is never emitted before draw p - w + 1. A window of 0 or 1 is storage order.

    Memory is O(w), whatever n. 0 <= n < 2^63, 0 <= window <= 2^32. Not for sharing by threads.
    """

    __slots__ = ("_at", "_block", "_dying", "_key", "_made", "_slots", "n", "window")

    def __init__(self, n: int, window: int, *, key: int) -> None:
        if n < 0 or not 0 <= window <= _MAX_WINDOW:
            raise OptionError(
                f"a span of {n} records and a window of {window}: expected n >= 0 and "
                f"0 <= window <= {_MAX_WINDOW}; choose a smaller shuffle_buffer."
            )
        self.n: Final = n
        self.window: Final = min(window, n)
        self._key = key
        self._made = 0  # draws made so far; those of the last block may not be handed out yet
        self._block = _NO_ROWS  # the emissions of draws made - len(block) .. made - 1
        self._at = 0  # how many of the block are handed out
        self._slots: Int64s = np.arange(self.window, dtype=np.int64)  # steady phase
        self._dying: list[int] | None = None  # the slots in the last w draws, as a list

    @property
    def drawn(self) -> int:
        """The next draw, in [0, n]: what take(1) gives is the emission of this one."""
        return self._made - len(self._block) + self._at

    def take(self, count: int) -> Int64s:
        """The next `count` emissions: (count,) int64 relative positions in [0, n), read-only."""
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
        """Go to draw k in [0, n], forwards or backwards.

        Costs O(w log w) at most, wherever k is: the window at draw k is what the last write to
        each slot left, so draws are scanned backwards from k until every slot has one.
        """
        if not 0 <= k <= self.n:
            raise OptionError(f"seek to draw {k}: expected 0 to {self.n}.")
        if not self._made - len(self._block) <= k <= self._made:
            # Short ways forward are walked: the scan passes over about w ln w draws itself.
            if not self._made <= k <= self._made + self.window * self.window.bit_length():
                self._scan(k)
            while self._made < k:
                self._fill()
        self._at = k - (self._made - len(self._block))

    def _fill(self) -> None:
        """Make the emissions of the next block of draws."""
        w, k = self.window, self._made
        count = min(_BLOCK, (self.n if k >= self.n - w or w <= 1 else self.n - w) - k)
        if w <= 1:
            self._block = np.arange(k, k + count, dtype=np.int64)
        elif k < self.n - w:
            self._block = self._steady(k, count)
        else:
            self._block = self._last(k, count)
        self._block.flags.writeable = False  # a seek back may hand it out again
        self._made += count
        self._at = 0

    def _steady(self, k: int, count: int) -> Int64s:
        """Draws k .. k + count - 1, each followed by a new record: k + count <= n - w.

        Draw i moves record i + w into its slot, so an emission is i + w of the previous draw i of
        the same slot, or, for the first one in this block, what the slot held before.
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
        """Draws k .. k + count - 1 of the last w, n - w <= k: no new records, slots die.

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
        """The slots j that draws k .. k + count - 1 pick, of w or of `alive` ones each.

        Multiply-shift: 32 random bits times m, high half. No slot's probability is off by more
        than m / 2^32 of itself.
        """
        j = words(self._key, k, count)
        j >>= np.uint64(32)
        j *= np.uint64(self.window) if alive is None else alive
        j >>= np.uint64(32)
        return j.view(np.int64)

    def _scan(self, k: int) -> None:
        """Put the window in its state before draw min(k, n - w), with an empty block."""
        w = self.window
        k = k if w <= 1 else min(k, self.n - w)
        self._made, self._block, self._at, self._dying = k, _NO_ROWS, 0, None
        self._slots = np.arange(w, dtype=np.int64)
        if w <= 1:
            return
        writes = np.full(w, -1, np.int64)  # the last draw before k that wrote to each slot
        end = k
        while end and (writes < 0).any():
            count = min(end, max(_BLOCK, w), _SCAN)
            end -= count
            slots = self._slots_drawn(end, count)
            draws = np.flatnonzero(writes[slots] < 0)  # later draws wrote to the other slots
            np.maximum.at(writes, slots[draws], draws + end)
        self._slots = np.where(writes < 0, self._slots, writes + w)

    def _by_slot(self, slots: Int64s) -> Int64s:
        """The stable argsort: the draws of each slot together, in order. (n,) -> (n,) int64."""
        # numpy sorts 16 bits by radix: 5 us for 2,048, against 25 us for int64 and 33 us for
        # sorting (slot, draw) as one number.
        keys = slots.astype(np.uint16) if self.window <= 1 << 16 else slots
        return keys.argsort(kind="stable")


def _ends(slots: Int64s) -> NDArray[np.bool_]:
    """Where runs of equal values end: (n,) -> (n,) bool, the last one True.

    What is written to a slot is chosen by this: of two writes to one place in one assignment,
    numpy does not promise which wins.
    """
    ends = np.ones(len(slots), np.bool_)
    np.not_equal(slots[1:], slots[:-1], out=ends[:-1])
    return ends


# --- one epoch: shards, spans, units ---------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Epoch:
    """One epoch of a data set: its virtual sequence, cut into spans.

    shard_records      (shards,) integers >= 0: the records in each shard, in the manifest's order
    seed, epoch        in [0, 2^64) and [0, 2^63)
    canonical_workers  C >= 1, the number of spans
    unit               u >= 1, records
    shuffle_buffer     records in the windows of all spans together, >= 0; each span has
                       ceil(shuffle_buffer / C), at least 1. None ("all"), or at least as many as
                       there are records: a uniform permutation of all records, at 8 bytes each.
    shuffle            False: the records in the manifest's order, from one span; shuffle_buffer
                       and canonical_workers are to be 1

    Costs O(shards), not O(records), unless the buffer holds all. Raises OptionError.
    """

    shard_records: Int64s
    _: KW_ONLY
    seed: int
    epoch: int
    canonical_workers: int
    unit: int
    shuffle_buffer: int | None
    shuffle: bool = True

    def __post_init__(self) -> None:
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
        _check_all(self, seed=(0, _MASK), epoch=(0, _MASK >> 1), canonical_workers=(1,), unit=(1,))
        if self.shuffle_buffer is not None:
            _check_all(self, shuffle_buffer=(0,))
            if not self.shuffles_all:
                whole("shuffle_buffer / canonical_workers", self.window, 1, _MAX_WINDOW)

    @cached_property
    def records(self) -> int:
        """N: the records of the epoch."""
        return int(self.shard_records.sum())

    @property
    def units(self) -> int:
        """U = ceil(N / u): the units of the epoch."""
        return -(-self.records // self.unit)

    @property
    def shuffles_all(self) -> bool:
        """True when the buffer holds every record, and the order is a uniform permutation."""
        if not self.shuffle:
            return False
        return self.shuffle_buffer is None or self.shuffle_buffer >= self.records

    @property
    def window(self) -> int:
        """Records in the window of each span, >= 1; 1 (no window needed) when shuffling all."""
        if self.shuffle_buffer is None or self.shuffles_all:
            return 1
        return max(1, -(-self.shuffle_buffer // self.canonical_workers))

    def span_records(self, span: int) -> int:
        """The records of a span: whole units, but for the epoch's last unit if that is short."""
        return self.span_start(span + 1) - self.span_start(span)

    def span_start(self, span: int) -> int:
        """The virtual position of a span's first record; N for span = C."""
        each, longer = divmod(self.units, self.canonical_workers)
        # The epoch's last unit may be short; the spans behind the one that holds it start earlier.
        last = (self.units - 1) % self.canonical_workers
        short = self.units * self.unit - self.records if span > last else 0
        return (span * each + min(span, longer)) * self.unit - short

    def span_order(self, span: int) -> SpanOrder:
        """The draws of a span, from its first one, as positions relative to the span's start."""
        stream = key(SPAN, self.seed, self.epoch, span)
        return SpanOrder(self.span_records(span), self.window, key=stream)

    def position(self, span: int, relative: Int64s) -> Int64s:
        """Positions relative to a span's start -> virtual positions. (n,) int64."""
        return relative + self.span_start(span)

    def pieces(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Places start .. stop - 1 of the flat order, in [0, N], as (span, first draw, count)."""
        unit, spans = self.unit, self.canonical_workers
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

    def place(self, span: int, draw: int) -> int:
        """The place of a draw in the flat order."""
        unit = self.unit
        return (draw // unit * self.canonical_workers + span) * unit + draw % unit

    def flat(self) -> Int64s:
        """The whole order at once: (N,) int64, the virtual position of each place. 0.1 us each."""
        unit, spans = self.unit, self.canonical_workers
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
        """Virtual positions in [0, N) -> shard numbers, and record numbers within those shards.

        (n,) int64 -> (n,) int64, (n,) int64. Shards are numbered as in shard_records.
        """
        shards, ends, starts = self._layout
        if self._permutation is not None:
            virtual = self._permutation[virtual]
        place = np.searchsorted(ends, virtual, side="right")  # right: passes over empty shards
        return shards[place], virtual - starts[place]

    @cached_property
    def _layout(self) -> tuple[Int64s, Int64s, Int64s]:
        """Shard numbers in virtual order, and the virtual end and start of each."""
        if self.shuffles_all or not self.shuffle:  # where records are permuted, shards need not be
            shards = np.arange(len(self.shard_records), dtype=np.int64)
        else:
            shards = permutation(len(self.shard_records), key(SHARDS, self.seed, self.epoch))
        counts = self.shard_records[shards]
        ends = np.cumsum(counts, dtype=np.int64)
        return shards, ends, ends - counts

    @cached_property
    def _permutation(self) -> Int64s | None:
        if not self.shuffles_all:
            return None
        return permutation(self.records, key(RECORDS, self.seed, self.epoch))


# --- consumers: who makes which batch --------------------------------------------------------


class Batch(NamedTuple):
    """The rows of one batch: those of the pieces, in order, then the repeats."""

    step: int  # this rank's step since `start`, from 0
    pieces: tuple[tuple[int, int, int], ...]  # (span, first draw, count): draws of that span
    repeats: Int64s  # virtual positions of the rows that a tail repeats, (n,)


def steps(
    records: int, batch_size: int | None, *, world_size: int = 1, tail: Tail = "pad", start: int = 0
) -> int:
    """The steps of every rank over an epoch of `records`: the same number on each rank.

    start: records already consumed by all ranks together. batch_size None: samples, one a step.
    """
    size = 1 if batch_size is None else batch_size
    whole("records", records, 0)
    whole("batch_size", size, 1)
    whole("world_size", world_size, 1)
    whole("start", start, 0)
    _check_tail(tail)
    left, each = max(0, records - start), size * world_size
    return left // each if tail == "drop" else -(-left // each)


@dataclass(frozen=True, eq=False)
class Share:
    """What one worker of one rank reads of an epoch: its batches.

    batch_size  a multiple of the epoch's unit; None: sample mode, one record a step, unit 1
    tail        what to do with the end, where records do not fill a batch on every rank:
                "pad"    repeat records, fewer than batch_size * world_size; with one rank repeat
                         nothing: its last batch is short
                "drop"   leave records out, fewer than batch_size * world_size
                "exact"  as "pad", but with one rank too: every batch is full, and the rows of
                         Batch.repeats are the ones to be marked as not valid
    start       units already consumed by all ranks together
    done        batches that this worker has made since `start`, and does not make again

    At its step i the rank takes the units start + (i * world_size + rank) * m ... + m - 1, where
    m = batch_size / unit; worker i mod num_workers makes that batch. Raises OptionError.
    """

    epoch: Epoch
    batch_size: int | None
    _: KW_ONLY
    rank: int = 0
    world_size: int = 1
    worker: int = 0
    num_workers: int = 1
    tail: Tail = "pad"
    start: int = 0
    done: int = 0

    def __post_init__(self) -> None:
        unit = self.epoch.unit
        if self.batch_size is None:
            if unit != 1:
                raise OptionError(
                    f"unit is {unit}: expected 1 without a batch_size; give one, or no unit."
                )
        else:
            _check_all(self, batch_size=(1,))
            if self.batch_size % unit:
                raise OptionError(
                    f"unit is {unit}, which does not divide batch_size {self.batch_size}; "
                    f"a divisor is {default_unit(self.batch_size)}."
                )
        _check_all(self, world_size=(1,), num_workers=(1,), start=(0,), done=(0,))
        _check_all(self, rank=(0, self.world_size - 1), worker=(0, self.num_workers - 1))
        _check_tail(self.tail)

    @property
    def batch_units(self) -> int:
        """m: the units of a batch."""
        return 1 if self.batch_size is None else self.batch_size // self.epoch.unit

    @cached_property
    def steps(self) -> int:
        """The steps of this rank, and of every other, from `start` to the epoch's end."""
        return steps(
            self.epoch.records,
            self.batch_size,
            world_size=self.world_size,
            tail=self.tail,
            start=self.start * self.epoch.unit,
        )

    @property
    def worker_steps(self) -> range:
        """The steps whose batches this worker makes, in order."""
        return range(self.worker, self.steps, self.num_workers)[self.done :]

    @property
    def sharers(self) -> int:
        """Consumers that touch each of this consumer's spans, this one included."""
        return sharers(
            self.epoch.canonical_workers,
            self.num_workers,
            world_size=self.world_size,
            batch_units=self.batch_units,
        )

    @property
    def touched(self) -> int:
        """The spans that this consumer touches, at least 1."""
        spans = min(self.epoch.canonical_workers, max(1, self.epoch.units))
        return max(1, spans * self.sharers // (self.world_size * self.num_workers))

    def __iter__(self) -> Iterator[Batch]:
        """The batches of this worker, in order."""
        return map(self.batch, self.worker_steps)

    def batch(self, step: int) -> Batch:
        """The batch of any step of this rank, in [0, steps)."""
        records, unit = self.epoch.records, self.epoch.unit
        first = self.start + (step * self.world_size + self.rank) * self.batch_units
        end = (first + self.batch_units) * unit
        pieces = self.epoch.pieces(first * unit, min(end, records))
        if self.tail == "drop" or (self.tail == "pad" and self.world_size == 1):
            return Batch(step, tuple(pieces), _NO_ROWS)
        # Flat position N + i, which no record has, is virtual record i mod N.
        missing = range(max(records, first * unit), end)
        if not missing:
            return Batch(step, tuple(pieces), _NO_ROWS)
        flat = np.arange(missing.start, missing.stop, dtype=np.int64)
        return Batch(step, tuple(pieces), (flat - records) % records)

    def samples(self, steps: range) -> tuple[list[tuple[int, int, int]], Int64s, Int64s]:
        """Without a batch_size, several steps of this rank at once, ascending, by span.

        Returns pieces as in Batch, sorted by span; of each of their rows which of these steps it
        is, (n,) int64; and of the steps behind those the repeats, (len(steps) - n,).
        """
        records = self.epoch.records
        flat = np.arange(steps.start, steps.stop, steps.step, dtype=np.int64)
        flat = flat * self.world_size + (self.start + self.rank)
        own = int(flat.searchsorted(records))
        draws, spans = np.divmod(flat[:own], self.epoch.canonical_workers)
        turn = spans.argsort(kind="stable")
        draws, spans = draws[turn], spans[turn]
        new = np.ones(own, bool)  # whether a piece begins at each row
        new[1:] = (spans[1:] != spans[:-1]) | (draws[1:] != draws[:-1] + 1)
        first = np.flatnonzero(new)
        counts = np.diff(first, append=own)
        pieces = zip(spans[first].tolist(), draws[first].tolist(), counts.tolist(), strict=True)
        return list(pieces), turn, (flat[own:] - records) % max(1, records)


@dataclass(frozen=True, eq=False)
class Slices:
    """Ranges of an epoch's flat order, for a reader that takes rows and not units.

    ranges      (start, stop) in [0, N], ascending; each is a batch
    batch_size  records of a range, about
    consumers   how many such readers there are; each touches all spans
    """

    epoch: Epoch
    ranges: Iterable[tuple[int, int]]
    _: KW_ONLY
    batch_size: int
    consumers: int = 1

    @property
    def sharers(self) -> int:
        """Consumers that touch each of this consumer's spans, this one included."""
        return self.consumers

    @property
    def touched(self) -> int:
        """The spans that this consumer touches, at least 1."""
        return min(self.epoch.canonical_workers, max(1, self.epoch.units))

    def __iter__(self) -> Iterator[Batch]:
        """The ranges as batches."""
        for step, (start, stop) in enumerate(self.ranges):
            yield Batch(step, tuple(self.epoch.pieces(start, stop)), _NO_ROWS)


def default_unit(batch_size: int) -> int:
    """Return the largest divisor of batch_size of at most 32; below 256, of 16 and half of it.

    Smaller units mix more spans in a batch; with larger ones more consumers share no span. Of the
    pairs of a batch, with a buffer of 10,000, so many share one again in the next epoch, in 16
    shards (what `tune` tolerates is 5 %): batch 256, unit 256: 25-30 %, unit 32: 2-3 %; batch 128,
    unit 32: 6 %, 16: 2 %; batch 64, unit 32: 6 %, 16: 3 %; batch 32, unit 32: 7 %, 16: 3 %.
    """
    batch_size = whole("batch_size", batch_size, 1)
    most = 32 if batch_size >= 256 else max(1, min(16, batch_size // 2))
    return max(d for d in range(1, most + 1) if batch_size % d == 0)


def shared_spans(
    canonical_workers: int, num_workers: int, *, world_size: int, batch_units: int
) -> bool:
    """Can two consumers touch one span? batch_units = m, the units of a batch.

    The batch of unit g falls to consumer (g div m) mod P, P = num_workers * world_size. So when
    P * m divides C = canonical_workers, the span g mod C says whose it is, and none is shared.
    """
    each = sharers(canonical_workers, num_workers, world_size=world_size, batch_units=batch_units)
    return each > 1


def sharers(canonical_workers: int, num_workers: int, *, world_size: int, batch_units: int) -> int:
    """Consumers that touch each span of an epoch that is long enough."""
    consumers = num_workers * world_size
    # Their batches begin at every multiple of `step` units, on some span modulo C.
    step = math.gcd(consumers * batch_units, canonical_workers)
    return consumers * min(batch_units, step) // step


def _check_all(options: Epoch | Share, **bounds: tuple[int, ...]) -> None:
    """Check these fields, and make Python's own integers of them: those of numpy overflow."""
    for name, bound in bounds.items():
        object.__setattr__(options, name, whole(name, getattr(options, name), *bound))


def _check_tail(tail: str) -> None:
    if tail not in get_args(Tail):
        raise OptionError(f"tail is {tail!r}: expected one of {', '.join(get_args(Tail))}.")
