"""Batches to a device: copied while the step before computes, cast and normalised there.

    for images, labels in shardio.prefetch(loader, "cuda", mean=MEAN, std=STD):
        ...

How it works. `DevicePrefetcher` takes batches from an iterator, starts the transfer of each
(`transfer`), and hands out the oldest: while step n computes, batch n + 1 is copied. There is no
thread, but one for batches of decode="cuda"; the device's copy engine runs meanwhile. Only bytes
cross to the device; floats are made there (`normalize`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch

from ..dataset.protocol import BatchIterator
from ..errors import OptionError, StateError, printable
from ..units import check_int
from .device_crops import Cropper
from .device_decode import check_name, find_decoder
from .device_skips import DeviceSkips, device_skips
from .normalize import Images, check_kernels, takes_triton
from .pinned import Pin, page_lock, page_unlock
from .stats import BatchStats, DecodeCounts
from .transfer import DeviceBatch, StreamTransfer, Transfer

_cuda: Any = torch.cuda  # it has no types


# --- what users call ------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceOptions:
    """Hold the options of `prefetch`, which describes them, as they were given."""

    device: str | torch.device | int | None  # None: batches stay where they are
    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None
    dtype: torch.dtype | None = None
    channels_last: bool | None = None
    ahead: int = 1
    pin: Pin = "auto"
    decoder: str = "auto"
    kernels: str = "auto"

    def check_with(self, dataset: Any) -> None:
        """Raise OptionError for a decoder that would decode nothing of a dataset of ours."""
        if self.decoder != "auto" and getattr(dataset, "device_crop", ()) is None:
            raise OptionError(
                f'decoder is {printable(repr(self.decoder))}, which is of decode="cuda", and this '
                "dataset decodes its images itself: leave decoder out, or give the dataset "
                'decode="cuda" and a built-in transform'
            )

    def target(self) -> DeviceTarget | None:
        """Return the target that these say; None: there is no device. Raises OptionError."""
        if self.device is not None:
            return DeviceTarget(self)
        images = ("mean", "std", "dtype", "channels_last")
        given = [name for name in images if getattr(self, name) is not None]
        given += ["ahead"] * (self.ahead != 1) + ["pin"] * (self.pin not in ("auto", False))
        given += ["decoder"] * (self.decoder != "auto") + ["kernels"] * (self.kernels != "auto")
        if given:
            raise OptionError(
                f'{", ".join(given)} without a device: say where, device="cuda"; device="cpu" does '
                "it here"
            )
        return None


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
    decoder: str = "auto",
    kernels: str = "auto",
) -> Prefetch:
    """Send a loader's batches to a device, ahead of use; cast and normalise images there.

    loader: any iterable of batches: tensors, or tuples, lists and dicts of them, to any depth.
        Tensors move; everything else passes unchanged.
    device: of torch: "cuda", "cuda:1", 1, "cpu".
    ahead: batches that are copied while one is in use.
    mean, std: for each channel, or one number for all, for pixels from 0 to 1. With either of them,
        images become floats; mean defaults to 0, std to 1.
    dtype: of the images. Default: float32 with mean or std, otherwise uint8. Without mean and std
        it only casts, and values stay 0 to 255; mean=0 makes them 0 to 1.
    channels_last: the strides of the images, True or False; None does not change them.
    pin: "auto" copies through page-locked memory if it can be had; with True it is an error if it
        cannot; False copies without it, and waits for each copy. Only for CUDA.
    decoder: of decode="cuda": "nvimgcodec", "torchcodec" or "torchvision"; "auto" takes the first
        of them that works here; "pil" decodes on the CPU, and crops on the device.
    kernels: "triton" crops, resizes, normalises and casts by one kernel of Triton, "torch" by
        several of torch, to the same pixels; "auto" takes Triton's on a GPU where they run. Triton
        comes with torch for CUDA on Linux, and wants a C compiler.

    Raises OptionError, also while iterating: if mean, std or dtype is given, and a batch has no
    image. With decode="cuda" also DecodeError and DependencyError.
    """
    options = DeviceOptions(device, mean, std, dtype, channels_last, ahead, pin, decoder, kernels)
    options.check_with(getattr(loader, "dataset", None))
    return Prefetch(loader, DeviceTarget(options))


class Prefetch:
    """Iterate a loader, with its batches on a device. Made by `prefetch`.

    Each `iter` is a pass of its own. `decoded` counts by whom the images of decode="cuda" were
    decoded. All else (`set_epoch`, `dataset`, `batch_size`, ...) is the loader's.
    """

    def __init__(self, loader: Iterable[Any], target: DeviceTarget) -> None:
        if not hasattr(loader, "__iter__"):
            raise OptionError(
                f"prefetch: {printable(repr(loader))} is no loader: expected an iterable of batches"
            )
        self.loader = loader
        self.target = target
        self._passing: weakref.ref[DevicePrefetcher] | None = None

    def __iter__(self) -> DevicePrefetcher:
        skips = device_skips(getattr(self.loader, "dataset", self.loader))
        ahead = DevicePrefetcher(self.loader, self.target, skips)
        self._passing = weakref.ref(ahead)
        return ahead

    @property
    def decoded(self) -> DecodeCounts:
        """Return the counts of decode="cuda", of all passes so far."""
        return self.target.decoded

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("loader", "target"):  # unpickled: neither is there yet
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


class DeviceTarget:
    """Hold where batches go, and what becomes of the images: the options of `prefetch`, checked.

    Holds what lasts from pass to pass: the stream, and the page-locked staging buffers.
    """

    def __init__(self, options: DeviceOptions) -> None:
        self.device = _device(options.device)
        self.ahead = check_int("ahead (batches on their way)", options.ahead)
        if options.channels_last not in (None, True, False):
            raise OptionError(
                f"channels_last is {printable(repr(options.channels_last))}: expected True, False, "
                "or None for the strides as they come"
            )
        self.pin = options.pin
        if self.pin not in ("auto", True, False):
            raise OptionError(f'pin is {printable(repr(self.pin))}: expected "auto", True or False')
        self.kernels = check_kernels(options.kernels, self.device)
        self.taken = ""  # whose kernels: "triton" or "torch", once that is known
        self.images = Images(options.mean, options.std, options.dtype, options.channels_last)
        self.decoder = check_name(options.decoder, self.device)
        self.decoded = DecodeCounts()
        self._transfer: Transfer | None = None

    @property
    def locks_pages(self) -> bool:
        """Return True if memory that batches come in should be page-locked, by `page_lock`."""
        return self.device.type == "cuda" and self.pin is not False

    def locker(self) -> Callable[[int, int], Callable[[], object]]:
        """Return what page-locks memory, for any thread, and returns what unlocks it.

        The process's device is that of the calling thread: another thread has one of its own.
        """
        return partial(self._lock, self._with_index())

    def _lock(self, device: torch.device, address: int, nbytes: int) -> Callable[[], object]:
        page_lock(address, nbytes, device)
        return partial(self._unlock, device, address)

    def _unlock(self, device: torch.device, address: int) -> None:
        if isinstance(self._transfer, StreamTransfer):
            self._transfer.wait()  # loaders unlock all when they end, batches under way included
        page_unlock(address, device)

    def _with_index(self) -> torch.device:
        """Return the device; where no index was given, that of this thread: it is set by now."""
        if self.device.type == "cuda" and self.device.index is None:
            return torch.device("cuda", _cuda.current_device())
        return self.device

    @property
    def staging_bytes(self) -> int:
        """Return the bytes of page-locked memory that the staging buffers take so far."""
        return self._transfer.staging.bytes if isinstance(self._transfer, StreamTransfer) else 0

    def close(self) -> None:
        """Let go of the staging buffers that no copy reads."""
        if isinstance(self._transfer, StreamTransfer):
            self._transfer.staging.clear()

    def transfer(self) -> Transfer:
        """Return the transfer to the device, one for all passes.

        Memory that a stream used is kept for that stream, so that a new one in each epoch would add
        that epoch's memory to all before.
        """
        device = self._with_index()
        if self._transfer is None or self._transfer.device != device:
            self.images.fused = takes_triton(self.kernels, device, self.images.dtype)
            if device.type == "cuda" or self.images.fused:
                self.taken = "triton" if self.images.fused else "torch"
            of_crops = device if device.type == "cuda" else torch.device("cpu")
            cropper = Cropper(
                of_crops, partial(find_decoder, self.decoder), self.decoded, self.images
            )
            if device.type == "cuda":
                self._transfer = StreamTransfer(device, self.images, cropper, self.pin)
            else:
                self._transfer = Transfer(device, self.images, cropper)
        return self._transfer

    def __getstate__(self) -> dict[str, Any]:
        # Streams and page-locked memory are of this process.
        return self.__dict__ | {"_transfer": None}


# --- batches ahead --------------------------------------------------------------------------------


class DevicePrefetcher(BatchIterator):
    """Iterate over the batches of an iterator, on the device.

    The first batch is handed out as soon as it is there. From the second on, the next ones are sent
    before one is handed out; where the iterator's `ready()` says which would come at once, only
    those that do not keep the loop waiting.

    taken        batches handed out so far: the ones a saved state is to count
    ahead        batches on their way
    batch_stats  how the last one was made: the iterator's own, with device_s; None without it
    blocked_s    seconds of the last next() in which the device was steps behind: no data time
    idle_s       seconds for which the device had nothing to do when the last batch came; None: it
                 is not known
    behind       the device was a whole step behind when the last batch was asked for: it had work
                 during all of that step. False: it was not, or it is not known

    An error of the iterator comes after the batches before it. Nothing runs on its own: one that
    is dropped waits for the copies under way, milliseconds, and is gone.
    """

    batch_stats: BatchStats | None = None
    blocked_s: float = 0.0
    idle_s: float | None = None
    behind: bool = False

    def __init__(
        self, batches: Iterable[Any], target: DeviceTarget, skips: DeviceSkips | None = None
    ) -> None:
        """skips: fills rows that cannot be decoded; None: they raise."""
        self.taken = 0
        self._skips = skips
        self._iterator = iter(batches)
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

    def __next__(self) -> Any:
        self.behind = self._transfer.behind()
        mark = self._transfer.mark()
        while self._reading and self._reading[0].read():  # copies end in order
            self._reading.popleft()
        while self._wants_more():
            self._send()
        if not self._sent:
            error, self._error = self._error, None
            if error is None:
                if self._skips is not None:
                    self._skips.end()
                raise StopIteration
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        sent, stats = self._sent.popleft()
        try:
            sent.wait_issued()
            self.blocked_s = sent.take()
        except Exception:  # such as a DecodeError of the thread
            self.close()
            raise
        except BaseException:  # an interrupt: the batch stays
            self._sent.appendleft((sent, stats))
            raise
        self.idle_s = self._transfer.idle_s(mark)
        self.batch_stats = None if stats is None else stats._replace(device_s=sent.send_s)
        self.taken += 1
        batch, sent.batch = sent.batch, None
        return batch

    def _wants_more(self) -> bool:
        """Return True if another batch is to be sent before one is handed out."""
        if self._ended or self._error is not None or len(self._sent) >= self._most:
            return False
        if not self._sent:
            return True
        ready = self._iterator.ready() if isinstance(self._iterator, BatchIterator) else None
        return self.taken > 0 if ready is None else ready

    def _send(self) -> None:
        """Take a batch of the iterator, and send it."""
        # KeyboardInterrupt is not kept for later; the batches that are under way stay.
        try:
            batch = next(self._iterator)
            stats = getattr(self._iterator, "batch_stats", None)
        except StopIteration:
            self._ended = True
            return
        except Exception as error:
            self._error = error
            return
        began = perf_counter()
        try:
            skips = () if self._skips is None else (self._skips,)
            sent = self._transfer.send(batch, *skips)
        except Exception as error:
            self._error = error
            self._ended = True  # the iterator may go on, but this batch is lost
            return
        self._sent.append((sent, stats))
        self._reading.append(sent)
        # Copies that do not keep up: the loader's memory is not to pile up behind them.
        while len(self._reading) > self._most:
            self._reading.popleft().wait()
        sent.send_s = perf_counter() - began

    def close(self) -> None:
        """End the pass: batches under way are dropped, once no copy reads the host's memory."""
        self._ended = True
        self._error = None
        self._sent.clear()
        while self._reading:  # the last first: what a thread has not begun is not to begin
            self._reading.pop().wait()

    def __del__(self) -> None:
        with suppress(Exception):  # half made, or the interpreter is going and CUDA has gone
            self.close()


# --- options --------------------------------------------------------------------------------------


def _device(given: Any) -> torch.device:
    """Return the device, which is there. Raises OptionError."""
    name = f"device is {printable(repr(given))}"
    if isinstance(given, int) and not isinstance(given, bool):
        given = f"cuda:{given}"  # as `.to(0)` has it; torch.device(0) needs an accelerator for it
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
