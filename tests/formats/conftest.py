"""Fixtures that tests of formats share."""

import pytest

from shardio.formats.foreign import row_groups


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with an empty cache of row groups."""
    monkeypatch.setattr(row_groups, "_CACHE", row_groups._Cache())
