"""What feeds a model on a GPU: batches there, normalised, in bfloat16, channels_last.

ShardLoader          device="cuda": page-locked buffers, a side stream
resident             the same with resident="device": all pixels lie on the GPU
prefetch             shardio.prefetch over DataLoader(pin_memory=True)
timm                 timm's PrefetchLoader over DataLoader(pin_memory=True): a side stream
pinned, plain        DataLoader, pin_memory=True and False: .to(non_blocking=True), and
                     normalised on the stream that trains, as most training code does
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .harness import Deadline

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LOADER, RESIDENT, PREFETCH, TIMM = "ShardLoader", "resident", "prefetch", "timm"
PINNED, PLAIN = "DataLoader, pinned", "DataLoader"
WHOLE_S = 450  # with less time than that, epochs are short


@dataclass(frozen=True)
class Scale:
    """Say how much is measured, and where. On "cpu" it is a rehearsal: so small that it ends."""

    device: str
    batch: int
    size: int
    records: int
    rounds: int
    workers: int
    models: tuple[str, ...]

    @staticmethod
    def of(device: str, quick: bool, deadline: Deadline) -> Scale:
        """Return the scale of a run."""
        from shardio.machine import processors

        models = ("ResNet-50", "ResNet-18")
        if device == "cpu":
            return Scale(device, 4, 32, 4 * 10, 1, 1, models[1:])
        steps = 50 if not quick and deadline.enough(WHOLE_S) else 16
        return Scale(device, 256, 224, 256 * steps, 1 if quick else 3, processors(), models)

    def options(self, **more: Any) -> dict[str, Any]:
        """Return the options of an entry."""
        return {"scale": asdict(self) | {"models": list(self.models)}} | more


@dataclass(frozen=True)
class Feed:
    """Hold what gives batches.

    epoch  returns an iterable of (images, labels) for the next epoch
    loader what shardio.watch can ask how it is made
    close  ends its processes, and gives back its memory
    """

    epoch: Callable[[], Any]
    loader: Any
    close: Callable[[], None]


def missing(kind: str) -> str:
    """Say why this kind of loader cannot be measured here; "" if it can."""
    if kind == TIMM and importlib.util.find_spec("timm") is None:
        return "timm's PrefetchLoader was not measured: timm is not installed"
    return ""


def feed(kind: str, path: str, decode: str, scale: Scale, kernels: str = "torch") -> Feed:
    """Make a loader of this kind. decode: "numpy" for raw pixels, "pil" or "cuda" for JPEGs."""
    import torch

    from shardio import RandomResizedCrop, ShardDataset, ShardLoader, prefetch

    how: dict[str, Any] = {"decode": decode}
    if decode != "numpy":
        how["transform"] = RandomResizedCrop(scale.size, flip=True)
    dataset = ShardDataset(path, batch_size=scale.batch, fields=("image", "label"), **how)
    there = {"mean": MEAN, "std": STD, "dtype": torch.bfloat16}
    numbers = iter(range(2**31))
    if kind in (LOADER, RESIDENT):
        resident = "device" if kind == RESIDENT else None
        shards = ShardLoader(
            *(dataset,), num_workers=scale.workers, device=scale.device, resident=resident,
            kernels=kernels, **there,
        )  # fmt: skip
        return Feed(lambda: _next_epoch(dataset, shards, numbers), shards, shards.close)
    pin = kind != PLAIN and scale.device == "cuda"
    batches = torch.utils.data.DataLoader(
        *(dataset,), batch_size=None, num_workers=scale.workers, pin_memory=pin,
        persistent_workers=scale.workers > 0,
    )  # fmt: skip
    loader: Any = batches
    if kind == PREFETCH:
        loader = prefetch(batches, scale.device, **there)
    elif kind == TIMM:
        from timm.data.loader import PrefetchLoader

        device = torch.device(scale.device)
        loader = PrefetchLoader(batches, MEAN, STD, device=device, img_dtype=torch.bfloat16)
    else:
        loader = _Moved(batches, scale.device)
    return Feed(lambda: _next_epoch(dataset, loader, numbers), loader, lambda: _stop(batches))


def _next_epoch(dataset: Any, loader: Any, numbers: Iterator[int]) -> Any:
    dataset.set_epoch(next(numbers))
    return loader


def _stop(batches: Any) -> None:
    """End the workers of a DataLoader: they go with its iterator."""
    batches._iterator = None


class _Moved:
    """Move the batches of a DataLoader on the stream that trains, and normalise them there."""

    def __init__(self, batches: Any, device: str) -> None:
        import torch

        self._batches, self._device = batches, device
        self._mean, self._std = (
            torch.tensor(value, device=device).view(1, 3, 1, 1) for value in (MEAN, STD)
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        import torch

        for images, labels in self._batches:
            there = images.to(self._device, non_blocking=True)
            there = there.float().div_(255).sub_(self._mean).div_(self._std)
            yield there.to(torch.bfloat16), labels.to(self._device, non_blocking=True)
