"""Fetch: every record once, in the order that `order` says, whatever way the bytes take."""

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LIMIT_S
from support.fetching import Watched, expected, opened, read, reader, samples, share
from support.small_datasets import flip, make, payload, shard_files

from shardio.dataset import buffering
from shardio.dataset.fetch import Fetch
from shardio.dataset.reader import Reader
from shardio.dataset.window import RAMP
from shardio.errors import DamageError
from shardio.formats import manifest
from shardio.formats.sample import Sample
from shardio.order import subset as selection
from shardio.storage.location import locate

Packed = Callable[..., Path]
COUNTS = [37, 0, 61, 5, 80, 1, 44]
N = sum(COUNTS)


def check(got: list[tuple[int, Sample]], numbers: list[int]) -> None:
    assert [number for number, _ in got] == numbers
    for number, sample in got:
        assert sample == {
            "__key__": b"k/%06d.jpg" % number,
            "image": payload(number),
            "label": number % 3,
        }


@pytest.fixture
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Makes small test datasets take one of the ways that bytes can take."""
    monkeypatch.setattr(buffering, "RUN", 1000)
    monkeypatch.setattr(buffering, "LEAST_BLOCK", 100)
    monkeypatch.setattr(buffering, "AHEAD", 8)
    if request.param == "page_cache":
        monkeypatch.setattr(buffering, "SMALL", 0)
    if request.param == "in_memory in tiny chunks":
        monkeypatch.setattr("shardio.dataset.window.CHUNK", 3)
        monkeypatch.setattr(buffering, "RUN", 100)
    yield request.param.split()[0]


ways = pytest.mark.parametrize(
    "policy", ["page_cache", "in_memory", "in_memory in tiny chunks", "network"], indirect=True
)


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


@pytest.mark.parametrize("policy", ["in_memory", "network"], indirect=True)
def test_held_bytes_are_counted_and_all_handed_out(packed: Packed, policy: str) -> None:
    got = Fetch(reader(packed([300] * 4), policy == "network"), share([300] * 4, 8))
    most = 0
    for rows in got:
        most = max(most, got.held_bytes)
        list(samples(got, rows))
    assert got.held_bytes == 0
    window = got.share.epoch.window * 8 * got.reader.mean_bytes
    assert window / 2 < most < window + 8 * 2 * buffering.RUN + 8 * 100


@pytest.mark.parametrize("policy", ["network"], indirect=True)
def test_a_full_network_buffer_holds_no_more_and_reads_nothing_twice(
    packed: Packed, policy: str
) -> None:
    counts = [400] * 4
    of = share(counts, 8, shuffle_buffer=400)
    source = reader(packed(counts), True)
    opened(source)
    got = Fetch(source, of, buffer_bytes=20_000, local_consumers=2)
    most = 0
    for rows in got:
        most = max(most, got.held_bytes)
        check(list(samples(got, rows)), rows.numbers.tolist())
    assert 5_000 < most <= 10_000
    check_read_once(got)


def check_read_once(got: Fetch) -> None:
    """Every byte of every record was read, none twice; shards were opened before."""
    storage = got.reader.storage
    assert isinstance(storage, Watched)
    shards = [got.reader.shard(i) for i in range(got.reader.manifest.shards)]
    assert sum(stop - start for _, start, stop in storage.reads) == sum(
        int(shard.sizes.sum()) for shard in shards
    )


@pytest.mark.parametrize("policy", ["network"], indirect=True)
def test_a_ramp_on_a_network_reads_nothing_twice(packed: Packed, policy: str) -> None:
    counts = [400] * 4
    of = reader(packed(counts), True)
    opened(of)
    got = Fetch(of, share(counts, 8, shuffle_buffer=800))
    batches = iter(got)
    for _ in range(4):
        list(samples(got, next(batches)))
    assert isinstance(got.policy, buffering.Held) and len(got.policy._early) > 8
    for rows in batches:
        list(samples(got, rows))
    assert got.held_bytes == 0 and not got.policy._early
    check_read_once(got)


@ways
def test_a_resume_reads_little_of_what_was_read_before(packed: Packed, policy: str) -> None:
    counts = [400] * 4
    of = reader(packed(counts), policy == "network")
    opened(of)
    got = Fetch(of, share(counts, 8, shuffle_buffer=100, start=180))
    read(got)
    storage = of.storage
    assert isinstance(storage, Watched)
    for ranges in (storage.reads, storage.announced):
        traffic = sum(stop - start for _, start, stop in ranges)
        assert traffic < (1600 - 180 * 8 + 150) * of.mean_bytes + 8 * buffering.RUN


@pytest.mark.parametrize(
    "policy", ["in_memory", "in_memory in tiny chunks", "network"], indirect=True
)
def test_what_others_hand_out_of_a_shared_span_is_let_go(packed: Packed, policy: str) -> None:
    counts = [500] * 4
    of = share(counts, 8, unit=8, num_workers=16, worker=3, spans=8)
    got = Fetch(reader(packed(counts), policy == "network"), of)
    assert got.policy.name == policy and (of.spans_read, of.sharers) == (1, 2)
    window = (of.epoch.window + of.epoch.unit) * got.reader.mean_bytes
    last = 0
    for rows in got:
        assert got.held_bytes < 1.5 * window + 2 * buffering.RUN
        last = got.held_bytes
        check(list(samples(got, rows)), rows.numbers.tolist())
    assert last <= of.epoch.unit * 100  # but for what others hand out after this one's last


@pytest.mark.parametrize("policy", ["in_memory"], indirect=True)
def test_a_spans_list_of_held_records_stays_short(packed: Packed, policy: str) -> None:
    counts = [4000]
    got = Fetch(reader(packed(counts)), share(counts, 8, shuffle_buffer=8, spans=1))
    for rows in got:
        list(samples(got, rows))
        assert all(len(span._held) < 200 for span in got._spans.values())


@pytest.mark.parametrize("policy", ["page_cache"], indirect=True)
def test_after_the_start_runs_alone_announce_everything(
    packed: Packed, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [400] * 4
    got = Fetch(reader(packed(counts)), share(counts, 16, unit=8, shuffle_buffer=100))
    alone: list[int] = []
    monkeypatch.setattr(
        got.policy, "announce", lambda places, between: alone.extend(places[2].tolist())
    )
    for step, rows in enumerate(got):
        list(samples(got, rows))
        if step == 20:
            alone.clear()
    assert not alone


@pytest.mark.parametrize("policy", ["page_cache"], indirect=True)
@pytest.mark.parametrize("shuffle_buffer", [1, 60, 400, None])
def test_everything_is_announced_before_it_is_read(
    packed: Packed, policy: str, shuffle_buffer: int | None
) -> None:
    folder = packed(COUNTS * 4)
    of = share(COUNTS * 4, 8, shuffle_buffer=shuffle_buffer)
    got = Fetch(reader(folder), of)
    storage = got.reader.storage
    assert isinstance(storage, Watched)
    opened(got.reader)
    shards = [got.reader.shard(i) for i in range(got.reader.manifest.shards)]
    for rows in got:
        known = set(storage.announced)
        for number in rows.numbers.tolist():
            shard, record = got.reader.locate(number)
            at, name = shards[shard].offset(record), shards[shard].name
            assert any(name == n and start <= at < stop for n, start, stop in known)
        list(samples(got, rows))
    # All of it, and hardly anything twice: only the records of the first batches are.
    announced = sum(stop - start for _, start, stop in storage.announced)
    assert announced < 1.5 * sum(stop - start for _, start, stop in storage.reads)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets of tests count as larger than what is read whole before the first batch."""
    monkeypatch.setattr(buffering, "ALL_BYTES", 0)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("policy", ["page_cache"], indirect=True)
@pytest.mark.parametrize(
    ("shuffle_buffer", "memory", "network", "job"),
    [
        (1000, 100_000, False, {}),
        (None, 100_000, False, {}),
        (None, 1 << 30, True, {}),  # each hint is a request
        (None, 1 << 30, False, {"machines": 2}),  # the other one reads half of it
        (None, 1 << 30, False, {"local_consumers": 600}),  # each would announce all
    ],
)
def test_with_little_memory_just_the_next_batches_are_announced(
    packed: Packed,
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
    shuffle_buffer: int | None,
    memory: int,
    network: bool,
    job: dict[str, int],
) -> None:
    counts = [500] * 4
    monkeypatch.setattr(buffering, "memory_available", lambda: memory)
    of = share(counts, 8, shuffle_buffer=shuffle_buffer)
    got = Fetch(reader(packed(counts), network), of, **job)
    storage = got.reader.storage
    assert isinstance(storage, Watched)
    numbers, handed, ahead, counted = expected(of), 0, 0, 0
    for rows in got:
        check(list(samples(got, rows)), numbers[handed : handed + rows.size])
        handed += rows.size
        ahead += sum(stop - start for _, start, stop in storage.announced[counted:])
        counted = len(storage.announced)
        assert ahead <= (handed + buffering.AHEAD + 8) * got.reader.mean_bytes * 1.2
    places = [(name, start) for name, start, _ in storage.announced]
    assert len(set(places)) == len(places)  # nothing twice


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("policy", ["page_cache"], indirect=True)
@pytest.mark.parametrize("consumer", [{}, {"worker": 1, "num_workers": 2}, {"start": 100}])
def test_a_dataset_that_is_shuffled_as_a_whole_is_announced_in_its_order(
    packed: Packed, policy: str, consumer: dict[str, int]
) -> None:
    counts = [500] * 8
    of = share(counts, 8, shuffle_buffer=None, **consumer)
    got = Fetch(reader(packed(counts)), of)
    storage = got.reader.storage
    assert isinstance(storage, Watched)
    opened(got.reader)
    shards = [got.reader.shard(i) for i in range(8)]
    numbers, handed, steps = expected(of), 0, 0
    batches = iter(got)
    for rows in batches:
        check(list(samples(got, rows)), numbers[handed : handed + rows.size])
        handed += rows.size
        steps += of.num_workers
        if 8 * steps > 4000 / RAMP + 16:
            break
    announced = list(storage.announced)
    for shard in shards:  # all of each, without a gap
        at = shard.offset(0)
        for _, start, stop in sorted(one for one in announced if one[0] == shard.name):
            assert start <= at
            at = max(at, stop)
        assert at == shard.offset(499) + int(shard.sizes[499])
    # In runs, but for records of the first batches that were ahead of them.
    alone = sum(stop - start < buffering.RUN / 2 for _, start, stop in announced)
    assert alone < 0.6 * 4000 / RAMP
    assert len(list(batches)) > 100 and len(storage.announced) == len(announced)  # no more


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("policy", ["page_cache"], indirect=True)
@pytest.mark.parametrize("start", [0, 100, 450])
@pytest.mark.parametrize("batch_size", [8, None])
def test_a_resume_is_ramped_too_where_all_is_announced(
    packed: Packed, policy: str, start: int, batch_size: int | None
) -> None:
    counts = [500] * 8
    units = start if batch_size else 8 * start
    got = Fetch(reader(packed(counts)), share(counts, batch_size, shuffle_buffer=None, start=units))
    storage = got.reader.storage
    assert isinstance(storage, Watched)
    handed = 0
    for rows in got:
        list(samples(got, rows))
        announced = sum(stop - start for _, start, stop in storage.announced)
        drawn = handed + rows.size + (16 if batch_size else 64 + rows.size)
        assert announced < ((RAMP + 1) * drawn) * got.reader.mean_bytes + 2 * buffering.RUN
        handed += rows.size


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("policy", ["page_cache"], indirect=True)
@pytest.mark.parametrize(
    ("step", "consumers", "exact"), [(1, 8, False), (4, 8, True), (4, 1, True), (10, 2, True)]
)
def test_all_is_not_announced_where_each_record_takes_a_call_of_every_consumer(
    packed: Packed, policy: str, step: int, consumers: int, exact: bool
) -> None:
    of = reader(packed([500] * 4))
    chosen = selection.Selection(np.arange(0, 2000, step), of.starts)
    got = Fetch(
        of,
        share(chosen.counts.tolist(), 8, shuffle_buffer=None),
        selection=chosen,
        local_consumers=consumers,
    )
    assert isinstance(got.policy, buffering.NextBatches) == exact
    numbers = [int(chosen.numbers[place]) for place in expected(got.share)]
    check(read(got), numbers)


@pytest.mark.parametrize("policy", ["page_cache"], indirect=True)
@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("consumers", [1, 600])
def test_a_small_dataset_that_is_shuffled_as_a_whole_is_read_before_its_first_batch(
    packed: Packed, policy: str, network: bool, consumers: int
) -> None:
    """In storage order, run by run: announced, or read where hints are not to be trusted."""
    counts = [500, 0, 300]
    of = share(counts, 8, shuffle_buffer=None)
    got = Fetch(
        reader(packed(counts), network), of, local_consumers=consumers, machines=1 + network
    )
    storage = got.reader.storage
    assert isinstance(storage, Watched)
    opened(got.reader)
    batches = iter(got)
    next(batches)
    early = list(storage.reads if network else storage.announced)
    assert storage.announced == ([] if network else early)
    at = 0
    for number in (0, 2):
        shard = got.reader.shard(number)
        place = shard.offset(0)
        while place < shard.offset(counts[number] - 1):
            name, start, stop = early[at]
            assert (name, start) == (shard.name, place)
            at, place = at + 1, stop
        assert place == shard.offset(counts[number] - 1) + int(shard.sizes[-1])
    assert at == len(early) < 1.5 * of.epoch.records * got.reader.mean_bytes / buffering.RUN
    check(read(Fetch(got.reader, of)), expected(of))


@pytest.mark.parametrize("policy", ["page_cache"], indirect=True)
def test_of_a_subset_the_gaps_are_read_too_where_that_saves_calls(
    packed: Packed, policy: str
) -> None:
    """Four records of five: in runs, with what lies between; of one in ten, just these."""
    of = reader(packed([500] * 4))
    storage = of.storage
    assert isinstance(storage, Watched)
    every = np.arange(2000)
    for numbers, calls, part in ((every[every % 5 > 0], 300, 1.0), (every[::10], 200, 0.1)):
        storage.announced.clear()
        chosen = selection.Selection(numbers, of.starts)
        some = share(chosen.counts.tolist(), 8, shuffle_buffer=None)
        next(iter(Fetch(of, some, selection=chosen, local_consumers=8)))
        assert len(storage.announced) <= calls
        announced = sum(stop - start for _, start, stop in storage.announced)
        assert announced == pytest.approx(part * 2000 * of.mean_bytes, rel=0.2)
        wanted = [int(chosen.numbers[place]) for place in expected(some)]
        check(read(Fetch(of, some, selection=chosen)), wanted)


@pytest.mark.usefixtures("large")
def test_before_the_first_sample_no_more_is_announced_than_is_to_be_ahead(packed: Packed) -> None:
    counts = [500] * 4
    got = Fetch(reader(packed(counts)), share(counts, None, shuffle_buffer=None, spans=64))
    storage = got.reader.storage
    assert isinstance(storage, Watched)
    next(iter(got))
    announced = sum(stop - start for _, start, stop in storage.announced)
    assert announced < (buffering.AHEAD + 64) * 1.1 * got.reader.mean_bytes


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("policy", ["page_cache"], indirect=True)
@pytest.mark.parametrize("shuffle_buffer", [2000, None])
def test_the_window_is_not_announced_before_the_first_batch(
    packed: Packed, policy: str, shuffle_buffer: int | None
) -> None:
    counts = [500] * 8
    got = Fetch(reader(packed(counts)), share(counts, 8, shuffle_buffer=shuffle_buffer))
    storage = got.reader.storage
    assert isinstance(storage, Watched)
    batches = iter(got)
    next(batches)
    first = sum(stop - start for _, start, stop in storage.announced)
    # Two batches, and a little between their records: not the window of 2,000.
    assert 0 < first < 20 * (got.reader.mean_bytes + buffering.RUN)
    next(batches)
    second = sum(stop - start for _, start, stop in storage.announced)
    assert second < first + 8 * got.reader.mean_bytes + 8 * 3 * buffering.RUN
    for _ in range(200):
        next(batches)
    later = sum(stop - start for _, start, stop in storage.announced)
    assert later > 2000 * got.reader.mean_bytes


@ways
def test_the_system_reads_ahead_by_itself_only_where_blocks_are_held(
    packed: Packed, policy: str
) -> None:
    got = Fetch(reader(packed(COUNTS), policy == "network"), share(COUNTS, 8))
    read(got)
    storage = got.reader.storage
    assert isinstance(storage, Watched)
    assert len(storage.scattered) == (sum(map(bool, COUNTS)) if policy == "page_cache" else 0)


def test_iterators_of_one_reader_keep_the_advice_of_their_own_reads(packed: Packed) -> None:
    of = reader(packed([5, 5]))
    storage = of.storage
    assert isinstance(storage, Watched)
    of.shard(0)
    assert not storage.scattered
    scattered = of.shard(0, scattered=True)
    assert len(storage.scattered) == 1
    assert of.shard(0) is of.shard(0) is not scattered
    assert of.shard(0, scattered=True) is scattered
    assert of.shard(0).read(3) == scattered.read(3)


@pytest.mark.parametrize("policy", ["page_cache"], indirect=True)
def test_announcements_are_runs_of_adjacent_records(packed: Packed, policy: str) -> None:
    counts = [500] * 8
    got = Fetch(reader(packed(counts)), share(counts, 8, shuffle_buffer=100))
    read(got)
    storage = got.reader.storage
    assert isinstance(storage, Watched)
    sizes = sorted(stop - start for _, start, stop in storage.announced)
    assert sizes[len(sizes) // 2] > 0.8 * buffering.RUN
    assert sizes[len(sizes) * 9 // 10] <= buffering.RUN
    epoch, largest = got.share.epoch, int(got.reader.shard(0).sizes.max())
    # The rows of a piece, and what lies between them: no more than its window moves through.
    assert sizes[-1] <= (epoch.window + epoch.unit) * largest


@pytest.mark.parametrize("policy", ["page_cache"], indirect=True)
@pytest.mark.parametrize("workers", [1, 2])
def test_large_windows_of_a_small_dataset_are_few_requests(
    packed: Packed, policy: str, workers: int
) -> None:
    """What a window needs first is not asked for record by record."""
    counts, asked = [500] * 10, np.zeros((10, 80_000), bool)
    requests = 0
    folder = packed(counts)
    for worker in range(workers):
        part = share(
            counts, 64, shuffle_buffer=2500, spans=64, unit=16, num_workers=workers, worker=worker
        )
        got = Fetch(reader(folder), part)
        read(got)
        storage = got.reader.storage
        assert isinstance(storage, Watched)
        names = {path: i for i, path in enumerate(sorted({p for p, _, _ in storage.announced}))}
        for path, start, stop in storage.announced:
            new = ~asked[names[path], start:stop]
            requests += int(np.diff(new.astype(int), prepend=0).clip(0).sum())
            asked[names[path], start:stop] = True
    assert requests < 1.1 * sum(counts) * got.reader.mean_bytes / buffering.RUN


def test_a_missing_shard_is_named(packed: Packed) -> None:
    folder = packed([5, 5])
    gone = shard_files(folder)[1]
    gone.unlink()
    of = reader(folder)
    of.shard(0)
    with pytest.raises(DamageError, match=rf"{gone.name}: the manifest names .* 5 records"):
        of.shard(1)


def test_a_foreign_shard_is_refused(packed: Packed) -> None:
    folder = packed([5, 5])
    one, other = shard_files(folder)
    one.write_bytes(other.read_bytes())
    with pytest.raises(DamageError, match="shard number"):
        reader(folder).shard(0)


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
    assert seen == expected(got.share)[: len(seen)]


def open_shards(folder: Path) -> list[int]:
    """The numbers of the shards that this process has open, as often as it has."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            if path.parent == folder:
                found.append(int(path.name.partition("-")[0]))
    return sorted(found)


def test_few_shards_are_open_at_once(packed: Packed) -> None:
    folder = packed([2] * 20)
    of = reader(folder, limit=3)
    for shard in [*range(20), 3, 17, 3]:
        assert of.shard(shard).records == 2
    assert open_shards(folder) == [3, 17, 19]
    for shard in (5, 6):
        of.shard(shard)
    assert open_shards(folder) == [3, 5, 6]  # what was used longest ago is closed


def test_a_shard_in_use_survives_its_eviction(packed: Packed) -> None:
    of = reader(packed([2] * 4), limit=1)
    first = of.shard(0)
    for shard in (1, 2, 3):
        of.shard(shard)
    assert first.read(1)["image"] == payload(1)


def test_a_pickled_reader_holds_no_open_shards(packed: Packed) -> None:
    folder = packed([5, 5])
    of = Reader(locate(folder), manifest.load(locate(folder)), limit=7)
    of.shard(0)
    twin = pickle.loads(pickle.dumps(of))
    assert open_shards(folder) == [0] and twin.limit == 7
    assert twin.shard(1).read(0)["image"] == payload(5)


FEW_DESCRIPTORS = """
import os, resource, sys
from shardio.dataset import reader as readers
from shardio.formats import manifest
from shardio.storage.location import locate
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
storage = locate(sys.argv[1])
found = manifest.load(storage)
assert found.shards == 80
default = readers.Reader(storage, found)
assert default.limit == 16
greedy = [readers.Reader(storage, found, limit=80) for _ in range(2)]
for reader in (default, *greedy):
    for _ in range(2):
        for shard in range(80):
            assert reader.shard(shard).records == 1
assert len(default._opened) + sum(len(reader._opened) for reader in greedy) < 64
kept = []
try:
    while True:
        kept.append(os.dup(0))
except OSError:
    pass
readers.Reader(storage, found).shard(5)  # the other readers give theirs back
"""


def test_few_descriptors_are_enough_for_many_shards(packed: Packed) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FEW_DESCRIPTORS, packed([1] * 80)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_opens_its_own_descriptors(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = packed([5, 5])
    of = reader(folder)
    of.shard(0)
    opening, go_on, parent = threading.Event(), threading.Event(), os.getpid()
    opened_by_child = []
    real = of.storage.open

    def slow(name: str, known: Any = None) -> Any:
        opening.set()
        if os.getpid() == parent:
            go_on.wait(LIMIT_S)
        else:
            opened_by_child.append(name)
        return real(name)

    monkeypatch.setattr(of.storage, "open", slow)
    thread = threading.Thread(target=of.shard, args=(1,))
    thread.start()
    assert opening.wait(LIMIT_S)  # this thread is opening a shard at the fork
    code = 1
    child = os.fork()
    if child == 0:
        try:
            assert of.shard(0).read(1)["image"] == payload(1)
            assert opened_by_child == [shard_files(folder)[0].name]
            code = 0
        finally:
            os._exit(code)
    go_on.set()
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
    assert open_shards(folder) == [0, 1]


def test_threads_share_a_reader(packed: Packed) -> None:
    of = reader(packed([3] * 40), limit=2)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(300):
                number = (i * 7 + seed * 13) % 120
                shard, record = of.locate(number)
                assert of.shard(shard).read(record)["image"] == payload(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


RSS = """
import sys, resource
from pathlib import Path
from typing import Any
from shardio.dataset.fetch import Fetch
from shardio.dataset.reader import Reader, read
from shardio.formats import manifest
from shardio.order.epoch import Epoch
from shardio.order.partition import Partition
from shardio.storage.location import locate
def private():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) >> 10
storage = locate(sys.argv[1])
reader = Reader(storage, manifest.load(storage))
def run(buffer):
    epoch = Epoch(reader.manifest.shard_records, seed=0, epoch=0, spans=64,
                  unit=8, shuffle_buffer=buffer)
    got = Fetch(reader, Partition(epoch, 64))
    most = 0
    for rows in got:
        for _ in map(read, got.rows(rows)):
            pass
        most = max(most, private())
    return got.policy.name, most
before = private()
policy, most = run(int(sys.argv[2]))
print(policy, most - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("size, records", [(900, 60_000), (100_000, 1_200), (3_000_000, 60)])
def test_the_window_costs_a_process_little_memory(tmp_path: Path, size: int, records: int) -> None:
    body = os.urandom(size)
    folder = make(tmp_path / "data", [records // 4] * 4, image=lambda i: body)
    buffer = 10_000 if records > 10_000 else records - 1
    done = subprocess.run(
        [sys.executable, "-c", RSS, folder, str(buffer)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    policy, grown = done.stdout.split()
    assert policy == ("in_memory" if size < 1000 else "page_cache")
    assert int(grown) < 32
