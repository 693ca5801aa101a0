"""Sources to shards: the same bytes however they are made, resumed, refused, and never half."""

import json
import os
import shutil
from pathlib import Path

import pytest
from support.packing import inodes, keys, on_shard, pack_one
from support.trees import (
    JPEG,
    content,
    images,
    noise,
    plant,
    shardio_json,
)

from shardio.dataset import sequence as sequences
from shardio.errors import (
    ExistsError,
    NotPackedError,
    OptionError,
    SourceChangedError,
    SourceError,
)
from shardio.packing.commit import commit
from shardio.packing.options import PlanOptions, SourceOptions
from shardio.packing.pack import pack
from shardio.packing.sources import files
from shardio.packing.sources.base import Rejected
from shardio.packing.unpack import unpack
from shardio.packing.verify import verify
from shardio.packing.writer import Writer

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
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".shard", ".json"}


@pytest.mark.parametrize("jobs", [2, 50])
def test_any_number_of_jobs_gives_the_same_bytes(source: Path, tmp_path: Path, jobs: int) -> None:
    pack_one(source, tmp_path / "one")
    pack_one(source, tmp_path / "many", jobs=jobs)
    assert content(tmp_path / "one") == content(tmp_path / "many")


@pytest.mark.parametrize("order", [(3, 1, 2), (2, 2, 3, 1)])
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


def test_a_dry_run_plans_and_touches_nothing(source: Path, tmp_path: Path) -> None:
    (source / "class0" / "empty.jpg").touch()
    [planned] = pack(source, tmp_path / "out", dry_run=True, plan=PlanOptions(max_records=4))
    assert (planned.records, planned.shards, planned.committed) == (24, 6, False)
    assert planned.rejected == [("class0/empty.jpg", "is empty")]
    assert not (tmp_path / "out").exists()


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


def test_paths_may_be_bytes_paths_and_file_urls(source: Path, tmp_path: Path) -> None:
    pack_one(source, tmp_path / "out")
    pack(os.fsencode(source), f"file://{tmp_path}/url", jobs=1, plan=PlanOptions(max_records=4))
    assert content(tmp_path / "url") == content(tmp_path / "out")
    assert verify(f"file://{tmp_path}/url", jobs=1).damages == []


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


def test_json_of_the_command_line_says_what_was_packed(source: Path, tmp_path: Path) -> None:
    plant(source, {"class0/no.jpg": b"?"})
    said = shardio_json("pack", source, tmp_path / "out", "--on-error", "skip", code=4)
    [one] = said["datasets"]
    assert one["records"] == 24
    assert [entry["key"] for entry in one["rejected"]] == ["class0/no.jpg"]
