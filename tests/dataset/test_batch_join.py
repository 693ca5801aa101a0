"""Image files straight into a batch: by the core as by Python, by any loader, beside values."""

import copy
import os
import struct
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from support.naive_reader import seed_of
from support.raw_pixels import wholes
from support.small_datasets import flip, jpeg, payload
from support.trees import shards
from torch.utils.data import DataLoader

import shardio
from shardio import EncodedImages, ShardDataset, ShardLoader, collate, native
from shardio.errors import CollateError, DamageError
from shardio.formats.record import RecordShard

Packed = Callable[..., Path]
BOTH = pytest.mark.parametrize("with_core", [True, False], ids=["core", "python"])
FIELDS = ("__key__", "image", "label")


@pytest.fixture
def road(monkeypatch: pytest.MonkeyPatch, with_core: bool) -> None:
    """Read by the core, or by Python."""
    if not with_core:
        monkeypatch.setattr(native, "core", None)
    elif native.records() is None:
        pytest.skip(f"core: {native.described()}")


def stored(key: str) -> bytes:
    """Return the file of the record of a key, as the datasets here have them."""
    return payload(int(key[2:8]))


def check(batch: Any) -> list[str]:
    """Check that the images of a batch are those of its keys; return the keys."""
    keys, images = (batch["__key__"], batch["image"]) if isinstance(batch, dict) else batch[:2]
    assert type(images) is EncodedImages and images.buffer.dtype == torch.uint8
    assert images.buffer.dim() == 1 and images.buffer.is_contiguous()
    assert images.offsets.dtype == torch.int64 and int(images.offsets[0]) == 0
    assert int(images.offsets[-1]) == len(images.buffer)
    assert images.tolist() == [stored(key) for key in keys]
    return list(keys)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"fields": None},
    {"shuffle": False},
    {"tail": "exact"},
    {"tail": "drop"},
    {"rank": 1, "world_size": 3, "tail": "exact"},
    {"where": {"label": [0, 2]}},
    {"shuffle_buffer": 7, "fields": None, "tail": "exact"},
]


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    return {"batch_size": 8, "decode": None, "fields": FIELDS, "seed": 5} | given


def same(one: Any, other: Any) -> bool:
    """Whether two batches have the same values, of the same types."""
    if isinstance(one, dict):
        return list(one) == list(other) and same(tuple(one.values()), tuple(other.values()))
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b)
        else:
            assert a == b
    return True


@pytest.mark.skipif(native.records() is None, reason=f"core: {native.described()}")
@pytest.mark.parametrize("given_options", OPTIONS, ids=str)
def test_the_core_makes_the_batches_that_python_makes(
    packed: Packed, given_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = ShardDataset(packed([20, 0, 31, 1]), **options_of(given_options))
    assert next(wholes(dataset)) is not None
    found = list(dataset)
    monkeypatch.setattr(native, "core", None)
    dataset.set_epoch(0)
    expected = list(dataset)
    assert next(wholes(dataset)) is None
    assert len(found) == len(expected) > 1
    for one, other in zip(found, expected, strict=True):
        assert check(one) == check(other) and same(one, other)


@pytest.mark.parametrize("limit", [2, 8])
def test_no_more_shards_stay_open_than_may(packed: Packed, limit: int) -> None:
    folder = packed([10] * 8)
    dataset = ShardDataset(folder, **options_of({"batch_size": 2, "fields": None}))
    dataset.reader.limit = limit
    found, opened = [], set()
    for batch in dataset:
        found += batch["image"].tolist()
        shown = [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]
        opened.add(sum(path.startswith(f"{os.path.realpath(folder)}/") for path in shown))
    assert max(opened) == limit and len(found) == 80
    dataset.set_epoch(0)
    dataset.reader.limit = 8
    assert found == [one for batch in dataset for one in batch["image"].tolist()]


@BOTH
@pytest.mark.parametrize("given_options", [{}, {"fields": None, "tail": "exact"}], ids=str)
def test_every_loader_gives_the_same_batches(
    packed: Packed, given_options: dict[str, Any], road: None
) -> None:
    folder = packed([50, 51], image=lambda i: payload(i) * 90)  # above what is sent inline
    dataset = ShardDataset(folder, **options_of(given_options))
    expected = list(dataset)

    def again(batches: Iterator[Any]) -> None:
        found = list(batches)
        assert len(found) == len(expected) == 13
        for one, other in zip(found, expected, strict=True):
            assert same(one, other)

    again(iter(DataLoader(fresh(dataset), batch_size=None, num_workers=2)))
    for options in (
        {"num_workers": 0, "threads": 0},
        {"num_workers": 0, "threads": 2},
        {"num_workers": 2},
        {"num_workers": 1, "copy": True, "device": "cpu"},
    ):
        with ShardLoader(fresh(dataset), **options) as loader:  # type: ignore[arg-type]
            again(iter(loader))
    with ShardLoader(fresh(dataset), num_workers=0, threads=0, resident="ram") as loader:
        again(iter(loader))


def fresh(dataset: ShardDataset) -> ShardDataset:
    twin = copy.deepcopy(dataset)
    twin.set_epoch(0)
    return twin


@pytest.mark.parametrize("times", [1, 40, 400])  # pickled whole, pickled in a buffer, shared
def test_batches_of_any_size_cross_processes(packed: Packed, times: int) -> None:
    folder = packed([40], image=lambda i: payload(i) * times)
    dataset = ShardDataset(folder, **options_of({"fields": ("image",)}))
    expected = [batch[0].tolist() for batch in dataset]
    dataset.set_epoch(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pin_memory.*")  # without an accelerator
        loader = DataLoader(dataset, batch_size=None, num_workers=1, pin_memory=True)
        found = [batch[0] for batch in loader]
    assert [images.tolist() for images in found] == expected
    dataset.set_epoch(0)
    with ShardLoader(dataset, num_workers=1) as loader:
        kept = [batch[0] for batch in loader]  # none is overwritten by the next ones
    assert [images.tolist() for images in kept] == expected


@BOTH
def test_a_pass_goes_on_after_a_stop(packed: Packed, road: None) -> None:
    folder = packed([60, 41])
    dataset = ShardDataset(folder, **options_of({}))
    whole = [check(batch) for batch in dataset]
    dataset.set_epoch(0)
    with ShardLoader(dataset, num_workers=1) as loader:
        batches = iter(loader)
        begun = [check(next(batches)) for _ in range(4)]
        state = loader.state_dict()
    later = ShardDataset(folder, **options_of({}))
    later.load_state_dict(state)
    assert begun + [check(batch) for batch in DataLoader(later, batch_size=None)] == whole


@BOTH
def test_a_mixture_has_the_rows_of_all_in_one_buffer(packed: Packed, road: None) -> None:
    def mixture(**second: Any) -> Any:
        parts = [
            ShardDataset(packed([30, 11], "a"), **options_of({})),
            ShardDataset(packed([50], "b"), **options_of(second)),
        ]
        return ShardDataset.mix(parts, [2, 1])

    expected = [check(batch) for batch in mixture()]
    assert len({len(set(keys)) for keys in expected}) >= 1 and all(map(len, expected))
    with ShardLoader(mixture(), num_workers=2) as loader:
        assert [check(batch) for batch in loader] == expected
    loader = DataLoader(mixture(), batch_size=None, num_workers=2)
    assert [check(batch) for batch in loader] == expected
    for batch in mixture(decode=bytes):  # of which nobody knows that it leaves files
        assert type(batch[1]) is list and batch[1] == [stored(key) for key in batch[0]]


def two(i: int) -> dict[str, Any]:
    return {"__key__": b"%d" % i, "image": jpeg(i), "mask": payload(i), "more": b"m%d" % i}


@BOTH
def test_each_image_field_that_is_not_decoded_has_a_buffer(packed: Packed, road: None) -> None:
    folder = packed([9], fields=TWO, sample=two, classes=None)
    options: dict[str, Any] = {"batch_size": 9, "shuffle": False}
    (batch,) = ShardDataset(folder, decode=None, **options)
    assert batch["image"] == [jpeg(i) for i in range(9)]
    assert batch["mask"] == [payload(i) for i in range(9)]
    assert type(batch["image"]) is type(batch["mask"]) is EncodedImages
    assert batch["more"] == [b"m%d" % i for i in range(9)] and type(batch["more"]) is list
    masks = ShardDataset(folder, fields=("mask", "__key__"), decode=None, **options)
    (batch,) = masks
    assert type(batch[0]) is EncodedImages and batch[0] == [payload(i) for i in range(9)]
    assert (next(wholes(masks)) is not None) == (native.core is not None)
    mapping = {"mask": None, "image": "numpy"}
    (batch,) = ShardDataset(folder, fields=("image", "mask"), decode=mapping, **options)
    assert batch[0].shape == (9, 3, 16, 24) and type(batch[1]) is EncodedImages


@BOTH
def test_others_get_bytes_as_ever(packed: Packed, road: None) -> None:
    folder = packed([8])
    files = [payload(i) for i in range(8)]
    options: dict[str, Any] = {"decode": None, "shuffle": False, "fields": ("image", "label")}
    got: list[Any] = []
    list(ShardDataset(folder, batch_size=8, collate_fn=got.append, **options))
    assert [item[0] for item in got[0]] == files
    for more in (
        {"collate_fn": partial(collate, ragged=("image",))},
        {"collate_fn": lambda items: collate(items)},
        {"map": lambda item: item},
        {"transform": lambda data: data},
    ):
        (batch,) = ShardDataset(folder, batch_size=8, **options, **more)  # type: ignore[arg-type]
        assert type(batch[0]) is list and batch[0] == files
    samples = ShardDataset(folder, **options)
    assert [image for image, _ in samples] == files
    (batch,) = DataLoader(ShardDataset(folder, **options), batch_size=8, collate_fn=collate)
    assert type(batch[0]) is list and batch[0] == files
    nested = ShardDataset(
        folder, batch_size=8, target_transform=lambda n: (b"%d" % n, n), **options
    )
    ((images, (texts, numbers)),) = nested
    assert type(images) is EncodedImages and type(texts) is list and len(numbers) == 8


@BOTH
def test_images_that_are_none_are_refused(packed: Packed, road: None) -> None:
    def sample(i: int) -> dict[str, Any]:
        image = None if i == 5 else payload(i)
        return {"__key__": b"k/%06d" % i, "image": image, "label": i}

    folder = packed([8], sample=sample)
    options: dict[str, Any] = {"decode": None, "shuffle": False, "fields": ("image", "label")}
    for loaded in (
        ShardDataset(folder, batch_size=8, **options),
        ShardLoader(ShardDataset(folder, batch_size=8, **options), num_workers=1),
    ):
        with pytest.raises(CollateError) as raised:
            list(loaded)
        said = str(raised.value)
        assert "field 'image' cannot be stacked" in said and "k/000005 has None" in said
        assert "k/000000 has an image file" in said and "ragged=('image',)" in said
    whole = ShardDataset(folder, batch_size=4, **options)  # a batch without it
    assert type(next(iter(whole))[0]) is EncodedImages
    lists = partial(collate, ragged=("image",))
    (batch,) = ShardDataset(folder, batch_size=8, collate_fn=lists, **options)
    assert batch[0][4:6] == [payload(4), None]


@BOTH
@pytest.mark.parametrize("odd", [None, "n", "x", "good", "large"])
def test_values_beside_the_images_are_as_ever(packed: Packed, road: None, odd: str | None) -> None:
    def sample(i: int) -> dict[str, Any]:
        made = {"n": i * 10**12 - 5, "x": i / 7, "good": i % 3 == 0}
        if i == 3 and odd is not None:
            made |= {"n": (1 << 64) - 1} if odd == "large" else {odd: None}  # type: ignore[dict-item]
        # Names of any bytes; files of no byte, of many, and of more than is read at a time.
        image = bytes([i]) * (0, 1, 5_000, 40_000, 15_000, 200_000, 17_000)[i % 7]
        return {"__key__": b"\xff\xe9" + b"k" * (i * 50) + b"%d" % i, "image": image, **made}

    folder = packed([12, 9], fields=KINDS, sample=sample, classes=None)
    data = ShardDataset(folder, batch_size=5, decode=None, tail="drop")
    lists = collate_items(folder)
    try:
        expected = list(lists)
    except CollateError as error:
        with pytest.raises(CollateError, match=r"differ|stacked") as raised:
            list(data)
        assert str(raised.value) == str(error)
        return
    for batch, items in zip(data, expected, strict=True):
        assert type(batch["image"]) is EncodedImages
        assert same(batch, items | {"image": EncodedImages.join(items["image"])})


def collate_items(folder: Path) -> ShardDataset:
    """The same batches, their images as lists of bytes."""
    lists = partial(collate, ragged=("image",))
    return ShardDataset(folder, batch_size=5, decode=None, tail="drop", collate_fn=lists)


@BOTH
@pytest.mark.parametrize("times", [1, 900])  # read with its neighbours, and on its own
def test_damage_is_told_as_ever(packed: Packed, road: None, times: int) -> None:
    folder = packed([20, 20], image=lambda i: payload(i) * times)
    dataset = ShardDataset(folder, **options_of({}))
    shard = dataset.reader.shard(1)
    dataset.reader.forget()
    flip(shards(folder)[1], shard.offset(7) + 60)
    messages = []
    twin = ShardDataset(folder, **options_of({}))
    for loaded in (dataset, ShardLoader(twin, num_workers=1)):
        seen = []
        with pytest.raises(DamageError, match=r"record 7 at byte \d+ \(key k/000027.jpg") as raised:
            for batch in loaded:
                seen.append(batch)
        messages.append(str(raised.value))
        assert len(seen) < 5
    assert messages[0] == messages[1]


@BOTH
def test_a_head_that_lies_is_told_as_ever(packed: Packed, road: None) -> None:
    """The checksum of a record is right, and its head says that its image has a byte less."""
    folder = packed([5])
    dataset = ShardDataset(folder, **options_of({"batch_size": 5}))
    shard = dataset.reader.shard(0)
    assert isinstance(shard, RecordShard)
    path, at, size = shards(folder)[0], shard.offset(2), int(shard.sizes[2])
    data = bytearray(path.read_bytes())
    body = data[at + 8 : at + size]
    head = struct.unpack_from("<I", body, 4)[0]
    place = body.index(bytes([len(payload(2))]), 8, 8 + head)
    body[place] -= 1
    checksum = xxhash.xxh3_64_intdigest(bytes(body), seed_of(shard) + 2)
    data[at : at + size] = struct.pack("<Q", checksum) + body
    path.write_bytes(data)
    dataset.reader.forget()
    with pytest.raises(DamageError, match=r"record 2 .*its checksum is right, but it cannot be"):
        list(dataset)


def test_watch_counts_these_batches(packed: Packed) -> None:
    dataset = ShardDataset(packed([60]), **options_of({}))
    with ShardLoader(dataset, num_workers=1) as loader:
        batches = iter(loader)
        for batch in batches:
            stats = batches.batch_stats
            assert stats.rows == len(batch[1]) and stats.read_s > 0 and stats.cpu_s >= 0
        watched = shardio.watch(loader)
        assert sum(1 for _ in watched) == 8


TWO = (("__key__", "key"), ("image", "image"), ("mask", "image"), ("more", "bytes"))
KINDS = (("__key__", "key"), ("image", "image"), ("n", "int"), ("x", "float"), ("good", "bool"))
