"""Packing and training on 10 and 100 nodes, with deaths: hours, requests and their price.

A simulation. Nodes have speeds drawn by chance, and die by chance. A node takes one part after the
other; where it dies, the finished shards of its part stay, and another node takes the rest. How
long a part takes is the slowest of CPU, network, shared file system and store; the CPU seconds are
measured here, by `shardio` on photographs. What training asks a store for is `explain`'s arithmetic
over the order as training has it, checked by a walk of one loader process. All else is assumed: the
constants below.
"""

from __future__ import annotations

import heapq
import math
import os
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import data
from .harness import ROOT, BenchmarkError, Result
from .remote import servers_of_tests
from .scale import requests_a_row

SHARD = 256 << 20  # bytes: the default
PIECE = 8 << 20  # of a part of an upload
JOBS = 16  # processes of a node that packs
NETWORK = 1.25e9  # bytes/s of a node: 10 Gbit/s
SHARED = 20e9  # bytes/s of the file system that all nodes see
GETS_S = 55_000  # that the store serves: 5,500 for each of ten prefixes
LIST_S, LISTS = 0.1, 16  # for 1,000 objects; and how many requests list at once
GET, PUT = 0.0004e-3, 0.005e-3  # dollars a request: S3's list prices; PUT: also LIST, and parts
LIFE_H = 1_000  # that a node lives, on average
REPLACED_S = 300.0  # until another one stands in
BEGIN_S = 10.0  # of a part or a training: start, manifest or plan
IMAGES_S, RANKS, BATCH = 3_000, 8, 32  # of a node that trains, its GPUs, the batch of each
EVERY = 1_000  # steps from checkpoint to checkpoint
NODES = (10, 100)
SEEDS = 100


@dataclass(frozen=True)
class Example:
    """Say how many images there are, of what size, and how often training reads them."""

    name: str
    images: int
    bytes: float
    epochs: int

    @property
    def shards(self) -> int:
        return math.ceil(self.bytes / SHARD)


EXAMPLES = (
    Example("ImageNet-21k", 14_197_122, 1.3e12, 90),
    Example("10^9 images", 10**9, 1e14, 5),
)


def run(source: data.Data, result: Result) -> None:
    cpu = _measure(source)
    result.raw("cpu_s_a_gb", cpu)
    _assumptions(cpu, result)
    seeds = 3 if source.quick else SEEDS
    for example in EXAMPLES:
        _packing(example, cpu, seeds, result)
        _training(example, seeds, result)


def _assumptions(cpu: dict[str, float], result: Result) -> None:
    """Store what the figures follow from."""
    found = {f"measured: `{name}`, MB/s a core": 1e3 / each for name, each in cpu.items()}
    found |= {
        "processes of a node that packs (`--jobs`)": JOBS,
        "network of a node, GB/s": NETWORK / 1e9,
        "file system that all nodes see, GB/s": SHARED / 1e9,
        "GET that the store serves, a second (ten prefixes)": GETS_S,
        "a LIST of 1,000 objects, s": LIST_S,
        "LIST requests at once": LISTS,
        "price of 1,000 GET or HEAD, $": GET * 1_000,
        "price of 1,000 PUT or LIST, $": PUT * 1_000,
        "hours that a node lives, on average": LIFE_H,
        "minutes until another node stands in": REPLACED_S / 60,
        "seconds until a part, or a training, has begun": BEGIN_S,
        "images that a node trains on, a second": IMAGES_S,
        "GPUs of a node": RANKS,
        "images of a batch, on each GPU": BATCH,
        "steps from checkpoint to checkpoint": EVERY,
    }
    rows = {name: [{"value": value}] for name, value in found.items()}
    result.table("Measured and assumed", rows, {"value": "value"})


# --- what is measured -----------------------------------------------------------------------------


def _measure(source: data.Data) -> dict[str, float]:
    """Return the CPU seconds for 10^9 bytes of photographs, of each command; without its start."""
    folder = source.photos(40 if source.quick else 4_000)
    with servers_of_tests()["nginx"](folder) as web:
        seconds: list[dict[str, float]] = []
        sizes: list[int] = []
        for name, share in (("few", 20), ("all", 1)):
            files = sorted(path for path in folder.rglob("*.jpg"))[::share]
            sizes.append(sum(path.stat().st_size for path in files))
            rows = [f"{path.relative_to(folder)}\n" for path in files]
            listing = source.scratch / f"{name}.csv"
            listing.write_text("".join(["image\n", *rows]))
            out, copy = source.scratch / f"{name}-packed", source.scratch / f"{name}-copy"
            pack = ("pack", listing, out, "--root", web.url, "--jobs", "1")
            seconds.append(
                {
                    "pack": _cpu_s(*pack),
                    "verify": _cpu_s("verify", out, "--jobs", "1"),
                    "copy": _cpu_s("copy", out, copy),
                }
            )
    few, every = seconds
    return {name: (every[name] - few[name]) / (sizes[1] - sizes[0]) * 1e9 for name in every}


def _cpu_s(*arguments: str | Path) -> float:
    """Run a command; the CPU seconds of it and its children."""
    line = [sys.executable, "-m", "shardio", *map(str, arguments)]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise BenchmarkError(f"shardio {arguments[0]} ended with code {process.returncode}")
    return used.ru_utime + used.ru_stime


# --- packing --------------------------------------------------------------------------------------


def _packing(example: Example, cpu: dict[str, float], seeds: int, result: Result) -> None:
    pieces = example.bytes / PIECE + 2 * example.shards  # parts, and what begins and ends an upload
    gets = {"pack": example.images, "verify": 0, "copy": 2 * example.shards}  # HEAD
    puts = {"pack": 0.0, "verify": 0.0, "copy": pieces}
    lists = example.images / 1_000
    rows: dict[str, list[dict[str, Any]]] = {
        "plan, 1 process": [
            {
                "hours": lists * LIST_S / LISTS / 3_600,
                "millions": lists / 1e6,
                "dollars": lists * PUT,
            }
        ]
    }
    for step in gets:
        asked = {
            "tb": (1 if step == "verify" else 2) * example.bytes / 1e12,
            "millions": (gets[step] + puts[step]) / 1e6,
            "dollars": gets[step] * GET + puts[step] * PUT,
        }
        for nodes in NODES:
            for parts in (nodes, 10 * nodes) if step == "pack" else (10 * nodes,):
                limits = _limits(example, step, cpu[step], nodes)
                rows[f"{step}, {nodes} nodes, {parts:,} parts"] = [
                    simulate(example.shards, parts, nodes, limits, seed) | asked
                    for seed in range(seeds)
                ]
                result.raw(f"{example.name}: {step}, {nodes} nodes, s a shard", limits)
    alone = _limits(example, "verify", cpu["verify"], 1)
    rows["commit, 1 node, which reads all"] = [
        simulate(example.shards, 1, 1, alone, seed) | {"tb": example.bytes / 1e12}
        for seed in range(seeds)
    ]
    columns = {
        "hours": "hours",
        "deaths": "deaths",
        "again": "shards begun again",
        "tb": "read and written, TB",
        "millions": "requests, millions",
        "dollars": "price of these, $",
    }
    result.table(f"{example.name}: to a dataset in a bucket", rows, columns)


def _limits(example: Example, step: str, cpu_s: float, nodes: int) -> dict[str, float]:
    """Return the seconds that a shard takes: of a process's CPU, and of what a node shares."""
    size = example.bytes / example.shards
    limits = {
        "cpu": size * cpu_s / 1e9,
        "network": size / NETWORK,
        "shared file system": nodes * size / SHARED,
    }
    if step == "pack":
        limits["requests"] = nodes * example.images / example.shards / GETS_S
    return limits


def simulate(
    shards: int,
    parts: int,
    nodes: int,
    limits: dict[str, float],
    seed: int,
    life_h: float = LIFE_H,
) -> dict[str, float]:
    """Run a step once: its hours, the nodes that died, and the shards that were begun again."""
    flow_s = max(each for name, each in limits.items() if name != "cpu")
    rng = np.random.default_rng(seed)
    left = [shards * (part + 1) // parts - shards * part // parts for part in range(parts)]
    waiting = deque(range(parts))
    speed, dies = [0.0] * nodes, [0.0] * nodes
    events: list[tuple[float, int, int, int]] = []  # when, node, its part or -1, shards it finished
    idle: list[int] = []
    now, deaths, again, open_parts = 0.0, 0, 0, parts

    def replace(node: int) -> None:
        slow = 0.5 if rng.random() < 0.05 else 1.0
        speed[node] = slow * min(1.3, max(0.7, rng.normal(1, 0.1)))
        dies[node] = now + rng.exponential(life_h * 3_600)

    def take(node: int) -> None:
        part = waiting.popleft()
        rounds = math.ceil(left[part] / JOBS)
        seconds = max(rounds * limits["cpu"] / speed[node], left[part] * flow_s)
        ends = now + BEGIN_S + seconds
        read = min(1.0, max(0.0, dies[node] - now - BEGIN_S) / seconds)
        done = left[part] if dies[node] >= ends else max(0, int(read * left[part]) - JOBS)
        heapq.heappush(events, (min(ends, dies[node]), node, part, done))

    for node in range(nodes):
        replace(node)
        idle.append(node)
    while open_parts:
        while idle and waiting:
            take(idle.pop(0))
        now, node, part, done = heapq.heappop(events)
        if part < 0:  # another node stands in
            replace(node)
            idle.append(node)
            continue
        left[part] -= done
        if now < dies[node]:
            open_parts -= 1
            idle.append(node)
        else:
            deaths += 1
            again += min(JOBS, left[part])
            waiting.append(part)
            heapq.heappush(events, (now + REPLACED_S, node, -1, 0))
    return {"hours": now / 3_600, "deaths": deaths, "again": again}


# --- training -------------------------------------------------------------------------------------


def _training(example: Example, seeds: int, result: Result) -> None:
    from shardio.order.options import default_unit

    rows = {}
    for nodes in NODES:
        spans = RANKS * nodes * BATCH // default_unit(BATCH)  # so that no two processes share one
        for name, workers, order in (
            ("8 workers a rank", 8, {}),
            (f"1 worker a rank, Order(spans={spans})", 1, {"spans": spans}),
            (f"a cache, Order(nodes={nodes})", 8, {"nodes": nodes}),
        ):
            rows[f"{nodes} nodes, {name}"] = [epoch_by_url(example, nodes, workers, order)]
    columns = {
        "hours": "hours an epoch",
        "gets_s": "requests/s a node",
        "simulated": "simulated",
        "mb_s": "MB/s a node",
        "millions": "requests an epoch, millions",
        "dollars": "price of these, $",
        "later": "later epochs, $",
        "cache_tb": "cache, TB a node",
    }
    result.table(f"{example.name}: an epoch by URL", rows, columns)
    for name, (row,) in rows.items():
        if row["simulated"]:
            off = abs(row["gets_s"] / row["simulated"] - 1)
            what = f"requests by arithmetic, off the simulation, {example.name}, {name}"
            result.target(what, off, 0.3, unit="")
    runs = {f"{nodes} nodes": _runs(example, nodes, seeds) for nodes in NODES}
    columns = {
        "without": "hours without deaths",
        "hours": "hours",
        "deaths": "deaths",
        "lost": "minutes lost by a death",
    }
    result.table(f"{example.name}: {example.epochs} epochs, with deaths", runs, columns)


def epoch_by_url(
    example: Example, machines: int, workers: int, order: dict[str, int]
) -> dict[str, float | None]:
    """Return what all nodes ask for in the first epoch, and in later ones; nodes: with a cache."""
    from shardio.dataset.buffering import choose_policy
    from shardio.order.options import RequestedOptions
    from shardio.tuning.traffic import machine_traffic

    mean = example.bytes / example.images
    counts = np.full(example.shards, example.images // example.shards)
    cache = "nodes" in order
    ask = RequestedOptions(BATCH, seed=0, shuffle=True, **order)
    options = ask.resolve(mean, records=int(counts.sum()))
    share = options.partition(
        options.epoch(counts, 0), world_size=RANKS * machines, num_workers=workers
    )
    consumers = RANKS * workers
    policy = choose_policy(
        share, mean, network=True, remote=True, local_consumers=consumers, machines=machines
    )
    traffic = machine_traffic(share, policy, local_world_size=RANKS)
    first = traffic.first_requests if cache else traffic.requests
    seconds = example.images / machines / IMAGES_S
    simulated = None  # a process alone does not know what the others of its node have cached
    if not cache:
        simulated = IMAGES_S * requests_a_row(counts, share, mean, consumers, machines)
    return {
        "hours": seconds / 3_600,
        "gets_s": first / seconds,
        "simulated": simulated,
        "mb_s": (traffic.first_bytes if cache else traffic.bytes) / seconds / 1e6,
        "millions": first * machines / 1e6,
        "dollars": first * machines * GET,
        "later": 0.0 if cache and not traffic.later_bytes else traffic.requests * machines * GET,
        "cache_tb": example.bytes / machines / 1e12 if cache else 0.0,
    }


def _runs(example: Example, nodes: int, seeds: int) -> list[dict[str, float]]:
    """Train to the end: a node's death costs the steps since the last checkpoint, and a start."""
    whole = example.epochs * example.images / nodes / IMAGES_S
    between = EVERY * BATCH * RANKS / IMAGES_S
    found = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        now, done, lost, deaths = BEGIN_S, 0.0, 0.0, 0
        while (lives := rng.exponential(LIFE_H * 3_600 / nodes)) < whole - done:
            kept = lives // between * between
            cost = lives - kept + REPLACED_S + BEGIN_S
            now, done, lost, deaths = now + kept + cost, done + kept, lost + cost, deaths + 1
        each = {"without": (whole + BEGIN_S) / 3_600, "deaths": deaths}
        each["hours"] = (now + whole - done) / 3_600
        found.append(each | {"lost": lost / deaths / 60 if deaths else None})
    return found
