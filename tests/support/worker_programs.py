"""Trainings that test_dataloader_workers.py interrupts, and one that kills its own workers.

    worker_programs.py train DATA METHOD new|persistent [LAST LINE]
    worker_programs.py kill DATA METHOD SEED COUNT

`train` prints a line for each batch, for ever; METHOD is fork or spawn, or none: without workers.
`kill` ends a worker with SIGKILL COUNT times, and prints what came of it.
"""

import faulthandler
import gc
import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from shardio import ShardDataset
from support import LIMIT_S, programs
from support.small_datasets import grouped

WORKERS = 2
BATCH = 8
# What a loader raises for a dead worker. The last two: while a batch of it is being received.
DIED = (RuntimeError, ConnectionError, EOFError)


def decode(data: bytes) -> torch.Tensor:
    """The stand-in of a decoder: a record's bytes to its number, as a tensor like an image."""
    return torch.full((3, 8, 8), int(data[:6]))


def images(folder: Any, **options: Any) -> ShardDataset:
    """Yields batches of a tensor that says which records they hold."""
    given = {"decode": decode, "shuffle_buffer": 30, "spans": 8} | options
    return ShardDataset(folder, batch_size=BATCH, fields=("image",), **grouped(given))


def numbers(batch: Any) -> list[int]:
    return batch[0][:, 0, 0, 0].tolist()


def train(folder: str, method: str, kept: str, last: str = "") -> None:
    """Train, up to a line: an interrupt that Python's own calls at a fork get would be lost."""
    programs.take_terminal()
    dataset = images(folder)
    workers = 0 if method == "none" else WORKERS
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=method if workers else None,
        persistent_workers=kept == "persistent",
    )
    for epoch in itertools.count():
        dataset.set_epoch(epoch)
        for step, _ in enumerate(loader):
            line = f"epoch {epoch} step {step}."
            print(line, flush=True)
            while line == last:
                time.sleep(1)


def kill(folder: str, method: str, seed: str, count: str) -> None:
    expected = [numbers(batch) for batch in images(folder)]
    draw = random.Random(int(seed))
    for _ in range(int(count)):
        faulthandler.dump_traceback_later(LIMIT_S // 4, exit=True)  # where it hangs, if it does
        outcome, pid = _kill_one(folder, method, draw, expected)
        gc.collect()
        for worker in multiprocessing.active_children():  # torch ends it, and does not wait for it
            worker.join(LIMIT_S)
            assert worker.exitcode is not None, worker
        # torch makes a tensor's file in shared memory, and then takes its name away.
        late = {name for name in programs.shared_memory() if name.startswith(f"torch_{pid}_")}
        assert len(late) <= 1, late
        for name in late:
            os.unlink(f"/dev/shm/{name}")
        print(f"{outcome}.", flush=True)


def _kill_one(
    folder: str, method: str, draw: random.Random, expected: list[list[int]]
) -> tuple[str, int]:
    loader = DataLoader(
        images(folder),
        batch_size=None,
        num_workers=WORKERS,
        multiprocessing_context=method,
        persistent_workers=draw.random() < 0.5,
    )
    iterator: Any = iter(loader)
    pid = draw.choice(iterator._workers).pid
    got = []
    outcome = "complete"
    try:  # torch's handler raises once, wherever this process is when it learns of the death
        try:
            for _ in range(draw.randrange(len(expected))):
                got.append(numbers(next(iterator)))
            for _ in range(draw.randrange(20_000)):  # somewhere in what workers do until then
                pass
            with suppress(ProcessLookupError):  # it had ended, since all it had to do was done
                os.kill(pid, signal.SIGKILL)
            for batch in iterator:
                got.append(numbers(batch))
        except DIED as error:
            outcome = type(error).__name__
        settle(pid)
    except RuntimeError:
        pass
    assert got == expected[: len(got)]
    assert outcome != "complete" or got == expected
    return outcome, pid


def settle(pid: int) -> None:
    """Wait for a killed worker. torch raises wherever the parent is then: let that be here.

    It is killed again: what ended the training may have come before it was killed.
    """
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(RuntimeError, ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        for _ in range(1000):  # the handler of a signal runs between two steps of the interpreter
            pass


COUNTS = [23, 0, 41, 3, 30]
N = sum(COUNTS)
STEPS = -(-N // BATCH)


@dataclass
class Wait:
    """Called for one record, or for one worker, it waits until the parent has opened its gate."""

    target: int
    gate: str  # a FIFO: a byte in it is the permission

    def __call__(self, number: int) -> None:
        if number == self.target:
            gate = os.open(self.gate, os.O_RDONLY)
            os.read(gate, 1)
            os.close(gate)


WAYS = {
    "none": {},
    "fork": {"num_workers": WORKERS},
    "persistent": {"num_workers": WORKERS, "persistent_workers": True},
    "spawn": {
        "num_workers": WORKERS,
        "persistent_workers": True,
        "multiprocessing_context": "spawn",
    },
}


@contextmanager
def passing(loader: DataLoader[Any]) -> Iterator[Any]:
    """One pass. Its workers end with it: after an error torch takes 5 s for each, since what it
    raises holds its own traceback, and so the iterator, until the garbage collector comes."""
    iterator = iter(loader)
    try:
        yield iterator
    finally:
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            iterator._shutdown_workers()


def loading(folder: Path, way: str) -> tuple[ShardDataset, DataLoader[Any], list[Any]]:
    """A dataset, a loader of it, and the epochs 0 and 1 as another dataset of it has them."""
    expected = []
    for epoch in (0, 1):
        dataset = images(folder)
        dataset.set_epoch(epoch)
        expected.append([numbers(batch) for batch in dataset])
    assert expected[0] != expected[1] and len(expected[0]) == len(expected[1]) == STEPS
    dataset = images(folder)
    return dataset, DataLoader(dataset, batch_size=None, **WAYS[way]), expected


if __name__ == "__main__":
    {"train": train, "kill": kill}[sys.argv[1]](*sys.argv[2:])
