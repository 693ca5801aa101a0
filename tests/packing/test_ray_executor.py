"""The work of packing on a Ray cluster: the same results, files and errors as on this machine."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, programs, ray_cluster, servers
from support.object_stores import ObjectStore
from support.ray_cluster import Cluster
from support.trees import (
    content,
    environment,
    images,
    noise,
    picture,
    plant,
    shardio,
    shardio_json,
    shards,
)

from shardio import PlanOptions, RayExecutor
from shardio import __version__ as shardio_version
from shardio.errors import DependencyError, OptionError
from shardio.packing import journal
from shardio.packing.append import append
from shardio.packing.copy import copy
from shardio.packing.export import export
from shardio.packing.index import index
from shardio.packing.pack import pack
from shardio.packing.verify import verify

LARGE = picture(3000, 2500)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster.running() as found:
        yield found


@pytest.fixture
def out(tmp_path: Path) -> Path:
    plan = PlanOptions(max_records=8)
    pack(plant(tmp_path / "src", images()), tmp_path / "out", jobs=1, plan=plan)
    return tmp_path / "out"


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[2000] ^= 1
    path.write_bytes(data)


def program(name: str, cluster: Cluster, folder: Path) -> programs.Program:
    module = ("-m", "support.ray_programs")
    return programs.Program(*module, name, cluster.address, folder, limit_s=LIMIT_S)


def ray(cluster: Cluster) -> list[str]:
    return ["--executor", "ray", "--address", cluster.address]


def test_tasks_are_done_in_order_and_again_where_a_process_was_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    done = program("tasks", cluster, tmp_path).finish()
    assert done.code == 0, done
    (line,) = [one for one in done.output.splitlines() if one.startswith("{")]  # Ray may say more
    said = json.loads(line)
    tasks = ["die-once a", *map(str, range(10)), "die-once b"]
    assert said["results"] == [[task, os.getcwd()] for task in tasks]
    assert sorted(said["seen"][: len(tasks)]) == sorted(said["results"])
    assert said["done"] == 7 * len(tasks)
    assert said["most"] == 4  # under way: two for each CPU
    assert said["raise"][:2] == ["ShardioError", "task x failed"]
    assert "ray_programs.py" in said["raise"][2]  # the traceback there


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
    damage(shards(out)[1])
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
    done = shardio("pack", "wds", "tars", *ray(cluster), code=2)
    assert "can only be read as a whole; make one by `shardio index`" in done.stderr
    assert not Path("tars").exists()
    assert content("there") == content("here")
    assert len(content("there")) > 5  # a file for each shard, and the manifest


def test_packing_gives_the_same_files_and_messages(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plant(Path("src/train"), images() | {"class1/bad.jpg": b"no image"})
    plant(Path("src/val"), images(each=4) | {"class0/bad.jpg": b"none either"})
    given = ["src", "--max-records", "5"]
    here = shardio("pack", *given, "here", code=1)
    there = shardio("pack", *given, "there", *ray(cluster), code=1)
    assert there.stderr.replace("there", "here") == here.stderr
    assert "src: 2 files cannot be packed" in here.stderr
    given += ["--on-error", "skip"]
    shardio("pack", *given, "here", code=4)
    done = shardio_json("pack", *given, "there", *ray(cluster), code=4)
    assert [(one["kept"] > 0, one["built"] > 0) for one in done["datasets"]] == [(True, True)] * 2
    assert content("there") == content("here")


def test_a_plan_is_built_on_nodes_and_here_by_parts(
    cluster: Cluster, out: Path, tmp_path: Path
) -> None:
    source, there = tmp_path / "src", tmp_path / "there"
    shardio("plan", source, there, "--max-records", "8")
    shardio("pack", source, there, "--part", "1/2", *ray(cluster))
    shardio("pack", source, there, "--part", "2/2")
    shardio("commit", there)
    assert (there / journal.PLANNED).exists()  # for parts that start again
    (there / journal.PLANNED).unlink()
    assert content(there) == content(out)


@pytest.mark.parametrize("planned", [False, True])
def test_what_nodes_append_is_what_is_appended_here(
    cluster: Cluster, tmp_path: Path, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1750000000")
    for name in ("train", "val"):
        plant(Path("src") / name, images())
        plant(Path("new") / name, {f"class7/{i}.jpg": noise(f"{name}{i}", 300) for i in range(20)})
    plant(Path("new/val"), {"class0/bad.jpg": b"no image", "class0/000.jpg": noise("anew", 500)})
    for to in ("here", "there"):
        shardio("pack", "src", to, "--max-records", "8")
    given = ["--on-duplicate", "replace", "--on-error", "skip"]
    shardio("append", "new", "here", *given, code=4)
    if planned:
        shardio("append", "new", "there", "--plan", *given)
        shardio("append", "new", "there", "--part", "2/2", *given, code=4)
        shardio("append", "new", "there", "--part", "1/2", *given, *ray(cluster))
        shardio("commit", "there", code=4)
    else:
        shardio("append", "new", "there", *given, *ray(cluster), code=4)
    assert content("there") == content("here")
    assert len(content("there")) > 20
    if not planned:
        plant(Path("new/train"), {"class7/0.jpg": noise("changed", 400)})
        given = ["--gone", "keep", "--on-error", "skip"]
        for to, more in (("here", []), ("there", ray(cluster))):
            assert shardio_json("update", "new", to, *given, *more)["changed"] == 1
        assert content("there") == content("here")


def test_packing_into_a_store_uploads_from_the_nodes(
    cluster: Cluster, bucket: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1750000000")
    plant(tmp_path / "src", images() | {"class1/bad.jpg": b"no image"})
    given = [part for k, v in bucket.options.items() for part in ("--target-option", f"{k}={v}")]
    given += ["--max-records", "8", "--work-dir", f"{tmp_path / 'work'}", *ray(cluster)]
    shardio("pack", tmp_path / "src", f"{bucket.url}/out", *given, code=1)
    given += ["--on-error", "skip"]
    (done,) = shardio_json("pack", tmp_path / "src", f"{bucket.url}/out", *given, code=4)[
        "datasets"
    ]
    assert (done["kept"], done["built"]) == (3, 1)  # what nodes uploaded was noted
    assert not (tmp_path / "work").exists()
    bucket.get(list(bucket.sizes()), tmp_path / "there")
    skip = ["--max-records", "8", "--on-error", "skip"]
    shardio("pack", tmp_path / "src", tmp_path / "here", *skip, code=4)
    assert content(tmp_path / "there/out") == content(tmp_path / "here")
    plant(tmp_path / "new", {f"class7/{i}.jpg": noise(f"{i}", 300) for i in range(20)})
    of_pack = ["--max-records", "8", "--on-error", "skip"]
    shardio(
        "append", tmp_path / "new", f"{bucket.url}/out", *(g for g in given if g not in of_pack)
    )
    shardio("append", tmp_path / "new", tmp_path / "here")
    bucket.get(list(bucket.sizes()), tmp_path / "after")
    assert content(tmp_path / "after/out") == content(tmp_path / "here")


def test_copying_keeps_what_is_there_and_refuses_damage(
    cluster: Cluster, out: Path, bucket: ObjectStore, tmp_path: Path
) -> None:
    given = [part for k, v in bucket.options.items() for part in ("--target-option", f"{k}={v}")]
    bucket.put({f"out/{shards(out)[1].name}": shards(out)[1]})
    done = shardio_json("copy", out, f"{bucket.url}/out", *given, *ray(cluster))
    assert (done["copied"], done["kept"]) == (3, 1)
    bucket.get(list(bucket.sizes()), tmp_path / "there")
    assert content(tmp_path / "there/out") == content(out)
    shutil.copytree(out, tmp_path / "copy")
    shards(tmp_path / "copy")[2].unlink()
    damage(shards(out)[2])
    done = shardio("copy", out, tmp_path / "copy", *ray(cluster), code=3)
    assert f"{shards(out)[2]}: its SHA-256 is" in done.stderr
    assert len(shards(tmp_path / "copy")) == 2


@pytest.mark.parametrize("kind", ["webdataset", "parquet"])
def test_exporting_writes_a_part_for_each_shard(
    kind: str, cluster: Cluster, out: Path, tmp_path: Path
) -> None:
    given = ["export", out, "--format", kind, "--shard-size", "3KiB"]
    for part in ("1/3", "2/3", "3/3"):
        shardio(*given[:2], tmp_path / "here", *given[2:], "--part", part)
    here = shardio_json(*given[:2], tmp_path / "here", *given[2:])
    there = shardio_json(*given[:2], tmp_path / "there", *given[2:], *ray(cluster))
    assert there == here | {"out": f"{tmp_path / 'there'}"}
    assert content(tmp_path / "there") == content(tmp_path / "here")
    done = shardio("export", out, tmp_path / "x", "--format", "imagefolder", *ray(cluster), code=2)
    assert "--executor is given, but imagefolder has no shards to share out" in done.stderr


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


def test_what_is_no_executor_is_refused(out: Path, tmp_path: Path) -> None:
    wrong: Any = "ray"
    calls: list[Any] = [verify, partial(pack, out), partial(copy, out), index]
    calls.append(partial(append, out))
    for call in (*calls, partial(export, out, format="mds")):
        with pytest.raises(OptionError, match=r"executor is 'ray': expected a shardio.RayExecutor"):
            call(tmp_path / "x", executor=wrong)
    with pytest.raises(OptionError, match=r"address is 7: expected 'HOST:PORT'"):
        RayExecutor(7)  # type: ignore[arg-type]


def test_an_executor_and_a_part_of_an_export_are_refused(out: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    given = ["--format", "mds", "--executor", "ray", "--part", "1/2"]
    done = shardio("export", out, tmp_path / "x", *given, code=2)
    assert "--executor is given, which writes all parts: leave part out" in done.stderr
    assert not (tmp_path / "x").exists()


def test_a_cluster_that_is_not_there_is_named(out: Path) -> None:
    pytest.importorskip("ray")
    address = f"127.0.0.1:{servers.free_port()}"
    done = shardio("verify", out, "--executor", "ray", "--address", address, code=1)
    assert f"Ray cluster {address}: Connection refused. Expected HOST:PORT" in done.stderr
    done = shardio("verify", out, "--address", address, code=2)
    assert "--address: goes with --executor ray" in done.stderr


def test_a_cluster_for_one_call_leaves_nothing(out: Path) -> None:
    pytest.importorskip("ray")
    # A short path: sockets have no more than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        env = environment(
            RAY_TMPDIR=folder, RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", RAY_ADDRESS=""
        )
        # As users have it: Ray 2.40 warns of files that it does not close.
        line = [sys.executable, "-m", "shardio", "verify", out, "--executor", "ray", "--jobs", "1"]
        subprocess.run(line, env=env, timeout=LIMIT_S, check=True)
        (ray_folder,) = Path(folder).iterdir()  # it was used
        assert [one for one in ray_folder.iterdir() if not one.is_symlink()] == []


# --- processes that are killed --------------------------------------------------------------------

SLOW = ["--max-records", "1", "--resize", "64"]  # a shard is one large picture: a tenth of a second


def pack_slowly(cluster: Cluster, folder: Path) -> programs.Program:
    """Pack 60 pictures into 60 shards; returns when the first ones are there."""
    plant(folder / "src", {f"{number % 5}/{number}.jpg": LARGE for number in range(60)})
    packing = programs.Program(
        *("-m", "shardio", "pack", folder / "src", folder / "out", *SLOW, *ray(cluster)),
        limit_s=LIMIT_S,
    )
    while not (folder / "out").exists() or len(shards(folder / "out")) < 5:
        assert not packing.ended(), packing.finish()
        time.sleep(0.01)  # nothing tells when a shard has its name
    return packing


@pytest.mark.slow
def test_a_task_that_kills_its_process_again_and_again_is_named(
    cluster: Cluster, tmp_path: Path
) -> None:
    done = program("lost", cluster, tmp_path).finish()
    assert (
        "StorageError: a task was lost 4 times: its worker process was killed (out" in done.output
    )


@pytest.mark.slow
def test_a_node_that_is_killed_is_named_and_its_tasks_are_done_by_others(
    cluster: Cluster, tmp_path: Path
) -> None:
    with cluster.node(2) as second:
        waiting = program("wait", cluster, tmp_path)
        while second.mark not in [path.read_text() for path in tmp_path.glob("begun-*")]:
            assert not waiting.ended(), waiting.finish()
            time.sleep(0.01)  # nothing tells what a process on a node does
        programs.kill_marked(second.mark)
        assert waiting.read_until("was lost; its tasks run again on others")
        (tmp_path / "gate").touch()
        done = waiting.finish()
    assert done.code == 0 and "8 tasks done" in done.output, done


@pytest.mark.slow
def test_a_packing_whose_node_is_killed_writes_the_same_bytes(
    cluster: Cluster, tmp_path: Path
) -> None:
    with cluster.node(2) as second:
        packing = pack_slowly(cluster, tmp_path)
        programs.kill_marked(second.mark)
        assert not (tmp_path / "out/manifest.json").exists()  # it was in the middle
        done = packing.finish()
    assert done.code == 0, done
    shardio("pack", tmp_path / "src", tmp_path / "here", *SLOW)
    assert content(tmp_path / "out") == content(tmp_path / "here")


@pytest.mark.slow
def test_a_packing_that_was_killed_is_gone_on_with(cluster: Cluster, tmp_path: Path) -> None:
    packing = pack_slowly(cluster, tmp_path)
    while not cluster.at_work():
        assert not packing.ended(), packing.finish()
    packing.kill()
    packing.finish()
    while cluster.at_work():  # its tasks end a while later, and would leave a draft in what follows
        time.sleep(0.01)
    assert not (tmp_path / "out/manifest.json").exists()
    given = ["pack", tmp_path / "src", tmp_path / "out", *SLOW]
    (done,) = shardio_json(*given, *ray(cluster))["datasets"]
    assert done["kept"] >= 5 and done["built"] >= 1
    shardio("pack", tmp_path / "src", tmp_path / "here", *SLOW)
    assert content(tmp_path / "out") == content(tmp_path / "here")
