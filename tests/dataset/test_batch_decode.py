"""Small images straight into a batch: the batch of the items, or the ordinary way."""

import contextlib
import dataclasses
import functools
import json
import struct
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.naive_reader import seed_of
from support.packing import pack_raw, png_folder
from support.raw_pixels import both_ways, encoded, policy, raw_data, raw_sample, same, scene, wholes
from support.small_datasets import flip
from support.trees import shards

from shardio import CenterCrop, Order, ShardDataset, ShardLoader, collate, native
from shardio.errors import CollateError, DamageError
from shardio.formats import manifest
from shardio.formats.index import checksum
from shardio.formats.record import RecordShard
from shardio.formats.sample import Sample
from shardio.images import decode as image
from shardio.storage.location import locate


@pytest.fixture(params=["core", "core without xxHash", "python"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What reads records: the core, or None."""
    if request.param == "python":
        monkeypatch.setattr(native, "core", None)
    elif request.param != "core" and native.core is not None:
        rest = set(vars(native.core)) - {"gather", "blobs", "samples"}
        part = SimpleNamespace(**{name: getattr(native.core, name) for name in rest})
        monkeypatch.setattr(native, "core", part)
    elif native.records() is None:
        pytest.skip(f"core: {native.described()}")
    return native.records()


@pytest.mark.parametrize("buffer", [2, 20, "all"])
@pytest.mark.parametrize("where", [None, {"label": [2, 5, -1]}])
@pytest.mark.parametrize("tail", ["pad", "exact"])
def test_a_batch_at_once_is_the_batch_of_its_items(
    tmp_path: Path, core: Any, buffer: Any, where: Any, tail: Any
) -> None:
    raw_data(tmp_path / "out", [50, 0, 31, 2])
    data = ShardDataset(
        tmp_path / "out",
        batch_size=8,
        order=Order(unit=4, spans=4),
        fields=("score", "image", "label", "good", "label"),
        decode="numpy",
        shuffle_buffer=buffer,
        where=where,
        tail=tail,
        rank=1,
        world_size=2,  # whose last batch repeats records
    )
    for whole, collated in both_ways(data):
        same(whole, collated)
    expected = "page_cache" if buffer == "all" or core is not None else "in_memory"
    assert policy(data) == expected


def test_a_short_last_batch_and_large_images(tmp_path: Path, core: Any) -> None:
    def large(i: int) -> Sample:
        return raw_sample(i) | {"image": image.ppm(scene(i, 70, 80))}

    raw_data(tmp_path / "out", [7, 6], large, (70, 80))  # 16.8 KB: read one by one
    data = ShardDataset(tmp_path / "out", batch_size=5, fields=("image",), decode="numpy")
    sizes = []
    for whole, collated in both_ways(data):
        same(whole, collated)
        sizes.append(len(whole[0]))
    assert policy(data) == "page_cache"
    assert sizes == [5, 5, 3]


def test_iterating_gives_the_same_batches(tmp_path: Path) -> None:
    raw_data(tmp_path / "out", [20, 15])
    data = ShardDataset(
        tmp_path / "out", batch_size=8, fields=("image", "label"), decode="numpy", tail="exact"
    )
    collated = [batch for _, batch in both_ways(data)]
    marked = 0
    for (one, labels, valid), other in zip(data, collated, strict=True):
        same((one, labels), other)
        marked += int(valid.sum())
    assert marked == 35


@pytest.mark.parametrize("workers", [None, 0, 1])
def test_ragged_fields_stay_lists_where_batches_are_made_at_once(
    tmp_path: Path, workers: int | None
) -> None:
    raw_data(tmp_path / "out", [9])
    data = ShardDataset(
        tmp_path / "out",
        batch_size=4,
        fields=("image", "label"),
        decode="numpy",
        collate_fn=partial(collate, ragged=("image",)),
    )
    loader: Any = data if workers is None else ShardLoader(data, num_workers=workers)
    kinds = [(type(images), type(labels)) for images, labels in loader]
    assert kinds == [(list, torch.Tensor)] * 3


def test_a_damaged_record_is_the_ordinary_error(tmp_path: Path, core: Any) -> None:
    raw_data(tmp_path / "out", [4])
    [path] = shards(tmp_path / "out")
    data = ShardDataset(tmp_path / "out", batch_size=4, fields=("image",), decode="numpy")
    shard = data.reader.shard(0)
    start, size = shard.offset(2), int(shard.sizes[2])
    for at in (0, 7, 8, 11, 12, 15, 16, 20, 40, 60, size - 1):  # checksum, lengths, head, pixels
        flip(path, start + at)
        fresh = ShardDataset(tmp_path / "out", batch_size=4, fields=("image",), decode="numpy")
        with pytest.raises(DamageError, match=rf"record 2 at byte {start} ") as raised:
            next(wholes(fresh))
        with pytest.raises(DamageError) as ordinary:
            fresh.reader.shard(0).read(2)
        assert str(raised.value) == str(ordinary.value)
        flip(path, start + at)
    assert len(list(data)) == 1


UNLIKE = (image.ppm(scene(0, 8, 6)), image.ppm(scene(0, 6, 9)))


@pytest.mark.parametrize(
    "odd",
    [
        {"image": UNLIKE[0]},  # as many pixels, of another shape
        {"image": UNLIKE[1]},
        {"image": image.ppm(scene(0)) + b"more"},
        {"image": encoded(scene(0))},
        {"image": None},
        {"image": b""},
        {"label": None},
        {"score": None},
        {"label": 2**63},
    ],
)
def test_what_does_not_fit_is_left_to_the_ordinary_way(
    tmp_path: Path, core: Any, odd: dict[str, Any]
) -> None:
    raw_data(tmp_path / "out", [6, 6], lambda i: raw_sample(i) | (odd if i == 9 else {}))
    data = ShardDataset(
        tmp_path / "out",
        batch_size=6,
        order=Order(unit=1),
        shuffle=False,
        fields=("image", "label", "score"),
        decode="numpy",
    )
    made = list(wholes(data, batched_reads=False))
    assert [one is None for one in made].count(True) == 1  # the batch with record 9
    if odd.get("image") != b"":
        # And it comes nevertheless, or what makes the record unlike the others is said.
        unlike = None in odd.values() or odd.get("image") in UNLIKE
        with (
            pytest.raises(CollateError, match="record 9 of the dataset")
            if unlike
            else contextlib.nullcontext()
        ):
            assert len(list(data)) == 2


def test_ragged_fields_are_lists_where_all_images_are_alike(tmp_path: Path) -> None:
    pack_raw(png_folder(tmp_path / "src"), tmp_path / "out")
    data = ShardDataset(
        tmp_path / "out",
        batch_size=6,
        fields=("image", "label"),
        decode="numpy",
        collate_fn=functools.partial(collate, ragged=("image",)),
    )
    assert [type(images) for images, _ in data] == [list, list]


def test_ints_too_large_for_a_tensor_are_left_to_the_ordinary_way(tmp_path: Path) -> None:
    raw_data(tmp_path / "out", [4], lambda i: raw_sample(i) | {"label": 2**63 + i})
    data = ShardDataset(
        tmp_path / "out", batch_size=4, fields=("image", "label"), decode="numpy", shuffle=False
    )
    assert list(wholes(data)) == [None]
    [(_, labels)] = data
    assert sorted(labels) == [2**63 + i for i in range(4)]


def test_a_record_that_lies_under_a_right_checksum_is_damage(tmp_path: Path, core: Any) -> None:
    def longer(i: int) -> Sample:
        return raw_sample(i) | ({"image": image.ppm(scene(i)) + b"x"} if i == 1 else {})

    raw_data(tmp_path / "out", [4], longer)
    [path] = shards(tmp_path / "out")
    data = ShardDataset(tmp_path / "out", batch_size=4, fields=("image",), decode="numpy")
    shard = data.reader.shard(0)
    assert isinstance(shard, RecordShard)
    start, size = shard.offset(1), int(shard.sizes[1])
    file = bytearray(path.read_bytes())
    record = file[start : start + size]
    (length,) = struct.unpack_from("<I", record, 8)
    struct.pack_into("<I", record, 8, length - 1)
    struct.pack_into("<Q", record, 0, checksum(bytes(record[8:]), seed_of(shard) + 1))
    file[start : start + size] = record
    path.write_bytes(file)
    with pytest.raises(DamageError, match=rf"its length is {length - 1}, expected {length}"):
        list(wholes(data, batched_reads=False))


@pytest.mark.parametrize(
    "options",
    [
        {"decode": "pil"},
        {"decode": bytes},
        {"decode": None, "map": tuple},
        {"decode": None, "fields": ("image", "image")},
        {"transform": CenterCrop(4)},
        {"transform": np.copy},
        {"target_transform": str},
        {"fields": None},
        {"fields": ("image", "__key__")},
        {"fields": ("label",)},
        {"fields": ("image", "image")},
    ],
)
def test_other_datasets_are_read_the_ordinary_way(tmp_path: Path, options: dict[str, Any]) -> None:
    raw_data(tmp_path / "out", [6])
    usual = {"batch_size": 6, "fields": ("image", "label"), "decode": "numpy"}
    data = ShardDataset(tmp_path / "out", **usual | options)
    assert all(batch is None for batch in wholes(data))
    data = ShardDataset(tmp_path / "out", **usual)
    assert next(wholes(data)) is not None


def test_no_memory_is_taken_for_pixels_that_are_not_there(tmp_path: Path) -> None:
    raw_data(tmp_path / "out", [6], size=(1 << 20, 1 << 20))
    data = ShardDataset(tmp_path / "out", batch_size=6, fields=("image",), decode="numpy")
    assert list(wholes(data)) == [None]


@pytest.mark.parametrize("size", [None, [6], [6, 8, 3], [0, 8], ["6", 8], [6.0, 8], "68", [-6, -8]])
def test_a_manifest_that_says_nonsense_of_the_pixels_is_read_the_ordinary_way(
    tmp_path: Path, size: Any
) -> None:
    raw_data(tmp_path / "out", [6])
    path = tmp_path / "out" / manifest.MANIFEST
    made = manifest.load(locate(tmp_path / "out"))
    options = made.options | {"pixels": size}
    path.write_bytes(dataclasses.replace(made, options=options).dump())
    assert json.loads(path.read_bytes())["options"]["pixels"] == size
    data = ShardDataset(tmp_path / "out", batch_size=6, fields=("image",), decode="numpy")
    assert list(wholes(data)) == [None]
    assert [len(batch) for (batch,) in data] == [6]
