"""Ranges in flight: a budget that always comes back, and readers that let go at any moment."""

import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from support import LIMIT_S
from support.forging import in_child

from shardio.errors import StorageError
from shardio.storage import ranges
from shardio.storage.client import Reply, Request, Store
from shardio.storage.ranges import LEAST_IN_FLIGHT, Range, Ranges, ReleasedError
from shardio.storage.transfers import Figures

PIECE = LEAST_IN_FLIGHT // 4  # four of them fill the budget


class Sender:
    """Requests that are answered when the test says so."""

    heard = 0.0
    figures = Figures()

    def __init__(self) -> None:
        self.sent: list[tuple[Request, Future[Reply]]] = []
        self.before: Callable[[], None] = lambda: None

    def submit(self, request: Request, *, urgent: bool = False) -> Future[Reply]:
        self.before()
        future: Future[Reply] = Future()
        self.sent.append((request, future))
        return future

    def answer(self, number: int) -> None:
        request, future = self.sent[number]
        future.set_result(Reply(memoryview(bytes(8)), request.length, ""))

    def share(self, consumers: int) -> None: ...

    def restart(self) -> None: ...

    def close(self, wait_s: float = 0) -> bool:
        for _, future in self.sent:
            if not future.done():
                future.set_exception(StorageError("closed"))
        return True


@pytest.fixture
def sender() -> Sender:
    return Sender()


@pytest.fixture
def all_ranges(sender: Sender) -> Ranges:
    return Ranges(sender, consumers=1 << 20)  # the least budget


def piece(number: int) -> Request:
    return Request(Store("http://host/data"), "shard", number * PIECE, PIECE)


def within_limit(task: Callable[[], Any]) -> Any:
    """Run it in a thread: a deadlock is a failure, and not for ever."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(task()), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "it hangs"
    return found[0]


def test_what_is_announced_waits_for_room(sender: Sender, all_ranges: Ranges) -> None:
    wanted = [all_ranges.announce(piece(n)) for n in range(6)]
    assert len(sender.sent) == 4 and all_ranges.in_flight == LEAST_IN_FLIGHT
    sender.answer(0)
    assert wanted[0].wait().size == PIECE
    assert len(sender.sent) == 4  # read, but not let go of
    wanted[0].release()
    wanted[0].release()
    assert len(sender.sent) == 5 and all_ranges.in_flight == LEAST_IN_FLIGHT


def test_a_range_that_nobody_has_any_more_gives_its_room_back(
    sender: Sender, all_ranges: Ranges
) -> None:
    wanted: list[Range] = [all_ranges.announce(piece(n)) for n in range(6)]
    del wanted[:]
    assert all_ranges.in_flight == 0
    assert all(future.cancelled() for _, future in sender.sent)
    assert len(sender.sent) == 4  # what was not sent is not wanted
    kept = all_ranges.announce(piece(9))
    assert sender.sent[-1][0] == kept.request


def test_the_collector_may_come_while_the_lock_is_held(sender: Sender, all_ranges: Ranges) -> None:
    class Holder:
        def __init__(self) -> None:
            self.range, self.me = all_ranges.announce(piece(0)), self

    def collect() -> None:
        sender.before = lambda: None
        gc.collect()

    def run() -> int:
        Holder()
        sender.before = collect  # within `announce`
        last = all_ranges.announce(piece(1))
        return all_ranges.in_flight - last.request.length

    assert within_limit(run) == 0


def test_a_range_may_be_let_go_of_while_another_thread_waits(
    sender: Sender, all_ranges: Ranges
) -> None:
    wanted = all_ranges.announce(piece(0))
    outcome: list[str] = []

    def wait() -> None:
        try:
            wanted.wait()
        except ReleasedError:
            outcome.append("released")

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    wanted.release()
    waiting.join(LIMIT_S)
    assert outcome == ["released"]
    with pytest.raises(ReleasedError):
        wanted.wait()  # it is not sent again, for nobody would let go of it
    assert len(sender.sent) <= 1 and all_ranges.in_flight == 0


def test_an_answer_after_the_end_hurts_nobody(sender: Sender, all_ranges: Ranges) -> None:
    wanted = all_ranges.announce(piece(0))
    all_ranges.close()
    with pytest.raises(ReleasedError):
        wanted.wait()


def test_ranges_that_readers_left_behind_give_way(sender: Sender, all_ranges: Ranges) -> None:
    left = [all_ranges.announce(piece(n)) for n in range(4)]
    for number in range(4):
        sender.answer(number)
    wanted = [all_ranges.announce(piece(n)) for n in range(4, 40)]
    for number, one in enumerate(wanted):
        threading.Thread(target=one.wait, daemon=True).start()  # sends it, if nobody did
        while len(sender.sent) < 5 + number:
            pass
        sender.answer(4 + number)
        one.wait()
        one.release()
    assert all_ranges.in_flight <= LEAST_IN_FLIGHT
    with pytest.raises(ReleasedError):
        left[0].wait()
    ahead = [all_ranges.announce(piece(n)) for n in range(50, 54)]
    assert sum(one.request in [request for request, _ in sender.sent] for one in ahead) == 4


def test_a_kept_range_counts_until_it_has_arrived(sender: Sender, all_ranges: Ranges) -> None:
    wanted = [all_ranges.announce(piece(n)) for n in range(4)]
    later = all_ranges.announce(piece(5))
    wanted[0].keep()
    sender.answer(0)
    assert sender.sent[-1][0] == later.request
    assert wanted[0].wait().size == PIECE
    assert all_ranges.in_flight == LEAST_IN_FLIGHT


def test_share_is_heeded_at_once(sender: Sender) -> None:
    some = Ranges(sender, 1)
    assert some.budget == ranges.IN_FLIGHT
    some.share(4)
    assert some.budget == ranges.IN_FLIGHT // 4


def test_a_fork_shares_with_nobody_and_has_no_request_of_its_parent() -> None:
    """It reads by itself, and says anew how many read beside it."""
    ranges.share(4)
    try:
        parents = ranges.ranges()
        assert parents.budget == ranges.IN_FLIGHT // 4

        def child() -> None:
            assert ranges.figures() is None
            assert ranges.ranges() is not parents
            assert ranges.ranges().budget == ranges.IN_FLIGHT

        assert in_child(child) == 0
        assert ranges.ranges() is parents and parents.budget == ranges.IN_FLIGHT // 4
    finally:
        ranges.share(1)
        ranges.close()
