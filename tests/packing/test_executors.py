"""Executors of others, which `pack` and `index` call: what they may get wrong is told."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.trees import images, plant, shards

from shardio import PlanOptions
from shardio.errors import StorageError
from shardio.packing import process_pool
from shardio.packing.export import export
from shardio.packing.index import index
from shardio.packing.pack import pack

PLAN = PlanOptions(max_records=8)


class Elsewhere:
    """Machines that have a directory of the same path, but of their own: one file is theirs."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder, self._pattern = folder, pattern

    @contextlib.contextmanager
    def connected(self, jobs: int) -> Iterator[None]:
        yield

    def run(self, work: Any, tasks: Sequence[Any], **given: Any) -> Iterator[Any]:
        yield from list(process_pool.run(work, tasks, **given))
        sorted(self._folder.glob(self._pattern))[1].unlink()


def test_shards_that_nodes_wrote_into_a_directory_of_their_own_are_not_committed(
    tmp_path: Path,
) -> None:
    source, out = plant(tmp_path / "src", images()), tmp_path / "out"
    with pytest.raises(StorageError, match=r"00001-\w+\.shard: a node.*that this machine and all"):
        pack(source, out, jobs=1, plan=PLAN, executor=Elsewhere(out, "*.shard"))
    assert not (out / "manifest.json").exists()
    [done] = pack(source, out, jobs=1, plan=PLAN)
    assert (done.kept, done.built) == (2, 1)


def test_an_index_that_nodes_wrote_into_a_directory_of_their_own_is_none(tmp_path: Path) -> None:
    source, out, tars = plant(tmp_path / "src", images()), tmp_path / "out", tmp_path / "tars"
    pack(source, out, jobs=1, plan=PLAN)
    export(out, tars, format="webdataset", shard_size=4 << 10)
    with pytest.raises(StorageError, match=r"00001-\w+\.index: a node of the cluster wrote it"):
        index(tars, jobs=1, executor=Elsewhere(tars, "*.index"))
    assert not (tars / "manifest.json").exists()
    assert not list(tars.glob("*.index"))
    assert shards(out)
