"""Small packed datasets for tests, made without the packer, so that shards can be of any size."""

import hashlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardio.formats import manifest
from shardio.formats.base import ShardInfo
from shardio.formats.record import RecordEncoder
from shardio.formats.sample import Schema
from shardio.order.options import Order
from shardio.storage.options import Storage

FIELDS = (("__key__", "key"), ("image", "image"), ("label", "int"))
ID = bytes(range(16))
CLASSES = ("cat", "dog", "eel")


def payload(number: int) -> bytes:
    """Bytes that are no image, of a length and content of their own."""
    return b"%06d" % number * (10 + number % 7)


@lru_cache(maxsize=4096)
def jpeg(number: int, size: tuple[int, int] = (24, 16)) -> bytes:
    """A small JPEG of its own: a smooth gradient."""
    noise = np.random.default_rng(number)
    coarse = Image.fromarray(noise.integers(0, 256, (3, 4, 3), dtype=np.uint8))
    out = io.BytesIO()
    coarse.resize(size, Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def simple(image: Callable[[int], bytes]) -> Callable[[int], dict[str, Any]]:
    return lambda i: {"__key__": b"k/%06d.jpg" % i, "image": image(i), "label": i % 3}


def make(
    out: str | os.PathLike[str],
    counts: Sequence[int],
    *,
    image: Callable[[int], bytes] = payload,
    fields: Sequence[tuple[str, str]] = FIELDS,
    sample: Callable[[int], Mapping[str, Any]] | None = None,
    classes: Sequence[str] | None = CLASSES,
) -> Path:
    """A dataset with shards of these many records (0 too); record i is `sample(i)`."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    of_number = sample or simple(image)
    schema, infos, blobs, number = Schema(fields), [], 0, 0
    for shard, count in enumerate(counts):
        encoder = RecordEncoder(schema, ID, shard)
        data = bytearray(encoder.header())
        for i in range(number, number + count):
            data += b"".join(encoder.record(of_number(i)))
        data += encoder.finish()
        digest = hashlib.sha256(data).digest()
        name = manifest.shard_name(shard, digest)
        (folder / name).write_bytes(data)
        infos.append(ShardInfo(name, shard, count, len(data), digest, encoder.index_checksum))
        blobs += encoder.blob_bytes
        number += count
    made = manifest.make(
        infos,
        dataset_id=ID,
        format="record",
        schema=schema,
        classes=None if classes is None else tuple(classes),
        options={},
        library="0.1.0",
        blob_bytes=blobs,
    )
    (folder / manifest.MANIFEST).write_bytes(made.dump())
    return folder


ORDER, STORAGE = ({one.name for one in fields(group)} for group in (Order, Storage))


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a ShardDataset, those of `order` and `storage` given with the others."""
    left = dict(options)
    order = {name: left.pop(name) for name in ORDER & left.keys()}
    storage = {name: left.pop(name) for name in STORAGE & left.keys()}
    if order:
        left["order"] = Order(**order)
    if storage:
        left["storage"] = Storage(**storage)
    return left


def of_order(options: Mapping[str, Any]) -> dict[str, Any]:
    """As grouped, without options that say how to shuffle where nothing is to be shuffled."""
    out = set() if options.get("shuffle", True) else {"shuffle_buffer", "spans"}
    return grouped({name: value for name, value in options.items() if name not in out})


def shard_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.shard"))


def flip(path: Path, at: int) -> None:
    """Change one byte of a file in place."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
