"""Rebuild: what a dataset is whose manifest is lost; dropped records never come back that way."""

import os
import shutil
from pathlib import Path

import pytest
from support.small_datasets import make
from support.trees import content, images, plant

import shardio as api
from shardio import DamageError, PlanOptions, annotate, pack, verify
from shardio.errors import NotPackedError
from shardio.formats import manifest
from shardio.packing.copy import copy
from shardio.packing.drop import drop
from shardio.packing.rebuild import claims
from shardio.packing.repair import repair
from shardio.packing.versions import tag
from shardio.storage.location import locate

DAMAGES = ("missing", "cut", "flipped")


@pytest.fixture(params=DAMAGES)
def damage(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def lose(out: Path, how: str = "missing") -> None:
    """Damage the manifest of a dataset."""
    path = out / "manifest.json"
    data = bytearray(path.read_bytes())
    os.remove(path)
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    if how == "flipped":
        data[len(data) // 3] ^= 1
        path.write_bytes(data)


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("0*"))


@pytest.fixture(params=["record", "lmdb"])
def either(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Path:
    pack(source, tmp_path / "either", plan=PlanOptions(max_records=4), format=request.param, jobs=1)
    return tmp_path / "either"


def test_a_manifest_is_made_of_the_shards(either: Path, damage: str, tmp_path: Path) -> None:
    before, samples = manifest.load(locate(either)), list(api.open(either, decode=None))
    lose(either, damage)
    done = repair(either, tmp_path / "new", jobs=1)
    after = manifest.load(locate(tmp_path / "new"))
    assert list(api.open(tmp_path / "new", decode=None)) == samples
    assert after.schema.fields == before.schema.fields
    for name in ("dataset_id", "format", "classes", "blob_bytes", "records", "size"):
        assert getattr(after, name) == getattr(before, name), name
    assert names(tmp_path / "new") == names(either)
    assert verify(tmp_path / "new", sha256=True, jobs=1).damages == []
    assert not done.same and done.lost == [] and after.commit and after.commit.parent is None
    assert "a new one names the 6 shards" in str(done)


def test_a_record_that_is_damaged_is_found_by_the_name_of_its_shard(
    either: Path, tmp_path: Path
) -> None:
    keys = api.open(either, decode=None).keys()
    reader = api.open(either, decode=None).reader
    at = reader.shard(2).offset(1) + 30
    path = either / reader.manifest.shard(2).name
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    lose(either)
    done = repair(either, tmp_path / "new", jobs=1)
    assert api.open(tmp_path / "new", decode=None).keys() == keys[:9] + keys[10:]
    assert [(one.shard, one.record) for one in done.lost] == [(path.name, 1)]


def test_classes_are_only_named_where_the_keys_name_them(tmp_path: Path) -> None:
    out = make(tmp_path / "out", [4, 5])  # keys are k/000000.jpg, of all labels
    lose(out)
    done = repair(out, tmp_path / "new", jobs=1)
    assert manifest.load(locate(tmp_path / "new")).classes is None
    assert "it lacks the names of the classes, how they were packed" in str(done)


def test_the_classes_of_splits_are_in_their_file(tmp_path: Path) -> None:
    for name in ("train", "val"):
        plant(tmp_path / "s" / name, images(each=3))
    pack(tmp_path / "s", tmp_path / "out", jobs=1)
    lose(tmp_path / "out" / "val")
    before = manifest.load(locate(tmp_path / "out" / "train"))
    repair(tmp_path / "out", tmp_path / "new", jobs=1)
    assert manifest.load(locate(tmp_path / "new" / "val")).classes == before.classes
    assert len(api.open(tmp_path / "new" / "val", decode=None)) == 9


@pytest.mark.parametrize("change", ["drop", "erase", "annotate", "tag"])
def test_of_a_dataset_that_was_changed_none_is_made(
    change: str, out: Path, damage: str, tmp_path: Path
) -> None:
    keys = api.open(out, decode=None).keys()
    copy(out, tmp_path / "older")
    if change == "annotate":
        annotate(out, {key: {"caption": "x"} for key in keys})
    elif change == "tag":
        tag(out, "v1")
    else:
        drop(out, keys=keys[5:6])
        copy(out, tmp_path / "between")
        drop(out, keys=keys[:2], erase=change == "erase")
    copy(out, tmp_path / "newest")
    lose(out, damage)
    with pytest.raises(DamageError, match=r"was changed after it was packed.*--from COPY"):
        repair(out, tmp_path / "new")
    if change != "tag":
        with pytest.raises(DamageError, match="the copy is of another version"):
            repair(out, tmp_path / "new", copy=tmp_path / "older")
    if (tmp_path / "between").exists():
        for name in [name for name in os.listdir(out) if name.startswith("manifest-")]:
            (out / name).rename(tmp_path / name)
        with pytest.raises(DamageError, match="the copy is of another version"):
            repair(out, tmp_path / "new", copy=tmp_path / "between")
        for name in [name for name in os.listdir(tmp_path) if name.startswith("manifest-")]:
            (tmp_path / name).rename(out / name)
    assert not (tmp_path / "new").exists()
    repair(out, tmp_path / "new", copy=tmp_path / "newest", jobs=1)
    assert content(tmp_path / "new") == content(tmp_path / "newest")


def test_erased_shards_alone_make_none(out: Path, tmp_path: Path) -> None:
    drop(out, keys=api.open(out, decode=None).keys()[:1], erase=True)
    for path in out.iterdir():
        if not path.name.startswith("0"):
            path.unlink()
    with pytest.raises(DamageError, match="of another version"):
        repair(out, tmp_path / "new")


@pytest.mark.parametrize("what", ["gap", "unreadable", "two"])
def test_where_nobody_knows_what_was_there_it_says_so(
    what: str, out: Path, tmp_path: Path, source: Path
) -> None:
    lose(out)
    first = out / names(out)[2]
    if what == "gap":
        first.unlink()
    elif what == "unreadable":
        first.write_bytes(first.read_bytes()[:-1])
    else:
        pack(source, tmp_path / "o2", plan=PlanOptions(max_records=5), jobs=1)
        for name in names(tmp_path / "o2"):
            shutil.copy(tmp_path / "o2" / name, out)
    with pytest.raises(DamageError, match=r"(?s)manifest cannot be read, and .*--from COPY"):
        repair(out, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_was_never_a_dataset_is_said_as_always(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotPackedError, match="shardio pack"):
        repair(tmp_path / "empty", tmp_path / "new")


def test_claims_are_what_files_say_of_themselves(either: Path) -> None:
    one = manifest.load(locate(either))
    first, second = one.shard(0).name, one.shard(1).name
    os.rename(either / first, either / "lost+found-1")
    data = bytearray((either / second).read_bytes())
    data[:2_000] = bytes(2_000)
    (either / second).write_bytes(data)
    found = {claim.name: claim for claim in claims(locate(either))}
    assert found.keys() == {"lost+found-1", *(one.shard(number).name for number in range(2, 6))}
    assert found["lost+found-1"].says == (0, one.dataset_id, one.schema.fields)
