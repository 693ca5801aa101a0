"""`verify`, by parts: each process of a job array does its share of the shards, and no more."""

from pathlib import Path
from typing import Any

import pytest
from support.trees import environment, images, plant, shardio, shards

from shardio import OptionError, PlanOptions, pack, verify

NAMES = ("MIN", "MAX", "COUNT", "STEP")
TASK_2_OF_3 = {f"SLURM_ARRAY_TASK_{name}": one for name, one in zip(NAMES, "1331", strict=True)}
TASK_2_OF_3["SLURM_ARRAY_TASK_ID"] = "2"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A dataset of 6 shards with 4 records each."""
    source = plant(tmp_path / "src", images())
    pack(source, tmp_path / "out", plan=PlanOptions(max_records=4), jobs=1)
    return tmp_path / "out"


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)


# --- verify ---------------------------------------------------------------------------------------


def test_the_parts_of_a_verify_check_each_shard_once(out: Path) -> None:
    for path in shards(out):
        spoil(path)
    found = [verify(out, part=(i, 4), jobs=1) for i in (1, 2, 3, 4)]
    assert [one.shards for one in found] == [1, 2, 1, 2]
    assert [one.part for one in found] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    damaged = [damage.shard for one in found for damage in one.damages]
    assert damaged == [str(path) for path in shards(out)]
    assert sum(one.bytes for one in found) == verify(out).bytes
    assert verify(out, part="7/8").shards == 0 + (7 * 6 // 8 - 6 * 6 // 8)


def test_the_command_verifies_the_part_that_the_scheduler_says(out: Path) -> None:
    spoil(shards(out)[2])
    line = ("verify", out, "--part", "auto", "--stagger", "0.1")
    done = shardio(*line, env=environment(**TASK_2_OF_3), code=3)
    said, waits = done.stderr.splitlines()
    assert said == "part 2 of 3, by SLURM_ARRAY_TASK_ID=2 of 1-3"
    assert waits.endswith("so that not all parts begin at once")
    assert done.stdout.splitlines()[-1].startswith("part 2 of 3: ")
    assert shardio("verify", out, "--part", "3/3").stdout.startswith("part 3 of 3: 8 records in 2")


@pytest.mark.parametrize("call", [verify])
def test_each_function_checks_its_part_as_pack_does(out: Path, call: Any) -> None:
    for options, message in (
        ({"part": "3/2"}, "part 3/2: parts count from 1"),
        ({"part": "1/2", "parts": 2}, "parts belongs to part='auto'"),
        ({"stagger_s": -1}, "stagger_s is -1"),
    ):
        with pytest.raises(OptionError, match=message):
            call(out, **options)
