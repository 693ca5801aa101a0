"""Sizes as users write them."""

import numpy as np
import pytest

from shardio import units
from shardio.errors import OptionError


def test_sizes_are_read_as_users_write_them() -> None:
    for text, size in {
        "1": 1,
        "64MB": 64 * 10**6,
        "64MiB": 64 << 20,
        "64m": 64 << 20,
        " 1.5 GiB ": 3 << 29,
        "0.1KB": 100,
        "100000000000000.5B": 100000000000000,
    }.items():
        assert units.parse_size(text) == size
        assert units.parse_size(units.exact_size(size)) == size
    for text in ("", "MB", "-1", "1e3", "1 MBs", "1..5", "inf", "0x10"):
        with pytest.raises(OptionError):
            units.parse_size(text)
    for small in (1, 999, "64", np.int64(8)):
        with pytest.raises(OptionError, match=f"shard_size is {small}, .* mean {small}GB, or "):
            units.check_size("shard_size", small)
    accepted = {1000: 1000, "1B": 1, "64 B": 64, "1KB": 1000}
    assert {size: units.check_size("x", size) for size in accepted} == accepted
    assert units.check_size("x", 0, 0) == 0
    exact = {0: "0B", 999: "999B", 2 * 10**6: "2MB", 1 << 20: "1MiB", 1_024_000: "1000KiB"}
    assert {size: units.exact_size(size) for size in exact} == exact
    shown = {
        0: "0 B",
        1023: "1,023 B",
        1024: "1.0 KiB",
        3 << 29: "1.5 GiB",
        1 << 60: "1,048,576.0 TiB",
    }
    assert {size: units.show_size(size) for size in shown} == shown


def test_a_choice_is_one_of_some_words() -> None:
    units.check_choice("gone", None, None, "drop")
    units.check_choice("missing", "ignore", "error", "ignore")
    for choices, words in (
        ((None, "drop"), "'drop'"),
        (("error", "ignore"), "'error' or 'ignore'"),
        (("error", "skip", "replace"), "'error', 'skip' or 'replace'"),
    ):
        with pytest.raises(OptionError) as raised:
            units.check_choice("option", "none of\n", *choices)
        assert str(raised.value) == rf"option is 'none of\n'; expected {words}"
