"""A real network file system: told from a disk, and read with the same result."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.small_datasets import make
from torch.utils.data import DataLoader

import shardio
from shardio import Order, ShardDataset, ShardLoader
from shardio.dataset.fetch import Fetch

Network = Callable[[Path], Path]


@pytest.fixture
def twins(tmp_path: Path, on_network: Network) -> tuple[Path, Path]:
    """A packed folder on the disk, and the same through the network."""
    here = make(tmp_path / "data", [40, 7, 90], image=lambda i: bytes([i % 251]) * (900 + i))
    return here, on_network(here)


def dataset(path: Path) -> ShardDataset:
    return ShardDataset(
        path, batch_size=8, decode=None, collate_fn=list, shuffle_buffer=50, order=Order(unit=4)
    )


def test_it_is_told_by_its_mount(twins: tuple[Path, Path]) -> None:
    here, there = map(dataset, twins)
    assert shardio.explain(here).is_network is False
    assert shardio.explain(there).is_network is True
    assert Fetch(there.reader, there.share_of(0)).policy.name == "network"


def test_an_epoch_is_the_same_as_from_the_disk(twins: tuple[Path, Path]) -> None:
    here, there = map(dataset, twins)
    assert list(there) == list(here)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_read_it_too(twins: tuple[Path, Path]) -> None:
    here, there = map(dataset, twins)
    expected = list(here)
    assert list(DataLoader(there, batch_size=None, num_workers=2)) == expected
    with ShardLoader(dataset(twins[1]), num_workers=2) as loader:
        assert list(loader) == expected


def test_a_flipped_bit_is_found_there(twins: tuple[Path, Path]) -> None:
    here, there = twins
    assert shardio.verify(there).damages == []
    shard = sorted(here.glob("*.shard"))[2]
    at = os.path.getsize(shard) // 2
    data = bytearray(shard.read_bytes())
    data[at] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(shardio.DamageError, match=shard.name):
        list(dataset(there))


def test_a_range_of_it_is_read_as_numbers(twins: tuple[Path, Path]) -> None:
    here, there = (shardio.open(path, decode=None) for path in twins)
    assert there.keys() == here.keys()
    assert np.array_equal(there.columns("label"), here.columns("label"))
