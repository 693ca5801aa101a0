"""Draws docs/jpeg-tiles.svg: the tiles under a crop, in picture and file, by the real code.

.venv/bin/python tools/draw_tiles.py > docs/jpeg-tiles.svg
"""

from __future__ import annotations

import io
import sys

import numpy as np
from picture import page
from PIL import Image

from shardio.images.jpeg_rewrite import rewrite
from shardio.images.jpeg_tiles import tiles as find_tiles

W, H = 512, 256
BOX = (176, 84, 344, 212)  # left, top, right, bottom of the crop
LEFT, TOP, WIDTH, HEIGHT = 20, 44, 808, 486
FRAME = "#e8442c"

y, x = np.mgrid[0:H, 0:W]
sky = np.stack([150 - y / 3 + x / 16, 190 - y / 4, 235 - y / 5], -1)
sun = np.exp(-((x - 380) ** 2 + (y - 60) ** 2) / 1800)[..., None] * (110, 60, -40)
far = (y > 150 + 40 * np.sin(x / 70))[..., None]
near = (y > 200 + 24 * np.sin(x / 45 + 2))[..., None]
scene = np.where(near, (66, 110, 60), np.where(far, (104, 134, 122), sky + sun))
grain = np.random.default_rng(0).normal(0, 9, (H, W, 1)) * np.where(
    near, 2.0, np.where(far, 1, 0.3)
)
scene = np.clip(scene + grain, 0, 255).astype(np.uint8)

plain = io.BytesIO()
Image.fromarray(scene).save(plain, "JPEG", quality=90, subsampling="4:2:0")
data = rewrite(plain.getvalue())
assert isinstance(data, bytes)
tiles = find_tiles(data)
assert tiles is not None
cut = tiles.cut(BOX)
columns = range(cut.left // tiles.tile_width, -(-(cut.left + cut.width) // tiles.tile_width))
rows = range(cut.top // tiles.tile_height, -(-(cut.top + cut.height) // tiles.tile_height))
out: list[str] = []


def text(px: float, py: float, words: str, size: int = 13, **more: str) -> None:
    style = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    out.append(f'<text x="{px:g}" y="{py:g}" font-size="{size}"{style}>{words}</text>')


def cell(px: float, py: float, wide: float, high: float, row: int, column: int) -> None:
    """A tile in the mean colour of its pixels; paler where it is not decoded."""
    th, tw = tiles.tile_height, tiles.tile_width
    part = scene[row * th : (row + 1) * th, column * tw : (column + 1) * tw]
    colour = "#" + "".join(f"{int(v):02x}" for v in part.mean((0, 1)))
    pale = "" if row in rows and column in columns else ' opacity="0.28"'
    out.append(
        f'<rect x="{px:g}" y="{py:g}" width="{wide:g}" height="{high:g}" fill="{colour}" '
        f'class="gap" stroke="white" stroke-width="0.6"{pale}/>'
    )


def frame(px: float, py: float, wide: float, high: float, dash: str = "") -> None:
    out.append(
        f'<rect x="{px:g}" y="{py:g}" width="{wide:g}" height="{high:g}" fill="none" '
        f'stroke="{FRAME}" stroke-width="2"{dash}/>'
    )


text(LEFT, 26, "The picture: a grid of tiles. The crop (red) and its margin need some of them.")
for row in range(tiles.rows):
    for column in range(tiles.columns):
        at = LEFT + column * tiles.tile_width, TOP + row * tiles.tile_height
        cell(*at, tiles.tile_width, tiles.tile_height, row, column)
frame(LEFT + BOX[0], TOP + BOX[1], BOX[2] - BOX[0], BOX[3] - BOX[1])

aside = LEFT + W + 20
for number, words in enumerate(
    (
        f"{W} x {H} pixels, 4:2:0",
        f"{tiles.columns} x {tiles.rows} tiles of {tiles.tile_width} x {tiles.tile_height}",
        f"crop: {BOX[2] - BOX[0]} x {BOX[3] - BOX[1]} pixels",
        f"cut: {cut.width} x {cut.height} pixels,",
        f"{len(columns) * len(rows)} of {tiles.columns * tiles.rows} tiles,",
        f"{len(cut.data):,} of {len(data):,} bytes",
    )
):
    text(aside, TOP + 20 + 22 * number, words)

bar, high = TOP + H + 44, 34
text(
    LEFT, bar - 12, "The file: header (h), then the tiles row by row, a restart marker behind each."
)
starts, ends = tiles._starts.ravel(), tiles._ends.ravel()
HEAD = 16
scale = (WIDTH - 2 * LEFT - HEAD) / int(ends[-1] - starts[0])
out.append(f'<rect x="{LEFT}" y="{bar}" width="{HEAD - 1}" height="{high}" fill="#888888"/>')
text(LEFT + 4, bar + 22, "h", fill="white")
for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
    px = LEFT + HEAD + (start - int(starts[0])) * scale
    cell(px, bar, (end - start) * scale, high, *divmod(number, tiles.columns))

low = bar + high + 58
text(
    LEFT, low - 12, "The cut: a small JPEG of its own, with its own width and height in the header."
)
out.append(f'<rect x="{LEFT}" y="{low}" width="{HEAD - 1}" height="{high}" fill="#888888"/>')
text(LEFT + 4, low + 22, "h", fill="white")
px = float(LEFT + HEAD)
for row in rows:
    first, last = row * tiles.columns + columns[0], row * tiles.columns + columns[-1]
    a = LEFT + HEAD + (int(starts[first]) - int(starts[0])) * scale
    wide = (int(ends[last]) - int(starts[first])) * scale
    out.append(
        f'<path d="M{a + wide / 2:.1f} {bar + high + 2} L{px + wide / 2:.1f} {low - 30}" '
        f'stroke="{FRAME}" stroke-width="1" fill="none" opacity="0.6"/>'
    )
    for column in columns:
        number = row * tiles.columns + column
        wide = (int(ends[number]) - int(starts[number])) * scale
        cell(px, low, wide, high, row, column)
        px += wide
frame(LEFT, low, px - LEFT, high)

sys.stdout.write(page(WIDTH, HEIGHT, out))
