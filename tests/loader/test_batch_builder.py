"""Rows to batches: who waits for whom, what is made ahead, and what a row or a batch raises."""

import pickle
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S
from support.loading import (
    BATCH,
    EACH_POOL,
    ONE_OF_EACH,
    TUPLES,
    Counts,
    Packed,
    Raises,
    Workers,
    labels,
    loader_of,
    number,
    picture,
    pictures,
    stream,
)
from support.small_datasets import flip, payload, shard_files

import shardio
from shardio import CenterCrop, CollateError, DamageError, DecodeError, ShardLoader, StorageError


def test_what_a_collate_fn_keeps_of_a_dropped_batch_is_not_overwritten(folder: Path) -> None:
    """The second batch is collated before a row of the first raises, and is handed to nobody."""
    order = labels(pictures(folder))
    collated, kept, raised = threading.Event(), [], []

    def collate_fn(samples: list[Any]) -> Any:
        batch = shardio.collate(samples)
        if labels([batch]) == order[1:2] and not kept:
            kept.append(batch)
            collated.set()
        return batch

    def decode(data: bytes) -> Any:
        if number(data) == order[0][0] and not raised:
            raised.append(data)
            assert collated.wait(LIMIT_S)
            raise ValueError("the first")
        return picture(data)

    dataset = pictures(folder, decode=decode, collate_fn=collate_fn)
    with ShardLoader(dataset, num_workers=0, threads=2, prefetch_factor=2) as loader:
        with pytest.raises(ValueError, match="the first"):
            next(iter(loader))
        loader.set_epoch(1)
        for _ in loader:
            pass
    assert labels(kept) == order[1:2]


class Waits:
    """A row that is made only when another one, of a later batch, was."""

    def __init__(self, waiting: int, other: int) -> None:
        self.waiting, self.other = waiting, other
        self.event = threading.Event()

    def __call__(self, data: bytes) -> Any:
        if number(data) == self.waiting and not self.event.wait(LIMIT_S):
            raise AssertionError("the other row was never made")
        if number(data) == self.other:
            self.event.set()
        return picture(data)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_slow_row_holds_up_no_other(folder: Path, workers: int) -> None:
    order = labels(pictures(folder))
    decode = Waits(order[0][0], order[2][-1])
    dataset = pictures(folder, decode=decode)
    with ShardLoader(dataset, num_workers=workers, threads=2, prefetch_factor=3) as loader:
        assert labels(loader) == order


@pytest.mark.parametrize("prefetch", [1, 3])
def test_no_more_is_made_ahead_than_was_asked_for(folder: Path, prefetch: int) -> None:
    with closing(Counts()) as counts:
        dataset = pictures(folder, decode=counts)
        with ShardLoader(dataset, num_workers=1, prefetch_factor=prefetch) as loader:
            iterator = iter(loader)
            counts.wait(prefetch * BATCH)
            for _ in range(3):
                next(iterator)
            counts.wait(3 * BATCH)
        counts.assert_no_more()


@EACH_POOL
def test_a_transform_that_raises_stop_iteration_does_not_end_the_epoch(
    folder: Path, workers: Workers
) -> None:
    order = labels(pictures(folder))
    dataset = pictures(folder, decode=Raises(order[3][5], StopIteration("early")))
    got = []
    with pytest.raises(RuntimeError, match="StopIteration"):
        for batch in dataset:
            got += labels([batch])
    assert got == order[:3]
    got = []
    dataset.set_epoch(0)
    loader = loader_of(dataset, workers)
    with loader, pytest.raises(RuntimeError, match="raised StopIteration"):
        for batch in loader:
            got += labels([batch])
    assert got == order[:3]


@ONE_OF_EACH
def test_the_cause_of_an_error_is_not_lost(folder: Path, workers: Workers) -> None:
    class Chained:
        def __call__(self, data: bytes) -> Any:
            try:
                raise KeyError("the reason")
            except KeyError as error:
                raise ValueError("the outcome") from error

    dataset = pictures(folder, decode=Chained())
    with loader_of(dataset, workers) as loader:
        with pytest.raises(ValueError, match="the outcome") as caught:
            next(iter(loader))
        cause = caught.value.__cause__
        assert "the reason" in str(cause) or "the reason" in str(cause.__cause__)  # type: ignore[union-attr]


class BadCollate:
    def __init__(self, target: int, *, pickles: bool = True) -> None:
        self.target, self.pickles = target, pickles

    def __call__(self, samples: list[Any]) -> Any:
        batch = shardio.collate(samples)
        if self.target in batch[0][:, 0, 0, 0].tolist():
            if self.pickles:
                raise ValueError("no batch of these")
            return lambda: batch
        return batch


@ONE_OF_EACH
def test_what_a_collate_fn_raises(folder: Path, workers: Workers) -> None:
    order = labels(pictures(folder))
    dataset = pictures(folder, collate_fn=BadCollate(order[2][0]))
    with loader_of(dataset, workers) as loader:
        iterator = iter(loader)
        assert labels([next(iterator), next(iterator)]) == order[:2]
        with pytest.raises(ValueError, match="no batch of these"):
            next(iterator)


def test_a_batch_that_cannot_be_pickled(folder: Path) -> None:
    order = labels(pictures(folder))
    dataset = pictures(folder, collate_fn=BadCollate(order[2][0], pickles=False))
    with ShardLoader(dataset, num_workers=2) as loader:
        iterator = iter(loader)
        assert labels([next(iterator), next(iterator)]) == order[:2]
        with pytest.raises((pickle.PicklingError, AttributeError), match=r"(pickle|local).*lambda"):
            next(iterator)
        loader.set_epoch(0)
        assert labels([next(it) for it in [iter(loader)] for _ in range(2)]) == order[:2]


@ONE_OF_EACH
def test_samples_that_do_not_stack(folder: Path, workers: Workers) -> None:
    first = labels(pictures(folder))[0][3]

    def mixed(data: bytes) -> Any:
        return (1,) if number(data) == first else (1, 2)

    dataset = stream(folder, fields=("image",), decode=mixed)
    loader = loader_of(dataset, workers)
    with loader, pytest.raises(CollateError, match=f"record {first} of .* tuple of 1"):
        next(iter(loader))


@ONE_OF_EACH
def test_damage_is_named(packed: Packed, workers: Workers) -> None:
    folder = packed([40])
    data = shard_files(folder)[0].read_bytes()
    target = labels(pictures(folder))[3][2]
    flip(shard_files(folder)[0], data.index(payload(target)) + 3)
    with loader_of(pictures(folder), workers) as loader:
        iterator = iter(loader)
        got = []
        with pytest.raises(DamageError, match=f"record {target}"):
            for batch in iterator:
                got += labels([batch])
        assert got == labels(pictures(packed([40], "good")))[: len(got)] and len(got) <= 3


@ONE_OF_EACH
def test_a_missing_shard_is_named(packed: Packed, workers: Workers) -> None:
    folder = packed([40, 40])
    dataset = pictures(folder, shuffle=False)
    gone = shard_files(folder)[1]
    gone.unlink()
    with loader_of(dataset, workers) as loader:
        got = []
        with pytest.raises((StorageError, DamageError), match=gone.name):
            for batch in loader:
                got += labels([batch])
        assert got == labels(pictures(packed([40], "one"), shuffle=False))[: len(got)]


def test_an_image_that_is_none_is_named(folder: Path) -> None:
    dataset = stream(folder, transform=CenterCrop(8), **TUPLES)
    for workers in (0, 1), (1, 1):
        dataset.set_epoch(0)
        loader = loader_of(dataset, workers)
        with loader, pytest.raises(DecodeError, match=r"record \d+ of the dataset, k/\d+\.jpg"):
            next(iter(loader))
