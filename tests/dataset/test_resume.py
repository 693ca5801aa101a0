"""Resuming: what comes after a state is what would have come, whoever reads it then."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.naive_order import side_by_side
from support.reading import COUNTS, KEYS, batches, flat, keyed
from support.resuming import Batches, globally, resumed, stateful, taken, through_json
from support.small_datasets import jpeg
from torch.utils.data import DataLoader

from shardio import EpochError, OptionError, Order, RandomResizedCrop, ShardDataset, StateError
from shardio.dataset.buffering import Held, Policy

Packed = Callable[..., Path]
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:epoch .* is being read again"),
]


# --- a plain DataLoader: the loop says how many batches it took ---------------------------------


@pytest.mark.parametrize("buffer", [2, 30, "all"])
def test_every_step_can_be_gone_on_from(packed: Packed, buffer: int | str) -> None:
    folder = packed(COUNTS)
    dataset = keyed(folder, batch_size=8, shuffle_buffer=buffer, seed=5)
    dataset.set_epoch(3)
    whole = batches(dataset)
    for steps in range(len(dataset) + 1):
        again = resumed(
            folder, dataset.state_dict(steps=steps), batch_size=8, shuffle_buffer=buffer
        )
        assert (again.epoch, again.remaining, len(again)) == (3, len(whole) - steps, len(whole))
        assert batches(again) == whole[steps:]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_do_not_matter_to_a_state(packed: Packed, workers: int) -> None:
    folder = packed(COUNTS)
    dataset = keyed(folder, batch_size=8)
    whole = batches(dataset)
    dataset.set_epoch(0)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, prefetch_factor=4)
    taken(loader, 3)
    state = dataset.state_dict(steps=3)  # though the workers have made more
    for others in (0, 1, 2):
        assert batches(resumed(folder, state, batch_size=8), others) == whole[3:]


def test_resuming_twice_and_on_through_the_epochs(packed: Packed) -> None:
    folder = packed(COUNTS)
    straight = keyed(folder, batch_size=8)
    expected = []
    for epoch in range(3):
        straight.set_epoch(epoch)
        expected += batches(straight)
    found: Batches = []
    state, steps = None, (3, 2, 0, 5, 7, 4, 30)
    for part in steps:
        dataset = keyed(folder, batch_size=8)
        if state is not None:
            dataset.load_state_dict(through_json(state))
        for epoch in range(dataset.epoch, 3):
            dataset.set_epoch(epoch)  # of the state's own epoch: goes on where it was saved
            loader = DataLoader(dataset, batch_size=None)
            got = taken(loader, min(part, dataset.remaining)) if part else []
            found += got
            part -= len(got)
            state = dataset.state_dict(steps=len(got))
            if not part:
                break
    assert found == expected[: sum(steps)] and len(expected) == 39


def test_another_epoch_starts_from_its_beginning(packed: Packed) -> None:
    folder = packed(COUNTS)
    dataset = keyed(folder, batch_size=8)
    first = batches(dataset)
    again = resumed(folder, dataset.state_dict(steps=4), batch_size=8)
    again.set_epoch(1)
    assert again.remaining == len(again)
    assert sorted(flat(batches(again))) == KEYS
    again.set_epoch(0)
    assert batches(again) == first


def test_the_end_of_an_epoch_is_a_place_too(packed: Packed) -> None:
    folder = packed(COUNTS)
    dataset = keyed(folder, batch_size=8)
    again = resumed(folder, dataset.state_dict(steps=len(dataset)), batch_size=8)
    assert again.remaining == 0 and batches(again) == []
    again.set_epoch(0)
    assert batches(again, 2) == []  # of that epoch there is nothing left
    again = resumed(folder, dataset.state_dict(steps=len(dataset)), batch_size=8)
    loader = DataLoader(again, batch_size=None, num_workers=2)
    assert taken(loader) == [] and again.remaining == len(dataset)
    dataset.set_epoch(1)
    assert taken(loader) == batches(dataset)  # and the next one follows


@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
@pytest.mark.parametrize(("ranks", "others"), [(4, 2), (2, 4), (1, 3), (3, 1), (4, 1)])
def test_other_ranks_go_on_with_the_same_global_batches(
    packed: Packed, tail: str, ranks: int, others: int
) -> None:
    folder, rows = packed(COUNTS), 12
    options: dict[str, Any] = {"tail": tail, "unit": 1, "epoch": 2}
    whole = globally(folder, ranks, batch_size=rows // ranks, **options)
    dataset = keyed(folder, batch_size=rows // ranks, tail=tail, unit=1, rank=0, world_size=ranks)
    dataset.set_epoch(2)
    for steps in (0, 1, 4, len(dataset) - 1, len(dataset)):
        state = dataset.state_dict(steps=steps)
        after = globally(
            folder, others, 2 if steps == 4 else 0, batch_size=rows // others, state=state
        )
        rest = whole[steps:]
        if tail == "pad" and 1 in (ranks, others) and rest:  # one rank repeats nothing
            short = min(len(after[-1]), len(rest[-1]))
            assert short == sum(COUNTS) % rows
            after[-1], rest[-1] = after[-1][:short], rest[-1][:short]
        assert after == rest


def test_options_that_were_not_given_come_from_the_state(packed: Packed) -> None:
    folder = packed(COUNTS)
    before = [
        ShardDataset(folder, batch_size=6, fields=("__key__",), decode=None, seed=9, tail="drop",
                     shuffle_buffer=40, order=Order(spans=5), rank=rank, world_size=4)
        for rank in range(4)
    ]  # fmt: skip
    whole = list(map(flat, side_by_side([batches(one) for one in before], 2, 5)))
    state = through_json(before[0].state_dict(steps=2))
    assert {one.state_dict(steps=2)["units"] for one in before} == {16}
    after = [
        ShardDataset(
            folder, batch_size=12, fields=("__key__",), decode=None, rank=rank, world_size=2
        )
        for rank in range(2)
    ]
    assert (after[0].order.unit, before[0].order.unit) == (6, 3)
    for dataset in after:
        dataset.load_state_dict(state)
    one = after[0]
    assert (one.seed, one.tail, one.shuffle_buffer) == (9, "drop", 40)
    assert one.order == Order(spans=5, unit=3, nodes=1)
    rest = side_by_side([batches(one) for one in after], 4, 5, state["units"])
    assert list(map(flat, rest)) == whole[2:]


@pytest.mark.parametrize("workers", [0, 2])
def test_pixels_go_on_as_well(packed: Packed, workers: int) -> None:
    folder = packed([9, 14], image=jpeg)

    def make() -> ShardDataset:
        crop = RandomResizedCrop(16, flip=True)
        return ShardDataset(folder, batch_size=4, fields=("image", "label"), transform=crop)

    dataset = make()
    dataset.set_epoch(4)
    whole = list(DataLoader(dataset, batch_size=None))
    again = make()
    again.load_state_dict(dataset.state_dict(steps=3))
    rest = list(DataLoader(again, batch_size=None, num_workers=workers))
    assert len(rest) == len(whole) - 3 == 3
    for (images, labels), (expected, known) in zip(rest, whole[3:], strict=True):
        assert torch.equal(images, expected) and torch.equal(labels, known)


def test_in_one_process_the_count_is_known(packed: Packed) -> None:
    folder = packed(COUNTS)
    for size in (8, None):
        dataset = keyed(folder, batch_size=size)
        whole = batches(dataset)
        dataset.set_epoch(0)
        iterator = iter(dataset)
        for _ in range(5):
            next(iterator)
        assert batches(resumed(folder, dataset.state_dict(), batch_size=size)) == whole[5:]
    del iterator
    with pytest.raises(OptionError, match=r"state_dict\(steps=t\): workers run ahead"):
        dataset.state_dict()


def test_the_middle_of_an_epoch_costs_no_more_than_the_window(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = packed([500] * 8)
    dataset = keyed(folder, batch_size=10, shuffle_buffer=160)
    again = resumed(folder, dataset.state_dict(steps=200), batch_size=10, shuffle_buffer=160)
    counts: list[int] = []
    held, announced = Held._read, Policy.announce

    def hold(self: Held, shard: Any, chosen: Any, count: int) -> Any:
        counts.append(count)
        return held(self, shard, chosen, count)

    def announce(self: Policy, rows: Any, between: int = 0) -> None:
        counts.append(rows.shape[1])
        announced(self, rows, between)

    monkeypatch.setattr(Held, "_read", hold)
    monkeypatch.setattr(Policy, "announce", announce)
    monkeypatch.setattr("shardio.dataset.buffering.RUN", 1)
    next(iter(again))
    assert sum(counts) + 10 <= 160 + 2 * 8 * 10


# --- StatefulDataLoader ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "every"),
    [
        *((0, 1), (1, 1), (3, 4)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((0, 4), (1, 4), (3, 1))),
    ],
)
def test_a_stateful_loader_goes_on(packed: Packed, workers: int, every: int) -> None:
    folder = packed(COUNTS)
    expected = batches(keyed(folder, batch_size=8))
    for steps in (0, 1, 5, 12, 13):
        loader = stateful(keyed(folder, batch_size=8), workers, snapshot_every_n_steps=every)
        iterator = iter(loader)
        for _ in range(steps):
            next(iterator)
        state = loader.state_dict()
        rest = stateful(keyed(folder, batch_size=8), workers, snapshot_every_n_steps=every)
        rest.load_state_dict(state)
        assert taken(rest) == expected[steps:]
        # With another number of workers, of plain loaders or stateful ones: through our own state.
        whole = keyed(folder, batch_size=8).state_from(state)
        assert whole == keyed(folder, batch_size=8).state_dict(steps=steps)
        for others in (0, 2):
            assert batches(resumed(folder, whole, batch_size=8), others) == expected[steps:]
            assert taken(stateful(resumed(folder, whole, batch_size=8), others)) == expected[steps:]


def test_stateful_loaders_in_a_chain(packed: Packed) -> None:
    """Nothing is added up: a resumed loader's state says the same as that of a straight one."""
    folder = packed(COUNTS)
    straight = keyed(folder, batch_size=4, seed=3)
    straight.set_epoch(1)
    expected = batches(straight)
    found: Batches = []
    state: Any = None
    for part in (4, 1, 7, 6):
        dataset = keyed(folder, batch_size=4, seed=3)
        dataset.set_epoch(1)
        loader = stateful(dataset, 2)
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        found += [list(next(iterator)[0]) for _ in range(part)]
        state = loader.state_dict()
    assert found == expected[:18]
    ours = straight.state_from(state)
    assert ours == straight.state_dict(steps=18)
    # And on from ours, with a stateful loader again.
    dataset = resumed(folder, ours, batch_size=4)
    loader = stateful(dataset, 3)
    iterator = iter(loader)
    found += [list(next(iterator)[0]) for _ in range(3)]
    state = loader.state_dict()
    assert dataset.state_from(state) == straight.state_dict(steps=21)
    rest = batches(resumed(folder, dataset.state_from(state), batch_size=4), 2)
    assert found + rest == expected


@pytest.mark.parametrize("persistent", [False, True])
def test_a_stateful_loader_reads_the_epochs_after_it(packed: Packed, persistent: bool) -> None:
    folder = packed(COUNTS)
    straight = keyed(folder, batch_size=8)
    expected = []
    for epoch in (0, 1, 2):
        straight.set_epoch(epoch)
        expected.append(batches(straight))
    dataset = keyed(folder, batch_size=8)
    dataset.set_epoch(1)
    loader = stateful(dataset, 2, persistent_workers=persistent)
    taken(loader, 4)
    state = loader.state_dict()
    dataset = keyed(folder, batch_size=8)
    loader = stateful(dataset, 2, persistent_workers=persistent)
    loader.load_state_dict(state)
    dataset.set_epoch(1)
    assert taken(loader) == expected[1][4:]
    dataset.set_epoch(2)
    assert taken(loader) == expected[2]
    dataset.set_epoch(0)
    assert taken(loader) == expected[0]


def test_a_stateful_loader_brings_its_epoch_along(packed: Packed) -> None:
    folder = packed(COUNTS)
    straight = keyed(folder, batch_size=8)
    straight.set_epoch(7)
    loader = stateful(straight, 2)
    taken(loader, 4)
    state = loader.state_dict()
    dataset = keyed(folder, batch_size=8)
    loader = stateful(dataset, 2)
    loader.load_state_dict(state)
    straight.set_epoch(7)
    expected = batches(straight)
    assert taken(loader) == expected[4:] and dataset.epoch == 7


# --- what does not fit ----------------------------------------------------------------------------


@pytest.fixture
def running(packed: Packed) -> Iterator[tuple[ShardDataset, Any]]:
    dataset = ShardDataset(packed(COUNTS), batch_size=8, fields=("__key__",), decode=None)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 13
    yield dataset, loader
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()  # type: ignore[attr-defined]


def test_a_state_reaches_workers_that_are_running(running: tuple[ShardDataset, Any]) -> None:
    dataset, loader = running
    whole = taken(loader)
    dataset.load_state_dict(dataset.state_dict(steps=9))
    assert taken(loader) == whole[9:]


def test_running_workers_do_not_go_on_with_other_options(
    running: tuple[ShardDataset, Any],
) -> None:
    dataset, loader = running
    state = dataset.state_dict(steps=2) | {"seed": 8}
    dataset.load_state_dict(state)
    with pytest.raises(StateError, match="make a new DataLoader after it"):
        taken(loader)
    fresh = DataLoader(dataset, batch_size=None, num_workers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(taken(fresh)) == 11


# --- what a review found ----------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stateful_loader_at_the_end_of_an_epoch_goes_on_with_the_next(
    packed: Packed, workers: int
) -> None:
    folder = packed(COUNTS)
    straight = keyed(folder, batch_size=8)
    expected = []
    for epoch in range(3):
        straight.set_epoch(epoch)
        expected.append(batches(straight))
    dataset = keyed(folder, batch_size=8)
    dataset.set_epoch(0)
    loader = stateful(dataset, workers)
    assert taken(loader) == expected[0]
    state = loader.state_dict()
    dataset = keyed(folder, batch_size=8)
    loader = stateful(dataset, workers)
    loader.load_state_dict(state)
    for epoch in (1, 2):  # the recipe: the epoch of the next batch is kept beside the state
        dataset.set_epoch(epoch)
        assert taken(loader) == expected[epoch]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_middle_of_an_epoch_is_not_another_epoch(packed: Packed, workers: int) -> None:
    folder = packed(COUNTS)
    loader = stateful(keyed(folder, batch_size=8), workers)
    taken(loader, 10)
    state = loader.state_dict()
    dataset = keyed(folder, batch_size=8)
    loader = stateful(dataset, workers)
    loader.load_state_dict(state)
    dataset.set_epoch(1)
    with pytest.raises(StateError, match=r"middle of epoch 0, but set_epoch\(1\) was called"):
        taken(loader)


def test_a_state_loaded_while_a_pass_is_read_ends_that_pass(packed: Packed) -> None:
    dataset = keyed(packed(COUNTS), batch_size=8)
    state = dataset.state_dict(steps=8)
    iterator = iter(dataset)
    next(iterator)
    dataset.load_state_dict(state)
    assert dataset.state_dict() == state  # and not of the pass that is over
    with pytest.raises(EpochError, match="a state was loaded while epoch 0 was being read"):
        next(iterator)
    iterator = iter(dataset)
    next(iterator)
    dataset.set_epoch(1)
    dataset.set_epoch(0)  # from its beginning again
    with pytest.raises(EpochError):
        next(iterator)


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"tail": "exact"}])
def test_the_rest_of_an_epoch_is_not_taken_for_the_whole(
    packed: Packed, options: dict[str, Any]
) -> None:
    folder = packed(COUNTS)
    dataset = keyed(folder, batch_size=8, **options)
    dataset.load_state_dict(dataset.state_dict(steps=10))
    dataset.set_epoch(0)
    assert len(list(dataset)) == 3
    if dataset.evaluates:
        assert len(list(dataset)) == 13 and dataset.epoch == 0
        return
    for _ in range(2):
        with pytest.raises(EpochError, match="call set_epoch with the next one"):
            list(dataset)
    dataset.set_epoch(1)
    assert len(batches(dataset)) == 13


def test_an_epoch_before_a_loaded_one_is_warned_of(packed: Packed) -> None:
    folder = packed([20])
    dataset = ShardDataset(folder, batch_size=4, decode=None)
    dataset.set_epoch(3)
    state = dataset.state_dict(steps=2)
    other = ShardDataset(folder, batch_size=4, decode=None)
    other.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"set_epoch\(0\) drops the state .* of epoch 3") as caught:
        other.set_epoch(0)
    assert caught[0].filename == __file__
    other.set_epoch(1)  # once is enough
    other.load_state_dict(state)
    other.set_epoch(3)
    assert len(list(other)) == 3
    other.set_epoch(4)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("epoch", [None, 3])
def test_a_state_before_anything_is_read_is_that_of_the_first_row(
    packed: Packed, epoch: int | None, mixed: bool
) -> None:
    def made() -> Any:
        one = keyed(packed(COUNTS), batch_size=4)
        return ShardDataset.mix([one, one.select(range(10))]) if mixed else one

    first = made()
    if epoch is not None:
        first.set_epoch(epoch)
    state = through_json(first.state_dict())
    assert state == first.state_dict(steps=0)
    expected = taken(DataLoader(first, batch_size=None))
    again = made()
    again.load_state_dict(state)
    assert again.state_dict() == state  # loaded, and not read yet
    assert taken(DataLoader(again, batch_size=None)) == expected


@pytest.mark.parametrize("persistent", [False, True])
def test_once_workers_read_only_the_loop_knows_where_it_stands(
    packed: Packed, persistent: bool
) -> None:
    dataset = keyed(packed(COUNTS), batch_size=4)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    with pytest.raises(OptionError, match=r"state_dict\(steps=t\)"):
        dataset.state_dict()
    next(iterator)
    with pytest.raises(OptionError, match=r"state_dict\(steps=t\)"):
        dataset.state_dict()
    dataset.set_epoch(dataset.epoch)  # the same one: what was read of it stays read
    with pytest.raises(OptionError, match=r"state_dict\(steps=t\)"):
        dataset.state_dict()
    del iterator
    dataset.set_epoch(dataset.epoch + 1)
    assert dataset.state_dict() == dataset.state_dict(steps=0)
