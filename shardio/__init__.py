"""Pack millions of small image files into a few large shards, and stream them into training.

Pack
    pack               Pack a folder of images, or another source.
    SourceOptions      Choose what of a source is packed: pack(read=...).
    ImageOptions       Choose how images are written into shards: pack(images=...).
    PlanOptions        Choose which record goes to which shard: pack(plan=...).
    plan               List a source once, for all parts of a job array.
    commit             Commit what the parts of a job array packed.
    Writer             Write samples of any origin, one by one, as a dataset.
    index              Make a dataset of files that another tool wrote, where they are.

Train
    ShardDataset       Stream a dataset, shuffled, to DataLoader or ShardLoader.
    Order              Choose the spans and units that its order is cut into.
    Skip               Choose how many records that cannot be read may be skipped.
    Storage            Say where its data lies, and how far stored bytes are trusted.
    ShardLoader        Make batches ahead, in processes and threads: the fast path.
    RandomResizedCrop  Crop a random part of each image, for training.
    CenterCrop         Crop the centre of each image, for validation.
    collate            Stack samples to a batch.
    EncodedImages      Hold the image files of a batch in one buffer, as decode=None gives them.
    EncodedCrops       Hold those that the device decodes and crops, as decode="cuda" gives them.
    normalize          Cast and normalise a batch of uint8 images, on the CPU or the GPU.
    prefetch           Copy batches to the GPU while the step before computes.
    watch              Measure whether training waits for data, and say why.

Look, check, leave
    open               Open a dataset as a sequence, without torch.
    explain            Say what a job will read, repeat and take of memory, before it runs.
    tune               Say which shuffle buffer to set; mostly: none, keep the default.
    bench              Measure this machine with a dataset, and say which settings to use.
    verify             Check every record of a dataset.
    repair             Write what is whole of a damaged dataset into a new one.
    unpack             Write the files back as they were packed.
    export             Write a dataset in another format.
    copy               Copy a dataset between disks and object stores, checked and resumable.
    RayExecutor        Choose a Ray cluster that does it, or packs: verify(executor=...).

Change
    append             Add what is new in a source to a packed dataset.
    update             Make a packed dataset what its whole source is now.
    annotate           Add fields, or correct values: labels, captions, embeddings.
    drop               Hide records from every reader, as a new version.
    compact            Merge small shards, as if all were packed at once.
    log                List the versions of a dataset.
    diff               Compare two versions: keys added, dropped, changed.
    tag                Name a version, so that `gc` keeps it.
    restore            Make a dataset again what an older version was.
    gc                 Remove files that no version names, and old versions.

What they raise is ShardioError or one of its children, such as DamageError: help("shardio.errors").
PerformanceWarning says what is slow, and how to mend it.
Names load when they are first used: `import shardio` costs neither torch (1 s) nor PIL.

The rooms of the package; each imports only from those above it:

    errors.py names.py stack.py _version.py units.py machine.py notebook.py   ground of all rooms
    native/     the compiled core: its C sources, and the module that says whether it is there
    storage/    bytes at rest: local files, object stores, a cache, atomic writes, locks
    order/      which record comes when: shuffle, epoch, partition, mixture, subsets; no bytes
    images/     bytes to pixels and back: decoding, transforms, JPEG tiles
    formats/    records in a shard: sample, manifest, index; foreign/ has the formats of others
    dataset/    read: fetch, decode, collate, ShardDataset, mixtures, open
    packing/    pack: sources, plan, shards, commit; Writer; index, export, unpack, verify, gc
    loader/     feed: ShardLoader, its processes and buffers; the device
    tuning/     advise: explain, tune, bench, meter, plot
    viewer/     look: records in any order, histograms; the pages and server of `shardio view`
    cli/        the commands
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__
from .errors import BusyError as BusyError
from .errors import CollateError as CollateError
from .errors import DamageError as DamageError
from .errors import DecodeError as DecodeError
from .errors import DependencyError as DependencyError
from .errors import EpochError as EpochError
from .errors import ExistsError as ExistsError
from .errors import NotPackedError as NotPackedError
from .errors import OptionError as OptionError
from .errors import RowError as RowError
from .errors import SampleError as SampleError
from .errors import ShardioError as ShardioError
from .errors import SkipError as SkipError
from .errors import SourceChangedError as SourceChangedError
from .errors import SourceError as SourceError
from .errors import StateError as StateError
from .errors import StorageError as StorageError
from .errors import VersionError as VersionError
from .errors import WorkerError as WorkerError

if sys.platform == "win32":
    raise ImportError("shardio runs on Linux and macOS; on Windows it runs within WSL")

if TYPE_CHECKING:
    from .dataset.collate import collate as collate
    from .dataset.encoded import EncodedImages as EncodedImages
    from .dataset.encoded_crops import EncodedCrops as EncodedCrops
    from .dataset.sequence import open as open
    from .dataset.shard_dataset import ShardDataset as ShardDataset
    from .dataset.skipping import Skip as Skip
    from .images.transforms import CenterCrop as CenterCrop
    from .images.transforms import RandomResizedCrop as RandomResizedCrop
    from .loader.device import prefetch as prefetch
    from .loader.normalize import normalize as normalize
    from .loader.shard_loader import ShardLoader as ShardLoader
    from .native import PerformanceWarning as PerformanceWarning
    from .order.options import Order as Order
    from .packing.annotate import annotate as annotate
    from .packing.append import append as append
    from .packing.commit import commit as commit
    from .packing.compact import compact as compact
    from .packing.copy import copy as copy
    from .packing.drop import drop as drop
    from .packing.export import export as export
    from .packing.gc import gc as gc
    from .packing.index import index as index
    from .packing.options import ImageOptions as ImageOptions
    from .packing.options import PlanOptions as PlanOptions
    from .packing.options import SourceOptions as SourceOptions
    from .packing.pack import pack as pack
    from .packing.pack import plan as plan
    from .packing.ray_executor import RayExecutor as RayExecutor
    from .packing.repair import repair as repair
    from .packing.unpack import unpack as unpack
    from .packing.update import update as update
    from .packing.verify import verify as verify
    from .packing.versions import diff as diff
    from .packing.versions import log as log
    from .packing.versions import restore as restore
    from .packing.versions import tag as tag
    from .packing.writer import Writer as Writer
    from .storage.options import Storage as Storage
    from .tuning.bench import bench as bench
    from .tuning.explain import explain as explain
    from .tuning.meter import watch as watch
    from .tuning.tune import tune as tune

# Names that load when they are used, and the module of each; no name is a module's, which would
# replace it.
_HOMES = {
    "CenterCrop": "images.transforms",
    "EncodedCrops": "dataset.encoded_crops",
    "EncodedImages": "dataset.encoded",
    "ImageOptions": "packing.options",
    "Order": "order.options",
    "PerformanceWarning": "native",
    "PlanOptions": "packing.options",
    "RandomResizedCrop": "images.transforms",
    "ShardDataset": "dataset.shard_dataset",
    "ShardLoader": "loader.shard_loader",
    "RayExecutor": "packing.ray_executor",
    "Skip": "dataset.skipping",
    "SourceOptions": "packing.options",
    "Storage": "storage.options",
    "Writer": "packing.writer",
    "annotate": "packing.annotate",
    "append": "packing.append",
    "bench": "tuning.bench",
    "collate": "dataset.collate",
    "commit": "packing.commit",
    "compact": "packing.compact",
    "copy": "packing.copy",
    "diff": "packing.versions",
    "drop": "packing.drop",
    "explain": "tuning.explain",
    "export": "packing.export",
    "gc": "packing.gc",
    "index": "packing.index",
    "log": "packing.versions",
    "normalize": "loader.normalize",
    "open": "dataset.sequence",
    "pack": "packing.pack",
    "plan": "packing.pack",
    "prefetch": "loader.device",
    "repair": "packing.repair",
    "restore": "packing.versions",
    "tag": "packing.versions",
    "tune": "tuning.tune",
    "unpack": "packing.unpack",
    "update": "packing.update",
    "verify": "packing.verify",
    "watch": "tuning.meter",
}

# What help(shardio) describes, and `from shardio import *` gives: not `open`, which would replace
# the builtin one, nor what is raised, which nobody calls.
__all__ = sorted(_HOMES.keys() - {"PerformanceWarning", "open"})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_HOMES, *(name for name in globals() if name.endswith("Error"))])
