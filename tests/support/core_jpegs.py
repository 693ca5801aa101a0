"""JPEGs for the compiled core: of all samplings, grey, unfinished, and what PIL shows of them."""

import functools
import io
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from shardio import native

core = native.core

needs_cjpeg = pytest.mark.skipif(
    not (shutil.which("cjpeg") and shutil.which("jpegtran")),
    reason="cjpeg and jpegtran are missing (apt-get install libjpeg-turbo-progs)",
)

FILTERS = ("bilinear", "bicubic", "lanczos", "box", "hamming")
SAMPLINGS = ("1x1", "2x1", "2x2", "1x2", "4x1", "4x2", "3x1", "2x2,1x2,1x2", "2x2,2x1,1x2", "grey")
LIMIT = 2**28


@functools.cache
def picture(width, height, seed=0):
    """Edges, ramps and noise: (H, W, 3) uint8."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (-(-height // 5), -(-width // 5), 3), np.uint8)
    fine = rng.integers(0, 24, (height, width, 3), np.uint8)
    return (np.kron(coarse, np.ones((5, 5, 1), np.uint8))[:height, :width] // 2 + fine).astype("u1")


@functools.cache
def written(width, height, sampling="2x2", *options, seed=0):
    pixels = picture(width, height, seed)
    how = ("-grayscale",) if sampling == "grey" else ("-sample", sampling)
    source = b"P6\n%d %d\n255\n" % (width, height) + pixels.tobytes()
    return run("cjpeg", "-quality", "90", *how, *options, data=source)


def run(*command, data):
    return subprocess.run(command, input=data, capture_output=True, check=True).stdout


def by_pil(width, height, **options):
    """The same without cjpeg, for tests that any JPEG serves."""
    out = io.BytesIO()
    Image.fromarray(picture(width, height)).save(out, "JPEG", **options)
    return out.getvalue()


def decoded(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def cropped(data, box, out, interpolation="bilinear", scale=1, max_pixels=LIMIT):
    return core.crop(data, box, out, interpolation, scale, max_pixels)


def apart(a, b):
    return int(np.abs(a.astype(int) - b).max())


def tile_jpeg(data, interval):
    made = core.rewrite(data, interval)
    assert isinstance(made, bytes), made
    return made


@functools.cache
def encoded_grey(width, height):
    out = io.BytesIO()
    Image.fromarray(picture(width, height)).convert("L").save(out, "JPEG")
    return out.getvalue()


def unfinished():
    """A progressive JPEG without its last scans: (32, 24)."""
    data = by_pil(32, 24, progressive=True)
    scans = [i for i in range(len(data) - 1) if data[i : i + 2] == b"\xff\xda"]
    return data[: data.rindex(b"\xff\xc4", 0, scans[4])] + b"\xff\xd9"
