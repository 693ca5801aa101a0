"""Parts of keys are found in any order, by pages; a whole key by the index."""

from pathlib import Path
from typing import Any

import pytest
from support.small_datasets import jpeg, make
from support.viewer_records import N, ask, numbers, scored

from shardio.viewer import search
from shardio.viewer.results import Query
from shardio.viewer.view import View, open_view


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
