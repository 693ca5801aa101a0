"""What lies in a folder of a store is listed whole and once, whatever fails meanwhile."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import LIMIT_S, hub_server, object_stores, servers
from support.fault_proxy import fault_proxy
from support.faults import Rule
from support.object_stores import ObjectStore
from support.trees import environment

from shardio import Storage
from shardio.errors import OptionError, StorageError
from shardio.storage.listing import ObjectEntry, Page, SortCheck
from shardio.storage.location import locate
from shardio.storage.remote import RemoteLocation

FOLDER = "da ta%20"
FILES = ["a-b/3", "a/1.jpg", "a/2.jpg", "b/x y%20ü.jpg", ".h", "e", "zero", "b.jpg"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    for name in FILES:
        (root / FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        (root / FOLDER / name).write_bytes(b"" if name == "zero" else name.encode())
    (root / "da ta").mkdir()
    (root / "da ta" / "other").write_bytes(b"of another folder")
    return root


@pytest.fixture(scope="module")
def s3(files: Path) -> Iterator[ObjectStore]:
    with object_stores.s3() as store:
        store.put_folder(files)
        for marker in ("a", "empty", "empty/deep"):
            store.mark(f"{FOLDER}/{marker}")
        yield store


@pytest.fixture(scope="module")
def azure(files: Path) -> Iterator[ObjectStore]:
    with object_stores.azurite() as store:
        store.put_folder(files)
        yield store


@pytest.fixture(scope="module")
def gcs(files: Path) -> Iterator[ObjectStore]:
    with object_stores.gcs() as store:
        store.put_folder(files)
        store.mark(f"{FOLDER}/empty")
        yield store


def place(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, folder: str = FOLDER, timeout_s: float = 20
) -> RemoteLocation:
    options = store.options
    if store.url.startswith("gs"):
        monkeypatch.setenv("GOOGLE_BASE_URL", f"http://127.0.0.1:{store.port}")
    url = f"{store.url}/{folder}".rstrip("/")
    found = locate(url, Storage(options=options, timeout_s=timeout_s))
    assert isinstance(found, RemoteLocation)
    return found


def listed(found: RemoteLocation) -> list[tuple[str, int]]:
    return [(one.path, one.size) for one in found.walk(list)]


IN_ORDER = [(name, 0 if name == "zero" else len(name.encode())) for name in sorted(FILES)]


@pytest.mark.parametrize("kind", ["s3", "azure", "gcs"])
def test_a_folder_is_listed_in_bytewise_order_without_markers_of_folders(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = request.getfixturevalue(kind)
    here = place(store, monkeypatch)
    found = list(here.walk(list))
    assert [(one.path, one.size) for one in found] == IN_ORDER
    assert all(one.mtime_ns > 1_600_000_000 * 10**9 for one in found)
    tags = {one.path: one.tag for one in found}
    assert tags["a/1.jpg"] and '"' not in tags["a/1.jpg"]
    assert tags["a/1.jpg"] != tags["b.jpg"]
    assert listed(here.below("a")) == [("1.jpg", 7), ("2.jpg", 7)]
    assert listed(here.below("nothing")) == []
    whole = [f"{FOLDER}/{name}" for name in FILES] + ["da ta/other"]
    assert [path for path, _ in listed(place(store, monkeypatch, ""))] == sorted(whole)


@pytest.mark.parametrize("page", [1000, 3])
def test_the_hub_lists_a_folder(
    page: int, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ORG" / "NAME").mkdir(parents=True)
    (tmp_path / "ORG" / "NAME" / "v1").symlink_to(files)
    with hub_server.hub(tmp_path, token="hf_CANARY") as hub:
        hub.set(page=page)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_CANARY")
        found = locate(f"hf://datasets/ORG/NAME@v1/{FOLDER}")
        assert isinstance(found, RemoteLocation)
        assert sorted(listed(found)) == IN_ORDER
        pages = [one for one in hub.requests() if "/tree/" in one.path]
        assert len(pages) == (1 if page == 1000 else 4)
        assert all(one.authorized for one in pages)
        assert listed(found.below("nothing")) == []
        other = locate("hf://datasets/ORG/NAME@v2/x")
        assert isinstance(other, RemoteLocation)
        with pytest.raises(StorageError, match=r"NAME@v2/x.*no such revision"):
            listed(other)


def test_plain_http_is_not_listed(files: Path) -> None:
    with servers.nginx(files) as web:
        found = locate(web.url)
        assert isinstance(found, RemoteLocation)
        with pytest.raises(OptionError, match=r"cannot be listed. Give a listing of the files"):
            listed(found)


@pytest.mark.parametrize("kind", ["503", "short", pytest.param("timeout", marks=pytest.mark.slow)])
def test_a_request_that_fails_is_sent_again(
    kind: str, s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fault_proxy(s3.port) as proxy:
        proxy.rules(Rule(kind, path="list-type", numbers=[0, 1]))
        found = place(s3.through(proxy.port), monkeypatch, timeout_s=8)
        assert listed(found) == IN_ORDER
        assert proxy.figures().faults == {kind: 2}


@pytest.mark.parametrize(
    ("kind", "cause"),
    [("403", "answered 403"), ("404", "not there"), ("503", "(answered 503|in time).*attempts")],
)
def test_what_fails_for_good_is_an_error_and_no_empty_folder(
    kind: str, cause: str, s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fault_proxy(s3.port) as proxy:
        proxy.rules(Rule(kind))
        found = place(s3.through(proxy.port), monkeypatch, timeout_s=4)
        with pytest.raises(StorageError, match=rf"{FOLDER}.*{cause}"):
            listed(found)


def test_a_bucket_that_is_not_there_is_named(
    s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = locate("s3://nobody/x", Storage(options=s3.options))
    assert isinstance(found, RemoteLocation)
    with pytest.raises(StorageError, match=r"s3://nobody/x.*cannot list.*no such bucket"):
        listed(found)


PROGRAM = """
import json, sys
import obstore
from obstore.store import MemoryStore
from shardio.storage import listing

listing.PAGE = 3
store = MemoryStore()
for name, size in json.loads(sys.argv[1]):
    obstore.put(store, "d/" + name, b"x" * size)
lister = listing.Lister(obstore)

def walk(broken):
    found, after, pages = [], "", []
    while True:
        if broken:  # each page comes from a new stream
            lister._streams.clear()
        page = listing.Page.load(lister.page(store, "d", after).dump())
        found += page.entries
        pages.append([len(page.entries), page.anew])
        after = page.after
        if not after:
            return found, pages

print(json.dumps([walk(False), walk(True)]))
"""


def pages(files: list[tuple[str, int]]) -> Any:
    """List objects page by page; in a process of its own, since a client is not safe to fork."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(files)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_listing_goes_on_where_its_page_ended_also_by_a_new_stream() -> None:
    files = [(f"{number:02}", 1) for number in range(8)]
    (at_once, its_pages), (anew, broken) = pages(files)
    assert [ObjectEntry(*one)[:2] for one in at_once] == files
    assert anew == at_once
    assert [count for count, _ in its_pages] == [3, 3, 2]
    assert not any(of_new for _, of_new in its_pages)
    assert [of_new for _, of_new in broken] == [False, True, True]


def test_no_page_ends_with_what_may_be_a_marker() -> None:
    files = [("1", 1), ("2", 1), ("3", 0), ("4", 0), ("5", 0), ("6", 0), ("7", 1), ("8", 0)]
    (at_once, its_pages), (anew, _) = pages(files)
    assert [ObjectEntry(*one)[:2] for one in at_once] == files
    assert anew == at_once
    assert [count for count, _ in its_pages] == [8]


@pytest.mark.parametrize(("paths", "in_order"), [("ab", True), ("ba", False), ("bma", False)])
def test_a_listing_is_in_order_but_for_markers(paths: str, in_order: bool) -> None:
    order = SortCheck()
    for path in paths:
        order.follow(Page([ObjectEntry(path, int(path != "m"), 0, "")], path))
    assert (order.last, order.is_kept) == (paths[-1], in_order)
