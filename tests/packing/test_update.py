"""Updating: the dataset is what its source is now, with the least work, and says what changed."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.packing import grouped
from support.small_datasets import make
from support.trees import (
    content,
    noise,
    on_a_terminal,
    picture,
    plant,
    shardio,
    shardio_json,
    shards,
)

import shardio as api
from shardio import (
    ExistsError,
    OptionError,
    PlanOptions,
    SourceError,
    SourceOptions,
    commit,
    pack,
    unpack,
    verify,
)
from shardio.formats import manifest
from shardio.formats.version import load_sources
from shardio.packing.append import append
from shardio.packing.drop import drop
from shardio.packing.gc import gc
from shardio.packing.update import update
from shardio.packing.versions import diff, log, restore
from shardio.storage.location import locate


def files_of(folder: Path) -> dict[bytes, bytes | None]:
    return {key: data for key, data in content(folder).items() if data is not None}


def packed_files(out: Path, tmp_path: Path) -> dict[bytes, bytes | None]:
    """The files of a dataset, as `unpack` writes them."""
    shutil.rmtree(tmp_path / "unpacked", ignore_errors=True)
    unpack(out, tmp_path / "unpacked")
    return files_of(tmp_path / "unpacked")


def change(source: Path) -> None:
    """Two new files, one of a new class, three that change, one that is gone, one touched."""
    plant(source, {"class1/new.jpg": noise("n", 500), "zebra/new.jpg": noise("z", 500)})
    for key in ("class0/001.jpg", "class1/001.jpg"):
        (source / key).write_bytes(noise(f"{key} anew", 777))
    old = source / "class2/001.jpg"
    old.write_bytes(noise("as long", old.stat().st_size))
    (source / "class0/002.jpg").unlink()
    os.utime(source / "class0/003.jpg")


@pytest.mark.parametrize("first", [False, True], ids=["noted", "for the first time"])
def test_the_dataset_becomes_what_its_source_is(
    out: Path, source: Path, tmp_path: Path, first: bool
) -> None:
    if not first:
        update(source, out)
    old = {path.name: path.read_bytes() for path in shards(out)}
    change(source)
    done = update(source, out)
    assert (done.new, done.changed, done.gone, done.unchanged) == (2, 3, 1, 20)
    assert done.compared == (23 if first else 2)  # what is as long, and touched
    assert done.classes == ["zebra"]
    assert packed_files(out, tmp_path) == files_of(source)
    assert all((out / name).read_bytes() == data for name, data in old.items())
    newest, before = log(out).versions[:2]
    assert newest.changes == {"added": 5, "replaced": 3, "dropped": 1}
    found = diff(out, before.id)
    assert found.added == ["class1/new.jpg", "zebra/new.jpg"]
    assert found.dropped == ["class0/002.jpg"]
    assert found.changed == ["class0/001.jpg", "class1/001.jpg", "class2/001.jpg"]
    assert verify(out).damages == []
    again = update(source, out)
    assert (again.new, again.changed, again.gone, again.versions) == (0, 0, 0, {})
    assert again.compared == 0


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_it_is_the_same_with_any_number_of_processes(tmp_path: Path, kind: str) -> None:
    tree = {f"c{i % 3}/{i}.jpg": noise(f"{i}", 40 + i % 7) for i in range(600)}
    source = plant(tmp_path / "src", tree)
    pack(source, tmp_path / "out", jobs=1)
    changed = [f"c{i % 3}/{i}.jpg" for i in (0, 255, 256, 511, 512, 599)]
    for key in changed:  # as long as they were
        (source / key).write_bytes(noise(f"{key} anew", (source / key).stat().st_size))
    (source / "c1/301.jpg").unlink()
    plant(source, {"c2/new.jpg": noise("new", 50), "c2/300.jpg": b"no image"})
    given = source
    if kind == "zip":
        given = Path(shutil.make_archive(str(tmp_path / "all"), "zip", source))
    found, reports = [], [list[tuple[int, int]]() for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1750000000")
        for jobs, told in ((1, reports[0]), (2, reports[1]), (5, reports[2])):
            out = tmp_path / f"out{jobs}"
            shutil.copytree(tmp_path / "out", out)
            options: dict[str, Any] = {"jobs": jobs, "on_error": "skip", "gone": "drop"}
            done = update(given, out, progress=partial(_tell, told), **options)
            assert (done.new, done.changed, done.gone, done.compared) == (1, 6, 1, 599)
            assert [key for key, _ in done.rejected] == ["c2/300.jpg"]
            found.append(content(out))
    assert found[0] == found[1] == found[2]
    assert diff(out, log(out).versions[1].id).changed == sorted(changed)
    for told in reports:
        all_bytes = sum(len(data) for data in tree.values()) - len(tree["c1/301.jpg"])
        assert (all_bytes, all_bytes) in told  # while contents were compared


def _tell(told: list[tuple[int, int]], *one: Any) -> None:
    told.append(one)


def test_a_bar_shows_how_much_is_compared(out: Path, source: Path) -> None:
    code, seen = on_a_terminal("update", source, out)
    assert code == 0 and "updating" in seen and "24 as they were" in seen


def test_a_dry_run_says_the_same_and_changes_nothing(out: Path, source: Path) -> None:
    change(source)
    before = content(out)
    done = update(source, out, dry_run=True)
    assert (done.new, done.changed, done.gone, done.unchanged) == (2, 3, 1, 20)
    assert content(out) == before


def test_what_is_noted_is_not_read(out: Path, source: Path, monkeypatch: Any) -> None:
    seen: list[tuple[int, int]] = []
    first = update(source, out, progress=lambda done, total: seen.append((done, total)))
    assert first.compared == 24 and list(first.versions) == [""]
    sizes = [path.stat().st_size for path in source.rglob("*.jpg")]
    assert seen[-1] == (sum(sizes), sum(sizes)) and seen == sorted(seen)
    assert update(source, out).compared == 0
    file = source / "class0/000.jpg"
    status = file.stat()
    file.write_bytes(noise("anew", status.st_size))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert update(source, out).changed == 0  # as rsync does it, too
    assert update(source, out, checksum=True).changed == 1
    assert update(source, out, checksum=True).changed == 0


def test_notes_follow_appends_drops_and_restores(out: Path, source: Path, tmp_path: Path) -> None:
    update(source, out)
    plant(source, {"class0/new.jpg": noise("n", 500)})
    append(source, out, on_duplicate="skip")
    drop(out, keys=["class0/004.jpg"])
    (source / "class0/004.jpg").unlink()
    done = update(source, out)
    assert (done.unchanged, done.compared) == (24, 0)  # what was appended was noted, too
    assert done.versions == {}
    restore(out, log(out).versions[2].id)  # before the append
    done = update(source, out)
    assert (done.new, done.gone, done.compared) == (1, 1, 0)
    assert packed_files(out, tmp_path) == files_of(source)


@pytest.mark.parametrize("fault", ["gone", "flipped", "cut", "of another dataset"])
def test_damaged_notes_only_cost_a_comparison(out: Path, source: Path, fault: str) -> None:
    update(source, out)
    (path,) = out.glob("sources-*.bin")
    data = bytearray(path.read_bytes())
    if fault == "gone":
        path.unlink()
    elif fault == "cut":
        path.write_bytes(data[:-8])
    else:
        data[10 if fault == "of another dataset" else -1] ^= 1
        path.write_bytes(data)
    assert load_sources(locate(out), manifest.load(locate(out))) is None
    done = update(source, out)
    assert (done.compared, done.unchanged, done.changed) == (24, 24, 0)
    assert update(source, out).compared == 0
    assert verify(out).damages == []


def test_most_of_it_is_not_dropped_unasked(out: Path, source: Path, tmp_path: Path) -> None:
    small = plant(tmp_path / "small", {"class0/000.jpg": (source / "class0/000.jpg").read_bytes()})
    before = content(out)
    with pytest.raises(OptionError, match=r"23 of its 24 records are not in .*--gone drop"):
        update(small, out)
    assert content(out) == before
    kept = update(small, out, gone="keep")
    assert (kept.gone, len(api.open(out))) == (23, 24) and "which stay" in str(kept)
    assert update(small, out, gone="drop").gone == 23
    assert api.open(out, decode=None).keys() == ["class0/000.jpg"]


def test_an_archive_is_a_source_too(out: Path, source: Path, tmp_path: Path) -> None:
    change(source)
    shutil.make_archive(str(tmp_path / "all"), "zip", source)
    done = update(tmp_path / "all.zip", out)
    assert (done.new, done.changed, done.gone) == (2, 3, 1)
    assert packed_files(out, tmp_path) == files_of(source)


def test_labels_of_tables_are_compared(tmp_path: Path) -> None:
    files = {f"{i}.jpg": noise(f"{i}", 300) for i in range(6)}
    folder = plant(tmp_path / "files", files)

    def listed(labels: str) -> Path:
        rows = [f"{name},{label}" for name, label in zip(files, labels, strict=True)]
        (tmp_path / "list.csv").write_text("\n".join(["path,label", *rows]))
        return tmp_path / "list.csv"

    read = SourceOptions(root=folder)
    pack(listed("aabbaa"), tmp_path / "out", read=read, jobs=1)
    assert update(listed("aabbaa"), tmp_path / "out", read=read).changed == 0
    done = update(listed("abbbcc"), tmp_path / "out", read=read)
    assert (done.changed, done.classes) == (3, ["c"])
    data = api.open(tmp_path / "out", decode=None)
    assert {one["__key__"]: "abc"[one["label"]] for one in data} == dict(
        zip(files, "abbbcc", strict=True)
    )


@pytest.mark.parametrize(
    "options", [{"resize": 16}, {"encode": "raw"}, {"jpeg_tiles": True}], ids=str
)
def test_changed_images_cannot_be_compared(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = plant(tmp_path / "src", {f"c/{i}.jpg": picture(40, 30) for i in range(3)})
    out = tmp_path / "out"
    pack(folder, out, jobs=1, **grouped(options))
    before = content(out)
    for more in ({}, {"checksum": True}):
        with pytest.raises(OptionError, match=r"packing changed the images.*--assume-unchanged"):
            update(folder, out, **more)
    assert content(out) == before
    assert update(folder, out, assume_unchanged=True, dry_run=True).assumed == 3
    assert content(out) == before


@pytest.mark.parametrize(
    "options", [{"resize": 16}, {"encode": "raw"}, {"jpeg_tiles": True}], ids=str
)
def test_of_changed_images_sizes_and_times_tell(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = plant(tmp_path / "src", {f"c/{i}.jpg": picture(40, 30) for i in range(6)})
    out = tmp_path / "out"
    pack(folder, out, jobs=1, **grouped(options))
    plant(folder, {"c/new.jpg": picture(40, 30)})
    (folder / "c/5.jpg").unlink()
    done = update(folder, out, assume_unchanged=True)
    assert (done.new, done.changed, done.gone, done.assumed) == (1, 0, 1, 5)
    assert "5 were taken as unchanged, unseen" in str(done)
    before = {one["__key__"]: one["image"] for one in api.open(out, decode=None)}
    (folder / "c/1.jpg").write_bytes(picture(40, 30) + b"longer")
    os.utime(folder / "c/2.jpg", ns=(1, 1))
    again = update(folder, out)  # also in the other order: what was new is noted, too
    assert (again.new, again.changed, again.gone, again.unchanged) == (0, 2, 0, 4)
    assert (again.assumed, again.compared) == (0, 0)
    found = {one["__key__"]: one["image"] for one in api.open(out, decode=None)}
    assert (found.pop("c/1.jpg") != before.pop("c/1.jpg")) == ("jpeg_tiles" in options)
    assert found == before
    plant(folder, {"d/later.jpg": picture(40, 30)})
    append(folder, out, on_duplicate="skip")
    last = update(folder, out)
    assert (last.unchanged, last.versions) == (7, {})
    with pytest.raises(OptionError, match="packing changed the images"):
        update(folder, out, checksum=True)


def test_what_is_taken_as_unchanged_is_not_read(out: Path, source: Path) -> None:
    change(source)
    done = update(source, out, assume_unchanged=True)
    assert (done.new, done.changed, done.gone, done.assumed) == (2, 0, 1, 23)
    assert update(source, out, checksum=True).changed == 3


def test_only_files_alone_are_taken_as_unchanged(out: Path, source: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--assume-unchanged none: give one"):
        update(source, out, checksum=True, assume_unchanged=True)
    (tmp_path / "list.csv").write_text("path,label\nclass0/000.jpg,class0\n")
    with pytest.raises(OptionError, match="--assume-unchanged goes with a folder"):
        read = SourceOptions(root=source)
        update(tmp_path / "list.csv", out, read=read, assume_unchanged=True, gone="keep")


def test_a_record_stays_while_its_new_file_cannot_be_packed(out: Path, source: Path) -> None:
    key, empty, other = "class0/001.jpg", "class0/002.jpg", "class1/new.jpg"
    before = {one: (source / one).read_bytes() for one in (key, empty)}
    plant(source, {key: b"cut off", empty: b"", other: b"not an image either"})
    for rejected, before_that in (([key, empty, other], 0), ([], 3)):  # nor tried again
        done = update(source, out, on_error="skip")
        assert [one for one, _ in done.rejected] == rejected
        assert (done.gone, done.unchanged, done.rejected_before) == (0, 22, before_that)
        assert ("rejected.jsonl lists them; a record that is there" in str(done)) == bool(rejected)
        assert (out / "rejected.jsonl").read_text().count("\n") == 3
    with pytest.raises(SourceError, match="3 files cannot be packed"):
        update(source, out)
    assert append(source, out, on_error="skip", on_duplicate="skip").rejected_before == 3
    found = {one["__key__"]: one["image"] for one in api.open(out, decode=None)}
    assert before.items() <= found.items() and len(found) == 24
    for one in (key, other):
        (source / one).write_bytes(noise("mended", 500))
    (source / empty).write_bytes(before[empty])  # as the record is
    assert update(source, out, on_error="skip").rejected == []
    assert not (out / "rejected.jsonl").exists()
    found = {one["__key__"]: one["image"] for one in api.open(out, decode=None)}
    assert found[key] == found[other] == noise("mended", 500) and len(found) == 25


def test_a_list_of_files_with_records_stays_ours_when_one_is_erased(
    out: Path, source: Path
) -> None:
    plant(source, {"class0/001.jpg": b"cut off", "class0/003.jpg": b"cut off, too"})
    assert len(update(source, out, on_error="skip").rejected) == 2
    assert drop(out, keys=["class0/003.jpg"], erase=True).unlisted == 1
    done = update(source, out, on_error="skip")
    assert ([key for key, _ in done.rejected], done.rejected_before) == (["class0/003.jpg"], 1)
    assert (done.gone, done.unchanged) == (0, 22)


def test_what_was_left_out_is_tried_again_when_it_changed(out: Path, source: Path) -> None:
    bad, empty = "class1/bad.jpg", "class1/empty.jpg"
    plant(source, {bad: b"no image", empty: b""})
    call = "update", source, out, "--on-error", "skip"
    facts = shardio_json(*call, code=4)
    assert (facts["new"], len(facts["rejected"]), facts["rejected_before"]) == (0, 2, 0)
    ids = [one.id for one in log(out).versions]
    listed = (out / "rejected.jsonl").read_text()
    said = shardio(*call).stdout  # code 0
    assert "0 new" in said and "2 files left out before, and not changed" in said
    assert "left out:" not in said and [one.id for one in log(out).versions] == ids
    assert (out / "rejected.jsonl").read_text() == listed
    with pytest.raises(SourceError, match=r"(?s)2 files cannot be packed.*bad\.jpg.*empty\.jpg"):
        update(source, out)
    assert len(update(source, out, on_error="skip", checksum=True).rejected) == 2
    os.utime(source / bad, ns=(5, 5))
    again = update(source, out, on_error="skip")
    assert ([key for key, _ in again.rejected], again.rejected_before) == ([bad], 1)
    assert update(source, out, on_error="skip").rejected_before == 2
    (source / empty).unlink()  # what is gone is not listed any more,
    assert update(source, out, on_error="skip").rejected_before == 1
    assert empty not in (out / "rejected.jsonl").read_text()
    plant(source, {bad: noise("good", 500)})  # nor is what is good now
    assert update(source, out).new == 1
    assert not (out / "rejected.jsonl").exists()


@pytest.mark.parametrize("parts", [1, 2])
def test_what_pack_left_out_is_not_tried_again(tmp_path: Path, parts: int) -> None:
    tree = {"c/0.jpg": noise("0", 300), "c/bad.jpg": b"no image", "c/empty.jpg": b""}
    source, out = plant(tmp_path / "src", tree), tmp_path / "out"
    for number in range(1, parts + 1):
        part = PlanOptions(part=(number, parts)) if parts > 1 else None
        pack(source, out, jobs=1, on_error="skip", plan=part)
    if parts > 1:
        commit(out)
    done = update(source, out, on_error="skip")
    assert (done.rejected, done.rejected_before) == ([], 2)
    os.utime(source / "c/bad.jpg", ns=(5, 5))
    done = update(source, out, on_error="skip")
    assert ([key for key, _ in done.rejected], done.rejected_before) == (["c/bad.jpg"], 1)


@pytest.mark.parametrize(
    "more",
    [
        '"size": "6", "time": 5',
        '"size": 6',
        '"size": 6.0, "time": Infinity',
        '"size": [], "time": 1',
    ],
)
def test_a_forged_list_is_a_users_and_stays(out: Path, source: Path, more: str) -> None:
    text = f'{{"key": "c/x.jpg", "reason": "r", {more}}}\n'
    (out / "rejected.jsonl").write_text(text)
    update(source, out)
    assert (out / "rejected.jsonl").read_text() == text
    with pytest.raises(ExistsError, match="no packing wrote it"):
        update(source, out, on_error="skip")


@pytest.mark.parametrize("by", ["pack", "update", "parts"])
def test_a_list_of_ours_is_known_when_its_keys_have_records_again(tmp_path: Path, by: str) -> None:
    tree = {"c/0.jpg": noise("0", 300), "c/1.jpg": noise("1", 300), "c/empty.jpg": b""}
    source, out = plant(tmp_path / "src", tree), tmp_path / "out"
    if by == "pack":
        pack(source, out, jobs=1, on_error="skip")
        with api.Writer(out, append=True) as writer:
            writer.write({"__key__": "c/empty.jpg", "image": noise("e", 300), "label": 0})
    else:
        plant(source, {"c/empty.jpg": noise("e", 300)})
        pack(source, out, jobs=1)
        drop(out, keys=["c/empty.jpg"])
        plant(source, {"c/empty.jpg": b"", "c/2.jpg": noise("2", 300)})
        if by == "update":
            update(source, out, on_error="skip")
        else:
            update(source, out, on_error="skip", part="1/1")
            commit(out)
        restore(out, log(out).versions[-1].id)
    for _ in range(2):
        assert update(source, out, on_error="skip").rejected_before == 1


def test_a_list_of_a_user_stays(out: Path, source: Path) -> None:
    (out / "rejected.jsonl").write_text('{"key": "class0/000.jpg", "reason": "blurred"}\n')
    change(source)
    update(source, out)
    assert "blurred" in (out / "rejected.jsonl").read_text()


def test_originals_that_were_kept_can_be_compared(tmp_path: Path) -> None:
    tree = {f"c/{i}.jpg": picture(300 + i, 280) for i in range(3)}
    folder = plant(tmp_path / "src", tree)
    options = grouped({"jpeg_tiles": True, "keep_original": True})
    pack(folder, tmp_path / "out", jobs=1, **options)
    (folder / "c/1.jpg").write_bytes(picture(310, 280))
    done = update(folder, tmp_path / "out")
    assert (done.changed, done.unchanged) == (1, 2)


def test_keys_that_are_alike_are_refused(tmp_path: Path) -> None:
    folder = plant(tmp_path / "src", {"cat/1.jpg": noise("1", 300)})
    alike = {"__key__": b"cat/1.jpg", "image": noise("1", 300), "label": 0}
    make(tmp_path / "out", [3], sample=lambda number: alike)
    with pytest.raises(OptionError, match=r"several records of the dataset have the key cat/1"):
        update(folder, tmp_path / "out")


def test_splits_are_updated_together(tmp_path: Path) -> None:
    tree = {
        f"{s}/{c}/{i}.jpg": noise(s + c + i, 300)
        for s in ("train", "val")
        for c in "ab"
        for i in "01"
    }
    folder = plant(tmp_path / "src", tree)
    pack(folder, tmp_path / "out", jobs=1)
    (folder / "val/a/0.jpg").unlink()
    plant(folder, {"train/c/new.jpg": noise("n", 300)})
    done = update(folder, tmp_path / "out")
    assert (done.new, done.gone, done.unchanged) == (1, 1, 7)
    assert packed_files(tmp_path / "out", tmp_path) == files_of(folder)
    assert api.open(tmp_path / "out", split="val").classes == ["a", "b", "c"]


def test_what_cannot_be_packed_is_listed_or_left_out(out: Path, source: Path) -> None:
    plant(source, {"class0/bad.jpg": b"none"})
    with pytest.raises(SourceError, match=r"class0/bad\.jpg"):
        update(source, out)
    done = update(source, out, on_error="skip")
    assert [key for key, _ in done.rejected] == ["class0/bad.jpg"]
    assert len(api.open(out)) == 24
    assert load_sources(locate(out), manifest.load(locate(out))) is not None


def test_an_interrupted_update_goes_on(
    out: Path, source: Path, tmp_path: Path, dead_on_shard: Callable[[int], None], monkeypatch: Any
) -> None:
    plant(source, {f"class1/n{i}.jpg": noise(f"n{i}", 300) for i in range(12)})
    change(source)
    dead_on_shard(6 + 2)
    with pytest.raises(BaseException):  # noqa: B017 - as a crash does
        update(source, out, jobs=1)
    monkeypatch.undo()
    assert len(api.open(out)) == 24
    done = update(source, out, jobs=1)
    assert (done.new, done.changed, done.gone) == (14, 3, 1)
    assert packed_files(out, tmp_path) == files_of(source)


def test_gc_removes_notes_of_older_versions(out: Path, source: Path) -> None:
    update(source, out)
    change(source)
    update(source, out)
    assert len(list(out.glob("sources-*.bin"))) == 2
    gc(out, keep_s=0, keep_versions=1)
    assert len(list(out.glob("sources-*.bin"))) == 1
    assert update(source, out).compared == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gone": "ask"}, "expected 'drop' or 'keep'"),
        ({"checksum": 1}, "checksum"),
        ({"on_error": "keep"}, "expected 'raise' or 'skip'"),
    ],
)
def test_wrong_options_are_named(out: Path, source: Path, options: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        update(source, out, **options)


def test_the_command(out: Path, source: Path) -> None:
    change(source)
    said = shardio("update", source, out, "--dry-run").stdout
    assert "2 new, 3 changed, 1 gone, 20 as they were" in said
    assert "nothing was changed, since this is a dry run" in said
    found = shardio_json("update", source, out)
    assert (found["new"], found["changed"], found["gone"]) == (2, 3, 1)
    assert found["versions"][""] == log(out).versions[0].id
    shutil.rmtree(source / "class0"), shutil.rmtree(source / "class1")
    assert "--gone drop" in shardio("update", source, out, code=2).stderr
    assert len(api.open(out)) == 25
