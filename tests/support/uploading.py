"""Datasets on their way to a directory or a store: what arrived, and by which requests."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from shardio import Storage
from support import LIMIT_S, warm_python
from support.fault_proxy import FaultProxy
from support.object_stores import ObjectStore
from support.trees import content, environment, warm_command


def files(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder."""
    found = content(folder).items()
    return {os.fsdecode(path): data for path, data in found if data is not None}


def named(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return what a dataset has, without what an export left beside it: DALI's index, a receipt."""
    return {
        path: data
        for path, data in files.items()
        if not path.startswith(".") and not path.endswith(".idx")
    }


def fetched(store: ObjectStore, prefix: str, folder: Path) -> dict[str, bytes]:
    """Return all objects below a prefix."""
    store.get([name for name in store.sizes() if name.startswith(f"{prefix}/")], folder)
    return files(folder / prefix)


def options(store: ObjectStore, **more: Any) -> Storage:
    return Storage(options=store.options, **more)


def puts(proxy: FaultProxy, name: str = "") -> int:
    """Count the uploads of objects whose path has a name in it."""
    return sum(one.method == "PUT" and name in one.path for one in proxy.figures().log)


@contextlib.contextmanager
def started(*line: Any) -> Iterator[warm_python.Process]:
    """Start the command line; at the end it is killed, if it still runs."""
    lines = warm_command(*map(str, line))
    with warm_python.Process(lines, env=environment(), stdout=DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def kill_held(proxy: FaultProxy, *line: Any, faults: int = 1) -> None:
    """Run the command line until so many of its requests met a fault, and kill it."""
    with started(*line) as process:
        proxy.wait(faults=faults)
        process.kill()
        process.wait(LIMIT_S)


@contextlib.contextmanager
def second_part_held(
    proxy: FaultProxy, line: Sequence[Any], *more: str
) -> Iterator[warm_python.Process]:
    """Run three parts at once, of which a fault holds up the second; at the end it is killed."""
    with contextlib.ExitStack() as stack:
        first, second, last = (
            stack.enter_context(started(*line, "--part", f"{i}/3", *more)) for i in (1, 2, 3)
        )
        proxy.wait(faults=1)
        assert (first.wait(LIMIT_S), last.wait(LIMIT_S)) == (0, 0)
        yield second
        second.kill()
