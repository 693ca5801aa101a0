"""The pass after a completed one is the next epoch, in loops of frameworks that set no epoch.

Lightning, Accelerate and the Trainer of transformers, as they come: tests/frameworks/loops_*.py
write down the labels that each epoch of theirs read, and here these are told by shardio's order.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, programs
from support.frameworks import BECOME, HERE, PYTHON, needs_them, numbered

from shardio import ShardDataset

N, STEPS, EPOCHS = 97, 13, 3

Steps = list[list[int]]

pytestmark = [pytest.mark.frameworks, needs_them]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return numbered(tmp_path_factory.mktemp("loops") / "data")


@pytest.fixture(scope="module")
def epochs(folder: Path) -> list[Steps]:
    """The batches of each epoch."""
    dataset = ShardDataset(folder, batch_size=8, fields=("label",), decode=None)
    found = []
    for epoch in range(EPOCHS + 1):
        dataset.set_epoch(epoch)
        found.append([labels.tolist() for (labels,) in dataset])
    assert all(len(one) == STEPS for one in found)
    return found


@pytest.fixture(scope="module")
def stock(folder: Path) -> list[Steps]:
    """The batches that DataLoader makes of each epoch's samples."""
    dataset = ShardDataset(folder, fields=("label",), decode=None)
    found = []
    for epoch in range(EPOCHS + 1):
        dataset.set_epoch(epoch)
        labels = [label for (label,) in dataset]
        found.append([labels[at : at + 8] for at in range(0, N, 8)])
    return found


def ran(folder: Path, name: str) -> Any:
    """What a program wrote down."""
    out = folder.parent / name
    out.mkdir()
    done = programs.run(
        *("-c", BECOME, PYTHON, HERE / f"loops_{name}.py", folder, out), limit_s=LIMIT_S
    )
    assert not done.timed_out and done.code == 0 and not done.left, done
    return json.loads((out / f"{name}.json").read_text())


def cut(steps: Steps, first: int = STEPS) -> list[Steps]:
    """Steps by the epochs of a trainer, of which the first may be a rest."""
    ends = range(first, len(steps) + 1, STEPS)
    return [steps[max(end - STEPS, 0) : end] for end in ends]


def told(seen: Sequence[Steps], epochs: list[Steps]) -> list[int | None]:
    """Which epoch each pass was, in whole or from some step on; None: of no epoch."""
    assert not isinstance(seen, str), seen  # an error
    return [
        next((n for n, one in enumerate(epochs) if steps and one[-len(steps) :] == steps), None)
        for steps in seen
    ]


def lightning_loaders() -> list[str]:
    text = (HERE / "loops_lightning.py").read_text()
    return [line.split('"')[1] for line in text.splitlines() if ": lambda train:" in line]


@pytest.fixture(scope="module")
def lightning(folder: Path) -> Any:
    return ran(folder, "lightning")


@pytest.mark.parametrize("loader", lightning_loaders())
def test_lightning_reads_one_epoch_after_the_other(
    lightning: Any, epochs: list[Steps], loader: str
) -> None:
    assert told(lightning[loader]["fit"], epochs) == [0, 1, 2]


@pytest.mark.parametrize("loader", [n for n in lightning_loaders() if not n.startswith("Data")])
def test_lightning_goes_on_in_the_middle_of_an_epoch(
    lightning: Any, epochs: list[Steps], loader: str
) -> None:
    seen = lightning[loader]["middle"]
    assert told(seen, epochs) == [1, 2]
    assert [len(steps) for steps in seen] == [STEPS - 3, STEPS]


@pytest.mark.parametrize("loader", [n for n in lightning_loaders() if n.startswith("Shard")])
def test_lightning_goes_on_after_the_end_of_an_epoch(
    lightning: Any, epochs: list[Steps], loader: str
) -> None:
    # It tells a loader the epoch by `.sampler.set_epoch`, here after its iter().
    seen = lightning[loader]["end"]
    assert told(seen, epochs) == [1, 2]
    assert [len(steps) for steps in seen] == [STEPS, STEPS]


@pytest.mark.parametrize("loader", [n for n in lightning_loaders() if "DataLoader" in n])
def test_loaders_that_lightning_tells_nothing_begin_anew_after_the_end_of_an_epoch(
    lightning: Any, epochs: list[Steps], loader: str
) -> None:
    # DataLoader has no state, and at an epoch's end Lightning does not hand StatefulDataLoader its
    # own: the loader of docs/order.md, or ShardLoader, goes on.
    assert told(lightning[loader]["end"], epochs) == [0, 1]


@pytest.fixture(scope="module")
def accelerate(folder: Path) -> Any:
    return ran(folder, "accelerate")


CASES = [
    *(
        f"{name}, {loop}"
        for name in ("DataLoader", "DataLoader, 2 workers")
        for loop in ("by_for", "by_range", "prepared")
    ),
    "ShardLoader, 2 workers, by_for",
    "ShardLoader, 2 workers, by_range",
]


@pytest.mark.parametrize("case", CASES)
def test_loops_with_accelerate_read_one_epoch_after_the_other(
    accelerate: Any, epochs: list[Steps], case: str
) -> None:
    assert told(accelerate[case], epochs) == [0, 1, 2]


@pytest.fixture(scope="module")
def trainer(folder: Path) -> Any:
    return ran(folder, "trainer")


def test_the_stock_trainer_reads_one_epoch_after_the_other(
    trainer: Any, stock: list[Steps]
) -> None:
    assert told(cut(trainer["stock"]), stock) == [0, 1, 2]


@pytest.mark.parametrize("case", ["own loader", "own loader, 2 workers", "own loader, ShardLoader"])
def test_the_trainer_with_a_loader_reads_one_epoch_after_the_other(
    trainer: Any, epochs: list[Steps], case: str
) -> None:
    assert told(cut(trainer[case]), epochs) == [0, 1, 2]


def test_workers_of_the_stock_trainer_make_other_batches_of_the_same_epochs(trainer: Any) -> None:
    # DataLoader's own batching: each record once an epoch, in an order that workers change.
    passes = cut(trainer["stock, 2 workers"])
    for steps in passes:
        assert sorted(label for step in steps for label in step) == list(range(N))
    assert len({str(steps) for steps in passes}) == EPOCHS


def test_the_stock_trainer_goes_on_where_its_checkpoint_was_saved(
    trainer: Any, stock: list[Steps]
) -> None:
    seen = cut(trainer["stock, resumed"], STEPS - 3)
    assert [len(steps) for steps in seen] == [STEPS - 3, STEPS]
    assert told(seen, stock) == [1, 2]
