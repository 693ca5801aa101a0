"""Image files straight into a batch: the core reads, checks and places all records in one call.

A batch of `decode=None` is EncodedImages. Where the core was built, and a sample is one image field
and numbers (and its key), the core reads the records in the order of rows, checks each, and copies
what is asked for: the bytes of the files one behind the other, numbers to their columns. At 0.9 KB
Python's work for a record would be five times that. Records that wait in the process were checked
when they came. What is not plain is left to the ordinary way: damage, values that are None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import native
from ..formats.base import Shard
from ..formats.manifest import Manifest
from ..formats.overlay import without_overlays
from ..names import KEY
from .collate import empty as empty_here
from .collate import empty_files
from .collate import numbers as as_tensor
from .decode import Decoder
from .encoded import Empty, EncodedImages
from .fetch import Fetch, Rows

DTYPES: dict[str, type[Any]] = {"int": np.int64, "float": np.float64, "bool": np.bool_}
_FEW = 64  # shards that are kept open
_MOST_BESIDE = 4 << 20  # records whose values beside the shards become one array a field


@dataclass(frozen=True)
class EncodedBatches:
    """Make batches of image files at once."""

    names: tuple[str, ...]  # the fields of a record in its shard
    wanted: tuple[str, ...]  # those of a batch
    image: str  # the one of image files
    scalars: dict[str, type[Any]]  # those of numbers: the dtype of each in a batch
    overlaid: tuple[str, ...]  # those of `scalars` whose values lie beside the shards
    tuples: bool  # what batches are: tuples, or dicts

    def begin(self, fetch: Fetch) -> Callable[[Rows, Empty], Any]:
        """Return what makes the batches of one pass."""
        return partial(self._batch, fetch, {}, _Beside(self.overlaid, self.scalars, fetch))

    def _batch(
        self, fetch: Fetch, known: dict[int, _Joined], beside: _Beside, rows: Rows, empty: Empty
    ) -> Any:
        """Make the batch of these rows, as collating their items would; None: it cannot be made so.

        known: what was found of shards in this pass. empty: gives the memory for the images.
        Raises DamageError, StorageError.
        """
        core = native.records()
        if core is None or (rows.held is not None and None in rows.held):
            return None
        numbers = sorted(set(rows.shards.tolist()))
        joined = _joined(fetch, known, numbers, held=rows.held is not None)
        if joined is None:
            return None
        kinds = joined[numbers[0]].kinds
        shards = [joined[number].place for number in numbers]
        size = rows.size
        columns = {name: np.empty(size, dtype) for name, dtype in self.scalars.items()}
        keys: list[str] | None = [] if KEY in self.wanted else None
        offsets = np.empty(size + 1, np.int64)
        memory: list[torch.Tensor] = []

        def take(nbytes: int) -> Any:
            make = empty_files if empty is empty_here else empty
            memory.append(make((nbytes,), torch.uint8))
            return memory[0].numpy()

        done = core.join(
            *(shards, rows.shards, rows.numbers, kinds, self.names.index(self.image)),
            *(tuple([self._own(columns, name) for name in self.names]), offsets, keys, take),
            rows.held,
        )
        if done < size or not beside.fill(columns, rows, numbers):
            return None
        values: dict[str, Any] = {name: as_tensor(column) for name, column in columns.items()}
        ends = torch.from_numpy(offsets)
        values[self.image] = EncodedImages(memory[0][: int(offsets[-1])], ends)
        values[KEY] = keys
        if self.tuples:
            return tuple([values[name] for name in self.wanted])
        return {name: values[name] for name in self.wanted}

    def _own(self, columns: Mapping[str, Any], name: str) -> Any:
        """Return the column that the core is to fill; None: it is not wanted, or not its own."""
        return None if name in self.overlaid else columns.get(name)


class _Beside:
    """Fill columns of batches with values that lie beside the shards, in one pass.

    One array of each field, as long as the dataset, is filled shard by shard: so a batch costs one
    step, and not one for each shard that its records are of.
    """

    def __init__(self, names: Sequence[str], dtypes: Mapping[str, type[Any]], fetch: Fetch) -> None:
        self._fetch, self._known = fetch, set[int]()
        self._partial = set[int]()  # shards where some values are None, or too large for a tensor
        records = int(fetch.reader.starts[-1]) if names else 0
        self._one_by_one = records > _MOST_BESIDE
        size = 0 if self._one_by_one else records
        self._values = {name: np.empty(size, dtypes[name]) for name in names}

    def fill(self, columns: Mapping[str, Any], rows: Rows, shards: Sequence[int]) -> bool:
        """Fill the columns of a batch, whose rows are of these shards.

        False where the ordinary way must make it.
        """
        if not self._values:
            return True
        if not self._one_by_one and not self._known.issuperset(shards):
            for number in {*shards} - self._known:
                self._know(number)
        if self._one_by_one or not self._partial.isdisjoint(shards):
            return all(self._fill_of(columns, rows, number) for number in shards)
        for name, values in self._values.items():
            values.take(rows.numbers, out=columns[name], mode="clip")  # raise: by a copy
        return True

    def _know(self, number: int) -> None:
        start, stop = self._fetch.reader.starts[number : number + 2].tolist()
        for name, values in self._values.items():
            column = self._fetch.shard(number).columns.get(name)
            if type(column) is np.ndarray and column.dtype != np.uint64:  # as a tensor holds it
                values[start:stop] = column
            else:
                self._partial.add(number)
        self._known.add(number)

    def _fill_of(self, columns: Mapping[str, Any], rows: Rows, number: int) -> bool:
        """Fill the rows that are of one shard; False where one has no number."""
        shard, first = self._fetch.shard(number), self._fetch.reader.starts.item(number)
        here = np.flatnonzero(rows.shards == number)
        for name in self._values:
            column = shard.columns.get(name)
            chosen = None if column is None else column[rows.numbers[here] - first]
            if chosen is None or chosen.dtype == np.uint64 or np.ma.is_masked(chosen):
                return False
            columns[name][here] = np.ma.getdata(chosen)
        return True


class _Joined(NamedTuple):
    """Hold what the core's `join` takes of a shard, which stays open meanwhile."""

    shard: Shard
    place: tuple[Any, ...]  # its number, that of its first record, file, offsets, seed
    kinds: bytes  # of its fields


def _joined(
    fetch: Fetch, known: dict[int, _Joined], numbers: Iterable[int], *, held: bool
) -> dict[int, _Joined] | None:
    """Return what the core's `join` takes of these shards; None: they are for Python to read.

    held: of records that wait in this process. Of few shards it is found once: 2 us each.
    """
    reader = fetch.reader
    if reader.storage.remote or reader.manifest.shards > min(_FEW, reader.limit):
        known = {}  # shards may be closed meanwhile
    for number in numbers:
        if number not in known:
            shard = fetch.shard(number)
            found = without_overlays(shard).joined(held=held)
            if found is None:
                return None
            place = number, reader.starts.item(number), *found[0]
            known[number] = _Joined(shard, place, found[1])
    return known


def encoded_images(manifest: Manifest, decoder: Decoder) -> EncodedBatches | None:
    """Find how to make batches of image files at once; None: they cannot be made so."""
    names, own = manifest.schema.names, manifest.stored_schema.names
    wanted = names if decoder.fields is None else decoder.fields
    kinds = dict(manifest.schema.fields)
    if (
        manifest.format != "record"
        or not decoder.only_picks
        or len(decoder.encoded) != 1
        or len(set(wanted)) != len(wanted)
    ):
        return None
    (image,) = [name for place, name in enumerate(wanted) if {name, place} & decoder.encoded]
    others = [name for name in wanted if name not in (image, KEY)]
    if any(kinds[name] not in DTYPES for name in others):
        return None
    scalars = {name: DTYPES[kinds[name]] for name in others}
    beside = tuple([one.field for one in manifest.overlays if one.field in scalars])
    return EncodedBatches(own, wanted, image, scalars, beside, decoder.fields is not None)
