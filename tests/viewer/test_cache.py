"""What a view keeps: within a limit, and made once."""

import threading
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S
from support.viewer_records import ask

from shardio.viewer.cache import BackgroundCache, PendingError
from shardio.viewer.columns import Columns
from shardio.viewer.results import Query
from shardio.viewer.view import open_view


def test_a_page_does_not_wait_for_the_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, plainly = threading.Event(), Columns.take

    def take(self: Columns, number: int, gathered: Any) -> None:
        assert go.wait(LIMIT_S)
        plainly(self, number, gathered)

    monkeypatch.setattr(Columns, "take", take)
    with open_view(folder) as view:
        page = view.page(Query(label="dog"), wait_s=0.0)
        counted = view.histograms(wait_s=0.0)
        assert page.pending is not None and page.next == 0 and not page.cards
        assert counted.pending is not None
        assert len(view.page(start=3, count=4).cards) == 4  # what needs no index comes at once
        go.set()
        assert ask(view, label="dog").cards and view.histograms(wait_s=None).pending is None


def test_what_is_kept_stays_within_its_limit() -> None:
    cache = BackgroundCache(100)
    for number in range(5):
        cache.put(number, f"{number}", 40)
        cache.get(0)
    assert (
        cache.bytes == 80 and cache.get(0) == "0" and cache.get(4) == "4" and cache.get(3) is None
    )
    assert cache.put("large", 1, 1000) == 1 and cache.bytes == 1000
    cache.put("small", 1, 10)
    assert cache.bytes == 10 and cache.get("large") is None


def test_an_error_in_the_background_is_the_askers_and_is_not_kept() -> None:
    cache = BackgroundCache(100)
    with pytest.raises(ZeroDivisionError):
        cache.make("key", lambda: 1 / 0, None)
    assert cache.make("key", lambda: 1, None) == 1
    held = threading.Event()
    with pytest.raises(PendingError):
        cache.make("slow", held.wait, 0.0)
    held.set()
    assert cache.make("slow", lambda: None, None) is True  # what was begun, not anew
    cache.close()
