"""Fixtures of the tests of datasets."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import reading, small_datasets
from support.mixing import SIZES
from support.scenes import COUNT, FIELDS, sample
from support.small_datasets import make, payload

from shardio.dataset import buffering


@pytest.fixture
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Makes small test datasets take one of the ways that bytes can take."""
    monkeypatch.setattr(buffering, "RUN", 1000)
    monkeypatch.setattr(buffering, "LEAST_BLOCK", 100)
    monkeypatch.setattr(buffering, "ROWS_AHEAD", 8)
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


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes 97 records, 13 batches: the label of each is its own number."""
    return small_datasets.make(
        tmp_path_factory.mktemp("loops") / "data",
        reading.COUNTS,
        sample=lambda i: {"__key__": b"%d" % i, "image": b"x", "label": i},
        classes=None,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Datasets whose keys say which one they are of: "2/000007" is record 7 of dataset 2."""
    home = tmp_path_factory.mktemp("mixed")

    def sample(d: int) -> Callable[[int], dict[str, Any]]:
        return lambda i: {"__key__": b"%d/%06d" % (d, i), "image": payload(i), "label": i % 3}

    return [make(home / f"{d}", counts, sample=sample(d)) for d, counts in enumerate(SIZES)]
