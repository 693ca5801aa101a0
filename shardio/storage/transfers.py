"""Many range requests of one process at once: retries, deadlines, hedges, adaptive concurrency.

How it works. Tasks wait in order, urgent ones first, and threads run them, as many at once as the
health of the transfers allows. A transfer that fails for a reason that passes is tried again, after
a pause that grows and is drawn by chance, until its time is over: its store's `timeout_s`. A
server that asks for fewer requests is heeded by all tasks: nothing is sent until a pause is over. A
transfer that takes longer than nearly all others before it gets a second request beside it; the
first answer counts.

Every failure, retry and second request is counted: see `Figures`.
"""

from __future__ import annotations

import heapq
import math
import random
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from .client import Reply, Request, RequestError, client, explain_failure

# Requests of a machine that run at once: at least, at first, at most. Its processes share them.
LEAST, FIRST, MOST = 4, 24, 64
UNKNOWN_S = 10.0  # of attempts, while nothing was read from that store: its address may be wrong
_PAUSES = (
    0.1,
    5.0,
)  # seconds before the first retry, and at most; each is drawn from half of it on
HEDGED = 0.02  # of the requests, at most, are second ones
# Second requests besides. Of a process that just began, 2 % are none, and what it waits for keeps
# it from sending more: one body that stalls then cost 10 s.
_HEDGED_FIRST, _STALLED = 4, 3.0  # so many, of transfers that take so many times as long as usual
_HEDGE_AT = 0.95  # the share of transfers that a second request waits for
_SAMPLES = 8  # transfers of which a time can be predicted
_KEPT = 128  # transfers that are remembered for it
SMALL = 1 << 20  # bytes: transfers below are predicted by each other, and so are those above
_SLOW = 4.0  # times the usual time of a transfer from which it counts as a failure
_DECREASE, _INCREASE = 0.7, 0.25  # of the limit after a failure; requests more after a success
_SETTLE_S = 1.0  # between two decreases


@dataclass
class Figures:
    """Count what the requests of a process came to.

    requests   that were sent, retries and second ones included
    bytes      that arrived, of answers that were used
    retries    by the kind of failure before them
    hedges     second requests beside a slow one; `won` of them answered first
    waited_s   seconds in which nothing was sent, because a server had asked for that
    limit      requests that may run at once now
    """

    requests: int = 0
    bytes: int = 0
    retries: Counter[str] = field(default_factory=Counter)
    hedges: int = 0
    won: int = 0
    waited_s: float = 0.0
    limit: float = 0.0


class _Task:
    """One request, until it is answered or given up."""

    __slots__ = (
        *("answered", "attempts", "begun", "future", "hedged", "request", "running", "started"),
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.future: Future[Reply] = Future()
        self.attempts = 0
        self.running = 0  # requests of it under way: 2 with a second one
        self.begun = 0.0  # when the first attempt began
        self.started = 0.0  # when the last one did
        self.hedged = False
        self.answered = False

    @property
    def small(self) -> bool:
        return self.request.length < SMALL


class Transfers:
    """Run requests, each as a Future of its Reply. Raises StorageError through them.

    consumers  processes of this machine that share its requests, this one included
    """

    def __init__(self, consumers: int = 1) -> None:
        self.figures = Figures()
        self._changed = threading.Condition(threading.Lock())
        self._waiting: list[tuple[bool, int, _Task]] = []  # a heap: urgent ones first
        self._later: list[tuple[float, int, _Task]] = []  # a heap, by time: retries
        self._active: set[_Task] = set()
        self._ready: SimpleQueue[_Task | None] = SimpleQueue()
        self._sequence = 0
        self._threads = 0
        self._idle = 0
        self._running = 0
        self._paused_until = 0.0
        self._decreased = -math.inf
        self._throttled = 0  # times in a row
        self._times: dict[bool, deque[float]] = {
            True: deque(maxlen=_KEPT),
            False: deque(maxlen=_KEPT),
        }
        self._reached: set[str] = set()  # stores that have answered
        self._closed = False
        self._clock: threading.Thread | None = None
        self.share(consumers)

    def share(self, consumers: int) -> None:
        """Take this process's part of the machine's requests."""
        with self._changed:
            self._least = max(1, LEAST // consumers)
            self._most = max(2, MOST // consumers)
            self.figures.limit = max(2, FIRST // consumers)

    def submit(self, request: Request, *, urgent: bool = False) -> Future[Reply]:
        """Send a request as soon as there is room. urgent: before all that are not."""
        task = _Task(request)
        with self._changed:
            self._push(task, urgent)
            self._dispatch()
            self._changed.notify_all()
        return task.future

    def close(self, wait_s: float = 1.0) -> bool:
        """Send nothing more. Returns True if no request is under way, after `wait_s` at most."""
        with self._changed:
            self._closed = True
            for _ in range(self._threads):
                self._ready.put(None)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._running, wait_s)

    # Below, `_changed` is held, but by _work.

    def _push(self, task: _Task, urgent: bool) -> None:
        self._sequence += 1
        heapq.heappush(self._waiting, (not urgent, self._sequence, task))

    def _dispatch(self) -> None:
        """Hand tasks to threads while there is room, and let the clock know of what is due."""
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            self._push(heapq.heappop(self._later)[2], True)
        paused = now < self._paused_until
        while self._waiting and not paused and not self._closed:
            if self._running >= max(self._least, min(self._most, int(self.figures.limit))):
                break
            task = heapq.heappop(self._waiting)[2]
            if not task.future.cancelled():
                self._send(task, now)
        if self._clock is None and not self._closed:
            self._clock = threading.Thread(target=self._tick, name="shardio-clock", daemon=True)
            self._clock.start()

    def _send(self, task: _Task, now: float) -> None:
        if not task.attempts:
            task.begun = now
        task.attempts += 1
        task.running += 1
        task.started = now
        self._active.add(task)
        self._running += 1
        self.figures.requests += 1
        if self._idle:
            self._idle -= 1
        else:
            self._threads += 1
            threading.Thread(target=self._work, name="shardio-request", daemon=True).start()
        self._ready.put(task)

    def _tick(self) -> None:
        """Wake what is due: retries, ends of a pause, second requests."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                self._hedge(now)
                self._dispatch()
                due = [self._later[0][0]] if self._later else []
                if now < self._paused_until:
                    due.append(self._paused_until)
                waits = 0.02 if self._active else None
                if due:
                    waits = min(max(min(due) - now, 0.001), waits or math.inf)
                self._changed.wait(waits)

    def _hedge(self, now: float) -> None:
        """Send a second request beside each that takes longer than nearly all before it."""
        for small in (True, False):
            times = self._times[small]
            if small and len(times) < _SAMPLES:
                times = self._times[False]  # longer: late by these is late
            if len(times) < _SAMPLES or now < self._paused_until:
                continue
            usual = sorted(times)
            middle = usual[len(usual) // 2]
            late = max(usual[int(_HEDGE_AT * (len(usual) - 1))], 2 * middle)
            for task in [t for t in self._active if t.small is small and not t.hedged]:
                more = self.figures.hedges + 1 - HEDGED * self.figures.requests
                if more > _HEDGED_FIRST:
                    return
                waits = late if more <= 0 else max(late, _STALLED * middle)
                if now - task.started > waits and task.running == 1:
                    task.hedged = True
                    self.figures.hedges += 1
                    self._send(task, now)

    def _work(self) -> None:
        while (task := self._ready.get()) is not None:
            request, start = task.request, time.monotonic()
            found: Reply | RequestError | BaseException
            hedge = task.hedged and task.running > 1
            try:
                found = client(request.store).send(request)
            except BaseException as error:
                found = error
            with self._changed:
                self._running -= 1
                task.running -= 1
                self._idle += 1
                answer = self._finish(task, found, time.monotonic() - start, hedge)
                self._dispatch()
                self._changed.notify_all()
            if isinstance(answer, Reply):  # not before: a callback may submit
                task.future.set_result(answer)
            elif answer is not None:
                task.future.set_exception(answer)
            del found, answer, task  # or an idle thread would keep the bytes

    def _finish(
        self, task: _Task, found: Any, took: float, hedge: bool
    ) -> Reply | BaseException | None:
        """Return the answer of a task, or None: another attempt follows, or nobody waits."""
        now = time.monotonic()
        if not task.running:
            self._active.discard(task)
        if task.answered or task.future.cancelled():
            return None  # the other request was first, or nobody wants it any more
        if isinstance(found, Reply):
            task.answered = True
            self._succeed(task, found, took, hedge, now)
            return found
        if not isinstance(found, RequestError):
            task.answered = True
            error: BaseException = found
            return error  # a missing package, an option
        if found.kind == "throttled":
            self._throttle(now)
        if found.transient and found.kind not in ("range", "helper"):
            self._decrease(now)
        if task.running:
            return None  # the other request is under way
        store = task.request.store
        limit_s = store.timeout_s if store.url in self._reached else UNKNOWN_S
        limit_s = min(limit_s, store.timeout_s)
        if found.transient and now - task.begun < limit_s and not self._closed:
            self.figures.retries[found.kind] += 1
            least, most = _PAUSES
            pause = min(most, least * 2 ** (task.attempts - 1)) * random.uniform(0.5, 1)
            task.hedged = False
            self._sequence += 1
            heapq.heappush(self._later, (now + pause, self._sequence, task))
            return None
        task.answered = True
        return explain_failure(task.request, found, task.attempts, now - task.begun)

    def _succeed(self, task: _Task, reply: Reply, took: float, hedge: bool, now: float) -> None:
        self._reached.add(task.request.store.url)
        self._throttled = 0
        times = self._times[task.small]
        if len(times) >= _SAMPLES and took > _SLOW * sorted(times)[len(times) // 2]:
            self._decrease(now)
        else:
            self.figures.limit = min(self._most, self.figures.limit + _INCREASE)
        times.append(took)
        self.figures.bytes += len(reply.data)
        self.figures.won += hedge

    def _throttle(self, now: float) -> None:
        """Send nothing for a while: longer each time, and not at the same time as others."""
        if now < self._paused_until:
            return  # asked before the pause began
        self._throttled += 1
        least, most = _PAUSES
        pause = min(most, 2 * least * 2**self._throttled) * random.uniform(0.5, 1)
        self._paused_until = now + pause
        self.figures.waited_s += pause

    def _decrease(self, now: float) -> None:
        if now - self._decreased >= _SETTLE_S:
            self._decreased = now
            self.figures.limit = max(self._least, self.figures.limit * _DECREASE)
