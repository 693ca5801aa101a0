"""What tests of tables share: Parquet files, their shards, and what Parquet and Arrow must do."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardio.formats.base import Shard
from shardio.packing import index as indexing

from .conformance import FIELDS, FormatConformance, shard_of

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

FILES = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def write(path: Path, columns: Mapping[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(dict(columns)), path, **options)
    return path


def index(folder: Path, **options: Any) -> indexing.Indexed:
    return indexing.index(folder, format="parquet", jobs=1, **options)


def ways(shard: Shard) -> list[list[dict[str, Any]]]:
    """All records, by every way to them."""
    n = shard.records
    held = shard.hold(0, n)
    return [
        [shard.read(record) for record in range(n)],
        [shard.read(record) for record in reversed(range(n))][::-1],
        list(shard.scan(0, n)),
        [*shard.scan(0, n // 3), *shard.scan(n // 3, n)],
        [shard.decode(record, data) for record, data in enumerate(held)],
    ]


class TableConformance(FormatConformance):
    """Arrays of more dimensions than one are no column, and nor is JSON of any shape."""

    FIELDS = tuple(field for field in FIELDS if field[0] not in ("mask", "meta"))

    def columns(self, samples: Any) -> dict[str, Any]:
        """Return the columns of the samples by name."""
        types = {"label": pa.int64(), "weight": pa.float64(), "flipped": pa.bool_()}
        types["caption"] = pa.string()
        columns: dict[str, Any] = {}
        for name, _ in self.FIELDS:
            values = [sample[name] for sample in samples]
            if name == "image":
                files = [None if v is None else {"bytes": v, "path": None} for v in values]
                columns[name] = pa.array(files, FILES)
            else:
                columns[name] = pa.array(values, types.get(name, pa.binary()))
        return columns

    def open(self, path: Path) -> Shard:
        return shard_of(path.parent, fields=self.FIELDS)
