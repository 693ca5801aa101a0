"""COCO: one record an image, found, checked, exact, and the same each time."""

import json
import math
import os
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import sources
from support.conformance import FileSourceConformance
from support.packing import interrupted
from support.sources import kind_of, records
from support.trees import JPEG, content, noise, picture, plant, shardio, shardio_json

from shardio import RandomResizedCrop, ShardDataset, SourceOptions, pack, unpack
from shardio.dataset import sequence as sequences
from shardio.errors import OptionError, ShardioError, SourceChangedError, SourceError

listing = partial(sources.listing, expected="coco")
pack_one = partial(sources.pack_one, max_records=3)

FILE = "annotations/instances_train2017.json"


def image(number: int, **more: Any) -> dict[str, Any]:
    name = f"{number:012d}.jpg"
    return {"id": number * 7, "file_name": name, "width": 30 + number, "height": 20} | more


def described(count: int = 12) -> dict[str, Any]:
    """Images, of which some have no annotations; classes in another order than their ids."""
    return {
        "info": {"year": 2017},
        "images": [image(number, license=3) for number in reversed(range(count))],
        "annotations": [
            {
                "id": 1000 * place + number,
                "image_id": number * 7,
                "category_id": (18, 3)[place % 2],
                "segmentation": [[1, 2.5, 1e-9]] if place else {"counts": [7, 1], "size": [2, 4]},
                "bbox": [0.1 + 0.2, 1, 2.0, 3],
                "iscrowd": 0,
            }
            for place in range(3)
            for number in range(count)
            if place < number % 4
        ],
        "categories": [{"id": 18, "name": "dog"}, {"id": 3, "name": "car", "supercategory": "x"}],
    }


def write(root: Path, content: Any, name: str = FILE) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def coco(root: Path, count: int = 12, folder: str = "train2017") -> Path:
    """A data set of COCO's; the path of its file."""
    plant(root, {f"{folder}/{i:012d}.jpg": noise(f"{i}", 300 + i) for i in range(count)})
    return write(root, described(count))


# --- what a record is -----------------------------------------------------------------------------


def test_an_image_is_a_record_with_its_annotations_in_their_order(tmp_path: Path) -> None:
    found = listing(coco(tmp_path))
    assert found.keys == [b"%012d.jpg" % i for i in range(12)]
    assert found.classes == ("car", "dog")
    assert found.fields == (
        *(("image", "image"), ("image_id", "int"), ("width", "int"), ("height", "int")),
        ("annotations", "json"),
    )
    found_records = records(found)
    assert found_records[b"%012d.jpg" % 4]["annotations"] == []
    whole = described()
    for i in range(12):
        one = found_records[b"%012d.jpg" % i]
        assert one["image"] == noise(f"{i}", 300 + i)
        assert (one["image_id"], one["width"], one["height"]) == (i * 7, 30 + i, 20)
        theirs = [a for a in whole["annotations"] if a["image_id"] == i * 7]
        for ours, its in zip(one["annotations"], theirs, strict=True):
            label = ours.pop("label")
            assert found.classes[label] == {18: "dog", 3: "car"}[ours["category_id"]]
            assert [*ours.items()] == [pair for pair in its.items() if pair[0] != "image_id"]


def test_annotations_are_exact_after_packing(tmp_path: Path) -> None:
    values = [0.1 + 0.2, 1e308, -0.0, 5e-324, 2**63, -(2**63), True, None, "é\n", [[[]]], {"a": {}}]
    whole = {
        "images": [image(0)],
        "annotations": [{"image_id": 0, "keypoints": values, "caption": "a cat"}],
    }
    plant(tmp_path, {"val2017/000000000000.jpg": JPEG})
    path = write(tmp_path, whole, "annotations/captions_val2017.json")
    done = pack_one(path, tmp_path / "out")
    assert (done.classes, done.records) == (None, 1)
    [sample] = sequences.stored(tmp_path / "out")
    [one] = sample["annotations"]
    assert one == {"keypoints": values, "caption": "a cat"}
    assert list(map(type, one["keypoints"])) == list(map(type, values))
    assert math.copysign(1, one["keypoints"][2]) == -1


def test_sizes_that_are_missing_are_none(tmp_path: Path) -> None:
    plant(tmp_path, {"a.jpg": JPEG, "b.jpg": JPEG})
    images = [{"id": 1, "file_name": "a.jpg", "width": 640.0}, {"id": 2, "file_name": "b.jpg"}]
    found = records(listing(write(tmp_path, {"images": images}, "x.json")))
    assert found[b"a.jpg"]["width"] == 640 and type(found[b"a.jpg"]["width"]) is int
    assert found[b"b.jpg"] == {
        **{"image": JPEG, "image_id": 2, "width": None, "height": None},
        "annotations": [],
    }


def test_names_of_files_are_keys_that_unpack_can_write(tmp_path: Path) -> None:
    names = ["sub/a.jpg", "./b.jpg", "../c.jpg", str(tmp_path / "img" / "d.jpg"), "caf\u00e9.jpg"]
    plant(tmp_path, {f"img/{n}": noise(n, 200 + i) for i, n in enumerate(names[:3])})
    plant(tmp_path, {"img/d.jpg": JPEG, "img/caf\u00e9.jpg": JPEG})
    whole = {"images": [{"id": i, "file_name": name} for i, name in enumerate(names)]}
    path = write(tmp_path, whole, "x.json")
    pack_one(path, tmp_path / "out", root=tmp_path / "img")
    unpack(tmp_path / "out", tmp_path / "back")
    back = content(tmp_path / "back")
    assert {key for key, data in back.items() if data is not None} == {
        *(b"sub/a.jpg", b"b.jpg", b"c.jpg", str(tmp_path / "img" / "d.jpg").lstrip("/").encode()),
        "caf\u00e9.jpg".encode(),
    }
    assert back[b"c.jpg"] == noise("../c.jpg", 202)


# --- where it is ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("annotations/instances_train2017.json", "train2017"),
        ("annotations/instances_train2017.json", "images/train2017"),
        ("annotations/person_keypoints_val2017.json", "val2017"),
        ("annotations/image_info_test-dev2017.json", "images/test-dev2017"),
        ("annotations/captions_train2014.json", "train"),
        ("annotations/train.json", "images/train"),
        ("annotations/x.json", "annotations"),
        ("annotations/x.json", "images"),
        ("train/_annotations.coco.json", "train"),
        ("train.json", "train"),
        ("train.json", "images/train"),
    ],
)
def test_images_are_found_beside_the_file_and_the_note_says_where(
    tmp_path: Path, name: str, folder: str
) -> None:
    plant(tmp_path, {f"{folder}/000000000000.jpg": JPEG, "other/000000000000.jpg": b"?"})
    found = listing(write(tmp_path, {"images": [image(0)]}, name))
    assert records(found)[b"000000000000.jpg"]["image"] == JPEG
    assert found.notes == [f"images are those in {tmp_path / folder}; --root says otherwise"]


def test_images_elsewhere_need_a_root(tmp_path: Path) -> None:
    path = coco(tmp_path / "coco", folder="elsewhere/yes")
    with pytest.raises(OptionError, match=r"\.\./train2017.*--root"):
        listing(path)
    found = listing(path, root=str(tmp_path / "coco" / "elsewhere" / "yes"))
    assert len(found.keys) == 12 and found.notes == []
    with pytest.raises(OptionError, match="expected a folder"):
        listing(path, root=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("given", [".", "annotations"])
def test_a_folder_of_it_is_refused_with_the_files_to_give(tmp_path: Path, given: str) -> None:
    coco(tmp_path)
    write(tmp_path, {}, "annotations/captions_val2017.json")
    for kind in (None, "coco"):
        with pytest.raises(OptionError) as caught:
            pack(tmp_path / given, tmp_path.parent / "out", read=SourceOptions(kind=kind))
        for name in ("instances_train2017.json", "captions_val2017.json"):
            assert f"annotations/{name}" in str(caught.value)
    plant(tmp_path / "images", {"annotations/x.jpg": JPEG, "annotations/y.json": b"{}"})
    assert kind_of(tmp_path / "images") == "imagefolder"


# --- what is wrong --------------------------------------------------------------------------------


def second(name: str, /, **changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(whole: dict[str, Any]) -> None:
        entry = whole[name][1]
        entry.update(changes)
        for key in [key for key, value in entry.items() if value is ...]:
            del entry[key]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (second("images", file_name=...), r"images\[1\], id 70: expected a file_name, found none"),
        (second("images", file_name="a\0"), r"images\[1\], id 70: expected a file_name"),
        (second("images", file_name="\ud800.jpg"), r"images\[1\], id 70: expected a file_name"),
        (second("images", file_name=".."), r"images\[1\], id 70: expected a file_name"),
        (second("images", file_name="./000000000011.jpg"), r"is that of images\[0\] too"),
        (second("images", id=77), r"images\[1\], id 77: its id is that of images\[0\] too"),
        (second("images", id="70"), r"images\[1\], id '70': expected an id that is an integer"),
        (second("images", id=1 << 63), "integer of 64 bits"),
        (second("images", id=True), "integer of 64 bits"),
        (second("images", width="640"), "whole number as width, found '640'"),
        (second("images", height=1 << 64), "whole number as height"),
        (
            second("annotations", image_id=5),
            r"annotations\[1\], id 2: no image has its image_id, 5",
        ),
        (second("annotations", image_id=...), "no image has its image_id, None"),
        (second("annotations", image_id=[7]), r"no image has its image_id, \[7\]"),
        (second("annotations", category_id=4), "no category has its category_id, 4"),
        (second("annotations", category_id={}), "no category has its category_id"),
        (second("annotations", id=1), r"its id is that of annotations\[0\] too"),
        (second("annotations", label=5), "a `label` of its own"),
        (second("annotations", far=1 << 70), "annotations"),
        (second("annotations", odd="\ud800"), "annotations"),
        (second("categories", name="dog"), r"its name, dog, is that of categories\[0\] too"),
        (second("categories", id=18), r"its id is that of categories\[0\] too"),
        (second("categories", name=...), "it has no name"),
        (lambda whole: whole["images"].append([]), r"images\[12\]: expected"),
        (lambda whole: whole["annotations"].append(1), "expected an object"),
        (lambda whole: whole["categories"].append(None), "categories"),
        (lambda whole: whole.update(images={}), "a list `images`"),
        (lambda whole: whole.update(images=[]), "list of images is empty"),
        (lambda whole: whole.update(annotations={}), "expected a list `annotations`"),
        (lambda whole: whole.pop("images"), "found one with info, annotations, categories"),
    ],
)
def test_entries_that_are_not_as_coco_has_them_are_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    path = coco(tmp_path)
    whole = described()
    change(whole)
    write(tmp_path, whole)
    with pytest.raises(SourceError, match=said) as caught:
        listing(path)
    assert str(path) in str(caught.value)


def test_all_wrong_entries_are_in_one_error(tmp_path: Path) -> None:
    whole = described()
    for one in whole["annotations"]:
        one["image_id"] = -1
    with pytest.raises(SourceError, match=r"18 of its entries .*\n.*annotations\[0\]"):
        listing(write(tmp_path, whole))


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b'{"images": [{"id": 1, "file_name": "a.jpg"}',
        b'{"images": ' + b"[" * 100_000,
        b'{"images": [' + b"9" * 10_000 + b"]}",
        b'{"images": ["\xff"]}',
        b"{\0}",
        b'{"images": null}',
    ],
)
def test_what_is_no_json_of_cocos_is_an_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(ShardioError, match=r"x\.json"):
        listing(path)
    shardio("pack", path, tmp_path / "out", code=1)


def test_images_that_cannot_be_packed_are_problems(tmp_path: Path) -> None:
    path = coco(tmp_path)
    folder = tmp_path / "train2017"
    (folder / "000000000001.jpg").unlink()
    (folder / "000000000002.jpg").write_bytes(b"")
    (folder / "000000000003.jpg").write_bytes(b"no image")
    (folder / "000000000005.jpg").unlink()
    (folder / "000000000005.jpg").mkdir()
    (folder / "000000000006.jpg").unlink()
    os.mkfifo(folder / "000000000006.jpg")
    done = pack_one(path, tmp_path / "out", on_error="skip")
    reasons = {int(key[:12]): why for key, why in done.rejected}
    assert reasons[1] == "there is no such file" and reasons[2] == "is empty"
    assert reasons[3].startswith("is not an image")
    assert "is a folder" in reasons[5] and "is a FIFO" in reasons[6]
    assert (len(reasons), done.records) == (5, 7)
    with pytest.raises(SourceError, match="5 files cannot be packed"):
        pack_one(path, tmp_path / "again")


def test_annotations_that_no_record_holds_leave_out_their_image(tmp_path: Path) -> None:
    plant(tmp_path, {f"{name}.jpg": JPEG for name in ("fits", "over", "some")})
    names = {"fits": 1 << 20, "over": (1 << 20) + 1, "some": 100}
    whole: dict[str, Any] = {"images": [], "annotations": []}
    for number, (name, size) in enumerate(names.items()):
        whole["images"].append({"id": number, "file_name": f"{name}.jpg"})
        # the head: an array, key, length of the image, id, two nil, an array of {"x": str}
        around = 1 + 10 + 1 + 1 + 2 + 1 + 1 + 2 + (5 if size > 65_600 else 2)
        whole["annotations"].append({"image_id": number, "x": "y" * (size - around)})
    done = pack_one(write(tmp_path, whole, "x.json"), tmp_path / "out", on_error="skip")
    assert done.records == 2
    [(key, why)] = done.rejected
    assert key == "over.jpg" and "1,048,577 bytes" in why and "1,048,576" in why


# --- resumed, or another plan ---------------------------------------------------------------------


class TestCoco(FileSourceConformance):
    KIND = "coco"

    def make(self, root: Path) -> Path:
        return coco(root)

    def file(self, path: Path) -> Path:
        return path.parent.parent / "train2017" / "000000000000.jpg"


def test_an_interrupted_packing_goes_on_also_from_a_file_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = coco(tmp_path)
    interrupted(monkeypatch, pack_one, path, tmp_path / "out")
    path.write_text(json.dumps(described(), indent=1))
    done = pack_one(path, tmp_path / "out")
    assert (done.kept, done.built) == (2, 2)
    pack_one(path, tmp_path / "one")
    assert content(tmp_path / "out") == content(tmp_path / "one")


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: whole["annotations"][5]["bbox"].append(1),
        lambda whole: whole["annotations"].pop(),
        lambda whole: whole["annotations"].reverse(),
        lambda whole: whole["images"][3].update(width=1),
        lambda whole: whole["images"][3].update(height=None),
        lambda whole: whole["images"][4].update(width=None),
        lambda whole: whole["images"][0].update(id=-1),
    ],
)
def test_other_values_have_another_digest(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    path, whole = coco(tmp_path), described()
    whole["annotations"] = [a for a in whole["annotations"] if a["image_id"] != 77]
    whole["images"][4]["width"] = 0
    before = listing(write(tmp_path, whole)).options["values"]
    change(whole)
    write(tmp_path, whole)
    assert listing(path).options["values"] != before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda whole: whole["annotations"].pop(), "option values"),
        (lambda whole: whole["categories"][0].update(name="wolf"), "classes differ"),
        (lambda whole: whole["images"].pop(0), "is gone"),
    ],
)
def test_what_changed_in_it_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, Any]], None],
    said: str,
) -> None:
    path, whole = coco(tmp_path), described()
    whole["annotations"] = [a for a in whole["annotations"] if a["image_id"] != 77]
    write(tmp_path, whole)
    interrupted(monkeypatch, pack_one, path, tmp_path / "out")
    change(whole)
    write(tmp_path, whole)
    with pytest.raises(SourceChangedError, match=said):
        pack_one(path, tmp_path / "out")


def test_a_crop_that_leaves_the_boxes_behind_is_told(tmp_path: Path) -> None:
    pack_one(coco(tmp_path), tmp_path / "out")
    with pytest.warns(UserWarning, match=r"boxes stay .*RandomResizedCrop\(\.\.\., boxes='annotat"):
        ShardDataset(tmp_path / "out", transform=RandomResizedCrop(8))
    ShardDataset(tmp_path / "out", transform=RandomResizedCrop(8, boxes="annotations"))
    ShardDataset(tmp_path / "out", fields=("image",), transform=RandomResizedCrop(8))


# --- options --------------------------------------------------------------------------------------


def test_where_selects_by_numbers_before_files_are_looked_at(tmp_path: Path) -> None:
    path = coco(tmp_path)
    for i in range(6, 12):
        (tmp_path / "train2017" / f"{i:012d}.jpg").unlink()
    found = listing(path, where={"width": lambda width: width < 36, "image_id": [7, 14, 70]})
    assert found.keys == [b"000000000001.jpg", b"000000000002.jpg"]
    assert found.problems == []
    assert records(found)[b"000000000002.jpg"]["image_id"] == 14
    done = pack_one(path, tmp_path / "out", where={"image_id": [7, 14, 21]})
    assert done.records == 3
    for where in ({"annotations": []}, {"label": "dog"}):
        with pytest.raises(OptionError, match="image_id, width, height"):
            listing(path, where=where)


def test_fields_can_be_named(tmp_path: Path) -> None:
    path = coco(tmp_path)
    found = listing(path, fields={"objects": "annotations", "w": "width"})
    assert [name for name, _ in found.fields] == ["image", "image_id", "w", "height", "objects"]
    assert found.options["fields"] == {"objects": "annotations", "w": "width"}
    assert records(found)[b"000000000001.jpg"]["w"] == 31
    for fields in ({"x": "nope"}, {"image": "width"}, {"x": "width", "y": "width"}, {"": "width"}):
        with pytest.raises(OptionError):
            pack_one(path, tmp_path / "out", fields=fields)
    assert not (tmp_path / "out").exists()


def test_classes_of_another_dataset_number_the_labels(tmp_path: Path) -> None:
    other = plant(tmp_path / "other", {f"{n}/1.jpg": JPEG for n in ("ant", "car", "cow", "dog")})
    pack(other, tmp_path / "numbering", jobs=1)
    pack_one(coco(tmp_path), tmp_path / "out", classes=tmp_path / "numbering")
    found = sequences.stored(tmp_path / "out")
    assert found.classes == ["ant", "car", "cow", "dog"]
    labels = {(a["category_id"], a["label"]) for one in found for a in one["annotations"]}
    assert labels == {(18, 3), (3, 1)}


# --- from end to end ------------------------------------------------------------------------------


def test_the_command_line_and_training(tmp_path: Path) -> None:
    from shardio import ShardDataset

    path = coco(tmp_path / "coco", 40)
    plant(tmp_path / "coco", {f"train2017/{i:012d}.jpg": picture(8 + i, 8) for i in range(40)})
    out = tmp_path / "out"
    done = shardio("pack", path, out, "--max-records", "9", "--no-shuffle")
    assert "coco: fields: image (image), image_id (int), width (int), height (int)" in done.stdout
    assert f"images are those in {tmp_path / 'coco' / 'train2017'}" in done.stdout
    assert shardio_json("info", out)["classes"] == ["car", "dog"]
    row = shardio_json("ls", out)["records"][7]
    assert row["key"] == "000000000007.jpg" and "class" not in row and "label" not in row
    assert "field `label`" in shardio("ls", out, "--class", "dog", code=2).stderr
    assert shardio("verify", out, "--decode").returncode == 0
    assert len(json.loads(shardio("cat", out, "7", "--field", "annotations").stdout)) == 3
    shardio("explain", out, "--batch-size", "8")
    shardio("tune", out, "--batch-size", "8")
    shardio("unpack", out, tmp_path / "back")
    assert content(tmp_path / "back") == content(tmp_path / "coco" / "train2017")
    shardio("export", out, tmp_path / "wds", "--format", "webdataset")
    done = shardio("export", out, tmp_path / "f", "--format", "imagefolder", "--fields", "image")
    assert content(tmp_path / "f") == content(tmp_path / "coco" / "train2017")

    data = ShardDataset(out, batch_size=8, fields=("image_id", "annotations"), where={"height": 20})
    rows = [row for batch in data for row in zip(*batch, strict=True)]
    assert {int(number): len(found) for number, found in rows} == {i * 7: i % 4 for i in range(40)}


def test_a_large_file_takes_little_memory_once_it_is_read(tmp_path: Path) -> None:
    plant(tmp_path, {f"train2017/{i:012d}.jpg": JPEG for i in range(500)})
    path = write(tmp_path, described(500))
    tracemalloc.start()
    found = listing(path)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found.keys) == 500
    assert kept < 500 * 700  # bytes, where the dicts and lists of 1.5 annotations take 2,500
