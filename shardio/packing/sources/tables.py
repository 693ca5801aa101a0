"""Tables as packed columns: CSV, TSV, JSON Lines, a JSON array of objects, Parquet.

    values of a column               kind    CSV and TSV, where all that is there is ...
    None alone                       str     empty
    integers that fit 64 bits        int     0, -12; 007 and 1_000 are text
    numbers                          float   1.5, 1e-3, nan, inf
    booleans                         bool    true, FALSE
    text; larger integers            str     anything else
    lists, objects, several of these json    -
    binary (Parquet alone)           bytes   -

What is not there is None: an empty cell, null, a name that an object lacks. Rows are never kept as
objects: a column takes the bytes of its values, and 9 a row. Source: RFC 4180, and
https://jsonlines.org for the lines.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import SourceError, printable
from ...formats.foreign.parquet import ParquetFile
from ...formats.sample import MAX_FIELDS, MAX_HEAD, pack, unpack
from ...names import from_file_name, key_text
from ...storage.location import locate
from .base import Ints
from .field_names import LABELS, PATHS
from .files import first_sign

_ROWS = 4096  # rows that become columns at once
_BYTES = 16 << 20  # bytes of text that become columns at once
_MAX_LINE = 16 << 20  # bytes
_SNIFFED = 50  # lines by which it is told what separates cells
_MAX_CELL = MAX_HEAD  # characters; a record could not hold more

_SPACE = re.compile(r"[ \t\r\n]*")

_HEADERS = {*PATHS, *LABELS, "id", "image_id"}  # which a first line of words may have

_UNPACK = {".gz": "gunzip -k", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zst": "unzstd"}

Seal = Any  # of hashlib


class Column:
    """The values of one column, packed.

    values   (rows,) numbers or booleans; of other kinds, the bytes of all values one after another
    ends     (rows + 1,) int64: where each value begins, and the last one ends; None for numbers
    missing  (rows,) bool: which are None; None where none is
    """

    __slots__ = ("ends", "kind", "missing", "values")

    def __init__(
        self, kind: str, values: Any, ends: Ints | None = None, missing: Any = None
    ) -> None:
        self.kind, self.values, self.ends = kind, values, ends
        self.missing = missing if missing is not None and missing.any() else None

    def __len__(self) -> int:
        return len(self.values) if self.ends is None else len(self.ends) - 1

    def get(self, row: int) -> Any:
        """Return the value of a row."""
        if self.missing is not None and self.missing[row]:
            return None
        if self.ends is None:
            return self.values[row].item()
        return _DECODE[self.kind](self.data(row))

    def data(self, row: int) -> bytes:
        """Return the bytes of a value, of a column that is not of numbers."""
        assert self.ends is not None
        return bytes(self.values[self.ends[row] : self.ends[row + 1]])

    def decoded(self, rows: Ints) -> Iterator[Any]:
        """Yield the values of these rows."""
        decode = _DECODE.get(self.kind)
        for value in self.raw(rows):
            yield value if value is None or decode is None else decode(value)

    def raw(self, rows: Ints) -> Iterator[Any]:
        """Yield the values of these rows: numbers, or bytes of others; None where there is none."""
        for piece in pieces(rows):
            found = self.values[piece].tolist() if self.ends is None else self._cut(piece)
            for value, empty in zip(found, self._missing(piece).tolist(), strict=True):
                yield None if empty else value

    def piece(self, rows: Ints) -> list[Any]:
        """Return the values of these rows, as `Column` takes them."""
        if self.ends is None:
            return [self.kind, self.values[rows], None, self._missing(rows)]
        lengths = self.ends[rows + 1] - self.ends[rows]
        ends = np.append(0, np.cumsum(lengths))
        return [self.kind, b"".join(self._cut(rows)), ends, self._missing(rows)]

    def take(self, rows: Ints) -> Column:
        """Return a column of the values of these rows; None where a row is -1."""
        kind, values, ends, missing = self.piece(rows)
        return Column(kind, values, ends, missing | (rows < 0))

    @property
    def mask(self) -> Any:
        """Return (rows,) bool: which values are None."""
        return self._missing(np.arange(len(self)))

    def array(self) -> Any:
        """Return (rows,) values to select by: numbers, or objects of text; masked where None."""
        values = self.values
        if self.ends is not None:
            values = np.empty(len(self), object)
            values[:] = list(self.decoded(np.arange(len(self))))
        return values if self.missing is None else np.ma.MaskedArray(values, self.missing)

    def sizes(self) -> Any:
        """Return the bytes of each value: (rows,) int64, or one for all."""
        return 8 if self.ends is None else np.diff(self.ends)

    def seal(self, seal: Seal, rows: Ints) -> None:
        """Feed the values of these rows, in this order, to a hash."""
        seal.update(self.kind.encode())
        for piece in pieces(rows):
            seal.update(self._missing(piece).tobytes())
            if self.ends is None:
                values = self.values[piece]
                seal.update(values.astype(values.dtype.newbyteorder("<")).tobytes())
            else:
                seal.update((self.ends[piece + 1] - self.ends[piece]).astype("<i8").tobytes())
                seal.update(b"".join(self._cut(piece)))

    def _missing(self, rows: Ints) -> Any:
        return np.zeros(len(rows), np.bool_) if self.missing is None else self.missing[rows]

    def _cut(self, rows: Ints) -> Iterator[Any]:
        assert self.ends is not None
        values = self.values
        ends = zip(self.ends[rows].tolist(), self.ends[rows + 1].tolist(), strict=True)
        return (values[start:end] for start, end in ends)


@dataclass(frozen=True)
class Table:
    """The columns of a table, and how many rows they have."""

    columns: dict[str, Column]  # columns by name, in the order of the file
    rows: int


def read(path: bytes) -> Table:
    """Read the table in a file. Raises SourceError, DamageError, DependencyError."""
    shown, form = printable(path), ending(path)
    if form is None:
        raise SourceError(
            f"{shown}: a listing's name ends in {', '.join(_READERS)}; this one does not"
        )
    if not os.path.isfile(path):
        what = "this is no file" if os.path.lexists(path) else "there is no such file"
        raise SourceError(f"{shown}: expected a listing, but {what}")
    try:
        return _READERS[form](path)
    except OSError as error:
        raise SourceError(f"{shown}: cannot be read: {error.strerror}") from None


def read_plain(path: bytes, names: Sequence[str] = (), *, gaps: bool = True) -> Table:
    """Read a table as it was written by hand or by a script, with these names of its columns.

    Cells are separated by tabs, commas or blanks. Comments (#) on top are left out, and a first
    line with the number of rows. Without `names`, a first line of words over numbers has them, also
    if it does not name the first column; else they are column1, column2, ... With blanks, the last
    of the `names` takes the rest of a line. Empty lines are left out; without `gaps`, only the last
    ones. Raises SourceError.
    """
    with contextlib.closing(_Lines(path)) as lines, _csv_errors(lines):
        sign = {".csv": ",", ".tsv": "\t"}.get(ending(path) or "") or _separator(path, names)
        rows = _plain_rows(lines, sign, len(names) - 1)
        if not gaps:
            rows = _without_gaps(lines, rows)
        first = list(itertools.islice(rows, 3))
        widths = [len(row) for _, row in first]
        if widths[:1] == [1] and max(widths) > 1 and first[0][1][0].isdigit():
            first.pop(0)
        if not first:
            raise SourceError(f"{lines.shown}: there are no rows in it")
        found = _names_of([row for _, row in first], bool(names))
        if found is not None:
            first.pop(0)
        width = len(first[0][1]) if first else len(found or names)
        found = [*names] or found or [f"column{i + 1}" for i in range(width)]
        return _filled(lines, itertools.chain(first, rows), found)


def _without_gaps(
    lines: _Lines, rows: Iterable[tuple[int, list[str]]]
) -> Iterator[tuple[int, list[str]]]:
    """Yield rows. Raises SourceError for an empty line before another one."""
    empty = 0
    for number, row in rows:
        if row and empty:
            raise lines.error("is empty, and rows of this table are numbered", empty)
        empty = 0 if row else empty or number
        yield number, row


def _names_of(rows: list[list[str]], called: bool) -> list[str] | None:
    """Return the names of columns that the first row has; None where it is a row like others.

    called: they have other names.
    """
    if len(rows) < 2:
        return None
    names, values = rows[:2]
    number = _LOOKS["float"]
    if any(map(number, names)) or not all(names):
        return None
    if len(values) == len(names) + 1:
        return [PATHS[0], *names]
    named = any(map(number, values)) or (
        not called and any(name.casefold() in _HEADERS for name in names)
    )
    return names if len(names) == len(values) and named else None


def _separator(path: bytes, names: Sequence[str]) -> str | None:
    """Return what separates the cells of a text; None for blanks."""
    with contextlib.closing(_Lines(path)) as lines:
        text = [line for line in itertools.islice(lines, _SNIFFED) if line[0] != "#"]
    for sign in ("\t", ","):
        counts = {line.count(sign) for line in text}
        if len(counts) == 1 and (counts == {len(names) - 1} if names else counts != {0}):
            return sign
    return None


def _plain_rows(lines: _Lines, sign: str | None, most: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of lines, but for comments on top. most: cuts in a line with blanks."""
    text = itertools.dropwhile(lambda line: line[0] == "#", lines)
    if sign is None:
        for line in text:
            yield lines.number, line.strip().split(None, most)
    else:
        for row in csv.reader(text, delimiter=sign, strict=True):
            yield lines.number, [cell.strip() for cell in row]


def ending(path: bytes) -> str | None:
    """Return the ending of a listing's name; None when it is of no listing.

    Raises SourceError for one that is compressed, with the command that unpacks it.
    """
    stem, last = os.path.splitext(key_text(path).lower())
    if last in _UNPACK and os.path.splitext(stem)[1] in _READERS:
        raise SourceError(
            f"{printable(path)}: compressed listings are not read. Unpack it first:\n"
            f"  {_UNPACK[last]} {printable(path, 4096)}"
        )
    return last if last in _READERS else None


def holds_bytes(path: bytes) -> bool:
    """Tell whether a Parquet file has bytes. Raises DamageError, SourceError, DependencyError."""
    with _parquet_file(path) as file:
        return file.holds_bytes


# --- text -----------------------------------------------------------------------------------------


class _Lines:
    """The lines of a text file, with their ends. Raises SourceError on what is no text."""

    def __init__(self, path: bytes) -> None:
        self.shown = printable(path)
        self.number = 0  # of the line that was given last; from 1
        self.bytes = 0  # that were read
        self._file = open(path, "rb")  # noqa: SIM115 - `close` does

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(_MAX_LINE + 1):
            self.number += 1
            self.bytes += len(line)
            if len(line) > _MAX_LINE:
                raise self.error(f"longer than {_MAX_LINE:,} bytes")
            if self.number == 1:
                if line.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise self.error(
                        "UTF-16; listings are read as UTF-8. Write it anew, as by: iconv -f "
                        "UTF-16 -t UTF-8"
                    )
                line = line.removeprefix(b"\xef\xbb\xbf")
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise self.error(
                    f"not UTF-8: byte {error.start} of it is 0x{line[error.start]:02x}"
                ) from None
            if "\0" in text:
                raise self.error("it has a byte of 0, so this is no text" + _way_out(text))
            yield text

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def error(self, why: str, number: int | None = None) -> SourceError:
        """Return the error to raise for a line; default: the one that was read last."""
        return SourceError(f"{self.shown}: line {number or self.number}: {why}")


def _way_out(text: str) -> str:
    """Return what to do with a file of MATLAB's."""
    if not text.startswith("MATLAB "):
        return ""
    return (
        ". It is a file of MATLAB: write what you need of it as a CSV, as docs/datasets.md does by "
        "scipy.io.loadmat"
    )


def _csv(path: bytes, delimiter: str = ",") -> Table:
    with contextlib.closing(_Lines(path)) as lines, _csv_errors(lines):
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        names = next(reader, [])
        _check_header(lines, names, delimiter)
        return _filled(lines, ((reader.line_num, row) for row in reader), names)


@contextlib.contextmanager
def _csv_errors(lines: _Lines) -> Iterator[None]:
    """Raise SourceError for what `csv` refuses, with cells as long as they may be."""
    before = csv.field_size_limit(_MAX_CELL)
    try:
        yield
    except csv.Error as error:
        why = next((why for said, why in _CSV_ERRORS.items() if said in str(error)), str(error))
        raise lines.error(why) from None
    finally:
        csv.field_size_limit(before)


_CSV_ERRORS = {  # what `csv` says, and what that means here
    "field limit": f"a cell of more than {_MAX_CELL:,} characters; is a quote not closed?",
    "new-line character": (
        "a carriage return within it; write the file anew with lines that end in \\n"
    ),
    "end of data": "the last cell's quote is not closed",
}


def _filled(lines: _Lines, numbered: Iterable[tuple[int, list[str]]], names: list[str]) -> Table:
    """Make a table of rows, with the numbers of their lines. Raises SourceError."""
    columns = [_Cells() for _ in names]
    rows: list[list[str]] = []
    count, begun = 0, lines.bytes

    def flush() -> None:
        for column, values in zip(columns, zip(*rows, strict=True), strict=False):
            column.add([cell or None for cell in values])
        rows.clear()

    for number, row in numbered:
        if len(row) != len(names):
            if not row:  # an empty line
                continue
            raise lines.error(
                f"{len(row):,} cells, expected {len(names):,}: "
                f"{', '.join(map(printable, names[:10]))}{', ...' if len(names) > 10 else ''}",
                number,
            )
        rows.append(row)
        count += 1
        if len(rows) == _ROWS or lines.bytes - begun >= _BYTES:
            flush()
            begun = lines.bytes
    flush()
    # each is let go of before the next is made
    return Table({name: _inferred(columns.pop(0)) for name in names}, count)


def _check_header(lines: _Lines, names: list[str], delimiter: str) -> None:
    """Raise SourceError for a first line that does not name all columns."""
    if not names:
        raise SourceError(
            f"{lines.shown}: expected a first line with the names of columns; the file is empty"
        )
    if len(names) > MAX_FIELDS:
        raise lines.error(f"{len(names):,} columns; the limit is {MAX_FIELDS:,}")
    if "" in names:
        raise lines.error(
            f"column {names.index('') + 1} has no name; name it, or leave it out (pandas: "
            "to_csv(..., index=False))"
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise lines.error(f"several columns are called {printable(twice[0])!r}; rename them")
    if len(names) == 1:
        other = next((sign for sign in (";", "\t", ",", "|") if sign in names[0]), None)
        if other is not None:
            raise lines.error(
                f"one column called {printable(names[0])!r}: cells are separated by {other!r}, and "
                f"expected was {delimiter!r}: .csv has commas, .tsv has tabs"
            )


def _inferred(cells: _Cells) -> Column:
    """Make a column of text cells, by what all of them look like."""
    looks = _LOOKS if cells.types else {}
    for piece in cells:
        found = [cell for cell in piece if cell is not None]
        looks = {kind: look for kind, look in looks.items() if all(map(look, found))}
        if not looks:
            break
    return _column(cells, next(iter(looks), "str"))


_LOOKS: dict[str, Callable[[str], Any]] = {
    "bool": re.compile(r"true|false", re.I).fullmatch,
    "int": re.compile(r"0|-?[1-9][0-9]*").fullmatch,
    "float": re.compile(
        r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]+)?|-?(?:nan|inf|infinity)",
        re.I,
    ).fullmatch,
}


def _bool(cell: bool | str) -> bool:
    return cell.lower() == "true" if isinstance(cell, str) else cell


def _int(cell: int | str) -> int:
    if isinstance(cell, str) and len(cell) > 20:  # int() refuses thousands of digits
        raise OverflowError
    return int(cell)


def _float(cell: float | str) -> float:
    value = float(cell)
    if isinstance(cell, str) and math.isinf(value) and cell[-1].isdigit():
        raise OverflowError
    return value


# --- JSON -----------------------------------------------------------------------------------------


class _Growing:
    """A table to which objects are added; any of them may have new names."""

    def __init__(self, error: Callable[[str, int], SourceError]) -> None:
        self._columns: dict[str, _Cells] = {}
        self._error = error
        self._begun = 0  # where the rows begin that are not packed yet
        self._rows: list[dict[str, Any]] = []
        self._numbers: list[int] = []  # of lines or rows, for messages
        self._count = 0

    def add(self, row: Any, number: int, end: int) -> None:
        """Add an object, of this line or row, which ends there in the file. Raises SourceError."""
        if type(row) is not dict:
            raise self._error(f"expected an object, found {_JSON_TYPES[type(row)]}", number)
        if not row.keys() <= self._columns.keys():
            for name in row:
                self._columns.setdefault(name, _Cells(self._count))
            if len(self._columns) > MAX_FIELDS:
                raise self._error(f"there are more than {MAX_FIELDS:,} names by now", number)
        self._rows.append(row)
        self._numbers.append(number)
        if len(self._rows) == _ROWS or end - self._begun >= _BYTES:
            self._flush()
            self._begun = end

    def _flush(self) -> None:
        """Pack the rows that were added."""
        if not self._rows:
            return
        for name, column in self._columns.items():
            values = [row.get(name) for row in self._rows]
            try:
                column.add(values)
            except (ValueError, RecursionError):
                self._refuse(name)
                raise
        self._count += len(self._rows)
        self._rows.clear()
        self._numbers.clear()

    def _refuse(self, name: str) -> None:
        """Raise SourceError for the value under a name that cannot be kept."""
        for row, number in zip(self._rows, self._numbers, strict=True):
            try:
                _Cells().add([row.get(name)])
            except (ValueError, RecursionError) as error:
                why = "nested too deep"
                if isinstance(error, UnicodeEncodeError):
                    why = "text with half of a surrogate pair, which is no character"
                raise self._error(f"{printable(name)!r}: {why}", number) from None

    def table(self) -> Table:
        """Return the table of all that was added."""
        self._flush()
        names = list(self._columns)
        return Table({name: _native(self._columns.pop(name)) for name in names}, self._count)


def _json_lines(path: bytes) -> Table:
    with contextlib.closing(_Lines(path)) as lines:
        table = _Growing(lines.error)
        for line in lines:
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise lines.error(_not_json(error)) from None
            table.add(row, lines.number, lines.bytes)
        return table.table()


def _json(path: bytes) -> Table:
    """Read an array of objects; or lines of them, under a name that does not say so."""
    if first_sign(path) != b"[":
        return _json_lines(path)
    shown = printable(path)
    with open(path, "rb") as file:
        data = file.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(f"{shown}: byte {error.start}: not UTF-8") from None
    del data

    def wrong(why: str, number: int) -> SourceError:
        return SourceError(f"{shown}: row {number}: {why}")

    table, decoder, row = _Growing(wrong), json.JSONDecoder(), 0
    at = _skip(text, _skip(text, 0) + 1)
    while text[at : at + 1] != "]":
        try:
            value, at = decoder.raw_decode(text, at)  # one by one: all at once take 10 times more
        except (ValueError, RecursionError) as error:
            raise wrong(_not_json(error), row) from None
        table.add(value, row, at)
        row += 1
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
            if text[at : at + 1] == "]":
                raise wrong("expected an object after the comma, found the end of the array", row)
        elif text[at : at + 1] != "]":
            raise wrong("expected a comma, or the end of the array, after the row before", row)
    if _skip(text, at + 1) != len(text):
        raise SourceError(f"{shown}: there is more text after the end of the array")
    return table.table()


def _skip(text: str, at: int) -> int:
    matched = _SPACE.match(text, at)
    assert matched is not None
    return matched.end()


def _not_json(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg}, at line {error.lineno} column {error.colno} of the text"
    if isinstance(error, RecursionError):
        return "nested too deep"
    return f"not JSON that can be read: {error}"


_JSON_TYPES: dict[type, str] = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


# --- Parquet --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _parquet_file(path: bytes) -> Iterator[ParquetFile]:
    folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
    with contextlib.closing(ParquetFile(locate(folder), from_file_name(name), b"")) as file:
        yield file


def _parquet(path: bytes) -> Table:
    with _parquet_file(path) as file:
        if file.files:
            raise SourceError(
                f"{printable(path)}: column {printable(min(file.files))!r} holds files, so it is a "
                "dataset, not a listing: make an index by `shardio index`, and pack that"
            )
        columns = {name: _Cells() for name in file.wanted}
        kinds: dict[str, set[str]] = {name: set() for name in columns}
        for number in range(len(file.starts) - 1):
            group = file.group(number, cache=False)
            for name in group.arrays:
                kinds[name].add(group.kinds[name])
                get = group.get(name)
                for start in range(0, group.rows, _ROWS):
                    rows = range(start, min(start + _ROWS, group.rows))
                    columns[name].add([_without_arrays(get(row)) for row in rows])
        typed = {
            name: next(iter(known)) if known and known <= _TYPED else None
            for name, known in kinds.items()
        }
        found = {name: _native(columns.pop(name), kind) for name, kind in typed.items()}
        return Table(found, file.starts[-1])


def _without_arrays(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


# --- columns --------------------------------------------------------------------------------------


class _Cells:
    """The values of a column while its table is read, packed piece by piece."""

    def __init__(self, before: int = 0) -> None:
        self._before = before  # rows that had no such column
        self._pieces: list[bytes] = []
        self.types: set[str] = set()

    def add(self, values: Iterable[Any]) -> None:
        """Pack values. Raises ValueError, RecursionError for what cannot be kept."""
        values = list(values)
        self.types |= {kind.__name__ for kind in set(map(type, values))} - {"NoneType"}
        try:
            piece = pack(values)
        except OverflowError:
            if any(type(value) is int and value not in _INTEGERS for value in values):
                self.types.add("large")
            piece = pack(_fitting(values))
        if not self.types.isdisjoint(("list", "dict")):
            unpack(piece)  # msgpack packs one level more than it unpacks
        self._pieces.append(piece)

    def __iter__(self) -> Iterator[list[Any]]:
        for start in range(0, self._before, _ROWS):
            yield [None] * (min(start + _ROWS, self._before) - start)
        for piece in self._pieces:
            yield unpack(piece)


_TYPED = frozenset(("int", "float", "bool", "str", "bytes"))
_FITTING = (  # kinds, and the types of values that they take; the first that takes all
    ("str", {"str"}),  # of nothing too
    ("bool", {"bool"}),
    ("int", {"int"}),
    ("str", {"int", "large"}),
    ("float", {"int", "float", "large"}),
    ("bytes", {"bytes"}),
    ("json", {"bool", "int", "float", "large", "str", "bytes", "list", "dict"}),
)
_INTEGERS = range(-(1 << 63), 1 << 64)


def _fitting(value: Any) -> Any:
    """Return the same with integers beyond 64 bits as text."""
    if type(value) is list:
        return [_fitting(one) for one in value]
    if type(value) is dict:
        return {name: _fitting(one) for name, one in value.items()}
    if type(value) is int and value not in _INTEGERS:
        return str(value)
    return value


def _native(cells: _Cells, kind: str | None = None) -> Column:
    """Make a column of values that have types; of this kind, or of the one that fits all."""
    return _column(
        cells, kind or next(kind for kind, fitting in _FITTING if cells.types <= fitting)
    )


def _column(cells: _Cells, kind: str) -> Column:
    """Make a column of a kind; of text, where 64 bits do not hold its numbers."""
    for read, dtype in _NUMBERS.get(kind, ()):
        with contextlib.suppress(OverflowError):
            return _numbers(kind, cells, read, dtype)
    kind = "str" if kind in _NUMBERS else kind
    encode = _ENCODE[kind]
    data = bytearray()
    lengths, masks = [np.zeros(1, np.int64)], [np.zeros(0, np.bool_)]
    for piece in cells:
        filled = [b"" if value is None else encode(value) for value in piece]
        data += b"".join(filled)
        lengths.append(np.fromiter(map(len, filled), np.int64, len(filled)))
        masks.append(np.array([value is None for value in piece], np.bool_))
    return Column(kind, data, np.cumsum(np.concatenate(lengths)), np.concatenate(masks))


def _numbers(kind: str, cells: _Cells, read: Callable[[Any], Any], dtype: Any) -> Column:
    """Make a column of numbers. Raises OverflowError where the type does not hold all of them."""
    arrays, masks = [np.zeros(0, dtype)], [np.zeros(0, np.bool_)]
    for piece in cells:
        masks.append(np.array([value is None for value in piece], np.bool_))
        plain = [0 if value is None else read(value) for value in piece]
        if dtype is np.uint64 and min(plain) < 0:  # numpy below 2 would wrap it
            raise OverflowError
        arrays.append(np.array(plain, dtype))
    return Column(kind, np.concatenate(arrays), None, np.concatenate(masks))


def packed_column(kind: str, values: Sequence[bytes | None]) -> Column:
    """Make a column of values that are packed already; None where there is none."""
    ends = np.append(0, np.cumsum([len(one or b"") for one in values])).astype(np.int64)
    missing = np.array([one is None for one in values], np.bool_)
    return Column(kind, b"".join(one or b"" for one in values), ends, missing)


def number_column(values: Sequence[int | None]) -> Column:
    """Make a column of integers of 64 bits; None where there is none."""
    missing = np.array([one is None for one in values], np.bool_)
    return Column("int", np.array([one or 0 for one in values], np.int64), None, missing)


def seal_columns(seal: Seal, columns: Mapping[str, Column], rows: Ints) -> None:
    """Feed the names of columns, and their values of these rows, to a hash."""
    for name, column in columns.items():
        seal.update(name.encode() + b"\0")
        column.seal(seal, rows)


def pieces(rows: Ints) -> Iterator[Ints]:
    """Cut numbers of rows into pieces."""
    for start in range(0, len(rows), _ROWS):
        yield rows[start : start + _ROWS]


# How numbers are read of values or of text, and the types tried to hold all of a column.
_NUMBERS: dict[str, tuple[tuple[Callable[[Any], Any], Any], ...]] = {
    "bool": ((_bool, np.bool_),),
    "int": ((_int, np.int64), (_int, np.uint64)),
    "float": ((_float, np.float64),),
}
_ENCODE: dict[str, Callable[[Any], bytes]] = {
    "str": lambda value: str(value).encode(),
    "bytes": bytes,
    "json": pack,
}
_DECODE: dict[str, Callable[[Any], Any]] = {
    "str": lambda data: data.decode(),
    "bytes": bytes,
    "json": unpack,
}
_READERS: dict[str, Callable[[bytes], Table]] = {
    ".csv": _csv,
    ".tsv": functools.partial(_csv, delimiter="\t"),
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".pq": _parquet,
}
