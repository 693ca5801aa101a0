"""Credentials as users have them, from real servers: found, renewed, told, and never shown."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import hub_server, identity_server, object_stores, servers
from support.fault_proxy import fault_proxy
from support.faults import Rule
from support.store_datasets import NAME, RECORDS, label
from support.url_datasets import run

import shardio
from shardio import ShardDataset, Storage
from shardio.errors import ShardioError, StorageError
from shardio.storage import ranges
from shardio.storage.stores import Store

pytestmark = pytest.mark.usefixtures("alone")


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
        label(url, profile="yours")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    credentials.write_text(text.format("mine", *keys))
    assert label(url) == 3
    monkeypatch.delenv("AWS_PROFILE")
    assert label(url, profile="mine") == 3
    credentials.write_text(text.format("mine", keys[0], "CANARY"))
    ranges.close()
    with pytest.raises(
        StorageError, match=r"SignatureDoesNotMatch.*the AWS profile 'mine'"
    ) as told:
        label(url, profile="mine")
    assert "CANARY" not in repr(told.value)
    credentials.write_text(text.format("mine", *keys))
    assert label(url, profile="mine") == 3  # by the same helper


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
    assert label(f"{s3.url}/{NAME}") == 3
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
    told = run(program, f"{s3.url}/{NAME}").stdout
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
        label(url)
    figures = ranges.figures()
    assert figures is not None and figures.requests == 1


def test_what_is_set_after_the_error_is_used(
    s3: object_stores.ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{s3.url}/{NAME}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.options["endpoint"])
    with pytest.raises(StorageError, match="no credentials were found"):
        label(url)
    helper = ranges.helper_pid()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.options["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.options["secret_access_key"])
    assert label(url) == 3
    assert ranges.helper_pid() == helper


def test_what_is_public_is_read_without_credentials(
    gcs: object_stores.ObjectStore, identities: identity_server.Identities
) -> None:
    address = f"http://127.0.0.1:{gcs.port}"
    assert label(f"{gcs.url}/{NAME}", endpoint=address, skip_signature=True) == 3
    identities.set(keys=[""])  # for who shows nothing, too
    assert label(f"s3://bucket/{NAME}", endpoint=identities.url, skip_signature=True) == 3
    assert all(not shown for _, shown in identities.set()["asked"])
    identities.set(keys=["x"])
    with pytest.raises(StorageError, match=r"403 .*AccessDenied.*because of skip_signature"):
        label(f"s3://bucket/{NAME}", endpoint=identities.url, skip_signature=True)


def test_the_token_of_the_hub_stays_there(
    hub: hub_server.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("hf_CANARY\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    assert label(f"hf://datasets/ORG/NAME@v1/{NAME}") == 3
    asked = [one for one in hub.requests() if one.status < 400]
    assert {one.server for one in asked} == {"hub", "cdn"}
    assert all(one.authorized is (one.server == "hub") for one in asked)


def test_what_is_public_on_the_hub_needs_no_login(hub: hub_server.Hub) -> None:
    hub.set(token=None)
    try:
        assert label(f"hf://datasets/ORG/NAME@v1/{NAME}", endpoint=hub.url) == 3
    finally:
        hub.set(token="hf_CANARY")


def test_certificates_and_proxies_of_this_machine_are_used(
    tls_web: servers.Web, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tls_web.url.replace("://", "://me%40x:CANARY%25%2F%40%20%C3%BC@") + "/da%20ta%2520"
    with pytest.raises(StorageError, match=r"certificate was not accepted.*root_certificate"):
        label(url)
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.setenv(name, str(tls_web.ca))
        ranges.close()
        assert label(url) == 3
        monkeypatch.delenv(name)
    ranges.close()
    with servers.nginx(stored) as plain:
        # As a proxy it takes whole URLs, and leaves out their host.
        monkeypatch.setenv("HTTP_PROXY", plain.url)
        assert label("http://nowhere.invalid/da%20ta%2520") == 3
        monkeypatch.setenv("NO_PROXY", ".invalid")
        ranges.close()
        with pytest.raises(StorageError, match="name is not known"):
            label("http://nowhere.invalid/da%20ta%2520")


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
        label(url, use_azure_cli=True, **options)
    ranges.close()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert label(url, use_azure_cli=True, **options) == 3


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
        label("gs://bucket/x", endpoint=identities.url, bearer_token=CANARY)
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
    done = run(program, input=json.dumps(given))
    assert done.stdout.count("StorageError") >= 6
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


def test_no_secret_is_kept_in_a_state_or_shown(s3: object_stores.ObjectStore, stored: Path) -> None:
    storage = Storage(options=s3.options)
    dataset = ShardDataset(f"{s3.url}/{NAME}", batch_size=8, decode=None, storage=storage)
    secret = s3.options["secret_access_key"]
    opened = shardio.open(f"{s3.url}/{NAME}", decode=None, storage=storage)
    shown = [repr(one) for one in (storage, dataset, opened, opened.reader.storage)]
    shown += [repr(vars(opened.reader.storage)), json.dumps(dataset.state_dict(steps=0))]
    assert not any(secret in one for one in shown)
