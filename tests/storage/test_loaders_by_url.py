"""Loaders that read by URL: their processes may end at any moment, and consumers may be slow."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import servers
from support.fault_proxy import FaultProxy
from support.faults import Rule
from support.leftovers import nothing_left
from support.url_datasets import served, write_images
from torch.utils.data import DataLoader

import shardio
from shardio import Order, ShardDataset, Storage
from shardio.dataset import fetch
from shardio.order.options import ALL_RECORDS
from shardio.storage import ranges

RECORDS = 160


def image(number: int) -> bytes:
    return b"\xff\xd8\xff" + np.random.default_rng(number).bytes(100_000)


@pytest.fixture(scope="module")
def proxy_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    folder = tmp_path_factory.mktemp("www")
    write_images(folder / "data", RECORDS, image, 4_000_000)
    with served(folder) as proxy:
        yield proxy


def dataset(proxy: FaultProxy, **options: Any) -> ShardDataset:
    return ShardDataset(
        f"{proxy.url}/data",
        batch_size=8,
        decode=None,
        fields=("image", "label"),
        storage=Storage(timeout_s=20.0),
        **{"shuffle_buffer": 30, "order": Order(spans=4, unit=4)} | options,
    )


def labels(loader: Any) -> list[int]:
    return sorted(label for _, batch in loader for label in batch.tolist())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_process_ends_while_requests_are_under_way(proxy: FaultProxy, method: str) -> None:
    # No batch is on its way. A worker that pickles one while it ends may be aborted by torch's
    # own thread, which asks for the GIL of an interpreter that is gone.
    proxy.rules(Rule("stall", path="shard", range=r"^bytes=\d\d?-"))  # the first records
    with nothing_left():
        loader = DataLoader(
            dataset(proxy), batch_size=None, num_workers=1, multiprocessing_context=method
        )
        batches = iter(loader)
        proxy.wait(faults=1)
        del batches, loader
        ranges.close()


def test_a_slow_consumer_holds_no_more_than_its_budget_and_its_windows(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "IN_FLIGHT", 2 << 20)
    monkeypatch.setattr(ranges, "LEAST_IN_FLIGHT", 2 << 20)
    there = dataset(proxy)
    batches = iter(DataLoader(there, batch_size=None))
    most = 0
    for number, _ in enumerate(batches):
        before = -1
        while number < 6 and (held := ranges.ranges().in_flight) != before:
            before = held  # what arrives changes nothing: it counts until it is read
        most = max(most, ranges.ranges().in_flight)
    # A range may exceed a budget that is not used at all; each span waits for one at most.
    assert 0 < most <= (2 << 20) + 4 * (4 << 20)
    assert ranges.ranges().in_flight == 0


@pytest.mark.parametrize(
    ("workers", "method"),
    [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow)],
)
def test_requests_that_failed_in_a_dataloader_are_told(
    proxy: FaultProxy, workers: int, method: str | None
) -> None:
    there = dataset(proxy)
    there.reader.shard(0)  # what was asked before is not of the pass
    proxy.reset()
    proxy.rules(Rule("500", path="shard", fraction=0.3, seed=3))
    loader = DataLoader(there, batch_size=None, num_workers=workers, multiprocessing_context=method)
    for epoch in range(2):
        there.set_epoch(epoch)
        watched = shardio.watch(loader, print=None)
        assert len(labels(watched)) == RECORDS
    found = re.search(r"([\d,]+) of ([\d,]+) requests failed and were sent again", watched.verdict)
    assert found is not None, watched.verdict
    failed, requests = (int(number.replace(",", "")) for number in found.groups())
    figures = proxy.figures()
    assert 0 < failed < figures.faults["500"] and failed < requests < figures.requests


def data_requests(proxy: FaultProxy, processes: int, order: Order, **options: Any) -> int:
    """Count the ranges of records that so many processes of an epoch ask for, second ones aside."""
    proxy.reset()
    numbers: list[int] = []
    for rank in range(processes):
        there = dataset(proxy, order=order, rank=rank, world_size=processes, **options)
        numbers += [label for _, batch in there for label in batch.tolist()]
        ranges.close()
    assert set(numbers) == set(range(RECORDS))
    asked = {(one.path, one.range) for one in proxy.figures().log if one.path.endswith(".shard")}
    last = {path: max(int(range.rpartition("-")[2]) for where, range in asked if where == path)
            for path, _ in asked}  # fmt: skip
    return sum(not range.endswith(f"-{last[path]}") for path, range in asked)  # no ends of shards


def line_in(text: str) -> Order:
    """Evaluate the `order=` of a text, as a user pastes it."""
    [line] = re.findall(r"order=(shardio\.Order\([^)]*\))", text)
    made: Order = eval(line, {"shardio": shardio})
    return made


@pytest.mark.parametrize(
    ("processes", "given", "line"),
    [
        (3, Order(spans=4, unit=4), Order(spans=6)),
        pytest.param(*(3, Order(spans=4, unit=2), Order(spans=12, unit=2)), marks=pytest.mark.slow),
        (3, Order(spans=4, unit=4, nodes=2), Order(spans=12, nodes=2)),
        pytest.param(8, Order(spans=8), Order(spans=16), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_spans_of_the_warning_and_of_explain_save_the_requests_of_shared_ones(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, processes: int, given: Order, line: Order
) -> None:
    monkeypatch.setattr(fetch, "ALL_RECORDS", RECORDS // 2)
    with pytest.warns(UserWarning, match=f"{processes} loader processes share") as told:
        shared = data_requests(proxy, processes, given)
    assert len(told) == 1  # the first process says it for all
    explained = shardio.explain(dataset(proxy, order=given), num_workers=processes)
    [advice] = [one for one in explained.warnings if one.code == "shared_spans"]
    assert line_in(str(told[0].message)) == line_in(advice.mend) == line
    assert advice.change == {"spans": line.spans}
    assert shared > RECORDS / 2  # neighbours of a batch come together
    alone = data_requests(proxy, 1, line)
    # Of a span the ranges end where a batch of its process ends at first, and where a shard does.
    assert (own := data_requests(proxy, processes, line)) <= alone + 2 * (line.spans or 0)
    assert own < 0.6 * shared  # of spans of ten records; of long ones it is nearly nothing


def test_it_is_warned_where_spans_of_their_own_would_save_many_requests(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    with shardio.Writer(tmp_path / "data", fields={"label": "int"}) as writer:
        for number in range(ALL_RECORDS + 1000):
            writer.write({"label": number})
    with servers.nginx(tmp_path) as web:
        there = ShardDataset(
            f"{web.url}/data", batch_size=8, shuffle_buffer=100, rank=0, world_size=3
        )
        few = there.select(range(ALL_RECORDS + 100))  # their spans would take 133 requests
        next(iter(few))
        again = there.select(range(ALL_RECORDS + 1000))
        again.set_epoch(1)
        next(iter(again))  # the spans of a run that goes on are chosen
        assert not recwarn.list
        with pytest.warns(UserWarning, match=r"21,000 an epoch.*about 133;"):
            next(iter(there))
        ranges.close()
