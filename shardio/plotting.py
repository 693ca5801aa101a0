"""The pictures of a tuning, and of a bench. The only door to matplotlib.

A tuning: quality against buffer. Two panels over one logarithmic axis of buffers, a line for each
unit: the mixture of classes in a batch, relative to a uniform shuffle, and the pairs of a batch
that shared one in the epoch before. Filled points pass the test of their panel, and the recommended
one is ringed.

A bench: a bar for each row, of its rate and of its CPU time, with what limits it.

As PNG, SVG, or HTML: one file, with the picture as SVG inside, and every row as a table.
"""

from __future__ import annotations

import html
import importlib.util
import io
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from .benching import Bench, cells
from .benching import Row as Way
from .errors import DependencyError, OptionError, printable
from .sizes import show_size
from .storage.local import check_target, write_file
from .tuning import AGAIN, Row, Tuning, show_buffer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS: Final = ("png", "svg", "html")
_DPI: Final = 150

# Okabe and Ito's colours, which the colour-blind can tell apart; from large units to small ones.
_COLOURS: Final = ("#000000", "#e69f00", "#009e73", "#cc79a7", "#0072b2", "#56b4e9")
# Where lines coincide, each shows in the gaps of those that are drawn over it.
_DASHES: Final = ((1, 0), (9, 3), (6, 3), (4, 3), (2, 2), (1, 2))
_RING: Final = "#d00000"
_GREY: Final = "#666666"
_LOADERS: Final = {"DataLoader": "#56b4e9", "ShardLoader": "#e69f00"}


def check(path: str | os.PathLike[str]) -> str:
    """The kind of picture that a file is to be. Call it before the work that is to be drawn.

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


def save(found: Tuning | Bench, path: str | os.PathLike[str]) -> None:
    """Draw it into a file, whose ending says as what; one that exists is replaced.

    Raises OptionError, DependencyError, StorageError.
    """
    folder, name = os.path.split(os.path.abspath(path))
    write_file(folder, name, draw(found, check(path)), replace=True)


def draw(found: Tuning | Bench, kind: str) -> bytes:
    """The content of such a file: "png", "svg" or "html"."""
    if kind == "html":
        return _page(found).encode()
    import matplotlib

    out = io.BytesIO()
    # The same bytes for the same result: no date, and names that do not depend on the moment.
    # Text stays text: a third of the bytes.
    with matplotlib.rc_context({"svg.hashsalt": "shardio", "svg.fonttype": "none"}):
        metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
        figure = _bars(found) if isinstance(found, Bench) else _figure(found)
        figure.savefig(out, format=kind, dpi=_DPI, metadata=metadata)
    return out.getvalue()


# --- the picture ----------------------------------------------------------------------------------


def _figure(tuning: Tuning) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"How large a shuffle buffer?  {tuning.records:,} records, batches of "
        f"{tuning.batch_size:,}",
        fontsize=13,
        fontweight="bold",
    )
    if not tuning.rows:
        figure.text(0.5, 0.5, "\n".join(tuning.notes), ha="center", wrap=True)
        return figure
    upper, lower = figure.subplots(2, 1, sharex=True)
    places = {row.shuffle_buffer: float(row.shuffle_buffer or 0) for row in tuning.rows}
    if None in places:  # "all": apart from the others
        places[None] = max(float(tuning.records), 2.2 * max(places.values()))
    units = sorted({row.unit for row in tuning.rows}, reverse=True)
    for number, unit in enumerate(units):
        rows = [row for row in tuning.rows if row.unit == unit or row.shuffle_buffer is None]
        x = [places[row.shuffle_buffer] for row in rows]
        _line(
            upper,
            x,
            [_mixed(tuning, row) for row in rows],
            [row.mixes for row in rows],
            number,
            unit,
        )
        _line(
            lower,
            x,
            [_again(tuning, row) for row in rows],
            [row.renews for row in rows],
            number,
            unit,
        )
    _mixture(upper, tuning)
    _pairs(lower, tuning)
    _buffers(lower, tuning, places)
    _mark(upper, lower, tuning, places, units)
    _legends(figure, upper, tuning)
    figure.supxlabel(_caption(tuning), fontsize=9.5, family="monospace")
    return figure


def _legends(figure: Figure, axes: Axes, tuning: Tuning) -> None:
    from matplotlib.lines import Line2D

    figure.legend(
        *axes.get_legend_handles_labels(),
        title="unit",
        loc="outside right upper",
        frameon=False,
        handlelength=3.2,
    )
    marks = [
        Line2D(
            [], [], linestyle="none", marker="o", color=_GREY, markerfacecolor=face, markersize=6
        )
        for face in (_GREY, "white")
    ]
    if tuning.best is not None:
        ring = Line2D([], [], linestyle="none", marker="o", color=_RING, markerfacecolor="none")
        ring.set(markersize=12, markeredgewidth=2)
        marks.append(ring)
    figure.legend(
        marks,
        ["good\nenough", "not", "recom-\nmended"][: len(marks)],
        loc="outside right lower",
        frameon=False,
        labelspacing=0.9,
    )


def _mixed(tuning: Tuning, row: Row) -> float:
    """The measure of mixture that tells more, in percent of a uniform shuffle."""
    return 100 * (row.even / tuning.even if tuning.saturated else row.classes / tuning.uniform)


def _again(tuning: Tuning, row: Row) -> float:
    """In percent; a logarithmic axis has no 0."""
    return 100 * max(row.again, tuning.chance, 1e-5)


def _line(
    axes: Axes, x: list[float], y: list[float], passes: list[bool], number: int, unit: int
) -> None:
    colour, dashes = _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
    axes.plot(x, y, color=colour, linewidth=2, dashes=dashes, label=f"{unit:,}", zorder=3)
    for face, chosen in ((colour, True), ("white", False)):
        points = [(at, to) for at, to, passed in zip(x, y, passes, strict=True) if passed == chosen]
        axes.plot(
            [at for at, _ in points],
            [height for _, height in points],
            linestyle="none",
            marker="o",
            markersize=max(4, 9 - number),
            markerfacecolor=face,
            markeredgecolor=colour,
            markeredgewidth=1.4,
            zorder=4,
        )


def _mixture(axes: Axes, tuning: Tuning) -> None:
    what = "classes" if tuning.labels == "label" else "tenths of the pack"
    uniform, band = tuning.uniform, tuning.band
    if tuning.saturated:
        what, uniform, band = "equally frequent classes", tuning.even, tuning.even_band
    axes.set_ylabel("class mixture,\n% of a uniform shuffle")
    low, high = (100 * edge / uniform for edge in band)
    axes.axhspan(low, high, color="#c4c4c4", alpha=0.7, linewidth=0, zorder=1)
    axes.axhline(100, color=_GREY, linewidth=0.8, zorder=1)
    values = [_mixed(tuning, row) for row in tuning.rows]
    least, most = min([*values, low]), max([*values, high])
    margin = max(0.25 * (most - least), 0.1)  # of noise alone, the band fills two thirds
    axes.set_ylim(max(0.0, least - margin), most + margin)
    axes.annotate(
        f"grey: good enough; a uniform shuffle has {uniform:,.2f} of {tuning.distinct:,} {what}",
        (0.012, 0.95),
        xycoords="axes fraction",
        va="top",
        fontsize=8.5,
        color=_GREY,
        bbox={"facecolor": "white", "linewidth": 0, "pad": 1},
    )
    axes.grid(alpha=0.25)


def _pairs(axes: Axes, tuning: Tuning) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_ylabel("pairs of a batch that shared one\nin the epoch before, %")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # two at least, in any range
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    limit = 100 * (tuning.chance + AGAIN)
    values = [_again(tuning, row) for row in tuning.rows]
    bottom, top = min([*values, limit]) / 2, max([*values, limit]) * 2
    axes.set_ylim(bottom, top)
    axes.axhspan(limit, top, color="#d55e00", alpha=0.08, linewidth=0, zorder=0)
    axes.axhline(limit, color="#d55e00", linewidth=1, linestyle="--", zorder=1)
    axes.axhline(100 * max(tuning.chance, 1e-5), color=_GREY, linewidth=0.8, zorder=1)
    axes.annotate(
        "too many: more than 5 % above chance",
        (0.992, 0.94),
        xycoords="axes fraction",
        ha="right",
        va="top",
        fontsize=8.5,
        color="#b04a00",
    )
    axes.annotate(
        "chance",
        (0.008, 100 * max(tuning.chance, 1e-5)),
        xycoords=("axes fraction", "data"),
        xytext=(0, -11),
        textcoords="offset points",
        fontsize=8.5,
        color=_GREY,
    )
    axes.grid(alpha=0.25)


def _buffers(axes: Axes, tuning: Tuning, places: dict[int | None, float]) -> None:
    axes.set_xscale("log")
    least, most = min(places.values()), max(places.values())
    margin = max(1.4, (most / least) ** 0.05)
    axes.set_xlim(least / margin, most * margin)  # also of a single one
    rows = {row.shuffle_buffer: row for row in tuning.rows}
    axes.set_xticks(
        [places[buffer] for buffer in rows],
        [f"{_short(row)}\n{_memory(row)}" for row in rows.values()],
        fontsize=8,
    )
    axes.minorticks_off()
    axes.set_xlabel("shuffle buffer: records, and their size")


def _short(row: Row) -> str:
    buffer = row.shuffle_buffer
    if buffer is None:
        return "all"
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if buffer >= size and buffer % size == 0:
            return f"{buffer // size}{letter}"
    return f"{buffer}"


def _memory(row: Row) -> str:
    """In as many characters as fit under a tick."""
    number, unit = show_size(row.memory_bytes).split()
    size = float(number.replace(",", ""))
    return f"{size:.0f} {unit}" if size >= 10 else f"{size:.1f} {unit}"


def _mark(
    upper: Axes, lower: Axes, tuning: Tuning, places: dict[int | None, float], units: list[int]
) -> None:
    best = tuning.best
    if best is None:
        upper.set_title("none of these is good enough", color=_RING, fontsize=11)
        return
    x = places[best.shuffle_buffer]
    heights = (_mixed(tuning, best), _again(tuning, best))
    colour = _COLOURS[units.index(best.unit) % len(_COLOURS)]
    for axes, y in zip((upper, lower), heights, strict=True):
        axes.plot([x], [y], marker="o", markersize=7, color=colour, zorder=5)
        axes.axvline(x, color=_RING, linewidth=1, linestyle=":", zorder=2)
        axes.plot(
            [x],
            [y],
            marker="o",
            markersize=13,
            markerfacecolor="none",
            markeredgecolor=_RING,
            markeredgewidth=2,
            zorder=6,
        )
    upper.set_title(
        f"recommended: {show_buffer(best.shuffle_buffer)} records, unit {best.unit:,}, "
        f"{show_size(best.memory_bytes)}",
        color=_RING,
        fontsize=11,
    )


def _caption(tuning: Tuning) -> str:
    return tuning.call.replace("$", r"\$")  # no formula


# --- the picture of a bench -----------------------------------------------------------------------


def _bars(bench: Bench) -> Figure:
    """Rates to the left, CPU time to the right; rows that can be compared share their axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = list(bench.groups())
    count = sum(len(rows) + 1.6 for _, rows in groups)
    figure = Figure(figsize=(9.6, 1.2 + 0.36 * count), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"What this machine does with {bench.records:,} records, in batches of "
        f"{bench.batch_size:,}",
        fontsize=13,
        fontweight="bold",
    )
    panels = figure.subplots(
        len(groups),
        2,
        squeeze=False,
        height_ratios=[len(rows) + 0.6 for _, rows in groups],
        width_ratios=[3, 1],
    )
    for (title, rows), (left, right) in zip(groups, panels, strict=True):
        left.set_title(title.removesuffix(":"), fontsize=10.5, loc="left")
        places = range(len(rows))
        names = [row.name for row in rows]
        _barred(left, rows, [row.images_per_s for row in rows])
        spread = [
            [row.images_per_s - min(row.rates, default=row.images_per_s) for row in rows],
            [max(row.rates, default=row.images_per_s) - row.images_per_s for row in rows],
        ]
        rates = [row.images_per_s for row in rows]
        left.errorbar(
            rates, places, xerr=spread, fmt="none", ecolor=_GREY, capsize=2.5, linewidth=1
        )
        left.set_yticks(places, names, fontsize=8.5)
        for place, row in zip(places, rows, strict=True):
            said = "failed" if row.error is not None else f"{row.images_per_s:,.0f}  {row.short}"
            if row is bench.best:
                said += "  (recommended)"
            end = max(row.rates, default=0.0)
            left.annotate(
                said,
                (end, place),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                fontweight="bold" if row is bench.best else None,
            )
        left.set_xlim(0, 2.1 * max([1e-9, *(max(row.rates, default=0.0) for row in rows)]))
        _barred(right, rows, [row.cpu_ms or 0.0 for row in rows])
        right.set_yticks([])
        for axes in (left, right):
            axes.set_ylim(len(rows) - 0.4, -0.6)  # the first row on top
            axes.grid(axis="x", alpha=0.25)
    panels[-1][0].set_xlabel(f"{bench.unit}; whiskers: least and most")
    panels[-1][1].set_xlabel("CPU ms each, all processes")
    return figure


def _barred(axes: Axes, rows: Sequence[Way], lengths: list[float]) -> None:
    axes.barh(range(len(rows)), lengths, height=0.72, color=[_LOADERS[row.loader] for row in rows])


# --- the page -------------------------------------------------------------------------------------

_STYLE: Final = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
svg { max-width: 100%; height: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .15rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
td:last-child, th:last-child { text-align: left }
tr.best { background: #fde8e8; font-weight: 600 }
pre { background: #f4f4f4; padding: .7rem; overflow-x: auto }
"""


def _page(found: Tuning | Bench) -> str:
    svg = draw(found, "svg").decode()
    svg = svg[svg.index("<svg") :]  # without what only a file of its own may have
    if isinstance(found, Bench):
        title = "What this machine can do"
        names: tuple[str, ...] = ("what", "", *found.columns[1:])
        told = [*found.notes, *(f"{row.name}: {row.why}" for row in found.rows if row.why)]
        rows = [
            ((what.removesuffix(":"), *cells(row)), row is found.best)
            for what, some in found.groups()
            for row in some
        ]
    else:
        title = "How large a shuffle buffer?"
        names = ("buffer", "unit", "waiting", "1st batch", "moves", "classes", "even", "again", "")
        told = list(found.notes)
        rows = [(_cells(found, row), row is found.best) for row in found.rows]
    notes = "".join(f"<p>{html.escape(note)}</p>\n" for note in told)
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(_line_of(values, is_best) for values, is_best in rows)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"<title>{title}</title>\n<style>\n{_STYLE}</style>\n{svg}\n{notes}"
        f"<pre>{html.escape(found.call)}</pre>\n<table>\n<tr>{head}</tr>\n{body}</table>\n</html>\n"
    )


def _cells(tuning: Tuning, row: Row) -> tuple[str, ...]:
    return (
        show_buffer(row.shuffle_buffer),
        f"{row.unit:,}",
        show_size(row.memory_bytes),
        show_size(row.first_batch_bytes),
        f"{row.moved:,.0f}",
        f"{row.classes:,.{tuning.decimals}f}",
        f"{row.even:,.{tuning.decimals}f}" if tuning.saturated else "",
        f"{row.again:.2%}",
        tuning.verdict(row),
    )


def _line_of(values: Iterable[str], is_best: bool) -> str:
    mark = ' class="best"' if is_best else ""
    return f"<tr{mark}>" + "".join(f"<td>{html.escape(value)}</td>" for value in values) + "</tr>\n"
