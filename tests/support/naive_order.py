"""The order as plain loops over lists, which all else is compared with."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from shardio.order.epoch import Epoch, Tail
from shardio.order.partition import Partition
from shardio.order.shuffle import SpanOrder

Row = tuple[int, int]  # (shard, record)
T = TypeVar("T")


M64 = 2**64 - 1


def cases(n: int) -> settings:
    return settings(
        max_examples=n,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


def naive_mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def naive_word(key: int, k: int) -> int:
    return naive_mix((key + k * 0x9E3779B97F4A7C15) & M64)


def naive_key(*parts: int) -> int:
    h = len(parts)
    for part in parts:
        h = naive_mix(((h ^ (part & M64)) + 0x9E3779B97F4A7C15) & M64)
    return h


def naive_permutation(n: int, key: int) -> list[int]:
    return sorted(range(n), key=lambda i: naive_word(key, i))


def naive_span(n: int, window: int, key: int) -> list[int]:
    w = min(window, n)
    slot = list(range(w))
    out = []
    for k in range(n):
        m = min(w, n - k)
        j = ((naive_word(key, k) >> 32) * m) >> 32
        out.append(slot[j])
        if k + w < n:
            slot[j] = k + w
        else:
            slot[j] = slot[m - 1]
    return out


def naive_epoch(
    counts: list[int],
    seed: int,
    epoch: int,
    C: int,
    u: int,
    buffer: int | None,
    nodes: int = 1,
    node_spans: int = 1,
) -> tuple[list[Row], list[Row]]:
    """The virtual sequence, and the flat order of the epoch."""
    N = sum(counts)
    U = -(-N // u)
    # Deal unit numbers to spans, as many records to a span as its units have.
    size = [0] * C
    for g in range(U):
        size[g % C] += min(u, N - g * u)
    if buffer is None or buffer >= N:
        rows = [(s, r) for s in range(len(counts)) for r in range(counts[s])]
        virtual = [rows[i] for i in naive_permutation(N, naive_key(3, seed, epoch))]
        window = 1
    elif nodes > 1:
        virtual = naive_nodes(counts, seed, epoch, size, nodes, node_spans)
        window = max(1, -(-buffer // C))
    else:
        shards = naive_permutation(len(counts), naive_key(1, seed, epoch))
        virtual = [(s, r) for s in shards for r in range(counts[s])]
        window = max(1, -(-buffer // C))
    streams, at = [], 0
    for s in range(C):
        span = virtual[at : at + size[s]]
        at += size[s]
        streams.append([span[p] for p in naive_span(size[s], window, naive_key(2, seed, epoch, s))])
    flat = []
    for g in range(U):
        first = (g // C) * u
        flat += streams[g % C][first : first + u]
    return virtual, flat


def naive_nodes(
    counts: list[int], seed: int, epoch: int, size: list[int], nodes: int, node_spans: int
) -> list[Row]:
    """The virtual sequence, where each node keeps to shards of its own. size: of each span."""
    dealt = [
        (shard, record)
        for shard in naive_permutation(len(counts), naive_key(7, seed))
        for record in range(counts[shard])
    ]
    node_of = [span // node_spans % nodes for span in range(len(size))]
    pieces: list[list[list[Row]]] = []  # of each node
    for node in range(nodes):
        count = sum(n for n, own in zip(size, node_of, strict=True) if own == node)
        rows, dealt = dealt[:count], dealt[count:]
        pieces.append([[row for row in rows if row[0] == s] for s in dict(rows)])
    number = 0
    sequences = []
    for own in pieces:
        drawn = []
        for piece in own:
            drawn.append((naive_word(naive_key(1, seed, epoch), number), piece))
            number += 1
        sequences.append([row for _, piece in sorted(drawn) for row in piece])
    virtual = []
    for n, node in zip(size, node_of, strict=True):
        virtual += sequences[node][:n]
        sequences[node] = sequences[node][n:]
    return virtual


def naive_turn(
    first: int, R: int, m: int, C: int, nodes: int = 1, node_spans: int = 1
) -> list[int]:
    """Of a step that begins with this unit, the batch that each of R ranks takes."""
    g = math.gcd(R * m, C)
    begins = [first + m * b for b in range(R)]
    return sorted(
        range(R),
        key=lambda b: (begins[b] % C // node_spans % nodes, begins[b] % g, begins[b] % C, b),
    )


def side_by_side(
    ranks: Sequence[Sequence[T]],
    m: int | None,
    C: int,
    start: int = 0,
    nodes: int = 1,
    node_spans: int = 1,
) -> list[list[T]]:
    """Of each step what the ranks made, in the order of the epoch. m: None without a batch_size."""
    R, steps = len(ranks), []
    for i, made in enumerate(zip(*ranks, strict=True)):
        turn = range(R) if m is None else naive_turn(start + i * R * m, R, m, C, nodes, node_spans)
        steps.append(
            [batch for _, batch in sorted(zip(turn, made, strict=True), key=lambda p: p[0])]
        )
    return steps


def read(share: Partition) -> Iterator[tuple[int, list[Row], list[Row]]]:
    """(step, rows, repeated rows) of each batch of one worker, who touches only its own draws."""
    epoch = share.epoch
    spans: dict[int, SpanOrder] = {}
    for batch in share:
        virtual = []
        for span, first, count in batch.pieces:
            if span not in spans:
                spans[span] = epoch.span_order(span)
            spans[span].seek(first)
            virtual += epoch.position(span, spans[span].take(count)).tolist()
        yield batch.step, located(epoch, virtual), located(epoch, batch.repeats.tolist())


def located(epoch: Epoch, virtual: list[int]) -> list[Row]:
    shard, record = epoch.locate(np.array(virtual, np.int64))
    assert shard.dtype == record.dtype == np.int64
    return list(zip(shard.tolist(), record.tolist(), strict=True))


def read_rank(epoch: Epoch, batch_size: int | None, W: int, **options) -> list[tuple[list, list]]:
    """The batches of one rank in order: (rows, repeated rows), as W workers make them."""
    made = {}
    for worker in range(W):
        share = Partition(epoch, batch_size, worker=worker, num_workers=W, **options)
        for step, rows, repeats in read(share):
            assert step % W == worker and step not in made
            made[step] = (rows, repeats)
        assert len(share.worker_steps) == len(list(share))
    assert sorted(made) == list(range(share.steps))
    return [made[i] for i in range(share.steps)]


TAILS: tuple[Tail, ...] = ("pad", "drop", "exact")


def make(
    counts: Any, seed: int, epoch: int, C: int, u: int, buffer: int | None, **nodes: int
) -> Epoch:
    """An epoch of shards with these many records. nodes: of orders that keep nodes apart."""
    return Epoch(
        np.array(counts, np.int64),
        seed=seed,
        epoch=epoch,
        spans=C,
        unit=u,
        shuffle_buffer=buffer,
        **nodes,
    )


epochs = st.fixed_dictionaries(
    {
        "counts": st.lists(
            st.one_of(st.just(0), st.just(1), st.integers(0, 30)), min_size=0, max_size=9
        ),
        "seed": st.one_of(st.integers(0, 5), st.integers(0, M64)),
        "epoch": st.integers(0, 3),
        "C": st.integers(1, 9),
        "u": st.integers(1, 5),
        "buffer": st.one_of(st.none(), st.integers(0, 12), st.integers(0, 200)),
    }
)

# Small blocks, so that small spans have many; the size must never matter.
spans = st.tuples(
    st.integers(0, 400), st.one_of(st.integers(0, 12), st.integers(0, 450)), st.integers(0, M64)
)
