"""Columns of Arrow as values: every type, keys, files in structs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conformance import same, shard_of
from support.parquet_tables import FILES, index, ways, write

from shardio.errors import DamageError, SourceError
from shardio.names import KEY

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

VALUES = {
    "i": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "f": (pa.float64(), st.floats(allow_nan=False)),
    "b": (pa.bool_(), st.booleans()),
    "s": (pa.string(), st.text(max_size=5)),
    "y": (pa.binary(), st.binary(max_size=5)),
    "l": (pa.list_(pa.int64()), st.lists(st.integers(-5, 5), max_size=3)),
    "n": (pa.list_(pa.string()), st.lists(st.none() | st.text(max_size=2), max_size=3)),
    "d": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["x", "yy"])),
    "q": (
        pa.struct({"a": pa.int8(), "t": pa.list_(pa.decimal128(5, 1))}),
        st.fixed_dictionaries(
            {"a": st.integers(0, 9), "t": st.lists(st.decimals(-9, 9, places=1))}
        ),
    ),
}


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return str(value) if type(value).__name__ == "Decimal" else value


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rows_are_what_pyarrow_gives(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("parquet")
    n = data.draw(st.integers(0, 12))
    names = data.draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, min_size=1))
    columns = {
        name: pa.array(
            data.draw(st.lists(st.none() | VALUES[name][1], min_size=n, max_size=n)),
            VALUES[name][0],
        )
        for name in names
    }
    path = write(
        folder / "x.parquet",
        columns,
        row_group_size=data.draw(st.integers(1, 5)),
        compression=data.draw(st.sampled_from(["none", "snappy", "zstd", "gzip"])),
        data_page_version=data.draw(st.sampled_from(["1.0", "2.0"])),
        use_dictionary=data.draw(st.booleans()),
    )
    index(folder)
    rows = [plain(row) for row in pq.read_table(path).to_pylist()]
    for samples in ways(shard_of(folder)):
        for sample, right in zip(samples, rows, strict=True):
            given = {name: plain(value) for name, value in sample.items() if name != KEY}
            assert given == {name: value for name, value in right.items() if name in given}
            assert all(right[name] is None for name in right.keys() - given.keys())


def test_columns_of_another_type_in_other_files_fit_one_field(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"x": [1, 2], "v": [[1], [2]], "only": ["a", "b"]})
    write(tmp_path / "b.parquet", {"x": [0.5, None], "v": [[1, None], [2]], "n": pa.nulls(2)})
    assert index(tmp_path).fields == {KEY: "key", "only": "str", "v": "json", "x": "float"}
    for number, expected in ((0, [1.0, 2.0]), (1, [0.5, None])):
        for samples in ways(shard_of(tmp_path, number)):
            found = [sample["x"] for sample in samples]
            assert same(found, expected)
            assert [sample["only"] for sample in samples] == (
                [None, None] if number else ["a", "b"]
            )


def test_keys_come_from_their_column_or_are_the_rows_number(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {KEY: pa.array(["é", None, ""]), "x": [1, 2, 3]})
    write(tmp_path / "b.parquet", {"x": [4]})
    index(tmp_path)
    keys = ["é".encode(), b"a/00000001", b"a/00000002"]
    for samples in ways(shard_of(tmp_path)):
        assert [sample[KEY] for sample in samples] == keys
    assert [shard_of(tmp_path).key(i) for i in range(3)] == keys
    assert shard_of(tmp_path, 1).key(0) == b"b/00000000"


def test_keys_may_be_numbers_and_nothing_stranger(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", {KEY: [7, None, 0], "x": [1, 2, 3]})
    index(tmp_path)
    for samples in ways(shard_of(tmp_path)):
        assert [sample[KEY] for sample in samples] == [b"7", b"x/00000001", b"0"]
    for odd in ([True], [1.5], [[1]]):
        write(tmp_path / "x.parquet", {KEY: odd, "x": [1]})
        with pytest.raises(SourceError, match=f"column {KEY} is .* Rename it"):
            index(tmp_path, overwrite=True)


def test_text_that_is_no_utf8_is_an_error_naming_the_row(tmp_path: Path) -> None:
    text = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    write(tmp_path / "x.parquet", {"text": text})
    with pytest.raises(DamageError, match=r"x\.parquet: record 1 .*utf-8"):
        index(tmp_path)


def test_an_image_that_is_only_a_path_is_an_error(tmp_path: Path) -> None:
    rows = [{"bytes": b"x", "path": "a"}, None, {"bytes": None, "path": None}]
    path = write(tmp_path / "x.parquet", {"photo": pa.array(rows, FILES), "n": [1, 2, 3]})
    index(tmp_path)
    for samples in ways(shard_of(tmp_path)):
        assert [(s["photo"], s["photo.path"]) for s in samples] == [
            (b"x", "a"),
            *[(None, None)] * 2,
        ]
    rows[2] = {"bytes": None, "path": "photos/\x1b7.jpg"}
    write(path, {"photo": pa.array(rows, FILES)}, row_group_size=2)
    with pytest.raises(SourceError, match=r"row 2: column 'photo' .*\\x1b7\.jpg.*\n.*embed_table"):
        index(tmp_path, overwrite=True)


def test_structs_that_only_look_like_images_stay_structs(tmp_path: Path) -> None:
    other = pa.struct({"bytes": pa.int64(), "path": pa.string()})
    more = pa.struct({"bytes": pa.binary(), "path": pa.string(), "size": pa.int64()})
    a, b = {"bytes": 1, "path": "x"}, {"bytes": b"1", "path": "x", "size": 3}
    write(tmp_path / "x.parquet", {"a": pa.array([a], other), "b": pa.array([b], more)})
    index(tmp_path)
    [sample] = shard_of(tmp_path).scan(0, 1)
    assert (sample["a"], sample["b"]) == (a, b)


@pytest.mark.parametrize("second", ["x", "image.path"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, second: str) -> None:
    images = pa.array([{"bytes": b"x", "path": None}], FILES)
    table = pa.Table.from_arrays([images, pa.array([1]), pa.array([2])], ["image", "x", second])
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(SourceError, match=f"several columns are called '{second}'"):
        index(tmp_path)
