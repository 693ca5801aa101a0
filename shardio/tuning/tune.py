"""What shuffle buffer should I set? The order is simulated for a ladder of them, and one is named.

How it works. The order is arithmetic, so what a buffer does is known without reading an image: the
batches of an epoch are drawn by Epoch itself, for each buffer and unit, and compared with
those of a true uniform shuffle of the same labels. A row, one (buffer, unit), is as good as uniform
when it

    mixes     the mean of the distinct classes in a batch is that of a uniform shuffle. The test is
              two-sided, at SIGMAS standard deviations of that mean over 200 uniform shuffles: one
              row in a thousand that is uniform fails it by chance. A difference of TOLERATED
              passes whatever its significance. Without labels the tenth of the packing order that
              a record lies in stands for its class. Where nearly every batch of a uniform shuffle
              has as many classes as it can, a pack in class order could pass by having each class
              in equal parts: there the pairs of one class are compared as well, alike.
    renews    of the pairs of records in a batch, fewer than 5 % beyond chance shared a batch in the
              epoch before.

A buffer of all records is a uniform shuffle by definition, so it passes whatever its noise. And a
row costs nothing that anybody would notice when

    fits      its records take no more than the memory that is allowed (MEMORY, if nobody says)
    is cheap  a cold epoch takes no more than DEARER of the requests, and of the bytes, of the row
              with the fewest, by the arithmetic of fetch; or no more than ALL_RECORDS requests.

The default is recommended where it is all that; else "all", else the largest buffer that is: the
best mixing, not the least memory. Where none is, the least bad one is shown, and what would help.
The batches of an order are the same for any number of workers and ranks.

Up to WHOLE records whole epochs are simulated, and LOOKED records of them are looked at; beyond it,
REGIONS stretches of the epoch are reached by seeking, and buffers above MOST are left out.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..dataset import sequence
from ..dataset.buffering import plan_buffering
from ..dataset.decode import Decoder
from ..dataset.sequence import ShardSequence
from ..errors import OptionError
from ..order.epoch import Epoch, default_unit
from ..order.options import ALL_RECORDS, CANONICAL_WORKERS, SHUFFLE_BUFFER, shuffled_whole
from ..order.partition import Partition
from ..order.rng import Int64s
from ..order.shuffle import SpanOrder
from ..storage.location import locate
from ..units import check_int, check_size, quoted, show_count, show_size
from .explain import check_dataset

if TYPE_CHECKING:
    from ..dataset.shard_dataset import ShardDataset

UNIFORM: Final = 200  # uniform shuffles that a mean and its deviation are made of
SIGMAS: Final = 3.29  # of the normal distribution, both sides: 1 in 1,000
AGAIN: Final = 0.05  # of a batch's pairs, beyond chance
# Of a mixture. Shuffled packs have some noise of their own that every epoch shares: 0.4 % in 20,000
# records of 1,000 classes. The least that 64 spans of a pack in class order are off is 2.7 %.
TOLERATED: Final = 0.01

MEMORY: Final = 2 << 30  # bytes, unless the default takes more: 10,000 photographs take half of it
DEARER: Final = 1.05  # requests and bytes, of the fewest
REQUEST: Final = 128 << 10  # bytes: read-ahead of Linux, if nobody has set it

# 1,024 batches of 256: with 1,000 classes the band is then 0.25 % wide, and 200 shuffles take 1 s.
LOOKED: Final = 1 << 18
PASSES: Final = 32  # pairs of epochs of a small data set: one of few shards differs between epochs
SATURATED: Final = 0.99  # of the classes that a batch can have, in a uniform one
WHOLE: Final = 1 << 21
REGIONS: Final = 4
MOST: Final = 500_000  # records in a buffer beyond WHOLE: 2 s for each (buffer, unit)

Classes = NDArray[Any]  # (N,) integers
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Row:
    """What one (buffer, unit) does."""

    shuffle_buffer: int | None  # records; None: "all"
    unit: int
    window: int  # records that wait in the windows of the whole job, at most
    memory_bytes: int  # of these records: what one machine holds at most
    rank_bytes: int  # of those that one rank touches
    first_batch_bytes: int  # that a worker reads before its first batch, about
    requests: int  # that a cold epoch takes, of all that read on a machine, about
    read_bytes: int  # in these
    classes: float  # distinct ones in a batch, mean
    even: float  # as many equally frequent classes have as many pairs of one class in a batch
    again: float  # share of a batch's pairs that shared a batch in the epoch before
    moved: float  # records between a record's place and its place without a buffer, mean
    mixes: bool
    renews: bool
    fits: bool  # the memory that is allowed
    is_cheap: bool  # in requests and bytes

    @property
    def good(self) -> bool:
        """As good as a uniform shuffle."""
        return self.mixes and self.renews

    def is_usual(self, buffer: int | None, batch_size: int) -> bool:
        """Whether these are the options that nobody gave."""
        return (self.shuffle_buffer, self.unit) == (buffer, default_unit(batch_size))

    @property
    def will_do(self) -> bool:
        """As good as a uniform shuffle, at a cost that nobody would notice."""
        return self.good and self.fits and self.is_cheap


@dataclass(frozen=True)
class Tuning:
    """The result: what was simulated, what a uniform shuffle does, and what is recommended."""

    records: int
    shards: int
    mean_bytes: float
    batch_size: int
    num_workers: int
    world_size: int
    canonical_workers: int
    seed: int
    memory: int  # bytes that a row may take
    labels: str  # "label", or "position": the tenth of the packing order
    distinct: int  # classes in all
    batches: int  # looked at for each (buffer, unit), in all epochs
    epochs: int  # that they are of
    whole_epochs: bool  # simulated; False: REGIONS stretches of them
    uniform: float  # distinct classes in a batch, mean over UNIFORM shuffles
    band: tuple[float, float]  # of that mean: what is as good
    saturated: bool  # nearly every uniform batch has all it can have: `even` is judged, too
    even: float  # of uniform shuffles, as in Row
    even_band: tuple[float, float]  # what is as good
    chance: float  # that two records of a batch have shared one before, when uniform
    with_units: bool  # other units were asked for
    in_class_order: bool  # the pack: the smallest buffer does not mix it
    notes: tuple[str, ...]  # the answer is in the last ones
    rows: tuple[Row, ...]  # least memory first, then the largest unit
    best: Row | None  # what is recommended
    default: Row | None  # the options that nobody gave; None: nothing to tune
    call: str  # the constructor call to use; of a subset, the options to change, "" if none are

    def as_dict(self) -> dict[str, Any]:
        """Give plain JSON."""
        one = {name: _plain(getattr(self, name)) for name in ("best", "default")}
        return asdict(self) | one | {"rows": [_plain(row) for row in self.rows]}

    @property
    def keeps_default(self) -> bool:
        """Whether there is nothing to set."""
        return self.best is not None and self.best == self.default

    @property
    def least_bad(self) -> Row | None:
        """`best`, or where there is none the one nearest to it that costs nothing to notice."""
        if self.best is not None:
            return self.best
        cheap = [row for row in self.rows if row.fits and row.is_cheap]
        return min(cheap or self.rows, key=self._badness, default=None)

    def _badness(self, row: Row) -> float:
        return self._off(row) + max(0.0, row.again - self.chance - AGAIN)

    def _off(self, row: Row) -> float:
        """How far the mixture is from its bands, relative to a uniform shuffle."""
        off = _outside(row.classes, self.band) / self.uniform
        return off + (_outside(row.even, self.even_band) / self.even if self.saturated else 0.0)

    def ladder(self) -> list[Row]:
        """One row for each buffer: that of the default unit, else of the best one."""
        by_buffer = groupby(self.rows, key=lambda row: row.shuffle_buffer)
        usual = default_unit(self.batch_size)
        return [
            min(rows, key=lambda row: (row.unit != usual, self._badness(row)))
            for _, rows in by_buffer
        ]

    def verdict(self, row: Row) -> str:
        """In a few words; text() explains them."""
        said = []
        if not row.mixes:
            less = row.classes < self.band[0] or (self.saturated and row.even < self.even_band[0])
            said.append("too few classes" if less else "too even")
        said += ["pairs stay"] * (not row.renews)
        said = said or ["as good"]
        return ", ".join(said + ["dear"] * (not row.is_cheap) + ["too large"] * (not row.fits))

    @cached_property
    def decimals(self) -> int:
        """With so many it shows which values lie in their band."""
        judged = [(row.classes, self.band) for row in self.rows]
        judged += [(row.even, self.even_band) for row in self.rows if self.saturated]
        for digits in range(2, 6):
            if all(
                bool(_outside(value, band))
                == bool(
                    _outside(round(value, digits), (round(band[0], digits), round(band[1], digits)))
                )
                for value, band in judged
            ):
                return digits
        return 6

    def __repr__(self) -> str:
        return self.text()  # as a notebook shows it

    def text(self) -> str:
        """For a terminal of 100 columns; the answer, and the call, come last."""
        blocks = [self._head()]
        marked = self.least_bad
        if marked is not None:
            ladder = self.ladder()
            same = [row for row in self.rows if row.shuffle_buffer == marked.shuffle_buffer]
            title = f"Units of {self.unit}:" if len(ladder) > 1 else ""
            if len(ladder) > 1:
                blocks.append(self._table(ladder, title))
            if len(same) > 1 or len(ladder) == 1:
                title = f"A buffer of {show_buffer(marked.shuffle_buffer)} records, by unit:"
                blocks.append(self._table(same, title))
            blocks.append(_LEGEND.replace(_EVEN, _EVEN if self.saturated else ""))
        notes = [textwrap.fill(note, 100, break_on_hyphens=False) for note in self.notes]
        blocks.append("\n".join([*notes, self.call]).rstrip("\n"))
        return "\n\n".join(blocks)

    @property
    def unit(self) -> int:
        """The default one."""
        return default_unit(self.batch_size)

    def _head(self) -> str:
        readers = show_count(self.num_workers, "worker") if self.num_workers else "one process"
        if self.world_size > 1:
            readers = f"{self.world_size:,} ranks of {readers}"
        lines = [
            f"{show_count(self.records, 'record')} of {show_size(self.mean_bytes)} in "
            f"{show_count(self.shards, 'shard')}; batches of {self.batch_size:,}; {readers}; "
            f"{show_count(self.canonical_workers, 'span')}"
        ]
        if self.rows:
            what = f"{self.distinct:,} classes"
            if self.labels == "position":
                what = f"tenths of the pack for want of classes: {self.distinct}"
            stretches = "" if self.whole_epochs else f", in {REGIONS} stretches of each"
            digits = self.decimals
            uniform, good = (
                f"classes {self.uniform:,.{digits}f}",
                f"classes {self._show(self.band)}",
            )
            if self.saturated:
                uniform += f", even {self.even:,.{digits}f}"
                good += f", even {self._show(self.even_band)}"
            lines += [
                f"Looked at: {show_count(self.batches, 'batch', 'batches')} of "
                f"{show_count(self.epochs, 'epoch')}{stretches}; {what}",
                f"A uniform shuffle: {uniform}, again {self.chance:.2%}",
                f"As good: {good}, again below {self.chance + AGAIN:.2%}",
            ]
        return "\n".join(lines)

    def _show(self, band: tuple[float, float]) -> str:
        return " to ".join(f"{edge:,.{self.decimals}f}" for edge in band)

    def _table(self, rows: Sequence[Row], title: str) -> str:
        names = f"{'memory':>9}  {'requests':>9}  {'1st batch':>9}  {'classes':>7}"
        even = f" {'even':>6}" if self.saturated else ""
        lines = [title, f"{'buffer':>7}  {'unit':>4}  {names}{even}  {'again':>6}"]
        for row in rows:
            marks = [name for name, one in self.marks() if row == one]
            arrow = f" <- {', '.join(marks)}" if marks else ""
            need, first = map(show_size, (row.memory_bytes, row.first_batch_bytes))
            even = f" {row.even:>6,.{self.decimals}f}" if self.saturated else ""
            lines.append(
                f"{show_buffer(row.shuffle_buffer):>7}  {row.unit:>4}  {need:>9}  "
                f"{row.requests:>9,}  {first:>9}  {row.classes:>7,.{self.decimals}f}{even}  "
                f"{row.again:>6.2%}  {self.verdict(row)}{arrow}"
            )
        return "\n".join(lines)

    def marks(self) -> list[tuple[str, Row]]:
        """The rows that are to be pointed at, and what they are."""
        found = [("default", self.default), ("recommended", self.best)]
        if self.best is None:
            found[1] = ("least bad", self.least_bad)
        return [(name, row) for name, row in found if row is not None]


# A terminal has no tooltips.
_EVEN: Final = """\
even       so many equally frequent classes would have as many pairs of one class in a batch
"""
_LEGEND: Final = f"""\
memory     size of the records in the buffer; `--memory` limits it. They wait in the page cache or
           in the workers: `shardio explain` says where
requests   to storage in a cold epoch, about
1st batch  bytes that are read before it
classes    distinct ones in a batch, mean
{_EVEN}again      pairs of a batch that shared one in the epoch before"""


def tune(
    dataset: ShardDataset | str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    num_workers: int = 0,
    world_size: int | None = None,
    memory: int | str | None = None,
    units: bool = False,
    progress: Progress | None = None,
    root: str | os.PathLike[str] | None = None,
) -> Tuning:
    """Say which shuffle buffer to set for batches of this size; mostly: none, keep the default.

    `print(shardio.tune(ds).text())`; `.call` is the dataset to make, or, of a subset, the options
    to change. By simulating the order; labels come from the index, and no record is read.

    dataset      a ShardDataset with a batch_size, of which `where` and `select` may have chosen
                 records; or the path of what `shardio pack` made
    batch_size   for a path. A ShardDataset has its own
    num_workers  of each rank's loader
    world_size   ranks; default: those of a ShardDataset's job, and 1 for a path
    memory       bytes, or "2GiB", that the records of a buffer may take on one machine; default:
                 2 GiB, or what the default of shuffle_buffer takes
    units        try other units too, not only where no buffer will do
    progress     called with (done, total)
    root         for a path: where the data lies, when `shardio index --out` put its index elsewhere

    Raises OptionError; also NotPackedError, DamageError, VersionError, StorageError.
    """
    if isinstance(dataset, (str, os.PathLike)):
        if batch_size is None:
            raise OptionError("tune: give batch_size; the answer is for batches")
        found = sequence.open(dataset, decode=None, root=root)
        return recommend(
            found.manifest.shard_records,
            labels_of(found),
            batch_size=batch_size,
            num_workers=num_workers,
            world_size=1 if world_size is None else world_size,
            mean_bytes=found.manifest.mean_bytes,
            is_network=locate(dataset if root is None else root).is_network(),
            memory=memory,
            units=units,
            progress=progress,
            path=os.fspath(dataset),
            root=None if root is None else os.fspath(root),
        )
    stream = check_dataset("tune", dataset, {"batch_size": batch_size, "root": root})
    if stream.batch_size is None:
        raise OptionError("tune: give batch_size to the dataset; the answer is for batches")
    reader, selection = stream.reader, stream.selection
    decoder = Decoder(stream.manifest.schema, decode=None)
    labels = labels_of(ShardSequence(reader, decoder, range(reader.records)))
    if labels is not None and selection is not None:
        labels = labels[selection.numbers]
    return recommend(
        stream.counts,
        labels,
        batch_size=stream.batch_size,
        num_workers=num_workers,
        world_size=stream.ranks()[1] if world_size is None else world_size,
        mean_bytes=reader.mean_bytes,
        is_network=reader.storage.is_network(),
        memory=memory,
        units=units,
        seed=stream.seed,
        canonical_workers=stream.canonical_workers if stream.shuffle else CANONICAL_WORKERS,
        progress=progress,
        path=stream.path if selection is None else None,
    )


def labels_of(found: sequence.ShardSequence) -> Classes | None:
    """The labels of every record; None where the dataset has none."""
    kinds = dict(found.manifest.schema.fields)
    return found.columns("label") if kinds.get("label") in ("int", "bool") else None


def recommend(
    shard_records: ArrayLike,
    labels: Classes | None,
    *,
    batch_size: int,
    num_workers: int = 0,
    world_size: int = 1,
    mean_bytes: float,
    is_network: bool = False,
    memory: int | str | None = None,
    units: bool = False,
    seed: int = 0,
    canonical_workers: int = CANONICAL_WORKERS,
    progress: Progress | None = None,
    path: str | None = "out/",
    root: str | None = None,
) -> Tuning:
    """Simulate the orders of a dataset, judge each, and recommend one.

    shard_records  (shards,) records of each shard, in the manifest's order
    labels         (N,) integers in the same order (masked: a class of its own), or None
    mean_bytes     of a record
    is_network     the dataset lies on a network file system
    memory         bytes, or "2GiB", that the records of a buffer may take; default: 2 GiB, or what
                   the default of shuffle_buffer takes
    units          try other units too, not only where no buffer will do
    progress       called with (done, total)
    path           of the dataset, for the call; None: the call is only what to change
    root           where its data lies, if elsewhere, for the call

    Raises OptionError.
    """
    counts = np.asarray(shard_records, np.int64)
    records = int(counts.sum())
    batch_size = check_int("batch_size", batch_size)
    num_workers = check_int("num_workers", num_workers, 0)
    world_size = check_int("world_size", world_size)
    canonical_workers = check_int("canonical_workers", canonical_workers)
    usual = None if shuffled_whole(records, mean_bytes) else SHUFFLE_BUFFER
    least = math.ceil(_window(records, usual, canonical_workers) * mean_bytes)
    limit = max(MEMORY, least) if memory is None else check_size("memory", memory)
    if labels is not None and len(labels) != records:
        raise OptionError(f"labels: {len(labels):,} for {records:,} records; expected one for each")

    classes = None if labels is None else _compact(labels)
    kind = "label"
    if classes is None or not records or classes.min() == classes.max():
        classes, kind = _tenths(records), "position"
    sample = _Sample.of(records, batch_size)
    ladder, others = _choices(records, batch_size, canonical_workers)
    choices = [*ladder, *(others if units else ())] if sample.batches else []
    tell = progress or (lambda done, total: None)
    tell(0, len(choices) + 1)
    means = _uniform(classes, batch_size, sample) if choices else np.ones((1, 2))
    uniform, alike = means.mean(axis=0).tolist()
    off = SIGMAS * means.std(axis=0, ddof=1) if len(means) > 1 else np.zeros(2)
    distinct = len(np.unique(classes))
    most = min(distinct, batch_size)
    band = _band(uniform, float(off[0]))
    band = band[0], min(band[1], float(most))
    # A shuffled pack without labels deals its tenths too evenly, which harms nobody.
    saturated = uniform > SATURATED * most and kind == "label" and alike > 0
    even, even_band = _even(alike), (0.0, math.inf)
    if saturated:
        even_band = _even(alike + off[1]), _even(max(alike - off[1], alike / 2))
        even_band = (
            min(even_band[0], even * (1 - TOLERATED)),
            max(even_band[1], even * (1 + TOLERATED)),
        )
    chance = _chance(records, batch_size)
    simulate = _Simulation(counts, classes, seed, canonical_workers, batch_size, sample)

    def judge(buffer: int | None, unit: int) -> Row:
        classes, alike, again, moved = simulate(buffer, unit)
        epoch = simulate.epoch(buffer, unit, 0)
        window = _window(records, buffer, canonical_workers)
        reader = Partition(
            epoch, batch_size, world_size=world_size, num_workers=max(1, num_workers)
        )
        touched = Partition(epoch, batch_size, world_size=world_size).touched
        rank = window if buffer is None else min(window, touched * epoch.window)
        evenly = not saturated or not _outside(_even(alike), even_band)
        need = math.ceil(window * mean_bytes)
        requests, read_bytes = _requests(reader, mean_bytes, is_network)
        return Row(
            shuffle_buffer=buffer,
            unit=unit,
            window=window,
            memory_bytes=need,
            rank_bytes=math.ceil(rank * mean_bytes),
            first_batch_bytes=_first_batch(reader, mean_bytes, is_network),
            requests=requests,
            read_bytes=read_bytes,
            classes=classes,
            even=_even(alike),
            again=again,
            moved=moved,
            mixes=buffer is None or (evenly and not _outside(classes, band)),
            renews=buffer is None or again - chance < AGAIN,
            fits=need <= limit,
            is_cheap=True,  # until all are known
        )

    rows: list[Row] = []
    left_out: list[int | None] = []

    def look(choices: list[tuple[int | None, int]]) -> None:
        total = len(rows) + len(choices) + 1
        for buffer, unit in choices:
            need = math.ceil(_window(records, buffer, canonical_workers) * mean_bytes)
            if need <= limit or (buffer, unit) == (usual, default_unit(batch_size)):
                tell(len(rows) + 1, total)
                rows.append(judge(buffer, unit))
            elif buffer not in left_out:
                left_out.append(buffer)

    look(choices)
    if choices and not any(row.fits for row in rows):
        need = math.ceil(_window(records, choices[0][0], canonical_workers) * mean_bytes)
        raise OptionError(
            f"memory is {show_size(limit)}, but the least buffer that was to be tried, "
            f"{show_buffer(choices[0][0])} records, needs {show_size(need)}; give more "
            "memory, or a smaller batch_size"
        )
    rows = _priced(rows)
    if choices and not units and not any(row.will_do for row in rows):
        look(others)
        rows = _priced(rows)
    rows.sort(key=lambda row: (row.memory_bytes, -row.unit))
    tell(len(rows) + 1, len(rows) + 1)
    default = next((row for row in rows if row.is_usual(usual, batch_size)), None)
    smallest = [row for row in rows if row.shuffle_buffer == rows[0].shuffle_buffer]
    # A shuffled pack mixes with any buffer.
    ordered = kind == "label" and bool(rows) and not any(row.mixes for row in smallest)
    tuning = Tuning(
        records=records,
        shards=len(counts),
        mean_bytes=float(mean_bytes),
        batch_size=batch_size,
        num_workers=num_workers,
        world_size=world_size,
        canonical_workers=canonical_workers,
        seed=seed,
        memory=limit,
        labels=kind,
        distinct=distinct,
        batches=sample.batches * sample.passes,
        epochs=sample.passes if sample.batches else 0,
        whole_epochs=sample.whole,
        uniform=uniform,
        band=band,
        saturated=saturated,
        even=even,
        even_band=even_band,
        chance=chance,
        with_units=units,
        in_class_order=ordered,
        notes=(),
        rows=tuple(rows),
        best=_best(rows, default),
        default=default,
        call="",
    )
    return _conclude(tuning, left_out, path, root)


def _best(rows: Sequence[Row], default: Row | None) -> Row | None:
    """Choose what to recommend: the default, else "all", else the largest buffer that will do."""
    if default is not None and default.will_do:
        return default
    doing = [row for row in rows if row.will_do]
    usual = None if default is None else default.unit
    return max(
        doing,
        key=lambda row: (row.shuffle_buffer is None, row.window, row.unit == usual, row.unit),
        default=None,
    )


def _priced(rows: Sequence[Row]) -> list[Row]:
    """The rows, compared with the one with the fewest requests, and bytes."""
    most = max(ALL_RECORDS, DEARER * min((row.requests for row in rows), default=0))
    read = DEARER * min((row.read_bytes for row in rows), default=0)
    return [replace(row, is_cheap=row.requests <= most and row.read_bytes <= read) for row in rows]


# --- the ladder -----------------------------------------------------------------------------------


def _choices(
    records: int, batch_size: int, spans: int
) -> tuple[list[tuple[int | None, int]], list[tuple[int | None, int]]]:
    """Each (buffer, unit) to try, None for "all": with the default unit, and with others."""
    most = records if records <= WHOLE else MOST
    steps = (f * 10**power for power in range(19) for f in (1, 2, 5))
    least = max(2, spans)
    buffers = [step for step in steps if least <= step < min(most + 1, records)]
    usual = default_unit(batch_size)
    ladder: list[tuple[int | None, int]] = [(buffer, usual) for buffer in buffers]
    ladder.append((None, usual))  # a permutation is the same for every unit
    return ladder, [(b, u) for b in buffers for u in _units(batch_size, spans) if u != usual]


def _window(records: int, buffer: int | None, spans: int) -> int:
    """Records that wait in the windows of all spans."""
    return records if buffer is None else min(records, -(-buffer // spans) * spans)


def _units(batch_size: int, spans: int) -> list[int]:
    """Divisors of the batch size, the largest first, each about a quarter of the one before.

    Below batch_size / spans every batch takes from all spans already: smaller ones mix no better.
    """
    divisors = [u for u in range(1, math.isqrt(batch_size) + 1) if batch_size % u == 0]
    divisors = sorted({*divisors, *(batch_size // u for u in divisors)})
    least = max(u for u in divisors if u <= max(1, batch_size / spans))
    units = [batch_size]
    while units[-1] > least:
        units.append(max(least, max(u for u in divisors if u <= max(1, units[-1] // 4))))
    return sorted({*units, default_unit(batch_size)}, reverse=True)


def _first_batch(share: Partition, mean_bytes: float, is_network: bool) -> int:
    """Bytes that a worker reads before its first batch, about.

    The batch alone: the window is announced as batches go by. But small records on local storage
    are read in blocks and held, so of these the windows of all spans that the batch takes from come
    before it, unless the spans are shared.
    """
    epoch, batch = share.epoch, min(share.epoch.records, share.batch_size or 1)
    kept = plan_buffering(share, mean_bytes, network=is_network, available_bytes=1 << 62)
    if kept.first:
        return math.ceil(epoch.records * mean_bytes)
    if kept.policy != "in_memory":
        return math.ceil(batch * mean_bytes)
    block = min(epoch.window * mean_bytes + kept.run, epoch.span_records(0) * mean_bytes)
    return math.ceil(min(share.batch_units, _spans(epoch)) * block)


def _requests(share: Partition, mean_bytes: float, is_network: bool) -> tuple[int, int]:
    """Requests of a cold epoch to storage, and their bytes, for all that read on one machine."""
    epoch, records = share.epoch, share.epoch.records
    kept = plan_buffering(
        share,
        mean_bytes,
        network=is_network,
        local_consumers=share.num_workers * share.world_size,
        available_bytes=1 << 62,  # whatever the machine
    )
    size = records * mean_bytes
    alone = 0.0  # records that take a request of their own
    if kept.exact:
        alone = float(records)
    elif epoch.shuffles_all and not kept.first:
        alone = records / 8  # those of the first batches that are ahead of the announcements
    elif kept.policy == "network" and kept.held_bytes > kept.budget:
        alone = records * (1 - kept.budget / kept.held_bytes)
    in_runs = (size - (alone * mean_bytes if kept.exact or kept.budget else 0.0)) / REQUEST
    twice = share.sharers if kept.policy == "network" else 1
    requests = alone * math.ceil(mean_bytes / REQUEST) + in_runs * twice
    return math.ceil(requests), math.ceil(size * twice)


# --- what is looked at ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sample:
    """Which batches of an epoch are looked at: the same ones for every (buffer, unit)."""

    regions: list[Int64s]  # numbers of batches, ascending, in each stretch that is simulated
    passes: int  # epochs, each with the one before it
    whole: bool

    @staticmethod
    def of(records: int, batch_size: int) -> _Sample:
        whole = records // batch_size  # the last, short one would hold a tail's repeats
        count = min(whole, max(REGIONS, LOOKED // batch_size))
        if records <= WHOLE:
            passes = min(PASSES, max(1, LOOKED // max(1, records)))
            return _Sample([np.arange(count) * whole // max(1, count)], passes, True)
        regions = min(REGIONS, whole)
        run = count // max(1, regions)
        starts = [i * (whole - run) // max(1, regions - 1) for i in range(regions)]
        return _Sample([np.arange(start, start + run) for start in starts], 1, False)

    @property
    def batches(self) -> int:
        return sum(map(len, self.regions))


class _Simulation:
    """The order of a dataset for any (buffer, unit), looked at in the batches of a sample."""

    def __init__(
        self,
        counts: Int64s,
        classes: Classes,
        seed: int,
        spans: int,
        batch_size: int,
        sample: _Sample,
    ) -> None:
        self._counts, self._classes, self._seed = counts, classes, seed
        self._spans, self._batch_size, self._sample = spans, batch_size, sample
        self._starts = np.cumsum(counts) - counts  # the number of each shard's first record
        self._layouts: dict[int, Int64s] = {}

    def epoch(self, buffer: int | None, unit: int, number: int) -> Epoch:
        return Epoch(
            self._counts,
            seed=self._seed,
            epoch=number,
            canonical_workers=self._spans,
            unit=unit,
            shuffle_buffer=buffer,
        )

    def __call__(self, buffer: int | None, unit: int) -> tuple[float, float, float, float]:
        """Distinct classes in a batch, pairs of one class, pairs again, places moved: means."""
        size = self._batch_size
        mixture, pairs, moved = np.zeros(2), 0, 0.0
        before = self.epoch(buffer, unit, 0)
        for number in range(1, self._sample.passes + 1):
            now = self.epoch(buffer, unit, number)
            flat, virtual = self._look(now)
            shards, places = now.locate(virtual)
            numbers = self._starts[shards] + places
            mixture += _mixture(self._classes[numbers].reshape(-1, size)).sum(axis=0)
            earlier = flat_positions(before, self._virtual(before, shards, places))
            pairs += _pairs((earlier // size).reshape(-1, size))
            # Without a buffer a record comes where its span's draws are dealt in storage order.
            home = numbers if now.shuffles_all else virtual
            moved += float(np.abs(_deal(now, home) - flat).sum())
            before = now
        batches = self._sample.batches * self._sample.passes
        distinct, alike = (mixture / batches).tolist()
        again = pairs / max(1, batches * size * (size - 1) // 2)
        return distinct, alike, again, moved / (batches * size)

    def _look(self, epoch: Epoch) -> tuple[Int64s, Int64s]:
        """The rows of the sample's batches: places in the flat order, and virtual positions."""
        size, each = self._batch_size, _spans(epoch) * epoch.unit
        flats, virtuals = [], []
        for batches in self._sample.regions:
            first = int(batches[0]) * size // each
            drawn = virtual_positions(epoch, first, -(-(int(batches[-1]) + 1) * size // each))
            flat = (batches[:, None] * size + np.arange(size)).reshape(-1)
            flats.append(flat)
            virtuals.append(drawn[flat - first * each])
        return np.concatenate(flats), np.concatenate(virtuals)

    def _virtual(self, epoch: Epoch, shards: Int64s, places: Int64s) -> Int64s:
        """The inverse of epoch.locate."""
        if epoch.shuffles_all:
            every = np.arange(epoch.records, dtype=np.int64)
            found, records = epoch.locate(every)
            inverse = np.empty_like(every)
            inverse[self._starts[found] + records] = every
            virtual: Int64s = inverse[self._starts[shards] + places]
            return virtual
        if epoch.epoch not in self._layouts:  # the same for every buffer and unit
            self._layouts[epoch.epoch] = _layout(epoch)
        return self._layouts[epoch.epoch][shards] + places


def _layout(epoch: Epoch) -> Int64s:
    """The virtual position of each shard's first record; 0 for empty shards."""
    starts = np.zeros(len(epoch.shard_records), np.int64)
    at, end = 0, epoch.records
    while at < end:
        shards, _ = epoch.locate(np.array([at]))
        starts[shards[0]] = at
        at += int(epoch.shard_records[shards[0]])
    return starts


# --- the order, many records at a time ------------------------------------------------------------


def _spans(epoch: Epoch) -> int:
    """The spans that units are dealt from: those that have any."""
    return min(epoch.canonical_workers, max(1, epoch.units))


def virtual_positions(epoch: Epoch, first: int, stop: int) -> Int64s:
    """The virtual positions of a part of the flat order, in that order.

    Rounds first .. stop - 1, each of one unit from every span, up to the epoch's end. Units are
    dealt as Epoch.pieces deals them, with one take for each span.
    """
    spans, unit = _spans(epoch), epoch.unit
    dealt = np.empty((stop - first, spans, unit), np.int64)
    draws = np.empty((stop - first) * unit, np.int64)
    for span in range(spans):
        drawing = epoch.span_order(span)
        begin, end = min(first * unit, drawing.n), min(stop * unit, drawing.n)
        drawing.seek(begin)
        draws[: end - begin] = epoch.position(span, drawing.take(end - begin))
        draws[end - begin :] = -1  # behind the epoch's end
        dealt[:, span] = draws.reshape(-1, unit)
    return dealt.reshape(-1)[: epoch.records - first * spans * unit]


def flat_positions(epoch: Epoch, virtual: Int64s) -> Int64s:
    """Where different virtual positions come in the flat order: the inverse of the above."""
    by_position = np.argsort(virtual)
    ordered = virtual[by_position]
    starts = [epoch.span_start(span) for span in range(_spans(epoch) + 1)]
    edges = np.searchsorted(ordered, starts).tolist()
    drawn = np.empty_like(ordered)
    for span, (a, b) in enumerate(pairwise(edges)):
        if a < b:
            drawn[a:b] = _draws(epoch.span_order(span), ordered[a:b] - starts[span]) + starts[span]
    flat = np.empty_like(virtual)
    flat[by_position] = _deal(epoch, drawn)
    return flat


def _draws(drawing: SpanOrder, wanted: Int64s) -> Int64s:
    """The draw that emits each of these relative positions, which ascend.

    Record p is not emitted before draw p - w + 1, and seldom later than some 10 w after it; so
    only stretches around what is wanted are drawn.
    """
    window = drawing.window
    found = np.empty_like(wanted)
    gaps = np.flatnonzero(np.diff(wanted) > 16 * window + 4096) + 1
    for part in np.split(np.arange(len(wanted)), gaps):
        low, high = int(wanted[part[0]]), int(wanted[part[-1]])
        draws = np.full(high - low + 1, -1, np.int64)
        drawing.seek(max(0, low - window + 1))
        end = high + 2 * window
        while (draws[wanted[part] - low] < 0).any():
            begin = drawing.drawn
            assert begin < drawing.n, "a record that no draw emits"
            emitted = drawing.take(min(drawing.n, end) - begin)
            inside = np.flatnonzero((emitted >= low) & (emitted <= high))
            draws[emitted[inside] - low] = inside + begin
            end += 2 * window
        found[part] = draws[wanted[part] - low]
    return found


def _deal(epoch: Epoch, virtual: Int64s) -> Int64s:
    """The place in the flat order of draw k of span s, given as the virtual position k of s."""
    starts = np.array([epoch.span_start(span) for span in range(_spans(epoch))], np.int64)
    span = np.searchsorted(starts, virtual, side="right") - 1
    unit, rest = np.divmod(virtual - starts[span], epoch.unit)
    flat: Int64s = (unit * len(starts) + span) * epoch.unit + rest
    return flat


# --- statistics -----------------------------------------------------------------------------------


def _compact(labels: Classes) -> Classes:
    """Labels as the smallest integers that are quick to sort; masked ones are a class."""
    if isinstance(labels, np.ma.MaskedArray):
        known = np.unique(labels.compressed(), return_inverse=True)[1]
        found = np.full(len(labels), -1, np.int64)
        found[~np.ma.getmaskarray(labels)] = known
        labels = found
    if labels.dtype.kind not in "iub":
        labels = np.unique(labels, return_inverse=True)[1]
    if not labels.size or labels.dtype.itemsize <= 2:
        return labels
    low, high = int(labels.min()), int(labels.max())
    return (labels - low).astype(np.uint16) if high - low < 1 << 16 else labels


def _tenths(records: int) -> Classes:
    """The tenth of the packing order that each record lies in."""
    edges = [-(-tenth * records // 10) for tenth in range(11)]
    return np.repeat(np.arange(10, dtype=np.uint8), np.diff(edges))


def _mixture(batches: Classes) -> NDArray[np.float64]:
    """Of each row, how many different values it has, and which part of its pairs is equal.

    (B, b) -> (B, 2)
    """
    runs, firsts = _runs(batches)
    pairs = np.add.reduceat(runs * (runs - 1) // 2, firsts)
    distinct = np.diff(firsts, append=len(runs))
    return np.stack([distinct, pairs / max(1, math.comb(batches.shape[1], 2))], axis=1)


def _pairs(batches: Int64s) -> int:
    """How many pairs of equal values stand in one row. (B, b)"""
    runs, _ = _runs(batches)
    return int((runs * (runs - 1) // 2).sum())


def _runs(batches: Classes) -> tuple[Int64s, Int64s]:
    """How often each value occurs in each row, row by row, and where each row begins in that."""
    ordered = np.sort(batches, axis=1)
    begins = np.ones(ordered.shape, np.bool_)
    np.not_equal(ordered[:, 1:], ordered[:, :-1], out=begins[:, 1:])
    places = np.flatnonzero(begins)
    firsts = np.searchsorted(places, np.arange(len(ordered)) * ordered.shape[1])
    return np.diff(places, append=ordered.size), firsts


def _even(alike: float) -> float:
    """Equally frequent classes that have this part of a batch's pairs alike."""
    return 1 / max(float(alike), 1e-12)


def _band(middle: float, off: float) -> tuple[float, float]:
    off = max(off, TOLERATED * middle)
    return middle - off, middle + off


def _outside(value: float, band: tuple[float, float]) -> float:
    """How far a value is outside a band; 0 within, also by rounding."""
    off = max(band[0] - value, value - band[1])
    return off if off > 1e-9 * abs(value) else 0.0


def _chance(records: int, batch_size: int) -> float:
    """That two records share a batch of a uniformly shuffled epoch, its short one included."""
    whole, rest = divmod(records, batch_size)
    pairs = whole * batch_size * (batch_size - 1) + rest * (rest - 1)
    return pairs / max(1, records * (records - 1))


def _uniform(classes: Classes, batch_size: int, sample: _Sample) -> NDArray[np.float64]:
    """The mean `_mixture` of the sample's number of batches, of uniform shuffles: (UNIFORM, 2)."""
    count, needed = sample.batches, UNIFORM * sample.passes
    means: list[NDArray[np.float64]] = []
    for rows in _shuffled(classes, batch_size, count, sample.whole):
        means += list(_mixture(rows).reshape(-1, count, 2).mean(axis=1))
        if len(means) >= needed:
            break
    found: NDArray[np.float64] = np.stack(means[:needed]).reshape(UNIFORM, -1, 2).mean(axis=1)
    return found


def _shuffled(classes: Classes, batch_size: int, count: int, whole: bool) -> Iterator[Classes]:
    """Batches of uniform shuffles, for ever: (some multiple of count, batch_size) classes."""
    generator = np.random.default_rng(0)  # not the order: only the noise of the reference
    records = len(classes)
    while whole:
        times = records // batch_size // count  # disjoint parts of one shuffle are as good as two
        shuffled = generator.permutation(classes)
        yield shuffled[: times * count * batch_size].reshape(-1, batch_size)
    while True:  # a shuffle of all would be too large; each batch alone, then
        rows = generator.integers(records, size=(count, batch_size))
        while True:
            rows.sort(axis=1)
            twice = np.nonzero(rows[:, 1:] == rows[:, :-1])
            if not len(twice[0]):
                break
            rows[twice] = generator.integers(records, size=len(twice[0]))
        yield classes[rows]


# --- the recommendation ---------------------------------------------------------------------------


def _conclude(
    tuning: Tuning, left_out: list[int | None], path: str | None, root: str | None
) -> Tuning:
    """With what to say at the end, and the call."""
    chosen, usual = tuning.least_bad, tuning.default
    options: dict[str, str] = {}
    if path is not None:
        where = {} if root is None else {"root": quoted(root)}
        options = where | {"batch_size": str(tuning.batch_size)}
        if tuning.canonical_workers != CANONICAL_WORKERS:
            options["canonical_workers"] = str(tuning.canonical_workers)
    if chosen is not None and usual is not None:
        if chosen.shuffle_buffer != usual.shuffle_buffer:
            buffer = chosen.shuffle_buffer
            options["shuffle_buffer"] = '"all"' if buffer is None else f"{buffer:_}"
        if chosen.unit != usual.unit and chosen.shuffle_buffer is not None:
            options["unit"] = str(chosen.unit)
    call = ", ".join(f"{name}={value}" for name, value in options.items())
    if path is not None:
        call = f"ShardDataset({quoted(path)}, {call})"
    if chosen is None or usual is None:
        few = "There are fewer records than a batch takes, so every order is one batch: nothing to "
        return replace(tuning, notes=(few + "tune.",), call=call)

    ordered = tuning.in_class_order
    repack = "pack it again, shuffled: `shardio pack SRC OUT`"
    told = _told(usual)
    notes = []
    if left_out:
        shown = ", ".join(map(show_buffer, left_out))
        limit = show_size(tuning.memory)
        notes.append(f"Not tried, for they take more than {limit} of memory: buffers of {shown}.")
    if tuning.records > WHOLE:
        notes.append(
            f'Buffers above {MOST:,} records were not simulated; "all" is a uniform shuffle by '
            "definition."
        )
    if tuning.keeps_default:
        notes.append(
            f"Keep the default, {told}: it mixes as well as a uniform shuffle, at no cost to "
            "notice. Nothing to set."
        )
        if ordered:
            notes.append(
                "The pack is in class order, which only a shuffle of nearly all of it mends. If it "
                f"is to grow, {repack}."
            )
    elif tuning.best is not None:
        notes.append(
            f"Set {_told(tuning.best)}: it mixes as well as a uniform shuffle, at no cost to "
            f"notice. The default, {told}, does not do: {tuning.verdict(usual)}."
        )
        if ordered:
            notes.append(f"The pack is in class order: to need less, {repack}.")
        else:
            notes.append("Another order voids saved states: change it for new runs.")
    else:
        notes.append(
            f"No buffer within {show_size(tuning.memory)} mixes as well as a uniform "
            f"shuffle at a cost that nobody would notice."
        )
        if ordered:
            notes.append(f"The pack is in class order: {repack}. Then the default will do.")
        else:
            notes.append("More memory (`--memory`), or a batch_size with small divisors, may help.")
        notes.append(f"Until then the least bad is {_told(chosen)}: {tuning.verdict(chosen)}.")
    return replace(tuning, notes=tuple(notes), call=call)


def _told(row: Row) -> str:
    need = show_size(row.memory_bytes)
    if row.shuffle_buffer is None:
        return f"a shuffle of all {row.window:,} records ({need})"
    return f"a buffer of {row.shuffle_buffer:,} records ({need}) in units of {row.unit}"


def _plain(row: Row | None) -> dict[str, Any] | None:
    """A row as JSON."""
    if row is None:
        return None
    buffer = "all" if row.shuffle_buffer is None else row.shuffle_buffer
    return asdict(row) | {"shuffle_buffer": buffer, "good": row.good, "will_do": row.will_do}


def show_buffer(buffer: int | None) -> str:
    return "all" if buffer is None else f"{buffer:,}"
