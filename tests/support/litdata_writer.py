"""Writes datasets as LitData's `optimize` does; it shares no line with the reader."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LEAF = {"type": None, "context": None, "children_spec": []}


def spec(*names: str) -> str:
    children = [LEAF] * len(names)
    top = {"type": "builtins.dict", "context": json.dumps(names), "children_spec": children}
    return json.dumps([1, top])


def item(leaves: Sequence[bytes]) -> bytes:
    return struct.pack(f"<{len(leaves)}I", *map(len, leaves)) + b"".join(leaves)


def chunk(items: Sequence[bytes]) -> bytes:
    offsets = [4 + 4 * (len(items) + 1)]
    for one in items:
        offsets.append(offsets[-1] + len(one))
    return struct.pack(f"<{len(offsets) + 1}I", len(items), *offsets) + b"".join(items)


def save(folder: Path, formats: Mapping[str, str], items: Sequence[bytes], **config: Any) -> Path:
    """One chunk of items, and its index.json."""
    path, data = folder / "chunk-0-0.bin", chunk(items)
    path.write_bytes(data)
    given = {"data_format": [*formats.values()], "data_spec": spec(*formats), "compression": None}
    row = {"filename": path.name, "chunk_size": len(items), "chunk_bytes": len(data), "dim": None}
    (folder / "index.json").write_text(json.dumps({"chunks": [row], "config": given | config}))
    return path
