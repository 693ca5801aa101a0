"""To the node's disk first, then read: seconds until the first batch, and until an epoch's end.

What HPC centres advise for many small files: untar them, or copy one file, to the disk of the node.
Beside it the same for shards, and both read where they lie. The source's pages are dropped before
each round, and reads are held to so many requests a second, as those of a file system that many
share; where they cannot be held, the disk is as it is. Source and copy lie on one disk, so its
writes are in it for both. Files that were just written are read from memory, and cost no request.

One epoch: decoded, RandomResizedCrop(224) and mirrored, or whole for CIFAR; two workers, started in
the time. All but shardio's rows read by an image folder's own loader, with shardio's PIL.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardio.errors import StorageError

from . import data
from .cold_rounds import drop
from .harness import BenchmarkError, Result, interleave, ratio
from .rivals import write_tar
from .rivals.base import AHEAD, Guarded, epochs, shards
from .throttle import Group

LIMIT = 3_000  # requests a second, as disks of cloud providers have by default
WORKERS = 2
COPIED, UNTARRED = "shards, copied", "image folder, untarred"
COLUMNS = {
    "copied_s": "copied after, s",
    "first_s": "first batch after, s",
    "epoch_s": "an epoch after, s",
    "reads": "requests",
}

Round = Callable[..., dict[str, Any]]


def compare(
    source: data.Data, result: Result, title: str, folder: Path, batches: dict[str, Any]
) -> None:
    """A table for the images of a folder. batches: their size, and how many images they have."""
    scratch, files = source.scratch, data.listing(folder)
    base = scratch / "staging"
    base.mkdir()
    shards, tar = data.pack(folder, base / "shards"), base / "images.tar"
    write_tar(folder, tar)
    options = batches | {"local": str(base / "local"), "records": len(files)}
    ways = {
        "image folder, where it lies": (folder, "folder", ""),
        "image folder, copied": (folder, "folder", "copy"),
        UNTARRED: (tar, "folder", "untar"),
        "shards, where they lie": (shards, "", ""),
        COPIED: (shards, "", "copy"),
    }
    for module, what in (("zip_stored", "zip"), ("squashfs", "SquashFS image")):
        if module == "zip_stored" or (source.rivals and shutil.which("mksquashfs")):
            image = base / module
            try:
                with Guarded("compare:writing", module=module) as one:
                    one.round(folder=str(folder), out=str(image))
            except BenchmarkError as error:
                result.note(f"{title}, {what}: not measured: {error}")
                continue
            ways[f"{what}, where it lies"] = (image, module, "")
            ways[f"{what}, copied"] = (image, module, "copy")
    with contextlib.ExitStack() as stack:
        group = _held(scratch, stack, result)
        turns = {}
        for name, (path, module, how) in ways.items():
            asked = options | {"source": str(path), "module": module, "how": how}
            if group is not None:
                asked["members"] = group.members
            one = stack.enter_context(Guarded("staging:staged", **asked))
            turns[name] = functools.partial(_turn, path, one, group)
        found = interleave(turns, 1 if source.quick else 3)
    data.remove(base)
    held = f"{LIMIT:,} requests/s" if group is not None else "the disk as it is"
    what = f"{title}, to the node's disk first, cold, {held}, {len(files):,} records"
    result.raw(what, found)
    columns = {key: COLUMNS[key] for key in COLUMNS if group is not None or key != "reads"}
    result.table(what, found, columns, versus=UNTARRED, by="epoch_s")
    for key, of in (("first_s", "the first batch"), ("epoch_s", "an epoch")):
        faster = ratio(found, COPIED, UNTARRED, key)
        result.target(f"{title}, {COPIED}: time until {of}, of {UNTARRED}", faster, 1.0)


def _held(scratch: Path, stack: contextlib.ExitStack, result: Result) -> Group | None:
    try:
        return stack.enter_context(Group(scratch, LIMIT))
    except StorageError as error:
        result.note(f"To the node's disk first: reads could not be held to a limit: {error}")
        return None


def _turn(source: Path, one: Guarded, group: Group | None) -> dict[str, Any]:
    drop(source)
    before = group.reads() if group is not None else 0
    found = one.round()
    return found | ({"reads": group.reads() - before} if group is not None else {})


# --- entry ----------------------------------------------------------------------------------------


def staged(
    source: str, local: str, module: str, how: str, size: int, batch: int, records: int
) -> Round:
    """Copies, opens and reads one epoch. module: of the rivals; "": shardio."""
    import torch.utils.data  # noqa: F401

    import shardio  # noqa: F401

    def one_round() -> dict[str, Any]:
        data.remove(local)
        os.sync()
        began = time.perf_counter()
        path = _copied(source, local, how)
        copied = first = time.perf_counter() - began
        images = 0
        with contextlib.closing(_batches(path, module, size, batch)) as batches:
            for pixels, _ in batches:
                if not images:
                    first = time.perf_counter() - began
                images += len(pixels)
                if images >= records:
                    break
            seconds = time.perf_counter() - began
        return {"copied_s": copied if how else None, "first_s": first, "epoch_s": seconds}

    return one_round


def _copied(source: str, local: str, how: str) -> str:
    """Where to read: what the shell's own commands have written."""
    if not how:
        return source
    if how == "untar":
        os.mkdir(local)
        subprocess.run(["tar", "xf", source, "-C", local], check=True)
    else:
        subprocess.run(["cp", "-r", source, local], check=True)
    return local


def _batches(path: str, module: str, size: int, batch: int) -> Iterator[Any]:
    if module:
        adapter = importlib.import_module(f"benchmarks.rivals.{module}")
        yield from adapter.images(path, size=size, batch=batch, workers=WORKERS)
        return
    from shardio import ShardLoader

    with ShardLoader(
        shards(path, size, batch), num_workers=WORKERS, prefetch_factor=AHEAD
    ) as loader:
        yield from epochs(loader, loader.set_epoch)
