"""The picture of a demo: bars of images a second, a dot for each read of the disk, two proofs.

A row of panels for each folder of images. To the left bars, by where the images lie; to the right
the reads that one pass asks of the disk, as files and as shards. Below, what a flipped bit does,
and the batches of a run that was killed.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardio.tuning.plot import render

from .show import WAYS, Demo, Part, gain_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's blue and sky blue, and a grey: apart also for the colour-blind, and in print.
COLOURS: Final = {"folder": "#a8a8a8", "dataloader": "#8cc6ec", "shardloader": "#0072b2"}
NAMES: Final = {
    "folder": "image folder",
    "dataloader": "shards, DataLoader",
    "shardloader": "shards, ShardLoader",
}
_INK, _SOFT, _RED, _GREEN = "#222222", "#666666", "#c1272d", "#009e73"
_MOST_DOTS: Final = 4_000  # more would be a grey field: then a dot stands for several reads
_DPI: Final = 140


def draw(found: Demo, kind: str) -> bytes:
    """Return the content of such a file. HTML holds the picture as SVG."""
    if kind == "html":
        svg = draw(found, "svg").decode().partition("<svg")
        head = '<!doctype html><meta name="color-scheme" content="light dark">'
        return f"{head}<title>shardio demo</title>\n<svg{svg[2]}".encode()
    style = {"font.family": "DejaVu Sans"}
    return render(partial(_figure, found), kind, style, dpi=_DPI, facecolor="white")


def _figure(found: Demo) -> Figure:
    """Draw the whole picture."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    parts = len(found.parts)
    high = 1.5 + 2.55 * parts + 1.3
    figure = Figure(figsize=(11.5, high))
    figure.text(
        0.04, 1 - 0.36 / high, "The same images, the same crops: as files, and as shards",
        fontsize=17, fontweight="bold", color=_INK, va="center",
    )  # fmt: skip
    below = f"image folder with {found.pil}; {found.workers} workers each; {found.cores:g} cores"
    figure.text(0.04, 1 - 0.7 / high, below, fontsize=10, color=_SOFT, va="center")
    figure.legend(
        [Patch(color=COLOURS[way]) for way in WAYS], [NAMES[way] for way in WAYS],
        loc="center left", bbox_to_anchor=(0.034, 1 - 1.02 / high), ncols=3, frameon=False,
        fontsize=10.5, handlelength=1.1, handleheight=1.1, columnspacing=1.8,
    )  # fmt: skip
    for number, part in enumerate(found.parts):
        bottom = (high - 1.62 - 2.55 * number - 1.95) / high
        _bars(figure.add_axes((0.145, bottom, 0.53, 1.95 / high)), part)
        _dots(figure.add_axes((0.7, bottom, 0.275, 1.95 / high)), part)
    _flipped(figure.add_axes((0.04, 0.15 / high, 0.48, 0.9 / high)), found)
    _resumed(figure.add_axes((0.53, 0.15 / high, 0.445, 0.9 / high)), found)
    return figure


def _bars(axes: Axes, part: Part) -> None:
    """Draw three bars for each place that the images lie at; ShardLoader's with its gain."""
    wide, high = part.sides
    name = part.name.removesuffix(", made for this")
    name = name if len(name) <= 36 else "..." + name[-33:]
    title = f"{name}: {part.images:,} of about {wide} x {high} pixels, images/s"
    _bare(axes, title, x=-0.198, pad=9)
    measured = [(place, row) for place, row in enumerate(part.rows) if row.images_per_s]
    most = max((max(row.images_per_s.values()) for _, row in measured), default=0.0)
    axes.set_xlim(0, max(most, 1e-9) * 1.24)
    axes.set_ylim(len(part.rows) - 0.45, -0.55)
    names = [row.name.replace("on a disk of ", "on a disk of\n") for row in part.rows]
    axes.set_yticks(range(len(names)), names, fontsize=10, color=_INK, linespacing=1.15)
    axes.tick_params(length=0)
    for way, at in zip(WAYS, (-0.27, 0.0, 0.27), strict=True):
        rates = [row.images_per_s[way] for _, row in measured]
        bars = axes.barh([place + at for place, _ in measured], rates, 0.25, color=COLOURS[way])
        ink = _SOFT if way == "folder" else _INK
        axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=4, fontsize=8.5, color=ink)
    for place, row in enumerate(part.rows):
        if row.gain is None:
            axes.text(0, place, "  not measured here", va="center", fontsize=9, color=_SOFT)
            continue
        gain = gain_text(row.gain)
        axes.annotate(
            gain if gain != "none" else "no gain",
            (1, place + 0.05), xycoords=axes.get_yaxis_transform(), ha="right", va="center",
            fontsize=15 if row.gain >= 1.05 else 10, fontweight="bold",
            color=COLOURS["shardloader"] if row.gain >= 1.05 else _SOFT,
        )  # fmt: skip


def _dots(axes: Axes, part: Part) -> None:
    """Draw a dot for each read of the disk: a field of them for files, and one for shards."""
    _bare(axes, "reads of the disk, for one pass", pad=9)
    counted = [row.requests for row in part.rows if {"folder", "shardloader"} <= set(row.requests)]
    if not counted:
        axes.text(0, 0.5, "not counted here", va="center", fontsize=9, color=_SOFT)
        return
    reads = counted[0]
    each = max(1, -(-reads["folder"] // _MOST_DOTS))
    rows = 40  # of the field for files: those for shards are as large
    step = 0.8 / rows
    columns = max(1, -(-max(reads["folder"] // each, 1) // rows))
    across = min(0.5 / columns, 2 * step)
    for way, left in (("folder", 0.0), ("shardloader", 0.56)):
        column, row = np.divmod(np.arange(max(1, round(reads[way] / each))), rows)
        axes.scatter(left + column * across, 0.8 - row * step, s=2.6, color=COLOURS[way],
                     linewidths=0, clip_on=False)  # fmt: skip
        axes.text(left, 0.94, f"{reads[way]:,}", fontsize=13, fontweight="bold",
                  color=COLOURS[way] if way != "folder" else "#777777", va="center")  # fmt: skip
    if each > 1:
        axes.text(0.56, 0.02, f"a dot: {each} reads", fontsize=8, color=_SOFT)


def _flipped(axes: Axes, found: Demo) -> None:
    """Write what a flipped bit does to an image folder, and to shards."""
    _bare(axes, "one bit flipped on the disk", pad=4)
    damage = found.damage
    if damage is None:
        return
    said = "an error"
    if damage.file_error is None:
        said = f"no error, {damage.file_changed:,} wrong pixels"
    _line(axes, 0.66, COLOURS["folder"], "image folder", said, _RED)
    place = re.search(r"record \d+ at byte \d+ \(key .*?\)(?=: )", damage.message)
    named = place[0] if place else damage.message.partition("\n")[0]
    _line(axes, 0.22, COLOURS["shardloader"], "shards", f"error: {named}", _GREEN)


def _line(axes: Axes, y: float, colour: str, who: str, said: str, ink: str) -> None:
    """Write who said what, behind a square of its colour."""
    axes.scatter([0.014], [y], s=110, marker="s", color=colour, linewidths=0)
    axes.text(0.04, y, who, va="center", fontsize=10, color=_INK)
    if len(said) > 62:  # half a number would be another number
        said = f"{said[:32].rpartition(' ')[0]} ... {said[-32:].partition(' ')[2] or said[-28:]}"
    axes.text(0.23, y, said, va="center", fontsize=9.5, color=ink)


def _resumed(axes: Axes, found: Demo) -> None:
    """Draw a square for each batch: of the run that was killed, and of the one that went on."""
    _bare(axes, "a run is killed, and goes on: the batches", pad=4)
    run = found.resumed
    if run is None:
        return
    step = min(0.07, 0.9 / run.batches)
    after = np.arange(run.batches) >= run.killed_after
    at = 0.012 + np.arange(run.batches) * step + np.where(after, 0.035, 0.0)
    blue = COLOURS["shardloader"]
    axes.scatter(at, np.full(len(at), 0.66), s=190, marker="s", linewidths=0,
                 color=[f"{blue}8c" if late else blue for late in after])  # fmt: skip
    axes.scatter(at, np.full(len(at), 0.22), s=190, marker="s",
                 color=_GREEN if run.equal else _RED, linewidths=0)  # fmt: skip
    for number, x in enumerate(at, 1):
        for y, text in ((0.66, str(number)), (0.22, "=")):
            axes.text(x, y, text, ha="center", va="center_baseline", fontsize=8.5, color="white",
                      fontweight="bold")  # fmt: skip
    cut = 0.012 + run.killed_after * step - step / 2 + 0.0175
    axes.plot([cut, cut], [0.02, 0.9], color=_RED, linewidth=1.6, linestyle=(0, (3, 2)))


def _bare(axes: Axes, title: str, **place: Any) -> None:
    """Write a title, and leave out frame and ticks; both axes go from 0 to 1."""
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1))
    axes.set_title(title, fontsize=11, fontweight="bold", color=_INK, loc="left", **place)
