"""The pictures of a tuning, and of a bench. The only door to matplotlib.

A tuning: mixing against cost. Over one logarithmic axis of buffers, and the memory they take: how
near two measures of mixing come to a uniform shuffle, in percent of it, from 0 to 100 whatever was
found, so that noise stays as small as it is; and below, the requests of a cold epoch. Hollow points
do not do; the default and the recommended buffer are named. Other units are drawn where they were
tried.

A bench: a bar for each row, of its rate and of its CPU time, with what limits it.

As PNG, SVG, or HTML: one file, with the picture as SVG inside, and every row as a table.
"""

from __future__ import annotations

import html
import importlib.util
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..errors import DependencyError, OptionError, printable
from ..storage.local import check_target, write_file
from ..units import show_size
from .bench import Bench
from .bench_row import Row as BenchRow
from .text import show_buffer
from .tune_result import AGAIN, Row, Tuning

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS: Final = ("png", "svg", "html")
_DPI: Final = 150

Floats = Sequence[float]
Places = dict[int | None, float]  # of each shuffle buffer on the axis

# Okabe and Ito's colours, which the colour-blind can tell apart.
_CLASSES, _PAIRS, _COST, _GOOD = "#0072b2", "#d55e00", "#444444", "#009e73"
_DASHES: Final = ((9, 3), (6, 3), (4, 3), (2, 2), (1, 2))  # of other units
_RING: Final = "#c00000"
_GREY: Final = "#666666"
_LOADERS: Final = {"DataLoader": "#56b4e9", "ShardLoader": "#e69f00"}

# What paper, ink and lines of a picture as SVG become where its viewer prefers dark.
_PAPER, _INK = "#16191d", "#dddddd"
_DARK: Final = {
    **{"#ffffff": _PAPER, "#000000": _INK, "#222222": _INK, "#444444": "#bbbbbb"},
    **{"#666666": "#9a9a9a", "#0072b2": "#4aa3df", "#c00000": "#ff6b6b", "#c1272d": "#ff6b6b"},
}


def check(path: str | os.PathLike[str]) -> str:
    """Return the kind of picture that a file is to be. Call it before the work that is drawn.

    Raises OptionError for other endings, DependencyError without matplotlib, StorageError where no
    file can be written.
    """
    kind = os.path.splitext(os.fspath(path))[1].lower().removeprefix(".")
    if kind not in KINDS:
        raise OptionError(
            f"{printable(os.fspath(path), 4096)}: expected a name that ends in .png, .svg or .html"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise DependencyError(
            "a plot needs matplotlib, which is not installed: pip install 'shardio-torch[plot]'"
        )
    check_target(path)
    return kind


def draw(found: Tuning | Bench, kind: str) -> bytes:
    """Draw a result as the content of such a file: "png", "svg" or "html"."""
    if kind == "html":
        return _page(found).encode()
    # Text stays text: a third of the bytes.
    return render(partial(figure_of, found), kind, {"svg.fonttype": "none"}, dpi=_DPI)


def render(
    figure: Callable[[], Figure], kind: str, style: Mapping[Any, str], **options: Any
) -> bytes:
    """Make a figure in matplotlib's settings `style`, and return it as "png" or "svg".

    options: of savefig. The same figure gives the same bytes: there is no date in them, and their
    names do not depend on the moment.
    """
    import matplotlib

    out = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "shardio", **style}):
        figure().savefig(out, format=kind, metadata=metadata, **options)
    return _for_dark_viewers(out.getvalue()) if kind == "svg" else out.getvalue()


def _for_dark_viewers(svg: bytes) -> bytes:
    """Let a picture as SVG follow what its viewer prefers. It stays opaque, also on other pages."""
    rules = (
        f'[style*="{what}: {light}"] {{ {what}: {dark} !important }}'
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
    )
    style = "\n".join((f"svg {{ fill: {_INK} }}", *rules))
    style = f"@media (prefers-color-scheme: dark) {{\n{style}\n}}"
    return svg.replace(b" <defs>", f" <style>{style}</style>\n <defs>".encode(), 1)


def save(
    found: Any, path: str | os.PathLike[str], draw: Callable[[Any, str], bytes] = draw
) -> None:
    """Draw a result into a file, whose ending says as what. A file that exists is replaced.

    Raises OptionError, DependencyError, StorageError.
    """
    folder, name = os.path.split(os.path.abspath(path))
    write_file(folder, name, draw(found, check(path)), replace=True)


# --- the picture ----------------------------------------------------------------------------------


def figure_of(found: Tuning | Bench) -> Figure:
    """Draw a result as a figure of matplotlib."""
    return _bars(found) if isinstance(found, Bench) else _mixing_and_cost(found)


def _titled(title: str, height: float, size: int) -> Figure:
    """Make a figure, 9.6 inches wide, of this height. size: of the title, in points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, height), layout="constrained")
    figure.suptitle(title, fontsize=size, fontweight="bold")
    return figure


def _mixing_and_cost(tuning: Tuning) -> Figure:
    """Draw a tuning: how well each buffer mixes, and below the requests it costs."""
    figure = _titled(_headline(tuning), 6.6, 14)
    if not tuning.rows:
        figure.text(0.5, 0.5, "\n".join(tuning.notes), ha="center", wrap=True)
        return figure
    upper, lower, below = figure.subplots(3, 1, height_ratios=[3, 1, 0.35])
    lower.sharex(upper)
    upper.tick_params(labelbottom=False)
    kind = "classes" if tuning.labels == "label" else "tenths of the pack"
    upper.set_title(
        f"{tuning.records:,} records of {show_size(tuning.mean_bytes)} in "
        f"{tuning.shards:,} shards, {tuning.distinct:,} {kind}, batches of {tuning.batch_size:,}",
        fontsize=10.5,
        color=_GREY,
    )
    places = {row.shuffle_buffer: float(row.shuffle_buffer or 0) for row in tuning.rows}
    if None in places:  # "all": apart from the others
        places[None] = max(float(tuning.records), 2.2 * max(places.values()))
    renewed = "new neighbours: pairs of a batch that were apart in the epoch before"
    mixed = f"mixed {kind}: how many of them a batch has"
    measures = ((_PAIRS, _parted, "renews", renewed), (_CLASSES, _mixed, "mixes", mixed))
    ladder = tuning.ladder()
    if tuning.with_units:
        _others(upper, tuning, places)
    x = [places[row.shuffle_buffer] for row in ladder]
    for colour, measure, passes, label in measures:
        full = [getattr(row, passes) for row in ladder]
        _line(upper, x, [measure(tuning, row) for row in ladder], colour, full, label)
    _mixing(upper, tuning)
    _cost(lower, x, ladder)
    _buffers(lower, tuning, places)
    _mark(upper, lower, tuning, places)
    below.axis("off")
    handles, _ = upper.get_legend_handles_labels()
    below.legend(handles=handles, loc="center", ncols=2, frameon=False, fontsize=9.5)
    figure.supxlabel(_caption(tuning), fontsize=10, family="monospace")
    return figure


def _headline(tuning: Tuning) -> str:
    """Write the answer in a line."""
    best, usual = tuning.best, tuning.default
    if usual is None:
        return "Nothing to tune"
    if best is None:
        if tuning.in_class_order:
            return "Pack it again, shuffled: no buffer mixes this pack"
        return f"No buffer within {show_size(tuning.memory)} mixes well enough"
    every = best.shuffle_buffer is None
    buffer = f"all {tuning.records:,}" if every else show_buffer(best.shuffle_buffer)
    if tuning.keeps_default:
        return f"Keep the default: a shuffle buffer of {buffer} records"
    unit = "" if best.unit == usual.unit else f", in units of {best.unit:,}"
    return f"Set a shuffle buffer of {buffer} records{unit}"


def _mixed(tuning: Tuning, row: Row) -> float:
    """Return the measure of mixture that tells more, in percent of a uniform shuffle."""
    part = row.even / tuning.even if tuning.saturated else row.classes / tuning.uniform
    return 100 * max(0.0, min(part, 2 - part))  # too even is not better


def _parted(tuning: Tuning, row: Row) -> float:
    """Return the pairs that shared no batch an epoch before, in percent of a uniform shuffle."""
    return 100 * (1 - row.again) / max(1e-9, 1 - tuning.chance) if tuning.chance < 1 else 100.0


def _line(axes: Axes, x: Floats, y: Floats, colour: str, full: list[bool], label: str = "") -> None:
    """Draw a line through points. full: False where a point is hollow."""
    axes.plot(x, y, color=colour, linewidth=2.2, label=label, zorder=3)
    faces = [colour if one else "white" for one in full]
    axes.scatter(x, y, 49, faces, edgecolors=colour, linewidths=1.6, zorder=4)


def _note(axes: Axes, text: str, at: Floats, right: int, size: float, **options: Any) -> None:
    """Write a text beside a point (x, y), so many points to the right."""
    where: dict[str, Any] = {"xytext": (right, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(text, (at[0], at[1]), fontsize=size, **where, **options)


def _others(axes: Axes, tuning: Tuning, places: Places) -> None:
    """Draw the other units that were tried: thin, each named where it begins."""
    for number, unit in enumerate(sorted({row.unit for row in tuning.rows} - {tuning.unit})):
        rows = [row for row in tuning.rows if row.unit == unit]
        dashes = _DASHES[number % len(_DASHES)]
        x = [places[row.shuffle_buffer] for row in rows]
        for colour, measure in ((_CLASSES, _mixed), (_PAIRS, _parted)):
            y = [measure(tuning, row) for row in rows]
            axes.plot(x, y, color=colour, linewidth=1, dashes=dashes, alpha=0.8, zorder=2)
        _note(axes, f"unit {unit:,}", (x[0], y[0]), -4, 7.5, ha="right", color=_GREY)


def _mixing(axes: Axes, tuning: Tuning) -> None:
    """Label the axis of the mixing, and mark what is as good as a uniform shuffle."""
    axes.set_ylabel("mixing, % of a uniform shuffle")
    axes.set_ylim(0, 106)  # whatever the values: what looks small is small
    axes.set_yticks(range(0, 101, 20))
    limit = 100 * (1 - tuning.chance - AGAIN) / max(1e-9, 1 - tuning.chance)
    good = axes.axhspan(max(0.0, limit), 106, color=_GOOD, alpha=0.15, linewidth=0, zorder=0)
    good.set_label("as good as a uniform shuffle")
    axes.scatter([], [], 49, "white", edgecolors=_GREY, label="hollow: not as good")
    axes.grid(alpha=0.25)


def _cost(axes: Axes, x: Floats, ladder: Sequence[Row]) -> None:
    """Draw the requests of a cold epoch, over those of the cheapest."""
    least = max(1, min(row.requests for row in ladder))
    y = [row.requests / least for row in ladder]
    _line(axes, x, y, _COST, [row.is_cheap for row in ladder])
    axes.set_ylabel("requests\n(cheapest: 1)")
    axes.set_yscale("log")
    top = max(4.0, 1.6 * max(y))
    axes.set_ylim(0.6, top)
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 1000) if tick < top]
    axes.set_yticks(ticks, [f"{tick}x" for tick in ticks])
    said = f"a cold epoch takes about {least:,} requests to storage, at least"
    place: dict[str, Any] = {"transform": axes.transAxes, "va": "top"}
    axes.text(0.012, 0.9, said, fontsize=8.5, color=_GREY, **place)
    axes.grid(alpha=0.25)


def _buffers(axes: Axes, tuning: Tuning, places: Places) -> None:
    """Label the axis of the buffers, each with its memory."""
    axes.set_xscale("log")
    least, most = min(places.values()), max(places.values())
    margin = max(1.4, (most / least) ** 0.08)
    axes.set_xlim(least / margin, most * margin)  # also of a single one
    rows = {row.shuffle_buffer: row for row in tuning.rows}
    axes.set_xticks(
        [places[buffer] for buffer in rows],
        [f"{_short(row)}\n{_memory(row)}" for row in rows.values()],
        fontsize=8.5,
    )
    axes.minorticks_off()
    axes.set_xlabel("shuffle_buffer: records, and the memory they take")


def _short(row: Row) -> str:
    """Write a buffer in a few characters, to fit under a tick: 10k, 2M."""
    buffer = row.shuffle_buffer
    if buffer is None:
        return "all"
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if buffer >= size and buffer % size == 0:
            return f"{buffer // size}{letter}"
    return f"{buffer}"


def _memory(row: Row) -> str:
    """Write the memory of a row in as many characters as fit under a tick."""
    number, unit = show_size(row.memory_bytes).split()
    size = float(number.replace(",", ""))
    return f"{size:.0f} {unit}" if size >= 10 else f"{size:.1f} {unit}"


def _mark(upper: Axes, lower: Axes, tuning: Tuning, places: Places) -> None:
    """Draw a line at the default, and one at what is recommended; often they are one."""
    names: dict[float, list[str]] = {}
    for name, row in tuning.marked_rows():
        if name == "least bad":
            continue
        names.setdefault(places[row.shuffle_buffer], []).append(name)
    low, high = lower.get_xlim()
    for x, said in names.items():
        colour = _RING if "recommended" in said else "black"
        for axes in (upper, lower):
            axes.axvline(x, color=colour, linewidth=1.2, linestyle="--", zorder=2)
        right = x * x > low * high  # of the middle of a logarithmic axis
        side: dict[str, Any] = {"ha": "right" if right else "left", "color": colour, "zorder": 6}
        box = {"facecolor": "white", "linewidth": 0, "pad": 1.5, "alpha": 0.9}
        away = -6 if right else 6
        _note(upper, " = ".join(said), (x, 50), away, 11, fontweight="bold", bbox=box, **side)


def _caption(tuning: Tuning) -> str:
    """Return the call to make, or the command that helps instead."""
    said = "shardio pack SRC OUT" if tuning.best is None and tuning.in_class_order else tuning.call
    return (said or "nothing to set").replace("$", r"\$")  # no formula


# --- the picture of a bench -----------------------------------------------------------------------


def _bars(bench: Bench) -> Figure:
    """Draw rates to the left, CPU time to the right; rows that can be compared share their axes."""
    groups = list(bench.groups())
    count = sum(len(rows) + 1.6 for _, rows in groups)
    title = f"What this machine does with {bench.records:,} records, in batches of "
    figure = _titled(f"{title}{bench.batch_size:,}", 1.2 + 0.36 * count, 13)
    panels = figure.subplots(
        len(groups),
        2,
        squeeze=False,
        height_ratios=[len(rows) + 0.6 for _, rows in groups],
        width_ratios=[3, 1],
    )
    for (title, rows), (left, right) in zip(groups, panels, strict=True):
        left.set_title(title.removesuffix(":"), fontsize=10.5, loc="left")
        rates = np.array([row.images_per_s for row in rows])
        bounds = np.array([(min(row.rates, default=0.0), max(row.rates, default=0.0))
                           for row in rows])  # fmt: skip
        colours = [_LOADERS[row.loader] for row in rows]
        for axes, lengths in ((left, rates), (right, [row.cpu_ms or 0.0 for row in rows])):
            axes.barh(range(len(rows)), lengths, height=0.72, color=colours)
            axes.set_ylim(len(rows) - 0.4, -0.6)  # the first row on top
            axes.grid(axis="x", alpha=0.25)
        whiskers: dict[str, Any] = {"ecolor": _GREY, "capsize": 2.5, "linewidth": 1}
        left.errorbar(
            rates, range(len(rows)), xerr=np.abs(bounds.T - rates), fmt="none", **whiskers
        )
        left.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8.5)
        for place, (row, (_, most)) in enumerate(zip(rows, bounds, strict=True)):
            text = "failed" if row.error is not None else f"{row.images_per_s:,.0f}  {row.short}"
            if row is bench.best:
                text += "  (recommended)"
            weight = "bold" if row is bench.best else None
            _note(left, text, (most, place), 5, 8, fontweight=weight)
        left.set_xlim(0, 2.1 * max(1e-9, bounds.max()))
        right.set_yticks([])
    panels[-1][0].set_xlabel(f"{bench.unit}; whiskers: least and most")
    panels[-1][1].set_xlabel("CPU ms each, all processes")
    return figure


# --- the page -------------------------------------------------------------------------------------

_STYLE: Final = """\
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
svg { max-width: 100%; height: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .15rem .8rem; text-align: right; border-bottom: 1px solid #8886 }
td:last-child, th:last-child { text-align: left }
tr.best { background: light-dark(#fde8e8, #4a2226); font-weight: 600 }
pre { background: light-dark(#f4f4f4, #25282d); padding: .7rem; overflow-x: auto }
"""


def _page(found: Tuning | Bench) -> str:
    """Write an HTML page: the picture, the notes, the call, and all rows as a table."""
    svg = draw(found, "svg").decode()
    svg = svg[svg.index("<svg") :]  # without what only a file of its own may have
    rows: list[tuple[Row | BenchRow, tuple[str, ...]]]  # each with its cells
    told = list(found.notes)
    if isinstance(found, Bench):
        title = "What this machine can do"
        names: tuple[str, ...] = ("what", "", *found.columns[1:])
        told += [f"{row.name}: {row.why}" for row in found.rows if row.why]
        rows = [
            (row, (what.removesuffix(":"), *row.cells()))
            for what, some in found.groups()
            for row in some
        ]
    else:
        title = "How large a shuffle buffer?"
        names = (*found.columns[:5], "moves", *found.columns[5:])
        told_of = [(row, found.cells(row)) for row in found.rows]
        rows = [(row, (*c[:5], f"{row.moved:,.0f}", *c[5:])) for row, c in told_of]
    notes = "".join(f"<p>{html.escape(note)}</p>\n" for note in told)
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(_line_of(values, row is found.best) for row, values in rows)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"<title>{title}</title>\n<style>\n{_STYLE}</style>\n{svg}\n{notes}"
        f"<pre>{html.escape(found.call)}</pre>\n<table>\n<tr>{head}</tr>\n{body}</table>\n</html>\n"
    )


def _line_of(values: Iterable[str], is_best: bool) -> str:
    """Write one row of a table in HTML."""
    mark = ' class="best"' if is_best else ""
    return f"<tr{mark}>" + "".join(f"<td>{html.escape(value)}</td>" for value in values) + "</tr>\n"
