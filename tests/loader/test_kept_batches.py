"""Batches that are kept are never overwritten, and no more memory is taken than they need."""

import gc
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.leftovers import descriptors
from support.loading import (
    BATCH,
    EACH_POOL,
    STEPS,
    TUPLES,
    Packed,
    Workers,
    assert_same,
    differences,
    ended,
    in_child,
    labels,
    loader_of,
    pictures,
    pool_of,
    stream,
)
from support.small_datasets import jpeg

import shardio
from shardio import CenterCrop, ShardLoader

KEEP: dict[str, Callable[[Any], Any]] = {
    "batches": lambda batch: batch[0],
    "a row": lambda batch: batch[0][-1],
    "an array": lambda batch: batch[0].numpy(),
    "a part of an array": lambda batch: batch[0].numpy()[1:3, 0],
    "another layout": lambda batch: batch[0].permute(0, 2, 3, 1).flatten()[5:],
}


@EACH_POOL
@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP.keys())
def test_what_is_kept_is_never_overwritten(
    folder: Path, keep: Callable[[Any], Any], workers: Workers
) -> None:
    expected = [keep(batch).tolist() for batch in pictures(folder)]
    with loader_of(pictures(folder), workers) as loader:
        kept = []
        for step, batch in enumerate(loader):
            kept.append(keep(batch))
            if step == 3:
                gc.collect(1)  # all that is as young as these batches
        loader.set_epoch(1)
        del batch
        for _ in loader:
            pass
    assert [one.tolist() for one in kept] == expected


@pytest.mark.parametrize("copy", [False, True])
@EACH_POOL
def test_the_ring_is_as_long_as_it_must_be_and_no_longer(
    folder: Path, workers: Workers, copy: bool
) -> None:
    dataset = pictures(folder)
    with loader_of(dataset, workers, copy=copy) as loader:
        for epoch in range(5):
            loader.set_epoch(epoch)
            for batch in loader:
                assert 0 < len(batch[0]) <= BATCH
            del batch
        explained = loader.explain()
        # A thread of this process that is held up just after it handed a batch over still knows it.
        assert 0 < explained.buffers <= explained.ring + int(workers[0] == 0 and workers[1] > 0)


@pytest.mark.parametrize("workers", [(0, 3), (1, 3)], ids=["0x3", "1x3"])
def test_the_ring_is_no_longer_for_a_built_in_transform(packed: Packed, workers: Workers) -> None:
    """Threads must not keep the rows that they wrote last."""
    folder = packed([64], image=lambda i: jpeg(i, (60, 50)))
    dataset = stream(folder, transform=CenterCrop(64), **TUPLES)
    with loader_of(dataset, workers, prefetch_factor=1) as loader:
        for epoch in range(6):
            loader.set_epoch(epoch)
            for _ in loader:
                pass
        assert loader.explain().buffers <= loader.explain().ring


@pytest.mark.parametrize("copy", [False, True])
def test_memory_of_batches_that_were_kept_is_given_back(folder: Path, copy: bool) -> None:
    dataset = pictures(folder)
    with ShardLoader(dataset, num_workers=2, prefetch_factor=1, copy=copy) as loader:
        for _ in loader:
            pass
        before = loader.explain().batch_bytes
        for epoch in (1, 2, 3):
            loader.set_epoch(epoch)
            kept = list(loader)
        most = loader.explain().batch_bytes
        assert most > 2 * before
        del kept
        loader.set_epoch(4)
        for _ in loader:
            pass
        ring = loader.explain().ring
        assert sum(len(one.mapped) for one in pool_of(loader)._all) <= ring
        assert loader.explain().batch_bytes <= ring * 2 * most / STEPS


def test_labels_that_are_kept_do_not_keep_images(folder: Path) -> None:
    with ShardLoader(pictures(folder), num_workers=2) as loader:
        kept = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            kept += [labels for _, labels in loader]
        assert loader.explain().buffers <= loader.explain().ring
        assert len(kept) == 3 * STEPS


@EACH_POOL
def test_batches_may_be_written_to(folder: Path, workers: Workers) -> None:
    with loader_of(pictures(folder), workers) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            dataset = pictures(folder)
            dataset.set_epoch(epoch)
            for found, expected in zip(loader, dataset, strict=True):
                assert differences(found, expected) == ""
                found[0].fill_(255)
                found[1].zero_()


def test_copies_are_right_and_free_their_buffers_at_once(folder: Path) -> None:
    expected = list(pictures(folder))
    with ShardLoader(pictures(folder), num_workers=2, copy=True) as loader:
        kept = list(loader)
        assert loader.explain().buffers <= loader.explain().ring
        loader.set_epoch(1)
        for _ in loader:
            pass
        assert_same(kept, expected)


@pytest.mark.parametrize("room", [280, 80])
def test_batches_that_are_kept_do_not_use_up_descriptors(packed: Packed, room: int) -> None:
    count = 800
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = packed([count])
    options = {"batch_size": 5, "shuffle": False}  # which may be read again
    expected = list(pictures(folder, **options))
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(descriptors()) + room, limits[1]))
    try:
        for workers in (0, 1), (2, 1):
            dataset = pictures(folder, **options)
            with loader_of(dataset, workers) as loader:
                assert_same(loader, expected)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class MixWithEarlier:
    """A collate_fn that keeps batches for later ones, until their buffers are free again."""

    def __init__(self) -> None:
        self.earlier: list[Any] = []

    def __call__(self, samples: list[Any]) -> Any:
        images, _ = shardio.collate(samples)
        self.earlier = [*self.earlier[-5:], images]
        return images, self.earlier[0].clone()


@pytest.mark.parametrize("workers", [(0, 0), (0, 1), (1, 1)], ids=["loop", "0x1", "1x1"])
def test_what_a_collate_fn_keeps_is_not_overwritten(folder: Path, workers: Workers) -> None:
    expected = list(pictures(folder, collate_fn=MixWithEarlier()))
    dataset = pictures(folder, collate_fn=MixWithEarlier())
    with loader_of(dataset, workers, prefetch_factor=1) as loader:
        for found, one in zip(loader, expected, strict=True):
            assert differences(found, one) == ""


@EACH_POOL
def test_leaving_early_gives_the_buffers_back_at_once(folder: Path, workers: Workers) -> None:
    gc.disable()  # in forked processes, too: what a dropped pass was at must not wait for it
    try:
        with loader_of(pictures(folder), workers) as loader:
            for epoch in range(12):
                loader.set_epoch(2 * epoch)
                for _batch in loader:
                    break
                del _batch
            # One of each process: its thread may still be at the batch of a pass that was dropped.
            assert loader.explain().buffers <= loader.explain().ring + max(1, workers[0])
    finally:
        gc.enable()


@EACH_POOL
def test_a_batch_in_a_child_is_not_overwritten_either(folder: Path, workers: Workers) -> None:
    order = labels(pictures(folder))
    gate = os.pipe()
    with loader_of(pictures(folder), workers) as loader:
        iterator = iter(loader)
        kept = [next(iterator)]
        pid = in_child(lambda: os.read(gate[0], 1) == b"!" and labels(kept) == order[:1])
        kept.clear()
        for _ in iterator:
            pass
        loader.set_epoch(1)
        for _ in loader:
            pass
        os.write(gate[1], b"!")
        assert ended(pid) == 0
        assert loader.explain().buffers <= loader.explain().ring + 1
    for end in gate:
        os.close(end)
