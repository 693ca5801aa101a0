"""One object as a file: no byte is asked for twice; objects that are missing, or others."""

import itertools
from pathlib import Path

import pytest
from support import servers
from support.fault_proxy import FaultProxy
from support.faults import Rule
from support.url_datasets import BLOB, batches, dataset, image, local, quick, write
from torch.utils.data import DataLoader

from shardio.errors import DamageError, StorageError
from shardio.storage.client import Store
from shardio.storage.remote import RemoteLocation


@pytest.mark.parametrize("buffer", [30, "all"])
def test_no_byte_of_a_shard_is_asked_for_twice(
    folder: Path, proxy: FaultProxy, buffer: int | str
) -> None:
    read_by = DataLoader(dataset(f"{proxy.url}/data", shuffle_buffer=buffer), batch_size=None)
    assert batches(read_by) == local(folder, shuffle_buffer=buffer)
    asked: dict[str, set[tuple[int, int]]] = {}  # second requests are of the same range
    for one in proxy.figures().log:
        if one.path.endswith(".shard"):
            first, last = map(int, one.range.removeprefix("bytes=").split("-"))
            asked.setdefault(one.path, set()).add((first, last))
    assert len(asked) == len(list((folder / "data").glob("*.shard")))
    for of_shard in asked.values():
        ordered = sorted(of_shard)
        assert all(one[1] < other[0] for one, other in itertools.pairwise(ordered)), ordered


def test_a_view_of_an_announced_range_is_no_copy(proxy: FaultProxy) -> None:
    file = RemoteLocation(Store(proxy.url)).open("blob")
    file.will_need(0, 1 << 20)
    view = file.view(300, 200_000)
    assert isinstance(view, memoryview) and len(view.obj) == 1 << 20
    assert view == BLOB[300:200_300]
    file.close()


def test_a_shard_that_is_missing_or_another_is_damage(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "data")
    shards = sorted((tmp_path / "data").glob("*.shard"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    with servers.nginx(tmp_path) as web:
        there = quick(f"{web.url}/data", timeout_s=20.0)
        with pytest.raises(DamageError, match=r"names this shard, .* but it is not there"):
            there[0]
        second = int(there.reader.starts[1])
        with pytest.raises(DamageError, match=r"cut short|is not the one that was packed"):
            there[second]


@pytest.mark.parametrize("with_cache", [False, True], ids=["", "cache"])
def test_a_shard_that_vanishes_while_it_is_open_is_named(
    proxy: FaultProxy, tmp_path: Path, with_cache: bool
) -> None:
    cache = {"cache": tmp_path, "cache_bytes": "1GiB"} if with_cache else {}
    there = quick(f"{proxy.url}/data", timeout_s=60.0, **cache)
    proxy.rules(Rule("404", path="shard", numbers=[*range(1, 99)]))  # the first one opens it
    with pytest.raises(
        StorageError, match=r"shard: cannot read bytes \d+-\d+: it is not there any"
    ):
        there[3]
    proxy.rules()
    assert there[3]["image"] == image(3)
