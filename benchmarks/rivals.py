"""The other ways to store the same images, each written and read as its own users are told to.

folder    one file per image, listed once, opened when asked for: a plain torchvision ImageFolder
packed    the floor: all files one behind another, offsets in memory; no names, no checks
lmdb      the classic PyTorch recipe: key = number, value = the image's bytes; labels beside it
tar       the folder by `tar cf`
litdata   optimize() into chunks of 64 MB (its documentation's size), items (bytes, label)

LitData runs in a virtual environment of its own (benchmarks/setup_rivals), with TMPDIR and HOME of
its own: optimize() deletes $TMPDIR/data. It is imported nowhere else than in its functions here.
"""

from __future__ import annotations

import io
import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .data import Files, listing
from .harness import RIVALS, Contestant

Transform = Callable[..., Any] | None


# --- one file per image ---------------------------------------------------------------------------


class Folder:
    """Map-style, for DataLoader(shuffle=True): (image, label)."""

    def __init__(self, folder: str, transform: Transform = None) -> None:
        self.files, self.transform = listing(folder), transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        path, label = self.files[index]
        with open(path, "rb") as file:
            if self.transform is None:
                return file.read(), label
            return decoded(file, self.transform), label


def decoded(file: Any, transform: Callable[..., Any]) -> Any:
    """An open file or bytes through shardio's own crop, so that all decode and resize alike."""
    from PIL import Image

    source = io.BytesIO(file) if isinstance(file, bytes) else file
    return transform(Image.open(source), draw=random.getrandbits(64))


# --- one packed file ------------------------------------------------------------------------------


def write_packed(files: Files, out: Path) -> list[tuple[int, int]]:
    """All bytes one behind another; (start, stop) of each."""
    pairs, at = [], 0
    with open(out, "wb") as target:
        for path, _ in files:
            data = Path(path).read_bytes()
            target.write(data)
            pairs.append((at, at + len(data)))
            at += len(data)
        os.fsync(target.fileno())
    return pairs


# --- LMDB -----------------------------------------------------------------------------------------


def write_lmdb(folder: str | Path, out: Path) -> None:
    """By another process: a transaction holds its pages in memory, and the heap keeps them."""
    with Contestant("rivals:lmdb_writer", folder=str(folder)) as one:
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


class Lmdb:
    """Map-style; the environment is opened by the process that reads it, as the recipe says."""

    def __init__(self, path: str, labels: list[int], transform: Transform = None) -> None:
        self.path, self.labels, self.transform = path, labels, transform
        self._txn: Any = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        if self._txn is None:
            self._txn = open_lmdb(self.path).begin()
        data = self._txn.get(b"%08d" % index)
        if self.transform is None:
            return data, self.labels[index]
        return decoded(data, self.transform), self.labels[index]


# --- tar ------------------------------------------------------------------------------------------


def write_tar(folder: str | Path, out: str | Path) -> None:
    subprocess.run(["tar", "cf", str(out), "-C", str(folder), "."], check=True)


# --- LitData --------------------------------------------------------------------------------------


def litdata_contestant(function: str, scratch: Path, **options: Any) -> Contestant:
    home = scratch / "litdata-home"
    home.mkdir(exist_ok=True)
    return Contestant(function, python=RIVALS, home=str(home), **options)


def write_litdata(folder: Path, out: Path, scratch: Path) -> None:
    with litdata_contestant("rivals:optimize", scratch, folder=str(folder)) as one:
        one.round(out=str(out))


def optimize(folder: str, jobs: int = 2) -> Callable[..., dict[str, Any]]:
    """(a contestant of the rivals' environment)"""
    import litdata

    files = listing(folder)

    def one_round(out: str) -> dict[str, Any]:
        began = time.perf_counter()
        litdata.optimize(
            fn=_item, inputs=files, output_dir=out, chunk_bytes="64MB", num_workers=jobs,
            mode="overwrite", verbose=False,
        )  # fmt: skip
        return {"seconds": time.perf_counter() - began}

    return one_round


def _item(file: tuple[str, int]) -> tuple[bytes, int]:
    return Path(file[0]).read_bytes(), file[1]


def litdata_dataset(path: str, *, shuffle: bool, transform: Transform = None) -> Any:
    """Items (image, label); a subclass with a transform is how its documentation decodes."""
    from litdata import StreamingDataset

    class Images(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            image, label = super().__getitem__(index)
            # bytes(): what it hands out is a memoryview, which its workers cannot pickle.
            image = bytes(image)
            return (image if transform is None else decoded(image, transform)), label

    return Images(path, shuffle=shuffle) if shuffle or transform else StreamingDataset(path)
