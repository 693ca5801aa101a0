"""The order that is simulated is the order that is read, and its statistics are what they say."""

import math
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tunings import SMALL

from shardio.order.epoch import Epoch
from shardio.order.partition import Partition
from shardio.tuning import simulate
from shardio.tuning.simulate import (
    Sample,
    Simulation,
    flat_positions,
    pair_chance,
    shuffled_batches,
    uniform_mixture,
    virtual_positions,
)

pytestmark = pytest.mark.usefixtures("one_pass")


def drawn(epoch: Epoch, batch_size: int) -> np.ndarray:
    """Virtual positions in the flat order, batch by batch, as a consumer walks the epoch."""
    spans = {}
    found = []
    for batch in Partition(epoch, batch_size):
        for span, first, count in batch.pieces:
            if span not in spans:
                spans[span] = epoch.span_order(span)
            assert spans[span].drawn == first
            found.append(epoch.position(span, spans[span].take(count)))
    return np.concatenate([np.empty(0, np.int64), *found])


epochs = st.builds(
    Epoch,
    st.lists(st.integers(0, 60), min_size=1, max_size=8).map(np.array),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
    spans=st.integers(1, 9),
    unit=st.integers(1, 5),
    shuffle_buffer=st.none() | st.integers(0, 300),
)


@settings(max_examples=150, deadline=None)
@given(epochs, st.integers(1, 3))
def test_the_order_simulated_is_the_order_that_is_read(epoch: Epoch, units: int) -> None:
    expected = drawn(epoch, units * epoch.unit)
    each = min(epoch.spans, max(1, epoch.units)) * epoch.unit
    rounds = -(-epoch.records // each)
    assert virtual_positions(epoch, 0, rounds).tolist() == expected.tolist()
    for first, stop in pairwise((0, rounds // 3, rounds // 2, rounds)):  # and any part of it
        part = virtual_positions(epoch, first, stop)
        assert part.tolist() == expected[first * each : stop * each].tolist()


@settings(max_examples=150, deadline=None)
@given(epochs, st.randoms(use_true_random=False))
def test_where_a_record_comes_is_the_inverse_of_the_order(epoch: Epoch, random: Any) -> None:
    expected = np.empty(epoch.records, np.int64)
    expected[drawn(epoch, epoch.unit)] = np.arange(epoch.records)
    some = np.array(random.sample(range(epoch.records), epoch.records // 2), np.int64)
    assert flat_positions(epoch, some).tolist() == expected[some].tolist()


def test_where_a_record_comes_is_found_far_apart_without_drawing_all_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    epoch = Epoch(np.array([400_000]), seed=1, epoch=1, spans=2, unit=4, shuffle_buffer=200)
    expected = np.empty(epoch.records, np.int64)
    expected[drawn(epoch, 64)] = np.arange(epoch.records)
    taken = []
    real = simulate.SpanOrder.take

    def take(self: Any, count: int) -> Any:
        taken.append(count)
        return real(self, count)

    monkeypatch.setattr(simulate.SpanOrder, "take", take)
    some = np.concatenate([np.arange(50) + at for at in (399_900, 10, 150_000, 210_000)])
    assert flat_positions(epoch, some).tolist() == expected[some].tolist()
    assert sum(taken) < epoch.records / 20


def naive(labels: np.ndarray, batch: int, buffer: int | None, unit: int) -> tuple[float, ...]:
    """What `Simulation` says, the slow way, from whole epochs of records."""
    starts = np.cumsum(SMALL) - SMALL
    flat, still = [], []
    for number in range(simulate.PASSES + 1):
        epoch = Epoch(SMALL, seed=3, epoch=number, spans=4, unit=unit, shuffle_buffer=buffer)
        shards, records = epoch.locate(drawn(epoch, batch))
        flat.append((starts[shards] + records).tolist())
        # The epoch without a shuffle: shards in the order of that epoch, but for "all".
        one = Epoch(SMALL, seed=3, epoch=number, spans=4, unit=unit, shuffle_buffer=0)
        shards, records = one.locate(drawn(one, batch))
        if buffer is None:
            shards = np.zeros_like(shards)
            records = drawn(one, batch)
        still.append((starts[shards] + records).tolist())
    distinct, alike, again, moved = [], [], [], []
    for now, before, home in zip(flat[1:], flat[:-1], still[1:], strict=True):
        place = {record: at for at, record in enumerate(before)}
        unshuffled = {record: at for at, record in enumerate(home)}
        for first in range(0, len(now) - batch + 1, batch):
            rows = now[first : first + batch]
            distinct.append(len({labels[record] for record in rows}))
            pairs = list(combinations(rows, 2))
            alike.append(np.mean([labels[a] == labels[b] for a, b in pairs]))
            again.append(np.mean([place[a] // batch == place[b] // batch for a, b in pairs]))
            moved += [abs(unshuffled[record] - first - at) for at, record in enumerate(rows)]
    return tuple(float(np.mean(values)) for values in (distinct, alike, again, moved))


@pytest.mark.parametrize(("buffer", "unit"), [(8, 12), (40, 3), (100, 1), (None, 4)])
def test_the_statistics_are_what_they_say(
    buffer: int | None, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "PASSES", 3)
    labels = np.arange(131) // 20
    sample = Sample.of(131, 12)
    simulation = Simulation(SMALL, labels, 3, 4, 12, sample)
    assert simulation(buffer, unit) == pytest.approx(naive(labels, 12, buffer, unit))


def test_chance_is_the_probability_that_a_pair_shares_a_batch() -> None:
    for records, batch in ((7, 3), (12, 4), (5, 5), (2, 1)):
        order = range(records)
        shared = [a // batch == b // batch for a, b in combinations(order, 2)]
        assert pair_chance(records, batch) == pytest.approx(np.mean(shared))
    assert pair_chance(1, 1) == pair_chance(0, 1) == 0


def test_the_uniform_reference_is_uniform() -> None:
    """Its means agree with the hypergeometric expectation, for whole shuffles and for parts."""
    labels = np.repeat(np.arange(50), 40)
    missing = math.comb(1960, 32) / math.comb(2000, 32)  # of one class in a batch of 32
    sample = Sample.of(2000, 32)
    for whole in (True, False):
        made = Sample(sample.regions, sample.passes, whole)
        means = uniform_mixture(labels, 32, made)
        assert means.shape == (simulate.UNIFORM, 2)
        error = means.std(axis=0) / math.sqrt(simulate.UNIFORM)
        assert abs(means[:, 0].mean() - 50 * (1 - missing)) < 5 * error[0]
        assert abs(means[:, 1].mean() - 39 / 1999) < 5 * error[1]


def test_the_reference_draws_no_record_twice_in_a_batch() -> None:
    rows = next(shuffled_batches(np.arange(20), 18, 50, False))
    assert all(len(set(row)) == 18 for row in rows.tolist())


def test_the_last_incomplete_batch_is_ignored() -> None:
    assert Sample.of(1000, 10).batches == 100
    assert Sample.of(1009, 10).batches == 100
    assert Sample.of(9, 10).batches == 0
    assert Sample.of(3_000_000, 1_400_000).batches == 2
    assert Sample.of(3_000_000, 3_000_001).batches == 0


def test_a_hundred_million_records_are_not_all_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.full(100, 1_000_000)
    sample = Sample.of(10**8, 256)
    assert 900 <= sample.batches <= 1024 and int(sample.regions[-1][-1]) > 385_000
    labels = np.zeros(1, np.uint8)  # the same for each record, without 10^8 of them
    simulation = Simulation(counts, np.broadcast_to(labels, 10**8), 0, 64, 256, sample)
    taken = []
    real = simulate.SpanOrder.take

    def take(self: Any, count: int) -> Any:
        taken.append(count)
        return real(self, count)

    monkeypatch.setattr(simulate.SpanOrder, "take", take)
    distinct, alike, again, moved = simulation(5000, 32)
    assert (distinct, alike) == (1, 1)
    assert 0.003 < again < 0.03
    assert 2000 < moved < 6000
    assert sum(taken) < 5_000_000
