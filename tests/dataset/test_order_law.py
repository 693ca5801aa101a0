"""The order law, all of it at once: one epoch, whoever reads it, wherever they stop and go on.

First as arithmetic, in thousands of drawn cases, against the plain loops of test_order; then with
real DataLoaders over real shards.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.naive_order import M64, TAILS, Row, cases, naive_epoch, read_rank, side_by_side
from support.reading import batches, flat, keyed
from torch.utils.data import DataLoader

from shardio.order.epoch import Tail
from shardio.order.options import RequestedOptions
from shardio.order.partition import Partition

Packed = Callable[..., Path]
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

few, some = st.integers(0, 3), st.integers(0, 30)
shards = st.one_of(
    st.lists(some, min_size=1, max_size=1),  # one shard
    st.lists(few, min_size=1, max_size=4),  # fewer records than consumers; empty ones
    st.lists(st.one_of(st.just(0), st.just(1), some), max_size=9),
    st.lists(st.just(1), min_size=1, max_size=12),
)
geometry = st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(0, 5))  # R, W, steps
laws = st.fixed_dictionaries(
    {
        "counts": shards,
        "seed": st.one_of(st.integers(0, 5), st.integers(0, M64)),
        "epoch": st.integers(0, 3),
        "spans": st.integers(1, 9),
        "unit": st.integers(1, 5),
        "shuffle_buffer": st.one_of(st.just("all"), st.integers(2, 12), st.integers(2, 200)),
        "tail": st.sampled_from(TAILS),
        "units": st.integers(1, 12),  # of a global batch
        "chain": st.lists(geometry, min_size=1, max_size=4),
    }
)


@cases(400)
@given(laws)
def test_one_order_whoever_reads_it_and_wherever_they_go_on(law: dict[str, Any]) -> None:
    obeyed(law)


@pytest.mark.slow
@cases(5000)
@given(laws)
def test_one_order_in_many_more_cases(law: dict[str, Any]) -> None:
    obeyed(law)


def obeyed(law: dict[str, Any]) -> None:
    counts, number, chain = law.pop("counts"), law.pop("epoch"), law.pop("chain")
    units = law.pop("units")
    rows, records = units * law["unit"], sum(counts)
    divisors = [d for d in range(1, units + 1) if units % d == 0]
    first_options = RequestedOptions(batch_size=rows, **law).resolve(100.0)
    epoch = first_options.epoch(np.array(counts, np.int64), number)
    virtual, order = naive_epoch(
        counts, law["seed"], number, epoch.spans, epoch.unit, epoch.shuffle_buffer
    )
    tail: Tail = law["tail"]
    known = records // rows * rows if tail == "drop" else records
    expected = [order[i : min(i + rows, known)] for i in range(0, known, rows)]

    found: list[list[Row]] = []
    state, start = None, 0
    for link, (of, workers, steps) in enumerate(chain):
        world_size = divisors[of % len(divisors)]
        # What a run that goes on does: nothing is given but its own batch size.
        given = RequestedOptions(batch_size=rows // world_size, **(law if state is None else {}))
        options = given.resolve(100.0, state)
        assert options.state() == first_options.state()
        one = options.epoch(np.array(counts, np.int64), number)
        ranks = [
            read_rank(
                one,
                options.batch_size,
                workers,
                rank=rank,
                world_size=world_size,
                tail=tail,
                start=start,
            )
            for rank in range(world_size)
        ]
        assert len({len(rank) for rank in ranks}) == 1  # equal steps
        assert [len(a) + len(b) for rank in ranks for a, b in rank if a or b].count(0) == 0
        last = link == len(chain) - 1
        in_order = side_by_side(ranks, units // world_size, one.spans, start)
        taken = in_order[: None if last else steps]
        found += [[row for batch, _ in step for row in batch] for step in taken]
        state, start = options.state(), start + len(taken) * units
        if last and taken:
            repeats = [row for _, again in taken[-1] for row in again]
            full = tail == "exact" or (tail == "pad" and world_size > 1)
            missing = -records % rows if full else 0
            assert repeats == [virtual[i % records] for i in range(missing)]
            assert not any(again for step in taken[:-1] for _, again in step)
    assert found == expected  # so each record exactly once, but for those that drop leaves out
    assert Counter(r for batch in found for r in batch) <= Counter(virtual)
    # A record is never handed out before it has entered its span's window.
    for span in range(min(epoch.spans, max(1, epoch.units))):
        one_span = epoch.span_order(span)
        out = one_span.take(one_span.n)
        assert (out < np.arange(one_span.n) + max(1, one_span.window)).all()
        assert epoch.shuffles_all or one_span.window <= epoch.window


@cases(300)
@given(laws, st.integers(1, 4), st.integers(1, 4), st.integers(0, 4))
def test_a_worker_goes_on_after_its_own_batches(
    law: dict[str, Any], ranks: int, workers: int, done: int
) -> None:
    counts, number = law.pop("counts"), law.pop("epoch")
    del law["chain"]
    options = RequestedOptions(batch_size=law["unit"] * law.pop("units"), **law).resolve(1.0)
    epoch = options.epoch(np.array(counts, np.int64), number)
    for worker in range(workers):
        asked: dict[str, Any] = dict(rank=ranks - 1, world_size=ranks, worker=worker)
        whole = options.partition(epoch, **asked, num_workers=workers)
        rest = options.partition(epoch, **asked, num_workers=workers, done=done)
        assert rest.steps == whole.steps
        assert [b.step for b in rest] == [b.step for b in whole][done:]
        assert [b.pieces for b in rest] == [b.pieces for b in whole][done:]


def test_any_range_of_the_flat_order_is_made_of_draws() -> None:
    requested = RequestedOptions(batch_size=6, spans=4, unit=3, shuffle_buffer=9)
    options = requested.resolve(1.0)
    epoch = options.epoch(np.array([20, 0, 31]), 2)
    flat = [
        (span, draw)
        for batch in Partition(epoch, 6)
        for span, first, count in batch.pieces
        for draw in range(first, first + count)
    ]
    for start in range(52):
        for stop in range(start, 52):
            assert [
                (span, draw)
                for span, first, count in epoch.pieces(start, stop)
                for draw in range(first, first + count)
            ] == flat[start:stop]


# --- real DataLoaders -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))]
)
def test_real_loaders_obey_the_law(packed: Packed, part: int) -> None:
    """Some 40 epochs: drawn shards, buffers, tails; workers 0 to 3, ranks 1 to 4; one resume."""
    random = np.random.default_rng(part)
    for case in range(3):
        counts = random.choice([0, 1, 2, 7, 19, 40], size=random.integers(1, 8)).tolist()
        if not sum(counts):
            counts.append(1)
        folder = packed(counts, name=f"data{case}")
        unit = int(random.integers(1, 4))
        options: dict[str, Any] = {
            "unit": unit,
            "spans": int(random.integers(1, 12)),
            "shuffle_buffer": [2, 5, 40, "all"][random.integers(4)],
            "tail": ["pad", "exact"][random.integers(2)],
            "seed": int(random.integers(100)),
        }
        rows = 4 * unit
        single = keyed(folder, batch_size=rows, **(options | {"tail": "pad"}))
        epoch = int(random.integers(4))
        single.set_epoch(epoch)
        expected = batches(single)
        assert sorted(flat(expected)) == [f"k/{i:06d}.jpg" for i in range(sum(counts))]
        cut = int(random.integers(len(expected) + 1))
        for ranks in (1, 2, 4):
            for workers in (0, int(random.integers(1, 4))):
                state = None
                found: list[list[str]] = []
                for stop in (cut, None):
                    each = []
                    for rank in range(ranks):
                        dataset = keyed(
                            folder, batch_size=rows // ranks, rank=rank, world_size=ranks, **options
                        )
                        dataset.set_epoch(epoch)
                        if state is not None:
                            dataset.load_state_dict(state)
                        each.append(batches(dataset, workers)[:stop])
                    start = 0 if state is None else state["units"]
                    steps = side_by_side(each, 4 // ranks, dataset.options.spans, start)
                    found += map(flat, steps)
                    state = dataset.state_dict(steps=cut) if stop is not None else None
                assert [
                    keys[: len(known)] for keys, known in zip(found, expected, strict=True)
                ] == expected


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_persistent_workers_of_any_start_method_obey_the_law(packed: Packed, context: str) -> None:
    folder = packed([11, 0, 1, 25])
    dataset, alone = keyed(folder, batch_size=4), keyed(folder, batch_size=4)
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=context,
    )
    for epoch in (0, 3, 1):
        dataset.set_epoch(epoch)
        alone.set_epoch(epoch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [list(keys) for (keys,) in loader] == batches(alone)
