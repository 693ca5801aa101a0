"""Scale over cores: ShardLoader and DataLoader with 1, 2, 4, 8, 16 workers beside a bare loop.

The bare loop is all that a loader cannot do without: as many processes, each of which decodes,
crops and flips images that lie in its memory, by the same code, into the rows of one array. It
reads, checks, orders, collates and hands over nothing, and nobody takes what it makes. Each loader
has one process more, the trainer, which takes every batch and does nothing with it.

A round of a loader begins behind the batches that its queue holds, and ends with a batch of the
process whose batch it began with: so each of them has made as many. A round of the bare loop
counts what each process has made by its own clock. Rounds of as many processes take turns, and "of
the bare loop" compares those of one turn. By CPU time the ratio is hardly touched by other
programs, but leaves out what workers wait for.

Where the time goes: seconds of the stages, summed over the workers, as ShardLoader's own statistics
have them (reading includes checks; DataLoader has no such figures); CPU time of the trainer and of
the workers; and the share of the workers' time in which they had no CPU, but waited: for the
trainer, or for a core. CPU of workers is by image that they made: what they used from the begin of
a pass until they rest, with full queues. What they made in a round and the trainer did not take,
since queues were fuller at its end, is no waiting, and has a column: it is more in short rounds.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from . import data
from .gpu_feeds import WHOLE_S
from .harness import (
    BLOCK_S,
    START_S,
    Deadline,
    EntryProcess,
    Result,
    ending,
    interleave,
    show,
)

COUNTS = (1, 2, 4, 8, 16)
TELLING = {16: 4, 8: 2, 4: 1, 1: 1, 2: 1}  # where there is little time: who comes first; weights
AHEAD = 2
BARE, LOADER, SHARDS = "bare loop", "ShardLoader", "DataLoader, shards"
SETS = {  # title: size of the crop, images a batch, about an image's CPU seconds
    "photographs, JPEG": (224, 64, 0.9e-3),
    "photographs, tile JPEG": (224, 64, 0.7e-3),
    "CIFAR": (32, 512, 15e-6),
}
WEIGHTS = dict(zip(SETS, (4, 2, 1), strict=True))  # of the time
ROUND_S, BETWEEN_S = 2.0, 0.8  # what a round measures; what comes before and after it
WARM_S = 0.3  # what the first measures, which does not count
LONGEST_S = 400  # all rounds together
STAGES = ("read", "decode", "transform", "collate")
COLUMNS = {
    "images_per_s": "images/s",
    "of_bare": "of the bare loop",
    "of_bare_cpu": "the same by CPU time of workers",
    **{f"{stage}_us": f"{stage}, us an image" for stage in STAGES},
    "workers_us": "CPU of workers, us an image",
    "trainer_us": "CPU of the trainer, us an image",
    "idle": "share in which workers wait",
    "left": "made, not taken",
}

Round = Callable[..., dict[str, Any]]


def run(source: data.Data, result: Result) -> None:
    from shardio.machine import processors

    counts = [count for count in COUNTS if count <= processors()]
    entries = len(SETS) * len(counts) * 3
    rounds = max(3, min(9, int(LONGEST_S / (ROUND_S + BETWEEN_S) / entries)))
    if result.deadline.given:  # by which they end
        rounds = 9
    small = source.quick or not result.deadline.enough(WHOLE_S)
    for title, deadline in result.deadline.shares(WEIGHTS, BLOCK_S):
        if not deadline.enough(START_S):
            _report(result, title, counts, {})
            continue
        size, batch, image_s = SETS[title]
        # So that a round does not reach the end of its epoch.
        records = int((ROUND_S + BETWEEN_S) * counts[-1] / image_s)
        if small:
            records = 12 * AHEAD * counts[-1] * batch
        few, shards = _pack(source, title, records)
        result.data(**{title: {"records": records}})
        _compare(result, title, counts, 2 if source.quick else rounds, deadline, {
            BARE: ("cores:bare", {"path": str(few), "size": size}),
            LOADER: ("cores:shard_loader", {"path": str(shards), "size": size, "batch": batch}),
            SHARDS: ("cores:data_loader", {"path": str(shards), "size": size, "batch": batch}),
        })  # fmt: skip
        data.remove(few, shards)


def _pack(source: data.Data, title: str, records: int) -> tuple[Any, Any]:
    """Pack the images, each once, and again and again until there are so many."""
    photographs = title.startswith("photographs")
    folder = source.originals() if photographs else source.cifar()
    tiles = ("--jpeg-tiles",) if "tile" in title else ()
    few = data.pack(folder, source.scratch / "few", *tiles)
    return few, data.repeat(few, source.scratch / "shards", records)


def _compare(
    result: Result,
    title: str,
    counts: list[int],
    rounds: int,
    deadline: Deadline,
    entries: dict[str, Any],
) -> None:
    """Measure these entries with each number of processes, taking turns."""
    processes: dict[str, EntryProcess] = {}
    asked_counts = [count for count in TELLING if count in counts]
    asked = [(name, count) for count in asked_counts for name in entries]
    for name, count in asked if deadline.enough(START_S) else ():
        function, options = entries[name]
        processes[_called(name, count)] = EntryProcess(function, workers=count, **options)
    warm = []
    with ending(processes):
        for name in deadline.part(0.5).until(processes):
            found = processes[name].round(seconds=WARM_S)
            show(f"  warm-up {name}: {found['images_per_s']:,.0f} images/s")
            warm.append(name)
        # Those of one count are compared with each other, so they take turns by themselves. Before
        # that, all took turns, and little time gave one round of each, some time apart.
        measured: dict[str, Any] = {}
        one_turn_s = len(entries) * (ROUND_S + BETWEEN_S) * 1.2
        for count, part in deadline.shares({c: TELLING[c] for c in asked_counts}, one_turn_s):
            named = [_called(name, count) for name in entries]
            before = dict(measured)
            measured |= interleave(
                {name: processes[name].round for name in named if name in warm},
                rounds,
                part,
                lambda found, before=before: result.keep(
                    lambda: _report(result, title, counts, before | found)
                ),
            )
    _report(result, title, counts, measured)


def _report(result: Result, title: str, counts: list[int], found: dict[str, Any]) -> None:
    """Report what there is: by name, and then by the number of processes."""
    names = [_called(name, count) for name, count in product((BARE, LOADER, SHARDS), counts)]
    measured = {name: found[name] for name in names if name in found}
    for name, count in product((LOADER, SHARDS), counts):
        # Where the time was over within a round, one of them has a round more.
        pairs = zip(*(measured.get(_called(one, count), []) for one in (name, BARE)), strict=False)
        for one, bare in pairs:
            one["of_bare"] = one["images_per_s"] / bare["images_per_s"]
            one["of_bare_cpu"] = bare["workers_us"] / one["workers_us"]
    result.raw(title, measured)
    result.table(f"{title}, workers", measured, COLUMNS)
    result.left_out(title, [name for name in names if name not in measured])
    for name, count in product((LOADER, SHARDS), counts):
        rounds = measured.get(_called(name, count), [])
        ratios = sorted(one["of_bare"] for one in rounds if "of_bare" in one)
        what = f"{title}, {_called(name, count)}, images/s, of the bare loop's"
        result.target(what, ratios[len(ratios) // 2] if ratios else None, -0.9)


def _called(name: str, count: int) -> str:
    return f"{name}, {count}"


def _transform(size: int) -> Any:
    from shardio import RandomResizedCrop

    return RandomResizedCrop(size, flip=True)


# --- the bare loop --------------------------------------------------------------------------------


def bare(path: str, size: int, workers: int) -> Round:
    import shardio

    files = [sample["image"] for sample in shardio.open(path, decode=None)]
    context = multiprocessing.get_context("fork")  # the files are shared, and not sent

    def one_round(seconds: float = 0.0) -> dict[str, Any]:
        ready, results = context.Barrier(workers), context.SimpleQueue()
        processes = []
        for number in range(workers):
            first = number * len(files) // workers
            given = (ready, results, files[first:] + files[:first], size, seconds or ROUND_S)
            processes.append(context.Process(target=_decode, args=given))
            processes[-1].start()
        found = [results.get() for _ in processes]
        for one in processes:
            one.join()
        images = sum(count for count, _, _ in found)
        return {
            "images_per_s": sum(count / seconds for count, seconds, _ in found),
            "decode_us": sum(seconds for _, seconds, _ in found) / images * 1e6,
            "workers_us": sum(used for _, _, used in found) / images * 1e6,
        }

    return one_round


def _decode(ready: Any, results: Any, files: list[bytes], size: int, least_s: float) -> None:
    """Decode for so many seconds, once all are ready: images, seconds, CPU seconds."""
    import numpy as np

    transform = _transform(size)
    row = np.empty((64, size, size, 3), np.uint8)
    draws = np.random.default_rng(os.getpid()).integers(2**64, size=4096, dtype=np.uint64).tolist()
    files = [bytes(memoryview(file)) for file in files]  # or it would fault at each of them
    for i in range(64):
        transform(files[i % len(files)], draws[i], row[i])
    ready.wait()
    count = 0
    began, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < least_s:
        transform(files[count % len(files)], draws[count % 4096], row[count % 64])
        count += 1
    results.put((count, time.perf_counter() - began, time.process_time() - used))


# --- loaders --------------------------------------------------------------------------------------


def _dataset(path: str, size: int, batch: int) -> Any:
    from shardio import ShardDataset

    fields = ("image", "label")
    return ShardDataset(path, batch_size=batch, fields=fields, transform=_transform(size))


def shard_loader(path: str, size: int, batch: int, workers: int) -> Round:
    from shardio import ShardLoader

    loader = ShardLoader(
        _dataset(path, size, batch), num_workers=workers, threads=1, prefetch_factor=AHEAD
    )
    return _rounds(loader, loader.dataset, batch, workers)


def data_loader(path: str, size: int, batch: int, workers: int) -> Round:
    from torch.utils.data import DataLoader

    dataset = _dataset(path, size, batch)
    loader = DataLoader(
        *(dataset,), batch_size=None, num_workers=workers, prefetch_factor=AHEAD,
        persistent_workers=True,
    )  # fmt: skip
    return _rounds(loader, dataset, batch, workers)


def _rounds(loader: Any, dataset: Any, batch: int, workers: int) -> Round:
    """Measure a part of an epoch, from a batch to a later one of the same worker."""
    import torch

    from shardio.machine import cpu_seconds, family

    torch.set_num_threads(1)
    epoch = 0

    def one_round(seconds: float = 0.0) -> dict[str, Any]:
        nonlocal epoch
        dataset.set_epoch(epoch)
        epoch += 1
        pids = family(os.getpid())[1:]
        rested = cpu_seconds(pids) or 0.0
        iterator = iter(loader)
        before = _before(len(loader), workers)
        for _ in range(before):
            next(iterator)
        pids = family(os.getpid())[1:]
        trainer, used = time.process_time(), cpu_seconds(pids) or 0.0
        began = time.perf_counter()
        batches, images, stages = 0, 0, dict.fromkeys(STAGES, 0.0)
        for _ in _turns(len(loader) - before, workers, began, seconds or ROUND_S):
            found, labels = next(iterator)
            assert len(found) == len(labels) and found.dtype == torch.uint8
            batches, images = batches + 1, images + len(found)
            if (stats := getattr(iterator, "batch_stats", None)) is not None:
                for stage in stages:
                    stages[stage] += getattr(stats, f"{stage}_s")
        took = time.perf_counter() - began
        worked = (cpu_seconds(pids) or 0.0) - used
        trained = time.process_time() - trainer
        _rest(pids)
        asked = before + batches + AHEAD * workers  # of this pass, so far
        each = ((cpu_seconds(pids) or 0.0) - rested) / asked  # CPU seconds of a batch
        del iterator, found
        measured = {
            "images_per_s": images / took,
            "workers_us": each / batch * 1e6,
            "trainer_us": trained / images * 1e6,
            "idle": max(0.0, 1 - worked / (workers * took)),
            "left": 1 - batches * each / worked if worked else 0.0,
        }
        told = sum(stages.values()) > 0
        return measured | ({f"{k}_us": v / images * 1e6 for k, v in stages.items()} if told else {})

    return one_round


def _before(batches: int, workers: int) -> int:
    """Return the batches that come before those that count: twice what a queue holds."""
    return min(2 * AHEAD * workers, batches // 2)


def _turns(batches: int, workers: int, began: float, least_s: float) -> Iterator[int]:
    """Count batches for so long, and on until each worker has given as many as the others.

    batches: those that are left of the epoch. The last ones are to fill the queues.
    """
    most = max(1, batches // workers - AHEAD) * workers
    for i in range(most if batches >= workers else batches):
        if i and i % workers == 0 and time.perf_counter() - began > least_s:
            return
        yield i


def _rest(pids: list[int]) -> None:
    """Wait until these processes have filled their queues: the next entry's round begins then."""
    from shardio.machine import cpu_seconds

    used = -1.0
    while used != (used := cpu_seconds(pids) or 0.0):
        time.sleep(0.1)
