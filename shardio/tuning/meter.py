"""Is the loader fast enough? The time a training loop waits for batches, beside the time it works.

    for images, labels in shardio.watch(loader, every=100):
        ...

How it works. A loop is in one of two places: in the loader's next(), where it waits, or between two
of these, where it trains. `watch` reads the clock at both borders: data time and step time. Each
report is of the batches since the one before, so that a loader that gets slower is not hidden by
an hour of good times; the first batch of a pass, which starts workers and compiles kernels, stands
apart. What the times of a pass mean, and what to change, says `verdict.judge`.

A loader whose iterator has the attribute `batch_stats`, as that of ShardLoader has, also tells how
each batch was made, and by that which stage is the limit, and which records were slow. Over a torch
DataLoader, the state that its dataset shares with the workers tells of requests to object stores.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, Generic, TypeVar

from ..dataset.skipping import SkippedInfo
from ..loader.stats import BatchStats
from ..storage.ranges import RequestCount
from ..units import check_int, show_count, unexpected
from .text import show_seconds
from .verdict import (
    ALARM,
    TICK_S,
    BatchTotals,
    Setup,
    Times,
    Verdict,
    attribute_of,
    judge,
    launcher_number,
)

T = TypeVar("T")

FOLD: Final = 1024  # batches that are kept as they came; then they are summed up
KEPT: Final = 1 << 16  # batches that a verdict is of: the last ones, to twice as many, in 2 MB


# --- what is told ---------------------------------------------------------------------------------


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
    skipped: int = 0  # records that on_error="skip" has skipped, in this run so far

    @property
    def ratio(self) -> float:
        """Return data time over step time, of the means: waiting adds up, however rare it is."""
        return self.data.mean / max(self.step.mean, TICK_S)

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
        if self.skipped:
            found["loader/skipped"] = self.skipped
        return found | {f"loader/{stage}_s": value for stage, value in self.stages.items()}

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        of = "" if self.batches is None else f" of {self.batches:,}"
        ratio = f"{self.ratio:,.0f}" if self.ratio >= 99.5 else f"{self.ratio:.2g}"
        above = f", above {self.alarm:g}" if self.late else ""
        first = "" if self.first_s is None else f"; first batch {show_seconds(self.first_s)}"
        skipped = f"; {show_count(self.skipped, 'record')} skipped" if self.skipped else ""
        return (
            f"{_name(self.rank)}batch {self.batch:,}{of}: data {self.data}, step {self.step}, "
            f"data/step {ratio}{above}{first}{skipped}"
        )


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

    def _tell(self, current: _Pass) -> None:
        """Report what is new in a pass, to all who want it."""
        report = self._report = current.report(self._watched, self._alarm)
        if self._log is not None:
            self._log(report.scalars(), report.watched)
        if self._print is not None and (not report.rank or report.late):
            self._print(str(report))

    def _end(self, current: _Pass) -> None:
        """Report the rest of a pass, and its verdict."""
        if current.new:
            self._tell(current)
        verdict = current.judge(self._alarm)
        if self._print is not None and (not current.rank or verdict.bound == "loader"):
            self._print(f"{_name(current.rank)}{verdict}")


class _Batches(Iterator[T]):
    """Iterate over one pass. It alone holds the loader's iterator, whose workers end with it."""

    def __init__(self, watched: watch[T], current: _Pass) -> None:
        self._watch, self._pass = watched, current
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
        began, current = perf_counter(), self._pass
        if self._handed:
            current.step.append(began - self._handed)
            self._handed = 0.0
        if current.taken >= self._look_at:
            self._look()
            began = perf_counter()  # reporting is neither the loader's time nor the step's
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._ended:
                self._ended = True
                self._watch._end(current)
            raise
        handed = perf_counter()
        current.taken += 1
        if current.taken == 1:
            current.first_s = handed - self._began
            return batch
        # While a device still computes, waiting is the step's time (device.DevicePrefetcher).
        waited = handed - began - getattr(self._batches, "blocked_s", 0.0)
        idle = getattr(self._batches, "idle_s", None)
        if idle is not None and idle < waited:
            waited = idle
        current.behind += bool(getattr(self._batches, "behind", False))
        self._handed = began + waited
        current.data.append(waited)
        stats = getattr(self._batches, "batch_stats", None)
        if isinstance(stats, BatchStats):  # others may call other things so
            current.stats.append(stats)
        return batch

    def _look(self) -> None:
        """Sum up the stats so far, and report where a report is due."""
        current = self._pass
        current.fold()
        if current.taken >= self._report_at:
            self._report_at += self._watch._every
            if current.new:
                self._watch._tell(current)
        self._look_at = min(self._report_at, current.taken + FOLD)


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
        self._first_reported = False
        self._epochs = attribute_of(loader, "dataset", "epochs")  # any loader may be watched
        self._requests = getattr(self._epochs, "requests", None)
        dataset = attribute_of(loader, "dataset")
        self._skips = dataset.skips if isinstance(dataset, SkippedInfo) else ()

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
        first, self._first_reported = None if self._first_reported else self.first_s, True
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
            skipped=sum(len(skips.skipped()) for skips in self._skips),
        )

    def judge(self, alarm: float) -> Verdict:
        """Judge the pass so far."""
        self.fold()
        data = self.data[: len(self.step)]  # without that whose step is under way
        found = {"first_s": self.first_s or 0.0, "behind": self.behind / max(1, self.taken - 1)}
        return judge(data, self.step, self._totals, self.setup, alarm=alarm, **found)


# --- where it runs --------------------------------------------------------------------------------


def _rank() -> int | None:
    """Return this process's rank; None where nothing says that there are several."""
    torch = sys.modules.get("torch")  # who has not imported it has no process group
    distributed = torch and torch.distributed
    if distributed and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return launcher_number("RANK")


def _length(loader: Any) -> int | None:
    """Return the batches of a pass; None where a loader does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


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
