"""Batches on a device beside the steps that use them: streams, graphs, and what watch says.

What has a meaning on the CPU runs there as well; the rest needs CUDA, is skipped, and says so.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small_datasets
from support.device_batches import MEAN, STD
from support.gpu import DEVICES, gpu
from torch import distributed, nn
from torch.nn import functional

from shardio import CenterCrop, ShardDataset, ShardLoader, prefetch, watch

SIZE, CLASSES = 12, 3

devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("streams") / "out"
    return small_datasets.make(out, [40, 24], image=small_datasets.jpeg)


class Slow:
    """A transform that takes its time, without a core."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.crop = seconds, CenterCrop(SIZE)

    def __call__(self, image: Any) -> Any:
        time.sleep(self.seconds)
        return self.crop(image)


def loader_of(folder: Path, device: str, slow_s: float = 0.0, **options: Any) -> ShardLoader:
    train = ShardDataset(
        folder,
        batch_size=4,
        fields=("image", "label"),
        transform=Slow(slow_s) if slow_s else CenterCrop(SIZE),
    )
    given: dict[str, Any] = {"num_workers": 1, "mean": MEAN, "std": STD} | options
    return ShardLoader(train, device=device, **given)


@cache
def cycles_per_s() -> float:
    """How fast the clock of torch.cuda._sleep goes."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    start.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    end.synchronize()
    return 50_000_000 / start.elapsed_time(end) * 1e3


def compute(device: str, seconds: float) -> None:
    """A step: on CUDA a kernel, for which the host does not wait."""
    if device == "cuda":
        torch.cuda._sleep(int(seconds * cycles_per_s()))
    else:
        time.sleep(seconds)


# --- streams --------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("mean", [None, MEAN])
def test_steps_that_are_behind_read_their_own_batch(device: str, own: bool, mean: Any) -> None:
    draws = torch.Generator().manual_seed(0)
    source = [torch.randint(0, 256, (16, 3, 64, 64), generator=draws).byte() for _ in range(12)]
    stream = torch.cuda.Stream() if own and device == "cuda" else None
    found = []
    with torch.cuda.stream(stream):  # None: the current one
        for images in prefetch(source, device, ahead=2, mean=mean):
            compute(device, 0.01 if device == "cuda" else 0)
            found.append(images.clone())  # runs when the host has long let the batch go
            del images
        found = [images.cpu() for images in found]
    for images, expected in zip(found, prefetch(source, "cpu", mean=mean), strict=True):
        assert torch.equal(images, expected)


@gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_next_returns_while_the_step_before_runs(folder: Path, workers: int) -> None:
    with loader_of(folder, "cuda", num_workers=workers) as loader:
        list(loader)  # locks the memory
        loader.set_epoch(1)
        batches = iter(loader)
        next(batches), next(batches)
        compute("cuda", 2.0)
        step = torch.cuda.Event()
        step.record()
        images, _ = next(batches)
        assert not step.query()
        assert images.shape == (4, 3, SIZE, SIZE)
        torch.cuda.synchronize()


def overlap(trace: list[dict[str, Any]]) -> float:
    """The part of the time of copies to the device that lies within kernels of other streams."""
    on_gpu = [one for one in trace if one.get("ph") == "X"]
    kernels = [one for one in on_gpu if one.get("cat") == "kernel"]
    copies = [
        one for one in on_gpu if one.get("cat") == "gpu_memcpy" and "HtoD" in one.get("name", "")
    ]
    hidden = 0.0
    for copied in copies:
        spans = sorted(
            (
                max(one["ts"], copied["ts"]),
                min(one["ts"] + one["dur"], copied["ts"] + copied["dur"]),
            )
            for one in kernels
            if one["args"]["stream"] != copied["args"]["stream"]
        )
        reached = copied["ts"]
        for begins, ends in spans:
            hidden += max(0.0, ends - max(begins, reached))
            reached = max(reached, ends)
    return hidden / sum(one["dur"] for one in copies)


def test_the_overlap_is_read_off_a_trace() -> None:
    def one(cat: str, name: str, begins: float, ends: float, stream: int) -> dict[str, Any]:
        span = {"ts": begins, "dur": ends - begins}
        return {"ph": "X", "cat": cat, "name": name, "args": {"stream": stream}} | span

    trace = [
        one("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 10, 20, 7),
        one("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 50, 90, 7),
        one("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 30, 40, 7),
        one("kernel", "step", 0, 14, 0),
        one("kernel", "step", 12, 15, 0),
        one("kernel", "cast", 30, 40, 7),
        {"ph": "M", "name": "process_name"},
    ]
    assert overlap(trace) == 0.25


@gpu
@pytest.mark.filterwarnings("ignore:.*clears events at the end of each cycle")
def test_copies_run_beside_the_step_in_a_trace(tmp_path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    source = [torch.zeros(64, 3, 224, 224, dtype=torch.uint8) for _ in range(3)] * 4
    loader = prefetch(source, "cuda", mean=MEAN, std=STD, dtype=torch.bfloat16)
    for _ in loader:  # locks the staging buffers
        pass
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in loader:
            compute("cuda", 0.02)
        torch.cuda.synchronize()
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    if not any(one.get("cat") == "gpu_memcpy" for one in trace):
        pytest.skip("NOT TESTED HERE: the profiler of this machine shows nothing of the GPU")
    assert overlap(trace) > 0.6  # the first of twelve has no step beside it


# --- graphs ---------------------------------------------------------------------------------------


class Floats(nn.Module):
    """Casts its input, so that weights are compared in float32."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float()


def eager(patch: pytest.MonkeyPatch, names: dict[str, Any]) -> None:
    """Let the calls of a graph run its step at once, where there is no CUDA."""

    class Graph:
        def replay(self) -> None:
            names["step"]()

    importlib.import_module("torch._dynamo")  # as it is imported, torch 2.3 asks for a class
    patch.setattr(torch.cuda, "Stream", lambda: None)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(torch.cuda, "graph", lambda graph, **_: contextlib.nullcontext())


@devices
def test_the_graph_of_the_documentation_computes_what_steps_compute(
    folder: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parent.parent.parent / "docs" / "device.md").read_text()
    (code,) = re.findall(r"## CUDA graphs.*?```python\n(.*?)```", text, re.S)
    for long, short in (
        ('"packed"', repr(str(folder))),
        ('"cuda"', repr(device)),
        ("batch_size=256", "batch_size=4"),
        ("RandomResizedCrop(224", f"RandomResizedCrop({SIZE}"),
        ("range(90)", "range(2)"),
    ):
        assert long in code
        code = code.replace(long, short)
    torch.manual_seed(0)
    net = nn.Sequential(Floats(), nn.Flatten(), nn.Linear(3 * SIZE * SIZE, CLASSES)).to(device)
    twin = copy.deepcopy(net)
    names: dict[str, Any] = {"model": net, "MEAN": MEAN, "STD": STD}
    if device == "cpu":
        eager(monkeypatch, names)
    exec(code, names)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    names["train"].set_epoch(0)
    (first, *_), steps = names["loader"], 0
    for epoch in range(-1, 2):  # the warm-up: of the first batch, and on the CPU once more
        names["train"].set_epoch(max(0, epoch))
        warm_up = [first] * (3 + (device == "cpu"))
        for images, labels in warm_up if epoch < 0 else names["loader"]:
            optimizer.zero_grad()
            functional.cross_entropy(twin(images), labels).backward()
            optimizer.step()
            steps += 1
    names["loader"].close()
    assert steps >= 2 * 16
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)


# --- what watch says ------------------------------------------------------------------------------

asynchronous = pytest.mark.parametrize(
    "device, waits",
    [("cpu", False), pytest.param("cuda", True, marks=gpu), pytest.param("cuda", False, marks=gpu)],
)


def judged(loader: ShardLoader, device: str, step_s: float, waits: bool, times: int = 0) -> Any:
    """What watch says of a loop. waits: the host waits for each step, as by loss.item().

    times: a step takes so many times as long as the wait before it, at least, however long a busy
    machine has made that.
    """
    watched = watch(loader, None, alarm=0.5, print=None)
    with loader:
        before = math.inf  # the first wait is for the start of processes
        for _ in watched:
            compute(device, max(step_s, times * (time.perf_counter() - before)))
            if waits:
                torch.cuda.synchronize()
            before = time.perf_counter()
    found = watched.judge()
    assert found is not None
    return found


@asynchronous
def test_slow_steps_are_told_as_compute_bound(folder: Path, device: str, waits: bool) -> None:
    found = judged(loader_of(folder, device), device, 0.04, waits, times=20)
    assert found.bound == "compute", found


@asynchronous
def test_a_slow_transform_is_told_as_loader_bound(folder: Path, device: str, waits: bool) -> None:
    found = judged(loader_of(folder, device, 0.01), device, 0.002, waits)
    assert (found.bound, found.stage) == ("loader", "transform"), found


@gpu
@pytest.mark.parametrize("waits", [True, False])
def test_waits_that_the_gpu_does_not_notice_are_no_data_time(folder: Path, waits: bool) -> None:
    """A batch takes half of a step: a loop without waiting fills its queue first, and waits."""
    found = judged(loader_of(folder, "cuda", 0.005), "cuda", 0.04, waits)
    assert found.bound == "compute", found
    # And where a step takes half of a batch, the GPU is idle for half of the time.
    found = judged(loader_of(folder, "cuda", 0.01), "cuda", 0.02, waits)
    assert found.bound == "loader" and 0.25 < found.share < 0.75, found


# --- training -------------------------------------------------------------------------------------


@contextlib.contextmanager
def group(backend: str) -> Iterator[None]:
    """A process group of this process alone."""
    options: dict[str, Any] = {}
    if backend == "nccl":
        options["device_id"] = torch.device("cuda", 0)  # else it guesses, and warns
    store = distributed.HashStore()
    distributed.init_process_group(backend, store=store, rank=0, world_size=1, **options)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def trained(
    folder: Path, device: str, wrap: Callable[[nn.Module], nn.Module]
) -> list[torch.Tensor]:
    """The weights after an epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, CLASSES)).to(device)
    wrapped, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.01)
    with loader_of(folder, device) as loader:
        for images, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(wrapped(images), labels).backward()
            optimizer.step()
    return [one.detach().cpu() for one in model.parameters()]


@pytest.mark.parametrize(
    "device, backend",
    [
        ("cpu", "gloo"),
        pytest.param("cuda", "gloo", marks=gpu),
        pytest.param("cuda", "nccl", marks=gpu),
    ],
)
def test_a_process_group_of_one_trains_as_none(folder: Path, device: str, backend: str) -> None:
    alone = trained(folder, device, lambda model: model)
    with group(backend):
        grouped = trained(folder, device, nn.parallel.DistributedDataParallel)
    for one, other in zip(grouped, alone, strict=True):
        torch.testing.assert_close(one, other)


@devices
def test_a_step_with_autocast_and_a_scaler(folder: Path, device: str) -> None:
    if not hasattr(torch.amp, "GradScaler"):
        pytest.skip("NOT TESTED HERE: this torch has no torch.amp.GradScaler")
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    model = nn.Conv2d(3, CLASSES, SIZE).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device, init_scale=256.0)
    before, losses = model.weight.detach().clone(), []
    with loader_of(folder, device, dtype=dtype, channels_last=True) as loader:
        for images, labels in islice(loader, 6):
            assert images.dtype == dtype
            assert images.is_contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            with torch.autocast(device, dtype=dtype):
                made = model(images)
                loss = functional.cross_entropy(made.flatten(1), labels)
            assert made.dtype == dtype
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    assert all(0 < one < 1e3 for one in losses)
    assert scaler.get_scale() == 256.0  # no step was left out
    assert not torch.equal(model.weight, before)
