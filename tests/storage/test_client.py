"""One request to a store: what it asks anew by itself, and what its errors say."""

from pathlib import Path
from typing import Any

import pytest
from support import hub_server, identity_server, object_stores, servers
from support.fault_proxy import FaultProxy, fault_proxy
from support.faults import Rule
from support.store_datasets import NAME, RECORDS, epoch, label
from support.url_datasets import quick, run

import shardio
from shardio import Storage
from shardio.errors import StorageError
from shardio.storage import ranges

pytestmark = pytest.mark.usefixtures("alone")


def test_an_identity_is_asked_again_where_too_many_ask(
    identities: identity_server.Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", identities.url)
    identities.set(refuse=[503, 429])
    assert label(f"s3://bucket/{NAME}", endpoint=identities.url) == 3
    figures = ranges.figures()
    assert figures is not None and set(figures.retries) == {"throttled"}


def test_keys_that_end_while_an_epoch_runs_are_asked_for_anew_once(
    s3: object_stores.ObjectStore, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fault_proxy(s3.port) as proxy:
        store = s3.through(proxy.port)
        storage = Storage(options=store.options, timeout_s=60.0)
        proxy.rules(Rule("403", path="shard", numbers=(2,)))
        dataset = shardio.open(f"{store.url}/{NAME}", decode=None, storage=storage)
        assert [one["label"] for one in dataset] == list(range(RECORDS))
        assert proxy.figures().faults == {"403": 1}
        proxy.rules(Rule("403"))
        before = proxy.figures().requests
        with pytest.raises(StorageError, match=r"403 .*ExpiredToken.*the option access_key_id"):
            shardio.open(f"{store.url}/{NAME}", decode=None, storage=storage)
        assert proxy.figures().requests == before + 2


def test_signed_urls_that_end_are_asked_for_anew(hub: hub_server.Hub) -> None:
    hub.set(uses=1)
    try:
        storage = Storage(options={"endpoint": hub.url, "token": "hf_CANARY"}, timeout_s=20.0)
        url = f"hf://datasets/ORG/NAME@v1/{NAME}"
        assert epoch(url, storage, 2)
        dataset = shardio.open(url, decode=None, storage=storage)
        dataset[0]
        hub.expire()
        assert dataset[40]["label"] == 40
    finally:
        hub.set(uses=None)


def test_the_region_of_a_bucket_is_found(identities: identity_server.Identities) -> None:
    identities.set(region="eu-north-1")
    keys = {"access_key_id": "FIRST", "secret_access_key": "CANARY"}
    assert label(f"s3://bucket/{NAME}", endpoint=identities.url, **keys) == 3
    ranges.close()
    identities.set(asked=[])
    assert label(f"s3://bucket/{NAME}", endpoint=identities.url, region="eu-north-1", **keys) == 3
    assert not any(path == "/bucket" for path, _ in identities.set()["asked"])


def test_a_bucket_that_is_not_there_is_told(
    s3: object_stores.ObjectStore, azure: object_stores.ObjectStore, hub: hub_server.Hub
) -> None:
    for url, options, what in (
        ("s3://nothing/x", s3.options, "no such bucket"),
        ("az://nothing/x", azure.options, "no such container"),
        (f"hf://datasets/ORG/NO/{NAME}", {"endpoint": hub.url, "token": "hf_CANARY"}, "repository"),
        (
            f"hf://datasets/ORG/NAME@v2/{NAME}",
            {"endpoint": hub.url, "token": "hf_CANARY"},
            "revision",
        ),
    ):
        with pytest.raises(StorageError, match=f"no such {what.removeprefix('no such ')}"):
            label(url, **options)


@pytest.mark.parametrize(
    ("url", "options", "what"),
    [
        ("s3://b/x", {"endpoint": "http://me:CANARY@127.0.0.1:9"}, "refused: 127.0.0.1:9 "),
        ("s3://b/x", {"endpoint": "http://x.invalid:9"}, "refused: x.invalid:9 at 127.0.0.1:1 "),
        ("s3://b/x", {"region": "here"}, "refused: s3.here.amazonaws.com at 127.0.0.1:1 "),
        ("gs://b/x", {"endpoint": "http://127.0.0.1:9"}, "refused: 127.0.0.1:9 "),
        ("az://b/x", {"account_name": "me", "endpoint": "http://127.0.0.1:9"}, ": 127.0.0.1:9 "),
        ("https://127.0.0.1:9/x?sig=CANARY", {}, "refused: 127.0.0.1:9 "),
    ],
)
def test_where_nothing_answers_the_host_is_named(
    url: str, options: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    given = options if url.startswith("http") else {"skip_signature": True, **options}
    advice = r".*Check the endpoint or URL, a proxy \(HTTPS_PROXY"
    with pytest.raises(StorageError, match=what + advice) as told:
        shardio.open(url, storage=Storage(options=given, timeout_s=1))
    assert "CANARY" not in str(told.value)


def test_the_host_of_a_listing_is_named(tmp_path: Path) -> None:
    storage = Storage(options={"endpoint": "http://me:CANARY@127.0.0.1:9"}, timeout_s=1)
    with pytest.raises(StorageError, match=r"refused: 127.0.0.1:9 .*Check the endp") as told:
        read = shardio.SourceOptions(storage=storage)
        shardio.pack("hf://datasets/a/b", tmp_path / "out", read=read)
    assert "CANARY" not in str(told.value)


def test_a_panic_of_the_client_is_an_error_of_the_request() -> None:
    program = """
        from shardio.storage import client, stores
        stores._refuse_unsendable = lambda store: None
        options = {"bearer_token": "SECRET\\n", "endpoint": "http://127.0.0.1:1"}
        request = client.Request(stores.Store("gs://bucket", options), "a", 0, 5)
        try:
            client.Client(request.store).send(request)
        except client.RequestError as error:
            print(error.kind, error.text)
    """
    done = run(program)
    assert "panicked" in done.stderr
    assert done.stdout.startswith("other the client failed: ") and "SECRET" not in done.stdout


def test_a_refusal_says_what_the_store_said_at_once(proxy: FaultProxy) -> None:
    proxy.rules(Rule("403", path="manifest"))
    with pytest.raises(StorageError, match=r"answered 403 Forbidden \(ExpiredToken\).*credentials"):
        quick(f"{proxy.url}/data", timeout_s=60.0)
    assert proxy.figures().requests == 1


def test_a_host_that_is_not_known_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", ".invalid")
    with pytest.raises(StorageError, match=r"host's name is not known: no-such-host.invalid. "):
        quick("http://no-such-host.invalid/data", timeout_s=60.0)


def test_without_obstore_it_is_said_what_to_install(web: servers.Web) -> None:
    program = """
        import sys
        sys.modules["obstore"] = None
        import shardio
        from shardio.storage import ranges
        ranges.hold_client()
        try:
            shardio.open(sys.argv[1])
        except shardio.ShardioError as error:
            print(type(error).__name__, error)
    """
    said = run(program, f"{web.url}/data").stdout
    assert "DependencyError" in said and "shardio-torch[remote]" in said
