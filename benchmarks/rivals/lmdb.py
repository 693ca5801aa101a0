"""The classic PyTorch recipe: key = number, value = the image's bytes; labels beside it.

Options of the environment as in the recipe that py-lmdb's users copy (rmccorm4/PyTorch-LMDB):
readonly, no lock, no readahead for random reads, opened by the process that reads.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..data import listing
from ..harness import EntryProcess
from .base import Opened, crop, data_loader, epochs


def write_lmdb(folder: str | Path, out: Path) -> None:
    """By another process: a transaction holds its pages in memory, and the heap keeps them."""
    with EntryProcess("rivals:lmdb_writer", folder=str(folder)) as one:
        one.round(out=str(out))


def lmdb_writer(folder: str) -> Callable[..., dict[str, Any]]:
    """One transaction. The folder is listed in the time, as shardio does."""
    import lmdb

    def one_round(out: str) -> dict[str, Any]:
        began = time.perf_counter()
        files = listing(folder)
        size = sum(os.path.getsize(path) for path, _ in files)
        room = size + (64 << 20) + 8192 * len(files)  # a large value wastes up to a page of 4 KiB
        with lmdb.open(out, map_size=room, subdir=False) as env, env.begin(write=True) as txn:
            for i, (path, _) in enumerate(files):
                txn.put(b"%08d" % i, Path(path).read_bytes())
            txn.put(b"__len__", b"%d" % len(files))
        return {"seconds": time.perf_counter() - began}

    return one_round


def open_lmdb(path: str) -> Any:
    import lmdb

    # readahead=False is the recipe's for random reads.
    return lmdb.open(
        path, readonly=True, lock=False, readahead=False, meminit=False, max_spare_txns=1,
        subdir=False,
    )  # fmt: skip


class Lmdb(Opened):
    """The environment is opened by the process that reads it, as the recipe says."""

    def _open(self) -> Callable[[int], Any]:
        entries = open_lmdb(self.path).begin()
        return lambda index: entries.get(b"%08d" % index)


def write(folder: str, out: str) -> None:
    os.makedirs(out)
    lmdb_writer(folder)(out=f"{out}/data.lmdb")
    Path(out, "labels.json").write_text(json.dumps([label for _, label in listing(folder)]))


def images(path: str, *, size: int, batch: int, workers: int) -> Iterator[Any]:
    dataset = Lmdb(f"{path}/data.lmdb", _labels(path), crop(size))
    return epochs(data_loader(dataset, batch=batch, workers=workers, shuffle=True))


def records(path: str) -> Iterator[bytes]:
    with open_lmdb(f"{path}/data.lmdb") as env, env.begin() as entries:
        for i in range(len(_labels(path))):
            yield entries.get(b"%08d" % i)


def _labels(path: str) -> list[int]:
    found: list[int] = json.loads(Path(path, "labels.json").read_text())
    return found
