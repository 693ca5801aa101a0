"""One packing: resumed where it stopped, written over another, and cleaned up after a kill."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.packing import inodes, keys, pack_one
from support.trees import (
    content,
    noise,
    shards,
)

from shardio.dataset import sequence as sequences
from shardio.errors import (
    ExistsError,
    NotPackedError,
    SourceChangedError,
)
from shardio.packing import journal
from shardio.packing.commit import commit
from shardio.packing.unpack import unpack
from shardio.packing.verify import verify
from shardio.storage import local, lock


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
