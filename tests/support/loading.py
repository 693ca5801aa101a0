"""Datasets whose batches say which records they hold, loaders of all sorts, and faults of rows."""

import os
import select
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import shardio
from shardio import ShardDataset, ShardLoader
from support import LIMIT_S
from support.small_datasets import of_order

Packed = Callable[..., Path]
Workers = tuple[int, int]  # processes, threads

COUNTS = [23, 0, 41, 3, 30]
N = sum(COUNTS)
BATCH = 8
STEPS = -(-N // BATCH)

# One thread in the loop, some beside it, processes of more than one.
POOLS = [(0, 0), (0, 2), (2, 2)]
EACH_POOL = pytest.mark.parametrize(
    "workers", POOLS, ids=lambda workers: f"{workers[0]}x{workers[1]}"
)
ONE_OF_EACH = pytest.mark.parametrize(
    "workers", [(0, 0), (0, 1), (2, 2)], ids=["loop", "0x1", "2x2"]
)


def number(data: bytes) -> int:
    return int(data[:6])


def picture(data: bytes) -> Any:
    """As an image, large enough for a batch to lie in a buffer."""
    return np.full((48, 48, 3), number(data) % 251, np.uint8)


class Named(NamedTuple):
    x: Any
    y: Any


class Thing:
    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and differences(self.batch, other.batch) == ""

    __hash__ = None  # type: ignore[assignment]


def odd(samples: list[Any]) -> Any:
    """Tensors of all sorts, in a structure of the user's."""
    images, labels = shardio.collate(samples)
    return {
        "named": Named(images, labels),
        "thing": Thing((images.to(torch.bfloat16) / 3, [labels])),
        "gaps": images[:, :, ::2].to(torch.int32).transpose(1, 3),
        "expanded": labels[:1].expand(50, 60),
        "complex": torch.complex(labels.float(), labels.float()),
        "empty": [images[:0], torch.zeros(0, 4)],
        "bools": images > 100,
        "one": labels[0],
        "large": torch.full((100, 100), int(labels[0]), dtype=torch.float64),
        "text": [f"{label}" for label in labels.tolist()],
    }


TUPLES: dict[str, Any] = {"fields": ("image", "label")}


def stream(folder: Path, **options: Any) -> ShardDataset:
    given = {"batch_size": BATCH, "shuffle_buffer": 30, "spans": 8} | options
    return ShardDataset(folder, **of_order(given))


def pictures(folder: Path, **options: Any) -> ShardDataset:
    return stream(folder, **(TUPLES | {"decode": picture} | options))


def loader_of(dataset: Any, workers: Workers, **options: Any) -> ShardLoader:
    return ShardLoader(dataset, num_workers=workers[0], threads=workers[1], **options)


def differences(found: Any, expected: Any, where: str = "batch") -> str:
    """Where two batches differ, in types, strides or values; "" where they do not."""
    if type(found) is not type(expected):
        return f"{where}: {type(found)} for {type(expected)}"
    if isinstance(found, torch.Tensor):
        for name in ("dtype", "shape"):
            if getattr(found, name) != getattr(expected, name):
                return f"{where}: {name} {getattr(found, name)} for {getattr(expected, name)}"
        # Gaps are left out; and where nothing is, strides lead nowhere.
        gaps = not (0 in expected.stride() or expected.is_contiguous() or _dense(expected))
        if not gaps and expected.numel() and found.stride() != expected.stride():
            return f"{where}: strides {found.stride()} for {expected.stride()}"
        return "" if torch.equal(found, expected) else f"{where}: values differ"
    if isinstance(found, np.ndarray):
        same = found.dtype == expected.dtype and np.array_equal(found, expected)
        return "" if same else f"{where}: arrays differ"
    if isinstance(found, dict):
        if list(found) != list(expected):
            return f"{where}: keys {list(found)} for {list(expected)}"
        parts = [(found[name], expected[name], f"{where}[{name!r}]") for name in found]
    elif isinstance(found, (tuple, list)):
        if len(found) != len(expected):
            return f"{where}: {len(found)} for {len(expected)}"
        parts = [(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(found, expected))]  # noqa: B905
    else:
        if hasattr(found, "tobytes"):  # PIL
            found, expected = found.tobytes(), expected.tobytes()
        return "" if found == expected else f"{where}: {found!r:.50} for {expected!r:.50}"
    return next(filter(None, (differences(*part) for part in parts)), "")


def _dense(tensor: torch.Tensor) -> bool:
    order = sorted(range(tensor.dim()), key=lambda i: (tensor.stride(i), tensor.shape[i]))
    return tensor.permute(order[::-1]).is_contiguous()


def assert_same(found: Any, expected: Any) -> None:
    where = differences(list(found), list(expected))
    assert not where, where


def labels(batches: Any) -> list[list[int]]:
    """Which records batches of `pictures` hold."""
    return [batch[0][:, 0, 0, 0].tolist() for batch in batches]


def pool_of(loader: ShardLoader) -> Any:
    pool = loader._pool
    assert pool is not None
    return pool


class Counts:
    """Writes a byte for each row that is made, and reads how many there are."""

    def __init__(self) -> None:
        self.ends = os.pipe()

    def __call__(self, data: bytes) -> Any:
        os.write(self.ends[1], b".")
        return picture(data)

    def wait(self, rows: int) -> None:
        """Until so many more were made."""
        while rows:
            assert select.select([self.ends[0]], [], [], LIMIT_S)[0], f"{rows} more were not made"
            rows -= len(os.read(self.ends[0], rows))

    def assert_no_more(self) -> None:
        """Once the processes are gone."""
        assert not select.select([self.ends[0]], [], [], 0)[0]

    def close(self) -> None:
        for end in self.ends:
            os.close(end)


def expected_of(folder: Path, epoch: int, **options: Any) -> list[list[int]]:
    dataset = pictures(folder, **options)
    dataset.set_epoch(epoch)
    return labels(dataset)


@dataclass
class Raises:
    """As `picture`, but one record raises."""

    target: int
    error: Any

    def __call__(self, data: bytes) -> Any:
        if number(data) == self.target:
            raise self.error
        return picture(data)


class Hangs:
    """At one record it says so, and waits for a byte that lets it go on."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.hanging, self.gate = os.pipe(), os.pipe()

    def __call__(self, data: bytes) -> Any:
        if number(data) == self.target:
            os.write(self.hanging[1], b".")
            os.read(self.gate[0], 1)
        return picture(data)

    def wait(self) -> None:
        assert os.read(self.hanging[0], 1)

    def let_go(self) -> None:
        os.write(self.gate[1], b".")

    def close(self) -> None:
        for end in (*self.hanging, *self.gate):
            os.close(end)


def in_child(check: Callable[[], bool]) -> int:
    """Fork a child that checks something; its pid."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
