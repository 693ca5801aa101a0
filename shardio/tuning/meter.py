"""Is the loader fast enough? The time a training loop waits for batches, beside the time it works.

    for images, labels in shardio.watch(loader, every=100):
        ...

How it works. A loop is in one of two places: in the loader's next(), where it waits, or between two
of these, where it trains. `watch` reads the clock at both borders: data time and step time. Each
report is of the batches since the one before, so that a loader that gets slower is not hidden by
an hour of good times; the first batch of a pass, which starts workers and compiles kernels, stands
apart. `judge` says in words what the times of a pass mean, and what to change: one thing.

A loader whose iterator has the attribute `batch_stats`, as that of ShardLoader has, also tells how
each batch was made, and by that which stage is the limit, and which records were slow. Over a torch
DataLoader, the state that its dataset shares with the workers tells of requests to object stores.
"""

from __future__ import annotations

import math
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import machine
from ..errors import printable
from ..loader.stats import BatchStats
from ..storage.ranges import RequestCount
from ..units import check_int, show_count, unexpected

T = TypeVar("T")
Seconds = NDArray[np.float64]

# Data time over step time. At 0.1 no loader can make training more than a tenth faster, which is
# what two runs of one program on one machine may differ by.
ALARM: Final = 0.1
LEAST: Final = 10  # batches behind a verdict: fewer are mostly those that were prefetched
# Pattern "one late batch in every W": so many distances between late batches, and this part of them
# is W. If late batches came by chance, W = 2, where that is easiest, would pass once in 60 times.
GAPS: Final = 5
REGULAR: Final = 0.8
LATE: Final = 3.0  # late batches wait so many times as long as others; else nothing is a pattern
FEW: Final = 0.1  # part of the batches that is late: a longer queue hides so many, and no more
UNEVEN: Final = 1.5  # time for a row, over that of the other workers; two on one core have 2
WAITS: Final = 0.3  # CPU time over the time of the work: below it, more threads do more at a time
QUEUE: Final = 32  # batches of a process ahead, the most that is advised: they take memory
FAILING: Final = 0.01  # of the requests to a store that fail: below, it is as stores are
SLOWEST: Final = 5  # records to name
FOLD: Final = 1024  # batches that are kept as they came; then they are summed up
KEPT: Final = 1 << 16  # batches that a verdict is of: the last ones, to twice as many, in 2 MB
_TICK_S: Final = 1e-9  # an empty loop is faster than the clock

# In the loader's processes, in parallel.
WORKER_STAGES: Final = ("read", "decode", "transform", "collate")
TRAINER_STAGES: Final = ("transport", "device")  # in the trainer, one batch after another
STAGES: Final = (*WORKER_STAGES, *TRAINER_STAGES)


@dataclass
class BatchTotals:
    """Sum up the `BatchStats` of many batches."""

    batches: int = 0
    cpu_s: float = 0.0
    requests: int = 0  # to object stores; with those that failed, and were sent again
    retries: int = 0
    throttled: int = 0  # of these, refused because there were too many
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    workers: dict[int, tuple[float, int]] = field(default_factory=dict)  # seconds, rows of each
    slowest: tuple[BatchStats, ...] = ()  # those with the SLOWEST records, the slowest first

    def add(self, stats: Sequence[BatchStats]) -> None:
        """Add the stats of some batches."""
        for stage, seconds in zip(STAGES, list(zip(*stats, strict=True))[2:8], strict=False):
            self.seconds[stage] += sum(seconds)
        for one in stats:
            spent, rows = self.workers.get(one.worker, (0.0, 0))
            self.cpu_s += one.cpu_s
            self.requests += one.requests
            self.retries += one.retries
            self.throttled += one.throttled
            self.workers[one.worker] = (spent + sum(one[2:6]), rows + one.rows)
        self.batches += len(stats)
        known = (one for one in stats if one.slowest_record >= 0 or one.slowest_key)
        by_time = sorted((*self.slowest, *known), key=lambda one: one.slowest_s)
        each = {(one.slowest_record, one.slowest_key): one for one in by_time}  # its slowest time
        slowest = sorted(each.values(), key=lambda one: -one.slowest_s)
        self.slowest = tuple(slowest[:SLOWEST])


class Setup(NamedTuple):
    """Say what a loader is, and what it may use: which knobs there are, and where they stand."""

    kind: Literal["", "DataLoader", "ShardLoader", "resident"] = ""  # "": any other iterable
    workers: int | None = None  # processes; 0: in the training loop's own; None: not known
    threads: int = 1  # in each of them
    prefetch: int | None = None
    restarts: bool = False  # its workers start anew for each pass
    cores: int = 1  # for this rank
    device: str = ""  # the type of that it brings batches to; "": none, or not known
    copies: bool = False  # it copies each batch
    tiles: bool = False  # its photographs are tile JPEGs
    decodes: bool = False  # the device decodes, by a thread of the training loop's process
    torch_threads: int = 0  # of the training loop's process; 0: not known

    @staticmethod
    def of(loader: Any) -> Setup:
        """Read the attributes of a loader, or of one that hands them through."""

        def number(name: str) -> int | None:
            value = getattr(loader, name, None)
            return value if isinstance(value, int) else None

        cores = _cores()
        if getattr(loader, "resident", None):
            return Setup("resident", cores=cores)  # its workers left when all was decoded
        workers, threads = number("num_workers"), number("threads")
        if workers is None:
            return Setup(cores=cores)
        options = _attribute(loader, "dataset", "manifest", "options")  # any may be watched
        found = Setup(
            "DataLoader",
            workers,
            prefetch=number("prefetch_factor"),
            cores=cores,
            device=str(_attribute(loader, "target", "device", "type") or ""),
            tiles=isinstance(options, dict) and bool(options.get("tiles")),
            decodes=_attribute(loader, "dataset", "device_crop") is not None,
        )
        if threads is None:
            restarts = workers > 0 and not getattr(loader, "persistent_workers", False)
            return found._replace(restarts=restarts)
        torch = sys.modules.get("torch")
        return found._replace(
            kind="ShardLoader",
            threads=max(1, threads),
            copies=bool(getattr(loader, "copy", False)),
            torch_threads=torch.get_num_threads() if torch else 0,
        )


# --- what is told ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Times:
    """Statistics of some seconds."""

    mean: float
    median: float
    p95: float
    max: float

    @staticmethod
    def of(seconds: Iterable[float]) -> Times:
        """Sum up some seconds, one at least."""
        # Sorted by Python: 4 us of 100 numbers. numpy.percentile takes 60 us, of however many.
        ordered = sorted(seconds)
        last = len(ordered) - 1

        def quantile(part: float) -> float:  # between two neighbours on a line, as numpy has it
            below, rest = divmod(part * last, 1)
            low, high = ordered[int(below)], ordered[min(last, int(below) + 1)]
            return low + (high - low) * rest

        return Times(sum(ordered) / len(ordered), quantile(0.5), quantile(0.95), ordered[-1])

    def __str__(self) -> str:
        more = f"median {_show(self.median)}, p95 {_show(self.p95)}, max {_show(self.max)}"
        return f"{_show(self.mean)} ({more})"


@dataclass(frozen=True)
class Report:
    """Report on the batches since the report before; the first one of the pass is in neither."""

    rank: int | None  # None: not distributed
    batch: int  # of this pass, so far
    batches: int | None  # of the whole pass, where the loader has a length
    watched: int  # batches of all passes, so far
    measured: int  # batches that the times are of
    data: Times  # seconds in the loader's next()
    step: Times  # seconds between
    first_s: float | None  # start-up: to the first batch of this pass; None in later reports
    stages: dict[str, float]  # seconds a batch in each of STAGES; {} where the loader tells none
    slowest: tuple[BatchStats, ...]  # with the slowest records, the slowest first
    alarm: float  # of the watch

    @property
    def ratio(self) -> float:
        """Return data time over step time, of the means: waiting adds up, however rare it is."""
        return self.data.mean / max(self.step.mean, _TICK_S)

    @property
    def late(self) -> bool:
        """Return True if the loop waited longer than the alarm allows."""
        return self.ratio > self.alarm

    def scalars(self) -> dict[str, float]:
        """Return the numbers that `log` gets, by names for TensorBoard and the like."""
        found = {
            f"loader/{what}_{name}_s": value
            for what, times in (("data", self.data), ("step", self.step))
            for name, value in vars(times).items()
        }
        found["loader/data_over_step"] = self.ratio
        if self.first_s is not None:
            found["loader/first_batch_s"] = self.first_s
        return found | {f"loader/{stage}_s": value for stage, value in self.stages.items()}

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        of = "" if self.batches is None else f" of {self.batches:,}"
        ratio = f"{self.ratio:,.0f}" if self.ratio >= 99.5 else f"{self.ratio:.2g}"
        above = f", above {self.alarm:g}" if self.late else ""
        first = "" if self.first_s is None else f"; first batch {_show(self.first_s)}"
        return (
            f"{_name(self.rank)}batch {self.batch:,}{of}: data {self.data}, step {self.step}, "
            f"data/step {ratio}{above}{first}"
        )


@dataclass(frozen=True)
class Verdict:
    """Say what the times of a pass mean."""

    bound: Literal["compute", "loader", "start-up", "unknown"]
    share: float  # of the time, spent waiting for batches
    stage: str  # of STAGES, the one that limits a loader; "": not known
    text: str  # in words, with the one thing to change

    def __repr__(self) -> str:
        return f"<{self.bound}: {self.text}>"

    def __str__(self) -> str:
        return self.text


def to_stderr(line: str) -> None:
    """Print a line on stderr, at once."""
    print(line, file=sys.stderr, flush=True)


# --- the watch ------------------------------------------------------------------------------------


class watch(Generic[T]):  # lower case, as enumerate and zip
    """Watch a loader: hand out its batches, and say in a line how long they were waited for.

    loader   any iterable of batches. What else it can do (len, set_epoch, dataset, state_dict ...)
             the watched one can as well
    every    batches between reports; None: only at the end of each pass
    alarm    data time over step time, of the means, above which a pass is called loader-bound, and
             ranks other than 0 speak up
    log      gets the numbers of each report, on every rank that gives it: a SummaryWriter, anything
             with log(dict) such as a run of wandb, or a function of a dict
    print    a function of one line, such as tqdm.write or logger.info; None: silent. Default:
             to stderr

    Each `iter()` is a pass of its own, with a verdict at its end. A loop that is left early prints
    none; `verdict` has it nevertheless. Raises OptionError.
    """

    def __init__(
        self,
        loader: Iterable[T],
        every: int | None = 100,
        *,
        alarm: float = ALARM,
        log: Any = None,
        print: Callable[[str], object] | None = to_stderr,
    ) -> None:
        self.loader = loader
        self._every = sys.maxsize if every is None else check_int("every (batches)", every)
        if isinstance(alarm, bool) or not isinstance(alarm, (int, float)) or not alarm >= 0:
            raise unexpected("alarm", alarm, "data time over step time, 0 or more")
        if print is not None and not callable(print):
            raise unexpected("print", print, "a function of a line, or None")
        self._alarm = alarm
        self._log = _logger(log)
        self._print = print
        self._pass: _Pass | None = None
        self._watched = 0  # batches of the passes before
        self._report: Report | None = None

    def __repr__(self) -> str:
        return f"<watch of {self.loader!r}>"

    def __iter__(self) -> Iterator[T]:
        if self._pass is not None:
            self._watched += self._pass.taken
        self._pass = _Pass(self.loader)
        return _Batches(self, self._pass)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith("__"):  # copying asks before there is a loader
            raise AttributeError(f"watch has no attribute {name!r}")
        return getattr(self.loader, name)

    def report(self) -> Report | None:
        """Return the last report; None before the first."""
        return self._report

    def judge(self) -> Verdict | None:
        """Judge the last pass: done, under way, or left early. None before the first."""
        return None if self._pass is None else self._pass.judge(self._alarm)

    @property
    def verdict(self) -> str:
        """Return the verdict in words; "" before the first pass."""
        return str(self.judge() or "")

    def _tell(self, seen: _Pass) -> None:
        """Report what is new in a pass, to all who want it."""
        report = self._report = seen.report(self._watched, self._alarm)
        if self._log is not None:
            self._log(report.scalars(), report.watched)
        if self._print is not None and (not report.rank or report.late):
            self._print(str(report))

    def _end(self, seen: _Pass) -> None:
        """Report the rest of a pass, and its verdict."""
        if seen.new:
            self._tell(seen)
        verdict = seen.judge(self._alarm)
        if self._print is not None and (not seen.rank or verdict.bound == "loader"):
            self._print(f"{_name(seen.rank)}{verdict}")


class _Batches(Iterator[T]):
    """Iterate over one pass. It alone holds the loader's iterator, whose workers end with it."""

    def __init__(self, watched: watch[T], seen: _Pass) -> None:
        self._watch, self._pass = watched, seen
        self._report_at = watched._every  # batches of this pass at the next report
        self._look_at = min(watched._every, FOLD)
        self._began = perf_counter()
        self._handed = 0.0  # when the last batch was handed out; 0: its step is not measured
        self._ended = False
        self._batches = iter(watched.loader)

    @property
    def batch_stats(self) -> BatchStats | None:
        """Return how the last batch was made, where the loader tells."""
        return getattr(self._batches, "batch_stats", None)

    # At every=100, lines and logs included: 0.9 us a batch in a loop of nothing else, 4 with cold
    # caches; where the loader tells `batch_stats`, 2.6 and 6 us (benchmarks/results/meter.json).
    def __next__(self) -> T:
        asked, seen = perf_counter(), self._pass
        if self._handed:
            seen.step.append(asked - self._handed)
            self._handed = 0.0
        if seen.taken >= self._look_at:
            self._look()
            asked = perf_counter()  # reporting is neither the loader's time nor the step's
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._ended:
                self._ended = True
                self._watch._end(seen)
            raise
        handed = perf_counter()
        seen.taken += 1
        if seen.taken == 1:
            seen.first_s = handed - self._began
            return batch
        # While a device still computes, waiting is the step's time (device.DevicePrefetcher).
        waited = handed - asked - getattr(self._batches, "blocked_s", 0.0)
        idle = getattr(self._batches, "idle_s", None)
        if idle is not None and idle < waited:
            waited = idle
        seen.behind += bool(getattr(self._batches, "behind", False))
        self._handed = asked + waited
        seen.data.append(waited)
        stats = getattr(self._batches, "batch_stats", None)
        if isinstance(stats, BatchStats):  # others may call other things so
            seen.stats.append(stats)
        return batch

    def _look(self) -> None:
        """Sum up the stats so far, and report where a report is due."""
        seen = self._pass
        seen.fold()
        if seen.taken >= self._report_at:
            self._report_at += self._watch._every
            if seen.new:
                self._watch._tell(seen)
        self._look_at = min(self._report_at, seen.taken + FOLD)


class _Pass:
    """Keep the times of one pass. Batch k has a data time, and that of the step that used it."""

    def __init__(self, loader: Any) -> None:
        self.rank = _rank()
        self.setup = Setup.of(loader)
        self.batches = _length(loader)
        self.taken = 0
        self.behind = 0  # batches, but for the first, at which the device was a whole step behind
        self.first_s: float | None = None
        self.data, self.step = array("d"), array("d")  # at most 2 x KEPT + FOLD, the last ones
        self.stats: list[BatchStats] = []  # not summed up yet
        self._reported = 0  # of the steps that are kept, how many were reported
        self._since = BatchTotals()  # since the last report
        self._totals = BatchTotals()  # of the pass
        self._told_first = False
        self._epochs = _attribute(loader, "dataset", "epochs")  # any loader may be watched
        self._requests = getattr(self._epochs, "requests", None)

    @property
    def new(self) -> bool:
        """Return True if there is something to report."""
        return len(self.step) > self._reported

    def fold(self) -> None:
        """Sum up the stats, and drop the times of all but the last batches."""
        self._since.add(self.stats)
        self._totals.add(self.stats)
        self.stats.clear()
        before = self._requests
        if isinstance(before, RequestCount):  # of a DataLoader, whose iterator tells nothing
            self._requests = self._epochs.requests
            for totals in (self._since, self._totals):
                totals.requests += self._requests.requests - before.requests
                totals.retries += self._requests.retries - before.retries
                totals.throttled += self._requests.throttled - before.throttled
        dropped = len(self.step) - KEPT
        if dropped >= KEPT:
            del self.data[:dropped], self.step[:dropped]
            self._reported = max(0, self._reported - dropped)

    def report(self, watched: int, alarm: float) -> Report:
        """Report on what is new. watched: the batches of the passes before."""
        self.fold()
        data, step = self.data[self._reported :], self.step[self._reported :]
        totals, self._since = self._since, BatchTotals()
        self._reported = len(self.step)
        first, self._told_first = None if self._told_first else self.first_s, True
        stages = totals.seconds if totals.batches else {}
        return Report(
            rank=self.rank,
            batch=self.taken,
            batches=self.batches,
            watched=watched + self.taken,
            measured=len(step),
            data=Times.of(data),
            step=Times.of(step),
            first_s=first,
            stages={stage: seconds / totals.batches for stage, seconds in stages.items()},
            slowest=totals.slowest,
            alarm=alarm,
        )

    def judge(self, alarm: float) -> Verdict:
        """Judge the pass so far."""
        self.fold()
        data = self.data[: len(self.step)]  # without that whose step is under way
        found = {"first_s": self.first_s or 0.0, "behind": self.behind / max(1, self.taken - 1)}
        return judge(data, self.step, self._totals, self.setup, alarm=alarm, **found)


# --- the verdict ----------------------------------------------------------------------------------


def judge(
    data: ArrayLike,
    step: ArrayLike,
    totals: BatchTotals | None = None,
    setup: Setup | None = None,
    *,
    alarm: float = ALARM,
    first_s: float = 0.0,
    behind: float = 0.0,
) -> Verdict:
    """Say what the times of a pass mean, and the one thing to change.

    data, step: seconds of each batch but the first, (n,); totals: of the same batches, where it is
    known; first_s: seconds to the first batch; behind: part of the batches at which the device was
    a whole step behind.
    """
    totals, setup = totals or BatchTotals(), setup or Setup()
    found = _judge(data, step, totals, setup, alarm, first_s)
    if found.bound == "compute" and setup.decodes and setup.device == "cuda":
        found = _judge_beside_decoding(found, behind, alarm)
    return replace(found, text=found.text + _failing(totals))


def _judge(
    data: ArrayLike,
    step: ArrayLike,
    totals: BatchTotals,
    setup: Setup,
    alarm: float,
    first_s: float,
) -> Verdict:
    data, step = np.asarray(data, np.float64), np.asarray(step, np.float64)
    waited, worked = float(data.sum()), float(step.sum())
    # Workers that start anew cost more than all other waiting, and more than `alarm` allows.
    if setup.restarts and len(step) and first_s > max(waited, alarm * worked):
        total = first_s + waited + worked
        return Verdict(
            "start-up",
            (first_s + waited) / total,
            "",
            f"start-up-bound: the first batch took {_show(first_s)} of the pass's {_show(total)}: "
            "persistent_workers=True keeps the workers from pass to pass",
        )
    share = waited / max(waited + worked, _TICK_S)
    if len(step) < LEAST:
        few = f"too few batches to judge: {len(step)} after the first, expected {LEAST} or more"
        return Verdict("unknown", share, "", few)
    waiting = f"waiting for batches is {_percent(share)} of the time"
    if waited / max(worked, _TICK_S) <= alarm:
        text = f"compute-bound: {waiting}, and there is no more to gain from a faster loader"
        return Verdict("compute", share, "", text)

    found, mean_step = Times.of(data.tolist()), worked / len(step)
    waiting += (
        f" ({_show(found.mean)} a batch, median {_show(found.median)}, max {_show(found.max)}; "
        f"a step takes {_show(mean_step)})"
    )
    late: NDArray[np.bool_] = data > (1 - 1e-9) * found.mean  # all that are equal: it is rounded
    stage, limit = _stage(totals, found.mean)
    advice = limit + (_waits(stage, totals, setup, waited + worked) or _knob(stage, setup))
    if stage == "read" and totals.requests:
        advice = limit + _REMOTE
    if setup.kind == "resident":
        advice = (
            'Batches are gathered from memory: larger ones, or resident="device", cost less a row'
        )
    elif setup.workers and _one_in_every(setup.workers, data, late):
        uneven = _uneven(totals, setup)
        blamed = "they do not keep up" if totals.workers else "they, or one of them, do not keep up"
        pattern = f"One batch in every {setup.workers} is late, the number of workers: "
        advice = pattern + (uneven or f"{blamed}; {advice}")
    elif stage not in TRAINER_STAGES and found.median <= alarm * mean_step and late.mean() <= FEW:
        wait = float(data[late].mean())
        stage, advice = "", _few_late(wait, mean_step, totals, setup)
    stop = ";" if advice[0].islower() else "."
    return Verdict("loader", share, stage, f"loader-bound: {waiting}{stop} {advice}")


def _judge_beside_decoding(found: Verdict, behind: float, alarm: float) -> Verdict:
    """Judge a loop that never waits, while a thread of its process decodes on its GPU.

    The thread makes the loop slower, since they share Python's lock, and no data time tells: an
    H100 that trained at 0.46 of its speed still had work at most hand-outs (docs/meter.md).
    """
    waiting = f"waiting for batches is {_percent(found.share)} of the time"
    if behind >= 1 - alarm:
        text = f"compute-bound: {waiting}, and the GPU nearly always had work: the steps', and "
        return replace(found, text=f"{text}some of the loader's, which crops there")
    text = (
        f"not known: {waiting}, but the GPU was a whole step behind at only {_percent(behind)} of "
        "the batches, so it may run out of work within the steps. Where these do not wait for it "
        "(loss.item()), the host is the limit: decode='cuda' decodes by a thread of this process, "
        "which shares Python's lock with the loop. Compare the speed with that of decode='pil'"
    )
    return replace(found, bound="unknown", text=text)


_REMOTE: Final = (
    "batches wait for the network, not for the processor: keep what is read on a disk here "
    "(storage=shardio.Storage(cache=DIR, cache_bytes=...)), or read from a store that is nearer"
)


def _failing(totals: BatchTotals) -> str:
    """Say how many requests failed, as sentences to add; "": too few to mention."""
    if totals.retries <= FAILING * totals.requests:
        return ""
    of = f"of {totals.requests:,} requests"
    if totals.throttled > totals.retries / 2:
        return (
            f". The store refused {totals.throttled:,} {of} as too many, and all wait until it "
            "takes more: fewer workers, or ask for a higher limit"
        )
    return (
        f". {totals.retries:,} {of} failed and were sent again, without harm to the data: the "
        "network or the store is at fault"
    )


def _stage(totals: BatchTotals, waited: float) -> tuple[str, str]:
    """Return the stage that limits a loader, and the words for it; "" where nobody told.

    waited: seconds a batch.
    """
    seconds = {stage: total / max(1, totals.batches) for stage, total in totals.seconds.items()}
    # The trainer's own part of data time. Where it is most of it, faster workers change nothing.
    stage = max(TRAINER_STAGES, key=lambda stage: seconds[stage])
    if seconds[stage] > waited / 2:
        part = _percent(min(1.0, seconds[stage] / waited))
        return stage, f"{stage} is the limit ({part} of the wait): "
    work = sum(seconds[stage] for stage in WORKER_STAGES)
    if not work:
        return "", ""
    stage = max(WORKER_STAGES, key=lambda stage: seconds[stage])
    return stage, f"{stage} is the limit ({_percent(seconds[stage] / work)} of the loader's work): "


def _waits(stage: str, totals: BatchTotals, setup: Setup, elapsed: float) -> str:
    """Advice where decode or transform waits for something while cores are idle; "": it does not.

    elapsed: seconds, of the same batches.
    """
    work = sum(totals.seconds[stage] for stage in WORKER_STAGES)
    idle = 0 < totals.cpu_s < min(WAITS * work, setup.cores * elapsed / 2)
    if stage not in ("decode", "transform") or setup.kind != "ShardLoader" or not idle:
        return ""
    return (
        f"it waits more than it computes (CPU time is {_percent(totals.cpu_s / work)} of it): "
        f"threads={4 * setup.threads} (now {setup.threads})"
    )


def _one_in_every(workers: int, data: Seconds, late: NDArray[np.bool_]) -> bool:
    """Return True if one batch of as many as there are workers is late, the others not.

    Workers that are too slow, but all alike, finish a batch each at about the same time: one is
    waited for, the rest are there. One that is slower than all others is waited for in its turn.
    """
    gaps = np.diff(np.flatnonzero(late))
    if workers < 2 or len(gaps) < GAPS or (gaps == workers).mean() < REGULAR:
        return False
    return bool(data[late].mean() > LATE * data[~late].mean())


def _uneven(totals: BatchTotals, setup: Setup) -> str:
    """Advice where one worker is slower than the others; "" where none is, or nobody told."""
    each = {worker: seconds / rows for worker, (seconds, rows) in totals.workers.items() if rows}
    if len(each) < 2:
        return ""
    slowest = max(each, key=lambda worker: each[worker])
    others = float(np.median([each[worker] for worker in each if worker != slowest]))
    if each[slowest] <= UNEVEN * others:
        return ""
    return (
        f"worker {slowest} takes {each[slowest] / max(others, 1e-9):.1f} times as long for a row "
        "as the others. Something else uses its core: stop that, or take fewer workers "
        f"(now {setup.workers}; {show_count(setup.cores, 'core')} here)"
    )


def _few_late(late: float, step: float, totals: BatchTotals, setup: Setup) -> str:
    """Advice where most batches are there in time, and a few are not. Seconds: the wait for one of
    those, and a step."""
    knob = "prefetch more batches, which hides them"
    if setup.workers == 0:  # there is no queue
        knob = _more(setup) or knob
    elif setup.workers and setup.prefetch:
        # What is queued before a slow batch is used while it is made.
        enough = setup.prefetch + math.ceil(round(late / max(step * setup.workers, 1e-9), 3))
        wanted = min(max(enough, 2 * setup.prefetch), max(QUEUE, 2 * setup.prefetch))
        what = "them" if wanted >= enough else "more of them"
        knob = f"prefetch_factor={wanted} (now {setup.prefetch}) hides {what}"
    found = "Most batches are there in time, a few are late"
    if not totals.slowest:
        who = "" if totals.batches else ". ShardLoader names the records that were slow"
        return f"{found}: {knob}{who}"
    slowest = totals.slowest[0].slowest_s
    if slowest < late / 2:
        return (
            f"{found}, and no record was slow (at most {_show(slowest)}), so the storage, or "
            f"another program, pauses: {knob}"
        )
    named = ", ".join(
        f"{printable(one.slowest_key)} (record {one.slowest_record:,}, {_show(one.slowest_s)})"
        for one in totals.slowest
        if one.slowest_s > slowest / 4  # others are not of that kind
    )
    return f"{found}: {knob}. The slowest records: {named}"


def _knob(stage: str, setup: Setup) -> str:
    """Return the one thing to change for a stage."""
    more, told = _more(setup), "ShardLoader says which stage is the limit"
    unknown = f"more workers, if it has any; {told}"
    if setup.kind == "DataLoader":
        unknown = f"the workers ({setup.workers}) have no idle cores (of {setup.cores}): {told}"
    transport = (
        "views take well under a millisecond, so this process is kept off its core meanwhile: "
        "fewer workers, or fewer threads for torch (torch.set_num_threads)"
    )
    if setup.kind != "ShardLoader" or setup.copies:
        transport = "copy=False" if setup.kind == "ShardLoader" else "shardio.ShardLoader"
    device = "send uint8 from page-locked memory (pin=True), and cast it there"
    if setup.device == "cpu":
        fewer = "fewer threads for torch (torch.set_num_threads), or "
        device = "casting and normalising share the CPU with the workers: "
        device += f"{fewer * (setup.torch_threads != 1)}leave them to the device that trains"
    tiles = "" if setup.tiles else "--jpeg-tiles for crops of photographs, or "
    if setup.decodes:
        device = f"decode='pil' leaves that to the workers; less to decode: shardio pack {tiles}"
        device += "--resize"
    return {
        "": more or unknown,
        "read": "put the shards on a local disk; a larger shuffle window does not help",
        "decode": more or f"less to decode: shardio pack {tiles}--resize",
        "transform": more or "a cheaper transform; casting and normalising cost less on the device",
        "collate": "let transforms return arrays of one shape, which are written into the batch at "
        "once",
        "transport": transport,
        "device": device,
    }[stage]


def _more(setup: Setup) -> str | None:
    """Advise more workers; None where there are no cores for them."""
    if setup.workers is None or (setup.workers and setup.workers * setup.threads >= setup.cores):
        return None
    threads = f" of {setup.threads} threads" if setup.threads > 1 else ""
    wanted = max(setup.workers + 1, setup.cores // setup.threads)
    here = f"{show_count(setup.cores, 'core')} here"
    return f"num_workers={wanted} (now {setup.workers}{threads}; {here})"


# --- where it runs --------------------------------------------------------------------------------


def _rank() -> int | None:
    """Return this process's rank; None where nothing says that there are several."""
    torch = sys.modules.get("torch")  # who has not imported it has no process group
    distributed = torch and torch.distributed
    if distributed and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return _number("RANK")


def _number(name: str) -> int | None:
    """Return a number that a launcher set in the environment; None without one."""
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None


def _length(loader: Any) -> int | None:
    """Return the batches of a pass; None where a loader does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _attribute(value: Any, *names: str) -> Any:
    """Return the attribute of an attribute of a value; None where one of them is missing."""
    for name in names:
        value = getattr(value, name, None)
    return value


def _cores() -> int:
    """Return the cores that this rank may use, a share where several were started here."""
    return max(1, math.ceil(machine.cores()) // max(1, _number("LOCAL_WORLD_SIZE") or 1))


def _logger(log: Any) -> Callable[[dict[str, float], int], None] | None:
    """Return a function of the scalars and the number of batches, for whatever was given."""
    if log is None:
        return None
    if hasattr(log, "add_scalar"):

        def add(scalars: dict[str, float], step: int) -> None:
            for name, value in scalars.items():
                log.add_scalar(name, value, step)

        return add
    send = getattr(log, "log", log)
    if not callable(send):
        raise unexpected(
            "log", log, "a SummaryWriter, something with log(dict), or a function of a dict"
        )
    return lambda scalars, step: send(scalars)


# --- words ----------------------------------------------------------------------------------------


def _name(rank: int | None) -> str:
    """Return the start of a line of this rank; "" where there are no ranks."""
    return "" if rank is None else f"rank {rank}: "


def _percent(share: float) -> str:
    """Write a part of a whole in percent."""
    return f"{share:.0%}" if share >= 0.01 else "less than 1%"


def _show(seconds: float) -> str:
    """Write seconds with three digits, in the unit that suits: 850 us, 50.1 ms, 1.9 s."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    value, unit = (seconds * 1e3, "ms") if seconds < 1 else (seconds, "s")
    return f"{value:,.0f} {unit}" if value >= 99.5 else f"{value:.3g} {unit}"
