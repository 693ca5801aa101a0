"""A pass over a dataset, which workers of either kind make the batches of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..dataset.stream import Consumers, Items, Stream
from ..order.options import Options

OVER = "this pass was interrupted, or its loader closed: iterate anew"


class Pass(NamedTuple):
    """What is to be read: the batches of one rank, from a place in an epoch to its end."""

    options: Options
    epoch: int
    start: int  # units consumed before
    rank: int
    world_size: int
    consumers: Consumers

    def reads(self, stream: Stream, worker: int, workers: int) -> Iterator[Items]:
        """What one worker makes its batches of."""
        stream.options = self.options
        share = self.options.share(
            self.options.epoch(stream.counts, self.epoch),
            rank=self.rank,
            world_size=self.world_size,
            worker=worker,
            num_workers=workers,
            start=self.start,
        )
        return stream._read(share, self.consumers)
