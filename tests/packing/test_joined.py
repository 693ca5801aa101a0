"""Tables and lists beside images: what they say comes into the records, and into the right ones."""

import gzip
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.archives import tar, zipped
from support.conformance import FileSourceConformance
from support.labels import (
    CLASSES,
    FLAT,
    NAMES,
    NUMBERS,
    column,
    lines,
    pack_records,
    pack_table,
    write,
)
from support.packing import grouped, interrupted
from support.sources import listing
from support.trees import content, noise, picture, plant, shardio

import shardio as package
from shardio import commit, pack, plan, unpack
from shardio.errors import OptionError, SourceChangedError, SourceError
from shardio.packing.options import Joins
from shardio.packing.sources.base import Listing


class TestImagesWithATable(FileSourceConformance):
    KIND = "imagefolder"

    def make(self, root: Path) -> Path:
        plant(root / "images", FLAT)
        text = "".join(f"{name},{'cd'[i % 2]},{i}\n" for i, name in enumerate(NAMES))
        write(root / "labels.csv", "id,label,n\n" + text)
        return root / "images"

    def pack(self, path: Path, out: Path, **options: Any) -> Any:
        return super().pack(path, out, tables=[str(path.parent / "labels.csv")], **options)

    def listing(self, path: Path) -> Listing:
        joins = Joins((str(path.parent / "labels.csv"),))
        return listing(path, joins=joins)

    def file(self, path: Path) -> Path:
        return path / "000.jpg"


# --- how rows name images, and how tables are written ---------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("l.txt", lines("{0}.jpg {1}\n")),
        ("l.txt", lines("{0}.jpg    {1}  \n")),
        ("l.lst", lines("{0}.jpg\t{1}\n")),
        ("l", lines("{0}.jpg,{1}\n")),
        ("l.txt", "# a comment\n#another\n" + lines("{0} {1}\n")),
        ("l.txt", "image label\n" + lines("{0}.jpg {1}\n")),
        ("l.txt", "12\nlabel\n" + lines("{0}.jpg {1}\n")),
        ("l.tsv:id,label", lines("{0}\t{1}\n")),
        ("l.csv:label,id", lines("{1},{0}\n")),
        ("l.txt:id,label", lines("{0} {1}\n")),
        ("l.txt:#,label", "".join(f"{v}\n" for v in NUMBERS.values())),
    ],
    ids=["blanks", "many blanks", "tabs", "commas", "comments", "words over numbers",
         "count and names", "tsv named", "csv named", "blanks named", "by order"],
)  # fmt: skip
def test_plain_tables(tmp_path: Path, name: str, text: str) -> None:
    plant(tmp_path / "in", FLAT)
    file, colon, columns = name.partition(":")
    table = write(tmp_path / file, text) + colon + columns
    assert (
        column(pack_records(tmp_path / "in", tmp_path / "out", tables=table)[""], "label")
        == NUMBERS
    )


def test_tables_are_joined_by_columns_of_one_name(tmp_path: Path) -> None:
    """The way of CUB-200: rows of other tables are about numbers of images and of classes."""
    plant(tmp_path / "in", CLASSES)
    tables = [
        write(tmp_path / "classes.txt", "1 Black bird\n2 Laysan albatross, the white\n")
        + ":n,label",
        write(tmp_path / "numbers.txt", "".join(f"{i + 1} {i % 2 + 1}\n" for i in range(12)))
        + ":id,n",
        write(tmp_path / "images.txt", "".join(f"{i + 1} {k}\n" for i, k in enumerate(CLASSES)))
        + ":id,path",
    ]
    found = pack_records(tmp_path / "in", tmp_path / "out", tables=tables)[""]
    assert column(found, "n") == {name: i % 2 + 1 for i, name in enumerate(NAMES)}
    assert column(found, "label") == {name: i % 2 for i, name in enumerate(NAMES)}
    dataset = package.open(tmp_path / "out")
    assert list(dataset.classes) == ["Black bird", "Laysan albatross, the white"]


def test_numbers_of_lines_are_a_column(tmp_path: Path) -> None:
    plant(tmp_path / "in", FLAT)
    tables = [
        write(tmp_path / "labels.txt", lines("{0} {1}\n")) + ":id,n",
        write(tmp_path / "names.txt", "ant\nbee\ncat\ndog\neel\n") + ":n#0,label",
    ]
    pack_records(tmp_path / "in", tmp_path / "out", tables=tables)
    dataset = package.ShardDataset(tmp_path / "out", shuffle=False, decode=None)
    names = ["ant", "bee", "cat", "dog", "eel"]
    for one in dataset:
        assert dataset.classes[one["label"]] == names[NUMBERS[one["__key__"][:3]]]


def test_one_hot_columns_are_a_label(tmp_path: Path) -> None:
    plant(tmp_path / "in", FLAT)
    rows = [[name, *(float(i == NUMBERS[name]) for i in range(5))] for name in NAMES]
    text = "image,age,MEL,NV,BCC,AKIEC,BKL\n"
    text += "".join(",".join(map(str, [row[0], 7, *row[1:]])) + "\n" for row in rows)
    table = write(tmp_path / "labels.csv", text)
    found = pack_records(
        tmp_path / "in", tmp_path / "out", tables=table, fields={"label": "MEL..BKL"}
    )[""]
    assert column(found, "label") == NUMBERS
    assert set(found["000.jpg"]) == {"__key__", "image", "label", "age"}
    assert list(package.open(tmp_path / "out").classes) == ["MEL", "NV", "BCC", "AKIEC", "BKL"]
    write(tmp_path / "labels.csv", text.replace("000,7,1.0", "000,7,0.0"))
    with pytest.raises(SourceError, match=r"000.jpg: has no single 1 in the columns MEL\.\.BKL"):
        pack_records(tmp_path / "in", tmp_path / "two", tables=table, fields={"label": "MEL..BKL"})


def test_first_label_is_subtracted(tmp_path: Path) -> None:
    plant(tmp_path / "in", FLAT)
    table = write(tmp_path / "l.txt", "".join(f"{n} {v + 1}\n" for n, v in NUMBERS.items()))
    found = pack_records(tmp_path / "in", tmp_path / "out", tables=table, first_label=1)[""]
    assert column(found, "label") == NUMBERS
    with pytest.raises(OptionError, match=r"expected integers from 2 on .* found 1"):
        pack_records(tmp_path / "in", tmp_path / "two", tables=table, first_label=2)


def test_a_pattern_finds_the_class_in_a_column(tmp_path: Path) -> None:
    """The way of Kaggle's ImageNet: class and boxes are in one cell."""
    plant(tmp_path / "in", FLAT)
    rows = lines("{0},n{1} 1 2 3 4 n{1} 5 6 7 8\n")
    table = write(tmp_path / "l.csv", "ImageId,PredictionString\n" + rows)
    options = {"tables": table, "fields": {"label": "PredictionString"}, "label": r"^(\S+)"}
    assert (
        column(pack_records(tmp_path / "in", tmp_path / "out", **options)[""], "label") == NUMBERS
    )
    with pytest.raises(SourceError, match=r"--label .* finds no class in its 'PredictionString'"):
        pack_records(tmp_path / "in", tmp_path / "two", **options | {"label": "(x)"})


def test_class_folders_stay_the_label_without_another_one(tmp_path: Path) -> None:
    found = pack_table(
        tmp_path,
        "".join(f"{n} {i} {i} 3 4\n" for i, n in enumerate(NAMES)),
        CLASSES,
        name="boxes.txt",
        columns=":id,x,y,w,h",
    )[""]
    assert column(found, "label") == {name: i % 2 for i, name in enumerate(NAMES)}
    assert column(found, "y") == {name: i for i, name in enumerate(NAMES)}


def test_images_are_selected_by_columns(tmp_path: Path) -> None:
    found = pack_table(
        tmp_path, "id,n\n" + lines("{0},{1}\n"), CLASSES, where={"n": [1, 2], "label": "b"}
    )[""]
    assert list(column(found, "n").items()) == [("001", 1), ("007", 2), ("011", 1)]


# --- what is wrong --------------------------------------------------------------------------------


def test_an_image_without_a_row_is_a_problem(tmp_path: Path) -> None:
    plant(tmp_path / "in", FLAT)
    table = write(tmp_path / "l.txt", "".join(f"{n} {v}\n" for n, v in [*NUMBERS.items()][1:]))
    with pytest.raises(SourceError, match=r"1 file.*\n  000.jpg: .*l\.txt has no row for it"):
        pack_records(tmp_path / "in", tmp_path / "out", tables=table)
    found = pack_records(tmp_path / "in", tmp_path / "out", tables=table, on_error="skip")[""]
    assert column(found, "label") == {n: v for n, v in NUMBERS.items() if n != "000"}


def test_rows_of_no_image_are_noted(tmp_path: Path) -> None:
    plant(tmp_path / "in", FLAT)
    write(tmp_path / "l.txt", lines("{0} {1}\n") + "999 1\n")
    result = shardio("pack", tmp_path / "in", tmp_path / "out", "--table", tmp_path / "l.txt")
    assert "1 row of no image, as 999" in result.stdout


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("l.txt", "000 1\n000 2\n001 3\n", "rows 1 and 2 both name 000.jpg; expected one row"),
        ("l.csv", "000.jpg,1\n001.jpg,2\n", "its first line names an image"),
        ("l.csv", "a,b\nx,1\ny,2\n", "no column of it names images, such as 000.jpg, and none"),
        ("l.txt:#,label", "1\n2\n", "2 rows for 12 images"),
        ("l.txt", "000 1\n001 2 3\n", "line 2: 3 cells, expected 2"),
        ("l.txt", "", "there are no rows in it"),
        ("l.txt:a,a", "000 1\n", "expected a name of its own for each column"),
        ("none.txt", None, "none.txt"),
    ],
)
def test_tables_that_cannot_be_joined(
    tmp_path: Path, name: str, text: str | None, why: str
) -> None:
    plant(tmp_path / "in", FLAT)
    file, colon, columns = name.partition(":")
    if text is not None:
        write(tmp_path / file, text)
    with pytest.raises((SourceError, OptionError), match=why):
        pack_records(
            tmp_path / "in", tmp_path / "out", tables=str(tmp_path / file) + colon + columns
        )
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_table_in_the_order_of_images_must_be_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"has 12 rows, as many .* FILE:#,label"):
        pack_table(tmp_path, "".join(f"{v + 490}\n" for v in NUMBERS.values()), name="truth.txt")


def test_a_changed_value_is_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path / "in", FLAT)
    table = write(tmp_path / "l.txt", lines("{0} {1}\n"))

    def run(source: Path, out: Path) -> Any:
        return pack(source, out, **grouped({"jobs": 1, "max_records": 3, "tables": [table]}))

    interrupted(monkeypatch, run, tmp_path / "in", tmp_path / "out")
    write(Path(table), "".join(f"{n} {v + (n == '007')}\n" for n, v in NUMBERS.items()))
    with pytest.raises(SourceChangedError, match="option values: was"):
        run(tmp_path / "in", tmp_path / "out")


# --- a wrong label is never taken without a word -------------------------------------------------


def test_numbered_rows_have_no_gaps(tmp_path: Path) -> None:
    plant(tmp_path / "in", FLAT)
    labels = write(tmp_path / "l.txt", lines("{0} {1}\n"))
    names = write(tmp_path / "names.txt", "ant\nbee\n\ncat\ndog\neel\n\n")
    tables = [f"{labels}:id,n", f"{names}:n#0,label"]
    with pytest.raises(SourceError, match=r"names.txt: line 3: is empty, and rows .* numbered"):
        pack_records(tmp_path / "in", tmp_path / "out", tables=tables)
    write(tmp_path / "names.txt", "ant\nbee\ncat\ndog\neel\n\n\n")
    pack_records(tmp_path / "in", tmp_path / "out", tables=tables)


@pytest.mark.parametrize(
    ("tree", "text", "label"),
    [
        (CLASSES, lines("{0} {1}\n"), "the class folder"),
        (FLAT, "file,x,y\n" + lines("{0}.jpg,7,{1}\n"), "none"),
    ],
    ids=["class folders", "points"],
)
def test_columns_that_are_no_labels(
    tmp_path: Path, tree: dict[str, bytes], text: str, label: str
) -> None:
    plant(tmp_path / "in", tree)
    table = write(tmp_path / "l.txt", text)
    [done] = pack(tmp_path / "in", tmp_path / "out", **grouped({"jobs": 1, "tables": [table]}))
    assert f"label: {label}; --fields label=COLUMN makes a column the label" in done.notes
    for one in package.ShardDataset(tmp_path / "out", shuffle=False, decode=None):
        assert one.get("label") == ("ab".index(one["__key__"][0]) if tree is CLASSES else None)


def test_a_listing_keeps_its_label(tmp_path: Path) -> None:
    plant(tmp_path, FLAT)
    rows = lines("{0}.jpg,{1}\n")
    listing = write(tmp_path / "l.csv", "path,label\n" + rows)
    table = write(tmp_path / "t.csv", "id,label\n" + "".join(f"{n},77\n" for n in NAMES))
    options = {"jobs": 1, "tables": [table]}
    [done] = pack(listing, tmp_path / "out", **grouped(options))
    assert "columns that can be no fields were left out: label" in done.notes
    dataset = package.ShardDataset(tmp_path / "out", shuffle=False, decode=None)
    assert {one["__key__"][:3]: one["label"] for one in dataset} == NUMBERS
    found = pack_records(listing, tmp_path / "two", tables=table, fields={"label": "label"})[""]
    assert {one["label"] for one in found.values()} == {77}


@pytest.mark.parametrize(
    "options",
    [{"tables": 5}, {"tables": None}, {"tables": b"x"}, {"split_by": 5}, {"split_files": {1: "x"}}],
)
def test_options_of_other_types(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(options))} is .*: expected"):
        package.SourceOptions(**options)


def test_points_of_a_listing_are_no_labels(tmp_path: Path) -> None:
    plant(tmp_path, FLAT)
    rows = lines("{0}.jpg,7,{1}\n")
    found = pack_records(write(tmp_path / "l.csv", "path,x,y\n" + rows), tmp_path / "out")[""]
    assert column(found, "y") == NUMBERS and "label" not in found["000.jpg"]


def test_a_pattern_for_paths_wins_over_a_column(tmp_path: Path) -> None:
    plant(tmp_path / "in", FLAT)
    table = write(tmp_path / "l.csv", "id,label\n" + "".join(f"{n},7\n" for n in NAMES))
    options = {"jobs": 1, "tables": [table], "label": r"(\d)\.jpg"}
    [done] = pack(tmp_path / "in", tmp_path / "out", **grouped(options))
    assert "columns that can be no fields were left out: label" in done.notes
    dataset = package.ShardDataset(tmp_path / "out", shuffle=False, decode=None)
    assert list(dataset.classes or ()) == [*"0123456789"]
    assert {one["__key__"][2]: one["label"] for one in dataset} == {f"{i}": i for i in range(10)}


@pytest.mark.parametrize(
    ("label", "options"),
    [("cat", {}), ("", {}), ("1.5", {}), ("3", {"tables": ()}), ("3", {"fields": {"n": "label"}})],
)
def test_first_label_is_not_ignored(tmp_path: Path, label: str, options: dict[str, Any]) -> None:
    plant(tmp_path / "in", FLAT)
    table = write(tmp_path / "l.csv", "id,label\n" + "".join(f"{n},{label}\n" for n in NAMES))
    with pytest.raises(OptionError, match="--first-label: "):
        pack_records(
            tmp_path / "in", tmp_path / "out", **{"tables": table, "first_label": 1} | options
        )


def test_first_label_where_some_images_have_none(tmp_path: Path) -> None:
    rows = "".join(f"{n},{v or ''}\n" for n, v in NUMBERS.items())
    found = pack_table(tmp_path, "id,label\n" + rows, first_label=1)[""]
    assert column(found, "label") == {n: v - 1 if v else None for n, v in NUMBERS.items()}


def test_one_folder_of_images_is_no_label_beside_a_table(tmp_path: Path) -> None:
    found = pack_table(
        tmp_path,
        "id,age,target\n" + "".join(f"{n},5{v},{v}\n" for n, v in NUMBERS.items()),
        {f"photos/{key}": one for key, one in FLAT.items()},
    )[""]
    assert column(found, "label") == NUMBERS


def test_the_column_of_splits_is_not_the_label(tmp_path: Path) -> None:
    plant(tmp_path / "in", FLAT)
    table = write(tmp_path / "l.txt", "".join(f"{n} {v % 2}\n" for n, v in NUMBERS.items()))
    options = {"tables": table, "split_by": "column2:train=0,val=1"}
    found = pack_records(tmp_path / "in", tmp_path / "out", **options)
    assert {name: {*column(one, "column2").values()} for name, one in found.items()} == {
        "train": {0},
        "val": {1},
    }
    assert "label" not in found["train"]["000.jpg"]


def test_a_column_that_a_record_has_itself_is_left_out(tmp_path: Path) -> None:
    plant(tmp_path / "in", FLAT)
    rows = lines("{0},k{0},{1}\n")
    table = write(tmp_path / "l.csv", "id,__key__,label\n" + rows)
    result = shardio("pack", tmp_path / "in", tmp_path / "out", "--table", table)
    assert "columns that can be no fields were left out: __key__" in result.stdout


# --- archives -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["a.tar", "b.zip", "c.tgz"])
def test_a_listing_in_an_archive_lies_beside_its_images(tmp_path: Path, form: str) -> None:
    rows = "path,label\n" + lines("images/{0}.jpg,{1}\n")
    tree = {f"images/{key}": one for key, one in FLAT.items()} | {"list.csv": rows.encode()}
    pack(plant(tmp_path / "tree", tree) / "list.csv", tmp_path / "right", jobs=1)
    (tmp_path / "a.tar").write_bytes(tar(tree))
    (tmp_path / "b.zip").write_bytes(zipped(tree, way=zipfile.ZIP_DEFLATED))
    (tmp_path / "c.tgz").write_bytes(gzip.compress(tar(tree)))
    pack(tmp_path / form / "list.csv", tmp_path / "out", jobs=2)
    assert content(tmp_path / "out") == content(tmp_path / "right")
    with pytest.raises(SourceError, match=r"there is no folder lost\.csv/ in .*; at its top"):
        pack(tmp_path / form / "lost.csv", tmp_path / "two")


def test_coco_in_zips_finds_its_images(tmp_path: Path) -> None:
    """The way of COCO 2017: one zip of annotations, and one of the images of each split."""
    described = {
        "images": [{"id": i, "file_name": key} for i, key in enumerate(FLAT)],
        "annotations": [{"id": 7, "image_id": 3, "category_id": 1, "bbox": [1, 2, 3, 4]}],
        "categories": [{"id": 1, "name": "cat"}],
    }
    name = "annotations/instances_train2017.json"
    labels, photos = {name: json.dumps(described).encode()}, "train2017/"
    plant(tmp_path / "tree", labels | {photos + key: one for key, one in FLAT.items()})
    pack(tmp_path / "tree" / name, tmp_path / "right", jobs=1)
    plant(tmp_path / "zips", {
        "annotations_trainval2017.zip": zipped(labels, way=zipfile.ZIP_DEFLATED),
        "train2017.zip": zipped({photos + key: one for key, one in FLAT.items()}),
    })  # fmt: skip
    zips = tmp_path / "zips"
    [done] = pack(zips / "annotations_trainval2017.zip" / name, tmp_path / "out", jobs=2)
    assert content(tmp_path / "out") == content(tmp_path / "right")
    assert (
        f"images are those in {zips}/train2017.zip/train2017; --root says otherwise" in done.notes
    )
    refused = shardio("pack", zips, tmp_path / "two", code=2).stderr
    assert f"  {zips}/annotations_trainval2017.zip/{name}" in refused
    both = zipped(labels | {photos + key: one for key, one in FLAT.items()})
    (tmp_path / "all.zip").write_bytes(both)
    pack(tmp_path / "all.zip" / name, tmp_path / "one", jobs=1)
    assert content(tmp_path / "one") == content(tmp_path / "right")


# --- splits ---------------------------------------------------------------------------------------


def test_lists_of_files_are_splits(tmp_path: Path) -> None:
    """The way of Food-101: paths without endings, and labels from folders."""
    plant(tmp_path / "in", CLASSES)
    keys = sorted(CLASSES)
    lists = {
        "train": write(tmp_path / "train.txt", "".join(f"{key[:-4]}\n" for key in keys[:7])),
        "test": write(tmp_path / "test.txt", "".join(f"{key[:-4]}\n" for key in keys[7:10])),
    }
    found = pack_records(tmp_path / "in", tmp_path / "out", split_files=lists)
    assert {name: sorted(one) for name, one in found.items()} == {
        "train": keys[:7],
        "test": keys[7:10],
    }
    for records in found.values():
        for key, one in records.items():
            assert one["label"] == "ab".index(key[0]) and one["image"] == CLASSES[key]
    assert list(package.open(tmp_path / "out/test").classes) == ["a", "b"]
    notes = [
        note
        for one in pack(
            tmp_path / "in", tmp_path / "two", **grouped({"split_files": lists, "dry_run": True})
        )
        for note in one.notes
    ]
    assert "2 images in none of the lists of --split-files, and left out" in notes


def test_a_list_that_names_what_is_not_there(tmp_path: Path) -> None:
    plant(tmp_path / "in", FLAT)
    lists = {"train": write(tmp_path / "t.txt", "".join(f"{n}\n" for n in NAMES) + "missing\n")}
    with pytest.raises(SourceError, match=r"  missing: is in .*t.txt, and there is no such image"):
        pack_records(tmp_path / "in", tmp_path / "out", split_files=lists)
    found = pack_records(tmp_path / "in", tmp_path / "out", split_files=lists, on_error="skip")
    assert sorted(found["train"]) == sorted(FLAT)


def test_a_problem_counts_only_where_it_is_listed(tmp_path: Path) -> None:
    plant(tmp_path / "in", FLAT | {"empty.jpg": b"", "odd.jpg": b""})
    lists = {"train": write(tmp_path / "t.txt", "".join(f"{n}\n" for n in NAMES))}
    assert sorted(pack_records(tmp_path / "in", tmp_path / "out", split_files=lists)["train"]) == [
        *FLAT
    ]
    write(tmp_path / "t.txt", "".join(f"{n}\n" for n in NAMES) + "empty\n")
    with pytest.raises(SourceError, match=r"1 file.*\n  empty.jpg: is empty"):
        pack_records(tmp_path / "in", tmp_path / "two", split_files=lists)


def test_a_column_is_splits(tmp_path: Path) -> None:
    plant(tmp_path / "in", CLASSES)
    table = write(tmp_path / "l.txt", "".join(f"{n} {i % 3}\n" for i, n in enumerate(NAMES)))
    found = pack_records(
        tmp_path / "in", tmp_path / "out", tables=f"{table}:id,part",
        split_by="part:train=0,val=1",
    )  # fmt: skip
    assert [*column(found["train"], "part")] == NAMES[::3]
    assert [*column(found["val"], "part")] == NAMES[1::3]
    found = pack_records(
        tmp_path / "in", tmp_path / "two", tables=f"{table}:id,part", split_by="part"
    )
    assert sorted(found) == ["0", "1", "2"] and len(found["2"]) == 4


def test_a_column_called_label_may_be_the_splits(tmp_path: Path) -> None:
    rows = "".join(f"{n},{'xy'[i % 2]}\n" for i, n in enumerate(NAMES))
    found = pack_table(tmp_path, "id,label\n" + rows, CLASSES, split_by="label")
    assert {name: len(one) for name, one in found.items()} == {"x": 6, "y": 6}
    assert column(found["y"], "label") == dict.fromkeys(NAMES[1::2], 1)  # of the folders


def test_a_column_of_a_listing_is_splits(tmp_path: Path) -> None:
    plant(tmp_path, FLAT)
    rows = "".join(f"{n}.jpg,{'val' if i % 4 == 0 else 'train'}\n" for i, n in enumerate(NAMES))
    table = write(tmp_path / "list.csv", "path,split\n" + rows)
    found = pack_records(table, tmp_path / "out", split_by="split")
    assert sorted(found["val"]) == ["000.jpg", "004.jpg", "008.jpg"]
    assert len(found["train"]) == 9


@pytest.mark.parametrize("text", ["filename\n{}.jpg\n", "label,image\ncat,{}\n"])
def test_a_list_has_names_of_columns(tmp_path: Path, text: str) -> None:
    plant(tmp_path / "in", FLAT)
    head, row = text.splitlines(keepends=True)
    lists = {"train": write(tmp_path / "t.csv", head + "".join(map(row.format, NAMES)))}
    found = pack_records(tmp_path / "in", tmp_path / "out", split_files=lists)
    assert sorted(found["train"]) == sorted(FLAT)


@pytest.mark.parametrize("said", ["true", "True"])
def test_a_column_of_true_and_false_is_splits(tmp_path: Path, said: str) -> None:
    plant(tmp_path / "in", FLAT)
    rows = "".join(f"{n},{'true' if v else 'FALSE'}\n" for n, v in NUMBERS.items())
    table = write(tmp_path / "l.csv", "id,is_train\n" + rows)
    options = {"tables": table, "split_by": f"is_train:train={said},val=false"}
    found = pack_records(tmp_path / "in", tmp_path / "out", **options)
    assert len(found["train"]) == 9 and len(found["val"]) == 3


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "."])
def test_splits_stay_inside_the_output(tmp_path: Path, name: str) -> None:
    plant(tmp_path / "in", FLAT)
    (tmp_path / "out").mkdir()
    lists = write(tmp_path / "t.csv", "path,split\n" + "".join(f"{n},{name}\n" for n in NAMES))
    for options in (
        {"split_files": {name: lists}},
        {"split_by": "split", "tables": lists},
        {"split_by": f"split:{name}={name}", "tables": lists},
    ):
        with pytest.raises(OptionError, match="a split is a folder of OUT, and cannot be called"):
            pack_records(tmp_path / "in", tmp_path / "out", **options)
    assert sorted(os.listdir(tmp_path)) == ["in", "out", "t.csv"]
    assert not os.listdir(tmp_path / "out")


def test_splits_are_asked_for_once(tmp_path: Path) -> None:
    plant(tmp_path / "in", {"train/a/1.jpg": b"x", "val/a/2.jpg": b"y"})
    table = write(tmp_path / "l.txt", "1 0\n2 1\n")
    with pytest.raises(OptionError, match=r"--split-by: .*in has splits already, .*train, val"):
        pack_records(tmp_path / "in", tmp_path / "out", tables=f"{table}:id,part", split_by="part")
    with pytest.raises(OptionError, match="both say what the splits are"):
        package.SourceOptions(split_by="part", split_files={"train": "x"})
    with pytest.raises(OptionError, match="no column of a table is called so"):
        pack_records(tmp_path / "in", tmp_path / "out", tables=f"{table}:id,part", split_by="other")


@pytest.mark.parametrize("jobs", [1, 2])
def test_splits_and_tables_by_parts_and_by_a_plan(tmp_path: Path, jobs: int) -> None:
    plant(tmp_path / "in", CLASSES)
    table = write(tmp_path / "l.txt", "".join(f"{n} {i % 3}\n" for i, n in enumerate(NAMES)))
    options = {
        "tables": [f"{table}:id,part"],
        "split_by": "part:train=0,val=1,test=2",
        "max_records": 2,
    }
    pack(tmp_path / "in", tmp_path / "whole", **grouped(options | {"jobs": jobs}))
    plan(tmp_path / "in", tmp_path / "planned", **grouped(options))
    for part in ("1/2", "2/2"):
        pack(tmp_path / "in", tmp_path / "parts", **grouped(options | {"part": part, "jobs": 1}))
        pack(tmp_path / "in", tmp_path / "planned", **grouped({"part": part, "jobs": jobs}))
    for out in ("parts", "planned"):
        commit(tmp_path / out)
        for kept in (tmp_path / out).glob("*/.shardio-planned"):
            kept.unlink()
        assert content(tmp_path / out) == content(tmp_path / "whole")


def test_lists_split_images_with_masks(tmp_path: Path) -> None:
    """The way of Pascal VOC: masks for some images only, and lists that know which."""
    plant(tmp_path / "in", {f"JPEGImages/{key}": one for key, one in FLAT.items()})
    plant(tmp_path / "in", {f"SegmentationClass/{n}.png": noise(n, 50) for n in NAMES[:6]})
    lists = {
        "train": write(tmp_path / "train.txt", "".join(f"{n}\n" for n in NAMES[:4])),
        "val": write(tmp_path / "val.txt", "".join(f"{n}\n" for n in NAMES[4:6])),
    }
    fields = {"image": "JPEGImages/", "mask": "SegmentationClass/"}
    found = pack_records(tmp_path / "in", tmp_path / "out", split_files=lists, fields=fields)
    assert sorted(found["train"]) == sorted(FLAT)[:4] and sorted(found["val"]) == sorted(FLAT)[4:6]
    assert found["val"]["005.jpg"]["mask"] == noise("005", 50)


def test_images_with_masks_and_a_table_are_unpacked(tmp_path: Path) -> None:
    """The label is no file, although --fields names it."""
    tree: dict[str | bytes, bytes | None] = {f"images/{key}": one for key, one in FLAT.items()}
    tree |= {f"masks/{n}.png": picture(8, 8, "PNG") for n in NAMES}
    plant(tmp_path / "in", tree)
    rows = lines("{0},k{1}\n")
    table = write(tmp_path / "l.csv", "id,kind\n" + rows)
    fields = {"image": "images/", "mask": "masks/", "label": "kind"}
    found = pack_records(tmp_path / "in", tmp_path / "out", tables=table, fields=fields)[""]
    assert column(found, "label") == NUMBERS
    unpack(tmp_path / "out", tmp_path / "back")
    assert content(tmp_path / "back") == content(tmp_path / "in")


def test_the_command_line(tmp_path: Path) -> None:
    plant(tmp_path / "in", CLASSES)
    table = write(tmp_path / "l.csv", "id,kind\n" + lines("{0},k{1}\n"))
    train = write(tmp_path / "t.txt", "".join(f"{n}\n" for n in NAMES[:8]))
    val = write(tmp_path / "v.txt", "".join(f"{n}\n" for n in NAMES[8:]))
    result = shardio(
        "pack", tmp_path / "in", tmp_path / "out", "--table", table, "--fields", "label=kind",
        "--split-files", f"train={train},val={val}",
    )  # fmt: skip
    assert "out/train: 8 files, 5 classes" in result.stdout
    result = shardio("ls", tmp_path / "out/val", "--class", "k3")
    assert result.stdout.split()[-2:] == ["a/008.jpg", "k3"]
