"""What the parts of an index found in their shards, noted until its last step has it all.

`.shardio-scan-00012.json` is of shard 12, one JSON object: of which dataset and version of shardio
it is, the state of the file that was scanned (`Found.marks`), and what is known of the shard but
for its index, which has its name already. A note that does not fit is none: the shard is scanned.
"""

from __future__ import annotations

import contextlib
import json
import os

from .._version import __version__
from ..errors import ShardioError
from ..formats.base import ShardInfo
from ..formats.foreign.base import MAX_SIDECAR, sidecar_checksum, sidecar_name
from ..storage import local
from ..storage.local import LocalDirectory
from . import journal
from .scan import FieldValues, Found, Scanned

_LIMIT = 64 << 20  # bytes of a note: a shard may have many fields, and classes


def save(folder: str, found: Found, dataset_id: bytes, scanned: Scanned) -> None:
    """Note what was found in a shard, whose index is there."""
    info = scanned.info
    if info is None:
        return
    value = _identity(found, dataset_id, info.number) | {
        "info": [info.records, info.size, info.sha256.hex(), info.index_checksum],
        "seen": {name: [sorted(one.types), one.images] for name, one in scanned.seen.items()},
        "blobs": scanned.blobs,
        "classes": scanned.classes,
        "row_group": scanned.row_group,
    }
    name = journal.SCAN_NOTE.format(f"{info.number:05d}")
    local.write_file(folder, name, json.dumps(value).encode())


def load(folder: str, found: Found, dataset_id: bytes, number: int) -> Scanned | None:
    """Return what is noted of a shard; None where no note fits, or its index is not right."""
    place = LocalDirectory(folder)
    with contextlib.suppress(FileNotFoundError, ShardioError, LookupError, TypeError, ValueError):
        value = json.loads(place.read(journal.SCAN_NOTE.format(f"{number:05d}"), _LIMIT))
        wanted = _identity(found, dataset_id, number)
        if not wanted["mark"] or {name: value[name] for name in wanted} != wanted:
            return None
        records, size, sha256, sealed = value["info"]
        if sidecar_checksum(place.read(sidecar_name(number, sealed), MAX_SIDECAR)) != sealed:
            return None
        return Scanned(
            ShardInfo(found.names[number], number, records, size, bytes.fromhex(sha256), sealed),
            {
                name: FieldValues(set(types), images)
                for name, (types, images) in value["seen"].items()
            },
            value["blobs"],
            {name: tuple(names) for name, names in value["classes"].items()},
            tuple(value["row_group"]),
        )
    return None


def remove(folder: str) -> None:
    """Remove all notes."""
    for name in os.listdir(folder):
        if journal.is_own_note(folder, name, journal.SCAN_NOTE):
            local.remove(os.path.join(folder, name))


def _identity(found: Found, dataset_id: bytes, number: int) -> dict[str, str]:
    mark = found.marks[number]
    return {"version": __version__, "id": dataset_id.hex(), "mark": mark}
