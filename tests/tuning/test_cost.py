"""What a job reads, and takes of memory: what all consumers do, and what Fetch holds."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.naive_order import cases
from support.tuning_jobs import TAILS, TINY, GiB, codes, explained, imagined, walk_all

from shardio.dataset import buffering
from shardio.dataset.fetch import Fetch
from shardio.dataset.reader import Reader, read
from shardio.errors import OptionError
from shardio.formats import manifest
from shardio.order.options import RequestedOptions
from shardio.storage.location import locate
from shardio.tuning import cost
from shardio.tuning.cost import TrainingJob, free_consumers
from shardio.tuning.explain import Explanation, explain_job

Packed = Callable[..., Path]


@cases(300)
@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    sizes=st.integers(1, 5000),
    spans=st.integers(1, 12),
    unit=st.integers(1, 5),
    units=st.integers(1, 4) | st.none(),
    buffer=st.integers(2, 200) | st.just("all"),
    ranks=st.integers(1, 4),
    workers=st.integers(0, 4),
    tail=st.sampled_from(TAILS),
    seed=st.integers(0, 3),
)
def test_what_is_said_is_what_all_consumers_do(
    counts, sizes, spans, unit, units, buffer, ranks, workers, tail, seed
):
    made = imagined(counts, [sizes + 7 * i for i in range(len(counts))])
    options = RequestedOptions(
        batch_size=None if units is None else unit * units,
        shuffle_buffer=buffer,
        seed=seed,
        tail=tail,
        spans=spans,
        unit=1 if units is None else unit,
    ).resolve(1.0)
    e = explain_job(
        TrainingJob(made, options, num_workers=workers, world_size=ranks, available_bytes=GiB)
    )
    found = walk_all(made, options, ranks, max(1, workers))
    rows = list(found.rows.values())
    distinct = {row for part in rows for row in part}

    assert e.worker.is_exact and {e.steps} == found.steps
    per_worker = found.batches.values()
    assert e.worker.steps == (min(per_worker), max(per_worker))
    assert e.dropped_records == made.records - len(distinct)
    assert e.repeated_records == sum(map(len, rows)) - len(distinct)
    assert e.last_batch_records == min(found.sizes, default=0)

    def bounds(values: Any) -> tuple[int, int]:
        listed = list(values)
        return min(listed), max(listed)

    assert e.worker.records == bounds(map(len, rows))
    shards = [len({shard for shard, _ in part}) for part in rows]
    assert e.worker.shards == bounds(shards)
    read = [sum(sizes + 7 * shard for shard, _ in part) for part in rows]
    assert e.worker.bytes == bounds(read)
    assert e.worker.sharers == max(map(len, found.spans.values()), default=1)
    epoch = options.epoch(made.shard_records, 0)
    if not epoch.shuffles_all:
        least, most = bounds([n for n in map(epoch.span_records, range(spans)) if n] or [0])
        lengths = f"{least}" if least == most else f"{least} to {most}"
        assert re.search(rf" in each of \d+ spans? of {lengths} \w", " ".join(str(e).split()))
    assert json.loads(json.dumps(e.as_dict())) == e.as_dict()
    assert all(len(line) <= 80 for line in str(e).splitlines())


def test_a_subset_is_explained_by_its_counts():
    made = imagined([100, 100, 100], [10, 20, 30])
    e = explained(made, {"shard_records": np.array([7, 0, 3])}, batch_size=4)
    assert (e.records, e.shards, e.steps, e.last_batch_records) == (10, 2, 3, 2)
    assert (e.dataset_bytes, e.worker.bytes[1]) == (160, 160)


@pytest.mark.parametrize("buffer", [300, "all"])
@pytest.mark.parametrize("workers, ranks", [(1, 1), (4, 2), (8, 8)])
def test_estimates_are_about_what_counting_gives(
    buffer: Any, workers: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = imagined([250] * 200)
    job = {"num_workers": workers, "world_size": ranks}
    exact = explained(made, job, batch_size=64, shuffle_buffer=buffer)
    monkeypatch.setattr(cost, "COUNTED", 0)
    about = explained(made, job, batch_size=64, shuffle_buffer=buffer)
    assert exact.worker.is_exact and not about.worker.is_exact
    assert "about" in str(about) and "about" not in str(exact)
    for name in ("records", "bytes", "shards"):
        expected = getattr(exact.worker, name)[1]
        assert getattr(about.worker, name)[1] == pytest.approx(expected, rel=0.25)
    assert about.worker.sharers == exact.worker.sharers
    assert (about.steps, about.repeated_records) == (exact.steps, exact.repeated_records)


def test_a_billion_records_are_not_counted_one_by_one():
    made = imagined([10_000] * 100_000)
    e = explained(made, {"num_workers": 8, "world_size": 8, "local_world_size": 8}, batch_size=256)
    assert not e.worker.is_exact and e.steps == 488_282
    assert e.worker.bytes[1] == pytest.approx(1e12 / 64, rel=0.01)
    assert codes(e) == []


@cases(60)
@given(st.integers(1, 24), st.integers(1, 6), st.integers(1, 24))
def test_nobody_shares_with_the_counts_that_are_named(spans, units, consumers):
    made = imagined([spans * consumers * units * 3])
    options = RequestedOptions(batch_size=units, unit=1, spans=spans, shuffle_buffer=2).resolve(1.0)
    touched = walk_all(made, options, 1, consumers).spans.values()
    assert (max(map(len, touched)) == 1) == (consumers in free_consumers(spans, units))


@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("size", [100, 30_000])
@pytest.mark.parametrize("job", [(0, 1, 1), (2, 2, 2), (2, 2, 1), (5, 3, 3)])
@pytest.mark.parametrize("given", [{}, {"shuffle_buffer": "all"}, {"shuffle_buffer": 20}])
def test_the_policy_is_what_fetch_does(
    network: bool,
    size: int,
    job: tuple[int, int, int],
    given: dict[str, Any],
    packed: Packed,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    workers, ranks, here = job
    monkeypatch.setattr(buffering, "memory_available", lambda: 200_000_000)
    for name, value in {"RUN": 1000, "LEAST_BLOCK": 100, "ROWS_AHEAD": 8}.items():
        monkeypatch.setattr(buffering, name, value)
    body = bytes(size)
    folder = packed([40, 30, 20], image=lambda i: body)
    if network:
        folder = request.getfixturevalue("on_network")(folder)
    storage = locate(folder)
    assert storage.is_network() is network
    reader = Reader(storage, manifest.load(storage))
    chosen = {"batch_size": 8, "unit": 4, "shuffle_buffer": 40, "spans": 4} | given
    options = RequestedOptions(**chosen).resolve(1.0)
    job = TrainingJob(
        reader.manifest,
        options,
        num_workers=workers,
        world_size=ranks,
        local_world_size=here,
        buffer_bytes=1_000_000,
        is_network=network,
        available_bytes=200_000_000,
    )
    e = explain_job(job)
    each = max(1, workers)
    share = options.partition(
        options.epoch(reader.manifest.shard_records, 0), world_size=ranks, num_workers=each
    )
    got = Fetch(
        reader,
        share,
        buffer_bytes=1_000_000,
        local_consumers=each * here,
        machines=-(-ranks // here),
    )
    assert e.policy == got.policy.name and type(job.policy) is type(got.policy)
    assert got.policy.waits in " ".join(str(e).split())
    most = 0
    for rows in got:
        list(map(read, got.rows(rows)))
        most = max(most, got.held_bytes)
    assert most <= e.memory.records_bytes
    assert (most > 0) == (e.memory.records_bytes > 0)
    assert len(reader._opened) <= e.files_open
    opened = reader._opened.values()
    index = sum(10 * s.records for s in opened)
    assert index <= e.memory.index_bytes


def test_files_and_indexes_are_of_the_largest_shards_that_may_be_open():
    made = imagined([10, 500, 30, 400, 0])
    job = {"files_limit": 2}
    e = explained(made, job, batch_size=4, spans=1, shuffle_buffer=2)
    assert (e.files_open, e.memory.index_bytes) == (2, 13 * 900)
    assert explained(made, batch_size=4).files_open == 4  # the empty one is never opened


def test_memory_adds_up():
    made = imagined([1000] * 20, 110_000)
    job = {"num_workers": 4, "world_size": 4, "local_world_size": 2}
    e = explained(made, job, batch_size=64)
    memory = e.memory
    parts = (
        memory.records_bytes, memory.order_bytes, memory.permutation_bytes, memory.index_bytes
    )  # fmt: skip
    assert memory.process_bytes == sum(parts)
    assert memory.machine_bytes == 8 * memory.process_bytes + memory.page_cache_bytes
    assert memory.page_cache_bytes == 32 * (
        157 * 110_000 + buffering.RUN
    )  # spans of 8 of 16 workers
    e = explained(made, job, batch_size=64, shuffle_buffer="all")
    assert e.memory.permutation_bytes == 8 * 20_000


def test_with_fewer_files_than_are_said_to_be_needed_shards_are_opened_again(
    packed: Packed,
) -> None:
    counts = [40] * 30
    folder = packed(counts)
    options = RequestedOptions(batch_size=16, unit=4, spans=8, shuffle_buffer=400).resolve(1.0)

    def opened(limit: int) -> tuple[int, Explanation]:
        storage = locate(folder)
        reader = Reader(storage, manifest.load(storage), limit=limit)
        misses, miss = [], reader._miss
        reader._miss = lambda number, place: misses.append(number) or miss(number, place)
        share = options.partition(options.epoch(reader.manifest.shard_records, 0))
        for rows in (got := Fetch(reader, share)):
            list(map(read, got.rows(rows)))
        return len(misses), explain_job(TrainingJob(reader.manifest, options, files_limit=limit))

    few, e = opened(8)
    assert "files_reopened" in codes(e)
    many, e = opened(30)
    assert "files_reopened" not in codes(e)
    assert few > 5 * many


@pytest.mark.parametrize(
    "job, match",
    [
        ({"num_workers": -1}, "num_workers is -1"),
        ({"num_workers": 2.5}, r"num_workers is 2\.5"),
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": True}, "world_size is True"),
        ({"world_size": 4, "local_world_size": 5}, "local_world_size is 5"),
    ],
)
def test_wrong_counts_are_told(job: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        explained(TINY, job, batch_size=256)
