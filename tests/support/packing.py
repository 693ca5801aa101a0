"""Options of `pack` as tests write them: flat, and in the groups that it takes."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from shardio.packing.options import GROUPS


def grouped(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with those of a group in it."""
    found = dict(flat)
    for group, kind in GROUPS.items():
        given = {one.name: found.pop(one.name) for one in fields(kind) if one.name in found}
        if given:
            found[group] = kind(**given)
    return found
