"""How often three roads through the code change rooms: packing, a batch, ShardLoader's first batch.

    python -m benchmarks.rooms [CHECKOUT]        this checkout, or another one; prints one table

Each road is walked once unmeasured, so that no import counts, then once under sys.setprofile, in
all threads and forked workers. A change is two calls or returns in a row, of one thread, whose
code lies in different files of shardio; of these, those between different rooms are counted apart.
The files of a checkout from before the rooms are counted in the room that they went to.
"""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GROUND = "errors names stack _version units machine __init__ __main__ sizes"
# Modules and packages that lay flat, by the rooms that they were moved to.
MOVED = {
    "native": "engine",
    "storage": "lock",
    "order": "options selection",
    "images": "image imagetypes jpeg",
    "formats": "manifest sample targets",
    "dataset": "collating decoding epoch_state fetch mixing pixels sequence stream whereabouts",
    "packing": "building cleaning destination exporting fieldnames indexing journal parallel plan "
    "receipt recoding scanning shard sources unpacking verifying writer",
    "loader": "device here making parcel resident serving slots workers",
    "tuning": "benching contest explaining measuring meter plotting throttle",
    "cli": "demo poster specimens",
}
ROOM_OF = {name: room for room, names in MOVED.items() for name in names.split()}
ROOM_OF |= dict.fromkeys(GROUND.split(), "ground")


def room(file: str) -> str:
    """Return the room of a file, given by its path below shardio/: "order/rng.py" is in order."""
    first = file.split("/")[0].removesuffix(".py")
    return ROOM_OF.get(first, first)


def traced(walk: Callable[[], Any], package: str) -> tuple[int, int]:
    """Return how many changes of (room, file) a call of `walk` makes, in all threads and forks."""
    log = tempfile.TemporaryFile(buffering=0)  # of lines (process, thread, file)  # noqa: SIM115
    fcntl.fcntl(log.fileno(), fcntl.F_SETFL, os.O_APPEND)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        at: FrameType | None = frame if event == "call" else frame.f_back
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(package):
            return
        while at is not None and not at.f_code.co_filename.startswith(package):
            at = at.f_back
        if at is not None:
            file = at.f_code.co_filename.removeprefix(package)
            log.write(f"{os.getpid()} {threading.get_ident()} {file}\n".encode())

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        walk()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    with log:  # forked workers that still write share its offset, and pread has none
        size = os.fstat(log.fileno()).st_size
        lines = os.pread(log.fileno(), size, 0).decode().splitlines()
    roads = defaultdict(list)
    for line in lines:
        process, thread, file = line.split(" ", 2)
        roads[process, thread].append(file)
    files = rooms = 0
    for road in roads.values():
        for one, next_one in pairwise(road):
            files += one != next_one
            rooms += room(one) != room(next_one)
    return rooms, files


def measure() -> dict[str, tuple[int, int]]:
    """Return for each road how often it changes rooms, and files."""
    from PIL import Image

    import shardio

    package = str(Path(shardio.__file__).parent) + os.sep
    found = {}
    with tempfile.TemporaryDirectory(prefix="shardio-rooms-") as folder:
        source = Path(folder, "images")
        for i in range(8):
            data = io.BytesIO()
            Image.new("RGB", (64, 48), (i * 30, 99, 7)).save(data, "JPEG")
            path = source / f"class{i % 2}" / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data.getvalue())
        shardio.pack(source, Path(folder, "warm"), jobs=1)
        out = Path(folder, "packed")
        found["pack of 8 images"] = traced(lambda: shardio.pack(source, out, jobs=1), package)

        def batches() -> Any:
            return iter(shardio.ShardDataset(out, batch_size=4, decode="numpy"))

        list(batches())
        passing = batches()
        next(passing)
        found["second batch of 4"] = traced(lambda: next(passing), package)

        def loader() -> Any:
            dataset = shardio.ShardDataset(out, batch_size=8, decode="numpy")  # one batch in all
            return shardio.ShardLoader(dataset, num_workers=1)

        with loader() as warm:
            list(warm)
        found["ShardLoader's first batch"] = min(_first_batch(loader, package) for _ in range(8))
    return found


def _first_batch(loader: Callable[[], Any], package: str) -> tuple[int, int]:
    """Trace it once. How far the worker gets meanwhile with what comes next is luck: the least."""
    with loader() as measured:
        return traced(lambda: next(iter(measured)), package)


def main() -> None:
    if len(sys.argv) > 2:
        raise SystemExit(__doc__)
    if len(sys.argv) == 2:  # another checkout: by a process that imports it
        code = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
        env = {**os.environ, "PYTHONPATH": str(Path(sys.argv[1]).resolve())}
        subprocess.run([sys.executable, "-c", code], env=env, cwd="/", check=True)
        return
    for name, (rooms, files) in measure().items():
        print(f"{name:28}{rooms:8} changes of room{files:8} of file")


if __name__ == "__main__":
    main()
