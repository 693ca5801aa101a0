"""MosaicML MDS: files by mosaicml-streaming, every encoding, lists of shards, damage."""

import json
import math
import random
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conformance import IndexedConformance, same, same_all
from support.conformance import sample as make_sample
from support.forging import memory_below
from support.mds_writer import COLUMNS, NAMES, build, encode, read, samples, save, shards

import shardio
from shardio.dataset import sequence as sequences
from shardio.errors import DamageError, ShardioError, SourceError
from shardio.formats.foreign import base as foreign
from shardio.formats.foreign import mds
from shardio.formats.foreign.mds import MdsFile
from shardio.names import KEY
from shardio.packing import index as indexing
from shardio.storage.location import locate

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "mds"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


def one(folder: Path, kind: str, value: bytes, **change: Any) -> Any:
    """The value that a shard of one column and one sample has."""
    save(folder, {"shard.00000.mds": build({"x": kind}, [{"x": value}], **change)})
    [values] = read(folder, "shard.00000.mds")
    return values["x"]


def refused(folder: Path, match: str, kind: str, value: bytes) -> None:
    with pytest.raises(ValueError, match=f"column 'x': .*{match}"):
        one(folder, kind, value)


# --- what mosaicml-streaming wrote ----------------------------------------------------------------


def shard_names(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("shard.*")
        if re.search(NAMES, path.name)
    )


def matches(value: Any, expected: dict[str, Any]) -> bool:
    """Whether a value is what LocalDataset read; see tagged() in tests/golden/make_mds.py."""
    [(kind, wanted), *_] = expected.items()
    if kind == "bytes":
        return type(value) is bytes and value.hex() == wanted
    if kind == "array":
        shown = [value.dtype.str, list(value.shape), value.tobytes().hex()]
        return isinstance(value, np.ndarray) and value.flags.owndata and shown == wanted
    if kind == "decimal":
        return same(value, wanted)
    if isinstance(wanted, list) and wanted and isinstance(wanted[0], dict):
        return len(value) == len(wanted) and all(map(matches, value, wanted))
    return same(value, wanted)


def test_every_encoding_is_read_as_its_own_tool_reads_it() -> None:
    folder = GOLDEN / "every"
    assert shard_names(folder) == ["shard.00000.mds", "shard.00001.mds"]
    found = [values for name in shard_names(folder) for values in read(folder, name)]
    assert len(found) == len(EXPECTED["every"]) == 5
    for values, expected in zip(found, EXPECTED["every"], strict=True):
        assert list(values) == list(expected)
        for name, value in values.items():
            wanted = expected[name]
            if isinstance(wanted, list):
                assert isinstance(value, list) and len(value) == len(wanted), name
                assert all(map(matches, value, wanted)), name
            else:
                assert matches(value, wanted), name


# All that mosaicml-streaming writes, but for pickle and arrays.
NUMBERS = (
    *("int", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
ENCODINGS = (
    *("bytes", "jpeg", "jpeg_array", "jpegarray", "json", "list[jpeg]", "list[pil]", "list[png]"),
    *("pil", "png", "str", "str_decimal", "str_float", "str_int"),
)


def test_the_golden_files_have_every_encoding_but_pickle() -> None:
    described = json.loads((GOLDEN / "every" / "index.json").read_text())["shards"][0]
    kinds = {kind.partition(":")[0] for kind in described["column_encodings"]}
    assert kinds == {*NUMBERS, *ENCODINGS, "ndarray"}


@pytest.mark.parametrize("folder", ["merged", "split/train", "split/val", "zstd", "gz", "bz2"])
def test_data_sets_of_its_own_tool_are_read_in_order(folder: str) -> None:
    if folder == "zstd":
        pytest.importorskip("zstandard")
    found = []
    for name in shard_names(GOLDEN / folder):
        found += read(GOLDEN / folder, name)
    assert len(found) == len(EXPECTED[folder])
    for values, expected in zip(found, EXPECTED[folder], strict=True):
        assert list(values) == list(expected)
        assert all(matches(values[name], expected[name]) for name in values)


@pytest.mark.parametrize(("folder", "route"), [("br", "brotli -d --rm "), ("snappy", "python -c")])
def test_other_compressions_are_refused_with_the_way_out(folder: str, route: str) -> None:
    with pytest.raises(SourceError, match=f"{folder} is not read in place.*Inflate it: {route}"):
        read(GOLDEN / folder, f"shard.00000.mds.{folder}")


def test_a_pickled_column_is_refused_and_named() -> None:
    with pytest.raises(SourceError, match=r"column 'x' is pickled.*write it anew.*as json"):
        read(GOLDEN / "pickled", "shard.00000.mds")


# --- through the index, and the dataset -----------------------------------------------------------


@pytest.mark.parametrize("folder", ["merged", "split", "zstd", "gz", "bz2"])
def test_a_folder_is_indexed_and_opened(tmp_path: Path, folder: str) -> None:
    if folder == "zstd":
        pytest.importorskip("zstandard")
    files = "*" if folder == "split" else None  # train and val as one, which must be asked for
    done = indexing.index(GOLDEN / folder, out=tmp_path, files=files, jobs=1)
    expected = EXPECTED.get(folder) or EXPECTED["split/train"] + EXPECTED["split/val"]
    assert (done.format, done.records) == ("mds", len(expected))
    assert done.fields == {KEY: "key", "image": "image", "label": "int", "text": "str"}
    data = sequences.stored(tmp_path, root=GOLDEN / folder)
    for number, wanted in enumerate(expected):
        assert all(matches(data[number][name], wanted[name]) for name in wanted)


def test_sizes_and_sums_in_the_manifest_are_those_of_the_compressed_files(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "gz", tmp_path / "gz")
    done = indexing.index(tmp_path / "gz", jobs=1)
    assert done.bytes == sum(path.stat().st_size for path in (tmp_path / "gz").glob("*.gz"))
    found = shardio.verify(tmp_path / "gz", sha256=True, jobs=1)
    assert (found.records, found.damages) == (8, [])


class TestMdsConformance(IndexedConformance):
    """The key is a column; there is no None but in json, no bool but there, no empty array."""

    FILE = MdsFile
    COLUMNS = (  # not in the order of the fields, nor of their names
        ("label", "int"),
        ("flipped", "json"),
        (KEY, "bytes"),
        ("image", "jpeg"),
        ("caption", "str"),
        ("weight", "float64"),
        ("mask", "ndarray"),
        ("extra", "bytes"),
        ("meta", "json"),
    )

    @classmethod
    def sample(cls, number: int, size: int = 100) -> dict[str, Any]:
        made = make_sample(4 * number, size) | {"__key__": make_sample(number)[KEY]}
        made["mask"] = np.full((1 + number % 3, 4), number, "<i4")
        made["meta"] = {"number": number, "parts": [None, 0.5, {"x": [number]}]}
        made["flipped"] = (None, True, False)[number % 3]
        return made

    def build(self, folder: Path, fields: Any, samples: Any) -> Path:
        columns = dict(self.COLUMNS)
        rows = [
            {name: encode(kind, one[name]) for name, kind in columns.items()} for one in samples
        ]
        path = folder / "shard.00000.mds"
        save(folder, {path.name: build(columns, rows)})
        file = MdsFile(locate(folder), path.name)
        ranges, extra = list(file.scan()), file.extra()
        file.close()
        self.seal(path, fields, samples, ranges, extra)
        return path


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "data", "value"),
    [
        ("str_int", b"-12345678901234567890", -12345678901234567890),
        ("str_float", b"nan", float("nan")),
        ("str_decimal", b"0.10", "0.10"),
        ("json", b'{"a": NaN}', {"a": float("nan")}),
        ("json", b"1" * 400, int("1" * 400)),
        ("bytes", b"", b""),
        ("str", b"", ""),
        ("jpeg_array", bytes(4), []),
        ("list[png]", bytes(8), []),
        ("list[jpeg]", struct.pack("<IIII", 0, 2, 0, 1) + b"x", [b"", b"x"]),
        ("ndarray", b"\x08\x05\x03\x00abc", np.frombuffer(b"abc", "|u1")),
        ("ndarray:int8", b"\x04\x03abc", np.frombuffer(b"abc", "|i1")),
        ("ndarray:uint16", b"\x09\x02\x00\x01\x00abcd", np.frombuffer(b"abcd", "<u2")[:, None]),
        ("ndarray", b"\x12\x06\x01\x00\x00\x00\x00\x38", np.array([0.5], "<f2")),
        ("ndarray", b"\x21\x0b" + struct.pack("<QQi", 1, 1, -7), np.array([[-7]], "<i4")),
        ("ndarray", b"\x09\x00\xff", np.array(-1, "|i1")),
        ("pil", struct.pack("<III", 1, 2, 1) + b"Lab", np.array([[97], [98]], "|u1")),
        (
            "pil",
            struct.pack("<III", 1, 2, 5) + b"I;16Babcd",
            np.array([[0x6162], [0x6364]], "<u2"),
        ),
        ("pil", struct.pack("<III", 9, 1, 1) + b"1\x80\x80", np.array([[1, *[0] * 7, 1]], "?")),
    ],
)
def test_values_are_plain_and_owned(tmp_path: Path, kind: str, data: bytes, value: Any) -> None:
    found = one(tmp_path, kind, data)
    assert same(found, value)
    if isinstance(found, np.ndarray):
        assert found.flags.owndata and found.flags.writeable


@pytest.mark.parametrize(
    ("kind", "data", "match"),
    [
        ("str", b"\xff", "utf-8"),
        ("str_int", b"1.5", "invalid literal"),
        ("str_int", b"1" * 4301, "4,301 digits"),
        ("str_float", b"", "could not convert"),
        ("str_float", b"0" * 5000, "5,000 digits"),
        ("str_decimal", b"one", "'one' is no decimal number"),
        ("json", b"", "Expecting value"),
        ("json", b"\xff\xfe1\x00", "utf-8"),
        ("json", b"\xef\xbb\xbf1", "UTF-8 BOM"),
        ("json", '{"a":1}'.encode("utf-16-le"), "enclosed in double quotes"),
        ("json", b"[" * 100_000, "nested too deep"),
        ("pil", b"12345678901", "an image of 11 bytes"),
        ("pil", struct.pack("<III", 1, 1, 1) + b"Lab", "takes 1 bytes; there are 2"),
        ("pil", struct.pack("<III", 0, 5, 1) + b"L", "0 x 5 pixels"),
        ("pil", struct.pack("<III", 2**32 - 1, 2**32 - 1, 1) + b"1", "takes 2,305,843"),
        ("pil", struct.pack("<III", 1, 1, 2) + b"XXa", "mode b'XX', which is not read"),
        ("pil", struct.pack("<III", 1, 1, 2**32 - 1) + b"La", "which is not read"),
        ("pil", struct.pack("<III", 1, 1, 2) + b"L", "which is not read"),
        ("jpeg_array", b"\x01\x00\x00", "which is no list"),
        ("jpeg_array", b"\xff" * 8, "a list of 4,294,967,295 in 8 bytes"),
        ("jpeg_array", struct.pack("<II", 1, 5) + b"four", "takes 13 bytes; there are 12"),
        ("jpeg_array", struct.pack("<II", 1, 3) + b"four", "takes 11 bytes; there are 12"),
        ("list[jpeg]", struct.pack("<III", 1, 1, 0), "which is no list"),
        ("list[png]", b"", "begins with nothing"),
        ("list[pil]", struct.pack("<III", 0, 1, 1) + b"x", "an image of 1 bytes"),
        ("ndarray", b"", "byte 0: the end"),
        ("ndarray", b"\x07\x04\x01x", "byte 0: 07"),
        ("ndarray", b"\x08", "before the shape"),
        ("ndarray:uint8", b"", "before the shape"),
        ("ndarray:uint8", b"\x04\x02x", "takes 2 bytes; there are 1"),
        ("ndarray:uint8", b"\x04\x00", "expected numbers above 0"),
        ("ndarray:uint8", b"\xff" * 600, "63 dimensions"),
        ("ndarray:uint8", b"\x0b" + struct.pack("<QQ", 2**63, 2**63), "takes 85,0"),
        ("ndarray:float64", b"\x04\x01seven77", "takes 8 bytes; there are 7"),
    ],
)
def test_values_that_are_not_what_their_column_says_are_refused(
    tmp_path: Path, kind: str, data: bytes, match: str
) -> None:
    refused(tmp_path, match, kind, data)


def test_json_is_bounded_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "MAX_JSON", 1000)
    assert one(tmp_path, "json", b"[" + b"0," * 400 + b"0]") == [0] * 401
    refused(tmp_path, "JSON of 1,001 bytes; at most 1,000 are decoded", "json", b" " * 1001)


def test_a_key_is_the_column_of_that_name(tmp_path: Path) -> None:
    for kind, stored, key in (
        ("str", "ключ".encode(), "ключ".encode()),
        ("bytes", b"\xff\x00", b"\xff\x00"),
        ("int", struct.pack("<q", -5), b"-5"),
        ("uint32", struct.pack("<I", 5), b"5"),
        ("str_int", b"007", b"7"),
    ):
        save(tmp_path, {"shard.00000.mds": build({KEY: kind}, [{KEY: stored}])})
        assert read(tmp_path, "shard.00000.mds") == [{KEY: key}]
    save(tmp_path, {"shard.00000.mds": build({KEY: "json"}, [{KEY: b"1"}])})
    with pytest.raises(SourceError, match="column '__key__' would be the key, but is 'json'"):
        read(tmp_path, "shard.00000.mds")


@pytest.mark.parametrize(
    "kind", ["pkl", "pkl:4", "int128", "list[str]", "", "str:utf-8", "ndarrays"]
)
def test_an_unknown_encoding_is_refused_and_its_column_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(SourceError, match=r"shard.00000.mds: column 'x' .*anew with"):
        one(tmp_path, kind, b"cos\nsystem\n(S'false'\ntR.")


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("ndarray:object", "no dtype has this name"),
        ("ndarray:uint8:0", "expected numbers above 0"),
        ("ndarray:uint8:-1,-1", "expected numbers above 0"),
        ("ndarray:uint8:1,x", "invalid literal"),
        ("ndarray:uint8:" + ",".join("1" * 40), "expected numbers above 0"),
        ("ndarray:uint8:65536,65536", "4,294,967,296 bytes a value"),
        ("ndarray::3", "a shape without a dtype"),
        ("ndarray:uint8:2:2", "invalid literal"),
        ("ndarray:uint8:2", "size None, expected 2"),
    ],
)
def test_an_array_encoding_that_cannot_be_is_refused(tmp_path: Path, kind: str, match: str) -> None:
    with pytest.raises(DamageError, match=f"description of its columns: .*{match}"):
        one(tmp_path, kind, b"")


def test_a_fixed_shape_is_read_without_a_size_in_the_sample(tmp_path: Path) -> None:
    data = np.arange(6, dtype="<u2")
    text = {"column_sizes": [12], "column_encodings": ["ndarray:uint16:3,2"]}
    head, row = build({"x": "int"}, [{"x": data.tobytes()}], **text)
    save(tmp_path, {"shard.00000.mds": (head, row)})
    [values] = read(tmp_path, "shard.00000.mds")
    assert same(values["x"], data.reshape(3, 2))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_what_an_independent_writer_wrote_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    kinds = data.draw(
        st.dictionaries(
            st.text(min_size=1, max_size=5).filter(lambda name: name != KEY),
            st.sampled_from(["int", "int8", "uint32", "float64", "bytes", "str", "json"]),
            min_size=1,
            max_size=6,
        )
    )
    some = {
        "int": st.integers(-(2**63), 2**63 - 1),
        "int8": st.integers(-128, 127),
        "uint32": st.integers(0, 2**32 - 1),
        "float64": st.floats(),
        "bytes": st.binary(max_size=20),
        "str": st.text(st.characters(codec="utf-8"), max_size=20),
        "json": st.recursive(st.none() | st.booleans() | st.integers(), st.lists, max_leaves=4),
    }
    samples = data.draw(
        st.lists(st.fixed_dictionaries({name: some[kind] for name, kind in kinds.items()}))
    )
    stored = [{name: encode(kind, row[name]) for name, kind in kinds.items()} for row in samples]
    folder = tmp_path_factory.mktemp("drawn")
    save(folder, {"s.mds": build(kinds, stored)})
    found = read(folder, "s.mds")
    shutil.rmtree(folder)
    assert same_all(found, [{name: row[name] for name in kinds} for row in samples])


# --- the description, and the list of shards ------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"text": b""}, "Expecting value"),
        ({"text": b"[" * 90_000}, "(recursion|Stack overflow)"),
        ({"text": b"[]"}, "expected an object"),
        ({"text": b"\xff{}"}, "utf-8"),
        ({"version": 1}, r"version and format \(1, 'mds'\)"),
        ({"format": "csv"}, r"\(2, 'csv'\)"),
        ({"column_names": []}, "as many names"),
        ({"column_names": ["a", "b"]}, "as many names"),
        ({"column_names": "image label text"}, "as many names"),
        ({"column_names": ["a", "b", "a"]}, "two columns have one name"),
        ({"column_names": ["a", "b", 1]}, "that are text"),
        ({"column_encodings": ["jpeg", "int", None]}, "that are text"),
        ({"column_sizes": [None, 4, None]}, "'label', 'int': size 4, expected 8"),
        ({"column_sizes": [None, None, None]}, "'label', 'int': size None, expected 8"),
        ({"column_sizes": [5, 8, None]}, "'image', 'jpeg': size 5, expected None"),
        ({"column_sizes": [0, 8, None]}, "'image', 'jpeg': size 0, expected None"),
        ({"column_encodings": ["jpeg", "int8", "str"], "column_sizes": [None, True, None]}, "True"),
    ],
)
def test_a_description_that_is_none_is_refused(
    tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    data, row = build(COLUMNS, samples(2), **change)
    save(tmp_path, {"s.mds": (data, build(COLUMNS, samples(2))[1] | {"raw_data": row["raw_data"]})})
    with pytest.raises(DamageError, match=f"s.mds: the description of its columns: .*{match}"):
        read(tmp_path, "s.mds")


def head(data: bytes, *numbers: tuple[int, int]) -> bytes:
    """The bytes with other u32s in some places."""
    changed = bytearray(data)
    for at, number in numbers:
        struct.pack_into("<I", changed, at, number)
    return bytes(changed)


def test_offsets_that_cannot_be_are_refused(tmp_path: Path) -> None:
    data, row = build(COLUMNS, samples(4))
    first, second = struct.unpack_from("<II", data, 4)
    for damaged, match in (
        (b"", "byte 0: expected the number of samples.* nothing in a shard of 0 bytes"),
        (data[:7], "in a shard of 7 bytes"),
        (head(data, (0, 2**32 - 1)), "byte 0: .*found ff ff ff ff"),
        (head(data, (0, 5)), "samples: 5|byte 24: its last sample|byte 0"),
        (head(data, (0, 3)), "byte 16: its last sample ends"),
        (head(data, (4, 0)), "byte 0: expected"),
        (head(data, (4, 23)), "byte 0: expected"),
        (head(data, (4, len(data) + 1)), "byte 0: expected"),
        (head(data, (20, len(data) - 1)), f"byte 20: its last sample ends at byte {len(data) - 1}"),
        (data + b"x", "byte 20: its last sample ends at byte"),
        (data[:-1], "byte 20: its last sample ends at byte"),
        (head(data, (8, first - 1)), f"byte 8: record 0 is said to be at bytes {first} to"),
        (head(data, (8, first + 15)), f"byte 8: .* {first + 15}; expected at least 16 bytes"),
        (head(data, (12, 2**32 - 1)), "byte 16: record 2 is said to be at bytes 4294967295"),
        (head(data, (12, second)), f"byte 12: record 1 is said to be at bytes {second} to"),
    ):
        size = {"raw_data": {"bytes": len(damaged)}}
        save(tmp_path, {"s.mds": (damaged, row | size)})
        with pytest.raises(DamageError, match=match):
            read(tmp_path, "s.mds")


def test_offsets_are_checked_in_every_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mds, "_BLOCK", 3)
    data, row = build(COLUMNS, samples(10))
    save(tmp_path, {"s.mds": (data, row)})
    assert [values["label"] for values in read(tmp_path, "s.mds")] == list(range(10))
    save(tmp_path, {"s.mds": (head(data, (4 + 4 * 7, 99)), row)})
    with pytest.raises(DamageError, match="byte 32: record 6 "):
        read(tmp_path, "s.mds")
    save(tmp_path, {"s.mds": (head(data, (4 + 4 * 3, 2**32 - 1)), row)})
    with pytest.raises(DamageError, match="byte 16: record 2 "):  # the last of the first block
        read(tmp_path, "s.mds")


def test_a_sparse_file_that_claims_many_samples_allocates_nothing(tmp_path: Path) -> None:
    count = 700_000_000
    _, row = build(COLUMNS, samples(1))
    size = 4_100_000_000
    row |= {"samples": count, "raw_data": {"bytes": size}}
    save(tmp_path, {"s.mds": (b"", row)})
    text = json.dumps({k: v for k, v in row.items() if k not in ("samples", "raw_data")}).encode()
    with (tmp_path / "s.mds").open("r+b") as file:
        first = 8 + 4 * count
        file.write(struct.pack("<II", count, first + len(text)))
        file.seek(first - 4)
        file.write(struct.pack("<I", size) + text)
        file.truncate(size)
    with (
        memory_below(16 << 20),
        pytest.raises(DamageError, match="byte 8: record 0 is said to be at"),
    ):
        read(tmp_path, "s.mds")


def test_what_index_json_says_is_compared_with_the_shard(tmp_path: Path) -> None:
    data, row = build(COLUMNS, samples(2))
    for change, match in (
        ({"samples": 3}, r"its samples: 2, but .*index.json says 3"),
        ({"column_names": ["image", "label", "txt"]}, "its column_names: .*says .*'txt'"),
        ({"column_encodings": ["png", "int", "str"]}, "its column_encodings: .*says .*'png'"),
        ({"column_sizes": [None, 8, 8]}, "its column_sizes: "),
        ({"raw_data": {"bytes": len(data) + 1}}, f"has {len(data)} bytes, but .* says"),
        ({"raw_data": {"bytes": True}}, "True bytes; expected a number"),
        ({"raw_data": {"bytes": 2**32}}, "4294967296 bytes; expected a number"),
        ({"raw_data": {"bytes": -1}}, "-1 bytes; expected a number"),
    ):
        save(tmp_path, {"s.mds": (data, row | change)})
        with pytest.raises(DamageError, match=match):
            read(tmp_path, "s.mds")
    save(tmp_path, {"s.mds": (data, row | {"format": "csv"})})
    with pytest.raises(SourceError, match="format 'csv'"):
        read(tmp_path, "s.mds")


def test_two_swapped_shards_are_found(tmp_path: Path) -> None:
    made = shards()
    save(tmp_path, made)
    first, second = (tmp_path / name for name in list(made)[:2])
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    for name in list(made)[:2]:
        with pytest.raises(DamageError, match="cut short or replaced"):
            read(tmp_path, name)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_listed_shard_that_is_missing_is_missed(tmp_path: Path, missing: int) -> None:
    made = shards()
    save(tmp_path, made)
    gone = tmp_path / list(made)[missing]
    gone.unlink()
    complaints = []
    for name in list(made):
        if name != gone.name:
            try:
                read(tmp_path, name)
            except SourceError as error:
                complaints.append(str(error))
    assert len(complaints) == 1
    assert f"it lists {gone.name}, which is not there" in complaints[0]


def test_a_shard_that_is_not_listed_is_refused(tmp_path: Path) -> None:
    save(tmp_path, shards())
    (tmp_path / "shard.00009.mds").write_bytes(shards(1)["shard.00000.mds"][0])
    with pytest.raises(SourceError, match=r"shard.00009.mds: no index.json .* lists it"):
        read(tmp_path, "shard.00009.mds")
    (tmp_path / "index.json").unlink()
    with pytest.raises(SourceError, match="a writer makes it when it has finished"):
        read(tmp_path, "shard.00000.mds")


def test_a_merged_list_above_misses_a_whole_folder(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "merged", tmp_path / "m")
    (tmp_path / "index.json").write_text("another tool's")
    assert len(read(tmp_path, "m/0/shard.00000.mds")) == 2
    (tmp_path / "m" / "0" / "index.json").unlink()  # listed above alone
    for name in shard_names(tmp_path / "m"):
        read(tmp_path / "m", name)
    shutil.copy(GOLDEN / "merged" / "0" / "index.json", tmp_path / "m" / "0")
    shutil.rmtree(tmp_path / "m" / "1")
    with pytest.raises(SourceError, match=r"lists 1/shard.00000.mds, which is not there"):
        for name in shard_names(tmp_path / "m"):
            read(tmp_path / "m", name)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 90_000,
        b'{"version": 1, "shards": []}',
        b'{"version": 2, "shards": {}}',
        b'{"version": 2, "shards": [1]}',
        b'{"version": 2, "shards": [{}]}',
        b'{"version": 2, "shards": [{"raw_data": 5}]}',
        b'{"version": 2, "shards": [{"raw_data": {"basename": 5}}]}',
        b'{"version": 2, "shards": [{"raw_data": {"basename": ""}}]}',
        b'{"version": 2, "shards": [{"raw_data": {"basename": "../s.mds"}}]}',
        b'{"version": 2, "shards": [{"raw_data": {"basename": "/s.mds"}}]}',
        b'{"version": 2, "shards": [{"raw_data": {"basename": "s.mds"}},'
        b' {"raw_data": {"basename": "s.mds"}}]}',
    ],
)
def test_an_index_json_that_is_none_is_refused(tmp_path: Path, text: bytes) -> None:
    save(tmp_path, shards(1))
    (tmp_path / "index.json").write_bytes(text)
    with pytest.raises(DamageError, match=r"index.json: not a list of shards: "):
        read(tmp_path, "shard.00000.mds")


def test_no_index_json_is_needed_once_it_is_indexed(tmp_path: Path) -> None:
    save(tmp_path, shards(1))
    storage = locate(tmp_path)
    file = MdsFile(storage, "shard.00000.mds")
    [*ranges] = file.scan()
    extra = file.extra()
    file.close()
    (tmp_path / "index.json").unlink()
    damaged = bytearray((tmp_path / "shard.00000.mds").read_bytes())
    damaged[:40] = bytes(40)  # nor is what the shard says of itself
    (tmp_path / "shard.00000.mds").write_bytes(damaged)
    again = MdsFile(storage, "shard.00000.mds", extra)
    labels = [again.values(again.read(*one), i)["label"] for i, one in enumerate(ranges)]
    assert labels == [0, 1]
    again.close()


# --- damage ---------------------------------------------------------------------------------------


def test_damage_before_indexing_is_an_error_or_changes_values_only(tmp_path: Path) -> None:
    """The format has no checksum: a value may be another one. Its place and its kind may not."""
    made, row = build(COLUMNS, samples(20))
    save(tmp_path, {"s.mds": (made, row)})
    start = struct.unpack_from("<I", made, 4)[0]
    rng = random.Random(5)
    for at in [*range(0, start), *(rng.randrange(start, len(made)) for _ in range(80))]:
        damaged = bytearray(made)
        damaged[at] ^= 1 << rng.randrange(8)
        (tmp_path / "s.mds").write_bytes(damaged)
        try:
            found = read(tmp_path, "s.mds")
        except (ShardioError, ValueError):
            continue
        assert len(found) == 20
        for values in found:
            assert [type(value) for value in values.values()] == [bytes, int, str]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60), st.sampled_from([*ENCODINGS, "ndarray", "ndarray:int16"]))
def test_no_bytes_make_a_decoder_fail_otherwise(data: bytes, kind: str) -> None:
    size, convert = mds._encoding("x", kind, "here")
    assert size is None
    try:
        value = convert(data)
    except ValueError:
        return
    assert value is not None or kind == "json"
    if isinstance(value, np.ndarray):
        assert value.flags.owndata
        assert math.prod(value.shape) <= 8 * len(data)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=80))
def test_no_bytes_make_a_sample_fail_otherwise(data: bytes) -> None:
    _, row = build(COLUMNS, [])
    decode = mds._decoder(mds._columns(json.dumps(row).encode(), "here"))
    try:
        values = decode(data)
    except ValueError:
        return
    assert sum(map(len, (values["image"], values["text"].encode()))) + 16 == len(data)


def test_a_file_is_what_the_storage_says_it_is(tmp_path: Path) -> None:
    save(tmp_path, shards(1))
    file = MdsFile(locate(tmp_path), "shard.00000.mds")
    plain = locate(tmp_path).open("shard.00000.mds")
    assert (file.name, file.size, file.sha256()) == (plain.name, plain.size, plain.sha256())
    file.will_need(0, file.size)
    file.scattered()
    file.close()
    file.close()
    plain.close()
