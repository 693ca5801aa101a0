"""Mixtures that go on from saved states, in other ranks and workers."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.mixing import batches, consumer, loaded, mixed, opened, rows_of
from support.resuming import through_json
from support.small_datasets import grouped
from torchdata.stateful_dataloader import StatefulDataLoader

from shardio import ShardDataset, StateError
from shardio.dataset.mixture import Mixture

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:epoch .* is being read again"),
]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    weights=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    length=st.sampled_from(["first", 1, 48, 50, 99]),
    epoch=st.integers(0, 3),
    ranks=st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3)]),
    then=st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3)]),
    workers=st.integers(1, 3),
    data=st.data(),
)
def test_a_run_goes_on_from_any_step_in_other_ranks_and_workers(
    folders, weights, length, epoch, ranks, then, workers, data
):
    def make_one(rank: int, geometry: tuple[int, int]) -> Mixture:
        world_size, batch_size = geometry
        return mixed(
            [folders[0], folders[2], folders[3]],
            weights,
            length,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
        )

    first = make_one(0, ranks)
    first.set_epoch(epoch)
    alone = rows_of(first, epoch)
    steps = data.draw(st.integers(0, len(first)))
    state = through_json(first.state_dict(steps))
    for rank in range(1, ranks[0]):
        other = make_one(rank, ranks)
        other.set_epoch(epoch)
        assert other.state_dict(steps) == state
    each = []
    for rank in range(then[0]):
        on = make_one(rank, then)
        on.load_state_dict(state)
        assert on.epoch == epoch
        each.append(consumer(on, epoch, workers, state["units"]))
        assert len(each[-1]) == on.remaining
    rest = alone[min(len(alone), steps * 12) :]
    together = [key for step in zip(*each, strict=True) for keys, v in step for key in keys[:v]]
    assert together == rest
    # Epochs after it are those of a run that was never stopped.
    on.set_epoch(epoch + 1)
    assert rows_of(on, epoch + 1) == rows_of(make_one(0, ranks), epoch + 1)


def test_every_step_can_be_gone_on_from_twice(folders: list[Path]) -> None:
    whole = mixed(folders, [4, 1, 2, 1], 77)
    whole.set_epoch(2)
    alone = batches(whole)
    for steps in range(len(whole) + 1):
        once = mixed(folders, [4, 1, 2, 1], 77)
        once.load_state_dict(through_json(whole.state_dict(steps)))
        assert once.remaining == len(alone) - steps
        assert batches(once) == alone[steps:]
        for more in (0, 1, 2):
            if steps + more <= len(alone):
                twice = mixed(folders, [4, 1, 2, 1], 77)
                once.load_state_dict(whole.state_dict(steps))
                twice.load_state_dict(once.state_dict(more))
                assert batches(twice) == alone[steps + more :]


def test_options_that_were_not_given_come_from_the_state(folders: list[Path]) -> None:
    saved = mixed(folders[:1] + folders[2:], batch_size=8, seed=7, unit=2, length=60)
    saved.set_epoch(1)
    alone = batches(saved)

    def parts(**options: Any) -> list[ShardDataset]:
        return [
            ShardDataset(folder, batch_size=8, fields=("__key__",), decode=None, **grouped(options))
            for folder in folders[:1] + folders[2:]
        ]

    state = through_json(saved.state_dict(3))
    own = parts()
    on = ShardDataset.mix(own, length=60)
    on.load_state_dict(state)
    assert (on.seed, on.tail) == (7, "pad")
    assert batches(on) == alone[3:]
    for workers in (1, 2):
        on.load_state_dict(state)
        assert loaded(on, workers) == alone[3:]
    assert [d.seed for d in own] == [0, 0, 0]  # the user's own stay as they were
    for options, name in (
        ({"seed": 3}, "seed is 3, but the state was saved with 7"),
        ({"shuffle_buffer": 11}, "shuffle_buffer is 11, but the state was saved with 10"),
        ({"tail": "exact"}, "tail is 'exact', but"),
        ({"unit": 4}, "unit is 4, but"),
    ):
        with pytest.raises(StateError, match=f"dataset 0 of the mixture: {name}"):
            ShardDataset.mix(parts(**options), length=60).load_state_dict(state)


def test_a_refused_state_changes_nothing(folders: list[Path]) -> None:
    mixture = mixed(folders, seed=3, length=60)
    alone = batches(mixture)
    state = mixed(folders, seed=3, length=60).state_dict(2)
    for change in ({"units": (1 << 63) - 1}, {"slots": [1]}, {"mix": state["mix"][:3]}):
        with pytest.raises(StateError):
            mixture.load_state_dict(state | change)
        assert batches(mixture) == alone


def test_states_of_other_mixtures_are_refused(folders: list[Path]) -> None:
    state = mixed(folders[:2], [1, 2], 50).state_dict(1)
    one = opened(folders[0])
    cats = opened(folders[1], where={"label": "cat"})
    for mixture, message in (
        (mixed(folders[:2], [2, 1], 50), r"slots of this mixture is \[2, 1\], but .* \[1, 2\]"),
        (mixed(folders[:2], [1, 2], 51), r"length of this mixture is 51, but .* with 50"),
        (mixed(folders[:3], length=50), "the state is of 2 datasets, and this is a mixture of 3"),
        (ShardDataset.mix([one, cats], [1, 2], length=50), "dataset 1 of the mixture: .*selection"),
    ):
        with pytest.raises(StateError, match=message):
            mixture.load_state_dict(state)
    with pytest.raises(StateError, match="of no mixture, and this is a mixture of 2"):
        mixed(folders[:2]).load_state_dict(one.state_dict(1))
    with pytest.raises(StateError):
        one.load_state_dict(state)
    for edited in ([1, 2], [[1], [2]], [None, None]):
        with pytest.raises(StateError):
            mixed(folders[:2], [1, 2], 50).load_state_dict(state | {"mix": edited})


def test_the_state_of_eight_datasets_is_small(folders: list[Path]) -> None:
    parts = [
        opened(
            folders[0],
            seed=(1 << 64) - 1,
            shuffle_buffer=1_000_000_000 + i,
            where={"label": lambda c: c < 2},
        )
        for i in range(8)
    ]
    mixture = ShardDataset.mix(parts, [1_000_003 + 7919 * i for i in range(8)], length=10**15)
    mixture.set_epoch(10**6)
    state = through_json(mixture.state_dict(10**12))
    mixture.load_state_dict(state)
    iterator: Any = iter(mixture)
    through_json(iterator.state_dict())


def test_a_stateful_loader_goes_on_and_gives_a_state_for_others(folders: list[Path]) -> None:
    def one() -> Mixture:
        return mixed(folders, [4, 1, 2, 1], 77)

    alone = batches(one())
    loader = StatefulDataLoader(one(), batch_size=None, num_workers=2)
    iterator = iter(loader)
    taken = batches([next(iterator) for _ in range(3)])
    state = loader.state_dict()
    del iterator
    assert taken == alone[:3]
    again = StatefulDataLoader(one(), batch_size=None, num_workers=2)
    again.load_state_dict(state)
    assert batches(again) == alone[3:]
    other = one()
    other.load_state_dict(through_json(other.state_from(state)))
    assert loaded(other, 3) == alone[3:]
