"""The fault proxy gives each fault to whom it is told to, and else passes on what is right."""

import contextlib
import http.client
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from support import LIMIT_S, faults, servers
from support.fault_proxy import FaultProxy, fault_proxy
from support.faults import Rule
from support.leftovers import nothing_left

BODY = bytes(range(251)) * 4000  # a prime, so that no moved range looks like another
RANGE = {"Range": "bytes=1000-200999"}
PART = BODY[1000:201000]


class Store(NamedTuple):
    web: servers.Web
    proxy: FaultProxy


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("store")
    (folder / "x").write_bytes(BODY)
    with nothing_left(), servers.nginx(folder) as web, fault_proxy(web.port) as proxy:
        yield Store(web, proxy)


@pytest.fixture
def store(running: Store) -> Iterator[Store]:
    yield running
    running.proxy.rules()
    running.proxy.limits()
    running.proxy.listen()


class Got(NamedTuple):
    status: int
    body: bytes
    content_range: str = ""
    etag: str = ""
    retry_after: str = ""


def get(
    proxy: FaultProxy,
    timeout: float = LIMIT_S,
    method: str = "GET",
    body: bytes | None = None,
    path: str = "/x",
) -> Got:
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=timeout)
    with contextlib.closing(client):
        client.request(method, path, body, headers=RANGE)
        answer = client.getresponse()
        names = ("Content-Range", "ETag", "Retry-After")
        fields = [answer.headers.get(name, "") for name in names]
        return Got(answer.status, answer.read(), *fields)


def bits_apart(one: bytes, other: bytes) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


RIGHT = "bytes 1000-200999/1004000"
ANSWERS: dict[str, Callable[[Got], bool]] = {
    "500": lambda got: got.status == 500 and b"InternalError" in got.body,
    "502": lambda got: got.status == 502 and b"<html>" in got.body,
    "503": lambda got: got.status == 503 and b"SlowDown" in got.body,
    "5xx": lambda got: got.status in (500, 502, 503),
    "429": lambda got: got.status == 429 and got.retry_after == "7",
    "403": lambda got: got.status == 403 and b"<Code>ExpiredToken" in got.body,
    "404": lambda got: got.status == 404 and b"<Code>NoSuchKey" in got.body,
    "wrong_range": lambda got: got.status == 200 and got.body == BODY,
    "shifted": lambda got: got[:3] == (206, BODY[999:200999], "bytes 999-200998/1004000"),
    "shifted_silently": lambda got: (
        got.content_range == RIGHT and got.body[:-1] == PART[1:] and len(got.body) == len(PART)
    ),
    "changed": lambda got: "another" in got.etag and got.body == bytes(len(PART)),
    "garbage": lambda got: got.content_range == RIGHT and bits_apart(got.body, PART) == 1,
    "slow": lambda got: got.body == PART,
}
BREAKS: dict[str, type[Exception]] = {
    "reset": ConnectionResetError,
    "reset_midway": ConnectionResetError,
    "lost": ConnectionResetError,
    "refused": ConnectionResetError,
    "short": http.client.IncompleteRead,
    "timeout": TimeoutError,
    "stall": TimeoutError,
}


def test_each_fault_is_tested_here() -> None:
    assert {*ANSWERS, *BREAKS} == set(faults.KINDS)


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_wrong_answer_is_given_once_and_then_the_right_one(store: Store, kind: str) -> None:
    store.proxy.rules(Rule(kind, times=1, retry_after=7, rate=50e6))
    got = get(store.proxy)
    assert ANSWERS[kind](got), got
    right = get(store.proxy)
    assert right[:3] == (206, PART, RIGHT)
    assert kind == "slow" or got != right


@pytest.mark.parametrize("kind", BREAKS)
def test_a_broken_answer_is_given_once_and_then_the_right_one(store: Store, kind: str) -> None:
    store.proxy.rules(Rule(kind, times=1))
    store.proxy.reset()
    with pytest.raises(BREAKS[kind]):
        get(store.proxy, timeout=0.2 if BREAKS[kind] is TimeoutError else LIMIT_S)
    assert store.proxy.figures().faults == {kind: 1}
    if kind == "refused":
        with pytest.raises(ConnectionRefusedError):
            get(store.proxy)
        store.proxy.listen()
    assert get(store.proxy)[:3] == (206, PART, RIGHT)


@pytest.mark.parametrize("kind", ["reset_midway", "short", "stall"])
def test_half_of_a_body_comes_before_it_breaks(store: Store, kind: str) -> None:
    store.proxy.rules(Rule(kind))
    store.proxy.reset()
    with socket.create_connection(("127.0.0.1", store.proxy.port), LIMIT_S) as client:
        client.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\nRange: bytes=1000-200999\r\n\r\n")
        store.proxy.wait(sent=len(PART) // 2)
        if kind == "stall":
            client.shutdown(socket.SHUT_WR)  # it is held until its client goes
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while data := client.recv(1 << 20):
                got += data
        assert PART[: len(PART) // 2].startswith(got.partition(b"\r\n\r\n")[2])
        assert b"Content-Length: 200000" in got or kind == "reset_midway"
    (request,) = store.proxy.figures().log
    assert request == ("GET", "/x", RANGE["Range"], 206, len(PART) // 2, kind)


def test_an_object_that_changed_is_told_to_who_names_the_one_it_knew(store: Store) -> None:
    etag = get(store.proxy).etag
    store.proxy.rules(Rule("changed"))
    client = http.client.HTTPConnection("127.0.0.1", store.proxy.port)
    with contextlib.closing(client):
        client.request("GET", "/x", headers={"If-Match": etag})
        assert client.getresponse().status == 412


def test_rules_choose_by_path_method_range_number_and_times(store: Store) -> None:
    def statuses(*rules: Rule, count: int = 6) -> list[int]:
        store.proxy.rules(*rules)
        return [get(store.proxy).status for _ in range(count)]

    assert statuses(Rule("503", path="/y"), Rule("503", range="=-"), Rule("503", method="PUT")) == (
        [206] * 6
    )
    assert statuses(Rule("503", path="^/x$", range="=1000-", method="GET")) == [503] * 6
    assert statuses(Rule("503", numbers=[1, 3])) == [206, 503, 206, 503, 206, 206]
    assert statuses(Rule("503", times=2), Rule("429", times=3)) == [503] * 2 + [429] * 3 + [206]
    drawn = statuses(Rule("503", fraction=0.5, seed=3), count=40)
    assert drawn == statuses(Rule("503", fraction=0.5, seed=3), count=40)
    assert drawn != statuses(Rule("503", fraction=0.5, seed=4), count=40)
    assert 8 <= drawn.count(503) <= 32
    with pytest.raises(ValueError, match="no fault is called 'nothing'"):
        Rule("nothing")


def test_figures_tell_what_went_through(store: Store) -> None:
    store.proxy.rules(Rule("404", times=1))
    store.proxy.reset()
    size = len(get(store.proxy).body)
    assert get(store.proxy).status == 206
    store.proxy.settle()
    figures = store.proxy.figures()
    assert figures.requests == figures.connections == 2
    assert (figures.concurrent, figures.most_concurrent) == (0, 1)
    assert figures.sent == size + len(PART)
    assert figures.faults == {"404": 1}
    assert figures.paths == {"/x": {"requests": 2, "faults": 1, "sent": figures.sent}}
    assert [one.status for one in figures.log] == [404, 206]
    assert figures.cpu_s > 0


def test_one_connection_is_slow_and_another_is_not(store: Store) -> None:
    store.proxy.limits(connection_bandwidth=2e4)  # for 50 s
    store.proxy.reset()
    with socket.create_connection(("127.0.0.1", store.proxy.port)) as limited:
        limited.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
        store.proxy.wait(sent=1)
        store.proxy.limits()
        assert get(store.proxy).body == PART
        assert store.proxy.figures().concurrent == 1


def test_the_bandwidth_in_all_is_shared_and_the_latency_is_not(store: Store) -> None:
    """Those that wait, wait together; those that share a link take as long as all their bytes."""

    def seconds(count: int) -> float:
        with ThreadPoolExecutor(count) as threads:
            began = time.monotonic()
            for got in threads.map(lambda _: get(store.proxy), range(count)):
                assert got.body == PART
            return time.monotonic() - began

    store.proxy.limits(latency_s=0.3)
    store.proxy.reset()
    assert seconds(4) >= 0.3
    assert store.proxy.figures().most_concurrent >= 2
    store.proxy.limits(bandwidth=4e6)
    assert seconds(4) >= 3.5 * len(PART) / 4e6


def test_requests_are_held_until_others_are_there(store: Store) -> None:
    store.proxy.limits(gather=2, of="[?]a")
    store.proxy.reset()
    with ThreadPoolExecutor(3) as threads:
        held = [threads.submit(get, store.proxy, path="/x?a") for _ in range(2)]  # one and the same
        store.proxy.wait(concurrent=2)
        assert get(store.proxy, path="/x?b").status == 206
        assert not any(one.done() for one in held)
        assert get(store.proxy, path="/x?a=2").status == 206
        assert [one.result().status for one in held] == [206, 206]
        assert get(store.proxy, path="/x?a").status == 206  # from then on


def test_what_a_client_that_is_gone_asked_for_is_waited_for(store: Store) -> None:
    store.proxy.limits(latency_s=0.05)
    store.proxy.reset()
    with socket.create_connection(("127.0.0.1", store.proxy.port)) as client:
        client.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
    store.proxy.settle()
    assert store.proxy.figures().concurrent == 0 and store.web.requests()[-1].status == 200


def test_more_than_the_concurrency_wait_or_are_sent_away(store: Store) -> None:
    store.proxy.limits(concurrency=1)
    store.proxy.rules(Rule("timeout", times=1))
    store.proxy.reset()
    with ThreadPoolExecutor(2) as threads:
        with socket.create_connection(("127.0.0.1", store.proxy.port)) as first:
            first.sendall(b"GET /x HTTP/1.1\r\n\r\n")
            store.proxy.wait(faults=1)
            second = threads.submit(get, store.proxy)
            store.proxy.wait(concurrent=2)
            assert not second.done()
        assert second.result().status == 206
    store.proxy.limits(concurrency=1, busy_status=429)
    store.proxy.rules(Rule("timeout", times=1))
    store.proxy.reset()
    with socket.create_connection(("127.0.0.1", store.proxy.port)) as first:
        first.sendall(b"GET /x HTTP/1.1\r\n\r\n")
        store.proxy.wait(faults=1)
        assert get(store.proxy)[::4] == (429, "1")


# ------------------------------------------------------- what nginx does not do: a store of our own


def body_of(message: bytes) -> bytes:
    return message.partition(b"\r\n\r\n")[2]


@contextlib.contextmanager
def answering(answer: bytes, *rules: Rule) -> Iterator[tuple[FaultProxy, list[bytes]]]:
    """Run a proxy before a store that reads one request's body of 1000 bytes, and says `answer`."""
    taken: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(ConnectionResetError):
                data = b""
                while len(body_of(data)) < 1000 and (more := connection.recv(9999)):
                    data += more
                    taken[:] = [data]
                connection.sendall(answer)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        ThreadPoolExecutor(1) as threads,
        fault_proxy(listener.getsockname()[1], *rules) as proxy,
    ):
        served = threads.submit(serve, listener)
        yield proxy, taken
        listener.shutdown(socket.SHUT_RDWR)
        served.result()


OK = b"HTTP/1.1 200 OK\r\n"
FULL = OK + b"Content-Length: 2\r\n\r\nok"


@pytest.mark.parametrize(
    "answer",
    [
        FULL,
        OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\no\r\n1;x=y\r\nk\r\n0\r\nA: b\r\n\r\n",
        OK + b"\r\nok",  # up to the end of the connection
    ],
)
@pytest.mark.parametrize("rules", [(), (Rule("slow", rate=1e6),)])
def test_uploads_and_answers_of_each_framing_pass(answer: bytes, rules: tuple[Rule, ...]) -> None:
    with nothing_left(), answering(answer, *rules) as (proxy, taken):
        got = get(proxy, method="PUT", body=b"u" * 1000)
        assert got[:2] == (200, b"ok")
        assert taken[0].endswith(b"\r\n\r\n" + b"u" * 1000)
        assert proxy.figures().received == 1000


def test_an_upload_is_asked_to_go_on() -> None:
    with answering(FULL) as (proxy, taken):
        with socket.create_connection(("127.0.0.1", proxy.port), LIMIT_S) as client:
            client.sendall(
                b"PUT /x HTTP/1.1\r\nContent-Length: 1000\r\nExpect: 100-continue\r\n\r\n"
            )
            assert client.recv(9999) == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.sendall(b"u" * 1000)
            assert client.recv(9999).startswith(b"HTTP/1.1 200 OK")
        assert b"Expect" not in taken[0]


@pytest.mark.parametrize(("kind", "size"), [("lost", 1000), ("reset_midway", 500), ("503", None)])
def test_uploads_that_fail_reach_the_store_so_far(kind: str, size: int | None) -> None:
    with answering(FULL, Rule(kind)) as (proxy, taken):
        if size is None:
            assert get(proxy, method="PUT", body=b"u" * 1000).status == 503
        else:
            with pytest.raises(ConnectionResetError):
                get(proxy, method="PUT", body=b"u" * 1000)
        proxy.wait(faults=1)
    sizes = [len(body_of(one)) for one in taken]
    if kind == "reset_midway":  # the reset may overtake what the store has not read
        assert all(one <= 500 for one in sizes)
    else:
        assert sizes == ([] if size is None else [size])
