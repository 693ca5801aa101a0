"""Loops over a dataset as its users write them, and which epoch each of their passes read.

loop_programs.py DATA LOADER=LOOP,LOOP,... ...   a line of JSON for each loader, which it names:
                                                 by loop, the epochs and the warnings
"""

import gc
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from shardio import ShardDataset, ShardLoader
from support.small_datasets import of_order

BATCH, PASSES = 8, 3
Read = list[int]
Loop = Callable[[Any, Any], Iterator[Read]]  # (dataset, makes a loader): what each pass read


def dataset(folder: str, **options: Any) -> Any:
    given = {"batch_size": BATCH, "shuffle_buffer": 30, "spans": 8} | options
    return ShardDataset(folder, fields=("label",), decode=None, **of_order(given))


def mixture(folder: str) -> Any:
    return ShardDataset.mix([dataset(folder), dataset(folder, shuffle_buffer="all")], length=97)


def threaded(ds: Any) -> Any:
    return ShardLoader(ds, num_workers=0, threads=1)


# --- loaders: what makes one, for each pass or once for all ---------------------------------------


def each(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A loader of its own for each pass."""
    return lambda ds: lambda: make(ds)


def once(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One loader for all passes."""

    def made(ds: Any) -> Any:
        loader = make(ds)
        return lambda: loader

    return made


def torchs(**options: Any) -> Callable[[Any], Any]:
    return lambda ds: DataLoader(ds, batch_size=None, **options)


def spawned(ds: Any) -> Any:
    return DataLoader(
        ds, batch_size=None, num_workers=1, multiprocessing_context="spawn", persistent_workers=True
    )


def tight(ds: Any) -> Any:
    return DataLoader(ds, batch_size=None, num_workers=1, prefetch_factor=1)


LOADERS: dict[str, Callable[[Any], Any]] = {
    "dataset": once(lambda ds: ds),
    "workers 0": once(torchs()),
    "workers 2": once(torchs(num_workers=2)),
    "workers 2, new loaders": each(torchs(num_workers=2)),
    "workers 1, prefetch 1": once(tight),
    "persistent": once(torchs(num_workers=2, persistent_workers=True)),
    "spawned": once(spawned),
    "stateful 0": once(lambda ds: StatefulDataLoader(ds, batch_size=None)),
    "stateful 2": once(lambda ds: StatefulDataLoader(ds, batch_size=None, num_workers=2)),
    "ShardLoader 0": once(lambda ds: ShardLoader(ds, num_workers=0, threads=0)),
    "ShardLoader thread": once(threaded),
    "ShardLoader 2": once(lambda ds: ShardLoader(ds, num_workers=2)),
}

# --- loops ----------------------------------------------------------------------------------------


def numbers(batches: Any) -> Read:
    return [label for (labels,) in batches for label in labels.tolist()]


def plain(ds: Any, loader: Any) -> Iterator[Read]:
    for _ in range(PASSES):
        yield numbers(loader())


def counted(ds: Any, loader: Any) -> Iterator[Read]:
    """Never asks for what follows the last batch, and drops the iterator at once."""
    for _ in range(PASSES):
        it = iter(loader())
        batches = [next(it) for _ in range(len(ds))]
        del it
        yield numbers(batches)


def kept(ds: Any, loader: Any) -> Iterator[Read]:
    """As counted; the iterators before live on."""
    iterators = []
    for _ in range(PASSES):
        iterators.append(iter(loader()))
        yield numbers(next(iterators[-1]) for _ in range(len(ds)))


def left(ds: Any, loader: Any) -> Iterator[Read]:
    """Breaks off far from the end, each time."""
    for _ in range(PASSES):
        yield numbers(islice(iter(loader()), 3))


def peeked(ds: Any, loader: Any) -> Iterator[Read]:
    """Looks at a batch before it begins."""
    yield numbers([next(iter(loader()))])
    yield from plain(ds, loader)


def ordered(ds: Any, loader: Any) -> Iterator[Read]:
    """Sets epochs, and then forgets to."""
    for epoch in (5, 6):
        ds.set_epoch(epoch)
        yield numbers(loader())
    yield numbers(loader())


def resumed(ds: Any, loader: Any) -> Iterator[Read]:
    """Goes on in the middle of epoch 2, and never sets one."""
    twin = dataset(PATH) if isinstance(ds, ShardDataset) else mixture(PATH)
    twin.set_epoch(2)
    ds.load_state_dict(twin.state_dict(steps=5))
    yield from plain(ds, loader)


LOOPS: dict[str, Loop] = {
    "for": plain,
    "range": counted,
    "kept": kept,
    "break": left,
    "peek": peeked,
    "set_epoch": ordered,
    "resume": resumed,
}


@contextmanager
def heard() -> Iterator[list[str]]:
    """What this process and those that it starts write to stderr meanwhile."""
    said: list[str] = []
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            said.append(file.read().decode())


def which(read: Read, epochs: list[Read]) -> int:
    """The epoch that these are records of: its first ones, or its last; -1: of none."""
    for epoch, all_of_it in enumerate(epochs):
        if read and read in (all_of_it[: len(read)], all_of_it[-len(read) :]):
            return epoch
    return -1


def run(loader: str, loops: list[str]) -> None:
    make = mixture if loader == "mixture" else dataset
    straight, epochs = make(PATH), []
    for epoch in range(10):
        straight.set_epoch(epoch)
        epochs.append(numbers(straight))
    found: dict[str, Any] = {"loader": loader}
    for loop in loops:
        warnings.resetwarnings()
        warnings.filterwarnings("ignore", message="This DataLoader will create|'set_vital'")
        # Python 3.12 warns of forks in a process with threads, which an earlier loader may have.
        warnings.filterwarnings("ignore", message="This process .* is multi-threaded")
        ds = make(PATH)
        maker = LOADERS.get(loader, LOADERS["workers 2"])(ds)
        with heard() as said:
            passes = [
                {"epoch": which(read, epochs), "said": ds.epoch, "batches": -(-len(read) // BATCH)}
                for read in LOOPS[loop](ds, maker)
            ]
            del maker
        found[loop] = {
            "epochs": [one["epoch"] for one in passes],
            "said": [one["said"] for one in passes],
            "batches": [one["batches"] for one in passes],
            "warnings": said[0].count("Warning: "),
            "text": said[0],
        }
    print(json.dumps(found), flush=True)


def epochs_read(stream: Any, passes: Callable[[], Any], count: int) -> list[int]:
    found = []
    for _ in range(count):
        passes()
        found.append(stream.epoch)
    return found


class Wrapped(IterableDataset[Any]):
    """A user's own dataset around ours: several passes in one."""

    def __init__(self, inner: Any, passes: int) -> None:
        self.inner = inner
        self.passes = passes

    def __iter__(self) -> Any:
        for _ in range(self.passes):
            yield from self.inner


if __name__ == "__main__":
    gc.freeze()  # or each of hundreds of workers copies what was imported
    PATH = sys.argv[1]
    for given in sys.argv[2:]:
        name, _, loops = given.partition("=")
        run(name, loops.split(","))
