"""One repeat of a bench: what it counts, how it ends, and that nothing of it is left behind."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import LIMIT_S, small_datasets
from support.benches import request_for
from support.trees import command, environment

from shardio import machine
from shardio.errors import DecodeError
from shardio.tuning import bench_process
from shardio.tuning.bench_process import FailedError, Host

LINUX = sys.platform == "linux"


def test_a_cold_repeat_is_one_pass(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    touch = bench_process._touch
    monkeypatch.setattr(bench_process, "_touch", lambda batch: batches.append(1) or touch(batch))
    found = bench_process.measure(request_for(photos, cold=True, seconds=60.0))
    assert len(batches) == 12 and len(found["rates"]) == 1
    batches.clear()
    bench_process.measure(
        request_for(photos, cold=False, seconds=60.0, limit_s=0.0)
    )  # as after that long
    assert len(batches) == 1
    batches.clear()
    bench_process.measure(request_for(photos, seconds=0.5))
    assert len(batches) >= 3  # one to begin, and some that count


def test_a_repeat_does_what_its_row_says(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    touch = bench_process._touch
    monkeypatch.setattr(bench_process, "_touch", lambda batch: seen.append(batch) or touch(batch))
    bench_process.measure(request_for(photos, limit_s=0.0))
    assert seen[-1][0].shape == (8, 3, 16, 16)
    bench_process.measure(request_for(photos, limit_s=0.0, decodes=False))
    assert seen[-1][0].tolist()[0].startswith(b"\xff\xd8")


def test_parts_hold_equally_many_batches_of_every_worker() -> None:
    # Two workers, whose batches come in pairs: the second of each at once, the next after 1 s.
    times = [(float(k // 2), 10 * k) for k in range(13)]
    assert bench_process._rates(times, 2, 3) == [20.0] * 3
    assert bench_process._rates(times, 2, 1) == [20.0]
    assert bench_process._rates(times[:4], 2, 3) == [30.0]  # too few to be divided


def test_touching_counts_rows_of_any_batch() -> None:
    images = torch.zeros((5, 8, 8, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    assert bench_process._touch((images, torch.zeros(5))) == 5
    assert bench_process._touch({"x": torch.zeros((3, 2, 2)), "y": ["a", "b", "c"]}) == 3
    assert bench_process._touch(([b"a", b"b"], torch.zeros(2, dtype=torch.bool))) == 2
    assert bench_process._touch(torch.zeros(4)) == 4
    assert bench_process._touch([torch.zeros(0, 4), 1]) == 0


@pytest.fixture
def host() -> Iterator[Host]:
    with Host() as one:
        yield one


def gone(pids: list[int]) -> bool:
    """Whether these processes have ended; waits for who buries them."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        # A zombie whose parent was killed is the init process's to bury, which some containers lack
        states = [machine._stat(pid)[:1] for pid in pids]
        if all(state in ([], ["Z"]) for state in states):
            return True
    return False


@pytest.mark.skipif(not LINUX, reason="processes are watched by /proc")
def test_a_row_that_dies_or_hangs_ends_alone(
    photos: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = request_for(photos, workers=1, seconds=600.0, limit_s=600.0)
    seen: list[int] = []

    def kill() -> int:
        assert host._process is not None
        tree = machine.family(host._process.pid)
        seen[:] = tree
        if len(tree) > 1:
            os.kill(tree[1], signal.SIGKILL)
        return 1 << 30

    monkeypatch.setattr(bench_process, "memory_available", kill)
    with pytest.raises(FailedError, match=r"killed \(out of memory\?\)"):
        host.ask(long, LIMIT_S)
    monkeypatch.undo()
    serving = seen[0]
    assert host.ask(request_for(photos, seconds=0.01), LIMIT_S)["rates"]  # the next one is fine
    assert host._process is not None and host._process.pid == serving
    with pytest.raises(
        DecodeError, match=r"^record 7 of the dataset, "
    ):  # what is wrong with the data is no row's
        broken = small_datasets.make(photos.parent / "broken", [8], image=_broken)
        host.ask(request_for(broken, records=8, measured_records=8, workers=1), LIMIT_S)
    with pytest.raises(FailedError, match="not packed: there is no such directory"):
        host.ask(request_for(photos / "nothing"), LIMIT_S)

    def look() -> int:
        assert host._process is not None
        # First it is called before the row is asked for.
        seen[:] = running(host._process.pid, 2 if seen else 1)
        return 1 << 30

    seen.clear()
    monkeypatch.setattr(bench_process, "memory_available", look)
    with pytest.raises(FailedError, match="no answer within 1 s"):
        host.ask(long, 0.9)
    assert len(seen) >= 2 and gone(seen)


ORPHAN = """
import os, signal
from shardio.tuning import bench_process

def answer(request):
    if not os.fork():
        signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)

bench_process._answer = answer
print(bench_process._forked({}, "nowhere").decode(), flush=True)
"""


@pytest.mark.skipif(not LINUX, reason="processes are forked")
def test_an_orphan_that_holds_the_pipe_holds_up_nobody() -> None:
    """As a worker that is forked when its parent is killed: it takes another for its parent."""
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        start_new_session=True,
    ) as process:
        assert process.stdout
        came = select.select([process.stdout], [], [], LIMIT_S)[0]
        line = process.stdout.readline() if came else b""
        os.killpg(process.pid, signal.SIGKILL)
    assert json.loads(line or "{}") == {
        "error": "it was killed (out of memory?)",
        "kind": "StorageError",
    }


def _broken(number: int) -> bytes:
    return b"\xff\xd8\xff no image" if number == 7 else small_datasets.jpeg(number)


def running(pid: int, least: int) -> list[int]:
    """A process and its descendants, once there are so many."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        tree = machine.family(pid)
        if len(tree) >= least:
            return tree
    raise AssertionError("nothing was started")


@pytest.mark.skipif(not LINUX, reason="processes are watched by /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_or_killed_it_leaves_nothing_behind(
    photos: Path, tmp_path: Path, how: signal.Signals
) -> None:
    # With --size: else the first process of the host's would be a short one, which looks at images.
    arguments = ("--workers", "1", "--seconds", "600", "--loader", "dataloader", "--size", "16")
    with subprocess.Popen(
        command("bench", photos, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(TMPDIR=str(tmp_path)),
    ) as process:
        tree = running(process.pid, 2 if how == signal.SIGINT else 4)  # host, repeat, its worker
        until = time.monotonic() + LIMIT_S
        while how == signal.SIGKILL and not list(tmp_path.rglob("pymp-*")):
            assert time.monotonic() < until  # the worker's socket lies in a folder of its own
        assert list(tmp_path.iterdir())
        process.send_signal(how)
        out, said = process.communicate(timeout=LIMIT_S)
    assert (out, said) == (b"", b"shardio: interrupted\n" if how == signal.SIGINT else b"")
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    assert gone(tree[1:])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("thread", [False, True], ids=["main", "another thread"])
def test_ctrl_c_while_the_process_starts_leaves_it_known_and_ended(
    monkeypatch: pytest.MonkeyPatch, thread: bool
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(real(*args, **kwargs))
        if thread:  # the system gives the signal of a terminal to any thread that does not block it
            one = threading.Thread(target=signal.raise_signal, args=(signal.SIGINT,))
            one.start()
            one.join()
        else:
            signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    with Host() as host, pytest.raises(KeyboardInterrupt):
        host.ask({}, 60)
    assert len(started) == 1
    assert started[0].returncode == -signal.SIGKILL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(not LINUX, reason="there is no /proc")
def test_memory_that_a_repeat_writes_anew_counts_once() -> None:
    code = """
import os
from shardio.tuning import bench_process
data = bytearray(b"x" * (96 << 20))
(ours, theirs), (wait, go) = os.pipe(), os.pipe()
if not os.fork():
    os.read(wait, 1)
    data[::4096] = bytes(len(data) // 4096)
    os.write(theirs, b"1")
    os.read(wait, 1)
    os._exit(0)
shared = bench_process._pss(os.getpid())
os.write(go, b"1"), os.read(ours, 1)
copied = bench_process._pss(os.getpid())
os.write(go, b"1"), os.wait()
print(shared >> 20, copied >> 20, bench_process._pss(os.getpid()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    shared, copied, alone = map(int, done.stdout.split())
    # The host's own copies, which no repeat has, are not theirs: 96 MiB either way.
    assert 96 <= shared < 150 and abs(copied - shared) < 20
    assert alone == 0  # nothing runs
