"""Datasets by URL: photographs as files, from a store that is far away, and one that is near.

Far: nginx on loopback behind the tests' own proxy, with 50 ms to the first byte of each answer,
40 MB/s a connection and 300 MB/s in all. The yardstick is curl with 32 connections that reads the
same shards in ranges of 8 MiB. Near: nginx alone; the yardstick is a loop of obstore's get_range.
Nothing is decoded (`decode=None`), and everything is at its default. A round is an epoch, from the
call that opens the dataset on; only imports were before. Its loader, and its helper process, are
started in it. "After 1 s" leaves out the first second: of the bytes that were handed out, the part
that the store sent after it, over the time from there to the last batch.

CPU of server and proxy are of this machine, too: what takes part shares its processors with them.
Requests and bytes are those that the proxy saw.
"""

from __future__ import annotations

import contextlib
import functools
import json
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import data
from .harness import ROOT, BenchmarkError, NotHere, Result, interleave, median, ratio, show
from .rivals import RIVALS
from .rivals.base import ENVIRONMENTS as ENVIRONMENTS
from .rivals.base import Guarded

PARTS = ("far", "cache", "random", "near")
PHOTOS = 24_000  # 2.6 GB, nine seconds at 300 MB/s; up to 20,000 are shuffled as a whole by default
ROUNDS = 3
LATENCY_S, CONNECTION, ALL = 0.05, 40e6, 300e6  # of the store that is far; bytes a second
RANGE = 8 << 20  # bytes of one request: shardio's, and so curl's and obstore's
CONNECTIONS = 32  # of curl
THREADS = 24  # of the loop over get_range: as many requests as a loader process begins with
BATCH = 256
FIRST_S = 1.0  # the second in which loaders start
IN_FLIGHT = 256 << 20  # bytes that shardio has on their way, at most

CURL = f"curl, {CONNECTIONS} connections"
SHARD, TORCH, HERE = "ShardLoader, 2 workers", "DataLoader, 2 workers", "DataLoader, 0 workers"
STREAMING = ("mosaicml", "litdata", "webdataset", "huggingface")  # of the rivals: those that can
FAILING, STALLING = "1 % fail", "1 % stall"
BOTH = "1 % fail, 1 % stall"
BARE = f"obstore get_range, {THREADS} threads"

FAR = {
    "steady_mb_s": "MB/s after 1 s",
    "mb_s": "MB/s",
    "first_s": "first batch, s",
    "requests": "requests",
    "sent": "bytes sent / payload",
    "cpu_s": "CPU s, itself",
    "proxy_cpu_s": "proxy",
    "server_cpu_s": "server",
}
NEAR = {"mb_s": "MB/s", "cpu_s": "CPU s, itself", "server_cpu_s": "server"}

Turn = Callable[..., dict[str, Any]]


class Packed(NamedTuple):
    """The shards that are read."""

    folder: Path
    shards: list[tuple[str, int, int]]  # name, records, bytes
    records: int
    payload: int  # bytes of all files


class Store(NamedTuple):
    """The two servers, and how to read the figures of what one turn asked of them."""

    near: Any  # support.servers.Web
    far: Any  # support.fault_proxy.FaultProxy
    payload: int

    def turn(self, one: Turn, rules: Sequence[Any] = (), **asked: Any) -> dict[str, Any]:
        """Run one turn, and add what it cost the servers."""
        from shardio.machine import cpu_seconds

        self.far.rules(*rules)
        self.far.reset()
        before = cpu_seconds([self.near.pid]) or 0.0
        early: list[int] = []
        timer = threading.Timer(FIRST_S, lambda: early.append(self.far.figures().sent))
        timer.start()
        found = one(**asked)
        timer.cancel()
        timer.join()
        figures = self.far.figures()
        found["server_cpu_s"] = (cpu_seconds([self.near.pid]) or 0.0) - before
        if figures.requests:
            found["proxy_cpu_s"] = figures.cpu_s
            found["steady_mb_s"] = found.get("mb_s")
            if found.get("seconds", 0.0) > 2 * FIRST_S and early:
                part = 1 - early[0] / figures.sent
                seconds = found["seconds"] - FIRST_S
                found["steady_mb_s"] = part * self.payload / seconds / 1e6
            found["requests"] = figures.requests
            found["sent"] = figures.sent / self.payload
            found["concurrent"] = figures.most_concurrent
            found["faults"] = sum(figures.faults.values())
        return found


def run(source: data.Data, result: Result, parts: Sequence[str] = PARTS) -> None:
    support = servers_of_tests()
    root = source.scratch / "www"
    folder = source.photos(500 if source.quick else PHOTOS)
    files = data.listing(folder)
    packed = _pack(folder, root / "shards", data.payload(files))
    result.data(records=packed.records, payload_bytes=packed.payload, shards=len(packed.shards))
    limits = {"latency_s": LATENCY_S, "connection_bandwidth": CONNECTION, "bandwidth": ALL}
    with contextlib.ExitStack() as stack:
        near = stack.enter_context(support["nginx"](root))
        far = stack.enter_context(support["fault_proxy"](near.port, **limits))
        store = Store(near, far, packed.payload)
        if "far" in parts:
            _far(source, result, store, packed, support["Rule"], folder)
        if "cache" in parts:
            _cache(source, result, store, packed)
        if "random" in parts:
            _random(source, result, store, packed)
        if "near" in parts:
            _near(source, result, store, packed)


def _rounds(source: data.Data) -> int:
    return 2 if source.quick else ROUNDS


def servers_of_tests() -> dict[str, Any]:
    """Return the servers of the tests."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        import obstore  # noqa: F401
        from support.fault_proxy import fault_proxy
        from support.faults import Rule
        from support.servers import find_program, nginx
    except ImportError as error:
        raise NotHere(f"the servers of the tests cannot run here: {error}: tools/setup") from None
    missing = [name for name in ("nginx", "curl") if find_program(name) is None]
    if missing:
        raise NotHere(f"{' and '.join(missing)} not there: apt-get install nginx-light curl")
    return {"nginx": nginx, "fault_proxy": fault_proxy, "Rule": Rule}


def _pack(folder: Path, out: Path, payload: int) -> Packed:
    out.parent.mkdir(parents=True)
    data.pack(folder, out)
    manifest = json.loads((out / "manifest.json").read_text())
    shards = [(one[0], one[1], one[2]) for one in manifest["shards"]]
    return Packed(out, shards, manifest["records"], payload)


# --- the far store --------------------------------------------------------------------------------


def _far(
    source: data.Data, result: Result, store: Store, packed: Packed, rule: Any, folder: Path
) -> None:
    url = f"{store.far.url}/shards"
    counts = {"records": packed.records, "payload": packed.payload}
    entries: dict[str, Guarded] = {
        SHARD: Guarded("remote_entries:epochs", way="ShardLoader", workers=2, **counts),
        TORCH: Guarded("remote_entries:epochs", way="DataLoader", workers=2, **counts),
        HERE: Guarded("remote_entries:epochs", way="DataLoader", workers=0, **counts),
    }
    failing = [rule("503", path="[.]shard$", fraction=0.005, seed=1)]
    failing += [rule("reset", path="[.]shard$", fraction=0.005, seed=2)]
    stalling = [rule("stall", path="[.]shard$", fraction=0.01, seed=3)]
    faults = {FAILING: failing, STALLING: stalling, BOTH: failing + stalling}
    failed: dict[str, str] = {}
    others = _rivals(source, result, store, packed, folder) if source.rivals else {}
    data.remove(folder)
    with contextlib.ExitStack() as stack:
        for entry in entries.values():
            stack.enter_context(entry)
        turns: dict[str, Turn] = {
            CURL: functools.partial(store.turn, _curl(url, packed, source.scratch))
        }
        for name, entry in entries.items():
            turns[name] = functools.partial(store.turn, entry.round, url=url)
        for name, (there, entry) in others.items():
            turn = functools.partial(store.turn, stack.enter_context(entry).round, url=there)
            turns[name] = functools.partial(_unless_failed, turn, name, failed)
        for name, rules in faults.items():
            turns[name] = functools.partial(store.turn, entries[SHARD].round, rules, url=url)
        rounds = _rounds(source)
        measured = interleave(turns, rounds)
        memory = store.turn(entries[SHARD].round, url=url, memory=True, epoch=0)
        here = entries[SHARD].round(url=str(packed.folder), memory=True, epoch=0)
        memory["local_copy_mb"] = here["memory_mb"]
        needed = _needed(packed, store.far.figures().log)
    for name, error in failed.items():
        result.note(f"{name}: was not measured: {error}")
        del measured[name]
    result.raw("far", measured)
    result.raw("far, memory", memory | {"needed": needed})
    what = f"50 ms, 40 MB/s a connection, 300 MB/s, {packed.records:,} files, batches of {BATCH}"
    sound = {name: rounds for name, rounds in measured.items() if name not in faults}
    result.table(what, sound, FAR, versus=CURL, by="steady_mb_s")
    struck = {SHARD: measured[SHARD]} | {name: measured[name] for name in faults}
    columns = {"mb_s": "MB/s", "requests": "requests", "faults": "of them struck"}
    result.table("ShardLoader, 2 workers, with faults", struck, columns, versus=SHARD, by="mb_s")
    _far_targets(result, packed, measured, memory | {"needed": needed})


def _rivals(
    source: data.Data, result: Result, store: Store, packed: Packed, folder: Path
) -> dict[str, tuple[str, Guarded]]:
    """Return for each rival that is installed, and wrote the images, its URL and its entry."""
    found: dict[str, tuple[str, Guarded]] = {}
    for rival in RIVALS:
        if rival.module not in STREAMING:
            continue
        if missing := rival.missing():
            result.note(f"{rival.title} was not measured: {missing}")
            continue
        out, url = packed.folder.parent / rival.module, f"{store.far.url}/{rival.module}"
        given = {"module": rival.module, "records": packed.records, "payload": packed.payload}
        try:
            show(f"  {rival.title}: writing")
            with rival.process("remote_entries:writing", source.scratch, module=rival.module) as it:
                files = it.round(folder=str(folder), out=str(out))["files"]
            asked = given | {"files": files, "workers": 2}
            entry = rival.process("remote_entries:rival", source.scratch, **asked)
            found[f"{rival.stores}, 2 workers"] = url, entry
        except BenchmarkError as error:
            result.note(f"{rival.title} was not measured: writing failed: {error}")
            data.remove(out)
    return found


def _unless_failed(turn: Turn, name: str, failed: dict[str, str]) -> dict[str, Any]:
    """Run a turn of a rival, which is left out from then on if it fails."""
    if name in failed:
        return {}
    try:
        return turn()
    except BenchmarkError as error:
        failed[name] = str(error)
        show(f"  {name}: {error}")
        return {}


def _far_targets(
    result: Result, packed: Packed, measured: dict[str, list[dict[str, Any]]],
    memory: Mapping[str, Any],
) -> None:  # fmt: skip
    for name in (SHARD, TORCH):
        found = ratio(measured, name, CURL, "steady_mb_s")
        result.target(f"{name}: bytes/s after 1 s, of {CURL}", found, -0.9)
        transfer_s = max(memory["needed"] / ALL, RANGE / CONNECTION)
        limit = 8 * LATENCY_S + 2 * transfer_s
        what = f"{name}: first batch, within 8 round trips and twice the transfer of its ranges"
        result.target(what, median(measured[name], "first_s"), limit, unit="s")
        spans = first_spans(packed.records)
        limit = packed.payload / RANGE + 3 * len(packed.shards) + 2 * spans
        result.target(f"{name}: requests", median(measured[name], "requests"), limit, unit="")
    # Storage comes in ranges: of each span half a one, on average, lies beyond its window.
    held = memory["window_bytes"] + first_spans(packed.records) * RANGE / 2
    what = f"{SHARD}: memory beyond a local copy's, within windows, ranges and bytes in flight"
    found = memory["memory_mb"] - memory["local_copy_mb"]
    result.target(what, found, (IN_FLIGHT + held) / 1e6, unit="MB")
    for name in (FAILING, STALLING, BOTH):
        what = f"{SHARD}, {name}: MB/s, of those without"
        result.target(what, median(measured[name], "mb_s") / median(measured[SHARD], "mb_s"), -0.85)


def _needed(packed: Packed, log: Sequence[Any]) -> int:
    """Count the bytes of the ranges that hold the records of the first batch of epoch 0."""
    import numpy as np

    import shardio

    stored = shardio.open(packed.folder, decode=None)
    ends = np.cumsum([records for _, records, _ in packed.shards])
    sizes = np.asarray(stored.sizes())
    wanted: dict[str, list[int]] = {}
    dataset = shardio.ShardDataset(
        packed.folder, batch_size=BATCH, fields=("__key__",), decode=None, collate_fn=list
    )
    for (key,) in next(iter(dataset)):
        number = stored.find(key)
        shard = int(np.searchsorted(ends, number, side="right"))
        start = int(ends[shard - 1]) if shard else 0
        wanted.setdefault(packed.shards[shard][0], []).append(int(sizes[start:number].sum()))
    found = 0
    for path, asked in {(one.path, one.range) for one in log if one.range}:
        first, last = map(int, asked.removeprefix("bytes=").split("-"))
        places = wanted.get(path.rpartition("/")[2], [])
        found += (last + 1 - first) * any(first <= place <= last for place in places)
    return found


def first_spans(records: int) -> int:
    """Count the spans of the default order."""
    return min(64, records)


def _curl(url: str, packed: Packed, scratch: Path) -> Turn:
    """All shards in ranges, by curl."""
    config = scratch / f"curl-{time.monotonic_ns()}"
    transfers = [
        f'url = "{url}/{name}"\nrange = {start}-{min(size, start + RANGE) - 1}\n'
        "output = /dev/null\nfail\n"
        for name, _, size in packed.shards
        for start in range(0, size, RANGE)
    ]
    config.write_text("next\n".join(transfers))
    command = ["curl", "--parallel", "--parallel-immediate", "--parallel-max", str(CONNECTIONS)]
    command += ["--silent", "--show-error", "--no-progress-meter", "--config", str(config)]
    size = sum(size for _, _, size in packed.shards)

    def one_round() -> dict[str, Any]:
        used = _children_cpu_s()
        began = time.perf_counter()
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - began
        if done.returncode:
            raise BenchmarkError(f"curl: {done.stderr.strip()}")
        speed = size / seconds / 1e6
        cpu_s = _children_cpu_s() - used
        return {"seconds": seconds, "mb_s": speed, "cpu_s": cpu_s}

    return one_round


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- a cache --------------------------------------------------------------------------------------


def _cache(source: data.Data, result: Result, store: Store, packed: Packed) -> None:
    cache = source.scratch / "cache"
    url = f"{store.far.url}/shards"
    counts = {"records": packed.records, "payload": packed.payload}
    given: dict[str, Any] = {"way": "ShardLoader", "workers": 2} | counts
    local, cold, warm = "local copy", "by URL, cold cache", "by URL, warm cache"
    with (
        Guarded("remote_entries:epochs", **given) as here,
        Guarded("remote_entries:epochs", cache=str(cache), **given) as cached,
    ):

        def first() -> dict[str, Any]:
            shutil.rmtree(cache, ignore_errors=True)
            return cached.round(url=url)

        epochs = 1 if source.quick else 3
        turns: dict[str, Turn] = {
            local: functools.partial(here.round, url=str(packed.folder), epochs=epochs),
            cold: functools.partial(store.turn, first),
            warm: functools.partial(store.turn, cached.round, url=url, epochs=epochs),
        }
        measured: dict[str, list[dict[str, Any]]] = {name: [] for name in turns}
        # Not in turns that begin with another each: warm is what comes behind cold.
        for _ in range(_rounds(source)):
            for name in (cold, warm, local):
                measured[name].append(turns[name]())
                show(f"  {name}: {measured[name][-1]['flow_mb_s']:.0f} MB/s")
    shutil.rmtree(cache, ignore_errors=True)
    result.raw("cache", measured)
    columns = {
        "flow_mb_s": "MB/s from the first batch on",
        "first_s": "first batch, s",
        "requests": "requests",
        "sent": "bytes sent / payload",
        "cpu_s": "CPU s",
    }
    what = f"A cache on disk, ShardLoader, 2 workers; local and warm: {epochs} epochs a round"
    result.table(what, measured, columns, versus=local, by="flow_mb_s")
    found = ratio(measured, warm, local, "flow_mb_s")
    result.target("warm cache: bytes/s, of those of the local copy", found, -0.95)


# --- single records -------------------------------------------------------------------------------


def _random(source: data.Data, result: Result, store: Store, packed: Packed) -> None:
    counts = [records for _, records, _ in packed.shards]
    name = "shardio.open(url)[i]"
    with Guarded("remote_entries:random_records", counts=counts) as entry:
        turn = functools.partial(
            store.turn, entry.round, url=f"{store.far.url}/shards", each=3 if source.quick else 20
        )
        measured = interleave({name: turn}, _rounds(source))
    for one in measured[name]:
        one["trips"] = one["record_s"] / LATENCY_S
        one["record_ms"] = one["record_s"] * 1e3
    result.raw("random", measured)
    columns = {
        "trips": "round trips a record, by time",
        "record_ms": "ms a record",
        "each_requests": "requests a record",
        "first_ms": "ms, first record of a shard",
    }
    result.table("Single records at random, after the first of each shard", measured, columns)
    found = median(measured[name], "trips")
    result.target("single records: round trips a record, by time", found, 1.2, unit="")


# --- the near store -------------------------------------------------------------------------------


def _near(source: data.Data, result: Result, store: Store, packed: Packed) -> None:
    url = f"{store.near.url}/shards"
    counts = {"records": packed.records, "payload": packed.payload}
    one, two = "one loader process, lengths", "two loader processes, lengths"
    helper = "0 workers, by the helper"
    given: dict[str, Any] = {"way": "ShardLoader", **counts}
    entries = {
        BARE: Guarded("remote_entries:bare", threads=THREADS, shards=packed.shards),
        one: Guarded("remote_entries:epochs", workers=1, lengths=True, **given),
        two: Guarded("remote_entries:epochs", workers=2, lengths=True, **given),
        "one loader process": Guarded("remote_entries:epochs", workers=1, **given),
        "two loader processes": Guarded("remote_entries:epochs", workers=2, **given),
        helper: Guarded("remote_entries:epochs", workers=0, **given),
    }
    with contextlib.ExitStack() as stack:
        for entry in entries.values():
            stack.enter_context(entry)
        turns: dict[str, Turn] = {
            CURL: functools.partial(store.turn, _curl(url, packed, source.scratch))
        }
        epochs = 1 if source.quick else 3
        for name, entry in entries.items():
            turns[name] = functools.partial(store.turn, entry.round, url=url, epochs=epochs)
        measured = interleave(turns, _rounds(source))
    result.raw("near", measured)
    what = f"No latency, no limit, {epochs} epochs a round; lengths: workers send no bytes"
    result.table(what, measured, NEAR, versus=BARE, by="mb_s")
    for name, versus, limit in ((one, BARE, 0.9), (two, CURL, 0.6), (helper, BARE, 0.45)):
        found_ratio = ratio(measured, name, versus, "mb_s")
        result.target(f"near: {name}, MB/s, of {versus}", found_ratio, -limit)
