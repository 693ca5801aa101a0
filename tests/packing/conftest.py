"""Fixtures that tests of packing share."""

from collections.abc import Callable
from functools import partial

import pytest
from support.packing import die, on_shard


@pytest.fixture
def dead_on_shard(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes packing fail, as by a crash, when it comes to a certain shard."""
    return partial(on_shard, monkeypatch, do=die)
