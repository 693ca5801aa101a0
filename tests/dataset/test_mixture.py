"""Mixtures: whose each row is, passes of each dataset, lengths, tails, ranks, resuming.

`rows_of` makes a mixture's rows anew, by the order room and a list; all else is compared with that.
"""

import pickle
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.mixing import (
    SIZES,
    TOTALS,
    batches,
    consumer,
    flat,
    loaded,
    mixed,
    opened,
    owner,
    pattern_of,
    rows_of,
)
from support.reading import drain
from support.small_datasets import flip, jpeg, make, payload, shard_files
from torch.utils.data import DataLoader

from shardio import DamageError, OptionError, RandomResizedCrop, ShardDataset
from shardio.dataset.mixture import Mixture
from shardio.order.mixture import batch_ranges

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:epoch .* is being read again"),
]

Row = tuple[bytes, ...]


# --- whose each row is --------------------------------------------------------------------------


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


@settings(max_examples=75, deadline=None, suppress_health_check=list(HealthCheck))
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


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
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


@pytest.mark.usefixtures("warm_workers")
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
