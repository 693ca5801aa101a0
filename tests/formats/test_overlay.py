"""Files of values beside shards: what they hold, and that those that were forged are refused."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.forging import sealed
from support.naive_reader import naive_reader
from support.small_datasets import ID

import shardio
from shardio import DamageError, annotate, verify
from shardio.dataset.reader import Reader
from shardio.formats import manifest, overlay
from shardio.formats.record import RecordEncoder
from shardio.formats.version import load_version
from shardio.packing.versions import log
from shardio.storage.location import locate

Packed = Callable[..., Path]


@pytest.fixture
def out(packed: Packed) -> Path:
    """Two shards of 5 and 3 records, with a note of some."""
    folder = packed([5, 3])
    keys = shardio.open(folder, decode=None).keys()
    annotate(folder, {keys[1]: {"note": "a"}, keys[3]: {"note": "b"}}, missing="none")
    return folder


def forge(out: Path, change: Callable[[Any], Any]) -> None:
    """Write the manifest with another member `overlays`, and the right checksum."""
    lines = (out / "manifest.json").read_bytes().splitlines(keepends=True)[:-2]
    for place, line in enumerate(lines):
        if line.startswith(b'"overlays": '):
            value = change(json.loads(line.removeprefix(b'"overlays": ').rstrip(b",\n")))
            lines[place] = b'"overlays": %s,\n' % json.dumps(value).encode()
    (out / "manifest.json").write_bytes(sealed(b"".join(lines)))


def put_file(
    out: Path, samples: list[Mapping[str, Any]], *, number: int = 0, own: bytes = ID
) -> None:
    """Put a file of these samples in the place of the one of shard 0."""
    encoder = RecordEncoder(overlay.overlay_schema("note", "str"), own, number)
    data = encoder.header()
    for sample in samples:
        data += b"".join(encoder.record(sample))
    data += encoder.finish()
    digest = hashlib.sha256(data).digest()
    name = manifest.overlay_name(0, digest)
    (out / name).write_bytes(data)
    row = [0, name, len(samples), len(data), digest.hex(), f"{encoder.index_checksum:016x}"]
    forge(out, lambda _: [["note", "str", [row]]])


def row(number: Any, key: bytes | None = None, note: str = "x") -> dict[str, Any]:
    return {"__key__": key or b"%d" % number, "__row__": number, "note": note}


def test_the_bytes_are_those_of_a_shard(out: Path) -> None:
    """The reader that docs/format.md prints reads them."""
    ((_, infos),) = manifest.load(locate(out)).overlays[0].files.items()
    samples = naive_reader()["samples"]((out / infos[0].name).read_bytes())
    assert [(one["__key__"], one["__row__"], one["note"]) for one in samples] == [
        (b"1", 1, "a"),
        (b"3", 3, "b"),
    ]


def test_a_file_of_other_rows_is_read_so(out: Path) -> None:
    put_file(out, [row(0), row(4, note="y")])
    found = [sample["note"] for sample in shardio.open(out, decode=None)]
    assert found == ["x", None, None, None, "y", None, None, None]
    assert verify(out).damages == []


@pytest.mark.parametrize(
    "samples",
    [
        [row(5)],  # behind the last record
        [row(3), row(2)],
        [row(3), row(3)],
        [row(-1, b"x")],
        [row(None, b"x")],
        [row(1 << 40)],
        [row(-1, b"x"), row((1 << 64) - 1, b"y")],  # which no column holds
    ],
)
def test_rows_that_are_none_are_refused(out: Path, samples: list[Mapping[str, Any]]) -> None:
    put_file(out, samples)
    with pytest.raises(DamageError, match=r"overlay-00000-.*its rows are no records of a shard"):
        shardio.open(out, decode=None)[0]
    assert verify(out).damages


@pytest.mark.parametrize("own", [{"number": 1}, {"own": bytes(16)}])
def test_a_file_of_another_shard_or_dataset_is_refused(out: Path, own: dict[str, Any]) -> None:
    put_file(out, [row(1)], **own)
    with pytest.raises(DamageError, match="overlay-00000-"):
        shardio.open(out, decode=None)[0]


def test_a_key_that_is_not_the_row_is_found_by_verify(out: Path) -> None:
    put_file(out, [row(1, b"2")])
    (damage,) = verify(out).damages
    assert "overlay-00000-" in str(damage) and "another value for record 1" in str(damage)


def entry(**other: Any) -> Callable[[Any], Any]:
    """Change the file of the first entry."""

    def change(value: Any) -> Any:
        names = ("number", "name", "count", "size", "sha256", "index")
        own = dict(zip(names, value[0][2][0], strict=True)) | other
        return [[*value[0][:2], [list(own.values())]]]

    return change


def of_shard_1(row: list[Any]) -> list[Any]:
    return [1, row[1].replace("-00000-", "-00001-"), *row[2:]]


@pytest.mark.parametrize(
    "change",
    [
        lambda _: [["note", "str"]],
        lambda _: [["note", "key", []]],
        lambda _: [["note", "image", []]],
        lambda _: [["note", "odd", []]],
        lambda _: [["label", "str", []]],  # the shards say int
        lambda _: [["__key__", "str", []]],
        lambda _: [[5, "str", []]],
        lambda _: [["note", "str", []]] * 2,
        lambda _: [["", "str", []]],
        lambda _: {"note": 1},
        lambda _: 7,
        lambda value: [[*value[0][:2], value[0][2] * 65]],
        lambda value: [[*value[0][:2], [of_shard_1(value[0][2][0]), value[0][2][0]]]],  # no order
        entry(number=2),
        entry(number=-1),
        entry(number="0"),
        entry(count=6),
        entry(count=0),
        entry(size=-1),
        entry(name="../x.shard"),
        entry(name="overlay-00000-00000000.shard"),
        entry(sha256="00"),
        entry(index=5),
    ],
)
def test_a_manifest_that_nobody_wrote_is_refused(out: Path, change: Callable[[Any], Any]) -> None:
    forge(out, change)
    with pytest.raises(DamageError, match=r"manifest\.json"):
        shardio.open(out)


def test_numbers_that_no_column_holds_are_read_from_their_records(packed: Packed) -> None:
    out = packed([4])
    keys = shardio.open(out, decode=None).keys()
    numbers = [-5, (1 << 64) - 1, 7, None]
    annotate(out, {key: {"id": n} for key, n in zip(keys, numbers, strict=True)})
    data = shardio.open(out, decode=None)
    assert [sample["id"] for sample in data] == numbers == [data[i]["id"] for i in range(4)]
    assert data.columns("id").tolist() == numbers
    annotate(out, {keys[1]: {"id": 3}})
    annotate(out, {keys[3]: {"label": None}})
    data = shardio.open(out, decode=None)
    assert data.columns("id").tolist() == [-5, 3, 7, None]
    assert [sample["label"] for sample in data] == [0, 1, 2, None]
    assert verify(out).damages == []


def test_a_stored_column_does_not_hide_numbers_that_none_holds(packed: Packed) -> None:
    out = packed([4], classes=None)
    keys = shardio.open(out, decode=None).keys()
    annotate(out, {keys[1]: {"label": -1}, keys[2]: {"label": (1 << 64) - 1}})
    data = shardio.open(out, decode=None)
    expected = [0, -1, (1 << 64) - 1, 0]
    assert data.columns("label").tolist() == expected == [sample["label"] for sample in data]


def test_rows_whose_values_differ_are_found(packed: Packed) -> None:
    """Of numbers by the index, where nan is like nan; of others by their bytes."""
    out, nan = packed([6], classes=None), float("nan")
    keys = shardio.open(out, decode=None).keys()
    for values, texts in (
        ([nan, nan, 1.0, 2.0, None, None], ["a", "b", None, "", None, "x"]),
        ([nan, 0.5, 1.0, 3.0, None, nan], ["a", "c", None, None, None, "x"]),
    ):
        given = zip(keys, values, texts, strict=True)
        annotate(out, {key: {"v": v, "t": t} for key, v, t in given})
    annotate(out, {keys[5]: {"label": 9}})
    versions = [load_version(locate(out), one.id) for one in log(out).versions]
    label, new, old, none = (Reader(locate(out), one).shard(0) for one in versions)
    assert [overlay.rows_that_differ(old, new, name) for name in "vt"] == [[1, 3, 5], [1, 3]]
    assert [overlay.rows_that_differ(new, label, name) for name in ("v", "t", "label")] == [
        [],
        [],
        [5],
    ]
    for both in ((none, old), (old, none)):
        assert overlay.rows_that_differ(*both, "t") == [0, 1, 3, 5]


@pytest.mark.parametrize(
    ("first", "second", "dtype"),
    [
        ([1, 2, 3, 4], [300, None], "<u2"),
        ([1, 2, 3, -4], [200, 5], "<i2"),
        ([0.5, 1.5, None, 2.0], [0.1, None], "<f8"),
        ([True, False, True, False], [None, None], "|b1"),
        ([0.5, 1.5, 2.5, 3.5], [None, None], "<f4"),
    ],
)
def test_columns_are_those_of_the_values(
    packed: Packed, first: list[Any], second: list[Any], dtype: str
) -> None:
    out = packed([4])
    keys = shardio.open(out, decode=None).keys()
    annotate(out, {key: {"v": value} for key, value in zip(keys, first, strict=True)})
    annotate(out, {key: {"v": value} for key, value in zip(keys[1:3], second, strict=True)})
    data = shardio.open(out, decode=None)
    expected = [first[0], *second, first[3]]
    column = data.columns("v")
    assert column.tolist() == expected and column.dtype == np.dtype(dtype)
    found = [sample["v"] for sample in data]
    assert found == expected == [data[i]["v"] for i in range(4)]
    assert [*map(type, found)] == [*map(type, expected)]
