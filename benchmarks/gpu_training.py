"""Training fed from JPEG, tile JPEG, raw pixels, and by decode="cuda": does the GPU wait?

ResNets in bf16 on photographs, RandomResizedCrop(224), mirrored, by ShardLoader with as many
workers as the machine has cores; raw pixels are 224 x 224 already. DataLoader with pinned memory
over the same JPEGs is what most training code does.

The GPU's idle share is of a profiler's trace: the time in which no kernel ran. The engine that
decodes JPEGs is none, so that its time does not count as busy. Right before each round the model
runs alone, with one batch that is on the GPU already. `shardio.watch` judges each round: what it
calls loader-bound should idle, and what it calls compute-bound should not.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

from . import data, trace
from .gpu_feeds import LOADER, PINNED, Feed, Scale, feed
from .gpu_transfers import SKIPPED, alone, done, forever, give_memory_back
from .harness import EntryProcess, Result, add_facts, interleave, median, show
from .resnet import training_step

TRACED, DRAWN = 12, 5  # steps
FEEDS = {  # title: the loader, how the dataset decodes, which shards, and whose kernels
    "JPEG": (LOADER, "pil", "jpeg", "torch"),
    "tile JPEG": (LOADER, "pil", "tiles", "torch"),
    "raw pixels": (LOADER, "numpy", "raw", "torch"),
    "raw pixels, Triton": (LOADER, "numpy", "raw", "triton"),
    'JPEG, decode="cuda"': (LOADER, "cuda", "jpeg", "torch"),
    'tile JPEG, decode="cuda"': (LOADER, "cuda", "tiles", "torch"),
    'JPEG, decode="cuda", Triton': (LOADER, "cuda", "jpeg", "triton"),
    'tile JPEG, decode="cuda", Triton': (LOADER, "cuda", "tiles", "triton"),
    f"JPEG, {PINNED}": (PINNED, "pil", "jpeg", "torch"),
}
IDLE = 0.1  # a GPU that idles longer waits for something

Round = Callable[..., dict[str, Any]]


def run(source: data.Data, result: Result, scale: Scale) -> None:
    square = ("--encode", "raw", "--resize", str(scale.size))
    shards = {}
    for name, options in (("jpeg", ()), ("tiles", ("--jpeg-tiles",)), ("raw", square)):
        few = data.pack(source.originals(), source.scratch / f"few-{name}", *options)
        shards[name] = data.repeat(few, source.scratch / name, scale.records)
        data.remove(few)
    result.data(training={"records": scale.records, "batch": scale.batch, "size": scale.size})
    for model in scale.models:
        _train(result, scale, model, {name: str(path) for name, path in shards.items()})
    data.remove(*shards.values())


def _train(result: Result, scale: Scale, model: str, shards: dict[str, str]) -> None:
    entries = {}
    for title, (kind, decode, stored, kernels) in FEEDS.items():
        if kernels == "triton" and scale.device == "cpu":
            continue  # Triton's interpreter would take hours
        how = {"kind": kind, "decode": decode, "path": shards[stored], "kernels": kernels}
        entries[title] = EntryProcess("gpu_training:entry", **scale.options(**how, model=model))
    lanes, about = {}, {}
    try:
        for name, one in tuple(entries.items()):  # kernels are chosen in these rounds
            about[name] = one.round(traced=True)
            if missing := about[name].get("missing"):
                result.note(f"{model}, {name} was not measured: {missing}")
                entries.pop(name).close()
                continue
            lanes[f"{model}, {name}"] = about[name].pop("lanes")
            show(f"  trace, {name}: {about[name]}")
        measured = interleave({name: one.round for name, one in entries.items()}, scale.rounds)
    finally:
        for one in entries.values():
            one.close()
    add_facts(measured, about)
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
    result.raw("lanes", result.facts["raw"].get("lanes", {}) | lanes)
    for name, rounds in measured.items():
        result.target(f"{model}, {name}, of the model alone", median(rounds, "of_alone"), -0.95)
        idle = about[name]["gpu_idle"]
        said = max(rounds, key=lambda one: one["watched"])["bound"]
        agrees = None if idle is None else float((said == "loader") == (idle > IDLE))
        what = f"{model}, {name}: watch says {said}, as the idle GPU does"
        result.target(what, agrees, -1.0, unit="")


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
