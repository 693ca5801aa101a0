"""Which epoch a pass reads: passes at once, after a break, and after an epoch was set."""

import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import LIMIT_S, loop_programs
from support.leftovers import nothing_left
from support.loop_programs import Wrapped
from support.worker_programs import (
    BATCH,
    COUNTS,
    STEPS,
    WAYS,
    WORKERS,
    Wait,
    images,
    loading,
    numbers,
    passing,
)
from torch.utils.data import DataLoader

from shardio import EpochError
from shardio.dataset.epoch_state import EpochState, new_number
from shardio.dataset.iteration import busy_workers

Packed = Callable[..., Path]
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.mark.parametrize("way", ["none", "fork"])
@pytest.mark.parametrize("lag", [0, 5])
def test_two_passes_at_once_both_have_the_whole_order(packed: Packed, way: str, lag: int) -> None:
    def interleave() -> None:
        dataset, loader, (expected, _) = loading(folder, way)
        first = iter(loader)
        got = [numbers(next(first)) for _ in range(lag)]
        dataset.set_epoch(0)
        second, other = iter(loader), []
        for batch in first:
            got.append(numbers(batch))
            other.append(numbers(next(second)))
        other += map(numbers, second)
        assert got == other == expected

    folder = packed(COUNTS)
    with nothing_left():
        interleave()


def test_a_worker_that_starts_after_set_epoch_begins_no_pass_anew() -> None:
    state = EpochState(1)
    first = state.decide(1, fixed=False)
    state.begin(first, 2)  # by the trainer, which starts the workers
    state.set_epoch(0)
    state.begin(first, 2)  # by a worker
    second = state.decide(2, fixed=False)
    assert (second.epoch, second.reason) == (0, "chosen")  # and not "left"
    state.begin(second, 2)
    state.begin(first, 2)  # by the other worker
    assert not state.complete
    for number, complete in ((1, False), (2, True)):
        for consumer in range(2):
            state.ended(number, consumer)
        assert state.complete is complete


def test_a_pass_that_moved_on_before_it_began_is_not_complete() -> None:
    state = EpochState(1)
    state.set_epoch(2)
    decision = state.decide(1, fixed=False)
    state.moved_on(1, 2, 0)  # by a worker that loads a state
    state.begin(decision, 2)  # by another one
    assert not state.complete
    assert state.next_place(fixed=False) == (2, 0, "chosen")


def test_two_datasets_of_one_folder_are_read_at_once(packed: Packed) -> None:
    folder = packed(COUNTS)
    one, other = images(folder), images(folder, seed=1)
    other.set_epoch(1)
    alone = [[numbers(batch) for batch in dataset] for dataset in (one, other)]
    for dataset, epoch in ((one, 0), (other, 1)):
        dataset.set_epoch(epoch)
    got = [(numbers(a), numbers(b)) for a, b in zip(one, other, strict=True)]
    assert [a for a, _ in got] == alone[0] and [b for _, b in got] == alone[1] != alone[0]


def test_persistent_workers_serve_one_pass_and_a_second_one_starts_it_anew(packed: Packed) -> None:
    # DataLoader has one iterator for all passes of persistent workers: both names mean the same.
    dataset, loader, (expected, _) = loading(packed(COUNTS), "persistent")
    first = iter(loader)
    next(first)
    dataset.set_epoch(0)
    second = iter(loader)
    assert second is first
    assert [numbers(batch) for batch in second] == expected


spawn_is_stress = [*list(WAYS)[:-1], pytest.param("spawn", marks=pytest.mark.stress)]


@pytest.mark.parametrize("way", spawn_is_stress)
@pytest.mark.parametrize("stop", [0, 4])
def test_a_pass_after_a_break_begins_at_the_beginning(packed: Packed, way: str, stop: int) -> None:
    def break_off() -> None:
        dataset, loader, expected = loading(folder, way)
        for epoch in (0, 1):
            dataset.set_epoch(epoch)
            got = []
            for step, batch in enumerate(loader):
                got.append(numbers(batch))
                if step == stop:
                    break
            assert got == expected[epoch][: stop + 1]
            dataset.set_epoch(epoch)
            assert [numbers(batch) for batch in loader] == expected[epoch]

    folder = packed(COUNTS)
    with nothing_left():
        break_off()


@pytest.mark.parametrize("way", [*list(WAYS)[:-1], pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_pass_after_a_changed_epoch_is_right(packed: Packed, way: str) -> None:
    def change() -> None:
        dataset, loader, expected = loading(folder, way)
        got = []
        with passing(loader) as first:
            got.append(numbers(next(first)))
            dataset.set_epoch(1)
            with pytest.raises(EpochError, match="the epoch was set to 1 while"):
                for batch in first:
                    got.append(numbers(batch))  # what workers had sent before
            assert got == expected[0][: len(got)] and len(got) < STEPS
            # Persistent workers are those that raised.
            assert [numbers(batch) for batch in loader] == expected[1]

    folder = packed(COUNTS)
    with nothing_left():
        change()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_worker_that_starts_after_the_epoch_changed_says_so(
    packed: Packed, tmp_path: Path, method: str
) -> None:
    # Two batches: worker 0 has made its one, of epoch 0, and ended, before worker 1 looks at all.
    folder, gate = packed([2 * BATCH]), tmp_path / "gate"
    expected = numbers(next(iter(images(folder))))
    dataset = images(folder)
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=WORKERS,
        multiprocessing_context=method,
        worker_init_fn=Wait(1, str(gate)),
    )
    os.mkfifo(gate)
    permission = os.open(gate, os.O_RDWR)
    with passing(loader) as one:
        assert numbers(next(one)) == expected
        dataset.set_epoch(1)
        os.write(permission, b"!")
        with pytest.raises(EpochError, match="call set_epoch before iter"):
            next(one)
    os.close(permission)


def test_an_epoch_that_is_set_again_changes_nothing(packed: Packed) -> None:
    dataset, loader, (expected, _) = loading(packed(COUNTS), "none")
    got = []
    for batch in loader:
        got.append(numbers(batch))
        dataset.set_epoch(0)
    assert got == expected


def test_a_rank_that_was_forked_has_an_epoch_of_its_own(numbered: Path) -> None:
    stream = loop_programs.dataset(numbered)
    context = torch.multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def rank() -> None:
        list(stream), list(stream)
        queue.put(stream.epoch)

    ranks = [context.Process(target=rank) for _ in range(2)]
    for process in ranks:
        process.start()
    assert [queue.get() for _ in ranks] == [1, 1]
    for process in ranks:
        process.join()
    assert stream.epoch == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_an_older_iterator_that_ends_later_hides_nothing(numbered: Path, workers: int) -> None:
    stream = loop_programs.dataset(numbered)
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    for epoch in range(3):
        older = iter(loader)
        next(older)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that pass is left, here
            newer = iter(loader)
            assert len(list(newer)) == 13
        assert len(list(older)) == 12 and stream.epoch == epoch


@pytest.mark.parametrize("workers", [1, 2])
def test_an_older_pass_that_begins_late_is_not_the_last_one(numbered: Path, workers: int) -> None:
    stream = loop_programs.dataset(numbered)
    loader = DataLoader(Wrapped(stream, 1), batch_size=None, num_workers=workers)
    for epoch in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # worker 0 of the older may have begun its pass already
            older, newer = iter(loader), iter(loader)
        next(older)
        assert len(list(newer)) == 13 and stream.epoch == epoch
        del older


def test_who_decides_waits_for_a_pass_that_is_just_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, reached, gate = EpochState(0), threading.Event(), threading.Event()
    first = state.decide(new_number(), fixed=False)
    state.begin(first, 1)
    state.ended(first.number, 0)
    older = state.decide(new_number(), fixed=False)

    def hold(state: EpochState, value: int) -> None:  # after the epoch was written
        reached.set()
        assert gate.wait(LIMIT_S)

    def let_go(state: EpochState) -> int:  # who decides has seen that epoch
        gate.set()
        return 0

    monkeypatch.setattr(EpochState, "start", property(let_go, hold), raising=False)
    begins = threading.Thread(target=state.begin, args=(older, 1))
    begins.start()
    assert reached.wait(LIMIT_S)
    newer = state.decide(new_number(), fixed=False)
    begins.join()
    assert (older.epoch, newer.epoch, newer.reason) == (1, 1, "left")


def test_workers_without_batches_are_not_waited_for(numbered: Path) -> None:
    stream = loop_programs.dataset(numbered, batch_size=60)  # 2 batches
    state = EpochState(0)
    decision = state.decide(new_number(), fixed=False)
    state.begin(decision, busy_workers(stream, 4, 1, decision))
    for worker in (0, 1):  # the others may start as late as they like
        assert not state.complete
        state.ended(decision.number, worker)
    assert state.complete
