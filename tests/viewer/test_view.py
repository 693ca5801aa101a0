"""The view of a dataset: pages, pictures, records."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image
from support.small_datasets import CLASSES, jpeg, make

from shardio.viewer.results import plain
from shardio.viewer.view import open_view


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Ten small photographs in three shards."""
    return make(tmp_path / "small", [4, 0, 6], image=jpeg)


def test_a_page_in_storage_order_has_the_records_by_number(small: Path) -> None:
    with open_view(small) as view:
        page = view.page(start=3, count=3)
    assert [(card.number, card.position, card.key) for card in page.cards] == [
        (number, number, f"k/{number:06d}.jpg") for number in (3, 4, 5)
    ]
    assert [card.class_name for card in page.cards] == [CLASSES[n % 3] for n in (3, 4, 5)]
    assert (page.total, page.next) == (10, 6)
    json.dumps(plain(page), allow_nan=False)


def test_a_picture_is_the_file_or_a_thumbnail_of_it(small: Path) -> None:
    with open_view(small) as view:
        assert view.image(7) == (jpeg(7), "image/jpeg")
        assert Image.open(io.BytesIO(view.image(7, side=12).data)).size == (12, 8)
