"""A loader process: its errors, signals and forks, and what it draws."""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.loading import (
    COUNTS,
    ONE_OF_EACH,
    Packed,
    Raises,
    Thing,
    Workers,
    expected_of,
    labels,
    loader_of,
    number,
    picture,
    pictures,
    pool_of,
    stream,
)

from shardio import EpochError, ShardDataset, ShardLoader, WorkerError
from shardio.errors import RowError
from shardio.loader import batch_builder


def draws(data: bytes) -> Any:
    """What Python, numpy and torch draw, as a transform of the user's might."""
    return np.array([random.random(), np.random.random(), torch.rand(1).item()])


def test_transforms_draw_others_in_each_process_and_epoch_and_the_same_in_each_run(
    packed: Packed,
) -> None:
    def run(seed: int) -> Any:
        torch.manual_seed(seed)
        dataset = stream(packed([32]), fields=("image",), decode=draws, shuffle=False)
        with ShardLoader(dataset, num_workers=2) as loader:
            found = []
            for epoch in range(2):
                loader.set_epoch(epoch)
                found.append(torch.cat([batch[0] for batch in loader]))
            return torch.cat(found)

    with torch.random.fork_rng():
        first, again, other = run(3), run(3), run(4)
    assert torch.equal(first, again) and not (first == other).any()
    for column in first.T:
        assert len(set(column.tolist())) == 64


class TwoArgumentsError(Exception):
    """As some libraries have them: pickle cannot make it again."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} with code {code}")


class QuotingError(Exception):
    """Says more than it is given: again, of its own text, it would say it twice."""

    def __init__(self, what: str, *, code: int = 0) -> None:
        super().__init__(f"cannot read {what} ({code})")
        self.code = code


class KeywordError(Exception):
    def __init__(self, *, why: str) -> None:
        super().__init__(f"failed: {why}")


class GuardedError(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class TrainerOnlyError(Exception):
    """Made again only where it was raised."""

    home = os.getpid

    def __reduce__(self) -> Any:
        return _make_again, (os.getpid(), str(self))


def _make_again(pid: int, text: str) -> TrainerOnlyError:
    if os.getpid() != pid:
        raise LookupError("not here")
    return TrainerOnlyError(text)


RAISED: dict[str, tuple[BaseException, bool]] = {  # and whether it can be passed on as it is
    "plain": (ValueError("no cat"), True),
    "no text": (KeyError(), True),
    "two arguments": (TwoArgumentsError("it failed", 7), True),
    "its text made of others": (QuotingError("a file", code=5), True),
    "keywords": (KeywordError(why="so"), True),
    "text with an address": (ValueError(Thing(())), True),
    "not to be pickled": (GuardedError("a lock in it"), False),
    "not to be made again": (TrainerOnlyError("only there"), False),
    "system": (FileNotFoundError(2, "No such file", "/nowhere"), True),
}


@ONE_OF_EACH
@pytest.mark.parametrize(("error", "passes"), RAISED.values(), ids=RAISED.keys())
def test_what_a_transform_raises_comes_with_the_record_named(
    folder: Path, error: BaseException, passes: bool, workers: Workers
) -> None:
    order = labels(pictures(folder))
    target, step = order[3][5], 3
    dataset = pictures(folder, decode=Raises(target, error))
    with loader_of(dataset, workers) as loader:
        pids: list[int] = []
        for _ in range(2):  # it is raised again, and the processes are still the same
            loader.set_epoch(0)
            iterator, got = iter(loader), []
            with pytest.raises((type(error), WorkerError)) as caught:
                while True:
                    got += labels([next(iterator)])
            assert got == order[:step]
            named = f"k/{target:06}.jpg"
            if passes or not workers[0]:
                assert type(caught.value) is type(error) and caught.value.args == error.args
                assert getattr(caught.value, "code", None) == getattr(error, "code", None)
                cause = caught.value.__cause__
                assert type(cause) is RowError and named in str(cause)
                if workers[0]:
                    assert "loader process" in str(cause) and "in __call__" in str(cause)
            else:
                assert type(error).__name__ in str(caught.value) and str(error) in str(caught.value)
                assert named in str(caught.value) and "loader process" in str(caught.value)
            with pytest.raises((type(error), WorkerError, EpochError)):
                next(iterator)  # and never StopIteration, as if the epoch were over
            assert loader.explain().pids == (pids or loader.explain().pids)
            pids = loader.explain().pids
        loader.set_epoch(0)
        ok = [next(it) for it in [iter(loader)] for _ in range(step)]
        assert labels(ok) == order[:step]


# What is no Exception: it would end the training as if it were done.
SILENT: dict[str, BaseException] = {
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt("of a transform"),
    "generator": GeneratorExit(),
    "own": type("Own", (BaseException,), {})("a base of its own"),
}


@pytest.fixture(autouse=True)
def no_error_keeps_a_dataset() -> Iterator[None]:
    """Takes from errors that tests share where they were raised: that holds what was open there."""
    yield
    for error in [*SILENT.values(), *(error for error, _ in RAISED.values())]:
        error.__traceback__ = error.__cause__ = error.__context__ = None


@pytest.mark.parametrize(
    "workers", [(0, 1), (0, 2), (2, 1), (2, 2)], ids=lambda c: f"{c[0]}x{c[1]}"
)
@pytest.mark.parametrize("error", SILENT.values(), ids=SILENT.keys())
def test_what_is_no_exception_is_an_error_that_names_the_record(
    folder: Path, error: BaseException, workers: Workers
) -> None:
    order = labels(pictures(folder))
    target = order[3][5]
    dataset = pictures(folder, decode=Raises(target, error))
    with loader_of(dataset, workers) as loader:
        for _ in range(2):  # the processes stay
            loader.set_epoch(0)
            got, iterator = [], iter(loader)
            with pytest.raises(WorkerError) as caught:
                for batch in iterator:
                    got += labels([batch])
            assert got == order[:3]
            text = str(caught.value)
            assert f"k/{target:06}.jpg" in text and type(error).__name__ in text
            cause = caught.value.__cause__
            assert "loader process" in str(cause) if workers[0] else type(cause) is type(error)
            with pytest.raises((WorkerError, EpochError)):
                next(iterator)


class WordlessError(BaseException):
    def __repr__(self) -> str:
        raise LookupError("no words")


class EndsError(Exception):
    def __reduce__(self) -> Any:
        os._exit(7)


@pytest.mark.parametrize("workers", [(0, 1), (1, 1)], ids=["0x1", "1x1"])
def test_an_error_that_has_no_words_or_ends_its_process_is_told(
    folder: Path, workers: Workers
) -> None:
    cases: list[tuple[BaseException, str]] = [
        (WordlessError(), r"k/000007\.jpg: decode or a transform raised WordlessError, which"),
        (EndsError(), r"exit code 7, while it was at .*k/000007\.jpg"),
    ]
    for error, said in cases[: 1 + workers[0]]:
        dataset = pictures(folder, decode=Raises(7, error))
        with loader_of(dataset, workers) as loader, pytest.raises(WorkerError, match=said):
            list(loader)


@pytest.mark.parametrize("workers", [(0, 1), (1, 1)], ids=["0x1", "1x1"])
@pytest.mark.parametrize("error", SILENT.values(), ids=SILENT.keys())
def test_what_is_no_exception_of_a_collate_fn_or_in_a_mixture(
    packed: Packed, error: BaseException, workers: Workers
) -> None:
    folder, other = packed(COUNTS), packed([16], "other")

    def collate(samples: list[Any]) -> Any:
        raise error

    mixed = ShardDataset.mix([pictures(other), pictures(folder, decode=Raises(7, error))])
    for dataset, where in (
        (pictures(folder, collate_fn=collate), "collate_fn raised"),
        (mixed, "k/000007.jpg: decode or a transform raised"),
    ):
        with (
            loader_of(dataset, workers) as loader,
            pytest.raises(WorkerError, match=f"{where} {type(error).__name__}"),
        ):
            list(loader)


def test_handlers_of_the_trainer_are_not_for_its_processes(folder: Path) -> None:
    """What saves a checkpoint when the scheduler sends a signal to all would do so in each."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    before = {one: signal.signal(one, lambda *_: os._exit(9)) for one in numbers}
    try:
        dataset = pictures(folder)
        with ShardLoader(dataset, num_workers=1, prefetch_factor=1) as loader:
            iterator = iter(loader)
            got = [next(iterator)]
            (pid,) = loader.explain().pids
            for one in numbers[1:]:
                os.kill(pid, one)
            got += iterator
            assert labels(got) == labels(pictures(folder))
            os.kill(pid, signal.SIGTERM)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            loader.set_epoch(1)
            with pytest.raises(WorkerError, match="was killed by SIGTERM"):
                list(loader)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


class Forks:
    """Forks at one record. In mid-transform: `child` is what the child does there."""

    def __init__(
        self,
        target: int,
        child: Callable[[], None],
        then: Callable[[], None],
        first: Callable[[], None] = lambda: None,
    ) -> None:
        self.target, self.child, self.then, self.first = target, child, then, first

    def __call__(self, data: bytes) -> Any:
        if number(data) == self.target:
            self.first()
            if os.fork() == 0:
                self.child()
            else:
                self.then()
        return picture(data)


@pytest.mark.parametrize("kept", [False, True], ids=["forked", "forked with its socket"])
def test_a_process_that_dies_is_noticed_whatever_it_forked(folder: Path, kept: bool) -> None:
    order = labels(pictures(folder))
    gate = os.pipe()

    def stay() -> None:
        os.read(gate[0], 1)
        os._exit(0)

    def fork() -> None:
        if kept:  # as a program does that was started with close_fds=False
            for name in os.listdir("/proc/self/fd"):
                with suppress(OSError):
                    os.dup(int(name))

    forks = Forks(order[1][2], stay, lambda: os.kill(os.getpid(), signal.SIGKILL), fork)
    with ShardLoader(pictures(folder, decode=forks), num_workers=1) as loader:
        got = []
        with pytest.raises(WorkerError, match=r"was killed by SIGKILL.*at record"):
            for batch in loader:
                got += labels([batch])
        assert got == order[:1]
    os.write(gate[1], b".")
    for end in gate:
        os.close(end)


def test_a_pass_that_is_left_ends_within_a_batch(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_builder, "LISTEN_S", 0.0)  # ask before each row
    said, gate = os.pipe(), os.pipe()

    def decode(data: bytes) -> int:
        os.write(said[1], data[4:6])
        os.read(gate[0], 1)
        return 0

    dataset = ShardDataset(
        packed([30]), batch_size=30, fields=("image",), decode=decode, shuffle=False
    )
    with ShardLoader(dataset, num_workers=1) as loader:
        first = iter(loader)
        assert os.read(said[0], 2) == b"00"
        batches = iter(loader)  # ends the first pass, in whose first row the process is
        os.write(gate[1], b"." * 200)
        next(batches)
        seen = b"".join(os.read(said[0], 2) for _ in range(30))
        assert seen == b"".join(b"%02d" % row for row in range(30))
        with pytest.raises(EpochError):
            next(first)
    for end in (*said, *gate):
        os.close(end)


def test_a_child_that_comes_back_from_a_transform_sends_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    order = labels(pictures(folder))

    def wait() -> None:
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 1

    forks = Forks(order[1][2], lambda: None, wait)
    with ShardLoader(pictures(folder, decode=forks), num_workers=1) as loader:
        assert labels(loader) == order
    assert "handle is closed" in capfd.readouterr().err


def test_a_transform_that_hangs_does_not_keep_its_process(folder: Path) -> None:
    never = threading.Event()

    def hangs(data: bytes) -> Any:
        never.wait()

    loader = ShardLoader(pictures(folder, decode=hangs), num_workers=1)
    iter(loader)
    (process,) = (one.process for one in pool_of(loader)._all)
    loader.close()
    assert process.exitcode == 0


def test_ctrl_c_is_not_for_loader_processes(folder: Path) -> None:
    with ShardLoader(pictures(folder), num_workers=2) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            got = []
            for batch in loader:
                got += labels([batch])
                for pid in loader.explain().pids:
                    os.kill(pid, signal.SIGINT)
            assert got == expected_of(folder, epoch)
