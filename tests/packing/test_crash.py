"""kill -9, full disks and failing devices, at every system call of a packing that changes anything.

Whatever happens, before the manifest's rename the answer is "not packed" (or the dataset that was
there before), from it on the whole dataset; and the same command, run again, ends in exactly the
bytes of a packing that nobody disturbed.
"""

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import LIMIT_S
from support.crashing import (
    RECORDS,
    SCENES,
    STRACE,
    Stage,
    build,
    fail_at,
    kill_at,
    members,
    sample,
)
from support.trees import (
    command,
    content,
    environment,
    images,
    plant,
    shardio,
    shards,
)

from shardio.dataset import sequence as sequences
from shardio.errors import NotPackedError
from shardio.packing.commit import commit
from shardio.packing.options import PlanOptions
from shardio.packing.pack import pack
from shardio.storage import local

needs_strace = pytest.mark.skipif(STRACE is None, reason="strace is not installed: no crash tests")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1750000000")  # of commits, whenever they are done
        yield Stage(tmp_path_factory.mktemp("crash"))


@needs_strace
@pytest.mark.parametrize("count", [6, pytest.param(12, marks=pytest.mark.slow)])
def test_a_kill_at_any_system_call_of_a_packing_leaves_all_or_nothing(
    stage: Stage, count: int
) -> None:
    calls = stage.rehearse("pack")
    there = [kill_at(stage, "pack", *call) for call in sample("pack", calls, count)]
    assert there == sorted(there)  # nothing at first, all from the manifest's rename on


@needs_strace
def test_a_kill_right_before_and_after_the_renames_of_the_manifest(stage: Stage) -> None:
    calls = stage.rehearse("pack")
    last = max(i for i, (call, _) in enumerate(calls) if call == "rename")
    assert not kill_at(stage, "pack", *calls[last])
    assert kill_at(stage, "pack", *calls[last + 1])


@needs_strace
@pytest.mark.parametrize("count", [1, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in SCENES if name != "pack"])
def test_a_kill_at_any_system_call_in_other_circumstances(
    stage: Stage, name: str, count: int
) -> None:
    for call in sample(name, stage.rehearse(name), count):
        kill_at(stage, name, *call)


@needs_strace
@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_a_failing_device_is_a_clear_message_and_commits_nothing(
    stage: Stage, error: str, count: int
) -> None:
    calls = stage.rehearse("pack")
    for kind in ("write", "fsync", "openat", "rename", "link"):
        for call in sample(error, [call for call in calls if call[0] == kind], count):
            fail_at(stage, "pack", *call, error)
    patched = [call for call in stage.rehearse("lmdb") if call[0] == "pwrite64"]
    assert patched
    fail_at(stage, "lmdb", *patched[-1], error)


@needs_strace
@pytest.mark.stress
@pytest.mark.parametrize("name", SCENES)
def test_a_kill_at_every_system_call(stage: Stage, name: str) -> None:
    for call in stage.rehearse(name):
        kill_at(stage, name, *call)


@needs_strace
@pytest.mark.stress
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("name", SCENES)
def test_an_error_of_every_system_call(stage: Stage, name: str, error: str) -> None:
    for call in stage.rehearse(name):
        fail_at(stage, name, *call, error)


@needs_strace
@pytest.mark.stress
def test_kills_one_after_the_other(stage: Stage) -> None:
    for name in ("pack", "skip", "overwrite", "restart"):
        calls = stage.rehearse(name)
        scene = SCENES[name]
        dice = random.Random(name)
        for _ in range(6):
            out = stage.out(scene)
            for _ in range(4):
                call, count = dice.choice(calls)
                inject = f"inject={call}:signal=SIGKILL:when={count}"
                stage.strace(scene, out, "-o", os.devnull, "-e", inject)
            stage.check(name, out)


# --- processes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[bytes, bytes | None]]:
    """A source of 60 shards, and what becomes of it undisturbed."""
    folder = tmp_path_factory.mktemp("large")
    source = plant(folder / "src", images(4, 60, 3000))
    pack(source, folder / "out", jobs=2, plan=PlanOptions(max_records=4))
    return source, content(folder / "out")


def begin(source: Path, out: Path, held: int | None = None) -> subprocess.Popen[str]:
    """Begin to pack; held: with so many shards it waits."""
    line = command("pack", source, out, "--max-records", "4", "--jobs", "2")
    if held is not None:
        line[line.index("shardio") : line.index("pack")] = ["support.held_packing", str(held)]
    return subprocess.Popen(
        line,
        env=environment(),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="there is no /proc")


def kill_some_time(
    large: tuple[Path, dict[bytes, bytes | None]], folder: Path, moments: int, seed: int
) -> None:
    source, undisturbed = large
    dice = random.Random(seed)
    for number in range(moments):
        out = folder / str(number)
        process = begin(source, out)
        until = dice.randrange(62)  # shards that are finished; 60 and 61: at the very end
        while len(shards(out)) < min(until, 60) and process.poll() is None:
            time.sleep(0.0005)
        try:
            process.wait(timeout=dice.random() * 0.01)
        except subprocess.TimeoutExpired:
            if number % 2:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.communicate()
        try:
            assert len(sequences.open(out)) == 240
        except NotPackedError as error:
            assert "not packed" in str(error)
        pack(source, out, jobs=2, plan=PlanOptions(max_records=4))
        assert content(out) == undisturbed
        while members(process.pid):  # a worker whose parent was killed ends too
            time.sleep(0.01)
        assert content(out) == undisturbed
        shutil.rmtree(out)


@needs_proc
def test_a_kill_at_some_moment_with_workers(
    large: tuple[Path, dict[bytes, bytes | None]], tmp_path: Path
) -> None:
    kill_some_time(large, tmp_path, 4, 0)


@needs_proc
@pytest.mark.stress
def test_a_kill_at_sixty_moments_with_workers(
    large: tuple[Path, dict[bytes, bytes | None]], tmp_path: Path
) -> None:
    kill_some_time(large, tmp_path, 60, 1)


@needs_proc
@pytest.mark.parametrize("whom", ["group", "parent"])
def test_ctrl_c_ends_all_processes_and_leaves_finished_shards(
    large: tuple[Path, dict[bytes, bytes | None]], tmp_path: Path, whom: str
) -> None:
    source, undisturbed = large
    process = begin(source, tmp_path, held=3)
    while len(shards(tmp_path)) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT) if whom == "group" else process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=LIMIT_S)
    advice = "what is finished is kept; run the same command again to go on"
    assert (process.returncode, said) == (130, f"shardio: interrupted: {advice}\n")
    assert members(process.pid) == []
    assert not list(tmp_path.glob("*.tmp"))
    [done] = pack(source, tmp_path, jobs=2, plan=PlanOptions(max_records=4))
    assert done.kept == 3
    assert content(tmp_path) == undisturbed


def test_a_file_size_limit_is_a_clear_message(stage: Stage, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))

    line = ("pack", stage.source, tmp_path / "out", *RECORDS)
    done = shardio(*line, code=1, warm=False, preexec_fn=limit)
    assert "File too large" in done.stderr
    shardio("pack", stage.source, tmp_path / "out", *RECORDS)


def test_short_writes_change_nothing(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(stage.source, tmp_path / "one")
    real = os.write
    monkeypatch.setattr(local.os, "write", lambda descriptor, data: real(descriptor, data[:10]))
    build(stage.source, tmp_path / "two")
    monkeypatch.undo()
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_a_directory_that_cannot_be_written_is_a_clear_message(
    stage: Stage, tmp_path: Path
) -> None:
    for place in ("/proc/shardio", "/dev/null/out"):
        assert "shardio: " in shardio("pack", stage.source, place, code=1).stderr


def test_commit_after_a_kill_in_the_middle_of_parts(stage: Stage, tmp_path: Path) -> None:
    build(stage.source, tmp_path / "one")
    build(stage.source, tmp_path / "out", part=(2, 2))
    with pytest.raises(NotPackedError, match="are not built: 0"):
        commit(tmp_path / "out")
    build(stage.source, tmp_path / "out", part=(1, 2))
    commit(tmp_path / "out")
    assert content(tmp_path / "one") == content(tmp_path / "out")
