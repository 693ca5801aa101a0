"""A finished shard, and the note of it, so that nobody must read it again to know it.

A note is one line of JSON, and the SHA-256 of that line. It says what the manifest will say of a
shard, and what was left out of it:

    .shardio-sent-00000.json        of a shard that is in an object store (uploads.py)
    .shardio-built-SHARD.json       of one that a part built in this directory, by its file name

The second holds the file's time of change, too. A file that was written since is read whole, like
one without a note.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass, field
from typing import Any

from ..errors import DamageError, StorageError
from ..formats.base import ShardInfo
from ..names import key_bytes, key_text
from ..storage import local
from ..storage.local import LocalDirectory
from .journal import NOTE_BUILT, NOTE_SENT
from .reencode import Reencoded
from .sources.base import Problem

_MAX_NOTE_BYTES = 1 << 30


@dataclass
class Built:
    """A shard that was built or reused, or why it could not be."""

    info: ShardInfo | None  # None: not built, because of `problems`
    blob_bytes: int = 0
    reused: bool = False  # an earlier, interrupted packing had finished it
    reencoded: Reencoded = field(default_factory=Reencoded)
    problems: list[Problem] = field(default_factory=list)
    uploaded: bool = False  # it is in the object store that is packed into, and not here


def note_sent(directory: str, dataset_id: bytes, one: Built) -> None:
    """Write the note of a shard that was uploaded."""
    assert one.info is not None
    _write(directory, NOTE_SENT.format(f"{one.info.number:05d}"), dataset_id, one, None)


def note_built(directory: str, dataset_id: bytes, one: Built) -> None:
    """Write the note of a shard that has its name in the directory."""
    assert one.info is not None
    changed_ns = os.stat(os.path.join(directory, one.info.name)).st_mtime_ns
    _write(directory, NOTE_BUILT.format(one.info.name), dataset_id, one, changed_ns)


def read_sent(directory: str, name: str, dataset_id: bytes) -> Built | None:
    """Return what a note says of an uploaded shard; None where it is damaged, or not of it."""
    found = _read(directory, name, dataset_id)
    if found is not None:
        found[0].uploaded = True
    return found and found[0]


def read_built(directory: str, shard: str, dataset_id: bytes) -> Built | None:
    """Return what the note of a shard says; None where there is none, or it is not of this file."""
    found = _read(directory, NOTE_BUILT.format(shard), dataset_id)
    if found is None or (info := found[0].info) is None:
        return None
    status = os.stat(os.path.join(directory, shard))
    same = (info.name, info.size, found[1]) == (shard, status.st_size, status.st_mtime_ns)
    return found[0] if same else None


def _write(
    directory: str, name: str, dataset_id: bytes, one: Built, changed_ns: int | None
) -> None:
    assert one.info is not None
    value = {
        "dataset": dataset_id.hex(),
        "shard": dataclasses.asdict(one.info) | {"sha256": one.info.sha256.hex()},
        "blob_bytes": one.blob_bytes,
        "tiles": one.reencoded.tiles,
        "problems": [[key_text(key), why] for key, why in one.problems],
        "changed_ns": changed_ns,
    }
    line = json.dumps(value).encode() + b"\n"
    seal = hashlib.sha256(line).hexdigest().encode()
    local.write_file(directory, name, line + seal)


def _read(directory: str, name: str, dataset_id: bytes) -> tuple[Built, int | None] | None:
    """Return what a note says, and when the file was changed; None where it says nothing of use."""
    try:
        data = LocalDirectory(directory).read(name, _MAX_NOTE_BYTES)
        line, seal = data[:-64], data[-64:]
        value: Any = json.loads(line)
        if hashlib.sha256(line).hexdigest().encode() != seal:
            return None
        if value["dataset"] != dataset_id.hex():
            return None
        shard = value["shard"] | {"sha256": bytes.fromhex(value["shard"]["sha256"])}
        problems = [(key_bytes(key), why) for key, why in value["problems"]]
        reencoded = Reencoded(tiles=value["tiles"])
        built = Built(ShardInfo(**shard), value["blob_bytes"], True, reencoded, problems)
        return built, value["changed_ns"]
    except (OSError, DamageError, StorageError, LookupError, TypeError, ValueError):
        return None
