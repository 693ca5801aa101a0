"""LMDB databases of others: golden files, trees as liblmdb writes them, and as it never would.

Caffe cannot be installed here: its Datums in golden/lmdb_foreign are encoded by the protobuf
package from the published caffe.proto, see tests/golden/make_lmdb_foreign.py.
"""

import hashlib
import json
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import every_format
from support.lmdb_writer import write

from shardio.dataset import sequence as sequences
from shardio.errors import DamageError, ShardioError, SourceError
from shardio.formats.foreign.lmdb import LmdbFile
from shardio.names import KEY
from shardio.packing import index as indexing
from shardio.packing.pack import pack
from shardio.storage.location import locate

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "lmdb_foreign"
JPEG = b"\xff\xd8\xff\xe0"


def read(path: Path) -> dict[bytes, dict[str, Any]]:
    """All that the layout finds, by key; no key comes twice."""
    file = LmdbFile(locate(path.parent), path.name)
    try:
        found = [file.values(file.read(*place), record) for record, place in enumerate(file.scan())]
    finally:
        file.close()
    keyed = {values.pop(KEY): values for values in found}
    assert len(keyed) == len(found)
    return keyed


def described(value: Any) -> Any:
    """As the golden script says it."""
    if isinstance(value, np.ndarray):
        assert value.flags.owndata and value.flags.c_contiguous
        digest = hashlib.sha256(value.tobytes()).hexdigest()
        return {"dtype": value.dtype.str, "shape": list(value.shape), "sha256": digest}
    if isinstance(value, bytes):
        return {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}
    return value


EXPECTED = json.loads((GOLDEN / "expected.json").read_text())["files"]


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_files_are_read_as_they_were_written(name: str) -> None:
    found = {
        key.decode(): {field: described(value) for field, value in values.items()}
        for key, values in read(GOLDEN / name).items()
    }
    assert found == EXPECTED[name]


@pytest.fixture
def index() -> Any:
    return lambda folder, **options: indexing.index(
        folder, format="lmdb-foreign", jobs=1, **options
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_files_are_datasets(name: str, tmp_path: Path, index: Any) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes((GOLDEN / name).read_bytes())
    (tmp_path / name).parent.joinpath("lock.mdb").write_bytes(bytes(8192))
    made = index(tmp_path)
    assert made.records == len(EXPECTED[name])
    kind = "array" if "dtype" in next(iter(EXPECTED[name].values()))["image"] else "image"
    assert made.fields["image"] == kind
    dataset = sequences.stored(tmp_path)
    for sample in [*dataset, *(dataset[i] for i in reversed(range(len(dataset))))]:
        for field, value in EXPECTED[name][sample[KEY].decode()].items():
            if value is not None:
                assert described(sample[field]) == value


# --- the tree ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 900, 2031, 2032, 2033, 4079, 4080, 4081, 70_000])
@pytest.mark.parametrize("scattered", [False, True])
def test_values_of_every_size_are_where_liblmdb_put_them(
    tmp_path: Path, size: int, scattered: bool
) -> None:
    noise = np.random.default_rng(size)
    entries = {
        (noise.bytes(20) if scattered else b"%08d" % i): noise.bytes(size) for i in range(70)
    }
    path = write(tmp_path / "x.mdb", entries, batch=30)
    assert {key: values["data"] for key, values in read(path).items()} == entries


def test_deep_trees_are_read_whole(tmp_path: Path) -> None:
    entries = {b"%0200d" % i: b"%d" % i for i in range(12_000)}
    path = write(tmp_path / "x.mdb", entries)
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env:
        assert env.stat()["depth"] >= 4
    assert {key: values["data"] for key, values in read(path).items()} == entries


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.integers(0, 30),
            st.sampled_from((0, 5, 900, 3000, 9000)),
            st.booleans(),
        ),
        max_size=80,
    )
)
def test_what_was_replaced_or_deleted_is_gone(
    tmp_path_factory: pytest.TempPathFactory, steps: Sequence[tuple[bool, int, int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("lmdb") / "x.mdb"
    env = lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 24, sync=False)
    transaction = env.begin(write=True)
    entries: dict[bytes, bytes] = {}
    for number, (put, key, size, commit) in enumerate(steps):
        name = b"key %d" % (key * 7919 % 31)
        if put:
            entries[name] = bytes([number]) * size
            transaction.put(name, entries[name])
        elif entries.pop(name, None) is not None:
            transaction.delete(name)
        if commit:
            transaction.commit()
            transaction = env.begin(write=True)
    transaction.commit()
    env.close()
    assert {key: values["data"] for key, values in read(path).items()} == entries


def test_records_are_numbered_as_their_values_lie(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    large = {noise.bytes(16): noise.bytes(5000) for _ in range(200)}
    file = LmdbFile(locate(tmp_path), write(tmp_path / "x.mdb", large, batch=1).name)
    offsets = [offset for offset, _ in file.scan()]
    assert offsets == sorted(offsets)
    assert [file.key(i) for i in range(200)] != sorted(large)
    file.close()
    small = {b"%06d" % i: bytes(900) for i in range(100)}
    file = LmdbFile(locate(tmp_path), write(tmp_path / "y.mdb", small).name)
    assert len(list(file.scan())) == 100
    assert [file.key(i) for i in range(100)] == sorted(small)
    file.close()


def test_an_empty_database_has_no_records(tmp_path: Path) -> None:
    assert read(write(tmp_path / "x.mdb", {})) == {}
    path = write(tmp_path / "y.mdb", {})
    with lmdb.open(str(path), subdir=False, lock=False) as env, env.begin(write=True) as t:
        t.put(b"a", b"b")
        t.delete(b"a")
    assert read(path) == {}


def test_files_longer_than_their_last_page_are_fine(tmp_path: Path) -> None:
    path = write(tmp_path / "x.mdb", {b"a": b"1"})
    path.write_bytes(path.read_bytes() + bytes(100_000))
    assert read(path) == {b"a": {"data": b"1"}}


# --- values -----------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out + bytes([value]))


def datum(*shape: int, data: bytes = b"", label: int | None = None, more: bytes = b"") -> bytes:
    fields = b"".join(bytes([8 * i]) + varint(n) for i, n in enumerate(shape, 1))
    fields += b"\x22" + varint(len(data)) + data if data else b""
    return fields + (b"" if label is None else b"\x28" + varint(label)) + more


@pytest.mark.parametrize("label", [None, 0, 1, 127, 128, 2**31 - 1, -1, -(2**31)])
def test_labels_are_int32(tmp_path: Path, label: int | None) -> None:
    path = write(tmp_path / "x.mdb", {b"a": datum(1, 1, 2, data=b"ab", label=label)})
    [values] = read(path).values()
    assert values["label"] == label and values["image"].tolist() == [[[97], [98]]]


def test_planes_become_pixels(tmp_path: Path) -> None:
    path = write(tmp_path / "x.mdb", {b"a": datum(3, 1, 2, data=bytes((1, 2, 11, 12, 21, 22)))})
    [values] = read(path).values()
    assert values["image"].tolist() == [[[1, 11, 21], [2, 12, 22]]]
    assert values["image"].dtype == np.uint8


def test_floats_may_be_packed_or_not(tmp_path: Path) -> None:
    packed = datum(2, 1, 1, more=b"\x32\x08" + struct.pack("<2f", 0.5, -2))
    single = datum(2, 1, 1, more=b"".join(b"\x35" + struct.pack("<f", x) for x in (0.5, -2)))
    path = write(tmp_path / "x.mdb", {b"a": packed, b"b": single})
    for values in read(path).values():
        assert values["image"].dtype == np.float32
        assert values["image"].tolist() == [[[0.5, -2.0]]]


def test_encoded_images_stay_files(tmp_path: Path) -> None:
    told = datum(3, 9, 9, data=JPEG, label=1, more=b"\x38\x01")
    bare = datum(data=JPEG, label=2)
    path = write(tmp_path / "x.mdb", {b"a": told, b"b": bare})
    assert read(path) == {
        b"a": {"image": JPEG, "label": 1},
        b"b": {"image": JPEG, "label": 2},
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (datum(3, 2, 2, data=bytes(11)), "3 channels, height 2 and width 2 has 11 values"),
        (datum(1, 1, 2, more=b"\x32\x07" + bytes(7)), "has 1.75 values"),
        (datum(3, 9, 9, more=b"\x38\x01"), "encoded, and has no data"),
        (datum(1, 1, 1, data=b"a", more=b"\x42\x00"), "no Datum has"),
        (datum(1, 1, 1, data=b"a", more=b"\x22\x7f"), "does not fit"),
        (datum(1, 1, 1, data=b"a", more=b"\x35\x00"), "within a field"),
        (b"\x08" + b"\x80" * 20, "more than 10 bytes"),
        (b"\x08" + b"\x80" * 3, "within a field"),
        (b"", "empty"),
    ],
)
def test_what_is_no_datum_among_datums_is_an_error(
    tmp_path: Path, value: bytes, message: str
) -> None:
    right = datum(1, 1, 1, data=b"a", label=1)
    entries = {b"%d" % i: value if i == 3 else right for i in range(9)}
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path / "x.mdb", entries))


def test_a_wrong_first_datum_is_an_error_too(tmp_path: Path, index: Any) -> None:
    right = datum(1, 1, 1, data=b"a", label=1)
    write(tmp_path / "x.mdb", {b"0": right[:-1], **{b"%d" % i: right for i in range(1, 9)}})
    with pytest.raises(DamageError, match=r"x\.mdb: record 0 at byte \d+: it ends within a field"):
        index(tmp_path)


def test_a_datum_cut_anywhere_is_an_error_or_a_datum_of_its_first_fields() -> None:
    whole = datum(1, 2, 300, data=bytes(600), label=300)
    file = LmdbFile(locate(GOLDEN), "lsun.lmdb")
    file.take("datum", b"k", struct.pack("<H", 1))
    assert file.values(whole, 0)["label"] == 300
    for end in range(len(whole)):
        try:
            values = file.values(whole[:end], 0)
        except ValueError:
            continue
        assert values["image"] is None or values["image"].shape == (2, 300, 1)
    file.close()


# --- what cannot be read in place ---------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_values_are_refused_with_the_way_out(tmp_path: Path, protocol: int) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "ran").write_text, ("x",))

    for number, value in enumerate(((b"jpeg", 3), [b"jpeg", 3], {"image": b""}, Trap())):
        data = pickle.dumps(value, protocol)
        path = write(tmp_path / f"{number}.mdb", {b"a": data, b"b": data})
        with pytest.raises(SourceError, match=r"pickled[\s\S]*pickle\.loads"):
            read(path)
    assert not (tmp_path / "ran").exists()


def test_databases_by_name_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "x.mdb"
    with lmdb.open(str(path), subdir=False, lock=False, max_dbs=2) as env:
        named = env.open_db(b"it's")
        with env.begin(write=True, db=named) as transaction:
            transaction.put(b"a", b"b")
    with pytest.raises(SourceError, match=r"mdb_dump -n -s 'it'\"'\"'s' "):
        read(path)


@pytest.mark.parametrize(
    ("at", "magic", "message"),
    [
        (24, b"\xde\xc0\xef\xbe", "LMDB 1.0"),
        (12, b"\xde\xc0\xef\xbe", "32 bits"),
        (16, b"\xbe\xef\xc0\xde", "big-endian"),
    ],
)
def test_databases_of_other_machines_are_refused(
    tmp_path: Path, at: int, magic: bytes, message: str
) -> None:
    path = tmp_path / "x.mdb"
    path.write_bytes((bytes(at) + magic).ljust(8192, b"\0"))
    with pytest.raises(SourceError, match=rf"{message}[\s\S]*mdb_dump"):
        read(path)


# --- forged trees -------------------------------------------------------------------------------

SIZE = 512


def page(number: int, kind: int, nodes: Sequence[bytes], size: int = SIZE) -> bytes:
    places, upper, body = [], size, b""
    for node in nodes:
        upper -= len(node)
        places.append(upper)
        body = node + body
    lower = 16 + 2 * len(nodes)
    head = struct.pack("<QHHHH", number, 0, kind, lower, upper)
    return (head + struct.pack(f"<{len(nodes)}H", *places)).ljust(upper, b"\0") + body


def leaf_node(key: bytes, value: bytes, flags: int = 0, size: int | None = None) -> bytes:
    length = len(value) if size is None else size
    return struct.pack("<HHHH", length & 0xFFFF, length >> 16, flags, len(key)) + key + value


def branch_node(child: int, key: bytes = b"") -> bytes:
    return struct.pack("<HHHH", child & 0xFFFF, child >> 16 & 0xFFFF, child >> 32, len(key)) + key


def database(
    *pages: bytes,
    root: int = 2,
    depth: int = 1,
    entries: int = 1,
    leaves: int = 1,
    branches: int = 0,
    size: int = SIZE,
    flags: int = 0,
) -> bytes:
    metas = b""
    for number in range(2):
        tree = struct.pack("<IHHQQQQQ", 0, flags, depth, branches, leaves, 0, entries, root)
        free = struct.pack("<IHHQQQQQ", size, 8, 0, 0, 0, 0, 0, (1 << 64) - 1)
        metas += (
            struct.pack("<QHHHH", number, 0, 8, 0, 0)
            + struct.pack("<IIQQ", 0xBEEFC0DE, 1, 0, 1 << 20)
            + free
            + tree
            + struct.pack("<QQ", 9, number)
        ).ljust(size, b"\0")
    return metas + b"".join(pages)


def run(number: int, value: bytes, pages: int = 1, kind: int = 4, size: int = SIZE) -> bytes:
    return (struct.pack("<QHHI", number, 0, kind, pages) + value).ljust(pages * size, b"\0")


def big(key: bytes, page: int, size: int) -> bytes:
    return leaf_node(key, struct.pack("<Q", page), 1, size)


@pytest.mark.parametrize("size", [256, 512, 4096, 16384, 32768])
def test_pages_of_every_size_are_read(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.mdb"
    nodes = [leaf_node(b"a", b"x" * 60), big(b"b", 3, size + 9), leaf_node(b"c", b"")]
    path.write_bytes(
        database(
            page(2, 2, nodes, size),
            run(3, b"y" * (size + 9), 2, size=size),
            entries=3,
            size=size,
        )
    )
    expected = {b"a": b"x" * 60, b"b": b"y" * (size + 9), b"c": b""}
    assert {key: values["data"] for key, values in read(path).items()} == expected


def test_the_meta_page_of_the_later_transaction_counts(tmp_path: Path) -> None:
    data = database(page(2, 2, [leaf_node(b"a", b"1")]), page(3, 2, [leaf_node(b"b", b"2")]))
    old = bytearray(data)
    old[SIZE + 128 : SIZE + 136] = struct.pack("<Q", 3)  # the root, of the second
    path = tmp_path / "x.mdb"
    path.write_bytes(old)
    assert read(path) == {b"b": {"data": b"2"}}
    old[144:152] = struct.pack("<Q", 5)
    path.write_bytes(old)
    assert read(path) == {b"a": {"data": b"1"}}


LEAF = page(2, 2, [leaf_node(b"a", b"1")])
FORGED = {
    "a page that is its own child": (
        database(page(2, 1, [branch_node(2), branch_node(2, b"b")]), branches=1, depth=3),
        "LMDB page 2: it is not where",
    ),
    "two parents of a page": (
        database(
            page(2, 1, [branch_node(3), branch_node(3, b"b")]),
            page(3, 2, [leaf_node(b"a", b"1")]),
            depth=2,
            branches=1,
        ),
        "LMDB page 3: it is not where",
    ),
    "a root beyond the file": (database(LEAF, root=3), "LMDB page 3"),
    "a root that is a meta page": (database(LEAF, root=1), "LMDB page 1"),
    "a root that is no page": (database(LEAF, root=(1 << 64) - 1), "no page of them"),
    "another page's number": (database(page(3, 2, [leaf_node(b"a", b"1")])), "no page of a tree"),
    "fixed-size values": (database(page(2, 2 | 0x20, [])), "no page of a tree"),
    "a leaf that is not deep enough": (database(LEAF, depth=2), "not at the depth"),
    "a tree without depth": (database(LEAF, depth=0), "depth 0"),
    "more pages than the file": (database(LEAF, leaves=1 << 60), "cannot be in"),
    "more entries": (database(LEAF, entries=2), "holds 1 keys, and says 2"),
    "a value beyond its page": (
        database(page(2, 2, [leaf_node(b"a", b"1", size=2)])),
        "does not fit",
    ),
    "an empty key": (database(page(2, 2, [leaf_node(b"", b"1")])), "does not fit"),
    "a run beyond the file": (database(page(2, 2, [big(b"a", 1 << 40, 9)])), "lies beyond"),
    "a run that is a leaf": (database(page(2, 2, [big(b"a", 2, 9)])), "not the first of 1 pages"),
    "a run of fewer pages": (
        database(page(2, 2, [big(b"a", 3, 600)]), run(3, b""), run(4, b"")),
        "not the first of 2 pages",
    ),
    "a run that ends beyond the file": (
        database(page(2, 2, [big(b"a", 3, 3_000_000_000)]), run(3, b"", 1)[:12] + b"\xff" * 500),
        "ends beyond the file",
    ),
    "two values in one run": (
        database(page(2, 2, [big(b"a", 3, 9), big(b"b", 3, 9)]), run(3, b"x"), entries=2),
        "not the first of 1 pages",
    ),
    "another kind of page first": (bytes(16) + database(LEAF)[16:], "It is no LMDB 0.9 database"),
    "nothing": (b"", "too few"),
    "zeros": (bytes(9000), "no LMDB database"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_trees_are_errors(tmp_path: Path, name: str) -> None:
    data, message = FORGED[name]
    path = tmp_path / "x.mdb"
    path.write_bytes(data)
    with pytest.raises(DamageError, match=message):
        read(path)


@pytest.mark.parametrize(
    "data",
    [database(LEAF, flags=4), database(page(2, 2, [leaf_node(b"a", bytes(48), 4)]))],
    ids=["flag of the tree", "flag of a node"],
)
def test_keys_of_many_values_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.mdb"
    path.write_bytes(data)
    with pytest.raises(SourceError, match="MDB_DUPSORT"):
        read(path)


# --- damage -------------------------------------------------------------------------------------


def damaged(intact: bytes, count: int) -> list[bytes]:
    noise = np.random.default_rng(3)
    made = []
    for at in noise.integers(0, len(intact), count).tolist():
        data = bytearray(intact)
        data[at] ^= 1 << (at % 8)
        made.append(bytes(data))
    made += [intact[:at] for at in range(0, len(intact), len(intact) // 40)]
    pages = noise.permutation(len(intact) // 4096).tolist()
    for a, b in zip(pages[::2], pages[1::2], strict=False):
        data = bytearray(intact)
        first, second = slice(a * 4096, a * 4096 + 4096), slice(b * 4096, b * 4096 + 4096)
        data[first], data[second] = intact[second], intact[first]
        made.append(bytes(data))
    return made


@pytest.mark.parametrize("name", ["caffe_raw/data.mdb", "caffe_encoded/data.mdb"])
def test_damage_before_indexing_ends_in_values_or_an_error(tmp_path: Path, name: str) -> None:
    path, refused = tmp_path / "x.mdb", 0
    for data in damaged((GOLDEN / name).read_bytes(), 150):
        path.write_bytes(data)
        try:
            read(path)
        except (ShardioError, ValueError):
            refused += 1
    assert refused > 40  # liblmdb has no checksums: what was flipped in a value is not seen


@pytest.mark.parametrize("name", ["caffe_raw/data.mdb", "caffe_encoded/data.mdb"])
def test_damage_after_indexing_is_found(tmp_path: Path, name: str, index: Any) -> None:
    intact = (GOLDEN / name).read_bytes()
    path = tmp_path / "x.mdb"
    path.write_bytes(intact)
    index(tmp_path)
    right = {sample[KEY]: described(sample["image"]) for sample in sequences.stored(tmp_path)}
    found = 0
    for data in damaged(intact, 100):
        path.write_bytes(data)
        reported = False
        dataset = sequences.stored(tmp_path)
        for record in range(len(right)):
            try:
                sample = dataset[record]
                assert described(sample["image"]) == right[sample[KEY]]
            except ShardioError:
                reported = True
        found += reported
    assert found > 60  # the others hit what no record is in


@pytest.mark.parametrize("what", ["a page", "a node"])
def test_a_tree_that_names_something_twice_is_damage(tmp_path: Path, what: str, index: Any) -> None:
    """Its counts are right, but a record would come twice, and another never."""
    path = write(tmp_path / "x.mdb", {b"%04d" % i: b"%04d" % i * 100 for i in range(400)})
    data = bytearray(path.read_bytes())
    kinds = [struct.unpack_from("<H", data, at + 10)[0] for at in range(0, len(data), 4096)]
    page = 4096 * (len(kinds) - 1 - kinds[::-1].index(1 if what == "a page" else 2))
    first, second = struct.unpack_from("<HH", data, page + 18)
    if what == "a page":
        data[page + first : page + first + 6] = data[page + second : page + second + 6]
    else:
        struct.pack_into("<H", data, page + 18, second)
    path.write_bytes(data)
    with pytest.raises(DamageError, match="LMDB page"):
        index(tmp_path)


def test_a_shard_of_ours_without_its_manifest_is_told(tmp_path: Path) -> None:
    """Its records with their frames are no values: `pack` took them for images."""
    every_format.pack_lmdb(tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    for call in (pack, indexing.index):
        with pytest.raises(SourceError, match=r"a shard of a packed dataset, whose manifest\.json"):
            call(tmp_path / "out", out=tmp_path / "again")
