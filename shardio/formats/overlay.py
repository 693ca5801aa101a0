"""Fields beside a shard: values that were added to its records, or that replace what it stores.

A file of values is a record shard, of the number of the shard that it belongs to. It has a record
for each value, in the order of the shard. Of several files of a field, the last one counts:

    __key__  the number of the record in the shard, as decimal digits
    __row__  the same number, as an int, so that it stands in the index as well
    FIELD    the value; None where it is to be None

So checksums, limits and messages are those of shards. Numbers and booleans are taken from the
index when a shard is opened, without reading a record; of other kinds a value is read by itself.
"""

from __future__ import annotations

import contextlib
import heapq
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import repeat
from typing import Any

import numpy as np

from ..errors import DamageError, printable
from ..names import KEY
from ..storage.base import path_in
from .base import Column, Opening, Overlay, Shard, ShardInfo, Sizes
from .index import EMPTY, SCALARS
from .record import RecordShard, erased_in
from .sample import Sample, Schema, pack_columns

ROW = "__row__"

_NAME = re.compile(r"overlay-\d{5,}-[0-9a-f]{8}\.shard\Z")

Open = Callable[[Opening, ShardInfo], Shard]
Put = Callable[[Sample, int], None]  # of the record of this number in the shard


def has_overlay_name(name: str) -> bool:
    """Return whether a file has the name of one of a field's values."""
    return _NAME.match(name) is not None


@lru_cache(64)
def overlay_schema(field: str, kind: str) -> Schema:
    """Return the schema of a file of a field's values."""
    return Schema([(KEY, "key"), (ROW, "int"), (field, kind)])


def files_of_shard(opening: Opening, number: int) -> Iterator[tuple[Overlay, Opening, ShardInfo]]:
    """Yield the files of a shard's values, of a field the oldest first, and how each is opened."""
    for one in opening.overlays:
        for info in one.files.get(number, ()):
            schema = overlay_schema(one.field, one.kind)
            here = replace(opening, storage=opening.index_location, schema=schema, overlays=())
            yield one, here, info


def most_files(overlay: Overlay) -> int:
    """Return how many files of values of a field are open with a shard, at most."""
    return 0 if overlay.kind in SCALARS else max(map(len, overlay.files.values()), default=0)


def without_overlays(shard: Shard) -> RecordShard:
    """Return the record shard itself, for what reads the bytes of many records at once."""
    found = shard.stored if isinstance(shard, OverlaidShard) else shard
    assert isinstance(found, RecordShard)
    return found


def open_values(opening: Opening, info: ShardInfo, open_record: Open) -> RecordShard:
    """Open a file of values, as `files_of_shard` says. Raises as opening a shard does.

    open_record: opens a record shard.
    """
    field = opening.schema.names[-1]
    try:
        shard = open_record(opening, info)
    except FileNotFoundError:
        raise DamageError(
            f"{path_in(opening.storage, info.name)}: the manifest names this file, with "
            f"{info.records:,} values of the field {printable(field)!r}, but it is not there. "
            "Restore it from a copy; `shardio restore` goes back to a version without it"
        ) from None
    assert isinstance(shard, RecordShard)
    return shard


class _Layer:
    """The values of one field, for the records of one shard.

    column  of numbers and booleans: (records,) what samples have; None: it is read like others
    sizes   of others: (records,) int64, the bytes that reading a value costs
    """

    def __init__(self, overlay: Overlay, below: Shard, opens: Sequence[Callable[[], RecordShard]]):
        """opens: what opens each file of values, the oldest first."""
        self.field, self._opens, self._records = overlay.field, opens, below.records
        self._added = overlay.added
        self._files = list[RecordShard]()
        self._waiting: dict[tuple[int, int], bytes] = {}  # values that came with their records
        try:
            for open_file in opens:
                self._files.append(open_file())
            self._rows = [rows_of(file, below.records) for file in self._files]
        except BaseException:
            self.close()
            raise
        self.column = self._column(overlay, below)
        self.sizes: Column | None = None
        if self.column is not None:
            self.close()  # all of it is here
            self._files, self._rows = [], []
            return
        self._which = np.full(below.records, -1, np.int8)  # file of each value
        self._places = np.zeros(below.records, np.int32)  # and its number there
        self.sizes = np.zeros(below.records, np.int64)
        for number, (file, rows) in enumerate(zip(self._files, self._rows, strict=True)):
            self._which[rows], self._places[rows] = number, np.arange(len(rows))
            self.sizes[rows] = file.sizes[:]

    def _column(self, overlay: Overlay, below: Shard) -> Column | None:
        """Return the values of all records, of a field of numbers or booleans."""
        if overlay.kind not in SCALARS:
            return None
        stored = None if overlay.added else below.columns.get(overlay.field)
        if stored is None and not overlay.added:
            return None
        if not self._files:
            nothing = np.zeros(below.records, EMPTY[overlay.kind])
            return np.ma.MaskedArray(nothing, True)
        for file, rows in zip(self._files, self._rows, strict=True):
            values = file.columns.get(overlay.field)
            if values is None:
                return None
            stored = _merged(overlay.kind, stored, values, rows, below.records)
            if stored is None:
                return None
        return stored

    def put(self) -> Put:
        """Return what gives a sample its value of the field."""
        field, files, added, waiting = self.field, self._files, self._added, self._waiting
        if self.column is not None:
            item = np.asarray(self.column).item
            if type(self.column) is not np.ndarray:  # some are None
                is_none = np.ma.getmaskarray(self.column).item

                def put_number_or_none(sample: Sample, record: int) -> None:
                    sample[field] = None if is_none(record) else item(record)

                return put_number_or_none

            def put_number(sample: Sample, record: int) -> None:
                sample[field] = item(record)

            return put_number
        file_of, place_of = self._which.item, self._places.item

        def put_value(sample: Sample, record: int) -> None:
            number = file_of(record)
            if number >= 0:
                file, place = files[number], place_of(record)
                held = waiting.pop((number, place), None)
                found = file.read(place) if held is None else file.decode(place, held)
                sample[field] = found[field]
            elif added:
                sample[field] = None

        return put_value

    def put_all(self, samples: Iterable[Sample], start: int, stop: int) -> Iterator[Sample]:
        """Give the samples of records [start, stop) their values, by large reads."""
        if self.column is not None:
            values: Iterable[Any] = self.column[start:stop].tolist()
        else:
            values = self._values(start, stop)
        for sample, value in zip(samples, values, strict=False):
            if value is not _KEEP:
                sample[self.field] = value
            yield sample

    def _values(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the values of records [start, stop); _KEEP: the record keeps its own."""
        other, at = None if self._added else _KEEP, start
        files = []
        for number, file in enumerate(self._files):
            first, last = self._between(number, start, stop)
            samples = file.scan(first, last)
            rows = self._rows[number][first:last].tolist()
            files.append(_pairs(rows, samples, self.field))
        for row, value in newest_of(files):
            yield from repeat(other, row - at)
            yield value
            at = row + 1
        yield from repeat(other, stop - at)

    def _between(self, number: int, start: int, stop: int) -> tuple[int, int]:
        """Return which values of a file are of records [start, stop)."""
        first, last = np.searchsorted(self._rows[number], [start, stop]).tolist()
        return first, last

    def will_need(self, start: int, stop: int, *, keep: bool) -> None:
        """Announce that values of records [start, stop) will be read soon."""
        for number, file in enumerate(self._files):
            first, last = self._between(number, start, stop)
            if first < last:
                file.will_need(first, last, keep=keep)

    def hold(self, start: int, stop: int) -> None:
        """Read values of a network with the records that wait: each alone is a round trip."""
        for number, file in enumerate(self._files):
            if file.is_remote:
                first, last = self._between(number, start, stop)
                for place, held in enumerate(file.hold(first, last), first):
                    if held is not None:
                        self._waiting[number, place] = held

    def scattered(self) -> None:
        """Say that values will be read in no order."""
        for file in self._files:
            file.scattered()

    @cached_property
    def rows(self) -> Column:
        """Return the records that have a value in a file, ascending. Raises DamageError."""
        found = [*self._rows]  # of files that are open: each is a round trip in a store
        for open_file in () if found else self._opens:
            with contextlib.closing(open_file()) as file:
                found.append(rows_of(file, self._records))
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)

    def check(self) -> None:
        """Read all values, and compare them with the index of their file. Raises DamageError."""
        for open_file in self._opens:
            with contextlib.closing(open_file()) as file:
                rows = rows_of(file, self._records)
                indexed = file.columns.get(self.field)
                values = repeat(_KEEP) if indexed is None else indexed.tolist()
                samples = file.scan(0, file.records)
                for row, sample, value in zip(rows.tolist(), samples, values, strict=False):
                    own = sample[self.field]
                    same = value is _KEEP or own == value or (own != own and value != value)
                    if sample[KEY] != b"%d" % row or sample[ROW] != row or not same:
                        raise DamageError(
                            f"{file.name}: the index has another value for record {row}"
                        )

    def values(self) -> dict[int, Any]:
        """Read all values, by the numbers of their records. Raises DamageError."""
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(contextlib.closing(one())) for one in self._opens]
            return dict(newest_of([rows_and_values(file, self._records) for file in files]))

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            file.close()


def rows_and_values(file: RecordShard, records: int) -> Iterator[tuple[int, Any]]:
    """Yield what a file has: numbers of records, and values. Raises DamageError.

    records: of the shard that it belongs to.
    """
    samples = file.scan(0, file.records)
    return _pairs(rows_of(file, records).tolist(), samples, file.schema.names[-1])


def _pairs(rows: Sequence[int], samples: Iterable[Sample], field: str) -> Iterator[tuple[int, Any]]:
    return ((row, sample[field]) for row, sample in zip(rows, samples, strict=True))


def newest_of(files: Sequence[Iterable[tuple[int, Any]]]) -> Iterator[tuple[int, Any]]:
    """Yield the rows of several files with their values, each row once, with its newest value.

    files: the rows and values of each, in order, the oldest file first.
    """

    def of_file(number: int, pairs: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, int, Any]]:
        return ((row, -number, value) for row, value in pairs)

    each = [of_file(number, pairs) for number, pairs in enumerate(files)]
    last = -1
    for row, _, value in heapq.merge(*each, key=operator.itemgetter(0, 1)):
        if row != last:
            yield row, value
        last = row


_KEEP = object()


def rows_of(file: RecordShard, records: int) -> Column:
    """Return the numbers of the records that a file has values of, (n,). Raises DamageError."""
    rows = file.columns.get(ROW)
    if (
        rows is None
        or type(rows) is not np.ndarray  # but masked
        or rows.dtype.kind != "u"
        or (rows[1:] <= rows[:-1]).any()
        or (len(rows) and int(rows[-1]) >= records)
    ):
        raise DamageError(
            f"{file.name}: its rows are no records of a shard of {records:,}, in ascending order. "
            "It was written by something else than shardio"
        )
    return rows.astype(np.int64)


def _merged(
    kind: str, stored: Column | None, values: Column, rows: Column, records: int
) -> Column | None:
    """Return a column with these values in these rows; None: no column holds all of them.

    stored: what the other rows have; None: they have no value.
    """
    dtype = values.dtype if stored is None else np.result_type(stored.dtype, values.dtype)
    if kind == "int" and dtype.kind == "f":  # some below 0, some above 2**63
        return None
    if kind != "int" and dtype.kind == "u":  # of None alone
        dtype = np.dtype("|b1" if kind == "bool" else "<f4")
    # Not by np.ma where none is None: to import it takes 25 ms, in each process of a loader.
    if type(values) is np.ndarray and (type(stored) is np.ndarray or len(rows) == records):
        plain = np.zeros(records, dtype) if stored is None else stored.astype(dtype)
        plain[rows] = values
        return np.asarray(plain)
    plain = np.zeros(records, dtype) if stored is None else np.array(np.ma.getdata(stored), dtype)
    plain[rows] = np.ma.getdata(values)
    mask = np.full(records, True) if stored is None else np.ma.getmaskarray(stored).copy()
    mask[rows] = np.ma.getmaskarray(values)
    return np.ma.MaskedArray(plain, mask) if mask.any() else plain


class _Sum:
    """The bytes of each record, and of its values beside it."""

    def __init__(self, parts: Sequence[Sizes]) -> None:
        self._parts = parts

    def __getitem__(self, chosen: Any) -> Any:
        return sum(part[chosen] for part in self._parts)


class OverlaidShard:
    """A shard whose records have fields from files beside it; see formats/base.py."""

    def __init__(self, shard: Shard, layers: Sequence[_Layer]) -> None:
        self.stored, self._layers = shard, layers
        self._puts = [layer.put() for layer in layers]
        self.name, self.records, self.memory = shard.name, shard.records, shard.memory
        beside = [one.sizes for one in layers if one.sizes is not None]
        self.sizes: Sizes = _Sum([shard.sizes, *beside]) if beside else shard.sizes

    @property
    def key_hashes(self) -> Column:
        """Return the low half of the xxh3_64 of each key: (n,) uint32. Raises DamageError."""
        return self.stored.key_hashes

    @cached_property
    def columns(self) -> Mapping[str, Column]:
        """Return small scalar fields by name, one value a record, masked where None."""
        columns = dict(self.stored.columns)
        for one in self._layers:
            columns.pop(one.field, None)
            if one.column is not None:
                columns[one.field] = one.column
        return columns

    @property
    def erased(self) -> Column:
        """Return the numbers of the records whose bytes were erased."""
        return erased_in(self.stored)

    def read(self, record: int) -> Sample:
        """Read one record, and its values beside it. Raises DamageError."""
        sample = self.stored.read(record)
        for put in self._puts:
            put(sample, record)
        return sample

    def scan(self, start: int, stop: int, *, text: bool = False) -> Iterator[Sample]:
        """Yield records [start, stop) in storage order. text: with keys as str."""
        samples = self.stored.scan(start, stop, text=text)
        for layer in self._layers:
            samples = layer.put_all(samples, start, stop)
        return samples

    def hold(self, start: int, stop: int) -> Sequence[bytes | None]:
        """Return records [start, stop) as bytes, to be decoded later; None: `read` it alone."""
        for layer in self._layers:
            layer.hold(start, stop)
        return self.stored.hold(start, stop)

    def decode(self, record: int, held: bytes) -> Sample:
        """Decode what `hold` gave for a record. Raises DamageError."""
        sample = self.stored.decode(record, held)
        for put in self._puts:
            put(sample, record)
        return sample

    def key(self, record: int) -> bytes:
        """Return the key of a record. Raises DamageError."""
        return self.stored.key(record)

    def keys(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the keys of records [start, stop). Raises DamageError."""
        return self.stored.keys(start, stop)

    def offset(self, record: int) -> int:
        """Return the byte at which a record begins in its shard."""
        return self.stored.offset(record)

    def checksums(self, record: int) -> tuple[int, int] | None:
        """Return the checksum that is stored of a record, and that of its bytes as they are."""
        return self.stored.checksums(record)

    def will_need(self, start: int, stop: int, *, keep: bool = False) -> None:
        """Announce that records [start, stop) will be read soon."""
        self.stored.will_need(start, stop, keep=keep)
        for layer in self._layers:
            layer.will_need(start, stop, keep=keep)

    def scattered(self) -> None:
        """Say that records will be read in no order."""
        self.stored.scattered()
        for layer in self._layers:
            layer.scattered()

    def check(self) -> None:
        """Compare all that no reading of a record checks. Raises DamageError."""
        self.stored.check()
        for layer in self._layers:
            layer.check()

    def values_beside(self, name: str) -> dict[int, Any]:
        """Read the values of a field that lie beside the shard, by the numbers of their records.

        Raises DamageError.
        """
        return next((one.values() for one in self._layers if one.field == name), {})

    def rows_beside(self, name: str) -> Column:
        """Return the records that have a value of a field beside the shard, ascending.

        Raises DamageError.
        """
        return next((one.rows for one in self._layers if one.field == name), np.empty(0, np.int64))

    def will_need_values(self, name: str, records: Iterable[int]) -> None:
        """Announce that values of an annotated field will be read soon, for some records."""
        for layer in self._layers:
            for record in records if layer.field == name else ():
                layer.will_need(record, record + 1, keep=False)

    def value_of(self, name: str, record: int) -> Any:
        """Return the value of an annotated field, for a record. Raises DamageError."""
        sample: Sample = {}
        for layer, put in zip(self._layers, self._puts, strict=True):
            if layer.field == name:
                put(sample, record)
        return sample[name]

    def close(self) -> None:
        """Give descriptors back."""
        self.stored.close()
        for layer in self._layers:
            layer.close()


def overlaid(shard: Shard, opening: Opening, number: int, open_record: Open) -> Shard:
    """Return a shard with its fields from files beside it; itself, where it has none.

    number: that of the shard. open_record: opens a record shard. Raises as opening a shard does.
    """
    layers = list[_Layer]()
    try:
        opens: dict[str, list[Callable[[], RecordShard]]] = {}
        for one, here, info in files_of_shard(opening, number):
            opens.setdefault(one.field, []).append(partial(open_values, here, info, open_record))
        for one in opening.overlays:
            # Columns are asked for whatever samples need; they cost no read of a record.
            needed = one.kind in SCALARS or opening.wanted is None or one.field in opening.wanted
            if needed and (one.added or one.field in opens):
                layers.append(_Layer(one, shard, opens.get(one.field, ())))
    except BaseException:
        shard.close()
        for layer in layers:
            layer.close()
        raise
    return OverlaidShard(shard, layers) if layers else shard


def rows_that_differ(one: Shard, other: Shard, name: str) -> list[int]:
    """Return the records of a shard whose values of a field are not the same in two versions.

    What the shard itself stores is read of numbers alone, which are in the index: another value
    is taken for a new one.
    """
    columns = [of.columns[name] for of in (one, other) if name in of.columns]
    if len(columns) == 2:
        masks = [np.ma.getmaskarray(column) for column in columns]
        values = [np.ma.getdata(column) for column in columns]
        odd = (masks[0] != masks[1]) | (~masks[0] & (values[0] != values[1]))
        if values[0].dtype.kind == values[1].dtype.kind == "f":  # nan is like nan
            odd &= ~(np.isnan(values[0]) & np.isnan(values[1])) | (masks[0] != masks[1])
        return np.flatnonzero(odd).tolist()
    beside = [
        of.values_beside(name) if isinstance(of, OverlaidShard) else {} for of in (one, other)
    ]
    return [
        row
        for row in {**beside[0], **beside[1]}
        if pack_columns(beside[0].get(row)) != pack_columns(beside[1].get(row))
    ]
