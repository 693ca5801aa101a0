"""Fixtures that several test modules share."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

# A shell that starts the suite in the background makes it ignore Ctrl-C, and all that it starts,
# so that the tests which send one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def packed(tmp_path: Path) -> Callable[..., Path]:
    """Makes a dataset: `packed([10, 0, 7])` is the folder of one with shards of so many records."""

    def make(counts: list[int], name: str = "data", **options: Any) -> Path:
        return datasets.make(tmp_path / name, counts, **options)

    return make
