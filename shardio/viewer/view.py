"""The view of one dataset: what `shardio view` shows, without the pages and the server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ..dataset.reader import Reader, open_reader
from ..errors import OptionError, ShardioError, printable
from ..formats.index import SCALARS
from ..formats.manifest import load_splits
from ..names import KEY
from ..storage.location import locate
from ..storage.options import Storage
from ..storage.stores import without_secrets
from . import pictures
from .results import (
    Card,
    Checked,
    Crop,
    Damaged,
    FieldInfo,
    FieldValue,
    Histograms,
    Page,
    Picture,
    Query,
    Record,
    Rejected,
    Summary,
)

MAX_COUNT = 1_000  # cards in a page


def open_view(
    path: str | os.PathLike[str],
    *,
    split: str | None = None,
    storage: Storage | None = None,
    cache_bytes: int = 1 << 30,
) -> View:
    """Open the view of a dataset, a directory or a URL.

    split        "train": the dataset of this name in `path`, which holds several
    storage      a shardio.Storage: where the data lies
    cache_bytes  that the view may keep of columns and orders, beside open shards

    Raises NotPackedError, DamageError, VersionError, OptionError, StorageError.
    """
    options = Storage() if storage is None else storage
    reader = open_reader(path, split, options)
    splits = load_splits(locate(path, options)) if split is not None else None
    return View(reader, options, split=split, splits=splits or (), cache_bytes=cache_bytes)


class View:
    """Answer what a page asks of one dataset. Safe to call from many threads.

    Records are numbered from 0, in storage order. Methods raise IndexError for a number that no
    record has, and OptionError for a query that cannot be met; a damaged record is part of an
    answer, not an exception, but for `image` and `crop_image`, which raise ShardioError.
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
        self._reader, self._options = reader, options
        self._split, self._splits = split, tuple(splits)
        self._cache_bytes = cache_bytes

    def __enter__(self) -> View:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all shards, and let go of what is kept."""
        self._reader.forget()

    def summary(self) -> Summary:
        """Return what the manifest says, at once."""
        manifest = self._reader.manifest
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
            images=tuple(map(printable, manifest.schema.images)),
            main_image=manifest.schema.main_image,
            packed=(),
        )

    def page(self, query: Query | None = None, start: int = 0, count: int = 100) -> Page:
        """Return up to `count` cards of an answer, from position `start` on.

        In training order `query.step` gives the start instead. A search reads keys for a bounded
        time: the page may hold fewer cards than asked, none too, and `next` says where to go on.
        """
        total = self._reader.records
        cards = tuple(map(self._card, range(start, min(start + count, total))))
        following = start + len(cards)
        return Page(cards, start, total, following if following < total else None)

    def find(self, key: str) -> int | None:
        """Return the number of the record with exactly this key, by the index, or None."""
        raise OptionError("find: not yet")

    def histograms(self, query: Query | None = None) -> Histograms:
        """Count classes, and bin bytes and columns, of the chosen records; from the index alone.

        `search` and the order have no part in it.
        """
        return Histograms(self._reader.records, (), ())

    def record(self, number: int) -> Record:
        """Return all that is known of one record."""
        shard_number, inside = self._reader.locate(number)
        shard = self._reader.shard(shard_number)
        card = self._card(number)
        fields: tuple[FieldValue, ...] = ()
        if not card.damaged:
            sample = shard.read(inside)
            kinds = self._reader.manifest.schema.fields
            fields = tuple(
                FieldValue(
                    printable(name), kind, printable(str(sample[name])), None, kind == "image"
                )
                for name, kind in kinds
                if name != KEY
            )
        return Record(
            number=number,
            key=card.key,
            label=card.label,
            class_name=card.class_name,
            shard=card.shard,
            shard_number=shard_number,
            shard_url=card.shard,
            number_in_shard=inside,
            start=shard.offset(inside),
            bytes=card.bytes,
            checksum=None,
            fields=fields,
            damaged=card.damaged,
        )

    def image(
        self,
        number: int,
        field: str | None = None,
        side: int | None = None,
        *,
        overlay: bool = False,
    ) -> Picture:
        """Return an image field of a record, as a file that a browser shows.

        field    None: the main image
        side     a thumbnail, at most so many pixels wide and high; None: the stored bytes, or a
                 PNG of an image that browsers do not show
        overlay  a mask as PNG in colours, the class 0 transparent, to be laid over the main image

        Raises DamageError, DecodeError, StorageError; OptionError for a field that is no image;
        KeyError where the record has None there.
        """
        name = field or self._reader.manifest.schema.main_image
        if name not in self._reader.manifest.schema.images:
            raise OptionError(f"no image field is called {printable(str(name))!r}")
        shard, inside = self._reader.locate(self._checked(number))
        data = self._reader.shard(shard).read(inside)[name]
        if data is None:
            raise KeyError(name)
        if side is None:
            return pictures.original(data, self._options.max_pixels)
        return pictures.thumbnail(data, side, self._options.max_pixels)

    def crops(
        self,
        number: int,
        epochs: Sequence[int] = (0, 1, 2, 3),
        *,
        size: int = 224,
        seed: int = 0,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
    ) -> tuple[Crop, ...]:
        """Return the parts of the main image that training takes by RandomResizedCrop.

        Raises as `image` does.
        """
        return ()

    def crop_image(
        self,
        number: int,
        epoch: int,
        *,
        size: int = 224,
        seed: int = 0,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
    ) -> Picture:
        """Return the crop of an epoch, size x size, as PNG. Raises as `image`."""
        return self.image(number, side=size)

    def damaged(self) -> tuple[Damaged, ...]:
        """Return the damaged records that this view has met so far, by number."""
        return ()

    def check(self, start: int = 0, *, budget_s: float = 0.5) -> Checked:
        """Read and check records from a number on, for so many seconds; go on at `next`."""
        return Checked(start, None, self._reader.records, ())

    def rejected(self) -> tuple[Rejected, ...] | None:
        """Return what packing left out; None where the dataset does not say."""
        return None

    def _checked(self, number: int) -> int:
        if not 0 <= number < self._reader.records:
            raise IndexError(f"record {number} of {self._reader.records:,}")
        return number

    def _card(self, number: int) -> Card:
        shard_number, inside = self._reader.locate(self._checked(number))
        name = printable(self._reader.manifest.shard(shard_number).name)
        label: Any = None
        size, key, damaged = 0, "", None
        try:
            shard = self._reader.shard(shard_number)
            column = shard.columns.get("label")
            label = None if column is None else column[inside].item()
            size = int(shard.sizes[inside])
            key = printable(shard.key(inside), 4096)
        except ShardioError as error:
            damaged = str(error)
        classes = self._reader.manifest.classes
        class_name = None
        if classes is not None and isinstance(label, int) and 0 <= label < len(classes):
            class_name = printable(classes[label])
        return Card(
            number, number, key, label, class_name, name, shard_number, size, damaged=damaged
        )
