"""ShardDataset: the order law on real DataLoaders, epochs, ranks, tails, errors through workers."""

import copy
import inspect
import json
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from PIL import Image
from support.reading import COUNTS, KEYS, N, batches, drain, flat, keyed
from support.small_datasets import CLASSES, flip, grouped, jpeg, payload, shard_files
from torch.utils.data import DataLoader

import shardio
from shardio import (
    CenterCrop,
    CollateError,
    DamageError,
    DecodeError,
    EpochError,
    NotPackedError,
    OptionError,
    RandomResizedCrop,
    ShardDataset,
    ShardLoader,
    StateError,
    StorageError,
)
from shardio.dataset.other_names import OTHER_NAMES
from shardio.images.decode import decode as decode_image
from shardio.order.epoch import default_unit
from shardio.order.rng import draw

Packed = Callable[..., Path]
# More workers than cores is what several tests want.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# --- the order ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [None, 4, 10, 200])
def test_every_record_comes_exactly_once(
    packed: Packed, workers: int, batch_size: int | None
) -> None:
    dataset = keyed(packed(COUNTS), batch_size=batch_size)
    got = batches(dataset, workers)
    assert sorted(flat(got)) == KEYS
    assert len(got) == len(dataset)


@pytest.mark.parametrize("batch_size", [4, 10, 12])
def test_the_number_of_workers_does_not_change_the_batches(packed: Packed, batch_size: int) -> None:
    dataset = keyed(packed(COUNTS), batch_size=batch_size)
    alone = batches(dataset)
    for workers in (1, 2, 3, 5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dataset.set_epoch(0)
            assert batches(dataset, workers) == alone


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_ranks_share_the_batches_of_one(packed: Packed, workers: int) -> None:
    folder = packed(COUNTS)
    alone = batches(keyed(folder, batch_size=8, unit=4))
    for world_size in (2, 4):
        each = [
            batches(
                keyed(
                    folder,
                    batch_size=8 // world_size,
                    unit=2 if world_size == 4 else 4,
                    rank=rank,
                    world_size=world_size,
                ),
                workers,
            )
            for rank in range(world_size)
        ]
        assert len({len(rank) for rank in each}) == 1
        together = [flat(list(step)) for step in zip(*each, strict=True)]
        if world_size == 2:  # the same unit, and the same global batch
            assert flat(together)[:N] == flat(alone)
        assert sorted(set(flat(together))) == KEYS


def test_persistent_spawned_workers_give_the_order_of_forked_ones(packed: Packed) -> None:
    dataset = keyed(packed(COUNTS), batch_size=10)
    expected = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        expected.append(batches(dataset, 2))
    assert expected[0] != expected[1] != expected[2]
    dataset.set_epoch(0)
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    for epoch in range(3):
        dataset.set_epoch(epoch)
        assert [list(batch[0]) for batch in loader] == expected[epoch]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_seed_and_the_epoch_decide_the_order(packed: Packed, workers: int) -> None:
    folder = packed(COUNTS)
    orders = {}
    for seed in (0, 1):
        for epoch in (0, 1):
            dataset = keyed(folder, batch_size=10, seed=seed)
            dataset.set_epoch(epoch)
            orders[seed, epoch] = flat(batches(dataset, workers))
            assert sorted(orders[seed, epoch]) == KEYS
            again = keyed(folder, batch_size=10, seed=seed)
            again.set_epoch(epoch)
            assert flat(batches(again, workers)) == orders[seed, epoch]
    assert len(set(map(tuple, orders.values()))) == 4


@pytest.mark.parametrize("counts", [[], [0, 0], [1], [0, 1], [2, 0, 1], [1] * 9])
@pytest.mark.parametrize("workers", [0, 5])
def test_datasets_smaller_than_anything(packed: Packed, counts: list[int], workers: int) -> None:
    folder = packed(counts)
    for batch_size in (None, 4):
        dataset = keyed(folder, batch_size=batch_size)
        assert sorted(flat(batches(dataset, workers))) == KEYS[: sum(counts)]


def test_samples_can_be_batched_by_the_loader(packed: Packed) -> None:
    dataset = ShardDataset(packed(COUNTS), fields=("label", "__key__"), decode=None)
    loader = DataLoader(dataset, batch_size=8, num_workers=2)
    got = [key for _, keys in loader for key in keys]
    assert sorted(got) == KEYS


@pytest.mark.parametrize("buffer", [2, 5, 10**9, "all", "1kB", "0.5 MiB", "100B"])
def test_shuffle_buffers_of_every_kind(packed: Packed, buffer: int | str) -> None:
    dataset = keyed(packed(COUNTS), batch_size=10, shuffle_buffer=buffer)
    assert sorted(flat(batches(dataset))) == KEYS


@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("batch_size", [None, 10])
def test_without_a_shuffle_it_is_the_order_of_the_index(
    packed: Packed, batch_size: int | None, world_size: int, workers: int
) -> None:
    folder = packed(COUNTS)
    options = {"shuffle": False, "batch_size": batch_size, "tail": "drop"}
    ranks = [
        keyed(folder, rank=rank, world_size=world_size, **options) for rank in range(world_size)
    ]
    for epoch in (0, 0, 3):
        for ds in ranks:
            ds.set_epoch(epoch)
        found = [flat(step) for step in zip(*(batches(ds, workers) for ds in ranks), strict=True)]
        if workers and batch_size is None:  # DataLoader's own order of samples
            found = [sorted(flat(found))]
        assert flat(found) == KEYS[: len(flat(found))] and len(flat(found)) >= 80


def test_going_on_without_a_shuffle(packed: Packed) -> None:
    folder = packed(COUNTS)
    dataset = keyed(folder, shuffle=False, batch_size=10)
    state = dataset.state_dict(steps=4)
    again = ShardDataset(folder, batch_size=10, fields=("__key__",), decode=None)
    again.load_state_dict(state)
    assert not again.shuffle and flat(batches(again)) == KEYS[40:]
    with pytest.raises(StateError, match="shuffle is True, but the state was saved with False"):
        keyed(folder, shuffle=True, batch_size=10).load_state_dict(state)
    with pytest.raises(StateError, match="shuffle is False, but the state was saved with True"):
        dataset.load_state_dict(keyed(folder, batch_size=10).state_dict(steps=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle_buffer": 0}, "shuffle_buffer is 0, which shuffles nothing: give shuffle=False"),
        ({"shuffle_buffer": 1}, "shuffle_buffer is 1, which shuffles nothing: give shuffle=False"),
        ({"shuffle": False, "shuffle_buffer": 50}, "shuffle_buffer is 50: leave one of them out"),
        ({"shuffle": False, "spans": 4}, "spans is 4: leave one of them"),
        ({"shuffle": "all"}, "shuffle is 'all': expected True or False"),
        ({"shuffle": 0}, "shuffle is 0: expected True or False"),
        ({"shuffle": np.False_, "shuffle_buffer": 50}, "shuffle_buffer is 50: leave one of them"),
        ({"shuffle_buffer": False}, "shuffle_buffer is False, which shuffles nothing"),
    ],
)
def test_there_is_one_way_not_to_shuffle(
    packed: Packed, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        ShardDataset(packed([5]), **grouped(options))


def test_tune_without_a_shuffle_is_of_the_default_spans(packed: Packed) -> None:
    found = shardio.tune(ShardDataset(packed([50]), batch_size=8, shuffle=False))
    assert "spans" not in found.call


@pytest.mark.parametrize("name", ["drop_last", "remote", "local", "shuffle_size", "num_workers"])
def test_names_that_others_have_are_answered(packed: Packed, name: str) -> None:
    with pytest.raises(OptionError, match=f"^ShardDataset takes no {name}: give .*"):
        ShardDataset(packed([5]), **{name: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'bread'"):
        ShardDataset(packed([5]), bread=1)  # type: ignore[call-arg]


OTHERS = json.loads((Path(__file__).parents[1] / "golden" / "names_of_others.json").read_text())


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: str(other["of"]))
def test_every_option_of_other_datasets_and_loaders_is_taken_or_answered(
    packed: Packed, other: dict[str, Any]
) -> None:
    path = packed([5])
    ours = inspect.signature(ShardDataset).parameters
    for name in {*other["names"]} - ours.keys():
        with pytest.raises(OptionError, match=f"^ShardDataset takes no {name}: [^\\n]+$"):
            ShardDataset(path, **{name: 1})
    dataset = ShardDataset(path, batch_size=2)
    loaders = inspect.signature(ShardLoader).parameters
    for name in {*other["names"]} - loaders.keys() - ours.keys():
        with pytest.raises(OptionError, match=f"^ShardLoader takes no {name}: [^\\n]+$"):
            ShardLoader(dataset, **{name: 1})


def test_no_answer_hides_an_option_and_all_say_what_to_write(packed: Packed) -> None:
    assert not OTHER_NAMES.keys() & inspect.signature(ShardDataset).parameters.keys()
    written = ("give ", "leave it out", "the order is ")
    assert [name for name, one in OTHER_NAMES.items() if not one.startswith(written)] == []
    with pytest.raises(OptionError, match=r'give the URL as the first .*ShardDataset\("s3://'):
        ShardDataset(packed([5]), remote="s3://x")  # type: ignore[call-arg]


def test_names_of_others_are_answered_by_open_mix_and_the_loader(packed: Packed) -> None:
    path = packed([5])
    for name in ("target_transform", "loader", "is_valid_file", "transforms", "remote", "shuffle"):
        with pytest.raises(OptionError, match=f"^shardio.open takes no {name}: "):
            shardio.open(path, **{name: 1})  # type: ignore[arg-type]
    dataset = ShardDataset(path, batch_size=2)
    for name in inspect.signature(ShardDataset).parameters:
        with pytest.raises(OptionError, match=f"^ShardLoader takes no {name}: "):
            ShardLoader(dataset, **{name: 1})  # type: ignore[arg-type]
    for name in ("streams", "proportion", "batch_size", "transform", "sampling_method"):
        with pytest.raises(OptionError, match=rf"^ShardDataset\.mix takes no {name}: "):
            ShardDataset.mix([dataset], **{name: 1})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="shuffle_buffer=1000"):
        ShardDataset(path, shuffle=1000)


def test_a_selection_begins_at_its_own_first_row(packed: Packed) -> None:
    dataset = ShardDataset(packed([20]), batch_size=2, decode=None)
    items = iter(dataset)
    next(items), next(items)
    chosen = dataset.select(range(8))
    assert chosen.state_dict()["units"] == 0
    assert dataset.state_dict()["units"] == 4


@pytest.mark.parametrize("name", ["buffer_bytes", "verify_open", "max_pixels"])
def test_options_of_storage_are_given_in_one(packed: Packed, name: str) -> None:
    advice = re.escape(f"give storage=shardio.Storage({name}=...)")
    with pytest.raises(OptionError, match=f"^ShardDataset takes no {name}: {advice}$"):
        ShardDataset(packed([5]), **{name: 1})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=rf"^shardio\.open takes no {name}: {advice}$"):
        shardio.open(packed([5]), **{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "field"), [("canonical_workers", "spans"), ("spans", "spans"), ("unit", "unit")]
)
def test_options_of_the_order_are_given_in_one(packed: Packed, name: str, field: str) -> None:
    advice = re.escape(f"give order=shardio.Order({field}=...)")
    with pytest.raises(OptionError, match=f"^ShardDataset takes no {name}: {advice}$"):
        ShardDataset(packed([5]), **{name: 1})  # type: ignore[arg-type]


def test_options_in_one_are_checked_when_they_are_made() -> None:
    for wrong in (
        lambda: shardio.Order(spans=0),
        lambda: shardio.Order(unit=True),
        lambda: shardio.Storage(buffer_bytes="lots"),
        lambda: shardio.Storage(max_pixels=1.5),  # type: ignore[arg-type]
    ):
        with pytest.raises(OptionError, match=r"is|no size"):
            wrong()
    assert shardio.Storage(buffer_bytes="1GiB") == shardio.Storage(buffer_bytes=1 << 30)
    assert pickle.loads(pickle.dumps(shardio.Order(unit=4))) == shardio.Order(unit=4)


def test_a_split_is_opened_by_its_name(packed: Packed, tmp_path: Path) -> None:
    packed([5], "both/train"), packed([7], "both/val")
    assert len(ShardDataset(tmp_path / "both", split="val", decode=None)) == 7
    with pytest.raises(OptionError, match="no split is called 'test'; there are train, val"):
        ShardDataset(tmp_path / "both", split="test")
    with pytest.raises(NotPackedError, match=r'its splits: train, val.* split="train"'):
        ShardDataset(tmp_path / "both")


def test_a_buffer_in_bytes_is_counted_in_records_of_the_mean_size(packed: Packed) -> None:
    dataset = keyed(packed(COUNTS), shuffle_buffer="3kB")
    assert dataset.shuffle_buffer == -(-3000 * N // dataset.manifest.size)


def test_buffer_bytes_are_a_number_or_a_size(packed: Packed) -> None:
    folder = packed([5])
    assert keyed(folder, buffer_bytes="1GiB").buffer_bytes == 1 << 30
    assert keyed(folder, buffer_bytes=np.int64(7000)).buffer_bytes == 7000


def test_no_buffer_reads_spans_in_storage_order(packed: Packed) -> None:
    dataset = keyed(packed([N]), batch_size=N, unit=1, shuffle=False)
    assert flat(batches(dataset)) == KEYS


# --- tails ----------------------------------------------------------------------------------


def ranks_of(folder: Path, tail: str, world_size: int, batch_size: int | None) -> list[Any]:
    return [
        keyed(folder, tail=tail, rank=rank, world_size=world_size, batch_size=batch_size)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("batch_size", [None, 6, 16])
@pytest.mark.parametrize("world_size", [1, 3])
def test_pad_gives_all_ranks_equal_steps_and_repeats_few(
    packed: Packed, batch_size: int | None, world_size: int
) -> None:
    datasets = ranks_of(packed(COUNTS), "pad", world_size, batch_size)
    got = [batches(dataset, 2) for dataset in datasets]
    assert {len(rank) for rank in got} == {len(datasets[0])}
    together = flat([flat(rank) for rank in got])
    assert set(together) == set(KEYS)
    size = (batch_size or 1) * world_size
    assert len(together) == (N if world_size == 1 else -(-N // size) * size)


@pytest.mark.parametrize("batch_size", [None, 6, 16])
@pytest.mark.parametrize("world_size", [1, 3])
def test_drop_leaves_out_few_and_others_each_epoch(
    packed: Packed, batch_size: int | None, world_size: int
) -> None:
    datasets = ranks_of(packed(COUNTS), "drop", world_size, batch_size)
    size = (batch_size or 1) * world_size
    left_out = []
    for epoch in range(6):
        for dataset in datasets:
            dataset.set_epoch(epoch)
        together = flat([flat(batches(dataset)) for dataset in datasets])
        assert len(together) == len(set(together)) == N // size * size
        left_out.append(frozenset(KEYS) - set(together))
    assert len(set(left_out)) > 1 or N % size == 0


def test_drop_that_leaves_nothing_is_refused(packed: Packed) -> None:
    folder = packed([5])
    with pytest.raises(OptionError, match=r"tail='drop' leaves nothing: 5 records .* 4 x 2"):
        keyed(folder, batch_size=4, tail="drop", rank=0, world_size=2)
    assert len(keyed(folder, batch_size=4, tail="drop")) == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 6, 16])
@pytest.mark.parametrize("world_size", [1, 3])
def test_exact_marks_repeats(
    packed: Packed, batch_size: int | None, world_size: int, workers: int
) -> None:
    folder = packed(COUNTS)
    seen: list[str] = []
    for dataset in ranks_of(folder, "exact", world_size, batch_size):
        loader = DataLoader(dataset, batch_size=None, num_workers=workers)
        for keys, valid in loader:
            if batch_size is None:
                assert type(valid) is bool
                seen += [keys] if valid else []
            else:
                assert valid.dtype == torch.bool and len(keys) == len(valid) == batch_size
                seen += [key for key, one in zip(keys, valid, strict=True) if one]
    assert sorted(seen) == KEYS


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


# --- samples and batches --------------------------------------------------------------------


def test_samples_are_dicts_of_all_fields_or_tuples_of_some(packed: Packed) -> None:
    folder = packed([5], image=jpeg)
    for sample in ShardDataset(folder):
        assert list(sample) == ["__key__", "image", "label"]
        assert isinstance(sample["image"], Image.Image)
    for label, image in ShardDataset(folder, fields=("label", "image"), decode=None):
        assert type(image) is bytes and label in (0, 1, 2)
    for size, _ in ShardDataset(folder, fields=("image", "label"), decode=len):
        assert type(size) is int
    with pytest.raises(OptionError, match="there are __key__, image, label"):
        ShardDataset(folder, fields=("image", "target"))


def test_batches_are_tensors(packed: Packed) -> None:
    folder = packed([12], image=jpeg)
    options: dict[str, Any] = {"batch_size": 6, "fields": ("image", "label", "__key__")}
    dataset = ShardDataset(folder, transform=CenterCrop(8), **options)
    for workers in (0, 2):
        dataset.set_epoch(0)
        for images, labels, keys in DataLoader(dataset, batch_size=None, num_workers=workers):
            assert images.shape == (6, 3, 8, 8) and images.dtype == torch.uint8
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert labels.dtype == torch.int64 and labels.tolist() == [
                int(key[2:8]) % 3 for key in keys
            ]
            for image, key in zip(images, keys, strict=True):
                expected = CenterCrop(8)(jpeg(int(key[2:8])))
                assert np.array_equal(image.permute(1, 2, 0), expected)


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


def test_a_collate_fn_of_ones_own(packed: Packed) -> None:
    dataset = ShardDataset(packed([10]), batch_size=5, fields=("label",), collate_fn=len)
    assert list(dataset) == [5, 5]


def test_transforms_take_decoded_images_and_labels(packed: Packed) -> None:
    dataset = ShardDataset(
        packed([6], image=jpeg),
        fields=("image", "label"),
        transform=lambda image: image.size,
        target_transform=lambda label: label + 100,
    )
    assert sorted(dataset) == sorted(((24, 16), 100 + i % 3) for i in range(6))


def test_random_pixels_do_not_depend_on_workers_but_on_the_epoch(packed: Packed) -> None:
    crop = RandomResizedCrop(8, flip=True)
    dataset = ShardDataset(
        packed([9, 12], image=jpeg),
        batch_size=4,
        fields=("image", "__key__"),
        transform=crop,
        seed=5,
    )
    epochs = []
    for epoch in (0, 1):
        seen = []
        for workers in (0, 1, 3):
            dataset.set_epoch(epoch)
            loader = DataLoader(dataset, batch_size=None, num_workers=workers)
            pixels = {}
            for images, keys in loader:
                for image, key in zip(images, keys, strict=True):
                    pixels[key] = image.permute(1, 2, 0).numpy().tobytes()
            seen.append(pixels)
        assert seen[0] == seen[1] == seen[2]
        for number in range(21):
            expected = crop(jpeg(number), draw=draw(5, epoch, number))
            assert seen[0][f"k/{number:06d}.jpg"] == expected.tobytes()
        epochs.append(seen[0])
    assert epochs[0] != epochs[1]


def test_other_image_fields_are_decoded_without_the_transform(packed: Packed) -> None:
    folder = packed(
        [4],
        fields=(("__key__", "key"), ("mask", "image"), ("image", "image"), ("label", "int")),
        sample=lambda i: {"__key__": b"%d" % i, "mask": jpeg(9), "image": jpeg(i), "label": i},
    )
    for sample in ShardDataset(folder, transform=CenterCrop(8, fields=("image",))):
        assert np.array_equal(sample["mask"], decode_image(jpeg(9)))
        assert sample["image"].shape == (3, 8, 8)


def test_the_transform_is_of_the_first_image_where_none_is_called_image(packed: Packed) -> None:
    folder = packed(
        [4],
        fields=(("__key__", "key"), ("left", "image"), ("right", "image")),
        sample=lambda i: {"__key__": b"%d" % i, "left": jpeg(i), "right": jpeg(i)},
    )
    for sample in ShardDataset(folder, transform=lambda image: image.size):
        assert sample["left"] == (24, 16) and isinstance(sample["right"], Image.Image)


def test_classes_and_repr(packed: Packed) -> None:
    dataset = ShardDataset(packed(COUNTS), batch_size=7)
    assert dataset.classes == list(CLASSES)
    assert dataset.class_to_idx == {"cat": 0, "dog": 1, "eel": 2}
    assert re.fullmatch(
        r"ShardDataset\('.*data', batch_size=7: 97 records in 5 shards, "
        r"fields __key__, image, label\)",
        repr(dataset),
    )


# --- epochs ---------------------------------------------------------------------------------


def test_set_epoch_reaches_persistent_workers(packed: Packed) -> None:
    dataset = keyed(packed(COUNTS), batch_size=10)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    orders = []
    for epoch in (0, 1, 0, 2):
        dataset.set_epoch(epoch)
        orders.append([key for batch in loader for key in batch[0]])
        assert sorted(orders[-1]) == KEYS
    assert orders[0] == orders[2] and orders[0] != orders[1] != orders[3]


def test_an_iterator_belongs_to_the_epoch_it_was_made_in(packed: Packed) -> None:
    dataset = keyed(packed(COUNTS), batch_size=10)
    dataset.set_epoch(4)
    expected = batches(dataset)
    dataset.set_epoch(4)
    iterator = iter(dataset)
    got = [next(iterator) for _ in range(3)]
    assert [list(batch[0]) for batch in got] == expected[:3]
    dataset.set_epoch(5)
    with pytest.raises(EpochError, match="was set to 5 while epoch 4 was being read"):
        next(iterator)


def test_an_iterator_that_ended_stays_ended(packed: Packed) -> None:
    dataset = keyed(packed([5]), batch_size=10)
    iterator = iter(dataset)
    assert iter(iterator) is iterator
    next(iterator)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
    dataset.set_epoch(1)
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_epoch_that_changes_under_workers_raises(packed: Packed) -> None:
    dataset = keyed(packed(COUNTS), batch_size=2)
    loader = iter(DataLoader(dataset, batch_size=None, num_workers=2))
    next(loader)
    dataset.set_epoch(1)
    with pytest.raises(EpochError, match="call set_epoch before iter"):
        list(loader)
    loader._shutdown_workers()


def test_persistent_workers_go_on_after_a_break(packed: Packed) -> None:
    dataset = keyed(packed(COUNTS), batch_size=2)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    for epoch in range(4):
        dataset.set_epoch(epoch)
        for _ in loader:
            break
    dataset.set_epoch(9)
    assert sorted(key for batch in loader for key in batch[0]) == KEYS


@pytest.mark.parametrize("epoch", [-1, 1.0, "1", None, 2**63])
def test_epochs_are_whole_numbers(packed: Packed, epoch: Any) -> None:
    with pytest.raises(OptionError, match="epoch"):
        keyed(packed([5])).set_epoch(epoch)


def test_the_epoch_is_shared_by_copies(packed: Packed) -> None:
    dataset = keyed(packed([5]))
    twins = [copy.copy(dataset), copy.deepcopy(dataset), copy.deepcopy([dataset, 1])[0]]
    dataset.set_epoch(7)
    assert [twin.epoch for twin in twins] == [7, 7, 7]
    pickled = pickle.loads(pickle.dumps(dataset))
    assert pickled.epoch == 7 and sorted(flat(batches(pickled))) == KEYS[:5]


def test_a_second_pass_over_an_epoch_that_was_set_warns_once(packed: Packed) -> None:
    dataset = keyed(packed([5]), batch_size=2)
    dataset.set_epoch(0)
    first = list(dataset)
    with pytest.warns(UserWarning, match=r"epoch 0 is being read again.*set_epoch") as caught:
        assert list(dataset) == first
        list(dataset)
    assert len(caught) == 1
    dataset.set_epoch(1)
    list(dataset)


def test_the_second_pass_of_workers_warns_once(packed: Packed) -> None:
    code = (
        "import sys; from shardio import ShardDataset; from torch.utils.data import DataLoader\n"
        "dataset = ShardDataset(sys.argv[1], batch_size=10, decode=None)\n"
        "dataset.set_epoch(3)\n"
        "for _ in range(3): list(DataLoader(dataset, batch_size=None, num_workers=2))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, packed(COUNTS)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is being read again") == 1


def test_evaluation_does_not_warn(packed: Packed) -> None:
    folder = packed([9])
    for options in ({"tail": "exact"}, {"shuffle": False}):
        dataset = keyed(folder, batch_size=2, **options)
        for _ in range(3):
            list(dataset)


# --- ranks ----------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    yield


def test_ranks_are_given(packed: Packed) -> None:
    folder = packed(COUNTS)
    dataset = keyed(folder, rank=1, world_size=3)
    assert len(dataset) == 33
    for rank, world_size in ((None, 3), (1, None)):
        with pytest.raises(OptionError, match="give both, or neither"):
            keyed(folder, rank=rank, world_size=world_size)
    with pytest.raises(OptionError, match="rank is 3: expected a whole number, 0 to 2"):
        keyed(folder, rank=3, world_size=3)


def test_ranks_come_from_the_launcher(packed: Packed, launched: None) -> None:
    folder = packed(COUNTS)
    dataset = keyed(folder, batch_size=4)
    assert dataset.ranks() == (1, 3) and len(dataset) == 9
    assert keyed(folder, rank=1, world_size=3).ranks() == (1, 3)
    with pytest.raises(OptionError, match=r"rank 0 of 1 was given, but the launcher .* 1 of 3"):
        keyed(folder, rank=0, world_size=1)


def test_ranks_that_are_no_numbers_are_refused(
    packed: Packed, launched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(OptionError, match="says rank 'first' of '3'"):
        keyed(packed(COUNTS))


@pytest.mark.filterwarnings("ignore:epoch .* is being read again")
def test_a_copy_made_before_the_ranks_are_known_finds_them(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = keyed(packed(COUNTS), batch_size=4)
    copies = [dataset.select(range(N)), pickle.loads(pickle.dumps(dataset))]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    expected = batches(dataset)
    for copied in copies:
        assert len(expected) == 9
        for workers in (2, 0):
            copied.set_epoch(0)
            assert batches(copied, workers) == expected


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_spawned_workers_know_the_rank_of_their_parent(
    packed: Packed, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    folder = packed(COUNTS)
    expected = batches(keyed(folder, batch_size=4, rank=1, world_size=3))
    dataset = keyed(folder, batch_size=4)
    # As torch.distributed would say, which a spawned worker does not know.
    monkeypatch.setattr("shardio.dataset.ranks._found_ranks", lambda: ((1, 3), "a test"))
    assert batches(dataset, workers, multiprocessing_context="spawn") == expected


def test_a_pickle_made_before_the_ranks_exist_does_not_fix_them(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pickle.dumps(keyed(packed(COUNTS), batch_size=4))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert pickle.loads(data).ranks() == (1, 3)  # as with mp.spawn(train, args=(dataset,))


def _train(rank: int, folder: str, out: str) -> None:
    store = torch.distributed.FileStore(f"{out}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        dataset = keyed(Path(folder), batch_size=8)
        Path(out, f"{rank}").write_bytes(pickle.dumps(batches(dataset, 2)))
    finally:
        torch.distributed.destroy_process_group()


def test_ranks_come_from_torch_distributed(packed: Packed, tmp_path: Path) -> None:
    folder = packed(COUNTS)
    torch.multiprocessing.start_processes(
        _train, (str(folder), str(tmp_path)), nprocs=2, start_method="fork"
    )
    for rank in range(2):
        got = pickle.loads((tmp_path / f"{rank}").read_bytes())
        assert got == batches(keyed(folder, batch_size=8, rank=rank, world_size=2))


# --- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_comes_through_workers(packed: Packed, workers: int) -> None:
    folder = packed(COUNTS)
    path = shard_files(folder)[2]
    flip(path, path.read_bytes().index(payload(30)) + 1)
    with pytest.raises(DamageError, match=rf"{path.name}: record 7 at byte .*k/000030.jpg"):
        batches(keyed(folder, batch_size=4), workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_missing_shard_comes_through_workers(packed: Packed, workers: int) -> None:
    folder = packed(COUNTS)
    shard_files(folder)[2].unlink()
    with pytest.raises(DamageError, match="the manifest names this shard"):
        batches(keyed(folder, batch_size=4), workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_decoded_comes_through_workers(
    packed: Packed, workers: int
) -> None:
    dataset = ShardDataset(packed([4]), batch_size=2)
    with pytest.raises(DecodeError, match=r"record \d of the dataset, k/00000\d.jpg: image of"):
        drain(DataLoader(dataset, batch_size=None, num_workers=workers))


def test_an_error_does_not_end_the_epoch_quietly(packed: Packed) -> None:
    iterator = iter(ShardDataset(packed([4]), batch_size=2))
    for _ in range(3):
        with pytest.raises(DecodeError):
            next(iterator)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_do_not_stack_come_through_workers(packed: Packed, workers: int) -> None:
    dataset = ShardDataset(
        packed([4]), batch_size=4, fields=("image",), decode=None, collate_fn=_odd_collate
    )
    with pytest.raises(CollateError, match="item 1 of the batch is a tuple of 2"):
        drain(DataLoader(dataset, batch_size=None, num_workers=workers))


def _odd_collate(samples: list[Any]) -> Any:
    return shardio.collate([samples[0], (*samples[1], 1)])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": -4}, "batch_size is -4"),
        ({"batch_size": 10, "unit": 3}, "unit is 3, which does not divide batch_size 10"),
        ({"unit": 4}, "unit is 4: expected 1 without a batch_size"),
        ({"tail": "none"}, "tail is 'none'"),
        ({"seed": -1}, "seed is -1"),
        ({"spans": 0}, "spans is 0"),
        ({"shuffle_buffer": -1}, "shuffle_buffer is -1"),
        ({"shuffle_buffer": "many"}, "'many'"),
        ({"shuffle_buffer": "512"}, "shuffle_buffer is '512'"),
        ({"shuffle_buffer": 1.5}, "shuffle_buffer is 1.5"),
        ({"shuffle_buffer": True}, "shuffle_buffer is True"),
        ({"buffer_bytes": -1}, "buffer_bytes is -1"),
        ({"buffer_bytes": "lots"}, "'lots' is no size"),
        ({"buffer_bytes": 1.5}, "buffer_bytes is 1.5: expected a whole number"),
        ({"seed": 0.5}, "seed is 0.5: expected a whole number"),
        ({"seed": True}, "seed is True: expected a whole number"),
        ({"batch_size": "4"}, "batch_size is '4': expected a whole number"),
        ({"batch_size": 4.0, "unit": 2}, "batch_size is 4.0: expected a whole number"),
        ({"batch_size": 4, "unit": 2.0}, "unit is 2.0: expected a whole number"),
        ({"spans": "64"}, "spans is '64': expected a whole number"),
        ({"rank": "0", "world_size": 1}, "rank is '0': expected a whole number"),
        ({"order": 8}, "order is 8: expected shardio.Order(...)"),
        ({"storage": "/data"}, "storage is '/data': expected shardio.Storage(...)"),
        ({"root": 3}, "root is 3: expected a directory"),
        ({"verify_open": "no"}, "verify_open is 'no': expected True or False"),
        ({"max_pixels": 0}, "max_pixels is 0: expected a whole number, 1 or more"),
        ({"transform": 3}, "transform is 3"),
        ({"target_transform": 3}, "target_transform is 3"),
        ({"collate_fn": 3}, "collate_fn is 3"),
        ({"decode": "png"}, "decode is 'png'"),
        ({"fields": ()}, "fields is empty"),
    ],
)
def test_wrong_options_are_told_at_once(
    packed: Packed, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        ShardDataset(packed(COUNTS), **grouped(options))


def test_what_is_no_dataset_is_told(packed: Packed, tmp_path: Path) -> None:
    with pytest.raises(NotPackedError, match="no such directory"):
        ShardDataset(tmp_path / "nothing")
    packed([2], "out/train")
    splits = shardio.formats.manifest.dump_splits(["train", "val"], None, "1.2.3")
    (tmp_path / "out" / "shardio.json").write_bytes(splits)
    with pytest.raises(NotPackedError, match=r"its splits: train, val\. Open one, .*out/train"):
        ShardDataset(tmp_path / "out")


def test_errors_of_storage_are_ours(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = packed([5])
    path = shard_files(folder)[0]
    data = path.read_bytes()
    path.unlink()
    path.mkdir()
    with pytest.raises(StorageError, match="expected a file"):
        list(keyed(folder))
    path.rmdir()
    path.write_bytes(data[:-1])
    with pytest.raises(DamageError):
        list(keyed(folder))


def test_the_default_unit_mixes_spans(packed: Packed) -> None:
    folder = packed([5])
    assert keyed(folder, batch_size=256).order.unit == default_unit(256) == 32
    assert keyed(folder).order.unit == 1
