"""What shardio reads of a dataset, in the lines that tests/formats/reader.c prints."""

import hashlib
import struct
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

import shardio
from shardio.formats import manifest
from shardio.formats.version import load_excluded, load_version
from shardio.names import key_bytes
from shardio.storage.location import locate


def lines(folder: Path, version: str | None = None) -> list[str]:
    """Return a line for each record, by its number; of splits also one before each split."""
    found = []
    for split, below in manifest.datasets(str(folder)).items():
        if split:
            found.append(f"split\t{quote(key_bytes(split))}")
        index = locate(below)
        dataset = load_version(index, version)
        gone = load_excluded(index, dataset)
        numbers = np.setdiff1d(np.arange(dataset.stored_records), gone).tolist()
        samples = shardio.open(below, decode=None, version=version)
        for number, sample in zip(numbers, samples, strict=True):
            assert list(sample) == [name for name, _ in dataset.schema.fields]
            shown = [f"record\t{number}"]
            for name, kind in dataset.schema.fields:
                shown.append(f"{quote(name.encode())}={_shown(kind, sample[name])}")
            found.append("\t".join(shown))
    return found


def _shown(kind: str, value: Any) -> str:
    if value is None:
        return "null"
    if kind == "key":
        return quote(key_bytes(value))
    return _blob(value) if kind in ("image", "bytes") else _plain(value, top=True)


def _plain(value: Any, top: bool = False) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return "f" + struct.pack(">d", value).hex()
    if isinstance(value, str):
        return f"'{quote(value.encode())}'"
    if isinstance(value, bytes):
        return f"b'{quote(value)}'"
    if isinstance(value, np.ndarray):
        described = ",".join([quote(value.dtype.str), *map(str, value.shape)])
        return ("" if top else "array ") + described + _blob(value.tobytes())
    if isinstance(value, list):
        return "[" + "".join(_plain(one) + "," for one in value) + "]"
    return "{" + "".join(f"{_plain(name)}:{_plain(one)}," for name, one in value.items()) + "}"


def _blob(data: bytes) -> str:
    return f":{len(data)}:{hashlib.sha256(data).hexdigest()[:16]}"
