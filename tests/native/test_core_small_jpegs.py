"""Batches of small JPEGs, read, decoded and cropped at once by the core: those of their items."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.core_records import core
from support.raw_pixels import (
    both_ways,
    encoded,
    policy,
    raw_data,
    raw_sample,
    reader_of,
    same,
    scene,
    wholes,
)
from support.small_datasets import flip, make, of_order
from support.trees import shards
from torch.utils.data import DataLoader

import shardio
from shardio import CenterCrop, RandomResizedCrop, ShardDataset, ShardLoader, native
from shardio.dataset.collate import collate, empty
from shardio.errors import DamageError, ShardioError
from shardio.formats.record import RecordShard
from shardio.formats.sample import Sample
from shardio.images import decode as image

pytestmark = pytest.mark.skipif(native.core is None, reason=f"no core: {native.missing}")


def jpeg(i: int, height: int = 8, width: int = 12, **options: Any) -> bytes:
    return encoded(scene(i, height, width), "JPEG", **{"quality": 40 + i % 60} | options)


def jpeg_data(out: Path, counts: list[int], odd: dict[int, Any] | None = None) -> Path:
    fields = (("__key__", "key"), ("image", "image"), ("label", "int"))

    def sample(i: int) -> Sample:
        return {"__key__": b"%d" % i, "image": jpeg(i), "label": i} | (odd or {}).get(i, {})

    return make(out, counts, fields=fields, sample=sample, classes=None)


def small(path: Path, **options: Any) -> ShardDataset:
    usual = {"batch_size": 8, "fields": ("image", "label"), "decode": "numpy"}
    usual |= {"spans": 4, "shuffle_buffer": 20, "unit": 4}
    return ShardDataset(path, **of_order(usual | options))


@pytest.mark.parametrize("many", [False, True])
def test_a_batch_of_jpegs_is_the_batch_of_its_items(tmp_path: Path, many: bool) -> None:
    kinds: list[dict[str, Any]] = [{}, {"mode": "L"}, {"progressive": True}, {"subsampling": 0}]
    odd = {i: {"image": jpeg(i, **kinds[i % 4])} for i in range(83)}
    data = small(jpeg_data(tmp_path / "out", [50, 0, 33], odd), fields=("label", "image"))
    count = 0
    assert policy(data, many) == ("page_cache" if many else "in_memory")
    for whole, collated in both_ways(data, many):
        same(whole, collated)
        count += 1
    assert count == 11
    assert all(torch.is_tensor(images) for _, images in data)


def test_tables_of_the_images_before_change_nothing() -> None:
    """Whoever decodes one: libjpeg where its tables are new, the core where they came before."""
    kinds: list[dict[str, Any]] = [
        *({}, {}, {"optimize": True}, {"mode": "L"}, {"mode": "L", "optimize": True}),
        *({"subsampling": 0}, {"progressive": True}, {"restart_marker_blocks": 1}),
    ]
    chance = random.Random(3)
    for _ in range(30):
        images = [jpeg(chance.randrange(9), 40, 24, **chance.choice(kinds)) for _ in range(5)]
        images = [data for data in images for _ in range(2)]
        out = np.zeros((10, 40, 24, 3), np.uint8)
        assert core().decode_many(images, out) == 10
        for data, row in zip(images, out, strict=True):
            assert np.array_equal(row, image.pixels(data))


def test_damage_is_not_taken_for_an_image_where_tables_came_before() -> None:
    """What libjpeg refuses is refused after others, too: of tables, of the scan, too many bytes."""
    chance, good, taken = random.Random(4), jpeg(1, quality=90), 0
    tables = good.index(b"\xff\xc4")
    for trial in range(900):
        data, at = bytearray(good), chance.randrange(tables, len(good) - 2)
        if trial < 20:
            data[-2:-2] = bytes(trial)
        elif chance.random() < 0.2:
            del data[at : at + chance.randrange(1, 5)]
        else:
            data[at] ^= 1 << chance.randrange(8)
        alone, after = np.zeros((1, 8, 12, 3), np.uint8), np.zeros((3, 8, 12, 3), np.uint8)
        fine = core().decode_many([data], alone)
        if core().decode_many([good, good, data], after) == 3:
            assert fine == 1 and np.array_equal(after[2], alone[0])
            taken += 1
    assert 1 < taken < 900


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 2  # mirrored: of the same size
    return jpeg(3, exif=exif)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    "odd",
    [
        {"image": turned()},
        {"image": jpeg(0, 12, 8)},  # as many pixels
        {"image": jpeg(0, mode="CMYK")},
        {"image": encoded(scene(0, 8, 12))},
        {"image": None},
        {"image": jpeg(0)[:-9]},
        {"image": b""},
        {"label": None},
    ],
)
def test_jpegs_that_do_not_fit_are_left_to_the_ordinary_way(
    tmp_path: Path, odd: dict[str, Any], many: bool
) -> None:
    jpeg_data(tmp_path / "out", [16], {9: odd})
    data = small(tmp_path / "out", unit=1, shuffle=False)
    made = list(wholes(data, many))
    assert [one is None for one in made] == [False, True]
    same(made[0], collate([(image.pixels(jpeg(i)), i) for i in range(8)]))


CROPS = [
    {"transform": RandomResizedCrop(9, flip=True)},
    {"transform": CenterCrop((6, 5), 7, interpolation="bicubic"), "decode": None},
    {"transform": RandomResizedCrop(9), "tail": "exact", "where": {"label": list(range(3, 83))}},
]


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("options", CROPS)
def test_a_batch_of_crops_is_the_batch_of_its_items(
    tmp_path: Path, options: dict[str, Any], many: bool
) -> None:
    kinds: list[Any] = [jpeg(1, 30, 20), jpeg(2, mode="L"), turned(), encoded(scene(3, 8, 12))]
    odd = {i: {"image": kinds[i // 7]} for i in range(0, 28, 7)}
    data = small(jpeg_data(tmp_path / "out", [50, 0, 33], odd), **options)
    count = 0
    for epoch in range(2):
        data.set_epoch(epoch)
        for whole, collated in both_ways(data, many):
            same(whole, collated)
            count += len(whole[1])
    assert count == 2 * (80 if "where" in options else 83)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_make_the_crops_of_the_items(tmp_path: Path, workers: int) -> None:
    data = small(jpeg_data(tmp_path / "out", [80]), transform=RandomResizedCrop(9, flip=True))
    made = []
    for loader in (
        ShardLoader(data, num_workers=workers),
        DataLoader(data, batch_size=None, num_workers=workers),
    ):
        data.set_epoch(len(made))
        made.append([(images.clone(), labels.clone()) for images, labels in loader])
    assert next(wholes(data, False)) is not None
    items = small(tmp_path / "out", transform=RandomResizedCrop(9, flip=True), map=tuple)
    for epoch, batches in enumerate(made):
        items.set_epoch(epoch)
        for batch, wanted in zip(batches, items, strict=True):
            same(batch, wanted)


@pytest.mark.parametrize("odd", [jpeg(0)[:-9], b"", None, b"no image"])
def test_crops_that_cannot_be_made_are_left_to_the_ordinary_way(tmp_path: Path, odd: Any) -> None:
    jpeg_data(tmp_path / "out", [16], {9: {"image": odd}})
    data = small(tmp_path / "out", unit=1, shuffle=False, transform=CenterCrop(8))
    assert [batch is None for batch in wholes(data, False)] == [False, True]
    with pytest.raises(ShardioError, match="record 9 of the dataset"):
        list(data)


def test_other_crops_are_read_the_ordinary_way(tmp_path: Path) -> None:
    jpeg_data(tmp_path / "out", [8])
    crop = CenterCrop(8)
    for options in (
        {"map": list},
        {"target_transform": str},
        {"transform": CenterCrop(8, interpolation="nearest")},
        {"transform": CenterCrop(8, fast=True)},
        {"decode": "cuda"},
        {"fields": ("label", "__key__", "image")},
    ):
        data = small(tmp_path / "out", **{"transform": crop, "decode": "pil"} | options)
        assert all(batch is None for batch in wholes(data, False)), options


def test_images_that_are_no_jpegs_are_soon_read_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = {i: {"image": encoded(scene(i, 8, 12)) if i else jpeg(0, 8)} for i in range(80)}
    data = small(jpeg_data(tmp_path / "out", [80], odd), shuffle=False)
    tried: list[int] = []
    real = RecordShard.blobs

    def counted(self: RecordShard, *given: Any) -> Any:
        tried.append(1)
        return real(self, *given)

    monkeypatch.setattr(RecordShard, "blobs", counted)
    for epoch in range(3):
        data.set_epoch(epoch)
        assert sum(len(labels) for _, labels in data) == 80
    assert 0 < len(tried) <= 10, len(tried)


@pytest.mark.parametrize("first", [b"no image", None, encoded(scene(0, 8, 12)), jpeg(0, 700, 700)])
def test_one_look_is_enough_where_there_are_no_small_jpegs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: Any
) -> None:
    odd = {i: {"image": first} for i in range(3)}
    data = small(jpeg_data(tmp_path / "out", [3], odd))
    reader = reader_of(data, batched_reads=False)
    [rows] = reader
    assert reader.whole(rows, empty) is None
    monkeypatch.setattr(RecordShard, "read", None)
    assert reader.whole(rows, empty) is None


@pytest.mark.parametrize("many", [False, True])
def test_damage_in_a_batch_of_jpegs_is_the_ordinary_error(tmp_path: Path, many: bool) -> None:
    jpeg_data(tmp_path / "out", [40])
    [path] = shards(tmp_path / "out")
    shard = small(tmp_path / "out").reader.shard(0)
    start, size = shard.offset(5), int(shard.sizes[5])
    for at in sorted({0, 8, 12, size - 1, *random.Random(1).sample(range(size), 12)}):
        flip(path, start + at)
        data = small(tmp_path / "out")
        assert policy(data, many) == ("page_cache" if many else "in_memory")
        made = list(wholes(data, many))
        # Without the first record's size no batch is made at once.
        assert made.count(None) == 1 or (made.count(None) == 5 and data._raw.height == 0)  # type: ignore[union-attr]
        with pytest.raises(DamageError, match=rf"record 5 at byte {start} "):
            list(data)
        flip(path, start + at)
    assert len(list(small(tmp_path / "out"))) == 5


def test_without_the_core_jpegs_are_read_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = small(jpeg_data(tmp_path / "out", [40]))
    with_core = [labels.tolist() for _, labels in data]
    monkeypatch.setattr(native, "core", None)
    assert list(wholes(data, batched_reads=False)) == [None] * 5
    again = small(tmp_path / "out")
    assert [labels.tolist() for _, labels in again] == with_core


def test_explain_says_where_records_of_batches_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = small(jpeg_data(tmp_path / "out", [83]))
    by_item = small(tmp_path / "out", transform=np.copy)
    at_once = "page_cache" if native.records() else "in_memory"
    assert (shardio.explain(data).policy, shardio.explain(by_item).policy) == (at_once, "in_memory")
    monkeypatch.setattr(native, "core", None)
    assert shardio.explain(data).policy == "in_memory"


def test_photographs_cost_nothing_more(tmp_path: Path) -> None:
    big = {i: {"image": jpeg(i) + bytes(20_000)} for i in range(8)}
    assert next(wholes(small(jpeg_data(tmp_path / "big", [8], big)))) is None
    assert next(wholes(small(jpeg_data(tmp_path / "small", [8])))) is not None


def test_records_of_a_network_are_gathered_too(
    tmp_path: Path, on_network: Callable[[Path], Path]
) -> None:
    raw_data(tmp_path / "out", [40])
    data = small(on_network(tmp_path / "out"))
    assert policy(data, batched_reads=False) == "network"
    for images, labels in wholes(data, batched_reads=False):
        for one, label in zip(images, labels, strict=True):
            scenes = [scene(i) for i in range(40) if raw_sample(i)["label"] == label]
            assert any(np.array_equal(one.permute(1, 2, 0), scene) for scene in scenes)
