"""gc removes what no manifest names, when it is old enough and provably shardio's."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.packing import grouped
from support.trees import JPEG, content, plant, shardio, shardio_json, shards

from shardio.dataset import sequence as sequences
from shardio.errors import BusyError, DamageError, NotPackedError
from shardio.formats import manifest
from shardio.formats.lmdb import START
from shardio.packing import journal
from shardio.packing.gc import gc
from shardio.packing.index import index
from shardio.packing.options import PlanOptions
from shardio.packing.pack import pack
from shardio.storage import local, lock
from shardio.storage.location import locate

DAY = 24 * 3600


@pytest.fixture
def out(source: Path, tmp_path: Path) -> Path:
    """A dataset that has replaced another."""
    for seed in (0, 1):
        pack(
            source,
            tmp_path / "out",
            jobs=1,
            overwrite=True,
            plan=PlanOptions(max_records=8, seed=seed),
        )
    return tmp_path / "out"


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(path, (then, then))


def age_all(out: Path, days: float) -> None:
    for path in out.iterdir():
        age(path, days)


def unfinished(source: Path, out: Path, **options: Any) -> None:
    """Build half of a packing and stop."""
    pack(source, out, **grouped({"jobs": 1, "max_records": 8, "part": (1, 2)} | options))


def test_replaced_shards_stay_for_a_day_and_then_go(out: Path) -> None:
    assert len(shards(out)) == 6
    young = gc(out)
    assert (young.removed, len(young.kept)) == ([], 3)
    age_all(out, 1.1)
    done = gc(out)
    assert (len(done.removed), done.kept) == (3, [])
    assert done.bytes > 0
    assert len(list(sequences.stored(out))) == 24


def test_old_shards_replaced_a_moment_ago_stay(out: Path) -> None:
    age_all(out, 30)
    age(out / "manifest.json", 0)  # readers of the old one may be at work
    assert gc(out).removed == []
    assert len(gc(out, keep_s=0).removed) == 3


def test_what_is_not_shardios_stays_whatever_its_name(out: Path) -> None:
    mine = {
        "00007-01234567.shard": b"mine",
        "notes.txt": b"mine",
        ".shardio-0123456789abcdef-x.tmp": b"mine",
        ".shardio-rejected-mine.jsonl": b"mine",
        "folder/x": b"mine",
    }
    plant(out, mine)
    gc(out, keep_s=0)
    left = content(out)
    assert all(left[name.encode()] == data for name, data in mine.items())


@pytest.mark.parametrize("left", [8, 100, -1])
def test_damaged_shards_go_once_no_version_names_them(source: Path, out: Path, left: int) -> None:
    now = manifest.load(locate(out))
    named = {now.shard(number).name for number in range(now.shards)}
    old = next(path for path in shards(out) if path.name not in named)
    current = next(path for path in shards(out) if path.name in named)
    for path in (old, current):
        os.truncate(path, left if left > 0 else path.stat().st_size - 1)
    lmdb = START + bytes(100)
    plant(out, {"00007-01234567.lmdb": lmdb, "other.shard": old.read_bytes()})
    assert str(old) in gc(out, keep_s=0, dry_run=True).removed
    unfinished(source, out, overwrite=True, seed=2)
    gc(out, keep_s=0)
    assert old.exists()  # it may be of what is unfinished
    (out / lock.JOURNAL).unlink()
    gc(out, keep_s=0)
    assert not old.exists() and current.exists() and (out / "other.shard").exists()
    assert (out / "00007-01234567.lmdb").read_bytes() == lmdb


def test_temporary_files_of_dead_packers_go(out: Path) -> None:
    tree = {
        ".shardio-0123456789abcdef-00003.tmp": b"\x89SHD\r\n\x1a\nhalf a shard",
        ".shardio-0123456789abcdef-00004.tmp": b"",
        ".shardio-0123456789abcdef-manifest.json.tmp": b'{\n"format": "shardio"',
        ".shardio-rejected-00001-01234567.jsonl": b'{"key": "x", "reason": "y"}\n',
    }
    before = content(out)
    plant(out, tree)
    removed = {Path(path).name for path in gc(out, keep_s=0).removed}
    assert removed >= tree.keys()
    assert len(removed) == 7
    assert content(out).items() <= before.items()


def test_an_unfinished_packing_stays_and_can_go_on(source: Path, out: Path) -> None:
    unfinished(source, out, overwrite=True, seed=2)
    age_all(out, 30)
    before = set(content(out))
    done = gc(out, keep_s=0)
    assert len(done.removed) == 3  # of seed 0 only
    assert (out / lock.JOURNAL).exists()
    [finished] = pack(source, out, jobs=1, overwrite=True, plan=PlanOptions(max_records=8, seed=2))
    assert finished.kept == 1
    assert before


def test_old_shards_of_the_same_id_go_though_its_packing_is_unfinished(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for seed in (0, 1):
        pack(source, out, jobs=1, overwrite=True, plan=PlanOptions(max_records=8, seed=seed))
    changed = source / "class0" / "000.jpg"
    changed.write_bytes(changed.read_bytes()[:-1] + b"!")
    unfinished(source, out, overwrite=True, seed=0)  # beside old shards of seed 0
    _, before = journal.identity(lock.head(str(out)))
    new = {n for n, t in journal.shards_in(str(out)).items() if before.get(n) != t}
    gc(out, keep_s=0)
    assert new <= {path.name for path in shards(out)}
    assert len(shards(out)) == 3 + len(new)


def test_a_packing_that_was_committed_and_killed_is_cleaned_up(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(journal, "clean", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pack(source, tmp_path / "out", jobs=1)
    assert len(gc(tmp_path / "out", keep_s=0).removed) == 1
    assert not (tmp_path / "out" / lock.JOURNAL).exists()


def test_gc_refuses_while_a_packer_works(source: Path, out: Path) -> None:
    unfinished(source, out, overwrite=True, seed=2)
    before = content(out)
    held = lock.take(str(out), 1, 2)  # one part is enough
    try:
        with pytest.raises(BusyError):
            gc(out, keep_s=0)
        shardio("gc", out, "--keep", "0", code=5)
    finally:
        held.release()
    assert content(out) == before


def test_links_and_files_that_vanish_are_no_crash(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (out / "00009-01234567.shard").symlink_to("nowhere")
    (out / ".shardio-0123456789abcdef-x.tmp").symlink_to("nowhere")
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [*real(path), "00008-01234567.shard"])
    assert len(gc(out, keep_s=0).removed) == 3
    assert (out / "00009-01234567.shard").is_symlink()


def test_a_packer_that_begins_while_files_are_removed_is_refused(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = local.remove
    tried = []

    def remove(path: str) -> None:
        if path.endswith(".shard") and not tried:
            tried.append(shardio("pack", source, out, "--seed", "0", "--overwrite", code=5))
        real(path)

    monkeypatch.setattr(local, "remove", remove)
    assert len(gc(out, keep_s=0).removed) == 3
    assert tried
    assert not list(out.glob(".shardio*"))


def test_a_packer_that_began_just_now_stops_gc(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = lock.begin

    def begin(directory: str, fresh: Any) -> bytes | None:
        monkeypatch.setattr(lock, "begin", real)
        unfinished(source, out, overwrite=True, seed=2)
        return real(directory, fresh)

    monkeypatch.setattr(lock, "begin", begin)
    with pytest.raises(BusyError, match="just now"):
        gc(out, keep_s=0)
    assert len(shards(out)) == 7


def test_what_a_killed_gc_leaves_is_dropped_by_the_next_packer(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(local, "remove", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gc(out, keep_s=0)
    assert (out / lock.JOURNAL).exists()
    assert len(sequences.open(out)) == 24
    [done] = pack(source, out, jobs=1, overwrite=True, plan=PlanOptions(max_records=8, seed=2))
    assert done.committed
    assert not (out / lock.JOURNAL).exists()


def test_gc_with_nothing_to_remove_and_a_dry_run_touch_nothing(out: Path) -> None:
    before = content(out), out.stat().st_mtime_ns
    assert gc(out).removed == []
    assert len(gc(out, keep_s=0, dry_run=True).removed) == 3
    assert (content(out), out.stat().st_mtime_ns) == before


def test_gc_needs_a_whole_manifest(source: Path, tmp_path: Path) -> None:
    unfinished(source, tmp_path / "out")
    with pytest.raises(NotPackedError):
        gc(tmp_path / "out")
    pack(source, tmp_path / "done", jobs=1)
    (tmp_path / "done" / "manifest.json").write_bytes(b"?")
    before = content(tmp_path / "done")
    with pytest.raises(DamageError):
        gc(tmp_path / "done", keep_s=0)
    assert content(tmp_path / "done") == before


def test_all_splits_are_cleaned(tmp_path: Path) -> None:
    source = plant(tmp_path / "src", {"train/a/1.jpg": JPEG, "val/a/1.jpg": JPEG})
    for seed in (0, 1):
        pack(
            source,
            tmp_path / "out",
            jobs=1,
            resize=None,
            overwrite=True,
            plan=PlanOptions(seed=seed),
        )
    assert len(gc(tmp_path / "out", keep_s=0).removed) == 2


def test_the_command_says_what_it_removed(out: Path) -> None:
    assert "3 younger than --keep stay" in shardio("gc", out).stdout
    lines = shardio("gc", out, "--keep", "0s", "--dry-run").stdout.splitlines()
    assert len(lines) == 4
    assert "would be removed" in lines[-1]
    assert len(shardio_json("gc", out, "--keep", "0")["removed"]) == 3
    for wrong in ("", "soon", "-1h", "nan"):
        shardio("gc", out, f"--keep={wrong}", code=2)


@pytest.fixture
def indexed(source: Path) -> Path:
    """A folder of images indexed in place, and once more after an image was added."""
    index(source)
    plant(source, {"class0/new.jpg": JPEG + b"new"})
    index(source, overwrite=True)
    return source


def sidecars(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.index")}


def test_indexes_that_were_replaced_go_and_those_in_use_stay(indexed: Path) -> None:
    assert len(sidecars(indexed)) == 2
    young = gc(indexed)
    assert (young.removed, len(young.kept)) == ([], 1)
    for path in indexed.iterdir():
        age(path, 1.1)
    age(indexed / "manifest.json", 0)
    assert gc(indexed).removed == []
    before = content(indexed)
    dry = gc(indexed, keep_s=0, dry_run=True)
    assert content(indexed) == before
    assert gc(indexed, keep_s=0).removed == dry.removed
    [gone] = before.keys() - content(indexed).keys()
    assert dry.removed == [str(indexed / gone.decode())]
    assert len(list(sequences.stored(indexed))) == 25


def test_what_only_looks_like_an_index_stays(indexed: Path, out: Path) -> None:
    [used] = sidecars(indexed) - {Path(p).name for p in gc(indexed, keep_s=0).removed}
    magic = (indexed / used).read_bytes()[:8]
    mine: dict[str | bytes, bytes | None] = {
        "00000-01234567.index": b"mine",
        "00001-01234567.index": b"",
        "00000-0123456.index": magic,
        "0000-01234567.index": magic,
        "00000-01234567.index.old": magic,
        "x00000-01234567.index": magic,
        "class0/00000-01234567.index": magic,
    }
    ours: dict[str | bytes, bytes | None] = {
        "00001-01234568.index": magic,
        ".shardio-0123456789abcdef-00000-01234567.index.tmp": magic + b"half",
    }
    for folder in (indexed, out):
        plant(folder, {**mine, **ours})
        removed = {Path(path).name for path in gc(folder, keep_s=0).removed}
        assert removed >= ours.keys()
        left = content(folder)
        assert all(left[os.fsencode(name)] == data for name, data in mine.items())
    assert len(list(sequences.stored(indexed))) == 25


def test_nothing_goes_while_an_index_is_made(
    indexed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even what is old by --keep: the manifest that names it is still to come."""
    refused = []
    commit = local.write_file

    def looking(directory: str, name: str, data: bytes, **options: Any) -> None:
        if name == "manifest.json":
            with pytest.raises(BusyError) as caught:
                gc(indexed, keep_s=0)
            refused.append(str(caught.value))
        commit(directory, name, data, **options)

    monkeypatch.setattr(local, "write_file", looking)
    plant(indexed, {"class0/newer.jpg": JPEG + b"newer"})
    index(indexed, overwrite=True, jobs=1)
    assert len(refused) == 1
    assert len(list(sequences.stored(indexed))) == 26


def test_what_a_killed_index_left_goes(indexed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its journal has no lock any more, so that nothing is in progress."""
    plant(
        indexed,
        {
            lock.JOURNAL: journal.of_writer(bytes(16), {}),
            "00007-01234567.index": (indexed / next(iter(sidecars(indexed)))).read_bytes(),
        },
    )
    removed = {Path(path).name for path in gc(indexed, keep_s=0).removed}
    assert {lock.JOURNAL, "00007-01234567.index"} < removed
    assert len(list(sequences.stored(indexed))) == 25
