"""Folders side by side, such as images/ and masks/, are one dataset with a field for each."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conformance import FileSourceConformance
from support.trees import content, noise, picture, plant, shardio, shardio_json

from shardio.dataset import sequence as sequences
from shardio.errors import OptionError, SourceChangedError, SourceError
from shardio.packing import sources
from shardio.packing.index import index
from shardio.packing.options import SourceOptions
from shardio.packing.pack import pack
from shardio.packing.sources.base import Listing, SourceRequest
from shardio.packing.unpack import unpack

Files = dict[str | bytes, bytes | None]
IMAGES_MASKS = {"image": "images/", "mask": "masks/"}


def pair(image: str, mask: str) -> Files:
    return {image: noise(image, 200), mask: noise(mask, 90)}


def dataset(image: str, mask: str, count: int = 3) -> Files:
    """image, mask: paths with a place for the number of the record."""
    found: Files = {}
    for i in range(count):
        found |= pair(image.format(i), mask.format(i))
    return found


def wanted(root: Path, **options: Any) -> SourceRequest:
    return sources.detect_kind(SourceRequest(os.fsencode(root), **options))


def told(root: Path, **options: Any) -> str | None:
    return wanted(root, **options).kind


def listings(root: Path, **options: Any) -> dict[str, Listing]:
    asked = wanted(root, **options)
    assert asked.kind == "trees"
    found = sources.list_records(asked)
    assert list(found) == sources.split_names(asked)
    return found


def records(found: Listing) -> list[dict[str, Any]]:
    with found.source.open() as read:
        return [read(place) for place in range(len(found.keys))]


LAYOUTS: dict[str, tuple[Files, list[str], dict[str, str]]] = {
    "images, masks": (dataset("images/x/{}.jpg", "masks/x/{}.png"), [""], {}),
    "names in capitals": (dataset("Images/{}.jpg", "Masks/{}.png"), [""], {}),
    "splits above": (
        dataset("train/images/{}.jpg", "train/masks/{}.png")
        | dataset("val/images/{}.jpg", "val/masks/{}.png"),
        ["train", "val"],
        {},
    ),
    "splits below": (
        dataset("images/train/{}.jpg", "masks/train/{}.png")
        | dataset("images/val/{}.jpg", "masks/val/{}.png"),
        ["train", "val"],
        {},
    ),
    "ADE20K": (
        dataset("images/training/{}.jpg", "annotations/training/{}.png")
        | dataset("images/validation/{}.jpg", "annotations/validation/{}.png"),
        ["training", "validation"],
        {},
    ),
    "Pascal VOC": (
        dataset("JPEGImages/{}.jpg", "SegmentationClass/{}.png")
        | {"Annotations/0.xml": b"<x/>", "ImageSets/Segmentation/train.txt": b"0\n"},
        [""],
        {"image": "JPEGImages/", "mask": "SegmentationClass/"},
    ),
    "other names": (
        dataset("pic/{}.jpg", "more/depth/{}.png"),
        [""],
        {"depth": "more/depth/", "image": "pic/"},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_usual_layouts_become_records_with_a_mask_and_come_back(
    tmp_path: Path, layout: str
) -> None:
    tree, splits, fields = LAYOUTS[layout]
    source = plant(tmp_path / "src", tree)
    packed = pack(source, tmp_path / "out", jobs=1, read=SourceOptions(fields=fields))
    assert [one.split for one in packed] == splits
    for split in splits:
        for sample in sequences.open(tmp_path / "out" / split, decode=None):
            image, other = (name for name in sample if name != "__key__")
            assert image == "image"
            stem = Path(os.fsdecode(sample["__key__"])).stem
            names = [n for n in map(str, tree) if Path(n).stem == stem and split in n]
            assert sample[image] == noise(next(n for n in names if n.endswith("jpg")), 200)
            assert sample[other] == noise(next(n for n in names if n.endswith("png")), 90)
    unpack(tmp_path / "out", tmp_path / "back")
    kept = {os.fsencode(n): data for n, data in tree.items() if str(n).endswith(("jpg", "png"))}
    found = content(tmp_path / "back")
    assert {name: data for name, data in found.items() if data is not None} == kept


def test_the_key_is_the_path_of_the_image_in_its_folder(tmp_path: Path) -> None:
    root = plant(tmp_path, pair("images/x/f.0001.JPG", "masks/x/f.0001.png"))
    [found] = listings(root).values()
    assert found.keys == [b"x/f.0001.JPG"]
    assert found.fields == (("image", "image"), ("mask", "image"))
    assert found.classes is None  # folders in these are no labels
    assert found.sizes.tolist() == [290]


def test_a_file_without_its_partner_is_a_problem_whichever_it_is(tmp_path: Path) -> None:
    tree = dataset("images/{}.jpg", "masks/{}.png", 5)
    del tree["masks/1.png"], tree["masks/3.png"], tree["images/4.jpg"]
    [found] = listings(plant(tmp_path, tree)).values()
    assert found.keys == [b"0.jpg", b"2.jpg"]
    assert found.problems == [
        (b"images/1.jpg", "has no partner in masks/: there is no file masks/1.*"),
        (b"images/3.jpg", "has no partner in masks/: there is no file masks/3.*"),
        (b"masks/4.png", "has no partner in images/: there is no file images/4.*"),
    ]


def test_missing_partners_are_listed_at_once_and_can_be_left_out(tmp_path: Path) -> None:
    tree = dataset("train/images/{}.jpg", "train/masks/{}.png", 4)
    del tree["train/masks/1.png"], tree["train/masks/2.png"]
    source = plant(tmp_path / "src", tree)
    with pytest.raises(SourceError, match="2 files cannot") as caught:
        pack(source, tmp_path / "out", jobs=1)
    assert "\n  train/images/1.jpg: has no partner in train/masks/" in str(caught.value)
    assert "\n  train/images/2.jpg: has no partner in train/masks/" in str(caught.value)
    [done] = pack(source, tmp_path / "out", jobs=1, on_error="skip")
    assert done.records == 2


@pytest.mark.parametrize(
    "bad",
    [
        {"images/1.png": noise("2", 20)},  # beside 1.jpg
        {"masks/1.png": b""},
        {"masks/1.tif": noise("2", 20)},
    ],
)
def test_what_cannot_be_packed_is_left_out_with_its_partners(tmp_path: Path, bad: Files) -> None:
    root = plant(tmp_path, dataset("images/{}.jpg", "masks/{}.png") | bad)
    [found] = listings(root).values()
    assert found.keys == [b"0.jpg", b"2.jpg"]
    assert len(found.problems) == 1


def test_a_mask_that_is_no_image_is_found_when_it_is_read(tmp_path: Path) -> None:
    tree = dataset("images/{}.jpg", "masks/{}.png") | {"masks/1.png": b"no image"}
    with pytest.raises(SourceError, match=r"masks/1\.png: is not an image"):
        pack(plant(tmp_path / "src", tree), tmp_path / "out", jobs=1)


def test_other_kinds_of_files_are_fields_of_their_kind(tmp_path: Path) -> None:
    tree: Files = {
        "images/a.jpg": noise("a", 50),
        "captions/a.txt": "ein Bär".encode(),
        "labels/a.json": b'{"boxes": [[1, 2, 3, 4]]}',
    }
    fields = {"image": "images/", "caption": "captions", "boxes": "labels/"}
    with pytest.raises(OptionError, match="caption=captions: others are folders"):
        listings(plant(tmp_path, tree), fields=fields)
    [found] = listings(tmp_path, fields=fields | {"caption": "captions/"}).values()
    assert found.fields == (("image", "image"), ("boxes", "json"), ("caption", "str"))
    [one] = records(found)
    assert one["caption"] == "ein Bär" and one["boxes"] == {"boxes": [[1, 2, 3, 4]]}


def test_a_split_without_masks_has_no_such_field_and_that_is_said(tmp_path: Path) -> None:
    tree = dataset("images/train/{}.jpg", "masks/train/{}.png") | {
        "images/test/9.jpg": noise("", 9)
    }
    found = listings(plant(tmp_path, tree))
    assert found["test"].fields == (("image", "image"),)
    assert "there is no folder of mask for this split, so no such field" in found["test"].notes
    assert found["train"].fields == (("image", "image"), ("mask", "image"))


def test_what_lies_beside_the_folders_is_named(tmp_path: Path) -> None:
    tree = dataset("images/{}.jpg", "masks/{}.png") | {"readme.txt": b"x", ".hidden": b"x"}
    [found] = listings(plant(tmp_path, tree)).values()
    assert found.notes == ["left out, being in none of these folders: readme.txt"]


def test_other_folders_beside_them_are_asked_about(tmp_path: Path) -> None:
    tree, _, fields = LAYOUTS["Pascal VOC"]
    root = plant(tmp_path, tree)
    with pytest.raises(OptionError, match="--from imagefolder") as caught:
        told(root)
    assert "--fields image=JPEGImages/,mask=SegmentationClass/" in str(caught.value)
    assert told(root, fields=fields) == "trees"
    assert told(root, kind="imagefolder") == "imagefolder"


@pytest.mark.parametrize(
    "tree",
    [
        {"images/1.jpg": b"", "cats/1.jpg": b""},
        {"masks/1.jpg": b"", "cats/1.jpg": b""},
        {"images/1.jpg": b"", "annotations/1.xml": b""},  # boxes, not masks
    ],
)
def test_classes_of_such_names_are_classes(tmp_path: Path, tree: Files) -> None:
    assert told(plant(tmp_path, tree)) == "imagefolder"


def test_splits_can_be_refused(tmp_path: Path) -> None:
    root = plant(tmp_path, dataset("images/train/{}.jpg", "masks/train/{}.png"))
    [(split, found)] = listings(root, splits=False).items()
    assert (split, found.keys[0]) == ("", b"train/0.jpg")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image": "images/", "mask": "mask/"}, "no folder mask in it; there are images, masks"),
        ({"image": "images/", "mask": "../masks/"}, "expected a folder within"),
        ({"image": "images/", "mask": "images/x/"}, "images/x/ is, or lies in, images/"),
        ({"image": "./", "mask": "masks/"}, "expected a folder within"),
    ],
)
def test_folders_that_cannot_be_fields_are_refused(
    tmp_path: Path, fields: dict[str, str], message: str
) -> None:
    root = plant(tmp_path, dataset("images/{}.jpg", "masks/{}.png"))
    with pytest.raises((OptionError, SourceError), match=message):
        listings(root, fields=fields)


class TestTrees(FileSourceConformance):
    KIND = "trees"

    def make(self, root: Path) -> Path:
        return plant(root, dataset("images/{:02d}.jpg", "masks/{:02d}.png", self.COUNT))

    def file(self, path: Path) -> Path:
        return path / "masks" / "00.png"


def test_a_changed_mask_is_another_packing(tmp_path: Path) -> None:
    tree = dataset("images/{}.jpg", "masks/{}.png")
    [found] = listings(plant(tmp_path / "src", tree)).values()
    os.utime(tmp_path / "src/masks/1.png")
    with found.source.open() as read, pytest.raises(SourceChangedError, match=r"masks/1\.png"):
        read(1)
    [again] = listings(tmp_path / "src").values()
    assert np.flatnonzero(found.mtimes != again.mtimes).tolist() == [1]


def test_images_alone_are_not_resized(tmp_path: Path) -> None:
    tree: Files = {"images/1.jpg": picture(64, 64), "masks/1.png": picture(64, 64, "PNG")}
    with pytest.raises(OptionError, match="mask would then no longer fit"):
        pack(plant(tmp_path / "src", tree), tmp_path / "out", jobs=1, resize=32)


def test_an_index_of_them_is_refused(tmp_path: Path) -> None:
    root = plant(tmp_path, dataset("images/{}.jpg", "masks/{}.png"))
    with pytest.raises(OptionError, match="shardio pack"):
        index(root)
    assert index(root, format="imagefolder").classes == 2


def test_the_command_says_what_it_took_for_what(tmp_path: Path) -> None:
    plant(tmp_path / "src", dataset("images/{}.jpg", "masks/{}.png"))
    done = shardio("pack", tmp_path / "src", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "trees: fields: image (image) from images/, mask (image) from masks/" in done.stdout
    assert shardio_json("info", tmp_path / "out")["fields"]["mask"] == "image"
