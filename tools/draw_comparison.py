"""Draws docs/comparison.svg from the stored comparison: a bar for each row, and its spread.

.venv/bin/python tools/draw_comparison.py [RESULT.json] > docs/comparison.svg
.venv/bin/python tools/draw_comparison.py --five [RESULT.json] > docs/speed.svg   # for the README
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from picture import BARE, OURS, RIVAL, page, text

RESULT = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "compare.json"
ROW, NAMES, BARS, VALUE, GAP, TOP = 18, 270, 170, 70, 20, 56  # pixels
PANELS = (  # how a table's title begins, what its bars are, whether more is better
    (("photographs", "images_per_s", True), ("CIFAR", "images_per_s", True)),
    (("Raw records, one by one, in order, warm, one process, 110 KB", "us", False),
     ("Raw records, one by one, in order, warm, one process, 0.9 KB", "us", False)),
)  # fmt: skip
# Of the README: shardio's best, and four that people use; of WebDataset and tf.data, and of
# MosaicML and LitData, the faster one. tf.data is the fastest of all rivals.
FIVE = {
    "shardio ShardLoader, tile JPEG, core": "shardio",
    "tf.data": "tf.data",
    "FFCV (re-encoded)": "FFCV",
    "image folder + DataLoader": "image folder + DataLoader",
    "LitData": "LitData",
}
# Pixels of the picture and of a bar's row. A page on a phone shows it 350 wide: 16 become 12.
WIDE, HIGH, MARGIN = 480, 54, 16


def draw_five(found: dict[str, Any]) -> str:
    """The five bars of the README: photographs, images/s."""
    table = next(one for one in found["tables"] if one["title"].startswith("photographs"))
    rates = {FIVE[row["name"]]: row["images_per_s"] for row in table["rows"] if row["name"] in FIVE}
    scale = (WIDE - 2 * MARGIN - 60) / max(rate["max"] for rate in rates.values())
    lines = [text(MARGIN, 30, "Photographs a second, decoded and cropped", size=18, weight="bold")]
    y = 44
    for name, rate in sorted(rates.items(), key=lambda one: -one[1]["median"]):
        low, middle, high = (rate[one] * scale for one in ("min", "median", "max"))
        colour, weight = (OURS, "bold") if name == "shardio" else (RIVAL, "normal")
        lines += [
            text(MARGIN, y + 18, name, size=16, weight=weight),
            f'<rect x="{MARGIN}" y="{y + 24}" width="{middle:.1f}" height="22" fill="{colour}"/>',
            f'<path d="M{MARGIN + low:.1f} {y + 35}H{MARGIN + high:.1f}" stroke="currentColor"/>',
            text(MARGIN + high + 8, y + 41, _number(rate["median"]), size=16, weight=weight),
        ]
        y += HIGH
    _, _, size, _, workers = table["title"].split(", ")
    machine = f"{found['machine']['cpu']}, {found['machine']['cores']} cores, {workers}"
    for said in (
        f"{size}; all in memory; medians, with least and most",
        f"{machine}; {found['time'][:10]}",
    ):
        y += 20
        lines.append(text(MARGIN, y, said, size=14))
    return page(WIDE, y + 14, lines)


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
    legend = [text(16, 24, "shardio beside its rivals", size=16, weight="bold")]
    legend.append(text(16, 42, head, size=11))
    for i, (colour, whose) in enumerate(
        ((OURS, "shardio"), (RIVAL, "others"), (BARE, "no loader: what a decoder or a file allows"))
    ):
        x = 250 + 90 * i
        legend.append(f'<circle cx="{x + 6}" cy="20" r="6" fill="{colour}"/>')
        legend.append(text(x + 16, 24, whose, size=11))
    return page(width, height, [*legend, *out])


def _panel(table: dict[str, Any], key: str, more: bool, x: int, y: int) -> tuple[list[str], int]:
    """Its lines, best row first, and where it ends."""
    rows = [row for row in table["rows"] if row[key]]
    rows.sort(key=lambda row: row[key]["median"], reverse=more)
    longest = max(row[key]["max"] for row in rows)
    unit = f"{table['columns'][key]}, {'more' if more else 'less'} is better"
    title = table["title"].partition(", batches")[0].replace(", one process", "")
    lines = [text(x + 16, y + 14, title[0].upper() + title[1:], weight="bold")]
    lines.append(text(x + 16, y + 29, unit, size=11))
    y += 38
    for row in rows:
        low, middle, high = (row[key][one] / longest * BARS for one in ("min", "median", "max"))
        left, centre = x + NAMES, y + ROW / 2
        lines += [
            text(left - 6, y + 13, row["name"], size=11, anchor="end"),
            f'<rect x="{left}" y="{y + 2}" width="{middle:.1f}" height="{ROW - 4}" '
            f'fill="{_colour(row["name"])}"/>',
            f'<path d="M{left + low:.1f} {centre:g}H{left + high:.1f}" stroke="currentColor"/>',
            text(left + high + 5, y + 13, _number(row[key]["median"]), size=11),
        ]
        y += ROW
    return lines, y + GAP


def _colour(name: str) -> str:
    if name.startswith(("shardio", "ShardDataset")):
        return OURS
    return BARE if name.startswith(("bare loop", "packed file")) else RIVAL


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    five, *given = sys.argv[1:] if "--five" in sys.argv[1:2] else ["", *sys.argv[1:]]
    stored = json.loads(Path(*given or [RESULT]).read_text())
    sys.stdout.write(draw_five(stored) if five else draw(stored))
