"""Buffers: memory of batches is used again when its last view has died, and never before."""

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

from shardio.loader.buffer_pool import ALIGN, Buffer, BufferPool, MappedBuffer
from shardio.storage.descriptors import map_memory

PRIVATE = pytest.mark.parametrize("private", [False, True], ids=["shared", "private"])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_bytes() -> int:
    """Bytes of this process's shared mappings of buffers, each mapping counted."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:shardio" in line:
            start, end = line.split()[0].split("-")
            found += int(end, 16) - int(start, 16)
    return found


# --- a buffer ---------------------------------------------------------------------------------


@PRIVATE
def test_arrays_begin_on_pages_and_do_not_overlap(private: bool) -> None:
    buffer = Buffer(0, 0, private=private)
    buffer.begin()
    placed = [buffer.allocate(n) for n in (1, ALIGN, ALIGN + 1, 0, 7)]
    for i, (start, array) in enumerate(placed):
        assert start % ALIGN == 0 and array.ctypes.data % ALIGN == 0
        array[:] = i + 1
    assert [len(array) for _, array in placed] == [1, ALIGN, ALIGN + 1, 0, 7]
    assert all((array == i + 1).all() for i, (_, array) in enumerate(placed))
    buffer.close()


@PRIVATE
def test_arrays_outlive_the_growth_of_their_buffer(private: bool) -> None:
    buffer = Buffer(0, 0, private=private)
    buffer.begin()
    arrays = []
    for i in range(12):
        _, array = buffer.allocate(ALIGN << i)
        array[:] = i
        arrays.append(array)
    assert buffer.size >= buffer.used >= ALIGN << 11
    assert all((array == i).all() for i, array in enumerate(arrays))
    buffer.close()


def test_an_offset_tells_where_memory_of_the_batch_lies() -> None:
    buffer = Buffer(0, 0)
    buffer.begin()
    start, array = buffer.allocate(100)
    assert buffer.offset(array.ctypes.data + 5, 95) == start + 5
    _, later = buffer.allocate(50 * ALIGN)  # another mapping
    assert buffer.offset(array.ctypes.data + 5, 95) == start + 5
    assert buffer.offset(later.ctypes.data, 50 * ALIGN) is not None
    assert buffer.offset(np.zeros(10, np.uint8).ctypes.data, 10) is None
    # What only begins in the buffer is not in it.
    assert buffer.offset(later.ctypes.data, buffer.size + 1) is None
    buffer.begin()
    assert buffer.used == 0
    buffer.close()


def test_threads_are_given_memory_of_their_own() -> None:
    buffer = Buffer(0, 0)
    buffer.begin()
    found: list[tuple[int, Any]] = []
    barrier = threading.Barrier(4)

    def place() -> None:
        barrier.wait()
        for _ in range(50):
            found.append(buffer.allocate(ALIGN))

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
    buffer.close()


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
def test_any_view_keeps_the_buffer(view: Callable[[torch.Tensor], Any], private: bool) -> None:
    buffers, freed = BufferPool(private=private), []
    buffer = buffers.take()
    batch = torch.from_numpy(buffer.allocate(800)[1]).view(8, 100)
    buffer.hand_out(freed.append)
    kept = view(batch)
    del batch
    gc.collect()  # who is told of the death must not be collected before it
    assert not freed
    del kept
    assert freed == [buffer.number]
    buffers.close()


@PRIVATE
def test_a_buffer_that_grew_is_free_when_the_views_of_all_its_memory_are_gone(
    private: bool,
) -> None:
    for order in (0, 1), (1, 0):
        buffers, freed = BufferPool(private=private), []
        buffer = buffers.take()
        arrays = [buffer.allocate(10)[1], buffer.allocate(20 * ALIGN)[1]]
        buffer.hand_out(freed.append)
        arrays[order[0]] = None
        gc.collect()
        assert not freed
        arrays[order[1]] = None
        assert freed == [buffer.number]
        buffers.close()


def test_a_buffer_without_views_is_free_at_once_and_only_once() -> None:
    buffers, freed = BufferPool(private=True), []
    buffer = buffers.take()
    buffer.hand_out(freed.append)
    gc.collect()
    assert freed == [buffer.number]


def test_views_that_die_in_threads_free_a_buffer_once() -> None:
    freed: list[int] = []
    for _ in range(100):
        buffers = BufferPool(private=True)
        buffer = buffers.take()
        held = [[buffer.allocate(10)[1]] for _ in range(2)]
        buffer.allocate(30 * ALIGN)
        held.append([buffer.allocate(10)[1]])
        buffer.hand_out(freed.append)
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


def test_private_buffers_take_no_descriptors() -> None:
    before = descriptors()
    buffers = BufferPool(private=True)
    kept = [buffers.take() for _ in range(20)]
    for buffer in kept:
        buffer.allocate(10 * ALIGN)[1][:] = 1
    assert descriptors() <= before  # what earlier tests had open may be closed
    buffers.close()


# --- the buffers of a builder -------------------------------------------------------------------


def test_a_free_buffer_is_used_again_and_another_made_only_when_none_is() -> None:
    buffers = BufferPool()
    first, second = buffers.take(), buffers.take()
    assert {first.number, second.number} == {0, 1} and buffers.peak == 2
    buffers.free(first.number)
    assert buffers.take() is first
    third = buffers.take()
    assert third.number == 2 and buffers.peak == 3
    buffers.close()


def test_how_many_were_free_all_the_time_is_told_once() -> None:
    buffers = BufferPool()
    assert buffers.take_min_free() == 0
    taken = [buffers.take() for _ in range(3)]
    for buffer in taken:
        buffer.hand_over()
        buffers.free(buffer.number)
    buffers.take()
    buffers.take()
    assert buffers.take_min_free() == 0  # of all these
    for buffer in taken[1:]:
        buffer.hand_over()
        buffers.free(buffer.number)
    buffers.take()
    buffers.free(taken[2].number)
    buffers.take()
    assert buffers.take_min_free() == 2 and buffers.take_min_free() == 0
    buffers.close()


def test_a_new_buffer_is_as_large_as_batches_were() -> None:
    buffers = BufferPool()
    buffer = buffers.take()
    buffer.allocate(100 * ALIGN)
    buffers.free(buffer.number)
    buffers.take()
    assert buffers.take().size >= 100 * ALIGN
    assert buffers.bytes >= 200 * ALIGN
    buffers.close()


def test_a_buffer_that_is_given_back_leaves_no_descriptor_and_no_mapping() -> None:
    gc.collect()
    before, mapped = descriptors(), mapped_bytes()
    buffers = BufferPool()
    taken = [buffers.take() for _ in range(3)]
    assert descriptors() > before and mapped_bytes() > mapped
    for buffer in taken:
        buffer.hand_over()
        buffers.free(buffer.number, reuse=False)
    assert buffers.bytes == 0
    del taken, buffer
    assert (descriptors(), mapped_bytes()) == (before, mapped)


def test_a_batch_that_dies_after_all_buffers_were_closed_is_no_error() -> None:
    buffers = BufferPool(private=True)
    buffer = buffers.take()
    array = buffer.allocate(10)[1]
    array[:] = 5
    buffer.hand_out(buffers.free)
    buffers.close()
    assert (array == 5).all()
    del array


def test_what_the_builder_itself_keeps_of_a_batch_is_not_overwritten() -> None:
    """A collate_fn may mix each batch with the one before, which it keeps."""
    buffers = BufferPool()
    buffer = buffers.take()
    kept = buffer.allocate(10)[1]
    kept[:] = 1
    buffer.hand_over()
    buffers.free(buffer.number)  # the trainer does not need it any more
    other = buffers.take()
    assert other is not buffer
    other.allocate(10)[1][:] = 2
    assert (kept == 1).all()
    del kept
    assert buffers.take() is buffer
    buffers.close()


# --- in the process that uses the batches ---------------------------------------------------


def test_the_user_sees_what_the_builder_writes_also_after_growth() -> None:
    buffer = Buffer(0, 0)
    buffer.begin()
    buffer.allocate(10)[1][:] = 1
    mapped = MappedBuffer(os.dup(buffer.fd), buffer.size)
    before: list[Any] = []
    first = mapped.view(before.append)
    assert (first[:10] == 1).all()
    start, array = buffer.allocate(9 * ALIGN)
    array[:] = 2
    mapped.map(buffer.size)
    assert (first[:10] == 1).all()
    del first
    assert len(before) == 1
    assert (mapped.view(before.append)[start : start + 9 * ALIGN] == 2).all()
    mapped.close()
    buffer.close()


def test_the_user_of_a_buffer_learns_once_that_its_batch_died() -> None:
    freed: list[Any] = []
    mapped = MappedBuffer(-1, 1000)
    view = torch.from_numpy(mapped.view(freed.append))
    row = view.view(10, 100)[3]
    del view
    gc.collect()
    assert not freed and mapped.in_use
    del row
    assert len(freed) == 1 and not mapped.in_use


def test_pages_are_unlocked_while_they_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def noted(fd: int, size: int, **options: bool) -> Any:
        events.append("map")
        return map_memory(fd, size, **options)

    def lock(address: int, nbytes: int) -> Callable[[], None]:
        events.append("lock")
        return lambda: events.append("unlock")

    monkeypatch.setattr("shardio.storage.descriptors.map_memory", noted)
    mapped = MappedBuffer(-1, ALIGN, lock)
    mapped.map(3 * ALIGN)
    mapped.close()
    mapped.close()
    assert events == ["map", "lock", "unlock", "map", "lock", "unlock"]


def test_a_buffer_that_cannot_be_mapped_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(fd: int, size: int, **options: bool) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    buffers = BufferPool()
    fd = os.dup(buffers.take().fd)
    monkeypatch.setattr("shardio.storage.descriptors.map_memory", full)
    with pytest.raises(OSError, match="memory"):
        MappedBuffer(fd, ALIGN)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    buffers.close()


def test_page_locks_follow_a_buffer_that_grows_and_end_with_it() -> None:
    locked: list[tuple[int, int]] = []

    def lock(address: int, nbytes: int) -> Callable[[], None]:
        locked.append((address, nbytes))
        return lambda: locked.remove((address, nbytes))

    mapped = MappedBuffer(-1, ALIGN, lock)
    assert [nbytes for _, nbytes in locked] == [ALIGN]
    mapped.map(3 * ALIGN)
    assert [nbytes for _, nbytes in locked] == [3 * ALIGN]
    mapped.close()
    assert not locked


def test_a_buffer_that_was_in_use_when_a_child_was_forked_is_marked() -> None:
    buffers = BufferPool()
    used, idle = buffers.take(), buffers.take()
    in_use, unused = (MappedBuffer(os.dup(buffer.fd), buffer.size) for buffer in (used, idle))
    view = in_use.view(lambda _: None)
    unused.view(lambda _: None)  # dead at once
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert in_use.shared and not unused.shared
    del view
    for one in (in_use, unused, buffers):
        one.close()
