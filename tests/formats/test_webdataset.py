"""WebDataset: files of its own writer, names, samples and values; headers are in test_tar.py."""

import base64
import gzip
import io
import json
import os
import pickle
import re
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conformance import FormatConformance, same
from support.conformance import sample as make_sample
from support.forging import memory_below
from support.tar_files import END, JPG, NO_FILE, member, pax, read, scan, value_of

from shardio import formats
from shardio.errors import DamageError, SourceError
from shardio.formats import manifest
from shardio.formats.base import Shard
from shardio.formats.foreign.base import MAX_JSON
from shardio.formats.foreign.webdataset import TarFile, split_name
from shardio.names import KEY
from shardio.packing import index as indexing
from shardio.storage.location import locate

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "webdataset"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))


def index(root: Path, out: Path, **fields: str) -> Shard:
    indexing.index(root, out=out, fields=fields, jobs=1, overwrite=True)
    return reopen(root, out)


def reopen(root: Path, out: Path, number: int = 0) -> Shard:
    made = manifest.load(locate(out))
    assert made.format == "webdataset"
    opening = made.opening(locate(out), locate(root))
    return formats.open_shard(made.format, opening, made.shard(number))


# --- files by webdataset and GNU tar --------------------------------------------------------------


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_files_are_grouped_as_webdataset_groups_them(name: str) -> None:
    data = (GOLDEN / name).read_bytes()
    found = read(data)
    assert [values[KEY].decode() for values in found] == [key for key, _, _ in EXPECTED[name]]
    for values, (_, raw, decoded) in zip(found, EXPECTED[name], strict=True):
        del values[KEY]
        assert list(values) == list(raw)
        for field, value in values.items():
            right = decoded.get(field)
            if field not in decoded:
                right = base64.b64decode(raw[field])
            elif isinstance(value, np.ndarray):
                assert value.flags.owndata and value.flags.c_contiguous and value.dtype.isnative
                value = [value.dtype.str, list(value.shape), value.tolist()]
            assert same(value, right), field


def test_golden_files_have_what_they_are_for() -> None:
    kinds = {}
    for name in EXPECTED:
        data = (GOLDEN / name).read_bytes()
        headers = [h for h in range(0, len(data), 512) if data[h + 257 : h + 262] == b"ustar"]
        kinds[name] = {data[h + 156 : h + 157] for h in headers}
    assert b"x" in kinds["tarwriter.tar"] and b"L" in kinds["gnu.tar"] and b"x" in kinds["pax.tar"]
    assert kinds["shard-0000.tar"] == {b"0"} and kinds["ustar.tar"] == {b"0", b"5"}
    assert not kinds["v7.tar"]
    data = (GOLDEN / "ustar.tar").read_bytes()
    assert any(data[h + 345] for h in range(0, len(data), 512) if data[h + 257 : h + 262])
    decoded = {field.rpartition(".")[2] for s in EXPECTED["tarwriter.tar"] for field in s[2]}
    assert decoded >= {"cls", "json", "txt", "npy", "index"}


def test_golden_files_read_through_an_index(tmp_path: Path) -> None:
    for name in EXPECTED:
        root = tmp_path / name
        root.mkdir()
        os.symlink(GOLDEN / name, root / name)
        shard = index(root, tmp_path / f"{name}.index")
        assert shard.records == len(EXPECTED[name])
        for record, (key, raw, _) in enumerate(EXPECTED[name]):
            sample = shard.read(record)
            assert sample[KEY] == key.encode()
            for field, ours in (("jpg", "image"), ("x.y.png", "x.y.png"), ("pyd", "pyd")):
                if field in raw:
                    assert sample.get(ours) == base64.b64decode(raw[field])
        shard.close()


# --- what every format must do --------------------------------------------------------------------

NAMES = {"image": "jpg", "label": "cls", "caption": "txt", "extra": "bin", "mask": "npy"}
NAMES |= {"meta": "a.json"}
FIELDS = (
    (KEY, "key"),
    ("image", "image"),
    ("label", "int"),
    ("caption", "str"),
    ("extra", "bytes"),
    ("mask", "array"),
    ("meta", "json"),
)


def encoded(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, np.ndarray):
        stream = io.BytesIO()
        np.save(stream, value)
        return stream.getvalue()
    return (value if isinstance(value, str) else json.dumps(value)).encode()


def tar_of(samples: Sequence[Any]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for sample in samples:
            for name, value in sample.items():
                if name != KEY and value is not None:
                    key = sample[KEY].decode("utf-8", "surrogateescape")
                    info = tarfile.TarInfo(f"{key}.{NAMES[name]}")
                    data = encoded(value)
                    info.size, info.mtime = len(data), 1.5
                    tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


class TestWebDatasetConformance(FormatConformance):
    FIELDS = FIELDS

    @classmethod
    def sample(cls, number: int, size: int = 100) -> dict[str, Any]:
        made = make_sample(number, size)
        sample = {name: made[name] for name, _ in FIELDS}
        sample[KEY] = made[KEY].replace(b".jpg", b"")
        if sample["image"] is not None:
            sample["image"] = JPG + sample["image"]
        if sample["extra"] is not None:
            sample["extra"] = b"x" + sample["extra"]  # no image
        if sample["meta"] is not None:
            sample["meta"] = {"number": number, "parts": [None, 0.5, {"x": ["é", True]}]}
        return sample

    def build(self, folder: Path, fields: Any, samples: Any) -> Path:
        root = folder / "data"
        root.mkdir(exist_ok=True)
        path = root / "x.tar"
        path.write_bytes(tar_of(samples))
        index(root, folder / "index", **(NAMES if samples else {})).close()
        return path

    def open(self, path: Path) -> Shard:
        return reopen(path.parent, path.parent.parent / "index")


# --- names and samples ----------------------------------------------------------------------------


def webdataset_rule(name: str) -> tuple[str, str] | None:
    """base_plus_ext, and what tar_file_iterator skips, of webdataset 1.0.2."""
    if "/" not in name and name.startswith("__") and name.endswith("__"):
        return None
    if re.match(r"__[^/]*__($|/)", name):
        return None
    match = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", name)
    return (match.group(1), match.group(2)) if match else None


NAME = st.text(alphabet="ab./_\né", max_size=12)


@settings(max_examples=1000, deadline=None)
@given(NAME)
def test_names_are_split_as_webdataset_splits_them(name: str) -> None:
    right = webdataset_rule(name)
    found = split_name(name.encode())
    assert found == (None if right is None else (right[0].encode(), right[1].encode()))


def test_a_long_name_of_many_folders_is_split_at_once() -> None:
    assert split_name(b"a/" * 500_000) is None  # the pattern takes half an hour
    assert split_name(b"a/" * 500_000 + b"b.c") == (b"a/" * 500_000 + b"b", b"c")


def test_a_name_may_begin_as_a_compressed_file_does() -> None:
    assert read(member(b"BZh.txt", b"a"))[0] == {KEY: b"BZh", "txt": "a"}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(NAME.filter(bool), st.binary(max_size=1100)), max_size=8),
    st.sampled_from((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)),
    st.sampled_from((0, 1.5)),
    st.booleans(),
)
def test_files_by_python_read_as_python_and_webdatasets_rule_read_them(
    files: list[tuple[str, bytes]], form: int, mtime: float, long: bool
) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for name, data in files:
            info = tarfile.TarInfo("d" * 90 + "/" + name + "x" * 30 if long else name)
            info.size, info.mtime = len(data), mtime
            tar.addfile(info, io.BytesIO(data))
    right: list[tuple[str, dict[str, bytes]]] = []
    clash = False
    with tarfile.open(fileobj=io.BytesIO(stream.getvalue())) as tar:
        for info in tar:
            if not info.isreg() or (pair := webdataset_rule(info.name)) is None:
                continue
            key, field = pair[0], pair[1].lower()
            if not right or right[-1][0] != key:
                clash |= key in dict(right)
                right.append((key, {}))
            clash |= field in right[-1][1]
            right[-1][1][field] = tar.extractfile(info).read()  # type: ignore[union-attr]
    if clash:
        with pytest.raises(SourceError):
            scan(stream.getvalue())
        return
    found = [(values.pop(KEY).decode(), values) for values in read(stream.getvalue())]
    assert found == right


def test_two_members_that_are_one_field_are_refused_by_both_names() -> None:
    data = member(b"a/1.jpg") + member(b"a/1.cls", b"1") + member(b"a/1.JPG") + END
    with pytest.raises(SourceError, match=r"byte 1536: a/1.JPG and a/1.jpg, .* field 'jpg'"):
        scan(data)


def test_a_key_that_comes_back_is_refused_with_both_places() -> None:
    data = member(b"a.jpg") + member(b"b.jpg") + member(b"a.cls", b"1") + END
    with pytest.raises(SourceError, match=r"byte 1024: a.cls .*began at byte 0.*\n.*--sort=name"):
        scan(data)


def test_members_that_are_no_data_do_not_part_a_sample() -> None:
    parts = (
        member(b"a.jpg", b"x"),
        member(b"dir/", kind=b"5"),
        member(b"README", b"no extension"),
        member(b"__meta__/a.txt", b"skipped"),
        member(b"fifo.x", kind=b"6", size=b"%011o\0" % 77),  # states a size, has no data
        pax((b"comment", b"x"), kind=b"g"),
        member(b"label", b"of the volume", kind=b"V"),
        member(b"old/", magic=bytes(8), kind=b"\0"),
        member(b"__a__", kind=b"2"),
        member(b"a.cls", b"1"),
    )
    data = member(b"first", b"y") + b"".join(parts) + member(b"b.cls", b"2")
    start = len(member(b"first", b"y"))
    assert scan(data) == [(start, len(b"".join(parts))), (len(data) - 1024, 1024)]
    assert read(data) == [{KEY: b"a", "jpg": b"x", "cls": 1}, {KEY: b"b", "cls": 2}]


def test_a_name_that_is_skipped_is_no_field_of_the_sample_before() -> None:
    data = member(b"__x.png", b"1") + member(b"__x.jpg__", b"2") + member(b"__x.txt", b"3")
    assert read(data) == [{KEY: b"__x", "png": b"1", "txt": "3"}]


def test_a_record_that_holds_two_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="members of samples a and b"):
        NO_FILE.values(member(b"a.jpg") + member(b"b.jpg"), 0)
    with pytest.raises(ValueError, match="no member"):
        NO_FILE.values(member(b"a", b"x"), 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [(b"a.\xff", "not UTF-8"), (b"a.__key__", "extension __key__"), (b"a.__URL__", "__url__")],
)
def test_extensions_that_can_be_no_field_are_refused(name: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        scan(member(name))


def test_a_sample_of_too_many_members_is_refused() -> None:
    with pytest.raises(SourceError, match="over 1,000 members"):
        scan(b"".join(member(b"a.%d" % i) for i in range(1001)))


# --- what is no tar file --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.tar.gz", "it's.tgz", "x.tar"])
def test_compressed_files_are_refused_with_the_command_that_unpacks(
    tmp_path: Path, name: str
) -> None:
    data = (GOLDEN / "shard-0000.tar").read_bytes()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data))
    with pytest.raises(SourceError, match="Unpack it first") as caught:
        list(TarFile(locate(tmp_path), name).scan())
    command = str(caught.value).rpartition("Unpack it first: ")[2]
    subprocess.run(command, shell=True, check=True)
    [made] = [other for other in tmp_path.iterdir() if other != path]
    assert made.suffix == ".tar" and made.read_bytes() == data


@pytest.mark.parametrize(
    "start", [b"\x28\xb5\x2f\xfd", b"BZh9", b"\xfd7zXZ\0", b"\x04\x22\x4d\x18"]
)
def test_other_compressions_are_told(start: bytes) -> None:
    with pytest.raises(SourceError, match=r"-dc here\.tar > here\.plain\.tar"):
        scan(start + bytes(600))


# --- values ---------------------------------------------------------------------------------------


def npy(array: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asanyarray(array), **options)
    return stream.getvalue()


def npy_header(text: str, data: bytes = b"", version: int = 1) -> bytes:
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode() + data


@pytest.mark.parametrize(
    ("extension", "data", "right"),
    [
        ("cls", b" 7\n", 7),
        ("index", b"-9223372036854775808", -(2**63)),
        ("x.cls", b"18446744073709551615", 2**64 - 1),
        ("txt", "é\0\n".encode(), "é\0\n"),
        ("transcript", b"", ""),
        ("json", b'[1, NaN, "\\u00e9"]', [1, float("nan"), "é"]),
        ("jsn", "{}".encode("utf-16"), {}),
        ("json.gz", b"{}", b"{}"),
        ("jpg", b"7", b"7"),
        ("mp", b"\x80", b"\x80"),
        ("cbor", b"\xa0", b"\xa0"),
        ("ten", b"7", b"7"),
    ],
)
def test_values_are_decoded_by_extension(extension: str, data: bytes, right: Any) -> None:
    assert same(value_of(extension, data), right)


@pytest.mark.parametrize(
    ("extension", "data", "message"),
    [
        ("cls", b"cat", "expected an integer, found 'cat'"),
        ("cls", b"", "expected an integer"),
        ("cls", b"1" * 5000, "found 5,000 bytes"),
        ("cls", b"18446744073709551616", "outside of 64 bits"),
        ("txt", b"\xff", "can't decode byte 0xff"),
        ("json", b"{", "Expecting property name"),
        ("json", b"[" * 100_000, "nested too deep"),
        ("json", b" " * (MAX_JSON + 1), "at most 16,777,216 are decoded"),
        ("npy", b"", "no .npy file"),
        ("npy", b"\x93NUMPY\1\0\xff\xff{}", "more than it has"),
        ("npy", npy_header("{" * 800), "no .npy header"),
        ("npy", npy_header("-" * 900 + "1"), "no .npy header"),
        ("npy", npy(np.zeros(3))[:-1], "does not take 23 bytes"),
        ("npy", npy(np.zeros(3)) + b"x", "does not take 25 bytes"),
        (
            "npy",
            npy_header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -1)}", bytes(8)),
            "shape (-1, -1) of float64 does not take 8 bytes",
        ),
    ],
)
def test_values_that_do_not_fit_their_extension_are_errors(
    extension: str, data: bytes, message: str
) -> None:
    with pytest.raises(ValueError, match=f"k.{extension}: .*{re.escape(message)}"):
        value_of(extension, data)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=">i4").reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.array(True),
        np.zeros((0, 4), "f2"),
        np.array(["a", "é"]),
        np.array([b"abc"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.array([1 + 2j]),
    ],
)
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_arrays_are_owned_native_and_in_c_order(array: Any, version: tuple[int, int]) -> None:
    found = value_of("npy", npy(array, version=version))
    assert same(found, np.ascontiguousarray(array).reshape(array.shape).astype(found.dtype))
    assert found.dtype == array.dtype.newbyteorder("=") and found.flags.owndata
    assert found.flags.writeable


class Evil:
    ran = False

    def __reduce__(self) -> Any:
        return (setattr, (Evil, "ran", True))


def test_what_could_run_code_or_is_no_plain_array_stays_bytes() -> None:
    objects = npy(np.array([Evil()], object))
    for extension in "pyd", "pkl", "pickle", "pth", "pyc", "npz":
        data = pickle.dumps(Evil())
        assert value_of(extension, data) == data
    structured = np.zeros(2, [("a", "i4"), ("b", "f8")])
    for data in (
        objects,
        npy(structured),
        npy(np.zeros(1, np.longdouble)),
        npy_header("{'descr': '|V0', 'fortran_order': False, 'shape': (4611686018427387904,)}"),
        npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': ()}" + " " * 2000, bytes(4)),
        b"\x93NUMPY\3\0" + bytes(8),
    ):
        assert value_of("npy", data) == data
    assert not Evil.ran


def test_hostile_sizes_cost_no_memory() -> None:
    huge = "{'descr': '<f8', 'fortran_order': False, 'shape': (1152921504606846976,)}"
    empty = "{'descr': '<f8', 'fortran_order': False, 'shape': (0, 4611686018427387904, 9)}"
    with memory_below(4 << 20):
        for text in huge, empty:
            with pytest.raises(ValueError):
                value_of("npy", npy_header(text))
        for size in (b"\x80" + (1 << 60).to_bytes(11, "big"), b"77777777777\0"):
            with pytest.raises(DamageError):
                scan(member(b"a.json", size=size))
