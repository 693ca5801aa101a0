"""Which epoch each pass reads: the loops that users write, by the loaders that they use.

Nobody calls set_epoch here, unless the loop is called so. The programs are in loop_programs.py.
"""

import json
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import LIMIT_S, programs, small_datasets
from support.loop_programs import BATCH, LOADERS, dataset
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import shardio.dataset.iteration
from shardio import OptionError, RandomResizedCrop, ShardDataset, ShardLoader, collate
from shardio.dataset.epoch_state import EpochState, new_number
from shardio.dataset.iteration import busy_workers
from shardio.dataset.stream import Stream

Packed = Callable[..., Path]
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
]

COUNTS = [23, 0, 41, 3, 30]  # 97 records: 13 batches
PROGRAM = Path(__file__).parent.parent / "support" / "loop_programs.py"

# What the passes of each loop read, and how many warnings there are.
EXPECTED = {
    "for": ([0, 1, 2, 3], [13] * 4, 0),
    "range": ([0, 1, 2, 3], [13] * 4, 0),
    "kept": ([0, 1, 2, 3], [13] * 4, 0),
    "break": ([0, 0, 0, 0], [3] * 4, 1),
    "peek": ([0, 0, 1, 2, 3], [1, *[13] * 4], 1),
    "set_epoch": ([5, 6, 6, 6], [13] * 4, 1),
    "resume": ([2, 3, 4, 5], [8, 13, 13, 13], 0),
}
# Seconds to start them: some of the loops.
FEW = {"spawned": "for,range", "mixture": "for,range,resume"}
# One iterator at a time: a new one ends the one before.
LONE = ("persistent", "ShardLoader 0", "ShardLoader thread", "ShardLoader 2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The label of each record is its own number."""
    return small_datasets.make(
        tmp_path_factory.mktemp("loops") / "data",
        COUNTS,
        sample=lambda i: {"__key__": b"%d" % i, "image": b"x", "label": i},
        classes=None,
    )


@pytest.fixture(scope="module")
def passes(folder: Path) -> dict[str, dict[str, Any]]:
    """What every loop of every loader read, by loader: one program, since torch takes seconds."""
    given = []
    for loader in (*LOADERS, "mixture"):
        loops = FEW.get(loader, ",".join(EXPECTED))
        given.append(f"{loader}={loops.replace('kept,', '') if loader in LONE else loops}")
    done = programs.run(PROGRAM, folder, *given, limit_s=LIMIT_S)
    assert done.code == 0 and not done.left, done
    lines = [json.loads(line) for line in done.output.splitlines() if line.startswith('{"loader"')]
    return {one.pop("loader"): one for one in lines}


@pytest.mark.parametrize("loader", [*LOADERS, "mixture"])
def test_the_pass_after_a_complete_one_is_the_next_epoch(
    loader: str, passes: dict[str, dict[str, Any]]
) -> None:
    for loop, one in passes[loader].items():
        epochs, batches, warned = EXPECTED[loop]
        assert (one["epochs"], one["batches"]) == (epochs, batches), (loop, one)
        assert one["said"] == epochs, (loop, one)  # what ds.epoch says
        assert one["warnings"] == warned, (loop, one["text"])


def epochs_read(stream: Any, passes: Callable[[], Any], count: int) -> list[int]:
    found = []
    for _ in range(count):
        passes()
        found.append(stream.epoch)
    return found


@pytest.mark.parametrize("options", [{"tail": "exact"}, {"shuffle": False}])
@pytest.mark.parametrize("workers", [0, 2])
def test_validation_reads_the_same_epoch_and_says_nothing(
    folder: Path, options: dict[str, Any], workers: int
) -> None:
    stream = dataset(folder, **options)
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    first = [labels.tolist() for labels, *_ in loader]
    assert [labels.tolist() for labels, *_ in loader] == first and stream.epoch == 0
    next(iter(loader))
    assert [labels.tolist() for labels, *_ in loader] == first and stream.epoch == 0


@pytest.mark.parametrize("make", [ShardLoader, lambda ds, **_: DataLoader(ds, batch_size=None)])
def test_crops_are_others_in_the_next_epoch(packed: Packed, make: Any) -> None:
    folder = packed([40], image=small_datasets.jpeg)
    stream = ShardDataset(
        folder, batch_size=8, fields=("image", "label"), transform=RandomResizedCrop(8)
    )
    loader = make(stream, num_workers=0, threads=0)
    first, second = (
        torch.cat([images for images, _ in loader]).sort(0).values.clone() for _ in range(2)
    )
    assert stream.epoch == 1 and not torch.equal(first, second)


def test_several_ranks_are_warned_once_each(folder: Path) -> None:
    for rank in range(2):
        stream = dataset(folder, rank=rank, world_size=2)
        list(stream)
        with pytest.warns(UserWarning, match=f"rank {rank} of 2 goes on with epoch 1") as caught:
            list(stream)
            list(stream)
        assert len(caught) == 1 and stream.epoch == 2


def test_a_pass_left_early_names_the_users_line(folder: Path) -> None:
    stream = dataset(folder)
    next(iter(stream))
    with pytest.warns(UserWarning, match=r"ShardDataset\('.*'\): the pass over epoch 0") as caught:
        for _ in DataLoader(stream, batch_size=None):
            pass
    assert [Path(one.filename).name for one in caught] == [Path(__file__).name]


def test_a_state_names_the_epoch_that_is_read(folder: Path) -> None:
    stream = dataset(folder)
    loader = DataLoader(stream, batch_size=None, num_workers=2)
    list(loader)
    for step, _ in enumerate(loader, 1):
        if step == 3:
            state = stream.state_dict(steps=step)
            break
    assert state["epoch"] == 1
    again = dataset(folder)
    again.load_state_dict(state)
    straight = dataset(folder)
    straight.set_epoch(1)
    expected = [labels.tolist() for (labels,) in straight]
    assert [labels.tolist() for (labels,) in again] == expected[3:]


@pytest.mark.parametrize("make", [ShardLoader, lambda ds, **_: DataLoader(ds, batch_size=None)])
def test_an_epoch_resumed_at_its_end_does_not_stay_empty_in_silence(
    folder: Path, make: Any
) -> None:
    twin = dataset(folder)
    twin.set_epoch(3)
    stream = dataset(folder)
    stream.load_state_dict(twin.state_dict(steps=13))
    stream.set_epoch(3)
    loader = make(stream, num_workers=0, threads=0)
    assert list(loader) == []
    with pytest.warns(UserWarning, match="epoch 3 was resumed at its end") as caught:
        assert list(loader) == list(loader) == []
    assert len(caught) == 1
    iterator = iter(loader)  # as Lightning has it: no warning, since the epoch comes now
    stream.set_epoch(4)
    assert len(list(iterator)) == 13


@pytest.mark.parametrize("make", [ShardLoader, lambda ds, **_: DataLoader(ds, batch_size=None)])
def test_what_lightning_looks_for(folder: Path, make: Any) -> None:
    loader = ShardLoader(dataset(folder), num_workers=0, threads=0)
    loader.sampler.set_epoch(4)
    assert loader.epoch == loader.dataset.epoch == 4


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_samples_that_the_loader_batches(folder: Path, workers: int, drop_last: bool) -> None:
    stream = dataset(folder, batch_size=None)
    loader = DataLoader(stream, batch_size=10, num_workers=workers, drop_last=drop_last)

    def passes() -> None:
        it = iter(loader)
        for _ in range(97 // 10 if workers < 2 else 2 * (48 // 10)):
            next(it)

    if drop_last:
        assert epochs_read(stream, passes, 3) == [0, 1, 2]
    assert epochs_read(stream, lambda: list(loader), 3)[-1] == (5 if drop_last else 2)


class Wrapped(IterableDataset[Any]):
    """A user's own dataset around ours: several passes in one."""

    def __init__(self, inner: Any, passes: int) -> None:
        self.inner = inner
        self.passes = passes

    def __iter__(self) -> Any:
        for _ in range(self.passes):
            yield from self.inner


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_all_workers_of_a_wrapper_read_the_same_epochs(folder: Path, workers: int) -> None:
    straight = dataset(folder)
    expected = []
    for epoch in range(3):
        straight.set_epoch(epoch)
        expected += sorted(labels.tolist() for (labels,) in straight)
    loader = DataLoader(Wrapped(dataset(folder), 3), batch_size=None, num_workers=workers)
    found = [labels.tolist() for (labels,) in loader]
    assert sorted(found) == sorted(expected)


def test_passes_whose_loaders_draw_the_same_seed_are_told_apart(folder: Path) -> None:
    stream = dataset(folder)
    loader = DataLoader(stream, batch_size=None, num_workers=2)

    def seeded() -> None:
        torch.manual_seed(0)  # the seeds of workers tell loaders apart, but not these
        assert sorted(label for (labels,) in loader for label in labels.tolist()) == [*range(97)]

    assert epochs_read(stream, seeded, 3) == [0, 1, 2]


def test_a_rank_that_was_forked_has_an_epoch_of_its_own(folder: Path) -> None:
    stream = dataset(folder)
    context = torch.multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def rank() -> None:
        list(stream), list(stream)
        queue.put(stream.epoch)

    ranks = [context.Process(target=rank) for _ in range(2)]
    for process in ranks:
        process.start()
    assert [queue.get() for _ in ranks] == [1, 1]
    for process in ranks:
        process.join()
    assert stream.epoch == 0


# --- passes side by side, and forks that are not the loader's -------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_an_older_iterator_that_ends_later_hides_nothing(folder: Path, workers: int) -> None:
    stream = dataset(folder)
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    for epoch in range(3):
        older = iter(loader)
        next(older)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that pass is left, here
            newer = iter(loader)
            assert len(list(newer)) == 13
        assert len(list(older)) == 12 and stream.epoch == epoch


@pytest.mark.parametrize("workers", [1, 2])
def test_an_older_pass_that_begins_late_is_not_the_last_one(folder: Path, workers: int) -> None:
    stream = dataset(folder)
    loader = DataLoader(Wrapped(stream, 1), batch_size=None, num_workers=workers)
    for epoch in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # worker 0 of the older may have begun its pass already
            older, newer = iter(loader), iter(loader)
        next(older)
        assert len(list(newer)) == 13 and stream.epoch == epoch
        del older


def test_a_fork_within_a_transform_begins_no_pass(folder: Path) -> None:
    def forks(rows: list[Any]) -> Any:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return collate(rows)

    stream = dataset(folder, collate_fn=forks)
    loader = DataLoader(stream, batch_size=None)
    assert epochs_read(stream, lambda: list(loader), 3) == [0, 1, 2]


def test_workers_that_two_threads_start_at_once_keep_their_tickets(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, other = dataset(folder), dataset(folder)
    monkeypatch.setattr(shardio.dataset.iteration, "STREAMS", [train, other])
    new_ticket, busy = shardio.dataset.iteration.new_ticket, []

    def slowly(stream: Stream, iterator: Any) -> Any:
        if stream is other and not busy:  # the other thread starts and ends its workers meanwhile
            busy.append(True)
            thread = threading.Thread(
                target=lambda: list(DataLoader(other, batch_size=None, num_workers=1))
            )
            thread.start()
            thread.join()
        return new_ticket(stream, iterator)

    monkeypatch.setattr(shardio.dataset.iteration, "new_ticket", slowly)
    loader = DataLoader(train, batch_size=None, num_workers=1)
    assert epochs_read(train, lambda: list(loader), 2) == [0, 1] and busy


def test_workers_without_batches_are_not_waited_for(folder: Path) -> None:
    stream = dataset(folder, batch_size=60)  # 2 batches
    state = EpochState(0)
    decision = state.decide(new_number(), fixed=False)
    state.begin(decision, busy_workers(stream, 4, 1, decision))
    for worker in (0, 1):  # the others may start as late as they like
        assert not state.complete
        state.ended(decision.number, worker)
    assert state.complete


# --- batches of batches ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("options", [{}, {"batch_size": 8}, {"batch_size": 8, "collate_fn": list}])
def test_batches_of_batches_are_refused(
    folder: Path, workers: int, options: dict[str, Any], make: Any
) -> None:
    stream = dataset(folder)
    with pytest.raises(OptionError, match=r"makes batches of 8 itself.*batch_size=None"):
        next(iter(make(stream, num_workers=workers, **options)))
    assert len(list(DataLoader(stream, batch_size=None))) == 13  # and nothing was left early


def test_one_batch_and_a_collate_fn_of_ones_own_are_allowed(folder: Path) -> None:
    loader = DataLoader(dataset(folder), batch_size=1, collate_fn=lambda batches: batches[0])
    assert len(next(iter(loader))[0]) == BATCH


def test_a_wrapper_may_make_batches_of_what_is_in_ours(folder: Path) -> None:
    class Rows(IterableDataset[Any]):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __iter__(self) -> Any:
            for (labels,) in self.inner:
                yield from labels.tolist()

    found = torch.cat(list(DataLoader(Rows(dataset(folder)), batch_size=10))).tolist()
    assert np.array_equal(np.sort(found), np.arange(97))
