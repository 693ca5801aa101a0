"""Draws docs/order.svg: one epoch of 32 records, from shards to batches, by the real arithmetic.

.venv/bin/python tools/draw_order.py > docs/order.svg
"""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
from picture import page

from shardio.order.epoch import Epoch
from shardio.order.partition import Partition

SHARDS = (10, 4, 12, 6)
COLOURS = ("#4477aa", "#ee9944", "#44aa88", "#bb5577")  # told apart without colour vision, too
CELL, LEFT, WIDTH, HEIGHT = 24, 20, 808, 478
BATCH, RANKS, WORKERS = 4, 2, 2
FAINT = {"fill": "#666666", "class": "faint"}

epoch = Epoch(
    np.array(SHARDS), seed=7, epoch=0, spans=4, unit=2, shuffle_buffer=12
)  # fmt: skip
N, C = epoch.records, epoch.spans
shard_of, record_of = (column.tolist() for column in epoch.locate(np.arange(N)))
out: list[str] = []


def text(
    x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", **more: str
) -> None:
    style = "".join(
        f' {name.strip("_").replace("_", "-")}="{value}"' for name, value in more.items()
    )
    out.append(
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{style}>{words}</text>'
    )


def cell(place: int, y: float, virtual: int) -> None:
    """One record, at a place of a row: its colour is its shard, its number that in the shard."""
    x = LEFT + place * CELL
    out.append(
        f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{COLOURS[shard_of[virtual]]}" '
        'class="gap" stroke="white" stroke-width="1.5"/>'
    )
    text(x + CELL / 2, y + 16, str(record_of[virtual]), size=11, anchor="middle", fill="white")


def bracket(first: int, last: int, y: float, words: str, *, down: bool = True) -> None:
    a, b, tip = LEFT + first * CELL + 2, LEFT + last * CELL - 2, 5 if down else -5
    out.append(
        f'<path d="M{a} {y} v{tip} H{b} v{-tip}" fill="none" stroke="currentColor" '
        'stroke-width="1.2"/>'
    )
    text((a + b) / 2, y + (19 if down else -10), words, size=12, anchor="middle")


def step(y: float, number: int, words: str) -> None:
    text(LEFT, y, f"{number}", font_weight="bold")
    text(LEFT + 16, y, words)


step(24, 1, "The shards, in an order drawn by (seed, epoch). Their records are one sequence of N.")
for place in range(N):
    cell(place, 36, place)
edges = [0, *(i for i in range(1, N) if shard_of[i] != shard_of[i - 1]), N]
for a, b in pairwise(edges):
    bracket(a, b, 64, f"shard {shard_of[a]}")

step(
    116,
    2,
    f"It is cut into C = {C} spans (default 64), which are read side by side.",
)
for place in range(N):
    cell(place, 128, place)
for span in range(C):
    bracket(epoch.span_start(span), epoch.span_start(span + 1), 156, f"span {span}")

step(
    208,
    3,
    f"Each span hands out its records through a window of {epoch.window}, its part of the buffer.",
)
drawn = []
for span in range(C):
    places = epoch.position(span, epoch.span_order(span).take(epoch.span_records(span))).tolist()
    drawn.append(places)
    for i, virtual in enumerate(places):
        cell(epoch.span_start(span) + i, 220, virtual)
    bracket(epoch.span_start(span), epoch.span_start(span + 1), 248, f"span {span}, shuffled")

step(
    300,
    4,
    f"Units of {epoch.unit} are dealt from the spans in turn: the order of the epoch. "
    "It knows no ranks and no workers.",
)
place = 0
for unit in range(epoch.units):
    span, first = unit % C, unit // C * epoch.unit
    for virtual in drawn[span][first : first + epoch.unit]:
        cell(place, 312, virtual)
        place += 1
for unit in range(epoch.units):
    x = LEFT + unit * epoch.unit * CELL + CELL
    text(x, 350, f"span {unit % C}", size=10, anchor="middle", **FAINT)

step(
    392,
    5,
    f"{BATCH} in a row are a batch. Ranks take batches in turn, and so do the workers of a rank.",
)
for rank in range(RANKS):
    share = Partition(epoch, BATCH, rank=rank, world_size=RANKS)
    for i in range(share.steps):
        first = share.first_unit(i) * epoch.unit
        bracket(first, first + BATCH, 404, f"rank {rank} step {i}")
        text(LEFT + (first + BATCH / 2) * CELL, 440, f"worker {i % WORKERS}", size=11,
             anchor="middle", **FAINT)  # fmt: skip
text(
    LEFT,
    466,
    "Colour: shard. Number: record in the shard.",
    size=11,
    fill="#666666",
    class_="faint",
)

sys.stdout.write(page(WIDTH, HEIGHT, out))
