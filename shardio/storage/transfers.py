"""Many range requests of one process at once: retries, deadlines, and second requests.

How it works. Tasks wait in order, urgent ones first, and threads run them, as many at once as their
store's limits allow (`concurrency`); stores do not wait for each other. A transfer that fails for a
reason that passes is tried again, after a pause that grows and is drawn by chance, until its time
is over: its store's `timeout_s`. The same time counts for tasks that only wait, while nothing
succeeds. A transfer that takes longer than nearly all others before it gets a second request beside
it, and a third one where that is slow, too; the first answer counts.

A server that asks for fewer requests (429, 503) is heeded by all tasks of its store: nothing is
sent until a pause is over, and then few requests at first. How long the pause is, the server may
say (`retry_after`); else it grows.

Every failure, retry and second request is counted: see `Figures`.
"""

from __future__ import annotations

import heapq
import math
import operator
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from ..errors import StorageError
from ..units import show_count
from . import concurrency, retry_after
from .client import Reply, Request, RequestError, client, explain_failure
from .concurrency import FIRST_SMALL, Limit
from .retry_after import Asked
from .stores import without_secrets

Waits = Callable[[str], None] | None

UNKNOWN_S = 10.0  # of attempts, while nothing was heard of that store: its address may be wrong
# Seconds before the first retry, and at most; each is drawn from half of it on.
_SHORTEST_S, _LONGEST_S = 0.1, 5.0
LONGEST_PAUSE_S = 60.0  # that a server may ask for
HEDGED = 0.02  # of the requests, at most, are second ones
_HEDGE_AT = 0.95  # the share of transfers that a second request waits for
# Second requests besides. Of a process that just began, 2 % are none, and what it waits for keeps
# it from sending more: one body that stalls then cost 10 s.
_HEDGED_FIRST, _STALLED = 4, 3.0  # so many, of transfers that take so many times as long as usual
_BESIDE = 2  # such requests of one transfer: a second one may stall, too
_SAMPLES = 8  # transfers of which a time can be predicted
_KEPT_TIMES = 128  # transfers that are remembered for it
SMALL = 1 << 20  # bytes: transfers below are predicted by each other, and so are those above
_SLOW = 4.0  # times the usual time of a transfer from which it counts as a failure
_TICK_S, _LOOK_S = 0.02, 0.1  # between looks for slow transfers; for tasks whose time is over
_TOLD_S = 3.0  # without an answer, from which on a person is told that requests fail, and how often
_STOPPED_S = 1.0  # from which on a time without a look does not count: see _Time


@dataclass
class Figures:
    """Count what the requests of a process came to.

    requests   that were sent, retries and second ones included
    bytes      that arrived, of answers that were used
    retries    by the kind of failure before them
    failed     that were given up
    hedges     second and third requests beside a slow one; `won` of them answered first
    waited_s   seconds in which nothing was sent, because a server had asked for that
    limit      requests of one kind, large or small ones, that may run at once now
    """

    requests: int = 0
    bytes: int = 0
    retries: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    hedges: int = 0
    won: int = 0
    waited_s: float = 0.0
    limit: float = 0.0

    def since(self, before: Figures) -> Figures:
        """Return what was added since these were taken. The limit is that of now."""
        return self._joined(operator.sub, before, self.limit)

    def plus(self, others: Figures) -> Figures:
        """Return the sum of both. The limit is that of the others."""
        return self._joined(operator.add, others, others.limit)

    def _joined(self, how: Callable[[Any, Any], Any], other: Figures, limit: float) -> Figures:
        names = [one.name for one in fields(self)]
        found = {name: how(getattr(self, name), getattr(other, name)) for name in names}
        return Figures(**found | {"limit": limit})


class _Task:
    """One request, until it is answered or given up."""

    __slots__ = (
        *("answered", "attempts", "begun", "beside", "future", "host", "last", "request"),
        *("left", "running", "started", "submitted"),
    )

    def __init__(self, request: Request, host: _Host, now: float) -> None:
        self.request, self.host = request, host
        self.future: Future[Reply] = Future()
        self.attempts = 0
        self.running = 0  # requests of it under way
        self.left = 0  # of these: how many take no place any more
        self.beside = 0  # of these, and before: second requests
        self.submitted = now
        self.begun = math.inf  # when the first attempt began
        self.started = math.inf  # when the last one did
        self.answered = False
        self.last: RequestError | None = None

    @property
    def small(self) -> bool:
        return self.request.length < SMALL

    def ends(self) -> float:
        """Return when its time is over: of its own attempts, or since anything succeeded."""
        store, host = self.request.store, self.host
        limit_s = store.timeout_s if host.heard else min(UNKNOWN_S, store.timeout_s)
        return limit_s + min(self.begun, max(self.submitted, host.succeeded))


class _Host:
    """The requests to one store's host, and how well it answers them."""

    def __init__(self, consumers: int) -> None:
        # By what is small, two heaps: urgent ones first. Neither kind waits for the other.
        self.waiting: dict[bool, list[tuple[bool, int, _Task]]] = {True: [], False: []}
        self.active: set[_Task] = set()
        self.running = Counter[bool]()  # requests under way that take a place, of each kind
        self.left = 0  # and others, whose task was answered by another one
        self.limits = {True: Limit(consumers, FIRST_SMALL), False: Limit(consumers)}
        self.heard = False  # it has answered something
        self.succeeded = -math.inf  # when the last request did
        self.last: RequestError | None = None
        self.failures, self.failing = 0, math.inf  # since the last answer, and since when
        self.throttled = 0  # pauses in a row
        self.paused_at = math.inf  # since when; inf: it is not
        self.resumes = -math.inf
        self.times = {small: deque[float](maxlen=_KEPT_TIMES) for small in (True, False)}

    @property
    def paused(self) -> bool:
        return self.paused_at < math.inf

    def note(self, error: RequestError, now: float) -> None:
        """Take note of an attempt that failed."""
        self.last = error
        if error.transient:
            self.failures, self.failing = self.failures + 1, min(self.failing, now)
        else:
            self.failures, self.failing = 0, math.inf

    def leave(self, task: _Task) -> None:
        """Give the places of an answered task's requests to others, which are not to wait."""
        if self.left + task.running <= self.limits[task.small].most:
            task.left = task.running
            self.left += task.left
            self.running[task.small] -= task.left

    def end(self, task: _Task) -> None:
        """Note that one request of a task has ended."""
        task.running -= 1
        if task.left:
            task.left, self.left = task.left - 1, self.left - 1
        else:
            self.running[task.small] -= 1
        if not task.running:
            self.active.discard(task)

    def succeed(self, task: _Task, reply: Reply, took: float, full: bool, now: float) -> None:
        """Learn from an answer. full: as many requests as allowed were running."""
        self.heard, self.succeeded, self.throttled = True, now, 0
        self.failures, self.failing = 0, math.inf
        if task.request.upload is not None:
            return  # it takes as long as its bytes do
        times = self.times[task.small]
        if len(times) >= _SAMPLES and took > _SLOW * sorted(times)[len(times) // 2]:
            self.fail(now)
        else:
            if size := len(reply.data):  # an answer without bytes says little of others
                self.limits[task.small].answer(took, size, full=full)
        times.append(took)

    def fail(self, now: float) -> None:
        """Send fewer requests at once after a failure."""
        for limit in self.limits.values():
            limit.fail(now)

    def allows(self, task: _Task) -> bool:
        """Return True if there is room for one more request of this size.

        Of both kinds together no more run than of one, but for as many of each as run at first.
        """
        limit, running = self.limits[task.small], self.running[task.small]
        if task.request.upload is not None and not self.throttled:  # its caller sends few
            return running < limit.most
        together = self.running.total()
        return running < limit.allowed and (together < limit.most or running < limit.first)

    def pause(self, now: float) -> None:
        """Send nothing for a while: longer each time, and not at the same time as others do."""
        for limit in self.limits.values():
            limit.throttle(again=self.throttled > 0)
        self.throttled += 1
        self.paused_at, self.resumes = now, now + _pause(self.throttled + 1)

    def heed(self, asked: Asked, now: float) -> None:
        """Make the pause what the server said when it was asked again."""
        if not self.paused:
            return
        if not asked.throttled:
            if self.throttled == 1:  # it has passed
                self.resumes = now
                for limit in self.limits.values():
                    limit.resume()
        elif asked.after_s is not None:
            pause = min(LONGEST_PAUSE_S, asked.after_s) * random.uniform(1, 1.25)
            self.resumes = max(now + pause, self.resumes if self.throttled > 1 else 0.0)

    def late(self, task: _Task, now: float, stalled: bool) -> bool:
        """Return True if a transfer takes longer than nearly all before it.

        stalled: it is to take several times as long as usual, too
        """
        times = sorted(self.times[task.small])
        if task.small and len(times) < _SAMPLES:
            times = sorted(self.times[False])  # longer: late by these is late
        if len(times) < _SAMPLES:
            return False
        middle = times[len(times) // 2]
        late = max(times[int(_HEDGE_AT * (len(times) - 1))], 2 * middle)
        return now - task.started > max(late, _STALLED * middle if stalled else 0.0)


class _Time:
    """Tell the time, less what this process was stopped: nothing could be tried then.

    It has to be called all the time while there is anything to do.
    """

    def __init__(self) -> None:
        self._seen, self._stopped_s = time.monotonic(), 0.0

    def __call__(self) -> float:
        now = time.monotonic()
        if now - self._seen > _STOPPED_S:
            self._stopped_s += now - self._seen
        self._seen = now
        return now - self._stopped_s


class Transfers:
    """Run requests, each as a Future of its Reply. Raises StorageError through them.

    consumers  processes of this machine that share its requests, this one included
    waits      is told, now and then, that a store's requests fail and are sent again
    """

    def __init__(self, consumers: int = 1, waits: Waits = None) -> None:
        self._waits, self._told = waits, -math.inf  # and when it was told something
        self._figures = Figures()
        self._changed = threading.Condition(threading.Lock())
        self._hosts: dict[tuple[str, ...], _Host] = {}
        self._later: list[tuple[float, int, _Task]] = []  # a heap, by time: retries
        self._ready: SimpleQueue[partial[None] | None] = SimpleQueue()
        # What is to be told when the lock is free: callbacks may submit.
        self._ended: deque[tuple[Future[Reply], Reply | BaseException]] = deque()
        self._sequence = 0
        self._threads = 0
        self._idle = 0  # threads that wait for work
        self._running = 0
        self._looked = -math.inf
        self._closed = False
        self._clock: threading.Thread | None = None
        self._now = _Time()  # called with `_changed` held
        self.heard = time.monotonic()  # when the last attempt ended
        self.share(consumers)

    def share(self, consumers: int) -> None:
        """Take this process's part of the machine's requests."""
        with self._changed:
            self._consumers = consumers
            for host in self._hosts.values():
                for limit in host.limits.values():
                    limit.share(consumers)

    @property
    def figures(self) -> Figures:
        """Return what the requests came to until now."""
        with self._changed:
            hosts = self._hosts.values()
            limits = [max(one.allowed for one in host.limits.values()) for host in hosts]
            limit = sum(limits) or concurrency.parts(self._consumers)[1]
            return replace(self._figures, retries=Counter(self._figures.retries), limit=limit)

    def submit(self, request: Request, *, urgent: bool = False) -> Future[Reply]:
        """Send a request as soon as there is room. urgent: before all that are not.

        It raises nothing, and runs no callback of other requests.
        """
        with self._changed:
            task = _Task(request, self._host(request), self._now())
            if self._closed:
                settle(task.future, _has_ended(request))
            elif not self._has_clock():
                settle(task.future, _no_thread(request))
            else:
                self._push(task, urgent)
                self._dispatch()
                self._changed.notify_all()
        return task.future

    def restart(self) -> None:
        """Do nothing: threads do not hang."""

    def close(self, wait_s: float = 1.0) -> bool:
        """Send nothing more. Returns True if no request is under way, after `wait_s` at most."""
        with self._changed:
            self._closed = True
            for task in self._all():
                self._end(task, _has_ended(task.request))
            for _ in range(self._threads):
                self._ready.put(None)
            self._changed.notify_all()
        self._deliver()
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, wait_s)

    def _deliver(self) -> None:
        """Tell answers to those who wait for them. The lock is not held."""
        while self._ended:
            try:
                future, answer = self._ended.popleft()
            except IndexError:  # another thread was faster
                return
            settle(future, answer)
            del future, answer  # or an idle thread would keep the bytes

    def _work(self) -> None:
        while (job := self._ready.get()) is not None:
            job()
            del job

    def _tick(self) -> None:
        """Wake what is due: retries, ends of a pause, second requests, tasks to give up."""
        while True:
            with self._changed:
                if self._closed:
                    return
                now = self._now()
                self._hedge(now)
                self._give_up(now)
                self._dispatch()
                trouble = ""
                if self._waits is not None and now - self._told >= _TOLD_S:
                    trouble = _trouble(self._hosts.values(), self._all, now)
                    self._told = now if trouble else self._told
                if not self._ended and not trouble:
                    self._changed.wait(self._due(now))
            self._deliver()
            if self._waits is not None and trouble:
                self._waits(trouble)

    def _attempt(self, task: _Task, hedge: bool) -> None:
        """Send a request of a task, and wait for the answer."""
        with self._changed:
            start = self._now()
        found: Reply | BaseException
        try:
            found = client(task.request.store).send(task.request)
        except RequestError as error:
            found = RequestError(error.kind, error.text)  # without frames: it is remembered
        except BaseException as error:  # also what the client's own core throws
            found = error
        with self._changed:
            self._running -= 1
            self._idle += 1
            self.heard, now = time.monotonic(), self._now()
            self._finish(task, found, now - start, hedge, now)
            self._dispatch()
            self._changed.notify_all()
        del found
        self._deliver()

    def _ask_again(self, host: _Host, request: Request) -> None:
        """Ask a server that wants fewer requests how long it wants to be left alone."""
        asked: Asked | None = None
        with suppress(Exception):
            asked = retry_after.ask(client(request.store), request)
        with self._changed:
            self._idle += 1
            if asked is not None:
                host.heed(asked, self._now())
            self._dispatch()
            self._changed.notify_all()
        self._deliver()

    # Below, `_changed` is held.

    def _host(self, request: Request) -> _Host:
        store = request.store
        key = *store.url.split("/", 3)[:3], str(store.options.get("endpoint", ""))
        if key not in self._hosts:
            self._hosts[key] = _Host(self._consumers)
        return self._hosts[key]

    def _all(self) -> list[_Task]:
        """Return the tasks that are not ended."""
        found = [task for _, _, task in self._later]
        for host in self._hosts.values():
            found += [task for one in host.waiting.values() for _, _, task in one]
            found += host.active
        return [task for task in found if not task.answered]

    def _end(self, task: _Task, answer: Reply | BaseException) -> None:
        """End a task, and note what is to be told."""
        if not task.answered:
            task.answered = True
            task.host.leave(task)
            self._ended.append((task.future, answer))

    def _push(self, task: _Task, urgent: bool) -> None:
        self._sequence += 1
        heapq.heappush(task.host.waiting[task.small], (not urgent, self._sequence, task))

    def _dispatch(self) -> None:
        """Hand tasks to threads while there is room."""
        now = self._now()
        while self._later and self._later[0][0] <= now:
            self._push(heapq.heappop(self._later)[2], True)
        for host in self._hosts.values():
            if host.paused and now >= host.resumes:
                self._figures.waited_s += now - host.paused_at
                host.paused_at = math.inf
            for waiting in host.waiting.values():
                while waiting and not host.paused and not self._closed:
                    if not host.allows(waiting[0][2]):
                        break
                    task = heapq.heappop(waiting)[2]
                    if not task.answered and not task.future.cancelled():
                        self._send(task, now)

    def _send(self, task: _Task, now: float, hedge: bool = False) -> None:
        if not self._run(partial(self._attempt, task, hedge)):
            self._end(task, _no_thread(task.request))
            return
        task.begun = min(task.begun, now)
        task.started = now
        task.attempts += not hedge
        task.running += 1
        task.host.active.add(task)
        task.host.running[task.small] += 1
        self._running += 1
        self._figures.requests += 1
        self._figures.hedges += hedge

    def _run(self, job: partial[None]) -> bool:
        """Have a thread do something. Returns False if there is none, and no room for one."""
        if self._idle <= 0 and start_thread(self._work, "shardio-request") is not None:
            self._threads += 1
        elif self._threads:
            self._idle -= 1  # below 0: one of the threads does it later
        else:
            return False
        self._ready.put(job)
        return True

    def _has_clock(self) -> bool:
        if self._clock is None:
            self._clock = start_thread(self._tick, "shardio-clock")
        return self._clock is not None

    def _due(self, now: float) -> float | None:
        """Return after how many seconds the clock has something to do; None: when it is woken."""
        hosts = self._hosts.values()
        if any(host.active for host in hosts):
            return _TICK_S
        due = [host.resumes for host in hosts if host.paused]
        due += [when for when, _, _ in self._later[:1]]
        if due or any(any(host.waiting.values()) for host in hosts):
            return min(_LOOK_S, max(0.001, min(due, default=now + _LOOK_S) - now))
        return None

    def _hedge(self, now: float) -> None:
        """Send a second request beside each that takes longer than nearly all before it."""
        for host in self._hosts.values():
            if host.paused or host.throttled:
                continue
            for task in list(host.active):
                more = self._figures.hedges + 1 - HEDGED * (self._figures.requests + 1)
                if more > _HEDGED_FIRST:
                    return
                wanted = task.beside < _BESIDE and not task.answered
                wanted = wanted and task.request.upload is None
                if wanted and not task.future.cancelled() and host.late(task, now, more > 0):
                    task.beside += 1
                    self._send(task, now, hedge=True)

    def _give_up(self, now: float) -> None:
        """End tasks that wait, while nothing succeeds, when their time is over."""
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        for task in self._all():
            error = task.last or task.host.last
            if error is not None and not task.running and now > task.ends():
                self._fail(task, error, now)

    def _fail(self, task: _Task, error: RequestError, now: float) -> None:
        self._figures.failed += 1
        took_s = now - min(task.begun, task.submitted)
        self._end(task, explain_failure(task.request, error, task.attempts, took_s))

    def _finish(
        self, task: _Task, found: Reply | BaseException, took: float, hedge: bool, now: float
    ) -> None:
        """Take the answer of an attempt: end the task, or have another attempt follow."""
        host, full = task.host, not task.host.allows(task)
        host.end(task)
        if isinstance(found, Reply):
            if not task.answered:
                host.succeed(task, found, took, full, now)
                if not task.future.cancelled():
                    self._figures.bytes += len(found.data)
                    self._figures.won += hedge
                    self._end(task, found)
            return
        if not isinstance(found, RequestError):
            self._end(task, found)  # a missing package, an option
            return
        task.last = found
        host.note(found, now)
        host.heard = host.heard or found.kind in ("throttled", "server", "range", "body")
        if found.kind == "throttled":
            if not host.paused and task.started >= host.resumes:  # else it was asked before
                host.pause(now)
                if self._run(partial(self._ask_again, host, task.request)):
                    self._figures.requests += 1
        elif found.transient and found.kind != "range" and not task.answered:
            host.fail(now)
        if task.running or task.answered or task.future.cancelled():
            return  # the other request is under way, or was first; or nobody wants it any more
        if not found.transient or now > task.ends() or self._closed:
            self._fail(task, found, now)
            return
        self._figures.retries[found.kind] += 1
        task.beside = 0
        self._sequence += 1
        heapq.heappush(self._later, (now + _pause(task.attempts - 1), self._sequence, task))


def _trouble(hosts: Iterable[_Host], tasks: Callable[[], list[_Task]], now: float) -> str:
    """Return what there is to tell of a store that nothing but failures comes of; "": nothing."""
    for host in hosts:
        if now - host.failing < _TOLD_S or host.last is None:
            continue
        if ours := [task for task in tasks() if task.host is host]:
            ends = time.time() + max(task.ends() for task in ours) - now
            until = time.strftime("%H:%M:%S", time.localtime(ends))
            place = without_secrets("/".join(ours[0].request.store.url.split("/", 3)[:3]))
            failed = f"{show_count(host.failures, 'request')} failed ({host.last.text})"
            return f"waiting for {place}: {failed}, trying again until {until}"
    return ""


def _pause(doublings: int) -> float:
    """Draw the seconds of a pause, which doubles up to the longest."""
    return min(_LONGEST_S, _SHORTEST_S * 2.0**doublings) * random.uniform(0.5, 1)


def start_thread(target: Any, name: str) -> threading.Thread | None:
    """Start a thread that does not outlive the process; None: the system has no room for it."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        return None
    return thread


def settle(future: Future[Reply], answer: Reply | BaseException) -> None:
    """Give a future its answer, unless it was cancelled, at whatever moment."""
    with suppress(InvalidStateError):
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def _has_ended(request: Request) -> StorageError:
    return StorageError(f"{request.shown}: reading from URLs has ended in this process")


def _no_thread(request: Request) -> StorageError:
    return StorageError(
        f"{request.shown}: no thread can be started to read it. Check the limit of processes "
        "(ulimit -u), and of the container (pids.max)"
    )
