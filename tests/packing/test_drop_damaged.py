"""`drop --damaged`: what `verify --decode` lists is hidden from every reader, nothing else."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import features
from support.packing import grouped
from support.trees import content, picture, plant, shardio, shardio_json, shards

import shardio as api
from shardio import ShardDataset, annotate, append, compact, export, index, pack, unpack
from shardio.errors import (
    BusyError,
    DamageError,
    DependencyError,
    OptionError,
    StorageError,
)
from shardio.formats import manifest, open_shard
from shardio.formats.lmdb import PAGE
from shardio.packing.drop import drop
from shardio.packing.gc import gc
from shardio.packing.repair import repair
from shardio.packing.update import update
from shardio.packing.verify import verify
from shardio.packing.versions import restore
from shardio.storage.location import locate
from shardio.viewer.view import open_view

RECORDS = 24
TORN = ("class1/03.jpg", "class0/06.jpg")  # packed so


@pytest.fixture
def source(tmp_path: Path) -> Path:
    keys = [f"class{i % 2}/{i:02}.jpg" for i in range(RECORDS)]
    tree = {key: picture(40 + i, 30) for i, key in enumerate(keys)}
    return plant(tmp_path / "src", tree | {key: tree[key][:-90] for key in TORN})


@pytest.fixture
def out(source: Path, tmp_path: Path) -> Path:
    """Four shards of six records; the two images of TORN cannot be decoded."""
    pack(source, tmp_path / "out", **grouped({"jobs": 1, "max_records": 6}))
    return tmp_path / "out"


def files(out: Path) -> list[Path]:
    return shards(out) or sorted(out.glob("*.lmdb"))


def flip(out: Path, shard: int, record: int, at: int) -> None:
    """Flip a bit of a record, at a byte of it; from its end if below 0."""
    dataset = manifest.load(locate(out))
    opened = open_shard(dataset.format, dataset.opening(locate(out)), dataset.shard(shard))
    start, size = opened.offset(record), int(opened.sizes[record])
    opened.close()
    flip_byte(files(out)[shard], start + at % size)


def flip_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def keys_of(out: Path) -> list[str]:
    return api.open(out, decode=None).keys()


def read_all(out: Path) -> list[str]:
    """Read and decode by each road; the keys."""
    keys = sorted(one["__key__"] for one in api.open(out, decode="numpy"))
    assert sorted(one["__key__"] for one in ShardDataset(out, decode="numpy")) == keys
    return keys


def dropped(out: Path, **options: Any) -> Any:
    return drop(out, damaged=True, jobs=1, **options)


@pytest.mark.parametrize("format", ["record", "lmdb"])
@pytest.mark.parametrize("jobs", [1, 2])
def test_what_verify_lists_is_dropped_and_nothing_else(
    source: Path, tmp_path: Path, format: str, jobs: int
) -> None:
    out = tmp_path / "out"
    pack(source, out, **grouped({"jobs": 1, "max_records": 6, "format": format}))
    keys = keys_of(out)
    flip(out, 1, 2, -1)
    flip(out, 3, 5, 20)  # its head: there is no key
    listed = verify(out, decode=True, jobs=1).damages
    gone = {keys[8], keys[23], *TORN}
    assert {one.key for one in listed} >= gone - {keys[23]}
    before = content(out)
    tried = drop(out, damaged=True, jobs=jobs, dry_run=True)
    assert (tried.records, tried.damages) == (len(gone), listed) and content(out) == before
    done = drop(out, damaged=True, jobs=jobs)
    assert (done.records, done.remaining, done.damages) == (len(gone), RECORDS - len(gone), listed)
    assert read_all(out) == sorted({*keys} - gone)
    seen = verify(out, decode=True, jobs=1)
    assert (seen.damages, seen.hidden, seen.records) == ([], len(gone), RECORDS)
    assert f": all others as packed; {len(gone)} damaged records were dropped" in str(seen)
    before = content(out)
    again = drop(out, damaged=True, jobs=jobs)
    assert (again.records, again.damages, again.versions) == (0, [], {}) and content(out) == before
    restore(out, api.log(out).versions[-1].id)
    assert len(verify(out, decode=True, jobs=1).damages) == len(gone)


def hurt(path: Path, how: str) -> None:
    """Damage a shard as a whole."""
    if how == "missing":
        path.unlink()
    elif how == "cut":
        os.truncate(path, path.stat().st_size - 1)
    else:
        flip_byte(path, {"header": 20, "index": path.stat().st_size - 100}[how])


@pytest.mark.parametrize("how", ["missing", "cut", "header", "index"])
def test_of_a_shard_that_does_not_open_all_records_go(
    out: Path, source: Path, tmp_path: Path, how: str
) -> None:
    keys = keys_of(out)
    annotate(out, write_scores(tmp_path, keys))
    hurt(files(out)[2], how)
    done = dropped(out)
    gone = {*keys[12:18], *TORN}
    left = sorted({*keys} - gone)
    assert done.records == len(gone) and read_all(out) == left
    seen = verify(out, decode=True, jobs=1)
    assert (seen.damages, seen.hidden) == ([], len(gone))
    data = api.open(out, decode=None)
    assert len(data.targets) == len(data.columns("score")) == len(data.sizes()) == len(left)
    assert data.columns("score").tolist() == [keys.index(key) for key in keys_of(out)]
    assert keys[13] not in data and left[0] in data
    chosen = ShardDataset(out, decode=None, where={"label": ["class1"]})
    assert sorted(one["__key__"] for one in chosen) == [k for k in left if k.startswith("class1")]
    unpack(out, tmp_path / "files")
    assert (
        sorted(str(p.relative_to(tmp_path / "files")) for p in tmp_path.glob("files/*/*")) == left
    )
    export(out, tmp_path / "wds", format="webdataset")
    with open_view(out) as view:
        assert view.summary().records == len(left)
        view.histograms()
        cards = view.page(count=RECORDS).cards
        assert sorted(one.key for one in cards if not one.damaged) == left
        assert not view.damaged()
    for command in ("info", "ls", "explain"):
        shardio(command, out)
    drop(out, where=["label=class0"], dry_run=True)
    assert append(source, out, on_duplicate="skip", jobs=1, on_error="skip", dry_run=True).added
    assert compact(out, jobs=1).left_out == len(gone)
    assert read_all(out) == left and verify(out, decode=True, sha256=True, jobs=1).hidden == 0


def write_scores(folder: Path, keys: list[str]) -> Path:
    path = folder / "scores.csv"
    path.write_text("key,score\n" + "".join(f"{key},{i}\n" for i, key in enumerate(keys)))
    return path


def test_update_brings_back_what_the_source_still_has(out: Path, source: Path) -> None:
    keys = keys_of(out)
    flip(out, 1, 2, -1)
    hurt(files(out)[2], "index")
    dropped(out)
    done = update(source, out, jobs=1, check_images=True, on_error="skip")
    assert [key for key, _ in done.rejected] == sorted(TORN)
    assert read_all(out) == sorted({*keys} - {*TORN})


def test_erasing_leaves_no_damage(out: Path, tmp_path: Path) -> None:
    keys = keys_of(out)
    flip(out, 1, 2, -1)
    assert dropped(out).records == 3
    hurt(files(out)[2], "header")
    done = dropped(out, erase=True)
    assert done.erased == len({keys[8], *TORN} - {*keys[12:18]})
    assert done.unerased == 6
    assert (
        f"6 records not erased, since their shards cannot be opened: `shardio compact {out}`"
        in (str(done))
    )
    seen = verify(out, decode=True, sha256=True, jobs=1)
    assert (seen.damages, seen.hidden) == ([], 6)
    assert read_all(out) == sorted({*keys} - {keys[8], *TORN, *keys[12:18]})


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_key_is_erased_as_it_is_said_where_a_shard_does_not_open(
    out: Path, is_dropped: bool
) -> None:
    keys = keys_of(out)
    hurt(files(out)[2], "header")
    if is_dropped:
        dropped(out)
    before = content(out)
    for key in (keys[0], keys[13]):  # which may lie in the damaged shard, or does
        with pytest.raises(DamageError, match="so nothing was dropped") as raised:
            drop(out, keys=[key], erase=True)
    assert content(out) == before
    commands = re.findall("`shardio (.*?)`", str(raised.value).replace("\n", " "))
    assert [one.split()[0] for one in commands] == ["drop", "compact", "gc"]
    for command in commands:
        shardio(*command.split())
    assert drop(out, keys=[keys[0], keys[13]], missing="ignore", erase=True).missing == [keys[13]]
    assert verify(out, dropped=[keys[0], keys[13]]).damages != []  # until `gc`
    gc(out, keep_s=0)
    assert verify(out, dropped=[keys[0], keys[13]]).damages == []


@pytest.mark.parametrize("erase", [False, True])
def test_more_than_half_is_refused(out: Path, erase: bool) -> None:
    for path in files(out)[1:]:
        path.unlink()
    before = content(out)
    with pytest.raises(DamageError, match=r"of 24 records are damaged, or .* Nothing was dropped"):
        dropped(out, erase=erase)
    assert content(out) == before


def test_what_says_nothing_of_the_bytes_is_no_damage(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, before = files(out)[2], content(out)
    kept = shard.rename(shard.with_suffix(".kept"))
    shard.mkdir()
    with pytest.raises(StorageError, match="Nothing was dropped"):
        dropped(out)
    shard.rmdir()
    kept.rename(shard)
    assert content(out) == before


def test_a_decoder_that_is_missing_is_no_damage(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    if not features.check("webp"):
        pytest.skip("PIL has no WebP")
    pack(plant(tmp_path / "webp", {"a/x.webp": picture(20, 20, "WEBP")}), tmp_path / "two", jobs=1)
    api.open(tmp_path / "two")[0]  # the plugins are there
    factory, _ = Image.OPEN["WEBP"]
    lacking = "image file could not be identified because WEBP support not installed"
    monkeypatch.setitem(Image.OPEN, "WEBP", (factory, lambda prefix: lacking))
    assert verify(tmp_path / "two", decode=True, jobs=1).damages
    with pytest.raises(DependencyError, match=r"record 0, key a/x\.webp: .* built without WebP"):
        dropped(tmp_path / "two")


def test_the_limit_of_pixels_is_as_of_verify(out: Path) -> None:
    with pytest.raises(DamageError, match="over the limit of 100"):
        dropped(out, max_pixels=100)
    assert dropped(out, max_pixels=63 * 30).records == len(TORN)


def test_damage_of_no_record_is_told(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(source, out, **grouped({"jobs": 1, "max_records": 6, "format": "lmdb"}))
    flip_byte(files(out)[1], 2 * PAGE + 8)  # the head of a leaf
    done = dropped(out)
    assert (done.records, done.unmended, len(done.damages)) == (2, 1, 3)
    assert "1 damage of no record: restore the file from a copy, or `shardio compact" in str(done)
    compact(out, jobs=1)
    assert verify(out, decode=True, jobs=1).damages == []


def test_a_damaged_value_beside_a_shard_drops_its_record(out: Path, tmp_path: Path) -> None:
    keys = keys_of(out)
    rows = [f"{key},{'text ' * 20}{i}" for i, key in enumerate(keys)]
    (tmp_path / "texts.csv").write_text("\n".join(["key,caption", *rows]))
    annotate(out, tmp_path / "texts.csv")
    file = sorted(out.glob("overlay-*"))[0]
    flip_byte(file, file.read_bytes().index(b"text text ") + 3)
    done = dropped(out)
    assert done.records == 1 + len(TORN)
    assert len(read_all(out)) == RECORDS - done.records


@pytest.mark.parametrize("how", ["missing", "cut", "header", "index"])
def test_a_file_of_values_that_does_not_open_drops_no_record(
    out: Path, tmp_path: Path, how: str
) -> None:
    keys = keys_of(out)
    flip(out, 1, 2, -1)
    annotate(out, write_scores(tmp_path, keys))
    file = sorted(out.glob("overlay-*"))[1]  # beside the same shard
    hurt(file, how)
    before = content(out)
    with pytest.raises(DamageError, match=file.name):  # which cannot be written without the value
        dropped(out, erase=True)
    assert content(out) == before
    done = dropped(out)
    assert (done.records, done.unmended) == (1 + len({*TORN} - {keys[8]}), 1)
    assert any(file.name in one.what for one in done.damages)
    assert "`shardio repair` values beside them" in str(done)
    repair(out, tmp_path / "new", jobs=1)
    assert read_all(tmp_path / "new") == sorted({*keys} - {keys[8], *TORN})


def test_what_is_erased_is_not_passed_over_where_a_dropped_shard_does_not_open(
    out: Path, source: Path
) -> None:
    keys = keys_of(out)
    append(source, out, on_duplicate="replace", jobs=1)
    drop(out, keys=keys[:1], erase=True)  # so the first shard has one that was erased
    os.truncate(files(out)[0], files(out)[0].stat().st_size - 1)
    before = content(out)
    with pytest.raises(DamageError, match=files(out)[0].name):
        drop(out, keys=keys[2:3], erase=True)
    assert content(out) == before


def test_splits_are_checked_together_and_committed_each(tmp_path: Path, source: Path) -> None:
    for split in ("train", "val"):
        shutil.copytree(source, tmp_path / "both" / split)
    pack(tmp_path / "both", tmp_path / "out", **grouped({"jobs": 1, "max_records": 6}))
    flip(tmp_path / "out" / "val", 0, 0, -1)
    done = dropped(tmp_path / "out")
    assert {*done.versions} == {"train", "val"} and done.records >= 2 * len(TORN)
    assert verify(tmp_path / "out", decode=True, jobs=1).damages == []


def test_files_in_place_are_dropped_from_their_index(source: Path, tmp_path: Path) -> None:
    index(source, jobs=1)
    assert dropped(source).records == len(TORN)
    assert len(read_all(source)) == RECORDS - len(TORN)


def test_of_shards_that_are_written_anew_meanwhile_nothing_is_dropped(out: Path) -> None:
    def interfere(done: int, total: int) -> None:
        if not (out / "done").exists():
            (out / "done").touch()
            drop(out, keys=keys_of(out)[:1], erase=True)

    with pytest.raises(BusyError, match="something else wrote its shards anew"):
        dropped(out, progress=interfere)
    assert len(keys_of(out)) == RECORDS - 1


def test_records_that_were_added_meanwhile_do_not_matter(out: Path, tmp_path: Path) -> None:
    more = plant(tmp_path / "more", {"class0/new.jpg": picture(9, 9)})

    def interfere(done: int, total: int) -> None:
        if not (out / "done").exists():
            (out / "done").touch()
            append(more, out, jobs=1)

    assert dropped(out, progress=interfere).records == len(TORN)
    assert len(keys_of(out)) == RECORDS + 1 - len(TORN)


def test_the_command_prints_what_it_found(out: Path) -> None:
    lines = shardio("drop", out, "--damaged", "--dry-run", "--jobs", "1").stdout.splitlines()
    assert len(lines) == 3 and all("cannot be decoded: " in line for line in lines[:2])
    assert lines[2].endswith("out: 2 records would be dropped, 22 records left")
    found = shardio_json("drop", out, "--damaged")
    assert {one["key"] for one in found["damages"]} == {*TORN} and found["unmended"] == 0
    assert shardio("drop", out, "--damaged").stdout.endswith("0 records dropped, 22 records left\n")
    shardio("verify", out, "--decode")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keys": ["a"]}, "give keys, where or damaged, one of them"),
        ({"where": ["label=class1"]}, "give keys, where or damaged, one of them"),
        ({"damaged": False, "keys": ["a"], "jobs": 1}, "max_pixels and jobs go with damaged"),
        ({"max_pixels": 0}, "max_pixels"),
        ({"jobs": 0}, "jobs"),
        ({"damaged": 1}, "damaged"),
    ],
)
def test_wrong_options_are_named(out: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        drop(out, **{"damaged": True} | options)
