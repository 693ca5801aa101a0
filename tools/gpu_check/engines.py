"""Decode JPEGs of each kind by one decoder of the GPU, and compare with PIL. A process of its own.

    python -m tools.gpu_check.engines NAME DEVICE [KIND ...]

Prints a line of JSON for each kind, right away: should the decoder crash, the lines before stay.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from . import kinds, nvjpeg

BATCH, ROUNDS = 64, 5
STICKY = 3  # exit code: the GPU takes no more calls of this process


class Missing(Exception):
    """A decoder that is not here, and why."""


class Engine(NamedTuple):
    """Hold a decoder.

    decode: gives (H, W, 3) or (3, H, W) uint8 of each file. supports: what it says of a file.
    """

    about: str
    decode: Callable[[Sequence[bytes]], list[Any]]
    supports: Callable[[bytes], bool] | None = None


# --- the decoders ---------------------------------------------------------------------------------


def _nvjpeg(backend: int) -> Callable[[str], Engine]:
    def make(device: str) -> Engine:
        found = nvjpeg.libraries()
        if not found:
            raise Missing("no libnvjpeg found: the wheels nvidia-nvjpeg and torchvision have one")
        said = []
        for path in found:
            try:
                decoder = nvjpeg.NvJpeg(path, backend, device)
                return Engine(f"{decoder.about()}, {path.name}", decoder.decode, decoder.supports)
            except (OSError, AttributeError, nvjpeg.NvJpegError) as error:
                said.append(f"{path.name}: {error}")
        raise Missing("; ".join(said))

    return make


def _nvimagecodec(*names: str) -> Callable[[str], Engine]:
    def make(device: str) -> Engine:
        try:
            from nvidia import nvimgcodec
        except ImportError as error:
            raise Missing(f"nvidia-nvimgcodec-cu13 is not installed ({error})") from error
        cpu = device == "cpu"
        chosen = ("CPU_ONLY",) if cpu else names
        wanted = [getattr(nvimgcodec.BackendKind, name) for name in chosen]
        decoder = nvimgcodec.Decoder(
            device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY if cpu else 0,
            backends=[nvimgcodec.Backend(kind) for kind in wanted],
        )
        how = nvimgcodec.DecodeParams(
            apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB
        )

        def decode(files: Sequence[bytes]) -> list[Any]:
            made = decoder.decode([nvimgcodec.CodeStream(one) for one in files], params=how)
            if any(one is None for one in made):
                raise ValueError("it gave no image")
            return list(made)

        about = ", ".join(kind.name for kind in wanted)
        return Engine(f"nvImageCodec {nvimgcodec.__version__}, backends {about}", decode)

    return make


def _torchvision(device: str) -> Engine:
    try:
        import torchvision
        from torchvision.io import ImageReadMode, decode_jpeg
    except (ImportError, RuntimeError) as error:
        raise Missing(f"torchvision is not installed, or is of another torch: {error}") from error

    def decode(files: Sequence[bytes]) -> list[Any]:
        encoded = [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in files]
        made = decode_jpeg(encoded, mode=ImageReadMode.RGB, device=device)
        return list(made)

    return Engine(f"torchvision {torchvision.__version__}, decode_jpeg", decode)


def _torchcodec(device: str) -> Engine:
    try:
        import torchcodec
        from torchcodec.decoders import decode_jpeg
    except (ImportError, RuntimeError, OSError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise Missing(f"torchcodec is not installed, or has no decode_jpeg: {said[0]}") from error

    def decode(files: Sequence[bytes]) -> list[Any]:
        encoded = [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in files]
        return list(decode_jpeg(encoded, device=device))

    return Engine(f"torchcodec {torchcodec.__version__}, decode_jpeg", decode)


ENGINES: dict[str, Callable[[str], Engine]] = {
    "nvJPEG hardware": _nvjpeg(nvjpeg.HARDWARE),
    "nvJPEG on the GPU's cores": _nvjpeg(nvjpeg.GPU_HYBRID),
    "nvImageCodec hardware": _nvimagecodec("HW_GPU_ONLY"),
    "nvImageCodec on the GPU's cores": _nvimagecodec("GPU_ONLY", "HYBRID_CPU_GPU"),
    "torchvision": _torchvision,
    "torchcodec": _torchcodec,
}


# --- one kind -------------------------------------------------------------------------------------


def look(engine: Engine, name: str, data: bytes, device: str) -> dict[str, Any]:
    """Return what a decoder does with a kind of JPEG."""
    found: dict[str, Any] = {"kind": name, "says": None, "decodes": False}
    try:
        if engine.supports:
            found["says"] = engine.supports(data)
        pixels = _pixels(engine.decode([data])[0])
    except Exception as error:  # of any of four libraries
        return found | {"why": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    right = kinds.expected(data)
    if pixels.shape != right.shape:
        return found | {"why": f"its shape is {pixels.shape}, expected {right.shape}"}
    apart = np.abs(pixels.astype(np.int16) - right)
    found |= {"decodes": True, "largest": int(apart.max()), "mean": float(apart.mean())}
    if found["mean"] > 16:  # levels: another upsampling of chroma is about 1
        found |= {"decodes": False, "why": "its pixels are of another picture"}
    elif name in kinds.RATED:
        found["images_per_s"] = _rate(engine, data, device)
    return found


def _pixels(image: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return an image of any of the libraries as (H, W, 3)."""
    host = image.cpu()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    made = np.asarray(host)
    return made.transpose(1, 2, 0) if made.shape[0] == 3 and made.shape[-1] != 3 else made


def _rate(engine: Engine, data: bytes, device: str) -> float:
    """Return images/s of batches of this one file."""
    batch, seconds = [data] * (BATCH if device == "cuda" else 2), []
    for _ in range(ROUNDS + 1):  # the first one allocates
        began = time.perf_counter()
        engine.decode(batch)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return len(batch) / statistics.median(seconds[1:])


def main(name: str, device: str, files: Sequence[str]) -> int:
    """Look at files KIND.jpg one after the other."""
    try:
        if device == "cuda":
            torch.zeros(1, device=device)
        engine = ENGINES[name](device)
    except Missing as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return 0
    print(json.dumps({"about": engine.about}), flush=True)
    for file in map(Path, files):
        found = look(engine, file.stem, file.read_bytes(), device)
        print(json.dumps(found), flush=True)
        if device == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                return STICKY
        if not found["decodes"]:
            engine = ENGINES[name](device)  # what an error leaves behind is not known
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
