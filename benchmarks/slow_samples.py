"""Samples that take 3 ms to fetch, small and of 1.2 MB, batches of 128, a training step of 50 ms.

Users report: with samples of 10 x 150 float64 more workers help, with samples of 1000 x 150 they do
not, nor does a larger prefetch_factor. For the large ones a batch is 154 MB, and what torch does
with it in worker and trainer costs more than the fetching.

DataLoader reads a map-style dataset, as these users wrote it: the sample is made once, and each
`__getitem__` sleeps for 3 ms and returns it. ShardLoader reads a dataset whose `transform=` sleeps
for 3 ms. "packed": it then returns the values that were stored, so each sample is read, checked and
copied besides, which DataLoader's is not. "made once": the stored sample is a few bytes, and the
transform returns one array, as `__getitem__` does. P x T is P processes of T threads: P * T sleep
at the same time, as in a DataLoader of P * T workers. The training step looks at a byte of each
page of the batch (as its copy to a GPU would) and sleeps; "no step" is how fast batches can come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import data
from .harness import EntryProcess, Result, contest, median, ratio

BATCH, FETCH_S, STEP_S = 128, 0.003, 0.05
SHAPES = {"small": (10, 150), "large": (1000, 150)}

Round = Callable[..., dict[str, Any]]


def run(source: data.Data, result: Result) -> None:
    rounds, batches = (1, 8) if source.quick else (3, 32)
    result.data(batch=BATCH, fetch_ms=FETCH_S * 1e3, step_ms=STEP_S * 1e3, batches=batches)
    for size, shape in SHAPES.items():
        records = (4 if source.quick else 8) * BATCH
        path = write(source.scratch / size, shape, records)
        tiny = write(source.scratch / f"{size}-tiny", (1, 1), records)
        few = 2 if source.quick else 6  # of entries that take 400 ms a batch
        entries = {
            f"DataLoader, {workers} workers, {ahead} ahead": EntryProcess(
                *("slow_samples:data_loader",), shape=shape, workers=workers, ahead=ahead,
                batches=batches if workers else few,
            )
            for workers, ahead in ((0, 2), (2, 2), (4, 2), (8, 2), (2, 4), (8, 4))
        }  # fmt: skip
        for workers, threads in ((1, 2), (1, 8), (2, 4), (2, 16)):
            for kind, where in (("packed", path), ("made once", tiny)):
                entries[f"ShardLoader {workers}x{threads}, {kind}"] = EntryProcess(
                    *("slow_samples:shard_loader",), path=str(where), shape=shape,
                    packed=kind == "packed", workers=workers, threads=threads, batches=batches,
                )  # fmt: skip
        try:
            bare = {name: [one.round(step_s=0.0)] for name, one in entries.items()}
        except BaseException:
            for one in entries.values():
                one.close()
            raise
        measured = contest(entries, rounds, warm_up=False)
        result.raw(size, {"rounds": measured, "no step": bare})
        for name, found in measured.items():
            found[0]["bare_ms"] = bare[name][0]["ms"]
        columns = {
            "ms": "ms a batch",
            "wait_ms": "of these waiting for it",
            "trainer_ms": "CPU ms of the trainer",
            "bare_ms": "ms a batch, no step",
        }
        what = f"{shape[0]} x {shape[1]} float64, {FETCH_S * 1e3:.0f} ms each, batches of {BATCH}"
        result.table(what, measured, columns, versus="DataLoader, 8 workers, 2 ahead", by="ms")
        _targets(result, size, measured if size == "small" else bare)
        data.remove(path, tiny)


def _targets(result: Result, size: str, measured: dict[str, list[dict[str, Any]]]) -> None:
    """The best of each; and where as many samples are fetched at a time."""
    rivals = [name for name in measured if name.startswith("DataLoader")]
    own = [name for name in measured if name.startswith("ShardLoader")]
    for kind in ("packed", "made once"):
        here = [name for name in own if name.endswith(kind)]
        best, rival = (min(n, key=lambda one: median(measured[one], "ms")) for n in (here, rivals))
        pairs = {(best, rival), (f"ShardLoader 2x4, {kind}", "DataLoader, 8 workers, 2 ahead")}
        for one, other in sorted(pairs):
            what = "small" if size == "small" else "large, no step"
            # Equal, where both do no more than sleep: to within what rounds differ by.
            least = -0.97 if size == "small" else -3.0
            found = ratio(measured, other, one, "ms")
            result.target(f"{what}: {one}, speed of {other}", found, least)


def write(out: Path, shape: tuple[int, int], records: int) -> Path:
    """Write samples of random values, as bytes that `transform=` makes arrays of."""
    import numpy as np

    import shardio

    values = np.random.default_rng(0).random(shape).tobytes()
    with shardio.Writer(out, fields={"image": "bytes", "label": "int"}) as writer:
        for i in range(records):
            writer.write({"image": values, "label": i % 10})
    return out


# --- entries --------------------------------------------------------------------------------------


class MapStyle:
    """The Dataset of the question: the sample is made once, and takes 3 ms to fetch."""

    def __init__(self, shape: tuple[int, int], records: int) -> None:
        import numpy as np

        self.sample = np.random.default_rng(0).random(shape)
        self.records = records

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, index: int) -> Any:
        time.sleep(FETCH_S)
        return self.sample, index % 10


def _rounds(batches: Callable[[], Any], ahead: int, count: int, shape: Any) -> Round:
    """ahead: batches that are not counted, at first: they may have been made between rounds."""
    import torch

    torch.set_num_threads(1)
    source: Any = None

    def one_round(step_s: float = STEP_S) -> dict[str, Any]:
        nonlocal source
        source = None
        source = batches()
        batch: Any = None
        began = used = waited = 0.0
        for i in range(ahead + count):
            if i == ahead:
                began, used, waited = time.perf_counter(), time.process_time(), 0.0
            asked = time.perf_counter()
            batch = None
            batch = next(source)
            waited += time.perf_counter() - asked
            values = batch[0]
            assert tuple(values.shape) == (BATCH, *shape) and values.dtype == torch.float64
            values.view(-1)[::512].sum()  # 512 of 8 bytes are a page
            if step_s:
                time.sleep(step_s)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        return {
            "ms": seconds / count * 1e3,
            "wait_ms": waited / count * 1e3,
            "trainer_ms": used / count * 1e3,
        }

    return one_round


def data_loader(shape: tuple[int, int], workers: int, ahead: int, batches: int) -> Round:
    import warnings

    from torch.utils.data import DataLoader

    warnings.filterwarnings("ignore", "This DataLoader will create")  # 8 on fewer cores: on purpose
    skipped = workers * ahead
    more: dict[str, Any] = {"prefetch_factor": ahead} if workers else {}
    # Long enough that no worker ends before the last batch that is counted.
    dataset: Any = MapStyle(shape, (2 * skipped + batches + workers) * BATCH)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=workers, **more)
    return _rounds(lambda: iter(loader), skipped, batches, shape)


def shard_loader(
    path: str, shape: tuple[int, int], packed: bool, workers: int, threads: int, batches: int
) -> Round:
    import numpy as np

    from shardio import ShardDataset, ShardLoader

    once = np.random.default_rng(0).random(shape)

    def fetch(stored: bytes) -> Any:
        time.sleep(FETCH_S)
        return np.frombuffer(stored).reshape(shape) if packed else once

    fields = ("image", "label")
    dataset = ShardDataset(path, batch_size=BATCH, fields=fields, transform=fetch)
    loader = ShardLoader(dataset, num_workers=workers, threads=threads, prefetch_factor=2)
    epoch = 0

    def endless() -> Any:
        nonlocal epoch
        while True:
            loader.set_epoch(epoch)
            epoch += 1
            yield from loader

    return _rounds(endless, 2 * workers, batches, shape)
