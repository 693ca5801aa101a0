"""What packing does to an image: shrinks it, makes pixels of it, or tiles, and keeps its file.

    the source's bytes --resize--> fewer pixels --jpeg_tiles--> the same pixels in other bytes
    the source's bytes --pixels--> a PPM file, with `resize` of the central square
    the source's bytes --keep_original--> the field `original`, where `image` has others now

A `Recoding` is what the options say of it. Without any of them, images are packed as they are, and
nothing here looks at them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import units as sizes
from ..errors import DecodeError, OptionError, SourceError, StorageError, printable
from ..formats import manifest
from ..formats.sample import Sample
from ..images import decode as image
from ..images import jpeg_rewrite
from ..images.resize import resize_short, square
from ..names import KEY
from ..storage import locate
from .sources.base import Listing, Problem, Rejected, SourceRequest, listed

QUALITY = 90  # of re-encoded JPEGs; FFCV's and ImageNet recipes' choice
ORIGINAL = "original"  # with keep_original, the field of a file's own bytes; None: `image` has them

ONE_SIZE = "raw pixels have one size"  # so ends the reason where an image has another
_MAX_SQUARE = 1 << 15  # pixels on a side: 3 GiB, near to what a record may hold


@dataclass(frozen=True)
class Recoding:
    """What is done to each image of a dataset."""

    resize: int | None
    quality: int | None  # of JPEGs that are resized
    pixels: tuple[int, int] | None  # height and width of raw pixels
    jpeg_tiles: bool
    keep_original: bool
    max_pixels: int | None  # of an image that is decoded; None: the limit of its format

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Recoding:
        """As a plan records it."""
        pixels = options.get("pixels")
        return cls(
            resize=options["resize"],
            quality=options["quality"],
            pixels=None if pixels is None else (pixels[0], pixels[1]),
            jpeg_tiles=options.get("jpeg_tiles", False),
            keep_original=options.get("keep_original", False),
            max_pixels=options.get("max_pixels"),
        )

    def apply(self, sample: Sample) -> Recoded:
        """Change a sample. Raises Rejected where its image cannot be packed so."""
        done = Recoded()
        own = sample.get("image")
        if self.pixels is not None:
            done.enlarged = self._make_raw(sample, self.pixels)
        elif self.resize is not None:
            done.full_size = self._resize(sample, self.resize)
        if self.jpeg_tiles:
            done.tiles = self._make_tiles(sample)
        if self.keep_original and sample.get(ORIGINAL) is None:
            sample[ORIGINAL] = None if sample.get("image") is own else own
        return done

    def _resize(self, sample: Sample, side: int) -> bool:
        """Shrink a sample's image; whether it stays at full size, though larger."""
        data = sample.get("image")
        if data is None:
            return False
        try:
            quality = self.quality or QUALITY
            small = resize_short(data, side, quality, max_pixels=self.max_pixels)
            if small is None:
                width, height = image.open_image(data, self.max_pixels).size
                return bool(min(width, height) > side)
        except DecodeError as error:
            raise Rejected(f"cannot be resized: {error}") from None
        sample["image"] = small
        return False

    def _make_raw(self, sample: Sample, shape: tuple[int, int]) -> bool:
        """Make pixels of a sample's image; whether it was enlarged. Raises Rejected."""
        data, enlarged = sample["image"], False
        if data is None:
            return False
        try:
            if self.resize is None:
                array = image.pixels(data, max_pixels=self.max_pixels)
            else:
                array, enlarged = square(data, self.resize, max_pixels=self.max_pixels)
        except DecodeError as error:
            raise Rejected(f"cannot be decoded: {error}") from None
        height, width = array.shape[:2]
        if (height, width) != shape:
            raise Rejected(
                f"it is {width} x {height}, and the first image {shape[1]} x {shape[0]}: {ONE_SIZE}"
            )
        sample["image"] = image.ppm(array)
        return enlarged

    def _make_tiles(self, sample: Sample) -> Tiles:
        """Rewrite a sample's image, if that can be done."""
        data = sample.get("image")
        if data is None:
            return Tiles()
        try:
            made = jpeg_rewrite.rewrite(data, max_pixels=self.max_pixels or jpeg_rewrite.MAX_PIXELS)
        except StorageError as error:  # some files make jpegtran crash
            raise StorageError(f"{printable(sample[KEY])}: {error}") from None
        if isinstance(made, jpeg_rewrite.Unfit):
            return Tiles(images=made.reason == jpeg_rewrite.ALREADY, others={made.reason: 1})
        sample["image"] = made
        return Tiles(images=1, rewritten=1, before=len(data), after=len(made))


@dataclass
class Tiles:
    """What became of images that were to be tiles."""

    images: int = 0  # that are tiles
    rewritten: int = 0
    before: int = 0  # bytes of the rewritten ones as files, and
    after: int = 0  # as tiles
    others: dict[str, int] = field(default_factory=dict)  # that were not rewritten, by reason

    def add(self, more: Tiles) -> None:
        self.images += more.images
        self.rewritten += more.rewritten
        self.before += more.before
        self.after += more.after
        for why, count in more.others.items():
            self.others[why] = self.others.get(why, 0) + count


@dataclass
class Recoded:
    """What was done to images: to one, or to those of a shard together."""

    full_size: int = 0  # that could not be resized, and are larger
    enlarged: int = 0
    tiles: Tiles = field(default_factory=Tiles)

    def add(self, more: Recoded) -> None:
        self.full_size += more.full_size
        self.enlarged += more.enlarged
        self.tiles.add(more.tiles)


def options(
    *,
    resize: int | None,
    quality: int | None,
    encode: str | None,
    jpeg_tiles: bool,
    keep_original: bool,
    max_pixels: int | None,
) -> dict[str, Any]:
    """What is asked for, as a dataset records it. Raises OptionError."""
    if encode is not None and encode != "raw":
        raise OptionError(f"encode is {printable(repr(encode))}; expected 'raw', or nothing")
    if resize is not None:
        resize = sizes.whole("resize", resize)
        if encode is not None:
            sizes.whole("resize", resize, 1, _MAX_SQUARE)
    shrinks = resize is not None and encode is None
    if quality is not None:
        quality = sizes.whole("quality", quality, 1, 100)
        if not shrinks:
            raise OptionError(
                f"quality is {quality}, but "
                + (
                    "no JPEG is written; leave it out"
                    if encode is not None
                    else "images are packed as they are: give --resize N, too, or leave it out"
                )
            )
    if keep_original and not jpeg_tiles:
        as_they_are = resize is None and encode is None
        raise OptionError(
            "--keep-original: goes with --jpeg-tiles, which is not asked for"
            + ("; without, files are packed as they are" if as_they_are else "")
        )
    if jpeg_tiles and encode is not None:
        raise OptionError(
            "--jpeg-tiles: --encode raw packs pixels, no JPEGs; leave one of them out"
        )
    if max_pixels is not None:
        max_pixels = sizes.whole("max_pixels", max_pixels, 1)
        if resize is None and encode is None and not jpeg_tiles:
            raise OptionError(
                f"max_pixels is {max_pixels}, but images are packed as they are, whatever their "
                "size: it goes with --resize, --encode raw and --jpeg-tiles; leave it out, and "
                "give it to whoever reads the dataset"
            )
    asked = {
        "encode": encode,
        "jpeg_tiles": jpeg_tiles,
        "keep_original": keep_original,
        "max_pixels": max_pixels,
    }
    return {"resize": resize, "quality": (quality or QUALITY) if shrinks else None} | {
        name: wanted for name, wanted in asked.items() if wanted
    }


def check_tools(wanted: Mapping[str, Any]) -> None:
    """Raise DependencyError now, not in the middle."""
    if wanted["resize"] is not None or "encode" in wanted:
        image.engine()
    if "jpeg_tiles" in wanted:
        jpeg_rewrite.rewriter()


def check_fields(listings: Mapping[str, Listing], wanted: Mapping[str, Any]) -> None:
    """Raise OptionError where no image would be resized, made pixels, or tiles."""
    does = {
        "encode": "--encode raw: makes pixels of",
        "resize": "--resize: shrinks",
        "jpeg_tiles": "--jpeg-tiles: rewrites",
    }
    asked = [text for name, text in does.items() if wanted.get(name) is not None]
    if not asked:
        return
    kinds = {name: kind for one in listings.values() for name, kind in one.fields}
    others = [name for name, kind in kinds.items() if kind == "image" and name != "image"]
    if wanted["source"] == "trees" and wanted.get("resize") is not None and others:
        raise OptionError(
            f"--resize: shrinks the field `image` alone, which {printable(others[0])} would then "
            "no longer fit. Pack them as they are; RandomResizedCrop crops and scales both"
        )
    # Bytes would not be decoded when they are read, so it is of no use to make pixels of them.
    if kinds.get("image") not in (("image",) if "encode" in wanted else ("image", "bytes")):
        there = ", ".join(printable(name) for name, kind in kinds.items() if kind == "image")
        raise OptionError(
            f"{asked[0]} the field `image`, and none called so holds images. Those that do: "
            f"{there or 'none'}"
            + ("; --fields image=NAME calls one so" if there and "image" not in kinds else "")
        )


def size(listing: Listing, wanted: Mapping[str, Any]) -> tuple[int, int]:
    """Height and width of all raw pixels: as asked, or of the first image that can be decoded.

    Parts of a job array all look at that one, so that they make one plan. Raises SourceError.
    """
    if wanted["resize"] is not None:
        return wanted["resize"], wanted["resize"]
    problems: list[Problem] = []
    with listing.source.open() as read:
        for at, key in enumerate(listing.keys):
            try:
                data = read(at if listing.places is None else int(listing.places[at]))["image"]
                if data is not None:
                    pixels = image.pixels(data, max_pixels=wanted.get("max_pixels"))
                    height, width = pixels.shape[:2]
                    return height, width
            except Rejected as error:
                problems.append((key, str(error)))
            except DecodeError as error:
                problems.append((key, f"cannot be decoded: {error}"))
    raise SourceError(
        "encode 'raw': no image here can be decoded, so their size is not known"
        + (f":\n{listed(problems)}" if problems else "")
    )


def with_originals(listing: Listing, asked: SourceRequest, split: str, keep: bool) -> Listing:
    """With the field of the files' own bytes, where it is asked for, or the source has it.

    Raises OptionError where another field has its name.
    """
    there = ORIGINAL in dict(listing.fields)
    if there and asked.kind == "dataset" and not {"image", ORIGINAL} & asked.fields.keys():
        folder = manifest.datasets(os.fsdecode(asked.path))[split]
        if manifest.load(locate(folder)).options.get("keep_original"):
            options = {**listing.options, "keep_original": True}
            return dataclasses.replace(listing, options=options)
    if not keep:
        return listing
    if there:
        raise OptionError(
            f"--keep-original: a field of the source is called `{ORIGINAL}` already; --fields "
            f"NAME={ORIGINAL} calls it something else"
        )
    return dataclasses.replace(listing, fields=(*listing.fields, (ORIGINAL, "bytes")))
