"""Records, and files of them, as the compiled core is given them."""

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from shardio import native

reads = pytest.mark.skipif(native.records() is None, reason=f"core: {native.described()}")

SEED = 7 << 32
BEGIN = b"P6\n2 1\n255\n"
ROW = 6


def core() -> Any:
    return native.core


def record(number: int, head: bytes, blob: bytes, seed: int = SEED) -> bytes:
    sealed = struct.pack("<II", len(head) + len(blob), len(head)) + head + blob
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(sealed, seed + number)) + sealed


class Records:
    """A file of records, as the core is given it."""

    def __init__(self, path: Path, records: list[bytes]) -> None:
        path.write_bytes(b"front" + b"".join(records))
        self.offsets = np.cumsum([5, *map(len, records)], dtype=np.int64)
        self.file = os.open(path, os.O_RDONLY)

    def gather(self, numbers: Any, out: Any, begin: bytes = BEGIN) -> int:
        wanted = np.array(numbers, np.int64)
        rows = memoryview(out)  # one after the other
        if wanted.size and rows.nbytes and rows.nbytes % wanted.size == 0:
            rows = rows.cast("B", (wanted.size, rows.nbytes // wanted.size))
        at = np.arange(wanted.size)
        return int(core().gather(self.file, self.offsets, SEED, wanted, begin, rows, at))

    def blobs(self, numbers: Any) -> list[bytes]:
        wanted = np.array(numbers, np.int64)
        return list(core().blobs(self.file, self.offsets, SEED, wanted))


def pixels(number: int) -> bytes:
    return bytes((number * 7 + i) % 256 for i in range(ROW))


def taken(records: list[bytes], seed: int = SEED) -> list[Any]:
    """The records as `split` gives them."""
    ends = np.cumsum(list(map(len, records)), dtype=np.int64)
    begins = ends - np.array(list(map(len, records)), np.int64)
    return list(core().split(b"".join(records), begins, ends, seed))
