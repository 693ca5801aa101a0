"""Worker honesty: killed workers, Ctrl-C, errors that cross processes.

A killed worker is an error in the parent, and nothing of it stays: no process, no descriptor, no
file in shared memory. The workers kill themselves at a record, in step with the parent, so that
each moment is the same on every machine.
"""

import os
import random
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support import LIMIT_S, programs, worker_programs
from support.leftovers import nothing_left, of_killed_workers
from support.programs import Program
from support.small_datasets import flip, payload, shard_files
from support.worker_programs import (
    BATCH,
    COUNTS,
    STEPS,
    WORKERS,
    N,
    Wait,
    decode,
    images,
    loading,
    numbers,
    passing,
)
from torch.utils.data import DataLoader

import shardio
from shardio import CollateError, DamageError, DecodeError, ShardDataset, StorageError

Packed = Callable[..., Path]
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# --- what is no Exception -------------------------------------------------------------------


@dataclass
class Raises:
    target: int
    error: BaseException

    def __call__(self, data: bytes) -> torch.Tensor:
        if int(data[:6]) == self.target:
            raise self.error
        return decode(data)

    def collate(self, samples: list[Any]) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), KeyboardInterrupt()], ids=repr)
def test_what_is_no_exception_comes_through_dataloader_with_the_record_named(
    packed: Packed, error: BaseException
) -> None:
    folder = packed(COUNTS)
    order = [numbers(batch) for batch in images(folder)]
    target = order[3][5]
    loader: Any = DataLoader(
        images(folder, decode=Raises(target, error)),
        batch_size=None,
        num_workers=WORKERS,
    )
    iterator, got = iter(loader), []
    where = rf"record {target:,} of the dataset, k/{target:06}\.jpg, in worker 1.*{error!r:.10}"
    with pytest.raises(shardio.WorkerError, match=where.replace("(", r"\(")):
        while True:
            got.append(numbers(next(iterator)))
    assert got == order[:3]
    with pytest.raises(shardio.WorkerError):  # no end of the epoch
        while True:
            next(iterator)


def test_what_is_no_exception_of_a_collate_fn_comes_through_dataloader(packed: Packed) -> None:
    collate = Raises(0, SystemExit(3)).collate
    loader: Any = DataLoader(
        images(packed(COUNTS), collate_fn=collate), batch_size=None, num_workers=1
    )
    with pytest.raises(shardio.WorkerError, match=r"collate_fn raised SystemExit\(3\)"):
        list(loader)


# --- killed workers -------------------------------------------------------------------------


class Suicide(Wait):
    """As Wait, and then its process ends."""

    def __call__(self, number: int) -> None:
        super().__call__(number)
        if number == self.target:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Decode:
    before: Suicide

    def __call__(self, data: bytes) -> torch.Tensor:
        self.before(int(data[:6]))
        return decode(data)


@dataclass
class Collate:
    before: Suicide

    def __call__(self, samples: list[Any]) -> Any:
        for (image,) in samples:
            self.before(int(image[0, 0, 0]))
        return shardio.collate(samples)


@dataclass(frozen=True)
class Moment:
    method: str
    persistent: bool
    place: str  # init: a worker starts. record: before it is decoded. collate: before batching it
    step: int  # of the batch that is never made
    row: int

    def __str__(self) -> str:
        kept = "persistent" if self.persistent else "new"
        return f"{self.method}-{kept}-{self.place}-{self.step}-{self.row}"


def moments(seed: int, count: int, methods: list[str]) -> list[Moment]:
    """The first and the last, and some between."""
    draw = random.Random(seed)
    found = []
    for i in range(count):
        step = (0, STEPS - 1, draw.randrange(1, STEPS - 1))[min(i, 2)]
        place = draw.choice(["record", "record", "collate"]) if i else "init"
        row = draw.randrange(BATCH if step < STEPS - 1 else N % BATCH or BATCH)
        found.append(Moment(methods[i % len(methods)], draw.random() < 0.5, place, step, row))
    return found


def kill_at(moment: Moment, folder: Path, gate: Path) -> None:
    expected = [numbers(batch) for batch in images(folder)]
    assert len(expected) == STEPS
    os.mkfifo(gate)
    permission = os.open(gate, os.O_RDWR)  # both ends, so that neither waits for the other
    suicide = Suicide(expected[moment.step][moment.row], str(gate))
    options: dict[str, Any] = {"decode": Decode(suicide)} if moment.place == "record" else {}
    if moment.place == "collate":
        options = {"collate_fn": Collate(suicide)}
    init = Suicide(moment.step % WORKERS, str(gate)) if moment.place == "init" else None
    loader = DataLoader(
        images(folder, **options),
        batch_size=None,
        num_workers=WORKERS,
        multiprocessing_context=moment.method,
        persistent_workers=moment.persistent,
        worker_init_fn=init,
    )
    iterator = iter(loader)
    pid = iterator._workers[moment.step % WORKERS].pid
    # All that this worker sent is here, then, so that it holds no lock of the queue that it dies
    # with, and no tensor is on its way.
    got = [numbers(next(iterator)) for _ in range(moment.step)]
    with pytest.raises(RuntimeError, match=rf"DataLoader worker \(pid(\(s\))? {pid}\)"):
        os.write(permission, b"!")  # from here on torch raises, wherever this process is
        next(iterator)
    assert got == expected[: moment.step]
    os.close(permission)


FORKED, SPAWNED = moments(1, 6, ["fork"]), moments(2, 2, ["spawn"])


@of_killed_workers
@pytest.mark.parametrize(
    "moment",
    [*FORKED, SPAWNED[1], pytest.param(SPAWNED[0], marks=pytest.mark.slow)],
    ids=str,
)
def test_a_killed_worker_is_an_error_and_leaves_nothing(
    packed: Packed, tmp_path: Path, moment: Moment
) -> None:
    folder = packed(COUNTS)
    with nothing_left():
        kill_at(moment, folder, tmp_path / "gate")


@of_killed_workers
@pytest.mark.stress
@pytest.mark.parametrize("moment", moments(3, 60, ["fork", "fork", "spawn"]), ids=str)
def test_workers_killed_at_many_moments(packed: Packed, tmp_path: Path, moment: Moment) -> None:
    folder = packed(COUNTS)
    with nothing_left():
        kill_at(moment, folder, tmp_path / "gate")


@of_killed_workers
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.stress)])
def test_a_persistent_worker_killed_between_epochs_is_an_error(packed: Packed, method: str) -> None:
    folder = packed(COUNTS)

    def kill_between() -> None:
        dataset = images(folder)
        loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=WORKERS,
            persistent_workers=True,
            multiprocessing_context=method,
        )
        assert len(list(loader)) == STEPS
        dataset.set_epoch(1)
        pid = loader._iterator._workers[1].pid
        with pytest.raises(RuntimeError, match=rf"\(pid(\(s\))? {pid}\)"):
            os.kill(pid, signal.SIGKILL)
            list(loader)

    with nothing_left():
        kill_between()


def kill_workers(folder: Path, method: str, seed: int, count: int) -> None:
    """Kill workers whatever they are doing; the program checks what came before the error."""
    done = programs.run(
        *(worker_programs.__file__, "kill", folder, method, f"{seed}", f"{count}"),
        limit_s=2 * LIMIT_S + count * 5,  # 5 s: torch waits as long for a worker that does not end
        warm=True,
    )
    assert done.code == 0 and not done.timed_out and not done.left, str(done)
    outcomes = re.findall(r"(\w+)\.$", done.output, re.MULTILINE)
    assert len(outcomes) >= count and "RuntimeError" in outcomes


def test_a_worker_killed_while_it_works_is_an_error_after_right_batches(packed: Packed) -> None:
    kill_workers(packed(COUNTS), "fork", 4, 10)


@pytest.mark.stress
@pytest.mark.parametrize("method, count", [("fork", 300), ("spawn", 20)])
def test_many_workers_killed_while_they_work(packed: Packed, method: str, count: int) -> None:
    kill_workers(packed(COUNTS), method, 5, count)


@pytest.mark.stress
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_do_not_outlive_a_killed_trainer(packed: Packed, method: str) -> None:
    before = programs.shared_memory()
    program = Program(
        *(worker_programs.__file__, "train", packed(COUNTS), method, "persistent"), limit_s=LIMIT_S
    )
    came = program.read_until("epoch 2 step 3.")
    program.kill()
    done = program.finish()
    assert came and done.code == -signal.SIGKILL and not done.left and not done.timed_out, str(done)
    assert not programs.left_in_memory(before)


# --- Ctrl-C ---------------------------------------------------------------------------------

CTRL_C = [
    ("none", "new", "terminal", "epoch 0 step 5."),
    ("fork", "new", "terminal", "epoch 0 step 0."),
    ("fork", "persistent", "group", "epoch 1 step 7."),
    pytest.param(*("spawn", "persistent", "terminal", "epoch 1 step 12."), marks=pytest.mark.slow),
]


def ctrl_c(folder: Path, method: str, kept: str, how: str, after: str) -> None:
    before = programs.shared_memory()
    epoch, step = (int(word) for word in re.findall(r"\d+", after))
    last = f"epoch {epoch} step {min(step + 2, STEPS - 1)}."
    program = Program(
        *(worker_programs.__file__, "train", folder, method, kept, last),
        limit_s=LIMIT_S,
        terminal=how == "terminal",
    )
    came = program.read_until(after)
    if how == "terminal":
        program.type(b"\x03")
    else:
        program.interrupt()
    done = program.finish()
    assert came and not done.timed_out and not done.left, str(done)
    # Python ends by the signal, so that a shell's loop around it ends too.
    assert done.code == -signal.SIGINT, str(done)
    assert done.output.split()[-1].rstrip(":") == "KeyboardInterrupt", str(done)
    # One of the trainer. Where Ctrl-C meets torch or Python handing over a tensor, or ending, their
    # threads and exit functions may say so as well; shardio's code is in none of that.
    known = done.output.count("KeyboardInterrupt") + done.output.count("resource_sharer")
    assert done.output.count("Traceback (most recent call last)") <= known, str(done)
    assert not programs.left_in_memory(before)


@pytest.mark.parametrize("method, kept, how, after", CTRL_C)
def test_ctrl_c_ends_a_training(
    packed: Packed, method: str, kept: str, how: str, after: str
) -> None:
    ctrl_c(packed(COUNTS), method, kept, how, after)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(24))
def test_ctrl_c_ends_a_training_at_many_moments(packed: Packed, seed: int) -> None:
    draw = random.Random(seed)
    after = f"epoch {draw.randrange(4)} step {draw.randrange(STEPS)}."
    method, kept = draw.choice(["fork", "spawn"]), draw.choice(["new", "persistent"])
    ctrl_c(packed(COUNTS), method, kept, draw.choice(["terminal", "group"]), after)


# --- errors ---------------------------------------------------------------------------------


class UsersError(Exception):
    """What a user's transform raises."""


class TwoPartError(Exception):
    """It cannot be made of one message; torch then raises a RuntimeError with its text."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")


def own_error(data: bytes) -> Any:
    raise UsersError("not liked: " + "käse {0} %s\n" * 40 + "the end")


def two_part_error(data: bytes) -> Any:
    raise TwoPartError("here", "something")


def missing_key(data: bytes) -> Any:
    return {}["no such key"]


def broken_image(data: bytes) -> Any:
    raise DecodeError("these bytes are no image")


def odd_samples(samples: list[Any]) -> Any:
    return shardio.collate([*samples, (1, 2, 3)])


def damage(folder: Path) -> None:
    path = shard_files(folder)[2]
    flip(path, path.read_bytes().index(payload(30)) + 1)


def forbid(folder: Path) -> None:
    for path in shard_files(folder):
        path.unlink()
        path.mkdir()


@dataclass
class Trouble:
    error: type[Exception]
    options: dict[str, Any]
    harm: Callable[[Path], None] | None = None


TROUBLES = {
    "DamageError": Trouble(DamageError, {}, damage),
    "StorageError": Trouble(StorageError, {}, forbid),
    "DecodeError": Trouble(DecodeError, {"decode": broken_image}),
    "CollateError": Trouble(CollateError, {"collate_fn": odd_samples}),
    "UsersError": Trouble(UsersError, {"decode": own_error}),
}


def error_of(dataset: ShardDataset, **options: Any) -> tuple[type[BaseException], str]:
    loader = DataLoader(dataset, batch_size=None, **options)
    with passing(loader) as one, pytest.raises(Exception) as caught:
        list(one)
    return caught.type, str(caught.value)


@pytest.mark.parametrize(
    "name, method",
    [
        *((name, "fork") for name in TROUBLES),
        pytest.param("UsersError", "spawn", marks=pytest.mark.stress),
    ],
)
def test_errors_keep_type_and_full_message(packed: Packed, name: str, method: str) -> None:
    folder, trouble = packed(COUNTS), TROUBLES[name]
    if trouble.harm is not None:
        trouble.harm(folder)
    with nothing_left():
        here, message = error_of(images(folder, **trouble.options))
        there, whole = error_of(
            images(folder, **trouble.options), num_workers=1, multiprocessing_context=method
        )
    assert here is there is trouble.error
    assert message and message in whole
    assert "in DataLoader worker process 0" in whole


def test_other_errors_of_users_keep_their_message(packed: Packed) -> None:
    folder = packed(COUNTS)
    kind, message = error_of(images(folder, decode=missing_key), num_workers=1)
    assert kind is KeyError and "no such key" in message
    kind, message = error_of(images(folder, decode=two_part_error), num_workers=1)
    assert kind is RuntimeError and "TwoPartError: here: something" in message


def test_persistent_workers_that_raised_serve_the_next_pass(packed: Packed) -> None:
    folder = packed(COUNTS)
    dataset, loader, (expected, _) = loading(folder, "persistent")
    path = shard_files(folder)[2]
    intact = path.read_bytes()
    damage(folder)
    with passing(loader) as one:
        with pytest.raises(DamageError, match="record 7 at byte"):
            list(one)
        path.write_bytes(intact)
        dataset.set_epoch(0)
        assert [numbers(batch) for batch in loader] == expected
