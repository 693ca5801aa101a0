"""The processes of a ShardLoader: how they start, what becomes of them, and what they leave."""

import gc
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, loader_programs, programs, warm_python
from support.leftovers import children, descriptors, nothing_left
from support.loading import (
    BATCH,
    COUNTS,
    POOLS,
    STEPS,
    Counts,
    N,
    Packed,
    Workers,
    assert_same,
    ended,
    expected_of,
    in_child,
    labels,
    loader_of,
    number,
    odd,
    picture,
    pictures,
    pool_of,
)
from support.programs import Program
from support.trees import environment
from torch.utils.data import DataLoader

from shardio import EpochError, OptionError, ShardLoader, WorkerError
from shardio.dataset.ranks import consumers
from shardio.loader.base import Pass, PoolOptions
from shardio.loader.worker_connection import WorkerConnection
from shardio.loader.worker_pool import WorkerProcesses

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_ways_to_start_processes(folder: Path, method: str) -> None:
    expected = []
    for epoch in (0, 1):
        dataset = pictures(folder, collate_fn=odd)
        dataset.set_epoch(epoch)
        expected.append(list(dataset))

    def two_epochs() -> None:
        loader = ShardLoader(
            pictures(folder, collate_fn=odd), num_workers=1, multiprocessing_context=method
        )
        with loader:
            assert_same(loader, expected[0])
            loader.set_epoch(1)
            assert_same(loader, expected[1])

    if method == "forkserver":
        multiprocessing.forkserver.ensure_running()  # it stays: for the whole suite
    with nothing_left():
        two_epochs()


UNGUARDED = """
import sys
from shardio import ShardDataset, ShardLoader

data = ShardDataset(sys.argv[1], batch_size=4, fields=("label",))
for batch in ShardLoader(data, num_workers=1, multiprocessing_context=sys.argv[2]):
    pass
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_that_has_to_be_guarded_is_told(folder: Path, tmp_path: Path, method: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNGUARDED)
    words = warm_python.command(script, folder, method)
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("shardio.errors.WorkerError: "), done.stderr
    assert 'A script needs `if __name__ == "__main__":`' in last and done.returncode == 1


def test_what_cannot_be_sent_to_a_spawned_process_is_told(folder: Path) -> None:
    dataset = pictures(folder, decode=lambda data: picture(data))

    def iterate() -> None:
        with pytest.raises(OptionError, match=r"'spawn'.*cannot be pickled.*lambda.*no lambda"):
            iter(ShardLoader(dataset, num_workers=2, multiprocessing_context="spawn"))

    with nothing_left():
        iterate()


def test_descriptors_are_sent_whatever_sockets_do_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction, "ACKNOWLEDGE", True)  # as on macOS
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(LIMIT_S)  # which makes each new socket non-blocking
    try:
        with ShardLoader(pictures(folder), num_workers=2) as loader:
            assert_same(loader, list(pictures(folder)))
    finally:
        socket.setdefaulttimeout(before)


def test_a_daemon_is_told_to_do_without_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    monkeypatch.setitem(config, "daemon", True)
    with pytest.raises(OptionError, match=r"daemon of multiprocessing.*num_workers=0"):
        iter(ShardLoader(pictures(folder), num_workers=2))
    with ShardLoader(pictures(folder), num_workers=0) as loader:
        assert labels(loader) == labels(pictures(folder))


def test_the_next_epoch_is_begun_before_it_is_asked_for(packed: Packed) -> None:
    folder, prefetch = packed(COUNTS), 2
    with closing(Counts()) as counts:
        dataset = pictures(folder, decode=counts)
        with ShardLoader(dataset, num_workers=2, prefetch_factor=prefetch) as loader:
            assert len(list(loader)) == STEPS
            counts.wait(N)
            counts.wait(2 * prefetch * BATCH)  # nobody has called iter() yet
            for epoch in 1, 2:
                loader.set_epoch(epoch)
                expected = pictures(folder)
                expected.set_epoch(epoch)
                assert labels(loader) == labels(expected)
            # What was begun early was used: no row of an epoch was made twice.
            counts.wait(2 * N)
        counts.assert_no_more()


def test_an_evaluation_that_reads_one_epoch_again(folder: Path) -> None:
    with closing(Counts()) as counts:
        dataset = pictures(folder, decode=counts, shuffle=False)
        with ShardLoader(dataset, num_workers=2) as loader:
            expected = labels(pictures(folder, shuffle=False))
            for _ in range(4):
                assert labels(loader) == expected
            counts.wait(4 * N + 2 * 2 * BATCH)  # the same epoch was begun early, each time
        counts.assert_no_more()


class Dies:
    """Its process ends at one record; once the gate is there it does no more."""

    def __init__(self, target: int, how: Callable[[], None], gate: Path) -> None:
        self.target, self.how, self.gate = target, how, gate

    def __call__(self, data: bytes) -> Any:
        if number(data) == self.target and not self.gate.exists():
            self.gate.touch()
            self.how()
        return picture(data)


WAYS: dict[str, tuple[Callable[[], None], str]] = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), "was killed by SIGTERM"),
    "SIGUSR1": (lambda: os.kill(os.getpid(), signal.SIGUSR1), "was killed by SIGUSR1"),
    "exit 3": (lambda: os._exit(3), "left with exit code 3"),
    "exit 0": (lambda: os._exit(0), "left with exit code 0"),
}


@pytest.mark.parametrize(
    ("how", "said", "step"),
    [(*way, step) for step, way in zip((0, 5, 0, 5, 0), WAYS.values(), strict=True)],
    ids=WAYS.keys(),
)
def test_a_process_that_dies_is_an_error_and_leaves_nothing(
    folder: Path, tmp_path: Path, how: Callable[[], None], said: str, step: int
) -> None:
    order = labels(pictures(folder))

    def die() -> None:
        dataset = pictures(folder, decode=Dies(order[step][4], how, tmp_path / "gate"))
        with ShardLoader(dataset, num_workers=2, prefetch_factor=1) as loader:
            iterator, got = iter(loader), []
            pids = loader.explain().pids
            with pytest.raises(WorkerError, match=said) as caught:
                while True:
                    got += labels([next(iterator)])
            assert got == order[:step]
            assert f"(pid {pids[step % 2]})" in str(caught.value)
            at = (
                f"while it was at record {order[step][4]} of the dataset, k/{order[step][4]:06}.jpg"
            )
            assert at in str(caught.value)
            assert not children() & set(pids)  # no zombie either
            with pytest.raises(WorkerError):
                next(iterator)
            loader.set_epoch(0)
            assert labels(loader) == order
            assert set(pids).isdisjoint(loader.explain().pids)

    with nothing_left():
        die()


@pytest.mark.parametrize("when", ["between epochs", "in mid-epoch"])
def test_a_process_that_is_killed_while_it_waits(folder: Path, when: str) -> None:

    def kill() -> None:
        with ShardLoader(pictures(folder), num_workers=2, prefetch_factor=1) as loader:
            iterator, epoch = iter(loader), 0
            got = labels([next(iterator) for _ in range(STEPS if when == "between epochs" else 3)])
            pid = loader.explain().pids[1]
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            if when == "between epochs":
                loader.set_epoch(epoch := 1)
                iterator, got = iter(loader), []
            with pytest.raises(WorkerError, match=rf"pid {pid}\) was killed by SIGKILL"):
                while True:
                    got += labels([next(iterator)])
            assert got == expected_of(folder, epoch)[: len(got)]
            loader.set_epoch(2)
            assert labels(loader) == expected_of(folder, 2)

    with nothing_left():
        kill()


def test_processes_leave_by_themselves_whoever_else_was_forked(folder: Path) -> None:
    """With a copy of a socket elsewhere a process would have to be killed."""
    loaders = [ShardLoader(pictures(folder), num_workers=2) for _ in range(2)]
    iterators: list[Any] = [iter(loader) for loader in loaders]
    torchs = DataLoader(pictures(folder), batch_size=None, num_workers=1)
    iterators.append(iter(torchs))
    for iterator in iterators:
        next(iterator)
    for loader in loaders:
        processes = [one.process for one in pool_of(loader)._all]
        loader.close()
        assert [process.exitcode for process in processes] == [0, 0]
    del iterators, iterator
    gc.collect()


@pytest.mark.parametrize("copy", [False, True])
def test_pages_are_locked_once_each_and_none_stays_so(folder: Path, copy: bool) -> None:
    locked: list[int] = []

    def lock(address: int, nbytes: int) -> Callable[[], object]:
        locked.append(address)
        return lambda: locked.remove(address)

    dataset = pictures(folder)
    fork = multiprocessing.get_context("fork")
    pool = WorkerProcesses(dataset, PoolOptions(1, 1, 2, copy=copy, lock=lock, context=fork))
    share = dataset.share_of(0)
    what = Pass(dataset.options, 0, 0, 0, 1, consumers(1, 1))
    kept = []
    for _ in range(3):
        pool.begin(what, share.steps)
        kept = [pool.take()[0] for _ in range(share.steps)]
    # Of views those of all that is kept; copies are not locked, and the buffers are used again.
    assert len(locked) == len(set(locked)) and (
        0 < len(locked) < STEPS if copy else len(locked) >= STEPS
    )
    pool.close()
    assert not locked and labels(kept) == labels(pictures(folder))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_killed_trainer_takes_its_processes_along(folder: Path, method: str) -> None:
    """Also one that is in a transform for ever, and with others around."""
    program = Program(*(loader_programs.__file__, "train", folder, method, "hang"), limit_s=LIMIT_S)
    assert program.read_until("hanging.")
    program.kill()
    done = program.finish()
    assert done.code == -signal.SIGKILL and not done.left and not done.timed_out, str(done)
    assert "Traceback" not in done.output, str(done)


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.stress)])
def test_a_notebook_that_is_interrupted_iterates_again(
    folder: Path, tmp_path: Path, method: str
) -> None:
    """And at the second Ctrl-C, which it does not catch, the trainer alone shows a traceback."""
    program = Program(
        *(loader_programs.__file__, "notebook", folder, method, tmp_path / "gate"), limit_s=LIMIT_S
    )
    assert program.read_until("hanging.")
    program.interrupt()
    assert program.read_until("caught.") and program.read_until("right.")
    assert program.read_until("hanging.")
    program.interrupt()
    done = program.finish()
    assert done.code == -signal.SIGINT and not done.left and not done.timed_out, str(done)
    assert "EpochError: this pass was ended by KeyboardInterrupt" in done.output
    before, _, after = done.output.partition("right.")
    ended = [line for line in after.splitlines() if line.startswith("KeyboardInterrupt")]
    assert "Traceback" not in before and len(ended) == 1, str(done)
    assert "shardio-loader" not in done.output, str(done)


def test_an_interrupt_in_the_loop_makes_no_gap(folder: Path) -> None:
    """KeyboardInterrupt wherever the trainer is within next()."""
    order = labels(pictures(folder))
    for place in ("start_pass", "more", "receive"):
        with ShardLoader(pictures(folder), num_workers=2) as loader:
            iterator = iter(loader)
            got = labels([next(iterator)])

            def interrupted(*_: Any, **__: Any) -> Any:
                raise KeyboardInterrupt

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(WorkerConnection, place, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    for batch in iterator:
                        got += labels([batch])
            assert got == order[: len(got)]
            with pytest.raises((EpochError, WorkerError)):
                next(iterator)
            loader.set_epoch(0)
            assert labels(loader) == order


def test_a_loader_in_a_child_starts_processes_of_its_own(folder: Path) -> None:
    order = labels(pictures(folder))
    for workers in POOLS:
        with loader_of(pictures(folder), workers) as loader:
            iterator = iter(loader)
            got = labels([next(iterator)])

            def check(loader: ShardLoader = loader, iterator: Iterator[Any] = iterator) -> bool:
                with pytest.raises(WorkerError, match="iterate anew"):
                    next(iterator)
                right = labels(loader) == order
                loader.close()
                return right

            assert ended(in_child(check)) == 0
            assert got + labels(iterator) == order


def test_a_child_that_ends_as_python_does_harms_nothing(folder: Path) -> None:
    done = programs.run(loader_programs.__file__, "fork", folder, "fork", limit_s=LIMIT_S)
    assert done.code == 0 and not done.left and done.output == "right.\n", str(done)


def resident(pid: int | str) -> int:
    """Bytes that a process holds alone, or shares."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def held(pids: list[int]) -> tuple[list[str], list[int], int, int]:
    for one in threading.enumerate():
        # The pass is over, and with it its threads; those of a cache that other tests read go on.
        if one.name.startswith("shardio") and one.name != "shardio-cache":
            one.join(LIMIT_S)
    gc.collect()
    each = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
    maps = sum(len(Path(f"/proc/{pid}/maps").read_text().splitlines()) for pid in ["self", *pids])
    return descriptors(), each, threading.active_count(), maps


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("workers", [(0, 2), (2, 2)], ids=["0x2", "2x2"])
def test_fifty_epochs_leave_everything_flat(packed: Packed, workers: Workers) -> None:
    folder = packed([20, 7])

    def epochs(loader: ShardLoader, first: int, last: int) -> None:
        for epoch in range(first, last):
            loader.set_epoch(epoch)
            if epoch % 5 == 0:
                list(loader)
            else:
                for _, _ in zip(range(3), loader):  # noqa: B905
                    pass
        loader.set_epoch(last)
        for _ in loader:
            pass

    def compare() -> None:
        with loader_of(pictures(folder), workers) as loader:
            epochs(loader, 0, 10)
            pids = loader.explain().pids
            before, used = held(pids), [resident(pid) for pid in ["self", *pids]]
            epochs(loader, 11, 60)
            assert loader.explain().pids == pids
            after = held(pids)
            assert after[0] == before[0] and after[2] == before[2]
            for most, count in zip(before[1], after[1], strict=True):
                assert count <= most + 8  # it is at work on the next epoch: a buffer, a file
            assert after[3] <= before[3] + 20  # of these, and of malloc's
            for pid, bytes_before in zip(["self", *pids], used, strict=True):
                assert resident(pid) < bytes_before + (6 << 20)

    with nothing_left():
        compare()


@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_passes_that_follow_each_other_are_those_of_their_epochs(
    packed: Packed, prefetch: int, count: int
) -> None:
    """Also of fewer batches than processes make ahead, guessed rightly or wrongly."""
    folder = packed([20, 13])
    for size in (4, 16, 64):
        dataset = pictures(folder, batch_size=size, spans=4)
        with ShardLoader(dataset, num_workers=count, prefetch_factor=prefetch) as loader:
            for epoch in (0, 1, 2, 5, 5, 0):
                loader.set_epoch(epoch)
                if epoch == 2:
                    next(iter(loader))  # left, and begun again
                    loader.set_epoch(epoch)
                got = labels(loader)
                dataset.set_epoch(epoch)
                assert got == labels(dataset)
