"""Folders side by side, such as images/ and masks/, are one dataset with a field for each."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import sources
from support.archives import deflated, tar, write, zipped
from support.conformance import FileSourceConformance
from support.packing import grouped
from support.sources import kind_of, samples
from support.trees import content, noise, picture, plant, shardio, shardio_json

from shardio import SourceOptions, index, pack, unpack
from shardio.dataset import sequence as sequences
from shardio.errors import OptionError, SourceError
from shardio.packing.packed import Packed
from shardio.packing.sources.base import Listing

listings = partial(sources.listings, expected="trees")

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
    [one] = samples(found)
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
        kind_of(root)
    assert "--fields image=JPEGImages/,mask=SegmentationClass/" in str(caught.value)
    assert kind_of(root, fields=fields) == "trees"
    assert kind_of(root, kind="imagefolder") == "imagefolder"


@pytest.mark.parametrize(
    "tree",
    [
        {"images/1.jpg": b"", "cats/1.jpg": b""},
        {"masks/1.jpg": b"", "cats/1.jpg": b""},
        {"images/1.jpg": b"", "annotations/1.xml": b""},  # boxes, not masks
    ],
)
def test_classes_of_such_names_are_classes(tmp_path: Path, tree: Files) -> None:
    assert kind_of(plant(tmp_path, tree)) == "imagefolder"


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
        ({"image": "images/*", "mask": "masks/"}, "image=images/\\*: expected one star, then the"),
        ({"image": "images/a*.jpg", "mask": "masks/"}, "such as images/\\*_rgb.png, or \\*_rgb"),
        ({"image": "*/*.jpg", "mask": "masks/"}, "expected one star"),
        ({"image": "*/a.jpg", "mask": "masks/"}, "expected one star"),
        ({"image": "/*.jpg", "mask": "masks/"}, "expected a folder within"),
        ({"image": "../x/*.jpg", "mask": "masks/"}, "expected a folder within"),
        ({"image": "*.jpg", "mask": "cls"}, "mask=cls: others are folders"),
        ({"image": "*.jpg", "mask": "masks/"}, r"masks/ is, or lies in, \*.jpg; expected folders"),
        ({"image": "images/*.jpg", "mask": "images/*.jpg"}, "is, or lies in"),
        ({"image": "images/", "mask": "images/*.jpg"}, "is, or lies in"),
        ({"image": "pictures/*.jpg", "mask": "masks/"}, "there is no folder pictures in it"),
        ({"image": "images/*.png", "mask": "masks/"}, "no files in it\nleft out, being of no f.*3"),
        ({"image": "images/", "mask": "masks/*_m.png"}, r"no file masks/\*_m.png in it\nleft out"),
    ],
)
def test_folders_that_cannot_be_fields_are_refused(
    tmp_path: Path, fields: dict[str, str], message: str
) -> None:
    root = plant(tmp_path, dataset("images/{}.jpg", "masks/{}.png"))
    with pytest.raises((OptionError, SourceError), match=message):
        listings(root, fields=fields)


# --- names that differ in their ends --------------------------------------------------------------

CITYSCAPES = {
    "image": "leftImg8bit/*_leftImg8bit.png",
    "mask": "gtFine/*_gtFine_labelIds.png",
}
MASKS_BESIDE = {"image": "*.png", "mask": "*_mask.png"}


def cityscapes() -> Files:
    """As it is distributed: {type}/{split}/{city}/{city}_{sequence}_{frame}_{type}{ending}."""
    tree: Files = {"README": b"x", "license.txt": b"x", "gtFine/readme.txt": b"x"}
    for split, city in (("train", "aachen"), ("train", "ulm"), ("val", "lindau")):
        for i in range(2):
            name = f"{split}/{city}/{city}_{i:06}_000019"
            tree[f"leftImg8bit/{name}_leftImg8bit.png"] = noise(name, 200 + i)
            for kind in ("labelIds.png", "instanceIds.png", "color.png"):
                tree[f"gtFine/{name}_gtFine_{kind}"] = noise(name + kind, 90)
            tree[f"gtFine/{name}_gtFine_polygons.json"] = b"{}"
    return tree


def masks_beside(folders: str = "", count: int = 3) -> Files:
    return dataset(folders + "{}.png", folders + "{}_mask.png", count)


def test_cityscapes_is_packed_as_it_is_distributed(tmp_path: Path) -> None:
    tree = cityscapes()
    fields = ",".join(f"{name}={pattern}" for name, pattern in CITYSCAPES.items())
    source = plant(tmp_path / "src", tree)
    done = shardio("pack", source, tmp_path / "out", "--fields", fields)
    assert done.returncode == 0, done.stderr
    assert "image (image) from leftImg8bit/train/*_leftImg8bit.png, mask (image) from gtF" in (
        done.stdout
    )
    assert "left out, being of no field: 12 files, such as gtFine/train/aachen/aachen_000000_" in (
        done.stdout
    )
    assert "in none of these folders: README, gtFine/readme.txt, license.txt" in done.stdout
    for split, city, count in (("train", "ulm", 4), ("val", "lindau", 2)):
        samples = {
            one["__key__"]: one for one in sequences.open(tmp_path / "out" / split, decode=None)
        }
        assert len(samples) == count
        name = f"{split}/{city}/{city}_000001_000019"
        sample = samples[f"{city}/{city}_000001_000019_leftImg8bit.png"]
        assert sample["image"] == noise(name, 201)
        assert sample["mask"] == noise(name + "labelIds.png", 90)
    unpack(tmp_path / "out", tmp_path / "back")
    found = {name: data for name, data in content(tmp_path / "back").items() if data is not None}
    ends = ("leftImg8bit.png", "labelIds.png")
    assert found == {os.fsencode(n): data for n, data in tree.items() if str(n).endswith(ends)}
    # Both zips have the same two files on top: they are of no field, and so no problem.
    zips: Files = {
        f"{kind}_trainvaltest.zip": make({n: d for n, d in tree.items() if top(str(n)) != other})
        for kind, other, make in (
            ("leftImg8bit", "gtFine", deflated),
            ("gtFine", "leftImg8bit", zipped),
        )
    }
    for where in (
        plant(tmp_path / "zips", zips),
        write(tmp_path / "one.tar", tar(tree, "all/")) / "all",
    ):
        out = tmp_path / f"out of {where.name}"
        pack(where, out, jobs=1, read=SourceOptions(fields=CITYSCAPES))
        assert content(out) == content(tmp_path / "out")


def top(name: str) -> str:
    return name.partition("/")[0]


def test_of_two_patterns_in_one_folder_the_longer_end_wins(tmp_path: Path) -> None:
    tree = masks_beside() | masks_beside("x/y/") | {"x/notes.txt": b"x", ".hidden.png": b"x"}
    [found] = listings(plant(tmp_path / "src", tree), fields=MASKS_BESIDE).values()
    assert found.keys == [b"0.png", b"1.png", b"2.png", *(b"x/y/%d.png" % i for i in range(3))]
    assert found.problems == []
    assert found.notes == ["left out, being of no field: 1 file, such as x/notes.txt"]
    assert found.ignored == 1
    assert [one["mask"] for one in samples(found)] == [
        noise(key.decode().replace(".png", "_mask.png"), 90) for key in found.keys
    ]
    pack(tmp_path / "src", tmp_path / "out", jobs=1, read=SourceOptions(fields=MASKS_BESIDE))
    unpack(tmp_path / "out", tmp_path / "back")
    back = {name: data for name, data in content(tmp_path / "back").items() if data is not None}
    assert back == {
        os.fsencode(n): data
        for n, data in tree.items()
        if n in (masks_beside() | masks_beside("x/y/"))
    }


def test_patterns_in_folders_of_splits(tmp_path: Path) -> None:
    """A split without masks has no such field; what else lies beside splits is left out."""
    tree = masks_beside("train/") | {"test/9.png": noise("", 9), "readme.txt": b"x"}
    found = listings(plant(tmp_path / "src", tree), fields=MASKS_BESIDE)
    assert [*found] == ["test", "train"]
    assert found["test"].keys == [b"9.png"] and found["train"].keys == [
        b"0.png",
        b"1.png",
        b"2.png",
    ]
    assert found["test"].fields == (("image", "image"),)
    assert found["test"].notes == [
        "there is no file test/*_mask.png for this split, so no such field",
        "left out, being in none of these folders: readme.txt",
    ]
    above = dataset("train/rgb/{}_rgb.jpg", "train/seg/{}_s.png") | dataset(
        "val/rgb/{}_rgb.jpg", "val/seg/{}_s.png"
    )
    fields = {"image": "rgb/*_rgb.jpg", "mask": "seg/*_s.png"}
    again = listings(plant(tmp_path / "above", above), fields=fields)
    assert [*again] == ["train", "val"]
    assert again["val"].keys == [b"0_rgb.jpg", b"1_rgb.jpg", b"2_rgb.jpg"]
    with pytest.raises(SourceError, match="there is no folder sgm in it"):
        listings(tmp_path / "above", fields=fields | {"mask": "sgm/*_s.png"})


def test_a_file_that_is_of_a_field_lies_in_no_split(tmp_path: Path) -> None:
    root = plant(tmp_path, masks_beside("train/") | masks_beside())
    [(split, found)] = listings(root, fields=MASKS_BESIDE).items()
    assert split == "" and len(found.keys) == 6
    with pytest.raises(SourceError, match="6 files beside"):
        listings(root, fields=MASKS_BESIDE, splits=True)


def test_a_pattern_goes_with_a_folder(tmp_path: Path) -> None:
    """As in DIV2K: 0001.png with 0001x2.png."""
    tree = dataset("DIV2K_train_HR/{:04}.png", "DIV2K_train_LR_bicubic/X2/{:04}x2.png")
    tree |= {"DIV2K_train_LR_bicubic/X3/0000x3.png": noise("x3", 20)}
    fields = {"image": "DIV2K_train_HR/", "low": "DIV2K_train_LR_bicubic/X2/*x2.png"}
    [found] = listings(plant(tmp_path, tree), fields=fields).values()
    assert found.keys == [b"0000.png", b"0001.png", b"0002.png"]
    assert samples(found)[1]["low"] == noise("DIV2K_train_LR_bicubic/X2/0001x2.png", 90)


def test_all_of_a_name_may_be_its_end(tmp_path: Path) -> None:
    tree = dataset("{}/rgb.jpg", "{}/mask.png") | {"0/depth.npy": b"x"}
    [found] = listings(
        plant(tmp_path, tree), fields={"image": "*rgb.jpg", "mask": "*mask.png"}
    ).values()
    assert found.keys == [b"0/rgb.jpg", b"1/rgb.jpg", b"2/rgb.jpg"]


def test_what_a_pattern_lacks_is_a_problem_with_its_name(tmp_path: Path) -> None:
    tree = masks_beside(count=5) | {"3.png": b"", "9_mask.png": noise("9", 9)}
    del tree["1_mask.png"]
    root = plant(tmp_path, tree)
    os.symlink("nowhere", root / "4_mask.png.old")  # of no field, and so no problem
    os.unlink(root / "4_mask.png")
    os.symlink("nowhere", root / "4_mask.png")
    os.makedirs(root / "x")
    os.symlink("..", root / "x/loop")  # all that is behind it is not seen
    [found] = listings(root, fields=MASKS_BESIDE).values()
    assert found.keys == [b"0.png", b"2.png"]
    assert found.problems == [
        (b"1.png", "has no partner in *_mask.png: there is no file 1_mask.png"),
        (b"3.png", "is empty"),
        (b"4_mask.png", "is a link to nothing"),
        (b"9_mask.png", "has no partner in *.png: there is no file 9.png"),
        (b"x/loop", "is a link to a folder that contains it"),
    ]
    assert found.notes == ["left out, being of no field: 1 file, such as 4_mask.png.old"]


def test_patterns_say_that_a_tar_is_no_webdataset(tmp_path: Path) -> None:
    tree = dataset("{}.jpg", "{}.seg.png")
    source = write(tmp_path / "a.tar", tar(tree))
    assert kind_of(source) == "webdataset"
    [found] = listings(source, fields={"image": "*.jpg", "mask": "*.seg.png"}).values()
    assert found.keys == [b"0.jpg", b"1.jpg", b"2.jpg"]


def test_images_of_patterns_become_pixels(tmp_path: Path) -> None:
    tree: Files = {"1_rgb.png": picture(8, 8, "PNG"), "1_mask.png": picture(8, 8, "PNG")}
    fields = {"image": "*_rgb.png", "mask": "*_mask.png"}
    source = plant(tmp_path / "src", tree)
    pack(source, tmp_path / "out", **grouped({"jobs": 1, "encode": "raw", "fields": fields}))
    unpack(tmp_path / "out", tmp_path / "back")
    assert {*content(tmp_path / "back")} == {b"1_rgb.png.ppm", b"1_mask.png"}


class TestPatterns(FileSourceConformance):
    KIND = "trees"

    def make(self, root: Path) -> Path:
        tree = dataset("{:02d}_a.jpg", "{:02d}_b.jpg", self.COUNT)
        return plant(root, tree | {"00_c.jpg": noise("c", 10)})

    def file(self, path: Path) -> Path:
        return path / "00_b.jpg"

    def pack(self, path: Path, out: Path, **options: Any) -> Packed:
        return super().pack(path, out, fields={"image": "*_a.jpg", "mask": "*_b.jpg"}, **options)

    def listing(self, path: Path) -> Listing:
        return listings(path, fields={"image": "*_a.jpg", "mask": "*_b.jpg"})[""]


class TestTrees(FileSourceConformance):
    KIND = "trees"

    def make(self, root: Path) -> Path:
        return plant(root, dataset("images/{:02d}.jpg", "masks/{:02d}.png", self.COUNT))

    def file(self, path: Path) -> Path:
        return path / "masks" / "00.png"


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
