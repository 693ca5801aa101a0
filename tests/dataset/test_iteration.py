"""One pass: it stays ended, its errors stay errors, and what a DataLoader may make of its items."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.loop_programs import BATCH, Wrapped, dataset, epochs_read
from support.reading import keyed
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import shardio.dataset.iteration
from shardio import DecodeError, OptionError, ShardDataset, collate
from shardio.dataset.stream import Stream

Packed = Callable[..., Path]
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
]


def test_drop_that_leaves_nothing_is_refused(packed: Packed) -> None:
    folder = packed([5])
    with pytest.raises(OptionError, match=r"tail='drop' leaves nothing: 5 records .* 4 x 2"):
        keyed(folder, batch_size=4, tail="drop", rank=0, world_size=2)
    assert len(keyed(folder, batch_size=4, tail="drop")) == 1


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


def test_an_error_does_not_end_the_epoch_quietly(packed: Packed) -> None:
    iterator = iter(ShardDataset(packed([4]), batch_size=2))
    for _ in range(3):
        with pytest.raises(DecodeError):
            next(iterator)


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_all_workers_of_a_wrapper_read_the_same_epochs(numbered: Path, workers: int) -> None:
    straight = dataset(numbered)
    expected = []
    for epoch in range(3):
        straight.set_epoch(epoch)
        expected += sorted(labels.tolist() for (labels,) in straight)
    loader = DataLoader(Wrapped(dataset(numbered), 3), batch_size=None, num_workers=workers)
    found = [labels.tolist() for (labels,) in loader]
    assert sorted(found) == sorted(expected)


def test_passes_whose_loaders_draw_the_same_seed_are_told_apart(numbered: Path) -> None:
    stream = dataset(numbered)
    loader = DataLoader(stream, batch_size=None, num_workers=2)

    def seeded() -> None:
        torch.manual_seed(0)  # the seeds of workers tell loaders apart, but not these
        assert sorted(label for (labels,) in loader for label in labels.tolist()) == [*range(97)]

    assert epochs_read(stream, seeded, 3) == [0, 1, 2]


def test_a_fork_within_a_transform_begins_no_pass(numbered: Path) -> None:
    def forks(rows: list[Any]) -> Any:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return collate(rows)

    stream = dataset(numbered, collate_fn=forks)
    loader = DataLoader(stream, batch_size=None)
    assert epochs_read(stream, lambda: list(loader), 3) == [0, 1, 2]


def test_workers_that_two_threads_start_at_once_keep_their_tickets(
    numbered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, other = dataset(numbered), dataset(numbered)
    monkeypatch.setattr(shardio.dataset.iteration, "STREAMS", [train, other])
    new_ticket, busy = shardio.dataset.iteration.new_ticket, []

    def slowly(stream: Stream, iterator: Any) -> Any:
        if stream is other and not busy:  # the other thread starts and ends its workers meanwhile
            busy.append(True)
            thread = threading.Thread(
                target=lambda: list(DataLoader(other, batch_size=None, num_workers=1))
            )
            thread.start()
            thread.join()
        return new_ticket(stream, iterator)

    monkeypatch.setattr(shardio.dataset.iteration, "new_ticket", slowly)
    loader = DataLoader(train, batch_size=None, num_workers=1)
    assert epochs_read(train, lambda: list(loader), 2) == [0, 1] and busy


@pytest.mark.parametrize("make", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("options", [{}, {"batch_size": 8}, {"batch_size": 8, "collate_fn": list}])
def test_batches_of_batches_are_refused(
    numbered: Path, workers: int, options: dict[str, Any], make: Any
) -> None:
    stream = dataset(numbered)
    with pytest.raises(OptionError, match=r"makes batches of 8 itself.*batch_size=None"):
        next(iter(make(stream, num_workers=workers, **options)))
    assert len(list(DataLoader(stream, batch_size=None))) == 13  # and nothing was left early


def test_one_batch_and_a_collate_fn_of_ones_own_are_allowed(numbered: Path) -> None:
    loader = DataLoader(dataset(numbered), batch_size=1, collate_fn=lambda batches: batches[0])
    assert len(next(iter(loader))[0]) == BATCH


def test_a_wrapper_may_make_batches_of_what_is_in_ours(numbered: Path) -> None:
    class Rows(IterableDataset[Any]):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __iter__(self) -> Any:
            for (labels,) in self.inner:
                yield from labels.tolist()

    found = torch.cat(list(DataLoader(Rows(dataset(numbered)), batch_size=10))).tolist()
    assert np.array_equal(np.sort(found), np.arange(97))
