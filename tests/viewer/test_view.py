"""Pages of a dataset: in storage order, filtered; splits, threads, URLs."""

import dataclasses
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support import LIMIT_S, servers
from support.small_datasets import CLASSES, jpeg, make
from support.trees import environment, images, plant
from support.viewer_records import SCALARS, N, ask, numbers, scored

import shardio
from shardio import OptionError, StorageError
from shardio.storage import ranges
from shardio.viewer.results import Query
from shardio.viewer.view import View, open_view

# --- storage order ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_helper_is_left() -> Iterator[None]:
    yield
    ranges.close()


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


def test_a_filter_that_no_record_meets_says_so(view: View) -> None:
    page = ask(view, where=("width>1000",))
    assert (page.cards, page.total, page.next) == ((), 0, None)
    assert "No record" in page.note


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
