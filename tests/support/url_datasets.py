"""Datasets that tests read by URL, and the programs that read them.

The web server is a fixture of tests/storage/conftest.py.
"""

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

import shardio
from shardio import Order, ShardDataset, Storage
from shardio.storage import ranges
from shardio.storage.client import Request, Store
from shardio.storage.location import locate
from shardio.storage.transfers import Figures
from support import LIMIT_S, servers, warm_python
from support.fault_proxy import FaultProxy, fault_proxy

RECORDS = 120
SHARD_BYTES = 400_000  # six shards
FILE_BYTES = 3 << 20
BLOB = bytes(range(256)) * (1 << 13)


def image(number: int) -> bytes:
    """Make bytes that need no decoding, of a size of their own."""
    draw = np.random.default_rng(number)
    return b"\xff\xd8\xff" + draw.bytes(int(draw.integers(100, 40_000)))


def content() -> bytes:
    """Make the bytes of `file`."""
    return np.random.default_rng(0).bytes(FILE_BYTES)


def write_images(
    folder: Path, count: int, image: Callable[[int], bytes], shard_size: int | str, **options: Any
) -> None:
    """Write a dataset of images that are numbered by their labels."""
    fields = {"image": "image", "label": "int"}
    with shardio.Writer(folder, fields=fields, shard_size=shard_size, **options) as writer:
        for number in range(count):
            writer.write({"__key__": f"{number}.jpg", "image": image(number), "label": number})


@contextlib.contextmanager
def served(folder: Path) -> Iterator[FaultProxy]:
    """Serve a folder by a web server, through a fault proxy."""
    with servers.nginx(folder) as web, fault_proxy(web.port) as proxy:
        yield proxy


def write(folder: Path, format: str = "record") -> None:
    """Write the dataset that most tests here read."""
    write_images(folder, RECORDS, image, SHARD_BYTES, format=format)


def dataset(path: Any, **options: Any) -> ShardDataset:
    """Give batches of images and labels, undecoded, through windows."""
    return ShardDataset(
        str(path),
        batch_size=8,
        decode=None,
        fields=("image", "label"),
        **{"shuffle_buffer": 30, "order": Order(spans=4, unit=4)} | options,
    )


def batches(loader: Any) -> list[Any]:
    return [(images.tolist(), labels.tolist()) for images, labels in loader]


def local(folder: Path, **options: Any) -> list[Any]:
    """Read what an epoch has by the disk."""
    return batches(DataLoader(dataset(folder / "data", **options), batch_size=None))


def quick(url: str, timeout_s: float = 8.0, **options: Any) -> Any:
    """Open a dataset whose requests are given up soon."""
    return shardio.open(url, decode=None, storage=Storage(timeout_s=timeout_s, **options))


def opened(proxy: FaultProxy, timeout_s: float = 20.0) -> Any:
    """Open `file`."""
    return locate(proxy.url, Storage(timeout_s=timeout_s)).open("file")


def request(proxy: FaultProxy, start: int, length: int, timeout_s: float = 20.0) -> Request:
    """Make a request for bytes of `file`."""
    return Request(Store(proxy.url, timeout_s=timeout_s), "file", start, length)


def figures() -> Figures:
    """Return what the requests of this process came to."""
    found = ranges.figures()
    assert found is not None
    return found


def start(program: str, *arguments: str) -> "subprocess.Popen[str]":
    """Start a program; its stdin and stdout are pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def run(
    program: str,
    *arguments: str,
    flags: Sequence[str] = (),
    warm: bool = False,
    **options: Any,
) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end, which must be a good one. flags: of Python. warm: warm_python."""
    line = [*flags, "-c", textwrap.dedent(program), *arguments]
    done = subprocess.run(
        warm_python.command(*line) if warm else [sys.executable, *line],
        **{"capture_output": True, "text": True, "timeout": LIMIT_S} | options,
    )
    assert done.returncode == 0, done.stderr
    return done
