"""The watch over a loader: exact times by a clock of the tests, and real loaders."""

import copy
import gc
import math
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
from PIL import Image
from support.small_datasets import jpeg
from torch.utils.data import DataLoader, Dataset

from shardio import ShardDataset
from shardio.errors import OptionError
from shardio.loader.shard_loader import ShardLoader
from shardio.loader.stats import BatchStats
from shardio.tuning import meter
from shardio.tuning.meter import watch
from shardio.tuning.verdict import Setup, Times


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


def last(watched: Any) -> meter.Report:
    """The last report, which there is."""
    report = watched.report()
    assert isinstance(report, meter.Report)
    return report


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
        report = last(watched)
        assert report.first_s == 14.0
        assert report.data.max == 0.25 and report.step.max == 0.5
        assert next(iterator, None) is None
        report = last(watched)
        assert report.first_s is None  # only once a pass
        assert report.data.max == 0.25 and report.step.max == 0.5
    assert report.watched == 8 and report.batch == 4


def test_a_wait_for_a_device_that_is_behind_is_the_steps_time(clock: Clock) -> None:
    watched = watch(Loader(clock, [1.0] * 4), None, print=None)
    iterator: Any = iter(watched)
    iterator._batches.blocked_s = 0.25  # as device.DevicePrefetcher says it
    for _ in iterator:
        clock.now += 0.5
    report = last(watched)
    assert report.data.max == report.step.max == 0.75


@pytest.mark.parametrize("idle, data", [(0.0, 0.0), (0.25, 0.25), (9.0, 0.75), (None, 0.75)])
def test_a_wait_costs_what_the_device_idles(clock: Clock, idle: float | None, data: float) -> None:
    """Nobody synchronises: while the loop waits, the device computes the steps before."""
    watched = watch(Loader(clock, [1.0] * 4), None, print=None)
    iterator: Any = iter(watched)
    iterator._batches.blocked_s, iterator._batches.idle_s = 0.25, idle
    for _ in iterator:
        clock.now += 0.5
    report = last(watched)
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
    report = last(watched)
    assert report.measured == 20 and report.first_s == 14.0
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
    report = last(watched)
    assert report.batch == 30 and report.watched == 51


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
    report = last(nested)
    assert report.data.max == 1.0 and report.step.max == 0.5


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
    report = last(watched)
    assert report.stages["decode"] == pytest.approx(1.55 / 6)  # the first batch is in no report
    assert [(one.slowest_s, one.slowest_record) for one in report.slowest] == [
        (0.9, 3), (0.2, 7), (0.05, 1),
    ]  # fmt: skip


def test_batches_whose_making_is_not_known_are_no_zeros(clock: Clock) -> None:
    made: list[Any] = [None, BatchStats(read_s=1.0), "by hand", BatchStats(read_s=3.0)]
    watched = watch(Loader(clock, [1.0] * 4, made), print=None)
    train(watched, clock)
    report = last(watched)
    assert report.stages["read"] == 2.0


def test_stages_too_are_of_the_batches_since_the_report_before(clock: Clock) -> None:
    logged: list[dict[str, float]] = []
    made = [
        BatchStats(read_s=seconds, slowest_record=3) for seconds in (9.0, 1.0, 1.0, 2.0, 4.0, 5.0)
    ]
    watched = watch(Loader(clock, [1.0] * 6, made), 3, log=logged.append, print=None)
    train(watched, clock)
    assert [one["loader/read_s"] for one in logged] == [1.0, pytest.approx(11 / 3)]


# --- verdicts -------------------------------------------------------------------------------------


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
    report = last(watched)
    assert report.measured == 14
    assert report.slowest[0].slowest_key == f"k/{slow:06d}.jpg"
    assert report.slowest[0].slowest_record == slow
    assert max(report.stages, key=lambda stage: report.stages[stage]) == "transform"
    assert watched.verdict  # of what the wait was, the machine decides
