"""Datasets to look at, and the viewer as users have it: a program, and a real browser."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import viewer_pages, viewer_records
from support.viewing import Viewer

from shardio.viewer.view import View, open_view


@pytest.fixture(scope="module")
def viewer() -> Iterator[Callable[..., Viewer]]:
    """Starts viewers, one for each dataset; all are stopped at the end, and have said nothing."""
    started: dict[tuple[str, ...], Viewer] = {}

    def start(*arguments: str | Path) -> Viewer:
        key = tuple(map(str, arguments))
        if key not in started:
            started[key] = Viewer(*arguments)
        return started[key]

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [stack.callback(one.stop) for one in started.values()])
        yield start
        assert [one.stop() for one in started.values()] == [(0, "")] * len(started)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium of the system's. Skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="NOT TESTED HERE: no playwright")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("NOT TESTED HERE: there is no chromium (tools/setup installs it)")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def colors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records sorted by class, each of one colour."""
    return viewer_pages.make_colors(tmp_path_factory.mktemp("viewed") / "colors")


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Names that a page must not take for its own text."""
    return viewer_pages.make_hostile(tmp_path_factory.mktemp("viewed") / "<i>hostile")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records with columns of every kind."""
    return viewer_records.make_scored(tmp_path_factory.mktemp("view") / "data")


@pytest.fixture(scope="module")
def view(folder: Path) -> Iterator[View]:
    with open_view(folder) as opened:
        yield opened
