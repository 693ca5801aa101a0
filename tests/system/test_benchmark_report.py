"""What is shown of stored results: reports in pages, and pictures, as long as the numbers say."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from support.trees import ROOT

from benchmarks import compare, report
from benchmarks.harness import Result


def comparison() -> dict[str, Any]:
    """A result as `compare` stores it, of two tables."""
    result = Result("compare", ["pytest"], True)
    rates = {"shardio ShardLoader, JPEG": 2.0, "FFCV (re-encoded)": 3.0, "bare loop & more": 1.0}
    measured = {n: [{"images_per_s": v}, {"images_per_s": v * 2}] for n, v in rates.items()}
    result.table("photographs, warm, 224 px, batches of 64", measured, compare.COLUMNS)
    times = {"packed file, mmap": [{"us": 0.7}], "shardio.open": [{"us": 1.4}]}
    what = "Raw records, one by one, in order, warm, one process, 0.9 KB, 6 records"
    result.table(what, times, {"us": "us a record"}, versus="packed file, mmap", by="us")
    machine = {"cpu": "a CPU", "cores": 2, "ram_gib": 4, "system": "Linux", "kernel": "6"}
    load = {"other_cpu_share": 0.0}
    return json.loads(json.dumps(result.facts | {"machine": machine, "load": load}))


def test_the_chart_has_every_row_best_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = tmp_path / "compare.json"
    stored.write_text(json.dumps(comparison()))
    tool = ROOT / "tools" / "draw_comparison.py"
    drawn = subprocess.run(
        [sys.executable, str(tool), str(stored)], capture_output=True, text=True, check=True
    ).stdout
    svg = "{http://www.w3.org/2000/svg}"
    texts = [one.text for one in ElementTree.fromstring(drawn).iter(f"{svg}text")]
    names = ("FFCV (re-encoded)", "shardio ShardLoader, JPEG", "bare loop & more")
    places = [texts.index(name) for name in (*names, "packed file, mmap", "shardio.open")]
    assert places == sorted(places)
    assert "images/s, more is better" in texts and "us a record, less is better" in texts
    bars = [
        (float(one.get("width", 0)), one.get("fill"))
        for one in ElementTree.fromstring(drawn).iter(f"{svg}rect")
        if one.get("fill") != "white"  # the page
    ]
    widths = [width for width, _ in bars]
    assert widths[0] > widths[1] > widths[2] and widths[3] * 2 == pytest.approx(widths[4], rel=0.01)
    monkeypatch.syspath_prepend(tool.parent)
    of = runpy.run_path(str(tool))
    assert [colour for _, colour in bars] == [
        *(of["RIVAL"], of["OURS"], of["BARE"], of["BARE"], of["OURS"])
    ]


def test_parts_that_were_measured_by_themselves_are_reported_after_the_whole(
    tmp_path: Path,
) -> None:
    for name in ("compare", "compare.raw", "compare.raw.quick"):
        (tmp_path / f"{name}.json").write_text(json.dumps(comparison()))
    found = report.markdown(["compare", "raw"], tmp_path)
    heads = [line for line in found.splitlines() if line.startswith("## ")]
    assert heads == ["## compare", "## compare --only raw", "## raw"]
    assert "Not stored: `python -m benchmarks raw` measures it" in found


def test_the_page_shows_what_is_stored() -> None:
    """docs/comparison.md, between its markers, is what `report compare` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "report", "compare"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    page = (ROOT / "docs" / "comparison.md").read_text()
    mark = "<!-- python -m benchmarks report compare -->"
    _, begins, rest = page.partition(f"{mark}\n\n")
    block, ends, _ = rest.partition("\n\n<!-- end of the report -->")
    assert begins and ends and block == done.stdout.strip()
    assert block == report.markdown(["compare"])


def drawn(tool: str, *args: str) -> str:
    path = ROOT / "tools" / tool
    done = subprocess.run([sys.executable, path, *args], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_pictures_show_what_is_stored() -> None:
    for name, *call in (
        ("comparison", "draw_comparison.py"),
        ("speed", "draw_comparison.py", "--five"),
        ("gpu", "draw_gpu.py"),
    ):
        assert (ROOT / "docs" / f"{name}.svg").read_text() == drawn(*call), name


def test_five_bars_are_as_long_as_the_rates_stored() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "compare.json").read_text())
    rows = {row["name"]: row["images_per_s"]["median"] for row in found["tables"][0]["rows"]}
    svg = ElementTree.fromstring(drawn("draw_comparison.py", "--five"))
    bars = [one for one in svg.iter("{http://www.w3.org/2000/svg}rect") if "fill" in one.attrib]
    lengths = [float(bar.get("width", 0)) for bar in bars if bar.get("fill") != "white"]
    names = ("shardio ShardLoader, tile JPEG, core", "tf.data", "FFCV (re-encoded)",
             "image folder + DataLoader", "LitData")  # fmt: skip
    wanted = sorted((rows[name] / rows[names[0]] for name in names), reverse=True)
    assert [length / lengths[0] for length in lengths] == pytest.approx(wanted, rel=0.01)


def test_the_bars_of_the_gpu_are_as_long_as_what_is_stored() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "gpu_h100.json").read_text())

    def values(title: str, key: str) -> list[float]:
        rows = next(one["rows"] for one in found["tables"] if title in one["title"])
        return [row[key]["median"] for row in rows if row[key]]

    svg = ElementTree.fromstring(drawn("draw_gpu.py"))
    bars = [one for one in svg.iter("{http://www.w3.org/2000/svg}rect") if "fill" in one.attrib]
    lengths = [float(bar.get("width", 0)) for bar in bars if bar.get("fill") != "white"]
    rates = sorted(values("into the GPU without a model", "images_per_s"), reverse=True)
    assert [length / lengths[0] for length in lengths[:4]] == pytest.approx(
        [rate / rates[0] for rate in rates], abs=0.01
    )
    idle = values("2026-11-26: training ResNet-50", "gpu_idle")[:5]
    idle += values("2026-11-27: training ResNet-50", "gpu_idle")[:3]
    assert [length / lengths[9] for length in lengths[4:]] == pytest.approx(
        [share / idle[5] for share in idle], abs=0.01
    )


def test_the_page_has_the_report_of_what_a_lent_machine_gave() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for name in report.GATHERED:
        assert report.markdown([name]) in page, name


def test_the_five_bars_are_legible_on_a_page_of_a_phone() -> None:
    svg = ElementTree.fromstring(drawn("draw_comparison.py", "--five"))
    sizes = [float(one.get("font-size", 0)) for one in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert sizes and min(sizes) * 350 / float(svg.get("width", 0)) >= 10  # CSS pixels
