"""Deal the shards of a dataset to nodes, for orders that keep each node to shards of its own.

How it works. The shards are permuted once, by the seed alone, and laid end to end. This sequence is
cut into groups, one for each node; a shard at a border is cut in two. In each epoch the pieces of a
group are permuted anew, laid end to end, and fill the group's blocks of spans. Blocks of all groups
take turns, so that the batches of a step come from all groups alike.

    2 nodes, 4 blocks     group 0: pieces 0 1 2 3        group 1: pieces 4 5 6
    epoch 0               block 0: 2 0    1: 5 6         2: 0 3 1    3: 6 4
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .rng import NODES, SHARDS, Int64s, UInt64s, key, permutation, words


class ShardParts(NamedTuple):
    """Hold parts of shards, laid end to end: shard, first record, count of records: (n,) each."""

    shards: Int64s
    firsts: Int64s
    records: Int64s

    @property
    def ends(self) -> Int64s:
        """Return where each piece ends: (n,)."""
        return np.cumsum(self.records, dtype=np.int64)

    def sorted(self, *keys: Int64s | UInt64s) -> ShardParts:
        """Return the pieces sorted, stably, by the last of these keys, then by the one before."""
        order = np.lexsort(keys)
        return ShardParts(self.shards[order], self.firsts[order], self.records[order])

    def cut(self, places: Int64s) -> ShardParts:
        """Return the pieces, cut at these places. None is empty."""
        before, ends = self.ends, np.union1d(self.ends, places[places > 0])
        piece = np.searchsorted(before, ends)
        records = np.diff(ends, prepend=0)
        into = ends - records - (before - self.records)[piece]  # where it begins in its piece
        return ShardParts(self.shards[piece], self.firsts[piece] + into, records)


def deal_shards(
    shard_records: Int64s, blocks: Int64s, *, nodes: int, seed: int, epoch: int
) -> ShardParts:
    """Return the pieces of an epoch, in the order of its blocks.

    shard_records  (shards,) records of each
    blocks         (blocks,) records of each, as many as the shards have; block b is of node
                   b mod nodes
    """
    order = permutation(len(shard_records), key(NODES, seed))
    order = order[shard_records[order] > 0]
    pieces = ShardParts(order, np.zeros_like(order), shard_records[order])
    groups = np.cumsum([blocks[node::nodes].sum() for node in range(nodes)], dtype=np.int64)
    pieces = pieces.cut(groups)
    drawn = words(key(SHARDS, seed, epoch), 0, len(pieces.shards))
    pieces = pieces.sorted(drawn, np.searchsorted(groups, pieces.ends))
    in_turn = np.argsort(np.arange(len(blocks)) % nodes, kind="stable")  # by group
    filled = np.cumsum(blocks[in_turn], dtype=np.int64)
    pieces = pieces.cut(filled)
    return pieces.sorted(in_turn[np.searchsorted(filled, pieces.ends)])
