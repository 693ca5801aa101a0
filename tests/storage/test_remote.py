"""Datasets read by URL, from a real server over HTTP: the same records, whoever reads them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import servers
from support.fault_proxy import FaultProxy
from support.faults import Rule
from support.url_datasets import RECORDS, batches, dataset, image, local, quick, run
from torch.utils.data import DataLoader

import shardio
from shardio import ShardDataset, ShardLoader
from shardio.errors import NotPackedError, OptionError, ShardioError
from shardio.storage import ranges

# --- the same records -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data", "lmdb"])
def test_a_sequence_is_the_same_by_url(folder: Path, web: servers.Web, name: str) -> None:
    there, here = (shardio.open(path, decode=None) for path in (f"{web.url}/{name}", folder / name))
    assert len(there) == RECORDS
    assert there[7] == here[7] and there[-1] == here[-1]
    assert list(there) == list(here)
    assert there.keys() == here.keys()
    assert there.columns("label").tolist() == here.columns("label").tolist()
    assert there.find("17.jpg") == here.find("17.jpg")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": False, "shuffle_buffer": None, "order": None},
        {"shuffle_buffer": "all"},
        {"where": {"label": range(0, RECORDS, 3)}},
        {"order": shardio.Order(spans=1, unit=8)},
        {"order": shardio.Order(spans=16, unit=1)},
    ],
    ids=str,
)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_is_the_same_by_url(
    folder: Path, web: servers.Web, options: dict[str, Any], workers: int
) -> None:
    there = DataLoader(dataset(f"{web.url}/data", **options), batch_size=None, num_workers=workers)
    assert batches(there) == local(folder, **options)


SLOW = [pytest.param("ShardLoader", m, marks=pytest.mark.slow) for m in ("spawn", "forkserver")]


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *(("DataLoader", method) for method in ("fork", "spawn", "forkserver")),
        ("ShardLoader", "fork"),
        *SLOW,
    ],
)
def test_every_way_to_start_processes_reads_by_url(
    folder: Path, web: servers.Web, kind: str, method: str
) -> None:
    here, there = dataset(folder / "data"), dataset(f"{web.url}/data")
    # The trainer has read the manifest, by its helper, and a record.
    assert len(there) == RECORDS // 8
    assert shardio.open(f"{web.url}/data", decode=None)[3]["label"] == 3
    if kind == "DataLoader":
        workers = 2 if method == "fork" else 1  # others take seconds to start
        options = {"num_workers": workers, "multiprocessing_context": method}
        assert batches(DataLoader(there, batch_size=None, **options)) == local(folder)
        return
    for epoch in range(2):
        there.set_epoch(epoch)
        here.set_epoch(epoch)
        with ShardLoader(there, num_workers=2, multiprocessing_context=method) as loader:
            assert batches(loader) == batches(DataLoader(here, batch_size=None))


# --- what is asked --------------------------------------------------------------------------------


def test_an_epoch_asks_for_little_more_than_its_bytes(folder: Path, proxy: FaultProxy) -> None:
    loader = DataLoader(dataset(f"{proxy.url}/data"), batch_size=None, num_workers=2)
    batches(loader)
    figures = proxy.figures()
    shards = sorted((folder / "data").glob("*.shard"))
    size = {f"/data/{shard.name}": shard.stat().st_size for shard in shards}
    assert figures.needed < 1.1 * sum(size.values())
    spans, ends = 4 * 2, 2 * len(shards)  # a worker opens all of the shards that its spans have
    assert figures.requests <= 1 + ends + len(shards) + spans + 8  # second requests
    asked = [(one.path, one.range) for one in figures.log]
    twice = [one for one, times in Counter(asked).items() if times > 1]
    inner = [one for one in twice if not one[1].endswith(f"-{size[one[0]] - 1}")]
    assert len(inner) <= 8  # ends are read by both workers; the others are second requests


def test_a_record_by_its_number_takes_one_request(proxy: FaultProxy) -> None:
    there = shardio.open(f"{proxy.url}/data", decode=None)
    there[0]
    proxy.reset()
    for number in (9, 3, 5):
        assert there[number]["image"] == image(number)
    assert len({one.range for one in proxy.figures().log}) == 3  # a slow one may have a second one


def test_nothing_is_listed_and_the_header_is_not_read(proxy: FaultProxy) -> None:
    shardio.open(f"{proxy.url}/data", decode=None)[0]
    log = proxy.figures().log
    assert [one.path.rpartition(".")[2] for one in log] == ["json", "shard", "shard"]
    assert all(one.method == "GET" for one in log)


# --- processes ------------------------------------------------------------------------------------


def test_the_trainer_holds_no_client(web: servers.Web) -> None:
    assert shardio.open(f"{web.url}/data", decode=None)[3]["label"] == 3
    assert ranges.helper_pid() is not None
    assert not ranges.client_in_use()


def test_a_loader_process_of_a_parent_with_a_client_uses_a_helper(
    folder: Path, web: servers.Web
) -> None:
    program = """
        import sys, obstore, obstore.store, shardio
        from torch.utils.data import DataLoader
        from shardio.storage import ranges
        if __name__ == "__main__":
            url = sys.argv[1]
            store = obstore.store.HTTPStore.from_url(url, client_options={"allow_http": True})
            assert len(obstore.get(store, "manifest.json").bytes())
            assert ranges.client_in_use()
            there = shardio.ShardDataset(url, batch_size=8, decode=None, fields=("label",))
            labels = [label for batch, in DataLoader(there, batch_size=None, num_workers=2,
                      multiprocessing_context="fork") for label in batch.tolist()]
            print(sorted(labels) == list(range(120)))
    """
    said = run(program, f"{web.url}/data", warm=True).stdout
    assert said.strip() == "True"


def test_what_is_no_dataset_is_said(web: servers.Web) -> None:
    with pytest.raises(NotPackedError, match=r"not packed: .* Expected the URL of the folder"):
        quick(f"{web.url}/nothing")


def test_no_secret_of_a_url_is_in_errors(proxy: FaultProxy) -> None:
    proxy.rules(Rule("500"))
    url = proxy.url.replace("http://", "http://user:PASSWORD@")
    for one in (f"{proxy.url}/data?sig=SECRET", f"{url}/data"):
        with pytest.raises(ShardioError) as caught:
            quick(one, timeout_s=0.5)
        chain = [caught.value, caught.value.__cause__, caught.value.__context__]
        assert not any(secret in repr(chain) for secret in ("SECRET", "PASSWORD"))


def test_urls_are_read_only_here(web: servers.Web, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="read only"):
        shardio.pack(tmp_path, f"{web.url}/out")


def test_a_pass_that_is_left_early_leaves_nothing_in_flight(proxy: FaultProxy) -> None:
    for order in (None, shardio.Order(spans=1, unit=4)):
        there = ShardDataset(
            f"{proxy.url}/data",
            batch_size=4,
            decode=None,
            fields=("image",),
            shuffle_buffer=16,
            order=order,
        )
        loader = DataLoader(there, batch_size=None)
        batches = iter(loader)
        next(batches)
        assert ranges.ranges().in_flight > 0
        del batches
        there.set_epoch(1)
        assert ranges.ranges().in_flight == 0
        assert sum(len(batch) for (batch,) in loader) == 120
