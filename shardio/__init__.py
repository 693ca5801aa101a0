"""shardio: millions of small image files as a few large shards, streamed into PyTorch training.

Names load when they are first used: `import shardio` costs neither torch (1 s) nor PIL.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("shardio runs on Linux and macOS; on Windows it runs within WSL")

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from . import device as device
    from . import meter as meter
    from .benching import bench
    from .collating import collate
    from .dataset import ShardDataset
    from .device import normalize
    from .errors import (
        BusyError,
        CollateError,
        DamageError,
        DecodeError,
        DependencyError,
        EpochError,
        ExistsError,
        NotPackedError,
        OptionError,
        RowError,
        SampleError,
        ShardioError,
        SourceChangedError,
        SourceError,
        StateError,
        StorageError,
        VersionError,
        WorkerError,
    )
    from .exporting import export
    from .image import CenterCrop, RandomResizedCrop
    from .indexing import index
    from .loader import ShardLoader
    from .packing import commit, pack
    from .sequence import open as open
    from .unpacking import unpack
    from .verifying import verify
    from .writer import Writer

# Each name and the module it lives in. No name is a module's: the module would replace it.
_HOMES = {
    "BusyError": "errors",
    "CenterCrop": "image",
    "CollateError": "errors",
    "DamageError": "errors",
    "DecodeError": "errors",
    "DependencyError": "errors",
    "EpochError": "errors",
    "ExistsError": "errors",
    "NotPackedError": "errors",
    "OptionError": "errors",
    "RandomResizedCrop": "image",
    "RowError": "errors",
    "SampleError": "errors",
    "ShardDataset": "dataset",
    "ShardLoader": "loader",
    "ShardioError": "errors",
    "SourceChangedError": "errors",
    "SourceError": "errors",
    "StateError": "errors",
    "StorageError": "errors",
    "VersionError": "errors",
    "WorkerError": "errors",
    "Writer": "writer",
    "bench": "benching",
    "collate": "collating",
    "commit": "packing",
    "export": "exporting",
    "index": "indexing",
    "normalize": "device",
    "open": "sequence",
    "pack": "packing",
    "unpack": "unpacking",
    "verify": "verifying",
}

# All of them but `open`: `from shardio import *` is not to replace the builtin one.
__all__ = [
    "BusyError",
    "CenterCrop",
    "CollateError",
    "DamageError",
    "DecodeError",
    "DependencyError",
    "EpochError",
    "ExistsError",
    "NotPackedError",
    "OptionError",
    "RandomResizedCrop",
    "RowError",
    "SampleError",
    "ShardDataset",
    "ShardLoader",
    "ShardioError",
    "SourceChangedError",
    "SourceError",
    "StateError",
    "StorageError",
    "VersionError",
    "WorkerError",
    "Writer",
    "bench",
    "collate",
    "commit",
    "export",
    "index",
    "normalize",
    "pack",
    "unpack",
    "verify",
]


# Modules with names of their own: `shardio.device.prefetch`, `shardio.meter.watch`.
_MODULES = ("device", "meter")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
