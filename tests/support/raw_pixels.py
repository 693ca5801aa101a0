"""Images whose pixels are stored as they are."""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from shardio.dataset import sequence as sequences
from shardio.formats import manifest
from shardio.formats.sample import Sample
from shardio.images import decode as image
from shardio.storage.location import locate
from support.small_datasets import make


def encoded(array: Any, kind: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).convert(mode).save(out, kind, **options)
    return out.getvalue()


def scene(number: int, height: int = 6, width: int = 8) -> Any:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def packed(out: Path) -> dict[bytes, bytes]:
    return {s["__key__"]: s["image"] for s in sequences.stored(out)}


SCALARS = (("label", "int"), ("score", "float"), ("good", "bool"))


def raw_sample(i: int) -> Sample:
    return {
        "__key__": b"k" * (1 + i % 7) + b"%d" % i,
        "image": image.ppm(scene(i)),
        "label": i % 11 - 3,
        "score": i / 7,
        "good": i % 3 == 0,
    }


def raw_data(
    out: Path, counts: list[int], sample: Callable[[int], Sample] = raw_sample, size: Any = (6, 8)
) -> Path:
    """A dataset that says of itself that it was packed raw."""
    fields = (("__key__", "key"), ("image", "image"), *SCALARS)
    make(out, counts, fields=fields, sample=sample, classes=None)
    made = manifest.load(locate(out))
    options = {"encode": "raw", "pixels": list(size)}
    (out / manifest.MANIFEST).write_bytes(dataclasses.replace(made, options=options).dump())
    return out


def same(whole: Any, collated: Any) -> None:
    assert type(whole) is type(collated) is tuple and len(whole) == len(collated)
    for a, b in zip(whole, collated, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a, b)
