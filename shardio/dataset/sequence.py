"""A packed dataset as a plain Python sequence, without torch: for notebooks, debugging, evaluation.

Length, items by number, slices (views that share everything with the whole, and are sequences
again), iteration in storage order with large reads. It can be pickled, shared by threads, inherited
by forked workers, and given to a DataLoader as a map-style dataset with any sampler.
"""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, starmap
from typing import Any, overload

import numpy as np

from ..errors import DamageError, OptionError, name_record, printable, there_are
from ..formats.base import Column, Shard
from ..formats.index import EMPTY, key_hash
from ..formats.record import whole_runs
from ..formats.sample import Sample, give_text_key
from ..names import KEY, key_bytes, key_text
from ..order import rng
from ..order.subset import Selection, select_where
from ..storage.base import Location
from ..storage.location import locate
from ..storage.options import Storage, with_root
from ..units import check_group, grouped_in, refuse_options, show_count
from .decode import Decode, Decoder, record_name
from .other_names import OTHER_NAMES
from .reader import ManifestInfo, Reader, open_index, open_reader
from .skipping import Skip, SkippedInfo, SkippingPass, Skips, choose_skips, may_skip

_ATTRIBUTES = {
    "targets": "the dataset has no field `label` of kind int",
    **dict.fromkeys(
        ("samples", "imgs"), "write data.keys() for the names, data.targets for the labels, and "
        "data[i] for a sample"
    ),
    "loader": "write shardio.open(..., decode=)",
}  # fmt: skip
_MAPPED = "wrap it in a torch Dataset of yours, whose __getitem__ changes the sample"
_BATCHED = "give it to DataLoader, or use ShardDataset, which streams in an order of its own"
_OF_SHARD_DATASET = """
root remote local cache_dir cache_limit cache_size max_cache_size name revision storage_options
session_options token download_timeout download_retry validate_hash verification_mode empty_check
allow_empty keep_zip is_valid_file features columns return_index data_dir
data_files input_dir urls dataset
"""
_OTHERS = {
    **{name: OTHER_NAMES[name] for name in _OF_SHARD_DATASET.split()},
    **dict.fromkeys(["target_transform", "target_transforms", "transforms", "map"], _MAPPED),
    **dict.fromkeys(
        ["batch_size", "shuffle", "num_workers", "sampler", "collate_fn", "order"], _BATCHED
    ),
    "loader": "give decode=, a function of the stored bytes too",
    "handler": 'give on_error="skip", for loops; data[i] raises DamageError and DecodeError',
    "where": "give torch.utils.data.Subset the indices that you want; data.targets has the labels",
}
_ONE_BY_ONE = 256  # records that are read alone where some are damaged
_AHEAD = 16  # shards whose ends are asked for ahead, by URL
_BYTES_AHEAD = 64 << 20  # bytes of the next shard that are


@refuse_options("shardio.open", grouped_in("storage", Storage) | _OTHERS)
def open(
    path: str | os.PathLike[str],
    *,
    split: str | None = None,
    version: str | None = None,
    decode: Decode = "pil",
    transform: Callable[..., Any] | None = None,
    fields: Sequence[str] | None = None,
    on_error: str | Skip = "raise",
    storage: Storage | None = None,
) -> ShardSequence:
    """Open a packed dataset. Raises NotPackedError, DamageError, VersionError, OptionError.

    split      "train": the dataset of this name in `path`, which holds several
    version    a version of the dataset, by its id or its tag (`shardio log`), or by the sum of its
               manifest ("sha256:..."); default: the newest
    decode     "pil": the first image field as a PIL image, RGB, upright; other image fields as
               stored. "numpy": as arrays of these, (H, W, 3) uint8 the first. None: as the bytes of
               their files. Or a function of those bytes. Or a mapping of these by field, also of
               "gray" and "stored"
    transform  of the image; a built-in one (RandomResizedCrop) draws by the record's number
    fields     items are tuples of these, in this order; None: dicts of all fields, `__key__` too
    on_error   "skip": a loop over the records passes over those that are damaged, cannot be
               decoded, or for which the transform raises, and `skipped` lists them; or a
               shardio.Skip. `data[i]` raises. Default: "raise"
    storage    a shardio.Storage: where the data lies, and how far it is trusted
    """
    options = check_group("storage", storage, Storage)
    skips = choose_skips(on_error)
    reader = open_reader(path, split, options, version, tolerant=skips is not None)
    decoder = Decoder(
        reader.manifest.schema,
        fields=fields,
        decode=decode,
        transform=transform,
        max_pixels=options.max_pixels,
    )
    reader.want(decoder.fields)
    if decoder.device_crop is not None:
        raise OptionError(
            "shardio.open: decode='cuda' is for training, where the device decodes whole batches: "
            "give 'pil' or 'numpy', or open it as shardio.ShardDataset"
        )
    noted = () if skips is None else (skips,)
    return ShardSequence(reader, decoder, range(reader.records), skips=noted)


def stored(
    path: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    storage: Storage | None = None,
) -> ShardSequence:
    """Open a packed dataset for what writes it elsewhere: samples as stored, keys as bytes."""
    options = with_root(storage, root)
    return stored_in(locate(path, options), options)


def stored_in(index: Location, options: Storage) -> ShardSequence:
    """Open the dataset whose manifest lies in a location, as `stored` does."""
    return stored_of(open_index(index, options))


def stored_of(reader: Reader) -> ShardSequence:
    """Give the records of a reader as `stored` does."""
    decoder = Decoder(reader.manifest.schema, fields=None, decode=None, transform=None)
    return ShardSequence(reader, decoder, range(reader.records), text=False)


def choose_where(
    reader: Reader, decoder: Decoder, where: Mapping[str, Any] | None
) -> Selection | None:
    """Choose the records that meet conditions, of those that were not dropped. None: all.

    where: as ShardDataset has it; None: no conditions. Raises OptionError.
    """
    if where is None:
        return reader.remaining
    everything = ShardSequence(reader, decoder, range(reader.records))
    known = reader.starts, reader.manifest.classes, reader.remaining
    return select_where(where, everything.columns, *known)


def _scan_each(shard: Shard, start: int, stop: int) -> Iterator[tuple[Shard, int, Any]]:
    """Yield records [start, stop), each with its shard and number: a sample, or a DamageError."""
    while start < stop:
        with contextlib.suppress(DamageError):
            for sample in shard.scan(start, stop):
                yield shard, start, sample
                start += 1
        one_by_one = range(start, min(start + _ONE_BY_ONE, stop))
        for start in one_by_one:
            try:
                yield shard, start, shard.read(start)
            except DamageError as error:
                yield shard, start, error
        start = one_by_one.stop


class ShardSequence(ManifestInfo, SkippedInfo, Sequence[Any]):
    """Records of a dataset by position, in storage order: what `open` returns, and its slices.

    Each access reads and checks the record anew; items are the caller's own. Raises IndexError,
    KeyError, DamageError, StorageError, DecodeError; a loop SkipError, too.
    """

    def __init__(
        self,
        reader: Reader,
        decoder: Decoder,
        rows: range,
        *,
        text: bool = True,
        skips: tuple[Skips, ...] = (),
    ) -> None:
        """text: keys are str, as users get them; where nothing is decoded they may stay bytes.

        skips: notes the records that loops pass over; (): they raise
        """
        self._text, self.skips = text, skips
        self.reader = reader
        self._decoder = decoder
        self._rows = rows  # numbers of the records in the dataset
        self._hashes: Column | None = None
        self._targets: Column | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_hashes": None, "_targets": None}

    def __getattr__(self, name: str) -> Any:
        """Say of attributes that torchvision's datasets have what there is instead."""
        advice = _ATTRIBUTES.get(name)
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}"
            + (f": {advice}" if advice else ""), name=name, obj=self,
        )  # fmt: skip

    def __repr__(self) -> str:
        url = printable(self.reader.storage.url)
        return (
            f"<{show_count(len(self), 'record')} of {url}: {', '.join(self.manifest.schema.names)}>"
        )

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> ShardSequence: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            rows = self._rows[index]
            return ShardSequence(
                self.reader, self._decoder, rows, text=self._text, skips=self.skips
            )
        try:
            number = self.reader.number(self._rows[operator.index(index)])
        except IndexError:
            raise IndexError(f"record {index} of {len(self)}") from None
        shard, record = self.reader.locate(number)
        sample = self.reader.shard(shard).read(record)
        if self._decoder.plain:
            return give_text_key(sample) if self._text else sample
        return self._item(sample, number)

    def __iter__(self) -> Iterator[Any]:
        if self.skips:
            self.adopt_skips()
            skipping = SkippingPass(self.skips[0], 0, len(self), own=True)
            return skipping.of(self._good(skipping), fills=False)
        if self._rows.step != 1:
            return map(self.__getitem__, range(len(self)))
        samples = chain.from_iterable(
            shard.scan(start, stop, text=self._decoder.plain and self._text)
            for shard, start, stop in self._opened_runs()
        )
        numbers = map(self.reader.number, self._rows)
        return samples if self._decoder.plain else map(self._item, samples, numbers)

    def _good(self, skipping: SkippingPass) -> Iterator[Any]:
        """Yield the items that can be made, and note the others."""
        runs: Iterable[tuple[Shard, int, int]] = self._opened_runs()
        if self._rows.step != 1:
            located = self._located(self._rows)
            runs = ((self.reader.shard(at), record, record + 1) for at, record in located)
        numbers = map(self.reader.number, self._rows)
        read = chain.from_iterable(starmap(_scan_each, runs))
        for number, (shard, record, found) in zip(numbers, read, strict=True):
            key = b"" if isinstance(found, DamageError) else found[KEY]
            try:
                if isinstance(found, DamageError):
                    raise found
                item = found if self._decoder.plain else self._item(found, number)
            except Exception as error:
                if not may_skip(error):
                    raise
                skipping.skip((number, shard, record, None), key, error)
                continue
            skipping.count_good()
            yield give_text_key(item) if self._decoder.plain and self._text else item

    def _located(self, rows: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Give for each of these rows its shard, and its number there."""
        return map(self.reader.locate, map(self.reader.number, rows))

    def will_need(self, index: int) -> None:
        """Announce that a record will be read soon; by URL it is asked for, else nothing is done.

        Its shard is opened, if it is not yet.
        """
        if self.reader.storage.remote:
            shard, record = self.reader.locate(self.reader.number(self._rows[index]))
            self.reader.shard(shard).will_need(record, record + 1)

    def keys(self) -> list[str]:
        """Return the key of every record, in order."""
        return [*map(key_text, self.stored_keys())]

    def stored_keys(self, indices: Sequence[int] | None = None) -> list[bytes]:
        """Return the key of every record, in order, or of some, as the bytes that are stored."""
        if indices is not None and len(indices) < len(self):
            places = self._located(map(self._rows.__getitem__, indices))
            return [self.reader.shard(shard).key(record) for shard, record in places]
        if self._rows.step == 1:
            runs = (shard.keys(start, stop) for shard, start, stop in self._opened_runs(False))
            return [*chain.from_iterable(runs)]
        places = self._located(self._rows)
        return [self.reader.shard(shard).key(record) for shard, record in places]

    def find(self, key: bytes | str) -> int:
        """Return the position of the record with this key. Raises KeyError.

        The first call reads the key hashes of all shards, 4 bytes a record.
        """
        try:
            key = key_bytes(key)
        except UnicodeEncodeError:  # half of a surrogate pair, which no key has
            raise KeyError(f"no record has the key {printable(key)}") from None
        for row in np.flatnonzero(self._key_hashes() == key_hash(key)).tolist():
            shard, record = self.reader.locate(self.reader.number(row))
            if row in self._rows and self.reader.shard(shard).key(record) == key:
                return self._rows.index(row)
        raise KeyError(f"no record has the key {printable(key)}")

    def perhaps_alike(self) -> list[int]:
        """Return the positions of records whose keys have the hash of another record's key.

        The keys of all others are unlike any; of these they may be alike, or only their hashes.
        """
        rows = self._rows
        hashes = self._key_hashes()[np.arange(rows.start, rows.stop, rows.step)]
        _, places, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        return [int(number) for number in np.flatnonzero(counts[places] > 1)]

    def _key_hashes(self) -> Column:
        """Return the hashes of the keys of all records that were not dropped."""
        if self._hashes is None:
            self._hashes = self._column(lambda shard: self.reader.shard(shard).key_hashes, "<u4")
        return self._hashes

    def __contains__(self, item: object) -> bool:
        """Return True if a record has this key; of anything but a key, if an item equals it."""
        if not isinstance(item, (bytes, str)):  # an item never is one
            return super().__contains__(item)
        try:
            self.find(item)
        except KeyError:
            return False
        return True

    @property
    def targets(self) -> Column:
        """Return the label of every record, (len,) int64, -1 where it has none, as ImageFolder's.

        Read from the shards' indexes once, without an image. Without a field `label` of kind int,
        there is no such attribute.
        """
        if self._targets is None:
            if dict(self.manifest.schema.fields).get("label") != "int":
                raise AttributeError  # Python asks __getattr__ then, which says why
            self._targets = np.ma.filled(self.columns("label").astype(np.int64), -1)
        return self._targets

    def columns(self, name: str) -> Column:
        """Return a field of kind int, float or bool of every record; masked where None.

        Read from the shards' indexes, without their records. `__key__` gives the keys, as an array
        of str objects; these are read from the records' heads. Raises OptionError for other fields.
        """
        if name == KEY:
            keys = np.empty(len(self), object)
            keys[:] = self.keys()
            return keys
        if not isinstance(name, str):
            raise OptionError(f"columns: expected the name of one field, got {name!r}")
        scalars = {name: kind for name, kind in self.manifest.schema.fields if kind in EMPTY}
        if name not in scalars:
            kind = dict(self.manifest.schema.fields).get(name)
            raise OptionError(
                f"no column is called {name!r}; {there_are(scalars, name)}"
                + (f". It is a field of kind {kind}, which the index lacks" if kind else "")
            )
        kind = scalars[name]
        of = self.reader.shard
        return self._chosen(lambda shard: shard_column(of(shard), name, kind), EMPTY[kind])

    def sizes(self) -> Column:
        """Return the bytes of storage that reading each record costs: (N,) int64."""
        return self._chosen(lambda shard: self.reader.shard(shard).sizes[:], "<i8")

    def _item(self, sample: Sample, number: int) -> Any:
        draw = rng.draw(0, 0, number) if self._decoder.wants_draw else 0
        key = sample[KEY]
        try:
            return self._decoder(sample, number, draw)
        except Exception as error:
            name_record(error, record_name(number, key))
            raise

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield the rows as (shard, first record, end), where they are adjacent."""
        row, stop = self._rows.start, self._rows.stop
        ends, dropped = self.reader.starts[1:], self.reader.dropped
        while row < stop:
            number = self.reader.number(row)
            shard, record = self.reader.locate(number)
            following = dropped[np.searchsorted(dropped, number) :][:1].tolist()
            count = min([stop - row, *(int(end) - number for end in (ends[shard], *following))])
            yield shard, record, record + count
            row += count

    def _opened_runs(self, records: bool = True) -> Iterator[tuple[Shard, int, int]]:
        """Yield the runs of rows with their shards opened.

        By URL the next shards are asked for ahead, also for their first records: else the end of
        each would be waited for.
        """
        runs, reader = [*self._runs()], self.reader
        for number, (at, start, stop) in enumerate(runs):
            shard = reader.shard(at)
            if reader.storage.remote and number + 1 < len(runs):
                reader.will_open(after for after, _, _ in runs[number + 1 : number + 1 + _AHEAD])
                if records:
                    left = shard.sizes[start:stop][::-1].cumsum()[::-1]  # bytes from each on
                    middle = start + int(np.searchsorted(-left, -_BYTES_AHEAD))
                    yield shard, start, middle
                    after, first, last = runs[number + 1]
                    following = reader.shard(after)
                    sizes = following.sizes[first:last].cumsum()
                    most = first + int(np.searchsorted(sizes, _BYTES_AHEAD))
                    following.will_need(first, min(most, last))
                    start = middle
            yield shard, start, stop

    def _chosen(self, of_shard: Callable[[int], Column], empty: str) -> Column:
        """Join the columns of all shards, and choose the values of these records."""
        rows, values = self._rows, self._column(of_shard, empty)
        return values[rows.start : rows.stop] if rows.step == 1 else values[np.array(rows, int)]

    def _column(self, of_shard: Callable[[int], Column], empty: str) -> Column:
        """Join the columns of all shards to one of the records that were not dropped."""
        shards = range(self.manifest.shards)
        columns = []
        for shard in shards:
            self.reader.will_open(shards[shard + 1 : shard + 1 + _AHEAD])
            columns.append(of_shard(shard))
        columns = [column for column in columns if len(column)] or [np.empty(0, empty)]
        if {column.dtype.kind for column in columns} == {"i", "u"} and any(
            column.dtype == np.uint64 for column in columns
        ):  # numpy would make floats of int64 with uint64
            columns = [column.astype(object) for column in columns]
        masked = any(isinstance(column, np.ma.MaskedArray) for column in columns)
        joined: Column = (np.ma.concatenate if masked else np.concatenate)(columns)
        remaining = self.reader.remaining
        return joined if remaining is None else joined[remaining.numbers]


def shard_column(shard: Shard, name: str, kind: str) -> Column:
    """Return a field of kind int, float or bool of every record of a shard; masked where None."""
    column = shard.columns.get(name)
    if column is None:  # integers below 0 and above 2**63: no column holds both
        values = list[Any]([None] * shard.records)
        for start, stop in whole_runs(shard, 0, shard.records):
            values[start:stop] = (sample[name] for sample in shard.scan(start, stop))
        column = np.ma.MaskedArray(
            np.array([0 if value is None else value for value in values], object),
            [value is None for value in values],
        )
    elif kind != "int" and column.dtype.kind == "u":  # a shard of None alone: they are u1
        column = column.astype(EMPTY[kind])
    return column
