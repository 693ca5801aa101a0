"""Draws what the GPU and the trainer did during some steps, for each loader of a stored result.

.venv/bin/python tools/draw_trace.py benchmarks/results/gpu.transfers.json > docs/gpu-trace.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from picture import page

COLOURS = {  # of benchmarks/trace.py; each is legible on white and on black
    "step": "#3d7fc1",
    "copy to the GPU": "#d0802e",
    "cast, decode": "#3d9a62",
    "next()": "#b0568a",
}
WIDTH, LEFT, RIGHT = 860, 130, 90
LANE, GAP, HEAD, TITLE = 22, 6, 34, 26
LEAST = 1.2  # the width of a bar that can be seen


def main(path: str) -> None:
    """Print the picture. raw["lanes"] of the result has what `trace.picture` made, by entry."""
    found = json.loads(Path(path).read_text())
    pictures: dict[str, dict[str, Any]] = found["raw"]["lanes"]
    panel = TITLE + len(COLOURS) * (LANE + GAP) + HEAD
    lines = [line for i, name in enumerate(pictures) for line in _panel(name, pictures[name], i)]
    sys.stdout.write(page(WIDTH, 10 + panel * len(pictures), lines))


def _panel(name: str, made: dict[str, Any], number: int) -> Iterator[str]:
    """Yield the lines of SVG of one loader."""
    top = 10 + number * (TITLE + len(COLOURS) * (LANE + GAP) + HEAD)
    scale = (WIDTH - LEFT - RIGHT) / made["ms"]
    low = top + TITLE + len(COLOURS) * (LANE + GAP)
    yield _text(LEFT, top + 14, name, 14, 'font-weight="bold"')
    for asked in made["asked"]:
        x = LEFT + asked * scale
        yield (
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{top + TITLE - 3}" y2="{low}" '
            'stroke="currentColor" stroke-width="0.6" opacity="0.5"/>'
        )
        yield _text(x, low + 13, f"{asked:.0f}", 11, 'class="faint" text-anchor="middle"')
    for i, lane in enumerate(COLOURS):
        y = top + TITLE + i * (LANE + GAP)
        yield _text(LEFT - 8, y + 15, lane, 12, 'text-anchor="end"')
        for begin, end in made["lanes"][lane]["intervals"]:
            x, wide = LEFT + begin * scale, max(LEAST, (end - begin) * scale)
            yield (
                f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{LANE}" '
                f'fill="{COLOURS[lane]}"/>'
            )
        yield _text(WIDTH - RIGHT + 8, y + 15, f"{made['lanes'][lane]['share']:.1%}", 12)
    yield _text(WIDTH - RIGHT + 24, low + 13, "ms", 11, 'class="faint"')


def _text(x: float, y: float, words: str, size: int, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" {more}>{escape(words)}</text>'


if __name__ == "__main__":
    main(sys.argv[1])
