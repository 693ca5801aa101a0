"""The trainer's end of a process: what was sent in vain, and whom it waits for, and how long."""

import multiprocessing
import os
import pickle
import re
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S
from support.leftovers import children, nothing_left
from support.loading import Hangs, Workers, labels, loader_of, picture, pictures, pool_of

from shardio import ShardDataset, ShardLoader, WorkerError
from shardio.dataset.ranks import consumers
from shardio.dataset.whereabouts import BatchTimeout, Whereabouts
from shardio.loader.base import Pass, PoolOptions
from shardio.loader.buffer_pool import MappedBuffer
from shardio.loader.in_process import InProcessWorkers
from shardio.loader.worker_connection import LOOK, WorkerConnection
from shardio.loader.worker_pool import WorkerProcesses
from shardio.loader.worker_process import Sent


@pytest.fixture
def process() -> Iterator[tuple[WorkerConnection, Any]]:
    """The trainer's end of a loader process that has buffers 0 to 2, and the other end."""
    ours, there = multiprocessing.Pipe()
    shows, shown = multiprocessing.Pipe()
    late = BatchTimeout(Whereabouts(1, 1), 0, 60)
    one = WorkerConnection(0, None, ours, shows, 4, None, late)
    one.mapped = {buffer: MappedBuffer(-1, 4096) for buffer in range(3)}
    one.start_pass(0, Pass({}, 0, 0, 0, 1, None), 2)  # type: ignore[arg-type]
    there.recv_bytes()
    with ours, there, shows, shown:
        yield one, there
        one.leave()


def test_what_was_sent_of_a_pass_that_was_left_frees_its_buffers(process: Any) -> None:
    one, there = process
    one.discard()  # nothing
    for sent in Sent(0, 2, 4096), Sent(0, error=b""), Sent(0, 1, 4096):
        there.send_bytes(pickle.dumps(sent))
    one.discard()
    assert list(one.freed) == [2, 1]


def test_a_buffer_that_is_never_wanted_is_given_back(process: Any) -> None:
    one, there = process
    for spare, least in ((1, 0), (2, 1), (2, 2)):
        for _ in range(LOOK - 1):
            one.note(spare)
        one.freed.append(0)
        one.more()
        assert pickle.loads(there.recv_bytes())[-2:] == ([0], [])  # not yet
        one.note(least)
        one.freed.extend([0, 1])
        one.more()
        *_, free, gone = pickle.loads(there.recv_bytes())
        assert (free, gone) == (([0, 1], []) if not least else ([1], [0]))
        one.mapped[0] = MappedBuffer(-1, 4096)


def passing(dataset: ShardDataset, workers: Workers, patience_s: float) -> Any:
    """A pool that has begun epoch 0, and loses patience sooner than a loader's."""
    options = PoolOptions(
        *workers, prefetch=2, context=multiprocessing.get_context("fork"), patience_s=patience_s
    )
    pool: Any = (WorkerProcesses if workers[0] else InProcessWorkers)(dataset, options)
    share = dataset.share_of(0)
    seen = consumers(1, max(1, workers[0]))
    pool.begin(Pass(dataset.options, 0, 0, 0, 1, seen), share.steps)
    return pool


@pytest.mark.parametrize(
    "workers", [(0, 1), (0, 2), (2, 1), (2, 2)], ids=lambda c: f"{c[0]}x{c[1]}"
)
def test_a_transform_that_hangs_is_told_once_by_its_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch, workers: Workers
) -> None:
    order = labels(pictures(folder))
    step = 1
    with closing(Hangs(order[step][-1])) as hangs:  # the last: other threads have little to do
        pool = passing(pictures(folder, decode=hangs), workers, 0.02)
        hangs.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on a busy machine this one is late, too
            got = labels([pool.take()[0] for _ in range(step)])
        told: list[Any] = []

        def show(message: Any, category: Any, filename: str, *_: Any) -> None:
            told.append((str(message), filename))
            hangs.let_go()

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            monkeypatch.setattr(warnings, "showwarning", show)
            got += labels([pool.take()[0]])
        where = "a thread of this process"
        if workers[0]:
            where = f"loader process {step} (pid {pool.figures.pids[step]})"
        pool.close()
    assert got == order[: step + 1]
    ((text, filename),) = told
    assert filename == __file__
    record = f"record {order[step][-1]} of the dataset, k/{order[step][-1]:06}.jpg"
    place = re.escape(record) + r", for \d+ s"
    # On a busy machine another thread is at something, too.
    said = re.escape(f"{where} is ") + rf"(at .+; )?at {place}(; at .+)?\. ShardLoader\(timeout="
    assert re.match(r"ShardLoader: no batch for [\d.]+ s: " + said, text)


@pytest.mark.parametrize("workers", [(0, 1), (2, 1)], ids=["0x1", "2x1"])
def test_a_timeout_ends_the_pass_and_its_processes(folder: Path, workers: Workers) -> None:
    order = labels(pictures(folder))

    def iterate() -> None:
        with closing(Hangs(order[0][3])) as hangs:
            dataset = pictures(folder, decode=hangs)
            loader = loader_of(dataset, workers, timeout=0.05)
            iterator = iter(loader)
            threads = [one for one in threading.enumerate() if one.name == "shardio-0"]
            pids = loader.explain().pids
            hangs.wait()
            with pytest.raises(WorkerError) as caught:
                next(iterator)
            text = str(caught.value)
            assert re.match(r"timeout=0\.05: no batch for [\d.]+ s: ", text)
            assert f"record {order[0][3]} of the dataset, k/{order[0][3]:06}.jpg" in text
            assert not children() & set(pids) and (not pids or f"(pid {pids[0]})" in text)
            with pytest.raises(WorkerError):
                next(iterator)
            hangs.let_go()  # a thread cannot be ended
            for thread in threads:
                thread.join(LIMIT_S)
                assert not thread.is_alive()
            loader.close()

    with nothing_left():
        iterate()


def test_a_stopped_process_is_told_and_ended(folder: Path) -> None:

    def stop() -> None:
        with ShardLoader(pictures(folder), num_workers=1, timeout=0.05) as loader:
            iterator = iter(loader)
            (pid,) = loader.explain().pids
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
            said = rf"timeout=0.05.*pid {pid}\) is .*stopped by a signal.*SIGCONT"
            with pytest.raises(WorkerError, match=said):
                list(iterator)
            assert not children() & {pid}

    with nothing_left():
        stop()


class Patient:
    """Who is waited for, and never comes."""

    number, name, ended = 0, "somebody", 0

    def is_stopped(self) -> bool:
        return False

    def end(self) -> None:
        self.ended += 1


def test_seconds_in_which_the_trainer_was_stopped_do_not_count() -> None:
    now = [1000.0]
    late, who = BatchTimeout(Whereabouts(1, 1), 5.0, 3.0, lambda: now[0]), Patient()

    def wait(sleeps_s: float = 0.0) -> None:
        now[0] += late.pause_s(1000.0) + sleeps_s
        late.look(1000.0, who)

    wait()
    with pytest.warns(UserWarning, match=r"no batch for 3 s: somebody is not at its first"):
        wait(600.0)  # Ctrl-Z, and fg; one second beyond the pause may be a busy machine's
    assert now[0] == 1602.0
    wait()
    assert not who.ended
    with pytest.raises(WorkerError, match=r"timeout=5: no batch for 5 s"):
        wait()
    assert who.ended == 1


def test_programs_that_the_trainer_starts_do_not_get_its_buffers(folder: Path) -> None:
    with ShardLoader(pictures(folder), num_workers=1) as loader:
        next(iter(loader))
        mapped = [mapped for one in pool_of(loader)._all for mapped in one.mapped.values()]
        assert mapped and not any(os.get_inheritable(one._fd) for one in mapped)


@pytest.mark.parametrize("workers", [(0, 1), (2, 1)], ids=["0x1", "2x1"])
def test_closing_wakes_who_waits_for_a_batch(folder: Path, workers: Workers) -> None:
    hanging, never = os.pipe(), threading.Event()

    def hangs(data: bytes) -> Any:
        os.write(hanging[1], b".")
        never.wait(LIMIT_S)
        return picture(data)

    caught: list[BaseException] = []
    loader = loader_of(pictures(folder, decode=hangs), workers)
    iterator = iter(loader)

    def take() -> None:
        try:
            next(iterator)
        except BaseException as error:
            caught.append(error)
            never.set()  # the transform goes on only when the loop has heard

    processes = [one.process for one in getattr(pool_of(loader), "_all", ())]
    waiting = threading.Thread(target=take)
    waiting.start()
    assert os.read(hanging[0], 1)
    loader.close()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive() and type(caught[0]) is WorkerError
    assert "its loader closed" in str(caught[0])
    assert [process.exitcode for process in processes] == [0] * workers[0]  # none had to be killed
    for end in hanging:
        os.close(end)
