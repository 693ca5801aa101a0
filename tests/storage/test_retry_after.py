"""A server is asked how long it wants to be left alone."""

import hashlib
import hmac
import urllib.parse
from pathlib import Path

import pytest
from support import object_stores
from support.fault_proxy import FaultProxy, Request, fault_proxy
from support.faults import Rule
from support.url_datasets import FILE_BYTES, content, figures, opened, request

from shardio import Storage
from shardio.storage import ranges
from shardio.storage.location import locate

pytestmark = pytest.mark.usefixtures("alone")

# On a busy machine a pause, of 0.2 s on, may be over before the server is asked how long it is to
# be. So each of these is tried until it was asked in time.
TRIES = 20


def asked_in_time(log: list[Request]) -> bool:
    return len(log) > 1 and log[1].range == "bytes=0-0"


def is_signed(path: str, host: str, secret: str) -> bool:
    """Compute the signature of a request by URL, as Amazon documents it, and compare it.

    Source: "Authenticating Requests: Using Query Parameters (AWS Signature Version 4)"
    """
    path, _, query = path.partition("?")
    parts = sorted(part for part in query.split("&") if not part.startswith("X-Amz-Signature="))
    given = dict(urllib.parse.parse_qsl(query))
    asked = f"GET\n{path}\n{'&'.join(parts)}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD"
    scope = given["X-Amz-Credential"].split("/", 1)[1]
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    digest = hashlib.sha256(asked.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{given['X-Amz-Date']}\n{scope}\n{digest}"
    return hmac.digest(key, text.encode(), "sha256").hex() == given["X-Amz-Signature"]


@pytest.mark.parametrize(
    ("kind", "name"), [("s3", "da ta%20/blob"), ("azure", "blob"), ("azure", "da ta%20/blob")]
)
def test_a_store_is_asked_by_a_signed_url_how_long_it_wants_to_be_left_alone(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, name: str
) -> None:
    store: object_stores.ObjectStore = request.getfixturevalue(kind)
    data = bytes(range(200))
    (tmp_path / "blob").write_bytes(data)
    store.put({name: tmp_path / "blob"})
    folder, _, name = name.rpartition("/")
    with fault_proxy(store.port) as proxy:
        there = store.through(proxy.port)
        options = Storage(options=there.options, timeout_s=30.0)
        file = locate(f"{there.url}/{folder}".rstrip("/"), options).open(name)
        for faults in ([0, 1], [0]):  # it says so again, and how long; or it answers
            for _ in range(TRIES):
                proxy.reset()
                proxy.rules(Rule("503", path="blob", numbers=faults, retry_after=1))
                before = figures()
                assert file.read_again(5, 100) == data[5:105]
                if asked_in_time(log := proxy.figures().log):
                    break
            assert [one.range for one in log] == ["bytes=5-104", "bytes=0-0", "bytes=5-104"]
            asked = log[1]
            if kind == "s3":  # moto does not know signed URLs where it knows users
                keys = there.options["secret_access_key"]
                assert is_signed(asked.path, f"127.0.0.1:{proxy.port}", keys)
            elif faults == [0]:  # Azurite does; and obstore signs only plain names rightly
                assert asked.status == (403 if folder else 206)
            new = figures().since(before)
            assert new.waited_s < 25.0 and new.retries == {"throttled": 1}
            assert new.waited_s >= 1.0 or faults == [0]


def test_a_pause_ends_when_the_store_answers_again(proxy: FaultProxy) -> None:
    file = opened(proxy)
    for _ in range(TRIES):
        proxy.reset()
        proxy.rules(Rule("503", path="file", numbers=[0]))
        assert file.read(0, 100) == content()[:100]
        if asked_in_time(log := proxy.figures().log):
            break
    assert [(one.range, one.status) for one in log] == [
        ("bytes=0-99", 503),
        ("bytes=0-0", 206),
        ("bytes=0-99", 206),
    ]


def test_nothing_else_is_sent_while_a_store_wants_to_be_left_alone(proxy: FaultProxy) -> None:
    file = opened(proxy)
    for _ in range(TRIES):
        proxy.reset()
        proxy.rules(Rule("429", path="file", numbers=[0, 1], retry_after=1))
        before = figures()
        ranges.ranges().send_now(first := ranges.ranges().announce(request(proxy, 0, 10)))
        proxy.wait(faults=2)
        later = [ranges.ranges().announce(request(proxy, n * 1000, 1000)) for n in range(1, 9)]
        for one in (first, *later):
            one.wait()
        if asked_in_time(log := proxy.figures().log):
            break
    assert [one.status for one in log[:2]] == [429, 429]
    # A slow one may have a second request, and the one that is not needed ends without an answer.
    assert {one.status for one in log[2:]} <= {206, None}
    assert len({one.range for one in log[2:] if one.status == 206}) == 9
    new = figures().since(before)
    assert new.waited_s >= 1.0  # as the store said; by itself it would be at most 0.4
    assert new.retries == {"throttled": 1}
    assert file.size == FILE_BYTES
