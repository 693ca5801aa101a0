"""Ranks of torch.distributed, started by torchrun: equal steps, one order, exact validation."""

import inspect
import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import LIMIT_S, programs, rank_programs, small_datasets
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
from torch.nn.functional import cross_entropy

import shardio
from shardio import CenterCrop

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
