"""Columns of pyarrow as values of fields (the only door to pyarrow that readers use).

Types become few: numbers, text, bytes, and lists and structs of these. What each becomes, the
table in parquet.py says. Sources:
https://arrow.apache.org/docs/format/Columnar.html
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from ...errors import DependencyError

Get = Callable[[int], Any]


@lru_cache(maxsize=1)
def import_pyarrow() -> Any:
    """Return the package pyarrow. Raises DependencyError."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise DependencyError(
            "Parquet and Arrow files are read by pyarrow, which is not installed. Install it with: "
            "pip install 'shardio-torch[parquet]'"
        ) from None
    return pyarrow


def as_key(value: Any) -> bytes | None:
    if isinstance(value, (str, int)):
        return str(value).encode()
    key: bytes | None = value
    return key


def can_be_key(types: Any, kind: Any) -> bool:
    if types.is_dictionary(kind):
        kind = kind.value_type
    fitting = (types.is_integer, types.is_fixed_size_binary, types.is_null, types.is_decimal)
    if any(fits(kind) for fits in fitting) or is_bytes(types, kind) or _is_text(types, kind):
        return True
    return bool(types.is_temporal(kind) and not types.is_duration(kind))


def holds_files(arrow: Any, kind: Any) -> bool:
    """Return True for a column as `datasets` writes images and sounds."""
    if not arrow.types.is_struct(kind):
        return False
    parts = {field.name: field.type for field in kind}
    path = parts.get("path", arrow.null())
    return (
        len(parts) == kind.num_fields
        and "bytes" in parts
        and parts.keys() <= {"bytes", "path"}
        and is_bytes(arrow.types, parts["bytes"])
        # null: as pyarrow infers it from paths that are all None
        and (arrow.types.is_null(path) or _is_text(arrow.types, path))
    )


def is_bytes(types: Any, kind: Any) -> bool:
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _is_text(types: Any, kind: Any) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def kind_of(arrow: Any, array: Any) -> str:
    """Return the kind of a column's values."""
    kind, types = array.type, arrow.types
    if _is_number(types, kind):
        return "bool" if types.is_boolean(kind) else "float" if types.is_floating(kind) else "int"
    if is_bytes(types, kind) or _is_text(types, kind):
        return "str" if _is_text(types, kind) else "bytes"
    return "json" if _numbers_of(types, array) is None else "array"


def getter(arrow: Any, array: Any, kind: str) -> Get:
    """Return a function from a row's number to its value."""
    types = arrow.types
    if kind == "json":
        return lambda row: array[row].as_py()
    if kind in ("int", "float", "bool"):
        listed: list[Any] = array.to_pylist()
        return listed.__getitem__
    missing = nulls_of(array).tolist() if array.null_count else None
    if kind != "array":
        bounds = _bounds(types, array)
        data = array.buffers()[2]
        at, view = bounds.tolist(), memoryview(data if data is not None else b"")
        if kind == "str":
            return _but(missing, lambda row: str(view[at[row] : at[row + 1]], "utf-8"))
        return _but(missing, lambda row: view[at[row] : at[row + 1]].tobytes())
    flat, shape = _numbers_of(types, array)
    numbers = _numbers(flat)
    if shape:
        numbers = numbers.reshape(len(array), *shape)
        return _but(missing, lambda row: numbers[row].copy())
    at = _bounds(types, array).tolist()
    return _but(missing, lambda row: numbers[at[row] : at[row + 1]].copy())


def sizes_of(arrow: Any, array: Any, kind: str) -> Any:
    """Return the bytes of each row, or (all the same) of any."""
    if kind in ("int", "float", "bool"):
        return 8
    if kind in ("str", "bytes"):
        return np.diff(_bounds(arrow.types, array)).astype(np.int64)
    return array.nbytes // max(1, len(array))


def _but(missing: list[bool] | None, get: Get) -> Get:
    if missing is None:
        return get
    return lambda row: None if missing[row] else get(row)


def _is_number(types: Any, kind: Any) -> bool:
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))


def _numbers(array: Any) -> Any:
    """Return numbers as (n,) in numpy; 0 where they are null: integers must not become floats."""
    if array.null_count:
        array = array.fill_null(False if str(array.type) == "bool" else 0)
    return array.to_numpy(zero_copy_only=False)


def nulls_of(array: Any) -> Any:
    """Return which values are null: (n,) bool."""
    return array.is_null().to_numpy(zero_copy_only=False)


def _bounds(types: Any, array: Any) -> Any:
    """Return where values of a list, string or binary array begin, and the last ends: (n + 1,)."""
    if not len(array):  # then there may be no buffer
        return np.zeros(1, np.int64)
    kind, buffers = array.type, array.buffers()
    lists = types.is_list(kind) or types.is_large_list(kind)
    large = types.is_large_list(kind) or types.is_large_string(kind) or types.is_large_binary(kind)
    dtype = np.dtype(np.int64 if large else np.int32)
    bounds = np.frombuffer(buffers[1], dtype, len(array) + 1, array.offset * dtype.itemsize)
    end = len(array.values) if lists else buffers[2].size if buffers[2] is not None else 0
    if (np.diff(bounds) < 0).any() or bounds[0] < 0 or bounds[-1] > end:
        raise ValueError("values that are not within their column")
    return bounds


def _numbers_of(types: Any, array: Any) -> Any:
    """Return the numbers in an array of lists, and their shape if it is fixed; None: others."""
    kind = array.type
    if types.is_list(kind) or types.is_large_list(kind):
        values = array.values
        return None if values.null_count or not _is_number(types, values.type) else (values, ())
    shape: list[int] = []
    values, start, count = array, 0, len(array)
    while types.is_fixed_size_list(values.type):
        size = values.type.list_size
        shape.append(size)
        start, count = (start + values.offset) * size, count * size
        values = values.values
    if not shape or not count or not _is_number(types, values.type):
        return None
    values = values.slice(start, count)
    if values.null_count and nulls_of(values).reshape(len(array), -1)[~nulls_of(array)].any():
        return None
    return values, tuple(shape)


def simplified(arrow: Any, array: Any) -> Any:
    """Return an array of nulls, numbers, text, bytes, or lists and structs of these."""
    kind, types = array.type, arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        return simplified(arrow, array.storage)
    if types.is_dictionary(kind):
        return simplified(arrow, array.dictionary_decode())
    if types.is_timestamp(kind) and kind.tz is not None:  # as UTC, which needs no table of zones
        plain = array.cast(arrow.timestamp(kind.unit)).cast(arrow.string())
        return arrow.compute.binary_join_element_wise(plain, "Z", "")
    for fits, target in (
        (types.is_float16, arrow.float32),  # of which some releases make numpy's
        (types.is_string_view, arrow.large_string),
        (types.is_binary_view, arrow.large_binary),
        (types.is_fixed_size_binary, arrow.binary),
        (types.is_duration, arrow.int64),
        (types.is_temporal, arrow.string),
        (types.is_decimal, arrow.string),
    ):
        if fits(kind):
            return array.cast(target())
    if _is_number(types, kind) or types.is_null(kind):
        return array
    if is_bytes(types, kind) or _is_text(types, kind):
        return array
    return _nested(arrow, array)


def _nested(arrow: Any, array: Any) -> Any:
    """Return an array of structs, maps or lists with `simplified` parts. Lists may be views."""
    kind, types = array.type, arrow.types
    mask = array.is_null() if array.null_count else None
    if types.is_struct(kind):
        parts = [simplified(arrow, array.field(i)) for i in range(kind.num_fields)]
        names = [field.name for field in kind]
        if len(set(names)) < len(names):
            raise ValueError("a struct has two fields of one name")
        return arrow.StructArray.from_arrays(parts, names, mask=mask) if parts else array
    if types.is_map(kind):
        pairs = arrow.StructArray.from_arrays(
            [simplified(arrow, array.keys), simplified(arrow, array.items)], ["key", "value"]
        )
        return arrow.ListArray.from_arrays(array.offsets, pairs, mask=mask)
    if types.is_list_view(kind):
        return _nested(arrow, array.cast(arrow.list_(kind.value_type)))
    if types.is_large_list_view(kind):
        return _nested(arrow, array.cast(arrow.large_list(kind.value_type)))
    if types.is_fixed_size_list(kind):
        values = simplified(arrow, array.values)
        return arrow.FixedSizeListArray.from_arrays(values, kind.list_size, mask=mask)
    if types.is_list(kind) or types.is_large_list(kind):
        form = arrow.ListArray if types.is_list(kind) else arrow.LargeListArray
        return form.from_arrays(array.offsets, simplified(arrow, array.values), mask=mask)
    raise arrow.lib.ArrowNotImplementedError(f"columns of type {kind}")
