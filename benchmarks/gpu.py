"""On a GPU: do copies run beside the step, and does a GPU that trains ResNets wait for data?

    --only transfers     batches of raw pixels to the GPU: gpu_transfers.py
    --only training      ResNets fed from JPEG, tiles, raw pixels, decode="cuda": gpu_training.py

Each takes less than 9 minutes on 16 cores, or about what --within says. Needs CUDA; --device cpu
rehearses both on a CPU: every line but CUDA's runs, on few and small images, and what is found says
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import data, gpu_training, gpu_transfers
from .gpu_feeds import Scale
from .harness import NotHere, Result

PARTS = {"transfers": gpu_transfers.run, "training": gpu_training.run}


def run(
    source: data.Data, result: Result, parts: Sequence[str] = tuple(PARTS), device: str = "cuda"
) -> None:
    result.data(gpu=gpu(device))
    scale = Scale.of(device, source.quick, result.deadline)
    for part, deadline in result.deadline.shares(dict.fromkeys(parts, 1)):
        PARTS[part](source, result, scale, deadline)


def gpu(device: str) -> str:
    """Return the GPU's name. Raises NotHere."""
    import torch

    if device == "cpu":
        return "none: a rehearsal"
    if not torch.cuda.is_available():
        raise NotHere(
            f"needs an NVIDIA GPU and a torch for CUDA; torch {torch.__version__} finds none here, "
            "so nothing was measured; --device cpu rehearses it"
        )
    return torch.cuda.get_device_name()
