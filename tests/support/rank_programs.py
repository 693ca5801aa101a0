"""Training and validation as a user writes them: what each rank of test_ranks.py runs.

    torchrun --standalone --nproc-per-node 2 rank_programs.py DATA OUT

trains on DATA with every tail, and writes what it saw to OUT/RANK.json and its models to OUT.
"""

import json
import sys
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from shardio import CenterCrop, Order, RandomResizedCrop, ShardDataset
from support import LIMIT_S

EPOCHS = 3
GLOBAL_BATCH = 16
TAILS = ("pad", "drop", "exact")
CASES = [(tail, workers) for tail in TAILS for workers in (0, 2)]

Row = list[Any]  # key, checksum of its pixels, and with tail="exact" whether it counts
Steps = list[list[Row]]  # the rows of each step


# docs/order.md shows this function, line for line.
@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # right, loss, samples
    for images, labels, valid in loader:
        scores, labels = model(images.to(device))[valid], labels[valid].to(device)
        right, loss = scores.argmax(1) == labels, cross_entropy(scores, labels, reduction="sum")
        sums += torch.stack([right.sum(), loss, valid.sum().to(device)])
    torch.distributed.all_reduce(sums)
    return (sums[:2] / sums[2]).tolist()  # accuracy, mean loss


class Floats(nn.Module):
    """uint8 (B, 3, 8, 8) -> float64 (B, 192): rounding is to hide nothing."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1).double() / 255 - 0.5


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Floats(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def training(folder: str | Path, tail: str, batch_size: int, **options: Any) -> ShardDataset:
    return ShardDataset(
        folder,
        batch_size=batch_size,
        fields=("image", "label", "__key__"),
        transform=RandomResizedCrop(8, flip=True),
        shuffle_buffer=30,
        order=Order(spans=8, unit=2),
        tail=tail,
        **options,
    )


def train(model: nn.Module, dataset: ShardDataset, workers: int) -> list[Steps]:
    """Train for EPOCHS epochs; the rows of each step of each epoch."""
    loader = DataLoader(
        dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0
    )
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    epochs = []
    for epoch in range(EPOCHS):
        dataset.set_epoch(epoch)
        model.train()
        seen: Steps = []
        for images, labels, keys, *valid in loader:
            optimiser.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimiser.step()
            pixels = [zlib.crc32(image.numpy().tobytes()) for image in images]
            marks = [mark.tolist() for mark in valid]
            seen.append([list(r) for r in zip(keys, pixels, *marks, strict=True)])
        epochs.append(seen)
    return epochs


def main(folder: str, out: str) -> None:
    # Sooner than the test's own limit, so that gloo says who waited for whom.
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S / 2))
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    seen: dict[str, Any] = {}
    for tail, workers in CASES:
        model = DistributedDataParallel(new_model())
        dataset = training(folder, tail, GLOBAL_BATCH // world_size)
        epochs = train(model, dataset, workers)
        val = ShardDataset(
            folder,
            batch_size=4,
            fields=("image", "label"),
            transform=CenterCrop(8),
            shuffle=False,
            tail="exact",
        )
        loader = DataLoader(val, batch_size=None, num_workers=workers)
        metrics = validate(model, loader, torch.device("cpu"))
        seen[f"{tail} {workers}"] = {
            "epochs": epochs,
            "length": len(dataset),
            "metrics": metrics,
            "steps": len(val),
        }
        torch.save(model.module.state_dict(), Path(out, f"{tail}-{workers}-{rank}.pt"))
    Path(out, f"{rank}.json").write_text(json.dumps(seen))
    # What gloo's threads still hold of the last sum needs the GIL for its end. A model that dies
    # last ends these threads, and holds the GIL while it waits for them.
    del model
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
