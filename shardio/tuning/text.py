"""The text and the JSON of this room's results: numbers, ranges, paragraphs and tables.

Every result (Explanation, Tuning, Bench) prints itself, in a notebook too: `print(result)`. Its
`as_dict()` is the same as plain JSON.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ..units import show_count, show_size


class Plain:
    """A dataclass that can be given as plain JSON."""

    def as_dict(self) -> dict[str, Any]:
        """Return the public fields as plain JSON, one member each. Tuples become lists."""
        names = (one.name for one in fields(self))  # type: ignore[arg-type]
        return {name: _as_json(getattr(self, name)) for name in names if not name.startswith("_")}


class Result(Plain):
    """A result that prints itself."""

    def __repr__(self) -> str:
        return str(self)  # as a notebook shows it


def _as_json(value: Any) -> Any:
    """Return a value as plain JSON: results as objects, tuples as lists."""
    if isinstance(value, Plain):
        return value.as_dict()
    if isinstance(value, (tuple, list)):
        return [_as_json(one) for one in value]
    return value


def paragraph(text: str, width: int, first: str = "", later: str = "") -> str:
    """Wrap a text to lines of this width. first, later: what the first line and others begin with.

    Options and paths are not broken.
    """
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(lines: Sequence[Sequence[str]], *, left: tuple[int, ...] = (-1,)) -> list[str]:
    """Align the cells of a table's lines to the right. left: columns that are aligned to the left.

    All lines have equally many cells.
    """
    columns = list(zip(*lines, strict=True))
    to_left = [number % len(columns) for number in left]
    for number, column in enumerate(columns):
        put = str.ljust if number in to_left else str.rjust
        width = max(map(len, column))
        columns[number] = tuple(put(cell, width) for cell in column)
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def show_number(value: float) -> str:
    """Write a number with three digits: 60,611, 46.2, 0.0401."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def show_cores(count: float) -> str:
    """Write a number of cores: 1 core, 2.5 cores."""
    return f"{count:,.3g} core" + ("" if count == 1 else "s")


def show_buffer(buffer: int | None) -> str:
    """Write a shuffle buffer of so many records: 10,000; None: all."""
    return "all" if buffer is None else f"{buffer:,}"


def show_took(seconds: float | None) -> str:
    """Write how long it took, to stand behind a list: "; took 2.1 s". None: ""."""
    return "" if seconds is None else f"; took {seconds:,.1f} s"


def show_range(least: int, most: int) -> str:
    """Write a range of counts: 12 to 13, or 12."""
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def show_sizes(least: int, most: int) -> str:
    """Write a range of sizes: 2.8 to 3.1 MiB, or 2.8 MiB."""
    low, high = show_size(least), show_size(most)
    if low == high:
        return low
    number, unit = low.split(" ")
    return f"{number} to {high}" if high.endswith(f" {unit}") else f"{low} to {high}"


def show_choices(values: Sequence[int], noun: str) -> str:
    """Write counts to choose from: 1, 2, 4 or 8 workers; of many the first ones and the last."""
    shown = [f"{value:,}" for value in values]
    if len(shown) > 12:
        shown = [*shown[:10], "...", shown[-1]]
    if len(shown) == 1:
        return show_count(values[0], noun)
    return f"{', '.join(shown[:-1])} or {shown[-1]} {noun}s"


def show_seconds(seconds: float) -> str:
    """Write seconds with three digits, in the unit that suits: 850 us, 50.1 ms, 1.9 s."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    value, unit = (seconds * 1e3, "ms") if seconds < 1 else (seconds, "s")
    return f"{value:,.0f} {unit}" if value >= 99.5 else f"{value:.3g} {unit}"
