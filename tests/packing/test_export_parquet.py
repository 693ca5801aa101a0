"""`export --format parquet`: what the Hub and `datasets` find in the files, and shardio again."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import small_datasets
from support.trees import plant

from shardio import Writer, export, pack
from shardio import open as open_dataset
from shardio.errors import ExistsError, OptionError, SampleError
from shardio.packing.index import index

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "arrow"
FILES = pa.struct({"bytes": pa.binary(), "path": pa.string()})
CLASSES = ["cat", 'd"o\\g', "c: é\u2028\x7f🐕"]
FIELDS = {
    **{"image": "image", "label": "int", "caption": "str", "meta": "json", "boxes": "array"},
    **{"score": "float", "good": "bool", "raw": "bytes", "image.path": "str", "wörter": "str"},
}


def rich(i: int) -> dict[str, Any]:
    """A record with a field of every kind; None here and there."""
    sample: dict[str, Any] = {
        "__key__": b"class%d/%06d.jpg" % (i % 3, i),
        "image": small_datasets.jpeg(i),
        "label": i % 3,
        "caption": f"a “caption”, number {i}\n" * (i % 3),
        "meta": {"a": [i, None, -1.5, True], "b": "ü"},
        "boxes": np.arange(4 * (i % 3), dtype=np.float32).reshape(-1, 4) / 3,
        "score": i / 8,
        "good": i % 2 == 0,
        "raw": bytes(range(i)),
        "image.path": f"{i}.jpg",
        "wörter": "x",
    }
    names = list(FIELDS)
    if i % 2:
        sample[names[i // 2 % len(names)]] = None
    return sample


def write(
    folder: Path,
    samples: list[dict[str, Any]],
    fields: dict[str, str] = FIELDS,
    classes: list[str] | None = None,
) -> Path:
    with Writer(folder, fields=fields, classes=classes) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


def numbers(kind: str, *values: Any) -> list[dict[str, Any]]:
    return [{"__key__": b"%d" % i, "x": value} for i, value in enumerate(values)]


def features(path: Path) -> dict[str, Any]:
    written = pq.read_schema(path).metadata[b"huggingface"]
    found: dict[str, Any] = json.loads(written)["info"]["features"]
    return found


def test_columns_hold_the_values_and_features_say_what_they_are(tmp_path: Path) -> None:
    samples = [rich(i) for i in range(30)]
    out = write(tmp_path / "out", samples, classes=CLASSES)
    done = export(out, tmp_path / "hub", format="parquet")
    assert done.records == 30 and done.notes == []
    assert done.fields["boxes"] == "boxes (list of list of float32)"
    assert done.fields["image.path"] == "image.path"
    [path] = (tmp_path / "hub" / "data").iterdir()
    assert path.name == "train-00000-of-00001.parquet"
    table = pq.read_table(path)
    assert table.schema.field("image").type == FILES
    for row, sample in zip(table.to_pylist(), samples, strict=True):
        own = sample.pop("image.path")
        image = None if sample["image"] is None else {"bytes": sample["image"], "path": own}
        key, meta, boxes = sample["__key__"].decode(), sample["meta"], sample["boxes"]
        assert (row["meta"] is None) == (meta is None)
        expected = sample | {"__key__": key, "image": image}
        expected["meta"] = None if meta is None else json.dumps(meta)
        expected["boxes"] = None if boxes is None else boxes.tolist()
        assert row == expected
    value = {"_type": "Value"}
    assert features(path) == {
        "__key__": {"dtype": "string"} | value,
        "image": {"_type": "Image"},
        "label": {"names": CLASSES, "_type": "ClassLabel"},
        "caption": {"dtype": "string"} | value,
        "meta": {"dtype": "string"} | value,
        "boxes": {
            "feature": {"feature": {"dtype": "float32"} | value, "_type": "Sequence"},
            "_type": "Sequence",
        },
        "score": {"dtype": "float64"} | value,
        "good": {"dtype": "bool"} | value,
        "raw": {"dtype": "binary"} | value,
        "wörter": {"dtype": "string"} | value,
    }


def test_shardio_reads_it_back_with_keys_and_classes(tmp_path: Path) -> None:
    out = write(tmp_path / "out", [rich(i) for i in range(30)], classes=CLASSES)
    export(out, tmp_path / "hub", format="parquet", shard_size="20KB")
    assert len(list((tmp_path / "hub" / "data").iterdir())) > 1
    done = index(tmp_path / "hub", jobs=1)
    assert done.shards > 1 and done.classes == 3
    back, data = (open_dataset(one, decode=None) for one in (tmp_path / "hub", out))
    assert back.classes == CLASSES and back.keys() == data.keys()
    plain = [name for name in FIELDS if name not in ("meta", "boxes", "image.path")]
    for found, right in zip(back, data, strict=True):
        assert found["image.path"] == (right["image.path"] if right["image"] else None)
        assert [found[name] for name in plain] == [right[name] for name in plain]
    pack(tmp_path / "hub", tmp_path / "again")
    assert [one["image"] for one in open_dataset(tmp_path / "again", decode=None)] == [
        one["image"] for one in data
    ]


def test_what_the_card_says(tmp_path: Path) -> None:
    """YAML in which all text is quoted, so that no name is taken for anything else."""
    samples = [rich(i) for i in range(30)]
    out = write(tmp_path / "out", samples, classes=CLASSES)
    export(out, tmp_path / "hub", format="parquet")
    card = (tmp_path / "hub" / "README.md").read_text()
    size = next((tmp_path / "hub" / "data").iterdir()).stat().st_size
    assert card.startswith(
        '---\nconfigs:\n- config_name: default\n  data_files:\n  - split: "train"\n'
        '    path: "data/train-*"\ndataset_info:\n  features:\n  - name: "__key__"\n'
    )
    assert card.endswith(f"  download_size: {size}\n  dataset_size: {card.split()[-2]}\n---\n")
    for part in (
        '  - name: "image"\n    dtype: image\n',
        '  - name: "boxes"\n    sequence:\n      sequence: float32\n',
        "          '1': \"d\\u0022o\\u005cg\"\n",
        "          '2': \"c: é\\u2028\\u007f🐕\"\n",
        "    num_examples: 30\n",
    ):
        assert part in card, part


def test_row_groups_and_files_are_of_a_sensible_size(tmp_path: Path) -> None:
    large = [
        {"__key__": b"%03d" % i, "image": small_datasets.jpeg(i) + bytes(1 << 20)}
        for i in range(40)
    ]
    out = write(tmp_path / "large", large, {"image": "image"})
    export(out, tmp_path / "hub", format="parquet", shard_size="24MiB")
    described = [pq.read_metadata(p) for p in sorted((tmp_path / "hub" / "data").iterdir())]
    assert [one.num_rows for one in described] == [23, 17]
    groups = [one.row_group(i) for one in described for i in range(one.num_row_groups)]
    assert [group.num_rows for group in groups] == [15, 8, 15, 2]
    assert all(group.column(1).compression == "UNCOMPRESSED" for group in groups)
    out = write(tmp_path / "small", numbers("int", *range(2500)), {"x": "int"})
    export(out, tmp_path / "few", format="parquet")
    [path] = (tmp_path / "few" / "data").iterdir()
    described = pq.read_metadata(path)
    found = [described.row_group(i) for i in range(described.num_row_groups)]
    assert [group.num_rows for group in found] == [1000, 1000, 500]
    assert found[0].column(1).has_offset_index


@pytest.mark.parametrize(
    "kind, values, dtype",
    [
        ("int", [1, None, 2**64 - 1], "uint64"),
        ("int", [-(2**63), 2**63 - 1], "int64"),
        ("array", [None, np.array([1, 2], "i2"), np.array([], "i2")], "int16"),
        ("array", [np.array([True])], "bool"),
        ("array", [np.array([0.5, 2], "f2")], "float16"),
    ],
)
def test_types_are_those_that_hold_all_values(
    tmp_path: Path, kind: str, values: list[Any], dtype: str
) -> None:
    out = write(tmp_path / "out", numbers(kind, *values), {"x": kind})
    export(out, tmp_path / "hub", format="parquet")
    [path] = (tmp_path / "hub" / "data").iterdir()
    feature = features(path)["x"]
    assert feature.get("feature", feature)["dtype"] == dtype
    found = pq.read_table(path)["x"].to_pylist()
    assert found == [v.tolist() if isinstance(v, np.ndarray) else v for v in values]


def test_keys_that_are_no_text_are_binary_and_come_back(tmp_path: Path) -> None:
    keys = [b"a", b"\xff\xfe", "é".encode()]
    samples = [{"__key__": key, "x": i} for i, key in enumerate(keys)]
    out = write(tmp_path / "out", samples, {"x": "int"})
    done = export(out, tmp_path / "hub", format="parquet")
    assert done.fields["__key__"] == "__key__ (binary)"
    index(tmp_path / "hub", jobs=1)
    data = open_dataset(tmp_path / "hub", decode=None)
    assert data.keys() == open_dataset(out, decode=None).keys()


@pytest.mark.parametrize(
    "kind, values, message",
    [
        ("int", [-1, 2**64 - 1], "no type has both"),
        ("array", [np.zeros(2, "f4"), np.zeros(2, "f8")], "float64, but others have 1, float32"),
        ("array", [np.zeros(2), np.zeros((2, 2))], "2 dimensions, float64, but others have 1"),
        ("array", [np.zeros((), "f4")], "an array of 0 dimensions"),
        ("array", [np.zeros(2, "c8")], "complex64"),
        ("json", [{"a": b"\x00"}], "bytes, which JSON has no room for"),
    ],
)
def test_values_that_no_column_holds_are_refused(
    tmp_path: Path, kind: str, values: list[Any], message: str
) -> None:
    out = write(tmp_path / "out", numbers(kind, *values), {"x": kind})
    with pytest.raises(SampleError, match=message):
        export(out, tmp_path / "hub", format="parquet")
    assert not (tmp_path / "hub").exists()


def test_splits_lie_in_one_folder_and_stand_in_the_card(tmp_path: Path) -> None:
    names = [f"{name}/{one}/{i}.jpg" for name in ("train", "val") for one in "ab" for i in "012"]
    tree = {name: small_datasets.jpeg(i) for i, name in enumerate(names)}
    out = tmp_path / "out"
    pack(plant(tmp_path / "src", tree), out, jobs=1)
    export(out, tmp_path / "hub", format="parquet")
    names = sorted(path.name for path in (tmp_path / "hub" / "data").iterdir())
    assert names == [f"{split}-00000-of-00001.parquet" for split in ("train", "val")]
    card = (tmp_path / "hub" / "README.md").read_text()
    assert '  - split: "val"\n    path: "data/val-*"\n' in card
    assert card.count("num_examples: 6\n") == 2
    for part in ("1/2", "2/2"):
        export(out, tmp_path / "parts", format="parquet", part=part)
    export(out, tmp_path / "parts", format="parquet")
    for split in ("train", "val"):
        tables = [
            pa.concat_tables(
                pq.read_table(path)
                for path in sorted((tmp_path / one / "data").glob(f"{split}-*-of-*.parquet"))
            )
            for one in ("hub", "parts")
        ]
        assert tables[0].equals(tables[1])
        assert len(list((tmp_path / "parts" / "data").glob(f"{split}-*-of-00002.*"))) == 2


def test_parts_without_records_leave_no_files(tmp_path: Path) -> None:
    out = write(tmp_path / "out", numbers("int", 1, 2), {"x": "int"})
    for part in range(1, 6):
        export(out, tmp_path / "hub", format="parquet", part=(part, 5))
    export(out, tmp_path / "hub", format="parquet")
    found = sorted((tmp_path / "hub" / "data").iterdir())
    assert [pq.read_metadata(path).num_rows for path in found] == [1, 1]
    assert found[-1].name == "train-00001-of-00002.parquet"


def test_splits_that_are_no_one_dataset_are_refused(tmp_path: Path) -> None:
    """Such as one without masks."""
    image = small_datasets.jpeg(0)
    tree = {"train/images/a.jpg": image, "train/masks/a.jpg": image, "val/images/b.jpg": image}
    pack(plant(tmp_path / "src", tree), tmp_path / "out", jobs=1)
    with pytest.raises(OptionError, match=r"splits train and val .* export each by itself"):
        export(tmp_path / "out", tmp_path / "hub", format="parquet")
    assert not (tmp_path / "hub").exists()
    assert export(tmp_path / "out" / "val", tmp_path / "hub", format="parquet").records == 1


def test_a_split_whose_name_the_hub_has_not_is_refused(tmp_path: Path) -> None:
    pack(GOLDEN / "splits", tmp_path / "out", jobs=1)
    with pytest.raises(OptionError, match="no split called 'fold a'"):
        export(tmp_path / "out", tmp_path / "hub", format="parquet")
    assert not (tmp_path / "hub").exists()


def test_a_card_that_no_export_wrote_is_not_replaced(tmp_path: Path) -> None:
    out = write(tmp_path / "out", numbers("int", 1, 2), {"x": "int"})
    plant(tmp_path / "hub", {"README.md": b"mine"})
    with pytest.raises(ExistsError, match=r"no export wrote here.*README\.md"):
        export(out, tmp_path / "hub", format="parquet", overwrite=True)
    assert (tmp_path / "hub" / "README.md").read_bytes() == b"mine"


def test_an_export_over_its_own_source_is_refused(tmp_path: Path) -> None:
    out = write(tmp_path / "out", numbers("int", 1, 2), {"x": "int"})
    hub = tmp_path / "hub"
    export(out, hub, format="parquet")
    index(hub, out=tmp_path / "idx", jobs=1)
    with pytest.raises(OptionError, match="the dataset is there itself"):
        export(tmp_path / "idx", hub, format="parquet", root=hub, overwrite=True)


def test_equal_datasets_give_equal_files(tmp_path: Path) -> None:
    out = write(tmp_path / "out", [rich(i) for i in range(9)], classes=CLASSES)
    for name in ("one", "two"):
        export(out, tmp_path / name, format="parquet")
    found = subprocess.run(
        ["diff", "-r", tmp_path / "one", tmp_path / "two"], capture_output=True, text=True
    )
    assert (found.returncode, found.stdout) == (0, "")
