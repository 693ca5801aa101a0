"""What `annotate` is given: values of fields, by key or in the order of a dataset.

a table     CSV, TSV, JSON Lines, Parquet: a column has the keys, others are fields
an array    an .npy, or of numpy: entry i is of record i
in Python   {key: value}, {key: {field: value}}, or pairs of a key and such a dict
"""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import OptionError, SampleError, SourceError, printable, there_are
from ..formats.foreign.webdataset import npy_header
from ..formats.overlay import ROW
from ..formats.sample import infer_fields
from ..names import KEY, key_bytes
from ..units import show_count
from .sources.field_names import PATHS, known, nameable
from .sources.image_names import texts
from .sources.tables import ending, read

_KEYS = (KEY, "key", *PATHS)  # how columns of keys are called
_HEADER = 1 << 16  # bytes that are read for the header of an .npy
_BLOCK = 4 << 20  # bytes of an .npy that are read at once
_BY_DTYPE = {"b": "bool", "i": "int", "u": "int", "f": "float", "U": "str"}
_SHOWN = 5  # fields or keys that are named

Get = Callable[[int], Any]
Fields = Mapping[str, str] | Iterable[str] | None


@dataclass(frozen=True)
class GivenValues:
    """Values of fields, in rows.

    keys    of each row the key; None: row i is of record i
    fields  of each its kind, and what gives the value of a row; the kind None: all are None
    empty   what to say of a cell of a table that is empty; "": none is
    """

    shown: str
    rows: int
    keys: list[bytes] | None
    fields: dict[str, tuple[str | None, Get]]
    empty: str = ""


def read_values(given: Any, fields: Fields, key: str | None) -> GivenValues:
    """Read values from whatever they are given in. Raises OptionError, SourceError, DamageError.

    fields  fields by their names, and what they are called there; None: all
    key     the column of a table that has the keys; None: by its name
    """
    named = _named(fields)
    if isinstance(given, (str, os.PathLike)):
        path = os.fsencode(given)
        if path.lower().endswith(b".npy"):
            found = _of_npy(path, named)
        else:
            return _checked(_of_table(path, named, key))
    elif isinstance(given, np.ndarray):
        found = _of_array("the array", given.shape, given.dtype, given.__getitem__, named)
    elif isinstance(given, Iterable):
        found = _of_pairs(given.items() if isinstance(given, Mapping) else given, named)
    else:
        raise OptionError(
            f"annotate: expected a path, a dict, pairs of key and dict, or an array; found "
            f"{type(given).__name__}"
        )
    if key is not None:
        raise OptionError(f"key is {printable(repr(key))}: it is for tables, whose column it names")
    return _checked(found)


def _named(fields: Fields) -> dict[str, str] | None:
    if fields is None or isinstance(fields, Mapping):
        named = None if fields is None else {name: of or name for name, of in fields.items()}
    elif isinstance(fields, str):
        named = {fields: fields}
    else:
        named = {name: name for name in fields}
    if named is not None and not named:
        raise OptionError("fields is empty; leave it out to take all")
    return named


def _checked(found: GivenValues) -> GivenValues:
    """Return values, once their names and keys are such. Raises OptionError, SourceError."""
    for name in found.fields:
        if name in (KEY, ROW) or not nameable(name):
            raise OptionError(f"{found.shown}: no field can be called {printable(name)!r}")
    if not found.fields:
        raise OptionError(f"{found.shown}: it has no field, but keys alone")
    row_of: dict[bytes, int] = {}
    for row, key in enumerate(found.keys or ()):
        if row_of.setdefault(key, row) != row:
            raise SourceError(
                f"{found.shown}: rows {row_of[key] + 1} and {row + 1} both have the key "
                f"{printable(key)}; expected one row for each"
            )
    return found


def _of_table(path: bytes, named: dict[str, str] | None, key: str | None) -> GivenValues:
    shown = printable(path, 4096)
    ending(path)  # says what unpacks one that is compressed
    columns = read(path).columns
    own = known(_KEYS, columns) if key is None else key
    if own is None or own not in columns:
        asked = "no column has the keys of records" if key is None else f"no column is {key!r}"
        raise OptionError(f"{shown}: {asked}; {there_are(columns, key or '')}. --key names it")
    chosen = named or {name: name for name in columns if name != own}
    for name, theirs in chosen.items():
        if theirs not in columns:
            raise OptionError(
                f"{shown}: field {printable(name)!r}: no column is called {printable(theirs)!r}; "
                f"{there_are(columns, theirs)}"
            )
    keys = list[bytes]()
    for row, text in enumerate(texts(columns[own])):
        if text is None:
            raise SourceError(f"{shown}: row {row + 1} has no key in its column {printable(own)!r}")
        keys.append(text)
    fields: dict[str, tuple[str | None, Get]] = {}
    lacks = ""
    for name, theirs in chosen.items():
        column = columns[theirs]
        rows = np.flatnonzero(column.mask)
        fields[name] = (None if 0 < len(keys) == len(rows) else column.kind), column.get
        if len(rows) and not lacks:
            more = f", and {len(rows) - 1:,} more" if len(rows) > 1 else ""
            of = printable(keys[rows[0]])
            lacks = (
                f"row {rows[0] + 1}, of {of}{more}: no value in the column {printable(theirs)!r}"
            )
    return GivenValues(shown, len(keys), keys, fields, lacks)


def _of_npy(path: bytes, named: dict[str, str] | None) -> GivenValues:
    """Read an .npy by range: a value is read when it is asked for."""
    shown = printable(path, 4096)
    try:
        with open(path, "rb") as file:
            start = file.read(_HEADER)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise SourceError(f"{shown}: cannot be read: {error.strerror}") from None
    try:
        shape, by_columns, dtype = npy_header(start)
    except ValueError as error:
        raise SourceError(f"{shown}: {error}") from None
    begin = _end_of_header(start)
    entry = math.prod(shape[1:]) * dtype.itemsize
    if dtype.hasobject or (by_columns and len(shape) > 1):
        what = "objects" if dtype.hasobject else "columns one after the other (Fortran's order)"
        raise SourceError(
            f"{shown}: it holds {what}; expected rows: np.save(path, np.ascontiguousarray(array))"
        )
    if not shape or size != begin + shape[0] * entry:
        raise SourceError(f"{shown}: its header states {shape} {dtype}, and it has {size:,} bytes")

    each = max(1, _BLOCK // max(1, entry))  # rows of a block

    @functools.lru_cache(1)  # rows are asked for in order
    def block(number: int) -> Any:
        rows = min(each, shape[0] - number * each)
        with open(path, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), rows * entry, begin + number * each * entry)
        if len(data) != rows * entry:
            raise SourceError(f"{shown}: it was cut short while it was read")
        return np.frombuffer(data, dtype).reshape(rows, *shape[1:])

    def get(row: int) -> Any:
        return block(row // each)[row % each]

    return _of_array(shown, shape, dtype, get, named)


def _end_of_header(start: bytes) -> int:
    """Return the byte at which the entries of an .npy begin."""
    if start[6] == 1:
        return 10 + int(struct.unpack_from("<H", start, 8)[0])
    return 12 + int(struct.unpack_from("<I", start, 8)[0])


def _of_array(
    shown: str, shape: tuple[int, ...], dtype: np.dtype[Any], get: Get, named: dict[str, str] | None
) -> GivenValues:
    """Give entries as values: numbers of an array of one dimension, else arrays."""
    name = _only(shown, named)
    kind = _BY_DTYPE.get(dtype.kind) if len(shape) == 1 else "array"
    if kind is None or not shape:
        raise SourceError(f"{shown}: {shape} {dtype} is no list of numbers, texts or arrays")
    plain = get if kind == "array" else lambda row: get(row).item()
    return GivenValues(shown, shape[0], None, {name: (kind, plain)})


def _only(shown: str, named: dict[str, str] | None) -> str:
    """Return the one field that values without a name are of. Raises OptionError."""
    if named is None or len(named) != 1:
        raise OptionError(f"{shown}: say by fields of which field these are: one name")
    return next(iter(named))


def _of_pairs(pairs: Iterable[Any], named: dict[str, str] | None) -> GivenValues:
    """Take pairs of a key, and a value or a dict of fields."""
    shown, keys, rows = "the values", list[bytes](), list[Mapping[str, Any]]()
    for pair in pairs:
        try:
            key, value = pair
            keys.append(key_bytes(key))
        except (TypeError, ValueError, AttributeError):
            raise OptionError(
                f"{shown}: row {len(rows) + 1}: expected a key and a dict of fields, found "
                f"{printable(repr(pair)[:80])}"
            ) from None
        rows.append(value if isinstance(value, Mapping) else {_only(shown, named): value})
    names = named or {name: name for row in rows for name in row}
    fields: dict[str, tuple[str | None, Get]] = {}
    for name, theirs in names.items():
        _refuse_gaps(shown, keys, rows, theirs)
        fields[name] = _kind_of(shown, name, [row[theirs] for row in rows]), _getter(rows, theirs)
    return GivenValues(shown, len(rows), keys, fields)


def _refuse_gaps(shown: str, keys: list[bytes], rows: list[Mapping[str, Any]], theirs: str) -> None:
    lack = [key for key, row in zip(keys, rows, strict=True) if theirs not in row]
    if lack:
        raise OptionError(
            f"{shown}: {show_count(len(lack), 'row')} without {printable(theirs)!r}, such as that "
            f"of {', '.join(map(printable, lack[:_SHOWN]))}; give None where there is no value"
        )


def _getter(rows: list[Mapping[str, Any]], name: str) -> Get:
    return lambda row: rows[row][name]


def _kind_of(shown: str, name: str, values: Iterable[Any]) -> str | None:
    """Return the kind that fits all values; None where all are None. Raises OptionError."""
    kinds: dict[str, Any] = {}
    seen = set[type]()
    for value in values:
        if value is None or type(value) in seen:
            continue
        seen.add(type(value))
        try:
            kind = infer_fields({"value": value})[1][1]
        except SampleError as error:
            raise OptionError(f"{shown}: field {printable(name)!r}: {error}") from None
        kinds.setdefault(kind, value)
    if kinds.keys() == {"int", "float"}:
        return "float"
    if len(kinds) > 1:
        raise OptionError(
            f"{shown}: field {printable(name)!r} has values of kinds {', '.join(sorted(kinds))}; "
            "expected one kind"
        )
    return next(iter(kinds), None)
