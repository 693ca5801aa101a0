"""Tasks on all cores: results in order, errors as they are, and no process that stays."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S
from support.packing import keys, pack_one
from support.trees import (
    images,
)

from shardio.errors import (
    OptionError,
    SourceError,
    StorageError,
)
from shardio.packing import build_shard, process_pool
from shardio.packing.verify import verify


def test_progress_reaches_the_total_in_process_and_in_workers(source: Path, tmp_path: Path) -> None:
    for jobs in (1, 2):
        seen: list[tuple[int, int]] = []
        pack_one(
            source, tmp_path / str(jobs), jobs=jobs, progress=lambda *a, seen=seen: seen.append(a)
        )
        total = sum(len(data or b"") for data in images().values())
        assert seen[-1] == (total, total)
        assert seen == sorted(seen)


def killed(task: int, add: Callable[[int], None]) -> int:
    if task == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def failing(task: int, add: Callable[[int], None]) -> int:
    if task == 3:
        raise SourceError("this one")
    add(1)
    return task


def odd(task: int, add: Callable[[int], None]) -> int:
    class LocalError(Exception):  # cannot be pickled
        pass

    raise LocalError("odd")


def endless(task: int, add: Callable[[int], None]) -> int:
    if task == 0:
        raise OptionError("stop the others")
    threading.Event().wait()  # never looks whether to stop
    return task


def square(task: int, add: Callable[[int], None]) -> int:
    add(1)
    return task * task


def run(work: Any, tasks: int = 8, jobs: int = 3) -> list[int]:
    return list(
        process_pool.run(work, range(tasks), jobs=jobs, report=process_pool.Report(None, tasks))
    )


def test_results_come_in_the_order_of_tasks() -> None:
    assert run(square, 50) == [i * i for i in range(50)]
    assert run(square, 0) == []
    assert run(square, 2, jobs=40) == [0, 1]


def test_a_killed_worker_is_a_clear_error() -> None:
    with pytest.raises(StorageError, match="killed"):
        run(killed)


def test_an_error_in_a_worker_arrives_as_it_is() -> None:
    with pytest.raises(SourceError, match=r"^this one$") as caught:
        run(failing)
    assert "failing" in str(caught.value.__cause__)  # where in the worker
    with pytest.raises(RuntimeError, match="LocalError: odd"):
        run(odd)


def test_workers_that_do_not_stop_are_ended() -> None:
    with pytest.raises(OptionError):
        run(endless)


def test_a_daemon_works_in_its_own_process(source: Path, tmp_path: Path) -> None:
    def work() -> None:
        pack_one(source, tmp_path / "out", jobs=3)
        assert verify(tmp_path / "out", jobs=3).damages == []

    daemon = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    daemon.start()
    daemon.join(LIMIT_S)
    assert daemon.exitcode == 0
    assert len(keys(tmp_path / "out")) == 24


def test_a_killed_worker_leaves_no_file_and_finished_shards(source: Path, tmp_path: Path) -> None:
    real = build_shard.build_or_keep

    def die(work: Any, shard: int, add: Any) -> Any:
        if shard == 4:
            (tmp_path / "out" / f".shardio-{work.token}-00004.tmp").write_bytes(b"\x89SHD")
            os.kill(os.getpid(), signal.SIGKILL)
        return real(work, shard, add)

    build_shard.build_or_keep = die
    try:
        with pytest.raises(StorageError, match="killed"):
            pack_one(source, tmp_path / "out", jobs=2)
    finally:
        build_shard.build_or_keep = real
    assert not list((tmp_path / "out").glob("*.tmp"))
    assert pack_one(source, tmp_path / "out", jobs=2).kept >= 3
