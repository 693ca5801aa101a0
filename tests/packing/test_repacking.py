"""Datasets as sources of pack: what comes out holds what went in, chosen and renamed as asked."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conformance import SourceConformance
from support.trees import images, noise, picture, plant

import shardio
from shardio import Writer, commit, pack
from shardio.cli.main import main
from shardio.dataset import sequence as sequences
from shardio.errors import (
    ExistsError,
    NotPackedError,
    OptionError,
    SourceChangedError,
    SourceError,
)
from shardio.formats import manifest
from shardio.order import subset as selection
from shardio.packing.options import PlanOptions, SourceOptions
from shardio.storage.location import locate


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A packed directory: 24 files of three classes."""
    pack(
        plant(tmp_path / "src", images()),
        tmp_path / "first",
        jobs=1,
        plan=PlanOptions(max_records=5),
    )
    return tmp_path / "first"


def samples(folder: Path, **options: Any) -> dict[bytes, dict[str, Any]]:
    return {s["__key__"]: s for s in sequences.stored(folder, **options)}


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def made(folder: Path) -> manifest.Manifest:
    return manifest.load(locate(folder))


def test_a_packed_dataset_is_packed_again_with_all_its_records_and_classes(
    source: Path, tmp_path: Path
) -> None:
    [done] = pack(source, tmp_path / "out", jobs=1, format="lmdb", plan=PlanOptions(max_records=7))
    assert (done.source, done.records, done.classes) == ("dataset", 24, 3)
    assert samples(tmp_path / "out") == samples(source)
    assert made(tmp_path / "out").classes == made(source).classes
    assert made(tmp_path / "out").format == "lmdb"


def test_it_is_shuffled_by_the_seed_or_kept_in_stored_order(source: Path, tmp_path: Path) -> None:
    stored = list(samples(source))
    pack(source, tmp_path / "same", jobs=1, plan=PlanOptions(shuffle=False))
    assert list(samples(tmp_path / "same")) == stored
    orders = []
    for seed in (0, 1):
        pack(source, tmp_path / f"out{seed}", jobs=1, plan=PlanOptions(seed=seed))
        orders.append(list(samples(tmp_path / f"out{seed}")))
    assert orders[0] != orders[1] != stored
    assert sorted(orders[0]) == sorted(stored)


def test_processes_and_parts_of_chosen_records_make_the_same_bytes(
    source: Path, tmp_path: Path
) -> None:
    chosen = SourceOptions(where={"label": ["class1"]})
    for name, jobs, part in (("one", 1, None), ("two", 2, None), ("parts", 1, "1/2")):
        plan = PlanOptions(max_records=5, part=part)
        pack(source, tmp_path / name, jobs=jobs, plan=plan, read=chosen)
    pack(
        source, tmp_path / "parts", jobs=1, plan=PlanOptions(max_records=5, part="2/2"), read=chosen
    )
    commit(tmp_path / "parts", jobs=1)
    assert len(samples(tmp_path / "one")) == 8
    assert content(tmp_path / "one") == content(tmp_path / "two") == content(tmp_path / "parts")


class TestDataset(SourceConformance):
    KIND = "dataset"

    def make(self, root: Path, salt: str = "") -> Path:
        tree = {f"c{i % 3}/{i}.jpg": b"\xff\xd8\xff" + noise(f"{salt}{i}", 50) for i in range(12)}
        pack(plant(root / "src", tree), root / "packed", jobs=1, plan=PlanOptions(max_records=5))
        return root / "packed"

    def change(self, path: Path) -> None:
        shutil.rmtree(path.parent)
        self.make(path.parent, "other")


class TestFilesOfAnotherFormat(TestDataset):
    KIND = "webdataset"

    def make(self, root: Path, salt: str = "") -> Path:
        shardio.export(super().make(root, salt), root / "wds", format="webdataset")
        return root / "wds"


def test_fields_of_every_kind_go_over_with_new_names(tmp_path: Path) -> None:
    wanted = [
        {
            "__key__": b"k%d" % i,
            "photo": picture(8 + i, 8) if i else None,
            "score": i / 4,
            "n": None if i == 2 else i,
            "text": f"caption {i}",
            "box": np.arange(i * 4, dtype=np.float32).reshape(i, 4),
            "more": {"tags": ["a", i, None]},
            "ok": i % 2 == 0,
        }
        for i in range(4)
    ]
    kinds = {
        **{"photo": "image", "score": "float", "n": "int", "text": "str"},
        **{"box": "array", "more": "json", "ok": "bool"},
    }
    with Writer(tmp_path / "src", fields=kinds) as writer:
        for sample in wanted:
            writer.write(sample)
    [done] = pack(
        tmp_path / "src",
        tmp_path / "out",
        jobs=1,
        read=SourceOptions(fields={"image": "photo", "label": "n"}),
    )
    assert done.theirs == {"image": "photo", "label": "n"}
    assert made(tmp_path / "out").options["fields"] == done.theirs
    found = samples(tmp_path / "out")
    for sample in wanted:
        one = found[sample["__key__"]]
        assert list(one) == ["__key__", "image", "score", "label", "text", "box", "more", "ok"]
        np.testing.assert_array_equal(one.pop("box"), sample["box"])
        assert one == {
            **{"__key__": sample["__key__"], "image": sample["photo"], "label": sample["n"]},
            **{name: sample[name] for name in ("score", "text", "more", "ok")},
        }


def test_conditions_of_the_command_line_choose_records(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def chosen(*conditions: str) -> set[int]:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        where = [word for one in conditions for word in ("--where", one)]
        assert main(["pack", str(source), str(out), "--jobs", "1", *where]) == 0
        return {sample["label"] for sample in samples(out).values()}

    assert chosen("label=class0,class2") == {0, 2}
    assert chosen("label=1") == {1}
    assert chosen("label!=class1") == {0, 2}
    assert chosen("label>=1") == {1, 2}
    assert chosen("label>0", "label<2") == {1}
    assert "fields: image (image), label (int)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("label", "expected NAME=VALUE"),
        ("=3", "expected NAME=VALUE"),
        ("label<x", "x is no number"),
        ("label=dog", "no class is called 'dog'"),
        ("size=3", "no column is called 'size'"),
        ("image=3", "no column is called 'image'"),
        ("label=3", "none of 24 records"),
    ],
)
def test_conditions_that_cannot_be_met_are_said(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], condition: str, said: str
) -> None:
    out = tmp_path / "out"
    assert main(["pack", str(source), str(out), "--where", condition]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_words_are_numbers_where_the_column_has_numbers_and_texts_where_it_has_texts() -> None:
    columns = {
        "name": np.ma.MaskedArray(np.array(["007", "8", ""], object), [False, False, True]),
        "size": np.ma.MaskedArray(np.array([7.0, 8.5, 0.0]), [False, False, True]),
        "flag": np.array([True, False, True]),
    }

    def chosen(*texts: str) -> list[int]:
        asked = selection.conditions(texts)
        found = selection.select_where(asked, columns.__getitem__, np.array([0, 3]), None)
        return found.numbers.tolist()

    assert chosen("name=007") == [0]
    assert chosen("name=null") == [2]
    assert chosen("name!=null") == [0, 1]
    assert chosen("size=8.5,null") == [1, 2]
    assert chosen("size>=7", "size!=8.5") == [0]
    assert chosen("flag=true", "name!=null") == [0]
    with pytest.raises(OptionError, match="has no numbers"):
        chosen("name<8")
    with pytest.raises(OptionError, match="eight is none"):
        chosen("size=eight")


def test_a_folder_of_images_is_chosen_by_class_and_only_by_that(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", images() | {"class2/empty.jpg": b""})
    [done] = pack(source, tmp_path / "out", jobs=1, read=SourceOptions(where={"label": ["class0"]}))
    assert (done.records, done.rejected) == (8, [])
    assert made(tmp_path / "out").classes == ("class0", "class1", "class2")
    assert {s["label"] for s in samples(tmp_path / "out").values()} == {0}
    with pytest.raises(SourceError, match=r"class2/empty\.jpg: is empty"):
        pack(source, tmp_path / "two", jobs=1, read=SourceOptions(where={"label": ["class2"]}))
    with pytest.raises(OptionError, match="only `label`"):
        pack(source, tmp_path / "two", jobs=1, read=SourceOptions(where={"size": 3}))
    with pytest.raises(OptionError, match="called so already"):
        pack(source, tmp_path / "two", jobs=1, read=SourceOptions(fields={"image": "jpg"}))


def test_splits_stay_splits_and_classes_can_be_renumbered(tmp_path: Path) -> None:
    both = ("train", "val")
    tree = {f"{split}/{name}": data for split in both for name, data in images().items()}
    pack(plant(tmp_path / "src", tree), tmp_path / "first", jobs=1)
    done = pack(tmp_path / "first", tmp_path / "out", jobs=1)
    assert [one.split for one in done] == ["train", "val"]
    assert samples(tmp_path / "out" / "val") == samples(tmp_path / "first" / "val")
    pack(plant(tmp_path / "other", {"a/x.jpg": picture(9, 9)} | images()), tmp_path / "A", jobs=1)
    pack(
        tmp_path / "first" / "val",
        tmp_path / "B",
        jobs=1,
        read=SourceOptions(classes=tmp_path / "A"),
    )
    assert made(tmp_path / "B").classes == ("a", "class0", "class1", "class2")
    assert {s["label"] for s in samples(tmp_path / "B").values()} == {1, 2, 3}


def test_a_damaged_record_is_listed_or_left_out(source: Path, tmp_path: Path) -> None:
    shard = min(source.glob("*.shard"))
    data = bytearray(shard.read_bytes())
    data[200] ^= 1
    shard.write_bytes(data)
    with pytest.raises(SourceError, match=r"1 file cannot be packed[^$]*checksum"):
        pack(source, tmp_path / "out", jobs=1)
    [done] = pack(source, tmp_path / "out", jobs=1, on_error="skip")
    assert (done.records, len(done.rejected)) == (23, 1)
    assert (
        samples(tmp_path / "out").items()
        <= {key: sample for key, sample in samples_whole(source).items()}.items()
    )


def samples_whole(folder: Path) -> dict[bytes, dict[str, Any]]:
    records = sequences.stored(folder)
    found = {}
    for i in range(len(records)):
        try:
            found[records[i]["__key__"]] = records[i]
        except shardio.DamageError:
            continue
    return found


def test_another_dataset_of_the_same_sizes_is_another_plan(tmp_path: Path) -> None:
    for name, salt in (("a", "x"), ("b", "y")):
        tree = {f"c/{i}.jpg": b"\xff\xd8\xff" + noise(f"{salt}{i}", 50) for i in range(6)}
        pack(plant(tmp_path / f"src-{name}", tree), tmp_path / name, jobs=1)
    pack(tmp_path / "a", tmp_path / "out", jobs=1, plan=PlanOptions(part=(1, 1)))
    with pytest.raises(SourceChangedError, match="option from_id: was"):
        pack(tmp_path / "b", tmp_path / "out", jobs=1, plan=PlanOptions(part=(1, 1)))


def test_what_is_read_in_place_is_packed_with_its_root(source: Path, tmp_path: Path) -> None:
    shardio.export(source, tmp_path / "wds", format="webdataset")
    shardio.index(tmp_path / "wds", out=tmp_path / "idx")
    pack(tmp_path / "idx", tmp_path / "out", jobs=1, read=SourceOptions(root=tmp_path / "wds"))
    found, wanted = samples(tmp_path / "out"), samples(source)
    assert {os.path.splitext(k)[0] for k in wanted} == set(found)
    for key, sample in wanted.items():
        one = found[os.path.splitext(key)[0]]
        assert (one["image"], one["label"]) == (sample["image"], sample["label"])


def test_what_cannot_be_a_source_is_said(tmp_path: Path) -> None:
    (tmp_path / "file.xyz").write_bytes(b"hello")
    with pytest.raises(OptionError, match="no such kind of source; there are imagefolder"):
        pack(tmp_path, tmp_path / "out", read=SourceOptions(kind="zip"))
    with pytest.raises(SourceError, match="this file is none"):
        pack(tmp_path / "file.xyz", tmp_path / "out")
    with pytest.raises(SourceError, match="no such file or directory"):
        pack(tmp_path / "nothing", tmp_path / "out")


def test_files_of_another_format_are_packed_without_an_index(source: Path, tmp_path: Path) -> None:
    shardio.export(source, tmp_path / "wds", format="webdataset", shard_size="4kB")
    before = sorted(os.listdir(tmp_path / "wds"))
    assert len(before) > 1
    for name, jobs in (("one", 1), ("two", 2)):
        [done] = pack(
            tmp_path / "wds",
            tmp_path / name,
            jobs=jobs,
            read=SourceOptions(where={"label": [0, 2]}),
        )
        assert (done.source, done.records) == ("webdataset", 16)
        assert done.theirs == {"image": "jpg", "label": "cls"}
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert sorted(os.listdir(tmp_path / "wds")) == before
    wanted = {os.path.splitext(key)[0]: sample for key, sample in samples(source).items()}
    for key, sample in samples(tmp_path / "one").items():
        assert (sample["image"], sample["label"]) == (wanted[key]["image"], wanted[key]["label"])
    [done] = pack(
        tmp_path / "wds" / "00000.tar",
        tmp_path / "file",
        jobs=1,
        read=SourceOptions(fields={"kind": "cls"}),
    )
    assert (done.source, list(done.fields)) == ("webdataset", ["__key__", "image", "kind"])
    assert done.records == made(tmp_path / "file").records < 24


def test_a_folder_with_files_of_two_formats_must_be_told(tmp_path: Path) -> None:
    plant(tmp_path / "src", {"a.tar": b"x", "b.rec": b"y"})
    with pytest.raises(OptionError, match="choose --from"):
        pack(tmp_path / "src", tmp_path / "out")


def test_an_indexed_folder_of_images_is_still_packed_as_one(tmp_path: Path) -> None:
    folder = plant(tmp_path / "src", images())
    pack(folder, tmp_path / "one", jobs=1)
    shardio.index(folder, jobs=1)
    pack(folder, tmp_path / "two", jobs=1)
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_the_index_of_a_folder_of_images_is_packed_with_its_root(tmp_path: Path) -> None:
    plant(tmp_path / "photos", {"cat/1.jpg": noise("1", 90), "dog/2.jpg": noise("2", 80)})
    shardio.index(tmp_path / "photos", out=tmp_path / "idx")
    pack(tmp_path / "idx", tmp_path / "out", jobs=1, read=SourceOptions(root=tmp_path / "photos"))
    data = shardio.open(tmp_path / "out")
    assert sorted(data.keys()) == ["cat/1.jpg", "dog/2.jpg"]
    assert list(data.classes or ()) == ["cat", "dog"]


@pytest.mark.parametrize("where", ["class0.tar", "class0/old.tar", ".hidden.tar"])
def test_images_are_not_left_out_for_a_file_of_another_format(tmp_path: Path, where: str) -> None:
    source = plant(tmp_path / "src", images())
    shardio.export(source_of(tmp_path), tmp_path / "wds", format="webdataset")
    (source / where).write_bytes((tmp_path / "wds" / "00000.tar").read_bytes())
    if where.startswith("."):
        [done] = pack(source, tmp_path / "out", jobs=1)
        assert (done.source, done.records) == ("imagefolder", 24)
        return
    with pytest.raises(OptionError, match="24 images; choose --from webdataset or imagefolder"):
        pack(source, tmp_path / "out", jobs=1)
    assert not (tmp_path / "out").exists()


def test_images_in_deeper_folders_are_not_left_out_for_a_file_of_another_format(
    tmp_path: Path,
) -> None:
    shardio.export(source_of(tmp_path), tmp_path / "src" / "wds", format="webdataset")
    plant(tmp_path / "src" / "raw", images())
    with pytest.raises(OptionError, match=r"1 of webdataset, .* images; choose --from webdataset"):
        pack(tmp_path / "src", tmp_path / "out", jobs=1)
    shutil.rmtree(tmp_path / "src" / "raw")
    [done] = pack(tmp_path / "src", tmp_path / "out", jobs=1)
    assert done.source == "webdataset"


def source_of(tmp_path: Path) -> Path:
    pack(plant(tmp_path / "few", images(1, 2)), tmp_path / "first", jobs=1)
    return tmp_path / "first"


def test_a_first_class_folder_that_cannot_be_listed_is_left_out_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = plant(tmp_path / "src", images())
    real = os.scandir

    def scandir(path: bytes) -> Any:  # root may list anything
        if os.fsencode(path).rstrip(b"/").endswith(b"class0"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    [done] = pack(source, tmp_path / "out", jobs=1, on_error="skip")
    assert (done.records, done.rejected) == (
        16,
        [("class0/", "cannot be listed: Permission denied")],
    )


def test_classes_are_those_of_the_field_that_is_called_label(tmp_path: Path) -> None:
    fields = {"image": "image", "label": "int", "coarse": "int"}
    with Writer(tmp_path / "src", fields=fields, classes=["a", "b", "c"]) as writer:
        for i in range(3):
            writer.write({"__key__": f"{i}", "image": picture(9, 9), "label": i, "coarse": i % 2})
    swapped = {"label": "coarse", "fine": "label"}
    for name, renamed in (("one", swapped), ("two", {"fine": "label"})):
        pack(tmp_path / "src", tmp_path / name, jobs=1, read=SourceOptions(fields=renamed))
        assert made(tmp_path / name).classes is None
    pack(
        tmp_path / "src", tmp_path / "three", jobs=1, read=SourceOptions(fields={"rough": "coarse"})
    )
    assert made(tmp_path / "three").classes == ("a", "b", "c")


def test_classes_of_annotations_go_over_and_are_not_renumbered(tmp_path: Path) -> None:
    with Writer(tmp_path / "src", fields={"image": "image"}, classes=["a", "b"]) as writer:
        writer.write({"__key__": "0", "image": picture(9, 9)})
    pack(tmp_path / "src", tmp_path / "out", jobs=1)
    assert made(tmp_path / "out").classes == ("a", "b")
    with pytest.raises(OptionError, match="not those of a field `label`"):
        pack(
            tmp_path / "src", tmp_path / "two", jobs=1, read=SourceOptions(classes=tmp_path / "src")
        )


def test_labels_that_name_no_class_are_never_given_one(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    names = {"names": ["cat", "dog", "eel"], "_type": "ClassLabel"}
    info = json.dumps({"info": {"features": {"label": names}}})
    for name, labels in (("some", [-1, 0, 2, None]), ("odd", [0, 3])):
        columns = {"image": [picture(9, 9)] * len(labels), "label": labels}
        table = pa.table(columns).replace_schema_metadata({"huggingface": info})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    with Writer(tmp_path / "other", classes=["ant", "cat", "dog", "eel"]) as writer:
        writer.write({"__key__": "0", "image": picture(9, 9), "label": 0})
    other = tmp_path / "other"
    pack(tmp_path / "some.parquet", tmp_path / "out", jobs=1, read=SourceOptions(classes=other))
    assert [one["label"] for one in samples(tmp_path / "out").values()] == [-1, 1, 3, None]
    with pytest.raises(SourceError, match="its label, 3, is none of 3"):
        pack(tmp_path / "odd.parquet", tmp_path / "two", jobs=1, read=SourceOptions(classes=other))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--root", "elsewhere"], "--root: for listings"),
        (["--fields", "image=photo,image=n"], "image is there twice"),
        (["--fields", "__key__=n"], "kind 'int' is not one of"),
        (["--resize", "8"], "Those that do: photo; --fields image=NAME"),
    ],
)
def test_options_that_would_be_ignored_are_refused_and_nothing_is_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    with Writer(tmp_path / "src", fields={"photo": "image", "n": "int"}) as writer:
        writer.write({"__key__": "0", "photo": picture(99, 99), "n": 1})
    source = tmp_path / "src"
    if "--root" in options:
        source = plant(tmp_path / "images", images())
    assert main(["pack", str(source), str(tmp_path / "out"), "--jobs", "1", *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_index_of_images_that_lies_elsewhere_is_packed(tmp_path: Path) -> None:
    folder = plant(tmp_path / "src", images())
    shardio.index(folder, out=tmp_path / "idx", jobs=1)
    pack(tmp_path / "idx", tmp_path / "out", jobs=1, read=SourceOptions(root=folder))
    pack(folder, tmp_path / "two", jobs=1)
    assert samples(tmp_path / "out") == samples(tmp_path / "two")


@pytest.mark.parametrize("dtype", ["<i8", "<u8"])
def test_large_integers_are_compared_as_such(dtype: str) -> None:
    column = np.array([2**53, 2**53 + 1, 2**53 + 2], dtype)
    for text, wanted in (
        (f"id>={2**53 + 1}", [1, 2]),
        (f"id<{2**53 + 1}", [0]),
        (f"id>-{10**19}", [0, 1, 2]),
        (f"id<{10**20 - 1}", [0, 1, 2]),
    ):
        asked = selection.conditions([text])
        found = selection.select_where(asked, {"id": column}.__getitem__, np.array([0, 3]), None)
        assert found.numbers.tolist() == wanted, text


def test_a_folder_is_packed_with_the_labels_of_its_index(tmp_path: Path) -> None:
    for split, classes in (("train", "abc"), ("val", "bc")):
        tree = {f"{split}/{c}/{i}.jpg": noise(f"{split}{c}{i}", 99) for c in classes for i in "12"}
        plant(tmp_path, tree)
    shardio.index(tmp_path / "train", jobs=1)
    shardio.index(tmp_path / "val", classes=tmp_path / "train", jobs=1)
    [done] = pack(tmp_path / "val", tmp_path / "out", jobs=1)
    assert samples(tmp_path / "out") == samples(tmp_path / "val")
    assert made(tmp_path / "out").classes == ("a", "b", "c")
    assert done.notes == ["classes are numbered as in the index that lies there"]


def test_what_was_asked_for_is_recorded_and_another_wish_is_said(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = selection.conditions(["label>=1", "label != class2"])
    pack(source, out, jobs=1, read=SourceOptions(where=asked))
    assert made(out).options["where"] == {"label": ">=1 and !=class2"}
    with pytest.raises(
        ExistsError, match=r"option where: was label>=1 and !=class2, now label=1\n"
    ):
        pack(source, out, jobs=1, read=SourceOptions(where={"label": np.int64(1)}))
    with pytest.raises(ExistsError, match="option format: was 'record', now 'lmdb'"):
        pack(source, out, jobs=1, format="lmdb", read=SourceOptions(where=asked))


def test_a_file_where_a_packed_directory_belongs_is_said(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("a,b\n1,2\n")
    with pytest.raises(NotPackedError, match="it is a file, not a packed directory"):
        shardio.open(tmp_path / "list.csv")


def test_parquet_is_packed_in_stored_order_unless_a_shuffle_is_asked_for(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"bytes": picture(9 + i, 9), "path": f"{i:02d}.jpg"} for i in range(12)]
    table = pa.table({"image": rows, "label": list(range(12))})
    (tmp_path / "src").mkdir()
    parquet.write_table(table, tmp_path / "src" / "0.parquet", row_group_size=3)
    [done] = pack(tmp_path / "src", tmp_path / "out", jobs=1)
    assert [s["label"] for s in samples(tmp_path / "out").values()] == list(range(12))
    assert any("stored order" in note for note in done.notes)
    assert made(tmp_path / "out").options["shuffle"] is False
    [done] = pack(tmp_path / "src", tmp_path / "two", jobs=1, plan=PlanOptions(shuffle=True))
    labels = [s["label"] for s in samples(tmp_path / "two").values()]
    assert sorted(labels) == list(range(12)) != labels
    assert not any("stored order" in note for note in done.notes)


def test_fields_of_one_name_are_refused_and_classes_without_a_folder_stay_so(
    source: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="two fields would have one name"):
        pack(source, tmp_path / "out", jobs=1, read=SourceOptions(fields={"label": "image"}))
    other = plant(tmp_path / "more", images() | {"extra/x.jpg": picture(9, 9)})
    pack(other, tmp_path / "A", jobs=1)
    pack(tmp_path / "src", tmp_path / "B", jobs=1, read=SourceOptions(classes=tmp_path / "A"))
    pack(tmp_path / "B", tmp_path / "C", jobs=1)
    assert made(tmp_path / "C").classes[3] == "extra"
    shardio.unpack(tmp_path / "C", tmp_path / "back")
    assert sorted(os.listdir(tmp_path / "back")) == ["class0", "class1", "class2"]
