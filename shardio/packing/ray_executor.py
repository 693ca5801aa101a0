"""Independent tasks on the machines of a Ray cluster: the same call, results and errors as here.

How it works. What is to be done is put into Ray's object store once; a task is a small value beside
it, and so is its result: the bytes of records go straight between the nodes and the storage. Two
tasks for each CPU of the cluster are under way, no more. What a task raises comes back as a value,
so that Ray runs a task again only where its worker process, or its node, was lost.

Source: https://docs.ray.io/en/latest/ray-core/tasks.html
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import shutil
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .._version import __version__
from ..errors import DependencyError, StorageError, printable
from ..machine import processors
from ..storage import ranges
from ..units import refuse_unknown, unexpected
from . import process_pool
from .process_pool import Report, Result, Task

_RETRIES = 3  # of a task whose worker process, or node, was lost
_A_CPU = 2  # tasks under way: one is done while the next one comes, so that no CPU waits for us
_LOOK_S = 0.5  # between two looks at what is done
_NODES_S = 2.0  # between two looks at which nodes are there
_ANSWER_S = 10.0  # that a cluster has to accept a connection
_GRACE_S = 10.0  # that tasks have to stop by themselves

_Reply = tuple[process_pool.Reply, int]  # and what was counted as done


@refuse_unknown
@dataclass(frozen=True)
class RayExecutor:
    """Choose a Ray cluster to do the work of `pack`, `verify`, `index`, `export` or `copy`.

    address  of the cluster: "auto" on one of its nodes, or "10.0.0.1:6379"; default: RAY_ADDRESS,
             or a cluster of this machine alone, with `jobs` CPUs, for this one call
    tell     called with lines that say which nodes were lost

    Where ray.init was called before, that cluster is used. Its nodes have this release of shardio,
    see the same paths, and have the credentials of stores in their environment.

    Raises DependencyError, OptionError.
    """

    address: str | None = None
    tell: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.address, str | None):
            raise unexpected("address", self.address, "'HOST:PORT'")
        _load()

    @contextlib.contextmanager
    def connected(self, jobs: int) -> Iterator[None]:
        """Be connected with the cluster; within it, `run` does not connect anew.

        Raises StorageError.
        """
        ray = _load()
        if ray.is_initialized():
            yield
            return
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        own = {"num_cpus": jobs, "include_dashboard": False} if address == "local" else {}
        try:
            _refuse_deaf(address)
            begun = ray.init(address, logging_level=logging.CRITICAL, log_to_driver=False, **own)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            raise StorageError(
                f"Ray cluster {printable(address)}: {_reason(error)}. Expected HOST:PORT of a "
                "cluster with the same releases of Ray and Python as here; where it asks for a "
                "token, RAY_AUTH_MODE=token and the token are in the environment"
            ) from error
        try:
            yield
        finally:
            ray.shutdown()
            if own:  # the logs and sockets of a cluster that was there for this call
                shutil.rmtree(begun.address_info["session_dir"], ignore_errors=True)

    def run(
        self,
        work: Callable[[Task, Callable[[int], None]], Result],
        tasks: Sequence[Task],
        *,
        jobs: int,
        report: Report,
        seen: Callable[[Result], None] | None = None,
    ) -> Generator[Result, None, None]:
        """Give work(task, add) of each task, in order, as process_pool.run does.

        Raises what work raises; StorageError where a task was lost again and again;
        DependencyError for nodes with another shardio, or none.
        """
        with self.connected(jobs):
            yield from _Run(work, report, seen, self.tell or (lambda line: None)).run(tasks)


class _Run:
    """One call of `run`, and the tasks of it that are under way."""

    def __init__(
        self,
        work: Callable[..., Any],
        report: Report,
        seen: Callable[[Any], None] | None,
        tell: Callable[[str], None],
    ) -> None:
        self._ray, self._report, self._seen, self._tell = _load(), report, seen, tell
        self._remote = self._ray.remote(max_retries=_RETRIES)(_task())
        # In a list it is not sent with each task: a worker process asks for it once.
        self._work = [self._ray.put(pickle.dumps((os.getcwd(), work)))]
        self._running: dict[Any, int] = {}  # to the number of the task
        self._alive: dict[str, str] = {}  # nodes, by id, and what they are called
        self._looked_s = 0.0
        self._room = 0

    def run(self, tasks: Sequence[Any]) -> Iterator[Any]:
        found: dict[int, Any] = {}
        number = turn = 0  # the next task to send, and the next result to give
        try:
            while True:
                self._look_at_nodes()
                while number < len(tasks) and len(self._running) < self._room:
                    sent = self._remote.remote(__version__, self._work, pickle.dumps(tasks[number]))
                    self._running[sent] = number
                    number += 1
                while turn in found:
                    yield found.pop(turn)
                    turn += 1
                if not self._running:
                    return
                for ref in self._ray.wait(list(self._running), timeout=_LOOK_S)[0]:
                    turned = self._running.pop(ref)  # one that is done is not to be cancelled
                    found[turned] = self._result(ref)
                    if self._seen is not None:
                        self._seen(found[turned])
                self._report.show()
        finally:
            self._end()

    def _result(self, ref: Any) -> Any:
        try:
            reply = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            raise StorageError(
                f"a task was lost {1 + _RETRIES} times: its worker process was killed (out of "
                f"memory?), or its node was lost ({type(error).__name__}). What is finished is "
                "kept: run it again to resume"
            ) from error
        if isinstance(reply, str):
            raise DependencyError(reply)
        answer, count = reply
        result = process_pool.unwrap(answer)
        self._report.add(count)
        return result

    def _look_at_nodes(self) -> None:
        """Learn how many tasks the cluster takes; say which nodes were lost."""
        if self._room and time.monotonic() - self._looked_s < _NODES_S:
            return
        self._looked_s = time.monotonic()
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        alive = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
        for lost in self._alive.keys() - alive.keys():
            self._tell(f"Ray: node {self._alive[lost]} was lost; its tasks run again on others")
        self._alive = alive
        cpus = sum(node["Resources"].get("CPU", 0) for node in nodes)
        self._room = max(_A_CPU, int(_A_CPU * cpus))

    def _end(self) -> None:
        """End the tasks under way: they stop by themselves, or their processes are killed."""
        left = list(self._running)
        for force in (False, True):
            for ref in left:
                self._ray.cancel(ref, force=force)
            if left:
                left = self._ray.wait(left, num_returns=len(left), timeout=_GRACE_S)[1]


def _task() -> Callable[..., Any]:
    """Return what Ray runs on a node."""

    # Within a function, so that Ray sends its code, and not its name: a node without shardio, or
    # with another release, is to say so. Nothing of shardio is read before that.
    def run(version: str, work: list[Any], task: bytes) -> _Reply | str:
        import importlib
        import platform

        needed = f"node {platform.node()} of the Ray cluster has %s, expected {version}, as here. "
        needed += f"Install shardio-torch=={version} on all nodes, or give it by a runtime_env"
        try:
            found = importlib.import_module("shardio").__version__
        except ImportError:
            return needed % "no shardio"
        if found != version:
            return needed % f"shardio {found}"
        module = importlib.import_module("shardio.packing.ray_executor")
        reply: _Reply = module.attempt(work, task)
        return reply

    return run


def attempt(work: list[Any], task: bytes) -> _Reply:
    """Do a task on a node; return its reply, and what it counted as done."""
    ranges.hold_client()  # a worker process of Ray is forked by nobody
    ranges.share(processors())
    counts: list[int] = []

    def do(task: bytes, add: Callable[[int], None]) -> Any:
        folder, its = _loaded(work[0])
        with _within(folder):
            return its(pickle.loads(task), add)

    return process_pool.attempt(do, task, counts.append), sum(counts)


@functools.lru_cache(maxsize=1)
def _loaded(ref: Any) -> tuple[str, Callable[..., Any]]:
    """Return the current directory of who asks for the work, and the work."""
    found: tuple[str, Callable[..., Any]] = pickle.loads(_load().get(ref))
    return found


@contextlib.contextmanager
def _within(folder: str) -> Iterator[None]:
    """Work in a directory, if this machine has it: so relative paths mean what they do there."""
    before = os.getcwd()
    with contextlib.suppress(OSError):
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _load() -> Any:
    """Return the package ray. Raises DependencyError."""
    try:
        import ray
    except ImportError:
        raise DependencyError(
            "a Ray cluster needs the package ray: pip install 'shardio-torch[ray]'"
        ) from None
    return ray


def _refuse_deaf(address: str) -> None:
    """Raise OSError where nobody listens at HOST:PORT: Ray would try for a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "//" not in host:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()


def _reason(error: Exception) -> str:
    """Return the first line of an error, or what the system calls it."""
    text = getattr(error, "strerror", None) or str(error)
    return printable(text.strip().partition("\n")[0].rstrip("."), 1024)
