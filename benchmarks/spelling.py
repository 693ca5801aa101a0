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
