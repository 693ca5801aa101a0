"""Judge a pass of a training loop: compute-bound or loader-bound, which stage, and what to change.

`judge` says in words what the times of a pass mean, and what to change: one thing. It is of numbers
alone: `meter` measures them.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import machine
from ..errors import printable
from ..loader.stats import BatchStats
from ..units import show_count
from .text import show_seconds

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
TICK_S: Final = 1e-9  # an empty loop is faster than the clock

# In the loader's processes, in parallel.
WORKER_STAGES: Final = ("read", "decode", "transform", "collate")
TRAINER_STAGES: Final = ("transport", "device")  # in the trainer, one batch after another
STAGES: Final = (*WORKER_STAGES, *TRAINER_STAGES)
_seconds_of = attrgetter(*(f"{stage}_s" for stage in STAGES))  # of a BatchStats, in their order


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
        each = [_seconds_of(one) for one in stats]
        for stage, seconds in zip(STAGES, zip(*each, strict=True), strict=False):
            self.seconds[stage] += sum(seconds)
        for one, seconds in zip(stats, each, strict=True):
            spent, rows = self.workers.get(one.worker, (0.0, 0))
            spent += sum(seconds[: len(WORKER_STAGES)])
            self.workers[one.worker] = (spent, rows + one.rows)
            self.cpu_s += one.cpu_s
            self.requests += one.requests
            self.retries += one.retries
            self.throttled += one.throttled
        self.batches += len(stats)
        known = (one for one in stats if one.slowest_record >= 0 or one.slowest_key)
        by_time = sorted((*self.slowest, *known), key=lambda one: one.slowest_s)
        records = {(one.slowest_record, one.slowest_key): one for one in by_time}  # the slowest
        slowest = sorted(records.values(), key=lambda one: -one.slowest_s)
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
        options = attribute_of(loader, "dataset", "manifest", "options")  # any may be watched
        found = Setup(
            "DataLoader",
            workers,
            prefetch=number("prefetch_factor"),
            cores=cores,
            device=str(attribute_of(loader, "target", "device", "type") or ""),
            tiles=isinstance(options, dict) and bool(options.get("tiles")),
            decodes=attribute_of(loader, "dataset", "device_crop") is not None,
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
        mean, median, p95, longest = map(show_seconds, vars(self).values())
        return f"{mean} (median {median}, p95 {p95}, max {longest})"


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
            f"start-up-bound: the first batch took {show_seconds(first_s)} of the pass's "
            f"{show_seconds(total)}: persistent_workers=True keeps the workers from pass to pass",
        )
    share = waited / max(waited + worked, TICK_S)
    if len(step) < LEAST:
        few = f"too few batches to judge: {len(step)} after the first, expected {LEAST} or more"
        return Verdict("unknown", share, "", few)
    waiting = f"waiting for batches is {_percent(share)} of the time"
    if waited / max(worked, TICK_S) <= alarm:
        text = f"compute-bound: {waiting}, and there is no more to gain from a faster loader"
        return Verdict("compute", share, "", text)

    found, mean_step = Times.of(data.tolist()), worked / len(step)
    waiting += (
        f" ({show_seconds(found.mean)} a batch, median {show_seconds(found.median)}, max "
        f"{show_seconds(found.max)}; a step takes {show_seconds(mean_step)})"
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
            f"{found}, and no record was slow (at most {show_seconds(slowest)}), so the storage, "
            f"or another program, pauses: {knob}"
        )
    named = ", ".join(
        f"{printable(one.slowest_key)} (record {one.slowest_record:,}, "
        f"{show_seconds(one.slowest_s)})"
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


def launcher_number(name: str) -> int | None:
    """Return a number that a launcher set in the environment; None without one."""
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None


def attribute_of(value: Any, *names: str) -> Any:
    """Return the attribute of an attribute of a value; None where one of them is missing."""
    for name in names:
        value = getattr(value, name, None)
    return value


def _cores() -> int:
    """Return the cores that this rank may use, a share where several were started here."""
    return max(1, math.ceil(machine.cores()) // max(1, launcher_number("LOCAL_WORLD_SIZE") or 1))


def _percent(share: float) -> str:
    """Write a part of a whole in percent."""
    return f"{share:.0%}" if share >= 0.01 else "less than 1%"
