"""The options of a storage, `shardio.Storage`: wrong ones are told by their names."""

from pathlib import Path
from typing import Any

import pytest

from shardio import Storage
from shardio.errors import OptionError


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"root": 5}, "^root is 5: expected a directory"),
        ({"options": {5: "x"}}, "^options: expected a dict"),
        ({"timeout_s": 0}, "^timeout_s is 0: expected seconds above 0"),
        ({"timeout_s": float("inf")}, "^timeout_s is inf"),
        ({"buffer_bytes": -1}, "^buffer_bytes is -1"),
        ({"cache": "x"}, "^cache and cache_bytes belong together"),
        ({"cache_bytes": "1GiB"}, "^cache and cache_bytes belong together"),
        ({"max_pixels": 0}, "^max_pixels is 0"),
        ({"verify_open": "no"}, "^verify_open is 'no'"),
    ],
    ids=str,
)
def test_a_wrong_option_is_told(options: dict[str, Any], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        Storage(**options)


def test_a_limit_without_a_unit_is_asked_about_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"^cache_bytes is 500, without a unit: .* 500GB"):
        Storage(cache=tmp_path, cache_bytes="500")
    assert Storage(cache=tmp_path, cache_bytes="1GiB").cache_bytes == 1 << 30
