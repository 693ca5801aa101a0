"""Damaged records and shards: what is shown of them, and of all others."""

from pathlib import Path

import pytest
from support.small_datasets import flip, jpeg, make, shard_files
from support.trees import images, plant
from support.viewer_records import ask, numbers

import shardio
from shardio.viewer.view import open_view


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
