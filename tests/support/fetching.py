"""Readers that tell which bytes they were asked for, and the order that these must have."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardio.dataset.fetch import Fetch, Rows
from shardio.dataset.reader import Reader
from shardio.dataset.reader import read as read_row
from shardio.formats import manifest
from shardio.formats.sample import Sample
from shardio.order.epoch import Epoch
from shardio.order.partition import Partition
from shardio.order.rng import Int64s
from shardio.storage.location import locate
from support.small_datasets import payload


class Watched:
    """A storage that remembers what was announced and what was read, as (name, start, stop)."""

    def __init__(self, folder: Path, network: bool = False) -> None:
        self._storage = locate(folder)
        self.url = self._storage.url
        self.network = network
        self.announced: list[tuple[str, int, int]] = []
        self.reads: list[tuple[str, int, int]] = []
        self.scattered: set[str] = set()

    remote = False

    def share(self, consumers: int) -> None: ...

    def open(self, name: str, known: Any = None) -> Any:
        return WatchedFile(self._storage.open(name), self)

    def read(self, name: str, limit: int, **_: Any) -> bytes:
        return self._storage.read(name, limit)

    def exists(self, name: str) -> bool:
        return self._storage.exists(name)

    def is_network(self) -> bool:
        return self.network


class WatchedFile:
    descriptor = -1  # the core would read what nobody sees

    def __init__(self, file: Any, storage: Watched) -> None:
        self._file, self._storage = file, storage
        self.name, self.size = file.name, file.size

    def read(self, start: int, length: int) -> bytes:
        self._storage.reads.append((self.name, start, start + length))
        return self._file.read(start, length)

    def view(self, start: int, length: int) -> bytes:
        return self.read(start, length)

    def will_need(self, start: int, length: int, *, keep: bool = False) -> None:
        self._storage.announced.append((self.name, start, start + length))
        self._file.will_need(start, length)

    def keep_end(self, length: int) -> bool:
        return False

    def scattered(self) -> None:
        self._storage.scattered.add(self.name)
        self._file.scattered()

    def close(self) -> None:
        self._file.close()


def reader(folder: Path, network: bool = False, **options: Any) -> Reader:
    storage = Watched(folder, network)
    return Reader(storage, manifest.load(storage), **options)


def share(
    counts: list[int],
    batch_size: int | None,
    *,
    shuffle_buffer: int | None = 60,
    unit: int | None = None,
    spans: int = 8,
    nodes: int = 1,
    **options: Any,
) -> Partition:
    unit = unit or batch_size or 1
    epoch = Epoch(
        counts,
        seed=3,
        epoch=1,
        spans=spans,
        unit=unit,
        shuffle_buffer=shuffle_buffer,
        nodes=nodes,
        node_spans=1 if nodes == 1 else (batch_size or 1) // unit,
    )
    return Partition(epoch, batch_size, **options)


def expected(of: Partition) -> list[int]:
    """Record numbers in the order of a share, by `order` alone."""
    spans: dict[int, Any] = {}
    numbers: list[int] = []
    for batch in of:
        for span, first, count in batch.pieces:
            walk = spans.setdefault(span, of.epoch.span_order(span))
            walk.seek(first)
            numbers += numbered(of.epoch, of.epoch.position(span, walk.take(count)))
        numbers += numbered(of.epoch, batch.repeats)
    return numbers


def numbered(epoch: Epoch, virtual: Int64s) -> list[int]:
    """Virtual positions to numbers of records in the dataset."""
    shards, records = epoch.locate(virtual)
    starts = epoch.shard_records.cumsum() - epoch.shard_records
    return (starts[shards] + records).tolist()


def samples(got: Fetch, rows: Rows) -> Iterator[tuple[int, Sample]]:
    """The number of each row in the dataset, and its sample."""
    return ((row[0], read_row(row)) for row in got.rows(rows))


def read(got: Fetch) -> list[tuple[int, Sample]]:
    return [pair for rows in got for pair in samples(got, rows)]


def opened(of: Reader) -> None:
    """Open all shards, for reads of both kinds, and forget what that read."""
    for shard in range(of.manifest.shards):
        of.shard(shard)
        of.shard(shard, scattered=True)
    assert isinstance(of.storage, Watched)
    of.storage.reads.clear()


COUNTS = [37, 0, 61, 5, 80, 1, 44]


def check(got: list[tuple[int, Sample]], numbers: list[int]) -> None:
    assert [number for number, _ in got] == numbers
    for number, sample in got:
        assert sample == {
            "__key__": b"k/%06d.jpg" % number,
            "image": payload(number),
            "label": number % 3,
        }


ways = pytest.mark.parametrize(
    "policy", ["page_cache", "in_memory", "in_memory in tiny chunks", "network"], indirect=True
)
