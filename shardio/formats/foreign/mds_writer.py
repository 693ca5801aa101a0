"""MosaicML's MDS, version 2: shard.00000.mds ... and index.json.

    shard     u32 records | u32 where each begins, and the end [records + 1] | JSON of the columns
              | records
    record    u32 size of each column without a fixed one | values; both in the order of the names

    image            jpeg or png where all are; else bytes
    bytes            bytes
    str, bool, json  str; json
    int, float       int (uint64 where one is above 2**63); float64
    array            ndarray: integers and floats, not empty, of at least one dimension
    the key          str, or bytes where one is not UTF-8: the format has no keys

The format has no None, so a field that is None somewhere is an error. A shard is kept in memory
until it is written, as its writer in streaming does. Each has its SHA-256 in the index. Source:
https://github.com/mosaicml/streaming/tree/main/streaming/base/format/mds
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...errors import SampleError, printable
from ...images.filetype import image_type
from ...names import KEY
from ...storage.local import Draft, link, token, write_file
from ..sample import Sample
from .mds import DTYPES
from .writer import ExportSpec, FormatWriter, RestartExport, columns, is_usual, json_bytes, misfit

_INDEX = "index.json"
_SIZE = 1 << 26  # bytes of a shard: the default of streaming's own writer
_LIMIT = (1 << 32) - 1  # offsets are u32
_U32 = struct.Struct("<I")
_FIXED = {"int": 8, "uint64": 8, "float64": 8}
_IMAGES = {"JPEG": "jpeg", "PNG": "png"}
_NUMBERS = {name: number for number, name in DTYPES.items()}


class Mds(FormatWriter):
    """A folder of MDS shards that is being written."""

    shards = True
    keyed = True
    own_files = re.compile(r"shard\.\d{5,}\.mds|index\.json")

    def __init__(self, spec: ExportSpec) -> None:
        super().__init__(spec)
        self._folder, self._required_types = spec.folder, spec.required_types
        self._limit = min(spec.shard_size or _SIZE, _LIMIT)
        self._columns = sorted(columns(spec, "mds"))
        self.exported_names = {field: f"{column} (none)" for column, field, _ in self._columns}
        self._encodings: dict[str, str] = {}
        self._config = b""
        self._records: list[bytes] = []
        self._bytes = 0
        self._described: list[dict[str, Any]] = []

    @classmethod
    def join(cls, parts: Sequence[str], folder: str, split: str) -> None:
        """Put the files that several wrote, each a part of the records, into one folder."""
        described: list[dict[str, Any]] = []
        for part in parts:
            with open(os.path.join(part, _INDEX), "rb") as file:
                shards = json.load(file)["shards"]
            for one in shards:
                name = f"shard.{len(described):05d}.mds"
                link(os.path.join(part, one["raw_data"]["basename"]), os.path.join(folder, name))
                one["raw_data"]["basename"] = name
                described.append(one)
        _write_index(folder, described)

    def begin(self, sample: Sample) -> None:
        """Choose by the first record of the dataset, where only a part of it is written."""
        self._choose(sample)

    def add(self, number: int, sample: Sample) -> bool:
        """Write a record; False if it has nothing to write. Raises SampleError, RestartExport."""
        if not self._encodings:
            self._choose(sample)
        sizes, values = [], []
        for _, field, kind in self._columns:
            value = sample[field]
            if value is None:
                raise misfit(
                    sample, field, "it is None, which mds does not have; leave it out by --fields"
                )
            encoding = self._encodings[field]
            self._check(field, kind, encoding, value)
            try:
                data = _ENCODE[encoding](value)
            except (TypeError, ValueError, struct.error) as error:
                raise misfit(sample, field, str(error)) from None
            if encoding not in _FIXED:
                sizes.append(_U32.pack(len(data)))
            values.append(data)
        record = b"".join((*sizes, *values))
        size = self._bytes + len(record) + 4 * (len(self._records) + 3) + len(self._config)
        if self._records and size > self._limit:
            self._flush()
        elif size > _LIMIT:
            raise SampleError(
                f"record {printable(sample[KEY])}: {len(record):,} bytes; a shard of mds has room "
                f"for {_LIMIT:,}"
            )
        self._records.append(record)
        self._bytes += len(record)
        return True

    def finish(self) -> None:
        """Complete all files, and flush them."""
        if self._records:
            self._flush()
        _write_index(self._folder, self._described)

    def close(self) -> None:
        """Give up what is open."""
        self._records = []

    def _choose(self, sample: Sample) -> None:
        """Choose the encoding of each column, by the first record and what others required."""
        for column, field, kind in self._columns:
            encoding = {"key": "str", "float": "float64", "bool": "json", "array": "ndarray"}.get(
                kind, kind
            )
            if kind == "image":
                data = sample[field]
                encoding = _IMAGES.get((data and image_type(data[:32])) or "", "bytes")
            self._encodings[field] = self._required_types.get(field, encoding)
            self.exported_names[field] = f"{column} ({self._encodings[field]})"
        names = [column for column, _, _ in self._columns]
        encodings = [self._encodings[field] for _, field, _ in self._columns]
        self._layout = {
            "version": 2,
            "format": "mds",
            "compression": None,
            "hashes": ["sha256"],
            "size_limit": self._limit,
            "column_names": names,
            "column_encodings": encodings,
            "column_sizes": [_FIXED.get(encoding) for encoding in encodings],
        }
        self._config = json.dumps(self._layout, sort_keys=True).encode()

    def _check(self, field: str, kind: str, encoding: str, value: Any) -> None:
        """Begin anew where the encoding of a column does not fit all records."""
        if kind == "image" and encoding != "bytes":
            fits = _IMAGES.get(image_type(value[:32]) or "") == encoding
        else:
            fits = encoding in ("uint64", "bytes") or is_usual(kind, value)
        if not fits:
            self._required_types[field] = "uint64" if kind == "int" else "bytes"
            raise RestartExport

    def _flush(self) -> None:
        name = f"shard.{len(self._described):05d}.mds"
        count = len(self._records)
        sizes = np.array([0, *map(len, self._records)], np.int64)
        begins = np.cumsum(sizes) + 4 + 4 * (count + 1) + len(self._config)
        with Draft(self._folder, name, token()) as draft:
            draft.write(_U32.pack(count) + begins.astype("<u4").tobytes() + self._config)
            draft.write(b"".join(self._records))
            described = self._layout | {
                "samples": count,
                "raw_data": {
                    "basename": name,
                    "bytes": draft.size,
                    "hashes": {"sha256": draft.digest().hex()},
                },
                "zip_data": None,
            }
            draft.commit(name)
        self._described.append(described)
        self._records, self._bytes = [], 0


def _write_index(folder: str, described: Sequence[dict[str, Any]]) -> None:
    text = json.dumps({"version": 2, "shards": described}, sort_keys=True)
    write_file(folder, _INDEX, text.encode())


def _ndarray(value: np.ndarray[Any, Any]) -> bytes:
    number = _NUMBERS.get(value.dtype.name)
    if number is None:
        raise TypeError(f"mds has no arrays of dtype {value.dtype}")
    if not value.size or not value.ndim:
        raise ValueError(f"mds has no arrays of shape {value.shape}")
    if value.ndim > 63:
        raise ValueError(f"mds has no arrays of {value.ndim} dimensions")
    width = next(i for i in range(4) if max(value.shape) < 1 << (8 << i))
    shape = np.array(value.shape, f"<u{1 << width}").tobytes()
    return bytes((number, value.ndim << 2 | width)) + shape + value.tobytes()


def _text(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


_ENCODE: dict[str, Callable[[Any], bytes]] = {
    "bytes": bytes,
    "jpeg": bytes,
    "png": bytes,
    "str": _text,
    "json": json_bytes,
    "int": struct.Struct("<q").pack,
    "uint64": struct.Struct("<Q").pack,
    "float64": struct.Struct("<d").pack,
    "ndarray": _ndarray,
}
