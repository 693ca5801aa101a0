"""Servers that all tests of this room may read from: a web server, and stores of each kind.

What lies on them is in `support.url_datasets` and `support.store_datasets`. A module that needs
other data has a fixture of the same name.

No request leaves the machine: each store is given an address here, and `alone` takes away all
others. A test that forgot one fails.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import (
    hub_server,
    identity_server,
    object_stores,
    servers,
    store_datasets,
    url_datasets,
)
from support.fault_proxy import FaultProxy, fault_proxy
from support.object_stores import ObjectStore
from support.store_datasets import NAME, NOWHERE, RECORDS

from shardio.storage import ranges


@pytest.fixture(autouse=True)
def no_helper_is_left() -> Iterator[None]:
    """Ends the helper process of a test, with what is under way."""
    yield
    ranges.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes the folder of the web server: `data`, `lmdb`, `file` and `blob`."""
    folder = tmp_path_factory.mktemp("www")
    url_datasets.write(folder / "data")
    url_datasets.write(folder / "lmdb", "lmdb")
    (folder / "file").write_bytes(url_datasets.content())
    (folder / "blob").write_bytes(url_datasets.BLOB)
    return folder


@pytest.fixture(scope="session")
def web(folder: Path) -> Iterator[servers.Web]:
    with servers.nginx(folder) as web:
        yield web


@pytest.fixture(scope="session")
def proxy_of_all(web: servers.Web) -> Iterator[FaultProxy]:
    with fault_proxy(web.port) as proxy:
        yield proxy


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Takes away what this machine knows of stores, and all ways to others."""
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


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes the folder that all these stores have, with the dataset in it."""
    folder = tmp_path_factory.mktemp("stores")
    url_datasets.write_images(folder / NAME, RECORDS, store_datasets.image, 100_000)
    return folder


@pytest.fixture(scope="session")
def s3(stored: Path) -> Iterator[ObjectStore]:
    with object_stores.s3(private=True) as store:
        store.put_folder(stored)
        yield store


@pytest.fixture(scope="session")
def gcs(stored: Path) -> Iterator[ObjectStore]:
    with object_stores.gcs() as store:
        store.put_folder(stored)
        yield store


@pytest.fixture(scope="session")
def azure(stored: Path) -> Iterator[ObjectStore]:
    with object_stores.azurite() as store:
        store.put_folder(stored)
        yield store


@pytest.fixture(scope="session")
def hub(stored: Path) -> Iterator[hub_server.Hub]:
    (stored / "ORG" / "NAME").mkdir(parents=True)
    (stored / "ORG" / "NAME" / "v1").symlink_to(stored)
    with hub_server.hub(stored, token=store_datasets.HUB_TOKEN) as hub:
        yield hub


@pytest.fixture(scope="session")
def tls_web(stored: Path) -> Iterator[servers.Web]:
    user, password = store_datasets.USER, store_datasets.PASSWORD
    with servers.nginx(stored, tls=True, user=user, password=password) as web:
        yield web


@pytest.fixture(scope="session")
def gate(stored: Path) -> Iterator[identity_server.Identities]:
    with identity_server.identities(stored) as gate:
        yield gate


@pytest.fixture
def identities(gate: identity_server.Identities) -> identity_server.Identities:
    """Gives the server of identities, as if no test had used it before."""
    gate.set(keys=["FIRST"], lives_s=3600, refuse=[], region="", echo=False, given=0, asked=[])
    return gate
