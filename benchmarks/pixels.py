"""Raw pixels (`pack --encode raw`) of CIFAR by ShardLoader and DataLoader: images/s, CPU, memory.

Batches of 512, nothing to decode; each record is checked. Rounds are those of `loader`, of twenty
epochs each. `resident="ram"` is how data that fit into memory are fed: they are read and checked
once, before the rounds, so its row is no stream's and the target for streams is not its.
"""

from __future__ import annotations

from . import data, loader
from .harness import Result


def run(source: data.Data, result: Result) -> None:
    loader.raw(source, result)
