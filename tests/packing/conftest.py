"""Fixtures that tests of packing share."""

from collections.abc import Callable
from typing import Any

import pytest

from shardio.packing import build_shard


@pytest.fixture
def dead_on_shard(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes packing fail, as by a crash, when it comes to a certain shard."""

    def arrange(number: int) -> None:
        real = build_shard._build

        def build(work: Any, shard: int, add: Any) -> Any:
            if shard == number:
                monkeypatch.setattr(build_shard, "_build", real)
                raise KeyboardInterrupt
            return real(work, shard, add)

        monkeypatch.setattr(build_shard, "_build", build)

    return arrange
