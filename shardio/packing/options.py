"""The options of packing: those that users give in groups, and those that a dataset records.

`SourceOptions`, `ImageOptions` and `PlanOptions` check what they are given where they are made.
`PackOptions` are all options of one dataset; its `record` is what plan and manifest hold, and what
the dataset's id is made of, so that no byte of it may change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import OptionError, printable
from ..formats import check_packed
from ..formats.base import MAX_RECORDS
from ..order.subset import describe_conditions
from ..storage.location import path_text
from ..storage.options import Storage
from ..units import (
    check_fields,
    check_flags,
    check_given,
    check_group,
    check_int,
    check_size,
    grouped_in,
    refuse_unknown,
)
from .parts import PartOptions

PathLike = str | bytes | os.PathLike[Any]

QUALITY = 90  # of re-encoded JPEGs; FFCV's and ImageNet recipes' choice
_MAX_SQUARE = 1 << 15  # pixels on a side: 3 GiB, near to what a record may hold
_NUMBER = 1 << 62


def check_label(label: str | None) -> None:
    """Raise OptionError for what is no regular expression with one group."""
    if label is None:
        return
    if not isinstance(label, str):
        raise OptionError(f"label is {printable(repr(label))}: expected a regular expression")
    try:
        groups = re.compile(label).groups
    except re.error as error:
        raise OptionError(
            f"label is {printable(repr(label))}: no regular expression: {error}"
        ) from None
    if groups != 1:
        raise OptionError(
            f"label is {printable(repr(label))}: it has {groups} groups in parentheses; expected "
            "one, which finds the class in the path of an image. Others are written (?:...)"
        )


def read_layout(layout: str) -> dict[str, tuple[int, ...]]:
    """Return the fields of a record of bytes, in order, and their shapes. Raises OptionError.

    "label=1,image=3x32x32": a byte, then three planes of 32 x 32
    """
    parts = layout.split(",") if isinstance(layout, str) else []
    found = [re.fullmatch(r"\s*([^=\s]+)=(\d{1,9}(?:x\d{1,9}){0,3})\s*", part) for part in parts]
    fields = {one[1]: tuple(map(int, one[2].split("x"))) for one in found if one is not None}
    if not found or len(fields) < len(found) or 0 in sum(fields.values(), ()):
        raise OptionError(
            f"layout is {printable(repr(layout))}: expected the fields of a record, in order, each "
            "with its bytes, such as label=1,image=3x32x32"
        )
    return fields


@dataclass(frozen=True)
class Joins:
    """What files that lie beside the records say of them."""

    tables: tuple[str, ...] = ()  # FILE or FILE:COLUMNS
    split_files: Mapping[str, str] = field(default_factory=dict)  # lists of files, by split
    split_by: str | None = None  # the column that says to which split a record belongs
    splits: Mapping[str, str] = field(default_factory=dict)  # its values, by the names of splits
    boxes: str | None = None  # the folder of files of boxes
    first_label: int = 0  # the smallest number of a class in the source; packed, it is 0


@refuse_unknown
@dataclass(frozen=True)
class SourceOptions:
    """Choose what of a source is packed, and under which names.

    kind     the kind of the source, if `pack` cannot detect it: "imagefolder", "files", "trees",
             "listing", "coco", "arrays", "dataset", or a format that `index` reads
    root     the folder, or URL, that the paths of a listing are relative to, or that holds the
             data of an index
    fields   names of fields here and in the source: {"image": "jpg"}; for folders side by side
             {"image": "images/", "mask": "masks/"}, and for names that end differently
             {"image": "*.jpg", "mask": "masks/*_mask.png"}
    where    select records by conditions on their small fields: {"label": ["cat"]}
    classes  another dataset: number the classes as it does
    label    a regular expression with one group: the class of an image is what the group finds in
             its path, such as "^(cat|dog)[.]" for cat.12.jpg; folders are then no classes
    tables   files of labels, CSV or other text, for the images of a folder: "labels.csv", or
             "labels.txt:image,label" with names of the columns. Rows name images by path, name or
             stem; or values of a column of another table. Each column becomes a field
    split_files  the splits, and files that list the images of each: {"train": "train.txt"}
    split_by     the column of a table that says to which split a record belongs; or with names:
                 "is_train:train=1,test=0"
    boxes    a folder of Pascal VOC's XML, or of YOLO's texts, one for each image: they become the
             fields `annotations`, `width` and `height`, as of COCO
    first_label  the least number of a class in tables, if that is not 0: it is subtracted
    layout   the fields of one record in files of records of one size, and the bytes of each:
             "label=1,image=3x32x32" for CIFAR-10's binary version
    ignore   leave out hidden files, and folders of NAS and systems: @eaDir, #recycle, @Recycle,
             @Recently-Snapshot, $RECYCLE.BIN, System Volume Information, lost+found, __MACOSX,
             __pycache__; default: True
    storage  a shardio.Storage: how an object store is reached

    Raises OptionError.
    """

    kind: str | None = None
    root: PathLike | None = None
    fields: Mapping[str, str] | None = None
    where: Mapping[str, Any] | None = None
    classes: PathLike | None = None
    label: str | None = None
    tables: Sequence[PathLike] = ()
    split_files: Mapping[str, PathLike] | None = None
    split_by: str | None = None
    boxes: PathLike | None = None
    first_label: int = 0
    layout: str | None = None
    ignore: bool = True
    storage: Storage | None = None

    def __post_init__(self) -> None:
        check_flags(self, "ignore")
        check_group("storage", self.storage, Storage)
        if not isinstance(self.kind, (str, type(None))):
            raise OptionError(f"kind is {printable(repr(self.kind))}: expected a kind's name")
        check_label(self.label)
        if self.layout is not None:
            read_layout(self.layout)
        names = {} if self.fields is None else self.fields
        if not (isinstance(names, Mapping) and all(isinstance(one, str) for one in names.values())):
            raise OptionError(
                f"fields is {printable(repr(self.fields))}: expected our names and the source's, "
                "such as {'image': 'jpg'}"
            )
        self.joins()

    def joins(self) -> Joins:
        """Return what is said of the records by files beside them. Raises OptionError."""
        alone = isinstance(self.tables, str | os.PathLike)
        tables: Any = [self.tables] if alone else self.tables
        listed = isinstance(tables, Sequence) and not isinstance(tables, bytes)
        if not listed or not all(isinstance(one, str | os.PathLike) and one for one in tables):
            raise OptionError(
                f"tables is {printable(repr(self.tables))}: expected files, such as "
                "['labels.csv', 'names.txt:label,name']"
            )
        files = self.split_files or {}
        if not isinstance(files, Mapping) or not all(isinstance(name, str) for name in files):
            raise OptionError(
                f"split_files is {printable(repr(files))}: expected splits and files, such as "
                "{'train': 'train.txt', 'val': 'val.txt'}"
            )
        text = self.split_by if isinstance(self.split_by, str) else ""
        column, _, named = text.partition(":")
        pairs = [one.partition("=") for one in named.split(",") if one]
        if self.split_by is not None and (not column or not all(v for _, _, v in pairs)):
            raise OptionError(
                f"split_by is {printable(repr(self.split_by))}: expected COLUMN, or "
                "COLUMN:NAME=VALUE,NAME=VALUE"
            )
        if files and column:
            raise OptionError("--split-files and --split-by both say what the splits are: give one")
        return Joins(
            tuple(map(path_text, tables)),
            {name: path_text(path) for name, path in files.items()},
            column or None,
            {name: value for name, _, value in pairs},
            None if self.boxes is None else path_text(self.boxes),
            check_int("first_label", self.first_label, 0),
        )


@refuse_unknown
@dataclass(frozen=True)
class ImageOptions:
    """Choose how images are written into shards; by default their bytes do not change.

    encode         "raw": store images as pixels, which need no decoding; all must have one size,
                   or with `resize` the central square of that side is taken of each
    quality        of JPEGs that `resize` writes, 1 to 100; default: 90
    jpeg_tiles     rewrite JPEGs without loss, so that a crop decodes only its part of them; other
                   images do not change
    keep_original  with `jpeg_tiles`: also store the bytes of each file, in the field `original`,
                   so that `unpack` restores them
    check_images   decode every image, as `verify(decode=True)` does: one that cannot be decoded,
                   such as a truncated one, cannot be packed
    max_pixels     the largest image to decode for any of these, instead of the default limit

    Raises OptionError.
    """

    encode: str | None = None
    quality: int | None = None
    jpeg_tiles: bool = False
    keep_original: bool = False
    check_images: bool = False
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        if self.encode is not None and self.encode != "raw":
            raise OptionError(
                f"encode is {printable(repr(self.encode))}; expected 'raw', or nothing"
            )
        check_flags(self, "jpeg_tiles", "keep_original", "check_images")
        check_given(self, quality=(1, 100), max_pixels=(1,))
        if self.jpeg_tiles and self.encode is not None:
            raise OptionError(
                "--jpeg-tiles: --encode raw packs pixels, no JPEGs; leave one of them out"
            )

    def check_with(self, resize: int | None) -> None:
        """Raise OptionError for what goes only with `resize`, or with another of these."""
        as_they_are = resize is None and self.encode is None
        if self.quality is not None and (resize is None or self.encode is not None):
            raise OptionError(
                f"quality is {self.quality}, but "
                + (
                    "images are packed as they are: give --resize N, too, or leave it out"
                    if as_they_are
                    else "no JPEG is written; leave it out"
                )
            )
        if self.keep_original and not self.jpeg_tiles:
            raise OptionError(
                "--keep-original: goes with --jpeg-tiles, which is not asked for"
                + ("; without, files are packed as they are" if as_they_are else "")
            )
        decodes = not as_they_are or self.jpeg_tiles or self.check_images
        if self.max_pixels is not None and not decodes:
            raise OptionError(
                f"max_pixels is {self.max_pixels}, but images are packed as they are, whatever "
                "their size: it goes with --resize, --encode raw, --jpeg-tiles and --check-images; "
                "leave it out, and give it to whoever reads the dataset"
            )


@refuse_unknown
@dataclass(frozen=True)
class PlanOptions(PartOptions):
    """Choose which record goes to which shard, and which of the shards one call builds.

    shuffle, seed  pack in an order shuffled by `seed`, so that neighbours on disk are unrelated;
                   default: True, except for sources that are slow in any order but their own
    max_records    records a shard, at most
    part           (i, n) or "i/n", i from 1 to n: build only this part; `commit(out)` when all are
                   built. "auto": the part that SLURM, torchrun or Kubernetes gives this process
    parts          the number of parts, if part is "auto": Kubernetes does not say it
    stagger_s      wait first, for a random time up to so many seconds, so that many parts do not
                   list the source all at once
    restart        drop an unfinished packing in OUT, of another plan

    Raises OptionError.
    """

    shuffle: bool | None = None
    seed: int = 0
    max_records: int | None = None
    restart: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, seed=(0, (1 << 64) - 1))
        check_given(self, max_records=(1, MAX_RECORDS))
        check_flags(self, "restart", *(() if self.shuffle is None else ("shuffle",)))


@dataclass(frozen=True)
class PackOptions:
    """All options that one dataset is packed by.

    shuffle and shard_size None: nobody asked, and the source decides.
    """

    source: str = "imagefolder"  # its kind
    format: str = "record"
    shuffle: bool | None = None
    seed: int | None = 0  # None: not shuffled
    shard_size: int | None = None
    max_records: int | None = None
    resize: int | None = None
    quality: int | None = None  # None: no JPEG is written
    encode: str | None = None
    jpeg_tiles: bool = False
    keep_original: bool = False
    check_images: bool = False
    max_pixels: int | None = None
    where: Mapping[str, Any] | None = None
    label: str | None = None  # finds the class in a path
    layout: str | None = None  # of records in a file
    split: str = ""
    splits: list[str] = field(default_factory=list)  # all that are packed with it
    pixels: list[int] | None = None  # height and width of raw pixels
    absent: list[int] = field(default_factory=list)  # numbers of classes that have no folder
    of_source: Mapping[str, Any] = field(default_factory=dict)  # what only its source knows

    @classmethod
    def of(cls, recorded: Mapping[str, Any]) -> PackOptions:
        """Return what a plan or a manifest records, of whatever origin; nothing is checked."""
        known = {name: value for name, value in recorded.items() if name in _KNOWN}
        rest = {name: value for name, value in recorded.items() if name not in _KNOWN}
        return cls(**known, of_source=rest)

    def record(self) -> dict[str, Any]:
        """Return what a plan and a manifest record: plain values, without most that are not set."""
        found = {name: getattr(self, name) for name in _KNOWN}
        always = {name: found[name] for name in _ALWAYS}
        given = {name: value for name, value in found.items() if value != _DEFAULTS[name]}
        return always | given | dict(self.of_source)


class PackCall:
    """Hold the options of one call of `pack` or `plan`. Raises OptionError."""

    def __init__(
        self,
        format: str,
        shard_size: int | str | None,
        resize: int | None,
        read: SourceOptions | None,
        images: ImageOptions | None,
        plan: PlanOptions | None,
    ) -> None:
        self.format, self.shard_size, self.resize = check_packed(format), shard_size, resize
        self.read = check_group("read", read, SourceOptions)
        self.images = check_group("images", images, ImageOptions)
        self.plan = check_group("plan", plan, PlanOptions)
        self.storage = check_group("storage", self.read.storage, Storage)

    def options(self, kind: str | None) -> PackOptions:
        """Return what is asked for, for a kind of source. Raises OptionError."""
        resize, images, plan = self.resize, self.images, self.plan
        if resize is not None:
            most = _NUMBER - 1 if images.encode is None else _MAX_SQUARE
            resize = check_int("resize", resize, 1, most)
        if kind == "arrays":  # there are no files to be kept
            images = replace(images, encode="raw")
        images.check_with(resize)
        shrinks = resize is not None and images.encode is None
        size, where = self.shard_size, self.read.where
        given = {
            **{name: value for name, value in vars(plan).items() if name in _KNOWN},
            **vars(images),
            "seed": None if plan.shuffle is False else plan.seed,
            "shard_size": None if size is None else check_size("shard_size", size),
            "resize": resize,
            "quality": (images.quality or QUALITY) if shrinks else None,
            "where": describe_conditions(where) if isinstance(where, Mapping) else None,
            "label": self.read.label,
            "layout": self.read.layout,
        }
        return PackOptions(kind or PackOptions.source, self.format, **given)


_DEFAULTS = vars(PackOptions())
_KNOWN = [name for name in _DEFAULTS if name != "of_source"]
_ALWAYS = ("source", "shuffle", "seed", "shard_size", "max_records", "resize", "quality")

GROUPS = {"read": SourceOptions, "images": ImageOptions, "plan": PlanOptions}  # of `pack`


# For those who give an option of a group to `pack` by itself.
ADVICE = {
    "from_": "give read=shardio.SourceOptions(kind=...)",
    **dict.fromkeys(("workers", "num_workers", "processes"), "give jobs="),
}
for _name, _kind in GROUPS.items():
    ADVICE |= grouped_in(_name, _kind)
