"""Buffers that a thread maps and locks before their batches come: where, when, and how it ends.

Pages are locked by the tests themselves, so that no GPU is needed; processes, sockets and the
thread are real.
"""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import LIMIT_S, programs, small_datasets
from support.leftovers import nothing_left

from shardio import ShardDataset, ShardLoader, WorkerError
from shardio.loader import device, pinned
from shardio.loader.buffer_pool import ALIGN, MappedBuffer
from shardio.loader.job_thread import JobThread
from shardio.storage import descriptors

BATCH, STEPS, SIDE = 4, 10, 64
THREAD = "shardio-buffers"


class Locks:
    """Lock memory for a loader: note each call with its thread, and what is locked now."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []  # what, and the name of the thread
        self.held: dict[int, int] = {}
        self.locked_bytes = 0  # of all calls
        self.before: Callable[[], object] = lambda: None

    def note(self, what: str) -> None:
        self.events.append((what, threading.current_thread().name))

    def lock(self, address: int, nbytes: int, device: Any = None) -> bool:
        self.note("lock")
        self.before()
        assert address not in self.held
        self.held[address] = nbytes
        self.locked_bytes += nbytes
        return True

    def unlock(self, address: int, device: Any = None) -> None:
        self.note("unlock")
        self.held.pop(address, None)

    def count(self, what: str) -> int:
        return sum(one == what for one, _ in self.events)

    def threads(self, *kinds: str) -> set[str]:
        return {thread.partition("_")[0] for what, thread in self.events if what in kinds}


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Locks]:
    """Let device="cpu" lock its buffers as "cuda" does."""
    found = Locks()
    map_memory = descriptors.map_memory

    def noted(fd: int, size: int, **options: bool) -> Any:
        found.note("map")
        return map_memory(fd, size, **options)

    monkeypatch.setattr(device.DeviceTarget, "locks_pages", True)
    monkeypatch.setattr(device, "page_lock", found.lock)
    monkeypatch.setattr(device, "page_unlock", found.unlock)
    monkeypatch.setattr(descriptors, "map_memory", noted)
    with nothing_left():
        yield found
    assert not found.held


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("buffers") / "out"
    return small_datasets.make(out, [25, 15], image=lambda i: b"%06d" % i)


def picture(data: bytes) -> Any:
    return np.full((SIDE, SIDE, 3), int(data), np.uint8)


def loader_of(folder: Path, decode: Any = picture, **options: Any) -> ShardLoader:
    train = ShardDataset(
        folder, batch_size=BATCH, fields=("image", "label"), decode=decode, shuffle=False
    )
    given: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"} | options
    return ShardLoader(train, device="cpu", **given)


def numbers(batches: Any) -> list[int]:
    return [int(row[0, 0, 0]) for images, _ in batches for row in images]


def no_thread_left() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith(THREAD):
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def test_a_thread_maps_and_locks_each_buffer_once(folder: Path, locks: Locks) -> None:
    with loader_of(folder) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            assert numbers(loader) == list(range(BATCH * STEPS))
        ring, every = loader.explain().ring, loader.explain().batch_bytes
    # Closing waits for the thread, which may be at a buffer that no batch came in yet.
    assert 0 < locks.count("lock") == locks.count("map") <= ring
    assert locks.locked_bytes >= every
    assert locks.threads("map", "lock") == {THREAD} and not locks.held
    assert locks.count("unlock") == locks.count("lock")
    no_thread_left()


def test_a_process_that_cannot_show_a_buffer_leaves(folder: Path) -> None:
    """The system takes no more descriptors that are under way: the trainer does not wait for it."""

    def refused(*_: Any) -> None:
        raise OSError(errno.ETOOMANYREFS, "Too many references")

    def breaks(data: bytes) -> Any:
        descriptors.send = refused  # in the forked process alone
        return picture(data)

    gone = pytest.raises(WorkerError, match="loader process 0")
    with loader_of(folder, breaks, num_workers=1) as loader, gone:
        next(iter(loader))
    assert descriptors.send is not refused


def test_memory_is_locked_for_the_device_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `torch.cuda.set_device`, which the thread that locks knows nothing of."""
    here, seen, unlocks = threading.local(), list[Any](), list[Any]()
    here.device = 3
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(here, "device", 0))
    monkeypatch.setattr(device, "page_lock", lambda address, nbytes, gpu: seen.append(gpu))
    monkeypatch.setattr(device, "page_unlock", lambda address, gpu: seen.append(gpu))
    target = device.DeviceTarget(device.DeviceOptions("cpu"))
    target.device = torch.device("cuda")
    lock = target.locker()
    for job in (lambda: unlocks.append(lock(4096, 10)), lambda: unlocks[0]()):
        thread = threading.Thread(target=job)
        thread.start()
        thread.join(LIMIT_S)
    assert seen == [torch.device("cuda", 3)] * 2


@pytest.mark.parametrize("workers", [1, 2])
def test_buffers_of_all_processes_are_locked_before_the_first_batch_is_made(
    folder: Path, locks: Locks, workers: int
) -> None:
    """No process goes on after its first row until every one's buffer is locked."""
    all_locked = multiprocessing.get_context("fork").Event()
    rows = []

    def waits(data: bytes) -> Any:
        rows.append(data)
        assert len(rows) < 2 or all_locked.wait(LIMIT_S)
        return picture(data)

    def lock() -> None:
        if locks.count("lock") == workers:
            all_locked.set()

    locks.before = lock
    with loader_of(folder, waits, num_workers=workers) as loader:
        assert numbers([next(iter(loader))]) == list(range(BATCH))


def test_a_loop_that_keeps_batches_maps_and_locks_nothing_either(
    folder: Path, locks: Locks
) -> None:
    with loader_of(folder) as loader:
        kept = list(loader)
        assert numbers(kept) == list(range(BATCH * STEPS))
        assert locks.count("lock") >= STEPS
    assert locks.threads("map", "lock") == {THREAD}


def test_an_error_of_the_thread_comes_in_next_and_ends_the_processes(
    folder: Path, locks: Locks
) -> None:
    def fail() -> None:
        if locks.count("lock") == 3:
            raise MemoryError("no room for a lock")

    locks.before = fail
    with loader_of(folder) as loader:
        with pytest.raises(MemoryError, match="no room for a lock"):
            numbers(loader)
        assert not locks.held and loader.explain().pids == []
        loader.set_epoch(1)
        assert numbers(loader) == list(range(BATCH * STEPS))
    no_thread_left()
    gc.collect()  # what was raised holds frames of the thread


def test_memory_that_cannot_be_locked_is_a_warning_and_batches_come(
    folder: Path, locks: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "warned", False)

    def refuse(address: int, nbytes: int, device: Any = None) -> bool:
        pinned.warn_of_locking(nbytes, "cudaHostRegister says 2")
        return False

    monkeypatch.setattr(device, "page_lock", refuse)
    with warnings.catch_warnings(record=True) as caught, loader_of(folder) as loader:
        warnings.simplefilter("always")
        assert numbers(loader) == list(range(BATCH * STEPS))
    assert [
        "cannot be page-locked (cudaHostRegister says 2)" in str(w.message) for w in caught
    ] == [True]


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_leaving_early_unlocks_all_and_ends_the_thread(
    folder: Path, locks: Locks, steps: int
) -> None:
    loader = loader_of(folder)
    batches = iter(loader)
    kept = [next(batches) for _ in range(steps)]
    del batches, loader
    gc.collect()
    assert not locks.held
    no_thread_left()
    assert numbers(kept) == list(range(steps * BATCH))  # views stay


def test_closing_waits_for_a_buffer_that_the_thread_is_at(folder: Path, locks: Locks) -> None:
    began, gate = threading.Event(), threading.Event()

    def block() -> None:
        began.set()
        assert gate.wait(LIMIT_S)

    locks.before = block
    loader = loader_of(folder)
    batches, raised = iter(loader), []

    def take() -> None:
        try:
            next(batches)
        except BaseException as error:
            raised.append(error)

    taking = threading.Thread(target=take)
    taking.start()
    assert began.wait(LIMIT_S)
    closing = threading.Thread(target=loader.close)
    closing.start()
    closing.join(0.01)
    assert closing.is_alive() and not locks.held  # not unlocked before it is locked
    gate.set()
    closing.join(LIMIT_S)
    taking.join(LIMIT_S)
    assert not closing.is_alive() and not taking.is_alive() and not locks.held
    assert not raised or isinstance(raised[0], WorkerError)
    raised.clear()


def test_a_child_that_is_forked_meanwhile_ends_and_leaves_the_locks_alone(
    folder: Path, locks: Locks
) -> None:
    began, gate = threading.Event(), threading.Event()

    def block() -> None:
        began.set()
        assert gate.wait(LIMIT_S)

    locks.before = block
    with loader_of(folder) as loader:
        batches = iter(loader)
        got: list[Any] = []
        taking = threading.Thread(target=lambda: got.append(next(batches)))
        taking.start()
        assert began.wait(LIMIT_S)
        child = os.fork()
        if not child:
            loader.close()
            os._exit(7 if not locks.count("unlock") else 8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        gate.set()
        taking.join(LIMIT_S)
        assert numbers(got) == list(range(BATCH))
        assert numbers(batches) == list(range(BATCH, BATCH * STEPS))


PROGRAM = """
import sys
sys.path[:0] = {path!r}
import test_buffers_ahead as t
from pathlib import Path
locks = t.Locks()
t.device.DeviceTarget.locks_pages = True
t.device.page_lock, t.device.page_unlock = locks.lock, locks.unlock
locks.before = lambda: t.threading.Event().wait(0.05)
loader = t.loader_of(Path(sys.argv[1]))
batches = iter(loader)
kept = [next(batches) for _ in range(2)]
print("and leaves", flush=True)
"""


def test_a_program_that_ends_while_buffers_are_locked_ends_silently(
    folder: Path, tmp_path: Path
) -> None:
    import sys

    path = [str(Path(__file__).parent), *[entry for entry in sys.path if entry]]
    (tmp_path / "program.py").write_text(PROGRAM.format(path=path))
    done = programs.run(tmp_path / "program.py", folder, limit_s=LIMIT_S)
    assert (done.code, done.output, done.left) == (0, "and leaves\n", []), done


# --- one buffer -----------------------------------------------------------------------------------


def test_a_buffer_that_grows_is_unlocked_before_it_is_mapped_anew(locks: Locks) -> None:
    thread = JobThread(THREAD)
    mapped = MappedBuffer(-1, ALIGN, _lock_by(locks), thread)
    mapped.map(3 * ALIGN)
    assert mapped.size == 3 * ALIGN and len(mapped.view(lambda _: None)) == 3 * ALIGN
    assert [what for what, _ in locks.events] == ["map", "lock", "unlock", "map", "lock"]
    assert locks.threads("map", "lock", "unlock") == {THREAD}
    assert list(locks.held.values()) == [3 * ALIGN]
    mapped.close()
    mapped.close()
    assert locks.count("unlock") == 2


def test_a_buffer_that_the_collector_closes_on_the_thread_itself_is_unlocked(locks: Locks) -> None:
    thread = JobThread(THREAD)
    made: list[MappedBuffer] = []
    go = threading.Event()

    def close() -> None:
        assert go.wait(LIMIT_S)
        made[0].close()

    locks.before = close
    made.append(MappedBuffer(-1, ALIGN, _lock_by(locks), thread))
    go.set()
    thread.wait()
    assert not locks.held and locks.count("unlock") == 1


def test_a_buffer_whose_turn_never_came_is_dropped(locks: Locks) -> None:
    thread, gate = JobThread(THREAD), threading.Event()
    thread.submit(gate.wait, LIMIT_S)
    mapped = MappedBuffer(-1, ALIGN, _lock_by(locks), thread)
    mapped.close()
    gate.set()
    thread.wait()
    assert locks.events == []


def _lock_by(locks: Locks) -> Callable[[int, int], Callable[[], object]]:
    def lock(address: int, nbytes: int) -> Callable[[], object]:
        locks.lock(address, nbytes)
        return lambda: locks.unlock(address)

    return lock


def test_tensors_of_a_batch_outlive_its_loader(folder: Path, locks: Locks) -> None:
    with loader_of(folder) as loader:
        kept = list(loader)
    total = torch.stack([images.long().sum() for images, _ in kept]).sum()
    assert int(total) == sum(range(BATCH * STEPS)) * SIDE * SIDE * 3
