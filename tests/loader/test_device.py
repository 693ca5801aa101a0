"""Batches to a device: their order, what is kept and what is let go.

Where there is no GPU, all that does not need one is tested with plain copies, and with a
transfer of which the tests say when a batch has been read. The rest needs CUDA; it is skipped,
and says so.
"""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import small_datasets
from support.device_batches import MEAN, STD, batches, pictures, wanted
from support.gpu import DEVICES, gpu
from torch.utils.data import DataLoader, TensorDataset

from shardio.dataset.protocol import BatchIterator
from shardio.errors import OptionError, StateError
from shardio.loader.device import DeviceOptions, DevicePrefetcher, DeviceTarget, prefetch
from shardio.loader.device_crops import Cropper
from shardio.loader.transfer import DeviceBatch, Transfer


class Stats(NamedTuple):
    rows: int = 0
    device_s: float = 0.0


@pytest.mark.parametrize("device", DEVICES)
def test_batches_of_inference_mode_can_be_trained_with_after_it(device: str) -> None:
    ahead = iter(prefetch(batches(3), device, mean=MEAN))
    with torch.inference_mode():
        first, _ = next(ahead)
        second, _ = next(ahead)
    third, _ = next(ahead)
    weight = torch.ones(1, device=device, requires_grad=True)
    for images in (first, second, third):
        (images * weight).sum().backward()
    assert weight.grad is not None


# --- order, errors, ends --------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_batches_come_in_order_and_all_of_them(ahead: int) -> None:
    loader = prefetch(batches(5), "cpu", mean=MEAN, ahead=ahead)
    for _ in range(2):  # and again
        assert [int(labels[0]) for _, labels in loader] == list(range(5))
    assert list(prefetch([], "cpu", ahead=ahead)) == []


def test_batches_taken_are_those_handed_out() -> None:
    ahead = iter(prefetch(batches(4), "cpu", ahead=2))
    seen = []
    for _ in ahead:
        seen.append((ahead.taken, ahead.ahead))
    # The first comes as soon as it is there; then two are always on their way, until the end.
    assert seen == [(1, 0), (2, 2), (3, 1), (4, 0)]


class Readiness(BatchIterator):
    """An iterator that says whether its next() would come at once."""

    def __init__(self, count: int) -> None:
        self.asked, self.given, self.there, self.count = 0, 0, 0, count

    def ready(self) -> bool:
        self.asked += 1
        return self.there > self.given

    def __next__(self) -> torch.Tensor:
        if self.given == self.count:
            raise StopIteration
        self.given += 1
        return torch.tensor(self.given)


def test_a_batch_that_is_there_does_not_wait_for_one_that_is_not() -> None:
    source = Readiness(5)
    ahead = DevicePrefetcher(source, DeviceTarget(DeviceOptions("cpu", ahead=2)))
    assert int(next(ahead)) == 1 and source.given == 1
    source.there = 9
    assert int(next(ahead)) == 2 and source.given == 4  # two ahead, and no more
    source.there = 0
    assert int(next(ahead)) == 3 and source.given == 4
    assert [int(batch) for batch in ahead] == [4, 5]


def failing(at: int, kind: type[BaseException], text: str = "") -> Iterator[Any]:
    for i, batch in enumerate(batches(at + 1)):
        if i == at:
            raise kind(text)
        yield batch


def test_an_error_comes_after_the_batches_before_it() -> None:
    ahead = iter(prefetch(failing(3, ValueError, "record 7 is broken"), "cpu", ahead=2))
    assert [int(next(ahead)[1][0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="record 7 is broken") as caught:
        next(ahead)
    assert any(entry.name == "failing" for entry in caught.traceback)  # where it came from
    with pytest.raises(StopIteration):
        next(ahead)


def test_an_interrupt_is_not_kept_for_later() -> None:
    ahead = iter(prefetch(failing(2, KeyboardInterrupt), "cpu", ahead=1))
    assert int(next(ahead)[1][0]) == 0
    with pytest.raises(KeyboardInterrupt):
        next(ahead)
    assert int(next(ahead)[1][0]) == 1  # which was on its way


def test_a_batch_that_cannot_be_sent_fails_in_its_place() -> None:
    source = [*batches(2), (pictures(channels=1), torch.tensor([2, 2])), *batches(1)]
    ahead = iter(prefetch(source, "cpu", mean=MEAN))
    assert [int(next(ahead)[1][0]) for _ in range(2)] == [0, 1]
    with pytest.raises(OptionError, match="3 channels, but the images of this batch have 1"):
        next(ahead)


def test_leaving_early_ends_the_loader_s_iterator() -> None:
    ended = []

    def source() -> Iterator[Any]:
        try:
            yield from batches(9)
        finally:
            ended.append(True)

    for _ in prefetch(source(), "cpu"):
        break
    gc.collect()
    assert ended == [True]


def test_no_cycle_keeps_an_iterator_alive() -> None:
    gc.disable()
    try:
        for source in (batches(3), failing(1, ValueError)):
            ahead = iter(prefetch(source, "cpu"))
            gone = weakref.ref(ahead)
            with suppress(ValueError):
                list(ahead)
            del ahead
            assert gone() is None
    finally:
        gc.enable()


# --- the host's batches ---------------------------------------------------------------------------


class Reading(DeviceBatch):
    """A batch that is read when the test says so."""

    def __init__(self, way: Slow, host: Any) -> None:
        super().__init__(host[1].clone())
        self.way, self.host = way, host

    def read(self) -> bool:
        if not self.way.done:
            return False
        self.host = None
        return True

    def wait(self) -> None:
        self.way.waits += 1
        self.host = None

    def take(self) -> float:
        return 0.25


class Slow(Transfer):
    """A transfer whose copies take as long as the test wants."""

    def __init__(self, target: DeviceTarget) -> None:
        cpu = torch.device("cpu")
        super().__init__(
            cpu, target.images, Cropper(cpu, lambda device: None, target.decoded, target.images)
        )
        self.done, self.waits = False, 0

    def send(self, batch: Any) -> DeviceBatch:
        return Reading(self, batch)

    def mark(self) -> str:
        return "when next() began"

    def idle_s(self, mark: Any) -> float:
        assert mark == "when next() began"
        return 0.125


class Source:
    """An iterator that keeps nothing of its batches, and says which ones others keep."""

    def __init__(self, count: int) -> None:
        self.count, self.batch_stats = count, Stats()
        self.given: deque[weakref.ref[torch.Tensor]] = deque()

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> Any:
        if len(self.given) == self.count:
            raise StopIteration
        images, labels = pictures(), torch.tensor([len(self.given)])
        self.given.append(weakref.ref(images))
        self.batch_stats = Stats(rows=len(self.given))
        return images, labels

    @property
    def kept(self) -> list[int]:
        return [i for i, batch in enumerate(self.given) if batch() is not None]


def slow(count: int, ahead: int) -> tuple[Source, Slow, DevicePrefetcher]:
    target, source = DeviceTarget(DeviceOptions("cpu", ahead=ahead)), Source(count)
    target._transfer = way = Slow(target)
    return source, way, DevicePrefetcher(source, target)


def test_the_host_s_batch_is_kept_until_it_is_read_and_then_let_go() -> None:
    source, way, ahead = slow(9, ahead=1)
    assert int(next(ahead)) == 0 and source.kept == [0]
    way.done = True
    assert int(next(ahead)) == 1 and source.kept == [1, 2]
    way.done = False
    assert int(next(ahead)) == 2 and source.kept == [2, 3]
    assert int(next(ahead)) == 3 and source.kept == [3, 4]
    assert way.waits == 2  # one for each of the last two: they are never let go unread


def test_copies_that_do_not_keep_up_are_waited_for_instead_of_piling_up() -> None:
    source, way, ahead = slow(9, ahead=2)
    for i in range(9):
        assert int(next(ahead)) == i
        assert len(source.kept) <= 3
    assert way.waits == 6


def test_leaving_early_waits_for_copies_under_way_and_lets_go() -> None:
    source, way, ahead = slow(9, ahead=2)
    next(ahead), next(ahead)
    unread = len(source.kept)
    waits = way.waits
    assert unread == 3
    del ahead
    assert way.waits == waits + unread and source.kept == []


def test_a_pass_can_be_closed() -> None:
    source, way, ahead = slow(9, ahead=2)
    next(ahead)
    ahead.close()
    assert source.kept == [] and way.waits == 1
    assert list(ahead) == [] and len(source.given) == 1


def test_how_a_batch_was_made_belongs_to_the_batch_handed_out() -> None:
    _, _, ahead = slow(4, ahead=2)
    assert ahead.batch_stats is None
    seen = []
    for _ in ahead:
        assert 0 < ahead.batch_stats.device_s < 60 and ahead.blocked_s == 0.25
        assert ahead.idle_s == 0.125
        seen.append(ahead.batch_stats.rows)
    assert seen == [1, 2, 3, 4]


def test_of_a_loader_that_does_not_say_nothing_is_made_up() -> None:
    ahead = iter(prefetch(batches(2), "cpu"))
    next(ahead)
    assert ahead.batch_stats is None


# --- around a loader ------------------------------------------------------------------------------


def test_a_dataloader_keeps_its_face() -> None:
    data = TensorDataset(pictures(10), torch.arange(10))
    plain = DataLoader(data, batch_size=4, num_workers=2)
    loader = prefetch(plain, "cpu", mean=MEAN, std=STD)
    assert len(loader) == 3 and loader.dataset is data and loader.num_workers == 2
    assert not hasattr(loader, "set_epoch")
    images = torch.cat([images for images, _ in loader])
    assert torch.allclose(images.double(), wanted(data.tensors[0]), atol=1e-6)
    for _ in loader:  # its workers end too
        break


class Stateful:
    """A loader that counts what is taken from it, as StatefulDataLoader does."""

    def __init__(self) -> None:
        self.given = self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.given = 0
        for i in range(5):
            self.given += 1
            yield torch.tensor(i)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def test_what_the_loader_can_do_is_passed_on() -> None:
    inner = Stateful()
    loader = prefetch(inner, "cpu")
    loader.set_epoch(3)
    loader.load_state_dict({"given": 2})
    assert inner.epoch == 3 and loader.state_dict() == {"given": 2}
    with pytest.raises(TypeError):
        len(loader)


def test_a_state_that_counts_batches_taken_ahead_is_refused() -> None:
    loader = prefetch(Stateful(), "cpu")
    for taken, _ in enumerate(loader, 1):
        if taken in (1, 5):  # nothing is ahead
            assert loader.state_dict() == {"given": taken}
        else:
            with pytest.raises(StateError, match=r"dataset\.state_dict\(steps=t\)"):
                loader.state_dict()


def test_a_loader_can_be_copied_and_pickled_before_it_is_used() -> None:
    loader = prefetch(batches(2), "cpu", mean=MEAN)
    for twin in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        for (one, _), (other, _) in zip(loader, twin, strict=True):
            assert torch.equal(one, other)
        loader = prefetch(batches(2), "cpu", mean=MEAN)


def test_the_examples_of_the_documentation_run(
    packed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packed([6, 4], "packed", image=small_datasets.jpeg)
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parent.parent.parent / "docs" / "device.md").read_text()
    first, second, *_ = re.findall(r"```python\n(.*?)```", text, re.S)
    seen: list[Any] = []
    names: dict[str, Any] = {"seen": seen}
    for code in (first, second):
        for long, short in (
            ('"cuda"', '"cpu"'),
            ("batch_size=256", "batch_size=4"),
            ("RandomResizedCrop(224", "RandomResizedCrop(16"),
            ("ShardLoader(train,", "ShardLoader(train, num_workers=0,"),
            ("num_workers=8, pin_memory=True", "num_workers=0"),
            ("...", "seen.append((images, labels))"),
        ):
            code = code.replace(long, short)
        exec(code, names)
        names["train"].set_epoch(0)  # again
    assert [len(labels) for _, labels in seen] == [4, 4, 2] * 2
    for (images, labels), (others, same) in zip(seen[:3], seen[3:], strict=True):
        assert images.dtype == torch.bfloat16 and images.shape[1:] == (3, 16, 16)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(images, others) and torch.equal(labels, same)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"device": "gpu"}, ["device is 'gpu'", 'like "cuda", "cuda:1" or "cpu"']),
        ({"device": None}, ["device is None"]),
        ({"ahead": 0}, ["ahead", "is 0", "1 or more"]),
        ({"ahead": 1.5}, ["ahead", "1.5"]),
        ({"mean": (123.7, 116.3, 103.5)}, ["mean is (123.7", "0 to 1", "by 255"]),
        ({"mean": (-0.1, 0.5, 0.5)}, ["mean", "0 to 1"]),
        ({"std": 58.4}, ["std is 58.4", "by 255"]),
        ({"std": (0.2, 0, 0.2)}, ["std is 0 for a channel"]),
        ({"mean": "imagenet"}, ["mean is 'imagenet'", "a number for each channel"]),
        ({"mean": ()}, ["mean is ()", "a number for each channel"]),
        ({"mean": (float("nan"),) * 3}, ["mean is (nan", "a number for each channel"]),
        ({"mean": MEAN, "std": (0.2, 0.2)}, ["mean has 3 values and std 2"]),
        ({"mean": MEAN, "dtype": torch.uint8}, ["dtype is torch.uint8", "torch.bfloat16"]),
        ({"dtype": "bfloat16"}, ["dtype is 'bfloat16'", "torch.dtype"]),
        ({"channels_last": "yes"}, ["channels_last is 'yes'", "True, False"]),
        ({"pin": "always"}, ["pin is 'always'", '"auto", True or False']),
        ({"loader": 3}, ["3 is no loader"]),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any], words: list[str]) -> None:
    given: dict[str, Any] = {"loader": batches(1), "device": "cpu", **options}
    with pytest.raises(OptionError) as caught:
        prefetch(given.pop("loader"), given.pop("device"), **given)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch is built for CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda")])
def test_cuda_without_cuda_says_that_torch_is_a_cpu_build(device: Any) -> None:
    with pytest.raises(OptionError, match="this torch is a CPU build") as caught:
        prefetch(batches(1), device)
    assert torch.__version__ in str(caught.value) and 'device="cpu"' in str(caught.value)


# --- with a GPU -----------------------------------------------------------------------------------


def on_gpu(batch: Any) -> bool:
    images, labels = batch
    return bool(images.is_cuda and labels.is_cuda)


@gpu
@pytest.mark.parametrize("pin", ["auto", True, False])
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_gpu_makes_the_numbers_of_the_cpu(pin: Any, pinned: bool, dtype: Any) -> None:
    source = [
        (pictures(8, (32, 32), seed=i), torch.full((8,), i), pictures(2, channels=1))
        for i in range(6)
    ]
    given = [tuple(t.pin_memory() for t in batch) for batch in source] if pinned else source
    options: dict[str, Any] = {"mean": MEAN, "std": STD, "dtype": dtype, "ahead": 2}
    for there, here in zip(
        prefetch(given, "cuda", pin=pin, **options), prefetch(source, "cpu", **options), strict=True
    ):
        for one, other in zip(there, here, strict=True):
            assert one.is_cuda and one.dtype == other.dtype and one.stride() == other.stride()
            assert torch.equal(one.cpu(), other)


@gpu
def test_kept_batches_are_never_overwritten() -> None:
    source = [(pictures(16, (64, 64), seed=i), torch.full((16,), i)) for i in range(20)]
    kept = list(prefetch(source, "cuda", ahead=2))
    for (images, labels), (pixels, numbers) in zip(kept, source, strict=True):
        assert torch.equal(images.cpu(), pixels) and torch.equal(labels.cpu(), numbers)


@gpu
def test_batches_let_go_while_the_gpu_is_behind_are_not_overwritten() -> None:
    source = [(pictures(16, (64, 64), seed=i), torch.full((16,), i)) for i in range(12)]
    sums = []
    for images, labels in prefetch(source, "cuda", ahead=2):
        torch.cuda._sleep(20_000_000)  # the step computes; the host goes on
        sums.append((images.long().sum(), labels.sum()))
        del images, labels
    for (pixels, numbers), (image_sum, label_sum) in zip(source, sums, strict=True):
        assert int(image_sum) == int(pixels.long().sum())
        assert int(label_sum) == int(numbers.sum())


@gpu
def test_memory_of_the_gpu_stays_bounded_while_the_host_runs_ahead() -> None:
    one = 32 * 3 * 64 * 64
    source = [pictures(32, (64, 64), seed=i) for i in range(3)] * 40
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ahead = iter(prefetch(source, "cuda", mean=MEAN))
    blocked = 0.0
    for images in ahead:
        torch.cuda._sleep(5_000_000)
        del images
        blocked += ahead.blocked_s
    assert blocked > 0  # and it says so
    assert torch.cuda.max_memory_allocated() - before < 12 * 5 * one


@gpu
def test_the_copy_runs_beside_the_step() -> None:
    """Started while a step computes, a copy ends before it: seen by events, without a clock."""
    source = [torch.zeros(1 << 24, dtype=torch.uint8).pin_memory() for _ in range(4)]
    ahead = iter(prefetch(source, "cuda", ahead=1))
    next(ahead), next(ahead)
    torch.cuda._sleep(2_000_000_000)  # about a second
    step = torch.cuda.Event()
    step.record()
    next(ahead)  # sends the fourth, which has nothing to wait for
    sent = ahead._reading[-1]
    sent.wait()
    assert not step.query()
    torch.cuda.synchronize()


@gpu
def test_images_that_are_on_the_gpu_already_are_normalised_there() -> None:
    pixels = pictures(4, (16, 16))
    (images,) = prefetch([pixels.cuda()], "cuda", mean=MEAN, std=STD)
    (same,) = prefetch([pixels], "cpu", mean=MEAN, std=STD)
    assert torch.equal(images.cpu(), same)


@gpu
def test_gaps_and_odd_layouts_are_copied_whole() -> None:
    wide = torch.arange(64).view(8, 8)
    batch = (wide[:, ::2], wide.t(), wide[:0], torch.eye(3).to_sparse(), torch.tensor(5))
    (found,) = prefetch([batch], "cuda")
    for there, here in zip(found, batch, strict=True):
        assert there.is_cuda and torch.equal(there.cpu().to_dense(), here.to_dense())


@gpu
def test_leaving_early_on_the_gpu_leaves_nothing() -> None:
    source = [(pictures(8, (64, 64)), torch.zeros(8)) for _ in range(10)]
    gc.collect()  # of tests before this one
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for batch in prefetch(source, "cuda", ahead=3):
        assert on_gpu(batch)
        break
    del batch
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() == before
