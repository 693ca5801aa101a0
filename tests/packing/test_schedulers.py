"""Parts of a packing that schedulers start: which one a process is, and a commit that waits."""

import contextlib
import math
import os
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, slurm
from support.trees import command, content, environment, images, plant, shardio

from shardio import PlanOptions, commit, pack
from shardio.errors import NotPackedError, OptionError
from shardio.packing.parts import find_part

ARRAY = {
    "SLURM_ARRAY_TASK_ID": "7",
    "SLURM_ARRAY_TASK_MIN": "3",
    "SLURM_ARRAY_TASK_MAX": "9",
    "SLURM_ARRAY_TASK_COUNT": "4",
    "SLURM_ARRAY_TASK_STEP": "2",
}
STEP = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
RANKS = {"RANK": "4", "WORLD_SIZE": "8"}
POD = {"JOB_COMPLETION_INDEX": "0"}


@pytest.mark.parametrize(
    ("told", "parts", "expected"),
    [
        (ARRAY, None, (3, 4)),
        (ARRAY, 4, (3, 4)),
        ({**ARRAY, "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None, (3, 4)),  # a batch script
        ({**ARRAY, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None, (3, 4)),
        ({**ARRAY, **STEP}, None, (6, 8)),
        (STEP, None, (2, 2)),
        (RANKS, None, (5, 8)),
        ({**RANKS, "SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "8"}, 8, (5, 8)),
        (POD, 5, (1, 5)),
        ({**ARRAY, **{f"SLURM_ARRAY_TASK_{name}": "5" for name in ("ID", "MIN", "MAX")},
          "SLURM_ARRAY_TASK_COUNT": "1", "SLURM_ARRAY_TASK_STEP": "1"}, None, (1, 1)),
    ],
)  # fmt: skip
def test_the_scheduler_says_which_part_this_is(
    told: dict[str, str], parts: int | None, expected: tuple[int, int]
) -> None:
    assert find_part(parts, told)[:2] == expected


@pytest.mark.parametrize(
    ("told", "parts", "message"),
    [
        ({}, None, "nothing says which part"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None, "nothing says which part"),
        ({**STEP, **RANKS}, None, r"several: part 2 of 2, by SLURM_PROCID=1 of 2; part 5 of 8, by"),
        (RANKS, 9, r"parts is 9, but this process is part 5 of 8, by RANK=4, WORLD_SIZE=8"),
        (POD, None, "give parts, the job's completions"),
        ({"JOB_COMPLETION_INDEX": "5"}, 5, "expected 0 to 4"),
        ({"RANK": "8", "WORLD_SIZE": "8"}, None, "expected 0 to 7"),
        ({"RANK": "x", "WORLD_SIZE": "8"}, None, "RANK is 'x': expected a number"),
        ({**ARRAY, "SLURM_ARRAY_TASK_MAX": "10"}, None, "not evenly spaced"),  # 3,5,7,10
        ({**ARRAY, "SLURM_ARRAY_TASK_STEP": "1"}, None, "not evenly spaced"),  # as SLURM says then
        ({**ARRAY, "SLURM_ARRAY_TASK_ID": "4"}, None, "not evenly spaced"),
        ({"SLURM_ARRAY_TASK_ID": "4"}, None, "SLURM_ARRAY_TASK_MIN is not set"),
    ],
)
def test_what_is_not_clear_is_asked_for(
    told: dict[str, str], parts: int | None, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        find_part(parts, told)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"part": "1/2", "parts": 2}, "parts is 2: goes with part 'auto' alone"),
        ({"stagger_s": -1}, "stagger_s is -1"),
        ({"part": "auto", "parts": 0}, "parts is 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        PlanOptions(**options)


# --- from the command line ------------------------------------------------------------------------

SMALL = ("--max-records", "4", "--jobs", "1")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return plant(tmp_path / "src", images())


def of_task(number: int) -> dict[str, str]:
    """The variables of one task of `sbatch --array=10-12`."""
    names = {"ID": number, "MIN": 10, "MAX": 12, "COUNT": 3, "STEP": 1}
    return environment(**{f"SLURM_ARRAY_TASK_{name}": str(one) for name, one in names.items()})


def test_an_array_packs_what_one_process_would(source: Path, tmp_path: Path) -> None:
    shardio("pack", source, tmp_path / "one", *SMALL)
    for number in (10, 11, 12, 11):
        line = ("pack", source, tmp_path / "parts", "--part", "auto", "--stagger", "0.1", *SMALL)
        said = shardio(*line, env=of_task(number)).stderr
        expected = f"part {number - 9} of 3, by SLURM_ARRAY_TASK_ID={number} of 10-12\n"
        assert said.startswith(expected) and "so that not all parts begin at once" in said
    shardio("commit", tmp_path / "parts", "--wait")
    assert content(tmp_path / "one") == content(tmp_path / "parts")


def test_a_part_says_what_it_would_pack_and_of_a_dataset_all_that_is_there(
    source: Path, tmp_path: Path
) -> None:
    line = ("pack", source, tmp_path / "out", "--part", "1/3", *SMALL)
    assert (
        "would pack 8 files, 3 classes, 2.4 KiB into 2 shards" in shardio(*line, "--dry-run").stdout
    )
    shardio("pack", source, tmp_path / "out", *SMALL)
    assert "already packed: 24 files, 3 classes, 7.3 KiB, with" in shardio(*line).stdout


def test_wrong_parts_are_told_as_on_the_command_line(source: Path, tmp_path: Path) -> None:
    line = ("pack", source, tmp_path / "out", "--parts", "3")
    assert "--parts is 3: goes with part 'auto' alone" in shardio(*line, code=2).stderr
    pod = environment(JOB_COMPLETION_INDEX="2")
    said = shardio(*line[:3], "--part", "auto", env=pod, code=2).stderr
    assert "give parts, the job's completions (`--parts N`)" in said


def test_a_shard_that_is_removed_while_a_commit_looks_is_missing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, scandir = tmp_path / "out", os.scandir
    shardio("pack", source, out, "--part", "2/3", *SMALL)
    built = [*out.glob("*.shard")]

    def late(path: Any) -> Any:
        entries = [*scandir(path)]
        for shard in built:
            shard.unlink(missing_ok=True)
        return contextlib.nullcontext(entries)

    monkeypatch.setattr(os, "scandir", late)
    with pytest.raises(NotPackedError, match="6 of 6 shards are not built"):
        commit(out, wait_s=0)


def test_what_is_missing_is_told_by_shard_and_by_part(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "parts"
    with pytest.raises(NotPackedError, match=r"no part has begun to pack here\n.*waited 0 s"):
        commit(out, wait_s=0)
    shardio("pack", source, out, "--part", "2/3", *SMALL)
    many = shardio("commit", out, "--parts", str(1 << 40), code=1).stderr  # told at once, too
    assert f"of parts {-(-(1 << 40) // 6)}, " in many
    missing = "4 of 6 shards are not built: 0, 1, 4, 5; of parts 1, 3"
    said = shardio("commit", out, "--parts", "3", code=1).stderr
    assert missing in said and said.endswith("then `shardio commit` again\n")
    with pytest.raises(NotPackedError, match=missing):
        commit(out, parts=3, wait_s=0)
    said = shardio("commit", out, code=1).stderr
    assert "of parts" not in said and said.endswith("again; with `--parts N` it says which\n")


def test_a_commit_waits_for_parts_that_are_still_to_come(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "parts"
    line = command("commit", out, "--wait", "--parts", "2")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, env=environment(), **pipes) as waits:  # type: ignore[call-overload]
        assert waits.stderr.readline().endswith("no part has begun to pack here\n")
        for part in ("1/2", "2/2"):
            assert waits.poll() is None
            shardio("pack", source, out, "--part", part, *SMALL)
        said, errors = waits.communicate(timeout=LIMIT_S)
    assert waits.returncode == 0, errors
    assert "24 files" in said
    shardio("pack", source, tmp_path / "one", *SMALL)
    assert content(tmp_path / "one") == content(out)


def test_a_commit_waits_for_all_splits(tmp_path: Path) -> None:
    source = tmp_path / "src"
    for split in ("train", "val"):
        plant(source / split, images())
    plan = {"max_records": 4}
    pack(source, tmp_path / "one", plan=PlanOptions(**plan), jobs=1)
    out, heard = tmp_path / "parts", []
    started = threading.Event()

    def hear(line: str) -> None:
        heard.append(line)
        started.set()

    pack(source, out, plan=PlanOptions(part="1/2", **plan), jobs=1)
    waiting = {"wait_s": math.inf, "parts": 2, "jobs": 1, "announce": hear}
    thread = threading.Thread(target=commit, args=(out,), kwargs=waiting)
    thread.start()
    try:
        assert started.wait(LIMIT_S)
        pack(source, out, plan=PlanOptions(part="2/2", **plan), jobs=1)
    finally:
        thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert len(heard) == 1 and heard[0].count("3 of 6 shards are not built: 3, 4, 5") == 2
    assert content(tmp_path / "one") == content(out)


def manifests(out: Path) -> dict[str, bytes]:
    return {str(one.relative_to(out)): one.read_bytes() for one in out.rglob("manifest.json")}


@pytest.mark.parametrize("splits", [[""], ["train", "val"]])
def test_a_commit_waits_for_the_parts_that_replace_another_dataset(
    tmp_path: Path, splits: list[str]
) -> None:
    new, out, plan = tmp_path / "new", tmp_path / "out", {"max_records": 4}
    for split in splits:
        plant(tmp_path / "old" / split, images(each=5))
        plant(new / split, images())
    pack(tmp_path / "old", out, jobs=1)
    pack(new, tmp_path / "one", plan=PlanOptions(**plan), jobs=1)
    waiting = {"overwrite": True, "parts": 2, "jobs": 1}
    with pytest.raises(NotPackedError, match=r"no part has begun to pack here\n.*waited 0 s"):
        commit(out, wait_s=0, **waiting)
    for part in ("1/2", "2/2"):
        pack(new, out, plan=PlanOptions(part=part, **plan), jobs=1, overwrite=True)
    last, journal = out / splits[-1], out / splits[-1] / ".shardio-plan"
    if splits[-1]:
        journal.rename(tmp_path / "plan")  # as before a part begins with the last split
        for more in ({}, {"wait_s": 0}):
            with pytest.raises(NotPackedError, match=r"val: no part has begun to pack here\n"):
                commit(out, **waiting, **more)
        (tmp_path / "plan").rename(journal)
        shutil.copytree(last, tmp_path / "val")
    commit(out, wait_s=60, **waiting)
    assert manifests(out) == manifests(tmp_path / "one")
    if splits[-1]:  # a commit that was killed between two splits
        shutil.rmtree(last)
        (tmp_path / "val").rename(last)
        commit(out, wait_s=60, **waiting)
        assert manifests(out) == manifests(tmp_path / "one")
    with pytest.raises(NotPackedError, match="already packed"):
        commit(out, overwrite=True)


def test_a_commit_that_has_waited_long_enough_says_what_is_missing(
    source: Path, tmp_path: Path
) -> None:
    pack(source, tmp_path / "out", plan=PlanOptions(part="1/6", max_records=4), jobs=1)
    with pytest.raises(NotPackedError, match=r"5 of 6 shards .* 1, 2, 3, 4, 5\nNothing was comm"):
        commit(tmp_path / "out", wait_s=0.1)


# --- under a real scheduler -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with slurm.cluster() as variables:
        yield variables


@pytest.fixture
def expected(source: Path, tmp_path: Path) -> dict[bytes, bytes | None]:
    """What one process packs."""
    shardio("pack", source, tmp_path / "one", *SMALL)
    return content(tmp_path / "one")


def of_auto(source: Path, out: Path) -> str:
    """A line of a script that packs the part of its process."""
    return shlex.join(map(str, command("pack", source, out, "--part", "auto", *SMALL)))


def submit(cluster: dict[str, str], script: Path, *options: str) -> str:
    """Submit a job, wait for it, and return what its tasks said."""
    said = f"--output={script}-%j.out"
    line = ["sbatch", "--wait", "--parsable", "--open-mode=append", said, *options, str(script)]
    done = subprocess.run(line, env=cluster, capture_output=True, text=True, timeout=LIMIT_S)
    found = "".join(one.read_text() for one in sorted(script.parent.glob(f"{script.name}-*.out")))
    assert done.returncode == 0, (done.stderr, found)
    return found


def test_an_array_of_slurm_packs_and_a_task_that_failed_is_run_again(
    cluster: dict[str, str], source: Path, tmp_path: Path, expected: dict[bytes, bytes | None]
) -> None:
    out, script = tmp_path / "out", tmp_path / "job"
    line = of_auto(source, out)
    fails = f"[ $SLURM_ARRAY_TASK_ID = 7 ] && [ ! -e {tmp_path}/failed ]"
    script.write_text(
        f"#!/bin/bash\nif {fails}; then touch {tmp_path}/failed; exit 1; fi\n{line}\n"
    )
    with pytest.raises(AssertionError):
        submit(cluster, script, "--array=5-9:2", "--ntasks=2", "--overcommit")
    told = shardio("commit", out, "--parts", "3", code=1).stderr
    assert "2 of 6 shards are not built: 2, 3; of parts 2" in told
    said = submit(cluster, script, "--array=5-9:2", "--ntasks=2", "--overcommit")
    assert "part 2 of 3, by SLURM_ARRAY_TASK_ID=7 of 5-9" in said
    shardio("commit", out)
    assert content(out) == expected


def test_tasks_of_srun_pack_their_parts_at_once(
    cluster: dict[str, str], source: Path, tmp_path: Path, expected: dict[bytes, bytes | None]
) -> None:
    out, script = tmp_path / "out", tmp_path / "job"
    last = shlex.join(map(str, command("commit", "--wait", out)))
    script.write_text(f"#!/bin/bash\nsrun --overcommit {of_auto(source, out)} &\n{last}\nwait\n")
    said = submit(cluster, script, "--ntasks=3", "--overcommit")
    assert all(f"part {n + 1} of 3, by SLURM_PROCID={n} of 3" in said for n in range(3))
    assert content(out) == expected


def test_an_array_of_slurm_verifies_and_copies(
    cluster: dict[str, str], source: Path, tmp_path: Path, expected: dict[bytes, bytes | None]
) -> None:
    out, script = tmp_path / "one", tmp_path / "job"
    lines = [("verify", out), ("copy", out, tmp_path / "to")]
    auto = [shlex.join(map(str, command(*line, "--part", "auto"))) for line in lines]
    script.write_text("\n".join(["#!/bin/bash", "set -e", *auto, ""]))
    said = submit(cluster, script, "--array=0-1", "--ntasks=2", "--overcommit")
    for part in ("1", "2"):
        assert f"part {part} of 2: 12 records in 3 shards" in said
        assert f"part {part} of 2 copied; when all are: the same command without --part" in said
    assert "3 files" in said and "manifest.json" not in os.listdir(tmp_path / "to")
    assert "1 copied, 6 kept" in shardio(*lines[1]).stdout
    assert content(tmp_path / "to") == expected
