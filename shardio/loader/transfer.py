"""Transfers of batches to a device: by plain copies, or by a CUDA stream of its own.

How it works. A CUDA device's copy engine reads page-locked memory while the host goes on. A tensor
that lies in such memory is copied from where it lies; any other goes through a staging buffer,
page-locked once and used again. The host's batch is held until an event says that its bytes have
been read; the event is asked, not waited for.

Encoded crops (`decode="cuda"`) are decoded on the device. A decoder blocks its caller, so that such
batches go through a thread, one after the other: it issues all work, to the same stream. What the
consumer's stream has to say is asked in the consumer's own thread.

On "cpu" and on devices other than CUDA the same formula makes the same numbers, without a stream:
`.to(device)`, and the formula there; crops are decoded on the CPU.

Source: "CUDA semantics" of PyTorch (streams, record_stream, non_blocking).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ..dataset.encoded_crops import EncodedCrops
from .device_crops import Cropper
from .device_skips import DeviceSkips, Undecoded
from .job_thread import JobThread, ThreadJob
from .normalize import Images, leaves, walk
from .pinned import Pin, StagingBuffers

_cuda: Any = torch.cuda  # it has no types
Event = Any

# The host may be so many steps ahead of the device. Memory of a side stream cannot be used again
# before the step that read it has run: with no limit a loop of few kernels (CUDA graphs: one a
# step, and a thousand fit the queue) would fill the device with batches. Four hide any jitter.
_STEPS_AHEAD = 4


@dataclass(eq=False)
class DeviceBatch:
    """Hold a batch that is copied to the device; of `Transfer`, one that has arrived."""

    batch: Any  # on the device
    send_s: float = field(default=0.0, init=False)  # that the trainer spent to send it

    def read(self) -> bool:
        """Return True if the host's batch is no longer needed. Does not wait."""
        return True

    def wait(self) -> None:
        """Wait until the host's batch is no longer needed."""

    def wait_issued(self) -> None:
        """Wait until all work on the batch has been issued to the device."""

    def take(self) -> float:
        """Let the consumer have the batch; return the seconds that the device was waited for."""
        return 0.0


class Transfer:
    """Copy batches to any device, by plain copies that are done when `send` returns."""

    def __init__(self, device: torch.device, images: Images, cropper: Cropper) -> None:
        self.device = device
        self._images = images
        self._cropper = cropper

    def send(self, batch: Any, skips: DeviceSkips | None = None) -> DeviceBatch:
        """Begin to copy a batch of the host to the device.

        skips: fills rows that cannot be decoded; None: they raise
        """
        with _no_inference(), torch.no_grad():
            parts = leaves(batch)
            there, _ = self._finished(batch, parts, lambda part: part.to(self.device), skips)
            return DeviceBatch(there)

    def _finished(
        self,
        batch: Any,
        parts: Sequence[torch.Tensor | EncodedCrops],
        copy: Callable[[torch.Tensor], torch.Tensor],
        skips: DeviceSkips | None,
        copied: Callable[[], object] = lambda: None,
    ) -> tuple[Any, list[torch.Tensor]]:
        """Return a batch on the device, its parts copied and cropped, then cast and normalised.

        Return its tensors, too.
        """
        cropped: list[torch.Tensor] = []
        undecoded: list[Undecoded] | None = None if skips is None else []
        size = 0

        def crop(crops: EncodedCrops) -> torch.Tensor:
            nonlocal size
            size = len(crops)
            pixels = self._cropper.make(crops, undecoded).to(self.device)
            if self._cropper.finishes:
                cropped.append(pixels)
            return pixels

        there = [crop(one) if isinstance(one, EncodedCrops) else copy(one) for one in parts]
        copied()
        there = self._images.finish_all(there, cropped)
        arrived = _rebuilt(batch, there)
        if skips is not None and undecoded:
            arrived = skips.fill(arrived, undecoded, size)
            there = [part for part in leaves(arrived) if isinstance(part, torch.Tensor)]
        return arrived, there

    def behind(self) -> bool:
        """Return True if the device has not begun with the work since the last hand-out, so that it
        had other work all the while; False: it has, or it is not known."""
        return False

    def mark(self) -> Any:
        """Mark where the consumer's work ends so far, for `idle_s`."""
        return None

    def idle_s(self, mark: Any) -> float | None:
        """Return the seconds since the device ended the work before a mark; 0: it has not; None: it
        is not known."""
        return None


class StreamTransfer(Transfer):
    """Copy batches to a CUDA device by a stream of its own, from page-locked memory."""

    def __init__(self, device: torch.device, images: Images, cropper: Cropper, pin: Pin) -> None:
        super().__init__(device, images, cropper)
        # The cast is short, and a step waits for it: it is not to queue behind that step's kernels.
        self.stream = _cuda.Stream(device, priority=-1)
        self.clock = _cuda.Stream(device, priority=-2)  # has no work: an event is there at once
        self.staging = StagingBuffers(pin)
        self.events, self.clocks = EventPool(), EventPool(enable_timing=True)
        self._thread = JobThread("shardio-decode")
        self.steps: deque[Event] = deque()  # where the consumer stood at each hand-out

    def send(self, batch: Any, skips: DeviceSkips | None = None) -> DeviceBatch:
        """Begin to copy a batch of the host, cast and normalise it, by the side stream."""
        # What is on the device already may still be in the making, on the consumer's stream.
        parts, ready = leaves(batch), None
        if any([isinstance(one, torch.Tensor) and one.device == self.device for one in parts]):
            ready = _cuda.Event()
            ready.record(_cuda.current_stream(self.device))
        if any([isinstance(one, EncodedCrops) for one in parts]):
            return LaterBatch(self._thread.submit(self._issue, batch, parts, ready, skips))
        return self._issue(batch, parts, ready)

    def _issue(
        self,
        batch: Any,
        parts: Sequence[torch.Tensor | EncodedCrops],
        ready: Event | None,
        skips: DeviceSkips | None = None,
    ) -> _StreamBatch:
        """Issue the work on a batch to the side stream. Encoded crops block for their decoder."""
        tensors = [one for one in parts if isinstance(one, torch.Tensor)]
        read, done = self.events.take(), self.events.take()
        # The context of a stream sets the device, too.
        with _no_inference(), torch.no_grad(), _cuda.stream(self.stream):
            if ready is not None:
                self.stream.wait_event(ready)
                for tensor in tensors:
                    if tensor.device == self.device:
                        record(tensor, self.stream)
            staged, buffer = self.staging.stage(tensors)
            copies = iter(staged)
            try:
                there, tensors = self._finished(
                    batch,
                    parts,
                    lambda _: self._copy(*next(copies)),
                    skips,
                    lambda: read.record(self.stream),
                )
                done.record(self.stream)
            except BaseException:  # out of memory: copies that were begun still read the host's
                self.stream.synchronize()
                self.staging.give_back(buffer)
                raise
        return _StreamBatch(there, self, batch, buffer, read, done, tensors)

    def _copy(self, tensor: torch.Tensor, directly: bool) -> torch.Tensor:
        # A copy from pageable memory waits: where the device reads the host's page tables, one that
        # does not may still read it after it returned; elsewhere it is staged by CUDA first anyway.
        return tensor.to(self.device, non_blocking=directly)

    def wait(self) -> None:
        """Wait until no copy reads memory of the host."""
        self._thread.wait()
        with suppress(RuntimeError):  # what the user's kernels did to the device: torch says it
            self.stream.synchronize()

    def step(self, consumer: Any) -> float:
        """Mark where the consumer stands, and wait while it is too far behind: seconds waited."""
        reached = self.events.take()
        reached.record(consumer)
        self.steps.append(reached)
        waited = 0.0
        while len(self.steps) > _STEPS_AHEAD:
            oldest = self.steps.popleft()
            if not oldest.query():
                began = time.perf_counter()
                oldest.synchronize()
                waited += time.perf_counter() - began
            self.events.give_back(oldest)
        return waited

    def behind(self) -> bool:
        """Return True if the device has not begun with the work since the last hand-out, so that it
        had other work all the while."""
        return bool(self.steps) and not self.steps[-1].query()

    def mark(self) -> Event:
        """Mark where the consumer's work ends so far, for `idle_s`."""
        ended = self.clocks.take()
        ended.record(_cuda.current_stream(self.device.index))
        return ended

    def idle_s(self, mark: Event) -> float:
        """Return the seconds since the device ended the work before a mark; 0: it has not."""
        seconds = 0.0
        if mark.query():
            now = self.clocks.take()
            now.record(self.clock)
            now.synchronize()
            seconds = mark.elapsed_time(now) / 1e3
            self.clocks.give_back(now)
        self.clocks.give_back(mark)
        return seconds


class EventPool:
    """Lend events of one device, which are recorded again and again. For any thread.

    Only who took an event gives it back, once, when nobody will ask or wait for what was recorded.
    A stream that was told to wait for it needs it no more: it waits for what was recorded then.
    """

    def __init__(self, enable_timing: bool = False) -> None:
        self._timing = enable_timing
        self.free: deque[Event] = deque()

    def take(self) -> Event:
        """Return an event that nobody else has."""
        try:
            return self.free.pop()
        except IndexError:
            # blocking: who waits for it sleeps, instead of keeping a core busy that loads data.
            return _cuda.Event(enable_timing=self._timing, blocking=True)

    def give_back(self, event: Event) -> None:
        """Let an event be recorded for another purpose."""
        self.free.append(event)


@dataclass(eq=False)
class _StreamBatch(DeviceBatch):
    """Hold a batch that a side stream copies."""

    transfer: StreamTransfer
    host: Any  # the batch that is copied, until it has been read
    buffer: torch.Tensor | None  # its staging buffer
    bytes_read: Event | None  # the host's batch is no longer needed; None: nor is this
    done: Event | None  # the batch is there, cast and normalised; None: it was taken
    tensors: list[torch.Tensor]  # of the batch, until it is taken

    def read(self) -> bool:
        """Return True if the host's batch is no longer needed. Does not wait."""
        if self.bytes_read is not None and not self.bytes_read.query():
            return False
        self._let_go()
        return True

    def wait(self) -> None:
        """Wait until the host's batch is no longer needed."""
        if self.bytes_read is not None:
            self.bytes_read.synchronize()
        self._let_go()

    def _let_go(self) -> None:
        buffer, read = self.buffer, self.bytes_read
        self.host = self.buffer = self.bytes_read = None
        self.transfer.staging.give_back(buffer)
        if read is not None:
            self.transfer.events.give_back(read)

    def take(self) -> float:
        """Let the consumer's stream have the batch; return the seconds that were waited."""
        consumer = _cuda.current_stream(self.transfer.device.index)
        if self.done is not None:  # else an interrupt came when it had been taken
            consumer.wait_event(self.done)
        # The allocator knows only the stream that a tensor was made on. Without this, memory that
        # the user lets go would be the next batch's while the consumer's kernels still read it.
        for tensor in self.tensors:
            record(tensor, consumer)
        waited = self.transfer.step(consumer)
        done, self.done, self.tensors = self.done, None, []
        if done is not None:
            self.transfer.events.give_back(done)
        return waited


class LaterBatch(DeviceBatch):
    """Hold a batch whose work a thread issues."""

    def __init__(self, job: ThreadJob[DeviceBatch]) -> None:
        super().__init__(None)
        self._job: ThreadJob[DeviceBatch] | None = job
        self._issued: DeviceBatch | None = None

    def read(self) -> bool:
        """Return True if the host's batch is no longer needed. Does not wait."""
        if self._issued is None and self._job is not None:
            if not self._job.done():
                return False
            self._issued = self._job.end()  # None if it failed: `take` says so
        return self._issued is None or self._issued.read()

    def wait(self) -> None:
        """Wait until the host's batch is no longer needed. One that is not begun is dropped."""
        if self._issued is None and self._job is not None:
            self._issued = self._job.end()
        if self._issued is not None:
            self._issued.wait()

    def wait_issued(self) -> None:
        """Wait until the thread has issued the work. Raises what that raised."""
        if self._issued is None and self._job is not None:
            began = time.perf_counter()
            try:
                self._issued = self._job.result()
            except Exception:
                self._job = None  # what was raised holds this frame
                raise
            self.send_s += time.perf_counter() - began

    def take(self) -> float:
        """Let the consumer's stream have the batch; return the seconds that were waited."""
        self.wait_issued()
        assert self._issued is not None
        waited = self._issued.take()
        self.batch, self._issued.batch = self._issued.batch, None
        return waited


def _no_inference() -> Any:
    """Return a context without inference mode: batches outlive the mode they were asked for in, and
    a tensor of it cannot be written to, or trained with, after it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _rebuilt(batch: Any, parts: Iterable[torch.Tensor]) -> Any:
    """Return a batch with these parts in place of its own, in the order of `leaves`."""
    new = iter(parts)
    return walk(batch, lambda _: next(new), lambda _: next(new))


def record(tensor: torch.Tensor, stream: Any) -> None:
    """Tell the allocator that a stream reads a tensor's memory."""
    for part in strided_parts(tensor):
        part.record_stream(stream)


def strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors that one of any layout consists of: it, or indices and values."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []
