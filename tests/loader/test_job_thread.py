"""The thread that decodes: batches whose work a thread issues come as all others do.

No GPU is needed: the copies are plain ones, and the tests say when a job ends.
"""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from support import LIMIT_S

from shardio.dataset.protocol import BatchIterator
from shardio.loader.device import DeviceOptions, DevicePrefetcher, DeviceTarget
from shardio.loader.device_crops import Cropper
from shardio.loader.job_thread import JobThread, ThreadJob
from shardio.loader.transfer import DeviceBatch, LaterBatch, Transfer

PATIENCE_S = LIMIT_S  # until a test that waits for another thread fails


class Threaded(Transfer):
    """Plain copies, issued by a thread after `before(batch)`."""

    def __init__(self, target: DeviceTarget, before: Callable[[Any], object]) -> None:
        cpu = torch.device("cpu")
        super().__init__(
            cpu, target.images, Cropper(cpu, lambda device: None, target.decoded, target.images)
        )
        self.thread = JobThread("test-decode")
        self.before = before
        self.began: list[int] = []
        self.jobs: list[weakref.ref[ThreadJob[DeviceBatch]]] = []

    def send(self, batch: Any) -> DeviceBatch:
        job = self.thread.submit(self.issue, batch)
        self.jobs.append(weakref.ref(job))
        return LaterBatch(job)

    def over(self, number: int) -> bool:
        """Whether the job of a batch has ended, or was dropped."""
        job = self.jobs[number]()
        return job is None or job.done()

    def issue(self, batch: Any) -> DeviceBatch:
        self.began.append(int(batch[0]))
        self.before(batch)
        return super().send(batch)


class ThreadedTarget(DeviceTarget):
    """A target whose batches go through a thread."""

    def __init__(self, before: Callable[[Any], object], ahead: int) -> None:
        super().__init__(DeviceOptions("cpu", ahead=ahead))
        self.threaded = Threaded(self, before)

    def transfer(self) -> Transfer:
        return self.threaded


class Source(BatchIterator):
    """Batches 0, 1, ... that are all ready; it says which of them others keep."""

    batch_stats = None

    def __init__(self, count: int) -> None:
        self.count = count
        self.given: list[weakref.ref[torch.Tensor]] = []

    def __next__(self) -> Any:
        if len(self.given) == self.count:
            raise StopIteration
        batch = torch.tensor([len(self.given)])
        self.given.append(weakref.ref(batch))
        return batch

    def ready(self) -> bool:
        return True

    @property
    def kept(self) -> int:
        return sum(batch() is not None for batch in self.given)


def threaded(
    count: int, before: Callable[[Any], object] = lambda batch: None, ahead: int = 1
) -> tuple[Source, Threaded, DevicePrefetcher]:
    source, target = Source(count), ThreadedTarget(before, ahead)
    return source, target.threaded, DevicePrefetcher(source, target)


def until(true: Callable[[], bool]) -> None:
    """Wait for another thread."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        threading.Event().wait(0.001)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event that jobs wait for; it is set when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def pass_gate(gate: threading.Event, first: int) -> Callable[[Any], None]:
    """What jobs do from batch `first` on: wait until the gate opens."""

    def wait(batch: Any) -> None:
        if int(batch[0]) >= first:
            assert gate.wait(PATIENCE_S)

    return wait


def test_batches_come_in_order_and_all_on_one_thread() -> None:
    seen: set[str] = set()
    _, way, ahead = threaded(50, lambda batch: seen.add(threading.current_thread().name), ahead=3)
    assert [int(batch[0]) for batch in ahead] == list(range(50)) == way.began
    assert len(seen) == 1 and next(iter(seen)).startswith("test-decode")


def test_a_batch_that_is_not_due_is_not_waited_for(gate: threading.Event) -> None:
    _, way, ahead = threaded(9, pass_gate(gate, 1))
    assert int(next(ahead)[0]) == 0  # while batch 1 is with its decoder
    until(lambda: way.began == [0, 1])
    gate.set()
    assert [int(batch[0]) for batch in ahead] == list(range(1, 9))


def test_the_host_s_batch_is_kept_until_the_thread_has_read_it(gate: threading.Event) -> None:
    source, _, ahead = threaded(9, pass_gate(gate, 1))
    next(ahead)
    assert source.kept >= 1  # batch 1
    assert source.given[1]() is not None
    gate.set()
    next(ahead)
    until(lambda: source.kept <= 1)
    assert len(source.given) == 3


def test_an_error_of_the_thread_comes_in_its_place_and_ends_the_pass() -> None:
    def fail(batch: Any) -> None:
        if int(batch[0]) == 3:
            raise ValueError("batch 3")

    source, _, ahead = threaded(9, fail, ahead=4)
    assert [int(next(ahead)[0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="batch 3"):
        next(ahead)
    assert list(ahead) == [] and ahead.taken == 3
    until(lambda: source.kept == 0)


def test_closing_drops_what_has_not_begun_and_waits_for_what_has(gate: threading.Event) -> None:
    source, way, ahead = threaded(9, pass_gate(gate, 1), ahead=3)
    next(ahead)
    until(lambda: way.began == [0, 1])
    closing = threading.Thread(target=ahead.close)
    closing.start()
    until(lambda: way.over(2) and way.over(3))
    assert closing.is_alive()  # batch 1 is still read
    gate.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive() and way.began == [0, 1] and list(ahead) == []
    until(lambda: source.kept == 0)


def test_nothing_is_left_and_no_collector_is_needed() -> None:
    def fail(batch: Any) -> None:
        if int(batch[0]) == 2:
            raise ValueError

    gc.collect()
    gc.disable()
    try:
        for before, steps in ((lambda batch: None, 9), (lambda batch: None, 2), (fail, 9)):
            source, way, ahead = threaded(9, before)
            with suppress(ValueError, StopIteration):
                for _ in range(steps):
                    next(ahead)
            (thread,) = (t for t in threading.enumerate() if t.name.startswith("test-decode"))
            gone = weakref.ref(ahead), weakref.ref(way)
            del ahead, way
            until(lambda gone=gone: not any(one() for one in gone))
            thread.join(PATIENCE_S)
            assert not thread.is_alive() and source.kept == 0
    finally:
        gc.enable()


def test_an_interrupt_while_the_thread_decodes_loses_no_batch() -> None:
    begin, came = threading.Event(), threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def once(*_: object) -> None:
        if not came.is_set():
            came.set()
            raise KeyboardInterrupt

    def interrupt(batch: Any) -> None:
        if int(batch[0]) == 1:
            assert begin.wait(PATIENCE_S)
            # Again, since Python misses a signal that comes while it begins to wait for a lock.
            until(lambda: came.is_set() or signal.pthread_kill(main, signal.SIGINT))

    _, _, ahead = threaded(2, interrupt)
    assert int(next(ahead)[0]) == 0
    before = signal.signal(signal.SIGINT, once)
    try:
        with pytest.raises(KeyboardInterrupt):
            begin.set()
            next(ahead)
        assert [int(batch[0]) for batch in ahead] == [1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_collector_may_end_a_pass_on_the_thread_itself(gate: threading.Event) -> None:
    """It runs wherever objects are made. Who waited there for the thread would wait for ever."""
    passes: list[DevicePrefetcher] = []

    def close(batch: Any) -> None:
        if int(batch[0]) == 1:
            assert gate.wait(PATIENCE_S)
            passes[0].close()

    _, way, ahead = threaded(9, close)
    passes.append(ahead)
    next(ahead)
    gate.set()
    assert way.thread.submit(lambda: "after").result() == "after"
    assert list(ahead) == []


def test_a_job_that_is_over_says_what_it_returned() -> None:
    thread = JobThread("test-decode")
    job = thread.submit(lambda: 3)
    assert job.result() == 3 and job.done() and job.end() == 3
    assert thread.submit(lambda: 1 // 0).end() is None


def test_the_thread_can_be_waited_for_and_keeps_nothing(gate: threading.Event) -> None:
    thread = JobThread("test-decode")
    thread.wait()  # no job yet
    thread.submit(gate.wait, PATIENCE_S)
    made = thread.submit(lambda: torch.zeros(1))
    waiting = threading.Thread(target=thread.wait)
    waiting.start()
    assert not made.done() and waiting.is_alive()
    gate.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive() and made.done()
    gone = weakref.ref(made.result())
    del made
    until(lambda: gone() is None)
    thread.wait()


PROGRAM = """
import os, sys, threading
sys.path[:0] = {path!r}
import test_job_thread as t
gate = threading.Event()
source, way, ahead = t.threaded(9, t.pass_gate(gate, 1), ahead=3)
next(ahead)
t.until(lambda: way.began == [0, 1])
if not (child := os.fork()):
    ahead.close()  # the thread is not here, and its jobs never end
    del ahead
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
gate.set()
print("leaving")  # with batches under way, which nobody takes
"""


def test_a_forked_child_and_an_interpreter_that_ends_do_not_hang() -> None:
    program = PROGRAM.format(
        path=[entry for entry in sys.path if entry] + [__file__.rpartition("/")[0]]
    )
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "leaving\n", "")
