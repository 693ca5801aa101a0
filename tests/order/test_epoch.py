"""An epoch: spans and units that cover all records, and the record at each place."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from support.naive_order import TAILS, cases, epochs, located, make, read

from shardio.errors import OptionError
from shardio.order.epoch import Epoch, default_unit
from shardio.order.partition import Partition


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


def test_window_of_all_spans_together_is_the_shuffle_buffer_rounded_up():
    assert [make([1000], 0, 0, 64, 1, b).window for b in (0, 1, 64, 65, 640, 999)] == (
        [1, 1, 1, 2, 10, 16]
    )
    assert make([1000], 0, 0, 64, 1, 999).shuffles_all is False
    assert make([1000], 0, 0, 64, 1, 1000).shuffles_all is True


# If this fails, saved states no longer mean the same: undo the change, or raise ORDER_VERSION.
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


@pytest.mark.parametrize(("buffer", "golden"), [(9, GOLDEN_EPOCH), (None, GOLDEN_ALL)])
def test_golden_epochs(buffer, golden):
    epoch = make([3, 0, 7, 1, 8], 7, 1, 3, 2, buffer)
    batches = [[f"{s}.{r}" for s, r in rows] for _, rows, _ in read(Partition(epoch, 4))]
    assert [" ".join(batch) for batch in batches] == golden


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
