"""Columns of the index: within the memory that is allowed."""

from pathlib import Path

import pytest
from support.viewer_records import N, ask

from shardio import OptionError
from shardio.viewer.view import open_view


def test_columns_beyond_the_limit_are_refused(folder: Path) -> None:
    with open_view(folder, cache_bytes=100) as view:
        with pytest.raises(OptionError, match="allow more memory"):
            ask(view, sort="width")
        assert len(view.page().cards) == N
    with open_view(folder, cache_bytes=8 * N) as view:  # one column at a time
        for name in ("width", "label", "score"):
            assert len(ask(view, sort=name).cards) == N
            assert view.cached_bytes <= 8 * N + 1_000  # the newest alone may be larger
