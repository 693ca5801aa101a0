"""Object stores of each kind, from real servers: datasets in them, URLs, endpoints, odd names."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support import object_stores
from support.store_datasets import EACH, NAME, epoch, label, take, there

import shardio
from shardio.errors import NotPackedError, OptionError, StorageError
from shardio.storage import store_options, stores
from shardio.storage.base import KnownFile
from shardio.storage.cache import SMALL, entries
from shardio.storage.credentials import LOOKED_FOR, environment
from shardio.storage.location import locate
from shardio.storage.stores import READ_ONLY, SCHEMES, Store, without_secrets

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("scheme", EACH)
def test_a_dataset_is_the_same_in_each_store(
    scheme: str, stored: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = there(scheme, request)
    storage = take(place, monkeypatch)
    here = shardio.open(stored / NAME, decode=None)
    assert list(shardio.open(place.url, decode=None, storage=storage)) == list(here)
    assert epoch(place.url, storage, 2) == epoch(stored / NAME)


@pytest.mark.parametrize("scheme", EACH)
def test_a_cache_keeps_what_each_store_has(
    scheme: str,
    stored: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    place = there(scheme, request)
    cache = {"cache": tmp_path, "cache_bytes": "1GiB"}
    storage = replace(take(place, monkeypatch), **cache)
    for _ in range(2):
        found = list(shardio.open(place.url, decode=None, storage=storage))
        assert found == list(shardio.open(stored / NAME, decode=None))
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
        web = request.getfixturevalue("tls_web")
        root, base = request.getfixturevalue("stored"), place.url.rpartition("/")[0]
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


def test_a_url_without_a_bucket_is_shown_as_it_is() -> None:
    with pytest.raises(OptionError, match=r"^s3://: expected s3://BUCKET/PATH"):
        locate("s3://")


@pytest.mark.parametrize("name", ["manifest.json", "shardio.json", "00000-0.shard"])
def test_of_a_file_of_a_dataset_the_folder_is_named(
    name: str, s3: object_stores.ObjectStore
) -> None:
    with pytest.raises(NotPackedError, match=f"give the URL of its folder, {s3.url}/{NAME}$"):
        label(f"{s3.url}/{NAME}/{name}", **s3.options)


def test_options_are_plain_and_of_the_store(s3: object_stores.ObjectStore) -> None:
    with pytest.raises(OptionError, match="credential_provider is a function"):
        label(f"{s3.url}/{NAME}", credential_provider=lambda: {})
    with pytest.raises(OptionError, match="nonsense"):
        label(f"{s3.url}/{NAME}", nonsense=1)
    with pytest.raises(OptionError, match=r"no options but .*; found region"):
        label("https://127.0.0.1/x", region="x")
    assert set(SCHEMES) >= set(EACH)


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


@pytest.mark.parametrize("url", ["s3://a b/c", "gs://a\tb/c", "az://a?b/c"])
def test_a_bucket_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="there can be no bucket"):
        stores.open_store(Store(url, {}))


EXAMPLES = {
    "s3": "s3://bucket/a",
    "gs": "gs://bucket/a",
    "az": "az://container/a",
    "abfs": "abfs://container@account.dfs.core.windows.net/a",
    "abfss": "abfss://container@account.dfs.core.windows.net/a",
    "hf": "hf://datasets/ORG/NAME/a",
    "http": "http://host/a",
    "https": "https://host/a",
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_known_of_a_scheme_is_in_each_table(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """URLs, options, credentials, and the variables that the helper process gets."""
    with pytest.raises(OptionError, match="expected"):
        Store(f"{scheme}://")
    store = Store(EXAMPLES[scheme], {"account_name": "account"} if scheme == "az" else {})
    stores.open_store(store)
    assert scheme in READ_ONLY or "endpoint" in store_options.NAMES[store.kind]
    variables = set(re.findall("[A-Z]+_[A-Z_]+", LOOKED_FOR[store.kind]))
    assert variables or store.kind == "http"
    for name in variables:
        monkeypatch.setenv(name, "x")
    assert environment().keys() >= variables
