"""What `tune` found: the rows, what a uniform shuffle does, and the row that is recommended."""

from __future__ import annotations

import base64
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Final

import numpy as np

from .. import notebook
from ..order.epoch import default_unit
from ..units import show_count, show_size
from .simulate import REGIONS, Classes, Sample, pair_chance, uniform_mixture
from .text import Plain, Result, paragraph, show_buffer, show_took, table

SIGMAS: Final = 3.29  # of the normal distribution, both sides: 1 in 1,000
AGAIN: Final = 0.05  # of a batch's pairs, beyond chance
# Of a mixture. Shuffled packs have some noise of their own that every epoch shares: 0.4 % in 20,000
# records of 1,000 classes. The least that 64 spans of a pack in class order are off is 2.7 %.
TOLERATED: Final = 0.01
SATURATED: Final = 0.99  # of the classes that a batch can have, in a uniform one
_WIDTH: Final = 100  # columns of the text

Band = tuple[float, float]


@dataclass(frozen=True)
class Row(Plain):
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
    even: float  # number of equally frequent classes with as many pairs of one class in a batch
    again: float  # share of a batch's pairs that shared a batch in the epoch before
    moved: float  # records between a record's place and its place without a buffer, mean
    mixes: bool
    renews: bool
    fits: bool  # the memory that is allowed
    is_cheap: bool  # in requests and bytes

    @property
    def good(self) -> bool:
        """Return True if the order is as good as a uniform shuffle."""
        return self.mixes and self.renews

    @property
    def will_do(self) -> bool:
        """Return True if it is as good, at a cost that nobody would notice."""
        return self.good and self.fits and self.is_cheap

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON, with "all" for a buffer of all records."""
        buffer = "all" if self.shuffle_buffer is None else self.shuffle_buffer
        more = {"shuffle_buffer": buffer, "good": self.good, "will_do": self.will_do}
        return super().as_dict() | more

    def __str__(self) -> str:
        need = show_size(self.memory_bytes)
        if self.shuffle_buffer is None:
            return f"a shuffle of all {self.window:,} records ({need})"
        return f"a buffer of {self.shuffle_buffer:,} records ({need}) in units of {self.unit}"


@dataclass(frozen=True)
class Uniform:
    """What uniform shuffles of the same labels do, and what is as good."""

    labels: str  # "label", or "position": the tenth of the packing order
    distinct: int  # classes in all
    uniform: float  # distinct classes in a batch, mean over many shuffles
    band: Band  # of that mean: what is as good
    saturated: bool  # nearly every uniform batch has all it can have: `even` is judged, too
    even: float  # as in Row
    even_band: Band  # what is as good
    chance: float  # that two records of a batch have shared one before

    @staticmethod
    def of(classes: Classes, labels: str, batch_size: int, sample: Sample) -> Uniform:
        """Make uniform shuffles of (N,) classes, and the bands around what they do."""
        distinct = len(np.unique(classes))
        most = min(distinct, batch_size)
        means = uniform_mixture(classes, batch_size, sample) if sample.batches else np.ones((1, 2))
        uniform, alike = means.mean(axis=0).tolist()
        off, off_alike = SIGMAS * means.std(axis=0, ddof=1) if len(means) > 1 else np.zeros(2)
        off = max(float(off), TOLERATED * uniform)
        # A shuffled pack without labels deals its tenths too evenly, which harms nobody.
        saturated = uniform > SATURATED * most and labels == "label" and alike > 0
        even, even_band = even_classes(alike), (0.0, math.inf)
        if saturated:
            even_band = (
                min(even_classes(alike + off_alike), even * (1 - TOLERATED)),
                max(even_classes(max(alike - off_alike, alike / 2)), even * (1 + TOLERATED)),
            )
        return Uniform(
            labels,
            distinct,
            uniform,
            (uniform - off, min(uniform + off, float(most))),
            saturated,
            even,
            even_band,
            pair_chance(len(classes), batch_size),
        )

    def off(self, classes: float, even: float) -> float:
        """Return how far a mixture is outside its bands, relative to a uniform shuffle."""
        off = off_band(classes, *self.band) / self.uniform
        return off + (off_band(even, *self.even_band) / self.even if self.saturated else 0.0)


@dataclass(frozen=True, repr=False)
class Tuning(Result, Uniform):
    """The result: what was simulated, what a uniform shuffle does, and what is recommended."""

    records: int
    shards: int
    mean_bytes: float
    batch_size: int
    num_workers: int
    world_size: int
    spans: int
    seed: int
    nodes: int  # that keep to shards of their own; 1: none do
    memory: int  # bytes that a row may take
    batches: int  # looked at for each (buffer, unit), in all epochs
    epochs: int  # that they are of
    whole_epochs: bool  # simulated; False: REGIONS stretches of them
    with_units: bool  # other units were asked for
    in_class_order: bool = False  # the pack: its classes lie in runs that small buffers do not mix
    rows: tuple[Row, ...] = ()  # least memory first, then the largest unit
    best: Row | None = None  # what is recommended
    default: Row | None = None  # the options that nobody gave; None: nothing to tune
    notes: tuple[str, ...] = ()  # the answer is in the last ones
    call: str = ""  # the constructor call; of a subset, the options to change, "" if none are
    seconds: float | None = None  # that `tune` took
    _draw: Callable[[Tuning, str], bytes] | None = None  # `plot.draw`, for notebooks

    @property
    def keeps_default(self) -> bool:
        """Return True if there is nothing to set."""
        return self.best is not None and self.best == self.default

    @property
    def least_bad(self) -> Row | None:
        """Return `best`, or where there is none the nearest row whose cost nobody would notice."""
        if self.best is not None:
            return self.best
        cheap = [row for row in self.rows if row.fits and row.is_cheap]
        return min(cheap or self.rows, key=self._badness, default=None)

    def _badness(self, row: Row) -> float:
        """Return how far a row is from what is as good as a uniform shuffle; 0: not at all."""
        return self.off(row.classes, row.even) + max(0.0, row.again - self.chance - AGAIN)

    @property
    def unit(self) -> int:
        """Return the default unit."""
        return default_unit(self.batch_size)

    def window(self, buffer: int | None) -> int:
        """Count the records that wait in the windows of all spans."""
        spans = self.spans
        return self.records if buffer is None else min(self.records, -(-buffer // spans) * spans)

    def buffer_bytes(self, buffer: int | None) -> int:
        """Return the bytes of the records that wait in the windows of all spans."""
        return math.ceil(self.window(buffer) * self.mean_bytes)

    def ladder(self) -> list[Row]:
        """Return one row for each buffer: that of the default unit, else of the best one."""
        return [
            min(rows, key=lambda row: (row.unit != self.unit, self._badness(row)))
            for _, rows in groupby(self.rows, key=lambda row: row.shuffle_buffer)
        ]

    def verdict(self, row: Row) -> str:
        """Judge a row in a few words; the text explains them."""
        less = row.classes < self.band[0] or (self.saturated and row.even < self.even_band[0])
        said = []
        if not row.mixes:
            said.append("too few classes" if less else "too even")
        said += ["pairs stay"] * (not row.renews)
        said = said or ["as good"]
        return ", ".join(said + ["dear"] * (not row.is_cheap) + ["too large"] * (not row.fits))

    @cached_property
    def decimals(self) -> int:
        """Return the number of decimals that show which values lie in their band."""
        judged = [(row.classes, *self.band) for row in self.rows]
        judged += [(row.even, *self.even_band) for row in self.rows if self.saturated]
        outside = [bool(off_band(*one)) for one in judged]
        for digits in range(2, 6):
            shown = [[round(number, digits) for number in one] for one in judged]
            if [bool(off_band(*one)) for one in shown] == outside:
                return digits
        return 6

    def marked_rows(self) -> list[tuple[str, Row]]:
        """Return the rows that are to be pointed at, and what they are."""
        best = "recommended" if self.best is not None else "least bad"
        found = [("default", self.default), (best, self.least_bad)]
        return [(name, row) for name, row in found if row is not None]

    def __str__(self) -> str:
        """Write it for a terminal of 100 columns; the answer, and the call, come last."""
        blocks = [self._head()]
        marked = self.least_bad
        if marked is not None:
            ladder = self.ladder()
            same = [row for row in self.rows if row.shuffle_buffer == marked.shuffle_buffer]
            if len(ladder) > 1:
                blocks.append(self._table(ladder, f"Units of {self.unit}:"))
            if len(same) > 1 or len(ladder) == 1:
                buffer = show_buffer(marked.shuffle_buffer)
                blocks.append(self._table(same, f"A buffer of {buffer} records, by unit:"))
            blocks.append(_LEGEND.replace(_EVEN, _EVEN if self.saturated else ""))
        notes = [paragraph(note, _WIDTH) for note in self.notes]
        blocks.append("\n".join([*notes, self.call]).rstrip("\n"))
        return "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        rows = [(self._judged(self.cells(row)), row is self.best) for row in self.rows]
        return (
            notebook.paragraph(self._head())
            + (notebook.table(self._judged(self.columns), rows) if rows else "")
            + "".join(map(notebook.paragraph, self.notes))
            + notebook.code(self.call)
            + self._picture()
        )

    def _picture(self) -> str:
        """Return the picture for a notebook; "" without matplotlib."""
        if self._draw is None or not self.rows or importlib.util.find_spec("matplotlib") is None:
            return ""
        # An image of its own: the names in one SVG would meet those in another on the same page.
        data = base64.b64encode(self._draw(self, "svg")).decode()
        what = "Mixing and cost by the size of the shuffle buffer"
        return (
            f'<img alt="{what}" style="max-width: 100%" src="data:image/svg+xml;base64,{data}" />\n'
        )

    def _head(self) -> str:
        """Write what was simulated, and what a uniform shuffle does."""
        readers = show_count(self.num_workers, "worker") if self.num_workers else "one process"
        if self.world_size > 1:
            readers = f"{self.world_size:,} ranks of {readers}"
        lines = [
            f"{show_count(self.records, 'record')} of {show_size(self.mean_bytes)} in "
            f"{show_count(self.shards, 'shard')}; batches of {self.batch_size:,}; {readers}; "
            f"{show_count(self.spans, 'span')}"
        ]
        took = show_took(self.seconds)
        if not self.rows:
            return lines[0] + took
        classes = f"{self.distinct:,} classes"
        if self.labels == "position":
            classes = f"tenths of the pack for want of classes: {self.distinct}"
        stretches = "" if self.whole_epochs else f", in {REGIONS} stretches of each"
        uniform, good = f"classes {self.show(self.uniform)}", f"classes {self._show(self.band)}"
        if self.saturated:
            uniform += f", even {self.show(self.even)}"
            good += f", even {self._show(self.even_band)}"
        lines += [
            f"Looked at: {show_count(self.batches, 'batch', 'batches')} of "
            f"{show_count(self.epochs, 'epoch')}{stretches}; {classes}{took}",
            f"A uniform shuffle: {uniform}, again {self.chance:.2%}",
            f"As good: {good}, again below {self.chance + AGAIN:.2%}",
        ]
        return "\n".join(lines)

    def show(self, value: float) -> str:
        """Write one of the judged values, with enough decimals."""
        return f"{value:,.{self.decimals}f}"

    def _show(self, band: Band) -> str:
        """Write the two ends of a band."""
        return " to ".join(map(self.show, band))

    def _table(self, rows: Sequence[Row], title: str) -> str:
        """Write rows as a table; the default and the recommended row are pointed at."""
        lines: list[tuple[str, ...]] = [self.columns]
        for row in rows:
            marks = ", ".join(name for name, one in self.marked_rows() if row == one)
            values = self.cells(row)
            lines.append((*values[:-1], values[-1] + (f" <- {marks}" if marks else "")))
        return "\n".join([title, *table(list(map(self._judged, lines)))])

    def _judged(self, line: tuple[str, ...]) -> tuple[str, ...]:
        """Return the cells of a line without `even`, where that is not judged."""
        return line if self.saturated else (*line[:6], *line[7:])

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of `cells`."""
        judged = ("classes", "even", "again", "")
        return ("buffer", "unit", "memory", "requests", "1st batch", *judged)

    def cells(self, row: Row) -> tuple[str, ...]:
        """Write the values of a row of a table: those of `columns`."""
        return (
            show_buffer(row.shuffle_buffer),
            f"{row.unit:,}",
            show_size(row.memory_bytes),
            f"{row.requests:,}",
            show_size(row.first_batch_bytes),
            self.show(row.classes),
            self.show(row.even) if self.saturated else "",
            f"{row.again:.2%}",
            self.verdict(row),
        )


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


def even_classes(alike: float) -> float:
    """Count equally frequent classes that have this part of a batch's pairs alike."""
    return 1 / max(float(alike), 1e-12)


def off_band(value: float, low: float, high: float) -> float:
    """Return how far a value is outside a band; 0 within, also by rounding."""
    off = max(low - value, value - high)
    return off if off > 1e-9 * abs(value) else 0.0
