"""Memory of batches that is used again and again: anonymous shared memory, in buffers of one batch.

How it works. A buffer is a memfd: memory with a descriptor but no name (`storage.descriptors`), so
that nothing is left behind. Each batch builder owns its buffers: it takes a free one, places arrays
in it one after the other, and lets it grow where that takes more. The trainer maps each buffer
once, by a thread where its pages are locked, and gives batches out as views of it. When the last
view has died the buffer is free again. As nothing is ever taken from under a view, a batch that is
kept is never overwritten: a builder that finds no buffer free makes another. A child that was
forked while a batch was in use may keep that batch, too, so its buffer is never used again.

Buffers of batches that are made where they are used are private, and have no descriptor.

Why again and again: pages of new memory must be zeroed and mapped, in each process, 4 KiB at a
time. For 256 images of 224 x 224 (38 MB) that is 10 to 20 ms; to write them takes 4.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from typing import Any

import numpy as np

from .. import native
from ..storage import descriptors
from .job_thread import JobThread, ThreadJob

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Page-locks memory at an address, of so many bytes, and gives what undoes that.
PageLock = Callable[[int, int], Callable[[], object]]

ALIGN = 4096  # arrays begin on pages: what a device copies from, and no two threads write one line


class Buffer:
    """Hold the memory of one batch, in the process that makes it.

    `fd` is its descriptor; -1: the memory is private. `size` is its bytes, `used` how many of them
    the batch takes, `shown_bytes` how many the trainer knows of. `grown` is called when the buffer
    is made larger than the least size, or grows. Arrays in it stay valid when it grows: all
    mappings are of the same memory. Private memory is replaced then, and the batch has parts in
    both.
    """

    def __init__(
        self,
        number: int,
        size: int,
        *,
        private: bool = False,
        grown: Callable[[Buffer], object] = lambda buffer: None,
    ) -> None:
        self.number = number
        self.fd = -1 if private else descriptors.anonymous_memory()
        self.size = self.used = self.shown_bytes = 0
        self._grown = grown
        self._lock = threading.Lock()
        self._views: list[Bytes] = []  # since `begin`; the last one is of all bytes
        self._starts: list[int] = []  # the address of each
        self._refs: list[weakref.ref[Bytes]] = []  # and those of the batch before
        self._grow(max(size, ALIGN))

    def begin(self) -> None:
        """Begin a new batch: arrays that the last one placed are forgotten."""
        self.used = 0
        self._views = [np.frombuffer(self._map, np.uint8)]
        self._starts = [self._address]

    def allocate(self, nbytes: int) -> tuple[int, Bytes]:
        """Return an offset in the buffer, and (nbytes,) uint8 there: writable, not cleared."""
        with self._lock:
            start = -(-self.used // ALIGN) * ALIGN
            if start + nbytes > self.size:
                # By some more than needed: columns come one by one, and each growth maps anew.
                self._grow(max(start + nbytes, self.size * 17 // 16))
            self.used = start + nbytes
            return start, self._views[-1][start : start + nbytes]

    def offset(self, address: int, nbytes: int) -> int | None:
        """Return where memory of this batch lies in the buffer; None: it lies elsewhere."""
        for start, view in zip(self._starts, self._views, strict=True):
            if start <= address and address + nbytes <= start + len(view):
                return int(address - start)
        return None

    @property
    def in_use(self) -> bool:
        """Return True if an array of the batch before still lives: a collate_fn may keep one."""
        return any(ref() is not None for ref in self._refs)

    def hand_over(self) -> None:
        """Let the batch be used in another process."""
        self._refs = [weakref.ref(view) for view in self._views]
        self._views = []

    def hand_out(self, freed: Callable[[int], None]) -> None:
        """Let the batch be used in this process. `freed` is called with the buffer's number when
        the last array in it is gone: once, in any thread."""
        once = iter([self.number])  # gives it to one thread alone

        def died(_: Any) -> None:
            if all(ref() is None for ref in refs):
                for number in once:
                    freed(number)

        refs: list[weakref.ref[Bytes]] = []
        views, self._views = self._views, []
        refs += [weakref.ref(view, died) for view in views]
        self._refs = refs  # held here: refs and died, held by each other alone, would be collected

    def close(self) -> None:
        """Close the descriptor. Arrays in the buffer stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _grow(self, size: int) -> None:
        size = -(-size // ALIGN) * ALIGN
        if self.fd >= 0:
            os.ftruncate(self.fd, size)
        self._map = descriptors.map_memory(self.fd, size)
        self._views.append(np.frombuffer(self._map, np.uint8))
        self._address = int(self._views[-1].ctypes.data)  # asked once: it takes 3 us
        self._starts.append(self._address)
        self.size = size
        if size > ALIGN:
            self._grown(self)


class BufferPool:
    """Lend buffers to one batch builder. `free` is for any thread.

    A new one is at once as large as the largest batch so far. grown: as of each Buffer.
    """

    def __init__(
        self, *, private: bool = False, grown: Callable[[Buffer], object] = lambda buffer: None
    ) -> None:
        self._private, self._grown = private, grown
        self._all: dict[int, Buffer] = {}
        self._free: list[Buffer] = []
        self._numbers = count()
        self._largest = 0  # bytes that a batch took
        self.peak = 0  # buffers that there have been at a time
        self._min_free: int | None = None

    @property
    def bytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(buffer.size for buffer in list(self._all.values()))

    def take(self) -> Buffer:
        """Return a free buffer, or a new one, for a new batch."""
        for i in reversed(range(len(self._free))):  # the last one is still in the caches
            buffer = self._free[i]
            if not buffer.in_use:
                del self._free[i]  # others append meanwhile, which moves nothing
                break
        else:
            largest = max([self._largest, *[one.used for one in self._all.values()]])
            buffer = Buffer(next(self._numbers), largest, private=self._private, grown=self._grown)
            self._all[buffer.number] = buffer
            self.peak = max(self.peak, len(self._all))
        left = len(self._free)
        self._min_free = left if self._min_free is None else min(self._min_free, left)
        buffer.begin()
        return buffer

    def take_min_free(self) -> int:
        """Return the buffers that were free whenever one was taken, since this was asked last."""
        least, self._min_free = self._min_free, None
        return least or 0

    def free(self, number: int, *, reuse: bool = True) -> None:
        """Take back a buffer that nobody uses any more; reuse=False: nobody is to use it again."""
        buffer = self._all.get(number)
        if buffer is None:  # all were closed, before the last batch died
            return
        self._largest = max(self._largest, buffer.used)
        if reuse:
            self._free.append(buffer)
        else:
            del self._all[number]
            buffer.close()

    def close(self) -> None:
        """Close all buffers."""
        for buffer in list(self._all.values()):
            buffer.close()
        self._all.clear()
        self._free.clear()


class MappedBuffer:
    """Map a buffer where its batches are used; with fd -1 hold memory of this process alone.

    With a thread, that maps it, and locks its pages; `view` waits for it, and raises its errors.
    """

    def __init__(
        self, fd: int, size: int, lock: PageLock | None = None, thread: JobThread | None = None
    ) -> None:
        self._fd = fd
        self.shared = False  # a child that was forked may read it for ever
        self._live: weakref.ref[Bytes] | None = None
        self._lock = lock
        self._locked = ExitStack()  # unlocks the pages when it is closed
        self._closed = False
        self._thread = thread
        self._jobs: list[ThreadJob[None]] = []  # of the thread, that nobody has waited for
        try:
            self.map(size)
        except BaseException:  # no memory: nobody else knows the descriptor
            self.close()
            raise

    def map(self, size: int) -> None:
        """Follow a buffer that has grown. Views of before stay what they were."""
        self.size = size
        thread = self._thread
        if thread is None:
            self._follow(size)
            return
        try:
            self._jobs.append(thread.submit(self._follow, size, aside=True))
        except RuntimeError:  # the interpreter ends, and no thread begins anything any more
            self._follow(size)

    def _follow(self, size: int, *, aside: bool = False) -> None:
        self._locked.close()  # while they are mapped
        if self._closed:
            return
        self._map = descriptors.map_memory(self._fd, size, aside=aside)
        if self._lock is not None:
            address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
            self._locked.callback(self._lock(address, size))
            if self._closed:  # meanwhile, by the collector, which waits for no thread
                self._locked.close()

    def view(self, freed: Callable[[Any], None]) -> Bytes:
        """Return (size,) uint8. `freed` is called, in any thread, when the last view is gone."""
        while self._jobs:
            self._jobs[0].result()
            del self._jobs[0]
        view = np.frombuffer(self._map, np.uint8)
        self._live = weakref.ref(view, freed)
        if self._fd >= 0:  # private memory is copied for a child when either writes to it
            _HANDED_OUT.add(self)
        return view

    @property
    def in_use(self) -> bool:
        """Return True while a view lives."""
        return self._live is not None and self._live() is not None

    def close(self) -> None:
        """Give the descriptor back; the memory itself goes with its last view."""
        self._closed = True
        for job in reversed(self._jobs):  # the last first: what has not begun is not to begin
            job.end()
        self._thread = None  # which ends when nobody has it
        self._locked.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class PrivateBuffers:
    """Copy batches to memory of the trainer alone, which is used again.

    Its pages are not locked. Where this process forks, the system may give it other pages at its
    next write, and a device would go on reading the first ones.
    """

    def __init__(self, max_free: int) -> None:
        self._all: set[MappedBuffer] = set()
        self._free: deque[MappedBuffer] = deque()
        self._max_free = max_free  # pieces that are free, and kept for what comes

    @property
    def bytes(self) -> int:
        """Return the bytes of all its memory."""
        return sum(own.size for own in self._all)

    def copy(self, data: Bytes) -> Bytes:
        """Return a copy, whose memory is used again when its last view is gone."""
        size = len(data)
        while self._free:
            own = self._free.popleft()
            if own.size >= size and len(self._free) < self._max_free:
                break
            self._all.discard(own)
        else:
            own = MappedBuffer(-1, max(1, size))
            self._all.add(own)
        free = self._free
        view = own.view(lambda _: free.append(own))
        # By this thread alone: 4 ms of CPU for 38 MB, by the core 2.5. torch's copy_ takes 9, as
        # its threads spin where loader processes have the cores (benchmarks/transport.py).
        if native.core is not None:
            native.core.copy(view, data)
        else:
            np.copyto(view[:size], data)
        return view

    def close(self) -> None:
        """Let go of it; that of batches in use goes with their last views."""
        self._all.clear()
        self._free.clear()


# Buffers that this process uses, or used, batches of. A child that is forked goes on seeing what is
# in them, so that those in use then must not be written to again.
_HANDED_OUT: weakref.WeakSet[MappedBuffer] = weakref.WeakSet()


def _note_shared() -> None:
    for buffer in list(_HANDED_OUT):
        buffer.shared |= buffer.in_use


os.register_at_fork(before=_note_shared)
