"""Page-locked memory of the host: what a device's copy engine reads while the host goes on.

How it works. `page_lock` locks memory that is there already, such as that of batches which is used
again and again. `StagingBuffers` holds buffers that are locked once, for batches that lie
elsewhere. Where nothing can be locked, copies are slower, and one warning of a process says so.

Source: of the CUDA runtime, "API synchronization behavior" and cudaHostRegister.
"""

from __future__ import annotations

import sys
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, Literal

import torch

from ..errors import StorageError
from ..units import show_size

Pin = Literal["auto"] | bool

_cuda: Any = torch.cuda  # it has no types

_ALIGNMENT = 256  # of each tensor in a staging buffer, as CUDA's own allocations have it

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of this process

# Bytes below which a tensor is staged without asking CUDA whether it need be: to ask takes 16 us on
# an H100's host, and 62 beside a thread that pins, to copy a few labels less than either.
_SMALL = 16 << 10


class StagingBuffers:
    """Lend page-locked buffers to batches that do not lie in such memory. Each is locked once."""

    def __init__(self, pin: Pin) -> None:
        self.bytes = 0
        self._insists = pin is True
        self._asks = self._stages = pin is not False
        self._free: list[torch.Tensor] = []  # those that no copy reads

    def stage(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[tuple[torch.Tensor, bool]], torch.Tensor | None]:
        """Copy the tensors that need it to a buffer.

        Return what is to be sent of each, whether its copy to the device need not wait, and the
        buffer.
        """
        if not self._asks:
            return [(tensor, False) for tensor in tensors], None
        sent = [(tensor, self._goes_directly(tensor)) for tensor in tensors]
        needy = {
            id(tensor): tensor
            for tensor, directly in sent
            if not directly
            and self._stages
            and tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and tensor.numel()
        }
        if not needy:
            return sent, None
        sizes = [tensor.numel() * tensor.element_size() for tensor in needy.values()]
        places = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        buffer = self._buffer(places[-1])
        if buffer is None:  # what is small was not asked
            return [(tensor, copies_directly(tensor)) for tensor in tensors], None
        staged = {}
        for place, size, (key, tensor) in zip(places, sizes, needy.items(), strict=False):
            # The strides that a copy has.
            like = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
            view = buffer[place : place + size].view(tensor.dtype)
            view = view.as_strided(tensor.shape, like.stride(), view.storage_offset())
            staged[key] = view.copy_(tensor), _lies_whole(view)
        return [staged.get(id(tensor), (tensor, directly)) for tensor, directly in sent], buffer

    def _goes_directly(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is to be sent as it lies: the engine can read it there."""
        if self._stages and tensor.numel() * tensor.element_size() < _SMALL:
            return False
        return copies_directly(tensor)

    def clear(self) -> None:
        """Let go of the buffers that no copy reads, to torch, which keeps them for other uses."""
        self.bytes -= sum(buffer.numel() for buffer in self._free)
        self._free.clear()

    def give_back(self, buffer: torch.Tensor | None) -> None:
        """Take back a buffer that no copy reads any more."""
        if buffer is not None:
            self._free.append(buffer)

    def _buffer(self, size: int) -> torch.Tensor | None:
        """Return a buffer of at least so many bytes; None where there is none to be had."""
        while self._free:
            buffer = self._free.pop()
            if buffer.numel() >= size:
                return buffer
            self.bytes -= buffer.numel()  # batches have grown: it is of no use any more
        try:
            buffer = self.new_locked(size)
        except RuntimeError as error:
            if self._insists:
                raise StorageError(
                    f"pin=True, but {show_size(size)} cannot be page-locked: {error}\n{_LIMITS}, "
                    'or give pin="auto"'
                ) from error
            warn_of_locking(size, str(error))
            self._stages = False
            return None
        self.bytes += size
        return buffer

    def new_locked(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def copies_directly(tensor: torch.Tensor) -> bool:
    """Return True if the copy engine can read a tensor as it lies: page-locked, without gaps."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return _lies_whole(tensor) and is_page_locked(tensor)


def _lies_whole(tensor: torch.Tensor) -> bool:
    """Return True if a strided tensor has no gaps, in an order that is copied as it is."""
    return tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )


class LockedMemory:
    """Know memory that is page-locked, by address. For any thread."""

    def __init__(self) -> None:
        # No lock: the collector, which comes at any time, may close a loader, which unlocks.
        self._ends: dict[int, int] = {}  # by first address
        self._change = object()  # another one after each
        self._sorted: tuple[object, list[tuple[int, int]]] = (None, [])  # and of which change

    @property
    def bytes(self) -> int:
        """Return the bytes of all of it."""
        return sum([end - first for first, end in self._ends.copy().items()])

    def add(self, address: int, nbytes: int) -> None:
        """Note memory that was locked."""
        self._ends[address] = address + nbytes
        self._change = object()

    def discard(self, address: int) -> bool:
        """Forget the memory at an address; return False if there was none."""
        there = self._ends.pop(address, None) is not None
        self._change = object()
        return there

    def holds(self, first: int, end: int) -> bool:
        """Return True if all bytes from one address to another lie in one piece of it."""
        change, (of, ranges) = self._change, self._sorted
        if of is not change:
            ranges = sorted(self._ends.copy().items())
            self._sorted = change, ranges
        at = bisect_right(ranges, (first, sys.maxsize))
        return at > 0 and end <= ranges[at - 1][1]


LOCKED = LockedMemory()  # what page_lock has locked in this process
_LIMITS = (
    "Free memory limits it, and so may a container (ulimit -l, docker run --ulimit memlock=-1): "
    "make batches smaller, or prefetch fewer"
)
warned = False


def page_lock(address: int, nbytes: int, device: torch.device | None = None) -> bool:
    """Page-lock memory that is there already, so that copies to the GPU read it as it lies.

    It takes about as long as copying the memory once: for memory that is used again and again.
    Returns False where that is not possible, with one warning a process; without CUDA, none. Call
    `page_unlock` before the memory is unmapped, when no copy reads it any more.
    """
    if not _cuda.is_available() or (device is not None and device.type != "cuda"):
        return False
    # Within `device`: a call of the runtime makes a context, 300 MB or more, on the current one.
    with _cuda.device(device):
        error = _cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE)
        if int(error) == 0:
            LOCKED.add(address, nbytes)
            return True
        _forget_error()
    warn_of_locking(nbytes, f"cudaHostRegister says {int(error)}")
    return False


def page_unlock(address: int, device: torch.device | None = None) -> None:
    """Undo `page_lock`. Does nothing where that was not done, or did not succeed."""
    if not LOCKED.discard(address):
        return
    with suppress(RuntimeError), _cuda.device(device):  # CUDA may have ended before us
        if int(_cuda.cudart().cudaHostUnregister(address)):
            _forget_error()


def locked_bytes() -> int:
    """Return the bytes that `page_lock` holds locked in this process."""
    return LOCKED.bytes


def is_page_locked(tensor: torch.Tensor) -> bool:
    """Return True if a dense CPU tensor lies in page-locked memory: its copy need not wait.

    torch's is_pinned() asks CUDA, which knows registered memory as well as its own; but it asks
    for the first byte of the tensor's storage, and that may lie before the range that was locked,
    or the tensor beyond its end. So what page_lock locked is looked up by the tensor's own bytes.
    """
    first = tensor.data_ptr()
    end = first + tensor.numel() * tensor.element_size()
    return LOCKED.holds(first, end) or tensor.is_pinned()


def _forget_error() -> None:
    """Take away the error that CUDA keeps of a failed call.

    Else the next kernel of whoever comes next would fail with it. torch's cudart has no
    cudaGetLastError; a kernel's launch asks for it. What the device itself suffered stays.
    """
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


def warn_of_locking(size: int, why: str) -> None:
    global warned
    if not warned:
        warned = True
        warnings.warn(
            f"{show_size(size)} cannot be page-locked ({why}): copies to the GPU will be slower, "
            f"and will not overlap with computing. {_LIMITS}; pin=False accepts it",
            stacklevel=2,
        )
