"""Draws docs/comparison.svg from the stored comparison: a bar for each row, and its spread.

.venv/bin/python tools/draw_comparison.py [RESULT.json] > docs/comparison.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

RESULT = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "compare.json"
# Okabe and Ito's, told apart without colour vision, too.
OURS, RIVAL, BARE = "#e69f00", "#56b4e9", "#bbbbbb"
ROW, NAMES, BARS, VALUE, GAP, TOP = 18, 270, 170, 70, 20, 56  # pixels
PANELS = (  # how a table's title begins, what its bars are, whether more is better
    (("photographs", "images_per_s", True), ("CIFAR", "images_per_s", True)),
    (("Raw records, one by one, in order, warm, one process, 110 KB", "us", False),
     ("Raw records, one by one, in order, warm, one process, 0.9 KB", "us", False)),
)  # fmt: skip


def draw(found: dict[str, Any]) -> str:
    """One column of panels for decoded streams, one for raw records."""
    width, height, out = len(PANELS) * (NAMES + BARS + VALUE + GAP), 0, []
    for column, panels in enumerate(PANELS):
        x, y = column * (NAMES + BARS + VALUE + GAP), TOP
        for begins, key, more in panels:
            table = next((t for t in found["tables"] if t["title"].startswith(begins)), None)
            if table is not None:
                lines, y = _panel(table, key, more, x, y)
                out += lines
        height = max(height, y)
    machine = found["machine"]
    head = (
        f"{machine['cpu']}, {machine['cores']} cores, {found['time'][:10]}: "
        "medians of rounds that take turns, with least and most"
    )
    legend = [_text(16, 24, "shardio beside its rivals", size=16, weight="bold")]
    legend.append(_text(16, 42, head, size=11))
    for i, (colour, whose) in enumerate(
        ((OURS, "shardio"), (RIVAL, "others"), (BARE, "no loader: what a decoder or a file allows"))
    ):
        x = 250 + 90 * i
        legend.append(f'<circle cx="{x + 6}" cy="20" r="6" fill="{colour}"/>')
        legend.append(_text(x + 16, 24, whose, size=11))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *legend,
            *out,
            "</svg>\n",
        ]
    )


def _panel(table: dict[str, Any], key: str, more: bool, x: int, y: int) -> tuple[list[str], int]:
    """Its lines, best row first, and where it ends."""
    rows = [row for row in table["rows"] if row[key]]
    rows.sort(key=lambda row: row[key]["median"], reverse=more)
    longest = max(row[key]["max"] for row in rows)
    unit = f"{table['columns'][key]}, {'more' if more else 'less'} is better"
    title = table["title"].partition(", batches")[0].replace(", one process", "")
    lines = [_text(x + 16, y + 14, title[0].upper() + title[1:], weight="bold")]
    lines.append(_text(x + 16, y + 29, unit, size=11))
    y += 38
    for row in rows:
        low, middle, high = (row[key][one] / longest * BARS for one in ("min", "median", "max"))
        left, centre = x + NAMES, y + ROW / 2
        lines += [
            _text(left - 6, y + 13, row["name"], size=11, anchor="end"),
            f'<rect x="{left}" y="{y + 2}" width="{middle:.1f}" height="{ROW - 4}" '
            f'fill="{_colour(row["name"])}"/>',
            f'<path d="M{left + low:.1f} {centre:g}H{left + high:.1f}" stroke="#333333"/>',
            _text(left + high + 5, y + 13, _number(row[key]["median"]), size=11),
        ]
        y += ROW
    return lines, y + GAP


def _colour(name: str) -> str:
    if name.startswith(("shardio", "ShardDataset")):
        return OURS
    return BARE if name.startswith(("bare loop", "packed file")) else RIVAL


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _text(
    x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="black">{escape(words)}</text>'
    )


if __name__ == "__main__":
    sys.stdout.write(draw(json.loads(Path(*sys.argv[1:2] or [RESULT]).read_text())))
