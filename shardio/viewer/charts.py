"""Pictures of numbers, as shapes that templates draw as SVG: how an order mixes, histograms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..errors import printable
from ..units import show_size
from .results import Bins, ClassCount, Query
from .view import View

_STEPS: Final = 12  # batches whose mixing is drawn
_RECORDS: Final = 4096  # of all these batches together
_WIDTH: Final = 1000  # of both pictures, in their own units
_ROW: Final = 10  # height of one batch
_BAR: Final = 8  # of which its bar takes this


@dataclass(frozen=True)
class Shape:
    """Everything of one colour: the class that gives it, and an SVG path."""

    label: int | None
    path: str


@dataclass(frozen=True)
class Mixing:
    """How the batches from one step on are mixed: a row for each step, from above.

    classes    the parts that the classes have of each batch, as bars
    places     where in the dataset the records of each batch lie: a tick for each, left is first
    in_batch   different classes in the first of these batches; None: no classes
    uniform    as many there would be, on average, if its records were drawn from the whole dataset
    shards     different shards that the first batch reads
    pending    part of the index that is read: classes come later
    """

    steps: tuple[int, ...]
    width: int
    height: int
    classes: tuple[Shape, ...]
    places: tuple[Shape, ...]
    in_batch: int | None
    uniform: float | None
    shards: int
    pending: float | None


def mixing(view: View, query: Query, *, wait: bool = False) -> Mixing | None:
    """Return the mixing of the batches from `query.step` on; None: there are none, or none yet."""
    count = min(_STEPS, max(1, _RECORDS // query.batch_size))
    found = view.batches(query, count, wait_s=None) if wait else view.batches(query, count)
    batches = [batch for batch in found.batches if batch.numbers]
    if not batches:
        return None
    labels = {label for label in batches[0].labels or () if label is not None}
    rows = [batch.labels or (None,) * len(batch.numbers) for batch in batches]
    numbers = [batch.numbers for batch in batches]
    return Mixing(
        steps=tuple(batch.step for batch in batches),
        width=_WIDTH,
        height=_ROW * len(batches),
        classes=_bars(rows) if labels else (),
        places=_ticks(numbers, rows, view.summary().records),
        in_batch=len(labels) or None,
        uniform=_uniform(view, query, len(batches[0].numbers)) if labels else None,
        shards=batches[0].shards,
        pending=found.pending,
    )


def _bars(rows: Sequence[Sequence[int | None]]) -> tuple[Shape, ...]:
    """Draw for each batch a bar of its classes, by label."""
    paths: dict[int | None, list[str]] = {}
    for row, labels in enumerate(rows):
        left, counts = 0.0, Counter(labels)
        for label in sorted(counts, key=lambda one: (one is None, one or 0)):
            width = counts[label] * _WIDTH / len(labels)
            box = f"M{left:.1f} {row * _ROW}h{width:.1f}v{_BAR}h-{width:.1f}z"
            paths.setdefault(label, []).append(box)
            left += width
    return _shapes(paths)


def _ticks(
    numbers: Sequence[Sequence[int]], rows: Sequence[Sequence[int | None]], records: int
) -> tuple[Shape, ...]:
    """Draw for each batch a tick where each of its records lies in the dataset."""
    paths: dict[int | None, list[str]] = {}
    for row, (own, labels) in enumerate(zip(numbers, rows, strict=True)):
        places = [round(number * (_WIDTH - 2) / records) for number in own]
        for place, label in sorted(set(zip(places, labels, strict=True)), key=lambda one: one[0]):
            paths.setdefault(label, []).append(f"M{place} {row * _ROW}h2v{_BAR}h-2z")
    return _shapes(paths)


def _shapes(paths: dict[int | None, list[str]]) -> tuple[Shape, ...]:
    return tuple(Shape(label, "".join(parts)) for label, parts in paths.items())


def _uniform(view: View, query: Query, count: int) -> float | None:
    """Return the mean number of different classes among `count` records of all; None: not yet."""
    sizes = [one.count for one in view.histograms(query).classes if one.count]
    total = sum(sizes)
    if count > total:
        return None

    def log_choices(records: int) -> float:  # ways to choose `count` of them, but for a factor
        return math.lgamma(records + 1) - math.lgamma(records - count + 1)

    missing = (log_choices(total - size) for size in sizes if total - size >= count)
    return len(sizes) - sum(math.exp(one - log_choices(total)) for one in missing)


# --- histograms -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram, and the values that it counts."""

    x: float
    y: float
    width: float
    height: float
    count: int
    low: str
    high: str
    where: tuple[str, str]  # the conditions that choose its records


@dataclass(frozen=True)
class Tick:
    """A number below a histogram."""

    x: float
    text: str
    anchor: str


@dataclass(frozen=True)
class Histogram:
    """A histogram, to be drawn: bars above an axis, all of one width whatever their edges."""

    name: str
    width: int
    height: int
    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]
    most: int
    total: int


@dataclass(frozen=True)
class ClassBar:
    """How many records a class has, and how long its bar is: percent of the longest one."""

    label: int | None
    name: str
    records: int
    percent: float


def histogram(bins: Bins, width: int = 480, height: int = 120) -> Histogram:
    """Draw a histogram of numbers."""
    show = show_size if bins.name == "bytes" else _show_number
    shown = list(map(show, bins.edges))
    most, each = max(bins.counts, default=0), width / max(1, len(bins.counts))
    bars = []
    for number, count in enumerate(bins.counts):
        tall = count / most * height if most else 0.0
        low, high = bins.edges[number : number + 2]
        below = "<=" if number == len(bins.counts) - 1 else "<"
        where = (f"{bins.name}>={low!r}", f"{bins.name}{below}{high!r}")
        bars.append(
            Bar(
                x=round(number * each, 2),
                y=round(height - tall, 2),
                width=round(each * 0.86, 2),
                height=round(tall, 2),
                count=count,
                low=shown[number],
                high=shown[number + 1],
                where=where,
            )
        )
    last = len(shown) - 1
    places = sorted({round(last * part / 4) for part in range(5)}) if last > 0 else []
    ticks = tuple(
        Tick(round(at * each, 2), shown[at], {0: "start", last: "end"}.get(at, "middle"))
        for at in places
    )
    return Histogram(bins.name, width, height, tuple(bars), ticks, most, sum(bins.counts))


def _show_number(value: float) -> str:
    """Write a number below a histogram: whole ones as such, others with three digits."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:,.3g}"


def class_bars(counts: Sequence[ClassCount], by: str, most: int) -> tuple[ClassBar, ...]:
    """Return the bars of at most so many classes. by: "label", "most" or "fewest" records first."""
    if by != "label":
        counts = sorted(counts, key=lambda one: -one.count if by == "most" else one.count)
    longest = max((one.count for one in counts), default=0)
    return tuple(
        ClassBar(
            one.label,
            "none" if one.label is None else printable(one.name or str(one.label)),
            one.count,
            round(100 * one.count / longest, 2) if longest else 0.0,
        )
        for one in counts[:most]
    )
