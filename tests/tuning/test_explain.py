"""explain: what it says of a job is what Partition and Fetch do; its advice mends what it names."""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.naive_order import cases, side_by_side
from support.small_datasets import grouped, make, simple
from support.trees import shardio_json

from shardio.cli import main as cli
from shardio.dataset import buffering
from shardio.dataset.fetch import Fetch
from shardio.dataset.reader import Reader, read
from shardio.errors import OptionError
from shardio.formats import manifest
from shardio.formats.manifest import Manifest
from shardio.formats.sample import Schema
from shardio.order.options import RequestedOptions
from shardio.storage.location import locate
from shardio.tuning import cost, simulate
from shardio.tuning.advice import mixture_seen
from shardio.tuning.cost import TrainingJob, free_consumers
from shardio.tuning.explain import Explanation, explain, explain_job
from shardio.tuning.tune import recommend

Packed = Callable[..., Path]
GiB = 1 << 30
TAILS = ("pad", "drop", "exact")


def imagined(counts: list[int], size: int | list[int] = 1000, **header: Any) -> Manifest:
    """The manifest of a dataset that nobody packed: shards of these records, of `size` bytes."""
    records = np.array(counts, np.int64)
    values: dict[str, Any] = {"classes": ("cat", "dog"), "options": {"shuffle": True}} | header
    return Manifest(
        dataset_id=bytes(16),
        format="record",
        schema=Schema([("__key__", "key"), ("image", "image"), ("label", "int")]),
        library="0",
        blob_bytes=0,
        shard_records=records,
        shard_sizes=records * np.array(size, np.int64),
        shard_sha256=np.zeros((len(counts), 32), np.uint8),
        shard_index=np.zeros(len(counts), np.uint64),
        **values,
    )


def told(made: Manifest, job: dict[str, Any] | None = None, **given: Any) -> Explanation:
    """Of a machine with much memory; `job`: keywords of TrainingJob."""
    mean = max(1.0, made.size / max(1, made.records))
    job = {"available_bytes": 1 << 50, "files_limit": 256} | (job or {})
    return explain_job(TrainingJob(made, RequestedOptions(**given).resolve(mean), **job))


def codes(e: Explanation) -> list[str]:
    return [advice.code for advice in e.warnings]


# --- the counts -------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What iterating over the shares of all consumers shows; by consumer (rank, worker)."""

    steps: set[int]
    batches: dict[tuple[int, int], int]
    rows: dict[tuple[int, int], list[tuple[int, int]]]  # shard and record of each, repeats too
    spans: dict[int, set[tuple[int, int]]]  # who touches each
    sizes: list[int]  # rows of each batch


def seen(made: Manifest, options: Any, ranks: int, workers: int) -> Seen:
    epoch = options.epoch(made.shard_records, 0)
    found = Seen(set(), {}, {}, defaultdict(set), [])
    walks: dict[int, Any] = {}
    for rank in range(ranks):
        for worker in range(workers):
            share = options.partition(
                epoch, rank=rank, world_size=ranks, worker=worker, num_workers=workers
            )
            rows: list[tuple[int, int]] = []
            batches = list(share)
            for batch in batches:
                before = len(rows)
                for span, first, count in batch.pieces:
                    found.spans[span].add((rank, worker))
                    walk = walks.setdefault(span, epoch.span_order(span))
                    walk.seek(first)
                    located = epoch.locate(epoch.position(span, walk.take(count)))
                    rows += zip(*(part.tolist() for part in located), strict=True)
                located = epoch.locate(batch.repeats)
                rows += zip(*(part.tolist() for part in located), strict=True)
                found.sizes.append(len(rows) - before)
            found.steps.add(share.steps)
            found.batches[rank, worker] = len(batches)
            found.rows[rank, worker] = rows
    return found


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
    found = seen(made, options, ranks, max(1, workers))
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
    e = told(made, {"shard_records": np.array([7, 0, 3])}, batch_size=4)
    assert (e.records, e.shards, e.steps, e.last_batch_records) == (10, 2, 3, 2)
    assert (e.dataset_bytes, e.worker.bytes[1]) == (160, 160)


@pytest.mark.parametrize("buffer", [300, "all"])
@pytest.mark.parametrize("workers, ranks", [(1, 1), (4, 2), (8, 8)])
def test_estimates_are_about_what_counting_gives(
    buffer: Any, workers: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = imagined([250] * 200)
    job = {"num_workers": workers, "world_size": ranks}
    exact = told(made, job, batch_size=64, shuffle_buffer=buffer)
    monkeypatch.setattr(cost, "COUNTED", 0)
    about = told(made, job, batch_size=64, shuffle_buffer=buffer)
    assert exact.worker.is_exact and not about.worker.is_exact
    assert "about" in str(about) and "about" not in str(exact)
    for name in ("records", "bytes", "shards"):
        expected = getattr(exact.worker, name)[1]
        assert getattr(about.worker, name)[1] == pytest.approx(expected, rel=0.25)
    assert about.worker.sharers == exact.worker.sharers
    assert (about.steps, about.repeated_records) == (exact.steps, exact.repeated_records)


def test_a_billion_records_are_not_counted_one_by_one():
    made = imagined([10_000] * 100_000)
    e = told(made, {"num_workers": 8, "world_size": 8, "local_world_size": 8}, batch_size=256)
    assert not e.worker.is_exact and e.steps == 488_282
    assert e.worker.bytes[1] == pytest.approx(1e12 / 64, rel=0.01)
    assert codes(e) == []


def test_the_law_holds_for_the_ranks_that_are_named_and_no_others():
    made = imagined([50, 31, 40])
    e = told(made, {"world_size": 2}, batch_size=12, unit=3, spans=5)
    assert e.law_world_sizes == (1, 2, 4, 8)
    total = 24

    def flat(ranks: int) -> list[tuple[int, int, int]]:
        requested = RequestedOptions(batch_size=total // ranks, unit=3, spans=5)
        chosen = requested.resolve(1.0)
        epoch = chosen.epoch(made.shard_records, 0)
        shares = [list(chosen.partition(epoch, rank=r, world_size=ranks)) for r in range(ranks)]
        steps = side_by_side(shares, total // ranks // 3, 5)
        return [piece for step in steps for batch in step for piece in batch.pieces]

    for ranks in range(1, total + 1):
        if ranks in e.law_world_sizes:
            assert flat(ranks) == flat(1)
        elif total % ranks == 0:
            with pytest.raises(OptionError, match="unit"):
                flat(ranks)
    assert told(made).law_world_sizes == ()


def test_nodes_with_shards_of_their_own_are_told():
    made = imagined([1000] * 40)
    job = {"num_workers": 1, "world_size": 16, "local_world_size": 8}
    e = told(made, job, batch_size=64, shuffle_buffer=4000, nodes=2)
    assert codes(e) == []
    assert "nodes 2 with shards of their own, 1/2 of the records" in " ".join(str(e).split())
    assert "a machine reads those of 1 node" in " ".join(str(e).split())
    assert e.state["nodes"] == 2
    plain = told(made, job, batch_size=64, shuffle_buffer=4000)
    assert "shards of their own" not in str(plain) and "nodes" not in plain.state


@pytest.mark.parametrize("records", [1000, 30_000])
@pytest.mark.parametrize("buffer", [64, 900])
def test_nobody_with_nodes_is_told_to_shuffle_all(records: int, buffer: int):
    options = {"shuffle": False, "source": "folder"}  # of the pack: in class order
    made = imagined([records // 40] * 40, classes=("cat",) * 50, options=options)
    given = {"batch_size": 64, "shuffle_buffer": buffer, "nodes": 2}
    e = told(made, {"world_size": 16, "local_world_size": 8}, **given)
    assert e.warnings
    for advice in e.warnings:
        assert "all" not in advice.change.values()
        if not {"num_workers", "world_size"} & advice.change.keys():
            told(made, {"world_size": 16, "local_world_size": 8}, **(given | advice.change))


@pytest.mark.parametrize(
    ("ranks", "batch_size", "change"), [(24, 64, {"nodes": 3}), (16, 128, {"batch_size": 64})]
)
def test_nodes_that_do_not_suit_the_job_are_told(
    ranks: int, batch_size: int, change: dict[str, int]
) -> None:
    made = imagined([1000] * 40)
    given = {"shuffle_buffer": 4000, "unit": 16}
    saved = RequestedOptions(batch_size=64, nodes=2, **given).resolve(1.0).state()
    options = RequestedOptions(batch_size=batch_size).resolve(1.0, saved)
    job = {"world_size": ranks, "local_world_size": 8, "available_bytes": 1 << 50}
    e = explain_job(TrainingJob(made, options, **job))
    [advice] = [one for one in e.warnings if one.code == "nodes_mixed"]
    assert "reads the shards of 2 of 2 nodes" in advice.what and advice.change == change
    mended = {"batch_size": batch_size, "nodes": 2, **given} | change
    mended_job = TrainingJob(made, RequestedOptions(**mended).resolve(1.0), **job)
    assert "nodes_mixed" not in codes(explain_job(mended_job))


@cases(60)
@given(st.integers(1, 24), st.integers(1, 6), st.integers(1, 24))
def test_nobody_shares_with_the_counts_that_are_named(spans, units, consumers):
    made = imagined([spans * consumers * units * 3])
    options = RequestedOptions(batch_size=units, unit=1, spans=spans, shuffle_buffer=2).resolve(1.0)
    touched = seen(made, options, 1, consumers).spans.values()
    assert (max(map(len, touched)) == 1) == (consumers in free_consumers(spans, units))


# --- where the bytes wait, and memory -----------------------------------------------------------


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
    for name, value in {"RUN": 1000, "LEAST_BLOCK": 100, "AHEAD": 8}.items():
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
    index = sum(s.sizes.nbytes + s._offsets.nbytes + s.key_hashes.nbytes for s in opened)
    assert 0.7 * index <= e.memory.index_bytes


def test_files_and_indexes_are_of_the_largest_shards_that_may_be_open():
    made = imagined([10, 500, 30, 400, 0])
    job = {"files_limit": 2}
    e = told(made, job, batch_size=4, spans=1, shuffle_buffer=2)
    assert (e.files_open, e.memory.index_bytes) == (2, 24 * 900)
    assert told(made, batch_size=4).files_open == 4  # the empty one is never opened


def test_memory_adds_up():
    made = imagined([1000] * 20, 110_000)
    job = {"num_workers": 4, "world_size": 4, "local_world_size": 2}
    e = told(made, job, batch_size=64)
    memory = e.memory
    parts = (
        memory.records_bytes, memory.order_bytes, memory.permutation_bytes, memory.index_bytes
    )  # fmt: skip
    assert memory.process_bytes == sum(parts)
    assert memory.machine_bytes == 8 * memory.process_bytes + memory.page_cache_bytes
    assert memory.page_cache_bytes == 32 * (
        157 * 110_000 + buffering.RUN
    )  # spans of 8 of 16 workers
    e = told(made, job, batch_size=64, shuffle_buffer="all")
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


# --- warnings -----------------------------------------------------------------------------------

PHOTOS = imagined([500] * 512, 110_000)  # a fifth of ImageNet
TINY = imagined([3000] * 17, 970)  # like CIFAR


@pytest.mark.parametrize("made", [PHOTOS, TINY], ids=["photos", "tiny"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    "job",
    [
        {},
        {"num_workers": 8},
        {"num_workers": 6},
        {"num_workers": 8, "world_size": 8},
        {"num_workers": 4, "world_size": 16, "local_world_size": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("given", [{}, {"shuffle": False}, {"unit": 8}], ids=str)
def test_a_good_set_up_has_no_warnings(
    made: Manifest, tail: Any, job: dict[str, int], given: dict[str, Any]
) -> None:
    memory = {"available_bytes": 8 * GiB}
    e = told(made, job | memory, batch_size=128, tail=tail, **given)
    assert codes(e) == [] and str(e).endswith("\n\nno warnings")


SORTED = imagined(
    [500] * 512,
    110_000,
    classes=[str(i) for i in range(1000)],
    options={"shuffle": False, "source": "imagefolder"},
)
FEW = imagined([30, 30])

# code: dataset, keywords of explain, options
WRONG: dict[str, tuple[Manifest, dict[str, Any], dict[str, Any]]] = {
    "no_batch_size": (TINY, {"num_workers": 8}, {}),
    "few_records": (FEW, {"world_size": 4}, {"batch_size": 32}),
    "few_records drop": (FEW, {"world_size": 4}, {"batch_size": 32, "tail": "drop"}),
    "few_records workers": (FEW, {"world_size": 4, "num_workers": 16}, {"batch_size": 1}),
    "few_records ranks": (FEW, {"world_size": 100}, {"batch_size": 1, "spans": 100}),
    "idle_workers": (FEW, {"num_workers": 8}, {"batch_size": 16}),
    "window_over_span": (TINY, {}, {"batch_size": 256, "shuffle_buffer": 50_900}),
    "window_under_unit": (TINY, {}, {"batch_size": 256, "shuffle_buffer": 1000}),
    "window_under_unit network": (
        imagined([100] * 10, 500_000),
        {"is_network": True},
        {"batch_size": 60, "shuffle_buffer": 300},
    ),
    "window_over_span network": (
        imagined([100] * 10, 500_000),
        {"is_network": True, "buffer_bytes": GiB},
        {"batch_size": 64, "unit": 1, "shuffle_buffer": 990},
    ),
    "window_under_unit of 1": (TINY, {}, {"batch_size": 256, "shuffle_buffer": 60}),
    "few_spans": (TINY, {"world_size": 8, "num_workers": 9}, {"batch_size": 32}),
    "class_order": (SORTED, {"num_workers": 8}, {"batch_size": 256}),
    "all_on_network": (
        PHOTOS,
        {"is_network": True, "buffer_bytes": 2 * GiB, "files_limit": 512},
        {"batch_size": 256, "shuffle_buffer": "all"},
    ),
    "shared_spans": (TINY, {"is_network": True, "num_workers": 12}, {"batch_size": 256}),
    "shared_spans many": (
        PHOTOS,
        {"is_network": True, "num_workers": 8, "world_size": 8, "buffer_bytes": 64 * GiB},
        {"batch_size": 256, "shuffle_buffer": 200_000},
    ),
    "windows_left_out": (PHOTOS, {"is_network": True, "num_workers": 8}, {"batch_size": 256}),
    "windows_left_out little": (
        PHOTOS,
        {"is_network": True, "num_workers": 8, "available_bytes": GiB, "files_limit": 512},
        {"batch_size": 256},
    ),
    "buffer_memory": (
        PHOTOS,
        {"available_bytes": 8 * GiB, "files_limit": 512},
        {"batch_size": 256, "shuffle_buffer": "20GiB"},
    ),
    "files_reopened": (TINY, {"files_limit": 8, "num_workers": 4}, {"batch_size": 256}),
    "files_reopened spans": (
        PHOTOS,
        {},
        {"batch_size": 256, "spans": 256, "shuffle_buffer": 10_000},
    ),
    "files_reopened window": (PHOTOS, {}, {"batch_size": 256, "shuffle_buffer": 200_000}),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_thing_to_change_is_named_alone_and_its_change_mends_it(name: str) -> None:
    made, job, given = WRONG[name]
    code = name.partition(" ")[0]
    before = told(made, job, **given)
    assert codes(before) == [code]
    [advice] = before.warnings
    assert advice.mend in str(before).replace("\n      ", " ")
    if not advice.change:
        assert code == "files_reopened" and "ulimit" in advice.mend
        return
    after = changed(made, job, given, advice.change)
    assert code not in codes(after)


def test_shared_spans_by_url_ask_for_other_spans_and_not_for_fewer_workers() -> None:
    job = {"is_network": True, "is_remote": True, "world_size": 8, "num_workers": 9}
    e = told(PHOTOS, job, batch_size=256, nodes=2)
    assert codes(e)[:1] == ["shared_spans"] and "few_spans" not in codes(e)
    assert e.warnings[0].change == {"spans": 576}
    assert e.warnings[0].mend.startswith("order=shardio.Order(spans=576, nodes=2),")
    assert f"{PHOTOS.records:,} requests an epoch, instead of" in e.warnings[0].what
    large = imagined([1000] * 8, 10_000_000)  # each is a range or two anyway
    assert "shared_spans" not in codes(told(large, job, batch_size=8, shuffle_buffer=800))


def merged(job: dict[str, Any], given: dict[str, Any], change: dict[str, Any]) -> Any:
    """Both with a change made; a unit that was not given follows batch_size."""
    job, given = dict(job), dict(given)
    for name, value in change.items():
        if name == "buffer_bytes":
            value = int(value.removesuffix("MiB")) << 20
        of_job = name in ("num_workers", "world_size", "buffer_bytes")
        (job if of_job else given)[name] = value
    return job, given


def changed(made: Manifest, job: dict[str, Any], given: dict[str, Any], change: Any) -> Explanation:
    job, given = merged(job, given, change)
    return told(made, job, **given)


def test_packs_that_cannot_be_mended_by_options_are_to_be_packed_again():
    large = imagined([30_000_000] * 2)
    job = {"num_workers": 8, "available_bytes": 32 * GiB}
    assert codes(told(large, job, batch_size=256)) == ["index_memory"]
    few = imagined([20_000] * 4, 1000)
    e = told(few, {"num_workers": 8, "is_network": True}, batch_size=256)
    assert codes(e) == ["few_shards"]
    assert codes(told(few, {"num_workers": 8}, batch_size=256)) == []  # local: no matter
    random = told(imagined([100] * 1000), {}, batch_size=256, shuffle_buffer="all")
    assert codes(random) == ["files_reopened"]
    for e in (told(large, job, batch_size=256), random):
        assert e.warnings[0].change == {} and "--shard-size" in e.warnings[0].mend


def test_an_order_that_takes_more_memory_than_there_is():
    made = imagined([10_000] * 100_000)
    job = {"available_bytes": 8 * GiB, "num_workers": 8}
    e = told(made, job, batch_size=256, shuffle_buffer="all")
    assert codes(e) == ["buffer_memory", "files_reopened"]
    assert "59.6 GiB in the processes" in e.warnings[0].what
    assert codes(changed(made, job, {"batch_size": 256}, e.warnings[0].change)) == []


def test_no_records_is_all_there_is_to_say():
    for made in (imagined([]), imagined([0, 0])):
        e = told(made, {"num_workers": 2}, batch_size=8)
        assert codes(e) == ["no_records"] and e.steps == 0
        assert "0 records in 0 shards" in str(e)


@cases(40)
@given(
    counts=st.lists(st.integers(0, 800), min_size=1, max_size=20),
    size=st.sampled_from([100, 10_000, 500_000]),
    batch=st.integers(1, 300) | st.none(),
    buffer=st.sampled_from([2, 30, 1000, 10_000, "all"]),
    ranks=st.sampled_from([1, 2, 3, 8, 40]),
    workers=st.sampled_from([0, 1, 2, 5, 8, 40]),
    network=st.booleans(),
    memory=st.sampled_from([1 << 26, 1 << 30, 1 << 40]),
    limit=st.sampled_from([16, 256]),
)
def test_making_the_changes_one_after_another_comes_to_an_end(
    counts, size, batch, buffer, ranks, workers, network, memory, limit
):
    made = imagined(counts, size)
    assume(made.records)
    given = {"batch_size": batch, "shuffle_buffer": buffer}
    job = {
        "num_workers": workers,
        "world_size": ranks,
        "is_network": network,
        "available_bytes": memory,
        "files_limit": limit,
    }
    for _ in range(30):
        e = told(made, job, **given)
        change = next((advice.change for advice in e.warnings if advice.change), None)
        if change is None:
            return
        job, given = merged(job, given, change)
    raise AssertionError(codes(e))


# --- class order --------------------------------------------------------------------------------


def test_the_classes_of_a_batch_are_about_those_it_will_have():
    counts, classes = [900, 1100, 1000, 1000], 40
    made = imagined(counts, classes=[str(i) for i in range(classes)], options={"shuffle": False})
    labels = np.arange(4000) // 100
    options = RequestedOptions(batch_size=64, shuffle_buffer=400).resolve(1.0)
    e = explain_job(TrainingJob(made, options, available_bytes=GiB))
    advice = next(advice for advice in e.warnings if advice.code == "class_order")
    assert advice.change == {"shuffle_buffer": "all"}
    starts = np.cumsum(counts) - counts
    found = seen(made, options, 1, 1).rows[0, 0]
    numbers = np.array([starts[shard] + record for shard, record in found])
    batches = labels[numbers[: len(numbers) // 64 * 64].reshape(-1, 64)]
    actual = np.mean([len(set(batch)) for batch in batches.tolist()])
    said, alike, looked = mixture_seen(options.epoch(made.shard_records, 0), classes, 64)
    assert said == pytest.approx(actual, rel=0.1)
    assert f"about {round(said, 1):g} classes" in advice.what
    each = [(batch[:, None] == batch).sum() - 64 for batch in batches]  # pairs, each twice
    assert alike / looked == pytest.approx(np.mean(each) / 2, rel=0.1)


@pytest.mark.parametrize("spans", [16, 64])
def test_explain_and_tune_agree_on_a_pack_in_class_order(
    spans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each batch has all classes, but in too equal parts."""
    monkeypatch.setattr(simulate, "PASSES", 1)
    counts, names = [1250] * 16, [str(i) for i in range(10)]
    made = imagined(counts, classes=names, options={"shuffle": False})
    labels = np.arange(20_000) // 2000
    found = recommend(counts, labels, batch_size=256, mean_bytes=1000, spans=spans, units=True)
    for row in found.rows:
        buffer = "all" if row.shuffle_buffer is None else row.shuffle_buffer
        given = {"shuffle_buffer": buffer, "unit": row.unit, "spans": spans}
        assert ("class_order" not in codes(told(made, batch_size=256, **given))) == row.mixes, row
    even = [row for row in found.rows if row.classes > 9.99 and row.shuffle_buffer is not None]
    assert even and not even[-1].mixes
    given = {"unit": even[-1].unit, "spans": spans}
    e = told(made, batch_size=256, shuffle_buffer=even[-1].shuffle_buffer, **given)
    assert "a batch has its classes in too equal parts" in str(e).replace("\n  ", "")


@pytest.mark.parametrize(
    "given",
    [
        {"shuffle_buffer": "all"},
        {"shuffle": False, "tail": "exact"},  # evaluation, in storage order
        {"tail": "exact"},
    ],
    ids=str,
)
def test_class_order_is_no_matter_where_it_is_mixed_or_wanted(given: dict[str, Any]) -> None:
    made = imagined([500] * 8, classes=["a", "b"], options={"shuffle": False})
    assert "class_order" not in codes(told(made, {}, **({"batch_size": 16} | given)))
    assert "class_order" in codes(told(made, {}, batch_size=16, shuffle_buffer=600))


def test_a_pack_in_class_order_that_is_read_in_that_order_is_no_training_set() -> None:
    e = told(SORTED, {}, batch_size=256, shuffle_buffer=64)
    [advice] = [one for one in e.warnings if one.code == "class_order"]
    assert "is read in that order" in advice.what
    assert advice.mend.endswith('or shuffle_buffer="all"; for evaluation, shuffle=False')
    assert codes(told(SORTED, {}, batch_size=256, shuffle=False, tail="exact")) == []


@pytest.mark.parametrize("kind, ordered", [("sorted", True), ("shuffled", False), ("one", False)])
def test_a_writers_dataset_is_judged_by_the_labels_of_few_shards(
    tmp_path: Path, kind: str, ordered: bool
) -> None:
    counts = [200] * 12
    noise = np.random.default_rng(0).integers(0, 12, 2400).tolist()
    label = {"sorted": lambda i: i // 200, "shuffled": lambda i: noise[i], "one": lambda i: 3}[kind]
    sample = simple(lambda i: b"x")
    folder = make(
        tmp_path / "data",
        counts,
        sample=lambda i: sample(i) | {"label": label(i)},
        classes=[str(i) for i in range(12)],
    )
    reader = Reader(locate(folder), manifest.load(locate(folder)))
    asked: list[int] = []

    def labels(number: int) -> Any:
        asked.append(number)
        return reader.shard(number).columns.get("label")

    options = RequestedOptions(batch_size=64, shuffle_buffer=300).resolve(1.0)
    e = explain_job(TrainingJob(reader.manifest, options, labels=labels, available_bytes=GiB))
    assert ("class_order" in codes(e)) == ordered
    assert 1 <= len(asked) <= 3
    said = shardio_json("explain", folder, "--batch-size", "64", "--shuffle-buffer", "300")
    assert ("class_order" in [w["code"] for w in said["warnings"]]) == ordered


def test_packs_that_say_they_were_shuffled_are_not_opened():
    def labels(number: int) -> Any:
        raise AssertionError

    assert codes(told(TINY, {"labels": labels}, batch_size=256)) == []


def test_of_a_subset_nobody_says_that_it_is_in_class_order():
    half = {"shard_records": SORTED.shard_records // 2}
    assert codes(told(SORTED, half, batch_size=256)) == []
    assert codes(told(SORTED, {"shard_records": SORTED.shard_records}, batch_size=256))


# --- what the user sees -------------------------------------------------------------------------

TEXT = """\
dataset      51,000 records in 17 shards, 47.2 MiB, 970 B each
readers      2 ranks (2 on a machine), 8 workers each
steps        100 a rank, batches of 256; 12 to 13 a worker
tail         pad: each record once an epoch, and 200 repeats
order        the same for any num_workers, and for 1, 2, 4, 8 or 16 ranks where
             batch_size x ranks is 512 and unit 32
buffer       10,000 records, 9.3 MiB: 157 in each of 64 spans of 768 to 800
unit         32, a divisor of batch_size; a batch mixes 8 spans
spans        8 a worker, each also read by 1 other (costs a network file system
             extra reads); with 1, 2, 4 or 8 workers in all none is shared
each worker  3,072 to 3,328 records, 2.8 to 3.1 MiB, from 3 to 4 shards
files        17 open at most, of 256 that a process may open
bytes wait   in each process, read in blocks
memory       at worst 3.6 MiB a process: records 2.2 MiB, order 314.9 KiB,
             indexes 1.2 MiB; 58.2 MiB a machine
state        shuffle_buffer=10000 seed=0 tail=pad canonical_workers=64 unit=32

no warnings"""


def test_it_reads_well():
    e = told(TINY, {"num_workers": 8, "world_size": 2}, batch_size=256)
    assert str(e) == TEXT


def test_the_default_of_a_small_dataset_is_read_whole_wherever_it_lies():
    """Nobody is warned of it on a network file system, nor of classes that it mixes."""
    options = RequestedOptions(batch_size=256).resolve(TINY.mean_bytes, records=TINY.records)
    for network, how in ((False, "announced"), (True, "read")):
        job = TrainingJob(TINY, options, num_workers=8, is_network=network, available_bytes=GiB)
        e = explain_job(job)
        text = " ".join(str(e).split())
        assert not codes(e)
        assert "a true permutation: all are read ahead, in storage order" in text
        assert f"in the page cache, all {how} before the first batch" in text


def test_warnings_are_numbered_each_with_its_change():
    e = told(FEW, {"num_workers": 8}, batch_size=16, shuffle_buffer=50)
    text = str(e).partition("\n\n")[2]
    assert text == (
        "2 warnings\n"
        "1. each rank has 4 steps for 8 workers: some get no batch\n"
        "   -> num_workers=4\n"
        "2. each span has a window of 1 record, less than the unit of 8 that a batch\n"
        "   takes from it: the same neighbours meet in every epoch\n"
        '   -> shuffle_buffer="all"; `shardio tune` finds the smallest that will do'
    )


def test_who_shares_spans_and_a_unit_that_was_given_are_told_plainly():
    def row(name: str, **job: Any) -> str:
        text = str(told(TINY, job, batch_size=256, unit=4))
        return " ".join(text.partition(f"\n{name} ")[2].split())

    assert row("unit").startswith("4, as given; a batch mixes 64 spans spans 64 a process, none")
    assert row("spans", num_workers=4).startswith(
        "64 a worker, each also read by 3 others (costs a network file system extra reads); with "
        "1 worker in all none is shared each"
    )
    assert "(more traffic, see below)" in row("spans", num_workers=4, is_network=True)


def test_accelerate_is_noted_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "accelerate", raising=False)
    assert told(TINY, {}, batch_size=256).notes == ()
    monkeypatch.setitem(sys.modules, "accelerate", sys)
    e = told(TINY, {}, batch_size=256)
    assert "prepare()" in str(e) and len(e.notes) == 1 and codes(e) == []


def test_the_names_of_the_json_do_not_change():
    found = told(TINY, {}, batch_size=256).as_dict()
    assert " ".join(found) == (
        "records shards dataset_bytes is_network batch_size state num_workers world_size "
        "local_world_size steps last_batch_records dropped_records repeated_records worker "
        "law_world_sizes free_consumers policy traffic files_open files_limit memory warnings notes"
    )
    assert " ".join(found["state"]) == "shuffle_buffer seed tail canonical_workers unit"
    assert " ".join(found["worker"]) == "is_exact steps records shards bytes spans sharers"
    assert " ".join(found["memory"]) == (
        "records_bytes order_bytes permutation_bytes index_bytes process_bytes page_cache_bytes "
        "machine_bytes available_bytes"
    )


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
        told(TINY, job, batch_size=256)


def test_a_unit_that_does_not_divide_the_batch_is_told():
    with pytest.raises(OptionError, match="does not divide batch_size 100"):
        told(TINY, {}, batch_size=100, unit=32)


def test_the_command_says_what_explain_says(
    packed: Packed, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = packed([300, 200, 100])
    job = ("explain", folder, "--batch-size", "16", "--workers", "2", "--world-size", "2")
    more = (
        "--shuffle-buffer",
        "200",
        "--unit",
        "4",
        "--tail",
        "drop",
        "--spans",
        "4",
        "--local-world-size",
        "1",
    )
    reader = Reader(locate(folder), manifest.load(locate(folder)))
    options = RequestedOptions(
        batch_size=16, shuffle_buffer=200, unit=4, tail="drop", spans=4
    ).resolve(reader.mean_bytes)
    asked = TrainingJob(reader.manifest, options, num_workers=2, world_size=2, local_world_size=1)
    e = explain_job(asked)

    def said(*arguments: Any, code: int = 0) -> str:
        assert cli.main([str(argument) for argument in arguments]) == code
        shown = capsys.readouterr()
        return shown.err if code else shown.out

    assert said(*job, *more) == f"{e}\n"
    found = json.loads(said(*job, *more, "--json"))
    found["memory"]["available_bytes"] = e.memory.available_bytes
    assert found == e.as_dict()
    assert said(*job, "--quiet") == ""
    assert said("explain", folder, "--quiet").startswith("1 warning\n1. without batch_size")
    assert "true permutation" in said("explain", folder, "--shuffle-buffer", "all")
    for wrong in ("--workers", "--world-size", "--batch-size"):
        assert "shardio: " in said("explain", folder, wrong, "-1", code=2)
    assert "16GB of" in said("explain", folder, "--shuffle-buffer", "16GB of", code=2)
    assert "tail is" in said("explain", folder, "--tail", "pat", code=2)


def test_a_dataset_explains_itself(tmp_path: Path) -> None:
    """It explains what it reads: its options, its subset, its ranks."""
    ShardDataset = pytest.importorskip("shardio").ShardDataset
    folder = make(tmp_path / "data", [40, 0, 60])
    dataset = ShardDataset(folder, batch_size=8, tail="drop", rank=1, world_size=2)
    whole = explain(dataset, num_workers=3)
    assert (whole.steps, whole.world_size, whole.num_workers) == (len(dataset), 2, 3)
    assert (whole.records, whole.state["tail"], whole.dropped_records) == (100, "drop", 4)
    part = explain(ShardDataset(folder, batch_size=8, where={"label": "cat"}))
    assert (part.records, part.steps, part.shards) == (34, 5, 2)
    assert "34 records in 2 shards" in str(part)


def test_a_path_is_explained_as_a_dataset_of_the_same_options(tmp_path: Path) -> None:
    ShardDataset = pytest.importorskip("shardio").ShardDataset
    folder = make(tmp_path / "data", [40, 0, 60])
    options: dict[str, Any] = {"batch_size": 8, "tail": "drop", "shuffle_buffer": 20, "unit": 4}
    there = explain(folder, num_workers=3, world_size=2, **grouped(options))
    with pytest.raises(OptionError, match=r"explain takes no unit: give order=shardio.Order"):
        explain(folder, **options)
    dataset = ShardDataset(folder, **grouped(options))
    here = explain(dataset, num_workers=3, world_size=2)
    memory = replace(there.memory, available_bytes=here.memory.available_bytes)
    assert replace(there, memory=memory) == here
    with pytest.raises(OptionError, match="explain: batch_size, tail with a ShardDataset"):
        explain(dataset, batch_size=8, tail="pad")
    mixture = ShardDataset.mix([dataset, dataset])
    with pytest.raises(OptionError, match=r"expected a ShardDataset.*each of its datasets"):
        explain(mixture)  # type: ignore[arg-type]
