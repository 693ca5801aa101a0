"""Training on a GPU: ResNet-18 and -50 in bf16, and the share of time in which they wait for data.

Two data sets, since two things can make a GPU wait. Photographs: decoded, RandomResizedCrop(224),
mirrored. Pixels: the same at 224 x 224, packed as raw pixels, so that nothing is decoded and only
the transport of batches is left. Each loader gets as many workers as the machine has cores; all
batches are channels_last, normalised on the GPU, cast to bf16.

    ShardLoader      device="cuda": page-locked buffers, a side stream
    prefetch         shardio.prefetch over DataLoader(pin_memory=True)
    pinned, plain    DataLoader, pin_memory=True and False: .to(non_blocking=True), and normalised
                     on the stream that trains, as most training code does

What the model alone takes is measured in the same process, right before each round, with one batch
that is on the GPU already. The rest of the round's time is the share that waited. Needs CUDA.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from . import data
from .harness import EntryProcess, NotHere, Result, contest, ratio

SIZE, BATCH = 224, 128
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MODELS = ("ResNet-18", "ResNet-50")
ALONE = 20  # steps that measure the model alone
SKIPPED = 4  # first steps of a round, while workers start
SHARDIO, PREFETCH, PINNED, PLAIN = "ShardLoader", "prefetch", "DataLoader, pinned", "DataLoader"

Round = Callable[..., dict[str, Any]]
Batches = Callable[[], Iterator[Any]]


def run(source: data.Data, result: Result) -> None:
    device = gpu()
    result.data(gpu=device)
    rounds = 1 if source.quick else 5
    folder = source.photos(20_000 if not source.quick else 2_000)
    files = data.listing(folder)
    result.data(records=len(files), payload_bytes=data.payload(files))
    pixels = ("--encode", "raw", "--resize", str(SIZE))
    sets = {
        "photographs": data.pack(folder, source.scratch / "shards"),
        "pixels": data.pack(folder, source.scratch / "pixels", *pixels),
    }
    columns = {
        "images_per_s": "images/s",
        "wait_share": "share of time waiting for data",
        "alone": "images/s of the model alone",
        "next_ms": "ms in next()",
        "copy_ms": "ms to send",
        "cpu_ms": "CPU ms an image, of the trainer",
    }
    for model, (title, shards) in itertools.product(MODELS, sets.items()):
        options = {"path": str(shards), "decoded": title == "pixels", "model": model}
        entries = {
            SHARDIO: EntryProcess("gpu:shard_loader", **options),
            PREFETCH: EntryProcess("gpu:prefetched", **options),
            PINNED: EntryProcess("gpu:data_loader", pin=True, **options),
            PLAIN: EntryProcess("gpu:data_loader", pin=False, **options),
        }
        measured = contest(entries, rounds)
        result.raw(f"{model}, {title}", measured)
        what = f"{model} in bf16, {title}, batches of {BATCH}, {device}"
        result.table(what, measured, columns, versus=PINNED, by="images_per_s")
        for other in (PINNED, PLAIN):
            found = ratio(measured, SHARDIO, other, "images_per_s")
            result.target(f"{model}, {title}, images/s, of {other}'s", found, -1.0)


def gpu() -> str:
    """The GPU's name."""
    import torch

    if not torch.cuda.is_available():
        raise NotHere(
            f"needs an NVIDIA GPU and a torch for CUDA; torch {torch.__version__} finds none here, "
            "so nothing was measured"
        )
    return torch.cuda.get_device_name()


# --- entries --------------------------------------------------------------------------------------


def _dataset(path: str, decoded: bool, batch: int, size: int) -> Any:
    from shardio import RandomResizedCrop, ShardDataset

    fields = ("image", "label")
    if decoded:
        return ShardDataset(path, batch_size=batch, fields=fields, decode="numpy")
    crop = RandomResizedCrop(size, flip=True)
    return ShardDataset(path, batch_size=batch, fields=fields, transform=crop)


def _loader(dataset: Any, workers: int | None, pin: bool) -> Any:
    from torch.utils.data import DataLoader

    count = (os.cpu_count() or 1) if workers is None else workers
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=count,
        pin_memory=pin,
        persistent_workers=count > 0,
    )


def shard_loader(
    path: str, decoded: bool, model: str, device: str = "cuda", batch: int = BATCH,
    size: int = SIZE, workers: int | None = None,
) -> Round:  # fmt: skip
    import torch

    from shardio.loader.shard_loader import ShardLoader

    dataset = _dataset(path, decoded, batch, size)
    loader = ShardLoader(
        dataset, num_workers=workers, device=device, mean=MEAN, std=STD, dtype=torch.bfloat16
    )
    return _rounds(dataset, lambda: iter(loader), model, device, batch, size)


def prefetched(
    path: str, decoded: bool, model: str, device: str = "cuda", batch: int = BATCH,
    size: int = SIZE, workers: int | None = None,
) -> Round:  # fmt: skip
    import torch

    from shardio import prefetch

    dataset = _dataset(path, decoded, batch, size)
    loader = prefetch(
        _loader(dataset, workers, device == "cuda"),
        device,
        mean=MEAN,
        std=STD,
        dtype=torch.bfloat16,
    )
    return _rounds(dataset, lambda: iter(loader), model, device, batch, size)


def data_loader(
    path: str, decoded: bool, model: str, pin: bool, device: str = "cuda", batch: int = BATCH,
    size: int = SIZE, workers: int | None = None,
) -> Round:  # fmt: skip
    import torch

    dataset = _dataset(path, decoded, batch, size)
    loader = _loader(dataset, workers, pin)
    mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (MEAN, STD))

    def batches() -> Iterator[Any]:
        for images, labels in loader:
            there = images.to(device, non_blocking=True).float().div_(255).sub_(mean).div_(std)
            yield there.to(torch.bfloat16), labels.to(device, non_blocking=True)

    return _rounds(dataset, batches, model, device, batch, size)


# --- a round --------------------------------------------------------------------------------------


def _rounds(dataset: Any, batches: Batches, name: str, device: str, batch: int, size: int) -> Round:
    """Each round is an epoch; the first steps, while workers start, are not counted."""
    import torch

    cuda = device == "cuda"
    torch.backends.cudnn.benchmark = True
    step = _trainer(name, device)
    alone = (
        torch.randn(batch, 3, size, size, device=device, dtype=torch.bfloat16),
        torch.zeros(batch, dtype=torch.int64, device=device),
    )
    alone = (alone[0].contiguous(memory_format=torch.channels_last), alone[1])
    done = torch.cuda.synchronize if cuda else (lambda: None)
    epoch = 0

    def model_alone(steps: int) -> float:
        """Seconds a step, without a loader."""
        for _ in range(2):
            step(*alone)
        done()
        began = time.perf_counter()
        for _ in range(steps):
            step(*alone)
        done()
        return (time.perf_counter() - began) / steps

    def one_round(alone_steps: int = ALONE, skipped: int = SKIPPED) -> dict[str, Any]:
        nonlocal epoch
        step_s = model_alone(alone_steps)
        dataset.set_epoch(epoch)
        epoch += 1
        steps, asked, copied = 0, 0.0, []
        used = began = 0.0
        iterator = batches()
        for i in itertools.count():
            if i == skipped:
                done()
                used, began = time.process_time(), time.perf_counter()
            before = time.perf_counter()
            found = next(iterator, None)
            if found is None or len(found[1]) < batch:
                break
            if i >= skipped:
                waited = getattr(iterator, "blocked_s", 0.0)  # for the GPU, not for the data
                asked += time.perf_counter() - before - waited
                made = getattr(iterator, "batch_stats", None)
                copied += [made.device_s] if made is not None else []
                steps += 1
            step(*found)
        done()
        seconds = time.perf_counter() - began
        assert steps, "too few images for a round"
        if cuda:
            torch.cuda.empty_cache()  # others train on the same GPU in turn
        measured = {
            "images_per_s": steps * batch / seconds,
            "wait_share": max(0.0, 1 - step_s * steps / seconds),
            "alone": batch / step_s,
            "next_ms": asked / steps * 1e3,
            "cpu_ms": (time.process_time() - used) / (steps * batch) * 1e3,
        }
        if copied:
            measured["copy_ms"] = sum(copied) / len(copied) * 1e3
        return measured

    return one_round


def _trainer(name: str, device: str) -> Callable[[Any, Any], None]:
    """A training step of SGD, in bf16 by autocast, on channels_last tensors."""
    import torch

    torch.manual_seed(0)
    model = resnet(name).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(images: Any, labels: Any) -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def resnet(name: str) -> Any:
    """ResNet-18 or -50 for 1,000 classes (He et al. 2015; strides in the 3 x 3, as torchvision)."""
    from torch import nn

    def normed(ins: int, outs: int, kernel: int, stride: int = 1) -> nn.Sequential:
        conv = nn.Conv2d(ins, outs, kernel, stride, kernel // 2, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outs))

    class Block(nn.Module):
        def __init__(self, ins: int, width: int, stride: int, wide: bool) -> None:
            super().__init__()
            outs = 4 * width if wide else width
            shapes = (
                ((ins, width, 1, 1), (width, width, 3, stride), (width, outs, 1, 1))
                if wide
                else ((ins, width, 3, stride), (width, outs, 3, 1))
            )
            first, *rest = (normed(*shape) for shape in shapes)
            self.road = nn.Sequential(first, *(nn.Sequential(nn.ReLU(True), one) for one in rest))
            same = ins == outs and stride == 1
            self.short = nn.Identity() if same else normed(ins, outs, 1, stride)

        def forward(self, x: Any) -> Any:
            return nn.functional.relu(self.road(x) + self.short(x), inplace=True)

    wide = name == "ResNet-50"
    layers: list[nn.Module] = [normed(3, 64, 7, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    ins = 64
    for stage, count in enumerate((3, 4, 6, 3) if wide else (2, 2, 2, 2)):
        for i in range(count):
            width = 64 << stage
            layers.append(Block(ins, width, 2 if stage and not i else 1, wide))
            ins = 4 * width if wide else width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ins, 1000))
