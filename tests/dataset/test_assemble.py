"""Rows to items, items to batches: in place or collated, marked, ragged; errors name the rows."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from support import small_datasets
from support.scenes import (
    BUILT_IN,
    COUNT,
    FAILING,
    FIELDS,
    LOADERS,
    RAGGED,
    boxes_of,
    check_planes,
    shown,
)
from support.small_datasets import jpeg
from torch.utils.data import DataLoader

import shardio
from shardio import CenterCrop, CollateError, OptionError, ShardDataset, ShardLoader
from shardio.images.decode import pixels

Packed = Callable[..., Path]


def test_exact_adds_a_key_to_dicts(packed: Packed) -> None:
    folder = packed([5])
    (batch,) = ShardDataset(folder, batch_size=8, decode=None, tail="exact")
    assert list(batch) == ["__key__", "image", "label", "valid"]
    assert batch["valid"].tolist() == [True] * 5 + [False] * 3
    assert batch["label"].tolist()[:5] != [] and len(batch["__key__"]) == 8


def test_exact_and_a_field_called_valid(packed: Packed) -> None:
    folder = packed(
        [5],
        fields=(("__key__", "key"), ("valid", "int")),
        sample=lambda i: {"__key__": b"%d" % i, "valid": i},
    )
    with pytest.raises(OptionError, match="adds the field 'valid'"):
        ShardDataset(folder, tail="exact")
    assert len(list(ShardDataset(folder, tail="exact", fields=("valid",)))) == 5


@pytest.mark.parametrize("tail", ["pad", "exact"])
def test_crops_are_made_in_the_memory_of_their_batch(
    packed: Packed, monkeypatch: pytest.MonkeyPatch, tail: Any
) -> None:
    given: list[Any] = []
    made = CenterCrop.__call__

    def crop(self: CenterCrop, image: Any, draw: int = 0, out: Any = None) -> Any:
        given.append(out)
        return made(self, image, draw, out)

    monkeypatch.setattr(CenterCrop, "__call__", crop)
    dataset = ShardDataset(
        packed([12], image=jpeg),
        batch_size=4,
        fields=("label", "image", "__key__"),  # with keys, small images are not made at once
        transform=CenterCrop(8),
        tail=tail,
    )
    batches = [batch[1] for batch in dataset]
    assert len(batches) == 3
    for number, images in enumerate(batches):
        for row, out in enumerate(given[4 * number : 4 * number + 4]):
            assert np.shares_memory(out, images[row].numpy())


def test_a_batch_with_an_image_that_cannot_be_made_in_place_is_collated_all_the_same(
    packed: Packed,
) -> None:
    def sample(i: int) -> dict[str, Any]:
        image = None if i >= 4 else jpeg(i)
        return {"__key__": b"%d" % i, "image": image, "label": i}

    folder = packed(
        [6], fields=(("__key__", "key"), ("image", "image"), ("label", "int")), sample=sample
    )
    options: dict[str, Any] = {"fields": ("image", "label"), "transform": CenterCrop(8)}
    dataset = ShardDataset(folder, batch_size=2, shuffle=False, **options)
    batches = iter(dataset)
    assert [len(next(batches)[0]) for _ in range(2)] == [2, 2]
    assert next(batches)[0] == [None, None]


def test_map_never_sees_valid(scenes: Path) -> None:
    counts: list[int] = []

    def note(item: Any) -> Any:
        counts.append(len(item))
        return item

    for fields in (("label",), None):
        data = ShardDataset(
            scenes, batch_size=4, fields=fields, map=note, tail="exact", rank=1, world_size=2
        )
        for batch in data:
            valid = batch[-1] if fields else batch["valid"]
            assert valid.dtype == torch.bool
    assert set(counts) == {1, len(FIELDS)}


def test_a_map_may_give_the_same_dict_again(scenes: Path) -> None:
    one = {"x": 1}
    data = ShardDataset(scenes, batch_size=4, map=lambda _: one, tail="exact")
    assert sum(int(batch["valid"].sum()) for batch in data) == COUNT and one == {"x": 1}


@pytest.mark.parametrize("made", [[1], {"valid": 1}, 3])
def test_what_cannot_be_marked_valid_is_refused(scenes: Path, made: Any) -> None:
    data = ShardDataset(scenes, batch_size=4, map=lambda _: made, tail="exact")
    with pytest.raises(OptionError, match="tail='exact' adds 'valid' to tuples and dicts"):
        next(iter(data))


def stacked(items: list[Any]) -> Any:
    for image, _ in items:
        check_planes(image)
    return torch.stack([image for image, _ in items]), torch.tensor([label for _, label in items])


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_collate_fn_of_the_user_gets_planes(scenes: Path, loader: str, mixed: bool) -> None:
    if mixed:
        parts = [ShardDataset(scenes, batch_size=4, **BUILT_IN) for _ in range(2)]
        data: Any = ShardDataset.mix(parts, weights=[1, 1], collate_fn=stacked)
    else:
        data = ShardDataset(scenes, batch_size=4, collate_fn=stacked, **BUILT_IN)
    for images, _ in LOADERS[loader](data):
        assert images.shape[1:] == (3, 8, 8)


def to_tuple(item: Any) -> Any:
    return item["image"], boxes_of(item)["boxes"], item["label"]


@pytest.mark.parametrize("loader", [*LOADERS, "mixture"])
def test_unlike_rows_name_two_records_and_their_shapes(scenes: Path, loader: str) -> None:
    data: Any = ShardDataset(scenes, map=boxes_of, **RAGGED)
    if loader == "mixture":
        data = ShardDataset.mix(
            [data, ShardDataset(scenes, map=boxes_of, **RAGGED)], weights=[1, 1]
        )
    with pytest.raises(CollateError) as caught:
        list(FAILING[loader if loader in LOADERS else "here"](data))
    text = str(caught.value)
    found = re.search(
        r"field 'boxes' cannot be stacked to one tensor: record (\d) of the dataset, k/0\1 has "
        r"\((\d), 4\) float32, and record (\d) of the dataset, k/0\3 has \((\d), 4\) float32",
        text,
    )
    assert found is not None, text
    first, shape, second, other = map(int, found.groups())
    assert shape == first % 4 and other == second % 4 and shape != other
    assert "collate_fn=functools.partial(shardio.collate, ragged=('boxes',))" in text


def test_samples_that_dataloader_collates_are_named_by_their_keys(scenes: Path) -> None:
    data = ShardDataset(scenes, map=boxes_of, shuffle=False)
    loader = DataLoader(data, batch_size=COUNT, collate_fn=shardio.collate)
    with pytest.raises(CollateError, match=r"item \d of the batch, k/0\d, has \(\d, 4\) float32"):
        next(iter(loader))


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("how", ["dict", "tuple", "names of fields"])
def test_ragged_fields_stay_lists(scenes: Path, loader: str, how: str) -> None:
    options = RAGGED | {"batch_size": 3}
    if how == "names of fields":
        # Arrays large enough to be written in place, which a list of views would not survive.
        options |= {"fields": ("image", "label"), "decode": "numpy"}
        place: Any = 0
        ragged: Any = ("image",)
    else:
        options |= {"map": boxes_of if how == "dict" else to_tuple}
        place = "boxes" if how == "dict" else 1
        ragged = ("boxes",) if how == "dict" else (1, 0)
    data = ShardDataset(scenes, collate_fn=partial(shardio.collate, ragged=ragged), **options)
    kept = []
    for epoch in range(2):
        data.set_epoch(epoch)
        kept += list(LOADERS[loader](data))
    for batch in kept:
        labels = batch["label"] if how == "dict" else batch[-1]
        assert type(labels) is torch.Tensor and type(batch[place]) is list
        for row, label in zip(batch[place], labels.tolist(), strict=True):
            if how == "names of fields":
                assert np.array_equal(row, pixels(small_datasets.jpeg(label)))
            else:
                assert row.shape == (label % 4, 4)


def test_names_of_fields_that_are_not_known_are_refused(scenes: Path) -> None:
    data = ShardDataset(
        scenes, map=to_tuple, collate_fn=partial(shardio.collate, ragged=("boxes",)), **RAGGED
    )
    with pytest.raises(
        CollateError,
        match="ragged has 'boxes', but samples are tuples of 3 whose names are not known",
    ):
        next(iter(data))
    with (
        ShardLoader(data, num_workers=0) as loader,
        pytest.raises(CollateError, match="names are not known"),
    ):
        next(iter(loader))
    with pytest.raises(
        OptionError, match=r"ragged is 'boxes', expected several fields, such as \('boxes',\)"
    ):
        ShardDataset(scenes, collate_fn=partial(shardio.collate, ragged="boxes"))


def bad_batch(items: list[Any]) -> Any:
    raise LookupError("no batch")


@pytest.mark.parametrize("loader", LOADERS)
def test_an_exception_of_a_collate_fn_names_its_batch(scenes: Path, loader: str) -> None:
    data = ShardDataset(scenes, collate_fn=bad_batch, **RAGGED | {"batch_size": 4})
    with pytest.raises(LookupError) as caught:
        list(LOADERS[loader](data))
    assert "a batch of 4: record 0 of the dataset, k/00, to record 3 of the dataset, k/03" in shown(
        caught.value
    )
