"""What is left of erased records: found in each file of a directory, and nothing where none is."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.trees import noise, plant, shardio, shardio_json

import shardio as api
from shardio import OptionError, PlanOptions, SourceOptions, Writer, pack, verify
from shardio.cli.exit_codes import DAMAGED
from shardio.formats import manifest
from shardio.names import key_bytes
from shardio.packing.annotate import annotate
from shardio.packing.compact import compact
from shardio.packing.drop import drop
from shardio.packing.gc import gc
from shardio.packing.remains import seek
from shardio.packing.versions import changing, commit, tag
from shardio.storage.location import locate


def keys_of(folder: Path) -> list[str]:
    return api.open(folder, decode=None).keys()


def left(folder: Path, keys: list[str]) -> list[tuple[str, int | None, str | None, str]]:
    found = verify(folder, dropped=keys).damages
    return [(Path(one.shard).name, one.record, one.key, one.what) for one in found]


@pytest.fixture(params=["record", "lmdb"])
def either(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Path:
    pack(source, tmp_path / "either", plan=PlanOptions(max_records=4), format=request.param, jobs=1)
    return tmp_path / "either"


def test_each_step_of_an_erasure_is_told(either: Path) -> None:
    keys = keys_of(either)
    old = manifest.load(locate(either)).shard(1).name
    [one] = left(either, [keys[5]])
    assert one[:3] == (old, 1, keys[5]) and "a record of the dataset" in one[3]
    drop(either, keys=[keys[5]])
    [one] = left(either, [keys[5]])
    assert one[:3] == (old, 1, keys[5]) and "dropped, but not erased" in one[3]
    drop(either, keys=[keys[5]], erase=True)
    [one] = left(either, [keys[5]])
    assert one[:3] == (old, 1, keys[5]) and "--keep 0s` removes it" in one[3]
    gc(either, keep_s=0)
    found = verify(either, dropped=[keys[5]])
    assert found.damages == [] and found.sought is not None
    assert (found.sought.erased, found.sought.shards, found.sought.records) == (1, 6, 24)
    assert found.sought.files == len([*either.iterdir()])
    assert "1 key looked for in" in str(found) and "nothing left" in str(found)
    assert "not seen: caches" in str(found)
    assert [one[:3] for one in left(either, [keys[6]])] == [
        (manifest.load(locate(either)).shard(1).name, 2, keys[6])
    ]


def test_values_of_another_dataset_id_are_looked_into(out: Path) -> None:
    """As they lie there from before a compaction."""
    keys = keys_of(out)
    annotate(out, {key: {"caption": f"words on {key}"} for key in keys})
    old = {path.name: path.read_bytes() for path in out.glob("overlay-*")}
    drop(out, keys=keys[:1])
    tag(out, "dropped")
    compact(out, jobs=1)
    drop(out, keys=[keys[0], keys[9]], erase=True)  # the second one is in the newest version
    found = left(out, [keys[0], keys[9]])
    beside = {one[0] for one in found if "has a value of record" in one[3]}
    assert {name for name in beside if name in old} == {*sorted(old)[::2][:2]}
    assert all("--keep 0s` removes" in one[3] for one in found)
    gc(out, keep_s=0)
    for name in sorted(old)[::2][:2]:  # as somebody may have left a copy there
        (out / name).write_bytes(old[name])
    assert {one[0] for one in left(out, [keys[0], keys[9]])} == beside & old.keys()
    gc(out, keep_s=0)
    assert left(out, [keys[0], keys[9]]) == [] and verify(out, dropped=keys[:1]).sought is not None


def test_values_for_a_shard_that_no_version_has_are_named_as_not_seen(
    out: Path, tmp_path: Path
) -> None:
    keys = keys_of(out)
    drop(out, keys=keys[:1], erase=True)
    with Writer(tmp_path / "other", fields={"image": "image"}) as writer:
        writer.write({"__key__": "a", "image": noise("a", 300)})
    annotate(tmp_path / "other", {"a": {"caption": "words"}})
    (path,) = (tmp_path / "other").glob("overlay-*")
    (out / path.name).write_bytes(path.read_bytes())
    (out / "folder").mkdir()
    (out / "folder" / path.name).write_bytes(path.read_bytes())
    found = verify(out, dropped=keys[:1]).sought
    assert found is not None
    said = [one for one in found.unseen if path.name in one]
    assert any("for a shard that no version has: `shardio gc" in one for one in said)
    assert any("not in its folder" in one for one in said) and len(said) == 2


def test_a_shard_that_only_an_older_version_has_is_told_apart(out: Path) -> None:
    keys = keys_of(out)
    with changing(str(out)) as before:  # as `restore` leaves it, where files were added before
        names = ("shard_records", "shard_sizes", "shard_sha256", "shard_index")
        fewer = {name: getattr(before, name)[:5] for name in names}
        commit(str(out), before, replace(before, digest="", **fewer), "restore", {}, {})
    assert len(keys_of(out)) == 20
    [one] = left(out, [keys[-1]])
    assert one[1:3] == (3, keys[-1]) and "older version has this file: `shardio drop" in one[3]
    gc(out, keep_s=0)
    assert len(left(out, [keys[-1]])) == 1
    drop(out, keys=[keys[-1]], erase=True)
    gc(out, keep_s=0)
    assert left(out, [keys[-1]]) == [] and len(keys_of(out)) == 20


@pytest.mark.parametrize("cut", [0, 70, 400])
def test_drafts_and_torn_shards_are_searched(either: Path, cut: int) -> None:
    keys, old = keys_of(either), manifest.load(locate(either)).shard(1).name
    data = (either / old).read_bytes()
    drop(either, keys=keys[4:8], erase=True)
    gc(either, keep_s=0)
    name = ".shardio-0123456789abcdef-00001.tmp"
    (either / name).write_bytes(data[: len(data) - cut])
    found = left(either, keys[4:8])
    assert {one[0] for one in found} == {name} and {one[2] for one in found} >= {*keys[4:6]}
    if not cut:
        assert {one[1:3] for one in found} == {*enumerate(keys[4:8])}
    gc(either, keep_s=0)
    assert left(either, keys[4:8]) == []


def test_lists_of_what_packing_left_out_are_read(source: Path, tmp_path: Path) -> None:
    (source / "class0" / "broken é.jpg").write_bytes(b"no image")
    out = tmp_path / "out"
    pack(source, out, on_error="skip", jobs=1)
    assert left(out, ["class0/broken é.jpg"]) == [
        (
            "rejected.jsonl",
            None,
            "class0/broken é.jpg",
            "line 1 of what packing left out has this key: `shardio drop --erase` removes it",
        )
    ]
    assert left(out, ["0/broken é.jpg", "broken é.jpg"]) == []


@pytest.mark.parametrize("written", ["plain", "json", "far"])
def test_other_files_are_searched_for_the_bytes_of_keys(out: Path, written: str) -> None:
    key = "käfer/猫 1.jpg"
    texts = {
        "plain": b"opted out: " + key_bytes(key) + b"\n",
        "json": json.dumps({"key": key}).encode(),
        "far": bytes((1 << 20) - 4) + key_bytes(key) + bytes(1 << 20),  # over the end of a chunk
    }
    (out / "notes").mkdir()
    (out / "notes" / "list.txt").write_bytes(texts[written])
    found = left(out, [key, "käfer/猫 2.jpg"])
    assert [one[:3] for one in found] == [("list.txt", None, key)]
    at = texts[written].index(b"k\\u" if written == "json" else b"k\xc3")
    assert found[0][3] == f"the key stands at byte {at:,}"


def test_a_search_finds_just_what_find_finds(tmp_path: Path, out: Path) -> None:
    """Many keys at once, of all lengths, with ends alike: as by one `find` for each."""
    rng = random.Random(5)
    data = bytes(rng.choices(b"abc/", k=40_000))
    keys = {bytes(rng.choices(b"abc/", k=rng.randint(1, 14))) for _ in range(400)}
    keys |= {data[at : at + size] for at in (0, 39_990) for size in (4, 7, 8, 10)}
    (out / "other.bin").write_bytes(data)
    found = [one for one in seek(out, keys)[1] if one.file.endswith("other.bin")]
    expected = {(key.decode(), data.find(key)) for key in keys if len(key) >= 4 and key in data}
    assert {(one.key, one.offset) for one in found} == expected and len(found) == len(expected)


def test_a_name_of_the_manifest_is_no_key(tmp_path: Path) -> None:
    """Nor is one of an older version, or of the tags."""
    out, name = tmp_path / "out", "a name of some length"
    with Writer(out, fields={"image": "image", name: "int"}) as writer:
        for key in (name, "other"):
            writer.write({"__key__": key, "image": noise(key, 300), name: 1})
    tag(out, name)
    drop(out, keys=[name], erase=True)
    gc(out, keep_s=0)
    assert name in (out / "manifest.json").read_text() and left(out, [name]) == []


def test_a_condition_of_the_packing_that_names_a_key_is_found(tmp_path: Path) -> None:
    names = [f"img{i}.jpg" for i in range(4)]
    root = plant(tmp_path / "src", {name: noise(name, 300) for name in names})
    (tmp_path / "t.csv").write_text("file\n" + "\n".join(names))
    out = tmp_path / "out"
    read = SourceOptions(root=root, where={"file": names[:3]})
    pack(tmp_path / "t.csv", out, read=read, jobs=1)
    drop(out, keys=names[:1], erase=True)
    gc(out, keep_s=0)
    assert left(out, names[3:]) == []
    found = left(out, names[:1])
    assert {one[0][:8] for one in found} == {"manifest"} and len(found) == 2
    assert all("by a condition that names this key" in one[3] for one in found)


def test_what_cannot_be_seen_is_said(out: Path, tars: Path) -> None:
    found = verify(out, dropped=["abc", "abcd", "ab"]).sought
    assert found is not None and "2 keys of fewer than 4 bytes" in found.unseen[-1]
    found = verify(tars, dropped=["nothing"]).sought
    assert found is not None and "files of webdataset" in found.unseen[-1]


def test_a_record_whose_head_is_damaged_counts_as_left(out: Path) -> None:
    key, one = keys_of(out)[0], manifest.load(locate(out)).shard(0)
    data = bytearray((out / one.name).read_bytes())
    data[data.index(key.encode())] ^= 1
    (out / one.name).write_bytes(data)
    assert [one[:3] for one in left(out, [key])] == [(one.name, 0, None)]


def test_a_shard_in_another_folder_is_found(out: Path) -> None:
    key = keys_of(out)[0]
    shard = next(out.glob("00000-*.shard"))
    drop(out, keys=[key], erase=True)
    (out / "old").mkdir()
    shard.rename(out / "old" / shard.name)
    assert [one[:3] for one in left(out, [key])] == [(shard.name, 0, key)]


def test_all_splits_are_searched(tmp_path: Path) -> None:
    names = [f"{split}/c/{split}{i}.jpg" for split in ("train", "val") for i in "012"]
    out = tmp_path / "out"
    pack(plant(tmp_path / "src", {one: noise(one, 900) for one in names}), out, jobs=1)
    keys = ["c/train1.jpg", "c/val0.jpg"]
    assert {one[2] for one in left(out, keys)} == {*keys}
    drop(out, keys=keys, erase=True)
    assert {one[2] for one in left(out, keys)} == {*keys}
    gc(out, keep_s=0)
    assert left(out, keys) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dropped": "a/b.jpg"}, "expected several keys"),
        ({"dropped": []}, "no key is in it"),
        ({"dropped": [5]}, "no key of a record"),
        ({"dropped": ["abcd"], "sha256": True}, "leave out the rest"),
        ({"dropped": ["abcd"], "part": "1/2"}, "leave out the rest"),
    ],
)
def test_wrong_options_are_named(out: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        verify(out, **options)


def test_what_cannot_be_listed_is_refused() -> None:
    with pytest.raises(OptionError, match=r"https://host/data: .* read only"):
        verify("https://host/data", dropped=["abcd"])


def test_the_command_exits_with_3_where_something_is_left(out: Path, tmp_path: Path) -> None:
    keys = keys_of(out)
    listed = tmp_path / "keys.txt"
    listed.write_text("\n".join(keys[:2]))
    shardio("drop", out, "--keys", listed, "--erase")
    said = shardio("verify", out, "--dropped", listed, code=DAMAGED).stdout
    assert "record 0 at byte" in said and "2 left" in said
    shardio("gc", out, "--keep", "0s")
    said = shardio("verify", out, "--dropped", listed).stdout
    assert "nothing left of them" in said and "not seen" in said
    found = shardio_json("verify", out, "--dropped", listed)
    assert found["damages"] == [] and found["sought"]["keys"] == 2
