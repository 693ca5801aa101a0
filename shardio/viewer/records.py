"""One record: its fields, its images, and the crops that training takes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..dataset.reader import Reader
from ..errors import DecodeError, OptionError, ShardioError, printable, there_are
from ..formats.sample import Sample
from ..images.transforms import RandomResizedCrop
from ..names import KEY
from ..storage.stores import without_secrets
from ..units import check_int
from . import details, pictures
from .cards import Cards
from .checks import Checks
from .results import Checksum, Crop, Picture, Record


class Records:
    """Show single records of a dataset, by number; the part of a View that reads them."""

    def __init__(
        self, reader: Reader, checks: Checks, cards: Cards, max_pixels: int | None
    ) -> None:
        """Keep what is needed to read records, and to note the damaged ones."""
        self._reader, self._checks, self._cards = reader, checks, cards
        self._max_pixels = max_pixels

    def record(self, number: int) -> Record:
        """Return all that is known of one record."""
        at, inside = self._reader.locate(self._checked(number))
        manifest, card = self._reader.manifest, self._cards.one(number, number)
        url = f"{self._reader.storage.url.rstrip('/')}/{manifest.shard(at).name}"
        found = Record(
            number=number,
            key=card.key,
            label=card.label,
            class_name=card.class_name,
            shard=card.shard,
            shard_number=at,
            shard_url=printable(without_secrets(url), 4096),
            number_in_shard=inside,
            start=0,
            bytes=card.bytes,
            checksum=None,
            fields=(),
            damaged=card.damaged,
        )
        try:
            shard = self._reader.shard(at)
            sums = shard.checksums(inside)
            if sums is not None:
                stored, there = (f"{one:016x}" for one in sums)
                covers = "record" if manifest.format in ("record", "lmdb") else "stored bytes"
                found = replace(found, checksum=Checksum(stored, there, stored == there, covers))
            found = replace(found, start=shard.offset(inside))
            sample = shard.read(inside)
        except ShardioError as error:
            self._checks.met(number, card.key or None, card.shard, str(error))
            return replace(found, damaged=str(error))
        return self._described(found, sample)

    def _described(self, record: Record, sample: Sample) -> Record:
        """Return a record with what its sample shows."""
        manifest, limit = self._reader.manifest, self._max_pixels
        main = next(iter(pictures.image_fields(manifest.schema)), None)
        data = None if main is None else pictures.as_file(sample[main])
        header, damaged = None, None
        if data is not None:
            try:
                header = pictures.read_header(data, limit)
            except DecodeError as error:
                if main in manifest.schema.images:  # else nobody said that it is one
                    damaged = str(error)
                    self._checks.met(record.number, record.key, record.shard, damaged)
        return replace(
            record,
            key=printable(sample[KEY], 65_535),
            fields=details.describe_fields(sample, manifest.schema, header, limit),
            width=None if header is None else header.width,
            height=None if header is None else header.height,
            image_format=None if header is None else str(header),
            tiles=details.find_tiles(data),
            boxes=details.find_boxes(sample, manifest.schema, header, manifest.classes),
            damaged=damaged,
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
        data, limit = self._image_bytes(number, field), self._max_pixels
        side = None if side is None else check_int("side", side, 1, 1 << 15)
        try:
            if overlay:
                return pictures.overlay(data, side, limit)
            if side is None:
                return pictures.original(data, limit)
            return pictures.thumbnail(data, side, limit)
        except DecodeError as error:
            images = self._reader.manifest.schema.images
            if field in images or (field is None and images):  # else nobody said that it is one
                card = self._cards.one(number, number)
                self._checks.met(number, card.key, card.shard, str(error))
            raise

    def _image_bytes(self, number: int, field: str | None) -> bytes:
        schema = self._reader.manifest.schema
        names = pictures.image_fields(schema)
        name = field or next(iter(names), "")
        if dict(schema.fields).get(name) not in pictures.SHOWABLE:
            raise OptionError(f"no image field is called {printable(name)!r}; {there_are(names)}")
        at, inside = self._reader.locate(self._checked(number))
        try:
            value = self._reader.shard(at).read(inside)[name]
        except ShardioError as error:
            shard = printable(self._reader.manifest.shard(at).name)
            self._checks.met(number, None, shard, str(error))
            raise
        if value is None:
            raise KeyError(name)
        if (data := pictures.as_file(value)) is None:
            raise DecodeError(f"record {number:,}: {printable(name)} holds no image")
        return data

    def crops(
        self,
        number: int,
        transform: RandomResizedCrop,
        epochs: Sequence[int] = (0, 1, 2, 3),
        *,
        seed: int = 0,
    ) -> tuple[Crop, ...]:
        """Return the parts of the main image that training takes by this transform.

        seed is that of ShardDataset. Raises as `image`.
        """
        data = self._image_bytes(number, None)
        header = pictures.read_header(data, self._max_pixels)
        return pictures.crops(header, number, tuple(epochs), seed, transform)

    def crop_image(
        self, number: int, transform: RandomResizedCrop, epoch: int, *, seed: int = 0
    ) -> Picture:
        """Return the crop of an epoch, as PNG. As `crops`; raises as `image`."""
        transform = replace(transform, max_pixels=self._max_pixels)
        return pictures.crop(self._image_bytes(number, None), number, epoch, seed, transform)

    def _checked(self, number: int) -> int:
        if not 0 <= number < self._reader.stored_records:
            raise IndexError(f"record {number} of {self._reader.stored_records:,}")
        if self._reader.place(number) is None:
            raise IndexError(f"record {number} was dropped")
        return number
