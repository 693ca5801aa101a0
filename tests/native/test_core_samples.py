"""The core's `samples`: the values, and the errors, that Python makes of the same records."""

import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.core_records import core, reads, record, taken
from support.naive_reader import seed_of
from support.raw_pixels import raw_data, raw_sample, scene
from support.small_datasets import flip, make
from support.trees import shards

from shardio import formats, native
from shardio.errors import DamageError
from shardio.formats import manifest
from shardio.formats.record import LARGE, RecordShard
from shardio.formats.sample import Sample
from shardio.images import decode as image
from shardio.storage.location import locate

pytestmark = pytest.mark.skipif(native.core is None, reason=f"no core: {native.missing}")

FIELDS = (
    ("__key__", "key"),
    ("image", "image"),
    ("label", "int"),
    ("score", "float"),
    ("good", "bool"),
    ("text", "str"),
    ("more", "bytes"),
)
EDGES = [s * 2**n - d for n in (7, 8, 15, 16, 31, 32) for s in (1, -1) for d in (0, 1)]
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "key": st.binary(min_size=1, max_size=300),
    "image": st.binary(max_size=40),
    "bytes": st.one_of(st.binary(max_size=40), st.binary(min_size=300, max_size=300)),
    "int": st.one_of(
        st.integers(-40, 300), st.sampled_from(EDGES), st.integers(-(2**63), 2**64 - 1)
    ),
    "float": st.floats(),
    "bool": st.booleans(),
    "str": st.one_of(st.text("a\0é漢🙂", max_size=20), st.just("é" * 40), st.just("x" * 70_000)),
}


@st.composite
def some_samples(draw: st.DrawFn) -> list[Sample]:
    def one() -> Sample:
        return {
            name: None if kind != "key" and draw(st.integers(0, 5)) == 0 else draw(VALUES[kind])
            for name, kind in FIELDS
        }

    return [one() for _ in range(draw(st.integers(1, 6)))]


def outcome(shard: RecordShard, *, with_core: bool) -> list[Any]:
    """Samples in order, values and types, and the error at the end of them, if any."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        if not with_core:
            patch.setattr(native, "core", None)
        try:
            for sample in shard.scan(0, shard.records):
                found.append([(name, type(v), repr(v)) for name, v in sample.items()])
        except DamageError as error:
            found.append(str(error))
    return found


def opened(path: Path) -> RecordShard:
    storage = locate(path)
    made = manifest.load(storage)
    shard = formats.open_shard(made.format, made.opening(storage), made.shard(0))
    assert isinstance(shard, RecordShard)
    return shard


def letters_of(shard: RecordShard) -> bytes:
    """The types of a shard's fields, as the core is told them."""
    letters = dict(key="k", int="i", float="f", bool="b", str="s", image="B", bytes="B")
    return "".join(letters[kind] for _, kind in shard.schema.fields).encode()


@reads
@settings(suppress_health_check=[HealthCheck.too_slow])  # the first draw takes long under ASan
@given(some_samples())
def test_samples_of_all_kinds_are_those_of_python(
    tmp_path_factory: pytest.TempPathFactory, given_samples: list[Sample]
) -> None:
    out, count = tmp_path_factory.mktemp("all") / "out", len(given_samples)
    make(out, [count], fields=FIELDS, sample=given_samples.__getitem__, classes=None)
    shard = opened(out)
    found = outcome(shard, with_core=True)
    assert found == outcome(shard, with_core=False)
    assert len(found) == len(given_samples)
    start = shard.offset(0)
    ends = np.cumsum(shard.sizes[:])
    block = shard._file.read(start, int(ends[-1]))
    made = core().samples(block, ends, seed_of(shard), shard.schema.names, letters_of(shard))
    assert len(made) == len(given_samples)  # none was left to Python
    with open(shards(out)[0], "rb") as file:
        alone = [one_sample(shard, file.fileno(), i) for i in range(shard.records)]
    small = [shard.sizes[i] < LARGE for i in range(shard.records)]  # else it leaves it to Python
    assert repr(alone) == repr([m if s else None for m, s in zip(made, small, strict=True)])
    assert repr(list(map(shard.read, range(shard.records)))) == repr(made)


def one_sample(shard: RecordShard, file: int, record: int, **other: int) -> Any:
    """What the core reads of one record of a file."""
    place = {"start": shard.offset(record), "size": int(shard.sizes[record])} | other
    bounds = place["start"], place["start"] + place["size"]
    places = np.array([bound % (1 << 64) for bound in bounds], np.uint64).view(np.int64)
    number = seed_of(shard) + record
    return core().sample(file, places, number, 0, shard.schema.names, letters_of(shard))


@reads
def test_a_record_is_read_by_the_core_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_data(tmp_path / "out", [5])
    shard = opened(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(native, "core", None)
        by_python = opened(tmp_path / "out")
    expected = [by_python.read(i) for i in range(5)]
    monkeypatch.setattr(os, "pread", None)  # Python's
    assert [shard.read(i) for i in (3, 0, 1)] == [expected[i] for i in (3, 0, 1)]
    with pytest.raises(TypeError):
        by_python.read(0)


@reads
def test_a_place_where_no_record_is(tmp_path: Path) -> None:
    raw_data(tmp_path / "out", [3])
    shard = opened(tmp_path / "out")
    start, size = shard.offset(1), int(shard.sizes[1])
    with open(shards(tmp_path / "out")[0], "rb") as file:
        at = file.fileno()
        assert one_sample(shard, at, 1)["label"] == raw_sample(1)["label"]
        for other in (-1, 0, start + 1, start - 1, 1 << 62, -(1 << 63)):
            assert one_sample(shard, at, 1, start=other) is None
        for other in (-(1 << 63), -1, 0, 1, 15, 16, size - 1, size + 1, (1 << 63) - 1):
            assert one_sample(shard, at, 1, size=other) is None
        assert one_sample(shard, at, 2, start=start, size=size) is None  # of another number
        assert one_sample(shard, -1, 1) is None
        some = (at, np.array([start, start + size]), seed_of(shard) + 1, 0)
        for names, kinds in (((), b""), (("a",), b""), (("a", "b"), b"k")):
            with pytest.raises(ValueError):
                core().sample(*some, names, kinds)
        for names in (["a"], None):
            with pytest.raises(TypeError):
                core().sample(*some, names, b"k")
        assert core().sample(*some, ("a",), b"k") is None


@reads
@pytest.mark.parametrize("stops", [0, 1, 4])
def test_python_goes_on_where_the_core_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: int
) -> None:
    raw_data(tmp_path / "out", [5])
    shard, real = opened(tmp_path / "out"), core()

    def gather(file: int, offsets: Any, seed: int, records: Any, *given: Any) -> int:
        begin, out, rows = given
        return int(real.gather(file, offsets, seed, records[:stops], begin, out, rows[:stops]))

    stopping = SimpleNamespace(gather=gather, samples=lambda *a: real.samples(*a)[:stops])
    monkeypatch.setattr(native, "core", stopping)
    found = outcome(shard, with_core=True)
    assert len(found) == 5 and found == outcome(shard, with_core=False)
    out, rows = np.zeros((7, 6, 8, 3), np.uint8), np.array([4, 1, 6, 0, 3])
    assert shard.gather(np.arange(5), None, image.ppm_header(6, 8), out, rows)
    for number, row in enumerate(rows):
        assert np.array_equal(out[row], scene(number))
    assert not out[[2, 5]].any()


def test_a_damaged_record_is_told_as_python_tells_it(tmp_path: Path) -> None:
    raw_data(tmp_path / "out", [5])
    [path] = shards(tmp_path / "out")
    shard = opened(tmp_path / "out")
    start, size = shard.offset(2), int(shard.sizes[2])
    for at in range(size):
        flip(path, start + at)
        found = outcome(shard, with_core=True)
        assert found == outcome(shard, with_core=False)
        assert len(found) == 3 and f"record 2 at byte {start} " in found[2], at
        with pytest.raises(DamageError) as told:
            shard.read(2)
        assert f"record 2 at byte {start} " in str(told.value), at
        flip(path, start + at)
    assert len(outcome(shard, with_core=True)) == 5
    shard.read(2)
    os.truncate(path, start + size - 1)
    with pytest.raises(DamageError, match="The file was cut short"):
        shard.read(2)
    assert shard.read(1)["label"] == raw_sample(1)["label"]


KEY, HI = b"\xc4\x01k", b"\xa2hi"
GOOD = b"\x94" + KEY + b"\x05" + HI + b"\x07"  # before 5 bytes of an image


@reads
@pytest.mark.parametrize(
    ("head", "blob"),
    [
        (GOOD + b"\xc0", 5),  # one value more than the array has
        (GOOD[:-1], 5),
        (GOOD, 4),
        (GOOD, 6),
        (GOOD, 0),
        (b"\x93" + GOOD[1:], 5),
        (b"\x95" + GOOD[1:], 5),
        (b"\xdc\x00\x05" + GOOD[1:], 5),
        (b"\xdc\x00", 5),
        (b"", 5),
        (b"\x94\xc0\x05" + HI + b"\x07", 5),
        (b"\x94\xa1k\x05" + HI + b"\x07", 5),
        (b"\x94" + KEY + b"\x06" + HI + b"\x07", 5),
        (b"\x94" + KEY + b"\xff" + HI + b"\x07", 5),
        (b"\x94" + KEY + b"\xcf" + b"\xff" * 8 + HI + b"\x07", 5),
        (b"\x94" + KEY + b"\xc0" + HI + b"\x07", 5),
        (b"\x94" + KEY + b"\x05\xc4\x02hi\x07", 5),
        (b"\x94" + KEY + b"\x05\x02\x07", 5),
        (b"\x94" + KEY + b"\x05\xa1\xff\x07", 5),  # no UTF-8
        (b"\x94" + KEY + b"\x05\xa4hi\x07", 5),  # on to the image
        (b"\x94" + KEY + b"\x05\xdb\xff\xff\xff\xffhi\x07", 5),
        (b"\x94" + KEY + b"\x05" + HI + b"\xc3", 5),
        (b"\x94" + KEY + b"\x05" + HI + b"\xa1x", 5),
        (b"\x94" + KEY + b"\x05" + HI + b"\xcb" + bytes(8), 5),
        (b"\x94" + KEY + b"\x05" + HI + b"\xcd\x00", 5),  # a number that goes on in the image
    ],
)
def test_heads_that_are_wrong_under_right_checksums(tmp_path: Path, head: bytes, blob: int) -> None:
    shard = of_fields(tmp_path / "out")
    bodies = [(GOOD, bytes(5)), (head, bytes(blob))]
    records = [record(i, *body, seed=seed_of(shard)) for i, body in enumerate(bodies)]
    ends = np.cumsum(list(map(len, records)))
    made = core().samples(
        b"".join(records), ends, seed_of(shard), shard.schema.names, letters_of(shard)
    )
    assert made == [{"__key__": b"k", "image": bytes(5), "text": "hi", "label": 7}]
    (tmp_path / "records").write_bytes(b"".join(records))
    with open(tmp_path / "records", "rb") as file:
        bounds = {"start": int(ends[0]), "size": len(records[1])}
        assert one_sample(shard, file.fileno(), 1, **bounds) is None
        assert [one_sample(shard, file.fileno(), 0, start=0, size=int(ends[0]))] == made
    with pytest.raises(DamageError, match="its checksum is right, but"):
        shard.decode(1, *taken([records[1]], seed_of(shard) + 1))


@reads
def test_lengths_of_two_blobs_that_add_up_only_modulo_two_to_the_64(tmp_path: Path) -> None:
    fields = (("__key__", "key"), ("image", "image"), ("more", "bytes"))
    sample = {"__key__": b"k", "image": b"12", "more": b"345"}
    make(tmp_path / "out", [1], fields=fields, sample=lambda i: sample, classes=None)
    shard = opened(tmp_path / "out")
    for first, second in ((2, 3), (2**64 - 5, 10), (10, 2**64 - 5)):
        lengths = struct.pack(">BQBQ", 0xCF, first, 0xCF, second)
        data = record(0, b"\x93" + KEY + lengths, b"12345", seed=seed_of(shard))
        ends = np.array([len(data)])
        made = core().samples(data, ends, seed_of(shard), shard.schema.names, letters_of(shard))
        assert made == ([sample] if first == 2 else [])


def of_fields(out: Path) -> RecordShard:
    fields = (("__key__", "key"), ("image", "image"), ("text", "str"), ("label", "int"))
    sample = {"__key__": b"k", "image": bytes(5), "text": "hi", "label": 1}
    make(out, [2], fields=fields, sample=lambda i: sample, classes=None)
    return opened(out)


TOKENS = [
    *(b"\x94", b"\x93", b"\xdc\x00\x04", b"\xdd\x00\x00\x00\x04", b"\xc4\x01k", b"\xa1k"),
    *(b"\xc5\x00\x01k", b"\xc6\x00\x00\x00\x01k", b"\xc4\xffk", b"\xc6\xff\xff\xff\xff"),
    *(b"\x05", b"\xcc\x05", b"\xd1\x00\x05", b"\xff", b"\xd3" + b"\xff" * 7 + b"\xfb"),
    *(b"\xcf" + b"\xff" * 8, b"\xcb" + bytes(8), b"\xca" + bytes(4)),
    *(b"\xa2hi", b"\xd9\x02hi", b"\xda\x00\x02\xff\xfe", b"\xdb\x00\x00\x00\x01x"),
    *(b"\xc0", b"\xc2", b"\xc3", b"\xc1", b"\x80", b"\xd4\x01\x00", b""),
]
KEYS = [b"\xc4\x01k", b"\xc5\x00\x01k", b"\xa1k", b"\xc0", b""]
TOKEN = st.one_of(st.sampled_from(TOKENS), st.binary(max_size=4))
HEADS = st.one_of(
    st.lists(TOKEN, max_size=7).map(b"".join),
    # Nearly right: an array of four, and a key.
    st.tuples(
        st.sampled_from([b"\x94", b"\x94", b"\xdc\x00\x04", b"\x93", b"\x95"]),
        st.sampled_from(KEYS),
        *[TOKEN] * 3,
    ).map(b"".join),
)


@reads
@given(st.lists(HEADS, min_size=1, max_size=3), st.sampled_from([0, 4, 5, 6]))
def test_heads_of_any_bytes_are_python_s_or_left_to_it(
    tmp_path_factory: pytest.TempPathFactory, heads: list[bytes], blob: int
) -> None:
    """Under right checksums; the core may refuse what Python takes, and never the other way."""
    shard = of_fields(tmp_path_factory.mktemp("heads") / "out")
    bodies = [(GOOD, bytes(5)), *((head, bytes(blob)) for head in heads)]
    records = [record(i, *body, seed=seed_of(shard)) for i, body in enumerate(bodies)]
    block = b"".join(records)
    ends = np.cumsum(list(map(len, records)))
    made = core().samples(block, ends, seed_of(shard), shard.schema.names, letters_of(shard))
    assert made[0]["text"] == "hi"
    for number, one in enumerate(made):
        [held] = taken([records[number]], seed_of(shard) + number)
        alone = shard.decode(number, held)
        assert repr(one) == repr(alone)
        assert list(map(type, one.values())) == list(map(type, alone.values()))


@reads
@given(st.binary(max_size=90), st.lists(st.integers(-3, 100), max_size=4), st.integers(0, 3))
def test_blocks_and_ends_of_any_kind(block: bytes, ends: list[int], kinds: int) -> None:
    letters = (b"k", b"kB", b"B", b"?\x00k")[kinds]
    names = ("a", "b", "c")[: len(letters)]
    assert core().samples(block, np.array(ends, np.int64), 1, names, letters) == []


def test_fields_that_need_python_are_left_to_it(tmp_path: Path) -> None:
    fields = (("__key__", "key"), ("image", "array"), ("meta", "json"))
    sample = {"__key__": b"k", "image": np.arange(6), "meta": {"a": [1]}}
    make(tmp_path / "out", [3], fields=fields, sample=lambda i: sample, classes=None)
    shard = opened(tmp_path / "out")
    alone = outcome(shard, with_core=False)
    assert outcome(shard, with_core=True) == alone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "core", SimpleNamespace(**vars(native.core) | {"samples": None}))
        assert outcome(shard, with_core=True) == alone  # it is not asked
