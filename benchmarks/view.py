"""Pages of `shardio view` at 10^7 records: seconds of each, and memory, in a fresh process.

1,000 shards of 10,000 records, tiny PNGs with five columns in the index, warm. Each round is a new
process that opens the dataset and asks for the pages in this order, so that a page which reads the
index of all shards does so once: the first filter. Nothing is waited for but the answer itself.
"""

from __future__ import annotations

import hashlib
import io
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

from . import data
from .harness import EntryProcess, Result, interleave

FIELDS = (
    *(("__key__", "key"), ("image", "image"), ("label", "int")),
    *(("width", "int"), ("height", "int"), ("score", "float")),
)
CLASSES = 1_000
LIMIT_S = 1.0
SEARCH = "search of a text"  # bounded by time: it says how far it came
ALL = "training order, all shuffled: made once"  # a page says after 0.7 s that it is being made


def run(source: data.Data, result: Result) -> None:
    shards, each, rounds = (20, 500, 2) if source.quick else (1_000, 10_000, 5)
    folder = source.scratch / "many"
    size = make(folder, shards, each)
    result.data(records=shards * each, shards=shards, bytes=size)

    def view() -> dict[str, Any]:
        with EntryProcess("view:pages", path=str(folder)) as entry:
            return entry.round()

    view()  # the page cache has it all from here on
    measured = interleave({"view": view}, rounds)["view"]
    result.raw("rounds", measured)
    names = measured[0]["pages"]
    rows = {name: [one["pages"][name] for one in measured] for name in names}
    columns = {"seconds": "s", "cpu_s": "CPU, s", "memory_mb": "memory of the process, MB"}
    result.table(f"{shards * each:,} records in {shards:,} shards", rows, columns)
    for name, found in rows.items():
        if name not in (SEARCH, ALL):
            slowest = sorted(one["seconds"] for one in found)[len(found) // 2]
            result.target(name, slowest, LIMIT_S, unit="s")
    most = max(one["most_mb"] for one in measured)
    result.target("memory of the process, at the most", most, 1_000, unit="MB")
    keys = {one["pages"][SEARCH]["keys_s"] for one in measured}
    result.note(f"A search reads {min(keys):,.0f} to {max(keys):,.0f} keys a second")


# --- data -----------------------------------------------------------------------------------------


def make(folder: Path, shards: int, each: int) -> int:
    """Write a dataset whose shards are like any other; return its bytes."""
    from shardio.formats import manifest
    from shardio.formats.sample import Schema

    folder.mkdir()
    with ProcessPoolExecutor() as pool:
        made = list(pool.map(partial(_shard, folder, each), range(shards), chunksize=4))
    found = manifest.make(
        [info for info, _ in made],
        dataset_id=bytes(16),
        format="record",
        schema=Schema(FIELDS),
        classes=tuple(f"class {number:04d}" for number in range(CLASSES)),
        options={},
        blob_bytes=sum(blobs for _, blobs in made),
    )
    (folder / manifest.MANIFEST).write_bytes(found.dump())
    return found.size


def _shard(folder: Path, each: int, number: int) -> Any:
    import numpy as np

    from shardio.formats import manifest
    from shardio.formats.base import ShardInfo
    from shardio.formats.record import RecordEncoder
    from shardio.formats.sample import Schema

    rng = np.random.default_rng(number)
    encoder = RecordEncoder(Schema(FIELDS), bytes(16), number)
    columns = rng.integers(0, CLASSES, each), rng.integers(200, 600, each)
    columns += rng.integers(200, 600, each), rng.random(each)
    pieces, images = [encoder.header()], _images()
    for record, values in enumerate(zip(*(one.tolist() for one in columns), strict=True)):
        image = images[record % len(images)]
        key = b"n%08d/%08d.jpg" % (values[0], number * each + record)
        pieces.extend(encoder.append([key, len(image), *values], [image]))
    content = b"".join((*pieces, encoder.finish()))
    digest = hashlib.sha256(content).digest()
    name = manifest.shard_name(number, digest)
    (folder / name).write_bytes(content)
    info = ShardInfo(name, number, each, len(content), digest, encoder.index_checksum)
    return info, encoder.blob_bytes


@cache
def _images() -> list[bytes]:
    import numpy as np
    from PIL import Image

    images = []
    for number in range(100):
        pixels = np.random.default_rng(number).integers(0, 256, (2, 2, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((8, 8), Image.Resampling.BICUBIC).save(file, "PNG")
        images.append(file.getvalue())
    return images


# --- entry ----------------------------------------------------------------------------------------


def pages(path: str) -> Callable[..., dict[str, Any]]:
    def one_round() -> dict[str, Any]:
        started = _now()
        from shardio.viewer.results import Query
        from shardio.viewer.view import open_view

        view = open_view(path)
        found = {"open, with import": _since(started)}
        records = view.summary().records
        trained = Query(order="training", epoch=3, rank=3, world_size=8, step=1_000)
        if records < 10**6:
            trained = Query(order="training", epoch=3, rank=3, world_size=8, step=1)
        last = view.page(start=records - 1).cards[0].key
        asked: dict[str, Callable[[], Any]] = {
            "first page, 100 cards": view.page,
            "jump to the middle": partial(view.page, start=records // 2),
            "jump to the end": partial(view.page, start=records - 100),
            "100 thumbnails": lambda: [view.image(number, side=128) for number in range(100)],
            "training order, epoch 3, step 1,000 of rank 3 of 8": partial(view.page, trained),
            SEARCH: partial(view.page, Query(search="no key has it")),
            "first class: reads the index": partial(view.page, Query(label=7), wait_s=None),
            "another class": partial(view.page, Query(label=8), wait_s=None),
            "training order of two classes": partial(
                view.page, Query(order="training", epoch=3, where=("label=7,8",)), wait_s=None
            ),
            "sort by a column of integers": partial(
                view.page, Query(sort="width", descending=True), wait_s=None
            ),
            "its middle": partial(
                view.page, Query(sort="width", descending=True), records // 2, wait_s=None
            ),
            "sort by a column of floats": partial(view.page, Query(sort="score"), wait_s=None),
            "filter and sort": partial(
                view.page, Query(where=("width>=500",), sort="height"), wait_s=None
            ),
            "a key, by the index": partial(view.find, last),
            ALL: partial(
                view.page, Query(order="training", epoch=3, shuffle_buffer="all"), wait_s=None
            ),
            "histograms": partial(view.histograms, wait_s=None),
            "a record": partial(view.record, records // 3),
        }
        for name, ask in asked.items():
            started = _now()
            answer = ask()
            found[name] = _since(started)
            if name == SEARCH:
                found[name]["keys_s"] = answer.searched / found[name]["seconds"]
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 * 1.024
        view.close()
        return {"pages": found, "most_mb": most}

    return one_round


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(started: tuple[float, float]) -> dict[str, float]:
    lines = Path("/proc/self/status").read_text().splitlines()
    resident = int(next(line for line in lines if line.startswith("VmRSS")).split()[1])
    return {
        "seconds": time.perf_counter() - started[0],
        "cpu_s": time.process_time() - started[1],
        "memory_mb": resident / 1e3 * 1.024,
    }
