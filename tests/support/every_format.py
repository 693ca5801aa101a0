"""A dataset of each format, with the records and the order that it must have.

A format is one row of FORMATS.
"""

import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import shardio
from shardio import ShardDataset, Writer
from shardio.dataset import sequence as sequences
from shardio.names import KEY, key_text
from shardio.packing.index import index

from .litdata_writer import item, save
from .naive_order import naive_epoch, side_by_side
from .reading import flat
from .small_datasets import CLASSES, jpeg, of_order

COUNTS = (90, 90, 61)  # of the shards; the first two have files of one size

N = sum(COUNTS)
PARTS = [range(0, 90), range(90, 180), range(180, N)]

Sample = dict[str, Any]


@contextmanager
def of_size(counts: tuple[int, ...], image: Callable[[int], bytes]) -> Iterator[None]:
    """Have datasets that are made meanwhile have these records in their shards."""
    starts = [0, *accumulate(counts)]
    parts = [range(start, stop) for start, stop in pairwise(starts)]
    given = {"COUNTS": counts, "N": starts[-1], "PARTS": parts, "image": image}
    before = {name: globals()[name] for name in given}
    globals().update(given)
    folder_packed.cache_clear()
    try:
        yield
    finally:
        globals().update(before)
        folder_packed.cache_clear()


def image(number: int) -> bytes:
    """A JPEG; records 90 apart have equally many bytes.

    Two of a shard are some pages long, its last: liblmdb puts such values behind their neighbours.
    """
    at = number % COUNTS[0]
    return jpeg(number).ljust(800 + 11 * at if at < 88 else 20_000, b"\0")


def packed(number: int) -> Sample:
    """What the record of this number is in our own formats."""
    return {
        KEY: b"k/%06d.jpg" % number,
        "image": image(number),
        "label": number % 3,
        "caption": f"n{number:04d}",
    }


def keyed(key: bytes, **more: Callable[[int], Any]) -> Callable[[int], Sample]:
    """What it is in a format with keys of its own, and with these fields besides."""

    def sample(number: int) -> Sample:
        part, at = divmod(number, COUNTS[0])
        named = key % {b"part": part, b"at": at, b"number": number}
        own = {name: value(number) for name, value in more.items()}
        return {KEY: named, "image": image(number), "label": number % 3} | own

    return sample


def pack(folder: Path, numbers: range | None = None, format: str = "record") -> None:
    with Writer(folder, format=format, classes=CLASSES, max_records=COUNTS[0]) as writer:
        for number in range(N) if numbers is None else numbers:
            writer.write(packed(number))


def pack_lmdb(folder: Path) -> None:
    pack(folder, format="lmdb")


def exported(format: str, *fields: str, **named: str) -> Callable[[Path], None]:
    """By `shardio export`, a shard at a time."""

    def make(folder: Path) -> None:
        for part, numbers in enumerate(PARTS):
            own, there = folder / "own", folder / f"part-{part}"
            pack(own, numbers)
            shardio.export(own, there, format=format, fields=dict.fromkeys(fields) | named)
            shutil.rmtree(own)

    return make


def compressed_mds(folder: Path) -> None:
    """As mosaicml-streaming writes them with compression="zstd"."""
    import zstandard

    exported("mds", "image", "label", "caption")(folder)
    for listed in folder.rglob("index.json"):
        described = json.loads(listed.read_text())
        for shard in described["shards"]:
            path = listed.with_name(shard["raw_data"]["basename"])
            data = zstandard.ZstdCompressor().compress(path.read_bytes())
            path.with_name(path.name + ".zstd").write_bytes(data)
            path.unlink()
            shard["zip_data"] = {"basename": path.name + ".zstd", "bytes": len(data), "hashes": {}}
            shard["compression"] = "zstd"
        listed.write_text(json.dumps(described))


def parquet(folder: Path) -> None:
    """As Hugging Face's `datasets` lays images out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for part, numbers in enumerate(PARTS):
        samples = [packed(number) for number in numbers]
        files = [{"bytes": one["image"], "path": one[KEY].decode()} for one in samples]
        columns = {name: [one[name] for one in samples] for name in (KEY, "label", "caption")}
        table = pa.table(
            {"image": pa.array(files, pa.struct({"bytes": pa.binary(), "path": pa.string()}))}
            | columns
        )
        pq.write_table(table, folder / f"{part}.parquet", row_group_size=40)


def arrow(folder: Path) -> None:
    """As Hugging Face's `datasets` saves them."""
    import pyarrow as pa

    parquet(folder)
    for path in sorted(folder.glob("*.parquet")):
        table = pa.parquet.read_table(path)
        with pa.ipc.new_stream(path.with_suffix(".arrow"), table.schema) as stream:
            stream.write_table(table, max_chunksize=40)
        path.unlink()


def litdata(folder: Path) -> None:
    """As litdata.optimize writes them."""

    def packed_item(one: Sample) -> bytes:
        label = struct.pack("<q", one["label"])
        return item((one[KEY], one["image"], label, one["caption"].encode()))

    formats = {KEY: "bytes", "image": "jpeg", "label": "int", "caption": "str"}
    save(folder, formats, *([packed_item(packed(n)) for n in part] for part in PARTS))


def image_folder(folder: Path) -> None:
    for number in range(N):
        path = folder / CLASSES[number % 3] / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image(number))


@cache
def folder_packed() -> list[Sample]:
    """The records that packing makes of the image folder, in its order."""
    with TemporaryDirectory() as folder:
        image_folder(Path(folder) / "in")
        shardio.pack(Path(folder) / "in", Path(folder) / "out", jobs=1)
        return list(sequences.stored(Path(folder) / "out"))


@dataclass(frozen=True)
class Format:
    make: Callable[[Path], None]  # writes the files into an empty folder
    sample: Callable[[int], Sample] = packed  # what a record is there
    # Of `shardio index`; None: make has packed it.
    index: Mapping[str, Any] | None = None
    reads: str | None = None  # the format's name in the manifest, if it is another
    counts: Sequence[int] = COUNTS  # records of each shard
    kept: bool = False  # what was read once, or opened, stays in memory
    unseen: bool = False  # a flipped bit may be where no record is
    vouched: bool = False  # whatever was flipped before it is indexed is found, too
    framed: bool = True  # and whatever was cut, unless where a record ends


FORMATS: dict[str, Format] = {
    "record": Format(pack),
    "lmdb": Format(pack_lmdb, unseen=True),
    "webdataset": Format(
        exported("webdataset", image="jpg", label="cls", caption="txt"),
        lambda number: packed(number) | {KEY: b"k/%06d" % number},
        {"fields": {"caption": "txt"}},
        unseen=True,
    ),
    "tfrecord": Format(
        exported("tfrecord", "image", "label", "caption"),
        keyed(b"part-%(part)d/00000/%(at)08d", caption=b"n%04d".__mod__),
        {},
        vouched=True,
    ),
    "recordio": Format(
        exported("recordio", "image", "label"),
        keyed(b"part-%(part)d/00000/%(at)d", id=lambda number: number % COUNTS[0]),
        {},
    ),
    "mds": Format(
        exported("mds", "image", "label", "caption"),
        keyed(b"part-%(part)d/shard.00000/%(at)08d", caption="n{:04d}".format),
        {},
        unseen=True,
    ),
    "mds, compressed": Format(
        compressed_mds,
        keyed(b"part-%(part)d/shard.00000.mds/%(at)08d", caption="n{:04d}".format),
        {},
        reads="mds",
        kept=True,
        unseen=True,
    ),
    "lmdb-foreign": Format(
        exported("lmdb-caffe", "image", "label"),
        keyed(b"%(at)08d_k/%(number)06d.jpg"),
        {},
        unseen=True,
    ),
    "parquet": Format(
        parquet,
        lambda number: packed(number) | {"image.path": packed(number)[KEY].decode()},
        {},
        kept=True,
        unseen=True,
    ),
    "arrow": Format(
        arrow,
        lambda number: packed(number) | {"image.path": packed(number)[KEY].decode()},
        {},
        unseen=True,
    ),
    "litdata": Format(litdata, packed, {}, unseen=True),
    "imagefolder": Format(
        image_folder,
        lambda number: folder_packed()[number],
        {},
        counts=(N,),
        framed=False,
    ),
}


class Made:
    """A dataset of one format, read-only for all tests of this file."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.row = name, folder, FORMATS[name]
        self.format = self.row.reads or name
        self.row.make(folder)
        if self.row.index is not None:
            index(folder, format=self.format, jobs=1, **self.row.index)
        stored = [self.row.sample(number) for number in range(N)]
        self.samples = [one | {KEY: key_text(one[KEY])} for one in stored]  # as users get them
        self.keys = [sample[KEY] for sample in self.samples]
        self.number = {key: number for number, key in enumerate(self.keys)}

    def open(self, **options: Any) -> Any:
        return shardio.open(self.folder, decode=None, **options)

    def stream(self, **options: Any) -> ShardDataset:
        """Yields keys only: a batch is a list of them."""
        order = {"seed": 3, "shuffle_buffer": 40, "spans": 5, "unit": 2}
        given = {"batch_size": 8, "fields": (KEY,), "decode": None} | order
        return ShardDataset(self.folder, **of_order(given | options))

    def numbers(self, each: Sequence[list[list[str]]], start: int = 0) -> list[list[int]]:
        """The batches of 8 of all ranks together, as numbers of records."""
        steps = side_by_side(each, 4 // len(each), 5, start)
        return [[self.number[key] for key in flat(step)] for step in steps]

    def law(self, epoch: int = 0, chosen: Sequence[int] = range(N)) -> tuple[list[int], list[int]]:
        """The virtual sequence and the flat order of an epoch, by test_order's plain loops."""
        starts = np.cumsum([0, *self.row.counts])
        shards = [
            [number for number in chosen if start <= number < stop]
            for start, stop in pairwise(starts.tolist())
        ]
        rows = naive_epoch([len(shard) for shard in shards], 3, epoch, 5, 2, 40)
        virtual, order = ([shards[shard][record] for shard, record in one] for one in rows)
        return virtual, order
