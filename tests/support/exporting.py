"""Records to export, and small readers of what was exported, by the published layouts."""

import json
import os
import re
import struct
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from support import small_datasets
from support.tfrecord_frames import frame

FORMATS = ("webdataset", "tfrecord", "recordio", "mds", "lmdb-caffe", "parquet", "imagefolder")
SHARDED = ("webdataset", "tfrecord", "recordio", "mds", "parquet")
MAGIC = struct.pack("<I", 0xCED7230A)
N = 23

FIELDS = (
    *(("__key__", "key"), ("image", "image"), ("label", "int"), ("caption", "str")),
    *(("meta", "json"), ("boxes", "array"), ("score", "float"), ("good", "bool")),
    *(("raw", "bytes"), ("big", "int")),
)


def rich(i: int) -> dict[str, Any]:
    """A record with a field of every kind."""
    return {
        "__key__": b"class%d/%06d.jpg" % (i % 3, i),
        "image": small_datasets.jpeg(i),
        "label": i % 3,
        "caption": f"a “caption”, number {i}\n" * (i % 3),
        "meta": {"a": [i, None, -1.5, True], "b": "ü"},
        "boxes": np.arange(4 * (i % 3 + 1), dtype=np.float32).reshape(-1, 4) / 3,
        "score": i / 8,
        "good": i % 2 == 0,
        "raw": bytes(range(i)) + MAGIC,
        "big": (-1) ** i * (1 << 62),
    }


def some_none(i: int) -> dict[str, Any]:
    """As `rich`, with None here and there; never the image."""
    sample = rich(i)
    for at, name in enumerate(("caption", "meta", "boxes", "score", "good", "raw", "big", "label")):
        if i % 9 == at:
            sample[name] = None
    return sample


def left(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


def tar_samples(path: Path) -> list[tuple[str, dict[str, bytes]]]:
    """As webdataset groups the members of a tar file."""
    samples: list[tuple[str, dict[str, bytes]]] = []
    with tarfile.open(path) as archive:
        for member in archive:
            key, extension = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", member.name).groups()
            if not samples or samples[-1][0] != key:
                samples.append((key, {}))
            assert extension not in samples[-1][1]
            samples[-1][1][extension] = archive.extractfile(member).read()
    return samples


def tar_index(path: Path, names: bool = True) -> str:
    """What DALI's wds2idx says of a tar file."""
    lines: list[tuple[str, list[str]]] = []
    with tarfile.open(path) as archive:
        for member in archive:
            dot = member.name.find(".", member.name.rfind("/") + 1)
            stem, extension = member.name[:dot], member.name[dot + 1 :]
            if not lines or lines[-1][0] != stem:
                lines.append((stem, []))
            place = f"{extension} {member.offset_data} {member.size}"
            lines[-1][1].append(f"{place} {member.name}" if names else place)
    head = f"v1.{2 if names else 1} {len(lines)}"
    return "\n".join([head, *(" ".join(parts) for _, parts in lines), ""])


def tf_records(path: Path) -> list[bytes]:
    data, at, records, lines = path.read_bytes(), 0, [], []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        body = data[at + 12 : at + 12 + length]
        assert data[at : at + length + 16] == frame(body)
        lines.append(f"{at} {length + 16}\n")
        records.append(body)
        at += length + 16
    assert path.with_suffix(".idx").read_text() == "".join(lines)
    return records


def message(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: numbers, and bytes or integers."""

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    at = 0
    while at < len(data):
        tag = varint()
        value: Any = varint()
        if tag & 7 == 2:
            value, at = data[at : at + value], at + value
            assert at <= len(data)
        yield tag >> 3, value


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def integers(data: bytes) -> list[int]:
    """Packed varints, told from fields by a tag before each."""
    values, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            values.append(signed(value))
            value = shift = 0
    return values


def example(data: bytes) -> dict[str, Any]:
    """The features of a tf.train.Example as lists."""
    ((_, features),) = message(data)
    found = {}
    for _, entry in message(features):
        parts = dict(message(entry))
        ((kind, values),) = message(parts[2])
        elements = [value for _, value in message(values)]
        if kind == 2:
            elements = np.frombuffer(elements[0], "<f4").tolist()
        elif kind == 3:
            elements = integers(elements[0])
        found[parts[1].decode()] = elements
    return found


def rec_records(path: Path) -> list[bytes]:
    data, at, records, begins = path.read_bytes(), 0, [], []
    parts: list[bytes] = []
    while at < len(data):
        magic, word = struct.unpack_from("<4sI", data, at)
        kind, length = word >> 29, word & (1 << 29) - 1
        assert magic == MAGIC and (kind in (0, 1)) == (not parts)
        if not parts:
            begins.append(at)
        parts.append(data[at + 8 : at + 8 + length])
        assert not any(data[at + 8 + length : at + 8 + (length + 3) // 4 * 4])
        at += 8 + (length + 3) // 4 * 4
        if kind in (0, 3):
            records.append(MAGIC.join(parts))
            parts = []
    index = [line.split("\t") for line in path.with_suffix(".idx").read_text().splitlines()]
    assert [int(offset) for _, offset in index] == begins
    return records


def mds_samples(folder: Path) -> list[dict[str, Any]]:
    decode = {
        "int": lambda data: struct.unpack("<q", data)[0],
        "uint64": lambda data: struct.unpack("<Q", data)[0],
        "float64": lambda data: struct.unpack("<d", data)[0],
        "str": bytes.decode,
        "json": json.loads,
        "ndarray": mds_array,
    }
    index = json.loads((folder / "index.json").read_text())
    assert index["version"] == 2
    samples = []
    for shard in index["shards"]:
        data = (folder / shard["raw_data"]["basename"]).read_bytes()
        assert len(data) == shard["raw_data"]["bytes"] <= shard["size_limit"]
        assert sha256(data).hexdigest() == shard["raw_data"]["hashes"]["sha256"]
        assert shard["column_names"] == sorted(shard["column_names"])
        (count,) = struct.unpack_from("<I", data)
        offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
        assert count == shard["samples"] and offsets[-1] == len(data)
        config = json.loads(data[8 + 4 * count : offsets[0]])
        assert config.items() <= shard.items()
        for begin, end in pairwise(offsets):
            record, at, sizes = data[begin:end], 0, []
            for size in shard["column_sizes"]:
                if size is None:
                    (size,) = struct.unpack_from("<I", record, at)
                    at += 4
                sizes.append(size)
            sample = {}
            for name, encoding, size in zip(
                shard["column_names"], shard["column_encodings"], sizes, strict=True
            ):
                sample[name] = decode.get(encoding, bytes)(record[at : at + size])
                at += size
            assert at == len(record)
            samples.append(sample)
    return samples


def mds_array(data: bytes) -> np.ndarray[Any, Any]:
    dtype = {8: "u1", 34: "<f4", 65: "<i8"}[data[0]]
    count, width = data[1] >> 2, 1 << data[1] % 4
    shape = np.frombuffer(data[2 : 2 + count * width], f"<u{width}")
    return np.frombuffer(data[2 + count * width :], dtype).reshape(shape)


def caffe_samples(folder: Path) -> dict[bytes, dict[int, Any]]:
    with lmdb.open(str(folder), readonly=True, lock=False) as opened, opened.begin() as transaction:
        return {key: dict(message(value)) for key, value in transaction.cursor()}


def equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        same: bool = found.dtype == expected.dtype and np.array_equal(found, expected)
        return same
    return type(found) is type(expected) and bool(found == expected)


def written(out: Path, *keys: bytes) -> Path:
    return small_datasets.make(
        out,
        [len(keys)],
        fields=FIELDS[:2],
        sample=lambda i: {"__key__": keys[i], "image": small_datasets.jpeg(0)},
        classes=None,
    )


def decoded(value: Any) -> Any:
    """What the programs of format_tools print of a value, as the value."""
    if isinstance(value, dict):
        if value.keys() == {"bytes"} and isinstance(value["bytes"], str):
            return bytes.fromhex(value["bytes"])
        if value.keys() == {"array"}:
            return np.array(value["array"][1], value["array"][0])
        return {name: decoded(one) for name, one in value.items()}
    return [decoded(one) for one in value] if isinstance(value, list) else value
