"""The watch over a loader: exact times by a clock of the tests, verdicts on made-up passes."""

import copy
import gc
import math
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.small_datasets import jpeg
from torch.utils.data import DataLoader, Dataset

from shardio import CenterCrop, ShardDataset
from shardio.errors import OptionError
from shardio.loader.shard_loader import ShardLoader
from shardio.loader.stats import BatchStats
from shardio.tuning import meter
from shardio.tuning.meter import BatchTotals, Setup, Times, Verdict, judge, watch


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(meter, "perf_counter", made)
    monkeypatch.delenv("RANK", raising=False)
    return made


class Loader:
    """Hands out the numbers from 0; for each, so much time passes in next(). Starting takes 5 s."""

    def __init__(
        self, clock: Clock, waits: Sequence[float], made: Sequence[BatchStats | None] | None = None
    ) -> None:
        self.clock, self.waits, self.made, self.epoch = clock, waits, made, 0
        self.iterators: list[weakref.ref[Any]] = []

    def __len__(self) -> int:
        return len(self.waits)

    def __iter__(self) -> Iterator[int]:
        self.clock.now += 5
        iterator = _Iterator(self)
        self.iterators.append(weakref.ref(iterator))
        return iterator

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class _Iterator(Iterator[int]):
    def __init__(self, loader: Loader) -> None:
        self._loader, self._next, self.batch_stats = loader, 0, None

    def __next__(self) -> int:
        number, loader = self._next, self._loader
        if number == len(loader.waits):
            loader.clock.now += 7  # ending takes time, too, and is nobody's data time
            raise StopIteration
        self._next += 1
        loader.clock.now += loader.waits[number]
        self.batch_stats = loader.made[number] if loader.made else None
        return number


def train(watched: Any, clock: Clock, step: float = 0.5) -> list[int]:
    seen = []
    for batch in watched:
        clock.now += step
        seen.append(batch)
    return seen


# --- reports --------------------------------------------------------------------------------------


def test_a_report_is_of_the_batches_since_the_one_before(clock: Clock) -> None:
    waits = [9.0, 0.25, 0.75, 1.0, 2.0, 2.0, 2.0, 6.0, 0.125]
    reports: list[meter.Report | None] = []
    watched = watch(Loader(clock, waits), 4, print=None, log=lambda _: None)
    for _ in watched:
        clock.now += 0.5
        reports.append(watched.report())
    assert reports[:5] == [None, None, None, None, reports[4]]  # told when the fifth is asked for
    first, second, last = reports[4], reports[8], watched.report()
    assert first is not None and second is not None and last is not None
    assert (first.batch, first.batches, first.measured) == (4, 9, 3)
    assert first.data == Times(2 / 3, 0.75, pytest.approx(0.975), 1.0)
    assert (second.batch, second.measured) == (8, 4)
    assert second.data == Times(3.0, 2.0, pytest.approx(5.4), 6.0)
    assert second.step == Times(0.5, 0.5, 0.5, 0.5)
    assert second.ratio == 6.0
    assert (last.batch, last.measured, last.data.max) == (9, 1, 0.125)


def test_a_watch_shows_what_it_watches() -> None:
    assert repr(watch([1, 2], print=None)) == "<watch of [1, 2]>"


def test_the_first_batch_of_each_pass_stands_apart_and_has_its_start_in_it(clock: Clock) -> None:
    watched = watch(Loader(clock, [9.0, 0.25, 0.25, 0.25]), 2, print=None)
    for _ in range(2):
        iterator = iter(watched)
        for step in (100.0, 0.5, 0.5, 0.5):  # the first step compiles: it is in no statistics
            next(iterator)
            clock.now += step
            report = watched.report()
        assert report is not None and report.first_s == 14.0
        assert report.data.max == 0.25 and report.step.max == 0.5
        assert next(iterator, None) is None
        report = watched.report()
        assert report is not None and report.first_s is None  # only once a pass
        assert report.data.max == 0.25 and report.step.max == 0.5
    assert report.watched == 8 and report.batch == 4


def test_a_wait_for_a_device_that_is_behind_is_the_steps_time(clock: Clock) -> None:
    watched = watch(Loader(clock, [1.0] * 4), None, print=None)
    iterator: Any = iter(watched)
    iterator._batches.blocked_s = 0.25  # as device.DevicePrefetcher says it
    for _ in iterator:
        clock.now += 0.5
    report = watched.report()
    assert report is not None and report.data.max == report.step.max == 0.75


@pytest.mark.parametrize("idle, data", [(0.0, 0.0), (0.25, 0.25), (9.0, 0.75), (None, 0.75)])
def test_a_wait_costs_what_the_device_idles(clock: Clock, idle: float | None, data: float) -> None:
    """Nobody synchronises: while the loop waits, the device computes the steps before."""
    watched = watch(Loader(clock, [1.0] * 4), None, print=None)
    iterator: Any = iter(watched)
    iterator._batches.blocked_s, iterator._batches.idle_s = 0.25, idle
    for _ in iterator:
        clock.now += 0.5
    report = watched.report()
    assert report is not None
    assert (report.data.max, report.step.max) == (data, 1.5 - data)


def test_reporting_is_in_no_time(clock: Clock) -> None:
    def slow(_: Any) -> None:
        clock.now += 50

    watched = watch(Loader(clock, [1.0] * 6), 1, log=slow, print=slow)
    reports = []
    for _ in watched:
        clock.now += 0.5
        reports.append(watched.report())
    for report in reports[2:]:
        assert report is not None and (report.data.max, report.step.max) == (1.0, 0.5)


def test_statistics_are_those_of_numpy() -> None:
    for n in (1, 2, 3, 20, 101):
        values = np.random.default_rng(n).random(n)
        found = Times.of(values.tolist())
        median, p95 = np.percentile(values, (50, 95))
        expected = (values.mean(), median, p95, values.max())
        assert (found.mean, found.median, found.p95, found.max) == pytest.approx(expected)


def test_without_every_there_is_one_report_of_the_whole_pass(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "FOLD", 3)
    lines: list[str] = []
    watched = watch(Loader(clock, [9.0] + [0.25] * 19 + [1.25]), None, print=lines.append)
    assert train(watched, clock) == list(range(21))
    report = watched.report()
    assert report is not None and report.measured == 20 and report.first_s == 14.0
    assert report.data.mean == pytest.approx(0.3) and report.data.max == 1.25
    assert len(lines) == 2 and lines[1] == watched.verdict


def test_lines_say_all_of_it(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    train(watch(Loader(clock, [1.0, 0.0625, 0.0005, 3.0]), 100, alarm=1.5), clock)
    captured = capsys.readouterr()
    assert captured.out == ""
    line, verdict = captured.err.splitlines()
    assert line == (
        "batch 4 of 4: data 1.02 s (median 62.5 ms, p95 2.71 s, max 3 s), step 500 ms (median 500 "
        "ms, p95 500 ms, max 500 ms), data/step 2, above 1.5; first batch 6 s"
    )
    assert verdict.startswith("too few batches to judge: 3")


def test_a_loader_without_length_is_watched_too(clock: Clock) -> None:
    lines: list[str] = []
    watched = watch((number for number in range(3)), print=lines.append)
    assert train(watched, clock) == [0, 1, 2]
    assert lines[0].startswith("batch 3: data 0 us")
    with pytest.raises(TypeError):
        len(watched)


def test_an_empty_pass_and_one_of_one_batch_have_nothing_to_report(clock: Clock) -> None:
    for count in (0, 1):
        lines: list[str] = []
        watched = watch(Loader(clock, [1.0] * count), 1, print=lines.append)
        assert watched.verdict == "" and watched.judge() is None
        assert len(train(watched, clock)) == count
        assert watched.report() is None and len(lines) == 1
        assert lines[0].startswith("too few batches to judge: 0 after the first")


def test_a_long_pass_takes_no_more_memory(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "KEPT", 20)
    monkeypatch.setattr(meter, "FOLD", 7)
    for every in (10, None):
        # The loader is slow for 1,000 batches, then fast.
        waits = [0.0] + [4.0] * 1000 + [0.01] * 50
        measured: list[meter.Report] = []
        watched = watch(
            Loader(clock, waits, [BatchStats(slowest_record=i) for i in range(1051)]),
            every,
            print=None,
        )
        for _ in watched:
            clock.now += 0.5
            report, seen = watched.report(), watched._pass
            if report is not None and report not in measured[-1:]:
                measured.append(report)
            assert seen is not None and 0 <= len(seen.data) - len(seen.step) <= 1
            assert len(seen.step) <= 50 and len(seen.stats) <= 10
        verdict, report = watched.judge(), watched.report()
        assert verdict is not None and verdict.bound == "compute"  # it is of the last ones
        assert report is not None and report.data.mean == pytest.approx(0.01)
        if every:  # nothing is dropped before it was in a report
            assert [one.measured for one in measured] == [9] + [10] * 104
            assert report.measured == 1


# --- an iterable like the loader ------------------------------------------------------------------


def test_a_watched_loader_does_what_the_loader_does(clock: Clock) -> None:
    loader = Loader(clock, [0.1] * 3)
    watched = watch(loader)
    assert len(watched) == 3 and watched.waits is loader.waits
    watched.set_epoch(4)
    assert loader.epoch == 4
    assert train(watched, clock) == train(watched, clock) == [0, 1, 2]
    assert watched.loader is loader
    with pytest.raises(AttributeError, match="state_dict"):
        watched.state_dict()
    assert not hasattr(watched, "__array__")
    assert copy.copy(watched).loader is loader


@pytest.mark.parametrize("broken", [False, True])
def test_a_loop_left_early_prints_no_verdict_but_has_one(clock: Clock, broken: bool) -> None:
    lines: list[str] = []
    loader = Loader(clock, [1.0] * 30)
    watched = watch(loader, print=lines.append)
    try:
        for batch in watched:
            clock.now += 0.5
            if batch == 20:
                if broken:
                    raise KeyError(batch)
                break
    except KeyError:
        pass
    gc.collect()
    assert [one() for one in loader.iterators] == [None]  # its workers end when the loop does
    assert lines == [] and watched.report() is None
    verdict = watched.judge()
    assert verdict is not None and verdict.bound == "loader"
    assert "waiting for batches is 67% of the time (1 s a batch" in watched.verdict
    assert len(train(watched, clock)) == 30 and len(lines) == 2  # the next pass is its own
    report = watched.report()
    assert report is not None and report.batch == 30 and report.watched == 51


def test_a_verdict_can_be_asked_for_within_a_step(clock: Clock) -> None:
    watched = watch(Loader(clock, [1.0] * 15), print=None)
    verdicts = []
    for _ in watched:
        clock.now += 0.5
        verdicts.append(watched.judge())
    assert [one.bound for one in verdicts if one] == ["unknown"] * 11 + ["loader"] * 4
    final = watched.judge()
    assert final is not None and final.share == pytest.approx(2 / 3)
    assert final == verdicts[-1]


def test_an_error_of_the_loader_comes_through(clock: Clock) -> None:
    def batches() -> Iterator[int]:
        for number in range(12):
            clock.now += 1.0
            yield number
        raise ValueError("broken.jpg")

    lines: list[str] = []
    watched = watch(batches(), print=lines.append)
    with pytest.raises(ValueError, match=r"broken\.jpg"):
        train(watched, clock)
    assert lines == []
    verdict = watched.judge()
    assert verdict is not None and verdict.bound == "loader"


def test_asking_again_after_an_error_counts_no_step_twice(clock: Clock) -> None:
    class Moody(Iterator[int]):
        asked = 0

        def __next__(self) -> int:
            self.asked += 1
            clock.now += 1.0
            if self.asked == 5:
                raise OSError("try again")
            return self.asked

    watched = watch(Moody(), print=None)
    iterator = iter(watched)
    for asked in range(1, 25):
        try:
            assert next(iterator) == asked
        except OSError:
            assert asked == 5
        clock.now += 3.0
    verdict = watched.judge()
    assert verdict is not None and verdict.share == 0.25
    assert "a step takes 3 s" in verdict.text


def test_asking_behind_the_end_reports_nothing_more(clock: Clock) -> None:
    lines: list[str] = []
    iterator = iter(watch(Loader(clock, [1.0] * 12), print=lines.append))
    assert len(list(iterator)) == 12 and len(lines) == 2
    assert next(iterator, None) is None and len(lines) == 2


def test_a_watch_in_a_watch_hands_all_through(clock: Clock) -> None:
    made = [BatchStats(rows=i) for i in range(5)]
    inner: list[str] = []
    outer: list[str] = []
    nested = watch(watch(Loader(clock, [1.0] * 5, made), 2, print=inner.append), print=outer.append)
    iterator = iter(nested)
    for number in range(5):
        assert next(iterator) == number
        assert iterator.batch_stats == made[number]  # type: ignore[attr-defined]
        clock.now += 0.5
    assert next(iterator, None) is None
    assert len(nested) == 5 and len(inner) == 4 and len(outer) == 2
    report = nested.report()
    assert report is not None and report.data.max == 1.0 and report.step.max == 0.5


# --- ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "waits", "lines"),
    [("0", 0.01, 2), ("3", 0.01, 0), ("3", 0.25, 2), ("x", 0.01, 2), ("1", 0.05, 0)],
)
def test_one_rank_speaks_and_any_that_waits(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, rank: str, waits: float, lines: int
) -> None:
    monkeypatch.setenv("RANK", rank)
    said: list[str] = []
    logged: list[dict[str, float]] = []
    watched = watch(Loader(clock, [waits] * 30), print=said.append, log=logged.append)
    train(watched, clock)
    assert len(said) == lines
    assert all(line.startswith(f"rank {rank}: ") for line in said) or rank == "x"
    assert len(logged) == 1  # whoever gives a log gets the numbers


def test_the_rank_is_that_of_torch_distributed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "5")
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        lines: list[str] = []
        train(watch(Loader(clock, [0.0] * 12), print=lines.append), clock)
    finally:
        torch.distributed.destroy_process_group()
    assert len(lines) == 2 and lines[0].startswith("rank 0: batch 12")


def test_watching_needs_no_torch() -> None:
    code = (
        "import sys; from shardio.tuning.meter import watch\n"
        "assert list(watch([1, 2, 3])) == [1, 2, 3]; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- log ------------------------------------------------------------------------------------------


class Writer:
    """As TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.added: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.added.append((tag, scalar_value, global_step))


class Run:
    """As a run of wandb; that also has a `log` is what counts."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log(self, data: dict[str, float]) -> None:
        self.logged.append(data)

    def __call__(self) -> None:
        raise AssertionError


def test_numbers_go_to_whatever_was_given(clock: Clock) -> None:
    made = [BatchStats(read_s=0.5, device_s=0.25)] * 9
    writer, run, plain = Writer(), Run(), list[dict[str, float]]()
    for log in (writer, run, plain.append):
        watched = watch(Loader(clock, [1.0] * 9, made), 4, log=log, print=None)
        train(watched, clock, 2.0)
        train(watched, clock, 2.0)
    assert plain == run.logged and len(plain) == 6
    assert plain[0] == {
        **{f"loader/data_{name}_s": 1.0 for name in ("mean", "median", "p95", "max")},
        **{f"loader/step_{name}_s": 2.0 for name in ("mean", "median", "p95", "max")},
        "loader/data_over_step": 0.5,
        "loader/first_batch_s": 6.0,
        "loader/read_s": 0.5,
        **{f"loader/{stage}_s": 0.0 for stage in ("decode", "transform", "collate", "transport")},
        "loader/device_s": 0.25,
    }
    assert "loader/first_batch_s" not in plain[1] and "loader/first_batch_s" in plain[3]
    assert dict(pair[:2] for pair in writer.added if pair[2] == 4) == plain[0]
    assert [s for tag, _, s in writer.added if tag == "loader/read_s"] == [4, 8, 9, 13, 17, 18]


def test_wrong_options_are_told_at_once() -> None:
    for options, words in (
        ({"every": 0}, "every"),
        ({"every": 1.5}, "every"),
        ({"alarm": -1}, "alarm"),
        ({"alarm": float("nan")}, "alarm"),
        ({"alarm": "x"}, "alarm"),
        ({"log": 3}, "SummaryWriter"),
        ({"print": 3}, "print"),
    ):
        with pytest.raises(OptionError, match=words):
            watch([], **options)


# --- how batches were made ------------------------------------------------------------------------


def test_stages_are_a_batchs_mean_and_slow_records_are_named_once(clock: Clock) -> None:
    slow = [(0.1, 7), (0.9, 3), (0.2, 7), (0.05, 1), (0.3, 3), (0.0, -1)]
    made = [
        BatchStats(rows=4, decode_s=s, slowest_s=s, slowest_record=r, slowest_key=f"k{r}")
        if r >= 0
        else BatchStats()
        for s, r in slow
    ]
    watched = watch(Loader(clock, [1.0] * 7, [BatchStats(decode_s=99.0), *made]), print=None)
    train(watched, clock)
    report = watched.report()
    assert report is not None
    assert report.stages["decode"] == pytest.approx(1.55 / 6)  # the first batch is in no report
    assert [(one.slowest_s, one.slowest_record) for one in report.slowest] == [
        (0.9, 3), (0.2, 7), (0.05, 1),
    ]  # fmt: skip


def test_batches_whose_making_is_not_known_are_no_zeros(clock: Clock) -> None:
    made: list[Any] = [None, BatchStats(read_s=1.0), "by hand", BatchStats(read_s=3.0)]
    watched = watch(Loader(clock, [1.0] * 4, made), print=None)
    train(watched, clock)
    report = watched.report()
    assert report is not None and report.stages["read"] == 2.0


def test_stages_too_are_of_the_batches_since_the_report_before(clock: Clock) -> None:
    logged: list[dict[str, float]] = []
    made = [
        BatchStats(read_s=seconds, slowest_record=3) for seconds in (9.0, 1.0, 1.0, 2.0, 4.0, 5.0)
    ]
    watched = watch(Loader(clock, [1.0] * 6, made), 3, log=logged.append, print=None)
    train(watched, clock)
    assert [one["loader/read_s"] for one in logged] == [1.0, pytest.approx(11 / 3)]


# --- verdicts -------------------------------------------------------------------------------------

SHARD = Setup("ShardLoader", workers=2, threads=2, prefetch=2, cores=4)
TORCH = Setup("DataLoader", workers=2, prefetch=2, cores=2)


def making(count: int = 100, **stages: Any) -> BatchTotals:
    made = BatchTotals()
    made.add([BatchStats(rows=8, **stages)] * count)
    return made


def steady(wait: float, step: float = 0.05, **options: Any) -> Verdict:
    return judge([wait] * 100, [step] * 100, **options)


@pytest.mark.parametrize("wait", [0.0, 1e-6, 0.004])
def test_a_loader_that_keeps_up_is_left_alone(wait: float) -> None:
    verdict = steady(wait, totals=making(decode_s=9.0), setup=SHARD)
    assert verdict.bound == "compute" and verdict.stage == ""
    assert "compute-bound" in verdict.text and "no more to gain" in verdict.text


def test_the_alarm_is_the_border_and_the_mean_decides() -> None:
    assert steady(0.0049).bound == "compute" and steady(0.0051).bound == "loader"
    assert steady(0.02, alarm=0.5).bound == "compute"
    verdict = judge([0.0] * 95 + [0.2] * 5, [0.05] * 100)  # 0.01 on the mean, the median 0
    assert verdict.bound == "loader" and verdict.share == pytest.approx(1 / 6)


@pytest.mark.parametrize("wait", [0.07, 0.1, 0.3, 1 / 3])
def test_at_the_border_waits_that_are_all_equal_are_judged(wait: float) -> None:
    # Sums are rounded: their mean may lie above the alarm, and above each of them.
    for count in range(10, 400):
        assert "nan" not in judge([wait] * count, [10 * wait] * count, setup=SHARD).text


def test_few_batches_are_not_judged() -> None:
    verdict = judge([9.0] * 9, [0.1] * 9)
    assert verdict.bound == "unknown" and "9 after the first, expected 10" in verdict.text


@pytest.mark.parametrize(
    ("stages", "stage", "knob"),
    [
        ({"read_s": 0.3, "decode_s": 0.1}, "read", "local disk; a larger shuffle window does not"),
        ({"read_s": 0.1, "decode_s": 0.3}, "decode", "pack --jpeg-tiles"),
        ({"decode_s": 0.1, "transform_s": 0.3}, "transform", "cheaper transform"),
        ({"decode_s": 0.1, "collate_s": 0.3}, "collate", "arrays of one shape"),
        ({"decode_s": 0.3, "transport_s": 0.06}, "transport", "kept off its core"),
        ({"decode_s": 0.3, "device_s": 0.06, "transport_s": 0.01}, "device", "pin=True"),
        ({"decode_s": 0.3, "transport_s": 0.04}, "decode", "--jpeg-tiles"),  # not half the wait
    ],
)
def test_the_limiting_stage_is_named_with_its_knob(
    stages: dict[str, float], stage: str, knob: str
) -> None:
    verdict = steady(0.1, totals=making(**stages), setup=SHARD)
    assert (verdict.bound, verdict.stage) == ("loader", stage)
    assert f"{stage} is the limit (" in verdict.text and knob in verdict.text
    assert verdict.text.count("is the limit") == 1


def test_a_knob_that_is_turned_already_is_not_advised() -> None:
    taken = making(decode_s=0.3, transport_s=0.06)
    assert "copy=False" not in steady(0.1, totals=taken, setup=SHARD).text
    assert steady(0.1, totals=taken, setup=SHARD._replace(copies=True)).text.endswith(
        ": copy=False"
    )
    busy = SHARD._replace(cores=1)
    assert "--jpeg-tiles" in steady(0.1, totals=making(decode_s=0.3), setup=busy).text
    tiles = busy._replace(tiles=True)
    text = steady(0.1, totals=making(decode_s=0.3), setup=tiles).text
    assert text.endswith("less to decode: shardio pack --resize")
    here = busy._replace(device="cpu", torch_threads=4)
    cast = making(device_s=0.2)
    assert "(100% of the wait)" in steady(0.1, totals=cast, setup=here).text
    assert "torch.set_num_threads" in steady(0.1, totals=cast, setup=here).text
    alone = steady(0.1, totals=cast, setup=here._replace(torch_threads=1)).text
    assert "torch.set_num_threads" not in alone and "leave them to the device" in alone
    there = SHARD._replace(device="cuda", decodes=True)
    assert "device is the limit" in (text := steady(0.1, totals=cast, setup=there).text)
    assert "decode='pil' leaves that to the workers" in text and "pin=True" not in text


CUDA = SHARD._replace(device="cuda", decodes=True)


@pytest.mark.parametrize("behind, bound", [(0.0, "unknown"), (0.89, "unknown"), (0.9, "compute")])
def test_beside_a_decoding_thread_only_a_gpu_that_is_behind_is_known_to_be_busy(
    behind: float, bound: str
) -> None:
    """The host may be the limit: then nobody waits for batches, and the GPU runs out of work."""
    verdict = steady(1e-6, totals=making(device_s=0.001), setup=CUDA, behind=behind)
    assert (verdict.bound, verdict.stage) == (bound, ""), verdict
    assert ("compute-bound" in verdict.text) is (bound == "compute")
    assert ("the host is the limit" in verdict.text) is (bound == "unknown")
    assert "no more to gain" not in verdict.text


def test_a_gpu_that_is_behind_is_asked_for_beside_decoding_alone() -> None:
    assert steady(1e-6, setup=CUDA, behind=0.5, alarm=0.5).bound == "compute"
    assert steady(0.1, setup=CUDA, behind=1.0).bound == "loader"
    assert steady(1e-6, setup=CUDA._replace(decodes=False)).bound == "compute"
    assert steady(1e-6, setup=CUDA._replace(device="cpu")).bound == "compute"  # it has no thread


@pytest.mark.parametrize(
    "behind, bound", [(True, "compute"), (False, "unknown"), (None, "unknown")]
)
def test_a_loop_asks_at_each_batch_whether_the_gpu_is_behind(
    clock: Clock, behind: bool | None, bound: str
) -> None:
    loader: Any = Loader(clock, [0.001] * 20)
    loader.num_workers, loader.persistent_workers = 2, True
    loader.dataset = SimpleNamespace(device_crop=((8, 8), "bilinear"))
    loader.target = SimpleNamespace(device=SimpleNamespace(type="cuda"))  # as of `prefetch`
    watched = watch(loader, None, print=None)
    for _ in watched:
        clock.now += 0.5
        if behind is not None:  # as device.DevicePrefetcher says it
            loader.iterators[-1]().behind = behind
    found = watched.judge()
    assert found is not None and found.bound == bound, found


def test_work_that_waits_while_cores_are_idle_wants_threads() -> None:
    full = SHARD._replace(cores=4, threads=2)
    for stage in ("decode_s", "transform_s"):
        waits = making(**{stage: 0.4}, cpu_s=0.04)
        text = steady(0.1, totals=waits, setup=full).text
        assert text.endswith(
            "waits more than it computes (CPU time is 10% of it): threads=8 (now 2)"
        )
    for other in (
        steady(0.1, totals=making(transform_s=0.4, cpu_s=0.3), setup=full),  # it computes
        steady(0.1, totals=making(transform_s=0.4), setup=full),  # nobody told
        steady(0.1, totals=making(read_s=0.4, cpu_s=0.04), setup=full),
        # Threads that wait for each other's core: 4 x 0.04 of 0.15 s are more than half of 2 cores.
        steady(0.1, totals=making(transform_s=2.0, cpu_s=0.16), setup=full._replace(cores=2)),
    ):
        assert "waits more" not in other.text


def test_requests_that_fail_or_are_too_many_are_told() -> None:
    well = steady(0.1, totals=making(read_s=0.4, requests=100), setup=SHARD).text
    assert "batches wait for the network" in well and "requests" not in well
    assert "batches wait for the network" not in steady(0.1, totals=making(read_s=0.4)).text
    fails = making(decode_s=0.4, requests=100, retries=5, throttled=1)
    for text in (steady(0.1, totals=fails).text, steady(0.0, totals=fails).text):
        assert text.endswith("the network or the store is at fault")
        assert ". 500 of 10,000 requests failed" in text
    many = making(decode_s=0.4, requests=100, retries=5, throttled=4)
    busy = steady(0.1, totals=many).text
    assert (
        "The store refused 400 of 10,000 requests as too many" in busy and "fewer workers" in busy
    )


def test_shares_of_stages_are_of_what_they_are_said_to_be() -> None:
    work = {"read_s": 0.05, "decode_s": 0.15}
    assert "(75% of the loader's work)" in steady(0.1, totals=making(**work)).text
    taking = making(**work, transport_s=0.08)
    assert "(80% of the wait)" in steady(0.1, totals=taking).text


def test_idle_cores_come_before_cheaper_work() -> None:
    decode = making(decode_s=0.3)
    idle = SHARD._replace(cores=16)
    assert (
        "num_workers=8 (now 2 of 2 threads; 16 cores here)"
        in steady(0.1, totals=decode, setup=idle).text
    )
    alone = SHARD._replace(workers=0, threads=1, cores=1)  # at least beside the training loop
    assert "num_workers=1 (now 0; 1 core here)" in steady(0.1, totals=decode, setup=alone).text
    torch_idle = TORCH._replace(cores=8)
    assert "num_workers=8 (now 2; 8 cores here)" in steady(0.1, setup=torch_idle).text
    assert "--resize" in steady(0.1, totals=decode, setup=SHARD).text  # none is idle


def test_where_nobody_tells_the_stage_the_verdict_says_who_would() -> None:
    for setup in (TORCH, Setup()):
        verdict = steady(0.1, setup=setup)
        assert verdict.stage == "" and "ShardLoader" in verdict.text


def test_a_transport_that_is_not_ours_is_to_be_replaced() -> None:
    verdict = steady(0.1, totals=making(transport_s=0.09), setup=TORCH)
    assert verdict.stage == "transport" and verdict.text.endswith("shardio.ShardLoader")


def rare(late: float = 2.0) -> list[float]:
    """One late batch in 25 or so, at no regular distance."""
    waits = [0.001] * 100
    for at in (7, 38, 52, 91):
        waits[at] = late
    return waits


def slow_records(*slow: tuple[float, int, str]) -> BatchTotals:
    made = BatchTotals()
    made.add(
        [
            BatchStats(8, decode_s=0.1, slowest_s=s, slowest_record=r, slowest_key=k)
            for s, r, k in slow
        ]
    )
    return made


def test_mean_high_and_median_low_names_the_slowest_records() -> None:
    known = slow_records((1.9, 17, "cat/huge.png"), (0.01, 3, "dog/1.jpg"), (1.2, 4, "a\x1b[2J"))
    text = judge(rare(), [0.05] * 100, known, SHARD).text
    assert "Most batches are there in time, a few are late" in text
    assert "prefetch_factor=22 (now 2) hides them" in text  # 2 s of steps of 50 ms, by 2 workers
    assert text.endswith("cat/huge.png (record 17, 1.9 s), a\\x1b[2J (record 4, 1.2 s)")


def test_late_batches_without_a_slow_record_are_not_put_down_to_one() -> None:
    text = judge(rare(), [0.05] * 100, slow_records((0.01, 3, "dog/1.jpg")), SHARD).text
    assert "no record was slow (at most 10 ms)" in text and "dog/1.jpg" not in text


def test_without_made_the_verdict_says_how_to_get_the_records() -> None:
    text = judge(rare(), [0.05] * 100, None, TORCH).text
    assert (
        "prefetch_factor=22 (now 2) hides them" in text and "ShardLoader names the records" in text
    )
    few = judge(rare(0.2), [0.05] * 100, None, TORCH).text
    assert "prefetch_factor=4 (now 2) hides them" in few
    many = judge(rare(20.0), [0.05] * 100, None, TORCH).text
    assert "prefetch_factor=32 (now 2) hides more of them" in many
    alone = TORCH._replace(workers=0, prefetch=None, cores=4)
    assert "num_workers=4 (now 0" in judge(rare(), [0.05] * 100, None, alone).text
    assert "prefetch more batches" in judge(rare(), [0.05] * 100).text


def test_many_late_batches_are_a_slow_loader_whatever_the_median() -> None:
    waits = np.where(np.random.default_rng(0).random(200) < 0.3, 0.4, 0.0)
    assert np.median(waits) == 0
    verdict = judge(waits, [0.05] * 200, making(decode_s=0.3), SHARD)
    assert verdict.stage == "decode" and "few are late" not in verdict.text


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_one_late_batch_in_every_w_is_seen(workers: int) -> None:
    waits = np.full(100, 0.001)
    waits[3::workers] = 0.5
    setup = TORCH._replace(workers=workers, cores=16)
    text = judge(waits, [0.05] * 100, None, setup).text
    assert f"One batch in every {workers} is late" in text
    assert f"num_workers=16 (now {workers}; 16 cores here)" in text
    for other in (1, 3, 16):
        text = judge(waits, [0.05] * 100, None, setup._replace(workers=other)).text
        assert "in every" not in text


def test_the_rhythm_may_slip_now_and_then() -> None:
    waits = np.full(100, 0.001)
    waits[[*range(0, 40, 4), *range(41, 70, 4), *range(72, 100, 4)]] = 0.5
    text = judge(waits, [0.05] * 100, None, TORCH._replace(workers=4)).text
    assert "One batch in every 4 is late" in text and "they, or one of them, do not" in text


def test_no_rhythm_is_seen_in_chance_or_in_waits_that_are_nearly_equal() -> None:
    noise = np.random.default_rng(1)
    for waits in noise.exponential(0.1, (200, 100)):
        for workers in (2, 3, 4, 8):
            text = judge(waits, [0.05] * 100, None, TORCH._replace(workers=workers)).text
            assert "in every" not in text
    alike = [0.10, 0.12] * 50
    assert "in every" not in judge(alike, [0.05] * 100, None, TORCH).text


def test_a_worker_that_is_slower_than_the_others_is_named() -> None:
    waits = np.full(100, 0.001)
    waits[::4] = 0.5
    for factor, named in ((3.0, True), (1.1, False)):
        made = BatchTotals()
        seconds = [0.1, 0.1, 0.1 * factor, 0.1]
        made.add([BatchStats(rows=10, decode_s=seconds[i % 4], worker=i % 4) for i in range(100)])
        text = judge(waits, [0.05] * 100, made, SHARD._replace(workers=4)).text
        assert ("worker 2 takes 3.0 times as long for a row" in text) is named
        assert ("decode is the limit" in text) is not named


def test_a_start_that_costs_more_than_all_waiting_is_the_verdict() -> None:
    setup = TORCH._replace(restarts=True)
    verdict = judge([0.001] * 5, [0.05] * 5, None, setup, first_s=2.0)
    assert verdict.bound == "start-up" and verdict.text.endswith(
        "persistent_workers=True keeps the workers from pass to pass"
    )
    assert verdict.share == pytest.approx(2.005 / 2.255)
    assert judge([0.001] * 5, [0.05] * 5, None, TORCH, first_s=2.0).bound == "unknown"
    assert judge([0.5] * 20, [0.05] * 20, None, setup, first_s=2.0).bound == "loader"
    assert judge([0.001] * 500, [0.05] * 500, None, setup, first_s=2.0).bound == "compute"


waits_of_passes = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=60)


@given(waits_of_passes, st.integers(0, 9), st.sampled_from([SHARD, TORCH, Setup()]))
def test_any_pass_has_a_verdict_of_one_line(
    times: list[tuple[float, float]], workers: int, setup: Setup
) -> None:
    data, step = [d for d, _ in times], [s for _, s in times]
    verdict = judge(data, step, making(3, read_s=1.0), setup._replace(workers=workers))
    assert "\n" not in verdict.text and 0 <= verdict.share <= 1
    assert not re.search(r"\. [a-z]", verdict.text)
    assert (verdict.bound == "unknown") == (len(times) < meter.LEAST)


# --- with loaders as they are ---------------------------------------------------------------------


class Numbers(Dataset[int]):
    """So many numbers; each takes so long to get."""

    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)  # work: nothing waits for anything by it
        return index


@pytest.mark.parametrize(("item_s", "steps", "bound"), [(0.02, 0, "loader"), (0, 20, "compute")])
def test_a_dataloader_is_judged(
    item_s: float, steps: int, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """steps: a step takes so many times as long as the wait before it, whatever made that long."""
    monkeypatch.delenv("RANK", raising=False)
    lines: list[str] = []
    loader = DataLoader(Numbers(60, item_s), batch_size=2, num_workers=2, persistent_workers=True)
    watched = watch(loader, 10, alarm=1.0, print=lines.append)  # 1: other load may cost some waits
    for _ in range(2):
        seen, before = [], math.inf  # the first wait is for the start of processes
        for batch in watched:
            time.sleep(steps * max(0.001, time.perf_counter() - before))
            seen += batch.tolist()
            before = time.perf_counter()
        assert seen == list(range(60))
    verdict = watched.judge()
    assert verdict is not None and verdict.bound == bound, verdict
    assert (
        len(lines) == 8
        and lines[0].startswith("batch 10 of 30: ")
        and f"{bound}-bound" in lines[-1]
    )


def test_tiles_are_known_of_shardios_datasets_alone(packed: Callable[..., Path]) -> None:
    data = ShardDataset(packed([8]), batch_size=2)
    assert Setup.of(ShardLoader(data, num_workers=0)).tiles is False
    data.manifest.options["tiles"] = 8
    assert Setup.of(ShardLoader(data, num_workers=0)).tiles and Setup.of(DataLoader(data)).tiles
    numbers = Numbers(4, 0)
    numbers.manifest = data  # type: ignore[attr-defined]
    assert Setup.of(watch(DataLoader(numbers))).tiles is False


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_dataloaders_knobs_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cores = Setup.of(None).cores
    assert cores >= 1
    data = Numbers(4, 0)
    assert Setup.of(DataLoader(data)) == Setup("DataLoader", 0, cores=cores)
    found = Setup.of(watch(DataLoader(data, num_workers=3, prefetch_factor=5)))
    assert found == Setup("DataLoader", 3, 1, 5, True, cores)
    kept = DataLoader(data, num_workers=3, persistent_workers=True)
    assert Setup.of(kept).restarts is False
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(cores))
    assert Setup.of(None).cores == 1
    monkeypatch.setattr(meter.machine, "cores", lambda: 3.5)  # a container's share
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Setup.of(None).cores == 2


def test_a_resident_loader_is_not_told_to_take_workers(packed: Callable[..., Path]) -> None:
    data = ShardDataset(packed([8]), batch_size=2, transform=CenterCrop(8))
    setup = Setup.of(watch(ShardLoader(data, num_workers=2, resident="ram")))
    assert setup.kind == "resident"
    for waits in ([0.5] * 20, [0.0] * 19 + [5.0]):
        text = judge(waits, [0.05] * 20, None, setup).text
        assert "gathered from memory" in text and "worker" not in text and "prefetch" not in text


class SlowWhenSquare:
    """A transform that takes long for one image, which it knows by its shape."""

    def __call__(self, image: Image.Image) -> np.ndarray:
        if image.size == (16, 16):
            time.sleep(0.5)  # work, as above
        return np.asarray(image.resize((8, 8)))


def asleep(image: Image.Image) -> np.ndarray:
    time.sleep(0.01)  # as one that asks a server
    return np.asarray(image)


def test_a_transform_that_waits_is_told_from_one_that_computes(
    packed: Callable[..., Path],
) -> None:
    data = ShardDataset(packed([40], image=jpeg), batch_size=2, fields=("image",), transform=asleep)
    with ShardLoader(data, num_workers=1) as loader:
        watched = watch(loader, None, print=None)
        for _ in watched:
            pass
    assert "it waits more than it computes" in watched.verdict
    assert "threads=4 (now 1)" in watched.verdict


def test_a_shardloader_tells_its_stages_and_its_slow_record(packed: Callable[..., Path]) -> None:
    slow = 23
    path = packed([30, 30], image=lambda i: jpeg(i, (16, 16) if i == slow else (24, 16)))
    data = ShardDataset(
        path, batch_size=4, fields=("image", "label"), transform=SlowWhenSquare(), shuffle=False
    )
    loader = ShardLoader(data, num_workers=0, prefetch_factor=1)
    assert Setup.of(loader)[:5] == ("ShardLoader", 0, 1, 1, False)
    with loader:
        watched = watch(loader, None, print=None)
        assert sum(len(labels) for _, labels in watched) == 60
    report = watched.report()
    assert report is not None and report.measured == 14
    assert report.slowest[0].slowest_key == f"k/{slow:06d}.jpg"
    assert report.slowest[0].slowest_record == slow
    assert max(report.stages, key=lambda stage: report.stages[stage]) == "transform"
    assert watched.verdict  # of what the wait was, the machine decides
