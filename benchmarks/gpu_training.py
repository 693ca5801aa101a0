"""Training fed from JPEG, tile JPEG, raw pixels, and by decode="cuda": does the GPU wait?

ResNets in bf16 on photographs, RandomResizedCrop(224), mirrored, by ShardLoader with as many
workers as the machine has cores; raw pixels are 224 x 224 already. DataLoader with pinned memory
over the same JPEGs is what most training code does.

The GPU's idle share is of a profiler's trace: the time in which no kernel ran. The engine that
decodes JPEGs is none, so that its time does not count as busy. Right before each round the model
runs alone, with one batch that is on the GPU already. `shardio.watch` judges each round, and is
compared with the speed: at 0.95 of the model alone and above, a feed is compute-bound; below 0.9 it
is not; between, nothing is said. Not with the idle share: the profiler itself makes some feeds idle
(DataLoader with pinned memory, on an H100: 95 ms a step under it, 65 without).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from . import data, trace
from .gpu_feeds import LOADER, PINNED, Feed, Scale, feed
from .gpu_transfers import SKIPPED, alone, done, forever, give_memory_back
from .harness import (
    BLOCK_S,
    START_S,
    Deadline,
    EntryProcess,
    Result,
    add_facts,
    ending,
    interleave,
    median,
    show,
)
from .resnet import training_step

TRACED, DRAWN = 12, 5  # steps
# The most telling first, which are measured where there is little time: what decides about
# decode="cuda", and what most training code does; then tiles.
FEEDS = {  # title: the loader, how the dataset decodes, which shards, and whose kernels
    "JPEG": (LOADER, "pil", "jpeg", "torch"),
    'JPEG, decode="cuda"': (LOADER, "cuda", "jpeg", "torch"),
    'JPEG, decode="cuda", Triton': (LOADER, "cuda", "jpeg", "triton"),
    "raw pixels": (LOADER, "numpy", "raw", "torch"),
    f"JPEG, {PINNED}": (PINNED, "pil", "jpeg", "torch"),
    "tile JPEG": (LOADER, "pil", "tiles", "torch"),
    'tile JPEG, decode="cuda"': (LOADER, "cuda", "tiles", "torch"),
    'tile JPEG, decode="cuda", Triton': (LOADER, "cuda", "tiles", "triton"),
    "raw pixels, Triton": (LOADER, "numpy", "raw", "triton"),
}
FIRST, OTHERS = 2, 1  # the first model's time is twice that of another
BOUND, FREE = 0.95, 0.9  # of the model alone: compute-bound from here on; below, it waits

Round = Callable[..., dict[str, Any]]


def run(source: data.Data, result: Result, scale: Scale, deadline: Deadline) -> None:
    square = ("--encode", "raw", "--resize", str(scale.size))
    shards = {}
    for name, options in (("jpeg", ()), ("tiles", ("--jpeg-tiles",)), ("raw", square)):
        few = data.pack(source.originals(), source.scratch / f"few-{name}", *options)
        shards[name] = data.repeat(few, source.scratch / name, scale.records)
        data.remove(few)
    result.data(training={"records": scale.records, "batch": scale.batch, "size": scale.size})
    weights = dict.fromkeys(scale.models, OTHERS) | {scale.models[0]: FIRST}
    for model, its in deadline.shares(weights, BLOCK_S):
        _train(result, scale, model, {name: str(path) for name, path in shards.items()}, its)
    data.remove(*shards.values())


def _train(
    result: Result, scale: Scale, model: str, shards: dict[str, str], deadline: Deadline
) -> None:
    entries: dict[str, EntryProcess] = {}
    # Triton's interpreter, on a CPU, would take hours.
    names = [one for one, how in FEEDS.items() if how[-1] != "triton" or scale.device != "cpu"]
    for title in names if deadline.enough(START_S) else ():
        kind, decode, stored, kernels = FEEDS[title]
        how = {"kind": kind, "decode": decode, "path": shards[stored], "kernels": kernels}
        entries[title] = EntryProcess("gpu_training:entry", **scale.options(**how, model=model))
    lanes: dict[str, Any] = result.facts["raw"].setdefault("lanes", {})
    about: dict[str, dict[str, Any]] = {}

    def report(measured: dict[str, Any]) -> None:
        add_facts(measured, about)
        _report(result, scale, model, names, measured)

    with ending(entries):
        for name in deadline.part(0.5).until(tuple(entries)):  # kernels are chosen in these rounds
            found = entries[name].round(traced=True)
            if missing := found.get("missing"):
                result.note(f"{model}, {name} was not measured: {missing}")
                entries.pop(name).close()
                names.remove(name)
                continue
            lanes[f"{model}, {name}"] = found.pop("lanes")
            about[name] = found
            show(f"  trace, {name}: {found}")
        measured = interleave(
            {name: entries[name].round for name in about},
            scale.rounds,
            deadline,
            partial(result.keep, report),
        )
    report(measured)


def _report(
    result: Result, scale: Scale, model: str, names: list[str], measured: dict[str, Any]
) -> None:
    """Report what there is of these feeds."""
    columns = {
        "images_per_s": "images/s",
        "of_alone": "of the model alone",
        "gpu_idle": "GPU idle",
        "watched": "share waiting, by watch",
        "next_ms": "ms in next()",
        "step_ms": "ms a step, profiled",
        "loader_ms": "ms of kernels of the loader",
        "cores": "cores that are busy",
        "trainer_ms": "CPU ms a batch, of the trainer",
    }
    title = f"{model} in bf16, batches of {scale.batch}, {scale.device}, {scale.workers} workers"
    result.table(title, measured, columns, versus="raw pixels", by="images_per_s")
    result.raw(model, measured)
    result.left_out(title, [name for name in names if name not in measured])
    for name in names:
        rounds = measured.get(name, [])
        found = median(rounds, "of_alone") if rounds else None
        result.target(f"{model}, {name}, of the model alone", found, -BOUND)
        said, agrees = judged(rounds)
        what = f"{model}, {name}: watch says {said}, as the speed does"
        result.target(what, agrees, -1.0, unit="")


def judged(rounds: list[dict[str, Any]]) -> tuple[str, float | None]:
    """Return what watch said of the round in the middle, and whether it was right; None: unknown.

    The truth is the speed, of the model alone.
    """
    if not rounds:
        return "nothing", None
    middle = sorted(rounds, key=lambda one: float(one["of_alone"]))[len(rounds) // 2]
    said, speed = middle["bound"], middle["of_alone"]
    if said == "unknown" or FREE <= speed < BOUND:  # too few batches; or neither
        return said, None
    return said, float((said == "compute") == (speed >= BOUND))


# --- an entry -------------------------------------------------------------------------------------


def entry(
    scale: dict[str, Any], kind: str, decode: str, path: str, kernels: str, model: str
) -> Round:
    from shardio.errors import DependencyError

    size = Scale(**scale)
    found = feed(kind, path, decode, size, kernels)
    step = training_step(model, size.device)

    def one_round(traced: bool = False) -> dict[str, Any]:
        try:
            measured = _traced(found, step, size) if traced else _epoch(found, step, size)
        except DependencyError as error:  # there is no decoder for the GPU
            measured = {"missing": str(error)}
        give_memory_back(size.device)
        return measured

    return one_round


def _traced(found: Feed, step: Callable[[Any], None], scale: Scale) -> dict[str, Any]:
    batches = forever(found)
    for _ in range(SKIPPED):
        step(next(batches))
    made = trace.record(lambda: next(batches), step, TRACED, scale.device)
    batches.close()
    return {**trace.summary(made), "lanes": trace.picture(made, DRAWN)}


def _epoch(found: Feed, step: Callable[[Any], None], scale: Scale) -> dict[str, Any]:
    from shardio import watch
    from shardio.machine import cpu_seconds, family

    bare = alone(step, scale)
    watched = watch(found.epoch(), every=None, print=None)
    batches = iter(watched)
    asked = began = used = trained = 0.0
    steps, pids = 0, [os.getpid()]
    for i in itertools.count():
        if i == SKIPPED:
            began = done(scale.device)
            pids = family(os.getpid())
            used, trained = cpu_seconds(pids) or 0.0, time.process_time()
        before = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            break
        if i >= SKIPPED:
            asked += time.perf_counter() - before
            steps += 1
        step(batch)
    seconds = done(scale.device) - began
    verdict = watched.judge()
    assert verdict is not None
    return {
        "images_per_s": steps * scale.batch / seconds,
        "alone": bare,
        "of_alone": steps * scale.batch / seconds / bare,
        "next_ms": asked / steps * 1e3,
        "cores": ((cpu_seconds(pids) or 0.0) - used) / seconds,
        "trainer_ms": (time.process_time() - trained) / steps * 1e3,
        "watched": verdict.share,
        "bound": verdict.bound,
        "verdict": str(verdict),
    }
