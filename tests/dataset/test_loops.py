"""Which epoch each pass reads: the loops that users write, by the loaders that they use.

Nobody calls set_epoch here, unless the loop is called so. The programs are in loop_programs.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import LIMIT_S, programs, small_datasets
from support.loop_programs import LOADERS, dataset, epochs_read
from torch.utils.data import DataLoader

from shardio import RandomResizedCrop, ShardDataset, ShardLoader

Packed = Callable[..., Path]
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
]

PROGRAM = Path(__file__).parent.parent / "support" / "loop_programs.py"

# What the passes of each loop read, and how many warnings there are.
EXPECTED = {
    "for": ([0, 1, 2], [13] * 3, 0),
    "range": ([0, 1, 2], [13] * 3, 0),
    "kept": ([0, 1, 2], [13] * 3, 0),
    "break": ([0, 0, 0], [3] * 3, 1),
    "peek": ([0, 0, 1, 2], [1, *[13] * 3], 1),
    "set_epoch": ([5, 6, 6], [13] * 3, 1),
    "resume": ([2, 3, 4], [8, 13, 13], 0),
}
# Seconds to start them: some of the loops.
FEW = {"spawned": "for,range", "mixture": "for,range,resume"}
# One iterator at a time: a new one ends the one before.
LONE = ("persistent", "ShardLoader 0", "ShardLoader thread", "ShardLoader 2")


@pytest.fixture(scope="module")
def passes(numbered: Path) -> dict[str, dict[str, Any]]:
    """What every loop of every loader read, by loader: one program, since torch takes seconds."""
    given = []
    for loader in (*LOADERS, "mixture"):
        loops = FEW.get(loader, ",".join(EXPECTED))
        given.append(f"{loader}={loops.replace('kept,', '') if loader in LONE else loops}")
    done = programs.run(PROGRAM, numbered, *given, limit_s=LIMIT_S, warm=True)
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


@pytest.mark.parametrize("options", [{"tail": "exact"}, {"shuffle": False}])
@pytest.mark.parametrize("workers", [0, 2])
def test_validation_reads_the_same_epoch_and_says_nothing(
    numbered: Path, options: dict[str, Any], workers: int
) -> None:
    stream = dataset(numbered, **options)
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


def test_several_ranks_are_warned_once_each(numbered: Path) -> None:
    for rank in range(2):
        stream = dataset(numbered, rank=rank, world_size=2)
        list(stream)
        with pytest.warns(UserWarning, match=f"rank {rank} of 2 goes on with epoch 1") as caught:
            list(stream)
            list(stream)
        assert len(caught) == 1 and stream.epoch == 2


def test_a_pass_left_early_names_the_users_line(numbered: Path) -> None:
    stream = dataset(numbered)
    next(iter(stream))
    with pytest.warns(UserWarning, match=r"ShardDataset\('.*'\): the pass over epoch 0") as caught:
        for _ in DataLoader(stream, batch_size=None):
            pass
    assert [Path(one.filename).name for one in caught] == [Path(__file__).name]


def test_a_state_names_the_epoch_that_is_read(numbered: Path) -> None:
    stream = dataset(numbered)
    loader = DataLoader(stream, batch_size=None, num_workers=2)
    list(loader)
    for step, _ in enumerate(loader, 1):
        if step == 3:
            state = stream.state_dict(steps=step)
            break
    assert state["epoch"] == 1
    again = dataset(numbered)
    again.load_state_dict(state)
    straight = dataset(numbered)
    straight.set_epoch(1)
    expected = [labels.tolist() for (labels,) in straight]
    assert [labels.tolist() for (labels,) in again] == expected[3:]


@pytest.mark.parametrize("make", [ShardLoader, lambda ds, **_: DataLoader(ds, batch_size=None)])
def test_an_epoch_resumed_at_its_end_does_not_stay_empty_in_silence(
    numbered: Path, make: Any
) -> None:
    twin = dataset(numbered)
    twin.set_epoch(3)
    stream = dataset(numbered)
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
def test_what_lightning_looks_for(numbered: Path, make: Any) -> None:
    loader = ShardLoader(dataset(numbered), num_workers=0, threads=0)
    loader.sampler.set_epoch(4)
    assert loader.epoch == loader.dataset.epoch == 4


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_samples_that_the_loader_batches(numbered: Path, workers: int, drop_last: bool) -> None:
    stream = dataset(numbered, batch_size=None)
    loader = DataLoader(stream, batch_size=10, num_workers=workers, drop_last=drop_last)

    def passes() -> None:
        it = iter(loader)
        for _ in range(97 // 10 if workers < 2 else 2 * (48 // 10)):
            next(it)

    if drop_last:
        assert epochs_read(stream, passes, 3) == [0, 1, 2]
    assert epochs_read(stream, lambda: list(loader), 3)[-1] == (5 if drop_last else 2)
