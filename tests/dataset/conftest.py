"""Fixtures of the tests of datasets."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import small_datasets
from support.scenes import (
    COUNT,
    FIELDS,
    sample,
)

from shardio.dataset import buffering


@pytest.fixture
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Makes small test datasets take one of the ways that bytes can take."""
    monkeypatch.setattr(buffering, "RUN", 1000)
    monkeypatch.setattr(buffering, "LEAST_BLOCK", 100)
    monkeypatch.setattr(buffering, "AHEAD", 8)
    if request.param == "page_cache":
        monkeypatch.setattr(buffering, "SMALL", 0)
    if request.param == "in_memory in tiny chunks":
        monkeypatch.setattr("shardio.dataset.window.CHUNK", 3)
        monkeypatch.setattr(buffering, "RUN", 100)
    yield request.param.split()[0]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets of tests count as larger than what is read whole before the first batch."""
    monkeypatch.setattr(buffering, "ALL_BYTES", 0)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scenes") / "data"
    return small_datasets.make(out, [4, COUNT - 4], fields=FIELDS, sample=sample, classes=None)
