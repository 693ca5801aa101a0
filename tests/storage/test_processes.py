"""Processes that read by URL may fork, be stopped and be killed at any moment.

Nobody waits without an end, nobody gets wrong bytes, and nothing is left behind.
"""

import contextlib
import mmap
import os
import pkgutil
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LIMIT_S, worker_programs
from support.fault_proxy import FaultProxy
from support.faults import Rule
from support.leftovers import nothing_left, of_killed_workers
from support.url_datasets import served, write_images
from support.url_reader import digest, url_reader
from torch.utils.data import DataLoader

import shardio
from shardio import Order, ShardDataset, ShardLoader, Storage
from shardio.errors import StorageError
from shardio.storage import ranges
from shardio.storage.cache_layout import is_name

RECORDS, BYTES = 160, 60_000
SLOW = pytest.mark.slow


def image(number: int) -> bytes:
    return b"\xff\xd8\xff" + number.to_bytes(4, "big") * (BYTES // 4)


def number_of(data: bytes) -> int:
    """Return which image this is. Raises AssertionError if it is none of them."""
    number = int.from_bytes(data[3:7], "big")
    assert data == image(number)
    return number


@pytest.fixture(scope="module")
def proxy_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    folder = tmp_path_factory.mktemp("www")
    write_images(folder / "data", RECORDS, image, 800_000)
    with served(folder) as proxy:
        yield proxy


@pytest.fixture
def proxy(proxy: FaultProxy) -> Iterator[FaultProxy]:
    with within(LIMIT_S):
        yield proxy


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Fail, and do not hang, where something waits for ever."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {limit_s} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def decoded(data: bytes) -> Any:
    return np.array([number_of(data)])


def dataset(
    proxy: FaultProxy, cache: Path, decode: Any = decoded, timeout_s: float = 20.0
) -> ShardDataset:
    return ShardDataset(
        f"{proxy.url}/data",
        batch_size=8,
        decode=decode,
        fields=("image",),
        shuffle_buffer=30,
        order=Order(spans=4, unit=4),
        storage=Storage(timeout_s=timeout_s, cache=cache, cache_bytes="1GiB"),
    )


def numbers(loader: Any) -> list[int]:
    return sorted(number for (batch,) in loader for number in batch[:, 0].tolist())


@contextlib.contextmanager
def loading(there: ShardDataset, kind: str, workers: int = 2) -> Iterator[Any]:
    """Give a loader of one of the two kinds."""
    if kind == "DataLoader":
        yield DataLoader(there, batch_size=None, num_workers=workers)
    else:
        with ShardLoader(there, num_workers=workers, threads=2) as loader:
            yield loader


each_kind = pytest.mark.parametrize("kind", ["DataLoader", "ShardLoader"])

# --- forks ----------------------------------------------------------------------------------------


class Forks:
    """Decodes, and starts a process now and then, as a transform of the user's may."""

    def __init__(self, child: str, url: str, gate: tuple[int, int]) -> None:
        self.child, self.url, self.gate = child, url, gate
        self.stay: list[int] = []  # processes, of this one

    def __call__(self, data: bytes) -> Any:
        number = number_of(data)
        if number % 80 == 3 and self.child == "program":
            subprocess.run(["true"], check=True)
        elif number % 80 == 3:
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    code = self.run(number)
                finally:
                    os._exit(code)
            if self.child == "stays":
                self.stay.append(pid)
            else:
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return np.array([number])

    def run(self, number: int) -> int:
        if self.child == "reads":
            there = shardio.open(self.url, decode=None, storage=Storage(timeout_s=20.0))
            right = there[number]["image"] == image(number)
            ranges.close()
            return 0 if right else 2
        if self.child == "stays":
            os.close(self.gate[1])
            os.read(self.gate[0], 1)
        return 0


# torch waits 5 s for the end of each worker of which a child lives on.
LONG = pytest.param("DataLoader", 2, "stays", marks=SLOW)
WAYS = [("DataLoader", 0), ("DataLoader", 2), ("ShardLoader", 2)]
CHILDREN = ["exits", "program", "reads", "stays"]
FORKS = [(*way, child) for way in WAYS for child in CHILDREN if (*way, child) != LONG.values]


@pytest.mark.parametrize(("kind", "workers", "child"), [*FORKS, LONG])
def test_a_transform_may_start_processes(
    proxy: FaultProxy, tmp_path: Path, kind: str, workers: int, child: str
) -> None:
    def train(forks: Forks) -> None:
        there = dataset(proxy, tmp_path / "cache", forks)
        with loading(there, kind, workers) as loader:
            for _ in range(2):  # the second time from the cache
                assert numbers(loader) == [*range(RECORDS)]

    with nothing_left():
        gate = os.pipe()
        forks = Forks(child, f"{proxy.url}/data", gate)
        train(forks)
        ranges.close()
        for end in gate:
            os.close(end)  # who stayed goes now
        for pid in forks.stay:
            os.waitpid(pid, 0)


# --- loader processes that are killed -------------------------------------------------------------


class Kill:
    """Kills the first loader process that calls a function for the n-th time."""

    def __init__(self, nth: int, *, after: bool) -> None:
        self.nth, self.after, self.trainer = nth, after, os.getpid()
        self.pid = memoryview(mmap.mmap(-1, 4)).cast("i")  # which it was; for all processes
        self.calls = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            if os.getpid() == self.trainer or self.pid[0]:
                return function(*args, **options)
            self.calls += 1
            if self.after:
                found = function(*args, **options)
            if self.calls >= self.nth:
                self.pid[0] = os.getpid()
                os.kill(os.getpid(), signal.SIGKILL)
            return found if self.after else function(*args, **options)

        return wrapped


CLIENT, CACHED = "shardio.storage.client.Client", "shardio.storage.cached_file.CachedFile"
STAGES = {
    "before the first request": (f"{CLIENT}.send", 1, False),
    "before a later request": (f"{CLIENT}.send", 4, False),
    "with an answer that nobody has seen": (f"{CLIENT}.send", 2, True),
    "with a claim": (f"{CACHED}.claim", 1, True),
    "while a file of the cache is begun": ("os.pwrite", 1, False),
    "after a file of the cache was begun": ("os.pwrite", 2, True),
    "before a range is written": (f"{CACHED}.store", 1, False),
    "while a range is written": ("os.pwrite", 6, True),
    "after a range was written": (f"{CACHED}.store", 1, True),
}
HANDING = {
    "DataLoader": ("multiprocessing.queues.Queue.put", 2, False),
    "ShardLoader": ("shardio.storage.descriptors.send", 1, False),
}
KILLS = [("DataLoader", stage) for stage in STAGES] + [
    *(("ShardLoader", stage) for stage in ("before the first request", "while a range is written")),
    *((kind, "while a batch is handed over") for kind in HANDING),
]


def death(train: Callable[[], None], kill: Kill) -> str:
    """Train until a loader process is killed, and return what was raised, in words.

    torch raises once more, wherever this process is when it learns of the death. Let that be here,
    while the error still keeps the loader: its end, cut off in the middle, would leave a thread.
    """
    told = ""  # not the error itself, which would keep the loader longer than that
    try:
        train()
    except worker_programs.DIED as error:
        told = repr(error)
        worker_programs.settle(kill.pid[0])
    return told


@of_killed_workers
@pytest.mark.parametrize(("kind", "stage"), KILLS)
def test_a_loader_process_that_is_killed_is_told_and_a_rerun_is_right(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, stage: str
) -> None:
    name, nth, after = STAGES.get(stage) or HANDING[kind]
    kill, cache = Kill(nth, after=after), tmp_path / "cache"

    def train() -> None:
        with loading(dataset(proxy, cache), kind) as loader:
            assert numbers(loader) == [*range(RECORDS)]

    with nothing_left():
        with monkeypatch.context() as patched:
            patched.setattr(name, kill.wrap(pkgutil.resolve_name(name)))
            # By which torch tries how many files it may open. The error about a killed worker, in
            # the middle of that, would leave one behind.
            patched.setattr("tempfile.NamedTemporaryFile", contextlib.nullcontext)
            told = death(train, kill)
        assert kill.pid[0]
        assert re.search(r"killed|SIGKILL|exited|^Connection\w+Error|^EOFError", told), told
        train()
        ranges.close()
    assert all(is_name(path.name) or path.name == "shardio-usage.cache" for path in cache.iterdir())


def test_a_second_interrupt_changes_nothing(proxy: FaultProxy) -> None:
    """The first one is followed by a second in which requests are waited for."""
    proxy.rules(Rule("timeout"))
    line = [sys.executable, "-m", "shardio", "info", f"{proxy.url}/data"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as command:
        assert command.stderr is not None
        proxy.wait(requests=1)
        command.send_signal(signal.SIGINT)
        assert command.stderr.readline() == "shardio: interrupted\n"
        command.send_signal(signal.SIGINT)
        assert command.stderr.read() == ""
    assert command.returncode == 130


# --- processes that are stopped for a while -------------------------------------------------------


@pytest.mark.parametrize(
    "who", ["holder", "helper", *(pytest.param(one, marks=SLOW) for one in ("owner", "both"))]
)
def test_a_process_that_was_stopped_for_longer_than_its_timeout_goes_on(
    proxy: FaultProxy, who: str
) -> None:
    """As a scheduler does that suspends a job: that time does not count."""
    timeout_s = 3.0
    with url_reader(holds_client=who == "holder") as reader:
        first = reader.read("records", f"{proxy.url}/data", [0], timeout_s=20.0)
        assert not first["error"]
        proxy.rules(Rule("timeout", path="shard", times=1))
        reader.tell("records", f"{proxy.url}/data", [3, 77], timeout_s=timeout_s)
        proxy.wait(faults=1)
        tasks = Path(f"/proc/{reader.pid}/task").glob("*/children")
        helper = [int(pid) for task in tasks for pid in task.read_text().split()]
        stopped = {"holder": [reader.pid], "owner": [reader.pid], "helper": helper}
        pids = stopped.get(who, [reader.pid, *helper])
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5 * timeout_s)  # what else should pass is nothing but time
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        done = reader.answer()
    assert not done["error"], done["text"]
    assert done["digests"] == [digest(image(3)), digest(image(77))]


def job(proxy: FaultProxy, cache: Path) -> "subprocess.Popen[str]":
    """Start a training that prints the id of its loader process, and at its end "right"."""
    program = """
        import os, sys, shardio
        from torch.utils.data import DataLoader
        url, cache = sys.argv[1:]
        there = shardio.ShardDataset(url, batch_size=8, decode=None, fields=("image",),
            storage=shardio.Storage(cache=cache, cache_bytes="1GiB", timeout_s=8.0))
        loader = DataLoader(there, batch_size=None, num_workers=1,
            worker_init_fn=lambda _: print(os.getpid(), flush=True))
        found = [int.from_bytes(bytes(image[3:7].tolist()), "big")
                 for images, in loader for image in images]
        assert sorted(found) == list(range(160))
        print("right")
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program), f"{proxy.url}/data"]
    return subprocess.Popen([*command, str(cache)], stdout=subprocess.PIPE, text=True)


def test_a_job_that_is_stopped_with_claims_holds_up_no_other(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    proxy.rules(Rule("timeout", path="shard", range="^bytes=0-"))  # the ranges that are claimed
    with job(proxy, cache) as first:
        assert first.stdout is not None
        pid = int(first.stdout.readline())
        proxy.wait(faults=2)
        os.kill(pid, signal.SIGSTOP)
        try:
            proxy.rules()
            there = dataset(proxy, cache, timeout_s=4.0)
            assert numbers(DataLoader(there, batch_size=None, num_workers=2)) == [*range(RECORDS)]
        finally:
            os.kill(pid, signal.SIGCONT)
        assert first.stdout.readline() == "right\n"
        assert first.wait() == 0


# --- helpers that are killed ----------------------------------------------------------------------


class KillHelper:
    """Kills this process's helper once, when a function is called for the n-th time."""

    def __init__(self, nth: int, *, after: bool) -> None:
        self.nth, self.after, self.done = nth, after, False

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            self.nth -= 1
            strikes = self.nth == 0
            if strikes and not self.after:
                self.kill()
            found = function(*args, **options)
            if strikes and self.after:
                self.kill(found)
            return found

        return wrapped

    def kill(self, found: Any = None) -> None:
        self.done = True
        pid = getattr(found, "pid", None) or ranges.helper_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


HELPER = "shardio.storage.helper.Helper"
OF_HELPERS = {
    "when it has just started": ("subprocess.Popen", 1, True),
    "before a request": (f"{HELPER}.submit", 5, False),
    "after a request": (f"{HELPER}.submit", 5, True),
    "before it hands over": ("shardio.storage.descriptors.receive_from", 2, False),
    "after it has handed over": ("shardio.storage.descriptors.receive_from", 2, True),
    "while the cache is written": (f"{CACHED}.store", 2, False),
}


@pytest.mark.parametrize("stage", OF_HELPERS)
def test_a_helper_that_is_killed_is_told_or_not_missed_and_a_rerun_is_right(
    proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    name, nth, after = OF_HELPERS[stage]
    kill = KillHelper(nth, after=after)

    def train() -> None:
        there = dataset(proxy, tmp_path / "cache")
        assert numbers(DataLoader(there, batch_size=None)) == [*range(RECORDS)]

    with nothing_left():
        with monkeypatch.context() as patched:
            patched.setattr(name, kill.wrap(pkgutil.resolve_name(name)))
            try:
                train()
            except StorageError as error:
                assert re.search(r"ended \(signal 9\)\. The next read starts another", str(error))
        assert kill.done
        train()
        ranges.close()


def kill_helpers(proxy: FaultProxy, times: int, seed: int) -> None:
    """Read records while the helper is killed at random moments."""
    draw, ended = random.Random(seed), threading.Event()
    told: list[str] = []
    there = shardio.open(f"{proxy.url}/data", decode=None, storage=Storage(timeout_s=20.0))

    def kill() -> None:
        for _ in range(times):
            ended.wait(draw.uniform(0.0, 0.5))
            while (pid := ranges.helper_pid()) is None and not ended.is_set():
                ended.wait(0.001)
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        ended.set()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        while not ended.is_set():
            number = draw.randrange(RECORDS)
            try:
                assert there[number]["image"] == image(number)
            except StorageError as error:
                told.append(str(error))
    finally:
        ended.set()
        thread.join()
    assert all("The next read starts another" in one for one in told), told
    with contextlib.suppress(StorageError):  # the last kill was perhaps just now
        there[5]
    assert there[5]["image"] == image(5)


def test_helpers_that_are_killed_at_random_are_replaced(proxy: FaultProxy) -> None:
    with nothing_left():
        kill_helpers(proxy, 6, seed=1)
        ranges.close()


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_helpers_that_are_killed_at_random_are_replaced(proxy: FaultProxy, seed: int) -> None:
    with nothing_left():
        kill_helpers(proxy, 100, seed)
        ranges.close()
