"""Who reads an epoch together. Ranks, found or given; under torchrun: equal steps, one order."""

import inspect
import json
import pickle
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.multiprocessing
from support import LIMIT_S, programs, rank_programs, reading, small_datasets
from support.rank_programs import (
    CASES,
    EPOCHS,
    GLOBAL_BATCH,
    TAILS,
    Row,
    new_model,
    train,
    training,
)
from support.reading import batches, keyed
from torch.nn.functional import cross_entropy

import shardio
from shardio import CenterCrop, OptionError

Packed = Callable[..., Path]
ROOT = Path(__file__).resolve().parent.parent.parent
COUNTS = [1, 0, 37, 5, 14, 2, 24]  # 83 records: 5 full global batches, and 3 records
N = sum(COUNTS)
KEYS = [f"k/{i:06}.jpg" for i in range(N)]

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Job(NamedTuple):
    """What the ranks of one run of torchrun wrote down."""

    world_size: int
    folder: Path
    out: Path
    ranks: list[dict[str, Any]]

    def epochs(self, tail: str, workers: int) -> list[list[list[Row]]]:
        """The global batches of each epoch: at each step, the rows of rank 0, 1, ..."""
        each = [rank[f"{tail} {workers}"]["epochs"] for rank in self.ranks]
        return [
            [[*chain(*parts)] for parts in zip(*steps, strict=True)]  # strict: equally many steps
            for steps in zip(*each, strict=True)
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_datasets.make(
        tmp_path_factory.mktemp("ranks") / "data", COUNTS, image=small_datasets.jpeg
    )


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def job(request: pytest.FixtureRequest, folder: Path) -> Job:
    out = folder.parent / f"{request.param}"
    out.mkdir()
    done = programs.run(
        *("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(request.param)),
        *(rank_programs.__file__, folder, out),
        limit_s=LIMIT_S,
        warm=True,
    )
    assert not done.timed_out and done.code == 0 and not done.left, str(done)
    ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(request.param)]
    return Job(request.param, folder, out, ranks)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """One process, the same global batch: by tail the global batches of each epoch, the model."""
    seen = {}
    for tail in TAILS:
        model = new_model()
        seen[tail] = train(model, training(folder, tail, GLOBAL_BATCH), 0), model.state_dict()
    return seen


every_case = pytest.mark.parametrize("tail, workers", CASES)


@every_case
def test_all_ranks_take_equally_many_steps(job: Job, tail: str, workers: int) -> None:
    steps = N // GLOBAL_BATCH if tail == "drop" else -(-N // GLOBAL_BATCH)
    for rank in job.ranks:
        case = rank[f"{tail} {workers}"]
        assert [len(epoch) for epoch in case["epochs"]] == [steps] * EPOCHS
        assert case["length"] == steps
        for epoch in case["epochs"]:
            assert {len(rows) for rows in epoch} == {GLOBAL_BATCH // job.world_size}


@every_case
def test_each_epoch_keeps_what_its_tail_promises(job: Job, tail: str, workers: int) -> None:
    left_out = set()
    for epoch in job.epochs(tail, workers):
        rows = [*chain(*epoch)]
        counts = Counter(key for key, *_ in rows)
        if tail == "drop":
            assert set(counts.values()) == {1} and 0 < N - len(counts) < GLOBAL_BATCH
            left_out.add(frozenset(KEYS) - set(counts))
        else:
            assert sorted(counts) == KEYS and max(counts.values()) == 2
            assert 0 < len(rows) - N < GLOBAL_BATCH
        if tail == "exact":
            assert sorted(key for key, _, valid in rows if valid) == KEYS
    assert len(left_out) == (EPOCHS if tail == "drop" else 0)  # others each epoch


@every_case
def test_the_global_batches_are_those_of_one_process(
    job: Job, alone: dict[str, Any], tail: str, workers: int
) -> None:
    expected, _ = alone[tail]
    for epoch, (got, one) in enumerate(zip(job.epochs(tail, workers), expected, strict=True)):
        if tail == "pad":  # one process has nothing to pad; the rows before that are the same
            assert [len(rows) for rows in one] == [GLOBAL_BATCH] * 5 + [3]
            got[-1] = got[-1][:3]
        elif tail == "exact":
            got, one = ([[row for row in b if row[2]] for b in batches] for batches in (got, one))
        assert got == one, f"epoch {epoch}"
    first, second, third = ([row[0] for rows in epoch for row in rows] for epoch in expected)
    assert first != second != third != first


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_train_the_model_that_one_process_trains(
    job: Job, alone: dict[str, Any], workers: int
) -> None:
    # With full batches only, the mean of the ranks' gradients is the gradient of the global batch.
    _, expected = alone["drop"]
    for rank in range(job.world_size):
        got = torch.load(job.out / f"drop-{workers}-{rank}.pt")
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12)
    untrained = new_model().state_dict()
    assert not any(torch.allclose(expected[name], untrained[name]) for name in expected)


@every_case
def test_validation_of_ranks_is_that_of_one_process(job: Job, tail: str, workers: int) -> None:
    data = shardio.open(job.folder, fields=("image", "label"), transform=CenterCrop(8))
    images, labels = shardio.collate([data[i] for i in range(N)])
    model = new_model()
    model.load_state_dict(torch.load(job.out / f"{tail}-{workers}-0.pt"))
    with torch.no_grad():
        scores = model(images)
    right = int((scores.argmax(1) == labels).sum())
    loss = cross_entropy(scores, labels).item()
    assert 0 < right < N
    for rank in job.ranks:
        case = rank[f"{tail} {workers}"]
        assert case["metrics"] == [right / N, pytest.approx(loss, rel=1e-9)]
        assert case["steps"] == -(-N // (4 * job.world_size))


def test_the_page_shows_the_validation_that_was_run() -> None:
    code = inspect.getsource(rank_programs.validate)
    assert code in (ROOT / "docs" / "order.md").read_text()
    assert len(code.splitlines()) <= 10


# --- where ranks are found ------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    yield


def test_ranks_are_given(packed: Packed) -> None:
    folder = packed(reading.COUNTS)
    dataset = keyed(folder, rank=1, world_size=3)
    assert len(dataset) == 33
    for rank, world_size in ((None, 3), (1, None)):
        with pytest.raises(OptionError, match="give both, or neither"):
            keyed(folder, rank=rank, world_size=world_size)
    with pytest.raises(OptionError, match="rank is 3: expected a whole number, 0 to 2"):
        keyed(folder, rank=3, world_size=3)


def test_ranks_come_from_the_launcher(packed: Packed, launched: None) -> None:
    folder = packed(reading.COUNTS)
    dataset = keyed(folder, batch_size=4)
    assert dataset.ranks() == (1, 3) and len(dataset) == 9
    assert keyed(folder, rank=1, world_size=3).ranks() == (1, 3)
    with pytest.raises(OptionError, match=r"rank 0 of 1 was given, but the launcher .* 1 of 3"):
        keyed(folder, rank=0, world_size=1)


def test_ranks_that_are_no_numbers_are_refused(
    packed: Packed, launched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(OptionError, match="says rank 'first' of '3'"):
        keyed(packed(reading.COUNTS))


@pytest.mark.filterwarnings("ignore:epoch .* is being read again")
def test_a_copy_made_before_the_ranks_are_known_finds_them(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = keyed(packed(reading.COUNTS), batch_size=4)
    copies = [dataset.select(range(reading.N)), pickle.loads(pickle.dumps(dataset))]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    expected = batches(dataset)
    for copied in copies:
        assert len(expected) == 9
        for workers in (2, 0):
            copied.set_epoch(0)
            assert batches(copied, workers) == expected


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_spawned_workers_know_the_rank_of_their_parent(
    packed: Packed, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    folder = packed(reading.COUNTS)
    expected = batches(keyed(folder, batch_size=4, rank=1, world_size=3))
    dataset = keyed(folder, batch_size=4)
    # As torch.distributed would say, which a spawned worker does not know.
    monkeypatch.setattr("shardio.dataset.ranks._found_ranks", lambda: ((1, 3), "a test"))
    assert batches(dataset, workers, multiprocessing_context="spawn") == expected


def test_a_pickle_made_before_the_ranks_exist_does_not_fix_them(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pickle.dumps(keyed(packed(reading.COUNTS), batch_size=4))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert pickle.loads(data).ranks() == (1, 3)  # as with mp.spawn(train, args=(dataset,))


def _train(rank: int, folder: str, out: str) -> None:
    store = torch.distributed.FileStore(f"{out}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        dataset = keyed(Path(folder), batch_size=8)
        Path(out, f"{rank}").write_bytes(pickle.dumps(batches(dataset, 2)))
    finally:
        torch.distributed.destroy_process_group()


def test_ranks_come_from_torch_distributed(packed: Packed, tmp_path: Path) -> None:
    folder = packed(reading.COUNTS)
    torch.multiprocessing.start_processes(
        _train, (str(folder), str(tmp_path)), nprocs=2, start_method="fork"
    )
    for rank in range(2):
        got = pickle.loads((tmp_path / f"{rank}").read_bytes())
        assert got == batches(keyed(folder, batch_size=8, rank=rank, world_size=2))


@pytest.mark.parametrize("parts", [1, 2])
def test_what_would_split_the_part_of_a_rank_again_is_refused(
    packed: Packed, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """As Accelerate does, which is not installed for most tests."""
    module = types.ModuleType("accelerate.data_loader")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    own = "class {}:\n    def first(self, loader):\n        return next(iter(loader))"
    for name in ("DataLoaderDispatcher", "DataLoaderShard"):
        exec(own.format(name), module.__dict__)
        owner = getattr(module, name)()
        owner.state = types.SimpleNamespace(num_processes=parts)
        ours = keyed(packed([16], name), batch_size=4, rank=1, world_size=2)
        if name == "DataLoaderDispatcher" and parts > 1:
            with pytest.raises(OptionError, match=f"DataLoaderDispatcher .* {parts} processes"):
                owner.first(ours)
        else:
            assert len(owner.first(ours)[0]) == 4
