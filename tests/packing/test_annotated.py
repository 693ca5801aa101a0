"""Boxes of Pascal VOC and YOLO, in files beside the images, are columns of the records."""

import io
import zipfile
from pathlib import Path

import pytest
from PIL import Image
from support.archives import zipped
from support.labels import CLASSES, FLAT, NAMES, column, pack_records, write
from support.packing import grouped
from support.trees import content, noise, picture, plant

import shardio as package
from shardio import commit, pack, plan
from shardio.errors import OptionError, SourceError


def voc(name: str, *boxes: tuple[str, int]) -> bytes:
    """An annotation of Pascal VOC: boxes with their names and their left sides."""
    objects = "".join(
        f"<object><name>{kind}</name><difficult>0</difficult><bndbox><xmin>{left}</xmin>"
        f"<ymin>1</ymin><xmax>{left + 9}</xmax><ymax>20</ymax></bndbox></object>"
        for kind, left in boxes
    )
    return (
        f"<annotation><filename>{name}</filename><size><width>40</width><height>30</height>"
        f"<depth>3</depth></size>{objects}</annotation>"
    ).encode()


def test_voc_boxes_become_annotations(tmp_path: Path) -> None:
    plant(tmp_path / "VOC/JPEGImages", FLAT)
    plant(tmp_path / "VOC/Annotations", {
        f"{n}.xml": voc(n, *[("dog", 11), ("cat", 1)][: i % 3]) for i, n in enumerate(NAMES[1:])
    } | {"999.xml": voc("999", ("cow", 1))})  # fmt: skip
    [done] = pack(tmp_path / "VOC/JPEGImages", tmp_path / "out", **grouped(
        {"jobs": 2, "boxes": tmp_path / "VOC/Annotations"}
    ))  # fmt: skip
    dataset = package.ShardDataset(tmp_path / "out", shuffle=False, decode=None)
    found = {one["__key__"][:3]: one for one in dataset}
    assert list(dataset.classes) == ["cat", "dog"]
    assert [len(found[n]["annotations"]) for n in NAMES] == [0, *[i % 3 for i in range(11)]]
    assert found["002"]["annotations"] == [
        {"bbox": [10, 0, 10, 20], "category": "dog", "difficult": 0, "label": 1}
    ]
    assert (found["002"]["width"], found["002"]["height"]) == (40, 30)
    assert found["000"]["width"] is None
    notes = "\n".join(done.notes)
    assert "1 file of no image, as 999.xml" in notes and "no file of boxes for 1 image" in notes


def test_voc_boxes_have_the_classes_of_folders(tmp_path: Path) -> None:
    """The way of ImageNet: names of boxes are names of folders."""
    plant(tmp_path / "train", CLASSES)
    boxes = {f"{key[:-4]}.xml": voc(key, ("b", 1)) for key in CLASSES}
    (tmp_path / "boxes.zip").write_bytes(zipped(boxes, way=zipfile.ZIP_DEFLATED))
    found = pack_records(tmp_path / "train", tmp_path / "out", boxes=tmp_path / "boxes.zip")[""]
    assert column(found, "label") == {name: i % 2 for i, name in enumerate(NAMES)}
    assert all(one["annotations"][0]["label"] == 1 for one in found.values())


@pytest.mark.parametrize("folders", [True, False])
def test_boxes_are_numbered_as_the_classes_of_another_dataset(
    folders: bool, tmp_path: Path
) -> None:
    plant(tmp_path / "other", {f"{name}/0.jpg": noise(name, 200) for name in ("B", "a", "b")})
    pack(tmp_path / "other", tmp_path / "numbers")
    plant(tmp_path / "in", CLASSES if folders else FLAT)
    keys = CLASSES if folders else FLAT
    plant(tmp_path / "boxes", {f"{key[:-4]}.xml": voc(key, ("b", 1), ("a", 3)) for key in keys})
    options = {"boxes": tmp_path / "boxes", "classes": tmp_path / "numbers", "max_records": 5}
    found = pack_records(tmp_path / "in", tmp_path / "out", **options)[""]
    assert all([one["label"] for one in record["annotations"]] == [2, 1]
               for record in found.values())  # fmt: skip
    if folders:
        assert column(found, "label") == {name: i % 2 + 1 for i, name in enumerate(NAMES)}
    plan(tmp_path / "in", tmp_path / "planned", **grouped(options))
    pack(tmp_path / "in", tmp_path / "planned", **grouped({"part": "1/1", "jobs": 1}))
    commit(tmp_path / "planned")
    for kept in (tmp_path / "planned").glob("**/.shardio-planned"):
        kept.unlink()
    assert content(tmp_path / "planned") == content(tmp_path / "out")


YOLO = "1 0.5 0.5 0.5 0.25\n0 0.25 0.5 0.5 0.5\n"


@pytest.mark.parametrize("names", ["yaml", "txt", "deep", None])
def test_yolo_boxes_become_pixels(tmp_path: Path, names: str | None) -> None:
    images = {
        f"{split}/{n}.png": picture(40 + i, 20, "PNG")
        for split, some in (("train", NAMES[:8]), ("val", NAMES[8:]))
        for i, n in enumerate(some)
    }
    plant(tmp_path / "yolo/images", images)
    plant(
        tmp_path / "yolo/labels", {f"{k[:-4]}.txt": YOLO.encode() for k in images if "7" not in k}
    )
    if names == "yaml":
        write(tmp_path / "yolo/data.yaml", "path: x\nnames:\n  0: cat\n  1: dog\n")
    elif names == "txt":
        write(tmp_path / "yolo/labels/classes.txt", "cat\ndog\n")
    elif names == "deep":
        write(tmp_path / "yolo/labels/train/obj.names", "cat\ndog\n")
    found = pack_records(tmp_path / "yolo/images", tmp_path / "out", boxes=tmp_path / "yolo/labels")
    assert sorted(found) == ["train", "val"]
    one = found["train"]["003.png"]
    assert (one["width"], one["height"]) == (43, 20)
    assert one["annotations"] == [
        {"bbox": [10.75, 7.5, 21.5, 5.0], "label": 1},
        {"bbox": [0.0, 5.0, 21.5, 10.0], "label": 0},
    ]
    assert found["train"]["007.png"]["annotations"] == []
    classes = package.open(tmp_path / "out/val").classes
    assert (classes and list(classes)) == (None if names is None else ["cat", "dog"])


def test_yolo_boxes_are_of_the_upright_image(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6  # a quarter to the right
    out = io.BytesIO()
    Image.new("RGB", (40, 20)).save(out, "JPEG", exif=exif)
    plant(tmp_path, {"images/a.jpg": out.getvalue(), "labels/a.txt": b"0 0.5 0.5 1 1\n"})
    found = pack_records(tmp_path / "images", tmp_path / "out", boxes=tmp_path / "labels")[""]
    assert found["a.jpg"]["annotations"] == [{"bbox": [0.0, 0.0, 20.0, 40.0], "label": 0}]


def test_boxes_that_cannot_be_read_are_problems(tmp_path: Path) -> None:
    plant(tmp_path / "images", FLAT)
    plant(tmp_path / "boxes", {f"{n}.xml": voc(n, ("cat", 1)) for n in NAMES[2:]})
    plant(tmp_path / "boxes", {"000.xml": b"<annotation><size>", "001.xml": b"<!DOCTYPE a><a/>"})
    with pytest.raises(SourceError, match=r"000.jpg: its boxes, 000.xml: line 1: expected XML"):
        pack_records(tmp_path / "images", tmp_path / "out", boxes=tmp_path / "boxes")
    found = pack_records(
        tmp_path / "images", tmp_path / "out", boxes=tmp_path / "boxes", on_error="skip"
    )[""]
    assert sorted(found) == [f"{n}.jpg" for n in NAMES[2:]]
    plant(tmp_path / "labels", {"000.txt": b"7 0.5 0.5 1 1\n", "classes.txt": b"cat\n"})
    with pytest.raises(SourceError, match=r"its boxes have class 7, of 1 names"):
        pack_records(tmp_path / "images", tmp_path / "two", boxes=tmp_path / "labels")
    for wrong in ("nothing", "images"):
        with pytest.raises((OptionError, SourceError), match=f"--boxes .*{wrong}: "):
            pack_records(tmp_path / "images", tmp_path / "two", boxes=tmp_path / wrong)


def test_boxes_and_splits_by_plan_and_parts(tmp_path: Path) -> None:
    plant(tmp_path / "images", {f"{n}.png": picture(40, 20, "PNG") for n in NAMES})
    plant(tmp_path / "labels", {f"{n}.txt": YOLO.encode() for n in NAMES})
    lists = {
        "train": write(tmp_path / "train.txt", "".join(f"./images/{n}.png\n" for n in NAMES[:7])),
        "val": write(tmp_path / "val.txt", "".join(f"./images/{n}.png\n" for n in NAMES[7:])),
    }
    options = {"split_files": lists, "boxes": tmp_path / "labels", "max_records": 2}
    pack(tmp_path / "images", tmp_path / "whole", **grouped(options | {"jobs": 1}))
    plan(tmp_path / "images", tmp_path / "planned", **grouped(options))
    for part in ("1/2", "2/2"):
        pack(tmp_path / "images", tmp_path / "planned", **grouped({"part": part, "jobs": 1}))
    commit(tmp_path / "planned")
    for kept in (tmp_path / "planned").glob("*/.shardio-planned"):
        kept.unlink()
    assert content(tmp_path / "planned") == content(tmp_path / "whole")
