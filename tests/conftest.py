"""Fixtures that several test modules share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest


@pytest.fixture
def packed(tmp_path: Path) -> Callable[..., Path]:
    """Makes a dataset: `packed([10, 0, 7])` is the folder of one with shards of so many records."""

    def make(counts: list[int], name: str = "data", **options: Any) -> Path:
        return datasets.make(tmp_path / name, counts, **options)

    return make
