"""What a StreamTransfer tells CUDA of its batches, by streams and events that the tests play.

Batches go to torch's "meta" device, which has no memory: shapes say which batch is which. What the
device has done, the tests say.
"""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from support.encoded_crops import encoded

from shardio import DecodeError, EncodedCrops
from shardio.dataset.protocol import BatchIterator
from shardio.images.device_crop import DeviceCrop
from shardio.loader import pinned, transfer
from shardio.loader.device import DeviceOptions, DevicePrefetcher, DeviceTarget
from shardio.loader.device_crops import Cropper
from shardio.loader.pinned import LockedMemory
from shardio.loader.transfer import StreamTransfer, strided_parts


class Stream:
    """A stream that has done all work up to `done`, of what was recorded."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.recorded = self.done = 0
        self.waits: list[tuple[Any, tuple[Stream, int] | None]] = []

    def wait_event(self, event: Event) -> None:
        self.waits.append((event, event.mark))

    def synchronize(self) -> None:
        self.done = self.recorded


class Event:
    """An event; `mark` says where it was recorded last."""

    made = 0

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        Event.made += 1
        self.mark: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        stream.recorded += 1
        self.mark = stream, stream.recorded

    def query(self) -> bool:
        assert self.mark is not None
        return self.mark[0].done >= self.mark[1]

    def synchronize(self) -> None:
        assert self.mark is not None
        self.mark[0].done = max(self.mark[0].done, self.mark[1])

    def elapsed_time(self, other: Event) -> float:
        return 1000.0


class Cuda:
    """What of torch.cuda a transfer calls."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self.consumer = self.current = Stream()
        self.recorded: list[tuple[torch.Tensor, Stream]] = []  # tensors, for their streams

    def current_stream(self, device: Any) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Memory:
    """Page-locked memory of a test: torch's own, as far as a transfer is told."""

    @staticmethod
    def locked(staging: Any, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    played = Cuda()
    Event.made = 0
    monkeypatch.setattr(transfer, "_cuda", played)
    monkeypatch.setattr(pinned.StagingBuffers, "new_locked", Memory.locked)
    monkeypatch.setattr(pinned, "LOCKED", LockedMemory())
    monkeypatch.setattr(transfer, "record", lambda *what: played.recorded.append(what))
    return played


def sent_by(batches: Any, **options: Any) -> tuple[StreamTransfer, DevicePrefetcher]:
    target = DeviceTarget(DeviceOptions("meta", **options))
    meta, cpu = torch.device("meta"), torch.device("cpu")
    cropper = Cropper(cpu, lambda device: None, target.decoded, target.images)
    way = StreamTransfer(meta, target.images, cropper, "auto")
    target.transfer = lambda: way
    return way, DevicePrefetcher(batches, target)


class Source(BatchIterator):
    """Batches of 1, 2, ... rows, some of which are not ready; it says which of them are kept."""

    batch_stats = None

    def __init__(self, count: int, draws: random.Random) -> None:
        self.count, self.draws = count, draws
        self.given: list[weakref.ref[torch.Tensor]] = []

    def ready(self) -> bool:
        return self.draws.random() < 0.7

    def __next__(self) -> Any:
        if len(self.given) == self.count:
            raise StopIteration
        rows = torch.zeros(len(self.given) + 1, 1 << 14, dtype=torch.uint8)
        self.given.append(weakref.ref(rows))
        return rows, torch.zeros(len(self.given))

    @property
    def kept(self) -> int:
        return sum(rows() is not None for rows in self.given)


def in_use(way: StreamTransfer, ahead: DevicePrefetcher) -> list[Any]:
    """Events that somebody still asks or waits for."""
    batches = {id(one): one for one in [*ahead._reading, *(sent for sent, _ in ahead._sent)]}
    held = [one.bytes_read for one in batches.values()]
    held += [one.done for one in batches.values()]
    return [*filter(None, held), *way.steps]


@pytest.mark.parametrize("seed", range(8))
def test_events_are_used_again_and_never_by_two_at_a_time(cuda: Cuda, seed: int) -> None:
    draws = random.Random(seed)
    source = Source(120, draws)
    way, ahead = sent_by(source, ahead=1 + seed % 3)
    side = way.stream
    for number, (rows, _) in enumerate(ahead, 1):
        assert len(rows) == number
        held = in_use(way, ahead)
        assert len({id(one) for one in held}) == len(held)
        free = [*way.events.free, *way.clocks.free]
        assert len({id(one) for one in free}) == len(free)
        assert not {id(one) for one in held} & {id(one) for one in free}
        for stream in side, cuda.consumer, way.clock:
            stream.done = draws.randint(stream.done, stream.recorded)
        _, mark = cuda.consumer.waits[-1]  # of this batch, after its copy
        assert mark is not None and mark[0] is side
    assert number == 120 and Event.made < 30
    ahead.close()
    assert source.kept == 0


def test_a_batch_of_the_host_is_held_until_its_own_copy_is_done(cuda: Cuda) -> None:
    source = Source(9, random.Random(0))
    way, ahead = sent_by(source, ahead=2)
    next(ahead)
    assert source.given[0]() is not None  # nothing is done yet
    way.stream.done = 1  # the copy, not the cast
    next(ahead)
    assert source.given[0]() is None
    assert all(rows() is not None for rows in source.given[1:])
    ahead.close()
    assert source.kept == 0


def test_a_gpu_is_behind_until_it_reaches_the_hand_out_before(cuda: Cuda) -> None:
    _, ahead = sent_by(torch.zeros(2, 1 << 14) for _ in range(9))
    reached, told = [0], []  # where the consumer's stream was at each hand-out; what was said
    for unreached in (0, 1, 2, 0, 1):  # hand-outs that the GPU has not come to
        cuda.consumer.done = reached[-1 - unreached]
        next(ahead)
        told.append(ahead.behind)
        reached.append(cuda.consumer.recorded)
    assert told == [False, True, True, False, True]


class Pair(NamedTuple):
    rows: Any
    others: Any


def test_every_tensor_of_a_batch_is_recorded_for_its_consumer_and_none_is_kept(cuda: Cuda) -> None:
    def rows(count: int) -> torch.Tensor:
        return torch.zeros(count, 1 << 15, dtype=torch.uint8)

    batch = {"a": Pair(rows(1), [rows(2), "text"]), "b": (rows(3),), "there": rows(4).to("meta")}
    way, ahead = sent_by([batch])
    found = next(ahead)
    side = [tensor for tensor, stream in cuda.recorded if stream is way.stream]
    assert [len(one) for one in side] == [4]  # it was there already: its memory is read there
    assert way.stream.waits[0][1] == (cuda.consumer, 2)  # as it was when it was sent, after `mark`
    taken = [one for one, stream in cuda.recorded if stream is cuda.consumer]
    tensors = [found["a"].rows, found["a"].others[0], found["b"][0], found["there"]]
    assert all(one is tensor for one, tensor in zip(taken, tensors, strict=True))
    assert type(found["a"]) is Pair and found["a"].others[1] == "text"
    gone = weakref.ref(found["b"][0])
    cuda.recorded.clear()
    del found, taken, tensors, side
    assert gone() is None  # though its copy is not done


def test_an_interrupt_while_a_batch_is_taken_takes_it_once_more(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, ahead = sent_by(Source(9, random.Random(0)), ahead=2)
    for _ in range(4):
        next(ahead)
    once, step = iter([KeyboardInterrupt()]), way.step

    def interrupted(consumer: Any) -> float:
        waited = step(consumer)
        for error in once:
            raise error
        return waited

    monkeypatch.setattr(way, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(ahead)
    assert [len(rows) for rows, _ in ahead] == [5, 6, 7, 8, 9]
    held = in_use(way, ahead)
    free = [*way.events.free, *way.clocks.free]
    assert len({id(one) for one in [*held, *free]}) == len(held) + len(free)


def test_a_batch_is_asked_once_whether_it_is_locked_and_small_tensors_never(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: asked.append(self.numel()) is None)
    images, labels = torch.zeros(1 << 15, dtype=torch.uint8), torch.zeros(4)
    way, ahead = sent_by([(images, labels)] * 3)
    assert len(list(ahead)) == 3
    assert asked == [1 << 15] * 3
    pinned.LOCKED.add(images.data_ptr(), images.numel())
    asked.clear()
    list(sent_by([(images, labels)])[1])
    assert asked == []
    assert 0 < way.staging.bytes < 4096  # labels alone


@pytest.mark.parametrize("inference", [False, True])
def test_batches_ask_for_no_gradient_and_are_no_inference_tensors(
    cuda: Cuda, inference: bool
) -> None:
    weights = torch.zeros(4, 1 << 14, requires_grad=True)
    _, ahead = sent_by([(weights,)])
    with torch.inference_mode(inference):
        (found,) = next(ahead)
    assert not found.requires_grad and not found.is_inference()
    gc.collect()


def test_a_tensor_of_any_layout_is_recorded_by_what_it_consists_of() -> None:
    """The allocator is told of each part: `record_stream` takes strided tensors alone."""
    plain = torch.eye(4)
    layouts = (
        torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc,
    )  # fmt: skip
    for layout in layouts:
        size = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: they are in beta
            sparse = plain.to_sparse(layout=layout, blocksize=size)
        parts = strided_parts(sparse)
        assert all(part.layout is torch.strided and part.numel() for part in parts)
        assert sum(part.sum() for part in parts if part.is_floating_point()) == plain.sum()
        assert len(parts) == (2 if layout is torch.sparse_coo else 3)
    assert strided_parts(plain) == [plain]


class Filling:
    """Fills rows by a batch of its own."""

    def fill(self, batch: Any, undecoded: Any, size: int) -> Any:
        self.rows, self.size = [one.row for one in undecoded], size
        return tuple(part.clone() for part in batch)


def test_streams_know_the_tensors_of_a_batch_whose_rows_were_filled(cuda: Cuda) -> None:
    way, _ = sent_by([])
    crop = encoded(4)
    torn = DeviceCrop(crop.data[:700], crop.place, crop.shape, crop.interpolation)
    filling: Any = Filling()
    sent = way.send((EncodedCrops.join([crop, torn, crop]), torch.arange(3)), filling)
    sent.wait_issued()
    sent.take()
    assert (filling.rows, filling.size) == ([1], 3)
    known = {id(tensor) for tensor, stream in cuda.recorded if stream is cuda.consumer}
    assert known == {id(part) for part in sent.batch}
    with pytest.raises(DecodeError, match="record 1,004 of the dataset"):
        way.send((EncodedCrops.join([crop, torn]), torch.arange(2))).wait_issued()
