"""Images whose pixels are stored as they are, and batches that are made at once."""

import dataclasses
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shardio import ShardDataset, collate
from shardio.dataset import sequence as sequences
from shardio.dataset.collate import empty
from shardio.dataset.decode import ThisRecord
from shardio.dataset.fetch import Fetch
from shardio.dataset.ranks import Consumers
from shardio.dataset.record_reader import RecordReader
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


def reader_of(data: ShardDataset, batched_reads: bool | None = None) -> RecordReader:
    """Return the reader of epoch 0. batched_reads: as if the dataset said so of itself."""
    with pytest.MonkeyPatch.context() as patch:
        if batched_reads is not None:
            patch.setattr(ShardDataset, "batched_reads", batched_reads)
        return data.read_share(data.share_of(0), Consumers(1, 1), data.options)


def wholes(data: ShardDataset, batched_reads: bool | None = None) -> Iterator[Any]:
    """Yield each batch as it is made as a whole; None: it is to be made of its items."""
    reader = reader_of(data, batched_reads)
    for rows in reader:
        yield reader.whole(rows, empty)


def both_ways(data: ShardDataset, batched_reads: bool | None = None) -> Iterator[tuple[Any, Any]]:
    """Yield each batch as it is made at once, and as its items make it."""
    own = data.batched_reads if batched_reads is None else False
    again = reader_of(data, own)
    for batch, rows in zip(wholes(data, batched_reads), again, strict=True):
        yield batch, collate([again.make(row, ThisRecord()) for row in again.rows(rows)])


def policy(data: ShardDataset, batched_reads: bool | None = None) -> str:
    """Return where records wait until the batches of epoch 0 are made."""
    batched = data.batched_reads if batched_reads is None else batched_reads
    fetch = Fetch(data.reader, data.share_of(0), selection=data.selection, batched_reads=batched)
    return fetch.policy.name
