"""A bucket is listed by many requests at once: each object once, whatever its name is."""

import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import object_stores
from support.list_server import ListServer, list_server
from support.object_stores import ObjectStore
from support.trees import environment

from shardio.errors import StorageError
from shardio.storage.walk import MOST_REQUESTS, between

# A page has three objects here, and the client is this process's own, so that it knows of that.
PROGRAM = """
import json, sys
import obstore
from obstore.store import from_url
from shardio import Storage, StorageError
from shardio.storage import listing, ranges, transfers, walk
from shardio.storage.location import locate

listing.PAGE = walk.PAGE = 3
ranges.hold_client()
ranges.ranges()  # before the threads of a client are there, or a process of its own would have it
transfers.HEDGED = transfers._HEDGED_FIRST = 0  # a second request of a page begins it anew
for line in sys.stdin:
    url, options, put = json.loads(line)
    for name, size in put:
        allow = {"allow_http": True}
        obstore.put(from_url(url, client_options=allow, **options), name, bytes(size))
    found, begun = [], [0]

    def forget():
        found.clear()
        begun.append(0)

    try:
        for one in locate(url, Storage(options=options, timeout_s=20)).walk(forget):
            found.append((one.path, one.size))
    except StorageError as error:
        found = str(error)
    print(json.dumps([found, len(begun)]), flush=True)
"""


class FolderLister:
    """A process that lists folders."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def find(
        self, url: str, options: Mapping[str, str], put: Mapping[str, int] | None = None
    ) -> tuple[dict[str, int], int]:
        """Return the objects below a URL, and how often the listing began."""
        assert self._process.stdin and self._process.stdout
        asked = [url, dict(options), list((put or {}).items())]
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        found, begun = json.loads(self._process.stdout.readline())
        if isinstance(found, str):
            raise StorageError(found)
        assert max(Counter(path for path, _ in found).values(), default=1) == 1
        return dict(found), begun


@pytest.fixture(scope="module")
def lister() -> Iterator[FolderLister]:
    command = [sys.executable, "-c", PROGRAM]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment(), **pipes) as process:
        try:
            yield FolderLister(process)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def s3() -> Iterator[ObjectStore]:
    with object_stores.s3() as store:
        yield store


@pytest.fixture
def server() -> Iterator[ListServer]:
    with list_server() as found:
        found.page = 3
        yield found


PARTS = st.text("0059aAz.-_~ %#é世", min_size=1, max_size=4).filter(lambda one: one.strip("."))
NAMES = st.lists(st.sampled_from("ab/0") | PARTS, min_size=1, max_size=4).map("".join)
PLAIN = NAMES.filter(lambda name: not {"", ".", ".."} & {*name.split("/")})
MANY = st.dictionaries(PLAIN, st.integers(0, 1), max_size=80)


def plain(names: Mapping[str, int], markers: Iterable[str] = ()) -> list[str]:
    """Return the names without those of empty objects that could be markers of folders."""
    whole = [*names, *markers]
    of_folders = {name[:at] for name in whole for at, char in enumerate(name) if char == "/"}
    return sorted(name for name, size in names.items() if size or name not in of_folders)


NUMBERS = itertools.count()  # of folders, one for each example
RELAXED: Any = {"suppress_health_check": list(HealthCheck), "deadline": None}


@settings(max_examples=15, **RELAXED)
@given(names=MANY)
def test_all_objects_of_a_bucket_are_listed_once(
    names: dict[str, int], s3: ObjectStore, lister: FolderLister
) -> None:
    found, _ = lister.find(f"{s3.url}/{next(NUMBERS)}", s3.options, names)
    assert found.items() <= names.items()
    assert plain(found) == plain(names)


@settings(max_examples=60, **RELAXED)
@given(names=MANY, markers=st.sets(PLAIN, max_size=10))
def test_markers_of_folders_are_none_of_them(
    names: dict[str, int], markers: set[str], lister: FolderLister
) -> None:
    with list_server() as server:
        server.page = 3
        server.empty = {name for name, size in names.items() if not size}
        marked = [f"{name}/" for name in markers - names.keys()]
        server.put([*names, *marked])
        found, begun = lister.find("s3://bucket", server.options)
        assert found.items() <= names.items()
        assert plain(found, marked) == plain(names, marked)
        assert begun == 1


FOLDERS = [
    f"{kind}/{number:03}.jpg" for kind in ("cat", "dog", "dog-house") for number in range(60)
]


@pytest.mark.parametrize(
    "names",
    [
        [f"{kind}/{number:03}.jpg" for kind in range(10, 40) for number in range(20)],
        [f"{number:08}.jpg" for number in range(600)],
        [str(number) for number in range(600)],
    ],
)
def test_pages_are_asked_for_at_once(
    names: list[str], server: ListServer, lister: FolderLister
) -> None:
    server.put(names)
    server.together = 4
    assert lister.find("s3://bucket", server.options) == (dict.fromkeys(names, 1), 1)
    assert 4 <= server.most <= MOST_REQUESTS
    assert 200 <= server.lists <= 400  # guesses, which depend on what answers come first


@pytest.mark.parametrize("count", [0, 1, 3, 11, 12])
def test_a_small_bucket_needs_no_more_requests_than_pages(
    count: int, server: ListServer, lister: FolderLister
) -> None:
    server.put([f"{number:02}" for number in range(count)])
    assert len(lister.find("s3://bucket", server.options)[0]) == count
    assert server.lists == max(1, -(-count // 3)) + (count == 12)  # one guess


@pytest.mark.parametrize(
    "order", [lambda name: name.split("/"), lambda name: name.replace("x/", "c~/")]
)
def test_a_store_with_an_order_of_its_own_is_listed_page_by_page(
    order: Callable[[str], Any], server: ListServer, lister: FolderLister
) -> None:
    server.order = order
    names = FOLDERS + [f"{folder}/{number}.jpg" for folder in "efghijxz" for number in range(9)]
    server.put(names)
    assert lister.find("s3://bucket", server.options) == (dict.fromkeys(names, 1), 2)


def test_a_listing_out_of_order_that_broke_is_an_error(
    server: ListServer, lister: FolderLister
) -> None:
    def fail(number: int) -> None:
        if number == 3:
            raise ConnectionError

    server.order = lambda name: name[::-1]
    server.put(FOLDERS)
    assert lister.find("s3://bucket", server.options) == (dict.fromkeys(FOLDERS, 1), 1)
    server.lists, server.changes = 0, fail
    with pytest.raises(StorageError, match=r"s3://bucket: .*does not list in order"):
        lister.find("s3://bucket", server.options)


def test_a_store_that_begins_at_its_first_object_is_listed_page_by_page(
    server: ListServer, lister: FolderLister
) -> None:
    server.honours = False
    server.put(FOLDERS)
    assert lister.find("s3://bucket", server.options) == (dict.fromkeys(FOLDERS, 1), 2)


def test_azurite_begins_at_its_first_object(lister: FolderLister) -> None:
    names = dict.fromkeys(FOLDERS[:60], 1)
    with object_stores.azurite() as store:
        assert lister.find(store.url, store.options, names) == (names, 2)


@pytest.mark.parametrize("seed", range(8))
def test_objects_that_come_and_go_hide_no_others(
    seed: int, server: ListServer, lister: FolderLister
) -> None:
    rng = random.Random(seed)
    stay = {f"{rng.choice('ab')}/{rng.randrange(10**6):06}" for _ in range(200)}
    others = sorted({f"{rng.choice('abc')}/{rng.randrange(10**6):06}" for _ in range(200)} - stay)

    def change(number: int) -> None:
        server.put([*stay, *rng.sample(others, 100)])

    server.changes = change
    change(0)
    found, _ = lister.find("s3://bucket", server.options)
    assert stay <= found.keys() <= {*stay, *others}


def test_an_object_that_comes_at_a_border_is_no_reason_to_begin_anew(
    server: ListServer, lister: FolderLister
) -> None:
    names = [f"{number:04}" for number in range(0, 10_000, 20)]
    comes = "600"  # right behind the first guess, 6

    def change(number: int) -> None:
        if number == 20:
            server.put([*names, comes])

    server.changes = change
    server.put(names)
    found, begun = lister.find("s3://bucket", server.options)
    assert {*names} <= found.keys() <= {*names, comes}
    assert begun == 1


def test_requests_that_fail_among_many_are_sent_again(
    server: ListServer, lister: FolderLister
) -> None:
    def fail(number: int) -> None:
        if number in range(40, 60, 3):
            raise ConnectionError

    server.changes = fail
    server.put(FOLDERS)
    assert lister.find("s3://bucket", server.options) == (dict.fromkeys(FOLDERS, 1), 1)
    assert server.lists > 60


@given(names=st.lists(PLAIN, min_size=2, max_size=2, unique=True), ends=st.booleans(), more=PARTS)
def test_a_guess_lies_between(names: list[str], ends: bool, more: str) -> None:
    low, high = sorted(names)
    letters = sorted(filter(str.isalnum, {*low, *high, *more}))
    guess = between(low, high if ends else None, letters)
    if guess is not None:
        assert low < guess
        assert not ends or guess < high
        assert guess[-1] in letters
        assert not {"", ".", ".."} & {*guess.split("/")}


def test_guesses_halve_what_is_left() -> None:
    assert between("0004", None, list("0123456789")) == "5"
    assert between("0004", "5", list("0123456789")) == "3"
    assert between("0004", "1", list("0123456789")) == "05"
    assert between("a/1", "a/9", list("0123456789")) == "a/5"
    assert between("a", "a/9", list("0123456789")) is None
    assert between("zz", None, ["a", "z"]) == "zzz"
