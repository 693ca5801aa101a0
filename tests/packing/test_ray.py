"""The work of packing on a Ray cluster: the same results, files and errors as on this machine."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import programs, ray_cluster, servers
from support.ray_cluster import Cluster
from support.trees import content, images, plant, shardio, shardio_json, shards

from shardio import PlanOptions, RayExecutor
from shardio import __version__ as shardio_version
from shardio.errors import DependencyError
from shardio.packing.pack import pack


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster.running() as found:
        yield found


@pytest.fixture
def out(tmp_path: Path) -> Path:
    plan = PlanOptions(max_records=8)
    pack(plant(tmp_path / "src", images()), tmp_path / "out", jobs=1, plan=plan)
    return tmp_path / "out"


def program(name: str, cluster: Cluster, folder: Path) -> programs.Program:
    module = ("-m", "support.ray_programs")
    return programs.Program(*module, name, cluster.address, folder, limit_s=ray_cluster.LIMIT_S)


def ray(cluster: Cluster) -> list[str]:
    return ["--executor", "ray", "--address", cluster.address]


def test_tasks_are_done_in_order_and_again_where_a_process_was_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    done = program("tasks", cluster, tmp_path).finish()
    assert done.code == 0, done
    said = json.loads(done.output.splitlines()[-1])
    tasks = ["die-once a", *map(str, range(10)), "die-once b"]
    assert said["results"] == [[task, os.getcwd()] for task in tasks]
    assert sorted(said["seen"][: len(tasks)]) == sorted(said["results"])
    assert said["raise"][:2] == ["ShardioError", "task x failed"]
    assert "ray_programs.py" in said["raise"][2]  # the traceback there
    assert said["die"][0] == "StorageError"
    assert "lost 4 times: its worker process was killed (out of memory?)" in said["die"][1]


def test_ctrl_c_ends_the_tasks_that_are_under_way(cluster: Cluster, tmp_path: Path) -> None:
    endless = program("endless", cluster, tmp_path)
    while len(list(tmp_path.glob("begun-*"))) < 2:
        assert not endless.ended(), endless.finish()
        time.sleep(0.01)  # nothing tells what a process on a node does
    endless.interrupt()
    done = endless.finish()
    assert not done.timed_out
    assert "KeyboardInterrupt" in done.output
    begun = {path.name.partition("-")[2] for path in tmp_path.glob("begun-*")}
    assert {path.name.partition("-")[2] for path in tmp_path.glob("ended-*")} == begun


def test_verify_finds_the_same_damage(cluster: Cluster, out: Path) -> None:
    data = bytearray(shards(out)[1].read_bytes())
    data[2000] ^= 1
    shards(out)[1].write_bytes(data)
    here = shardio_json("verify", out, code=3)
    there = shardio_json("verify", out, *ray(cluster), code=3)
    assert there == here
    assert len(there["damages"]) == 1


def test_index_is_the_same_also_by_relative_paths(
    cluster: Cluster, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shardio("export", "out", "wds", "--format", "webdataset", "--shard-size", "4KiB")
    shardio("index", "wds", "--out", "here")
    shardio("index", "wds", "--out", "there", *ray(cluster))
    assert content("there") == content("here")
    assert len(content("there")) > 5  # a file for each shard, and the manifest


def test_another_release_on_the_nodes_is_named(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "shardio").mkdir()
    (tmp_path / "shardio/__init__.py").write_text("__version__ = '9.8.7'\n")
    done = program("release", cluster, tmp_path).finish()
    assert done.code == 0, done
    assert "of the Ray cluster has shardio 9.8.7, expected " + shardio_version in done.output
    assert f"Install shardio-torch=={shardio_version} on all nodes" in done.output


def test_without_the_package_ray_the_extra_is_named(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DependencyError, match=r"pip install 'shardio-torch\[ray\]'"):
        RayExecutor()


def test_a_cluster_that_is_not_there_is_named(out: Path) -> None:
    pytest.importorskip("ray")
    address = f"127.0.0.1:{servers.free_port()}"
    done = shardio("verify", out, "--executor", "ray", "--address", address, code=1)
    assert f"Ray cluster {address}: Connection refused. Expected HOST:PORT" in done.stderr
    done = shardio("verify", out, "--address", address, code=2)
    assert "--address: goes with --executor ray" in done.stderr
