"""Samples to records and back: every kind, every limit, and heads that no shardio wrote."""

import pickle
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.conformance import FIELDS, SAMPLES, same

from shardio.errors import DamageError, OptionError, SampleError
from shardio.formats import sample
from shardio.formats.sample import (
    MAX_DEPTH,
    MAX_HEAD,
    MAX_KEY,
    Schema,
    infer_fields,
    pack_head,
)
from shardio.names import KEY

LIMITED = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)

text = st.text(st.characters(codec="utf-8"), max_size=20)
ints = st.integers(-(2**63), 2**64 - 1)
dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(sizes=(16, 32, 64), endianness="?"),
    hnp.complex_number_dtypes(sizes=(64, 128), endianness="?"),
    hnp.byte_string_dtypes(max_len=5),
    hnp.unicode_string_dtypes(max_len=5, endianness="?"),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.timedelta64_dtypes(endianness="?"),
)
arrays = hnp.arrays(
    dtypes, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3), fill=st.nothing()
)
plain = st.recursive(
    st.none() | st.booleans() | ints | st.floats() | text | st.binary(max_size=20) | arrays,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "image": st.binary(max_size=300),
    "bytes": st.binary(max_size=300),
    "array": arrays,
    "int": ints,
    "float": st.floats(),
    "bool": st.booleans(),
    "str": text,
    "json": plain,
}


@st.composite
def schemas(draw: st.DrawFn) -> tuple[tuple[str, str], ...]:
    kinds = draw(st.lists(st.sampled_from(list(VALUES)), max_size=6))
    names = draw(
        st.lists(
            text.filter(lambda name: name not in ("", KEY)),
            min_size=len(kinds),
            max_size=len(kinds),
            unique=True,
        )
    )
    return ((KEY, "key"), *zip(names, kinds, strict=True))


@st.composite
def samples(draw: st.DrawFn, fields: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    made: dict[str, Any] = {KEY: draw(st.binary(min_size=1, max_size=40))}
    for name, kind in fields[1:]:
        made[name] = draw(st.none() | VALUES[kind])
    return made


def little(value: Any) -> Any:
    """As it comes back: arrays little-endian."""
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("<"))
    if isinstance(value, list):
        return [little(item) for item in value]
    if isinstance(value, dict):
        return {name: little(item) for name, item in value.items()}
    return value


def encoded(schema: Schema, values: dict[str, Any]) -> tuple[bytes, int]:
    head_values, blobs = schema.encode(values)
    head = pack_head(head_values)
    return head + b"".join(blobs), len(head)


def round_trip(schema: Schema, values: dict[str, Any]) -> dict[str, Any]:
    body, head = encoded(schema, values)
    return schema.decode(body, 0, head)


def one(kind: str, value: Any) -> Any:
    return round_trip(Schema([(KEY, "key"), ("x", kind)]), {KEY: b"k", "x": value})["x"]


@LIMITED
@given(st.data())
def test_samples_of_every_kind_come_back(data: st.DataObject) -> None:
    schema = Schema(data.draw(schemas()))
    values = data.draw(samples(schema.fields))
    body, head = encoded(schema, values)
    expected = {name: little(value) for name, value in values.items()}
    assert same(schema.decode(body, 0, head), expected)
    # and read apart, blob by blob
    head_values = sample.unpack_head(body[:head])
    blobs, at = [], head
    for size in schema.blob_sizes(head_values):
        blobs.append(body[at : at + size])
        at += size
    assert at == len(body)
    assert same(schema.assemble(head_values, blobs), expected)


@LIMITED
@given(st.binary(max_size=60), st.integers(0, 60))
def test_arbitrary_bytes_decode_to_a_sample_or_a_plain_exception(body: bytes, head: int) -> None:
    for kind in VALUES:
        schema = Schema([(KEY, "key"), ("x", kind), ("y", "json")])
        try:
            found = schema.decode(body, 0, min(head, len(body)))
        except Exception:  # the format turns any of them into a DamageError
            continue
        assert list(found) == [KEY, "x", "y"]


def test_samples_of_the_conformance_suite_come_back() -> None:
    schema = Schema(FIELDS)
    for values in SAMPLES:
        assert same(round_trip(schema, values), values)


def test_a_schema_pickles() -> None:
    schema = Schema(FIELDS)
    again = pickle.loads(pickle.dumps(schema))
    assert again.fields == schema.fields
    assert same(round_trip(again, SAMPLES[0]), SAMPLES[0])


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ("a/b.jpg", b"a/b.jpg"),
        ("a/\udcff.jpg", b"a/\xff.jpg"),  # os.fsdecode's spelling of a name that is no UTF-8
        (b"\x00" * MAX_KEY, b"\x00" * MAX_KEY),
    ],
)
def test_keys_are_bytes_as_the_file_system_gave_them(value: Any, stored: bytes) -> None:
    assert round_trip(Schema([(KEY, "key")]), {KEY: value}) == {KEY: stored}


@pytest.mark.parametrize("key", [b"", "", b"x" * (MAX_KEY + 1), None, 1, bytearray(b"k")])
def test_other_keys_are_refused(key: Any) -> None:
    with pytest.raises(SampleError):
        Schema([(KEY, "key")]).encode({KEY: key})


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("image", "text"),
        ("image", [1]),
        ("bytes", 3),
        ("array", [1, 2]),
        ("array", np.array([object()])),
        ("array", np.zeros(2, "i4,f8")),
        ("array", np.zeros(2, "V8")),
        ("array", np.zeros(2, np.longdouble)),
        ("array", np.zeros(2, [("a", "S0"), ("b", "i4")])["a"]),
        ("array", np.ma.masked_array([1, 2], [True, False])),
        # numpy 1 has no such array
        *([("array", np.zeros((1,) * 33))] if np.__version__ >= "2" else []),
        ("int", 1.0),
        ("int", True),
        ("int", 2**64),
        ("int", -(2**63) - 1),
        ("float", "1"),
        ("float", True),
        ("float", 10**400),
        ("bool", 1),
        ("str", b"x"),
        ("str", "\udc80"),
        ("json", object()),
        ("json", {1: 2}),
        ("json", {"\udc80": 2}),
        ("json", {"a": [2**64]}),
        ("json", {1, 2}),
        ("json", np.array([None])),
        ("json", np.datetime64("now")),
        ("json", np.longdouble(1)),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(kind: str, value: Any) -> None:
    with pytest.raises(SampleError, match=r"sample k: field 'x' is declared"):
        one(kind, value)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(SampleError, match=f"nested more than {MAX_DEPTH} deep"):
        one("json", loop)


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        ("bytes", bytearray(b"ab"), b"ab"),
        ("bytes", memoryview(b"abcd")[::2], b"ac"),
        ("array", np.float32(2), np.array(2, "f4")),
        ("array", np.arange(4)[::-2], np.array([3, 1])),
        ("array", np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(6).reshape(2, 3)),
        ("int", np.int8(-3), -3),
        ("float", np.float32(0.5), 0.5),
        ("float", 3, 3.0),
        ("bool", np.True_, True),
        ("json", (1, (2,)), [1, [2]]),
        ("json", {"a": np.int64(1), "b": np.float32(0.5), "c": np.str_("x")}, None),
    ],
)
def test_near_kinds_are_stored_as_the_kind(kind: str, value: Any, stored: Any) -> None:
    expected = {"a": 1, "b": 0.5, "c": "x"} if stored is None else stored
    assert same(one(kind, value), expected)


def test_missing_and_extra_fields_are_named() -> None:
    with pytest.raises(SampleError, match=r"lacks 'x' and has also y, z|lacks 'x'.*'y'"):
        Schema([(KEY, "key"), ("x", "int")]).encode({KEY: b"k", "y": 1})


def test_a_head_above_its_limit_is_refused() -> None:
    with pytest.raises(SampleError, match="small fields take"):
        one("str", "x" * MAX_HEAD)
    assert one("str", "x" * (MAX_HEAD - 100)) == "x" * (MAX_HEAD - 100)


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [("image", "image")],
        [(KEY, "bytes")],
        [(KEY, "key"), (KEY, "key")],
        [(KEY, "key"), ("x", "key")],
        [(KEY, "key"), ("x", "int"), ("x", "int")],
        [(KEY, "key"), ("x", "pickle")],
        [(KEY, "key"), ("", "int")],
        [(KEY, "key"), ("x" * 256, "int")],
        [(KEY, "key"), ("\udc80", "int")],
        [(KEY, "key"), *((f"f{i}", "int") for i in range(1000))],
    ],
)
def test_fields_that_cannot_be_are_refused(fields: list[tuple[str, str]]) -> None:
    with pytest.raises(OptionError):
        Schema(fields)
    with pytest.raises(DamageError, match="somewhere: its list of fields is not valid"):
        sample.check_schema([list(pair) for pair in fields], "somewhere")


@pytest.mark.parametrize(
    "described",
    [None, 1, "ab", {KEY: "key"}, [KEY], [[KEY, "key"], "ab"], [[KEY, "key", 1]], [[b"k", b"v"]]],
)
def test_a_list_of_fields_from_a_file_may_be_anything(described: Any) -> None:
    with pytest.raises(DamageError):
        sample.check_schema(described, "somewhere")


def test_a_thousand_fields_are_allowed() -> None:
    fields = [(KEY, "key"), *((f"f{i}", "array") for i in range(999))]
    values = {KEY: b"k"} | {name: np.array([i]) for i, (name, _) in enumerate(fields[1:])}
    assert same(round_trip(Schema(fields), values), values)


def test_field_names_never_become_code() -> None:
    name = "x: __import__('os').abort(), 'y"
    assert round_trip(Schema([(KEY, "key"), (name, "int")]), {KEY: b"k", name: 1})[name] == 1


def test_fields_are_inferred_from_a_sample() -> None:
    values = {
        "image": b"x",
        "other": b"x",
        "label": np.int64(1),
        "w": 0.5,
        "f": np.True_,
        "s": "x",
        "a": np.zeros(2),
        "j": {"a": 1},
    }
    assert infer_fields(values) == [
        (KEY, "key"),
        ("image", "image"),
        ("other", "bytes"),
        ("label", "int"),
        ("w", "float"),
        ("f", "bool"),
        ("s", "str"),
        ("a", "array"),
        ("j", "json"),
    ]
    with pytest.raises(SampleError, match="'x'"):
        infer_fields({"x": None})


# --- heads that no shardio wrote --------------------------------------------------------------


def hostile() -> Iterator[tuple[str, Any]]:
    """Kinds, and what a head could hold for them with no blob behind."""
    for dtype in ("O", "|O", "|V8", "|S0", "<U0", "<f16", ">i4", "i4", "<i3", "T", "(2,", "a5"):
        yield "array", [dtype, [0]]
    for dtype in ("<M8[xx]", "<U99999999999", "|S9999999999", "i4,i4", "(9,9)i4", "", "<i4\0", 3):
        yield "array", [dtype, [0]]
    for shape in ([-1], [2**64 - 1] * 9, [0, 2**64 - 1], [2**63, 0], [True], [0.0], [0] * 33, 0):
        yield "array", ["|u1", shape]
    for value in ([], ["|u1"], ["|u1", [0], 0], 0, "|u1", {"|u1": [0]}):
        yield "array", value
    for value in (-1, 1, 2**32, 2**64 - 1, 0.5, "", [0], {}):
        yield "bytes", value
    for kind, values in (
        ("int", (0.5, "", b"", True, [], {})),
        ("float", (1, "", True, [])),
        ("bool", (1, 0, "")),
        ("str", (b"", 1, [])),
    ):
        for value in values:
            yield kind, value


@pytest.mark.parametrize(("kind", "value"), list(hostile()))
def test_a_head_that_does_not_fit_its_fields_is_refused(kind: str, value: Any) -> None:
    schema = Schema([(KEY, "key"), ("x", kind)])
    head = msgpack.packb([b"k", value])
    with pytest.raises((ValueError, TypeError, OverflowError)):
        schema.decode(head, 0, len(head))
    values = sample.unpack_head(head)
    with pytest.raises((ValueError, TypeError, OverflowError)):
        sizes = schema.blob_sizes(values)
        if sum(sizes):
            raise ValueError("a blob where there is none")
        schema.assemble(values, [b""] * len(sizes))


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xc1",
        b"\x92",
        msgpack.packb([b"k"]),
        msgpack.packb([b"k", 1, 2]),
        msgpack.packb([None, 1]),
        msgpack.packb(["k", 1]),
        msgpack.packb({b"k": 1, b"l": 2}),
        msgpack.packb(b"kl"),
        msgpack.packb("kl"),
        msgpack.packb([b"k", msgpack.ExtType(1, b"x")]),
        msgpack.packb([b"k", msgpack.ExtType(2, b"")]),
        msgpack.packb([b"k", msgpack.Timestamp(1)]),
        msgpack.packb([b"k", 1]) + b"\x00",
        b"\x92\xc4\x01k" + b"\x91" * 5000,
        b"\x92\xc4\x01k" + b"\x81\xa1a" * 5000,
        b"\xdd\xff\xff\xff\xff",
        b"\x92\xc6\xff\xff\xff\xff",
        b"\x92\xc4\x01k\xc9\xff\xff\xff\xff\x01",
    ],
)
def test_bytes_that_are_no_head_are_refused(head: bytes) -> None:
    schema = Schema([(KEY, "key"), ("x", "int")])
    with pytest.raises(Exception):  # noqa: B017 - of msgpack's dozen; the format makes it one
        schema.decode(head, 0, len(head))
    with pytest.raises((ValueError, TypeError)):
        schema.blob_sizes(sample.unpack_head(head))


@pytest.mark.parametrize("head", [{b"k": 1, b"l": 2}, {b"k": 1, "l": 2}])
def test_a_map_is_no_head_even_where_its_keys_would_fit(head: Any) -> None:
    for kind in ("json", "str"):
        packed = msgpack.packb(head)
        with pytest.raises(ValueError):
            Schema([(KEY, "key"), ("x", kind)]).decode(packed, 0, len(packed))


@pytest.mark.parametrize(
    "inner",
    [
        ["|V8", [1], b"x" * 8],
        [">i4", [1], b"four"],
        ["|u1", [2], b"x"],
        ["O", [1], b"x" * 8],
        ["|u1", [1], "x"],
        ["|u1", [1]],
        1,
        [],
    ],
)
def test_hostile_arrays_inside_json_are_refused(inner: Any) -> None:
    schema = Schema([(KEY, "key"), ("x", "json")])
    head = msgpack.packb([b"k", [msgpack.ExtType(1, msgpack.packb(inner))]])
    with pytest.raises((ValueError, TypeError)):
        schema.decode(head, 0, len(head))
