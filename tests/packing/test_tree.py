"""Which folder archives are: of one, or of several that are one folder together."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import sources
from support.archives import (
    FILE,
    FOLDER,
    HARD,
    SOFT,
    class_tars,
    deflated,
    members,
    tar,
    write,
    zipped,
)
from support.sources import problems
from support.trees import JPEG, content, images, noise, picture, plant, shardio

from shardio import PlanOptions, pack, unpack
from shardio import plan as plan_ahead
from shardio.errors import OptionError, SourceError
from shardio.packing.sources import archived
from shardio.packing.sources.archives import tree
from shardio.packing.sources.archives.folder import open_archive
from shardio.packing.sources.archives.inflate import Inflating

pack_one = partial(sources.pack_one, max_records=9)


def test_a_folder_of_class_tars_is_the_folder_of_classes(tmp_path: Path) -> None:
    tree = {
        f"{name}/{i}.jpg": noise(f"{name}{i}", 100 + i) for name in ("ant", "bee") for i in (1, 2)
    }
    pack_one(plant(tmp_path / "tree", tree), tmp_path / "right")
    pack_one(plant(tmp_path / "tars", class_tars(tree)), tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "right")
    both = {f"{name}.zip": deflated({f"{i}.jpg": tree[f"{name}/{i}.jpg"] for i in (1, 2)})
            for name in ("ant", "bee")}  # fmt: skip
    pack_one(plant(tmp_path / "zips", both), tmp_path / "zipped")
    assert content(tmp_path / "zipped") == content(tmp_path / "right")


def test_splits_of_class_tars_are_splits(tmp_path: Path) -> None:
    """As ImageNet's, with the tars of train and val in a folder each, or in one tar."""
    tree = {f"{split}/{name}/{split}{i}.jpg": noise(f"{split}{name}{i}", 100 + i)
            for split in ("train", "val") for name in ("ant", "bee") for i in (1, 2)}  # fmt: skip
    pack(plant(tmp_path / "tree", tree), tmp_path / "right")
    tars = {
        f"{split}/{os.fsdecode(name)}": data
        for split in ("train", "val")
        for name, data in class_tars(
            {key[len(split) + 1 :]: data for key, data in tree.items() if key.startswith(split)}
        ).items()
    }
    pack(plant(tmp_path / "tars", tars), tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "right")
    pack(write(tmp_path / "x.tar", tar(tars, "imagenet/")), tmp_path / "one")
    assert content(tmp_path / "one") == content(tmp_path / "right")


def test_archives_that_hold_folders_are_merged_side_by_side(tmp_path: Path) -> None:
    """As train_0.tar, train_1.tar; or images.tar.gz and annotations.tar.gz of one dataset."""
    tree = images()
    pack_one(plant(tmp_path / "tree", tree), tmp_path / "right")
    halves = [dict(list(tree.items())[some]) for some in (slice(0, 10), slice(10, None))]
    parts = {f"train_{i}.tar": tar(half, "data/") for i, half in enumerate(halves)}
    pack_one(plant(tmp_path / "parts", parts), tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "right")
    pairs: dict[str | bytes, bytes | None] = {}
    for i in range(4):
        pairs |= {f"images/{i}.jpg": picture(8 + i, 8), f"masks/{i}.png": picture(8 + i, 8, "PNG")}
    pack_one(plant(tmp_path / "pairs", pairs), tmp_path / "pairs right")
    two = {
        f"{kind}.zip": zipped(
            {key: data for key, data in pairs.items() if str(key).startswith(kind)}
        )
        for kind in ("images", "masks")
    }
    pack_one(plant(tmp_path / "two", two), tmp_path / "two out")
    assert content(tmp_path / "two out") == content(tmp_path / "pairs right")


def test_class_archives_with_folders_in_them_keep_their_classes(tmp_path: Path) -> None:
    """A folder in one is no class, and what is no file in one is of its class."""
    tars = {
        f"{name}.tar": members(
            ("1.jpg", JPEG + name.encode(), FILE, ""),
            ("0old", None, FOLDER, ""),
            ("0old/2.jpg", JPEG + b"2", FILE, ""),
            ("3.jpg", None, SOFT, "nowhere.jpg"),
        )
        for name in ("ant", "bee")
    }
    done = pack_one(plant(tmp_path / "tars", tars), tmp_path / "out", on_error="skip")
    assert (done.classes, done.records) == (2, 4)
    assert [key for key, _ in done.rejected] == ["ant/3.jpg", "bee/3.jpg"]
    one = write(tmp_path / "all.tar", tar(tars))
    pack_one(one, tmp_path / "one", on_error="skip")
    assert content(tmp_path / "one") == content(tmp_path / "out")


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        (
            {"a.zip": deflated({"x/1.jpg": JPEG}), "b.zip": deflated({"1.jpg": JPEG})},
            "hold folders",
        ),
        ({"all.zip": deflated({"c/1.jpg": JPEG}), "c/1.jpg": JPEG}, "beside it lies c/1.jpg"),
        ({"a.tar": tar({"1.jpg": JPEG}), "2.jpg": JPEG}, "beside it lies 2.jpg"),
    ],
)
def test_archives_beside_others_name_the_choices(tree: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=why):
        pack_one(write(tmp_path / "x.tar", tar(tree)), tmp_path / "out", kind="imagefolder")


def test_an_archive_beside_what_was_unpacked_from_it_is_named(tmp_path: Path) -> None:
    folder = plant(tmp_path / "kaggle", {**images(), "all.zip": deflated(images())})
    with pytest.raises(SourceError, match=r"all\.zip[\s\S]*is an archive"):
        pack_one(folder, tmp_path / "out")
    deep = plant(tmp_path / "deep", {**images(), "class0/all.zip": deflated(images())})
    with pytest.raises(SourceError, match=r"class0/all\.zip: .*an archive"):
        pack_one(deep, tmp_path / "out")


def test_of_a_name_that_comes_twice_the_last_counts_and_it_is_said(tmp_path: Path) -> None:
    twice = tar({"c/1.jpg": noise("old", 90)})[:1024] + tar({"c/1.jpg": noise("new", 80)})
    pack_one(plant(tmp_path / "tree", {"c/1.jpg": noise("new", 80)}), tmp_path / "right")
    source = write(tmp_path / "x.tar", twice)
    said = shardio("pack", source, tmp_path / "said").stdout
    assert "1 member has the name of one before it; of each name the last counts" in said
    pack_one(source, tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "right")
    parts = {f"train_{c}.tar": tar({"c/1.jpg": noise(c, 80), f"{c}/1.jpg": JPEG}) for c in "xy"}
    found = dict(problems(plant(tmp_path / "parts", parts)))
    assert list(found) == [b"c/1.jpg"] and "train_x.tar and in" in found[b"c/1.jpg"]


def test_a_file_that_is_a_folder_too_is_a_problem(tmp_path: Path) -> None:
    source = write(
        tmp_path / "x.tar", tar({"k/a.jpg": JPEG, "k/a.jpg/1.jpg": JPEG, "l/1.jpg": JPEG})
    )
    done = pack_one(source, tmp_path / "out", on_error="skip")
    assert done.records == 2 and "and a folder" in done.rejected[0][1]
    unpack(tmp_path / "out", tmp_path / "back")


@pytest.mark.parametrize("most", [1, 5, 7, 40])
def test_a_tar_is_listed_on_from_where_it_was_looked_into(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = members(
        *((name, data, FILE, "") for name, data in images(2, 20).items()),
        ("class0/more.jpg", None, HARD, "class1/003.jpg"),
        ("class1/last.jpg", None, SOFT, "../class0/001.jpg"),
        ("class0/000.jpg", JPEG + b"again", FILE, ""),
    )
    archive = write(tmp_path / "x.tar", data)
    whole = open_archive(os.fsencode(archive), Inflating())[0].walk()
    os.utime(archive, ns=(9, 9))  # it is listed anew
    monkeypatch.setattr(archived, "_MEMBERS", most)
    request = sources.request(archive)
    walked = request.files.walk() if request.files else None
    assert walked is not None
    assert walked.keys == whole.keys and walked.sizes.tolist() == whole.sizes.tolist()
    assert walked.notes == whole.notes and len(whole.keys) == 42


def test_a_piece_that_is_opened_does_not_list_the_archives_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard of a part is a piece."""
    classes = {
        f"{i}.tar": tar({f"{i}{j}.jpg": noise(f"{i}{j}", 60) for j in range(3)}) for i in "ab"
    }
    listed: list[str] = []
    right = tree.list_tar
    monkeypatch.setattr(
        tree, "list_tar", lambda *one, **more: (listed.append(one[1]), right(*one, **more))[1]
    )
    for source in (plant(tmp_path / "tars", classes), write(tmp_path / "x.tar", tar(classes))):
        out = tmp_path / f"out {source.name}"
        plan_ahead(source, out, plan=PlanOptions(max_records=1))
        listed.clear()
        pack_one(source, out, part=(1, 1), max_records=1)
        assert len(listed) <= 3


def test_nested_archives_end_somewhere(tmp_path: Path) -> None:
    data = tar({"c/1.jpg": JPEG})
    for _ in range(12):
        data = tar({"x.tar": data})
    with pytest.raises(SourceError, match="one within the other"):
        pack_one(write(tmp_path / "x.tar", data), tmp_path / "out")


def test_a_bomb_of_zips_ends_after_two_levels(tmp_path: Path) -> None:
    data = deflated({"c/1.jpg": JPEG})
    for _ in range(4):
        data = deflated({f"{i}.zip": data for i in range(3)})
    with pytest.raises(SourceError, match="compressed three times over"):
        pack_one(write(tmp_path / "x.zip", data), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))
