"""The record shard: golden files, a reader that shares no line with ours, damage, and forgery."""

import importlib.util
import json
import re
import resource
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
from support.conformance import FIELDS as EVERY_KIND
from support.conformance import SAMPLES, FormatConformance, by_hold, same, same_all
from support.conformance import sample as make_sample
from support.forging import FORGED_FIELDS as FIELDS
from support.forging import FORGED_ID as ID
from support.forging import forge, memory_below, sealed_record
from support.naive_reader import DOCS, naive_reader, untagged

from shardio import native
from shardio.errors import DamageError, SampleError, ShardioError, StorageError, VersionError
from shardio.formats import begins_packed, manifest
from shardio.formats.base import ShardInfo
from shardio.formats.index import key_hash
from shardio.formats.lmdb import LmdbShard
from shardio.formats.record import RecordEncoder, RecordShard
from shardio.formats.sample import MAX_HEAD, Schema
from shardio.names import KEY
from shardio.storage.location import locate

HERE = Path(__file__).resolve().parent.parent
GOLDEN = HERE / "golden" / "v0"


class Bytes:
    """A File in memory that also remembers the most that was asked for at once."""

    descriptor = -1

    def __init__(self, data: bytes, name: str = "here.shard") -> None:
        self.name, self.size, self.data, self.most = name, len(data), bytes(data), 0

    def read(self, start: int, length: int) -> bytes:
        assert start >= 0 and length >= 0
        self.most = max(self.most, length)
        if start + length > self.size:
            raise DamageError(f"{self.name}: cut short")
        return self.data[start : start + length]

    view = read

    def will_need(self, start: int, length: int, **_: bool) -> None: ...

    def close(self) -> None: ...


def write(
    samples: Sequence[dict[str, Any]],
    fields: Sequence[tuple[str, str]] = FIELDS,
    dataset_id: bytes = ID,
    number: int = 3,
) -> tuple[bytes, ShardInfo]:
    encoder = RecordEncoder(Schema(fields), dataset_id, number)
    data = encoder.header() + b"".join(b"".join(encoder.record(values)) for values in samples)
    data += encoder.finish()
    info = ShardInfo("x", number, len(samples), len(data), bytes(32), encoder.index_checksum)
    return data, info


def small(number: int = 0) -> list[dict[str, Any]]:
    """Three records of one length."""
    return [
        {KEY: f"{number}/{i}.jpg".encode(), "image": bytes([i + number]) * 24, "label": i}
        for i in range(3)
    ]


def readings(shard: RecordShard, record: int) -> list[Callable[[], Any]]:
    return [
        lambda: shard.read(record),
        lambda: next(shard.scan(record, record + 1)),
        lambda: list(shard.scan(0, record + 1))[record],
        lambda: by_hold(shard, record),
        lambda: shard._read_large(record, shard.offset(record), shard.offset(record + 1)),
    ]


class TestRecordConformance(FormatConformance):
    def build(self, folder: Path, fields: Any, samples: Any) -> Path:
        data, self.info = write(samples, fields)
        path = folder / "x.shard"
        path.write_bytes(data)
        return path

    def open(self, path: Path) -> RecordShard:
        return RecordShard(locate(path.parent).open(path.name), self.info, ID)


# --- the page, and what was written once -------------------------------------------------------


def test_golden_files_read_as_expected() -> None:
    expected = json.loads((GOLDEN / "expected.json").read_text())
    storage = locate(GOLDEN)
    made = manifest.load(storage)
    assert made.dataset_id.hex() == expected["dataset_id"]
    assert [list(pair) for pair in made.schema.fields] == expected["fields"]
    assert list(made.classes or ()) == expected["classes"]
    assert made.blob_bytes == expected["blob_bytes"]
    assert made.shards == len(expected["shards"])
    naive = naive_reader()["samples"]
    for number, described in enumerate(expected["shards"]):
        info = made.shard(number)
        assert info.name == described["name"]
        shard = RecordShard(storage.open(info.name), info, made.dataset_id)
        rights = [untagged(values) for values in described["samples"]]
        assert shard.records == len(rights)
        assert [shard.offset(i) for i in range(len(rights))] == described["offsets"]
        for record, right in enumerate(rights):
            for read in readings(shard, record):
                assert same(read(), right)
            assert shard.key(record) == right[KEY]
        assert same_all(naive((GOLDEN / info.name).read_bytes()), rights)
        shard.close()


def golden_tool() -> Any:
    path = HERE / "golden" / "make.py"
    spec = importlib.util.spec_from_file_location("make_golden", path)
    assert spec and spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_golden_files_are_written_again_to_the_same_bytes(tmp_path: Path) -> None:
    golden_tool().write(tmp_path)
    names = sorted(file.name for file in GOLDEN.iterdir())
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes(), name


def test_a_golden_file_with_erased_records_reads_as_expected() -> None:
    folder = HERE / "golden" / "v1"
    expected = json.loads((folder / "expected.json").read_text())
    rights = [None if one is None else untagged(one) for one in expected]
    erased = [number for number, one in enumerate(rights) if one is None]
    [path] = folder.glob("*.shard")
    shard = RecordShard(locate(folder).open(path.name))
    assert shard.records == len(rights) and shard.erased.tolist() == erased == [1, 2]
    for record, right in enumerate(rights):
        if right is not None:
            assert same(shard.read(record), right) and same(by_hold(shard, record), right)
            assert shard.key(record) == right[KEY]
            continue
        for read in (shard.read, shard.key):
            with pytest.raises(DamageError, match="it was erased"):
                read(record)
    left = [right for right in rights if right is not None]
    assert same_all(naive_reader()["samples"](path.read_bytes()), left)
    shard.close()
    [path] = folder.glob("*.lmdb")
    values = LmdbShard(locate(folder).open(path.name))
    assert values.erased.tolist() == erased
    assert same_all([values.read(record) for record in range(5) if record not in erased], left)
    values.close()


def test_golden_files_with_erased_records_are_written_again(tmp_path: Path) -> None:
    tool = golden_tool()
    tool.write_erased(tmp_path)
    folder = HERE / "golden" / "v1"
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == {
        one.name: one.read_bytes() for one in folder.iterdir()
    }


def test_the_reader_of_the_page_agrees_and_refuses_damage() -> None:
    data, _ = write(SAMPLES, EVERY_KIND)
    naive = naive_reader()["samples"]
    assert same_all(naive(data), SAMPLES)
    for at in range(0, len(data), 23):
        with pytest.raises((AssertionError, ValueError, struct.error)):
            list(naive(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]))


def test_the_bytes_on_the_page_are_those_of_the_golden_file() -> None:
    [name] = (file.name for file in GOLDEN.glob("00000-*.shard"))
    page, data = DOCS.read_text(), (GOLDEN / name).read_bytes()
    assert name in page
    lines = re.findall(r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} )+)", page, re.MULTILINE)
    assert len(lines) > 10
    for at, shown in lines:
        start, wanted = int(at, 16), bytes.fromhex(shown)
        assert data[start : start + len(wanted)] == wanted, at
    [(skip, count)] = re.findall(r"skip=(\d+) count=(\d+)", page)
    image = data[int(skip) : int(skip) + int(count)]
    assert image.startswith(b"\x89PNG") and image.endswith(b"IEND\xaeB`\x82")


def test_the_limits_on_the_page_are_those_of_the_code() -> None:
    from shardio.formats import base, record, sample

    page = DOCS.read_text()
    for limit in (
        sample.MAX_FIELDS,
        sample.MAX_NAME,
        sample.MAX_KEY,
        sample.MAX_HEAD,
        sample.MAX_BODY,
        sample.MAX_DEPTH,
        sample.MAX_DIMENSIONS,
        base.MAX_RECORDS,
        record.MAX_FIELDS_BYTES,
        manifest.MAX_MANIFEST,
        manifest.MAX_SHARDS,
    ):
        assert f"{limit:,}" in page, limit


# --- damage -------------------------------------------------------------------------------------


def check_damaged(data: bytes, info: ShardInfo, rights: Sequence[Any], at: int | None) -> None:
    """Each reading of each record is right or a ShardioError; never silent where byte `at` is."""
    try:
        shard = RecordShard(Bytes(data), info, ID)
    except ShardioError as error:
        assert "here.shard" in str(error)
        return
    for record, right in enumerate(rights):
        start, stop = shard.offset(record), shard.offset(record + 1)
        hit = at is not None and start <= at < stop
        for read in readings(shard, record):
            try:
                found = read()
            except DamageError as error:
                assert hit or at is None or at < start, "an intact record was refused"
                if hit:
                    assert f"here.shard: record {record} at byte {start} (" in str(error)
                    assert f"key {right[KEY].decode()})" in str(error) or at < start + 16 + 13
                continue
            assert not hit, "damage went unnoticed"
            assert same(found, right)
        try:
            assert shard.key(record) == right[KEY]
        except DamageError:
            assert hit
    if at is not None:
        assert any(shard.offset(i) <= at < shard.offset(i + 1) for i in range(len(rights)))


def test_every_flipped_bit_is_found() -> None:
    data, info = write(small())
    assert len(data) < 450
    check_damaged(data, info, small(), None)
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            check_damaged(damaged, info, small(), at)


def test_every_truncation_and_extension_is_found() -> None:
    data, info = write(small())
    wrong = [data[:length] for length in range(len(data))]
    wrong += [data + b"\x00", data + data, b"\x00" + data, data + data[-60:]]
    for damaged in wrong:
        for known in (info, None):
            with pytest.raises(DamageError, match=r"here\.shard"):
                RecordShard(Bytes(damaged), known, ID)


def test_zeroed_and_foreign_pages_are_found() -> None:
    samples = [make_sample(i, 700) for i in range(30)]
    data, info = write(samples, EVERY_KIND)
    other, _ = write([make_sample(i + 50, 700) for i in range(30)], EVERY_KIND)
    for page in range(0, len(data), 512):
        for fill in (bytes(512), b"\xff" * 512, other[page : page + 512], data[:512]):
            damaged = data[:page] + fill[: len(data) - page] + data[page + len(fill) :]
            if damaged == data:
                continue
            with pytest.raises(DamageError):
                shard = RecordShard(Bytes(damaged), info, ID)
                for _ in shard.scan(0, 30):
                    pass


def test_records_that_change_places_are_found() -> None:
    data, info = write(small())
    shard = RecordShard(Bytes(data), info, ID)
    at = [shard.offset(i) for i in range(4)]
    assert at[1] - at[0] == at[2] - at[1] == at[3] - at[2]
    swapped = data[: at[0]] + data[at[1] : at[2]] + data[at[0] : at[1]] + data[at[2] :]
    damaged = RecordShard(Bytes(swapped), info, ID)
    for record in 0, 1:
        for read in readings(damaged, record):
            with pytest.raises(DamageError, match=r"record [01] at byte \d+ "):
                read()
    assert same(damaged.read(2), small()[2])


@pytest.mark.parametrize("other", [{"number": 4}, {"dataset_id": bytes(16)}])
def test_a_record_of_another_shard_in_the_same_place_is_found(other: dict[str, Any]) -> None:
    """A misdirected write: same number, same length, same offset, same key, intact in itself."""
    data, info = write(small())
    changed = [values | {"image": b"other" * 4 + b"abcd"} for values in small()]
    foreign, _ = write(changed, **other)
    shard = RecordShard(Bytes(data), info, ID)
    start, stop = shard.offset(1), shard.offset(2)
    damaged = RecordShard(Bytes(data[:start] + foreign[start:stop] + data[stop:]), info, ID)
    for read in readings(damaged, 1):
        with pytest.raises(DamageError, match=r"record 1 at byte \d+ \(key 0/1\.jpg\): checksum"):
            read()


def test_shards_that_change_places_are_found() -> None:
    a, info_a = write(small(1), number=1)
    b, info_b = write(small(2), number=2)
    c, _ = write(small(1), number=1, dataset_id=bytes(16))
    d, _ = write(small(3), number=1)  # the same number and dataset, another content
    for data, info, what in (
        (a, info_b, "its shard number is 1, but the manifest says 2"),
        (b, info_a, "its shard number is 2, but the manifest says 1"),
        (c, info_a, "belongs to dataset 0000"),
        (d, info_a, r"its index checksum is \d+, but the manifest says \d+"),
    ):
        with pytest.raises(DamageError, match=rf"here\.shard: {what}"):
            RecordShard(Bytes(data), info, ID)


def test_a_scan_names_the_damaged_record_after_the_good_ones() -> None:
    data, info = write([values | {KEY: b"\x1b[31m"} for values in small()])
    offset = RecordShard(Bytes(data), info, ID).offset(1)
    damaged = bytearray(data)
    damaged[offset + 40] ^= 1
    scan = RecordShard(Bytes(damaged), info, ID).scan(0, 3)
    assert next(scan)["label"] == 0
    with pytest.raises(DamageError) as caught:
        next(scan)
    assert str(caught.value).startswith(
        f"here.shard: record 1 at byte {offset} (key \\x1b[31m): checksum is 0x"
    )
    assert "shardio verify" in str(caught.value)


def test_a_file_that_shrinks_while_it_is_read_is_damage(tmp_path: Path) -> None:
    data, info = write(small())
    (tmp_path / "x").write_bytes(data)
    shard = RecordShard(locate(tmp_path).open("x"), info, ID)
    (tmp_path / "x").write_bytes(data[:200])
    with pytest.raises(DamageError, match="cut short"):
        list(shard.scan(0, 3))
    shard.close()
    with pytest.raises(StorageError):
        shard.read(0)


def test_a_newer_version_is_told_apart_from_damage() -> None:
    data, info = write(small())
    newer = bytearray(data)
    newer[8] = newer[-60 + 24] = 2
    with pytest.raises(VersionError, match="version 2; this shardio reads up to 1"):
        RecordShard(Bytes(newer), info, ID)
    other_sum = bytearray(data)
    other_sum[10] = 2
    with pytest.raises(VersionError, match="checksum kind 2"):
        RecordShard(Bytes(other_sum), info, ID)


def test_header_and_trailer_are_of_one_version() -> None:
    encoder = RecordEncoder(Schema(FIELDS), ID, 3, version=1)
    data = encoder.header()
    encoder.version = 0
    data += b"".join(b"".join(encoder.record(values)) for values in small()) + encoder.finish()
    with pytest.raises(DamageError, match="header and trailer name different"):
        RecordShard(Bytes(data))


def test_the_first_bytes_tell_a_shard() -> None:
    data, _ = write([])
    assert all(begins_packed(data[:n]) for n in range(20))
    assert not begins_packed(b"{\n")


# --- forgery: what no shardio wrote, under checksums that are right ------------------------------


def refused(data: bytes, says: str = "written by something else") -> str:
    """The DamageError of a forged shard, opened or read; memory stays small."""
    file = Bytes(data)
    with memory_below(64 << 20), pytest.raises(DamageError) as caught:
        shard = RecordShard(file, dataset_id=ID)
        messages = []
        for number in range(min(shard.records, 3)):
            for read in readings(shard, number):
                with pytest.raises(DamageError) as damage:
                    read()
                messages.append(str(damage.value))
        assert messages, "a forged shard without records was accepted"
        assert all(says in message for message in messages), messages
        raise damage.value
    assert file.most <= len(data)
    assert str(caught.value).startswith("here.shard: ")
    return str(caught.value)


GOOD = msgpack.packb([b"k", None, 1])


def test_the_forger_makes_good_shards_too() -> None:
    shard = RecordShard(
        Bytes(forge([sealed_record(GOOD), sealed_record(GOOD, number=1)])), dataset_id=ID
    )
    for number in 0, 1:
        for read in readings(shard, number):
            assert read() == {KEY: b"k", "image": None, "label": 1}
    assert len(shard.columns) == 0
    columned = forge([sealed_record(GOOD)], described=[["label", "<f8", True]], columns=bytes(9))
    assert RecordShard(Bytes(columned)).columns["label"].tolist() == [None]


NUMBERS = (1, 3, 4, 7, 2**16, 2**31, 2**32 - 1)


@pytest.mark.parametrize(
    "data",
    [
        *(forge(fields_length=n) for n in (0, 1, *NUMBERS)),
        *(forge(description_length=n) for n in (0, *NUMBERS[1:])),
        *(forge([sealed_record(GOOD)], count=n) for n in (0, 2, *NUMBERS[1:])),
        *(forge(count=n) for n in NUMBERS),
        *(forge([sealed_record(GOOD)], offset=n) for n in (0, *NUMBERS, 2**63, 2**64 - 1)),
        *(forge([sealed_record(GOOD)], length=n) for n in (0, *NUMBERS, 2**63, 2**64 - 1)),
        forge(offset=2**64 - 60, length=60),
        *(forge([sealed_record(GOOD)], lengths=[n]) for n in (0, *NUMBERS)),
        forge([sealed_record(GOOD)], lengths=[]),
        forge([sealed_record(GOOD), sealed_record(GOOD, number=1)], lengths=[5, 5]),
        forge(index=b""),
        forge(index=b"\x00"),
        forge(index=b"\x00\x00\x00\x00"),
        forge(index=b"\xff\xff\xff\xff"),
        forge(number=4),
        forge(zero=1),
        forge(header_zero=1),
        forge(columns=b"\x00"),
        forge([sealed_record(GOOD)], hashes=bytes(3)),
        forge([sealed_record(GOOD)], hashes=bytes(5)),
    ],
)
def test_hostile_lengths_of_header_index_and_trailer_are_refused(data: bytes) -> None:
    refused(data)


@pytest.mark.parametrize(
    "data",
    [
        *(sealed_record(GOOD, head_length=n) for n in (0, *NUMBERS) if n != len(GOOD)),
        sealed_record(b""),
        sealed_record(b"\xc1"),
        sealed_record(GOOD, b"x"),
        sealed_record(msgpack.packb([b"k", 5, 1]), b"four"),
        sealed_record(msgpack.packb([b"k", -1, 1])),
        sealed_record(msgpack.packb([b"k", 2**64 - 1, 1]), b"four"),
        sealed_record(msgpack.packb([b"k", "four", 1]), b"four"),
        sealed_record(msgpack.packb([b"k", 0, "1"])),
        sealed_record(msgpack.packb([b"k", 0])),
        sealed_record(msgpack.packb([None, 0, 0])),
        sealed_record(msgpack.packb([b"k", 0, 0, 0])),
        sealed_record(msgpack.packb({b"k": 0})),
        sealed_record(b"\x93\xc4\x01k\x00" + b"\x91" * 60_000),
        sealed_record(b"\x93\xc4\x01k\x00\xdd" + struct.pack(">I", 2**32 - 1)),
        sealed_record(
            b"\xdd" + struct.pack(">I", 20 << 20) + b"\x80" * (20 << 20)
        ),  # above MAX_HEAD
        sealed_record(msgpack.packb([b"k", 20_000, None]), bytes(19_999)),
        sealed_record(msgpack.packb([b"k", 20_000, 0.5]), bytes(20_000)),
    ],
)
def test_hostile_records_are_refused_by_every_way_of_reading(data: bytes) -> None:
    assert "record 0 at byte" in refused(forge([data]))


@pytest.mark.parametrize(
    ("count", "why"),
    [(500_000, "its head does not fit the fields"), (600_000, "more than 262,144 lists and maps")],
)
def test_a_bomb_of_empty_maps_where_an_int_belongs_is_refused(count: int, why: str) -> None:
    bomb = b"\x93\xc4\x01k\x00\xdd" + struct.pack(">I", count) + b"\x80" * count
    shard = RecordShard(Bytes(forge([sealed_record(bomb)])))
    with memory_below(64 << 20), pytest.raises(DamageError, match=why):
        shard.read(0)


@pytest.mark.parametrize("length", [0, *NUMBERS])
def test_a_length_that_is_not_that_of_the_index_is_refused(length: int) -> None:
    refused(forge([sealed_record(GOOD, length=length)]), f"its length is {length:,}, expected 6")


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (4, 1), (0, 0), (5, -1), (-1, 5)])
def test_blobs_that_do_not_fill_their_record_are_refused(sizes: tuple[int, int]) -> None:
    fields = [[KEY, "key"], ["image", "image"], ["extra", "bytes"]]
    refused(forge([sealed_record(msgpack.packb([b"k", *sizes]), b"four")], fields=fields))
    refused(forge([sealed_record(msgpack.packb([b"k", *sizes]), b"four" * 5000)], fields=fields))


def test_a_head_above_its_limit_among_small_records_is_refused_by_a_scan() -> None:
    big = b"\x92\xc4\x01k\xdd" + struct.pack(">I", MAX_HEAD) + b"\xc0" * MAX_HEAD
    heads = [msgpack.packb([b"k", None])] * 200
    heads[100] = big
    data = forge(
        [sealed_record(head, number=i) for i, head in enumerate(heads)],
        fields=[[KEY, "key"], ["x", "json"]],
    )
    scan = RecordShard(Bytes(data)).scan(0, 200)
    assert len([next(scan) for _ in range(100)]) == 100
    with pytest.raises(DamageError, match=r"record 100 .*its head cannot be 1,048,585 bytes"):
        next(scan)


def test_a_scan_never_swallows_what_it_cannot_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    data, info = write(small())
    shard = RecordShard(Bytes(data), info, ID)

    def failing(*_: Any) -> Any:
        raise MemoryError
        yield

    monkeypatch.setattr(native, "core", None)
    monkeypatch.setattr(shard.schema, "decode_run", failing)
    with pytest.raises(MemoryError):
        list(shard.scan(0, 3))


class Mended(Bytes):
    """A file of a store: what came damaged is right when it is read again."""

    def __init__(self, data: bytes, right: bytes) -> None:
        super().__init__(data)
        self.right, self.again = right, 0

    def keep_end(self, size: int) -> bool:
        return True

    def read_again(self, start: int, length: int) -> bytes:
        self.again += 1
        return self.right[start : start + length]


@pytest.mark.parametrize("core", [True, False])
@pytest.mark.parametrize("text", [True, False])
def test_a_scan_goes_on_with_what_is_right_when_it_is_read_again(
    monkeypatch: pytest.MonkeyPatch, core: bool, text: bool
) -> None:
    if not core:
        monkeypatch.setattr(native, "core", None)
    data, info = write(small())
    damaged = bytearray(data)
    damaged[data.index(bytes([1]) * 24)] ^= 1
    file, schema = Mended(damaged, data), Schema(FIELDS)
    right = list(RecordShard(Bytes(data), info, ID).scan(0, 3, text=text))
    assert list(RecordShard(file, info, ID, schema=schema).scan(0, 3, text=text)) == right
    assert file.again == 1
    with pytest.raises(DamageError, match="record 1 "):
        list(RecordShard(Mended(damaged, damaged), info, ID, schema=schema).scan(0, 3))


def test_a_head_longer_than_the_record_does_not_pass_with_a_negative_blob() -> None:
    refused(forge([sealed_record(msgpack.packb([b"k", -5, 1]), head_length=len(GOOD) + 5)]))


def test_a_json_field_may_hold_what_a_head_can() -> None:
    """Not damage: half a megabyte of empty maps is a legal value, and a megabyte with some."""
    fields = [[KEY, "key"], ["x", "json"]]
    for count, maps in (
        (MAX_HEAD // 2 - 100, MAX_HEAD // 2 - 100),
        (MAX_HEAD - 100, (1 << 18) - 2),
    ):
        check_json_field(fields, count, maps)


def check_json_field(fields: list[list[str]], count: int, maps: int) -> None:
    values = b"\x80" * maps + b"\xc0" * (count - maps)
    head = b"\x92\xc4\x01k\xdd" + struct.pack(">I", count) + values
    with memory_below(64 << 20):
        shard = RecordShard(Bytes(forge([sealed_record(head)], fields=fields)))
        assert len(shard.read(0)["x"]) == count


def test_a_sparse_file_that_claims_a_huge_index_allocates_nothing(tmp_path: Path) -> None:
    start = forge()[:-60]
    for records, size in ((1, 1 << 33), (2**32 - 1, 1 << 33), (2**32 - 1, 1 << 36)):
        path = tmp_path / "x"
        with path.open("wb") as file:
            file.write(start)
            file.seek(size)
            offset = 100 if records == 1 else size - 8 * records - 4 if size >> 35 else 5000
            file.write(
                struct.pack("<QQIIHBB16s", offset, size - offset, records, 3, 0, 1, 0, ID)
                + bytes(8)
                + b"\x89DHS\r\n\x1a\n"
            )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        shard = locate(tmp_path).open("x")
        with pytest.raises(DamageError, match="cannot take"):
            RecordShard(shard)
        shard.close()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_key_that_is_not_the_one_of_the_index_is_refused() -> None:
    data = forge([sealed_record(GOOD)], hashes=struct.pack("<I", key_hash(b"other")))
    with pytest.raises(DamageError, match="its key is not the one in the index"):
        RecordShard(Bytes(data)).key(0)


# --- writing ------------------------------------------------------------------------------------


def test_a_column_that_no_integer_type_holds_is_left_out() -> None:
    samples = [{KEY: b"k", "image": None, "label": value} for value in (-1, 2**63)]
    data, info = write(samples)
    shard = RecordShard(Bytes(data), info, ID)
    assert dict(shard.columns) == {}
    assert [values["label"] for values in shard.scan(0, 2)] == [-1, 2**63]


def test_a_refused_sample_leaves_the_shard_as_it_was() -> None:
    encoder = RecordEncoder(Schema(FIELDS), ID, 3)
    data = encoder.header()
    for values in small():
        with pytest.raises(SampleError):
            encoder.record(values | {"label": "x"})
        with pytest.raises(SampleError):
            encoder.record(values | {KEY: b"x" * 70_000})
        data += b"".join(encoder.record(values))
    data += encoder.finish()
    assert data == write(small())[0]


def test_overhead_stays_below_four_percent_of_small_images() -> None:
    samples = [
        {KEY: b"n01440764/n01440764_%05d.JPEG" % i, "image": b"x" * 900, "label": i % 1000}
        for i in range(2000)
    ]
    data, _ = write(samples)
    keys = sum(len(values[KEY]) for values in samples)
    assert len(data) < 2000 * 900 * 1.04 + keys
