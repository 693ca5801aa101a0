"""Mixtures: whose each row is, passes of each dataset, lengths, tails, ranks, resuming.

`rows_of` makes a mixture's rows anew, by the order room and a list; all else is compared with that.
"""

import itertools
import json
import pickle
import random
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.reading import drain
from support.small_datasets import flip, grouped, jpeg, make, payload, shard_files
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from shardio import DamageError, OptionError, RandomResizedCrop, ShardDataset, StateError
from shardio.dataset.decode import Progress
from shardio.dataset.mixture import Mixture
from shardio.dataset.protocol import ShareReader
from shardio.dataset.ranks import Consumers
from shardio.order import rng
from shardio.order.epoch import Epoch
from shardio.order.mixture import MAX_SLOTS, Pattern, batch_ranges, whole_slots
from shardio.order.partition import Partition

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:epoch .* is being read again"),
]

SIZES = ([23, 0, 41, 3, 30], [1], [5, 6], [2, 0, 17])
TOTALS = [sum(counts) for counts in SIZES]
Row = tuple[bytes, ...]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Datasets whose keys say which one they are of: "2/000007" is record 7 of dataset 2."""
    home = tmp_path_factory.mktemp("mixed")

    def sample(d: int) -> Callable[[int], dict[str, Any]]:
        return lambda i: {"__key__": b"%d/%06d" % (d, i), "image": payload(i), "label": i % 3}

    return [make(home / f"{d}", counts, sample=sample(d)) for d, counts in enumerate(SIZES)]


def opened(folder: Path, **options: Any) -> ShardDataset:
    given = {"shuffle_buffer": 10, "spans": 4, "batch_size": 8} | options
    return ShardDataset(folder, fields=("__key__",), decode=None, **grouped(given))


def mixed(
    folders: Sequence[Path],
    weights: Sequence[float] | None = None,
    length: Any = "first",
    **options: Any,
) -> Mixture:
    return ShardDataset.mix(
        [opened(folder, **options) for folder in folders], weights, length=length
    )


def batches(loader: Any) -> list[list[str]]:
    """All batches of one pass; of a dataset: over its epoch, or the rest that was loaded."""
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(loader.epoch)
    return [list(keys) for (keys,) in loader]


def loaded(mixture: Mixture, workers: int = 0, **options: Any) -> list[list[str]]:
    return batches(drain(DataLoader(mixture, batch_size=None, num_workers=workers, **options)))


def flat(lists: Sequence[Sequence[Any]]) -> list[Any]:
    return [one for items in lists for one in items]


def owner(key: str) -> int:
    return int(key[:1])


# --- the oracle ---------------------------------------------------------------------------------


def pattern_of(mixture: Mixture) -> Pattern:
    """Whose each row is, by what a saved state says."""
    return Pattern(mixture.state_at(0, 0)["slots"])


def rows_of(mixture: Mixture, epoch: int) -> list[str]:
    """The rows of an epoch, by the words of ShardDataset.mix and the arithmetic of order."""
    pattern, datasets, found = pattern_of(mixture), mixture._datasets, []
    passes: dict[tuple[int, int], list[int]] = {}
    # What every earlier epoch took of each dataset, counted and not computed.
    owners = [pattern.period[n % len(pattern.period)] for n in range(mixture.length)]
    taken = [epoch * owners.count(d) for d in range(len(datasets))]
    for d in owners:
        dataset = datasets[d]
        number, place = divmod(taken[d], dataset.records)
        if (d, number) not in passes:
            options, seed = mixture.options.parts[d], rng.key(rng.MIX, mixture.seed, d)
            passes[d, number] = one_pass(dataset, options, seed, number)
        record = passes[d, number][place]
        found.append(f"{int(dataset.reader.storage.url[-1])}/{record:06d}")
        taken[d] += 1
    return found


def one_pass(dataset: Any, options: Any, seed: int, number: int) -> list[int]:
    """The records of a dataset in its flat order, by order alone."""
    epoch = Epoch(
        dataset.counts,
        seed=seed,
        epoch=number,
        spans=options.spans,
        unit=options.unit,
        shuffle_buffer=options.shuffle_buffer,
    )
    starts = np.cumsum([0, *dataset.counts])
    spans: dict[int, Any] = {}
    found: list[int] = []
    for batch in Partition(epoch, options.unit):
        for span, first, count in batch.pieces:
            walk = spans.setdefault(span, epoch.span_order(span))
            assert walk.drawn == first
            shards, records = epoch.locate(epoch.position(span, walk.take(count)))
            found += (starts[shards] + records).tolist()
    if dataset.selection is not None:
        found = dataset.selection.numbers[found].tolist()
    return found


# --- whose each row is --------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_any_first_rows_hold_each_share_rounded_up_or_down(slots):
    pattern = Pattern(slots)
    total = sum(slots)
    assert len(pattern.period) == total
    counts = [0] * len(slots)
    for n in range(2 * total + 1):
        for d, k in enumerate(slots):
            assert pattern.count(d, n) == counts[d]
            assert counts[d] in (n * k // total, -(-n * k // total))
        (owner,) = pattern.owners(n, n + 1)
        counts[owner] += 1
        assert pattern.rows_until(owner, counts[owner]) == n + 1
    assert counts[0] == 2 * slots[0] + (owner == 0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 300), st.integers(0, 300)
)
def test_owners_of_any_rows_are_the_pattern_repeated(slots, start, count):
    pattern = Pattern(slots)
    alone = [pattern.owners(n, n + 1)[0] for n in range(start, start + count)]
    assert pattern.owners(start, start + count) == alone


def test_the_example_of_the_module_is_true() -> None:
    pattern = Pattern([3, 1])
    assert pattern.period == [0, 0, 1, 0]
    assert pattern.owners(6, 7) == [1] and pattern.count(1, 6) == 1


def test_golden_patterns() -> None:
    """As saved states expect them: other patterns would be another ORDER_VERSION."""
    assert Pattern([2, 2]).period == [0, 1, 0, 1]
    assert Pattern([1, 5, 3]).period == [1, 2, 1, 1, 2, 1, 0, 2, 1]
    assert Pattern([1]).period == [0]


def test_rare_datasets_do_not_meet_in_one_batch() -> None:
    pattern = Pattern([63, *[1] * 7])
    for start in range(140):
        assert sum(owner > 0 for owner in pattern.owners(start, start + 10)) <= 2


def test_a_long_period_is_spread_as_well() -> None:
    slots = whole_slots([1_281_167, 50_000, 100, 3], [1] * 4)
    pattern = Pattern(slots)
    owners = np.array(pattern.period)
    assert len(owners) == sum(slots)
    for d, k in enumerate(slots):
        off = np.cumsum(owners == d) - np.arange(1, len(owners) + 1) * k / len(owners)
        assert off.min() > -1 and off.max() < 1


@pytest.mark.parametrize(
    "weights, slots",
    [
        ([1, 1], [1, 1]),
        ([3, 1], [3, 1]),
        ([0.75, 0.25], [3, 1]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([1 / 3, 2 / 3], [1, 2]),
        ([6e300, 2e300], [3, 1]),
        ([1e-300, 2e-300], [1, 2]),
        ([np.float64(0.5), np.int64(1)], [1, 2]),
        (np.array([0.5, 1.5], np.float32), [1, 3]),
        (torch.tensor([0.5, 1.5]), [1, 3]),
        ([Fraction(1, 3), Decimal("0.5")], [2, 3]),
        ((5,), [1]),
        ([1, 1e-12], [MAX_SLOTS, 1]),
        ([1, 1e300], [1, MAX_SLOTS]),
        ([10**400, 1], [MAX_SLOTS, 1]),
    ],
)
def test_weights_are_proportions(weights: Any, slots: list[int]) -> None:
    assert whole_slots(weights, [1] * len(slots)) == slots


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
def test_weights_are_met_within_a_slot(weights):
    slots = whole_slots(weights, [1] * len(weights))
    assert min(slots) >= 1 and sum(slots) <= MAX_SLOTS + len(slots)
    for weight, k in zip(weights, slots, strict=True):
        assert abs(weight / sum(weights) - k / sum(slots)) <= len(slots) / MAX_SLOTS


@pytest.mark.parametrize(
    "weights",
    [
        *([1, 0], [1, -1], [0, 0], [1, float("nan")], [1, float("inf")], [1, -0.0]),
        *([1], [1, 1, 1], [], 3, "12", ["1", "2"], [None, 1], [1, [1]], [1, 1j]),
    ],
)
def test_wrong_weights_are_told(folders: list[Path], weights: Any) -> None:
    with pytest.raises(
        OptionError, match=r"weights is .*: expected a number above 0 for each of the 2"
    ):
        mixed(folders[:2], weights)


# --- the law, as arithmetic and reads -----------------------------------------------------------


def consumer(
    mixture: Mixture, epoch: int, workers: int, start: int = 0
) -> list[tuple[list[str], int]]:
    """(keys, valid) of each batch of this rank, as so many workers make them together."""
    each: list[Iterator[tuple[list[str], int]]] = []
    for worker in range(workers):
        share = mixture.share_of(epoch, worker, workers, start)
        each.append(batches_of(mixture.read_share(share, Consumers(workers, 1), mixture.options)))
    batches = itertools.chain.from_iterable(itertools.zip_longest(*each))
    return [batch for batch in batches if batch is not None]


def batches_of(reader: ShareReader) -> Iterator[tuple[list[str], int]]:
    for batch in reader:
        keys = [reader.make(row, Progress())[0] for row in reader.rows(batch)]
        assert len(keys) == batch.size
        yield keys, batch.valid


components = st.lists(st.integers(0, len(SIZES) - 1), min_size=1, max_size=4)
tails = st.sampled_from(["pad", "drop", "exact"])


@st.composite
def mixtures(draw: Any) -> dict[str, Any]:
    which = draw(components)
    batch_size = draw(st.sampled_from([None, 1, 2, 3, 4, 8, 12]))
    return {
        "which": which,
        "weights": draw(
            st.none()
            | st.lists(st.integers(1, 9), min_size=len(which), max_size=len(which))
            | st.lists(st.floats(0.05, 1), min_size=len(which), max_size=len(which))
        ),
        "length": draw(st.sampled_from(["first", "last", 1, 7, 50, 131])),
        "batch_size": batch_size,
        "world_size": draw(st.integers(1, 3)),
        "workers": draw(st.integers(1, 3)),
        "tail": draw(tails),
        "seed": draw(st.integers(0, 3)),
        "epoch": draw(st.integers(0, 3)),
        "options": {
            "shuffle_buffer": draw(st.sampled_from([2, 10, "all"])),
            "spans": draw(st.sampled_from([1, 2, 4, 64])),
            "where": draw(st.none() | st.just({"label": lambda c: c >= 0})),
        },
    }


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=mixtures())
def test_global_rows_are_those_of_the_oracle_for_any_ranks_and_workers(folders, case):
    size, world_size, tail = case["batch_size"] or 1, case["world_size"], case["tail"]
    each, alone = [], None
    for rank in range(world_size):
        try:
            mixture = mixed(
                [folders[d] for d in case["which"]],
                case["weights"],
                case["length"] if case["length"] != "last" or not case["weights"] else 50,
                batch_size=case["batch_size"],
                seed=case["seed"],
                tail=tail,
                rank=rank,
                world_size=world_size,
                **case["options"],
            )
        except OptionError as error:
            assert tail == "drop" and "leaves nothing" in str(error)
            return
        alone = rows_of(mixture, case["epoch"]) if alone is None else alone
        each.append(consumer(mixture, case["epoch"], case["workers"]))
        assert len(each[-1]) == len(mixture)
    assert len({len(one) for one in each}) == 1  # equal steps
    own, repeated = [], []
    for step in zip(*each, strict=True):
        for keys, valid in step:
            own += keys[:valid]
            repeated += keys[valid:]
            assert len(keys) == size or (tail == "pad" and world_size == 1)
    if tail == "drop":
        assert own == alone[: len(own)] and not repeated
        assert 0 <= len(alone) - len(own) < size * world_size
    else:
        assert own == alone
        assert len(repeated) < size * world_size
        assert repeated == [alone[i % len(alone)] for i in range(len(repeated))]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=mixtures(), epochs=st.integers(2, 5))
def test_every_pass_holds_every_record_once_and_goes_on_over_epochs(folders, case, epochs):
    mixture = mixed(
        [folders[d] for d in case["which"]],
        case["weights"],
        min(case["length"], 50) if isinstance(case["length"], int) else "first",
        batch_size=case["batch_size"],
        seed=case["seed"],
        **case["options"],
    )
    of: list[list[str]] = [[] for _ in case["which"]]
    pattern = pattern_of(mixture)
    for epoch in range(epochs):
        rows = flat([keys for keys, _ in consumer(mixture, epoch, 1)])
        assert len(rows) == mixture.length == mixture.records
        for n, key in enumerate(rows):
            (d,) = pattern.owners(n, n + 1)
            assert owner(key) == case["which"][d]
            of[d].append(key)
    for d, keys in enumerate(of):
        which = case["which"][d]
        assert len(keys) == epochs * pattern.count(d, mixture.length)
        everything = [f"{which}/{i:06d}" for i in range(TOTALS[which])]
        for one in range(0, len(keys), len(everything)):
            part = keys[one : one + len(everything)]
            if len(part) == len(everything):
                assert sorted(part) == everything
            assert len(set(part)) == len(part)


def test_passes_are_shuffled_anew_and_datasets_apart(folders: list[Path]) -> None:
    mixture = mixed([folders[0], folders[0]], [1, 1])
    seen: list[list[str]] = [[], []]
    for epoch in range(2):
        for n, key in enumerate(rows_of(mixture, epoch)):
            seen[n % 2].append(key)
    passes = [tuple(keys[i : i + 97]) for keys in seen for i in (0, 97)]
    assert len(set(passes)) == 4


def test_a_mixture_of_which_nothing_is_shuffled_is_the_same_each_pass(folders: list[Path]) -> None:
    for shuffle in (False, True):
        parts = [
            ShardDataset(folder, batch_size=8, fields=("__key__",), decode=None, shuffle=shuffle)
            for folder in (folders[0], folders[2])
        ]
        mixture = ShardDataset.mix(parts, [1, 1])
        first, second = [*mixture], [*mixture]
        assert (first == second) is not shuffle
        assert mixture.epoch == int(shuffle)


@pytest.mark.parametrize("weights", [None, [1, 1, 1], [5, 2, 1], [0.9, 0.05, 0.05]])
def test_each_batch_holds_its_share_to_less_than_two_rows(
    folders: list[Path], weights: list[float] | None
) -> None:
    which = [folders[0], folders[2], folders[3]]
    shares = [97, 11, 19] if weights is None else weights
    mixture = mixed(which, weights, 200, batch_size=20)
    for keys in batches(mixture):
        for d, weight in zip((0, 2, 3), shares, strict=True):
            share = weight / sum(shares) * len(keys)
            assert abs(sum(owner(key) == d for key in keys) - share) < 2


@pytest.mark.parametrize(
    "weights, first, last",
    [
        ([1, 1], 21, 194),  # dataset 2, of 11, comes second in each pair of rows ...
        ([1, 9], 13, 970),
        ([9, 1], 108, 110),
    ],
)
def test_length_is_until_the_first_or_the_last_has_come_once(
    folders: list[Path], weights: list[float], first: int, last: int
) -> None:
    for length, about in (("first", first), ("last", last)):
        mixture = mixed([folders[0], folders[2]], weights, length)
        rows = rows_of(mixture, 0)
        ends = []
        for d, total in ((0, 97), (2, 11)):
            mine = [n for n, key in enumerate(rows) if owner(key) == d]
            ends.append(mine[total - 1] + 1 if len(mine) >= total else 10**9)
        assert mixture.length == (min(ends) if length == "first" else max(ends))
        assert abs(mixture.length - about) <= 10
        assert [len(keys) for keys in batches(mixture)] == [
            min(8, mixture.length - n) for n in range(0, mixture.length, 8)
        ]


def test_by_default_all_come_once(folders: list[Path]) -> None:
    mixture = mixed(folders)
    assert mixture.length <= sum(TOTALS)
    last = mixed(folders, length="last")
    assert last.length == sum(TOTALS)
    assert len(set(rows_of(last, 0))) == sum(TOTALS)


def test_one_dataset_alone_can_have_an_epoch_of_any_length(folders: list[Path]) -> None:
    mixture = mixed([folders[2]], length=4)
    rows = [flat(rows_of(mixture, epoch)[:]) for epoch in range(11)]
    got = []
    for epoch in range(11):
        mixture.set_epoch(epoch)
        got.append(flat(batches(mixture)))
    assert [flat(keys) for keys in got] == rows
    keys = flat(got)
    for start in range(0, 44, 11):
        assert len(set(keys[start : start + 11])) == 11


@pytest.mark.parametrize(
    "length, message",
    [
        ("frist", "length is 'frist': expected rows of an epoch, or until the 'first'"),
        (0, "length is 0: expected a whole number"),
        (-5, "length is -5"),
        (1.5, "length is 1.5"),
        (True, "length is True"),
        (None, "length is None"),
        (1 << 70, f"length is {1 << 70}"),
    ],
)
def test_wrong_lengths_are_told(folders: list[Path], length: Any, message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        mixed(folders, length=length)


def test_ranges_are_the_rows_of_the_batches(folders: list[Path]) -> None:
    draw = random.Random(0)
    for _ in range(300):
        world_size, workers = draw.randint(1, 3), draw.randint(1, 3)
        mixture = mixed(
            folders[2:],
            length=draw.randint(9, 90),
            batch_size=draw.choice([None, 1, 3]),
            tail=draw.choice(["pad", "drop", "exact"]),
            rank=draw.randrange(world_size),
            world_size=world_size,
        )
        share = mixture.share_of(1, draw.randrange(workers), workers, draw.randint(0, 100))
        pieces = [batch.pieces for batch in share]
        assert [
            tuple((0, start, stop - start) for start, stop in [ends] if start < stop)
            for ends in batch_ranges(share)
        ] == pieces


def test_a_long_epoch_costs_little_at_its_start(folders: list[Path]) -> None:
    mixture = mixed(folders, length=10**15, batch_size=None)
    assert len(mixture) == 10**15
    iterator = iter(mixture)
    assert len({next(iterator) for _ in range(5)}) == 5  # a list of its rows would never be made


# --- subsets of one dataset ---------------------------------------------------------------------


def test_subsets_of_one_dataset_can_be_balanced(folders: list[Path]) -> None:
    cats = opened(folders[0], where={"label": "cat"})
    dogs = opened(folders[0], where={"label": "dog"}).select(range(5))
    mixture = ShardDataset.mix([cats, dogs], [1, 1])
    dog_rows = []
    for keys in batches(mixture):
        numbers = [int(key[2:]) for key in keys]
        assert {number % 3 for number in numbers} <= {0, 1}
        assert abs(sum(number % 3 == 0 for number in numbers) - len(keys) / 2) <= 1
        dog_rows += [number for number in numbers if number % 3 == 1]
    assert sorted(dog_rows) == [1, 4, 7, 10, 13]  # "first": they came once
    assert flat(batches(mixture)) == rows_of(mixture, 0)


# --- real loaders -------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("batch_size", [None, 8])
def test_loaders_of_any_workers_give_the_epoch(
    folders: list[Path], workers: int, batch_size: int | None
) -> None:
    mixture = mixed(folders, [4, 1, 2, 1], 77, batch_size=batch_size, seed=2)
    for epoch in (0, 3):
        mixture.set_epoch(epoch)
        items = drain(DataLoader(mixture, batch_size=None, num_workers=workers))
        assert len(items) == len(mixture)
        if batch_size is None:
            assert sorted(key for (key,) in items) == sorted(rows_of(mixture, epoch))
        else:
            assert flat(batches(items)) == rows_of(mixture, epoch)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_persistent_spawned_workers_follow_the_epochs_of_mixed_subsets(
    folders: list[Path], workers: int
) -> None:
    parts = [
        opened(folders[0], where={"label": ["cat", "eel"]}),
        opened(folders[3]).select(range(3, 19)),
    ]
    mixture = ShardDataset.mix(parts, [4, 1], length=77)
    loader = DataLoader(
        mixture,
        batch_size=None,
        num_workers=workers,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    for epoch in (2, 0):
        mixture.set_epoch(epoch)
        assert flat(batches(loader)) == rows_of(mixture, epoch)
    loader._iterator._shutdown_workers()  # type: ignore[union-attr]


@pytest.mark.parametrize("world_size, workers", [(2, 0), (2, 3), (4, 1)])
def test_exact_over_ranks_counts_every_row_once(
    folders: list[Path], world_size: int, workers: int
) -> None:
    found, lengths = [], set()
    for rank in range(world_size):
        mixture = mixed(
            folders, length="last", batch_size=4, tail="exact", rank=rank, world_size=world_size
        )
        items = drain(DataLoader(mixture, batch_size=None, num_workers=workers))
        lengths.add(len(items))
        for keys, valid in items:
            assert len(keys) == 4 and valid.dtype == torch.bool
            found += [key for key, own in zip(keys, valid.tolist(), strict=True) if own]
    assert len(lengths) == 1
    assert sorted(found) == sorted(rows_of(mixture, 0))


def test_damage_comes_through_a_mixture_and_its_workers(
    folders: list[Path], tmp_path: Path
) -> None:
    bad = make(tmp_path / "9", [12])
    flip(shard_files(bad)[0], shard_files(bad)[0].read_bytes().index(payload(5)) + 3)
    for workers in (0, 2):
        mixture = mixed([folders[0], bad], [1, 1], 40)
        with pytest.raises(DamageError, match=r"record 5 at byte .*k/000005.jpg"):
            loaded(mixture, workers)


def test_pixels_do_not_depend_on_workers_or_on_where_a_run_went_on(tmp_path: Path) -> None:
    def images(**options: Any) -> Mixture:
        return ShardDataset.mix(
            [
                ShardDataset(
                    folder,
                    batch_size=4,
                    fields=("image", "label"),
                    transform=RandomResizedCrop(8, flip=True),
                    seed=5,
                    **options,
                )
                for folder in (tmp_path / "a", tmp_path / "b")
            ],
            [2, 1],
            length=30,
        )

    make(tmp_path / "a", [9, 4], image=jpeg)
    make(tmp_path / "b", [5], image=lambda i: jpeg(100 + i))
    mixture = images()
    mixture.set_epoch(1)
    alone = [images.clone() for images, _ in mixture]
    mixture.set_epoch(1)
    passes = [images.clone() for images, _ in mixture]
    assert all(torch.equal(a, b) for a, b in zip(alone, passes, strict=True))
    for workers, steps in ((2, 0), (1, 3), (0, 7)):
        again = images()
        again.load_state_dict(mixture.state_dict(steps))
        got = [image for image, _ in DataLoader(again, batch_size=None, num_workers=workers)]
        assert len(got) == len(alone) - steps
        assert all(torch.equal(a, b) for a, b in zip(got, alone[steps:], strict=True))
    mixture.set_epoch(0)
    assert not torch.equal(next(iter(mixture))[0], alone[0])


# --- going on -----------------------------------------------------------------------------------


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(state)
    assert len(text) < 1024
    again: dict[str, Any] = json.loads(text)
    return again


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    weights=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    length=st.sampled_from(["first", 1, 48, 50, 99]),
    epoch=st.integers(0, 3),
    ranks=st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3)]),
    then=st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3)]),
    workers=st.integers(1, 3),
    data=st.data(),
)
def test_a_run_goes_on_from_any_step_in_other_ranks_and_workers(
    folders, weights, length, epoch, ranks, then, workers, data
):
    def make_one(rank: int, geometry: tuple[int, int]) -> Mixture:
        world_size, batch_size = geometry
        return mixed(
            [folders[0], folders[2], folders[3]],
            weights,
            length,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
        )

    first = make_one(0, ranks)
    first.set_epoch(epoch)
    alone = rows_of(first, epoch)
    steps = data.draw(st.integers(0, len(first)))
    state = through_json(first.state_dict(steps))
    for rank in range(1, ranks[0]):
        other = make_one(rank, ranks)
        other.set_epoch(epoch)
        assert other.state_dict(steps) == state
    each = []
    for rank in range(then[0]):
        on = make_one(rank, then)
        on.load_state_dict(state)
        assert on.epoch == epoch
        each.append(consumer(on, epoch, workers, state["units"]))
        assert len(each[-1]) == on.remaining
    rest = alone[min(len(alone), steps * 12) :]
    together = [key for step in zip(*each, strict=True) for keys, v in step for key in keys[:v]]
    assert together == rest
    # Epochs after it are those of a run that was never stopped.
    on.set_epoch(epoch + 1)
    assert rows_of(on, epoch + 1) == rows_of(make_one(0, ranks), epoch + 1)


def test_every_step_can_be_gone_on_from_twice(folders: list[Path]) -> None:
    whole = mixed(folders, [4, 1, 2, 1], 77)
    whole.set_epoch(2)
    alone = batches(whole)
    for steps in range(len(whole) + 1):
        once = mixed(folders, [4, 1, 2, 1], 77)
        once.load_state_dict(through_json(whole.state_dict(steps)))
        assert once.remaining == len(alone) - steps
        assert batches(once) == alone[steps:]
        for more in (0, 1, 2):
            if steps + more <= len(alone):
                twice = mixed(folders, [4, 1, 2, 1], 77)
                once.load_state_dict(whole.state_dict(steps))
                twice.load_state_dict(once.state_dict(more))
                assert batches(twice) == alone[steps + more :]


def test_options_that_were_not_given_come_from_the_state(folders: list[Path]) -> None:
    saved = mixed(folders[:1] + folders[2:], batch_size=8, seed=7, unit=2, length=60)
    saved.set_epoch(1)
    alone = batches(saved)

    def parts(**options: Any) -> list[ShardDataset]:
        return [
            ShardDataset(folder, batch_size=8, fields=("__key__",), decode=None, **grouped(options))
            for folder in folders[:1] + folders[2:]
        ]

    state = through_json(saved.state_dict(3))
    own = parts()
    on = ShardDataset.mix(own, length=60)
    on.load_state_dict(state)
    assert (on.seed, on.tail) == (7, "pad")
    assert batches(on) == alone[3:]
    for workers in (1, 2):
        on.load_state_dict(state)
        assert loaded(on, workers) == alone[3:]
    assert [d.seed for d in own] == [0, 0, 0]  # the user's own stay as they were
    for options, name in (
        ({"seed": 3}, "seed is 3, but the state was saved with 7"),
        ({"shuffle_buffer": 11}, "shuffle_buffer is 11, but the state was saved with 10"),
        ({"tail": "exact"}, "tail is 'exact', but"),
        ({"unit": 4}, "unit is 4, but"),
    ):
        with pytest.raises(StateError, match=f"dataset 0 of the mixture: {name}"):
            ShardDataset.mix(parts(**options), length=60).load_state_dict(state)


def test_a_refused_state_changes_nothing(folders: list[Path]) -> None:
    mixture = mixed(folders, seed=3, length=60)
    alone = batches(mixture)
    state = mixed(folders, seed=3, length=60).state_dict(2)
    for change in ({"units": (1 << 63) - 1}, {"slots": [1]}, {"mix": state["mix"][:3]}):
        with pytest.raises(StateError):
            mixture.load_state_dict(state | change)
        assert batches(mixture) == alone


def test_states_of_other_mixtures_are_refused(folders: list[Path]) -> None:
    state = mixed(folders[:2], [1, 2], 50).state_dict(1)
    one = opened(folders[0])
    cats = opened(folders[1], where={"label": "cat"})
    for mixture, message in (
        (mixed(folders[:2], [2, 1], 50), r"slots of this mixture is \[2, 1\], but .* \[1, 2\]"),
        (mixed(folders[:2], [1, 2], 51), r"length of this mixture is 51, but .* with 50"),
        (mixed(folders[:3], length=50), "the state is of 2 datasets, and this is a mixture of 3"),
        (ShardDataset.mix([one, cats], [1, 2], length=50), "dataset 1 of the mixture: .*selection"),
    ):
        with pytest.raises(StateError, match=message):
            mixture.load_state_dict(state)
    with pytest.raises(StateError, match="of no mixture, and this is a mixture of 2"):
        mixed(folders[:2]).load_state_dict(one.state_dict(1))
    with pytest.raises(StateError):
        one.load_state_dict(state)
    for edited in ([1, 2], [[1], [2]], [None, None]):
        with pytest.raises(StateError):
            mixed(folders[:2], [1, 2], 50).load_state_dict(state | {"mix": edited})


def test_the_state_of_eight_datasets_is_small(folders: list[Path]) -> None:
    parts = [
        opened(
            folders[0],
            seed=(1 << 64) - 1,
            shuffle_buffer=1_000_000_000 + i,
            where={"label": lambda c: c < 2},
        )
        for i in range(8)
    ]
    mixture = ShardDataset.mix(parts, [1_000_003 + 7919 * i for i in range(8)], length=10**15)
    mixture.set_epoch(10**6)
    state = through_json(mixture.state_dict(10**12))
    mixture.load_state_dict(state)
    iterator: Any = iter(mixture)
    through_json(iterator.state_dict())


def test_a_stateful_loader_goes_on_and_gives_a_state_for_others(folders: list[Path]) -> None:
    def one() -> Mixture:
        return mixed(folders, [4, 1, 2, 1], 77)

    alone = batches(one())
    loader = StatefulDataLoader(one(), batch_size=None, num_workers=2)
    iterator = iter(loader)
    taken = batches([next(iterator) for _ in range(3)])
    state = loader.state_dict()
    del iterator
    assert taken == alone[:3]
    again = StatefulDataLoader(one(), batch_size=None, num_workers=2)
    again.load_state_dict(state)
    assert batches(again) == alone[3:]
    other = one()
    other.load_state_dict(through_json(other.state_from(state)))
    assert loaded(other, 3) == alone[3:]


# --- what can be mixed --------------------------------------------------------------------------


def test_what_cannot_be_mixed_is_told(folders: list[Path]) -> None:
    a, b = opened(folders[0]), opened(folders[2])
    empty = opened(make(folders[0].parent / "empty", [0, 0]))
    for datasets, message in (
        ([], "expected a list of ShardDatasets, found []"),
        (a, "expected a list of ShardDatasets, found ShardDataset("),
        (iter([a, b]), "expected a list of ShardDatasets"),
        ([a, 3], "expected ShardDatasets, found int"),
        ([a, ShardDataset.mix([a, b])], "expected ShardDatasets, found Mixture"),
        ([a, opened(folders[2], batch_size=4)], "batch_size of dataset 1: 4, and of dataset 0: 8"),
        ([a, opened(folders[2], batch_size=None)], "batch_size of dataset 1: None"),
        ([a, b, opened(folders[2], seed=1)], "seed of dataset 2: 1, and of dataset 0: 0"),
        ([a, opened(folders[2], tail="drop")], "tail of dataset 1: 'drop'"),
        ([a, opened(folders[2], rank=0, world_size=2)], "rank and world_size of dataset 1: (0, 2)"),
        (
            [a, ShardDataset(folders[2], batch_size=8, decode=None, fields=("label",))],
            "fields of dataset 1: ('label',), and of dataset 0: ('__key__',)",
        ),
        ([a, ShardDataset(folders[2], batch_size=8, decode=None)], "fields of dataset 1: None"),
        ([a, empty], "dataset 1 holds no records"),
    ):
        with pytest.raises(OptionError, match=re.escape(message)):
            ShardDataset.mix(datasets)  # type: ignore[arg-type]


def test_labels_that_mean_other_classes_are_not_mixed(tmp_path: Path) -> None:
    def animals(name: str, classes: Sequence[str], **options: Any) -> Any:
        folder = make(tmp_path / name, [5], classes=classes)
        return ShardDataset(folder, batch_size=2, decode=None, fields=("label",), **options)

    cats = animals("a", ["cat", "dog", "eel"])
    for other, message in (
        (["cat", "eel"], "label 1 is 'eel' in dataset 1, and 'dog' in dataset 0; pack one with"),
        (["cat", "dog", "eel", "fox"], "label 3 is 'fox' in dataset 1, and no class in dataset 0"),
    ):
        name = "-".join(other)
        with pytest.raises(OptionError, match=re.escape(message)):
            ShardDataset.mix([cats, animals(name, other)])
        mapped = animals(name, other, target_transform=lambda label: label)
        assert ShardDataset.mix([cats, mapped], weights=[1, 1])


def test_drop_that_leaves_nothing_is_refused(folders: list[Path]) -> None:
    with pytest.raises(OptionError, match="tail='drop' leaves nothing"):
        mixed(folders, length=7, tail="drop")


def test_the_datasets_stay_the_users_own(folders: list[Path]) -> None:
    a, b = opened(folders[0]), opened(folders[2])
    mixture = ShardDataset.mix([a, b])
    alone, mine = batches(mixture), batches(a)
    a.set_epoch(4)
    later = ShardDataset(folders[0], batch_size=8, fields=("__key__",), decode=None)
    later.load_state_dict(opened(folders[0], seed=0).state_dict(2))
    b.load_state_dict(opened(folders[2]).state_dict(1))
    assert batches(mixture) == alone
    a.set_epoch(0)
    mixture.set_epoch(3)
    assert batches(a) == mine and (a.epoch, mixture.epoch) == (0, 3)


def test_a_mixture_says_what_it_is_and_travels(folders: list[Path]) -> None:
    mixture = mixed([folders[0], folders[2]], [3, 1], 50)
    assert repr(mixture).startswith("<50 rows an epoch: 0.75 of ShardDataset(")
    assert batches(pickle.loads(pickle.dumps(mixture))) == batches(mixture)


def test_a_collate_fn_of_ones_own(folders: list[Path]) -> None:
    parts = [opened(folders[0], collate_fn=len), opened(folders[2])]
    assert list(ShardDataset.mix(parts, length=20)) == [8, 8, 4]
    assert list(ShardDataset.mix(parts, length=9, collate_fn=tuple))[1] == (
        (rows_of(ShardDataset.mix(parts, length=9), 0)[8],),
    )
