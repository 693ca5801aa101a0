"""Sources to shards: the same bytes however they are made, resumed, refused, and never half."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LIMIT_S
from support.packing import inodes, keys, on_shard, pack_one, unlisted
from support.trees import (
    JPEG,
    command,
    content,
    environment,
    images,
    noise,
    picture,
    plant,
    shardio,
    shardio_json,
    shards,
)

from shardio.dataset import sequence as sequences
from shardio.errors import (
    BusyError,
    DamageError,
    ExistsError,
    NotPackedError,
    OptionError,
    SourceChangedError,
    SourceError,
    StorageError,
)
from shardio.formats import manifest
from shardio.images import decode as image
from shardio.images.filetype import image_type
from shardio.packing import build_shard, journal, process_pool
from shardio.packing.gc import gc
from shardio.packing.job import Job
from shardio.packing.options import PackOptions, PlanOptions, SourceOptions
from shardio.packing.pack import commit, pack
from shardio.packing.plan import Plan, Rows, make_plan
from shardio.packing.sources import files, imagefolder
from shardio.packing.sources.base import Rejected, SourceRequest
from shardio.packing.unpack import unpack
from shardio.packing.verify import verify
from shardio.packing.writer import Writer
from shardio.storage import local, lock
from shardio.storage.location import locate

# --- what comes out -------------------------------------------------------------------------------


def test_every_file_is_a_record_with_its_bytes_and_its_class(source: Path, tmp_path: Path) -> None:
    done = pack_one(source, tmp_path / "out")
    assert (done.records, done.shards, done.classes, done.committed) == (24, 6, 3, True)
    found = {sample["__key__"]: sample for sample in sequences.stored(tmp_path / "out")}
    assert {key: sample["image"] for key, sample in found.items()} == {
        os.fsencode(key): data for key, data in images().items()
    }
    assert {sample["label"] for sample in found.values()} == {0, 1, 2}
    assert all(s["label"] == int(key[5:6]) for key, s in found.items())


@pytest.mark.parametrize("jobs", [2, 3, 50])
def test_any_number_of_jobs_gives_the_same_bytes(source: Path, tmp_path: Path, jobs: int) -> None:
    pack_one(source, tmp_path / "one")
    pack_one(source, tmp_path / "many", jobs=jobs)
    assert content(tmp_path / "one") == content(tmp_path / "many")


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (2, 2, 3, 1)])
def test_parts_in_any_order_give_the_same_bytes(
    source: Path, tmp_path: Path, order: tuple[int, ...]
) -> None:
    pack_one(source, tmp_path / "one")
    for part in order:
        done = pack_one(source, tmp_path / "parts", part=(part, 3))
        assert not done.committed
        assert done.records == 8
    [done] = commit(tmp_path / "parts", jobs=1)
    assert done.committed
    assert content(tmp_path / "one") == content(tmp_path / "parts")


@pytest.mark.parametrize("damage", ["none", "all", "no note", "note", "file", "touched"])
def test_a_quick_commit_reads_only_shards_that_changed_since_their_part_wrote_them(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    out = tmp_path / "out"
    for part in (1, 2):
        pack_one(source, out, part=(part, 2))
    shard = max(out.glob("*.shard"))
    note = out / f".shardio-built-{shard.name}.json"
    if damage == "no note":
        note.unlink()
    elif damage == "note":
        note.write_bytes(note.read_bytes().replace(b'"number": ', b'"number": 1', 1))
    elif damage == "file":
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    elif damage == "touched":
        os.utime(shard)
    read: list[str] = []
    sha256 = local.LocalFile.sha256

    def counted(file: local.LocalFile) -> bytes:
        read.append(os.path.basename(file.name))
        return sha256(file)

    monkeypatch.setattr(local.LocalFile, "sha256", counted)
    if damage == "file":
        with pytest.raises(NotPackedError, match=r"1 of 6 shards are not built"):
            commit(out, jobs=1, quick=True)
        assert read == [shard.name]
        return
    shards = sorted(path.name for path in out.glob("*.shard"))
    commit(out, jobs=1, quick=damage != "all")
    assert read == {"none": [], "all": shards}.get(damage, [shard.name])
    pack_one(source, tmp_path / "one")
    assert content(out) == content(tmp_path / "one")
    assert not list(out.glob(".shardio-*"))


def test_only_notes_that_shardio_wrote_go_at_the_commit(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for part in (1, 2):
        pack_one(source, out, part=(part, 2))
    assert len(list(out.glob(".shardio-built-*"))) == 6
    named = [".shardio-built-x.json", ".shardio-sent-00000.json", ".shardio-scan-00000.json"]
    for name in named[:2]:
        (out / name).write_text("of somebody else")
    (out / named[2]).mkdir()
    commit(out)
    assert sorted(path.name for path in out.glob(".shardio-*")) == sorted(named)


def test_a_part_that_is_run_again_writes_the_notes_that_a_kill_left_out(
    source: Path, tmp_path: Path
) -> None:
    pack_one(source, tmp_path / "out", part=(1, 2))
    notes = {path: path.read_bytes() for path in (tmp_path / "out").glob(".shardio-built-*")}
    min(notes).unlink()
    assert pack_one(source, tmp_path / "out", part=(1, 2)).kept == len(notes) == 3
    assert {path: path.read_bytes() for path in notes} == notes


def test_the_progress_of_a_part_ends_with_its_bytes(source: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    done = pack_one(
        source, tmp_path / "out", part=(1, 3), progress=lambda *one: told.append(one), jobs=1
    )
    assert told[-1] == (done.source_bytes, done.source_bytes)
    assert {total for _, total in told} == {done.source_bytes}


def test_more_parts_than_shards_build_nothing_twice(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "one")
    built = [pack_one(source, tmp_path / "parts", part=(i, 9)).built for i in range(1, 10)]
    assert sum(built) == 6
    commit(tmp_path / "parts")
    assert content(tmp_path / "one") == content(tmp_path / "parts")


def test_shuffling_is_by_seed_and_can_be_left_out(source: Path, tmp_path: Path) -> None:
    for name, options in {"0": {}, "1": {"seed": 1}, "sorted": {"shuffle": False}}.items():
        pack_one(source, tmp_path / name, **options)
    in_order = sorted(str(key) for key in images())
    assert keys(tmp_path / "sorted") == in_order
    assert sorted(keys(tmp_path / "0")) == sorted(keys(tmp_path / "1")) == in_order
    assert len({tuple(keys(tmp_path / name)) for name in ("0", "1", "sorted")}) == 3


def test_the_dataset_id_knows_no_time_and_no_path(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "out")
    moved = shutil.copytree(source, tmp_path / "elsewhere")
    for path in moved.rglob("*.jpg"):
        os.utime(path)
    pack_one(moved, tmp_path / "again")
    assert content(tmp_path / "out") == content(tmp_path / "again")


def test_shards_hold_at_most_shard_size_bytes_or_one_larger_file(tmp_path: Path) -> None:
    sizes = [100, 900, 50, 2000, 10, 10, 10, 980, 20]
    tree = {f"{i}.jpg": noise(str(i), size) for i, size in enumerate(sizes)}
    source = plant(tmp_path / "src", tree)
    pack_one(source, tmp_path / "out", shard_size=1000, max_records=None, shuffle=False)
    opened = manifest.load(locate(tmp_path / "out"))
    assert opened.shard_records.tolist() == [2, 1, 1, 3, 2]


def test_max_records_bounds_every_shard(source: Path, tmp_path: Path) -> None:
    done = pack_one(source, tmp_path / "out", max_records=5)
    assert manifest.load(locate(tmp_path / "out")).shard_records.tolist() == [5, 5, 5, 5, 4]
    assert done.shards == 5


def test_default_shards_are_at_least_16_where_there_are_16_mib(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    for i in range(40):
        with open(source / f"{i}.jpg", "wb") as file:
            file.write(JPEG)
            file.truncate(1 << 20)  # sparse: nothing is packed here
    [planned] = pack(source, tmp_path / "out", dry_run=True)
    assert 16 <= planned.shards <= 20
    for path in sorted(source.iterdir())[4:]:
        path.unlink()
    [planned] = pack(source, tmp_path / "out", dry_run=True)
    assert planned.shards == 4  # none below 1 MiB


def test_a_dry_run_plans_and_touches_nothing(source: Path, tmp_path: Path) -> None:
    (source / "class0" / "empty.jpg").touch()
    [planned] = pack(source, tmp_path / "out", dry_run=True, plan=PlanOptions(max_records=4))
    assert (planned.records, planned.shards, planned.committed) == (24, 6, False)
    assert planned.rejected == [("class0/empty.jpg", "is empty")]
    assert not (tmp_path / "out").exists()


def test_nothing_but_shards_and_the_manifest_stays(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "out")
    assert {p.suffix for p in (tmp_path / "out").iterdir()} == {".shard", ".json"}


def test_an_empty_class_stays_a_class(source: Path, tmp_path: Path) -> None:
    (source / "aardvark").mkdir()
    pack_one(source, tmp_path / "out")
    assert sequences.open(tmp_path / "out").classes == ["aardvark", "class0", "class1", "class2"]


def test_names_that_are_no_utf8_come_back(tmp_path: Path) -> None:
    tree = {b"caf\xe9/\xff\n.jpg": noise("x", 99), "caf\u00e9/y.jpg": noise("y", 99)}
    source = plant(tmp_path / "src", tree)
    pack_one(source, tmp_path / "out")
    unpack(tmp_path / "out", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)


def test_progress_reaches_the_total_in_process_and_in_workers(source: Path, tmp_path: Path) -> None:
    for jobs in (1, 2):
        seen: list[tuple[int, int]] = []
        pack_one(
            source, tmp_path / str(jobs), jobs=jobs, progress=lambda *a, seen=seen: seen.append(a)
        )
        total = sum(len(data or b"") for data in images().values())
        assert seen[-1] == (total, total)
        assert seen == sorted(seen)


def test_paths_may_be_bytes_paths_and_file_urls(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "out")
    pack(os.fsencode(source), f"file://{tmp_path}/url", jobs=1, plan=PlanOptions(max_records=4))
    assert content(tmp_path / "url") == content(tmp_path / "out")
    assert verify(f"file://{tmp_path}/url", jobs=1).damages == []


# --- splits and classes ---------------------------------------------------------------------------

SPLIT = {
    "train/a/1.jpg": noise("1", 90),
    "train/b/2.jpg": noise("2", 91),
    "val/b/3.jpg": noise("3", 92),
    "test/4.jpg": noise("4", 93),
}


def test_splits_are_datasets_with_shared_classes_and_relative_keys(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", SPLIT)
    done = pack(source, tmp_path / "out", jobs=1)
    assert [(one.split, one.records) for one in done] == [("test", 1), ("train", 2), ("val", 1)]
    assert keys(tmp_path / "out" / "val") == ["b/3.jpg"]
    assert sequences.stored(tmp_path / "out" / "val")[0]["label"] == 1
    assert sequences.open(tmp_path / "out" / "test").classes is None
    named = json.loads((tmp_path / "out" / "shardio.json").read_text())
    assert named["splits"] == ["test", "train", "val"]
    assert named["classes"] == ["a", "b"]
    with pytest.raises(NotPackedError, match="out/train"):
        sequences.open(tmp_path / "out")
    unpack(tmp_path / "out", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)  # val has no folder `a`


def test_parts_of_splits_are_committed_together(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", SPLIT)
    pack(source, tmp_path / "one", jobs=1, plan=PlanOptions(max_records=1))
    for part in (1, 2):
        pack(source, tmp_path / "out", jobs=1, plan=PlanOptions(max_records=1, part=(part, 2)))
    assert not (tmp_path / "out" / "shardio.json").exists()
    assert len(commit(tmp_path / "out")) == 3
    assert content(tmp_path / "out") == content(tmp_path / "one")
    with pytest.raises(NotPackedError, match="nothing to commit"):
        commit(tmp_path / "out")


def test_problems_of_all_splits_come_in_one_error(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", SPLIT | {"train/a/bad.jpg": b"?", "val/b/empty.jpg": b""})
    with pytest.raises(SourceError) as caught:
        pack(source, tmp_path / "out", jobs=1)
    assert "train/a/bad.jpg" in str(caught.value)
    assert "val/b/empty.jpg" in str(caught.value)
    assert not (tmp_path / "out" / "shardio.json").exists()
    assert not (tmp_path / "out" / "train" / "manifest.json").exists()


def committed(out: Path) -> set[str]:
    return {path.parent.name for path in out.rglob("*.json") if path.name[0] != "."}


def test_one_bad_split_leaves_all_of_them_uncommitted(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", SPLIT | {"val/b/bad.jpg": b"?"})
    out = tmp_path / "out"
    with pytest.raises(SourceError, match="nothing was committed"):
        pack(source, out, jobs=1)
    assert committed(out) == set()
    with pytest.raises(NotPackedError, match=r"splits \(test, train, val\) .* again to resume"):
        sequences.open(out)
    assert "is not finished" in shardio("info", out, code=1).stderr
    done = pack(source, out, jobs=1, on_error="skip")
    assert [(one.split, one.kept, one.committed) for one in done] == [
        ("test", 1, True), ("train", 1, True), ("val", 0, True)
    ]  # fmt: skip
    assert len(commit_free(out)) == 3


def commit_free(out: Path) -> list[Path]:
    """The manifests of splits, where nothing unfinished is left."""
    assert not list(out.rglob(".shardio*"))
    return sorted(out.glob("*/manifest.json"))


def test_one_split_that_misses_parts_leaves_all_of_them_uncommitted(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", SPLIT)
    out = tmp_path / "out"
    pack(
        source, out, jobs=1, plan=PlanOptions(max_records=1, part=(2, 2))
    )  # all but the first shard of train
    with pytest.raises(NotPackedError, match=r"train: not packed: 1 of 2 .* not built: 0\n"):
        commit(out, jobs=1)
    assert committed(out) == set()
    pack(source, out, jobs=1, plan=PlanOptions(max_records=1, part=(1, 2)))
    assert all(one.committed for one in commit(out, jobs=1))
    assert len(commit_free(out)) == 3


def test_splits_that_were_killed_between_two_commits_are_finished_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = plant(tmp_path / "src", SPLIT)
    pack(source, tmp_path / "one", jobs=1)
    real = Job.commit

    def finish(one: Any) -> None:
        if one.result.split == "train":
            raise KeyboardInterrupt
        real(one)

    monkeypatch.setattr(Job, "commit", finish)
    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path / "out", jobs=1)
    monkeypatch.undo()
    with pytest.raises(NotPackedError, match="a packing of splits"):
        sequences.open(tmp_path / "out")
    done = pack(source, tmp_path / "out", jobs=1)
    assert [(one.already, one.kept) for one in done] == [(True, 0), (False, 1), (False, 1)]
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_another_dataset_in_one_split_stops_all_before_any_is_touched(tmp_path: Path) -> None:
    pack(plant(tmp_path / "src", SPLIT), tmp_path / "out", jobs=1)
    before = content(tmp_path / "out")
    plant(tmp_path / "src", {"val/b/new.jpg": JPEG})
    with pytest.raises(ExistsError):
        pack(tmp_path / "src", tmp_path / "out", jobs=1)
    assert content(tmp_path / "out") == before


def test_packing_splits_again_touches_nothing(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", SPLIT)
    pack(source, tmp_path / "out", jobs=1)
    before = (tmp_path / "out" / "shardio.json").stat()
    assert all(one.already for one in pack(source, tmp_path / "out", jobs=1))
    assert (tmp_path / "out" / "shardio.json").stat().st_ino == before.st_ino


@pytest.mark.parametrize("first", ["splits", "one"])
def test_one_dataset_and_splits_do_not_mix_in_a_directory(tmp_path: Path, first: str) -> None:
    source = plant(tmp_path / "src", {"train/a/1.jpg": JPEG, "val/a/2.jpg": JPEG})
    pack(source, tmp_path / "out", jobs=1, splits=first == "splits")
    with pytest.raises(ExistsError, match="splits"):
        pack(source, tmp_path / "out", jobs=1, splits=first != "splits")


def test_classes_of_another_dataset_number_this_one(tmp_path: Path) -> None:
    pack(plant(tmp_path / "all", images(4)), tmp_path / "a", jobs=1)
    some = {key: data for key, data in images(4).items() if "class2" in str(key)}
    source = plant(tmp_path / "some", some)
    pack(source, tmp_path / "b", jobs=1, read=SourceOptions(classes=tmp_path / "a"))
    opened = sequences.stored(tmp_path / "b")
    assert opened.classes == ["class0", "class1", "class2", "class3"]
    assert {sample["label"] for sample in opened} == {2}
    unpack(tmp_path / "b", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)  # no folders of the other classes


def test_a_class_missing_in_the_other_numbering_is_an_error(tmp_path: Path) -> None:
    pack(plant(tmp_path / "a", {"cat/1.jpg": JPEG}), tmp_path / "A", jobs=1)
    source = plant(tmp_path / "b", {"cat/1.jpg": JPEG, "dog/1.jpg": JPEG})
    with pytest.raises(OptionError, match="dog"):
        pack(source, tmp_path / "B", jobs=1, read=SourceOptions(classes=tmp_path / "A"))
    flat = plant(tmp_path / "flat", {"1.jpg": JPEG})
    with pytest.raises(OptionError, match="has no classes"):
        pack(flat, tmp_path / "B", jobs=1, read=SourceOptions(classes=tmp_path / "A"))
    assert not (tmp_path / "B").exists()


# --- what cannot be packed ------------------------------------------------------------------------

BAD = {"class0/no.jpg": b"not an image", "class1/empty.png": b"", "class2/x.txt": b"text"}


@pytest.mark.parametrize("jobs", [1, 2])
def test_all_problems_are_listed_at_once_and_finished_shards_stay(
    source: Path, tmp_path: Path, jobs: int
) -> None:
    plant(source, BAD)
    (source / "class0" / "gone.jpg").symlink_to("nowhere")
    with pytest.raises(SourceError) as caught:
        pack_one(source, tmp_path / "out", jobs=jobs)
    for name in (*BAD, "class0/gone.jpg"):
        assert name in str(caught.value)
    assert "4 files" in str(caught.value)
    with pytest.raises(NotPackedError, match="not packed"):
        sequences.open(tmp_path / "out")
    kept = inodes(tmp_path / "out")
    assert kept
    done = pack_one(source, tmp_path / "out", jobs=jobs, on_error="skip")
    assert done.kept == len(kept)
    assert kept.items() <= inodes(tmp_path / "out").items()


def test_skipped_files_are_left_out_and_listed(source: Path, tmp_path: Path) -> None:
    plant(source, BAD | {b"class0/\xff.jpg": b"?"})
    done = pack_one(source, tmp_path / "out", on_error="skip")
    lines = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    listed = [json.loads(line) for line in lines]
    assert [os.fsencode(one["key"]) for one in listed] == sorted(
        [*map(str.encode, BAD), b"class0/\xff.jpg"]
    )
    assert [key for key, _ in done.rejected] == [one["key"] for one in listed]
    assert {one["reason"].split(":")[0] for one in listed} == {"is not an image", "is empty"}
    assert done.records == 24
    assert len(keys(tmp_path / "out")) == 24
    again = pack_one(source, tmp_path / "out", on_error="skip")
    assert again.already
    assert (again.records, again.rejected) == (24, done.rejected)


def test_skipping_in_parts_gives_the_same_bytes_as_in_one(source: Path, tmp_path: Path) -> None:
    plant(source, BAD)
    pack_one(source, tmp_path / "one", on_error="skip")
    for part in (2, 1):
        pack_one(source, tmp_path / "out", on_error="skip", part=(part, 2))
    [done] = commit(tmp_path / "out")
    assert len(done.rejected) == 3
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_parts_that_failed_are_missing_at_the_commit(source: Path, tmp_path: Path) -> None:
    plant(source, {"class0/no.jpg": b"not an image"})
    failed = 0
    for part in (1, 2, 3):
        try:
            pack_one(source, tmp_path / "out", part=(part, 3))
        except SourceError as error:
            failed += 1
            assert "class0/no.jpg" in str(error)
    assert failed == 1
    with pytest.raises(NotPackedError, match=r"1 of 7 shards are not built"):
        commit(tmp_path / "out")


def test_parts_may_mend_what_the_first_scan_found(source: Path, tmp_path: Path) -> None:
    plant(source, {"class1/empty.png": b""})
    with pytest.raises(SourceError):
        pack_one(source, tmp_path / "out", part=(1, 2))
    with pytest.raises(SourceError):
        commit(tmp_path / "out")
    (source / "class1" / "empty.png").unlink()
    kept = inodes(tmp_path / "out")
    for part in (1, 2):
        pack_one(source, tmp_path / "out", part=(part, 2))
    [done] = commit(tmp_path / "out")
    assert done.rejected == []
    assert kept.items() <= inodes(tmp_path / "out").items()
    pack_one(source, tmp_path / "one")
    assert content(tmp_path / "one") == content(tmp_path / "out")


def test_a_file_that_became_readable_is_packed_by_the_next_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.read_file

    def read_file(folder: int, key: bytes, *rest: int) -> bytes:
        if key in bad:
            raise Rejected("cannot be opened: Permission denied")
        return real(folder, key, *rest)

    bad = {b"class0/000.jpg", b"class2/007.jpg"}
    monkeypatch.setattr(files, "read_file", read_file)
    for part in (1, 2):
        pack_one(source, tmp_path / "out", on_error="skip", part=(part, 2))
    bad.clear()
    for part in (1, 2):
        pack_one(source, tmp_path / "out", on_error="skip", part=(part, 2))
    [done] = commit(tmp_path / "out")
    assert done.rejected == []
    pack_one(source, tmp_path / "one")
    assert content(tmp_path / "one") == content(tmp_path / "out")


def test_a_dataset_without_rejected_files_replaces_the_list_of_one_with(
    source: Path, tmp_path: Path
) -> None:
    plant(source, {"class0/no.jpg": b"not an image"})
    pack_one(source, tmp_path / "out", on_error="skip")
    (source / "class0" / "no.jpg").unlink()
    pack_one(source, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "rejected.jsonl").exists()


def test_new_problems_are_said_though_the_dataset_is_packed(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "out")
    (source / "class0" / "gone.jpg").symlink_to("nowhere")
    with pytest.raises(SourceError, match="link to nothing"):
        pack_one(source, tmp_path / "out")
    assert pack_one(source, tmp_path / "out", on_error="skip").rejected


# --- again: resuming, replacing, refusing ---------------------------------------------------------


def test_packing_again_touches_nothing(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "out")
    before = inodes(tmp_path / "out"), (tmp_path / "out").stat().st_mtime_ns
    assert pack_one(source, tmp_path / "out").already
    assert (inodes(tmp_path / "out"), (tmp_path / "out").stat().st_mtime_ns) == before


def test_an_interrupted_packing_keeps_its_shards_when_it_goes_on(
    source: Path, tmp_path: Path, dead_on_shard: Callable[[int], None]
) -> None:
    dead_on_shard(3)
    with pytest.raises(KeyboardInterrupt):
        pack_one(source, tmp_path / "out")
    with pytest.raises(NotPackedError, match=r"run the same .* again to resume"):
        sequences.open(tmp_path / "out")
    before = inodes(tmp_path / "out")
    assert len(before) == 3
    done = pack_one(source, tmp_path / "out")
    assert (done.kept, done.built) == (3, 3)
    assert before.items() <= inodes(tmp_path / "out").items()
    pack_one(source, tmp_path / "one")
    assert content(tmp_path / "one") == content(tmp_path / "out")


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "missing", "folder"])
def test_a_damaged_finished_shard_is_built_again(
    source: Path, tmp_path: Path, dead_on_shard: Callable[[int], None], damage: str
) -> None:
    dead_on_shard(3)
    with pytest.raises(KeyboardInterrupt):
        pack_one(source, tmp_path / "out")
    victim = shards(tmp_path / "out")[1]
    data = bytearray(victim.read_bytes())
    if damage == "flip":
        data[100] ^= 1
    victim.unlink()
    if damage in ("flip", "cut", "empty"):
        victim.write_bytes(data[: {"flip": len(data), "cut": 500, "empty": 0}[damage]])
    elif damage == "folder":
        (tmp_path / "out" / "00001-00000000.shard").mkdir()
    done = pack_one(source, tmp_path / "out")
    assert (done.kept, done.built) == (2, 4)
    assert verify(tmp_path / "out", sha256=True, jobs=1).damages == []


@pytest.mark.parametrize("change", ["size", "mtime", "new", "gone", "option"])
def test_a_changed_source_or_option_is_said_and_restart_drops_the_rest(
    source: Path, tmp_path: Path, dead_on_shard: Callable[[int], None], change: str
) -> None:
    dead_on_shard(3)
    with pytest.raises(KeyboardInterrupt):
        pack_one(source, tmp_path / "out")
    before = content(tmp_path / "out")
    options: dict[str, Any] = {}
    changed = source / "class1" / "003.jpg"
    if change == "size":
        changed.write_bytes(noise("other", 999))
    elif change == "mtime":
        os.utime(changed)
    elif change == "new":
        changed.with_name("new.jpg").write_bytes(JPEG)
    elif change == "gone":
        changed.unlink()
    else:
        options["seed"] = 5
    with pytest.raises(SourceChangedError, match="--restart") as caught:
        pack_one(source, tmp_path / "out", **options)
    assert ("seed" if change == "option" else "class1/") in str(caught.value)
    assert content(tmp_path / "out") == before
    done = pack_one(source, tmp_path / "out", restart=True, **options)
    assert done.kept == 0
    pack_one(source, tmp_path / "one", **options)
    assert content(tmp_path / "one") == content(tmp_path / "out")


def test_a_source_that_changes_while_it_is_packed_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_one(source, tmp_path / "whole")
    second = source / os.fsdecode(keys(tmp_path / "whole")[2 * 4 + 1])  # of shard 2
    on_shard(monkeypatch, 2, lambda: second.write_bytes(noise("new", 77)))
    with pytest.raises(SourceChangedError, match="--restart"):
        pack_one(source, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_another_dataset_is_refused_and_stays(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "out")
    before = content(tmp_path / "out")
    with pytest.raises(ExistsError, match="--overwrite"):
        pack_one(source, tmp_path / "out", seed=1)
    with pytest.raises(ExistsError):
        pack_one(source, tmp_path / "out", seed=1, part=(1, 2))
    with pytest.raises(ExistsError):
        pack_one(source, tmp_path / "out", seed=1, dry_run=True)
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": 1}, "seed: was 0, now 1"),
        ({"shuffle": False}, "shuffle: was True, now False\n"),
        ({"max_records": 5}, "max_records: was 4, now 5"),
        ({"shard_size": "64MB"}, "shard_size: was 1MiB, now 64MB"),
        ({"resize": 9}, "resize: was not given, now 9\nGive the options that it has"),
    ],
)
def test_another_dataset_is_refused_before_the_source_is_listed(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    said: str,
) -> None:
    pack_one(source, tmp_path / "out")
    unlisted(monkeypatch)
    for more in ({}, {"part": (1, 2)}, {"dry_run": True}):
        with pytest.raises(ExistsError, match="--overwrite") as caught:
            pack_one(source, tmp_path / "out", **options, **more)
        assert said in str(caught.value)
    with pytest.raises(AssertionError, match="listed"):
        pack_one(source, tmp_path / "out", **options, overwrite=True)


def test_a_size_that_followed_from_the_source_is_named_where_it_differs(
    source: Path, tmp_path: Path
) -> None:
    pack_one(source, tmp_path / "out", shard_size="2MB")
    with pytest.raises(
        ExistsError, match=r":\n  option shard_size: was 2MB, now 1MiB, the default\nGive"
    ):
        pack_one(source, tmp_path / "out")
    (source / "class0" / "more.jpg").write_bytes(noise("more", 300))
    with pytest.raises(ExistsError, match=r"id \w+\):\n  records, their sizes, .* are others\nCh"):
        pack_one(source, tmp_path / "out", shard_size="2MB")


def test_another_source_is_said_to_be_the_difference_not_the_size_of_shards_that_follows(
    source: Path, tmp_path: Path
) -> None:
    pack(source, tmp_path / "out", jobs=1)
    plant(tmp_path / "other", {"class0/large.ppm": image.ppm(np.zeros((2500, 2500, 3), np.uint8))})
    with pytest.raises(ExistsError, match=r"id \w+\):\n  records, their sizes, .* are others\nCh"):
        pack(tmp_path / "other", tmp_path / "out", jobs=1)


def test_an_option_of_a_group_that_is_given_by_itself_is_an_error_that_says_where_it_goes(
    source: Path, tmp_path: Path
) -> None:
    for name, group in {
        "from_": r"read=shardio\.SourceOptions\(kind=",
        "jpeg_tiles": r"images=shardio\.ImageOptions\(jpeg_tiles=",
        "part": r"plan=shardio\.PlanOptions\(part=",
    }.items():
        with pytest.raises(OptionError, match=f"pack takes no {name}: give {group}"):
            pack(source, tmp_path / "out", **{name: None})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'shufle'"):
        pack(source, tmp_path / "out", **{"shufle": True})  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_the_dataset_of_a_writer_is_refused_before_the_source_is_listed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Writer(tmp_path / "out") as writer:
        writer.write({"n": 1})
    unlisted(monkeypatch)
    with pytest.raises(ExistsError, match="source: was 'writer', now 'imagefolder'"):
        pack_one(source, tmp_path / "out")


def test_a_dry_run_says_what_would_be_done(
    source: Path, tmp_path: Path, dead_on_shard: Callable[[int], None]
) -> None:
    out = tmp_path / "out"
    dead_on_shard(3)
    with pytest.raises(KeyboardInterrupt):
        pack_one(source, out)
    before = content(out)
    assert pack_one(source, out, dry_run=True).kept == 3
    half = pack_one(source, out, dry_run=True, part=(2, 2))
    assert (half.kept, half.records) == (0, 12)
    assert pack_one(source, out, dry_run=True, restart=True).kept == 0
    with pytest.raises(SourceChangedError, match="seed"):
        pack_one(source, out, dry_run=True, seed=1)
    assert not pack_one(source, out, dry_run=True, seed=1, restart=True).already
    assert content(out) == before
    pack_one(source, out)
    assert pack_one(source, out, dry_run=True).already
    assert not pack_one(source, out, dry_run=True, overwrite=True).already


def test_overwriting_keeps_the_old_shards_for_those_who_read_them(
    source: Path, tmp_path: Path
) -> None:
    pack_one(source, tmp_path / "out")
    reader = sequences.stored(tmp_path / "out")
    first = reader[0]
    done = pack_one(source, tmp_path / "out", seed=1, overwrite=True)
    assert done.committed
    assert [sample["__key__"] for sample in reader].index(first["__key__"]) == 0
    assert len(shards(tmp_path / "out")) == 12
    assert verify(tmp_path / "out", jobs=1).damages == []


@pytest.mark.parametrize("dead", [True, False])
def test_overwriting_never_takes_old_shards_of_the_same_id(
    source: Path, tmp_path: Path, dead_on_shard: Callable[[int], None], dead: bool
) -> None:
    pack_one(source, tmp_path / "out")
    old = inodes(tmp_path / "out")
    changed = source / "class0" / "001.jpg"
    changed.write_bytes(noise("other content", changed.stat().st_size))
    for path in shards(tmp_path / "out"):
        os.utime(path, ns=(2 * 10**18, 2 * 10**18))  # a clock may be ahead
    if dead:
        dead_on_shard(4)
        with pytest.raises(KeyboardInterrupt):
            pack_one(source, tmp_path / "out", overwrite=True)
        assert pack_one(source, tmp_path / "out").already  # the old dataset; its journal stays
    done = pack_one(source, tmp_path / "out", overwrite=True)
    assert (done.kept, done.built) == ((4, 2) if dead else (0, 6))
    unpack(tmp_path / "out", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)
    assert len(shards(tmp_path / "out")) == len(old) + 1


def test_parts_may_overwrite_and_commit_must_say_so_too(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "out")
    changed = source / "class0" / "001.jpg"
    changed.write_bytes(noise("other content", changed.stat().st_size))
    for part in (1, 2):
        pack_one(source, tmp_path / "out", part=(part, 2), overwrite=True)
    with pytest.raises(ExistsError, match="--overwrite"):
        commit(tmp_path / "out")
    [done] = commit(tmp_path / "out", overwrite=True)
    assert done.committed
    unpack(tmp_path / "out", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)


def test_a_commit_that_misses_parts_does_not_take_old_shards(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "out")
    changed = source / "class0" / "001.jpg"
    changed.write_bytes(noise("other content", changed.stat().st_size))
    pack_one(source, tmp_path / "out", part=(1, 2), overwrite=True)
    with pytest.raises(NotPackedError, match=r"3 of 6 shards are not built: 3, 4, 5"):
        commit(tmp_path / "out", overwrite=True)


@pytest.mark.parametrize("again", ["pack", "commit", "overwrite", "other"])
def test_a_kill_between_the_manifest_and_cleaning_up_is_finished_by_the_next(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    pack_one(source, tmp_path / "one", seed=1 if again == "other" else 0)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(journal, "clean", die)
        with pytest.raises(KeyboardInterrupt):
            pack_one(source, tmp_path / "out")
    assert (tmp_path / "out" / lock.JOURNAL).exists()
    assert len(keys(tmp_path / "out")) == 24
    if again == "pack":
        assert pack_one(source, tmp_path / "out").already
    elif again == "commit":
        assert commit(tmp_path / "out")[0].already
    elif again == "overwrite":
        os.utime(source / "class0" / "001.jpg")  # not what the leftover plan says
        assert pack_one(source, tmp_path / "out", overwrite=True).built == 6
    else:
        assert pack_one(source, tmp_path / "out", overwrite=True, seed=1).built == 6
        for path in shards(tmp_path / "out"):
            if not (tmp_path / "one" / path.name).exists():
                path.unlink()
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_a_packed_dataset_that_misses_a_shard_is_mended_by_packing_again(
    source: Path, tmp_path: Path
) -> None:
    pack_one(source, tmp_path / "out")
    before = content(tmp_path / "out")
    shards(tmp_path / "out")[2].unlink()
    assert not pack_one(source, tmp_path / "out").already
    assert content(tmp_path / "out") == before


def test_a_shard_that_is_lost_after_the_first_look_is_built_and_committed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_one(source, tmp_path / "out")
    before = content(tmp_path / "out")
    monkeypatch.setattr(local, "refuse_if_full", lambda *_: shards(tmp_path / "out")[2].unlink())
    done = pack_one(source, tmp_path / "out")
    assert (done.committed, done.already) == (True, False)
    assert content(tmp_path / "out") == before


def test_a_damaged_manifest_or_journal_is_an_error_until_told_to_go_on(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    pack_one(source, out)
    (out / "manifest.json").write_bytes(b"{")
    with pytest.raises(DamageError):
        pack_one(source, out)
    pack_one(source, out, overwrite=True)
    (out / "manifest.json").unlink()
    (out / lock.JOURNAL).write_bytes(lock.PLAN_MAGIC + b"?")
    with pytest.raises(DamageError, match="--restart"):
        pack_one(source, out)
    pack_one(source, out, restart=True)
    assert verify(out, jobs=1).records == 24


# --- two at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["pack"], ["pack", "--seed", "3"], ["pack", "--overwrite"]])
def test_a_second_packer_is_told_at_once_and_touches_nothing(
    source: Path, tmp_path: Path, arguments: list[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    made = make_plan(
        imagefolder.image_folder(SourceRequest(os.fsencode(source)))[""],
        PackOptions(max_records=4, shuffle=True),
    )
    (out / lock.JOURNAL).write_bytes(b"".join(journal.dump(made)))
    before = content(out)
    held = lock.take(str(out))  # from here on, reading the journal would end the lock
    try:
        name, *more = arguments
        done = shardio(name, source, out, *more, code=5)
        assert "another shardio process is packing here" in done.stderr
        assert shardio("commit", out, code=5).stdout == ""
    finally:
        held.release()
    assert content(out) == before


@pytest.mark.parametrize(("start", "stop", "refuses"), [(0, None, True), (4, 6, False)])
def test_a_part_is_told_at_once_of_who_holds_all_but_not_of_other_parts(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: int,
    stop: int | None,
    refuses: bool,
) -> None:
    out = tmp_path / "out"
    pack_one(source, out, part=(1, 3))
    ours, theirs = multiprocessing.Pipe()

    def hold() -> None:
        held = lock.take(str(out), start, stop)
        theirs.send(None)
        theirs.recv()
        held.release()

    holder = multiprocessing.get_context("fork").Process(target=hold)
    holder.start()
    ours.recv()
    try:
        with monkeypatch.context() as patch:
            unlisted(patch)
            with pytest.raises(BusyError if refuses else AssertionError):
                pack_one(source, out, part=(2, 3))
            with pytest.raises(BusyError):
                pack_one(source, out)
        if not refuses:
            assert pack_one(source, out, part=(2, 3)).built == 2
    finally:
        ours.send(None)
        holder.join()


def test_a_draft_that_another_packer_cleans_up_is_written_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, gone = os.link, []

    def link(path: str, target: str) -> None:
        if not gone:
            gone.append(path)
            os.unlink(path)
        real(path, target)

    monkeypatch.setattr(os, "link", link)
    assert pack_one(source, tmp_path / "out").committed
    assert gone


def test_reading_does_not_end_the_lock_of_this_process(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "out", part=(1, 2))
    held = lock.take(str(tmp_path / "out"))
    with pytest.raises(NotPackedError, match="not packed: this process is packing here"):
        sequences.open(tmp_path / "out")
    with pytest.raises(NotPackedError):
        sequences.open(tmp_path)  # looks for splits below
    shardio("commit", tmp_path / "out", code=5)
    held.release()


def test_locks_hold_within_one_process_too(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / lock.JOURNAL).write_bytes(b"")
    held = lock.take(str(tmp_path / "out"))
    with pytest.raises(BusyError):
        lock.take(str(tmp_path / "out"))
    assert shardio("commit", tmp_path / "out", code=5).stderr  # the first lock survived that
    held.release()
    lock.take(str(tmp_path / "out")).release()


def test_a_second_name_of_the_journal_does_not_end_the_lock(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack_one(source, out, part=(1, 2))
    left = ".shardio-0123456789abcdef-.shardio-plan.tmp"  # killed between link and unlink
    os.link(out / lock.JOURNAL, out / left)
    held = lock.take(str(out))
    assert journal.is_ours(str(out), left)
    shardio("commit", out, code=5)
    held.release()
    pack_one(source, out)
    assert not (out / left).exists()


def test_a_packer_that_another_overtakes_leaves_no_journal(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_one(source, tmp_path / "one")
    real = lock.begin

    def begin(directory: str, fresh: Any) -> bytes | None:
        monkeypatch.setattr(lock, "begin", real)
        shutil.copytree(tmp_path / "one", directory, dirs_exist_ok=True)
        return real(directory, fresh)

    monkeypatch.setattr(lock, "begin", begin)
    assert pack_one(source, tmp_path / "out").already
    assert content(tmp_path / "one") == content(tmp_path / "out")


def test_two_packers_at_once_end_in_one_whole_dataset(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "one")
    arguments = command("pack", source, tmp_path / "out", "--max-records", "4", "--jobs", "1")
    running = [
        subprocess.Popen(
            arguments, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    ends = [(process.communicate(timeout=LIMIT_S), process.returncode) for process in running]
    assert {code for _, code in ends} <= {0, 5}, ends
    assert 0 in {code for _, code in ends}
    assert content(tmp_path / "one") == content(tmp_path / "out")


def test_parts_at_once_do_not_disturb_each_other(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "one")
    running = [
        subprocess.Popen(
            command("pack", source, tmp_path / "out", "--max-records", "4", "--part", f"{i}/3"),
            env=environment(),
            stdout=subprocess.DEVNULL,
        )
        for i in (1, 2, 3)
    ]
    assert [process.wait(timeout=LIMIT_S) for process in running] == [0, 0, 0]
    commit(tmp_path / "out")
    assert content(tmp_path / "one") == content(tmp_path / "out")


# --- workers --------------------------------------------------------------------------------------


def killed(task: int, add: Callable[[int], None]) -> int:
    if task == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def failing(task: int, add: Callable[[int], None]) -> int:
    if task == 3:
        raise SourceError("this one")
    add(1)
    return task


def odd(task: int, add: Callable[[int], None]) -> int:
    class LocalError(Exception):  # cannot be pickled
        pass

    raise LocalError("odd")


def endless(task: int, add: Callable[[int], None]) -> int:
    if task == 0:
        raise OptionError("stop the others")
    threading.Event().wait()  # never looks whether to stop
    return task


def square(task: int, add: Callable[[int], None]) -> int:
    add(1)
    return task * task


def run(work: Any, tasks: int = 8, jobs: int = 3) -> list[int]:
    return list(
        process_pool.run(work, range(tasks), jobs=jobs, report=process_pool.Report(None, tasks))
    )


def test_results_come_in_the_order_of_tasks() -> None:
    assert run(square, 50) == [i * i for i in range(50)]
    assert run(square, 0) == []
    assert run(square, 2, jobs=40) == [0, 1]


def test_a_killed_worker_is_a_clear_error() -> None:
    with pytest.raises(StorageError, match="killed"):
        run(killed)


def test_an_error_in_a_worker_arrives_as_it_is() -> None:
    with pytest.raises(SourceError, match=r"^this one$") as caught:
        run(failing)
    assert "failing" in str(caught.value.__cause__)  # where in the worker
    with pytest.raises(RuntimeError, match="LocalError: odd"):
        run(odd)


def test_workers_that_do_not_stop_are_ended() -> None:
    with pytest.raises(OptionError):
        run(endless)


def test_a_daemon_works_in_its_own_process(source: Path, tmp_path: Path) -> None:
    def work() -> None:
        pack_one(source, tmp_path / "out", jobs=3)
        assert verify(tmp_path / "out", jobs=3).damages == []

    daemon = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    daemon.start()
    daemon.join(LIMIT_S)
    assert daemon.exitcode == 0
    assert len(keys(tmp_path / "out")) == 24


def test_a_killed_worker_leaves_no_file_and_finished_shards(source: Path, tmp_path: Path) -> None:
    real = build_shard.build_or_keep

    def die(work: Any, shard: int, add: Any) -> Any:
        if shard == 4:
            (tmp_path / "out" / f".shardio-{work.token}-00004.tmp").write_bytes(b"\x89SHD")
            os.kill(os.getpid(), signal.SIGKILL)
        return real(work, shard, add)

    build_shard.build_or_keep = die
    try:
        with pytest.raises(StorageError, match="killed"):
            pack_one(source, tmp_path / "out", jobs=2)
    finally:
        build_shard.build_or_keep = real
    assert not list((tmp_path / "out").glob("*.tmp"))
    assert pack_one(source, tmp_path / "out", jobs=2).kept >= 3


# --- options and places ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"shard_size": 0},
        {"max_records": 0},
        {"jobs": 0},
        {"resize": 0},
        {"quality": 0},
        {"quality": 101},
        {"seed": -1},
        {"seed": 1 << 64},
        {"on_error": "ignore"},
        {"part": (0, 2)},
        {"part": (3, 2)},
        {"part": (1, 0)},
        {"format": "tfrecord"},
        {"format": "zip"},
        {"shard_size": "big"},
        {"shard_size": 1.5},
        {"max_records": "3"},
        {"max_records": True},
        {"jobs": 1.5},
        {"jobs": "2"},
        {"seed": 0.5},
        {"seed": None},
        {"resize": "256"},
        {"quality": 90.5},
        {"part": "1"},
        {"part": "a/b"},
        {"part": "3/2"},
        {"part": (1, 2, 3)},
        {"part": (1.0, 2)},
        {"part": 1},
        {"splits": ["train"]},
        {"shard_size": 1},
        {"shard_size": "64"},
        {"quality": 50},
    ],
)
def test_wrong_options_are_refused_before_anything_is_touched(
    source: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    [name] = options
    with pytest.raises(OptionError, match=name):
        pack_one(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_sizes_parts_and_numbers_may_be_as_users_have_them(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "one", shard_size=2000, max_records=None, seed=3)
    options: dict[str, Any] = {"shard_size": "2KB", "max_records": None, "seed": np.int64(3)}
    for part in ("1/2", (np.int32(2), 2)):
        pack_one(source, tmp_path / "out", part=part, **options)
    commit(tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, free = os.statvfs, 0

    def small(path: Any) -> os.statvfs_result:
        found = list(real(path))
        found[1], found[4] = 1, free  # f_frsize, f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", small)
    size = sum(path.stat().st_size for path in source.rglob("*.jpg"))
    free = size - 1
    for more in ({}, {"dry_run": True}, {"format": "lmdb"}):
        with pytest.raises(StorageError, match=r"out: .* are to be written, and .* are free there"):
            pack_one(source, tmp_path / "out", **more)
        assert not (tmp_path / "out").exists()
    free = size // 2 + 100
    pack_one(source, tmp_path / "out", part=(1, 2))
    assert pack_one(source, tmp_path / "out").kept > 0  # only the rest is to be written
    free = 0
    assert pack_one(source, tmp_path / "out").already


def test_quality_is_refused_where_no_jpeg_is_written(source: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="quality is 50, but images are packed as they are: give"):
        pack_one(source, tmp_path / "out", quality=50)
    with pytest.raises(OptionError, match="quality is 50, but no JPEG is written; leave it out"):
        pack_one(source, tmp_path / "out", quality=50, encode="raw", resize=8)


def test_out_may_not_lie_in_the_source(source: Path) -> None:
    for out in (source, source / "out", source / "class0" / ".." / "out"):
        with pytest.raises(OptionError, match="lies in the folder"):
            pack_one(source, out)
    assert not (source / "out").exists()


def test_the_source_may_lie_beside_out_with_a_longer_name(tmp_path: Path) -> None:
    pack_one(plant(tmp_path / "img", images()), tmp_path / "img-packed")


def test_out_may_not_be_a_file_or_a_dangling_link(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(OptionError, match="expected a directory"):
            pack_one(source, tmp_path / name)
    with pytest.raises(StorageError):
        pack_one(source, tmp_path / "file" / "below")
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_other_files_in_out_stay(source: Path, tmp_path: Path) -> None:
    mine = {
        "notes.txt": b"mine",
        ".shardio-0123456789abcdef-mine.tmp": b"mine",
        "00009-01234567.shard": b"mine",
        "rejected.jsonl": b"mine",
        ".shardio-rejected-00001.jsonl": b"mine",
    }
    plant(tmp_path / "out", mine)
    pack_one(source, tmp_path / "out", restart=True)
    pack_one(source, tmp_path / "out", overwrite=True)
    left = content(tmp_path / "out")
    assert all(left[name.encode()] == data for name, data in mine.items())


def test_a_list_of_rejected_files_of_the_user_s_own_stays(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    own = {
        "other": b"mine",
        "same words": b'{"key": "class0/001.jpg", "reason": "blurred"}\n',
        "of no record": b'{"key":"x","reason":"y"}\n',
    }
    for text in own.values():
        plant(out, {"rejected.jsonl": text})  # nothing is packed here
        pack_one(source, out)
        assert (out / "rejected.jsonl").read_bytes() == text
        assert pack_one(source, out).rejected == []
        pack_one(source, out, overwrite=True, seed=1)  # there is a dataset, and it is none of it
        assert (out / "rejected.jsonl").read_bytes() == text
        with Writer(out, overwrite=True) as writer:
            writer.write({"label": 1})
        assert (out / "rejected.jsonl").read_bytes() == text
        (out / "manifest.json").unlink()
    plant(source, BAD)
    for text in own.values():
        shutil.rmtree(out)
        plant(out, {"rejected.jsonl": text})
        with pytest.raises(ExistsError, match=r"rejected\.jsonl.*move it away"):
            pack_one(source, out, on_error="skip")
        assert content(out) == {b"rejected.jsonl": text}
    (out / "rejected.jsonl").unlink()
    assert pack_one(source, out, on_error="skip").rejected
    plant(out, {"rejected.jsonl": own["same words"]})
    assert pack_one(source, out, on_error="skip").already
    with pytest.raises(ExistsError, match=r"rejected\.jsonl.*move it away"):
        pack_one(source, out, on_error="skip", overwrite=True, seed=1)
    assert (out / "rejected.jsonl").read_bytes() == own["same words"]


# --- several at once ------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [None, (1, 1)])
def test_the_loser_of_a_race_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: tuple[int, int] | None
) -> None:
    out, begin = tmp_path / "out", lock.begin

    def late(directory: str, fresh: Any) -> bytes | None:
        """Another process packs just before our journal takes its name."""
        monkeypatch.setattr(lock, "begin", begin)
        shardio("pack", source, out, "--max-records", "4", "--seed", "7")
        return begin(directory, fresh)

    pack_one(source, tmp_path / "winner", seed=7)
    monkeypatch.setattr(lock, "begin", late)
    with pytest.raises(ExistsError, match="another dataset is packed here"):
        pack_one(source, out, part=part)
    assert content(out) == content(tmp_path / "winner")
    assert pack_one(source, out, overwrite=True).committed  # a journal would be of another plan


def test_a_packing_that_was_killed_before_its_first_shard_is_in_nobody_s_way(
    source: Path, tmp_path: Path, dead_on_shard: Callable[[int], None]
) -> None:
    for out in (tmp_path / "a", tmp_path / "b"):
        pack_one(source, out, seed=5)
        dead_on_shard(0)
        with pytest.raises(KeyboardInterrupt):
            pack_one(source, out, seed=1, overwrite=True)
        assert (out / lock.JOURNAL).exists()
    gc(tmp_path / "a", keep_s=0)
    assert not (tmp_path / "a" / lock.JOURNAL).exists()
    assert pack_one(source, tmp_path / "b", seed=2, overwrite=True).committed
    assert not (tmp_path / "b" / lock.JOURNAL).exists()


# --- --resize -------------------------------------------------------------------------------------


def test_resize_shrinks_the_short_side_and_never_enlarges(tmp_path: Path) -> None:
    tree = {
        "a/wide.jpg": picture(200, 100),
        "a/tall.png": picture(60, 120, "PNG"),
        "a/small.jpg": picture(40, 30),
        "a/anim.gif": picture(90, 90, "GIF"),
    }
    source = plant(tmp_path / "src", tree)
    done = pack_one(source, tmp_path / "out", resize=50)
    packed = {s["__key__"]: s["image"] for s in sequences.stored(tmp_path / "out")}
    opened = {s["__key__"]: s["image"].size for s in sequences.open(tmp_path / "out")}
    assert opened["a/wide.jpg"] == (100, 50)
    assert opened["a/tall.png"] == (50, 100)
    assert packed[b"a/small.jpg"] == tree["a/small.jpg"]
    assert packed[b"a/anim.gif"] == tree["a/anim.gif"]
    assert done.full_size == 1  # the GIF; not the one that is small already
    pack_one(source, tmp_path / "two", resize=50, jobs=2)
    assert content(tmp_path / "out") == content(tmp_path / "two")


def test_photos_with_a_second_picture_keep_their_size_and_are_counted(tmp_path: Path) -> None:
    from PIL import Image

    frames = [Image.new("RGB", (300, 200), c) for c in ("red", "blue")]
    source = plant(tmp_path / "src", {"a/x.jpg": picture(300, 200)})
    frames[0].save(source / "a" / "phone.jpg", "MPO", save_all=True, append_images=frames[1:])
    assert image_type((source / "a" / "phone.jpg").read_bytes()) == "JPEG"
    done = pack_one(source, tmp_path / "out", resize=50)
    assert done.full_size == 1
    assert image.decode(sequences.stored(tmp_path / "out")[0]["image"]).size


def test_images_that_cannot_be_resized_are_problems(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", {"a/x.jpg": picture(90, 80), "a/torn.jpg": noise("x", 500)})
    with pytest.raises(SourceError, match=r"a/torn\.jpg: cannot be resized"):
        pack_one(source, tmp_path / "out", resize=50)


@pytest.mark.parametrize(
    "options", [{"resize": 50}, {"encode": "raw"}, {"encode": "raw", "resize": 9}]
)
def test_max_pixels_is_the_limit_of_what_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    source, out = plant(tmp_path / "src", {"a/x.jpg": picture(400, 300)}), tmp_path / "out"
    with pytest.raises(SourceError, match=r"over the limit of 119,999; .* give max_pixels=120000"):
        pack_one(source, out, max_pixels=119_999, **options)
    monkeypatch.setattr(image, "MAX_PIXELS", 119_999)
    with pytest.raises(SourceError, match=r"over the limit of 119,999"):
        pack_one(source, out, restart=True, **options)
    assert pack_one(source, out, restart=True, max_pixels=120_000, **options).records == 1
    assert manifest.load(locate(out)).options["max_pixels"] == 120_000
    with pytest.raises(OptionError, match="max_pixels is 9, but images are packed as they are"):
        pack_one(source, out, max_pixels=9)


# --- the plan -------------------------------------------------------------------------------------


def test_a_journal_reads_back_and_every_flipped_byte_is_damage(
    source: Path, tmp_path: Path
) -> None:
    made = make_plan(
        imagefolder.image_folder(SourceRequest(os.fsencode(source)))[""],
        PackOptions(shard_size=1000, max_records=3, shuffle=True),
    )
    data = b"".join(journal.dump(made))

    def parsed(data: bytes) -> tuple[Plan, list[Rows], list[Any]]:
        read = journal.parse(head(data), "x", lambda start, length: data[start : start + length])
        return read, [*read.all_rows()], [*read.problems]

    def head(data: bytes) -> bytes:
        (tmp_path / lock.JOURNAL).write_bytes(data)
        return lock.head(str(tmp_path))

    read, rows, problems = parsed(data)
    assert read.same(made)
    assert len(head(data)) < len(data) - sum(len(key) for one in rows for key in one.keys)
    assert [one.keys for one in rows] == [one.keys for one in made.all_rows()]
    assert (read.identity, problems) == (made.identity, made.problems)
    for at in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[at] ^= 4
        with pytest.raises(DamageError):
            parsed(bytes(damaged))
    for stop in range(0, len(data), 50):
        with pytest.raises(DamageError):
            parsed(data[:stop])


def test_the_id_of_a_dataset_is_what_it_always_was(source: Path, tmp_path: Path) -> None:
    made = [
        make_plan(
            imagefolder.image_folder(SourceRequest(os.fsencode(source)))[""],
            PackOptions(shard_size=1000, max_records=records, shuffle=True),
        )
        for records in (3, 5)
    ]
    assert [one.dataset_id.hex() for one in made] == [
        "c7792e47e83698f0ae575f68094d7e3d",
        "7ca68cd57388aead568902cdd1a1fe5a",
    ]


def test_json_of_the_command_line_says_what_was_packed(source: Path, tmp_path: Path) -> None:
    plant(source, {"class0/no.jpg": b"?"})
    said = shardio_json("pack", source, tmp_path / "out", "--on-error", "skip", code=4)
    [one] = said["datasets"]
    assert one["records"] == 24
    assert [entry["key"] for entry in one["rejected"]] == ["class0/no.jpg"]


def test_a_dangling_link_in_the_place_of_the_journal_is_an_error_and_no_loop(
    tmp_path: Path,
) -> None:
    source = tmp_path / "images"
    (source / "a").mkdir(parents=True)
    (source / "a" / "1.jpg").write_bytes(b"\xff\xd8\xff\xe0 not decoded")
    out = tmp_path / "out"
    out.mkdir()
    (out / ".shardio-plan").symlink_to("nowhere")
    with pytest.raises(StorageError, match="link to nothing"):
        pack(source, out)
