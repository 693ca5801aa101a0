"""A bucket of 10^6 objects, listed page by page and by 16 requests at once: seconds and requests.

The objects are in 1,000 folders, or all in one. What answers is a server of the tests' own, which
knows S3's listing and nothing else, and waits 50 ms before each answer: moto, which is a store,
sorts all names for each page. It is on this machine, and shares its CPUs with who lists. Each entry
is a new process; only what it lists is measured.
"""

from __future__ import annotations

import atexit
import contextlib
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from . import data
from .harness import ROOT, BenchmarkError, EntryProcess, Result, interleave, median

LATENCY_S = 0.05
FOLDERS = 1_000


def run(source: data.Data, result: Result) -> None:
    count = 6_000 if source.quick else 10**6
    rounds = 1 if source.quick else 2
    result.data(objects=count, latency_ms=LATENCY_S * 1e3, folders=FOLDERS)
    for kind in ("folders", "flat"):
        with EntryProcess("listing:serve", kind=kind, count=count) as server:
            entries = {
                "one after the other": partial(_entry, server, 1),
                "16 at once": partial(_entry, server, 16),
            }
            measured = interleave(entries, rounds)
        columns = {"seconds": "s", "requests": "requests", "cpu_s": "CPU, s"}
        name = f"{count:,} objects, {kind}"
        result.raw(name, measured)
        result.table(name, measured, columns, versus="one after the other", by="seconds")
        alone, many = measured["one after the other"], measured["16 at once"]
        most = 1.2 * median(alone, "requests") + 5
        result.target(f"{name}: requests", median(many, "requests"), most, unit="requests")


def _entry(server: EntryProcess, at_once: int) -> dict[str, Any]:
    """List the bucket in a new process."""
    before = server.round()
    with EntryProcess("listing:listed", options=before["options"], at_once=at_once) as entry:
        found = entry.round()
    if found["objects"] != before["objects"]:
        raise BenchmarkError(f"{found['objects']:,} objects of {before['objects']:,} were listed")
    return found | {"requests": server.round()["lists"] - before["lists"]}


# --- entries --------------------------------------------------------------------------------------


def serve(kind: str, count: int) -> Callable[..., dict[str, Any]]:
    sys.path.insert(0, str(ROOT / "tests"))
    from support.list_server import list_server

    each = max(1, count // FOLDERS)
    names = [f"{n:08d}.jpg" for n in range(count)]
    if kind == "folders":
        names = [f"n{n // each:05d}/n{n // each:05d}_{n % each}.JPEG" for n in range(count)]
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    bucket = stack.enter_context(list_server(names))
    bucket.latency_s = LATENCY_S
    return lambda: {"lists": bucket.lists, "options": bucket.options, "objects": count}


def listed(options: dict[str, str], at_once: int) -> Callable[..., dict[str, Any]]:
    from shardio import Storage
    from shardio.storage import ranges, walk
    from shardio.storage.location import locate

    assert walk.MOST_REQUESTS
    setattr(walk, "MOST_REQUESTS", at_once)  # noqa: B010
    place: Any = locate("s3://bucket", Storage(options=options))

    def measured() -> dict[str, Any]:
        started = time.perf_counter()
        count = sum(1 for _ in place.walk(list))
        seconds = time.perf_counter() - started
        ranges.close()
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return {
            "seconds": seconds,
            "objects": count,
            "cpu_s": sum(one.ru_utime + one.ru_stime for one in used),
        }

    return measured
