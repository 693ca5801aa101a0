"""Export: each format read back, by small readers of its published layout and by its own tool.

The tools are in an environment of their own (tools/setup-formats), and so is the program that runs
them, formats/read.py. MXNet is not among them, as its last release does not install on today's
Python: RecordIO is checked by its published layout alone, and so are DALI's indexes.
"""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from support import LIMIT_S, small_datasets
from support.trees import command, content, environment, picture, plant, shardio, shardio_json

from shardio import open as open_dataset
from shardio.errors import (
    DamageError,
    ExistsError,
    OptionError,
    SampleError,
    ShardioError,
    StorageError,
)
from shardio.packing.export import export
from shardio.packing.index import index
from shardio.packing.options import PlanOptions
from shardio.packing.pack import pack
from shardio.packing.receipt import NAME as RECEIPT
from shardio.packing.writer import Writer
from shardio.storage import local

Packed = Callable[..., Path]

HERE = Path(__file__).resolve().parent.parent / "format_tools"
PYTHON = HERE / ".venv" / "bin" / "python"
FORMATS = ("webdataset", "tfrecord", "recordio", "mds", "lmdb-caffe", "parquet", "imagefolder")
SHARDED = ("webdataset", "tfrecord", "recordio", "mds", "parquet")
MAGIC = struct.pack("<I", 0xCED7230A)
N = 23

FIELDS = (
    *(("__key__", "key"), ("image", "image"), ("label", "int"), ("caption", "str")),
    *(("meta", "json"), ("boxes", "array"), ("score", "float"), ("good", "bool")),
    *(("raw", "bytes"), ("big", "int")),
)


def rich(i: int) -> dict[str, Any]:
    """A record with a field of every kind."""
    return {
        "__key__": b"class%d/%06d.jpg" % (i % 3, i),
        "image": small_datasets.jpeg(i),
        "label": i % 3,
        "caption": f"a “caption”, number {i}\n" * (i % 3),
        "meta": {"a": [i, None, -1.5, True], "b": "ü"},
        "boxes": np.arange(4 * (i % 3 + 1), dtype=np.float32).reshape(-1, 4) / 3,
        "score": i / 8,
        "good": i % 2 == 0,
        "raw": bytes(range(i)) + MAGIC,
        "big": (-1) ** i * (1 << 62),
    }


def some_none(i: int) -> dict[str, Any]:
    """As `rich`, with None here and there; never the image."""
    sample = rich(i)
    for at, name in enumerate(("caption", "meta", "boxes", "score", "good", "raw", "big", "label")):
        if i % 9 == at:
            sample[name] = None
    return sample


@pytest.fixture
def wide(packed: Packed) -> Path:
    return packed([9, 0, N - 9], fields=FIELDS, sample=rich)


@pytest.fixture
def plain(packed: Packed) -> Path:
    return packed([9, 0, N - 9], "plain", image=small_datasets.jpeg)


def left(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


# --- readers, by the published layouts ------------------------------------------------------------


def tar_samples(path: Path) -> list[tuple[str, dict[str, bytes]]]:
    """As webdataset groups the members of a tar file."""
    samples: list[tuple[str, dict[str, bytes]]] = []
    with tarfile.open(path) as archive:
        for member in archive:
            key, extension = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", member.name).groups()
            if not samples or samples[-1][0] != key:
                samples.append((key, {}))
            assert extension not in samples[-1][1]
            samples[-1][1][extension] = archive.extractfile(member).read()
    return samples


def tar_index(path: Path, names: bool = True) -> str:
    """What DALI's wds2idx says of a tar file."""
    lines: list[tuple[str, list[str]]] = []
    with tarfile.open(path) as archive:
        for member in archive:
            dot = member.name.find(".", member.name.rfind("/") + 1)
            stem, extension = member.name[:dot], member.name[dot + 1 :]
            if not lines or lines[-1][0] != stem:
                lines.append((stem, []))
            place = f"{extension} {member.offset_data} {member.size}"
            lines[-1][1].append(f"{place} {member.name}" if names else place)
    head = f"v1.{2 if names else 1} {len(lines)}"
    return "\n".join([head, *(" ".join(parts) for _, parts in lines), ""])


def crc32c(data: bytes) -> int:
    """Bit by bit (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def tf_records(path: Path) -> list[bytes]:
    data, at, records, lines = path.read_bytes(), 0, [], []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        body = data[at + 12 : at + 12 + length]
        seals = struct.unpack_from("<I", data, at + 8) + struct.unpack_from(
            "<I", data, at + 12 + length
        )
        assert seals == (crc32c(data[at : at + 8]), crc32c(body))
        lines.append(f"{at} {length + 16}\n")
        records.append(body)
        at += length + 16
    assert path.with_suffix(".idx").read_text() == "".join(lines)
    return records


def message(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: numbers, and bytes or integers."""

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    at = 0
    while at < len(data):
        tag = varint()
        value: Any = varint()
        if tag & 7 == 2:
            value, at = data[at : at + value], at + value
            assert at <= len(data)
        yield tag >> 3, value


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def integers(data: bytes) -> list[int]:
    """Packed varints, told from fields by a tag before each."""
    values, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            values.append(signed(value))
            value = shift = 0
    return values


def example(data: bytes) -> dict[str, Any]:
    """The features of a tf.train.Example as lists."""
    ((_, features),) = message(data)
    found = {}
    for _, entry in message(features):
        parts = dict(message(entry))
        ((kind, values),) = message(parts[2])
        elements = [value for _, value in message(values)]
        if kind == 2:
            elements = np.frombuffer(elements[0], "<f4").tolist()
        elif kind == 3:
            elements = integers(elements[0])
        found[parts[1].decode()] = elements
    return found


def rec_records(path: Path) -> list[bytes]:
    data, at, records, begins = path.read_bytes(), 0, [], []
    parts: list[bytes] = []
    while at < len(data):
        magic, word = struct.unpack_from("<4sI", data, at)
        kind, length = word >> 29, word & (1 << 29) - 1
        assert magic == MAGIC and (kind in (0, 1)) == (not parts)
        if not parts:
            begins.append(at)
        parts.append(data[at + 8 : at + 8 + length])
        assert not any(data[at + 8 + length : at + 8 + (length + 3) // 4 * 4])
        at += 8 + (length + 3) // 4 * 4
        if kind in (0, 3):
            records.append(MAGIC.join(parts))
            parts = []
    index = [line.split("\t") for line in path.with_suffix(".idx").read_text().splitlines()]
    assert [int(offset) for _, offset in index] == begins
    return records


def mds_samples(folder: Path) -> list[dict[str, Any]]:
    decode = {
        "int": lambda data: struct.unpack("<q", data)[0],
        "uint64": lambda data: struct.unpack("<Q", data)[0],
        "float64": lambda data: struct.unpack("<d", data)[0],
        "str": bytes.decode,
        "json": json.loads,
        "ndarray": mds_array,
    }
    index = json.loads((folder / "index.json").read_text())
    assert index["version"] == 2
    samples = []
    for shard in index["shards"]:
        data = (folder / shard["raw_data"]["basename"]).read_bytes()
        assert len(data) == shard["raw_data"]["bytes"] <= shard["size_limit"]
        assert sha256(data).hexdigest() == shard["raw_data"]["hashes"]["sha256"]
        assert shard["column_names"] == sorted(shard["column_names"])
        (count,) = struct.unpack_from("<I", data)
        offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
        assert count == shard["samples"] and offsets[-1] == len(data)
        config = json.loads(data[8 + 4 * count : offsets[0]])
        assert config.items() <= shard.items()
        for begin, end in pairwise(offsets):
            record, at, sizes = data[begin:end], 0, []
            for size in shard["column_sizes"]:
                if size is None:
                    (size,) = struct.unpack_from("<I", record, at)
                    at += 4
                sizes.append(size)
            sample = {}
            for name, encoding, size in zip(
                shard["column_names"], shard["column_encodings"], sizes, strict=True
            ):
                sample[name] = decode.get(encoding, bytes)(record[at : at + size])
                at += size
            assert at == len(record)
            samples.append(sample)
    return samples


def mds_array(data: bytes) -> np.ndarray[Any, Any]:
    dtype = {8: "u1", 34: "<f4", 65: "<i8"}[data[0]]
    count, width = data[1] >> 2, 1 << data[1] % 4
    shape = np.frombuffer(data[2 : 2 + count * width], f"<u{width}")
    return np.frombuffer(data[2 + count * width :], dtype).reshape(shape)


def caffe_samples(folder: Path) -> dict[bytes, dict[int, Any]]:
    with lmdb.open(str(folder), readonly=True, lock=False) as opened, opened.begin() as transaction:
        return {key: dict(message(value)) for key, value in transaction.cursor()}


def equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        same: bool = found.dtype == expected.dtype and np.array_equal(found, expected)
        return same
    return type(found) is type(expected) and bool(found == expected)


# --- each format ----------------------------------------------------------------------------------


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


WITHOUT_LMDB = """
import importlib, os, pkgutil, sys
sys.modules["lmdb"] = None  # importing it is an ImportError, as where it is missing or broken
import shardio
for found in pkgutil.walk_packages(shardio.__path__, "shardio."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
from torch.utils.data import DataLoader
for format in ("record", "lmdb"):
    shardio.pack("src", format, format=format, jobs=1)
    data = shardio.ShardDataset(format, batch_size=4, decode="numpy")
    assert sum(len(b["label"]) for b in DataLoader(data, batch_size=None, num_workers=1)) == 8
    shardio.export(format, f"{format}.tar", format="webdataset")
try:
    shardio.export("record", "caffe", format="lmdb-caffe")
except shardio.DependencyError as error:
    print(error)
print(sorted(os.listdir()))
"""


def test_without_lmdb_only_its_export_is_missing(tmp_path: Path) -> None:
    plant(tmp_path / "src", {f"c{i % 2}/{i}.png": picture(8, 8, "PNG") for i in range(8)})
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_LMDB],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    said, there = found.stdout.splitlines()
    assert said.startswith("export to lmdb-caffe needs the package lmdb, which does not import")
    assert there == "['lmdb', 'lmdb.tar', 'record', 'record.tar', 'src']"


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


def test_splits_become_folders_in_every_format(tmp_path: Path) -> None:
    names = [f"{split}/{c}/{i}.jpg" for split in ("train", "val") for c in "ab" for i in "12"]
    tree = {name: small_datasets.jpeg(i) for i, name in enumerate(names)}
    pack(plant(tmp_path / "src", tree), tmp_path / "out", jobs=1)
    for name in FORMATS:
        done = export(tmp_path / "out", tmp_path / name, format=name)
        receipt = [] if name == "imagefolder" else [RECEIPT]
        there = ["README.md", "data"] if name == "parquet" else ["train", "val"]
        assert left(tmp_path / name) == [*receipt, *there] and done.records == 8
    assert content(tmp_path / "imagefolder") == content(tmp_path / "src")
    assert len(tar_samples(tmp_path / "webdataset" / "val" / "00000.tar")) == 4


# --- names and keys -------------------------------------------------------------------------------


def written(out: Path, *keys: bytes) -> Path:
    return small_datasets.make(
        out,
        [len(keys)],
        fields=FIELDS[:2],
        sample=lambda i: {"__key__": keys[i], "image": small_datasets.jpeg(0)},
        classes=None,
    )


def test_fields_are_chosen_and_renamed(wide: Path, tmp_path: Path) -> None:
    names = {"image": "image/encoded", "label": "image/class/label", "__key__": "image/filename"}
    export(wide, tmp_path / "tf", format="tfrecord", fields=names)
    features = example(tf_records(tmp_path / "tf" / "00000.tfrecord")[4])
    assert features == {
        "image/encoded": [small_datasets.jpeg(4)],
        "image/class/label": [1],
        "image/filename": [b"class1/000004.jpg"],
    }
    export(wide, tmp_path / "mds", format="mds", fields={"image": "x", "label": "y"})
    assert mds_samples(tmp_path / "mds")[4] == {"x": small_datasets.jpeg(4), "y": 1}
    names = {"image": "jpeg", "label": "class.json", "caption": "text"}
    export(wide, tmp_path / "wds", format="webdataset", fields=names)
    _, members = tar_samples(tmp_path / "wds" / "00000.tar")[4]
    assert members == {
        "jpeg": small_datasets.jpeg(4),
        "class.json": b"1",
        "text": rich(4)["caption"].encode(),
    }
    export(wide, tmp_path / "rec", format="recordio", fields={"image": "image", "score": "label"})
    record = rec_records(tmp_path / "rec" / "00000.rec")[4]
    assert struct.unpack_from("<If", record) == (0, 0.5)


def test_extensions_that_fields_have_already_are_kept(packed: Packed, tmp_path: Path) -> None:
    values = {
        **{
            "jpg": small_datasets.jpeg(1),
            "seg.png": picture(4, 4, "PNG"),
            "txt": "t",
            "json": {"a": 1},
        },
        **{"npy": np.arange(3), "cls": 3, "pkl": b"x", "mp4": b"y", "image/height": 4},
    }
    kinds = ("image", "image", "str", "json", "array", "int", "bytes", "bytes", "int")
    fields = (("__key__", "key"), *zip(values, kinds, strict=True))
    out = packed([1], fields=fields, sample=lambda i: {"__key__": b"k", **values})
    export(out, tmp_path / "wds", format="webdataset")
    ((_, members),) = tar_samples(tmp_path / "wds" / "00000.tar")
    # not pkl: webdataset would run what it unpickles, and the value is bytes
    expected = {
        "jpg",
        "seg.png",
        "txt",
        "json",
        "npy",
        "cls",
        "pkl.bin",
        "mp4",
        "image_height.json",
    }
    assert members.keys() == expected


def test_images_are_called_what_they_are(packed: Packed, tmp_path: Path) -> None:
    kinds = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
    images = [picture(9, 9, kind) for kind in kinds]
    sample = {"__key__": b"k/%d.JPEG", "label": 0}
    out = packed([6], sample=lambda i: sample | {"__key__": b"k/%d.JPEG" % i, "image": images[i]})
    done = export(out, tmp_path / "wds", format="webdataset")
    found = tar_samples(tmp_path / "wds" / "00000.tar")
    types = [next(iter(members)) for _, members in found]
    assert types == ["jpg", "png", "webp", "gif", "bmp", "tif"]
    assert [members.popitem()[1] for _, members in found] == [b"0"] * 6
    assert [members.popitem()[1] for _, members in found] == images
    assert done.fields["image"] == "bmp/gif/jpg/png/tif/webp"


@pytest.mark.parametrize(
    "key",
    [
        *(b"a.b/c", b"\xff\xfe/\x80", b"x" * 99, b"d" * 200 + b"/x", b"y" * 1500),
        *("ü/ä".encode(), ("ü" * 90).encode(), b"\xff" * 300, b"d" * 155 + b"/" + b"x" * 96),
        *(b"d/" * 200 + b"x", b"tab\there", b"new\nline", b"with blank", b" ", b"a__b", b"__x__"),
        b"d" * 156 + b"/" + b"x" * 90,
    ],
)
def test_odd_keys_come_back_from_tar_files(tmp_path: Path, key: bytes) -> None:
    export(written(tmp_path / "out", key), tmp_path / "wds", format="webdataset")
    path = tmp_path / "wds" / "00000.tar"
    ((found, members),) = tar_samples(path)
    assert os.fsencode(found) == key and members == {"jpg": small_datasets.jpeg(0)}
    blank = key.split() != [key]
    said = path.with_suffix(".idx").read_bytes()
    assert said == os.fsencode(tar_index(path, names=not blank))  # v1.1 has no names to be split


@pytest.mark.parametrize(
    "key",
    [
        *(b"a.b", b"v1.2/x.y", b".hidden", b"a/.b", b"__x__/y", b"____/y", b"/abs", b"a//b"),
        *(b"../x", b"a/../b", b"./x", b"x/", b"a\0b", b"1.2.jpg", b".jpg"),
    ],
)
def test_keys_that_webdataset_would_split_or_skip_are_refused(tmp_path: Path, key: bytes) -> None:
    out = written(tmp_path / "out", b"good", key)
    if b"\0" in key:
        assert open_dataset(out).stored_keys()[1] == key
    with pytest.raises(OptionError, match="--keys number"):
        export(out, tmp_path / "wds", format="webdataset")
    assert not (tmp_path / "wds").exists()
    export(out, tmp_path / "wds", format="webdataset", keys="number")
    found = tar_samples(tmp_path / "wds" / "00000.tar")
    assert [key for key, _ in found] == ["00000000", "00000001"]


def test_two_keys_that_are_one_without_their_endings_are_refused(tmp_path: Path) -> None:
    out = written(tmp_path / "out", b"a/1.jpg", b"b", b"a/1.png")
    with pytest.raises(OptionError, match=r"a/1\.jpg and a/1\.png are one"):
        export(out, tmp_path / "wds", format="webdataset")


@pytest.mark.parametrize(
    "keys", [(b"a", b"a"), (b"a", b"a.jpg"), (b"a.jpg", b"a.jpg/b"), (b"a.jpg/b", b"a.jpg")]
)
def test_paths_that_cannot_be_side_by_side_are_refused(
    tmp_path: Path, keys: tuple[bytes, bytes]
) -> None:
    out = written(tmp_path / "out", *keys)
    with pytest.raises(OptionError, match="--keys number"):
        export(out, tmp_path / "back", format="imagefolder")
    assert not (tmp_path / "back").exists()
    export(out, tmp_path / "back", format="imagefolder", keys="number")
    assert left(tmp_path / "back") == ["00000000.jpg", "00000001.jpg"]


@pytest.mark.parametrize("key", [b"../x", b"/x", b"a/../../x", b"a//b", b"a\0"])
def test_no_key_leads_out_of_the_directory(tmp_path: Path, key: bytes) -> None:
    with pytest.raises(OptionError, match="no path within"):
        export(written(tmp_path / "out", key), tmp_path / "back", format="imagefolder")
    assert left(tmp_path) == ["out"]


def test_keys_too_long_for_lmdb_are_refused(tmp_path: Path) -> None:
    export(written(tmp_path / "out", b"x" * 502), tmp_path / "db", format="lmdb-caffe")
    assert list(caffe_samples(tmp_path / "db")) == [b"00000000_" + b"x" * 502]
    with pytest.raises(OptionError, match=r"503 bytes long.*--keys number"):
        export(written(tmp_path / "long", b"x" * 503), tmp_path / "db2", format="lmdb-caffe")


# --- what a format cannot hold --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["recordio", "lmdb-caffe", "imagefolder"])
def test_fields_without_room_are_named_with_the_way_out(
    wide: Path, tmp_path: Path, name: str
) -> None:
    with pytest.raises(OptionError) as caught:
        export(wide, tmp_path / "x", format=name)
    assert "caption (str), meta (json)" in str(caught.value)
    assert "--fields image=image,label=label" in str(caught.value)
    export(wide, tmp_path / "x", format=name, fields={"image": "image", "label": "label"})


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


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (["nothing"], "no field is called 'nothing'; there are __key__, image"),
        ("image", "expected a list"),
        ({"caption": "a/b"}, "an extension is letters"),
        ({"caption": "npy"}, "choose .txt or json"),
        ({"boxes": "json"}, "choose .npy"),
        ({"good": "cls"}, "choose .json"),
        ({"caption": "x", "raw": "X"}, "two fields would be called 'x'"),
        (["__key__"], "is no field in webdataset"),
    ],
)
def test_wrong_fields_are_refused(wide: Path, tmp_path: Path, fields: Any, why: str) -> None:
    with pytest.raises(OptionError, match=re.escape(why)):
        export(wide, tmp_path / "x", format="webdataset", fields=fields)
    assert not (tmp_path / "x").exists()


def test_a_key_that_webdataset_would_split_is_told_with_what_to_do(tmp_path: Path) -> None:
    source = plant(
        tmp_path / "src", {"a/1.jpg": small_datasets.jpeg(1), "a/2.1.jpg": small_datasets.jpeg(2)}
    )
    pack(source, tmp_path / "out", jobs=1, plan=PlanOptions(shuffle=False))

    def said(folder: str, **options: Any) -> str:
        with pytest.raises(OptionError) as caught:
            export(tmp_path / folder, tmp_path / "wds", format="webdataset", **options)
        return str(caught.value)

    assert said("out").endswith(
        "the key a/2.1.jpg has a dot in its last part, and webdataset splits names at the first "
        "one: it would read a/2 as the key, and 1 as a part of the field. --keys number names the "
        "records by their numbers"
    )
    without = said("out", fields={"label": "cls"})  # so the ending of the image's file stays
    assert "a/1.jpg has a dot" in without and "and jpg as a part" in without
    assert without.endswith("or write the image, too, whose ending goes: --fields image,...")
    export(tmp_path / "out", tmp_path / "numbers", format="webdataset", keys="number")
    with Writer(tmp_path / "odd") as writer:
        writer.write({"__key__": "a//b", "n": 1})
    assert "the key a//b is no path of a file in a tar" in said("odd")


def test_wrong_options_are_refused(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    for options, why in (
        ({"format": "zip"}, "webdataset, tfrecord, recordio"),
        ({"format": "mds", "keys": "none"}, "'own' or 'number'"),
        ({"format": "imagefolder", "shard_size": 5}, "no shards"),
        ({"format": "mds", "shard_size": "5 bananas"}, "shard_size"),
    ):
        with pytest.raises(OptionError, match=why):
            export(plain, out, **options)
    with pytest.raises(OptionError, match="the dataset is there itself"):
        export(plain, plain, format="imagefolder", overwrite=True)
    export(plain, out, format="webdataset")
    index(out, out=tmp_path / "idx", jobs=1)
    with pytest.raises(OptionError, match="the dataset is there itself"):
        export(tmp_path / "idx", out, format="webdataset", root=out, overwrite=True)
    shutil.rmtree(out)
    classless = tmp_path / "classless"
    small_datasets.make(classless, [2], image=small_datasets.jpeg, classes=None)
    with pytest.raises(OptionError, match="--fields image"):
        export(classless, out, format="imagefolder")
    export(classless, out, format="imagefolder", fields=["image"])
    assert content(out)[b"k/000001.jpg"] == small_datasets.jpeg(1)


# --- all or nothing -------------------------------------------------------------------------------


def hashes(folder: Path) -> dict[bytes, Any]:
    return {name: data and sha256(data).digest() for name, data in content(folder).items()}


@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_follow_from_the_dataset(plain: Path, tmp_path: Path, name: str) -> None:
    size = {"shard_size": 14_000} if name in SHARDED else {}
    for out in ("a", "b"):
        export(plain, tmp_path / out, format=name, **size)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    shards = [path for path in (tmp_path / "a").glob("*.*") if size and path.suffix != ".idx"]
    assert all(path.stat().st_size <= 14_000 for path in shards)


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_record_leaves_nothing(plain: Path, tmp_path: Path, name: str) -> None:
    shard = small_datasets.shard_files(plain)[-1]
    small_datasets.flip(shard, shard.stat().st_size // 2)
    for made in (False, True):
        if made:
            (tmp_path / "x").mkdir()
        with pytest.raises(DamageError):
            export(plain, tmp_path / "x", format=name)
        assert (tmp_path / "x").exists() == made and left(tmp_path / "x") == []


@pytest.mark.parametrize("name", FORMATS)
def test_an_interrupt_leaves_nothing(plain: Path, tmp_path: Path, name: str) -> None:
    def interrupt(done: int, total: int) -> None:
        assert total == N
        if done == N - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(plain, tmp_path / "a" / "x", format=name, progress=interrupt)
    assert left(tmp_path / "a") == []


@pytest.mark.parametrize("name", FORMATS)
def test_a_full_disk_leaves_nothing(packed: Packed, tmp_path: Path, name: str) -> None:
    out = packed([6], image=lambda i: small_datasets.jpeg(i) + bytes(200_000))
    code = (
        "import resource, signal, sys; from shardio import export, StorageError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))\n"
        "try: export(sys.argv[1], sys.argv[2], format=sys.argv[3])\n"
        "except StorageError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, out, tmp_path / "x", name],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "cannot" in done.stdout
    assert not (tmp_path / "x").exists()


def test_a_killed_export_leaves_one_hidden_folder_and_may_be_repeated(
    plain: Path, tmp_path: Path
) -> None:
    code = (
        "import os, signal, sys; from shardio import export\n"
        "def kill(done, total): done == 20 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "export(sys.argv[1], sys.argv[2], format='webdataset', shard_size=5000, progress=kill)\n"
    )
    run = [sys.executable, "-c", code, plain, tmp_path / "x"]
    assert subprocess.run(run, env=environment(), timeout=LIMIT_S).returncode == -signal.SIGKILL
    (name,) = left(tmp_path / "x")
    assert local.is_temporary(name)
    done = export(plain, tmp_path / "x", format="webdataset", shard_size=5000)
    assert len(left(tmp_path / "x")) == done.files + 2  # and the receipt


@pytest.mark.parametrize("name", FORMATS)
def test_a_directory_with_files_is_refused_and_untouched(
    plain: Path, tmp_path: Path, name: str
) -> None:
    plant(tmp_path / "x", {"mine": b"1"})
    with pytest.raises(ExistsError, match="mine is in it"):
        export(plain, tmp_path / "x", format=name)
    assert content(tmp_path / "x") == {b"mine": b"1"}


@pytest.mark.parametrize("name", FORMATS)
def test_overwriting_replaces_what_an_older_export_wrote(
    plain: Path, packed: Packed, tmp_path: Path, name: str
) -> None:
    size = {"shard_size": 12_000} if name in SHARDED else {}
    longer = packed([40], "longer", image=lambda i: small_datasets.jpeg(i + 100))
    first = export(longer, tmp_path / "x", format=name, **size)
    plant(tmp_path / "x", {"mine": b"1", "0.tar": b"2", "sub/00099.tar": b"3"})
    done = export(plain, tmp_path / "x", format=name, overwrite=True, **size)
    export(plain, tmp_path / "y", format=name, **size)
    mine = {b"mine": b"1", b"0.tar": b"2", b"sub": None, b"sub/00099.tar": b"3"}
    found, expected = content(tmp_path / "x"), content(tmp_path / "y") | mine
    if (
        name == "imagefolder"
    ):  # 23 of its 40 files were replaced; no reader takes the others for shards
        assert found.items() >= expected.items() and len(found) == len(expected) + 40 - N
    else:
        assert found == expected
    fewer = first.files - (1 if name == "parquet" else done.files)  # whose names say how many
    assert done.removed == (fewer if name in SHARDED else 0)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("name", ["webdataset", "imagefolder"])
def test_an_export_that_was_killed_between_its_last_renames_goes_on(
    packed: Packed, tmp_path: Path, name: str
) -> None:
    first = packed([25], "first", image=small_datasets.jpeg)
    more = ["--format", name, *(["--shard-size", "6000"] if name == "webdataset" else [])]
    shardio("export", first, tmp_path / "expected", *more)
    out, files = tmp_path / "x", len(left(tmp_path / "expected"))
    # Each shard and its index takes a name in the hidden folder; then the receipt; then all again.
    which = 3 if name == "imagefolder" else files + 3
    inject = f"inject=rename:signal=SIGKILL:when={which}"
    strace = ("strace", "-f", "-qq", "-o", os.devnull, "-e", "trace=rename", "-e", inject)
    run = [*strace, *map(os.fsdecode, command("export", first, out, *more))]
    done = subprocess.run(run, capture_output=True, env=environment(), timeout=LIMIT_S)
    assert done.returncode in (-signal.SIGKILL, 137)
    there = [one for one in left(out) if not one.startswith(".")]
    assert 0 < len(there) < files - (name == "webdataset")
    with pytest.raises(ExistsError, match="is not empty"):
        export(packed([5], "other", image=small_datasets.jpeg), out, format=name)
    plant(out, {"mine.txt": b"1"})
    size = {"shard_size": 6000} if name == "webdataset" else {}
    with pytest.raises(ExistsError, match=r"mine.txt is none of its files"):
        export(first, out, format=name, **size)
    (out / "mine.txt").unlink()
    its = min([out / there[0], *(out / there[0]).rglob("*")], key=os.path.isdir)
    right = its.read_bytes()
    its.write_bytes(b"a user's own")
    with pytest.raises(ExistsError, match=rf"{its.name} is none of its files, or was changed"):
        export(first, out, format=name, **size)
    assert its.read_bytes() == b"a user's own"
    its.write_bytes(right)
    shardio("export", first, out, *more)
    assert content(out) == content(tmp_path / "expected")


@pytest.mark.parametrize("name", [*SHARDED, "lmdb-caffe"])
def test_files_of_others_are_neither_replaced_nor_removed(
    plain: Path, packed: Packed, tmp_path: Path, name: str
) -> None:
    size = {"shard_size": 20_000} if name in SHARDED else {}
    out = tmp_path / "x"
    export(plain, out, format=name, **size)
    files = [path for path in sorted(out.iterdir()) if not path.name.startswith(".")]
    for mistyped in (tmp_path / "mistyped", out):  # the names alone; then one that was changed
        if mistyped != out:
            plant(mistyped, {path.name: b"mine" for path in files})
        else:
            data = files[0].read_bytes()
            files[0].write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        before = content(mistyped)
        with pytest.raises(ExistsError, match=re.escape(files[0].name)):
            export(
                packed([1], "one", image=small_datasets.jpeg), mistyped, format=name, overwrite=True
            )
        assert content(mistyped) == before
        shutil.rmtree(tmp_path / "one")
    files[0].write_bytes(data)
    (out / ".shardio-export").unlink()
    with pytest.raises(ExistsError, match="no export wrote here"):
        export(plain, out, format=name, overwrite=True)


def test_a_receipt_that_was_edited_leads_nowhere(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    export(plain, out, format="webdataset")
    shutil.copy(out / "00000.tar", tmp_path / "00000.tar")
    (tmp_path / "folder").mkdir()
    shutil.copy(out / "00000.tar", tmp_path / "folder")
    (out / "link").symlink_to(tmp_path / "folder")
    text = (out / ".shardio-export").read_text()
    for odd in ("../00000.tar", str(tmp_path / "00000.tar"), "link/00000.tar"):
        found = json.loads(text)
        found["files"][odd] = found["files"]["00000.tar"]
        (out / ".shardio-export").write_text(json.dumps(found))
        with contextlib.suppress(ExistsError):
            export(plain, out, format="webdataset", overwrite=True)
        assert (tmp_path / "00000.tar").exists() and (tmp_path / "folder" / "00000.tar").exists()
    for text in ("", "[]", '{"files": []}', "[" * 10_000, '{"files": {"a": [[1]]}}'):
        (out / ".shardio-export").write_text(text)
        with pytest.raises(ExistsError, match="no export wrote here"):
            export(plain, out, format="webdataset", overwrite=True)


def test_a_link_is_never_followed(plain: Path, tmp_path: Path) -> None:
    plant(tmp_path / "other", {"file": b"1", "folder/x": b"2"})
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "00000.tar").symlink_to(tmp_path / "other" / "file")
    with pytest.raises(ExistsError, match=r"00000\.tar"):
        export(plain, tmp_path / "x", format="webdataset", overwrite=True)
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "cat").symlink_to(tmp_path / "other" / "folder")
    with pytest.raises(StorageError, match="a file or link is where a folder is to be"):
        export(plain, tmp_path / "y", format="imagefolder", overwrite=True)
    assert content(tmp_path / "other") == {b"file": b"1", b"folder": None, b"folder/x": b"2"}


def test_an_empty_dataset_is_exported(packed: Packed, tmp_path: Path) -> None:
    out = packed([0])
    for name in FORMATS:
        done = export(out, tmp_path / name, format=name)
        assert done.records == 0
    assert json.loads((tmp_path / "mds" / "index.json").read_text())["shards"] == []


# --- the command ----------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote(wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    said = shardio(
        *("export", wide, out, "--format", "webdataset", "--shard-size", "20KB"),
        *("--fields", "image,label=class.cls,caption"),
    ).stdout
    assert f"{out}: webdataset: 23 records in " in said
    assert "fields: image as jpg, label as class.cls, caption as caption.txt\n" in said
    shardio("export", wide, out, "--format", "webdataset", code=1)
    done = shardio_json("export", wide, out, "--format", "tfrecord", "--overwrite", "--quiet")
    assert done["records"] == 23 and done["fields"]["__key__"] == "key"
    assert "score" in done["notes"][0]
    shardio("export", wide, out, "--format", "mds", "--fields", "image=,label", code=2)


# --- the formats' own tools -----------------------------------------------------------------------


def decoded(value: Any) -> Any:
    """What formats/read.py says of a value, as the value."""
    if isinstance(value, Mapping):
        if value.keys() == {"bytes"}:
            return bytes.fromhex(value["bytes"])
        if value.keys() == {"array"}:
            dtype, items = value["array"]
            return np.array(items, dtype)
        return {name: decoded(one) for name, one in value.items()}
    return value


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


def test_only_errors_of_our_own_are_raised_for_a_cut_source(plain: Path, tmp_path: Path) -> None:
    shard = small_datasets.shard_files(plain)[-1]
    whole = shard.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        shard.write_bytes(whole[:size])
        with pytest.raises(ShardioError):
            export(plain, tmp_path / "x", format="webdataset")
        assert not (tmp_path / "x").exists()
