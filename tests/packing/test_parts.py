"""Parts of `verify` and `copy`: each process does its share of the shards."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import servers
from support.fault_proxy import FaultProxy, fault_proxy
from support.faults import Rule
from support.object_stores import ObjectStore
from support.packing import hidden
from support.small_datasets import flip
from support.trees import content, environment, images, plant, shardio, shards
from support.uploading import files, named, second_part_held

from shardio import (
    ExistsError,
    NotPackedError,
    OptionError,
    PlanOptions,
    Storage,
    copy,
    export,
    index,
    open,
    pack,
    verify,
)

pytestmark = pytest.mark.usefixtures("ranges_closed")
NAMES = ("MIN", "MAX", "COUNT", "STEP")
TASK_2_OF_3 = {f"SLURM_ARRAY_TASK_{name}": one for name, one in zip(NAMES, "1331", strict=True)}
TASK_2_OF_3["SLURM_ARRAY_TASK_ID"] = "2"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[servers.Web]:
    with servers.nginx(tmp_path) as web:
        yield web


@pytest.fixture(scope="module")
def proxy_of_all(store: ObjectStore) -> Iterator[FaultProxy]:
    with fault_proxy(store.port) as proxy:
        yield proxy


# --- verify ---------------------------------------------------------------------------------------


def test_the_parts_of_a_verify_check_each_shard_once(out: Path) -> None:
    for path in shards(out):
        flip(path, 300)
    found = [verify(out, part=(i, 4), jobs=1) for i in (1, 2, 3, 4)]
    assert [one.shards for one in found] == [1, 2, 1, 2]
    assert [one.part for one in found] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    damaged = [damage.shard for one in found for damage in one.damages]
    assert damaged == [str(path) for path in shards(out)]
    assert sum(one.bytes for one in found) == verify(out).bytes
    assert verify(out, part="7/8").shards == 0 + (7 * 6 // 8 - 6 * 6 // 8)


def test_the_command_verifies_the_part_that_the_scheduler_says(out: Path) -> None:
    flip(shards(out)[2], 300)
    line = ("verify", out, "--part", "auto", "--stagger", "0.1")
    done = shardio(*line, env=environment(**TASK_2_OF_3), code=3)
    said, waits = done.stderr.splitlines()
    assert said == "part 2 of 3, by SLURM_ARRAY_TASK_ID=2 of 1-3"
    assert waits.endswith("so that not all parts begin at once")
    assert done.stdout.splitlines()[-1].startswith("part 2 of 3: ")
    assert shardio("verify", out, "--part", "3/3").stdout.startswith("part 3 of 3: 8 records in 2")


CALLS = [
    verify,
    lambda out, **options: copy(out, out.parent / "to", **options),
    lambda out, **options: index(out.parent / "src", **options),
    lambda out, **options: export(out, out.parent / "to", format="mds", **options),
]


@pytest.mark.parametrize("call", CALLS)
def test_each_function_checks_its_part_as_pack_does(out: Path, call: Any) -> None:
    for options, message in (
        ({"part": "3/2"}, "part 3/2: parts count from 1"),
        ({"part": "1/2", "parts": 2}, "parts is 2: goes with part 'auto' alone"),
        ({"stagger_s": -1}, "stagger_s is -1"),
    ):
        with pytest.raises(OptionError, match=message):
            call(out, **options)


# --- copy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out", "tars"])
def test_parts_that_copy_at_once_and_one_that_is_killed(
    tars: Path, web: servers.Web, tmp_path: Path, name: str
) -> None:
    source, to = tmp_path / name, tmp_path / "to"
    third = sorted(path.name for path in source.glob("000*.[ts]*"))[2]
    with fault_proxy(web.port, Rule("stall", path=third)) as proxy:
        line = ("copy", f"{proxy.url}/{name}", to)
        with second_part_held(proxy, line):
            assert "is packing here" in shardio(*line, code=5).stderr  # the second is at work
        with pytest.raises(NotPackedError, match="`shardio copy`, did not finish here"):
            open(to)
        proxy.rules()
        said = shardio(*line, "--part", "2/3").stdout
        assert "part 2 of 3 copied; when all are: the same command without --part" in said
        assert "manifest.json" not in os.listdir(to)
        assert "of parts at last without --part" in shardio("commit", to, code=1).stderr
        there = {one.name: one.stat().st_ino for one in to.glob("0*")}
        proxy.reset()
        done = copy(f"{proxy.url}/{name}", to)
        assert (done.copied, done.kept) == (1, len(there))  # the manifest
        got = [one.path for one in proxy.figures().log if one.method == "GET"]
        assert not [path for path in got if path.endswith((".tar", ".shard"))]
    assert {one.name: one.stat().st_ino for one in to.glob("0*")} == there
    assert files(to) == named(files(source)) and len(content(to)) == len(files(to))


def test_parts_that_copy_into_a_store_at_once_and_one_that_is_killed(
    out: Path, bucket: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    there = bucket.through(proxy.port)
    given = [part for k, v in there.options.items() for part in ("--store-option", f"{k}={v}")]
    line = ("copy", out, f"{there.url}/to", *given)
    third = shards(out)[2].name
    proxy.rules(Rule("stall", method="PUT", path=third))
    with second_part_held(proxy, line):
        pass
    proxy.rules()
    shardio(*map(str, line), "--part", "2/3")
    names = {name.rpartition("/")[2] for name in bucket.sizes()}
    assert names == {path.name for path in shards(out)}
    proxy.reset()
    options = Storage(options=there.options)
    assert copy(out, f"{there.url}/to", to=options).kept == 6
    log = proxy.figures().log
    assert [one.method for one in log if one.path.split("?")[0].endswith(".shard")] == ["HEAD"] * 6
    copy(f"{there.url}/to", tmp_path / "back", storage=options)
    assert content(tmp_path / "back") == content(out)


def test_splits_are_copied_by_parts(tmp_path: Path) -> None:
    for split in ("train", "val"):
        plant(tmp_path / "src" / split, images())
    pack(tmp_path / "src", tmp_path / "out", plan=PlanOptions(max_records=4), jobs=1)
    copied = [copy(tmp_path / "out", tmp_path / "to", part=(i, 4)).copied for i in (4, 2, 1, 3)]
    assert sum(copied) == 12
    done = copy(tmp_path / "out", tmp_path / "to")
    assert (done.kept, done.copied) == (12, 3)
    assert content(tmp_path / "to") == content(tmp_path / "out")


def test_a_part_that_is_copied_again_mends_its_shards_and_leaves_nothing(
    out: Path, tmp_path: Path
) -> None:
    to = tmp_path / "to"
    copy(out, to)
    flip(shards(to)[0], 300)
    assert copy(out, to, part=(2, 2)).copied == 0
    assert copy(out, to, part=(1, 2)).copied == 1
    assert content(to) == content(out)


def test_parts_leave_another_dataset_as_it_is_until_all_are_there(
    out: Path, tmp_path: Path
) -> None:
    to, old = tmp_path / "to", plant(tmp_path / "old", images(each=5))
    pack(old, to, jobs=1)
    before = content(to)
    with pytest.raises(ExistsError, match="another dataset is here"):
        copy(out, to, part=(1, 2))
    for part in ("1/2", "2/2"):
        assert not copy(out, to, part=part, overwrite=True).replaced
    assert before.items() < content(to).items()
    done = copy(out, to, overwrite=True)
    assert done.replaced and done.copied == 1
    assert not verify(to, jobs=1).damages and hidden(to) == []
