"""ShardLoader(resident=): the same batches in the same order, gathered from memory."""

import functools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import small_datasets
from support.loading import differences

import shardio
from shardio import (
    CenterCrop,
    EncodedImages,
    OptionError,
    Order,
    RandomResizedCrop,
    ShardDataset,
    ShardLoader,
    Writer,
)
from shardio.loader import resident as module
from shardio.order.epoch import Epoch

N = 101


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """101 samples in 4 shards: pixels, rows of odd lengths, scalars, text."""
    out = tmp_path_factory.mktemp("resident") / "out"
    random = np.random.default_rng(0)
    fields = {"wide": "array", "odd": "array", "real": "array", "label": "int", "name": "str"}
    with Writer(out, fields=fields, shard_size=20_000, id="resident") as writer:
        for i in range(N):
            writer.write(
                {
                    "__key__": f"{i:04d}",
                    "wide": random.integers(0, 256, (8, 6, 3), dtype=np.uint8),
                    "odd": random.integers(0, 256, 7, dtype=np.uint8),
                    "real": random.random((2, 3)),
                    "label": i,
                    "name": f"sample {i}",
                }
            )
    return out


def same(a: Any, b: Any) -> bool:
    return not differences(a, b)


def check(dataset: ShardDataset, **options: Any) -> None:
    """Two epochs of a resident loader are those of the dataset."""
    with ShardLoader(dataset, num_workers=0, threads=0, resident="ram", **options) as loader:
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            got = list(loader)
            dataset.set_epoch(epoch)
            expected = list(dataset)
            assert len(got) == len(expected) == len(loader)
            for a, b in zip(got, expected, strict=True):
                assert same(a, b)


@pytest.mark.parametrize("buffer", [2, 30, "all"])
@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
@pytest.mark.parametrize("ranks", [(0, 1), (2, 3)])
def test_batches_are_those_of_the_dataset(
    folder: Path, tail: Any, buffer: Any, ranks: tuple[int, int]
) -> None:
    check(
        ShardDataset(
            folder,
            batch_size=12,
            shuffle_buffer=buffer,
            tail=tail,
            rank=ranks[0],
            world_size=ranks[1],
            order=Order(spans=5),
        )
    )


def test_tuples_and_subsets(folder: Path) -> None:
    dataset = ShardDataset(folder, batch_size=8, fields=("odd", "label"))
    check(dataset)
    check(dataset.select(range(3, 90, 4)))
    check(ShardDataset(folder, batch_size=8, where={"label": lambda label: label % 2 == 0}))


def test_processes_fill_it_and_leave(folder: Path) -> None:
    dataset = ShardDataset(folder, batch_size=8, fields=("wide", "label"))
    with ShardLoader(dataset, num_workers=2, resident="ram") as loader:
        got = list(loader)
        said = loader.explain()
    assert said.pids == [] and said.resident_bytes == N * (8 * 6 * 3 + 8)
    assert "resident" in str(said)
    dataset.set_epoch(0)
    assert all(same(a, b) for a, b in zip(got, dataset, strict=True))


def test_each_record_is_decoded_once(packed: Callable[..., Path]) -> None:
    out = packed([20, 9])
    calls = []

    def note(data: bytes) -> np.ndarray[Any, Any]:
        calls.append(data)
        return np.full((4, 4, 3), len(calls), np.uint8)

    loader = ShardLoader(
        ShardDataset(out, batch_size=4, decode=note, fields=("image",)),
        num_workers=0,
        threads=0,
        resident="ram",
    )
    for epoch in range(3):
        loader.set_epoch(epoch)
        seen = sorted(int(row[0, 0, 0]) for (images,) in loader for row in images)
        assert seen == list(range(1, 30))
    assert len(calls) == 29


def test_a_batch_is_memory_of_its_own(folder: Path) -> None:
    dataset = ShardDataset(folder, batch_size=8, fields=("wide", "label"))
    loader = ShardLoader(dataset, num_workers=0, threads=0, resident="ram")
    for images, labels in loader:
        images.zero_()
        labels.zero_()
    dataset.set_epoch(0)
    other = ShardDataset(folder, batch_size=8, fields=("wide", "label"))
    for a, b in zip(loader, other, strict=True):
        assert same(a, b)


def test_a_run_goes_on_from_any_step(folder: Path) -> None:
    dataset = ShardDataset(folder, batch_size=8, fields=("label",))
    loader = ShardLoader(dataset, num_workers=0, threads=0, resident="ram")
    batches: Iterator[Any] = iter(loader)
    before = [next(batches) for _ in range(5)]
    state = loader.state_dict()
    rest = list(batches)
    other = ShardLoader(
        ShardDataset(folder, batch_size=8, fields=("label",)), num_workers=0, threads=0
    )
    other.load_state_dict(state)
    assert all(same(a, b) for a, b in zip(rest, other, strict=True)) and len(before) == 5


def test_the_images_are_normalised_by_the_way(folder: Path) -> None:
    dataset = ShardDataset(folder, batch_size=8, fields=("wide", "label"))
    options: Any = {"num_workers": 0, "threads": 0, "device": "cpu", "mean": 0.5, "std": 0.25}
    plain = list(ShardLoader(dataset, **options))
    for resident in ("ram", "device"):
        dataset.set_epoch(0)
        got = list(ShardLoader(dataset, resident=resident, **options))
        assert all(same(a, b) for a, b in zip(got, plain, strict=True))
    assert plain[0][0].dtype == torch.float32


def test_what_cannot_be_resident_is_refused(
    folder: Path, packed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = packed([5, 6])
    cropped = ShardDataset(images, batch_size=2, transform=RandomResizedCrop(8))
    with pytest.raises(OptionError, match="draws another crop in each epoch"):
        ShardLoader(cropped, resident="ram")
    ShardLoader(ShardDataset(images, batch_size=2, transform=CenterCrop(8)), resident="ram")
    dataset = ShardDataset(folder, batch_size=2, fields=("wide",))
    with pytest.raises(OptionError, match="this is a mixture"):
        ShardLoader(ShardDataset.mix([dataset, dataset]), resident="ram")
    with pytest.raises(OptionError, match="leave collate_fn out"):
        ShardLoader(ShardDataset(folder, batch_size=2, collate_fn=list), resident="ram")
    with pytest.raises(OptionError, match="expected 'ram', 'device' or None"):
        ShardLoader(dataset, resident="disk")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="say on which"):
        ShardLoader(dataset, resident="device")
    monkeypatch.setattr(module, "memory_available", lambda: 1000)
    monkeypatch.setattr(module._Column, "put", lambda *_: pytest.fail("before it is checked"))
    with pytest.raises(OptionError, match=r"101 decoded records take 14.2 KiB, and 1,000 B"):
        next(iter(ShardLoader(dataset, num_workers=0, threads=0, resident="ram")))


@pytest.mark.parametrize(
    ("options", "each", "kind"),
    [
        ({}, 16 * 24 * 3, list),  # PIL images, decoded
        ({"decode": None}, 300, EncodedImages),  # the bytes of a file
    ],
    ids=["pil", "files"],
)
def test_objects_count_with_what_they_hold(
    packed: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    each: int,
    kind: type,
) -> None:
    images = packed([20, 21], image=small_datasets.jpeg)
    dataset = ShardDataset(images, batch_size=8, fields=("image",), **options)
    with ShardLoader(dataset, num_workers=0, threads=0, resident="ram") as loader:
        assert type(next(iter(loader))[0]) is kind
        assert 41 * each <= loader.explain().resident_bytes < 41 * (each + 1000)
    monkeypatch.setattr(module, "memory_available", lambda: 41 * each - 1)
    with pytest.raises(OptionError, match="41 decoded records take"):
        next(iter(ShardLoader(dataset, num_workers=0, threads=0, resident="ram")))


def test_rows_of_several_sizes_are_refused(tmp_path: Path) -> None:
    with Writer(tmp_path / "out", fields={"a": "array"}, id="sizes") as writer:
        for i in range(6):
            writer.write({"__key__": str(i), "a": np.zeros(3 if i < 4 else 4, np.uint8)})
    dataset = ShardDataset(tmp_path / "out", batch_size=2, shuffle=False, fields=("a",))
    with pytest.raises(OptionError, match="resident: field 0 comes as tensors"):
        next(iter(ShardLoader(dataset, num_workers=0, threads=0, resident="ram")))


def test_what_only_some_batches_can_stack_is_as_in_the_dataset(tmp_path: Path) -> None:
    with Writer(tmp_path / "out", fields={"a": "int"}, id="sizes") as writer:
        for i in range(40):
            writer.write({"__key__": str(i), "a": (i << 63) % ((1 << 64) - 1)})
    dataset = ShardDataset(tmp_path / "out", batch_size=2, shuffle_buffer="all", fields=("a",))
    assert {type(column) for (column,) in dataset} == {list, torch.Tensor}
    check(dataset)


def test_ragged_fields_stay_lists(tmp_path: Path) -> None:
    with Writer(tmp_path / "out", fields={"a": "array", "b": "int"}, id="sizes") as writer:
        for i in range(40):
            writer.write({"__key__": str(i), "a": np.full(3 + i % 2, i, np.uint8), "b": i})
    for fields, ragged in ((("b", "a"), ("a",)), (("a", "b"), (0,)), (None, ("a",))):
        dataset = ShardDataset(
            tmp_path / "out",
            batch_size=2,
            shuffle_buffer="all",
            fields=fields,
            collate_fn=functools.partial(shardio.collate, ragged=ragged),
        )
        check(dataset)


def test_columns_in_columns_are_refused(packed: Callable[..., Path]) -> None:
    out = packed([4])
    dataset = ShardDataset(
        out, batch_size=2, fields=("image",), decode=lambda data: (np.zeros(3), np.zeros(2))
    )
    with pytest.raises(OptionError, match="field 0 comes as a tuple of columns"):
        next(iter(ShardLoader(dataset, num_workers=0, threads=0, resident="ram")))


def test_pickled_it_is_filled_anew(folder: Path) -> None:
    dataset = ShardDataset(folder, batch_size=8, fields=("wide", "label"))
    loader = ShardLoader(dataset, num_workers=0, threads=0, resident="ram")
    got = list(loader)
    state = pickle.dumps(loader)
    assert len(state) < N * 8 * 6 * 3  # without the records
    other = pickle.loads(state)
    other.set_epoch(0)
    assert all(same(a, b) for a, b in zip(got, other, strict=True))


def test_the_flat_order_is_that_of_the_batches() -> None:
    for records, unit, spans, buffer in [(0, 1, 3, 0), (1, 4, 3, 0), (97, 4, 5, 20), (64, 4, 4, 9)]:
        epoch = Epoch(
            np.array([records // 2, records - records // 2]),
            seed=3,
            epoch=1,
            spans=spans,
            unit=unit,
            shuffle_buffer=buffer,
        )
        flat = epoch.flat().tolist()
        expected: list[int] = []
        walks = [epoch.span_order(span) for span in range(spans)]
        for span, _, count in epoch.pieces(0, records):
            expected += epoch.position(span, walks[span].take(count)).tolist()
        assert flat == expected and sorted(flat) == list(range(records))
