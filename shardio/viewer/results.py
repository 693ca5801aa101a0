"""What a view is asked, and what it answers: frozen dataclasses of plain values.

All text in answers can be shown and sent: control and undecodable bytes of names from disk are
escaped (`errors.printable`), so no lone surrogate is left. It is no HTML: escape it there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True)
class Query:
    """Say which records are asked for, and in which order. Hashable.

    order           "storage": by number. "training": as ShardDataset hands them out, with the
                    options below; the records that it trains on are those that `where` and `label`
                    choose, as ShardDataset(where=) does
    epoch, rank, world_size, batch_size, seed, shuffle, shuffle_buffer, tail, spans, unit, nodes
                    of ShardDataset; None: its default. shuffle_buffer: records, "512MiB", or "all"
    step            the page begins at this step of the rank; None: at `start`
    where           conditions as `--where` takes them: ("width>=256", "split=test")
    label           only records of the class of this name, or with this label
    search          only records whose keys contain this text, whatever the case of ASCII letters
    sort            by this column of the index, or by "bytes"; in training order within each step
    descending      with sort: the greatest first; records without a value are always last
    """

    order: Literal["storage", "training"] = "storage"
    epoch: int = 0
    rank: int = 0
    world_size: int = 1
    step: int | None = None
    batch_size: int = 256
    seed: int = 0
    shuffle: bool = True
    shuffle_buffer: int | str | None = None
    tail: str | None = None
    spans: int | None = None
    unit: int | None = None
    nodes: int | None = None
    where: tuple[str, ...] = ()
    label: str | int | None = None
    search: str = ""
    sort: str | None = None
    descending: bool = False


@dataclass(frozen=True)
class FieldInfo:
    """A field of the dataset."""

    name: str
    kind: str  # key, image, bytes, array, int, float, bool, str, json
    column: bool  # the index holds it: it filters and sorts


@dataclass(frozen=True)
class Summary:
    """What the manifest says. Costs no reading beyond it."""

    name: str  # last part of the URL
    url: str  # without secrets
    dataset_id: str
    format: str
    version: int
    library: str  # version of shardio that packed it
    records: int
    bytes: int
    shards: int
    fields: tuple[FieldInfo, ...]
    classes: tuple[str, ...] | None  # names by label; None: no names
    split: str | None
    splits: tuple[str, ...]  # of the folder above; empty: none
    images: tuple[str, ...]  # fields that hold images
    main_image: str | None  # the one that is shown first
    packed: tuple[tuple[str, str], ...]  # options of packing, name and value


@dataclass(frozen=True)
class Card:
    """One record in a page."""

    number: int  # of the record, in storage order
    position: int  # in the asked order
    key: str
    label: int | None
    class_name: str | None
    shard: str  # file name
    shard_number: int
    bytes: int  # that reading it costs
    width: int | None = None  # where a column has it
    height: int | None = None
    step: int | None = None  # in training order
    row: int | None = None  # in the batch of that step
    valid: bool = True  # False: a repeat that pads the rank's last batches
    value: Any = None  # in the column of `sort`
    damaged: str | None = None  # why its key or record cannot be read


@dataclass(frozen=True)
class Page:
    """Some cards of an answer, from position `start` on."""

    cards: tuple[Card, ...]
    start: int
    total: int | None  # positions that there are; None: a search, which reads keys page by page
    next: int | None  # the position at which the next page begins; None: there is no more
    steps: int | None = None  # in training order: steps of the rank
    searched: int = 0  # keys that a search read for this page
    note: str = ""  # to be shown: what a search covered, why there is nothing
    # Part of the index that is read: there are no cards yet, ask again.
    pending: float | None = None


@dataclass(frozen=True)
class Batch:
    """The records of one batch of a rank, in its order, without repeats."""

    step: int
    numbers: tuple[int, ...]
    labels: tuple[int | None, ...] | None  # None: not known yet, or there are none
    shards: int  # that they lie in


@dataclass(frozen=True)
class Drawn:
    """Batches that follow each other, known without reading a record."""

    batches: tuple[Batch, ...]
    pending: float | None = None  # part of the index that is read: labels come later, ask again


@dataclass(frozen=True)
class Bins:
    """A histogram of numbers: counts[i] values in [edges[i], edges[i + 1])."""

    name: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class ClassCount:
    """How many records have one label."""

    label: int | None  # None: no label
    name: str | None
    count: int


@dataclass(frozen=True)
class Histograms:
    """Distributions of the chosen records, from the index alone."""

    records: int
    classes: tuple[ClassCount, ...]  # by label; empty: no labels
    bins: tuple[Bins, ...]  # "bytes", then the columns of the index
    note: str = ""  # to be shown: whose index could not be read
    # Part of the index that is read: nothing is counted yet, ask again.
    pending: float | None = None


@dataclass(frozen=True)
class FieldValue:
    """One field of a record, to be shown."""

    name: str
    kind: str
    show: str  # a number, a text, JSON; "JPEG, 500 x 375", "(3, 4) of float32"; long ones are cut
    bytes: int | None  # of its blob or text
    image: bool = False  # `image` shows it
    mask: bool = False  # class numbers: `image(..., overlay=True)` shows it above the main image


@dataclass(frozen=True)
class Box:
    """A box in pixels of the upright main image."""

    x: float
    y: float
    width: float
    height: float
    label: str = ""


@dataclass(frozen=True)
class Tiles:
    """The grid of tiles of a JPEG whose parts decode alone, in pixels of the image as stored."""

    width: int  # of the image
    height: int
    columns: int
    rows: int
    tile_width: int  # of a tile; those at the right and at the bottom may show less
    tile_height: int


@dataclass(frozen=True)
class Checksum:
    """The checksum of a record."""

    stored: str | None  # hexadecimal; None: the format has none that can be shown
    found: str | None
    ok: bool
    covers: str  # "record", "stored bytes"


@dataclass(frozen=True)
class Record:
    """All that a record's page shows. A damaged record has `damaged`, and what could be read."""

    number: int
    key: str
    label: int | None
    class_name: str | None
    shard: str
    shard_number: int
    shard_url: str
    number_in_shard: int
    start: int  # first byte in the file of the shard
    bytes: int  # that reading it costs, from there on where it is in one piece
    checksum: Checksum | None
    fields: tuple[FieldValue, ...]
    width: int | None = None  # of the main image, upright
    height: int | None = None
    tiles: Tiles | None = None
    boxes: tuple[Box, ...] = ()
    damaged: str | None = None
    image_format: str | None = None  # of the main image: "JPEG, 500 x 375, RGB"


@dataclass(frozen=True)
class Crop:
    """The part of the main image that training takes in one epoch: pixels of the upright image."""

    epoch: int
    x: int
    y: int
    width: int
    height: int
    flip: bool


@dataclass(frozen=True)
class Damaged:
    """A record that cannot be read or shown."""

    number: int
    key: str | None
    shard: str
    message: str


@dataclass(frozen=True)
class Rejected:
    """A file that packing left out."""

    path: str
    reason: str


@dataclass(frozen=True)
class Checked:
    """What a part of a check found. Go on at `next` until it is None."""

    start: int
    next: int | None
    total: int
    damaged: tuple[Damaged, ...]


class Picture(NamedTuple):
    """An image file for a browser."""

    data: bytes
    media_type: str
