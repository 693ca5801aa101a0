"""Batches to the GPU, of raw pixels: nothing is decoded, so that transport is all.

While a ResNet trains, batches are there before they are wanted: how long is the trainer's thread
in next(), and did the copies run beside the step? Before each next() the loop waits until the GPU
is at most two steps behind, outside of what is timed, so that no loader is blamed for a full queue
of the GPU. Then without a model: how many images a second arrive?
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from . import data, trace
from .gpu_feeds import LOADER, PINNED, PLAIN, PREFETCH, RESIDENT, TIMM, Scale, feed, missing
from .harness import (
    START_S,
    Deadline,
    EntryProcess,
    Result,
    add_facts,
    ending,
    interleave,
    median,
    ratio,
    show,
)
from .resnet import training_step

# The most telling first, which are measured where there is little time: targets are of these four.
KINDS = (LOADER, TIMM, PREFETCH, PINNED, RESIDENT, PLAIN)
SKIPPED = 4  # first steps of a round, while workers start
READY, TIMES = 8, 6  # batches that lie ready beside two a worker; those counted of so many
BEHIND = 2  # steps that the GPU may be behind the host
TRACED, DRAWN = 12, 5  # steps
NEXT_MS = 0.3  # what is promised of a batch that is there

Round = Callable[..., dict[str, Any]]


def run(source: data.Data, result: Result, scale: Scale, deadline: Deadline) -> None:
    few = data.pack(
        source.originals(), source.scratch / "few", "--encode", "raw", "--resize", str(scale.size)
    )
    shards = data.repeat(few, source.scratch / "raw", scale.records)
    result.data(transfers={"records": scale.records, "batch": scale.batch, "size": scale.size})
    entries: dict[str, EntryProcess] = {}
    names = [kind for kind in KINDS if not missing(kind)]
    for reason in filter(None, map(missing, KINDS)):
        result.note(reason)
    for kind in names if deadline.enough(START_S) else ():
        options = scale.options(kind=kind, path=str(shards))
        entries[kind] = EntryProcess("gpu_transfers:entry", **options)
    lanes: dict[str, Any] = {}
    about: dict[str, dict[str, Any]] = {}

    def report(measured: dict[str, Any]) -> None:
        _report(result, scale, names, measured, about, lanes)

    with ending(entries):
        for name in deadline.part(0.3).until(entries):
            about[name] = entries[name].round(what="trace")
            lanes[name] = about[name].pop("lanes")
            show(f"  trace, {name}: {about[name]}")
        ways = {name: entries[name].round for name in about}
        measured = interleave(
            ways,
            scale.rounds,
            deadline.part(0.6),
            partial(result.keep, report),
        )
        for name in deadline.each(measured):
            about[name] |= entries[name].round(what="memory")
            about[name] |= entries[name].round(what="close")
            result.keep(report, measured)
    report(measured)
    data.remove(few, shards)


def _report(
    result: Result,
    scale: Scale,
    names: list[str],
    measured: dict[str, Any],
    about: dict[str, dict[str, Any]],
    lanes: Any,
) -> None:
    """Report what there is of these names, in the order in which they were asked."""
    add_facts(measured, about)
    columns = {
        "next_ms": "ms in next(), median",
        "next_p99_ms": "p99",
        "fed": "images/s of the model",
        "alone": "images/s of the model alone",
        "images_per_s": "images/s without a model",
        "overlap": "share of copies beside the step",
        "gpu_idle": "GPU idle",
        "copy_ms": "ms of copying a batch",
        "loader_ms": "ms of kernels of the loader",
    }
    shape = f"{scale.batch} x 3 x {scale.size} x {scale.size}"
    title = f"Batches of {shape} uint8 to {scale.device}, {scale.models[0]}"
    result.table(title, measured, columns, versus=PINNED, by="images_per_s")
    memory = {
        "locked_mb": "page-locked, MB, the most",
        "locked_after_mb": "of it by shardio after close",
        "device_first_mb": "device memory, MB, epoch 1",
        "device_last_mb": "epoch 3",
    }
    asked = {name: [about[name]] for name in measured if "locked_mb" in about[name]}
    result.table("Memory", asked, memory)
    result.raw("transfers", measured)
    result.raw("lanes", lanes)
    result.left_out(title, [name for name in names if name not in measured])
    result.left_out("Memory", [name for name in measured if name not in asked])
    for name in (LOADER, PREFETCH):
        mine, facts = measured.get(name, []), about.get(name, {})
        for key, what in (("next_ms", "median"), ("next_p99_ms", "p99")):
            found = median(mine, key) if mine else None
            result.target(f"{name}, ms in next(), {what}", found, NEXT_MS, unit="ms")
        result.target(f"{name}, share of copies beside the step", facts.get("overlap"), -0.9)
        grown = facts.get("device_last_mb")
        if grown is not None:
            grown /= facts["device_first_mb"]
        result.target(f"{name}, device memory, epoch 3 of epoch 1", grown, 1.01)
        for other in (TIMM, PINNED):
            found = ratio(measured, name, other, "images_per_s")
            result.target(f"{name}, images/s without a model, of {other}'s", found, -1.0)
    after = about.get(LOADER, {}).get("locked_after_mb")
    result.target("ShardLoader, page-locked after close", after, 0.0, unit="MB")


# --- an entry -------------------------------------------------------------------------------------


def entry(scale: dict[str, Any], kind: str, path: str) -> Round:
    """A round is an epoch with a model and one without; or what is asked for."""
    size = Scale(**scale)
    found = _Entry(size, kind, path)
    return found.round


class _Entry:
    def __init__(self, scale: Scale, kind: str, path: str) -> None:
        self.scale = scale
        self.feed = feed(kind, path, "numpy", scale)
        self.step = training_step(scale.models[0], scale.device)

    def round(self, what: str = "") -> dict[str, Any]:
        """Measure; what: "trace", "memory" or "close" instead."""
        ways = {"": self.both, "trace": self.trace, "memory": self.memory, "close": self.close}
        found = ways[what]()
        give_memory_back(self.scale.device)
        return found

    def both(self) -> dict[str, Any]:
        """Take an epoch with a model, and one without."""
        found = {"alone": alone(self.step, self.scale)}
        return found | self.fed() | {"images_per_s": self.empty()}

    def fed(self) -> dict[str, Any]:
        """Train an epoch: seconds in next(), and images/s."""
        spent: list[float] = []
        steps: deque[Any] = deque()
        batches = iter(self.feed.epoch())
        began = 0.0
        for i in itertools.count():
            while len(steps) > BEHIND:
                steps.popleft().synchronize()
            if i == SKIPPED:
                began = done(self.scale.device)
            before = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            if i >= SKIPPED:
                spent.append(time.perf_counter() - before)
            self.step(batch)
            steps.extend(_event(self.scale.device))
        seconds = done(self.scale.device) - began
        ordered = sorted(spent)
        return {
            "next_ms": statistics.median(ordered) * 1e3,
            "next_p99_ms": ordered[int(0.99 * (len(ordered) - 1) + 0.5)] * 1e3,
            "fed": len(spent) * self.scale.batch / seconds,
        }

    def empty(self) -> float:
        """Take batches and do nothing, many more than can lie ready: images/s."""
        ready = 2 * self.scale.workers + READY
        batches, steps = forever(self.feed), TIMES * ready
        for _ in range(ready):
            next(batches)
        began = done(self.scale.device)
        for _ in range(steps):
            next(batches)
        seconds = done(self.scale.device) - began
        batches.close()
        return steps * self.scale.batch / seconds

    def trace(self) -> dict[str, Any]:
        """Train some steps under the profiler."""
        batches = forever(self.feed)
        for _ in range(SKIPPED):
            self.step(next(batches))
        found = trace.record(lambda: next(batches), self.step, TRACED, self.scale.device)
        batches.close()
        return {**trace.summary(found), "lanes": trace.picture(found, DRAWN)}

    def memory(self) -> dict[str, Any]:
        """Train three epochs: page-locked memory at the most, and the device's of each epoch."""
        import torch

        most, reserved = 0, []
        for _ in range(3):
            for batch in self.feed.epoch():
                self.step(batch)
                most = max(most, _locked(self.scale.device))
            if self.scale.device == "cuda":
                done("cuda")
                reserved.append(torch.cuda.memory_reserved() / 1e6)
        return {
            "locked_mb": most / 1e6,
            "device_first_mb": reserved[0] if reserved else None,
            "device_last_mb": reserved[-1] if reserved else None,
        }

    def close(self) -> dict[str, Any]:
        """End the loader: what it still holds locked. torch keeps what it locked itself."""
        from shardio.loader import pinned

        self.feed.close()
        gc.collect()
        return {"locked_after_mb": pinned.locked_bytes() / 1e6}


def alone(step: Callable[[Any], None], scale: Scale) -> float:
    """Return the images/s of a step with a batch that is on the device already."""
    import torch

    images = torch.randn(
        scale.batch, 3, scale.size, scale.size, device=scale.device, dtype=torch.bfloat16
    ).contiguous(memory_format=torch.channels_last)
    batch = images, torch.zeros(scale.batch, dtype=torch.int64, device=scale.device)
    steps = 2 if scale.device == "cpu" else 20
    for _ in range(2):
        step(batch)
    began = done(scale.device)
    for _ in range(steps):
        step(batch)
    return steps * scale.batch / (done(scale.device) - began)


def done(device: str) -> float:
    """Wait until the device has done all; return the time."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _event(device: str) -> Iterator[Any]:
    """Yield an event that is reached once what was asked of a GPU is done; on a CPU it is."""
    import torch

    if device == "cuda":
        event = torch.cuda.Event(blocking=True)
        event.record()
        yield event


def _locked(device: str) -> int:
    """Return the page-locked bytes of this process: those of shardio, and those of torch."""
    import torch

    from shardio.loader import pinned

    stats = torch.cuda.host_memory_stats() if device == "cuda" else {}
    # Until torch 2.8 what it keeps for reuse was in "reserved" alone.
    of_torch = [stats.get(f"{kind}_bytes.current", 0) for kind in ("allocated", "reserved")]
    return pinned.locked_bytes() + int(max(of_torch))


def give_memory_back(device: str) -> None:
    """Give cached memory of the GPU back: other entries train on it in turn."""
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()


def forever(found: Any) -> Iterator[Any]:
    """Yield the batches of one epoch after another."""
    while True:
        yield from found.epoch()
