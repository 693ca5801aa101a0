"""Advice: each rule names one thing, and its change mends it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.naive_order import cases
from support.small_datasets import make, simple
from support.trees import shardio_json
from support.tuning_jobs import (
    FEW,
    PHOTOS,
    SORTED,
    TAILS,
    TINY,
    GiB,
    codes,
    explained,
    imagined,
    walk_all,
)

from shardio.dataset.reader import Reader
from shardio.formats import manifest
from shardio.formats.manifest import Commit, Manifest
from shardio.order.options import RequestedOptions
from shardio.storage.location import locate
from shardio.tuning import simulate
from shardio.tuning.advice import sample_mixture
from shardio.tuning.cost import TrainingJob
from shardio.tuning.explain import Explanation, explain_job
from shardio.tuning.tune import recommend


@pytest.mark.parametrize("records", [1000, 30_000])
@pytest.mark.parametrize("buffer", [64, 900])
def test_nobody_with_nodes_is_told_to_shuffle_all(records: int, buffer: int):
    options = {"shuffle": False, "source": "folder"}  # of the pack: in class order
    made = imagined([records // 40] * 40, classes=("cat",) * 50, options=options)
    given = {"batch_size": 64, "shuffle_buffer": buffer, "nodes": 2}
    e = explained(made, {"world_size": 16, "local_world_size": 8}, **given)
    assert e.warnings
    for advice in e.warnings:
        assert "all" not in advice.change.values()
        if not {"num_workers", "world_size"} & advice.change.keys():
            explained(made, {"world_size": 16, "local_world_size": 8}, **(given | advice.change))


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
    e = explained(made, job | memory, batch_size=128, tail=tail, **given)
    assert codes(e) == [] and str(e).endswith("\n\nno warnings")


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
    "buffer_memory windows of a store": (
        PHOTOS,
        {"is_network": True, "is_remote": True, "num_workers": 8, "available_bytes": 32 * GiB},
        {"batch_size": 256, "shuffle_buffer": "14GiB", "spans": 64},
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
    before = explained(made, job, **given)
    assert codes(before) == [code]
    [advice] = before.warnings
    assert advice.mend in str(before).replace("\n      ", " ")
    if not advice.change:
        assert code == "files_reopened" and "ulimit" in advice.mend
        return
    after = changed(made, job, given, advice.change)
    assert code not in codes(after)


@pytest.mark.parametrize(("buffer", "expected"), [("12GiB", []), ("13GiB", ["buffer_memory"])])
def test_windows_of_a_store_may_take_half_of_the_memory(buffer: str, expected: list[str]) -> None:
    job = {"is_network": True, "is_remote": True, "num_workers": 8, "available_bytes": 32 * GiB}
    assert codes(explained(PHOTOS, job, batch_size=256, shuffle_buffer=buffer)) == expected


def test_shared_spans_by_url_ask_for_other_spans_and_not_for_fewer_workers() -> None:
    job = {"is_network": True, "is_remote": True, "world_size": 8, "num_workers": 9}
    e = explained(PHOTOS, job, batch_size=256, nodes=2)
    assert codes(e)[:1] == ["shared_spans"] and "few_spans" not in codes(e)
    assert e.warnings[0].change == {"spans": 576}
    assert e.warnings[0].mend.startswith("order=shardio.Order(spans=576, nodes=2),")
    assert f"{PHOTOS.records:,} requests an epoch, instead of" in e.warnings[0].what
    large = imagined([1000] * 8, 10_000_000)  # each is a range or two anyway
    assert "shared_spans" not in codes(explained(large, job, batch_size=8, shuffle_buffer=800))


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
    return explained(made, job, **given)


def test_packs_that_cannot_be_mended_by_options_are_to_be_packed_again():
    large = imagined([300_000_000] * 2)
    job = {"num_workers": 8, "available_bytes": 32 * GiB}
    assert codes(explained(large, job, batch_size=256)) == ["index_memory"]
    few = imagined([20_000] * 4, 1000)
    e = explained(few, {"num_workers": 8, "is_network": True}, batch_size=256)
    assert codes(e) == ["few_shards"]
    assert codes(explained(few, {"num_workers": 8}, batch_size=256)) == []  # local: no matter
    random = explained(imagined([100] * 1000), {}, batch_size=256, shuffle_buffer="all")
    assert codes(random) == ["files_reopened"]
    for e in (explained(large, job, batch_size=256), random):
        assert e.warnings[0].change == {} and "--shard-size" in e.warnings[0].mend


def test_many_small_appends_are_told():
    commit = Commit("0" * 16, "", "append", {})
    large = imagined([1000] * 8 + [10] * 40)
    usual = int(large.shard_sizes[0])
    for count, said in ((40, ["small_shards"]), (20, [])):
        made = imagined([1000] * 8 + [10] * count)
        grown = replace(made, commit=commit, options={"shard_size": usual})
        found = explained(grown, {}, batch_size=8)
        assert [code for code in codes(found) if code == "small_shards"] == said
    packed = replace(large, options={"shard_size": usual})
    assert "small_shards" not in codes(explained(packed, {}, batch_size=8))


def test_an_order_that_takes_more_memory_than_there_is():
    made = imagined([10_000] * 100_000)
    job = {"available_bytes": 8 * GiB, "num_workers": 8}
    e = explained(made, job, batch_size=256, shuffle_buffer="all")
    assert codes(e) == ["buffer_memory", "files_reopened"]
    assert "59.6 GiB in the processes" in e.warnings[0].what
    assert codes(changed(made, job, {"batch_size": 256}, e.warnings[0].change)) == []


def test_no_records_is_all_there_is_to_say():
    for made in (imagined([]), imagined([0, 0])):
        e = explained(made, {"num_workers": 2}, batch_size=8)
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
        e = explained(made, job, **given)
        change = next((advice.change for advice in e.warnings if advice.change), None)
        if change is None:
            return
        job, given = merged(job, given, change)
    raise AssertionError(codes(e))


def test_the_classes_of_a_batch_are_about_those_it_will_have():
    counts, classes = [900, 1100, 1000, 1000], 40
    made = imagined(counts, classes=[str(i) for i in range(classes)], options={"shuffle": False})
    labels = np.arange(4000) // 100
    options = RequestedOptions(batch_size=64, shuffle_buffer=400).resolve(1.0)
    e = explain_job(TrainingJob(made, options, available_bytes=GiB))
    advice = next(advice for advice in e.warnings if advice.code == "class_order")
    assert advice.change == {"shuffle_buffer": "all"}
    starts = np.cumsum(counts) - counts
    found = walk_all(made, options, 1, 1).rows[0, 0]
    numbers = np.array([starts[shard] + record for shard, record in found])
    batches = labels[numbers[: len(numbers) // 64 * 64].reshape(-1, 64)]
    actual = np.mean([len(set(batch)) for batch in batches.tolist()])
    said, alike, looked = sample_mixture(options.epoch(made.shard_records, 0), classes, 64)
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
        assert (
            "class_order" not in codes(explained(made, batch_size=256, **given))
        ) == row.mixes, row
    even = [row for row in found.rows if row.classes > 9.99 and row.shuffle_buffer is not None]
    assert even and not even[-1].mixes
    given = {"unit": even[-1].unit, "spans": spans}
    e = explained(made, batch_size=256, shuffle_buffer=even[-1].shuffle_buffer, **given)
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
    assert "class_order" not in codes(explained(made, {}, **({"batch_size": 16} | given)))
    assert "class_order" in codes(explained(made, {}, batch_size=16, shuffle_buffer=600))


def test_a_pack_in_class_order_that_is_read_in_that_order_is_no_training_set() -> None:
    e = explained(SORTED, {}, batch_size=256, shuffle_buffer=64)
    [advice] = [one for one in e.warnings if one.code == "class_order"]
    assert "is read in that order" in advice.what
    assert advice.mend.endswith('or shuffle_buffer="all"; for evaluation, shuffle=False')
    assert codes(explained(SORTED, {}, batch_size=256, shuffle=False, tail="exact")) == []


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

    assert codes(explained(TINY, {"labels": labels}, batch_size=256)) == []


def test_of_a_subset_nobody_says_that_it_is_in_class_order():
    half = {"shard_records": SORTED.shard_records // 2}
    assert codes(explained(SORTED, half, batch_size=256)) == []
    assert codes(explained(SORTED, {"shard_records": SORTED.shard_records}, batch_size=256))
