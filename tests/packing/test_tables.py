"""Tables of every format: the types of their columns, and errors that say where."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from support import sources
from support.sources import listing
from support.tables import as_csv, as_jsonl, as_parquet, rows, write

from shardio.errors import DamageError, ShardioError, SourceError
from shardio.packing.sources import tables


def samples(path: Path) -> list[dict[str, Any]]:
    return sources.samples(listing(path))


def column(tmp_path: Path, cells: list[str]) -> tuple[str, list[Any]]:
    """The kind and the values of a column of a CSV file."""
    path = write(tmp_path / "one.csv", "x,other\n" + "".join(f"{cell},.\n" for cell in cells))
    found = tables.read(os.fsencode(path)).columns["x"]
    return found.kind, list(found.decoded(np.arange(len(found))))


@pytest.mark.parametrize(
    ("cells", "kind", "values"),
    [
        (["1", "-20", "0"], "int", [1, -20, 0]),
        (["1", "", "3"], "int", [1, None, 3]),
        (["1", "2.5", ""], "float", [1.0, 2.5, None]),
        (["1e3", ".5", "2.", "-0"], "float", [1000.0, 0.5, 2.0, 0.0]),
        (["inf", "-Infinity", "1"], "float", [math.inf, -math.inf, 1.0]),
        (["true", "FALSE", "", "True"], "bool", [True, False, None, True]),
        (["true", "1"], "str", ["true", "1"]),
        (["007", "8"], "str", ["007", "8"]),
        (["007.5", "8"], "str", ["007.5", "8"]),
        (["1_000", "8"], "str", ["1_000", "8"]),
        (["+1", "8"], "str", ["+1", "8"]),
        ([" 1", "8"], "str", [" 1", "8"]),
        (["0x1f", "8"], "str", ["0x1f", "8"]),
        (["\u0661", "8"], "str", ["\u0661", "8"]),  # a digit, but not of ours
        (["", ""], "str", [None, None]),
        (["a", "", "1"], "str", ["a", None, "1"]),
        (["18446744073709551615", "0"], "int", [2**64 - 1, 0]),
        (["-9223372036854775808"], "int", [-(2**63)]),
        (["18446744073709551616"], "str", ["18446744073709551616"]),
        (["9223372036854775808", "-1"], "str", ["9223372036854775808", "-1"]),
        (["9" * 5000], "str", ["9" * 5000]),  # Python itself refuses to read such integers
        (["1e999", "1"], "str", ["1e999", "1"]),  # would be infinite
        (["caf\u00e9", "\U0001f408"], "str", ["caf\u00e9", "\U0001f408"]),
    ],
)
def test_cells_have_the_type_that_all_of_them_look_like(
    tmp_path: Path, cells: list[str], kind: str, values: list[Any]
) -> None:
    assert column(tmp_path, cells) == (kind, values)


def test_nan_is_a_number(tmp_path: Path) -> None:
    kind, [nan, one] = column(tmp_path, ["NaN", "1"])
    assert (kind, one, math.isnan(nan)) == ("float", 1.0, True)


def test_a_value_in_the_last_piece_decides_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_ROWS", 3)
    assert column(tmp_path, ["1"] * 7) == ("int", [1] * 7)
    assert column(tmp_path, ["1"] * 7 + ["x"]) == ("str", ["1"] * 7 + ["x"])
    assert column(tmp_path, ["-1", "1", "1", "1", str(2**63)])[0] == "str"
    assert column(tmp_path, ["1", "1", "1", "", str(2**63)]) == ("int", [1, 1, 1, None, 2**63])


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([1, None, 3], "int", None),
        ([1, 2.5], "float", [1.0, 2.5]),
        ([True, False, None], "bool", None),
        ([True, 1], "json", None),
        (["a", "", None], "str", None),
        ([None, None], "str", None),
        (["1", 1], "json", None),
        ([[1, 2], None], "json", None),
        ([{"a": [1, {"b": None}]}, {}], "json", None),
        ([2**64, 1], "str", ["18446744073709551616", "1"]),
        ([2**64, 0.5], "float", [2.0**64, 0.5]),
        ([-(10**400), 0.5], "str", ["-1" + "0" * 400, "0.5"]),
        ([[2**64], 1], "json", [["18446744073709551616"], 1]),
        ([math.inf, 1], "float", [math.inf, 1.0]),
    ],
)
def test_values_of_json_lines_have_their_own_types(
    tmp_path: Path, values: list[Any], kind: str, expected: list[Any] | None
) -> None:
    text = "".join(json.dumps({"x": value, "row": i}) + "\n" for i, value in enumerate(values))
    found = tables.read(os.fsencode(write(tmp_path / "x.jsonl", text))).columns["x"]
    got = list(found.decoded(np.arange(len(values))))
    assert (found.kind, got) == (kind, values if expected is None else expected)
    assert [found.get(row) for row in range(len(values))] == got
    assert list(map(type, got)) == list(map(type, values if expected is None else expected))


def test_names_that_some_objects_lack_are_none_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_ROWS", 2)
    lines = [{"a": 1}, {}, {"a": 2}, {"a": 3}, {"b": "x", "a": None}, {"b": "y"}]
    found = samples(write(tmp_path / "x.jsonl", as_jsonl(lines)))
    assert [one["a"] for one in found] == [1, None, 2, 3, None, None]
    assert [one["b"] for one in found] == [None] * 4 + ["x", "y"]


def test_quotes_newlines_and_byte_order_marks_are_read_as_csv_has_them(tmp_path: Path) -> None:
    text = '\ufeffkey,text\r\na,"one ""two"", three"\r\nb,"two\nlines"\r\n\r\nc,it\'s\r\n'
    found = samples(write(tmp_path / "x.csv", text))
    assert [(one["__key__"], one["text"]) for one in found] == [
        (b"a", 'one "two", three'),
        (b"b", "two\nlines"),
        (b"c", "it's"),
    ]
    lines = "\ufeff" + as_jsonl([{"key": "a", "text": "\u00e9"}])
    assert samples(write(tmp_path / "x.jsonl", lines)) == [{"__key__": b"a", "text": "\u00e9"}]


def test_lists_in_parquet_are_those_of_json_lines(tmp_path: Path) -> None:
    table = [{"id": i, "box": [1.5, float(i)], "tags": [{"a": "b"}] * i} for i in range(5)]
    one = as_parquet(table, tmp_path / "x.parquet")
    assert samples(one) == samples(write(tmp_path / "x.jsonl", as_jsonl(table)))
    assert listing(one).fields == (("id", "int"), ("box", "json"), ("tags", "json"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "", "first line with the names of columns; the file is empty"),
        ("x.csv", "a,b\n", "there are no rows"),
        ("x.csv", "a,a\n1,2\n", "line 1: several columns are called 'a'"),
        ("x.csv", ",a\n1,2\n", "line 1: column 1 has no name.*index=False"),
        ("x.csv", "a;b\n1;2\n", "separated by ';'"),
        ("x.tsv", "a,b\n1,2\n", "separated by ','"),
        ("x.csv", "a,b\n1,2\n1\n", "line 3: 1 cells, expected 2: a, b"),
        ("x.csv", 'a,b\n1,"x\ny"\n1,2,3\n', "line 4: 3 cells, expected 2"),
        ("x.csv", 'a,b\n1,"x\n', "line 2: the last cell's quote is not closed"),
        ("x.csv", 'a,b\n1,"x"y\n', "line 2: "),
        ("x.csv", "a,b\r1,2\r", "line 1: a carriage return within it"),
        ("x.csv", b"a,b\n1,\xff\n", "line 2: not UTF-8: byte 2 of it is 0xff"),
        ("x.csv", "a,b\n1,2\n".encode("utf-16"), "line 1: UTF-16.*iconv"),
        ("x.csv", b"a,b\n1,\0\n", "line 2: it has a byte of 0, so this is no text\\Z"),
        ("x.csv", b"MATLAB 5.0 MAT-file\0", "no text. It is a file of MATLAB: write .* as a CSV"),
        ("x.csv", b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 9, "line 1: not UTF-8"),
        ("x.csv", "a\n" + "x" * 2_000_000, "a cell of more than 1,048,576 characters"),
        ("x.jsonl", "", "there are no rows"),
        ("x.jsonl", '{"a": 1}\n{"a": }\n', "line 2: not JSON: Expecting value"),
        ("x.jsonl", '{"a": 1}\n\n[1]\n', "line 3: expected an object, found an array"),
        ("x.jsonl", '{"a": 1} {"a": 2}\n', "line 1: not JSON: Extra data"),
        ("x.jsonl", '{"a": "\\ud800"}\n', "line 1: 'a': text with half of a surrogate"),
        ("x.jsonl", '{"b": 1}\n{"\\ud800": 1}\n', "surrogate|left out"),
        ("x.jsonl", '{"a": ' + "[" * 100_000 + "\n", "line 1: nested too deep"),
        ("x.jsonl", '{"a": ' + "9" * 5000 + "}\n", "line 1: not JSON that can be read"),
        ("x.jsonl", json.dumps({str(i): i for i in range(1001)}), "line 1: .* 1,000 names"),
        ("x.jsonl", b'{"a": "\xff"}\n', "line 1: not UTF-8"),
        ("x.json", "[]", "there are no rows"),
        ("x.json", '[{"a": 1}, 2]', "row 1: expected an object, found a number"),
        ("x.json", '[{"a": 1}, ', "row 1: not JSON"),
        ("x.json", '[{"a": 1},]', "row 1: expected an object after the comma"),
        ("x.json", '[{"a": 1} {"a": 2}]', "row 1: expected a comma"),
        ("x.json", '[{"a": 1}', "row 1: expected a comma"),
        ("x.json", '[{"a": 1}] x', "more text after the end"),
        ("x.json", "[" * 100_000, "row 0: nested too deep"),
        ("x.json", b"[\xff]", "byte 1: not UTF-8"),
        ("x.parquet", b"PAR1garbage", "no Parquet file"),
        ("x.parquet", b"", "no Parquet file"),
    ],
)
def test_what_is_no_table_is_an_error_that_says_where(
    tmp_path: Path, name: str, text: str | bytes, message: str
) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises((SourceError, DamageError), match=f"(?s)x[.].*{message}") as caught:
        if listing(path).notes:  # a name that no field can have
            raise SourceError(f"x.jsonl: {listing(path).notes}")
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isascii()


def test_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MAX_LINE", 1000)
    for name, start in (("x.csv", "a,b\n"), ("x.jsonl", '{"a": 1}\n')):
        with pytest.raises(SourceError, match="line 2: longer than 1,000 bytes"):
            listing(write(tmp_path / name, start + "x" * 2000))


def test_reading_a_listing_leaves_the_limit_of_csv_as_it_was(tmp_path: Path) -> None:
    import csv

    before = csv.field_size_limit()
    cell = "x" * (before + 1)
    assert samples(write(tmp_path / "x.csv", f"a,b\n{cell},1\n"))[0]["a"] == cell
    assert csv.field_size_limit() == before


def packs(depth: int) -> bool:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    try:
        return bool(msgpack.packb(value))
    except ValueError:
        return False


# Of lists in lists that the installed msgpack packs: 511 before release 1.2, then more.
DEEPEST = max(depth for depth in range(500, 1100) if packs(depth))


@pytest.mark.parametrize("beyond", range(-3, 4))
@pytest.mark.parametrize("inner", ["", str(2**64)])
def test_nesting_that_cannot_be_kept_is_said(tmp_path: Path, beyond: int, inner: str) -> None:
    depth = DEEPEST + beyond
    text = '{"b": 1}\n{"a": ' + "[" * depth + inner + "]" * depth + "}\n"
    path, before = write(tmp_path / "x.jsonl", text), sys.getrecursionlimit()
    sys.setrecursionlimit(5000)  # Python's own limit may be higher than msgpack's
    try:
        found = listing(path)
        assert beyond <= 0
        with found.source.open() as read:
            assert len(read(1)["a"]) == 1
    except SourceError as error:
        assert "x.jsonl: line 2: 'a': nested too deep" in str(error)
        assert beyond > -3
    finally:
        sys.setrecursionlimit(before)


def test_random_bytes_in_any_format_end_in_our_errors(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    good = {
        "csv": as_csv(rows(5)).encode(),
        "jsonl": as_jsonl(rows(5)).encode(),
        "json": json.dumps(rows(5)).encode(),
        "parquet": as_parquet(rows(5), tmp_path / "x.parquet").read_bytes(),
    }
    for kind, data in good.items():
        for _ in range(60):
            hurt = bytearray(data)
            for at in generator.integers(0, len(hurt), 3):
                hurt[at] = generator.integers(0, 256)
            path = write(
                tmp_path / f"y.{kind}", bytes(hurt[: generator.integers(1, len(hurt) + 1)])
            )
            try:
                found = tables.read(os.fsencode(path))
            except ShardioError:
                continue
            for one in found.columns.values():
                assert len(list(one.decoded(np.arange(found.rows)))) == found.rows
