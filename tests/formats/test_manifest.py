"""The manifest: canonical bytes, damage, hand edits, forgery, and a hundred thousand shards."""

import hashlib
import json
import re
import subprocess
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forging import sealed

from shardio.errors import DamageError, NotPackedError, OptionError, ShardioError, VersionError
from shardio.formats import manifest
from shardio.formats.base import ShardInfo
from shardio.formats.erased import after_erasing
from shardio.formats.manifest import Manifest
from shardio.formats.sample import Schema
from shardio.names import KEY, key_bytes, key_text
from shardio.storage.location import locate

FIELDS = ((KEY, "key"), ("image", "image"), ("label", "int"))
COLUMNS = ("shard_records", "shard_sizes", "shard_sha256", "shard_index")


def info(number: int, records: int = 10, size: int = 1000) -> ShardInfo:
    digest = hashlib.sha256(b"%d" % number).digest()
    name = manifest.shard_name(number, digest)
    return ShardInfo(name, number, records, size, digest, 2**64 - 1 - number)


def make(shards: int = 3, **changes: Any) -> Manifest:
    values = {
        "dataset_id": bytes(range(16)),
        "format": "record",
        "schema": Schema(FIELDS),
        "classes": ("cat", "dog"),
        "options": {"seed": 0, "shuffle": True, "ratio": 0.5},
        "library": "0.1.0",
        "blob_bytes": 2000,
    }
    return manifest.make([info(n) for n in range(shards)], **(values | changes))


def same(a: Manifest, b: Manifest) -> bool:
    return (
        all(np.array_equal(getattr(a, name), getattr(b, name)) for name in COLUMNS)
        and a.schema.fields == b.schema.fields
        and all(
            getattr(a, name) == getattr(b, name)
            for name in ("dataset_id", "format", "classes", "options", "library", "blob_bytes")
        )
    )


def body_of(data: bytes) -> bytes:
    return data[: data.rindex(b'"sha256"')]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**45)), max_size=5),
    st.none() | st.lists(st.text(max_size=5), max_size=4, unique=True).map(tuple),
    st.dictionaries(st.text(max_size=9), json_values, max_size=3),
)
def test_what_is_dumped_is_parsed_and_dumped_to_the_same_bytes(
    shards: list[tuple[int, int]], classes: tuple[str, ...] | None, options: dict[str, Any]
) -> None:
    made = manifest.make(
        [info(n, records, size) for n, (records, size) in enumerate(shards)],
        dataset_id=bytes(16),
        format="record",
        schema=Schema(FIELDS),
        classes=classes,
        options=options,
        library="1.2.3",
        blob_bytes=sum(size for _, size in shards),
    )
    data = made.dump()
    parsed = manifest.parse(data, "here")
    assert same(parsed, made)
    assert parsed.dump() == data
    assert data.isascii()
    assert json.loads(data)["records"] == made.records
    assert [parsed.shard(n) for n in range(len(shards))] == [
        info(n, records, size) for n, (records, size) in enumerate(shards)
    ]


def test_class_names_that_are_no_utf8_survive() -> None:
    names = tuple(key_text(name) for name in (b"caf\xc3\xa9", b"\xff\xfe", b"a\x80\n", b"\x1b["))
    parsed = manifest.parse(make(classes=names).dump(), "here")
    assert parsed.classes == names
    assert [key_bytes(name) for name in parsed.classes][1] == b"\xff\xfe"


def test_the_page_s_command_prints_the_manifest_s_own_hash(tmp_path: Path) -> None:
    for shards in 0, 3:
        path = tmp_path / manifest.MANIFEST
        path.write_bytes(make(shards).dump())
        command = "head -n -2 manifest.json | sha256sum"
        assert command in (Path(__file__).parent.parent.parent / "docs" / "format.md").read_text()
        found = subprocess.run(
            command, shell=True, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout
        assert found.split()[0] == json.loads(path.read_bytes())["sha256"]


def test_every_flipped_bit_and_every_truncation_is_found() -> None:
    data = make().dump()
    for at in range(len(data)):
        for damaged in (
            *(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for bit in range(8)),
            data[:at],
            data[:at] + data[at + 1 :],
            data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :],
        ):
            with pytest.raises(DamageError, match="here"):
                manifest.parse(damaged, "here")
    for damaged in (data + b"\n", data + data, data + b"\x00" * 4096, b"\n" + data):
        with pytest.raises(DamageError):
            manifest.parse(damaged, "here")


def test_a_hand_edit_is_refused_and_says_what_to_do() -> None:
    data = make().dump().replace(b'"cat"', b'"cow"')
    with pytest.raises(DamageError, match="edited by hand: restore it, or pack again"):
        manifest.parse(data, "here")


@pytest.mark.parametrize("version", [2, 7, 999_999_999])
def test_a_newer_version_says_which_library_it_needs(version: int) -> None:
    body = b'{\n"format": "shardio",\n"version": %d,\n"library": "3.1.4",\n"new": {}\n' % version
    for data in sealed(body), body:
        with pytest.raises(
            VersionError, match=rf"here: manifest version {version}; needs .*3\.1\.4"
        ):
            manifest.parse(data, "here")


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(body: bytes) -> bytes:
        assert old in body
        return body.replace(old, new, 1)

    return change


def line(change: Callable[[list[Any]], Any]) -> Callable[[bytes], bytes]:
    """Change the first shard's line."""

    def changed(body: bytes) -> bytes:
        [old] = re.findall(rb'^(\["00000.*\]),$', body, re.MULTILINE)
        row = json.loads(old)
        change(row)
        return body.replace(old, json.dumps(row).encode())

    return changed


def setting(at: int, value: Any) -> Callable[[bytes], bytes]:
    return line(lambda row: row.__setitem__(at, value))


def option(text: bytes) -> Callable[[bytes], bytes]:
    return replaced(b'"options": {', b'"options": {%b,' % text)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: b"",
        lambda body: b"{\n",
        lambda body: body.replace(b'"shards": [\n', b'"shards": ['),
        lambda body: body[:-3],
        lambda body: body + b'"more": 1,\n',
        lambda body: body + b"],\n",
        lambda body: b"[" * 100_000 + body,
        lambda body: body.replace(b'"options": {', b'"options": {"a":' + b"[" * 100_000),
        replaced(b'"version": 0', b'"version": -1'),
        replaced(b'"version": 0', b'"version": true'),
        replaced(b'"version": 0', b'"version":  5'),
        replaced(b'"format": "shardio"', b'"format": "other"'),
        replaced(b'"records": 30', b'"records": 31'),
        replaced(b'"records": 30', b'"records": 30.0'),
        replaced(b'"records": 30', b'"records": "30"'),
        replaced(b'"bytes": 3000', b'"bytes": 1'),
        replaced(b'"blob_bytes": 2000', b'"blob_bytes": -1'),
        replaced(b'"blob_bytes": 2000', b'"blob_bytes": null'),
        replaced(b'"blob_bytes": 2000,\n', b""),
        replaced(b'"dataset_id": "00', b'"dataset_id": "0'),
        replaced(b'"dataset_id": "00', b'"dataset_id": "  00'),
        replaced(b'"dataset_id": "', b'"dataset_id": 7, "x": "'),
        replaced(b'"classes": ["cat","dog"]', b'"classes": "cd"'),
        replaced(b'"classes": ["cat","dog"]', b'"classes": {"c":0}'),
        replaced(b'"classes": ["cat","dog"]', b'"classes": [1]'),
        replaced(b'"classes": ["cat","dog"]', b'"classes": ["c","c"]'),
        replaced(b'"options": {', b'"options": [], "x": {'),
        option(b'"fields":null'),
        option(b'"fields":[]'),
        option(b'"fields":{"a":1}'),
        option(b'"fields":{"a":"\\ud800"}'),
        option(b'"absent":null'),
        option(b'"absent":["a"]'),
        option(b'"row_group":{}'),
        option(b'"a":NaN'),
        option(b'"a":[{"b":-Infinity}]'),
        option(b'"a":1e999'),
        option(b'"a":' + b"[" * 900 + b"]" * 900),
        option(b'"a":' + b"[" * 33 + b"]" * 33),
        option(b'"a":' + b'{"a":' * 900 + b"1" + b"}" * 900),
        replaced(b'"shard_format": "record"', b'"shard_format": null'),
        replaced(b'"library": "0.1.0"', b'"library": 1'),
        replaced(b'["image","image"]', b'["image","pickle"]'),
        replaced(b'["image","image"]', b'"ab"'),
        replaced(b'["image","image"]', b"7"),
        replaced(b'"fields": [', b'"fields": {}, "x": ['),
        replaced(b"],\n[", b"],[ "),  # two shards in one line
        replaced(b"],\n[", b"],\n\n["),
        replaced(b"],\n[", b"]\n["),
        replaced(b"],\n[", b"],\n7,\n["),
        lambda body: body.replace(b'"shards": [\n', b'"shards": [\n' + b"\n" * 1000),
        line(lambda row: row.pop()),
        line(lambda row: row.append(1)),
        setting(0, "00001-00000000.shard"),
        setting(0, "../x"),
        setting(0, 7),
        setting(1, -1),
        setting(1, 10.0),
        setting(1, True),
        setting(1, 2**32),
        setting(1, 2**64 + 10),
        setting(1, 10**400),
        setting(2, -1000),
        setting(2, 2**63),
        setting(2, None),
        setting(3, "zz" * 32),
        setting(3, "00" * 31),
        setting(3, None),
        line(lambda row: row.__setitem__(3, row[3].upper())),
        line(lambda row: row.__setitem__(3, row[3][:2] + " " + row[3][2:])),
        setting(4, "0x" + "f" * 14),
        setting(4, "-1"),
        setting(4, "1_0"),
        setting(4, 5),
        setting(4, "f" * 17),
    ],
)
def test_a_forged_manifest_under_a_right_hash_is_refused(change: Callable[[bytes], bytes]) -> None:
    body = change(body_of(make().dump()))
    with pytest.raises(DamageError, match="here"):
        manifest.parse(sealed(body), "here")


FOLLOWS = ["00000-01234567.shard", 900, "ab" * 32, "0" * 16, 50]


def erased_from(rows: Any) -> bytes:
    body = body_of(replace(make(), version=manifest.GROWN).dump())
    return sealed(body.replace(b'"shards"', b'"erased": %b,\n"shards"' % json.dumps(rows).encode()))


def test_what_must_go_is_read_and_written_the_same() -> None:
    found = manifest.parse(erased_from([FOLLOWS]), "here")
    one = found.erased["00000-01234567.shard"]
    assert one == (900, bytes.fromhex("ab" * 32), 0, 50)
    assert manifest.parse(found.dump(), "here").erased == found.erased
    assert b"erased" not in make().dump()


@pytest.mark.parametrize(
    "rows",
    [
        None,
        7,
        {},
        [FOLLOWS[:4]],
        [[*FOLLOWS, 1]],
        *([[*FOLLOWS[:at], wrong, *FOLLOWS[at + 1 :]]] for at, wrong in enumerate(FOLLOWS[1:])),
        [["x", *FOLLOWS[1:]]],
        [["../00000-01234567.shard", *FOLLOWS[1:]]],
        [[FOLLOWS[0], -1, *FOLLOWS[2:]]],
        [[*FOLLOWS[:4], 2**70]],
        [[make().shard(0).name, *FOLLOWS[1:]]],  # which it names itself
    ],
)
def test_a_forged_list_of_what_must_go_is_refused(rows: Any) -> None:
    with pytest.raises(DamageError, match="here"):
        manifest.parse(erased_from(rows), "here")


def test_a_forged_circle_of_successors_ends() -> None:
    first, second = "00000-01010101.shard", "00000-02020202.shard"
    rows = [[first, 1, "02" * 32, "0" * 16, 0], [second, 1, "01" * 32, "0" * 16, 0]]
    newest = manifest.parse(erased_from(rows), "here")
    digests = newest.shard_sha256.copy()
    digests[0] = 1
    old = replace(newest, shard_sha256=digests)
    assert after_erasing(old, newest).shard(0).name in (first, second)


def test_sums_that_wrap_are_refused() -> None:
    body = body_of(make(2).dump())
    for size in (2**62, 2**63 - 1):
        rows = body.replace(b",1000,", b",%d," % size)
        total = (2 * size + 2**63) % 2**64 - 2**63  # as int64 would have it
        with pytest.raises(DamageError):
            manifest.parse(sealed(rows.replace(b'"bytes": 2000', b'"bytes": %d' % total)), "here")
        with pytest.raises(DamageError):
            manifest.parse(
                sealed(rows.replace(b'"bytes": 2000', b'"bytes": %d' % (2 * size))), "here"
            )


@pytest.mark.parametrize("n", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_shards_take_little_memory(n: int) -> None:
    made = manifest.make(
        [info(k, 10_000, 2**28) for k in range(n)],
        dataset_id=bytes(16),
        format="record",
        schema=Schema(FIELDS),
        classes=None,
        options={},
        library="0.1.0",
        blob_bytes=0,
    )
    data = made.dump()
    tracemalloc.start()
    try:
        parsed = manifest.parse(data, "here")
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert parsed.records == n * 10_000
    assert parsed.size == n * 2**28
    assert peak < n << 10
    assert kept < n * 200
    assert same(parsed, made)
    assert parsed.shard(n - 1) == info(n - 1, 10_000, 2**28)
    assert parsed.shard(0).name == info(0).name


def test_shard_names_sort_and_hold_the_start_of_their_hash() -> None:
    assert manifest.shard_name(17, bytes.fromhex("3fa9c2d1") + bytes(28)) == "00017-3fa9c2d1.shard"
    assert manifest.shard_name(123_456, bytes(32)) == "123456-00000000.shard"


# --- a directory that holds one, or not ---------------------------------------------------------


def test_a_manifest_loads_from_its_directory(tmp_path: Path) -> None:
    made = make()
    (tmp_path / manifest.MANIFEST).write_bytes(made.dump())
    for url in (str(tmp_path), f"{tmp_path}/", f"file://{tmp_path}"):
        assert same(manifest.load(locate(url)), made)


def test_what_is_not_packed_is_told_at_once_whatever_lies_below(tmp_path: Path) -> None:
    """Only one level is looked at: below it may lie a whole disk, or a link to what is above."""
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(".")
    with pytest.raises(NotPackedError, match=r"it holds no manifest\.json"):
        manifest.load(locate(tmp_path))


def test_a_directory_without_one_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotPackedError, match="`shardio pack IMAGES"):
        manifest.load(locate(tmp_path))
    with pytest.raises(NotPackedError, match="there is no such directory"):
        manifest.load(locate(tmp_path / "none"))
    (tmp_path / ".shardio-plan").touch()
    with pytest.raises(NotPackedError, match="not finished; run the same `shardio pack` again"):
        manifest.load(locate(tmp_path))
    (tmp_path / ".shardio-plan").write_bytes(b"shardio-writer 0\n{}")
    why = r"not packed: a Writer, or .* did not finish .* do it again"
    with pytest.raises(NotPackedError, match=why):
        manifest.load(locate(tmp_path))


def test_a_directory_of_splits_names_them(tmp_path: Path) -> None:
    (tmp_path / manifest.SPLITS).write_bytes(
        manifest.dump_splits(["train", "val"], ["a", "\udcff"], "1.2.3")
    )
    assert manifest.load_splits(locate(tmp_path)) == ["train", "val"]
    several = r"datasets, its splits: train, val\. Open one, such as .*/train, .*split=\"train\""
    with pytest.raises(NotPackedError, match=several):
        manifest.load(locate(tmp_path))


def test_a_split_is_chosen_by_its_name(tmp_path: Path) -> None:
    here = locate(tmp_path)
    assert manifest.choose_split(here, None) is here
    (tmp_path / manifest.SPLITS).write_bytes(manifest.dump_splits(["train", "val"], ["a"], "1.2.3"))
    for path in (str(tmp_path), tmp_path, f"file://{tmp_path}"):
        assert manifest.choose_split(locate(path), "val").url == f"{tmp_path}/val"
    for wrong in ("Train", "validation", "", "..", "train/", "../train"):
        with pytest.raises(
            OptionError,
            match=r"no split is called '.*'; there are train, val(: did you mean '\w+'\?)?$",
        ):
            manifest.choose_split(here, wrong)
    with pytest.raises(OptionError, match=r"called 'validation'; .*: did you mean 'val'\?$"):
        manifest.choose_split(here, "validation")
    with pytest.raises(OptionError, match="split is 0: expected the name"):
        manifest.choose_split(here, 0)  # type: ignore[arg-type]


def test_datasets_in_folders_of_a_folder_are_its_splits(tmp_path: Path) -> None:
    with pytest.raises(NotPackedError, match="there is no such directory"):
        manifest.choose_split(locate(tmp_path / "none"), "train")
    for name in ("train", "test", "web"):
        (tmp_path / name).mkdir()
        (tmp_path / name / manifest.MANIFEST).write_bytes(make().dump())
    (tmp_path / "web" / manifest.MANIFEST).write_text('{"name": "another manifest.json"}')
    with pytest.raises(NotPackedError, match=r"several datasets, its splits: test, train\. Open"):
        manifest.load(locate(tmp_path))
    assert same(manifest.load(manifest.choose_split(locate(tmp_path), "train")), make())
    with pytest.raises(OptionError, match=r"no split is called 'web'; there are test, train$"):
        manifest.choose_split(locate(tmp_path), "web")
    with pytest.raises(OptionError, match=r"holds one dataset and no splits; leave split='a' out"):
        manifest.choose_split(locate(tmp_path / "train"), "a")
    (tmp_path / "test" / manifest.MANIFEST).unlink()
    with pytest.raises(NotPackedError, match=r"its folder train is\. Open .*/train, or in Python"):
        manifest.load(locate(tmp_path))


@pytest.mark.parametrize(
    "body", [b"", b"{\n", b'{\n"splits": "ab",\n', b'{\n"splits": [1],\n',
             b'{\n"splits": ["../x"],\n', b'{\n"splits": {"a": 1},\n', b"[" * 100_000,
             b"\xff\xfe", b'{\n"splits": [".."],\n', b'{\n"splits": [""],\n']
)  # fmt: skip
def test_a_forged_list_of_splits_under_a_right_hash_is_refused(tmp_path: Path, body: bytes) -> None:
    head = b'{\n"format": "shardio-splits",\n"version": 0,\n'
    (tmp_path / manifest.SPLITS).write_bytes(sealed(body.replace(b"{\n", head, 1)))
    with pytest.raises(DamageError, match=r"shardio\.json: (not a list of splits|it is damaged)"):
        manifest.load_splits(locate(tmp_path))


def test_every_flipped_bit_and_every_truncation_of_the_splits_is_found(tmp_path: Path) -> None:
    data = manifest.dump_splits(["train", "val"], ["a", "b"], "1.2.3")
    assert body_of(data).isascii()
    path = tmp_path / manifest.SPLITS
    for at in range(len(data)):
        for damaged in data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], data[:at]:
            path.write_bytes(damaged)
            with pytest.raises(DamageError, match=r"shardio\.json"):
                manifest.load_splits(locate(tmp_path))
    path.write_bytes(sealed(body_of(data).replace(b'"version": 0', b'"version": 3')))
    with pytest.raises(VersionError, match=r"needs shardio >= 1\.2\.3"):
        manifest.load_splits(locate(tmp_path))


def test_a_manifest_of_an_older_version_says_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make().dump()
    monkeypatch.setattr(manifest, "VERSION", 1)
    parsed = manifest.parse(data, "here")
    assert parsed.version == 0
    assert parsed.dump() == data


def test_something_else_in_its_place_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / manifest.MANIFEST
    path.mkdir()
    with pytest.raises(ShardioError, match="expected a file"):
        manifest.load(locate(tmp_path))
    path.rmdir()
    with path.open("wb") as file:
        file.truncate(manifest.MAX_MANIFEST + 1)
    with pytest.raises(DamageError, match="more than 1,073,741,824 can be right"):
        manifest.load(locate(tmp_path))


@pytest.mark.parametrize(
    "body", [b"[\n", b'{\n"a": nothing,\n', b"[" * 100_000], ids=["a", "b", "c"]
)
def test_a_right_seal_does_not_make_a_file_whole(body: bytes) -> None:
    data = sealed(body)
    with pytest.raises(DamageError, match=r"^x: it is damaged, or was edited by hand$"):
        manifest.parse_sealed(data, "x")
