"""docs/cluster.md says what the stored simulation says, and the simulation what it should."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cluster
from benchmarks.harness import RESULTS, table_lines

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs" / "cluster.md").read_text()
STORED = json.loads((RESULTS / "cluster.json").read_text())
FAST = {"cpu": 10.0, "network": 0.0}  # seconds a shard


def rows(title: str) -> list[dict[str, Any]]:
    (table,) = [table for table in STORED["tables"] if table["title"] == title]
    return table["rows"]


@pytest.mark.parametrize("table", STORED["tables"], ids=lambda table: table["title"])
def test_each_stored_table_is_on_the_page(table: dict[str, Any]) -> None:
    (_, *head), *rows = table_lines(table, spread=True)
    lines = [" | ".join(head), *("| " + " | ".join(row) + " |" for row in rows)]
    assert all(line in PAGE for line in lines)


def test_each_number_of_the_text_is_in_a_table() -> None:
    numbers = re.compile(r"\d[\d,.]*\d|\d")
    before, _, text = PAGE.partition("## What follows")
    told = set(numbers.findall(before)) | {"1", "8", "5", "6"}  # of "1.00 TB", "5.00", "6.06"
    assert len(numbers.findall(text)) > 20
    assert not set(numbers.findall(text)) - told


@pytest.mark.parametrize(
    ("example", "nodes", "order"),
    [(0, 10, {"spans": 160}), (1, 10, {"nodes": 10}), (1, 100, {"spans": 1600})],
)
def test_the_stored_traffic_is_that_of_the_order(
    example: int, nodes: int, order: dict[str, int]
) -> None:
    given = cluster.EXAMPLES[example]
    found = cluster.epoch_by_url(given, nodes, 1 if "spans" in order else 8, order)
    text = "".join(f"Order({name}={value})" for name, value in order.items())
    (stored,) = [
        row
        for row in rows(f"{given.name}: an epoch by URL")
        if row["name"].startswith(f"{nodes} nodes") and row["name"].endswith(text)
    ]
    for name in ("hours", "gets_s", "mb_s", "dollars", "cache_tb"):
        assert found[name] == pytest.approx(stored[name]["median"]), name


# --- the simulation -------------------------------------------------------------------------------


def test_without_deaths_the_slowest_node_decides() -> None:
    shards, jobs = 10_000, cluster.JOBS
    found = cluster.simulate(shards, 10, 10, FAST, seed=0, life_h=1e9)
    assert found["deaths"] == found["again"] == 0
    seconds = found["hours"] * 3_600 - cluster.BEGIN_S
    alone = math.ceil(shards / 10 / jobs) * FAST["cpu"]
    assert alone < seconds <= alone / 0.35  # speeds are from half of 0.7 to 1.3
    many = cluster.simulate(shards, 100, 10, FAST, seed=0, life_h=1e9)
    assert many["hours"] < found["hours"]  # slow nodes take fewer parts


def test_what_all_nodes_share_takes_as_long_for_any_number_of_parts() -> None:
    limits = {"cpu": 0.0, "requests": 2.0}
    found = cluster.simulate(1_000, 10, 10, limits, seed=0, life_h=1e9)
    assert found["hours"] * 3_600 == pytest.approx(1_000 / 10 * 2 + cluster.BEGIN_S)


def test_deaths_cost_time_and_at_most_the_shards_in_work() -> None:
    alive, found = (
        [cluster.simulate(10_000, 10, 10, FAST, seed, life_h) for seed in range(20)]
        for life_h in (1e9, 1.0)
    )
    assert sum(one["deaths"] for one in found) > 20
    assert all(one["again"] <= cluster.JOBS * one["deaths"] for one in found)
    hours = [sum(one["hours"] for one in runs) for runs in (alive, found)]
    assert hours[0] < hours[1] < 2 * hours[0]
