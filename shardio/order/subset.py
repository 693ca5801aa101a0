"""Choose some of a dataset's records, by the columns of its index or by number.

How it works. A selection is a sorted array of record numbers, or, where nearly all are chosen, of
those that are not. The order knows only how many records each shard has in the selection; `fetch`
asks the selection which records these are. So subsets obey the same order law. No image is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import OptionError, printable, there_are
from ..names import KEY, key_text
from .rng import Int64s


class Selection:
    """Hold records of a dataset, by their numbers in it.

    numbers       (n,) int64, ascending, no two alike
    shard_starts  (shards + 1,) int64: the number of each shard's first record; last, of all
    starts        (shards + 1,) int64: the same in places of the selection
    """

    def __init__(self, numbers: Int64s, shard_starts: Int64s) -> None:
        """Keep the numbers, which become read-only, and find where each shard's begin."""
        self.shard_starts = shard_starts
        numbers.flags.writeable = False  # shared by iterators; forked workers share its pages
        self._numbers = numbers
        self.starts: Int64s = self.places(shard_starts)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def numbers(self) -> Int64s:
        """Return the numbers of all records in the selection: (n,) int64, ascending."""
        return self._numbers

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that the selection takes."""
        return self._numbers.nbytes

    @property
    def counts(self) -> Int64s:
        """Count the records of each shard in the selection: (shards,) int64."""
        return np.diff(self.starts)

    def at(self, places: Int64s | slice) -> Int64s:
        """Return the numbers of the records at these places of the selection."""
        return self._numbers[places]

    def find(self, number: int) -> int | None:
        """Return the place of the record of this number; None: it is not in the selection."""
        place = int(self.places(np.array([number]))[0])
        return place if place < len(self) and self.at(np.array([place]))[0] == number else None

    def gaps(self) -> Int64s:
        """Return how many records are left out between neighbours, where any are."""
        between = np.diff(self._numbers) - 1
        return between[between > 0]

    def places(self, numbers: Int64s) -> Int64s:
        """Return how many records of the selection come before each of these numbers."""
        return np.searchsorted(self._numbers, numbers).astype(np.int64, copy=False)

    @cached_property
    def digest(self) -> str:
        """Return 16 hex digits that tell this selection from others, for saved states."""
        return hashlib.sha256(self.numbers.astype("<i8", copy=False).data).hexdigest()[:16]


class Remaining(Selection):
    """Hold all records of a dataset but some, by the numbers of these: few, of very many."""

    def __init__(self, excluded: Int64s, shard_starts: Int64s) -> None:
        """Keep the numbers of the records that are left out: (n,) int64, ascending, no two alike.

        excluded, shard_starts: as of Selection, and below the last of `shard_starts`
        """
        super().__init__(excluded, shard_starts)

    @cached_property
    def _before(self) -> Int64s:
        """Return the place that each would have, were those before it left out.

        Kept from the first batch on: of 10**6 dropped records, to compute it takes 1.3 ms.
        """
        return self._numbers - np.arange(len(self._numbers))

    @cached_property
    def _first_before(self) -> tuple[int, np.ndarray[Any, np.dtype[np.int32]]]:
        """Return how many of `_before` come before each stretch of 2**n places, with that n.

        Most stretches have none in them: of 1,024 places a binary search takes 55 us, and this 20.
        """
        shift = (len(self) // (4 * len(self._numbers) + 1)).bit_length()
        counts = np.bincount(self._before >> shift, minlength=(len(self) >> shift) + 1)
        return shift, np.append(np.int32(0), counts.cumsum(dtype=np.int32))

    @property
    def excluded(self) -> Int64s:
        """Return the numbers of the records that are left out: (n,) int64, ascending."""
        return self._numbers

    @property
    def numbers(self) -> Int64s:
        """Return the numbers of all records in the selection, made anew: (n,) int64, ascending."""
        return self.at(slice(None))

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that the selection takes, once batches are read."""
        return 2 * self._numbers.nbytes + self._first_before[1].nbytes

    def at(self, places: Int64s | slice) -> Int64s:
        """Return the numbers of the records at these places of the selection."""
        found: Int64s
        if isinstance(places, slice):
            start, stop, step = places.indices(len(self))
            if stop <= start:
                return self._numbers[:0]
            first, last = self.at(np.array([start, stop - 1])).tolist()
            begin, end = self._numbers.searchsorted((first, last)).tolist()
            left = np.ones(last + 1 - first, bool)
            left[self._numbers[begin:end] - first] = False
            found = left.nonzero()[0][::step] + first
        else:
            shift, table = self._first_before
            stretch = places >> shift
            before = table[stretch]
            some = (before != table[stretch + 1]).nonzero()[0]
            before[some] = self._before.searchsorted(places[some], "right")
            found = places + before
        return found

    def gaps(self) -> Int64s:
        """Return how many records are left out between neighbours, where any are."""
        if not len(self._numbers):
            return self._numbers
        ends = np.flatnonzero(np.diff(self._numbers, append=-1) != 1) + 1  # of runs without a gap
        return np.diff(ends, prepend=0)

    def places(self, numbers: Int64s) -> Int64s:
        """Return how many records of the selection come before each of these numbers."""
        return numbers - np.searchsorted(self._numbers, numbers)


def select_where(
    conditions: Mapping[str, Any],
    column: Callable[[str], Any],
    shard_starts: Int64s,
    classes: Sequence[str] | None,
    within: Selection | None = None,
) -> Selection:
    """Select the records that meet all conditions on columns of the index.

    conditions: by field of kind int, float or bool, or `__key__`: a value, several of them (None
    among them: also records without a value), or a function of the whole column, (N,), masked where
    None, to (N,) bool. Labels may be given by the names of their classes, keys as str or bytes.
    column: returns a column of the index by the field's name: of the records in `within`, or of
    all. Raises OptionError.
    """
    if not isinstance(conditions, Mapping) or not conditions:
        raise OptionError(
            f"where is {printable(repr(conditions))}: expected conditions by field, such as "
            "{'label': ['cat', 'dog']}"
        )
    count = int(shard_starts[-1]) if within is None else len(within)
    chosen = mark_where(conditions, column, count, classes)
    numbers = np.flatnonzero(chosen)
    if not len(numbers):
        asked = {name: one[0] if isinstance(one, All) else one for name, one in conditions.items()}
        raise OptionError(
            f"where={printable(repr(asked))}: none of {len(chosen):,} records meets all conditions"
        )
    return Selection(numbers if within is None else within.at(numbers), shard_starts)


def mark_where(
    conditions: Mapping[str, Any],
    column: Callable[[str], Any],
    count: int,
    classes: Sequence[str] | None,
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Mark which of `count` records meet all conditions: (count,) bool. As `select_where`."""
    chosen = np.ones(count, np.bool_)
    for name, wanted in conditions.items():
        values = column(name)
        for one in wanted if isinstance(wanted, All) else [wanted]:
            chosen &= _met(name, values, one, count, classes)
    return chosen


def select_places(
    indices: Iterable[int], shard_starts: Int64s, within: Selection | None
) -> Selection:
    """Select records by their places in a dataset, or in the selection `within`.

    indices: integers in any order, no two alike, since every epoch has its own order; or a mask,
    (n,) bool. Raises OptionError.
    """
    try:
        if isinstance(indices, np.ma.MaskedArray):  # a condition on a column with None in it
            indices = indices.filled(False if indices.dtype == np.bool_ else -1)
        array = np.asarray(indices if isinstance(indices, np.ndarray) else list(indices))
    except (TypeError, ValueError):  # no iterable, or of different lengths
        raise OptionError(
            f"select: {printable(repr(indices))}; expected one index for each record, or a mask"
        ) from None
    count = int(shard_starts[-1]) if within is None else len(within)
    if array.dtype == np.bool_:
        if array.shape != (count,):
            raise OptionError(f"select: a mask of shape {array.shape}; expected ({count},)")
        array = np.flatnonzero(array)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise OptionError(
            f"select: shape {array.shape} of {array.dtype}; expected one index for each record"
        )
    array = np.sort(array)
    if array.size and not 0 <= array[0] <= array[-1] < count:
        odd = int(array[0] if array[0] < 0 else array[-1])
        raise OptionError(f"select: index {odd}; there are records 0 to {count - 1:,}")
    array = array.astype(np.int64)
    twice = array[1:][array[1:] == array[:-1]]
    if twice.size:
        raise OptionError(
            f"select: index {int(twice[0])} is there more than once; a record comes once an epoch. "
            "To have some more often, mix datasets by ShardDataset.mix"
        )
    if not len(array):
        raise OptionError(f"select: none of {count:,} records is chosen")
    return Selection(array if within is None else within.at(array), shard_starts)


def class_index(classes: Sequence[str] | None, name: str) -> int:
    """Return the label of a class. Raises OptionError, which lists the classes that there are."""
    if classes is None:
        raise OptionError("this dataset has no classes")
    if name not in classes:
        raise OptionError(f"no class is called {printable(name)!r}; {there_are(classes, name)}")
    return list(classes).index(name)


class Word(str):
    """Hold a value of a command line: it becomes a number where the column holds numbers."""


_CONDITION = re.compile(r"([^=!<>]+)(=|!=|<=|>=|<|>)(.*)", re.DOTALL)
_INTEGER = re.compile(r"-?\d{1,20}", re.ASCII)
_ORDERS: dict[str, Callable[[Any, float], Any]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}


def conditions(texts: Iterable[str]) -> dict[str, All]:
    """Parse conditions of a command line to those that `select_where` takes. Raises OptionError.

    label=cat,dog   split!=test   width>=256; `null` stands for no value. Several on one field must
    all hold.
    """
    found: dict[str, All] = {}
    for text in texts:
        matched = _CONDITION.fullmatch(text)
        if matched is None:
            raise OptionError(
                f"--where {printable(text)}: expected NAME=VALUE,VALUE,... or NAME!=, <, <=, >, >="
            )
        name, sign, right = (part.strip() for part in matched.groups())
        if sign in _ORDERS:
            one: Any = _ordered(text, _ORDERS[sign], right)
        else:
            values = [None if one == "null" else Word(one) for one in right.split(",")]
            one = values if sign == "=" else Not(values)
        several = found.setdefault(name, All())
        several.append(one)
        several.texts.append(f"{sign}{right}")
    return found


def describe_conditions(conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Describe conditions by plain JSON values, for a reader; they cannot be run again."""
    found: dict[str, Any] = {}
    for name, wanted in conditions.items():
        if isinstance(wanted, All):
            found[str(name)] = " and ".join(wanted.texts)
        elif callable(wanted):
            found[str(name)] = "a function"
        else:
            found[str(name)] = [_as_json(one) for one in _several(wanted)]
    return found


def _as_json(value: Any) -> Any:
    """Return a value of a condition as JSON can hold it."""
    value = value.item() if isinstance(value, np.generic) else value
    finite = isinstance(value, float) and math.isfinite(value)
    return value if finite or value is None or isinstance(value, (str, int)) else repr(value)


class All(list[Any]):
    """Hold several conditions on one column, all of which must be met."""

    def __init__(self) -> None:
        """Start without a condition."""
        super().__init__()
        self.texts: list[str] = []


class Not(list[Any]):
    """Hold values that a column must not have."""


def _ordered(text: str, compare: Callable[[Any, float], Any], right: str) -> Callable[[Any], Any]:
    """Make the condition of a command line's <, <=, > or >=. Raises OptionError."""
    try:
        # Integers as such: floats are other numbers from 2**53 on, where many ids are.
        limit: Any = int(right) if _INTEGER.fullmatch(right) else float(right)
    except ValueError:
        raise OptionError(f"--where {printable(text)}: {printable(right)} is no number") from None

    def met(column: Any) -> Any:
        if np.ma.getdata(column).dtype.kind not in "iufb":
            raise OptionError(f"--where {printable(text)}: that field has no numbers")
        return compare(column, limit)

    return met


def _met(
    name: str, values: Any, wanted: Any, count: int, classes: Sequence[str] | None
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Mark the values of a column that meet one condition: (count,) bool."""
    if callable(wanted):
        met = np.ma.filled(wanted(values), False)
        if met.shape != (count,) or met.dtype != np.bool_:
            raise OptionError(
                f"where: the function for {name!r} gave shape {met.shape} of {met.dtype}; "
                f"expected shape {(count,)} of bool, one for each record"
            )
        return np.asarray(met, np.bool_)
    texts = values.dtype.kind == "O"  # of columns, only keys are text; and those of listings
    met = _mark_equal(values, [_value(classes, name, one, texts) for one in _several(wanted)])
    return np.asarray(~met if isinstance(wanted, Not) else met, np.bool_)


def _several(wanted: Any) -> list[Any]:
    """Return the values of a condition as a list: one value is a list of one."""
    if isinstance(wanted, (str, bytes)) or not isinstance(wanted, Iterable):
        return [wanted]
    return list(wanted)


def _value(classes: Sequence[str] | None, name: str, value: Any, texts: bool) -> Any:
    """Turn a wanted value into one that a column can hold. texts: the column holds str."""
    if isinstance(value, bytes) and name == KEY:
        return key_text(value)
    if isinstance(value, str) and name == "label" and not (texts and classes is None):
        if isinstance(value, Word) and value.isdecimal() and value not in (classes or ()):
            return _number(name, value)
        return class_index(classes, value)
    if isinstance(value, str) and texts:
        return value
    if isinstance(value, Word):
        return _number(name, value)
    if value is None or isinstance(value, (int, float, np.number, np.bool_)):
        return value
    raise OptionError(
        f"where: {name} cannot be {printable(repr(value))}: expected numbers, or names of classes"
    )


def _number(name: str, text: Word) -> int | float | bool:
    """Parse the number that a command line gave for a column. Raises OptionError."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    hint = "; write one =, as in label=3" if text.startswith("=") else ""
    raise OptionError(
        f"--where: {printable(name)} has numbers, and {printable(text)} is none{hint}"
    )


def _mark_equal(column: Any, values: list[Any]) -> Any:
    """Mark the values of a column that are among these: (N,) bool; masked ones if None is."""
    empty, data = np.ma.getmaskarray(column), np.ma.getdata(column)
    numbers = [value for value in values if value is not None]
    if data.dtype.kind == "O":  # np.isin would take 10 s for 1,000 of a million
        wanted = frozenset(numbers)
        met = np.fromiter((value in wanted for value in data), np.bool_, len(data))
    elif data.dtype.kind in "iu":  # in the column's own type: as floats, large ones would be alike
        bounds = np.iinfo(data.dtype)
        fitting = (int(n) for n in numbers if math.isfinite(n) and n == int(n))
        own = [n for n in fitting if bounds.min <= n <= bounds.max]
        met = np.isin(data, np.array(own, data.dtype))
    else:
        met = np.isin(data, numbers)
    met &= ~empty
    return met | empty if None in values else met
