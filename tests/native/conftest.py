"""Files for the tests of the compiled core."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.core_records import Records


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Any]:
    """Makes files of records, each closed when the test is over."""
    made: list[Records] = []

    def make_file(records: list[bytes]) -> Records:
        made.append(Records(tmp_path / str(len(made)), records))
        return made[-1]

    yield make_file
    for one in made:
        os.close(one.file)
