"""Lightning, Accelerate and the Trainer of transformers, run for two ranks as docs/order.md says.

The programs are in frameworks/, and so is the environment that they need: tools/setup-frameworks.
The last part needs none of them: it has stand-ins for what Accelerate wraps datasets in.
"""

import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, programs
from support.frameworks import BECOME, COUNTS, HERE, PYTHON, needs_them, numbered
from torch.utils.data import DataLoader, IterableDataset

from shardio import OptionError, ShardDataset

Packed = Callable[..., Path]

N = sum(COUNTS)  # 7 steps of two ranks with batches of 8, and 15 repeats
STEPS, EPOCHS = 7, 3
PLACES = {  # of each program, a checkpoint of the middle of the second epoch, and its step
    "lightning_fit.py": ("epoch=1-step=9.ckpt", 9),
    "accelerate_fit.py": ("1-3", STEPS + 3),
    "trainer_fit.py": ("checkpoint-12", 12),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return numbered(tmp_path_factory.mktemp("frameworks") / "data")


def launch(out: Path, program: str, folder: Path, *more: Path) -> list[dict[str, Any]]:
    """What each of two ranks of a program wrote down."""
    out.mkdir()
    done = programs.run(
        *("-c", BECOME, PYTHON, "-m", "torch.distributed.run"),
        *("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"),
        *(HERE / program, folder, out, *more),
        limit_s=LIMIT_S,
    )
    assert not done.timed_out and done.code == 0 and not done.left, done.output
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


class Job:
    """A program, and what its ranks saw in a run from the beginning."""

    def __init__(self, program: str, folder: Path, out: Path) -> None:
        self.program, self.folder, self.out = program, folder, out
        self.ranks = launch(out, program, folder)


@pytest.fixture(scope="module", params=PLACES)
def job(request: pytest.FixtureRequest, folder: Path) -> Job:
    return Job(request.param, folder, folder.parent / request.param.removesuffix(".py"))


def flat(ranks: list[dict[str, Any]], epoch: int) -> list[int]:
    steps = [rank["steps"][str(epoch)] for rank in ranks]
    return [label for each in zip(*steps, strict=True) for batch in each for label in batch]


# --- the recipes ----------------------------------------------------------------------------


@needs_them
@pytest.mark.frameworks
class TestRecipes:
    def test_every_record_comes_once_in_equal_steps(self, job: Job) -> None:
        for epoch in range(EPOCHS):
            assert [len(rank["steps"][str(epoch)]) for rank in job.ranks] == [STEPS, STEPS]
            labels = flat(job.ranks, epoch)
            assert sorted(labels[:N]) == list(range(N))  # and then the repeats that pad the end
            assert len(labels) == STEPS * 16
        assert [rank["len"] for rank in job.ranks] == [STEPS, STEPS]

    def test_each_epoch_has_the_order_of_shardio(self, job: Job) -> None:
        for number, rank in enumerate(job.ranks):
            dataset = ShardDataset(
                job.folder, batch_size=8, fields=("label",), rank=number, world_size=2
            )
            epochs = []
            for epoch in range(EPOCHS):
                dataset.set_epoch(epoch)
                epochs.append([labels.tolist() for (labels,) in dataset])
            assert [rank["steps"][str(epoch)] for epoch in range(EPOCHS)] == epochs
            assert epochs[0] != epochs[1] != epochs[2]

    def test_validation_counts_every_record_once(self, job: Job) -> None:
        for rank in job.ranks:
            metrics = {name.removeprefix("eval_"): value for name, value in rank["metrics"].items()}
            assert metrics["counted"] == N
            right = metrics["accuracy"] * N
            assert right == pytest.approx(round(right), abs=1e-3)

    @pytest.mark.slow
    def test_a_checkpoint_of_the_middle_of_an_epoch_goes_on_there(self, job: Job) -> None:
        checkpoint, step = PLACES[job.program]
        out = job.out.with_name(f"{job.out.name}-resumed")
        resumed = launch(out, job.program, job.folder, job.out / checkpoint)
        for before, after in zip(job.ranks, resumed, strict=True):
            whole, rest = (
                [(epoch, batch) for epoch, batches in rank["steps"].items() for batch in batches]
                for rank in (before, after)
            )
            assert rest == whole[step:]


@pytest.fixture(scope="module")
def twice(folder: Path) -> list[dict[str, Any]]:
    return launch(folder.parent / "twice", "accelerate_twice.py", folder)


@needs_them
@pytest.mark.frameworks
@pytest.mark.slow
class TestSplittingTwice:
    def test_it_is_refused_however_it_comes_about(self, twice: list[dict[str, Any]]) -> None:
        for rank in twice:
            for case, became in rank.items():
                if case not in ("right", "unguarded"):
                    assert "OptionError: " in became, case
                    assert "of Accelerate splits what this dataset yields" in became, case
                    assert "Leave the DataLoader out of accelerator.prepare()" in became, case
        assert "trainer" in twice[1]  # it is told on every rank, so that none waits for another
        assert twice[0].keys() - twice[1].keys() == {"wrapped, fork", "wrapped, spawn"}

    def test_a_loader_prepared_for_one_process_is_not_split(
        self, twice: list[dict[str, Any]]
    ) -> None:
        assert {label for rank in twice for label in rank["right"]} == set(range(N))
        assert [len(rank["right"]) for rank in twice] == [STEPS * 8, STEPS * 8]

    def test_unless_it_is_refused_it_loses_records(self, twice: list[dict[str, Any]]) -> None:
        assert len({label for rank in twice for label in rank["unguarded"]}) < 0.6 * N


# --- refusing, without the frameworks -------------------------------------------------------

STAND_IN = """
class DataLoaderDispatcher:
    def __init__(self, loader, processes):
        self.loader, self.state = loader, State()
        self.state.num_processes = processes

    def __iter__(self):
        if hasattr(self.loader.dataset, "set_epoch"):
            self.loader.dataset.set_epoch(0)
        yield from self.loader

    def __len__(self):
        return len(self.loader)

class DataLoaderShard(DataLoaderDispatcher):
    pass

class IterableDatasetShard:
    def __init__(self, dataset, processes):
        self.dataset, self.num_processes = dataset, processes

    def __iter__(self):
        for element in self.dataset:
            yield element

class State:
    pass
"""


class Wrapped(IterableDataset[Any]):
    """A user's own wrapper, which has no set_epoch."""

    def __init__(self, dataset: ShardDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("accelerate.data_loader")
    exec(STAND_IN, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def dataset_of(folder: Path, world_size: int = 2) -> ShardDataset:
    return ShardDataset(
        folder, batch_size=4, fields=("label",), decode=None, rank=0, world_size=world_size
    )


REFUSED = r"DataLoader\w+ of Accelerate splits .* among 2 .* \(this is rank 0 of 2\)"


@pytest.mark.parametrize("start", [None, "fork", "spawn"])
def test_a_dispatcher_is_refused_wherever_the_dataset_is_read(
    packed: Packed, accelerate: Any, start: str | None
) -> None:
    workers = {} if start is None else {"num_workers": 1, "multiprocessing_context": start}
    loader = DataLoader(Wrapped(dataset_of(packed([20]))), batch_size=None, **workers)
    with pytest.raises(OptionError, match=REFUSED):
        list(accelerate.DataLoaderDispatcher(loader, 2))
    if start is None:
        assert len(list(accelerate.DataLoaderDispatcher(loader, 1))) == 3


class Unread(DataLoader[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("it is being iterated")


def test_a_dispatcher_is_refused_before_it_reads(packed: Packed, accelerate: Any) -> None:
    # Later only rank 0 would see the error, and the other ranks would wait for it.
    dispatcher = accelerate.DataLoaderDispatcher(
        Unread(dataset_of(packed([20])), batch_size=None), 2
    )
    with pytest.raises(OptionError, match=REFUSED):
        len(dispatcher)
    with pytest.raises(OptionError, match=REFUSED):
        next(iter(dispatcher))


def test_a_sharded_dataset_is_refused(packed: Packed, accelerate: Any) -> None:
    dataset = dataset_of(packed([20]))
    with pytest.raises(OptionError, match=r"IterableDatasetShard of Accelerate .* among 2"):
        list(accelerate.IterableDatasetShard(dataset, 2))
    assert len(list(accelerate.IterableDatasetShard(dataset, 1))) == 3


def test_what_does_not_split_again_is_not_refused(packed: Packed, accelerate: Any) -> None:
    folder = packed([20])
    whole = DataLoader(dataset_of(folder, world_size=1), batch_size=None)
    dispatched = accelerate.DataLoaderDispatcher(whole, 2)
    assert len(list(dispatched)) == len(dispatched) == 5
    part = DataLoader(dataset_of(folder), batch_size=None)
    assert len(list(accelerate.DataLoaderShard(part, 2))) == 3
    for epoch, _ in enumerate(dispatched, 1):  # what is wrapped there is not what is read here
        part.dataset.set_epoch(epoch)
        assert len(list(part)) == 3
