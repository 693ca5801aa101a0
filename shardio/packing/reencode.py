"""Images written anew for packing: smaller, as pixels, or as tiles, with or without their files.

    the source's bytes --resize--> fewer pixels --jpeg_tiles--> the same pixels in other bytes
    the source's bytes --pixels--> a PPM file, with `resize` of the central square
    the source's bytes --keep_original--> the field `original`, where `image` has others now

    the source's bytes --check_images--> the same, if they can be decoded

Without any of these options, images are packed as they are, and nothing here looks at them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import DecodeError, OptionError, SourceError, StorageError, printable
from ..formats import manifest
from ..formats.sample import Sample, Schema
from ..images import decode, jpeg_rewrite, jpeg_tiles
from ..images.resize import resize_short, square
from ..names import KEY
from .options import QUALITY, PackOptions
from .sources.base import Listing, Problem, Rejected, SourceRequest, listed

ORIGINAL = "original"  # with keep_original, the field of a file's own bytes; None: `image` has them
ONE_SIZE = "raw pixels have one size"  # so ends the reason where an image has another


@dataclass
class Reencoded:
    """Counts of what was done to images: to one, or to those of a shard, or dataset, together."""

    full_size: int = 0  # that could not be resized, and are larger
    enlarged: int = 0
    tiles: int | None = 0  # that are JPEG tiles; None: not asked for
    tiled: int = 0  # of these, rewritten,
    tiled_from: int = 0  # from so many bytes
    tiled_to: int = 0  # to so many
    untiled: Counter[str] = field(default_factory=Counter)  # that were not rewritten, by reason

    def add(self, more: Reencoded) -> None:
        """Count what was done to other images, too."""
        for name, count in vars(more).items():
            if count:
                setattr(self, name, getattr(self, name) + count)


Checked = tuple[tuple[str, bool], ...]  # names of fields, and whether to be decoded to RGB
_NOTHING = Reencoded()  # most records: making one for each costs 0.7 us


def reencode(sample: Sample, options: PackOptions, checked: Checked = ()) -> Reencoded:
    """Change the image of a sample in place. Raises Rejected where it cannot be packed so.

    checked: the fields whose images are decoded first, unless they are written anew by decoding
    """
    rewrites = bool(options.pixels or options.resize or options.jpeg_tiles)
    if not (rewrites or options.keep_original or checked):
        return _NOTHING
    done = Reencoded()
    own = sample.get("image")
    if own is not None:
        if options.pixels is not None:
            done.enlarged += _make_raw(sample, own, options)
        elif options.resize is not None:
            done.full_size += _resize(sample, own, options)
        if options.jpeg_tiles:
            _make_tiles(sample, sample["image"], options, done)
    if options.keep_original and sample.get(ORIGINAL) is None:
        sample[ORIGINAL] = None if sample.get("image") is own else own
    for name, is_main in checked:
        if (data := sample.get(name)) is not None and (name != "image" or data is own):
            try:
                decode.check(data, rgb=is_main, max_pixels=options.max_pixels)
            except DecodeError as error:
                raise Rejected(f"{name} cannot be decoded: {error}") from None
    return done


def checked_fields(schema: Schema, options: PackOptions) -> Checked:
    """Return the fields of images that are to be decoded while they are packed."""
    main = schema.main_image
    return tuple((name, name == main) for name in schema.images) if options.check_images else ()


def as_stored(sample: Sample, options: PackOptions, checked: Checked = ()) -> Reencoded:
    """Count what `reencode` did to the image of a sample when it was packed, as far as it shows."""
    image = sample.get("image") if options.jpeg_tiles else None
    return _NOTHING if image is None or jpeg_tiles.tiles(image) is None else Reencoded(tiles=1)


def _resize(sample: Sample, data: bytes, options: PackOptions) -> bool:
    """Shrink a sample's image; return True where it stays at full size, though larger."""
    assert options.resize is not None
    try:
        small = resize_short(
            data, options.resize, options.quality or QUALITY, max_pixels=options.max_pixels
        )
        if small is None:
            return bool(min(decode.open_image(data, options.max_pixels).size) > options.resize)
    except DecodeError as error:
        raise Rejected(f"cannot be resized: {error}") from None
    sample["image"] = small
    return False


def _make_raw(sample: Sample, data: bytes, options: PackOptions) -> bool:
    """Make pixels of a sample's image; return whether it was enlarged. Raises Rejected."""
    assert options.pixels is not None
    enlarged = False
    try:
        if options.resize is None:
            array = decode.pixels(data, max_pixels=options.max_pixels)
        else:
            array, enlarged = square(data, options.resize, max_pixels=options.max_pixels)
    except DecodeError as error:
        raise Rejected(f"cannot be decoded: {error}") from None
    (height, width), shape = array.shape[:2], options.pixels
    if [height, width] != shape:
        raise Rejected(
            f"it is {width} x {height}, and the first image {shape[1]} x {shape[0]}: {ONE_SIZE}"
        )
    sample["image"] = decode.ppm(array)
    return enlarged


def _make_tiles(sample: Sample, data: bytes, options: PackOptions, done: Reencoded) -> None:
    """Rewrite a sample's image as JPEG tiles, if that can be done."""
    most = options.max_pixels or jpeg_rewrite.MAX_PIXELS
    try:
        tiles = jpeg_rewrite.rewrite(data, max_pixels=most)
    except StorageError as error:  # some files make jpegtran crash
        raise StorageError(f"{printable(sample[KEY])}: {error}") from None
    if isinstance(tiles, jpeg_rewrite.Unfit):
        done.tiles = int(tiles.reason == jpeg_rewrite.ALREADY)
        done.untiled[tiles.reason] = 1
        return
    sample["image"] = tiles
    done.tiles = done.tiled = 1
    done.tiled_from, done.tiled_to = len(data), len(tiles)


def check_tools(options: PackOptions) -> None:
    """Raise DependencyError now, not in the middle."""
    if options.resize is not None or options.encode is not None or options.check_images:
        decode.pil_info()
    if options.jpeg_tiles:
        jpeg_rewrite.rewriter()


def check_fields(listings: Mapping[str, Listing], options: PackOptions) -> None:
    """Raise OptionError where no image would be resized, made pixels, or tiles."""
    does = {
        "--encode raw: makes pixels of": options.encode,
        "--resize: shrinks": options.resize,
        "--jpeg-tiles: rewrites": options.jpeg_tiles,
    }
    asked = [text for text, wanted in does.items() if wanted]
    kinds = {name: kind for one in listings.values() for name, kind in one.fields}
    if options.check_images and "image" not in kinds.values():
        raise OptionError("--check-images: decodes images, and no field here holds any")
    if not asked:
        return
    others = [name for name, kind in kinds.items() if kind == "image" and name != "image"]
    if options.source == "trees" and options.resize is not None and others:
        raise OptionError(
            f"--resize: shrinks the field `image` alone, which {printable(others[0])} would then "
            "no longer fit. Pack them as they are; RandomResizedCrop crops and scales both"
        )
    # Bytes would not be decoded when they are read, so it is of no use to make pixels of them.
    if kinds.get("image") not in (("image",) if options.encode else ("image", "bytes")):
        there = ", ".join(printable(name) for name, kind in kinds.items() if kind == "image")
        raise OptionError(
            f"{asked[0]} the field `image`, and none called so holds images. Those that do: "
            f"{there or 'none'}"
            + ("; --fields image=NAME calls one so" if there and "image" not in kinds else "")
        )


def size_of_pixels(listing: Listing, options: PackOptions) -> list[int]:
    """Return height and width of all raw pixels: as asked, or of the first image that is decoded.

    Parts of a job array all look at that one, so that they make one plan. Raises SourceError.
    """
    if options.resize is not None:
        return [options.resize, options.resize]
    problems: list[Problem] = []
    with listing.source.open() as read:
        for at, key in enumerate(listing.keys):
            try:
                data = read(at if listing.places is None else int(listing.places[at]))["image"]
                if data is not None:
                    return [*decode.pixels(data, max_pixels=options.max_pixels).shape[:2]]
            except Rejected as error:
                problems.append((key, str(error)))
            except DecodeError as error:
                problems.append((key, f"cannot be decoded: {error}"))
    raise SourceError(
        "encode 'raw': no image here can be decoded, so their size is not known"
        + (f":\n{listed(problems)}" if problems else "")
    )


def with_originals(listing: Listing, request: SourceRequest, split: str, keep: bool) -> Listing:
    """Add the field of the files' own bytes, where it is asked for, or the source has it.

    Raises OptionError where another field has its name.
    """
    there = ORIGINAL in dict(listing.fields)
    if there and request.kind == "dataset" and not {"image", ORIGINAL} & request.fields.keys():
        index = manifest.datasets_in(request.location)[split]
        if manifest.load(index).options.get("keep_original"):
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
