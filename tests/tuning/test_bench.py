"""What `bench` measures, which rows, and what it recommends."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from support import small_datasets
from support.benches import BUSY, DATALOADER, OPTIONS, plan
from support.trees import shardio

from shardio import machine
from shardio.dataset import sequence
from shardio.errors import OptionError, StorageError
from shardio.storage.options import Storage
from shardio.tuning import bench_process
from shardio.tuning.bench import (
    LEAST_S,
    QUICK_S,
    Bench,
    bench,
    conclude,
    files_of,
    read_first,
    request_of,
    run_ways,
    ways_to_try,
    why_not_cold,
)
from shardio.tuning.bench_process import FailedError
from shardio.tuning.bench_row import LIMITS, Row


@pytest.fixture(scope="module")
def found(photos: Path) -> tuple[Bench, list[tuple[int, int]], list[int]]:
    """All of it, in small; what `progress` was told; and the processes that were left."""
    told: list[tuple[int, int]] = []
    before = set(machine.family(os.getpid()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardio.tuning.bench.ROUNDS", 2)
        made = bench(
            photos,
            batch_size=8,
            workers=[1, 0, 1],
            threads=[1],
            seconds=0.1,
            progress=lambda done, total: told.append((done, total)),
        )
    left = [pid for pid in machine.family(os.getpid()) if pid not in before]
    return made, told, left


def way(name: str, decodes: bool = True, cold: bool = False) -> tuple[Any, ...]:
    loader, workers, *_ = name.split()
    return loader, int(workers), 1, decodes, cold


def ways_of(rows: Any) -> list[tuple[Any, ...]]:
    return [(row.loader, row.workers, row.threads, row.decodes, row.cold) for row in rows]


# --- a whole bench --------------------------------------------------------------------------------


def test_every_way_is_measured_and_judged(found: Any, photos: Path) -> None:
    made = found[0]
    warm = [way(f"{loader} {n}") for loader in ("DataLoader", "ShardLoader") for n in (0, 1)]
    fullest = [way("DataLoader 1"), way("ShardLoader 1")]
    bare = [(*one[:3], False, False) for one in fullest]
    cold = [(*one[:4], True) for one in (*fullest, *bare)]
    if made.cold:
        assert made.cold.startswith("Cold is not possible here: ") and made.cold in made.notes
        cold = []
    assert ways_of(made.rows) == [*warm, *bare, *cold]
    for row in made.rows:
        assert row.error is None
        assert len(row.rates) == 2 and row.images_per_s == median(row.rates) > 0
        assert row.mb_per_s == pytest.approx(row.images_per_s * made.record_bytes / 1e6)
        assert row.pass_batches == 12 and row.first_batch_s > 0
        assert row.limit in LIMITS and row.short and row.why
        if sys.platform == "linux":
            assert row.cpu_ms is not None and row.cores_busy is not None
            # torch alone is more than 50 MB, and the processes do not count what they share twice.
            assert row.pss_bytes is None or 50 << 20 < row.pss_bytes < 2 << 30
    assert (made.records, made.measured_records, made.batch_size) == (96, 96, 8)
    assert made.size == 16  # images below 64 pixels keep their size
    assert made.fields == ("image", "label")
    assert made.best in made.rows and (made.best.decodes, made.best.cold) == (True, False)


def test_progress_goes_from_nothing_to_all_and_nothing_is_left(found: Any) -> None:
    made, told, left = found
    assert told[0][0] == 0
    assert [done for done, _ in told[1:]] == list(range(told[-1][1] + 1))
    assert told[-1] == (2 * len(made.rows),) * 2
    assert left == []


def test_the_text_has_every_row_and_ends_with_the_call(found: Any) -> None:
    made = found[0]
    said = str(made)
    assert made.seconds > 0 and f"; took {made.seconds:,.1f} s\n" in said
    assert said.endswith(f"\n\n{made.call}")
    lines = said.splitlines()
    for row in made.rows:
        assert any(line[2:].startswith(f"{row.name} ") and row.short in line for line in lines)
    assert sum(line.startswith("> ") for line in lines) == 1
    assert lines[0].startswith("96 records of ") and "Decoded, RandomResizedCrop(16), warm:" in said
    assert json.loads(json.dumps(made.as_dict()))["rows"][0]["name"] == "DataLoader 0"
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize("best", [DATALOADER, Row("ShardLoader", 0, 2, True, False)])
def test_the_call_runs_as_it_stands(found: Any, best: Row) -> None:
    made = replace(found[0], rows=(replace(best, rates=(9.0,), images_per_s=9.0),))
    made = conclude(made, [])
    assert made.best is not None and made.best.way == best.way
    names: dict[str, Any] = {}
    exec(made.call, names)
    loader = names["loader"]
    assert type(loader).__name__ == best.loader
    assert loader.num_workers == best.workers
    names["train"].set_epoch(3)
    images, labels = next(iter(loader))
    assert images.shape == (8, 3, 16, 16) and labels.shape == (8,)
    if best.loader == "ShardLoader":
        assert loader.threads == best.threads
        loader.close()


def test_options_are_refused_by_name(photos: Path, packed: Callable[..., Path]) -> None:
    for options, message in (
        ({"loader": "all"}, "loader is 'all': expected both, dataloader, shardloader"),
        ({"seconds": 0}, "seconds is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"size": 0}, "size is 0"),
        ({"workers": []}, "workers is empty"),
        ({"threads": [0]}, "threads is 0"),
    ):
        with pytest.raises(OptionError, match=message):
            bench(photos, **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="there are no records to measure"):
        bench(packed([0]))


# --- which rows -----------------------------------------------------------------------------------


def concluded(*rows: Row, **changes: Any) -> Bench:
    return conclude(replace(plan(), rows=rows, **changes), [])


def names(rows: list[Row]) -> list[str]:
    return [row.name for row in rows]


def test_threads_fill_the_cores_that_workers_leave() -> None:
    ways = ways_to_try(plan(), None, None, "shardloader")
    warm = [one for one in ways if one.decodes and not one.cold]
    assert names(warm) == [
        *("ShardLoader 0 x 8", "ShardLoader 1 x 8", "ShardLoader 4 x 2", "ShardLoader 8 x 1"),
    ]
    others = [one for one in ways if one not in warm]
    assert names(others) == ["ShardLoader 8 x 1"] * 3
    given = ways_to_try(plan(), [2, 1], [3], "both")
    assert names(given[:4]) == [
        *("DataLoader 1", "DataLoader 2", "ShardLoader 1 x 3", "ShardLoader 2 x 3"),
    ]


def test_what_does_not_decode_and_what_is_cold_use_no_more_than_the_cores() -> None:
    ways = ways_to_try(plan(cores=2.5), [0, 1, 2, 16], None, "dataloader")
    assert [one.workers for one in ways if not one.decodes or one.cold] == [2, 2, 2]


def test_quick_and_datasets_without_images_have_fewer_rows() -> None:
    quick = ways_to_try(plan(quick=True), None, None, "both")
    assert names(quick) == [
        *("DataLoader 8", "ShardLoader 1 x 8", "ShardLoader 8 x 1"),
        *("DataLoader 8", "ShardLoader 8 x 1", "ShardLoader 8 x 1", "ShardLoader 8 x 1"),
    ]
    ways = ways_to_try(plan(fields=None), [1], None, "dataloader")
    assert ways_of(ways) == [way("DataLoader 1", False), way("DataLoader 1", False, True)]


class Answers:
    """A host that has all answers ready."""

    def __init__(self, storage: Storage | None = None) -> None:
        self.asked: list[dict[str, Any]] = []

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.asked.append(request)
        if request["workers"] == 3:
            raise FailedError("no answer")
        return {"rates": [1.0]}


def run_all(
    made: Bench, ways: list[Row], host: Any, seconds: float, began: float | None = None
) -> dict[Row, list[dict[str, Any]]]:
    began = time.monotonic() if began is None else began
    return run_ways(made, ways, host, ["x"], seconds, began, lambda *_: None)


def test_warm_rows_take_turns_and_cold_ones_come_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    monkeypatch.setattr(machine, "evict", lambda files: order.append("evict") or 0.0)
    host, made = Answers(), plan()
    ways = [replace(DATALOADER, workers=w, cold=cold) for cold in (True, False) for w in (1, 3)]
    runs = run_all(made, ways, host, 6.0)
    asked = [(one["workers"], one["cold"]) for one in host.asked]
    assert asked == [(1, False), (3, False)] * 3 + [(1, True), (3, True)] * 3
    assert len(order) == 6
    assert {one["seconds"] for one in host.asked} == {2.0}
    assert runs[ways[0]] == [{"rates": [1.0]}] * 3 and runs[ways[1]] == [{"error": "no answer"}] * 3


def test_quick_leaves_out_what_does_not_fit_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    host, made = Answers(), plan(quick=True)
    ways = [replace(DATALOADER, workers=w) for w in (1, 2, 4)]
    runs = run_all(made, ways, host, 1.5, time.monotonic() - QUICK_S)
    assert [len(runs[one]) for one in ways] == [1, 0, 0]
    rows = [replace(ways[0], rates=(1.0,), images_per_s=1.0)]
    notes = conclude(replace(made, rows=tuple(rows)), ["DataLoader 2"]).notes
    assert notes[-1] == "For want of time these were left out: DataLoader 2."
    assert replace(ways[2], decodes=False, cold=True).full_name == "DataLoader 4, bytes, cold"


def test_quick_leaves_out_nothing_because_it_was_asked_to_be_short() -> None:
    host, made = Answers(), plan(quick=True)
    ways = [replace(DATALOADER, workers=w) for w in (1, 2, 4)]
    short = LEAST_S / 4
    runs = run_all(made, ways, host, short)
    assert [len(runs[one]) for one in ways] == [1, 1, 1]
    assert {one["seconds"] for one in host.asked} == {short}


def test_a_cold_repeat_whose_pages_stay_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "evict", lambda files: 0.5)
    ways = [replace(DATALOADER, cold=True)]
    runs = run_all(plan(), ways, Answers(), 1.0)
    assert "stay in memory" in runs[ways[0]][0]["error"]


# --- what is read ---------------------------------------------------------------------------------


def test_of_a_large_dataset_the_first_records_are_measured(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = sequence.open(photos, decode=None)
    monkeypatch.setattr("shardio.tuning.bench.MOST_BYTES", int(10.5 * opened.manifest.mean_bytes))
    assert read_first(opened, 8, False) == 10
    assert read_first(opened, 8, False, 20) == 20  # as many as before
    monkeypatch.setattr("shardio.tuning.bench.MOST_BYTES", 1 << 40)
    monkeypatch.setattr("shardio.tuning.bench.QUICK_READ_S", 0.0)  # no time, and so the least
    assert read_first(opened, 8, True) == 64
    assert read_first(opened, 8, False) == 96
    made = replace(plan(), path=str(photos), records=96, measured_records=50, size=16)
    data = bench_process._dataset(request_of(made, "measure", DATALOADER, storage=OPTIONS))
    assert data.records == 50 and data.shuffle_buffer == 12  # no window holds all of a part
    whole = replace(made, measured_records=96)
    assert (
        bench_process._dataset(request_of(whole, "measure", DATALOADER, storage=OPTIONS)).records
        == 96
    )


def test_the_files_of_the_first_records(photos: Path, tmp_path: Path) -> None:
    opened = sequence.open(photos, decode=None)
    shards = [str(path) for path in small_datasets.shard_files(photos)]
    assert files_of(opened, photos, 1) == shards[:1]
    assert files_of(opened, photos, 40) == shards[:1]
    assert files_of(opened, photos, 41) == shards
    folder = tmp_path / "folder"
    for name in ("a/x.jpg", "b/y.jpg", "b/z.jpg"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(small_datasets.jpeg(1))
    shardio("index", folder)
    opened = sequence.open(folder, decode=None)
    expected = [os.path.join(folder, os.fsdecode(key)) for key in opened.keys()[:2]]
    assert files_of(opened, folder, 2) == expected


def test_cold_is_refused_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * 100_000)
    for answer, reason in ((0.0, ""), (0.7, "70% of the files' pages stay"), (None, "cannot drop")):
        monkeypatch.setattr(machine, "evict", lambda files, answer=answer: answer)
        assert reason in why_not_cold([str(path)])
        assert bool(why_not_cold([str(path)])) == bool(reason)
    assert "cannot drop" in why_not_cold([])  # no files of this machine
    monkeypatch.undo()
    assert "No such file" in why_not_cold([str(tmp_path / "y")])


# --- what limits a row ----------------------------------------------------------------------------


def test_what_was_measured_too_early_by_url_is_told() -> None:
    row = replace(BUSY, remote=True, rates=(1000.0,), starting=True)
    made = concluded(row)
    notes = " ".join(made.notes)
    assert "DataLoader 2, decoded, by URL" in notes and "with more --seconds" in notes
    made = concluded(replace(row, starting=False))
    assert "with more --seconds" not in " ".join(made.notes)


# --- what is recommended --------------------------------------------------------------------------


def rated(rate: float, **changes: Any) -> Row:
    return replace(BUSY, images_per_s=rate, rates=(rate,), **changes)


def test_of_equal_rows_the_one_with_the_fewest_threads_is_recommended() -> None:
    rows = [rated(100.0, workers=1), rated(970.0, workers=4), rated(1000.0, workers=8)]
    made = concluded(*rows)
    assert made.best is rows[1]
    assert "within 5% of the fastest it has the fewest threads" in made.notes[0]
    fast = rated(1100.0, loader="ShardLoader", workers=8)
    made = concluded(*rows, fast)
    assert made.best is fast
    assert "this one 1.10 times as many" in made.notes[1]
    assert made.call.splitlines()[-1] == "loader = ShardLoader(train, num_workers=8, threads=1)"


@pytest.mark.parametrize("held_up", [0, 1])
def test_a_rate_beside_other_programs_is_compared_by_cpu_time(held_up: int) -> None:
    rows = [rated(100.0, cpu_ms=1.0), rated(400.0, loader="ShardLoader", cpu_ms=0.5)]
    notes = " ".join(concluded(*rows).notes)
    assert "this one 4.00 times as many" in notes and "more than 400 images/s waits" in notes
    rows[held_up] = replace(rows[held_up], limit="load")
    notes = " ".join(concluded(*rows).notes)
    assert "times as many" not in notes and "1 ms, 2.00 times this one's" in notes
    assert ("more than 400 images/s waits" in notes) is (held_up == 0)


def test_neither_cold_rows_nor_bytes_are_recommended_where_images_are() -> None:
    rows = (rated(10.0), rated(99.0, cold=True), rated(999.0, decodes=False))
    made = concluded(*rows)
    assert made.best is rows[0]
    assert any(note.startswith("Cold, DataLoader 2 gives 99 images/s") for note in made.notes)
    assert not any("the start" in note for note in made.notes)
    short = (rows[0], replace(rows[1], pass_batches=1))
    notes = " ".join(concluded(*short).notes)
    assert "warm. Most of it is the start: a pass has 1 batch." in notes
    made = concluded(*rows[2:], fields=None)
    assert made.best is rows[2]


def test_what_others_did_meanwhile_is_said() -> None:
    quiet = concluded(rated(9.0)).notes
    assert not any("Other programs" in note or "busy before" in note for note in quiet)
    rows = (rated(9.0, others_busy=3.0, limit="load", why="others"),)
    notes = " ".join(concluded(*rows, load_before=5.0).notes)
    assert "measure again when they are done" in notes
    assert "a load of 5.0 on 8 cores" in notes
    held_up = (rated(9.0), rated(1.0, loader="ShardLoader", limit="load"))
    best, *_ = concluded(*held_up).notes
    assert best.endswith("Rows that other programs held up may be faster: measure again.")
    assert "more than 15% of the CPUs during 1 of 1 rows" in notes


def about_gpu(rate: float, limit: str = "decoding", **changes: Any) -> list[str]:
    rows = (replace(BUSY, rates=(rate,), images_per_s=rate, limit=limit, why="so"),)
    return [
        note
        for note in concluded(*rows, cores=4.0, **changes).notes
        if note.startswith(f"{rate:,.0f} images/s by 4 cores")
    ]


def test_where_the_cores_decode_too_little_the_gpu_is_named() -> None:
    (few,) = about_gpu(2356.0)
    assert 'a model that takes more wants decode="cuda"' in few
    assert "3,000 to 3,700 images/s beside ResNet-50" in few
    (enough,) = about_gpu(3000.0)
    assert "decode by the cores" in enough and "cuda" not in enough


@pytest.mark.parametrize(
    "changes",
    [
        {"limit": "storage"},  # which a GPU waits for, too
        {"jpegs": False},
        {"size": None, "raw": True},
        {"record_bytes": 3e3},  # as CIFAR's: nobody measured these on a GPU
    ],
)
def test_of_the_gpu_nothing_is_said_where_it_would_not_help(changes: dict[str, Any]) -> None:
    assert about_gpu(2356.0, **changes) == []


def test_pixels_are_read_as_they_are() -> None:
    made = replace(plan(), raw=True, size=None, stores=('root="x"',), rows=(rated(9.0),))
    made = conclude(made, [])
    assert 'decode="numpy"' in made.call and "Crop" not in made.call
    assert 'storage=Storage(root="x"),' in made.call
    assert "Pixels, warm:" in str(made)


# --- processes ------------------------------------------------------------------------------------


def test_where_every_row_fails_the_error_says_why(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Answers):
        def __enter__(self) -> "Failing":
            return self

        def __exit__(self, *_: object) -> None: ...

        def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
            raise FailedError("no memory")

    monkeypatch.setattr("shardio.tuning.bench.Host", Failing)
    with pytest.raises(StorageError, match="DataLoader 1: no memory"):
        bench(photos, workers=[1], size=16)
