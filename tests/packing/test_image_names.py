"""Rows name images in many ways, and no image is taken for another."""

from pathlib import Path
from typing import Any

import pytest
from support.labels import FLAT, NAMES, NUMBERS, column, lines, pack_records, pack_table, write
from support.packing import grouped
from support.trees import noise, plant, shardio

from shardio import pack
from shardio.errors import OptionError, SourceError


@pytest.mark.parametrize(
    "text",
    [
        "path,label\n" + lines("{0}.jpg,{1}\n"),
        "id,label\n" + lines("{0},{1}\n"),
        "label;id\n".replace(";", ",") + lines("{1},./{0}.jpg\n"),
        "path,label\n" + lines("train/of/mine/{0}.jpg,{1}\n"),
        "path,label\n" + lines("/{0}.png,{1}\n"),
        "path,label\r\n" + "".join(f'"{n}",{v}\r\n' for n, v in reversed(NUMBERS.items())),
    ],
    ids=["name", "stem", "dotted", "longer path", "another ending", "quoted"],
)
def test_rows_name_images_in_many_ways(tmp_path: Path, text: str) -> None:
    found = pack_table(tmp_path, text, name="labels.csv")[""]
    assert column(found, "label") == NUMBERS
    assert {key: one["image"] for key, one in found.items()} == FLAT


def test_images_of_one_name_are_not_taken_for_each_other(tmp_path: Path) -> None:
    plant(tmp_path / "in", {"a/1.jpg": noise("x", 9), "b/1.jpg": noise("y", 9)})
    by_name = write(tmp_path / "l.txt", "1.jpg 5\n")
    with pytest.raises(SourceError, match=r"several images are called 1.jpg.* a/1.jpg and b/1.jpg"):
        pack_records(tmp_path / "in", tmp_path / "out", tables=f"{by_name}:p,n")
    by_path = write(tmp_path / "l.txt", "/b/1.jpg 6\n/a/1.jpg 5\n")
    found = pack_records(tmp_path / "in", tmp_path / "out", tables=f"{by_path}:p,n")[""]
    assert {key: one["n"] for key, one in found.items()} == {"a/1.jpg": 5, "b/1.jpg": 6}


def test_a_file_that_is_no_image_does_not_take_the_name_of_one(tmp_path: Path) -> None:
    """As of Oxford's pets: files of MATLAB lie among the images."""
    others = {"000.a": b"MATLAB 5.0", "001.mat": b"MATLAB 5.0"}  # before it, and behind it
    source = plant(tmp_path / "images", FLAT | others)
    table = write(tmp_path / "t.csv", "id,n\n" + "".join(f"{n},{i}\n" for n, i in NUMBERS.items()))
    found = pack_records(source, tmp_path / "out", tables=[table], on_error="skip")
    assert column(found[""], "n") == NUMBERS


def test_rows_of_other_folders_are_of_other_images(tmp_path: Path) -> None:
    """Where both have folders, these must be the same; else one is told what was not compared."""
    plant(tmp_path / "in", {f"train/{n}.jpg": noise(n, 50) for n in NAMES})
    rows = "path,n\n" + lines("val/{0}.jpg,{1}\n")
    table = write(tmp_path / "l.csv", rows)
    with pytest.raises(SourceError, match=r"no column of it names images, such as train/000.jpg"):
        pack_records(tmp_path / "in", tmp_path / "out", tables=table, splits=False)
    with pytest.raises(SourceError, match="names no images"):
        pack_records(tmp_path / "in", tmp_path / "out", split_files={"x": table}, splits=False)
    options = {"tables": [Path(table)], "fields": {"image": "path"}, "splits": False}
    found = pack_records(tmp_path / "in", tmp_path / "out", **options)[""]
    assert column(found, "n") == NUMBERS
    [done] = pack(tmp_path / "in/train", tmp_path / "flat", **grouped({"tables": [table]}))
    assert "the folders before, as in val/000.jpg, are not compared" in "".join(done.notes)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("index,filename,label\n{rows}", {}),
        ("index,image_id,label\n{stems}", {}),
        ("index,whose,label\n{stems}", {"fields": {"image": "whose"}}),
    ],
    ids=["with its ending", "a known name", "said"],
)
def test_numbers_of_rows_are_not_names_of_images(
    tmp_path: Path, text: str, options: dict[str, Any]
) -> None:
    """A table that pandas wrote with its index, of images whose names are numbers."""
    images = {f"{i}.jpg": noise(f"{i}", 200) for i in range(10)}
    order = [3, 1, 4, 5, 9, 2, 6, 8, 7, 0]
    rows = "".join(f"{i},{one}.jpg,{one * 10}\n" for i, one in enumerate(order))
    found = pack_table(
        tmp_path, text.format(rows=rows, stems=rows.replace(".jpg", "")), images, **options
    )[""]
    assert {key: one["label"] for key, one in found.items()} == {
        f"{i}.jpg": i * 10 for i in range(10)
    }


def test_columns_that_both_name_images_are_asked_about(tmp_path: Path) -> None:
    plant(tmp_path / "in", {f"{i}.jpg": noise(f"{i}", 200) for i in range(10)})
    text = "".join(f"{i} {9 - i}\n" for i in range(10))
    table, lists = write(tmp_path / "l.txt", text), write(tmp_path / "half.txt", text[:20])
    why = r"each of the columns column1, column2 are names of images.*--fields image=COLUMN"
    with pytest.raises(SourceError, match=why):
        pack_records(tmp_path / "in", tmp_path / "out", tables=table)
    with pytest.raises(SourceError, match=why):
        pack_records(tmp_path / "in", tmp_path / "out", split_files={"train": lists})
    fields = {"image": "column2"}
    found = pack_records(tmp_path / "in", tmp_path / "out", tables=table, fields=fields)[""]
    assert {key: one["label"] for key, one in found.items()} == {
        f"{i}.jpg": 9 - i for i in range(10)
    }
    write(tmp_path / "l.txt", "".join(f"{i} 77\n" for i in range(10)))
    with pytest.raises(OptionError, match=r"no column called so names images; .* column1"):
        pack_records(tmp_path / "in", tmp_path / "two", tables=table, fields={"image": "other"})


def test_numbers_of_classes_are_not_names_of_images(tmp_path: Path) -> None:
    """The table of classes has a column of another table, and numbers that images have, too."""
    plant(tmp_path / "in", {f"{i}.jpg": noise(f"{i}", 200) for i in range(10)})
    tables = [
        write(tmp_path / "l.csv", "id,n\n" + "".join(f"{i},{(i + 1) % 2}\n" for i in range(10))),
        write(tmp_path / "names.txt", "ant\nbee\n") + ":n#0,label",
    ]
    found = pack_records(tmp_path / "in", tmp_path / "out", tables=tables)[""]
    assert [one["label"] for _, one in sorted(found.items())] == [1, 0] * 5


def test_names_of_images_with_dots(tmp_path: Path) -> None:
    found = pack_table(
        tmp_path,
        lines("cat.{0} {1}\n"),
        {f"cat.{key}": one for key, one in FLAT.items()},
        name="l.txt",
    )[""]
    assert {key[4:7]: one["label"] for key, one in found.items()} == NUMBERS


def test_rows_of_other_images_may_come_first(tmp_path: Path) -> None:
    others = "".join(f"other{i},9\n" for i in range(1500))
    rows = lines("{0},{1}\n")
    assert column(pack_table(tmp_path, "id,label\n" + others + rows)[""], "label") == NUMBERS


def test_how_rows_were_matched_and_what_the_label_is_are_said(tmp_path: Path) -> None:
    plant(tmp_path / "in", FLAT)
    rows = "".join(f"{v or ''},{n}\n" for n, v in NUMBERS.items())
    table = write(tmp_path / "l.csv", "label,id\n" + rows)
    result = shardio("pack", tmp_path / "in", tmp_path / "out", "--table", table)
    assert "column 'id' names 12 of 12 images, by file name, without its ending" in result.stdout
    assert "label: column 'label', kind int, from 1 to 4; 3 images without one" in result.stdout
