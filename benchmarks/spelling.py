"""The options of shardio as the shardio that runs them spells them: `against` runs older ones, too.

Whatever a commit renames of what benchmarks use gets a line here, and both commits run one program.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

# What became of an option of ShardLoader: its name before.
_BEFORE = {"num_workers": "workers", "prefetch_factor": "prefetch"}


def shard_loader(dataset: Any, **options: Any) -> Any:
    """A ShardLoader with these options, given by their present names."""
    from shardio import ShardLoader

    known = inspect.signature(ShardLoader).parameters
    return ShardLoader(
        dataset,
        **{name if name in known else _BEFORE[name]: value for name, value in options.items()},
    )


# The options that are given within one, as an object of this class; before, by their own names.
_GROUPS = {
    "order": ("Order", {"spans": "canonical_workers", "unit": "unit"}),
    "storage": ("Storage", {name: name for name in ("root", "buffer_bytes", "verify_open")}),
}


def grouped(function: Any, **options: Any) -> dict[str, Any]:
    """These options of ShardDataset or shardio.open, by the names that it takes."""
    import shardio

    known = inspect.signature(function).parameters
    found = dict(options)
    for group, (kind, before) in _GROUPS.items():
        given = {name: found.pop(name) for name in before if name in found}
        if given and group in known:
            found[group] = getattr(shardio, kind)(**given)
        else:
            found |= {before[name]: value for name, value in given.items()}
    return found


def native() -> Any:
    """The module that says whether the compiled core is there."""
    try:
        return import_module("shardio.native")
    except ModuleNotFoundError:
        return import_module("shardio.engine")


def unshuffled() -> dict[str, Any]:
    """The option of a ShardDataset that reads in the order of storage."""
    from shardio import ShardDataset

    mode = "shuffle" in inspect.signature(ShardDataset).parameters
    return {"shuffle": False} if mode else {"shuffle_buffer": 1}
