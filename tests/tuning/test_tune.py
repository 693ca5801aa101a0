"""Tuning the shuffle buffer: rows are judged as it says, and the right one is recommended."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.small_datasets import flip, make, shard_files
from support.tunings import (
    ALIGNED,
    FEW,
    OPTIONS,
    ORDERED,
    PASSES,
    SHARDS,
    SHUFFLED,
    SMALL,
    N,
    row_of,
    text_of,
)

from shardio import Order, ShardDataset
from shardio.dataset import sequence
from shardio.dataset.buffering import REQUEST, choose_policy
from shardio.dataset.fetch import Fetch
from shardio.dataset.reader import Reader, open_reader
from shardio.errors import OptionError
from shardio.order.epoch import Epoch, default_unit
from shardio.order.options import SHUFFLE_BUFFER
from shardio.order.partition import Partition
from shardio.storage.local import LocalDirectory
from shardio.storage.options import Storage
from shardio.tuning import simulate
from shardio.tuning.tune import labels_of, recommend, tune, units_to_try
from shardio.tuning.tune_result import Tuning

# --- the sanity that a user expects ---------------------------------------------------------------


pytestmark = pytest.mark.usefixtures("one_pass")


def test_the_default_is_kept_where_nothing_is_better(shuffled: Tuning) -> None:
    """12,000 records: all are shuffled, and that is the answer, with a line that sets nothing."""
    default = shuffled.default
    assert default is not None and default.shuffle_buffer is None and default.will_do
    assert shuffled.best is default and shuffled.keeps_default
    assert "Keep the default, a shuffle of all 12,000 records (1.1 GiB)" in text_of(shuffled)
    assert "Nothing to set." in text_of(shuffled)
    usual = recommend(SHARDS, SHUFFLED, batch_size=64, mean_bytes=100_000)
    assert usual.call == 'ShardDataset("out/", batch_size=64)'
    part = recommend(SHARDS, SHUFFLED, batch_size=64, mean_bytes=100_000, path=None)
    assert part.call == "" and str(part).endswith("Nothing to set.")


def test_a_shuffled_pack_mixes_in_a_small_buffer_of_small_units(shuffled: Tuning) -> None:
    assert row_of(shuffled, 500, 4).good and not shuffled.in_class_order
    whole = row_of(shuffled, 500, 64)
    assert whole.mixes and whole.again > 0.3 and not whole.renews


def test_a_pack_in_class_order_is_to_be_packed_again(ordered: Tuning) -> None:
    """Also where the default, a shuffle of all, mends it."""
    assert ordered.in_class_order and ordered.keeps_default
    assert "The pack is in class order" in text_of(ordered)
    assert "pack it again, shuffled: `shardio pack SRC OUT`" in text_of(ordered)
    less = recommend(SHARDS, ORDERED, memory=250_000_000, **OPTIONS)
    assert less.best is None and less.in_class_order
    assert "No buffer within 238.4 MiB mixes as well" in text_of(less)
    assert "pack it again, shuffled: `shardio pack SRC OUT`. Then the default will do" in text_of(
        less
    )
    assert less.least_bad is not None and not less.least_bad.good and less.least_bad.fits
    small = row_of(ordered, 100, 64)
    assert small.classes < ordered.uniform / 10 and not small.mixes


@pytest.mark.parametrize("batch_size", [4, 60])
def test_a_tiny_shuffled_pack_is_not_said_to_be_in_class_order(
    batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that moves few records deals the same batches in each epoch: these few are noise."""
    monkeypatch.setattr(simulate, "PASSES", PASSES)
    labels = np.arange(120) // 24
    mixes = []
    for seed in range(3):
        shuffled = np.random.default_rng(seed).permutation(labels)
        found = recommend(np.array([120]), shuffled, batch_size=batch_size, mean_bytes=1700)
        assert found.keeps_default and not found.in_class_order
        assert "class order" not in str(found)
        mixes.append(found.rows[0].mixes)
    assert not all(mixes)  # or the judgement was not needed
    ordered = recommend(np.array([120]), labels, batch_size=batch_size, mean_bytes=1700)
    assert ordered.in_class_order and "The pack is in class order" in text_of(ordered)


@pytest.mark.parametrize("batch_size", [32, 64, 128, 256, 1024])
def test_the_default_does_for_shuffled_packs_of_any_size(
    batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal shards are the hardest: spans and shards are the same ones in every epoch."""
    monkeypatch.setattr(simulate, "SAMPLED", 1 << 16)
    for shards, mean, classes in (
        ([1562] * 16 + [7], 110_000, 1000),  # just above what is shuffled as a whole
        ([30] * 16 + [20], 110_000, 500),
    ):
        records = sum(shards)
        if records < batch_size:
            continue
        labels = np.random.default_rng(batch_size).permutation(np.arange(records) % classes)
        found = recommend(
            np.array(shards), labels, batch_size=batch_size, mean_bytes=mean, memory="2GiB"
        )
        assert found.keeps_default, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [32, 64, 128, 256, 1024])
@pytest.mark.parametrize("shards", [[1562] * 16 + [7], [250] * 400], ids=["few", "many"])
def test_the_default_does_for_18_of_20_seeds(
    batch_size: int, shards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another order and another packing each, looked at as long as a user's own `tune`."""
    choices = [(SHUFFLE_BUFFER, default_unit(batch_size))]  # 20 times the others would take hours
    monkeypatch.setattr("shardio.tuning.tune._choices", lambda *_: (choices, []))
    monkeypatch.setattr(simulate, "PASSES", PASSES)
    labels = np.arange(sum(shards)) % 100
    good = 0
    for seed in range(20):
        packed = np.random.default_rng(seed).permutation(labels)
        found = recommend(
            np.array(shards), packed, batch_size=batch_size, mean_bytes=110_000, seed=seed
        )
        assert found.default is not None
        good += found.default.will_do
    assert good >= 18


def test_another_buffer_is_named_where_the_default_does_not_do() -> None:
    """The best mixing within the memory, not the least memory."""
    found = recommend(SHARDS, SHUFFLED, memory="600MB", **OPTIONS)
    assert found.default is not None and not found.default.will_do
    best = found.best
    assert best is not None and best.will_do and best.window == 5008
    assert "Set a buffer of 5,000 records" in text_of(found)
    assert "The default, a shuffle of all 12,000 records (1.1 GiB), does not do" in text_of(found)
    assert "shuffle_buffer=5_000" in found.call and not found.keeps_default


def test_what_costs_many_requests_is_not_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shuffle of all large records, or over a network, takes one each."""
    monkeypatch.setattr(simulate, "SAMPLED", 1 << 14)
    counts, labels = np.array([6000] * 16), np.arange(96_000) * 100 // 96_000
    found = recommend(
        counts, labels, batch_size=256, mean_bytes=20_000, is_network=True, memory="100GB"
    )
    every = row_of(found, None, 32)
    window = row_of(found, 10_000, 32)
    assert every.requests == 96_000 and every.good and not every.is_cheap
    assert window.requests < 96_000 / 3
    assert found.best is None or found.best.shuffle_buffer is not None
    assert found.verdict(every) == "as good, dear"
    # Up to 256 MiB are read in storage order, wherever they lie.
    small = recommend(counts, labels, batch_size=256, mean_bytes=2_000, is_network=True)
    assert row_of(small, None, 32).requests == math.ceil(96_000 * 2_000 / REQUEST)
    assert small.keeps_default and row_of(small, None, 32).first_batch_bytes == 96_000 * 2_000


def test_a_pack_in_class_order_does_not_pass_by_even_parts_of_few_classes() -> None:
    """Every batch takes from 16 spans, so from all 4 classes: distinct ones say nothing."""
    labels = np.arange(N) * 4 // N
    found = recommend(ALIGNED, labels, **OPTIONS)
    assert found.saturated and found.distinct == 4
    stratified = row_of(found, 200, 4)
    assert stratified.classes == 4 and stratified.even > found.even_band[1]
    assert found.best is not None and found.best.shuffle_buffer is None
    assert found.in_class_order and " even " in str(found)
    mixed = recommend(SHARDS, np.random.default_rng(1).permutation(labels), **OPTIONS)
    assert row_of(mixed, 500, 4).good and not mixed.in_class_order


def test_batches_that_come_again_since_shards_and_spans_are_the_same_are_seen() -> None:
    found = recommend(ALIGNED, SHUFFLED, **OPTIONS)
    assert row_of(found, 100, 4).again > 0.08  # a batch is about the same 4 of every shard
    assert row_of(recommend(SHARDS, SHUFFLED, **OPTIONS), 100, 4).again < 0.05


def test_all_is_uniform_within_noise(shuffled: Tuning, ordered: Tuning) -> None:
    for found in (shuffled, ordered):
        row = row_of(found, None, 16)  # the default unit: of a permutation all are the same
        assert row.good and sum(row.shuffle_buffer is None for row in found.rows) == 1
        assert row.classes == pytest.approx(found.uniform, rel=0.01)
        assert row.again == pytest.approx(found.chance, rel=0.1)
        assert row.moved == pytest.approx(N / 3, rel=0.03)


def test_a_true_permutation_is_good_enough_whatever_its_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardio.tuning.tune_result.TOLERATED", 0.0)
    monkeypatch.setattr("shardio.tuning.tune_result.SIGMAS", 0.0)
    monkeypatch.setattr("shardio.tuning.tune.AGAIN", 0.0)
    found = recommend(SHARDS, ORDERED, **OPTIONS)
    assert found.band[0] == found.band[1]
    assert [row.shuffle_buffer for row in found.rows if row.good] == [None]


def test_a_difference_that_does_not_matter_does_not_decide() -> None:
    """Ten classes: the band is 0.2 % wide, and noise fell in and out of it."""
    labels = np.arange(N) % 10
    for seed in range(3):
        noise = np.random.default_rng(seed).permutation(labels)
        found = recommend(SHARDS, noise, seed=seed, **OPTIONS | {"batch_size": 256})
        assert found.saturated and all(row.mixes for row in found.rows)
        assert found.even_band[0] <= 0.99 * found.even < 1.01 * found.even <= found.even_band[1]
        assert found.band[0] <= 0.99 * found.uniform and found.band[1] <= 10
    few = recommend(FEW, np.arange(2000) % 200, **OPTIONS)  # where noise is more than that: its own
    assert not few.saturated and few.band[1] > 1.005 * few.uniform


def test_larger_buffers_and_smaller_units_mix_more(ordered: Tuning) -> None:
    at = [row_of(ordered, buffer, 16) for buffer in (100, 1000, 10_000)]
    assert at[0].classes < at[1].classes < at[2].classes
    assert at[0].again > at[1].again > at[2].again
    assert at[0].moved < at[1].moved < at[2].moved
    by_unit = [row_of(ordered, 1000, unit) for unit in (64, 16, 4)]
    assert by_unit[0].classes < by_unit[1].classes < by_unit[2].classes


def test_without_labels_or_with_one_the_tenth_of_the_pack_stands_for_the_class() -> None:
    found = recommend(FEW, None, **OPTIONS)
    assert (found.labels, found.distinct, found.saturated) == ("position", 10, False)
    same = recommend(FEW, np.zeros(2000, np.int64), **OPTIONS)
    assert same.as_dict() == found.as_dict()
    tenths = recommend(FEW, np.arange(2000) * 10 // 2000, **OPTIONS)
    assert [row.classes for row in tenths.rows] == [row.classes for row in found.rows]
    assert "tenths of the pack" in str(found)


def test_labels_of_any_kind_are_the_same_classes() -> None:
    labels = np.arange(131) % 9
    expected = recommend(SMALL, labels, batch_size=12, mean_bytes=9).as_dict()
    masked = np.ma.MaskedArray(labels * 10**6, labels == 3)
    for same in (labels * 10**12 - 5, labels.astype(np.uint8), masked, labels.astype("O")):
        assert recommend(SMALL, same, batch_size=12, mean_bytes=9).as_dict() == expected


# --- the search -----------------------------------------------------------------------------------


def test_units_are_divisors_down_to_where_all_spans_are_in_a_batch() -> None:
    assert units_to_try(256, 64) == [256, 64, 32, 16, 4]
    assert units_to_try(97, 64) == [97, 1]
    assert units_to_try(1, 64) == [1]
    assert units_to_try(100, 64) == [100, 25, 10, 5, 1]
    assert units_to_try(4096, 64) == [4096, 1024, 256, 64, 32]


def test_memory_is_of_the_window_and_limits_the_ladder(shuffled: Tuning) -> None:
    row = row_of(shuffled, 100, 16)
    assert row.window == 112  # 7 in each of 16 spans
    assert row.memory_bytes == row.rank_bytes == 112 * 100_000
    assert row_of(shuffled, None, 16).memory_bytes == N * 100_000
    some = recommend(SHARDS, SHUFFLED, memory="100MB", **OPTIONS)
    fitting = [row for row in some.rows if row.fits]
    assert {row.shuffle_buffer for row in fitting} == {20, 50, 100, 200, 500}
    assert max(row.memory_bytes for row in fitting) <= 100_000_000
    assert "Not tried" in str(some) and "1,000" in str(some)
    assert some.best is not None and some.best.good and some.best.fits
    assert some.default is not None and shuffled.default is not None
    assert some.default == replace(shuffled.default, fits=False)
    assert "too large" in some.verdict(some.default)
    with pytest.raises(OptionError, match=r"memory is 97\.7 KiB.*20 records, needs 3\.1 MiB"):
        recommend(SHARDS, SHUFFLED, memory=100_000, **OPTIONS)


def test_where_only_memory_is_short_it_says_so() -> None:
    """And nobody is told to pack a shuffled pack again."""
    found = recommend(ALIGNED, SHUFFLED, memory=25_000_000, **OPTIONS)
    assert found.best is None and not found.in_class_order
    assert "No buffer within 23.8 MiB mixes as well" in text_of(found)
    assert "More memory (`--memory`)" in text_of(found) and "shardio pack" not in text_of(found)
    assert found.least_bad is not None and found.least_bad.fits


def test_workers_and_ranks_do_not_change_the_batches(shuffled: Tuning) -> None:
    found = recommend(SHARDS, SHUFFLED, num_workers=4, world_size=8, **OPTIONS)
    for row, same in zip(found.rows, shuffled.rows, strict=True):
        own = {"rank_bytes": 0, "first_batch_bytes": 0}
        assert replace(row, **own) == replace(same, **own)
    # A rank touches 2 of 16 spans where a batch is one unit, and all where it is 16.
    assert row_of(found, 1000, 64).rank_bytes * 8 == row_of(found, 1000, 64).memory_bytes
    assert row_of(found, 1000, 4).rank_bytes == row_of(found, 1000, 4).memory_bytes


@pytest.mark.parametrize(
    ("shards", "batch"), [([], 8), ([0], 8), ([5], 8), ([1], 1), ([9, 0, 4], 13), ([20], 9)]
)
def test_small_datasets_have_a_sane_answer(shards: list[int], batch: int) -> None:
    counts = np.array(shards, np.int64)
    for labels in (None, np.zeros(counts.sum(), np.int64), np.arange(counts.sum())):
        found = recommend(counts, labels, batch_size=batch, mean_bytes=10)
        assert bool(found.rows) == (counts.sum() >= batch)
        assert found.call == f'ShardDataset("out/", batch_size={batch})'
        assert str(found).splitlines()[-1] == found.call
        assert json.loads(json.dumps(found.as_dict()))["call"] == found.call
        assert not math.isnan(found.uniform + found.chance)


def test_wrong_options_are_named() -> None:
    for options, what in (
        ({"batch_size": 0}, "batch_size"),
        ({"num_workers": -1}, "num_workers"),
        ({"world_size": 0}, "world_size"),
        ({"spans": 0}, "spans"),
        ({"memory": "much"}, "memory"),
    ):
        with pytest.raises(OptionError, match=what):
            recommend(SHARDS, SHUFFLED, **OPTIONS | options)
    with pytest.raises(OptionError, match="labels: 5 for 12,000 records"):
        recommend(SHARDS, SHUFFLED[:5], **OPTIONS)


# --- large datasets -------------------------------------------------------------------------------


def test_large_datasets_are_sampled_by_seeking_and_say_so(
    shuffled: Tuning, ordered: Tuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.tuning.tune.WHOLE", 1 << 10)
    monkeypatch.setattr(simulate, "WHOLE", 1 << 10)
    monkeypatch.setattr("shardio.tuning.tune.MOST", 2000)
    for labels, whole in ((SHUFFLED, shuffled), (ORDERED, ordered)):
        found = recommend(SHARDS, labels, memory="10GB", **OPTIONS)
        assert not found.whole_epochs and found.epochs == 1
        assert "4 stretches of each" in str(found)
        assert '"all" is a uniform shuffle by definition' in str(found).replace("\n", " ")
        buffers = {20, 50, 100, 200, 500, 1000, 2000, None}
        assert {row.shuffle_buffer for row in found.rows} == buffers
        for row in found.rows:
            same = row_of(whole, row.shuffle_buffer, row.unit)
            assert row.classes == pytest.approx(same.classes, rel=0.15)
            assert row.again == pytest.approx(same.again, rel=0.3, abs=0.01)
            assert row.moved == pytest.approx(same.moved, rel=0.15)


# --- what is shown --------------------------------------------------------------------------------


def test_progress_goes_from_none_to_all() -> None:
    told: list[tuple[int, int]] = []
    found = recommend(
        SMALL, None, batch_size=12, mean_bytes=9, progress=lambda *at: told.append(at)
    )
    assert told[0] == (0, len(found.rows) + 1)
    assert told[-1] == (len(found.rows) + 1, len(found.rows) + 1)
    assert [done for done, _ in told] == list(range(len(found.rows) + 2))


# --- of a packed directory ------------------------------------------------------------------------


def test_labels_come_from_the_indexes_and_no_record_is_read(packed: Callable[..., Path]) -> None:
    out = packed([40, 35])
    for shard in shard_files(out):
        flip(shard, shard.stat().st_size // 3)  # within a record
    found = tune(out, batch_size=8)
    assert (found.records, found.distinct, found.labels) == (75, 3, "label")
    assert found.call == f'ShardDataset("{out}", batch_size=8)'


def test_a_dataset_without_labels_is_tuned_too(packed: Callable[..., Path]) -> None:
    out = packed(
        [40],
        fields=[("__key__", "key"), ("n", "int")],
        sample=lambda i: {"__key__": b"%d" % i, "n": i},
        classes=None,
    )
    assert labels_of(open_reader(out, None, Storage())) is None
    assert tune(out, batch_size=8).labels == "position"


@pytest.mark.parametrize(("network", "workers"), [(False, 1), (False, 3), (True, 1), (True, 3)])
def test_the_first_batch_is_estimated_as_it_is_read(
    network: bool, workers: int, packed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small records wait in the process, so the windows of a batch's spans come before it."""
    monkeypatch.setattr(LocalDirectory, "is_network", lambda self: network)
    out = packed([2000, 1500])
    reader = Reader(sequence.open(out).reader.storage, sequence.open(out).manifest)
    for buffer, unit in ((800, 4), (800, 32), (200, 16), (None, 8)):
        epoch = Epoch(
            reader.manifest.shard_records,
            seed=0,
            epoch=0,
            spans=8,
            unit=unit,
            shuffle_buffer=buffer,
        )
        share = Partition(epoch, 32, num_workers=workers)
        fetch = Fetch(reader, share)
        rows = next(iter(fetch))
        own = sum(map(len, filter(None, rows.held or [])))
        expected = fetch.held_bytes + own or 32 * reader.mean_bytes
        policy = choose_policy(share, reader.mean_bytes, network=network, available_bytes=1 << 62)
        if buffer is None:  # all of a small dataset is read before it
            expected = 3500 * reader.mean_bytes
        assert policy.first_batch_bytes() == pytest.approx(expected, rel=0.25), (buffer, unit)


def test_a_dataset_tunes_itself(tmp_path: Path) -> None:
    """By its own options, of its own records."""
    folder = make(tmp_path / "data", [400] * 10)
    dataset = ShardDataset(
        folder, batch_size=16, seed=3, order=Order(spans=4), rank=0, world_size=2
    )
    found = tune(dataset, memory="1MB")
    assert (found.records, found.batch_size, found.world_size) == (4000, 16, 2)
    assert found.best is not None and str(folder) in found.call
    assert found.seconds and f"; took {found.seconds:.1f} s\n" in str(found)
    none = tune(dataset.select(range(5)))
    assert none.seconds and not none.rows and str(none).splitlines()[0].endswith(" s")
    part = tune(dataset.select(range(500)))
    assert part.records == 500 and part.keeps_default and part.call == ""
    assert part.num_workers == 0 and "2 ranks of one process" in str(part)
    with pytest.raises(OptionError, match="tune: batch_size with a ShardDataset"):
        tune(dataset, batch_size=16)
    with pytest.raises(OptionError, match="tune: give batch_size"):
        tune(folder)
    with pytest.raises(OptionError, match="each of its datasets"):
        tune(ShardDataset.mix([dataset, dataset]))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="give batch_size to the dataset"):
        tune(ShardDataset(folder))


# --- nodes with shards of their own ---------------------------------------------------------------


def same_rows(found: Tuning, other: Tuning) -> list[tuple[Any, Any]]:
    """The rows of the default unit, with those of the same buffer."""
    rows = {row.shuffle_buffer: row for row in other.rows if row.unit == other.unit}
    return [(row, rows[row.shuffle_buffer]) for row in found.rows if row.unit == found.unit]


def test_nodes_are_simulated_and_told(shuffled: Tuning) -> None:
    found = recommend(SHARDS, SHUFFLED, nodes=4, **(OPTIONS | {"units": False}))
    assert found.nodes == 4 and "nodes=4" in found.call
    assert found.notes[0].startswith("Each of 4 nodes reads 1/4 of the records")
    assert found.rows and all(row.shuffle_buffer for row in found.rows)
    for row, mixed in same_rows(found, shuffled):  # records meet those of their own part alone
        assert row.again > max(mixed.again, 3 * shuffled.chance)


def test_nodes_that_do_not_suit_are_refused_by_tune() -> None:
    with pytest.raises(OptionError, match="shards have records"):
        recommend(SHARDS, SHUFFLED, nodes=10_000, **OPTIONS)
