"""TFRecord: files by TensorFlow and by another writer, protobuf in all its spellings, damage."""

import gzip
import itertools
import json
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conformance import IndexedConformance, same, same_all
from support.conformance import sample as make_sample
from support.forging import memory_below
from support.one_file import OneFile
from support.tfrecord_frames import (
    entry,
    example,
    field,
    floats,
    frame,
    ints,
    masked,
    texts,
    varint,
)

from shardio.dataset import sequence as sequences
from shardio.errors import DamageError, DependencyError, ShardioError, SourceError
from shardio.formats.foreign.base import own_key
from shardio.formats.foreign.tfrecord import TFRecordFile
from shardio.names import KEY
from shardio.packing import index as indexing
from shardio.storage.location import locate

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "tfrecord"
NO_FILE = TFRecordFile(OneFile(), "nothing")  # for what needs no file
ID = bytes(range(16))
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


# --- read back ------------------------------------------------------------------------------------


def values(data: bytes) -> dict[str, Any]:
    return NO_FILE.values(struct.pack("<QI", len(data), 0) + data + bytes(4), 0)


def write(path: Path, records: Sequence[bytes]) -> Path:
    path.write_bytes(b"".join(map(frame, records)))
    return path


def scan(path: Path) -> list[tuple[int, int]]:
    file = TFRecordFile(locate(path.parent), path.name)
    try:
        return list(file.scan())
    finally:
        file.close()


def read(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    return [NO_FILE.values(data[at : at + size], i) for i, (at, size) in enumerate(scan(path))]


# --- files of other tools -----------------------------------------------------------------------


def normal(features: dict[str, Any]) -> dict[str, Any]:
    """What expected.json says of an Example, as the layout is to give it."""
    found: dict[str, Any] = {}
    for name, (kind, content) in features.items():
        if not content:
            found[name] = None
        elif kind == "bytes_list":
            found[name] = [bytes.fromhex(value) for value in content]
        elif kind == "float_list":
            found[name] = np.frombuffer(bytes.fromhex("".join(content)), "<f4")
        else:
            found[name] = content if len(content) == 1 else np.array(content, np.int64)
    return found


@pytest.mark.parametrize("name", ["tensorflow", "package"])
def test_golden_files_read_as_tensorflow_reads_them(name: str) -> None:
    found = read(GOLDEN / f"{name}.tfrecord")
    assert len(found) == len(EXPECTED[name])
    for one, expected in zip(found, EXPECTED[name], strict=True):
        right = (
            normal(expected["features"])
            if "features" in expected
            else {"data": [bytes.fromhex(expected["data"])]}
        )
        assert same(dict(sorted(one.items())), dict(sorted(right.items())))
        for value in one.values():
            assert not isinstance(value, np.ndarray) or value.flags.owndata


def test_the_golden_files_hold_every_case() -> None:
    [_, _, every, *others] = EXPECTED["tensorflow"]
    assert {kind for kind, _ in every["features"].values()} == {
        None,
        "bytes_list",
        "float_list",
        "int64_list",
    }
    assert ["features" in one for one in others] == [False] * 5
    assert "features" not in EXPECTED["package"][-1]  # a SequenceExample


def test_the_scan_is_the_index_of_the_other_tool() -> None:
    index = (GOLDEN / "package.index").read_text().split()
    assert scan(GOLDEN / "package.tfrecord") == [
        (int(at), int(size)) for at, size in zip(index[::2], index[1::2], strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "kind"), [("gzip.tfrecord.gz", "gzip"), ("zlib.tfrecord", "zlib")]
)
def test_compressed_files_are_refused_with_the_command_that_helps(
    name: str, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / f"it's {name}"
    path.write_bytes((GOLDEN / name).read_bytes())
    with pytest.raises(SourceError, match=f"compressed as a whole \\({kind}\\)") as caught:
        scan(path)
    command = str(caught.value).splitlines()[-1].replace("python3", sys.executable, 1)
    subprocess.run(command, shell=True, check=True)
    [plain] = (file for file in tmp_path.iterdir() if file != path)
    assert same_all(read(plain), read(GOLDEN / "tensorflow.tfrecord")[:1])


# --- conformance --------------------------------------------------------------------------------


class TestTFRecordConformance(IndexedConformance):
    """The sample's fields that the format has; keys are numbers, as it has none."""

    FILE = TFRecordFile
    FIELDS = (
        (KEY, "key"),
        ("image", "image"),
        ("label", "int"),
        ("weight", "float"),
        ("caption", "str"),
        ("extra", "bytes"),
    )

    @classmethod
    def sample(cls, number: int, size: int = 100) -> dict[str, Any]:
        one = {name: make_sample(number, size)[name] for name, _ in cls.FIELDS}
        one[KEY] = own_key("x.tfrecord", number)
        if one["weight"] is not None:
            one["weight"] = float(np.float32(one["weight"]))
        return one

    def build(self, folder: Path, fields: Any, samples: Any) -> Path:
        records = []
        for one in samples:
            features = [entry(b"none", ints())]
            for name, value in one.items():
                if value is not None and name != KEY:
                    if isinstance(value, str):
                        value = value.encode()
                    encode = {bytes: texts, int: ints, float: floats}[type(value)]
                    features.append(entry(name.encode(), encode(value)))
            records.append(example(*features))
        path = write(folder / "x.tfrecord", records)
        self.seal(path, fields, samples, scan(path), NO_FILE.extra())
        return path


def test_a_folder_is_indexed_and_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    for part in range(2):
        write(
            tmp_path / f"train.tfrecord-0000{part}-of-00002",
            [
                example(
                    entry(b"image/encoded", texts(b"\xff\xd8\xff" + bytes([part, i]))),
                    entry(b"image/class/label", ints(part * 1000 + i)),
                    entry(b"boxes", floats(*[0.5] * i)),
                )
                for i in range(3)
            ],
        )
    found = indexing.index(tmp_path, jobs=1)
    assert found.fields == {KEY: "key", "image": "image", "label": "int", "boxes": "array"}
    assert found.sources == {"image": "image/encoded", "label": "image/class/label"}
    dataset = sequences.stored(tmp_path)
    assert [one["label"] for one in dataset] == [0, 1, 2, 1000, 1001, 1002]
    assert [one["image"][3:] for one in dataset] == [
        bytes([p, i]) for p in (0, 1) for i in range(3)
    ]
    boxes = [None if one["boxes"] is None else one["boxes"] for one in dataset]
    assert [None if box is None else (box.dtype.str, box.tolist()) for box in boxes] == [
        None,
        ("<f4", [0.5]),
        ("<f4", [0.5, 0.5]),
    ] * 2


# --- protobuf -----------------------------------------------------------------------------------


def test_lists_may_be_packed_or_not_or_both() -> None:
    numbers = [5, -1, 300, 2**63 - 1, -(2**63)]
    for packed in (True, False):
        found = values(
            example(
                entry(b"i", ints(*numbers, packed=packed)),
                entry(b"f", floats(0.5, -2.0, packed=packed)),
                entry(b"one", ints(-7, packed=packed)),
            )
        )
        assert same(
            found,
            {"i": np.array(numbers), "f": np.array([0.5, -2], np.float32), "one": [-7]},
        )
    mixed = field(3, field(1, varint(1) + varint(2)) + field(1, varint(3), 0) + field(1, varint(4)))
    assert same(values(example(entry(b"i", mixed))), {"i": np.array([1, 2, 3, 4])})


def test_repeated_names_kinds_and_messages_follow_protobuf() -> None:
    first, last = entry(b"a", ints(1)), entry(b"a", texts(b"x"))
    assert values(example(first, last)) == {"a": [b"x"]}
    assert values(example(first) + example(last)) == {"a": [b"x"]}
    assert values(example(entry(b"a", ints(1) + texts(b"y")))) == {"a": [b"y"]}  # oneof
    assert same(values(example(entry(b"a", ints(1) + ints(2)))), {"a": np.array([1, 2])})
    twice = field(1, field(2, texts(b"p")) + field(1, b"a") + field(2, texts(b"q")))
    assert values(example(twice)) == {"a": [b"p", b"q"]}  # any order; the two parts merge
    twice = field(1, field(1, b"a") + field(2, ints(1)) + field(2, ints(2)))
    assert same(values(example(twice)), {"a": np.array([1, 2])})


def test_fields_of_other_numbers_and_encodings_are_passed_over() -> None:
    unknown = (
        field(9, b"text") + field(10, varint(2**64 - 1), 0) + field(11, bytes(4), 5)
    ) + field(2000, bytes(8), 1)
    feature = unknown + field(1, unknown + field(1, b"x") + unknown) + unknown
    whole = field(1, unknown + field(1, b"a") + unknown + field(2, feature) + unknown)
    odd = field(1, varint(3), 0)  # a BytesList whose value is a number
    data = unknown + field(1, unknown + whole + unknown + entry(b"b", field(1, odd))) + unknown
    assert values(data) == {"a": [b"x"], "b": None}


def test_empty_features_are_none_and_empty_bytes_are_not() -> None:
    data = example(
        entry(b"none", b""),
        entry(b"bytes", texts()),
        entry(b"ints", ints()),
        entry(b"packed", field(3, field(1, b""))),
        entry(b"floats", floats()),
        entry(b"empty", texts(b"")),
        field(1, field(1, b"no value")),
    )
    names = ("none", "bytes", "ints", "packed", "floats")
    assert values(data) == {**dict.fromkeys(names), "empty": [b""], "no value": None}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"\n\x00",
        b"hello",
        b"\x08\x01",
        b"\xff" * 40,
        b"\x00" * 40,
        field(2, b""),
        example(entry(b"a", ints(1))) + field(2, b""),  # a SequenceExample
        example(entry(b"a", ints(1))) + b"\x0a",
        example(entry(b"a", ints(1)))[:-1],
        example(entry(b"\xff", ints(1))),
        example(field(1, field(2, ints(1)))),  # no name
        example(entry(b"a", field(2, field(1, b"abc")))),  # three bytes of floats
        example(entry(b"a", field(3, field(1, b"\x80")))),
        example(entry(b"a", field(3, field(1, b"\xff" * 10 + b"\x01")))),
        example(entry(b"a", field(3, field(1, (b"\xff" * 10 + b"\x01") * 20)))),
        example(*(entry(b"%d" % i, ints(1)) for i in range(1002))),
        field(1, b"\x0b"),  # a group
        # a name of 256 bytes, no UTF-8, with a feature inside for who takes it for one of 128
        example(entry(b"a" * 127 + b"\x12\x85\x01\x0a\x82\x01\x0a\xff\x00" + b"b" * 120, ints(5))),
    ],
)
def test_what_is_no_example_is_its_bytes(data: bytes) -> None:
    assert values(data) == {"data": [data]}


def test_a_length_that_does_not_fit_its_record_is_an_error() -> None:
    data = frame(example(entry(b"a", ints(1))))
    for wrong in (data[:-1], data + b"\x00", data[:15], b""):
        with pytest.raises(ValueError, match="does not fit"):
            NO_FILE.values(wrong, 0)


FEATURES = st.one_of(
    st.none(),
    st.lists(st.binary(max_size=200), min_size=1, max_size=3),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40),
    st.lists(st.floats(width=32), min_size=1, max_size=40),
)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.text(max_size=70), FEATURES, min_size=1, max_size=6),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_any_example_reads_back(
    features: dict[str, Any], packed: bool, chance: random.Random
) -> None:
    entries, right = [], {}
    for name, content in features.items():
        if content is None:
            feature, right[name] = b"", None
        elif isinstance(content[0], bytes):
            feature, right[name] = texts(*content), content
        elif isinstance(content[0], int):
            feature = ints(*content, packed=packed)
            right[name] = content if len(content) == 1 else np.array(content, np.int64)
        else:
            feature, right[name] = floats(*content, packed=packed), np.array(content, np.float32)
        entries.append(entry(name.encode(), feature))
    found = values(example(*entries))
    assert same(found, right)
    data = bytearray(example(*entries))
    for _ in range(20):  # whatever the bytes: values of a kind, never another error
        damaged = bytes(data)
        at = chance.randrange(len(data))
        damaged = (
            damaged[:at] + bytes([chance.randrange(256)]) + damaged[at + chance.randrange(3) :]
        )
        values(damaged)


def test_hostile_messages_take_no_more_memory_than_their_values() -> None:
    size = 1 << 17
    for data in (
        b"\x08\x01" * (size // 2),
        field(1, b"\x08\x01" * (size // 2)),
        field(1, b"\x0a\x00" * (size // 2)),
        example(entry(b"a", b"\x08\x01" * (size // 2))),
        example(entry(b"a", b"\x1a\x00\x0a\x00" * (size // 4))),
        example(entry(b"a", ints(*[1] * (size // 8), packed=False))),
        field(1, b"\x0a\x06\x0a\x04abcd" * (size // 8)),
    ):
        with memory_below(12 * size):
            values(data)


# --- the frame ----------------------------------------------------------------------------------


def test_every_flip_and_cut_is_found_by_the_scan(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tfrecord", [b"one", b"", example(entry(b"a", ints(1))), b"x" * 50])
    intact = path.read_bytes()
    whole = {0} | {at + size for at, size in scan(path)}
    for at in range(len(intact)):
        path.write_bytes(intact[:at] + bytes([intact[at] ^ 1 << at % 8]) + intact[at + 1 :])
        with pytest.raises(DamageError, match=r"x\.tfrecord: record at byte \d+: "):
            scan(path)
        path.write_bytes(intact[:at])
        if at in whole:  # a file cut between records is a file of fewer records
            scan(path)
        else:
            with pytest.raises(DamageError, match="cut short"):
                scan(path)


def test_messages_name_both_checksums(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tfrecord", [b"first", b"second"])
    data = bytearray(path.read_bytes())
    right = struct.unpack("<I", data[-4:])[0]
    data[-5] ^= 1
    path.write_bytes(data)
    found = struct.unpack("<I", masked(b"secone"))[0]
    with pytest.raises(DamageError) as caught:
        scan(path)
    assert f"record at byte 21: the checksum of its data is {found:#010x}" in str(caught.value)
    assert f"expected {right:#010x}" in str(caught.value)


def test_swapped_records_are_damage_once_indexed(tmp_path: Path) -> None:
    made = TestTFRecordConformance()
    samples = made.SAMPLES[:8]
    path = made.build(tmp_path, made.FIELDS, samples)
    pairs = itertools.combinations(scan(path), 2)
    (a, size), (b, other) = next(pair for pair in pairs if pair[0][1] == pair[1][1])
    data = bytearray(path.read_bytes())
    assert size == other and data[a : a + size] != data[b : b + size]
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    path.write_bytes(data)
    shard = made.open(path)
    wrong = 0
    for record in range(8):
        try:
            assert same(shard.read(record), samples[record])
        except ShardioError:
            wrong += 1
    assert wrong == 2


def test_a_length_is_bounded_before_it_is_believed(tmp_path: Path) -> None:
    for length in (1 << 40, 2**64 - 1, 2**63, 1000):
        head = struct.pack("<Q", length)
        path = tmp_path / "x.tfrecord"
        path.write_bytes(frame(b"fine") + head + masked(head) + bytes(100))
        with pytest.raises(DamageError, match=f"at byte 20: it takes {length + 16:,} bytes"):
            scan(path)


def fast_frame(data: bytes) -> bytes:
    import google_crc32c

    length = struct.pack("<Q", len(data))
    crc = google_crc32c.value(data)
    crc = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return length + masked(length) + data + struct.pack("<I", crc)


def test_large_records_are_checked_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    pieces, right, at = [], [], 0
    for size in (5, (1 << 20) - 16, (1 << 20) - 15, 7 << 20, 0, 600_000, 600_000, 9):
        pieces.append(fast_frame(bytes([size % 251]) * size))
        right.append((at, size + 16))
        at += size + 16
    whole = b"".join(pieces)
    path.write_bytes(whole)
    with memory_below(4 << 20):
        assert scan(path) == right
    for place in (right[3][0] + 12, right[3][0] + (3 << 20), right[4][0] - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DamageError, match=f"byte {right[3][0]}: the checksum of its data"):
            scan(path)


def test_records_may_end_anywhere_about_the_end_of_a_block(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    small = frame(b"nine byte")
    for missing in range(-1, 28):
        first = fast_frame(bytes((1 << 20) - 16 - missing))
        path.write_bytes(first + small + small)
        assert [at for at, _ in scan(path)] == [0, len(first), len(first) + 25]


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(b"")
    assert scan(path) == []
    noise = random.Random(0).randbytes(99)
    for data in (b"short", b"<html>" * 10, bytes(100), noise):
        path.write_bytes(data)
        with pytest.raises(DamageError):
            scan(path)
    for data in (gzip.compress(noise), zlib.compress(noise, 1), zlib.compress(noise, 9)):
        path.write_bytes(data)
        with pytest.raises(SourceError, match="compressed as a whole"):
            scan(path)


def test_without_crc32c_the_way_to_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.tfrecord", [b"x"])
    import google_crc32c

    with monkeypatch.context() as patch:
        patch.setattr(google_crc32c, "implementation", "python")
        with pytest.raises(DependencyError, match="without its compiled part"):
            scan(path)
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(DependencyError, match=r"shardio-torch\[tfrecord\]"):
        scan(path)
    assert NO_FILE.values(path.read_bytes(), 0) == {"data": [b"x"]}  # reading needs none


def test_a_feature_called_as_keys_are_is_the_key(tmp_path: Path) -> None:
    def keyed(feature: bytes) -> None:
        (tmp_path / "x.tfrecord").write_bytes(frame(example(entry(KEY.encode(), feature))))
        indexing.index(tmp_path, jobs=1, overwrite=True)

    for feature, key in ((texts(b"abc"), b"abc"), (ints(5), b"5")):
        keyed(feature)
        assert sequences.stored(tmp_path).stored_keys() == [key]
    for feature in (texts(b"a", b"b"), ints(1, 2)):
        with pytest.raises(DamageError, match=f"its {KEY} is"):
            keyed(feature)


def test_more_fields_than_a_dataset_has_are_refused_at_once(tmp_path: Path) -> None:
    records = (
        frame(example(*(entry(b"%d" % (20 * i + j), ints(1)) for j in range(20))))
        for i in range(60)
    )
    (tmp_path / "x.tfrecord").write_bytes(b"".join(records))
    with pytest.raises(SourceError, match=r"record 50 at byte .* over 1,000 fields"):
        indexing.index(tmp_path, jobs=1)
