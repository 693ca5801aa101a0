"""Datasets that go on from saved states, and what they give."""

import json
from pathlib import Path
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from shardio import ShardDataset
from support.naive_order import side_by_side
from support.reading import batches, flat, keyed

Batches = list[list[str]]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a checkpoint; a state is plain and small."""
    text = json.dumps(state)
    assert len(text) < 1024
    again: dict[str, Any] = json.loads(text)
    return again


def resumed(folder: Path, state: dict[str, Any], **options: Any) -> ShardDataset:
    dataset = keyed(folder, **options)
    dataset.load_state_dict(through_json(state))
    return dataset


def stateful(dataset: ShardDataset, workers: int, **options: Any) -> Any:
    return StatefulDataLoader(dataset, batch_size=None, num_workers=workers, **options)


def taken(loader: Any, count: int | None = None) -> Batches:
    """The keys of the next batches; all of them, or so many."""
    found: Batches = []
    for (keys,) in loader:
        found.append(list(keys))
        if len(found) == count:
            break
    return found


def globally(folder: Path, world_size: int, workers: int = 0, **options: Any) -> Batches:
    """The global batches: those of all ranks, side by side."""
    state = options.pop("state", None)
    epoch = options.pop("epoch", None)
    each = []
    for rank in range(world_size):
        dataset = keyed(folder, rank=rank, world_size=world_size, **options)
        if state is not None:
            dataset.load_state_dict(through_json(state))
        if epoch is not None:
            dataset.set_epoch(epoch)
        each.append(batches(dataset, workers))
    units = dataset.batch_size // dataset.options.unit
    start = 0 if state is None else state["units"]
    return [flat(step) for step in side_by_side(each, units, dataset.options.spans, start)]
