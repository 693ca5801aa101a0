"""ShardLoader: the same batches in the same order as DataLoader, whatever becomes of its processes.

The children of tests here are in step with them by pipes and events. A batch that is kept is looked
at again after all others came, since by then its memory would have been used again.
"""

import gc
import inspect
import multiprocessing
import os
import pickle
import random
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import reduction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support import LIMIT_S, loader_programs, programs
from support.leftovers import children, descriptors, nothing_left
from support.programs import Program
from support.small_datasets import flip, jpeg, of_order, payload, shard_files
from support.trees import environment
from torch.utils.data import DataLoader

import shardio
from shardio import (
    CenterCrop,
    CollateError,
    DamageError,
    DecodeError,
    EpochError,
    OptionError,
    RandomResizedCrop,
    ShardDataset,
    ShardLoader,
    StorageError,
    WorkerError,
)
from shardio.dataset.ranks import consumers
from shardio.dataset.whereabouts import Late, Whereabouts
from shardio.errors import RowError
from shardio.loader import batch_builder
from shardio.loader.base import Pass, PoolOptions
from shardio.loader.buffer_pool import MappedBuffer
from shardio.loader.in_process import InProcessWorkers
from shardio.loader.worker_connection import LOOK, WorkerConnection
from shardio.loader.worker_pool import WorkerProcesses
from shardio.loader.worker_process import Sent

Packed = Callable[..., Path]
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNTS = [23, 0, 41, 3, 30]
N = sum(COUNTS)
BATCH = 8
STEPS = -(-N // BATCH)

# (workers, threads): one thread in the loop, some beside it, processes of one and of more.
POOLS = [(0, 0), (0, 2), (2, 2)]
EACH_POOL = pytest.mark.parametrize(
    "workers", POOLS, ids=lambda workers: f"{workers[0]}x{workers[1]}"
)
ONE_OF_EACH = pytest.mark.parametrize(
    "workers", [(0, 0), (0, 1), (2, 2)], ids=["loop", "0x1", "2x2"]
)


# --- what batches are made of ---------------------------------------------------------------


def number(data: bytes) -> int:
    return int(data[:6])


def picture(data: bytes) -> Any:
    """As an image, large enough for a batch to lie in a buffer."""
    return np.full((48, 48, 3), number(data) % 251, np.uint8)


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


class Named(NamedTuple):
    x: Any
    y: Any


class Thing:
    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and differences(self.batch, other.batch) == ""

    __hash__ = None  # type: ignore[assignment]


def odd(samples: list[Any]) -> Any:
    """Tensors of all sorts, in a structure of the user's."""
    images, labels = shardio.collate(samples)
    return {
        "named": Named(images, labels),
        "thing": Thing((images.to(torch.bfloat16) / 3, [labels])),
        "gaps": images[:, :, ::2].to(torch.int32).transpose(1, 3),
        "expanded": labels[:1].expand(50, 60),
        "complex": torch.complex(labels.float(), labels.float()),
        "empty": [images[:0], torch.zeros(0, 4)],
        "bools": images > 100,
        "one": labels[0],
        "large": torch.full((100, 100), int(labels[0]), dtype=torch.float64),
        "text": [f"{label}" for label in labels.tolist()],
    }


def arrays(samples: list[Any]) -> Any:
    return [np.stack([image for image, _ in samples]), {"y": np.array([y for _, y in samples])}]


def real(folder: Path) -> ShardDataset:
    return ShardDataset(folder, batch_size=BATCH)


TUPLES: dict[str, Any] = {"fields": ("image", "label")}
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


def stream(folder: Path, **options: Any) -> ShardDataset:
    given = {"batch_size": BATCH, "shuffle_buffer": 30, "spans": 8} | options
    return ShardDataset(folder, **of_order(given))


def pictures(folder: Path, **options: Any) -> ShardDataset:
    return stream(folder, **(TUPLES | {"decode": picture} | options))


def differences(found: Any, expected: Any, where: str = "batch") -> str:
    """Where two batches differ, in types, strides or values; "" where they do not."""
    if type(found) is not type(expected):
        return f"{where}: {type(found)} for {type(expected)}"
    if isinstance(found, torch.Tensor):
        for name in ("dtype", "shape"):
            if getattr(found, name) != getattr(expected, name):
                return f"{where}: {name} {getattr(found, name)} for {getattr(expected, name)}"
        # Gaps are left out; and where nothing is, strides lead nowhere.
        gaps = not (0 in expected.stride() or expected.is_contiguous() or _dense(expected))
        if not gaps and expected.numel() and found.stride() != expected.stride():
            return f"{where}: strides {found.stride()} for {expected.stride()}"
        return "" if torch.equal(found, expected) else f"{where}: values differ"
    if isinstance(found, np.ndarray):
        same = found.dtype == expected.dtype and np.array_equal(found, expected)
        return "" if same else f"{where}: arrays differ"
    if isinstance(found, dict):
        if list(found) != list(expected):
            return f"{where}: keys {list(found)} for {list(expected)}"
        parts = [(found[name], expected[name], f"{where}[{name!r}]") for name in found]
    elif isinstance(found, (tuple, list)):
        if len(found) != len(expected):
            return f"{where}: {len(found)} for {len(expected)}"
        parts = [(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(found, expected))]  # noqa: B905
    else:
        if hasattr(found, "tobytes"):  # PIL
            found, expected = found.tobytes(), expected.tobytes()
        return "" if found == expected else f"{where}: {found!r:.50} for {expected!r:.50}"
    return next(filter(None, (differences(*part) for part in parts)), "")


def _dense(tensor: torch.Tensor) -> bool:
    order = sorted(range(tensor.dim()), key=lambda i: (tensor.stride(i), tensor.shape[i]))
    return tensor.permute(order[::-1]).is_contiguous()


def assert_same(found: Any, expected: Any) -> None:
    assert differences(list(found), list(expected)) == ""


def labels(batches: Any) -> list[list[int]]:
    """Which records batches of `pictures` hold."""
    return [batch[0][:, 0, 0, 0].tolist() for batch in batches]


def pool_of(loader: ShardLoader) -> Any:
    pool = loader._pool
    assert pool is not None
    return pool


# --- the same batches -----------------------------------------------------------------------


@pytest.mark.parametrize("workers", [(0, 0), (2, 2)], ids=["loop", "2x2"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_batches_are_those_of_the_dataset(
    packed: Packed, options: dict[str, Any], workers: tuple[int, int]
) -> None:
    folder = packed(COUNTS)
    expected = list(stream(folder, **options))
    with ShardLoader(
        stream(folder, **options), num_workers=workers[0], threads=workers[1]
    ) as loader:
        assert len(loader) == len(expected) == loader.remaining
        assert_same(loader, expected)


@pytest.mark.parametrize("workers", [(0, 2), (2, 2)], ids=["0x2", "2x2"])
@pytest.mark.parametrize("options", REAL.values(), ids=REAL.keys())
def test_batches_of_images_are_those_of_the_dataset(
    packed: Packed, options: dict[str, Any], workers: tuple[int, int]
) -> None:
    folder = packed([20, 13], image=lambda i: jpeg(i, (60, 50 + 10 * (i % 2))))
    expected = list(stream(folder, **options))
    with ShardLoader(
        stream(folder, **options), num_workers=workers[0], threads=workers[1]
    ) as loader:
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
def test_batches_are_those_of_a_dataloader(packed: Packed, name: str, workers: int) -> None:
    folder = packed(COUNTS)
    torchs = DataLoader(stream(folder, **CASES[name]), batch_size=None, num_workers=workers)
    expected = [contents(batch) for batch in torchs]
    with ShardLoader(stream(folder, **CASES[name]), num_workers=2) as loader:
        assert_same([contents(batch) for batch in loader], expected)


@pytest.mark.parametrize("prefetch", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "workers", [(0, 1), (0, 4), (1, 3), (3, 1)], ids=lambda c: f"{c[0]}x{c[1]}"
)
def test_any_number_of_batches_ahead(
    packed: Packed, prefetch: int, workers: tuple[int, int]
) -> None:
    folder = packed(COUNTS)
    expected = list(pictures(folder))
    dataset = pictures(folder)
    with ShardLoader(
        dataset, num_workers=workers[0], threads=workers[1], prefetch_factor=prefetch
    ) as loader:
        assert_same(loader, expected)


@EACH_POOL
def test_mixtures(packed: Packed, workers: tuple[int, int]) -> None:
    def mixture() -> Any:
        first = pictures(packed([30], "a"), seed=3)
        second = pictures(packed([25, 5], "b", image=lambda i: payload(i + 100)), seed=3)
        return ShardDataset.mix([first, second], [2, 1])

    expected = list(mixture())
    with ShardLoader(mixture(), num_workers=workers[0], threads=workers[1]) as loader:
        assert_same(loader, expected)


@EACH_POOL
def test_selections(packed: Packed, workers: tuple[int, int]) -> None:
    dataset = pictures(packed(COUNTS)).select(range(5, 60, 2))
    expected = list(pictures(packed(COUNTS)).select(range(5, 60, 2)))
    with ShardLoader(dataset, num_workers=workers[0], threads=workers[1]) as loader:
        assert_same(loader, expected)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_ways_to_start_processes(packed: Packed, method: str) -> None:
    folder = packed(COUNTS)
    expected = []
    for epoch in (0, 1):
        dataset = stream(folder, **CASES["own collate"])
        dataset.set_epoch(epoch)
        expected.append(list(dataset))

    def two_epochs() -> None:
        loader = ShardLoader(
            stream(folder, **CASES["own collate"]), num_workers=1, multiprocessing_context=method
        )
        with loader:
            assert_same(loader, expected[0])
            loader.set_epoch(1)
            assert_same(loader, expected[1])

    if method == "forkserver":
        multiprocessing.forkserver.ensure_running()  # it stays: for the whole suite
    with nothing_left():
        two_epochs()


UNGUARDED = """
import sys
from shardio import ShardDataset, ShardLoader

data = ShardDataset(sys.argv[1], batch_size=4, fields=("label",))
for batch in ShardLoader(data, num_workers=1, multiprocessing_context=sys.argv[2]):
    pass
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_that_has_to_be_guarded_is_told(
    packed: Packed, tmp_path: Path, method: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNGUARDED)
    words = [sys.executable, script, packed(COUNTS), method]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("shardio.errors.WorkerError: "), done.stderr
    assert 'A script needs `if __name__ == "__main__":`' in last and done.returncode == 1


def test_what_cannot_be_sent_to_a_spawned_process_is_told(packed: Packed) -> None:
    dataset = pictures(packed(COUNTS), decode=lambda data: picture(data))

    def iterate() -> None:
        with pytest.raises(OptionError, match=r"'spawn'.*cannot be pickled.*lambda.*no lambda"):
            iter(ShardLoader(dataset, num_workers=2, multiprocessing_context="spawn"))

    with nothing_left():
        iterate()


def test_options_of_dataloader_are_explained(packed: Packed) -> None:
    dataset = pictures(packed(COUNTS))
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


def test_options_that_are_passed_to_dataloader_without_workers(packed: Packed) -> None:
    dataset = pictures(packed(COUNTS))
    assert ShardLoader(dataset, num_workers=0, prefetch_factor=None).prefetch_factor == 2


OF_A_DEVICE: dict[str, Any] = {
    **{"mean": 0.5, "std": 0.5, "dtype": torch.half, "channels_last": False},
    **{"pin": True, "ahead": 2},
}


@pytest.mark.parametrize("option", OF_A_DEVICE)
def test_options_of_a_device_without_one_are_refused(packed: Packed, option: str) -> None:
    dataset = pictures(packed(COUNTS))
    with pytest.raises(OptionError, match=f"{option} without a device"):
        ShardLoader(dataset, num_workers=0, **{option: OF_A_DEVICE[option]})
    ShardLoader(dataset, num_workers=0, pin=False)  # nothing is


def test_descriptors_are_sent_whatever_sockets_do_elsewhere(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = packed(COUNTS)
    monkeypatch.setattr(reduction, "ACKNOWLEDGE", True)  # as on macOS
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(LIMIT_S)  # which makes each new socket non-blocking
    try:
        with ShardLoader(pictures(folder), num_workers=2) as loader:
            assert_same(loader, list(pictures(folder)))
    finally:
        socket.setdefaulttimeout(before)


def test_a_daemon_is_told_to_do_without_processes(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = packed(COUNTS)
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    monkeypatch.setitem(config, "daemon", True)
    with pytest.raises(OptionError, match=r"daemon of multiprocessing.*num_workers=0"):
        iter(ShardLoader(pictures(folder), num_workers=2))
    with ShardLoader(pictures(folder), num_workers=0) as loader:
        assert labels(loader) == labels(pictures(folder))


@EACH_POOL
def test_threads_may_share_an_iterator(packed: Packed, workers: tuple[int, int]) -> None:
    folder = packed(COUNTS)
    options = {"batch_size": 2}
    found: list[Any] = []
    with ShardLoader(
        pictures(folder, **options), num_workers=workers[0], threads=workers[1]
    ) as loader:
        iterator = iter(loader)
        threads = [threading.Thread(target=lambda: found.extend(iterator)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    assert sorted(labels(found)) == sorted(labels(pictures(folder, **options)))


def test_a_pickled_loader_makes_processes_of_its_own(packed: Packed) -> None:
    expected = list(pictures(packed(COUNTS)))
    with ShardLoader(pictures(packed(COUNTS)), num_workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        twin = pickle.loads(pickle.dumps(loader))
        with twin:
            assert_same(twin, expected)
            assert set(twin.explain().pids).isdisjoint(loader.explain().pids)
        assert_same(iterator, expected[1:])


# --- safe by default ------------------------------------------------------------------------


KEEP: dict[str, Callable[[Any], Any]] = {
    "batches": lambda batch: batch[0],
    "a row": lambda batch: batch[0][-1],
    "an array": lambda batch: batch[0].numpy(),
    "a part of an array": lambda batch: batch[0].numpy()[1:3, 0],
    "another layout": lambda batch: batch[0].permute(0, 2, 3, 1).flatten()[5:],
}


@EACH_POOL
@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP.keys())
def test_what_is_kept_is_never_overwritten(
    packed: Packed, keep: Callable[[Any], Any], workers: tuple[int, int]
) -> None:
    folder = packed(COUNTS)
    expected = [keep(batch).tolist() for batch in pictures(folder)]
    with ShardLoader(pictures(folder), num_workers=workers[0], threads=workers[1]) as loader:
        kept = []
        for step, batch in enumerate(loader):
            kept.append(keep(batch))
            if step == 3:
                gc.collect(1)  # all that is as young as these batches
        loader.set_epoch(1)
        del batch
        for _ in loader:
            pass
    assert [one.tolist() for one in kept] == expected


@pytest.mark.parametrize("copy", [False, True])
@EACH_POOL
def test_the_ring_is_as_long_as_it_must_be_and_no_longer(
    packed: Packed, workers: tuple[int, int], copy: bool
) -> None:
    dataset = pictures(packed(COUNTS))
    with ShardLoader(dataset, num_workers=workers[0], threads=workers[1], copy=copy) as loader:
        for epoch in range(5):
            loader.set_epoch(epoch)
            for batch in loader:
                assert 0 < len(batch[0]) <= BATCH
            del batch
        explained = loader.explain()
        # A thread of this process that is held up just after it handed a batch over still knows it.
        assert 0 < explained.buffers <= explained.ring + int(workers[0] == 0 and workers[1] > 0)


@pytest.mark.parametrize("workers", [(0, 3), (1, 3)], ids=["0x3", "1x3"])
def test_the_ring_is_no_longer_for_a_built_in_transform(
    packed: Packed, workers: tuple[int, int]
) -> None:
    """Threads must not keep the rows that they wrote last."""
    folder = packed([64], image=lambda i: jpeg(i, (60, 50)))
    dataset = stream(folder, transform=CenterCrop(64), **TUPLES)
    with ShardLoader(
        dataset, num_workers=workers[0], threads=workers[1], prefetch_factor=1
    ) as loader:
        for epoch in range(6):
            loader.set_epoch(epoch)
            for _ in loader:
                pass
        assert loader.explain().buffers <= loader.explain().ring


@pytest.mark.parametrize("copy", [False, True])
def test_memory_of_batches_that_were_kept_is_given_back(packed: Packed, copy: bool) -> None:
    dataset = pictures(packed(COUNTS))
    with ShardLoader(dataset, num_workers=2, prefetch_factor=1, copy=copy) as loader:
        for _ in loader:
            pass
        before = loader.explain().batch_bytes
        for epoch in (1, 2, 3):
            loader.set_epoch(epoch)
            kept = list(loader)
        most = loader.explain().batch_bytes
        assert most > 2 * before
        del kept
        loader.set_epoch(4)
        for _ in loader:
            pass
        ring = loader.explain().ring
        assert sum(len(one.mapped) for one in pool_of(loader)._all) <= ring
        assert loader.explain().batch_bytes <= ring * 2 * most / STEPS


def test_labels_that_are_kept_do_not_keep_images(packed: Packed) -> None:
    with ShardLoader(pictures(packed(COUNTS)), num_workers=2) as loader:
        kept = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            kept += [labels for _, labels in loader]
        assert loader.explain().buffers <= loader.explain().ring
        assert len(kept) == 3 * STEPS


@EACH_POOL
def test_batches_may_be_written_to(packed: Packed, workers: tuple[int, int]) -> None:
    folder = packed(COUNTS)
    with ShardLoader(pictures(folder), num_workers=workers[0], threads=workers[1]) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            dataset = pictures(folder)
            dataset.set_epoch(epoch)
            for found, expected in zip(loader, dataset, strict=True):
                assert differences(found, expected) == ""
                found[0].fill_(255)
                found[1].zero_()


def test_copies_are_right_and_free_their_buffers_at_once(packed: Packed) -> None:
    folder = packed(COUNTS)
    expected = list(pictures(folder))
    with ShardLoader(pictures(folder), num_workers=2, copy=True) as loader:
        kept = list(loader)
        assert loader.explain().buffers <= loader.explain().ring
        loader.set_epoch(1)
        for _ in loader:
            pass
        assert_same(kept, expected)


@pytest.mark.parametrize("room", [280, 80])
def test_batches_that_are_kept_do_not_use_up_descriptors(packed: Packed, room: int) -> None:
    count = 800
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = packed([count])
    options = {"batch_size": 5, "shuffle": False}  # which may be read again
    expected = list(pictures(folder, **options))
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(descriptors()) + room, limits[1]))
    try:
        for workers in (0, 1), (2, 1):
            dataset = pictures(folder, **options)
            with ShardLoader(dataset, num_workers=workers[0], threads=workers[1]) as loader:
                assert_same(loader, expected)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class MixWithEarlier:
    """A collate_fn that keeps batches for later ones, until their buffers are free again."""

    def __init__(self) -> None:
        self.earlier: list[Any] = []

    def __call__(self, samples: list[Any]) -> Any:
        images, _ = shardio.collate(samples)
        self.earlier = [*self.earlier[-5:], images]
        return images, self.earlier[0].clone()


@pytest.mark.parametrize("workers", [(0, 0), (0, 1), (1, 1)], ids=["loop", "0x1", "1x1"])
def test_what_a_collate_fn_keeps_is_not_overwritten(
    packed: Packed, workers: tuple[int, int]
) -> None:
    folder = packed(COUNTS)
    expected = list(pictures(folder, collate_fn=MixWithEarlier()))
    dataset = pictures(folder, collate_fn=MixWithEarlier())
    with ShardLoader(
        dataset, num_workers=workers[0], threads=workers[1], prefetch_factor=1
    ) as loader:
        for found, one in zip(loader, expected, strict=True):
            assert differences(found, one) == ""


def test_what_a_collate_fn_keeps_of_a_dropped_batch_is_not_overwritten(packed: Packed) -> None:
    """The second batch is collated before a row of the first raises, and is handed to nobody."""
    folder = packed(COUNTS)
    order = labels(pictures(folder))
    collated, kept, raised = threading.Event(), [], []

    def collate_fn(samples: list[Any]) -> Any:
        batch = shardio.collate(samples)
        if labels([batch]) == order[1:2] and not kept:
            kept.append(batch)
            collated.set()
        return batch

    def decode(data: bytes) -> Any:
        if number(data) == order[0][0] and not raised:
            raised.append(data)
            assert collated.wait(LIMIT_S)
            raise ValueError("the first")
        return picture(data)

    dataset = pictures(folder, decode=decode, collate_fn=collate_fn)
    with ShardLoader(dataset, num_workers=0, threads=2, prefetch_factor=2) as loader:
        with pytest.raises(ValueError, match="the first"):
            next(iter(loader))
        loader.set_epoch(1)
        for _ in loader:
            pass
    assert labels(kept) == order[1:2]


# --- rows ------------------------------------------------------------------------------------


class Waits:
    """A row that is made only when another one, of a later batch, was."""

    def __init__(self, waiting: int, other: int) -> None:
        self.waiting, self.other = waiting, other
        self.event = threading.Event()

    def __call__(self, data: bytes) -> Any:
        if number(data) == self.waiting and not self.event.wait(LIMIT_S):
            raise AssertionError("the other row was never made")
        if number(data) == self.other:
            self.event.set()
        return picture(data)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_slow_row_holds_up_no_other(packed: Packed, workers: int) -> None:
    folder = packed(COUNTS)
    order = labels(pictures(folder))
    decode = Waits(order[0][0], order[2][-1])
    dataset = pictures(folder, decode=decode)
    with ShardLoader(dataset, num_workers=workers, threads=2, prefetch_factor=3) as loader:
        assert labels(loader) == order


def test_without_threads_a_batch_is_made_when_it_is_asked_for(packed: Packed) -> None:
    calls: list[int] = []

    def counted(data: bytes) -> Any:
        assert threading.current_thread() is threading.main_thread()
        calls.append(number(data))
        return picture(data)

    with ShardLoader(pictures(packed(COUNTS), decode=counted), num_workers=0, threads=0) as loader:
        iterator = iter(loader)
        assert not calls
        for step in range(1, 4):
            next(iterator)
            assert len(calls) == step * BATCH


class Counts:
    """Writes a byte for each row that is made, and reads how many there are."""

    def __init__(self) -> None:
        self.ends = os.pipe()

    def __call__(self, data: bytes) -> Any:
        os.write(self.ends[1], b".")
        return picture(data)

    def wait(self, rows: int) -> None:
        """Until so many more were made."""
        while rows:
            assert select.select([self.ends[0]], [], [], LIMIT_S)[0], f"{rows} more were not made"
            rows -= len(os.read(self.ends[0], rows))

    def assert_no_more(self) -> None:
        """Once the processes are gone."""
        assert not select.select([self.ends[0]], [], [], 0)[0]

    def close(self) -> None:
        for end in self.ends:
            os.close(end)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_no_more_is_made_ahead_than_was_asked_for(packed: Packed, prefetch: int) -> None:
    with closing(Counts()) as counts:
        dataset = pictures(packed(COUNTS), decode=counts)
        with ShardLoader(dataset, num_workers=1, prefetch_factor=prefetch) as loader:
            iterator = iter(loader)
            counts.wait(prefetch * BATCH)
            for _ in range(3):
                next(iterator)
            counts.wait(3 * BATCH)
        counts.assert_no_more()


def test_the_next_epoch_is_begun_before_it_is_asked_for(packed: Packed) -> None:
    folder, prefetch = packed(COUNTS), 2
    with closing(Counts()) as counts:
        dataset = pictures(folder, decode=counts)
        with ShardLoader(dataset, num_workers=2, prefetch_factor=prefetch) as loader:
            assert len(list(loader)) == STEPS
            counts.wait(N)
            counts.wait(2 * prefetch * BATCH)  # nobody has called iter() yet
            for epoch in 1, 2:
                loader.set_epoch(epoch)
                expected = pictures(folder)
                expected.set_epoch(epoch)
                assert labels(loader) == labels(expected)
            # What was begun early was used: no row of an epoch was made twice.
            counts.wait(2 * N)
        counts.assert_no_more()


def draws(data: bytes) -> Any:
    """What Python, numpy and torch draw, as a transform of the user's might."""
    return np.array([random.random(), np.random.random(), torch.rand(1).item()])


def test_transforms_draw_others_in_each_process_and_epoch_and_the_same_in_each_run(
    packed: Packed,
) -> None:
    def run(seed: int) -> Any:
        torch.manual_seed(seed)
        dataset = stream(packed([32]), fields=("image",), decode=draws, shuffle=False)
        with ShardLoader(dataset, num_workers=2) as loader:
            found = []
            for epoch in range(2):
                loader.set_epoch(epoch)
                found.append(torch.cat([batch[0] for batch in loader]))
            return torch.cat(found)

    with torch.random.fork_rng():
        first, again, other = run(3), run(3), run(4)
    assert torch.equal(first, again) and not (first == other).any()
    for column in first.T:
        assert len(set(column.tolist())) == 64


# --- epochs and states ----------------------------------------------------------------------


def expected_of(folder: Path, epoch: int, **options: Any) -> list[list[int]]:
    dataset = pictures(folder, **options)
    dataset.set_epoch(epoch)
    return labels(dataset)


@EACH_POOL
def test_any_sequence_of_epochs(packed: Packed, workers: tuple[int, int]) -> None:
    """The next epoch is guessed: by one more, or the same again; wrong guesses cost no batch."""
    folder = packed(COUNTS)
    draw = random.Random(workers[0])
    with ShardLoader(pictures(folder), num_workers=workers[0], threads=workers[1]) as loader:
        for epoch in (0, 1, 2, 7, 8, 3, 4, 4, 4, 5, 0, 9, 10):
            loader.set_epoch(epoch)
            with suppress(UserWarning):
                iterator = iter(loader)
            steps = draw.choice([STEPS, STEPS, draw.randrange(STEPS)])
            found = [next(iterator) for _ in range(steps)]
            assert labels(found) == expected_of(folder, epoch)[:steps]
            if steps == STEPS:
                assert next(iterator, None) is None


def test_an_evaluation_that_reads_one_epoch_again(packed: Packed) -> None:
    folder = packed(COUNTS)
    with closing(Counts()) as counts:
        dataset = pictures(folder, decode=counts, shuffle=False)
        with ShardLoader(dataset, num_workers=2) as loader:
            expected = labels(pictures(folder, shuffle=False))
            for _ in range(4):
                assert labels(loader) == expected
            counts.wait(4 * N + 2 * 2 * BATCH)  # the same epoch was begun early, each time
        counts.assert_no_more()


@pytest.fixture
def process() -> Iterator[tuple[WorkerConnection, Any]]:
    """The trainer's end of a loader process that has buffers 0 to 2, and the other end."""
    ours, there = multiprocessing.Pipe()
    shows, shown = multiprocessing.Pipe()
    late = Late(Whereabouts(1, 1), 0, 60)
    one = WorkerConnection(0, None, ours, shows, 4, None, late)
    one.mapped = {buffer: MappedBuffer(-1, 4096) for buffer in range(3)}
    one.tell(0, Pass({}, 0, 0, 0, 1, None), 2)  # type: ignore[arg-type]
    there.recv_bytes()
    with ours, there, shows, shown:
        yield one, there
        one.leave()


def test_what_was_sent_of_a_pass_that_was_left_frees_its_buffers(process: Any) -> None:
    one, there = process
    one.discard()  # nothing
    for sent in Sent(0, 2, 4096), Sent(0, error=b""), Sent(0, 1, 4096):
        there.send_bytes(pickle.dumps(sent))
    one.discard()
    assert list(one.freed) == [2, 1]


def test_a_buffer_that_is_never_wanted_is_given_back(process: Any) -> None:
    one, there = process
    for spare, least in ((1, 0), (2, 1), (2, 2)):
        for _ in range(LOOK - 1):
            one.note(spare)
        one.freed.append(0)
        one.more()
        assert pickle.loads(there.recv_bytes())[-2:] == ([0], [])  # not yet
        one.note(least)
        one.freed.extend([0, 1])
        one.more()
        *_, free, gone = pickle.loads(there.recv_bytes())
        assert (free, gone) == (([0, 1], []) if not least else ([1], [0]))
        one.mapped[0] = MappedBuffer(-1, 4096)


def test_a_stream_and_its_loader_have_no_items(packed: Packed) -> None:
    dataset = pictures(packed(COUNTS))
    with pytest.raises(OptionError, match=r"a stream.*shardio\.open"):
        dataset[0]
    with pytest.raises(OptionError, match="without a DataLoader"):
        next(iter(DataLoader(ShardLoader(dataset, num_workers=0), batch_size=None)))  # type: ignore[arg-type]


@EACH_POOL
def test_leaving_early_and_iterating_again(packed: Packed, workers: tuple[int, int]) -> None:
    folder = packed(COUNTS)
    with ShardLoader(pictures(folder), num_workers=workers[0], threads=workers[1]) as loader:
        for epoch, steps in enumerate((1, 0, 5, STEPS - 1, 3)):
            loader.set_epoch(epoch)
            kept = [batch for batch, _ in zip(loader, range(steps))]  # noqa: B905
            assert labels(kept) == expected_of(folder, epoch)[:steps]
        loader.set_epoch(4)
        assert labels(loader) == expected_of(folder, 4)


@EACH_POOL
def test_leaving_early_gives_the_buffers_back_at_once(
    packed: Packed, workers: tuple[int, int]
) -> None:
    gc.disable()  # in forked processes, too: what a dropped pass was at must not wait for it
    try:
        with ShardLoader(
            pictures(packed(COUNTS)), num_workers=workers[0], threads=workers[1]
        ) as loader:
            for epoch in range(12):
                loader.set_epoch(2 * epoch)
                for _batch in loader:
                    break
                del _batch
            # One of each process: its thread may still be at the batch of a pass that was dropped.
            assert loader.explain().buffers <= loader.explain().ring + max(1, workers[0])
    finally:
        gc.enable()


@EACH_POOL
def test_a_state_at_any_step_goes_on_exactly(packed: Packed, workers: tuple[int, int]) -> None:
    folder = packed(COUNTS)
    expected = expected_of(folder, 3)
    with ShardLoader(pictures(folder), num_workers=workers[0], threads=workers[1]) as loader:
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


def test_a_state_is_of_the_loop_and_not_of_what_was_made_ahead(packed: Packed) -> None:
    folder = packed(COUNTS)
    dataset = pictures(folder)
    with ShardLoader(dataset, num_workers=2, prefetch_factor=4) as loader:
        iterator = iter(loader)
        next(iterator)
        other = pictures(folder)
        assert loader.state_dict() == other.state_dict(steps=1) == dataset.state_dict(steps=1)
        assert dataset.state_dict() == loader.state_dict()


def test_options_of_a_loaded_state_reach_processes_that_run(packed: Packed) -> None:
    folder = packed(COUNTS)
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
def test_another_iterator_ends_the_first(packed: Packed, workers: tuple[int, int]) -> None:
    folder = packed(COUNTS)
    with ShardLoader(pictures(folder), num_workers=workers[0], threads=workers[1]) as loader:
        first = iter(loader)
        next(first)
        loader.set_epoch(0)
        second = iter(loader)
        with pytest.raises(EpochError, match="another pass over this loader has begun"):
            next(first)
        assert labels(second) == labels(pictures(folder))


@EACH_POOL
def test_the_epoch_cannot_change_under_a_loop(packed: Packed, workers: tuple[int, int]) -> None:
    folder = packed(COUNTS)
    with ShardLoader(pictures(folder), num_workers=workers[0], threads=workers[1]) as loader:
        iterator = iter(loader)
        next(iterator)
        loader.set_epoch(1)
        with pytest.raises(EpochError, match="set to 1 while epoch 0 was being read"):
            next(iterator)
        assert labels(loader) == expected_of(folder, 1)


def test_two_loaders_at_once(packed: Packed) -> None:
    folder = packed(COUNTS)
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


def test_each_warns_the_loop_that_forgets_the_epoch(packed: Packed) -> None:
    with ShardLoader(pictures(packed(COUNTS)), num_workers=0) as loader:
        loader.set_epoch(0)
        list(loader)
        with pytest.warns(UserWarning, match="epoch 0 is being read again") as caught:
            next(iter(loader))
        assert caught[0].filename == __file__


# --- errors ----------------------------------------------------------------------------------


class TwoArgumentsError(Exception):
    """As some libraries have them: pickle cannot make it again."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} with code {code}")


class QuotingError(Exception):
    """Says more than it is given: again, of its own text, it would say it twice."""

    def __init__(self, what: str, *, code: int = 0) -> None:
        super().__init__(f"cannot read {what} ({code})")
        self.code = code


class KeywordError(Exception):
    def __init__(self, *, why: str) -> None:
        super().__init__(f"failed: {why}")


class GuardedError(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class TrainerOnlyError(Exception):
    """Made again only where it was raised."""

    home = os.getpid

    def __reduce__(self) -> Any:
        return _make_again, (os.getpid(), str(self))


def _make_again(pid: int, text: str) -> TrainerOnlyError:
    if os.getpid() != pid:
        raise LookupError("not here")
    return TrainerOnlyError(text)


@dataclass
class Raises:
    """As `picture`, but one record raises."""

    target: int
    error: Any

    def __call__(self, data: bytes) -> Any:
        if number(data) == self.target:
            raise self.error
        return picture(data)


RAISED: dict[str, tuple[BaseException, bool]] = {  # and whether it can be passed on as it is
    "plain": (ValueError("no cat"), True),
    "no text": (KeyError(), True),
    "two arguments": (TwoArgumentsError("it failed", 7), True),
    "its text made of others": (QuotingError("a file", code=5), True),
    "keywords": (KeywordError(why="so"), True),
    "text with an address": (ValueError(Thing(())), True),
    "not to be pickled": (GuardedError("a lock in it"), False),
    "not to be made again": (TrainerOnlyError("only there"), False),
    "system": (FileNotFoundError(2, "No such file", "/nowhere"), True),
}


@ONE_OF_EACH
@pytest.mark.parametrize(("error", "passes"), RAISED.values(), ids=RAISED.keys())
def test_what_a_transform_raises_comes_with_the_record_named(
    packed: Packed, error: BaseException, passes: bool, workers: tuple[int, int]
) -> None:
    folder = packed(COUNTS)
    order = labels(pictures(folder))
    target, step = order[3][5], 3
    dataset = pictures(folder, decode=Raises(target, error))
    with ShardLoader(dataset, num_workers=workers[0], threads=workers[1]) as loader:
        pids: list[int] = []
        for _ in range(2):  # it is raised again, and the processes are still the same
            loader.set_epoch(0)
            iterator, got = iter(loader), []
            with pytest.raises((type(error), WorkerError)) as caught:
                while True:
                    got += labels([next(iterator)])
            assert got == order[:step]
            named = f"k/{target:06}.jpg"
            if passes or not workers[0]:
                assert type(caught.value) is type(error) and caught.value.args == error.args
                assert getattr(caught.value, "code", None) == getattr(error, "code", None)
                cause = caught.value.__cause__
                assert type(cause) is RowError and named in str(cause)
                if workers[0]:
                    assert "loader process" in str(cause) and "in __call__" in str(cause)
            else:
                assert type(error).__name__ in str(caught.value) and str(error) in str(caught.value)
                assert named in str(caught.value) and "loader process" in str(caught.value)
            with pytest.raises((type(error), WorkerError, EpochError)):
                next(iterator)  # and never StopIteration, as if the epoch were over
            assert loader.explain().pids == (pids or loader.explain().pids)
            pids = loader.explain().pids
        loader.set_epoch(0)
        ok = [next(it) for it in [iter(loader)] for _ in range(step)]
        assert labels(ok) == order[:step]


# What is no Exception: it would end the training as if it were done.
SILENT: dict[str, BaseException] = {
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt("of a transform"),
    "generator": GeneratorExit(),
    "own": type("Own", (BaseException,), {})("a base of its own"),
}


@pytest.mark.parametrize(
    "workers", [(0, 1), (0, 2), (2, 1), (2, 2)], ids=lambda c: f"{c[0]}x{c[1]}"
)
@pytest.mark.parametrize("error", SILENT.values(), ids=SILENT.keys())
def test_what_is_no_exception_is_an_error_that_names_the_record(
    packed: Packed, error: BaseException, workers: tuple[int, int]
) -> None:
    folder = packed(COUNTS)
    order = labels(pictures(folder))
    target = order[3][5]
    dataset = pictures(folder, decode=Raises(target, error))
    with ShardLoader(dataset, num_workers=workers[0], threads=workers[1]) as loader:
        for _ in range(2):  # the processes stay
            loader.set_epoch(0)
            got, iterator = [], iter(loader)
            with pytest.raises(WorkerError) as caught:
                for batch in iterator:
                    got += labels([batch])
            assert got == order[:3]
            text = str(caught.value)
            assert f"k/{target:06}.jpg" in text and type(error).__name__ in text
            cause = caught.value.__cause__
            assert "loader process" in str(cause) if workers[0] else type(cause) is type(error)
            with pytest.raises((WorkerError, EpochError)):
                next(iterator)


class WordlessError(BaseException):
    def __repr__(self) -> str:
        raise LookupError("no words")


class EndsError(Exception):
    def __reduce__(self) -> Any:
        os._exit(7)


@pytest.mark.parametrize("workers", [(0, 1), (1, 1)], ids=["0x1", "1x1"])
def test_an_error_that_has_no_words_or_ends_its_process_is_told(
    packed: Packed, workers: tuple[int, int]
) -> None:
    cases: list[tuple[BaseException, str]] = [
        (WordlessError(), r"k/000007\.jpg: decode or a transform raised WordlessError, which"),
        (EndsError(), r"exit code 7, while it was at .*k/000007\.jpg"),
    ]
    for error, said in cases[: 1 + workers[0]]:
        dataset = pictures(packed(COUNTS), decode=Raises(7, error))
        with (
            ShardLoader(dataset, num_workers=workers[0], threads=workers[1]) as loader,
            pytest.raises(WorkerError, match=said),
        ):
            list(loader)


@pytest.mark.parametrize("workers", [(0, 1), (1, 1)], ids=["0x1", "1x1"])
@pytest.mark.parametrize("error", SILENT.values(), ids=SILENT.keys())
def test_what_is_no_exception_of_a_collate_fn_or_in_a_mixture(
    packed: Packed, error: BaseException, workers: tuple[int, int]
) -> None:
    folder, other = packed(COUNTS), packed([16], "other")

    def collate(samples: list[Any]) -> Any:
        raise error

    mixed = ShardDataset.mix([pictures(other), pictures(folder, decode=Raises(7, error))])
    for dataset, where in (
        (pictures(folder, collate_fn=collate), "collate_fn raised"),
        (mixed, "k/000007.jpg: decode or a transform raised"),
    ):
        with (
            ShardLoader(dataset, num_workers=workers[0], threads=workers[1]) as loader,
            pytest.raises(WorkerError, match=f"{where} {type(error).__name__}"),
        ):
            list(loader)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_what_ends_the_trainers_own_loop_ends_it(packed: Packed, error: BaseException) -> None:
    """There it is Ctrl-C, or a handler of SIGTERM that calls sys.exit."""
    dataset = pictures(packed(COUNTS), decode=Raises(0, error))
    loader = ShardLoader(dataset, num_workers=0, threads=0)
    for batches in loader, DataLoader(dataset, batch_size=None):
        dataset.set_epoch(0)
        with pytest.raises(type(error)):
            list(batches)
    generator = pictures(packed(COUNTS), decode=Raises(0, GeneratorExit()))  # which is neither
    with pytest.raises(WorkerError, match=r"k/000000\.jpg.*GeneratorExit"):
        list(generator)


@EACH_POOL
def test_a_transform_that_raises_stop_iteration_does_not_end_the_epoch(
    packed: Packed, workers: tuple[int, int]
) -> None:
    folder = packed(COUNTS)
    order = labels(pictures(folder))
    dataset = pictures(folder, decode=Raises(order[3][5], StopIteration("early")))
    got = []
    with pytest.raises(RuntimeError, match="StopIteration"):
        for batch in dataset:
            got += labels([batch])
    assert got == order[:3]
    got = []
    dataset.set_epoch(0)
    loader = ShardLoader(dataset, num_workers=workers[0], threads=workers[1])
    with loader, pytest.raises(RuntimeError, match="raised StopIteration"):
        for batch in loader:
            got += labels([batch])
    assert got == order[:3]


@ONE_OF_EACH
def test_the_cause_of_an_error_is_not_lost(packed: Packed, workers: tuple[int, int]) -> None:
    class Chained:
        def __call__(self, data: bytes) -> Any:
            try:
                raise KeyError("the reason")
            except KeyError as error:
                raise ValueError("the outcome") from error

    dataset = pictures(packed(COUNTS), decode=Chained())
    with ShardLoader(dataset, num_workers=workers[0], threads=workers[1]) as loader:
        with pytest.raises(ValueError, match="the outcome") as caught:
            next(iter(loader))
        cause = caught.value.__cause__
        assert "the reason" in str(cause) or "the reason" in str(cause.__cause__)  # type: ignore[union-attr]


class BadCollate:
    def __init__(self, target: int, *, pickles: bool = True) -> None:
        self.target, self.pickles = target, pickles

    def __call__(self, samples: list[Any]) -> Any:
        batch = shardio.collate(samples)
        if self.target in batch[0][:, 0, 0, 0].tolist():
            if self.pickles:
                raise ValueError("no batch of these")
            return lambda: batch
        return batch


@ONE_OF_EACH
def test_what_a_collate_fn_raises(packed: Packed, workers: tuple[int, int]) -> None:
    folder = packed(COUNTS)
    order = labels(pictures(folder))
    dataset = pictures(folder, collate_fn=BadCollate(order[2][0]))
    with ShardLoader(dataset, num_workers=workers[0], threads=workers[1]) as loader:
        iterator = iter(loader)
        assert labels([next(iterator), next(iterator)]) == order[:2]
        with pytest.raises(ValueError, match="no batch of these"):
            next(iterator)


def test_a_batch_that_cannot_be_pickled(packed: Packed) -> None:
    folder = packed(COUNTS)
    order = labels(pictures(folder))
    dataset = pictures(folder, collate_fn=BadCollate(order[2][0], pickles=False))
    with ShardLoader(dataset, num_workers=2) as loader:
        iterator = iter(loader)
        assert labels([next(iterator), next(iterator)]) == order[:2]
        with pytest.raises((pickle.PicklingError, AttributeError), match=r"(pickle|local).*lambda"):
            next(iterator)
        loader.set_epoch(0)
        assert labels([next(it) for it in [iter(loader)] for _ in range(2)]) == order[:2]


@ONE_OF_EACH
def test_samples_that_do_not_stack(packed: Packed, workers: tuple[int, int]) -> None:
    folder = packed(COUNTS)
    first = labels(pictures(folder))[0][3]

    def mixed(data: bytes) -> Any:
        return (1,) if number(data) == first else (1, 2)

    dataset = stream(folder, fields=("image",), decode=mixed)
    loader = ShardLoader(dataset, num_workers=workers[0], threads=workers[1])
    with loader, pytest.raises(CollateError, match=f"record {first} of .* tuple of 1"):
        next(iter(loader))


@ONE_OF_EACH
def test_damage_is_named(packed: Packed, workers: tuple[int, int]) -> None:
    folder = packed([40])
    data = shard_files(folder)[0].read_bytes()
    target = labels(pictures(folder))[3][2]
    flip(shard_files(folder)[0], data.index(payload(target)) + 3)
    with ShardLoader(pictures(folder), num_workers=workers[0], threads=workers[1]) as loader:
        iterator = iter(loader)
        got = []
        with pytest.raises(DamageError, match=f"record {target}"):
            for batch in iterator:
                got += labels([batch])
        assert got == labels(pictures(packed([40], "good")))[: len(got)] and len(got) <= 3


@ONE_OF_EACH
def test_a_missing_shard_is_named(packed: Packed, workers: tuple[int, int]) -> None:
    folder = packed([40, 40])
    dataset = pictures(folder, shuffle=False)
    gone = shard_files(folder)[1]
    gone.unlink()
    with ShardLoader(dataset, num_workers=workers[0], threads=workers[1]) as loader:
        got = []
        with pytest.raises((StorageError, DamageError), match=gone.name):
            for batch in loader:
                got += labels([batch])
        assert got == labels(pictures(packed([40], "one"), shuffle=False))[: len(got)]


def test_an_image_that_is_none_is_named(packed: Packed) -> None:
    dataset = stream(packed(COUNTS), transform=CenterCrop(8), **TUPLES)
    for workers in (0, 1), (1, 1):
        dataset.set_epoch(0)
        loader = ShardLoader(dataset, num_workers=workers[0], threads=workers[1])
        with loader, pytest.raises(DecodeError, match=r"record \d+ of the dataset, k/\d+\.jpg"):
            next(iter(loader))


# --- death ------------------------------------------------------------------------------------


class Dies:
    """Its process ends at one record; once the gate is there it does no more."""

    def __init__(self, target: int, how: Callable[[], None], gate: Path) -> None:
        self.target, self.how, self.gate = target, how, gate

    def __call__(self, data: bytes) -> Any:
        if number(data) == self.target and not self.gate.exists():
            self.gate.touch()
            self.how()
        return picture(data)


WAYS: dict[str, tuple[Callable[[], None], str]] = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), "was killed by SIGTERM"),
    "SIGUSR1": (lambda: os.kill(os.getpid(), signal.SIGUSR1), "was killed by SIGUSR1"),
    "exit 3": (lambda: os._exit(3), "left with exit code 3"),
    "exit 0": (lambda: os._exit(0), "left with exit code 0"),
}


@pytest.mark.parametrize(
    ("how", "said", "step"),
    [(*way, step) for step, way in zip((0, 5, 0, 5, 0), WAYS.values(), strict=True)],
    ids=WAYS.keys(),
)
def test_a_process_that_dies_is_an_error_and_leaves_nothing(
    packed: Packed, tmp_path: Path, how: Callable[[], None], said: str, step: int
) -> None:
    folder = packed(COUNTS)
    order = labels(pictures(folder))

    def die() -> None:
        dataset = pictures(folder, decode=Dies(order[step][4], how, tmp_path / "gate"))
        with ShardLoader(dataset, num_workers=2, prefetch_factor=1) as loader:
            iterator, got = iter(loader), []
            pids = loader.explain().pids
            with pytest.raises(WorkerError, match=said) as caught:
                while True:
                    got += labels([next(iterator)])
            assert got == order[:step]
            assert f"(pid {pids[step % 2]})" in str(caught.value)
            at = (
                f"while it was at record {order[step][4]} of the dataset, k/{order[step][4]:06}.jpg"
            )
            assert at in str(caught.value)
            assert not children() & set(pids)  # no zombie either
            with pytest.raises(WorkerError):
                next(iterator)
            loader.set_epoch(0)
            assert labels(loader) == order
            assert set(pids).isdisjoint(loader.explain().pids)

    with nothing_left():
        die()


def test_handlers_of_the_trainer_are_not_for_its_processes(packed: Packed) -> None:
    """What saves a checkpoint when the scheduler sends a signal to all would do so in each."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    before = {one: signal.signal(one, lambda *_: os._exit(9)) for one in numbers}
    try:
        dataset = pictures(packed(COUNTS))
        with ShardLoader(dataset, num_workers=1, prefetch_factor=1) as loader:
            iterator = iter(loader)
            got = [next(iterator)]
            (pid,) = loader.explain().pids
            for one in numbers[1:]:
                os.kill(pid, one)
            got += iterator
            assert labels(got) == labels(pictures(packed(COUNTS)))
            os.kill(pid, signal.SIGTERM)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            loader.set_epoch(1)
            with pytest.raises(WorkerError, match="was killed by SIGTERM"):
                list(loader)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@pytest.mark.parametrize("when", ["between epochs", "in mid-epoch"])
def test_a_process_that_is_killed_while_it_waits(packed: Packed, when: str) -> None:
    folder = packed(COUNTS)

    def kill() -> None:
        with ShardLoader(pictures(folder), num_workers=2, prefetch_factor=1) as loader:
            iterator, epoch = iter(loader), 0
            got = labels([next(iterator) for _ in range(STEPS if when == "between epochs" else 3)])
            pid = loader.explain().pids[1]
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            if when == "between epochs":
                loader.set_epoch(epoch := 1)
                iterator, got = iter(loader), []
            with pytest.raises(WorkerError, match=rf"pid {pid}\) was killed by SIGKILL"):
                while True:
                    got += labels([next(iterator)])
            assert got == expected_of(folder, epoch)[: len(got)]
            loader.set_epoch(2)
            assert labels(loader) == expected_of(folder, 2)

    with nothing_left():
        kill()


# --- silence ----------------------------------------------------------------------------------


class Hangs:
    """At one record it says so, and waits for a byte that lets it go on."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.hanging, self.gate = os.pipe(), os.pipe()

    def __call__(self, data: bytes) -> Any:
        if number(data) == self.target:
            os.write(self.hanging[1], b".")
            os.read(self.gate[0], 1)
        return picture(data)

    def wait(self) -> None:
        assert os.read(self.hanging[0], 1)

    def let_go(self) -> None:
        os.write(self.gate[1], b".")

    def close(self) -> None:
        for end in (*self.hanging, *self.gate):
            os.close(end)


def passing(dataset: ShardDataset, workers: tuple[int, int], patience_s: float) -> Any:
    """A pool that has begun epoch 0, and loses patience sooner than a loader's."""
    options = PoolOptions(
        *workers, prefetch=2, context=multiprocessing.get_context("fork"), patience_s=patience_s
    )
    pool: Any = (WorkerProcesses if workers[0] else InProcessWorkers)(dataset, options)
    share = dataset.share_of(0)
    seen = consumers(1, max(1, workers[0]))
    pool.begin(Pass(dataset.options, 0, 0, 0, 1, seen), share.steps)
    return pool


@pytest.mark.parametrize(
    "workers", [(0, 1), (0, 2), (2, 1), (2, 2)], ids=lambda c: f"{c[0]}x{c[1]}"
)
def test_a_transform_that_hangs_is_told_once_by_its_record(
    packed: Packed, monkeypatch: pytest.MonkeyPatch, workers: tuple[int, int]
) -> None:
    folder = packed(COUNTS)
    order = labels(pictures(folder))
    step = 1
    with closing(Hangs(order[step][-1])) as hangs:  # the last: the other thread has nothing to do
        pool = passing(pictures(folder, decode=hangs), workers, 0.02)
        hangs.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on a busy machine this one is late, too
            got = labels([pool.take()[0] for _ in range(step)])
        told: list[Any] = []

        def show(message: Any, category: Any, filename: str, *_: Any) -> None:
            told.append((str(message), filename))
            hangs.let_go()

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            monkeypatch.setattr(warnings, "showwarning", show)
            got += labels([pool.take()[0]])
        where = "a thread of this process"
        if workers[0]:
            where = f"loader process {step} (pid {pool.figures.pids[step]})"
        pool.close()
    assert got == order[: step + 1]
    ((text, filename),) = told
    assert filename == __file__
    record = f"record {order[step][-1]} of the dataset, k/{order[step][-1]:06}.jpg"
    said = re.escape(f"{where} is at {record}") + r", for \d+ s\. ShardLoader\(timeout="
    assert re.match(r"ShardLoader: no batch for [\d.]+ s: " + said, text)


@pytest.mark.parametrize("workers", [(0, 1), (2, 1)], ids=["0x1", "2x1"])
def test_a_timeout_ends_the_pass_and_its_processes(
    packed: Packed, workers: tuple[int, int]
) -> None:
    folder = packed(COUNTS)
    order = labels(pictures(folder))

    def iterate() -> None:
        with closing(Hangs(order[0][3])) as hangs:
            dataset = pictures(folder, decode=hangs)
            loader = ShardLoader(dataset, num_workers=workers[0], threads=workers[1], timeout=0.05)
            iterator = iter(loader)
            threads = [one for one in threading.enumerate() if one.name == "shardio-0"]
            pids = loader.explain().pids
            hangs.wait()
            with pytest.raises(WorkerError) as caught:
                next(iterator)
            text = str(caught.value)
            assert re.match(r"timeout=0\.05: no batch for [\d.]+ s: ", text)
            assert f"record {order[0][3]} of the dataset, k/{order[0][3]:06}.jpg" in text
            assert not children() & set(pids) and (not pids or f"(pid {pids[0]})" in text)
            with pytest.raises(WorkerError):
                next(iterator)
            hangs.let_go()  # a thread cannot be ended
            for thread in threads:
                thread.join(LIMIT_S)
                assert not thread.is_alive()
            loader.close()

    with nothing_left():
        iterate()


def test_a_stopped_process_is_told_and_ended(packed: Packed) -> None:
    folder = packed(COUNTS)

    def stop() -> None:
        with ShardLoader(pictures(folder), num_workers=1, timeout=0.05) as loader:
            iterator = iter(loader)
            (pid,) = loader.explain().pids
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
            said = rf"timeout=0.05.*pid {pid}\) is .*stopped by a signal.*SIGCONT"
            with pytest.raises(WorkerError, match=said):
                list(iterator)
            assert not children() & {pid}

    with nothing_left():
        stop()


class Patient:
    """Who is waited for, and never comes."""

    number, name, ended = 0, "somebody", 0

    def is_stopped(self) -> bool:
        return False

    def end(self) -> None:
        self.ended += 1


def test_seconds_in_which_the_trainer_was_stopped_do_not_count() -> None:
    now = [1000.0]
    late, who = Late(Whereabouts(1, 1), 5.0, 3.0, lambda: now[0]), Patient()

    def wait(sleeps_s: float = 0.0) -> None:
        now[0] += late.pause_s(1000.0) + sleeps_s
        late.look(1000.0, who)

    wait()
    with pytest.warns(UserWarning, match=r"no batch for 3 s: somebody is not at its first"):
        wait(600.0)  # Ctrl-Z, and fg; one second beyond the pause may be a busy machine's
    assert now[0] == 1602.0
    wait()
    assert not who.ended
    with pytest.raises(WorkerError, match=r"timeout=5: no batch for 5 s"):
        wait()
    assert who.ended == 1


@pytest.mark.parametrize("timeout", [-1, "5", float("nan"), float("inf"), True, None])
def test_a_timeout_that_is_none(packed: Packed, timeout: Any) -> None:
    dataset = pictures(packed(COUNTS))
    with pytest.raises(OptionError, match=r"timeout is .*expected seconds"):
        ShardLoader(dataset, num_workers=1, timeout=timeout)
    with pytest.raises(OptionError, match="give threads=1"):
        ShardLoader(dataset, num_workers=0, threads=0, timeout=5)


class Forks:
    """Forks at one record. In mid-transform: `child` is what the child does there."""

    def __init__(
        self,
        target: int,
        child: Callable[[], None],
        then: Callable[[], None],
        first: Callable[[], None] = lambda: None,
    ) -> None:
        self.target, self.child, self.then, self.first = target, child, then, first

    def __call__(self, data: bytes) -> Any:
        if number(data) == self.target:
            self.first()
            if os.fork() == 0:
                self.child()
            else:
                self.then()
        return picture(data)


@pytest.mark.parametrize("kept", [False, True], ids=["forked", "forked with its socket"])
def test_a_process_that_dies_is_noticed_whatever_it_forked(packed: Packed, kept: bool) -> None:
    folder = packed(COUNTS)
    order = labels(pictures(folder))
    gate = os.pipe()

    def stay() -> None:
        os.read(gate[0], 1)
        os._exit(0)

    def fork() -> None:
        if kept:  # as a program does that was started with close_fds=False
            for name in os.listdir("/proc/self/fd"):
                with suppress(OSError):
                    os.dup(int(name))

    forks = Forks(order[1][2], stay, lambda: os.kill(os.getpid(), signal.SIGKILL), fork)
    with ShardLoader(pictures(folder, decode=forks), num_workers=1) as loader:
        got = []
        with pytest.raises(WorkerError, match=r"was killed by SIGKILL.*at record"):
            for batch in loader:
                got += labels([batch])
        assert got == order[:1]
    os.write(gate[1], b".")
    for end in gate:
        os.close(end)


def test_a_pass_that_is_left_ends_within_a_batch(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_builder, "LISTEN_S", 0.0)  # ask before each row
    said, gate = os.pipe(), os.pipe()

    def decode(data: bytes) -> int:
        os.write(said[1], data[4:6])
        os.read(gate[0], 1)
        return 0

    dataset = ShardDataset(
        packed([30]), batch_size=30, fields=("image",), decode=decode, shuffle=False
    )
    with ShardLoader(dataset, num_workers=1) as loader:
        first = iter(loader)
        assert os.read(said[0], 2) == b"00"
        batches = iter(loader)  # ends the first pass, in whose first row the process is
        os.write(gate[1], b"." * 200)
        next(batches)
        seen = b"".join(os.read(said[0], 2) for _ in range(30))
        assert seen == b"".join(b"%02d" % row for row in range(30))
        with pytest.raises(EpochError):
            next(first)
    for end in (*said, *gate):
        os.close(end)


def test_a_child_that_comes_back_from_a_transform_sends_nothing(
    packed: Packed, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = packed(COUNTS)
    order = labels(pictures(folder))

    def wait() -> None:
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 1

    forks = Forks(order[1][2], lambda: None, wait)
    with ShardLoader(pictures(folder, decode=forks), num_workers=1) as loader:
        assert labels(loader) == order
    assert "handle is closed" in capfd.readouterr().err


def test_a_closed_loader_says_so_and_can_be_iterated_again(packed: Packed) -> None:
    folder = packed(COUNTS)
    for workers in POOLS:
        with nothing_left():
            loader = ShardLoader(pictures(folder), num_workers=workers[0], threads=workers[1])
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
def test_nothing_is_left(packed: Packed, workers: tuple[int, int], end: str) -> None:
    folder = packed(COUNTS)

    def use() -> Any:
        loader = ShardLoader(pictures(folder), num_workers=workers[0], threads=workers[1])
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


def test_processes_leave_by_themselves_whoever_else_was_forked(packed: Packed) -> None:
    """With a copy of a socket elsewhere a process would have to be killed."""
    folder = packed(COUNTS)
    loaders = [ShardLoader(pictures(folder), num_workers=2) for _ in range(2)]
    iterators: list[Any] = [iter(loader) for loader in loaders]
    torchs = DataLoader(pictures(folder), batch_size=None, num_workers=1)
    iterators.append(iter(torchs))
    for iterator in iterators:
        next(iterator)
    for loader in loaders:
        processes = [one.process for one in pool_of(loader)._all]
        loader.close()
        assert [process.exitcode for process in processes] == [0, 0]
    del iterators, iterator
    gc.collect()


def test_programs_that_the_trainer_starts_do_not_get_its_buffers(packed: Packed) -> None:
    with ShardLoader(pictures(packed(COUNTS)), num_workers=1) as loader:
        next(iter(loader))
        mapped = [mapped for one in pool_of(loader)._all for mapped in one.mapped.values()]
        assert mapped and not any(os.get_inheritable(one._fd) for one in mapped)


def test_a_transform_that_hangs_does_not_keep_its_process(packed: Packed) -> None:
    folder = packed(COUNTS)
    never = threading.Event()

    def hangs(data: bytes) -> Any:
        never.wait()

    loader = ShardLoader(pictures(folder, decode=hangs), num_workers=1)
    iter(loader)
    (process,) = (one.process for one in pool_of(loader)._all)
    loader.close()
    assert process.exitcode == 0


@pytest.mark.parametrize("workers", [(0, 1), (2, 1)], ids=["0x1", "2x1"])
def test_closing_wakes_who_waits_for_a_batch(packed: Packed, workers: tuple[int, int]) -> None:
    hanging, never = os.pipe(), threading.Event()

    def hangs(data: bytes) -> Any:
        os.write(hanging[1], b".")
        never.wait(LIMIT_S)
        return picture(data)

    caught: list[BaseException] = []
    loader = ShardLoader(
        pictures(packed(COUNTS), decode=hangs), num_workers=workers[0], threads=workers[1]
    )
    iterator = iter(loader)

    def take() -> None:
        try:
            next(iterator)
        except BaseException as error:
            caught.append(error)
            never.set()  # the transform goes on only when the loop has heard

    processes = [one.process for one in getattr(pool_of(loader), "_all", ())]
    waiting = threading.Thread(target=take)
    waiting.start()
    assert os.read(hanging[0], 1)
    loader.close()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive() and type(caught[0]) is WorkerError
    assert "its loader closed" in str(caught[0])
    assert [process.exitcode for process in processes] == [0] * workers[0]  # none had to be killed
    for end in hanging:
        os.close(end)


@pytest.mark.parametrize("copy", [False, True])
def test_pages_are_locked_once_each_and_none_stays_so(packed: Packed, copy: bool) -> None:
    locked: list[int] = []

    def lock(address: int, nbytes: int) -> Callable[[], object]:
        locked.append(address)
        return lambda: locked.remove(address)

    dataset = pictures(packed(COUNTS))
    fork = multiprocessing.get_context("fork")
    pool = WorkerProcesses(dataset, PoolOptions(1, 1, 2, copy=copy, lock=lock, context=fork))
    share = dataset.share_of(0)
    what = Pass(dataset.options, 0, 0, 0, 1, consumers(1, 1))
    kept = []
    for _ in range(3):
        pool.begin(what, share.steps)
        kept = [pool.take()[0] for _ in range(share.steps)]
    # Of views those of all that is kept; copies are not locked, and the buffers are used again.
    assert len(locked) == len(set(locked)) and (
        0 < len(locked) < STEPS if copy else len(locked) >= STEPS
    )
    pool.close()
    assert not locked and labels(kept) == labels(pictures(packed(COUNTS)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_killed_trainer_takes_its_processes_along(packed: Packed, method: str) -> None:
    """Also one that is in a transform for ever, and with others around."""
    program = Program(
        *(loader_programs.__file__, "train", packed(COUNTS), method, "hang"), limit_s=LIMIT_S
    )
    assert program.read_until("hanging.")
    program.kill()
    done = program.finish()
    assert done.code == -signal.SIGKILL and not done.left and not done.timed_out, str(done)
    assert "Traceback" not in done.output, str(done)


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.stress)])
def test_a_notebook_that_is_interrupted_iterates_again(
    packed: Packed, tmp_path: Path, method: str
) -> None:
    """And at the second Ctrl-C, which it does not catch, the trainer alone shows a traceback."""
    program = Program(
        *(loader_programs.__file__, "notebook", packed(COUNTS), method, tmp_path / "gate"),
        limit_s=LIMIT_S,
    )
    assert program.read_until("hanging.")
    program.interrupt()
    assert program.read_until("caught.") and program.read_until("right.")
    assert program.read_until("hanging.")
    program.interrupt()
    done = program.finish()
    assert done.code == -signal.SIGINT and not done.left and not done.timed_out, str(done)
    assert "EpochError: this pass was ended by KeyboardInterrupt" in done.output
    before, _, after = done.output.partition("right.")
    ended = [line for line in after.splitlines() if line.startswith("KeyboardInterrupt")]
    assert "Traceback" not in before and len(ended) == 1, str(done)
    assert "shardio-loader" not in done.output, str(done)


def test_ctrl_c_is_not_for_loader_processes(packed: Packed) -> None:
    folder = packed(COUNTS)
    with ShardLoader(pictures(folder), num_workers=2) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            got = []
            for batch in loader:
                got += labels([batch])
                for pid in loader.explain().pids:
                    os.kill(pid, signal.SIGINT)
            assert got == expected_of(folder, epoch)


def test_an_interrupt_in_the_loop_makes_no_gap(packed: Packed) -> None:
    """KeyboardInterrupt wherever the trainer is within next()."""
    folder = packed(COUNTS)
    order = labels(pictures(folder))
    for place in ("tell", "more", "receive"):
        with ShardLoader(pictures(folder), num_workers=2) as loader:
            iterator = iter(loader)
            got = labels([next(iterator)])

            def interrupted(*_: Any, **__: Any) -> Any:
                raise KeyboardInterrupt

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(WorkerConnection, place, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    for batch in iterator:
                        got += labels([batch])
            assert got == order[: len(got)]
            with pytest.raises((EpochError, WorkerError)):
                next(iterator)
            loader.set_epoch(0)
            assert labels(loader) == order


# --- forks ------------------------------------------------------------------------------------


def in_child(check: Callable[[], bool]) -> int:
    """Fork a child that checks something; its pid."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@EACH_POOL
def test_a_batch_in_a_child_is_not_overwritten_either(
    packed: Packed, workers: tuple[int, int]
) -> None:
    folder = packed(COUNTS)
    order = labels(pictures(folder))
    gate = os.pipe()
    with ShardLoader(pictures(folder), num_workers=workers[0], threads=workers[1]) as loader:
        iterator = iter(loader)
        kept = [next(iterator)]
        pid = in_child(lambda: os.read(gate[0], 1) == b"!" and labels(kept) == order[:1])
        kept.clear()
        for _ in iterator:
            pass
        loader.set_epoch(1)
        for _ in loader:
            pass
        os.write(gate[1], b"!")
        assert ended(pid) == 0
        assert loader.explain().buffers <= loader.explain().ring + 1
    for end in gate:
        os.close(end)


def test_a_loader_in_a_child_starts_processes_of_its_own(packed: Packed) -> None:
    folder = packed(COUNTS)
    order = labels(pictures(folder))
    for workers in POOLS:
        with ShardLoader(pictures(folder), num_workers=workers[0], threads=workers[1]) as loader:
            iterator = iter(loader)
            got = labels([next(iterator)])

            def check(loader: ShardLoader = loader, iterator: Iterator[Any] = iterator) -> bool:
                with pytest.raises(WorkerError, match="iterate anew"):
                    next(iterator)
                right = labels(loader) == order
                loader.close()
                return right

            assert ended(in_child(check)) == 0
            assert got + labels(iterator) == order


def test_a_child_that_ends_as_python_does_harms_nothing(packed: Packed) -> None:
    done = programs.run(loader_programs.__file__, "fork", packed(COUNTS), "fork", limit_s=LIMIT_S)
    assert done.code == 0 and not done.left and done.output == "right.\n", str(done)


# --- flat -------------------------------------------------------------------------------------


def resident(pid: int | str) -> int:
    """Bytes that a process holds alone, or shares."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def held(pids: list[int]) -> tuple[list[str], list[int], int, int]:
    for one in threading.enumerate():
        if one.name.startswith("shardio"):
            one.join(LIMIT_S)  # the pass is over, and with it its threads
    gc.collect()
    each = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
    maps = sum(len(Path(f"/proc/{pid}/maps").read_text().splitlines()) for pid in ["self", *pids])
    return descriptors(), each, threading.active_count(), maps


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("workers", [(0, 2), (2, 2)], ids=["0x2", "2x2"])
def test_fifty_epochs_leave_everything_flat(packed: Packed, workers: tuple[int, int]) -> None:
    folder = packed([20, 7])

    def epochs(loader: ShardLoader, first: int, last: int) -> None:
        for epoch in range(first, last):
            loader.set_epoch(epoch)
            if epoch % 5 == 0:
                list(loader)
            else:
                for _, _ in zip(range(3), loader):  # noqa: B905
                    pass
        loader.set_epoch(last)
        for _ in loader:
            pass

    def compare() -> None:
        with ShardLoader(pictures(folder), num_workers=workers[0], threads=workers[1]) as loader:
            epochs(loader, 0, 10)
            pids = loader.explain().pids
            before, used = held(pids), [resident(pid) for pid in ["self", *pids]]
            epochs(loader, 11, 60)
            assert loader.explain().pids == pids
            after = held(pids)
            assert after[0] == before[0] and after[2] == before[2]
            for most, count in zip(before[1], after[1], strict=True):
                assert count <= most + 8  # it is at work on the next epoch: a buffer, a file
            assert after[3] <= before[3] + 20  # of these, and of malloc's
            for pid, bytes_before in zip(["self", *pids], used, strict=True):
                assert resident(pid) < bytes_before + (6 << 20)

    with nothing_left():
        compare()


@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_passes_that_follow_each_other_are_those_of_their_epochs(
    packed: Packed, prefetch: int, count: int
) -> None:
    """Also of fewer batches than processes make ahead, guessed rightly or wrongly."""
    folder = packed([20, 13])
    for size in (4, 16, 64):
        dataset = pictures(folder, batch_size=size, spans=4)
        with ShardLoader(dataset, num_workers=count, prefetch_factor=prefetch) as loader:
            for epoch in (0, 1, 2, 5, 5, 0):
                loader.set_epoch(epoch)
                if epoch == 2:
                    next(iter(loader))  # left, and begun again
                    loader.set_epoch(epoch)
                got = labels(loader)
                dataset.set_epoch(epoch)
                assert got == labels(dataset)
