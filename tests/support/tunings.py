"""Datasets that `tune` is tested with, shuffled and in class order."""

from typing import Any

import numpy as np
import pytest

from shardio.tuning import simulate
from shardio.tuning.tune import recommend
from shardio.tuning.tune_result import Row, Tuning

SHARDS = np.array([900] * 12 + [0, 600, 600])  # 12,000 records


ALIGNED = np.array([750] * 16)  # as many, one shard for each span


FEW = np.array([300] * 6 + [0, 200])  # 2,000


N = int(SHARDS.sum())


CLASSES = 200


ORDERED = np.arange(N) * CLASSES // N


SHUFFLED = np.random.default_rng(7).permutation(ORDERED)


OPTIONS: dict[str, Any] = {
    "batch_size": 64, "spans": 16, "mean_bytes": 100_000, "units": True
}  # fmt: skip


PASSES = simulate.PASSES


def recommend_quickly(*arguments: Any, **options: Any) -> Tuning:
    """Look at one pair of epochs: enough here, and a part of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate, "PASSES", 1)
        return recommend(*arguments, **options)


def text_of(found: Tuning) -> str:
    """The text, its lines joined."""
    return " ".join(str(found).split())


def row_of(found: Tuning, buffer: int | None, unit: int) -> Row:
    return next(r for r in found.rows if (r.shuffle_buffer, r.unit) == (buffer, unit))


SMALL = np.array([50, 0, 33, 48])  # 131 records: 10 batches of 12, and 11 records
