"""Time candidates for a fused normalisation, and compare the numbers of each with the CPU's.

    python -m tools.gpu_check.formulas DEVICE

The formula is that of shardio/loader/normalize.py: a cast, a product and a sum in float32, a cast.
A candidate of fewer kernels may round in another way. Prints a line of JSON for each.
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
Formula = Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def candidates(device: str) -> dict[str, Callable[[], Formula]]:
    """Return what makes each candidate; the first one is what shardio does."""
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (MEAN, STD))
    scale, bias = ((1 / (255 * std)).float().to(device), (-mean / std).float().to(device))
    twice = 2 * scale

    def used(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return normalize(pixels, MEAN, STD, dtype)

    def written(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (pixels.float() * scale + bias).to(dtype)

    def addcmul(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.addcmul(bias, pixels, scale, out=torch.empty_like(pixels, dtype=dtype))

    def half(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty_like(pixels, dtype=dtype)
        return torch.addcmul(bias, pixels, twice, value=0.5, out=out)

    return {
        "shardio.normalize": lambda: used,
        "cast, product, sum, cast": lambda: written,
        "addcmul with out=": lambda: addcmul,
        "addcmul with out=, value 0.5 of a doubled scale": lambda: half,
        "torch.compile of cast, product, sum, cast": lambda: torch.compile(written),
    }


def compare(formula: Formula, pixels: torch.Tensor, right: torch.Tensor) -> dict[str, Any]:
    """Return the time of a formula, and how far its numbers are from the right ones, in float32."""
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        made = formula(pixels, dtype)
        if made.stride() != pixels.stride():
            return {"why": "its result is not channels_last"}
        name = str(dtype).removeprefix("torch.")
        found[f"unequal_{name}"] = float((made != right.to(dtype)).double().mean())
    found["largest"] = float((made - right).abs().max())
    times = _times(lambda: formula(pixels, torch.bfloat16), pixels.is_cuda)
    return found | {"ms": statistics.median(times)}


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
    right = normalize(pixels.cpu(), MEAN, STD).to(device)
    for name, make in candidates(device).items():
        try:
            found = compare(make(), pixels, right)
        except Exception as error:  # of torch's compiler: any
            found = {"why": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        print(json.dumps({"name": name, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
