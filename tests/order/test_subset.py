"""Subsets: exactly the chosen records, in the order law's order, whatever way their bytes take."""

import json
import math
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fetching import Watched, expected, opened, read, reader
from support.naive_order import side_by_side
from support.reading import batches, flat, keyed
from support.small_datasets import CLASSES, flip, jpeg, make, payload, shard_files
from torch.utils.data import DataLoader

import shardio
from shardio import DamageError, OptionError, RandomResizedCrop, ShardDataset, StateError
from shardio.dataset import buffering
from shardio.dataset.fetch import Fetch
from shardio.order import rng
from shardio.order.epoch import Epoch
from shardio.order.partition import Partition
from shardio.order.subset import Remaining, Selection, class_index, describe_conditions

Packed = Callable[..., Path]
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:epoch .* is being read again"),
]

COUNTS = [23, 0, 41, 3, 30]
N = sum(COUNTS)
STARTS = np.cumsum([0, *COUNTS])
WAYS = ("page_cache", "in_memory", "network", "exact")

FIELDS = (
    *(("__key__", "key"), ("image", "image"), ("label", "int"), ("score", "float")),
    *(("flag", "bool"), ("big", "int"), ("mixed", "int"), ("name", "str")),
)


def rich(i: int) -> dict[str, Any]:
    """A record with columns of every kind, and None in some."""
    return {
        "__key__": b"k/%06d.jpg" % i,
        "image": payload(i),
        "label": i % 3,
        "score": None if i % 5 == 0 else i / 4,
        "flag": None if i % 7 == 0 else i % 2 == 0,
        "big": (1 << 53) + i,
        "mixed": -1 if i < 50 else (1 << 63) + i,  # of two shards: no one dtype holds both
        "name": str(i),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("rich") / "data", COUNTS, fields=FIELDS, sample=rich)


def numbers(keys: list[str]) -> list[int]:
    return [int(key[2:8]) for key in keys]


def chosen(dataset: ShardDataset) -> list[int]:
    """The numbers of a dataset's records, sorted; each came once."""
    found = sorted(numbers(flat(batches(dataset))))
    assert len(found) == dataset.records
    return found


def that(holds: Callable[[int], bool]) -> list[int]:
    return [i for i in range(N) if holds(i)]


# --- the order of a subset ----------------------------------------------------------------------


@contextmanager
def way(name: str) -> Iterator[None]:
    """Makes small test datasets take one of the ways that bytes can take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffering, "RUN", 500)
        patch.setattr(buffering, "LEAST_BLOCK", 1)
        patch.setattr(buffering, "ROWS_AHEAD", 8)
        patch.setattr(buffering, "GAP", 300)
        if name in ("page_cache", "exact"):
            patch.setattr(buffering, "SMALL", 0)
        if name == "exact":
            patch.setattr(buffering, "memory_available", lambda: 0)
        yield


some_numbers = st.one_of(
    st.integers(0, N - 1).map(lambda i: [i]),
    st.just(list(range(N))),
    st.just(list(range(23, 64))),  # one shard
    st.just([22, 23, 66, 67]),  # ends of shards
    st.builds(lambda a, step: list(range(a, N, step)), st.integers(0, 5), st.integers(2, 40)),
    st.sets(st.integers(0, N - 1), min_size=1).map(sorted),
)


@pytest.mark.parametrize("name", WAYS)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    numbers=some_numbers,
    spans=st.sampled_from([1, 2, 3, 8, 64]),
    unit=st.sampled_from([1, 2, 4]),
    units=st.sampled_from([None, 1, 2, 5]),
    buffer=st.sampled_from([2, 5, 30, None]),
    consumers=st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 3), (3, 2)]),
    tail=st.sampled_from(["pad", "drop", "exact"]),
    seed=st.integers(0, 5),
    by_excluded=st.booleans(),
)
def test_every_way_gives_exactly_the_chosen_records_in_the_order_of_their_places(
    folder, name, numbers, spans, unit, units, buffer, consumers, tail, seed, by_excluded
):
    selection = Selection(np.array(numbers, np.int64), STARTS)
    if by_excluded:
        selection = Remaining(np.setdiff1d(np.arange(N), numbers), STARTS)
    world_size, num_workers = consumers
    if units is None:
        unit, batch_size = 1, None
    else:
        batch_size = unit * units
    seen: list[int] = []
    steps = set()
    for rank in range(world_size):
        for worker in range(num_workers):
            epoch = Epoch(
                selection.counts,
                seed=seed,
                epoch=2,
                spans=spans,
                unit=unit,
                shuffle_buffer=buffer,
            )
            share = Partition(
                epoch,
                batch_size,
                rank=rank,
                world_size=world_size,
                worker=worker,
                num_workers=num_workers,
                tail=tail,
            )
            with way(name):
                of = reader(folder, name == "network")
                got = Fetch(of, share, selection=selection, machines=world_size)
                pairs = read(got)
            # The order is that of a dataset of just these records; the n-th of them is this one.
            assert [n for n, _ in pairs] == [numbers[place] for place in expected(share)]
            for number, sample in pairs:
                assert sample["image"] == payload(number)
            rows = [(rows.valid, rows.size) for rows in Fetch(of, share, selection=selection)]
            valid = [i < v for v, size in rows for i in range(size)]
            seen += [n for (n, _), own in zip(pairs, valid, strict=True) if own]
            steps.add(share.steps)
    assert len(steps) == 1
    if tail == "drop":
        assert len(set(seen)) == len(seen) and set(seen) <= set(numbers)
        assert len(numbers) - len(seen) < (batch_size or 1) * world_size
    else:
        assert sorted(seen) == numbers


@given(numbers=some_numbers)
def test_what_remains_is_a_selection_of_all_but_what_is_excluded(numbers):
    one = Selection(np.array(numbers, np.int64), STARTS)
    other = Remaining(np.setdiff1d(np.arange(N), numbers), STARTS)
    assert len(one) == len(other) == len(numbers)
    assert one.numbers.tolist() == other.numbers.tolist() == numbers
    assert one.starts.tolist() == other.starts.tolist()
    assert one.counts.tolist() == other.counts.tolist()
    assert one.digest == other.digest
    places = np.arange(len(numbers))[::-2]
    assert one.at(places).tolist() == other.at(places).tolist()
    assert one.at(slice(1, 7)).tolist() == other.at(slice(1, 7)).tolist() == numbers[1:7]
    assert [one.find(n) for n in range(N)] == [other.find(n) for n in range(N)]
    assert [one.find(n) for n in numbers] == [*range(len(numbers))]
    # What is left out before the first and behind the last stands between no two.
    inner = sum(one.gaps().tolist())
    assert inner == numbers[-1] - numbers[0] + 1 - len(numbers)
    ends = (numbers[0] > 0) + (numbers[-1] < N - 1)
    assert sorted(one.gaps().tolist()) == sorted(other.gaps().tolist()) or ends


@pytest.mark.parametrize("name", WAYS)
def test_the_ways_are_the_ones_meant(folder: Path, name: str) -> None:
    selection = Selection(np.arange(0, N, 2), STARTS)
    options = {"seed": 0, "epoch": 0, "spans": 2, "unit": 2, "shuffle_buffer": 10}
    with way(name):
        share = Partition(Epoch(selection.counts, **options), 4)
        got = Fetch(reader(folder, name == "network"), share, selection=selection)
    assert got.policy.name == ("page_cache" if name == "exact" else name)
    assert isinstance(got.policy, buffering.NextBatches) == (name == "exact")


def spread(start: int, step: int, counts: list[int]) -> Selection:
    return Selection(np.arange(start, sum(counts), step), np.cumsum([0, *counts]))


@pytest.mark.parametrize("name", WAYS)
def test_only_chosen_records_are_read_and_announced(packed: Packed, name: str) -> None:
    counts = [400] * 4
    selection = spread(3, 10, counts)  # further apart than the gaps that are read over
    with way(name):
        of = reader(packed(counts), name == "network")
        opened(of)
        epoch = Epoch(selection.counts, seed=1, epoch=0, spans=4, unit=4, shuffle_buffer=40)
        got = Fetch(of, Partition(epoch, 8), selection=selection)
        assert len(read(got)) == 160
    storage = of.storage
    assert isinstance(storage, Watched)
    wanted = sorted(
        (of.shard(shard).name, of.shard(shard).offset(n), of.shard(shard).offset(n + 1))
        for shard, n in (of.locate(number) for number in selection.numbers.tolist())
    )
    assert sorted(storage.reads) == wanted  # each once, and nothing else
    assert set(storage.announced) <= set(wanted)
    assert bool(storage.announced) == (name != "in_memory")
    assert got.held_bytes == 0


@pytest.mark.parametrize("name", ["in_memory", "network"])
def test_small_gaps_are_read_over(packed: Packed, name: str) -> None:
    counts = [400] * 4
    selection = spread(1, 2, counts)
    with way(name):
        of = reader(packed(counts), name == "network")
        opened(of)
        epoch = Epoch(selection.counts, seed=1, epoch=0, spans=4, unit=4, shuffle_buffer=40)
        check = read(Fetch(of, Partition(epoch, 8), selection=selection))
    assert sorted(n for n, _ in check) == selection.numbers.tolist()
    storage = of.storage
    assert isinstance(storage, Watched)
    total = sum(stop - start for _, start, stop in storage.reads)
    payload_bytes = sum(int(of.shard(i).sizes[:].sum()) for i in range(4))
    assert 0.45 * payload_bytes < total < 1.05 * payload_bytes
    assert len(storage.reads) < 800 * 0.75  # and not one for each record


@pytest.mark.parametrize("name", WAYS)
def test_damage_is_told_only_of_chosen_records_and_by_their_number_in_the_shard(
    packed: Packed, name: str
) -> None:
    folder = packed([50, 50])
    path = shard_files(folder)[1]
    flip(path, path.read_bytes().index(payload(70)) + 3)
    share = {"seed": 0, "epoch": 0, "spans": 2, "unit": 2, "shuffle_buffer": 9}
    for first, damaged in ((1, False), (0, True)):
        selection = spread(first, 10, [50, 50])
        with way(name):
            of = Partition(Epoch(selection.counts, **share), 2)
            got = Fetch(reader(folder, name == "network"), of, selection=selection)
            if damaged:
                with pytest.raises(DamageError, match=rf"{path.name}: record 20 at .*k/000070.jpg"):
                    read(got)
            else:
                assert len(read(got)) == 10


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("batch_size", [None, 4, 10])
def test_loaders_of_any_workers_give_the_subset_once(
    folder: Path, workers: int, batch_size: int | None
) -> None:
    dataset = keyed(folder, batch_size=batch_size, where={"label": "dog"})
    got = batches(dataset, workers)
    assert sorted(numbers(flat(got))) == that(lambda i: i % 3 == 1)
    assert len(got) == len(dataset)
    if batch_size is not None:
        assert got == batches(dataset)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("tail", ["pad", "exact"])
def test_ranks_share_a_subset(folder: Path, world_size: int, tail: str) -> None:
    wanted = that(lambda i: i % 3 == 2)
    alone = keyed(folder, batch_size=12, unit=2, tail="pad", where={"label": 2})
    each = [
        batches(
            keyed(
                folder,
                batch_size=12 // world_size,
                unit=2,
                tail=tail,
                rank=rank,
                world_size=world_size,
                where={"label": 2},
            )
        )
        for rank in range(world_size)
    ]
    assert len({len(one) for one in each}) == 1
    in_order = side_by_side(each, 12 // world_size // 2, 8)
    together = [key for step in in_order for keys in step for key in keys]
    assert together[: len(wanted)] == flat(batches(alone))
    assert sorted(numbers(together[: len(wanted)])) == wanted
    assert set(numbers(together)) == set(wanted)


def test_a_subset_goes_on_from_every_step_in_other_ranks(folder: Path) -> None:
    whole = keyed(folder, batch_size=8, unit=4, where={"label": [0, 2]}, seed=3)
    whole.set_epoch(1)
    alone = flat(batches(whole))
    for steps in range(len(whole) + 1):
        state = whole.state_dict(steps)
        assert len(repr(state)) < 1000
        each = []
        for rank in range(2):
            one = keyed(folder, batch_size=4, rank=rank, world_size=2, where={"label": [0, 2]})
            one.load_state_dict(state)
            each.append(batches(one, rank))
        in_order = side_by_side(each, one.batch_size // one.order.unit, 8, state["units"])
        together = [key for step in in_order for keys in step for key in keys]
        rest = alone[steps * 8 :]
        assert together[: len(rest)] == rest


def test_a_state_of_another_subset_is_refused(folder: Path) -> None:
    state = keyed(folder, batch_size=4, where={"label": 0}).state_dict(1)
    for other in ({"label": 1}, None):
        with pytest.raises(StateError, match="another selection of records"):
            keyed(folder, batch_size=4, where=other).load_state_dict(state)
    same = keyed(folder, batch_size=4).select(that(lambda i: i % 3 == 0))
    same.load_state_dict(state)  # the same records, chosen another way
    assert same.remaining == len(same) - 1


# --- where --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "conditions, holds",
    [
        ({"label": "cat"}, lambda i: i % 3 == 0),
        ({"label": ["cat", "eel"]}, lambda i: i % 3 != 1),
        ({"label": ("dog", 2)}, lambda i: i % 3 != 0),
        ({"label": 1}, lambda i: i % 3 == 1),
        ({"label": np.int64(1)}, lambda i: i % 3 == 1),
        ({"label": np.array([0, 1])}, lambda i: i % 3 != 2),
        ({"label": {1, 7, -1, 300, 0.5, float("nan")}}, lambda i: i % 3 == 1),
        ({"label": range(2)}, lambda i: i % 3 < 2),
        ({"label": "cat", "flag": True}, lambda i: i % 3 == 0 and i % 7 and i % 2 == 0),
        ({"flag": [True, None]}, lambda i: i % 7 == 0 or i % 2 == 0),
        ({"flag": None}, lambda i: i % 7 == 0),
        ({"score": None}, lambda i: i % 5 == 0),
        ({"score": [0, 1.25, 1.5]}, lambda i: i == 6),
        ({"score": lambda c: c > 12}, lambda i: i % 5 and i > 48),
        ({"score": lambda c: ~(c > 12)}, lambda i: i % 5 and i <= 48),
        ({"score": lambda c: np.ma.getmaskarray(c)}, lambda i: i % 5 == 0),
        ({"label": lambda c: c == 2, "score": lambda c: c < 5}, lambda i: i in (2, 8, 11, 14, 17)),
        ({"big": (1 << 53) + 1}, lambda i: i == 1),  # as floats, it and its neighbours are one
        ({"big": [float(1 << 53)]}, lambda i: i == 0),
        ({"mixed": -1}, lambda i: i < 50),
        ({"mixed": [(1 << 63) + 70, 1 << 62]}, lambda i: i == 70),
        ({"mixed": (1 << 63) + 2}, None),
        ({"label": []}, None),
        ({"label": 3}, None),
        ({"label": "cat", "big": (1 << 53) + 1}, None),
        ({"score": lambda c: c > 1000}, None),
    ],
)
def test_where_chooses_by_columns(
    folder: Path, conditions: dict[str, Any], holds: Callable[[int], Any] | None
) -> None:
    if holds is None:
        with pytest.raises(OptionError, match=f"none of {N} records meets all"):
            keyed(folder, where=conditions)
        return
    dataset = keyed(folder, batch_size=8, where=conditions)
    assert chosen(dataset) == that(lambda i: bool(holds(i)))
    assert len(dataset) == -(-dataset.records // 8)


@pytest.mark.parametrize(
    "conditions, message",
    [
        ({}, "where is {}: expected conditions by field"),
        ([("label", 1)], "expected conditions by field"),
        ("label", "expected conditions by field"),
        ({"lable": 1}, "no column is called 'lable'; there are label, score, flag, big, mixed"),
        ({"name": "7"}, "no column is called 'name'"),
        ({"__key__": b"k"}, "none of 97 records meets all conditions"),
        ({"label": "cow"}, "no class is called 'cow'; there are cat, dog, eel"),
        ({"label": ["cat", "c\x1bw"]}, r"no class is called 'c\\x1bw'"),
        ({"score": "high"}, "score cannot be 'high': expected numbers, or names of classes"),
        ({"label": b"cat"}, "label cannot be b'cat'"),
        ({"label": [[1, 2]]}, "label cannot be [1, 2]"),
        ({"score": lambda c: c}, f"gave shape ({N},) of float32; expected shape ({N},) of bool"),
        ({"score": lambda c: [True]}, "the function for 'score' gave shape (1,) of bool"),
        ({"score": lambda c: None}, "gave shape () of object"),
        ({"score": lambda c: True}, "gave shape () of bool"),
    ],
)
def test_wrong_conditions_are_told(folder: Path, conditions: Any, message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        keyed(folder, where=conditions)


def test_names_need_classes(packed: Packed) -> None:
    folder = packed(COUNTS, classes=None)
    with pytest.raises(OptionError, match="no classes"):
        keyed(folder, where={"label": "cat"})
    assert chosen(keyed(folder, where={"label": 0})) == that(lambda i: i % 3 == 0)


def test_an_error_of_the_users_function_is_their_own(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        keyed(folder, where={"score": lambda column: 1 / 0})


def test_a_long_list_makes_no_long_message(folder: Path) -> None:
    with pytest.raises(OptionError) as caught:
        keyed(folder, where={"label": list(range(10, 10_000))})
    assert len(str(caught.value)) < 300


def test_a_subset_says_so(folder: Path) -> None:
    dataset = keyed(folder, batch_size=4, where={"label": "cat"})
    assert f"33 of {N} records" in repr(dataset)
    assert dataset.records == 33 and dataset.classes == list(CLASSES)


# --- select -------------------------------------------------------------------------------------


EVEN = [i % 2 == 0 for i in range(N)]


@pytest.mark.parametrize(
    "indices, holds",
    [
        ([5], lambda i: i == 5),
        (range(N), lambda i: True),
        ([96, 0, 23], lambda i: i in (0, 23, 96)),
        (iter([3, 1]), lambda i: i in (1, 3)),
        ({7, 9}, lambda i: i in (7, 9)),
        (np.array([4, 2], np.uint8), lambda i: i in (2, 4)),
        (torch.tensor([4, 2]), lambda i: i in (2, 4)),
        (np.array(EVEN), lambda i: i % 2 == 0),
        (EVEN, lambda i: i % 2 == 0),
        (torch.tensor(EVEN), lambda i: i % 2 == 0),
        (np.ma.MaskedArray(EVEN, [i < 50 for i in range(N)]), lambda i: i % 2 == 0 and i >= 50),
    ],
)
def test_select_takes_indices_and_masks(
    folder: Path, indices: Any, holds: Callable[[int], bool]
) -> None:
    assert chosen(keyed(folder, batch_size=8).select(indices)) == that(holds)


@pytest.mark.parametrize(
    "indices, message",
    [
        ([], f"none of {N} records is chosen"),
        ([False] * N, f"none of {N} records is chosen"),
        ([-1], "index -1; there are records 0 to 96"),
        ([0, N], f"index {N}; there are records 0 to 96"),
        ([1 << 63], f"index {1 << 63}; there are"),
        (np.array([(1 << 64) - 1], np.uint64), f"index {(1 << 64) - 1}; there are"),
        ([1, 4, 4], "index 4 is there more than once"),
        (EVEN[:-1], f"a mask of shape ({N - 1},); expected ({N},)"),
        (np.array([EVEN]), f"a mask of shape (1, {N}); expected ({N},)"),
        ([[1], [2]], "shape (2, 1) of int64"),
        ([[1], [2, 3]], "[[1], [2, 3]]; expected one index for each record, or a mask"),
        ([1.0], "shape (1,) of float64"),
        (["1"], "expected one index for each record"),
        ([None], "of object"),
        (np.array(3), "shape () of int64"),
        (np.ma.MaskedArray([3, 4], [False, True]), "index -1"),
        (3, "select: 3; expected one index for each record, or a mask"),
        (None, "select: None"),
    ],
)
def test_wrong_indices_are_told(folder: Path, indices: Any, message: str) -> None:
    dataset = keyed(folder, batch_size=8)
    with pytest.raises(OptionError, match=re.escape(message)):
        dataset.select(indices)


def test_select_counts_within_where_and_within_select(folder: Path) -> None:
    dogs = keyed(folder, batch_size=8, where={"label": "dog"})
    some = dogs.select(range(0, dogs.records, 2))
    assert chosen(some) == list(range(1, N, 6))
    assert chosen(some.select([1, 3])) == [7, 19]
    with pytest.raises(OptionError, match="there are records 0 to 15"):
        some.select([16])
    with pytest.raises(OptionError, match=re.escape("a mask of shape (97,); expected (16,)")):
        some.select(EVEN)
    assert chosen(dogs) == list(range(1, N, 3))


def test_columns_say_what_to_select(folder: Path) -> None:
    big = shardio.open(folder).columns("score") > 12
    assert chosen(keyed(folder, batch_size=8).select(big)) == that(lambda i: i % 5 and i > 48)


def test_a_subset_has_a_place_and_an_epoch_of_its_own(folder: Path) -> None:
    whole = keyed(folder, batch_size=4)
    whole.set_epoch(7)
    part = whole.select(range(40))
    assert (whole.epoch, part.epoch) == (7, 0)
    part.set_epoch(2)
    assert whole.epoch == 7
    state = part.state_dict(3)
    part.load_state_dict(state)
    assert (part.remaining, whole.remaining) == (len(part) - 3, len(whole))
    copied = pickle.loads(pickle.dumps(part))
    assert batches(copied) == batches(part)


def test_drop_that_leaves_nothing_of_a_subset_is_refused(folder: Path) -> None:
    whole = keyed(folder, batch_size=8, tail="drop")
    with pytest.raises(OptionError, match="7 records are fewer than 8"):
        whole.select(range(7))
    assert len(whole.select(range(8))) == 1


def test_indices_of_the_caller_stay_as_they_are(folder: Path) -> None:
    mine = np.array([4, 2, 9])
    keyed(folder).select(mine)
    mine[0] = 5
    assert mine.tolist() == [5, 2, 9]


# --- what is read, and what comes out -----------------------------------------------------------


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """The storages of datasets that are opened."""
    storages: list[Watched] = []

    def locate(path: Any, _: Any = None) -> Watched:
        storages.append(Watched(path))
        return storages[-1]

    monkeypatch.setattr("shardio.dataset.reader.locate", locate)
    return storages


def test_no_image_is_read_to_choose(packed: Packed, watched: list[Watched]) -> None:
    reads = []
    for each in (4, 40):
        counts = [each, 0, each, each]
        folder = packed(counts, name=f"of {each}", image=lambda i: b"%06d" % i * 20_000)
        part = keyed(folder, batch_size=2, where={"label": lambda c: c != 1}).select(range(6))
        assert part.records == 6
        (storage,) = watched
        reads.append(len(storage.reads))
        total = sum(stop - start for _, start, stop in storage.reads)
        assert 0 < total < 120_000 * 3 * each / 10
        shards = {shard.name: shard for shard in map(part.reader.shard, (0, 2, 3))}
        for name, start, stop in storage.reads:
            if name in shards:  # nothing of the records in its midst; the manifest is whole
                inner = shards[name].offset(1) + 10_000, shards[name].offset(each - 1)
                assert stop <= inner[0] or start >= inner[1]
        watched.clear()
    assert reads[0] == reads[1]  # by shards, not by records


def test_choosing_reads_the_same_again_for_several_columns_only_if_shards_close(
    folder: Path, watched: list[Watched]
) -> None:
    keyed(folder, where={"label": "cat"})
    keyed(folder, where={"label": "cat", "score": None, "flag": [True, None]})
    assert len(watched[1].reads) == len(watched[0].reads)


def test_pixels_in_a_subset_are_those_in_the_whole(packed: Packed) -> None:
    folder = packed([9, 12], image=jpeg)
    crop = RandomResizedCrop(8, flip=True)
    options: dict[str, Any] = {"fields": ("image", "__key__"), "transform": crop, "seed": 5}
    whole = ShardDataset(folder, batch_size=4, **options)
    subsets = [
        whole.select([3, 8, 9, 20]),
        ShardDataset(folder, batch_size=3, where={"label": "dog"}, **options),
    ]
    for epoch in (0, 1):
        pixels = {}
        for dataset in (whole, *subsets):
            dataset.set_epoch(epoch)
            for workers in (0, 2):
                dataset.set_epoch(epoch)
                for images, keys in DataLoader(dataset, batch_size=None, num_workers=workers):
                    for image, key in zip(images, keys, strict=True):
                        got = image.permute(1, 2, 0).numpy().tobytes()
                        assert pixels.setdefault(key, got) == got
        for number in range(21):
            wanted = crop(jpeg(number), draw=rng.draw(5, epoch, number))
            assert pixels[f"k/{number:06d}.jpg"] == wanted.tobytes()


def test_exact_marks_the_repeats_of_a_subset(folder: Path) -> None:
    wanted = that(lambda i: i % 3 == 0)
    seen = []
    for rank in range(3):
        dataset = keyed(
            folder, batch_size=4, tail="exact", rank=rank, world_size=3, where={"label": "cat"}
        )
        for keys, valid in DataLoader(dataset, batch_size=None, num_workers=rank):
            assert len(keys) == 4
            assert all(number in wanted for number in numbers(keys))
            seen += [n for n, own in zip(numbers(keys), valid.tolist(), strict=True) if own]
    assert sorted(seen) == wanted


@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
def test_one_record(folder: Path, tail: str) -> None:
    one = keyed(folder, batch_size=1, tail=tail).select([64])
    assert chosen(keyed(folder, batch_size=1).select([64])) == [64]
    assert len(one) == 1
    assert [batch[0] for batch in DataLoader(one, batch_size=None)] == [["k/000064.jpg"]]


def test_conditions_are_recorded_as_json_has_them() -> None:
    found = describe_conditions(
        {"a": [math.nan, math.inf, 0.5, None, "x", np.float32(2)], "b": -math.inf}
    )
    assert found == {"a": ["nan", "inf", 0.5, None, "x", 2.0], "b": ["-inf"]}
    json.dumps(found, allow_nan=False)


def test_a_class_has_its_number() -> None:
    assert class_index(("a", "b"), "b") == 1
    with pytest.raises(OptionError, match="there are a, b"):
        class_index(("a", "b"), "c")
    with pytest.raises(OptionError, match="no classes"):
        class_index(None, "c")
