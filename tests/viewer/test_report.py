"""The report, in a real browser: one file that asks nobody for anything."""

import contextlib
import os
from pathlib import Path
from typing import Any

from support.trees import shardio
from support.viewer_pages import HOSTILE, PIXELS, is_near, key, rgb


def test_a_report_is_one_file_that_needs_nobody(
    browser: Any, tmp_path: Path, colors: Path, hostile: Path
) -> None:
    for dataset, first in ((colors, key(0)), (hostile, HOSTILE[0])):
        file = tmp_path / "report.html"
        done = shardio("view", dataset, "--html", file, "--overwrite")
        assert f"{file}: " in done.stdout and "thumbnails" in done.stdout
        assert file.stat().st_size < 1 << 20
        with contextlib.closing(browser.new_context(offline=True)) as context:
            page = context.new_page()
            asked: list[str] = []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.goto(file.as_uri())
            assert page.locator(".grid li > div").first.get_attribute("title") == first
            pixels = page.locator(".grid img").evaluate_all(PIXELS)
            assert is_near(pixels[0], rgb(0)) and is_near(pixels[1], rgb(1))
            assert page.locator(".mixing svg").count() == 2
            assert page.evaluate("window.ran") is None
            assert page.locator("script, [onerror], a").count() == 0
            page.set_viewport_size({"width": 390, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth") == 390
            assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()]


def test_a_report_replaces_nothing_unasked(tmp_path: Path, colors: Path) -> None:
    file = tmp_path / "mine.html"
    file.write_text("mine")
    done = shardio("view", colors, "--html", file, code=1)
    assert done.stderr == f"shardio: {file} is there already; --overwrite replaces it\n"
    assert file.read_text() == "mine"
    assert [one.name for one in tmp_path.iterdir()] == ["mine.html"]
    os.mkfifo(pipe := tmp_path / "pipe.html")
    done = shardio("view", colors, "--html", pipe, "--overwrite", code=1)
    assert pipe.is_fifo()
    assert done.stderr.endswith("expected the name of a file, and this is a device or a pipe\n")
