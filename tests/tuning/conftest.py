"""A dataset to measure, and what `tune` says of one that is shuffled, or in class order."""

from pathlib import Path

import pytest
from support import small_datasets
from support.tunings import OPTIONS, ORDERED, SHARDS, SHUFFLED, recommend_quickly

from shardio.tuning import simulate
from shardio.tuning.tune_result import Tuning


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 JPEGs of 24 x 16 pixels."""
    folder = tmp_path_factory.mktemp("bench") / "photos"
    return small_datasets.make(folder, [40, 0, 56], image=small_datasets.jpeg)


@pytest.fixture(scope="session")
def shuffled() -> Tuning:
    return recommend_quickly(SHARDS, SHUFFLED, **OPTIONS)


@pytest.fixture(scope="session")
def ordered() -> Tuning:
    return recommend_quickly(SHARDS, ORDERED, **OPTIONS)


@pytest.fixture
def one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pair of epochs is enough for most, and a part of the time."""
    monkeypatch.setattr(simulate, "PASSES", 1)
