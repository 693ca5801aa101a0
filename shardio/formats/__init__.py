"""The formats a shard can have, by the name in the manifest."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import OptionError
from . import record
from .base import Opening, Shard, ShardInfo

FORMATS: dict[str, Callable[[Opening, ShardInfo], Shard]] = {
    "record": record.open_shard,
}
PLANNED = {"lmdb": "LMDB shards come with a later version"}


def open_shard(format: str, opening: Opening, info: ShardInfo) -> Shard:
    """Open one shard. Raises FileNotFoundError, StorageError, DamageError, VersionError."""
    return FORMATS[format](opening, info)


def check_format(name: str) -> str:
    """The name, if a format has it. Raises OptionError."""
    if name not in FORMATS:
        known = ", ".join(FORMATS)
        why = PLANNED.get(name, "no format has this name")
        raise OptionError(f"format {name!r}: {why}; available: {known}")
    return name
