"""Nodes that keep to shards of their own: the order's laws hold, and each node reads its part."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    make,
    naive_epoch,
    read_rank,
    side_by_side,
)
from support.reading import batches, flat, keyed

from shardio import OptionError, Order, ShardDataset, StateError
from shardio.order.epoch import Epoch
from shardio.order.options import RequestedOptions
from shardio.order.partition import Partition, sharers, unshared_spans

Packed = Callable[..., Path]
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNTS = [23, 0, 41, 3, 30, 12, 19, 44]
N = sum(COUNTS)


@st.composite
def orders(draw: st.DrawFn) -> dict[str, Any]:
    """An epoch of nodes with shards of their own, and the units of a batch."""
    nodes, m = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    least = st.integers(1, 30)
    counts = draw(st.lists(st.one_of(st.just(0), least), max_size=5))
    counts += draw(st.lists(least, min_size=nodes, max_size=6))
    return {
        "counts": draw(st.permutations(counts)),
        "seed": draw(st.one_of(st.integers(0, 5), st.integers(0, M64))),
        "epoch": draw(st.integers(0, 3)),
        "C": nodes * m * draw(st.integers(1, 3)),
        "u": draw(st.integers(1, 3)),
        "buffer": draw(st.integers(1, sum(counts) - 1)),
        "nodes": nodes,
        "node_spans": m,
    }


@cases(300)
@given(
    orders(), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.sampled_from(TAILS),
    st.integers(0, 9),
)  # fmt: skip
def test_every_record_comes_once_in_one_order_whoever_reads_it(case, R, W, m, tail, start):
    epoch, each = make(**case), case["u"] * m
    virtual, order = naive_epoch(**case)
    assert sorted(order) == sorted(virtual) == sorted(located(epoch, list(range(epoch.records))))
    assert located(epoch, list(range(epoch.records))) == virtual
    ranks = [
        read_rank(epoch, each, W, rank=r, world_size=R, tail=tail, start=start) for r in range(R)
    ]
    in_order = side_by_side(ranks, m, case["C"], start, case["nodes"], case["node_spans"])
    left = order[start * case["u"] :]
    steps = len(left) // (each * R) if tail == "drop" else -(-len(left) // (each * R))
    assert [row for step in in_order for rows, _ in step for row in rows] == left[
        : steps * each * R
    ]


@cases(150)
@given(orders())
def test_places_in_storage_lead_there_and_back(case):
    epoch = make(**case)
    virtual = np.arange(epoch.records)
    shards, records = epoch.locate(virtual)
    assert epoch.virtual_position(shards, records).tolist() == virtual.tolist()
    for place in virtual.tolist():
        shard, record, count = epoch.contiguous_run(place)
        assert (shard, record) == (shards[place], records[place])
        follow = slice(place, place + count)
        assert (shards[follow] == shard).all()
        assert records[follow].tolist() == list(range(record, record + count))


@cases(150)
@given(orders(), st.integers(1, 3))
def test_a_node_has_the_same_records_in_each_epoch(case, each):
    """And its ranks read these alone, where batches and steps are what the order was made for."""
    nodes, m = case["nodes"], case["node_spans"]
    R = nodes * each
    own: list[list[set[Row]]] = []
    for number in range(3):
        epoch = make(**(case | {"epoch": number}))
        ranks = [read_rank(epoch, case["u"] * m, 1, rank=r, world_size=R) for r in range(R)]
        own.append(
            [
                {
                    row
                    for rank in ranks[n * each : (n + 1) * each]
                    for rows, _ in rank
                    for row in rows
                }
                for n in range(nodes)
            ]
        )
        spans = epoch.node(np.arange(case["C"]))
        sizes = [sum(map(epoch.span_records, np.flatnonzero(spans == n))) for n in range(nodes)]
        assert [len(rows) for rows in own[-1]] == sizes
        assert max(sizes) - min(sizes) <= case["u"] * case["C"] // nodes
    assert own[0] == own[1] == own[2]


def test_epochs_and_seeds_differ():
    def order(seed: int, epoch: int) -> tuple[Row, ...]:
        one = make(COUNTS, seed, epoch, 8, 2, 20, nodes=2, node_spans=2)
        return tuple(located(one, one.flat().tolist()))

    assert len({order(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16
    groups = set()
    for seed in range(4):
        one = make(COUNTS, seed, 0, 8, 2, 20, nodes=2, node_spans=2)
        of_first = np.flatnonzero(one.node(np.arange(8)) == 0)
        rows = [range(one.span_start(int(s)), one.span_start(int(s) + 1)) for s in of_first]
        groups.add(tuple(sorted(located(one, [place for row in rows for place in row]))))
    assert len(groups) == 4  # shards are dealt by the seed


# If this fails, saved states no longer mean the same: undo the change, or raise ORDER_VERSION.
GOLDEN = [
    "2.0 2.2 0.0 0.2",
    "4.2 4.1 4.4 4.6",
    "2.4 2.5 0.1 3.0",
    "4.3 4.0 4.5 4.7",
    "2.3 2.1 2.6",
]


def test_golden_epoch_of_nodes():
    epoch = make([3, 0, 7, 1, 8], 7, 1, 4, 2, 9, nodes=2, node_spans=2)
    got = [[f"{s}.{r}" for s, r in rows] for rows, _ in read_rank(epoch, 4, 1)]
    assert [" ".join(batch) for batch in got] == GOLDEN


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"C": 6}, r"spans is 6: expected a multiple of 4, .* 2 x 2; give spans=8"),
        ({"counts": [0, 9, 0]}, "nodes is 2, but only 1 shards have records"),
        ({"buffer": 15}, "a buffer of all 15 records mixes the shards"),
        ({"nodes": 0}, "nodes is 0"),
        ({"node_spans": 0}, "node_spans is 0"),
    ],
)  # fmt: skip
def test_what_does_not_suit_nodes_is_refused(change, named):
    good = {"counts": [5, 7, 3], "seed": 0, "epoch": 0, "C": 4, "u": 1, "buffer": 6}
    make(**good, nodes=2, node_spans=2)
    with pytest.raises(OptionError, match=named):
        make(**(good | {"nodes": 2, "node_spans": 2} | change))


# --- as an option of a dataset --------------------------------------------------------------------


def dataset(folder: Path, **options: Any) -> ShardDataset:
    given = {"batch_size": 4, "unit": 2, "nodes": 2, "spans": None} | options
    return keyed(folder, **given)


def test_it_is_part_of_the_state_and_comes_from_it(packed: Packed) -> None:
    folder = packed(COUNTS)
    assert "nodes" not in keyed(folder, batch_size=4).state_dict(0)
    one = dataset(folder)
    whole = batches(one)
    state = json.loads(json.dumps(one.state_dict(steps=7)))
    assert (state["nodes"], state["node_spans"], state["canonical_workers"]) == (2, 2, 64)
    again = dataset(folder, nodes=None, unit=None)
    again.load_state_dict(state)
    assert again.order == one.order == Order(spans=64, unit=2, nodes=2)
    assert batches(again) == whole[7:]
    for world_size in (2, 4):  # with batches of 2 and of 1 unit
        each = []
        for rank in range(world_size):
            given = {"batch_size": 4 // min(2, world_size), "nodes": None, "unit": None}
            part = dataset(folder, rank=rank, world_size=world_size, **given)
            part.load_state_dict(state)
            each.append(batches(part))
        rest = [
            key for step in side_by_side(each, 1, 64, 14, 2, 2) for keys in step for key in keys
        ]
        left = flat(whole[7:])
        assert rest[: len(left)] == left


def test_other_nodes_than_the_state_has_are_refused(packed: Packed) -> None:
    folder = packed(COUNTS)
    state = dataset(folder).state_dict(0)
    with pytest.raises(StateError, match=r"nodes is 4, .* saved with 2: leave order=Order\(nodes="):
        dataset(folder, nodes=4).load_state_dict(state)
    with pytest.raises(StateError, match="nodes is 1, but the state was saved with 2"):
        dataset(folder, nodes=1).load_state_dict(state)
    without = keyed(folder, batch_size=4, unit=2, spans=64).state_dict(0)
    with pytest.raises(StateError, match="nodes is 2, but the state was saved with 1"):
        dataset(folder).load_state_dict(without)
    dataset(folder, nodes=1, spans=64).load_state_dict(without)
    for name, value in (("nodes", "2"), ("node_spans", None), ("node_spans", 3), ("nodes", -1)):
        with pytest.raises(StateError, match=r"nodes|spans"):
            dataset(folder, nodes=None).load_state_dict(state | {name: value})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_size": None, "unit": None}, "give batch_size, too"),
        ({"spans": 6}, "expected a multiple of 4"),
        ({"shuffle_buffer": "all"}, "a buffer of all 172 records"),
        ({"shuffle": False}, "shuffle=False reads in the order of the index, and nodes"),
        ({"nodes": 8}, "only 7 shards have records"),
        ({"nodes": 0}, "nodes is 0"),
    ],
)
def test_options_that_do_not_suit_are_refused(
    packed: Packed, options: dict[str, Any], named: str
) -> None:
    folder = packed(COUNTS)
    given = {"batch_size": 4, "shuffle_buffer": 30, "shuffle": None} | options
    if given["shuffle"] is False:
        del given["shuffle_buffer"]
    cut = {name: given.pop(name) for name in ("spans", "unit", "nodes") if name in given}
    with pytest.raises(OptionError, match=named):
        ShardDataset(folder, **given, order=Order(**({"nodes": 2} | cut)))


def test_a_subset_of_fewer_shards_than_nodes_is_refused(packed: Packed) -> None:
    with pytest.raises(OptionError, match="only 1 shards have records"):
        dataset(packed(COUNTS)).select(range(5))


def test_a_subset_keeps_to_its_nodes(packed: Packed) -> None:
    chosen = dataset(packed(COUNTS)).select(range(0, N, 2))
    assert sorted(flat(batches(chosen))) == [f"k/{i:06d}.jpg" for i in range(0, N, 2)]
    own: list[list[set[str]]] = [[], []]
    for rank in range(2):
        part = dataset(packed(COUNTS), rank=rank, world_size=2).select(range(0, N, 2))
        for epoch in range(2):
            part.set_epoch(epoch)
            own[rank].append(set(flat(batches(part))))
    repeats = 8  # of the tail
    for a, b in own:
        assert len(a ^ b) <= 2 * repeats
    assert len(own[0][0] & own[1][0]) <= repeats


def test_a_mixture_refuses_it(packed: Packed) -> None:
    datasets = [dataset(packed(COUNTS)), keyed(packed(COUNTS), batch_size=4)]
    with pytest.raises(OptionError, match=r"Order\(nodes=2\) of dataset 0: a mixture"):
        ShardDataset.mix(datasets)


def test_spans_are_a_multiple_of_the_blocks_by_default() -> None:
    found = {}
    for nodes, size in ((1, 256), (2, 256), (3, 256), (8, 256), (16, 256), (3, 64), (5, 48)):
        options = RequestedOptions(batch_size=size, nodes=nodes).resolve(1e5)
        found[nodes, size] = options.spans, options.node_spans
    assert found == {
        (1, 256): (64, 1),
        (2, 256): (64, 8),
        (3, 256): (72, 8),
        (8, 256): (64, 8),
        (16, 256): (128, 8),
        (3, 64): (72, 4),
        (5, 48): (75, 3),
    }


@cases(200)
@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)
)
def test_the_spans_for_a_job_are_the_fewest_from_its_own_on_that_nobody_shares(
    nodes: int, ranks: int, workers: int, m: int, factor: int
) -> None:
    node_spans = 1 if nodes == 1 else m
    cut = {"nodes": nodes, "node_spans": node_spans}
    made = make([100] * 4, 0, 0, nodes * node_spans * factor, 1, 30, **cut)
    spans = unshared_spans(Partition(made, m, world_size=ranks, num_workers=workers))
    fits = range(made.spans, spans + 1, nodes * node_spans)
    alone = ranks * workers == 1  # nothing is to be done then
    assert alone or [n for n in fits if sharers(n, ranks * workers, m) == 1] == [spans]
    epoch = make([2 * spans] * 4, 0, 0, spans, 1, 2, **cut)
    readers: dict[int, set[tuple[int, int]]] = {}
    for rank in range(ranks):
        for worker in range(workers):
            who = {"rank": rank, "world_size": ranks, "worker": worker, "num_workers": workers}
            for batch in Partition(epoch, m, **who):
                for span, _, _ in batch.pieces:
                    readers.setdefault(span, set()).add((rank, worker))
    assert {len(each) for each in readers.values()} == {1}


def test_a_billion_records_start_quickly_and_take_little() -> None:
    epoch = Epoch(
        np.full(100_000, 10_000), seed=0, epoch=0, spans=64, unit=32, shuffle_buffer=10_000,
        nodes=8, node_spans=8,
    )  # fmt: skip
    share = Partition(epoch, 256, rank=9, world_size=64, num_workers=8)
    spans = [span for span, _, _ in share.batch(share.steps - 2).pieces]
    assert set(epoch.node(np.array(spans)).tolist()) == {1}
    assert len(epoch.locate(np.arange(10))[0]) == 10
