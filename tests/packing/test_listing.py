"""Listings: what columns are taken for, which files are named, and packings that stay the same."""

import json
import os
import tracemalloc
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import sources
from support.conformance import FileSourceConformance, SourceConformance
from support.sources import listing
from support.tables import COUNT, as_csv, as_jsonl, as_parquet, rows, write
from support.trees import JPEG, content, noise, plant, shardio, shardio_json

from shardio import ShardDataset, collate, pack
from shardio.dataset import sequence
from shardio.errors import OptionError, SourceError
from shardio.packing.sources.listing import is_listing

pack_one = partial(sources.pack_one, max_records=4)


def samples(path: Path, **options: Any) -> list[dict[str, Any]]:
    return sources.samples(listing(path, **options))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of files, and a listing of them."""
    folder = tmp_path / "src"
    plant(folder, {row["path"]: noise(row["path"], 200 + i) for i, row in enumerate(rows())})
    return write(folder / "train.csv", as_csv(rows()))


# --- types ----------------------------------------------------------------------------------------


def test_every_field_of_every_type_arrives_and_none_stays_none(source: Path) -> None:
    found = listing(source)
    assert found.fields == (
        *(("image", "image"), ("label", "int"), ("split", "str"), ("width", "int")),
        *(("score", "float"), ("good", "bool"), ("zip", "str")),
    )
    assert found.classes == ("ant", "cat")
    assert found.options["fields"] == {"image": "path"}
    by_key = {os.fsdecode(one.pop("__key__")): one for one in samples(source)}
    assert list(by_key) == sorted(row["path"] for row in rows())
    for i, row in enumerate(rows()):
        label = None if row["label"] is None else ["ant", "cat"].index(row["label"])
        path = row.pop("path")
        assert by_key[path] == row | {"image": noise(path, 200 + i), "label": label}


# --- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tsv", "jsonl", "ndjson", "json", "parquet", "pq"])
def test_the_same_rows_in_another_format_are_the_same_records(source: Path, kind: str) -> None:
    other = source.with_name(f"OTHER.{kind.upper()}")
    if kind in ("parquet", "pq"):
        as_parquet(rows(), other, row_group_size=5)
    else:
        text = {
            "tsv": lambda table: as_csv(table, "\t"),
            "json": lambda table: "\ufeff " + json.dumps(table, indent=1),
        }.get(kind, as_jsonl)
        write(other, text(rows()))
    assert is_listing(os.fsencode(other))
    one, two = listing(source), listing(other)
    assert samples(other) == samples(source)
    assert (one.keys, one.fields, one.classes) == (two.keys, two.fields, two.classes)
    assert one.options == two.options  # so it is even the same dataset


def test_parquet_with_binary_data_is_no_listing(tmp_path: Path) -> None:
    for value in (JPEG, {"bytes": JPEG, "path": "a.jpg"}):
        path = as_parquet([{"image": value, "label": 1}], tmp_path / "x.parquet")
        assert not is_listing(os.fsencode(path))
    with pytest.raises(SourceError, match="shardio index"):
        listing(path, kind="listing")
    assert is_listing(os.fsencode(as_parquet([{"a": 1}], tmp_path / "x.parquet")))


def test_json_lines_may_be_called_json_when_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", as_jsonl([{"a": 1}, {"a": 2}]))
    assert not is_listing(os.fsencode(path))
    assert [one["a"] for one in samples(path, kind="listing")] == [1, 2]


def test_values_nested_deeper_than_a_record_takes_are_problems(tmp_path: Path) -> None:
    deep = '{"a": ' + "[" * 100 + "]" * 100 + "}\n"
    path = write(tmp_path / "x.jsonl", '{"a": 1}\n' + deep)
    with pytest.raises(SourceError, match=r"00000001: .*nested more than 32 deep"):
        pack_one(path, tmp_path / "out")


@pytest.mark.parametrize("last", ["gz", "zst", "bz2", "xz"])
def test_compressed_listings_are_refused_with_the_command(tmp_path: Path, last: str) -> None:
    path = write(tmp_path / f"x.csv.{last}", b"\x1f\x8b")
    with pytest.raises(SourceError, match=r"Unpack it first:\n  \w+ .*x\.csv\."):
        listing(path)


def test_other_files_are_no_listings(tmp_path: Path) -> None:
    for name in ("x.txt", "x.tar.gz", "x"):
        assert not is_listing(os.fsencode(write(tmp_path / name, "a\n")))
    with pytest.raises(SourceError, match=r"ends in \.csv, \.tsv"):
        listing(tmp_path / "x.txt", kind="listing")
    (tmp_path / "folder.csv").mkdir()
    os.mkfifo(tmp_path / "fifo.csv")
    for name in ("folder.csv", "fifo.csv", "nothing.csv"):
        with pytest.raises(SourceError):
            listing(tmp_path / name, kind="listing")
    assert not is_listing(os.fsencode(tmp_path / "fifo.csv"))


# --- which columns --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["path", "filename", "file_name", "image", "Image", "FilePath"])
def test_the_column_of_paths_is_found_by_its_name(tmp_path: Path, name: str) -> None:
    plant(tmp_path, {"a.jpg": JPEG})
    path = write(tmp_path / "x.csv", f"n,{name},class\n1,a.jpg,5\n")
    assert samples(path) == [{"__key__": b"a.jpg", "image": JPEG, "label": 5, "n": 1}]
    renamed = {"label": "class"} | ({} if name == "image" else {"image": name})
    assert listing(path).options["fields"] == renamed


def test_fields_are_renamed_and_a_name_decides_what_a_column_is(tmp_path: Path) -> None:
    plant(tmp_path, {"a.jpg": JPEG})
    path = write(tmp_path / "x.csv", "path,other,label,kind\nnowhere,a.jpg,1,x\n")
    found = samples(path, fields={"image": "other", "label": "kind", "code": "label"})
    assert found == [{"__key__": b"a.jpg", "image": JPEG, "label": 0, "path": "nowhere", "code": 1}]
    found = samples(path, fields={"path": "path"})  # then it names no files
    assert found[0] == {
        **{"__key__": b"00000000", "path": "nowhere", "other": "a.jpg"},
        **{"label": 1, "kind": "x"},
    }
    both = samples(path, fields={"image": "other", "other": "other"})[0]
    assert (both["image"], both["other"]) == (JPEG, "a.jpg")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label": "nope"}, "label=nope: no field is called 'nope'; there are path, n, image"),
        ({"image": "n"}, "expected a column of paths, and its values are of kind int"),
        ({}, "two fields would be called 'image'"),
        ({"n": "image"}, "two fields would be called 'n'"),
        ({"a\nb": "image"}, "no field can be called so"),
        ({"image": "path", "__key__": "n"}, "have their paths as keys"),
    ],
)
def test_fields_that_cannot_be_are_refused(
    tmp_path: Path, fields: Mapping[str, str], message: str
) -> None:
    path = write(tmp_path / "x.csv", "path,n,image\na.jpg,1,b.jpg\n")
    with pytest.raises(OptionError, match=message):
        listing(path, fields=fields)


def test_names_that_no_field_can_have_are_left_out_with_a_note(tmp_path: Path) -> None:
    line = json.dumps({"a": 1, "": 2, "x\ny": 3, "n" * 300: 4})
    found = listing(write(tmp_path / "x.jsonl", line))
    assert found.fields == (("a", "int"),)
    [note] = found.notes
    assert "left out: '', 'x\\ny', 'nnn" in note


def test_labels_of_text_are_classes_in_bytewise_order(tmp_path: Path) -> None:
    text = "id,label\n0,\u00e9\n1,zebra\n2,\n3,ant\n4,Zoo\n5,ant\n"
    path = write(tmp_path / "x.csv", text)
    assert listing(path).classes == ("Zoo", "ant", "zebra", "\u00e9")
    assert [one["label"] for one in samples(path)] == [3, 2, None, 1, 0, 1]
    numbers = write(tmp_path / "y.csv", "id,label\n0,4\n1,2\n")
    assert listing(numbers).classes is None
    assert listing(write(tmp_path / "z.csv", "id,label\n0,\n1,\n")).classes is None


def test_classes_of_another_dataset_number_the_labels(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "a")
    other = write(source.with_name("other.csv"), "path,label\ncat/001.jpg,cat\ncat/002.jpg,\n")
    pack_one(other, tmp_path / "b", classes=tmp_path / "a")
    opened = sequence.open(tmp_path / "b", decode=None)
    assert opened.classes == ["ant", "cat"]
    assert sorted(str(one["label"]) for one in opened) == ["1", "None"]
    write(other, "path,label\ncat/001.jpg,cow\n")
    with pytest.raises(OptionError, match="cow"):
        pack_one(other, tmp_path / "c", classes=tmp_path / "a")


@pytest.mark.parametrize(
    ("text", "keys", "fields", "values"),
    [
        ("__key__,a\nx,1\nw,2\n", [b"w", b"x"], ["a"], [2, 1]),
        ("key,a\n7,1\n10,2\n", [b"10", b"7"], ["a"], [2, 1]),
        ("id,a\nx,1\nw,2\n", [b"w", b"x"], ["id", "a"], [2, 1]),
        ("uid,id,a\nx,5,1\nw,5,2\n", [b"w", b"x"], ["uid", "id", "a"], [2, 1]),
        ("key,a\nx,1\nx,2\n", [b"00000000", b"00000001"], ["key", "a"], [1, 2]),
        ("__key__,a\nx,1\n,2\n", [b"00000000", b"00000001"], ["a"], [1, 2]),
        ("id,a\n1.5,1\n2,2\n", [b"00000000", b"00000001"], ["id", "a"], [1, 2]),
        ("a\n2\n1\n", [b"00000000", b"00000001"], ["a"], [2, 1]),
    ],
)
def test_keys_of_rows_are_unique_values_of_a_column_or_numbers(
    tmp_path: Path, text: str, keys: list[bytes], fields: list[str], values: list[int]
) -> None:
    path = write(tmp_path / "x.csv", text)
    found = listing(path)
    assert found.keys == keys == [one["__key__"] for one in samples(path)]
    assert [name for name, _ in found.fields] == fields
    assert [one["a"] for one in samples(path)] == values
    if keys[0] == b"00000000" and text[0] != "a":
        assert "keys are the numbers of rows" in found.notes[0]


def test_a_column_can_be_named_as_the_key(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "code,a\nx,1\nw,1\n")
    assert samples(path, fields={"__key__": "code"})[0] == {"__key__": b"w", "a": 1}
    with pytest.raises(SourceError, match="'a' cannot be the keys: rows 0 and 1 both have '1'"):
        listing(path, fields={"__key__": "a"})


# --- which files ----------------------------------------------------------------------------------


def test_paths_are_relative_to_the_listing_or_to_root_or_absolute(tmp_path: Path) -> None:
    plant(tmp_path / "data", {"a.jpg": noise("a", 50), "b c%.jpg": noise("b", 50)})
    folder = os.fsdecode(tmp_path / "data")
    named = ["data/a.jpg", f"{folder}/a.jpg", f"file://{folder}/b%20c%25.jpg", "x/../data//a.jpg"]
    (tmp_path / "x").mkdir()
    path = write(
        tmp_path / "x.csv", "path,n\n" + "".join(f"{p},{i}\n" for i, p in enumerate(named))
    )
    inner = os.fsencode(folder).lstrip(b"/")
    found = {one["__key__"]: one for one in samples(path)}
    assert found.keys() == {
        b"data/a.jpg", inner + b"/a.jpg", inner + b"/b c%.jpg", b"data/a.jpg#2"
    }  # fmt: skip
    assert found[inner + b"/b c%.jpg"]["image"] == noise("b", 50)
    assert found[inner + b"/a.jpg"]["image"] == noise("a", 50)
    (tmp_path / "lists").mkdir()
    other = write(tmp_path / "lists" / "x.csv", "path\na.jpg\n../data/a.jpg\n")
    found = {one["__key__"]: one for one in samples(other, root=folder)}
    assert found.keys() == {b"a.jpg", b"data/a.jpg"}


def test_a_file_that_is_named_again_is_another_record(tmp_path: Path) -> None:
    plant(tmp_path, {"a.jpg": noise("a", 50), "a.jpg#2": noise("x", 60), "a.jpg!": noise("!", 70)})
    text = "path,box\na.jpg,0\na.jpg#2,9\na.jpg,1\n./a.jpg,2\na.jpg!,3\n"
    path = write(tmp_path / "x.csv", text)
    found = {one["__key__"]: (one["box"], one["image"]) for one in samples(path)}
    first = noise("a", 50)
    assert list(found) == [b"a.jpg", b"a.jpg!", b"a.jpg#2", b"a.jpg#3", b"a.jpg#4"]
    assert found == {
        b"a.jpg": (0, first),
        b"a.jpg#3": (1, first),
        b"a.jpg#4": (2, first),
        b"a.jpg#2": (9, noise("x", 60)),
        b"a.jpg!": (3, noise("!", 70)),
    }
    assert "2 rows have a key that a row before has" in listing(path).notes[0]


def test_each_file_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, {f"{i}.jpg": JPEG for i in range(3)})
    path = write(tmp_path / "x.csv", "path\n" + "0.jpg\n1.jpg\n2.jpg\n" * 4)
    seen, real = [], os.stat

    def stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if "dir_fd" in options:
            seen.append(path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert len(listing(path).keys) == 12
    assert sorted(seen) == [b"0.jpg", b"1.jpg", b"2.jpg"]


def test_what_cannot_be_packed_is_a_problem_in_the_words_of_folders(tmp_path: Path) -> None:
    plant(tmp_path, {"a.jpg": JPEG, "empty.jpg": b"", "folder": None})
    os.mkfifo(tmp_path / "fifo")
    os.symlink("nowhere", tmp_path / "dangling")
    names = ["a.jpg", "", "empty.jpg", "folder", "fifo", "dangling", "gone.jpg", "a.jpg/x", "b\0c"]
    path = write(tmp_path / "x.jsonl", as_jsonl([{"path": name or None} for name in names]))
    assert dict(listing(path).problems) == {
        b"row 1": "no path",
        b"empty.jpg": "is empty",
        b"folder": "is a folder, not a file; it was not opened",
        b"fifo": "is a FIFO, not a file; it was not opened",
        b"dangling": "is a link to nothing",
        b"gone.jpg": "there is no such file",
        b"a.jpg/x": "cannot be followed: Not a directory",
        b"b\0c": "its path has a byte of 0",
    }
    assert listing(path).keys == [b"a.jpg"]


def test_a_file_that_is_no_image_is_rejected_when_it_is_read(tmp_path: Path) -> None:
    plant(tmp_path, {"a.jpg": JPEG, "b.jpg": b"%PDF-1.7"})
    path = write(tmp_path / "x.csv", "path,n\na.jpg,1\nb.jpg,2\n")
    with pytest.raises(SourceError, match=r"b\.jpg: is not an image: it begins with '%PDF-1.7'"):
        pack_one(path, tmp_path / "out")
    done = pack_one(path, tmp_path / "out", on_error="skip")
    assert (done.records, [key for key, _ in done.rejected]) == (1, ["b.jpg"])


def test_a_listing_of_nothing_that_can_be_packed_is_an_error(tmp_path: Path) -> None:
    plant(tmp_path, {"empty.jpg": b"", "folder": None})
    path = write(tmp_path / "x.csv", "path,n\nempty.jpg,1\n,2\n/,3\n")
    with pytest.raises(SourceError, match="there are no images in it") as caught:
        listing(path)
    assert "empty.jpg: is empty" in str(caught.value)
    assert "row 1: no path" in str(caught.value)
    assert "/: is a folder" in str(caught.value)


@pytest.mark.parametrize("url", ["http://x.org/a.jpg", "s3://b/a.jpg", "file://host/a.jpg"])
def test_urls_of_other_places_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(SourceError, match=f"row 1: {url}: expected a path, and this"):
        listing(write(tmp_path / "x.csv", f"path,n\na.jpg,1\n{url},1\n"))


def test_when_no_file_is_there_the_message_says_what_to_do(source: Path, tmp_path: Path) -> None:
    moved = write(tmp_path / "train.csv", source.read_bytes())
    with pytest.raises(SourceError, match=r"ant/000.jpg, in .*--root.*--fields path=path"):
        listing(moved)
    assert len(listing(moved, root=os.fspath(source.parent)).keys) == COUNT
    assert len(listing(moved, fields={"path": "path"}).keys) == COUNT
    with pytest.raises(OptionError, match="cannot be opened: No such file"):
        listing(moved, root=os.fspath(tmp_path / "nowhere"))
    table = write(tmp_path / "table.csv", "a\n1\n")
    with pytest.raises(OptionError, match="no column of paths"):
        listing(table, root=os.fspath(source.parent))


# --- selecting ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "met"),
    [
        ({"split": "val"}, lambda row: row["split"] == "val"),
        ({"label": "cat"}, lambda row: row["label"] == "cat"),
        ({"label": [0, None]}, lambda row: row["label"] in ("ant", None)),
        ({"width": [101, 103]}, lambda row: row["width"] in (101, 103)),
        ({"width": lambda w: w >= 110}, lambda row: (row["width"] or 0) >= 110),
        ({"score": None}, lambda row: row["score"] is None),
        ({"good": True}, lambda row: row["good"] is True),
        ({"zip": ["00003", "00004"]}, lambda row: row["zip"] in ("00003", "00004")),
        ({"path": "ant/003.jpg"}, lambda row: row["path"] == "ant/003.jpg"),
        ({"split": "train", "good": False}, lambda r: r["split"] == "train" and r["good"] is False),
    ],
)
def test_where_selects_by_columns_of_every_type(
    source: Path, where: Mapping[str, Any], met: Callable[[dict[str, Any]], bool]
) -> None:
    expected = sorted(row["path"] for row in rows() if met(row))
    assert 0 < len(expected) < COUNT
    found = samples(source, where=where)
    assert [os.fsdecode(one["__key__"]) for one in found] == expected
    assert listing(source, where=where).classes == ("ant", "cat")  # the numbers stay the same


def test_where_comes_before_files_are_looked_at(tmp_path: Path) -> None:
    plant(tmp_path, {"a.jpg": JPEG})
    path = write(tmp_path / "x.csv", "path,split\na.jpg,train\ngone.jpg,val\nhttp://x/y,val\n")
    found = listing(path, where={"split": "train"})
    assert (found.keys, found.problems, found.notes) == ([b"a.jpg"], [], [])


def test_where_keeps_the_keys_of_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "a,text\n5,x\n6,y\n7,z\n")
    found = samples(path, where={"a": [5, 7]})
    assert [(one["__key__"], one["text"]) for one in found] == [
        (b"00000000", "x"),
        (b"00000002", "z"),
    ]


def test_where_refuses_what_it_cannot_select_by(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", as_jsonl([{"a": 1, "box": [1]}]))
    with pytest.raises(OptionError, match="no column is called 'b'; there are a, box"):
        listing(path, where={"b": 1})
    with pytest.raises(OptionError, match="'box' is of kind json"):
        listing(path, where={"box": 1})


def test_several_splits_in_one_packing_are_noted(source: Path) -> None:
    [note] = listing(source).notes
    assert "column 'split' has train, val" in note
    assert "--where split=train" in note
    assert listing(source, where={"split": "val"}).notes == []
    assert listing(source, where={"split": ["train", "val"]}).notes == []
    with pytest.raises(OptionError, match="--splits"):
        pack(source, source.parent.parent / "out", splits=True)


# --- packing --------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A listing without paths."""
    return write(
        tmp_path / "table.csv", as_csv([row | {"path": i} for i, row in enumerate(rows())])
    )


class TestListingOfFiles(FileSourceConformance):
    KIND = "listing"

    def make(self, root: Path) -> Path:
        plant(root, {row["path"]: noise(row["path"], 200) for row in rows(self.COUNT)})
        return write(root / "train.csv", as_csv(rows(self.COUNT)))

    def file(self, path: Path) -> Path:
        return path.parent / "ant" / "000.jpg"


class TestListingOfRows(SourceConformance):
    KIND = "listing"

    def make(self, root: Path, **changed: Any) -> Path:
        root.mkdir()
        table = [row | {"path": i} for i, row in enumerate(rows(self.COUNT))]
        table[3] |= changed
        return write(root / "table.csv", as_csv(table))

    def change(self, path: Path) -> None:
        path.write_text(path.read_text().replace("103", "993"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("width", 111), ("width", None), ("score", 3.5), ("good", False), ("zip", "00013")),
        *(("label", "cat"), ("label", None)),
    ],
)
def test_a_changed_value_is_another_plan(source: Path, name: str, value: Any) -> None:
    before, table = listing(source).options["values"], rows()
    assert table[12][name] != value
    table[12][name] = value
    assert listing(write(source, as_csv(table))).options["values"] != before


def test_values_of_one_column_are_not_mistaken_for_those_of_the_next(tmp_path: Path) -> None:
    seen = set()
    for text in (
        "a,b\nx,yz\n",
        "a,b\nxy,z\n",
        "a,b\n,xyz\n",
        "b,a\nx,yz\n",
        "a,b\nx,\n",
        "a,b\n,x\n",
        "a\nx\nyz\n",
        "a\nxy\nz\n",
    ):
        seen.add(listing(write(tmp_path / "x.csv", text)).options["values"])
    assert len(seen) == 8


def test_rows_without_keys_stay_in_their_order_unless_shuffled(table: Path, tmp_path: Path) -> None:
    pack_one(table, tmp_path / "out", shuffle=False)
    opened = sequence.open(tmp_path / "out", decode=None)
    assert opened.keys() == [f"{i:08d}" for i in range(COUNT)]
    assert [one["zip"] for one in opened] == [row["zip"] for row in rows()]
    assert opened.columns("width").tolist() == [row["width"] for row in rows()]


def test_from_the_command_line_to_batches(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = shardio("pack", source, out, "--fields", "code=zip", "--where", "split=train").stdout
    assert "image (image) from path" in shown
    assert "code (str) from zip" in shown
    [one] = shardio_json("pack", source, out, "--fields", "code=zip", "--where", "split=train")[
        "datasets"
    ]
    assert (one["already"], one["records"], one["classes"]) == (True, 18, 2)
    assert shardio_json("info", out)["fields"]["code"] == "str"
    shardio("verify", out)
    shardio("unpack", out, tmp_path / "back")
    kept = {row["path"]: row for row in rows() if row["split"] == "train"}
    back = {os.fsdecode(key): data for key, data in content(tmp_path / "back").items()}
    assert {key: data for key, data in back.items() if data is not None} == {
        key: (source.parent / key).read_bytes() for key in kept
    }
    data = ShardDataset(
        out,
        batch_size=4,
        decode=None,
        fields=("__key__", "width", "code"),
        collate_fn=partial(collate, ragged=("width",)),  # some have None
    )
    got = {
        os.fsdecode(key): (width, code)
        for keys, widths, codes in data
        for key, width, code in zip(keys, list(widths), codes, strict=True)
        if width is not None
    }
    assert {key: (int(w), code) for key, (w, code) in got.items() if w is not None} == {
        key: (row["width"], row["zip"]) for key, row in kept.items() if row["width"] is not None
    }


def test_hostile_files_end_in_a_message_and_no_traceback(tmp_path: Path) -> None:
    deep = '{"a": ' + "[" * 50_000
    for name, data in (
        ("garbage.csv", os.urandom(10_000)),
        ("nul.tsv", b"a\tb\n\0\0\n"),
        ("deep.jsonl", deep.encode()),
        ("deep.json", b"[" + deep.encode()),
        ("cut.parquet", b"PAR1" + bytes(100) + b"PAR1"),
        ("terminal.csv", b"a,b\n\x1b[31m,1,2\n"),
        ("paths.csv", b"path\n\x1b[31m\n../../../../etc/passwd\n"),
    ):
        path = write(tmp_path / name, data)
        done = shardio("pack", path, tmp_path / "out", code=3 if name == "cut.parquet" else 1)
        assert "\x1b" not in done.stderr
        assert name in done.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_large_listing_takes_little_memory_a_row(tmp_path: Path) -> None:
    count = 20_000
    text = "".join(f"{i},some text {i},{i / 7},{i % 2}\n" for i in range(count))
    path = write(tmp_path / "x.csv", "n,text,score,odd\n" + text)
    listing(path)  # imports are not counted
    tracemalloc.start()
    found = listing(path)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found.keys) == count
    assert held < count * 180  # bytes; keys alone are 50
    assert peak < count * 400
