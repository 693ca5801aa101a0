"""Print what the machine is and what is installed on it, as JSON. A process of its own."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
from importlib import metadata
from typing import Any

import PIL
import torch
from PIL import Image, features

from benchmarks.harness import machine
from shardio import native

from . import nvjpeg

DECODERS = (
    *("torchvision", "torchcodec", "nvidia-nvimgcodec-cu13", "nvidia-nvimgcodec-cu12"),
    *("nvidia-nvjpeg", "nvidia-dali-cuda130", "nvidia-dali-cuda120", "timm"),
)


def facts() -> dict[str, Any]:
    """Return them by name, in the order of the page."""
    cuda = torch.cuda.is_available()
    here = machine()
    turbo: Any = features.version("libjpeg_turbo")
    cudnn: Any = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    compilers = [name for name in ("cc", "gcc", "clang", "nvcc") if shutil.which(name)]
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name() if cuda else "none"}
    if cuda:
        properties = torch.cuda.get_device_properties(0)
        found["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["gpus"] = torch.cuda.device_count()
    found |= {
        "driver": _driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "cudnn": cudnn or "none",
        "python": platform.python_version(),
        "cpu": here["cpu"],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": here["ram_gib"],
        "kernel": here["kernel"],
        "shared_memory_gib": round(shutil.disk_usage("/dev/shm").total / 2**30, 1),
        "lockable_memory": _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        "numpy": metadata.version("numpy"),
        "PIL": f"{PIL.__version__}{' (pillow-simd)' if _simd() else ''}, libjpeg-turbo "
        f"{turbo}, {Image.__file__}",
        "core": native.described(),
        "decoders": {name: version for name in DECODERS if (version := _version(name))},
        "libnvjpeg": [str(path) for path in nvjpeg.libraries()],
        "compilers": compilers,
    }
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known ({type(error).__name__} of nvidia-smi)"
    return (done.stdout.split() or ["not known"])[0]


def _limit(number: int) -> str:
    return "no limit" if number == resource.RLIM_INFINITY else f"{number / 2**20:.1f} MiB"


def _simd() -> bool:
    return _version("pillow-simd") != "" and _version("pillow") == ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    print(json.dumps(facts()))
