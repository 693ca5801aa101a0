"""A dataset for torch: its epochs, set by users and shared by copies, workers and pickles."""

import copy
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import warm_python
from support.reading import COUNTS, KEYS, batches, flat, keyed
from torch.utils.data import DataLoader

from shardio import EpochError, OptionError, ShardDataset

Packed = Callable[..., Path]
# More workers than cores is what several tests want.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_a_selection_begins_at_its_own_first_row(packed: Packed) -> None:
    dataset = ShardDataset(packed([20]), batch_size=2, decode=None)
    items = iter(dataset)
    next(items), next(items)
    chosen = dataset.select(range(8))
    assert chosen.state_dict()["units"] == 0
    assert dataset.state_dict()["units"] == 4


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
        warm_python.command("-c", code, packed(COUNTS)), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is being read again") == 1


def test_evaluation_does_not_warn(packed: Packed) -> None:
    folder = packed([9])
    for options in ({"tail": "exact"}, {"shuffle": False}):
        dataset = keyed(folder, batch_size=2, **options)
        for _ in range(3):
            list(dataset)
