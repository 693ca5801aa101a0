"""Order and ranges of rows to records: storage is read in its own order, records come shuffled.

How it works. `Reader` opens a dataset's shards in the process that reads them. `Fetch` walks the
batches of one consumer (a Partition) and hands out their records. The shuffle buffer is an order,
not a pile of bytes; where the bytes wait depends on what is cheapest:

    hinted    the default. The page cache is the buffer: as the window of a span moves on, its
              storage is announced in runs of adjacent records, 1 MiB each, and each record is
              read when it is handed out. Costs the process next to nothing, and all workers of a
              machine share the pages.
    held      small records, in windows that fit HELD_BYTES: each span is read in blocks, and the
              raw bytes of each record wait in this process. 0.9 KB: 0.7 us a record less.
    network   hints to a network file system are not to be trusted: held, up to `buffer_bytes` on
              this machine; where that is full, blocks are left out and their records are read one
              by one when handed out, so nothing is read twice.

A span that starts would announce its whole window at once, 1 GB in all for 10,000 photographs, and
the first batch would wait behind it. So the first batches announce their own records, exactly, one
batch ahead, and the window grows RAMP records for each one handed out. A dataset of small records
that is shuffled as a whole is one window, announced so from its first byte to its last. One of at
most ALL_BYTES is announced before the first batch, or read, where hints are not to be trusted:
sequential reads, on any storage, for one epoch's worth of which nobody waits long. Where
storage order does not help (larger records are shuffled as a whole, a span is shared with other
machines, or memory is too short to keep the windows until they are used) all announcements are of
that kind: the order is arithmetic, so what the next batches need is known.

Every record is checked when it is handed out, wherever it waited.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise, repeat, starmap
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .. import native as engine
from ..errors import DamageError, StorageError
from ..formats import check_format, open_shard
from ..formats.base import Shard, ShardInfo
from ..formats.foreign.parquet import cache_bytes
from ..formats.manifest import SUFFIXES, Manifest
from ..formats.sample import Sample
from ..order.epoch import Epoch
from ..order.options import ALL_BYTES
from ..order.partition import Partition, RowRanges
from ..order.rng import Int64s
from ..order.subset import Selection
from ..storage import Storage
from ..storage.local import memory_available

# Open shards of a reader. Each costs its index, 24 bytes a record, and a descriptor, of which the
# user's program and torch's tensors need some too: a process may have 1,024 on most Linux systems,
# 256 on macOS, and a reader takes a quarter of them at most. Opening one again costs 0.15 ms.
OPEN_SHARDS = 256

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
KEPT = 0.25
RAMP = 4  # records announced for each one handed out, until the window is announced
AHEAD = 256  # records announced ahead of use where storage order does not help, at least
# Of records of a dataset that is shuffled as a whole, mean bytes x consumers on a machine, each of
# which announces all: at 9 us for 128 KiB in the cache as dear as 4.5 us for each one's own. So is
# each call where records do not lie side by side (`apart`): 12 consumers, 4 KB files of a folder:
# 173 us of processors a record, 35 when each announces its own; one record in ten: 35 and 9.
WHOLE = 64 << 10
# Calls of a consumer that announce a small dataset before the first batch: 0.1 s where all is
# cached.
CALLS = 1 << 14
# Rows that are looked up at once without a batch_size, at first and at most: 3 us each of 1 alone.
_STEPS = (64, 256)
_CHUNK = 1024  # draws of a span that are made and located at once: 0.2 us each, alone 10 us


class Rows(NamedTuple):
    """The rows of one batch, in order. Without a batch_size: of many steps, one row each."""

    shards: Int64s  # (size,) of each row its shard
    numbers: Int64s  # (size,) and its record, by number in the dataset
    held: list[bytes | None] | None  # the bytes of the records, where they were held
    valid: int  # rows before this one are the epoch's own; those from it on are a tail's repeats

    @property
    def size(self) -> int:
        return len(self.numbers)


class Part(NamedTuple):
    """The rows of a batch that are of one shard."""

    shard: Shard
    records: Int64s  # (n,) their numbers in the shard, ascending
    rows: Int64s  # (n,) which rows of the batch they are
    held: list[bytes | None] | None  # of each what was held; None: nothing


# A record that is to be read: its number in the dataset, its shard, its number there, and its bytes
# where they were held. A plain tuple: a named one takes 0.2 us to make.
Row = tuple[int, Shard, int, bytes | None]


def read(row: Row) -> Sample:
    """The sample of a row, checked; rows may be read in any order, by several threads at once.

    Raises DamageError.
    """
    _, shard, record, held = row
    return shard.read(record) if held is None else shard.decode(record, held)


class Reader:
    """A dataset's shards, each opened when first needed, by the process that needs it.

    Descriptors are not inherited: a forked child starts without them, and a pickle holds none.
    Threads may share a reader, and so may iterators: each asks for shards with the advice that its
    own reads need (`scattered`), and a shard is open once for each advice in use. Advice changes
    how fast bytes come, never which. Raises DamageError, StorageError, VersionError.

    root    where the shards are, if not beside the manifest
    verify  check what a format checks only once, when a shard is opened; see its page
    limit   shards that are open at once; default: as many as the process can spare
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        *,
        root: Storage | None = None,
        verify: bool = True,
        limit: int | None = None,
    ) -> None:
        self.storage = storage if root is None else root
        self.manifest = manifest
        self.limit = spare_descriptors() if limit is None else limit
        # (shards + 1,) the number of the first record of each shard; last, of all records
        self.starts = np.zeros(manifest.shards + 1, np.int64)
        np.cumsum(manifest.shard_records, out=self.starts[1:])
        self._opening = manifest.opening(storage, root, verify=verify)
        self._most = 0  # bytes of open shards that are in memory; 0: to be found out
        check_format(manifest.format)
        self.forget()
        _READERS.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        opening = self._opening
        more = {"root": self.storage, "verify": opening.verify, "limit": self.limit}
        return partial(Reader, **more), (opening.index, self.manifest)  # type: ignore[arg-type]

    @property
    def records(self) -> int:
        return int(self.starts[-1])

    @property
    def mean_bytes(self) -> float:
        """Bytes of storage per record, index included."""
        return self.manifest.mean_bytes

    def shard(self, number: int, scattered: bool = False) -> Shard:
        """The open shard. It stays usable while it is referenced, also when it leaves the cache.

        scattered: its records will be read in no order; the system is not to read ahead.
        """
        place = ~number if scattered else number
        try:
            self._opened.move_to_end(place)
            return self._opened[place]
        except KeyError:
            return self._miss(number, place)

    def locate(self, number: int) -> tuple[int, int]:
        """Number of a record in the dataset -> its shard, and its number there."""
        shard = int(np.searchsorted(self.starts, number, side="right")) - 1
        return shard, number - int(self.starts[shard])

    def forget(self) -> None:
        """Let go of all open shards; descriptors close with the last user of each."""
        self._opened: OrderedDict[int, Shard] = OrderedDict()  # by number; ~number: scattered
        self._lock = threading.Lock()

    def _miss(self, number: int, place: int) -> Shard:
        with self._lock:
            known = self._opened.get(place)
            if known is None:
                info = self.manifest.shard(number)
                try:
                    known = self._open(info)
                except FileNotFoundError:
                    raise DamageError(
                        f"{self.storage.url.rstrip('/')}/{info.name}: the manifest names this "
                        f"shard, of {info.records:,} records, but it is not there. "
                        + (
                            "Restore it from a copy, or pack again"
                            if self.manifest.format in SUFFIXES
                            else "If the data lies elsewhere (`shardio index --out`), say where: "
                            "--root, in Python root=; else restore it, or index anew"
                        )
                    ) from None
                if place < 0:
                    known.scattered()
                opened = self._opened
                opened[place] = known
                while len(opened) > self.limit or (len(opened) > 1 and self._too_large(known)):
                    opened.popitem(last=False)
            return known

    def _too_large(self, newest: Shard) -> bool:
        """Whether open shards, that are in memory as a whole, take more than they may."""
        if not getattr(newest, "memory", 0):
            return False
        if not self._most:
            self._most = cache_bytes(memory_available())
        return sum(getattr(one, "memory", 0) for one in self._opened.values()) > self._most

    def _open(self, info: ShardInfo) -> Shard:
        try:
            return open_shard(self.manifest.format, self._opening, info)
        except StorageError as error:
            if getattr(error.__cause__, "errno", None) not in (errno.EMFILE, errno.ENFILE):
                raise
        # Others have taken the descriptors that were left: give back those of all readers, once.
        for reader in list(_READERS):
            reader._opened = OrderedDict()
        return open_shard(self.manifest.format, self._opening, info)


class Described:
    """What the manifest says, under the names that torchvision's datasets have for it."""

    _reader: Reader

    @property
    def manifest(self) -> Manifest:
        return self._reader.manifest

    @property
    def classes(self) -> list[str] | None:
        """Names of the labels, by label; None when there are none."""
        classes = self.manifest.classes
        return None if classes is None else list(classes)

    @property
    def class_to_idx(self) -> dict[str, int] | None:
        """The label of each class; None when there are none."""
        classes = self.manifest.classes
        return None if classes is None else {name: label for label, name in enumerate(classes)}


class Keeping(NamedTuple):
    """Where the bytes of a consumer's windows wait. Sizes are by the mean record."""

    policy: str  # "hinted", "held" or "network"; see above
    exact: bool  # only the records of the next batches are announced, not the windows
    budget: int  # bytes that may be held in the process; 0: none are
    run: int  # bytes that are read or announced at a time
    held_bytes: int  # that the windows would hold in the process, were there no budget; 0: hinted
    cached_bytes: int  # announced, and not yet read, in the page cache of this machine
    first: bool = False  # all of the dataset is announced, or read, before the first batch


def keep(
    share: Partition | RowRanges,
    mean_bytes: float,
    *,
    network: bool,
    buffer_bytes: int = BUFFER_BYTES,
    local_consumers: int = 1,
    machines: int = 1,
    available_bytes: int | None = None,
    many: bool = False,
    apart: Callable[[], float] = lambda: 0.0,
) -> Keeping:
    """Decide it, by arithmetic: nothing is read. Options as Fetch has them.

    apart: tells, where all is shuffled, how many calls announce all, for each record; see `apart`.
    many: the core reads many records at a time, so that holding gains nothing.
    available_bytes: memory of this machine for processes and page cache; default: what it has.
    """
    epoch, touched, sharing = share.epoch, share.touched, share.sharers
    window = epoch.window * mean_bytes
    if not epoch.shuffles_all and sharing <= 2:
        room = (HELD_BYTES - touched * window) / touched
        budget, run = 0, RUN
        if network:
            budget = max(1, buffer_bytes // local_consumers)
            run = max(1, min(RUN, budget // (2 * touched)))
        elif mean_bytes < SMALL and room >= LEAST_BLOCK and not many:
            budget, run = HELD_BYTES, int(min(RUN, HELD_RUN, room))
        if budget:
            ahead = max(run, mean_bytes)  # the block that reaches beyond the window
            if network:  # and what is read early, so that no batch waits; see Fetch
                ahead += max(run, epoch.unit * mean_bytes)
            held = math.ceil(touched * (window + ahead))
            return Keeping("network" if network else "held", False, budget, run, held, 0)
    spans = min(touched * local_consumers, epoch.canonical_workers)  # of this machine
    pages = math.ceil(spans * (window + RUN))
    exact = sharing > 1 and (network or machines > 1)
    first = False
    if epoch.shuffles_all:
        pages = math.ceil(epoch.records * mean_bytes)
        each = apart()
        first = pages <= ALL_BYTES and epoch.records * each <= CALLS
        exact = network or machines > 1 or local_consumers * (mean_bytes / WHOLE + each) > 1
        exact = exact and not first
    if not exact:
        available = memory_available() if available_bytes is None else available_bytes
        exact = pages > KEPT * available
        first = first and not exact
    if exact:  # storage order does not help: announce the records of the next batches one by one
        batch = share.batch_size or _STEPS[1]
        pages = math.ceil(local_consumers * (max(AHEAD, batch) + batch) * mean_bytes)
    return Keeping("hinted", exact, 0, RUN, 0, pages, first)


def read_by_core(made: Manifest) -> bool:
    """Whether the core reads what batches are made of, as far as the manifest tells: raw pixels.

    Not where a transform wants them one by one; to it 0.4 us of each do not matter.
    """
    raw = made.format == "record" and made.options.get("encode") == "raw"
    return raw and engine.records() is not None


def apart(made: Manifest, selection: Selection | None) -> float:
    """Calls that announce all these records in storage order, for each of them: 0 to 1."""
    if made.format == "imagefolder":  # each is a file
        return 1.0
    if selection is None:
        return 0.0
    numbers = selection.numbers
    between = np.diff(numbers) - 1
    return float((between > _gap(numbers, made.mean_bytes)).sum() + 1) / max(1, len(numbers))


def _gap(numbers: Int64s, mean_bytes: float) -> int:
    """Unwanted records between two that are announced with them; no more in all than are wanted."""
    between, gap = np.diff(numbers) - 1, int(GAP / mean_bytes)
    return gap if between[between <= gap].sum() <= len(numbers) else 0


class Fetch:
    """One consumer's share of an epoch: iterates over its batches as `Rows`, in order.

    `read` reads each row of `rows(batch)`.

    buffer_bytes     memory for held records on network file systems, of all consumers of a machine
    selection        the records that the epoch is of; None: all
    local_consumers  consumers on this machine, this one included
    machines         machines that read this epoch
    many             records are read by `parts`, many at a time, by the core
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
        many: bool = False,
    ) -> None:
        self.reader = reader
        self.share = share
        self._selection = selection
        # Of each shard, the number of its first record; with a selection, its place in that. All
        # below counts so, until records are read or announced.
        self._starts = reader.starts if selection is None else selection.starts
        self.held_bytes = 0  # of records read and not yet handed out
        self._early: set[int] = set()  # handed out before their block is read: not to be held
        self._spans: dict[int, _Span] = {}
        epoch = share.epoch
        self._mean = mean = reader.mean_bytes
        sharing = share.sharers
        keeping = keep(
            share,
            mean,
            network=reader.storage.is_network(),
            buffer_bytes=buffer_bytes,
            local_consumers=local_consumers,
            machines=machines,
            many=many,
            apart=partial(apart, reader.manifest, selection),
        )
        self.policy, self._exact, self._first = keeping.policy, keeping.exact, keeping.first
        self._budget, self._run = keeping.budget, keeping.run
        self._scattered = not self._budget
        # Blocks are read before hand-out; all else moves on after it, so that no batch waits.
        self._at_once = self.policy == "held"
        self._lead = 0 if self._at_once else max(epoch.unit, math.ceil(self._run / mean))
        self._ahead = 0 if self._at_once else max(AHEAD, share.batch_size or 1)
        # Making all draws of a shared span costs 0.2 us each; making only one's own, 10 us a piece.
        chunk = _CHUNK if self._budget or sharing * epoch.unit <= 50 else 0
        self._new_span = partial(_Span, epoch, self._starts, chunk)
        self._all = None if self._exact or not epoch.shuffles_all else _All(self._starts)
        self._read_first = self._first and reader.storage.is_network()
        self._gap = 0
        if self._all is not None and selection is not None:
            self._gap = _gap(selection.numbers, mean)

    def __iter__(self) -> Iterator[Rows]:
        waiting: deque[_Drawn] = deque()
        ahead = 0
        for drawn in starmap(self._draw, self._batches()):
            waiting.append(drawn)
            ahead += drawn.size
            while waiting and ahead - waiting[0].size >= self._ahead:
                ahead -= waiting[0].size
                yield from self._hand_out(waiting.popleft())
        for drawn in waiting:
            yield from self._hand_out(drawn)

    def rows(self, rows: Rows) -> Iterator[Row]:
        """What `read` reads of these rows, in order."""
        records = (rows.numbers - self.reader.starts[rows.shards]).tolist()
        several = zip(rows.shards.tolist(), rows.numbers.tolist(), records, strict=True)
        last, shard = -1, None
        for (at, number, record), held in zip(several, rows.held or repeat(None), strict=False):
            if at != last or shard is None:
                last, shard = at, self.reader.shard(at, self._scattered)
            yield number, shard, record, held

    def parts(self, rows: Rows) -> list[Part]:
        """These rows by shard, in storage order, to be read many at a time."""
        parts = []
        for shard, records, places in self._by_shard(rows.shards, rows.numbers):
            held = None if rows.held is None else [rows.held[i] for i in places.tolist()]
            parts.append(Part(shard, records, places, held))
        return parts

    def _by_shard(self, shards: Int64s, numbers: Int64s) -> Iterator[tuple[Shard, Int64s, Int64s]]:
        """Each shard of these rows, its records in storage order, and which rows these are."""
        order = numbers.argsort()
        shards = shards[order]
        records = numbers[order] - self.reader.starts[shards]
        cuts = (np.flatnonzero(shards[1:] != shards[:-1]) + 1).tolist()
        for a, b in pairwise([0, *cuts, len(order)] if len(order) else []):
            yield self.reader.shard(int(shards[a]), self._scattered), records[a:b], order[a:b]

    def _batches(self) -> Iterator[tuple[_Pieces, Int64s, Int64s | None]]:
        """Of each batch pieces, repeats, and which row each row of the pieces is; None: in order.

        Without a batch_size, of many steps at a time.
        """
        share = self.share
        if isinstance(share, RowRanges) or share.batch_size is not None:
            for batch in share:
                yield batch.pieces, batch.repeats, None
            return
        # Not more of a span than is held or announced ahead of it.
        most = max(_STEPS[0], min(_STEPS[1], share.touched * (self._lead or _STEPS[1])))
        steps, done = share.worker_steps, 0
        while done < len(steps):
            some = steps[done : done + min(most, max(_STEPS[0], done - self._ahead))]
            pieces, turn, repeats = share.samples(some)
            yield pieces, repeats, turn
            done += len(some)

    def _draw(self, pieces: _Pieces, repeats: Int64s, turn: Int64s | None) -> _Drawn:
        """Which rows a batch has; announces those that nothing else has announced."""
        drawn: list[tuple[_Span, int, _Places]] = []
        early: list[_Places] = []
        end = 0
        if self._all is not None and pieces:
            place = self.share.epoch.place
            self._all.start(min(place(index, first) for index, first, _ in pieces))
            if self._first:
                self._advance(self._all, self._all.records)
            end = 1 + max(place(index, first + count - 1) for index, first, count in pieces)
            end -= self._all.first
        for index, first, count in pieces:
            span = self._spans.get(index)
            if span is None:
                span = self._spans[index] = self._new_span(index, first)
            if self._budget and first > span.done:
                others = span.take(span.done, first - span.done)
                self._release(span, others)
                self._early.update(span.beyond(others)[_NUMBER].tolist())
            rows = span.take(first, count)
            done = first + count
            drawn.append((span, done, rows))
            if self._exact:
                early.append(rows)
            elif self._all is not None:
                early.append(self._all.beyond(rows))
            elif not self._at_once and span.ahead < min(done + span.window, span.records):
                early.append(span.beyond(rows))
        if early:
            rows = np.concatenate(early, axis=1)
            self._announce(rows)
            if self._budget:
                self._early.update(rows[_NUMBER].tolist())
        rows = np.concatenate([_NOWHERE, *(rows for _, _, rows in drawn)], axis=1)
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
        """The batch, with what was held for it; then what comes after it is held or announced."""
        held: list[bytes | None] = []
        for span, done, rows in batch.pieces:
            if self._at_once and span.ahead < min(done + span.window, span.records):
                self._advance(span, done)
            if self._budget:
                held += self._release(span, rows)
        _, shards, numbers = batch.rows
        if self._selection is not None:
            numbers = self._selection.numbers[numbers]
        if self._budget:
            if batch.turn is not None:
                by_span, held = held, held[:]
                for row, data in zip(batch.turn.tolist(), by_span, strict=True):
                    held[row] = data
            held += [None] * (batch.size - batch.valid)
        yield Rows(shards, numbers, held if self._budget else None, batch.valid)
        if self._all is not None:
            self._advance(self._all, batch.end)
        elif not self._at_once and not self._exact:
            for span, done, _ in batch.pieces:
                self._advance(span, done)

    def _release(self, span: _Span, rows: _Places) -> list[bytes | None]:
        """The bytes that were held for these rows, and are then held no more."""
        held = span.release(rows[_PLACE].tolist())
        self.held_bytes -= sum(map(len, filter(None, held)))
        return held

    def _announce(self, rows: _Places) -> None:
        """Announce just these records, adjacent ones together."""
        if not rows.size:
            return
        numbers = rows[_NUMBER]
        if self._selection is not None:
            numbers = self._selection.numbers[numbers]
        order = numbers.argsort()
        numbers, shards = numbers[order], rows[_SHARD][order]
        new = np.ones(len(numbers) + 1, bool)  # whether a stretch ends before each row
        new[1:-1] = (numbers[1:] != numbers[:-1] + 1) | (shards[1:] != shards[:-1])
        firsts, lasts = np.flatnonzero(new[:-1]), np.flatnonzero(new[1:])
        shards = shards[firsts]
        starts = self.reader.starts[shards]
        begins, ends = numbers[firsts] - starts, numbers[lasts] - starts + 1
        for at, begin, end in zip(shards.tolist(), begins.tolist(), ends.tolist(), strict=True):
            self.reader.shard(at, self._scattered).will_need(begin, end)

    def _advance(self, span: _Span | _All, done: int) -> None:
        """Hold or announce the storage that draws of a span will need after `done` of them."""
        target = done + span.window + self._lead
        if not self._at_once and not (self._first and isinstance(span, _All)):
            target = min(target, span.began + RAMP * (done - span.began) + self._lead)
        target = min(target, span.records)
        while span.ahead < target:
            number, at, record = span.locate(span.ahead)
            shard = self.reader.shard(at, self._scattered)
            most = min(int(self._starts[at + 1]) - number, span.records - span.ahead)
            most = min(most, 1 + int(2 * self._run / self._mean))
            chosen: slice | Int64s = slice(record, record + most)
            if self._selection is not None:
                first = self.reader.starts[at]
                chosen = self._selection.numbers[number : number + most] - first
            ends = shard.sizes[chosen].cumsum()
            count = max(1, int(ends.searchsorted(self._run, side="right")))
            if isinstance(span, _All) or not self._budget:
                for begin, end in _stretches(chosen, count, self._gap):
                    if self._read_first:
                        shard.hold(begin, end)  # and let go: it is in the page cache then
                    else:
                        shard.will_need(begin, end)
                span.ahead += count
            elif number in self._early:
                self._early.remove(number)
                span.hold([None])
            elif self.held_bytes + int(ends[count - 1]) > self._budget:
                span.hold([None] * count)
            else:
                if self._early:
                    run = range(number, number + count)
                    count = next((i for i, n in enumerate(run) if n in self._early), count)
                data = self._hold(shard, chosen, count)
                self.held_bytes += sum(map(len, data))
                span.hold(data)

    def _hold(self, shard: Shard, chosen: slice | Int64s, count: int) -> list[bytes]:
        """The bytes of the first `count` of these records of a shard."""
        if isinstance(chosen, slice):
            return shard.hold(chosen.start, chosen.start + count)
        data: list[bytes] = []
        records = chosen[:count].tolist()
        gap, most = int(GAP / self._mean), max(1, int(self._run / self._mean))
        for begin, end in _stretches(chosen, count, gap, most):
            read = shard.hold(begin, end)
            while len(data) < count and records[len(data)] < end:
                data.append(read[records[len(data)] - begin])
        return data


def _stretches(
    records: slice | Int64s, count: int, gap: int, most: int = 1 << 62
) -> Iterator[tuple[int, int]]:
    """The first `count` of these ascending records as (begin, end), over gaps of some records.

    most: records that such a stretch spans, about; gaps would make it many times the run.
    """
    if isinstance(records, slice):
        yield records.start, records.start + count
        return
    some = records[:count]
    cuts = np.flatnonzero((np.diff(some) > gap + 1) | np.diff(some // most).astype(bool)) + 1
    for first, last in pairwise([0, *cuts.tolist(), count]):
        yield int(records[first]), int(records[last - 1]) + 1


_Pieces = Sequence[tuple[int, int, int]]  # (span, first draw, count), as order.Batch has them


# (3, n) int64: of n rows the places in their span, in storage order; shards; and numbers of the
# records, in the dataset or selection.
_Places: TypeAlias = Int64s
_PLACE, _SHARD, _NUMBER = range(3)
_NOWHERE: _Places = np.empty((3, 0), np.int64)


class _Drawn(NamedTuple):
    """A batch whose rows are known, before it is handed out."""

    pieces: list[tuple[_Span, int, _Places]]  # span, its draws done with this piece, rows
    rows: _Places  # those of all pieces, then repeats
    valid: int
    end: int  # where all is announced: places of the epoch's order from this consumer's first on
    turn: Int64s | None  # of each row of the pieces which row it is; None: they are in order

    @property
    def size(self) -> int:
        return len(self.rows[_NUMBER])


def spare_descriptors() -> int:
    """OPEN_SHARDS, or a quarter of the descriptors that this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_SHARDS if soft == resource.RLIM_INFINITY else max(1, min(OPEN_SHARDS, soft // 4))


class _Span:
    """Where a consumer stands in one span."""

    __slots__ = (
        *("_base", "_bottom", "_chunk", "_epoch", "_held", "_index", "_order", "_rows", "_starts"),
        *("ahead", "began", "done", "records", "window"),
    )

    def __init__(self, epoch: Epoch, starts: Int64s, chunk: int, index: int, first: int) -> None:
        self._epoch, self._starts, self._chunk, self._index = epoch, starts, chunk, index
        self._order = epoch.span_order(index)
        self._base = first  # the draw of the first of _rows
        self._rows = _NOWHERE  # of the draws made last
        self.records = self._order.n
        self.window = self._order.window
        # Storage before place `ahead` is held or announced. After a resume, what was left in the
        # window of earlier storage is a third of it, scattered; it is read one by one.
        self.ahead = self.began = first if first >= self.window else 0
        self._bottom = self.ahead  # the place of _held[0]
        self._held: list[bytes | None] = []  # records by place, up to `ahead`; None: not held
        self.done = self.began  # draws handed out, by anyone

    def take(self, first: int, count: int) -> _Places:
        """The rows of draws first .. first + count - 1; `first` never goes back."""
        self.done = first + count
        begin = first - self._base
        found = self._rows[:, begin : begin + count]
        missing = count - found.shape[1]
        if missing:
            self._make(self.done - missing, max(missing, self._chunk))
            found = np.concatenate((found, self._rows[:, :missing]), axis=1)
        return found

    def beyond(self, rows: _Places) -> _Places:
        """Those rows that are neither held nor announced yet."""
        return rows[:, rows[_PLACE] >= self.ahead]

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
        """What is held of the records at these places; it is held no more."""
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

    def locate(self, place: int) -> tuple[int, int, int]:
        """A place in storage order -> record number in the dataset, shard, record in the shard."""
        shards, records = self._epoch.locate(self._epoch.position(self._index, np.array([place])))
        shard, record = int(shards[0]), int(records[0])
        return int(self._starts[shard]) + record, shard, record


class _All:
    """As a span: all of storage, where the whole dataset is shuffled and its places are draws."""

    __slots__ = ("_starts", "ahead", "first", "records", "window")
    began = 0  # draws count from the first one here: a resume is ramped too

    def __init__(self, starts: Int64s) -> None:
        self._starts = starts
        self.records = self.window = int(starts[-1])
        self.ahead = 0  # storage before this place is announced
        self.first = -1  # the place in the order of the first draw here

    def start(self, place: int) -> None:
        if self.first < 0:
            self.first = place

    def beyond(self, rows: _Places) -> _Places:
        return rows[:, rows[_NUMBER] >= self.ahead]

    def locate(self, place: int) -> tuple[int, int, int]:
        shard = int(self._starts.searchsorted(place, side="right")) - 1
        return place, shard, place - int(self._starts[shard])


# Descriptors and locks are not to be inherited: what is open when a process forks is forgotten in
# the child. A check of the pid at each use would cost 0.2 us each.
_READERS: weakref.WeakSet[Reader] = weakref.WeakSet()


def _forget() -> None:
    for reader in list(_READERS):
        reader.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
