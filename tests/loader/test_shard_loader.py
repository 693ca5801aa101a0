"""ShardLoader: the same batches in the same order as DataLoader, whatever becomes of its processes.

The children of tests here are in step with them by pipes and events. A batch that is kept is looked
at again after all others came, since by then its memory would have been used again.
"""

import gc
import inspect
import pickle
import random
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import LIMIT_S
from support.leftovers import nothing_left
from support.loading import (
    BATCH,
    EACH_POOL,
    POOLS,
    STEPS,
    TUPLES,
    Packed,
    Workers,
    assert_same,
    expected_of,
    labels,
    loader_of,
    number,
    odd,
    picture,
    pictures,
    stream,
)
from support.small_datasets import jpeg, payload
from torch.utils.data import DataLoader

import shardio
from shardio import (
    CenterCrop,
    EpochError,
    OptionError,
    RandomResizedCrop,
    ShardDataset,
    ShardLoader,
    WorkerError,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def chw(data: bytes) -> torch.Tensor:
    return torch.full((3, 32, 40), number(data) / 7)


def permuted(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.full((32, 40, 3), number(data) % 251, np.uint8)).permute(2, 0, 1)


def varying(data: bytes) -> Any:
    return np.full((40 + number(data) % 3, 40, 3), number(data) % 251, np.uint8)


def huge(label: int) -> int:
    return label + (1 << 63)


def none(label: int) -> int | None:
    return label or None


def half(label: int) -> Any:
    return np.float16(label)


def arrays(samples: list[Any]) -> Any:
    return [np.stack([image for image, _ in samples]), {"y": np.array([y for _, y in samples])}]


def real(folder: Path) -> ShardDataset:
    return ShardDataset(folder, batch_size=BATCH)


CASES: dict[str, dict[str, Any]] = {
    "images": TUPLES | {"decode": picture},
    "float tensors": TUPLES | {"decode": chw},
    "permuted tensors": TUPLES | {"decode": permuted},
    "bytes": TUPLES | {"decode": None},
    "dicts": {"decode": picture},
    "one field": {"fields": ("label",), "decode": None},
    "sizes that vary": TUPLES
    | {"decode": varying, "collate_fn": partial(shardio.collate, ragged=("image",))},
    "ints beyond int64": TUPLES | {"decode": None, "target_transform": huge},
    "None": TUPLES
    | {
        "decode": picture,
        "target_transform": none,
        "collate_fn": partial(shardio.collate, ragged=(1,)),
    },
    "numpy scalars": TUPLES | {"decode": picture, "target_transform": half},
    "own collate": TUPLES | {"decode": picture, "collate_fn": odd},
    "arrays of own collate": TUPLES | {"decode": picture, "collate_fn": arrays},
    "drop": TUPLES | {"decode": picture, "tail": "drop"},
    "exact": TUPLES | {"decode": picture, "tail": "exact", "rank": 1, "world_size": 2},
    "exact dicts": {"decode": picture, "tail": "exact", "rank": 2, "world_size": 3},
    "ranks": TUPLES | {"decode": picture, "rank": 1, "world_size": 3},
    "where": TUPLES | {"decode": picture, "where": {"label": ["cat", "eel"]}},
    "in order": TUPLES | {"decode": picture, "shuffle": False},
    "all": TUPLES | {"decode": picture, "shuffle_buffer": "all"},
}
REAL: dict[str, dict[str, Any]] = {
    "built-in": TUPLES | {"transform": RandomResizedCrop(40, flip=True)},
    "built-in, dicts": {"transform": CenterCrop(50)},
    "built-in, exact": TUPLES | {"transform": CenterCrop(50), "tail": "exact"},
    "PIL": {"decode": "pil"},
    "numpy": TUPLES
    | {"decode": "numpy", "collate_fn": partial(shardio.collate, ragged=("image",))},
}


@pytest.mark.parametrize("workers", [(0, 0), (2, 2)], ids=["loop", "2x2"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_batches_are_those_of_the_dataset(
    folder: Path, options: dict[str, Any], workers: Workers
) -> None:
    expected = list(stream(folder, **options))
    with loader_of(stream(folder, **options), workers) as loader:
        assert len(loader) == len(expected) == loader.remaining
        assert_same(loader, expected)


@pytest.mark.parametrize("workers", [(0, 2), (2, 2)], ids=["0x2", "2x2"])
@pytest.mark.parametrize("options", REAL.values(), ids=REAL.keys())
def test_batches_of_images_are_those_of_the_dataset(
    packed: Packed, options: dict[str, Any], workers: Workers
) -> None:
    folder = packed([20, 13], image=lambda i: jpeg(i, (60, 50 + 10 * (i % 2))))
    expected = list(stream(folder, **options))
    with loader_of(stream(folder, **options), workers) as loader:
        assert_same(loader, expected)
        loader.set_epoch(1)
        again = stream(folder, **options)
        again.set_epoch(1)
        assert_same(loader, again)  # now rows are written where those of the batch before lay


def contents(batch: Any) -> Any:
    """As torch's default_convert leaves it, which makes lists of tuples, and tensors of arrays."""
    if isinstance(batch, tuple):
        return [contents(one) for one in batch]
    if isinstance(batch, dict):
        return {name: contents(one) for name, one in batch.items()}
    return batch


@pytest.mark.parametrize("name", ["images", "float tensors", "permuted tensors", "dicts", "exact"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_a_dataloader(folder: Path, name: str, workers: int) -> None:
    torchs = DataLoader(stream(folder, **CASES[name]), batch_size=None, num_workers=workers)
    expected = [contents(batch) for batch in torchs]
    with ShardLoader(stream(folder, **CASES[name]), num_workers=2) as loader:
        assert_same([contents(batch) for batch in loader], expected)


@pytest.mark.parametrize("prefetch", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "workers", [(0, 1), (0, 4), (1, 3), (3, 1)], ids=lambda c: f"{c[0]}x{c[1]}"
)
def test_any_number_of_batches_ahead(folder: Path, prefetch: int, workers: Workers) -> None:
    expected = list(pictures(folder))
    dataset = pictures(folder)
    with loader_of(dataset, workers, prefetch_factor=prefetch) as loader:
        assert_same(loader, expected)


@EACH_POOL
def test_mixtures(packed: Packed, workers: Workers) -> None:
    def mixture() -> Any:
        first = pictures(packed([30], "a"), seed=3)
        second = pictures(packed([25, 5], "b", image=lambda i: payload(i + 100)), seed=3)
        return ShardDataset.mix([first, second], [2, 1])

    expected = list(mixture())
    with loader_of(mixture(), workers) as loader:
        assert_same(loader, expected)


@EACH_POOL
def test_selections(folder: Path, workers: Workers) -> None:
    dataset = pictures(folder).select(range(5, 60, 2))
    expected = list(pictures(folder).select(range(5, 60, 2)))
    with loader_of(dataset, workers) as loader:
        assert_same(loader, expected)


def test_options_of_dataloader_are_explained(folder: Path) -> None:
    dataset = pictures(folder)
    ours = inspect.signature(ShardLoader).parameters
    assert "num_workers" in ours and "options" not in ours  # who asks is told the real ones
    for name in inspect.signature(DataLoader).parameters.keys() - ours.keys():
        options: dict[str, Any] = {name: None}
        with pytest.raises(OptionError, match=rf"takes no {name}: \w"):
            ShardLoader(dataset, **options)
    for name, instead in (("workers", "num_workers"), ("prefetch", "prefetch_factor")):
        options = {name: 2}
        with pytest.raises(OptionError, match=rf"takes no {name}: it is called {instead}"):
            ShardLoader(dataset, **options)
    with pytest.raises(TypeError, match="colour"):
        ShardLoader(dataset, colour=1)  # type: ignore[call-arg]


OF_A_DEVICE: dict[str, Any] = {
    **{"mean": 0.5, "std": 0.5, "dtype": torch.half, "channels_last": False},
    **{"pin": True, "ahead": 2},
}


@pytest.mark.parametrize("option", OF_A_DEVICE)
def test_options_of_a_device_without_one_are_refused(folder: Path, option: str) -> None:
    dataset = pictures(folder)
    with pytest.raises(OptionError, match=f"{option} without a device"):
        ShardLoader(dataset, num_workers=0, **{option: OF_A_DEVICE[option]})
    ShardLoader(dataset, num_workers=0, pin=False)  # nothing is


@EACH_POOL
def test_threads_may_share_an_iterator(folder: Path, workers: Workers) -> None:
    options = {"batch_size": 2}
    found: list[Any] = []
    with loader_of(pictures(folder, **options), workers) as loader:
        iterator = iter(loader)
        threads = [threading.Thread(target=lambda: found.extend(iterator)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    assert sorted(labels(found)) == sorted(labels(pictures(folder, **options)))


def test_a_pickled_loader_makes_processes_of_its_own(folder: Path) -> None:
    expected = list(pictures(folder))
    with ShardLoader(pictures(folder), num_workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        twin = pickle.loads(pickle.dumps(loader))
        with twin:
            assert_same(twin, expected)
            assert set(twin.explain().pids).isdisjoint(loader.explain().pids)
        assert_same(iterator, expected[1:])


@EACH_POOL
def test_any_sequence_of_epochs(folder: Path, workers: Workers) -> None:
    """The next epoch is guessed: by one more, or the same again; wrong guesses cost no batch."""
    draw = random.Random(workers[0])
    with loader_of(pictures(folder), workers) as loader:
        for epoch in (0, 1, 2, 7, 8, 3, 4, 4, 4, 5, 0, 9, 10):
            loader.set_epoch(epoch)
            with suppress(UserWarning):
                iterator = iter(loader)
            steps = draw.choice([STEPS, STEPS, draw.randrange(STEPS)])
            found = [next(iterator) for _ in range(steps)]
            assert labels(found) == expected_of(folder, epoch)[:steps]
            if steps == STEPS:
                assert next(iterator, None) is None


def test_a_stream_and_its_loader_have_no_items(folder: Path) -> None:
    dataset = pictures(folder)
    with pytest.raises(OptionError, match=r"a stream.*shardio\.open"):
        dataset[0]
    with pytest.raises(OptionError, match="without a DataLoader"):
        next(iter(DataLoader(ShardLoader(dataset, num_workers=0), batch_size=None)))  # type: ignore[arg-type]


@EACH_POOL
def test_leaving_early_and_iterating_again(folder: Path, workers: Workers) -> None:
    with loader_of(pictures(folder), workers) as loader:
        for epoch, steps in enumerate((1, 0, 5, STEPS - 1, 3)):
            loader.set_epoch(epoch)
            kept = [batch for batch, _ in zip(loader, range(steps))]  # noqa: B905
            assert labels(kept) == expected_of(folder, epoch)[:steps]
        loader.set_epoch(4)
        assert labels(loader) == expected_of(folder, 4)


@EACH_POOL
def test_a_state_at_any_step_goes_on_exactly(folder: Path, workers: Workers) -> None:
    expected = expected_of(folder, 3)
    with loader_of(pictures(folder), workers) as loader:
        loader.set_epoch(3)
        states = [loader.state_dict()]
        for _ in loader:
            states.append(loader.state_dict())
        # A pass from the middle, in processes that have begun the next epoch already.
        for step in (1, 5, STEPS - 1, STEPS):
            loader.load_state_dict(states[step])
            assert loader.remaining == STEPS - step
            assert labels(loader) == expected[step:]
        loader.set_epoch(4)
        assert labels(loader) == expected_of(folder, 4)
    for step in (0, 2, 7):
        resumed = pictures(folder)
        resumed.load_state_dict(states[step])
        assert labels(DataLoader(resumed, batch_size=None, num_workers=2)) == expected[step:]
        assert resumed.state_dict(steps=0) == states[step]


def test_a_state_is_of_the_loop_and_not_of_what_was_made_ahead(folder: Path) -> None:
    dataset = pictures(folder)
    with ShardLoader(dataset, num_workers=2, prefetch_factor=4) as loader:
        iterator = iter(loader)
        next(iterator)
        other = pictures(folder)
        assert loader.state_dict() == other.state_dict(steps=1) == dataset.state_dict(steps=1)
        assert dataset.state_dict() == loader.state_dict()


def test_options_of_a_loaded_state_reach_processes_that_run(folder: Path) -> None:
    options = {"shuffle_buffer": 12, "seed": 5}
    saved = pictures(folder, **options)
    saved.set_epoch(2)
    state = saved.state_dict(steps=4)
    dataset = ShardDataset(folder, batch_size=BATCH, decode=picture, fields=("image", "label"))
    with ShardLoader(dataset, num_workers=2) as loader:
        list(loader)
        pids = loader.explain().pids
        given = {"spans": 8} | options
        loader.load_state_dict(state)
        assert labels(loader) == expected_of(folder, 2, **given)[4:]
        loader.set_epoch(3)
        assert labels(loader) == expected_of(folder, 3, **given)
        assert loader.explain().pids == pids


def test_options_of_a_mixture_s_loaded_state_reach_processes_that_run(packed: Packed) -> None:
    first, second = packed([30], "a"), packed([25, 5], "b", image=lambda i: payload(i + 100))

    def mixture(**options: Any) -> Any:
        given = TUPLES | {"batch_size": BATCH, "decode": picture} | options
        return ShardDataset.mix([ShardDataset(folder, **given) for folder in (first, second)])

    saved = mixture(shuffle_buffer=5)
    state = saved.state_dict(steps=2)
    with ShardLoader(mixture(), num_workers=2) as loader:
        assert labels(loader) != labels(saved)
        loader.load_state_dict(state)
        saved.load_state_dict(state)
        assert labels(loader) == labels(saved)


@EACH_POOL
def test_another_iterator_ends_the_first(folder: Path, workers: Workers) -> None:
    with loader_of(pictures(folder), workers) as loader:
        first = iter(loader)
        next(first)
        loader.set_epoch(0)
        second = iter(loader)
        with pytest.raises(EpochError, match="another pass over this loader has begun"):
            next(first)
        assert labels(second) == labels(pictures(folder))


@EACH_POOL
def test_the_epoch_cannot_change_under_a_loop(folder: Path, workers: Workers) -> None:
    with loader_of(pictures(folder), workers) as loader:
        iterator = iter(loader)
        next(iterator)
        loader.set_epoch(1)
        with pytest.raises(EpochError, match="set to 1 while epoch 0 was being read"):
            next(iterator)
        assert labels(loader) == expected_of(folder, 1)


def test_two_loaders_at_once(folder: Path) -> None:
    shared = pictures(folder)
    with (
        ShardLoader(shared, num_workers=2) as first,
        ShardLoader(shared, num_workers=1) as second,
        ShardLoader(pictures(folder, seed=9), num_workers=0, threads=1) as other,
    ):
        expected = labels(pictures(folder))
        alike = expected_of(folder, 0, seed=9)
        begun = iter(first)
        shared.set_epoch(0)
        for a, b, c, d, e in zip(begun, second, other, expected, alike, strict=True):
            assert labels([a, b, c]) == [d, d, e]
        assert first.state_dict() == second.state_dict()


def test_each_warns_the_loop_that_forgets_the_epoch(folder: Path) -> None:
    with ShardLoader(pictures(folder), num_workers=0) as loader:
        loader.set_epoch(0)
        list(loader)
        with pytest.warns(UserWarning, match="epoch 0 is being read again") as caught:
            next(iter(loader))
        assert caught[0].filename == __file__


@pytest.mark.parametrize("timeout", [-1, "5", float("nan"), float("inf"), True, None])
def test_a_timeout_that_is_none(folder: Path, timeout: Any) -> None:
    dataset = pictures(folder)
    with pytest.raises(OptionError, match=r"timeout is .*expected seconds"):
        ShardLoader(dataset, num_workers=1, timeout=timeout)
    with pytest.raises(OptionError, match="give threads=1"):
        ShardLoader(dataset, num_workers=0, threads=0, timeout=5)


def test_a_closed_loader_says_so_and_can_be_iterated_again(folder: Path) -> None:
    for workers in POOLS:
        with nothing_left():
            loader = loader_of(pictures(folder), workers)
            iterator = iter(loader)
            kept = next(iterator)
            loader.close()
            with pytest.raises(WorkerError, match="iterate anew"):
                next(iterator)
            assert labels([kept]) == labels(pictures(folder))[:1]
            loader.set_epoch(0)
            assert labels(loader) == labels(pictures(folder))
            loader.close()
            loader.close()
            del loader, iterator, kept


@pytest.mark.parametrize("end", ["close", "del", "with", "cycle"])
@EACH_POOL
def test_nothing_is_left(folder: Path, workers: Workers, end: str) -> None:

    def use() -> Any:
        loader = loader_of(pictures(folder), workers)
        iterator = iter(loader)
        kept = next(iterator)[0][0]
        if end == "close":
            loader.close()
        elif end == "with":
            with loader:
                pass
        elif end == "cycle":
            loader.itself = loader  # type: ignore[attr-defined]
        return kept

    with nothing_left():
        before = set(threading.enumerate())
        kept = use()
        gc.collect()
        for thread in set(threading.enumerate()) - before:
            thread.join(LIMIT_S)  # they were told to leave
            assert not thread.is_alive()
        assert int(kept[0, 0, 0]) == labels(pictures(folder))[0][0]
        del kept
