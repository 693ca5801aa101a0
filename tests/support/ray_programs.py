"""Programs that run tasks of their own on a Ray cluster; `work` is found by its nodes.

python -m support.ray_programs tasks ADDRESS FOLDER     prints what happened, as JSON
python -m support.ray_programs lost ADDRESS FOLDER      prints what is said of a task that kills
python -m support.ray_programs endless ADDRESS FOLDER   waits for Ctrl-C
python -m support.ray_programs release ADDRESS FOLDER   with the shardio in FOLDER on the nodes
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shardio.errors import ShardioError
from shardio.packing.process_pool import Report, run
from shardio.packing.ray_executor import RayExecutor
from support import programs, ray_programs  # itself, by the name that nodes know it by


def work(folder: str, task: str, add: Callable[[int], None]) -> list[str]:
    """Do what a task says; `folder` remembers what was done before, by any process."""
    add(7)
    kind, _, which = task.partition(" ")
    if kind == "raise":
        raise ShardioError(f"task {which} failed")
    if kind == "die" or (kind == "die-once" and not Path(folder, which).exists()):
        Path(folder, which).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "wait":
        Path(folder, f"begun-{which}").write_text(os.environ.get(programs.MARK, ""))
        while not Path(folder, "gate").exists():
            time.sleep(0.01)
    if kind == "endless":
        try:
            Path(folder, f"begun-{which}").touch()
            while True:
                time.sleep(0.01)
        finally:
            Path(folder, f"ended-{which}").touch()
    return [task, os.getcwd()]


class Tasks(list[str]):
    """Tasks that count how many of them were taken."""

    taken = 0

    def __getitem__(self, at: Any) -> Any:
        self.taken += 1
        return super().__getitem__(at)


def _tasks(address: str, folder: str) -> None:
    said: dict[str, Any] = {"progress": 0, "seen": [], "most": 0}

    def progress(done: int, total: int) -> None:
        said["progress"] = done

    def do(named: list[str]) -> list[Any]:
        tasks, results = Tasks(named), 0
        report = Report(progress, 7 * len(tasks))

        def seen(result: Any) -> None:
            nonlocal results
            said["most"] = max(said["most"], tasks.taken - results)
            said["seen"].append(result)
            results += 1

        executor = RayExecutor(address)
        once = partial(ray_programs.work, folder)
        return list(run(once, tasks, jobs=1, report=report, seen=seen, executor=executor))

    with RayExecutor(address).connected(1):
        said["results"] = do(["die-once a", *map(str, range(10)), "die-once b"])
        said["done"] = said["progress"]
        try:
            do(["1", "raise x", *map(str, range(10))])
        except ShardioError as error:
            said["raise"] = [type(error).__name__, str(error), str(error.__cause__)]
    print(json.dumps(said))


def _lost(address: str, folder: str) -> None:
    once = partial(ray_programs.work, folder)
    executor = RayExecutor(address)
    try:
        list(run(once, ["1", "die x"], jobs=1, report=Report(None, 0), executor=executor))
    except ShardioError as error:
        print(f"{type(error).__name__}: {error}")


def _endless(address: str, folder: str) -> None:
    tasks = [f"endless {number}" for number in range(10)]
    once = partial(ray_programs.work, folder)
    executor = RayExecutor(address)
    list(run(once, tasks, jobs=1, report=Report(None, 0), executor=executor))


def _wait(address: str, folder: str) -> None:
    tasks = [f"wait {number}" for number in range(8)]
    once = partial(ray_programs.work, folder)
    executor = RayExecutor(address, tell=print)
    done = list(run(once, tasks, jobs=1, report=Report(None, 0), executor=executor))
    print(f"{len(done)} tasks done")


def _release(address: str, folder: str) -> None:
    import ray

    os.chdir(folder)  # where nodes import from first
    ray.init(address, log_to_driver=False)
    try:
        once = partial(ray_programs.work, folder)  # where ray.init was called, that cluster is used
        list(run(once, ["1"], jobs=1, report=Report(None, 0), executor=RayExecutor()))
    except ShardioError as error:
        print(error)
    assert ray.is_initialized()  # it is not ours to end


if __name__ == "__main__":
    program, address, folder = sys.argv[1:]
    known = {"tasks": _tasks, "lost": _lost, "endless": _endless, "wait": _wait}
    (known | {"release": _release})[program](address, folder)
