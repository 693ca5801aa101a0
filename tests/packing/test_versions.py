"""Versions: each commit is one, all are found and compared, and any can be gone back to."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.forging import sealed
from support.trees import content, noise, plant, shardio, shardio_json, shards

import shardio as api
from shardio import DamageError, OptionError, ShardDataset
from shardio.errors import BusyError, VersionError
from shardio.formats import manifest
from shardio.packing.drop import drop
from shardio.packing.gc import gc
from shardio.packing.pack import pack
from shardio.packing.versions import changing, diff, log, restore, tag
from shardio.storage import local
from shardio.storage.location import locate


def keys_of(folder: Path, version: str | None = None) -> list[str]:
    return api.open(folder, version=version, decode=None).keys()


@pytest.fixture
def grown(out: Path) -> tuple[Path, list[str], list[str]]:
    """A dataset, of which each of two commits dropped two keys; its keys, and ids, oldest first."""
    keys = keys_of(out)
    drop(out, keys=keys[:2])
    drop(out, keys=keys[2:4])
    return out, keys, [one.id for one in log(out).versions][::-1]


def test_each_commit_is_a_version(grown: Any) -> None:
    out, _, ids = grown
    found = log(out).versions
    assert [(one.command, one.changes, one.records) for one in found] == [
        ("drop", {"dropped": 2}, 20),
        ("drop", {"dropped": 2}, 22),
        ("pack", {}, 24),
    ]
    assert found[2].time is None and found[0].time and found[0].time.endswith("Z")
    assert manifest.load(locate(out)).version_id == found[0].id == ids[-1]
    assert [one["id"] for one in shardio_json("log", out)["versions"]] == ids[::-1]
    lines = shardio("log", out).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ids[::-1]
    assert "drop" in lines[0] and "20 records (2 dropped)" in lines[0]


def test_any_version_is_opened_by_its_id_or_the_start_of_it(grown: Any) -> None:
    out, keys, ids = grown
    for age, one in enumerate(ids):
        for name in (one, one[:8]):
            assert keys_of(out, name) == keys[2 * age :]
            data = ShardDataset(out, version=name, decode=None)
            assert sorted(sample["__key__"] for sample in data) == sorted(keys[2 * age :])
    assert keys_of(out) == keys[4:]


def test_a_version_is_pinned_by_the_sum_of_its_manifest(grown: Any) -> None:
    """64 digits, of which the id is the first 16: a forger may find another with the same id."""
    out, keys, ids = grown
    for age, (one, name) in enumerate(zip(ids, manifests(out, ids), strict=True)):
        total = name.read_bytes().splitlines()[-2].split(b'"')[3].decode()
        assert total.startswith(one) and keys_of(out, f"sha256:{total}") == keys[2 * age :]
        with pytest.raises(DamageError, match=rf"has the SHA-256 {total}, expected {one}0"):
            api.open(out, version=f"sha256:{one}{'0' * 48}")
    with pytest.raises(OptionError, match="that version was removed"):
        api.open(out, version=f"sha256:{'0' * 64}")
    with pytest.raises(OptionError, match="no version is called"):
        api.open(out, version=f"sha256:{total[:40]}")


def manifests(out: Path, ids: list[str]) -> list[Path]:
    return [*(out / f"manifest-{one}.json" for one in ids[:-1]), out / "manifest.json"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", r"no version is called 'nothing'; .* has 'paper'|no version is called"),
        ("0123456789abcdef", "is not there: that version was removed"),
        ("abc", "no version is called"),
        (5, "expected an id or a tag"),
    ],
)
def test_what_is_no_version_says_where_they_are_listed(grown: Any, name: Any, said: str) -> None:
    out, *_ = grown
    tag(out, "paper")
    with pytest.raises(OptionError, match=said) as raised:
        api.open(out, version=name)
    assert name == 5 or "shardio log" in str(raised.value)


def test_versions_are_compared_by_keys(grown: Any) -> None:
    out, keys, ids = grown
    found = diff(out, ids[0])
    assert (found.added, found.dropped, found.changed) == ([], sorted(keys[:4]), [])
    assert (found.old, found.new) == (ids[0], ids[2])
    back = diff(out, ids[2], ids[1])
    assert (back.added, back.dropped, back.changed) == (sorted(keys[2:4]), [], [])
    assert diff(out, ids[1], ids[1]).dropped == []
    said = shardio("diff", out, ids[0][:8], ids[1][:8]).stdout
    assert said.splitlines()[:2] == [f"- {key}" for key in sorted(keys[:2])]
    assert said.splitlines()[-1].endswith("0 added, 2 dropped, 0 changed")


def test_a_tag_names_a_version_until_it_is_moved_or_removed(grown: Any) -> None:
    out, keys, ids = grown
    assert tag(out, "paper", version=ids[0]).versions[0].id == ids[0]
    assert shardio("tag", out, "newest").stdout.startswith(ids[2])
    assert keys_of(out, "paper") == keys and keys_of(out, "newest") == keys[4:]
    assert [one.tags for one in log(out).versions] == [("newest",), (), ("paper",)]
    said = shardio("tag", out, "paper", code=2).stderr
    assert (
        f"'paper' is of version {ids[0]}" in said
        and f"--force moves it to version {ids[2]}" in said
    )
    assert keys_of(out, "paper") == keys  # it was not moved
    assert shardio_json("tag", out, "paper", "--version", ids[0])["versions"][0]["moved_from"] == ""
    done = tag(out, "paper", version="newest", force=True).versions[0]
    assert (done.id, done.moved_from) == (ids[2], ids[0]) and f"moved from {ids[0]}" in str(done)
    assert keys_of(out, "paper") == keys[4:]
    assert tag(out, "paper", remove=True).versions[0].id == ids[2]
    with pytest.raises(OptionError, match="no version is called so"):
        tag(out, "paper", remove=True)
    for name in ("", "a/b", "0123abcd", "x" * 101, "new\nline"):
        with pytest.raises(OptionError, match="expected a name"):
            tag(out, name)


def test_going_back_is_a_commit_of_its_own(grown: Any) -> None:
    out, keys, ids = grown
    done = restore(out, ids[1][:6]).versions[0]
    assert keys_of(out) == keys[2:] and done.changes == {"brought back": 2}
    assert keys_of(out, ids[2]) == keys[4:]
    assert shardio("restore", out, ids[0]).stdout.startswith(log(out).versions[0].id)
    assert keys_of(out) == keys
    for one in (ids[0], log(out).versions[0].id):  # it is so already, and that is said
        facts = shardio_json("restore", out, one)["versions"][0]
        assert (facts["id"], facts["already"]) == (log(out).versions[0].id, True)
    assert shardio("restore", out, ids[0]).stdout.endswith("already: nothing was done\n")
    assert [one.command for one in log(out).versions] == [
        "restore",
        "restore",
        "drop",
        "drop",
        "pack",
    ]
    assert len(shards(out)) == 6


def test_a_tag_of_all_splits_is_gone_back_to_at_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    tree = {
        f"{split}/c/{i}.jpg": noise(f"{split}{i}", 300)
        for split in ("train", "val")
        for i in (1, 2)
    }
    pack(plant(tmp_path / "src", tree), out, splits=True, jobs=1)
    first = {split: log(out / split).versions[0].id for split in ("train", "val")}
    assert {one.split: one.id for one in tag(out, "v1").versions} == first
    drop(out / "train", keys=["c/1.jpg"])
    with pytest.raises(OptionError, match=r"train: the tag 'v1' is of .* No tag was changed"):
        tag(out, "v1")
    tag(out / "train", "cut")
    for call in (lambda: restore(out, "cut"), lambda: restore(out, first["train"])):
        with pytest.raises(OptionError, match=r"Nothing was changed.*by a tag that all .*/val$"):
            call()
    assert keys_of(out / "train") == ["c/2.jpg"]
    assert [len(log(out / split).versions) for split in first] == [2, 1]
    done = restore(out, "v1").versions
    assert [(one.split, one.command) for one in done] == [("train", "restore"), ("val", "pack")]
    assert keys_of(out / "train") == ["c/1.jpg", "c/2.jpg"]
    said = shardio("tag", out, "v1", "--force").stdout.splitlines()
    assert said[0] == "train:" and said[1].endswith(f"moved from {first['train']}")
    assert said[2] == "val:" and "moved" not in said[3]
    assert [one.split for one in tag(out, "cut", remove=True).versions] == ["train"]
    with pytest.raises(OptionError, match=r"no version is called so; there is v1"):
        tag(out, "cut", remove=True)


def test_gc_keeps_the_newest_versions_and_those_with_a_tag(grown: Any) -> None:
    out, keys, ids = grown
    assert gc(out, keep_s=0).removed == []  # of all versions nothing goes
    tag(out, "paper", version=ids[0])
    done = gc(out, keep_s=0, keep_versions=1)
    assert sorted(map(os.path.basename, done.removed)) == sorted(
        [f"manifest-{ids[1]}.json", *_lists_only_of(out, ids[1], done.removed)]
    )
    assert [one.id for one in log(out).versions] == [ids[2], ids[0]]
    assert keys_of(out, "paper") == keys and keys_of(out) == keys[4:]
    tag(out, "paper", remove=True)
    assert len(gc(out, keep_s=0, keep_versions=1, dry_run=True).removed) == 1
    assert "1 file" in shardio("gc", out, "--keep", "0s", "--keep-versions", "1").stdout
    with pytest.raises(OptionError, match="was removed"):
        restore(out, ids[0])
    with pytest.raises(OptionError, match="keep_versions"):
        gc(out, keep_versions=0)


def _lists_only_of(out: Path, version_id: str, removed: list[str]) -> list[str]:
    """The list of dropped records of a version that nothing else names."""
    return [os.path.basename(one) for one in removed if "excluded-" in one]


def test_young_versions_and_foreign_files_stay(grown: Any) -> None:
    out, *_ = grown
    (out / "manifest-0123456789abcdef.json").write_text("mine")
    (out / "excluded-01234567.bin").write_text("mine")
    done = gc(out, keep_versions=1)
    assert done.removed == [] and len(done.kept) == 3
    gc(out, keep_s=0, keep_versions=1)
    assert (out / "manifest-0123456789abcdef.json").exists()
    assert (out / "excluded-01234567.bin").exists()


@pytest.mark.parametrize("fault", ["gone", "flipped", "another's name"])
def test_a_damaged_manifest_of_a_version_is_named(grown: Any, fault: str) -> None:
    out, keys, ids = grown
    path = out / f"manifest-{ids[0]}.json"
    if fault == "gone":
        path.unlink()
        assert [one.id for one in log(out).versions] == ids[:0:-1]
        return
    if fault == "flipped":
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes((out / f"manifest-{ids[1]}.json").read_bytes())
    with pytest.raises(DamageError, match=f"manifest-{ids[0]}.json"):
        log(out)
    assert keys_of(out) == keys[4:]  # what is newest needs it not


def test_damaged_tags_are_named(grown: Any) -> None:
    out, *_ = grown
    tag(out, "paper")
    path = out / "tags.json"
    path.write_bytes(path.read_bytes().replace(b"paper", b"pager"))
    with pytest.raises(DamageError, match=r"tags\.json"):
        log(out)


def test_an_unchanged_dataset_is_of_version_0(out: Path) -> None:
    before = content(out)
    assert json.loads((out / "manifest.json").read_bytes())["version"] == 0
    assert [one.command for one in log(out).versions] == ["pack"]
    assert content(out) == before
    drop(out, keys=keys_of(out)[:1])
    assert json.loads((out / "manifest.json").read_bytes())["version"] == 1


def test_an_older_release_refuses_a_changed_dataset(out: Path, monkeypatch: Any) -> None:
    drop(out, keys=keys_of(out)[:1])
    monkeypatch.setattr(manifest, "VERSION", 0)
    with pytest.raises(VersionError, match=r"manifest version 1; needs shardio >="):
        api.open(out)


@pytest.mark.parametrize("step", range(8))
def test_a_commit_that_fails_leaves_the_old_version_whole(
    grown: Any, step: int, monkeypatch: Any
) -> None:
    out, keys, ids = grown
    calls = 0

    def failing(self: Any, name: str, data: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls > step:
            raise OSError("no more")
        write(self, name, data)

    write = local.LocalDirectory.write
    monkeypatch.setattr(local.LocalDirectory, "write", failing)
    try:
        drop(out, keys=keys[4:5])
    except OSError:
        assert step < 3
        assert keys_of(out) == keys[4:] and [one.id for one in log(out).versions] == ids[::-1]
        monkeypatch.undo()
        drop(out, keys=keys[4:5])
    assert keys_of(out) == keys[5:]


def test_changes_wait_for_nobody(out: Path) -> None:
    with changing(str(out)):
        for call in (lambda: tag(out, "x"), lambda: restore(out, "x")):
            with pytest.raises(BusyError):
                call()


def test_a_manifest_that_others_wrote_is_kept_byte_for_byte(out: Path) -> None:
    data = (out / "manifest.json").read_bytes()
    body = b"".join(data.splitlines(keepends=True)[:-2])
    spaced = body.replace(b'["class0","class1",', b'["class0", "class1",')
    assert spaced != body
    (out / "manifest.json").write_bytes(sealed(spaced))
    keys, first = keys_of(out), log(out).versions[0].id
    drop(out, keys=keys[:1])
    assert [one.id for one in log(out).versions][1:] == [first]
    assert keys_of(out, first) == keys


# --- hostile manifests ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (rb'"version": 1', b'"version": 0'),
        (rb'\["excluded-[0-9a-f]{8}\.bin",4,', b'["../excluded.bin",4,'),
        (rb'(excluded-[0-9a-f]{8}\.bin"),4,', rb"\1,25,"),
        (rb'(excluded-[0-9a-f]{8}\.bin"),4,', rb"\1,0,"),
        (rb'(excluded-[0-9a-f]{8}\.bin"),4,', rb"\1,true,"),
        (rb'"excluded": \[[^\n]*\],', b'"excluded": [],'),
        (rb'"commit": \["[0-9a-f]{16}"', b'"commit": ["../manifest"'),
        (rb'"commit": \[[^\n]*\],', b'"commit": {},'),
        (rb'\{"dropped":2\}', b'{"dropped":-1}'),
        (rb'\{"dropped":2\}', b"[]"),
    ],
)
def test_a_forged_manifest_is_damage(grown: Any, old: bytes, new: bytes) -> None:
    out, *_ = grown
    data = (out / "manifest.json").read_bytes()
    body = b"".join(data.splitlines(keepends=True)[:-2])
    forged, count = re.subn(old, new, body)
    assert count == 1
    (out / "manifest.json").write_bytes(sealed(forged))
    with pytest.raises(DamageError, match=r"manifest\.json: not a manifest"):
        api.open(out)
