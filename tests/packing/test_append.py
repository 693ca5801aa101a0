"""Appending: what is new is in new shards, nothing that is there changes, and labels stay."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.packing import grouped
from support.trees import (
    content,
    images,
    noise,
    picture,
    plant,
    shardio,
    shardio_json,
    shards,
)
from torch.utils.data import DataLoader

import shardio as api
from shardio import (
    BusyError,
    OptionError,
    ShardDataset,
    SourceChangedError,
    SourceError,
    SourceOptions,
    Writer,
    index,
    pack,
    unpack,
    verify,
)
from shardio.formats import manifest
from shardio.packing import versions
from shardio.packing.append import append
from shardio.packing.drop import drop
from shardio.packing.gc import gc
from shardio.packing.grow import build_all
from shardio.packing.journal import WORK
from shardio.packing.update import update
from shardio.packing.versions import changing, diff, log, restore
from shardio.storage.location import locate

Tree = dict[str | bytes, bytes | None]


@pytest.fixture
def more(tmp_path: Path) -> Path:
    """A folder of six files that `out` does not have: one class that it has, and two new ones."""
    names = [f"{c}/new{i}.jpg" for c in ("class1", "a new one", "zebra") for i in range(2)]
    return plant(tmp_path / "more", {name: noise(name, 400) for name in names})


def stored(folder: Path, version: str | None = None) -> dict[str, tuple[bytes, str]]:
    """Of each key the bytes of its image and the name of its class."""
    data = api.open(folder, version=version, decode=None)
    names = data.classes or []
    return {one["__key__"]: (one["image"], names[one["label"]]) for one in data}


def test_new_records_are_behind_those_that_are_there(out: Path, more: Path) -> None:
    before, bytes_of = stored(out), {path.name: path.read_bytes() for path in shards(out)}
    keys = api.open(out, decode=None).keys()
    done = append(more, out)
    assert (done.added, done.skipped, done.replaced, done.classes) == (
        6,
        0,
        0,
        ["a new one", "zebra"],
    )
    found = stored(out)
    assert {key: found[key] for key in before} == before
    assert {key: one for key, one in found.items() if key not in before} == {
        f"{c}/new{i}.jpg": (noise(f"{c}/new{i}.jpg", 400), c)
        for c in ("class1", "a new one", "zebra")
        for i in range(2)
    }
    assert api.open(out, decode=None).keys()[: len(keys)] == keys
    assert all((out / name).read_bytes() == data for name, data in bytes_of.items())
    assert api.open(out).classes == ["class0", "class1", "class2", "a new one", "zebra"]
    assert verify(out, sha256=True).damages == []
    assert not (out / WORK).exists() and not list(out.glob(".shardio*"))
    assert log(out).versions[0].changes == {"added": 6} and log(out).versions[0].command == "append"
    assert len(diff(out, log(out).versions[1].id).added) == 6


def test_an_epoch_has_old_and_new_records_once(out: Path, more: Path) -> None:
    append(more, out)
    drop(out, keys=["zebra/new0.jpg", "class0/001.jpg"])
    data = ShardDataset(out, batch_size=5, decode=None, tail="exact")
    rows = [
        key
        for one in DataLoader(data, batch_size=None, num_workers=2)
        for key, valid in zip(one["__key__"], one["valid"], strict=True)
        if valid
    ]
    assert sorted(rows) == sorted(stored(out)) and len(rows) == 28


@pytest.mark.parametrize("jobs", [1, 3])
def test_appended_equals_packed_at_once(tmp_path: Path, jobs: int) -> None:
    whole = images(4, 6)
    parts: list[Tree] = [{}, {}, {}]
    for i, (key, data) in enumerate(whole.items()):
        parts[i % 3][key] = data
    pack(plant(tmp_path / "0", parts[0]), tmp_path / "out", jobs=jobs)
    for i in (1, 2):
        append(plant(tmp_path / str(i), parts[i]), tmp_path / "out", jobs=jobs)
    pack(plant(tmp_path / "whole", whole), tmp_path / "at once", jobs=jobs)
    assert stored(tmp_path / "out") == stored(tmp_path / "at once")
    unpack(tmp_path / "out", tmp_path / "files")
    assert content(tmp_path / "files") == content(tmp_path / "whole")


def test_equal_appends_give_equal_bytes(source: Path, more: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1750000000")
        for name, jobs in (("a", 1), ("b", 2)):
            pack(source, tmp_path / name, jobs=jobs, **grouped({"max_records": 4}))
            append(more, tmp_path / name, jobs=jobs)
    assert content(tmp_path / "a") == content(tmp_path / "b")


# --- keys that are there --------------------------------------------------------------------------


def test_keys_that_are_there_are_refused_by_default(out: Path, source: Path, more: Path) -> None:
    before = content(out)
    shutil.copytree(source / "class0", more / "class0")
    with pytest.raises(OptionError, match=r"has 8 records of the source already.*--on-duplicate"):
        append(more, out)
    assert content(out) == before


def test_they_are_skipped_or_replaced_on_request(out: Path, source: Path, more: Path) -> None:
    old = stored(out)
    plant(more, {"class0/003.jpg": noise("another", 700)})
    skipped = append(more, out, on_duplicate="skip")
    assert (skipped.added, skipped.skipped) == (6, 1)
    assert stored(out)["class0/003.jpg"] == old["class0/003.jpg"]
    replaced = append(more, out, on_duplicate="replace")
    assert (replaced.added, replaced.replaced) == (7, 7)
    assert stored(out)["class0/003.jpg"] == (noise("another", 700), "class0")
    assert len(stored(out)) == len(api.open(out)) == 30
    version = log(out).versions
    assert version[0].changes == {"added": 7, "replaced": 7}
    assert diff(out, version[1].id).changed == sorted([*_news(), "class0/003.jpg"])
    assert stored(out, version[2].id) == old


def _news() -> list[str]:
    return [f"{c}/new{i}.jpg" for c in ("class1", "a new one", "zebra") for i in range(2)]


def test_nothing_new_is_no_version(out: Path, source: Path) -> None:
    before = content(out)
    done = append(source, out, on_duplicate="skip")
    assert (done.added, done.skipped, done.versions) == (0, 24, {})
    assert content(out) == before


def test_a_dry_run_changes_nothing(out: Path, more: Path) -> None:
    before = content(out)
    done = append(more, out, dry_run=True)
    assert (done.added, done.classes, done.versions) == (6, ["a new one", "zebra"], {})
    assert "6 records would be appended" in str(done)
    assert content(out) == before


# --- as it was packed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"format": "lmdb"},
        {"resize": 16},
        {"resize": 16, "encode": "raw"},
        {"jpeg_tiles": True, "keep_original": True},
        {"shuffle": False},
        {"max_records": 2},
    ],
    ids=str,
)
def test_records_are_as_the_dataset_was_packed(tmp_path: Path, options: dict[str, Any]) -> None:
    trees = [
        {f"c{i}/{n}{j}.jpg": picture(40 + j, 30 + i) for i in range(2) for j in range(3)}
        for n in "ab"
    ]
    a, b = (plant(tmp_path / name, tree) for name, tree in zip("ab", trees, strict=True))
    both = plant(tmp_path / "both", {**trees[0], **trees[1]})
    pack(a, tmp_path / "out", jobs=1, **grouped(options))
    append(b, tmp_path / "out", jobs=1)
    pack(both, tmp_path / "whole", jobs=1, **grouped(options))
    assert stored(tmp_path / "out") == stored(tmp_path / "whole")
    there, other = (manifest.load(locate(tmp_path / name)) for name in ("out", "whole"))
    assert there.schema.fields == other.schema.fields and there.format == other.format
    assert verify(tmp_path / "out").damages == []


def test_raw_pixels_of_another_size_are_refused(tmp_path: Path) -> None:
    a = plant(tmp_path / "a", {"c/0.jpg": picture(8, 8)})
    b = plant(tmp_path / "b", {"c/1.jpg": picture(9, 8)})
    pack(a, tmp_path / "out", jobs=1, **grouped({"encode": "raw"}))
    before = content(tmp_path / "out")
    with pytest.raises(SourceError, match=r"c/1\.jpg"):
        append(b, tmp_path / "out", jobs=1)
    assert stored(tmp_path / "out").keys() == {"c/0.jpg"}
    assert {name for name in content(tmp_path / "out") if not name.startswith(b".")} == set(before)


def test_other_sources_are_taken_too(out: Path, more: Path, tmp_path: Path) -> None:
    shutil.make_archive(str(tmp_path / "more"), "zip", more)
    assert append(tmp_path / "more.zip", out).added == 6
    (tmp_path / "list.csv").write_text("path,label\nclass1/x.jpg,class1\nclass9/y.jpg,class9\n")
    plant(tmp_path / "files", {"class1/x.jpg": noise("x", 300), "class9/y.jpg": noise("y", 300)})
    done = append(tmp_path / "list.csv", out, read=SourceOptions(root=tmp_path / "files"))
    assert done.classes == ["class9"] and stored(out)["class9/y.jpg"][1] == "class9"


@pytest.mark.parametrize("form", ["packed", "tars"])
def test_records_of_other_datasets_are_known_by_their_keys(
    out: Path, more: Path, source: Path, tmp_path: Path, form: str
) -> None:
    shutil.copytree(source / "class0", more / "class0")
    pack(more, tmp_path / "packed", jobs=1)
    api.export(tmp_path / "packed", tmp_path / "tars", format="webdataset")
    index(tmp_path / "tars", jobs=1)
    done = append(tmp_path / form, out, on_duplicate="skip")
    expected = stored(tmp_path / "packed").keys()
    if form == "packed":
        assert (done.added, done.skipped) == (6, 8)
        assert stored(out).keys() >= expected and len(stored(out)) == 30
    again = append(tmp_path / form, out, on_duplicate="skip")
    assert (again.added, again.skipped) == (0, 14)


def test_what_was_written_by_a_writer_is_appended_to(tmp_path: Path) -> None:
    with Writer(tmp_path / "out", classes=["a", "b"]) as writer:
        writer.write({"__key__": "a/1.jpg", "image": noise("1", 300), "label": 0})
    append(plant(tmp_path / "src", {"b/2.jpg": noise("2", 300)}), tmp_path / "out", jobs=1)
    assert stored(tmp_path / "out") == {
        "a/1.jpg": (noise("1", 300), "a"),
        "b/2.jpg": (noise("2", 300), "b"),
    }


# --- splits ---------------------------------------------------------------------------------------


def test_splits_have_one_list_of_classes(tmp_path: Path) -> None:
    first = {f"{s}/{c}/{s}.jpg": noise(s + c, 300) for s in ("train", "val") for c in "ab"}
    pack(plant(tmp_path / "src", first), tmp_path / "out", jobs=1)
    news = {"train/c/new.jpg": noise("n", 300), "val/a/new.jpg": noise("m", 300)}
    done = append(plant(tmp_path / "more", news), tmp_path / "out", jobs=1)
    assert sorted(done.versions) == ["train", "val"] and done.classes == ["c"]
    for split in ("train", "val"):
        assert api.open(tmp_path / "out", split=split).classes == ["a", "b", "c"]
    assert json.loads((tmp_path / "out" / "shardio.json").read_bytes())["classes"] == [
        "a",
        "b",
        "c",
    ]
    only = append(
        plant(tmp_path / "again", {"val/d/x.jpg": noise("x", 300)}), tmp_path / "out", jobs=1
    )
    assert sorted(only.versions) == ["train", "val"]  # of one list of classes
    assert len(api.open(tmp_path / "out", split="train")) == 3
    with pytest.raises(OptionError, match=r"found test, val\. Leave test out"):
        odd = {f"{split}/a/x.jpg": noise("x", 300) for split in ("test", "val")}
        append(plant(tmp_path / "odd", odd), tmp_path / "out", jobs=1)


def test_what_is_of_one_split_alone_is_told_where_it_goes(tmp_path: Path) -> None:
    first = {f"{s}/{c}/{s}.jpg": noise(s + c, 300) for s in ("train", "val") for c in "ab"}
    out = tmp_path / "out"
    pack(plant(tmp_path / "src", first), out, jobs=1)
    news = plant(tmp_path / "news", {"a/new.jpg": noise("n", 300)})
    for given, found in ((news, "a"), (news / "a", "no folder")):
        said = rf"expected the folders train, val, since .*; found {found}\. .* as OUT: .*/train$"
        with pytest.raises(OptionError, match=said):
            append(given, out, jobs=1)
    assert append(news, out / "train", jobs=1).added == 1
    with pytest.raises(
        OptionError, match=r"found image \(image\)\. If it is the folder of one class"
    ):
        append(news / "a", out / "train", jobs=1)
    both = plant(tmp_path / "both", {"train/a/x.jpg": noise("x", 300)})
    with pytest.raises(OptionError, match=r"is one dataset without splits\. Give .*/both/train$"):
        append(both, out / "train", jobs=1)


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on_duplicate": "keep"}, "expected 'error', 'skip' or 'replace'"),
        ({"on_error": "keep"}, "expected 'raise' or 'skip'"),
        ({"read": SourceOptions(classes="x")}, "numbers its classes itself"),
        ({"dry_run": 1}, "dry_run"),
    ],
)
def test_wrong_options_are_named(out: Path, more: Path, options: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        append(more, out, **options)


def test_other_fields_are_refused(out: Path, tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,caption\nclass1/x.jpg,hello\n")
    plant(tmp_path / "files", {"class1/x.jpg": noise("x", 300)})
    with pytest.raises(OptionError, match=r"expected image \(image\), label \(int\); found"):
        append(tmp_path / "list.csv", out, read=SourceOptions(root=tmp_path / "files"))


def test_files_of_others_in_place_are_refused(tars: Path, more: Path) -> None:
    with pytest.raises(OptionError, match="run `shardio index` again"):
        append(more, tars)


def test_what_cannot_be_packed_is_listed_or_left_out(out: Path, source: Path, more: Path) -> None:
    plant(more, {"zebra/bad.jpg": b"no image", "zebra/empty.jpg": b""})
    before = stored(out)
    with pytest.raises(SourceError, match=r"(?s)2 files cannot be packed.*zebra/bad.jpg"):
        append(more, out)
    assert stored(out) == before
    done = append(more, out, on_error="skip")
    assert (done.added, [key for key, _ in done.rejected]) == (
        6,
        ["zebra/bad.jpg", "zebra/empty.jpg"],
    )
    assert (out / "rejected.jsonl").read_text().count("\n") == 2
    plant(more, {"zebra/worse.jpg": b"none"})
    append(more, out, on_error="skip", on_duplicate="skip")
    assert "worse" in (out / "rejected.jsonl").read_text()
    assert (out / "rejected.jsonl").read_text().count("\n") == 3
    plant(source, {"class0/empty.jpg": b""})  # beside what is all there
    with pytest.raises(SourceError, match=r"(?s)1 file cannot be packed.*class0/empty.jpg"):
        append(source, out, on_duplicate="skip")
    assert append(source, out, on_duplicate="skip", on_error="skip").added == 0


# --- interrupted, and at once ---------------------------------------------------------------------


def test_an_interrupted_append_goes_on(
    out: Path, tmp_path: Path, dead_on_shard: Callable[[int], None], monkeypatch: Any
) -> None:
    tree = {f"class1/n{i}.jpg": noise(f"n{i}", 300) for i in range(20)}
    folder = plant(tmp_path / "many", tree)
    with pytest.MonkeyPatch.context():
        dead_on_shard(6 + 3)
        with pytest.raises(BaseException):  # noqa: B017 - as a crash does
            append(folder, out, jobs=1)
    monkeypatch.undo()
    left = sorted(path.name for path in (out / WORK).glob("*.shard"))
    assert len(left) == 3 and len(stored(out)) == 24
    age = {name: os.stat(out / WORK / name).st_mtime_ns for name in left}
    append(folder, out, jobs=1)
    assert {name: os.stat(out / name).st_mtime_ns for name in left} == age
    assert len(stored(out)) == 44 and not (out / WORK).exists()


def test_one_that_had_built_nothing_is_begun_anew_after_others(
    out: Path, more: Path, dead_on_shard: Callable[[int], None], monkeypatch: Any
) -> None:
    dead_on_shard(6)
    with pytest.raises(KeyboardInterrupt):
        append(more, out, jobs=1)
    monkeypatch.undo()
    with Writer(out, append=True, max_records=1) as writer:  # as many shards, or more
        for i in range(8):
            writer.write({"__key__": f"own{i}", "image": noise(f"own{i}", 300), "label": 0})
    assert append(more, out, jobs=1).added == 6
    assert len(stored(out)) == 24 + 8 + 6


def test_another_source_needs_a_restart(
    out: Path, more: Path, tmp_path: Path, dead_on_shard: Callable[[int], None], monkeypatch: Any
) -> None:
    dead_on_shard(6 + 1)
    with pytest.raises(BaseException):  # noqa: B017
        append(more, out, jobs=1)
    monkeypatch.undo()
    other = plant(tmp_path / "other", {"class2/x.jpg": noise("x", 300)})
    with pytest.raises(SourceChangedError, match="--restart"):
        append(other, out, jobs=1)
    assert append(other, out, jobs=1, restart=True).added == 1
    assert append(more, out, jobs=1).added == 6


@pytest.mark.parametrize("choice", ["error", "skip", "replace"])
@pytest.mark.parametrize("commits", [0, 1, 2])
def test_splits_of_which_some_were_committed_before_a_death_are_finished(
    tmp_path: Path, commits: int, choice: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1750000000")
    old = {f"{n}/{k!s}": v for n in ("train", "val") for k, v in images(2, 3).items()}
    new = {f"{n}/class{c}/n.jpg": noise(f"{n}{c}", 300) for n in ("train", "val") for c in (0, 9)}
    pack(plant(tmp_path / "src", old), tmp_path / "out", jobs=1)
    shutil.copytree(tmp_path / "out", tmp_path / "whole")
    folder = plant(tmp_path / "new", new)
    append(folder, tmp_path / "whole", jobs=1, on_duplicate=choice)
    left = [None] * commits

    def dying(*given: Any) -> Any:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return versions.commit(*given)

    def stays(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shardio.packing.grow.commit", dying)
        patch.setattr("shardio.packing.output_dir.commit_splits", stays)
        patch.setattr("shardio.packing.output_dir.Owner.clean", stays)
        with pytest.raises(KeyboardInterrupt):
            append(folder, tmp_path / "out", jobs=1, on_duplicate=choice)
    append(folder, tmp_path / "out", jobs=1, on_duplicate=choice)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_two_do_not_commit_at_once(out: Path, more: Path, monkeypatch: Any) -> None:
    before = stored(out)
    with changing(str(out)), pytest.raises(BusyError):
        append(more, out)
    assert stored(out) == before
    assert append(more, out).added == 6


def test_a_drop_may_come_in_between_but_no_append(
    out: Path, more: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    other = plant(tmp_path / "other", {"class2/x.jpg": noise("x", 300)})

    def meanwhile(*given: Any) -> Any:
        monkeypatch.setattr("shardio.packing.grow.build_all", build_all)
        found = build_all(*given)
        act()
        return found

    act: Callable[[], Any] = lambda: drop(out, keys=["class0/000.jpg"])  # noqa: E731
    monkeypatch.setattr("shardio.packing.grow.build_all", meanwhile)
    assert append(more, out, jobs=1).added == 6
    assert len(stored(out)) == 29
    act = lambda: restored(out, other)  # noqa: E731
    monkeypatch.setattr("shardio.packing.grow.build_all", meanwhile)
    again = plant(tmp_path / "again", {"class2/y.jpg": noise("y", 300)})
    with pytest.raises(BusyError, match="changed this dataset meanwhile"):
        append(again, out, jobs=1)
    assert "class2/x.jpg" in stored(out) and "class2/y.jpg" not in stored(out)
    append(again, out, jobs=1)
    assert "class2/y.jpg" in stored(out)


def restored(out: Path, other: Path) -> None:
    """Append something, as another machine that has not seen this machine's lock would."""
    held = out / WORK
    held.rename(out / "away")
    append(other, out, jobs=1)
    (out / "away").rename(held)


@pytest.mark.parametrize("choice", ["error", "replace"])
def test_a_record_that_is_brought_back_meanwhile_is_replaced_only_if_asked(
    out: Path, more: Path, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    first, key = log(out).versions[0].id, "class0/003.jpg"
    plant(more, {key: noise("another", 700)})
    drop(out, keys=[key])

    def built(*given: Any) -> None:
        build_all(*given)
        restore(out, first)

    monkeypatch.setattr("shardio.packing.grow.build_all", built)
    if choice == "error":
        with pytest.raises(OptionError, match=f"--on-duplicate error since, by the keys {key}"):
            append(more, out, jobs=1)
        assert stored(out)[key][0] == images()[key] and len(stored(out)) == 24
    else:
        append(more, out, jobs=1, on_duplicate=choice)
        assert stored(out)[key][0] == noise("another", 700) and len(stored(out)) == 24 + 6


def test_as_many_shards_of_another_version_are_not_those_that_were_there(
    out: Path, more: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = log(out).versions[0].id
    for name in "ab":
        restore(out, first)
        append(plant(tmp_path / name, {f"class1/{name}.jpg": noise(name, 300)}), out, jobs=1)
    other = log(out).versions[2].id
    assert "class1/a.jpg" in stored(out, other)

    def built(*given: Any) -> None:
        build_all(*given)
        restore(out, other)

    monkeypatch.setattr("shardio.packing.grow.build_all", built)
    with pytest.raises(BusyError, match="something else changed this dataset meanwhile"):
        append(more, out, jobs=1)
    assert len(stored(out)) == 25


def test_gc_leaves_unfinished_work(
    out: Path, more: Path, dead_on_shard: Any, monkeypatch: Any
) -> None:
    dead_on_shard(6 + 1)
    with pytest.raises(BaseException):  # noqa: B017
        append(more, out, jobs=1)
    monkeypatch.undo()
    gc(out, keep_s=0)
    assert list((out / WORK).glob("*.shard"))
    assert append(more, out, jobs=1).added == 6


# --- the command ----------------------------------------------------------------------------------


def test_the_command(out: Path, more: Path, tmp_path: Path) -> None:
    said = shardio("append", more, out, "--dry-run").stdout
    assert "6 records would be appended" in said and "new classes: a new one, zebra" in said
    found = shardio_json("append", more, out, "--jobs", "1")
    assert found["added"] == 6 and found["versions"][""] == log(out).versions[0].id
    plant(more, {"zebra/bad.jpg": b"no"})
    done = shardio("append", more, out, "--on-duplicate", "skip", "--on-error", "skip", code=4)
    assert "1 file left out" in done.stdout
    assert "of the source already" in shardio("append", more, out, code=2).stderr


def test_files_that_cannot_be_packed_leave_no_version_and_no_shard(
    out: Path, tmp_path: Path
) -> None:
    """A nightly job that gives the same folder each time."""
    more = plant(tmp_path / "more", {"class0/new.jpg": noise("n", 500), "class9/bad.jpg": b"bad"})
    first = append(more, out, on_error="skip")
    assert (first.added, first.shards, len(first.rejected)) == (1, 1, 1)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    again = append(more, out, on_error="skip", on_duplicate="skip")
    assert (again.added, again.shards, again.classes, again.versions) == (0, 0, [], {})
    assert (again.rejected, again.rejected_before) == ([], 1)  # it did not change
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    only = plant(tmp_path / "only", {"class8/bad.jpg": b"bad"})
    assert append(only, out, on_error="skip").versions == {}
    assert "class8" not in (api.open(out).classes or ())


def test_what_was_dropped_stays_so_where_duplicates_are_skipped(out: Path, tmp_path: Path) -> None:
    """Else a nightly job over the whole folder would bring back who opted out."""
    tree = images()
    source = plant(tmp_path / "all", {**tree, "class0/new.jpg": noise("n", 500)})
    gone = sorted(str(key) for key in tree)[:2]
    drop(out, keys=gone)
    done = append(source, out, on_duplicate="skip")
    assert (done.added, done.skipped, done.hidden) == (1, 22, 2)
    assert "2 records had been dropped, and stay so" in str(done)
    assert not {*gone} & {*api.open(out).keys()}
    alone = plant(tmp_path / "alone", {gone[0]: tree[gone[0]]})
    assert append(alone, out).added == 1  # who asks for one gets it
    again = update(source, out)
    assert (again.new, again.back) == (1, 1) and "1 of the new ones had been dropped" in str(again)


def test_splits_never_number_their_classes_apart(tmp_path: Path) -> None:
    both = {f"{split}/{key}": data for split in ("train", "val") for key, data in images().items()}
    out, more = tmp_path / "out", tmp_path / "more"
    pack(plant(tmp_path / "src", both), out, splits=True, jobs=1)
    plant(more, {"zebra/a.jpg": noise("z", 500)})
    with pytest.raises(OptionError, match=r"classes that are new: zebra.*append to .*out"):
        append(more, out / "train")
    plant(tmp_path / "known", {"class0/a.jpg": noise("a", 500)})
    assert append(tmp_path / "known", out / "train").added == 1
    for split, name in (("train", "zebra"), ("val", "yak")):  # as releases before allowed
        place, folder = out / split, tmp_path / f"{split}-away"
        place.rename(folder)
        append(plant(tmp_path / name, {f"{name}/b.jpg": noise(name, 500)}), folder)
        folder.rename(place)
    with pytest.raises(OptionError, match="splits number their classes apart"):
        append(plant(tmp_path / "new", {"train/class0/c.jpg": noise("c", 500)}), out)
