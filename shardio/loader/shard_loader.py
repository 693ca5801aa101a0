"""ShardLoader: the batches of a dataset, built by processes with threads in memory that is reused.

    for images, labels in ShardLoader(train, num_workers=8, device="cuda"): ...

The same batches in the same order as `DataLoader(train, batch_size=None)` gives, whatever builds
them. Instead of new shared memory for each batch there are buffers that each batch is decoded into
(`buffer_pool`, `batch_builder`), and processes that stay from epoch to epoch (`worker_process`,
`worker_pool`).

A batch is a view of its buffer, and as long as any of its tensors lives, nothing is written there:
keep what you like. Who keeps many makes the ring grow (`explain` says by how much).
"""

from __future__ import annotations

import math
import multiprocessing
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from inspect import signature
from multiprocessing.context import BaseContext
from typing import Any, Literal, NoReturn

import torch

from .. import machine
from ..dataset.iteration import Iteration, MakeBatches
from ..dataset.other_names import OTHER_NAMES
from ..dataset.protocol import BatchIterator
from ..dataset.ranks import consumers, machines_of
from ..dataset.shard_dataset import ShardDataset
from ..dataset.stream import Stream
from ..errors import EpochError, OptionError, printable
from ..order.options import Options
from ..order.partition import Partition
from ..units import check_int, refuse_options
from . import pinned
from .base import Pass, PoolOptions, WorkerPool
from .decode_advice import PHOTOGRAPH, DecodeAdvice, decode_advice
from .device import DeviceOptions, DevicePrefetcher, DeviceTarget
from .device_skips import device_skips
from .in_process import InProcessWorkers
from .pinned import Pin
from .resident import Resident
from .stats import BatchStats, LoaderExplanation, PoolFigures
from .worker_pool import WorkerProcesses

# Options of DataLoader and of other loaders, which their users will try: what to do instead.
_ADVICE = {
    "workers": "it is called num_workers, as DataLoader's",
    "prefetch": "it is called prefetch_factor, as DataLoader's",
    "pin_memory": "give device=, and the batches come there from page-locked memory (pin=)",
    "pin_memory_device": "give device=",
    "persistent_workers": "leave it out; processes stay from epoch to epoch, until close()",
    "in_order": "leave it out; batches always come in order",
    "worker_init_fn": "leave it out; what a transform needs it can make when it is first called",
    "generator": "give seed= to the dataset, and torch.manual_seed to transforms that draw",
    "batch_size": "give it to the dataset",
    "collate_fn": "give it to the dataset",
    "shuffle": "give it to the dataset, which has the order: shuffle=False, or shuffle_buffer=",
    "drop_last": 'give tail="drop" to the dataset',
    "sampler": "the order is the dataset's: shuffle_buffer=, where=, select()",
    "batch_sampler": "the order is the dataset's: batch_size=, shuffle_buffer=, where=, select()",
    "use_prefetcher": "give device=, which takes batches there ahead of use",
    **dict.fromkeys(("img_dtype", "fp16"), "give dtype="),
}
_REFUSED = {
    **{name: f"of the dataset: {advice}" for name, advice in OTHER_NAMES.items()},
    **{
        name: f"give it to the dataset, ShardDataset({name}=...)"
        for name in signature(ShardDataset).parameters
    },
    **_ADVICE,
}


class ShardLoader:
    """Build batches of a ShardDataset, or of a mixture, ahead, by processes of this machine.

    dataset       a ShardDataset, or a mixture, with a batch_size
    num_workers   loader processes; default: the cores of this process, divided by the ranks of this
                  machine. 0: no processes; the threads run in this one
    threads       threads of each process; more than one helps if samples wait (slow storage, slow
                  transforms). num_workers=0, threads=0 makes each batch in the loop: for debuggers
    prefetch_factor  batches that each process makes ahead; default 2
    copy          True: copy batches into memory of this process (the buffers are free at once);
                  False: give views of shared memory, without a copy
    device        copy batches there ahead of use, and cast and normalise images there:
    ahead, mean, std, dtype, channels_last, pin, decoder, kernels    as for `shardio.prefetch`
    timeout       seconds to wait for a batch, before a WorkerError says what its process is doing;
                  0, the default: no limit, and a warning after a minute
    resident      "ram": decode everything once, into tensors, and gather each batch from them; the
                  workers then end. "device": the tensors lie on `device`
    multiprocessing_context  "fork", "spawn" or "forkserver", as for DataLoader

    Iterate it once an epoch, after `set_epoch`, with one pass at a time. Its processes stay until
    `close`, or until the loader is garbage. Your own random transforms draw other numbers in each
    process and epoch, and the same in each run with the same torch.manual_seed and the same number
    of workers with one thread.

    Raises OptionError; while iterating the errors of the dataset, EpochError, and WorkerError when
    a process dies or is late. An exception of a transform comes unchanged, with a RowError as its
    cause, which names the record and holds the traceback.
    """

    @refuse_options("ShardLoader", _REFUSED)
    def __init__(
        self,
        dataset: Stream,
        *,
        num_workers: int | None = None,
        threads: int | None = None,
        prefetch_factor: int | None = None,
        copy: bool = False,
        device: str | torch.device | int | None = None,
        ahead: int = 1,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        dtype: torch.dtype | None = None,
        channels_last: bool | None = None,
        pin: Pin = "auto",
        decoder: str = "auto",
        kernels: str = "auto",
        timeout: float = 0,
        resident: Literal["ram", "device"] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
    ) -> None:
        if not isinstance(dataset, Stream):
            raise OptionError(
                f"ShardLoader reads a ShardDataset, or a mixture of some, and this is "
                f"{printable(repr(dataset))}; for other datasets use torch's DataLoader"
            )
        if dataset.batch_size is None:
            raise OptionError(
                "ShardLoader: give batch_size to the dataset, ShardDataset(..., batch_size=256): "
                "its batches are what the loader makes"
            )
        self.dataset = dataset
        if num_workers is None:
            num_workers = cores(dataset.ranks()[1])
        self.num_workers = check_int("num_workers", num_workers, 0)
        least = int(self.num_workers > 0)
        self.threads = 1 if threads is None else check_int("threads", threads, least)
        # None is DataLoader's own default, and what is passed to it where there are no workers.
        prefetch_factor = 2 if prefetch_factor is None else prefetch_factor
        self.prefetch_factor = check_int("prefetch_factor", prefetch_factor)
        self.timeout = _timeout(timeout)
        if self.timeout and not self.num_workers and not self.threads:
            raise OptionError(
                "timeout with num_workers=0, threads=0: your own loop makes the batches then, and "
                "nobody could end it; give threads=1, or leave timeout out"
            )
        self.copy = copy
        options = DeviceOptions(
            device, mean, std, dtype, channels_last, ahead, pin, decoder, kernels
        )
        self.target = options.target()
        options.check_with(dataset)
        if dataset.device_crop is not None and self.target is None:
            raise OptionError(
                'decode="cuda" without a device: say where images are decoded, device="cuda"; '
                'device="cpu" decodes them in this process, for tests'
            )
        self.resident = resident
        self._resident: Resident | None = None
        if resident is not None:
            self._resident = Resident(dataset, _place(resident, self.target))
        self._context = _context(multiprocessing_context)
        self._pool: WorkerPool | None = None
        self._last: Iteration | None = None

    def __len__(self) -> int:
        """Return this rank's batches in a full epoch."""
        return len(self.dataset)

    def __getitem__(self, index: Any) -> NoReturn:
        raise OptionError("ShardLoader is a loader itself: iterate over it, without a DataLoader")

    def __iter__(self) -> Iteration:
        if self._resident is not None:
            if not self._resident.filled:
                self._fill(self._resident)
            make_batches: MakeBatches = partial(_gather, self._resident, self.target)
        else:
            if self._pool is None or self._pool.closed:
                self._pool = self._start()
            make_batches = partial(_build, self.dataset, self._pool, self.target)
        self._last = self.dataset.iterate(make_batches)
        return self._last

    @property
    def epoch(self) -> int:
        """Return the epoch of the dataset."""
        return self.dataset.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` reads, as of the dataset."""
        self.dataset.set_epoch(epoch)

    @property
    def sampler(self) -> Stream:
        """Return the dataset: where Lightning looks for a sampler, to tell it the epoch."""
        return self.dataset

    @property
    def remaining(self) -> int:
        """Return the number of batches that the next `iter()` gives, as of the dataset."""
        return self.dataset.remaining

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop over this loader stands, after the batch it got last.

        JSON, below 1 KB, for `load_state_dict` of this loader or of the dataset, with any number
        of workers and ranks.
        """
        return self.dataset.state_of(self._last)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: call it before `iter()`, on every rank. Raises StateError."""
        self.dataset.load_state_dict(state)

    def close(self) -> None:
        """End the processes, and let resident data go. Batches that were handed out stay; iterating
        starts, or fills, anew."""
        if self._resident is not None:
            self._resident.clear()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        if self.target is not None:
            self.target.close()

    def __enter__(self) -> ShardLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pool": None, "_last": None}

    def __repr__(self) -> str:
        return (
            f"ShardLoader({self.dataset!r}, num_workers={self.num_workers}, threads={self.threads})"
        )

    def explain(self) -> LoaderExplanation:
        """Return what this loader runs and holds, with the memory of its batches: print it."""
        figures = PoolFigures()
        if self._pool is not None and not self._pool.closed:
            figures = self._pool.figures
        staging = 0 if self.target is None else self.target.staging_bytes
        return LoaderExplanation(
            **vars(figures),
            num_workers=self.num_workers,
            threads=self.threads,
            prefetch_factor=self.prefetch_factor,
            locked_bytes=pinned.locked_bytes() + staging,
            staging_bytes=staging,
            resident_bytes=0 if self._resident is None else self._resident.bytes,
            decoded=None if self.target is None else self.target.decoded,
            advice=self._where_to_decode(),
            kernels="" if self.target is None else self.target.taken,
        )

    def _where_to_decode(self) -> DecodeAdvice | None:
        """Advise to decode by the cores, or on the GPU; None where the figures say nothing."""
        manifest = getattr(self.dataset, "manifest", None)  # a mixture has none
        on_gpu = self.dataset.device_crop is not None
        photographs = (
            manifest is not None
            and self.dataset.image_column is not None  # a built-in transform crops
            and manifest.options.get("encode") != "raw"
            and manifest.mean_bytes >= PHOTOGRAPH
        )
        to_gpu = self.target is not None and self.target.device.type == "cuda"
        if self._resident is not None or not (on_gpu or (to_gpu and photographs)):
            return None
        tiles = manifest is not None and bool(manifest.options.get("tiles"))
        return decode_advice(cores(self.dataset.ranks()[1]), tiles=tiles, on_gpu=on_gpu)

    def _fill(self, resident: Resident) -> None:
        """Read all of the dataset once, in storage order, as no rank's share of it."""
        options = replace(self.dataset.options, shuffle_buffer=1, tail="pad")
        share = options.partition(options.epoch(self.dataset.counts, 0))
        with closing(self._start()) as pool:
            resident.fill(share.epoch, _PoolBatches(pool, options, share))

    def _start(self) -> WorkerPool:
        target = self.target
        lock = None if target is None or not target.locks_pages else target.locker()
        # Buffers that are page-locked are copied to the device, and free after that.
        copies = self.copy and lock is None
        options = PoolOptions(
            *(self.num_workers, self.threads, self.prefetch_factor, self.timeout, copies),
            lock=lock,
            context=self._context,
        )
        return (WorkerProcesses if self.num_workers else InProcessWorkers)(self.dataset, options)


class _PoolBatches(BatchIterator):
    """Iterate over the batches of a rank's share, which a pool builds: one pass, begun here."""

    batch_stats: BatchStats | None = None

    def __init__(self, pool: WorkerPool, options: Options, share: Partition) -> None:
        readers = consumers(share.world_size, pool.workers)
        place = share.epoch.epoch, share.start, share.rank, share.world_size
        pool.begin(Pass(options, *place, readers, pool.pool_number), share.steps)
        self._pool = pool
        self._left = share.steps
        self._pass = pool.passes
        self._next_lock = threading.Lock()  # threads may take batches of one pass

    def __next__(self) -> Any:
        with self._next_lock:
            if not self._left:
                raise StopIteration
            if self._pass != self._pool.passes:
                raise EpochError(
                    "another pass over this loader has begun, and ended this one: iterate one at a "
                    "time, or make a second ShardLoader"
                )
            batch, self.batch_stats = self._pool.take()
            self._left -= 1
            return batch

    def ready(self) -> bool:
        """Return True if the next batch is there, most likely."""
        return self._pool.ready()


def _build(
    stream: Stream, pool: WorkerPool, target: DeviceTarget | None, share: Partition
) -> BatchIterator:
    """Iterate over the batches of a rank's share, which a pool builds."""
    batches = _PoolBatches(pool, stream.options, share)
    return batches if target is None else DevicePrefetcher(batches, target, device_skips(stream))


def _gather(resident: Resident, target: DeviceTarget | None, share: Partition) -> Iterator[Any]:
    """Iterate over the batches of a rank's share, from memory."""
    batches = resident.batches(share)
    if target is not None and resident.device != target.device:
        return DevicePrefetcher(batches, target)
    return batches if target is None else map(target.images.finish, batches)


def _place(resident: str, target: DeviceTarget | None) -> torch.device:
    """Return the device that resident data lies on. Raises OptionError."""
    if resident == "ram":
        return torch.device("cpu")
    if resident != "device":
        raise OptionError(
            f"resident is {printable(repr(resident))}: expected 'ram', 'device' or None"
        )
    if target is None:
        raise OptionError('resident="device": say on which, device="cuda"')
    return target.device


def _timeout(given: Any) -> float:
    """Return the option `timeout`. Raises OptionError."""
    if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given < math.inf:
        return float(given)
    raise OptionError(
        f"timeout is {printable(repr(given))}: expected seconds, such as 120; 0: never"
    )


def cores(ranks: int) -> int:
    """Return the cores of this process, shared among the ranks of this machine; at least 1."""
    return max(1, math.ceil(machine.cores()) // machines_of(ranks)[1])


def _context(given: str | BaseContext | None) -> BaseContext:
    """Return the context that starts processes. Raises OptionError."""
    if isinstance(given, BaseContext):
        return given
    try:
        return multiprocessing.get_context(given)
    except (ValueError, TypeError):
        known = ", ".join(map(repr, multiprocessing.get_all_start_methods()))
        raise OptionError(
            f"multiprocessing_context is {printable(repr(given))}: expected one of {known}"
        ) from None
