"""Make the random numbers of the order: 64-bit words that are a pure function of (key, place).

How it works. A key names a stream of words; it is mixed from a purpose (SHARDS, SPAN, ...) and the
numbers that the purpose depends on, such as the seed and the epoch. Word k of a stream is
splitmix64's k-th output from that key, so any word can be computed without the words before it.
That is what makes resuming cheap: nothing has to be replayed.

The numbers are splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
OOPSLA 2014). numpy's Generator is never used: it does not promise its streams across versions, and
it does not seek.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Int64s: TypeAlias = NDArray[np.int64]
UInt64s: TypeAlias = NDArray[np.uint64]

# What a key is for. Parts of a key, so that one seed never gives two purposes the same words.
SHARDS: Final = 1  # (seed, epoch): the order of an epoch's shards
SPAN: Final = 2  # (seed, epoch, span): the draws of one span
RECORDS: Final = 3  # (seed, epoch): the permutation of records when the buffer holds them all
PACK: Final = 4  # (seed): the permutation of samples when packing
TRANSFORM: Final = 5  # (seed, epoch): one word per record for random transforms
MIX: Final = 6  # (seed, dataset): the seed of one dataset of a mixture
NODES: Final = 7  # (seed): the order in which shards are dealt to nodes

GAMMA: Final = 0x9E3779B97F4A7C15  # splitmix64's odd step, 2^64 / golden ratio
_MIX1: Final = 0xBF58476D1CE4E5B9  # Stafford's variant 13, as splitmix64 uses it
_MIX2: Final = 0x94D049BB133111EB
MASK: Final = (1 << 64) - 1


def splitmix64(x: UInt64s) -> UInt64s:
    """Apply the finaliser of splitmix64, a bijection of 64-bit words.

    (n,) uint64 -> new (n,) uint64.
    """
    z = x >> np.uint64(30)
    z ^= x
    z *= np.uint64(_MIX1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX2)
    z ^= z >> np.uint64(31)
    return z


def words(key: int, start: int, count: int) -> UInt64s:
    """Return words start .. start + count - 1 of the stream of `key`: (count,) uint64."""
    x = np.arange(count, dtype=np.uint64)
    x *= np.uint64(GAMMA)
    x += np.uint64((key + start * GAMMA) & MASK)
    return splitmix64(x)


def word(key: int, index: int) -> int:
    """Return word `index` of the stream of `key` as a plain int: words(key, index, 1)[0]."""
    z = (key + index * GAMMA) & MASK
    z = ((z ^ (z >> 30)) * _MIX1) & MASK
    z = ((z ^ (z >> 27)) * _MIX2) & MASK
    return z ^ (z >> 31)


def key(*parts: int) -> int:
    """Mix integers (taken modulo 2^64) into one key in [0, 2^64).

    The first part says what the key is for (SHARDS, SPAN, ...). The count of parts is mixed in as
    well, so key(a) and key(a, 0) are unrelated.
    """
    h = len(parts)
    for part in parts:
        h = word(h ^ (int(part) & MASK), 1)
    return h


def permutation(n: int, key: int) -> Int64s:
    """Return a uniform permutation of 0 .. n - 1: (n,) int64, the argsort of n words of `key`."""
    # The words of one key are all different (an odd step, then a bijection), so every argsort is
    # a stable one: numpy's default kind gives the same answer, faster.
    return np.argsort(words(key, 0, n)).astype(np.int64, copy=False)


@lru_cache(maxsize=64)
def _transform_key(seed: int, epoch: int) -> int:
    """Return the key of an epoch's transforms; cached, since each record asks for it."""
    return key(TRANSFORM, seed, epoch)


def draw(seed: int, epoch: int, record: int) -> int:
    """Return one word in [0, 2^64) for the random transform of a record.

    record: the record's number in the dataset. A transform that needs more words takes
    word(draw(...), 1), word(draw(...), 2), ...
    """
    return word(_transform_key(seed, epoch), record)


def draws(seed: int, epoch: int, records: Int64s) -> UInt64s:
    """Return `draw` of each of these records: (n,) int64 -> (n,) uint64."""
    x = records.astype(np.uint64)
    x *= np.uint64(GAMMA)
    x += np.uint64(_transform_key(seed, epoch))
    return splitmix64(x)
