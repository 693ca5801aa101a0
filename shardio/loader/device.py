"""Batches to a device: copied while the step before computes, cast and normalised there.

    for images, labels in shardio.prefetch(loader, "cuda", mean=MEAN, std=STD):
        ...

How it works. `DevicePrefetcher` takes batches from an iterator, starts the transfer of each, and
hands out the oldest: while step n computes, batch n + 1 is copied by a stream of its own. There is
no thread; the device's copy engine runs meanwhile, and it needs page-locked memory. A tensor that
lies in such memory is copied from where it lies; any other goes through a staging buffer,
page-locked once and used again. The host's batch is held until an event says that its bytes have
been read; the event is asked, not waited for.

Only bytes cross to the device; floats are made there (`normalize`). On "cpu" and on devices other
than CUDA the same formula makes the same numbers, without a stream: `.to(device)`, and the formula
there.

Source: "CUDA semantics" of PyTorch (streams, record_stream, non_blocking).
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from ..errors import OptionError, StateError, printable
from ..units import check_int
from .normalize import Images, walk
from .pinned import Pin, StagingBuffers, copies_directly

_cuda: Any = torch.cuda  # it has no types
Event = Any

# The host may be so many steps ahead of the device. Memory of a side stream cannot be used again
# before the step that read it has run: with no limit a loop of few kernels (CUDA graphs: one a
# step, and a thousand fit the queue) would fill the device with batches. Four hide any jitter.
_STEPS_AHEAD = 4


# --- what users call ------------------------------------------------------------------------------


def prefetch(
    loader: Iterable[Any],
    device: str | torch.device | int,
    *,
    ahead: int = 1,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    dtype: torch.dtype | None = None,
    channels_last: bool | None = None,
    pin: Pin = "auto",
) -> Prefetch:
    """Send a loader's batches to a device, ahead of use; cast and normalise images there.

    loader: any iterable of batches: tensors, or tuples, lists and dicts of them, to any depth.
        Tensors move; everything else passes unchanged.
    ahead: batches on their way while one is in use.
    mean, std: of each channel, or one number for all, for pixels from 0 to 1; they say that images
        become floats. One alone leaves the other at 0, or 1.
    dtype: of the images. Default: float32 with mean or std, else uint8, unchanged. Without mean and
        std it only casts, and values stay 0 to 255; mean=0 makes them 0 to 1.
    channels_last: True or False makes the images so; None leaves the strides as they come.
    pin: "auto" copies through page-locked memory where there is some to be had, True insists on it,
        False copies plainly, and waits for each copy. On other devices than CUDA it does nothing.

    Raises OptionError; while iterating also when no image is found that mean, std or dtype could be
    meant for.
    """
    target = Target(
        device,
        ahead=ahead,
        mean=mean,
        std=std,
        dtype=dtype,
        channels_last=channels_last,
        pin=pin,
    )
    return Prefetch(loader, target)


class Prefetch:
    """Iterate a loader, with its batches on a device. Made by `prefetch`.

    Each `iter` is a pass of its own. All else (`set_epoch`, `dataset`, `batch_size`, ...) is the
    loader's.
    """

    def __init__(self, loader: Iterable[Any], target: Target) -> None:
        if not hasattr(loader, "__iter__"):
            raise OptionError(
                f"prefetch: {printable(repr(loader))} is no loader: expected an iterable of batches"
            )
        self.loader = loader
        self.target = target
        self._passing: weakref.ref[DevicePrefetcher] | None = None

    def __iter__(self) -> DevicePrefetcher:
        ahead = DevicePrefetcher(iter(self.loader), self.target)
        self._passing = weakref.ref(ahead)
        return ahead

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in (
            "loader",
            "target",
        ):  # also while unpickled: nothing is there yet
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        found = getattr(self.loader, name)
        if name == "state_dict" and self._passing is not None:
            passing = self._passing()
            if passing is not None and passing.ahead:
                return _uncertain  # which fails when called: many only ask whether it is there
        return found


def _uncertain(*_: Any, **__: Any) -> Any:
    raise StateError(
        "state_dict of a loader behind prefetch counts the batches that were taken ahead of your "
        "loop: save dataset.state_dict(steps=t), where t is the batches that your loop has taken, "
        "or use ShardLoader(device=...), which counts them itself"
    )


class Target:
    """Hold where batches go, and what becomes of the images: the options of `prefetch`, checked.

    Holds what lasts from pass to pass: the stream, and the page-locked staging buffers.
    """

    def __init__(
        self,
        device: str | torch.device | int,
        *,
        ahead: int = 1,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        dtype: torch.dtype | None = None,
        channels_last: bool | None = None,
        pin: Pin = "auto",
    ) -> None:
        self.device = _device(device)
        self.ahead = check_int("ahead (batches on their way)", ahead)
        if channels_last not in (None, True, False):
            raise OptionError(
                f"channels_last is {printable(repr(channels_last))}: expected True, False, or None "
                "for the strides as they come"
            )
        if pin not in ("auto", True, False):
            raise OptionError(f'pin is {printable(repr(pin))}: expected "auto", True or False')
        self.pin = pin
        self.images = Images(mean=mean, std=std, dtype=dtype, channels_last=channels_last)
        self._transfer: Transfer | None = None

    @property
    def locks_pages(self) -> bool:
        """Return True if memory that batches come in should be page-locked, by `page_lock`."""
        return self.device.type == "cuda" and self.pin is not False

    @property
    def staging_bytes(self) -> int:
        """Return the bytes of page-locked memory that the staging buffers take so far."""
        return self._transfer.staging.bytes if isinstance(self._transfer, StreamTransfer) else 0

    def transfer(self) -> Transfer:
        """Return the transfer to the device, one for all passes.

        Memory that a stream used is kept for that stream, so that a new one in each epoch would add
        that epoch's memory to all before.
        """
        device = self.device
        if device.type == "cuda" and device.index is None:  # only now is the process's device set
            device = torch.device("cuda", _cuda.current_device())
        if self._transfer is None or self._transfer.device != device:
            kind = StreamTransfer if device.type == "cuda" else Transfer
            self._transfer = kind(device, self.images, self.pin)
        return self._transfer

    def __getstate__(self) -> dict[str, Any]:
        # Streams and page-locked memory are of this process.
        return self.__dict__ | {"_transfer": None}


# --- batches ahead --------------------------------------------------------------------------------


class DevicePrefetcher:
    """Iterate over the batches of an iterator, on the device.

    The first batch is handed out as soon as it is there. From the second on, the next ones are sent
    before one is handed out; where the iterator has a method `ready()` (would its next() come at
    once?), only those that do not keep the loop waiting.

    taken        batches handed out so far: the ones a saved state is to count
    ahead        batches on their way
    batch_stats  how the last one was made: the iterator's own, with device_s; None without it
    blocked_s    seconds of the last next() in which the device was steps behind: no data time

    An error of the iterator comes after the batches before it. Nothing runs on its own: one that
    is dropped waits for the copies under way, milliseconds, and is gone.
    """

    def __init__(self, iterator: Iterator[Any], target: Target) -> None:
        self.taken = 0
        self.batch_stats: Any = None
        self.blocked_s = 0.0
        self._iterator = iterator
        self._transfer = target.transfer()
        self._most = target.ahead + 1  # sent and not handed out; sent and not yet read
        self._sent: deque[tuple[DeviceBatch, Any]] = deque()
        self._reading: deque[DeviceBatch] = deque()  # the host's batches that are still needed
        self._error: Exception | None = None
        self._ended = False

    @property
    def ahead(self) -> int:
        """Return the number of batches on their way."""
        return len(self._sent)

    def __iter__(self) -> DevicePrefetcher:
        return self

    def __next__(self) -> Any:
        self._let_go()
        while self._wants_more():
            self._send()
        if not self._sent:
            error, self._error = self._error, None
            if error is None:
                raise StopIteration
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        sent, stats = self._sent.popleft()
        self.blocked_s = sent.take()
        self.batch_stats = None if stats is None else stats._replace(device_s=sent.device_s())
        self.taken += 1
        batch, sent.batch = sent.batch, None
        return batch

    def _wants_more(self) -> bool:
        if self._ended or self._error is not None or len(self._sent) >= self._most:
            return False
        if not self._sent:
            return True
        ready = getattr(self._iterator, "ready", None)
        return bool(ready()) if callable(ready) else self.taken > 0

    def _send(self) -> None:
        # KeyboardInterrupt is not kept for later; the batches that are under way stay.
        try:
            batch = next(self._iterator)
            stats = getattr(self._iterator, "batch_stats", None)
            sent = self._transfer.send(batch)
        except StopIteration:
            self._ended = True
            return
        except Exception as error:
            self._error = error
            return
        self._sent.append((sent, stats))
        self._reading.append(sent)
        # Copies that do not keep up: the loader's memory is not to pile up behind them.
        while len(self._reading) > self._most:
            self._reading.popleft().wait()

    def _let_go(self) -> None:
        """Let the host's batches go that have been read. Copies end in order."""
        while self._reading and self._reading[0].read():
            self._reading.popleft()

    def close(self) -> None:
        """End the pass: batches under way are dropped, once no copy reads the host's memory."""
        self._ended = True
        self._error = None
        self._sent.clear()
        while self._reading:
            self._reading.popleft().wait()

    def __del__(self) -> None:
        with suppress(Exception):  # half made, or the interpreter is going and CUDA has gone
            self.close()


class DeviceBatch:
    """Hold a batch that is copied to the device; of `Transfer`, one that has arrived."""

    def __init__(self, batch: Any, issued_s: float) -> None:
        self.batch = batch  # on the device
        self.issued_s = issued_s

    def read(self) -> bool:
        """Return True if the host's batch is no longer needed. Does not wait."""
        return True

    def wait(self) -> None:
        """Wait until the host's batch is no longer needed."""

    def take(self) -> float:
        """Let the consumer have the batch; return the seconds that the device was waited for."""
        return 0.0

    def device_s(self) -> float:
        """Return the seconds that the transfer took, as far as known."""
        return self.issued_s


class Transfer:
    """Copy batches to any device, by plain copies that are done when `send` returns."""

    def __init__(self, device: torch.device, images: Images, pin: Pin) -> None:
        self.device = device
        self._images = images

    def send(self, batch: Any) -> DeviceBatch:
        """Begin to copy a batch of the host to the device."""
        began = time.perf_counter()
        # Batches outlive the mode they were asked for in: a tensor of inference mode cannot be
        # written to, or trained with, after it.
        with torch.inference_mode(False), torch.no_grad():
            there = self._images.finish(walk(batch, self._move))
        return DeviceBatch(there, time.perf_counter() - began)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)


# --- CUDA -----------------------------------------------------------------------------------------


class StreamTransfer(Transfer):
    """Copy batches to a CUDA device by a stream of its own, from page-locked memory."""

    def __init__(self, device: torch.device, images: Images, pin: Pin) -> None:
        super().__init__(device, images, pin)
        # The cast is short, and a step waits for it: it is not to queue behind that step's kernels.
        self._stream = _cuda.Stream(device, priority=-1)
        self._pin = pin
        self.staging = StagingBuffers(pin)
        self._steps: deque[Event] = deque()  # where the consumer stood at each hand-out
        self._timed: tuple[Event, Event] | None = None
        self._last_s: float | None = None

    def send(self, batch: Any) -> DeviceBatch:
        began = time.perf_counter()
        tensors = _tensors(batch)
        start, read, done = (_event(enable_timing=True) for _ in range(3))
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
                start.record(self._stream)
                there = walk(batch, lambda tensor: self._copy(staged.get(id(tensor), tensor)))
                read.record(self._stream)
                there = self._images.finish(there)
                done.record(self._stream)
            except BaseException:  # out of memory: copies that were begun still read the host's
                self._stream.synchronize()
                self.staging.give_back(buffer)
                raise
        return _Streamed(
            self, batch, there, buffer, (start, read, done), time.perf_counter() - began
        )

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        # A copy from pageable memory waits: where the device reads the host's page tables, one that
        # does not may still read it after it returned; elsewhere it is staged by CUDA first anyway.
        straight = self._pin is not False and copies_directly(tensor)
        return tensor.to(self.device, non_blocking=straight)

    def step(self, consumer: Any) -> float:
        """Mark where the consumer stands, and wait while it is too far behind: seconds waited."""
        here = _event()
        here.record(consumer)
        self._steps.append(here)
        waited = 0.0
        while len(self._steps) > _STEPS_AHEAD:
            oldest = self._steps.popleft()
            if not oldest.query():
                began = time.perf_counter()
                oldest.synchronize()
                waited += time.perf_counter() - began
        return waited

    def measured(self, start: Event, done: Event) -> float | None:
        """Return the seconds of the last transfer that has ended; one at a time is looked at."""
        self._timed = self._timed or (start, done)
        start, done = self._timed
        if done.query():
            self._last_s, self._timed = start.elapsed_time(done) / 1e3, None
        return self._last_s


class _Streamed(DeviceBatch):
    """Hold a batch that a side stream copies."""

    def __init__(
        self,
        transfer: StreamTransfer,
        host: Any,
        batch: Any,
        buffer: torch.Tensor | None,
        events: tuple[Event, Event, Event],
        issued_s: float,
    ) -> None:
        super().__init__(batch, issued_s)
        self._transfer, self._host, self._buffer = transfer, host, buffer
        self._start, self._read, self._done = events

    def read(self) -> bool:
        if not self._read.query():
            return False
        self._let_go()
        return True

    def wait(self) -> None:
        self._read.synchronize()
        self._let_go()

    def _let_go(self) -> None:
        self._transfer.staging.give_back(self._buffer)
        self._host = self._buffer = None

    def take(self) -> float:
        consumer = _cuda.current_stream(self._transfer.device)
        consumer.wait_event(self._done)
        # The allocator knows only the stream that a tensor was made on. Without this, memory that
        # the user lets go would be the next batch's while the consumer's kernels still read it.
        for tensor in _tensors(self.batch):
            if tensor.device == self._transfer.device:
                tensor.record_stream(consumer)
        return self._transfer.step(consumer)

    def device_s(self) -> float:
        measured = self._transfer.measured(self._start, self._done)
        return self.issued_s if measured is None else measured


def _event(enable_timing: bool = False) -> Event:
    # blocking: who waits for it sleeps, instead of keeping a core busy that loads data.
    return _cuda.Event(enable_timing=enable_timing, blocking=True)


def _tensors(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def one(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    walk(batch, one)
    return found


# --- options --------------------------------------------------------------------------------------


def _device(given: str | torch.device | int) -> torch.device:
    """Return the device, which is there. Raises OptionError."""
    name = f"device is {printable(repr(given))}"
    if isinstance(given, int) and not isinstance(given, bool):
        given = (
            f"cuda:{given}"  # as `.to(0)` has it; torch.device(0) needs an accelerator to say so
        )
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        raise OptionError(
            f'{name}: expected a device of torch, like "cuda", "cuda:1" or "cpu"'
        ) from None
    if device.type == "cuda":
        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            raise OptionError(
                f"{name}, but this torch is a CPU build ({torch.__version__}): install one for "
                'CUDA (pytorch.org/get-started), or use device="cpu"'
            )
        if not _cuda.is_available():
            raise OptionError(
                f"{name}, but torch {torch.__version__} finds no GPU: look at nvidia-smi and "
                'CUDA_VISIBLE_DEVICES, or use device="cpu"'
            )
        if device.index is not None and device.index >= _cuda.device_count():
            raise OptionError(
                f"{name}, but there are {_cuda.device_count()} GPUs here, counted from cuda:0"
            )
    elif device.type != "cpu":
        try:
            torch.empty(0, device=device)
        except Exception as error:  # each of torch's backends has its own, some of 50 lines
            first = str(error).partition("\n")[0].partition(". ")[0]
            raise OptionError(
                f"{name}, which this torch ({torch.__version__}) cannot use: {first}"
            ) from None
    return device
