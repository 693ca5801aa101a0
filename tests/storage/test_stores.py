"""Datasets in object stores of each kind, from real servers, with credentials as users have them.

No request leaves the machine: each store is given an address here, and `alone` takes away all
others. A test that forgot one fails.
"""

import hashlib
import hmac
import json
import os
import subprocess
import sys
import textwrap
import urllib.parse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import LIMIT_S, hub_server, identity_server, object_stores, servers
from support.fault_proxy import fault_proxy
from support.faults import Rule
from torch.utils.data import DataLoader

import shardio
from shardio import ShardDataset, Storage
from shardio.errors import NotPackedError, OptionError, ShardioError, StorageError
from shardio.storage import ranges, store_options, stores
from shardio.storage.base import KnownFile
from shardio.storage.cache import SMALL, entries
from shardio.storage.credentials import MissingError
from shardio.storage.location import locate
from shardio.storage.stores import SCHEMES, Store, without_secrets

RECORDS = 60
NOWHERE = "http://127.0.0.1:1"  # where nobody listens


def write(folder: Path) -> None:
    with shardio.Writer(
        folder, fields={"image": "image", "label": "int"}, shard_size=100_000
    ) as writer:
        for number in range(RECORDS):
            draw = np.random.default_rng(number)
            image = b"\xff\xd8\xff" + draw.bytes(int(draw.integers(100, 10_000)))
            writer.write({"__key__": f"{number}.jpg", "image": image, "label": number})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    write(folder / "da ta%20")
    return folder


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Take away what this machine knows of stores, and all ways to others."""
    for name in list(os.environ):
        words = ("AWS_", "AZURE_", "GOOGLE_", "GCE_", "HF_", "CLOUDSDK_", "SSL_CERT", "REQUESTS_")
        if name.startswith(words) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name in ("AWS_METADATA_ENDPOINT", "AWS_ENDPOINT_URL", "HF_ENDPOINT", "AZURE_ENDPOINT"):
        monkeypatch.setenv(name, NOWHERE)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # boto's
    monkeypatch.setenv("AZURE_IDENTITY_ENDPOINT", NOWHERE)
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):  # what would leave the machine goes there
        monkeypatch.setenv(name, NOWHERE)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    yield
    ranges.close()


class There(NamedTuple):
    """A dataset in a store: what a user writes."""

    url: str
    options: dict[str, Any]
    environment: dict[str, str]


@pytest.fixture(scope="module")
def s3(folder: Path) -> Iterator[object_stores.ObjectStore]:
    with object_stores.s3(private=True) as store:
        store.put_folder(folder)
        yield store


@pytest.fixture(scope="module")
def gcs(folder: Path) -> Iterator[object_stores.ObjectStore]:
    with object_stores.gcs() as store:
        store.put_folder(folder)
        yield store


@pytest.fixture(scope="module")
def azure(folder: Path) -> Iterator[object_stores.ObjectStore]:
    with object_stores.azurite() as store:
        store.put_folder(folder)
        yield store


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[hub_server.Hub]:
    (folder / "ORG" / "NAME").mkdir(parents=True)
    (folder / "ORG" / "NAME" / "v1").symlink_to(folder)
    with hub_server.hub(folder, token="hf_CANARY") as hub:
        yield hub


@pytest.fixture(scope="module")
def web(folder: Path) -> Iterator[servers.Web]:
    with servers.nginx(folder, tls=True, user="me@x", password="CANARY%/@ ü") as web:
        yield web


@pytest.fixture(scope="module")
def gate(folder: Path) -> Iterator[identity_server.Identities]:
    with identity_server.identities(folder) as gate:
        yield gate


@pytest.fixture
def identities(gate: identity_server.Identities) -> identity_server.Identities:
    gate.set(keys=["FIRST"], lives_s=3600, refuse=[], region="", echo=False, given=0, asked=[])
    return gate


NAME = "da ta%20"


def there(scheme: str, request: pytest.FixtureRequest) -> There:
    """Return a dataset by a scheme, with its credentials in the environment."""
    if scheme == "s3":
        given = request.getfixturevalue("s3").options
        names = {
            "AWS_ENDPOINT_URL": given["endpoint"],
            "AWS_REGION": given["region"],
            "AWS_ACCESS_KEY_ID": given["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": given["secret_access_key"],
        }
        return There(f"s3://{object_stores.BUCKET}/{NAME}", {}, names)
    if scheme == "gs":
        store = request.getfixturevalue("gcs")
        names = {"GOOGLE_SERVICE_ACCOUNT_KEY": store.options["service_account_key"]}
        names["GOOGLE_BASE_URL"] = f"http://127.0.0.1:{store.port}"
        return There(f"{store.url}/{NAME}", {}, names)
    if scheme in ("az", "abfss"):
        given = request.getfixturevalue("azure").options
        text = f"AccountName={given['account_name']};AccountKey={given['account_key']};"
        names = {"AZURE_STORAGE_CONNECTION_STRING": f"{text}BlobEndpoint={given['endpoint']}"}
        if scheme == "az":
            return There(f"az://{object_stores.BUCKET}/{NAME}", {}, names)
        host = f"{given['account_name']}.dfs.core.windows.net"
        return There(f"abfss://{object_stores.BUCKET}@{host}/{NAME}", {}, names)
    if scheme == "hf":
        names = {"HF_ENDPOINT": request.getfixturevalue("hub").url, "HF_TOKEN": "hf_CANARY"}
        return There(f"hf://datasets/ORG/NAME@v1/{NAME}", {}, names)
    web = request.getfixturevalue("web")
    url = web.url.replace("://", "://me%40x:CANARY%25%2F%40%20%C3%BC@")
    options = {"client_options": {"root_certificate": str(web.ca)}}
    return There(f"{url}/da%20ta%2520", options, {})


ALL = ["s3", "gs", "az", "abfss", "hf", "https"]


def take(place: There, monkeypatch: pytest.MonkeyPatch) -> Storage:
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    return Storage(options=place.options, timeout_s=20.0)


def epoch(path: Any, storage: Storage | None = None, workers: int = 0) -> list[Any]:
    dataset = ShardDataset(
        str(path), batch_size=8, decode=None, fields=("image", "label"), storage=storage
    )
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    return [([bytes(one) for one in images], labels.tolist()) for images, labels in loader]


@pytest.mark.parametrize("scheme", ALL)
def test_a_dataset_is_the_same_in_each_store(
    scheme: str, folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = there(scheme, request)
    storage = take(place, monkeypatch)
    here = shardio.open(folder / NAME, decode=None)
    assert list(shardio.open(place.url, decode=None, storage=storage)) == list(here)
    assert epoch(place.url, storage, 2) == epoch(folder / NAME)


@pytest.mark.parametrize("scheme", ALL)
def test_a_cache_keeps_what_each_store_has(
    scheme: str,
    folder: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    place = there(scheme, request)
    cache = {"cache": tmp_path, "cache_bytes": "1GiB"}
    storage = replace(take(place, monkeypatch), **cache)
    for _ in range(2):
        found = list(shardio.open(place.url, decode=None, storage=storage))
        assert found == list(shardio.open(folder / NAME, decode=None))
    [manifest] = [one for one in entries(tmp_path) if one.dataset_id == SMALL]
    assert manifest.present == manifest.size and len(entries(tmp_path)) > 1


ODD = ["a b", "p%20q", "p%q", "h#x", "q?x", "ünï", "x'\"y", "s*[1]", "back\\s", "d e/f+g&=", ".x"]


@pytest.mark.parametrize("scheme", ["s3", "az", "https"])
def test_odd_names_are_read_as_they_are(
    scheme: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = there(scheme, request)
    storage = take(place, monkeypatch)
    files = {name: tmp_path / "odd" / name for name in ODD}
    for name, file in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(name.encode())
    if scheme == "https":
        web = request.getfixturevalue("web")
        root, base = request.getfixturevalue("folder"), place.url.rpartition("/")[0]
        (root / "odd").symlink_to(tmp_path / "odd")
        (tmp_path / "odd" / "tab\tand\udcff").write_bytes(b"tab\tand\xff")
        names = [*ODD, "tab\tand\udcff"]
        assert web.ca is not None
    else:
        store = request.getfixturevalue({"s3": "s3", "az": "azure"}[scheme])
        store.put({f"odd/{name}": file for name, file in files.items()})
        base, names = place.url.rpartition("/")[0], ODD
    location = locate(f"{base}/odd", storage)
    for name in names:
        data = name.encode("utf-8", "surrogateescape")
        assert location.read(name, 100) == data
        assert location.open(name).read(1, len(data) - 1) == data[1:]
        known = KnownFile(len(data), b"", b"", 0)
        assert location.below("no").open(name, known).name.isprintable()
    if scheme != "https":
        with pytest.raises(StorageError, match="only names in UTF-8"):
            location.read("tab\tand\udcff", 100)


# --- credentials ----------------------------------------------------------------------------------


def read(url: str, **options: Any) -> Any:
    storage = Storage(options=options, timeout_s=30.0)
    return shardio.open(url, decode=None, storage=storage)[3]["label"]


def test_a_profile_is_read_and_read_again(
    s3: object_stores.ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = s3.options
    keys = [given["access_key_id"], given["secret_access_key"]]
    text = "[{}]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    credentials, config = tmp_path / "credentials", tmp_path / "config"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    config.write_text(f"[profile mine]\nregion = us-east-1\nendpoint_url = {given['endpoint']}\n")
    credentials.write_text(text.format("default", "AKIDOTHER", "CANARY"))
    url = f"{s3.url}/{NAME}"
    with pytest.raises(
        StorageError, match=r"profile 'yours' is not there.*config and .*credentials"
    ):
        read(url, profile="yours")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    credentials.write_text(text.format("mine", *keys))
    assert read(url) == 3
    monkeypatch.delenv("AWS_PROFILE")
    assert read(url, profile="mine") == 3
    credentials.write_text(text.format("mine", keys[0], "CANARY"))
    ranges.close()
    with pytest.raises(
        StorageError, match=r"SignatureDoesNotMatch.*the AWS profile 'mine'"
    ) as told:
        read(url, profile="mine")
    assert "CANARY" not in repr(told.value)
    credentials.write_text(text.format("mine", *keys))
    assert read(url, profile="mine") == 3  # by the same helper


def test_what_a_profile_runs_needs_boto3(
    s3: object_stores.ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3")
    given = s3.options
    said = {
        "Version": 1,
        "AccessKeyId": given["access_key_id"],
        "SecretAccessKey": given["secret_access_key"],
    }
    (tmp_path / "said").write_text(json.dumps(said))
    (tmp_path / "config").write_text(
        f"[profile sso]\ncredential_process = cat {tmp_path}/said\nregion = us-east-1\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "sso")
    monkeypatch.setenv("AWS_ENDPOINT_URL", given["endpoint"])
    assert read(f"{s3.url}/{NAME}") == 3
    program = """
        import sys
        sys.modules["botocore"] = sys.modules["botocore.session"] = None
        import shardio
        from shardio.storage import ranges
        ranges.hold_client()
        try:
            shardio.open(sys.argv[1])
        except shardio.ShardioError as error:
            print(type(error).__name__, error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), f"{s3.url}/{NAME}"]
    told = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=True
    ).stdout
    assert "DependencyError" in told and "shardio-torch[remote-aws]" in told


@pytest.mark.parametrize("lives_s", [3600, 60], ids=["refused", "renewed"])
@pytest.mark.parametrize("how", ["container", "instance", "google"])
def test_identities_are_renewed_while_an_epoch_runs(
    identities: identity_server.Identities,
    how: str,
    lives_s: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, options = f"s3://bucket/{NAME}", {"endpoint": identities.url, "region": "eu-north-1"}
    if how == "container":
        pytest.importorskip("boto3")
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{identities.url}/container")
    elif how == "instance":
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", identities.url)
    else:
        monkeypatch.setenv("GCE_METADATA_HOST", identities.url.partition("://")[2])
        url, options = f"gs://bucket/{NAME}", {"endpoint": identities.url}
    identities.set(lives_s=lives_s)
    storage = Storage(options=options)
    dataset = shardio.open(url, decode=None, storage=storage)
    assert dataset[0]["label"] == 0
    identities.set(keys=["SECOND"])  # the first ones are refused from now on
    assert [dataset[number]["label"] for number in range(RECORDS)] == list(range(RECORDS))
    assert identities.set()["given"] >= 2
    identities.set(keys=[])
    with pytest.raises(StorageError, match=r"403|no credentials came"):
        [dataset[number] for number in range(RECORDS)]
    identities.set(keys=["THIRD"])
    assert dataset[0]["label"] == 0


def test_an_identity_is_asked_again_where_too_many_ask(
    identities: identity_server.Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", identities.url)
    identities.set(refuse=[503, 429])
    assert read(f"s3://bucket/{NAME}", endpoint=identities.url) == 3
    figures = ranges.figures()
    assert figures is not None and set(figures.retries) == {"throttled"}


def test_keys_that_end_while_an_epoch_runs_are_asked_for_anew_once(
    s3: object_stores.ObjectStore, folder: Path, monkeypatch: pytest.MonkeyPatch
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


MISSING = {
    "s3": (f"s3://bucket/{NAME}", "AWS_ACCESS_KEY_ID.*AWS_PROFILE.*skip_signature"),
    "gs": (f"gs://bucket/{NAME}", "GOOGLE_APPLICATION_CREDENTIALS.*gcloud.*skip_signature"),
    "az": (f"az://bucket/{NAME}", "use_azure_cli.*AZURE_STORAGE_ACCOUNT_KEY.*skip_signature"),
    "hf": (f"hf://datasets/ORG/NAME@v1/{NAME}", "HF_TOKEN.*hf auth login"),
}


@pytest.mark.parametrize("scheme", MISSING)
def test_missing_credentials_are_told_at_once(
    scheme: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "account")
    if scheme == "hf":
        monkeypatch.setenv("HF_ENDPOINT", request.getfixturevalue("hub").url)
    url, what = MISSING[scheme]
    with pytest.raises(StorageError, match=f"no credentials were found. Looked for.*{what}"):
        read(url)
    figures = ranges.figures()
    assert figures is not None and figures.requests == 1


def test_what_is_set_after_the_error_is_used(
    s3: object_stores.ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{s3.url}/{NAME}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.options["endpoint"])
    with pytest.raises(StorageError, match="no credentials were found"):
        read(url)
    helper = ranges.helper_pid()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.options["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.options["secret_access_key"])
    assert read(url) == 3
    assert ranges.helper_pid() == helper


def test_what_is_public_is_read_without_credentials(
    gcs: object_stores.ObjectStore, identities: identity_server.Identities
) -> None:
    address = f"http://127.0.0.1:{gcs.port}"
    assert read(f"{gcs.url}/{NAME}", endpoint=address, skip_signature=True) == 3
    identities.set(keys=[""])  # for who shows nothing, too
    assert read(f"s3://bucket/{NAME}", endpoint=identities.url, skip_signature=True) == 3
    assert all(not shown for _, shown in identities.set()["asked"])
    identities.set(keys=["x"])
    with pytest.raises(StorageError, match=r"403 .*AccessDenied.*because of skip_signature"):
        read(f"s3://bucket/{NAME}", endpoint=identities.url, skip_signature=True)


def test_the_region_of_a_bucket_is_found(identities: identity_server.Identities) -> None:
    identities.set(region="eu-north-1")
    keys = {"access_key_id": "FIRST", "secret_access_key": "CANARY"}
    assert read(f"s3://bucket/{NAME}", endpoint=identities.url, **keys) == 3
    ranges.close()
    identities.set(asked=[])
    assert read(f"s3://bucket/{NAME}", endpoint=identities.url, region="eu-north-1", **keys) == 3
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
            read(url, **options)


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


def test_the_token_of_the_hub_stays_there(
    hub: hub_server.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("hf_CANARY\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    assert read(f"hf://datasets/ORG/NAME@v1/{NAME}") == 3
    asked = [one for one in hub.requests() if one.status < 400]
    assert {one.server for one in asked} == {"hub", "cdn"}
    assert all(one.authorized is (one.server == "hub") for one in asked)


def test_what_is_public_on_the_hub_needs_no_login(hub: hub_server.Hub) -> None:
    hub.set(token=None)
    try:
        assert read(f"hf://datasets/ORG/NAME@v1/{NAME}", endpoint=hub.url) == 3
    finally:
        hub.set(token="hf_CANARY")


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


def test_certificates_and_proxies_of_this_machine_are_used(
    web: servers.Web, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = web.url.replace("://", "://me%40x:CANARY%25%2F%40%20%C3%BC@") + "/da%20ta%2520"
    with pytest.raises(StorageError, match=r"certificate was not accepted.*root_certificate"):
        read(url)
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.setenv(name, str(web.ca))
        ranges.close()
        assert read(url) == 3
        monkeypatch.delenv(name)
    ranges.close()
    with servers.nginx(folder) as plain:
        # As a proxy it takes whole URLs, and leaves out their host.
        monkeypatch.setenv("HTTP_PROXY", plain.url)
        assert read("http://nowhere.invalid/da%20ta%2520") == 3
        monkeypatch.setenv("NO_PROXY", ".invalid")
        ranges.close()
        with pytest.raises(StorageError, match="name is not known"):
            read("http://nowhere.invalid/da%20ta%2520")


def test_the_azure_client_is_asked_where_it_is_told(
    identities: identity_server.Identities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {
        "accessToken": "FIRST",
        "expiresOn": "2099-01-01 00:00:00.000000",
        "tokenType": "Bearer",
    }
    said |= {"expires_on": 4070908800, "subscription": "x", "tenant": "y"}
    (tmp_path / "az").write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\n")
    (tmp_path / "az").chmod(0o755)
    url, options = f"az://bucket/{NAME}", {"endpoint": identities.url, "account_name": "x"}
    with pytest.raises(StorageError, match="no credentials came of `az login`"):
        read(url, use_azure_cli=True, **options)
    ranges.close()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert read(url, use_azure_cli=True, **options) == 3


# --- secrets --------------------------------------------------------------------------------------

CANARY = "CANARY0123456789abcdef"
GIVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "s3": ("s3://bucket/x", {"access_key_id": f"A{CANARY}", "secret_access_key": CANARY}),
    "session": ("s3://bucket/x", {"access_key_id": "A", "secret_access_key": "b", "token": CANARY}),
    "flag": ("s3://bucket/x", {"skip_signature": CANARY}),
    "gs": ("gs://bucket/x", {"service_account_key": json.dumps({"private_key": CANARY})}),
    "bearer": ("gs://bucket/x", {"bearer_token": CANARY}),
    "az": ("az://bucket/x", {"account_name": "a", "account_key": CANARY}),
    "sas": ("az://bucket/x", {"account_name": "a", "sas_key": f"sv=2021&sig={CANARY}"}),
    "connection": ("az://bucket/x", {"connection_string": f"AccountKey={CANARY}"}),
    "hf": ("hf://datasets/ORG/NAME/x", {"token": CANARY}),
    "user": (f"http://me:{CANARY}@HOST/x", {}),
    "query": (f"http://HOST/x?sig={CANARY}", {}),
    "header": ("http://HOST/x", {"client_options": {"default_headers": {"X": f"{CANARY}\n"}}}),
    "pem": ("http://HOST/x", {"client_options": {"root_certificate": f"-----BEGIN {CANARY}"}}),
    "at": (f"s3://me:{CANARY}@bucket/x", {}),
}
FAULTS = ["", "403", "404", "500", "reset", "short", "refused", "wrong"]


@pytest.mark.parametrize("fault", FAULTS)
def test_no_secret_is_told(
    fault: str, identities: identity_server.Identities, capfd: pytest.CaptureFixture[str]
) -> None:
    with fault_proxy(identities.port) as proxy:
        proxy.rules(*([Rule(fault)] if fault not in ("", "wrong") else []))
        for url, options in GIVEN.values():
            given = dict(options)
            if url.startswith(("s3", "gs", "az", "hf")):
                address = "ftp://x" if fault == "wrong" else f"http://127.0.0.1:{proxy.port}"
                given["endpoint"] = address
            url = url.replace("HOST", f"127.0.0.1:{proxy.port}")
            proxy.listen()
            told: list[Any] = []
            try:
                storage = Storage(options=given, timeout_s=0.3)
                told += [storage, Store(url, given)]
                shardio.open(url, storage=storage)
            except ShardioError as error:
                told += chain(error)
            assert told and CANARY not in repr(told), url
            assert not any(CANARY in f"{one!r} {one}" for one in told), url
        if pid := ranges.helper_pid():
            for name in ("cmdline", "environ", "comm"):
                assert CANARY.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
        said = capfd.readouterr()
        assert CANARY not in said.out + said.err


def test_no_secret_is_in_what_a_store_said(identities: identity_server.Identities) -> None:
    identities.set(echo=True)
    with pytest.raises(StorageError, match=r"403 .*\[hidden\]") as told:
        read("gs://bucket/x", endpoint=identities.url, bearer_token=CANARY)
    assert CANARY not in repr(chain(told.value))


def test_no_secret_is_behind_the_errors_of_a_process_with_a_client(
    identities: identity_server.Identities,
) -> None:
    program = """
        import json, sys
        import shardio
        from shardio.storage import ranges
        ranges.hold_client()
        for url, options in json.load(sys.stdin):
            try:
                shardio.open(url, storage=shardio.Storage(options=options, timeout_s=0.2))
            except shardio.ShardioError as error:
                while error is not None:
                    print(type(error).__name__, repr(error))
                    error = error.__cause__ or error.__context__
    """
    given = []
    for url, options in GIVEN.values():
        if not url.startswith("http"):
            options = {**options, "endpoint": identities.url}
        given.append([url.replace("HOST", identities.url.partition("://")[2]), options])
    command = [sys.executable, "-c", textwrap.dedent(program)]
    asked = json.dumps(given)
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0 and done.stdout.count("StorageError") >= 6
    assert CANARY not in done.stdout + done.stderr


def chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and one not in found:
            found.append(one)
            waiting += [one.__cause__, one.__context__]
    return found


def test_no_secret_is_kept_in_a_state_or_shown(s3: object_stores.ObjectStore, folder: Path) -> None:
    storage = Storage(options=s3.options)
    dataset = ShardDataset(f"{s3.url}/{NAME}", batch_size=8, decode=None, storage=storage)
    secret = s3.options["secret_access_key"]
    opened = shardio.open(f"{s3.url}/{NAME}", decode=None, storage=storage)
    shown = [repr(one) for one in (storage, dataset, opened, opened.reader.storage)]
    shown += [repr(vars(opened.reader.storage)), json.dumps(dataset.state_dict(steps=0))]
    assert not any(secret in one for one in shown)


@pytest.mark.parametrize(
    "url",
    [
        *("s3://", "s3:///x", "gs://", "az://", "az://a@b/x", "abfss://container/x", "https://"),
        *("hf://ORG/NAME/x", "hf://datasets/NAME", "hf://models/a/b/c", "hf://datasets/"),
    ],
)
def test_a_url_that_names_nothing_is_told(url: str) -> None:
    with pytest.raises(OptionError, match="expected"):
        shardio.open(url)


@pytest.mark.parametrize("path", ["s3:/bucket/x", "s3:bucket/x", "S3:/me:CANARY@bucket/x"])
def test_a_url_with_a_slash_too_few_is_told(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (shardio.open, lambda out: shardio.copy(tmp_path, out)):
        with pytest.raises(OptionError, match=r"(?i)expected s3://bucket/x") as told:
            use(path)
        assert "CANARY" not in str(told.value)
    (tmp_path / path.partition("/")[0]).mkdir()
    assert locate(path).url == path


def test_a_url_without_a_bucket_is_shown_as_it_is() -> None:
    with pytest.raises(OptionError, match=r"^s3://: expected s3://BUCKET/PATH"):
        locate("s3://")


@pytest.mark.parametrize("name", ["manifest.json", "shardio.json", "00000-0.shard"])
def test_of_a_file_of_a_dataset_the_folder_is_named(
    name: str, s3: object_stores.ObjectStore
) -> None:
    with pytest.raises(NotPackedError, match=f"give the URL of its folder, {s3.url}/{NAME}$"):
        read(f"{s3.url}/{NAME}/{name}", **s3.options)


def test_options_are_plain_and_of_the_store(s3: object_stores.ObjectStore) -> None:
    with pytest.raises(OptionError, match="credential_provider is a function"):
        read(f"{s3.url}/{NAME}", credential_provider=lambda: {})
    with pytest.raises(OptionError, match="nonsense"):
        read(f"{s3.url}/{NAME}", nonsense=1)
    with pytest.raises(OptionError, match=r"no options but .*; found region"):
        read("https://127.0.0.1/x", region="x")
    assert set(SCHEMES) >= set(ALL)


KEYS = "Expected both: the options access_key_id and secret_access_key"
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("s3", {"regoin": "x"}, "s3:// has no option 'regoin'; .*: did you mean 'region'"),
    ("s3", {"AWS_REGOIN": "x"}, "did you mean 'region'"),
    ("s3", {"bucket": "other"}, "s3:// has no option 'bucket'; there are region, "),
    ("gs", {"endpiont": "http://x"}, "gs:// has no option 'endpiont'; .*: did you mean 'endpoint'"),
    ("az", {"accountname": "x"}, "az:// has no option .*: did you mean 'account_name'"),
    ("az", {}, "no account is given. .*account_name.*AZURE_STORAGE_ACCOUNT_NAME"),
    ("s3", {"client_options": {"time-out": "1s"}}, "client_options has no .*mean 'timeout'"),
    ("s3", {"client_options": "x"}, "expected client_options={'NAME': ...}"),
    (
        "s3",
        {"client_options": {"timeout": "soon"}},
        "the option timeout: .*such as 30s",
    ),
    ("s3", {"access_key_id": CANARY}, f"found an access key's id without its secret. {KEYS}"),
    ("s3", {"secret_access_key": CANARY}, f"found an access key's secret without its id. {KEYS}"),
    ("s3", {"skip_signature": CANARY}, "the option skip_signature: .*; expected true or false"),
    ("s3", {"token": 12345}, "the option token: cannot be read; expected a str"),
]


@pytest.mark.parametrize(("scheme", "options", "what"), WRONG)
def test_a_wrong_option_is_told_with_what_to_write(
    scheme: str, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(OptionError, match=what) as told:
        read(f"{scheme}://bucket/x", **options)
    assert CANARY not in str(told.value) and "Generic" not in str(told.value)


def test_half_of_a_key_in_the_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    with pytest.raises(OptionError, match="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        read("s3://bucket/x")


def refusal(scheme: str, options: dict[str, Any]) -> str:
    try:
        stores.open_store(Store(f"{scheme}://bucket/x", options))
    except (OptionError, MissingError) as error:  # no such profile, or file
        return str(error)
    return ""


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_the_options_that_messages_name_are_known(scheme: str) -> None:
    assert "has no option" in refusal(scheme, {"nothing": "x"})
    for name in {*store_options.NAMES[scheme].split()} - {"client_options"}:
        assert "has no option" not in refusal(scheme, {name: "http://x"}), name
    for name in store_options.NAMES["client_options"].split():
        assert "has no option" not in refusal(scheme, {"client_options": {name: "x"}}), name


# --- stores that ask for fewer requests -----------------------------------------------------------


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
            proxy.reset()
            proxy.rules(Rule("503", path="blob", numbers=faults, retry_after=1))
            assert file.read_again(5, 100) == data[5:105]
            log = proxy.figures().log
            assert [one.range for one in log] == ["bytes=5-104", "bytes=0-0", "bytes=5-104"]
            asked = log[1]
            if kind == "s3":  # moto does not know signed URLs where it knows users
                keys = there.options["secret_access_key"]
                assert is_signed(asked.path, f"127.0.0.1:{proxy.port}", keys)
            elif faults == [0]:  # Azurite does; and obstore signs only plain names rightly
                assert asked.status == (403 if folder else 206)
    figures = ranges.figures()
    assert figures is not None
    assert 1.0 <= figures.waited_s < 25.0 and figures.retries == {"throttled": 2}


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("/a/b@c?d", "/a/b@c?d"),
        ("http://user:word@host:80/a@b/c?sig=S#f", "http://host:80/a@b/c"),
        ("https://host?sig=S", "https://host"),
        ("s3://key:word@bucket/a?b", "s3://bucket/a?b"),
        ("s3://key:wo/rd+w/o@bucket/a", "s3://bucket/a"),
        ("https://user:w?o/rd@host/a?b", "https://host/a"),
        ("ftp://user:w#ord@host/a", "ftp://host/a"),
        ("http://host:80/a:c/b@d", "http://host:80/a:c/b@d"),
        ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
        ("az://container/a?sv=1&sig=S", "az://container/a"),
        ("hf://datasets/user/name@main/a", "hf://datasets/user/name@main/a"),
        ("abfss://container@account.dfs.core.windows.net/a",) * 2,
    ],
)
def test_what_is_printed_of_a_url_has_no_secrets(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


def test_a_url_with_keys_in_it_is_refused_without_them() -> None:
    urls = ["s3://key:SEC/RET@bucket/a", "gs://key:SEC/RET@bucket/a", "ftp://me:SECRET@host/a"]
    for url in (*urls, "http://[x]/a", "http://me:SECRET@[::1/a"):
        with pytest.raises(OptionError) as refused:
            locate(url)
        assert "SEC" not in str(refused.value) and "RET" not in str(refused.value)
    for endpoint in (
        "me:SECRET@host",
        "http://me:SEC/RET@host",
        "https://me:S?ECRET@host",
        "http://[x]/host",
    ):
        with pytest.raises(OptionError, match=r"'.*host'") as refused:
            stores.open_store(Store("s3://bucket/a", {"endpoint": endpoint, "region": "x"}))
        assert "SEC" not in str(refused.value) and "RET" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket/a", "AWS_ACCESS_KEY_ID"),
        ("s3://bucket/a", "AWS_SESSION_TOKEN"),
        ("s3://bucket/a", "AWS_REGION"),
        ("gs://bucket/a", "bearer_token"),
        ("az://container/a", "token"),
    ],
)
def test_a_key_that_cannot_be_sent_is_refused_by_its_name(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"account_name": "x"} if url.startswith("az") else {}
    if name.isupper():
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "SECRET")
        monkeypatch.setenv(name, "SECRET\r")
    else:
        options[name] = "SECRET\n"
    with pytest.raises(OptionError, match=f"{name} has a line break") as refused:
        stores.open_store(Store(url, options))
    assert "SECRET" not in str(refused.value).replace(name, "")


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
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert "panicked" in done.stderr
    assert done.stdout.startswith("other the client failed: ") and "SECRET" not in done.stdout


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:80", "s3.amazonaws.com", " http://x", "ftp://x", "http://x:99999"]
)
@pytest.mark.parametrize("url", ["s3://bucket/a", "az://container/a"])
def test_an_endpoint_that_is_no_url_is_refused(url: str, endpoint: str) -> None:
    """The client itself would panic."""
    with pytest.raises(OptionError, match="expected a URL that begins with https:// or http://"):
        stores.open_store(Store(url, {"endpoint": endpoint}))


@pytest.mark.parametrize("endpoint", ["127.0.0.1:80", ""])
def test_so_is_one_of_the_environment(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(OptionError, match="expected a URL"):
        stores.open_store(Store("s3://bucket/a", {}))


def test_an_endpoint_with_the_bucket_is_refused() -> None:
    options = {"endpoint": "https://user:pw@r2.example/bucket/"}
    with pytest.raises(OptionError, match=r"ends in the bucket.* Expected https://r2\.example$"):
        stores.open_store(Store("s3://bucket/a", options))
    stores.open_store(Store("s3://other/a", options))


@pytest.mark.parametrize(("given", "meant"), [("s3a", "s3"), ("gcs", "gs"), ("htpps", "https")])
def test_a_slip_of_a_scheme_is_asked_about(given: str, meant: str) -> None:
    with pytest.raises(OptionError, match=rf"{given}:// is not known; .*did you mean '{meant}'"):
        locate(f"{given}://bucket/a")


@pytest.mark.parametrize("url", ["s3://a b/c", "gs://a\tb/c", "az://a?b/c"])
def test_a_bucket_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="there can be no bucket"):
        stores.open_store(Store(url, {}))
