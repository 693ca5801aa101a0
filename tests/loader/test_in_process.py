"""num_workers=0: batches of the trainer's own process."""

import threading
from pathlib import Path
from typing import Any

import pytest
from support.loading import BATCH, Raises, number, picture, pictures
from torch.utils.data import DataLoader

from shardio import ShardLoader, WorkerError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_options_that_are_passed_to_dataloader_without_workers(folder: Path) -> None:
    dataset = pictures(folder)
    assert ShardLoader(dataset, num_workers=0, prefetch_factor=None).prefetch_factor == 2


def test_without_threads_a_batch_is_made_when_it_is_asked_for(folder: Path) -> None:
    calls: list[int] = []

    def counted(data: bytes) -> Any:
        assert threading.current_thread() is threading.main_thread()
        calls.append(number(data))
        return picture(data)

    with ShardLoader(pictures(folder, decode=counted), num_workers=0, threads=0) as loader:
        iterator = iter(loader)
        assert not calls
        for step in range(1, 4):
            next(iterator)
            assert len(calls) == step * BATCH


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_what_ends_the_trainers_own_loop_ends_it(folder: Path, error: BaseException) -> None:
    """There it is Ctrl-C, or a handler of SIGTERM that calls sys.exit."""
    dataset = pictures(folder, decode=Raises(0, error))
    loader = ShardLoader(dataset, num_workers=0, threads=0)
    for batches in loader, DataLoader(dataset, batch_size=None):
        dataset.set_epoch(0)
        with pytest.raises(type(error)):
            list(batches)
    generator = pictures(folder, decode=Raises(0, GeneratorExit()))  # which is neither
    with pytest.raises(WorkerError, match=r"k/000000\.jpg.*GeneratorExit"):
        list(generator)
