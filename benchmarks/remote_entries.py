"""The processes that `remote` measures: epochs by URL, single records, bare get_range."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

BATCH = 256
RANGE = 8 << 20
SAMPLED_S = 0.2  # between two looks at the memory
EVENED_OUT = (
    0.02  # of the records: rivals give all workers as many, and leave some out or repeat some
)

Round = Callable[..., dict[str, Any]]


def timed(
    batches: Iterator[tuple[int, int]],
    began: float,
    records: int,
    payload: int,
    tolerance: float = 0.0,
) -> dict[str, Any]:
    """Measure (images, bytes) of each batch, all of which are taken at once.

    tolerance: the part of the records that may be missing, or come twice
    """
    images = size = 0
    first_s = end = 0.0
    first_bytes = 0
    for one, more in batches:
        images, size = images + one, size + more
        end = time.perf_counter() - began
        if not first_s:
            first_s, first_bytes = end, size
    assert abs(images - records) <= tolerance * records, (images, records)
    assert abs(size - payload) <= tolerance * payload, (size, payload)
    found = {"seconds": end, "mb_s": size / end / 1e6, "first_s": first_s}
    found["first_bytes"] = first_bytes
    if end > first_s:
        found["flow_mb_s"] = (size - first_bytes) / (end - first_s) / 1e6
    return found


def epochs(
    way: str, workers: int, records: int, payload: int, lengths: bool = False, cache: str = ""
) -> Round:
    """Whole epochs of shardio's, at its defaults, from the call that opens the dataset on.

    lengths: what leaves a loader process are the lengths of the files, instead of the files.
    """
    from torch.utils.data import DataLoader

    import shardio
    from shardio.machine import cpu_seconds, family, pss_bytes
    from shardio.storage import ranges

    options: dict[str, Any] = {"collate_fn": _lengths} if lengths else {}
    if cache:
        options["storage"] = shardio.Storage(cache=cache, cache_bytes="100GiB")
    number = 0

    def one_round(
        url: str, epochs: int = 1, memory: bool = False, epoch: int | None = None
    ) -> dict[str, Any]:
        nonlocal number
        number = number if epoch is None else epoch
        used = cpu_seconds(family(os.getpid())) or 0.0
        resting = pss_bytes(family(os.getpid())) or 0
        began = time.perf_counter()
        dataset = shardio.ShardDataset(
            url, batch_size=BATCH, fields=("image", "label"), decode=None, **options
        )

        def batches() -> Iterator[tuple[int, int]]:
            nonlocal number
            if way == "ShardLoader":
                loader: Any = shardio.ShardLoader(dataset, num_workers=workers)
            else:
                more = {"persistent_workers": True} if workers and epochs > 1 else {}
                loader = DataLoader(dataset, batch_size=None, num_workers=workers, **more)
            for _ in range(epochs):
                dataset.set_epoch(number)
                number += 1
                for batch in loader:
                    yield batch if lengths else (len(batch[0]), int(batch[0].offsets[-1]))
            if way == "ShardLoader":
                loader.close()

        with _most(memory) as most:
            found = timed(batches(), began, epochs * records, epochs * payload)
        ranges.close()  # its helper, which the next round starts anew
        found["cpu_s"] = (cpu_seconds(family(os.getpid())) or 0.0) - used
        if memory:
            found["memory_mb"] = (most() - resting) / 1e6
            found["window_bytes"] = (dataset.shuffle_buffer or 0) * payload / records
        return found

    return one_round


def writing(module: str) -> Round:
    """What a rival makes of the folder of images, to be read by URL."""
    import importlib

    adapter = importlib.import_module(f"benchmarks.rivals.{module}")
    write = getattr(adapter, "write_parquet", None) or adapter.write

    def one_round(folder: str, out: str) -> dict[str, Any]:
        write(folder, out)
        return {"files": sorted(os.listdir(out))}

    return one_round


def rival(module: str, files: Sequence[str], records: int, payload: int, workers: int) -> Round:
    """Whole epochs of a rival's, into a cache that is new each time."""
    import gc
    import importlib
    import shutil
    import tempfile

    from shardio.machine import cpu_seconds, family

    stream = importlib.import_module(f"benchmarks.rivals.{module}").stream

    def one_round(url: str) -> dict[str, Any]:
        used = cpu_seconds(family(os.getpid())) or 0.0
        home = tempfile.mkdtemp()
        began = time.perf_counter()
        batches = stream(url, list(files), f"{home}/cache", batch=BATCH, workers=workers)
        sizes = ((len(images), sum(map(len, images))) for images, _ in batches)
        found = timed(sizes, began, records, payload, EVENED_OUT)
        found["cpu_s"] = (cpu_seconds(family(os.getpid())) or 0.0) - used
        del batches, sizes
        gc.collect()
        shutil.rmtree(home, ignore_errors=True)
        return found

    return one_round


def _lengths(rows: Sequence[tuple[Any, int]]) -> tuple[int, int]:
    return len(rows), sum(len(image) for image, _ in rows)


@contextmanager
def _most(wanted: bool) -> Iterator[Callable[[], int]]:
    """Watch the memory of this process and its children, if that is wanted."""
    from shardio.machine import family, pss_bytes

    found, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLED_S):
            found.append(pss_bytes(family(os.getpid())) or 0)

    thread = threading.Thread(target=watch)
    if wanted:
        thread.start()
    try:
        yield lambda: max(found)
    finally:
        over.set()
        if wanted:
            thread.join()


def random_records(counts: Sequence[int]) -> Round:
    """Single records by `shardio.open(url)[i]`. counts: records of each shard."""
    import shardio
    from shardio.storage import ranges

    draw = random.Random(0)

    def one_round(url: str, each: int) -> dict[str, Any]:
        firsts, others, requests, start = [], [], 0, 0
        opened = shardio.open(url, decode=None)
        for count in counts:
            began = time.perf_counter()
            assert opened[start]["image"]
            firsts.append(time.perf_counter() - began)
            before = _requests(ranges)
            for _ in range(each):
                number = start + draw.randrange(1, count)
                began = time.perf_counter()
                assert opened[number]["image"]
                others.append(time.perf_counter() - began)
            requests += _requests(ranges) - before
            start += count
        ranges.close()
        return {
            "record_s": sum(others) / len(others),
            "first_ms": sum(firsts) / len(firsts) * 1e3,
            "each_requests": requests / len(others),
        }

    return one_round


def _requests(ranges: Any) -> int:
    figures = ranges.figures()
    return 0 if figures is None else int(figures.requests)


def bare(threads: int, shards: Sequence[tuple[str, int, int]]) -> Round:
    """All shards in ranges, by obstore's get_range on so many threads. shards: name, -, bytes."""
    import obstore
    from obstore.store import HTTPStore

    from shardio.machine import cpu_seconds

    def one_round(url: str, epochs: int = 1) -> dict[str, Any]:
        store = HTTPStore.from_url(url, client_options={"allow_http": True})
        left = [
            (name, start, min(size, start + RANGE))
            for _ in range(epochs)
            for name, _, size in shards
            for start in range(0, size, RANGE)
        ]
        left.reverse()
        sizes: list[int] = []

        def work() -> None:
            while True:
                try:
                    name, start, end = left.pop()
                except IndexError:
                    return
                sizes.append(len(obstore.get_range(store, name, start=start, end=end)))

        used, began = cpu_seconds([os.getpid()]) or 0.0, time.perf_counter()
        started = [threading.Thread(target=work) for _ in range(threads)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        seconds = time.perf_counter() - began
        assert sum(sizes) == epochs * sum(size for _, _, size in shards)
        cpu_s = (cpu_seconds([os.getpid()]) or 0.0) - used
        return {"seconds": seconds, "mb_s": sum(sizes) / seconds / 1e6, "cpu_s": cpu_s}

    return one_round
