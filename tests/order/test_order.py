"""The order laws: every record once, the same for all readers, and never changed by accident.

The oracle is written here from docs/design.md, as naive loops over Python integers and lists; it
shares no line with shardio.order.
"""

import doctest
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.naive_order import (
    M64,
    TAILS,
    Row,
    cases,
    located,
    naive_epoch,
    naive_key,
    naive_mix,
    naive_span,
    naive_turn,
    naive_word,
    read,
    read_rank,
    side_by_side,
    spans,
)

from shardio.errors import OptionError
from shardio.order import partition, rng, shuffle
from shardio.order.epoch import ORDER_VERSION, Epoch, default_unit
from shardio.order.partition import Partition, dealt, sharers
from shardio.order.shuffle import SpanOrder

# --- the oracle ------------------------------------------------------------------------------


# --- the code under test, as a fetcher would use it ------------------------------------------


shard_counts = st.lists(
    st.one_of(st.just(0), st.just(1), st.integers(0, 30)), min_size=0, max_size=9
)
epochs = st.fixed_dictionaries(
    {
        "counts": shard_counts,
        "seed": st.one_of(st.integers(0, 5), st.integers(0, M64)),
        "epoch": st.integers(0, 3),
        "C": st.integers(1, 9),
        "u": st.integers(1, 5),
        "buffer": st.one_of(st.none(), st.integers(0, 12), st.integers(0, 200)),
    }
)


def make(counts, seed, epoch, C, u, buffer) -> Epoch:
    return Epoch(
        np.array(counts, np.int64),
        seed=seed,
        epoch=epoch,
        spans=C,
        unit=u,
        shuffle_buffer=buffer,
    )


# --- laws 2 and 3 ----------------------------------------------------------------------------


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


# --- who makes which batch --------------------------------------------------------------------


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
        assert dealt(step * R * m % C, C, R, m).tolist() == list(range(R))


@pytest.mark.parametrize("m", [2, 4, 8])
@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
def test_each_node_of_8_ranks_touches_its_part_of_the_spans(nodes, m):
    C, R = 64, 8 * nodes
    for node in range(nodes):
        touched = set()
        for step in range(C):
            first = step * R * m
            turn = dealt(first % C, C, R, m)[8 * node : 8 * node + 8].tolist()
            touched |= {(first + b * m + i) % C for b in turn for i in range(m)}
        assert len(touched) == C // nodes


@pytest.mark.parametrize("nodes", [3, 5, 6, 7])
def test_other_counts_of_nodes_touch_little_more(nodes):
    C, R, m = 64, 8 * nodes, 4
    for node in range(nodes):
        touched = set()
        for step in range(C):
            first = step * R * m
            turn = dealt(first % C, C, R, m)[8 * node : 8 * node + 8].tolist()
            touched |= {(first + b * m + i) % C for b in turn for i in range(m)}
        assert len(touched) <= 1.75 * C / nodes


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


def test_epochs_and_seeds_differ_and_repeat():
    def flat(seed: int, epoch: int, buffer: int | None) -> list:
        e = make([50] * 8, seed, epoch, 4, 4, buffer)
        return [row for _, rows, _ in read(Partition(e, 16)) for row in rows]

    for buffer in (40, None):
        orders = {(s, e): flat(s, e, buffer) for s in range(4) for e in range(4)}
        assert len({tuple(o) for o in orders.values()}) == 16
        assert all(flat(s, e, buffer) == o for (s, e), o in orders.items())
    # Shards and draws both change: two spans of an epoch do not draw alike either.
    e = make([400], 0, 0, 4, 4, 40)
    assert len({tuple(e.span_order(s).take(100).tolist()) for s in range(4)}) == 4
    f = make([400], 0, 1, 4, 4, 40)
    assert e.span_order(0).take(100).tolist() != f.span_order(0).take(100).tolist()


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


@cases(150)
@given(epochs)
def test_spans_are_contiguous_whole_units_and_cover_the_epoch(case):
    epoch, C, u = make(**case), case["C"], case["u"]
    sizes = [epoch.span_records(s) for s in range(C)]
    starts = [epoch.span_start(s) for s in range(C + 1)]
    assert starts == np.concatenate([[0], np.cumsum(sizes)]).tolist()
    assert starts[C] == epoch.records == sum(case["counts"])
    full = [len(range(s, epoch.units, C)) * u for s in range(C)]  # unit g is of span g mod C
    short = [s for s in range(C) if sizes[s] != full[s]]
    assert short in ([], [(epoch.units - 1) % C])
    assert all(0 <= full[s] - sizes[s] < u for s in range(C))


@cases(100)
@given(epochs)
def test_the_virtual_sequence_holds_every_record_once(case):
    epoch, counts = make(**case), case["counts"]
    rows = [(s, r) for s in range(len(counts)) for r in range(counts[s])]
    assert sorted(located(epoch, list(range(epoch.records)))) == rows
    virtual = np.arange(epoch.records)
    assert epoch.virtual_position(*epoch.locate(virtual)).tolist() == virtual.tolist()


# --- the window ------------------------------------------------------------------------------

blocks = st.sampled_from([1, 2, 7, 64, shuffle.BLOCK])


@cases(300)
@given(spans, blocks, st.lists(st.integers(0, 90), max_size=12))
def test_span_order_equals_the_naive_loop_however_it_is_taken(span, block, counts):
    n, window, key = span
    expected = naive_span(n, max(window, 1), key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "BLOCK", block)
        so = SpanOrder(n, window, key=key)
        got: list[int] = []
        for count in [*counts, n]:
            count = min(count, n - len(got))
            assert so.drawn == len(got)
            taken = so.take(count)
            assert taken.dtype == np.int64 and taken.shape == (count,)
            got += taken.tolist()
    assert got == expected
    assert sorted(got) == list(range(n))


@cases(300)
@given(spans, blocks, st.lists(st.integers(0, 400), min_size=1, max_size=6), st.integers(1, 60))
def test_seek_equals_taking_forwards_and_backwards(span, block, places, count):
    n, window, key = span
    expected = naive_span(n, max(window, 1), key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "BLOCK", block)
        patch.setattr(shuffle, "SCAN", 5)
        so = SpanOrder(n, window, key=key)
        for place in places:
            k = min(place, n)
            so.seek(k)
            assert so.drawn == k
            end = min(k + count, n)
            assert so.take(end - k).tolist() == expected[k:end]


@pytest.mark.parametrize("window", [2, 157, 10_000, 65_536, 65_537, 100_000])
def test_a_long_span_equals_the_naive_loop_and_seeks_anywhere(window):
    n = 150_000
    expected = naive_span(n, window, 11)
    so = SpanOrder(n, window, key=11)
    assert np.concatenate([so.take(32) for _ in range(n // 32)] + [so.take(n % 32)]).tolist() == (
        expected
    )
    for k in (0, 1, 60_000, 120_000, n - window, n - window + 1, n - 1, n):
        so = SpanOrder(n, window, key=11)
        so.seek(k)
        assert so.take(min(50, n - k)).tolist() == expected[k : k + 50]


@cases(150)
@given(spans)
def test_no_record_comes_before_it_has_entered_the_window(span):
    n, window, key = span
    w = max(1, min(window, n))
    for k, p in enumerate(SpanOrder(n, window, key=key).take(n).tolist()):
        assert k >= p - w + 1


def test_window_of_all_spans_together_is_the_shuffle_buffer_rounded_up():
    assert [make([1000], 0, 0, 64, 1, b).window for b in (0, 1, 64, 65, 640, 999)] == (
        [1, 1, 1, 2, 10, 16]
    )
    assert make([1000], 0, 0, 64, 1, 999).shuffles_all is False
    assert make([1000], 0, 0, 64, 1, 1000).shuffles_all is True


def test_the_window_picks_its_slots_evenly():
    w, n = 16, 160_016
    emitted = SpanOrder(n, w, key=5).take(n - w)
    # In a fair window the delay of a record is geometric: P(delay >= d) = (15/16)^d.
    delay = np.arange(n - w) - emitted + w
    for d in (1, 2, 16, 48):
        expected = (1 - 1 / w) ** d
        assert abs(float((delay > d).mean()) - expected) < 0.005


# --- randomness ------------------------------------------------------------------------------


def test_splitmix64_gives_the_published_words():
    # The reference C code's first five for seed 1234567 (prng.di.unimi.it, Rosetta Code).
    assert rng.words(1234567, 1, 5).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@cases(150)
@given(st.integers(0, M64), st.integers(0, 2**40), st.integers(0, 20))
def test_words_are_the_same_one_at_a_time_and_from_any_start(key, start, count):
    expected = [naive_word(key, start + i) for i in range(count)]
    assert rng.words(key, start, count).tolist() == expected
    assert [rng.word(key, start + i) for i in range(count)] == expected


def test_splitmix64_leaves_its_input_alone():
    x = np.arange(5, dtype=np.uint64)
    assert rng.splitmix64(x).tolist() == [naive_mix(i) for i in range(5)]
    assert x.tolist() == [0, 1, 2, 3, 4]


def test_keys_differ_by_purpose_order_and_number_of_parts():
    parts = [(), (0,), (0, 0), (0, 0, 0), (1, 2), (2, 1), (1,), (1, 0), (-1,), (-1, 0)]
    assert len({rng.key(*p) for p in parts}) == len(parts)
    assert all(rng.key(*p) == naive_key(*p) for p in parts)
    assert rng.key(-1) == rng.key(M64) and rng.key(np.int64(3)) == rng.key(3)
    purposes = [rng.SHARDS, rng.SPAN, rng.RECORDS, rng.PACK, rng.TRANSFORM]
    keys = {
        rng.key(p, s, e, x) for p in purposes for s in range(9) for e in range(9) for x in (0, 1)
    }
    assert len(keys) == 5 * 9 * 9 * 2


def test_draws_differ_by_seed_epoch_and_record():
    assert rng.draw(3, 4, 7) == naive_word(naive_key(5, 3, 4), 7)
    assert len({rng.draw(s, e, r) for s in range(9) for e in range(9) for r in range(9)}) == 729
    records = np.array([7, 0, 2**40, 7])
    assert rng.draws(3, 4, records).tolist() == [rng.draw(3, 4, r) for r in records.tolist()]


def chi_square(counts: Counter, kinds: int, total: int) -> float:
    return sum(c * c for c in counts.values()) * kinds / total - total


@pytest.mark.parametrize("of", ["permutation", "all", "window of n"])
def test_small_permutations_are_uniform(of):
    total, seen = 6000, Counter()
    for seed in range(total):
        if of == "permutation":
            p = rng.permutation(4, rng.key(rng.PACK, seed))
        elif of == "all":
            epoch = make([1, 0, 3], seed, 0, 2, 1, None)
            shard, record = epoch.locate(np.arange(4))
            p = np.array([0, 1, 1])[shard] + record
        else:
            p = SpanOrder(4, 4, key=rng.key(rng.SPAN, seed)).take(4)
        seen[tuple(p.tolist())] += 1
    assert chi_square(seen, 24, total) < 49.7  # 23 degrees of freedom: 1 in 1,000 is above


def test_every_record_is_anywhere_as_often_in_a_large_permutation():
    n, total = 50, 4000
    seen = np.zeros((n, n))
    for k in range(total):
        seen[np.arange(n), rng.permutation(n, rng.key(rng.PACK, k))] += 1
    expected = total / n
    chi = float(((seen - expected) ** 2 / expected).sum())
    freedom = (n - 1) ** 2
    assert abs(chi - freedom) < 5 * (2 * freedom) ** 0.5


# --- golden: the order never changes by accident ---------------------------------------------
# If one of these fails, saved states and runs of users no longer mean the same: either undo the
# change or raise ORDER_VERSION.

GOLDEN_KEY = 11577022372689766140
GOLDEN_DRAW = 7390059923021171142
GOLDEN_PERMUTATION = [4, 3, 11, 2, 8, 7, 0, 10, 6, 5, 1, 9]
GOLDEN_EPOCH = [
    "4.0 4.2 2.0 2.2",
    "0.0 2.6 4.4 4.5",
    "2.1 2.3 0.1 2.5",
    "4.3 4.1 4.7 2.4",
    "0.2 3.0 4.6",
]
GOLDEN_ALL = [
    "4.6 2.5 4.7 2.1",
    "2.4 4.0 2.0 3.0",
    "4.4 4.2 0.0 2.3",
    "4.5 0.1 2.6 4.3",
    "4.1 2.2 0.2",
]
GOLDEN_SPANS = {  # (n, window, first draw): six emissions
    (20000, 157, 0): [23, 156, 93, 136, 46, 114],
    (20000, 157, 10000): [10154, 10093, 10121, 9062, 10130, 10071],
    (20000, 157, 19990): [19910, 19972, 19708, 19975, 19735, 19890],
    (200000, 70000, 100000): [164387, 22889, 71920, 156736, 131094, 158673],
}


def test_golden_keys_words_and_permutations():
    assert ORDER_VERSION == 1
    assert rng.key(rng.SPAN, 1, 2, 3) == GOLDEN_KEY
    assert rng.draw(1, 2, 3) == GOLDEN_DRAW
    assert rng.permutation(12, rng.key(rng.PACK, 0)).tolist() == GOLDEN_PERMUTATION


def test_golden_epoch_through_a_window():
    epoch = make([3, 0, 7, 1, 8], 7, 1, 3, 2, 9)
    batches = [[f"{s}.{r}" for s, r in rows] for _, rows, _ in read(Partition(epoch, 4))]
    assert [" ".join(batch) for batch in batches] == GOLDEN_EPOCH


def test_golden_epoch_of_all():
    epoch = make([3, 0, 7, 1, 8], 7, 1, 3, 2, None)
    batches = [[f"{s}.{r}" for s, r in rows] for _, rows, _ in read(Partition(epoch, 4))]
    assert [" ".join(batch) for batch in batches] == GOLDEN_ALL


def test_golden_draws_of_long_spans():
    for (n, window, place), expected in GOLDEN_SPANS.items():
        so = SpanOrder(n, window, key=rng.key(rng.SPAN, 0, 0, 0))
        so.seek(place)
        assert so.take(6).tolist() == expected


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


# --- sizes and options -----------------------------------------------------------------------


def test_a_billion_records_cost_little_memory():
    tracemalloc.start()
    try:
        epoch = make(np.full(100_000, 10_000), 0, 0, 64, 32, 10_000)
        so = epoch.span_order(40)
        so.seek(so.n // 2)
        for _ in range(200):
            epoch.locate(epoch.position(40, so.take(32)))
        so.seek(so.n - 10)
        so.take(10)
        share = Partition(epoch, 256, rank=1, world_size=4096, num_workers=4)
        last = share.batch(share.steps - 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert epoch.records == 10**9 and share.steps == -(-(10**9) // (256 * 4096))
    assert sum(count for _, _, count in last.pieces) + len(last.repeats) == 256
    assert peak < 50e6


def test_emissions_cannot_be_changed_under_a_later_seek_back():
    so = SpanOrder(100, 5, key=1)
    for _ in range(2):
        with pytest.raises(ValueError, match="read-only"):
            so.take(3)[0] = 7


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


def test_an_empty_data_set_has_no_batches():
    for counts in ([], [0, 0]):
        epoch = make(counts, 0, 0, 4, 2, 10)
        assert epoch.records == epoch.units == 0
        assert [epoch.span_records(s) for s in range(4)] == [0] * 4
        for tail in TAILS:
            assert list(Partition(epoch, 4, world_size=2, tail=tail)) == []
        assert epoch.span_order(0).take(0).tolist() == []


def test_default_unit_divides_and_mixes_spans():
    sizes = [1, 2, 7, 8, 32, 40, 48, 64, 67, 96, 100, 128, 200, 255, 256, 1000, 1024, 2018]
    units = [1, 1, 1, 4, 16, 10, 16, 16, 1, 16, 10, 16, 10, 15, 32, 25, 32, 2]
    assert [default_unit(b) for b in sizes] == units
    for b in range(2, 700):
        unit = default_unit(b)
        assert b % unit == 0 and unit <= 32 and b // unit >= (8 if b >= 256 else 2)


def test_the_epoch_keeps_its_own_copy_of_the_counts():
    counts = np.array([3, 4])
    epoch = Epoch(counts, seed=0, epoch=0, spans=1, unit=1, shuffle_buffer=2)
    counts[0] = 100
    assert epoch.records == 7 and not epoch.shard_records.flags.writeable


GOOD = {"counts": [5], "seed": 0, "epoch": 0, "C": 2, "u": 2, "buffer": 3}


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("counts", [3, -1], "shard 1 has -1"),
        ("counts", [[1, 2]], "one integer per shard"),
        ("seed", -1, "seed is -1"),
        ("seed", 2**64, "seed"),
        ("epoch", -1, "epoch is -1"),
        ("C", 0, "spans is 0"),
        ("u", 0, "unit is 0"),
        ("buffer", -1, "shuffle_buffer is -1"),
        ("seed", 0.5, "seed is 0.5: expected a whole number, 0 to"),
        ("seed", True, "seed is True: expected a whole number"),
        ("epoch", None, "epoch is None: expected a whole number"),
        ("C", "64", "spans is '64': expected a whole number, 1 or more"),
        ("u", 2.0, "unit is 2.0: expected a whole number"),
        ("buffer", "9", "shuffle_buffer is '9': expected a whole number"),
    ],
)
def test_an_impossible_epoch_is_refused_by_name(option, value, named):
    with pytest.raises(OptionError, match=named):
        make(**(GOOD | {option: value}))


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


def test_taking_or_seeking_beyond_a_span_is_refused_and_changes_nothing():
    so = SpanOrder(10, 3, key=1)
    so.take(4)
    for wrong in (
        lambda: so.take(7),
        lambda: so.take(-1),
        lambda: so.seek(11),
        lambda: so.seek(-1),
    ):
        with pytest.raises(OptionError):
            wrong()
        assert so.drawn == 4
    assert so.take(6).tolist() == naive_span(10, 3, 1)[4:]
    with pytest.raises(OptionError, match="shuffle_buffer"):
        SpanOrder(10, 2**32 + 1, key=1)
