"""Fixtures that several test modules share."""

import contextlib
import gc
import os
import signal
import sys
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from support import small_datasets, warm_python
from support.fault_proxy import FaultProxy
from support.ground import GRACE_S, Ground

settings.register_profile("tests", deadline=None)  # a busy machine is no failure
settings.load_profile("tests")

# A shell that starts the suite in the background makes it ignore Ctrl-C, and all that it starts,
# so that the tests which send one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "of the slow and stress tests run one tenth, of 0 to 9, by a hash of their names"
    parser.addoption("--tenth", type=int, choices=range(10), help=text)


LONGEST = Path(__file__).resolve().parent / "longest.txt"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow and stress tests of another tenth; of many processes, begin what takes long.

    They take a file each at a time. A long file that comes last keeps one of them, alone.
    """
    leave_out(config, items)
    if hasattr(config, "workerinput"):
        sort_by_length(items, LONGEST.read_text().split())


def sort_by_length(items: list[pytest.Item], longest: Sequence[str]) -> None:
    """Sort tests by files: first those that are known to take long, then those with many tests."""
    files = {item: item.nodeid.partition("::")[0] for item in items}
    counts, places = Counter(files.values()), {name: place for place, name in enumerate(longest)}
    items.sort(key=lambda one: (places.get(files[one], len(places)), -counts[files[one]]))


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow and stress tests that are of another tenth."""
    if (tenth := config.getoption("--tenth")) is None:
        return
    chosen, others = [], []
    for item in items:
        dear = item.get_closest_marker("slow") or item.get_closest_marker("stress")
        of_tenth = zlib.crc32(item.nodeid.encode()) % 10 == tenth
        (chosen if of_tenth or not dear else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


_GROUND = pytest.StashKey[Ground]()


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a home and a temporary directory of its own: once, also for the processes of -n.

    They inherit it, and so does all that they start.
    """
    if not hasattr(config, "workerinput"):
        config.option.loadscopereorder = False  # xdist's own order: pytest_collection_modifyitems
        config.stash[_GROUND] = Ground()
        config.stash[_GROUND].begin()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """Fail where the run has left something behind, when all processes of -n have ended."""
    yield
    ground = session.config.stash.get(_GROUND, None)
    if ground is None:
        return
    stopped = session.exitstatus == pytest.ExitCode.INTERRUPTED  # whoever pressed Ctrl-C is waiting
    grace_s = float(os.environ.get("SUITE_GRACE_S", GRACE_S))  # of a suite that tests this one
    faults = ground.end(0 if stopped else grace_s)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and faults:
        reporter.write_sep("=", "the suite did not clean up", red=True)
        for fault in faults:
            reporter.write_line(fault)
    if faults and not stopped:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


gc.disable()  # until all tests are found: none of it is garbage, and to look took 5 s of 14


def pytest_collection_finish() -> None:
    """Leave what is there for the whole run, torch and thousands of tests, out of the collector.

    Else each `gc.collect()` of a test walks through it, and each forked child copies its pages:
    of 51 CPU seconds of 63 tests that look for what is left behind 16 remained.
    """
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_modes_of_cuda() -> Iterator[None]:
    """Resets what a test may set for all of CUDA, so that no other test runs with it."""
    yield
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: the mode is a prototype
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def packed(tmp_path: Path) -> Callable[..., Path]:
    """Makes a dataset: `packed([10, 0, 7])` is the folder of one with shards of so many records."""

    def make(counts: list[int], name: str = "data", **options: Any) -> Path:
        return small_datasets.make(tmp_path / name, counts, **options)

    return make


@pytest.fixture(scope="module")
def warm_starts() -> Iterator[None]:
    """Forks what multiprocessing would start, helpers that read from URLs too, in a module's tests.

    For `pytestmark`, where tests start dozens of them and none is about how one starts or is held.
    """
    with warm_python.starts("shardio"):
        yield


@pytest.fixture
def warm_workers() -> Iterator[None]:
    """Forks what multiprocessing would start, from a process that has torch.

    For what spawned workers give; how they start: test_shard_dataset.py, test_worker_pool.py.
    """
    with warm_python.starts("torch"):
        yield


@pytest.fixture(scope="session")
def on_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Path]]:
    """Shows a folder below `tmp_path` by a network file system: `on_network(path)` is its path.

    A real one, sshfs to a server of our own on loopback, read-only. Skips where none can be made.
    """
    from benchmarks.harness import NotHere
    from benchmarks.network import mounted

    base = tmp_path_factory.getbasetemp()
    with contextlib.ExitStack() as stack:
        try:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardio-sshd-"))
            there = stack.enter_context(mounted(base, Path(scratch)))
        except NotHere as error:
            pytest.skip(f"NOT TESTED HERE: {error}")
        yield lambda path: there / path.relative_to(base)


@pytest.fixture
def proxy(proxy_of_all: FaultProxy) -> Iterator[FaultProxy]:
    """Gives the fault proxy of a module, `proxy_of_all`, as if no test had used it before."""
    from shardio.storage import ranges

    proxy_of_all.rules()
    proxy_of_all.limits()
    proxy_of_all.listen()
    proxy_of_all.reset()
    yield proxy_of_all
    proxy_of_all.rules()  # what the test has stalled, or slowed, ends with its helper
    proxy_of_all.limits()
    ranges.close()
