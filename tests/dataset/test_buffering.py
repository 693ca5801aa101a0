"""Where bytes wait: what each policy announces, holds and reads, and when."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.fetching import (
    COUNTS,
    Watched,
    check,
    expected,
    opened,
    read,
    reader,
    samples,
    share,
    ways,
)
from support.small_datasets import make

from shardio.dataset import buffering
from shardio.dataset.fetch import Fetch
from shardio.dataset.window import RAMP
from shardio.order import subset as selection

Packed = Callable[..., Path]


@pytest.mark.parametrize("policy", ["in_memory", "network"], indirect=True)
def test_held_bytes_are_counted_and_all_handed_out(packed: Packed, policy: str) -> None:
    got = Fetch(reader(packed([300] * 4), policy == "network"), share([300] * 4, 8))
    most = 0
    for rows in got:
        most = max(most, got.held_bytes)
        list(samples(got, rows))
    assert got.held_bytes == 0
    window = got.partition.epoch.window * 8 * got.reader.mean_bytes
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
        int(shard.sizes[:].sum()) for shard in shards
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
    assert sum(len(span.early) for span in got._spans.values()) > 8
    for rows in batches:
        list(samples(got, rows))
    assert got.held_bytes == 0 and not any(span.early for span in got._spans.values())
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
        assert ahead <= (handed + buffering.ROWS_AHEAD + 8) * got.reader.mean_bytes * 1.2
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
    numbers = [int(chosen.numbers[place]) for place in expected(got.partition)]
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
    assert announced < (buffering.ROWS_AHEAD + 64) * 1.1 * got.reader.mean_bytes


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
    epoch, largest = got.partition.epoch, int(got.reader.shard(0).sizes[:].max())
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
