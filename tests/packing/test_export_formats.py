"""Export, by format: small readers of the published layouts read it back, and its own tool does.

The tools are in an environment of their own (tools/setup-formats), and so is the program that runs
them, formats/read.py. MXNet is not among them, as its last release does not install on today's
Python: RecordIO is checked by its published layout alone, and so are DALI's indexes.
"""

import io
import json
import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from support import LIMIT_S, small_datasets
from support.exporting import (
    FIELDS,
    MAGIC,
    N,
    caffe_samples,
    decoded,
    equal,
    example,
    left,
    mds_samples,
    rec_records,
    rich,
    some_none,
    tar_index,
    tar_samples,
    tf_records,
    written,
)
from support.trees import content, picture, plant

from shardio.errors import (
    OptionError,
    SampleError,
)
from shardio.packing.export import export
from shardio.packing.pack import pack
from shardio.packing.receipt import NAME as RECEIPT
from shardio.packing.writer import Writer

Packed = Callable[..., Path]


HERE = Path(__file__).resolve().parent.parent / "format_tools"


PYTHON = HERE / ".venv" / "bin" / "python"


def taken(members: dict[str, bytes], name: str, decode: Callable[[bytes], Any]) -> Any:
    return decode(members.pop(name)) if name in members else None


def check_tars(folder: Path, sample: Callable[[int], dict[str, Any]]) -> None:
    found = [one for path in sorted(folder.glob("*.tar")) for one in tar_samples(path)]
    assert [key for key, _ in found] == [f"class{i % 3}/{i:06d}" for i in range(N)]
    for i, (_, members) in enumerate(found):
        values = {
            "image": members.pop("jpg"),
            "label": taken(members, "cls", int),
            "caption": taken(members, "caption.txt", bytes.decode),
            "boxes": taken(members, "boxes.npy", lambda data: np.load(io.BytesIO(data))),
            "raw": taken(members, "raw", bytes),
        }
        for name in ("meta", "score", "good", "big"):
            values[name] = taken(members, f"{name}.json", json.loads)
        expected = sample(i)
        assert not members
        assert [name for name in values if not equal(values[name], expected[name])] == []


@pytest.mark.parametrize("sample", [rich, some_none])
def test_webdataset_members_decode_to_the_values(
    packed: Packed, tmp_path: Path, sample: Callable[[int], dict[str, Any]]
) -> None:
    out = packed([9, 0, N - 9], fields=FIELDS, sample=sample)
    done = export(out, tmp_path / "wds", format="webdataset", shard_size="20KB")
    assert (done.records, done.without) == (N, 0) and done.files > 6
    check_tars(tmp_path / "wds", sample)
    for path in (tmp_path / "wds").glob("*.tar"):
        assert path.stat().st_size % 10240 == 0
        assert path.with_suffix(".idx").read_text() == tar_index(path)


def test_tfrecord_features_are_the_values(packed: Packed, tmp_path: Path) -> None:
    out = packed([9, 0, N - 9], fields=FIELDS, sample=some_none)
    done = export(out, tmp_path / "tf", format="tfrecord", shard_size=8000)
    assert "float32" in done.notes[0]
    paths = sorted((tmp_path / "tf").glob("*.tfrecord"))
    found = [example(record) for path in paths for record in tf_records(path)]
    assert len(found) == N and len(paths) > 2
    for i, features in enumerate(found):
        sample = some_none(i)
        boxes = sample.pop("boxes")
        if boxes is not None:
            sample["boxes"] = boxes.ravel().tolist()
            sample["boxes/shape"] = list(boxes.shape)
        expected: dict[str, Any] = {"key": [sample.pop("__key__")]}
        for name, value in sample.items():
            if name == "meta" and value is not None:
                assert json.loads(features.pop("meta")[0]) == value
            elif value is not None:
                value = value.encode() if isinstance(value, str) else value
                expected[name] = value if isinstance(value, list) else [value]
        assert features == expected


def test_recordio_has_images_ids_and_labels(plain: Path, tmp_path: Path) -> None:
    export(plain, tmp_path / "rec", format="recordio")
    # One, as an .idx belongs to one.
    assert left(tmp_path / "rec") == [RECEIPT, "00000.idx", "00000.rec"]
    for i, record in enumerate(rec_records(tmp_path / "rec" / "00000.rec")):
        assert struct.unpack_from("<IfQQ", record) == (0, i % 3, i, 0)
        assert record[24:] == small_datasets.jpeg(i)
    assert i == N - 1


@pytest.mark.parametrize("pad", range(4))
def test_recordio_splits_records_at_the_aligned_magic_only(
    packed: Packed, tmp_path: Path, pad: int
) -> None:
    images = [MAGIC, MAGIC * 3, b"x" * pad + MAGIC + b"y" * 5 + MAGIC, b"", bytes(4) + MAGIC[:3]]
    images += [b"z" * 8 + MAGIC + b"w" * pad]
    out = packed([len(images)], image=lambda i: images[i], classes=None)
    export(out, tmp_path / "rec", format="recordio")
    records = rec_records(tmp_path / "rec" / "00000.rec")
    assert [record[24:] for record in records] == images
    data = (tmp_path / "rec" / "00000.rec").read_bytes()
    heads = sum(data[at : at + 4] == MAGIC for at in range(0, len(data), 4))
    aligned = [sum(one[at : at + 4] == MAGIC for at in range(0, len(one), 4)) for one in images]
    assert heads == len(images) + sum(aligned)  # each magic that a reader finds begins a part


def test_recordio_takes_several_labels(packed: Packed, tmp_path: Path) -> None:
    labels = [np.array([1, 2.5, -3]), np.array([7], np.int64)]
    out = packed(
        [2],
        fields=(("__key__", "key"), ("image", "image"), ("label", "array")),
        sample=lambda i: {"__key__": b"%d" % i, "image": b"abc", "label": labels[i]},
    )
    export(out, tmp_path / "rec", format="recordio")
    first, second = rec_records(tmp_path / "rec" / "00000.rec")
    assert struct.unpack("<IfQQ3f", first[:-3]) == (3, 0, 0, 0, 1, 2.5, -3)
    assert struct.unpack("<IfQQf", second[:-3]) == (1, 0, 1, 0, 7)


def test_mds_columns_are_the_values(wide: Path, tmp_path: Path) -> None:
    done = export(wide, tmp_path / "mds", format="mds", shard_size=6000)
    assert done.files > 4 and done.fields["image"] == "image (jpeg)"
    found = mds_samples(tmp_path / "mds")
    assert len(found) == N
    for i, sample in enumerate(found):
        expected = rich(i)
        expected["key"] = expected.pop("__key__").decode()
        assert sample.keys() == expected.keys()
        assert [name for name in sample if not equal(sample[name], expected[name])] == []


def test_mds_begins_anew_where_a_later_record_needs_another_encoding(
    packed: Packed, tmp_path: Path
) -> None:
    def sample(i: int) -> dict[str, Any]:
        return {
            "__key__": b"\xff%d" % i if i == 19 else b"%d" % i,
            "image": picture(8, 8, "PNG") if i == 17 else small_datasets.jpeg(i),
            "label": 1 << 63 if i == 15 else i,
        }

    out = packed([20], sample=sample)
    done = export(out, tmp_path / "mds", format="mds", shard_size=3000)
    assert done.fields == {
        "image": "image (bytes)",
        "__key__": "key (bytes)",
        "label": "label (uint64)",
    }
    assert done.records == 20 and len(left(tmp_path / "mds")) == done.files + 1
    expected = [sample(i) for i in range(20)]
    assert mds_samples(tmp_path / "mds") == [
        {"image": one["image"], "key": one["__key__"], "label": one["label"]} for one in expected
    ]


def test_caffe_has_datums_in_the_order_of_the_records(packed: Packed, tmp_path: Path) -> None:
    labels = [0, -1, None, (1 << 31) - 1]

    def sample(i: int) -> dict[str, Any]:
        label = labels[i % 4]
        return {"__key__": b"\xff/%d.jpg" % i, "image": small_datasets.jpeg(i), "label": label}

    out = packed([N], sample=sample)
    export(out, tmp_path / "db", format="lmdb-caffe")
    assert left(tmp_path / "db") == [RECEIPT, "data.mdb"]
    found = caffe_samples(tmp_path / "db")
    assert list(found) == [b"%08d_\xff/%d.jpg" % (i, i) for i in range(N)]
    for i, datum in enumerate(found.values()):
        label = labels[i % 4]
        expected = {4: small_datasets.jpeg(i), 7: 1} | (
            {} if label is None else {5: label % (1 << 64)}
        )
        assert datum == expected


def test_a_caffe_environment_grows_beyond_its_first_size(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = lmdb.open
    monkeypatch.setattr(lmdb, "open", lambda *a, **o: opened(*a, **(o | {"map_size": 1 << 16})))
    monkeypatch.setattr("shardio.formats.foreign.caffe_writer._COMMIT", 4000)
    out = packed([400], image=lambda i: b"%d" % i * 300)
    export(out, tmp_path / "db", format="lmdb-caffe")
    monkeypatch.undo()
    found = caffe_samples(tmp_path / "db")
    assert [datum[4] for datum in found.values()] == [b"%d" % i * 300 for i in range(400)]


def test_an_image_folder_comes_back_as_it_was_packed(tmp_path: Path) -> None:
    tree = {f"c{i % 3}/deep.er/{i}.jpg": small_datasets.jpeg(i) for i in range(9)}
    source = plant(tmp_path / "src", {**tree, "c1/\udcff.png": picture(5, 5, "PNG"), "c9": None})
    pack(source, tmp_path / "out", jobs=1)
    done = export(tmp_path / "out", tmp_path / "back", format="imagefolder")
    assert content(tmp_path / "back") == content(source)
    assert (done.records, done.files) == (10, 10)


def test_images_get_the_folder_of_their_class_and_the_ending_of_their_type(tmp_path: Path) -> None:
    jpeg, png = small_datasets.jpeg(0), picture(4, 4, "PNG")
    fields = {"image": "image", "label": "int"}
    rows = [(b"1", jpeg, 1), (b"cat/2", png, 0), (b"v1.3", jpeg, 0), (b"4", None, 1)]
    with Writer(tmp_path / "out", fields=fields, classes=["cat", "dog"]) as writer:
        for key, image, label in rows:
            writer.write({"__key__": key, "image": image, "label": label})
    done = export(tmp_path / "out", tmp_path / "back", format="imagefolder")
    files = {name: data for name, data in content(tmp_path / "back").items() if data is not None}
    assert files == {b"dog/1.jpg": jpeg, b"cat/2.png": png, b"cat/v1.3.jpg": jpeg}
    assert (done.records, done.without) == (3, 1)


def test_files_from_before_are_counted_where_readers_take_them_along(tmp_path: Path) -> None:
    pack(plant(tmp_path / "src", {"a/1.jpg": small_datasets.jpeg(1)}), tmp_path / "out", jobs=1)
    back = plant(tmp_path / "back", {"a/9.jpg": b"9", "b/8.jpg": b"8"})
    for _ in range(2):  # what it wrote itself is not from before
        done = export(tmp_path / "out", back, format="imagefolder", overwrite=True)
        told = f"still in {back}: 2 files from before, such as a/9.jpg; readers take them for files"
        assert [one for one in done.notes if one.startswith(told)]
    done = export(tmp_path / "out", tmp_path / "new", format="imagefolder", overwrite=True)
    assert not any("from before" in one for one in done.notes)
    done = export(tmp_path / "out", back, format="webdataset", overwrite=True)
    assert not any("from before" in one for one in done.notes)  # it is read by its shards


@pytest.mark.parametrize("name", ["a/b", "", ".", ".."])
def test_a_class_that_is_no_name_of_a_folder_is_refused(
    packed: Packed, tmp_path: Path, name: str
) -> None:
    out = packed([4], classes=["x", name, "y"])
    with pytest.raises(OptionError, match="cannot be the name of one folder"):
        export(out, tmp_path / "back", format="imagefolder")


def test_classes_that_get_no_folder_are_said(packed: Packed, tmp_path: Path) -> None:
    fields = {"image": "image", "label": "int"}
    with Writer(tmp_path / "out", fields=fields, classes=["a", "b", "c"]) as writer:
        for label in (0, 2):
            sample = {"__key__": b"%d" % label, "image": small_datasets.jpeg(0), "label": label}
            writer.write(sample)
    done = export(tmp_path / "out", tmp_path / "back", format="imagefolder")
    assert any("1 of 3 have no image here" in note for note in done.notes)
    assert "still are" not in str(done.notes)
    plant(tmp_path / "back", {"a/old.jpg": b"1"})
    done = export(tmp_path / "out", tmp_path / "back", format="imagefolder", overwrite=True)
    assert any("such as a/old.jpg" in note for note in done.notes)


@pytest.mark.parametrize(
    ("name", "kind", "value", "why"),
    [
        ("webdataset", "json", {"a": b"x"}, "bytes, which JSON"),
        ("webdataset", "json", [np.arange(2)], "an array, which JSON"),
        ("tfrecord", "int", 1 << 63, "int64"),
        ("tfrecord", "float", 1e300, "float32"),
        ("tfrecord", "array", np.array([1e300]), "float32"),
        ("tfrecord", "array", np.array([1j]), "complex128"),
        ("tfrecord", "array", np.array([1 << 63], np.uint64), "int64"),
        ("mds", "array", np.array(1.0), "shape"),
        ("mds", "array", np.zeros((2, 0)), "shape"),
        ("mds", "array", np.array([True]), "bool"),
        ("mds", "json", {"a": b"x"}, "bytes, which JSON"),
        ("mds", "str", None, "None"),
    ],
)
def test_values_that_a_format_cannot_hold_name_record_and_field(
    packed: Packed, tmp_path: Path, name: str, kind: str, value: Any, why: str
) -> None:
    out = packed(
        [3],
        fields=(("__key__", "key"), ("image", "image"), ("odd", kind)),
        sample=lambda i: {"__key__": b"k%d" % i, "image": small_datasets.jpeg(i), "odd": value},
    )
    with pytest.raises(SampleError, match=f"record k0: field 'odd'.*{why}"):
        export(out, tmp_path / "x", format=name)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "image", "label", "why"),
    [
        ("recordio", True, (1 << 24) + 1, "no float32"),
        ("recordio", True, None, "it is None"),
        ("recordio", False, 1, "it is None"),
        ("lmdb-caffe", True, 1 << 31, "int32"),
        ("lmdb-caffe", False, 1, "it is None"),
        ("imagefolder", True, None, "no class"),
        ("imagefolder", True, 3, "no class"),
        ("imagefolder", True, -1, "no class"),
    ],
)
def test_labels_that_a_format_cannot_hold(
    packed: Packed, tmp_path: Path, name: str, image: bool, label: Any, why: str
) -> None:
    def sample(i: int) -> dict[str, Any]:
        data = small_datasets.jpeg(i) if image or i < 2 else None
        return {"__key__": b"k%d" % i, "image": data, "label": label if i == 2 else 1}

    with pytest.raises(SampleError, match=f"record k2: .*{why}"):
        export(packed([3], sample=sample), tmp_path / "x", format=name)
    assert not (tmp_path / "x").exists()


@pytest.mark.formats
@pytest.mark.skipif(
    not PYTHON.exists(),
    reason="NOT RUN: webdataset, mosaicml-streaming, tfrecord. tools/setup-formats installs them",
)
def test_the_tools_of_the_formats_read_what_is_written(packed: Packed, tmp_path: Path) -> None:
    full = packed([9, 0, N - 9], fields=FIELDS, sample=rich)
    gaps = packed([9, 0, N - 9], "gaps", fields=FIELDS, sample=some_none)
    odd = written(
        tmp_path / "odd", *(b"\xff" * 120, b"d" * 150 + b"/\xfe", b"new\nline", b"a b", b"__x__")
    )
    pairs = []
    for name, out, options in (
        ("webdataset", gaps, {"shard_size": 20_000}),
        ("webdataset", odd, {}),
        ("mds", full, {"shard_size": 6000}),
        ("tfrecord", gaps, {"shard_size": 8000}),
        ("lmdb-caffe", gaps, {"fields": {"image": "image", "label": "label"}}),
    ):
        folder = tmp_path / f"as{len(pairs)}"
        export(out, folder, format=name, **options)
        pairs += [name, folder]
    ran = subprocess.run(
        [PYTHON, HERE / "read.py", *pairs], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ran.returncode == 0, ran.stderr
    tars, odds, columns, examples, datums = [
        [decoded(one) for one in found] for found in json.loads(ran.stdout)
    ]

    names = {"image": "jpg", "label": "cls", "caption": "caption.txt", "boxes": "boxes.npy"}
    names |= {name: f"{name}.json" for name in ("meta", "score", "good", "big")}
    assert [len(found) for found in (tars, columns, examples, datums)] == [N] * 4
    for i in range(N):
        expected = some_none(i)
        key = expected.pop("__key__")
        values = {n: value for n, value in expected.items() if value is not None}
        tar = tars[i]
        assert tar.pop("__key__") == key.decode().removesuffix(".jpg")
        assert tar.keys() == {names.get(n, n) for n in values}
        assert all(equal(tar[names.get(n, n)], value) for n, value in values.items())

        datum = {"key": b"%08d_%b" % (i, key), "data": values["image"], "encoded": True}
        assert datums[i] == datum | {"label": values.get("label")}

        features = examples[i]
        assert features.pop("key") == key
        shape = features.pop("boxes/shape", None)
        assert features.keys() == values.keys()
        for n, value in values.items():
            if n == "meta":
                assert json.loads(features[n]) == value
            elif n == "boxes":
                assert np.array_equal(features[n].reshape(shape), value)
            elif isinstance(value, (str, bytes)):
                assert features[n] == (value.encode() if isinstance(value, str) else value)
            else:
                assert features[n].tolist() == [value]

        column = columns[i]
        whole = rich(i)
        assert column.pop("image") == {"image": "JPEG", "size": [24, 16]}
        assert column.pop("key") == whole.pop("__key__").decode()
        del whole["image"]
        assert column.keys() == whole.keys()
        assert all(equal(column[n], value) for n, value in whole.items())
    keys = [os.fsencode(one["__key__"]) for one in odds]
    assert keys == [b"\xff" * 120, b"d" * 150 + b"/\xfe", b"new\nline", b"a b", b"__x__"]
