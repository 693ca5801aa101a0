"""ShardDataset: the order law on real DataLoaders, tails, samples and batches, errors."""

import itertools
import pickle
import re
import warnings
from collections.abc import Callable
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
    NotPackedError,
    OptionError,
    RandomResizedCrop,
    ShardDataset,
    StateError,
    StorageError,
)
from shardio.images.decode import decode as decode_image
from shardio.order.epoch import default_unit
from shardio.order.rng import draw

Packed = Callable[..., Path]
# More workers than cores is what several tests want.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# --- the order ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "batch_size"),
    [*((0, size) for size in (None, 4, 10, 200)), (1, 10), (2, 200), (3, None), (7, 4)],
)
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
    for workers in {4: (2,), 10: (1, 2, 3, 5), 12: (3,)}[batch_size]:
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


@pytest.mark.parametrize(
    ("batch_size", "world_size", "workers"),
    [
        *itertools.product([None, 10], [1, 2], [0]),
        (None, 1, 3),
        (10, 1, 2),
        (None, 2, 2),
        (10, 2, 3),
    ],
)
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
