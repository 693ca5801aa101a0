"""Time candidates for a fused normalisation, and compare each with the formula that is used.

    python -m tools.gpu_check.formulas DEVICE

The formula is that of shardio/loader/normalize.py: a cast, a product and a sum in float32, a cast.
A candidate that writes bfloat16 right away saves kernels, and may round in another way. Prints a
line of JSON for each.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shardio import normalize

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ROUNDS = 20
Formula = Callable[[torch.Tensor], torch.Tensor]


def candidates(device: str) -> dict[str, Callable[[], Formula]]:
    """Return what makes each candidate; the first one is the formula that is used."""
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (MEAN, STD))
    scale, bias = ((1 / (255 * std)).float().to(device), (-mean / std).float().to(device))
    low = torch.bfloat16

    def empty(pixels: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(pixels, dtype=low)

    def used(pixels: torch.Tensor) -> torch.Tensor:
        return normalize(pixels, MEAN, STD, low)

    def two(pixels: torch.Tensor) -> torch.Tensor:
        return torch.add(torch.mul(pixels, scale), bias, out=empty(pixels))

    def addcmul(pixels: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(bias, pixels, scale, out=empty(pixels))

    def addcmul_half(pixels: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(bias, pixels, twice, value=0.5, out=empty(pixels))

    def addcmul_floats(pixels: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(bias, pixels.float(), scale, out=empty(pixels))

    def written(pixels: torch.Tensor) -> torch.Tensor:
        return (pixels.float() * scale + bias).to(low)

    twice = 2 * scale
    return {
        "shardio.normalize: cast, product, sum, cast": lambda: used,
        "mul, then add with out=bfloat16": lambda: two,
        "addcmul with out=bfloat16": lambda: addcmul,
        "addcmul, value 0.5 of a doubled scale, with out=bfloat16": lambda: addcmul_half,
        "cast, then addcmul with out=bfloat16": lambda: addcmul_floats,
        "torch.compile of cast, product, sum, cast": lambda: torch.compile(written),
    }


def compare(formula: Formula, pixels: torch.Tensor, right: torch.Tensor) -> dict[str, Any]:
    """Return the time of a formula, and how far its numbers are from the right ones."""
    made = formula(pixels)
    apart = (made.double() - right.double()).abs()
    found = {"unequal": float((made != right).double().mean()), "largest": float(apart.max())}
    found["strides"] = made.stride() == right.stride()
    del apart
    return found | {"ms": statistics.median(_times(lambda: formula(pixels), pixels.is_cuda))}


def _times(call: Callable[[], object], cuda: bool) -> list[float]:
    """Return the milliseconds of each call."""
    for _ in range(3):
        call()
    if not cuda:
        found = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            call()
            found.append((time.perf_counter() - began) * 1e3)
        return found
    event = partial(torch.cuda.Event, enable_timing=True)
    events = [(event(), event()) for _ in range(ROUNDS)]
    for before, after in events:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in events]


def main(device: str) -> None:
    """Print what each candidate does, the slowest to be made ready last."""
    count, size = (256, 224) if device == "cuda" else (4, 32)
    noise = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=noise)
    pixels = pixels.to(device).permute(0, 3, 1, 2)  # channels_last, as collate makes it
    right = normalize(pixels, MEAN, STD, torch.bfloat16)
    for name, make in candidates(device).items():
        try:
            found = compare(make(), pixels, right)
            if not found.pop("strides"):
                found = {"why": "its result is not channels_last"}
        except Exception as error:  # of torch's compiler: any
            found = {"why": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        print(json.dumps({"name": name, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
