"""The order laws: every record once, the same for all readers, for any ranks and workers.

The oracle, `support.naive_order`, is written from docs/design.md as loops over Python integers and
lists; it shares no line with shardio.order.
"""

import doctest
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.naive_order import (
    TAILS,
    Row,
    cases,
    epochs,
    make,
    naive_epoch,
    naive_turn,
    read,
    read_rank,
    side_by_side,
)

from shardio.errors import OptionError
from shardio.order import partition
from shardio.order.partition import Partition, deal_batches, sharers


@cases(450)
@given(epochs, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.sampled_from(TAILS))
def test_every_record_is_read_exactly_once_by_all_consumers_together(case, m, R, W, tail):
    epoch, b, N = make(**case), case["u"] * m, sum(case["counts"])
    virtual, flat = naive_epoch(**case)
    ranks = [read_rank(epoch, b, W, rank=r, world_size=R, tail=tail) for r in range(R)]
    n_steps = Partition(epoch, b, world_size=R, tail=tail).steps
    assert [len(rank) for rank in ranks] == [n_steps] * R  # the same on every rank
    steps = side_by_side(ranks, m, case["C"])
    rows = [row for step in steps for own, _ in step for row in own]
    repeats = [row for step in steps for _, again in step for row in again]
    sizes = [len(a) + len(b) for rank in ranks for a, b in rank]

    assert rows == flat[: len(rows)]  # so each at most once
    if tail == "drop":
        assert N - len(rows) < b * R and not repeats and set(sizes) <= {b}
    else:
        assert len(rows) == N and Counter(rows) == Counter(virtual)
        assert len(repeats) < b * R
        if tail == "pad" and R == 1:
            assert not repeats
        else:
            assert set(sizes) <= {b}
            assert repeats == [virtual[i % N] for i in range(len(repeats))]


@cases(250)
@given(epochs, st.integers(1, 12), st.integers(1, 5), st.sampled_from(TAILS))
def test_global_batches_are_the_same_for_any_ranks_and_workers(case, M, W, tail):
    epoch, each = make(**case), case["u"] * M
    _, flat = naive_epoch(**case)
    cut = len(flat) // each * each if tail == "drop" else len(flat)
    expected = [flat[i : min(i + each, cut)] for i in range(0, cut, each)]
    for R in (d for d in range(1, M + 1) if M % d == 0):
        ranks = [read_rank(epoch, each // R, W, rank=r, world_size=R, tail=tail) for r in range(R)]
        steps = side_by_side(ranks, M // R, case["C"])
        assert [[row for rows, _ in step for row in rows] for step in steps] == expected


@cases(200)
@given(
    epochs,
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(TAILS),
    st.data(),
)
def test_resuming_goes_on_with_the_next_record_for_any_geometry(case, m, R, W, tail, data):
    epoch = make(**case)
    _, flat = naive_epoch(**case)
    start = data.draw(st.integers(0, epoch.units + 3))
    ranks = [
        read_rank(epoch, case["u"] * m, W, rank=r, world_size=R, tail=tail, start=start)
        for r in range(R)
    ]
    left, each = flat[start * case["u"] :], case["u"] * m * R
    n_steps = len(left) // each if tail == "drop" else -(-len(left) // each)
    assert {len(rank) for rank in ranks} == {n_steps}
    steps = side_by_side(ranks, m, case["C"], start)
    assert [row for step in steps for rows, _ in step for row in rows] == left[: n_steps * each]


@cases(150)
@given(epochs, st.integers(1, 4), st.integers(1, 4), st.sampled_from(TAILS))
def test_sample_mode_reads_every_record_once_and_counts_samples(case, R, W, tail):
    case["u"] = 1
    epoch, N = make(**case), sum(case["counts"])
    _, flat = naive_epoch(**case)
    ranks = [read_rank(epoch, None, W, rank=r, world_size=R, tail=tail) for r in range(R)]
    assert {len(rank) for rank in ranks} == {N // R if tail == "drop" else -(-N // R)}
    rows = [row for batch in zip(*ranks, strict=True) for rows, _ in batch for row in rows]
    assert rows == flat[: N // R * R if tail == "drop" else N]


@cases(150)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_no_more_consumers_share_a_span_than_is_said(C, W, R, m):
    epoch = make([C * W * R * m * 2], 0, 0, C, 1, 4)
    readers: dict[int, set[tuple[int, int]]] = {}
    each = sharers(C, W * R, m)
    for rank in range(R):
        for worker in range(W):
            for batch in Partition(
                epoch, m, rank=rank, world_size=R, worker=worker, num_workers=W, tail="drop"
            ):
                for span, _, _ in batch.pieces:
                    readers.setdefault(span, set()).add((rank, worker))
    found = max(map(len, readers.values()))
    assert found <= each and (found == 1) == (each == 1)
    if (R * m) % C == 0 or C % (R * m) == 0:
        assert found == each


@cases(300)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 9), st.integers(0, 50))
def test_ranks_take_a_step_by_the_spans_it_comes_from(C, R, m, start):
    epoch = make([C * R * m * 6 + start], 0, 0, C, 1, 4)
    shares = [Partition(epoch, m, rank=r, world_size=R, start=start) for r in range(R)]
    for step in range(min(5, shares[0].steps)):
        first = start + step * R * m
        turn = naive_turn(first, R, m, C)
        assert sorted(turn) == list(range(R))
        assert [share.first_unit(step) for share in shares] == [first + b * m for b in turn]


@pytest.mark.parametrize(
    ("C", "R", "m"), [(64, 8, 8), (64, 2, 4), (12, 3, 4), (64, 1, 9), (6, 6, 1)]
)
def test_ranks_whose_step_divides_the_spans_take_batches_in_turn(C, R, m):
    for step in range(2 * C // (R * m)):
        assert deal_batches(step * R * m % C, C, R, m).tolist() == list(range(R))


@pytest.mark.parametrize(
    ("nodes", "m", "most"),
    [
        *((nodes, m, 1.0) for nodes in (1, 2, 4, 8) for m in (2, 4, 8)),
        *((nodes, 4, 1.75) for nodes in (3, 5, 6, 7)),
    ],
)
def test_each_node_of_8_ranks_touches_its_part_of_the_spans_or_little_more(nodes, m, most):
    C, R = 64, 8 * nodes
    for node in range(nodes):
        touched = set()
        for step in range(C):
            first = step * R * m
            batches = deal_batches(first % C, C, R, m)[8 * node : 8 * node + 8].tolist()
            touched |= {(first + b * m + i) % C for b in batches for i in range(m)}
        assert C // nodes <= len(touched) <= most * C / nodes


@cases(100)
@given(epochs, st.integers(1, 4), st.integers(1, 5), st.data())
def test_a_state_of_ranks_that_took_batches_in_turn_goes_on(case, m, R, data):
    """The rule of versions before: batch i * R + r is step i of rank r."""
    epoch, each = make(**case), case["u"] * m
    _, flat = naive_epoch(**case)
    steps = data.draw(st.integers(0, len(flat) // (each * R)))
    before = [
        [flat[(i * R + r) * each : (i * R + r + 1) * each] for r in range(R)] for i in range(steps)
    ]
    start = steps * R * m  # what such a state counts
    ranks = [read_rank(epoch, each, 2, rank=r, world_size=R, start=start) for r in range(R)]
    after = [row for rank in ranks for rows, _ in rank for row in rows]
    read_before = [row for step in before for batch in step for row in batch]
    assert Counter(read_before + after) == Counter(flat)
    steps_after = side_by_side(ranks, m, case["C"], start)
    assert [r for step in steps_after for rows, _ in step for r in rows] == flat[len(read_before) :]


def test_drop_leaves_out_other_records_each_epoch():
    def left_out(epoch: int) -> frozenset[Row]:
        e = make([10] * 10, 3, epoch, 4, 2, 20)
        rows = [row for _, rows, _ in read(Partition(e, 16, tail="drop")) for row in rows]
        return frozenset({(s, r) for s in range(10) for r in range(10)} - set(rows))

    assert len({left_out(epoch) for epoch in range(10)}) > 5


def test_worker_steps_sliced_go_on_after_the_batches_already_made():
    share = Partition(make([100], 0, 0, 4, 2, 10), 8, worker=1, num_workers=3)
    steps = [share.batch(i).step for i in share.worker_steps[2:]]
    assert steps == [7, 10] and [b.step for b in share] == [1, 4, 7, 10]


def test_golden_tails():
    epoch = make([9], 0, 0, 2, 2, 4)  # the worked example of the module
    batches = [list(Partition(epoch, 4, rank=r, world_size=2, tail="pad")) for r in range(2)]
    assert [(b.step, b.pieces, b.repeats.tolist()) for b in batches[0]] == [
        (0, ((0, 0, 2), (1, 0, 2)), []),
        (1, ((0, 4, 1),), [0, 1, 2]),
    ]
    assert [(b.step, b.pieces, b.repeats.tolist()) for b in batches[1]] == [
        (0, ((0, 2, 2), (1, 2, 2)), []),
        (1, (), [3, 4, 5, 6]),
    ]
    exact = list(Partition(make([5], 0, 0, 1, 2, 4), 4, tail="exact"))
    assert [(b.pieces, b.repeats.tolist()) for b in exact] == [
        (((0, 0, 4),), []),
        (((0, 4, 1),), [0, 1, 2]),
    ]


def test_the_worked_example_in_the_docstring_is_true():
    result = doctest.testmod(partition)
    assert result.attempted >= 6 and result.failed == 0


def test_steps_are_counted_as_written():
    hundred = make([100], 0, 0, 1, 1, 1)
    counted = {
        (tail, R, start): Partition(hundred, 8, world_size=R, tail=tail, start=start).steps
        for tail in TAILS
        for R in (1, 3)
        for start in (0, 48, 104)
    }
    assert [counted["pad", 1, s] for s in (0, 48, 104)] == [13, 7, 0]
    assert [counted["pad", 3, s] for s in (0, 48, 104)] == [5, 3, 0]
    assert [counted["drop", 1, s] for s in (0, 48, 104)] == [12, 6, 0]
    assert [counted["drop", 3, s] for s in (0, 48, 104)] == [4, 2, 0]
    assert all(counted["exact", R, s] == counted["pad", R, s] for _, R, s in counted)
    ten = make([10], 0, 0, 1, 1, 1)
    assert Partition(ten, None, world_size=4).steps == 3
    assert Partition(ten, None, world_size=4, tail="drop").steps == 2


GOOD = {"counts": [5], "seed": 0, "epoch": 0, "C": 2, "u": 2, "buffer": 3}


@pytest.mark.parametrize(
    ("batch_size", "options", "named"),
    [
        (3, {}, "unit is 2, which does not divide batch_size 3"),
        (0, {}, "batch_size is 0"),
        (None, {}, "expected 1 without a batch_size"),
        (4, {"rank": 1}, "rank is 1: expected a whole number, 0 to 0"),
        (4, {"world_size": 0}, "world_size is 0"),
        (4, {"worker": 2, "num_workers": 2}, "worker is 2: expected a whole number, 0 to 1"),
        (4, {"num_workers": 0}, "num_workers is 0"),
        (4, {"tail": "keep"}, "tail is 'keep': expected one of pad, drop, exact"),
        (4, {"start": -1}, "start is -1"),
        ("4", {}, "batch_size is '4': expected a whole number"),
        (4.0, {}, "batch_size is 4.0: expected a whole number"),
        (4, {"rank": "0"}, "rank is '0': expected a whole number, 0 to 0"),
        (4, {"world_size": 1.0}, "world_size is 1.0: expected a whole number"),
        (4, {"tail": ["pad"]}, "tail is"),
    ],
)
def test_an_impossible_share_is_refused_by_name(batch_size, options, named):
    with pytest.raises(OptionError, match=named):
        Partition(make(**GOOD), batch_size, **options)


def test_numpy_integers_become_those_of_python():
    narrow = {name: np.int8(value) for name, value in GOOD.items() if name != "counts"}
    share = Partition(make(counts=[10**6], **narrow), np.int8(64), world_size=np.uint8(2))
    assert {type(share.batch_size), type(share.world_size), type(share.epoch.unit)} == {int}
    assert share.steps == -(-(10**6) // 128) and share.batch(7000).pieces
