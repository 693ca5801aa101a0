"""ArrayRecord, map-style, in torch's DataLoader: one file, a record a group, for random access.

`group_size:1` and reading by number are its README's advice (google/array_record, "Performance").
A record is the label in eight bytes, then the image. Workers are spawned: its reader has threads,
which a fork would lose.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..data import listing
from .base import crop, data_loader, decoded, epochs

_LABEL = struct.Struct("<q")


def write(folder: str, out: str) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    os.makedirs(out)
    writer = ArrayRecordWriter(f"{out}/data.array_record", "group_size:1")
    for path, label in listing(folder):
        writer.write(_LABEL.pack(label) + Path(path).read_bytes())
    writer.close()


def source(path: str) -> Any:
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    return ArrayRecordDataSource(f"{path}/data.array_record")


class Record:
    """A record to (image, label). A class, so that spawned workers can be sent it."""

    def __init__(self, size: int) -> None:
        self.crop = crop(size)

    def __call__(self, record: bytes) -> Any:
        return decoded(record[_LABEL.size :], self.crop), _LABEL.unpack_from(record)[0]


class _Images:
    def __init__(self, path: str, size: int) -> None:
        self.path, self.size, self.source = path, size, None
        self.records = len(source(path))

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, index: int) -> Any:
        if self.source is None:
            self.source, self.read = source(self.path), Record(self.size)
        return self.read(self.source[index])


def images(path: str, *, size: int, batch: int, workers: int) -> Iterator[Any]:
    more = {"shuffle": True, "multiprocessing_context": "spawn" if workers else None}
    return epochs(data_loader(_Images(path, size), batch=batch, workers=workers, **more))


def records(path: str) -> Iterator[bytes]:
    found = source(path)
    return (found[i][_LABEL.size :] for i in range(len(found)))
