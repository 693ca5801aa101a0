"""The view of one dataset: what `shardio view` shows, without the pages and the server."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from ..dataset.reader import Reader, open_reader
from ..errors import ShardioError, printable
from ..formats.index import SCALARS, key_hash
from ..formats.manifest import load_splits
from ..names import key_bytes
from ..order.rng import Int64s
from ..storage.location import locate
from ..storage.options import Storage
from ..storage.stores import without_secrets
from ..units import check_int, show_count
from . import histogram
from .answers import Answers
from .cache import BackgroundCache, PendingError
from .cards import Cards
from .checks import Checks
from .columns import HASHES, Columns
from .pictures import image_fields
from .records import Records
from .results import (
    Batch,
    Card,
    Checked,
    ClassCount,
    Damaged,
    Drawn,
    FieldInfo,
    Histograms,
    Page,
    Query,
    Rejected,
    Summary,
)
from .rows import Rows, Training
from .search import search

MAX_COUNT = 1_000  # cards in a page
CACHE_BYTES = 1 << 30
OPEN_BYTES = 128 << 20  # of the indexes of shards that are open, at 40 bytes a record
WAIT_S = 0.7  # that an answer waits for the index before it says how far it is
SEARCH_S = 0.4  # that a page of a search reads keys


def open_view(
    path: str | os.PathLike[str],
    *,
    split: str | None = None,
    storage: Storage | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> View:
    """Open the view of a dataset, a directory or a URL.

    split        "train": the dataset of this name in `path`, which holds several. Default there:
                 train, else the first one
    storage      a shardio.Storage: where the data lies
    cache_bytes  that the view may keep of columns and orders; indexes of open shards take up to
                 OPEN_BYTES beside that

    Raises NotPackedError, DamageError, VersionError, OptionError, StorageError.
    """
    options = Storage() if storage is None else storage
    splits = load_splits(locate(path, options)) or ()
    if split is None and splits:
        split = "train" if "train" in splits else splits[0]
    reader = open_reader(path, split, options)
    return View(reader, options, split=split, splits=splits, cache_bytes=cache_bytes)


class View(Records):
    """Answer what a page asks of one dataset. Safe to call from many threads.

    Records are numbered from 0, in storage order. Methods raise IndexError for a number that no
    record has, and OptionError for a query that cannot be met; a damaged record is part of an
    answer, not an exception, but for `image`, `crops` and `crop_image`, which raise ShardioError.
    """

    def __init__(
        self,
        reader: Reader,
        options: Storage,
        *,
        split: str | None,
        splits: Sequence[str],
        cache_bytes: int,
    ) -> None:
        """Keep the reader, which the view may use alone; `open_view` is the way to call it."""
        manifest = reader.manifest
        each = 40 * max(1, reader.records // max(1, manifest.shards))
        reader.limit = max(4, min(reader.limit, OPEN_BYTES // each))
        checks = Checks(reader, options.max_pixels)
        super().__init__(reader, checks, Cards(reader, checks.met), options.max_pixels)
        self._split, self._splits = split, tuple(splits)
        self._cache = BackgroundCache(cache_bytes)
        self._columns = Columns(reader, self._cache, cache_bytes)
        self._answers = Answers(reader, self._columns, self._cache)

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all shards, and drop what is cached."""
        self._cache.close()
        self._cards.close()
        self._reader.forget()

    @property
    def cached_bytes(self) -> int:
        """Return the bytes of columns and orders that are cached now."""
        return self._cache.bytes

    def summary(self) -> Summary:
        """Return what the manifest says, at once."""
        manifest = self._reader.manifest
        images = tuple(map(printable, image_fields(manifest.schema)))
        url = printable(without_secrets(self._reader.index.url), 4096)
        return Summary(
            name=url.rstrip("/").rpartition("/")[2] or url,
            url=url,
            dataset_id=manifest.dataset_id.hex(),
            format=manifest.format,
            version=manifest.version,
            library=printable(manifest.library),
            records=manifest.records,
            bytes=manifest.size,
            shards=manifest.shards,
            fields=tuple(
                FieldInfo(printable(name), kind, kind in SCALARS)
                for name, kind in manifest.schema.fields
            ),
            classes=None if manifest.classes is None else tuple(map(printable, manifest.classes)),
            split=self._split,
            splits=self._splits,
            images=images,
            main_image=next(iter(images), None),
            packed=tuple(
                (printable(name), printable(value if isinstance(value, str) else json.dumps(value)))
                for name, value in manifest.options.items()
                if value is not None
            ),
        )

    def page(
        self,
        query: Query | None = None,
        start: int = 0,
        count: int = 100,
        *,
        wait_s: float | None = WAIT_S,
        search_s: float = SEARCH_S,
    ) -> Page:
        """Return up to `count` cards of an answer, from position `start` on.

        In training order `query.step` gives the start instead. A filter or a sort reads the index
        of all shards when it is first asked for: after wait_s seconds the page says how far that
        is (`pending`); ask again, or give None to wait for it. A search reads keys for search_s
        seconds: the page may hold fewer cards than asked, none too, and `next` says where to go on.
        """
        query = Query() if query is None else query
        start, count = check_int("start", start, 0), check_int("count", count, 1, MAX_COUNT)
        try:
            rows = self._answers.rows(query, wait_s)
        except PendingError as pending:
            return Page((), start, None, start, note=f"{pending}", pending=pending.part)
        steps = None
        if isinstance(rows, Training):
            steps = rows.partition.steps
            if query.step is not None:
                start = check_int("step", query.step, 0) * rows.batch_size
        if query.search:
            return self._search(query, rows, start, count, steps, search_s)
        positions = range(start, min(start + count, rows.total))
        following = positions.stop if positions.stop < rows.total else None
        note = "" if rows.total else "No record meets these conditions"
        cards = self._page_cards(query, rows, positions)
        return Page(cards, start, rows.total, following, steps, note=note or self._unread())

    def batches(self, query: Query, count: int, *, wait_s: float | None = WAIT_S) -> Drawn:
        """Return up to `count` batches in training order, from `query.step` on.

        Labels come from the index, whose reading is waited for as `page` does.
        """
        try:
            rows = self._answers.rows(query, wait_s)
        except PendingError as pending:
            return Drawn((), pending.part)
        if not isinstance(rows, Training):
            return Drawn(())
        first, size = query.step or 0, rows.batch_size
        steps = range(first, min(first + count, rows.partition.steps))
        labels, part = None, None
        if "label" in self._columns.names:
            try:
                labels = self._columns.soon("label", wait_s)
            except PendingError as pending:
                part = pending.part
        found = []
        for step in steps:
            numbers, _, _, valid = rows.rows(step * size, min((step + 1) * size, rows.total))
            numbers = numbers[valid]
            own = None if labels is None or labels.dtype.kind not in "iu" else labels[numbers]
            shards = np.unique(np.searchsorted(self._reader.starts, numbers, side="right"))
            found.append(
                Batch(
                    step,
                    tuple(numbers.tolist()),
                    None if own is None else tuple(own.tolist()),  # None where masked
                    len(shards),
                )
            )
        return Drawn(tuple(found), part)

    def _search(
        self, query: Query, rows: Rows, start: int, count: int, steps: int | None, search_s: float
    ) -> Page:
        pool = self._cards.pool
        found = search(self._reader, rows, query.search, start, count, search_s, pool)
        cards = [self._page_cards(query, rows, range(at, at + 1))[0] for at in found.positions]
        note = (
            f"Searched the keys of {found.searched:,} records, positions {start:,} to "
            f"{found.next:,} of {rows.total:,}"
        )
        if found.unread:
            note += f"; {show_count(found.unread, 'key')} could not be read"
        following = found.next if found.next < rows.total else None
        return Page(tuple(cards), start, None, following, steps, found.searched, note)

    def _page_cards(self, query: Query, rows: Rows, positions: range) -> tuple[Card, ...]:
        """Return the cards at these positions, with what the order knows of them."""
        if not positions:
            return ()
        start, stop = positions.start, positions.stop
        if not isinstance(rows, Training):
            return tuple(self._cards(rows.numbers(start, stop).tolist(), start, query.sort))
        numbers, *more = (column.tolist() for column in rows.rows(start, stop))
        cards = self._cards(numbers, start, query.sort)
        return tuple(
            replace(card, step=step, row=row, valid=valid)
            for card, step, row, valid in zip(cards, *more, strict=True)
        )

    def _unread(self) -> str:
        damaged = self._columns.damaged
        if not damaged:
            return ""
        records = int(self._reader.manifest.shard_records[[*damaged]].sum())
        return (
            f"The index of {show_count(len(damaged), 'shard')} cannot be read: no values are known "
            f"of {show_count(records, 'record')}"
        )

    def find(self, key: str) -> int | None:
        """Return the number of the record with exactly this key, by the index, or None.

        The first call reads the indexes of all shards, if nothing has done that yet.
        """
        try:
            wanted = key_bytes(key)
        except UnicodeEncodeError:
            return None
        hashes = self._columns.soon(HASHES, None)
        for number in np.flatnonzero(hashes == key_hash(wanted)).tolist():
            at, record = self._reader.locate(number)
            try:
                if self._reader.place(number) is None:
                    continue
                if self._reader.shard(at).key(record) == wanted:
                    return int(number)
            except ShardioError:
                continue
        return None

    def histograms(
        self, query: Query | None = None, *, wait_s: float | None = WAIT_S
    ) -> Histograms:
        """Count classes, and bin bytes and columns, of the chosen records; from the index alone.

        `where` and `label` of the query choose; search and order have no part in it. wait_s: as
        for `page`.
        """
        query = Query() if query is None else query
        key = ("histograms", query.where, query.label)
        if (found := self._cache.get(key)) is not None:
            return found  # type: ignore[no-any-return]
        try:
            selection = self._answers.chosen(query, wait_s)
            numbers = None if selection is None else selection.numbers
            return self._cache.make(key, lambda: self._count(key, numbers), wait_s)
        except PendingError as pending:
            return Histograms(self._reader.records, (), (), note=f"{pending}", pending=pending.part)

    def _count(self, key: Hashable, numbers: Int64s | None) -> Histograms:
        """Make histograms of these records, in the background."""
        classes: tuple[ClassCount, ...] = ()
        bins = []
        manifest = self._reader.manifest
        for name in self._columns.names:
            column = self._columns(name)
            if numbers is not None:
                column = column[numbers]
            if name == "label":
                classes = histogram.count_classes(column, manifest.classes)
            elif (found := histogram.bin_numbers(name, column)) is not None:
                bins.append(found)
        records = self._reader.records if numbers is None else len(numbers)
        counted = Histograms(records, classes, tuple(bins), self._unread())
        return self._cache.put(key, counted, 200 * len(classes) + 4_000 * len(bins) + 1_000)

    def damaged(self) -> tuple[Damaged, ...]:
        """Return the damaged records that this view has met so far, by number."""
        return self._checks.damaged()

    def check(self, start: int = 0, *, budget_s: float = 0.5, pixels: bool = False) -> Checked:
        """Read and check records from a number on, for so many seconds; go on at `next`.

        pixels: decode their images, too.
        """
        return self._checks.check(start, budget_s, pixels)

    def rejected(self) -> tuple[Rejected, ...] | None:
        """Return what packing left out by on_error="skip", or None if nothing says it."""
        return self._checks.rejected()
