"""Draws docs/gpu.svg from what an H100 measured: images/s into the GPU, and how long it was idle.

.venv/bin/python tools/draw_gpu.py [RESULT.json] > docs/gpu.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from picture import OURS, RIVAL, page, text

RESULT = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "gpu_h100.json"
INTO = "raw pixels into the GPU without a model"  # in a table's title
FIRST, SECOND = "training ResNet-50 in bf16", "kernels of Triton, and raw pixels"
LEFT = (  # a row of INTO, and its name here
    ("ShardLoader", "shardio ShardLoader"),
    ("timm", "timm's PrefetchLoader"),
    ("prefetch", "shardio.prefetch, DataLoader"),
    ("DataLoader, pinned", "DataLoader, pinned"),
)
WORKERS, TORCH, TRITON = (  # headings of the right: who decodes, by whose kernels, and when
    "workers decode",
    'decode="cuda", kernels of torch',
    'decode="cuda", kernels of Triton',
)
RIGHT = (  # a heading, what begins its table's title, its rows and their names here
    (WORKERS, FIRST, (("JPEG", "JPEG"), ("tile JPEG", "tile JPEG"), ("raw pixels", "raw pixels"))),
    (TORCH, FIRST, (('JPEG, decode="cuda"', "JPEG, nvImageCodec"),
                    ('tile JPEG, decode="cuda"', "tile JPEG, nvImageCodec"))),
    (TRITON, SECOND, (("JPEG, nvImageCodec, 2 threads", "JPEG, nvImageCodec"),
                      ("tile JPEG, nvImageCodec, 2 threads", "tile JPEG, nvImageCodec"),
                      ("JPEG, torchvision", "JPEG, torchvision"))),
)  # fmt: skip
ROW, TOP, HALF = 22, 92, 440  # pixels: of a row, above the rows, of a panel
BARS = 156  # the longest bar of a panel


def draw(found: dict[str, Any]) -> str:
    """Draw both panels, side by side."""
    left, right = list(into_the_gpu(found)), list(idle(found))
    high = TOP + ROW * (sum(1 + len(rows) for _, _, rows in RIGHT) + 0.5)
    days = " and ".join(found["data"]["runs"])
    machine = found["machine"]
    under = (
        f"{found['data']['gpu']}, {machine['cores']} cores, {days}, one round each. "
        "Idle: no kernel runs, in a trace of 12 steps."
    )
    return page(2 * HALF, high + 24, [*left, *right, text(16, high + 8, under, size=12)])


def into_the_gpu(found: dict[str, Any]) -> Iterator[str]:
    """Yield the left panel: images/s."""
    rows = _rows(found, INTO)
    rates = {name: rows[name]["images_per_s"]["median"] for name, _ in LEFT}
    yield text(16, 28, "Into the GPU, without a model", size=16, weight="bold")
    yield text(16, 48, "images/s of raw pixels, 224 x 224, batches of 256;", size=12)
    yield text(16, 64, "more is better; the first day", size=12)
    for i, (name, here) in enumerate(LEFT):
        length = rates[name] / max(rates.values()) * BARS
        colour = OURS if here.startswith("shardio") else RIVAL
        yield from _row(214, TOP + i * ROW, here, length, f"{rates[name]:,.0f}", colour)


def idle(found: dict[str, Any]) -> Iterator[str]:
    """Yield the right panel: the share of the time in which the GPU had nothing to do."""
    x = HALF + 10
    yield text(x, 28, "The GPU's idle time under ResNet-50", size=16, weight="bold")
    yield text(x, 48, "share of the time, by feed; in brackets images/s of the", size=12)
    yield text(x, 64, "model, of what it takes alone; less idle is better", size=12)
    y = float(TOP - ROW)
    shares = {title: _rows(found, title) for _, title, _ in RIGHT}
    longest = max(shares[t][name]["gpu_idle"]["median"] for _, t, rows in RIGHT for name, _ in rows)
    for heading, title, rows in RIGHT:
        y += ROW
        day = next(one["title"] for one in found["tables"] if title in one["title"])[:10]
        yield text(x, y + 15, f"{heading} ({day})", size=13, weight="bold")
        for name, here in rows:
            y += ROW
            one = shares[title][name]
            share, speed = one["gpu_idle"]["median"], one["of_alone"]["median"]
            said = f"{share:.0%} ({speed:.2f})" if share >= 0.1 else f"{share:.1%} ({speed:.2f})"
            yield from _row(x + 170, y, here, share / longest * BARS, said, OURS)


def _row(x: float, y: float, name: str, length: float, said: str, colour: str) -> Iterator[str]:
    """Yield a bar that begins at x, its name before it, and its value behind it."""
    weight = "bold" if name == "shardio ShardLoader" else "normal"
    yield text(x - 8, y + 15, name, size=13, anchor="end", weight=weight)
    yield (
        f'<rect x="{x:g}" y="{y + 2:g}" width="{length:.1f}" height="{ROW - 5}" fill="{colour}"/>'
    )
    yield text(x + length + 6, y + 15, said, size=13)


def _rows(found: dict[str, Any], title: str) -> dict[str, dict[str, Any]]:
    table = next(one for one in found["tables"] if title in one["title"])
    return {row["name"]: row for row in table["rows"]}


if __name__ == "__main__":
    sys.stdout.write(draw(json.loads(Path(*sys.argv[1:] or [str(RESULT)]).read_text())))
