"""What do 1 to 16 loader processes lose of a bare loop, and to what? Decoding sleeps.

Processes that sleep need no cores, so that two cores show what 16 would wait for: each image takes
a drawn time, with the spread that photographs have. The bare loop is as many processes that sleep
through the same times, of which nobody takes anything. What decoding costs beside others (memory,
caches) is not simulated: `cores` has that, on a machine of so many cores.

"Of the bare loop" compares drawn seconds that were handed out in a second, so that no entry has the
easier images. Each image notes when it began and ended, and each batch when it was taken. So the
time of the processes, all of it, is: what was drawn; sleeping longer than that; work between the
images of a batch; waiting to be asked, since the trainer takes batches in order and is at another
process; work between batches; and images that were made within the round, and not taken. (What is
made at its end stands for what was made before its begin: both are of the same kind, and the last
column is their difference.)

    --only sleeping    what is measured so
    --only model       computed: what order alone costs, if processes differ in speed for long
"""

from __future__ import annotations

import mmap
import multiprocessing
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import data
from .cores import AHEAD, BARE, COUNTS, LOADER, SHARDS
from .harness import EntryProcess, Result, ending, interleave, show

PARTS = ("sleeping", "model")
MEAN_S = 4e-3  # an image: 2.8 times what a photograph takes here, so that 16 fit on two cores
SPREAD = 0.68  # of its logarithm: of 500 photographs, RandomResizedCrop(224) of the core
LONGEST = 12.0  # of the mean: the slowest of them
BATCH = 64
BEFORE = 2 * AHEAD  # batches of each process that are not counted: twice what its queue holds
FIRST = 12  # batches of each process in a short round, as `cores --quick` had on an H100
BATCHES = 40  # and in a whole one
BARE_S = 6.0
SLOWER = 1.1  # what the first process takes, where one is slow
SLOW = ", one slower"
IMAGE = struct.Struct("<qd")  # the number of a record, and its seconds
COLUMNS = {
    "images_per_s": "images/s",
    "of_bare": "of the bare loop",
    "of_bare_first": f"the same, first {FIRST} batches each",
    "drawn": "share of time: drawn",
    "longer": "slept longer",
    "within": "within batches",
    "order": "waits for its turn",
    "between": "else between batches",
    "left": "made, not taken",
    "left_first": f"the same, first {FIRST}",
}

MODEL_COLUMNS = {
    "handed_out": "of the bare loop",
    "order": "waits for its turn",
    "left": "made, not taken",
}
DIFFER = (0.0, 0.03, 0.06)  # speeds of processes, by standard deviation

Round = Callable[..., dict[str, Any]]


def run(source: data.Data, result: Result, parts: Sequence[str] = PARTS) -> None:
    if "sleeping" in parts:
        _sleeping(source, result)
    if "model" in parts:
        _model(source, result)


def _sleeping(source: data.Data, result: Result) -> None:
    counts = COUNTS[:2] if source.quick else COUNTS
    batches = 3 if source.quick else BATCHES
    records = (2 * BEFORE + batches) * counts[-1] * BATCH
    path = write(source.scratch / "drawn", records)
    result.data(records=records, mean_ms=MEAN_S * 1e3, batch=BATCH)
    most = counts[-1]
    asked: list[tuple[str, int, int, bool]] = [(LOADER, count, AHEAD, False) for count in counts]
    asked += [(LOADER, most, ahead, False) for ahead in (1, 2 * AHEAD)]
    asked += [(SHARDS, most, AHEAD, False), (LOADER, most, AHEAD, True)]
    entries: dict[str, EntryProcess] = {}
    for name, count, ahead, slow in asked:
        if (beside := bare_of(count, slow)) not in entries:
            entries[beside] = EntryProcess(
                *("idle:bare",), path=str(path), workers=count, slow=slow,
                round_s=BARE_S / 10 if source.quick else BARE_S,
            )  # fmt: skip
        called = f"{name}, {count}" + f", {ahead} ahead" * (ahead != AHEAD) + SLOW * slow
        function = "idle:shard_loader" if name == LOADER else "idle:data_loader"
        entries[called] = EntryProcess(
            function, path=str(path), workers=count, ahead=ahead, slow=slow, batches=batches
        )
    with ending(entries):
        rounds = 2 if source.quick else 5
        measured = interleave({name: one.round for name, one in entries.items()}, rounds)
    for name, rows in measured.items():
        if name.startswith(BARE):
            continue
        count = int(name.split(", ")[2 if name.startswith(SHARDS) else 1])
        for one, other in zip(rows, measured[bare_of(count, name.endswith(SLOW))], strict=True):
            for first in ("", "_first"):
                one[f"of_bare{first}"] = one[f"handed_out{first}"] / other["handed_out"]
    result.raw("rounds", measured)
    result.table(f"decodes that sleep, batches of {BATCH}", measured, COLUMNS)
    for count in counts:
        ratios = sorted(one["of_bare"] for one in measured[f"{LOADER}, {count}"])
        what = f"{LOADER}, {count}: images/s, of the bare loop's"
        result.target(what, ratios[len(ratios) // 2], -0.9)


def bare_of(count: int, slow: bool) -> str:
    """Return the name of the bare loop that an entry is compared with."""
    return f"{BARE}, {count}" + SLOW * slow


def write(out: Path, records: int) -> Path:
    """Write records that are no more than how long each is to take."""
    import shardio

    show(f"  {records:,} records of drawn times")
    seconds = drawn(records)
    with shardio.Writer(out, fields={"image": "bytes", "label": "int"}) as writer:
        for i in range(records):
            writer.write({"image": IMAGE.pack(i, seconds[i]), "label": i})
    return out


def drawn(records: int, seed: int = 0) -> Any:
    """Return the seconds of each record, the same in each process: (records,) float64."""
    import numpy as np

    values = np.random.default_rng(seed).lognormal(sigma=SPREAD, size=records)
    values = np.minimum(values / values.mean(), LONGEST)
    return MEAN_S * values / values.mean()


# --- the model ------------------------------------------------------------------------------------


def _model(source: data.Data, result: Result) -> None:
    """Compute what order alone costs, where nothing else takes time, and speeds differ for long."""
    measured: dict[str, list[dict[str, float]]] = {}
    for count in COUNTS[2:]:
        for batches, ahead in ((FIRST, AHEAD), (BATCHES, AHEAD), (BATCHES, 2 * AHEAD)):
            for differ in DIFFER:
                name = f"{count}, {batches} batches each, {ahead} ahead, speeds differ by {differ}"
                rounds = range(2 if source.quick else 60)
                measured[name] = [queues(count, batches, ahead, differ, i) for i in rounds]
    result.raw("model", measured)
    result.table(f"a model of queues, batches of {BATCH}", measured, MODEL_COLUMNS)


def queues(count: int, batches: int, ahead: int, differ: float, seed: int) -> dict[str, float]:
    """Return what processes do, of their time, if a trainer takes each batch when its turn is.

    A process begins a batch when that which lies `ahead` before it was taken, and not earlier.
    """
    import numpy as np

    counted = slice(BEFORE, BEFORE + batches)
    total = counted.stop + ahead
    took = drawn(total * count * BATCH, seed).reshape(total, count, BATCH).sum(axis=2)
    took /= np.random.default_rng(seed).normal(1, differ, count).clip(0.5, None)
    began, ended, taken = np.zeros((3, total, count))
    now = 0.0
    for i in range(total):
        for j in range(count):
            free = ended[i - 1, j] if i else 0.0
            began[i, j] = max(free, taken[i - ahead, j]) if i >= ahead else free
            ended[i, j] = began[i, j] + took[i, j]
            now = taken[i, j] = max(now, ended[i, j])
    start, end = taken[BEFORE - 1, -1], taken[counted.stop - 1, -1]
    whole = (end - start) * count
    worked = (ended.clip(start, end) - began.clip(start, end)).sum()
    used = took[counted].sum()
    found = {"handed_out": used, "order": whole - worked, "left": worked - used}
    return {name: round(float(value / whole), 9) for name, value in found.items()}


# --- the bare loop --------------------------------------------------------------------------------


def bare(path: str, workers: int, slow: bool, round_s: float) -> Round:
    import shardio

    seconds = [IMAGE.unpack(sample["image"])[1] for sample in shardio.open(path)]
    context = multiprocessing.get_context("fork")

    def one_round() -> dict[str, Any]:
        ready, results = context.Barrier(workers), context.SimpleQueue()
        processes = []
        for number in range(workers):
            first = number * len(seconds) // workers
            factor = SLOWER if slow and not number else 1.0
            given = (ready, results, seconds[first:] + seconds[:first], factor, round_s)
            processes.append(context.Process(target=_sleep, args=given))
            processes[-1].start()
        found = [results.get() for _ in processes]
        for one in processes:
            one.join()
        handed_out = sum(used / took for _, used, took in found) / workers
        return {
            "images_per_s": sum(count / took for count, _, took in found),
            "handed_out": handed_out,
            "drawn": handed_out,
            "longer": 1 - handed_out,
        }

    return one_round


def _sleep(ready: Any, results: Any, seconds: list[float], factor: float, round_s: float) -> None:
    ready.wait()
    count, used, began = 0, 0.0, time.perf_counter()
    while time.perf_counter() - began < round_s:
        one = seconds[count % len(seconds)]
        time.sleep(one * factor)
        count, used = count + 1, used + one
    results.put((count, used, time.perf_counter() - began))


# --- loaders --------------------------------------------------------------------------------------


def _prepare(path: str, slow: bool) -> tuple[Any, Any, Any]:
    """Return a dataset, when each record began and ended, in shared memory, and what was drawn."""
    import numpy as np

    from shardio import ShardDataset

    seconds = drawn(len(ShardDataset(path)))
    log = np.frombuffer(mmap.mmap(-1, 16 * len(seconds)), np.float64).reshape(-1, 2)

    def decode(stored: bytes) -> Any:
        began = time.perf_counter()
        number, wanted = IMAGE.unpack(stored)
        late = slow and multiprocessing.current_process().name == "shardio-loader-0"
        time.sleep(wanted * (SLOWER if late else 1.0))
        log[number] = began, time.perf_counter()
        return np.zeros(1, np.uint8)

    fields = ("image", "label")
    return ShardDataset(path, batch_size=BATCH, fields=fields, transform=decode), log, seconds


def shard_loader(path: str, workers: int, ahead: int, slow: bool, batches: int) -> Round:
    from shardio import ShardLoader

    dataset, log, seconds = _prepare(path, slow)
    loader = ShardLoader(
        *(dataset,), num_workers=workers, threads=1, prefetch_factor=ahead,
        multiprocessing_context="fork",
    )  # fmt: skip
    return _rounds(loader, dataset, log, seconds, workers, ahead, batches)


def data_loader(path: str, workers: int, ahead: int, slow: bool, batches: int) -> Round:
    import warnings

    from torch.utils.data import DataLoader

    warnings.filterwarnings("ignore", "This DataLoader will create")  # on fewer cores: on purpose
    dataset, log, seconds = _prepare(path, slow)
    loader = DataLoader(
        *(dataset,), batch_size=None, num_workers=workers, prefetch_factor=ahead,
        persistent_workers=True, multiprocessing_context="fork",
    )  # fmt: skip
    return _rounds(loader, dataset, log, seconds, workers, ahead, batches)


def _rounds(
    loader: Any, dataset: Any, log: Any, seconds: Any, workers: int, ahead: int, batches: int
) -> Round:
    import numpy as np
    import torch

    torch.set_num_threads(1)
    epoch = 0

    def one_round() -> dict[str, Any]:
        nonlocal epoch
        dataset.set_epoch(epoch)
        epoch += 1
        log[:] = 0
        iterator = iter(loader)
        taken, rows = [], []
        for _ in range((BEFORE + batches) * workers):
            _, labels = next(iterator)
            taken.append(time.perf_counter())
            rows.append(labels.numpy().copy())
        numbers = np.stack(rows).reshape(-1, workers, BATCH)
        times = np.array(taken).reshape(-1, workers)
        noted = log.copy()
        del iterator
        found = shares(times, numbers, noted, seconds, ahead)
        first = slice(BEFORE + FIRST)
        few = shares(times[first], numbers[first], noted, seconds, ahead)
        return found | {f"{name}_first": few[name] for name in ("handed_out", "left")}

    return one_round


def shares(taken: Any, numbers: Any, log: Any, seconds: Any, ahead: int) -> dict[str, float]:
    """Return what each share of the processes' time was, from the end of BEFORE batches of each.

    taken    (batches, processes) when each was taken
    numbers  (batches, processes, BATCH) the records of each
    log      (records, 2) when each began and ended; 0: not yet
    seconds  (records,) what was drawn
    """
    began, ended = log[numbers, 0], log[numbers, 1]
    start, end = taken[BEFORE - 1, -1], taken[-1, -1]
    whole = (end - start) * taken.shape[1]
    counted = numbers[BEFORE:]
    in_time = (log[:, 1] > start) & (log[:, 1] <= end)
    slept = (ended - began)[BEFORE:].sum()
    used = seconds[counted].sum()
    spans = ended[BEFORE:, :, -1] - began[BEFORE:, :, 0]
    gaps = began[BEFORE:, :, 0] - ended[BEFORE - 1 : -1, :, -1]
    # A process begins a batch when that which lies `ahead` before it was taken, and not earlier.
    asked = taken[BEFORE - ahead : len(taken) - ahead]
    order = (asked - ended[BEFORE - 1 : -1, :, -1]).clip(0, None).sum()
    found = {
        "handed_out": used,
        "drawn": seconds[in_time].sum(),
        "longer": slept - used,
        "within": spans.sum() - slept,
        "order": order,
        "between": gaps.sum() - order,
        "left": seconds[in_time].sum() - used,
    }
    found = {name: round(float(value / whole), 9) for name, value in found.items()}
    return {"images_per_s": float(counted.size / (end - start)), **found}
