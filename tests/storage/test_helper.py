"""The helper process, its owner, and the store: each may fail or stop at any moment."""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LIMIT_S, servers
from support.fault_proxy import FaultProxy, fault_proxy
from support.faults import Rule
from support.url_reader import url_reader
from torch.utils.data import DataLoader

import shardio
from shardio import ShardDataset, Storage
from shardio.errors import StorageError
from shardio.storage import ranges
from shardio.storage.client import Request, Store
from shardio.storage.location import locate

BYTES = 3 << 20


def content() -> bytes:
    return np.random.default_rng(0).bytes(BYTES)


@pytest.fixture(scope="module")
def proxy_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    folder = tmp_path_factory.mktemp("www")
    (folder / "file").write_bytes(content())
    fields = {"image": "image", "label": "int"}
    with shardio.Writer(folder / "data", fields=fields, shard_size=400_000) as writer:
        for number in range(120):
            data = b"\xff\xd8\xff" + np.random.default_rng(number).bytes(20_000)
            writer.write({"__key__": f"{number}.jpg", "image": data, "label": number})
    with servers.nginx(folder) as web, fault_proxy(web.port) as proxy:
        yield proxy


def opened(proxy: FaultProxy, timeout_s: float = 20.0) -> Any:
    return locate(proxy.url, Storage(timeout_s=timeout_s)).open("file")


def request(proxy: FaultProxy, start: int, length: int, timeout_s: float = 20.0) -> Request:
    return Request(Store(proxy.url, timeout_s=timeout_s), "file", start, length)


# --- the helper -----------------------------------------------------------------------------------


def test_nobody_minds_the_error_of_a_range_that_nobody_wants(proxy: FaultProxy) -> None:
    file = opened(proxy)
    first = ranges.helper_pid()
    proxy.limits(latency_s=0.2)
    proxy.rules(Rule("403", path="file", numbers=[0]))
    unwanted = ranges.ranges().announce(request(proxy, 0, 1000))
    ranges.ranges().hurry(unwanted)
    proxy.wait(faults=1)
    unwanted.release()
    assert file.read(5000, 100) == content()[5000:5100]
    assert ranges.helper_pid() == first is not None


def test_an_announced_range_that_failed_is_asked_for_anew(proxy: FaultProxy) -> None:
    file = opened(proxy, 2.0)
    proxy.rules(Rule("500", path="file"))
    file.will_need(0, 1000)
    with pytest.raises(StorageError, match=r"answered 500 .* \(\d+ attempts in"):
        file.read(0, 10)
    proxy.rules()
    assert file.read(0, 10) == content()[:10]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=str)
def test_a_helper_that_ends_or_stops_is_named_and_replaced(
    proxy: FaultProxy, how: signal.Signals
) -> None:
    file = opened(proxy, 20.0 if how == signal.SIGKILL else 4.0)
    proxy.rules(Rule("timeout", path="file"))
    file.will_need(0, 1000)
    file.will_need(1 << 20, 1000)
    proxy.wait(faults=1)
    first = ranges.helper_pid()
    assert first is not None
    os.kill(first, how)
    with pytest.raises(StorageError, match="The next read starts another"):
        file.read(0, 10)
    proxy.rules()
    for start in (0, 1 << 20, 2 << 20):
        again = opened(proxy)
        assert again.read(start, 10) == content()[start : start + 10]
    assert ranges.helper_pid() not in (None, first)
    assert not Path(f"/proc/{first}").exists()


def test_a_helper_stays_when_a_scheduler_warns_all_processes(proxy: FaultProxy) -> None:
    file = opened(proxy)
    helper = ranges.helper_pid()
    assert helper is not None
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        os.kill(helper, number)
    assert file.read(7, 10) == content()[7:17]
    assert ranges.helper_pid() == helper


def run(program: str, *arguments: str, **options: Any) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program), *arguments],
        **{"capture_output": True, "text": True, "timeout": LIMIT_S} | options,
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


OPEN = """
    import os, resource, signal, sys
    import shardio
    from shardio.errors import StorageError
    from shardio.storage import ranges
    from shardio.storage.location import locate
    file = locate(sys.argv[1], shardio.Storage(timeout_s=5.0)).open("file")
"""


def test_files_where_the_owner_was_started_are_not_imported(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong queue')")
    program = tmp_path / "bin" / "program.py"  # run as a file: its own folder is on the path
    program.parent.mkdir()
    program.write_text(textwrap.dedent(OPEN) + "print(len(file.read(0, 100_000)))")
    done = subprocess.run(
        [sys.executable, str(program), proxy.url],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(shardio.__file__))},
    )
    assert done.stdout.strip() == "100000", done.stderr


def test_an_owner_without_descriptors_is_told_and_goes_on(proxy: FaultProxy) -> None:
    program = (
        OPEN
        + """
    helper = ranges.helper_pid()
    file.read(0, 100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, hard))
    try:
        file.read(200_000, 100_000)
    except StorageError as error:
        print("no room" in str(error), "ulimit -n" in str(error))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(len(file.read(200_000, 100_000)), ranges.helper_pid() == helper)
    """
    )
    assert run(program, proxy.url).split() == ["True", "True", "100000", "True"]


def test_a_helper_that_dies_ends_no_owner_that_dies_of_broken_pipes(proxy: FaultProxy) -> None:
    program = (
        OPEN
        + """
    import time
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(ranges.helper_pid(), signal.SIGKILL)
    for _ in range(100):
        try:
            print(len(file.read(0, 1000)))
            break
        except StorageError:
            pass
    """
    )
    assert run(program, proxy.url).strip() == "1000"


def test_a_process_that_may_start_no_thread_is_told(proxy: FaultProxy) -> None:
    program = """
    import sys, threading
    import shardio
    from shardio.errors import StorageError
    from shardio.storage import ranges
    from shardio.storage.location import locate
    def refuse(self):
        raise RuntimeError("can't start new thread")
    threading.Thread.start, start = refuse, threading.Thread.start
    for own in (False, True):
        if own:
            ranges.close()
            ranges.hold_client()
        for _ in range(2):
            try:
                locate(sys.argv[1], shardio.Storage()).open("file")
            except StorageError as error:
                print("no thread can be started" in str(error))
    threading.Thread.start = start
    print(locate(sys.argv[1], shardio.Storage()).open("file").size)
    """
    assert run(program, proxy.url).split() == ["True"] * 4 + [str(BYTES)]


def test_ctrl_c_while_it_waits_leaves_a_process_that_reads(proxy: FaultProxy) -> None:
    file = opened(proxy)
    proxy.rules(Rule("timeout", path="file"))
    begun = proxy.figures().requests

    def interrupt() -> None:
        proxy.wait(requests=begun + 1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        file.read(0, 100)
    thread.join()
    proxy.rules()
    assert file.read(0, 100) == content()[:100]
    assert ranges.ranges().in_flight == 0


def test_a_fork_while_ranges_are_under_way_reads_by_itself(proxy: FaultProxy) -> None:
    file = opened(proxy)
    proxy.rules(Rule("timeout", path="file", numbers=[0]))
    location = locate(f"{proxy.url}/data", Storage(timeout_s=10.0))
    file.will_need(0, 100_000)
    proxy.wait(faults=1)
    child = os.fork()
    if not child:
        code = 1
        try:
            proxy_url = proxy.url
            again = locate(proxy_url, Storage(timeout_s=20.0)).open("file")
            code = int(file.read(0, 50) != content()[:50] or again.size != BYTES)
            ranges.close()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert location.exists("manifest.json")


# --- passes ---------------------------------------------------------------------------------------


def test_a_pass_that_is_left_early_leaves_nothing_in_flight(proxy: FaultProxy) -> None:
    for order in (None, shardio.Order(spans=1, unit=4)):
        there = ShardDataset(
            f"{proxy.url}/data",
            batch_size=4,
            decode=None,
            fields=("image",),
            shuffle_buffer=16,
            order=order,
        )
        loader = DataLoader(there, batch_size=None)
        batches = iter(loader)
        next(batches)
        assert ranges.ranges().in_flight > 0
        del batches
        there.set_epoch(1)
        assert ranges.ranges().in_flight == 0
        assert sum(len(batch) for (batch,) in loader) == 120


# --- stores that ask for fewer requests -----------------------------------------------------------


def figures() -> Any:
    found = ranges.figures()
    assert found is not None
    return found


def test_a_pause_ends_when_the_store_answers_again(proxy: FaultProxy) -> None:
    file = opened(proxy)
    proxy.reset()
    proxy.rules(Rule("503", path="file", numbers=[0]))
    assert file.read(0, 100) == content()[:100]
    assert [(one.range, one.status) for one in proxy.figures().log] == [
        ("bytes=0-99", 503),
        ("bytes=0-0", 206),
        ("bytes=0-99", 206),
    ]


def test_nothing_else_is_sent_while_a_store_wants_to_be_left_alone(proxy: FaultProxy) -> None:
    file = opened(proxy)
    proxy.reset()
    proxy.rules(Rule("429", path="file", numbers=[0, 1], retry_after=1))
    ranges.ranges().hurry(first := ranges.ranges().announce(request(proxy, 0, 10)))
    proxy.wait(faults=2)
    later = [ranges.ranges().announce(request(proxy, n * 1000, 1000)) for n in range(1, 9)]
    for one in (first, *later):
        one.wait()
    log = proxy.figures().log
    assert [one.status for one in log[:2]] == [429, 429]
    # A slow one may have a second request, and the one that is not needed ends without an answer.
    assert {one.status for one in log[2:]} <= {206, None}
    assert len({one.range for one in log[2:] if one.status == 206}) == 9
    assert figures().waited_s >= 1.0  # as the store said; by itself it would be at most 0.4
    assert figures().retries == {"throttled": 1}
    assert file.size == BYTES


def test_a_store_that_throttles_holds_up_no_other(proxy: FaultProxy, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content())
    throttled = opened(proxy)
    proxy.rules(Rule("429", path="file", retry_after=600))
    waiting = ranges.ranges().announce(request(proxy, 0, 10, 8.0))
    future = ranges.ranges().hurry(waiting)
    assert future is not None
    proxy.wait(faults=2)
    with servers.nginx(tmp_path) as web:
        other = locate(web.url, Storage(timeout_s=20.0)).open("file")
        assert other.sha256() == hashlib.sha256(content()).digest()
    assert not future.done()
    with pytest.raises(StorageError, match="answered 429"):  # after its own time, not the store's
        waiting.wait()
    assert throttled.size == BYTES


@pytest.mark.slow
def test_a_store_that_throttles_the_first_request_is_waited_for(proxy: FaultProxy) -> None:
    proxy.rules(Rule("429"))
    threading.Timer(12.0, proxy.rules).start()  # longer than for an address that may be wrong
    assert opened(proxy, 60.0).size == BYTES


def test_six_processes_that_start_at_once_all_finish(proxy: FaultProxy) -> None:
    proxy.limits(latency_s=0.02, concurrency=4, busy_status=429)
    with contextlib.ExitStack() as stack:
        readers = [
            stack.enter_context(url_reader(holds_client=n % 2 == 0, threads=8)) for n in range(6)
        ]
        start = time.monotonic()
        for reader in readers:
            reader.tell("records", f"{proxy.url}/data", range(0, 120, 2), timeout_s=60.0)
        done = [reader.answer() for reader in readers]
    assert [one["text"] for one in done] == [""] * 6
    assert all(one["digests"] == done[0]["digests"] for one in done)
    statuses = [one.status for one in proxy.figures().log]
    useful = 6 * (60 + 1 + 6)
    wasted = statuses.count(429)
    print(f"{len(statuses)} requests, {wasted} of them 429, {time.monotonic() - start:.1f} s")
    assert wasted < useful
