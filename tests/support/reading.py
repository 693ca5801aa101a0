"""What a dataset gives: batches, samples, and the keys of its records."""

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from shardio import ShardDataset
from support.small_datasets import of_order

COUNTS = [23, 0, 41, 3, 30]


N = sum(COUNTS)


KEYS = [f"k/{i:06d}.jpg" for i in range(N)]


def keyed(folder: Path, **options: Any) -> ShardDataset:
    """Yields keys only: a batch is a list of them."""
    given = {"shuffle_buffer": 30, "spans": 8} | options
    return ShardDataset(folder, fields=("__key__",), decode=None, **of_order(given))


def batches(dataset: ShardDataset, workers: int = 0, **options: Any) -> list[list[str]]:
    """All batches of one pass over the dataset's epoch, or of its rest that was loaded.

    In sample mode, each sample is a batch of one.
    """
    dataset.set_epoch(dataset.epoch)
    items = drain(DataLoader(dataset, batch_size=None, num_workers=workers, **options))
    return [list(item[0]) if dataset.batch_size is not None else [item[0]] for item in items]


def drain(loader: DataLoader[Any]) -> list[Any]:
    """list(loader) that ends workers at once when it raises; torch takes 5 s a worker for that."""
    iterator = iter(loader)
    try:
        return list(iterator)
    finally:
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            iterator._shutdown_workers()


def flat(lists: list[list[str]]) -> list[str]:
    return [key for keys in lists for key in keys]
