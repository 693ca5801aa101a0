"""The rows of a query: sorted by columns, or those that ShardDataset hands out in training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.small_datasets import CLASSES, grouped
from support.viewer_records import N, ask, numbers, scored
from torch.utils.data import DataLoader

from shardio import OptionError, ShardDataset
from shardio.viewer.results import Query
from shardio.viewer.rows import order_keys
from shardio.viewer.view import View, open_view

Packed = Callable[..., Path]
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:epoch .* is being read again"),
]
TRAINED = [90, 3, 61, 0, 87]


def trained(folder: Path, epoch: int, workers: int = 0, **options: Any) -> list[list[int]]:
    """The numbers of the records of each batch of a rank."""
    data = ShardDataset(folder, fields=("__key__",), decode=None, **grouped(options))
    data.set_epoch(epoch)
    loader = DataLoader(data, batch_size=None, num_workers=workers)
    return [[int(key[2:8]) for key in batch[0]] for batch in loader]


def shown(view: View, **query: Any) -> list[list[int]]:
    """The same, as the pages of 50 cards show it."""
    steps: dict[int, list[int]] = {}
    start: int | None = 0
    while start is not None:
        page = view.page(Query(order="training", **query), start, 50, wait_s=None)
        for card in page.cards:
            assert card.step is not None and card.row == len(steps.setdefault(card.step, []))
            steps[card.step].append(card.number)
        start = page.next
    assert [*steps] == [*range(len(steps))] and page.steps == len(steps)
    return [*steps.values()]


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ({}, 0),
        ({"shuffle_buffer": 40, "spans": 5, "unit": 2, "seed": 3}, 2),
        ({"shuffle_buffer": 20, "rank": 1, "world_size": 3, "spans": 4}, 2),
        ({"shuffle_buffer": 60, "rank": 3, "world_size": 4, "tail": "drop"}, 0),
        ({"shuffle_buffer": "all", "rank": 0, "world_size": 2, "seed": 2**63}, 1),
        ({"shuffle": False, "rank": 1, "world_size": 2}, 0),
        ({"shuffle_buffer": 32, "spans": 8, "unit": 4, "nodes": 2, "rank": 1, "world_size": 2}, 0),
    ],
)
def test_rows_are_those_of_the_datasets_batches(
    packed: Packed, options: dict[str, Any], workers: int
) -> None:
    folder = packed(TRAINED)
    with open_view(folder) as view:
        for epoch in (0, 3):
            expected = trained(folder, epoch, workers, batch_size=16, **options)
            assert shown(view, epoch=epoch, batch_size=16, **options) == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_a_tail_are_marked(packed: Packed, rank: int) -> None:
    folder = packed([21])
    given: dict[str, Any] = {"batch_size": 8, "rank": rank, "world_size": 2, "tail": "exact"}
    data = ShardDataset(folder, fields=("__key__",), decode=None, **given)
    expected = [(int(k[2:8]), bool(v)) for batch in data for k, v in zip(*batch, strict=True)]
    with open_view(folder) as view:
        page = view.page(Query(order="training", **given))
    assert [(card.number, card.valid) for card in page.cards] == expected
    assert page.total == 16 and {card.valid for card in page.cards if card.step == 0} == {True}
    assert [card.valid for card in page.cards].count(False) in (3, 8)


def test_a_step_is_jumped_to(packed: Packed) -> None:
    folder = packed(TRAINED)
    given: dict[str, Any] = {"batch_size": 16, "shuffle_buffer": 40, "rank": 1, "world_size": 2}
    expected = trained(folder, 2, **given)
    with open_view(folder) as view:
        page = view.page(Query(order="training", epoch=2, step=5, **given), count=16)
        assert [card.number for card in page.cards] == expected[5]
        assert page.start == 80 and {card.step for card in page.cards} == {5}
        beyond = view.page(Query(order="training", epoch=2, step=1000, **given))
        assert not beyond.cards and beyond.steps == len(expected)


def test_filters_choose_what_is_trained_on(packed: Packed) -> None:
    folder = packed(TRAINED)
    given: dict[str, Any] = {"batch_size": 16, "shuffle_buffer": 30, "seed": 9}
    expected = trained(folder, 1, where={"label": ["dog", "eel"]}, **given)
    with open_view(folder) as view:
        assert shown(view, epoch=1, where=("label=dog,eel",), **given) == expected
        assert shown(view, epoch=1, label="cat", **given) == trained(
            folder, 1, where={"label": 0}, **given
        )
        assert shown(view, label="cat", where=("label=dog",), **given) == []


def test_a_sort_stays_within_each_step(packed: Packed) -> None:
    folder = packed(TRAINED)
    given: dict[str, Any] = {"batch_size": 16, "shuffle_buffer": 30}
    expected = trained(folder, 0, **given)
    with open_view(folder) as view:
        query = Query(order="training", sort="label", descending=True, **given)
        cards = view.page(query, 16, 32, wait_s=None).cards
    for step in (1, 2):
        batch, here = expected[step], [card for card in cards if card.step == step]
        assert [card.row for card in here] == sorted(
            range(16), key=lambda row: (-(batch[row] % 3), row)
        )
        assert [card.number for card in here] == [batch[card.row or 0] for card in here]


def test_a_search_walks_in_training_order(packed: Packed) -> None:
    folder = packed(TRAINED)
    rows = [number for batch in trained(folder, 0, batch_size=16) for number in batch]
    with open_view(folder) as view:
        page = view.page(Query(order="training", batch_size=16, search="7.jpg"), search_s=60.0)
    assert [card.number for card in page.cards] == [n for n in rows if n % 10 == 7]
    assert all(rows[card.position] == card.number for card in page.cards)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 2, "world_size": 2},
        {"batch_size": 16, "unit": 5},
        {"shuffle_buffer": "many"},
        {"tail": "cut"},
        {"epoch": -1},
        {"shuffle": False, "shuffle_buffer": 10},
    ],
)
def test_options_that_training_refuses_are_refused(packed: Packed, wrong: dict[str, Any]) -> None:
    with open_view(packed(TRAINED)) as view, pytest.raises(OptionError):
        view.page(Query(order="training", **wrong), wait_s=None)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("name", ["width", "score", "rare", "flag", "label"])
@pytest.mark.parametrize("label", [None, "dog"])
def test_sorts_put_records_without_a_value_last(
    view: View, name: str, descending: bool, label: str | None
) -> None:
    def key(number: int) -> tuple[Any, ...]:
        value = scored(number)[name]
        if value is None or value != value:
            return 2 if value is None else 1, 0, number
        return 0, -value if descending else value, number

    kept = [n for n in range(N) if label is None or CLASSES[scored(n)["label"]] == label]
    expected = sorted(kept, key=key)
    page = ask(view, sort=name, descending=descending, label=label)
    assert numbers(page) == expected
    for card in page.cards[:20]:
        value = scored(card.number)[name]
        assert card.value == (pytest.approx(value, nan_ok=True) if value is not None else None)
    for start, count in ((0, 3), (17, 9), (len(expected) - 2, 50)):
        part = ask(view, start, count, sort=name, descending=descending, label=label)
        assert numbers(part) == expected[start : start + count]


@pytest.mark.parametrize(
    "values",
    [
        [3, -5, 127, -128, 0],
        [2**63, 0, 2**64 - 1],
        [-(2**63), 2**63 - 1, 0, -1],
        [0.0, -1.5, 1e300, -1e300, 5e-324, -np.inf, np.inf],
        [False, True],
        [-(2**63), 2**64 - 1, 5],
    ],
    ids=["int8", "uint64", "int64", "float64", "bool", "object"],
)
def test_keys_sort_as_values_do(values: list[Any]) -> None:
    column = np.array(values, object if min(values) == -(2**63) and max(values) >= 2**63 else None)
    if max(map(abs, values)) < 200 and type(values[0]) is int:
        column = column.astype(np.int8)
    for descending in (False, True):
        order = np.argsort(order_keys(column, descending), kind="stable").tolist()
        assert [values[i] for i in order] == sorted(values, reverse=descending)


def test_records_are_sorted_by_their_size(view: View) -> None:
    found = [card.bytes for card in ask(view, sort="bytes", descending=True).cards]
    assert found == sorted(found, reverse=True) and len(set(found)) > 10
    assert found[0] == max(card.bytes for card in ask(view).cards)
