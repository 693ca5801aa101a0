"""Fetch: every record once, in the order that `order` says, whatever way the bytes take."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.fetching import COUNTS, check, expected, read, reader, samples, share, ways
from support.small_datasets import flip, payload, shard_files

from shardio.dataset import buffering
from shardio.dataset.fetch import Fetch
from shardio.errors import DamageError

Packed = Callable[..., Path]
N = sum(COUNTS)


@ways
@pytest.mark.parametrize("batch_size", [None, 1, 8, 12, 64, 500])
@pytest.mark.parametrize("shuffle_buffer", [0, 1, 20, 60, 160, N - 1, None])
def test_every_way_gives_the_order_of_the_share(
    packed: Packed, policy: str, batch_size: int | None, shuffle_buffer: int | None
) -> None:
    of = share(COUNTS, batch_size, shuffle_buffer=shuffle_buffer)
    got = Fetch(reader(packed(COUNTS), policy == "network"), of)
    if shuffle_buffer is not None and shuffle_buffer < 100:
        assert got.policy.name == policy
    check(read(got), expected(of))
    assert sorted(expected(of)) == list(range(N))


@ways
@pytest.mark.parametrize("consumers", [(1, 2), (1, 3), (2, 1), (2, 3), (3, 5), (7, 9)])
@pytest.mark.parametrize("batch_size", [None, 6, 16])
def test_consumers_that_share_spans_read_their_own_records(
    packed: Packed, policy: str, consumers: tuple[int, int], batch_size: int | None
) -> None:
    world_size, num_workers = consumers
    folder = packed(COUNTS)
    seen: list[int] = []
    for rank in range(world_size):
        for worker in range(num_workers):
            of = share(
                COUNTS,
                batch_size,
                rank=rank,
                world_size=world_size,
                worker=worker,
                num_workers=num_workers,
                tail="exact",
            )
            got = Fetch(reader(folder, policy == "network"), of, machines=world_size)
            batches = [(rows, list(samples(got, rows))) for rows in got]
            check([pair for _, pairs in batches for pair in pairs], expected(of))
            for rows, pairs in batches:
                assert rows.size == len(pairs)
                seen += [number for number, _ in pairs[: rows.valid]]
            assert got.held_bytes <= buffering.HELD_BYTES
    assert sorted(seen) == list(range(N))


@ways
@pytest.mark.parametrize("start", [1, 5, 20, 27])
def test_a_start_in_the_middle_gives_the_rest_of_the_epoch(
    packed: Packed, policy: str, start: int
) -> None:
    whole, rest = share(COUNTS, 8), share(COUNTS, 8, start=start)
    assert expected(rest) == expected(whole)[start * 8 :]
    check(read(Fetch(reader(packed(COUNTS), policy == "network"), rest)), expected(rest))


@ways
@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("consumers", [(1, 1), (4, 1), (4, 2)])
def test_pieces_of_shards_are_read_to_their_ends_alone(
    packed: Packed, policy: str, nodes: int, consumers: tuple[int, int]
) -> None:
    """A shard at the border of two nodes' groups is cut, and anything may follow its piece."""
    ranks, workers = consumers
    folder = packed(COUNTS)
    seen: list[int] = []
    for rank in range(ranks):
        for worker in range(workers):
            of = share(
                COUNTS,
                4,
                unit=2,
                spans=16,
                nodes=nodes,
                shuffle_buffer=40,
                rank=rank,
                world_size=ranks,
                worker=worker,
                num_workers=workers,
                tail="drop",
            )
            got = Fetch(reader(folder, policy == "network"), of, machines=nodes)
            check(read(got), expected(of))
            seen += expected(of)
    assert len(seen) == len(set(seen)) == N // (4 * ranks) * 4 * ranks


@ways
@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0], [1], [0, 1, 0], [3], [1] * 30])
def test_tiny_datasets(packed: Packed, policy: str, counts: list[int]) -> None:
    for shuffle_buffer in (0, 2, None):
        of = share(counts, 4, shuffle_buffer=shuffle_buffer, tail="exact")
        got = Fetch(reader(packed(counts), policy == "network"), of)
        check(read(got), expected(of))


@ways
def test_damage_is_found_when_the_record_is_handed_out(packed: Packed, policy: str) -> None:
    folder = packed([50, 50])
    path = shard_files(folder)[1]
    at = path.read_bytes().index(payload(70)) + 3
    flip(path, at)
    got = Fetch(reader(folder, policy == "network"), share([50, 50], 4))
    seen = []
    with pytest.raises(DamageError, match=rf"{path.name}: record 20 at byte .*k/000070.jpg"):
        for rows in got:
            for number, _ in samples(got, rows):
                seen.append(number)
    assert 70 not in seen
    assert seen == expected(got.partition)[: len(seen)]
