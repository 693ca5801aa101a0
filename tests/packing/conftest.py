"""Fixtures that tests of packing share."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from support import object_stores, servers, small_datasets
from support.exporting import FIELDS, N, rich
from support.fault_proxy import FaultProxy, fault_proxy
from support.object_stores import ObjectStore
from support.packing import die, on_shard
from support.servers import Web
from support.trees import images, plant

from shardio import PlanOptions, export, index, pack
from shardio.storage import ranges


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of 24 files in three classes."""
    return plant(tmp_path / "src", images())


@pytest.fixture
def out(source: Path, tmp_path: Path) -> Path:
    """A dataset of 6 shards with 4 records each."""
    pack(source, tmp_path / "out", plan=PlanOptions(max_records=4), jobs=1)
    return tmp_path / "out"


@pytest.fixture
def tars(out: Path, tmp_path: Path) -> Path:
    """The same records in 6 files of another format, with an index."""
    export(out, tmp_path / "tars", format="webdataset", shard_size=19_500)
    index(tmp_path / "tars", jobs=1)
    return tmp_path / "tars"


@pytest.fixture
def dead_on_shard(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes packing fail, as by a crash, when it comes to a certain shard."""
    return partial(on_shard, monkeypatch, do=die)


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_stores.s3() as store:
        yield store


@pytest.fixture
def bucket(store: ObjectStore) -> ObjectStore:
    """The store of a module, without the objects of the test before."""
    if there := store.sizes():
        store.delete(list(there))
    return store


@pytest.fixture(scope="module")
def s3(there: Path) -> Iterator[ObjectStore]:
    """A store with the files of a module, which lie in `there`."""
    with object_stores.s3() as store:
        store.put_folder(there)
        yield store


@pytest.fixture(scope="module")
def web(there: Path) -> Iterator[Web]:
    """A server with these files."""
    with servers.nginx(there) as web:
        yield web


@pytest.fixture(scope="module")
def proxy_of_all(s3: ObjectStore) -> Iterator[FaultProxy]:
    with fault_proxy(s3.port) as proxy:
        yield proxy


@pytest.fixture
def ranges_closed() -> Iterator[None]:
    """Ends the requests that a test has under way."""
    yield
    ranges.close()


@pytest.fixture
def wide(packed: Callable[..., Path]) -> Path:
    """A dataset with a field of every kind; its second shard is empty."""
    return packed([9, 0, N - 9], fields=FIELDS, sample=rich)


@pytest.fixture
def plain(packed: Callable[..., Path]) -> Path:
    """As many records, of images and labels alone."""
    return packed([9, 0, N - 9], "plain", image=small_datasets.jpeg)
