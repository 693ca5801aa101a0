"""Writes MDS shards, sharing no line with the reader; and reads them as they are indexed."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardio.formats.foreign.mds import MdsFile
from shardio.storage.location import locate

from .conformance import same

NAMES = r"\.mds(\.(zstd|gz|bz2|br|snappy))?$"  # this format's row in the table

FIXED = {"int": "<q", "int8": "<b", "uint8": "<B", "uint32": "<I", "float64": "<d"}


def encode(kind: str, value: Any) -> bytes:
    if kind in FIXED:
        return struct.pack(FIXED[kind], value)
    if kind == "ndarray":
        number = {"|u1": 8, "<i4": 33}[value.dtype.str]
        shape = np.array(value.shape, "<u8").tobytes()
        return bytes([number, value.ndim << 2 | 3]) + shape + value.tobytes()
    if kind == "json":
        return json.dumps(value).encode()
    return value.encode() if isinstance(value, str) else bytes(value)


def build(
    columns: Mapping[str, str], samples: Sequence[Mapping[str, bytes]], **change: Any
) -> tuple[bytes, dict[str, Any]]:
    """The bytes of a shard of encoded values, and its row in index.json. change: its description.

    The order of `columns` is that of the shard.
    """
    sizes = [struct.calcsize(FIXED[kind]) if kind in FIXED else None for kind in columns.values()]
    described = {
        "column_encodings": list(columns.values()),
        "column_names": list(columns),
        "column_sizes": sizes,
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": None,
        "version": 2,
    } | change
    text = change["text"] if "text" in change else json.dumps(described).encode()
    records = []
    for values in samples:
        taken = [values[name] for name in columns]
        variable = [len(one) for one, size in zip(taken, sizes, strict=True) if size is None]
        records.append(struct.pack(f"<{len(variable)}I", *variable) + b"".join(taken))
    at = 4 + 4 * (len(records) + 1) + len(text)
    head = struct.pack("<II", len(records), at)
    for one in records:
        at += len(one)
        head += struct.pack("<I", at)
    data = head + text + b"".join(records)
    row = described | {
        "samples": len(records),
        "raw_data": {"basename": "", "bytes": len(data), "hashes": {}},
        "zip_data": None,
    }
    return data, row


def save(folder: Path, shards: Mapping[str, tuple[bytes, dict[str, Any]]], **change: Any) -> None:
    """Shards and their list, in a folder."""
    folder.mkdir(exist_ok=True, parents=True)
    rows = []
    for name, (data, row) in shards.items():
        (folder / name).write_bytes(data)
        rows.append(row | {"raw_data": row["raw_data"] | {"basename": name}})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": rows} | change))


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    """All samples of a shard, by the layout alone, as they are indexed and once they are."""
    storage = locate(folder)
    file = MdsFile(storage, name)
    again = None
    try:
        ranges = list(file.scan())
        data = [file.read(at, size) for at, size in ranges]
        found = [file.values(held, i) for i, held in enumerate(data)]
        again = MdsFile(storage, name, file.extra())
        for i, (at, size) in enumerate(ranges):
            assert again.read(at, size) == data[i]
            assert same(again.values(data[i], i), found[i])
        return found
    finally:
        file.close()
        if again is not None:
            again.close()


COLUMNS = {"image": "jpeg", "label": "int", "text": "str"}


def samples(count: int, at: int = 0) -> list[dict[str, bytes]]:
    return [
        {"image": b"\xff\xd8\xff%d" % i, "label": struct.pack("<q", i), "text": b"t%d" % i}
        for i in range(at, at + count)
    ]


def shards(count: int = 3, columns: Mapping[str, str] = COLUMNS) -> dict[str, Any]:
    return {
        f"shard.{i:05d}.mds": build(columns, samples(i + 2, 10 * i), size_limit=i)
        for i in range(count)
    }
