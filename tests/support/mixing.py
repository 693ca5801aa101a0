"""Mixtures of small datasets, and the rows that they must have."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from shardio import ShardDataset
from shardio.dataset.decode import ThisRecord
from shardio.dataset.mixture import Mixture
from shardio.dataset.protocol import ShareReader
from shardio.dataset.ranks import Consumers
from shardio.order import rng
from shardio.order.epoch import Epoch
from shardio.order.mixture import Pattern
from shardio.order.partition import Partition
from support.reading import drain
from support.small_datasets import grouped

SIZES = ([23, 0, 41, 3, 30], [1], [5, 6], [2, 0, 17])
TOTALS = [sum(counts) for counts in SIZES]


def opened(folder: Path, **options: Any) -> ShardDataset:
    given = {"shuffle_buffer": 10, "spans": 4, "batch_size": 8} | options
    return ShardDataset(folder, fields=("__key__",), decode=None, **grouped(given))


def mixed(
    folders: Sequence[Path],
    weights: Sequence[float] | None = None,
    length: Any = "first",
    **options: Any,
) -> Mixture:
    return ShardDataset.mix(
        [opened(folder, **options) for folder in folders], weights, length=length
    )


def batches(loader: Any) -> list[list[str]]:
    """All batches of one pass; of a dataset: over its epoch, or the rest that was loaded."""
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(loader.epoch)
    return [list(keys) for (keys,) in loader]


def loaded(mixture: Mixture, workers: int = 0, **options: Any) -> list[list[str]]:
    return batches(drain(DataLoader(mixture, batch_size=None, num_workers=workers, **options)))


def flat(lists: Sequence[Sequence[Any]]) -> list[Any]:
    return [one for items in lists for one in items]


def owner(key: str) -> int:
    return int(key[:1])


def pattern_of(mixture: Mixture) -> Pattern:
    """Whose each row is, by what a saved state says."""
    return Pattern(mixture.state_at(0, 0)["slots"])


def rows_of(mixture: Mixture, epoch: int) -> list[str]:
    """The rows of an epoch, by the words of ShardDataset.mix and the arithmetic of order."""
    pattern, datasets, found = pattern_of(mixture), mixture._datasets, []
    passes: dict[tuple[int, int], list[int]] = {}
    # What every earlier epoch took of each dataset, counted and not computed.
    owners = [pattern.period[n % len(pattern.period)] for n in range(mixture.length)]
    taken = [epoch * owners.count(d) for d in range(len(datasets))]
    for d in owners:
        dataset = datasets[d]
        number, place = divmod(taken[d], dataset.records)
        if (d, number) not in passes:
            options, seed = mixture.options.parts[d], rng.key(rng.MIX, mixture.seed, d)
            passes[d, number] = one_pass(dataset, options, seed, number)
        record = passes[d, number][place]
        found.append(f"{int(dataset.reader.storage.url[-1])}/{record:06d}")
        taken[d] += 1
    return found


def one_pass(dataset: Any, options: Any, seed: int, number: int) -> list[int]:
    """The records of a dataset in its flat order, by order alone."""
    epoch = Epoch(
        dataset.counts,
        seed=seed,
        epoch=number,
        spans=options.spans,
        unit=options.unit,
        shuffle_buffer=options.shuffle_buffer,
    )
    starts = np.cumsum([0, *dataset.counts])
    spans: dict[int, Any] = {}
    found: list[int] = []
    for batch in Partition(epoch, options.unit):
        for span, first, count in batch.pieces:
            walk = spans.setdefault(span, epoch.span_order(span))
            assert walk.drawn == first
            shards, records = epoch.locate(epoch.position(span, walk.take(count)))
            found += (starts[shards] + records).tolist()
    if dataset.selection is not None:
        found = dataset.selection.numbers[found].tolist()
    return found


def consumer(
    mixture: Mixture, epoch: int, workers: int, start: int = 0
) -> list[tuple[list[str], int]]:
    """(keys, valid) of each batch of this rank, as so many workers make them together."""
    each: list[Iterator[tuple[list[str], int]]] = []
    for worker in range(workers):
        share = mixture.share_of(epoch, worker, workers, start)
        each.append(batches_of(mixture.read_share(share, Consumers(workers, 1), mixture.options)))
    batches = itertools.chain.from_iterable(itertools.zip_longest(*each))
    return [batch for batch in batches if batch is not None]


def batches_of(reader: ShareReader) -> Iterator[tuple[list[str], int]]:
    for batch in reader:
        keys = [reader.make(row, ThisRecord())[0] for row in reader.rows(batch)]
        assert len(keys) == batch.size
        yield keys, batch.valid
