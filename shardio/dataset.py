"""A packed dataset as an IterableDataset of torch: the same order, whoever reads it.

    loader = DataLoader(ShardDataset("out/", batch_size=256), batch_size=None, num_workers=8)

How it works. With `batch_size` the dataset yields whole batches; without, samples. Each worker of
each rank asks order.Share which batches are its own, fetch reads their records, Decoder makes items
of them, and collate a batch.

The epoch lives in one tensor in shared memory, so that `set_epoch` in the trainer reaches workers
that are running already, forked or spawned. An iterator keeps the epoch it was made for.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from . import manifest, order, sizes
from .collating import collate
from .decoding import Decode, Decoder
from .errors import EpochError, OptionError, printable
from .fetch import BUFFER_BYTES, Described, Fetch, Reader, Rows
from .order import Epoch, Share, Tail
from .sample import Sample
from .storage import locate

VALID = "valid"  # the field that tail="exact" adds

_END = object()
_second = itemgetter(1)

# Places in the shared tensor.
_EPOCH, _START, _PASSES, _WARNED = range(4)


class ShardDataset(Described, IterableDataset[Any]):
    """A packed dataset, streamed in an order that only (seed, epoch) and the options below decide.

    path               what `shardio pack` made
    batch_size         yields batches of this size, for `DataLoader(ds, batch_size=None)`. None:
                       samples, for DataLoader's own batching; each record still comes once an
                       epoch, but the order of batches then depends on the number of workers
    fields             samples are tuples of these, in this order; None: dicts of all, and `__key__`
    decode             "pil": images as PIL images, RGB, upright. None: the bytes of their files.
                       Or a function of those bytes
    transform          of the image. A built-in one (RandomResizedCrop, CenterCrop) takes the bytes
                       and draws from (seed, epoch, record); any other takes the decoded image
    target_transform   of the label
    collate_fn         a list of samples to a batch; default: `shardio.collate`
    shuffle_buffer     records in the shuffle window of the whole job, or bytes ("512MiB"), or "all"
                       for a true permutation. 0 or 1: storage order within each span
    seed               in [0, 2**64)
    tail               "pad": ranks repeat a few records to have equally many steps. "drop": leave
                       some out instead. "exact": as pad, and each sample gets a bool `valid`
                       (last in a tuple, a key of a dict), False on repeats
    rank, world_size   default: torch.distributed's, or the launcher's RANK and WORLD_SIZE
    canonical_workers  spans that are read side by side; part of the order
    unit               records taken from one span at a time; part of the order. Default: the
                       divisor of batch_size nearest 32
    buffer_bytes       memory of this machine for records on network file systems, or "1GiB"

    Call `set_epoch(e)` before each `iter()`. Raises NotPackedError, DamageError, VersionError,
    OptionError; while iterating also StorageError, DecodeError, CollateError, EpochError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        batch_size: int | None = None,
        fields: Sequence[str] | None = None,
        decode: Decode = "pil",
        transform: Callable[..., Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle_buffer: int | str = 10_000,
        seed: int = 0,
        tail: Tail = "pad",
        rank: int | None = None,
        world_size: int | None = None,
        canonical_workers: int = 64,
        unit: int | None = None,
        buffer_bytes: int | str = BUFFER_BYTES,
    ) -> None:
        storage = locate(path)
        self._reader = Reader(storage, manifest.load(storage))
        self._decoder = Decoder(
            self.manifest.schema,
            fields=fields,
            decode=decode,
            transform=transform,
            target_transform=target_transform,
        )
        if tail == "exact" and fields is None and VALID in self.manifest.schema.names:
            raise OptionError(
                f"tail='exact' adds the field {VALID!r}, which this dataset has already; choose "
                "the fields you need by `fields=`"
            )
        if collate_fn is not None and not callable(collate_fn):
            raise OptionError(f"collate_fn is {collate_fn!r}: expected a function")
        if unit is None:
            unit = 1 if batch_size is None else order.default_unit(batch_size)
        self.batch_size = batch_size
        self.seed = seed
        self.tail: Tail = tail
        self.canonical_workers = canonical_workers
        self.unit = unit
        self.shuffle_buffer = _records(shuffle_buffer, self._reader.mean_bytes)
        self.buffer_bytes = sizes.size("buffer_bytes", buffer_bytes, 0)
        self._collate = collate if collate_fn is None else collate_fn
        if (rank is None) != (world_size is None):
            raise OptionError(f"rank is {rank} and world_size {world_size}: give both, or neither")
        self._given = None if rank is None or world_size is None else (rank, world_size)
        self._captured: tuple[int, int] | None = None  # the ranks, for spawned workers
        self._shared = torch.zeros(4, dtype=torch.int64)
        self._share_memory()
        self._steps(self._share(0))  # raises now what iterating would raise later

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` reads; reaches workers that are running."""
        epoch = sizes.whole("epoch", epoch, 0, (1 << 63) - 1)
        self._shared[:] = torch.tensor([epoch, 0, 0, int(self._shared[_WARNED])])

    @property
    def epoch(self) -> int:
        return int(self._shared[_EPOCH])

    def __len__(self) -> int:
        """This rank's batches in an epoch; without `batch_size`, its samples."""
        return self._steps(self._share(0))

    def __repr__(self) -> str:
        size = "" if self.batch_size is None else f", batch_size={self.batch_size}"
        return (
            f"ShardDataset({printable(self._reader.storage.url)!r}{size}: "
            f"{self.manifest.records:,} records in {self.manifest.shards:,} shards, "
            f"fields {', '.join(self.manifest.schema.names)})"
        )

    def __iter__(self) -> Iterator[Any]:
        return _Items(self)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has neither the launcher's process group nor a say in the ranks.
        return self.__dict__ | {"_captured": self._ranks()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share_memory()

    def _share_memory(self) -> None:
        self._shared.share_memory_()  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardDataset:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        shared = ("_shared", "_reader")
        for name, value in self.__dict__.items():
            twin.__dict__[name] = value if name in shared else copy.deepcopy(value, memo)
        return twin

    def _ranks(self) -> tuple[int, int]:
        """Rank and world size. Raises OptionError when what was given contradicts what is."""
        if self._captured is not None and get_worker_info() is not None:
            return self._captured
        found, where = _found_ranks()
        if self._given is not None and found is not None and self._given != found:
            raise OptionError(
                f"rank {self._given[0]} of {self._given[1]} was given, but {where} says rank "
                f"{found[0]} of {found[1]}; leave both out to follow it"
            )
        return self._given or found or (0, 1)

    def _share(self, epoch: int, worker: int = 0, num_workers: int = 1) -> Share:
        rank, world_size = self._ranks()
        return Share(
            Epoch(
                self.manifest.shard_records,
                seed=self.seed,
                epoch=epoch,
                canonical_workers=self.canonical_workers,
                unit=self.unit,
                shuffle_buffer=self.shuffle_buffer,
            ),
            self.batch_size,
            rank=rank,
            world_size=world_size,
            worker=worker,
            num_workers=num_workers,
            tail=self.tail,
        )

    def _steps(self, share: Share) -> int:
        if share.steps == 0 and share.tail == "drop" and share.epoch.records:
            size = share.batch_size or 1
            raise OptionError(
                f"tail='drop' leaves nothing: {share.epoch.records:,} records are fewer than "
                f"{size} x {share.world_size} (batch_size x world_size). Choose tail='pad', or a "
                "smaller batch_size"
            )
        return share.steps


class _Items:
    """One epoch's items of one worker. An object, since a generator would read the epoch late."""

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset
        self._epoch = dataset.epoch
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        share = dataset._share(self._epoch, worker, workers)
        dataset._steps(share)
        _, here = _machines(share.world_size)
        self._fetch = Fetch(
            dataset._reader,
            share,
            buffer_bytes=dataset.buffer_bytes,
            local_consumers=workers * here,
            machines=-(-share.world_size // here),
        )
        self._decoder = dataset._decoder
        self._items = self._make()
        self._error: Exception | None = None
        self._clock = dataset._shared.numpy()  # a view, which set_epoch writes to
        self._counts = worker == 0  # the worker that no other outlives
        self._ended = False
        if self._counts:
            self._warn()

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error  # and not StopIteration: the epoch did not end here
        try:
            item = next(self._items, _END)
        except Exception as error:
            self._error = error
            raise
        if item is _END:
            self._end()
            raise StopIteration
        if self._clock[_EPOCH] != self._epoch:
            raise EpochError(
                f"the epoch was set to {self._dataset.epoch} while epoch {self._epoch} was being "
                "read; call set_epoch before iter(), and make a new iterator after it"
            )
        return item

    def _make(self) -> Iterator[Any]:
        collate_fn, whole = self._dataset._collate, self._dataset.batch_size is not None
        for rows in self._fetch:
            samples = self._samples(rows)
            if whole:
                yield collate_fn(list(samples))
            else:
                yield from samples

    def _samples(self, rows: Rows) -> Iterator[Any]:
        decoder, samples = self._decoder, self._fetch.samples(rows.runs)
        if self._dataset.tail == "exact":
            return map(self._marked, samples, (i < rows.valid for i in range(rows.size)))
        return map(_second, samples) if decoder.plain else map(self._decoded, samples)

    def _decoded(self, numbered: tuple[int, Sample]) -> Any:
        number, sample = numbered
        draw = 0
        if self._decoder.wants_draw:
            draw = order.draw(self._dataset.seed, self._epoch, number)
        return self._decoder(sample, number, draw)

    def _marked(self, numbered: tuple[int, Sample], valid: bool) -> Any:
        item = self._decoded(numbered)
        if self._decoder.fields is not None:
            return (*item, valid)
        item[VALID] = valid
        return item

    def _end(self) -> None:
        if self._counts and not self._ended and self._dataset.epoch == self._epoch:
            self._dataset._shared[_PASSES] += 1
        self._ended = True

    def _warn(self) -> None:
        """Say once that an epoch comes in the same order again. Evaluation wants just that."""
        dataset = self._dataset
        shared, evaluates = (
            dataset._shared,
            dataset.tail == "exact" or dataset.shuffle_buffer in (0, 1),
        )
        if shared[_PASSES] and not shared[_WARNED] and not evaluates:
            shared[_WARNED] = 1
            warnings.warn(
                f"epoch {self._epoch} is being read again, in the same order: call "
                "dataset.set_epoch(epoch) before each iter() for a new one",
                stacklevel=4,
            )


def _records(shuffle_buffer: int | str, mean_bytes: float) -> int | None:
    """A shuffle_buffer option in records; None for "all"."""
    if shuffle_buffer == "all":
        return None
    if isinstance(shuffle_buffer, str) and not shuffle_buffer.strip().isdigit():
        return math.ceil(sizes.parse_size(shuffle_buffer) / mean_bytes)
    if not isinstance(shuffle_buffer, int) or isinstance(shuffle_buffer, bool):
        raise OptionError(
            f"shuffle_buffer is {shuffle_buffer!r}: expected a number of records, bytes such as "
            "'512MiB', or 'all'"
        )
    return shuffle_buffer


def _found_ranks() -> tuple[tuple[int, int] | None, str]:
    """What runs this process says of its rank and world size, and who that is."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return (distributed.get_rank(), distributed.get_world_size()), "torch.distributed"
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world_size is None:
        return None, ""
    where = "the launcher (RANK, WORLD_SIZE)"
    try:
        return (int(rank), int(world_size)), where
    except ValueError:
        raise OptionError(f"{where} says rank {rank!r} of {world_size!r}: not numbers") from None


def _machines(world_size: int) -> tuple[int, int]:
    """Machines of the job, and ranks on this one; one machine where the launcher does not say."""
    try:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError:
        here = world_size
    here = min(max(1, here), world_size)
    return -(-world_size // here), here
