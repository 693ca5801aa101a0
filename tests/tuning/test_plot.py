"""The picture of a tuning, as PNG, SVG and HTML."""

import importlib.util
import io
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from support.trees import environment
from support.tunings import recommend_quickly

from shardio.errors import DependencyError, OptionError
from shardio.tuning import plot
from shardio.tuning.tune_result import Tuning

pytest.importorskip("matplotlib", reason="NOT RUN: pictures need shardio-torch[plot]")

COUNTS = np.array([250] * 8)
LABELS = np.arange(2000) * 40 // 2000


@pytest.fixture(scope="module")
def found() -> Tuning:
    return recommend_quickly(
        COUNTS, LABELS, batch_size=32, spans=8, mean_bytes=1000, path="a<b>/",
        units=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def none(found: Tuning) -> Tuning:
    """One that recommends nothing."""
    rows = tuple(replace(row, mixes=False) for row in found.rows)
    return replace(found, rows=rows, best=None, notes=("No buffer mixes.",), with_units=False)


def texts(svg: bytes) -> str:
    return " ".join("".join(one.itertext()) for one in ElementTree.fromstring(svg).iter())


def test_a_png_is_a_picture(found: Tuning) -> None:
    with Image.open(io.BytesIO(plot.draw(found, "png"))) as image:
        assert image.format == "PNG"
        assert image.width >= 1000 and image.height >= 600
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or []}
    marks = (plot._RING, plot._CLASSES, plot._PAIRS, plot._COST)
    wanted = {tuple(bytes.fromhex(name[1:])) for name in marks}
    assert wanted <= colours  # the recommendation is marked; what is good, and what it costs


def test_an_svg_says_what_is_drawn(found: Tuning) -> None:
    said = texts(plot.draw(found, "svg"))
    assert "Keep the default: a shuffle buffer of all 2,000 records" in said
    assert "default = recommended" in said
    assert "2,000 records of 1,000 B in 8 shards, 40 classes, batches of 32" in said
    assert "mixing, % of a uniform shuffle" in said and "as good as a uniform shuffle" in said
    assert "a cold epoch takes about 16 requests" in said
    assert found.call in said
    for unit in {row.unit for row in found.rows} - {found.unit}:
        assert f"unit {unit}" in said
    for buffer in ("50", "100", "1k", "all"):
        assert f" {buffer} " in said


def test_the_default_and_another_recommendation_are_both_marked(found: Tuning) -> None:
    """Units are drawn only where they were asked for."""
    row = next(row for row in found.rows if row.shuffle_buffer == 500)
    said = texts(plot.draw(replace(found, best=row, with_units=False), "svg"))
    assert "Set a shuffle buffer of 500 records" in said
    assert " recommended " in said and " default " in said and "unit 32" not in said


def test_the_same_tuning_gives_the_same_bytes(found: Tuning) -> None:
    for kind in ("png", "svg"):
        assert plot.draw(found, kind) == plot.draw(found, kind)


def test_html_is_one_file_with_the_picture_and_every_row(found: Tuning) -> None:
    page = plot.draw(found, "html").decode()
    assert page.startswith("<!DOCTYPE html>") and page.count("<svg") == 1
    assert not re.search(r"<(script|link|img|iframe|object)\b|@import|\bsrc=", page)
    assert set(re.findall(r'href="(.)', page)) == {"#"}  # markers drawn once, in the page itself
    assert not re.findall(r"url\((?!#)", page)
    assert page.count("<tr") == 1 + len(found.rows)
    assert page.count('<tr class="best">') == 1 and "<th>requests</th>" in page
    assert "a<b>" not in page and "a&lt;b&gt;/" in page
    assert "as good" in page


def test_without_a_recommendation_the_picture_says_so(none: Tuning) -> None:
    said = texts(plot.draw(none, "svg"))
    assert "no buffer mixes this pack" in said and "shardio pack SRC OUT" in said
    assert "recommended" not in said and "unit 32" not in said
    page = plot.draw(none, "html").decode()
    assert 'class="best"' not in page and "No buffer mixes." in page


@pytest.mark.parametrize("shards", [[], [5], [20], [9, 40]])
def test_small_datasets_are_drawn_too(shards: list[int]) -> None:
    made = recommend_quickly(np.array(shards, np.int64), None, batch_size=16, mean_bytes=1)
    assert made.call in texts(plot.draw(made, "svg")) or not made.rows
    assert made.call in plot.draw(made, "html").decode().replace("&quot;", '"')


def test_noise_is_not_magnified() -> None:
    """The axis of the mixing is the same one whatever was found."""
    labels = np.random.default_rng(0).permutation(np.arange(5_000) % 10)
    shuffled = recommend_quickly(np.array([625] * 8), labels, batch_size=64, mean_bytes=1)
    upper, lower, _ = plot.figure_of(shuffled).axes
    assert upper.get_ylim() == (0, 106)
    assert upper.get_ylabel() == "mixing, % of a uniform shuffle"
    assert lower.get_ylim()[1] >= 4  # nor are a few per cent of requests


@pytest.mark.parametrize("records", [40, 2000])
def test_both_axes_can_be_read(records: int, found: Tuning) -> None:
    made = (
        found
        if records == 2000
        else recommend_quickly(np.array([40]), None, batch_size=20, mean_bytes=1)
    )
    upper, lower, _ = plot.figure_of(made).axes
    left, right = lower.get_xlim()
    assert left < min(lower.get_xticks()) and right > max(lower.get_xticks())
    assert upper.get_xlim() == (left, right)
    labels = [line.get_label() for line in upper.lines if not line.get_label().startswith("_")]
    assert len(labels) == 2 and labels[0].startswith("new neighbours")


def test_dollars_in_a_path_are_no_formula(found: Tuning) -> None:
    odd = replace(found, call='ShardDataset("$x_1$ \\\\frac $")')
    assert '"$x_1$ \\\\frac $"' in texts(plot.draw(odd, "svg"))


def test_a_file_is_replaced_whole(found: Tuning, tmp_path: Path) -> None:
    path = tmp_path / "x.SVG"
    path.write_bytes(b"old")
    plot.save(found, path)
    assert path.read_bytes() == plot.draw(found, "svg")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["x", "x.pdf", "x.png.gz", "png"])
def test_other_endings_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match=r"ends in \.png, \.svg or \.html"):
        plot.check(name)


def test_without_matplotlib_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    with pytest.raises(DependencyError, match=r"pip install 'shardio-torch\[plot\]'"):
        plot.check("x.png")


def test_neither_tuning_nor_asking_imports_matplotlib_or_torch() -> None:
    code = (
        "import sys; from shardio.tuning import plot; plot.check('x.svg'); "
        "print([name for name in ('matplotlib', 'torch', 'PIL') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours as WCAG 2 defines it, 1 to 21."""
    levels = np.array([list(bytes.fromhex(colour[1:])) for colour in (one, other)]) / 255
    linear = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
    dark, light = sorted(linear @ (0.2126, 0.7152, 0.0722))
    return float((light + 0.05) / (dark + 0.05))


def test_an_svg_is_legible_in_dark_viewers(found: Tuning) -> None:
    svg = plot.draw(found, "svg").decode()
    rules = re.findall(r'\[style\*="(\w+: #\w{6})"\] \{ \w+: (#\w{6}) !important \}', svg)
    dark = dict(rules)
    paper = dark["fill: #ffffff"]
    page = re.search(r'<g id="patch_1">.*?style="(fill: #\w{6})"', svg, re.DOTALL)
    assert page and dark[page[1]] == paper and contrast(paper, "#ffffff") > 10
    drawn = set(re.findall(r'(?<!\*=")\b(?:fill|stroke): #\w{6}(?=[;"])', svg))
    assert len(drawn) > 8
    for mark in drawn - {"fill: #ffffff"}:
        assert contrast(paper, dark.get(mark, mark[-7:])) > 3, mark
    (plain,) = re.findall(r"svg \{ fill: (#\w{6}) \}", svg)  # text without a colour of its own
    assert contrast(paper, plain) > 7


def test_a_picture_needs_no_display_and_no_pyplot(found: Tuning) -> None:
    plot.draw(found, "png")
    assert "matplotlib.pyplot" not in sys.modules  # it keeps figures, and picks a backend
