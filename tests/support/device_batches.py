"""Batches for tests of a device: noise as images, and what training code makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pictures(
    count: int = 2, size: tuple[int, int] = (4, 5), channels: int = 3, seed: int = 0
) -> torch.Tensor:
    """(B, C, H, W) uint8 with channels_last strides, as collate makes them."""
    noise = np.random.default_rng(seed)
    return torch.from_numpy(
        noise.integers(0, 256, (count, *size, channels), dtype=np.uint8)
    ).permute(0, 3, 1, 2)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(pictures(seed=i), torch.tensor([i, i])) for i in range(count)]


def wanted(pixels: torch.Tensor, mean: Any = MEAN, std: Any = STD) -> torch.Tensor:
    """What training code usually writes, in float64."""
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in (mean, std))
    return (pixels.double() / 255 - mean) / std
