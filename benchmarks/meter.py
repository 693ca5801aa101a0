"""What watching a loader costs a step: `shardio.watch`, reports, lines and logs included.

The loader hands out one object again and again, so that what a batch takes is the loop's own cost,
and the watch's. "hot": nothing else runs, so code and data stay in the CPU's caches. "cold": 16 MB
are copied between two batches, as a training step would; there only next() is timed. Times are CPU
times of the loop's thread: a watch waits for nothing, and other programs do not add to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import thread_time
from typing import Any

import numpy as np

from . import data
from .harness import Result, interleave, median

BARE, MADE = "no watch", "no watch, made told"
WATCHED = {  # entry: its options, and whether the loader tells how a batch was made
    "every=1": (1, False),
    "every=10": (10, False),
    "every=100": (100, False),
    "every=100, made told": (100, True),
    "every=None": (None, False),
}


class Repeated:
    """So many batches, all the same. `told`: with `batch_stats`, as ShardLoader has it."""

    def __init__(self, count: int, told: bool) -> None:
        self.count, self.told = count, told

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return _Telling(self.count) if self.told else iter(range(self.count))


class _Telling(Iterator[int]):
    def __init__(self, count: int) -> None:
        from shardio.loader.stats import BatchStats

        self._left = count
        self._ready = [
            BatchStats(
                256, 0.0, *(0.01,) * 4, 0.001, 0.002, i % 4, 0.01 * i, i, b"class/%04d.jpg" % i
            )
            for i in range(16)
        ]
        self.batch_stats: Any = None

    def __next__(self) -> int:
        if not self._left:
            raise StopIteration
        self._left -= 1
        self.batch_stats = self._ready[self._left % 16]
        return self._left


def run(source: data.Data, result: Result) -> None:
    rounds, hot, cold = (2, 5_000, 50) if source.quick else (9, 100_000, 1_000)
    result.data(batches_hot=hot, batches_cold=cold)
    for kind, batches, one_round in (("hot", hot, _hot), ("cold", cold, _cold)):
        processes = {
            BARE: _round(one_round, Repeated(batches, False)),
            MADE: _round(one_round, Repeated(batches, True)),
        } | {
            name: _round(one_round, Repeated(batches, told), every)
            for name, (every, told) in WATCHED.items()
        }
        for one in processes.values():
            one()
        measured = interleave(processes, rounds)
        result.raw(kind, measured)
        result.table(f"A batch through a watch, {kind}", measured, {"us": "us a batch"})
        for name in ("every=100", "every=100, made told"):
            bare = MADE if WATCHED[name][1] else BARE
            cost = median(measured[name], "us") - median(measured[bare], "us")
            result.target(f"cost of watch(loader, {name}), {kind}", cost, 10, unit="us a step")


def _round(
    one_round: Callable[[Any], float], loader: Repeated, every: int | None = 0
) -> Callable[[], dict[str, Any]]:
    from shardio import watch

    lines: list[str] = []
    logged: list[dict[str, float]] = []

    def measured() -> dict[str, Any]:
        if every == 0:
            return {"us": one_round(loader) * 1e6}
        watched = watch(loader, every, print=lines.append, log=logged.append)
        found = {"us": one_round(watched) * 1e6}
        assert lines and logged
        lines.clear()
        logged.clear()
        return found

    return measured


def _hot(batches: Any) -> float:
    """Seconds a batch."""
    began = thread_time()
    for _ in batches:
        pass
    return (thread_time() - began) / len(batches)


def _cold(batches: Any) -> float:
    """Seconds in next(), a batch: the mean, since reports are rare, and dear."""
    one, other = np.zeros(1 << 20), np.zeros(1 << 20)  # 8 MB each
    spent = 0.0
    iterator = iter(batches)
    while True:
        np.copyto(one, other)
        began = thread_time()
        if next(iterator, None) is None:
            break
        spent += thread_time() - began
    return spent / len(batches)
