"""JPEGs of all samplings, by cjpeg, and the same with restart markers."""

from __future__ import annotations

import functools
import io
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from shardio import native
from support.device_crops import scene
from support.images import encoded

CORE = native.core
# Luma's sampling against that of chroma, as `cjpeg -sample` takes it.
SAMPLINGS = {
    "4:4:4": "1x1",
    "4:2:2": "2x1",
    "4:2:0": "2x2",
    "4:4:0": "1x2",
    "4:1:1": "4x1",
    "4:1:0": "4x2",
    "mixed": "2x2,1x2,2x1",
}

needs_programs = pytest.mark.skipif(
    shutil.which("jpegtran") is None or shutil.which("cjpeg") is None,
    reason="cjpeg and jpegtran are not here (libjpeg-turbo-progs): tile JPEGs are NOT tested",
)


def run(*command: str, data: bytes) -> bytes:
    done = subprocess.run(command, input=data, capture_output=True)
    assert done.returncode == 0 and not done.stderr, (command, done.stderr)
    return done.stdout


@functools.cache
def made(kind: str, width: int, height: int, progressive: bool = False) -> bytes:
    """A JPEG of `scene`: a sampling of SAMPLINGS, "grey", or "grey 2x2" (its sampling says so)."""
    ppm = encoded(scene(width, height), "PPM")
    options = ["-quality", "85", *(["-progressive"] if progressive else [])]
    if kind.startswith("grey"):
        options += ["-grayscale", "-sample", kind[5:] or "1x1"]
    else:
        options += ["-sample", SAMPLINGS[kind]]
    return run("cjpeg", *options, data=ppm)


@functools.cache
def tiled(kind: str, width: int, height: int, interval: int) -> bytes:
    """The same with a restart marker every so many MCUs."""
    data = made(kind, width, height)
    return run("jpegtran", "-copy", "all", "-restart", f"{interval}B", data=data)


def shown(data: bytes, scale: int = 1) -> np.ndarray:
    image = Image.open(io.BytesIO(data))
    if scale > 1:
        width, height = image.size
        image.draft("RGB", (width // scale, height // scale))
        assert image.size == (-(-width // scale), -(-height // scale))
    return np.array(image)


KINDS = [*SAMPLINGS, "grey", "grey 2x2"]


def patched(data: bytes, at: int, new: bytes, old: int = -1) -> bytes:
    """`new` in the place of as many bytes, or of `old` ones."""
    return data[:at] + new + data[at + (len(new) if old < 0 else old) :]


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(body) + 2).to_bytes(2, "big") + body
