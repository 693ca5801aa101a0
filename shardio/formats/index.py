"""What the index of a shard holds, in every format: key hashes, and columns of small scalar values.

A column has one value a record, at the smallest width that holds all of them; where some are None
it is masked, and a byte a record says which are valid. Checksums and hashes are xxh3_64
(https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from ..errors import printable
from .base import Column

SCALARS = frozenset(("int", "float", "bool"))  # kinds of fields that get a column

# The dtype of a column without a value; no wider than others, since joining it widens them.
EMPTY = {"int": "<i8", "float": "<f4", "bool": "|b1"}

# What a column can be, by the one spelling that numpy gives it.
_COLUMNS = frozenset(["|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f4", "<f8"])

checksum: Callable[..., int] = xxhash.xxh3_64_intdigest


def key_hash(key: bytes) -> int:
    """Return the hash by which an index finds a key: the low 32 bits of its xxh3_64."""
    return checksum(key) & 0xFFFFFFFF


def take_columns(
    block: memoryview, at: int, records: int, described: Sequence[Sequence[Any]]
) -> tuple[dict[str, Column], int]:
    """Return the columns that begin at byte `at`, by name, and where they end. Raises ValueError.

    described: [name, dtype, whether some are None] of each.
    """

    def take(dtype: str) -> Column:
        nonlocal at
        if dtype not in _COLUMNS or at + np.dtype(dtype).itemsize * records > len(block):
            raise ValueError(f"a column of dtype {dtype!r} does not fit")
        column = np.frombuffer(block, dtype, records, at)
        at += column.nbytes
        return column

    columns: dict[str, Column] = {}
    for name, dtype, nulls in described:
        if type(name) is not str or name in columns or type(nulls) is not bool:
            raise ValueError(f"a column named {printable(str(name))!r} does not fit")
        values = take(dtype)
        columns[name] = np.ma.MaskedArray(values, take("|u1") == 0) if nulls else values
    return columns, at


def dump_columns(columns: Mapping[str, Sequence[Any]]) -> tuple[list[list[Any]], bytes]:
    """Return what `take_columns` takes: the description of columns, and their bytes.

    columns: values by name, int, float, bool or None. What no column can hold is left out.
    """
    packed = {name: column for name, values in columns.items() if (column := _pack(values))}
    described = [[name, dtype, nulls] for name, (dtype, nulls, _) in packed.items()]
    return described, b"".join(data for _, _, data in packed.values())


def _pack(values: Sequence[Any]) -> tuple[str, bool, bytes] | None:
    """Return dtype, whether some are None, and bytes; at the least width that holds all."""
    nulls = None in values
    plain = [0 if value is None else value for value in values] if nulls else values
    kinds = {type(value) for value in values} - {type(None)}
    if kinds == {bool}:
        column = np.array(plain, "|b1")
    elif kinds == {float}:
        column = np.array(plain, "<f8")
        with np.errstate(all="ignore"):
            narrow = column.astype("<f4")
        if np.array_equal(narrow, column, equal_nan=True):
            column = narrow
    elif kinds <= {int}:
        low, high = min(plain, default=0), max(plain, default=0)
        signs = "ui" if low >= 0 else "i"
        fits = (
            f"{'|' if width == 1 else '<'}{sign}{width}"
            for width in (1, 2, 4, 8)
            for sign in signs
            if np.iinfo(f"{sign}{width}").min <= low and high <= np.iinfo(f"{sign}{width}").max
        )
        dtype = next(fits, None)
        if dtype is None:
            return None  # both below 0 and above 2**63: no integer type holds them
        column = np.array(plain, dtype)
    else:
        return None
    valid = np.array([value is not None for value in values], "|u1").tobytes() if nulls else b""
    return column.dtype.str, nulls, column.tobytes() + valid
