"""The default of shuffle_buffer: a function of what is read; saved states go on in theirs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import ShardDataset
from shardio.errors import StateError
from shardio.order import options
from shardio.order.options import RequestedOptions, order_text, shuffled_whole

Packed = Callable[..., Path]
MIB = 1 << 20


def keyed(folder: Path, **options: Any) -> ShardDataset:
    """A dataset whose batches are lists of keys."""
    return ShardDataset(folder, fields=("__key__",), decode=None, collate_fn=list, **options)


def flat(dataset: ShardDataset) -> list[Any]:
    return [row for batch in dataset for row in batch]


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if datasets of 100 records were large."""
    monkeypatch.setattr(options, "ALL_BYTES", 0)
    monkeypatch.setattr(options, "ALL_RECORDS", 60)
    monkeypatch.setattr(options, "SHUFFLE_BUFFER", 32)


def test_the_default_is_all_up_to_a_payload_or_so_many_records() -> None:
    assert shuffled_whole(256, MIB) and shuffled_whole(256 * 1024, 1024)
    assert not shuffled_whole(256 * 1024 + 1, 1024)
    assert shuffled_whole(20_000, 1e9) and not shuffled_whole(20_001, 1e9)
    assert not shuffled_whole(None, 1)
    given = RequestedOptions(batch_size=256)
    assert given.resolve(967.0, records=50_000).shuffle_buffer is None
    assert given.resolve(110_000.0, records=1_281_167).shuffle_buffer == 10_000
    assert RequestedOptions(shuffle_buffer=7).resolve(967.0, records=50_000).shuffle_buffer == 7


def test_it_does_not_depend_on_the_machine_or_on_who_reads(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little memory changes how records are read, and not which come when."""
    folder = packed([50, 30])
    rows = flat(keyed(folder, batch_size=8))
    assert keyed(folder, batch_size=8, rank=1, world_size=4).shuffle_buffer is None
    monkeypatch.setattr("shardio.dataset.buffering.memory_available", lambda: 0)
    assert flat(keyed(folder, batch_size=8)) == rows
    assert flat(keyed(folder, batch_size=8, shuffle_buffer="all")) == rows


def test_a_state_names_the_buffer_and_goes_on_in_it(packed: Packed) -> None:
    """A state of a time with another default, too."""
    folder = packed([50, 30])
    old = keyed(folder, batch_size=8, shuffle_buffer=20, seed=3)
    rows = [list(batch) for batch in old]
    state = old.state_dict(steps=4)
    assert state["shuffle_buffer"] == 20
    new = keyed(folder, batch_size=8)
    assert new.shuffle_buffer is None and new.state_dict(steps=0)["shuffle_buffer"] == "all"
    new.load_state_dict(state)
    assert new.shuffle_buffer == 20
    assert [list(batch) for batch in new] == rows[4:]
    ten_thousand = {**state, "shuffle_buffer": 10_000}  # more than there are: also a permutation
    new = keyed(folder, batch_size=8)
    new.load_state_dict(ten_thousand)
    assert new.shuffle_buffer == 10_000 and len([list(batch) for batch in new]) == 6
    with pytest.raises(
        StateError, match="shuffle_buffer is 'all', but the state was saved with 20"
    ):
        keyed(folder, batch_size=8, shuffle_buffer="all").load_state_dict(state)


@pytest.mark.usefixtures("small_limits")
def test_of_a_subset_it_is_decided_by_what_is_read(packed: Packed) -> None:
    folder = packed([50, 50])
    whole = ShardDataset(folder, batch_size=8)
    assert whole.shuffle_buffer == 32
    assert whole.select(range(60)).shuffle_buffer is None
    assert whole.select(range(61)).shuffle_buffer == 32
    assert whole.select(range(80)).select(range(50)).shuffle_buffer is None
    assert ShardDataset(folder, batch_size=8, where={"label": 0}).shuffle_buffer is None
    assert ShardDataset(folder, batch_size=8, shuffle_buffer=9).select(range(5)).shuffle_buffer == 9
    resumed = ShardDataset(folder, batch_size=8)
    resumed.load_state_dict(ShardDataset(folder, batch_size=8, seed=5).state_dict(steps=0))
    part = resumed.select(range(60))  # options of a loaded state stay
    assert (part.seed, part.shuffle_buffer) == (5, 32)


@pytest.mark.usefixtures("small_limits")
def test_each_part_of_a_mixture_has_its_own(packed: Packed) -> None:
    whole = ShardDataset(packed([50, 50]), batch_size=8, fields=("label",))
    mixed = ShardDataset.mix([whole, whole.select(range(40))], length=64)
    assert [part.shuffle_buffer for part in mixed.options.parts] == [32, None]
    again = ShardDataset.mix([whole, whole.select(range(40))], length=64)
    again.load_state_dict(mixed.state_dict(steps=2))
    assert [part.shuffle_buffer for part in again.options.parts] == [32, None]


@pytest.mark.parametrize(
    ("given", "change", "text"),
    [
        ({}, {"spans": 96}, "spans=96"),
        ({"unit": 16}, {"spans": 96}, "spans=96, unit=16"),
        ({"nodes": 2, "unit": 16}, {"spans": 96}, "spans=96, unit=16, nodes=2"),
        ({"spans": 24}, {"unit": 8}, "spans=24, unit=8"),
        ({"spans": 32, "nodes": 2}, {"nodes": 3}, "spans=48, nodes=3"),
        ({"nodes": 2}, {"nodes": 3}, "nodes=3"),
        ({"nodes": 2}, {"unit": 4}, "unit=4, nodes=2"),
    ],
    ids=str,
)
def test_the_text_of_an_order_makes_one_change_and_keeps_what_was_given(
    given: dict[str, int], change: dict[str, int], text: str
) -> None:
    counts = np.full(8, 10_000)
    options = RequestedOptions(batch_size=256, **given).resolve(1e5)
    said = order_text(options.partition(options.epoch(counts, 0)), **change)
    assert said == f"order=shardio.Order({text})"
    pasted = vars(eval(said.removeprefix("order="), {"shardio": shardio}))
    then = RequestedOptions(batch_size=256, **pasted).resolve(1e5)
    then.epoch(counts, 0)  # which refuses what does not suit
    kept = {"unit": options.unit, "nodes": options.nodes} | change
    assert {name: getattr(then, name) for name in kept} == kept
