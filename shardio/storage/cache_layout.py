"""How a file of the cache is laid out: the bytes of one shard, sparse, and a map behind them.

    bytes of the shard    at the offsets that they have in the shard; holes where none are there
    zeros                 to a multiple of 4096 bytes
    slots                 one a range, 16 bytes each
    header                96 bytes, the last of the file

A slot says whether its range is there: u32 state (0: no; PRESENT), u32 boot, u64 xxh3_64 of the
range's bytes. `boot` stands for the run of the kernel in which somebody compared the bytes with
this checksum: what the page cache took is safe from a kill -9, but not from a loss of power. So a
slot of another run is compared once more. The header: 16 bytes of magic, 16 of dataset id, u64
shard, u64 size of the shard, u64 bytes a range, 32 bytes of key (the shard's SHA-256), u64 xxh3_64
of the 88 bytes before. All numbers are little-endian.

The map is in the shard's own file, so the two cannot be torn apart: one file is created, evicted,
counted, locked and open. It is behind the bytes, so that these keep their offsets, and its header
is last, so that one write creates a complete file of the right length.
Nothing here opens a file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

MAGIC = b"shardio-cache 0\n"
HEADER_BYTES = 96
SLOT_BYTES = 16
PRESENT = 0x50524553
MOST_RANGES = 1 << 20  # 8 TiB in ranges of 8 MiB: a header that says more is not believed

checksum: Callable[..., int] = xxhash.xxh3_64_intdigest

_HEADER = struct.Struct("<16s16sQQQ32s")
_SLOT = struct.Struct("<IIQ")
_PAGE = 4096  # a slot's page holds no byte of the shard
_MOST_SIZE = 1 << 62
_NAME = re.compile(r"shardio-[0-9a-f]{32}-[0-9]{5,20}-[0-9a-f]{16}\.cache\Z")


@dataclass(frozen=True)
class Slot:
    """What the map says of one range."""

    state: int
    boot: int
    checksum: int

    def pack(self) -> bytes:
        """Return the slot as it is stored."""
        return _SLOT.pack(self.state, self.boot, self.checksum)


ABSENT = Slot(0, 0, 0)


@dataclass(frozen=True)
class Layout:
    """Of which shard a file of the cache is, and where its parts are."""

    key: bytes  # 32 bytes, the SHA-256 of the shard
    dataset_id: bytes  # 16 bytes
    shard: int
    size: int  # bytes of the shard
    range_bytes: int

    @property
    def ranges(self) -> int:
        """Return the number of ranges; the last one may be shorter."""
        return -(-self.size // self.range_bytes)

    @property
    def table(self) -> int:
        """Return where the slots begin."""
        return -(-self.size // _PAGE) * _PAGE

    @property
    def header(self) -> int:
        """Return where the header begins, which is behind the slots."""
        return self.table + SLOT_BYTES * self.ranges

    @property
    def file_size(self) -> int:
        """Return the length of the whole file."""
        return self.header + HEADER_BYTES

    @property
    def name(self) -> str:
        """Return the name of the file: dataset, shard and content."""
        return f"shardio-{self.dataset_id.hex()}-{self.shard:05d}-{self.key[:8].hex()}.cache"

    def slot_at(self, number: int) -> int:
        """Return where the slot of a range is."""
        return self.table + SLOT_BYTES * number

    def byte_range(self, number: int) -> tuple[int, int]:
        """Return the start and the length of a range, in the shard and in the file."""
        start = number * self.range_bytes
        return start, min(self.range_bytes, self.size - start)

    def pack(self) -> bytes:
        """Return the header."""
        body = _HEADER.pack(
            MAGIC, self.dataset_id, self.shard, self.size, self.range_bytes, self.key
        )
        return body + checksum(body).to_bytes(8, "little")

    def present_bytes(self, slots: bytes) -> int:
        """Return how many bytes of the shard are there, by the bytes of all slots."""
        there = [n for n in range(self.ranges) if unpack_slot(slots, n).state == PRESENT]
        return sum(self.byte_range(number)[1] for number in there)


def unpack(header: bytes, file_size: int) -> Layout | None:
    """Return what a header says; None if it is none of ours, or of a file of another length."""
    if len(header) != HEADER_BYTES or not header.startswith(MAGIC):
        return None
    body, seal = header[: _HEADER.size], header[_HEADER.size :]
    if checksum(body).to_bytes(8, "little") != seal:
        return None
    _, dataset_id, shard, size, range_bytes, key = _HEADER.unpack(body)
    found = Layout(key, dataset_id, shard, size, range_bytes)
    if not 0 < range_bytes <= _MOST_SIZE or size > _MOST_SIZE or found.ranges > MOST_RANGES:
        return None
    return found if found.file_size == file_size else None


def unpack_slot(slots: bytes, number: int = 0) -> Slot:
    """Return the slot of this number, ABSENT where the bytes end before."""
    data = slots[SLOT_BYTES * number : SLOT_BYTES * (number + 1)]
    return Slot(*_SLOT.unpack(data)) if len(data) == SLOT_BYTES else ABSENT


def is_name(name: str) -> bool:
    """Return True if a file's name is one that a Layout gives."""
    return _NAME.match(name) is not None
