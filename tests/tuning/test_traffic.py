"""What a machine asks an object store for: the arithmetic against a real server's log."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import servers
from support.fault_proxy import FaultProxy, fault_proxy
from torch.utils.data import DataLoader

import shardio
from shardio import Order, ShardDataset, Storage
from shardio.dataset.buffering import choose_policy
from shardio.order.epoch import Epoch
from shardio.order.options import RequestedOptions
from shardio.order.partition import Partition
from shardio.storage import ranges
from shardio.storage.remote_file import RANGE
from shardio.tuning.traffic import Traffic, machine_traffic

RECORDS, BYTES = 1024, 20_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("www")
    fields = {"image": "bytes", "label": "int"}
    with shardio.Writer(folder / "data", fields=fields, shard_size=3_000_000) as writer:
        for number in range(RECORDS):
            image = np.random.default_rng(number).bytes(BYTES)
            writer.write({"__key__": f"{number}", "image": image, "label": number})
    return folder


@pytest.fixture(scope="module")
def proxy_of_all(folder: Path) -> Iterator[FaultProxy]:
    with servers.nginx(folder) as web, fault_proxy(web.port) as proxy:
        yield proxy


def dataset(url: str, nodes: int | None = None, **options: Any) -> ShardDataset:
    return ShardDataset(
        url,
        batch_size=16,
        fields=("image", "label"),
        shuffle_buffer=256,
        order=Order(spans=16, unit=4, nodes=nodes),
        **options,
    )


def read(url: str, ranks: range, world_size: int, workers: int, **options: Any) -> None:
    for rank in ranks:
        one = dataset(url, rank=rank, world_size=world_size, **options)
        for _ in DataLoader(one, batch_size=None, num_workers=workers):
            pass
        ranges.close()


@pytest.mark.parametrize(
    ("world_size", "local", "workers", "nodes"),
    [
        *((1, 1, 2, 1), (4, 2, 2, 1), (2, 1, 2, 2), (4, 2, 2, 2)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, 1, 2, 1), (8, 4, 1, 1))),
    ],
)
def test_a_machine_downloads_what_it_hands_out(
    folder: Path, proxy: FaultProxy, world_size: int, local: int, workers: int, nodes: int
) -> None:
    url = f"{proxy.url}/data"
    asked = {"num_workers": workers, "world_size": world_size, "local_world_size": local}
    explained = shardio.explain(dataset(url, nodes=nodes), **asked)
    told = explained.traffic
    assert told is not None
    consumers = world_size * workers
    assert explained.policy == ("remote" if consumers <= 4 else "page_cache")
    handed_out = RECORDS * BYTES * local / world_size
    for first in range(0, world_size, local):
        proxy.reset()
        read(url, range(first, first + local), world_size, workers, nodes=nodes)
        figures = proxy.figures()
        assert figures.needed <= 1.02 * handed_out  # ends of shards, heads of records
        assert 0.9 * figures.needed <= told.bytes <= 1.1 * figures.needed
        # The arithmetic is for requests of 8 MiB; here spans are shorter than one.
        assert 0.4 * figures.requests <= told.requests <= 2 * figures.requests


def test_a_small_dataset_is_downloaded_by_each_process_and_held(
    folder: Path, proxy: FaultProxy
) -> None:
    one = ShardDataset(
        f"{proxy.url}/data", batch_size=16, fields=("image", "label"), shuffle_buffer="all"
    )
    explained = shardio.explain(one, num_workers=2, world_size=1)
    told, memory = explained.traffic, explained.memory
    assert told is not None and told.held and memory.records_bytes >= RECORDS * BYTES
    assert "then nothing as long as its processes live" in " ".join(str(explained).split())
    proxy.reset()
    loader = DataLoader(one, batch_size=None, num_workers=2, persistent_workers=True)
    asked = []
    for _ in range(2):
        assert sum(len(labels) for _, labels in loader) == RECORDS
        asked.append((proxy.figures().requests, proxy.figures().sent))
    assert asked[1] == asked[0]
    assert 0.9 * asked[0][1] <= told.bytes <= 1.1 * asked[0][1]
    del loader
    others = shardio.explain(dataset(f"{proxy.url}/data"), num_workers=2).traffic
    assert others is not None and not others.held


@pytest.mark.parametrize(("world_size", "local"), [(2, 1), (4, 2)])
def test_with_a_cache_a_machine_downloads_each_range_once(
    folder: Path, proxy: FaultProxy, tmp_path: Path, world_size: int, local: int
) -> None:
    url, storage = f"{proxy.url}/data", Storage(cache=tmp_path / "cache", cache_bytes="1GiB")
    told = shardio.explain(
        dataset(url, storage=storage), world_size=world_size, local_world_size=local, num_workers=2
    )
    assert told.traffic is not None and told.policy in ("page_cache", "in_memory")
    assert "of a machine" in str(told) and "in the first epoch" in str(told)
    proxy.reset()
    read(url, range(local), world_size, 2, storage=storage)
    assert proxy.figures().needed <= 1.1 * max(told.traffic.first_bytes, RECORDS * BYTES)


def test_machines_with_shards_of_their_own_download_them_once(
    folder: Path, proxy: FaultProxy, tmp_path: Path
) -> None:
    url, order = f"{proxy.url}/data", Order(spans=16, unit=4, nodes=2)
    downloaded = []
    for rank in range(2):
        storage = Storage(cache=tmp_path / f"cache{rank}", cache_bytes="1GiB")
        given = {"rank": rank, "world_size": 2, "storage": storage, "tail": "drop"}
        one = ShardDataset(
            url, batch_size=16, shuffle_buffer=256, order=order, decode=None, **given
        )
        for epoch in range(2):
            proxy.reset()
            one.set_epoch(epoch)
            assert sum(len(batch["label"]) for batch in one) == RECORDS // 2
            downloaded.append(proxy.figures().needed)
        ranges.close()
    assert downloaded[1] < 0.02 * downloaded[0] and downloaded[3] < 0.02 * downloaded[2]
    explained = shardio.explain(one, world_size=2, local_world_size=1)
    assert explained.traffic is not None and explained.traffic.later_bytes == 0
    assert "in the first epoch, then nothing" in " ".join(str(explained).split())


@pytest.mark.parametrize("machines", [1, 2, 4, 8])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_at_the_defaults_no_machine_downloads_more_than_it_hands_out(
    machines: int, workers: int
) -> None:
    counts, mean = np.full(128, 10_000), 110_000.0
    options = RequestedOptions(256, None, 0, None, None, None, True).resolve(
        mean, records=int(counts.sum())
    )
    epoch = options.epoch(counts, 0)
    share = options.partition(epoch, world_size=8 * machines, num_workers=workers)
    policy = choose_policy(share, mean, network=True, remote=True, local_consumers=8 * workers)
    traffic = machine_traffic(share, policy, local_world_size=8)
    assert traffic.bytes <= 1.1 * epoch.records * mean / machines


@pytest.mark.parametrize("spans", [6, 64])
@pytest.mark.parametrize("batch_units", [1, 3, 8])
@pytest.mark.parametrize(("world_size", "local"), [(1, 1), (4, 2), (8, 3), (16, 8)])
def test_the_spans_of_a_machine_are_those_that_its_batches_touch(
    spans: int, batch_units: int, world_size: int, local: int
) -> None:
    counts = np.full(4, 10_000)
    epoch = Epoch(counts, seed=0, epoch=0, spans=spans, unit=4, shuffle_buffer=1000)
    touched: dict[int, set[int]] = {}  # of each machine
    for rank in range(world_size):
        share = Partition(epoch, batch_size=4 * batch_units, rank=rank, world_size=world_size)
        for batch in share:
            spans_of = touched.setdefault(rank // local, set())
            spans_of.update(span for span, _, _ in batch.pieces)
    most = max(map(len, touched.values()))
    policy = choose_policy(share, 100.0, network=True, remote=True)
    found = machine_traffic(share, policy, local_world_size=local)
    expected = epoch.records * 100.0 * max(local / world_size, most / spans)
    ends = 17 * epoch.records * local  # of shards
    assert found.first_bytes == pytest.approx(expected, rel=0.01, abs=ends)


def test_with_a_cache_a_small_dataset_is_downloaded_once() -> None:
    # 500 records are 32 units of 16, fewer than the 64 spans.
    epoch = Epoch(np.full(4, 125), seed=0, epoch=0, spans=64, unit=16, shuffle_buffer=None)
    share = Partition(epoch, batch_size=64, num_workers=4)
    policy = choose_policy(share, 110_000.0, network=True, remote=True, local_consumers=4)
    found = machine_traffic(share, policy, local_world_size=1)
    assert found.first_bytes == pytest.approx(500 * 110_000, rel=0.01)


# --- photographs in shards of 256 MiB, in a job of several nodes of 8 ranks -----------------------

IMAGES, IMAGE, SHARD = 1_280_000, 110_000, 256 << 20
A_SHARD = SHARD // IMAGE  # records
SHARDS = np.diff(np.append(np.arange(0, IMAGES, A_SHARD), IMAGES))


def ranges_of_nodes(machines: int, batch_size: int, number: int = 0, **options: Any) -> Any:
    """Walk an epoch's order as all ranks do: the ranges of 8 MiB that each machine reads from.

    (machines, ranges) bool, and the records that each machine hands out.
    """
    requested = RequestedOptions(batch_size=batch_size, **options)
    chosen = requested.resolve(float(IMAGE), records=IMAGES)
    epoch = chosen.epoch(SHARDS, number)
    flat = epoch.flat()
    units = -(-IMAGES // epoch.unit)
    node_of = np.full(units, -1)
    for rank in range(8 * machines):
        share = chosen.partition(epoch, rank=rank, world_size=8 * machines)
        first = np.array([share.first_unit(step) for step in share.worker_steps])
        taken = (first[:, None] + np.arange(share.batch_units)).reshape(-1)
        taken = taken[taken < units]
        assert (node_of[taken] == -1).all()
        node_of[taken] = rank // 8
    assert (node_of >= 0).all()
    node = np.repeat(node_of, epoch.unit)[:IMAGES]
    shards, records = epoch.locate(flat)
    each = -(-SHARD // RANGE)
    read = np.zeros((machines, len(SHARDS) * each), bool)
    for byte in (records * IMAGE, (records + 1) * IMAGE - 1):
        read[node, shards * each + byte // RANGE] = True
    return read, np.bincount(node, minlength=machines)


def told(machines: int, batch_size: int, num_workers: int, **options: Any) -> Traffic:
    requested = RequestedOptions(batch_size=batch_size, **options)
    epoch = requested.resolve(float(IMAGE), records=IMAGES).epoch(SHARDS, 0)
    share = Partition(epoch, batch_size, world_size=8 * machines, num_workers=num_workers)
    policy = choose_policy(
        share, float(IMAGE), network=True, remote=True, local_consumers=8 * num_workers
    )
    return machine_traffic(share, policy, local_world_size=8)


# Steps of batches of 64 on 2 nodes touch each span once.
@pytest.mark.parametrize(
    ("nodes", "batch_size"),
    [
        *((2, 64), (4, 256), (8, 256)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, 256), (4, 64), (8, 64))),
    ],
)
def test_a_node_downloads_its_part_of_an_epoch(nodes: int, batch_size: int) -> None:
    read, rows = ranges_of_nodes(nodes, batch_size)
    share = IMAGES * IMAGE / nodes
    assert rows.max() <= 1.001 * IMAGES / nodes
    first = read.sum(axis=1) * RANGE  # with a cache that all processes of a node share
    assert first.max() <= 1.02 * share
    again, _ = ranges_of_nodes(nodes, batch_size, 1)
    later = (again & ~read).sum(axis=1) * RANGE
    for num_workers in (2, 8):
        said = told(nodes, batch_size, num_workers)
        # Without a cache each process asks for its own records; or for spans that are its alone.
        assert rows.max() * IMAGE <= said.bytes <= 1.05 * share
        assert said.first_bytes == pytest.approx(first.max(), rel=0.05)
        assert said.later_bytes == pytest.approx(later.mean(), rel=0.15)


@pytest.mark.parametrize(
    ("nodes", "batch_size"), [(3, 256), pytest.param(8, 64, marks=pytest.mark.slow)]
)
def test_nodes_with_shards_of_their_own_download_nothing_in_later_epochs(
    nodes: int, batch_size: int
) -> None:
    read, rows = ranges_of_nodes(nodes, batch_size, nodes=nodes)
    share = IMAGES * IMAGE / nodes
    assert (read.sum(axis=1) * RANGE).max() <= 1.02 * share
    assert rows.max() <= 1.001 * IMAGES / nodes
    later, _ = ranges_of_nodes(nodes, batch_size, 1, nodes=nodes)
    assert (later <= read).all()  # a cache of 1 / nodes of the dataset has them all
    said = told(nodes, batch_size, 8, nodes=nodes)
    assert (said.later_bytes, said.nodes) == (0, 1)
    assert share <= said.first_bytes <= 1.05 * share
    fewer = told(nodes - 1, batch_size, 8, nodes=nodes)  # such a run goes on, on fewer machines
    assert fewer.nodes > 1
