"""What `bench` measures, what it says of it, and that nothing of it is left behind."""

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from support import LIMIT_S, small_datasets
from support.json_keys import check_keys
from support.trees import command, environment, shardio, shardio_json

from shardio import machine
from shardio.dataset import sequence
from shardio.errors import DecodeError, OptionError, StorageError
from shardio.storage.options import Storage
from shardio.tuning import bench_process
from shardio.tuning.bench import (
    LEAST_S,
    PARTS,
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
from shardio.tuning.bench_process import FailedError, Host
from shardio.tuning.bench_row import LIMITS, Row, judge

LINUX = sys.platform == "linux"
DATALOADER = Row("DataLoader", 2, 1, True, False)
MEMORY = 8 << 30
OPTIONS = bench_process.written(Storage())


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 JPEGs of 24 x 16 pixels."""
    folder = tmp_path_factory.mktemp("bench") / "photos"
    return small_datasets.make(folder, [40, 0, 56], image=small_datasets.jpeg)


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
        if LINUX:
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


def test_the_command_measures_what_has_no_images_and_draws_it(tmp_path: Path) -> None:
    texts = small_datasets.make(
        tmp_path / "texts",
        [50],
        fields=(("__key__", "key"), ("text", "str")),
        sample=lambda i: {"__key__": b"%d" % i, "text": "x" * i},
        classes=None,
    )
    options = ["--batch-size", "4", "--workers", "1", "--seconds", "0.1", "--quick"]
    picture = []
    if importlib.util.find_spec("matplotlib"):
        picture = ["--plot", str(tmp_path / "bench.html")]
    made = shardio_json("bench", texts, "--loader", "shardloader", *options, *picture)
    check_keys("bench", made)
    rows = made["rows"]
    assert {row["decodes"] for row in rows} == {False} and made["fields"] is None
    assert rows[0]["name"] == "ShardLoader 1 x 2" or machine.cores() != 2
    assert len(rows[0]["rates"]) == PARTS  # the one repeat shows its spread, too
    assert "transform" not in made["call"] and "fields" not in made["call"]
    assert made["seconds"] < 60 * len(rows)  # a minute for each it would be without --seconds
    if picture:
        page = (tmp_path / "bench.html").read_text()
        assert "records/s" in page and "ShardLoader 1 x" in page
        assert page.count('<tr class="best">') == 1 and page.count("<tr") == 1 + len(rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--workers", "2,x"), "expected numbers, like 1,2,4"), (("--plot", "a"), "ends in .png")],
)
def test_the_command_refuses_before_it_works(
    photos: Path, arguments: tuple[str, str], message: str
) -> None:
    assert message in shardio("bench", photos, *arguments, code=2).stderr


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


def plan(cores: float = 8.0, fields: Any = ("image",), quick: bool = False) -> Bench:
    return Bench(
        path="out/",
        root=None,
        records=1000,
        record_bytes=1e5,
        measured_records=1000,
        batch_size=64,
        size=224,
        raw=False,
        fields=fields,
        cores=cores,
        load_before=0.0,
        seconds=1.0,
        quick=quick,
        jpegs=True,
    )


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


def test_warm_rows_take_turns_and_cold_ones_come_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    monkeypatch.setattr(machine, "evict", lambda files: order.append("evict") or 0.0)
    host, made = Answers(), plan()
    ways = [replace(DATALOADER, workers=w, cold=cold) for cold in (True, False) for w in (1, 3)]
    runs = run_ways(made, ways, host, ["x"], 6.0, time.monotonic(), lambda *_: None)  # type: ignore[arg-type]
    asked = [(one["workers"], one["cold"]) for one in host.asked]
    assert asked == [(1, False), (3, False)] * 3 + [(1, True), (3, True)] * 3
    assert len(order) == 6
    assert {one["seconds"] for one in host.asked} == {2.0}
    assert runs[ways[0]] == [{"rates": [1.0]}] * 3 and runs[ways[1]] == [{"error": "no answer"}] * 3


def test_quick_leaves_out_what_does_not_fit_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    host, made = Answers(), plan(quick=True)
    ways = [replace(DATALOADER, workers=w) for w in (1, 2, 4)]
    began = time.monotonic() - QUICK_S
    runs = run_ways(made, ways, host, [], 1.5, began, lambda *_: None)  # type: ignore[arg-type]
    assert [len(runs[one]) for one in ways] == [1, 0, 0]
    rows = [replace(ways[0], rates=(1.0,), images_per_s=1.0)]
    notes = conclude(replace(made, rows=tuple(rows)), ["DataLoader 2"]).notes
    assert notes[-1] == "For want of time these were left out: DataLoader 2."
    assert replace(ways[2], decodes=False, cold=True).full_name == "DataLoader 4, bytes, cold"


def test_quick_leaves_out_nothing_because_it_was_asked_to_be_short() -> None:
    host, made = Answers(), plan(quick=True)
    ways = [replace(DATALOADER, workers=w) for w in (1, 2, 4)]
    short = LEAST_S / 4
    began = time.monotonic()
    runs = run_ways(made, ways, host, [], short, began, lambda *_: None)  # type: ignore[arg-type]
    assert [len(runs[one]) for one in ways] == [1, 1, 1]
    assert {one["seconds"] for one in host.asked} == {short}


def test_a_cold_repeat_whose_pages_stay_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "evict", lambda files: 0.5)
    ways = [replace(DATALOADER, cold=True)]
    runs = run_ways(plan(), ways, Answers(), ["x"], 1.0, 0.0, lambda *_: None)  # type: ignore[arg-type]
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


# --- one repeat -----------------------------------------------------------------------------------


def asked(photos: Path, **options: Any) -> dict[str, Any]:
    made = replace(plan(), path=str(photos), records=96, measured_records=96, batch_size=8, size=16)
    one = Row("DataLoader", 0, 1, options.pop("decodes", True), options.pop("cold", False))
    request = request_of(made, "measure", one, seconds=0.0, limit_s=60.0, parts=1)
    return request | {"storage": OPTIONS} | options


def test_a_cold_repeat_is_one_pass(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    touch = bench_process._touch
    monkeypatch.setattr(bench_process, "_touch", lambda batch: batches.append(1) or touch(batch))
    found = bench_process.measure(asked(photos, cold=True, seconds=60.0))
    assert len(batches) == 12 and len(found["rates"]) == 1
    batches.clear()
    bench_process.measure(
        asked(photos, cold=False, seconds=60.0, limit_s=0.0)
    )  # as after that long
    assert len(batches) == 1
    batches.clear()
    bench_process.measure(asked(photos, seconds=0.5))
    assert len(batches) >= 3  # one to begin, and some that count


def test_a_repeat_does_what_its_row_says(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    touch = bench_process._touch
    monkeypatch.setattr(bench_process, "_touch", lambda batch: seen.append(batch) or touch(batch))
    bench_process.measure(asked(photos, limit_s=0.0))
    assert seen[-1][0].shape == (8, 3, 16, 16)
    bench_process.measure(asked(photos, limit_s=0.0, decodes=False))
    assert seen[-1][0].tolist()[0].startswith(b"\xff\xd8")


def test_parts_hold_equally_many_batches_of_every_worker() -> None:
    # Two workers, whose batches come in pairs: the second of each at once, the next after 1 s.
    times = [(float(k // 2), 10 * k) for k in range(13)]
    assert bench_process._rates(times, 2, 3) == [20.0] * 3
    assert bench_process._rates(times, 2, 1) == [20.0]
    assert bench_process._rates(times[:4], 2, 3) == [30.0]  # too few to be divided


def test_touching_counts_rows_of_any_batch() -> None:
    images = torch.zeros((5, 8, 8, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    assert bench_process._touch((images, torch.zeros(5))) == 5
    assert bench_process._touch({"x": torch.zeros((3, 2, 2)), "y": ["a", "b", "c"]}) == 3
    assert bench_process._touch(([b"a", b"b"], torch.zeros(2, dtype=torch.bool))) == 2
    assert bench_process._touch(torch.zeros(4)) == 4
    assert bench_process._touch([torch.zeros(0, 4), 1]) == 0


# --- what limits a row ----------------------------------------------------------------------------

BUSY = replace(
    DATALOADER, images_per_s=1000.0, mb_per_s=100.0, cpu_ms=2.0, cores_busy=2.0, pass_batches=99
)


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("decoding", {}),
        ("cpu", {"decodes": False}),
        ("cpu", {"cpu_ms": 0.3}),  # of which 0.2 are spent without decoding, too
        ("decoding", {"cores_busy": 1.3, "others_busy": 0.5}),
        ("load", {"cores_busy": 0.5, "others_busy": 1.4}),
        ("transport", {"trainer_busy": 0.95}),
        ("decoding", {"trainer_busy": 0.95, "workers": 0}),  # there it makes them, too
        ("storage", {"cores_busy": 0.6, "storage_mb_per_s": 90.0, "cold": True}),
        ("decoding", {"storage_mb_per_s": 90.0, "cold": True}),  # it keeps up
        ("worker", {"cores_busy": 0.98, "workers": 0}),
        ("worker", {"cores_busy": 1.1, "workers": 1, "trainer_busy": 0.12}),
        ("threads", {"loader": "ShardLoader", "workers": 1, "threads": 4, "cores_busy": 1.2}),
        ("worker", {"loader": "ShardLoader", "workers": 0, "threads": 4, "cores_busy": 3.9}),
        ("network", {"cores_busy": 0.9, "remote": True}),
        ("decoding", {"remote": True}),
        ("worker", {"cores_busy": 0.98, "workers": 0, "remote": True}),
        ("waiting", {"cores_busy": 0.9}),
        ("waiting", {"cores_busy": None, "cpu_ms": None}),
        ("start", {"cores_busy": 0.9, "pass_batches": 3}),
        ("memory", {"memory_left": 100 << 20}),
    ],
)
def test_a_row_is_judged_by_its_figures(code: str, changes: dict[str, Any]) -> None:
    cores = 8.0 if code in ("worker", "threads") else 2.0
    bare = replace(BUSY, decodes=False, cpu_ms=0.2, images_per_s=9000.0)
    row, _ = judge([replace(BUSY, **changes), bare], cores, MEMORY)
    assert row.limit == code
    assert row.short.startswith((f"{code}: ", f"{code} "))
    assert row.why and code in LIMITS
    assert len(row.short) <= 32


def test_what_was_measured_too_early_by_url_is_told() -> None:
    row = replace(BUSY, remote=True, rates=(1000.0,), starting=True)
    made = conclude(replace(plan(), rows=(row,)), [])
    notes = " ".join(made.notes)
    assert "DataLoader 2, decoded, by URL" in notes and "with more --seconds" in notes
    made = conclude(replace(plan(), rows=(replace(row, starting=False),)), [])
    assert "with more --seconds" not in " ".join(made.notes)


def test_storage_does_not_limit_what_is_as_fast_as_warm() -> None:
    cold = replace(BUSY, cold=True, cores_busy=1.0, storage_mb_per_s=99.0, images_per_s=980.0)
    for rate, code in ((1000.0, "waiting"), (1200.0, "storage")):
        row, _ = judge([cold, replace(BUSY, images_per_s=rate)], 2.0, MEMORY)
        assert row.limit == code


def test_a_row_that_failed_is_not_judged_and_shows_why() -> None:
    failed = replace(DATALOADER, error="it was killed\nand more")
    assert judge([failed], 2.0, MEMORY) == [failed]
    made = conclude(replace(plan(), rows=(failed, BUSY)), [])
    assert "failed: it was killed" in str(made) and "and more" not in str(made)
    assert made.best is BUSY


def test_the_share_of_decoding_is_told_by_the_row_without_it() -> None:
    bare = replace(BUSY, decodes=False, cpu_ms=0.5)
    other = replace(bare, loader="ShardLoader", cpu_ms=0.1)
    row, *_ = judge([BUSY, other, bare], 2.0, MEMORY)
    assert "about 75% of the CPU time of an image is decoding" in row.why
    row, *_ = judge([BUSY, other], 2.0, MEMORY)
    assert "about 95%" in row.why
    row, *_ = judge([BUSY, bare], 2.0, MEMORY, raw=True)
    assert row.limit == "cpu" and "decoding" not in row.why  # pixels are stored as they are
    (row,) = judge([BUSY], 2.0, MEMORY)
    assert row.limit == "decoding" and "about" not in row.why


# --- what is recommended --------------------------------------------------------------------------


def rated(rate: float, **changes: Any) -> Row:
    return replace(BUSY, images_per_s=rate, rates=(rate,), **changes)


def test_of_equal_rows_the_one_with_the_fewest_threads_is_recommended() -> None:
    rows = [rated(100.0, workers=1), rated(970.0, workers=4), rated(1000.0, workers=8)]
    made = conclude(replace(plan(), rows=tuple(rows)), [])
    assert made.best is rows[1]
    assert "within 5% of the fastest it has the fewest threads" in made.notes[0]
    fast = rated(1100.0, loader="ShardLoader", workers=8)
    made = conclude(replace(plan(), rows=(*rows, fast)), [])
    assert made.best is fast
    assert "this one 1.10 times as many" in made.notes[1]
    assert made.call.splitlines()[-1] == "loader = ShardLoader(train, num_workers=8, threads=1)"


@pytest.mark.parametrize("held_up", [0, 1])
def test_a_rate_beside_other_programs_is_compared_by_cpu_time(held_up: int) -> None:
    rows = [rated(100.0, cpu_ms=1.0), rated(400.0, loader="ShardLoader", cpu_ms=0.5)]
    notes = " ".join(conclude(replace(plan(), rows=tuple(rows)), []).notes)
    assert "this one 4.00 times as many" in notes and "more than 400 images/s waits" in notes
    rows[held_up] = replace(rows[held_up], limit="load")
    notes = " ".join(conclude(replace(plan(), rows=tuple(rows)), []).notes)
    assert "times as many" not in notes and "1 ms, 2.00 times this one's" in notes
    assert ("more than 400 images/s waits" in notes) is (held_up == 0)


def test_neither_cold_rows_nor_bytes_are_recommended_where_images_are() -> None:
    rows = (rated(10.0), rated(99.0, cold=True), rated(999.0, decodes=False))
    made = conclude(replace(plan(), rows=rows), [])
    assert made.best is rows[0]
    assert any(note.startswith("Cold, DataLoader 2 gives 99 images/s") for note in made.notes)
    assert not any("the start" in note for note in made.notes)
    short = (rows[0], replace(rows[1], pass_batches=1))
    notes = " ".join(conclude(replace(plan(), rows=short), []).notes)
    assert "warm. Most of it is the start: a pass has 1 batch." in notes
    made = conclude(replace(plan(fields=None), rows=rows[2:]), [])
    assert made.best is rows[2]


def test_what_others_did_meanwhile_is_said() -> None:
    quiet = conclude(replace(plan(), rows=(rated(9.0),)), []).notes
    assert not any("Other programs" in note or "busy before" in note for note in quiet)
    rows = (rated(9.0, others_busy=3.0, limit="load", why="others"),)
    notes = " ".join(conclude(replace(plan(), rows=rows, load_before=5.0), []).notes)
    assert "measure again when they are done" in notes
    assert "a load of 5.0 on 8 cores" in notes
    held_up = (rated(9.0), rated(1.0, loader="ShardLoader", limit="load"))
    best, *_ = conclude(replace(plan(), rows=held_up), []).notes
    assert best.endswith("Rows that other programs held up may be faster: measure again.")
    assert "more than 15% of the CPUs during 1 of 1 rows" in notes


def about_gpu(rate: float, limit: str = "decoding", **changes: Any) -> list[str]:
    rows = (replace(BUSY, rates=(rate,), images_per_s=rate, limit=limit, why="so"),)
    return [
        note
        for note in conclude(replace(plan(**{"cores": 4.0}), rows=rows, **changes), []).notes
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


@pytest.fixture
def host() -> Iterator[Host]:
    with Host() as one:
        yield one


def gone(pids: list[int]) -> bool:
    """Whether these processes have ended; waits for who buries them."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        # A zombie whose parent was killed is the init process's to bury, which some containers lack
        states = [machine._stat(pid)[:1] for pid in pids]
        if all(state in ([], ["Z"]) for state in states):
            return True
    return False


@pytest.mark.skipif(not LINUX, reason="processes are watched by /proc")
def test_a_row_that_dies_or_hangs_ends_alone(
    photos: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = asked(photos, workers=1, seconds=600.0, limit_s=600.0)
    seen: list[int] = []

    def kill() -> int:
        assert host._process is not None
        tree = machine.family(host._process.pid)
        seen[:] = tree
        if len(tree) > 1:
            os.kill(tree[1], signal.SIGKILL)
        return 1 << 30

    monkeypatch.setattr(bench_process, "memory_available", kill)
    with pytest.raises(FailedError, match=r"killed \(out of memory\?\)"):
        host.ask(long, LIMIT_S)
    monkeypatch.undo()
    serving = seen[0]
    assert host.ask(asked(photos, seconds=0.01), LIMIT_S)["rates"]  # the next one is fine
    assert host._process is not None and host._process.pid == serving
    with pytest.raises(
        DecodeError, match=r"^record 7 of the dataset, "
    ):  # what is wrong with the data is no row's
        broken = small_datasets.make(photos.parent / "broken", [8], image=_broken)
        host.ask(asked(broken, records=8, measured_records=8, workers=1), LIMIT_S)
    with pytest.raises(FailedError, match="not packed: there is no such directory"):
        host.ask(asked(photos / "nothing"), LIMIT_S)

    def look() -> int:
        assert host._process is not None
        # First it is called before the row is asked for.
        seen[:] = running(host._process.pid, 2 if seen else 1)
        return 1 << 30

    seen.clear()
    monkeypatch.setattr(bench_process, "memory_available", look)
    with pytest.raises(FailedError, match="no answer within 1 s"):
        host.ask(long, 0.9)
    assert len(seen) >= 2 and gone(seen)


ORPHAN = """
import os, signal
from shardio.tuning import bench_process

def answer(request):
    if not os.fork():
        signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)

bench_process._answer = answer
print(bench_process._forked({}, "nowhere").decode(), flush=True)
"""


@pytest.mark.skipif(not LINUX, reason="processes are forked")
def test_an_orphan_that_holds_the_pipe_holds_up_nobody() -> None:
    """As a worker that is forked when its parent is killed: it takes another for its parent."""
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        start_new_session=True,
    ) as process:
        assert process.stdout
        came = select.select([process.stdout], [], [], LIMIT_S)[0]
        line = process.stdout.readline() if came else b""
        os.killpg(process.pid, signal.SIGKILL)
    assert json.loads(line or "{}") == {
        "error": "it was killed (out of memory?)",
        "kind": "StorageError",
    }


def _broken(number: int) -> bytes:
    return b"\xff\xd8\xff no image" if number == 7 else small_datasets.jpeg(number)


def running(pid: int, least: int) -> list[int]:
    """A process and its descendants, once there are so many."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        tree = machine.family(pid)
        if len(tree) >= least:
            return tree
    raise AssertionError("nothing was started")


@pytest.mark.skipif(not LINUX, reason="processes are watched by /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_or_killed_it_leaves_nothing_behind(
    photos: Path, tmp_path: Path, how: signal.Signals
) -> None:
    # With --size: else the first process of the host's would be a short one, which looks at images.
    arguments = ("--workers", "1", "--seconds", "600", "--loader", "dataloader", "--size", "16")
    with subprocess.Popen(
        command("bench", photos, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(TMPDIR=str(tmp_path)),
    ) as process:
        tree = running(process.pid, 2 if how == signal.SIGINT else 4)  # host, repeat, its worker
        until = time.monotonic() + LIMIT_S
        while how == signal.SIGKILL and not list(tmp_path.rglob("pymp-*")):
            assert time.monotonic() < until  # the worker's socket lies in a folder of its own
        assert list(tmp_path.iterdir())
        process.send_signal(how)
        out, said = process.communicate(timeout=LIMIT_S)
    assert (out, said) == (b"", b"shardio: interrupted\n" if how == signal.SIGINT else b"")
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    assert gone(tree[1:])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("thread", [False, True], ids=["main", "another thread"])
def test_ctrl_c_while_the_process_starts_leaves_it_known_and_ended(
    monkeypatch: pytest.MonkeyPatch, thread: bool
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(real(*args, **kwargs))
        if thread:  # the system gives the signal of a terminal to any thread that does not block it
            one = threading.Thread(target=signal.raise_signal, args=(signal.SIGINT,))
            one.start()
            one.join()
        else:
            signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    with Host() as host, pytest.raises(KeyboardInterrupt):
        host.ask({}, 60)
    assert len(started) == 1
    assert started[0].returncode == -signal.SIGKILL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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


# --- the machine ----------------------------------------------------------------------------------


@pytest.mark.skipif(not LINUX, reason="there is no /proc")
def test_a_tree_of_processes_is_measured() -> None:
    before = machine.cpu_seconds([os.getpid()])
    code = "sum(range(10**7)); print('done', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout and child.stdin
        child.stdout.readline()
        tree = machine.family(os.getpid())
        assert child.pid in tree and tree[0] == os.getpid()
        spent = machine.cpu_seconds([child.pid])
        assert spent is not None and spent > 0
        both, alone = machine.pss_bytes(tree), machine.pss_bytes([os.getpid()])
        assert both is not None and alone is not None and both > alone
        assert 0 < machine.private_bytes(child.pid) <= (machine.pss_bytes([child.pid]) or 0)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.wait()
    after = machine.cpu_seconds([os.getpid()])  # of the child, too, which was waited for
    assert before is not None and after is not None and after >= before + spent
    assert machine.cpu_seconds([child.pid]) is None and machine.pss_bytes([child.pid]) is None
    assert machine.family(1 << 30) == [1 << 30]


@pytest.mark.skipif(not LINUX, reason="there is no /proc")
def test_memory_that_a_repeat_writes_anew_counts_once() -> None:
    code = """
import os
from shardio.tuning import bench_process
data = bytearray(b"x" * (96 << 20))
(ours, theirs), (wait, go) = os.pipe(), os.pipe()
if not os.fork():
    os.read(wait, 1)
    data[::4096] = bytes(len(data) // 4096)
    os.write(theirs, b"1")
    os.read(wait, 1)
    os._exit(0)
shared = bench_process._pss(os.getpid())
os.write(go, b"1"), os.read(ours, 1)
copied = bench_process._pss(os.getpid())
os.write(go, b"1"), os.wait()
print(shared >> 20, copied >> 20, bench_process._pss(os.getpid()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    shared, copied, alone = map(int, done.stdout.split())
    # The host's own copies, which no repeat has, are not theirs: 96 MiB either way.
    assert 96 <= shared < 150 and abs(copied - shared) < 20
    assert alone == 0  # nothing runs


def test_pages_are_dropped_or_said_to_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    (tmp_path / "empty").touch()
    stayed = machine.evict([str(path), str(tmp_path / "empty")])
    path.read_bytes()
    with open(path, "rb") as file:
        pages, of = machine._resident(file.fileno())
    assert pages == of == (1 << 20) // os.sysconf("SC_PAGE_SIZE")
    if stayed is not None:
        assert stayed == 1.0 or stayed <= machine.STAYED  # a RAM disk, or a device
        assert machine._cached([str(path)]) == 1.0
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert machine.evict([str(path)]) is None


def test_a_share_of_the_machine_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "processors", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert machine.cores() <= 1
    # What other programs do with other cores is nothing that slows this one.
    assert machine.load() is None and machine.busy_seconds() is None
