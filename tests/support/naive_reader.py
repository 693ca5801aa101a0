"""The reader that docs/format.md prints, run as it stands there."""

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shardio.formats.record import RecordShard

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "format.md"


def naive_reader() -> dict[str, Any]:
    """The reader in docs/format.md, which imports no shardio."""
    [code] = re.findall(r"```python\n(import struct.*?)```", DOCS.read_text(), re.DOTALL)
    assert "shardio" not in code
    assert len(code.strip().splitlines()) <= 32
    scope: dict[str, Any] = {}
    exec(compile(code, str(DOCS), "exec"), scope)
    return scope


def seed_of(shard: RecordShard) -> int:
    """The seed of a shard's record 0, as docs/format.md has it."""
    place = struct.pack("<I", shard.number) + shard.dataset_id
    return int(xxhash.xxh3_64_intdigest(place) >> 32 << 32)


def untagged(value: Any) -> Any:
    """What tests/golden/make.py wrote for values that JSON cannot say."""
    if isinstance(value, list):
        return [untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$bytes": data}:
            return bytes.fromhex(data)
        case {"$repeat": [data, count]}:
            return bytes.fromhex(data) * count
        case {"$float": data}:
            return struct.unpack(">d", bytes.fromhex(data))[0]
        case {"$array": [dtype, shape, data]}:
            return np.frombuffer(bytes.fromhex(data), dtype).reshape(shape)
    return {name: untagged(item) for name, item in value.items()}
