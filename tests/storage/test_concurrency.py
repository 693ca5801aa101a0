"""How many requests run at once, in front of simulated stores: what a link carries, and no more."""

import random

import pytest

from shardio.storage.concurrency import FIRST, LEAST, MOST, Limit, parts

SIZE = 8 << 20

TICK_S = 0.005


class Simulated:
    """Processes that read from a store: each as many ranges at once as its limit allows.

    a_request  bytes a second of a request, at most, drawn anew for each: up to `spread` times as
               many, or as few
    in_all     bytes a second of all that run
    """

    def __init__(
        self,
        *,
        a_request: float = 40e6,
        in_all: float = 1e12,
        spread: float = 1.2,
        size: int = SIZE,
        processes: int = 1,
    ) -> None:
        self.a_request, self.in_all, self.spread, self.size = a_request, in_all, spread, size
        self.now, self.sent = 0.0, 0
        self.limits = [Limit(processes) for _ in range(processes)]
        self.draw = random.Random(1)
        # Of each process, of each request: when it began, its rate, the bytes that are missing.
        self.running: list[list[list[float]]] = [[] for _ in range(processes)]

    @property
    def allowed(self) -> int:
        return sum(limit.allowed for limit in self.limits)

    def run(self, seconds: float) -> float:
        """Let requests run. Returns the bytes a second that came."""
        sent, until = self.sent, self.now + seconds
        while self.now < until:
            self.now += TICK_S
            for limit, running in zip(self.limits, self.running, strict=True):
                while len(running) < limit.allowed:
                    rate = self.a_request * self.spread ** self.draw.uniform(-1, 1)
                    running.append([self.now, rate, self.size])
            there = [one for running in self.running for one in running]
            moving = [one for one in there if self.now - one[0] > 0.05]  # to the first byte
            part = min(1.0, self.in_all / max(1.0, sum(rate for _, rate, _ in moving)))
            for one in moving:
                one[2] -= one[1] * part * TICK_S
            for limit, running in zip(self.limits, self.running, strict=True):
                for one in [one for one in running if one[2] <= 0]:
                    full = len(running) >= limit.allowed
                    running.remove(one)
                    self.sent += self.size
                    limit.answer(self.now - one[0], self.size, full=full)
        return (self.sent - sent) / seconds


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("spread", [1.2, 2.0])
def test_a_link_is_filled_and_no_more_requests_run_than_that_takes(
    processes: int, spread: float
) -> None:
    """8 requests fill it: where 64 ran, each would take 8 times as long."""
    link = Simulated(in_all=300e6, spread=spread, processes=processes)
    link.run(2)
    assert link.run(20) > 0.95 * 300e6
    assert 8 <= link.allowed <= 40


@pytest.mark.parametrize("size", [SIZE, 100_000])
@pytest.mark.parametrize("processes", [1, 2, 16])
@pytest.mark.parametrize("spread", [1.2, 2.0, 3.0])
def test_a_store_without_a_limit_is_asked_as_often_as_allowed(
    processes: int, spread: float, size: int
) -> None:
    store = Simulated(spread=spread, processes=processes, size=size)
    assert store.allowed == max(FIRST, 2 * processes)
    store.run(8)
    assert store.allowed > 0.9 * MOST
    store.run(8)
    assert store.allowed > 0.9 * MOST


def test_a_store_that_becomes_slower_is_asked_as_often_again() -> None:
    store = Simulated(spread=1.5, processes=2)
    store.run(10)
    store.a_request /= 4
    least = MOST
    for _ in range(50):
        store.run(1)
        least = min(least, store.allowed)
    assert MOST / 2 <= least < MOST  # it might have been a link, and half of them enough
    assert store.allowed == MOST


def test_a_link_that_becomes_slower_is_asked_less_and_less() -> None:
    link = Simulated(in_all=1500e6)
    link.run(10)
    before = link.allowed
    assert before > 35
    link.in_all = 150e6
    link.run(160)
    assert link.allowed < before / 2
    assert link.run(20) > 0.95 * 150e6


def test_nothing_is_learned_of_places_that_nobody_takes() -> None:
    limit = Limit(1)
    for _ in range(100):
        limit.answer(0.25, SIZE, full=False)
    assert limit.allowed == FIRST


def test_a_failure_takes_a_part_away_once_a_second() -> None:
    limit = Limit(1)
    limit.fail(10.0)
    limit.fail(10.9)
    assert limit.allowed == int(0.7 * FIRST)
    for now in range(20, 40):
        limit.fail(now)
    assert limit.allowed == LEAST


def grown(limit: Limit, answers: int) -> Limit:
    for _ in range(answers):
        limit.answer(0.25, SIZE, full=True)
    return limit


def test_who_asks_for_fewer_gets_one_and_then_half() -> None:
    limit = grown(Limit(1), 24)
    assert limit.allowed == FIRST + 24
    limit.throttle(again=False)
    assert limit.allowed == 1
    limit.throttle(again=True)  # of one it is not half
    limit.resume()
    assert limit.allowed == (FIRST + 24) // 2


@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize("times", [1.0, 1.6, 3.0])
def test_what_was_lost_comes_back_from_a_store_that_is_slower_now(
    processes: int, times: float
) -> None:
    """As one is that asks for fewer requests."""
    limit = grown(Limit(processes), 200)
    before = limit.allowed
    limit.throttle(again=False)
    limit.throttle(again=True)
    for _ in range(before // 2):
        limit.answer(0.25 * times, SIZE, full=True)
    assert limit.allowed >= 0.8 * (before // 2)
    for now in range(20):
        limit.fail(2.0 * now)
    least = limit.allowed
    assert least < parts(processes)[1]
    for _ in range(4 * MOST):
        limit.answer(0.25 * times, SIZE, full=True)
    assert limit.allowed >= parts(processes)[1]


@pytest.mark.parametrize("how", ["throttle", "fail"])
def test_what_was_known_before_raises_nothing_after_a_failure(how: str) -> None:
    limit = grown(Limit(1), 200)
    while limit.allowed == MOST:  # until answers are seen to take longer
        limit.answer(0.6, SIZE, full=True)
    for now in range(20):
        if how == "fail":
            limit.fail(2.0 * now)
        else:
            limit.throttle(again=now > 0)
    for _ in range(500):
        before = limit.allowed
        limit.answer(0.6, SIZE, full=True)
        assert limit.allowed <= before + 1


def test_half_of_before_is_not_more_than_may_run_now() -> None:
    limit = grown(Limit(1), 200)
    limit.throttle(again=False)
    limit.share(16)
    limit.resume()
    assert limit.allowed == parts(16)[2]


def test_processes_share_the_requests_of_a_machine() -> None:
    assert parts(1) == (LEAST, FIRST, MOST)
    assert parts(4) == (1, 2, 16)
    assert parts(1000) == (1, 2, 2)
    limit = Limit(1)
    for _ in range(8):
        limit.answer(0.25, SIZE, full=True)
    limit.share(4)
    assert limit.allowed == 2 * FIRST // 4
    limit.share(1)
    assert limit.allowed == 2 * FIRST


def test_a_store_of_two_speeds_is_asked_often() -> None:
    """A part of the answers comes from a cache on the way, by chance many in a row."""
    store, draw = Simulated(processes=4), random.Random(3)
    for _ in range(200):
        store.a_request = 200e6 if draw.random() < 0.1 else 40e6
        store.run(0.5)
    assert store.allowed > MOST / 2
