"""The columns of an index: the least width that holds all values, and holds them exactly."""

from typing import Any

import numpy as np
import pytest
from support.conformance import same

from shardio.formats.base import Column
from shardio.formats.index import dump_columns, take_columns


def column(values: list[Any]) -> Column:
    """The column of these values, as it is read again."""
    described, data = dump_columns({"x": values})
    columns, end = take_columns(memoryview(data), 0, len(values), described)
    assert end == len(data) and list(columns) == ["x"]
    return columns["x"]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0, 255], "|u1"),
        ([0, 256], "<u2"),
        ([-1, 127], "|i1"),
        ([-1, 128], "<i2"),
        ([-1, 2**31], "<i8"),
        ([0, 2**32], "<u8"),
        ([0, 2**64 - 1], "<u8"),
        ([-(2**63), 0], "<i8"),
        ([None, None], "|u1"),
        ([None, 300], "<u2"),
    ],
)
def test_columns_have_the_smallest_width_that_holds_them(values: list[Any], dtype: str) -> None:
    found = column(values)
    assert found.dtype.str == dtype
    assert found.tolist() == values


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0.5, -0.0], "<f4"),
        ([float("nan"), float("inf")], "<f4"),
        ([0.1, 1.0], "<f8"),
        ([1e300, 1e-300], "<f8"),
        ([None, 1.5], "<f4"),
    ],
)
def test_float_columns_are_exact(values: list[Any], dtype: str) -> None:
    with np.errstate(all="raise"):  # a caller's setting changes nothing
        found = column(values)
    assert found.dtype.str == dtype
    assert same(np.ma.filled(found, 0).tolist(), [0.0 if v is None else v for v in values])
