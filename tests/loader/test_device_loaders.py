"""Loaders with a device: the batches of the CPU, and what they hold and leave, however they end.

Each test runs on the CPU, and on CUDA where there is a GPU.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support import LIMIT_S, programs, small_datasets
from support.device_batches import MEAN, STD
from support.gpu import DEVICES, gpu
from torch.utils.data import DataLoader

from shardio import (
    CenterCrop,
    DecodeError,
    RandomResizedCrop,
    ShardDataset,
    ShardLoader,
    WorkerError,
    prefetch,
)
from shardio.loader import device as device_module
from shardio.loader.normalize import in_two_kernels
from shardio.loader.pinned import locked_bytes
from shardio.storage import descriptors

BATCH, STEPS = 8, 8  # 62 records, so that the last batch is smaller

Batch = tuple[torch.Tensor, torch.Tensor]
devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("device") / "out"
    return small_datasets.make(out, [30, 20, 12], image=small_datasets.jpeg)


def dataset(folder: Path, **options: Any) -> ShardDataset:
    given = {"batch_size": BATCH, "transform": RandomResizedCrop(16, flip=True), "tail": "pad"}
    return ShardDataset(folder, fields=("image", "label"), **(given | options))


def formula(pixels: torch.Tensor, dtype: torch.dtype | None, last: bool | None) -> torch.Tensor:
    """What a device makes of the images of a batch, on the CPU."""
    scale = torch.tensor([1 / (255 * s) for s in STD]).view(1, 3, 1, 1)
    bias = torch.tensor([-m / s for m, s in zip(MEAN, STD, strict=True)]).view(1, 3, 1, 1)
    floats = (pixels.float() * scale + bias).to(dtype or torch.float32)
    if last is None:
        return floats
    memory = torch.channels_last if last else torch.contiguous_format
    return floats.contiguous(memory_format=memory)


def expected(
    folder: Path, epoch: int = 0, dtype: torch.dtype | None = None, **options: Any
) -> list[Batch]:
    plain = dataset(folder, **options)
    plain.set_epoch(epoch)
    return [(formula(images, dtype, True), labels) for images, labels in plain]


def assert_same(found: Iterable[Batch], wanted: Iterable[Batch], device: str) -> None:
    for there, here in zip(found, wanted, strict=True):
        for one, other in zip(there, here, strict=True):
            assert one.device.type == device
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())
            assert torch.equal(one.cpu(), other)


def shard_loader(folder: Path, device: str, workers: int = 2, **options: Any) -> ShardLoader:
    given: dict[str, Any] = {"mean": MEAN, "std": STD, "num_workers": workers} | options
    return ShardLoader(dataset(folder), device=device, **given)


# --- the batches ----------------------------------------------------------------------------------


def by_shard_loader(options: dict[str, Any], train: ShardDataset, device: str) -> Any:
    return ShardLoader(train, device=device, mean=MEAN, std=STD, **options)


def by_data_loader(workers: int, pins: bool, train: ShardDataset, device: str) -> Any:
    pins = pins and device == "cuda"  # without a GPU torch warns, and pins nothing
    loader = DataLoader(train, batch_size=None, num_workers=workers, pin_memory=pins)
    return prefetch(loader, device, mean=MEAN, std=STD)


WAYS: dict[str, Callable[[ShardDataset, str], Any]] = {
    "processes": partial(by_shard_loader, {"num_workers": 2}),
    "copies": partial(by_shard_loader, {"num_workers": 2, "copy": True}),
    "not pinned": partial(by_shard_loader, {"num_workers": 2, "pin": False}),
    "a thread": partial(by_shard_loader, {"num_workers": 0}),
    "the loop itself": partial(by_shard_loader, {"num_workers": 0, "threads": 0, "ahead": 3}),
    "DataLoader": partial(by_data_loader, 0, False),
    "DataLoader, processes": partial(by_data_loader, 2, False),
    "DataLoader, pinned": partial(by_data_loader, 2, True),
}


@devices
@pytest.mark.parametrize("way", WAYS)
def test_every_loader_gives_the_batches_of_the_cpu(folder: Path, way: str, device: str) -> None:
    train = dataset(folder)
    loader = WAYS[way](train, device)
    for epoch in range(2):
        train.set_epoch(epoch)
        assert_same(list(loader), expected(folder, epoch), device)
    if isinstance(loader, ShardLoader):
        loader.close()


@devices
@pytest.mark.parametrize("where", ["ram", "device"])
def test_resident_data_gives_the_batches_of_the_cpu(folder: Path, where: Any, device: str) -> None:
    train = dataset(folder, transform=CenterCrop(12))
    options: dict[str, Any] = {"mean": MEAN, "std": STD, "dtype": torch.bfloat16}
    with ShardLoader(train, num_workers=2, resident=where, device=device, **options) as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            wanted = expected(folder, epoch, torch.bfloat16, transform=CenterCrop(12))
            assert_same(list(loader), wanted, device)


@devices
@pytest.mark.parametrize("last", [True, False, None])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_and_layout(
    folder: Path, dtype: torch.dtype | None, last: bool | None, device: str
) -> None:
    pixels = [images for images, _ in islice(dataset(folder), 3)]
    pixels.append(pixels[0].contiguous())
    for options in ({}, {"pin": False}):
        found = prefetch(
            pixels, device, mean=MEAN, std=STD, dtype=dtype, channels_last=last, **options
        )
        wanted = [(formula(images, dtype, last),) for images in pixels]
        assert_same([(images,) for images in found], wanted, device)


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_two_kernels_round_as_four(device: str, dtype: torch.dtype) -> None:
    """All values of a pixel, with 200 means and stds, in each layout of memory."""
    draws = torch.Generator().manual_seed(0)
    every = torch.arange(256, dtype=torch.uint8).repeat(200, 1).view(1, 200, 16, 16)
    scale, bias = (torch.rand(1, 200, 1, 1, generator=draws) - 0.5 for _ in range(2))
    layouts = every, every.contiguous(memory_format=torch.channels_last), every.transpose(2, 3)
    for there in layouts:
        expected = there.to(torch.float32).mul_(scale).add_(bias).to(dtype)
        made = in_two_kernels(there.to(device), scale.to(device), bias.to(device), dtype)
        assert made.dtype == dtype and made.stride() == expected.stride()
        assert torch.equal(made.cpu(), expected)


@devices
def test_two_loaders_at_once(folder: Path, device: str) -> None:
    """The processes of the second are forked while copies of the first are under way."""
    first, second = shard_loader(folder, device), shard_loader(folder, device)
    second.set_epoch(1)
    with first, second:
        pairs = list(zip(first, second, strict=True))
    assert_same([one for one, _ in pairs], expected(folder, 0), device)
    assert_same([other for _, other in pairs], expected(folder, 1), device)


@devices
def test_a_pass_goes_on_from_a_state(folder: Path, device: str) -> None:
    with shard_loader(folder, device) as loader:
        taken = list(islice(loader, 3))
        state = loader.state_dict()
    with shard_loader(folder, device, workers=0) as loader:
        loader.load_state_dict(state)
        assert_same([*taken, *loader], expected(folder), device)


# --- what is held ---------------------------------------------------------------------------------


@devices
def test_locked_memory_is_bounded_and_given_back(folder: Path, device: str) -> None:
    before = locked_bytes()
    with shard_loader(folder, device) as loader:
        for epoch in range(4):
            loader.set_epoch(epoch)
            assert len(list(loader)) == STEPS
            found = loader.explain()
            assert found.buffers <= found.ring + 3
            if device == "cpu":
                assert found.locked_bytes == found.staging_bytes == 0
            else:
                ours = found.locked_bytes - found.staging_bytes - before
                assert 0 < ours <= found.batch_bytes
    assert locked_bytes() == before and loader.explain().staging_bytes == 0


@gpu
def test_next_maps_and_locks_no_buffer_and_buffers_are_copied_as_they_lie(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            threads.add(threading.current_thread().name)
            return function(*args, **options)

        return call

    monkeypatch.setattr(device_module, "page_lock", noted(device_module.page_lock))
    monkeypatch.setattr(descriptors, "map_memory", noted(descriptors.map_memory))
    train = dataset(folder, transform=CenterCrop(128))
    with ShardLoader(train, num_workers=2, device="cuda", mean=MEAN, std=STD) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            wanted = expected(folder, epoch, transform=CenterCrop(128))
            assert_same(list(loader), wanted, "cuda")
        found = loader.explain()
        assert found.locked_bytes - found.staging_bytes > 3 * 128 * 128 * BATCH
        assert found.staging_bytes < 128 * 128  # labels
    assert threads == {"shardio-buffers_0"} and locked_bytes() == 0


@gpu
def test_memory_of_the_gpu_is_that_of_one_epoch(folder: Path) -> None:
    seen = []
    with shard_loader(folder, "cuda", dtype=torch.bfloat16) as loader:
        for epoch in range(5):
            loader.set_epoch(epoch)
            for images, _ in loader:
                images.float().sum()
            torch.cuda.synchronize()
            seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
            del images
    assert seen[2:] == [seen[1]] * 3


class Collects:
    """A transform that collects garbage, as a process does now and then."""

    def __init__(self, crop: Any) -> None:
        self.crop = crop

    def __call__(self, image: Any) -> Any:
        gc.collect()
        return self.crop(image)


class Tells:
    """An object that writes which process ended it, as a tensor of CUDA calls CUDA there."""

    def __init__(self, path: Path) -> None:
        self.path, self.itself = path, self

    def __del__(self) -> None:
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()}\n")


def test_a_loader_process_does_not_collect_the_trainers_garbage(
    folder: Path, tmp_path: Path
) -> None:
    gc.disable()
    try:
        Tells(tmp_path / "ended")  # a cycle, which only the collector ends
        train = dataset(folder, transform=Collects(CenterCrop(12)))
        with ShardLoader(train, num_workers=1, multiprocessing_context="fork") as loader:
            next(iter(loader))
    finally:
        gc.enable()
    gc.collect()
    assert (tmp_path / "ended").read_text() == f"{os.getpid()}\n"


# --- ends -----------------------------------------------------------------------------------------


@devices
def test_a_pass_that_is_left_early_leaves_nothing(folder: Path, device: str) -> None:
    with shard_loader(folder, device, ahead=3) as loader:
        for taken, _ in enumerate(loader, 1):
            if taken == 3:
                break
        loader.set_epoch(1)
        assert_same(list(loader), expected(folder, 1), device)
    gc.collect()
    assert locked_bytes() == 0


@devices
def test_a_process_that_is_killed_ends_the_pass_and_unlocks_all(folder: Path, device: str) -> None:
    with shard_loader(folder, device) as loader:
        iterator = iter(loader)
        got = [next(iterator)]
        pid = loader.explain().pids[1]
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(WorkerError, match=rf"pid {pid}\) was killed by SIGKILL"):
            while True:
                got.append(next(iterator))
        assert locked_bytes() == 0  # though copies may be under way
        assert_same(got, expected(folder)[: len(got)], device)
        loader.set_epoch(1)
        assert_same(list(loader), expected(folder, 1), device)


@devices
@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_is_an_error_after_the_batches_before_it(
    tmp_path: Path, workers: int, device: str
) -> None:
    folder = small_datasets.make(
        tmp_path / "out", [40], image=lambda i: b"no image" if i == 29 else small_datasets.jpeg(i)
    )
    train = dataset(folder, shuffle=False)
    with ShardLoader(train, num_workers=workers, device=device) as loader:
        got: list[int] = []
        with pytest.raises(DecodeError, match="k/000029"):
            for _, labels in loader:
                got += labels.tolist()
    assert got == [i % 3 for i in range(24)]


@devices
def test_an_interrupt_leaves_a_state_to_go_on_from(folder: Path, device: str) -> None:
    taken: list[Any] = []

    def train(batches: Iterator[Any]) -> None:
        for batch in batches:
            taken.append(batch)
            if len(taken) == 3:
                signal.raise_signal(signal.SIGINT)

    with shard_loader(folder, device) as loader:
        with pytest.raises(KeyboardInterrupt):
            train(iter(loader))
        loader.load_state_dict(loader.state_dict())
        train(iter(loader))
    assert_same(taken, expected(folder), device)


PROGRAM = """
import sys
from shardio import CenterCrop, ShardDataset, ShardLoader

train = ShardDataset(sys.argv[1], batch_size=8, fields=("image", "label"), transform=CenterCrop(12))
loader = ShardLoader(train, num_workers=2, device=sys.argv[2], mean=0.5, ahead=2)
batches = iter(loader)
kept = [next(batches) for _ in range(3)]
print("and leaves", flush=True)
"""


@gpu  # on the CPU there is nothing to unlock, and to start it takes seconds
def test_a_program_that_ends_in_a_pass_ends_silently(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = programs.run(tmp_path / "program.py", folder, "cuda", limit_s=LIMIT_S)
    assert (done.code, done.output, done.left) == (0, "and leaves\n", []), done
