"""The formats a shard can have, by the name in the manifest."""

from __future__ import annotations

from ..errors import OptionError
from . import record

FORMATS = {"record": record.RecordShard}
PLANNED = {"lmdb": "LMDB shards come with a later version"}


def check_format(name: str) -> str:
    """The name, if a format has it. Raises OptionError."""
    if name not in FORMATS:
        known = ", ".join(FORMATS)
        why = PLANNED.get(name, "no format has this name")
        raise OptionError(f"format {name!r}: {why}; available: {known}")
    return name
