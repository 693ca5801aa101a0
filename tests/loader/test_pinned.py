"""Page-locked memory: staging buffers, what is locked, and what happens where nothing can be."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.device_batches import pictures
from support.gpu import gpu

from shardio.errors import StorageError
from shardio.loader import pinned
from shardio.loader.device import DeviceOptions, DeviceTarget, prefetch
from shardio.loader.pinned import LockedMemory, is_page_locked, locked_bytes, page_lock, page_unlock

# --- staging --------------------------------------------------------------------------------------


class Plain(pinned.StagingBuffers):
    """Staging in memory that is not page-locked; all but the locking runs without a GPU."""

    locked = 0

    def new_locked(self, size: int) -> torch.Tensor:
        self.locked += 1
        return torch.full((size,), 0xAA, dtype=torch.uint8)


def test_staged_tensors_are_copies_with_the_strides_of_a_copy() -> None:
    wide = torch.arange(64, dtype=torch.int64).view(8, 8)
    tensors = [
        *(pictures(3), torch.tensor([1, 2]), torch.tensor(2.5), torch.tensor([True])),
        *(wide.t(), wide[:, ::2], wide[1:2].expand(4, 8), torch.zeros(0), torch.eye(2).to_sparse()),
    ]
    staging = Plain("auto")
    sent, buffer = staging.stage(tensors)
    assert buffer is not None and staging.bytes == buffer.numel() == sum(
        -(-t.numel() * t.element_size() // 256) * 256 for t in tensors[:7]
    )
    staged = [copied for copied, _ in sent]
    assert all(one is t for one, t in zip(staged[7:], tensors[7:], strict=True))
    assert [directly for _, directly in sent] == [True] * 4 + [False] + [True] * 2 + [False] * 2
    before = [t.clone() for t in tensors[:7]]
    for tensor, copied, found in zip(tensors, before, staged, strict=False):
        assert found is not tensor.dtype == tensor.dtype and torch.equal(found, tensor)
        assert found.stride() == copied.stride() and found.data_ptr() % 8 == 0
        first = found.data_ptr() - buffer.data_ptr()
        assert 0 <= first <= buffer.numel() - found.numel() * found.element_size()
    for tensor in tensors[:4]:
        tensor.zero_()  # as the loader does with memory that was let go
    for found, copied in zip(staged, before, strict=False):
        assert torch.equal(found, copied)


def test_a_staging_buffer_is_used_again_when_it_is_given_back() -> None:
    staging = Plain("auto")
    _, first = staging.stage([pictures(4)])
    _, second = staging.stage([pictures(4)])
    assert first is not None and second is not None and first is not second
    staging.give_back(first)
    assert staging.stage([pictures(2)])[1] is first  # the last batch is smaller
    staging.give_back(first)
    staging.give_back(second)
    assert staging.locked == 2
    _, larger = staging.stage([pictures(90)])
    assert staging.locked == 3 and larger is not None
    assert staging.bytes == larger.numel()  # the small ones are let go


def test_staging_buffers_are_let_go_but_for_those_that_are_read() -> None:
    staging = Plain("auto")
    _, first = staging.stage([pictures(4)])
    _, second = staging.stage([pictures(4)])
    staging.give_back(first)
    staging.clear()
    assert second is not None and staging.bytes == second.numel()
    staging.give_back(second)
    staging.clear()
    assert staging.bytes == 0


def test_memory_that_cannot_be_locked_is_said_once_and_done_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned, "warned", False)

    class Full(pinned.StagingBuffers):
        tries = 0

        def new_locked(self, size: int) -> torch.Tensor:
            self.tries += 1
            raise RuntimeError("CUDA error: out of memory")

    staging, tensors = Full("auto"), [pictures(4)]
    as_they_lie = [(tensors[0], False)], None
    with pytest.warns(UserWarning, match=r"256 B cannot be page-locked .*ulimit -l.*pin=False"):
        assert staging.stage(tensors) == as_they_lie
    assert staging.stage(tensors) == as_they_lie and staging.tries == 1
    assert Full("auto").stage(tensors) == as_they_lie  # another loader: said already
    with pytest.raises(StorageError, match="pin=True, but 256 B cannot be page-locked"):
        Full(True).stage(tensors)
    assert Full(False).stage(tensors) == as_they_lie


# --- errors ---------------------------------------------------------------------------------------


def test_without_cuda_no_memory_is_locked_and_nothing_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    memory = torch.zeros(4096, dtype=torch.uint8)
    assert page_lock(memory.data_ptr(), 4096) is False
    page_unlock(memory.data_ptr())
    assert locked_bytes() == 0 and not is_page_locked(memory)
    target = DeviceTarget(DeviceOptions("cpu"))
    assert not target.locks_pages and target.staging_bytes == 0


def test_what_was_locked_is_known_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(3, 4096, dtype=torch.uint8)
    monkeypatch.setattr(pinned, "LOCKED", LockedMemory())
    pinned.LOCKED.add(memory[1].data_ptr(), 4096)
    assert locked_bytes() == 4096
    assert is_page_locked(memory[1]) and is_page_locked(memory[1, 100:])
    assert not is_page_locked(memory) and not is_page_locked(memory[0])
    assert not is_page_locked(memory.view(-1)[5000:9000])


def test_pieces_of_locked_memory_are_found_among_many() -> None:
    locked, draws = LockedMemory(), random.Random(0)
    firsts = list(range(0, 300, 3))
    draws.shuffle(firsts)
    for count, first in enumerate(firsts, 1):
        locked.add(first, 2)
        assert locked.bytes == 2 * count
    for _ in range(2):
        for first in range(-2, 302):
            for end in range(first + 1, first + 4):
                starts = [start for start in firsts if start <= first and end <= start + 2]
                assert locked.holds(first, end) == bool(starts), (first, end)
        gone, firsts = firsts[:50], firsts[50:]
        assert all(map(locked.discard, gone)) and not any(map(locked.discard, gone))


# --- with a GPU -----------------------------------------------------------------------------------


@gpu
def test_the_host_may_write_to_its_batch_once_it_was_let_go() -> None:
    """As the ring of ShardLoader does, with memory that page_lock has locked."""
    buffers = 4
    memory = torch.zeros(buffers, 1 << 22, dtype=torch.uint8)
    assert page_lock(memory.data_ptr(), memory.numel())
    try:
        assert is_page_locked(memory[1]) and memory.is_pinned()
        assert locked_bytes() == memory.numel()

        def source() -> Iterator[Any]:
            views: dict[int, weakref.ref[torch.Tensor]] = {}
            for i in range(40):
                buffer = next(s for s in range(buffers) if s not in views or views[s]() is None)
                view = torch.from_numpy(memory[buffer].numpy())
                view.fill_(i)
                views[buffer] = weakref.ref(view)
                yield view
                del view

        found = [int(batch.float().mean()) for batch in prefetch(source(), "cuda", ahead=1)]
        assert found == list(range(40))
    finally:
        torch.cuda.synchronize()
        page_unlock(memory.data_ptr())
    assert not memory.is_pinned() and locked_bytes() == 0


@gpu
def test_memory_that_cannot_be_locked_is_a_warning_and_leaves_no_error_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned, "warned", False)
    with pytest.warns(UserWarning, match="cannot be page-locked"):
        assert page_lock(0x1000, 4096) is False  # nothing is mapped there
    assert page_lock(0x1000, 4096) is False  # warned once
    assert float(torch.ones(3, device="cuda").sum()) == 3


@gpu
def test_staging_buffers_are_locked_once_and_used_again() -> None:
    loader = prefetch([(pictures(8, (64, 64), seed=i), 0) for i in range(30)], "cuda", ahead=1)
    for _ in loader:
        pass
    torch.cuda.synchronize()
    size = loader.target.staging_bytes
    one = 8 * 3 * 64 * 64
    assert one <= size <= 3 * one
    for _ in loader:
        pass
    assert loader.target.staging_bytes == size
