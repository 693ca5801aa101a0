"""One pass: it stays ended, its errors stay errors, and what a DataLoader may make of its items."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.reading import keyed

from shardio import (
    DecodeError,
    OptionError,
    ShardDataset,
)

Packed = Callable[..., Path]


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
