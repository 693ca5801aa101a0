"""The journal: the plan on disk, whole or damaged, held by a lock, gone with the commit."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.packing import pack_one
from support.trees import (
    JPEG,
    content,
    noise,
    shardio,
)

from shardio.dataset import sequence as sequences
from shardio.errors import (
    BusyError,
    DamageError,
    ExistsError,
    NotPackedError,
    SourceChangedError,
    StorageError,
)
from shardio.packing import journal
from shardio.packing.gc import gc
from shardio.packing.options import PackOptions
from shardio.packing.pack import pack
from shardio.packing.plan import Plan, Rows, make_plan
from shardio.packing.sources import imagefolder
from shardio.packing.sources.base import SourceRequest
from shardio.packing.verify import verify
from shardio.storage import lock


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
    assert change not in ("size", "mtime") or "was changed" in str(caught.value)
    assert ("seed" if change == "option" else "class1/") in str(caught.value)
    assert content(tmp_path / "out") == before
    done = pack_one(source, tmp_path / "out", restart=True, **options)
    assert done.kept == 0
    pack_one(source, tmp_path / "one", **options)
    assert content(tmp_path / "one") == content(tmp_path / "out")


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


def head(folder: Path, data: bytes) -> bytes:
    """Return what is read of a journal as a whole."""
    (folder / lock.JOURNAL).write_bytes(data)
    return lock.head(str(folder))


def test_a_journal_reads_back_and_every_flipped_byte_is_damage(
    source: Path, tmp_path: Path
) -> None:
    made = make_plan(
        imagefolder.image_folder(SourceRequest(os.fsencode(source)))[""],
        PackOptions(shard_size=1000, max_records=3, shuffle=True),
    )
    data = b"".join(journal.dump(made))

    def parsed(data: bytes) -> tuple[Plan, list[Rows], list[Any]]:
        read = journal.parse(
            head(tmp_path, data), "x", lambda start, length: data[start : start + length]
        )
        return read, [*read.all_rows()], [*read.problems]

    read, rows, problems = parsed(data)
    assert read.same(made)
    assert len(head(tmp_path, data)) < len(data) - sum(len(key) for one in rows for key in one.keys)
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


@pytest.mark.parametrize("name", ["bounds", "shard_bytes"])
def test_numbers_of_another_type_are_damage(source: Path, tmp_path: Path, name: str) -> None:
    """Under a right checksum: numbers of 32 bits would overflow where the plan is used."""
    listing = imagefolder.image_folder(SourceRequest(os.fsencode(source)))[""]
    plan = make_plan(listing, PackOptions(max_records=3))
    for wrong in (getattr(plan, name).astype(np.int32), getattr(plan, name)[:, None]):
        data = b"".join(journal.dump(replace(plan, **{name: wrong})))
        with pytest.raises(DamageError, match="its numbers are of another type"):
            journal.parse(head(tmp_path, data), "x")


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
