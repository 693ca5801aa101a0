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


def save(folder: Path, formats: Mapping[str, str], *parts: Sequence[bytes], **config: Any) -> Path:
    """A chunk of each part's items, and index.json; the path of the first chunk."""
    rows = []
    for number, items in enumerate(parts):
        path, data = folder / f"chunk-0-{number}.bin", chunk(items)
        path.write_bytes(data)
        row = {"filename": path.name, "chunk_size": len(items), "chunk_bytes": len(data)}
        rows.append(row | {"dim": None})
    given = {"data_format": [*formats.values()], "data_spec": spec(*formats), "compression": None}
    (folder / "index.json").write_text(json.dumps({"chunks": rows, "config": given | config}))
    return folder / "chunk-0-0.bin"
