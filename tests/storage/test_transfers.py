"""Many requests at once: two kinds of them, second ones beside slow ones, and pauses."""

import contextlib
import hashlib
import threading
import time

import pytest
from support import LIMIT_S, servers
from support.fault_proxy import FaultProxy
from support.faults import Rule
from support.url_datasets import FILE_BYTES, content, figures, opened, request
from support.url_reader import url_reader

from shardio import Storage
from shardio.errors import StorageError
from shardio.storage import ranges, retry_after, transfers
from shardio.storage.client import Reply, Request, RequestError, Store
from shardio.storage.concurrency import FIRST
from shardio.storage.location import locate
from shardio.storage.remote_file import RANGE, read
from shardio.storage.retry_after import Asked


@pytest.mark.parametrize("held", [100_000, RANGE])
@pytest.mark.parametrize("throttled", [False, True])
def test_neither_kind_of_request_waits_for_the_other(
    monkeypatch: pytest.MonkeyPatch, held: int, throttled: bool
) -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)
    refusals = threading.Semaphore(int(throttled))

    class Client:
        def send(self, request: Request) -> Reply:
            if request.length == held:
                begun.release()
                assert gate.wait(LIMIT_S)
            elif refusals.acquire(blocking=False):
                raise RequestError("throttled", "fewer")
            return Reply(memoryview(bytes(request.length)), 1 << 40, "")

    one, store = Client(), Store("http://127.0.0.1:9", timeout_s=60.0)
    monkeypatch.setattr(transfers, "client", lambda _: one)
    monkeypatch.setattr(retry_after, "ask", lambda *_: Asked(throttled=False, after_s=None))
    sender = transfers.Transfers()
    other = RANGE + 100_000 - held
    try:
        waiting = [sender.submit(Request(store, "file", 0, held), urgent=True) for _ in range(100)]
        for _ in range(FIRST):
            assert begun.acquire(timeout=LIMIT_S)
        found = [sender.submit(Request(store, "file", n, other)) for n in range(10)]
        assert [len(future.result(LIMIT_S).data) for future in found] == [other] * 10
        assert not any(future.done() for future in waiting)
        gate.set()
        assert [len(future.result(LIMIT_S).data) for future in waiting] == [held] * 100
    finally:
        gate.set()
        assert sender.close(LIMIT_S)


@pytest.mark.parametrize(
    ("before", "length", "stall"),
    [(1000, 1000, 1), (1 << 20, 1 << 20, 1), (1 << 20, 1000, 1), (1000, 1000, 2)],
)
def test_bodies_that_stall_get_another_request_each(
    proxy: FaultProxy, before: int, length: int, stall: int
) -> None:
    proxy.limits(latency_s=0.02)  # what is usual, whatever else this machine does
    proxy.rules(Rule("stall", path="blob", numbers=[*range(10, 10 + stall)]))
    store = Store(proxy.url)
    for number in range(10):
        read(Request(store, "blob", number, before))
    assert read(Request(store, "blob", 11, length)).data[0] == 11
    found = figures()
    assert found.hedges >= stall and found.won >= 1 and not found.retries
    assert proxy.figures().faults == {"stall": stall}


def test_what_stalls_and_was_answered_takes_no_other_request_its_place(
    proxy: FaultProxy,
) -> None:
    proxy.limits(latency_s=0.02)
    proxy.rules(Rule("stall", path="blob", numbers=[10, 12]))
    store = Store(proxy.url, timeout_s=LIMIT_S)  # neither is given up meanwhile
    ranges.share(64)  # of which this process may send two at once
    try:
        for number in range(30):
            assert read(Request(store, "blob", number, 1000)).data[0] == number
    finally:
        ranges.share(1)
    figures = proxy.figures()
    assert figures.faults == {"stall": 2} and figures.concurrent == 2  # both stall still


def test_a_store_that_throttles_holds_up_no_other(proxy: FaultProxy, web: servers.Web) -> None:
    throttled = opened(proxy)
    other = locate(web.url, Storage(timeout_s=20.0)).open("file")
    proxy.rules(Rule("429", path="file", retry_after=600))
    waiting = ranges.ranges().announce(request(proxy, 0, 10, 4.0))
    future = ranges.ranges().send_now(waiting)
    assert future is not None
    proxy.wait(faults=2)
    assert other.sha256() == hashlib.sha256(content()).digest()
    assert not future.done()
    with pytest.raises(StorageError, match="answered 429"):  # after its own time, not the store's
        waiting.wait()
    assert throttled.size == FILE_BYTES


@pytest.mark.slow
def test_a_store_that_throttles_the_first_request_is_waited_for(proxy: FaultProxy) -> None:
    proxy.rules(Rule("429"))
    threading.Timer(12.0, proxy.rules).start()  # longer than for an address that may be wrong
    assert opened(proxy, 60.0).size == FILE_BYTES


def test_processes_that_start_at_once_all_finish(proxy: FaultProxy) -> None:
    proxy.limits(latency_s=0.02, concurrency=4, busy_status=429)
    with contextlib.ExitStack() as stack:
        readers = [
            stack.enter_context(url_reader(holds_client=n % 2 == 0, threads=8)) for n in range(4)
        ]
        start = time.monotonic()
        for reader in readers:
            reader.tell("records", f"{proxy.url}/data", range(0, 120, 2), timeout_s=60.0)
        done = [reader.answer() for reader in readers]
    assert [one["text"] for one in done] == [""] * 4
    assert all(one["digests"] == done[0]["digests"] for one in done)
    statuses = [one.status for one in proxy.figures().log]
    useful = 4 * (60 + 1 + 6)
    wasted = statuses.count(429)
    print(f"{len(statuses)} requests, {wasted} of them 429, {time.monotonic() - start:.1f} s")
    assert wasted < useful
