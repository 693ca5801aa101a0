"""Unfinished work that holds records that are erased: it is refused, or goes; none comes back."""

import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.trees import noise, plant, shardio

import shardio as api
from shardio import BusyError, NotPackedError, OptionError, append, commit, verify
from shardio.errors import DamageError, ExistsError
from shardio.packing.drop import drop
from shardio.packing.gc import gc
from shardio.packing.journal import WORK
from shardio.packing.update import update
from shardio.packing.versions import log
from shardio.storage import lock

NEW = {f"class1/new{i}.jpg": noise(f"new{i}", 400) for i in range(8)}
GONE, KEPT = "class1/new3.jpg", "class1/new4.jpg"


@pytest.fixture
def more(tmp_path: Path) -> Path:
    """A folder of 8 files that `out` does not have, and one that it has, with other bytes."""
    return plant(tmp_path / "more", {**NEW, "class0/003.jpg": noise("another", 700)})


@pytest.fixture
def begun(out: Path, more: Path) -> Path:
    """A dataset to which a part of several was built for an append."""
    append(more, out, jobs=1, part="1/2", on_duplicate="replace")
    append(more, out, jobs=1, part="2/2", on_duplicate="replace")
    return out


def keys_of(out: Path) -> list[str]:
    return api.open(out, decode=None).keys()


def holds(out: Path, key: str) -> list[str]:
    """The files that have the key of a record, or its image."""
    images = {**NEW, "class0/003.jpg": noise("another", 700)}
    texts = [key.encode(), *(images[one][8:40] for one in images if one == key)]
    files = [path for path in out.rglob("*") if path.is_file()]
    return [str(one) for one in files if any(text in one.read_bytes() for text in texts)]


@pytest.mark.parametrize("key", [GONE, "class0/003.jpg"])
def test_a_record_of_an_unfinished_append_is_not_erased_behind_its_back(
    begun: Path, more: Path, key: str
) -> None:
    before, there = keys_of(begun), sorted(os.listdir(begun / WORK))
    for dry_run in (True, False):
        with pytest.raises(ExistsError, match=f"an unfinished `shardio append`.*erased: {key}"):
            drop(begun, keys=[key], erase=True, dry_run=dry_run)
    assert keys_of(begun) == before and sorted(os.listdir(begun / WORK)) == there
    commit(begun)  # as the message says
    drop(begun, keys=[key], erase=True)
    gc(begun, keep_s=0)
    assert holds(begun, key) == [] and len(keys_of(begun)) == 24 + 8 - 1


@pytest.mark.parametrize("key", [GONE, "class0/003.jpg"])
def test_restart_drops_it_and_nothing_of_the_record_stays(begun: Path, key: str) -> None:
    told = drop(begun, keys=[key], erase=True, restart=True, dry_run=True)
    assert told.unfinished == [str(begun / WORK)] and (begun / WORK).exists()
    done = drop(begun, keys=[key], erase=True, restart=True)
    assert done.unfinished == told.unfinished and done.missing == []
    assert f"unfinished work with them removed: {begun / WORK}" in str(done)
    gc(begun, keep_s=0)
    assert holds(begun, key) == [] and not (begun / WORK).exists()
    assert verify(begun, dropped=[key]).damages == []
    with pytest.raises(NotPackedError, match="nothing to commit"):
        commit(begun)
    assert key not in keys_of(begun)


def test_other_records_are_erased_and_it_goes_on(begun: Path, more: Path) -> None:
    drop(begun, keys=["class0/001.jpg"], erase=True)
    gc(begun, keep_s=0)
    (done,) = commit(begun)
    assert done.records == 9 and len(keys_of(begun)) == 24 - 1 + 8
    assert holds(begun, "class0/001.jpg") == [] and verify(begun).damages == []


def test_what_was_committed_and_not_cleaned_up_goes_unasked(
    out: Path, more: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files have two names then."""
    with monkeypatch.context() as patch:
        patch.setattr("shardio.packing.output_dir.Owner.clean", lambda self: self.release())
        append(more, out, jobs=1, on_duplicate="replace")
    assert any(WORK in one for one in holds(out, GONE))
    drop(out, keys=[GONE], erase=True)
    gc(out, keep_s=0)
    assert holds(out, GONE) == [] and not (out / WORK).exists()
    assert len(keys_of(out)) == 24 + 8 - 1


def test_an_update_that_was_interrupted_counts_too(
    out: Path, more: Path, dead_on_shard: Any
) -> None:
    dead_on_shard(7)
    with pytest.raises(BaseException):  # noqa: B017 - as a crash does
        update(more, out, jobs=1, gone="keep")
    with pytest.raises(ExistsError, match="append` or `update` is here"):
        drop(out, keys=[GONE], erase=True)


def test_of_a_damaged_plan_nobody_knows(begun: Path) -> None:
    plan = begun / WORK / lock.JOURNAL
    data = bytearray(plan.read_bytes())
    data[-40] ^= 1
    plan.write_bytes(data)
    with pytest.raises(DamageError, match="plan"):
        drop(begun, keys=["class0/001.jpg"], erase=True)
    assert "class0/001.jpg" in keys_of(begun)
    drop(begun, keys=["class0/001.jpg"], erase=True, restart=True)
    gc(begun, keep_s=0)
    assert not (begun / WORK).exists() and holds(begun, GONE) == []


def _hold(folder: str, held: Any, done: Any) -> None:
    with lock.hold_all(folder):
        held.set()
        done.wait()


def test_while_somebody_works_on_it_nothing_is_erased(begun: Path) -> None:
    fork = multiprocessing.get_context("fork")
    held, done = fork.Event(), fork.Event()
    other = fork.Process(target=_hold, args=(str(begun / WORK), held, done))
    other.start()
    files = sorted(os.listdir(begun))
    try:
        held.wait()
        with pytest.raises(BusyError, match="another shardio process is packing here"):
            drop(begun, keys=["class0/003.jpg"], erase=True, restart=True)
        assert "class0/003.jpg" in keys_of(begun) and len(log(begun).versions) == 1
        assert sorted(os.listdir(begun)) == files  # it is told before long work
    finally:
        done.set()
        other.join()


def test_of_splits_that_with_the_record_goes(tmp_path: Path) -> None:
    names = [f"{split}/c/{split}{i}.jpg" for split in ("train", "val") for i in "012"]
    out, new = tmp_path / "out", {n.replace(".", "new."): noise(n, 900) for n in names}
    api.pack(plant(tmp_path / "src", {n: noise(n, 900) for n in names}), out, jobs=1)
    append(plant(tmp_path / "new", new), out, jobs=1, part="1/1")
    with pytest.raises(ExistsError):
        drop(out, keys=["c/val0.jpg", "c/val1new.jpg"], erase=True)
    drop(out, keys=["c/val0.jpg", "c/val1new.jpg"], erase=True, restart=True)
    assert (out / "train" / WORK).exists() and not (out / "val" / WORK).exists()
    gc(out, keep_s=0)
    assert verify(out, dropped=["c/val0.jpg", "c/val1new.jpg"]).damages == []
    with pytest.raises(NotPackedError, match="val"):
        commit(out)


def test_the_command_says_what_to_do(begun: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text(f"{GONE}\n")
    call = ("drop", begun, "--keys", tmp_path / "keys.txt", "--erase")
    assert "or drop it, too, by --restart" in shardio(*call, code=1).stderr
    assert "unfinished work with them removed" in shardio(*call, "--restart").stdout
    with pytest.raises(OptionError, match="restart: without erase"):
        drop(begun, keys=[GONE], restart=True)


def test_what_is_found_in_it_says_how_it_goes(begun: Path) -> None:
    found = verify(begun, dropped=[GONE]).damages
    assert any("did not finish here: `shardio drop --erase`" in one.what for one in found)
    shutil.rmtree(begun / WORK)
    assert verify(begun, dropped=[GONE]).damages == []
