"""Pages of a dataset: in storage order, filtered, sorted, searched; histograms; damage; limits."""

import dataclasses
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import LIMIT_S, servers
from support.small_datasets import CLASSES, FIELDS, flip, jpeg, make, shard_files
from support.trees import environment, images, plant

import shardio
from shardio import OptionError, StorageError
from shardio.viewer import histogram, search
from shardio.viewer.address import read_place
from shardio.viewer.columns import Columns
from shardio.viewer.kept import Kept, PendingError
from shardio.viewer.results import Page, Query
from shardio.viewer.rows import order_keys
from shardio.viewer.view import View, open_view

COUNTS = [30, 0, 41, 7]
N = sum(COUNTS)
SCALARS = (
    *FIELDS,
    ("width", "int"),
    ("score", "float"),
    ("rare", "int"),
    ("bytes", "bytes"),
    ("flag", "bool"),
)


def scored(number: int) -> dict[str, Any]:
    """A sample with columns: of some records without a value."""
    return {
        "__key__": b"k/%06d.jpg" % number,
        "image": jpeg(number % 8),
        "label": number * 7 % 3,
        "width": number * 31 % 50 - 10,
        "score": float("nan")
        if number % 11 == 5
        else None
        if number % 11 == 4
        else 1 / (number + 1),
        "rare": (number % 2 - 1) * (1 << 40) if number % 5 else None,
        "bytes": b"x" * (number * number % 997),
        "flag": number % 3 == 1,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("view") / "data", COUNTS, fields=SCALARS, sample=scored)


@pytest.fixture(scope="module")
def view(folder: Path) -> Iterator[View]:
    with open_view(folder) as opened:
        yield opened


def numbers(page: Page) -> list[int]:
    return [card.number for card in page.cards]


def ask(view: View, start: int = 0, count: int = 1000, **query: Any) -> Page:
    return view.page(Query(**query), start, count, wait_s=None, search_s=60.0)


# --- storage order ------------------------------------------------------------------------------


def test_a_page_in_storage_order_has_the_records_by_number(view: View) -> None:
    page = view.page(start=28, count=4)
    assert [(card.number, card.position, card.key) for card in page.cards] == [
        (number, number, f"k/{number:06d}.jpg") for number in range(28, 32)
    ]
    assert [card.class_name for card in page.cards] == [CLASSES[n * 7 % 3] for n in range(28, 32)]
    assert [card.width for card in page.cards] == [n * 31 % 50 - 10 for n in range(28, 32)]
    assert [card.shard_number for card in page.cards] == [0, 0, 2, 2]
    assert (page.total, page.next) == (N, 32)
    assert view.page(start=N - 2, count=10).next is None
    assert numbers(view.page(start=N + 5)) == []


def test_a_summary_says_what_the_manifest_does(view: View, folder: Path) -> None:
    found = view.summary()
    assert (found.name, found.records, found.shards, found.classes) == ("data", N, 4, CLASSES)
    assert {one.name: one.kind for one in found.fields} == dict(SCALARS)
    assert [one.name for one in found.fields if one.column] == [
        "label", "width", "score", "rare", "flag"
    ]  # fmt: skip


def test_a_picture_is_the_file_or_a_thumbnail_of_it(view: View) -> None:
    assert view.image(7) == (jpeg(7), "image/jpeg")
    assert Image.open(io.BytesIO(view.image(7, side=12).data)).size == (12, 8)
    with pytest.raises(OptionError, match="'label'"):
        view.image(7, "label")
    with pytest.raises(IndexError):
        view.image(N)


def test_all_answers_are_plain_values(view: View) -> None:
    query = Query(sort="score", where=("rare!=7",))
    answers: list[Any] = [
        view.summary(),
        view.page(query, wait_s=None),
        view.histograms(query, wait_s=None),
        view.record(4),
        *view.crops(4, shardio.RandomResizedCrop(32)),
        view.check(),
    ]
    json.dumps([*map(dataclasses.asdict, answers)], ensure_ascii=False).encode()


# --- filters and sorts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "chosen"),
    [
        ({"label": "dog"}, lambda s: s["label"] == 1),
        ({"label": 2}, lambda s: s["label"] == 2),
        ({"where": ("width>=20",)}, lambda s: s["width"] >= 20),
        ({"where": ("width>=20", "flag=true"), "label": "dog"},
         lambda s: s["width"] >= 20 and s["flag"] and s["label"] == 1),
        ({"where": ("rare=null",)}, lambda s: s["rare"] is None),
    ],
)  # fmt: skip
def test_filters_choose_the_records_that_meet_them(view: View, query: Any, chosen: Any) -> None:
    expected = [number for number in range(N) if chosen(scored(number))]
    page = ask(view, **query)
    assert 0 < len(expected) < N
    assert numbers(page) == expected and page.total == len(expected)
    middle = ask(view, start=3, count=4, **query)
    assert numbers(middle) == expected[3:7]
    assert [card.position for card in middle.cards] == [*range(3, 3 + len(middle.cards))]


def test_a_label_of_any_length_is_a_number(view: View) -> None:
    assert ask(view, where=(f"label={'9' * 5000}",)).total == 0


@pytest.mark.parametrize("name", ["world_size", "batch_size", "spans", "unit", "nodes"])
def test_no_address_asks_for_more_than_memory_holds(name: str) -> None:
    assert read_place({name: ["65536"]}).fields() == {name: ["65536"]}
    with pytest.raises(OptionError, match=f"{name} is 65,537: pages show up to 65,536"):
        read_place({name: ["65537"]})


def test_a_filter_that_no_record_meets_says_so(view: View) -> None:
    page = ask(view, where=("width>1000",))
    assert (page.cards, page.total, page.next) == ((), 0, None)
    assert "No record" in page.note


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("name", ["width", "score", "rare", "flag", "label"])
@pytest.mark.parametrize("label", [None, "dog"])
def test_sorts_put_records_without_a_value_last(
    view: View, name: str, descending: bool, label: str | None
) -> None:
    def key(number: int) -> tuple[Any, ...]:
        value = scored(number)[name]
        if value is None or value != value:
            return 2 if value is None else 1, 0, number
        return 0, -value if descending else value, number

    kept = [n for n in range(N) if label is None or CLASSES[scored(n)["label"]] == label]
    expected = sorted(kept, key=key)
    page = ask(view, sort=name, descending=descending, label=label)
    assert numbers(page) == expected
    for card in page.cards[:20]:
        value = scored(card.number)[name]
        assert card.value == (pytest.approx(value, nan_ok=True) if value is not None else None)
    for start, count in ((0, 3), (17, 9), (len(expected) - 2, 50)):
        part = ask(view, start, count, sort=name, descending=descending, label=label)
        assert numbers(part) == expected[start : start + count]


@pytest.mark.parametrize(
    "values",
    [
        [3, -5, 127, -128, 0],
        [2**63, 0, 2**64 - 1],
        [-(2**63), 2**63 - 1, 0, -1],
        [0.0, -1.5, 1e300, -1e300, 5e-324, -np.inf, np.inf],
        [False, True],
        [-(2**63), 2**64 - 1, 5],
    ],
    ids=["int8", "uint64", "int64", "float64", "bool", "object"],
)
def test_keys_sort_as_values_do(values: list[Any]) -> None:
    column = np.array(values, object if min(values) == -(2**63) and max(values) >= 2**63 else None)
    if max(map(abs, values)) < 200 and type(values[0]) is int:
        column = column.astype(np.int8)
    for descending in (False, True):
        order = np.argsort(order_keys(column, descending), kind="stable").tolist()
        assert [values[i] for i in order] == sorted(values, reverse=descending)


def test_records_are_sorted_by_their_size(view: View) -> None:
    found = [card.bytes for card in ask(view, sort="bytes", descending=True).cards]
    assert found == sorted(found, reverse=True) and len(set(found)) > 10
    assert found[0] == max(card.bytes for card in ask(view).cards)


def test_what_the_index_lacks_is_refused_with_what_it_has(view: View) -> None:
    with pytest.raises(OptionError, match="bytes, label, width"):
        ask(view, sort="image")
    with pytest.raises(OptionError, match=r"no column is called 'widht'.*'width'"):
        ask(view, where=("widht>3",))
    with pytest.raises(OptionError, match="search"):
        ask(view, where=("__key__=k/000001.jpg",))
    with pytest.raises(OptionError, match="'bird'"):
        ask(view, label="bird")
    with pytest.raises(OptionError, match="order"):
        ask(view, order="random")
    with pytest.raises(OptionError, match="count"):
        view.page(count=0)


# --- search -------------------------------------------------------------------------------------


def test_a_search_finds_parts_of_keys_in_any_case(view: View) -> None:
    expected = [number for number in range(N) if "3" in f"{number:06d}"]
    page = ask(view, search="3.JPG")
    assert numbers(page) == [n for n in expected if n % 10 == 3]
    assert page.next is None and page.total is None and page.searched == N
    chosen = ask(view, search="3", label="dog", sort="width")
    every = [*map(scored, range(N))]
    assert numbers(chosen) == sorted(
        (n for n in expected if every[n]["label"] == 1), key=lambda n: (every[n]["width"], n)
    )


def test_a_search_goes_on_where_it_stood(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "CHUNK", 10)
    found, start, pages = list[int](), 0, 0
    while start is not None:
        page = view.page(Query(search="00002"), start, 100, search_s=0.0)  # a chunk a page
        found += numbers(page)
        assert page.searched <= 10 and f"{N}" in page.note
        start, pages = page.next, pages + 1
    assert found == [2, *range(20, 30)] and pages == -(-N // 10)


def test_a_full_page_of_a_search_ends_behind_its_last_card(view: View) -> None:
    first = ask(view, count=3, search="k/")
    assert (numbers(first), first.next) == ([0, 1, 2], 3)
    assert numbers(ask(view, start=3, count=2, search="k/")) == [3, 4]
    every = numbers(ask(view, sort="width"))
    assert numbers(ask(view, count=1, search="k/", sort="width")) == every[:1]


def test_a_key_is_found_by_the_index(view: View) -> None:
    assert [view.find(f"k/{n:06d}.jpg") for n in (0, 29, 30, N - 1)] == [0, 29, 30, N - 1]
    assert view.find("k/000001") is None
    assert view.find("\ud800") is None


def test_keys_that_are_no_text_are_shown_and_found(tmp_path: Path) -> None:
    def sample(number: int) -> dict[str, Any]:
        return {"__key__": b"\xff\x1b%d" % number, "image": jpeg(0), "label": 0}

    with open_view(make(tmp_path, [3], sample=sample)) as view:
        page = ask(view, search=b"\xff".decode("utf-8", "surrogateescape"))
        assert [card.key for card in page.cards] == [rf"\xff\x1b{n}" for n in range(3)]
        assert view.find(b"\xff\x1b2".decode("utf-8", "surrogateescape")) == 2


# --- histograms ---------------------------------------------------------------------------------


def test_histograms_count_all_records_or_the_chosen_ones(view: View) -> None:
    found = view.histograms(wait_s=None)
    every = [*map(scored, range(N))]
    assert [one.count for one in found.classes] == [
        sum(s["label"] == label for s in every) for label in range(3)
    ]
    bins = {one.name: one for one in found.bins}
    assert sum(bins["width"].counts) == N == sum(bins["bytes"].counts)
    assert sum(bins["score"].counts) == sum(s["score"] is not None and s["score"] == s["score"] for s in every)  # fmt: skip  # noqa: E501
    chosen = view.histograms(Query(label="dog"), wait_s=None)
    assert chosen.records == sum(s["label"] == 1 for s in every)
    assert [one.count for one in chosen.classes] == [0, chosen.records, 0]


@pytest.mark.parametrize(
    "values",
    [
        np.arange(-100, 100, dtype=np.int8),
        np.array([7, 7, 7], np.uint16),
        np.random.default_rng(0).normal(size=1000).astype(np.float32),
        np.array([1, 2, 3, 4, 5, 100_000], np.uint32),
        np.array([-(2**63), 2**63 - 1, 0]),
        np.array([True, False, True]),
        np.array([2.5]),
        np.array([-1.7e308, 1.7e308, 1.7e308, 1.7e308]),
        np.array([5e-324, 1.5e-323]),
    ],
    ids=["int8", "one value", "floats", "skewed", "int64", "bool", "one float", "widest", "least"],
)
def test_bins_hold_the_values_between_their_edges(values: Any) -> None:
    found = histogram.bin_numbers("x", values)
    assert found is not None and len(found.edges) == len(found.counts) + 1
    low, high = found.edges[0], found.edges[-1]
    assert low <= values.min() and values.max() <= high and sum(found.counts) == len(values)
    if len(values) > 100:
        assert found.counts == tuple(np.histogram(values, found.edges)[0])


def test_labels_without_names_and_records_without_labels_are_counted(tmp_path: Path) -> None:
    def sample(number: int) -> dict[str, Any]:
        label = None if number == 4 else (5, 5, 900)[number % 3]
        return {"__key__": b"%d" % number, "image": jpeg(0), "label": label}

    with open_view(make(tmp_path / "a", [6], sample=sample, classes=None)) as view:
        assert [(c.label, c.name, c.count) for c in view.histograms(wait_s=None).classes] == [
            (5, None, 3), (900, None, 2), (None, None, 1)
        ]  # fmt: skip
        assert numbers(ask(view, label="900")) == [2, 5]
        assert view.page().cards[4].label is None
    fields = FIELDS[:2]
    bare = make(
        tmp_path / "b", [2], fields=fields, sample=lambda n: {"__key__": b"%d" % n, "image": b"x"}
    )
    with open_view(bare) as view:
        assert view.histograms(wait_s=None).classes == ()
        with pytest.raises(OptionError, match="label"):
            ask(view, label="cat")


# --- what is odd --------------------------------------------------------------------------------


def test_an_empty_dataset_has_empty_pages(tmp_path: Path) -> None:
    with open_view(make(tmp_path, [])) as view:
        for query in (
            {},
            {"sort": "label"},
            {"label": "cat"},
            {"order": "training"},
            {"search": "x"},
        ):
            page = ask(view, **query)
            assert (page.cards, page.next) == ((), None)
        assert view.histograms(wait_s=None).records == 0
        assert view.check().next is None and view.find("x") is None


def test_a_damaged_record_is_a_card_and_a_message(tmp_path: Path) -> None:
    folder = make(tmp_path, [5, 5], image=jpeg)
    with open_view(folder) as view:
        record = view.record(7)
        assert record.checksum and record.checksum.ok
        flip(shard_files(folder)[1], record.start + record.bytes - 3)  # of its image
        flip(shard_files(folder)[1], view.record(8).start + 20)  # of its key
        assert [card.damaged is None for card in view.page().cards] == [True] * 8 + [False, True]
        broken = view.record(7)
        assert broken.damaged and "checksum" in broken.damaged and broken.key == "k/000007.jpg"
        assert broken.checksum and not broken.checksum.ok
        with pytest.raises(shardio.DamageError):
            view.image(7)
        assert [one.number for one in view.damaged()] == [7, 8]
        assert [n for n in numbers(ask(view, search="k/"))] == [0, 1, 2, 3, 4, 5, 6, 7, 9]
        assert "1 key could not be read" in ask(view, search="k/").note


def test_a_damaged_shard_leaves_the_others(tmp_path: Path) -> None:
    folder = make(tmp_path, [5, 5, 5], image=jpeg)
    shards = shard_files(folder)
    flip(shards[1], shards[1].stat().st_size - 100)  # its index
    with open_view(folder) as view:
        page = ask(view, sort="label")
        assert [card.damaged is None for card in page.cards] == [True] * 10 + [False] * 5
        assert "1 shard" in page.note and "5 records" in page.note
        assert numbers(ask(view, search="k/0")) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
        assert view.histograms(wait_s=None).classes[-1].count == 5  # labels that nobody knows
        found = view.check(budget_s=60.0)
        assert [one.number for one in found.damaged] == [5, 6, 7, 8, 9] and found.next is None
        shards[1].unlink()
        assert "not there" in (view.record(6).damaged or "")


def test_a_check_goes_on_where_it_stood_and_decodes_if_asked(tmp_path: Path) -> None:
    folder = make(tmp_path, [100, 70], image=lambda n: b"no image" if n == 103 else jpeg(n % 4))
    with open_view(folder) as view:
        start: int | None = 0
        parts = 0
        while start is not None:
            found = view.check(start, budget_s=0.0)
            assert not found.damaged
            start, parts = found.next, parts + 1
        assert parts == 4  # 64 records at once, never of two shards
        [damaged] = view.check(64, pixels=True, budget_s=60).damaged
        assert (damaged.number, damaged.key) == (103, "k/000103.jpg")
        assert view.damaged() == (damaged,)


def test_what_packing_left_out_is_listed(tmp_path: Path) -> None:
    tree = images(classes=2, each=3) | {"class0/none.jpg": b"", "class1/text.jpg": b"no image"}
    source = plant(tmp_path / "in", tree)
    shardio.pack(source, tmp_path / "out", on_error="skip", jobs=1)
    with open_view(tmp_path / "out") as view:
        rejected = view.rejected()
        assert rejected and "class0/none.jpg" in [one.path for one in rejected]
        assert all(one.reason for one in rejected)
    with open_view(make(tmp_path / "other", [1])) as view:
        assert view.rejected() is None


def test_splits_are_opened_by_name_the_training_one_by_default(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for split in ("test", "train"):
        plant(source / split, images(classes=1, each=2 + len(split)))
    shardio.pack(source, tmp_path / "out", jobs=1)
    with open_view(tmp_path / "out") as view:
        found = view.summary()
        assert (found.split, sorted(found.splits), found.records) == ("train", ["test", "train"], 7)
    with open_view(tmp_path / "out", split="test") as view:
        assert view.summary().records == 6


# --- limits -------------------------------------------------------------------------------------


def test_a_page_does_not_wait_for_the_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, plainly = threading.Event(), Columns.take

    def take(self: Columns, number: int, gathered: Any) -> None:
        assert go.wait(LIMIT_S)
        plainly(self, number, gathered)

    monkeypatch.setattr(Columns, "take", take)
    with open_view(folder) as view:
        page = view.page(Query(label="dog"), wait_s=0.0)
        counted = view.histograms(wait_s=0.0)
        assert page.pending is not None and page.next == 0 and not page.cards
        assert counted.pending is not None
        assert len(view.page(start=3, count=4).cards) == 4  # what needs no index comes at once
        go.set()
        assert ask(view, label="dog").cards and view.histograms(wait_s=None).pending is None


def test_what_is_kept_stays_within_its_limit() -> None:
    kept = Kept(100)
    for number in range(5):
        kept.put(number, f"{number}", 40)
        kept.get(0)
    assert kept.bytes == 80 and kept.get(0) == "0" and kept.get(4) == "4" and kept.get(3) is None
    assert kept.put("large", 1, 1000) == 1 and kept.bytes == 1000
    kept.put("small", 1, 10)
    assert kept.bytes == 10 and kept.get("large") is None


def test_columns_beyond_the_limit_are_refused(folder: Path) -> None:
    with open_view(folder, cache_bytes=100) as view:
        with pytest.raises(OptionError, match="allow more memory"):
            ask(view, sort="width")
        assert len(view.page().cards) == N
    with open_view(folder, cache_bytes=8 * N) as view:  # one column at a time
        for name in ("width", "label", "score"):
            assert len(ask(view, sort=name).cards) == N
            assert view.kept_bytes <= 8 * N + 1_000  # the newest alone may be larger


def test_an_error_in_the_background_is_the_askers_and_is_not_kept() -> None:
    kept = Kept(100)
    with pytest.raises(ZeroDivisionError):
        kept.make("key", lambda: 1 / 0, None)
    assert kept.make("key", lambda: 1, None) == 1
    held = threading.Event()
    with pytest.raises(PendingError):
        kept.make("slow", held.wait, 0.0)
    held.set()
    assert kept.make("slow", lambda: None, None) is True  # what was begun, not anew
    kept.close()


def test_many_threads_may_ask(folder: Path) -> None:
    with open_view(folder) as view:
        queries = [{"label": "dog"}, {"sort": "width"}, {"search": "1"}, {"order": "training"}, {}]
        expected = [ask(view, **query) for query in queries]
    with open_view(folder) as view:
        wrong: list[Any] = []

        def work(first: int) -> None:
            for turn in range(10):
                at = (first + turn) % len(queries)
                if ask(view, **queries[at]).cards != expected[at].cards:
                    wrong.append(queries[at])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_nothing_of_it_imports_torch() -> None:
    code = "import sys, shardio.viewer.view; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), timeout=LIMIT_S)


def test_a_network_that_fails_is_no_damage(tmp_path: Path) -> None:
    make(tmp_path / "data", [20, 20], image=jpeg)
    with servers.nginx(tmp_path) as web:
        view = open_view(f"{web.url}/data", storage=shardio.Storage(timeout_s=3.0))
    with view, pytest.raises(StorageError):  # the server is gone
        ask(view, label="cat")
    with servers.nginx(tmp_path) as web, open_view(f"{web.url}/data") as view:
        assert ask(view, label="cat").total == 14


def test_thumbnails_by_url_read_only_their_records(tmp_path: Path) -> None:
    big = [jpeg(number, (400, 300)) + bytes(50_000) for number in range(40)]
    make(tmp_path / "data", [20, 20], image=lambda number: big[number])
    with servers.nginx(tmp_path) as web, open_view(f"{web.url}/data") as view:
        page = view.page(start=10, count=20)
        assert [card.key for card in page.cards] == [f"k/{n:06d}.jpg" for n in range(10, 30)]
        asked = len(web.requests())
        before = sum(one.bytes for one in web.requests())
        assert before < 20 * 2_000 + 50_000  # heads of records, ends of shards
        for number in (3, 33):
            assert view.image(number, side=64).media_type == "image/jpeg"
        # On a busy machine a request may be sent again.
        parts = {(one.path, one.range): one.bytes for one in web.requests()[asked:]}
        assert sum(parts.values()) < 2.2 * len(big[0])
        assert numbers(ask(view, label="cat")) == [n for n in range(40) if n % 3 == 0]
        found = ask(view, label="cat", search="3.jpg", sort="bytes", descending=True)
        assert sorted(numbers(found)) == [3, 33]
