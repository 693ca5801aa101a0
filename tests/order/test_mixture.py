"""Patterns: whose each row of a mixture is, by weights."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardio.order.mixture import MAX_SLOTS, Pattern, whole_slots


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_any_first_rows_hold_each_share_rounded_up_or_down(slots):
    pattern = Pattern(slots)
    total = sum(slots)
    assert len(pattern.period) == total
    counts = [0] * len(slots)
    for n in range(2 * total + 1):
        for d, k in enumerate(slots):
            assert pattern.count(d, n) == counts[d]
            assert counts[d] in (n * k // total, -(-n * k // total))
        (owner,) = pattern.owners(n, n + 1)
        counts[owner] += 1
        assert pattern.rows_until(owner, counts[owner]) == n + 1
    assert counts[0] == 2 * slots[0] + (owner == 0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 300), st.integers(0, 300)
)
def test_owners_of_any_rows_are_the_pattern_repeated(slots, start, count):
    pattern = Pattern(slots)
    alone = [pattern.owners(n, n + 1)[0] for n in range(start, start + count)]
    assert pattern.owners(start, start + count) == alone


def test_the_example_of_the_module_is_true() -> None:
    pattern = Pattern([3, 1])
    assert pattern.period == [0, 0, 1, 0]
    assert pattern.owners(6, 7) == [1] and pattern.count(1, 6) == 1


def test_golden_patterns() -> None:
    """As saved states expect them: other patterns would be another ORDER_VERSION."""
    assert Pattern([2, 2]).period == [0, 1, 0, 1]
    assert Pattern([1, 5, 3]).period == [1, 2, 1, 1, 2, 1, 0, 2, 1]
    assert Pattern([1]).period == [0]


def test_rare_datasets_do_not_meet_in_one_batch() -> None:
    pattern = Pattern([63, *[1] * 7])
    for start in range(140):
        assert sum(owner > 0 for owner in pattern.owners(start, start + 10)) <= 2


def test_a_long_period_is_spread_as_well() -> None:
    slots = whole_slots([1_281_167, 50_000, 100, 3], [1] * 4)
    pattern = Pattern(slots)
    owners = np.array(pattern.period)
    assert len(owners) == sum(slots)
    for d, k in enumerate(slots):
        off = np.cumsum(owners == d) - np.arange(1, len(owners) + 1) * k / len(owners)
        assert off.min() > -1 and off.max() < 1


@pytest.mark.parametrize(
    "weights, slots",
    [
        ([1, 1], [1, 1]),
        ([3, 1], [3, 1]),
        ([0.75, 0.25], [3, 1]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([1 / 3, 2 / 3], [1, 2]),
        ([6e300, 2e300], [3, 1]),
        ([1e-300, 2e-300], [1, 2]),
        ([np.float64(0.5), np.int64(1)], [1, 2]),
        (np.array([0.5, 1.5], np.float32), [1, 3]),
        (torch.tensor([0.5, 1.5]), [1, 3]),
        ([Fraction(1, 3), Decimal("0.5")], [2, 3]),
        ((5,), [1]),
        ([1, 1e-12], [MAX_SLOTS, 1]),
        ([1, 1e300], [1, MAX_SLOTS]),
        ([10**400, 1], [MAX_SLOTS, 1]),
    ],
)
def test_weights_are_proportions(weights: Any, slots: list[int]) -> None:
    assert whole_slots(weights, [1] * len(slots)) == slots


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
def test_weights_are_met_within_a_slot(weights):
    slots = whole_slots(weights, [1] * len(weights))
    assert min(slots) >= 1 and sum(slots) <= MAX_SLOTS + len(slots)
    for weight, k in zip(weights, slots, strict=True):
        assert abs(weight / sum(weights) - k / sum(slots)) <= len(slots) / MAX_SLOTS
