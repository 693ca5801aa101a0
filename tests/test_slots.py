"""Slots: memory of batches is used again when the last view of it has died, and never before."""

import errno
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardio.loader.buffer_pool import ALIGN, Mapped, Slot, Slots
from shardio.storage.descriptors import map_memory

PRIVATE = pytest.mark.parametrize("private", [False, True], ids=["shared", "private"])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_bytes() -> int:
    """Bytes of this process's shared mappings of slots, each mapping counted."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:shardio" in line:
            start, end = line.split()[0].split("-")
            found += int(end, 16) - int(start, 16)
    return found


# --- a slot ---------------------------------------------------------------------------------


@PRIVATE
def test_arrays_begin_on_pages_and_do_not_overlap(private: bool) -> None:
    slot = Slot(0, 0, private=private)
    slot.begin()
    placed = [slot.place(n) for n in (1, ALIGN, ALIGN + 1, 0, 7)]
    for i, (start, array) in enumerate(placed):
        assert start % ALIGN == 0 and array.ctypes.data % ALIGN == 0
        array[:] = i + 1
    assert [len(array) for _, array in placed] == [1, ALIGN, ALIGN + 1, 0, 7]
    assert all((array == i + 1).all() for i, (_, array) in enumerate(placed))
    slot.close()


@PRIVATE
def test_arrays_outlive_the_growth_of_their_slot(private: bool) -> None:
    slot = Slot(0, 0, private=private)
    slot.begin()
    arrays = []
    for i in range(12):
        _, array = slot.place(ALIGN << i)
        array[:] = i
        arrays.append(array)
    assert slot.size >= slot.used >= ALIGN << 11
    assert all((array == i).all() for i, array in enumerate(arrays))
    slot.close()


def test_an_offset_tells_where_memory_of_the_batch_lies() -> None:
    slot = Slot(0, 0)
    slot.begin()
    start, array = slot.place(100)
    assert slot.offset(array.ctypes.data + 5, 95) == start + 5
    _, later = slot.place(50 * ALIGN)  # another mapping
    assert slot.offset(array.ctypes.data + 5, 95) == start + 5
    assert slot.offset(later.ctypes.data, 50 * ALIGN) is not None
    assert slot.offset(np.zeros(10, np.uint8).ctypes.data, 10) is None
    # What only begins in the slot is not in it.
    assert slot.offset(later.ctypes.data, slot.size + 1) is None
    slot.begin()
    assert slot.used == 0
    slot.close()


def test_threads_are_given_memory_of_their_own() -> None:
    slot = Slot(0, 0)
    slot.begin()
    found: list[tuple[int, Any]] = []
    barrier = threading.Barrier(4)

    def place() -> None:
        barrier.wait()
        for _ in range(50):
            found.append(slot.place(ALIGN))

    threads = [threading.Thread(target=place) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    starts = [start for start, _ in found]
    assert len(set(starts)) == 200
    for start, array in found:
        array[:] = start // ALIGN % 251
    assert all((array == start // ALIGN % 251).all() for start, array in found)
    slot.close()


# --- when it is free, where batches are used by who makes them -------------------------------


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda batch: batch,
    "a row": lambda batch: batch[1],
    "an element": lambda batch: batch[1, 2],
    "another dtype": lambda batch: batch.view(torch.int16),
    "an array": lambda batch: batch.numpy(),
    "a row of an array": lambda batch: batch.numpy()[3:4],
    "a permuted row": lambda batch: batch.T[0],
    "detached": lambda batch: batch.detach(),
    "by dlpack": lambda batch: torch.from_dlpack(batch),
    "bytes of it": lambda batch: memoryview(batch.numpy()),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@PRIVATE
def test_any_view_keeps_the_slot(view: Callable[[torch.Tensor], Any], private: bool) -> None:
    slots, freed = Slots(private=private), []
    slot = slots.take()
    batch = torch.from_numpy(slot.place(800)[1]).view(8, 100)
    slot.hand_out(freed.append)
    kept = view(batch)
    del batch
    gc.collect()  # who is told of the death must not be collected before it
    assert not freed
    del kept
    assert freed == [slot.number]
    slots.close()


@PRIVATE
def test_a_slot_that_grew_is_free_when_the_views_of_all_its_memory_are_gone(private: bool) -> None:
    for order in (0, 1), (1, 0):
        slots, freed = Slots(private=private), []
        slot = slots.take()
        arrays = [slot.place(10)[1], slot.place(20 * ALIGN)[1]]
        slot.hand_out(freed.append)
        arrays[order[0]] = None
        gc.collect()
        assert not freed
        arrays[order[1]] = None
        assert freed == [slot.number]
        slots.close()


def test_a_slot_without_views_is_free_at_once_and_only_once() -> None:
    slots, freed = Slots(private=True), []
    slot = slots.take()
    slot.hand_out(freed.append)
    gc.collect()
    assert freed == [slot.number]


def test_views_that_die_in_threads_free_a_slot_once() -> None:
    freed: list[int] = []
    for _ in range(100):
        slots = Slots(private=True)
        slot = slots.take()
        held = [[slot.place(10)[1]] for _ in range(2)]
        slot.place(30 * ALIGN)
        held.append([slot.place(10)[1]])
        slot.hand_out(freed.append)
        barrier = threading.Barrier(len(held))

        def drop(one: list[Any], barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            one.clear()

        threads = [threading.Thread(target=drop, args=(one,)) for one in held]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(freed) == 100


def test_private_slots_take_no_descriptors() -> None:
    before = descriptors()
    slots = Slots(private=True)
    kept = [slots.take() for _ in range(20)]
    for slot in kept:
        slot.place(10 * ALIGN)[1][:] = 1
    assert descriptors() == before
    slots.close()


# --- the slots of a maker -------------------------------------------------------------------


def test_a_free_slot_is_used_again_and_another_made_only_when_none_is() -> None:
    slots = Slots()
    first, second = slots.take(), slots.take()
    assert {first.number, second.number} == {0, 1} and slots.most == 2
    slots.free(first.number)
    assert slots.take() is first
    third = slots.take()
    assert third.number == 2 and slots.most == 3
    slots.close()


def test_how_many_were_free_all_the_time_is_told_once() -> None:
    slots = Slots()
    assert slots.spare() == 0
    taken = [slots.take() for _ in range(3)]
    for slot in taken:
        slot.hand_over()
        slots.free(slot.number)
    slots.take()
    slots.take()
    assert slots.spare() == 0  # of all these
    for slot in taken[1:]:
        slot.hand_over()
        slots.free(slot.number)
    slots.take()
    slots.free(taken[2].number)
    slots.take()
    assert slots.spare() == 2 and slots.spare() == 0
    slots.close()


def test_a_new_slot_is_as_large_as_batches_were() -> None:
    slots = Slots()
    slot = slots.take()
    slot.place(100 * ALIGN)
    slots.free(slot.number)
    slots.take()
    assert slots.take().size >= 100 * ALIGN
    assert slots.bytes >= 200 * ALIGN
    slots.close()


def test_a_slot_that_is_given_back_leaves_no_descriptor_and_no_mapping() -> None:
    gc.collect()
    before, mapped = descriptors(), mapped_bytes()
    slots = Slots()
    taken = [slots.take() for _ in range(3)]
    assert descriptors() > before and mapped_bytes() > mapped
    for slot in taken:
        slot.hand_over()
        slots.free(slot.number, keep=False)
    assert slots.bytes == 0
    del taken, slot
    assert (descriptors(), mapped_bytes()) == (before, mapped)


def test_a_batch_that_dies_after_all_slots_were_closed_is_no_error() -> None:
    slots = Slots(private=True)
    slot = slots.take()
    array = slot.place(10)[1]
    array[:] = 5
    slot.hand_out(slots.free)
    slots.close()
    assert (array == 5).all()
    del array


def test_what_the_maker_itself_keeps_of_a_batch_is_not_overwritten() -> None:
    """A collate_fn may mix each batch with the one before, which it keeps."""
    slots = Slots()
    slot = slots.take()
    kept = slot.place(10)[1]
    kept[:] = 1
    slot.hand_over()
    slots.free(slot.number)  # the trainer does not need it any more
    other = slots.take()
    assert other is not slot
    other.place(10)[1][:] = 2
    assert (kept == 1).all()
    del kept
    assert slots.take() is slot
    slots.close()


# --- in the process that uses the batches ---------------------------------------------------


def test_the_user_sees_what_the_maker_writes_also_after_growth() -> None:
    slot = Slot(0, 0)
    slot.begin()
    slot.place(10)[1][:] = 1
    mapped = Mapped(os.dup(slot.fd), slot.size)
    before: list[Any] = []
    first = mapped.view(before.append)
    assert (first[:10] == 1).all()
    start, array = slot.place(9 * ALIGN)
    array[:] = 2
    mapped.map(slot.size)
    assert (first[:10] == 1).all()
    del first
    assert len(before) == 1
    assert (mapped.view(before.append)[start : start + 9 * ALIGN] == 2).all()
    mapped.close()
    slot.close()


def test_the_user_of_a_slot_learns_once_that_its_batch_died() -> None:
    freed: list[Any] = []
    mapped = Mapped(-1, 1000)
    view = torch.from_numpy(mapped.view(freed.append))
    row = view.view(10, 100)[3]
    del view
    gc.collect()
    assert not freed and mapped.in_use
    del row
    assert len(freed) == 1 and not mapped.in_use


def test_pages_are_unlocked_while_they_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def noted(fd: int, size: int) -> Any:
        events.append("map")
        return map_memory(fd, size)

    def lock(address: int, nbytes: int) -> Callable[[], None]:
        events.append("lock")
        return lambda: events.append("unlock")

    monkeypatch.setattr("shardio.storage.descriptors.map_memory", noted)
    mapped = Mapped(-1, ALIGN, lock)
    mapped.map(3 * ALIGN)
    mapped.close()
    mapped.close()
    assert events == ["map", "lock", "unlock", "map", "lock", "unlock"]


def test_a_slot_that_cannot_be_mapped_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, size: int) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    slots = Slots()
    fd = os.dup(slots.take().fd)
    monkeypatch.setattr("shardio.storage.descriptors.map_memory", full)
    with pytest.raises(OSError, match="memory"):
        Mapped(fd, ALIGN)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    slots.close()


def test_page_locks_follow_a_slot_that_grows_and_end_with_it() -> None:
    locked: list[tuple[int, int]] = []

    def lock(address: int, nbytes: int) -> Callable[[], None]:
        locked.append((address, nbytes))
        return lambda: locked.remove((address, nbytes))

    mapped = Mapped(-1, ALIGN, lock)
    assert [nbytes for _, nbytes in locked] == [ALIGN]
    mapped.map(3 * ALIGN)
    assert [nbytes for _, nbytes in locked] == [3 * ALIGN]
    mapped.close()
    assert not locked


def test_a_slot_that_was_in_use_when_a_child_was_forked_is_marked() -> None:
    slots = Slots()
    used, idle = slots.take(), slots.take()
    in_use, unused = (Mapped(os.dup(slot.fd), slot.size) for slot in (used, idle))
    view = in_use.view(lambda _: None)
    unused.view(lambda _: None)  # dead at once
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert in_use.shared and not unused.shared
    del view
    for one in (in_use, unused, slots):
        one.close()
