"""Saved states: which are refused, and those of a StatefulDataLoader."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.reading import COUNTS, batches, flat, keyed
from support.resuming import globally, resumed, stateful, taken, through_json
from support.small_datasets import grouped
from torchdata.stateful_dataloader import StatefulDataLoader

from shardio import OptionError, Order, ShardDataset, StateError

Packed = Callable[..., Path]
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:epoch .* is being read again"),
]


def test_ranks_of_stateful_loaders_become_other_ranks(packed: Packed) -> None:
    folder = packed(COUNTS)
    whole = globally(folder, 2, batch_size=6, unit=3)
    states = []
    for rank in range(2):
        dataset = keyed(folder, batch_size=6, unit=3, rank=rank, world_size=2)
        loader = stateful(dataset, 2)
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        states.append(dataset.state_from(loader.state_dict()))
    assert states[0] == states[1]
    assert globally(folder, 4, batch_size=3, state=states[0]) == whole[5:]


def test_samples_go_on_with_as_many_workers(packed: Packed) -> None:
    folder = packed(COUNTS)

    def make() -> Any:
        collate: Callable[[Any], Any] = list
        return StatefulDataLoader(keyed(folder), batch_size=5, num_workers=2, collate_fn=collate)

    whole = list(make())
    loader = make()
    iterator = iter(loader)
    for _ in range(7):
        next(iterator)
    state = loader.state_dict()
    rest = make()
    rest.load_state_dict(state)
    assert list(rest) == whole[7:]
    with pytest.raises(StateError, match="give batch_size to the dataset"):
        keyed(folder).state_from(state)
    next(iterator)
    state = keyed(folder).state_from(loader.state_dict())  # as many of each worker
    assert flat(batches(resumed(folder, state))) == flat(batches(keyed(folder)))[40:]


def test_a_state_of_something_else_is_refused(packed: Packed, tmp_path: Path) -> None:
    folder = packed(COUNTS)
    dataset = keyed(folder, batch_size=8, seed=1)
    state = dataset.state_dict(steps=2)
    for change, message in [
        ({"dataset": "00" * 16}, "the state is of another dataset: '0000"),
        ({"selection": "0123"}, "another selection of records"),
        ({"order": 2}, "order version 2; this shardio makes version 1"),
        ({"units": -1}, "the state's units is -1: it was edited or cut"),
        ({"units": "7"}, "the state's units is '7'"),
        ({"epoch": None}, "the state's epoch is None"),
        ({"unit": 3}, "does not fit: unit is 3, which does not divide batch_size 8"),
        ({"tail": "best"}, "tail is 'best'"),
        ({"canonical_workers": 0}, "spans is 0"),
        ({"shuffle_buffer": None}, "shuffle_buffer"),
        ({"seed": 1.5}, "seed is 1.5"),
    ]:
        with pytest.raises(StateError, match=message):
            ShardDataset(folder, batch_size=8).load_state_dict({**state, **change})
    for odd in ({}, {"epoch": 1}, [], None, "state"):
        with pytest.raises(StateError, match=r"state_dict\(\) did not make"):
            dataset.load_state_dict(odd)  # type: ignore[arg-type]
    assert dataset.epoch == 0 and dataset.remaining == len(dataset)  # nothing was taken over


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 2), ("shuffle_buffer", 31), ("shuffle_buffer", "all"), ("tail", "drop"), ("unit", 4),
     ("spans", 7)],
)  # fmt: skip
def test_an_option_that_was_given_otherwise_is_refused(
    packed: Packed, name: str, value: Any
) -> None:
    folder = packed(COUNTS)
    given: dict[str, Any] = {"seed": 1, "shuffle_buffer": 30, "spans": 8, "unit": 2}
    state = ShardDataset(folder, batch_size=8, **grouped(given)).state_dict(steps=1)
    ShardDataset(folder, batch_size=8, **grouped(given)).load_state_dict(state)
    other = ShardDataset(folder, batch_size=8, **grouped({name: value}))
    with pytest.raises(StateError, match=f"^{name} is {value!r}, but the state was saved with"):
        other.load_state_dict(state)


def test_states_are_not_taken_for_each_other(packed: Packed) -> None:
    folder = packed(COUNTS)
    dataset = keyed(folder, batch_size=8)
    iterator: Any = iter(dataset)
    next(iterator)
    for workers in (0, 2):
        dataset.set_epoch(0)
        loader = stateful(dataset, workers)
        taken(loader, 2)
        with pytest.raises(StateError, match=r"dataset\.state_from\(state\) into the dataset"):
            dataset.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="the state of one worker's iterator"):
        dataset.load_state_dict(iterator.state_dict())
    for odd in ({}, None, dataset.state_dict(steps=1)):
        with pytest.raises(StateError, match="expected what StatefulDataLoader"):
            dataset.state_from(odd)
    plain = StatefulDataLoader(list(range(9)), batch_size=3, num_workers=1)  # type: ignore[var-annotated, arg-type]
    next(iter(plain))
    with pytest.raises(StateError, match="does not read a dataset of shardio"):
        dataset.state_from(plain.state_dict())


def test_an_iterator_checks_whose_state_it_gets(packed: Packed) -> None:
    folder = packed(COUNTS)
    state = iter(keyed(folder, batch_size=8)).state_dict()  # type: ignore[attr-defined]
    other: Any
    for change, message in [
        ({"workers": 2}, "worker 0 of 2, but this is worker 0 of 1; load dataset.state_from"),
        ({"rows": 16}, "rows is 8, but the state was saved with 16"),
        ({"seed": 3}, "seed is 0, but the state was saved with 3"),
        ({"dataset": "ab"}, "dataset is '000102"),
        ({"done": -1}, "done is -1"),
    ]:
        other = iter(keyed(folder, batch_size=8))
        with pytest.raises(StateError, match=message):
            other.load_state_dict({**state, **change})
    chosen = keyed(folder, batch_size=8)
    chosen.set_epoch(4)
    other = iter(chosen)
    with pytest.raises(StateError, match=r"of epoch 0, but set_epoch\(4\) was called"):
        other.load_state_dict(state)


@pytest.mark.parametrize("steps", [-1, 14, 1.5, "3", True])
def test_steps_that_cannot_be(packed: Packed, steps: Any) -> None:
    dataset = keyed(packed(COUNTS), batch_size=8)
    with pytest.raises(OptionError, match=r"steps \(since iter\(\) began\).* 0 to 13"):
        dataset.state_dict(steps=steps)


def test_samples_have_no_steps(packed: Packed) -> None:
    with pytest.raises(OptionError, match="give batch_size to the dataset"):
        keyed(packed(COUNTS)).state_dict(steps=3)


def test_steps_after_a_stateful_resume_are_not_guessed(packed: Packed) -> None:
    folder = packed(COUNTS)
    first = stateful(keyed(folder, batch_size=8), 2)
    taken(first, 10)
    dataset = keyed(folder, batch_size=8)
    loader = stateful(dataset, 2)
    loader.load_state_dict(first.state_dict())
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(StateError, match=r"state_from\(loader\.state_dict\(\)\)"):
        dataset.state_dict(steps=1)
    whole = keyed(folder, batch_size=8).state_dict(steps=11)
    assert dataset.state_from(loader.state_dict()) == whole
    dataset.set_epoch(1)
    assert dataset.state_dict(steps=0)["epoch"] == 1


def test_samples_since_a_snapshot_are_not_forgotten(packed: Packed) -> None:
    dataset = keyed(packed(COUNTS))
    loader = StatefulDataLoader(
        dataset, batch_size=4, num_workers=1, collate_fn=list, snapshot_every_n_steps=3
    )
    taken_samples(loader, 5)
    with pytest.raises(StateError, match="snapshot_every_n_steps=1"):
        dataset.state_from(loader.state_dict())


def taken_samples(loader: Any, count: int) -> None:
    iterator = iter(loader)
    for _ in range(count):
        next(iterator)


def test_numpy_integers_make_plain_states(packed: Packed) -> None:
    folder = packed(COUNTS)
    dataset = ShardDataset(
        folder,
        batch_size=8,
        seed=np.int64(3),  # type: ignore[arg-type]
        order=Order(unit=np.int32(2), spans=np.int64(4)),  # type: ignore[arg-type]
        shuffle_buffer=np.int64(30),  # type: ignore[arg-type]
    )
    state = through_json(dataset.state_dict(steps=1))
    assert (state["seed"], state["unit"], state["shuffle_buffer"]) == (3, 2, 30)


def test_a_cut_state_of_a_stateful_loader_is_told(packed: Packed) -> None:
    dataset = keyed(packed(COUNTS), batch_size=8)
    for cut in ({"_steps_since_snapshot": 1}, {"_steps_since_snapshot": 1, "_snapshot": None}):
        with pytest.raises(StateError, match="edited or cut"):
            dataset.state_from(cut)
