"""Small images straight into a batch: no sample, no item and no image of their own in between.

Of a dataset that was packed by `pack --encode raw`, the pixels of a record are its last bytes, and
its small fields stand in the index as well. So a batch of arrays (`decode="numpy"`, no transform)
needs of each record no more than to be checked and copied. Where the core was built, small JPEGs
of one size are decoded into a batch likewise, and small ones of any size are cropped into it by a
built-in transform. What does not fit is left to the ordinary way, which decodes each record: fields
that are not in the index, values that are None, an image of another size.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .. import native
from ..errors import DecodeError, ShardioError
from ..formats.manifest import Manifest
from ..formats.overlay import without_overlays
from ..formats.sample import BLOBS
from ..images.decode import pixels, ppm_header
from ..images.transforms import Transform, crop_many
from ..order.rng import UInt64s
from ..stack import users_level
from .buffering import SMALL
from .collate import images, numbers
from .decode import IMAGE, Decoder
from .encoded import Empty
from .fetch import Fetch, Rows
from .reader import Reader, ShardRows

JPEG = b"\xff\xd8\xff"  # how each begins
_MOST = 1 << 18  # pixels of a small JPEG; a batch of 512 takes 400 MB then
_FAILURES = 4  # batches that may be read in vain before all are read the ordinary way

_DTYPES = {"int": np.int64, "float": np.float64, "bool": np.bool_}

Array = np.ndarray[Any, Any]


@dataclass
class Pixels:
    """Read batches of images of one size at once."""

    fields: tuple[str, ...]  # of a batch, IMAGE among them
    scalars: dict[str, type[Any]]  # the others: the dtype of each in a batch
    height: int = 0
    width: int = 0

    @abstractmethod
    def fits(self, first: ShardRows) -> bool:
        """Say whether a batch that begins so may be of one size; `height` and `width` are it."""

    @abstractmethod
    def read(self, parts: Sequence[ShardRows], out: Array, draws: Callable[[], UInt64s]) -> bool:
        """Write the pixels of these rows to `out`, (B, H, W, 3) uint8, contiguous.

        draws: gives the random word of each row. False when one is not as expected. Raises
        DamageError, StorageError.
        """

    def begin(self, fetch: Fetch) -> Callable[[Rows, Empty], Any]:
        """Return what makes the batches of one pass."""
        return partial(self._batch, fetch)

    def _batch(self, fetch: Fetch, rows: Rows, empty: Empty) -> tuple[Any, ...] | None:
        """Make the batch of these rows, as collating their items would; None: it cannot be made so.

        empty: gives the memory for the images. Raises DamageError, StorageError.
        """
        parts = fetch.parts(rows)
        columns = self._columns(parts) if self.fits(parts[0]) else None
        if columns is None:
            return None
        batch, array = images(rows.size, self.height, self.width, empty)
        if not self.read(parts, array, partial(fetch.draws, rows)):
            return None
        return tuple([numbers(columns[n]) if n in columns else batch for n in self.fields])

    def _columns(self, parts: Sequence[ShardRows]) -> dict[str, Array] | None:
        """Return the other fields of these rows, (B,) each; None: an index lacks one."""
        found = {}
        count = sum(len(part.rows) for part in parts)
        for name, dtype in self.scalars.items():
            found[name] = values = np.empty(count, dtype)
            for shard, records, rows, _ in parts:
                column = shard.columns.get(name)
                # Unsigned ones of 64 bits may be too large for a tensor.
                if column is None or column.dtype == np.uint64:
                    return None
                piece = column[records]
                if type(piece) is not np.ndarray:  # some are None: not these, perhaps
                    if np.ma.is_masked(piece):
                        return None
                    piece = np.asarray(piece)
                values[rows] = piece
        return found


class RawPixels(Pixels):
    """Read raw pixels, whose size is in the manifest."""

    def fits(self, first: ShardRows) -> bool:
        # Memory is taken for the pixels next, and a manifest may say anything.
        return bool(first.shard.sizes[first.records[0]] >= 3 * self.height * self.width)

    def read(self, parts: Sequence[ShardRows], out: Array, draws: Callable[[], UInt64s]) -> bool:
        begin = ppm_header(self.height, self.width)
        for shard, records, rows, held in parts:
            if not without_overlays(shard).gather(records, held, begin, out, rows):
                return False
        return True


@dataclass
class Jpegs(Pixels):
    """Read small files by one call of the core a batch; where that is in vain, one by one."""

    _failed: int = 0  # batches that were read in vain, less some for those that were not

    def fits(self, first: ShardRows) -> bool:
        return native.core is not None and self._failed <= _FAILURES

    def read(self, parts: Sequence[ShardRows], out: Array, draws: Callable[[], UInt64s]) -> bool:
        assert native.core is not None
        images = [b""] * len(out)
        for shard, records, rows, held in parts:
            blobs = without_overlays(shard).blobs(records, held)
            if blobs is None:
                return False
            for row, blob in zip(rows.tolist(), blobs, strict=True):
                images[row] = blob
        done = self.make(images, out, draws)
        self._failed = max(0, self._failed - 1) if done else self._failed + 1
        return done

    @abstractmethod
    def make(self, images: Sequence[bytes], out: Array, draws: Callable[[], UInt64s]) -> bool:
        """Make the pixels of these files, as `read` does; False when it was in vain."""


class SmallJpegs(Jpegs):
    """Decode small JPEGs, all as large as the first one; where they are not, the ordinary way.

    The core decodes 32 x 32 pixels in 6 us; PIL, numpy and Python's calls take 60.
    """

    def fits(self, first: ShardRows) -> bool:
        if not super().fits(first):
            return False
        if not self.height and not self._find_size(first):
            self._failed = _FAILURES + 1
        return self.height > 0

    def make(self, images: Sequence[bytes], out: Array, draws: Callable[[], UInt64s]) -> bool:
        # One call: to make a decompressor costs as much as to decode an image.
        return bool(native.core.decode_many(images, out) == len(images))  # type: ignore[union-attr]

    def _find_size(self, part: ShardRows) -> bool:
        shard, record = part.shard, int(part.records[0])
        try:
            data = shard.read(record)[IMAGE]
            if data is None or not data.startswith(JPEG):
                return False
            height, width, _ = pixels(data, max_pixels=_MOST).shape
        except ShardioError:
            return False  # the ordinary way says what is wrong
        self.height, self.width = height, width
        return True


@dataclass
class SmallCrops(Jpegs):
    """Crop small images by a built-in transform: of CIFAR in 10 us each, and not 30."""

    transform: Transform = field(kw_only=True)

    def make(self, images: Sequence[bytes], out: Array, draws: Callable[[], UInt64s]) -> bool:
        try:
            return crop_many(self.transform, images, draws(), out) * 2 >= len(images)
        except DecodeError:
            return False  # the ordinary way names the record


def choose_batch_reader(manifest: Manifest, decoder: Decoder) -> Pixels | None:
    """Find how to read batches of a dataset at once; None: they cannot be read so."""
    fields, kinds = decoder.fields, dict(manifest.schema.fields)
    if (
        manifest.format != "record"
        or not (decoder.only_arrays or decoder.only_crops)
        or fields is None
        or fields.count(IMAGE) != 1
        or [name for name, kind in manifest.stored_schema.fields if kind in BLOBS] != [IMAGE]
        or kinds[IMAGE] != "image"
        or any(name != IMAGE and kinds[name] not in _DTYPES for name in fields)
    ):
        return None
    scalars = {name: _DTYPES[kinds[name]] for name in fields if name != IMAGE}
    crop = decoder.only_crops
    if manifest.options.get("encode") != "raw":
        if manifest.mean_bytes >= SMALL:
            return None
        if crop is not None:
            return SmallCrops(fields, scalars, *crop.shape, transform=crop)
        return SmallJpegs(fields, scalars)
    match manifest.options.get("pixels"):
        case [int(height), int(width)] if min(height, width) > 0 and crop is None:
            return RawPixels(fields, scalars, height, width)
    return None


def advise_core(reader: Reader, batch_reader: object, transform: object) -> None:
    """Warn where the core would make images faster, but is not here.

    Call it when a dataset is constructed: in the trainer's process, so workers do not repeat it.

    batch_reader: how batches are made at once, if they are.
    """
    if isinstance(batch_reader, RawPixels):
        if native.records() is None:
            native.advise("records of raw pixels are read by Python, slower")
        return
    crops = isinstance(transform, Transform) and transform.interpolation != "nearest"
    decodes = crops or isinstance(batch_reader, Pixels)
    if native.core is None and decodes and _begins_with_jpegs(reader):
        does = "decodes and crops" if crops else "decodes"
        native.advise(f"PIL {does} the JPEGs of this dataset, slower")


def advise_boxes(manifest: Manifest, fields: Sequence[str] | None, transform: object) -> None:
    """Warn where a built-in transform crops the images of COCO, but not their boxes.

    Call it when a dataset is constructed: in the trainer's process, so workers do not repeat it.

    fields: those that samples are made of; None: all that the dataset holds.
    """
    boxes = "annotations"  # of COCO
    if (
        isinstance(transform, Transform)
        and transform.boxes is None
        and manifest.options.get("source") == "coco"
        and boxes in (fields or manifest.schema.names)
    ):
        warnings.warn(
            f"{type(transform).__name__} crops the images, and their boxes stay those of the "
            f"whole images: give {type(transform).__name__}(..., boxes={boxes!r})",
            stacklevel=users_level(),
        )


def _begins_with_jpegs(reader: Reader) -> bool:
    """Say whether the first record holds a JPEG. Opens its shard, and lets go of it again."""
    if not reader.records:
        return False
    shard, record = reader.locate(reader.number(0))
    try:
        first = reader.shard(shard).read(record)
    except ShardioError:  # whoever reads it will say so
        return False
    finally:
        reader.forget()
    return any(isinstance(v, bytes) and v.startswith(JPEG) for v in first.values())
