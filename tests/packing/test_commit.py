"""What parts built is committed: of an append, an update. (Of a packing: test_splits.py, ...)"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LIMIT_S
from support.packing import unlisted
from support.programs import Program
from support.trees import (
    command,
    content,
    environment,
    images,
    noise,
    plant,
    shardio,
    shardio_json,
)

import shardio as api
from shardio import (
    BusyError,
    DamageError,
    ExistsError,
    NotPackedError,
    OptionError,
    PlanOptions,
    ShardioError,
    SourceChangedError,
    Writer,
    append,
    commit,
    pack,
    verify,
)
from shardio.packing import journal, versions
from shardio.packing.drop import drop
from shardio.packing.journal import WORK
from shardio.packing.plan import Differences
from shardio.packing.update import update
from shardio.packing.versions import log, restore

NEW: dict[str | bytes, bytes | None] = {
    f"{c}/new{i}.jpg": noise(f"{c}{i}", 400) for c in ("class1", "zebra") for i in range(9)
}  # five shards


@pytest.fixture(autouse=True)
def _at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1750000000")  # equal commits make equal files


@pytest.fixture
def more(tmp_path: Path) -> Path:
    """A folder of 18 files that `out` does not have."""
    return plant(tmp_path / "more", NEW)


@pytest.fixture
def expected(out: Path, more: Path, tmp_path: Path) -> dict[bytes, bytes | None]:
    """What an append without parts makes of `out`."""
    shutil.copytree(out, tmp_path / "whole")
    append(more, tmp_path / "whole", jobs=1)
    return content(tmp_path / "whole")


def in_parts(source: Path, out: Path, count: int = 3, **options: Any) -> Any:
    for part in range(count, 0, -1):
        append(source, out, jobs=1, part=(part, count), **options)
    return commit(out, jobs=1)


def keys_of(out: Path) -> list[str]:
    return sorted(api.open(out, decode=None).keys())


# --- the same as without parts --------------------------------------------------------------------


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_parts_append_what_one_process_does(
    out: Path, more: Path, expected: Any, count: int, planned: bool
) -> None:
    if planned:
        assert append(more, out, plan=True).planned
    before = content(out)
    (done,) = in_parts(more, out, count)
    assert content(out) == expected
    assert (done.records, done.built + done.kept) == (18, 5)
    assert done.version == log(out).versions[0].id and f"version {done.version}" in str(done)
    assert {key for key in before if not key.startswith(b".")} <= content(out).keys()
    with pytest.raises(NotPackedError, match="already packed; there is nothing to commit"):
        commit(out)


@pytest.mark.parametrize("plan", [False, True])
def test_processes_at_once_each_build_their_part(
    out: Path, more: Path, expected: Any, plan: bool
) -> None:
    if plan:
        said = shardio("append", more, out, "--plan").stdout
        assert "18 records planned in 5 shards" in said
        assert f"next: shardio append {more} {out} --part I/N for I from 1 to N, then" in said
    lines = [command("append", more, out, "--part", f"{i}/3") for i in (1, 2, 3)]
    running = [
        subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, text=True)
        for line in lines
    ]
    for i, one in enumerate(running, 1):
        said = one.communicate(timeout=LIMIT_S)[0]
        assert one.returncode == 0
        assert f"built ({i} of 3, not committed)" in said
        assert f"next: shardio commit {out}, when all parts are built" in said
    assert keys_of(out) == sorted(images())  # until then nothing is appended
    found = shardio_json("commit", out, "--wait", "--parts", "3")["datasets"]
    assert [one["records"] for one in found] == [18]
    assert content(out) == expected


def test_a_part_that_is_killed_is_run_again(out: Path, more: Path, expected: Any) -> None:
    line = ("append", more, out, "--jobs", "1")
    program = Program("-m", "support.held_packing", "3", *line, "--part", "2/2", limit_s=LIMIT_S)
    while len(list((out / WORK).glob("*.shard"))) < 1:
        assert not program.ended(), program.finish()
        time.sleep(0.01)  # nothing tells what another process has written
    shardio(*line, "--part", "1/2")  # at once: it is of other shards
    assert "is packing here" in shardio(*line, "--part", "2/2", code=5).stderr
    assert "is packing here" in shardio(*line, code=5).stderr
    assert "is packing here" in shardio("commit", out, code=5).stderr
    program.kill()
    program.finish()
    said = shardio("commit", out, "--parts", "2", code=1).stderr
    assert "2 of 5 shards are not built: 3, 4; of parts 2" in said
    assert "Nothing was committed. Run the parts that build them" in said
    there = {path.name: path.stat().st_ino for path in (out / WORK).glob("*.shard")}
    assert len(there) == 3
    shardio(*line, "--part", "2/2")
    shardio("commit", out)
    assert {name: (out / name).stat().st_ino for name in there} == there
    assert content(out) == expected


def test_without_part_it_goes_on_with_what_parts_built(
    out: Path, more: Path, expected: Any
) -> None:
    append(more, out, jobs=1, part=(2, 3))
    there = {path.name: path.stat().st_ino for path in (out / WORK).glob("*.shard")}
    append(more, out, jobs=1)
    assert {name: (out / name).stat().st_ino for name in there} == there and there
    assert content(out) == expected


def test_a_plan_is_listed_once(
    out: Path, more: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(more, out, plan=True)
    unlisted(monkeypatch)
    assert append(more, out, dry_run=True).added == 18
    in_parts(more, out)
    assert content(out) == expected


def test_the_scheduler_says_the_part(out: Path, more: Path, expected: Any) -> None:
    for rank in ("0", "1"):
        line = ("append", more, out, "--part", "auto")
        said = shardio(*line, env=environment(RANK=rank, WORLD_SIZE="2"))
        assert f"part {int(rank) + 1} of 2, by RANK={rank}, WORLD_SIZE=2" in said.stderr
    shardio("commit", out)
    assert content(out) == expected


# --- splits ---------------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path: Path) -> tuple[Path, Path]:
    """A dataset of three splits, and a source with new records for two of them."""
    old: dict[str | bytes, bytes | None] = {
        f"{name}/{key!s}": data
        for name in ("train", "val", "test")
        for key, data in images(2, 3).items()
    }
    pack(plant(tmp_path / "src", old), tmp_path / "out", jobs=1, plan=PlanOptions(max_records=4))
    new: dict[str | bytes, bytes | None] = {
        f"train/class{c}/n{i}.jpg": noise(f"{c}{i}", 300) for c in (0, 9) for i in (1, 2)
    }
    new |= {f"val/class8/n{i}.jpg": noise(f"v{i}", 300) for i in range(7)}
    return plant(tmp_path / "new", new), tmp_path / "out"


@pytest.mark.parametrize("plan", [False, True])
def test_splits_are_one_commit_with_one_list_of_classes(
    split: tuple[Path, Path], tmp_path: Path, plan: bool
) -> None:
    source, out = split
    shutil.copytree(out, tmp_path / "whole")
    append(source, tmp_path / "whole", jobs=1)
    if plan:
        append(source, out, plan=True)
    done = in_parts(source, out)
    assert content(out) == content(tmp_path / "whole")
    assert [(one.split, one.records) for one in done] == [("train", 4), ("val", 7)]
    for name in ("train", "val", "test"):
        assert api.open(out / name).classes == ["class0", "class1", "class8", "class9"]


def test_a_split_that_no_part_has_begun_is_missing(split: tuple[Path, Path]) -> None:
    source, out = split
    append(source, out, jobs=1, part=(1, 2))
    append(source, out, jobs=1, part=(2, 2))
    before = content(out / "train"), content(out / "test")
    shutil.move(out / "val" / WORK, out / "away")
    for wait_s in (None, 0):
        with pytest.raises(NotPackedError, match=r"val/\S+: no part has begun to pack here"):
            commit(out, jobs=1, wait_s=wait_s)
    assert (content(out / "train"), content(out / "test")) == before
    shutil.move(out / "away", out / "val" / WORK)
    assert len(commit(out, jobs=1)) == 2
    assert api.open(out / "val").classes == ["class0", "class1", "class8", "class9"]


@pytest.mark.parametrize("commits", [1, 2])
def test_a_commit_that_dies_between_splits_is_gone_on_with(
    split: tuple[Path, Path], tmp_path: Path, commits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = split
    shutil.copytree(out, tmp_path / "whole")
    append(source, tmp_path / "whole", jobs=1)
    for part in ("1/2", "2/2"):
        append(source, out, jobs=1, part=part)
    with monkeypatch.context() as patch:
        left = commits

        def dying(*given: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return versions.commit(*given)

        patch.setattr("shardio.packing.grow.commit", dying)
        with pytest.raises(KeyboardInterrupt):
            commit(out, jobs=1)
    named = [log(out / name).versions for name in ("test", "train", "val")]
    assert [len(of) for of in named] == [2, commits, 1]
    commit(out, jobs=1)
    assert content(out) == content(tmp_path / "whole")


# --- keys that are there, and what is left out ----------------------------------------------------


def test_what_is_replaced_is_known_by_the_keys_of_the_plan(
    out: Path, more: Path, tmp_path: Path
) -> None:
    plant(more, {"class0/003.jpg": noise("another", 700), "class0/005.jpg": b"no image"})
    shutil.copytree(out, tmp_path / "whole")
    options = {"on_duplicate": "replace", "on_error": "skip"}
    whole = append(more, tmp_path / "whole", jobs=1, **options)  # type: ignore[arg-type]
    assert (whole.added, whole.replaced) == (19, 1)
    (done,) = in_parts(more, out, **options)
    assert [key for key, _ in done.rejected] == ["class0/005.jpg"]
    assert any("1 of these replace a record with the same key" in note for note in done.notes)
    assert content(out) == content(tmp_path / "whole")
    data = api.open(out, decode=None)
    found = {one["__key__"]: one["image"] for one in data}
    assert found["class0/003.jpg"] == noise("another", 700)
    # What cannot be packed takes nobody's place.
    assert found["class0/005.jpg"] == images()["class0/005.jpg"]
    assert "class0/005.jpg" in (out / "rejected.jsonl").read_text()  # nor is it tried again
    again = append(more, out, jobs=1, on_duplicate="skip", on_error="skip")
    assert (again.skipped, again.rejected_before) == (19, 1)
    assert verify(out).damages == []


def test_keys_that_are_there_are_refused_by_each_part(out: Path, source: Path) -> None:
    before = content(out)
    with pytest.raises(OptionError, match="has 24 records of the source already"):
        append(source, out, part="1/2")
    assert content(out) == before


THERE = "class1/new3.jpg"  # in `more`, too


@pytest.fixture
def branches(out: Path, tmp_path: Path) -> tuple[str, str]:
    """Two versions of as many shards, the last one of each another: only the first has THERE."""
    first = log(out).versions[0].id
    append(plant(tmp_path / "a", {THERE: noise("a", 300)}), out, jobs=1)
    restore(out, first)
    append(plant(tmp_path / "b", {"class1/b.jpg": noise("b", 300)}), out, jobs=1)
    one, _, other, *_ = (version.id for version in log(out).versions)
    return other, one


def image_of(out: Path, key: str) -> bytes:
    (found,) = [one["image"] for one in api.open(out, decode=None) if one["__key__"] == key]
    assert isinstance(found, bytes)
    return found


@pytest.mark.parametrize("choice", ["error", "skip"])
def test_a_key_that_came_since_is_not_replaced_unasked(
    out: Path, more: Path, branches: Any, choice: str
) -> None:
    for part in ("1/2", "2/2"):
        append(more, out, part=part, jobs=1, on_duplicate=choice)
    restore(out, branches[0])
    before = log(out).versions
    said = f"1 record of what was planned with --on-duplicate {choice} since, by the keys {THERE}"
    with pytest.raises(OptionError, match=f"{said}.*Nothing was appended.*--restart"):
        commit(out)
    assert log(out).versions == before and image_of(out, THERE) == noise("a", 300)
    drop(out, keys=[THERE])  # as the message says
    commit(out)
    assert image_of(out, THERE) == NEW[THERE] and verify(out).damages == []


def test_a_key_that_came_since_is_replaced_where_that_was_asked(
    out: Path, more: Path, branches: Any
) -> None:
    append(more, out, part="1/1", jobs=1, on_duplicate="replace")
    restore(out, branches[0])
    (done,) = commit(out)
    assert any("1 of these replace" in note for note in done.notes)
    assert image_of(out, THERE) == NEW[THERE]


@pytest.mark.parametrize("choice", ["error", "replace"])
def test_a_key_that_came_since_a_plan_ahead(
    out: Path, more: Path, branches: Any, choice: str
) -> None:
    append(more, out, plan=True, on_duplicate=choice)
    restore(out, branches[0])
    if choice == "error":
        with pytest.raises(OptionError, match=f"--on-duplicate error since, by the keys {THERE}"):
            append(more, out, part="1/1", jobs=1)
    else:  # as it was planned, whoever does not say it again
        with pytest.raises(OptionError, match="with --on-duplicate replace, and skip is asked"):
            append(more, out, part="1/1", jobs=1, on_duplicate="skip")
        append(more, out, part="1/1", jobs=1)
        commit(out)
        assert image_of(out, THERE) == NEW[THERE]


def test_parts_agree_on_what_becomes_of_keys_that_are_there(out: Path, more: Path) -> None:
    append(more, out, part="1/2", jobs=1)
    with pytest.raises(SourceChangedError, match="on_duplicate: was 'error', now 'replace'"):
        append(more, out, part="2/2", jobs=1, on_duplicate="replace")


@pytest.mark.parametrize("early", [True, False])
def test_a_rejected_list_of_the_user_is_not_replaced_by_parts(
    out: Path, more: Path, early: bool
) -> None:
    plant(more, {"class1/new3.jpg": b"no image"})
    mine = out / "rejected.jsonl"
    if early:
        mine.write_text("my own notes")
        with pytest.raises(ExistsError, match="no packing wrote it"):
            append(more, out, part="1/1", jobs=1, on_error="skip")
        mine.unlink()
    append(more, out, part="1/1", jobs=1, on_error="skip")
    mine.write_text("my own notes")
    before = content(out)
    with pytest.raises(ExistsError, match="no packing wrote it"):
        commit(out)
    assert content(out) == before
    mine.unlink()
    commit(out)
    assert len(keys_of(out)) == 24 + 17 and "class1/new3.jpg" in mine.read_text()


def test_a_commit_that_is_given_again_keeps_the_list_and_says_what_there_is(
    out: Path, source: Path, tmp_path: Path
) -> None:
    plant(source, {"class1/bad.jpg": b"no image", "class1/new.jpg": noise("new", 300)})
    update(source, out, part="1/1", jobs=1, on_error="skip")
    shutil.copytree(out / WORK, tmp_path / "kept")
    (first,) = commit(out)
    before = content(out)
    assert b"class1/bad.jpg" in (out / "rejected.jsonl").read_bytes()
    shutil.copytree(tmp_path / "kept", out / WORK)  # as a kill before the last step leaves it
    (again,) = commit(out)
    assert content(out) == before and again.already and again.version == first.version
    assert (again.records, again.bytes) == (first.records, first.bytes) == (1, first.bytes)
    assert "already committed, and nothing is left to do: 1 file," in str(again)


# --- others meanwhile -----------------------------------------------------------------------------


def test_what_others_append_meanwhile_stays_and_parts_are_run_again(out: Path, more: Path) -> None:
    append(more, out, jobs=1, part="1/2")
    append(more, out, jobs=1, part="2/2")
    with Writer(out, append=True) as writer:
        writer.write({"__key__": "by a program", "image": noise("p", 300), "label": 0})
    before = {key: data for key, data in content(out).items() if not key.startswith(b".")}
    with pytest.raises(BusyError, match="something else changed this dataset meanwhile"):
        commit(out)
    there = content(out)
    assert {key: data for key, data in there.items() if not key.startswith(b".")} == before
    in_parts(more, out, 2)
    assert len(keys_of(out)) == 24 + 1 + 18 and verify(out).damages == []


@pytest.mark.parametrize("others", ["some", "some, none built", "other contents"])
def test_what_others_appended_of_it_is_no_commit_of_all(
    out: Path, tmp_path: Path, others: str
) -> None:
    ours = {f"class1/{name}.jpg": noise(name, 400) for name in "abc"}  # one shard
    more = plant(tmp_path / "ours", {**ours})
    append(more, out, plan=True, jobs=1)
    if others != "some, none built":
        append(more, out, part="1/1", jobs=1)
    shutil.move(out / WORK, tmp_path / "kept")  # as one of another machine, for a store
    theirs = {**ours, "class1/c.jpg": noise("x", 400)}
    if others != "other contents":
        del theirs["class1/c.jpg"]
    append(plant(tmp_path / "theirs", {**theirs}), out, jobs=1)
    shutil.move(tmp_path / "kept", out / WORK)
    before = log(out).versions
    with pytest.raises(ShardioError, match="Nothing was committed"):
        commit(out)
    assert log(out).versions == before
    append(more, out, jobs=1, on_duplicate="skip")
    assert len(keys_of(out)) == 24 + 3


@pytest.mark.parametrize("skip", [True, False])
def test_a_commit_that_dies_while_it_cleans_up_is_known(
    out: Path, more: Path, skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if skip:
        plant(more, {"class1/new3.jpg": b"no image"})
    append(more, out, part="1/1", jobs=1, on_error="skip")
    built = sorted((out / WORK).glob("*.shard"))

    def dying(path: str) -> None:
        if Path(path) == built[-1]:
            raise KeyboardInterrupt
        Path(path).unlink(missing_ok=True)

    with monkeypatch.context() as patch:
        patch.setattr("shardio.packing.journal.local.remove", dying)
        with pytest.raises(KeyboardInterrupt):
            commit(out)
    assert [one.exists() for one in built] == [False] * (len(built) - 1) + [True]
    before = log(out).versions
    (done,) = commit(out)
    assert done.already and log(out).versions == before and not (out / WORK).exists()


def test_a_drop_may_come_in_between(out: Path, more: Path) -> None:
    append(more, out, jobs=1, part="1/2")
    drop(out, keys=["class0/000.jpg"])
    append(more, out, jobs=1, part="2/2")
    commit(out)
    assert len(keys_of(out)) == 23 + 18


def test_parts_of_another_source_are_refused(out: Path, more: Path, tmp_path: Path) -> None:
    append(more, out, plan=True)
    other = plant(tmp_path / "other", {"class2/x.jpg": noise("x", 300)})
    with pytest.raises(OptionError, match=r"`shardio append --plan`(?s:.*)option label"):
        append(other, out, part="1/2", read=api.SourceOptions(label="(c)"))
    append(more, out, jobs=1, part="1/2")
    shutil.rmtree(out / WORK)
    append(more, out, jobs=1, part="1/2")
    with pytest.raises(SourceChangedError, match=r"class2/x\.jpg is new"):
        append(other, out, part="2/2")
    with pytest.raises(SourceChangedError, match=r"class2/x\.jpg is new"):
        append(other, out)
    assert append(other, out, restart=True).added == 1


@pytest.mark.parametrize("grow", [append, partial(update, gone="keep")])
@pytest.mark.parametrize("damage", [b"", b"shardio-plan 1\n", b"nothing of ours"])
def test_a_damaged_plan_is_named_and_dropped_by_a_restart(
    out: Path, more: Path, damage: bytes, grow: Callable[..., Any]
) -> None:
    grow(more, out, jobs=1, part="1/2")
    (out / WORK / ".shardio-plan").write_bytes(damage)
    for call in (lambda: commit(out), lambda: grow(more, out, jobs=1)):
        with pytest.raises(
            api.DamageError, match="The command that left it, with --restart, drops it"
        ):
            call()
    grow(more, out, jobs=1, restart=True)
    assert NEW.keys() <= {*keys_of(out)}
    assert verify(out).damages == []


def test_a_damaged_shard_of_a_part_is_missing(out: Path, more: Path, expected: Any) -> None:
    append(more, out, jobs=1, part="1/1")
    shard = sorted((out / WORK).glob("*.shard"))[2]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(NotPackedError, match="1 of 5 shards are not built: 2"):
        commit(out)
    append(more, out, jobs=1, part="1/1")
    commit(out)
    assert content(out) == expected


def test_notes_of_files_are_kept_by_parts_too(out: Path, source: Path, tmp_path: Path) -> None:
    update(source, out)
    plant(source, NEW)
    in_parts(source, out, on_duplicate="skip")
    done = update(source, out)
    assert (done.unchanged, done.compared, done.versions) == (42, 0, {})


def test_a_plan_is_of_all_parts(out: Path, more: Path) -> None:
    with pytest.raises(OptionError, match="part: a plan is of all parts"):
        append(more, out, plan=True, part="1/2")
    assert not (out / WORK).exists()


def test_an_update_is_none_of_a_plan_of_an_append(out: Path, source: Path, more: Path) -> None:
    append(more, out, plan=True)
    before = content(out)
    plant(source, {"class0/other.jpg": noise("o", 300)})
    with pytest.raises(SourceChangedError, match="--restart"):
        update(source, out)
    assert content(out) == before
    assert update(source, out, restart=True).new == 1
    assert len(keys_of(out)) == 25


def test_restart_is_passed_on_by_the_command(out: Path, more: Path, tmp_path: Path) -> None:
    append(more, out, jobs=1, part="1/2")
    other = plant(tmp_path / "other", {"class2/x.jpg": noise("x", 300)})
    assert "--restart" in shardio("append", other, out, code=1).stderr
    assert shardio_json("append", other, out, "--restart")["added"] == 1


def test_classes_that_others_brought_meanwhile_are_not_renamed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    folders = {
        name: plant(tmp_path / name, {f"{name}/{i}.jpg": noise(f"{name}{i}", 300) for i in "12"})
        for name in "acde"
    }
    api.pack(folders["a"], out, jobs=1)
    first = api.log(out).versions[0].id
    append(folders["c"], out, jobs=1)
    other = api.log(out).versions[0].id
    api.restore(out, first)
    append(folders["d"], out, jobs=1)
    append(folders["e"], out, jobs=1, part="1/1")
    api.restore(out, other)
    with pytest.raises(BusyError, match="something else changed this dataset meanwhile"):
        commit(out, jobs=1)
    assert api.open(out).classes == ["a", "c"]


# --- of an update ---------------------------------------------------------------------------------


def alter(source: Path) -> Path:
    """One new file in a new class, nine others, two that change, one that is gone, one touched."""
    plant(source, {key: data for key, data in NEW.items() if str(key).startswith("class1")})
    plant(source, {"zebra/new.jpg": noise("z", 500), "class1/001.jpg": noise("anew", 700)})
    old = source / "class2/001.jpg"
    old.write_bytes(noise("as long", old.stat().st_size))
    (source / "class0/002.jpg").unlink()
    os.utime(source / "class0/003.jpg", (1, 1))
    return source


@pytest.fixture
def updated(out: Path, source: Path, tmp_path: Path) -> dict[bytes, bytes | None]:
    """What an update without parts makes of `out`, once its source is altered."""
    alter(source)
    shutil.copytree(out, tmp_path / "whole")
    update(source, tmp_path / "whole", jobs=1)
    return content(tmp_path / "whole")


def update_parts(source: Path, out: Path, count: int = 3, **options: Any) -> Any:
    for part in range(count, 0, -1):
        done = update(source, out, jobs=1, part=(part, count), **options)
        assert done.part == (part, count) and not done.versions
    return commit(out, jobs=1)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("first", [False, True], ids=["noted", "first"])
def test_parts_update_what_one_process_does(
    out: Path, source: Path, tmp_path: Path, planned: bool, first: bool, monkeypatch: Any
) -> None:
    if not first:
        update(source, out, jobs=1)
    alter(source)
    shutil.copytree(out, tmp_path / "whole")
    update(source, tmp_path / "whole", jobs=1)
    if planned:
        done = update(source, out, plan=True, jobs=1)
        assert (done.new, done.changed, done.gone, done.unchanged) == (10, 2, 1, 21)
        assert done.planned and done.shards == 3 and done.classes == ["zebra"]
        unlisted(monkeypatch)
        again = update(source, out, dry_run=True)
        assert (again.new, again.changed, again.gone, again.unchanged) == (10, 2, 1, 21)
    (done,) = update_parts(source, out)
    monkeypatch.undo()
    said = str(done)
    assert "2 of these replace a record" in said and "new classes: zebra" in said
    assert "1 record dropped, which the source has not any more" in said
    assert f"version {log(out).versions[0].id}" in said
    assert content(out) == content(tmp_path / "whole")
    assert log(out).versions[0].changes == {"added": 12, "replaced": 2, "dropped": 1}
    again = update(source, out)
    assert (again.unchanged, again.compared, again.versions) == (33, 0, {})


def test_an_update_that_drops_alone_is_committed_once(
    out: Path, source: Path, tmp_path: Path
) -> None:
    update(source, out)
    (source / "class0/002.jpg").unlink()
    shutil.copytree(out, tmp_path / "whole")
    update(source, tmp_path / "whole")
    assert update(source, out, part="1/2").built == update(source, out, part="2/2").built == 0
    shutil.copytree(out / WORK, tmp_path / "kept")
    (done,) = commit(out)
    assert done.committed and done.version == log(out).versions[0].id
    assert content(out) == content(tmp_path / "whole")
    shutil.copytree(tmp_path / "kept", out / WORK)  # as a kill before the last step leaves it
    (done,) = commit(out)
    assert (done.already, done.committed) == (True, False) and "already committed" in str(done)
    assert content(out) == content(tmp_path / "whole")
    shutil.copytree(tmp_path / "kept", out / WORK)
    assert update(source, out, part="1/1").built == 0
    with pytest.raises(NotPackedError, match="nothing to commit"):
        commit(out)  # since the part saw that nothing is left to do
    assert not any((out / WORK).iterdir())


@pytest.mark.parametrize("parts", [True, False])
def test_a_plan_to_drop_alone_is_gone_on_with(
    out: Path, source: Path, parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = sorted(source.rglob("*.jpg"))
    for one in left[:14]:
        one.unlink()  # more than half, so that it is to be said
    assert update(source, out, plan=True, gone="drop").gone == 14
    planned = (out / WORK / ".shardio-plan").read_bytes()
    unlisted(monkeypatch)
    if parts:
        for part in ("1/2", "2/2"):
            assert update(source, out, part=part).built == 0
        assert (out / WORK / ".shardio-plan").read_bytes() == planned
        commit(out)
    else:
        assert update(source, out).gone == 14
    assert len(keys_of(out)) == len(left) - 14 and not (out / WORK).exists()


def test_a_split_of_which_records_only_go_is_part_of_a_plan(split: tuple[Path, Path]) -> None:
    out = split[1]
    source = plant(out.parent / "src", {"train/class0/n.jpg": noise("n", 300)})
    (source / "val/class0/001.jpg").unlink()
    update(source, out, plan=True)
    assert update(source, out, jobs=1).versions.keys() == {"test", "train", "val"}
    assert "class0/001.jpg" not in keys_of(out / "val")


def test_without_part_an_update_goes_on_with_what_parts_built(
    out: Path, source: Path, updated: Any
) -> None:
    update(source, out, jobs=1, part=(2, 3))
    there = {path.name: path.stat().st_ino for path in (out / WORK).glob("*.shard")}
    update(source, out, jobs=1)
    assert {name: (out / name).stat().st_ino for name in there} == there and there
    assert content(out) == updated


def test_a_part_of_an_update_that_is_killed_is_run_again(
    out: Path, source: Path, updated: Any
) -> None:
    line = ("update", source, out, "--jobs", "1")
    program = Program("-m", "support.held_packing", "2", *line, "--part", "2/2", limit_s=LIMIT_S)
    while len(list((out / WORK).glob("*.shard"))) < 1:
        assert not program.ended(), program.finish()
        time.sleep(0.01)  # nothing tells what another process has written
    program.kill()
    program.finish()
    said = shardio(*line, "--part", "1/2").stdout
    assert "built (1 of 2, not committed)" in said and "new classes" not in said
    assert f"next: shardio commit {out}, when all parts are built" in said
    assert (
        "1 of 3 shards are not built: 2; of parts 2"
        in shardio("commit", out, "--parts", "2", code=1).stderr
    )
    assert shardio_json(*line, "--part", "2/2")["part"] == [2, 2]
    (done,) = shardio_json("commit", out)["datasets"]
    assert done["version"] == log(out).versions[0].id
    assert content(out) == updated


def test_splits_are_updated_by_one_commit(split: tuple[Path, Path], tmp_path: Path) -> None:
    out, source = split[1], tmp_path / "src"
    plant(source, {"train/class9/n.jpg": noise("n", 300)})
    (source / "val/class0/001.jpg").unlink()
    shutil.copytree(out, tmp_path / "whole")
    update(source, tmp_path / "whole", jobs=1)
    done = update_parts(source, out, 2)
    assert [(one.split, one.records) for one in done] == [("test", 0), ("train", 1), ("val", 0)]
    assert str(done).count("new classes") == 0 and "new classes: class9" in str(done[0])
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize("what", ["append", "erase", "branch", "drop", "restore"])
def test_what_comes_between_the_parts_of_an_update_and_its_commit(
    out: Path, source: Path, tmp_path: Path, what: str
) -> None:
    first = log(out).versions[0].id
    if what == "branch":
        append(plant(tmp_path / "a", {"class0/a.jpg": noise("a", 300)}), out, jobs=1)
        other = log(out).versions[0].id
        restore(out, first)
        append(plant(tmp_path / "b", {"class0/b.jpg": noise("b", 300)}), out, jobs=1)
    elif what == "restore":
        drop(out, keys=["class0/002.jpg"])
    alter(source)
    for part in ("1/2", "2/2"):
        update(source, out, jobs=1, part=part)
    if what == "append":
        append(plant(tmp_path / "b", {"class0/b.jpg": noise("b", 300)}), out, restart=True)
        for part in ("1/2", "2/2"):
            update(source, out, jobs=1, part=part)
        with Writer(out, append=True) as writer:
            writer.write({"__key__": "class0/b", "image": noise("p", 300), "label": 0})
    elif what == "erase":
        drop(out, keys=["class2/003.jpg"], erase=True)
    elif what == "branch":
        restore(out, other)
    elif what == "drop":
        drop(out, keys=["class0/002.jpg", "class2/003.jpg"])
    else:
        restore(out, first)
    if what in ("append", "erase", "branch"):
        before = log(out).versions
        with pytest.raises(BusyError, match=r"meanwhile\. Nothing was committed: run the parts"):
            commit(out)
        assert log(out).versions == before
        update_parts(source, out, 2)
    else:
        commit(out)
    there = set(keys_of(out))
    expected = {path.relative_to(source).as_posix() for path in source.rglob("*.jpg")}
    hidden = {"drop": {"class2/003.jpg"}, "restore": {"class0/002.jpg"}}.get(what, set())
    assert there ^ expected == hidden and verify(out).damages == []


@pytest.mark.parametrize("planned", [True, False])
def test_what_was_erased_meanwhile_is_not_brought_back_by_an_update_in_parts(
    out: Path, source: Path, tmp_path: Path, planned: bool
) -> None:
    alter(source)
    if planned:
        update(source, out, plan=True)
    update(source, out, part="1/1", jobs=1)
    shutil.move(out / WORK, tmp_path / "kept")  # as one of another machine, for a store
    drop(out, keys=["class1/001.jpg"], erase=True)
    shutil.move(tmp_path / "kept", out / WORK)
    before = log(out).versions
    said = r"by the keys class1/001\.jpg\. Nothing was committed.*`shardio update --restart`"
    for _ in range(2):
        with pytest.raises(BusyError, match=said):
            commit(out)
    assert log(out).versions == before
    (source / "class1/001.jpg").unlink()  # as it says
    update(source, out, plan=True, restart=True)
    update_parts(source, out, 2)
    assert "class1/001.jpg" not in keys_of(out) and "zebra/new.jpg" in keys_of(out)


def test_wrong_parts_of_an_update_are_named(out: Path, source: Path, more: Path) -> None:
    alter(source)
    with pytest.raises(OptionError, match="part: a plan is of all parts"):
        update(source, out, plan=True, part="1/2")
    update(source, out, part="1/2", jobs=1)
    before = content(out)
    with pytest.raises(SourceChangedError, match="other records are to go"):
        update(source, out, part="2/2", gone="keep", jobs=1)
    with pytest.raises(SourceChangedError, match="it was begun by `shardio update`"):
        append(more, out, part="1/2", jobs=1)
    assert content(out) == before
    update(source, out, plan=True, restart=True)
    with pytest.raises(OptionError, match=r"update --plan`, and it says .*leave out --checksum"):
        update(source, out, part="1/2", gone="keep")


def test_what_a_forged_plan_says_of_records_is_an_error(
    out: Path, source: Path, monkeypatch: Any
) -> None:
    alter(source)
    before = log(out).versions
    for found in (
        {"gone": np.array([24])},
        {"noted": np.array([-1]), "sizes": np.array([1]), "times": np.array([1])},
        {"noted": np.array([999]), "sizes": np.array([1]), "times": np.array([1])},
        {"times": np.array([1])},
        {"gone": [1]},
        {"must_commit": 1},
    ):
        with monkeypatch.context() as patch:
            patch.setattr("shardio.packing.plan.Differences._asdict", _forged(found))
            update(source, out, part="1/1", restart=True)
        with pytest.raises(DamageError, match=r"--restart`?,? drops it"):
            commit(out)
    assert log(out).versions == before


def test_a_forged_plan_of_no_shards_is_an_error_too(
    out: Path, source: Path, monkeypatch: Any
) -> None:
    update(source, out)
    (source / "class0/001.jpg").unlink()
    found = {"gone": np.array([], np.int64), "must_commit": True}
    found |= {"noted": np.array([999]), "sizes": np.array([1]), "times": np.array([1])}
    with monkeypatch.context() as patch:
        patch.setattr("shardio.packing.plan.Differences._asdict", _forged(found))
        update(source, out, part="1/1")
    with pytest.raises(DamageError, match=r"of records that there are not.*--restart` drops it"):
        commit(out)
    assert update(source, out, restart=True).gone == 1


def test_a_plan_of_an_unknown_command_is_an_error(
    out: Path, more: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        real = journal.dump
        patch.setattr(journal, "dump", lambda one: real(replace(one, command="merge")))
        append(more, out, part="1/1", jobs=1)
    with pytest.raises(DamageError, match=r"its command is 'merge'\. .*--restart"):
        commit(out)
    append(more, out, restart=True)


def test_what_parts_leave_out_is_told_as_it_is(out: Path, source: Path) -> None:
    bad = plant(source, {"class0/bad.jpg": b"no image"}) / "class0/bad.jpg"
    done = update(source, out, part="1/1", on_error="skip")
    assert done.built == 0 and f"{out}: 0 records built (1 of 1, not committed)" in str(done)
    assert "rejected.jsonl is to list them, once this is committed" in str(done)
    assert commit(out)[0].committed
    update(source, out, part="1/1", on_error="skip")
    (again,) = commit(out)
    assert not again.committed and "no new version: all new files were left out" in str(again)
    assert "rejected.jsonl lists them" in str(update(source, out, on_error="skip", checksum=True))
    bad.write_bytes(noise("good", 300))
    for grow in (append, update):
        tried = grow(
            source,
            out,
            plan=True,
            dry_run=True,
            **({"on_duplicate": "skip"} if grow is append else {}),
        )
        assert tried.dry_run and not tried.planned and "planned" not in str(tried)
        assert "shard" not in str(tried)


def _forged(found: Any) -> Any:
    real = Differences._asdict
    return lambda one: real(one) | found
