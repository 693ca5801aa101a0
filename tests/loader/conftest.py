"""A dataset for the tests of loaders."""

from pathlib import Path

import pytest
from support import small_datasets
from support.loading import COUNTS


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a dataset of COUNTS records, which all tests read, and none changes."""
    return small_datasets.make(tmp_path_factory.mktemp("loading") / "out", COUNTS)
