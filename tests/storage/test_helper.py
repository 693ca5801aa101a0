"""The helper process, its owner, and the store: each may fail or stop at any moment."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from pathlib import Path

import pytest
from support import LIMIT_S, servers
from support.fault_proxy import FaultProxy
from support.faults import Rule
from support.url_datasets import FILE_BYTES, content, opened, request, run, start

import shardio
from shardio import Storage
from shardio.errors import StorageError
from shardio.storage import ranges
from shardio.storage.client import Store
from shardio.storage.location import locate


def test_nobody_minds_the_error_of_a_range_that_nobody_wants(proxy: FaultProxy) -> None:
    file = opened(proxy)
    first = ranges.helper_pid()
    proxy.limits(latency_s=0.2)
    proxy.rules(Rule("403", path="file", numbers=[0]))
    unwanted = ranges.ranges().announce(request(proxy, 0, 1000))
    ranges.ranges().send_now(unwanted)
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


@pytest.mark.parametrize(
    ("how", "what"),
    [
        (signal.SIGKILL, r"process that reads from URLs .* ended \(signal 9\)"),
        (signal.SIGSTOP, r"no answer within \d+ s from the process that reads from URLs"),
    ],
    ids=str,
)
def test_a_helper_that_ends_or_stops_is_named_and_replaced(
    proxy: FaultProxy, how: signal.Signals, what: str
) -> None:
    file = opened(proxy)
    file.store = Store(proxy.url, timeout_s=2.0 if how == signal.SIGSTOP else LIMIT_S)
    proxy.rules(Rule("timeout", path="file"))
    file.will_need(0, 1000)
    file.will_need(1 << 20, 1000)
    proxy.wait(faults=1)
    first = ranges.helper_pid()
    assert first is not None
    os.kill(first, how)
    with pytest.raises(StorageError, match=what + ".* The next read starts another"):
        file.read(0, 10)
    proxy.rules()
    for begin in (0, 1 << 20, 2 << 20):
        again = opened(proxy)
        assert again.read(begin, 10) == content()[begin : begin + 10]
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


WARN = ("-W", "error")
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
    assert run(program, proxy.url, flags=WARN).stdout.split() == ["True", "True", "100000", "True"]


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
    assert run(program, proxy.url, flags=WARN).stdout.strip() == "1000"


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
    assert run(program, proxy.url, flags=WARN).stdout.split() == ["True"] * 4 + [str(FILE_BYTES)]


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
            again = locate(proxy.url, Storage(timeout_s=20.0)).open("file")
            code = int(file.read(0, 50) != content()[:50] or again.size != FILE_BYTES)
            ranges.close()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert location.exists("manifest.json")


def ended(pid: int, limit_s: float = LIMIT_S) -> bool:
    """Wait for a process that is not this one's child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None], ids=str)
def test_the_helper_ends_with_its_owner(web: servers.Web, how: signal.Signals | None) -> None:
    program = """
        import sys, shardio
        from shardio.storage import ranges
        shardio.open(sys.argv[1], decode=None)[0]
        print(ranges.helper_pid(), flush=True)
        sys.stdin.readline()
    """
    with start(program, f"{web.url}/data") as owner:
        assert owner.stdout is not None and owner.stdin is not None
        helper = int(owner.stdout.readline())
        if how is None:
            owner.stdin.write("\n")
            owner.stdin.flush()
        else:
            owner.send_signal(how)
        assert ended(helper)
        owner.wait(LIMIT_S)


def test_a_helper_is_not_reached_by_ctrl_c_of_the_terminal(web: servers.Web) -> None:
    shardio.open(f"{web.url}/data", decode=None)[0]
    helper = ranges.helper_pid()
    assert helper is not None
    assert os.getsid(helper) == helper != os.getsid(0)


def test_no_secret_is_in_the_command_line_of_the_helper(web: servers.Web) -> None:
    shardio.open(f"{web.url}/data?sig=SECRET", decode=None)[0]
    command = Path(f"/proc/{ranges.helper_pid()}/cmdline").read_bytes()
    assert b"SECRET" not in command and b"http" not in command
