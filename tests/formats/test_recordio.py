"""MXNet RecordIO: files by MXNet itself, with and without .idx, parts, labels, damage."""

import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conformance import IndexedConformance, same, same_all
from support.conformance import sample as make_sample
from support.one_file import OneFile

from shardio.dataset import sequence as sequences
from shardio.errors import DamageError, SourceError
from shardio.formats.foreign.recordio import RecordIOFile
from shardio.names import KEY
from shardio.packing import index as indexing
from shardio.storage.location import locate

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "recordio"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
NO_FILE = RecordIOFile(OneFile(), "nothing")  # for what needs no file
ID = bytes(range(16))
MAGIC = b"\x0a\x23\xd7\xce"


def part(kind: int, data: bytes) -> bytes:
    return MAGIC + struct.pack("<I", kind << 29 | len(data)) + data + bytes(-len(data) % 4)


def framed(data: bytes) -> bytes:
    """As dmlc-core's RecordIOWriter frames it."""
    starts = [at for at in range(0, len(data) // 4 * 4, 4) if data[at : at + 4] == MAGIC]
    if not starts:
        return part(0, data)
    begins = [0, *(at + 4 for at in starts)]
    ends = [*starts, len(data)]
    kinds = [1, *[2] * (len(starts) - 1), 3]
    return b"".join(part(kind, data[a:b]) for kind, a, b in zip(kinds, begins, ends, strict=True))


def image(label: Any, number: int, data: bytes, second: int = 0) -> bytes:
    if isinstance(label, list):
        head = struct.pack("<IfQQ", len(label), 0, number, second)
        return head + struct.pack(f"<{len(label)}f", *label) + data
    return struct.pack("<IfQQ", 0, label, number, second) + data


def write(path: Path, records: Sequence[bytes], keys: Sequence[Any] | None = None) -> Path:
    frames = [framed(data) for data in records]
    path.write_bytes(b"".join(frames))
    if keys is not None:
        at, lines = 0, []
        for key, frame in zip(keys, frames, strict=True):
            lines.append(f"{key}\t{at}\n")
            at += len(frame)
        path.with_suffix(".idx").write_text("".join(lines))
    return path


def scan(path: Path) -> tuple[list[tuple[int, int]], list[dict[str, Any]], bytes]:
    """Ranges, values, and what the index keeps besides; the values as a reader gets them."""
    file = RecordIOFile(locate(path.parent), path.name)
    ranges, first = [], []
    for at, size in file.scan():
        first.append(file.values(file.read(at, size), len(ranges)))
        ranges.append((at, size))
    extra = file.extra()
    file.close()
    again = RecordIOFile(locate(path.parent), path.name, extra)
    values = [again.values(again.read(*pair), i) for i, pair in enumerate(ranges)]
    again.close()
    assert same_all(first, values)
    return ranges, values, extra


# --- files of MXNet -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["images", "im2rec", "plain"])
def test_golden_files_read_as_mxnet_reads_them(name: str) -> None:
    path = GOLDEN / f"{name}.rec"
    _, values, _ = scan(path)
    lines = []
    if name != "plain":
        lines = [line.split("\t") for line in (GOLDEN / f"{name}.idx").read_text().splitlines()]
    assert len(values) == len(EXPECTED[name])
    for number, (found, expected) in enumerate(zip(values, EXPECTED[name], strict=True)):
        data = bytes.fromhex(expected["data"])
        if name == "plain":
            # mostly shorter than an IRHeader, or no flag that could be one
            right: dict[str, Any] = {"data": data}
        else:
            label = expected["label"]
            if isinstance(label, list):
                label = np.array(label, np.float32)
            elif label == int(label):
                label = int(label)
            right = {KEY: f"{name}/{lines[number][0]}".encode(), "image": data, "label": label}
            right["id"] = expected["id"]
            if expected["id2"]:
                right["id2"] = expected["id2"]
        assert same(found, right)


def test_the_scan_finds_what_the_idx_of_mxnet_names() -> None:
    for name in ("images", "im2rec"):
        lines = (GOLDEN / f"{name}.idx").read_text().splitlines()
        ranges, _, _ = scan(GOLDEN / f"{name}.rec")
        assert [at for at, _ in ranges] == [int(line.split("\t")[1]) for line in lines]
        assert sum(size for _, size in ranges) == (GOLDEN / f"{name}.rec").stat().st_size


def test_our_frames_are_those_of_mxnet() -> None:
    """So that what the other tests write is what MXNet would."""
    data = [bytes.fromhex(one["data"]) for one in EXPECTED["plain"]]
    assert b"".join(map(framed, data)) == (GOLDEN / "plain.rec").read_bytes()
    assert any(struct.unpack("<I", framed(one)[4:8])[0] >> 29 == 1 for one in data)


def test_a_folder_is_indexed_and_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix in ("rec", "idx", "lst"):
        name = f"im2rec.{suffix}"
        (tmp_path / name).write_bytes((GOLDEN / name).read_bytes())
    found = indexing.index(tmp_path, jobs=1)
    assert found.fields == {KEY: "key", "image": "image", "label": "int", "id": "int"}
    dataset = sequences.stored(tmp_path)
    assert [one["label"] for one in dataset] == [0, 0, 1]
    assert [one[KEY] for one in dataset] == [b"im2rec/0", b"im2rec/1", b"im2rec/2"]


# --- conformance --------------------------------------------------------------------------------


class TestRecordIOConformance(IndexedConformance):
    """The sample's fields that the format has; keys from an .idx."""

    FIELDS = ((KEY, "key"), ("image", "image"), ("label", "float"), ("id", "int"))
    FILE = RecordIOFile

    @classmethod
    def sample(cls, number: int, size: int = 100) -> dict[str, Any]:
        data = make_sample(number, size)["image"] or b""
        if number % 3 == 0:
            data += MAGIC + data + MAGIC
        key = f"x/n{number:04d} \u732b".encode()
        return {KEY: key, "image": data, "label": number / 2, "id": number * 2**57 % 2**64}

    def build(self, folder: Path, fields: Any, samples: Any) -> Path:
        records = [image(one["label"], one["id"], one["image"]) for one in samples]
        keys = [one[KEY].decode().partition("/")[2] for one in samples]
        path = write(folder / "x.rec", records, keys)
        ranges, _, extra = scan(path)
        self.seal(path, fields, samples, ranges, extra)
        path.with_suffix(".idx").unlink()  # once indexed, nothing but .rec and index is needed
        return path


# --- values -------------------------------------------------------------------------------------


def test_labels_are_ints_where_they_have_no_fraction(tmp_path: Path) -> None:
    labels = [0.0, 999.0, -1.0, 0.5, float("inf"), 16777216.0]
    path = write(tmp_path / "x.rec", [image(label, 0, b"") for label in labels])
    _, values, _ = scan(path)
    assert same([one["label"] for one in values], [0, 999, -1, 0.5, float("inf"), 16777216])
    path = write(tmp_path / "x.rec", [image(float("nan"), 0, b"")])
    [one] = scan(path)[1]
    assert one["label"] != one["label"]


def test_many_labels_are_an_array_that_is_owned(tmp_path: Path) -> None:
    path = write(tmp_path / "x.rec", [image([1.0, 2.5], 3, b"data", 9), image([4.0], 4, b"")])
    _, [two, one], _ = scan(path)
    right = {"image": b"data", "label": np.array([1, 2.5], np.float32), "id": 3, "id2": 9}
    assert same(two, right)
    assert same(one["label"], np.array([4], np.float32)) and "id2" not in one
    assert two["label"].flags.owndata and two["label"].flags.writeable


def test_what_has_no_header_is_its_bytes(tmp_path: Path) -> None:
    flag = struct.pack("<IfQQ", 3, 0, 0, 0)
    data = [b"", b"x" * 23, b"no header" * 10, flag + bytes(11), MAGIC, MAGIC * 9]
    _, values, _ = scan(write(tmp_path / "x.rec", data))
    assert values == [{"data": one} for one in data]
    [one] = scan(write(tmp_path / "x.rec", [flag + bytes(12)]))[1]
    assert one["image"] == b"" and len(one["label"]) == 3


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([MAGIC, MAGIC[:2], b"\0\0\0\0", b"abcd", b"x"])).map(b"".join),
        min_size=1,
        max_size=5,
    )
)
def test_the_magic_anywhere_in_the_data_comes_back(contents: list[bytes]) -> None:
    whole = b"".join(framed(image(1.0, 2, data)) for data in contents)
    for data in contents:
        one = NO_FILE.values(framed(image(1.0, 2, data)), 0)
        assert one == {"image": data, "label": 1, "id": 2}
    assert whole.count(MAGIC) >= len(contents)


# --- .idx ---------------------------------------------------------------------------------------


def test_without_an_idx_records_have_no_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "x.rec", [image(1.0, 5, b"a")])
    assert scan(path)[1] == [{"image": b"a", "label": 1, "id": 5}]


@pytest.mark.parametrize(
    "keys", [["7", "0", "12"], ["7", "007"], ["7", "0", "a b"], ["é", "1" * 30, "-1"], [3, 2, 1]]
)
def test_keys_are_those_of_the_idx(keys: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "sub.d"
    folder.mkdir()
    path = write(folder / "a.b.rec", [image(1.0, 5, b"abc") for _ in keys], keys)
    lines = path.with_suffix(".idx").read_text().splitlines(keepends=True)
    for order in (lines, lines[::-1], [line.replace("\n", "\r\n") for line in lines]):
        path.with_suffix(".idx").write_text("".join(order), newline="")
        assert [one[KEY].decode() for one in scan(path)[1]] == [f"a.b/{key}" for key in keys]


def test_an_idx_of_another_file_is_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "x.rec", [image(1.0, i, b"abc") for i in range(5)], range(5))
    index = path.with_suffix(".idx")
    whole, lines = path.read_bytes(), index.read_text().splitlines(keepends=True)
    size = len(whole) // 5
    path.write_bytes(whole[: 3 * size])  # cut where a record ends: only the .idx can tell
    with pytest.raises(DamageError, match=f"names a record at byte {3 * size} of .*none"):
        scan(path)
    path.write_bytes(whole + whole[:size])
    with pytest.raises(DamageError, match=f"names no record at byte {5 * size} of"):
        scan(path)
    path.write_bytes(whole)
    for wrong in (lines[1:], [*lines[:2], f"2\t{2 * size + 4}\n", *lines[3:]]):
        index.write_text("".join(wrong))
        with pytest.raises(DamageError, match="names no record at byte"):
            scan(path)
    index.write_text("".join([*lines, f"0\t{len(whole)}\n"]))
    with pytest.raises(SourceError, match="the key 0 is there twice"):
        scan(path)
    for bad in ("x", "1 2\n", "1\t-4\n", "\t0\n", "1\t0x\n", "1\t" + "9" * 5000, "\n"):
        index.write_text("".join(lines) + bad)
        with pytest.raises(DamageError, match=r"x\.idx: line 6 is "):
            scan(path)


# --- damage -------------------------------------------------------------------------------------


def test_every_cut_but_between_records_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "x.rec", [image(1.0, 1, b"abc" + MAGIC), image(2.0, 2, MAGIC * 2), b""])
    intact = path.read_bytes()
    ranges, values, _ = scan(path)
    whole = [0, *(at + size for at, size in ranges)]
    for at in range(len(intact)):
        path.write_bytes(intact[:at])
        if at in whole:
            assert scan(path)[1] == values[: whole.index(at)]
        else:
            with pytest.raises(DamageError, match="cut short"):
                scan(path)


def test_every_flip_in_a_frame_is_found_or_harmless(tmp_path: Path) -> None:
    path = write(tmp_path / "x.rec", [image(1.0, i, b"abcd" * 9) for i in range(3)])
    intact = path.read_bytes()
    found = 0
    for start, _ in scan(path)[0]:
        for at in range(start, start + 8):
            for bit in range(8):
                path.write_bytes(intact[:at] + bytes([intact[at] ^ 1 << bit]) + intact[at + 1 :])
                try:
                    scan(path)
                except DamageError as error:
                    found += 1
                    assert re.search(r"x\.rec: record at byte \d+: ", str(error))
    # Nothing but the zeros at the end tells a length of 60 from one of 57 to 59.
    assert found >= 3 * 62


@pytest.mark.parametrize("kinds", [[1], [2], [3], [1, 0], [1, 1, 3], [0, 2], [1, 2], [4], [7]])
def test_parts_that_do_not_follow_one_another_are_damage(kinds: list[int], tmp_path: Path) -> None:
    path = tmp_path / "x.rec"
    data = b"".join(part(kind, b"abcd") for kind in kinds)
    path.write_bytes(data)
    with pytest.raises(DamageError):
        scan(path)
    with pytest.raises(ValueError):
        NO_FILE.values(data, 0)


def test_bytes_that_are_not_one_record_are_an_error() -> None:
    one, many = framed(bytes(30)), framed(MAGIC * 3)
    for data in (one[:-1], one[:-4], one + bytes(4), b"", MAGIC, many[:-8], many + bytes(4)):
        with pytest.raises(ValueError):
            NO_FILE.values(data, 0)
    for at in (0, 8, 16):
        with pytest.raises(ValueError):
            NO_FILE.values(many[:at] + b"\0" + many[at + 1 :], 0)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.rec"
    path.write_bytes(b"")
    assert scan(path)[0] == []
    for data in (b"short", b"<html>" * 10, bytes(100), MAGIC + b"\xff\xff\xff\x1f" + bytes(99)):
        path.write_bytes(data)
        with pytest.raises(DamageError, match=r"x\.rec: record at byte 0: "):
            scan(path)
