"""Transfers of batches to a device: by plain copies, or by a CUDA stream of its own.

How it works. A CUDA device's copy engine reads page-locked memory while the host goes on. A tensor
that lies in such memory is copied from where it lies; any other goes through a staging buffer,
page-locked once and used again. The host's batch is held until an event says that its bytes have
been read; the event is asked, not waited for.

On "cpu" and on devices other than CUDA the same formula makes the same numbers, without a stream:
`.to(device)`, and the formula there.

Source: "CUDA semantics" of PyTorch (streams, record_stream, non_blocking).
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from .normalize import Images, walk
from .pinned import Pin, StagingBuffers, copies_directly

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

    def take(self) -> float:
        """Let the consumer have the batch; return the seconds that the device was waited for."""
        return 0.0


class Transfer:
    """Copy batches to any device, by plain copies that are done when `send` returns."""

    def __init__(self, device: torch.device, images: Images) -> None:
        self.device = device
        self._images = images

    def send(self, batch: Any) -> DeviceBatch:
        """Begin to copy a batch of the host to the device."""
        # Batches outlive the mode they were asked for in: a tensor of inference mode cannot be
        # written to, or trained with, after it.
        with torch.inference_mode(False), torch.no_grad():
            there = self._images.finish(walk(batch, lambda tensor: tensor.to(self.device)))
        return DeviceBatch(there)

    def mark(self) -> Any:
        """Mark where the consumer's work ends so far, for `idle_s`."""
        return None

    def idle_s(self, mark: Any) -> float | None:
        """Return the seconds since the device ended the work before a mark; 0: it has not; None: it
        is not known."""
        return None


class StreamTransfer(Transfer):
    """Copy batches to a CUDA device by a stream of its own, from page-locked memory."""

    def __init__(self, device: torch.device, images: Images, pin: Pin) -> None:
        super().__init__(device, images)
        # The cast is short, and a step waits for it: it is not to queue behind that step's kernels.
        self._stream = _cuda.Stream(device, priority=-1)
        self._pin = pin
        self.staging = StagingBuffers(pin)
        self._steps: deque[Event] = deque()  # where the consumer stood at each hand-out

    def send(self, batch: Any) -> DeviceBatch:
        """Begin to copy a batch of the host, cast and normalise it, by the side stream."""
        tensors = _tensors(batch)
        read, done = _event(), _event()
        consumer = _cuda.current_stream(self.device)
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            _cuda.device(self.device),
            _cuda.stream(self._stream),
        ):
            # What is on the device already may still be in the making, on the consumer's stream.
            there_already = [tensor for tensor in tensors if tensor.device == self.device]
            if there_already:
                self._stream.wait_stream(consumer)
            for tensor in there_already:
                tensor.record_stream(self._stream)
            staged, buffer = self.staging.stage(tensors)
            try:
                there = walk(batch, lambda tensor: self._copy(staged.get(id(tensor), tensor)))
                read.record(self._stream)
                there = self._images.finish(there)
                done.record(self._stream)
            except BaseException:  # out of memory: copies that were begun still read the host's
                self._stream.synchronize()
                self.staging.give_back(buffer)
                raise
        return _StreamBatch(there, self, batch, buffer, read, done)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        # A copy from pageable memory waits: where the device reads the host's page tables, one that
        # does not may still read it after it returned; elsewhere it is staged by CUDA first anyway.
        straight = self._pin is not False and copies_directly(tensor)
        return tensor.to(self.device, non_blocking=straight)

    def wait(self) -> None:
        """Wait until no copy reads memory of the host."""
        with suppress(RuntimeError):  # what the user's kernels did to the device: torch says it
            self._stream.synchronize()

    def step(self, consumer: Any) -> float:
        """Mark where the consumer stands, and wait while it is too far behind: seconds waited."""
        reached = _event()
        reached.record(consumer)
        self._steps.append(reached)
        waited = 0.0
        while len(self._steps) > _STEPS_AHEAD:
            oldest = self._steps.popleft()
            if not oldest.query():
                began = time.perf_counter()
                oldest.synchronize()
                waited += time.perf_counter() - began
        return waited

    def mark(self) -> Event:
        """Mark where the consumer's work ends so far, for `idle_s`."""
        ended = _event(enable_timing=True)
        ended.record(_cuda.current_stream(self.device))
        return ended

    def idle_s(self, mark: Event) -> float:
        """Return the seconds since the device ended the work before a mark; 0: it has not."""
        if not mark.query():
            return 0.0
        now = _cuda.Event(enable_timing=True)  # on a stream without work: there in microseconds
        now.record(_cuda.current_stream(self.device))
        now.synchronize()
        seconds: float = mark.elapsed_time(now) / 1e3
        return seconds


@dataclass(eq=False)
class _StreamBatch(DeviceBatch):
    """Hold a batch that a side stream copies."""

    transfer: StreamTransfer
    host: Any  # the batch that is copied, until it has been read
    buffer: torch.Tensor | None  # its staging buffer
    bytes_read: Event  # the host's batch is no longer needed
    done: Event  # the batch is there, cast and normalised

    def read(self) -> bool:
        """Return True if the host's batch is no longer needed. Does not wait."""
        read = bool(self.bytes_read.query())
        if read:
            self._let_go()
        return read

    def wait(self) -> None:
        """Wait until the host's batch is no longer needed."""
        self.bytes_read.synchronize()
        self._let_go()

    def _let_go(self) -> None:
        self.transfer.staging.give_back(self.buffer)
        self.host = self.buffer = None

    def take(self) -> float:
        """Let the consumer's stream have the batch; return the seconds that were waited."""
        consumer = _cuda.current_stream(self.transfer.device)
        consumer.wait_event(self.done)
        # The allocator knows only the stream that a tensor was made on. Without this, memory that
        # the user lets go would be the next batch's while the consumer's kernels still read it.
        for tensor in _tensors(self.batch):
            if tensor.device == self.transfer.device:
                tensor.record_stream(consumer)
        return self.transfer.step(consumer)


def _event(enable_timing: bool = False) -> Event:
    # blocking: who waits for it sleeps, instead of keeping a core busy that loads data.
    return _cuda.Event(enable_timing=enable_timing, blocking=True)


def _tensors(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    walk(batch, note)
    return found
