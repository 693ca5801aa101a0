"""Values that nobody wrote, and what reads them: in little memory, or in a process of its own.

`change` puts one junk value into a tree of dicts, lists and arrays, somewhere.
"""

import copy
import hashlib
import os
import random
import resource
import signal
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np
import xxhash

from support import LIMIT_S

Path = tuple[Any, ...]

JUNK = (
    *(None, True, -1, 0, 1, 7, 1 << 31, 1 << 63, (1 << 64) - 1, -1 << 63, 1.5, float("nan")),
    *("", "x", "../x", "a/b\0", "\udc80", "n" * 300, b"", b"x", [], [1], ["x"], [[]], {}, {"a": 1}),
    *(np.zeros(3), np.arange(4), np.array([], np.int64)),
)
PLAIN = tuple(one for one in JUNK if not isinstance(one, (bytes, np.ndarray)))  # what JSON has


def change(value: Any, rng: random.Random, junk: tuple[Any, ...] = JUNK, below: int = 1) -> Any:
    """Return the value with one of its parts, at this depth or below, replaced or left out."""
    path = rng.choice([one for one in paths(value) if len(one) > below])
    return put(value, path, None if rng.random() < 0.15 else [rng.choice(junk)])


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield where the parts of a value are; of a list the first four."""
    yield path
    if isinstance(value, dict):
        for name in value:
            yield from paths(value[name], (*path, name))
    elif isinstance(value, list | tuple):
        for i in range(min(len(value), 4)):
            yield from paths(value[i], (*path, i))


def put(value: Any, path: Path, new: list[Any] | None) -> Any:
    """Return a copy with another part; new: None leaves it out."""
    value = list(value) if isinstance(value, tuple) else copy.copy(value)
    at, *rest = path
    if rest:
        value[at] = put(value[at], tuple(rest), new)
    elif new is None:
        del value[at]
    else:
        value[at] = new[0]
    return value


def sealed(lines: bytes) -> bytes:
    """Put the line behind others that vouches for them, as at the end of a manifest."""
    return lines + b'"sha256": "%s"\n}\n' % hashlib.sha256(lines).hexdigest().encode()


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """Fail where the block holds as many bytes as the limit at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def in_child(work: Callable[[], object], memory: int | None = None) -> int:
    """Return the exit status of a fork that does this; negative: the signal that ended it.

    memory: bytes that the child can have at most.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        signal.alarm(LIMIT_S)  # a child that waits for ever fails the test, rather than hang it
        try:
            if memory is not None:
                resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- record shards under right checksums ----------------------------------------------------------

FORGED_ID = bytes(range(16))
FORGED_FIELDS = (("__key__", "key"), ("image", "image"), ("label", "int"))


def xx(data: bytes, seed: int = 0) -> bytes:
    """Return the checksum of our formats."""
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(data, seed))


def sealed_record(head: bytes, blobs: bytes = b"", number: int = 0, **wrong: int) -> bytes:
    """Sealed as record `number` of shard 3 of dataset FORGED_ID; lengths may be overridden."""
    seed = xxhash.xxh3_64_intdigest(struct.pack("<I", 3) + FORGED_ID) >> 32 << 32
    length, size = wrong.get("length", len(head) + len(blobs)), wrong.get("head_length", len(head))
    sealed = struct.pack("<II", length, size) + head + blobs
    return xx(sealed, seed + number) + sealed


def forge(
    records: Sequence[bytes] = (),
    *,
    fields: Any = FORGED_FIELDS,
    packed_fields: bytes | None = None,
    described: Any = (),
    packed_described: bytes | None = None,
    columns: bytes = b"",
    index: bytes | None = None,
    lengths: Sequence[int] | None = None,
    hashes: bytes | None = None,
    fields_length: int | None = None,
    description_length: int | None = None,
    header_zero: int = 0,
    **trailer: int,
) -> bytes:
    """A shard with right checksums and whatever else is asked for."""
    packed = msgpack.packb(fields) if packed_fields is None else packed_fields
    length = len(packed) if fields_length is None else fields_length
    header = struct.pack(
        "<8sHBBI16sI", b"\x89SHD\r\n\x1a\n", 0, 1, header_zero, 3, FORGED_ID, length
    )
    body = header + packed + xx(header + packed) + b"".join(records)
    if index is None:
        text = msgpack.packb(described) if packed_described is None else packed_described
        size = len(text) if description_length is None else description_length
        index = struct.pack("<I", size) + text
        sizes = [len(data) - 16 for data in records] if lengths is None else lengths
        index += struct.pack(f"<{len(sizes)}I", *sizes)
        index += bytes(4 * len(records)) if hashes is None else hashes
        index += columns
    end = struct.pack(
        "<QQIIHBB16s",
        trailer.get("offset", len(body)),
        trailer.get("length", len(index)),
        trailer.get("count", len(records)),
        trailer.get("number", 3),
        0,
        1,
        trailer.get("zero", 0),
        FORGED_ID,
    )
    return body + index + end + xx(index + end) + b"\x89DHS\r\n\x1a\n"
