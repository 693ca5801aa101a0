"""Trainings over a ShardLoader that test_worker_pool.py kills and interrupts.

    loader_programs.py train DATA METHOD [hang]   prints a line for each batch, for ever
    loader_programs.py notebook DATA METHOD GATE  catches Ctrl-C, iterates again, and waits for one
    loader_programs.py fork DATA METHOD           its child ends as Python does, in mid-epoch

METHOD is fork, spawn or forkserver. With `hang` a row of epoch 1 never comes. GATE is a file: while
it is not there, a row makes it, and never comes.
"""

import itertools
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from shardio import ShardDataset, ShardLoader

BATCH = 8


def hang() -> None:
    print("hanging.", flush=True)
    threading.Event().wait()


@dataclass
class Decode:
    """Bytes of a record to an array that says which it is."""

    hangs_at: int = -1  # the number of a call, in its process
    gate: str = ""
    calls: int = 0

    def __call__(self, data: bytes) -> Any:
        self.calls += 1
        if self.calls == self.hangs_at or (self.gate and not os.path.exists(self.gate)):
            if self.gate:
                open(self.gate, "x").close()
            hang()
        return np.full((32, 32, 3), int(data[:6]) % 251, np.uint8)


def images(folder: str, decode: Any, **options: Any) -> ShardDataset:
    return ShardDataset(
        folder, batch_size=BATCH, fields=("image",), decode=decode, shuffle_buffer=30, **options
    )


def numbers(batch: Any) -> list[int]:
    return batch[0][:, 0, 0, 0].tolist()


def train(folder: str, method: str, hangs: str = "") -> None:
    dataset = images(folder, Decode(60 if hangs else -1))
    workers = 2 if method == "fork" else 1  # to start others takes seconds
    loader = ShardLoader(dataset, num_workers=workers, threads=2, multiprocessing_context=method)
    kept: list[Any] = []
    if method == "fork":  # these have copies of all that the trainer has open
        other = ShardLoader(images(folder, Decode()), num_workers=1, multiprocessing_context=method)
        kept.append(next(iter(other)))
        torchs = DataLoader(images(folder, Decode()), batch_size=None, num_workers=1)
        kept.append(iter(torchs))
        next(kept[-1])  # one that its trainer leaves before it began never ends
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        for step, _ in enumerate(loader):
            print(f"epoch {epoch} step {step}.", flush=True)


def notebook(folder: str, method: str, gate: str) -> None:
    expected = [numbers(batch) for batch in images(folder, Decode())]
    loader = ShardLoader(
        images(folder, Decode(gate=gate)), num_workers=2, multiprocessing_context=method
    )
    iterator = iter(loader)
    try:
        for _ in iterator:
            pass
    except KeyboardInterrupt:
        print("caught.", flush=True)
    try:
        next(iterator)
    except Exception as error:
        print(f"{type(error).__name__}: {error}.", flush=True)
    assert [numbers(batch) for batch in loader] == expected
    print("right.", flush=True)
    os.unlink(gate)
    for _ in loader:
        pass


def fork(folder: str, method: str) -> None:
    expected = [numbers(batch) for batch in images(folder, Decode())]
    loader = ShardLoader(images(folder, Decode()), num_workers=2, multiprocessing_context=method)
    got = []
    for step, batch in enumerate(loader):
        got.append(numbers(batch))
        if step == 2:
            pid = os.fork()
            if not pid:
                # Its own processes; and then all that Python does when it ends.
                assert [numbers(one) for one in loader] == expected
                sys.exit(0)
            assert os.waitpid(pid, 0)[1] == 0
    assert got == expected
    loader.set_epoch(1)
    assert len(list(loader)) == len(expected)
    print("right.", flush=True)


if __name__ == "__main__":
    {"train": train, "notebook": notebook, "fork": fork}[sys.argv[1]](*sys.argv[2:])
